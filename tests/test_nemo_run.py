"""The plugins for NeMo-Run, with the real NeMo-Run: ``make test-nemo-run``.

What NeMo-Run renders is run: with stand-ins for Slurm's commands, on this machine, and on a real Slurm.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger

from lightning_resilience import AutoResume, FaultTolerance, Preemption
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.cli import launch_settings
from lightning_resilience.launch.job import LaunchSettings
from tests import harness
from tests.ledgers import read_ledger
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.conftest import cluster  # noqa: F401  (a fixture)
from tests.slurm.jobs import Chain

run = pytest.importorskip("nemo_run", reason="NeMo-Run is not installed; make test-nemo-run installs it")

from lightning_resilience.contrib.nemo_run import FaultTolerancePlugin, PreemptionPlugin, WandbPlugin  # noqa: E402

STUBS = {
    "scontrol": """
        if [ "$1" = requeue ]; then
            echo "$2" >> "$STUBS/requeued"
            (sleep 0.3; kill -TERM $PPID) &  # as Slurm takes the job back
        else
            echo n1; echo n2
        fi
    """,
    "srun": """
        if [ "${@: -1}" = --ip-address ]; then echo '10.0.0.1 10.0.0.2'; exit; fi
        printf '%s\\0' "$@" > "$STUBS/srun"
        echo "$SRUN_CPUS_PER_TASK" > "$STUBS/cores"
        if [ "$DO" = srun-fails ]; then exit 1; fi
        if [ "$DO" = term-to-all ]; then kill -TERM $PPID; exit 143; fi
        while [ "$1" != bash ]; do shift; done
        set -- "${@/#\\/nemo_run/$JOB_DIR}"  # what a container sees
        SLURM_NODEID=0 "$@"; first=$?
        SLURM_NODEID=1 OTHER=1 "$@"; other=$?
        exit $(( other > first ? other : first ))
    """,
    "python": """
        if [ -n "$OTHER" ]; then exit "$OTHER_DOES"; fi
        printf '%s\\0' "$@" > "$STUBS/python"
        case $DO in
            killed-with-its-shell) kill -KILL $PPID; exit 137 ;;
            *) exit "$DO" ;;
        esac
    """,
}


@dataclass
class Rendered:
    """What NeMo-Run has made of a task, ready to be run with stand-ins for Slurm's commands.

    ``task`` and ``executor`` are those that the plugins have changed.
    """

    folder: Path
    task: Any
    executor: Any
    request: Any
    restart_count: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, text in STUBS.items():
            stub = self.folder / "bin" / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(f"#!/bin/bash\n{textwrap.dedent(text)}")
            stub.chmod(0o755)
        self.environment = {
            **self.environment,
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "STUBS": str(self.folder),
            "JOB_DIR": str(self.executor.job_dir),
        }

    @property
    def sbatch_options(self) -> dict[str, str]:
        lines = self.request.materialize().splitlines()
        options = [shlex.split(line.removeprefix("#SBATCH"))[0] for line in lines if line.startswith("#SBATCH")]
        return dict(option.removeprefix("--").partition("=")[::2] for option in options)

    def batch(self, do: object, other_does: int = 0) -> tuple[int, bool]:
        """Runs the batch script. Returns its exit code, and whether it has requeued the job."""
        (self.folder / "requeued").unlink(missing_ok=True)
        environment = {
            **self.environment,
            "DO": str(do),
            "OTHER_DOES": str(other_does),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": str(self.executor.nodes),
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        if self.restart_count:
            environment["SLURM_RESTART_COUNT"] = str(self.restart_count)
        script = self.folder / "job.sh"
        script.write_text(self.request.materialize())
        done = subprocess.run(
            ["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        print(done.stdout, done.stderr)  # pytest shows it where a test fails
        return done.returncode, (self.folder / "requeued").exists()

    def local(self) -> None:
        """Runs what the local executor would start."""
        (replica,) = self.request.role_params.popitem()[1]
        environment = {**os.environ, **replica.env, **self.environment, "DO": "0"}
        subprocess.run(replica.args, env=environment, capture_output=True, timeout=60, check=True)

    def words(self, command: str) -> list[str]:
        """The arguments that a stand-in got last."""
        return (self.folder / command).read_text().split("\0")[:-1]

    def settings(self, monkeypatch: pytest.MonkeyPatch) -> LaunchSettings:
        """What launch makes of the arguments that it got."""
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setenv("SLURM_NODEID", "0")
        words = self.words("python")
        assert words[:3] == ["-m", "lightning_resilience.launch.cli", "launch"]
        return launch_settings(words[3:])


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # NeMo-Run reads it, and pytest's must not be read

    def render(task: Any, executor: Any, *plugins: Any) -> Rendered:
        with run.Experiment("test", executor=executor) as experiment:
            experiment.add(task, executor=executor, name="task", plugins=list(plugins))
            experiment.dryrun(log=False, delete_exp_dir=False)
        (job,) = experiment.jobs
        return Rendered(tmp_path, job.task, job.executor, job._dryrun_info.request)

    return render


def slurm(**changes: Any) -> Any:
    settings = {"nodes": 2, "ntasks_per_node": 4, "poll_estimated_start_time": False, **changes}
    return run.SlurmExecutor(account="me", packager=run.Packager(), **settings)


def script(*args: str) -> Any:
    return run.Script(str(harness.PROGRAM), entrypoint="python", args=list(args))


def train(trainer: Any = None, note: str = "") -> None:
    """What a run.Partial of these tests runs."""


class Trainer:
    """What a recipe of NeMo's has for a Trainer, as far as plugins are concerned."""

    def __init__(self, devices: int = 1, callbacks: Any = None, logger: Any = None) -> None:
        self.callbacks = callbacks


