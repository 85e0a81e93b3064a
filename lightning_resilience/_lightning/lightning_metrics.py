"""Saves, restores and merges logged values and metrics in the middle of an epoch, which Lightning does not save."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from lightning_resilience._lightning import lightning_progress
from lightning_resilience._lightning.lightning_callbacks import callbacks
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint.safe_serialization import map_nested

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)


class LoggedValues:
    """Keeps the values that training steps have logged, so that a metric's mean can leave out a skipped step's batch.

    A value that is not finite would stay in the metric until the end of the epoch, and ``EarlyStopping`` ends a fit for
    it. Lightning replaces the state of a metric at every value, so a reference keeps the state before: without a copy,
    and without reading from the device. Metrics of torchmetrics are not changed.
    """

    STATE = ("value", "cumulated_batch_size", "_forward_cache")

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._entries: list[tuple[int, int, Any, Any, int, dict[str, Any], Any]] = []
        results: Any = trainer.fit_loop.epoch_loop._results
        update = results.update_metrics

        def updated(key: str, value: Any, batch_size: int) -> None:
            metric = results[key]
            before = self._state(metric)
            update(key, value, batch_size)
            if metric.is_tensor:
                place = trainer.current_epoch, lightning_progress.batches_begun(trainer)
                self._entries.append((*place, metric, value, batch_size, before, metric._forward_cache))

        patches.set(results, "update_metrics", updated)

    def _state(self, metric: Any) -> dict[str, Any]:
        return {name: vars(metric)[name] for name in self.STATE if name in vars(metric)}

    def leave_out(self, epoch: int, begin: int, end: int) -> None:
        """Removes the values that the batches from ``begin`` to before ``end`` have logged from the metrics."""
        entries, self._entries = self._entries, []
        begun: set[int] = set()  # the metrics reset to their state before the first of these batches
        for entry in entries:
            of_epoch, number, metric, value, batch_size, before, latest = entry
            is_bad = of_epoch == epoch and begin < number <= end and not metric.has_reset
            if is_bad and id(metric) not in begun:
                begun.add(id(metric))
                vars(metric).update(before)
                metric._computed = None
            elif not is_bad and id(metric) in begun:
                before = self._state(metric)
                self._add(metric, value, batch_size, latest)
            if not is_bad:
                self._entries.append((of_epoch, number, metric, value, batch_size, before, latest))

    @staticmethod
    def _add(metric: Any, value: Any, batch_size: int, latest: Any) -> None:
        """Does what ``_ResultMetric.update`` does, without its exchange between ranks."""
        meta = metric.meta
        metric._forward_cache = latest
        if meta.on_step and not meta.on_epoch:
            metric.value = latest
        elif meta.is_mean_reduction:
            metric.value = metric.value + value * batch_size
            metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
        elif meta.is_max_reduction or meta.is_min_reduction:
            metric.value = meta.reduce_fx(metric.value, value)
        elif meta.is_sum_reduction:
            metric.value = metric.value + value

    def forget(self, epoch: int, end: int) -> None:
        """Drops the values of all batches up to ``end``, which will not be left out any more."""
        if self._entries:
            self._entries = [entry for entry in self._entries if entry[:2] > (epoch, end)]


_LOG_ARGUMENTS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def metric_states(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """This rank's metrics in the middle of an epoch, which Lightning does not save.

    These are the accumulated ``self.log(on_epoch=True)`` values, the states of ``torchmetrics`` attributes, and the
    latest values, which schedulers and callbacks may monitor.
    """
    results = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = result.meta
        if meta.sync.group is not None or not (result.is_tensor or meta.metric_attribute):
            continue
        results[key] = {
            "meta": {name: getattr(meta, name) for name in _LOG_ARGUMENTS},
            "reduce": meta.reduce_fx.__name__,
            "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            # The state of a logged torchmetrics object is saved with the module's attribute.
            "value": result.value.clone() if result.is_tensor else None,
            "cumulated_batch_size": (
                result.cumulated_batch_size.clone() if result.is_tensor and meta.is_mean_reduction else None
            ),
            "updates": result._update_count,
            "has_reset": result.has_reset,
        }
    modules = {
        name: {
            "state": {key: _clone(getattr(metric, key)) for key in metric._defaults},
            "updates": metric._update_count,
            "seen": getattr(metric, "_num_vals_seen", None),  # the position of a running metric in its window
        }
        for name, metric in named_metrics(trainer, module)
    }
    connector = trainer._logger_connector
    latest = {
        name: {key: _clone(value) for key, value in getattr(connector, name).items()}
        for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    }
    # Without these the next ``self.log`` takes its batch for the first of the epoch, and restarts all means.
    loop = {"_first_loop_iter": connector._first_loop_iter, "_current_fx": connector._current_fx}
    return {"results": results, "modules": modules, "latest": latest, "loop": loop}


@contextmanager
def nothing_logged(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Discards what the block logs, and what metrics see in it."""
    results: Any = trainer.fit_loop.epoch_loop._results
    names = (*LoggedValues.STATE, "_computed", "_update_count", "has_reset")
    logged = {key: {name: vars(each)[name] for name in names if name in vars(each)} for key, each in results.items()}
    seen = [
        (
            each,
            {name: _clone(vars(each)[name]) for name in (*each._defaults, "_num_vals_seen") if name in vars(each)},
            each._update_count,
        )
        for _, each in named_metrics(trainer, module)
    ]
    own_update = vars(results).pop("update_metrics", None)  # the patch of LoggedValues
    try:
        yield
    finally:
        if own_update is not None:
            vars(results)["update_metrics"] = own_update
        for key in results.keys() - logged.keys():
            del results[key]
        for key, before in logged.items():
            vars(results[key]).update(before)
        for metric, state, updates in seen:
            vars(metric).update(state)
            metric._update_count, metric._computed = updates, None


