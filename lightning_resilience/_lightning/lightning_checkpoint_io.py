"""Plugins that write checkpoints, and the links of ``ModelCheckpoint``.

Plugins are recognised by the names of their classes: a script's Trainer may come from either namespace, and importing
the other one only to compare would cost seconds.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


def is_plain_checkpoint_io(io: object) -> bool:
    """Whether ``io`` is exactly Lightning's ``TorchCheckpointIO``, not a subclass that may do anything."""
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
    """Exchanges what an ``AsyncCheckpointIO`` wraps; its public setter ignores a second value."""
    io._checkpoint_io = inner


def after_async_saves(io: Any, action: Callable[[], None]) -> None:
    """Queues ``action`` behind the saves that an ``AsyncCheckpointIO`` has not finished.

    Its executor has one thread, so this is their order. ``action`` is dropped once a save has failed: it relies on the
    newest checkpoint. Its own error is raised by the next save or the teardown, as that of a save is.
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
    """Waits until everything queued in an ``AsyncCheckpointIO`` is done; its error stays for its teardown to raise.

    Returns:
        Whether it is done.
    """
    if io._executor is None:
        return True
    done, _ = concurrent.futures.wait([io._executor.submit(lambda: None)], within_s)
    return bool(done)


def replace_link_checkpoint(callback: Any, link: Callable[[Any, str, str], None]) -> None:
    """Makes a ``ModelCheckpoint`` link ``last.ckpt`` with ``link(trainer, filepath, linkpath)``.

    ``_link_checkpoint`` removes the old link before it makes the new one. A subclass that has its own is left alone.
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