def named_logger(name: str) -> Any:
    return run.Config(WandbLogger, name=name, offline=True)


# What launch is told


def test_launch_is_told_what_the_plugins_say(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = FaultTolerancePlugin(run_dir="/shared/a user's/run"), PreemptionPlugin()
    rendered = render(script("--lr", "1e-3"), slurm(), *plugins)
    rendered.batch(0)
    settings = rendered.settings(monkeypatch)
    assert settings.command == [str(harness.PROGRAM), "--lr", "1e-3"]
    assert settings.run_dir == Path("/shared/a user's/run")
    assert settings.recipe == "nemo"
    assert (settings.nnodes, settings.node_rank, settings.nproc_per_node) == ("2", 0, "4")
    assert settings.rdzv_endpoint == "10.0.0.1:20077"
    assert (settings.budget.in_job_restarts, settings.budget.job_retries) == (3, 2)
    assert settings.retries_in_new_job
    assert settings.grace_period_s == 50.0
    assert (settings.section_timeouts.setup, settings.section_timeouts.step) == (1800.0, 300.0)


def test_arguments_that_are_not_the_defaults_reach_launch(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FaultTolerancePlugin(
        num_in_job_restarts=1,
        num_job_retries_on_failure=7,
        section_timeouts="step:20,checkpointing:none",
        recipe="lightning_resilience.recipes:preemptible",
    )
    rendered = render(script(), slurm(nodes=1), PreemptionPlugin(preempt_time=120), plugin)
    rendered.batch(0)
    settings = rendered.settings(monkeypatch)
    assert settings.budget == Budget(1, 7, settings.budget.max_failures_per_day)
    assert settings.recipe == "lightning_resilience.recipes:preemptible"
    assert str(settings.section_timeouts) == "setup:600,step:20,checkpointing:none,out_of_section:300"
    assert settings.grace_period_s == 110.0
    assert (settings.nnodes, settings.rdzv_endpoint) == ("1", None)


def test_without_a_run_dir_it_lies_in_the_experiment(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(script(), slurm(), FaultTolerancePlugin())
    rendered.batch(0)
    assert rendered.settings(monkeypatch).run_dir == Path(rendered.executor.job_dir) / "lightning-resilience"


def test_arguments_are_shell_text_under_slurm_as_without_the_plugin(
    render: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = render(script("'a b'", "$SLURM_JOB_ID"), slurm(), FaultTolerancePlugin())
    rendered.batch(0)
    assert rendered.settings(monkeypatch).command[1:] == ["a b", "77"]


def test_arguments_are_taken_as_they_are_on_this_machine(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(script("a b", "$SLURM_JOB_ID", "'"), run.LocalExecutor(), FaultTolerancePlugin())
    rendered.local()
    assert rendered.settings(monkeypatch).command[1:] == ["a b", "$SLURM_JOB_ID", "'"]


def test_on_this_machine_launch_retries_by_itself(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = run.LocalExecutor(ntasks_per_node=3)
    rendered = render(script(), executor, FaultTolerancePlugin(), PreemptionPlugin())
    rendered.local()
    settings = rendered.settings(monkeypatch)
    assert not settings.retries_in_new_job
    assert (settings.nproc_per_node, settings.nnodes) == ("3", "1")
    assert settings.grace_period_s == 50.0
    assert settings.run_dir == Path(rendered.executor.job_dir) / "lightning-resilience"


@pytest.mark.parametrize("executor", [slurm, run.LocalExecutor])
def test_a_partial_is_launched_as_nemo_run_starts_it(
    render: Any, monkeypatch: pytest.MonkeyPatch, executor: Any
) -> None:
    rendered = render(run.Partial(train, note="a b"), executor(), FaultTolerancePlugin())
    rendered.batch(0) if executor is slurm else rendered.local()
    settings = rendered.settings(monkeypatch)
    assert settings.command[:2] == ["-m", "nemo_run.core.runners.fdl_runner"]
    assert Path(settings.command[-1]).is_file()


def test_in_a_container_both_sides_mean_the_same_files(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(script(), slurm(container_image="image"), FaultTolerancePlugin())
    assert rendered.batch(0) == (0, False)
    assert rendered.batch(75)[1]
    words = rendered.words("srun")
    mounts = words[words.index("--container-mounts") + 1].split(",")
    for path in (Path(rendered.executor.launcher.verdict), rendered.settings(monkeypatch).run_dir):
        assert f"{path.parent}:{path.parent}" in mounts


def test_an_experiment_that_is_reset_goes_on_with_its_run(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = render(script(), run.LocalExecutor(), FaultTolerancePlugin(), PreemptionPlugin())
    experiment = run.Experiment.from_id(first.executor.experiment_id)
    experiment.reset()
    with experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
    (job,) = experiment.jobs
    assert job.executor.experiment_id != first.executor.experiment_id
    again = Rendered(first.folder, job.task, job.executor, job._dryrun_info.request)
    again.local()
    settings = again.settings(monkeypatch)
    assert settings.run_dir == Path(first.executor.job_dir) / "lightning-resilience"
    assert settings.grace_period_s == 50.0


@pytest.mark.parametrize(
    ("given", "workers", "cores", "gpus_per_task"),
    [
        ({"ntasks_per_node": 8, "gpus_per_node": 8}, "8", None, None),
        ({"ntasks_per_node": 1, "gpus_per_node": 8}, "8", None, None),
        ({"ntasks_per_node": 1}, "1", None, None),
        ({"ntasks_per_node": 4, "gpus_per_task": 1, "cpus_per_task": 6}, "4", "24", "4"),
        ({"ntasks_per_node": 1, "torchrun_nproc_per_node": 5, "cpus_per_task": 6}, "5", "6", None),
    ],
)
def test_one_task_per_node_has_the_resources_of_all(
    render: Any,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, int],
    workers: str,
    cores: str | None,
    gpus_per_task: str | None,
) -> None:
    rendered = render(script(), slurm(**given), FaultTolerancePlugin())
    options = rendered.sbatch_options
    rendered.environment["SLURM_CPUS_PER_TASK"] = options.get("cpus-per-task", "")  # as Slurm does
    rendered.batch(0)
    assert rendered.settings(monkeypatch).nproc_per_node == workers
    assert (rendered.folder / "cores").read_text().strip() == (cores or "")
    assert options["ntasks-per-node"] == "1"
    assert (options.get("cpus-per-task"), options.get("gpus-per-task")) == (cores, gpus_per_task)


# What follows


@pytest.mark.parametrize("code", [0, 1, 2, 16, 17, 127])
def test_what_launch_has_decided_is_the_end_of_the_job(render: Any, code: int) -> None:
    assert render(script(), slurm(), FaultTolerancePlugin()).batch(code) == (code, False)


@pytest.mark.parametrize("do", [75, 137, 143, "killed-with-its-shell"])
def test_what_was_interrupted_or_killed_is_requeued(render: Any, do: object) -> None:
    rendered = render(script(), slurm(), FaultTolerancePlugin(num_job_retries_on_failure=0))
    rendered.restart_count = 99  # preemptions and time limits spend no retries
    exit_code, requeued = rendered.batch(do)
    assert requeued
    assert exit_code == 143  # it has waited for Slurm: a script that ends by itself is a job that has completed


@pytest.mark.parametrize(("first", "requeued"), [(0, False), (1, False), (75, True)])
def test_the_first_node_has_the_last_word(render: Any, first: int, requeued: bool) -> None:
    rendered = render(script(), slurm(), FaultTolerancePlugin())
    assert rendered.batch(first, other_does=137)[1] == requeued


def test_requeues_are_bounded(render: Any) -> None:
    rendered = render(script(), slurm(), FaultTolerancePlugin(max_requeues=5))
    rendered.restart_count = 4
    assert rendered.batch(75)[1]
    rendered.restart_count = 5
    assert rendered.batch(75) == (1, False)
    assert rendered.batch(0) == (0, False)


def test_a_launch_that_never_begins_is_not_tried_for_ever(render: Any) -> None:
    rendered = render(script(), slurm(), FaultTolerancePlugin())
    assert rendered.batch("srun-fails")[1]
    assert rendered.batch(75)[1]  # once it has begun, the count begins anew
    assert rendered.batch("srun-fails")[1]
    assert rendered.batch("srun-fails")[1]
    assert rendered.batch("srun-fails") == (1, False)


def test_nothing_is_decided_when_slurm_ends_the_whole_job(render: Any) -> None:
    assert render(script(), slurm(), FaultTolerancePlugin()).batch("term-to-all") == (143, False)


def test_no_node_is_ended_because_another_one_has(render: Any) -> None:
    rendered = render(script(), slurm(srun_args=["--mpi=none"]), FaultTolerancePlugin())
    rendered.batch(0)
    options = dict(word.partition("=")[::2] for word in rendered.words("srun") if word.startswith("--"))
    assert (options["--kill-on-bad-exit"], options["--wait"]) == ("0", "0")  # of two, srun takes the last
    assert options["--mpi"] == "none"


def test_lines_of_the_user_stay(render: Any, tmp_path: Path) -> None:
    rendered = render(script(), slurm(setup_lines=f"touch {tmp_path}/was-here"), FaultTolerancePlugin())
    assert rendered.batch(0) == (0, False)
    assert (tmp_path / "was-here").exists()


# The signal


def test_slurm_is_asked_for_the_signal_for_scripts_too(render: Any) -> None:
    assert render(script(), slurm(), PreemptionPlugin()).sbatch_options["signal"] == "TERM@60"
    other = PreemptionPlugin(preempt_time=90, sig=signal.SIGUSR1)
    assert render(script(), slurm(), other).sbatch_options["signal"] == "USR1@90"


def test_the_trainer_of_a_partial_gets_the_callbacks(render: Any) -> None:
    other = run.Config(Trainer)
    task = run.Partial(train, trainer=run.Config(Trainer, callbacks=[other]))
    changed = render(task, run.LocalExecutor(), PreemptionPlugin()).task.trainer.callbacks
    assert [each.__fn_or_cls__ for each in changed] == [Trainer, Preemption, AutoResume]
    assert task.trainer.callbacks == [other]  # NeMo-Run gives plugins a copy


def test_callbacks_of_the_user_go_before_those_of_the_plugin(render: Any) -> None:
    own = run.Config(Preemption, signals=["SIGUSR2"])
    task = run.Partial(train, trainer=run.Config(Trainer, callbacks=[own]))
    changed = render(task, run.LocalExecutor(), PreemptionPlugin()).task.trainer.callbacks
    assert [each.__fn_or_cls__ for each in changed] == [Preemption, AutoResume]
    assert list(changed[0].signals) == ["SIGUSR2"]
    for none in (PreemptionPlugin(callbacks=[]), PreemptionPlugin(enable_exit_handler=False)):
        assert render(task, run.LocalExecutor(), none).task.trainer.callbacks == [own]


def test_the_callbacks_can_be_built() -> None:
    task = run.Partial(train, trainer=run.Config(Trainer))
    PreemptionPlugin(enable_exit_handler_for_data_loader=False).setup(task, run.LocalExecutor())
    executor = run.LocalExecutor()
    executor.job_dir = "somewhere"
    FaultTolerancePlugin(calc_ft_timeouts=False).setup(task, executor)
    built = [getattr(each, "__fn_or_cls__")(**each.__arguments__) for each in task.trainer.callbacks]  # noqa: B009
    preemption, resume, watching = built
    assert isinstance(preemption, Preemption)
    assert not preemption.enable_exit_handler_for_data_loader
    assert isinstance(resume, AutoResume)
    assert isinstance(watching, FaultTolerance)
    assert not watching.calculate_timeouts


# Weights & Biases


def test_a_script_finds_its_wandb_project_in_the_environment(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    rendered = render(script(), slurm(), WandbPlugin(project="gpt", name="first"))
    assert rendered.executor.env_vars == {
        "WANDB_API_KEY": "secret",
        "WANDB_PROJECT": "gpt",
        "WANDB_NAME": "first",
    }


def test_the_trainer_of_a_partial_gets_a_wandb_logger(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    task = run.Partial(train, trainer=run.Config(Trainer), note="a b")
    plugin = WandbPlugin(project="gpt", entity="we", save_dir="somewhere")
    logger = render(task, run.LocalExecutor(), plugin).task.trainer.logger
    assert logger.__fn_or_cls__ is WandbLogger
    assert (logger.project, logger.entity, logger.save_dir) == ("gpt", "we", "somewhere")
    assert logger.config["note"] == "a b"
    assert logger.config["experiment"]["id"].startswith("test_")
    own = run.Config(WandbLogger, project="own")
    theirs = WandbPlugin(name="theirs", logger_fn=named_logger, log_task_config=False)
    assert render(task, run.LocalExecutor(), theirs).task.trainer.logger.name == "theirs"
    task.trainer.logger = own
    assert render(task, run.LocalExecutor(), plugin).task.trainer.logger == own


def test_without_a_key_of_wandb_nothing_is_changed(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    task = run.Partial(train, trainer=run.Config(Trainer))
    rendered = render(task, run.LocalExecutor(), WandbPlugin(project="gpt"))
    assert rendered.executor.env_vars == {}
    assert rendered.task.trainer.logger is None


# What cannot be


@pytest.mark.parametrize(
    ("task", "executor", "match"),
    [
        (run.Script(inline="echo"), run.LocalExecutor(), "put it into a file"),
        (run.Script("train.sh"), run.LocalExecutor(), "runs Python scripts"),
        (run.Script("train.py", entrypoint="python"), run.LocalExecutor(nodes=2), "this machine only"),
        (run.Script("train.py", entrypoint="python"), run.LocalExecutor(launcher="torchrun"), "brings its own"),
        (run.Script("train.py", entrypoint="python"), slurm(array="0-3"), "job arrays"),
        (run.Script("train.py", entrypoint="python"), slurm(nodes=[1, 2]), "one number"),
        (run.Script("train.py", entrypoint="python"), run.DockerExecutor(container_image="image"), "DockerExecutor"),
    ],
)
def test_what_cannot_be_launched_is_refused(task: Any, executor: Any, match: str) -> None:
    executor.job_dir = "somewhere"
    with pytest.raises(ValueError, match=match):
        FaultTolerancePlugin().setup(task, executor)


def test_a_script_says_itself_how_its_limits_are_had() -> None:
    with pytest.raises(ValueError, match="calculate_timeouts=False"):
        FaultTolerancePlugin(calc_ft_timeouts=False).setup(script(), run.LocalExecutor())


def test_groups_of_tasks_are_refused(render: Any, tmp_path: Path) -> None:
    executor = slurm()
    with run.Experiment("test", executor=executor) as experiment:
        with pytest.raises(ValueError, match="groups of tasks"):
            experiment.add([script(), script()], executor=executor, name="task", plugins=[FaultTolerancePlugin()])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_in_job_restarts": -1}, "num_in_job_restarts"),
        ({"num_job_retries_on_failure": -1}, "num_job_retries_on_failure"),
        ({"section_timeouts": "stepp:3"}, "no section 'stepp'"),
        ({"rank_heartbeat_timeout": 0}, "section step"),
        ({"recipe": "nemoo"}, "nemoo"),
        ({"enable_ft_package": False}, "recipe='MODULE:FUNCTION'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FaultTolerancePlugin(**arguments)


def test_a_signal_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="preempt_time=10"):
        PreemptionPlugin(preempt_time=10)


def test_without_nemo_run_only_the_plugins_are_missing() -> None:
    code = """
        import sys
        sys.modules["nemo_run"] = None
        import lightning_resilience.recipes, lightning_resilience.launch.cli
        lightning_resilience.AutoResume
        import lightning_resilience.contrib.nemo_run
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert "lightning-resilience[nemo-run]" in done.stderr.splitlines()[-1]


# For real

DRIVER = """
import json, sys
import nemo_run as run
from lightning_resilience.contrib.nemo_run import FaultTolerancePlugin, PreemptionPlugin
from tests import test_nemo_run

given = json.loads(sys.argv[1])
if given["slurm"]:
    executor = test_nemo_run.slurm(tunnel=run.LocalTunnel(job_dir=""), **given["slurm"])
    task = run.Script(given["program"], entrypoint=sys.executable, args=[given["argument"]])
else:
    executor = run.LocalExecutor(ntasks_per_node=2)
    task = run.Script(given["program"], entrypoint="python", args=[given["argument"]])
    if given["partial"]:
        task = run.Partial(test_nemo_run.run_program, config=given["argument"])
with run.Experiment("real", executor=executor) as experiment:
    plugins = [PreemptionPlugin(), FaultTolerancePlugin(**given["plugin"])]
    experiment.add(task, executor=executor, name="task", plugins=plugins)
    experiment.run(detach=bool(given["slurm"]))
print("HANDLE", experiment.jobs[0].handle)
print("STATE", experiment.jobs[0].state)
"""


def run_program(config: str) -> None:
    """The test program as a function, for a run.Partial."""
    from tests.program import main

    main(json.loads(config))


def drive(
    home: Path, config: dict[str, Any], environment: dict[str, str], quoted: bool = False, **given: Any
) -> subprocess.CompletedProcess[str]:
    argument = json.dumps(config)
    given = {
        "slurm": None,
        "partial": False,
        "plugin": {},
        "program": str(harness.PROGRAM),
        "argument": shlex.quote(argument) if quoted else argument,
        **given,
    }
    own = {
        "NEMORUN_HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(harness.PROGRAM.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(given)],
        env={**environment, **own},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("partial", [False, True], ids=["script", "partial"])
def test_a_task_on_this_machine_survives_a_crash(tmp_path: Path, partial: bool) -> None:
    def config(name: str, **changes: Any) -> dict[str, Any]:
        files = {each: str(tmp_path / f"{name}-{each}") for each in ("run_dir", "out", "log")}
        return {**files, "trainer": {"devices": 2, "max_epochs": 2}, **changes}

    codes, output = harness.run(undisturbed := config("undisturbed"), tmp_path)
    assert codes == [0, 0], output
    crashing = config("crashing", events=[{"at": "train", "step": 23, "rank": 1, "do": "SIGKILL", "once": True}])
    plugin = {"run_dir": crashing["run_dir"]}
    done = drive(tmp_path / "home", crashing, dict(os.environ), partial=partial, plugin=plugin)
    assert "STATE SUCCEEDED" in done.stdout, done.stdout + done.stderr
    assert harness.weights(crashing) == harness.weights(undisturbed)
    starts = [event for event in read_ledger(tmp_path / "crashing-run_dir" / "ledger") if event["event"] == "start"]
    assert len(starts) == 2


@pytest.fixture
def chain(cluster: Cluster, tmp_path: Path) -> Iterator[Chain]:  # noqa: F811
    chain = Chain(cluster, tmp_path)
    yield chain
    chain.clean_up()


def submit(chain: Chain, plugin: dict[str, Any] | None = None, time: str = "1:00:00", **changes: Any) -> str:
    executor = {"partition": "low", "nodes": 2, "ntasks_per_node": 1, "time": time}
    done = drive(
        chain.folder.parent / "home",
        chain.config(**changes),
        chain.cluster.environment,
        quoted=True,
        slurm=executor,
        plugin={"run_dir": str(chain.run_dir), **(plugin or {})},
    )
    handles = [line for line in done.stdout.splitlines() if line.startswith("HANDLE")]
    assert handles, done.stdout + done.stderr
    chain.jobs.append(handles[0].rpartition("/")[2])
    return chain.jobs[-1]


def restarts(chain: Chain) -> list[Any]:
    return [event["slurm_restart_count"] for event in chain.events("launch")]


@pytest.mark.slurm
def test_on_slurm_a_crash_is_restarted_and_a_signal_is_requeued_until_it_has_finished(chain: Chain) -> None:
    job_id = submit(chain, step_s=0.25, events=[{"at": "train", "step": 12, "rank": 1, "do": "SIGKILL", "once": True}])
    chain.wait_for("saved", step=20)
    chain.cluster.call("scancel", "--signal=TERM", job_id)
    job = chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    assert restarts(chain) == [0, 1]
    assert [event["retry"] for event in chain.events("job_start")] == [False, False]
    assert [event["exit_code"] for event in chain.events("exit")] == [75, 0]
    assert len(chain.events("start")) == 3
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0")
    chain.note("NeMo-Run: a rank is killed, scancel --signal=TERM")


@pytest.mark.slurm
def test_on_slurm_two_retries_are_three_jobs_and_the_end_is_a_failure(chain: Chain) -> None:
    plugin = {"num_in_job_restarts": 0, "num_job_retries_on_failure": 2}
    job_id = submit(chain, plugin, events=[{"at": "train", "step": 3, "rank": 1, "do": "raise"}])
    job = chain.wait_for_end(job_id, "FAILED")
    assert job["ExitCode"] == "1:0"
    assert restarts(chain) == [0, 1, 2]
    assert [event["exit_code"] for event in chain.events("exit")] == [75, 75, 1]
    assert [event["retry"] for event in chain.events("job_start")] == [False, True, True]


@pytest.mark.slurm
def test_on_slurm_a_cancelled_job_stays_cancelled(chain: Chain) -> None:
    job_id = submit(chain, step_s=0.25)
    chain.wait_for("saved", step=5)
    chain.cluster.call("scancel", job_id)
    job = chain.wait_for_end(job_id, "CANCELLED")
    assert job["Restarts"] == "0"


@pytest.mark.slurm
def test_on_slurm_a_preempted_job_goes_on_when_its_nodes_are_free_again(chain: Chain) -> None:
    job_id = submit(chain, {"num_job_retries_on_failure": 0}, step_s=0.25)
    chain.wait_for("saved", step=10)
    other = chain.cluster.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", wrap="sleep 1")
    chain.jobs.append(other)
    chain.wait_for_end(job_id, "COMPLETED")
    chain.check_weights()
    assert restarts(chain) == [0, 1]
    assert [event["exit_code"] for event in chain.events("exit")] == [75, 0]
    chain.note("NeMo-Run: preemption")


@pytest.mark.slurm
def test_on_slurm_a_lost_node_costs_no_retry(chain: Chain) -> None:
    job_id = submit(chain, {"num_job_retries_on_failure": 0}, step_s=0.25)
    chain.wait_for("saved", step=10)
    chain.cluster.lose_node("n2")
    try:
        wait_until(lambda: chain.cluster.job(job_id)["Restarts"] == "1", chain.cluster.logs)
        chain.wait_for_end(job_id, "COMPLETED")
    finally:
        chain.cluster.start_node("n2")
        wait_until(lambda: "n2" in chain.cluster.call("sinfo", "-h", "-N", "-t", "idle"), chain.cluster.logs)
    chain.check_weights()
    assert restarts(chain) == [0, 1]
    chain.note("NeMo-Run: a node is lost (SlurmdTimeout 10 s)")


@pytest.mark.slurm
def test_on_slurm_the_time_limit_costs_nothing(chain: Chain) -> None:
    job_id = submit(chain, {"num_job_retries_on_failure": 0}, time="0:02:00", step_s=1.5)
    chain.wait_for_end(job_id, "COMPLETED", within_s=250)
    chain.check_weights()
    ends = [event["exit_code"] for event in chain.events("exit")]
    assert ends == [75] * (len(ends) - 1) + [0]  # how much fits into a job is a matter of the machine
    assert len(ends) >= 2
    assert restarts(chain) == list(range(len(ends)))
    chain.note("NeMo-Run: the time limit")
