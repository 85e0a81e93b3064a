"""Plugins that write checkpoints, and the links of ``ModelCheckpoint``.

Plugins are recognized by the names of their classes: a script's Trainer may come from either Lightning package, and
importing the other package only for a comparison would cost seconds.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


def is_plain_checkpoint_io(io: object) -> bool:
    """Whether ``io`` is exactly Lightning's ``TorchCheckpointIO``, and no subclass, which may do anything."""
    cls = type(io)
    return cls.__name__ == "TorchCheckpointIO" and cls.__module__ in (
        "lightning.fabric.plugins.io.torch_io",
        "lightning_fabric.plugins.io.torch_io",
    )


def is_async_checkpoint_io(io: object) -> bool:
    """Whether ``io`` is an ``AsyncCheckpointIO``, which hands every save to a thread."""
    return any(
        cls.__name__ == "AsyncCheckpointIO"
        and cls.__module__ in ("lightning.pytorch.plugins.io.async_plugin", "pytorch_lightning.plugins.io.async_plugin")
        for cls in type(io).__mro__
    )


def set_inner_checkpoint_io(io: Any, inner: Any) -> None:
    """Replaces the plugin that an ``AsyncCheckpointIO`` wraps; the public setter ignores a second value."""
    io._checkpoint_io = inner


def after_async_saves(io: Any, action: Callable[[], None]) -> None:
    """Queues ``action`` after the saves that an ``AsyncCheckpointIO`` has not finished.

    The plugin's executor has one thread, so ``action`` runs after these saves. It is dropped if a save has failed,
    because it relies on the newest checkpoint. If ``action`` raises, the next save or the teardown raises its error, as
    it does for the error of a save.
    """

    def act() -> None:
        if io._error is None:
            try:
                action()
            except BaseException as error:
                io._error = error

    io._ensure_setup()
    io._executor.submit(act)


def wait_for_async_saves(io: Any, within_s: float) -> bool:
    """Waits until everything queued in an ``AsyncCheckpointIO`` is done; its teardown still raises any error.

    Returns:
        Whether everything is done.
    """
    if io._executor is None:
        return True
    done, _ = concurrent.futures.wait([io._executor.submit(lambda: None)], within_s)
    return bool(done)


def replace_link_checkpoint(callback: Any, link: Callable[[Any, str, str], None]) -> None:
    """Makes a ``ModelCheckpoint`` link ``last.ckpt`` with ``link(trainer, filepath, linkpath)``.

    Lightning's ``_link_checkpoint`` removes the old link before it creates the new one. A subclass with its own
    ``_link_checkpoint`` is left unchanged.
    """
    plain = getattr(type(callback), "_link_checkpoint", None)
    if plain is not None and plain.__module__ in (
        "lightning.pytorch.callbacks.model_checkpoint",
        "pytorch_lightning.callbacks.model_checkpoint",
    ):
        callback._link_checkpoint = link


def restore_link_checkpoint(callback: Any) -> None:
    """Undoes :func:`replace_link_checkpoint`."""
    vars(callback).pop("_link_checkpoint", None)
