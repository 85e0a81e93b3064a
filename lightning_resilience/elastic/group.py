"""The default process group of a generation: its sockets, so that a blocked collective can be ended.

When a rank dies, gloo fails only on ranks that exchange data with it. The others wait for their neighbours until the
timeout of the group, and neither ``abort`` nor ``shutdown`` of the group ends that. Shutting the group's sockets down
does, on every rank at once and from any thread. Which sockets these are is known by comparison: those that appear while
the group is opened, but for the ones that lead to its store.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

import torch.distributed as dist


class DefaultGroup:
    """Knows the sockets of the default group from the time of :meth:`install` on.

    Attributes:
        is_known: Whether the group that is open was opened since then.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._is_installed = False
        self._lock = threading.Lock()
        self._before: set[tuple[int, str]] | None = None  # while a group is opened
        self._sockets: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Takes part in ``torch.distributed.init_process_group``, which Lightning calls before any hook."""
        if self._is_installed:
            return
        self._is_installed = True
        opens = dist.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._before = _sockets()
            try:
                result = opens(*args, **kwargs)
                with self._lock:
                    self._sockets = _sockets() - self._before
                self.is_known = True
                return result
            finally:
                with self._lock:
                    self._before = None

        dist.init_process_group = init_process_group

    def cut(self) -> None:
        """Ends every collective that is blocked, and the opening of a group; for any thread."""
        with self._lock:
            found = self._sockets if self._before is None else _sockets() - self._before
            store = int(os.environ.get("MASTER_PORT", "0"))
            for fd, name in found & _sockets():
                _shut_down(fd, name, store)
            self._sockets = set()

    def close(self) -> None:
        """Closes the group that has lost a rank."""
        self.cut()
        self.is_known = False
        if dist.is_initialized():
            dist.destroy_process_group()
        # Groups are known by their number, and one that could not be opened has been counted.
        dist.distributed_c10d._world.group_count = 0


def count_groups() -> int:
    """How many process groups there are."""
    return len(dist.distributed_c10d._world.pg_map)


def _sockets() -> set[tuple[int, str]]:
    """The sockets of this process: descriptors, and the kernel's names for what is behind them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                found.add((int(fd), name))
    return found


def _shut_down(fd: int, name: str, store: int) -> None:
    with suppress(OSError):
        own = socket.socket(fileno=os.dup(fd))
        try:
            is_other = own.family not in (socket.AF_INET, socket.AF_INET6) or own.getpeername()[1] == store
            if not is_other and os.readlink(f"/proc/self/fd/{fd}") == name:
                own.shutdown(socket.SHUT_RDWR)
        finally:
            own.close()
