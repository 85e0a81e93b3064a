"""Simulated faults: what each does to real processes, that it does it once per run, and how it is described."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_resilience.faults import FaultInjector, SimulatedException, SimulatedFault
from lightning_resilience.run.ledger import Ledger
from tests.harness import CONTEXT
from tests.ledgers import read_ledger

AT = 5
STEPS = 20
FOREVER = 3600.0
KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


# -- a training without a Trainer, in processes of its own -------------------------------------------------------------


def train(injector: FaultInjector, rank: Rank) -> None:
    injector.arm()
    for step in range(STEPS):
        injector.at_step(step)
        rank.steps[rank.number] = step + 1
    injector.disarm()


def train_for_long(injector: FaultInjector, rank: Rank) -> None:
    """There are steps until the fault strikes, however late it does; other ranks have none."""
    injector.arm()
    while injector.target_rank == rank.number:
        injector.at_step(rank.steps[rank.number])
        rank.steps[rank.number] += 1
        time.sleep(0.001)


def train_without_a_boundary(injector: FaultInjector, rank: Rank) -> None:
    injector.arm()
    while injector.target_rank == rank.number:
        time.sleep(FOREVER)


def train_in_step(injector: FaultInjector, rank: Rank) -> None:
    store = f"file://{rank.directory}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank.number, world_size=rank.world_size)
    injector.arm()
    for step in range(STEPS):
        injector.at_step(step)
        torch.distributed.all_reduce(torch.ones(1))
        rank.steps[rank.number] = step + 1


def train_on_data(injector: FaultInjector, rank: Rank, workers: int, start_method: str | None) -> None:
    loader = DataLoader(list(range(STEPS)), num_workers=workers, multiprocessing_context=start_method)
    for _ in range(2):  # as before every epoch
        loader.collate_fn = injector.collate(loader.collate_fn)
    injector.arm()
    batches = iter(loader)
    for step in range(STEPS):
        injector.at_step(step)
        assert next(batches).tolist() == [step]
        rank.steps[rank.number] = step + 1


def train_and_note_sigterm(injector: FaultInjector, rank: Rank) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (rank.directory / "noted").touch())
    train(injector, rank)


class Rank:
    """One process of the training.

    It counts its steps, and a thread of it counts for as long as any thread runs. On SIGUSR1 it writes where its main
    thread is, and SIGUSR2 has a handler in Python.
    """

    def __init__(self, directory: Path, number: int, world_size: int, steps: Any, ticks: Any) -> None:
        self.directory = directory
        self.number = number
        self.world_size = world_size
        self.steps = steps
        self.ticks = ticks

    def __call__(self, fault: SimulatedFault, do: Callable[[FaultInjector, Rank], None]) -> None:
        fd = os.open(self.directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 2)
        self._stacks = open(self.directory / f"stacks.{self.number}", "w")
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=False)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        threading.Thread(target=self._tick, daemon=True).start()
        self._pid_file(self.number).write_text(str(os.getpid()))
        injector = FaultInjector(
            fault,
            rank=self.number,
            world_size=self.world_size,
            ledger=Ledger(self.directory / "ledger", self.number),
            seed="seed",
            node_pids=self._pids_of_node,
        )
        do(injector, self)

    def _tick(self) -> None:
        while True:
            self.ticks[self.number] += 1
            time.sleep(0.001)

    def _pid_file(self, number: int) -> Path:
        return self.directory / f"pid.{number}"

    def _pids_of_node(self) -> list[int]:
        """A node has two ranks."""
        first = self.number - self.number % 2
        files = [self._pid_file(number) for number in range(first, first + 2)]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.01)
        return [int(file.read_text()) for file in files]


class Job:
    """Ranks at work."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[Any] = []
        self.steps: Any = []
        self.ticks: Any = []

    def start(self, fault: SimulatedFault, do: Callable[[FaultInjector, Rank], None] = train, ranks: int = 2) -> None:
        self.steps, self.ticks = RawArray("q", ranks), RawArray("q", ranks)
        self.processes = [
            CONTEXT.Process(target=Rank(self.directory, number, ranks, self.steps, self.ticks), args=(fault, do))
            for number in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def run(self, *args: Any, **kwargs: Any) -> list[int]:
        """The exit codes."""
        self.start(*args, **kwargs)
        self.wait_for(lambda: all(process.exitcode is not None for process in self.processes))
        return [process.exitcode for process in self.processes]

    def events(self) -> list[dict[str, Any]]:
        return [e for e in read_ledger(self.directory / "ledger") if e["event"] == "simulated_fault"]

    def text(self) -> str:
        return (self.directory / "output").read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def wait_until_still(self, counter: Any, rank: int) -> None:
        def is_still() -> bool:
            before = counter[rank]
            time.sleep(0.3)
            return bool(counter[rank] == before)

        self.wait_for(is_still)

    def is_in(self, rank: int, function: str) -> bool:
        """Whether the rank's main thread is in a function at this moment."""
        path = self.directory / f"stacks.{rank}"
        before = path.stat().st_size
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        self.wait_for(lambda: path.stat().st_size > before and path.read_text().endswith("in <module>\n"))
        return f" in {function}\n" in path.read_text()[before:]

    def end(self) -> None:
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # it is ending just now
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


# -- what each fault does ----------------------------------------------------------------------------------------------


def test_rank_killed(job: Job) -> None:
    assert job.run(SimulatedFault(fault_type="rank_killed", rank=1, at_step=AT)) == [0, KILLED]
    assert list(job.steps) == [STEPS, AT]
    (event,) = job.events()
    assert (event["fault_type"], event["rank"], event["step"]) == ("rank_killed", 1, AT)
    assert event["pid"] == job.processes[1].pid
    assert job.text() == f"[lightning-resilience] Simulated fault: rank_killed on rank 1 at step {AT}.\n"


def test_rank_hung(job: Job) -> None:
    job.start(SimulatedFault(fault_type="rank_hung", rank=1, at_step=AT))
    job.wait_for(lambda: psutil.Process(job.processes[1].pid).status() == psutil.STATUS_STOPPED)
    assert job.steps[1] == AT
    os.kill(job.processes[1].pid, signal.SIGCONT)
    job.wait_for(lambda: job.processes[1].exitcode == 0)
    assert [event["fault_type"] for event in job.events()] == ["rank_hung"]


def test_random_is_killed_or_hung(tmp_path: Path) -> None:
    made = [injector(tmp_path, SimulatedFault(fault_type="random"), seed=str(n)) for n in range(50)]
    assert {one.fault_type for one in made} == {"rank_killed", "rank_hung"}


def test_exception(job: Job) -> None:
    assert job.run(SimulatedFault(fault_type="exception", rank=1, at_step=AT)) == [0, 1]
    assert f"SimulatedException: simulated on rank 1 at step {AT}\n" in job.text()


def test_stuck_in_collective(job: Job) -> None:
    job.start(SimulatedFault(fault_type="stuck_in_collective", rank=1, at_step=AT), train_in_step)
    job.wait_for(lambda: bool(job.events()))
    job.wait_for(lambda: job.is_in(1, "recv"))
    job.wait_for(lambda: job.is_in(0, "all_reduce"))
    assert list(job.steps) == [AT, AT]  # the message that does not come took no part in a collective


@pytest.mark.parametrize(
    ("workers", "start_method", "stuck_in"), [(0, None, "fetch"), (1, None, "_get_data"), (1, "spawn", "_get_data")]
)
@pytest.mark.slow
def test_stuck_in_data_loader(job: Job, workers: int, start_method: str | None, stuck_in: str) -> None:
    fault = SimulatedFault(fault_type="stuck_in_data_loader", rank=0, at_step=AT)
    job.start(fault, functools.partial(train_on_data, workers=workers, start_method=start_method), ranks=1)
    job.wait_for(lambda: bool(job.events()))
    job.wait_until_still(job.steps, 0)
    ahead = 2 * workers
    assert AT <= job.steps[0] <= AT + ahead
    assert job.is_in(0, stuck_in)
    assert len(psutil.Process(job.processes[0].pid).children()) >= workers


def test_gil_held(job: Job) -> None:
    job.start(SimulatedFault(fault_type="gil_held", rank=1, at_step=AT))
    job.wait_for(lambda: bool(job.events()))
    job.wait_until_still(job.ticks, 1)
    still = job.ticks[1]
    for signum in (signal.SIGUSR2, signal.SIGUSR1):  # what asks the rank where it is does not wake it
        os.kill(job.processes[1].pid, signum)
    time.sleep(0.3)
    assert job.ticks[1] == still
    assert job.steps[1] == AT


def test_slow_rank(job: Job) -> None:
    job.start(SimulatedFault(fault_type="slow_rank", rank=1, at_step=AT, slow_s=FOREVER))
    job.wait_for(lambda: bool(job.events()) and job.is_in(1, "at_step"))
    job.wait_for(lambda: job.steps[0] == STEPS)
    assert job.steps[1] == AT
    assert job.ticks[1] > 0


def test_a_slow_rank_is_slow_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slow = injector(tmp_path, SimulatedFault(fault_type="slow_rank", rank=0, at_step=2, slow_s=0.5))
    slow.arm()
    for step, batches in ((0, 0), (1, 0), (2, 1), (2, 2), (3, 3)):  # an accumulated step has several batches
        slow.at_step(step)
        assert slept == [0.5] * batches
    slow.disarm()
    slow.at_step(4)
    assert len(slept) == 3
    assert len(list(read_ledger(tmp_path / "ledger"))) == 1


@pytest.mark.parametrize("form", ["loss", "mapping", "saved by autograd"])
def test_nan_loss(tmp_path: Path, form: str) -> None:
    weight = torch.ones(3, requires_grad=True)

    def step() -> Any:
        loss = weight.sum().exp() if form == "saved by autograd" else weight.pow(2).mean()
        return {"loss": loss, "other": 1.0} if form == "mapping" else loss

    def loss_of(output: Any) -> torch.Tensor:
        return output["loss"] if form == "mapping" else output

    spoiling = injector(tmp_path, SimulatedFault(fault_type="nan_loss", rank=0, at_step=1))
    spoiling.arm()
    seen = []
    for number in range(3):
        weight.grad = None
        spoiling.at_step(number)
        spoiling.spoil_loss(None)  # a step that is left out has no loss to spoil
        spoiling.spoil_loss({"no loss": 1.0})
        output = step()
        spoiling.spoil_loss(output)
        loss_of(output).backward()
        assert weight.grad is not None
        seen.append((bool(loss_of(output).isnan()), weight.grad.isnan().tolist()))
    good, bad = (False, [False] * 3), (True, [True] * 3)
    assert seen == [good, bad, good]


def test_nan_loss_without_gradients(tmp_path: Path) -> None:
    spoiling = injector(tmp_path, SimulatedFault(fault_type="nan_loss", rank=0, at_step=0))
    spoiling.arm()
    spoiling.at_step(0)
    loss = torch.ones(())
    spoiling.spoil_loss(loss)
    assert loss.isnan()


def test_sigterm(job: Job) -> None:
    fault = SimulatedFault(fault_type="sigterm", rank=1, at_step=AT)
    assert job.run(fault) == [0, TERMINATED]


def test_sigterm_reaches_the_handler(job: Job) -> None:
    assert job.run(SimulatedFault(fault_type="sigterm", rank=1, at_step=AT), train_and_note_sigterm) == [0, 0]
    assert (job.directory / "noted").exists()


def test_node_lost(job: Job) -> None:
    codes = job.run(SimulatedFault(fault_type="node_lost", rank=3, at_step=AT), train_with_idle_peers, ranks=4)
    assert codes == [0, 0, KILLED, KILLED]
    assert [event["rank"] for event in job.events()] == [3]


def train_with_idle_peers(injector: FaultInjector, rank: Rank) -> None:
    """The ranks of the other node end, the lost rank's neighbour would go on for ever."""
    train(injector, rank)
    while rank.number == 2:
        time.sleep(FOREVER)


# -- when and to whom --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault_type", "code"), [("rank_killed", KILLED), ("node_lost", KILLED)])
def test_a_signal_does_not_wait_for_a_boundary(job: Job, fault_type: Any, code: int) -> None:
    fault = SimulatedFault(fault_type=fault_type, rank=1, base_delay_s=0.05, rand_delay_s=0.05)
    assert job.run(fault, train_without_a_boundary)[1] == code


def test_other_faults_wait_for_the_next_boundary(job: Job) -> None:
    assert job.run(SimulatedFault(fault_type="exception", rank=1, base_delay_s=0.05), train_for_long) == [0, 1]
    (event,) = job.events()
    assert event["step"] == job.steps[1]  # in the main thread, where the step is known


def test_the_delay_counts_from_the_step(job: Job) -> None:
    fault = SimulatedFault(fault_type="exception", rank=1, base_delay_s=0.05, at_step=300)
    assert job.run(fault, train_for_long) == [0, 1]  # 300 steps take longer than the delay
    assert job.steps[1] > 300


def test_a_resume_beyond_the_step_is_not_too_late(tmp_path: Path) -> None:
    late = injector(tmp_path, SimulatedFault(fault_type="exception", rank=0, at_step=3))
    late.arm(step=10)
    with pytest.raises(SimulatedException, match="on rank 0 at step 10"):
        late.at_step(10)


def test_all_ranks_agree_on_what_is_chosen_at_random(tmp_path: Path) -> None:
    fault = SimulatedFault(fault_type="random", base_delay_s=1.0, rand_delay_s=2.0)

    def choices(seed: str) -> set[tuple[Any, ...]]:
        ranks = [injector(tmp_path, fault, rank=rank, world_size=4, seed=seed) for rank in range(4)]
        return {(one.target_rank, one.fault_type, one.delay_s) for one in ranks}

    runs = [choices(f"run {number}") for number in range(100)]
    assert all(len(run) == 1 for run in runs)
    ranks, types, delays = zip(*(next(iter(run)) for run in runs), strict=True)
    assert set(ranks) == {0, 1, 2, 3}
    assert set(types) == {"rank_killed", "rank_hung"}
    assert len(set(delays)) == 100
    assert all(1.0 <= delay <= 3.0 for delay in delays)
    assert max(delays) - min(delays) > 1.0


def test_the_choice_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Not by Python's ``hash``, which each process salts for itself."""
    mine = injector(tmp_path, SimulatedFault(fault_type="random", rand_delay_s=1.0), world_size=1000, seed="run")
    script = (
        "from lightning_resilience.faults import *; from lightning_resilience.run.ledger import Ledger; "
        "one = FaultInjector(SimulatedFault(fault_type='random', rand_delay_s=1.0), rank=3, world_size=1000, "
        "ledger=Ledger('/nowhere'), seed='run'); print(one.target_rank, one.fault_type, one.delay_s); "
        "import sys; assert not {'torch', 'lightning', 'pytorch_lightning'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(mine.target_rank), mine.fault_type, str(mine.delay_s)]


def test_nothing_happens_after_the_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = injector(tmp_path, SimulatedFault(fault_type="sigterm", rank=0, base_delay_s=FOREVER))
    before = threading.active_count()
    ended.arm(step=7)
    assert threading.active_count() == before + 1
    ended.disarm()
    ended.disarm()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert caplog.messages == ["The simulated fault sigterm on rank 0 did not happen: the fit ended at step 7."]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (SimulatedFault(fault_type="rank_killed", rank=2, at_step=0), "there is no rank 2 among 1"),
        (SimulatedFault(fault_type="stuck_in_collective", at_step=0), "a single rank has no collectives"),
        (SimulatedFault(fault_type="stuck_in_data_loader", at_step=0), "do not come from a torch DataLoader"),
    ],
)
def test_what_cannot_be_simulated_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: SimulatedFault, reason: str
) -> None:
    one = injector(tmp_path, fault)
    one.arm()
    one.at_step(0)
    one.disarm()
    assert len(caplog.messages) == 1
    assert reason in caplog.text
    assert not (tmp_path / "ledger").exists()


