"""Which local generations can be resumed from, and what has to travel between nodes for it: pure functions.

A generation is the state of all ranks at one boundary, in parts (see ``rank_state.py``). A rank needs its own part and,
where ranks have the same state, the common parts of any node. A part may lie on the rank's node, on another one that
keeps a replica of it, or on a node that did not take part in the save.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is among the others.

    Args:
        rank: Of all.
        world_size: How many there are.
        local_rank: Among the ranks of its node.
        local_world_size: How many share a node.
        node: The name of its node; no two nodes have the same.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
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
        found.append(RankLocation(rank, len(nodes), seen[host, number], sizes[host, number], name))
        seen[host, number] += 1
    return found


def rank_shard(rank: int) -> str:
    """The name of the part that holds what only this rank has."""
    return f"rank-{rank:05d}"


def replicated_shard(index: int, count: int) -> str:
    """The name of one of the ``count`` parts into which a node splits what all its ranks have."""
    return f"common-{index:02d}-of-{count:02d}"


def counts(forks: Sequence[int], course: int, step: int) -> bool:
    """Whether a state is on the way to where the training is.

    A fit begins on course 0. When it goes back to an older state, by whoever's decision, what is newer belongs to a
    course that it has left, and must not come back from a node that was away meanwhile.

    Args:
        forks: At which step each further course began, in the order of courses.
        course: On which the state was saved.
        step: Of the state.
    """
    return all(step <= fork for fork in forks[course:])


@dataclass(frozen=True)
class ShardInfo:
    """A part that a node has.

    Args:
        node: Its node.
        step: ``trainer.global_step`` of the generation.
        generation: The generation's name.
        part: The part's name.
        size: Bytes of the file.
        world_size: How many ranks the generation is of.
        kind: How the ranks shared their state out; see :attr:`Generation.kind`.
        commons: Into how many common parts a node has split its copy.
        alike: What the rank that wrote it took for what all ranks have alike; parts of which it differs do not go
            together.
        course: Of the training; see :func:`counts`.
    """

    node: str
    step: int
    generation: str
    part: str
    size: int
    world_size: int
    kind: str
    commons: int
    alike: str = ""
    course: int = 0


@dataclass
class Generation:
    """A generation, or what is left of it.

    Attributes:
        step: ``trainer.global_step``.
        name: Tells it from others of this step.
        world_size: How many ranks it is of.
        kind: How the ranks shared their state out, such as ``replicated`` or ``sharded``; another kind cannot read it.
        commons: Into how many common parts a node has split its copy.
        alike: What its ranks have alike, in short.
        course: Of the training; see :func:`counts`.
        holders: The nodes that have a part, in a fixed order.
        sizes: Bytes of the parts.
        differs: Whether some of its parts do not go together with the others.
    """

    step: int
    name: str
    world_size: int
    kind: str
    commons: int
    alike: str = ""
    course: int = 0
    holders: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    differs: bool = False

    def needed_by(self, rank: int) -> list[str]:
        """The parts that ``rank`` needs, its own first."""
        return [rank_shard(rank), *(replicated_shard(index, self.commons) for index in range(self.commons))]

    @property
    def lacking(self) -> list[str]:
        """The parts that nobody has."""
        needed = {part for rank in range(self.world_size) for part in self.needed_by(rank)}
        return sorted(part for part in needed if not self.holders.get(part))

    def lose(self, node: str, part: str) -> None:
        """The part on this node has turned out to be bad."""
        if node in self.holders.get(part, ()):
            self.holders[part].remove(node)


def generations(holdings: Iterable[ShardInfo], without: Collection[str] = ()) -> list[Generation]:
    """What there is, newest first.

    Args:
        holdings: Of all nodes.
        without: Names of generations that must not be used.
    """
    found: dict[tuple[int, str], Generation] = {}
    for each in sorted(holdings, key=lambda holding: (holding.node, holding.part)):
        if each.generation in without:
            continue
        one = found.setdefault(
            (each.step, each.generation),
            Generation(each.step, each.generation, each.world_size, each.kind, each.commons, each.alike, each.course),
        )
        if (one.world_size, one.kind, one.commons, one.alike, one.course) == (
            each.world_size,
            each.kind,
            each.commons,
            each.alike,
            each.course,
        ):
            one.holders.setdefault(each.part, []).append(each.node)
            one.sizes[each.part] = each.size
        one.differs |= one.alike != each.alike
    return [found[key] for key in sorted(found, reverse=True)]


@dataclass(frozen=True)
class Transfer:
    """A shard file that is to be brought from one rank to another.

    Args:
        source: The rank that reads the file.
        destination: The rank that receives it and writes it on its node; another one.
        part: The shard's name.
        size: Bytes of the file.
        path: The file; only the source needs to know.
    """

    source: int
    destination: int
    part: str
    size: int
    path: str | os.PathLike[str] | None = None

    def __str__(self) -> str:
        return f"{self.part} from rank {self.source} to rank {self.destination}"


def plan_transfers(generation: Generation, ranks: Sequence[RankLocation]) -> list[Transfer]:
    """What has to travel so that every node has what its ranks need; the same list on every rank.

    Only for a generation that lacks nothing. A node that has the part sends it, a rank of it that has not sent much.
    """
    on_node: dict[str, list[RankLocation]] = {}
    for location in ranks:
        on_node.setdefault(location.node, []).append(location)
    sent: dict[int, int] = dict.fromkeys(range(len(ranks)), 0)
    found = []
    for node, here in on_node.items():
        needed = {part: location.rank for location in here for part in [rank_shard(location.rank)]}
        for index in range(generation.commons):
            needed[replicated_shard(index, generation.commons)] = here[index % len(here)].rank
        for part, destination in needed.items():
            holders = [holder for holder in generation.holders[part] if holder in on_node]
            if node in holders:
                continue
            source = min(
                (location.rank for holder in holders for location in on_node[holder]), key=lambda r: (sent[r], r)
            )
            sent[source] += generation.sizes[part]
            found.append(Transfer(source, destination, part, generation.sizes[part]))
    return found
