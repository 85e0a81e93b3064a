"""Loads local checkpoints on all ranks: every byte is verified, missing shards are fetched from other nodes.

A bad shard is quarantined on its node, and the next copy is tried. No Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_resilience._files import Patience
from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.at_hand import AtHand
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.checkpoint.generations import (
    Generation,
    RankLocation,
    ShardInfo,
    Transfer,
    generations,
    is_on_course,
    plan_handover,
    plan_transfers,
    rank_shard,
)
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.safe_serialization import unpack

log = logging.getLogger(__name__)

_MOST_RANKS = 1 << 20
"""A header with a larger number of ranks is damaged."""

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks on every rank, as ``all_gather_object``."""

Fetch = Callable[[Sequence[Transfer], Callable[[str], Path], bool], dict[str, ShardWriter]]
"""Transfers shards between ranks; the second argument gives a shard's path by its name, the third is whether a node may
end meanwhile. Returns the writers of the shards that this rank has received, ready to be published."""


@dataclass(frozen=True)
class _Lost:
    """A copy of a shard that cannot be used. If it may be intact, ``unreadable`` gives the reason."""

    node: str
    shard: str
    unreadable: str = ""


class LocalTier:
    """Finds and loads the local generations of one fit. Its methods are collectives.

    Args:
        store: The store of this node.
        locations: Locations of all ranks, by rank.
        rank: This rank.
        owner: Identity fields that all shards of this fit have: run and fit.
        kind: Returns how the ranks partition their state (see :attr:`.Generation.kind`) and how many ranks hold it
            together, so that another number of such groups can read it. 0 means that all ranks hold it together, so
            only the same number of ranks can. Both are known when a fit is set up.
        gather: See :data:`Gather`.
        fetch: See :data:`Fetch`.
        why_not: Returns why these ranks cannot continue a run that began with the given number of ranks; ``None`` if
            they can.
        patience: Returns the remaining retries for failing storage.
    """

    def __init__(
        self,
        store: NodeStore,
        locations: Sequence[RankLocation],
        rank: int,
        owner: dict[str, Any],
        kind: Callable[[], tuple[str, int]],
        gather: Gather,
        fetch: Fetch,
        why_not: Callable[[int], str | None],
        patience: Callable[[], Patience] = Patience,
    ) -> None:
        self.store = store
        self.locations = locations
        self.location = locations[rank]
        self.owner = owner
        self._kind = kind
        self._gather = gather
        self._fetch = fetch
        self._patience = patience
        self._why_not = why_not
        self.at_hand: AtHand | None = None
        """Tensors that this process still has in memory and need not read; set until it has resumed."""
        self.bad: list[tuple[str, str]] = []
        """Shards that this rank found to be bad, and why."""
        self.of_others: list[str] = []
        """Complete generations that only other numbers of ranks or another strategy can load, as of :meth:`find`."""
        self.unreadable: list[str] = []
        """Shards that some rank could not read since :meth:`find`, with the reason; the same on all ranks."""
        self.used_replica = False
        """Whether the last :meth:`load` needed a shard of another node; the same on all ranks."""

    def find(self, without: Collection[str] = (), forks: Sequence[int] = ()) -> tuple[list[Generation], list[str]]:
        """Returns the generations to resume from, newest first, and why other generations cannot be used.

        Args:
            without: Names of generations to leave out.
            forks: Steps at which the training left a course; see :func:`~.generations.is_on_course`.
        """
        kind, self._group = self._kind()
        scans = self._gather(self._scan())
        self.unreadable = [each for _, unreadable in scans for each in unreadable]
        found = generations([each for shards, _ in scans for each in shards], without, self._group)
        usable, reasons = [], []
        self.of_others = []
        for each in found:
            refusal = self._refusal(each)
            if refusal is None and each.kind != kind:
                refusal = f"another strategy ({each.kind}, not {kind})"
            if refusal is not None:
                reasons.append(f"the one of step {each.step} was saved by {refusal}")
                if not each.missing and is_on_course(forks, each.course, each.step):
                    self.of_others.append(reasons[-1])
            elif not is_on_course(forks, each.course, each.step):
                reasons.append(f"the one of step {each.step} was saved before the training rolled back past it")
            elif each.missing and each.differs:
                reasons.append(f"the one of step {each.step} is inconsistent: its ranks held different states")
            elif each.missing:
                names = ", ".join(each.missing[:3]) + (", ..." if len(each.missing) > 3 else "")
                reasons.append(f"the one of step {each.step} is incomplete: no node has {names}")
            else:
                usable.append(each)
        return usable, reasons

    def _refusal(self, generation: Generation) -> str | None:
        """The number of ranks that saved a generation, as text, if the present ranks cannot load it."""
        now = len(self.locations)
        if generation.world_size != now and not self._group:
            return f"{generation.world_size} ranks; this fit has {now}"
        if generation.places != now and (reason := self._why_not(generation.places)) is not None:
            return f"a run of {generation.places} ranks; this fit has {now}, and {reason}"
        return None

    def _scan(self) -> tuple[list[ShardInfo], list[str]]:
        """On the first rank of a node: the node's shards, and why others could not be read."""
        shards: list[ShardInfo] = []
        if self.location.local_rank != 0:
            return shards, []
        unreadable: list[str] = []
        try:
            files = self._retry(self.store.shard_files)
        except OSError as error:
            log.warning(
                "Ignoring the local checkpoints in %s: cannot read the folder (%s).", self.store.directory, error
            )
            return shards, [f"{self.store.directory} on {self.location.node}: {error}"]
        for file in files:
            expected = {**self.owner, "step": file.step, "generation": file.generation, "part": file.name}
            try:
                header = self._retry(partial(shard.read_identity, file.path, expected))
            except CorruptCheckpoint as error:
                self._quarantine(file.path, error)
                continue
            except OSError as error:
                log.warning("Ignoring %s: cannot read it (%s).", file.path, error)
                unreadable.append(f"{file.path} on {self.location.node}: {error}")
                continue
            found = header.identity
            layout = {"course": 0, "places": found.world_size, **found.layout}
            about: list[Any] = [layout.get(name) for name in ("kind", "commons", "alike", "course", "places")]
            # Otherwise another version wrote it, or it was damaged before it was sealed: its generation is unknown.
            if (
                [type(each) for each in about] == [str, int, str, int, int]
                and 0 <= layout["commons"] <= found.world_size
                and 1 <= found.world_size <= layout["places"] <= _MOST_RANKS
                and layout["course"] >= 0
            ):
                key = (self.location.node, found.step, found.generation, found.part)
                shards.append(ShardInfo(*key, header.size, found.world_size, *about))
        return shards, unreadable

    def _retry(self, read: Callable[[], T]) -> T:
        return self._patience()(read, f"Rank {self.location.rank} on {self.location.node}")

    def load(self, generation: Generation) -> dict[int, dict[str, Any]] | None:
        """Returns this rank's checkpoint when all ranks have verified theirs; ``None`` if some rank could not.

        Args:
            generation: One from :meth:`find`, the same on all ranks. Copies that turn out bad are removed from it.

        Returns:
            Checkpoints by the rank that saved them: first this rank's own, then those with the states of the further
            places that it takes; see :meth:`.Generation.saved_for`.
        """
        self.used_replica = False
        while not generation.missing:
            checkpoints, lost = None, self._fetch_missing(generation)
            if not lost:
                checkpoints, own_lost = self._read(generation)
                lost = self._gather_lost(own_lost)
            if not lost:
                return checkpoints
            for each in lost:
                generation.lose(each.node, each.shard)
        return None

    def _gather_lost(self, own_lost: list[_Lost]) -> list[_Lost]:
        """The lost shards that any rank has found; a collective."""
        lost = [each for of_rank in self._gather(own_lost) for each in of_rank]
        self.unreadable += [each.unreadable for each in lost if each.unreadable]
        return lost

    def _unreadable(self, node: str, name: str, what: str, why: object) -> _Lost:
        log.warning("Rank %d: ignoring %s: %s.", self.location.rank, what, why)
        return _Lost(node, name, f"{what} on {self.location.node}: {why}")

    def _fetch_missing(self, generation: Generation) -> list[_Lost]:
        """Fetches the shards that nodes lack and publishes them there; returns the copies that failed on any rank."""
        transfers = plan_transfers(generation, self.locations, self._group)
        self.used_replica |= bool(transfers)
        return self._transfer(generation, transfers, is_urgent=False)

    def hand_over(self, name: str, gone: Collection[int]) -> bool:
        """Copies to other nodes what only the nodes of some ranks have of a generation; a collective.

        Args:
            name: The generation's name.
            gone: The ranks.

        Returns:
            Whether the nodes of the other ranks have all of it.
        """
        found = generations([each for shards, _ in self._gather(self._scan()) for each in shards], group=self._group)
        generation = next((each for each in found if each.name == name and not each.missing), None)
        if generation is None:
            return False
        return not self._transfer(generation, plan_handover(generation, self.locations, gone), is_urgent=True)

    def _transfer(self, generation: Generation, transfers: Sequence[Transfer], is_urgent: bool) -> list[_Lost]:
        """Carries out transfers and publishes what arrives; returns the copies that failed on any rank."""
        if not transfers:
            return []
        own_lost: list[_Lost] = []
        received = self._fetch(transfers, lambda name: self._path(generation, name), is_urgent)
        for each in transfers:
            if each.destination != self.location.rank:
                continue
            source = self.locations[each.source].node
            what = f"{each.shard} of step {generation.step} from {source}"
            if (writer := received.get(each.shard)) is None:
                own_lost.append(self._unreadable(source, each.shard, what, "the transfer failed"))
                continue
            try:
                content = writer.memory[: each.size]
                shard.load_bytes(content, self._expected(generation, each.shard), what)
                writer.publish(generation.step, generation.name, each.size, b"")  # this restores the lost copy
            except CorruptCheckpoint as error:
                writer.abandon()
                self.bad.append((what, str(error)))
                own_lost.append(_Lost(source, each.shard))
            except OSError as error:
                writer.abandon()
                own_lost.append(self._unreadable(source, each.shard, what, error))
        # A rank also reads shards that other ranks of its node receive, so no rank reads before all have received.
        lost = self._gather_lost(own_lost)
        if not lost:
            for each in transfers:
                generation.holders[each.shard].append(self.locations[each.destination].node)
        return lost

    def _read(self, generation: Generation) -> tuple[dict[int, dict[str, Any]] | None, list[_Lost]]:
        """Verifies and reads the shards that this rank needs, from its own node."""
        ranks = {rank_shard(rank): rank for rank in self._needed(generation)}
        structures: dict[str, Any] = {}
        contents: dict[str, list[torch.Tensor]] = {}
        known = self.at_hand and self.at_hand.contents_of(generation.name, generation.replicated_digest)
        if known:
            contents.update(zip(generation.replicated, known, strict=True))
        for name in (*ranks, *generation.replicated):
            if name in contents:
                continue
            path = self._path(generation, name)
            try:
                header, contents[name] = self._retry(partial(shard.load, path, self._expected(generation, name)))
            except CorruptCheckpoint as error:
                self._quarantine(path, error)
                return None, [_Lost(self.location.node, name)]
            except OSError as error:
                return None, [self._unreadable(self.location.node, name, str(path), error)]
            structures[name] = header.structure
        checkpoints = {}
        replicated = [contents[name] for name in generation.replicated]
        for name, rank in ranks.items():
            shards = [contents[name], *replicated]
            try:
                tensors = [shards[number + 1][position] for number, position in structures[name]["places"]]
                checkpoints[rank] = unpack(structures[name]["state"], tensors)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                path = self._path(generation, name)
                self._quarantine(path, CorruptCheckpoint(f"shard {path} does not fit its generation ({error})"))
                return None, [_Lost(self.location.node, name)]
        return checkpoints, []

    def _expected(self, generation: Generation, name: str) -> dict[str, Any]:
        return {
            **self.owner,
            "step": generation.step,
            "generation": generation.name,
            "part": name,
            "world_size": generation.world_size,
        }

    def saved_at(self, generation: Generation) -> float | None:
        """When a generation was saved, in seconds since the epoch; ``None`` if this node has no shard for this rank."""
        for rank in self._needed(generation):
            with suppress(OSError):
                return self._path(generation, rank_shard(rank)).stat().st_mtime
        return None

    def _needed(self, generation: Generation) -> list[int]:
        return generation.saved_for(self.location.rank, len(self.locations), self._group)

    def _path(self, generation: Generation, name: str) -> Path:
        return self.store.path(generation.step, generation.name, name)

    def _quarantine(self, path: Path, error: CorruptCheckpoint) -> None:
        self.bad.append((str(path), str(error)))
        with suppress(OSError):  # another rank of this node may have moved it
            self.store.quarantine(path, str(error))

    def discard(self, names: Collection[str], reason: str) -> None:
        """Quarantines all shards of the named generations on this node."""
        if self.location.local_rank != 0:
            return
        with suppress(OSError):  # unreadable files stay where they are
            for file in self.store.shard_files():
                if file.generation in names:
                    with suppress(OSError):
                        self.store.quarantine(file.path, reason)
