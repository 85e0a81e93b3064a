"""Which ranks hold another state than the others, judged by the digests of it. No Trainer, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Ranks whose states should be the same, and are not.

    Attributes:
        step: ``trainer.global_step`` of these states.
        groups: The ranks that hold the same, the largest group first. A rank that could not say is in none, nor is one
            that holds another shard.
    """

    step: int
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def between(step: int, digests: Sequence[str], shards: int = 1) -> Divergence | None:
        """What there is to say of the digests of all ranks; nothing if they are the same.

        Args:
            step: ``trainer.global_step`` of the states.
            digests: By rank; empty where a rank could not say.
            shards: How many ranks that follow each other hold the state together, and the next as many again. Of
                several shards that differ the first one is told of.
        """
        for shard in range(shards):
            groups: dict[str, list[int]] = {}
            for rank in range(shard, len(digests), shards):
                if digests[rank]:
                    groups.setdefault(digests[rank], []).append(rank)
            if len(groups) > 1:
                by_size = sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks))
                return Divergence(step, tuple(by_size))
        return None

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that more than half of all hold it against; none if there is no majority."""
        if 2 * len(self.groups[0]) <= sum(map(len, self.groups)):
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def __str__(self) -> str:
        if self.suspects:
            return f"{_ranks(self.suspects)} {_holds(self.suspects)} than the other {len(self.groups[0])} ranks"
        if [*map(len, self.groups)] == [1, 1]:
            (one,), (other,) = self.groups
            return f"ranks {one} and {other} hold different states: one of the two is wrong, and it is unknown which"
        parted = " from ".join(_ranks(group) for group in self.groups[:4]) + (" ..." if len(self.groups) > 4 else "")
        return f"the ranks hold different states, and without a majority it is unknown which is wrong: {parted}"


def _holds(ranks: Sequence[int]) -> str:
    return "holds a different state" if len(ranks) == 1 else "hold a different state"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
