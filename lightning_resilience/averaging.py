"""Averages what ranks have trained apart: local SGD, and DiLoCo's outer optimizer. Uses no Trainer."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_resilience.checkpoint.digest import digest_of
from lightning_resilience.checkpoint.tensor_bytes import flat, is_dense

MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]
"""A function that creates an optimizer for parameters."""

_BUCKET_BYTES = 64 << 20
"""How many bytes are copied together to be sent in one message."""

_LONGEST_POLL_S = 0.01

_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


class RanksDiffer(RuntimeError):
    """The ranks hold tensors that do not match."""


def meet(place: tuple[int, int], named: Mapping[str, Any], device: torch.device, waiting: Callable[[], None]) -> None:
    """Waits until all ranks have come, which may be long after this rank, and checks that they hold matching tensors.

    A collective of different sizes would hang, or mix unrelated numbers.

    Args:
        place: How far this rank has come: its batches and steps.
        named: The values that it is about to exchange, by name; of tensors the shape, strides and type are compared.
        device: The device from which ranks send.
        waiting: Called meanwhile, at least every 10 ms.

    Raises:
        RanksDiffer: On every rank, if the ranks are not at the same place, or do not hold matching values.
        RuntimeError: If some rank has not come within the process group's timeout.
    """
    if not _has_peers():
        return
    kinds = [(name, _kind(each)) for name, each in named.items()]
    mine = [*place, zlib.crc32(repr(kinds).encode())]
    extremes = torch.tensor([*mine, *(-each for each in mine)], device=device)
    work: Any = dist.all_reduce(extremes, dist.ReduceOp.MAX, async_op=True)
    wait_s = 0.0001
    while not work.is_completed():
        waiting()
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            "Not all ranks have reached the exchange: one has failed, or it is later than the process group's timeout "
            f"(30 minutes; DDPStrategy(timeout=...) allows more). {error}"
        ) from error
    largest, smallest = extremes[:3].tolist(), (-extremes[3:]).tolist()
    if largest[:2] != smallest[:2]:
        raise RanksDiffer(
            "Ranks that train independently reached the exchange at different positions: one rank has begun "
            f"{smallest[0]} batches and made {smallest[1]} steps, another rank {largest[0]} and {largest[1]}. "
            "All ranks need epochs of the same length."
        )
    if largest != smallest:
        raise RanksDiffer(
            "Ranks that train independently hold different states: on some ranks, an optimizer has no state for "
            "parameters without a gradient so far, or their learning rates differ. Have every rank use all parameters "
            "before the first exchange, and log the metrics that a scheduler monitors with sync_dist=True."
        )


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def average(tensors: Iterable[torch.Tensor], device: torch.device, advanced: Callable[[], None] = _NOTHING) -> None:
    """Replaces tensors by their means over all ranks, in place; integer and boolean tensors by rank 0's tensors.

    Means are computed at least in float32, and for single numbers in float64. All ranks get the same bits. This is a
    collective of ranks that have called :func:`meet`.

    Args:
        tensors: The tensors, of the same shapes and types on all ranks, in the same order.
        device: The device from which ranks send: an optimizer may keep some of its tensors elsewhere.
        advanced: Called after each message: there may be many, over a slow link.
    """
    given = [torch.view_as_real(each) if each.is_complex() else each for each in map(torch.Tensor.detach, tensors)]
    if _has_peers():
        for pieces in _buckets(each for each in given if each.is_floating_point()):
            is_number = pieces[0].numel() == 1 and device.type != "mps"  # step counts: exact sums
            least = torch.float64 if is_number else torch.float32
            together = _together(pieces, device, torch.promote_types(pieces[0].dtype, least))
            dist.all_reduce(together)
            together /= dist.get_world_size()
            _put_back(together, pieces)
            advanced()
        take_from_rank_0((each for each in given if not each.is_floating_point()), device, advanced)


def average_numbers(places: Sequence[tuple[Any, Any]], device: torch.device) -> None:
    """Averages numbers in dictionaries and lists. Whole numbers stay whole; numbers equal on all ranks stay unchanged.

    Args:
        places: The containers, and the keys or indices in them.
        device: The device from which ranks send.
    """
    if _has_peers() and places:
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.tensor([float(container[key]) for container, key in places], dtype=wide, device=device)
        extremes = torch.stack([numbers, -numbers])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        dist.all_reduce(numbers)
        differs = (extremes[0] != -extremes[1]).tolist()
        means = (numbers / dist.get_world_size()).tolist()
        for (container, key), mean, changes in zip(places, means, differs, strict=True):
            if changes:
                container[key] = round(mean) if isinstance(container[key], int) else mean


def take_from_rank_0(
    tensors: Iterable[torch.Tensor], device: torch.device, advanced: Callable[[], None] = _NOTHING
) -> None:
    """Replaces tensors by rank 0's tensors, in place; arguments as for :func:`average`. A collective."""
    if _has_peers():
        for pieces in _buckets(map(torch.Tensor.detach, tensors)):
            together = _together(pieces, device, pieces[0].dtype)
            dist.broadcast(together, 0)
            _put_back(together, pieces)
            advanced()


