"""Calls functions in the parts of a training step: its batch, its backward pass, gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._lightning.lightning_callbacks import is_named
from lightning_resilience._lightning.lightning_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def on_backward(trainer: Trainer, patches: Patches, check: Callable[[torch.Tensor], None]) -> None:
    """Calls ``check`` with the loss with which each backward pass begins, after all hooks ``on_before_backward``.

    It is no such hook, because Lightning enters a profiler's context for a hook, which costs more than the check.
    """
    plugin = trainer.precision_plugin
    pre_backward = plugin.pre_backward

    def checked(tensor: torch.Tensor, module: Any) -> Any:
        loss = pre_backward(tensor, module)
        check(loss)
        return loss

    patches.set(plugin, "pre_backward", checked)


def on_batch(
    trainer: Trainer,
    patches: Patches,
    ready: Callable[[], None] | None,
    begin: Callable[[], None] | None,
    done: Callable[[], None],
) -> None:
    """Calls functions within a training batch.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        ready: Called when the batch is on its device.
        begin: Called before the batch's forward and backward pass and optimizer steps.
        done: Called after them, before any hook of the batch's end; not called if they raise.
    """
    loop = trainer.fit_loop.epoch_loop
    if ready is not None:
        stage: Any = trainer.state.stage
        training = type(stage).TRAINING  # trainer.training compares their texts, which is six calls

        def on_batch_start(ready: Callable[[], None] = ready) -> None:
            if trainer.state.stage is training:  # a validation in between has batches too
                ready()

        patches.wrap(trainer._logger_connector, "on_batch_start", before=on_batch_start)
    for optimization in (loop.automatic_optimization, loop.manual_optimization):
        patches.wrap(optimization, "run", before=begin, after=done)


def on_batch_work(
    trainer: Trainer, patches: Patches, fetched: Callable[[], None], computed: Callable[[], None]
) -> None:
    """Calls functions in every training batch, at two places where Lightning itself calls a small method.

    Wrapping the batch as a whole (:func:`on_batch`) would cost several microseconds of a step.

    Args:
        trainer: The Trainer, whose data are set up.
        patches: Undone after the fit.
        fetched: Called when the batch is on the host.
        computed: Called after the batch's optimizer steps, before schedulers and hooks of the batch's end.
    """
    loop = trainer.fit_loop.epoch_loop
    if is_named(trainer.fit_loop._data_fetcher, "_DataLoaderIterDataFetcher"):  # the user's step fetches as it likes
        patches.wrap(trainer._logger_connector, "on_batch_start", before=fetched)
    elif is_named(getattr(trainer, "profiler", None), "PassThroughProfiler"):  # the replaced method does nothing
        patches.set(loop, "_on_after_fetch", fetched)
    else:
        patches.wrap(loop, "_on_after_fetch", before=fetched)
    increment = loop.batch_progress.increment_processed

    def increment_processed() -> None:
        computed()
        increment()

    patches.set(loop.batch_progress, "increment_processed", increment_processed)


def has_grad_scaler(trainer: Trainer) -> bool:
    """Whether a gradient scaler looks for infinite gradients (16-bit floats), and skips steps in its normal work."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def clips_by_norm(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm in every step, in a way that :func:`on_clipping_by_norm` sees.

    It is not known whether a module clips on its own, as in manual optimization.
    """
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    return by_norm and (trainer.gradient_clip_val or 0) > 0 and _clips_as_usual(trainer.precision_plugin)


def norm_is_last(trainer: Trainer) -> bool:
    """Whether no code of the module runs between this clipping by norm and a step, or replaces the clipping."""
    module: Any = trainer.lightning_module
    clips = module.configure_gradient_clipping
    is_lightnings = clips.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    return clips_by_norm(trainer) and is_lightnings and bool(module.automatic_optimization)


def _clips_as_usual(plugin: Any) -> bool:
    return bool(type(plugin).clip_grad_by_norm.__qualname__ == "Precision.clip_grad_by_norm")


def on_clipping_by_norm(
    trainer: Trainer, patches: Patches, before: Callable[[Any], None], seen: Callable[[Any, torch.Tensor], None]
) -> None:
    """Calls ``seen`` with an optimizer and the norm of its gradients over all ranks, when Lightning clips by the norm.

    Calls ``before`` with the optimizer before the norm is calculated. Does nothing if the precision plugin clips in its
    own way (FSDP1, which refuses).

    ``clip_grad_norm_`` would return the norm, but Lightning drops it. For sharded gradients the norm is reduced over
    the ranks once, here, instead of in ``clip_grad_norm_``.
    """
    plugin = trainer.precision_plugin
    if not _clips_as_usual(plugin):
        return

    def clip(optimizer: Any, clip_val: Any) -> None:
        if is_named(optimizer, "LightningOptimizer"):  # in manual optimization
            optimizer = optimizer.optimizer
        before(optimizer)
        parameters = list(plugin.main_params(optimizer))
        norm: Any = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norm)
        seen(optimizer, norm)

    patches.set(plugin, "clip_grad_by_norm", clip)
