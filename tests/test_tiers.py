"""What comes first when there is more than one state to resume from, and what is the user's choice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.ledger import read_ledger
from lightning_resilience.run_directory import RunDirectory
from tests.harness import result, run, samples
from tests.test_exact_resume import make, undisturbed


def resumed(config: dict[str, Any]) -> list[tuple[str, int]]:
    events = read_ledger(RunDirectory(config["run_dir"]).ledger)
    return [(event["tier"], event["step"]) for event in events if event["event"] == "resumed"]


def kill(step: int) -> dict[str, Any]:
    return {"at": "train", "step": step, "do": "SIGKILL", "once": True}


@pytest.mark.parametrize(
    "callbacks", [["preemption", "auto_resume", "local_checkpoint"], ["preemption", "auto_resume"]]
)
def test_stopped_in_the_middle_of_a_validation(tmp_path: Path, callbacks: list[str]) -> None:
    """The state that a preemption saves is then that of the beginning of the validation, in either tier."""
    options = {
        "validation": True, "plateau": True, "save_every": None,
        "trainer": {"val_check_interval": 4, "max_epochs": 2},
    }  # fmt: skip
    stop = {"at": "validation", "step": 12}
    config = make(
        tmp_path,
        "disturbed",
        callbacks=callbacks,
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 1000},
        events=[{**stop, "do": "SIGTERM", "once": True}, {**stop, "do": "sleep", "seconds": 0.3}],
        **options,
    )
    for _ in range(2):
        codes, text = run(config, tmp_path / "disturbed")
    assert codes == [0], text
    assert resumed(config) == [("local" if len(callbacks) == 3 else "global", 12)]
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


MODEL_CHECKPOINT = {"save_last": True, "every_n_train_steps": 8, "save_top_k": 1}


def test_last_means_the_newest_local_state_too(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        numpy=False,
        callbacks=["local_checkpoint"],
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 5},
        model_checkpoint={**MODEL_CHECKPOINT, "dirpath": str(tmp_path / "theirs")},
        ckpt_path="last",
        save_every=None,
        events=[kill(15)],
    )
    for _ in range(2):
        codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    [(tier, step)] = resumed(config)
    assert (tier, step) in [("local", 10), ("local", 15)], "and not 8, where last.ckpt is"
    assert samples(config) == undisturbed(tmp_path, numpy=False, save_every=None)[1]


@pytest.mark.parametrize("local", [True, False])
def test_a_run_continued_from_a_chosen_path_goes_on_from_there_after_a_fault(tmp_path: Path, local: bool) -> None:
    """Whatever it had saved before, with more steps, is another course of the training."""
    config = make(
        tmp_path,
        "run",
        numpy=False,
        callbacks=["auto_resume", *(["local_checkpoint"] if local else [])],
        local={"dir": str(tmp_path / "local"), "every_n_train_steps": 4},
        model_checkpoint={**MODEL_CHECKPOINT, "dirpath": str(tmp_path / "theirs")},
        save_every=10,
        events=[kill(25), kill(14), kill(21)],
    )
    run(config, tmp_path / "run")  # killed at 14
    chosen = tmp_path / "chosen.ckpt"
    shutil.copy(next((tmp_path / "theirs").glob("epoch*.ckpt")), chosen)  # of step 8
    run(config, tmp_path / "run")  # killed at 21
    before = len(resumed(config))
    config = {**config, "ckpt_path": str(chosen), "model_checkpoint": None}
    for _ in range(2):  # from 8 on, killed at 25; and again
        codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    [(_, step)] = resumed(config)[before:]
    assert step >= 20, "what was saved since, and not the chosen path again"
    assert "is set aside" in (tmp_path / "run" / "output").read_text()
    quarantined = {path.name for path in (RunDirectory(config["run_dir"]).fit(0).quarantine).iterdir()}
    assert any(name.startswith("step-000000000020.ckpt") for name in quarantined), "and nothing is deleted"


def test_going_back_to_an_older_checkpoint_of_its_own(tmp_path: Path) -> None:
    config = make(tmp_path, "run", save_every=5, events=[kill(24)])
    run(config, tmp_path / "run")
    fit = RunDirectory(config["run_dir"]).fit(0)
    codes, text = run({**config, "ckpt_path": str(fit.checkpoints / "step-000000000015.ckpt")}, tmp_path / "run")
    assert codes == [0], text
    assert any(path.name.startswith("step-000000000020") for path in fit.quarantine.iterdir())
    assert not any(path.name.startswith("step-000000000015") for path in fit.quarantine.iterdir())
    assert (result(config), samples(config)) == undisturbed(tmp_path, save_every=5)
