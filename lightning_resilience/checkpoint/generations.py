"""Which local generations can be resumed from, and what has to travel between nodes for it: pure functions.

A generation is the state of all ranks at one boundary, in shards (see ``rank_state.py``). A rank needs its own shard
and, where ranks hold replicas, the replicated shards of any node. A shard may lie on the rank's node, on another one
that keeps a copy of it, or on a node that did not take part in the save.

The places of a run are those of the ranks with which it was begun. Of ``n`` processes, number ``r`` takes the places
``r``, ``r + n``, ``r + 2 * n``, ..., and its shard has their states. So which shards a process needs follows from how
many processes have saved the generation, how many there are now, and how many places the run has.

Where groups of ranks hold the state together, there are whole groups of places and of processes. So a process takes the
places of ranks that have the same part of the state as itself.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

SHARD_SUFFIX = ".shard"
GENERATION_FOLDER = re.compile(r"step-(?P<step>[0-9]{12,})-(?P<generation>[0-9a-f]{8})")

WHOLE = "whole"
"""The kind of a generation whose ranks each had the whole state."""


def shard_path(directory: Path, step: int, generation: str, name: str) -> Path:
    """Where a node keeps a shard in the folder of its fit."""
    return directory / f"step-{step:012d}-{generation}" / f"{name}{SHARD_SUFFIX}"


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is among the others.

    Args:
        rank: Of all.
        world_size: How many there are.
        local_rank: Among the ranks of its node.
        shares: Into how many shares each node divides what all ranks have; its first ranks save one each. As many as it
            has ranks: of nodes with different numbers, as the smallest has.
        node: The name of its node; no two nodes have the same.
    """

    rank: int
    world_size: int
    local_rank: int
    shares: int
    node: str


def rank_locations(nodes: Sequence[tuple[str, int]]) -> list[RankLocation]:
    """The location of every rank.

    Args:
        nodes: For each rank its host and the number of its node. Several nodes of a host get names of their own.
    """
    numbers: dict[str, list[int]] = {}
    for host, number in sorted(set(nodes)):
        numbers.setdefault(host, []).append(number)
    found = []
    sizes, seen = Counter(nodes), Counter[tuple[str, int]]()
    for rank, (host, number) in enumerate(nodes):
        name = host if len(numbers[host]) == 1 else f"{host}-{numbers[host].index(number)}"
        found.append(RankLocation(rank, len(nodes), seen[host, number], min(sizes.values()), name))
        seen[host, number] += 1
    return found


def rank_shard(rank: int) -> str:
    """The name of the shard that holds what only this rank has."""
    return f"rank-{rank:05d}"


def replicated_shard(index: int, count: int) -> str:
    """The name of one of the ``count`` shards into which a node partitions what all its ranks have."""
    return f"common-{index:02d}-of-{count:02d}"


def is_on_course(forks: Sequence[int], course: int, step: int) -> bool:
    """Whether a state leads to where the training is now.

    A fit begins on course 0. When it rolls back to an older state, newer states belong to a course that it has left
    and must not come back from a node that was away meanwhile.

    Args:
        forks: At which step each further course began, in the order of courses.
        course: On which the state was saved.
        step: Of the state.
    """
    return all(step <= fork for fork in forks[course:])


@dataclass(frozen=True)
class ShardInfo:
    """A shard that a node has.

    Args:
        node: The node's name.
        step: ``trainer.global_step`` of the generation.
        generation: The generation's name.
        name: The shard's name.
        size: Bytes of the file.
        world_size: Number of ranks that saved the generation.
        kind: How the ranks partitioned their state; see :attr:`Generation.kind`.
        replicated_shards: Into how many replicated shards a node has partitioned its copy.
        replicated_digest: Digest of the replicated tensors on the rank that wrote it. Shards of ranks that should have
            the same do not belong together if these differ.
        course: Of the training; see :func:`is_on_course`.
        places: How many ranks the run was begun with; 0: as many as have saved the generation.
    """

    node: str
    step: int
    generation: str
    name: str
    size: int
    world_size: int
    kind: str
    replicated_shards: int
    replicated_digest: str = ""
    course: int = 0
    places: int = 0


