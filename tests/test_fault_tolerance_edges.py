"""``FaultTolerance`` where something around it fails: limits that were too short, no node memory, no watchdog, forks.

How hangs are found is in ``test_hangs.py``, what the callback does in general in ``test_fault_tolerance.py``.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import psutil
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import AutoResume, FaultTolerance, report_progress
from lightning_resilience._files import read_json
from lightning_resilience._processes import is_running
from lightning_resilience.detect import health
from lightning_resilience.detect.hangs import process_probe, rank_probe, watchdog
from lightning_resilience.detect.hangs.progress import Progress, read_progress
from lightning_resilience.detect.hangs.rank_probe import RankProbe, node_directory
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.fit.hang_watch import HangWatch
from lightning_resilience.run import exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests import harness
from tests import test_hangs_verdict as verdicts
from tests.harness import run
from tests.ledgers import Ledger, read_ledger
from tests.test_fault_tolerance import STARTED_AGAIN, hangs, limits_at_end, runs, small_trainer, traced, watched
from tests.test_hangs import FOREVER, nothing_left, the_culprit, verdict_of, watchdogs_of

ROOT = Path(__file__).parents[1]


class Seen(L.Callback):
    """Notes at every step who watches."""

    def __init__(self) -> None:
        self.directories: set[Path | None] = set()
        self.probe: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.probe = trainer.callbacks[0]._participant.probe
        self.directories.add(self.probe.directory if self.probe is not None else None)


def folder_when_watched(trainer: L.Trainer) -> Path:
    """The folder in node memory of a fit, once its watchdog, which starts beside the training, is there."""
    watch: HangWatch = trainer.callbacks[0]._participant
    watch._starter.join()
    assert watch.probe is not None
    return watch.probe.directory


class KillsWatchdog(L.Callback):
    """Ends the watchdog after the first step."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            record = read_json(folder_when_watched(trainer) / "watchdog.json")
            assert record is not None
            os.kill(record["pid"], signal.SIGKILL)
            while is_running(record):
                time.sleep(0.01)


