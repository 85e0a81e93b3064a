"""A fit goes back to its newest state without a restart, and ends bitwise as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import result, run, samples
from tests.test_exact_resume import LOADERS, TRAINERS, make, some, undisturbed


def gone_back(tmp: Path, step: int, says: str = "Resuming from step", **options: Any) -> tuple[Any, Any]:
    events = [{"at": "train", "step": step, "do": "go_back", "once": True}]
    config = make(tmp, "disturbed", events=events, **options)
    codes, text = run(config, tmp / "disturbed")
    assert set(codes) == {0}, text
    assert says in text, text
    return result(config), samples(config)


@pytest.mark.parametrize("options", LOADERS, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.slow_but_for("stateful-False-2")
def test_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert gone_back(tmp_path, 27, **options) == undisturbed(tmp_path, **options)


@pytest.mark.parametrize(
    "options", some(TRAINERS, "accumulation", "hooks", "max_steps", "a schedule", "plateau", "loaders")
)
@pytest.mark.slow_but_for("validation within the epoch", "manual optimization that accumulates")
def test_what_the_trainer_does_beside(tmp_path: Path, options: dict[str, Any]) -> None:
    assert gone_back(tmp_path, 21, **options) == undisturbed(tmp_path, **options)


RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"trainer": {"devices": 2}, "workers": 1, "validation": True, "plateau": True},
    "four ranks": {"trainer": {"devices": 4}},
    "sharded ranks": {"trainer": {"devices": 2}, "sharded": True},
    "sharded ranks, saved in one file": {"trainer": {"devices": 2}, "sharded": "whole file"},
}
LOCAL: dict[str, Any] = {
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "save_every": 1000,
    "step_s": 0.03,
}


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
@pytest.mark.parametrize("options", some(RANKS, "four"))
@pytest.mark.parametrize("tier", ["global", "local"])
def test_ranks(tmp_path: Path, options: dict[str, Any], tier: str) -> None:
    local = {**LOCAL, "local": {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}} if tier == "local" else {}
    assert gone_back(tmp_path, 27, **options, **local) == undisturbed(tmp_path, **options, **local)


@pytest.mark.slow
def test_again_and_again_and_killed_in_between(tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 1, "validation": True}
    back = [{"at": "train", "step": step, "do": "go_back", "once": True} for step in (12, 13, 27, 40)]
    kills = [{"at": "train", "step": step, "do": "SIGKILL", "once": True} for step in (14, 28)]
    config = make(tmp_path, "disturbed", events=[*back, *kills], **options)
    codes: list[int | None] = []
    for _ in range(3):
        codes, text = run(config, tmp_path / "disturbed")
    assert codes == [0], text
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


def test_what_is_newer_is_set_aside(tmp_path: Path) -> None:
    """Two steps back, then killed: a restart must not go on from what the fit has left behind."""
    events = [
        {"at": "train", "step": 30, "do": "go_back", "once": True, "until": 20},
        {"at": "train", "step": 22, "do": "SIGKILL", "once": True, "after": 30},
    ]
    config = make(tmp_path, "disturbed", events=events, save_every=3, keep=6)
    assert run(config, tmp_path / "disturbed")[0] == [-signal.SIGKILL]
    codes, text = run(config, tmp_path / "disturbed")
    assert codes == [0], text
    assert "Resuming from step 21" in text
    assert (result(config), samples(config)) == undisturbed(tmp_path, save_every=3, keep=6)


def test_to_where_the_user_has_begun(tmp_path: Path) -> None:
    source = make(tmp_path, "source", events=[{"at": "train", "step": 22, "do": "SIGTERM"}])
    run(source, tmp_path / "source")
    path = max(Path(source["run_dir"]).glob("fit-000/checkpoints/step-*.ckpt"))
    options = {"ckpt_path": str(path), "save_every": 1000}
    assert gone_back(tmp_path, 27, says="from the checkpoint at", **options) == undisturbed(tmp_path, **options)


def test_with_nowhere_to_go_the_fit_decides(tmp_path: Path) -> None:
    events = [{"at": "train", "step": 7, "do": "go_back", "once": True}]
    codes, text = run(make(tmp_path, "run", events=events, save_every=1000), tmp_path / "run")
    assert codes == [1]
    assert "nothing to go back to" in text


def test_loaders_are_made_of_the_same_random_numbers(tmp_path: Path) -> None:
    """As a new process makes them, whatever the training has drawn meanwhile."""
    options = {"data": "split"}
    assert gone_back(tmp_path, 27, **options) == undisturbed(tmp_path, **options)
