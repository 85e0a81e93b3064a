"""Pauses imports that no rank waits for while the ranks of a node return to their fit: both need the same cores.

Spare processes import, and so do newcomers on their way (:mod:`~lightning_resilience.launch.newcomers`): some seconds
of CPU time, of which a step would come later on a node with few cores. The launcher has a gate, a pipe that holds a
byte while it is open. Who imports looks at it before each module, reads nothing, and goes on by itself if the launcher
ends. Code that is no import is never held up.

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
    """The launcher's side; for any thread.

    Attributes:
        gate: The descriptor that those get who import.
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
        """A rank goes back to its fit; imports stand still until all of them are there, but not for long."""
        with self._lock:
            if self._awaited:
                return
            self._ranks.add(rank)
            if self._is_open:
                self._is_open = not os.read(self.gate, 1)
            self._end_in(IMPORTS_STAND_STILL_FOR_S)

    def end(self, rank: int) -> None:
        """It is there, and about to make its first step; or it has ended."""
        with self._lock:
            self._awaited.discard(rank)
            if rank in self._ranks:
                self._ranks.remove(rank)
                if not self._ranks:
                    self._end_in(IMPORTS_GO_ON_AFTER_S)

    def wait_for(self, rank: int) -> None:
        """The others wait for this one, which imports; nothing stands still until it is there."""
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
    """Waits at a gate before each import, as a finder that finds nothing.

    Args:
        gate: See :attr:`Standstill.gate`.
    """

    def __init__(self, gate: int) -> None:
        self._gate = gate
        self._is_minded = True
        self._poll = select.poll()
        self._poll.register(gate, select.POLLIN)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called when an import begins.

        Args:
            name: Of the module.
            path: Where its package lies.
            target: Unused.
        """
        if self._is_minded and not self._poll.poll(OPENED_WITHIN_S * 1000):
            self._is_minded = False  # the launcher was stopped; who is asked meanwhile stays in the list

    def leave(self) -> None:
        """Waits no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            os.close(self._gate)


_stop: _Stop | None = None


def mind(gate: int) -> None:
    """From here on imports of this process stand still when others need the cores.

    Args:
        gate: See :attr:`Standstill.gate`.
    """
    global _stop
    if gate != NO_GATE:
        os.set_inheritable(gate, False)
        _stop = _Stop(gate)
        sys.meta_path.insert(0, _stop)


def leave() -> None:
    """Somebody waits for this process from here on, or it imports no more."""
    global _stop
    stop, _stop = _stop, None
    if stop is not None:
        stop.leave()
