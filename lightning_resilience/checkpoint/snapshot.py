"""A state of the training, copied while the training goes on: torch only, no Trainer.

Most of a state is parameters and optimizer state, and neither forward nor backward changes them. So they are copied by
another thread while the next batch runs, and the optimizer's step waits for the copy to end (the *fence*). Everything
else (random states, counters, buffers such as those of batch normalisation) is copied at once, at the boundary.

Whether a tensor has stayed as it was is checked, not assumed: torch counts the writes to every tensor. One that was
written between boundary and fence invalidates its snapshot, which is dropped, and is copied at once from then on.

Writes through ``tensor.data`` are not counted, and hooks of users do write like that: clipped weights, the average of a
teacher. So what parameters held at the boundary is compared with the copy: all of it now and then (the first time, then
as often as takes a thousandth of the time, and always once such a write was seen), else a sample. What may slip through
is a write through ``.data``, before the optimizer's step, that begins in the middle of a fit and changes few elements.
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
"""The share of the time that may go into looking at all of the parameters."""

_SAMPLE = 64
"""How many elements of a parameter are looked at otherwise."""

ON_DEVICE_BYTES = 64 << 20
"""How much memory of a device is taken at most for copies of what is not stable: the training may need the rest."""

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""How long the training waits for a snapshot to be copied."""


def wait_with_heartbeat(wait: Callable[[float], bool], timeout_s: float, heartbeat: Callable[[], None]) -> bool:
    """Waits for as long as that, in pieces: a wait that ends by itself must not be taken for a hang.

    Args:
        wait: Waits for so many seconds at most; returns whether it has come.
        timeout_s: How long to wait.
        heartbeat: Called once a second; says that this is no hang.

    Returns:
        Whether it has come.
    """
    deadline = time.monotonic() + timeout_s
    while not (come := wait(max(0.0, min(1.0, deadline - time.monotonic())))) and time.monotonic() < deadline:
        heartbeat()
    return come


def address(tensor: torch.Tensor) -> int:
    """Where the content of ``tensor`` is kept; two tensors with the same address share it. 0: nowhere."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or a subclass that keeps its content in other tensors
        return 0


class Snapshots:
    """Takes one snapshot after the other, into memory that it keeps: one at a time."""

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
        known: dict[int, int] = {}  # addresses by the id of what is in ``watched``: to ask for one takes a microsecond
        parameters = set()
        for tensor in stable:
            own = local(tensor)
            if tensor.is_inference() or (place := address(own)) == 0:
                continue
            known[id(tensor)] = place
            seen = watched.setdefault(place, [])
            seen.append((tensor, tensor._version))
            if own is not tensor:  # a DTensor counts the writes, not the part of it that this rank holds: look at both
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
                # Whoever replaces the data of a parameter leaves us what was there.
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
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():  # torch counts nothing, or shows no bits
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
        """Compares all of the parameters in the next snapshot, however recent the last such comparison is."""
        self._look_at_all = 0.0

    def note_volatile(self, changed: Mapping[int, torch.Tensor], hidden: bool) -> None:
        """Has tensors that have changed between a boundary and its fence copied at once from now on.

        Args:
            changed: By index in :attr:`Snapshot.tensors`.
            hidden: Whether torch has not counted it.
        """
        kinds = {_kind(index, tensor) for index, tensor in changed.items()}
        self._volatile |= kinds
        self._hidden_writes |= hidden
        if not hidden:
            self._written |= kinds

    def is_written(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether the training itself writes this tensor between a boundary and its fence: perhaps on this rank only.

        Not so where torch has not counted it: that may be an error of the hardware.
        """
        return bool(self._written) and _kind(index, tensor) in self._written


_Kept = tuple[torch.Tensor, devices.Registration | None]


