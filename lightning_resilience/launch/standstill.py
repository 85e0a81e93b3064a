"""Pauses imports that no rank waits for while the ranks of a node return to their fit: both need the same cores.

Spares import, and so do newcomers (:mod:`~lightning_resilience.launch.newcomers`). That takes some seconds of CPU time,
by which a step would be delayed on a node with few cores. The launcher has a gate: a pipe that holds a byte while it is
open. A process that imports polls the gate before each module and reads nothing from it. It continues on its own if the
launcher ends. Only imports are held up, no other code.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import Any

from lightning_resilience.run.deadlines import IMPORTS_GO_ON_AFTER_S, IMPORTS_STAND_STILL_FOR_S, OPENED_WITHIN_S

NO_GATE = -1


class Standstill:
    """The launcher's side; can be used in any thread.

    Attributes:
        gate: The descriptor that importing processes get.
    """

    def __init__(self) -> None:
        self.gate, self._opens = os.pipe()
        self._ranks: set[int] = set()
        self._awaited: set[int] = set()
        self._is_open = True
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        os.write(self._opens, b"\0")

    def begin(self, rank: int) -> None:
        """Pauses imports while this rank and others return to their fit, but only for a limited time."""
        with self._lock:
            if self._awaited:
                return
            self._ranks.add(rank)
            if self._is_open:
                self._is_open = not os.read(self.gate, 1)
            self._end_in(IMPORTS_STAND_STILL_FOR_S)

    def end(self, rank: int) -> None:
        """Notes that a rank is in its fit, right before its first step, or that it has ended."""
        with self._lock:
            self._awaited.discard(rank)
            if rank in self._ranks:
                self._ranks.remove(rank)
                if not self._ranks:
                    self._end_in(IMPORTS_GO_ON_AFTER_S)

    def wait_for(self, rank: int) -> None:
        """Lets imports continue until this rank is in its fit: it imports, and the other ranks wait for it."""
        with self._lock:
            self._awaited.add(rank)
            self._cancel()

    def _end_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer = threading.Timer(seconds, lambda: self._end_by(timer))
        timer.daemon = True
        timer.start()

    def _end_by(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:
                self._cancel()

    def _cancel(self) -> None:
        self._ranks.clear()
        self._timer = None
        if not self._is_open:
            self._is_open = bool(os.write(self._opens, b"\0"))


class _Stop:
    """An import finder that finds nothing and waits at a gate before each import.

    Args:
        gate: The descriptor :attr:`Standstill.gate`.
    """

    def __init__(self, gate: int) -> None:
        self._gate = gate
        self._is_minded = True
        self._poll = select.poll()
        self._poll.register(gate, select.POLLIN)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called when an import begins.

        Args:
            name: The name of the module.
            path: Where its package lies.
            target: Unused.
        """
        if self._is_minded and not self._poll.poll(OPENED_WITHIN_S * 1000):
            self._is_minded = False  # the launcher was stopped; Python iterates the list, so this finder stays in it

    def leave(self) -> None:
        """Waits at the gate no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            os.close(self._gate)


_stop: _Stop | None = None


def mind(gate: int) -> None:
    """Makes the imports of this process wait, from here on, while other processes need the cores.

    Args:
        gate: The descriptor :attr:`Standstill.gate`, or :data:`NO_GATE`.
    """
    global _stop
    if gate != NO_GATE:
        os.set_inheritable(gate, False)
        _stop = _Stop(gate)
        sys.meta_path.insert(0, _stop)


def leave() -> None:
    """Ends the waiting at the gate: another process waits for this one from here on, or it imports no more."""
    global _stop
    stop, _stop = _stop, None
    if stop is not None:
        stop.leave()
