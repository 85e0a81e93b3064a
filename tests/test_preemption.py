"""A signal to any rank at any time stops all ranks together, with nothing lost; never a deadlock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import psutil
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_resilience import Interrupted, Preemption, signals
from lightning_resilience.checkpoint import resume
from lightning_resilience.run import deadlines
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, run, run_command, samples
from tests.ledgers import Ledger, read_ledger
from tests.program import DEFAULTS, Module, loader, make_trainer
from tests.test_exact_resume import make, undisturbed

TERM = {"do": "SIGTERM", "once": True}
TWO = {"trainer": {"devices": 2}, "validation": True, "data": "shuffle", "save_every": None}

SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "rank 0 only": [{"at": "train", "step": 20, "rank": 0}],
    "rank 1 only": [{"at": "train", "step": 20, "rank": 1}],
    "both": [{"at": "train", "step": 20}],
    "both with skew": [{"at": "train", "step": 20, "rank": 0}, {"at": "train", "step": 21, "rank": 1}],
    "rank 1 while rank 0 is blocked in a collective": [{"at": "batch_end", "step": 9, "rank": 1, "after_s": 0.3}],
    "validation": [{"at": "validation", "step": 16, "rank": 1}],
    "validation of the last epoch": [
        {"at": "validation", "step": 48, "rank": 0},
        {"at": "validation", "step": 48, "do": "sleep", "seconds": 0.3, "once": False},
    ],
    "sanity check": [{"at": "sanity", "rank": 1}],
    "setup": [{"at": "setup", "rank": 0}],
    "validation, with data-loader workers": [{"at": "validation", "step": 16, "rank": 0}],
    "end of the epoch": [{"at": "epoch_end", "step": 1, "rank": 1}],
}


def stop_and_resume(tmp: Path, events: list[dict[str, Any]], **options: Any) -> tuple[RunDirectory, str]:
    """Stops the run by the events, checks that it is stopped and resumable, resumes it, and checks that it is exact."""
    config = make(tmp, "disturbed", events=[{**TERM, **event} for event in events], **options)
    codes, text = run(config, tmp / "disturbed", timeout_s=60)
    assert set(codes) == {0}, text
    assert not Path(config["out"]).exists(), "the script went on after fit()"
    directory = RunDirectory(config["run_dir"])
    outcome = directory.fit(0).outcome
    assert outcome is not None
    assert outcome.status == "interrupted", text
    assert "Preemption detected, saving checkpoint and exiting" in text
    newest = resume.checkpoints(directory.fit(0).checkpoints)[0]
    assert resume.verify(newest).metadata["step"] == outcome.step
    interruption_text = text
    for _ in events:  # one that the first stop came before happens in the second run
        if not Path(config["out"]).exists():
            codes, text = run(config, tmp / "disturbed")
            assert set(codes) == {0}, text
    reference = undisturbed(tmp, **options)[0]
    assert result(config) == reference
    return directory, interruption_text


@pytest.mark.also_as_on_gpu("rank 0 only", "rank 1 while rank 0 is blocked in a collective", "end of the epoch")
@pytest.mark.parametrize("events", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.slow_but_for(
    "cpu-rank 1 while rank 0 is blocked in a collective",
    "cpu-validation of the last epoch",
    "cpu-sanity check",
    "as on a GPU-end of the epoch",
)
def test_stops_all_ranks_and_resumes_exactly(
    tmp_path: Path, events: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    workers = 1 if "workers" in request.node.name else 0
    stop_and_resume(tmp_path, events, **{**TWO, "workers": workers})


@pytest.mark.also_as_on_gpu
@pytest.mark.slow_but_for("cpu")
def test_during_a_save(tmp_path: Path) -> None:
    stop_and_resume(tmp_path, [{"at": "save", "step": 20, "rank": 0}], **{**TWO, "save_every": 10})


def test_never_cuts_an_accumulation_window_in_two(tmp_path: Path) -> None:
    options = {**TWO, "trainer": {"devices": 2, "accumulate_grad_batches": 4}}
    stop_and_resume(tmp_path, [{"at": "train", "step": 21, "rank": 1}], **options)


def test_one_process_without_a_process_group(tmp_path: Path) -> None:
    config = make(tmp_path, "alone", events=[{**TERM, "at": "train", "step": 20}])
    codes, text = run(config, tmp_path / "alone")
    assert codes == [75], text  # no launcher that would restart it: the code says "run me again"
    codes, text = run(config, tmp_path / "alone")
    assert codes == [0], text
    assert result(config) == undisturbed(tmp_path)[0]


def signalled_as_a_group(config: dict[str, Any], tmp: Path, begun: Callable[[], Any]) -> Ranks:
    """Ranks that get SIGTERM with all processes of theirs, as by ``scancel``."""
    ranks = Ranks(config, tmp)
    while not begun():
        time.sleep(0.02)
    for process in ranks.processes:
        os.killpg(process.pid, signal.SIGTERM)
    return ranks


@pytest.mark.slow
def test_a_signal_to_the_process_group_spares_the_data_loader_workers(tmp_path: Path) -> None:
    config = make(tmp_path, "run", **{**TWO, "workers": 2, "save_every": 4, "step_s": 0.05})
    fit = RunDirectory(config["run_dir"]).fit(0)
    ranks = signalled_as_a_group(config, tmp_path / "run", lambda: resume.checkpoints(fit.checkpoints))
    assert ranks.wait(60) == [0, 0], ranks.text()
    assert not Path(config["out"]).exists()
    assert "DataLoader worker" not in ranks.text()
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert result(config) == undisturbed(tmp_path, **{**TWO, "workers": 2, "save_every": 4, "step_s": 0.05})[0]


def test_data_loader_workers_do_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    config = make(tmp_path, "run", workers=2, events=[{"at": "train", "step": 20, "do": "SIGSTOP"}])
    ranks = Ranks(config, tmp_path / "run")
    trainer = psutil.Process(ranks.processes[0].pid)
    while trainer.status() != psutil.STATUS_STOPPED:
        time.sleep(0.05)
    workers = trainer.children()
    assert len(workers) == 2
    ranks.kill(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


STUCK = """
import ctypes, sys
import lightning.pytorch as L, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from lightning_resilience import AutoResume, Preemption
class Data(Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        if get_worker_info() is not None and index == 5:  # fetched ahead, and never asked for
            ctypes.PyDLL(None).pause()
        return torch.ones(4)
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx): return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
callbacks = [Preemption(run_dir=sys.argv[1]), AutoResume(run_dir=sys.argv[1])]
quiet = dict(logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu")
L.Trainer(max_epochs=1, limit_train_batches=4, callbacks=callbacks, **quiet).fit(
    Model(), DataLoader(Data(), num_workers=1, batch_size=1)
)
"""


@pytest.mark.campaign
def test_a_worker_that_holds_the_interpreter_lock_does_not_outlive_the_script(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", STUCK, str(tmp_path / "run")], timeout_s=100)
    assert done.returncode == 0, done.stderr
    assert "max_epochs=1" in done.stderr + done.stdout


class SignalsItsWorker(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        signal.raise_signal(signal.SIGTERM)
        return torch.ones(1)


@pytest.mark.slow_but_for("True")
@pytest.mark.parametrize("option", [True, False])
def test_workers_are_protected_with_the_option_and_only_then(tmp_path: Path, option: bool) -> None:
    class Module(BoringModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            steps.append(batch_idx)

    steps: list[int] = []
    preemption = Preemption(enable_exit_handler_for_data_loader=option, run_dir=tmp_path / "run")
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=1, callbacks=[preemption], default_root_dir=tmp_path, **quiet)
    with nullcontext() if option else pytest.raises(RuntimeError, match="DataLoader worker"):
        trainer.fit(Module(), DataLoader(SignalsItsWorker(), num_workers=1))
    assert steps == ([0, 1] if option else [])


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    hang = {"at": "train", "step": 20, "do": "sleep", "seconds": 600, "once": True}
    config = make(tmp_path, "disturbed", events=[{**TERM, "at": "train", "step": 20, "rank": 0}, hang], **TWO)
    config["save_every"] = 10
    ranks = Ranks(config, tmp_path / "disturbed")
    _wait_for(ranks, "initiating graceful stop")
    ranks.kill(signal.SIGTERM)  # the same request, delivered twice
    time.sleep(2.5)
    assert all(process.is_alive() for process in ranks.processes)
    ranks.kill(signal.SIGTERM)
    assert ranks.wait(30) == [0, 0], ranks.text()
    assert "received a second time" in ranks.text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "interrupted"
    codes, text = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, text
    assert "Resuming from step 20" in text
    assert result(config) == undisturbed(tmp_path, **{**TWO, "save_every": 10})[0]


@pytest.mark.slow
def test_the_end_of_the_grace_period_ends_the_run(tmp_path: Path) -> None:
    hang = {"at": "train", "step": 20, "do": "sleep", "seconds": 600, "once": True}
    config = make(tmp_path, "disturbed", events=[{**TERM, "at": "train", "step": 20, "rank": 1}, hang], **TWO)
    config["grace_period_s"] = 3.0
    ranks = Ranks(config, tmp_path / "disturbed")
    assert ranks.wait(60) == [0, 0], ranks.text()  # rank 0 got no signal: it knows from the agreement
    assert "grace period of 3 s has run out" in ranks.text()
    events = [event["event"] for event in read_ledger(RunDirectory(config["run_dir"]).ledger)]
    assert "interrupted" in events


@pytest.mark.slow
def test_warns_when_a_save_does_not_fit_into_the_grace_period(tmp_path: Path) -> None:
    config = make(tmp_path, "run", trainer={"max_epochs": 1})
    run_dir = RunDirectory(config["run_dir"])
    Ledger(run_dir.ledger).record("saved", seconds=3600.0, step=1)
    assert "The last save took 3600 s, the grace period is 60 s" in run(config, tmp_path / "run")[1]


def test_leaves_nothing_behind(tmp_path: Path) -> None:
    import threading

    from tests.program import main

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1), dict(os.environ)
    threads = set(threading.enumerate())
    config = make(tmp_path, "run", trainer={"max_epochs": 1}, log=None)
    main(config)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before[:2]
    assert signal.set_wakeup_fd(-1) == -1
    assert set(threading.enumerate()) <= threads
    added = {key for key in os.environ if key not in before[2]}
    assert not {key for key in added if "RESILIENCE" in key}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["out", "out.0", "run"]


@pytest.mark.slow_but_for("1000.0-1")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("last_save_s", [None, 0.01, 1000.0])
def test_saves_locally_first_when_time_is_short(tmp_path: Path, ranks: int, last_save_s: float | None) -> None:
    config = make(
        tmp_path,
        "disturbed",
        callbacks=["preemption", "auto_resume", "local_checkpoint"],
        save_every=1000,
        local={"every_n_train_steps": 1000, "dir": str(tmp_path / "local")},
        trainer={"devices": ranks},
        events=[{"at": "train", "step": 20, "do": "SIGTERM", "once": True}],
    )
    run_directory = RunDirectory(config["run_dir"])
    if last_save_s is not None:
        Ledger(run_directory.ledger).record("saved", fit=0, step=0, seconds=last_save_s)
    _, text = run(config, tmp_path / "disturbed")
    short = last_save_s != 0.01
    saved = [event.get("tier") for event in read_ledger(run_directory.ledger) if event["event"] == "saved"]
    assert saved[last_save_s is not None :] == (["local", "global"] if short else ["global"]), text
    assert ("to the local checkpoints of all nodes" in text) == short
    codes, text = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, text
    resumed = [event["tier"] for event in read_ledger(run_directory.ledger) if event["event"] == "resumed"]
    assert resumed == ["local" if short else "global"]
    reference = undisturbed(tmp_path, save_every=1000, trainer={"devices": ranks})
    assert (result(config), samples(config)) == reference


@pytest.mark.campaign
def test_local_storage_that_does_not_answer_does_not_cost_the_global_save(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "disturbed",
        callbacks=["preemption", "auto_resume", "local_checkpoint"],
        save_every=1000,
        grace_period_s=16.0,
        local={"every_n_train_steps": 3, "dir": str(tmp_path / "local")},
        stuck_local_from=9,
        events=[{"at": "train", "step": 20, "do": "SIGTERM", "once": True}],
    )
    codes, text = run(config, tmp_path / "disturbed")
    assert codes == [75], text
    codes, text = run({**config, "stuck_local_from": None}, tmp_path / "disturbed")
    assert codes == [0], text
    resumed = [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == "resumed"]
    (event,) = resumed
    assert event["tier"] == "global"
    assert event["step"] > 20  # On a loaded machine the signal may be heard a step later.
    assert (result(config), samples(config)) == undisturbed(tmp_path, save_every=1000)


def slurm_job(tmp: Path) -> tuple[Path, dict[str, str]]:
    """The environment of a job, with an ``scontrol`` that writes into the file what it is asked for."""
    scontrol = tmp / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp}/called\n')
    scontrol.chmod(0o755)
    return tmp / "called", {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def requeued_from_the_boundary(tmp: Path) -> None:
    called, environment = slurm_job(tmp)
    config = make(tmp, "run", slurm=True, events=[{"at": "train", "step": 20, "do": "SIGUSR1", "once": True}])
    codes, text = run(config, tmp / "run", environment=environment)
    assert codes == [75], text
    assert called.read_text() == "requeue 77\n"
    assert not list((tmp / "run").glob("hpc_ckpt*"))
    codes, text = run(config, tmp / "run", environment=environment)
    assert codes == [0], text
    assert result(config) == undisturbed(tmp)[0]


def test_requeues_a_slurm_job_from_the_boundary(tmp_path: Path) -> None:
    """SIGUSR1 under ``SLURMEnvironment(auto_requeue=True)``, which Lightning serves from inside the handler."""
    requeued_from_the_boundary(tmp_path)


TOO_LATE = """
import os, signal, sys, time
import lightning.pytorch as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_resilience import AutoResume, Preemption

class AtTheEnd(L.Callback):
    def on_train_end(self, trainer, module):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

callbacks = [*(eval(name)(run_dir="run") for name in sys.argv[1:]), AtTheEnd()]
trainer = L.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks)
trainer.fit(BoringModel())
print("went on")
"""


@pytest.mark.parametrize(
    "order", ["Preemption AutoResume", pytest.param("AutoResume Preemption", marks=pytest.mark.slow)]
)
def test_a_signal_that_comes_too_late_for_the_fit_ends_the_script(tmp_path: Path, order: str) -> None:
    """Whichever of our callbacks is the first to be told of the end."""
    command = [sys.executable, "-c", TOO_LATE, *order.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert "went on" not in ended.stdout


@pytest.mark.parametrize("local", [False, True])
def test_without_auto_resume_it_says_what_goes_on(tmp_path: Path, local: bool) -> None:
    """With local checkpoints no step is lost: nothing else is resumed from."""
    callbacks = ["preemption", *(["local_checkpoint"] if local else [])]
    options: dict[str, Any] = {"callbacks": callbacks, "trainer": {"max_epochs": 2}}
    options["local"] = {"dir": str(tmp_path / "local"), "every_n_train_steps": 5}
    events = [{**TERM, "at": "train", "step": step} for step in ((8, 14, 22) if local else (8,))]
    config = make(tmp_path, "run", events=events, **options)
    for _ in events:
        text = run(config, tmp_path / "run")[1]
    assert ("Run the same command again to continue." in text) == local
    assert ("Without AutoResume a restart does not use it automatically" in text) != local
    if not local:
        return
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    found = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    stops = [each["step"] for each in found if each["event"] == "interrupted"]
    assert [each["step"] for each in found if each["event"] == "resumed"] == stops
    assert result(config) == undisturbed(tmp_path, **{**options, "callbacks": []})[0]


@pytest.mark.parametrize(
    ("asked_s", "is_injected", "is_s"),
    [
        (7.0, False, 7.0),
        (7.0, True, 60.0),
        (3600.0, False, 60.0),
        (deadlines.DEFAULT_GRACE_PERIOD_S, False, 60.0),
    ],
)
def test_the_shorter_grace_period_holds_under_a_launch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked_s: float, is_injected: bool, is_s: float
) -> None:
    found: list[float] = []

    class Looks(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            found.append(listener.grace_period_s)

    listener = signals.install(grace_period_s=60.0)  # as launch does
    assert listener is not None
    try:
        own = Preemption(grace_period_s=asked_s, run_dir=tmp_path / "run")
        own._injected = is_injected
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        L.Trainer(max_steps=1, accelerator="cpu", callbacks=[own, Looks()], **options).fit(BoringModel())
    finally:
        signals.uninstall()
    assert found == [is_s]
    assert listener.grace_period_s == 60.0
    assert ("raise its --grace-period" in caplog.text) == (asked_s == 3600.0)


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_a_launched_process_stops_outside_of_a_fit_too(tmp_path: Path, what: str) -> None:
    config = {**DEFAULTS, "run_dir": str(tmp_path / "run"), "fit": 0}
    module = Module(config)
    module.validation_step = module.test_step = module.predict_step = lambda batch, batch_idx: None  # type: ignore
    trainer = make_trainer({**config, "callbacks": ["preemption"]}, 1)
    listener = signals.install(grace_period_s=60)  # as launch does
    assert listener is not None
    try:
        data = loader(config, 1, 0)
        getattr(trainer, what)(module, data)
        os.kill(os.getpid(), signal.SIGTERM)
        while listener.received is None:
            time.sleep(0.01)
        with pytest.raises(Interrupted, match="outside of a fit"):
            getattr(trainer, what)(module, data)
    finally:
        signals.uninstall()


@pytest.mark.parametrize(
    "arguments",
    [{"signals": ()}, {"signals": ("SIGNOPE",)}, {"signals": (signal.SIGKILL,)}, {"grace_period_s": -1}],
)
def test_refuses_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Preemption(**arguments)


def _wait_for(ranks: Ranks, text: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in ranks.text():
        assert time.monotonic() < deadline, ranks.text()
        time.sleep(0.05)