@dataclass
class Generation:
    """A generation, complete or not.

    Attributes:
        step: ``trainer.global_step``.
        name: Random id.
        world_size: Number of ranks that saved it.
        kind: How the ranks partitioned their state; a fit of another kind cannot read it.
        replicated_shards: Into how many replicated shards a node has partitioned its copy.
        replicated_digest: Digest of the replicated tensors, where all ranks have the same.
        course: Of the training; see :func:`is_on_course`.
        places: How many ranks the run was begun with; 0: as many as have saved the generation.
        holders: The nodes that have a shard, in a fixed order.
        sizes: Bytes of the shards.
        differs: Whether some of its shards should have the same ``replicated_digest`` and do not.
    """

    step: int
    name: str
    world_size: int
    kind: str
    replicated_shards: int
    replicated_digest: str = ""
    course: int = 0
    places: int = 0
    holders: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    differs: bool = False

    def saved_for(self, rank: int, world_size: int, group: int = 1) -> list[int]:
        """The ranks whose shards ``rank`` of ``world_size`` ranks needs.

        First the one from whose shard it takes its checkpoint: itself or, if there were not so many, the rank of the
        first group that has the same. Then those that have saved the states of its places.

        Args:
            rank: The rank.
            world_size: How many there are.
            group: How many ranks hold the state together.
        """
        first = rank if rank < self.world_size else rank % group
        places = range(rank, self.places or self.world_size, world_size)
        return list(dict.fromkeys([first, *(place % self.world_size for place in places)]))

    @property
    def replicated(self) -> list[str]:
        """The replicated shards, in their order."""
        return [replicated_shard(index, self.replicated_shards) for index in range(self.replicated_shards)]

    @property
    def missing(self) -> list[str]:
        """The shards that no node has."""
        needed = [*map(rank_shard, range(self.world_size)), *self.replicated]
        return sorted(name for name in needed if not self.holders.get(name))

    def lose(self, node: str, name: str) -> None:
        """Forgets a shard on a node that has turned out to be bad."""
        if node in self.holders.get(name, ()):
            self.holders[name].remove(node)


_ABOUT = attrgetter("world_size", "kind", "replicated_shards", "replicated_digest", "course", "places")
_COMMON = attrgetter("world_size", "kind", "replicated_shards", "course", "places")
"""What all shards of a generation must agree in."""
_OF_RANK = re.compile("rank-([0-9]+)")


def generations(shards: Iterable[ShardInfo], without: Collection[str] = (), group: int = 1) -> list[Generation]:
    """What there is, newest first.

    Args:
        shards: Of all nodes.
        without: Names of generations that must not be used.
        group: How many ranks hold the state together.
    """
    found: dict[tuple[int, str], Generation] = {}
    digests: dict[tuple[int, str, int], str] = {}
    for each in sorted(shards, key=lambda shard: (shard.node, shard.name)):
        if each.generation in without:
            continue
        key = (each.step, each.generation)
        one = found.setdefault(key, Generation(*key, *_ABOUT(each)))
        of_rank = _OF_RANK.fullmatch(each.name) if group > 1 else None
        part = int(of_rank[1]) % group if of_rank else 0
        differs = digests.setdefault((*key, part), each.replicated_digest) != each.replicated_digest
        if _COMMON(one) == _COMMON(each) and not differs:
            one.holders.setdefault(each.name, []).append(each.node)
            one.sizes[each.name] = each.size
        one.differs |= differs
    return [found[key] for key in sorted(found, reverse=True)]


@dataclass(frozen=True)
class Transfer:
    """A shard file that is to be brought from one rank to another.

    Args:
        source: The rank that reads the file.
        destination: The rank that receives it and writes it on its node; another one.
        shard: The shard's name.
        size: Bytes of the file.
        path: The file; only the source needs to know.
    """

    source: int
    destination: int
    shard: str
    size: int
    path: str | os.PathLike[str] | None = None

    def __str__(self) -> str:
        return f"{self.shard} from rank {self.source} to rank {self.destination}"


def plan_transfers(generation: Generation, ranks: Sequence[RankLocation], group: int = 1) -> list[Transfer]:
    """The transfers after which every node has the shards that its ranks need; the same list on every rank.

    Only for a generation without missing shards. Of the nodes that have a shard, the rank that has sent least sends it.

    Args:
        generation: What they need.
        ranks: Where all ranks are.
        group: How many of them hold the state together.
    """
    on_node: dict[str, list[RankLocation]] = {}
    for location in ranks:
        on_node.setdefault(location.node, []).append(location)
    sent: dict[int, int] = dict.fromkeys(range(len(ranks)), 0)
    found = []
    for node, here in on_node.items():
        needed: dict[str, int] = {}
        for location in here:
            for rank in generation.saved_for(location.rank, len(ranks), group):
                needed.setdefault(rank_shard(rank), location.rank)
        for index, name in enumerate(generation.replicated):
            needed[name] = here[index % len(here)].rank
        for name, destination in needed.items():
            holders = [holder for holder in generation.holders[name] if holder in on_node]
            if node in holders:
                continue
            source = min(
                (location.rank for holder in holders for location in on_node[holder]), key=lambda r: (sent[r], r)
            )
            sent[source] += generation.sizes[name]
            found.append(Transfer(source, destination, name, generation.sizes[name]))
    return found
