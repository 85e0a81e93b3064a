"""What an object consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_resilience.checkpoint.reading_traces import outline


def test_an_object_is_looked_at_within_bounds() -> None:
    many = [[number] for number in range(40)]
    many[0].append(1)
    assert outline([[[each] for each in range(30)] for _ in range(30)] * 3) is not None
    assert outline([[[[each], [each]] for each in range(30)] for _ in range(30)]) is None
    assert outline(each for each in range(3)) is None
    odd: list[Any] = [float("nan"), np.float64(2), torch.device("cpu"), Path, {1, 2}, frozenset([3]), b"4", 5j]
    odd.append(odd)
    assert outline(odd) == outline(odd)
