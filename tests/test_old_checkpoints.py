"""Checkpoints of the first version of every file format are read, bit for bit."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from lightning_resilience._files import Patience
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.checkpoint.dcp import REST, nothing_unpickled
from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.checkpoint.node_store import NodeStore
from lightning_resilience.checkpoint.recovery import LocalTier
from lightning_resilience.checkpoint.safe_serialization import from_safe
from lightning_resilience.launch.inspection import inspect
from tests.saved_states import rank_state, sharded_state, state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("old_checkpoints.zip")) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "local").chmod(0o700)
    return tmp_path


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two values differ, in any bit, type or order."""
    if type(found) is not type(expected):
        return [f"{where}: {type(found)}, not {type(expected)}"]
    if isinstance(expected, torch.Tensor):
        about = [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in (found, expected)]
        bits = [each.detach().contiguous().view(-1).view(torch.uint8).tolist() for each in (found, expected)]
        return [] if about[0] == about[1] and bits[0] == bits[1] else [f"{where}: {found}, not {expected}"]
    if isinstance(expected, (np.ndarray, np.generic)):
        same = (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        return [] if same else [f"{where}: {found}, not {expected}"]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{where}: {list(found)}, not {list(expected)}"]
        inside = [each for key in expected for each in differences(found[key], expected[key], f"{where}.{key}")]
        return inside + differences(
            getattr(found, "__dict__", 0), getattr(expected, "__dict__", 0), f"{where}.__dict__"
        )
    if isinstance(expected, (list, tuple)) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return [each for index, pair in enumerate(pairs) for each in differences(*pair, f"{where}[{index}]")]
    return [] if repr(found) == repr(expected) else [f"{where}: {found!r}, not {expected!r}"]


def test_the_comparison_finds_a_bit() -> None:
    changed = state()
    changed["state_dict"]["odd"][2] = 0.0
    assert len(differences(changed, state())) == 1
    assert not differences(state(), state())


def test_file(saved: Path) -> None:
    path = saved / resume.checkpoint_name(12)
    stamp = resume.verify(path, {"fit": 0, "step": 12})
    loaded = from_safe(checkpoint_file.load(path, verified=stamp.file))
    assert not differences(loaded, state())
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_sharded_directory(saved: Path) -> None:
    path = saved / resume.checkpoint_name(24)
    resume.verify(path, {"fit": 0, "step": 24})
    with nothing_unpickled():
        loaded = _load_state_dict_from_keys(checkpoint_id=path)
    expected = {name: each.contiguous() for name, each in sharded_state()["state_dict"].items()}  # as DCP loads them
    loaded["state_dict"] = {name: loaded["state_dict"][name] for name in expected}
    assert not differences(loaded["optimizer_0"], sharded_state()["optimizer_0"])
    assert not differences(loaded["state_dict"], expected)
    rest = from_safe(torch.load(path / REST, weights_only=True))
    assert not differences(rest, {name: each for name, each in state().items() if name != "state_dict"})


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_a_node(saved: Path, rank: int) -> None:
    text, good = inspect(saved / "local")
    assert good, text
    store = NodeStore(saved / "local")
    where = rank_locations([("node", 0)] * 2)
    scans: list[Any] = []

    def gather(value: Any) -> list[Any]:  # the other rank of the node says what this one says, or has scanned nothing
        if isinstance(value, tuple):
            scans.append(LocalTier(store, where, 0, *about)._scan())
            return [scans[-1], ([], [])]
        return [value, value]

    about = {"run": "run-1", "fit": 0}, lambda: ("whole", 1), gather, lambda *_: {}, lambda _: "", Patience
    tier = LocalTier(store, where, rank, *about)
    (generation,), reasons = tier.find(forks=[12])
    assert (generation.step, generation.course, reasons) == (12, 1, [])
    assert not differences(tier.load(generation), {rank: rank_state(rank)[0]})
    assert not tier.bad
    store.close()
