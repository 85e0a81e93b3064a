"""What Weights & Biases shows of stragglers beyond the scalars that every logger gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_resilience.detect.stragglers.step_timer import SECTIONS
from lightning_resilience.detect.stragglers.stragglers import Report, Straggler

KEPT = "straggler panels"

_EVERY = 12
_REPORTS = 200
_NODES = 20
_REMEMBERED = 100
_ROWS = 1000


class Panels:
    """A table of the ranks, a plot of the nodes over time, and the stragglers in the run's summary.

    Of many ranks the slowest 1,000, of many nodes the slowest 20.

    Remembers the nodes' scores of the last 200 reports, since a plot is sent as a whole; their state is saved, so a
    restarted run goes on with its plot. Table and plot are files for W&B, and are sent when other ranks are slow than
    before, and every 12th report.
    """

    def __init__(self) -> None:
        self._shown: set[int] = set()
        self._not_shown = _EVERY
        self._steps: list[int] = []
        self._nodes: dict[str, list[float | None]] = {}

    def show(
        self, loggers: Sequence[Any], report: Report, stragglers: Sequence[Straggler], step: int, threshold: float
    ) -> None:
        """Gives a report to those of ``loggers`` that are Lightning's for W&B.

        Args:
            loggers: The Trainer's.
            report: What is shown.
            stragglers: Which ranks are too slow.
            step: At which the loggers log now.
            threshold: Of relative scores, for the eye.
        """
        self._remember(report, step)
        self._not_shown += 1
        if self._not_shown < _EVERY and self._shown == {each.rank for each in stragglers}:
            return
        self._not_shown, self._shown = 0, {each.rank for each in stragglers}
        for logger in loggers:
            if not any(each.__name__ == "WandbLogger" for each in type(logger).__mro__):
                continue
            import wandb

            nodes = sorted(self._nodes, key=self._last)[:_NODES]
            run = logger.experiment
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
        for place, score in zip(report.places, torch.fmin(report.relative, report.step_relative).tolist(), strict=True):
            if score == score:
                worst[place.node] = min(score, worst.get(place.node, 1.0))
        self._steps.append(step)
        for node in {*self._nodes, *worst}:
            self._nodes.setdefault(node, [None] * (len(self._steps) - 1)).append(worst.get(node))
        if len(self._steps) > _REPORTS:
            self._steps.pop(0)
            for scores in self._nodes.values():
                scores.pop(0)
        known = {node: scores for node, scores in self._nodes.items() if any(each is not None for each in scores)}
        if len(known) > _REMEMBERED:
            # All of them would weigh on every checkpoint.
            slowest = sorted(known, key=lambda node: min(each for each in known[node] if each is not None))
            known = {node: known[node] for node in slowest[:_REMEMBERED]}
        self._nodes = known

    def _last(self, node: str) -> float:
        return next((score for score in reversed(self._nodes[node]) if score is not None), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {"steps": list(self._steps), "nodes": {node: list(scores) for node, scores in self._nodes.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        steps = [int(step) for step in state["steps"]]
        nodes = {str(node): list(scores) for node, scores in state["nodes"].items()}
        self._nodes = {node: scores for node, scores in nodes.items() if len(scores) == len(steps)}
        self._steps = steps


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
    """The slowest ranks first; those of which nothing is known come last."""
    states = dict.fromkeys(report.missing, "no steps")
    for each in stragglers:
        states[each.rank] = "; ".join([*filter(None, [states.get(each.rank)]), f"slow ({each.kind}): {each.cause}"])
    order = torch.fmin(report.relative, report.step_relative).nan_to_num(nan=2.0).argsort(stable=True)[:_ROWS]
    scores = torch.stack([report.relative, report.individual], dim=1)[order]
    numbers = [*scores.unbind(1), *(1000 * report.seconds[order]).unbind(1)]
    columns = [[round(each, 2) if each == each else None for each in column.tolist()] for column in numbers]
    return [
        [rank, report.places[rank].node, states.get(rank, ""), *known, report.places[rank].device]
        for rank, *known in zip(order.tolist(), *columns, strict=True)
    ]