def test_the_loaders_of_other_faults_and_ranks_are_left_alone(tmp_path: Path) -> None:
    killed = injector(tmp_path, SimulatedFault(fault_type="rank_killed", rank=0))
    assert killed.collate(default_collate) is default_collate
    other = injector(tmp_path, SimulatedFault(fault_type="stuck_in_data_loader", rank=1), world_size=2)
    assert other.collate(default_collate) is default_collate


# -- once per run ------------------------------------------------------------------------------------------------------


def test_a_fault_happens_once_per_run(job: Job) -> None:
    fault = SimulatedFault(fault_type="rank_killed", rank=1, at_step=AT, base_delay_s=0)
    assert job.run(fault) == [0, KILLED]
    for _ in range(2):
        assert job.run(fault) == [0, 0]
    assert len(job.events()) == 1
    assert job.run(SimulatedFault(fault_type="rank_killed", rank=0, at_step=AT)) == [KILLED, 0]  # another fault


def test_a_fault_of_any_rank_happens_once_even_if_another_rank_is_chosen_next(tmp_path: Path) -> None:
    fault = SimulatedFault(fault_type="exception", at_step=0)
    struck = 0
    for number in range(20):
        one = injector(tmp_path, fault, rank=0, world_size=2, seed=str(number))
        one.arm()
        try:
            one.at_step(0)
        except SimulatedException:
            struck += 1
    assert struck == 1


