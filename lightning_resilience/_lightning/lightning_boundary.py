"""Lists what a training step changes before the optimizer's step, so that a fit can continue from the last boundary.

The values are noted at a boundary and put back later. Each is found at a *place*: a dictionary and a key in it, which
is read and written in a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_data,
    lightning_metrics,
)
from lightning_resilience._lightning.lightning_callbacks import is_named
from lightning_resilience._lightning.lightning_steps import has_grad_scaler
from lightning_resilience._torch import buffer_places as places_of_buffers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Place = tuple[dict[str, Any], str]

_COUNTS = ("ready", "started", "processed", "completed")
_KEPT_BY_LIGHTNING = ("ModelCheckpoint", "EarlyStopping", "WeightAveraging", "Timer")
"""Callbacks of Lightning whose state is the same on all ranks, and is not changed by a step before its end."""


def _counts(*progresses: Any) -> Iterator[Place]:
    for progress in progresses:
        for tracker in (vars(progress)["total"], vars(progress)["current"]):
            yield from ((vars(tracker), name) for name in _COUNTS if name in vars(tracker))


def changed_by_step(trainer: Trainer) -> list[Place]:
    """The places of the loops' counters and flags that a step changes before its end; equal on all ranks."""
    loop: Any = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    return [
        *_counts(loop.batch_progress, optimizer.step, optimizer.zero_grad),
        (vars(loop.batch_progress), "is_last_batch"),
        (vars(loop), "_batches_that_stepped"),
        (vars(trainer), "should_stop"),
        (vars(connector), "_first_loop_iter"),
        (vars(connector), "_current_fx"),
    ]


def unchanged_by_step(trainer: Trainer) -> list[Place]:
    """The places of counters that change when a step ends: if they are unchanged, no later boundary was reached."""
    loop = trainer.fit_loop.epoch_loop
    step = loop.automatic_optimization.optim_progress.optimizer.step
    return [
        (vars(step.total), "completed"),
        *_counts(trainer.fit_loop.epoch_progress, loop.scheduler_progress, loop.val_loop.batch_progress),
        (vars(trainer), "accumulate_grad_batches"),
    ]


def _last_metrics(trainer: Trainer) -> list[dict[str, Any]]:
    connector = trainer._logger_connector
    return [connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics]


def names_of_metrics(trainer: Trainer) -> Any:
    """The names of all present metrics, to find metrics that a step logs for the first time. Compared by ``==``."""
    return [list(trainer.fit_loop.epoch_loop._results), *map(list, _last_metrics(trainer))]


def forget_new_metrics(trainer: Trainer, names: Any) -> None:
    """Removes metrics that are not in ``names``, which :func:`names_of_metrics` has returned."""
    for metrics, known in zip([trainer.fit_loop.epoch_loop._results, *_last_metrics(trainer)], names, strict=True):
        for name in [each for each in metrics if each not in known]:
            del metrics[name]


def metric_places(trainer: Trainer, module: LightningModule) -> dict[str, Place]:
    """The places of this rank's metrics that :func:`.lightning_metrics.metric_states` saves, by name."""
    found: dict[str, Place] = {}
    for name, result in trainer.fit_loop.epoch_loop._results.items():
        of_result = ["_update_count", "has_reset"]
        if result.is_tensor:
            of_result += ["value", "cumulated_batch_size"] if result.meta.is_mean_reduction else ["value"]
        found.update({f"{name}.{key}": (vars(result), key) for key in of_result})
    for name, metric in lightning_metrics.named_metrics(trainer, module):
        of_metric = [*metric._defaults, "_update_count"] + ["_num_vals_seen"] * ("_num_vals_seen" in vars(metric))
        found.update({f"metric {name}.{key}": (vars(metric), key) for key in of_metric})
    for number, metrics in enumerate(_last_metrics(trainer)):
        found.update({f"{number}. {key}": (metrics, key) for key in metrics})
    return found


def buffer_places(trainer: Trainer, module: LightningModule) -> dict[str, Place]:
    """The places of the buffers of the module and of its averages, by name."""
    averages = [each._average_model for each in lightning_callbacks.callbacks_named(trainer, "WeightAveraging")]
    return {
        f"{number}. {name}": place
        for number, owner in enumerate([module, *filter(None, averages)])
        for name, place in places_of_buffers(owner).items()
    }


def why_state_is_unknown(trainer: Trainer, module: LightningModule) -> str | None:
    """Why the state of the last boundary cannot be known in the middle of a step; ``None`` if it can."""
    fetcher = trainer.fit_loop._data_fetcher
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "optimization is manual"
    if has_grad_scaler(trainer):
        return "a gradient scaler is in use"
    if lightning_data.loader_states(trainer) is not None:
        return "each rank's data loader has its own state"
    if is_named(fetcher, "_DataLoaderIterDataFetcher") or lightning_data.fetches_ahead_here(trainer):
        return "batches are fetched ahead"
    if lightning_checkpoints.uses_last_argument(module.on_save_checkpoint, 1):
        return f"{type(module).__name__} saves its own state"
    if any(type(each).get_extra_state is not torch.nn.Module.get_extra_state for each in module.modules()):
        return "a layer has state besides its tensors"
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None and data.state_dict():
        return f"{type(data).__name__} saves its own state"
    return next(_callbacks_with_state(lightning_callbacks.callbacks(trainer)), None)


def _callbacks_with_state(callbacks: Iterable[Any]) -> Iterator[str]:
    for each in callbacks:
        if isinstance(each, lightning_callbacks.ResilienceCallback) or is_named(each, *_KEPT_BY_LIGHTNING):
            continue
        base = next(cls for cls in type(each).__mro__ if cls.__name__ == "Callback")
        if any(getattr(type(each), hook) is not getattr(base, hook) for hook in ("state_dict", "on_save_checkpoint")):
            yield f"{type(each).__name__} saves its own state"
