"""Threads of C++, which a forked child does not have, and which enter Python while it is forked and while it ends.

gloo's threads do so after most collectives, to drop what Python had given them; usually within microseconds. Lightning
and this package have collectives just before an epoch starts its data-loader workers, and at the end of a fit.
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
"""A child that is forked while a thread enters Python waits for a lock that nobody holds any more, before it has come
to any Python: a data-loader worker never delivers. Seen about once in 6,000 forks on a busy machine.
Source: https://github.com/python/cpython/issues/112275."""


def let_native_threads_pass() -> None:
    """Lets threads of C++ that are about to enter Python do so now, if this process has any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(_PASSED_WITHIN_S)


@functools.cache
def guard() -> None:
    """Has this process wait for such threads before it is forked and before it ends. The second call does nothing."""
    # A process group that has become garbage waits for its threads where it is collected. In a data-loader worker they
    # are not, and it would hang: what it has got from its parent is not its to collect.
    os.register_at_fork(after_in_child=gc.freeze)
    if HAS_FORK_DEADLOCK:
        os.register_at_fork(before=let_native_threads_pass)
    # A thread that enters Python while it ends is ended by it, and takes the process along: "terminate called without
    # an active exception", SIGABRT. A launcher would start all ranks again, after their training has finished.
    atexit.register(let_native_threads_pass)
