"""Presets: the callbacks that belong together, for a Trainer in code or for every Trainer of a launched script."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_resilience.run_directory import WORKER_PID_VARIABLE

if TYPE_CHECKING:
    from lightning_resilience._lightning import ResilienceCallback

RECIPE_VARIABLE = "LIGHTNING_RESILIENCE_RECIPE"
"""Environment variable in which ``lightning-resilience launch`` names the recipe for the script's Trainers."""


def nemo(run_dir: str | os.PathLike[str] | None = None) -> list[ResilienceCallback]:
    """NeMo's defaults: resume automatically, save every 15 minutes, stop in order on SIGTERM, find and survive hangs.

    Stragglers are reported every 5 minutes, and the run ends for one that is below 0.7 in two reports in a row (in
    NeMo's, in one). Beyond NeMo's: a verified copy of the state on every node every few seconds, where there is room
    for it, and steps that would spoil the model do not happen.

    Args:
        run_dir: The run directory on storage that all nodes share; see
            :class:`~lightning_resilience.callbacks.AutoResume`.

    Example::

        trainer = Trainer(callbacks=recipes.nemo("runs/gpt"))
    """
    from lightning_resilience.callbacks import (
        AutoResume,
        FaultTolerance,
        LocalCheckpoint,
        NaNGuard,
        Preemption,
        StragglerDetection,
    )

    return [
        FaultTolerance(run_dir=run_dir),
        Preemption(run_dir=run_dir),
        LocalCheckpoint(run_dir=run_dir),
        NaNGuard(run_dir=run_dir),
        StragglerDetection(min_consecutive_reports=2, run_dir=run_dir),
        AutoResume(run_dir=run_dir),
    ]


RECIPES: dict[str, Callable[..., list[ResilienceCallback]]] = {"nemo": nemo}
"""The recipes by the names that ``launch --recipe`` takes."""


def callbacks_factory() -> list[ResilienceCallback]:
    """The ``callbacks_factory`` entry point of both Lightning packages, which every ``Trainer()`` of theirs calls.

    Returns:
        The callbacks of the recipe that ``launch`` has named in the environment; none where it has not.

    Raises:
        ValueError: If there is no such recipe.
    """
    name = os.environ.get(RECIPE_VARIABLE)
    if os.environ.get(WORKER_PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        name = None  # a child process of the launched script
    if not name:
        return []
    if name not in RECIPES:
        raise ValueError(f"{RECIPE_VARIABLE}={name!r} is not a recipe; there are: {', '.join(RECIPES)}.")
    callbacks = RECIPES[name]()
    for callback in callbacks:
        callback.injected = True
    return callbacks
