"""Reads and sets the progress counters of Lightning's loops."""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_resilience._lightning.lightning_callbacks import callbacks
from lightning_resilience._lightning.lightning_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_MOST_WAITED = 50
"""How many batches saves wait at most for a step: the windows of several optimizers may never end together."""


def steps_counted(trainer: Trainer) -> int:
    """A count, the same on all ranks, that grows with every training batch begun and with every epoch begun."""
    fit_loop = trainer.fit_loop
    return fit_loop.epoch_loop.batch_progress.total.ready + fit_loop.epoch_progress.total.ready


def batches_in_all(trainer: Trainer) -> int:
    """How many training batches of all epochs have been begun."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def batches_begun(trainer: Trainer) -> int:
    """How many training batches of this epoch have been begun; between two batches the number of the next one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning would log a value now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulates(trainer: Trainer) -> bool:
    """Whether an optimizer's step is made for more than one batch, now or in a later epoch.

    A ``GradientAccumulationScheduler`` changes the Trainer's number of batches when an epoch begins.
    """
    schedules = (getattr(each, "going_to_accumulate_grad_batches", None) for each in callbacks(trainer))
    return trainer.accumulate_grad_batches != 1 or any(schedule() for schedule in schedules if schedule is not None)


def accumulation_window_complete(trainer: Trainer) -> bool:
    """Whether no gradients wait for the rest of their accumulation window.

    In its last epoch, which only reads data for BatchNorm, ``StochasticWeightAveraging`` leaves the gradients of the
    step before, and Lightning makes a step with them at the end.
    """
    if trainer.accumulate_grad_batches == 1:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate() and not trainer.fit_loop._skip_backward


class _Gradient(NamedTuple):
    """The identity and version of one gradient of an optimizer.

    Attributes:
        parameter: The parameter of the gradient.
        ref: A reference to the gradient tensor.
        version: How many writes to the tensor torch had counted.
    """

    parameter: torch.Tensor
    ref: weakref.ref[torch.Tensor]
    version: int

    @staticmethod
    def of(optimizer: Optimizer) -> _Gradient | None:
        """The first gradient of an optimizer; ``None`` if it has none."""
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        found = next(((each, each.grad) for each in parameters if each.grad is not None), None)
        return None if found is None else _Gradient(found[0], weakref.ref(found[1]), found[1]._version)

    @property
    def is_there(self) -> bool:
        """Whether the parameter still has the same tensor: :meth:`~torch.optim.Optimizer.zero_grad` drops it."""
        return self.parameter.grad is not None and self.parameter.grad is self.ref()


class BehindStep:
    """Knows whether the last batch has made a step: manual optimization may accumulate gradients.

    One of several optimizers may accumulate while others step. This shows at its step, if a gradient existed before the
    batch. Other optimizers may keep gradients that need no step: from their last step, or from another one's loss.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before: int | None = None
        self._are_seen = False
        self._hook: Any = None
        self._begun: weakref.WeakKeyDictionary[Optimizer, _Gradient | None] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, _Gradient | None] = weakref.WeakKeyDictionary()
        self._accumulate: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waited = 0

    def at(self, step: int) -> bool:
        """Whether a step was made; call it before the first batch and after each batch, with ``trainer.global_step``.

        Lightning does not count steps of optimizers without its wrapper, so before the first counted step any batch may
        have made a step.
        """
        before, self._before = self._before, step
        self._are_seen |= step != (before or 0)
        is_behind = before != step or not self._are_seen
        optimizers = self._trainer.optimizers
        if len(optimizers) < 2:
            return is_behind
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_step)
        self._waited = self._waited + 1 if any(map(self._waits, optimizers)) else 0
        self._begun.update((each, _Gradient.of(each)) for each in optimizers)
        if self._waited == _MOST_WAITED and self._trainer.is_global_zero:
            log.warning(
                "An optimizer still had unapplied gradients after each of %d batches. Saving anyway, without the "
                "accumulated gradients.",
                _MOST_WAITED,
            )
        return is_behind and (not self._waited or self._waited >= _MOST_WAITED)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._trainer.optimizers:
            if (begun := self._begun.get(optimizer)) is not None and begun.is_there:
                self._accumulate.add(optimizer)
            self._stepped[optimizer] = _Gradient.of(optimizer)

    def _waits(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has gradients for which it has not made a step yet, and will."""
        if optimizer not in self._stepped:
            return _Gradient.of(optimizer) is not None
        last = self._stepped[optimizer]
        if optimizer not in self._accumulate or last is None or last.parameter.grad is None:
            return False
        return not last.is_there or last.parameter.grad._version != last.version

    def close(self) -> None:
        """Stops watching steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def evaluation_progress(trainer: Trainer) -> dict[str, Any]:
    """The progress of the fit's validation loop, by its keys in a checkpoint."""
    state: dict[str, Any] = {}
    trainer.fit_loop.epoch_loop.val_loop.state_dict(state, "epoch_loop.val_loop.")
    return state


def silence_resume_warning(trainer: Trainer, patches: Patches) -> None:
    """Silences Lightning's warning that a plain data loader can't be resumed in mid-epoch: this package resumes it."""
    loop = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def wrapper() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            reset()

    patches.set(loop, "reset", wrapper)


def count_replayed(trainer: Trainer) -> None:
    """Subtracts the replayed batches from the fetcher's count, because Lightning adds them again."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched -= trainer.fit_loop.epoch_loop.batch_progress.current.ready


def count_batches_left_out(trainer: Trainer) -> None:
    """Counts batches for which ``on_train_batch_start`` returned -1 as done, at a boundary between batches.

    Lightning counts them as fetched only, in all later epochs too. It would take each later checkpoint for one that was
    saved within a batch, and log every step after a resume under the number of the next one.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    now, total = progress.current, progress.total
    if now.ready == now.started == now.processed == now.completed:
        total.started = total.processed = total.completed = total.ready


def end_restart(trainer: Trainer) -> None:
    """Ends the restarting state of all loops.

    From here on this package's checkpoints define exactly what is done and what is due. While ``_restarting`` is set,
    for the rest of the epoch, Lightning guesses it from its counters, and skips validations and scheduler steps. With
    ``max_steps`` the public setter cannot even unset it.
    """

    def clear(loop: Any) -> None:
        loop._restarting = False
        for child in vars(loop).values():
            if hasattr(child, "_restarting"):
                clear(child)

    clear(trainer.fit_loop)
    trainer.fit_loop._resuming_from_checkpoint = False


def count_batches_done(trainer: Trainer, batches: int) -> int:
    """Continues this epoch after its first ``batches`` batches; after all of them if it was over.

    Returns:
        How many batches are done.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch and trainer.num_training_batches != float("inf"):
        batches = int(trainer.num_training_batches)
    for key in ("ready", "started", "processed", "completed"):
        setattr(progress.current, key, batches)
    return batches


def epoch_loop_batches(trainer: Trainer) -> int:
    """How many training batches of this epoch are done."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.completed