NOTHING_LOGGED: dict[str, Any] = {"results": {}, "modules": {}, "latest": {}, "loop": {}}
"""The result of :func:`metric_states` without metrics."""


def counts_for_nothing(trainer: Trainer, module: LightningModule, states: dict[str, Any]) -> dict[str, Any]:
    """Metric states with the same metrics as another rank's, but without weight.

    At the end of an epoch all ranks reduce the same metrics in the same order: a rank that joins in the middle of an
    epoch must have all of these metrics.

    Args:
        trainer: The Trainer.
        module: Its module.
        states: The other rank's result of :func:`metric_states`.
    """
    modules = {
        name: {**states["modules"][name], "state": {key: _clone(value) for key, value in metric._defaults.items()}}
        for name, metric in named_metrics(trainer, module)
        if name in states["modules"]
    }
    results = {key: _emptied(each) if each["sync"]["should"] else each for key, each in states["results"].items()}
    return {**states, "results": results, "modules": modules}


def _emptied(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its weight in a mean or a sum. In a maximum or minimum it can stay: it changes nothing there."""
    value, batch = result["value"], result["cumulated_batch_size"]
    if value is None or not result["meta"]["on_epoch"] or result["reduce"] not in ("mean", "sum"):
        return result
    emptied = {"value": torch.zeros_like(value)}
    return {**result, **emptied, "cumulated_batch_size": None if batch is None else torch.zeros_like(batch)}


def merged_metric_states(trainer: Trainer, module: LightningModule, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metric states of a rank that has seen everything that several ranks have seen.

    Args:
        trainer: The Trainer.
        module: Its module.
        states: The ranks' results of :func:`metric_states`; the latest values come from the first rank.
    """
    results, modules = dict(states[0]["results"]), dict(states[0]["modules"])
    for state in states[1:]:
        for key, other in state["results"].items():
            results[key] = _merged_result(results[key], other) if key in results else other
    for name, metric in named_metrics(trainer, module):
        if of_metric := [each["modules"][name] for each in states if name in each["modules"]]:
            modules[name] = _merged_metric(metric, of_metric)
    return {**states[0], "results": results, "modules": modules}


def average_counts_exactly(trainer: Trainer, patches: Patches) -> None:
    """Makes the mean of whole numbers over ranks keep its fraction.

    Lightning divides a mean value by the mean number of samples, and a rank that also trains for other ranks has seen
    more samples.
    """
    reduce = trainer.strategy.reduce

    def reduced(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        return reduce(tensor.float() if is_whole else tensor, *args, **kwargs)

    patches.set(trainer.strategy, "reduce", reduced)


def _merged_result(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merges two values of ``self.log``; of values that are not accumulated, the first rank's value counts."""
    if mine["value"] is None or not mine["meta"]["on_epoch"] or mine["has_reset"] or other["has_reset"]:
        return other if mine["has_reset"] else mine
    both = torch.stack([mine["value"], other["value"]])
    kind = mine["reduce"]
    value = both.amax(0) if kind == "max" else both.amin(0) if kind == "min" else both.sum(0)
    merged = {**mine, "value": value, "updates": mine["updates"] + other["updates"]}
    if mine["cumulated_batch_size"] is not None:
        merged["cumulated_batch_size"] = mine["cumulated_batch_size"] + other["cumulated_batch_size"]
    return merged


def _merged_metric(metric: Metric, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges states of a metric as torchmetrics reduces them over ranks."""
    merged, left_out = {}, []
    for key, mine in states[0]["state"].items():
        values = [each["state"][key] for each in states]
        reduce: Any = metric._reductions[key]
        if isinstance(mine, list):
            merged[key] = list(itertools.chain(*values))
        elif reduce is None:
            merged[key] = mine
            left_out += [] if all(torch.equal(mine, each) for each in values) else [key]
        else:
            merged[key] = reduce(torch.stack(values))
    if left_out:
        what = f"{type(metric).__name__} has no reduction over ranks for {', '.join(left_out)}"
        log.warning("%s: the values of absent ranks are left out in this epoch.", what)
    return {**states[0], "state": merged, "updates": sum(each["updates"] for each in states)}


def named_metrics(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Metric]]:
    """The metrics of the module and of callbacks, by names that are the same in a new process."""
    yield from ((name, each) for name, each in module.named_modules() if isinstance(each, Metric))
    for callback in callbacks(trainer):
        for attribute, value in vars(callback).items():
            if isinstance(value, Metric):
                yield from (
                    (f"{callback.state_key}.{attribute}.{name}", each)
                    for name, each in value.named_modules()
                    if isinstance(each, Metric)
                )


def set_metric_states(trainer: Trainer, module: LightningModule, states: dict[str, Any]) -> None:
    """Restores :func:`metric_states`."""
    device = trainer.strategy.root_device
    collection = trainer.fit_loop.epoch_loop._results
    package = sys.modules[type(collection).__module__]
    for key, state in states["results"].items():
        sync = package._Sync(
            _should=state["sync"]["should"], fn=trainer.strategy.reduce, rank_zero_only=state["sync"]["rank_zero_only"]
        )
        meta = package._Metadata(**state["meta"], reduce_fx=getattr(torch, state["reduce"]))
        meta.sync = sync
        is_tensor = state["value"] is not None
        metric = package._ResultMetric(meta, is_tensor)
        metric.value = state["value"] if is_tensor else module.get_submodule(state["meta"]["metric_attribute"])
        if state["cumulated_batch_size"] is not None:
            metric.cumulated_batch_size = state["cumulated_batch_size"]
        metric._update_count, metric.has_reset = state["updates"], state["has_reset"]
        collection[key] = metric.to(device)
    metrics = dict(named_metrics(trainer, module))
    for name, state in states["modules"].items():
        if (each := metrics.get(name)) is not None:
            for key, value in state["state"].items():
                setattr(each, key, _to(value, each.device))
            each._update_count, each._computed = state["updates"], None
            if state.get("seen") is not None:
                vars(each)["_num_vals_seen"] = state["seen"]
    connector = trainer._logger_connector
    for name, value in states["loop"].items():
        setattr(connector, name, value)
    set_latest_metrics(trainer, states)


def take_over_sync(trainer: Trainer, patches: Patches, are_inherited: bool) -> None:
    """Makes restored values take over ``sync_dist`` from the script's next log call.

    A single rank logs all values with ``sync_dist=False``, whatever the script passes, and Lightning refuses a value
    that is logged with other arguments than before.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        are_inherited: Whether the values come from another rank: a value then loses its weight when its ``sync_dist``
            changes.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    log, inherited = results.log, set(results) if are_inherited else set()

    def logged(fx: str, name: str, *args: Any, sync_dist: bool = False, **kwargs: Any) -> None:
        for key in (f"{fx}.{name}", f"{fx}.{name}.{results.dataloader_idx}"):
            if key in results and results[key].meta.sync.should != sync_dist:
                results[key].meta.sync.should = sync_dist
                result = results[key]
                if (
                    key in inherited
                    and result.is_tensor
                    and not (result.meta.is_max_reduction or result.meta.is_min_reduction)
                ):
                    result.value = torch.zeros_like(result.value)
                    if result.meta.is_mean_reduction:
                        result.cumulated_batch_size = torch.zeros_like(result.cumulated_batch_size)
        log(fx, name, *args, sync_dist=sync_dist, **kwargs)

    patches.set(results, "log", logged)


def set_latest_metrics(trainer: Trainer, states: dict[str, Any]) -> None:
    """Restores the part of :func:`metric_states` that ``trainer.callback_metrics`` and similar attributes show."""
    for name, values in states["latest"].items():
        latest = getattr(trainer._logger_connector, name)
        latest.update({key: _to(value, trainer.strategy.root_device) for key, value in values.items()})


def _clone(value: Any) -> Any:
    return map_nested(value, lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item)


def _to(value: Any, device: torch.device) -> Any:
    return map_nested(value, lambda item: item.to(device) if isinstance(item, torch.Tensor) else item)
