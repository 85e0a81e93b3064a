"""Which ranks hold another state than the others, judged by the digests of it. No Trainer, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Ranks whose states should be the same, and are not.

    Attributes:
        step: ``trainer.global_step`` of these states.
        groups: The ranks that hold the same, the largest group first. A rank that could not say is in none.
    """

    step: int
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def between(step: int, digests: Sequence[str]) -> Divergence | None:
        """What there is to say of the digests of all ranks; nothing if they are the same.

        Args:
            step: ``trainer.global_step`` of the states.
            digests: By rank; empty where a rank could not say.
        """
        groups: dict[str, list[int]] = {}
        for rank, digest in enumerate(digests):
            if digest:
                groups.setdefault(digest, []).append(rank)
        if len(groups) < 2:
            return None
        return Divergence(step, tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks))))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that more than half of all hold it against; none if there is no majority."""
        if 2 * len(self.groups[0]) <= sum(map(len, self.groups)):
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def __str__(self) -> str:
        if self.suspects:
            return f"{_ranks(self.suspects)} {_holds(self.suspects)} another state than the other {len(self.groups[0])}"
        if self.groups == ((0,), (1,)):
            return "ranks 0 and 1 hold different states: one of the two is wrong, and nothing says which"
        parted = " from ".join(_ranks(group) for group in self.groups[:4]) + (" ..." if len(self.groups) > 4 else "")
        return f"the ranks hold different states, and no majority says which is wrong: {parted}"


def _holds(ranks: Sequence[int]) -> str:
    return "holds" if len(ranks) == 1 else "hold"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
