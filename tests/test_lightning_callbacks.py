"""Every callback that Lightning ships: with one that is killed in the middle, a run ends as plain Lightning's would."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as shipped

from tests.harness import run, run_command
from tests.shipped_callbacks import MAKE

PAGE = Path(__file__).parents[1] / "docs" / "callbacks.md"
NAMED = {
    ("BackboneFinetuning", 2): "DDP does not reduce what was frozen when it was made, with or without a restart",
    ("BaseFinetuning", 2): "the same",
}
"""Those that are not exact with so many ranks. Each is named in the table of the page, with what follows."""
IMPOSSIBLE = {("BatchSizeFinder", 2)}  # Lightning refuses it
NEEDS_RICH = {"RichModelSummary", "RichProgressBar"}
TOGETHER = {
    1: ["BackboneFinetuning", "BatchSizeFinder", "LearningRateFinder", "Timer", "WeightAveraging"],
    2: [
        "GradientAccumulationScheduler",
        "LambdaCallback",
        "LearningRateMonitor",
        "SpikeDetection",
        "ThroughputMonitor",
    ],
}
"""With as many ranks, in one Trainer each; with :data:`BOTH`."""
BOTH = ["EarlyStopping", "ModelCheckpoint", "OnExceptionCheckpoint", "TQDMProgressBar"]


def test_every_callback_that_lightning_ships_is_tested_and_in_the_table() -> None:
    found = {name for name, each in vars(shipped).items() if inspect.isclass(each) and issubclass(each, Callback)}
    assert set(MAKE) == found
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(found)


def make(folder: Path, callbacks: list[str], ranks: int, **options: Any) -> dict[str, Any]:
    folder.mkdir()
    return {
        "program": "tests.shipped_callbacks",
        "callbacks": callbacks,
        "folder": str(folder),
        "run_dir": str(folder / "run"),
        "out": str(folder / "out"),
        "trainer": {"devices": ranks},
        **options,
    }


def came_to(config: dict[str, Any]) -> list[Any]:
    return [json.loads(Path(f"{config['out']}.{rank}").read_text()) for rank in range(config["trainer"]["devices"])]


def check(tmp: Path, callbacks: list[str], ranks: int, dies: int) -> None:
    plain = make(tmp / "plain", callbacks, ranks)
    codes, text = run(plain, tmp / "plain")
    assert set(codes) == {0}, text
    config = make(tmp / "ours", callbacks, ranks, ours=True, dies=dies)
    codes, text = run(config, tmp / "ours")
    assert -signal.SIGKILL in codes, text
    codes, text = run(config, tmp / "ours")
    assert set(codes) == {0}, text
    assert "Resuming from step" in text
    assert came_to(config) == came_to(plain)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_in_one_trainer(tmp_path: Path, ranks: int) -> None:
    check(tmp_path, [*TOGETHER[ranks], *BOTH], ranks, dies=27)


def alone() -> Any:
    for name in MAKE:
        for ranks in (1, 2):
            marks = [pytest.mark.campaign]
            if (name, ranks) in NAMED:
                marks.append(pytest.mark.xfail(reason=NAMED[name, ranks], strict=True))
            if (name, ranks) in IMPOSSIBLE:
                marks.append(pytest.mark.skip(reason="Lightning refuses it"))
            if name in NEEDS_RICH and importlib.util.find_spec("rich") is None:
                marks.append(pytest.mark.skip(reason="needs rich"))
            yield pytest.param(name, ranks, marks=marks)


@pytest.mark.parametrize(("name", "ranks"), alone())
def test_each_alone(tmp_path: Path, name: str, ranks: int) -> None:
    check(tmp_path, [name], ranks, dies=27)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        *itertools.product(["LearningRateFinder", "ModelCheckpoint", "EMAWeightAveraging"], [1, 2], [[]]),
        *itertools.product(["LearningRateFinder", "StochasticWeightAveraging"], [2], [["--elastic"]]),
    ],
)
def test_under_launch(tmp_path: Path, name: str, ranks: int, options: list[str]) -> None:
    plain, config = (make(tmp_path / each, [name], ranks) for each in ("plain", "launched"))
    codes, text = run(plain, tmp_path / "plain")
    assert set(codes) == {0}, text
    program = str(Path(__file__).with_name("shipped_callbacks.py"))
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", f"--run-dir={config['run_dir']}"]
    launch += [*options, f"--nproc-per-node={ranks}", program]
    done = run_command([*launch, json.dumps({**config, "dies": 35})])
    assert done.returncode == 0, done.stderr
    assert "Restart 1 inside the job" in done.stderr
    assert ("starting a replacement" in done.stderr) == bool(options)
    assert came_to(config) == came_to(plain)
