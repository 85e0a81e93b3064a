"""Decides which local generations are complete, and which shards nodes must exchange to load one: pure functions.

A generation is the state of all ranks at one boundary, in shards (see ``rank_state.py``). A rank needs its own shard
and, where ranks hold replicas, the replicated shards of any node. A shard may lie on the rank's node, on another one
that keeps a copy of it, or on a node that did not take part in the save.

A run has one place for each rank with which it began. Of ``n`` processes, number ``r`` takes the places ``r``,
``r + n``, ``r + 2 * n``, ..., and its shard holds the states of these places. So three numbers determine which shards a
process needs: the number of processes that saved the generation, their number now, and the number of places of the run.

Where groups of ranks hold the state together, the numbers of places and of processes are multiples of the group size.
So a process takes only places of ranks that hold the same part of the state as the process itself.
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
"""The kind of a generation in which each rank had the whole state."""


def shard_path(directory: Path, step: int, generation: str, name: str) -> Path:
    """The file of a shard in ``directory``, the folder of a fit on a node."""
    return directory / f"step-{step:012d}-{generation}" / f"{name}{SHARD_SUFFIX}"


@dataclass(frozen=True)
class RankLocation:
    """The numbers of a rank in the job and on its node.

    Args:
        rank: Number of the rank in the job.
        world_size: Number of ranks in the job.
        local_rank: Number of the rank on its node.
        shares: Number of shares into which each node divides the state that all ranks have; the first ranks of the node
            save one share each. It is the number of ranks of a node, or of the smallest node if the numbers differ.
        node: The name of its node, unique in the job.
    """

    rank: int
    world_size: int
    local_rank: int
    shares: int
    node: str


def rank_locations(nodes: Sequence[tuple[str, int]]) -> list[RankLocation]:
    """The location of every rank.

    Args:
        nodes: The host and the node number of each rank. If a host has several nodes, each gets its own name.
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
    """The name of the shard that holds the state that only this rank has."""
    return f"rank-{rank:05d}"


def replicated_shard(index: int, count: int) -> str:
    """The name of one of the ``count`` shards into which a node partitions the state that all its ranks have."""
    return f"common-{index:02d}-of-{count:02d}"


def is_on_course(forks: Sequence[int], course: int, step: int) -> bool:
    """Whether a saved state is part of the present course of the training.

    A fit begins on course 0. When it rolls back to an older state, newer states belong to a course that it has left.
    They must not come back from a node that was absent during the rollback.

    Args:
        forks: The step at which each further course began, in the order of courses.
        course: The course on which the state was saved.
        step: The step of the state.
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
        replicated_shards: Number of replicated shards into which a node has partitioned its copy.
        replicated_digest: Digest of the replicated tensors on the rank that wrote the shard. Ranks that should hold the
            same tensors must have the same digest; otherwise their shards do not belong together.
        course: Course of the training; see :func:`is_on_course`.
        places: Number of ranks with which the run began; 0: the number of ranks that saved the generation.
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
        replicated_shards: Number of replicated shards into which a node has partitioned its copy.
        replicated_digest: Digest of the replicated tensors, where all ranks have the same.
        course: Course of the training; see :func:`is_on_course`.
        places: Number of ranks with which the run began; 0: the number of ranks that saved the generation.
        holders: For each shard, the nodes that have it, in a fixed order.
        sizes: For each shard, its size in bytes.
        differs: Whether some of its shards should have the same ``replicated_digest`` but do not.
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
        """The ranks of the save whose shards ``rank`` of the present ``world_size`` ranks needs.

        The first one is the rank whose shard holds its checkpoint: ``rank`` itself or, if fewer ranks saved the
        generation, the rank of the first group that holds the same part. The ranks that have saved the states of its
        places follow.

        Args:
            rank: The rank.
            world_size: Number of ranks now.
            group: Number of ranks that hold the state together.
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
        """Removes ``node`` from the holders of a shard whose copy there has turned out to be bad."""
        if node in self.holders.get(name, ()):
            self.holders[name].remove(node)


_ABOUT = attrgetter("world_size", "kind", "replicated_shards", "replicated_digest", "course", "places")
_COMMON = attrgetter("world_size", "kind", "replicated_shards", "course", "places")
"""The fields that must be the same in all shards of a generation."""
_OF_RANK = re.compile("rank-([0-9]+)")


def generations(shards: Iterable[ShardInfo], without: Collection[str] = (), group: int = 1) -> list[Generation]:
    """The generations to which ``shards`` belong, newest first.

    Args:
        shards: The shards of all nodes.
        without: Names of generations that must not be used.
        group: Number of ranks that hold the state together.
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
    """A shard file that one rank must send to another rank.

    Args:
        source: The rank that reads the file.
        destination: The rank that receives the file and writes it on its node; never ``source``.
        shard: The shard's name.
        size: Bytes of the file.
        path: The file; only the source needs it.
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

    Only for a generation without missing shards. Of the ranks on the nodes that have a shard, the rank with the fewest
    bytes to send so far sends it.

    Args:
        generation: The generation that the ranks need.
        ranks: Locations of all ranks, by rank.
        group: Number of ranks that hold the state together.
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


def plan_handover(generation: Generation, ranks: Sequence[RankLocation], gone: Collection[int]) -> list[Transfer]:
    """The transfers after which the nodes of the other ranks have all of a generation; the same list on every rank.

    The other ranks receive in turn, since a process may need any shard after the number of ranks has changed.

    Args:
        generation: A generation without missing shards.
        ranks: Locations of all ranks, by rank.
        gone: The ranks whose nodes may end. A node of theirs that has another rank, too, does not.
    """
    staying = [each for each in ranks if each.rank not in gone]
    nodes = {each.node for each in staying}
    leaving = [each for each in ranks if each.node not in nodes]
    names = [name for name, holders in sorted(generation.holders.items()) if nodes.isdisjoint(holders)]
    found = []
    for number, name in enumerate(names):
        here = [each.rank for each in leaving if each.node in generation.holders[name]]
        source, destination = here[number % len(here)], staying[number % len(staying)].rank
        found.append(Transfer(source, destination, name, generation.sizes[name]))
    return found
