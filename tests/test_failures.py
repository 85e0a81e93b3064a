"""A failure that comes again, with real launches: how often it is tried, and what is said about it in the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import _output
from lightning_resilience.launch.script_errors import describe, show, what_to_change
from lightning_resilience.run.failures import Failure, cause_of_end
from lightning_resilience.run.interruptions import interruptions
from tests.ledgers import events_of, history_of
from tests.test_launch import FAKE, REAL, Launcher

ALWAYS = """
    class BadRow(ValueError): pass
    ledger.record("resumed", fit=0, step=30)
    ledger.record("fault", kind="BadRow", fit=0, step=37, reason="BadRow: row 8123")  # as a session does
    raise BadRow(f"row {os.getpid()}")
"""
ELSEWHERE = """
    ledger.record("saved", fit=1, step=len(os.listdir()))
    open(f"attempt-{len(os.listdir())}", "w").close()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()


def attempts(launcher: Launcher) -> list[int]:
    """How many groups of workers each job has started."""
    counts: list[int] = []
    for event in launcher.events("job_start", "start"):
        if event["event"] == "job_start":
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


def clause(launcher: Launcher, times: str, failure: str = "BadRow at step 37", resumed: int = 30) -> str:
    lines = (launcher.folder / "script.py").read_text().splitlines()
    [raising] = [number for number, line in enumerate(lines, 1) if " raise " in f" {line}"]
    where = f"{failure} (script.py:{raising})"
    return f"same failure for the {times} time: {where}, each time after resuming from step {resumed}"


def report_of(launcher: Launcher) -> str:
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", "report", str(launcher.run_directory.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.campaign
def test_real_what_always_fails_gets_four_attempts_in_each_of_three_jobs(launcher: Launcher) -> None:
    launcher.script(ALWAYS)
    assert launcher.run("--nproc-per-node=1", "script.py", program=REAL) == 1
    assert attempts(launcher) == [4, 4, 4]
    last_line = launcher.stderr().splitlines()[-1]
    assert last_line.startswith("[lightning-resilience] Failed: no progress in 3 jobs with up to 3 restarts each, ")
    assert clause(launcher, "12th") in last_line
    assert f"This is the {clause(launcher, '3rd')}." in launcher.stderr()
    assert clause(launcher, "12th") in report_of(launcher)


@pytest.mark.slow
def test_what_fails_after_progress_each_time_goes_on_until_it_is_finished(launcher: Launcher) -> None:
    launcher.script(
        """
        step = max([0, *(int(name) for name in os.listdir() if name.isdecimal())])
        ledger.record("resumed", fit=0, step=step)
        if step < 7:
            open(str(step + 1), "w").close()
            ledger.record("saved", fit=0, step=step + 1)
            ledger.record("fault", kind="ValueError", fit=0, step=step + 1, reason="ValueError: boom")
            raise ValueError("boom")
        ledger.record("finished", fit=0, step=step)
        """
    )
    assert launcher.run("--in-job-restarts=1", "--job-retries=0", "script.py") == 0, launcher.stderr()
    assert len(launcher.events("start")) == 8
    assert all(not event["retry"] for event in launcher.events("job_start"))
    assert "same failure" not in launcher.stderr() + report_of(launcher)


@pytest.mark.slow
def test_what_advances_elsewhere_does_not_keep_a_failure_alive(launcher: Launcher) -> None:
    launcher.script(ELSEWHERE + ALWAYS)
    assert launcher.run("--in-job-restarts=1", "--job-retries=2", "script.py") == 1
    assert sum(attempts(launcher)) == 2 * 3
    last_line = launcher.stderr().splitlines()[-1]
    assert clause(launcher, "6th") + "; the progress made in between has not prevented it" in last_line


@pytest.mark.slow
def test_a_failure_is_known_again_in_the_next_launch(launcher: Launcher) -> None:
    launcher.script(ALWAYS)
    options = ["--in-job-restarts=0", "--job-retries=1", "script.py"]
    assert [launcher.run(*options), launcher.run(*options)] == [1, 1]
    assert attempts(launcher) == [1, 1, 1, 1]
    assert clause(launcher, "4th") in launcher.stderr()


