"""Ends blocked collectives of the process groups of a generation after the loss of a rank.

**gloo.** When a rank dies, gloo fails only on ranks that exchange data with it. Other ranks wait for their neighbors
until the timeout of the group, and neither ``abort`` nor ``shutdown`` of the group ends that wait. Shutting the group's
sockets down ends it, on every rank at once and from any thread. The group's sockets are found by comparison: they
appear while the group is opened and do not lead to its store.

But when a connection breaks, gloo does not end the wait for data that it is just sending (``Pair::signalException``
skips the unbound buffers in ``tx_``): in one of ten cuts of two ranks in a barrier one rank would wait until the
timeout. So the sockets are shut down for reading only, and no socket is closed before all ranks have left the group:
data sent meanwhile still goes into the buffers of the kernel. For data to a rank that was killed this does not work:
see :mod:`~lightning_resilience.elastic.stuck`.

**NCCL.** NCCL reports no death: the device waits for its peers forever, and the host for the device. Aborting the
communicators, from any thread, ends the wait but raises nothing: the host continues with arbitrary results. Only the
next collective raises. So from the abort on nothing may be published (:meth:`DefaultGroup.check_not_aborted`).
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_resilience._daemon import NoAnswer, in_daemon_thread
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.elastic import nccl
from lightning_resilience.run.deadlines import ABORTED_WITHIN_S

_CONNECTS_WITHIN = timedelta(seconds=3)

ABORTABLE = {"nccl"}
"""Backends whose ``abort``, called in any thread, ends blocked collectives."""


class DefaultGroup:
    """Keeps track of the sockets of the default group and of groups made of its ranks, from :meth:`install` on.

    Attributes:
        is_known: Whether the open group was opened after :meth:`install`.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._is_installed = False
        self._is_over: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._before: set[tuple[int, str]] | None = None  # while a group is opened
        self._held: list[int] = []  # own descriptors of the group's sockets
        self._is_aborted = False
        self._problem: str | None = None

    def install(self, is_over: Callable[[], bool]) -> None:
        """Wraps ``torch.distributed.init_process_group``, which Lightning calls before any hook, and its helpers.

        Args:
            is_over: Returns whether another rank is lost; then no group is opened.
        """
        self._is_over = is_over
        if self._is_installed:
            return
        self._is_installed = True
        opens = dist.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._before = _sockets()
                self._is_aborted, self._problem = False, None
            try:
                self._check_not_over()
                result = opens(*args, **kwargs)
                with self._lock:
                    self._hold(_sockets() - self._before if "gloo" in _backends() else ())
                self.is_known = True
            finally:
                with self._lock:
                    self._before = None
            self._check_not_over()  # a cut during the opening did not cover the group yet
            return result

        dist.init_process_group = init_process_group
        makes = dist.distributed_c10d._new_process_group_helper

        def make_group(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                is_another = self._before is None
                if is_another:
                    self._before = _sockets()
            try:
                self._check_not_over()
                made = makes(*args, **kwargs)
                with self._lock:
                    if is_another and self._before is not None and "gloo" in _backends():
                        self._held += _held(_sockets() - self._before)
            finally:
                with self._lock:
                    self._before = None if is_another else self._before
            self._check_not_over()
            return made

        dist.distributed_c10d._new_process_group_helper = make_group
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
        creates = rendezvous._create_c10d_store

        def create_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: Any) -> Any:
            # If the store is closed meanwhile, torch retries until the timeout, and there is no socket to cut.
            until = time.monotonic() + timeout.total_seconds()
            while True:
                self._check_not_over()
                try:
                    store = creates(host, port, rank, world_size, min(timeout, _CONNECTS_WITHIN), *rest)
                except dist.DistError:
                    if time.monotonic() > until:
                        raise
                    continue
                store.set_timeout(timeout)
                return store

        rendezvous._create_c10d_store = create_store

    def _check_not_over(self) -> None:
        if self._is_over():
            raise PeerLost("another rank was lost while the process group was opened")

    def cut(self) -> str | None:
        """Ends every blocked collective and the opening of a group; for any thread.

        Returns:
            Why collectives may still be blocked; ``None`` if they are not.
        """
        with self._lock:
            before = self._before
            backends = _backends()
            if aborted := [backend for name, backend in backends.items() if name in ABORTABLE]:
                self._abort(aborted)
            if before is not None:
                for fd in _held(_sockets() - before):
                    _shut_down(fd, socket.SHUT_RDWR)
                    os.close(fd)
            if "gloo" in backends:
                for fd in self._held:
                    _shut_down(fd, socket.SHUT_RD)
            return self._problem

    def _hold(self, sockets: Iterable[tuple[int, str]]) -> None:
        for fd in self._held:  # of the previous group, which all members of this group have left
            os.close(fd)
        self._held = _held(sockets)

    def _abort(self, backends: list[Any]) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True  # set first: the abort frees the main thread, which must not publish then

        def abort() -> None:
            for backend in backends:
                backend.abort()

        try:  # in another thread: NCCL allows an abort as much time as a collective, and exceeds even that
            in_daemon_thread(abort, "aborts-collectives").result(ABORTED_WITHIN_S)
        except NoAnswer:
            self._problem = f"the abort of its collectives has not ended within {ABORTED_WITHIN_S:g} s"
        except Exception as error:
            self._problem = f"the abort of its collectives has failed ({error})"

    @property
    def may_forget(self) -> bool:
        """Whether a wait in the open group may continue after a cut, as with gloo."""
        return bool(self._held)

    def check_not_aborted(self) -> None:
        """Raises :class:`PeerLost` if collectives were aborted: since then the device computes arbitrary results."""
        if self._is_aborted:
            raise PeerLost("another rank was lost, and the collectives were aborted")

    def why_not(self, groups: Iterable[Any] = ()) -> str | None:
        """Why the process groups would keep this rank from continuing after the loss of other ranks, or ``None``.

        Args:
            groups: The groups that are made anew when the fit is entered again.
        """
        if not self._is_installed:
            return "lightning-resilience is not installed but only on the path, so no Trainer() loads its callbacks"
        if not self.is_known:
            return "the script has opened the process group itself"
        others = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}
        if others - set(groups):
            return "the script has opened other process groups"
        names = set(_backends())
        if others and names != {"gloo"}:
            return f"collectives of several groups of {', '.join(sorted(names))} were never aborted"
        if unknown := names - ABORTABLE - {"gloo"}:
            return f"collectives of {', '.join(sorted(unknown))} cannot be aborted"
        return nccl.why_not(os.environ) if "nccl" in names else None

    def close(self) -> None:
        """Closes the group that has lost a rank."""
        self.cut()
        self.is_known = False
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names groups by a count, which includes groups that could not be opened.
        dist.distributed_c10d._world.group_count = 0


