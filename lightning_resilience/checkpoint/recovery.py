"""Reading a local generation back, all ranks together: every byte is verified, what a node lacks comes from another.

What is bad is put into quarantine where it lies, and the next copy of it is tried. Torch and files, no Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.generations import (
    Generation,
    Holding,
    Journey,
    Place,
    generations,
    journeys,
    rank_part,
)
from lightning_resilience.checkpoint.plain import unpack
from lightning_resilience.checkpoint.store import NodeStore, PartWriter

log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each rank has given: ``all_gather_object``."""

Fetch = Callable[[Sequence[Journey], Callable[[str], Path]], dict[str, PartWriter]]
"""Has parts travel between ranks, given the path of each on a node that has it. Returns those that have arrived here,
in memory in which they can be published."""


class LocalTier:
    """The local generations of one fit, as one rank sees them. Every method is called on all ranks alike.

    Args:
        store: This node's.
        places: Where all ranks are.
        rank: This one.
        owner: Fields of the identity that all parts of this fit have: run and fit.
        kind: How the ranks share their state out.
        gather: Gives every rank what each rank has given.
        fetch: Has parts travel between ranks.
    """

    def __init__(
        self,
        store: NodeStore,
        places: Sequence[Place],
        rank: int,
        owner: dict[str, Any],
        kind: str,
        gather: Gather,
        fetch: Fetch,
    ) -> None:
        self.store = store
        self.places = places
        self.place = places[rank]
        self.owner = owner
        self.kind = kind
        self._gather = gather
        self._fetch = fetch
        self.bad: list[tuple[str, str]] = []
        """What this rank has put into quarantine, and why."""
        self.travelled = False
        """Whether the last :meth:`load` has needed a part from another node; the same on all ranks."""

    def find(self, without: Collection[str] = ()) -> tuple[list[Generation], list[str]]:
        """The generations that can be resumed from, newest first, and why others cannot.

        Args:
            without: Names of generations that must not be used.
        """
        found = generations([each for held in self._gather(self._scan()) for each in held], without)
        usable, reasons = [], []
        world_size = len(self.places)
        for each in found:
            if each.world_size != world_size:
                reasons.append(
                    f"that of step {each.step} was saved by {each.world_size} ranks; this fit has {world_size}"
                )
            elif each.kind != self.kind:
                reasons.append(f"that of step {each.step} was saved by another strategy ({each.kind}, not {self.kind})")
            elif each.lacking:
                parts = ", ".join(each.lacking[:3]) + (", ..." if len(each.lacking) > 3 else "")
                reasons.append(f"that of step {each.step} is incomplete: nobody has {parts}")
            else:
                usable.append(each)
        return usable, reasons

    def _scan(self) -> list[Holding]:
        """What this node has; its first rank looks."""
        if self.place.local_rank != 0:
            return []
        holdings = []
        for held in self.store.held():
            try:
                header = shard.read_identity(
                    held.path,
                    {**self.owner, "step": held.step, "generation": held.generation, "part": held.part},
                )
            except shard.CorruptShard as error:
                self._quarantine(held.path, error)
                continue
            except OSError as error:
                log.warning("%s cannot be read (%s); it is not used.", held.path, error)
                continue
            found = header.identity
            kind, commons, alike = (found.layout.get(key) for key in ("kind", "commons", "alike"))
            if (
                isinstance(kind, str)
                and isinstance(commons, int)
                and 0 <= commons <= found.world_size
                and isinstance(alike, str)
            ):
                holdings.append(
                    Holding(
                        self.place.node,
                        found.step,
                        found.generation,
                        found.part,
                        header.size,
                        found.world_size,
                        kind,
                        commons,
                        alike,
                    )
                )
        return holdings

    def load(self, generation: Generation) -> dict[str, Any] | None:
        """This rank's checkpoint, once every rank has verified its own; ``None`` if a rank could not.

        Args:
            generation: Of :meth:`find`; the same on all ranks. It forgets what turns out to be bad.
        """
        self.travelled = False
        while not generation.lacking:
            checkpoint, bad = None, self._bring(generation)
            if not bad:
                checkpoint, mine = self._read(generation)
                bad = [each for one in self._gather(mine) for each in one]
            if not bad:
                return checkpoint
            for node, part in bad:
                generation.lose(node, part)
        return None

    def _bring(self, generation: Generation) -> list[tuple[str, str]]:
        """Has brought to each node what it lacks; returns what has turned out to be bad anywhere."""
        wanted = journeys(generation, self.places)
        if not wanted:
            return []
        self.travelled = True
        me, mine = self.place.rank, []
        arrived = self._fetch(wanted, lambda part: self._path(generation, part))
        for each in wanted:
            if each.destination != me:
                continue
            source = self.places[each.source].node
            writer = arrived.get(each.part)
            try:
                if writer is None:
                    raise shard.CorruptShard(f"{each.part} of step {generation.step} could not be had from {source}")
                content = writer.memory[: each.size]
                shard.load_bytes(content, self._expected(generation, each.part), f"{each.part} from {source}")
                # Written here too: what has lost a copy has two again.
                writer.publish(generation.step, generation.name, each.size, b"")
            except (shard.CorruptShard, OSError) as error:
                if writer is not None:
                    writer.abandon()
                self.bad.append((f"{each.part} of step {generation.step} on {source}", str(error)))
                mine.append((source, each.part))
        # What the ranks of a node have received is there for all of them.
        bad = [each for one in self._gather(mine) for each in one]
        if not bad:
            for each in wanted:
                generation.holders[each.part].append(self.places[each.destination].node)
        return bad

    def _read(self, generation: Generation) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
        """Verifies and reads the parts that this rank needs, from its own node."""
        contents: list[list[torch.Tensor]] = []
        document: Any = None
        for part in generation.needed_by(self.place.rank):
            path = self._path(generation, part)
            try:
                header, tensors = shard.load(path, self._expected(generation, part))
            except shard.CorruptShard as error:
                self._quarantine(path, error)
                return None, [(self.place.node, part)]
            except OSError as error:
                self.bad.append((str(path), str(error)))
                return None, [(self.place.node, part)]
            if part == rank_part(self.place.rank):
                document = header.skeleton
            contents.append(tensors)
        try:
            tensors = [contents[part + 1][position] for part, position in document["places"]]
            return unpack(document["state"], tensors), []
        except (ValueError, KeyError, IndexError, TypeError) as error:
            path = self._path(generation, rank_part(self.place.rank))
            self._quarantine(path, shard.CorruptShard(f"shard {path} does not fit its generation ({error})"))
            return None, [(self.place.node, rank_part(self.place.rank))]

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
            return self._path(generation, rank_part(self.place.rank)).stat().st_mtime
        except OSError:
            return None

    def _path(self, generation: Generation, part: str) -> Path:
        return self.store.directory / f"step-{generation.step:012d}-{generation.name}" / f"{part}.shard"

    def _quarantine(self, path: Path, error: shard.CorruptShard) -> None:
        self.bad.append((str(path), str(error)))
        with suppress(OSError):  # another rank of this node has done it
            self.store.quarantine(path, str(error))

    def discard(self, names: Collection[str], reason: str) -> None:
        """Puts everything that this node has of some generations into quarantine."""
        if self.place.local_rank != 0:
            return
        for held in self.store.held():
            if held.generation in names:
                with suppress(OSError):
                    self.store.quarantine(held.path, reason)
