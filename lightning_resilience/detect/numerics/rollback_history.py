"""The history of bad steps and rollbacks, in one small file in the folder of the fit. No Trainer, no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_resilience._files import load_json, write_json
from lightning_resilience.detect.numerics.reruns import PendingRerun

log = logging.getLogger(__name__)

REFILL_STEPS = 20
"""A bad step more than this many steps after the last problem is a new problem, with its own number of rollbacks."""


@dataclass
class Rollbacks:
    """The number of rollbacks because of one problem.

    Attributes:
        count: Number of rollbacks.
        furthest: The furthest step of the problem.
    """

    count: int = 0
    furthest: int = -1

    def add(self, step: int) -> int:
        """Counts a rollback because of a problem at ``step``; returns the number of rollbacks because of it."""
        is_new = not self.count or step > self.furthest + REFILL_STEPS
        self.count = 1 if is_new else self.count + 1
        self.furthest = max(step, self.furthest)
        return self.count


@dataclass(order=True, unsafe_hash=True)
class Window:
    """The batches of one optimizer step, the same ones on every rank.

    Attributes:
        epoch: The epoch of the batches.
        begin: The number of the first batch, in the order in which batches are fetched.
        end: One more than the number of the last batch.
        step: ``trainer.global_step`` before the step.
    """

    epoch: int
    begin: int
    end: int
    step: int


@dataclass
class RollbackHistory:
    """The content of the file.

    Attributes:
        world_size: The run's world size. With another one these numbers mean other batches, and windows are dropped.
        rollbacks: Number of rollbacks because of the last problem.
        trouble: The furthest step of that problem.
        went_back_from: The first window of that problem.
        skipped: Windows that are not trained on; ``passed_over`` in the file.
        validated: Windows whose steps are bad on other devices too.
        suspect: The step to try again on other devices.
        initially_nonfinite: Names of tensors that were not finite when the fit began, on purpose; ``unfit_from_birth``
            in the file.
        of_global: Whether the rollbacks to local checkpoints are used up, and ``rollbacks`` counts those to global
            checkpoints.
    """

    world_size: int
    rollbacks: int = 0
    trouble: int = -1
    went_back_from: Window | None = None
    skipped: list[Window] = field(default_factory=list)
    validated: list[Window] = field(default_factory=list)
    suspect: PendingRerun | None = None
    initially_nonfinite: list[str] | None = None
    of_global: bool = False

    @staticmethod
    def read(path: str | os.PathLike[str], world_size: int) -> RollbackHistory:
        """Reads the file; an empty history if no file exists, or (with a warning) if its format is incompatible.

        Raises:
            OSError: If the file cannot be read.
        """
        written = load_json(path)
        if written is None and not os.path.lexists(path):
            return RollbackHistory(world_size)
        try:
            content: dict[str, Any] = written or {}
            found = RollbackHistory(
                int(content["world_size"]),
                int(content["rollbacks"]),
                int(content["trouble"]),
                None if content["went_back_from"] is None else _window(content["went_back_from"]),
                [_window(each) for each in content["passed_over"]],
                [_window(each) for each in content["validated"]],
                PendingRerun.from_json(content["suspect"]),
                None if content["unfit_from_birth"] is None else [str(each) for each in content["unfit_from_birth"]],
                content.get("of_global") is True,
            )
        except (KeyError, TypeError, ValueError):
            log.warning("Ignoring %s, the history of bad steps: incompatible format.", path)
            return RollbackHistory(world_size)
        if found.world_size != world_size:
            of_global, unfit = found.of_global, found.initially_nonfinite
            return RollbackHistory(
                world_size, found.rollbacks, found.trouble, initially_nonfinite=unfit, of_global=of_global
            )
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file.

        Raises:
            OSError: If the file cannot be written.
        """
        content = asdict(self)
        for name, in_file in (("initially_nonfinite", "unfit_from_birth"), ("skipped", "passed_over")):
            content[in_file] = content.pop(name)
        write_json(path, content)

    def is_first(self, window: Window, loaded_step: int) -> bool:
        """Whether the loaded state may be to blame for a bad ``window``.

        False if the run has rolled back from this window or an earlier one, and the loaded state is not from after that
        window. If the same window is bad again from an older state, the window is to blame. If a later window is bad,
        that is another problem. Neither speaks against the state.

        Args:
            window: The window whose step is bad.
            loaded_step: The step of the loaded state, from which the training has come to the window.
        """
        last = self.went_back_from
        return last is None or last.step < loaded_step or (window.epoch, window.begin) < (last.epoch, last.begin)

    def count(self, step: int, windows: Sequence[Window], skip: bool) -> None:
        """Counts a rollback.

        Args:
            step: The furthest step of the problem.
            windows: The windows whose steps were bad, in order.
            skip: Whether to train on these windows no more.
        """
        back = Rollbacks(self.rollbacks, self.trouble)
        self.rollbacks = back.add(step)
        self.trouble = back.furthest
        self.of_global &= self.rollbacks > 1
        self.went_back_from = windows[0]
        if skip:
            self.skipped += windows

    def turn_to_global(self) -> None:
        """Records that the rollbacks to local checkpoints are used up: the last one counted is the first global one."""
        self.rollbacks, self.of_global = 1, True


def _window(content: Any) -> Window:
    values = [int(content[each.name]) for each in fields(Window)]
    return Window(*values)
