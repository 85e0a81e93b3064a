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
