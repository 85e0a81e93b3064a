"""Loads weights that torch's pruning has split into ``weight_orig`` and ``weight_mask``.

In a new process no weight is split yet when it loads a state. And it must make its optimizers and DDP's buckets from
the parameters in their earlier order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import prune

_prune: Any = prune  # without annotations

ORIGINAL, MASK = "_orig", "_mask"
"""Suffixes that torch adds to the name of a pruned weight: for its values, and for the mask of what remains."""


def take_masks(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Replaces pruned weights in a saved state by whole ones if they are not pruned in ``module``.

    Returns:
        Their masks, by the names of the weights, for :func:`mask`.
    """
    whole, masks = dict(module.named_parameters(remove_duplicate=False)), {}
    for name in [key.removesuffix(MASK) for key in state if key.endswith(MASK)]:
        if name in whole and name + ORIGINAL in state:
            state[name] = state.pop(name + ORIGINAL)
            masks[name] = state.pop(name + MASK)
    return masks


def mask(module: torch.nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Prunes weights of ``module`` with the masks from :func:`take_masks`."""
    for name, each in masks.items():
        owner, _, own = name.rpartition(".")
        layer = module.get_submodule(owner)
        _prune.custom_from_mask(layer, own, each.to(getattr(layer, own).device))


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters of ``module``, with the names that they would have without pruning."""
    pruned = {key.removesuffix(MASK) + ORIGINAL for key, _ in module.named_buffers() if key.endswith(MASK)}
    for name, parameter in module.named_parameters():
        yield name.removesuffix(ORIGINAL) if name in pruned else name, parameter


def make_whole(module: torch.nn.Module) -> None:
    """Makes every pruning of ``module`` permanent: weights are no longer split, and masked values stay zero."""
    for name in [key.removesuffix(MASK) for key, _ in module.named_buffers() if key.endswith(MASK)]:
        owner, _, own = name.rpartition(".")
        layer = module.get_submodule(owner)
        if hasattr(layer, own + ORIGINAL):
            _prune.remove(layer, own)
