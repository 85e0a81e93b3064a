"""Switches of a run: turned off by the environment, a recipe of one's own, saves that the training waits for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_resilience import AutoResume, LocalCheckpoint, checks, recipes, signals
from lightning_resilience.checkpoint.local import LocalSaves
from lightning_resilience.fit import context
from lightning_resilience.launch.cli import launch_settings
from tests.harness import QUIET
from tests.ledgers import read_ledger


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*callbacks: Any, steps: int = 8) -> L.Trainer:
    trainer = L.Trainer(max_steps=steps, callbacks=list(callbacks), **QUIET)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 8)))
    return trainer


def test_turned_off_by_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_RESILIENCE_OFF", "1")
    monkeypatch.setenv(recipes.RECIPE_VARIABLE, "nemo")
    trainer = fit(*recipes.nemo("run").callbacks)
    assert trainer.global_step == 8
    assert recipes.callbacks_factory() == []
    assert list(here.iterdir()) == []
    monkeypatch.setenv("LIGHTNING_RESILIENCE_OFF", "0")
    fit(AutoResume("run"))
    assert (here / "run").exists()


def test_a_recipe_of_ones_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "my_recipes.py").write_text(
        "from dataclasses import replace\nfrom lightning_resilience import recipes\n"
        "def small(): return replace(recipes.workstation(), nan_guard=None)\n"
        "def wrong(): return 5\n"
    )
    (here / "script.py").touch()
    monkeypatch.syspath_prepend(here)
    settings = launch_settings(["--recipe=my_recipes:small", "script.py"])
    assert settings.recipe == "my_recipes:small"
    monkeypatch.setenv(recipes.RECIPE_VARIABLE, settings.recipe)
    names = [type(each).__name__ for each in L.Trainer(**QUIET).callbacks]  # type: ignore[attr-defined]
    assert {"AutoResume", "Preemption"} <= set(names)
    assert "NaNGuard" not in names
    for name, problem in (
        ("my_recipes:wrong", "must return a Recipe"),
        ("my_recipes:none", "MODULE:FUNCTION"),
        ("no_such_module:small", "No module named"),
    ):
        monkeypatch.setenv(recipes.RECIPE_VARIABLE, name)
        with pytest.raises(ValueError, match=problem):
            recipes.callbacks_factory()


@pytest.mark.parametrize("given", ["nem", "x:y:z", "a-b:c", ":f"])
def test_what_is_no_recipe_is_refused_at_once(given: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "script.py").touch()
    with pytest.raises(SystemExit):
        launch_settings([f"--recipe={given}", "script.py"])
    assert ("did you mean nemo?" if given == "nem" else "MODULE:FUNCTION") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("local", "of_the_run", "waits"),
    [(False, True, True), (True, False, False), ("auto", False, True), ("auto", True, False)],
)
def test_a_local_save_that_the_training_waits_for(
    local: Any, of_the_run: bool, waits: bool, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """Complete at the very boundary at which it began, and none left out."""
    waited = []
    wait_for_save = LocalSaves.wait_for_save
    monkeypatch.setattr(
        LocalSaves, "wait_for_save", lambda own, seconds: waited.append(wait_for_save(own, min(seconds, 10.0)))
    )
    saves = LocalCheckpoint(str(here / "local"), every_n_train_steps=2, async_save=local)
    fit(saves, AutoResume("run", async_save=of_the_run))
    assert waited == [True] * 4 * waits  # before the first step, and at steps 2, 4 and 6


def test_a_run_says_what_job_it_is_and_that_it_saves(caplog: pytest.LogCaptureFixture) -> None:
    context.fits_begun.clear()
    logging.getLogger("lightning_resilience").addHandler(caplog.handler)
    try:
        fit(AutoResume("run", every_n_train_steps=1, async_save=False), steps=6)
    finally:
        logging.getLogger("lightning_resilience").removeHandler(caplog.handler)
    saved = [event for event in read_ledger(Path("run/ledger")) if event["event"] == "saved"]
    assert len(saved) >= 6
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Saved step ") for line in dict.fromkeys(lines)) == 1  # and no line for each
    assert any(line.startswith("Job: host=") and "torch" in line for line in lines)


def test_no_deadline_for_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signals.GRACE_PERIOD_VARIABLE, raising=False)
    assert signals.grace_period(0) == float("inf")
    monkeypatch.setenv(signals.GRACE_PERIOD_VARIABLE, "25")
    assert signals.grace_period(0) == 25


def test_health_checks_are_at_one_public_place(here: Path) -> None:
    report = checks.check_node(here, "cpu")
    assert isinstance(report, checks.HealthReport)
    assert report.ok, report
    assert {name for name in dir(checks) if name.startswith("check_")} == {
        name for name in checks.__all__ if name.startswith("check_")
    }