def fit(tmp: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    """A fit of six steps with a save after every other, in this process; it must come to its end."""
    trainer = small_trainer(
        tmp,
        FaultTolerance(run_dir=tmp / "run", **settings),
        AutoResume(tmp / "run", async_save=False, every_n_train_steps=2),
        *callbacks,
        max_steps=6,
    )
    trainer.fit(BoringModel())
    outcome = RunDirectory(tmp / "run").fit(0).outcome
    assert outcome is not None
    assert (trainer.global_step, outcome.status, outcome.step) == (6, "finished", 6)
    found = [event["event"] for event in read_ledger(RunDirectory(tmp / "run").ledger)]
    assert (found.count("saved"), found.count("finished"), found.count("fault")) == (3, 1, 0)
    return trainer


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """What was logged with these words in it."""
    caplog.set_level(logging.INFO, "lightning_resilience")
    return lambda words: [each.getMessage() for each in caplog.records if words in each.getMessage()]


# -- a calculated limit that was too short -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_calculated_limit_that_has_ended_the_run_is_not_calculated_again(tmp_path: Path) -> None:
    config = watched(
        tmp_path,
        limits="setup:60,step:100,checkpointing:60,out_of_section:60",
        fault_tolerance={"calculate_timeouts": True},
        floor_s=2.0,
        events=[{"at": "train", "step": 24, "rank": 1, "do": "sleep", "seconds": FOREVER, "once": True}],
        trainer={"devices": 2, "max_epochs": 3},
        trace=str(tmp_path / "trace"),
    )
    codes, output = run(config, tmp_path / "run", environment=STARTED_AGAIN)
    assert set(codes) <= {exit_codes.HUNG, -signal.SIGKILL}, output
    (hang,) = hangs(config)
    assert (hang["section"], hang["limit"]) == ("step", 2.0), "the calculated limit has not ended it"
    state = json.loads(Path(config["run_dir"], "ft_state.json").read_text())["fits"]["0"]["calculated"]
    assert state["step"] == 2.0
    for rank in (0, 1):
        Path(f"{config['trace']}.{rank}").unlink()
    output = runs(config, environment=STARTED_AGAIN)
    assert "step:100" in re.findall("seconds allowed: (.*)", output)[0]
    for rank in (0, 1):
        limits = [line[1]["step"] for line in traced(config, rank) if line[0].startswith("[")]
        assert set(limits) == {100}, "at the start and after 28 more steps"
        assert limits_at_end(config, rank)["checkpointing"] < 60, "the others are calculated still"
    nothing_left(config)


HANG = {"event": "fault", "kind": "hang", "fit": 0, "section": "step", "limit": 30.0}


@pytest.mark.parametrize(
    ("event", "distrusted"),
    [
        (HANG, {"step"}),
        ({**HANG, "section": "validation"}, {"validation"}),  # which has the limit of a step
        ({**HANG, "limit": 100.0}, set()),  # what was configured
        ({**HANG, "limit": math.inf}, set()),
        ({**HANG, "fit": 1}, set()),
        ({**HANG, "kind": "RuntimeError"}, set()),
        ({**HANG, "event": "saved"}, set()),
        ({**HANG, "section": "left"}, set()),
        ({"event": "fault", "kind": "hang", "fit": 0}, set()),
    ],
)
def test_which_hangs_speak_against_a_calculated_limit(
    tmp_path: Path, event: dict[str, Any], distrusted: set[str]
) -> None:
    run_directory = RunDirectory(tmp_path)
    Ledger(run_directory.ledger).record(**event)
    here = SimpleNamespace(session=SimpleNamespace(fit=SimpleNamespace(run=run_directory, index=0)))
    found = HangWatch._ended_too_early(here, SectionTimeouts(step=100.0))  # type: ignore[arg-type]
    assert found == distrusted


# -- no node memory ----------------------------------------------------------------------------------------------------

FULL = OSError(errno.ENOSPC, "No space left on device")


def no_space(*args: Any) -> None:
    raise FULL


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The two places for folders in node memory, none of which is there yet."""
    base = Path("/dev/shm") / f"test-{uuid.uuid4().hex[:8]}"
    base.mkdir()
    found = [base / "first", base / "second"]
    monkeypatch.setattr(rank_probe, "own_directories", lambda: found)
    yield found
    shutil.rmtree(base)


def test_full_node_memory_does_not_hinder_the_training(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    seen = Seen()
    fit(tmp_path, seen)
    assert seen.directories == {None}
    (line,) = said("not watched")
    assert line.startswith("Rank 0 is not watched")
    assert "No space left on device" in line
    assert not said("Hangs are found by")
    assert not said("hung run ends")
    assert not watchdogs(tmp_path)
    assert not [each for each in places[0].rglob("*") if each.is_file()]


def test_node_memory_that_is_full_in_between_leaves_nothing_behind(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]]
) -> None:
    """There was space for the record of the progress, but there is none for saying that it is there."""
    monkeypatch.setattr(rank_probe, "write_json", no_space)
    seen = Seen()
    began = time.time()
    fit(tmp_path, seen)
    (spent,) = (event for event in read_ledger(tmp_path / "run") if event["event"] == "time_spent")
    assert spent["began"][0] < began, "what the process has spent before the fit is lost"
    assert seen.directories == {None}
    assert len(said("not watched")) == 1
    for signum in (rank_probe.STACKS_SIGNAL, rank_probe.EXIT_SIGNAL):
        assert not process_probe._handles(os.getpid(), signum)
    assert not watchdogs(tmp_path)
    assert not [each for each in places[0].rglob("*") if each.is_file()]


def failing_witnesses(tmp: Path) -> None:
    rank_probe.write_json = no_space
    for rank in range(20):
        with pytest.raises(OSError, match="No space left"):
            RankProbe(tmp, rank, {}, {})
        assert process_probe.ask(tmp / f"rank-{rank:05d}", "ping") is None
        for signum in (rank_probe.STACKS_SIGNAL, rank_probe.EXIT_SIGNAL):
            assert not process_probe._handles(os.getpid(), signum)


def test_a_rank_that_cannot_be_watched_leaves_nothing_behind(tmp_path: Path) -> None:
    """The worker server is shut down right after its start: torch's own would wait for ever, and hold the lock."""
    process = harness.CONTEXT.Process(target=failing_witnesses, args=(tmp_path,))
    process.start()
    process.join(30)
    process.kill()
    process.join()
    assert process.exitcode == 0


def watched_but_rank_0(config: dict[str, Any], environment: dict[str, str], output: str) -> None:
    if environment["RANK"] == "0":
        os.posix_fallocate = no_space
    harness._rank(config, environment, output)


@pytest.mark.campaign
def test_the_other_ranks_of_the_node_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_rank", watched_but_rank_0)
    config = watched(
        tmp_path,
        limits="setup:60,step:2.5,checkpointing:60,out_of_section:60",
        events=[{"at": "train", "step": 20, "rank": 1, "do": "sleep", "seconds": FOREVER}],
        fault_tolerance={"calculate_timeouts": True},
        trainer={"devices": 2},
    )
    codes, output = run(config, tmp_path / "run", environment=STARTED_AGAIN)
    assert codes[1] == exit_codes.HUNG, output
    assert output.count("Rank 0 is not watched") == 1
    assert (1, "stuck") in [(each.rank, each.kind) for each in verdict_of(config).culprits]
    nothing_left(config)


def watchdogs(tmp: Path) -> list[psutil.Process]:
    return watchdogs_of({"run_dir": str(tmp / "run")})


def spoil(path: Path, how: str) -> None:
    """Makes something of it that must not be used."""
    if how == "file":
        path.touch()
    elif how == "open to others":
        path.mkdir()
        path.chmod(0o755)
    elif how == "link":
        path.with_suffix(".elsewhere").mkdir(mode=0o700)
        path.symlink_to(path.with_suffix(".elsewhere"))
    elif how == "dangling link":
        path.symlink_to("nowhere")
    elif how == "of another user":
        path.mkdir(mode=0o700)
        os.chown(path, 65534, 65534)


SPOILT = ["file", "open to others", "link", "dangling link"]


@pytest.mark.parametrize("how", SPOILT + ["of another user"] * (os.getuid() == 0))
def test_the_second_place_is_taken_where_the_first_cannot_be(places: list[Path], how: str) -> None:
    spoil(places[0], how)
    before = [path.lstat() for path in places[0].parent.iterdir()]
    directory = node_directory("0123456789abcdef", 3)
    assert directory == places[1] / "0123456789ab-3"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (places[1], directory)] == [0o700, 0o700]
    assert node_directory("0123456789abcdef", 3) == directory, "the next rank finds the same"
    assert not list(places[0].glob("*"))
    assert [path.lstat() for path in places[0].parent.iterdir() if path != places[1]] == before
    spoil(places[1].with_name("third"), how)
    places[1] = places[1].with_name("third")
    with pytest.raises(OSError, match=f"neither {places[0]} nor {places[1]} can be made a folder"):
        node_directory("0123456789abcdef", 3)


