"""A state of the training, copied while the training goes on: torch only, no Trainer.

Most of a state is parameters and optimizer state, and neither forward nor backward changes them. So they are copied by
another thread while the next batch runs, and the optimizer's step waits for the copy to end (the *fence*). Everything
else (random states, counters, buffers such as those of batch normalisation) is copied at once, at the boundary.

Whether a tensor has stayed as it was is checked, not assumed: torch counts the writes to every tensor. One that was
written between boundary and fence spoils its snapshot, which is thrown away, and is copied at once from then on. Only a
write through ``tensor.data`` is not counted by torch; in forward and backward nothing in torch does that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_resilience.checkpoint.plain import pack
from lightning_resilience.checkpoint.sharded import local


def address(tensor: torch.Tensor) -> int:
    """Where the content of ``tensor`` is kept; two tensors with the same address share it. 0: nowhere."""
    own = local(tensor)
    return own.untyped_storage().data_ptr() if own.layout == torch.strided else 0


class Snapshots:
    """Takes one snapshot after the other, into memory that it keeps: one at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._restless: set[int] = set()

    def take(self, state: Any, stable: Iterable[torch.Tensor]) -> Snapshot:
        """Begins a snapshot; called by the training thread at a boundary.

        Args:
            state: Nested containers of tensors and plain values, as :func:`~.plain.pack` takes them.
            stable: The tensors that do not change before the fence.
        """
        skeleton, tensors, left_out = pack(state)
        # A DTensor counts the writes, not the part of it that this rank holds: so both are looked at.
        watched = {
            place: [(tensor, tensor._version), (own, own._version)]
            for tensor in stable
            if not tensor.is_inference()
            and (place := address(own := local(tensor))) != 0
            and place not in self._restless
        }
        sources = [
            tensor if tensor.is_meta or address(tensor) in watched else self._copy(index, tensor)
            for index, tensor in enumerate(tensors)
        ]
        return Snapshot(skeleton, sources, watched, left_out, self._restless)

    def _copy(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        # On its own device, where this waits for nothing but earlier work on that device's stream.
        kept = self._kept.get(index)
        like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if kept is not None and (kept.shape, kept.stride(), kept.dtype, kept.device) == like:
            with torch.no_grad():
                return kept.copy_(tensor)
        self._kept[index] = tensor.detach().clone()
        return self._kept[index]


class Snapshot:
    """One state, on its way into host memory. Made by :meth:`Snapshots.take`.

    The training thread calls :meth:`fence`; another thread calls :meth:`copy` and then :meth:`is_good`.

    Attributes:
        skeleton: The state without its tensors (see :func:`~.plain.pack`).
        tensors: What was or will be copied. To be read by :meth:`copy` only, but for their shapes and types.
        left_out: Names of what could not be taken.
    """

    def __init__(
        self,
        skeleton: Any,
        tensors: list[torch.Tensor],
        watched: Mapping[int, list[tuple[torch.Tensor, int]]],
        left_out: list[str],
        restless: set[int],
    ) -> None:
        self.skeleton = skeleton
        self.tensors = tensors
        self.left_out = left_out
        self.waited_s = 0.0
        """How long the training has waited at the fence."""
        self._watched = watched
        self._restless = restless
        self._copied = threading.Event()
        self._fenced = threading.Event()
        self._good = True
        # What the training has asked its devices to do by now comes before the copy.
        self._before = {
            device: torch.get_device_module(device).current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors}
            if device.type not in ("cpu", "meta")
        }

    def copy(self, destinations: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copies tensors to where they shall go.

        Args:
            destinations: Pairs of an index in :attr:`tensors` and a tensor in host memory of its shape and type.
        """
        streams: dict[torch.device, Any] = {}
        for device, event in self._before.items():
            streams[device] = torch.get_device_module(device).Stream(device)
            streams[device].wait_event(event)
        with torch.no_grad():
            for index, destination in destinations:
                source = self.tensors[index]
                with self._on(streams.get(source.device)):
                    destination.copy_(source)
        for stream in streams.values():
            stream.synchronize()

    @staticmethod
    def _on(stream: Any | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.get_device_module(stream.device).stream(stream)

    def release(self) -> None:
        """To be called when everything is copied, or nothing will be: the training may change its tensors again."""
        self._copied.set()

    def fence(self) -> None:
        """Waits until everything is copied; called by the training thread before it changes what was said to be stable.

        Costs nothing when called again.
        """
        if self._fenced.is_set():
            return
        started = time.perf_counter()
        self._copied.wait()
        self.waited_s = time.perf_counter() - started
        touched = [
            place for place, seen in self._watched.items() if any(tensor._version != before for tensor, before in seen)
        ]
        if touched:
            self._restless.update(touched)
            self._good = False
        self._fenced.set()

    @property
    def fenced(self) -> bool:
        """Whether the fence is behind us."""
        return self._fenced.is_set()

    def is_good(self, timeout_s: float | None = None) -> bool:
        """Waits for the fence; returns whether nothing was changed before it, and so the copy is the state."""
        return self._fenced.wait(timeout_s) and self._good


class Fence:
    """Has :meth:`Snapshot.fence` called before any of some optimizers changes anything.

    Automatic optimization runs forward and backward in a closure inside of the optimizer's step, so the fence comes
    after the closure's first call where there is one.

    Args:
        optimizers: All that change what snapshots take for stable.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.pending: Snapshot | None = None
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.pending is None:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._fenced(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._fenced(kwargs["closure"])}
        self.now()
        return None

    def _fenced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run_closure() -> Any:
            result = closure()
            self.now()
            return result

        return run_closure

    def now(self) -> None:
        """The fence itself; also for whatever else is about to change the state."""
        if self.pending is not None:
            self.pending.fence()
            self.pending = None

    def remove(self) -> None:
        """Takes the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """All tensors that optimizers keep between their steps."""
    for optimizer in optimizers:
        yield from _tensors_in(list(optimizer.state.values()))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
