"""Work in a daemon thread, with its result. Unlike an executor, it does not delay the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # the built-in one only from Python 3.11 on
from typing import TypeVar

__all__ = ["NoAnswer", "in_daemon_thread"]

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str | None = None) -> Future[T]:
    """Starts ``work`` in a thread of its own.

    Args:
        work: What to do.
        name: Of the thread, for who looks at a stack.

    Returns:
        What ``work`` returns or raises; ``result(seconds)`` raises :class:`NoAnswer` if that is not there in time.
    """
    future: Future[T] = Future()
    pending = [work]

    def run() -> None:
        try:
            future.set_result(pending.pop()())  # who waits for it finds nothing of it kept alive by a thread that ends
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
