"""What a script may get wrong when it makes a callback: the error says what, where, and what to give instead."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import lightning_resilience
from lightning_resilience import FaultTolerance, Preemption, callbacks, recipes
from lightning_resilience.callbacks import (
    AutoResume,
    LocalCheckpoint,
    LocalSGD,
    NaNGuard,
    ReplicaCheck,
    StragglerDetection,
)

CALLBACKS: list[type[Any]] = [getattr(callbacks, name) for name in callbacks.__all__]
each = pytest.mark.parametrize("cls", CALLBACKS, ids=lambda cls: cls.__name__)

# A kind of argument, and what somebody may give in its place.
NOT_WHOLE = [2.5, "5", "yes", True, [1], float("nan")]
NOT_A_NUMBER = ["5", "yes", True, [1]]
NOT_A_FLAG = ["yes", "no", 1, 0, 2.5, []]
NOT_A_TIME = ["0:15", "5m", "15", "yes", True, [1], float("nan"), float("inf"), 1e20, 0, -1, timedelta(0)]
NOT_A_PATH = [5, 2.5, True, ["runs/gpt"], ""]
NOT_A_COUNT = [*NOT_WHOLE, 0, -1]
NOT_A_CHOICE = ["x", 5, True, ["skip"]]

WRONG: dict[type[Any], dict[str, list[Any]]] = {
    AutoResume: {
        "run_dir": NOT_A_PATH,
        "every_n_train_steps": NOT_A_COUNT,
        "train_time_interval": NOT_A_TIME,
        "keep": [*NOT_A_COUNT, 1, None],
        "async_save": [*NOT_A_FLAG, None],
    },
    FaultTolerance: {
        "autoresume": NOT_A_FLAG,
        "calculate_timeouts": NOT_A_FLAG,
        "simulated_fault_params": ["x", 5, {"fault_type": "x"}, {"fault": "rank_killed"}],
        "exp_dir": NOT_A_PATH,
        "exc_handling_policy": ["x", 5],
        "section_timeouts": [5, ["step"], "300", {"step": "5m"}, {"steps": 300}, {"step": timedelta(0)}, "step:0"],
        "engine": NOT_A_CHOICE,
        "health_check_interval_steps": [*NOT_WHOLE, -1],
        "run_dir": NOT_A_PATH,
    },
    LocalCheckpoint: {
        "dir": NOT_A_PATH,
        "every_n_train_steps": NOT_A_COUNT,
        "train_time_interval": NOT_A_TIME,
        "keep": [*NOT_A_COUNT, 1],
        "replication": ["yes", 1, 0, None],
        "replication_factor": [*NOT_A_COUNT, 1],
        "replication_jump": NOT_A_COUNT,
        "probation_steps": [*NOT_WHOLE, -1],
        "async_save": ["yes", 1, 0, None],
        "run_dir": NOT_A_PATH,
    },
    LocalSGD: {"exchange_every": [*NOT_WHOLE, None, 0, -1], "outer_optimizer": ["SGD", 0.7], "run_dir": NOT_A_PATH},
    NaNGuard: {
        "action": NOT_A_CHOICE,
        "max_consecutive": NOT_A_COUNT,
        "max_rollbacks": [*NOT_WHOLE, -1],
        "check_grads": NOT_A_FLAG,
        "spiky_loss_factor": [*NOT_A_NUMBER, 0, float("nan")],
        "spike_window": NOT_A_COUNT,
        "rerun": NOT_A_CHOICE,
        "max_reruns": NOT_A_COUNT,
        "run_dir": NOT_A_PATH,
    },
    Preemption: {
        "signals": [
            "SIGTERM",
            15,
            2.5,
            None,
            [],
            ["SIGX"],
            ["SIGKILL"],
            ["SIGSEGV"],
            ["SIGCHLD"],
            [True],
            [1.5],
            [None],
        ],
        "grace_period_s": [*(each for each in NOT_A_TIME if each not in (0, timedelta(0))), None],
        "enable_exit_handler_for_data_loader": NOT_A_FLAG,
        "run_dir": NOT_A_PATH,
    },
    ReplicaCheck: {"max_rollbacks": [*NOT_WHOLE, -1], "run_dir": NOT_A_PATH},
    StragglerDetection: {
        "report_time_interval": [*NOT_A_TIME, None],
        "calc_relative_gpu_perf": NOT_A_FLAG,
        "calc_individual_gpu_perf": NOT_A_FLAG,
        "num_gpu_perf_scores_to_print": [*NOT_WHOLE, -1],
        "gpu_relative_perf_threshold": [*NOT_A_NUMBER, 1.5, -1, float("nan")],
        "gpu_individual_perf_threshold": [*NOT_A_NUMBER, 1.5, -1, float("nan")],
        "stop_if_detected": NOT_A_FLAG,
        "enable_logging": NOT_A_FLAG,
        "profiling_interval": NOT_A_COUNT,
        "backend": NOT_A_CHOICE,
        "min_consecutive_reports": NOT_A_COUNT,
        "run_dir": NOT_A_PATH,
    },
}

# Words of which one begins what to do.
REMEDY = re.compile(r"must |did you mean|\bgive\b|\bneeds\b|it has|cannot be caught|the sections are")


@each
def test_every_wrong_value_is_refused(cls: type[Any]) -> None:
    assert list(WRONG[cls]) == list(inspect.signature(cls).parameters)
    problems = []
    for name, values in WRONG[cls].items():
        for value in values:
            others = {"spiky_loss_factor": 10.0} if name == "spike_window" else {}
            try:
                cls(**{name: value}, **others)
            except (TypeError, ValueError) as error:
                text = str(error)
                about = {"simulated_fault_params": "fault", "section_timeouts": "section", "signals": "signal"}
                says_where = text.startswith(f"{cls.__name__}: ") and (
                    name in text or about.get(name, name) in text.lower() or "SIGKILL" in text
                )
                if not says_where or not REMEDY.search(text) or "__init__" in text:
                    problems.append(f"{name}={value!r}: {text}")
            else:
                problems.append(f"{name}={value!r}: accepted")
    assert problems == []


@each
def test_an_argument_that_there_is_not(cls: type[Any]) -> None:
    for name in inspect.signature(cls).parameters:
        with pytest.raises(TypeError, match=rf"^{cls.__name__}: there is no argument {name}x; did you mean {name}\?$"):
            cls(**{f"{name}x": 1})
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: there is no argument zzz; choose one of .*run_dir"):
        cls(zzz=1)
    with pytest.raises(TypeError, match=f"^{cls.__name__}: too many"):
        cls(*[None] * 20)


def test_a_subclass_is_named_in_its_errors() -> None:
    class Mine(AutoResume):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    with pytest.raises(ValueError, match=r"^Mine: keep must be at least 2, not 1"):
        Mine(keep=1)


def test_times_are_timedeltas_or_seconds_everywhere() -> None:
    minute = timedelta(minutes=1)
    for given in (minute, 60, 60.0, "0:01:00"):
        assert AutoResume(train_time_interval=given).train_time_interval == minute  # type: ignore[arg-type]
        assert LocalCheckpoint(train_time_interval=given).train_time_interval == minute  # type: ignore[arg-type]
        assert Preemption(grace_period_s=given).grace_period_s == 60  # type: ignore[arg-type]
        assert StragglerDetection(report_time_interval=given).report_time_interval == 60  # type: ignore[arg-type]
    limits = FaultTolerance(section_timeouts={"step": minute}).section_timeouts
    assert limits is not None
    assert limits.step == 60
    fault = FaultTolerance(simulated_fault_params={"fault_type": "rank_hung", "base_delay_s": minute})
    assert fault.simulated_fault_params is not None
    assert fault.simulated_fault_params.base_delay_s == 60


def test_a_recipe_names_the_run_directory_that_is_none() -> None:
    for make in (recipes.nemo, recipes.preemptible, recipes.workstation, recipes.drill):
        with pytest.raises(TypeError, match="run_dir must be a path, not 5"):
            make(5)


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gpt"
    file.write_text("mine")
    trainer = L.Trainer(callbacks=[AutoResume(run_dir=file)], max_steps=1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match=r"gpt is a file.*another run_dir"):
        trainer.fit(BoringModel())
    assert file.read_text() == "mine"


# -- what a library's author meets -------------------------------------------------------------------------------------


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    assert dir(lightning_resilience) == sorted(lightning_resilience.__all__)
    for name in dir(lightning_resilience):
        assert getattr(lightning_resilience, name) is not None


@each
def test_a_callback_shows_its_options_and_nothing_of_its_inside(cls: type[Any]) -> None:
    told = {"skipped_steps", "steps_run_again", "differing_steps", "report"}  # described beside the options
    known = set(dir(L.Callback)) | set(inspect.signature(cls).parameters) | told
    assert [name for name in dir(cls()) if not name.startswith("_") and name not in known] == []


def test_how_a_callback_is_printed() -> None:
    assert repr(AutoResume()) == "AutoResume()"
    assert repr(AutoResume("runs/gpt", keep=3)) == "AutoResume(run_dir='runs/gpt', keep=3)"
    given = Preemption(signals=["SIGTERM", "SIGUSR1"], grace_period_s=timedelta(minutes=2))
    assert repr(given) == "Preemption(signals=('SIGTERM', 'SIGUSR1'), grace_period_s=120.0)"
    for callback in recipes.preemptible("runs/gpt").callbacks:
        names: dict[str, Any] = {**vars(lightning_resilience.callbacks), "datetime": __import__("datetime")}
        again = eval(repr(callback), names)
        assert repr(again) == repr(callback)
        assert "run_dir='runs/gpt'" in repr(callback)


def examples() -> list[Any]:
    found = []
    for cls in CALLBACKS:
        text = (inspect.getdoc(cls) or "").partition("Example::")[2]
        found.append(pytest.param(cls, textwrap.dedent(text).strip(), id=cls.__name__))
    return found


@pytest.mark.slow_but_for("NaNGuard")
@pytest.mark.parametrize(("cls", "example"), examples())
def test_the_example_of_each_callback_runs(
    cls: type[Any], example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cls.__name__ in {node.id for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {own.__name__: own for own in CALLBACKS}
    names |= {"Trainer": L.Trainer, "timedelta": timedelta, "model": BoringModel()}
    names["data"] = DataLoader(RandomDataset(32, 8))
    try:
        exec(example, names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert names["trainer"].global_step == 16
