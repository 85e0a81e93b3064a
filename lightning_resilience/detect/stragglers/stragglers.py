"""Compares the step times of all ranks: which rank is slow, by how much, and in which section. No Trainer.

Each rank sends only a few numbers to rank 0, so the cost of a report does not depend on the number of kernels.
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
"""By how many standard errors a step must be too slow. Among 512 healthy ranks whose steps vary by half, most reports
of 10 steps would call one rank slow with 1, and every tenth report with 2; no report of 20 steps would."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        rank: The rank.
        device_id: Node and device that it runs on.
        kind: ``"relative"``: slower than other ranks; ``"individual"``: slower than it was before.
        score: The score, below the threshold.
        cause: Section of the step that loses most time.
    """

    rank: int
    device_id: DeviceId
    kind: Kind
    score: float
    cause: str

    def __str__(self) -> str:
        than = "the other ranks' speed" if self.kind == "relative" else "its own best speed"
        return f"rank {self.rank} on {self.device_id} at {self.score:.2f} of {than}, in {self.cause}"


@dataclass(frozen=True)
class Report:
    """Scores of all ranks, made on rank 0. Tensors are indexed by rank; NaN: the rank had no samples.

    Attributes:
        step: ``trainer.global_step``.
        device_ids: Node and device of each rank.
        relative: Speed relative to the other ranks, up to 1: of kernels if they are measured, otherwise of steps.
        individual: Speed relative to the rank's own best, up to 1.
        step_relative: Median step time of all ranks divided by the rank's step time, up to 1. The median, because the
            fastest of many ranks is fast by chance. Whole steps, because ranks may be fast in different sections.
        step_individual: The rank's best step time ever divided by its current step time, up to 1.
        noise: Standard error of a rank's step, as a fraction of the step.
        seconds: Seconds of a step by section, of shape ``(ranks, sections)``.
        relative_lost: Fraction of a step lost in each section relative to the median rank in that section.
        individual_lost: Fraction of a step lost in each section relative to the rank's own best in that section.
        of_kernels: Whether kernels were measured on any rank.
        elapsed: Seconds that it took to make the report.
        waited: Seconds of a step in which the rank waits for other ranks, on average; ``None``: not measured.
    """

    step: int
    device_ids: Sequence[DeviceId]
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
    waited: torch.Tensor | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks without any samples."""
        missing: list[int] = torch.isnan(torch.fmin(self.relative, self.step_relative)).nonzero().flatten().tolist()
        return missing

    def slow(self, kind: Kind, threshold: float) -> list[Straggler]:
        """Returns the ranks with a score of ``kind`` below ``threshold`` by more than noise, slowest first."""
        if kind == "relative":
            score, of_step, by_section = self.relative, self.step_relative, self.relative_lost
        else:
            score, of_step, by_section = self.individual, self.step_individual, self.individual_lost
        at_least = (of_step / (1 - _CERTAINTY * self.noise).clamp(min=1e-9)).clamp(max=1)
        is_slow = (at_least < threshold) | (score < threshold if self.of_kernels else torch.tensor(False, device="cpu"))
        worst = torch.fmin(score, of_step)
        ranks = is_slow.nonzero().flatten()
        ranks = ranks[worst[ranks].argsort(stable=True)]
        # If only kernels are slow, maybe no section has lost time.
        causes = torch.where(at_least[ranks] < threshold, by_section[ranks].argmax(1), COMPUTE)
        return [
            Straggler(rank, self.device_ids[rank], kind, each, SECTIONS[cause])
            for rank, each, cause in zip(ranks.tolist(), worst[ranks].tolist(), causes.tolist(), strict=True)
        ]

    def waiting(self, stragglers: Sequence[Straggler]) -> tuple[int, float] | None:
        """How long the other ranks wait for the slowest straggler in each step.

        For each other rank this is the smaller of two times: its waiting time, and the time by which the straggler's
        step is longer than the step of the slowest rank that is no straggler. By the second time all steps would be
        shorter without stragglers. Any further waiting in collectives is normal: transfers, and steps of unequal
        length.

        Args:
            stragglers: The stragglers found. Only stragglers that are slower than other ranks make these wait.

        Returns:
            The slowest straggler, and seconds of a step, averaged over the ranks that are no stragglers; ``None`` if no
            rank waits.
        """
        seconds = self.seconds.sum(1)
        slow = [each.rank for each in stragglers if each.kind == "relative"]
        others = torch.isfinite(seconds)
        others[slow] = False
        if not slow or self.waited is None or not others.any():
            return None
        slowest = max(slow, key=lambda rank: float(seconds[rank].nan_to_num(nan=0.0)))
        longer = seconds[slowest] - seconds[others].max()
        waited = float(self.waited[others].nan_to_num(nan=0.0).clamp(max=longer).mean())
        return (slowest, waited) if waited > 0 else None


