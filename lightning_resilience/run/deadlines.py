"""Times that bound waits, in seconds; ``tests/test_deadlines.py`` checks how they must fit together. No torch.

After SIGTERM the workers have the grace period. The elastic launcher ends the remaining workers ``TERM_MARGIN_S`` after
it, and the launch ends the workers and the elastic launcher ``KILL_MARGIN_S`` after it.

A launch that decides for other nodes shows by a beat that it lives. The other nodes give up long after several beats,
since shared storage may show a file late.

A watchdog polls the ranks of its node. It probes a rank that is overdue, waits for the evidence of other nodes, and has
a deadline for every call to storage. It beats like a launch, and the ranks replace a watchdog that has stalled.
"""

from __future__ import annotations

TERM_MARGIN_S = 5.0
"""From the end of the grace period until the elastic launcher ends its workers."""

KILL_MARGIN_S = 20.0
"""From the end of the grace period until the launch ends all its processes."""

LEFTOVERS_PATIENCE_S = 5.0
"""From SIGTERM to SIGKILL for processes that the workers have left."""

CHECK_NODES_EVERY_S = 2.0
"""How often a launch of several nodes looks whether its workers must go."""

ENDED_WITHIN_S = 15.0
"""How long a worker waits that the launch is about to end, instead of running the script."""

OTHERS_END_WITHIN_S = 30.0
"""How long the first node waits for the workers of other nodes to end, and other nodes for their own after the run."""

BEAT_INTERVAL_S = 5.0
"""How often the counter in the record of a launch, and in the first node's decision, is advanced."""

DEAD_AFTER_BEATS = 2.5
"""A launch is dead if its record has not changed for this many intervals."""

OWNER_LOST_AFTER_S = 120.0
"""The other nodes end when the first node's decision has not changed for this long."""

FIRST_NODE_WITHIN_S = 600.0
"""How long the other nodes wait for the first node to begin; a scheduler may start it minutes later."""

DEFAULT_GRACE_PERIOD_S = 600.0
"""From the signal that asks a process to stop until its end; the same as KempnerForge's shutdown deadline."""

SECOND_SIGNAL_AFTER_S = 2.0
"""A signal repeated within this time is the same request delivered twice: under Slurm both the scheduler and the
launcher send SIGTERM to a worker. A later repetition means "now"."""

LAST_WORDS_WITHIN_S = 3.0
"""How long an interrupted process that is out of time may take to write the reason; storage may not answer."""

EXITS_WITHIN_S = 5.0
"""From the end of the grace period until C code ends a process in which no Python code can run."""

DATA_WORKERS_END_WITHIN_S = 5.0
"""How long the data-loader workers of an interrupted process may take to end; torch's own limit."""

WORKERS_STOP_TIMEOUT_S = 15
"""How long the survivors of a failed worker may take to end before NVRx kills them and restarts the group."""

DIAGNOSIS_MARGIN_S = 15.0
"""How much longer NVRx's limits are than ours: the watchdog explains and ends a hang first, NVRx then ends the rest."""

NVRX_ANSWERS_WITHIN_S = 5.0
"""How long a rank waits for NVRx's launcher or rank monitor, which may be stopped."""

STORE_WITHIN_S = 60.0
"""How long an operation on the store of a one-node rendezvous may take."""

# -- the watchdog ------------------------------------------------------------------------------------------------------

WATCHDOG_STARTS_WITHIN_S = 60.0
"""How long a rank waits for the watchdog that it starts."""

FIRST_STARTS_WATCHDOG_WITHIN_S = 5.0
"""How long the other ranks of a node leave the start of the watchdog to the first rank."""

FIRST_RANK_WITHIN_S = 60.0
"""A watchdog ends if no rank has registered within this time."""

WATCHDOG_POLL_S = 0.2
"""How often a watchdog reads the progress of its ranks: a hang is found within its timeout plus this time."""

FROZEN_AFTER_S = 2.0
"""If the watchdog itself pauses for longer, the whole node or job has paused: the time does not count for the ranks."""

SUSPENDED_FROM_S = 1.0
"""Ranks that are stopped (from their terminal) and have not advanced for this long count as suspended."""

CHECK_ACTIVITY_EVERY_S = 60.0
"""How often, at least, the watchdog reads the CPU time and IO of a rank outside of a fit."""

WATCHDOG_BEAT_S = 1.0
"""How often a watchdog shows that it works."""

KEEP_TIME_EVERY_S = 30.0
"""How often, at least, a watchdog saves its ranks' time accounts: at most this much time is lost if it is killed."""


def keep_time_after(age_s: float) -> float:
    """Seconds after which a watchdog saves the time accounts again: at first after a tenth of the ranks' age.

    Args:
        age_s: Seconds for which it has watched these ranks.
    """
    return min(KEEP_TIME_EVERY_S, max(age_s / 10, 1.0))


WATCHDOG_FAILS_FOR_S = 30.0
"""A watchdog ends if all its checks have failed for this long."""

WATCHDOG_STALLED_AFTER_S = 120.0
"""A watchdog without a beat for this long is replaced; handling a hang or a loss takes less."""

LOG_WITHIN_S = 1.0
"""How long a watchdog waits at its end for its log to be written."""

STORAGE_WITHIN_S = 3.0
"""How long one call of the watchdog to shared storage may take."""

BUSY_OVER_S = 0.25
"""How long a rank is watched to see whether it is busy; the kernel counts CPU time in ticks of 10 ms."""

WRITES_OVER_S = 1.0
"""How long a rank that saves is watched; longer than one write call to slow storage may take."""

