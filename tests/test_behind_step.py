"""Manual optimization: behind which batches no gradient waits for its optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_resilience._lightning import lightning_progress
from lightning_resilience._lightning.lightning_progress import BehindStep


class Training:
    """A generator and a critic, each with an optimizer; a user's training step is called with the batch's number."""

    def __init__(self, step: Callable[[Training, int], None]) -> None:
        self.generator, self.critic = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.first, self.second = (torch.optim.SGD(each.parameters(), 0.1) for each in (self.generator, self.critic))
        self.global_step = 0
        self._step = step

    def backward(self, detached: bool = False) -> None:
        made = self.generator(torch.randn(2, 3))
        self.critic(made.detach() if detached else made).mean().backward()

    def make_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.global_step += 1

    def clean(self, batches: int) -> Iterator[bool]:
        trainer: Any = SimpleNamespace(optimizers=[self.first, self.second], is_global_zero=True)
        behind = BehindStep(trainer)
        behind.at(0)
        for batch in range(batches):
            self._step(self, batch)
            yield behind.at(self.global_step)
        behind.close()


def both_in_each(t: Training, batch: int) -> None:
    """The gradients that the generator's loss leaves in the critic are nobody's."""
    t.first.zero_grad()
    t.backward()
    t.make_step(t.first)
    t.second.zero_grad()
    t.backward(detached=True)
    t.make_step(t.second)


def generator_now_and_then(t: Training, batch: int) -> None:
    t.second.zero_grad()
    t.backward()
    t.make_step(t.second)
    if batch % 5 == 4:
        t.first.zero_grad()
        t.backward()
        t.make_step(t.first)


def one_accumulates(t: Training, batch: int) -> None:
    t.first.zero_grad()
    t.backward()
    t.make_step(t.first)
    if batch % 3 == 2:
        t.make_step(t.second)
        t.second.zero_grad()


def one_accumulates_and_drops_late(t: Training, batch: int) -> None:
    if batch % 3 == 0:
        t.second.zero_grad()
    t.first.zero_grad()
    t.backward()
    t.make_step(t.first)
    if batch % 3 == 2:
        t.make_step(t.second)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (both_in_each, "111111111111"),
        (generator_now_and_then, "000011111111"),  # until its first step it may be one that accumulates
        (one_accumulates, "001001001001"),
        (one_accumulates_and_drops_late, "001001001001"),
    ],
)
def test_behind_which_batches_nothing_waits(step: Callable[[Training, int], None], expected: str) -> None:
    assert "".join(str(int(each)) for each in Training(step).clean(len(expected))) == expected


def test_saves_do_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    def windows_that_never_end_together(t: Training, batch: int) -> None:
        t.backward()
        optimizer = (t.first, t.second)[batch % 2]
        t.make_step(optimizer)
        optimizer.zero_grad()

    found = [*Training(windows_that_never_end_together).clean(lightning_progress._MOST_WAITED + 10)]
    assert not any(found[2:40])
    assert all(found[-5:])
    assert caplog.text.count("without the accumulated gradients") == 1
