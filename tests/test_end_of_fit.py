"""The final state is safe before ``on_train_end`` may take its time; what that changes is part of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import AutoResume
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.run import exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed
from tests.test_exact_resume_edges import VALIDATES, Killed, Script, averaged, pruned_at_validation

STEPS = 48


def final_saves(run_dir: Path | str) -> list[int]:
    """The steps of the final states that were written."""
    events = read_ledger(RunDirectory(run_dir).ledger)
    return [each["step"] for each in events if each["event"] == "saved" and each["reason"] == "finished"]


def killed_at_the_end(tmp: Path, **options: Any) -> dict[str, Any]:
    """A run that is killed in the module's ``on_train_end``."""
    events = [{"at": "train_end", "step": STEPS, "rank": 0, "do": "SIGKILL", "once": True}]
    config = make(tmp, "run", events=events, **options)
    assert -signal.SIGKILL in run(config, tmp / "run")[0]
    return config


RUNS = {
    "1 rank": {"validation": True},
    "1 rank, changed by it": {"halves_at_end": True},
    "2 ranks, changed by it": {"halves_at_end": True, "trainer": {"devices": 2}},
    "2 ranks": {"trainer": {"devices": 2}},
    "2 ranks that share it out": {"halves_at_end": True, "trainer": {"devices": 2}, "sharded": True},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, id=name, marks=pytest.mark.campaign if name != "2 ranks, changed by it" else ())
        for name, each in RUNS.items()
    ],
)
def test_killed_in_on_train_end(tmp_path: Path, options: dict[str, Any]) -> None:
    """Only that is done again: nothing is trained again, and what has not changed is not written again."""
    config = killed_at_the_end(tmp_path, **options)
    trained = samples(config)
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    assert f"Resuming from step {STEPS}" in text
    assert samples(config) == trained
    assert result(config) == undisturbed(tmp_path, **options)[0]
    changes = "halves_at_end" in options
    assert final_saves(config["run_dir"]) == [STEPS] * (1 + changes)
    codes, text = run(config, tmp_path / "run")
    assert "not trained again" in text
    again, first = result(config)[0], undisturbed(tmp_path, **options)[0][0]
    for key in ("weights", "step", "epoch", "lr", "random"):
        assert again[key] == first[key]


def main(config: dict[str, Any]) -> None:
    """A program for the ranks: rank 1 fails in the last hook before the end, where Lightning itself gathers nothing."""

    class Fails(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.global_rank == 1:
                raise RuntimeError("on purpose")

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
        callbacks=[AutoResume(config["run_dir"]), Fails()],
        **quiet,
    )
    trainer.fit(BoringModel())


def test_a_rank_that_fails_behind_its_last_batch_is_named_by_the_others(tmp_path: Path) -> None:
    """They would wait for it in the collectives of the final save, and learn that a connection was closed."""
    config = make(tmp_path, "run", program="tests.test_end_of_fit", trainer={"devices": 2})
    ranks = Ranks(config, tmp_path / "run")
    assert ranks.wait(kill_rest=False) == [1, 1], ranks.text()
    assert "PeerLost: rank 1 stopped: RuntimeError: on purpose" in ranks.text()


def test_a_fit_whose_outcome_could_not_be_written_has_finished_all_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"early_stopping": True, "validation": True, "halves_at_end": True}
    config = make(tmp_path, "run", trainer={"max_epochs": 8}, **options)
    assert run(config, tmp_path / "run")[0] == [0]
    first, fit = result(config), RunDirectory(config["run_dir"]).fit(0)
    (fit.path / "outcome.json").unlink()
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "not trained again" in text
    assert (result(config)[0]["weights"], result(config)[0]["step"]) == (first[0]["weights"], first[0]["step"])
    assert fit.outcome is not None
    assert fit.outcome.status == "finished"


def test_stopped_behind_the_last_of_max_steps_the_rest_of_the_fit_is_done(tmp_path: Path) -> None:
    """Lightning does not run a fit again whose steps are all done, not even its last validation."""
    options: dict[str, Any] = {"validation": True, "save_every": 20, "trainer": {"max_steps": STEPS, "max_epochs": -1}}
    events = [{"at": "validation", "step": STEPS, "do": "SIGTERM", "once": True}]
    config = make(tmp_path, "run", events=events, **options)
    run(config, tmp_path / "run")
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert result(config) == undisturbed(tmp_path, **options)[0]
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "finished"


