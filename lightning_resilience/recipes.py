"""Presets: the callbacks that belong together, for a Trainer in code or for every Trainer of a launched script."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_resilience._lightning import ResilienceCallback

RECIPE_VARIABLE = "LIGHTNING_RESILIENCE_RECIPE"
"""Environment variable in which ``lightning-resilience launch`` names the recipe for the script's Trainers."""


def nemo(run_dir: str | os.PathLike[str] | None = None) -> list[ResilienceCallback]:
    """NeMo's defaults: resume automatically, save every 15 minutes, stop in order on SIGTERM.

    Args:
        run_dir: The run directory on storage that all nodes share; see
            :class:`~lightning_resilience.callbacks.AutoResume`.

    Example::

        trainer = Trainer(callbacks=recipes.nemo("runs/gpt"))
    """
    from lightning_resilience.callbacks import AutoResume, Preemption

    return [Preemption(run_dir=run_dir), AutoResume(run_dir=run_dir)]


RECIPES: dict[str, Callable[..., list[ResilienceCallback]]] = {"nemo": nemo}
"""The recipes by the names that ``launch --recipe`` takes."""


def _injected(package: str) -> list[ResilienceCallback]:
    from importlib.util import find_spec

    import sys

    # The callbacks of this package, also those that the user adds, must be accepted by this Trainer.
    if "lightning_resilience._lightning" in sys.modules:
        from lightning_resilience._lightning import adopt_namespace

        adopt_namespace(package)
    name = os.environ.get(RECIPE_VARIABLE)
    if not name:
        return []
    if name not in RECIPES:
        raise ValueError(f"{RECIPE_VARIABLE}={name!r} is not a recipe; there are: {', '.join(RECIPES)}.")
    callbacks = RECIPES[name]()
    from lightning_resilience._lightning import adopt_namespace

    adopt_namespace(package)
    for callback in callbacks:
        callback.injected = True
    return callbacks


def callbacks_for_lightning() -> list[ResilienceCallback]:
    """Entry point ``lightning.pytorch.callbacks_factory``: called by every ``Trainer()``; empty unless launched."""
    return _injected("lightning.pytorch")


def callbacks_for_pytorch_lightning() -> list[ResilienceCallback]:
    """Entry point ``pytorch_lightning.callbacks_factory``: called by every ``Trainer()``; empty unless launched."""
    return _injected("pytorch_lightning")
