"""Finds non-finite numbers and spikes without making the host wait for the device, and undoes writes bit for bit.

These are the parts of a guard that checks every step: whether gradients are finite, which threshold a loss must not
reach, and how tensors get back their content from before a bad batch. Torch only, no Trainer.

On an accelerator the host is ahead of the device. Code that reads a value there (``item()``, ``if tensor``) waits until
everything before it is done, in every step. So verdicts stay tensors on the device, and the host reads them later
(:class:`LateReads`). Where the verdict is bad, the device itself puts back what a bad step has overwritten.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_resilience._torch import local

_group_by_kind: Callable[[Any], Any] | None
try:
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as _group_by_kind
except ImportError:  # then each tensor is checked on its own
    _group_by_kind = None

_STRIDED = torch.strided  # an attribute of a module costs more

_LAYOUT = operator.attrgetter("layout")
_TYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}

_LARGE = 1 << 16
"""A buffer with more elements than this is copied in every step only if it changes."""


def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether no element of any tensor is NaN or infinite. Exact for every type; the host waits for nothing.

    Large numbers count as finite: nothing is added or squared, which could overflow. Integers are finite. Of a sharded
    tensor (DTensor) this rank's part counts, of a sparse tensor its stored values; tensors without content (empty, on
    ``meta``) do not count.

    Returns:
        A boolean without dimensions and without a graph; true if there are no tensors. It is on the device of the first
        tensor that is not on the CPU, if there is one: the host would have to wait for a copy to the CPU.
    """
    tensors = list(tensors)
    with torch.no_grad():
        groups = _groups_of_dense(tensors) or _groups_of_any(tensors)
        home = next((device for device, _ in groups if device.type != "cpu"), torch.device("cpu"))
        verdicts = [
            _is_group_finite(group, device).to(home, non_blocking=True)
            for (device, dtype), group in groups.items()
            if group and _has_nonfinite(dtype)
        ]
        if not verdicts:
            return torch.ones((), dtype=torch.bool, device=home)
        return all_of(verdicts)


_Groups = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]


def _groups_of_dense(tensors: list[torch.Tensor]) -> _Groups | None:
    """The tensors by device and type, without a check of each; ``None`` if not all are dense, as most gradients are."""
    if _group_by_kind is not None and _are_dense(tensors) and all(map(torch.Tensor.numel, tensors)):
        found = _group_by_kind([tensors])
        devices = {device for device, _ in found}
        if len(devices) == 1 and torch.device("meta") not in devices and {dtype for _, dtype in found} <= _TYPES:
            return {kind: group for kind, ((group,), _) in found.items()}
    return None


def _are_dense(tensors: list[torch.Tensor]) -> bool:
    return {*map(type, tensors)} == {torch.Tensor} and {*map(_LAYOUT, tensors)} == {_STRIDED}


def _groups_of_any(tensors: list[torch.Tensor]) -> _Groups:
    """This rank's part of the tensors, by device and type; tensors without content are left out."""
    groups: _Groups = {}
    for tensor in tensors:
        stored = stored_numbers(tensor)
        if stored.is_meta:
            continue
        group = groups.setdefault((stored.device, stored.dtype), [])
        if stored.numel():
            group.append(_real(stored))
    return groups


