"""What a rank that goes back need not read: it has saved that itself, a moment ago, and still has it in its memory.

After the loss of another rank the survivors save the state of the last boundary, and resume from it in a new fit. Most
of it are the parameters, and what optimizers keep for them, which they still have as they were. To read these again
takes as much new memory as they have, on all survivors at once, while a replacement waits for them, or reads them, too.

Nothing is taken on trust: what is at hand is used only if it has the digest that is in the shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lightning_resilience.checkpoint.digest import digest_of


@dataclass(frozen=True)
class AtHand:
    """The replicated tensors of a generation, as this process has saved them.

    Args:
        generation: Name of the generation.
        replicated_digest: What its shards have as the digest of these tensors.
        tensors: The tensors, in the order in which they were digested.
        shares: For each replicated shard which of them are in it, in their order.
        copied: Which of them are given as copies, since what is restored is written into them: a callback may load the
            module twice, first with the averages of its weights.
    """

    generation: str
    replicated_digest: str
    tensors: Sequence[torch.Tensor]
    shares: Sequence[Sequence[int]]
    copied: Collection[int]

    def contents_of(self, generation: str, replicated_digest: str) -> list[list[torch.Tensor]] | None:
        """What the replicated shards of a generation hold; ``None`` if it is not at hand, or is not as it was.

        Args:
            generation: Name of the generation.
            replicated_digest: What its shards have as the digest.
        """
        if not self.tensors or (generation, replicated_digest) != (self.generation, self.replicated_digest):
            return None
        if not replicated_digest.endswith(f"-{digest_of(self.tensors)}"):
            return None
        given = [each.clone() if index in self.copied else each for index, each in enumerate(self.tensors)]
        return [[given[index] for index in share] for share in self.shares]


_kept: list[AtHand] = []


def keep(found: AtHand) -> None:
    """Keeps it for the next fit that resumes in this process."""
    _kept[:] = [found]


def take() -> AtHand | None:
    """What is kept, from now on by the caller only: the memory is that of a whole state."""
    return _kept.pop() if _kept else None
