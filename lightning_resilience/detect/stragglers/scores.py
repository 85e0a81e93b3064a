"""How fast each rank is, as a number up to 1: NVRx's performance scores, for all ranks at once. No Trainer.

A *signal* is anything that takes a rank a time again and again: a kernel, or a section of its step. The formulas are
those of NVRx (``straggler/reporting.py``). Unlike there, a rank without samples of a signal does not make the scores
of all ranks NaN.
"""

from __future__ import annotations

import torch


def scores(medians: torch.Tensor, weights: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The mean over a rank's signals of ``reference / median``, weighted by the time that the rank spends in each.

    ``0.5`` means that this rank takes twice as long as the reference. Relative to the smallest medians of all ranks
    these are NVRx's relative scores; to the smallest medians that the rank itself ever had, its individual ones.

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