class _Copier:
    """Copies at once what may change before the fence, without waiting for a device, into memory that is kept.

    On its own device, as long as that takes no more memory than a budget. What is beyond it, or finds no room there,
    goes to the host: the device does nothing else meanwhile.

    Args:
        tensors: All tensors of the state.
        kept: What was copied into the last time, by index.

    Attributes:
        devices: All that the state is on.
        kept: What is copied into this time.
        through_host: By index the bytes of what did not stay on its device.
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
        """A copy of the tensor with this index."""
        device = devices.accelerator(tensor)
        if device is not None:
            if tensor.nbytes > self._left[device]:
                return self._to_host(index, tensor.detach(), device)
            self._left[device] -= tensor.nbytes
        elif not self._awaited and tensor.is_pinned():  # few states have any; a device may be writing into it still
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
            return tensor.to("cpu", copy=True)  # takes more than one copy: the host waits for it
        kept, registration = self._before.get(index, (None, None))
        if kept is None or not _is_alike(kept, tensor, torch.device("cpu")):
            kept = torch.empty_like(tensor, device="cpu")
            registration = devices.register(kept, device)
        self.kept[index] = kept, registration
        return kept.copy_(tensor, non_blocking=True)


def _kind(index: int, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies a tensor over snapshots, also when its memory changes."""
    return index, tensor.shape, tensor.dtype


def _is_alike(first: torch.Tensor, second: torch.Tensor, device: torch.device) -> bool:
    """Whether the content of the second can be copied into the first, if that is to be on ``device``."""
    return (
        first.layout == second.layout == torch.strided
        and (type(first), first.dtype, first.device) == (type(second), second.dtype, device)
        and (first.shape, first.stride()) == (second.shape, second.stride())
    )


class _Look:
    """What some tensors, each without gaps, have in them at this moment.

    Args:
        tensors: By any key.
        at_all: Whether to look at every bit, or at a sample.
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
            # In one piece for each device, so that it takes one copy to bring it.
            self._groups = [
                (device, {key: seen.numel() for key, seen in group.items()}, torch.cat(list(group.values())))
                for (_, device), group in alike.items()
            ]

    def bring(self, device: torch.device) -> None:
        """Copies what was seen on ``device`` to the host, on its current stream; the caller waits for it."""
        for number, (where, sizes, seen) in enumerate(self._groups):
            if where == device:
                host = torch.empty(seen.shape, dtype=seen.dtype, device="cpu", pin_memory=True)
                self._groups[number] = (None, sizes, host.copy_(seen, non_blocking=True))
                self._being_brought.append(seen)  # its memory must not be given to others meanwhile

    def _seen(self) -> Iterator[tuple[int, torch.Tensor]]:
        for _, sizes, seen in self._groups:
            yield from zip(sizes, torch.split(seen, list(sizes.values())), strict=True)

    def again(self, tensors: Mapping[int, torch.Tensor]) -> _Look:
        """The same look at ``tensors``, as far as this one has seen them."""
        return _Look({key: tensor for key, tensor in tensors.items() if key in self._keys}, self._at_all)

    def differs(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """The keys of what looks otherwise now, in ``tensors``."""
        return self.differs_from(self.again(tensors))

    def differs_from(self, later: _Look) -> list[int]:
        """The keys of what looks otherwise in a later look."""
        before = dict(self._seen())
        return [key for key, seen in later._seen() if not torch.equal(_bits(seen), _bits(before[key]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # numbers that are none differ from themselves


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    step = max(1, (tensor.numel() - 1) // (_SAMPLE - 1))
    return tensor.as_strided((min(_SAMPLE, tensor.numel()),), (step,))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return as_words(flat(tensor), widest=8).sum().reshape(1)


_Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, and from where."""


