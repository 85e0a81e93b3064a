"""Times that bound waits, in seconds; ``tests/test_deadlines.py`` checks how they must relate. No torch.

After SIGTERM the workers have the grace period. The elastic launcher ends what is left ``TERM_MARGIN_S`` later, and the
launch ends both ``KILL_MARGIN_S`` after the grace period.

A launch that decides for others shows that it lives by a beat. The others give up long after several beats, since
storage that nodes share may show a file late.

A watchdog polls the ranks of its node. It probes a rank that is overdue, waits for the evidence of other nodes, and has
a deadline for every call to storage. It beats like a launch, and the ranks replace one that has stalled.
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

# -- the watchdog ------------------------------------------------------------------------------------------------------

WATCHDOG_STARTS_WITHIN_S = 60.0
"""How long a rank waits for the watchdog that it starts."""

FIRST_STARTS_WATCHDOG_WITHIN_S = 5.0
"""How long the other ranks of a node leave its start to the first."""

FIRST_RANK_WITHIN_S = 60.0
"""A watchdog ends if no rank has registered for so long."""

WATCHDOG_POLL_S = 0.2
"""How often a watchdog reads the progress of its ranks: a hang is found within its timeout and this."""

FROZEN_AFTER_S = 2.0
"""A pause of the watchdog that is longer was one of the whole node or job, and is no time of the ranks."""

SUSPENDED_FROM_S = 1.0
"""Ranks that were stopped at their terminal, and have not advanced for so long, are suspended."""

CHECK_ACTIVITY_EVERY_S = 60.0
"""How often, at least, the CPU time and IO of a rank outside of a fit is read."""

WATCHDOG_BEAT_S = 1.0
"""How often a watchdog shows that it works."""

KEEP_TIME_EVERY_S = 30.0
"""How often, at least, a watchdog keeps what its ranks have spent their time on: as much is lost if it is killed."""


def keep_time_after(age_s: float) -> float:
    """After how many seconds it keeps the time again: of ranks that have not lived long, a tenth of it is much.

    Args:
        age_s: How long it has watched these ranks.
    """
    return min(KEEP_TIME_EVERY_S, max(age_s / 10, 1.0))


WATCHDOG_FAILS_FOR_S = 30.0
"""A watchdog of which all checks have failed for so long ends."""

WATCHDOG_STALLED_AFTER_S = 120.0
"""A watchdog without a beat for so long is replaced; a case takes less."""

LOG_WITHIN_S = 1.0
"""How long a watchdog waits at its end for its log."""

STORAGE_WITHIN_S = 3.0
"""For one call of the watchdog to shared storage."""

BUSY_OVER_S = 0.25
"""For how long a rank is watched to see whether it is busy; the kernel counts CPU time in ticks of 10 ms."""

WRITES_OVER_S = 1.0
"""The same of one that saves; longer than one call that writes to slow storage may take."""

STACKS_WITHIN_S = 0.5
"""How long a rank may take to write its stacks."""

ANSWER_WITHIN_S = 1.0
"""How long a rank's worker server may take for one answer."""

CHECK_CASES_EVERY_S = 1.0
"""How often a watchdog checks whether another node has found a hang or lost a rank."""

OTHER_NODES_PROBE_WITHIN_S = 5.0
"""How long the node of rank 0 waits for the evidence of the others; they wait twice as long for its verdict."""

CHECK_VERDICT_EVERY_S = 0.25
"""How often they check for it."""

ALL_KILLED_WITHIN_S = 0.3
"""From one death to the others, where all ranks are ended from outside."""

PEERS_RAISE_WITHIN_S = 2.0
"""How long ranks that have lost a peer, and compute, may take to raise or to begin a save; gloo's raise."""

FAILED_RANK_ENDS_WITHIN_S = 5.0
"""How long a rank that has failed may take to end; its peers raise when it has."""

CHECK_SURVIVORS_EVERY_S = 0.3
"""How often they are looked at. One that has done nothing meanwhile sleeps, or waits for ever, and is ended."""

