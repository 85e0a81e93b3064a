"""Lightning's signal connector: keeps its handlers from interfering with this package's."""

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
    """Disables Lightning's SIGTERM handler, which broadcasts inside the handler and deadlocks DDP.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        signums: Signals whose handlers Lightning must not restore at its end: it found this package's handlers, and
            after an exception it would restore them after this package has removed them.
        take_over: Called before Lightning registers its handlers, which wrap the script's handlers.
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
    """Removes Lightning's broadcast of "was there a SIGTERM" in every step of DDP, which makes the host wait."""
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def requeue_signal(trainer: Trainer) -> Any | None:
    """The signal on which Lightning would requeue a Slurm job from inside its handler; ``None`` if it would not."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    return getattr(environment, "requeue_signal", None)
