"""Numbers that went wrong: found without the host waiting for the device, and undone bit for bit.

Parts of a guard that looks at every step: whether gradients are finite, what a loss must not exceed, and how tensors
get back what a bad batch has taken from them. Torch only, no Trainer.

On an accelerator the host is ahead of the device. Whoever reads a value there (``item()``, ``if tensor``) waits until
everything before it is done, in every step. So verdicts stay tensors on the device, the host reads them later
(:class:`LateReads`), and what a bad step has written is put back where the verdict says so, on the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_resilience.checkpoint.sharded import local
from lightning_resilience.checkpoint.snapshot import optimizer_tensors


def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether no element of any tensor is NaN or infinite; exact for every type, the host waits for nothing.

    Large numbers are finite numbers: nothing is added or squared, which could overflow. Integers are finite. Of a
    sharded tensor (DTensor) the part of this rank counts, of a sparse one what it stores; tensors without content
    (empty, on ``meta``) do not count.

    Returns:
        A boolean without dimensions and without a graph; true if there are no tensors. On the device of the first
        tensor, but not on the CPU if there are tensors elsewhere: a copy from there would have to be waited for.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    home = torch.device("cpu")
    with torch.no_grad():
        for tensor in tensors:
            stored = _stored(tensor)
            if stored.is_meta:
                continue
            if home.type == "cpu":
                home = stored.device
            if stored.numel() and _has_nonfinite(stored.dtype):
                values = _real(stored)
                groups.setdefault((values.device, values.dtype), []).append(values)
        verdicts = [_is_group_finite(group, device).to(home, non_blocking=True) for (device, _), group in groups.items()]
        if not verdicts:
            return torch.ones((), dtype=torch.bool, device=home)
        return torch.stack(verdicts).all()


def _is_group_finite(group: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # Both reductions propagate NaN. Torch's own maximum norm is not vectorised here, and five times slower.
        extremes = [extreme for values in group for extreme in torch.aminmax(_in_memory_order(values))]
    else:
        extremes = list(torch._foreach_norm(group, ord=math.inf))  # the largest magnitude; few kernels for all of them
    return torch.isfinite(torch.stack(extremes)).all()


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that this rank holds of ``tensor``, in a type that torch can calculate with."""
    tensor = local(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()  # also of one whose indices repeat
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1 and _has_nonfinite(tensor.dtype):
        return tensor.to(torch.bfloat16)  # holds every number of the 8-bit types
    return tensor


def _has_nonfinite(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype is not torch.float4_e2m1fn_x2


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Both parts of complex numbers, since the magnitude of a finite one may be infinite."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without the copy that a reduction makes of a transposed or channels-last tensor."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def nonfinite_names(named: Iterable[tuple[str, torch.Tensor]], limit: int = 5) -> list[str]:
    """Which tensors are not finite, for a report; the host waits for the device.

    Args:
        named: Names and tensors, as :func:`all_finite` takes them.
        limit: How many are named.

    Returns:
        Such as ``layer.weight (3 of 1024 elements: nan)``; where there are more than ``limit``, ``and 7 more`` at last.
    """
    names = []
    more = 0
    with torch.no_grad():
        for name, tensor in named:
            if bool(all_finite([tensor])):
                continue
            if len(names) == limit:
                more += 1
                continue
            stored = _stored(tensor)
            nan, inf = torch.isnan(stored), torch.isinf(stored)
            kinds = ", ".join(kind for kind, found in (("nan", nan), ("inf", inf)) if bool(found.any()))
            names.append(f"{name} ({int((nan | inf).sum())} of {stored.numel()} elements: {kinds})")
    return [*names, f"and {more} more"] if more else names


class SpikeReference:
    """What a loss must stay below, learned from earlier ones.

    Without a window this is Megatron-core's rule (``RerunStateMachine.is_unexpectedly_large``): a multiple of the
    largest magnitude among the first losses, which is not learned any further. With a window it is a multiple of the
    running mean of the latest magnitudes, and follows the training; ``torchmetrics.aggregation.RunningMean`` means the
    same, but takes a millisecond where this takes one microsecond.

    Only losses of steps that counted are to be observed: a spike that is observed makes room for the next one.

    If all losses so far were zero, a multiple of them says nothing: there is no threshold before the first other one.

    Args:
        factor: How many times the reference is too much.
        window: Over how many losses the running mean goes; ``None`` for Megatron-core's rule.
        samples: From how many losses Megatron-core's rule learns. Without meaning if there is a window.

    Raises:
        ValueError: If the factor is not a number above 1, the window below 2, or there are no samples.
    """

    def __init__(self, factor: float, window: int | None = None, samples: int = 100) -> None:
        if not (math.isfinite(factor) and factor > 1):
            raise ValueError(f"factor must be a number above 1 and not {factor}")
        if window is not None and window < 2:
            raise ValueError(f"window must be 2 or more losses, or None, and not {window}")
        if samples < 1:
            raise ValueError(f"samples must be 1 or more and not {samples}")
        self._factor = factor
        self._window = window
        self._samples = samples
        self._observed = 0
        self._largest = 0.0
        self._recent: deque[float] = deque(maxlen=window)

    @property
    def threshold(self) -> float:
        """The magnitude from which on a loss is a spike; infinite until enough losses were observed."""
        if self._window is None:
            reference = self._largest if self._observed >= self._samples else 0.0
        else:
            reference = sum(self._recent) / self._window if len(self._recent) == self._window else 0.0
        return self._factor * reference if reference > 0 else math.inf

    def observe(self, loss: float) -> None:
        """Learns from a loss that was accepted. One that is not finite is ignored."""
        if not math.isfinite(loss):
            return
        if self._window is not None:
            self._recent.append(abs(loss))
        elif self._observed < self._samples or self._largest == 0:
            self._observed += 1
            self._largest = max(self._largest, abs(loss))

    def is_spike(self, loss: float) -> bool:
        """Whether ``loss`` is finite and not below the threshold."""
        return math.isfinite(loss) and abs(loss) >= self.threshold

    def state_dict(self) -> dict[str, Any]:
        """What was observed, in plain types."""
        return {"observed": self._observed, "largest": self._largest, "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the same thresholds, bit for bit.

        The state holds losses, not settings, so a new factor applies at once. A smaller window takes the latest of the
        losses and a larger one waits until it is full. One kind of reference cannot go on with the losses of the
        other, and begins anew.
        """
        self._observed = int(state["observed"])
        self._largest = float(state["largest"])
        self._recent.clear()
        if self._window is not None:
            self._recent.extend(float(loss) for loss in state["recent"])


class Undo:
    """Gives tensors back the content that they had.

    What is in them is copied, all of it and every time. Torch counts the writes to a tensor, but not all of them: batch
    normalisation changes its running statistics uncounted, as do fused kernels of other libraries. The copies are made
    on the device of each tensor, into memory that is used again. So this is for small tensors (the buffers of a module)
    or where the price of a copy per step is accepted.

    A tensor is known by its place among the others, so one that was replaced by a new one is put back too. If there are
    more or fewer tensors than there were, each is known by its identity.

    Args:
        tensors: The tensors of this moment, always in the same order; asked whenever something is kept or put back.
            Of a sharded tensor (DTensor) this is about the part of this rank.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._known: list[torch.Tensor] = []
        self._kept: list[torch.Tensor | None] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def keep(self) -> None:
        """Remembers what the tensors hold now, in place of what was remembered before."""
        now = list(self._tensors())
        with torch.no_grad():
            if len(now) != len(self._known) or any(a is not b for a, b in zip(now, self._known, strict=True)):
                self._prepare(now)
            for kept, current in self._groups:
                torch._foreach_copy_(kept, current)
            for place, tensor in enumerate(now):
                if (own := local(tensor)).layout is not torch.strided:
                    self._kept[place] = own.detach().clone()  # as long as what it stores

    def _prepare(self, now: list[torch.Tensor]) -> None:
        """Makes room for the copies, in groups that one kernel copies at once."""
        former = dict(enumerate(self._kept))
        self._known, self._kept = now, []
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for place, tensor in enumerate(now):
            own = _own_memory(tensor)
            if own.layout is not torch.strided or own.is_meta:
                self._kept.append(None)
                continue
            kept = former.get(place)
            if kept is None or not _is_alike(kept, own):
                kept = torch.empty_like(own)
            self._kept.append(kept)
            copies, sources = groups.setdefault((own.device, own.dtype), ([], []))
            copies.append(kept)
            sources.append(own)
        self._groups = list(groups.values())

    def restore(self, where: torch.Tensor | bool = True) -> None:
        """Puts back what was kept, bit for bit. Not between a forward pass and its backward pass.

        What has another shape, type or device now is left as it is, and so is what has no content in this process.

        Args:
            where: Whether to. A boolean tensor without dimensions is not looked at by the host: its device chooses
                between the old and the new content of each tensor. Only for tensors that cannot be chosen there (on
                the CPU while ``where`` is not, or sparse) does the host wait for it. For a verdict on the CPU,
                ``bool(where)`` is the cheaper argument: nothing is done then if it is false.

        Raises:
            ValueError: If ``where`` is a tensor, but not one boolean.
        """
        if isinstance(where, torch.Tensor):
            if where.dtype is not torch.bool or where.numel() != 1:
                raise ValueError(f"where must be one boolean, and not {tuple(where.shape)} of {where.dtype}")
            where = where.detach().reshape(())
        with torch.no_grad():
            for tensor, kept in self._pairs():
                if kept is None or not _is_alike(kept, own := _own_memory(tensor)):
                    continue
                chosen = where
                if isinstance(where, torch.Tensor):
                    if own.layout is torch.strided and (own.device.type != "cpu" or where.device.type == "cpu"):
                        mask = where.to(own.device, non_blocking=True)
                        torch.where(mask, kept, own, out=own)
                        continue
                    chosen = bool(where)
                if chosen:
                    own.copy_(kept)

    def appeared(self) -> list[torch.Tensor]:
        """The tensors that are there now and were not when the others were kept."""
        return [tensor for tensor, kept in self._pairs(missing=True) if kept is None]

    def _pairs(self, missing: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        raise NotImplementedError