SURVIVORS_SAVE_WITHIN_S = 30.0
"""How long they may take to write, such as a checkpoint; launchers do not wait any longer."""

HUNG_RANK_EXITS_WITHIN_S = 0.5
"""From the exit signal to SIGKILL, and how long that may take."""

LONGEST_PING_S = 1800.0
"""The deadline of a ping of all ranks where a step has no limit; torch's own."""

# -- launch --elastic --------------------------------------------------------------------------------------------------

LOSS_CONFIRMED_WITHIN_S = 10.0
"""How long a rank whose communication has failed waits for the supervisor to say who was lost."""

OWN_ERROR_RAISED_AFTER_S = 0.5
"""The same after any other error: it may be a consequence, and the supervisor notices a death within milliseconds."""

SURVIVORS_LEAVE_WITHIN_S = 30.0
"""How long survivors may take to leave the fit: a local save that is being written is given some seconds."""

TRAINS_BEFORE_OTHERS_COME_S = 1.0
"""How long ranks that are in their fit again train before others are taken in: two changes in a row are one pause."""

IMPORTS_STAND_STILL_FOR_S = 3.0
"""How long imports that nobody waits for stand still while ranks go back to their fit."""

IMPORTS_GO_ON_AFTER_S = 0.2
"""From there on: time for a first step."""

OPENED_WITHIN_S = 10.0
"""How long a process that imports waits for its launcher then, which may be stopped."""

NEXT_BOUNDARY_WITHIN_S = 10.0
"""How long ranks may take of it to come to one boundary when others come back."""

STUCK_AFTER_S = 5.0
"""How long a survivor may stand still in a collective of its group after that was cut. An attempt to connect to a store
that is closed takes 3 s."""

STUCK_IN_BACKWARD_AFTER_S = 1.0
"""The same in a backward pass, where it does not connect to anything."""

SURVIVORS_FOUND_WITHIN_S = 5.0
"""How long they may take of it until each has said at which boundary it is."""

LAST_BOUNDARY_SAVED_WITHIN_S = 10.0
"""How long they may take of it to save the state of the last boundary."""

ABORTED_WITHIN_S = 10.0
"""How long the abort of the collectives of a device may take."""

DEVICE_ANSWERS_WITHIN_S = 10.0
"""How long the device may take after it, with what it was given before."""

REPLACED_WITHIN_S = 300.0
"""How long the start of a replacement may take, up to its first batch; then all ranks are restarted."""

NEWCOMERS_GATHER_WITHIN_S = 5.0
"""How long a newcomer waits at the door for the others that are on their way, so that all are taken in at once."""

WATCHDOG_PUT_OFF_S = 1.0
"""How much later the watchdog starts where a rank is replaced. The ranks are back before that, and its start would take
a quarter of a second of CPU time from them."""

DIE_TOGETHER_WITHIN_S = 0.02
"""Deaths within this time are one loss."""

HUNG_DIE_TOGETHER_WITHIN_S = 0.25
"""The same for ranks that a watchdog has ended: it has signalled all that hang, and one may take longer to end."""

NODE_BEAT_S = 2.0
"""How often the supervisors of two nodes show each other that they live."""

NODE_SILENT_AFTER_S = 30.0
"""A node of which nothing was heard for so long is lost."""

NODES_AWAITED_S = 60.0
"""How long a run that has a state, and may go on without some nodes, waits for these before it begins without them."""

STOP_REACHES_ALL_WITHIN_S = 3.0
"""Of several nodes that are told to stop, the last one hears of it so much later than the first at most."""

STOP_IS_DECIDED_WITHIN_S = STOP_REACHES_ALL_WITHIN_S + 7.0
"""After a signal to a rank of several nodes its launch, which has got it, too, has said who stops."""

FIRST_NODE_STILL_AFTER_S = 30.0
"""A node that has lost the first one looks for it as long as its decision has moved in so much time."""

NODE_JOINS_WITHIN_S = 10.0
"""How long a node may take to prove that it belongs to the run."""

WORDS_HEARD_WITHIN_S = 0.5
"""How long the words of ranks are waited for that have ended."""
