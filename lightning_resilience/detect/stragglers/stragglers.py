"""Which rank is slow, by how much and at what: from what each rank has measured of its own work. No Trainer.

Only a few numbers of each rank go to rank 0. So a report costs it about the same, however many kernels are measured and
whatever they are called.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torchmetrics import MinMetric

from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.stragglers.scores import lost, scores
from lightning_resilience.detect.stragglers.step_timer import COMPUTE, SECTIONS, Sample

Kind = Literal["relative", "individual"]

_CERTAINTY = 2.0
"""How many standard errors a step must be too slow. Of 512 healthy ranks whose steps vary by half, one would be found
slow in most reports of 10 steps with 1 and in every tenth with 2, and of 20 steps in none."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow.

    Attributes:
        rank: The rank.
        place: Where it runs.
        kind: Whether it is slower than the others, or than it was itself.
        score: The score that says so.
        cause: The section of the step that takes most of the time it loses.
    """

    rank: int
    place: DeviceId
    kind: Kind
    score: float
    cause: str

    def __str__(self) -> str:
        than = "the other ranks' speed" if self.kind == "relative" else "its own best speed"
        return f"rank {self.rank} on {self.place} at {self.score:.2f} of {than}, in {self.cause}"


@dataclass(frozen=True)
class Report:
    """What rank 0 knows of all ranks. Tensors are by rank; NaN: the rank had no samples.

    Attributes:
        step: ``trainer.global_step`` at which it was made.
        places: Where each rank runs.
        relative: Its speed beside the others', up to 1: of its kernels where they are measured, else of its steps.
        individual: Its speed beside the best that it ever had, up to 1.
        step_relative: The time of a whole step of the middle rank, as a part of this one's. Not of the fastest: of many
            ranks whose steps vary, one is always fast by chance. And not by section: ranks that are fast at different
            things are equally fast.
        step_individual: The same, beside the best that it ever had.
        noise: The standard error of a rank's step, as a part of it.
        seconds: What a step takes by section; of shape ``(ranks, sections)``.
        relative_lost: How much of a step is lost in each section, beside the rank that is the middle one there.
        individual_lost: The same, beside the best that the rank ever had in each.
        of_kernels: Whether kernels were measured, on any rank.
        elapsed: Seconds that it has taken to make.
    """

    step: int
    places: Sequence[DeviceId]
    relative: torch.Tensor
    individual: torch.Tensor
    step_relative: torch.Tensor
    step_individual: torch.Tensor
    noise: torch.Tensor
    seconds: torch.Tensor
    relative_lost: torch.Tensor
    individual_lost: torch.Tensor
    of_kernels: bool = False
    elapsed: float = 0.0

    @property
    def missing(self) -> list[int]:
        """Ranks without any samples: nothing is known of them."""
        return _ranks(torch.isnan(torch.fmin(self.relative, self.step_relative)))

    def slow(self, kind: Kind, threshold: float) -> list[Straggler]:
        """Ranks with a score of ``kind`` below ``threshold``, the slowest first.

        A rank whose steps vary so much that it may just have had bad luck is none of them.
        """
        if kind == "relative":
            score, of_step, by_section = self.relative, self.step_relative, self.relative_lost
        else:
            score, of_step, by_section = self.individual, self.step_individual, self.individual_lost
        at_least = (of_step / (1 - _CERTAINTY * self.noise).clamp(min=1e-9)).clamp(max=1)
        is_slow = (at_least < threshold) | (score < threshold if self.of_kernels else torch.tensor(False, device="cpu"))
        worst = torch.fmin(score, of_step)
        ranks = is_slow.nonzero().flatten()
        ranks = ranks[worst[ranks].argsort(stable=True)]
        # Where only the kernels are slow, no section need have lost anything.
        causes = torch.where(at_least[ranks] < threshold, by_section[ranks].argmax(1), COMPUTE)
        return [
            Straggler(rank, self.places[rank], kind, each, SECTIONS[cause])
            for rank, each, cause in zip(ranks.tolist(), worst[ranks].tolist(), causes.tolist(), strict=True)
        ]


def _ranks(condition: torch.Tensor) -> list[int]:
    ranks: list[int] = condition.nonzero().flatten().tolist()
    return ranks


@dataclass(frozen=True)
class Exchange:
    """How ranks tell each other numbers; by default there is one rank.

    Attributes:
        smallest: Reduces a tensor to the smallest over all ranks, and returns it.
        gather: Gives rank 0 the vectors of all ranks as a matrix; returns it there, and ``None`` elsewhere.
        from_rank_0: Gives all ranks rank 0's tensor.
    """

    smallest: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    gather: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: tensor.unsqueeze(0)
    from_rank_0: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a device have taken since the last report.

    Attributes:
        numbers: Of the kernels, made of their names, which are long.
        medians: Their times, in any one unit.
        weights: The time spent in each in total.
    """

    numbers: Sequence[int]
    medians: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(times: Mapping[str, tuple[float, float]]) -> Kernels:
        """Of the median and the total time of each kernel, by its name."""
        medians, weights = torch.tensor([*times.values()], dtype=torch.float64, device="cpu").reshape(-1, 2).unbind(1)
        return Kernels([_number(name) for name in times], medians, weights)


def _best() -> MinMetric:
    with torch.device("cpu"):
        best = MinMetric(nan_strategy="ignore", sync_on_compute=False)
    best.set_dtype(torch.float64)
    return best


