"""Reading a local generation back, all ranks together: every byte is verified, what a node lacks comes from another.

What is bad is put into quarantine where it lies, and the next copy of it is tried. Torch and files, no Trainer.
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
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.checkpoint.generations import (
    Generation,
    RankLocation,
    ShardInfo,
    Transfer,
    generations,
    is_on_course,
    plan_transfers,
    rank_shard,
)
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.safe_serialization import unpack

log = logging.getLogger(__name__)

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each rank has given: ``all_gather_object``."""

Fetch = Callable[[Sequence[Transfer], Callable[[str], Path]], dict[str, ShardWriter]]
"""Has parts travel between ranks, given the path of each on a node that has it. Returns those that have arrived here,
in memory in which they can be published."""


@dataclass(frozen=True)
class _Lost:
    """A part that cannot be used where it is; ``unreadable`` says why where it may be intact."""

    node: str
    part: str
    unreadable: str = ""


class LocalTier:
    """The local generations of one fit, as one rank sees them. Every method is called on all ranks alike.

    Args:
        store: This node's.
        locations: Where all ranks are.
        rank: This one.
        owner: Fields of the identity that all parts of this fit have: run and fit.
        kind: How the ranks share their state out.
        gather: Gives every rank what each rank has given.
        fetch: Has parts travel between ranks.
        patience: What there is at the moment, for storage that does not answer.
    """

    def __init__(
        self,
        store: NodeStore,
        locations: Sequence[RankLocation],
        rank: int,
        owner: dict[str, Any],
        kind: str,
        gather: Gather,
        fetch: Fetch,
        patience: Callable[[], Patience] = Patience,
    ) -> None:
        self.store = store
        self.locations = locations
        self.location = locations[rank]
        self.owner = owner
        self.kind = kind
        self._gather = gather
        self._fetch = fetch
        self._patience = patience
        self.bad: list[tuple[str, str]] = []
        """What this rank has put into quarantine, and why."""
        self.unreadable: list[str] = []
        """What any rank could not read since :meth:`find`, and why; the same on all. It may be intact."""
        self.travelled = False
        """Whether the last :meth:`load` has needed a part from another node; the same on all ranks."""

    def find(self, without: Collection[str] = (), forks: Sequence[int] = ()) -> tuple[list[Generation], list[str]]:
        """The generations that can be resumed from, newest first, and why others cannot.

        Args:
            without: Names of generations that must not be used.
            forks: At which steps the training has left a course; see :func:`~.generations.is_on_course`.
        """
        scans = self._gather(self._scan())
        self.unreadable = [each for _, unreadable in scans for each in unreadable]
        found = generations([each for shards, _ in scans for each in shards], without)
        usable, reasons = [], []
        world_size = len(self.locations)
        for each in found:
            if each.world_size != world_size:
                reasons.append(
                    f"that of step {each.step} was saved by {each.world_size} ranks; this fit has {world_size}"
                )
            elif each.kind != self.kind:
                reasons.append(f"that of step {each.step} was saved by another strategy ({each.kind}, not {self.kind})")
            elif not is_on_course(forks, each.course, each.step):
                reasons.append(f"that of step {each.step} is of a course that the training has left")
            elif each.missing and each.differs:
                reasons.append(f"that of step {each.step} is a mixture: its ranks held different states")
            elif each.missing:
                parts = ", ".join(each.missing[:3]) + (", ..." if len(each.missing) > 3 else "")
                reasons.append(f"that of step {each.step} is incomplete: nobody has {parts}")
            else:
                usable.append(each)
        return usable, reasons

    def _scan(self) -> tuple[list[ShardInfo], list[str]]:
        """What this node has, and what of it cannot be read; its first rank looks."""
        shards: list[ShardInfo] = []
        if self.location.local_rank != 0:
            return shards, []
        unreadable: list[str] = []
        try:
            files = self._patiently(self.store.shard_files)
        except OSError as error:
            log.warning("%s cannot be read (%s); nothing in it is used.", self.store.directory, error)
            return shards, [f"{self.store.directory} on {self.location.node}: {error}"]
        for file in files:
            expected = {**self.owner, "step": file.step, "generation": file.generation, "part": file.part}
            try:
                header = self._patiently(partial(shard.read_identity, file.path, expected))
            except CorruptCheckpoint as error:
                self._quarantine(file.path, error)
                continue
            except OSError as error:
                log.warning("%s cannot be read (%s); it is not used.", file.path, error)
                unreadable.append(f"{file.path} on {self.location.node}: {error}")
                continue
            found = header.identity
            layout = {"course": 0, **found.layout}
            about: list[Any] = [layout.get(name) for name in ("kind", "commons", "alike", "course")]
            # Of another writer, or damaged before it was sealed: what it belongs to is not known.
            if (
                [type(each) for each in about] == [str, int, str, int]
                and 0 <= layout["commons"] <= found.world_size
                and layout["course"] >= 0
            ):
                key = (self.location.node, found.step, found.generation, found.part)
                shards.append(ShardInfo(*key, header.size, found.world_size, *about))
        return shards, unreadable

    def _patiently(self, read: Callable[[], T]) -> T:
        return self._patience()(read, f"Rank {self.location.rank} on {self.location.node}")

    def load(self, generation: Generation) -> dict[str, Any] | None:
        """This rank's checkpoint, once every rank has verified its own; ``None`` if a rank could not.

        Args:
            generation: Of :meth:`find`; the same on all ranks. It forgets what turns out to be bad.
        """
        self.travelled = False
        while not generation.missing:
            checkpoint, lost = None, self._bring(generation)
            if not lost:
                checkpoint, mine = self._read(generation)
                lost = self._all(mine)
            if not lost:
                return checkpoint
            for each in lost:
                generation.lose(each.node, each.part)
        return None

    def _all(self, mine: list[_Lost]) -> list[_Lost]:
        """What any rank has lost."""
        lost = [each for one in self._gather(mine) for each in one]
        self.unreadable += [each.unreadable for each in lost if each.unreadable]
        return lost

    def _unreadable(self, node: str, part: str, what: str, why: object) -> _Lost:
        log.warning("Rank %d: %s is not used: %s.", self.location.rank, what, why)
        return _Lost(node, part, f"{what} on {self.location.node}: {why}")

    def _bring(self, generation: Generation) -> list[_Lost]:
        """Has brought to each node what it lacks; returns what could not be had, or is bad, anywhere."""
        wanted = plan_transfers(generation, self.locations)
        if not wanted:
            return []
        self.travelled = True
        me, mine = self.location.rank, list[_Lost]()
        arrived = self._fetch(wanted, lambda part: self._path(generation, part))
        for each in wanted:
            if each.destination != me:
                continue
            source = self.locations[each.source].node
            what = f"{each.part} of step {generation.step} from {source}"
            if (writer := arrived.get(each.part)) is None:
                mine.append(self._unreadable(source, each.part, what, "it could not be had"))
                continue
            try:
                content = writer.memory[: each.size]
                shard.load_bytes(content, self._expected(generation, each.part), what)
                # Written here too: what has lost a copy has two again.
                writer.publish(generation.step, generation.name, each.size, b"")
            except CorruptCheckpoint as error:
                writer.abandon()
                self.bad.append((what, str(error)))
                mine.append(_Lost(source, each.part))
            except OSError as error:
                writer.abandon()
                mine.append(self._unreadable(source, each.part, what, error))
        # What the ranks of a node have received is there for all of them.
        lost = self._all(mine)
        if not lost:
            for each in wanted:
                generation.holders[each.part].append(self.locations[each.destination].node)
        return lost

    def _read(self, generation: Generation) -> tuple[dict[str, Any] | None, list[_Lost]]:
        """Verifies and reads the parts that this rank needs, from its own node."""
        contents: list[list[torch.Tensor]] = []
        document: Any = None
        for part in generation.needed_by(self.location.rank):
            path = self._path(generation, part)
            try:
                header, tensors = self._patiently(partial(shard.load, path, self._expected(generation, part)))
            except CorruptCheckpoint as error:
                self._quarantine(path, error)
                return None, [_Lost(self.location.node, part)]
            except OSError as error:
                return None, [self._unreadable(self.location.node, part, str(path), error)]
            if part == rank_shard(self.location.rank):
                document = header.structure
            contents.append(tensors)
        try:
            tensors = [contents[part + 1][position] for part, position in document["places"]]
            return unpack(document["state"], tensors), []
        except (ValueError, KeyError, IndexError, TypeError) as error:
            path = self._path(generation, rank_shard(self.location.rank))
            self._quarantine(path, CorruptCheckpoint(f"shard {path} does not fit its generation ({error})"))
            return None, [_Lost(self.location.node, rank_shard(self.location.rank))]

    def _expected(self, generation: Generation, part: str) -> dict[str, Any]:
        return {
            **self.owner,
            "step": generation.step,
            "generation": generation.name,
            "part": part,
            "world_size": generation.world_size,
        }

    def saved_at(self, generation: Generation) -> float | None:
        """When this rank's part was written here, in seconds since the epoch; ``None``: it is not here."""
        try:
            return self._path(generation, rank_shard(self.location.rank)).stat().st_mtime
        except OSError:
            return None

    def _path(self, generation: Generation, part: str) -> Path:
        return self.store.path(generation.step, generation.name, part)

    def _quarantine(self, path: Path, error: CorruptCheckpoint) -> None:
        self.bad.append((str(path), str(error)))
        with suppress(OSError):  # another rank of this node has done it
            self.store.quarantine(path, str(error))

    def discard(self, names: Collection[str], reason: str) -> None:
        """Puts everything that this node has of some generations into quarantine."""
        if self.location.local_rank != 0:
            return
        with suppress(OSError):  # what cannot be read is left where it is
            for file in self.store.shard_files():
                if file.generation in names:
                    with suppress(OSError):
                        self.store.quarantine(file.path, reason)
