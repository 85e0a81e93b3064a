"""``FaultTolerance`` around a hang: what restarts the ranks, what it must not take for one, limits, health, drills.

How each kind of hang is found and explained is in ``test_hangs.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import FaultTolerance
from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.fit.joining import session_of
from lightning_resilience.run import exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, command, result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed
from tests.test_hangs import FOREVER, LIMITS, nothing_left, stacks_of, the_culprit, verdict_of, watchdogs_of
from tests.test_json_output import parsed
from tests.test_launchers import finish, lightnings_own, start, torchrun

CALLBACKS = ["fault_tolerance", "preemption", "auto_resume", "user"]
HANG = {"at": "train", "step": 20, "do": "sleep", "seconds": FOREVER, "once": True}
STARTED_AGAIN = {"TORCHELASTIC_MAX_RESTARTS": "1"}
"""Environment of ranks that somebody starts again: without it no limit is calculated."""


def watched(tmp: Path, name: str = "run", limits: str = LIMITS, **options: Any) -> dict[str, Any]:
    """The config of a run with the callback."""
    settings = {"section_timeouts": limits, "calculate_timeouts": False, **options.pop("fault_tolerance", {})}
    return make(tmp, name, **{"callbacks": CALLBACKS, "fault_tolerance": settings, **options})


def runs(config: dict[str, Any], **kwargs: Any) -> str:
    """Runs it to its end, which must be a good one; returns what it printed."""
    codes, output = run(config, Path(config["run_dir"]).parent, **kwargs)
    assert set(codes) == {0}, output
    return output


def fails(config: dict[str, Any], **kwargs: Any) -> str:
    codes, output = run(config, Path(config["run_dir"]).parent, **kwargs)
    assert set(codes) != {0}, output
    return output


def events(config: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] in kinds]


def hangs(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [fault for fault in events(config, "fault") if fault["kind"] == "hang"]


def no_alarm(config: dict[str, Any], output: str) -> None:
    assert not list(Path(config["run_dir"]).glob("diagnostics/*")), output
    assert not events(config, "fault"), output


# -- who restarts it ---------------------------------------------------------------------------------------------------


def ours(config: dict[str, Any], *options: str) -> list[str]:
    limits = ["--section-timeouts", "setup:60,step:3,checkpointing:30", "--out-of-section-timeout", "30"]
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--run-dir", config["run_dir"]]
    return [*launch, *limits, "--nproc-per-node", "2", *options, *command(config)[1:]]


def command_line(action: str, config: dict[str, Any], *options: str) -> str:
    arguments = [sys.executable, "-m", "lightning_resilience.launch.cli", action, config["run_dir"], *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout


def folders_of(config: dict[str, Any]) -> list[Path]:
    """The folders in node memory of a run."""
    records = [path for path in own_directories()[0].glob("*/rank-*.json") if config["run_dir"] in path.read_text()]
    return [path.parent for path in records]


@pytest.mark.nvrx
@pytest.mark.slow
def test_a_hang_under_launch_is_restarted_inside_the_job(tmp_path: Path) -> None:
    """The script itself is plain Lightning, and the limits come from the command line."""
    options = {"trainer": {"devices": 2}, "callbacks": [], "model_checkpoint": {"every_n_train_steps": 6}}
    reference = undisturbed(tmp_path, **{**options, "callbacks": ["preemption", "auto_resume"]})
    config = make(tmp_path, "hanging", events=[{**HANG, "rank": 1, "step": 14}], **options)
    output = tmp_path / "output"
    assert finish(start(ours(config), output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == reference
    assert the_culprit(config).rank == 1
    assert verdict_of(config).culprits[0].seconds < 30, "the limit of the command line did not hold"
    assert len(events(config, "job_start")) == 1
    assert [event["restart_count"] for event in events(config, "start")] == [0, 1]
    assert [fault["kind"] for fault in events(config, "fault")] == ["hang"]
    assert "Restart 1 inside the job" in output.read_text()
    assert "rank 1" in command_line("diagnose", config)
    predicted = command_line("report", config, "--json", "--what-if", "save_every=9")
    report, _ = parsed("report", command_line("report", config, "--json"), predicted)
    [hang] = report["interruptions"]
    assert (hang["cause"], hang["resumed_step"], hang["steps_lost"], hang["is_lower_bound"]) == ("hang", 12, 2, False)
    assert (report["outcome"], report["ranks"], report["is_ongoing"]) == ("finished", 2, False)
    assert 0 < hang["detect"] < hang["rank_seconds"]
    assert report["rank_seconds"] == pytest.approx(2 * (report["ended"] - report["began"]), rel=0.01)
    [status] = parsed("status", command_line("status", config, "--json"))
    assert (status["allocations"][0]["starts"], status["now"]) == (2, "ended: finished")
    parsed("diagnose", command_line("diagnose", config, "--json"))
    nothing_left(config)
    assert not folders_of(config)


@pytest.mark.slow
def test_a_hang_under_torchrun_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"trainer": {"devices": 2}}
    config = watched(tmp_path, events=[{**HANG, "rank": 0}], **options)
    output = tmp_path / "output"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with_restarts = torchrun(config)
    with_restarts.insert(with_restarts.index("--nproc-per-node"), "--max-restarts=1")
    assert finish(start(with_restarts, output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    assert [fault["kind"] for fault in hangs(config)] == ["hang"]
    assert "stale" not in output.read_text()
    nothing_left(config)


@pytest.mark.campaign
@pytest.mark.nvrx
def test_a_hang_under_ft_launcher_as_nvrx_documents_it(tmp_path: Path) -> None:
    """The ranks are watched by NVRx's monitors too, with the limits of its command line, and restarted by it."""
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    config = watched(tmp_path, events=[{**HANG, "step": 6}], trainer={"max_steps": 12}, save_every=4)
    ft_launcher = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node=1"]
    limits = ["--ft-rank_section_timeouts=setup:60,step:10,checkpointing:30", "--ft-rank_out_of_section_timeout=30"]
    where = ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--ft-enable-nic-monitor=false"]
    output = tmp_path / "output"
    code = finish(start([*ft_launcher, *limits, *where, *command(config)[1:]], output), output)
    assert code == 0, output.read_text()
    assert "NVRx's rank monitors" in output.read_text()
    assert [fault["kind"] for fault in events(config, "fault")] == ["hang"]
    assert [event["step"] for event in events(config, "resumed")] == [4]
    nothing_left(config)


