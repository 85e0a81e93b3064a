"""Killed anywhere, resumed, the run ends bitwise as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resilience.checkpoint import data_position
from tests.harness import result, run, samples

_references: dict[str, tuple[Any, Any]] = {}


def make(tmp: Path, name: str, **options: Any) -> dict[str, Any]:
    folder = tmp / name
    folder.mkdir()
    return {"run_dir": str(folder / "run"), "out": str(folder / "out"), "log": str(folder / "log"), **options}


def undisturbed(tmp: Path, **options: Any) -> tuple[Any, Any]:
    key = repr(sorted(options.items()))
    if key not in _references:
        config = make(tmp, "reference", **options)
        codes, text = run(config, tmp / "reference")
        assert set(codes) == {0}, text
        _references[key] = result(config), samples(config)
    return _references[key]


def killed_and_resumed(tmp: Path, events: list[dict[str, Any]], **options: Any) -> tuple[Any, Any, str]:
    """Runs the program until it gets through; every event happens once."""
    config = make(tmp, "disturbed", events=[{"once": True, "do": "SIGKILL", **event} for event in events], **options)
    output = ""
    for _ in range(len(events) + 2):
        codes, output = run(config, tmp / "disturbed")
        if set(codes) == {0} and Path(config["out"]).exists():
            return result(config), samples(config), output
        assert -signal.SIGKILL in codes or set(codes) == {0} or 75 in codes, output
    raise AssertionError(f"did not get through:\n{output}")


LOADERS = [
    {"data": "sequential"},
    {"data": "sequential", "workers": 2},
    {"data": "shuffle"},
    {"data": "shuffle", "workers": 2},
    {"data": "generator"},
    {"data": "iterable"},
    {"data": "iterable", "workers": 2},
    {"data": "stateful", "augment": False},
    {"data": "stateful", "augment": False, "workers": 2},
    {"data": "stateful_iterable", "workers": 2},
    {"data": "shuffle", "workers": 2, "persistent": True, "augment": False},
]


@pytest.mark.parametrize("options", LOADERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert killed_and_resumed(tmp_path, [{"at": "train", "step": 27}], **options)[:2] == undisturbed(
        tmp_path, **options
    )


TRAINERS = {
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "save_every": 1},
    "validation within the epoch": {"validation": True, "plateau": True, "trainer": {"val_check_interval": 4}},
    "plateau on the training loss": {"plateau": True, "save_every": 3},
    "early stopping": {"validation": True, "early_stopping": True, "trainer": {"max_epochs": 8}, "save_every": 3},
    "manual optimization": {"manual": True},
    "max_steps": {"trainer": {"max_steps": 40, "max_epochs": -1}},
    "loaders made anew": {"trainer": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}, "validation": True},
}


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS.keys())
@pytest.mark.parametrize("step", [17, 31])
def test_what_the_trainer_does_beside(tmp_path: Path, options: dict[str, Any], step: int) -> None:
    events = [{"at": "train", "step": step}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [{"data": "shuffle"}, {"data": "shuffle", "workers": 2, "validation": True, "plateau": True}],
    ids=["plain", "workers and validation"],
)
def test_ranks(tmp_path: Path, world_size: int, options: dict[str, Any]) -> None:
    options = {**options, "trainer": {"devices": world_size}}
    events = [{"at": "train", "step": 23, "rank": 1}, {"at": "train", "step": 40, "rank": 0}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


def test_stateful_distributed_loader(tmp_path: Path) -> None:
    options = {"data": "stateful_distributed", "workers": 2, "augment": False, "trainer": {"devices": 2}}
    events = [{"at": "train", "step": 23, "rank": 1}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


def test_sharded(tmp_path: Path) -> None:
    """FSDP2 through ModelParallelStrategy: a directory of shards, sealed; nothing is gathered."""
    options = {"sharded": True, "trainer": {"devices": 2}}
    events = [{"at": "train", "step": 23, "rank": 1}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize(("workers", "skipped"), [(0, True), (2, False)])
def test_batches_are_skipped_by_the_sampler_where_nothing_is_lost(tmp_path: Path, workers: int, skipped: bool) -> None:
    config = make(tmp_path, "run", workers=workers)
    run({**config, "events": [{"at": "train", "step": 29, "do": "SIGKILL"}]}, tmp_path / "run")
    codes, text = run({**config, "reads": str(tmp_path / "reads")}, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 25" in text
    left = (48 - 25) * 4
    assert len((tmp_path / "reads").read_text()) == (left if skipped else left + 9 * 4)
    assert result(config) == undisturbed(tmp_path, workers=workers)[0]


def test_a_dataset_that_holds_a_generator_is_read_again() -> None:
    class Holds(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __len__(self) -> int:
            return 4

    def skips(dataset: torch.utils.data.Dataset) -> bool:
        return data_position.can_skip(torch.utils.data.DataLoader(dataset, 2))

    plain = torch.utils.data.TensorDataset(torch.ones(4))
    assert skips(plain)
    assert skips(torch.utils.data.Subset(plain, [0, 1]))
    assert not skips(Holds())
    assert not skips(torch.utils.data.Subset(Holds(), [0, 1]))
    assert not skips(torch.utils.data.ConcatDataset([plain, Holds()]))
