"""Guards a process against C++ threads that enter Python while it forks or ends; a forked child lacks these threads.

gloo's threads enter Python after most collectives, to release Python objects, usually within microseconds. Lightning
and this package run collectives just before an epoch starts its data-loader workers, and at the end of a fit.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import time

_PASSED_WITHIN_S = 0.01

HAS_FORK_DEADLOCK: bool = sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 10)
"""Whether a fork can deadlock: a child that is forked while a thread enters Python waits for a lock that no thread
holds any more, before it runs any Python code, so a data-loader worker never delivers. Seen about once in 6,000 forks
on a busy machine. Source: https://github.com/python/cpython/issues/112275."""


def let_native_threads_pass() -> None:
    """Waits 10 ms, so that C++ threads that are about to enter Python do so now; only with a process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(_PASSED_WITHIN_S)


@functools.cache
def guard() -> None:
    """Makes this process wait for such threads before it forks and before it ends. The second call does nothing."""
    # When a process group is garbage-collected, it waits for its threads. A data-loader worker does not have these
    # threads and would hang, so a child must never collect objects that it has inherited from its parent.
    os.register_at_fork(after_in_child=gc.freeze)
    if HAS_FORK_DEADLOCK:
        os.register_at_fork(before=let_native_threads_pass)
    # If a thread enters Python while the interpreter ends, Python ends this thread, and that aborts the process:
    # "terminate called without an active exception", SIGABRT. A launcher would then restart all ranks, although their
    # training has finished.
    atexit.register(let_native_threads_pass)