@pytest.mark.campaign
def test_a_hang_under_lightnings_own_launcher_ends_with_its_code(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}}
    config = watched(tmp_path, events=[{**HANG, "rank": 1}], **options)
    output = tmp_path / "output"
    assert finish(start(lightnings_own(config), output), output) == exit_codes.HUNG, output.read_text()
    assert finish(start(lightnings_own(config), output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    assert len(hangs(config)) == 1
    nothing_left(config)


# -- what is no hang ---------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_soak_with_everything_slow_and_tight_calculated_limits(tmp_path: Path) -> None:
    """5,000 steps of about a millisecond, with a calculated limit of 1.5 to 3 s; validations and saves take 4 s."""
    steps = [2500, 5000]
    slow = [{"at": "validation", "step": step, "do": "sleep", "seconds": 4.0} for step in steps]
    slow += [{"at": "save", "step": step, "do": "sleep", "seconds": 4.0} for step in steps]
    config = watched(
        tmp_path,
        limits="setup:8,step:5,checkpointing:6,out_of_section:5",
        events=[{"at": "train", "step": 0, "do": "sleep", "seconds": 2.5}, *slow],
        fault_tolerance={"calculate_timeouts": True},
        floor_s=1.5,
        save_every=2500,
        batches=100,
        augment=False,
        validation=True,
        trace=str(tmp_path / "trace"),
        trainer={"max_epochs": -1, "max_steps": 5000, "check_val_every_n_epoch": None, "val_check_interval": 2500},
    )
    output = runs(config, environment=STARTED_AGAIN)
    no_alarm(config, output)
    assert result(config)[0]["step"] == 5000
    limits = limits_at_end(config)
    assert limits["step"] <= 3, "the limit was not tight, and so the test has shown nothing"
    assert limits["checkpointing"] >= 20


# -- sections ----------------------------------------------------------------------------------------------------------


def traced(config: dict[str, Any], rank: int = 0) -> list[Any]:
    return [json.loads(line) for line in Path(f"{config['trace']}.{rank}").read_text().splitlines()]


def limits_at_end(config: dict[str, Any], rank: int = 0) -> dict[str, float]:
    return [line[1] for line in traced(config, rank) if line[0].startswith("[")][-1]


def limits_at_start(config: dict[str, Any], rank: int = 0) -> dict[str, float]:
    return next(line[1] for line in traced(config, rank) if line[0].startswith("["))


def in_section(config: dict[str, Any], rank: int = 0) -> list[tuple[str, str]]:
    """What happened, and in which section."""
    section, found = "", []
    for name, *_ in traced(config, rank):
        if name.startswith("["):
            section = name.strip("[]")
        else:
            found.append((name, section))
    return found


def test_every_part_of_a_fit_has_its_section(tmp_path: Path) -> None:
    config = watched(
        tmp_path,
        validation=True,
        model_checkpoint={"every_n_train_steps": 7, "dirpath": str(tmp_path / "own")},
        trainer={"max_epochs": 2},
        trace=str(tmp_path / "trace"),
    )
    no_alarm(config, runs(config))
    found = in_section(config)
    assert {section for name, section in found if name in ("setup 0", "sanity 0", "sanity 1", "train 0")} == {"setup"}
    for what, section in {
        "train": "step",
        "batch_end": "step",
        "callback": "step",
        "validation": "validation",
        "save": "checkpointing",
        "epoch_end": "out_of_section",
        "after": "left",
    }.items():
        places = {where for name, where in found if name.split()[0] == what and name.split()[1] != "0"}
        if what in ("epoch_end", "after"):
            places = {where for name, where in found if name.split()[0] == what}
        if what in ("batch_end", "callback"):  # they count the batch that has just been trained
            places -= {"setup"}
        assert places == {section}, what
    saves = [name for name, _ in found if name.startswith("save")]
    assert {"save 5", "save 7", "save 14", "save 32"} <= set(saves), "AutoResume's, ModelCheckpoint's and the last one"
    entered = [line[0] for line in traced(config) if line[0].startswith("[")]
    assert entered[0] == "[setup]"
    assert entered[-1] == "[left]"
    assert entered.count("[left]") == 1
    assert all(before != "[checkpointing]" or after != before for before, after in pairwise(entered))


class SavesInVain(L.Callback):
    """A user's callback that can do without the checkpoint that it fails to save."""

    def __init__(self) -> None:
        self.sections: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        here = session_of(trainer, trainer.callbacks[0])
        self.sections.append(here.fit.progress.section)
        with pytest.raises(FileExistsError):
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "file" / "own.ckpt")
        self.sections.append(here.fit.progress.section)


def test_a_section_is_closed_when_an_exception_passes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    user = SavesInVain()
    small_trainer(tmp_path, FaultTolerance(run_dir=tmp_path / "run", autoresume=False), user, max_steps=3).fit(
        BoringModel()
    )
    assert user.sections == ["setup", "setup", "step", "step", "step", "step"]


def small_trainer(tmp: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        default_root_dir=tmp,
        enable_checkpointing=False,
        **{**quiet, **options},
    )


@pytest.mark.parametrize("ended", [False, True], ids=["its time", "too long"])
@pytest.mark.campaign
def test_waiting_for_a_save_in_the_background_counts_as_checkpointing(tmp_path: Path, ended: bool) -> None:
    """It waits for 4 s when training has ended."""
    limit = 2 if ended else 20
    config = watched(
        tmp_path,
        limits=f"setup:20,step:2,checkpointing:{limit},out_of_section:2",
        callbacks=["fault_tolerance", "preemption"],
        model_checkpoint={"every_n_train_steps": 16, "dirpath": str(tmp_path / "own")},
        slow_writer_s=4.0,
        trainer={"max_epochs": 1},
    )
    codes, output = run(config, tmp_path / "run")
    assert codes == [exit_codes.HUNG if ended else 0], output
    if ended:
        assert the_culprit(config).section == "checkpointing"
    else:
        no_alarm(config, output)


@pytest.mark.slow
def test_the_replay_of_data_after_a_resume_is_progress(tmp_path: Path) -> None:
    """It takes 4 s, a batch of it 0.4 s, and the set-up may take 2.5 s."""
    slow = [{"at": "data", "step": 4 * batch + 1, "do": "sleep", "seconds": 0.4} for batch in range(11)]
    config = watched(tmp_path, trainer={"max_epochs": 1}, limits="setup:2.5,step:20,checkpointing:20,out_of_section:20")
    fails({**config, "events": [{"at": "train", "step": 12, "do": "SIGKILL"}]})
    output = runs({**config, "events": slow})
    assert "Fetching the first 10 batches" in output
    no_alarm(config, output)


# -- excused -----------------------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], Any], ranks: Ranks) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, ranks.text()
        time.sleep(0.02)
    return found


@pytest.mark.campaign
def test_a_debugger_is_no_hang(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}}
    os.mkfifo(tmp_path / "stdin")
    breakpoint_ = {"at": "train", "step": 20, "rank": 1, "do": "pdb", "stdin": str(tmp_path / "stdin")}
    config = watched(tmp_path, events=[breakpoint_], **options)
    ranks = Ranks(config, tmp_path / "run")
    with os.fdopen(os.open(tmp_path / "stdin", os.O_RDWR), "w") as stdin:
        eventually(lambda: ranks.text().count("No hang: ") == 2, ranks)  # its time began anew
        stdin.write("continue\n")
        stdin.flush()
        codes = ranks.wait()
    assert codes == [0, 0], ranks.text()
    verdicts = [json.loads(path.read_text()) for path in Path(config["run_dir"]).glob("diagnostics/*/verdict.json")]
    assert [(v["is_hang"], v["culprits"][0]["rank"], v["culprits"][0]["kind"]) for v in verdicts] == [
        (False, 1, "debugged")
    ] * len(verdicts)
    assert verdicts
    assert not events(config, "fault")
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    nothing_left(config)


