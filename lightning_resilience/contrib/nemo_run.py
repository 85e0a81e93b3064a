"""Plugins for `NeMo-Run <https://github.com/NVIDIA-NeMo/Run>`_ with the names and arguments of NeMo's own plugins.

Needs ``pip install 'lightning-resilience[nemo-run]'``; nothing else of this package imports this module.

NeMo-Run asks an executor's launcher to rewrite the command of a task. The launcher in this module turns the command
into a script that runs ``lightning-resilience launch`` with it, once on every node, inside the task's container if it
has one. The batch script decides what follows, outside of the container: see
:func:`lightning_resilience.launch.schedulers.slurm.requeue_trap`. NeMo-Run's own rule there is to requeue after any
exit code but 0, at most ``retries`` times. It is switched off by ``retries = 0``, since it counts a preemption as a
failure and retries failures that are final.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

try:
    import nemo_run as run
    from nemo_run.core.execution.launcher import SlurmTemplate
    from nemo_run.core.serialization.yaml import YamlSerializer
except ImportError as error:
    raise ImportError(
        f"NeMo-Run cannot be imported ({error}); install it with: pip install 'lightning-resilience[nemo-run]'"
    ) from error

from lightning_resilience import AutoResume, FaultTolerance, Preemption
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.launch.schedulers.base import AFTER_GRACE_S
from lightning_resilience.launch.schedulers.slurm import (
    SRUN_OPTIONS,
    launch_step,
    preempt_time_problem,
    requeue_trap,
    signal_option,
)
from lightning_resilience.recipes import JOBS
from lightning_resilience.signals import GRACE_PERIOD_VARIABLE

log = logging.getLogger(__name__)

_STEP = """\
# Made by lightning-resilience. Runs once on every node.
grace=()
if [ -n "${{{grace_variable}:-}}" ]; then grace=("--grace-period=${grace_variable}"); fi
command=(launch {options} "${{grace[@]}}")
"""
_RUN = '{python} -m lightning_resilience.launch.cli "${{command[@]}}" {script}'


@dataclass(kw_only=True)
class ResilientLaunch(SlurmTemplate):  # type: ignore[misc]  # NeMo-Run has no types
    """Rewrites the command of a task into one that ``lightning-resilience launch`` runs.

    It is a ``SlurmTemplate``, because ``SlurmExecutor`` asks only launchers of this class to rewrite a command.

    Args:
        options: The options of ``launch``, without nodes and the grace period, which only the job knows.
        verdict: The file in which the first node's script reports how the launch has ended; ``None``: this is no Slurm
            job, so nothing reads the file.
    """

    template_inline: str | None = "{{command}}"
    options: list[str] = field(default_factory=list)
    verdict: str | None = None

    def transform(self, cmd: list[str]) -> Any:
        """The script that runs the launch.

        Args:
            cmd: The interpreter, the script (or ``-m`` and the module), and its arguments. Under Slurm they are shell
                text, as NeMo-Run takes them; elsewhere they are plain words.
        """
        python, *script = cmd
        options = shlex.join(self.options)
        step = _STEP.format(options=options, grace_variable=GRACE_PERIOD_VARIABLE)
        if self.verdict is None:
            return run.Script(
                inline=f"{step}exec {_RUN.format(python=shlex.quote(python), script=shlex.join(script))}\n"
            )
        return run.Script(inline=step + launch_step(_RUN.format(python=python, script=" ".join(script)), self.verdict))


def _has_our_launcher(executor: Any) -> bool:
    return isinstance(executor.launcher, ResilientLaunch)


# A LocalExecutor never asks its launcher, although the way it starts tasks would allow it. This is set for the class,
# not for one executor: an experiment that is reset creates its executors anew, and does not call the plugins again.
run.LocalExecutor.supports_launcher_transform = _has_our_launcher


@dataclass(kw_only=True)
class FaultTolerancePlugin(run.Plugin):  # type: ignore[misc]  # NeMo-Run has no types
    """Runs a task by ``lightning-resilience launch``: failures are restarted, and a Slurm job is requeued if it helps.

    Every Trainer of the task gets the callbacks of the recipe. Works for a ``run.Partial``, and for a ``run.Script``
    that is a Python script or module; on a ``SlurmExecutor`` or a ``LocalExecutor``.

    Args:
        enable_ft_package: An argument of Megatron-Bridge's plugin that must be ``True``: the recipe's
            ``FaultTolerance`` detects hangs. For a run without it give a ``recipe`` of your own.
        calc_ft_timeouts: Whether timeouts are calculated from the time that sections take (Megatron-Bridge's name).
            ``False`` is for a ``run.Partial``, whose Trainer then gets a ``FaultTolerance`` with this setting. A
            script must set it in its own ``FaultTolerance``.
        num_in_job_restarts: Successive failures without progress after which the workers are restarted in the job.
        num_job_retries_on_failure: How often the job is retried after those: 2 retries are 3 runs. Preemptions and
            time limits are not counted.
        initial_rank_heartbeat_timeout: Seconds that a rank may take to the end of its first batch.
        rank_heartbeat_timeout: Seconds that a rank may take for a batch.
        section_timeouts: Timeouts by section, as ``launch --section-timeouts`` takes them, instead of the two timeouts
            above.
        run_dir: Identity of the run, on storage that all nodes share, as its path is inside the container. Default:
            ``lightning-resilience`` in the task's folder of the experiment, which another experiment does not find.
        recipe: The callbacks that the Trainers get, as for ``launch --recipe``: a name, or ``module:function``.
        max_requeues: How often the Slurm job may be requeued, for whatever reason.

    Raises:
        ValueError: If the arguments make no sense.
    """

    enable_ft_package: bool = True
    calc_ft_timeouts: bool = True
    num_in_job_restarts: int = 3
    num_job_retries_on_failure: int = 2
    initial_rank_heartbeat_timeout: float | None = 1800
    rank_heartbeat_timeout: float | None = 300
    section_timeouts: str | None = None
    run_dir: str | None = None
    recipe: str = "nemo"
    max_requeues: int = 100

    def __post_init__(self) -> None:
        for name in ("num_in_job_restarts", "num_job_retries_on_failure", "max_requeues"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.recipe not in JOBS and not all(self.recipe.partition(":")):
            raise ValueError(
                f"recipe={self.recipe!r} is not a recipe; choose one of {', '.join(JOBS)}, or give MODULE:FUNCTION."
            )
        if not self.enable_ft_package:
            raise ValueError(
                "enable_ft_package=False: the recipe's FaultTolerance detects hangs. For a run without it give "
                "recipe='MODULE:FUNCTION', which returns replace(recipes.nemo(), fault_tolerance=None)."
            )
        if self.section_timeouts is None:
            self._timeouts = SectionTimeouts(self.initial_rank_heartbeat_timeout, self.rank_heartbeat_timeout)
        else:
            self._timeouts = SectionTimeouts.parse(self.section_timeouts)

    def setup(self, task: Any, executor: Any) -> None:
        """Gives the executor the launcher; NeMo-Run calls this.

        Args:
            task: The task.
            executor: The executor on which it will run; changed in place.

        Raises:
            ValueError: If the launch does not support this task or this executor.
        """
        _check_task(task)
        if not self.calc_ft_timeouts:
            if isinstance(task, run.Script):
                raise ValueError(
                    "calc_ft_timeouts=False for a run.Script: give the Trainer of the script itself "
                    "FaultTolerance(calculate_timeouts=False), which goes before the recipe's."
                )
            _add_callbacks(task, [run.Config(FaultTolerance, calculate_timeouts=False)])
        if executor.launcher:
            raise ValueError(
                f"The executor has launcher={executor.launcher!r} already, and FaultTolerancePlugin brings its own for "
                "one task: leave the launcher out, and give every task of a group an executor of its own."
            )
        if isinstance(executor, run.SlurmExecutor):
            self._set_up_slurm(executor)
        elif isinstance(executor, run.LocalExecutor):
            self._set_up_local(executor)
        else:
            raise ValueError(
                f"FaultTolerancePlugin works with SlurmExecutor and LocalExecutor, not with {type(executor).__name__}."
            )

    def _set_up_local(self, executor: Any) -> None:
        if executor.nodes != 1:
            raise ValueError(f"LocalExecutor(nodes={executor.nodes}): it starts tasks on this machine only, one node.")
        folder = Path(executor.job_dir)
        executor.launcher = ResilientLaunch(options=self._options(folder, executor.nproc_per_node()))

    def _set_up_slurm(self, executor: Any) -> None:
        if executor.heterogeneous or executor.run_as_group or executor.array is not None:
            raise ValueError(
                "FaultTolerancePlugin works for one task in one Slurm job, not for groups of tasks, heterogeneous jobs "
                "or job arrays: every run has a launch of its own."
            )
        folder = Path(executor.tunnel.job_dir) / Path(executor.job_dir).name
        verdict = str(folder / f"{executor.job_name}_launch_ended")
        if executor.container_image is not None:  # by the name in the batch script; NeMo-Run mounts it by another
            executor.container_mounts.append(f"{folder}:{folder}")
        options = ["--retries-in-new-job", *self._options(folder, _one_task_per_node(executor))]
        executor.launcher = ResilientLaunch(options=options, verdict=verdict)
        executor.retries = 0
        batch = requeue_trap(verdict, executor.HEAD_NODE_IP_VAR, self.max_requeues)
        executor.setup_lines = "\n".join(filter(None, [executor.setup_lines, batch]))
        executor.srun_args = [*SRUN_OPTIONS, *(executor.srun_args or [])]  # after NeMo-Run's own, so these apply

    def _options(self, folder: Path, workers: int) -> list[str]:
        return [
            f"--run-dir={self.run_dir or folder / 'lightning-resilience'}",
            f"--recipe={self.recipe}",
            f"--nproc-per-node={workers}",
            f"--in-job-restarts={self.num_in_job_restarts}",
            f"--job-retries={self.num_job_retries_on_failure}",
            f"--section-timeouts={self._timeouts}",
        ]


@dataclass(kw_only=True)
class PreemptionPlugin(run.Plugin):  # type: ignore[misc]  # NeMo-Run has no types
    """Makes Slurm send a signal before the time limit, and gives the task the time to save and the callbacks for it.

    After that the job is requeued if :class:`FaultTolerancePlugin` is used as well, in either order.

    Args:
        preempt_time: Minimum number of seconds from the signal to the time limit.
        sig: The signal.
        enable_exit_handler: Whether the Trainer of a ``run.Partial`` gets callbacks (Megatron-Bridge's name). The
            recipe of ``FaultTolerancePlugin`` has its own.
        enable_exit_handler_for_data_loader: Whether data-loader workers ignore the signal (Megatron-Bridge's name; its
            default is ``False``). For a ``run.Script`` its own ``Preemption`` decides, or the recipe's: ``True``.
        callbacks: The callbacks that the Trainer gets, each a ``run.Config``. Default: ``Preemption`` and
            ``AutoResume``. A Trainer that has a callback of the same class keeps that one.

    Raises:
        ValueError: If there would be no time to save.
    """

    preempt_time: int = 60
    sig: signal.Signals = signal.SIGTERM
    enable_exit_handler: bool = True
    enable_exit_handler_for_data_loader: bool = True
    callbacks: list[Any] | None = None

    def __post_init__(self) -> None:
        if (problem := preempt_time_problem(self.preempt_time)) is not None:
            raise ValueError(f"preempt_time={self.preempt_time}: {problem}.")

    def setup(self, task: Any, executor: Any) -> None:
        """Changes the task and the executor; NeMo-Run calls this.

        Args:
            task: The task; changed in place.
            executor: The executor on which it will run; changed in place.
        """
        executor.env_vars[GRACE_PERIOD_VARIABLE] = str(self.preempt_time - AFTER_GRACE_S)
        if isinstance(executor, run.SlurmExecutor):
            executor.signal = signal_option(self.preempt_time, signal.Signals(self.sig))
        if isinstance(task, run.Script):
            if not self.enable_exit_handler_for_data_loader:
                log.warning(
                    "enable_exit_handler_for_data_loader=False has no effect on a run.Script: give its Trainer "
                    "Preemption(enable_exit_handler_for_data_loader=False)."
                )
        elif self.enable_exit_handler:
            _add_callbacks(task, self.callbacks if self.callbacks is not None else self._own_callbacks())

    def _own_callbacks(self) -> list[Any]:
        preemption = run.Config(
            Preemption,
            signals=[signal.Signals(self.sig).name],
            enable_exit_handler_for_data_loader=self.enable_exit_handler_for_data_loader,
        )
        return [preemption, run.Config(AutoResume)]


@dataclass(kw_only=True)
class WandbPlugin(run.Plugin):  # type: ignore[misc]  # NeMo-Run has no types
    """Makes a task log to Weights & Biases; with the names of Megatron-Bridge's and of NeMo's plugin.

    Without ``WANDB_API_KEY`` it only logs a warning; otherwise the task gets this variable. W&B gets project, entity
    and name by its environment variables, which every ``WandbLogger`` of a script uses. The Trainer of a
    ``run.Partial`` that has no logger gets one. With :class:`FaultTolerancePlugin` all restarts are one W&B run.

    Args:
        project: The project.
        name: Name of the W&B run.
        entity: User or team.
        save_dir: Where a ``run.Partial`` keeps W&B's files. Default: the working directory.
        logger_fn: Called with ``name``; returns the ``run.Config`` of the logger (NeMo's name). Default: a
            ``WandbLogger`` with the settings above.
        log_task_config: Whether a ``run.Partial`` logs its own configuration, and facts about the experiment.
    """

    project: str | None = None
    name: str | None = None
    entity: str | None = None
    save_dir: str | None = None
    logger_fn: Callable[..., Any] | None = None
    log_task_config: bool = True

    def setup(self, task: Any, executor: Any) -> None:
        """Changes the task and the executor; NeMo-Run calls this.

        Args:
            task: The task; changed in place.
            executor: The executor on which it will run; changed in place.
        """
        if "WANDB_API_KEY" not in os.environ:
            log.warning("WandbPlugin has no effect: WANDB_API_KEY is not set.")
            return
        settings = {"PROJECT": self.project, "NAME": self.name, "ENTITY": self.entity}
        known = {f"WANDB_{name}": value for name, value in settings.items() if value is not None}
        executor.env_vars.update(known, WANDB_API_KEY=os.environ["WANDB_API_KEY"])
        trainer = None if isinstance(task, run.Script) else getattr(task, "trainer", None)
        if trainer is None or getattr(trainer, "logger", None) not in (None, True):
            return
        logger = self.logger_fn(name=self.name) if self.logger_fn is not None else self._logger(trainer)
        if self.log_task_config:
            about = {"id": self.experiment_id, "executor": executor.info(), "local_directory": executor.job_dir}
            logger.config = {**yaml.safe_load(YamlSerializer().serialize(task)), "experiment": about}
        trainer.logger = logger

    def _logger(self, trainer: Any) -> Any:
        # From the Lightning package of the Trainer, which accepts only loggers of that package.
        package = _class_of(trainer).__module__.partition(".")[0]
        loggers = importlib.import_module(
            "pytorch_lightning.loggers" if package == "pytorch_lightning" else "lightning.pytorch.loggers"
        )
        settings = {"project": self.project, "name": self.name, "entity": self.entity, "save_dir": self.save_dir}
        given = {name: value for name, value in settings.items() if value is not None}
        return run.Config(loggers.WandbLogger, **given)


def _check_task(task: Any) -> None:
    if not isinstance(task, run.Script):
        return
    if task.inline:
        raise ValueError("An inline run.Script cannot be launched: put it into a file, run.Script(path=...).")
    if "python" not in os.path.basename(task.entrypoint.split()[0]):
        raise ValueError(
            f"run.Script({task.path!r}, entrypoint={task.entrypoint!r}): the launch runs Python scripts; use "
            "entrypoint='python' and the training script itself."
        )


def _one_task_per_node(executor: Any) -> int:
    """Sets one task for each node, with the resources of all its tasks: the launch, which starts the workers itself.

    Returns:
        How many workers each node has.
    """
    for name in ("nodes", "ntasks_per_node"):
        if not isinstance(getattr(executor, name), int):
            raise ValueError(f"SlurmExecutor({name}={getattr(executor, name)!r}): one number was expected.")
    tasks = executor.ntasks_per_node
    workers = executor.torchrun_nproc_per_node or (executor.nproc_per_node() if tasks == 1 else tasks)
    executor.ntasks_per_node = 1
    for name in ("cpus_per_task", "gpus_per_task"):
        if getattr(executor, name) is not None:
            setattr(executor, name, getattr(executor, name) * tasks)
    return int(workers)


def _add_callbacks(task: Any, callbacks: Sequence[Any]) -> None:
    """Adds callbacks to the Trainer of a configured task, if it has one."""
    trainer = getattr(task, "trainer", None)
    if trainer is None:
        return
    present = list(getattr(trainer, "callbacks", None) or [])
    classes = [_class_of(each) for each in present]
    trainer.callbacks = [*present, *(each for each in callbacks if _class_of(each) not in classes)]


def _class_of(callback: Any) -> Any:
    return getattr(callback, "__fn_or_cls__", type(callback))
