"""The exit codes of a run's processes and what they mean. No torch, no Lightning.

The two exit codes of Megatron are kept, since its users' scripts know them.
"""

from __future__ import annotations

import signal

FINISHED = 0
FAILED = 1
USAGE = 2
"""The command line is invalid; argparse's code."""

TRY_ELSEWHERE = 16
"""Megatron's code: a bad step was bad again, and should be tried on other devices."""

RERUN_FAILED = 17
"""Megatron's code: a bad step was tried on other devices, and is bad there too."""

HUNG: int = getattr(signal, "SIGRTMIN", 34) + 10
"""A rank that its watchdog has ended: 44 on Linux. It is the number of the signal that ends the rank: the handler is
the C function ``_exit``, which gets that number as its argument."""

TOO_SLOW = 45
"""A rank that has ended because it was slower than the other ranks, so that it is replaced."""

INTERRUPTED = 75
"""``EX_TEMPFAIL`` of sysexits.h: the run has stopped, and the same command resumes it."""

OF_LAUNCH = {
    FINISHED: "the run has finished",
    INTERRUPTED: "interrupted (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2), or the first of several nodes is lost; the "
    "same command resumes the run",
    FAILED: "failed: the budget is spent, the launch could not begin, or another launch has taken over the run; the "
    "last line gives the reason",
    TRY_ELSEWHERE: "failed, and a bad step must be retried on other devices (NaNGuard with a rerun)",
    RERUN_FAILED: "failed: a bad step was tried again, on other devices or from an older checkpoint, and is still bad",
}
"""The meaning of each exit code of ``launch``."""

BATCH_JOB = {
    f"{FINISHED}: finished": "ends with 0 (`COMPLETED`)",
    f"{INTERRUPTED}: a preemption, the time limit, or a signal": "is requeued; this costs no job retry",
    f"{INTERRUPTED}: its restarts are used up, and a job retry is left": "is requeued: a retry is a new job, perhaps "
    "on other nodes",
    f"{FAILED}, {USAGE}, {TRY_ELSEWHERE}, {RERUN_FAILED}: failed or refused": "ends with the same code (`FAILED`), "
    "with the reason in its output",
    "nothing: it was killed, or a node was lost": "is requeued",
    "anything, after a manual `scancel`": "stays `CANCELLED`",
}
"""What happens to a batch job after ``launch`` on its first node has ended."""

OF_VERDICT = (TRY_ELSEWHERE, RERUN_FAILED)
"""The exit codes by which a fit makes ``launch`` end."""