@pytest.mark.campaign
def test_a_save_that_is_slow_and_writes_is_no_hang(tmp_path: Path) -> None:
    config = watched(tmp_path, events=[{"at": "save", "step": 10, "do": "write", "seconds": 5}])
    output = runs(config)
    assert "No hang: rank 0" in output
    assert "in a slow checkpoint, writing" in output
    assert not events(config, "fault")


@pytest.mark.campaign
def test_a_pause_of_the_whole_job_is_no_hang(tmp_path: Path) -> None:
    """As by a job scheduler that suspends it, or of a virtual machine."""
    config = watched(tmp_path, trainer={"devices": 2}, step_s=0.1)
    ranks = Ranks(config, tmp_path / "run")
    eventually(lambda: events(config, "saved"), ranks)
    (its_watchdog,) = watchdogs_of(config)
    its_watchdog.suspend()
    ranks.kill(signal.SIGSTOP)
    time.sleep(6)
    its_watchdog.resume()
    time.sleep(1)
    ranks.kill(signal.SIGCONT)
    assert ranks.wait() == [0, 0], ranks.text()
    no_alarm(config, ranks.text())


# -- the watchdog and the end of the fit -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_watchdog_that_was_killed_is_started_again(tmp_path: Path) -> None:
    config = watched(tmp_path, events=[{"at": "train", "step": 12, "do": "kill_watchdog"}, HANG])
    output = fails(config)
    assert re.search("watchdog of .* has exited; restarting it", output)
    assert the_culprit(config).rank == 0
    nothing_left(config)


