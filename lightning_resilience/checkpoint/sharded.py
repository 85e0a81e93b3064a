"""A rank's own part of a state that several ranks share out among them (DTensors of FSDP2 and tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # a torch without distributed
    DTensor = None  # type: ignore[assignment, misc]

_LOCAL = "__local_shard__"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``; an alias, not a copy. Nothing is gathered."""
    if DTensor is not None and isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def to_local(value: Any) -> Any:
    """Replaces every DTensor in nested dicts and lists by this rank's part of it, with its layout."""
    if DTensor is not None and isinstance(value, DTensor):
        return {_LOCAL: local(value.detach()), "layout": _layout(value)}
    if isinstance(value, Mapping):
        return {key: to_local(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_local(item) for item in value)
    return value


def from_local(value: Any, like: torch.Tensor | None) -> Any:
    """Rebuilds what :func:`to_local` has replaced.

    Args:
        value: A tensor, or the part of one.
        like: The live tensor with its layout.

    Raises:
        ValueError: If the layout is another one.
    """
    if not isinstance(value, dict) or _LOCAL not in value:
        return value
    if DTensor is None or not isinstance(like, DTensor) or _layout(like) != value["layout"]:
        now = _layout(like) if DTensor is not None and isinstance(like, DTensor) else "not sharded"
        raise ValueError(f"a sharded tensor was saved with the layout {value['layout']} and is {now} now")
    return DTensor.from_local(
        value[_LOCAL].to(local(like).device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _layout(tensor: Any) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "mesh": list(tensor.device_mesh.shape),
        "placements": [str(placement) for placement in tensor.placements],
    }


def optimizer_state_from_local(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer for its ``load_state_dict``: states of sharded parameters are sharded as these are."""
    parameters = dict(enumerate(_parameters(optimizer)))
    return {
        **state,
        "state": {
            index: {key: from_local(item, parameters.get(index)) for key, item in each.items()}
            if isinstance(each, dict)
            else each
            for index, each in state["state"].items()
        },
    }


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