@pytest.mark.slow
def test_a_hook_that_sleeps_at_the_end_loses_nothing_and_is_told_what_to_do(tmp_path: Path) -> None:
    limits = "setup:60,step:60,checkpointing:60,out_of_section:2"
    config = make(
        tmp_path,
        "run",
        events=[{"at": "train_end", "step": STEPS, "do": "sleep", "seconds": 100, "once": True}],
        callbacks=["fault_tolerance", "auto_resume"],
        fault_tolerance={"section_timeouts": limits, "calculate_timeouts": False},
    )
    codes, text = run(config, tmp_path / "run")
    assert codes == [exit_codes.HUNG], text
    assert re.search(rf"Hang: rank 0 .* is stuck in do \(program\.py:\d+\) at step {STEPS}\.", text), text
    assert "section out_of_section allows 2 s" in text
    assert 'FaultTolerance(section_timeouts="out_of_section:SECONDS")' in text
    assert "report_progress()" in text
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert f"Resuming from step {STEPS}" in text
    assert result(config) == undisturbed(tmp_path, callbacks=["auto_resume"])[0]


class EndsLate(L.Callback):
    """Is killed at the end of the training, unless it was before."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_train_end(self, *args: Any) -> None:
        torch.rand(3)
        if self.marker.exists():
            self.marker.unlink()
            raise Killed


def smoothed() -> list[Any]:
    return [EMAWeightAveraging(decay=0.9)]


CHANGED_AT_THE_END: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], int]] = {
    "smoothed": (smoothed, {}, 0),
    "smoothed, and steps that end in an epoch": (smoothed, {"max_steps": 17, "max_epochs": -1}, 0),
    "averaged": (averaged, {}, 1),
    "pruned": (pruned_at_validation, VALIDATES, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGED_AT_THE_END)
def test_ends_that_change_the_weights(tmp_path: Path, case: str) -> None:
    """Killed behind what changes them: they are changed once, and a larger limit knows nothing of it."""
    callbacks, options, trained_again = CHANGED_AT_THE_END[case]
    marker = tmp_path / "marker"
    script = Script(tmp_path, lambda: [*callbacks(), EndsLate(marker)], options=options)
    expected = script.plain()
    marker.touch()
    script.start()
    assert not marker.exists()
    end = script.start()
    assert len(end.module.seen) == trained_again
    assert end.digest == expected
    again = script.start()
    assert (again.module.seen, again.digest) == ({}, expected)
    more = {"max_steps": 30} if "max_steps" in options else {"max_epochs": 6}
    assert script.start(**more).digest == script.plain(**more)


@pytest.mark.slow_but_for("in an epoch")
@pytest.mark.parametrize("options", [{"max_steps": 17, "max_epochs": -1}, {}], ids=["in an epoch", "behind one"])
def test_killed_at_the_end_and_begun_again_with_a_larger_limit(tmp_path: Path, options: dict[str, Any]) -> None:
    marker = tmp_path / "marker"
    script = Script(tmp_path, lambda: [EndsLate(marker)], options=options)
    marker.touch()
    script.start()
    assert resume.is_final(script.checkpoints[0])
    more = {"max_steps": 30} if options else {"max_epochs": 6}
    assert script.start(**more).digest == script.plain(**more)


def test_what_the_end_has_changed_and_could_not_be_saved_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, smoothed)
    save, written = checkpoint_file.save, []

    def fails_the_second_time(obj: Any, path: Path, *args: Any) -> Any:
        written.append(resume.is_final(path))
        if sum(written) == 2:
            raise OSError(28, "No space left on device")
        return save(obj, path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "save", fails_the_second_time)
        first = script.start()
    assert sum(written) == 2
    again = script.start()
    assert (again.module.seen, again.digest) == ({}, first.digest)
    assert len(final_saves(tmp_path / "run")) == 2
    assert script.start().digest == first.digest
    assert len(final_saves(tmp_path / "run")) == 2


class Counts(L.Callback):
    """Keeps a number that is another one after the end."""

    number = 0

    def on_train_end(self, *args: Any) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


@pytest.mark.slow
def test_what_is_written_at_the_end(tmp_path: Path) -> None:
    """Once, but for an end that changes something; a finished fit is not written again."""
    timed = Script(tmp_path / "timed", lambda: [L.callbacks.Timer()], options={"max_epochs": 1})
    timed.start()
    timed.start()
    assert final_saves(timed.tmp / "run") == [12]
    counted: list[Counts] = []

    def counts() -> list[Any]:
        counted.append(Counts())
        return counted[-1:]

    script = Script(tmp_path / "counts", counts, options={"max_epochs": 1})
    script.start()
    script.start()
    assert final_saves(script.tmp / "run") == [12, 12]
    assert [each.number for each in counted] == [1, 1]


class Breaks(Counts):
    """Can no longer be saved after the end."""

    def state_dict(self) -> dict[str, Any]:
        if self.number:
            raise RuntimeError("on purpose")
        return super().state_dict()


def test_a_state_that_cannot_be_collected_after_the_end_does_not_fail_the_fit(tmp_path: Path) -> None:
    script = Script(tmp_path, lambda: [Breaks()], options={"max_epochs": 1})
    assert script.start().trainer.state.finished
    assert resume.is_final(script.checkpoints[0])  # that of before
    assert not script.start().module.seen
