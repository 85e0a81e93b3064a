"""Whether the main thread waits in torch for something that never comes: gloo forgets to end some waits.

A rank that is killed just when another one begins to send to it leaves that one waiting until the timeout of the group
(see :mod:`~lightning_resilience.elastic.group`). Nothing in its process can end that wait, so the process has to end:
then it is replaced like a rank that was lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_resilience.run.deadlines import STUCK_AFTER_S

_POLL_S = 0.1
_IDLE_SHARE = 0.2
"""Of a core: a process that computes uses more, or would if other processes left it one."""

_PLACES = tuple(
    os.path.join(os.path.dirname(torch.__file__), *place) + os.sep
    for place in (("distributed",), ("autograd",), ("nn", "parallel"))
)


def waits_for_ever(has_left: Callable[[], bool]) -> bool:
    """Watches the main thread after its group was cut; for another thread.

    Args:
        has_left: Whether it has left the group.

    Returns:
        Whether it has stood still in a collective or a backward pass for :data:`~.deadlines.STUCK_AFTER_S`, and the
        process has computed nothing meanwhile; false as soon as it has left.
    """
    since, used, place = time.monotonic(), _computed_s(), _place()
    while not has_left():
        time.sleep(_POLL_S)
        now, uses, is_at = time.monotonic(), _computed_s(), _place()
        if is_at is None or is_at != place or uses - used > _IDLE_SHARE * (now - since) + _POLL_S:
            since, used, place = now, uses, is_at
        elif now - since >= STUCK_AFTER_S:
            return True
    return False


def _computed_s() -> float:
    """Seconds of CPU that this process has used, and those that its main thread has waited for a core."""
    try:
        waited_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a kernel that does not count them
        waited_ns = 0
    return time.process_time() + waited_ns / 1e9


def _place() -> tuple[int, int] | None:
    """Where the main thread is in Python, if it is inside of torch's own communication or backward pass."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(_PLACES):
        return None
    return id(frame), frame.f_lasti
