"""Times of the launcher that must fit each other, in seconds; ``tests/test_deadlines.py`` holds how. No torch.

After SIGTERM the workers have the grace period. The elastic launcher ends what is left ``TERM_MARGIN_S`` later, and the
launch ends both ``KILL_MARGIN_S`` after the grace period.

A launch that decides for others shows that it lives by a beat. The others give up long after several beats, since
storage that nodes share may show a file late.
"""

from __future__ import annotations

TERM_MARGIN_S = 5.0
"""From the end of the grace period until the elastic launcher ends its workers."""

KILL_MARGIN_S = 20.0
"""From the end of the grace period until the launch ends all its processes."""

LEFTOVERS_PATIENCE_S = 5.0
"""From SIGTERM to SIGKILL for what the workers have left."""

CHECK_NODES_EVERY_S = 2.0
"""How often a launch of several nodes looks whether its workers must go."""

ENDED_WITHIN_S = 15.0
"""For how long a worker that the launch is about to end waits for that, instead of running the script."""

OTHERS_END_WITHIN_S = 30.0
"""How long the first node waits for the others' workers to end, and they for theirs once the run is over."""

BEAT_INTERVAL_S = 5.0
"""How often the record of a launch, and the first node's decision, moves."""

DEAD_AFTER_BEATS = 2.5
"""A launch whose record has not moved for so many intervals is dead."""

OWNER_LOST_AFTER_S = 120.0
"""The other nodes end when the first node's decision has not moved for so long."""

FIRST_NODE_WITHIN_S = 600.0
"""How long the other nodes wait for the first node to begin; a scheduler may start it minutes later."""

DEFAULT_GRACE_PERIOD_S = 600.0
"""From the signal that asks a process to stop to its end; KempnerForge's shutdown deadline."""

SECOND_SIGNAL_AFTER_S = 2.0
"""A repetition within this time is the same request delivered twice: under Slurm both the scheduler and the launcher
send SIGTERM to a worker. A later one means "now"."""

LAST_WORDS_WITHIN_S = 3.0
"""How long an interrupted process that is out of time may take to write why; storage may not answer."""

EXITS_WITHIN_S = 5.0
"""From the end of the grace period until C code ends a process in which Python does not come to its turn."""

DATA_WORKERS_END_WITHIN_S = 5.0
"""How long the data-loader workers of an interrupted process may take to end; torch's own patience."""

WORKERS_STOP_TIMEOUT_S = 15
"""How long the survivors of a failed worker may take to end before NVRx kills them and restarts the group."""

DIAGNOSIS_MARGIN_S = 15.0
"""How much later than ours NVRx's limits are: the watchdog explains and ends a hang first, NVRx what is left of it."""

NVRX_ANSWERS_WITHIN_S = 5.0
"""How long a rank waits for NVRx's launcher or rank monitor, which may be stopped."""

STORE_WITHIN_S = 60.0
"""How long an operation on the store of a one-node rendezvous may take."""