class Snapshot:
    """One state, on its way into host memory. Made by :meth:`Snapshots.take`.

    The training thread calls :meth:`fence`; another thread calls :meth:`copy` and then :meth:`is_good`.

    Attributes:
        structure: The state without its tensors (see :func:`~.safe_serialization.pack`).
        tensors: What was or will be copied. To be read by :meth:`copy` only, but for their shapes and types.
        addresses: Where the training keeps them; see :func:`address`.
        left_out: Names of what could not be taken.
        through_host: By index the bytes of what was too large for its device to keep a copy of it, and has held the
            device up on its way to the host.
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
        # What the training has asked its devices to do by now comes before the copy.
        self._before = {device: devices.mark(device) for device in copier.devices}
        self._at_fence: devices.Standstill | None = None

    @property
    def device(self) -> torch.device | None:
        """The accelerator that the state is on; the first of several, and ``None`` for the host."""
        return next(iter(self._before), None)

    def copy(self, destinations: Iterable[tuple[int, torch.Tensor]], digested: Sequence[int] = ()) -> None:
        """Copies tensors to where they shall go.

        Args:
            destinations: Pairs of an index in :attr:`tensors` and a tensor in host memory of its shape and type.
            digested: The indices of those whose content :meth:`digest` is to say, copied or not.
        """
        with torch.no_grad():
            copies = self._noted(destinations)
            for destination, source in self._copy_from_devices(copies, digested) if self._before else copies:
                destination.copy_(source)
            self._add_to_digest(digested, None)

    def digest(self) -> str:
        """What the tensors hold that were to be digested by :meth:`copy`; good if :meth:`is_good`."""
        return self._digest.hexdigest()

    def _add_to_digest(self, indices: Sequence[int], device: torch.device | None) -> None:
        """Of what lies on ``device``, or in the host's memory.

        After it is copied: what changes in between is in the digest only, and the copy is refused because of it.
        """
        own = {i: self.tensors[i] for i in indices if devices.accelerator(self.tensors[i]) == device}
        self._digest.add(own.values())
        # A write in between that torch does not count has come before what is digested, on some ranks perhaps.
        if looked_at := {i: tensor for i, tensor in own.items() if i not in self._destinations}:
            self._digested.append(self._look.again(looked_at))

    def _noted(self, destinations: Iterable[tuple[int, torch.Tensor]]) -> Iterator[_Copy]:
        for index, destination in destinations:
            self._destinations[index] = destination
            yield destination, self.tensors[index]

    def _copy_from_devices(self, copies: Iterable[_Copy], digested: Sequence[int]) -> list[_Copy]:
        """Copies what is on a device; what remains is not written by any device any more when this returns."""
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
            finally:  # until then the memory belongs to the devices, whatever has happened
                for event in copied:
                    event.synchronize()
        return by_device[None]

    def release(self) -> None:
        """To be called when everything is copied, or nothing will be: the training may change its tensors again."""
        self._copied.set()

    def fence(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Waits until everything is copied; called by the training thread before it changes what was said to be stable.

        Costs nothing when called again.

        Args:
            heartbeat: Called now and then meanwhile; see :func:`wait_with_heartbeat`.
        """
        if self._fenced.is_set():
            return
        in_time = True
        if not self._copied.is_set():
            at_fence = devices.Standstill(self._before)
            in_time = wait_with_heartbeat(self._copied.wait, LONGEST_WAIT_S, heartbeat)
            at_fence.over()
            self._at_fence = at_fence
        if not in_time:  # storage that does not answer must not stop the training: what is copied from here on is bad
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
        """Has the copy count as bad, whatever it will be."""
        self._good = False

    def _invalidate(self, changed: Iterable[int], hidden: bool) -> None:
        self._good = False
        self._snapshots.note_volatile({index: self.tensors[index] for index in changed}, hidden)

    def written(self, indices: Iterable[int]) -> list[int]:
        """Which of these tensors the training writes between boundary and fence, as far as is known now."""
        return [index for index in indices if self._snapshots.is_written(index, self.tensors[index])]

    def note_written(self, indices: Iterable[int]) -> None:
        """On another rank the training writes these tensors between boundary and fence."""
        self._snapshots.note_volatile({index: self.tensors[index] for index in indices}, hidden=False)

    @property
    def waited_s(self) -> float:
        """How long the training has stood still at the fence; not for its own thread (see :class:`.Standstill`)."""
        return 0.0 if self._at_fence is None else self._at_fence.seconds()

    def is_good(self, timeout_s: float | None = None) -> bool:
        """Waits for the fence; returns whether nothing was changed before it, and so the copy is the state."""
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

    Any, since a fit may exchange its optimizers, and some are wrapped in others. Before other hooks of the optimizer,
    which may change something too.

    Args:
        heartbeat: Called now and then while the training waits; see :func:`wait_with_heartbeat`.
    """

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.pending: Snapshot | None = None
        self._heartbeat = heartbeat
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if self.pending is None else before_update(self.now, args, kwargs)

    def now(self) -> None:
        """The fence itself; also for whatever else is about to change the state."""
        if self.pending is not None:
            self.pending.fence(self._heartbeat)
            self.pending = None

    def remove(self) -> None:
        """Takes the hook off the optimizers."""
        self._hook.remove()


def optimizer_tensors(
    optimizers: Iterable[Optimizer], parameters: Iterable[torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """All tensors that optimizers keep between their steps; or only what they keep for some parameters."""
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            if chosen is None or id(key) in chosen:
                yield from (value for value in nested(state) if isinstance(value, torch.Tensor))
