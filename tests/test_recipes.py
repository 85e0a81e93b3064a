"""The presets: what is in them, that each trains and survives, and that the files to copy say the same."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
from lightning.pytorch.cli import LightningCLI

from lightning_resilience import (
    AutoResume,
    FaultTolerance,
    NaNGuard,
    Preemption,
    StragglerDetection,
    __version__,
    _torch,
    recipes,
)
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.faults import SimulatedFault
from lightning_resilience.fit import context
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.cli import _batch_script, _parse, launch_settings
from lightning_resilience.launch.job import elastic_command
from lightning_resilience.launch.schedulers.slurm import Slurm
from lightning_resilience.recipes import JOBS, RECIPE_VARIABLE, RECIPES, Job
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, RunDirectory
from tests.harness import result, run, samples
from tests.test_exact_resume import make, undisturbed

FILES = Path(__file__).parents[1] / "recipes"
each_recipe = pytest.mark.parametrize("name", RECIPES)


def options(callback: Any) -> dict[str, Any]:
    """What a callback was given, but for the run directory, which one callback of several has."""
    return {name: value for name, value in vars(callback).items() if name != "run_dir"}


# -- what they are -----------------------------------------------------------------------------------------------------


def test_nemos_defaults() -> None:
    """As in NeMo's recipes and plugins."""
    recipe = recipes.nemo("runs/gpt")
    assert recipe.job.budget == Budget(in_job_restarts=3, job_retries=2)
    watch, stragglers = recipe.fault_tolerance, recipe.straggler_detection
    assert watch is not None
    assert stragglers is not None
    assert (watch.autoresume, watch.calculate_timeouts) == (True, True)
    assert stragglers.report_time_interval == 300
    assert (stragglers.gpu_relative_perf_threshold, stragglers.gpu_individual_perf_threshold) == (0.7, 0.7)
    assert stragglers.num_gpu_perf_scores_to_print == 5
    assert stragglers.stop_if_detected
    assert recipe.preemption is not None
    assert recipe.preemption.signals == (signal.SIGTERM,)


@each_recipe
def test_a_recipe_has_its_launchers_settings_and_the_run_directory(name: str) -> None:
    recipe = RECIPES[name]("runs/gpt")
    assert recipe.name == name
    assert recipe.job == JOBS[name]
    assert {callback.run_dir for callback in recipe.callbacks} == {"runs/gpt"}
    assert isinstance(recipe.callbacks[-1], AutoResume)
    assert {callback.run_dir for callback in RECIPES[name]().callbacks} == {None}
    if recipe.preemption is not None:
        assert recipe.preemption.grace_period_s == recipe.job.grace_period_s


@each_recipe
def test_a_recipe_prints_what_is_not_a_default(name: str) -> None:
    text = str(RECIPES[name]("runs/gpt"))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == f"recipe {name}"
    assert "run directory       runs/gpt" in lines
    assert max(map(len, text.splitlines())) <= 140
    if name == "preemptible":
        assert {"grace_period_s=25.0", "train_time_interval=0:05:00"} <= set(lines)
    assert "async_save" not in text, "it is the default"
    if name == "workstation":
        assert "signals=SIGTERM, SIGINT, SIGHUP" in lines
        assert "StragglerDetection" not in text
    if name == "drill":
        assert "simulated_fault_params=fault_type random, base_delay_s 60.0, rand_delay_s 60.0" in lines
    assert "keep=2" not in text
    assert "run_dir=" not in text  # once for all of them, above
    assert f"--grace-period={JOBS[name].grace_period_s:g}" in lines


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_recipe_that_is_taken_for_its_callbacks_says_so(tmp_path: Path, wrapped: bool) -> None:
    recipe: Any = recipes.nemo(tmp_path / "run")
    with pytest.raises(TypeError, match=re.escape("give the Trainer recipe.callbacks")):
        fit([recipe] if wrapped else recipe, L, tmp_path)
    assert copy.deepcopy(recipe) is not None
    assert not hasattr(recipe, "state_key")


