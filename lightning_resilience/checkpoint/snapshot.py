"""Copies a state of the training while the training continues: torch only, no Trainer.

Most of a state is parameters and optimizer state, and neither forward nor backward changes them. So another thread
copies them while the next batch runs, and the optimizer's step waits for the copy to end (the *fence*). Everything else
(random states, counters, buffers such as those of batch normalization) is copied at once, at the boundary.

Whether a tensor is unchanged is checked, not assumed: torch counts the writes to every tensor. A tensor written between
boundary and fence invalidates its snapshot, which is dropped; from then on this tensor is copied at once.

torch does not count writes through ``tensor.data``, and users' hooks do write like that: clipped weights, the average
of a teacher. So the values of parameters at the boundary are compared with the copy. Every value is compared from time
to time: at first, then as often as takes a thousandth of the time, and always once such a write was seen. Otherwise a
sample is compared. A write through ``.data`` before the optimizer's step can slip through if such writes begin in the
middle of a fit and change few elements.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_resilience._torch import before_update, local
from lightning_resilience.checkpoint import devices
from lightning_resilience.checkpoint.digest import Digest
from lightning_resilience.checkpoint.safe_serialization import nested, pack
from lightning_resilience.checkpoint.tensor_bytes import as_words, flat, is_dense

_LOOKED_AT_ALL = 1e-3
"""The share of the time that comparing every value of the parameters may take."""

_SAMPLE = 64
"""Number of elements of a parameter that are compared otherwise."""

ON_DEVICE_BYTES = 64 << 20
"""Most device memory for copies of tensors that are not stable: the training may need the rest."""

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""How long the training waits for a snapshot to be copied."""


def wait_with_heartbeat(wait: Callable[[float], bool], timeout_s: float, heartbeat: Callable[[], None]) -> bool:
    """Waits in pieces of a second, with a heartbeat, so that a bounded wait is not taken for a hang.

    Args:
        wait: Waits for at most the given seconds; returns whether the awaited event has come.
        timeout_s: Limit of the whole wait in seconds.
        heartbeat: Called once a second; reports that this is no hang.

    Returns:
        Whether the awaited event has come.
    """
    deadline = time.monotonic() + timeout_s
    while not (come := wait(max(0.0, min(1.0, deadline - time.monotonic())))) and time.monotonic() < deadline:
        heartbeat()
    return come


