"""``launch --elastic --replace-stragglers``: a slow rank makes room for another process, and the others keep theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.launch.newcomers import how_ended, is_replaceable
from lightning_resilience.run import exit_codes, ledger
from lightning_resilience.run.goodput import account
from lightning_resilience.run.run_directory import RunDirectory
from tests.test_absent_ranks import samples, state_at_the_end, undisturbed, with_ranks
from tests.test_elastic_nodes import launched as launched_on_nodes
from tests.test_elastic_nodes import saved_after_losses
from tests.test_exact_resume import make
from tests.test_going_on import changes, gone_on, is_back
from tests.test_replacement import launched, replaced
from tests.test_straggler_detection import found_in

SLOW_S = 0.1


def slow(rank: int, **when: Any) -> list[dict[str, Any]]:
    """What makes a rank slow in every step."""
    event = {"at": "train", "rank": rank, "do": "sleep", "seconds": SLOW_S, "once": False, **when}
    return [{**event, "step": step} for step in range(80)]


def options(ranks: int, **detection: Any) -> dict[str, Any]:
    reports = {"report_time_interval": 0.4, "calc_individual_gpu_perf": False, "enable_logging": False}
    return {
        "trainer": {"devices": ranks, "max_epochs": 5},
        "callbacks": ["fault_tolerance", "auto_resume", "local_checkpoint", "straggler_detection"],
        "straggler_detection": {**reports, **detection},
        "step_s": 0.02,
        "keeps_nothing": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.campaign)])
def test_a_slow_process_is_replaced_by_another_one(tmp_path: Path, rank: int) -> None:
    """As exactly as one that is killed; ``launched`` compares with the undisturbed run."""
    more = options(3, stop_if_detected=False)
    config, output = launched(tmp_path, 3, slow(rank, life=0), "--replace-stragglers", **more)
    [change] = found_in(config, "stragglers_replaced")
    assert change["ranks"] == [rank], output
    assert f"Replacing stragglers: rank {rank} on " in output
    assert f"Rank {rank} was too slow: starting a replacement (restart 1)." in output
    assert replaced(config) == [[rank]]
    [saved] = [each for each in found_in(config, "saved") if each["reason"] == "after a loss"]
    assert saved["step"] == change["step"] + 1, "that of the step behind which it has left"
    assert found_in(config, "straggler_stop") == []
    [lost] = account(ledger.read_ledger(RunDirectory(config["run_dir"]).ledger)).interruptions
    assert lost.cause == "straggler"
    assert re.search(rf"rank {rank} on .* of the other ranks' speed, in compute", lost.reason)


@pytest.mark.slow
def test_the_others_go_on_without_a_slow_process_until_it_is_replaced(tmp_path: Path) -> None:
    """With the samples of all ranks, as after a kill."""
    more = options(3, stop_if_detected=False)
    config = with_ranks(make(tmp_path, "disturbed", **more), 3)
    config["events"] = [*slow(2, life=0), is_back(config["run_dir"])]
    output = gone_on(tmp_path, config, 3, "--replace-stragglers", "--spares=off")
    [change] = found_in(config, "stragglers_replaced")
    assert change["ranks"] == [2], output
    assert "Rank 2 was too slow: continuing with 2 of 3 ranks (restart 1). Its replacement joins them when" in output
    assert [each[:2] for each in changes(Path(config["run_dir"]) / "ledger")] == [([2], [0, 1]), ([], [0, 1, 2])]
    assert saved_after_losses(config)[0] == change["step"] + 1, output
    wanted, steps = undisturbed(tmp_path, 3, **more)
    assert samples(config["log"]) == steps, output
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.campaign)])
def test_a_slow_process_of_any_node_is_replaced_there(tmp_path: Path, rank: int) -> None:
    more = options(2, stop_if_detected=False)
    more["trainer"]["num_nodes"] = 2
    config, output = launched_on_nodes(tmp_path, 2, slow(rank, life=0), "--replace-stragglers", **more)
    [change] = found_in(config, "stragglers_replaced")
    assert change["ranks"] == [rank], output
    assert replaced(config) == [[rank]], output
    assert saved_after_losses(config) == [change["step"] + 1]


@pytest.mark.slow
def test_ranks_that_train_apart_lose_nothing_by_it(tmp_path: Path) -> None:
    """Only behind an exchange do they know what another process can go on from: it is saved before it is needed."""
    more = options(2, stop_if_detected=False)
    more["callbacks"] += ["local_sgd"]
    more |= {"local_sgd": {"exchange_every": 5}, "logs_at_end": True, "local": {"every_n_train_steps": 1000}}
    config, output = launched(tmp_path, 2, slow(1, life=0), "--replace-stragglers", **more, save_every=1000)
    [change] = found_in(config, "stragglers_replaced")
    assert replaced(config) == [[1]]
    [gone_back] = re.findall(r"Resuming from step (\d+) \(local checkpoint", output)
    assert int(gone_back) == change["step"], output


@pytest.mark.slow
def test_a_place_that_is_slow_is_given_up_once(tmp_path: Path) -> None:
    """The new process is as slow: on one node there is nothing better."""
    config, output = launched(tmp_path, 2, slow(1), "--replace-stragglers", **options(2))
    assert len(found_in(config, "stragglers_replaced")) == 1, output
    assert replaced(config) == [[1]]
    assert len(found_in(config, "stragglers")) > 2
    assert output.count("The run is not stopped, and continues with its stragglers: there is no other node") == 1


@pytest.mark.slow
def test_who_cannot_be_replaced_is_not_ended(tmp_path: Path) -> None:
    more = {**options(2), "callbacks": ["straggler_detection"]}
    config, output = launched(tmp_path, 2, slow(1), "--replace-stragglers", "--recipe", "none", **more)
    assert found_in(config, "stragglers_replaced") == replaced(config) == []
    assert output.count("No slow rank is replaced: there is neither AutoResume nor LocalCheckpoint") == 1, output


@pytest.mark.slow
def test_nobody_finds_slow_ranks_without_the_callback(tmp_path: Path) -> None:
    more = {**options(2), "callbacks": ["auto_resume"], "step_s": None}
    _, output = launched(tmp_path, 2, [], "--replace-stragglers", "--recipe", "none", **more)
    assert output.count("--replace-stragglers replaces nothing: the Trainer has no StragglerDetection.") == 1, output


def test_a_rank_that_makes_room_is_replaced() -> None:
    assert is_replaceable(exit_codes.TOO_SLOW)
    assert how_ended(exit_codes.TOO_SLOW) == "was too slow"