def test_a_fault_that_cannot_be_written_down_does_not_happen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    one = injector(tmp_path / "file", SimulatedFault(fault_type="exception", at_step=0))
    one.arm()
    (tmp_path / "file").touch()  # where the ledger's directory would be made
    one.at_step(0)
    assert "would happen again after every restart" in caplog.text
    assert capsys.readouterr().err == ""


def test_a_ledger_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ledger").touch()
    one = injector(tmp_path, SimulatedFault(fault_type="exception", at_step=0))
    one.arm()
    one.at_step(0)
    assert "which records whether it has happened before, cannot be read" in caplog.text


def test_a_damaged_ledger_with_foreign_lines(tmp_path: Path) -> None:
    lines = [
        b'{"event": "simulated_fault"}',
        b'{"event": "simulated_fault", "fault": 3}',
        b'{"event": "simulated_fault", "fault": {"fault_type": "exception"}}',
        b"\xff\x00",
        b'{"event": "simulated_fault", "fa',
    ]
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join(lines))
    fault = SimulatedFault(fault_type="exception", at_step=0)
    for expected in (pytest.raises(SimulatedException), nullcontext()):
        one = injector(tmp_path, fault)
        one.arm()
        with expected:
            one.at_step(0)


# -- how a fault is described ------------------------------------------------------------------------------------------