@dataclass
class History:
    """The best that a rank ever was, on one device.

    Attributes:
        device: On which.
        total: Of a whole step.
        sections: Of :data:`~lightning_resilience.detect.stragglers.step_timer.SECTIONS`.
        kernels: By the numbers made of their names.
    """

    device: str
    total: MinMetric = field(default_factory=_best)
    sections: list[MinMetric] = field(default_factory=lambda: [_best() for _ in SECTIONS])
    kernels: dict[int, float] = field(default_factory=dict)

    def observe(self, sample: Sample) -> torch.Tensor:
        """Learns from the sections; returns the best of each."""
        self._learn(sample.total, sample.typical)
        return torch.stack([each.min_value for each in self.sections])

    def _learn(self, total: torch.Tensor | float, sections: Iterable[torch.Tensor | float]) -> None:
        self.total.update(total)
        for best, seconds in zip(self.sections, sections, strict=True):
            best.update(seconds)

    def observe_kernels(self, kernels: Kernels) -> torch.Tensor:
        """Learns from the kernels; returns their smallest medians, in their order."""
        known = [self.kernels.get(number, torch.inf) for number in kernels.numbers]
        best = torch.fmin(torch.tensor(known, dtype=torch.float64, device="cpu"), kernels.medians)
        self.kernels.update(zip(kernels.numbers, best.tolist(), strict=True))
        return best

    def state_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {
            "device": self.device,
            "total": float(self.total.min_value),
            "sections": [float(each.min_value) for each in self.sections],
            "kernels": [[*self.kernels], [*self.kernels.values()]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, if that was on the same device: another one has a past of its own."""
        if state["device"] == self.device and len(state["sections"]) == len(SECTIONS):
            numbers, bests = state["kernels"]
            self._learn(state["total"], state["sections"])
            self.kernels = {int(number): float(best) for number, best in zip(numbers, bests, strict=True)}


def make_report(
    step: int, places: Sequence[DeviceId], sample: Sample, kernels: Kernels | None, history: History, exchange: Exchange
) -> Report | None:
    """Makes the report; a collective.

    Args:
        step: ``trainer.global_step``.
        places: Of all ranks.
        sample: What this rank has measured.
        kernels: And of its device's kernels, if they are measured; on all ranks or on none.
        history: What this rank was like before.
        exchange: How to reach the others.

    Returns:
        The report on rank 0, ``None`` elsewhere.
    """
    began = time.perf_counter()
    best = history.observe(sample)
    typical, total = sample.typical, sample.total
    kernel_scores = [torch.full_like(total, torch.nan)] * 2
    if kernels is not None:
        best_kernels, aligned = history.observe_kernels(kernels), _align(kernels, exchange)
        fastest = exchange.smallest(aligned.medians.nan_to_num(nan=torch.inf))
        kernel_scores = [
            scores(aligned.medians, aligned.weights, fastest),
            scores(kernels.medians, kernels.weights, best_kernels),
        ]
    own = [*kernel_scores, _speed(total, history.total.min_value), sample.error / total]
    matrix = exchange.gather(torch.cat([torch.stack(own), typical, lost(typical, typical, best)]))
    if matrix is None:
        return None
    relative, individual, step_individual, noise = matrix[:, : len(own)].unbind(1)
    seconds, individual_lost = matrix[:, len(own) :].reshape(len(matrix), 2, len(SECTIONS)).unbind(1)
    totals = seconds.sum(1)
    step_relative = _speed(totals, totals.nanmedian())
    of_kernels = not matrix[:, :2].isnan().all()
    return Report(
        step,
        places,
        relative if of_kernels else step_relative,
        individual if of_kernels else step_individual,
        step_relative,
        step_individual,
        noise,
        seconds,
        relative_lost=lost(seconds, seconds, seconds.nanmedian(dim=0).values),
        individual_lost=individual_lost,
        of_kernels=of_kernels,
        elapsed=time.perf_counter() - began,
    )


def _speed(seconds: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The score of one signal."""
    return scores(seconds.unsqueeze(-1), seconds.unsqueeze(-1), reference)


def _align(kernels: Kernels, exchange: Exchange) -> Kernels:
    """This rank's kernels in the order of rank 0's: what rank 0 does not run is not compared."""
    own = torch.tensor(kernels.numbers, dtype=torch.int64, device="cpu")
    count = exchange.from_rank_0(torch.tensor([len(own)], device="cpu"))
    theirs = exchange.from_rank_0(own if len(own) == int(count) else own.new_empty(int(count)))
    place = {number: index for index, number in enumerate(own.tolist())}
    medians = torch.full((len(theirs),), torch.nan, dtype=torch.float64, device="cpu")
    weights = torch.zeros(len(theirs), dtype=torch.float64, device="cpu")
    found = [(index, place[number]) for index, number in enumerate(theirs.tolist()) if number in place]
    if found:
        there, here = (torch.tensor(each, device="cpu") for each in zip(*found, strict=True))
        medians[there], weights[there] = kernels.medians[here], kernels.weights[here]
    return Kernels([], medians, weights)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class Streaks:
    """Ranks that were slow in several reports in a row.

    Args:
        minimum: How many reports in a row make a straggler of a rank.
    """

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self._counts: dict[tuple[int, Kind], int] = {}

    def of(self, slow: Sequence[Straggler]) -> list[Straggler]:
        """Those that are slow now and were before, often enough."""
        self._counts = {(each.rank, each.kind): self._counts.get((each.rank, each.kind), 0) + 1 for each in slow}
        return [each for each in slow if self._counts[each.rank, each.kind] >= self._minimum]
