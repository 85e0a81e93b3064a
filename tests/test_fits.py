"""Several fits in one script, fits that are finished, searches, and Trainers inside Trainers."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_resilience import AutoResume, Preemption
from lightning_resilience._files import write_json
from lightning_resilience.checkpoint import resume
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.fit import context, joining
from lightning_resilience.fit.joining import SessionCallback
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch.report import report
from lightning_resilience.launch.status import status
from lightning_resilience.run.goodput import account
from lightning_resilience.run.run_directory import AnotherFit, RunDirectory
from tests.harness import Ranks, result, run, run_command
from tests.ledgers import events_of, read_ledger
from tests.test_exact_resume import killed_and_resumed, make, undisturbed

THREE = {"fits": 3, "trainer": {"max_epochs": 2}}
KILLS = {
    "in each": [
        {"at": "train", "step": 9, "fit": 0},
        {"at": "batch_end", "step": 20, "fit": 1},
        {"at": "train", "step": 31, "fit": 2},
    ],
    "between": [{"at": "between", "step": 1}, {"at": "between", "step": 2}],
    "in the second": [{"at": "train", "step": 17, "fit": 1}],
}


@pytest.mark.parametrize("events", KILLS.values(), ids=KILLS.keys())
@pytest.mark.slow_but_for("between")
def test_three_fits(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    assert killed_and_resumed(tmp_path, events, **THREE)[:2] == undisturbed(tmp_path, **THREE)


@pytest.mark.campaign
def test_three_fits_with_two_ranks(tmp_path: Path) -> None:
    options = {"fits": 3, "trainer": {"max_epochs": 2, "devices": 2}}
    events = [{"at": "train", "step": 9, "rank": 1, "fit": 1}, {"at": "between", "step": 2, "rank": 0}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    config = make(tmp_path, "run", validation=True)
    run(config, tmp_path / "run")
    first, log = result(config), Path(f"{config['log']}.0").read_text()
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "it is not trained again" in text
    assert Path(f"{config['log']}.0").read_text() == log
    again = result(config)
    for key in ("weights", "step", "epoch", "lr", "random"):
        assert again[0][key] == first[0][key]


def test_the_report_of_a_run_that_had_finished_before(tmp_path: Path) -> None:
    config = make(tmp_path, "run", trainer={"max_epochs": 1})
    for _ in range(2):
        codes, text = run(config, tmp_path / "run")
        assert codes == [0], text
    said = report(config["run_dir"])
    assert "No interruption." in said
    assert "Outcome: finished" in said
    assert "ended: finished" in status(config["run_dir"])


def test_a_fit_that_failed_before_its_first_save(tmp_path: Path) -> None:
    config = make(tmp_path, "run", events=[{"at": "train", "step": 2, "do": "raise", "once": True}])
    assert run(config, tmp_path / "run")[0] == [1]
    assert re.search(r"Now       ended: failed \(RuntimeError: \w+", status(config["run_dir"]))
    assert "Interruptions: 1 crash." in report(config["run_dir"])
    assert "Outcome: failed (RuntimeError: " in report(config["run_dir"])
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Nothing was saved yet in" in text
    assert "Interruptions: 1 crash." in report(config["run_dir"])
    assert "Outcome: finished" in report(config["run_dir"])
    assert "can be used" not in text


def test_a_run_that_trains_on_this_host_is_not_taken_over(tmp_path: Path) -> None:
    waits = {"at": "train", "step": 20, "do": "sleep", "seconds": 0, "after_file": str(tmp_path / "refused")}
    config = make(tmp_path, "run", events=[waits])
    first = Ranks(config, tmp_path / "run")
    while not resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints):
        time.sleep(0.05)
    codes, text = run({**config, "out": str(tmp_path / "other"), "events": []}, tmp_path / "run")
    (tmp_path / "refused").touch()
    assert codes == [1]
    assert f"Process {first.processes[0].pid} on this host is training in {config['run_dir']}, and this process" in text
    assert first.wait() == [0], first.text()
    assert result(config) == undisturbed(tmp_path)[0]


@pytest.mark.slow
def test_neither_does_a_launch_take_it_over(tmp_path: Path) -> None:
    enters = (
        "import sys; from lightning_resilience.run.run_directory import RunDirectory as R; R(sys.argv[1]).enter(None); "
    )
    other = subprocess.Popen(
        [sys.executable, "-c", enters + "print(flush=True); input()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    other.stdout.readline()
    script = tmp_path / "train.py"
    script.write_text("")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", f"--run-dir={tmp_path}", str(script)]
    try:
        refused = run_command(launch, timeout_s=60)
    finally:
        other.communicate(b"\n", timeout=60)
    assert refused.returncode == 1
    assert f"Refused: process {other.pid} on this host, which no launch has started, is training in" in refused.stderr
    assert run_command(launch, timeout_s=60).returncode == 0


def test_whoever_has_left_or_was_killed_trains_no_more(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.enter(None) is None
    code = (
        f"import sys; from lightning_resilience.run.run_directory import RunDirectory as R; r = R({str(tmp_path)!r}); "
    )
    other = "sys.exit(r.enter({job!r}) is not None)"
    enters = [sys.executable, "-c", code + other.format(job=None)]
    assert subprocess.run(enters, timeout=60, check=False).returncode == 1
    directory.left()
    assert subprocess.run(enters, timeout=60, check=False).returncode == 0
    assert directory.enter(None) is None, "it is gone"
    assert directory.enter("job") is None, "the same process"
    same_job = [sys.executable, "-c", code + other.format(job="job")]
    assert subprocess.run(same_job, timeout=60, check=False).returncode == 0


def test_early_stopping_counts_as_finished(tmp_path: Path) -> None:
    config = make(tmp_path, "run", validation=True, early_stopping=True, trainer={"max_epochs": 8})
    run(config, tmp_path / "run")
    step = result(config)[0]["step"]
    assert step < 8 * 16
    codes, text = run(config, tmp_path / "run")
    assert codes == [0]
    assert "it is not trained again" in text
    assert result(config)[0]["step"] == step


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"max_epochs": 2}, {"max_epochs": 4}),
        ({"max_steps": 20, "max_epochs": -1}, {"max_steps": 40, "max_epochs": -1}),
    ],
    ids=["max_epochs", "max_steps"],
)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow_but_for("0-max_epochs")
def test_raising_the_limit_goes_on_as_the_longer_run(
    tmp_path: Path, short: dict[str, int], long: dict[str, int], workers: int
) -> None:
    config = make(tmp_path, "run", trainer=short, workers=workers)
    run(config, tmp_path / "run")
    codes, text = run({**config, "trainer": long}, tmp_path / "run")
    assert codes == [0], text
    assert result(config) == undisturbed(tmp_path, trainer=long, workers=workers)[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="keeps its account in node memory")
def test_the_time_of_a_rank_that_was_killed_without_a_watchdog_is_in_the_account(tmp_path: Path) -> None:
    """The next start finds it in node memory; it then knows, too, which steps it does again."""
    config = make(
        tmp_path, "run", events=[{"at": "train", "step": 27, "do": "SIGKILL", "once": True}], step_s=0.02, save_every=15
    )
    assert run(config, tmp_path / "run")[0] == [-signal.SIGKILL]
    ledger = RunDirectory(config["run_dir"]).ledger
    assert not [event for event in read_ledger(ledger) if event["event"] == "time_spent"]
    assert run(config, tmp_path / "run")[0] == [0]
    killed, other = [event for event in read_ledger(ledger) if event["event"] == "time_spent"]
    assert (killed["killed"], killed["ranks"], killed["fit"]) == (True, [0], 0)
    assert "killed" not in other
    assert 20 < killed["reached"] <= 27
    [cost] = account(list(events_of(read_ledger(ledger)))).interruptions
    assert (cost.cause, cost.reason) == ("killed", "its processes were killed")
    assert cost.seconds["wasted_progress"] > 0
    about = [path.read_text() for own in own_directories() for path in own.glob("accounts/*.about")]
    assert not [text for text in about if killed["attempt"] in text]


def test_an_explicit_checkpoint_wins(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        numpy=False,
        model_checkpoint={
            "dirpath": str(tmp_path),
            "filename": "{step}",
            "every_n_train_steps": 5,
            "save_top_k": -1,
        },
    )
    run({**config, "events": [{"at": "train", "step": 16, "do": "SIGKILL"}]}, tmp_path / "run")
    codes, text = run({**config, "ckpt_path": str(tmp_path / "step=10.ckpt")}, tmp_path / "run")
    assert codes == [0], text
    assert "wins" in text
    assert f"Restored all states from the checkpoint at {tmp_path / 'step=10.ckpt'}" in text


def test_a_restart_of_a_fit_with_an_explicit_checkpoint_goes_on_from_its_own(tmp_path: Path) -> None:
    base = make(tmp_path, "base", trainer={"max_epochs": 1})
    run(base, tmp_path / "base")
    start = str(RunDirectory(base["run_dir"]).fit(0).checkpoints / "step-000000000016-final.ckpt")
    config = make(tmp_path, "run", ckpt_path=start, events=[{"at": "train", "step": 27, "do": "SIGKILL", "once": True}])
    codes, text = run(config, tmp_path / "run")
    assert codes == [-signal.SIGKILL]
    assert f"fit-000: this fit starts from {start}." in text
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 25" in text


def test_another_model_is_refused(tmp_path: Path) -> None:
    config = make(tmp_path, "run", fits=1, trainer={"max_epochs": 1})
    run(config, tmp_path / "run")
    fit = RunDirectory(config["run_dir"]).fit(0)
    fit.fingerprint = {**(fit.fingerprint or {}), "module": "other.Module"}
    codes, text = run(config, tmp_path / "run")
    assert codes == [1]
    assert "holds another fit" in text


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.lr = 0.1
        self.inside: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.inside is not None:
            inside, self.inside = self.inside, None
            inside()
        return self.layer(batch[0]).pow(2).mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 2)), 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def trainer(tmp: Path, callbacks: list[Any], **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp),
            **options,
        },
        callbacks=callbacks,
    )


def both(tmp: Path) -> list[Any]:
    return [Preemption(run_dir=tmp / "run"), AutoResume(tmp / "run")]


class _Scaled(torch.nn.Linear):
    """A layer with a state that only a pickle can keep, as those have that compute in 8 bits."""

    def get_extra_state(self) -> Any:
        return io.BytesIO(b"the largest values so far")

    def set_extra_state(self, state: Any) -> None:
        assert isinstance(state, io.BytesIO)


def test_an_extra_state_that_cannot_be_kept_does_not_make_every_resume_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (4, 8):
        monkeypatch.setattr(context, "fits_begun", {})
        module = Tiny()
        module.layer = _Scaled(2, 1)
        with caplog.at_level(logging.INFO):
            trainer(tmp_path, [AutoResume(tmp_path / "run")], max_steps=steps).fit(module)
        assert "state_dict.layer._extra_state" in caplog.text
    assert "Resuming from step 4" in caplog.text


def test_a_model_of_other_shapes_is_another_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, both(tmp_path), max_steps=4).fit(Tiny())
    monkeypatch.setattr(context, "fits_begun", {})
    other = Tiny()
    other.layer = torch.nn.Linear(2, 3)
    with pytest.raises(AnotherFit, match="holds another fit: its parameters have different names, shapes or types"):
        trainer(tmp_path, both(tmp_path), max_steps=8).fit(other)


def test_where_a_fit_ends_is_recorded_as_far_as_its_trainer_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    epochs = {"max_epochs": 2, "limit_train_batches": 3, "accumulate_grad_batches": 2}
    for goal, options in ((2, {"max_steps": 2}), (4, epochs), (None, {})):
        monkeypatch.setattr(context, "fits_begun", {})
        run_dir = tmp_path / str(goal)
        callbacks = [AutoResume(run_dir), *([] if options else [Stops()])]
        trainer(tmp_path, callbacks, **{"max_steps": -1, "max_epochs": -1} | options).fit(Tiny())
        assert RunDirectory(run_dir).fit(0).goal == {"step": goal}


class _NotesFailure(Participant):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_raised(self) -> None:
        self.path.touch()


@pytest.mark.parametrize("ends", [RuntimeError, SystemExit])
def test_a_forked_child_that_raises_ends_no_fit_of_its_parent(tmp_path: Path, ends: type[BaseException]) -> None:
    parent, raised, run_directory = os.getpid(), tmp_path / "raised", RunDirectory(tmp_path / "run")

    def fork() -> None:
        assert joining._active is not None
        joining._active.fit.participants.add(_NotesFailure(raised))
        if (child := os.fork()) == 0:
            raise ends("on purpose")
        os.waitpid(child, 0)
        assert run_directory.fit(0).outcome is None

    module = Tiny()
    module.inside = fork
    try:
        trainer(tmp_path, both(tmp_path)).fit(module)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert not raised.exists()
    assert [each for each in read_ledger(run_directory.ledger) if each["event"] == "fault"] == []
    assert (outcome := run_directory.fit(0).outcome) is not None
    assert outcome.status == "finished"


def test_an_outcome_that_this_version_does_not_know_is_none(tmp_path: Path) -> None:
    fit = RunDirectory(tmp_path).fit(0)
    for content in ({"status": "suspended", "reason": ""}, {"status": None}, {"reason": "the end"}):
        fit.create()
        write_json(fit.path / "outcome.json", content)
        assert fit.outcome is None
        assert fit.begin() is None


ENDS: dict[str, tuple[dict[str, Any], Callable[[L.Trainer], None]]] = {
    "max_steps": ({"max_steps": 9, "max_epochs": -1}, lambda trainer: None),
    "max_epochs": ({"max_epochs": 1}, lambda trainer: None),
    "max_time": ({"max_time": timedelta(microseconds=1), "max_epochs": -1}, lambda trainer: None),
    "should_stop": ({"max_epochs": 5}, lambda trainer: setattr(trainer, "should_stop", True)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fit_that_came_to_its_end_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    options, stop = ENDS[end]

    def fit() -> tuple[int, bool]:
        """The step at the end, and whether this fit has trained, as in a process of its own."""
        monkeypatch.setattr(context, "fits_begun", {})
        module, own = Tiny(), trainer(tmp_path, both(tmp_path), **options)
        module.inside = lambda: stop(own)
        own.fit(module)
        return own.global_step, module.inside is None

    step, trained = fit()
    assert step > 0
    assert trained
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert outcome.status == "finished"
    with caplog.at_level(logging.INFO):
        assert fit() == (step, False)
    assert any(f"already finished at step {step}:" in message for message in caplog.messages)


def test_a_learning_rate_search_is_no_fit_of_the_run(tmp_path: Path) -> None:
    module, t = Tiny(), trainer(tmp_path, both(tmp_path))
    L.tuner.Tuner(t).lr_find(module, num_training=10)
    assert not (tmp_path / "run").exists()
    t.fit(module)
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert outcome.status == "finished"
    assert len(RunDirectory(tmp_path / "run").fits) == 1


def test_a_learning_rate_search_at_the_start_of_the_fit_is_left_alone(tmp_path: Path) -> None:
    finder = L.callbacks.LearningRateFinder(num_training_steps=10)
    trainer(tmp_path, [finder, *both(tmp_path)]).fit(Tiny())
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.step) == ("finished", 16)


class Searched(Tiny):
    """Dropout and Adam: what a search has drawn or trained would be seen in the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(2, 1))
        self.batch_size = 2
        self.data = torch.utils.data.TensorDataset(torch.randn(64, 2))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


