"""Finds ranks whose state differs from the other ranks' state, by digests of the states. No Trainer, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Groups of ranks whose states should be the same, and are not.

    Attributes:
        step: ``trainer.global_step`` of these states.
        groups: Ranks that hold the same state, the largest group first. A rank that could not compute its digest is in
            no group, nor is a rank that holds another shard.
    """

    step: int
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def between(step: int, digests: Sequence[str], shards: int = 1) -> Divergence | None:
        """Compares the digests of all ranks; ``None`` if they are the same.

        Args:
            step: ``trainer.global_step`` of the states.
            digests: By rank; empty for a rank that could not compute its digest.
            shards: How many consecutive ranks hold one copy of the state together. If several shards differ, only the
                first one is reported.
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
        """The ranks outside of the group that has more than half of the ranks; none if there is no such majority."""
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