def test_a_recipe_is_changed_field_by_field() -> None:
    recipe = dataclasses.replace(
        recipes.nemo("runs/gpt"), nan_guard=None, straggler_detection=recipes.straggler_det_callback(60, False)
    )
    kinds = [type(callback).__name__ for callback in recipe.callbacks]
    others = ["FaultTolerance", "Preemption", "LocalCheckpoint", "ReplicaCheck"]
    assert kinds == [*others, "StragglerDetection", "AutoResume"]
    found = recipe.callbacks[4]
    assert isinstance(found, StragglerDetection)
    assert (found.report_time_interval, found.stop_if_detected) == (60, False)
    moved = dataclasses.replace(recipe, run_dir="runs/other")
    assert {callback.run_dir for callback in moved.callbacks} == {"runs/other"}
    assert {callback.run_dir for callback in recipe.callbacks} == {"runs/gpt"}


def test_the_default_of_nemos_straggler_function() -> None:
    assert options(recipes.straggler_det_callback()) == options(StragglerDetection())
    given = recipes.straggler_det_callback(60, False, 0.5, 0.6)
    assert (given.gpu_relative_perf_threshold, given.gpu_individual_perf_threshold) == (0.5, 0.6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nan_guard": NaNGuard(run_dir="runs/other")}, "NaNGuard has run_dir='runs/other', and the recipe 'runs/gpt'"),
        ({"run_dir": None, "preemption": Preemption(run_dir="a")}, "Preemption has run_dir='a', and the recipe None"),
        ({"auto_resume": None}, "needs auto_resume"),
        ({"fault_tolerance": FaultTolerance(section_timeouts={"step": 60})}, "differ"),
    ],
)
def test_what_cannot_work_together_is_refused_at_once(change: dict[str, Any], words: str) -> None:
    recipe = recipes.nemo("runs/gpt")
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(recipe, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nan_guard": NaNGuard}, "nan_guard must be a NaNGuard"),
        ({"preemption": NaNGuard()}, "preemption must be a Preemption"),
        ({"auto_resume": True}, "auto_resume must be an AutoResume"),
        ({"job": "nemo"}, "job must be a Job"),
    ],
)
def test_a_field_of_another_type_is_refused_at_once(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        dataclasses.replace(recipes.nemo("runs/gpt"), **change)


def test_a_drill_keeps_the_limits_of_what_it_rehearses() -> None:
    def own(run_dir: Any) -> recipes.Recipe:
        limits = SectionTimeouts(step=60)
        watch = FaultTolerance(section_timeouts=limits)
        return dataclasses.replace(recipes.nemo(run_dir), fault_tolerance=watch, job=Job(section_timeouts=limits))

    watch = recipes.drill("runs/drill", recipe=own).fault_tolerance
    assert watch is not None
    assert watch.section_timeouts == SectionTimeouts(step=60)


def test_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(_torch, "connect_when_rank_0_listens", lambda: called.append("of a launched rank"))
    for name in ("", "none", "nemo"):
        monkeypatch.setenv(RECIPE_VARIABLE, name)
        assert bool(recipes.callbacks_factory()) == (name == "nemo")
    assert called == ["of a launched rank"] * 2


def test_the_launchers_run_directory_goes_before_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its launcher counts by what is recorded in its own."""
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "launched"))
    monkeypatch.setattr(logging.getLogger("lightning_resilience"), "propagate", True)
    context.fits_begun.clear()
    fit([AutoResume(run_dir=tmp_path / "own")], L, tmp_path)
    assert len(RunDirectory(tmp_path / "launched").fits) == 1
    assert not (tmp_path / "own").exists()
    assert "ignoring run_dir=" in caplog.text


def test_the_same_run_directory_in_another_spelling_is_no_contradiction() -> None:
    guard = NaNGuard(run_dir=Path("runs/../runs/gpt"))
    assert dataclasses.replace(recipes.nemo("runs/gpt"), nan_guard=guard).nan_guard is guard


def test_the_same_limits_in_both_places_are_no_contradiction() -> None:
    limits = SectionTimeouts(step=60)
    recipe = dataclasses.replace(
        recipes.nemo(), fault_tolerance=FaultTolerance(section_timeouts=limits), job=Job(section_timeouts=limits)
    )
    assert "--section-timeouts=setup:600,step:60,checkpointing:420,out_of_section:300" in recipe.job.options


def test_a_drill_of_another_recipe() -> None:
    fault = SimulatedFault(fault_type="nan_loss", at_step=3)
    recipe = recipes.drill("runs/drill", fault, recipes.workstation)
    assert recipe.fault_tolerance is not None
    assert recipe.fault_tolerance.simulated_fault_params == fault
    assert recipe.straggler_detection is None
    unwatched = recipes.drill(recipe=lambda run_dir: dataclasses.replace(recipes.nemo(run_dir), fault_tolerance=None))
    assert unwatched.fault_tolerance is not None  # which brings the fault


# -- the launcher ------------------------------------------------------------------------------------------------------


def test_each_recipe_has_the_job_of_its_kind_of_machine() -> None:
    expected = {
        "nemo": Job(),
        "preemptible": Job(Budget(max_failures_per_day=200), grace_period_s=25),
        "workstation": Job(Budget(job_retries=0), grace_period_s=60),
        "elastic": Job(elastic=True),
        "drill": Job(),  # as the run that it rehearses
        "none": Job(),
    }
    assert expected == JOBS


@each_recipe
def test_launch_takes_the_settings_of_the_recipe(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = launch_settings(["--recipe", name, str(script)])
    job = JOBS[name]
    assert settings.recipe == name
    assert Job(settings.budget, settings.grace_period_s, settings.section_timeouts, settings.elastic) == job


def test_the_options_of_a_job_say_what_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    job = Job(Budget(1, 0, 7), 12.5, SectionTimeouts(step=9.5, setup=None), elastic=True)
    settings = launch_settings([*job.options, str(script)])
    assert Job(settings.budget, settings.grace_period_s, settings.section_timeouts, settings.elastic) == job
    with pytest.raises(ValueError, match="grace_period_s must not be negative, not -1"):
        Job(grace_period_s=-1)
    settings = launch_settings([*recipes.elastic(when_lost="go_on", min_ranks=2).job.options, str(script)])
    assert (settings.elastic, settings.when_lost, settings.min_ranks) == (True, "go_on", 2)
    settings = launch_settings([*recipes.elastic(global_batch="shrink").job.options, str(script)])
    assert settings.global_batch == "shrink"
    assert launch_settings([*recipes.elastic().job.options, str(script)]).global_batch is None
    for wrong in ({"when_lost": "go-on"}, {"min_ranks": 2}, {"min_ranks": 0}, {"global_batch": "smaller"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            recipes.elastic(**wrong)  # type: ignore[arg-type]
    kinds: list[tuple[str, Callable[[], Any]]] = [
        ("min_ranks must be a whole number, not '2'", lambda: recipes.elastic(min_ranks="2")),  # type: ignore[arg-type]
        ("grace_period_s must be a number, not 'x'", lambda: Job(grace_period_s="x")),  # type: ignore[arg-type]
        ("job_retries must be a whole number, not 1.5", lambda: Budget(job_retries=1.5)),  # type: ignore[arg-type]
        ("recipe must be a function", lambda: recipes.drill(recipe="nemo")),  # type: ignore[arg-type]
        (r"job must be a Job\(...\), not None", lambda: replace(recipes.nemo(), job=None)),
    ]
    for message, wrongly in kinds:
        with pytest.raises(TypeError, match=message):
            wrongly()


@pytest.mark.parametrize("given", [["--elastic"], ["--recipe", "elastic"]])
def test_ranks_are_replaced_on_any_number_of_nodes(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for nodes, more, when_lost, expected in (
        ("1", [], "hold", "1"),
        ("2", [], "hold", "2"),
        ("2:2", [], "hold", "2:2"),
        ("2:4", [], "go_on", "2:4"),
        ("4", ["--when-lost=go-on"], "go_on", "1:4"),
        ("1", ["--when-lost=go-on"], "go_on", "1"),
    ):
        settings = launch_settings([*given, *more, f"--nnodes={nodes}", "--rdzv-endpoint=host:1", str(script)])
        assert (settings.elastic, settings.when_lost, settings.nnodes) == (True, when_lost, expected)
    with pytest.raises(SystemExit):
        launch_settings([*given, "--when-lost=hold", "--nnodes=1:2", "--rdzv-endpoint=host:1", str(script)])
    assert "--nnodes 1:2 continues without lost nodes" in capsys.readouterr().err


def test_as_many_nodes_as_there_may_be_begin_and_as_many_as_there_must_be_go_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    given = ["--elastic", "--nnodes=2:4", "--nproc-per-node=2", "--rdzv-endpoint=host:1", "--node-rank=1"]
    command, _ = elastic_command(launch_settings([*given, str(script)]), "id", 3)
    for option in ("--nnodes=4", "--min-nodes=2", "--when-lost=go_on", "--follow", "--node-rank=1"):
        assert option in command
    command, _ = elastic_command(launch_settings(["--elastic", "--when-lost=go-on", str(script)]), "id", 3)
    assert not [option for option in command if option.startswith("--min-nodes")], "of one node any rank may be lost"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--when-lost=go-on"], "is an option of --elastic"),
        (["--replace-stragglers"], "is an option of --elastic"),
        (["--elastic", "--min-ranks=2"], "needs --when-lost go-on"),
        (
            ["--elastic", "--when-lost=go-on", "--min-ranks=3", "--nproc-per-node=2"],
            "3 is more than the number of ranks, 2",
        ),
    ],
)
def test_what_the_others_do_meanwhile_is_refused_where_it_would_do_nothing(
    given: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SystemExit):
        launch_settings([*given, str(script)])
    assert reason in " ".join(capsys.readouterr().err.split())


def test_one_option_leaves_the_recipes_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    given = ["--recipe", "preemptible", "--job-retries", "0", "--out-of-section-timeout", "5", str(script)]
    settings = launch_settings(given)
    assert settings.budget == dataclasses.replace(JOBS["preemptible"].budget, job_retries=0)
    assert settings.grace_period_s == 25
    assert settings.section_timeouts == SectionTimeouts(out_of_section=5)


def test_the_launcher_reads_them_without_torch_and_lightning() -> None:
    code = "import lightning_resilience.launch.cli, sys; print({'torch', 'lightning', 'wandb'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


# -- what they are for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in ("preemptible", "elastic", "drill") else ())
        for name in RECIPES
    ],
)
@pytest.mark.slow
def test_a_run_is_killed_and_stopped_and_ends_as_if_undisturbed(name: str, tmp_path: Path) -> None:
    options = {"callbacks": [], "trainer": {"devices": 2}, "validation": True}
    events = [
        {"at": "train", "step": 13, "rank": 1, "do": "SIGKILL", "once": True},
        {"at": "train", "step": 23, "rank": 0, "do": "SIGTERM", "once": True},
    ]
    config = make(tmp_path, "disturbed", events=events, **options)
    environment = {RECIPE_VARIABLE: name, RUN_DIR_VARIABLE: config["run_dir"]}
    ends = [run(config, tmp_path / "disturbed", environment=environment) for _ in range(3)]
    assert -signal.SIGKILL in ends[0][0], ends[0][1]
    assert "Preemption detected" in ends[1][1]
    assert ends[1][0] == ends[2][0] == [0, 0], ends[2][1]
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


# -- files to copy -----------------------------------------------------------------------------------------------------


class Model(L.LightningModule):
    pass


def of_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(sys, "argv", ["main.py"])
    common = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    cli = LightningCLI(Model, run=False, save_config_callback=None, args=[f"--config={path}", *common])  # type: ignore[no-untyped-call]
    return [callback for callback in cli.trainer.callbacks if type(callback).__module__.startswith("lightning_resil")]


@pytest.mark.slow_but_for("nemo")
@each_recipe
def test_the_yaml_of_a_recipe_makes_its_callbacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]()
    found = of_file(FILES / "cli" / f"{'nemo' if name == 'elastic' else name}.yaml", monkeypatch)
    assert [type(callback) for callback in found] == [type(callback) for callback in recipe.callbacks]
    for callback, expected in zip(found, recipe.callbacks, strict=True):
        assert options(callback) == options(expected)
    assert len({callback.run_dir for callback in found} - {None}) == 1


def test_every_recipe_and_no_other_has_a_file() -> None:
    assert {path.stem for path in (FILES / "cli").glob("*.yaml")} == set(RECIPES) - {"elastic"}, (
        "its callbacks are nemo's"
    )


@pytest.mark.parametrize("name", ["nemo", "preemptible"])
def test_the_batch_script_of_a_recipe_is_what_the_command_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    given = ["--nodes=2", "--gpus-per-node=8", "--time=4:00:00", "--run-dir=/shared/runs/gpt", "--python=python"]
    script = _batch_script(_parse(["slurm", f"--recipe={name}", *given, "train.py"]), Slurm())[1]
    script = script.replace(f"--chdir={tmp_path}", "--chdir=/shared/code/gpt")
    script = script.replace(f"lightning-resilience {__version__}", "`lightning-resilience slurm`")
    assert (FILES / "slurm" / f"{name}.sbatch").read_text() == script


@pytest.mark.parametrize(
    ("recipe", "lead", "grace"),
    [("nemo", 60, 50), ("nemo", 900, 600), ("preemptible", 60, 25), ("preemptible", 30, 20)],
)
def test_a_job_gives_no_more_grace_than_its_recipe(
    recipe: str, lead: int, grace: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    given = ["slurm", f"--recipe={recipe}", f"--preempt-time={lead}", "--run-dir=run", "train.py"]
    assert f" --grace-period={grace} " in _batch_script(_parse(given), Slurm())[1]


# -- two callbacks for one thing ---------------------------------------------------------------------------------------

FOREIGN = {
    "FaultToleranceSectionsCallback": "FaultTolerance",
    "FaultToleranceCallback": "FaultTolerance",
    "StragglerDetectionCallback": "StragglerDetection",
    "LocalCheckpointCallback": "LocalCheckpoint",
    "PreemptionCallback": "Preemption",
}


def fit(trainer_callbacks: list[Any], package: Any, folder: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel
    from pytorch_lightning.demos.boring_classes import BoringModel as OldBoringModel

    trainer = package.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=trainer_callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit((BoringModel if package is L else OldBoringModel)())


@pytest.mark.parametrize("package", [L, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_callback_of_others_that_does_the_same_is_refused(foreign: str, package: Any, tmp_path: Path) -> None:
    theirs = type("Special", (type(foreign, (package.Callback,), {}),), {})()
    ours = next(each for each in recipes.nemo(tmp_path / "run").callbacks if type(each).__name__ == FOREIGN[foreign])
    context.fits_begun.clear()
    with pytest.raises(ValueError, match=f"Special and {FOREIGN[foreign]} do the same"):
        fit([theirs, ours], package, tmp_path)
    ours._injected = True
    context.fits_begun.clear()
    fit([theirs, ours], package, tmp_path)  # a launched script has its reasons


# -- Weights & Biases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.campaign)]
)
@pytest.mark.slow
def test_one_wandb_run_over_all_processes_of_a_run(package: str, tmp_path: Path) -> None:
    code = f"""
import json, sys
import {package} as package
from lightning_resilience import recipes
logger = recipes.nemo(sys.argv[1]).wandb_logger(project="gpt", offline=True)
assert isinstance(logger, sys.modules["{package}"].loggers.WandbLogger)
logger.log_metrics({{"x": 1.0}})
print(json.dumps([logger.version, logger.experiment.id, logger.save_dir, logger.experiment.project]))
"""
    ran = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"WANDB_SILENT": "true"},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        ran.append(json.loads(done.stdout.splitlines()[-1]))
    identity = RunDirectory(tmp_path / "run").identity()
    assert ran == [[identity, identity, str(tmp_path / "run"), "gpt"]] * 2
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2


def test_a_wandb_logger_needs_the_place_of_the_run() -> None:
    with pytest.raises(ValueError, match="needs the recipe's run_dir"):
        recipes.nemo().wandb_logger()