def address(tensor: torch.Tensor) -> int:
    """The memory address of the storage of ``tensor``; tensors with the same address share it. 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or a subclass that keeps its content in other tensors
        return 0


class Snapshots:
    """Takes snapshots, one at a time, into memory that it reuses."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._volatile: set[tuple[Any, ...]] = set()
        self._written: set[tuple[Any, ...]] = set()
        self._hidden_writes = False
        self._look_at_all = 0.0  # not before this time

    def take(self, state: Any, stable: Iterable[torch.Tensor]) -> Snapshot:
        """Begins a snapshot; called by the training thread at a boundary.

        Args:
            state: Nested containers of tensors and plain values, as :func:`~.safe_serialization.pack` takes them.
            stable: The tensors that do not change before the fence.
        """
        structure, tensors, left_out = pack(state)
        watched: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by address: several tensors may share one
        known: dict[int, int] = {}  # address by id of each stable tensor: to ask for one takes a microsecond
        parameters = set()
        for tensor in stable:
            own = local(tensor)
            if tensor.is_inference() or (place := address(own)) == 0:
                continue
            known[id(tensor)] = place
            seen = watched.setdefault(place, [])
            seen.append((tensor, tensor._version))
            if own is not tensor:  # writes may be counted for a DTensor and not for its local part: watch both
                seen.append((own, own._version))
            if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
                parameters.add(place)
        copier = _Copier(tensors, self._kept)
        self._kept = copier.kept
        sources: list[torch.Tensor] = []
        late: dict[int, torch.Tensor] = {}
        places = set()
        addresses = []
        for index, tensor in enumerate(tensors):
            place = known.get(id(tensor)) or address(tensor)
            addresses.append(place)
            if tensor.is_meta:
                sources.append(tensor)
            elif place not in watched or self._is_volatile(index, tensor):
                sources.append(copier.copy(index, tensor))
            else:
                # If code replaces the data of a parameter, this still refers to the earlier data.
                source = tensor if type(tensor) is torch.Tensor else tensor.detach()
                sources.append(source)
                places.add(place)
                if id(tensor) not in known:
                    watched[place].append((source, source._version))
                if place in parameters:
                    late[index] = source
        watched = {place: watched[place] for place in places}
        look = self._look(late)
        return Snapshot(self, structure, sources, addresses, watched, left_out, look, copier)

    def _is_volatile(self, index: int, tensor: torch.Tensor) -> bool:
        if self._volatile and _kind(index, tensor) in self._volatile:
            return True
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():  # writes are not counted, or bits not visible
            return True
        return not (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()))

    def _look(self, late: Mapping[int, torch.Tensor]) -> _Look:
        started = time.monotonic()
        at_all = self._hidden_writes or started >= self._look_at_all
        look = _Look(late, at_all)
        if at_all:
            self._look_at_all = time.monotonic() + (time.monotonic() - started) / _LOOKED_AT_ALL
        return look

    @property
    def sees_writes(self) -> bool:
        """Whether any tensor has changed between a boundary and its fence."""
        return bool(self._volatile)

    def look_at_all(self) -> None:
        """Makes the next snapshot compare every value of the parameters, even if the last full comparison is recent."""
        self._look_at_all = 0.0

    def note_volatile(self, changed: Mapping[int, torch.Tensor], hidden: bool) -> None:
        """From now on, copies tensors at once that have changed between a boundary and its fence.

        Args:
            changed: The tensors, by index in :attr:`Snapshot.tensors`.
            hidden: Whether torch has not counted the write.
        """
        kinds = {_kind(index, tensor) for index, tensor in changed.items()}
        self._volatile |= kinds
        self._hidden_writes |= hidden
        if not hidden:
            self._written |= kinds

    def is_written(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether the training itself writes this tensor between a boundary and its fence, perhaps on this rank only.

        A change that torch has not counted does not qualify: it may be a hardware error.
        """
        return bool(self._written) and _kind(index, tensor) in self._written


_Kept = tuple[torch.Tensor, devices.Registration | None]


class _Copier:
    """Copies tensors that may change before the fence at once, without waiting for a device, into reused memory.

    A copy stays on the device of its tensor while the copies there fit into a memory budget. Tensors that exceed the
    budget, or find no free memory, are copied to the host; the device does nothing else during that copy.

    Args:
        tensors: All tensors of the state.
        kept: Destinations of the previous copies, by index.

    Attributes:
        devices: All accelerators that the state is on.
        kept: Destinations of the present copies, by index.
        through_host: By index, the bytes of each tensor that was copied to the host.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], kept: Mapping[int, _Kept]) -> None:
        self.devices = list(dict.fromkeys(filter(None, map(devices.accelerator, tensors))))
        self.kept: dict[int, _Kept] = {}
        self.through_host: dict[int, int] = {}
        self._before = kept
        self._left = dict.fromkeys(self.devices, ON_DEVICE_BYTES)
        self._awaited = not self.devices

    @torch.no_grad()
    def copy(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``, which has this index."""
        device = devices.accelerator(tensor)
        if device is not None:
            if tensor.nbytes > self._left[device]:
                return self._to_host(index, tensor.detach(), device)
            self._left[device] -= tensor.nbytes
        elif not self._awaited and tensor.is_pinned():  # rare in a state; a device may still be writing into it
            for each in self.devices:
                devices.mark(each).synchronize()
            self._awaited = True
        kept, registration = self._before.get(index, (None, None))
        if kept is None or not _is_alike(kept, tensor, tensor.device):
            try:
                kept, registration = tensor.detach().clone(), None
            except torch.OutOfMemoryError:
                if device is None:
                    raise
                return self._to_host(index, tensor.detach(), device)
        else:
            kept.copy_(tensor)
        self.kept[index] = kept, registration
        return kept

    def _to_host(self, index: int, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.through_host[index] = tensor.nbytes
        if (
            tensor.layout != torch.strided
            or not is_dense(tensor.shape, tensor.stride())
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return tensor.to("cpu", copy=True)  # needs more than one copy, so the host waits for it
        kept, registration = self._before.get(index, (None, None))
        if kept is None or not _is_alike(kept, tensor, torch.device("cpu")):
            kept = torch.empty_like(tensor, device="cpu")
            registration = devices.register(kept, device)
        self.kept[index] = kept, registration
        return kept.copy_(tensor, non_blocking=True)


def _kind(index: int, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies a tensor across snapshots, even if its memory changes."""
    return index, tensor.shape, tensor.dtype


def _is_alike(first: torch.Tensor, second: torch.Tensor, device: torch.device) -> bool:
    """Whether ``first`` is on ``device`` and can receive the content of ``second`` by a plain copy."""
    return (
        first.layout == second.layout == torch.strided
        and (type(first), first.dtype, first.device) == (type(second), second.dtype, device)
        and (first.shape, first.stride()) == (second.shape, second.stride())
    )


class _Look:
    """A fingerprint of the present values of dense tensors.

    Args:
        tensors: The tensors, by any key.
        at_all: Whether it covers every bit (by a sum), or only a sample of elements.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor], at_all: bool) -> None:
        self._at_all = at_all
        self._keys = tensors.keys()
        self._being_brought: list[torch.Tensor] = []
        alike: dict[Any, dict[int, torch.Tensor]] = {}
        with torch.no_grad():
            for key, tensor in tensors.items():
                seen = _sum(tensor) if at_all else _sample(tensor)
                alike.setdefault((seen.dtype, devices.accelerator(seen)), {})[key] = seen
            # One piece for each device and type, so that one copy brings it to the host.
            self._groups = [
                (device, {key: seen.numel() for key, seen in group.items()}, torch.cat(list(group.values())))
                for (_, device), group in alike.items()
            ]

    def bring(self, device: torch.device) -> None:
        """Copies the fingerprint on ``device`` to the host, on its current stream; the caller waits for it."""
        for number, (where, sizes, seen) in enumerate(self._groups):
            if where == device:
                host = torch.empty(seen.shape, dtype=seen.dtype, device="cpu", pin_memory=True)
                self._groups[number] = (None, sizes, host.copy_(seen, non_blocking=True))
                self._being_brought.append(seen)  # its memory must not be reused before the copy has ended

    def _seen(self) -> Iterator[tuple[int, torch.Tensor]]:
        for _, sizes, seen in self._groups:
            yield from zip(sizes, torch.split(seen, list(sizes.values())), strict=True)

    def again(self, tensors: Mapping[int, torch.Tensor]) -> _Look:
        """A new fingerprint of those ``tensors`` that this one covers."""
        return _Look({key: tensor for key, tensor in tensors.items() if key in self._keys}, self._at_all)

    def differs(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """The keys of the tensors whose values in ``tensors`` differ now."""
        return self.differs_from(self.again(tensors))

    def differs_from(self, later: _Look) -> list[int]:
        """The keys of the tensors that differ in a later fingerprint."""
        before = dict(self._seen())
        return [key for key, seen in later._seen() if not torch.equal(_bits(seen), _bits(before[key]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # as numbers, NaN would differ from itself


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    step = max(1, (tensor.numel() - 1) // (_SAMPLE - 1))
    return tensor.as_strided((min(_SAMPLE, tensor.numel()),), (step,))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return as_words(flat(tensor), widest=8).sum().reshape(1)


_Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source."""


class Snapshot:
    """One state that is being copied to host memory. Made by :meth:`Snapshots.take`.

    The training thread calls :meth:`fence`; another thread calls :meth:`copy` and then :meth:`is_good`.

    Attributes:
        structure: The state without its tensors (see :func:`~.safe_serialization.pack`).
        tensors: The tensors to copy, or copies made at the boundary. Only :meth:`copy` may read their content.
        addresses: Addresses of the training's tensors; see :func:`address`.
        left_out: Names of state that could not be taken.
        through_host: By index, the bytes of each tensor for which its device had no room for a copy, so that it was
            copied to the host and held the device up.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        structure: Any,
        tensors: list[torch.Tensor],
        addresses: list[int],
        watched: Mapping[int, list[tuple[torch.Tensor, int]]],
        left_out: list[str],
        look: _Look,
        copier: _Copier,
    ) -> None:
        self.structure = structure
        self.tensors = tensors
        self.addresses = addresses
        self.left_out = left_out
        self.through_host = copier.through_host
        self._snapshots = snapshots
        self._watched = watched
        self._look = look
        self._destinations: dict[int, torch.Tensor] = {}
        self._digest = Digest()
        self._digested: list[_Look] = []
        self._copied = threading.Event()
        self._fenced = threading.Event()
        self._good = True
        self._looked_again = False
        # The copy starts after the work that the training has queued on its devices so far.
        self._before = {device: devices.mark(device) for device in copier.devices}
        self._at_fence: devices.Standstill | None = None

    @property
    def device(self) -> torch.device | None:
        """The accelerator that the state is on, the first if there are several; ``None`` for the host."""
        return next(iter(self._before), None)

    def copy(self, destinations: Iterable[tuple[int, torch.Tensor]], digested: Sequence[int] = ()) -> None:
        """Copies tensors to their destinations.

        Args:
            destinations: Pairs of an index in :attr:`tensors` and a tensor in host memory of its shape and type.
            digested: The indices of the tensors that :meth:`digest` covers, copied or not.
        """
        with torch.no_grad():
            copies = self._noted(destinations)
            for destination, source in self._copy_from_devices(copies, digested) if self._before else copies:
                destination.copy_(source)
            self._add_to_digest(digested, None)

    def digest(self) -> str:
        """The digest of the ``digested`` tensors of :meth:`copy`; valid only if :meth:`is_good`."""
        return self._digest.hexdigest()

    def _add_to_digest(self, indices: Sequence[int], device: torch.device | None) -> None:
        """Adds the tensors on ``device`` (``None``: in host memory) to the digest.

        This follows their copy: a change in between is only in the digest, and the check of the copy then fails.
        """
        own = {i: self.tensors[i] for i in indices if devices.accelerator(self.tensors[i]) == device}
        self._digest.add(own.values())
        # Tensors that are not copied are checked here: a write that torch does not count may precede the digest.
        if looked_at := {i: tensor for i, tensor in own.items() if i not in self._destinations}:
            self._digested.append(self._look.again(looked_at))

    def _noted(self, destinations: Iterable[tuple[int, torch.Tensor]]) -> Iterator[_Copy]:
        for index, destination in destinations:
            self._destinations[index] = destination
            yield destination, self.tensors[index]

    def _copy_from_devices(self, copies: Iterable[_Copy], digested: Sequence[int]) -> list[_Copy]:
        """Copies all tensors on devices; returns the other copies, whose sources no device writes any more by then."""
        by_device: dict[torch.device | None, list[_Copy]] = {None: []}
        for destination, source in copies:
            by_device.setdefault(devices.accelerator(source), []).append((destination, source))
        copied = list(self._before.values())
        with devices.at_work_for(self._before):
            try:
                for device, before in self._before.items():
                    with devices.on_side_stream(device) as stream:
                        stream.wait_event(before)
                        try:
                            for destination, source in by_device.get(device, ()):
                                destination.copy_(source, non_blocking=True)
                            self._add_to_digest(digested, device)
                            self._digest.bring(device)
                            for look in [self._look, *self._digested]:
                                look.bring(device)
                        finally:
                            copied.append(devices.end_of(stream))
            finally:  # also after an error, devices may use the memory until these events
                for event in copied:
                    event.synchronize()
        return by_device[None]

    def release(self) -> None:
        """Call it when everything is copied, or nothing will be: the training may change its tensors again."""
        self._copied.set()

    def fence(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Waits until everything is copied; the training thread calls it before it changes stable tensors.

        Costs nothing when called again.

        Args:
            heartbeat: Called once a second during the wait; see :func:`wait_with_heartbeat`.
        """
        if self._fenced.is_set():
            return
        in_time = True
        if not self._copied.is_set():
            at_fence = devices.Standstill(self._before)
            in_time = wait_with_heartbeat(self._copied.wait, LONGEST_WAIT_S, heartbeat)
            at_fence.over()
            self._at_fence = at_fence
        if not in_time:  # storage that does not answer must not stop the training, so this copy becomes invalid
            self._good = False
            self._fenced.set()
            log.error("Dropping a snapshot: its copy did not finish within %.0f s.", LONGEST_WAIT_S)
            return
        touched = {
            place for place, seen in self._watched.items() if any(tensor._version != before for tensor, before in seen)
        }
        if touched:
            changed = [index for index, tensor in enumerate(self.tensors) if address(tensor) in touched]
            self._invalidate(changed, hidden=False)
        self._fenced.set()

    def drop(self) -> None:
        """Makes the copy count as bad."""
        self._good = False

    def _invalidate(self, changed: Iterable[int], hidden: bool) -> None:
        self._good = False
        self._snapshots.note_volatile({index: self.tensors[index] for index in changed}, hidden)

    def written(self, indices: Iterable[int]) -> list[int]:
        """Those of these tensors that the training writes between boundary and fence, as far as is known now."""
        return [index for index in indices if self._snapshots.is_written(index, self.tensors[index])]

    def note_written(self, indices: Iterable[int]) -> None:
        """Notes that on another rank the training writes these tensors between boundary and fence."""
        self._snapshots.note_volatile({index: self.tensors[index] for index in indices}, hidden=False)

    @property
    def waited_s(self) -> float:
        """Seconds for which the training stood still at the fence. For other threads only; see :class:`.Standstill`."""
        return 0.0 if self._at_fence is None else self._at_fence.seconds()

    def is_good(self, timeout_s: float | None = None) -> bool:
        """Waits for the fence; returns whether nothing has changed before it, so that the copy is the state."""
        if not self._fenced.wait(timeout_s):
            return False
        if self._good and not self._looked_again:
            self._looked_again = True
            changed = self._look.differs(self._destinations)
            changed += [index for look in self._digested for index in self._look.differs_from(look)]
            if changed:
                self._invalidate(changed, hidden=True)
        return self._good


class Fence:
    """Calls :meth:`Snapshot.fence` before any optimizer of this process changes anything.

    It covers every optimizer, since a fit may exchange its optimizers, and some are wrapped in others. It runs before
    other hooks of the optimizer, which may change something too.

    Args:
        heartbeat: Called once a second while the training waits; see :func:`wait_with_heartbeat`.
    """

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.pending: Snapshot | None = None
        self._heartbeat = heartbeat
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if self.pending is None else before_update(self.now, args, kwargs)

    def now(self) -> None:
        """The fence itself; call it also before other code changes the state."""
        if self.pending is not None:
            self.pending.fence(self._heartbeat)
            self.pending = None

    def remove(self) -> None:
        """Removes the hook from the optimizers."""
        self._hook.remove()


def optimizer_tensors(
    optimizers: Iterable[Optimizer], parameters: Iterable[torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """The tensors that optimizers keep between their steps, for all parameters or only for ``parameters``."""
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            if chosen is None or id(key) in chosen:
                yield from (value for value in nested(state) if isinstance(value, torch.Tensor))
