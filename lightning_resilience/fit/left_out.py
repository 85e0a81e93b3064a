"""Completes a checkpoint with objects of this process that can only be pickled.

A module that saves its loss function in ``on_save_checkpoint`` reads it in ``on_load_checkpoint``, and gets the loss
function that this process has created. Nothing is unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._lightning import lightning_callbacks, lightning_strategies

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

Path = Sequence[str | int]
"""Keys and indices that lead to an entry of a checkpoint, as ``safe_serialization.MISSING`` names them."""

_EXTRA_STATE = "_extra_state"  # torch's name for the result of ``get_extra_state``
_LATER = ("optimizer_states", "lr_schedulers")


def complete(trainer: Trainer, checkpoint: dict[str, Any], paths: Sequence[Path]) -> None:
    """Completes what Lightning restores first: the module, the data module and the callbacks.

    Runs their save hooks, on all ranks: hooks may use collectives.

    Args:
        trainer: The Trainer.
        checkpoint: A Lightning checkpoint; changed in place.
        paths: The entries that were left out of the checkpoint.
    """
    made = _created_here(trainer, checkpoint)
    _complete(trainer, checkpoint, [path for path in paths if path[0] not in _LATER], made)


def complete_training_state(trainer: Trainer, checkpoint: dict[str, Any], paths: Sequence[Path]) -> None:
    """Completes what Lightning restores last: optimizers and schedulers; see :func:`complete`."""
    made: dict[str, Any] = {
        "optimizer_states": []
        if lightning_strategies.shards_state(trainer)
        else [each.state_dict() for each in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    _complete(trainer, checkpoint, [path for path in paths if path[0] in _LATER], made)


def complete_extra_states(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Adds the current extra state of layers that a checkpoint of an older version lacks: a strict load needs it."""
    for name, each in module.named_modules():
        key = f"{name}.{_EXTRA_STATE}".lstrip(".")
        if key not in saved and type(each).get_extra_state is not torch.nn.Module.get_extra_state:
            saved[key] = each.get_extra_state()


def _created_here(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the user's save hooks would save now; tensors and objects are the live ones."""
    module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
    ours = lightning_callbacks.ResilienceCallback
    callbacks = [each for each in lightning_callbacks.callbacks(trainer) if not isinstance(each, ours)]
    made: dict[str, Any] = _copy_containers(checkpoint)  # hooks read and change it
    made["callbacks"] = {}

    def take_datamodule() -> None:
        if datamodule is not None and (state := datamodule.state_dict()):
            made[type(datamodule).__qualname__] = state

    def take_callback(callback: Any) -> None:
        if state := callback.state_dict():
            made["callbacks"][callback.state_key] = state

    _try("the data module's state_dict", take_datamodule)
    for each in callbacks:
        _try(f"{type(each).__name__}.state_dict", partial(take_callback, each))
    for each in callbacks:
        _try(f"{type(each).__name__}.on_save_checkpoint", partial(each.on_save_checkpoint, trainer, module, made))
    _try(f"{type(module).__name__}.on_save_checkpoint", partial(module.on_save_checkpoint, made))
    made["state_dict"] = _LiveState(module)
    return made


def _try(what: str, hook: Callable[[], Any]) -> None:
    try:
        hook()
    except Exception as error:
        log.warning("%s could not complete the checkpoint (%s: %s).", what, type(error).__name__, error)


class _LiveState:
    """A module's ``state_dict`` by single entries: some strategies gather all of it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getitem__(self, key: str) -> Any:
        layer, _, name = key.rpartition(".")
        try:
            owner = self._module.get_submodule(layer)
            found = owner.get_extra_state() if name == _EXTRA_STATE else getattr(owner, name)
        except (AttributeError, RuntimeError) as error:
            raise KeyError(key) from error
        return found.detach() if type(found) is torch.nn.Parameter else found


def _complete(trainer: Trainer, checkpoint: dict[str, Any], paths: Sequence[Path], made: dict[str, Any]) -> None:
    taken, missing = [], []
    for path in paths:
        found: Any = made
        try:
            for key in path:
                found = found[key]
            owner: Any = checkpoint
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = _copy_containers(found)
        except (KeyError, IndexError, TypeError):
            missing.append(path)
        else:
            taken.append(path)
    if not trainer.is_global_zero:
        return
    if taken:
        log.info("Not in the checkpoint, taken as the script created it: %s.", ", ".join(map(_name, taken)))
    if missing:
        log.warning("Not in the checkpoint, and not created by the script: %s.", ", ".join(map(_name, missing)))


def _copy_containers(value: Any) -> Any:
    """Copies containers: an object may clear its own state before it reads the given one."""
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copy_containers(item) for item in value)
    return value


def _name(path: Path) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
