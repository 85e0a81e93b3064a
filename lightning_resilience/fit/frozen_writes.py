"""Has what a training step writes to frozen parameters count once, although the step is made in several passes.

A student's teacher (MoCo, BYOL, DINO) is a frozen copy that the training step moves towards the student. A process that
also trains for absent ranks (:mod:`.absent_ranks`) would move it once for each of its passes. So each pass of a batch
begins with the same frozen parameters. What the last pass writes stays: the process's own.
"""

from __future__ import annotations

import torch

from lightning_resilience._torch import local

_MOST_COMPARED_BYTES = 2 << 30
"""How many bytes are copied once, to find out what a training step writes: a frozen language model would not fit."""


class FrozenWrites:
    """The frozen parameters that the training step of a module writes, found in the first batch with several passes.

    Args:
        module: The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._written: list[torch.nn.Parameter] | None = None
        self._begun: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None

    def begin_batch(self) -> None:
        """Called before the first pass of a batch."""
        self._begun = None

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Called before each pass: restores what an earlier pass of the batch has written."""
        if self._begun is None:
            written = self._frozen() if self._written is None else self._written
            self._begun = [(each, local(each).clone()) for each in written if not each.requires_grad]
            return
        if self._written is None:
            self._begun = [pair for pair in self._begun if not torch.equal(local(pair[0]), pair[1])]
            self._written = [each for each, _ in self._begun]
        for each, begun in self._begun:
            local(each).copy_(begun)

    def _frozen(self) -> list[torch.nn.Parameter]:
        """The frozen parameters, the smallest first, up to the limit."""
        room, found = _MOST_COMPARED_BYTES, []
        frozen = [each for each in self._module.parameters() if not each.requires_grad]
        for each in sorted(frozen, key=lambda each: local(each).nbytes):
            if (room := room - local(each).nbytes) < 0:
                break
            found.append(each)
        return found
