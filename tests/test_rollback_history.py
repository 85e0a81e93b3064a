"""What a fit must know of its bad steps after a restart, and files that say something else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lightning_resilience.detect.numerics.reruns import PendingRerun
from lightning_resilience.detect.numerics.rollback_history import REFILL_STEPS, RollbackHistory, Window

FULL = RollbackHistory(
    2,
    rollbacks=1,
    trouble=40,
    went_back_from=Window(0, 3, 4, 3),
    skipped=[Window(0, 3, 4, 3), Window(1, 8, 12, 20)],
    validated=[Window(2, 0, 1, 30)],
    suspect=PendingRerun((2, 0), ("a", "b"), "the loss is nan", 2, True),
    initially_nonfinite=["mask"],
)


@pytest.mark.parametrize("troubles", [FULL, RollbackHistory(2)], ids=["much", "nothing"])
def test_nothing_is_forgotten(troubles: RollbackHistory, tmp_path: Path) -> None:
    troubles.write(tmp_path / "file")
    assert RollbackHistory.read(tmp_path / "file", 2) == troubles
    names = "world_size rollbacks trouble went_back_from passed_over validated suspect unfit_from_birth of_global"
    assert json.loads((tmp_path / "file").read_text()).keys() == {*names.split()}, "runs of before read the same"


def test_with_other_ranks_the_batches_are_others(tmp_path: Path) -> None:
    FULL.write(tmp_path / "file")
    assert RollbackHistory.read(tmp_path / "file", 4) == RollbackHistory(4, 1, 40, initially_nonfinite=["mask"])


def test_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert RollbackHistory.read(tmp_path / "file", 2) == RollbackHistory(2)
    assert not caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"world_size": 2}',
        *(
            json.dumps(
                {
                    **json.loads(json.dumps({"world_size": 2, "rollbacks": 0, "trouble": -1, "went_back_from": None})),
                    **wrong,
                }
            )
            for wrong in (
                {"passed_over": 3, "validated": [], "suspect": None, "initially_nonfinite": None},
                {"passed_over": [[0, 1, 2, 3]], "validated": [], "suspect": None, "initially_nonfinite": None},
                {"passed_over": [], "validated": [], "suspect": {"batch": 3}, "initially_nonfinite": None},
                {"passed_over": [], "validated": [], "suspect": None, "initially_nonfinite": None, "went_back_from": 3},
                {"passed_over": [], "validated": [], "suspect": None, "initially_nonfinite": 5},
            )
        ),
    ],
)
def test_what_cannot_be_understood_is_said(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert RollbackHistory.read(tmp_path / "file", 2) == RollbackHistory(2)
    assert "incompatible format" in caplog.text


def test_a_trouble_has_its_own_count() -> None:
    troubles = RollbackHistory(1)
    for step, rollbacks in [(0, 1), (5, 2), (3, 3), (5 + REFILL_STEPS, 4), (6 + 2 * REFILL_STEPS, 1)]:
        troubles.count(step, [Window(0, step, step + 1, step)], True)
        assert (step, troubles.rollbacks) == (step, rollbacks)
    assert len(troubles.skipped) == 5


@pytest.mark.parametrize(
    ("last", "window", "loaded_step", "is_first"),
    [
        (None, 8, 5, True),
        (8, 8, 5, False),  # the same batch, from an older state
        (8, 9, 5, False),  # beyond: another trouble
        (8, 7, 5, True),  # the older state is worse
        (8, 8, 8, False),  # a state from right before it
        (8, 9, 9, True),  # a state that was saved after that trouble: nothing speaks for it yet
        (8, 500, 495, True),
    ],
)
def test_a_state_from_which_the_training_has_come_far_enough_is_not_to_blame(
    last: int | None, window: int, loaded_step: int, is_first: bool, tmp_path: Path
) -> None:
    def at(step: int) -> Window:
        return Window(step // 8, step % 8, step % 8 + 1, step)

    troubles = RollbackHistory(1)
    if last is not None:
        troubles.count(last, [at(last), at(last + 1)], skip=False)
        assert not troubles.skipped
    troubles.write(tmp_path / "file")
    assert RollbackHistory.read(tmp_path / "file", 1).is_first(at(window), loaded_step) is is_first


def test_what_is_passed_over_is_kept_for_all_troubles() -> None:
    troubles = RollbackHistory(1)
    troubles.count(3, [Window(0, 3, 4, 3)], skip=True)
    troubles.count(90, [Window(9, 0, 1, 90)], skip=True)
    assert troubles.skipped == [Window(0, 3, 4, 3), Window(9, 0, 1, 90)]