@dataclass(frozen=True)
class Comm:
    """Collectives of the ranks; the defaults suit a single rank.

    Attributes:
        all_reduce_min: Returns the elementwise minimum of a tensor over all ranks.
        gather: Returns the vectors of all ranks as a matrix on rank 0, ``None`` elsewhere.
        broadcast: Returns rank 0's tensor on all ranks.
    """

    all_reduce_min: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    gather: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: tensor.unsqueeze(0)
    broadcast: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


@dataclass(frozen=True)
class Kernels:
    """Times of the kernels of a device since the last report.

    Attributes:
        ids: Hashes of the kernels' names, which are long.
        medians: Median time of each kernel, in any unit.
        weights: Total time of each kernel, in the same unit.
    """

    ids: Sequence[int]
    medians: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(times: Mapping[str, tuple[float, float]]) -> Kernels:
        """Creates the object from the median and the total time of each kernel, by name."""
        medians, weights = torch.tensor([*times.values()], dtype=torch.float64, device="cpu").reshape(-1, 2).unbind(1)
        return Kernels([_kernel_id(name) for name in times], medians, weights)


def _best() -> MinMetric:
    with torch.device("cpu"):
        best = MinMetric(nan_strategy="ignore", sync_on_compute=False)
    best.set_dtype(torch.float64)
    return best


@dataclass
class History:
    """Best times that a rank ever had on one device.

    Attributes:
        device: The device, and everything else that must be the same to compare times.
        total: Seconds of a whole step.
        sections: Seconds of each of :data:`~lightning_resilience.detect.stragglers.step_timer.SECTIONS`.
        kernels: Smallest median of each kernel, by its id.
    """

    device: str
    total: MinMetric = field(default_factory=_best)
    sections: list[MinMetric] = field(default_factory=lambda: [_best() for _ in SECTIONS])
    kernels: dict[int, float] = field(default_factory=dict)

    def observe(self, sample: Sample) -> torch.Tensor:
        """Updates step and sections; returns the best time of each section."""
        self._update(sample.total, sample.typical)
        return torch.stack([each.min_value for each in self.sections])

    def _update(self, total: torch.Tensor | float, sections: Iterable[torch.Tensor | float]) -> None:
        self.total.update(total)
        for best, seconds in zip(self.sections, sections, strict=True):
            best.update(seconds)

    def observe_kernels(self, kernels: Kernels) -> torch.Tensor:
        """Updates the kernels; returns their smallest medians, in the order of ``kernels``."""
        known = [self.kernels.get(each, torch.inf) for each in kernels.ids]
        best = torch.fmin(torch.tensor(known, dtype=torch.float64, device="cpu"), kernels.medians)
        self.kernels.update(zip(kernels.ids, best.tolist(), strict=True))
        return best

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, strings and lists."""
        return {
            "device": self.device,
            "total": float(self.total.min_value),
            "sections": [float(each.min_value) for each in self.sections],
            "kernels": [[*self.kernels], [*self.kernels.values()]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state; ignores the state of another device."""
        if state["device"] == self.device and len(state["sections"]) == len(SECTIONS):
            ids, bests = state["kernels"]
            self._update(state["total"], state["sections"])
            self.kernels = {int(each): float(best) for each, best in zip(ids, bests, strict=True)}