class SearchesAgain(L.callbacks.LearningRateFinder):
    """In the middle of the fit, as Lightning's documentation shows it."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


FINDERS: dict[str, Callable[[], L.Callback]] = {
    "learning rate": lambda: L.callbacks.LearningRateFinder(num_training_steps=20, max_lr=0.5),
    "learning rate, without a suggestion": lambda: L.callbacks.LearningRateFinder(num_training_steps=5, max_lr=4.0),
    "learning rate, not to be set": lambda: L.callbacks.LearningRateFinder(num_training_steps=20, update_attr=False),
    "learning rate, in the second epoch": lambda: SearchesAgain(num_training_steps=20, max_lr=0.5),
    "batch size": lambda: L.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=3),
}


@pytest.mark.parametrize("finder", FINDERS.values(), ids=FINDERS.keys())
@pytest.mark.slow_but_for("learning rate")
def test_a_search_in_the_fit_changes_what_it_changes_without_us(
    tmp_path: Path, finder: Callable[[], L.Callback]
) -> None:
    def came_to(ours: list[Any]) -> Any:
        torch.manual_seed(2)
        module = Searched()
        t = trainer(tmp_path, [finder(), *ours], max_epochs=2)
        t.fit(module)
        (optimizer,) = t.optimizers
        moments = [value for each in optimizer.state.values() for value in each.values()]
        rates = [group["lr"] for group in optimizer.param_groups]
        weights = [parameter.detach() for parameter in module.parameters()]
        return [each.tolist() for each in [*weights, *moments]], rates, module.lr, module.batch_size, t.global_step

    assert came_to(both(tmp_path)) == came_to([])


def test_a_trainer_inside_a_trainer_stays_passive(tmp_path: Path) -> None:
    outer, inner = Tiny(), Tiny()
    outer.inside = lambda: trainer(tmp_path, both(tmp_path), max_steps=3).fit(inner)
    trainer(tmp_path, both(tmp_path)).fit(outer)
    assert [fit.path.name for fit in RunDirectory(tmp_path / "run").fits] == ["fit-000"]
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert outcome.step == 16
    assert joining._active is None


def test_a_list_of_callbacks_used_for_two_trainers(tmp_path: Path) -> None:
    callbacks = both(tmp_path)
    for number in range(2):
        trainer(tmp_path, callbacks).fit(Tiny())
        assert len(RunDirectory(tmp_path / "run").fits) == number + 1


def test_an_exception_that_the_script_swallows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Tiny()

    def fail() -> None:
        raise RuntimeError("on purpose")

    module.inside = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, both(tmp_path)).fit(module)
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", "RuntimeError: on purpose")
    assert joining._active is None
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, both(tmp_path)).fit(Tiny())
    assert [fit.path.name for fit in RunDirectory(tmp_path / "run").fits] == ["fit-000", "fit-001"]


@pytest.mark.parametrize(("at", "follows"), [(12, "Resuming from step 10"), (3, "starts from the beginning")])
def test_what_was_saved_at_an_exception_does_not_go_before_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: int, follows: str
) -> None:
    """Lightning resumes from it without being asked, and it is a state in the middle of a step."""

    def fit(fails: bool) -> None:
        monkeypatch.setattr(context, "fits_begun", {})
        module = Searched()
        saves = L.callbacks.OnExceptionCheckpoint(tmp_path)

        def step(*_: Any) -> None:
            if fails and module.trainer.global_step == at:
                raise RuntimeError("on purpose")

        module.layer.register_forward_pre_hook(step)
        ours = AutoResume(tmp_path / "run", every_n_train_steps=5, async_save=False)
        trainer(tmp_path, [saves, ours], enable_checkpointing=True).fit(module)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(fails=True)
    assert (tmp_path / "on_exception.ckpt").is_file()
    with caplog.at_level(logging.INFO):
        fit(fails=False)
    assert follows in caplog.text
    assert "on_exception.ckpt" not in caplog.text


class Raises(L.Callback):
    def __init__(self, hook: str) -> None:
        self.hook = hook
        setattr(self, hook, self._raise)

    def _raise(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{self.hook} on purpose")


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_another_callback_that_raises_when_a_fit_ends_does_not_make_later_fits_passive(
    tmp_path: Path, hook: str
) -> None:
    module = Tiny()

    def fail() -> None:
        raise RuntimeError("the fault")

    if hook == "on_exception":
        module.inside = fail
    with pytest.raises(RuntimeError, match=f"{hook} on purpose"):
        trainer(tmp_path, [Raises(hook), *both(tmp_path)]).fit(module)
    trainer(tmp_path, both(tmp_path)).fit(Tiny())
    assert [fit.path.name for fit in RunDirectory(tmp_path / "run").fits] == ["fit-000", "fit-001"]
    assert RunDirectory(tmp_path / "run").fit(1).outcome is not None
    assert joining._active is None


class RaisesAtTheEnd(SessionCallback):
    """Raises in what it does when the fit is left, at ``place``; notes what comes after it."""

    def __init__(self, place: str, run_dir: Path) -> None:
        self.place = place
        self.run_dir = run_dir
        self.called: list[str] = []

    def _participate(self, session: FitSession) -> Participant:
        class Raises(Participant):
            pass

        class Notes(Participant):
            def leave(_) -> None:
                self.called.append("leave")

            def left(_) -> None:
                self.called.append("left")

        def fail(participant: Participant) -> None:
            raise RuntimeError("on purpose")

        setattr(Raises, self.place, fail)
        session.fit.participants.add(Raises())
        return Notes()


@pytest.mark.parametrize("place", ["leave", "left"])
def test_what_raises_when_a_fit_is_left_keeps_nothing_else_from_being_undone(tmp_path: Path, place: str) -> None:
    callback = RaisesAtTheEnd(place, tmp_path / "run")
    threads = set(threading.enumerate())
    first = trainer(tmp_path, [*both(tmp_path), callback])
    before = dict(vars(first.strategy)), dict(vars(first._checkpoint_connector)), dict(vars(first.fit_loop))
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    with pytest.raises(RuntimeError, match="on purpose"):
        first.fit(Tiny())
    assert callback.called == ["leave", "left"]
    assert joining._active is None
    assert joining._active is None
    assert set(threading.enumerate()) <= threads
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    for owner, names in zip((first.strategy, first._checkpoint_connector, first.fit_loop), before, strict=True):
        assert vars(owner).keys() <= names.keys() | {"_optimizers", "_lightning_optimizers", "_lightning_module"}
    trainer(tmp_path, both(tmp_path)).fit(Tiny())
    assert [fit.path.name for fit in RunDirectory(tmp_path / "run").fits] == ["fit-000", "fit-001"]


def test_processes_that_would_overwrite_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="2 workers were started, but this Trainer has 1"):
        trainer(tmp_path, both(tmp_path)).fit(Tiny())
    assert not (tmp_path / "run").exists()


def test_the_run_directory_of_the_callbacks_is_one_however_it_is_written(tmp_path: Path) -> None:
    spellings = "~/run", Path.home() / "run", os.path.relpath(Path.home() / "run")
    callbacks: list[L.Callback] = [Preemption(run_dir=spellings[0]), *(AutoResume(run_dir=each) for each in spellings)]
    assert joining._own_run_dir(L.Trainer(callbacks=callbacks, logger=False)) == "~/run"
    callbacks[0] = Preemption(run_dir=tmp_path)
    callbacks.append(AutoResume(run_dir=spellings[0]))
    with pytest.raises(ValueError, match="must share one run_dir") as refused:
        joining._own_run_dir(L.Trainer(callbacks=callbacks, logger=False))
    assert str(refused.value).count("'~/run'") == 1


@pytest.mark.slow
def test_spawned_processes_are_refused(tmp_path: Path) -> None:
    config = make(tmp_path, "run", trainer={"strategy": "ddp_spawn"})
    codes, text = run(config, tmp_path / "run")
    assert codes == [1]
    assert "cannot be resumed: these processes end with the fit" in text


def finished(tmp: Path, **options: Any) -> tuple[dict[str, Any], Any, list[Path]]:
    """A finished run, its result, and its checkpoints: the final one first."""
    config = make(tmp, "run", **options)
    codes, text = run(config, tmp / "run")
    assert codes == [0], text
    return config, result(config), resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)


def test_a_damaged_final_state_is_trained_again(tmp_path: Path) -> None:
    config, first, checkpoints = finished(tmp_path)
    checkpoints[0].write_bytes(b"damaged")
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 45" in text
    assert "not trained again" not in text
    assert result(config) == first


def test_a_final_state_that_could_not_be_saved_is_trained_again(tmp_path: Path) -> None:
    config, first, checkpoints = finished(tmp_path, disk_full_at=48)
    assert not resume.is_final(checkpoints[0])
    assert "Safe      step 45" in status(config["run_dir"])
    codes, text = run({**config, "disk_full_at": None}, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 45" in text
    assert result(config) == first == undisturbed(tmp_path)[0]


def test_the_final_state_is_the_one_after_all_hooks(tmp_path: Path) -> None:
    config, first, _ = finished(tmp_path, halves_at_end=True)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "not trained again" in text
    assert result(config)[0]["weights"] == first[0]["weights"]


def test_raising_max_steps_goes_on_from_the_end_if_there_is_nothing_else(tmp_path: Path) -> None:
    config, _, _ = finished(tmp_path, trainer={"max_steps": 20, "max_epochs": -1}, save_every=None)
    codes, text = run({**config, "trainer": {"max_steps": 40, "max_epochs": -1}}, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 20" in text
    assert result(config)[0]["step"] == 40


def test_a_raised_max_epochs_with_hooks_that_draw(tmp_path: Path) -> None:
    config, _, _ = finished(tmp_path, draws_at_start=True, trainer={"max_epochs": 2})
    codes, text = run({**config, "trainer": {"max_epochs": 4}}, tmp_path / "run")
    assert codes == [0], text
    longer = undisturbed(tmp_path, draws_at_start=True, trainer={"max_epochs": 4})[0]
    # on_train_start is called once more than in the longer run; what it draws is drawn before the random state is set
    assert result(config) == longer


def test_a_learning_rate_finder_does_not_undo_a_resume(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        lr_finder=True,
        numpy=False,
        events=[{"at": "train", "step": 27, "do": "SIGKILL", "once": True}],
    )
    run(config, tmp_path / "run")
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 25" in text
    assert result(config)[0]["step"] == 48


def test_ckpt_path_last_means_resume(tmp_path: Path) -> None:
    save = {"every_n_train_steps": 8, "save_last": True, "dirpath": str(tmp_path / "own")}
    options = {"model_checkpoint": save, "ckpt_path": "last", "numpy": False}
    config = make(tmp_path, "run", events=[{"at": "train", "step": 27, "do": "SIGKILL", "once": True}], **options)
    run(config, tmp_path / "run")
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 25" in text
    assert result(config) == undisturbed(tmp_path)[0]


def test_a_script_that_skips_finished_fits_gets_no_other_fits_weights(tmp_path: Path) -> None:
    events = [{"at": "train", "step": 9, "fit": 1, "do": "SIGKILL", "once": True}]
    options = {"fits": 2, "folds": True, "trainer": {"max_epochs": 1}}
    config = make(tmp_path, "run", events=events, **options)
    assert run(config, tmp_path / "run")[0] == [-signal.SIGKILL]
    codes, text = run({**config, "skip_fits": 1}, tmp_path / "run")
    assert codes == [1]
    assert "holds a finished fit with other training data" in text
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_fits_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (0, 1000, 101, 999):
        RunDirectory(tmp_path).fit(index).create()
    assert [fit.path.name for fit in RunDirectory(tmp_path).fits] == ["fit-000", "fit-101", "fit-999", "fit-1000"]