@pytest.mark.campaign
def test_after_the_fit_nobody_is_watched_and_in_the_next_one_everybody_is(tmp_path: Path) -> None:
    between = {"at": "between", "step": 1, "do": "sleep", "seconds": 4}
    after = {"at": "after", "step": 1, "rank": 1, "do": "sleep", "seconds": 4}
    options = {"trainer": {"devices": 2, "max_epochs": 2}, "fits": 2}
    config = watched(tmp_path, events=[between, {**HANG, "fit": 1, "rank": 1}, after], **options)
    output = fails(config)
    assert [hang["fit"] for hang in hangs(config)] == [1], output
    assert the_culprit(config).rank == 1
    runs(config)
    assert result(config) == undisturbed(tmp_path, **options)[0]
    assert len(hangs(config)) == 1
    nothing_left(config)


@pytest.mark.parametrize("what", ["fast_dev_run", "validate", "test", "predict"])
def test_it_is_passive_where_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a watchdog was started")

    monkeypatch.setattr(watchdog, "start", never)
    fault = {"fault_type": "rank_killed"}
    callback = FaultTolerance(run_dir=tmp_path / "run", simulated_fault_params=fault, exc_handling_policy=never)
    trainer = small_trainer(tmp_path, callback, fast_dev_run=what == "fast_dev_run", limit_predict_batches=2)
    getattr(trainer, "fit" if what == "fast_dev_run" else what)(BoringModel())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_hang_when_lightning_has_put_the_signals_back(tmp_path: Path) -> None:
    """It sets every signal to what Python knew when the fit began, and Python does not know of handlers in C."""
    config = watched(tmp_path, events=[{**HANG, "at": "fit_end", "step": 0}], trainer={"max_epochs": 1})
    codes, output = run(config, tmp_path / "run")
    assert codes == [exit_codes.HUNG], output
    assert "on_fit_end" in stacks_of(config, 0)
    runs(config)
    nothing_left(config)


