"""What loggers are told of the run: in the rows that Lightning logs, over restarts, and what the report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers.logger import Logger

from lightning_resilience import NaNGuard, TrainingDiverged
from lightning_resilience.fit import run_metrics
from lightning_resilience.fit.run_metrics import account_until_now
from lightning_resilience.launch.report import read_run
from lightning_resilience.run.goodput import START
from tests.test_goodput import spent
from tests.test_nan_guard import Model, constant_nan, fit, saving
from tests.test_outputs import Worsens, make, stopped


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def told(self) -> list[tuple[int | None, dict[str, float]]]:
        """What it was told of the run, with the step."""
        ours = [(step, {name: each for name, each in row.items() if "resilience/" in name}) for step, row in self.rows]
        return [(step, row) for step, row in ours if row]


class WandbLogger(Rows):
    """What is shown there is known by its name; here, everything that is asked of a W&B run but alerts fails."""

    def __init__(self) -> None:
        super().__init__()
        self.alerts: list[dict[str, Any]] = []

    @property
    def experiment(self) -> Any:
        return self

    def alert(self, **alert: Any) -> None:
        self.alerts.append(alert)


@pytest.fixture
def every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "_EVERY_S", 0.0)


@pytest.mark.usefixtures("every_row")
def test_scalars_of_the_run_are_in_the_rows_that_lightning_logs(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def trained(stops_at: int = -1) -> tuple[L.Trainer, Rows]:
        logger, module = Rows(), Worsens(stops_at)
        trainer = make(module, run, [], logger=logger, enable_checkpointing=False, log_every_n_steps=4)
        if stops_at < 0:
            trainer.fit(module)
        else:
            stopped(lambda: trainer.fit(module))
        return trainer, logger

    _, first = trained(stops_at=11)
    trainer, second = trained()
    assert [step for step, _ in first.told] == [3, 7, 11]
    assert [step for step, _ in second.told] == [15, 19, 23, 27, 31], "neither at other steps nor at validations"
    assert all("loss" in row for _, row in second.rows if "resilience/goodput" in row), "no row of their own"
    shown = {*trainer.logged_metrics, *trainer.callback_metrics, *trainer.progress_bar_metrics}
    assert shown == {"loss", "late", "val"}
    assert all(row["resilience/restarts"] == 0 for _, row in first.told)
    _, last = second.told[-1]
    assert last["resilience/restarts"] == 1
    assert last["resilience/steps_redone"] == 0
    assert last["resilience/last_save_step"] >= 25
    total = sum(value for name, value in last.items() if "/seconds/" in name)
    assert last["resilience/seconds/productive"] / total == pytest.approx(last["resilience/goodput"], abs=0.01)
    found = read_run(run).goodput
    productive = [row["resilience/seconds/productive"] for _, row in second.told]
    assert productive == sorted(productive)
    assert productive[-1] <= found.by_category["productive"] + 0.001
    start = sum(found.by_category[name] for name in START)
    assert last["resilience/seconds/start"] == pytest.approx(start, abs=0.02)  # sums of rounded milliseconds


@pytest.mark.parametrize("is_launched", [True, False])
def test_what_a_watchdog_has_kept_of_these_ranks_does_not_count_again(is_launched: bool) -> None:
    job = {"elastic_run_id": "job", "restart_count": 1}
    own = spent(100, 130, 130, attempt="fit", **job)
    before = spent(0, 90, 90, attempt="before", elastic_run_id="job", restart_count=0)
    kept = spent(100, 115, 120, attempt="watchdog" if is_launched else "fit", **job)
    found = account_until_now([before], [kept], own, is_launched)
    assert found.by_category["productive"] == 2 * (90 + 30)
    assert found.by_category["idle"] + found.by_category["rendezvous"] == 2 * 10


def test_fast_steps_do_not_log_them_all_the_time(tmp_path: Path) -> None:
    logger, module = Rows(), Worsens()
    make(module, tmp_path, [], logger=logger, enable_checkpointing=False).fit(module)
    assert 1 <= len(logger.told) < 32
    assert logger.told[0][0] == 0


@pytest.mark.usefixtures("every_row")
def test_scalars_that_cannot_be_computed_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(run_metrics, "share_of", fails)
    logger, module = Rows(), Worsens()
    trainer = make(module, tmp_path, [], logger=logger, enable_checkpointing=False, log_every_n_steps=1)
    trainer.fit(module)
    assert trainer.global_step == 32
    assert (len(logger.rows) > 0, logger.told) == (True, [])
    assert caplog.text.count("no scalars of the run") == 1


@pytest.mark.usefixtures("every_row")
def test_steps_done_again_after_a_rollback_are_counted_and_alerts_are_sent(tmp_path: Path) -> None:
    logger = WandbLogger()
    bad = Model(dict.fromkeys(range(6, 500), constant_nan))
    guard = NaNGuard(max_consecutive=2, max_rollbacks=2)
    with pytest.raises(TrainingDiverged):
        fit(bad, tmp_path, guard, saving(2), logger=logger, log_every_n_steps=1, max_epochs=5)
    told = [row for _, row in logger.told]
    assert told, "W&B that fails leaves the other loggers what they are told"
    assert told[-1]["resilience/steps_redone"] > 0
    titles = [each["title"] for each in logger.alerts]
    assert set(titles) == {"Rolled back", "The run gave up"}
    assert titles[-1] == "The run gave up"
    assert all(len(title) < 64 for title in titles)