def test_a_rank_is_watched_from_the_second_place(
    tmp_path: Path, places: list[Path], said: Callable[[str], list[str]]
) -> None:
    spoil(places[0], "open to others")
    seen = Seen()
    fit(tmp_path, seen)
    assert [directory.parent for directory in seen.directories if directory is not None] == [places[1]]
    assert said("Hangs are found by a watchdog")
    assert not said("not watched")


def test_a_rank_without_any_place_trains_on(
    tmp_path: Path, places: list[Path], said: Callable[[str], list[str]]
) -> None:
    for place, how in zip(places, ("open to others", "file"), strict=True):
        spoil(place, how)
    seen = Seen()
    fit(tmp_path, seen)
    assert seen.directories == {None}
    (line,) = said("not watched")
    assert f"neither {places[0]} nor {places[1]}" in line
    assert not said("Hangs are found by")


# -- no watchdog -------------------------------------------------------------------------------------------------------

COMMAND = ["python", "-m", "lightning_resilience.detect.hangs.watchdog"]
NO_START = [
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    subprocess.CalledProcessError(1, COMMAND),
    subprocess.TimeoutExpired(COMMAND, 60.0),
]


@pytest.mark.parametrize("error", NO_START, ids=lambda error: type(error).__name__)
def test_a_watchdog_that_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]], error: Exception
) -> None:
    start, starts = watchdog.start, []

    def once(directory: Path) -> Any:
        starts.append(directory)
        if len(starts) > 1:
            raise error
        return start(directory)

    monkeypatch.setattr(watchdog, "start", once)
    fit(tmp_path, KillsWatchdog())
    assert len(starts) > 2, "it is tried at every save"
    assert len(set(starts)) == 1
    assert len(said("has exited; restarting it")) == 1
    assert len(said("hangs on this node will not be found")) == 1


