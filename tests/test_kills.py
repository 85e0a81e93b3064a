"""Killed at random instants: every resume ends bitwise equal, and no sample is skipped or seen twice.

The short version runs with the other tests; ``make test-kills`` runs all 50 kills.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed

OPTIONS: dict[str, Any] = {"data": "shuffle", "workers": 2, "validation": True, "save_every": 4, "step_s": 0.02}


def survive(tmp: Path, seed: int, kills: int, world_size: int) -> int:
    """Trains with ``kills`` SIGKILLs at random instants; returns how many of them hit a running process."""
    chance = random.Random(seed)
    options = {**OPTIONS, "trainer": {"devices": world_size}}
    reference = undisturbed(tmp, **options)
    config = make(tmp, "disturbed", **options)
    ledger = RunDirectory(config["run_dir"]).ledger
    killed = 0
    while killed < kills:
        ranks = Ranks(config, tmp / "disturbed")
        began = len(list(read_ledger(ledger)))
        while len(list(read_ledger(ledger))) == began and all(p.is_alive() for p in ranks.processes):
            time.sleep(0.01)  # the heavy imports are the same in all runs: what matters comes after them
        time.sleep(chance.uniform(0.0, 1.2))
        victims = [chance.randrange(world_size)] if chance.random() < 0.7 else list(range(world_size))
        alive = [rank for rank in victims if ranks.processes[rank].is_alive()]
        for rank in alive:
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
        codes = ranks.wait(60)
        if set(codes) == {0}:
            break  # it was done already
        killed += 1
    for _ in range(3):
        if not Path(config["out"]).exists():
            codes = Ranks(config, tmp / "disturbed").wait(60)
            assert set(codes) == {0}, (tmp / "disturbed" / "output").read_text()
    assert (result(config), samples(config)) == reference
    each_once(samples(config), 16)
    return killed


def each_once(trained: list[dict[tuple[int, int], list[int]]], batches: int) -> None:
    """In every epoch every rank trains on its own samples, and all together on every sample once."""
    for epoch in range(3):
        seen = [s for rank in trained for step in range(batches) for s in rank[0, epoch * batches + step]]
        assert len(seen) == len(set(seen)) == 4 * batches * len(trained)


@pytest.mark.also_as_on_gpu
@pytest.mark.slow
def test_three_kills(tmp_path: Path) -> None:
    assert survive(tmp_path, seed=0, kills=3, world_size=2) > 0


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
def test_forty_kills_with_two_ranks(tmp_path: Path, seed: int) -> None:
    assert survive(tmp_path, seed, kills=4, world_size=2) > 0


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 105))
def test_ten_kills_with_four_ranks(tmp_path: Path, seed: int) -> None:
    assert survive(tmp_path, seed, kills=2, world_size=4) > 0