@pytest.mark.slow
def test_a_diagnosed_hang_is_the_failure_and_not_what_its_peers_ran_into(launcher: Launcher) -> None:
    launcher.script(
        """
        ids = {"elastic_run_id": os.environ["TORCHELASTIC_RUN_ID"], "restart_count": restart_count}
        ledger.record("resumed", fit=0, step=30)
        ledger.record("fault", reason="RuntimeError: Timed out waiting 9000ms for recv", kind="RuntimeError", **ids)
        ledger.record("fault", kind="hang", reason="rank 2 stuck in all_reduce", fit=0, step=37, **ids)
        os._exit(79) if restart_count == 0 else os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert launcher.run("--in-job-restarts=1", "--job-retries=0", "script.py") == 1
    assert "Before: hang: rank 2 stuck in all_reduce." in launcher.stderr()
    last_line = launcher.stderr().splitlines()[-1]
    assert "the same failure for the 2nd time: hang at step 37, each time after resuming from step 30" in last_line
    assert "last failure: hang: rank 2 stuck in all_reduce" in last_line


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], None),
        (["PeerLost: rank 1 is gone", "ValueError: boom"], "rank 1: ValueError: boom"),
        (["RuntimeError: Connection closed by peer"], "a worker was killed (rank 0: RuntimeError: Connection closed"),
        (["RuntimeError: Timed out waiting 9000ms"], "rank 0: RuntimeError: Timed out waiting"),
    ],
)
def test_the_first_fault_is_no_mere_consequence(reasons: list[str], expected: str | None) -> None:
    faults = [
        {"event": "fault", "rank": rank, "reason": reason, "elastic_run_id": "job", "restart_count": 2}
        for rank, reason in enumerate(reasons)
    ]
    fault = cause_of_end(events_of([{**faults[0], "elastic_run_id": "other"}, *faults] if faults else []), "job")
    assert fault is None if expected is None else str(fault).startswith(expected)


def _group(
    number: int, *events: dict[str, object], mistake: str = "code", reason: str = "E: 1"
) -> list[dict[str, Any]]:
    """A group of workers that begins at step 5, does something, and fails."""
    same = {"elastic_run_id": "a", "restart_count": number}
    began = {"event": "resumed", "fit": 0, "step": 5}
    fault = {"event": "fault", "kind": "E", "place": "train.py:9", "reason": reason, "mistake": mistake, **same}
    return [{"event": "start", **same}, *((began, *events) if events else ()), fault]


AT_5 = {"event": "fault", "fit": 0, "step": 5}
AT_6 = {"event": "saved", "fit": 0, "step": 6}
LAUNCH = {"event": "launch", "command": ["train.py"]}


@pytest.mark.parametrize(
    ("events", "is_tried_again"),
    [
        ([LAUNCH, *_group(0)], True),
        ([LAUNCH, *_group(0), *_group(1)], False),
        ([LAUNCH, *_group(0, AT_5), *_group(1, AT_5)], False),
        ([LAUNCH, *_group(0, AT_6), *_group(1, AT_6)], True),
        ([LAUNCH, *_group(0, AT_6), *_group(1, AT_5)], False),
        ([LAUNCH, *_group(0, AT_5), *_group(1, AT_6), *_group(2, AT_5)], False),
        ([LAUNCH, *_group(0), *_group(1, reason="F: other")], True),
        ([LAUNCH, *_group(0), *_group(1, reason="E: 2")], False),
        ([LAUNCH, *_group(0, mistake=""), *_group(1, mistake="")], True),
        ([LAUNCH, *_group(0, mistake="file"), *_group(1, mistake="file")], False),
        ([LAUNCH, *_group(0, AT_6), LAUNCH, *_group(0, mistake="file"), *_group(1, mistake="file")], True),
        ([LAUNCH, *_group(0), LAUNCH, *_group(0)], True),
        ([LAUNCH, *_group(0), {**_group(1)[-1], "rank": 1}], True),  # of one group: nodes count restarts apart
        ([LAUNCH, *_group(0), *_group(0)], False),
    ],
)
def test_which_mistakes_are_not_tried_again(events: list[dict[str, Any]], is_tried_again: bool) -> None:
    assert (history_of(events).why_not_again is None) is is_tried_again


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (NameError("x"), "code"),
        (RuntimeError("shape '[3, 4]' is invalid for input of size 10"), "code"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("Gloo connectFullMesh failed"), None),
        (RuntimeError('Missing key(s) in state_dict: "fully_connected.weight", "network.0.bias".'), "code"),
        (RuntimeError("signal_encoder: sizes of tensors must match"), "code"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), None),
        (type("DistBackendError", (RuntimeError,), {})("x"), None),
        (type("ValidationError", (ValueError,), {})("lr is negative"), "code"),
        (type("EntryNotFound", (FileNotFoundError, ValueError), {})("check your connection"), None),
        (FileNotFoundError("/data"), "file"),
        (OSError("Stale file handle"), None),
        (ConnectionError("refused"), None),
        (SystemExit(3), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_which_errors_are_mistakes(error: BaseException, mistake: str | None) -> None:
    assert describe(error).get("mistake") == mistake


def test_a_traceback_is_no_news_because_the_disk_is_full_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output, "_speaker", None)  # other tests have begun a launch in this process
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for _ in range(3):
        show(ConnectionError("x"), tmp_path, "launch", 0)
        for path in tmp_path.iterdir():
            path.unlink()
            path.symlink_to("/dev/full")
    shown, *again = capsys.readouterr().err.splitlines()
    assert shown == "ConnectionError: x"
    assert [line.partition("; traceback")[0] for line in again] == [
        "[lightning-resilience] Rank 0, again: ConnectionError: x"
    ] * 2


GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7558: Connection reset by peer. See rank 1."


@pytest.mark.parametrize(
    ("error", "is_a_line"),
    [(RuntimeError(GLOO), True), (RuntimeError("Connection reset by peer"), False), (ValueError(GLOO), False)],
)
def test_of_a_lost_peer_a_line_is_shown_and_the_traceback_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, is_a_line: bool
) -> None:
    try:
        raise error
    except Exception as raised:
        show(raised, tmp_path, "launch", 0)
    shown = capsys.readouterr().err.splitlines()
    assert ("Rank 0 has lost the connection to another rank (Connection reset by peer)" in shown[0]) is is_a_line
    assert (len(shown) == 1) is is_a_line
    [kept] = tmp_path.iterdir()
    assert "Traceback" in kept.read_text()


def test_of_each_lost_peer_the_same_line_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 0):
        show(RuntimeError(GLOO), tmp_path, "launch", rank)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3
    for rank, line in zip((0, 1, 0), shown, strict=True):
        assert f"Rank {rank} has lost the connection to another rank (Connection reset by peer)" in line


@pytest.mark.parametrize(("world_size", "who"), [(2, "rank 1"), (3, "a worker")])
def test_the_one_rank_that_has_said_nothing_was_killed(world_size: int, who: str) -> None:
    ids = {"elastic_run_id": "job", "restart_count": 2}
    start = {"event": "start", "world_size": world_size, **ids}
    fault = {"event": "fault", "rank": 0, "reason": "RuntimeError: Connection closed by peer", **ids}
    assert str(cause_of_end(events_of([start, fault]), "job")).startswith(f"{who} was killed (rank 0: RuntimeError")


def test_the_last_group_is_found_although_nodes_count_restarts_apart() -> None:
    """The elastic launcher does not count on a node what has failed on another one only."""

    def at(node: str, restart_count: int, **fields: Any) -> dict[str, Any]:
        return {"node": node, "elastic_run_id": "job", "restart_count": restart_count, **fields}

    lost = {"event": "fault", "rank": 0, "kind": "RuntimeError", "reason": "RuntimeError: Connection closed by peer"}
    died = {"event": "fault", "rank": 1, "kind": "died"}
    first = [
        at("n1", 0, event="start"),
        at("n2", 0, **died, reason="rank 1 was killed by SIGKILL"),
        at("n1", 0, **lost),
    ]
    second = [
        at("n1", 0, event="start"),
        at("n1", 0, **lost),
        at("n2", 1, **died, reason="rank 1 was killed by SIGSEGV"),
    ]
    assert cause_of_end(events_of(first), "job") == "rank 1 was killed by SIGKILL"
    assert cause_of_end(events_of([*first, *second]), "job") == "rank 1 was killed by SIGSEGV"
    silent = [at("n1", 0, event="start", world_size=3), at("n1", 0, **lost), at("n2", 1, **{**lost, "rank": 1})]
    assert str(cause_of_end(events_of([*first, *silent]), "job")).startswith("rank 2 was killed")
    too_soon = at("n2", 2, **died, reason="rank 1 was killed by SIGBUS")  # before rank 0 could record its start
    assert cause_of_end(events_of([*first, *second, too_soon]), "job") == "rank 1 was killed by SIGBUS"


def test_a_death_that_was_seen_is_the_failure_and_not_what_its_peers_ran_into() -> None:
    ids = {"event": "fault", "elastic_run_id": "job", "restart_count": 0}
    lost = {"rank": 0, "kind": "RuntimeError", "reason": "RuntimeError: Connection closed by peer", **ids}
    died = {"rank": 1, "kind": "died", "step": 20, "reason": "rank 1 was killed by SIGSEGV", **ids}
    assert cause_of_end(events_of([lost, died]), "job") == "rank 1 was killed by SIGSEGV"
    assert str(Failure.of(events_of([lost, died]))) == "died at step 20"


def test_a_death_that_is_recorded_when_the_next_workers_have_begun_is_of_those_before() -> None:
    ids = {"elastic_run_id": "job", "node": "n1"}

    def start(count: int) -> dict[str, Any]:
        return {"event": "start", "time": 10.0 * count, "restart_count": count, "rank": 0, "world_size": 2, **ids}

    def resumed(time: float, step: int) -> dict[str, Any]:
        return {"event": "resumed", "time": time, "rank": 0, "fit": 0, "step": step}

    reason = "rank 1 was killed by SIGKILL"
    late = {"event": "fault", "time": 11.0, "rank": 1, "kind": "died", "fit": 0, "step": 30, "reason": reason, **ids}
    late["restart_count"] = 0
    mistake = {"event": "fault", "time": 15.0, "rank": 0, "kind": "NameError", "reason": "NameError: x", **ids}
    mistake |= {"restart_count": 1, "fit": 0, "step": 40}
    job = {"event": "job_start", "time": 0.0, "run_id": "job", "retry": False}
    replaced = {"event": "replaced", "time": 9.0, "ranks": [1], "restart_count": 1, "reason": reason, **ids}
    lines = [job, start(0), resumed(1.0, 0), replaced]
    assert cause_of_end(events_of(lines), "job") == reason
    for unknown in ({"kind": "died", "reason": "rank 1 died"}, {"kind": "PeerLost", "reason": "PeerLost: rank 1"}):
        assert cause_of_end(events_of([*lines, {**late, **unknown}]), "job") == reason
    lines += [start(1), late, resumed(12.0, 20)]
    history = history_of(lines)
    assert str(history.failures.last) == "died at step 30"
    assert list(history.failures.times.values()) == [0, 1]
    assert history.failures.tries.total() == 1
    [only] = interruptions(events_of([*lines, mistake, start(2)]))[:1]
    assert (only.reason, only.steps_lost, only.is_reached_known) == (reason, 10, True)
    assert str(history_of([*lines, mistake, start(2)]).failures.last) == "NameError at step 40"


TRAINS = """
    import lightning.pytorch as L, torch
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
        def training_step(self, batch, batch_idx):
            FAIL
            return self.layer(batch[0]).mean()
        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(30, 1)))
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
    from lightning_resilience import AutoResume
    L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
              callbacks=[AutoResume(async_save=False, every_n_train_steps=5)]).fit(Module())
