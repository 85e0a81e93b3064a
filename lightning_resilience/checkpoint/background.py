"""Writes one checkpoint at a time in the background, from a snapshot of the state. Torch only, no Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from lightning_resilience._daemon import in_daemon_thread
from lightning_resilience.checkpoint.devices import accelerator
from lightning_resilience.checkpoint.node_store import MappedFile
from lightning_resilience.checkpoint.snapshot import Fence, Snapshot, Snapshots

log = logging.getLogger(__name__)

_REGISTERED_BYTES = 1 << 20
"""Buffers of at least this size are registered with the device; for smaller ones that costs more than it saves."""


@dataclass(frozen=True)
class Copy:
    """A copy of the state of a boundary, split into structure and tensors by ``safe_serialization.pack``.

    Args:
        structure: The state without its tensors.
        tensors: Copies of the tensors.
        left_out: Names of the state that could not be kept.
    """

    structure: Any
    tensors: list[torch.Tensor]
    left_out: list[str]


class BackgroundSaves:
    """Takes snapshots of a state and passes the copies to a write function, in another thread.

    Args:
        heartbeat: Called now and then while the training waits for a copy; see :func:`~.snapshot.wait_with_heartbeat`.
    """

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._fence = Fence(heartbeat)
        self._snapshots = Snapshots()
        self._buffers: dict[int, _Buffer] = {}  # reused: new memory takes three times as long to fill
        self._saving: Future[None] | None = None
        self._error: BaseException | None = None
        """The error of an earlier save, not yet raised by :meth:`check`."""
        self.invalidated = False
        """Whether the last snapshot was discarded because something other than an optimizer has changed its state."""

    @property
    def busy(self) -> bool:
        """Whether the previous checkpoint is still being written."""
        return self._saving is not None and not self._saving.done()

    def take(
        self,
        state: Any,
        stable: Iterable[torch.Tensor],
        write: Callable[[Copy], None],
        missed: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Begins a save; call it only when not :attr:`busy`.

        Args:
            state: The state to save, as ``safe_serialization.pack`` takes it.
            stable: Tensors that do not change before an optimizer's step.
            write: Called in the other thread with the copy. :meth:`check` raises what it raises.
            missed: Called in the other thread instead of ``write`` if there is no copy: with the error, or with
                ``None`` if the snapshot was invalid. By default :meth:`check` raises the error.
        """
        if self._saving is not None:
            self._error = self._error or self._saving.exception()  # before the new save replaces it
        snapshot = self._fence.pending = self._snapshots.take(state, stable)
        self.invalidated = False
        self._saving = in_daemon_thread(lambda: self._run(snapshot, write, missed or _raise), "background-checkpoint")

    def _run(
        self, snapshot: Snapshot, write: Callable[[Copy], None], missed: Callable[[BaseException | None], None]
    ) -> None:
        try:
            copies = self._copy(snapshot)
        except BaseException as error:
            missed(error)
            return
        if copies is None:
            self.invalidated = True
            missed(None)
        else:
            write(Copy(snapshot.structure, copies, snapshot.left_out))

    def _copy(self, snapshot: Snapshot) -> list[torch.Tensor] | None:
        try:
            copies = [self._buffer(index, tensor) for index, tensor in enumerate(snapshot.tensors)]
            snapshot.copy((index, copy) for index, copy in enumerate(copies) if not copy.is_meta)
        finally:
            snapshot.release()
        return copies if snapshot.is_good() else None

    def _buffer(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(index)
        if kept is None or not kept.is_for(tensor):
            self._buffers.pop(index, None)
            kept = self._buffers[index] = _Buffer(tensor)
        return kept.content

    def fence(self) -> None:
        """Call it before the training changes tensors that were passed as ``stable``. Free if no copy is pending."""
        self._fence.now()

    def check(self) -> None:
        """Raises, once, the error that a save has raised in the other thread."""
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            self._error = self._error or saving.exception()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no checkpoint is being written; returns ``False`` if ``timeout_s`` has passed before."""
        self.fence()
        return self._saving is None or bool(futures.wait([self._saving], timeout_s).done)

    def close(self, timeout_s: float) -> None:
        """Waits for the checkpoint that is being written and removes the hooks from the optimizers."""
        if not self.wait(timeout_s):
            log.warning("Dropping a checkpoint that is still being written after %.0f s.", timeout_s)
        self._fence.remove()


class _Buffer:
    """Host memory for copies of one tensor, not shared with others: ``torch.save`` stores shared memory as a whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory: MappedFile | None = None
        device = accelerator(tensor)
        if device is None or tensor.layout != torch.strided or tensor.nbytes < _REGISTERED_BYTES:
            place = "meta" if tensor.is_meta else "cpu"
            self.content = torch.empty_like(tensor, device=place, requires_grad=False)
            return
        like = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._memory = MappedFile.unnamed(like.nbytes)
        self._memory.register(device)
        self.content = self._memory.memory.view(like.dtype).as_strided(like.shape, like.stride())

    def is_for(self, tensor: torch.Tensor) -> bool:
        content = self.content
        if tensor.layout != torch.strided or content.layout != torch.strided:
            return False  # sparse tensors have no strides, and may have more values next time
        return (content.shape, content.stride(), content.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
