"""A step that is bad again and again: what it says about the device, and that it always ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_resilience import NaNGuard
from lightning_resilience.detect.numerics.reruns import PendingRerun, blamed_devices, decide_rerun
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run, weights
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed

BATCH, A, B = (1, 5), ("node-a (GPU 1)", "node-a (GPU 2)"), ("node-a (GPU 1)", "node-b (GPU 1)")

# -- the decisions -----------------------------------------------------------------------------------------------------


def test_the_first_time_it_is_to_be_tried_elsewhere() -> None:
    assert decide_rerun(None, BATCH, A, "nan", 2) == ("elsewhere", PendingRerun(BATCH, A, "nan", 1))
    other = PendingRerun((0, 3), A, "inf", 2, True)
    assert decide_rerun(other, BATCH, A, "nan", 2) == ("elsewhere", PendingRerun(BATCH, A, "nan", 1))


def test_bad_on_other_devices_too_is_a_correct_result() -> None:
    assert decide_rerun(PendingRerun(BATCH, A, "nan"), BATCH, B, "nan", 2) == ("correct", None)


@pytest.mark.parametrize("max_reruns", [1, 2, 5])
def test_without_other_devices_it_ends(max_reruns: int) -> None:
    """Megatron's machine ends with 16 again and again here."""
    suspect: PendingRerun | None = None
    decisions = []
    for _ in range(max_reruns + 2):
        decision, suspect = decide_rerun(suspect, BATCH, A, "nan", max_reruns)
        decisions.append(decision)
    assert decisions == ["elsewhere"] * max_reruns + ["older", "end"]


def test_those_that_were_exchanged_are_to_blame() -> None:
    assert blamed_devices(PendingRerun(BATCH, A, "nan"), B) == ["rank 1 on node-a (GPU 2)"]
    assert blamed_devices(PendingRerun(BATCH, A, "nan"), A) == []


@pytest.mark.parametrize("suspect", [PendingRerun(BATCH, A, "nan", 2, True), None])
def test_what_is_known_survives_a_restart(suspect: PendingRerun | None) -> None:
    assert PendingRerun.from_json(None if suspect is None else suspect.to_json()) == suspect


# -- in fits: the table of Megatron's machine, and ours ----------------------------------------------------------------

GUARD: dict[str, Any] = {"rerun": "validate_results"}
OPTIONS: dict[str, Any] = {"callbacks": ["preemption", "auto_resume", "nan_guard"], "nan_guard": GUARD}


def verdicts(config: dict[str, Any]) -> list[str]:
    events = read_ledger(RunDirectory(config["run_dir"]).ledger)
    return [event["verdict"] for event in events if event["event"] == "rerun"]


def bad_steps(config: dict[str, Any]) -> int:
    return sum(event["event"] == "bad_step" for event in read_ledger(RunDirectory(config["run_dir"]).ledger))


@pytest.mark.slow_but_for("loss-0")
@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("loss", 0),
        ("gradient", 13),
        pytest.param("loss", 13, marks=pytest.mark.campaign),
        pytest.param("gradient", 0, marks=pytest.mark.campaign),
    ],
)
def test_a_fault_that_passes_costs_nothing(what: str, step: int, tmp_path: Path) -> None:
    """Megatron: in the first step accepted without a word, later exit code 17."""
    config = make(tmp_path, "run", **OPTIONS, spoils=[{"step": step, "what": what, "times": 1}])
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert verdicts(config) == ["transient fault"]
    assert bad_steps(config) == 0
    expected = undisturbed(tmp_path, **OPTIONS)[0][0]
    assert {**result(config)[0], "metrics": None} == {**expected, "metrics": None}


@pytest.mark.slow
def test_ranks_run_it_again_together(tmp_path: Path) -> None:
    options = {**OPTIONS, "trainer": {"devices": 2}}
    config = make(tmp_path, "run", **options, spoils=[{"step": 13, "what": "gradient", "times": 1, "rank": 1}])
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert verdicts(config) == ["transient fault"]
    assert len(set(weights(config))) == 1
    expected = undisturbed(tmp_path, **options)[0][0]
    assert {**result(config)[0], "metrics": None} == {**expected, "metrics": None}


@pytest.mark.parametrize(
    ("more", "step"),
    [pytest.param({}, 13, id="in the middle"), pytest.param({"trainer": {"devices": 2}}, 47, id="in the last step")],
)
@pytest.mark.slow_but_for("in the middle")
def test_a_faulty_device_is_named_by_a_good_run_elsewhere(more: dict[str, Any], step: int, tmp_path: Path) -> None:
    """Megatron: exit code 17, as for a correct result."""
    options = {**OPTIONS, **more}
    spoils = [{"step": step, "what": "loss", "device": "node-a", "rank": 0}]
    config = make(tmp_path, "run", **options, device="node-a", spoils=spoils)
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {16}, text
    codes, text = run({**config, "device": "node-b"}, tmp_path / "run")
    assert set(codes) == {0}, text
    assert verdicts(config) == ["faulty device"]
    assert "faulty device, rank 0 on node-a" in text
    expected = undisturbed(tmp_path, **options)[0][0]
    assert {**result(config)[0], "metrics": None} == {**expected, "metrics": None}