STACKS_WITHIN_S = 0.5
"""How long a rank may take to write its stacks."""

ANSWER_WITHIN_S = 1.0
"""How long a rank's worker server may take for one answer."""

CHECK_CASES_EVERY_S = 1.0
"""How often a watchdog checks whether another node has found a hang or lost a rank."""

OTHER_NODES_PROBE_WITHIN_S = 5.0
"""How long the node of rank 0 waits for the evidence of other nodes; they wait twice as long for its verdict."""

CHECK_VERDICT_EVERY_S = 0.25
"""How often the other nodes check for the verdict."""

ALL_KILLED_WITHIN_S = 0.3
"""From the first death to the last, if all ranks are ended from outside."""

PEERS_RAISE_WITHIN_S = 2.0
"""How long computing ranks that have lost a peer may take to raise or to begin a save; with gloo they raise."""

FAILED_RANK_ENDS_WITHIN_S = 5.0
"""How long a rank that has failed may take to end; its peers raise after its end."""

CHECK_SURVIVORS_EVERY_S = 0.3
"""How often the survivors are probed. A survivor that has done nothing since sleeps or waits forever, and is ended."""

SURVIVORS_SAVE_WITHIN_S = 30.0
"""How long survivors may take to write, such as a checkpoint; launchers do not wait longer."""

HUNG_RANK_EXITS_WITHIN_S = 0.5
"""From the exit signal to SIGKILL, and again from SIGKILL to the end of the process."""

LONGEST_PING_S = 1800.0
"""The deadline of a ping of all ranks if a step has no limit; torch's own timeout."""

# -- launch --elastic --------------------------------------------------------------------------------------------------

LOSS_CONFIRMED_WITHIN_S = 10.0
"""How long a rank whose communication has failed waits for the supervisor to report which rank was lost."""

OWN_ERROR_RAISED_AFTER_S = 0.5
"""The same wait after any other error, which may be a consequence: the supervisor notices a death in milliseconds."""

SURVIVORS_LEAVE_WITHIN_S = 30.0
"""How long survivors may take to leave the fit; this includes some seconds for a local save in progress."""

TRAINS_BEFORE_OTHERS_COME_S = 1.0
"""How long ranks that have reentered their fit train before others are admitted: two changes in a row are one pause."""

IMPORTS_STAND_STILL_FOR_S = 3.0
"""How long imports of processes that no rank waits for stand still while ranks reenter their fit."""

IMPORTS_GO_ON_AFTER_S = 0.2
"""From the reentry of all ranks until these imports continue: time for a first step."""

OPENED_WITHIN_S = 10.0
"""How long such an importing process waits for its launcher, which may be stopped."""

NEXT_BOUNDARY_WITHIN_S = 10.0
"""How long ranks may take to reach one boundary when other ranks come back, or leave with their node."""

SAVED_TOGETHER_WITHIN_S = 60.0
"""How long they may then take to save there. A node that was told to stop often has no more time than that."""

STUCK_AFTER_S = 5.0
"""How long a survivor may stand still in a collective of its group after the group was cut. An attempt to connect to a
closed store takes 3 s."""

STUCK_IN_BACKWARD_AFTER_S = 1.0
"""The same limit in a backward pass, where the survivor connects to nothing."""

SURVIVORS_FOUND_WITHIN_S = 5.0
"""How much of :data:`SURVIVORS_LEAVE_WITHIN_S` survivors may take until each has reported its boundary."""

LAST_BOUNDARY_SAVED_WITHIN_S = 10.0
"""How much of :data:`SURVIVORS_LEAVE_WITHIN_S` survivors may take to save the state of the last boundary."""

ABORTED_WITHIN_S = 10.0
"""How long the abort of the collectives of a device may take."""

DEVICE_ANSWERS_WITHIN_S = 10.0
"""How long the device may take after the abort to finish its queued work."""

REPLACED_WITHIN_S = 300.0
"""How long the start of a replacement may take, up to its first batch; after that the launcher restarts all ranks."""

NEWCOMERS_GATHER_WITHIN_S = 5.0
"""How long a joining rank waits for other joining ranks, so that all of them are admitted at once."""

WATCHDOG_PUT_OFF_S = 1.0
"""How much later the watchdog starts when a rank is replaced. The ranks train again before that, and the start would
take a quarter of a second of CPU time from them."""

DIE_TOGETHER_WITHIN_S = 0.02
"""Deaths within this time are one loss."""

HUNG_DIE_TOGETHER_WITHIN_S = 0.25
"""The same for ranks that a watchdog has ended: it signals all hung ranks, and one may take longer to end."""

NODE_BEAT_S = 2.0
"""How often the supervisors of two nodes show each other that they live."""

NODE_SILENT_AFTER_S = 30.0
"""A node that has sent nothing for this long is lost."""

NODES_AWAITED_S = 60.0
"""How long a run that has a saved state, and may train without some nodes, waits for them before it begins."""

STOP_REACHES_ALL_WITHIN_S = 3.0
"""If several nodes are told to stop, the signal reaches the last node at most this long after the first."""

STOP_IS_DECIDED_WITHIN_S = STOP_REACHES_ALL_WITHIN_S + 7.0
"""With several nodes: from a signal to a rank until its launch, which got it too, has reported which ranks stop."""

FIRST_NODE_STILL_AFTER_S = 30.0
"""A node that has lost the connection to the first node gives up when the first node's plan has not changed for this
long."""

NODE_JOINS_WITHIN_S = 10.0
"""How long a node may take to prove that it belongs to the run."""

WORDS_HEARD_WITHIN_S = 0.5
"""How long a node waits for the last messages of ranks that have ended."""
