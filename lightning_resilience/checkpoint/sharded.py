"""Converts sharded tensors to a rank's own part of them and back.

This is for the DTensors of FSDP2 and tensor parallelism; FSDP1 saves tensors of an older kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_resilience._torch import local
from lightning_resilience.checkpoint.safe_serialization import map_nested

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
except ImportError:  # a torch without distributed
    DTensor = None  # type: ignore[assignment, misc]

_LOCAL = "__local_shard__"


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # names from FSDP1, activation checkpointing


def whole_parameters(module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...] | None, torch.dtype]]:
    """Names, shapes and types of all parameters as they would be without sharding; nothing is gathered.

    A DTensor knows its whole shape. A module wrapped by FSDP1 knows the names and shapes of its original parameters;
    the flat parameters themselves do not. The shape of a lazy parameter is unknown (``None``).
    """
    whole: dict[str, tuple[int, ...]] = {}
    flat: dict[torch.Tensor, list[str]] = {}
    for prefix, each in module.named_modules():
        handle = getattr(each, "_handle", None) if _is_fsdp1(each) else None
        if handle is not None:
            names = [_plain_name(f"{prefix}.{name}".lstrip(".")) for name in handle.flat_param._fqns]
            flat[handle.flat_param] = names
            whole.update(zip(names, map(tuple, handle.flat_param._shapes), strict=True))
    for name, parameter in module.named_parameters():
        for plain in flat.get(parameter, [_plain_name(name)]):
            yield plain, None if is_lazy(parameter) else whole.get(plain, tuple(parameter.shape)), parameter.dtype


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def to_local(value: Any) -> Any:
    """Replaces every DTensor in nested dicts and lists with this rank's part of it and its layout."""

    def replaced(item: Any) -> Any:
        if DTensor is None or not isinstance(item, DTensor):
            return item
        return {_LOCAL: local(item.detach()), "layout": {**_layout(item), "stride": list(item.stride())}}

    return map_nested(value, replaced)


def from_local(value: Any, like: torch.Tensor | None) -> Any:
    """Rebuilds a tensor from the result of :func:`to_local`.

    Args:
        value: A tensor, which is returned as it is, or the part of one.
        like: The live tensor, which must have the same layout.

    Raises:
        ValueError: If the live tensor has another layout.
    """
    if not _is_part(value):
        return value
    now = _layout(like) if DTensor is not None and isinstance(like, DTensor) else "not sharded"
    if now != {key: item for key, item in value["layout"].items() if key != "stride"}:
        raise ValueError(f"a sharded tensor was saved with the layout {value['layout']} and is {now} now")
    return _rebuild(value, like)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and _LOCAL in value


def group_size(tensor: torch.Tensor, ranks: int) -> int:
    """The number of ranks that hold a tensor together, where each further group of that size holds it as well (HSDP).

    Args:
        tensor: Any tensor.
        ranks: Number of ranks.

    Returns:
        0 if the tensor is not laid out in groups of consecutive ranks.
    """
    if DTensor is None or not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 2:
        return 0
    (copies, parts), mesh = tensor.placements, tensor.device_mesh
    is_known = copies.is_replicate() and parts.is_shard() and mesh.mesh.flatten().tolist() == [*range(ranks)]
    return mesh.size(1) if is_known else 0


def _layout(tensor: Any) -> dict[str, Any]:
    """Everything that determines a rank's part; the number of ranks with the same part does not."""
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return {
        "shape": list(tensor.shape),
        "mesh": [0 if placement.is_replicate() else size for size, placement in placed],
        "placements": [str(placement) for placement in tensor.placements],
    }


def _rebuild(value: dict[str, Any], near: Any) -> Any:
    """A DTensor in the layout in which it was saved, on the mesh of ``near``."""
    layout = value["layout"]
    placements: list[Any] = []
    if DTensor is not None and isinstance(near, DTensor) and _fits(layout["mesh"], near.device_mesh.shape):
        usual = (Replicate(), Partial(), *(Shard(axis) for axis in range(len(layout["shape"]))))
        known = {str(placement): placement for placement in (*usual, *near.placements)}
        placements = [known[name] for name in layout["placements"] if name in known]
    if len(placements) != len(layout["placements"]):
        raise ValueError(f"a tensor with the layout {layout} cannot be sharded like this here")
    return DTensor.from_local(
        value[_LOCAL].to(local(near).device),
        near.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(layout["shape"]),
        stride=tuple(layout["stride"]),
    )


def _fits(saved: list[int], shape: tuple[int, ...]) -> bool:
    """Whether a mesh of this shape can hold the saved layout; 0 stands for any number of copies."""
    return len(saved) == len(shape) and all(size in (0, now) for size, now in zip(saved, shape, strict=True))


def optimizer_state_from_local(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, rebuilt for its ``load_state_dict``.

    An optimizer shards its state for a parameter in its own way on the mesh of the parameter: a moment like the
    parameter itself, a norm in another way.

    Raises:
        ValueError: If a parameter is no longer sharded, or is sharded over other ranks.
    """
    parameters = dict(enumerate(_parameters(optimizer)))
    return {
        **state,
        "state": {index: _rebuild_all(each, parameters.get(index)) for index, each in state["state"].items()},
    }


def _rebuild_all(value: Any, near: torch.Tensor | None) -> Any:
    return map_nested(value, lambda item: _rebuild(item, near) if _is_part(item) else item)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