DEFAULT = DefaultGroup()
"""The object for the default group of this process."""


def _backends() -> dict[str, Any]:
    """The backends of the default group by name: one for all devices, or one for each; empty before it is open."""
    found = dict[str, Any]()
    if (group := dist.group.WORLD) is None:  # read once: another thread may close the group meanwhile
        return found
    for device in group._device_types:
        with suppress(RuntimeError):  # this device has no backend
            backend = group._get_backend(device)
            found[backend.name()] = backend
    return found


def _sockets() -> set[tuple[int, str]]:
    """The sockets of this process: descriptors, with the kernel's names of the sockets."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                found.add((int(fd), name))
    return found


def _held(sockets: Iterable[tuple[int, str]]) -> list[int]:
    """Duplicates the descriptors of sockets to other ranks, not to the store. gloo may close its own at any time."""
    found, store = [], int(os.environ.get("MASTER_PORT", "0"))
    for fd, name in sockets:
        with suppress(OSError):
            own = socket.socket(fileno=os.dup(fd))  # not `socket.dup`, which changes the mode of both descriptors
            with own, suppress(OSError):
                is_network = own.family in (socket.AF_INET, socket.AF_INET6)
                if is_network and own.getpeername()[1] != store and os.readlink(f"/proc/self/fd/{fd}") == name:
                    found.append(own.detach())
    return found


def _shut_down(fd: int, how: int) -> None:
    with suppress(OSError):
        own = socket.socket(fileno=fd)
        try:
            own.shutdown(how)
        finally:
            own.detach()