def differing(
    tensors: Sequence[torch.Tensor], device: torch.device, advanced: Callable[[], None] = _NOTHING
) -> list[torch.Tensor]:
    """The tensors that are not the same on all ranks, bit for bit; arguments as for :func:`average`. A collective."""
    if not _has_peers() or not tensors:
        return []
    numbers = []
    for each in tensors:
        numbers.append(int(digest_of([each])[:15], 16))
        advanced()
    digests = torch.tensor(numbers, device=device)
    extremes = torch.stack([digests, -digests])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    differs = (extremes[0] != -extremes[1]).tolist()
    return [each for each, its in zip(tensors, differs, strict=True) if its]


def kept_by(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any, Any]]:
    """The places of optimizer state: a name, the container, and the key or index in it; in the same order on all ranks.

    ``optimizer.state`` itself is in the order in which parameters got their first gradients, which may differ between
    ranks. Some optimizers keep learned values in their groups, as Prodigy does with its step size. Learning rates are
    left out, because they belong to schedules.
    """
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for setting in sorted(group.keys() - {"params", "lr"}):
                yield from _places(f"{number}.group {index}.{setting}", group, setting)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for index, parameter in enumerate(parameters):
            if parameter in optimizer.state:
                yield from _places(f"{number}.{index}", optimizer.state, parameter)
        known = set(parameters)
        for key in sorted((key for key in optimizer.state if key not in known), key=str):
            yield from _places(f"{number}.{key}", optimizer.state, key)


def _places(name: str, container: Any, key: Any) -> Iterator[tuple[str, Any, Any]]:
    value = container[key]
    if isinstance(value, Mapping):
        for each in sorted(value, key=str):
            yield from _places(f"{name}.{each}", value, each)
    elif isinstance(value, (list, tuple)):
        for index in range(len(value)):
            yield from _places(f"{name}.{index}", value, index)
    else:
        yield name, container, key


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups tensors, and parts of large tensors, that are sent together."""
    begun: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], int]] = {}
    for each in tensors:
        kind = each.dtype, each.numel() == 1
        is_large = each.nbytes > _BUCKET_BYTES and is_dense(each.shape, each.stride())
        for piece in torch.split(flat(each), _BUCKET_BYTES // each.itemsize) if is_large else (each,):
            bucket, size = begun.get(kind, ([], 0))
            if bucket and size + piece.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            begun[kind] = bucket, size + piece.nbytes
    yield from (bucket for bucket, _ in begun.values())


def _together(pieces: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([each.to(device, dtype).reshape(-1) for each in pieces])


def _put_back(together: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for each, new in zip(pieces, torch.split(together, [each.numel() for each in pieces]), strict=True):
        each.copy_(new.view(each.shape))


class OuterStep:
    """The step of an outer optimizer, from the ranks' last common parameters towards their present average.

    With stochastic gradient descent at a rate of 1 the result is the average. DiLoCo (https://arxiv.org/abs/2311.08105)
    uses Nesterov momentum: ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.

    Args:
        parameters: The parameters, by name.
        make: Creates the optimizer.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], make: MakeOptimizer) -> None:
        self._parameters = dict(parameters)
        self._anchors = [each.detach().clone().requires_grad_() for each in self._parameters.values()]
        self._make = make
        self._optimizer = make(self._anchors)

    def extend(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Adds parameters that were not trained before."""
        known = {id(each) for each in self._parameters.values()}  # by identity: pruning renames a parameter
        if new := {name: each for name, each in parameters.items() if id(each) not in known}:
            state = self._optimizer.state
            self._parameters |= new
            self._anchors += [each.detach().clone().requires_grad_() for each in new.values()]
            self._optimizer = self._make(self._anchors)
            self._optimizer.state.update(state)

    @torch.no_grad()
    def begin(self) -> None:
        """Keeps the present parameters, which are the same on all ranks, before the ranks train apart."""
        for anchor, parameter in zip(self._anchors, self._parameters.values(), strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def take(self) -> None:
        """Makes a step; the parameters must hold the average over all ranks.

        An unchanged parameter was frozen, and gets no gradient: with one, a momentum would move it.
        """
        for anchor, mean in zip(self._anchors, self._parameters.values(), strict=True):
            anchor.grad = None if torch.equal(anchor, mean) else anchor - mean
        self._optimizer.step()
        for anchor, parameter in zip(self._anchors, self._parameters.values(), strict=True):
            anchor.grad = None
            parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the names of its parameters."""
        return {"parameters": list(self._parameters), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the optimizer's state."""
        self._optimizer.load_state_dict(state["optimizer"])
