"""Entering ``trainer.fit`` a second time in the same process, as a new process would."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_callbacks import callbacks_named
from lightning_resilience._lightning.lightning_loops import reset_loops

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_wrapped: set[str] = set()


def on_run(run: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Calls ``run(trainer, call)`` in place of what every Trainer does between the start and the end of a fit.

    ``call`` does it, and may be called again after :func:`leave_fit`. No hook is outside of it: the process group is
    opened before any callback is called, and after an exception callbacks and loggers are told that the fit has ended.
    """
    for name in _PACKAGES:
        package = sys.modules.get(name)
        if package is None or name in _wrapped or not hasattr(package, "Trainer"):
            continue
        _wrapped.add(name)
        package.Trainer._run = _wrapper(package.Trainer._run, run)


def _wrapper(inner: Callable[..., Any], run: Callable[[Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    def wrapped(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return run(trainer, lambda: inner(trainer, *args, **kwargs))

    return wrapped


def is_fit(trainer: Trainer) -> bool:
    """Whether it is a fit that the Trainer runs."""
    return bool(trainer.state.fn == "fit")


def leave_fit(trainer: Trainer) -> None:
    """Brings a Trainer whose fit has failed to where ``fit`` has begun.

    The ``teardown`` of callbacks, module and data module is called, since their ``setup`` will be. Loggers go on.
    """
    module = trainer.lightning_module
    # A forward pass that fails inside of DDP leaves Lightning's redirection of it behind.
    vars(module).pop("forward", None)
    trainer.training = True  # it may have failed in a validation
    data: Any = vars(trainer).get("datamodule")
    for owner in (data, *vars(trainer)["callbacks"], module):
        if owner is None:
            continue
        try:
            if owner is module or owner is data:
                owner.teardown(stage="fit")
            else:
                owner.teardown(trainer, module, stage="fit")
        except Exception as error:  # such as a collective without the rank that was lost
            log.warning("%s.teardown has failed: %s", type(owner).__name__, error)
    for callback in callbacks_named(trainer, "SaveConfigCallback"):
        callback.already_saved = False  # else its setup leaves out collectives that the others' have
    module._metric_attributes = None  # those that its setup makes
    with suppress(Exception):
        trainer._teardown()
    trainer.strategy.model = module  # without the wrapper around it, whose hooks go with it
    reset_loops(trainer, module)
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []
