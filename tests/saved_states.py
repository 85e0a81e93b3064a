"""The states in ``old_checkpoints.zip``, which the first version of the file formats has written."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch


def tensors(seed: int) -> OrderedDict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: OrderedDict[str, torch.Tensor] = OrderedDict(
        weight=torch.randn(5, 3, generator=generator),
        half=torch.randn(7, generator=generator).to(torch.bfloat16),
        transposed=torch.randn(4, 2, generator=generator).t(),
        count=torch.tensor(12),
        nothing=torch.empty(0, 3),
        complex=torch.randn(2, dtype=torch.complex64, generator=generator),
        mask=torch.tensor([True, False]),
        odd=torch.tensor([float("nan"), float("-inf"), -0.0]),
    )
    made["tied"] = made["weight"]
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


def state() -> dict[str, Any]:
    """What a checkpoint may hold: a value of every type that is kept."""
    return {
        "state_dict": tensors(1),
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(5, 3)}}, "param_groups": [{"lr": 1e-3}]}
        ],
        "parameter": torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
        "numbers": [0, -5, 2**63, 2**2100, 0.1, float("inf"), float("-0.0"), 1 + 2j, True, None],
        "texts": ["ascii", "grün", "\ud800", b"bytes", b"", bytearray(b"more")],
        "containers": [(1, (2,)), {3}, frozenset({4}), deque([5], 2), Counter("aab"), defaultdict(list, {6: [7]})],
        "keys": {(1, 2): "tuple", 1.5: "float", None: "none", "__resilience_type__": "ours", np.int64(3): "numpy"},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "numpy": [
            np.arange(6, dtype="<i2").reshape(2, 3),
            np.float32(0.1),
            np.datetime64("2024-02-29"),
            np.bool_(True),
        ],
        "large": np.full(2100, 0.1),
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "paths": [Path("a/b"), PurePosixPath("c"), PureWindowsPath("d\\e")],
        "times": [
            datetime.datetime(2024, 2, 29, 12, 30, 15, 7, tzinfo=datetime.timezone.utc),
            datetime.date(2024, 2, 29),
            datetime.timedelta(days=-1, microseconds=5),
        ],
    }


def rank_state(rank: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What a rank saves locally, and which tensors in it all ranks have alike."""
    whole = state()
    whole["rank"] = torch.full((3,), float(rank))
    replicated = [each for name, each in whole["state_dict"].items() if name not in ("nothing", "tied")]
    return whole, replicated


def sharded_state() -> dict[str, Any]:
    """What the sharded checkpoint holds of module and optimizer."""
    moments = {"step": torch.tensor(12.0), "exp_avg": torch.arange(6.0).reshape(2, 3)}
    return {"state_dict": tensors(1), "optimizer_0": {"state": {"0": moments}, "lr": 0.1}}