def make_report(
    step: int, device_ids: Sequence[DeviceId], sample: Sample, kernels: Kernels | None, history: History, comm: Comm
) -> Report | None:
    """Makes a report of all ranks; a collective.

    Args:
        step: ``trainer.global_step``.
        device_ids: Node and device of each rank.
        sample: Step times of this rank.
        kernels: Kernel times of its device; ``None`` on all ranks if they are not measured.
        history: Best times of this rank; updated.
        comm: See :class:`Comm`.

    Returns:
        The report on rank 0, ``None`` elsewhere.
    """
    began = time.perf_counter()
    best = history.observe(sample)
    typical, total = sample.typical, sample.total
    kernel_scores = [torch.full_like(total, torch.nan)] * 2
    if kernels is not None:
        best_kernels, aligned = history.observe_kernels(kernels), _align(kernels, comm)
        fastest = comm.all_reduce_min(aligned.medians.nan_to_num(nan=torch.inf))
        kernel_scores = [
            scores(aligned.medians, aligned.weights, fastest),
            scores(kernels.medians, kernels.weights, best_kernels),
        ]
    own = [*kernel_scores, _speed(total, history.total.min_value), sample.error / total]
    waited = typical.new_tensor([sample.waited])
    matrix = comm.gather(torch.cat([torch.stack(own), waited, typical, lost(typical, typical, best)]))
    if matrix is None:
        return None
    relative, individual, step_individual, noise = matrix[:, : len(own)].unbind(1)
    seconds, individual_lost = matrix[:, len(own) + 1 :].reshape(len(matrix), 2, len(SECTIONS)).unbind(1)
    totals = seconds.sum(1)
    step_relative = _speed(totals, totals.nanmedian())
    of_kernels = not matrix[:, :2].isnan().all()
    return Report(
        step,
        device_ids,
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
        waited=matrix[:, len(own)],
    )


def _speed(seconds: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The score of a single signal."""
    return scores(seconds.unsqueeze(-1), seconds.unsqueeze(-1), reference)


def _align(kernels: Kernels, comm: Comm) -> Kernels:
    """This rank's kernels in the order of rank 0's, without kernels that rank 0 does not run."""
    own = torch.tensor(kernels.ids, dtype=torch.int64, device="cpu")
    count = comm.broadcast(torch.tensor([len(own)], device="cpu"))
    theirs = comm.broadcast(own if len(own) == int(count) else own.new_empty(int(count)))
    positions = {each: index for index, each in enumerate(own.tolist())}
    medians = torch.full((len(theirs),), torch.nan, dtype=torch.float64, device="cpu")
    weights = torch.zeros(len(theirs), dtype=torch.float64, device="cpu")
    found = [(index, positions[each]) for index, each in enumerate(theirs.tolist()) if each in positions]
    if found:
        there, here = (torch.tensor(each, device="cpu") for each in zip(*found, strict=True))
        medians[there], weights[there] = kernels.medians[here], kernels.weights[here]
    return Kernels([], medians, weights)


def _kernel_id(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class Period:
    """The batches before a report: since the last report, the first step of a process, or a rollback.

    Args:
        step: ``trainer.global_step`` at the beginning of the period.
        reached: The furthest step that the fit had reached before.

    Attributes:
        batches: The number of batches, which the caller counts.
    """

    def __init__(self, step: int, reached: int) -> None:
        self._step = step
        self._reached = reached
        self.batches = 0

    def new_batches(self, step: int) -> float:
        """How many batches belong to steps never done before; ``step``: ``trainer.global_step`` at the period's end."""
        steps = step - self._step
        return self.batches * max(step - max(self._step, self._reached), 0) / steps if steps > 0 else 0.0


class Streaks:
    """Finds ranks that were slow in several consecutive reports.

    Args:
        minimum: Number of consecutive reports.
    """

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self._counts: dict[tuple[int, Kind], int] = {}

    def of(self, slow: Sequence[Straggler]) -> list[Straggler]:
        """Returns the ranks of the current report that were slow often enough; call it once per report."""
        self._counts = {(each.rank, each.kind): self._counts.get((each.rank, each.kind), 0) + 1 for each in slow}
        return [each for each in slow if self._counts[each.rank, each.kind] >= self._minimum]
