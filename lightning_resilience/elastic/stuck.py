"""Detects that the main thread waits forever in torch after a cut: gloo does not end some waits.

If a rank is killed just when another rank begins to send to it, the sender waits until the timeout of the group (see
:mod:`~lightning_resilience.elastic.group`). Nothing in the sender's process can end that wait, so the process must end:
then it is replaced like a lost rank.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_resilience.run import deadlines

_POLL_S = 0.1
_IDLE_SHARE = 0.2
"""Share of a core: a computing process uses more, or would use more if other processes left it a core."""

_TORCH = os.path.dirname(torch.__file__)
_BACKWARD = tuple(os.path.join(_TORCH, *place) + os.sep for place in (("autograd",), ("nn", "parallel")))
_COLLECTIVES = os.path.join(_TORCH, "distributed") + os.sep


def waits_for_ever(has_left: Callable[[], bool]) -> bool:
    """Watches the main thread after its group was cut; for another thread.

    Args:
        has_left: Returns whether the main thread has left the group.

    Returns:
        ``True`` when the main thread has stood still in a collective or a backward pass for the time that
        :mod:`~.deadlines` allows, while the process computed nothing; ``False`` as soon as it has left the group.
    """
    since, used, place = time.monotonic(), _computed_s(), _place()
    while not has_left():
        time.sleep(_POLL_S)
        now, uses, is_at = time.monotonic(), _computed_s(), _place()
        if is_at is None or is_at != place or uses - used > _IDLE_SHARE * (now - since) + _POLL_S:
            since, used, place = now, uses, is_at
        elif now - since >= is_at.may_take_s:
            return True
    return False


def _computed_s() -> float:
    """Seconds of CPU time of this process, plus the seconds that its main thread has waited for a core."""
    try:
        waited_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a kernel that does not count them
        waited_ns = 0
    return time.process_time() + waited_ns / 1e9


class _Place(NamedTuple):
    """The position of a thread in Python code.

    Attributes:
        frame: Id of the frame.
        instruction: Index of the instruction.
        may_take_s: How many seconds it may stand still there.
    """

    frame: int
    instruction: int
    may_take_s: float


def _place() -> _Place | None:
    """The position of the main thread, if it is in torch's own communication or backward pass; otherwise ``None``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None
    if (file := frame.f_code.co_filename).startswith(_BACKWARD):
        return _Place(id(frame), frame.f_lasti, deadlines.STUCK_IN_BACKWARD_AFTER_S)
    return _Place(id(frame), frame.f_lasti, deadlines.STUCK_AFTER_S) if file.startswith(_COLLECTIVES) else None