@pytest.mark.parametrize(("action", "code"), [("skip", 0), ("rollback", 0), ("stop", 1)])
@pytest.mark.slow_but_for("rollback-0")
def test_a_correct_result_is_left_to_the_policy(action: str, code: int, tmp_path: Path) -> None:
    """Megatron: exit code 17."""
    options = {**OPTIONS, "nan_guard": {**GUARD, "action": action}}
    config = make(tmp_path, "run", **options, device="node-a", spoils=[{"step": 13, "what": "loss"}])
    assert run(config, tmp_path / "run")[0] == [16]
    codes, text = run({**config, "device": "node-b"}, tmp_path / "run")
    assert codes == [code], text
    assert set(verdicts(config)) == {"correct result"}
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.details.get("exit_code")) == (("halted", 17) if code else ("finished", None))


def test_each_bad_step_is_tried_elsewhere_for_itself(tmp_path: Path) -> None:
    """The verdict on one does not hold for the next, and no save waits for an answer that never comes."""
    options = {**OPTIONS, "save_every": 5}
    config = make(tmp_path, "run", **options, spoils=[{"step": step, "what": "loss"} for step in (13, 14)])
    codes, text = [], ""
    for device in "abc":
        (code,), text = run({**config, "device": f"node-{device}"}, tmp_path / "run")
        codes.append(code)
    assert codes == [16, 16, 0], text
    assert set(verdicts(config)) == {"correct result"}
    saved = [
        event["step"] for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == "saved"
    ]
    assert {20, 25, 30, 35, 40}.issubset(saved)


def test_without_another_device_it_ends_with_the_reason(tmp_path: Path) -> None:
    """Megatron: exit code 16 for ever."""
    config = make(tmp_path, "run", **OPTIONS, save_every=3, spoils=[{"step": 13, "what": "loss"}])
    codes = []
    for _ in range(10):
        (code,), text = run(config, tmp_path / "run")
        codes.append(code)
        if code != 16:
            break
    assert codes == [16, 16, 1], text
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.details["exit_code"]) == ("halted", 17)
    assert "from an older checkpoint too" in outcome.reason
    events = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert [event["step"] for event in events if event["event"] == "resumed"] == [12, 12]
    assert [event["step"] for event in events if event["event"] == "went_back"] == [9]
    assert sum(event["event"] == "condemned" for event in events) == 1


def test_a_node_is_left_out_where_the_launcher_can(tmp_path: Path) -> None:
    """That on which it began, if there are others."""
    config = make(
        tmp_path,
        "run",
        callbacks=["fault_tolerance", *OPTIONS["callbacks"]],
        nan_guard=GUARD,
        trainer={"devices": 1, "num_nodes": 2},
        device="by node",
        spoils=[{"step": 13, "what": "loss", "rank": 1}],
    )
    codes, text = run(config, tmp_path / "run")
    assert 16 in codes, text
    requests = [
        each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "workload_request"
    ]
    assert [(each["rank"], each["action"]) for each in requests] == [(1, "exclude_this_node")]


def test_determinism_is_counted(tmp_path: Path) -> None:
    options = {**OPTIONS, "nan_guard": {"rerun": "report_determinism_stats"}}
    config = make(tmp_path, "run", **options)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    plain = make(tmp_path, "plain", callbacks=["preemption", "auto_resume"])
    run(plain, tmp_path / "plain")
    assert result(config)[0]["weights"] == result(plain)[0]["weights"]
    assert "0 of 48 steps" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rerun": "always"}, "rerun must be 'disabled'"),
        ({"max_reruns": 0}, "max_reruns must be at least 1"),
        ({"rerun": "validate_results", "action": "warn"}, "lets the step happen"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NaNGuard(**arguments)


@pytest.mark.parametrize("options", [{"manual": True}, {"trainer": {"accumulate_grad_batches": 2}}])
def test_where_a_batch_cannot_be_run_again(options: dict[str, Any], tmp_path: Path) -> None:
    codes, text = run(make(tmp_path, "run", **OPTIONS, **options), tmp_path / "run")
    assert codes == [1]
    assert "rerun needs automatic optimization without accumulation" in text


def test_nor_where_batches_are_accumulated_in_a_later_epoch(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[NaNGuard(rerun="validate_results", run_dir=tmp_path), GradientAccumulationScheduler({1: 2})],
    )
    with pytest.raises(ValueError, match="rerun needs automatic optimization without accumulation"):
        trainer.fit(BoringModel())