def test_a_watchdog_that_does_not_start_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], list[str]]
) -> None:
    """It does at the first save."""
    start, starts = watchdog.start, []

    def second(directory: Path) -> Any:
        starts.append(directory)
        if len(starts) == 1:
            raise NO_START[0]
        return start(directory)

    monkeypatch.setattr(watchdog, "start", second)
    fit(tmp_path)
    assert len(starts) == 2
    assert len(said("hangs on this node will not be found")) == 1
    assert not said("Hangs are found by")


def test_a_fit_begins_while_its_watchdog_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, has_begun, waited = watchdog.start, threading.Event(), []

    def slow(directory: Path) -> Any:
        waited.append(has_begun.wait(30))
        return start(directory)

    monkeypatch.setattr(watchdog, "start", slow)
    fit(tmp_path, LambdaCallback(on_train_start=lambda *_: has_begun.set()))
    assert waited == [True]


def test_a_failure_names_the_node_that_has_not_been_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted ranks look at their nodes while they are set up."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    sick = health.HealthReport((health.Check("memory", False, "1 word of 4 came back changed"),))
    monkeypatch.setattr(health, "begin_node_check", lambda *args, **options: lambda: sick)

    def fail(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        fit(tmp_path, LambdaCallback(on_fit_start=fail))
    found = [event["event"] for event in read_ledger(RunDirectory(tmp_path / "run").ledger)]
    assert "unhealthy" in found


@pytest.mark.parametrize("why", ["no folder", "no program"])
def test_a_watchdog_that_cannot_watch_does_not_pretend_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (tmp_path / "there").mkdir()
    if why == "no program":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises((OSError, subprocess.SubprocessError)):
        watchdog.start(tmp_path / ("nowhere" if why == "no folder" else "there"))


def test_a_node_has_one_watchdog(tmp_path: Path) -> None:
    first = watchdog.start(tmp_path)
    assert first is not None
    try:
        assert watchdog.start(tmp_path) == first
    finally:
        os.kill(first["pid"], signal.SIGKILL)
    while is_running(first):
        time.sleep(0.01)
    second = watchdog.start(tmp_path)
    assert second is not None
    assert second["pid"] != first["pid"]
    os.kill(second["pid"], signal.SIGKILL)


class CleansUp(L.Callback):
    """Removes the folder in node memory after the first step, as systemd does when a user logs out."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            directory = folder_when_watched(trainer)
            self.watchdog = read_json(directory / "watchdog.json") or {}
            shutil.rmtree(directory)

    def on_train_end(self, *args: Any) -> None:
        assert is_running(self.watchdog)


def test_a_watchdog_whose_folder_is_cleaned_up_is_no_lost_one(tmp_path: Path, said: Callable[[str], list[str]]) -> None:
    fit(tmp_path, CleansUp())
    assert not said("has exited")
    assert not said("will not be found")


def test_the_watchdog_needs_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_resilience.detect.hangs.watchdog\n"
        "print({'torch', 'numpy', 'lightning', 'lightning_fabric', 'pytorch_lightning'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


# -- children of the training ------------------------------------------------------------------------------------------


class Forks(L.Callback):
    """Forks in the middle of the training; one child wants to end the script, another fails, both in its name."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in (3, 5):
            path = trainer.callbacks[0]._participant.probe.progress_path
            before = read_progress(path)
            if (pid := os.fork()) == 0:
                if trainer.global_step == 3:
                    sys.exit(0)
                raise RuntimeError("only in the child")
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            stay = read_progress(path)
            answers = process_probe.ask(path.with_suffix(""), "ping") is not None
            alive = is_running(read_json(path.parent / "watchdog.json") or {})
            print(
                json.dumps({"code": code, "moved": stay != before, "answers": answers, "watchdog": alive}), flush=True
            )


def forking(tmp: str) -> None:
    """A script of its own: what happens to a forked child when Python ends is part of it."""
    fit(Path(tmp), Forks(), Seen())
    print(json.dumps({"end": os.getpid()}))


@pytest.mark.campaign
def test_a_forked_child_does_not_speak_for_the_training(tmp_path: Path) -> None:
    script = f"from tests.test_fault_tolerance_edges import forking; forking({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeError: only in the child") == 1
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    quiet = {"moved": False, "answers": True, "watchdog": True}
    assert lines[:-1] == [{"code": 0, **quiet}, {"code": 1, **quiet}]
    assert list(lines[-1]) == ["end"]


