"""Computes NVRx's performance scores, numbers up to 1, for all ranks at once. No Trainer.

A *signal* is anything that is timed repeatedly: a kernel, or a section of a step. The formulas are those of NVRx
(``straggler/reporting.py``), but a rank without samples of a signal does not make the scores of all ranks NaN.
"""

from __future__ import annotations

import torch


def scores(medians: torch.Tensor, weights: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Computes the mean of ``reference / median`` over a rank's signals, weighted by the time spent in each.

    A score of 0.5 means that the rank takes twice as long as the reference. If the reference is the smallest median of
    all ranks, these are NVRx's relative scores; if it is the smallest that the rank ever had, the individual ones.

    Args:
        medians: Seconds, of shape ``(..., signals)``; NaN without samples.
        weights: Total seconds, of the same shape.
        reference: Seconds, broadcast to this shape; not finite if unknown.

    Returns:
        Scores from 0 to 1, of shape ``(...)``; NaN for a rank without samples.
    """
    ratios, known = _ratios(medians, reference)
    weights = torch.where(known, weights, 0)
    total = weights.sum(-1)
    return torch.where(total > 0, (ratios * weights).sum(-1) / total, torch.nan)


def lost(medians: torch.Tensor, weights: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Computes how much each signal lowers the score of a rank below 1.

    Args:
        medians: See :func:`scores`.
        weights: See :func:`scores`.
        reference: See :func:`scores`.

    Returns:
        Tensor of the shape of ``medians``.
    """
    ratios, known = _ratios(medians, reference)
    weights = torch.where(known, weights, 0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, (1 - ratios) * weights / total, 0)


def _ratios(medians: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    known = torch.isfinite(medians) & torch.isfinite(reference)
    # A signal that takes no time is not slower than the reference.
    ratios = torch.where(known & (medians > 0), reference / medians, 1).clamp(max=1)
    return ratios, known
