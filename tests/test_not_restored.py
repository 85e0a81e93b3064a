"""A checkpoint that verifies, and that the fit cannot be restored from all the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch.distributed.checkpoint.api import CheckpointException

from lightning_resilience.checkpoint import dcp, resume
from lightning_resilience.run.run_directory import AnotherFit, RunDirectory
from tests.harness import result, run
from tests.ledgers import read_ledger
from tests.test_dcp import reseal
from tests.test_exact_resume import make, undisturbed
from tests.test_local_checkpoint import Run, ends_well, ledger


class Picky(L.Callback):
    """Takes back any state but that of one step."""

    def __init__(self, error: BaseException | None) -> None:
        self.step, self.error = 0, error

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["step"] == 12 and self.error is not None:
            raise self.error


@pytest.fixture
def killed(tmp_path: Path) -> Run:
    killed = Run(tmp_path)
    killed.die(killed.local(), Picky(None), step=14)
    return killed


REASON = "it cannot be taken back"
ALL = {0: (KeyError("a key"), None), 1: (KeyError("a key"), None)}
STORAGE = {0: (KeyError("a key"), None), 1: (OSError(116, "stale"), None)}


def fails(run: Run, error: BaseException, times: int) -> None:
    for _ in range(times):
        with pytest.raises(type(error)):
            run.fit(run.local(), Picky(error))


@pytest.mark.slow_but_for("error0")
@pytest.mark.parametrize("error", [RuntimeError(REASON), CheckpointException(REASON, ALL)])
def test_what_has_failed_twice_is_set_aside(
    killed: Run, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    fails(killed, error, 2)
    ends_well(killed, killed.local(), Picky(error))
    assert killed.resumes == [("local", 12), ("local", 12), ("local", 9)]
    [condemned] = ledger(killed.path, "condemned")
    assert condemned["reason"] == f"2 attempts could not restore it ({type(error).__name__}: {error})"
    assert "the local checkpoint of step 12 is set aside, trying the next best one: 2 attempts" in caplog.text


@pytest.mark.parametrize(
    ("error", "times", "why"),
    [
        (RuntimeError(REASON), 1, "it may have been the node"),
        (OSError(REASON), 2, "the storage says nothing about it"),
        (CheckpointException(REASON, STORAGE), 2, "the same, on another rank"),
    ],
)
@pytest.mark.slow_but_for("error0-1-it may have been the node")
def test_what_may_be_good_is_kept(killed: Run, error: BaseException, times: int, why: str) -> None:
    fails(killed, error, times)
    ends_well(killed, killed.local(), Picky(None))
    assert killed.resumes == [("local", 12)] * (times + 1), why
    assert not ledger(killed.path, "condemned")


@pytest.mark.parametrize("tier", ["local", "global"])
@pytest.mark.slow_but_for("local")
def test_a_trainer_that_ends_before_the_checkpoint_says_so_and_keeps_it(tmp_path: Path, tier: str) -> None:
    run = Run(tmp_path)

    def ours() -> L.Callback:
        return run.local() if tier == "local" else run.resume(3)

    run.die(ours(), step=35, max_epochs=3)
    for most in (1, 1.0, np.int64(1)):
        with pytest.raises(AnotherFit, match=f"of epoch 2, but its Trainer ends at max_epochs={most}: raise it, or "):
            run.fit(ours(), max_epochs=most)
    ends_well(run, ours(), max_epochs=3)
    assert run.resumes == [(tier, 33)] * 4
    assert not ledger(run.path, "not_restored")
    assert not ledger(run.path, "condemned")
    assert not ledger(run.path, "fault")[1:], "the first is the death"


@pytest.mark.campaign
def test_a_sharded_checkpoint_that_does_not_fit_together(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sharded": True, "trainer": {"devices": 2}}
    config = make(tmp_path, "run", keep=5, **options)
    run({**config, "events": [{"at": "train", "step": 13, "do": "SIGKILL"}]}, tmp_path / "run")
    newest, *_ = resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)
    found = pickle.loads((newest / dcp.METADATA).read_bytes())
    name = next(name for name in found.state_dict_metadata if "weight" in name)
    del found.state_dict_metadata[name]
    (newest / dcp.METADATA).write_bytes(pickle.dumps(found))
    reseal(newest)
    resume.verify(newest)
    for _ in range(2):
        codes, text = run(config, tmp_path / "run")
        assert any(codes), text
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert f"{newest} is set aside, trying the next best one: 2 attempts could not restore it" in text
    events = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert [event["step"] for event in events if event["event"] == "resumed"] == [10, 10, 5]
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_limits_of_numpy_are_recorded(tmp_path: Path) -> None:
    """Lightning takes them, and JSON does not."""
    run = Run(tmp_path)
    stops = EarlyStopping("loss", patience=np.int64(9), strict=False)
    run.fit(run.resume(3), stops, max_steps=np.int64(6))
    assert RunDirectory(run.path).fit(0).settings["max_steps"] == 6
    run.fit(run.resume(3), max_steps=np.int64(9))
    assert run.trainer.global_step == 9