def all_of(verdicts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether all of these booleans (at least one) are true, with as few kernels as possible."""
    if len(verdicts) <= 2:
        return functools.reduce(torch.logical_and, verdicts)
    return torch.stack(tuple(verdicts)).all()


def are_finite(tensors: list[torch.Tensor]) -> bool:
    """Like :func:`all_finite`, where the host may wait. Several times faster for dense tensors on the CPU.

    One call of the operation with which gradient scalers look for infinities checks all dense tensors. It is exact, and
    with a scale of 1 it writes back the bits that it has read. It raises for tensors that it does not support.
    """
    if {*map(type, tensors)} == {torch.Tensor}:  # a subclass may reduce over ranks
        found = torch.zeros(1, device="cpu")
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, _ONE)
        except RuntimeError:
            pass
        else:
            return not found.item()
    return bool(all_finite(tensors))


_ONE = torch.ones(1, device="cpu")


def _is_group_finite(group: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        # Both reductions propagate NaN. Torch's own maximum norm is not vectorized here, and five times slower.
        extremes = [extreme for values in group for extreme in torch.aminmax(_in_memory_order(values))]
        return torch.isfinite(torch.stack(extremes)).all()
    magnitudes = list(torch._foreach_norm(group, ord=math.inf))  # few kernels for all tensors
    return (torch.stack(magnitudes) < math.inf).all()  # false for NaN; isfinite() takes four kernels


def stored_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of ``tensor`` that this rank holds, in a type with which torch can calculate."""
    tensor = local(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()  # works also if indices repeat
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1 and _has_nonfinite(tensor.dtype):
        return tensor.to(torch.bfloat16)  # holds every number of the 8-bit types
    return tensor


def _has_nonfinite(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype is not torch.float4_e2m1fn_x2


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Splits complex numbers into their parts, since the magnitude of a finite complex number may be infinite."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without the copy that a reduction makes of a transposed or channels-last tensor."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def nonfinite_names(named: Iterable[tuple[str, torch.Tensor]], limit: int = 5) -> list[str]:
    """Names the tensors that are not finite, for a report; the host waits for the device.

    Args:
        named: Names and tensors, as :func:`all_finite` takes them.
        limit: How many tensors are named at most.

    Returns:
        Such as ``layer.weight (3 of 1024 elements: nan)``; if there are more than ``limit``, ``and 7 more`` at the end.
    """
    names: list[str] = []
    more = 0
    with torch.no_grad():
        for name, tensor in named:
            if bool(all_finite([tensor])):
                continue
            if len(names) == limit:
                more += 1
                continue
            stored = stored_numbers(tensor)
            nan, inf = torch.isnan(stored), torch.isinf(stored)
            kinds = ", ".join(kind for kind, found in (("nan", nan), ("inf", inf)) if bool(found.any()))
            names.append(f"{name} ({int((nan | inf).sum())} of {stored.numel()} elements: {kinds})")
    return [*names, f"and {more} more"] if more else names


class SpikeReference:
    """The threshold below which a loss must stay, learned from earlier losses.

    Without a window this is Megatron-core's rule (``RerunStateMachine.is_unexpectedly_large``): a multiple of the
    largest magnitude among the first losses, which stays fixed after them. With a window it is a multiple of the
    running mean of the latest magnitudes, and follows the training; ``torchmetrics.aggregation.RunningMean`` computes
    the same, but takes a millisecond where this class takes one microsecond.

    Only losses of accepted steps must be observed: an observed spike raises the threshold for the next one.

    If all losses so far were zero, their multiple means nothing: there is no threshold before the first nonzero loss.

    Args:
        factor: A loss of this many times the reference is a spike.
        window: The number of losses in the running mean; ``None`` for Megatron-core's rule.
        samples: The number of losses from which Megatron-core's rule learns. Without effect if there is a window.
    """

    def __init__(self, factor: float, window: int | None = None, samples: int = 100) -> None:
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
        """Learns from an accepted loss. A loss that is not finite is ignored."""
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
        """The observed losses, as plain types."""
        return {"observed": self._observed, "largest": self._largest, "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the same thresholds, bit for bit.

        The state holds losses, not settings, so a new factor applies at once. A smaller window takes the latest of the
        losses, and a larger window waits until it is full. One kind of reference cannot continue with the losses of the
        other kind, and begins anew.
        """
        self._observed = int(state["observed"])
        self._largest = float(state["largest"])
        self._recent.clear()
        if self._window is not None:
            self._recent.extend(float(loss) for loss in state["recent"])


class Undo:
    """Keeps the content of tensors, and puts it back.

    The whole content is copied every time. Torch's counter of writes to a tensor misses some of them: batch
    normalization changes its running mean and variance uncounted, and so do fused kernels of other libraries. A copy is
    on the device of its tensor, in memory that is reused: one piece for all tensors of a device and a type, so that a
    few kernels are enough for any number of tensors. So this class is for small tensors, such as the buffers of a
    module.

    Writes that put content back are not counted either: a graph made before them may be used after them, as several
    optimizers do in one step (a GAN's generator and discriminator).

    A tensor is identified by its place in the list, so the content of a tensor is put back into a new tensor that has
    replaced it. If the number of tensors has changed, each is identified as an object.

    Args:
        tensors: Returns the tensors of this moment, always in the same order; called whenever something is kept or put
            back. Of a sharded tensor (DTensor) only this rank's part is kept.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._given: list[torch.Tensor] = []
        self._marks: list[Any] | None = None
        self._here: list[torch.Tensor] = []
        self._prepared_for: list[torch.Tensor] | None = None
        self._known: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._sparse: list[int] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._groups: list[_Group] = []

    def keep(self) -> None:
        """Keeps the present content of the tensors, and drops the content kept before."""
        now = self._now()
        if not now and not self._known:
            return
        with torch.no_grad():
            if not self._is_prepared(now):
                self._prepare(now)
            self._known = now
            for group in self._groups:
                torch._foreach_copy_(group.kept, group.of(now))
            for place in self._sparse:
                self._kept[place] = now[place].detach().clone()  # its size depends on its content

    def restore(self, where: torch.Tensor | bool = True) -> None:
        """Puts back the kept content, bit for bit. Do not call it between a forward pass and its backward pass.

        Args:
            where: Whether to put it back. The host does not read a boolean tensor of one element: the device chooses
                between the old and the new content of each tensor. The host waits for ``where`` only for a tensor on
                the CPU while ``where`` is on a device, and for a sparse tensor. If ``where`` is on the CPU anyway,
                ``bool(where)`` is the cheaper argument, since nothing is done if it is false.
        """
        if where is False:
            return
        now, chosen = self._now(), set[int]()
        if isinstance(where, torch.Tensor):
            where = where.reshape(())
            with torch.no_grad():
                for group in self._groups if self._is_prepared(now) else ():
                    if _can_choose(group.device, where):
                        group.choose(now, where.to(group.device, non_blocking=True))
                        chosen.update(group.places)
            if len(chosen) == len(now):
                return
        with torch.inference_mode():  # a buffer that a validation has replaced can be written only in this mode
            for tensor, kept in self._pairs(now, chosen):
                is_strided = tensor.layout is torch.strided
                if isinstance(where, torch.Tensor) and is_strided and _can_choose(tensor.device, where):
                    choice = where.to(tensor.device, non_blocking=True)
                    torch._foreach_copy_([tensor.data], [torch.where(choice, kept, tensor)])
                elif where and is_strided:
                    torch._foreach_copy_([tensor.data], [kept])
                elif where:
                    tensor.copy_(kept)

    def invalidated(self) -> torch.Tensor:
        """Whether a number that was finite when kept is no longer finite: one boolean, which the host does not read.

        Considers only tensors that still have the shapes, types, devices and layouts of the kept ones.
        """
        now = self._now()
        verdicts: list[torch.Tensor] = []
        with torch.no_grad():
            if now and self._is_prepared(now):
                verdicts = [group.invalidated(now) for group in self._groups if _has_nonfinite(group.dtype)]
            if not verdicts:
                return torch.zeros((), dtype=torch.bool, device="cpu")
            home = next((each.device for each in verdicts if each.device.type != "cpu"), verdicts[0].device)
            return torch.stack([each.to(home, non_blocking=True) for each in verdicts]).any()

    def _now(self) -> list[torch.Tensor]:
        """This rank's part of the tensors. In nearly every step they are unchanged, and the same list is returned."""
        given = list(self._tensors())
        are_same = len(given) == len(self._given) and all(map(operator.is_, given, self._given))
        if are_same and self._marks is not None and self._marks == _marks(given):
            return self._here
        self._given, self._marks = given, _marks(given) if _are_dense(given) else None
        here = [own for tensor in given if not (own := local(tensor)).is_meta]
        self._here = [
            own if own.layout is not _STRIDED or own.is_contiguous() else _without_repeats(own) for own in here
        ]
        return self._here

    def _is_prepared(self, now: list[torch.Tensor]) -> bool:
        # Does not compare identities: ``Module.to`` gives the same tensor another type, device or memory.
        if now is not self._prepared_for and len(now) == len(self._kinds) and [*map(_kind, now)] == self._kinds:
            self._prepared_for = now
        return now is self._prepared_for

    def _prepare(self, now: list[torch.Tensor]) -> None:
        """Allocates memory for the copies, in groups for which one kernel is enough."""
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(now):
            if tensor.layout is torch.strided:
                places.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._prepared_for, self._kinds = now, [*map(_kind, now)]
        self._kept = list(now)
        self._sparse = [place for place, tensor in enumerate(now) if tensor.layout is not _STRIDED]
        self._groups = [_Group(mine, [now[place] for place in mine]) for mine in places.values()]
        for group in self._groups:
            for place, kept in zip(group.places, group.kept, strict=True):
                self._kept[place] = kept

    def _pairs(self, now: list[torch.Tensor], without: Collection[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The present tensors, each with its kept content; without tensors for which no matching content was kept."""
        by_identity = {id(tensor): kept for tensor, kept in zip(self._known, self._kept, strict=True)}
        for place, tensor in enumerate(now):
            kept = self._kept[place] if len(now) == len(self._kept) else by_identity.get(id(tensor))
            if kept is not None and place not in without and _kind(kept) == _kind(tensor):
                yield tensor, kept


class _Group:
    """The kept content of the tensors of one device and type, side by side in memory.

    Attributes:
        places: The places of these tensors among all tensors.
        kept: The kept content of each tensor; views of one piece of memory.
    """

    def __init__(self, places: list[int], tensors: list[torch.Tensor]) -> None:
        self.places = places
        self.device, self.dtype = tensors[0].device, tensors[0].dtype
        self._shapes = [tensor.shape for tensor in tensors]
        self._all_kept, self.kept = self._room()
        self._all_now: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def of(self, now: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of this group, out of all tensors."""
        return [now[place] for place in self.places]

    def choose(self, now: list[torch.Tensor], bad: torch.Tensor) -> None:
        """Puts the kept content back if ``bad`` is true: three kernels, and a few more for hundreds of tensors."""
        chosen = self._gather(now)
        torch.where(bad, self._all_kept, chosen, out=chosen)
        torch._foreach_copy_([tensor.data for tensor in self.of(now)], self._views)

    def invalidated(self, now: list[torch.Tensor]) -> torch.Tensor:
        """Whether a number that was finite is no longer finite."""
        values, kept = self._gather(now), self._all_kept
        if self.dtype.itemsize == 1:
            values, kept = values.to(torch.bfloat16), kept.to(torch.bfloat16)
        return (torch.isfinite(kept) & ~torch.isfinite(values)).any()

    def _gather(self, now: list[torch.Tensor]) -> torch.Tensor:
        if self._all_now is None:
            self._all_now, self._views = self._room()
        torch._foreach_copy_(self._views, self.of(now))
        return self._all_now

    def _room(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        room = torch.empty(sum(map(math.prod, self._shapes)), dtype=self.dtype, device=self.device)
        pieces = torch.split(room, [math.prod(shape) for shape in self._shapes])
        return room, [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def _can_choose(device: torch.device, where: torch.Tensor) -> bool:
    """Whether ``device`` can choose the content of its tensors by ``where``; otherwise the host must read ``where``."""
    return device.type != "cpu" or where.device.type == "cpu"


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Undoes the expansion of a tensor: the elements of an expanded tensor cannot be written."""
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        for axis, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if step == 0 and length > 1:
                tensor = tensor.narrow(axis, 0, 1)
    return tensor


_kind = operator.attrgetter("shape", "dtype", "device", "layout")
_FORM = operator.attrgetter("shape", "dtype")


def _marks(tensors: list[torch.Tensor]) -> list[Any]:
    """Marks that differ if a tensor object has got other content by its ``data``, or by ``resize_``."""
    return [*map(_FORM, tensors), *map(torch.Tensor.data_ptr, tensors)]


class ChangingBuffers:
    """The buffers of a module that a forward pass may change, for :class:`Undo`.

    Small buffers are always included. Large buffers, such as an attention mask, are all included in the first windows;
    later only those whose version or object was seen to change. A large buffer that begins to change later is not
    included the first time.

    Args:
        module: The module; its submodules must already have their buffers. A buffer may be replaced later.
    """

    _FIRST = 3

    def __init__(self, module: torch.nn.Module) -> None:
        places = [(each._buffers, name) for each in module.modules() for name in each._buffers]
        self._owners, self._names = [owner for owner, _ in places], [name for _, name in places]
        self._now: list[torch.Tensor | None] = []
        self._large: list[int] = []
        self._found: list[torch.Tensor] | None = None
        self._seen: dict[int, tuple[int, int]] = {}
        self._changing: set[int] = set()
        self._first = self._FIRST

    @property
    def exist(self) -> bool:
        """Whether the module has any buffers."""
        return bool(self._names)

    def look(self) -> None:
        """Looks for changed buffers; call it once for every window, before the buffers are copied."""
        self._first -= 1
        self._fetch()
        if self._large:
            self._found = None
        for place in self._large:
            buffer = self._now[place]
            now = id(buffer), buffer._version  # type: ignore[union-attr]
            if self._seen.setdefault(place, now) != now:
                self._changing.add(place)

    def __call__(self) -> list[torch.Tensor]:
        """The buffers that may change, in the order of the module."""
        self._fetch()
        if self._found is None:
            left_out = {*self._large} - self._changing if self._first < 0 else set()
            places = enumerate(self._now)
            self._found = [buffer for place, buffer in places if buffer is not None and place not in left_out]
        return self._found

    def _fetch(self) -> None:
        now = list(map(dict.get, self._owners, self._names))
        if len(now) != len(self._now) or not all(map(operator.is_, now, self._now)):
            self._now, self._found = now, None
            self._large = [place for place, buffer in enumerate(now) if buffer is not None and buffer.numel() > _LARGE]


class LateReads:
    """Reads numbers from a device after they have arrived on the host, so that the host does not wait for them.

    An accelerator copies a number into host memory after its earlier work is done, so the number arrives some steps
    later. A number on the CPU, or on a device without streams (``mps``), is read at once.

    Args:
        limit: How many numbers may be on their way. With one more, the host waits for the oldest: a host that is so
            far ahead would soon wait anyway.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._there: list[tuple[Any, float]] = []
        self._travelling: deque[tuple[Any, torch.Tensor, Any]] = deque()

    def put(self, tag: Any, tensor: torch.Tensor) -> None:
        """Begins to read the number that ``tensor`` holds at this point of the device's work.

        Args:
            tag: Returned with the number.
            tensor: One real number, of any type; later writes to it do not matter.
        """
        number, arrival = _send(local(tensor.detach()))
        self._travelling.append((tag, number, arrival))
        while len(self._travelling) > self._limit:
            self._arrive(wait=True)

    def ready(self) -> list[tuple[Any, float]]:
        """The numbers that have arrived since the last call, in the order in which they were put; without waiting."""
        while self._travelling and self._arrive(wait=False):
            pass
        there, self._there = self._there, []
        return there

    def drain(self) -> list[tuple[Any, float]]:
        """Waits for all numbers that are on their way, and returns what :meth:`ready` would return then."""
        while self._travelling:
            self._arrive(wait=True)
        return self.ready()

    def _arrive(self, wait: bool) -> bool:
        tag, number, arrival = self._travelling[0]
        if arrival is not None:
            if wait:
                arrival.synchronize()
            elif not arrival.query():
                return False
        self._travelling.popleft()
        self._there.append((tag, float(number)))
        return True


def _send(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copies one number into host memory; returns it with the event of its arrival, or ``None`` if it has arrived."""
    device = tensor.device
    streams: Any = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(streams, "current_stream"):
        return tensor.to("cpu", copy=True), None
    number = torch.empty_like(tensor, device="cpu", pin_memory=True)
    number.copy_(tensor, non_blocking=True)
    return number, streams.current_stream(device).record_event()
