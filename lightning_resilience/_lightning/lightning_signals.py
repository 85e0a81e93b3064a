"""The signal connector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def keep_signal_handlers(
    trainer: Trainer,
    patches: Patches,
    signums: Iterable[int],
    take_over: Callable[[], None],
    put_back: Callable[[], None],
) -> None:
    """Keeps Lightning's SIGTERM handler, which broadcasts inside the handler and deadlocks DDP, out of the way.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        signums: Signals that Lightning shall not give back at its end: the handlers that it found are ours, and
            after an exception its end comes after ours.
        take_over: Called before Lightning registers its handlers, which wrap those of the script.
        put_back: Called after Lightning has registered its handlers, right before the stages run.
    """
    connector = trainer._signal_connector

    def registered() -> None:
        for signum in signums:
            connector._original_handlers.pop(signum, None)
        put_back()

    patches.wrap(connector, "register_signal_handlers", before=take_over, after=registered)
    broadcast_no_signals(trainer, patches)


def broadcast_no_signals(trainer: Trainer, patches: Patches) -> None:
    """In DDP Lightning broadcasts "was there a SIGTERM" in every step, with a host sync: not so any more."""
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def requeue_signal(trainer: Trainer) -> Any | None:
    """The signal on which Lightning requeues a Slurm job from inside its handler, if it would."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    return getattr(environment, "requeue_signal", None)