@pytest.mark.campaign
def test_sigterm_to_everybody_during_a_hang(tmp_path: Path) -> None:
    """A rank that is stuck cannot stop in order; the others wait for it, and so the hang ends all of them."""
    options = {"trainer": {"devices": 2}}
    config = watched(tmp_path, events=[{**HANG, "rank": 1}], **options)
    ranks = Ranks(config, tmp_path / "run")
    eventually(lambda: Path(config["run_dir"]).with_suffix(".event0-1").exists(), ranks)
    time.sleep(0.5)
    ranks.kill(signal.SIGTERM)
    codes = ranks.wait()
    assert set(codes) <= {exit_codes.HUNG, -signal.SIGKILL}, ranks.text()
    assert the_culprit(config).rank == 1
    runs(config)
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    nothing_left(config)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["no folder", pytest.param("no answer", marks=pytest.mark.campaign)])
def test_storage_that_does_not_work_does_not_save_a_hung_rank(tmp_path: Path, what: str) -> None:
    """The folder of the diagnosis is a file; or a file in it is a pipe to which nobody ever writes."""
    clog = {"at": "train", "step": 20, "do": "clog", "once": True}
    config = watched(tmp_path, events=[clog, HANG] if what == "no answer" else [HANG])
    if what == "no folder":
        Path(config["run_dir"]).mkdir()
        Path(config["run_dir"], "diagnostics").touch()
    codes, output = run(config, tmp_path / "run")
    assert codes == [exit_codes.HUNG], output
    assert "Hang: rank 0" in output
    assert "cannot be written" in output
    assert ("has not answered" in output) == (what == "no answer")
    nothing_left(config)
    runs(config)
    assert (result(config), samples(config)) == undisturbed(tmp_path)


# -- calculated timeouts -----------------------------------------------------------------------------------------------

STEP_100 = {"section_timeouts": "step:100", "calculate_timeouts": True}
ALLOWED = "seconds allowed: setup:600,step:{},checkpointing:{},out_of_section:300"


@pytest.mark.parametrize("folder", ["run/run", "elsewhere"])
@pytest.mark.slow_but_for("run/run")
def test_calculated_timeouts_are_kept_for_the_next_job(tmp_path: Path, folder: str) -> None:
    exp_dir = {} if folder == "run/run" else {"exp_dir": str(tmp_path / folder)}
    config = watched(tmp_path, fault_tolerance={**STEP_100, **exp_dir}, trace=str(tmp_path / "trace"))
    kill = {"events": [{"at": "train", "step": 27, "do": "SIGKILL"}]}
    output = fails({**config, **kill}, environment=STARTED_AGAIN)
    assert ALLOWED.format(100, 420) in output
    assert [path.parent for path in tmp_path.rglob("ft_state.json")] == [tmp_path / folder]
    Path(config["trace"] + ".0").unlink()
    output = runs(config, environment=STARTED_AGAIN)
    assert "is ignored" not in output
    assert ALLOWED.format(30, 30).replace("step:30", "step:30,validation:100") in output
    limits = [line[1] for line in traced(config) if line[0].startswith("[")]
    assert (limits[0]["setup"], limits[0]["step"], limits[0]["checkpointing"]) == (600, 30, 30)
    assert limits[0]["validation"] == 100, "no validation has been seen"
    assert limits[-1]["setup"] == 30, "the set-up has loaded a checkpoint"


@pytest.mark.slow
def test_where_nobody_starts_the_run_again_no_calculated_limit_ends_it(tmp_path: Path) -> None:
    config = watched(tmp_path, fault_tolerance=STEP_100)
    runs({**config, "trainer": {"max_epochs": 2}}, environment=STARTED_AGAIN)
    assert json.loads(Path(config["run_dir"], "ft_state.json").read_text())["fits"]["0"]["calculated"]["step"] == 30
    config |= {"trainer": {"max_epochs": 3}, "trace": str(tmp_path / "trace")}
    assert ALLOWED.format(100, 420) in runs(config)
    limits = [line[1] for line in traced(config) if line[0].startswith("[")]
    assert {each["step"] for each in limits} == {100}


