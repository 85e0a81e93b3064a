"""Saves to node-local storage behind the training: which boundary, and the thread that does the work. No Trainer.

All ranks of a job save together, in rounds (``save_coordinator.py``). A single process saves when it is due.

**The thread** of each rank waits for the next round (a blocking call, no polling), has the state of its boundary
published on this node (``rank_state.py``), exchanges replicas, and settles the round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_resilience.checkpoint.capacity import format_bytes
from lightning_resilience.checkpoint.devices import Standstill
from lightning_resilience.checkpoint.generations import RankLocation, rank_shard, replicated_shard
from lightning_resilience.checkpoint.interval import Schedule
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.rank_state import Check, PendingShard, RankState, divergence_of
from lightning_resilience.checkpoint.replication import ReplicaError, Replicas
from lightning_resilience.checkpoint.safe_serialization import tensor_names
from lightning_resilience.checkpoint.save_coordinator import PlannedSave, SaveCoordinator, new_generation
from lightning_resilience.checkpoint.snapshot import Fence, Snapshot, Snapshots, wait_with_heartbeat
from lightning_resilience.detect.numerics.divergence import Divergence

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 20.0
"""How long a rank waits at a boundary to hear whether all save there. It is a few milliseconds, or a rank has died."""

_SETTLE_S = 1.0
"""How long a fit that ends waits for the other ranks to have published their parts too."""

_LEAD_S = 0.02
"""How far ahead rank 0 announces a round: a message takes a millisecond, and the store serves one rank at a time."""
_LEAD_PER_RANK_S = 0.0002
_STEPS_MEASURED = 3

_LOOK_AGAIN_S = 10.0
"""How long rank 0 waits for its own next step before it announces a round for which somebody was too late again."""


def _has_ended(thread: threading.Thread, within_s: float) -> bool:
    thread.join(within_s)
    return not thread.is_alive()


@dataclass
class Figures:
    """What the saves of this rank have cost so far.

    Attributes:
        published: Saves that this rank has published.
        skipped: Saves that were due while the one before was still being written.
        failed: Saves that could not be written, on this rank.
        stall_s: How long the training has stood still for the last one.
        save_s: From the boundary to the moment at which the last one was published.
        part_bytes: Size of this rank's parts.
    """

    published: int = 0
    skipped: int = 0
    failed: int = 0
    stall_s: float = 0.0
    save_s: float = 0.0
    part_bytes: int = 0


@dataclass
class SaveHooks:
    """What the local saves of a rank call.

    Attributes:
        published: Called from the thread with step and name of every generation that this rank knows to be complete.
        check_owner: Raises if a newer attempt has taken the run over; called before anything is removed.
        check: Checks every state before it is published; see :meth:`.RankState.publish`.
        heartbeat: Called from time to time while the training thread waits; see :func:`~.snapshot.wait_with_heartbeat`.
        diverged: Called on rank 0, from the thread, when ranks that should have saved the same state have not.
    """

    published: Callable[[int, str], None] = lambda step, generation: None
    check_owner: Callable[[], None] = lambda: None
    check: Check | None = None
    heartbeat: Callable[[], None] = lambda: None
    diverged: Callable[[Divergence], None] = lambda divergence: None


class LocalSaves:
    """The local saves of one rank in one fit.

    Args:
        store: Where the parts of this node are kept.
        locations: Where all ranks are.
        rank: This one.
        identity: Fields that all parts of this fit have: run, fit, layout.
        schedule: When to save; rank 0's decides.
        keep: How many complete generations are kept.
        coordinator: The messages between the ranks; ``None`` for a single process.
        replicas: Keeps copies on other nodes, if there are any.
        expected: About how many bytes which part of this rank will have. Memory that is new is slow to get, and the
            first save should not wait for it.
        kept_here: The ranks whose own parts this node keeps; default: those on it.
        device: The accelerator that the state is copied from; ``None`` for the host.
        hooks: What they call.
    """

    def __init__(
        self,
        store: NodeStore,
        locations: Sequence[RankLocation],
        rank: int,
        identity: dict[str, Any],
        schedule: Schedule,
        keep: int,
        coordinator: SaveCoordinator | None = None,
        replicas: Replicas | None = None,
        expected: Mapping[str, int] | None = None,
        kept_here: Collection[int] = (),
        device: torch.device | None = None,
        hooks: SaveHooks | None = None,
    ) -> None:
        self.figures = Figures()
        self._store = store
        self._location = locations[rank]
        count = self._location.local_world_size
        kept_here = kept_here or [location.rank for location in locations if location.node == self._location.node]
        self._kept_here = {rank_shard(each) for each in kept_here} | {replicated_shard(i, count) for i in range(count)}
        self._identity = identity
        self._schedule = schedule
        self._keep = keep
        self._coordinator = coordinator
        self._replicas = replicas
        self._complete: list[str] = []
        self._hooks = hooks or SaveHooks()
        self._expected = dict(expected or {})
        self._device = device
        self._at_boundary = self._stand_still()
        self._snapshots = Snapshots()
        self._fence: Fence | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._planned: PlannedSave | None = None
        self._taken: RankState | None = None
        self._agreed: bool | None = None
        self._missed = False
        self._refused = False
        """Whether some rank was too late for the last round, and this one has not moved on since."""
        self._busy = False
        self._writing = False
        self._passed = -1
        self._last = -1
        self._skipped_at = -1
        self._last_boundary = time.monotonic()
        self._step_s = 0.0
        self._steps_seen = 0
        self.trouble: BaseException | None = None
        """What has ended the thread before its time."""
        self._last_failure = ""
        self._through_host = 0
        self._thread = threading.Thread(target=self._run, name="local-checkpoint", daemon=True)

    # -- the training thread -------------------------------------------------------------------------------------------

    def start(self, step: int, complete: Sequence[str] = ()) -> None:
        """Begins to save.

        Args:
            step: ``trainer.global_step``; it is saved already, or is the first.
            complete: The generations that are complete already, newest first.
        """
        self._complete = list(complete)
        self._last = self._passed = step
        self._fence = Fence(self._hooks.heartbeat)
        self._retire()
        self._schedule.begin()
        self._busy = True
        self._thread.start()

    def settle(self, timeout_s: float) -> bool:
        """Waits until the save in progress has ended, at a boundary; returns whether it has."""
        with self._changed:
            return self._wait_for(lambda: not self._busy, timeout_s)

    def _stand_still(self) -> Standstill:
        return Standstill([self._device] if self._device is not None else [])

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits in the training thread, which holds the lock."""
        return wait_with_heartbeat(
            lambda seconds: self._changed.wait_for(condition, seconds), timeout_s, self._hooks.heartbeat
        )

    def go_on_from(self, step: int, complete: Sequence[str], identity: dict[str, Any]) -> None:
        """The training has gone back to an older state.

        Args:
            step: ``trainer.global_step`` of that state.
            complete: The generations that are complete and not newer, newest first.
            identity: Fields that all parts have from now on.
        """
        self._identity = identity
        with self._changed:
            self._complete = list(complete)
            self._last = self._passed = step
            self._skipped_at = -1
            self._last_boundary = time.monotonic()
        # If it was because ranks differ, what they differ in may have been written past torch's count.
        self._snapshots.look_at_all()
        self._schedule.begin()

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> PlannedSave | None:
        """Called at every boundary; returns the round for which the state has to be handed over to :meth:`take` now."""
        if self.trouble is not None:
            raise self.trouble
        if self._coordinator is None:
            if not self._schedule.is_due(step, self._last) or not may_save():
                return None
            if self._busy:
                if step != self._skipped_at and self._schedule.every_n_train_steps is not None:
                    self.figures.skipped += 1
                self._skipped_at = step
                return None
            self._at_boundary = self._stand_still()
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
            self._at_boundary = self._stand_still()
            self._wait_for(
                lambda: self._planned is not planned or self._agreed is not None or self.trouble is not None,
                _ANSWER_WITHIN_S,
            )
            if self._planned is not planned:  # not all have heard of it; and by now the next round may be planned
                return None
            self._planned = None
            self._missed = self._agreed is None  # then the round goes on without this rank
            return planned if self._agreed else None

    def _measure_steps(self, step: int) -> None:
        now = time.monotonic()
        step_s = (now - self._last_boundary) / max(1, step - self._passed)
        self._last_boundary = now
        self._steps_seen += 1
        self._step_s += (step_s - self._step_s) / min(self._steps_seen, 10)
        if self._steps_seen == _STEPS_MEASURED:
            self._changed.notify_all()

    def take(
        self,
        planned: PlannedSave,
        step: int,
        state: Any,
        stable: Sequence[torch.Tensor],
        common: Sequence[torch.Tensor],
    ) -> list[str]:
        """Hands the state of this boundary over.

        Args:
            planned: What :meth:`at_boundary` has returned.
            step: ``trainer.global_step``.
            state: This rank's checkpoint.
            stable: What does not change before an optimizer's step.
            common: What all ranks of this node have alike.

        Returns:
            The names of what in it cannot be kept.
        """
        assert self._fence is not None
        snapshot = self._snapshots.take(state, stable)
        taken = RankState(snapshot, step, planned.generation, self._location, common, self._identity)
        if (n := self._schedule.every_n_train_steps) is not None and self._coordinator is not None:
            self.figures.skipped += max(0, (step - self._last) // n - 1)
        self._schedule.begin()
        with self._changed:  # nothing fails from here on: what is handed over is handed over
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
                "Local checkpoints: %s of the state (the largest: %s) may change before the optimizer's step, and are "
                "too much to be copied on %s: they go to the host, and the device waits for it.",
                format_bytes(nbytes),
                tensor_names(snapshot.structure).get(largest, "a tensor"),
                self._device,
            )

    def miss(self, step: int, error: Exception) -> None:
        """This boundary cannot be saved: its state could not be taken."""
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
        common: Sequence[torch.Tensor],
        timeout_s: float,
    ) -> str | None:
        """Saves at once, between two rounds.

        Args:
            generation: A name for it, the same on all ranks.
            step: As for :meth:`take`, like the three that follow.
            state: This rank's checkpoint.
            stable: What does not change before an optimizer's step.
            common: What all ranks of this node have alike.
            timeout_s: How long this may take; storage that does not answer must not keep the training from what comes
                next.

        Returns:
            What the parts take for what all ranks have alike: only if all ranks take it for the same, their parts go
            together. ``None`` if this rank has not published its parts in time.
        """
        deadline = time.monotonic() + timeout_s
        self.fence()
        if not self.settle(timeout_s):
            return None
        snapshot = self._snapshots.take(state, stable)
        snapshot.release()  # nothing changes meanwhile: this is the training thread
        snapshot.fence()
        taken = RankState(snapshot, step, generation, self._location, common, self._identity)
        published: list[str] = []

        def save() -> None:
            try:
                if self._save(taken):
                    published.append(taken.replicated_digest())
            except Exception as error:
                self.fail(step, error)

        thread = threading.Thread(target=save, name="local-checkpoint-now", daemon=True)
        thread.start()
        wait_with_heartbeat(
            lambda s: _has_ended(thread, s), max(0.0, deadline - time.monotonic()), self._hooks.heartbeat
        )
        return published[0] if published else None

    def fence(self) -> None:
        """The training is about to change what snapshots take for stable; free of cost if there is none."""
        if self._fence is not None:
            self._fence.now()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; a save in progress may take ``timeout_s`` seconds more to be published."""
        self.fence()
        with self._changed:
            self._wait_for(lambda: not self._writing, timeout_s)
            self._wait_for(lambda: not self._busy, _SETTLE_S)  # in a run that has failed it never will be
            self._stopping = True
            self._changed.notify_all()
        if self._coordinator is not None:
            self._coordinator.end()
        if self._fence is not None:
            self._fence.remove()
        if self._thread.ident is not None and not wait_with_heartbeat(
            lambda seconds: _has_ended(self._thread, seconds), timeout_s, self._hooks.heartbeat
        ):
            log.warning("Rank %d: the local save in progress is stuck and is left behind.", self._location.rank)

    # -- the other thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        try:
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
            log.debug("The thread of the local saves has ended", exc_info=True)
            self.trouble = error
        finally:
            with self._changed:
                if self._taken is not None:
                    self._taken.snapshot.release()
                self._busy = self._writing = False
                self._changed.notify_all()

    def _plan(self, coordinator: SaveCoordinator, number: int) -> PlannedSave | None:
        """Has the next round announced, or hears of it; ``None`` if it is too early."""
        if self._location.rank == 0:
            if not coordinator.all_are_ready(number - 1):
                return None
            with self._changed:
                # Somebody is ahead while this rank is slow: the same step again would be too late again.
                self._changed.wait_for(lambda: not self._refused or self._stopping, _LOOK_AGAIN_S)
                lead_s = _LEAD_S + _LEAD_PER_RANK_S * self._location.world_size
                if self._steps_seen < _STEPS_MEASURED:
                    step = None
                else:
                    lead = 1 + int(lead_s / max(self._step_s, 1e-4))
                    step = self._schedule.step_ahead(self._passed + lead)
                if step is None:
                    if not self._stopping:  # else nobody would wake this thread any more
                        self._changed.wait(self._schedule.seconds_left())
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
        """One save of this rank, with all that follows it.

        Args:
            taken: ``None`` if this rank has missed the boundary.
            planned: ``None`` in a single process.
        """
        started = time.monotonic()
        parts: list[PendingShard] = []
        if taken is not None:
            try:
                parts = self._save(taken)
            except Exception as error:  # whatever it is, the training has more to lose than a save
                self.fail(taken.step, error)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
        if taken is not None and parts:
            self.figures.stall_s = self._at_boundary.seconds() + taken.snapshot.waited_s
        complete: bool | None = bool(parts)
        if self._coordinator is not None and planned is not None:
            step = taken.step if taken is not None else planned.step
            self._replicate(step, planned.generation, parts)
            digest = taken.replicated_digest() if taken is not None else ""
            complete = self._coordinator.finish(planned.number, bool(parts), digest)
            if complete is False and self._identity["layout"].get("commons"):
                self._compare(self._coordinator, planned.number, step, taken, digest)
        if taken is not None and complete:
            self._complete.insert(0, taken.generation)
            self.figures.published += 1
            self.figures.save_s = time.monotonic() - started
            self._hooks.published(taken.step, taken.generation)
        if complete is not None:
            self._retire()
            self._prepare()
        with self._changed:
            self._taken, self._busy = None, False
            self._changed.notify_all()

    def _compare(
        self, coordinator: SaveCoordinator, number: int, step: int, taken: RankState | None, digest: str
    ) -> None:
        """Looks whether a generation is not complete because ranks hold different states; rank 0 says so."""
        written = taken.written() if taken is not None else []
        if (found := coordinator.compare(number, self._location.rank, digest, written)) is None:
            return
        digests, learned = found
        if taken is not None:
            taken.note_written(learned)
        if (divergence := divergence_of(step, digests)) is not None:
            self._hooks.diverged(divergence)

    def _replicate(self, step: int, generation: str, parts: Sequence[PendingShard]) -> None:
        """Exchanges this rank's own part with its partners on other nodes."""
        if self._replicas is None or self._replicas.broken:
            return
        own = next((part for part in parts if part.name == rank_shard(self._location.rank)), None)
        writers: dict[int, ShardWriter] = {}

        def reserve(partner: int, nbytes: int) -> torch.Tensor:
            writers[partner] = self._store.reserve(rank_shard(partner), nbytes)
            return writers[partner].memory

        part, trailer = (None, b"") if own is None else (own.memory[: own.size], own.trailer)
        try:
            received = self._replicas.exchange(generation, part, trailer, reserve)
        except ReplicaError as error:
            received = error.received
            if not self._stopping:
                log.error(
                    "Rank %d: copies of the local checkpoint of step %d on other nodes are not complete: %s.%s",
                    self._location.rank,
                    step,
                    error,
                    " There will be no more until the next start." if self._replicas.broken else "",
                )
        for partner, writer in writers.items():
            if partner not in received:
                writer.abandon()
                continue
            try:
                writer.publish(step, generation, received[partner].numel(), b"")
            except (OSError, ValueError) as error:
                log.error(
                    "Rank %d: a copy of rank %d's part could not be kept: %s", self._location.rank, partner, error
                )

    def _save(self, taken: RankState) -> list[PendingShard]:
        """Publishes this rank's parts and returns them; none if the snapshot was no good."""
        parts = taken.publish(self._store, self._hooks.check)
        if parts:
            self._last_failure = ""
            self._expected = {part.name: part.size for part in parts}
            self.figures.part_bytes = sum(part.size + len(part.trailer) for part in parts)
        return parts

    def _prepare(self) -> None:
        """Has the memory for the next save ready: what is new is slow to get, and the optimizer's step would wait."""
        with contextlib.suppress(OSError):  # there is no room now; the save will say so
            for part, nbytes in self._expected.items():
                self._store.reserve(part, nbytes, self._device).abandon()

    def _retire(self) -> None:
        location = self._location
        del self._complete[self._keep :]
        mine = {rank_shard(location.rank), replicated_shard(location.local_rank, location.local_world_size)}
        if self._replicas is not None:
            mine.update(rank_shard(partner) for partner in self._replicas.partners)

        def is_mine(part: str) -> bool:
            # What nobody here writes any more (of a fit with other ranks, or when this was another node of it) is the
            # first rank's to remove.
            return part in mine or (location.local_rank == 0 and part not in self._kept_here)

        try:
            self._hooks.check_owner()
            self._store.retire(set(self._complete), is_mine)
        except OSError as error:
            log.warning("Old local checkpoints could not be removed: %s", error)

    def fail(self, step: int, error: BaseException) -> None:
        """Counts a save that could not be made, and says so."""
        self.figures.failed += 1
        # Said once, whatever the step, until a save succeeds again.
        failure = f"{type(error).__name__} {error.errno}" if isinstance(error, OSError) else str(error)
        if failure != self._last_failure:
            self._last_failure = failure
            log.error(
                "Rank %d: the local checkpoint of step %d could not be saved (%s). Training goes on; the newest local "
                "checkpoint is an older one.",
                self._location.rank,
                step,
                error,
            )
