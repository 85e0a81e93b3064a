"""The limits that end a fit, and what Lightning and its callbacks do at the end."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_callbacks import callbacks, callbacks_named

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def _timers(trainer: Trainer) -> list[Any]:
    """Lightning's ``Timer`` callbacks; a script may have a class of this name too."""
    return [each for each in callbacks_named(trainer, "Timer") if hasattr(each, "_duration")]


def limits(trainer: Trainer) -> dict[str, float | None]:
    """The limits that may end the fit, by stable names; ``None`` or a negative number is no limit."""
    times = [timer._duration for timer in _timers(trainer) if timer._duration is not None]
    patiences = {f"patience of {each.state_key}": each.patience for each in callbacks_named(trainer, "EarlyStopping")}
    counts = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    found = {**counts, "max_time": min(times, default=None), **patiences}
    return {name: int(each) if isinstance(each, Integral) else each for name, each in found.items()}  # NumPy's too


def last_step(trainer: Trainer) -> int | None:
    """The ``global_step`` at which the fit ends; ``None`` if unknown, or before its loaders have been created."""
    try:
        steps = trainer.estimated_stepping_batches if trainer.train_dataloader is not None else -1
    except Exception:  # accumulation that changes with the epoch, for example
        return None
    return int(steps) if 0 <= steps < float("inf") else None


def limit_reached(trainer: Trainer) -> str | None:
    """The one of :func:`limits` that has ended the fit; ``None`` if no limit is known to have ended it."""
    if trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps:
        return "max_steps"
    if trainer.max_epochs not in (None, -1) and trainer.current_epoch >= trainer.max_epochs:
        return "max_epochs"
    for callback in callbacks_named(trainer, "EarlyStopping"):
        if callback.wait_count >= callback.patience:
            return f"patience of {callback.state_key}"
    for timer in _timers(trainer):
        if timer._duration is not None and timer.time_elapsed() >= timer._duration:
            return "max_time"
    return None


def changes_weights_at_the_end(trainer: Trainer) -> bool:
    """Whether a callback of Lightning changes the weights after the training has ended."""
    return bool(callbacks_named(trainer, "WeightAveraging", "StochasticWeightAveraging", "ModelPruning"))


def can_be_ended_again(trainer: Trainer) -> bool:
    """Whether a state from before ``on_train_end`` holds all that these hooks need to run again."""
    return not callbacks_named(trainer, "StochasticWeightAveraging")  # attributes of its last epoch are not saved


def acts_at_the_end(trainer: Trainer) -> bool:
    """Whether any ``on_train_end`` hook may change the saved state of the fit."""
    return any(map(_acts_at_the_end, (*callbacks(trainer), trainer.lightning_module, trainer.strategy)))


def _acts_at_the_end(owner: Any) -> bool:
    function = getattr(owner.on_train_end, "__func__", None)
    if function is None or function.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        return callable(owner.on_train_end)
    kind = function.__qualname__.partition(".")[0]
    if kind == "ModelCheckpoint":
        return bool(owner.save_last and not owner._last_checkpoint_saved)
    return kind not in ("Callback", "ModelHooks", "Strategy", "TQDMProgressBar", "Timer")


def timer_keys(trainer: Trainer) -> list[str]:
    """The keys in ``callbacks`` of a checkpoint that hold only elapsed times."""
    return [timer.state_key for timer in _timers(trainer)]


def is_cut_short(trainer: Trainer) -> bool:
    """Whether this epoch ends before its last batch, because the whole fit does."""
    ends = trainer.should_stop or (trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps)
    return ends and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
