"""What several passes of a training step write to frozen parameters counts once."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lightning_resilience.fit import frozen_writes
from lightning_resilience.fit.absent_ranks import AbsentRanks
from lightning_resilience.fit.frozen_writes import FrozenWrites


class Student(torch.nn.Module):
    """A student, its teacher, and a backbone that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.backbone = (torch.nn.Linear(2, 2) for _ in range(3))
        self.teacher.requires_grad_(False)
        self.backbone.requires_grad_(False)

    def step(self) -> None:
        for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            its.data = 0.5 * its.data + 0.5 * mine.data


def train(module: Student, passes: int, batches: int = 3) -> list[torch.Tensor]:
    writes = FrozenWrites(module)
    for _ in range(batches):
        writes.begin_batch()
        for _ in range(passes):
            writes.begin_pass()
            module.step()
    return [*module.teacher.parameters()]


@pytest.mark.parametrize("passes", [2, 3])
def test_a_teacher_is_moved_once_in_a_batch(passes: int) -> None:
    torch.manual_seed(1)
    module = Student()
    expected = [each.clone() for each in train(module, 1)]
    torch.manual_seed(1)
    again = Student()
    found = train(again, passes)
    assert all(map(torch.equal, found, expected))


def test_only_what_is_written_is_kept() -> None:
    module = Student()
    writes = FrozenWrites(module)
    for _ in range(2):
        writes.begin_pass()
        module.step()
    assert writes._begun is not None
    assert {*map(id, module.teacher.parameters())} == {id(each) for each, _ in writes._begun}
    module.teacher.requires_grad_(True)  # it is trained from now on
    writes.begin_batch()
    writes.begin_pass()
    assert writes._begun == []


@pytest.mark.parametrize("shrinks", [True, False])
def test_nothing_is_copied_where_no_rank_makes_further_passes(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(FrozenWrites, "begin_pass", lambda writes: begun.append(True))
    trainer: Any = MagicMock(lightning_module=Student())
    absent = AbsentRanks(trainer, *[MagicMock()] * 2, [1], 2, shrinks, *[MagicMock()] * 4)
    absent._expect_forward()
    assert len(begun) == (not shrinks)


def test_what_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_writes, "_MOST_COMPARED_BYTES", 20)
    module = Student()
    writes = FrozenWrites(module)
    writes.begin_pass()
    assert writes._begun is not None
    assert [each.numel() for each, _ in writes._begun] == [2, 2]
