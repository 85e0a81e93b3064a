"""Saves to node-local storage behind the training: which boundary, and the thread that does the work. No Trainer.

**A round** is one save of all ranks. Rank 0 announces it some steps ahead, through the store that the ranks share: "the
first boundary at which ``global_step`` is at least 120". Each rank says whether it has heard of it in time, and only if
all have is the state taken, by all. So the ranks call the hooks of a save, which may use collectives, together or not
at all; and a rank waits at that boundary only if it is there before the answer is. When every rank has published its
parts, or has not, the round is settled, and only then comes the next. So no rank ever waits for another in a step, no
rank saves what the others leave out, and each knows which generations are complete and may remove the older ones. A
single process needs no rounds and saves when it is due.

**The thread** of each rank waits for the next round in the store (a blocking call, no polling), copies the snapshot
into the memory of the node store, adds the checksums, publishes, exchanges replicas and settles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.generations import Place, common_part, rank_part
from lightning_resilience.checkpoint.plain import tensor_names
from lightning_resilience.checkpoint.replicas import ReplicaError, Replicas
from lightning_resilience.checkpoint.snapshot import Fence, Snapshot, Snapshots, address
from lightning_resilience.checkpoint.store import NodeStore, PartWriter

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

_PATIENCE = timedelta(hours=1)
"""How long a call to the shared store may block; nothing happens when it ends."""

_OVER = "over"
"""Said instead of what is waited for when a rank has left."""

_ANSWER_WITHIN_S = 20.0
"""How long a rank waits at a boundary to hear whether all save there. It is a few milliseconds, or a rank has died."""

_SETTLE_S = 1.0
"""How long a fit that ends waits for the other ranks to have published their parts too."""

_LEAD_S = 0.02
"""How far ahead rank 0 announces a round: a message takes a millisecond, and the store serves one rank at a time."""
_LEAD_PER_RANK_S = 0.0002
_STEPS_MEASURED = 3


def share_out(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Shares out items among ``count`` takers, about the same sum of sizes each; the same on every rank."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taker = loads.index(min(loads))
        shares[taker].append(index)
        loads[taker] += sizes[index]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Round:
    """A save of all ranks.

    Args:
        number: Counts from 0 in every fit.
        step: It happens at the first boundary at which this many optimizer steps are done, or more.
        generation: Names what is saved.
    """

    number: int
    step: int
    generation: str


def new_generation() -> str:
    """A name that no other generation has."""
    return uuid.uuid4().hex[:8]


class Rounds:
    """The messages of the rounds, over the store that the ranks share.

    Args:
        store: A client that nobody else uses: it is at work for as long as the thread waits.
        world_size: How many ranks take part.
        bell: Another client, with which the training thread ends that. Short waits instead would do without, but torch
            warns at the end of each.
    """

    def __init__(self, store: Store, world_size: int, bell: Store) -> None:
        self._store = store
        self._world_size = world_size
        self._bell = bell
        self._awaited = ""
        self._alike: dict[int, str] = {}
        self.over = False
        """Whether there will be no more rounds: a rank has left."""

    def announce(self, planned: Round) -> None:
        """Rank 0: tells everybody."""
        # Every rank has heard how the round before the last ended, or the last could not have been settled.
        published = f"/published{self._alike.pop(planned.number - 2, '')}"
        for name in ("", "/late", "/heard", "/agreed", published, "/over", "/settled", "/prepared", "/ready"):
            self._store.delete_key(f"round/{planned.number - 2}{name}")
        self._store.set(f"round/{planned.number}", json.dumps([planned.step, planned.generation]))

    def end(self) -> None:
        """Called by the training thread: this rank leaves, and without it no round can be settled any more."""
        self.over = True
        if self._awaited:
            with contextlib.suppress(RuntimeError):  # the store has gone, and the wait has ended too
                self._bell.compare_set(self._awaited, "", _OVER)

    def be_ready(self, number: int) -> None:
        """Says that this rank has done with a round, and will hear of the next at once."""
        if self._store.add(f"round/{number}/prepared", 1) == self._world_size:
            self._store.set(f"round/{number}/ready", "1")

    def all_are_ready(self, number: int) -> bool:
        """Rank 0: waits until every rank has done with a round; returns whether there can be another."""
        return self._get(f"round/{number}/ready") is not None

    def hear(self, number: int) -> Round | None:
        """The announcement of a round, as soon as it is there, or ``None`` if there will be no more."""
        heard = self._get(f"round/{number}")
        return None if heard is None else Round(number, *json.loads(heard))

    def agree(self, number: int, in_time: bool) -> bool | None:
        """Says whether this rank has heard of a round in time.

        Returns:
            Whether all have, as soon as they say so; ``None`` if that will not be known.
        """
        return self._ask_all(number, "heard", "late", int(not in_time), "agreed", wanted=0)

    def finish(self, number: int, published: bool, alike: str = "") -> bool | None:
        """Says whether this rank has published all its parts.

        Args:
            number: Of the round.
            published: Whether it has.
            alike: What it takes for what all ranks have alike; where they differ, their parts do not go together.

        Returns:
            Whether every rank has, as soon as they say so; ``None`` if that will not be known.
        """
        self._alike[number] = alike
        return self._ask_all(number, "over", f"published{alike}", int(published), "settled", wanted=self._world_size)

    def _ask_all(self, number: int, said: str, counted: str, mine: int, answer: str, wanted: int) -> bool | None:
        name = f"round/{number}"
        self._store.add(f"{name}/{counted}", mine)
        if self._store.add(f"{name}/{said}", 1) == self._world_size:  # the last one tells all
            total = self._store.add(f"{name}/{counted}", 0)
            self._store.set(f"{name}/{answer}", str(int(total == wanted)))
        heard = self._get(f"{name}/{answer}")
        return None if heard is None else heard == b"1"

    def _get(self, key: str) -> bytes | None:
        self._awaited = key  # before it is looked whether to wait for it: end() looks at them the other way round
        while not self.over:
            try:
                self._store.wait([key], _PATIENCE)
            except torch.distributed.DistStoreError:
                continue
            if (heard := bytes(self._store.get(key))) != _OVER.encode():
                return heard
            self.over = True
        return None


@dataclass
class _Job:
    planned: Round
    snapshot: Snapshot
    common: list[int]
    """The tensors that every rank of the node has alike."""
    numbers: list[int]
    """Which of all that the ranks have alike these are."""
    step: int


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
class Schedule:
    """When a save is due: one of the two.

    Args:
        every_n_train_steps: Whenever ``global_step`` is a multiple of this.
        interval_s: When so many seconds have passed since the last one; asked again each time.
    """

    every_n_train_steps: int | None
    interval_s: Callable[[], float]
    _next: float = field(default=float("inf"), init=False)

    def begin(self) -> None:
        """Counts from now."""
        if self.every_n_train_steps is None:
            self._next = time.monotonic() + self.interval_s()

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save now."""
        n = self.every_n_train_steps
        return time.monotonic() >= self._next if n is None else step % n == 0 and step != last

    def step_ahead(self, earliest: int) -> int | None:
        """The step of the next save, not before ``earliest``, or ``None`` if the time has not come."""
        n = self.every_n_train_steps
        if n is not None:
            return -(-earliest // n) * n
        return earliest if time.monotonic() >= self._next else None

    def seconds_left(self) -> float:
        """Until the time has come; also a good time to look again."""
        return min(max(self._next - time.monotonic(), 0.01), 60.0)


class LocalSaves:
    """The local saves of one rank in one fit.

    Args:
        store: Where the parts of this node are kept.
        places: Where all ranks are.
        rank: This one.
        identity: Fields that all parts of this fit have: run, fit, layout.
        schedule: When to save; rank 0's decides.
        keep: How many complete generations are kept.
        rounds: The messages between the ranks; ``None`` for a single process.
        replicas: Keeps copies on other nodes, if there are any.
        complete: Generations that are complete already, newest first.
        published: Told about every generation that this rank knows to be complete, from the thread.
        check_owner: Raises if a newer attempt has taken the run over; called before anything is removed.
        expected: About how many bytes which part of this rank will have. Memory that is new is slow to get, and the
            first save should not wait for it.
        kept_here: The ranks whose own parts this node keeps; default: those on it.
    """

    def __init__(
        self,
        store: NodeStore,
        places: Sequence[Place],
        rank: int,
        identity: dict[str, Any],
        schedule: Schedule,
        keep: int,
        rounds: Rounds | None = None,
        replicas: Replicas | None = None,
        complete: Sequence[str] = (),
        published: Callable[[int, str], None] = lambda step, generation: None,
        check_owner: Callable[[], None] = lambda: None,
        expected: Mapping[str, int] | None = None,
        kept_here: Collection[int] = (),
    ) -> None:
        self.figures = Figures()
        self._store = store
        self._place = places[rank]
        count = self._place.local_world_size
        kept_here = kept_here or [place.rank for place in places if place.node == self._place.node]
        self._kept_here = {rank_part(each) for each in kept_here} | {common_part(i, count) for i in range(count)}
        self._identity = identity
        self._schedule = schedule
        self._keep = keep
        self._rounds = rounds
        self._replicas = replicas
        self._complete = list(complete)
        self._published = published
        self._check_owner = check_owner
        self._expected = dict(expected or {})
        self._snapshots = Snapshots()
        self._fence: Fence | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._planned: Round | None = None
        self._job: _Job | None = None
        self._agreed: bool | None = None
        self._missed = False
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
        self._thread = threading.Thread(target=self._run, name="local-checkpoint", daemon=True)

    # -- the training thread -------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begins to save; ``step`` is saved already, or is the first."""
        self._last = self._passed = step
        self._fence = Fence()
        self._retire()
        self._schedule.begin()
        self._busy = True
        self._thread.start()

    def at_boundary(self, step: int, clean: bool) -> Round | None:
        """Called at every boundary; returns the round for which the state has to be handed over to :meth:`take` now."""
        if self.trouble is not None:
            raise self.trouble
        if self._rounds is None:
            if not clean or not self._schedule.is_due(step, self._last):
                return None
            if self._busy:
                if step != self._skipped_at and self._schedule.every_n_train_steps is not None:
                    self.figures.skipped += 1
                self._skipped_at = step
                return None
            return Round(0, step, new_generation())
        with self._changed:
            if self._place.rank == 0 and step != self._passed:
                self._measure_steps(step)
            self._passed = step
            planned = self._planned
            if planned is None or not clean or step < planned.step:
                return None
            self._changed.wait_for(
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
        planned: Round,
        step: int,
        state: Any,
        stable: Sequence[torch.Tensor],
        common: Sequence[torch.Tensor],
        started: float,
    ) -> list[str]:
        """Hands the state of this boundary over.

        Args:
            planned: What :meth:`at_boundary` has returned.
            step: ``trainer.global_step``.
            state: This rank's checkpoint.
            stable: What does not change before an optimizer's step.
            common: What all ranks of this node have alike.
            started: When the training was stopped for this, in seconds of ``time.perf_counter()``.

        Returns:
            The names of what in it cannot be kept.
        """
        assert self._fence is not None
        snapshot = self._snapshots.take(state, stable)
        job = _Job(planned, snapshot, *self._common(snapshot, common), step)
        if (n := self._schedule.every_n_train_steps) is not None and self._rounds is not None:
            self.figures.skipped += max(0, (step - self._last) // n - 1)
        self._schedule.begin()
        with self._changed:  # nothing fails from here on: what is handed over is handed over
            self._fence.pending = snapshot
            self._job, self._last = job, step
            self._busy = self._writing = True
            self._changed.notify_all()
        self.figures.stall_s = time.perf_counter() - started
        return snapshot.left_out

    def miss(self, step: int, error: Exception) -> None:
        """This boundary cannot be saved: its state could not be taken."""
        self.fail(step, error)
        with self._changed:
            self._last, self._missed = step, self._rounds is not None
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
    ) -> bool:
        """Saves at once, between two rounds; returns whether this rank has published its parts in time.

        Args:
            generation: A name for it, the same on all ranks.
            step: As for :meth:`take`, like the three that follow.
            state: This rank's checkpoint.
            stable: What does not change before an optimizer's step.
            common: What all ranks of this node have alike.
            timeout_s: How long this may take; storage that does not answer must not keep the training from what comes
                next.
        """
        deadline = time.monotonic() + timeout_s
        self.fence()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                return False
        snapshot = self._snapshots.take(state, stable)
        snapshot.release()  # nothing changes meanwhile: this is the training thread
        snapshot.fence()
        job = _Job(Round(-1, step, generation), snapshot, *self._common(snapshot, common), step)
        published: list[bool] = []

        def save() -> None:
            try:
                published.append(bool(self._save(job)))
            except Exception as error:
                self.fail(step, error)

        thread = threading.Thread(target=save, name="local-checkpoint-now", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        return published == [True]

    def _common(self, snapshot: Snapshot, common: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        numbers: dict[int, int] = {}
        for number, tensor in enumerate(common):
            if (place := address(tensor)) != 0:
                numbers.setdefault(place, number)
        found = [(i, numbers.get(address(tensor), -1)) for i, tensor in enumerate(snapshot.tensors)] if numbers else []
        return [i for i, number in found if number >= 0], [number for _, number in found if number >= 0]

    def fence(self) -> None:
        """The training is about to change what snapshots take for stable; free of cost if there is none."""
        if self._fence is not None:
            self._fence.now()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; a save in progress may take ``timeout_s`` seconds more to be published."""
        self.fence()
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, timeout_s)
            self._changed.wait_for(lambda: not self._busy, _SETTLE_S)  # in a run that has failed it never will be
            self._stopping = True
            self._changed.notify_all()
        if self._rounds is not None:
            self._rounds.end()
        if self._fence is not None:
            self._fence.remove()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("Rank %d: the local save in progress is stuck and is left behind.", self._place.rank)

    # -- the other thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        try:
            self._prepare()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if self._rounds is not None:
                self._rounds.be_ready(-1)
            while not self._stopping and not (self._rounds is not None and self._rounds.over):
                planned = None
                if self._rounds is not None and (planned := self._plan(self._rounds, number)) is None:
                    continue
                job = self._await_job() if planned is None or self._agreed else None
                if job is not None or self._missed:
                    self._missed = False
                    self._round(job, planned)
                if self._rounds is not None and planned is not None:
                    self._rounds.be_ready(number)
                    number += 1
        except BaseException as error:
            log.debug("The thread of the local saves has ended", exc_info=True)
            self.trouble = error
        finally:
            with self._changed:
                if self._job is not None:
                    self._job.snapshot.release()
                self._busy = self._writing = False
                self._changed.notify_all()

    def _plan(self, rounds: Rounds, number: int) -> Round | None:
        """Has the next round announced, or hears of it; ``None`` if it is too early."""
        if self._place.rank == 0:
            if not rounds.all_are_ready(number - 1):
                return None
            with self._changed:
                lead_s = _LEAD_S + _LEAD_PER_RANK_S * self._place.world_size
                if self._steps_seen < _STEPS_MEASURED:
                    step = None
                else:
                    lead = 1 + int(lead_s / max(self._step_s, 1e-4))
                    step = self._schedule.step_ahead(self._passed + lead)
                if step is None:
                    if not self._stopping:  # else nobody would wake this thread any more
                        self._changed.wait(self._schedule.seconds_left())
                    return None
            rounds.announce(Round(number, step, new_generation()))
        if (planned := rounds.hear(number)) is None:
            return None
        with self._changed:
            in_time = self._passed < planned.step
            if in_time:
                self._planned = planned
            self._agreed = None
        agreed = rounds.agree(number, in_time)
        with self._changed:
            self._agreed = bool(agreed)
            if not agreed:
                self._planned, self._missed = None, False
            self._changed.notify_all()
        return planned

    def _await_job(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._missed or self._stopping)
            return self._job

    def _round(self, job: _Job | None, planned: Round | None) -> None:
        """One save of this rank, with all that follows it.

        Args:
            job: ``None`` if this rank has missed the boundary.
            planned: ``None`` in a single process.
        """
        started = time.monotonic()
        pieces: list[_Piece] = []
        if job is not None:
            try:
                pieces = self._save(job)
            except Exception as error:  # whatever it is, the training has more to lose than a save
                self.fail(job.step, error)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
        complete: bool | None = bool(pieces)
        if self._rounds is not None and planned is not None:
            self._replicate(job.step if job is not None else planned.step, planned.generation, pieces)
            alike = _alike(job) if job is not None and pieces else ""
            complete = self._rounds.finish(planned.number, bool(pieces), alike)
        if job is not None and complete:
            self._complete.insert(0, job.planned.generation)
            self.figures.published += 1
            self.figures.save_s = time.monotonic() - started
            self._published(job.step, job.planned.generation)
        if complete is not None:
            self._retire()
            self._prepare()
        with self._changed:
            self._job, self._busy = None, False
            self._changed.notify_all()

    def _replicate(self, step: int, generation: str, pieces: Sequence[_Piece]) -> None:
        """Exchanges this rank's own part with its partners on other nodes."""
        if self._replicas is None or self._replicas.broken:
            return
        own = next((piece for piece in pieces if piece.part == rank_part(self._place.rank)), None)
        writers: dict[int, PartWriter] = {}

        def reserve(partner: int, nbytes: int) -> torch.Tensor:
            writers[partner] = self._store.reserve(rank_part(partner), nbytes)
            return writers[partner].memory

        part, trailer = (None, b"") if own is None else (own.memory[: own.size], own.trailer)
        try:
            received = self._replicas.exchange(generation, part, trailer, reserve)
        except ReplicaError as error:
            received = error.received
            if not self._stopping:
                log.error(
                    "Rank %d: copies of the local checkpoint of step %d on other nodes are not complete: %s.%s",
                    self._place.rank,
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
                log.error("Rank %d: a copy of rank %d's part could not be kept: %s", self._place.rank, partner, error)

    def _save(self, job: _Job) -> list[_Piece]:
        """Publishes this rank's parts and returns them; none if the snapshot was no good."""
        snapshot, place = job.snapshot, self._place
        pieces: list[_Piece] = []
        try:
            identity = {**self._identity, "layout": {**self._identity["layout"], "alike": _alike(job)}}
            for part, indices in self._split(job).items():
                pieces.append(self._reserve(part, indices, snapshot))
            snapshot.copy(pair for piece in pieces for pair in piece.views)
            snapshot.release()
            for piece in pieces:
                own = piece.part == rank_part(place.rank)
                piece.trailer = shard.seal(
                    piece.memory,
                    piece.specs,
                    shard.Identity(
                        **identity,
                        step=job.step,
                        generation=job.planned.generation,
                        part=piece.part,
                        world_size=place.world_size,
                    ),
                    {"state": snapshot.skeleton, "places": self._places(job)} if own else None,
                    piece.size,
                )
            good = snapshot.is_good()
            self.figures.stall_s += snapshot.waited_s
            if not good:
                for piece in pieces:
                    piece.writer.abandon()
                log.debug("A local save is given up: something has changed its tensors before the optimizer's step.")
                return []
            for piece in pieces:
                piece.writer.publish(job.step, job.planned.generation, piece.size, piece.trailer)
        except BaseException:
            for piece in pieces:
                piece.writer.abandon()
            raise
        finally:
            snapshot.release()
        self._last_failure = ""
        self._expected = {piece.part: piece.size for piece in pieces}
        self.figures.part_bytes = sum(piece.size + len(piece.trailer) for piece in pieces)
        return pieces

    def _split(self, job: _Job) -> dict[str, list[int]]:
        """The parts that this rank writes, and the tensors that go into each."""
        tensors, place = job.snapshot.tensors, self._place
        common = set(job.common)
        parts = {rank_part(place.rank): [i for i in range(len(tensors)) if i not in common]}
        if common:
            shares = self._shares(job)
            parts[common_part(place.local_rank, place.local_world_size)] = shares[place.local_rank]
        return parts

    def _shares(self, job: _Job) -> list[list[int]]:
        sizes = [job.snapshot.tensors[i].nbytes for i in job.common]
        return [[job.common[k] for k in share] for share in share_out(sizes, self._place.local_world_size)]

    def _places(self, job: _Job) -> list[list[int]]:
        """For every tensor: -1 and its number in the rank's own part, or the number of a common part and that in it."""
        places = [[-1, -1] for _ in job.snapshot.tensors]
        for number, share in enumerate(self._shares(job)):
            for position, index in enumerate(share):
                places[index] = [number, position]
        own = 0
        for each in places:
            if each[0] < 0:
                each[1] = own
                own += 1
        return places

    def _reserve(self, part: str, indices: list[int], snapshot: Snapshot) -> _Piece:
        try:
            specs, size = shard.arrange([snapshot.tensors[i] for i in indices])
        except TypeError:
            raise self._explained(indices, snapshot) from None
        writer = self._store.reserve(part, size)
        views = [
            (index, shard.view(writer.memory, spec))
            for index, spec in zip(indices, specs, strict=True)
            if not snapshot.tensors[index].is_meta
        ]
        return _Piece(part, specs, size, writer, writer.memory, views)

    def _explained(self, indices: list[int], snapshot: Snapshot) -> TypeError:
        """Which of some tensors cannot be kept, by its name in the state."""
        for index in indices:
            try:
                shard.arrange([snapshot.tensors[index]])
            except TypeError as error:
                return TypeError(f"{tensor_names(snapshot.skeleton).get(index, 'a tensor')} cannot be kept: {error}")
        return TypeError("a tensor cannot be kept")

    def _prepare(self) -> None:
        """Has the memory for the next save ready: what is new is slow to get, and the optimizer's step would wait."""
        with contextlib.suppress(OSError):  # there is no room now; the save will say so
            for part, nbytes in self._expected.items():
                self._store.reserve(part, nbytes).abandon()

    def _retire(self) -> None:
        place = self._place
        del self._complete[self._keep :]
        mine = {rank_part(place.rank), common_part(place.local_rank, place.local_world_size)}
        if self._replicas is not None:
            mine.update(rank_part(partner) for partner in self._replicas.partners)

        def is_mine(part: str) -> bool:
            # What nobody here writes any more (of a fit with other ranks, or when this was another node of it) is the
            # first rank's to remove.
            return part in mine or (place.local_rank == 0 and part not in self._kept_here)

        try:
            self._check_owner()
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
                self._place.rank,
                step,
                error,
            )


def _alike(job: _Job) -> str:
    """Says what the common parts hold. Parts of which it differs do not go together."""
    tensors = [job.snapshot.tensors[index] for index in job.common]
    about = [(n, tuple(tensor.shape), str(tensor.dtype)) for n, tensor in zip(job.numbers, tensors, strict=True)]
    return str(xxhash.xxh3_64_hexdigest(repr(about).encode())) if about else ""


@dataclass
class _Piece:
    part: str
    specs: list[shard.TensorSpec]
    size: int
    writer: PartWriter
    memory: torch.Tensor
    """Stays as it is until the next save."""
    views: list[tuple[int, torch.Tensor]]
    trailer: bytes = b""
