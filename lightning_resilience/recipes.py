"""Recipes: presets of callbacks that belong together, with the settings of the launcher of the same run.

A recipe is for a Trainer in code, or for every Trainer of a script under ``lightning-resilience launch --recipe NAME``.
This module imports neither torch nor Lightning before a recipe is created: the launcher only reads :data:`JOBS`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import lightning_resilience as lr
from lightning_resilience._arguments import changed, check_fields, path
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.launch import membership
from lightning_resilience.launch.budget import Budget
from lightning_resilience.run.deadlines import DEFAULT_GRACE_PERIOD_S
from lightning_resilience.run.run_directory import WORKER_PID_VARIABLE, RunDirectory, is_turned_off
from lightning_resilience.run.settings import SHRINK

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import WandbLogger

    from lightning_resilience.faults import SimulatedFault

RECIPE_VARIABLE = "LIGHTNING_RESILIENCE_RECIPE"
"""Environment variable in which ``lightning-resilience launch`` names the recipe for the script's Trainers."""

NO_RECIPE = "none"
"""The value of ``launch --recipe`` for a script that creates all its callbacks itself."""

_NAME_WIDTH = 20


@dataclass(frozen=True)
class Job:
    """The settings of a run's launcher: the defaults of ``lightning-resilience launch`` with a recipe.

    Attributes:
        budget: How often the launcher restarts and retries. Three restarts inside the job and two job retries are the
            ``num_in_job_restarts`` and ``num_job_retries_on_failure`` of NeMo's ``FaultTolerancePlugin``, where two
            retries make two runs; here they make three.
        grace_period_s: Seconds from the signal that asks the workers to stop to their end. 600 is KempnerForge's
            shutdown deadline.
        section_timeouts: When a rank counts as hung; Megatron-Bridge's values, until they are calculated.
        elastic: Whether the launcher replaces a lost rank while the other ranks keep their processes.
        when_lost: With ``elastic`` and no spare ready, whether the other ranks wait for a replacement (``"hold"``), or
            keep training, also for the lost rank, until it is back (``"go_on"``).
        min_ranks: With ``"go_on"``: the ranks wait if fewer than this are left.
        global_batch: Whether the remaining ranks train on the batches of absent ranks (``"constant"``), or leave these
            batches out (``"shrink"``).
    """

    budget: Budget = field(default_factory=Budget)
    grace_period_s: float = DEFAULT_GRACE_PERIOD_S
    section_timeouts: SectionTimeouts = field(default_factory=SectionTimeouts)
    elastic: bool = False
    when_lost: Literal["hold", "go_on"] = "hold"
    min_ranks: int = 1
    global_batch: Literal["constant", "shrink"] = "constant"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_ranks < 1 or (self.min_ranks > 1 and self.when_lost == "hold"):
            raise ValueError(f'min_ranks must be at least 1, and needs when_lost="go_on", not {self.min_ranks}.')
        if self.grace_period_s < 0:
            raise ValueError(f"grace_period_s must not be negative, not {self.grace_period_s}; 0 is no limit.")

    @property
    def options(self) -> list[str]:
        """The options of ``lightning-resilience launch`` for these settings."""
        return [
            f"--in-job-restarts={self.budget.in_job_restarts}",
            f"--job-retries={self.budget.job_retries}",
            f"--max-failures-per-day={self.budget.max_failures_per_day}",
            f"--grace-period={self.grace_period_s:g}",
            f"--section-timeouts={self.section_timeouts}",
            *(["--elastic"] if self.elastic else []),
            *(["--when-lost=go-on", f"--min-ranks={self.min_ranks}"] if self.when_lost == "go_on" else []),
            *([f"--global-batch={self.global_batch}"] if self.global_batch == SHRINK else []),
        ]


JOBS: dict[str, Job] = {
    "nemo": Job(),
    # Google Cloud and Kubernetes give 30 seconds, AWS 120. A machine that is taken away without a signal counts as a
    # failure of that day, hence the high limit.
    "preemptible": Job(Budget(max_failures_per_day=200), grace_period_s=25.0),
    # A workstation has no other node to wait for, and Ctrl-C means that the run should end.
    "workstation": Job(Budget(job_retries=0), grace_period_s=60.0),
    "elastic": Job(elastic=True),
    "drill": Job(),
    NO_RECIPE: Job(),
}
"""The settings of the launcher for each recipe."""


