"""What a rank gives the others of its own state: what differs from rank 0's, and that comes back bitwise."""

from __future__ import annotations

import json
import pickle
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resilience.checkpoint.data_position import get_random_state
from lightning_resilience.checkpoint.safe_serialization import pack, unpack
from lightning_resilience.checkpoint.state_difference import Pieces, differing, digests, joined, pieces


def of(state: Any) -> Pieces:
    structure, tensors, left_out = pack(state)
    assert not left_out
    return pieces(structure, tensors)


def given(state: Any, first: Any) -> tuple[Pieces, Any]:
    """What a rank sends, and what it is taken for where that arrives."""
    sent = pickle.loads(pickle.dumps(differing(of(state), digests(of(first)))))
    return sent, unpack(*joined(of(first), sent))


def exactly(value: Any) -> str:
    """All of a state, in a form that tells 1 from True, 0.0 from -0.0 and one tensor from two."""
    structure, tensors, _ = pack(value)
    contents = [(str(each.dtype), list(each.shape), pickle.dumps(each.to_dense().tolist())) for each in tensors]
    return json.dumps(structure) + repr(contents) + repr(type(value))


def generators(seed: int) -> dict[str, Any]:
    kept = {}
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    own = torch.Generator().manual_seed(seed)
    for moment in ("epoch", "first_batch", "now"):
        kept[moment] = get_random_state(torch.device("cpu"), [own])
        torch.rand(1000, generator=own)
        torch.rand(1000)
    return kept


def test_ranks_that_draw_the_same_numbers_give_nearly_nothing() -> None:
    assert len(pickle.dumps(generators(1))) > 30_000
    sent, _ = given(generators(1), generators(1))
    assert not sent
    first, mine = ({**generators(1), "metrics": {"loss": torch.tensor(loss)}} for loss in (0.5, 0.25))
    sent, back = given(mine, first)
    assert len(pickle.dumps(sent)) < 200
    assert len(pickle.dumps(digests(of(first)))) < 4096
    assert exactly(back) == exactly(mine)


def test_ranks_that_draw_their_own_give_half_at_most() -> None:
    mine = generators(2)
    sent, back = given(mine, generators(1))
    assert len(pickle.dumps(sent)) < len(pickle.dumps(mine)) / 2
    assert exactly(back) == exactly(mine)


tied = torch.arange(100)
STATES: list[Any] = [
    None,
    {},
    {"a": 1},
    {"a": True},
    {"a": 1.0},
    {"a": -0.0},
    {"a": float("nan"), "b": float("-inf"), "c": 1 << 80},
    {"b": 1, "a": "x" * 300},
    {"a": "x" * 300, "b": 1},
    {"a": {"b": {"c": ["long"] * 100, "d": {}}}},
    {"a": {"b": ["long"] * 100}, "c": [None] * 100},
    {1: "x" * 300, 2: {"__resilience_type__": "tensor", "index": 0}},
    OrderedDict(z=(1, (2, {3})), a=b"\0\xff" * 200),
    {"a": tied, "b": [tied, tied.clone()]},
    {"a": tied.clone(), "b": [tied, tied]},
    {"a": torch.zeros(0, 3), "b": torch.tensor(2.5, dtype=torch.bfloat16), "c": torch.tensor([True])},
    {"a": torch.arange(6).reshape(2, 3).T, "b": torch.eye(2).to_sparse(), "c": torch.tensor([1 + 2j])},
    {"a": np.arange(5000, dtype=">i2"), "b": np.float32(3), "c": torch.nn.Parameter(torch.ones(3))},
    {"a": torch.randn(40_000, generator=torch.Generator().manual_seed(1))},
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_whatever_a_rank_keeps_is_told_from_what_another_keeps(number: int) -> None:
    for first in STATES:
        sent, back = given(STATES[number], first)
        assert exactly(back) == exactly(STATES[number])
        assert STATES[number] is not first or len(pickle.dumps(sent)) < 1500


def test_what_is_joined_belongs_to_nobody_else() -> None:
    state = {"a": torch.zeros(10)}
    back = unpack(*joined(of(state), {}))
    state["a"] += 1
    assert back["a"].sum() == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 4).t(), torch.eye(3).to_sparse(), torch.ones(4, dtype=torch.complex64).conj()],
    ids=["strides", "sparse", "conjugate"],
)
def test_what_is_taken_does_not_change_with_the_training(tensor: torch.Tensor) -> None:
    """Rank 0's is put together when it is written, in another thread."""
    taken, before = of({"of a loader": tensor}), exactly({"of a loader": tensor.clone()})
    tensor.add_(tensor)
    assert exactly(unpack(*joined(taken, {}))) == before
