"""Points at which a rank of the test program kills itself, or others too, when it is asked to by a file.

Who wants a kill writes ``aim-RANK``: the name of a point, how often the rank passes it before, and whom it kills first.
At one of them it does not kill itself, see :data:`SKEWED`.
The rank writes ``pid-RANK`` when its script begins, and each kill into ``killed``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_resilience.launch import membership

POINTS: dict[str, tuple[str, str]] = {
    "forward": ("torch.nn:Tanh.forward", "before"),
    "buffer broadcast": ("torch.nn.parallel:DistributedDataParallel._sync_buffers", "before"),
    "after the buffer broadcast": ("torch.nn.parallel:DistributedDataParallel._sync_buffers", "after"),
    "behind the backward pass": ("torch.optim.adam:adam", "before"),
    "in the optimizer step": ("torch.optim.adam:adam", "after"),
    "local save": ("lightning_resilience.checkpoint.node_store:ShardWriter.publish", "before"),
    "end of a local save": ("lightning_resilience.checkpoint.save_coordinator:SaveCoordinator.finish", "after"),
    "agreement": ("lightning_resilience.agreement:Agreement.boundary", "before"),
    "joining": ("torch.distributed:init_process_group", "before"),
    "joined": ("torch.distributed:init_process_group", "after"),
    "restoring": ("lightning_resilience.fit.restore:Restorer.restore_from", "before"),
    "restored": ("lightning_resilience.fit.restore:Restorer.restore_from", "after"),
}
"""Functions that are points, by their names."""

BUCKETS = ("first bucket", "last bucket")
"""Hooks of gradients."""

IN_THE_PROGRAM = {
    "batch_end": "between batches",
    "validation": "validation",
    "epoch_end": "end of an epoch",
    "save": "save",
    "train_end": "end of the fit",
    "reduced": "behind the reduction, as if it had failed on another rank",
}
"""What the test program passes itself, by its own names."""

ALL_POINTS = [*BUCKETS, *IN_THE_PROGRAM.values(), *POINTS]

SKEWED = IN_THE_PROGRAM["reduced"]
"""Here the rank kills the others, and takes its own reduction for one that has failed: it stays a step behind."""

IN_A_RECOVERY = ("joining", "joined", "restoring", "restored")
"""What ranks pass only when they start, or go back."""


@dataclass(frozen=True)
class Aim:
    """A kill that is asked for.

    Attributes:
        point: Where.
        passes: How often the rank passes it before.
        others: The ranks that it kills before itself.
    """

    point: str
    passes: int = 0
    others: Sequence[int] = ()

    def write(self, folder: Path, rank: int) -> None:
        """Asks a rank for it."""
        path = folder / f"aim-{rank}"
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        path.with_suffix(".new").rename(path)


_folder: Path | None = None
_path = ""
_passed: dict[str, int] = {}


def install(folder: Path) -> None:
    """Makes the points of this process."""
    global _folder, _path
    _folder, _path = folder, f"{folder}/aim-{os.environ['RANK']}"
    for point, (where, when) in POINTS.items():
        module, _, name = where.partition(":")
        *owners, name = name.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, _with_point(getattr(owner, name), point, when))
    own = folder / f"pid-{os.environ['RANK']}"
    own.with_suffix(".new").write_text(str(os.getpid()))
    own.with_suffix(".new").rename(own)


def watch_gradients(first: torch.Tensor, last: torch.Tensor) -> None:
    """Makes points of two gradients: one that a backward pass has first, and one that it has last."""
    for tensor, point in zip((first, last), BUCKETS, strict=True):
        tensor.register_hook(lambda gradient, point=point: passes(point))


def _with_point(function: Callable[..., Any], point: str, when: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            passes(point)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        passes(point)
        return result

    return wrapped


def passes(point: str) -> None:
    """This process is at a point."""
    if not os.path.exists(_path):
        return
    with suppress(FileNotFoundError):
        aim = Aim(**json.loads(Path(_path).read_text()))
        if aim.point != point:
            return
        _passed[point] = _passed.get(point, 0) + 1
        if _passed[point] > aim.passes:
            _kill(aim)


def _kill(aim: Aim) -> None:
    assert _folder is not None
    os.unlink(_path)
    line = membership.current() if aim.point == SKEWED and aim.others else None
    record(_folder, aim.point, [*([int(os.environ["RANK"])] if line is None else []), *aim.others])
    for other in aim.others:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((_folder / f"pid-{other}").read_text()), signal.SIGKILL)
    if line is not None:
        line.replacement(60.0)
        raise RuntimeError("Connection closed by peer, as the test has it")
    os.kill(os.getpid(), signal.SIGKILL)


def record(folder: Path, point: str, ranks: Sequence[int]) -> None:
    """Writes a kill down, right before it happens."""
    with open(folder / "killed", "a") as file:
        file.write(json.dumps({"time": time.time(), "point": point, "ranks": list(ranks)}) + "\n")