_PARTS = {
    "auto_resume": "AutoResume",
    "fault_tolerance": "FaultTolerance",
    "preemption": "Preemption",
    "local_checkpoint": "LocalCheckpoint",
    "nan_guard": "NaNGuard",
    "replica_check": "ReplicaCheck",
    "straggler_detection": "StragglerDetection",
    "job": "Job",
}
"""The classes of a recipe's fields by name, since they are imported only when a recipe is created."""


_NOT_A_CALLBACK = (
    "A recipe is neither a callback nor a list of them: give the Trainer recipe.callbacks, or [*recipe.callbacks, ...]."
)


@dataclass(frozen=True)
class Recipe:
    """Callbacks that belong together, and the settings of the launcher of the same run.

    To change a field, use ``dataclasses.replace``::

        recipe = replace(recipes.nemo("runs/gpt"), nan_guard=NaNGuard(action="rollback"), straggler_detection=None)

    Attributes:
        name: Name of the recipe.
        run_dir: The run directory of all its callbacks, on storage that all nodes share; ``None``: ``resilience`` in
            the Trainer's ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.
        auto_resume: Saves and resumes; required.
        fault_tolerance: Finds hangs; ``None``: without.
        preemption: Saves and stops on a signal; ``None``: without.
        local_checkpoint: Saves to each node; ``None``: without.
        nan_guard: Skips bad steps; ``None``: without.
        replica_check: Finds ranks whose weights differ; ``None``: without.
        straggler_detection: Names slow ranks; ``None``: without.
        job: A :class:`Job`: restarts, retries, grace period and limits of the launcher. ``launch --recipe`` reads it;
            for a recipe changed in code, pass ``job.options`` to ``launch``.

    Raises:
        ValueError: If the parts cannot work together.
    """

    name: str
    run_dir: str | os.PathLike[str] | None
    auto_resume: lr.AutoResume
    fault_tolerance: lr.FaultTolerance | None = None
    preemption: lr.Preemption | None = None
    local_checkpoint: lr.LocalCheckpoint | None = None
    nan_guard: lr.NaNGuard | None = None
    replica_check: lr.ReplicaCheck | None = None
    straggler_detection: lr.StragglerDetection | None = None
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            path("run_dir", self.run_dir)
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if (part is not None or name == "job") and kind not in (cls.__name__ for cls in type(part).__mro__):
                raise TypeError(f"{name} must be {'a' if kind[0] not in 'AEIOU' else 'an'} {kind}(...), not {part!r}.")
        for part in fields(self):
            callback = getattr(self, part.name)
            own = getattr(callback, "run_dir", None)
            if own is None or part.name == "run_dir":
                continue
            if self.run_dir is None or os.path.abspath(own) != os.path.abspath(self.run_dir):
                raise ValueError(
                    f"{type(callback).__name__} has run_dir={os.fspath(own)!r}, and the recipe "
                    f"{None if self.run_dir is None else os.fspath(self.run_dir)!r}: "
                    "a run has one run directory; give it to the recipe only."
                )
        if self.auto_resume is None:
            raise ValueError("A recipe needs auto_resume: without it every restart trains from the beginning.")
        watched = self.fault_tolerance and self.fault_tolerance.section_timeouts
        if watched and watched != self.job.section_timeouts:
            raise ValueError(
                "fault_tolerance.section_timeouts and job.section_timeouts differ: the ranks and their launcher would "
                "use different limits. Omit the callback's, or give both the same."
            )

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks for the Trainer: ``Trainer(callbacks=recipe.callbacks)``, or ``[*recipe.callbacks, ...]``.

        Each access returns new copies, with the recipe's run directory.
        """
        parts = (
            self.fault_tolerance,
            self.preemption,
            self.local_checkpoint,
            self.nan_guard,
            self.replica_check,
            self.straggler_detection,
            self.auto_resume,
        )
        made = [copy(part) for part in parts if part is not None]
        for callback in made:
            callback.run_dir = self.run_dir
        return list(made)

    def __iter__(self) -> NoReturn:
        raise TypeError(_NOT_A_CALLBACK)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "setup" or name.startswith("on_"):
            raise TypeError(_NOT_A_CALLBACK)
        raise AttributeError(f"a Recipe has no {name}")

    def wandb_logger(self, **settings: Any) -> WandbLogger:
        """A logger with a single W&B run over all restarts and requeues of this run, also offline.

        Under ``lightning-resilience launch`` every ``WandbLogger`` does the same.

        Args:
            **settings: Arguments of ``WandbLogger``: ``project``, ``name``, ``offline``, ``config``...

        Raises:
            ValueError: If the recipe has no ``run_dir``, where the run's identity is kept.
        """
        if self.run_dir is None:
            raise ValueError("wandb_logger() needs the recipe's run_dir: the identity of the W&B run is kept there.")
        from lightning_resilience._lightning import lightning_loggers

        directory = RunDirectory(self.run_dir)
        kept = {"id": directory.identity(), "resume": "allow", "save_dir": os.fspath(directory.path)}
        logger: WandbLogger = lightning_loggers.wandb_logger(**kept | settings)
        return logger

    def __str__(self) -> str:
        where = "the launcher's, otherwise the Trainer's" if self.run_dir is None else os.fspath(self.run_dir)
        lines = [f"recipe {self.name}", f"  {'run directory':{_NAME_WIDTH}}{where}"]
        for callback in self.callbacks:
            does = (inspect.getdoc(callback) or "").partition("\n")[0].replace("``", "")
            lines.append(f"  {type(callback).__name__:{_NAME_WIDTH}}{does}")
            lines += [f"  {'':{_NAME_WIDTH}}  {option}" for option in _changed(callback)]
        first, *others = self.job.options
        lines.append(f"  {'launch':{_NAME_WIDTH}}{first}")
        return "\n".join([*lines, *(f"  {'':{_NAME_WIDTH}}{option}" for option in others)])


def _changed(callback: Any) -> list[str]:
    """The options of a callback that are not its defaults, as ``name=value``."""
    return [f"{name}={_shown(value)}" for name, value in changed(callback).items() if name != "run_dir"]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if is_dataclass(value):
        given = ((part, getattr(value, part.name)) for part in fields(value))
        return ", ".join(f"{part.name} {own}" for part, own in given if own != part.default)
    return str(getattr(value, "name", value))


def nemo(run_dir: str | os.PathLike[str] | None = None) -> Recipe:
    """NeMo's defaults, for a cluster: resume automatically, save every 15 minutes, find hangs and stragglers.

    Timeouts are calculated from measured section times. Stragglers are reported every 5 minutes, and the run ends when
    a rank's score is below 0.7 in two consecutive reports (NeMo: in one report). It adds ``LocalCheckpoint``,
    ``NaNGuard`` and ``ReplicaCheck`` to NeMo's defaults.

    Args:
        run_dir: The run directory on storage that all nodes share; see :class:`Recipe`.

    Example::

        trainer = Trainer(callbacks=recipes.nemo("runs/gpt").callbacks)
    """
    return Recipe(
        name="nemo",
        run_dir=run_dir,
        fault_tolerance=lr.FaultTolerance(),
        preemption=lr.Preemption(),
        local_checkpoint=lr.LocalCheckpoint(),
        nan_guard=lr.NaNGuard(),
        replica_check=lr.ReplicaCheck(),
        straggler_detection=lr.StragglerDetection(min_consecutive_reports=2),
        auto_resume=lr.AutoResume(),
        job=JOBS["nemo"],
    )


def preemptible(run_dir: str | os.PathLike[str] | None = None) -> Recipe:
    """For machines taken away at short notice (spot instances): short grace period, frequent local and global saves.

    Like :func:`nemo`, with a global save every 5 minutes, since local checkpoints are lost with the machine, and a
    grace period of 25 seconds.

    Args:
        run_dir: The run directory on storage that all nodes share; see :class:`Recipe`.
    """
    job = JOBS["preemptible"]
    return replace(
        nemo(run_dir),
        name="preemptible",
        preemption=lr.Preemption(grace_period_s=job.grace_period_s),
        auto_resume=lr.AutoResume(train_time_interval=timedelta(minutes=5)),
        job=job,
    )


def workstation(run_dir: str | os.PathLike[str] | None = None) -> Recipe:
    """For one machine, without a launcher: Ctrl-C or a closed terminal loses nothing; the same command continues.

    A crash loses the steps since the last save, at most 15 minutes ago. There are no local checkpoints and no straggler
    reports. A hang is diagnosed and the run is ended. To have it restarted too, start the script with
    ``lightning-resilience launch --recipe workstation``.

    Args:
        run_dir: The run directory; see :class:`Recipe`.
    """
    job = JOBS["workstation"]
    return Recipe(
        name="workstation",
        run_dir=run_dir,
        fault_tolerance=lr.FaultTolerance(),
        preemption=lr.Preemption(
            signals=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP), grace_period_s=job.grace_period_s
        ),
        nan_guard=lr.NaNGuard(),
        replica_check=lr.ReplicaCheck(),
        auto_resume=lr.AutoResume(),
        job=job,
    )


def elastic(
    run_dir: str | os.PathLike[str] | None = None,
    when_lost: Literal["hold", "go_on"] = "hold",
    min_ranks: int = 1,
    global_batch: Literal["constant", "shrink"] = "constant",
) -> Recipe:
    """For plain DDP on one machine: a lost rank is replaced while the other ranks keep their processes.

    It has the callbacks of :func:`nemo`. The launcher replaces the rank: use ``launch --recipe elastic``, or ``launch
    --elastic`` for a script that has these callbacks in code. If a rank cannot be replaced, the launcher restarts all
    ranks, as with ``nemo``.

    Args:
        run_dir: The run directory; see :class:`Recipe`.
        when_lost: See :class:`Job`; pass the options in :attr:`Job.options` to ``launch``.
        min_ranks: The same.
        global_batch: The same.
    """
    job = replace(JOBS["elastic"], when_lost=when_lost, min_ranks=min_ranks, global_batch=global_batch)
    return replace(nemo(run_dir), name="elastic", job=job)


def drill(
    run_dir: str | os.PathLike[str] | None = None,
    fault: SimulatedFault | None = None,
    recipe: Callable[..., Recipe] = nemo,
) -> Recipe:
    """A recipe with a deliberate fault, once per run: a rehearsal on the machines of the real run.

    Args:
        run_dir: The run directory on storage that all nodes share; see :class:`Recipe`. Use another one than the real
            run's.
        fault: The fault, its rank and time. Default: a random rank is killed or hangs, one to two minutes after
            training has begun.
        recipe: The recipe to rehearse.
    """
    from lightning_resilience.faults import SimulatedFault

    if not callable(recipe):
        raise TypeError(f"recipe must be a function that returns a Recipe, such as recipes.nemo, not {recipe!r}.")
    fault = fault or SimulatedFault(fault_type="random", base_delay_s=60.0, rand_delay_s=60.0)
    rehearsed = recipe(run_dir)
    limits = rehearsed.fault_tolerance.section_timeouts if rehearsed.fault_tolerance is not None else None
    return replace(
        rehearsed,
        name="drill",
        fault_tolerance=lr.FaultTolerance(simulated_fault_params=fault, section_timeouts=limits),
    )


def straggler_det_callback(
    straggler_report_time_interval: float = 300.0,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> lr.StragglerDetection:
    """Creates a :class:`~lightning_resilience.StragglerDetection` with the argument names of NeMo's function.

    Args:
        straggler_report_time_interval: Its ``report_time_interval``, in seconds.
        stop_if_detected_straggler: Its ``stop_if_detected``.
        gpu_relative_perf_threshold: The same.
        gpu_individual_perf_threshold: The same.
    """
    return lr.StragglerDetection(
        report_time_interval=straggler_report_time_interval,
        stop_if_detected=stop_if_detected_straggler,
        gpu_relative_perf_threshold=gpu_relative_perf_threshold,
        gpu_individual_perf_threshold=gpu_individual_perf_threshold,
    )


RECIPES: dict[str, Callable[..., Recipe]] = {
    "nemo": nemo,
    "preemptible": preemptible,
    "workstation": workstation,
    "elastic": elastic,
    "drill": drill,
}
"""The recipes by the names that ``launch --recipe`` accepts."""


def _recipe(name: str) -> Recipe:
    """The recipe of this name, or the recipe that the function ``module:function`` returns."""
    if name in RECIPES:
        return RECIPES[name]()
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{RECIPE_VARIABLE}={name!r} is not a recipe; choose one of: {', '.join(RECIPES)}.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--recipe {name} cannot be loaded: {error}. It must be MODULE:FUNCTION.") from error
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise ValueError(f"--recipe {name} must return a Recipe, as recipes.nemo() does, not {recipe!r}.")
    return recipe


def callbacks_factory() -> list[Callback]:
    """The ``callbacks_factory`` entry point of both Lightning packages, which every ``Trainer()`` calls.

    Returns:
        The callbacks of the recipe that ``launch`` has named in the environment; an empty list without a name.

    Raises:
        ValueError: If no recipe has this name.
    """
    name = os.environ.get(RECIPE_VARIABLE)
    if os.environ.get(WORKER_PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        name = None  # a child process of the launched script
    if not name or is_turned_off():
        return []
    from lightning_resilience._torch import connect_when_rank_0_listens

    connect_when_rank_0_listens()
    if membership.current() is not None:
        from lightning_resilience.fit import joining

        joining.install_reentry()
    if name == NO_RECIPE:
        return []
    callbacks: list[Any] = _recipe(name).callbacks
    for callback in callbacks:
        callback._injected = True
    return callbacks
