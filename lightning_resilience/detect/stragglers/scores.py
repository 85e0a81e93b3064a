"""How fast each rank is, as a number up to 1: NVRx's performance scores, for all ranks at once. No Trainer.

A *signal* is anything that takes a rank a time again and again: a kernel, or a section of its step. The formulas are
those of NVRx (``straggler/reporting.py``). Unlike there, a rank without samples of a signal spoils nobody's score.
"""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric


def fastest(medians: torch.Tensor) -> torch.Tensor:
    """The smallest median of each signal over all ranks.

    Args:
        medians: Of shape ``(ranks, signals)``; NaN where a rank has no samples.

    Returns:
        Of shape ``(signals,)``; infinite where no rank has any.
    """
    return medians.nan_to_num(nan=torch.inf).amin(dim=0)


def scores(medians: torch.Tensor, weights: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The mean over a rank's signals of ``reference / median``, weighted by the time that the rank spends in each.

    ``0.5`` means that this rank takes twice as long as the reference. With the :func:`fastest` ranks as the reference
    these are NVRx's relative scores; with the smallest medians that the rank itself ever had, its individual ones.

    Args:
        medians: Of shape ``(..., signals)``; NaN where there are no samples.
        weights: Seconds in total, of the same shape.
        reference: Something that has this shape when it is broadcast; not finite where there is none.

    Returns:
        Of shape ``(...)``, from 0 to 1; NaN for a rank without any samples.
    """
    ratios, known = _ratios(medians, reference)
    weights = torch.where(known, weights, 0)
    total = weights.sum(-1)
    return torch.where(total > 0, (ratios * weights).sum(-1) / total, torch.nan)


def lost(medians: torch.Tensor, weights: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """By how much each signal lowers the score of a rank, which is 1 without all of them.

    Args:
        medians: As for :func:`scores`.
        weights: As for :func:`scores`.
        reference: As for :func:`scores`.

    Returns:
        Of the shape of ``medians``.
    """
    ratios, known = _ratios(medians, reference)
    weights = torch.where(known, weights, 0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, (1 - ratios) * weights / total, 0)


def _ratios(medians: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    known = torch.isfinite(medians) & torch.isfinite(reference)
    # What takes no time at all cannot take longer than the reference.
    ratios = torch.where(known & (medians > 0), reference / medians, 1).clamp(max=1)
    return ratios, known


class PerformanceScores(Metric):
    """The scores as a metric of its own, for other loops than Lightning's.

    Each rank gives what it has measured to :meth:`update`; ``compute()`` gathers that from all ranks. The smallest
    medians that this rank ever had are part of its ``state_dict``, and :meth:`reset` keeps them.

    Args:
        signals: How many there are, the same on all ranks.
        **kwargs: Those of :class:`torchmetrics.Metric`.

    Example::

        >>> metric = PerformanceScores(signals=2)
        >>> metric.update(torch.tensor([0.2, 1.0]), torch.tensor([2.0, 10.0]))
        >>> metric.compute()["relative"]  # of the only rank, which is the fastest
        tensor(1.)
    """

    full_state_update = True
    medians: torch.Tensor
    weights: torch.Tensor
    individual: torch.Tensor
    best: torch.Tensor

    def __init__(self, signals: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if signals < 1:
            raise ValueError(f"signals must be at least 1, not {signals}.")
        self.add_state("medians", torch.full((signals,), torch.nan), dist_reduce_fx=None)
        self.add_state("weights", torch.zeros(signals), dist_reduce_fx=None)
        self.add_state("individual", torch.tensor(torch.nan), dist_reduce_fx=None)
        self.register_buffer("best", torch.full((signals,), torch.inf))

    def update(self, medians: torch.Tensor, weights: torch.Tensor) -> None:
        """Takes what this rank has measured since the last report, in place of what it took before.

        Args:
            medians: Seconds, by signal; NaN: no samples.
            weights: Seconds in total.
        """
        self.medians, self.weights = medians.to(self.best), weights.to(self.best)
        self.best = torch.minimum(self.best, self.medians.nan_to_num(nan=torch.inf))
        self.individual = scores(self.medians, self.weights, self.best)

    def compute(self) -> dict[str, torch.Tensor]:
        """``relative`` and ``individual``, each with one score for every rank; NaN for one without samples."""
        medians = self.medians.reshape(-1, self.best.numel())
        weights = self.weights.reshape(-1, self.best.numel())
        relative = scores(medians, weights, fastest(medians))
        return {"relative": relative, "individual": self.individual.reshape(-1)}
