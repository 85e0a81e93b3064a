"""Local saves: the ranks of a fit keep their states on their own nodes, and offer them for a resume."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from lightning_resilience._formatting import format_bytes
from lightning_resilience._lightning import lightning_strategies
from lightning_resilience._processes import process_age
from lightning_resilience._torch import local, own_store
from lightning_resilience.checkpoint import at_hand, capacity, local_folders, shard
from lightning_resilience.checkpoint.devices import accelerator
from lightning_resilience.checkpoint.generations import WHOLE, Transfer, rank_shard, replicated_shard
from lightning_resilience.checkpoint.local import Fallback, LocalSaves, Peers, SaveHooks
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.rank_state import divergence_of
from lightning_resilience.checkpoint.recovery import LocalTier
from lightning_resilience.checkpoint.replication import ReplicaError, Replicas, cliques, fetch
from lightning_resilience.checkpoint.safe_serialization import Entries
from lightning_resilience.checkpoint.save_coordinator import SaveCoordinator, new_generation
from lightning_resilience.checkpoint.schedule import ChosenInterval, Schedule
from lightning_resilience.checkpoint.snapshot import ON_DEVICE_BYTES
from lightning_resilience.fit import absent_ranks
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch import membership
from lightning_resilience.run.events import Saved
from lightning_resilience.run.history import read_history
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.save_interval import mean_time_to_failure_s
from lightning_resilience.run.time_account import CHECKPOINT_SAVE

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger("lightning_resilience.callbacks.local_checkpoint")  # users configure the callback's logger

_EXCHANGE_TIMEOUT = timedelta(minutes=2)
_HAND_OVER_TIMEOUT = timedelta(seconds=10)
"""The same while the training waits: a node that was told to stop may end at any time, also without a word."""
_SETTLE_S = 60.0
_LAST_WORDS_S = 5.0
_USUAL_RECOVERY_S = 60.0
_OTHERS_SAVE_WITHIN_S = 1.0
_OF_MODEL = ("state_dict.", "optimizer_states.")
_RECORD_EVERY_S = (60.0, 300.0)
_RECORD_SHARE = 0.01


@dataclass(frozen=True)
class LocalSaveOptions:
    """Options of ``LocalCheckpoint``, validated there.

    Attributes:
        waits: Whether the training waits until a save is complete on all nodes.
        optional: Whether states that will not fit turn the policy off instead of raising an error.
    """

    dir: str | os.PathLike[str] | None
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    keep: int
    replication: bool | Literal["auto"]
    replication_factor: int
    replication_jump: int | None
    probation_steps: int
    waits: bool
    optional: bool

    @property
    def is_chosen(self) -> bool:
        """Whether the policy chooses the interval."""
        return self.every_n_train_steps is None and self.train_time_interval is None


class Unusable(Exception):
    """A node cannot keep local checkpoints; the same on all ranks."""


class LocalSavePolicy(Participant):
    """Offers the local states of one fit for its resume, and saves the state of every rank to its own node.

    Raises:
        Unusable: If a node cannot keep local checkpoints.
    """

    def __init__(self, session: FitSession, options: LocalSaveOptions) -> None:
        self.session = session
        self._options = options
        trainer = session.fit.trainer
        self.locations = session.fit.locations
        self.location = self.locations[session.fit.rank]
        folder = local_folders.base_folder(options.dir) / self.location.node / session.fit.run_id
        problem = None
        try:
            self.store = NodeStore(
                folder / f"fit-{session.fit.index:03d}",
                before_publish=session.fit.check_owner,
                verify=self._verify,
            )
        except OSError as error:
            problem = f"{self.location.node} cannot keep local checkpoints ({error}); set dir= or --local-dir"
        if problems := [each for each in session.fit.gather(problem) if each is not None]:
            if problem is None:
                self.store.close()
            raise Unusable(problems[0])
        if self.location.local_rank == 0:
            local_folders.note_origin(folder, session.fit.run.path)
        self.owner = {"run": session.fit.run_id, "fit": session.fit.index}
        self._fetches = self._course = 0
        self._tier = LocalTier(
            self.store,
            self.locations,
            session.fit.rank,
            self.owner,
            lambda: _kind(trainer),
            session.fit.gather,
            self._fetch,
            lambda places: absent_ranks.why_not(trainer, places),
            lambda: session.fit.patience,
        )
        self._tier.at_hand = at_hand.take()
        session.selector.use_local_tier(self._tier, options.probation_steps)
        self._compared: list[torch.Tensor] = []
        self._shards = 1
        self._expected: dict[str, int] = {}
        self._kept_here: set[int] = {
            location.rank for location in self.locations if location.node == self.location.node
        }
        self._replicas: Replicas | None = None
        self._saves: LocalSaves | None = None
        self._device: torch.device | None = None
        self._interval: ChosenInterval | None = None
        self._said_interval_s = 0.0
        self._begun_at, self._record_at = time.monotonic(), 0.0
        self._unrecorded = 0

    def _verify(self, path: Path) -> None:
        if self.store.in_memory:
            shard.read_identity(path)  # its tensors were hashed in memory
        else:
            shard.verify(path)

    def _fetch(
        self, wanted: Sequence[Transfer], path: Callable[[str], Path], is_urgent: bool
    ) -> dict[str, ShardWriter]:
        """Transfers shards between ranks; returns unpublished, unverified writers of those that this rank received."""
        timeout = _HAND_OVER_TIMEOUT if is_urgent else _EXCHANGE_TIMEOUT
        self._fetches += 1
        writers: dict[str, ShardWriter] = {}
        transfers = [replace(each, path=path(each.shard)) for each in wanted]

        def reserve(transfer: Transfer) -> torch.Tensor:
            writer = writers[transfer.shard] = self.store.reserve(transfer.shard, transfer.size, is_copy=True)
            return writer.memory

        prefix = f"{self._prefix()}/fetch/{self._fetches}"
        arrived: dict[Transfer, torch.Tensor | None] = {}
        try:
            arrived = fetch(self.session.fit.rank, transfers, reserve, prefix, timeout)
        except ReplicaError as error:
            log.warning(
                "Rank %d: cannot fetch shards of local checkpoints from other nodes: %s.", self.location.rank, error
            )
        here = {transfer.shard for transfer, content in arrived.items() if content is not None}
        for name in writers.keys() - here:
            writers.pop(name).abandon()
        return writers

    def _prefix(self) -> str:
        return f"resilience-local/{self.session.fit.run_id}/{self.session.fit.index}/{self.session.fit.nonce}"

    # -- saving --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to save, after the resume is complete."""
        session, trainer = self.session, self.session.fit.trainer
        self._tier.at_hand = None
        self._compared, self._shards = lightning_strategies.compared_parameters(trainer)
        self._cliques = self._find_cliques()
        if (problem := self._why_it_does_not_fit()) is not None:
            if not self._options.optional:
                raise ValueError(problem)
            if trainer.is_global_zero:
                log.warning("LocalCheckpoint is off: %s.", problem)
            session.fit.participants.withdraw(self)
            return
        step = trainer.global_step
        self._interval = self._choose_interval() if self._options.is_chosen else None
        self._replicas = self._make_replicas()
        coordinator = self._make_coordinator() if trainer.world_size > 1 else None
        self._saves = LocalSaves(
            self.store,
            Peers(self.location, self._kept_here, coordinator, self._replicas),
            self._identity(),
            Schedule(self._options.every_n_train_steps, self._interval_s, self._options.is_chosen),
            self._options.keep,
            self._expected,
            self._device,
            SaveHooks(
                self._completed, session.fit.check_owner, self._check, session.fit.advanced, session.fit.diverged
            ),
        )
        self._saves.start(step, *self._complete(step))
        if self._options.waits:
            self._wait_for_save()  # otherwise saves due while the store is made ready would be left out
        if trainer.is_global_zero:
            self._say_what_is_done()

    def _make_coordinator(self) -> SaveCoordinator:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        prefix, rank = self._prefix(), self.session.fit.rank
        bell = PrefixStore(prefix, cast("Any", _get_default_store()))
        return SaveCoordinator(own_store(prefix), len(self.locations), bell, self._shards, rank % self._shards)

    @property
    def _all_have_the_same(self) -> bool:
        """Whether all ranks hold the same state, so that the ranks of a node divide its saving among them."""
        return self._shards == 1 and bool(self._compared)

    def _check(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        if checks := self.session.fit.participants.implement(Participant.check_state):
            # By their names in the module; other entries of a state may rightly be infinite.
            of_model = [(name.removeprefix("state_dict."), each) for name, each in named if name.startswith(_OF_MODEL)]
            for check_state in checks:
                check_state(of_model)

    def batch_done(self) -> None:
        """Waits for the copy in progress, so that hooks at the end of the batch cannot change its tensors."""
        if self._saves is not None:
            self._saves.fence()

    def at_end_of_epoch(self) -> None:
        """Waits for the copy in progress, so that the end of the epoch cannot change its tensors."""
        self.batch_done()

    def before_rollback(self) -> None:
        """Waits for the save in progress."""
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        if self._saves is not None and not self._saves.wait_for_save(_SETTLE_S):
            log.warning("Rank %d: a local save is stuck; a checkpoint it may publish is older.", self.location.rank)

    def after_rollback(self) -> None:
        """Has saves continue on the new course: generations of the course that was left do not count."""
        if self._saves is not None:
            step = self.session.fit.trainer.global_step
            complete, fallback = self._complete(step)
            self._saves.rollback(step, complete, self._identity(), fallback)

    def _complete(self, step: int) -> tuple[list[str], Fallback | None]:
        """Complete generations up to ``step``, newest first; and the fallback if the one of ``step`` is marked bad."""
        found = [each for each in self.session.selector.complete if each.step <= step]
        older = next((each.name for each in found if each.step < step), None)
        fallback = None if older is None else Fallback(older, step + self._options.probation_steps)
        return [each.name for each in found], fallback

    def _identity(self) -> dict[str, Any]:
        """Identity fields of all shards that are saved from now on."""
        self._course = self.session.selector.course
        layout = {
            "kind": _kind(self.session.fit.trainer)[0],
            "commons": self.location.shares if self._all_have_the_same else 0,
            "course": self._course,
            "places": self.session.exact.places,
        }
        return {**self.owner, "layout": layout}

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """Copies the state if a save is due."""
        if self._saves is None:
            return
        if self._course != self.session.selector.course:
            self.after_rollback()  # a rollback without a checkpoint: another course begins, too
        if (planned := self._saves.at_boundary(step, may_save)) is not None:
            for before_save in self.session.fit.participants.implement(Participant.before_save):
                before_save()
            try:
                if any(looks_bad() for looks_bad in self.session.fit.participants.implement(Participant.looks_bad)):
                    raise RuntimeError("the last steps were bad")
                with self.session.fit.time.during(CHECKPOINT_SAVE):
                    left_out = self._saves.take(planned, step, *self._state())
            except Exception as error:  # also of the user's own on_save_checkpoint
                self._saves.miss(step, error)
                return
            if self.session.fit.rank == 0:
                self.session.saver.report_left_out(left_out)
            if self._options.waits:
                self._saves.fence()  # no step follows that would do it
                self._wait_for_save()

    def _state(self) -> tuple[Entries, list[torch.Tensor], list[torch.Tensor]]:
        """This rank's checkpoint; its tensors that only optimizers change; its tensors that other ranks hold alike."""
        live = lightning_strategies.live_tensors(self.session.fit.trainer)
        alike = lightning_strategies.trained_tensors(self.session.fit.trainer, self._compared)
        return self.session.saver.capture(), live, [*map(local, alike)]

    def save_locally(self, reason: str, within_s: float, gone: Collection[int] = ()) -> bool:
        """Saves at this boundary, the same on all ranks; returns whether all ranks published in time."""
        if self._saves is None:
            return False
        trainer = self.session.fit.trainer
        generation = trainer.strategy.broadcast(new_generation())
        try:
            saved = self._saves.save_now(generation, trainer.global_step, *self._state(), within_s)
        except Exception as error:
            self._saves.fail(trainer.global_step, error)
            saved = None
        all_saved = self.session.fit.gather(None if saved is None else saved.replicated_digest())
        divergence = divergence_of(trainer.global_step, [each or "" for each in all_saved], self._shards)
        if divergence is not None and trainer.is_global_zero:
            self.session.fit.diverged(divergence)
        alike = all(len({*all_saved[shard :: self._shards]}) == 1 for shard in range(self._shards))
        complete = None not in all_saved and alike and (not gone or self._tier.hand_over(generation, gone))
        if complete and trainer.is_global_zero:
            self._record(trainer.global_step, generation, reason)
        return complete

    def settle_saves(self, within_s: float) -> bool:
        """Waits for the save in progress; returns whether it has ended."""
        if self._saves is None:
            return True
        self._saves.fence()
        return self._saves.wait_for_save(within_s)

    def save_after_loss(self, generation: str, ranks: Iterable[int], records: bool, within_s: float) -> bool:
        """Saves the states of ranks of this node, without the peers; returns whether they are saved.

        The rank that records the save returns whether the states of all ranks of this node are saved.
        """
        if self._saves is None or self._saves.sees_writes:
            return False
        started, step = time.monotonic(), -1
        for rank in ranks:
            step, left_s = self.session.fit.trainer.global_step, started + within_s - time.monotonic()
            saved = self._saves.save_now(generation, step, *self._state(), left_s, self.locations[rank])
            if saved is None:
                return False
            at_hand.keep(saved.at_hand(self._compared))
        if not records:
            return True
        if not self._is_complete(step, generation, started + within_s):
            return False
        self._unrecorded += 1
        self._record(step, generation, "after a loss", time.monotonic() - started)
        return True

    def _is_complete(self, step: int, generation: str, until: float) -> bool:
        """Waits until all ranks of this node have saved, but no longer than ``until``; returns whether they have."""
        count = self.location.shares if self._all_have_the_same else 0
        here = [each.rank for each in self.locations if each.node == self.location.node]
        names = [*map(rank_shard, here), *(replicated_shard(index, count) for index in range(count))]
        until = min(until, time.monotonic() + _OTHERS_SAVE_WITHIN_S)
        while not all(self.store.path(step, generation, name).exists() for name in names):
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _completed(self, step: int, generation: str) -> None:
        """Handles a complete generation; called from the thread that saves."""
        if self._compared:
            self.session.fit.replicas_agreed = True
        self._unrecorded += 1
        # The second save is the first one for which the interval is known.
        is_news = self._interval is not None and self._saves is not None and self._saves.stats.published == 2
        if self.session.fit.rank == 0 and (is_news or time.monotonic() >= self._record_at):
            self._record(step, generation, "local")

    def _record(self, step: int, generation: str, reason: str, seconds: float | None = None) -> None:
        assert self._saves is not None
        stats = self._saves.stats
        chosen_s = self._interval.chosen_s if self._interval is not None else None
        self.session.fit.ledger.record(
            Saved(
                fit=self.session.fit.index,
                step=step,
                reason=reason,
                tier="local",
                generation=generation,
                count=self._unrecorded,
                seconds=round(stats.save_s if seconds is None else seconds, 4),
                stall_s=round(stats.stall_s, 6),
                skipped=stats.skipped,
                failed=stats.failed,
                every_s=chosen_s and round(chosen_s, 3),
            )
        )
        now, self._unrecorded = time.monotonic(), 0
        self._record_at = now + _unrecorded_s(now - self._begun_at)

    def _interval_s(self, before_s: float) -> float:
        """Seconds to the next save, after ``before_s`` between the last two."""
        if (given := self._options.train_time_interval) is not None:
            return given.total_seconds()
        assert self._interval is not None
        interval_s, chosen_s = self._interval(before_s), self._interval.chosen_s
        if chosen_s is None or self._saves is None or self._saves.stats.published == 1:  # the first save takes longer
            return interval_s
        is_news = not self._said_interval_s or not 0.5 < chosen_s / self._said_interval_s < 2
        if is_news and self.session.fit.rank == 0:  # rank 0's interval applies
            self._said_interval_s = chosen_s
            log.info(
                "Local checkpoints: every %g s after the first ones (a save takes %.2f s in the background and "
                "delays training by %.1f ms).",
                round(chosen_s, 1),
                self._saves.stats.save_s,
                1000 * (self._saves.costs() or (0.0, 0.0))[0],
            )
        return interval_s

    def _choose_interval(self) -> ChosenInterval:
        fit = self.session.fit
        events = read_history(fit.run.ledger).events if fit.rank == 0 else []
        observed_s = max(0.0, time.time() - events[0].time) if events else 0.0
        mean_time_s = mean_time_to_failure_s(fit.trainer.world_size, len(interruptions(events)), observed_s)
        # After a failure, a new process needs about as long as this one until it trains.
        recovery_s = min(process_age(), 3600.0) if fit.index == 0 else _USUAL_RECOVERY_S
        return ChosenInterval(lambda: self._saves.costs() if self._saves else None, mean_time_s, recovery_s)

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _why_it_does_not_fit(self) -> str | None:
        trainer = self.session.fit.trainer
        live = lightning_strategies.live_tensors(trainer)
        self._device = next(filter(None, map(accelerator, live)), None)
        mine = sum(tensor.nbytes for tensor in {id(each): local(each) for each in live}.values())
        if not any(optimizer.state for optimizer in trainer.optimizers):
            # Most optimizers keep two numbers for each parameter (Adam's moments), from the first step on.
            mine += 2 * sum(local(each).nbytes for each in trainer.lightning_module.parameters() if each.requires_grad)
        sizes = self.session.fit.gather(mine)
        here = {location.rank for location in self.locations if location.node == self.location.node}
        received = max((len(group) - 1 for group in self._cliques if not here.isdisjoint(group)), default=0)
        room = mine + mine // 64 + (64 << 10)  # for gaps between the tensors; otherwise memory would be mapped anew
        self._expected = {rank_shard(self.session.fit.rank): room}
        if self._all_have_the_same:
            count, number = self.location.shares, self.location.local_rank
            self._expected = {replicated_shard(number, count): room // count} if number < count else {}
        problem = None
        if self.location.local_rank == 0:
            try:
                capacity.check(
                    self.store.directory,
                    mine if self._all_have_the_same else sum(sizes[rank] for rank in here),
                    self._options.keep,
                    0 if self._all_have_the_same else received,
                )
            except ValueError as error:
                problem = f"{self.location.node}: {error}{self._what_others_hold()}"
            except OSError as error:
                problem = f"{self.location.node}: {self.store.directory} cannot be read ({error})"
        return next((each for each in self.session.fit.gather(problem) if each is not None), None)

    def _what_others_hold(self) -> str:
        """How much other runs hold on this node, for a message: nothing removes states of runs that never finish."""
        here, nbytes = self.store.directory.parent, 0
        with contextlib.suppress(OSError):  # other runs may be writing there, or may just have ended
            others = [folder for folder in here.parent.iterdir() if folder != here]
            nbytes = sum(path.lstat().st_size for folder in others for path in folder.rglob("*.shard"))
        return f"; other runs hold {format_bytes(nbytes)} in {here.parent}" if nbytes else ""

    def _nodes(self) -> int:
        return len({location.node for location in self.locations})

    def _find_cliques(self) -> list[list[int]]:
        """The ranks that keep copies of each other's files; empty without replication."""
        options, is_first = self._options, self.session.fit.trainer.is_global_zero
        if options.replication is False or self._nodes() == 1:
            return []
        sizes = Counter(each.node for each in self.locations)
        if options.replication_jump is None and len({*sizes.values()}) > 1:
            # For example, ranks continue after a loss. This is equal on all ranks, and no reason to end.
            if is_first:
                log.warning("Local checkpoints have no copies on other nodes: nodes have different numbers of ranks.")
            return []
        jump = options.replication_jump or self.location.shares
        try:
            return cliques([each.node for each in self.locations], jump, options.replication_factor)
        except ValueError as error:
            line = membership.current()
            if options.replication is True and (line is None or not line.is_without_some):  # no rank is absent
                raise
            if is_first:
                log.warning("Local checkpoints have no copies on other nodes: %s.", error)
            return []

    def _make_replicas(self) -> Replicas | None:
        groups = self._cliques
        if not groups:
            return None
        here = frozenset(self._kept_here)
        self._kept_here.update(rank for group in groups if not here.isdisjoint(group) for rank in group)
        mine = next(group for group in groups if self.session.fit.rank in group)
        try:
            return Replicas(self.session.fit.rank, mine, f"{self._prefix()}/replicas", _EXCHANGE_TIMEOUT)
        except ReplicaError as error:
            if self._options.replication is True:
                raise
            log.warning("Rank %d: no copies of local checkpoints on other nodes: %s.", self.session.fit.rank, error)
            return None

    def _say_what_is_done(self) -> None:
        options = self._options
        where = "node memory, which survives the processes but not the node" if self.store.in_memory else "on disk"
        if options.every_n_train_steps is not None:
            when = f"every {options.every_n_train_steps} steps"
        elif options.train_time_interval is not None:
            when = f"every {options.train_time_interval.total_seconds():g} s"
        else:
            when = "from the first steps on, at intervals that double up to the best one for the cost of a save"
        copies = "one node, so no copies on other nodes"
        if self._nodes() > 1:
            copies = "with copies on other nodes" if self._replicas is not None else "without copies on other nodes"
        memory = ""
        if self._device is not None:
            memory = f", with at most {format_bytes(ON_DEVICE_BYTES)} of the memory of {self._device}"
        log.info("Local checkpoints %s in %s (%s), %s%s.", when, self.store.directory, where, copies, memory)

    # -- the end -------------------------------------------------------------------------------------------------------

    def after_save(self, is_end: bool) -> None:
        """Stops saving when training has ended."""
        if is_end and (saves := self._saves) is not None:
            # A save in progress is no longer needed when the final state is safe.
            self._stop(_SETTLE_S if self.session.fit.final_path is None else _LAST_WORDS_S)
            if saves.thread_error is not None:
                log.error(
                    "Rank %d: the last local checkpoint was not saved (%r).", self.location.rank, saves.thread_error
                )

    def _stop(self, timeout_s: float) -> None:
        if self._saves is not None:
            self._saves.stop(timeout_s, self.session.fit.peer_is_lost)
            self._saves = None

    def clear(self) -> None:
        """Removes the local checkpoints of a finished fit when its final state is safe."""
        session = self.session
        if session.fit.final_path is None:
            return
        session.fit.trainer.strategy.barrier("resilience local checkpoints")  # no rank writes any more
        if self.location.local_rank == 0:
            self.store.clear()
            local_folders.remove_empty(self.store.directory.parent)

    def leave(self) -> None:
        """Called however the fit ends: a save in progress is published if it takes no more than a few seconds."""
        self._stop(_LAST_WORDS_S)
        self.store.close()
        if self._replicas is not None:
            self._replicas.close()


def _kind(trainer: Trainer) -> tuple[str, int]:
    """How ranks divide the state, and into groups of how many ranks. No kind can read what another kind has saved."""
    strategy = trainer.strategy
    if not lightning_strategies.traits_of(strategy).all_ranks_write:
        return WHOLE, 1
    group = lightning_strategies.group_size(trainer)
    mesh = getattr(getattr(strategy, "device_mesh", None), "shape", ())
    how = getattr(getattr(strategy, "sharding_strategy", None), "name", "")  # of FSDP1
    over = f" in groups of {group}" if group else f" over {list(mesh)}" if mesh else ""
    return f"sharded by {type(strategy).__name__}" + (f" ({how})" if how else "") + over, group


def _unrecorded_s(age_s: float) -> float:
    """For how long no save is recorded after one: the ledger is on shared storage, and each start reads all of it.

    Args:
        age_s: How many seconds ago the fit began.
    """
    least_s, most_s = _RECORD_EVERY_S
    return min(max(least_s, _RECORD_SHARE * age_s), most_s)
