"""Saves to node-local storage in the background: decides at which boundary to save, and runs the thread. No Trainer.

All ranks of a job save together, in rounds (``save_coordinator.py``). A single process saves when a save is due.

**The thread** of each rank waits for the next round (a blocking call, no polling), publishes the state of its boundary
on this node (``rank_state.py``), exchanges replicas, and finishes the round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_resilience._formatting import format_bytes
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint.devices import Standstill
from lightning_resilience.checkpoint.generations import RankLocation, rank_shard, replicated_shard
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.rank_state import Check, PendingShard, RankState, divergence_of
from lightning_resilience.checkpoint.replication import ReplicaError, Replicas
from lightning_resilience.checkpoint.safe_serialization import tensor_names
from lightning_resilience.checkpoint.save_coordinator import PlannedSave, SaveCoordinator, new_generation
from lightning_resilience.checkpoint.schedule import Schedule
from lightning_resilience.checkpoint.snapshot import Fence, Snapshot, Snapshots, wait_with_heartbeat
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.run.save_interval import WARM_UP_STEPS

log = logging.getLogger(__name__)

_AGREE_TIMEOUT_S = 20.0
"""Longest wait of a rank at a boundary for the other ranks to agree; it takes milliseconds unless a rank has died."""

_LAST_ROUND_S = 1.0
"""How long the end of a fit waits for other ranks to publish their shards."""

_LEAD_S = 0.02
"""How far ahead rank 0 announces a round: a message takes a millisecond, and the store serves one rank at a time."""
_LEAD_PER_RANK_S = 0.0002

_LEAST_STALL_S = 1e-4
"""The shortest stall of a save that can be measured."""
_STALLS = 3
"""The cost of a save is the shortest stall of this many saves: longer ones had other causes."""

_RETRY_S = 10.0
"""Longest wait of rank 0 for its own next step before it announces a new round, after a rank was late for the last."""


def _join(thread: threading.Thread, timeout_s: float) -> bool:
    thread.join(timeout_s)
    return not thread.is_alive()


@dataclass
class SaveStats:
    """Numbers and costs of the local saves of this rank.

    Attributes:
        published: Published saves.
        skipped: Saves that were due while the previous one was still being written.
        failed: Saves that failed on this rank.
        stall_s: How long the last save stopped the training, in seconds.
        save_s: From its boundary until the last save was complete, in seconds.
        shard_bytes: Size of this rank's shards, in bytes.
    """

    published: int = 0
    skipped: int = 0
    failed: int = 0
    stall_s: float = 0.0
    save_s: float = 0.0
    shard_bytes: int = 0


class Fallback(NamedTuple):
    """The newest generation before the loaded one.

    It is needed if the training diverges soon: then the loaded generation and those derived from it are marked bad.

    Attributes:
        name: Its name.
        until: It is kept until a generation of a step later than this is complete.
    """

    name: str
    until: int


@dataclass(frozen=True)
class Peers:
    """This rank's place in the job, and how it reaches the other ranks.

    Attributes:
        location: Location of this rank.
        kept_here: Ranks whose own shards this node keeps, replicas included.
        coordinator: Agrees on saves with the other ranks; ``None`` in a single process.
        replicas: Exchanges replicas with other nodes; ``None`` without replication.
    """

    location: RankLocation
    kept_here: Collection[int]
    coordinator: SaveCoordinator | None = None
    replicas: Replicas | None = None


@dataclass
class SaveHooks:
    """Functions that the local saves of a rank call.

    Attributes:
        published: Called from the thread with step and name of every complete generation.
        check_owner: Called before files are removed; raises if a newer attempt has taken over the run.
        check: Checks every state before it is published; see :meth:`.RankState.publish`.
        heartbeat: Called while the training thread waits; see :func:`~.snapshot.wait_with_heartbeat`.
        diverged: Called on rank 0, from the thread, when the replicated state differs between ranks.
    """

    published: Callable[[int, str], None] = lambda step, generation: None
    check_owner: Callable[[], None] = lambda: None
    check: Check | None = None
    heartbeat: Callable[[], None] = lambda: None
    diverged: Callable[[Divergence], None] = lambda divergence: None


class LocalSaves:
    """Runs the local saves of one rank in one fit.

    Args:
        store: Store of this node.
        peers: This rank's place in the job.
        identity: Identity fields that all shards of this fit have: run, fit, layout.
        schedule: When to save; the schedule of rank 0 decides.
        keep: Number of complete generations to keep.
        expected: Estimated bytes of this rank's shards, by name, for which memory is reserved ahead of the first save.
        device: Accelerator that the state is on; ``None`` for the host.
        hooks: See :class:`SaveHooks`.
    """

    def __init__(
        self,
        store: NodeStore,
        peers: Peers,
        identity: dict[str, Any],
        schedule: Schedule,
        keep: int,
        expected: Mapping[str, int] | None = None,
        device: torch.device | None = None,
        hooks: SaveHooks | None = None,
    ) -> None:
        self.stats = SaveStats()
        self._store = store
        self._location = peers.location
        self._kept_here = {rank_shard(each) for each in peers.kept_here}
        count = peers.location.shares
        self._kept_here.update(replicated_shard(i, count) for i in range(count))
        self._identity = identity
        self._schedule = schedule
        self._keep = keep
        self._coordinator = peers.coordinator
        self._lead_s = _LEAD_S + _LEAD_PER_RANK_S * peers.location.world_size
        self._replicas = peers.replicas
        self._stalls_s: deque[float] = deque(maxlen=_STALLS)
        self._complete: list[str] = []
        self._fallback: Fallback | None = None
        self._hooks = hooks or SaveHooks()
        self._expected = dict(expected or {})
        self._device = device
        self._at_boundary = self._begin_stall()
        self._snapshots = Snapshots()
        self._fence: Fence | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._planned: PlannedSave | None = None
        self._taken: RankState | None = None
        self._agreed: bool | None = None
        self._missed = False
        self._refused = False
        """Whether some rank was late for the last round, and this rank has not passed a boundary since."""
        self._busy = False
        self._writing = False
        self._passed = -1
        self._last = -1
        self._skipped_at = -1
        self._last_boundary = time.monotonic()
        self._step_s = 0.0
        self._steps_seen = 0
        self.thread_error: BaseException | None = None
        """The error that ended the thread."""
        self._last_failure = ""
        self._through_host = 0
        self._thread = threading.Thread(target=self._run, name="local-checkpoint", daemon=True)

    # -- the training thread -------------------------------------------------------------------------------------------

    def start(self, step: int, complete: Sequence[str] = (), fallback: Fallback | None = None) -> None:
        """Starts the thread; the first save is later than ``step``.

        Args:
            step: ``trainer.global_step``.
            complete: Names of the generations that are already complete, newest first.
            fallback: The generation among them that must not be retired soon.
        """
        self._complete, self._fallback = list(complete), fallback
        self._last = self._passed = step
        self._fence = Fence(self._hooks.heartbeat)
        self._schedule.start(step)
        self._busy = True
        self._thread.start()

    def costs(self) -> tuple[float, float] | None:
        """The costs of a save in seconds, ``None`` before the first one; see :class:`.ChosenInterval`."""
        if not self.stats.published:
            return None
        stall_s = min(self._stalls_s, default=0.0)
        # The messages of a round keep the store busy for about the time by which the round is announced ahead.
        return max(stall_s, _LEAST_STALL_S), self.stats.save_s + self._lead_s

    def wait_for_save(self, timeout_s: float) -> bool:
        """Waits at a boundary for the save in progress; returns whether it has ended."""
        with self._changed:
            return self._wait_for(lambda: not self._busy, timeout_s)

    def _begin_stall(self) -> Standstill:
        return Standstill([self._device] if self._device is not None else [])

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits in the training thread, with the lock held."""
        return wait_with_heartbeat(
            lambda seconds: self._changed.wait_for(condition, seconds), timeout_s, self._hooks.heartbeat
        )

    def rollback(
        self, step: int, complete: Sequence[str], identity: dict[str, Any], fallback: Fallback | None = None
    ) -> None:
        """Call it after the training has rolled back to an older state.

        Args:
            step: ``trainer.global_step`` of that state.
            complete: Names of the complete generations up to that step, newest first.
            identity: Identity fields of all shards from now on.
            fallback: See :meth:`start`.
        """
        self._identity = identity
        with self._changed:
            self._complete, self._fallback = list(complete), fallback
            self._last = self._passed = step
            self._skipped_at = -1
            self._last_boundary = time.monotonic()
        # Writes that torch does not count may have made the ranks diverge.
        self._snapshots.look_at_all()
        self._schedule.begin()

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> PlannedSave | None:
        """Call it at every boundary. If it returns a save, pass the state to :meth:`take`, or call :meth:`miss`.

        Args:
            step: ``trainer.global_step``.
            may_save: Whether this boundary can be saved.

        Raises:
            BaseException: The error that ended the thread.
        """
        if self.thread_error is not None:
            raise self.thread_error
        if self._coordinator is None:
            if not self._schedule.is_due(step, self._last) or not may_save():
                return None
            if self._busy:
                if step != self._skipped_at and self._schedule.every_n_train_steps is not None:
                    self.stats.skipped += 1
                self._skipped_at = step
                return None
            self._at_boundary = self._begin_stall()
            return PlannedSave(0, step, new_generation())
        with self._changed:
            if self._location.rank == 0 and step != self._passed:
                self._measure_steps(step)
            self._passed = step
            if self._refused:
                self._refused = False
                self._changed.notify_all()
            planned = self._planned
            if planned is None or step < planned.step or not may_save():
                return None
            self._at_boundary = self._begin_stall()
            self._wait_for(
                lambda: self._planned is not planned or self._agreed is not None or self.thread_error is not None,
                _AGREE_TIMEOUT_S,
            )
            if self._planned is not planned:  # some rank was late, and the next round may already be planned
                return None
            self._planned = None
            self._missed = self._agreed is None  # the round continues without this rank
            return planned if self._agreed else None

    def _measure_steps(self, step: int) -> None:
        now = time.monotonic()
        step_s = (now - self._last_boundary) / max(1, step - self._passed)
        self._last_boundary = now
        self._steps_seen += 1
        self._step_s += (step_s - self._step_s) / min(self._steps_seen, 10)
        if self._steps_seen == WARM_UP_STEPS:
            self._changed.notify_all()

    def take(
        self,
        planned: PlannedSave,
        step: int,
        state: Any,
        stable: Sequence[torch.Tensor],
        replicated: Sequence[torch.Tensor],
    ) -> list[str]:
        """Takes the state of this boundary, which the thread then saves.

        Args:
            planned: Return value of :meth:`at_boundary`.
            step: ``trainer.global_step``.
            state: This rank's checkpoint.
            stable: Tensors that do not change before the next optimizer step.
            replicated: Tensors that are the same on all ranks of this node.

        Returns:
            Names of state that cannot be saved.
        """
        assert self._fence is not None
        snapshot = self._snapshots.take(state, stable)
        taken = RankState(snapshot, step, planned.generation, self._location, replicated, self._identity)
        if (n := self._schedule.every_n_train_steps) is not None and self._coordinator is not None:
            self.stats.skipped += max(0, (step - self._last) // n - 1)
        self._schedule.begin()
        with self._changed:  # nothing fails from here on
            self._fence.pending = snapshot
            self._taken, self._last = taken, step
            self._busy = self._writing = True
            self._changed.notify_all()
        self._at_boundary.over()
        self._report_through_host(snapshot)
        return snapshot.left_out

    def _report_through_host(self, snapshot: Snapshot) -> None:
        nbytes = sum(snapshot.through_host.values())
        if nbytes > 2 * self._through_host and self._location.rank == 0:
            self._through_host = nbytes
            largest = max(snapshot.through_host, key=snapshot.through_host.__getitem__)
            log.warning(
                "Local checkpoints: %s of the state (largest: %s) may change before the optimizer step and do not fit "
                "in the copy buffer on %s; every save stops the device while it copies them to the host.",
                format_bytes(nbytes),
                tensor_names(snapshot.structure).get(largest, "a tensor"),
                self._device,
            )

    def miss(self, step: int, error: Exception) -> None:
        """Call it instead of :meth:`take` if the state could not be taken."""
        self.fail(step, error)
        with self._changed:
            self._last, self._missed = step, self._coordinator is not None
            self._busy = self._busy or self._missed
            self._changed.notify_all()
        self._schedule.begin()

    def save_now(
        self,
        generation: str,
        step: int,
        state: Any,
        stable: Sequence[torch.Tensor],
        replicated: Sequence[torch.Tensor],
        timeout_s: float,
        location: RankLocation | None = None,
    ) -> RankState | None:
        """Saves at once, outside the rounds.

        Args:
            generation: Name of the generation, the same on all ranks.
            step: See :meth:`take`.
            state: See :meth:`take`.
            stable: See :meth:`take`.
            replicated: See :meth:`take`.
            timeout_s: Limit in seconds, since storage may hang.
            location: Location of the rank of this node whose state it is; default: of this rank.

        Returns:
            The published state. The shards of all ranks belong together only if its digest of the replicated tensors is
            the same on all ranks that should hold the same. ``None`` if this rank did not publish its shards in time.
        """
        deadline = time.monotonic() + timeout_s
        self.fence()
        if not self.wait_for_save(timeout_s):
            return None
        snapshot = self._snapshots.take(state, stable)
        snapshot.release()  # this is the training thread, so nothing changes before the fence
        snapshot.fence()
        taken = RankState(snapshot, step, generation, location or self._location, replicated, self._identity)
        published: list[RankState] = []

        def save() -> None:
            try:
                if self._save(taken):
                    published.append(taken)
            except Exception as error:
                self.fail(step, error)

        thread = threading.Thread(target=save, name="local-checkpoint-now", daemon=True)
        thread.start()
        wait_with_heartbeat(lambda s: _join(thread, s), max(0.0, deadline - time.monotonic()), self._hooks.heartbeat)
        if not published:
            snapshot.drop()  # it may still be copied, and the training continues
        return published[0] if published else None

    @property
    def sees_writes(self) -> bool:
        """Whether the training writes tensors that were passed as ``stable`` at other times than in optimizer steps."""
        return self._snapshots.sees_writes

    def fence(self) -> None:
        """Call it before the training changes tensors that were passed as ``stable``. Free if no copy is pending."""
        if self._fence is not None:
            self._fence.now()

    def stop(self, timeout_s: float, peer_is_lost: bool = False) -> None:
        """Stops the thread.

        Args:
            timeout_s: Seconds to wait for a save in progress to be published on this node.
            peer_is_lost: Whether a rank is lost, so that the other ranks cannot end their round. The published shards
                still make a generation; this waits only for copies that may be on their way to other nodes.
        """
        self.fence()
        with self._changed:
            self._wait_for(lambda: not self._writing, timeout_s)
            if self._replicas is not None or not peer_is_lost:
                self._wait_for(lambda: not self._busy, _LAST_ROUND_S)  # after a failure the round may never end
            self._stopping = True
            self._changed.notify_all()
        if self._coordinator is not None:
            self._coordinator.end()
        if self._fence is not None:
            self._fence.remove()
        if self._thread.ident is not None and not wait_with_heartbeat(
            lambda seconds: _join(self._thread, seconds), timeout_s, self._hooks.heartbeat
        ):
            log.warning("Rank %d: abandoning the local save in progress: it is stuck.", self._location.rank)

    # -- the saving thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        try:
            self._retire()
            self._prepare()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if self._coordinator is not None:
                self._coordinator.be_ready(-1)
            while not self._stopping and not (self._coordinator is not None and self._coordinator.over):
                planned = None
                if self._coordinator is not None and (planned := self._plan(self._coordinator, number)) is None:
                    continue
                taken = self._await_state() if planned is None or self._agreed else None
                if taken is not None or self._missed:
                    self._missed = False
                    self._round(taken, planned)
                if self._coordinator is not None and planned is not None:
                    self._coordinator.be_ready(number)
                    number += 1
        except BaseException as error:
            log.debug("The thread of the local saves failed.", exc_info=True)
            self.thread_error = error
        finally:
            with self._changed:
                if self._taken is not None:
                    self._taken.snapshot.release()
                self._busy = self._writing = False
                self._changed.notify_all()

    def _plan(self, coordinator: SaveCoordinator, number: int) -> PlannedSave | None:
        """Announces the next round on rank 0, receives it on other ranks; ``None`` if there is none yet."""
        if self._location.rank == 0:
            if not coordinator.all_are_ready(number - 1):
                return None
            with self._changed:
                # If a rank was late, it is ahead of this one: the same step, announced again, would be too late.
                self._changed.wait_for(lambda: not self._refused or self._stopping, _RETRY_S)
                if is_warm := self._steps_seen >= WARM_UP_STEPS:
                    lead = 1 + int(self._lead_s / max(self._step_s, 1e-4))
                    step = self._schedule.step_ahead(self._passed + lead)
                else:
                    step = None
                if step is None:
                    if not self._stopping:  # stop() has already notified
                        self._changed.wait(self._schedule.seconds_left() if is_warm else _RETRY_S)
                    return None
            coordinator.announce(PlannedSave(number, step, new_generation()))
        if (planned := coordinator.wait_for_plan(number)) is None:
            return None
        with self._changed:
            in_time = self._passed < planned.step
            if in_time:
                self._planned = planned
            self._agreed = None
        agreed = coordinator.agree(number, in_time)
        with self._changed:
            self._agreed = bool(agreed)
            if not agreed:
                self._planned, self._missed = None, False
                self._refused = self._location.rank == 0
            self._changed.notify_all()
        return planned

    def _await_state(self) -> RankState | None:
        with self._changed:
            self._changed.wait_for(lambda: self._taken is not None or self._missed or self._stopping)
            return self._taken

    def _round(self, taken: RankState | None, planned: PlannedSave | None) -> None:
        """Saves, replicates, finishes the round and retires old generations.

        Args:
            taken: ``None`` if this rank missed the boundary.
            planned: ``None`` in a single process.
        """
        started = time.monotonic()
        shards: list[PendingShard] = []
        if taken is not None:
            try:
                shards = self._save(taken)
            except Exception as error:  # a failed save must not end the training
                self.fail(taken.step, error)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
        if taken is not None and shards:
            self.stats.stall_s = self._at_boundary.seconds() + taken.snapshot.waited_s
            if self.stats.published:  # not the first save, which includes one-time work
                self._stalls_s.append(self.stats.stall_s)
        complete: bool | None = bool(shards)
        if self._coordinator is not None and planned is not None:
            step = taken.step if taken is not None else planned.step
            self._replicate(step, planned.generation, shards)
            digest = taken.replicated_digest() if taken is not None else ""
            complete = self._coordinator.finish(planned.number, bool(shards), digest)
            if complete is False and (self._coordinator.shards > 1 or self._identity["layout"].get("commons")):
                self._find_divergence(self._coordinator, planned.number, step, taken, digest)
        if taken is not None and complete:
            self._complete.insert(0, taken.generation)
            if self._fallback is not None and taken.step > self._fallback.until:
                self._fallback = None
            self.stats.published += 1
            self.stats.save_s = time.monotonic() - started
            self._schedule.adjust()
            self._hooks.published(taken.step, taken.generation)
        if complete is not None:
            self._retire()
            self._prepare()
        with self._changed:
            self._taken, self._busy = None, False
            self._changed.notify_all()

    def _find_divergence(
        self, coordinator: SaveCoordinator, number: int, step: int, taken: RankState | None, digest: str
    ) -> None:
        """Finds out whether a generation is incomplete because the replicated state differs between ranks."""
        written = taken.written() if taken is not None else []
        if (found := coordinator.compare(number, self._location.rank, digest, written)) is None:
            return
        digests, learned = found
        if taken is not None:
            taken.note_written(learned)
        if (divergence := divergence_of(step, digests, coordinator.shards)) is not None:
            self._hooks.diverged(divergence)

    def _replicate(self, step: int, generation: str, shards: Sequence[PendingShard]) -> None:
        """Exchanges rank shards with the partners on other nodes."""
        if self._replicas is None or self._replicas.broken:
            return
        own = next((shard for shard in shards if shard.name == rank_shard(self._location.rank)), None)
        writers: dict[int, ShardWriter] = {}

        def reserve(partner: int, nbytes: int) -> torch.Tensor:
            writers[partner] = self._store.reserve(rank_shard(partner), nbytes)
            return writers[partner].memory

        content, trailer = (None, b"") if own is None else (own.memory[: own.size], own.trailer)
        try:
            received = self._replicas.exchange(generation, content, trailer, reserve)
        except ReplicaError as error:
            received = error.received
            if not self._stopping:
                log.error(
                    "Rank %d: the local checkpoint of step %d is not fully replicated to other nodes: %s.%s",
                    self._location.rank,
                    step,
                    error,
                    " Replication stays off until the next start." if self._replicas.broken else "",
                )
        for partner, writer in writers.items():
            if partner not in received:
                writer.abandon()
                continue
            try:
                writer.publish(step, generation, received[partner].numel(), b"")
            except (OSError, ValueError) as error:
                log.error("Rank %d: cannot store the replica of rank %d: %s", self._location.rank, partner, error)

    def _save(self, taken: RankState) -> list[PendingShard]:
        """Publishes this rank's shards and returns them; an empty list if the snapshot is invalid."""
        shards = taken.publish(self._store, self._hooks.check)
        if shards:
            self._last_failure = ""
            self._expected = {shard.name: shard.size for shard in shards}
            self.stats.shard_bytes = sum(shard.size + len(shard.trailer) for shard in shards)
        return shards

    def _prepare(self) -> None:
        """Allocates memory for the next save in advance: it is slow, and the optimizer step would wait for it."""
        with contextlib.suppress(OSError):  # the save itself reports missing space
            for name, nbytes in self._expected.items():
                self._store.reserve(name, nbytes, self._device).abandon()

    def _retire(self) -> None:
        location = self._location
        kept = self._complete[: self._keep]
        if self._fallback is not None and self._fallback.name in self._complete[self._keep :]:
            kept[-1] = self._fallback.name
        self._complete = kept
        own = {rank_shard(location.rank), replicated_shard(location.local_rank, location.shares)}
        if self._replicas is not None:
            own.update(rank_shard(partner) for partner in self._replicas.partners)

        def is_own(name: str) -> bool:
            # The first rank also removes shards that no rank of this node writes, such as from a fit with other ranks.
            return name in own or (location.local_rank == 0 and name not in self._kept_here)

        try:
            self._hooks.check_owner()
            self._store.retire(set(self._complete), is_own)
        except PeerLost:
            return  # another generation of ranks has begun; this thread may still have to save a state for it
        except OSError as error:
            log.warning("Rank %d: cannot remove old local checkpoints: %s", location.rank, error)

    def fail(self, step: int, error: BaseException) -> None:
        """Counts and logs a failed save."""
        self.stats.failed += 1
        # The same error is logged once, until a save succeeds.
        failure = f"{type(error).__name__} {error.errno}" if isinstance(error, OSError) else str(error)
        if failure != self._last_failure:
            self._last_failure = failure
            log.error(
                "Rank %d: the local checkpoint of step %d could not be saved (%s). Training continues; older local "
                "checkpoints remain.",
                self._location.rank,
                step,
                error,
            )