def test_a_child_has_a_record_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rank.progress"
    progress = Progress(path, {"step": 5.0})
    progress.at("step", 3, (4, 1, 0, 0))
    before = read_progress(path)
    if (pid := os.fork()) == 0:
        with progress.during("checkpointing"):
            progress.at("step", 9, (10, 1, 0, 0))
        progress.close()
        os._exit(0 if progress.section == "left" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert read_progress(path) == before
    progress.at("step", 4, (5, 1, 0, 0))
    stay = read_progress(path)
    assert stay is not None
    assert stay.step == 4


# -- what takes long and advances --------------------------------------------------------------------------------------


class Evaluated(BoringModel):
    """Trained or evaluated inside of another fit, for longer than the limit there."""

    def __init__(self, reports: bool) -> None:
        super().__init__()
        self.reports = reports

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.take_long()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.take_long()
        return super().validation_step(batch, batch_idx)

    def take_long(self) -> None:
        for _ in range(8 if self.reports else 1):
            time.sleep(0.35)
            if self.reports:
                report_progress()


class Nested(L.Callback):
    """What another Trainer does between two batches, in 2.8 s: it has no callback of ours."""

    def __init__(self, tmp: Path, what: str) -> None:
        batches = 1 if what in ("reports", "nothing") else 4
        self.what, self.inner = (
            what,
            small_trainer(tmp / "inner", max_epochs=1, limit_val_batches=batches, limit_train_batches=batches),
        )

    def on_train_epoch_end(self, *args: Any) -> None:
        if self.what == "nothing":
            time.sleep(600)
        module = Evaluated(self.what == "reports")
        if self.what == "fit and validate":
            self.inner.fit(module)  # with a validation
        else:
            self.inner.validate(module, verbose=False)


def evaluating(tmp: Path, what: str) -> None:
    with open(tmp / "output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    fit(
        tmp,
        Nested(tmp, what),
        section_timeouts="setup:60,step:60,checkpointing:60,out_of_section:2",
        calculate_timeouts=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("reports", marks=pytest.mark.campaign), "fit and validate", "nothing"])
def test_what_advances_inside_of_a_fit_lives(tmp_path: Path, what: str) -> None:
    process = harness.CONTEXT.Process(target=evaluating, args=(tmp_path, what))
    process.start()
    process.join(100)
    config = {"run_dir": str(tmp_path / "run")}
    output = (tmp_path / "output").read_text()
    assert process.exitcode == (exit_codes.HUNG if what == "nothing" else 0), output
    assert len(hangs(config)) == (what == "nothing")
    if what == "nothing":
        culprit = the_culprit(config)
        assert culprit.section == "out_of_section"
        assert "on_train_epoch_end (test_fault_tolerance_edges.py" in culprit.text
        assert "section out_of_section allows 2 s" in output
        assert "out_of_section:SECONDS" in output
        assert "report_progress()" in output
    nothing_left(config)


