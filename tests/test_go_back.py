"""A fit goes back to its newest state without a restart, and ends bitwise as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import result, run, samples
from tests.test_exact_resume import LOADERS, TRAINERS, make, undisturbed


def gone_back(tmp: Path, step: int, **options: Any) -> tuple[Any, Any]:
    events = [{"at": "train", "step": step, "do": "go_back", "once": True}]
    config = make(tmp, "disturbed", events=events, **options)
    codes, text = run(config, tmp / "disturbed")
    assert set(codes) == {0}, text
    assert "Resuming from step" in text, text
    return result(config), samples(config)


@pytest.mark.parametrize("options", LOADERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert gone_back(tmp_path, 27, **options) == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS.keys())
def test_what_the_trainer_does_beside(tmp_path: Path, options: dict[str, Any]) -> None:
    assert gone_back(tmp_path, 21, **options) == undisturbed(tmp_path, **options)


RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"trainer": {"devices": 2}, "workers": 1, "validation": True, "plateau": True},
    "four ranks": {"trainer": {"devices": 4}},
    "sharded ranks": {"trainer": {"devices": 2}, "sharded": True},
}
LOCAL: dict[str, Any] = {
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "save_every": 1000,
    "step_s": 0.03,
}


@pytest.mark.parametrize("options", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("tier", ["global", "local"])
def test_ranks(tmp_path: Path, options: dict[str, Any], tier: str) -> None:
    local = {**LOCAL, "local": {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}} if tier == "local" else {}
    assert gone_back(tmp_path, 27, **options, **local) == undisturbed(tmp_path, **options, **local)
