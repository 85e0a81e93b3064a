"""Brings together what ranks have trained apart: local SGD, and DiLoCo's outer optimizer. Knows no Trainer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]
"""Makes an optimizer of parameters."""

_BUCKET_BYTES = 64 << 20
"""What is copied together, to be sent in one message."""


class RanksDiffer(RuntimeError):
    """Ranks hold tensors that do not belong together."""


def average(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Replaces tensors by their means over all ranks, in place; what holds no fractions by that of rank 0.

    Means are taken in float32 at least. All ranks get the same bits. A collective.

    Args:
        tensors: Of the same shapes and types on all ranks, in the same order.
        device: Where ranks send from: an optimizer may keep some of its tensors elsewhere.

    Raises:
        RanksDiffer: On every rank, if they are not alike. Nothing was changed then.
    """
    given = [torch.view_as_real(each) if each.is_complex() else each for each in map(torch.Tensor.detach, tensors)]
    if _has_peers():
        _check_alike(given, device)
        for bucket in _buckets(each for each in given if each.is_floating_point()):
            flat = _flat(bucket, device, torch.promote_types(bucket[0].dtype, torch.float32))
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            _put_back(flat, bucket)
        take_from_rank_0((each for each in given if not each.is_floating_point()), device)


def take_from_rank_0(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Replaces tensors by those of rank 0, in place; arguments as for :func:`average`. A collective."""
    if _has_peers():
        for bucket in _buckets(map(torch.Tensor.detach, tensors)):
            flat = _flat(bucket, device, bucket[0].dtype)
            dist.broadcast(flat, 0)
            _put_back(flat, bucket)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_alike(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """A collective of different sizes would hang, or mix numbers that have nothing to do with each other."""
    mine = zlib.crc32(repr([(tuple(each.shape), each.dtype) for each in tensors]).encode())
    extremes = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negated_smallest = extremes.tolist()
    if largest != -negated_smallest:
        raise RanksDiffer(
            "Ranks that train apart hold different tensors: an optimizer keeps nothing for parameters that have had no "
            "gradient yet on some of them. Have every rank use all parameters before the first exchange."
        )


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in tensors:
        bucket = kinds.setdefault(each.dtype, [])
        if bucket and sum(other.nbytes for other in bucket) + each.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = kinds[each.dtype] = []
        bucket.append(each)
    yield from kinds.values()


def _flat(bucket: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([each.to(device, dtype).reshape(-1) for each in bucket])


def _put_back(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    for each, new in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
        each.copy_(new.view(each.shape))


class OuterStep:
    """The step that an outer optimizer makes from where all ranks were to where they are on average.

    With stochastic gradient descent at a rate of 1 it is the average itself. DiLoCo (https://arxiv.org/abs/2311.08105)
    takes Nesterov momentum: ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.

    Args:
        parameters: The parameters, where all ranks are.
        make: Makes the optimizer.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], make: MakeOptimizer) -> None:
        self._parameters = list(parameters)
        self._anchors = [each.detach().clone().requires_grad_() for each in self._parameters]
        self.optimizer = make(self._anchors)

    @torch.no_grad()
    def take(self) -> None:
        """Makes a step; the parameters hold what all ranks have trained on average."""
        for anchor, mean in zip(self._anchors, self._parameters, strict=True):
            anchor.grad = anchor - mean
        self.optimizer.step()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            anchor.grad = None
            parameter.copy_(anchor)
