"""Runs work in a daemon thread and returns its result; unlike an executor's thread, it does not delay process exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # the built-in one only from Python 3.11 on
from typing import TypeVar

__all__ = ["NoAnswer", "in_daemon_thread"]

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str | None = None) -> Future[T]:
    """Starts ``work`` in a new daemon thread.

    Args:
        work: The function to run.
        name: The thread's name, shown in stacks.

    Returns:
        A future with the result or the error of ``work``; ``result(seconds)`` raises :class:`NoAnswer` if ``work`` has
        not ended in time.
    """
    future: Future[T] = Future()
    pending = [work]

    def run() -> None:
        try:
            future.set_result(pending.pop()())  # pop(): the ending thread must keep no reference to the work
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
