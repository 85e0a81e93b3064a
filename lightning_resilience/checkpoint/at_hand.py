"""The tensors that a survivor of a loss has just saved and still has in memory, so that it need not read them again.

After the loss of another rank the survivors save the state of the last boundary, and resume from it in a new fit. Most
of that state is the parameters and the optimizer state, which the survivors still hold unchanged. Reading them again
would take the same amount of new memory on all survivors at once, while a replacement waits for them or reads as well.

Nothing is trusted blindly: the tensors in memory are used only if their digest is the one in the shards.
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
        replicated_digest: Digest of these tensors, as recorded in the shards of the generation.
        tensors: The tensors, in the order in which they were digested.
        shares: For each replicated shard, the indices of the tensors that it holds, in their order.
        copied: Indices of the tensors that are returned as copies, since the restore writes into them: a callback may
            load the module twice, first with the averages of its weights.
    """

    generation: str
    replicated_digest: str
    tensors: Sequence[torch.Tensor]
    shares: Sequence[Sequence[int]]
    copied: Collection[int]

    def contents_of(self, generation: str, replicated_digest: str) -> list[list[torch.Tensor]] | None:
        """The content of a generation's replicated shards; ``None`` if it is not kept here or has changed since.

        Args:
            generation: Name of the generation.
            replicated_digest: Digest of the replicated tensors, as recorded in its shards.
        """
        if not self.tensors or (generation, replicated_digest) != (self.generation, self.replicated_digest):
            return None
        if not replicated_digest.endswith(f"-{digest_of(self.tensors)}"):
            return None
        given = [each.clone() if index in self.copied else each for index, each in enumerate(self.tensors)]
        return [[given[index] for index in share] for share in self.shares]


_kept: list[AtHand] = []


def keep(found: AtHand) -> None:
    """Keeps ``found`` for the next fit that resumes in this process."""
    _kept[:] = [found]


def take() -> AtHand | None:
    """Returns what is kept and drops the reference to it here, since its tensors take the memory of a whole state."""
    return _kept.pop() if _kept else None