@pytest.mark.slow
def test_calculated_timeouts_of_another_world_size_or_damaged_ones_are_ignored(tmp_path: Path) -> None:
    config = watched(tmp_path, fault_tolerance=STEP_100, trainer={"max_epochs": 2})
    runs(config, environment=STARTED_AGAIN)
    state = Path(config["run_dir"], "ft_state.json")
    calculated = json.loads(state.read_text())["fits"]["0"]["calculated"]
    assert calculated["step"] == 30
    output = runs({**config, "trainer": {"max_epochs": 3, "devices": 2}}, environment=STARTED_AGAIN)
    assert f"{state} is ignored: Its timeouts are for another layout" in output
    assert "world_size was 1 and is 2" in output
    assert output.count("is ignored") == 1
    assert json.loads(state.read_text())["fits"]["0"]["layout"]["world_size"] == 2
    state.write_bytes(state.read_bytes()[:50])
    output = runs({**config, "trainer": {"max_epochs": 4}}, environment=STARTED_AGAIN)
    assert f"{state} is ignored: It is not valid JSON" in output
    assert ALLOWED.format(100, 420) in output
    assert json.loads(state.read_text())["fits"]["0"]["layout"]["world_size"] == 1


@pytest.mark.slow
def test_all_ranks_calculate_the_same_from_what_one_has_seen(tmp_path: Path) -> None:
    """Rank 1 is slow right before a save: for it that is a long step, for rank 0 it is a long save."""
    config = watched(
        tmp_path,
        events=[{"at": "batch_end", "step": 19, "rank": 1, "do": "sleep", "seconds": 1.5}],
        fault_tolerance={"calculate_timeouts": True, "section_timeouts": "step:100"},
        floor_s=5.0,
        trainer={"devices": 2, "max_epochs": 2},
        trace=str(tmp_path / "trace"),
    )
    runs(config, environment=STARTED_AGAIN)
    limits = [limits_at_end(config, rank) for rank in (0, 1)]
    assert limits[0] == limits[1]
    assert 8 <= limits[0]["step"] < 100
    assert 8 <= limits[0]["checkpointing"] < limits_at_start(config)["checkpointing"]


