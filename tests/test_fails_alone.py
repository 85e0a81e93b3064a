"""What fails on one rank fails on all, or on none: nobody is left behind in a collective that it does not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.checkpoint import resume
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks
from tests.test_exact_resume import make

ALL = ["preemption", "auto_resume", "nan_guard", "local_checkpoint", "replica_check"]
LEFT_BEHIND = ("Connection closed by peer", "Connection reset by peer", "Timed out")
"""What gloo says to a rank that waits for one that has gone, or does not come.

A rank may leave a moment after rank 0, which holds the store: that line names ``TCPStore`` and is none of these.
"""


def start(tmp: Path, config: dict[str, Any]) -> tuple[list[int | None], str]:
    """Runs two ranks that nobody ends because the other has gone; returns how they have ended."""
    ranks = Ranks({**config, "collective_timeout_s": 60}, tmp / "run")
    codes = ranks.wait(kill_rest=False)
    text = ranks.text()
    lines = [line for line in text.splitlines() if "TCPStore" not in line]
    assert not [line for line in lines if any(each in line for each in LEFT_BEHIND)], text
    return codes, text


def settings(tmp: Path, *fails: dict[str, Any], **options: Any) -> dict[str, Any]:
    here = {"every_n_train_steps": 1000, "dir": str(tmp / "node")}
    common = {"trainer": {"devices": 2}, "callbacks": ALL, "local": here, "patience_s": 0.0}
    tmp.mkdir(exist_ok=True)
    return make(tmp, "run", fails=list(fails), **{**common, **options})


def test_what_hinders_one_rank_leaves_no_other_behind(tmp_path: Path) -> None:
    """A save, a stop and a start in which one rank fails: none of it ends a training, but for the last."""
    config = settings(
        tmp_path,
        {"rank": 1, "what": "lightning_resilience.run.run_directory:load_json", "of": "fingerprint"},
        {
            "rank": 1,
            "what": "lightning_resilience._lightning.lightning_strategies:named_state",
            "call": 1,
        },  # the check of the first save
        {"rank": 1, "what": "lightning_resilience.fit.replica_comparison:digest_of"},
        {"rank": 0, "what": "lightning_resilience.fit.saving:read_history", "call": 1},
        events=[{"at": "train", "step": 12, "rank": 1, "do": "SIGTERM"}],
    )
    codes, text = start(tmp_path, config)
    assert len(set(codes)) == 1, text
    assert "The state of step 5 is not saved" in text
    assert "rank 1: it could not be checked (OSError" in text
    assert "Rank 1 cannot compare its state with the other ranks" in text
    assert "Could not read the duration of the last save" in text
    fit = RunDirectory(config["run_dir"]).fit(0)
    assert fit.outcome is not None
    assert fit.outcome.status == "interrupted"
    newest = resume.checkpoints(fit.checkpoints)[0]
    assert resume.step_of(newest) == fit.outcome.step

    config = settings(
        tmp_path / "again",
        {"rank": 1, "what": "lightning_resilience._lightning.lightning_checkpoints:load_checkpoint"},
        ckpt_path=str(newest),
    )
    codes, text = start(tmp_path / "again", config)
    assert codes == [1, 1], text
    assert "RuntimeError: rank 1: OSError: [Errno 5] the test has load_checkpoint fail" in text, text


def test_old_checkpoints_that_cannot_be_looked_for_end_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    resume.retain(tmp_path / "file", keep=2, step=9)
    assert "could not be listed" in caplog.text