DESCRIBED = SimulatedFault(fault_type="rank_hung", rank=2, base_delay_s=3.0, rand_delay_s=0.5)


@pytest.mark.parametrize(
    "value",
    [
        DESCRIBED,
        {"fault_type": "rank_hung", "rank": 2, "base_delay_s": 3.0, "rand_delay_s": 0.5},
        {"fault_type": "rank_hung", "rank_to_fail": 2, "base_delay": 3, "rand_delay": 0.5},
        SimpleNamespace(fault_type="rank_hung", rank_to_fail=2, base_delay=3.0, rand_delay=0.5, fault_desc="NVRx's"),
    ],
)
def test_spellings(value: Any) -> None:
    assert SimulatedFault.parse(value) == DESCRIBED


def test_nvrx_own_description() -> None:
    nvrx = pytest.importorskip("nvidia_resiliency_ext.ptl_resiliency")
    theirs = nvrx.SimulatedFaultParams(fault_type="rank_hung", base_delay=3.0, rand_delay=0.5, rank_to_fail=2)
    assert SimulatedFault.parse(theirs) == DESCRIBED


def test_no_fault() -> None:
    assert SimulatedFault.parse(None) is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"fault_type": "meteor"}, ValueError, "one of random, rank_killed, .*, not 'meteor'"),
        ({"fault_type": ["rank_hung"]}, ValueError, "must be one of"),
        ({}, ValueError, "needs a fault_type"),
        ({"fault_type": "rank_hung", "delay": 3}, ValueError, "has no 'delay'; it has fault_type, rank"),
        ({"fault_type": "rank_hung", "rank": 1, "rank_to_fail": 1}, ValueError, "given rank twice"),
        ({"fault_type": "rank_hung", "rank": -1}, ValueError, "rank .* not -1"),
        ({"fault_type": "rank_hung", "rank": True}, ValueError, "rank .* not True"),
        ({"fault_type": "rank_hung", "at_step": 1.5}, ValueError, "at_step .* not 1.5"),
        ({"fault_type": "rank_hung", "at_step": "5"}, ValueError, "at_step .* not '5'"),
        ({"fault_type": "rank_hung", "base_delay": -1}, ValueError, "base_delay_s .* not -1"),
        ({"fault_type": "rank_hung", "base_delay_s": None}, ValueError, "base_delay_s .* not None"),
        ({"fault_type": "rank_hung", "rand_delay_s": float("nan")}, ValueError, "rand_delay_s .* not nan"),
        ({"fault_type": "rank_hung", "rand_delay_s": float("inf")}, ValueError, "rand_delay_s .* not inf"),
        ({"fault_type": "slow_rank", "slow_s": "1"}, ValueError, "slow_s .* not '1'"),
        (3, TypeError, "not 3"),
        ("rank_killed", TypeError, "not 'rank_killed'"),
    ],
)
def test_bad_descriptions(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SimulatedFault.parse(value)


def test_a_fault_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(DESCRIBED)) == DESCRIBED


def injector(
    directory: Path, fault: SimulatedFault, rank: int = 0, world_size: int = 1, seed: str = "seed"
) -> FaultInjector:
    return FaultInjector(fault, rank=rank, world_size=world_size, ledger=Ledger(directory / "ledger", rank), seed=seed)