# -- engines, policies, health -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "nvrx2"}, "engine must be 'auto', 'nvrx' or 'watchdog'"),
        ({"health_check_interval_steps": -1}, "health_check_interval_steps must not be negative"),
        ({"section_timeouts": "step:0"}, "section step must be a positive number"),
        ({"section_timeouts": {"step": -1.0}}, "section step must be a positive number"),
        ({"section_timeouts": "stop:5"}, "no section 'stop'"),
        ({"simulated_fault_params": {"fault_type": "flood"}}, "fault_type must be one of"),
        ({"simulated_fault_params": {"fault_type": "sigterm", "when": 3}}, "no 'when'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FaultTolerance(**arguments)


def test_timeouts_in_every_spelling() -> None:
    for given in ("step:5", {"step": 5.0}, SectionTimeouts(step=5.0)):
        assert FaultTolerance(section_timeouts=given).section_timeouts == SectionTimeouts(step=5.0)


def test_nvrx_without_its_launcher_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_RANK_MONITOR_IPC_SOCKET", raising=False)
    trainer = small_trainer(tmp_path, FaultTolerance(run_dir=tmp_path / "run", engine="nvrx"), max_steps=1)
    with pytest.raises(RuntimeError, match="ft_launcher"):
        trainer.fit(BoringModel())
    user = SavesInVain()
    (tmp_path / "file").touch()
    small_trainer(tmp_path, FaultTolerance(run_dir=tmp_path / "run"), user, max_steps=1).fit(BoringModel())
    assert user.sections, "the fit after it is watched"


@pytest.mark.parametrize(("engine", "connects"), [("watchdog", False), ("auto", True)])
@pytest.mark.campaign
def test_the_engine_decides_whether_nvrx_is_told(tmp_path: Path, engine: str, connects: bool) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    path = f"/tmp/{os.getpid()}-{engine}.socket"  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.bind(path)
        try:
            monitor.listen()
            monitor.setblocking(False)
            limits = "step:60"  # it waits for the end of this monitor, which never answers
            config = watched(tmp_path, limits=limits, fault_tolerance={"engine": engine}, trainer={"max_steps": 3})
            runs(config, environment={"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0"})
            if connects:
                monitor.accept()[0].close()
            else:
                with pytest.raises(BlockingIOError):
                    monitor.accept()
        finally:
            os.unlink(path)


RAISE = {"at": "train", "step": 20, "rank": 1, "do": "raise"}


@pytest.mark.parametrize(
    ("policy", "action", "status"),
    [
        ("shutdown_workload", "shutdown_workload", "halted"),
        ("nvrx.ShutdownWorkload", "shutdown_workload", "halted"),
        ("exclude_this_node", "exclude_this_node", "failed"),
        ("nvrx.ExcludeThisNode", "exclude_this_node", "failed"),
        ("nvrx.Continue", None, "failed"),
        ("continue", None, "failed"),
        ("go away", None, "failed"),
        ("raise", None, "failed"),
    ],
)
@pytest.mark.slow_but_for("raise-None-failed", "shutdown_workload-shutdown_workload-halted")
def test_a_policy_decides_on_an_error(tmp_path: Path, policy: str, action: str | None, status: str) -> None:
    flag = tmp_path / "finished"
    config = watched(tmp_path, events=[{**RAISE, "rank": 0}], policy=policy)
    output = fails(config, environment={"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)})
    assert "RuntimeError: on purpose" in output
    assert [event["action"] for event in events(config, "workload_request")] == ([action] if action else [])
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    expected = "a request of NVRx's own" if policy.startswith("nvrx") else "RuntimeError: on purpose"
    assert (outcome.status, outcome.reason) == (
        status,
        expected if action == "shutdown_workload" else "RuntimeError: on purpose",
    )
    assert flag.exists() == (status == "halted")
    assert ("No launcher of this rank can exclude" in output) == (action == "exclude_this_node")
    if policy in ("go away", "raise"):
        assert "exc_handling_policy" in output
    nothing_left(config)


@pytest.mark.campaign
@pytest.mark.parametrize("policy", ["shutdown_workload", pytest.param("exclude_this_node", marks=pytest.mark.campaign)])
def test_under_launch_a_policy_ends_the_run_with_its_reason(tmp_path: Path, policy: str) -> None:
    """Rank 1 wants it; what rank 0 sees is only that it has lost a peer, on which the policy has no opinion."""
    config = watched(tmp_path, events=[RAISE], policy=policy, trainer={"devices": 2})
    output = tmp_path / "output"
    code = finish(start(ours(config, "--in-job-restarts=2", "--job-retries=1"), output), output)
    assert code == 1, output.read_text()
    (end,) = events(config, "exit")
    assert "RuntimeError: on purpose" in end["reason"], output.read_text()
    if policy == "shutdown_workload":
        assert end["status"] == "halted", output.read_text()
        assert len(events(config, "start")) == 1
    nothing_left(config)


def test_the_flag_of_a_finished_run(tmp_path: Path) -> None:
    """Job scripts of NeMo-Run and NVRx start the job again until it is there."""
    flag = tmp_path / "finished"
    config = watched(tmp_path)
    flag.touch()
    environment = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    fails({**config, "events": [{"at": "train", "step": 20, "do": "SIGKILL"}]}, environment=environment)
    assert not flag.exists()
    runs(config, environment=environment)
    assert flag.exists()


@pytest.mark.parametrize("with_it", [pytest.param(True, marks=pytest.mark.campaign), False])
def test_without_auto_resume_there_is_a_warning(tmp_path: Path, with_it: bool) -> None:
    callbacks = ["fault_tolerance", "auto_resume"] if with_it else ["fault_tolerance"]
    config = watched(tmp_path, callbacks=callbacks, trainer={"max_steps": 2})
    assert ("This Trainer has no AutoResume" in runs(config)) == (not with_it)


@pytest.mark.parametrize(
    ("timeout", "is_too_short"), [pytest.param(1800, False, marks=pytest.mark.campaign), (180, True)]
)
def test_a_collective_that_is_given_up_before_the_step_is_overdue(
    tmp_path: Path, timeout: int, is_too_short: bool
) -> None:
    config = watched(tmp_path, trainer={"max_steps": 2, "devices": 2}, collective_timeout_s=timeout, limits="step:180")
    assert ("torch aborts a collective after 180 s" in runs(config)) == is_too_short


@pytest.mark.parametrize("restarts", ["0", "1"], ids=["started", "restarted"])
@pytest.mark.also_as_on_gpu("restarted")
@pytest.mark.slow_but_for("cpu-started", "cpu-restarted")
def test_a_sick_node_is_named_before_it_joins(tmp_path: Path, restarts: str) -> None:
    config = watched(tmp_path, sick_rank=1, trainer={"devices": 2})
    output = fails(config, environment={"TORCHELASTIC_RESTART_COUNT": restarts})
    assert ("on_train_start" in output) == (restarts == "1"), "it is set up meanwhile"
    reason = "rank 1 on .* is not fit to train: unhealthy: 1 word of 4 came back changed"
    assert re.search(f"RuntimeError: {reason}", output)
    (unhealthy,) = events(config, "unhealthy")
    assert re.fullmatch(reason, unhealthy["reason"])
    assert not events(config, "saved")
    nothing_left(config)


@pytest.mark.parametrize(
    ("name", "answered", "fails_here", "excluded"),
    [("memory", True, True, True), ("device", False, True, False), ("free space", False, False, False)],
)
def test_only_a_node_that_is_known_to_be_sick_is_excluded(
    tmp_path: Path, name: str, answered: bool, fails_here: bool, excluded: bool
) -> None:
    """A device that is cold, or a storage that everybody writes to, may be slow on any node."""
    sickness = [name, False, "this is what was seen", answered]
    config = watched(tmp_path, sick_rank=0, sickness=sickness, trainer={"max_steps": 2})
    output = (fails if fails_here else runs)(config)
    assert "this is what was seen" in output
    assert bool(events(config, "unhealthy")) == fails_here
    assert [event["action"] for event in events(config, "workload_request")] == ["exclude_this_node"] * excluded
    nothing_left(config)


@pytest.mark.campaign
def test_a_rank_that_comes_late_to_a_health_check_but_in_time_for_a_step_is_waited_for(tmp_path: Path) -> None:
    config = watched(
        tmp_path,
        limits="step:100",
        fault_tolerance={"health_check_interval_steps": 4},
        events=[{"at": "batch_end", "step": 19, "rank": 1, "do": "sleep", "seconds": 17}],
        trainer={"devices": 2, "max_steps": 24},
    )
    runs(config)


@pytest.mark.slow
def test_a_rank_that_is_absent_from_a_health_check_fails_it_for_the_others(tmp_path: Path) -> None:
    config = watched(
        tmp_path,
        limits="step:100",
        fault_tolerance={"health_check_interval_steps": 4},
        ping_within_s=2.0,
        events=[{"at": "batch_end", "step": 19, "rank": 1, "do": "SIGSTOP"}],
        trainer={"devices": 2},
    )
    output = fails(config)
    assert "The health check at step 20 failed" in output
    assert not hangs(config)
    nothing_left(config)


# -- drills ------------------------------------------------------------------------------------------------------------

DRILLS: dict[str, str | None] = {
    "rank_killed": None,
    "rank_hung": "stopped",
    "stuck_in_collective": "stuck",  # in a receive, which is no collective
    "stuck_in_data_loader": "data_loader",
    "gil_held": "gil_held",
    "sigterm": None,
}
"""What is simulated, and the verdict on it if it is a hang."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.campaign if name != "stuck_in_data_loader" else ()) for name in DRILLS],
)
@pytest.mark.slow
def test_a_drill_happens_once_and_is_survived(tmp_path: Path, name: str) -> None:
    options = {"trainer": {"devices": 2}, "workers": 1}
    fault = {"fault_type": name, "rank": 1, "at_step": 20}
    config = watched(tmp_path, fault_tolerance={"simulated_fault_params": fault}, **options)
    codes, output = run(config, tmp_path / "run")
    assert not Path(config["out"]).exists(), output
    assert (set(codes) == {0}) == (name == "sigterm"), output
    if DRILLS[name] is None:
        assert not hangs(config)
    else:
        culprit = the_culprit(config)
        assert (culprit.rank, culprit.kind) == (1, DRILLS[name]), output
    runs(config)
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
    assert [(e["fault_type"], e["rank"]) for e in events(config, "simulated_fault")] == [(name, 1)]
    nothing_left(config)


@pytest.mark.slow
def test_a_simulated_nan_is_gone_after_a_restart(tmp_path: Path) -> None:
    fault = {"fault_type": "nan_loss", "rank": 0, "at_step": 18}
    config = watched(tmp_path, fault_tolerance={"simulated_fault_params": fault}, save_every=16)
    spoiled = {**config, "out": str(tmp_path / "spoiled"), "run_dir": str(tmp_path / "run" / "other")}
    runs(spoiled)
    assert result(spoiled)[0]["metrics"]["train_loss_step"] != result(spoiled)[0]["metrics"]["train_loss_step"], "NaN"
    fails({**config, "events": [{"at": "train", "step": 21, "do": "SIGKILL"}]})
    output = runs(config)
    assert "Resuming from step 16" in output
    assert (result(config), samples(config)) == undisturbed(tmp_path, save_every=16)
    assert len(events(config, "simulated_fault")) == 1