"""
FAILS_AT_13 = 'if self.global_step == 13: raise ValueError(f"row {os.getpid()}")'
FAILS_AFTER_EVERY_SAVE = """
            if self.global_step % 5 == 1 and not os.path.exists(str(self.global_step)):
                open(str(self.global_step), "w").close()
                if self.global_step > 1: raise ValueError("boom")
"""


@pytest.mark.campaign
def test_a_training_that_fails_at_the_same_step_is_recognised(launcher: Launcher) -> None:
    launcher.script(TRAINS.replace("FAIL", FAILS_AT_13))
    assert launcher.run("--in-job-restarts=2", "--job-retries=0", "script.py", program=FAKE) == 1
    assert attempts(launcher) == [3], launcher.stderr()
    # The first attempt resumed nothing, and the two after it the checkpoint of step 10.
    assert clause(launcher, "2nd", "ValueError at step 13", 10) in launcher.stderr().splitlines()[-1]
    assert clause(launcher, "2nd", "ValueError at step 13", 10) in report_of(launcher)


@pytest.mark.campaign
def test_real_a_training_that_always_fails(launcher: Launcher) -> None:
    launcher.script(TRAINS.replace("FAIL", FAILS_AT_13))
    assert launcher.start("--nproc-per-node=1", "script.py", program=REAL).wait(500) == 1  # twelve starts
    assert attempts(launcher) == [4, 4, 4], launcher.stderr()
    assert clause(launcher, "11th", "ValueError at step 13", 10) in launcher.stderr().splitlines()[-1]


@pytest.mark.campaign
def test_real_a_training_that_fails_after_progress_each_time(launcher: Launcher) -> None:
    launcher.script(TRAINS.replace("FAIL", FAILS_AFTER_EVERY_SAVE))
    assert launcher.run("--nproc-per-node=1", "--in-job-restarts=1", "--job-retries=0", "script.py", program=REAL) == 0
    assert len(launcher.events("start")) == 6, launcher.stderr()
    assert launcher.events("finished")[-1]["step"] == 30
    assert "same failure" not in launcher.stderr()


def raised_by(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def test_a_checkpoint_behind_the_last_epoch_needs_another_limit(tmp_path: Path) -> None:
    """Also where none of our callbacks knows of the fit."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False, limit_train_batches=1, **quiet)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path := tmp_path / "later.ckpt")
    fewer = L.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, limit_train_batches=1, **quiet)
    error = raised_by(lambda: fewer.fit(BoringModel(), ckpt_path=path))
    assert "from a checkpoint of epoch 2, but its Trainer ends at max_epochs=1" in str(what_to_change(error))

    def wraps() -> None:
        try:
            fewer.fit(BoringModel(), ckpt_path=path)
        except Exception as error:
            raise RuntimeError("the training failed") from error

    assert what_to_change(raised_by(wraps)) == what_to_change(error)
    assert what_to_change(raised_by(lambda: fewer.fit(BoringModel(), ckpt_path=tmp_path / "none.ckpt"))) is None
