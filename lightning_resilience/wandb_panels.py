"""Logs tables, plots and alerts about a run and its stragglers to Weights & Biases, in addition to scalars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from lightning_resilience._formatting import timestamp
from lightning_resilience.detect.stragglers.step_timer import SECTIONS
from lightning_resilience.detect.stragglers.stragglers import Report, Straggler
from lightning_resilience.run.goodput import PARTS

STATE_KEY = "straggler panels"
"""Key of the panels' state in a checkpoint."""

_EVERY = 12
_MAX_REPORTS = 200
_MAX_NODES_SHOWN = 20
_MAX_NODES_KEPT = 100
_MAX_ROWS = 1000
_MAX_INTERRUPTIONS = 200
_ALERT_AGAIN_AFTER_S = 600
_STEP = "trainer/global_step"


class Panels:
    """Logs a table of the 1,000 slowest ranks, a plot of the 20 slowest nodes over time, and a summary of stragglers.

    Table and plot are uploaded as files, so they are sent only when the stragglers change, and at every 12th report.
    The plot is sent as a whole, so the scores of the last 200 reports are kept, also across restarts.
    """

    def __init__(self) -> None:
        self._shown: set[int] = set()
        self._not_shown = _EVERY
        self._steps: list[int] = []
        self._nodes: dict[str, list[float | None]] = {}

    def show(
        self, loggers: Sequence[Any], report: Report, stragglers: Sequence[Straggler], step: int, threshold: float
    ) -> None:
        """Logs a report to every ``WandbLogger`` of ``loggers``.

        Args:
            loggers: The Trainer's loggers.
            report: The report.
            stragglers: The slow ranks.
            step: Step to log at.
            threshold: Threshold of relative scores, shown in the plot.
        """
        self._remember(report, step)
        self._not_shown += 1
        if self._not_shown < _EVERY and self._shown == {each.rank for each in stragglers}:
            return
        self._not_shown, self._shown = 0, {each.rank for each in stragglers}
        for run in _runs(loggers):
            import wandb

            nodes = sorted(self._nodes, key=self._latest)[:_MAX_NODES_SHOWN]
            run.log(
                {
                    "stragglers/ranks": wandb.Table(columns=_COLUMNS, data=_rows(report, stragglers)),
                    "stragglers/nodes": wandb.plot.line_series(
                        xs=self._steps,
                        ys=[*(self._nodes[node] for node in nodes), [threshold] * len(self._steps)],
                        keys=[*nodes, "threshold"],
                        title="Relative performance of the slowest rank of each node",
                        xname="step",
                    ),
                    "trainer/global_step": step,
                }
            )
            run.summary["stragglers"] = [str(each) for each in stragglers]

    def _remember(self, report: Report, step: int) -> None:
        worst: dict[str, float] = {}
        scores = torch.fmin(report.relative, report.step_relative).tolist()
        for device_id, score in zip(report.device_ids, scores, strict=True):
            if score == score:
                worst[device_id.node] = min(score, worst.get(device_id.node, 1.0))
        self._steps.append(step)
        for node in {*self._nodes, *worst}:
            self._nodes.setdefault(node, [None] * (len(self._steps) - 1)).append(worst.get(node))
        if len(self._steps) > _MAX_REPORTS:
            self._steps.pop(0)
            for history in self._nodes.values():
                history.pop(0)
        known = {node: history for node, history in self._nodes.items() if any(each is not None for each in history)}
        if len(known) > _MAX_NODES_KEPT:  # limits their size in checkpoints
            slowest = sorted(known, key=lambda node: min(each for each in known[node] if each is not None))
            known = {node: known[node] for node in slowest[:_MAX_NODES_KEPT]}
        self._nodes = known

    def _latest(self, node: str) -> float:
        return next((score for score in reversed(self._nodes[node]) if score is not None), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, strings and lists."""
        return {"steps": list(self._steps), "nodes": {node: list(scores) for node, scores in self._nodes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state."""
        self._steps = [int(step) for step in state["steps"]]
        nodes = {str(node): list(scores) for node, scores in state["nodes"].items()}
        self._nodes = {node: scores for node, scores in nodes.items() if len(scores) == len(self._steps)}


class RunPanels:
    """Logs a table of the interruptions of a run and where its time went, and sends alerts."""

    def begin(self, loggers: Sequence[Any], interruptions: Sequence[Mapping[str, Any]], ranks: int, step: int) -> None:
        """Logs the interruptions so far when training begins.

        Args:
            loggers: The Trainer's loggers.
            interruptions: The interruptions of the run so far, in the form of ``report --json``.
            ranks: The number of ranks of the run.
            step: Step to log at.
        """
        for run in _runs(loggers):
            import wandb

            if not run.settings.sync_tensorboard:  # with it WandbLogger logs by another axis
                # WandbLogger defines the axis for all metrics, but not if the script has begun the W&B run itself.
                run.define_metric(_STEP)
                run.define_metric("resilience/*", step_metric=_STEP)
            shown = interruptions[-_MAX_INTERRUPTIONS:]
            if shown:
                rows = [_interruption_row(each, ranks) for each in shown]
                table = wandb.Table(columns=_INTERRUPTION_COLUMNS, data=rows)
                run.log({"resilience/interruptions": table, _STEP: step})
            run.summary["interruptions"] = [*map(in_words, shown)]

    def end(self, loggers: Sequence[Any], scalars: Mapping[str, float], step: int) -> None:
        """Logs a chart of the time and the last scalars when the fit ends.

        Args:
            loggers: The Trainer's loggers.
            scalars: The last scalars of the run.
            step: Step to log at.
        """
        prefix = "resilience/seconds/"
        largest_first = sorted(scalars.items(), key=itemgetter(1), reverse=True)
        seconds = [[name.removeprefix(prefix), value] for name, value in largest_first if name.startswith(prefix)]
        for run in _runs(loggers):
            import wandb

            table = wandb.Table(columns=["category", "seconds"], data=seconds)
            chart = wandb.plot.bar(table, "category", "seconds", title="Where the time of a rank went")
            run.log({"resilience/time": chart, **scalars, _STEP: step})

    def alert(self, loggers: Sequence[Any], title: str, text: str, level: str) -> None:
        """Sends an alert; W&B sends at most one alert with the same title in ten minutes.

        Args:
            loggers: The Trainer's loggers.
            title: At most 64 characters.
            text: A description of the event.
            level: ``INFO``, ``WARN`` or ``ERROR``.
        """
        for run in _runs(loggers):
            run.alert(title=title, text=text, level=level, wait_duration=_ALERT_AGAIN_AFTER_S)


def in_words(interruption: Mapping[str, Any]) -> str:
    """Describes an interruption in one line.

    Args:
        interruption: An interruption in the form of ``report --json``.
    """
    where = f" on {interruption['node']}" if interruption["node"] else ""
    steps = interruption["steps_lost"]
    lost = "" if steps is None else f"; {steps} steps done again"
    return f"{interruption['cause']}{where}: {interruption['reason']}{lost}"


def _runs(loggers: Sequence[Any]) -> Iterator[Any]:
    """The W&B runs of every ``WandbLogger``."""
    for logger in loggers:
        if any(each.__name__ == "WandbLogger" for each in type(logger).__mro__):
            yield logger.experiment


_INTERRUPTION_COLUMNS: list[str | int] = [
    *("time", "cause", "node", "reason", "steps lost", "from step"),
    *(f"{part} (s)" for part in PARTS),
]


def _interruption_row(interruption: Mapping[str, Any], ranks: int) -> list[Any]:
    parts = [interruption[part] for part in PARTS]
    return [
        timestamp(interruption["time"]),
        *(interruption[name] for name in ("cause", "node", "reason", "steps_lost", "resumed_step")),
        *(None if seconds is None else round(seconds / ranks, 1) for seconds in parts),
    ]


_COLUMNS: list[str | int] = [
    "rank",
    "node",
    "state",
    "relative",
    "individual",
    *(f"{name} (ms)" for name in SECTIONS),
    "device",
]


def _rows(report: Report, stragglers: Sequence[Straggler]) -> list[list[Any]]:
    """The rows of the table of ranks: the slowest ranks first, ranks without samples last."""
    states = dict.fromkeys(report.missing, "no steps")
    for each in stragglers:
        states[each.rank] = "; ".join([*filter(None, [states.get(each.rank)]), f"slow ({each.kind}): {each.cause}"])
    order = torch.fmin(report.relative, report.step_relative).nan_to_num(nan=2.0).argsort(stable=True)[:_MAX_ROWS]
    scores = torch.stack([report.relative, report.individual], dim=1)[order]
    numbers = [*scores.unbind(1), *(1000 * report.seconds[order]).unbind(1)]
    columns = [[round(each, 2) if each == each else None for each in column.tolist()] for column in numbers]
    return [
        [rank, report.device_ids[rank].node, states.get(rank, ""), *known, report.device_ids[rank].device]
        for rank, *known in zip(order.tolist(), *columns, strict=True)
    ]
