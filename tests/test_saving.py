"""What every rank keeps of its own, such as random numbers of its own: it comes to rank 0, and to no other rank."""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.checkpoint import own_state
from lightning_resilience.checkpoint.safe_serialization import from_safe, pack
from lightning_resilience.checkpoint.store_messages import StoreMessages
from lightning_resilience.fit.saving import STATE_KEY, SaidSaves
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, run, samples, undisturbed
from tests.ledgers import read_ledger
from tests.test_exact_resume import killed_and_resumed, make, some

APART: dict[str, Any] = {"seeded_apart": True, "trainer": {"devices": 2}}
SEND = f"{StoreMessages.__module__}:StoreMessages.send"


def gathered(tmp: Path) -> int:
    """How many bytes a rank has given all others at once, at most."""
    return max(int(line) for path in tmp.rglob("log.gathered.*") for line in path.read_text().split())


STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": {"async_save": True},
    "DDP, the training waits": {},
    "FSDP2": {"sharded": True, "async_save": True},
    "long: FSDP2, the training waits": {"sharded": True},
    "long: DDP, three ranks with workers": {"trainer": {"devices": 3}, "async_save": True, "workers": 1},
    "long: FSDP1": {"sharded": "fsdp1 full", "async_save": True},
    "long: FSDP1, the training waits": {"sharded": "fsdp1 full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", some(STRATEGIES, "long"))
def test_ranks_that_are_seeded_apart(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**APART, **options}
    events = [{"at": "train", "step": 23, "rank": 1}]
    found = killed_and_resumed(tmp_path, events, weighs=True, **options)[:2]
    assert found == undisturbed(tmp_path, **options)
    assert gathered(tmp_path) <= 4096


@pytest.mark.slow
def test_rank_0_writes_the_same_however_it_comes(tmp_path: Path) -> None:
    states = []
    for name, limit in (("sent", own_state._GATHERED_BYTES), ("gathered", 1 << 20)):
        constants = {f"{own_state.__name__}:_GATHERED_BYTES": limit}
        config = make(tmp_path, name, **APART, weighs=True, constants=constants)
        assert run(config, tmp_path / name)[0] == [0, 0]
        assert (gathered(tmp_path / name) > 4096) == (name == "gathered")
        (path,) = Path(config["run_dir"]).rglob("*final*.ckpt")
        ranks = torch.load(path, weights_only=True)[STATE_KEY]["ranks"]
        structure, tensors, left_out = pack(from_safe(ranks))
        states.append((json.dumps(structure), [pickle.dumps(each.tolist()) for each in tensors], left_out))
        assert ranks[0]["now"] != ranks[1]["now"]
    assert states[0] == states[1]


def steps(config: dict[str, Any], event: str) -> list[int]:
    return [each["step"] for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == event]


@pytest.mark.parametrize(
    ("async_save", "sharded"),
    [
        (False, False),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in ((True, False), (True, True), (False, True))),
    ],
)
@pytest.mark.slow
def test_what_does_not_come_fails_the_save_and_is_gathered_from_then_on(
    tmp_path: Path, async_save: bool, sharded: bool
) -> None:
    fails = [{"rank": 1, "what": SEND, "call": 0, "do": "nothing"}]
    constants = {f"{own_state.__name__}:_PATIENCE_S": 1.0}
    options = {**APART, "async_save": async_save, "sharded": sharded, "step_s": 0.05}
    config = make(tmp_path, "run", fails=fails, constants=constants, weighs=True, **options)
    ranks = Ranks({**config, "events": [{"at": "train", "step": 43, "do": "SIGKILL", "rank": 0}]}, tmp_path)
    ranks.wait()
    assert steps(config, "save_failed") == [5] * (1 if async_save else 2), "what is waited for fails on all ranks"
    saved = set(steps(config, "saved"))
    assert saved >= {20, 25, 30, 35}, ranks.text()
    assert 5 not in saved
    assert gathered(tmp_path) > 4096
    assert run({**config, "fails": []}, tmp_path)[0] == [0, 0]
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_a_rank_that_dies_before_it_has_sent_is_not_waited_for(tmp_path: Path, async_save: bool) -> None:
    fails = [{"rank": 1, "what": SEND, "call": 3, "do": "SIGKILL"}]
    constants = {f"{own_state.__name__}:_PATIENCE_S": 3.0}
    options = {**APART, "async_save": async_save}
    config = make(tmp_path, "run", fails=fails, constants=constants, **options)
    codes = Ranks(config, tmp_path).wait(60, kill_rest=False)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    saved = steps(config, "saved")
    assert len(saved) == 3  # nearly always 5, 10, 15: a save is left out where the one before is not written yet
    folder = Path(config["run_dir"]) / "fit-000" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:012d}.ckpt" for step in saved[-2:]]
    assert run({**config, "fails": []}, tmp_path)[0] == [0, 0]
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


def test_saves_are_said_once_a_minute_and_slow_ones_always() -> None:
    saves, path = SaidSaves(), Path("a.ckpt")
    lines = [saves.line(step, path, 0.1, "time", now=10.0 * step) for step in range(1, 15)]
    assert [step for step, line in enumerate(lines, 1) if line is not None] == [1, 7, 13]
    assert lines[0] == "Saved step 1 to a.ckpt in 0.1 s (time)."
    assert lines[6] == "Saved step 7 to a.ckpt in 0.1 s (time; 5 more since the last line)."
    slow = saves.line(15, path, 7.0, "time", now=141.0)
    assert slow == "Saved step 15 to a.ckpt in 7.0 s, the last one logged in 0.1 s (time; 1 more since the last line)."
    assert saves.line(16, path, 8.0, "time", now=142.0) is None, "as slow as usual"