class SignalsHandled(L.Callback):
    """Notes in every epoch whether the watchdog's signals are handled, also right after another Trainer in it."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.seen = tmp, []

    def on_train_batch_end(self, *args: Any) -> None:
        small_trainer(self.tmp / "inner", limit_val_batches=1).validate(BoringModel(), verbose=False)
        self.seen.append(self.are_handled())

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append(self.are_handled())

    def are_handled(self) -> bool:
        signums = (exit_codes.HUNG, rank_probe.STACKS_SIGNAL)
        return all(process_probe._handles(os.getpid(), signum) for signum in signums)


def test_a_trainer_inside_of_a_fit_does_not_take_the_watchdogs_signals_away(tmp_path: Path) -> None:
    noted = SignalsHandled(tmp_path)
    small_trainer(
        tmp_path,
        FaultTolerance(run_dir=tmp_path / "run"),
        noted,
        max_epochs=2,
        limit_train_batches=1,
        limit_val_batches=0,
    ).fit(BoringModel())
    assert noted.seen == [True] * 4


# -- what the documentation says ---------------------------------------------------------------------------------------

LAST, NEXT = verdicts.entry("nccl:all_reduce", 56), verdicts.pending("nccl:all_reduce", 57)
TIMED = verdicts.entry("nccl:all_reduce", 56, time_discovered_started_ns=5)
ODD_ONES_OUT = {  # what the Flight Recorders of the odd rank and of the others hold
    "left out": (verdicts.AHEAD, verdicts.IN_GROUP),
    "another one": (verdicts.nccl(verdicts.pending("nccl:broadcast", 57)), verdicts.nccl(NEXT)),
    "does not finish": (verdicts.nccl(NEXT), verdicts.nccl(NEXT)),
    "finished by others": (verdicts.nccl({**LAST, **verdicts.PENDING}, NEXT), verdicts.nccl(LAST, NEXT)),
    "not begun": (verdicts.nccl(TIMED, NEXT), verdicts.nccl(TIMED, {**NEXT, **verdicts.STARTED})),
}
SAID = [
    *(verdicts.among(r1=rank).line for rank, _, _ in verdicts.KINDS),
    *(verdicts.diagnose(verdicts.all_but(3, odd, others), 4).line for odd, others in ODD_ONES_OUT.values()),
    verdicts.diagnose([verdicts.evidence(0, verdicts.IN_GROUP), verdicts.evidence(1, verdicts.AHEAD)], 2).line,
]
"""What the watchdog says of every kind of hang."""


def documented() -> list[re.Pattern[str]]:
    """The phrases in the table of ``docs/what-can-happen.md``, and in the sentence below it about what is no hang."""
    text = (ROOT / "docs" / "what-can-happen.md").read_text()
    rows = re.findall(r"^\| `(.+?)`", text[text.index("| log line | meaning |") :], re.MULTILINE)
    excused = re.search(r"After `No hang:` it is `(.+?)`, `(.+?)` or\n`(.+?)`", text)
    assert excused is not None
    patterns = []
    for phrase in [*rows, *excused.groups()]:
        pattern = re.escape(phrase).replace(re.escape("f (file.py:"), r"\w+ \(\w+\.py:").replace(re.escape("..."), ".+")
        pattern = re.sub("^(is|are)\\b", "(is|are)", re.sub("[0-9]+", "[0-9]+", pattern))
        patterns.append(re.compile(f"[0-9)] {pattern}"))
    return patterns


def test_the_documentation_knows_what_is_said() -> None:
    unknown = [line for line in SAID if not any(phrase.search(line) for phrase in documented())]
    never_said = [phrase.pattern for phrase in documented() if not any(phrase.search(line) for line in SAID)]
    assert (unknown, never_said) == ([], [])


def launched_without(tmp: Path) -> None:
    """A launched worker whose fit has no FaultTolerance: another package's callback does the same."""
    about = rank_probe.describe_rank(tmp / "run", None, "token", 1, 1, True)
    RankProbe(tmp, 0, {}, about, is_workers=True)
    small_trainer(tmp, AutoResume(tmp / "run"), max_steps=6).fit(BoringModel())
    spent = [event for event in read_ledger(tmp / "run") if event["event"] == "time_spent"]
    assert [(event["fit"], event["reached"] > 0) for event in spent] == [(0, True)]


def test_the_time_of_a_launched_fit_that_nobody_watches_is_recorded(tmp_path: Path) -> None:
    process = harness.CONTEXT.Process(target=launched_without, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0
