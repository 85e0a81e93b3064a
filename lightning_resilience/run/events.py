"""The events of a run: the schema of its ledger. No torch, no Lightning.

Each class is one kind of event. Its fields have the same names on disk:
``{"event": "saved", "time": ..., "rank": ..., "node": ..., "step": ...}``. A field without a default is always
written, ``null`` if its value is unknown. A field with the default ``None`` is written only if it has a value, or if
:meth:`Event.nullable` names it.

**Compatibility.** Any field may be ``None`` when read, since an older version may not have written it. Fields that this
version does not know are in :attr:`Event.extra`. An event is read as :class:`Unknown` (kept, but not interpreted) if
its kind is unknown, if a known field has a value of another type, or if it has a later :data:`SCHEMA_VERSION`. New
kinds and fields keep the version; a new meaning of an existing field needs a new version.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """For type checkers only; Python 3.10 has none."""
        return lambda cls: cls


SCHEMA_VERSION = 1
"""Version of the schema. A line of a later version names it in its field ``schema``; a line without it is version 1."""

LAST_TIME = datetime(9999, 1, 1).timestamp()
"""The latest valid time of an event; later times are not read."""

EVENTS: dict[str, type[Event]] = {}
"""The kinds of events by their names on disk."""

SIGNED = "may be negative"

Fit = Annotated[int, "number of the script's fit, from 0"]
Step = Annotated[int, "`trainer.global_step`: optimizer steps"]
Reason = Annotated[str, "why"]
Tier = Annotated[str, "`global` (shared storage), `local` or `replica` (node memory)"]
Generation = Annotated[str, "name of a local checkpoint"]
CheckpointName = Annotated[str, "path of the checkpoint, or name of a local one"]
Ranks = Annotated[list[int], "global ranks"]
Devices = Annotated[list[str], "devices, with their nodes"]
Nodes = Annotated[list[str], "names of nodes"]
ExceptionName = Annotated[str, "class of the exception"]
SignalNumber = Annotated[int, "number of the signal"]
SignalName = Annotated[str, "`SIGKILL`, ..."]
ElasticRunId = Annotated[str, "id of the rendezvous; a new one for each job"]
RestartCount = Annotated[int, "restarts inside the job before this start of the workers"]
JobAttempt = Annotated[int, "number of the job retry, from 0"]
SlurmJobId = Annotated[str, "id of the Slurm job"]
Requeues = Annotated[int, "how often Slurm had requeued the job"]
Status = Annotated[str, "`finished`, `interrupted`, `failed` or `halted`"]
ExitCode = Annotated[int, "exit code"]
ProcessId = Annotated[int, "process id"]


@dataclass_transform(kw_only_default=True, eq_default=False)
class _Fields:
    """For type checkers: the annotated names of a subclass are its keyword arguments."""


class Event(_Fields):
    """The base class of all events, with their common fields, which the ledger fills in.

    Attributes:
        time: When it was recorded, in seconds since the epoch, by the writer's clock.
        rank: Global rank of the writer; ``None`` for a launcher.
        node: Name of the writer's node.
        extra: Fields that this version does not know.
    """

    time: float = 0.0
    rank: int | None = None
    node: str | None = None
    extra: Mapping[str, Any] = types.MappingProxyType({})

    kind_name: ClassVar[str] = ""
    own_fields: ClassVar[dict[str, bool]] = {}
    """The fields that this kind of event adds to the common fields, and whether each is always written."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.kind_name = name
        cls.own_fields = cls.own_fields | {each: not hasattr(cls, each) for each in cls.__annotations__}
        if name:
            EVENTS[name] = cls

    # Not dataclasses: these would generate code for each of the 40 classes, which every process of a launch imports
    # before torch.
    def __init__(self, **values: Any) -> None:
        known = _COMMON | self.own_fields
        missing = [name for name, is_required in known.items() if is_required and name not in values]
        if missing or not values.keys() <= known.keys():
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(known)}, not {', '.join(values)}")
        vars(self).update({name: values[name] if name in values else getattr(type(self), name) for name in known})
        self.extra = values.get("extra", {})  # a dict of its own: the class's default cannot be pickled

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({', '.join(values)})"

    @property
    def name(self) -> str:
        """Name of the kind of event, ``event`` on disk."""
        return self.kind_name

    def nullable(self) -> tuple[str, ...]:
        """The fields with a default that this event writes as ``null`` if they are unknown."""
        return ()

    def fields(self) -> dict[str, Any]:
        """The fields that this event adds to the common fields, as they are written."""
        nullable = self.nullable()
        values = {name: getattr(self, name) for name in self.own_fields}
        written = {
            name: value
            for name, value in values.items()
            if value is not None or self.own_fields[name] or name in nullable
        }
        return written | dict(self.extra)

    def to_json(self) -> dict[str, Any]:
        """The event in its form on disk."""
        return {"event": self.name, "time": self.time, "rank": self.rank, "node": self.node, **self.fields()}


class Unknown(Event):
    """An event that this version does not interpret; all its fields but the common ones are in ``extra``."""

    event: str

    @property
    def name(self) -> str:
        """Name of the kind of event, ``event`` on disk."""
        return self.event

    def fields(self) -> dict[str, Any]:
        """All fields but the common ones."""
        return dict(self.extra)


class _AtStep(Event):
    fit: Fit | None
    step: Step | None


# -- the launcher ------------------------------------------------------------------------------------------------------


class LaunchStart(Event, name="launch"):
    """``lightning-resilience launch`` has begun."""

    launch_id: Annotated[str, "id of the launch"] | None
    command: Annotated[list[str], "the script with its arguments"] | None
    files: Annotated[dict[str, str], "digests of the script and of the settings files among its arguments"] | None
    changed: Annotated[list[str], "what differs from the last launch"] | None
    recipe: Annotated[str, "name of the recipe"] | None
    nnodes: Annotated[str, "nodes: a number or `MIN:MAX`"] | None
    nproc_per_node: Annotated[str, "workers on each node: a number or `auto`"] | None
    slurm_job_id: SlurmJobId | None
    slurm_restart_count: Requeues | None
    budget: Annotated[dict[str, Any], "limits of restarts and retries, as the options of `launch`"] | None
    began: Annotated[float, "start of its process, seconds since the epoch"] | None = None


class LauncherKilled(Event, name="launcher_killed"):
    """The launch before this one has not recorded its end."""


class RunRefused(Event, name="refused"):
    """A launch, or a fit without launcher, may not use the run directory."""

    kind: ExceptionName | None = None
    fit: Fit | None = None
    step: Step | None = None
    reason: Reason | None


class JobStart(Event, name="job_start"):
    """The launch starts the elastic launcher on all nodes."""

    retry: Annotated[bool, "whether it is a job retry"] | None
    job_attempt: JobAttempt | None
    run_id: ElasticRunId | None
    max_restarts: Annotated[int, "restarts that the elastic launcher may make"] | None
    reason: Reason | None


class JobFailed(Event, name="failure"):
    """The job has failed: its elastic launcher does not restart the workers any more."""

    run_id: ElasticRunId | None
    exit_code: Annotated[int, "exit code of the elastic launcher; negative: ended by that signal", SIGNED] | None
    reason: Reason | None


class GiveUp(Event, name="give_up"):
    """The budget is spent."""

    reason: Reason | None


class NodesExcluded(Event, name="left_out"):
    """Nodes are excluded from the next start of the workers."""

    excluded: Nodes | None
    reason: Reason | None


class LaunchExit(Event, name="exit"):
    """The launch has ended."""

    status: Status | None
    exit_code: ExitCode | None
    reason: Reason | None
    new_job: Annotated[bool, "whether the run must be started again in a new job"] | None = None


class AllocationStart(Event, name="slice_start"):
    """A Slurm job has started, or was started again after a requeue."""

    slurm_job_id: SlurmJobId | None
    restart_count: Requeues | None
    node_list: Nodes | None


class AllocationEnd(Event, name="slice_end"):
    """A Slurm job ends, or is requeued."""

    how: Annotated[str, "how it has ended, in a few words"] | None
    then: Annotated[str, "`requeue` or `end`"] | None
    exit_code: ExitCode | None = None
    reason: Reason | None
    excluded: Annotated[list[str], "nodes that the requeued job must not get"] | None = None


class ExclusionFailed(Event, name="exclusion_failed"):
    """Slurm has not excluded the nodes that it was asked to exclude."""

    node_list: Nodes | None
    reason: Reason | None


# -- the workers -------------------------------------------------------------------------------------------------------


class _Job(Event):
    host: Annotated[str, "name of the host"] | None
    pid: ProcessId | None
    world_size: Annotated[int, "ranks"] | None
    local_world_size: Annotated[int, "ranks on this node"] | None
    nodes: Annotated[int, "nodes"] | None
    visible_devices: Annotated[str, "`CUDA_VISIBLE_DEVICES`"] | None
    elastic_run_id: ElasticRunId | None
    restart_count: RestartCount | None
    slurm: Annotated[dict[str, Any], "the Slurm job, as `get_slurm_info` returns it"] | None
    versions: Annotated[dict[str, str], "versions of Python and the packages"] | None


class JobInfo(_Job, name="job_info"):
    """``log_job_info`` was called."""


class WorkersStart(_Job, name="start"):
    """A group of workers has started; recorded by rank 0."""

    attempt: Annotated[str, "token of the attempt that owns the run from here on"] | None
    job_attempt: JobAttempt | None
    verified_step: Annotated[int, "step of the newest checkpoint in the run directory at this start"] | None


class RanksReplaced(Event, name="replaced"):
    """`launch --elastic` replaces lost ranks while the other ranks keep their processes.

    With `--when-lost go-on` the other ranks keep training without them until then. If no ranks are lost, replacements
    are admitted, or ranks leave because their node was told to stop.
    """

    ranks: Ranks | None
    kept: Annotated[int, "how many ranks keep their processes"] | None
    members: Annotated[list[int], "ranks that continue, by their original numbers"] | None = None
    elastic_run_id: ElasticRunId | None
    restart_count: RestartCount | None
    reason: Reason | None


class Fault(Event, name="fault"):
    """A rank has failed, died or hung. A fit, the worker process and the watchdog may each record the same failure."""

    kind: Annotated[str, "class of the exception, `hang` or `died`"] | None = None
    place: Annotated[str, "the innermost line of the user's code: `train.py:80`"] | None = None
    mistake: Annotated[str, "`code` or `file`: a mistake in the script, not a failure of a machine"] | None = None
    fit: Fit | None = None
    step: Step | None = None
    reason: Reason | None
    elastic_run_id: ElasticRunId | None = None
    restart_count: RestartCount | None = None
    signal: SignalName | None = None
    exit_code: Annotated[int, "exit code of the rank", SIGNED] | None = None
    out_of_memory: Annotated[bool, "whether the kernel was out of memory"] | None = None
    section: Annotated[str, "section of the training loop"] | None = None
    limit: Annotated[float, "timeout of the section, s"] | None = None
    busy: Annotated[bool, "whether the rank was computing"] | None = None
    noticed: Annotated[float, "when the timeout was exceeded, seconds since the epoch"] | None = None
    diagnostics: Annotated[str, "folder of the diagnosis"] | None = None

    @property
    def has_ended_workers(self) -> bool:
        """Whether it was recorded at the end of the process, not by a fit, whose exception the script may catch."""
        return self.restart_count is not None

    def nullable(self) -> tuple[str, ...]:
        """The fields that the watchdog or the worker process records for every fault of this kind."""
        return _OF_FAULT.get(self.kind or "", ("place",) if self.has_ended_workers else ())


_OF_FAULT: dict[str, tuple[str, ...]] = {
    "died": ("fit", "step", "elastic_run_id", "signal", "exit_code", "out_of_memory", "section"),
    "hang": ("fit", "step", "elastic_run_id", "section", "limit", "busy", "noticed", "diagnostics"),
}


class Killed(Event, name="killed"):
    """All workers were ended from outside; the watchdog records the step that they had reached."""

    fit: Fit | None
    elastic_run_id: ElasticRunId | None
    restart_count: RestartCount | None
    step: Step | None
    worker: ProcessId | None
    signal: SignalName | None
    reason: Reason | None


class TimeSpent(Event, name="time_spent"):
    """The time of ranks by category.

    Their watchdog records it when they have ended. Without a watchdog it is recorded at the end of a fit or, if they
    were killed, by the next start. The lists are by rank, in the order of ``ranks``.
    """

    fit: Fit | None
    elastic_run_id: ElasticRunId | None = None
    restart_count: RestartCount | None = None
    attempt: Annotated[str, "token of the attempt"] | None
    world_size: Annotated[int, "ranks of all nodes"] | None
    ranks: Ranks | None
    began: Annotated[list[float], "starts of the processes, seconds since the epoch"] | None
    since: Annotated[list[float], "when they began their last activity, seconds since the epoch"] | None
    ended: Annotated[list[float], "ends of the processes or fits, seconds since the epoch"] | None
    doing: Annotated[list[str], "their last activity"] | None
    seconds: Annotated[dict[str, Any], "seconds by category until `since`, each a list by rank"] | None
    reached: Annotated[int, "the furthest `trainer.global_step` of the last fit"] | None
    killed: Annotated[bool, "whether they were killed, and the next start has recorded it"] | None = None


class ScriptOutcome(Event, name="outcome"):
    """The script has ended; recorded by rank 0."""

    status: Status | None
    reason: Reason | None


# -- the fit -----------------------------------------------------------------------------------------------------------


class Fresh(Event, name="fresh"):
    """A fit begins without a checkpoint."""

    fit: Fit | None
    step: Step | None = None


class _Restored(_AtStep):
    path: CheckpointName | None
    tier: Tier | None
    generation: Generation | None = None
    saved_at: Annotated[float, "when that state was saved, seconds since the epoch"] | None = None

    def nullable(self) -> tuple[str, ...]:
        """The field that is recorded for every local checkpoint."""
        return () if self.generation is None else ("saved_at",)


class Resumed(_Restored, name="resumed"):
    """A fit resumes from a checkpoint."""


class RestoredInPlace(_Restored, name="went_back"):
    """A fit has rolled back to a checkpoint in the same processes."""


class Saved(_AtStep, name="saved"):
    """A checkpoint is complete. Of local checkpoints, one per minute is recorded; after hours, one per five minutes."""

    path: CheckpointName | None = None
    seconds: Annotated[float, "duration of the save, s"] | None
    reason: Annotated[str, "what requested it"] | None
    tier: Tier | None
    generation: Generation | None = None
    count: Annotated[int, "local saves since the last such event"] | None = None
    stall_s: Annotated[float, "how long the training waited for the save, s"] | None = None
    skipped: Annotated[int, "local saves skipped so far because the previous one was not finished"] | None = None
    failed: Annotated[int, "local saves failed so far"] | None = None
    every_s: Annotated[float, "the chosen time between two local saves, after the first ones, s"] | None = None


class SaveFailed(_AtStep, name="save_failed"):
    """A checkpoint could not be written; the training continues."""

    reason: Reason | None


class SaveRefused(_AtStep, name="save_refused"):
    """The state did not pass the check before a save."""

    reason: Reason | None


class Quarantined(Event, name="quarantined"):
    """A checkpoint did not pass verification and was moved to the quarantine folder."""

    fit: Fit | None
    path: CheckpointName | None
    reason: Reason | None
    tier: Tier | None = None


class NotRestored(Event, name="not_restored"):
    """A verified checkpoint could not be restored on this rank."""

    fit: Fit | None
    generation: Generation | None
    attempt: Annotated[str, "token of the attempt"] | None
    kind: ExceptionName | None
    reason: Reason | None
    step: Step | None
    path: CheckpointName | None


class MarkedBad(_AtStep, name="condemned"):
    """A checkpoint was marked bad: it passes verification, but the training cannot continue from it."""

    path: CheckpointName | None
    reason: Reason | None


class Finished(_AtStep, name="finished"):
    """A fit has finished."""

    saved: Annotated[bool, "`false`: the final state could not be saved"] | None = None


class SignalReceived(Event, name="signal"):
    """A rank was told to stop."""

    fit: Fit | None
    signum: SignalNumber | None


class FitInterrupted(Event, name="interrupted"):
    """A fit has stopped because of a signal."""

    fit: Fit | None
    step: Step | None = None
    reason: Reason | None


class FitHalted(Event, name="halted"):
    """A fit has ended by a verdict that a retry cannot change. Only earlier versions record it; now it is a fault."""

    fit: Fit | None = None
    step: Step | None = None
    reason: Reason | None


# -- detection ---------------------------------------------------------------------------------------------------------


class BadStep(Event, name="bad_step"):
    """Loss or gradients were not finite or had a spike. Recorded by rank 0 and by the ranks that have found it."""

    fit: Fit | None
    step: Annotated[int, "`trainer.global_step` before the step"] | None
    epoch: Annotated[int, "epoch, from 0"] | None
    batches: Annotated[list[int], "first batch of the step and the batch after its last one, in the epoch"] | None
    reason: Reason | None
    skipped: Annotated[bool, "whether the optimizer step was skipped"] | None
    samples: Annotated[list[int], "indices of the samples in the data set, where known"] | None
    loss: Annotated[str, "loss; text, since JSON knows no NaN"] | None
    grad_norm: Annotated[str, "norm of the gradients; text, since JSON knows no NaN"] | None


class Rollback(Event, name="rollback"):
    """A fit rolls back to the last good checkpoint, because of bad steps or diverged replicas."""

    fit: Fit | None
    step: Annotated[int, "step at which it was found"] | None
    reason: Reason | None
    times: Annotated[int, "rollbacks because of this so far"] | None
    losses: Annotated[list[Any], "loss of each rank, as text"] | None = None


class RerunVerdict(_AtStep, name="rerun"):
    """The verdict after a bad step was computed again."""

    verdict: Annotated[str, "`transient fault`, `faulty device` or `correct result`"] | None
    reason: Reason | None
    devices: Devices | None


class DivergenceFound(_AtStep, name="divergence"):
    """Ranks hold different values where they should hold the same."""

    ranks: Annotated[list[int], "ranks in the minority"] | None
    groups: Annotated[list[Any], "ranks that hold the same, as lists"] | None
    reason: Reason | None


class BatchesLeftOut(_AtStep, name="batches_left_out"):
    """A process group or a fit ends that has left out batches of absent ranks. Recorded by rank 0."""

    left_out: Annotated[int, "batches of all absent ranks since the beginning of the fit"] | None


class Stragglers(_AtStep, name="stragglers"):
    """A report has found slow ranks."""

    ranks: Ranks | None
    devices: Devices | None
    reason: Reason | None
    slowest: Annotated[int, "the rank that the other ranks wait for"] | None = None
    waited: Annotated[float, "how long each rank not named has waited for it since the report before, s"] | None = None


class StragglerStop(_AtStep, name="straggler_stop"):
    """The run was saved and stops because of slow ranks."""

    ranks: Ranks | None
    devices: Devices | None
    reason: Reason | None


class StragglersReplaced(_AtStep, name="stragglers_replaced"):
    """Slow ranks end after the next step, so that they are replaced while the other ranks keep their processes."""

    ranks: Annotated[list[int], "ranks, by their original numbers"] | None
    devices: Annotated[list[str], "the device of each"] | None
    reason: Reason | None


class Unhealthy(Event, name="unhealthy"):
    """A rank's node or device has failed its health check."""

    fit: Fit | None
    reason: Reason | None


class WorkloadRequest(Event, name="workload_request"):
    """A rank asks the launcher to act."""

    fit: Fit | None
    action: Annotated[str, "`exclude_this_node`, `shutdown_workload`, ..."] | None
    reason: Reason | None


class FaultInjected(Event, name="simulated_fault"):
    """A fault was injected."""

    fault: Annotated[dict[str, Any], "its settings"] | None
    fault_type: Annotated[str, "kind of the fault"] | None
    step: Step | None
    pid: ProcessId | None


# -- reading -----------------------------------------------------------------------------------------------------------


_COMMON = dict.fromkeys(("time", "rank", "node", "extra"), False)
_ON_DISK = frozenset(("event", "time", "rank", "node", "order"))
_TYPES: dict[Any, frozenset[type]] = {float: frozenset((int, float)), types.NoneType: frozenset()}


class _Rule(NamedTuple):
    """The allowed values of a field."""

    types: frozenset[type] | None  # of the value; ``None`` allows any
    items: frozenset[type] | None  # of the items of a list
    is_signed: bool

    def allows(self, value: Any) -> bool:
        if self.types is None:
            return True
        if type(value) not in self.types:
            return False
        if self.items is not None and not all(type(each) in self.items for each in value):
            return False
        return self.is_signed or not isinstance(value, (int, float)) or bool(value >= 0)


@functools.cache
def _rules(name: str) -> dict[str, _Rule]:
    kind = EVENTS[name]
    hints = get_type_hints(kind, include_extras=True)
    return {each: _rule(hints[each]) for each in kind.own_fields}


def _rule(hint: Any) -> _Rule:
    [hint] = [each for each in get_args(hint) if each is not types.NoneType]  # X | None
    notes: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
    if hint is Any:
        return _Rule(None, None, False)
    kind, items = get_origin(hint) or hint, None
    if kind is list and get_args(hint)[0] is not Any:
        items = _TYPES.get(get_args(hint)[0], frozenset((get_args(hint)[0],)))
    return _Rule(_TYPES.get(kind, frozenset((kind,))), items, SIGNED in notes)


def parse(line: Mapping[str, Any]) -> Event | None:
    """The event in a line of a ledger; ``None`` if the line is no event.

    Args:
        line: The parsed JSON.
    """
    name, time, rank, node = (line.get(key) for key in ("event", "time", "rank", "node"))
    if not isinstance(name, str) or not is_time(time if time is not None else 0.0):
        return None
    if not (rank is None or (type(rank) is int and rank >= 0)) or not isinstance(node, str | None):
        return None
    common: dict[str, Any] = {"time": float(time or 0.0), "rank": rank, "node": node}
    if name not in EVENTS or line.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        return _unknown(name, common, line)
    rules = _rules(name)
    extra: dict[str, Any] = {}
    values = {**common, "extra": extra, **dict.fromkeys(rules)}
    for key, value in line.items():
        if (rule := rules.get(key)) is None:
            if key not in _ON_DISK:
                extra[key] = value
        elif value is None or rule.allows(value):
            values[key] = value
        else:
            return _unknown(name, common, line)
    event = object.__new__(EVENTS[name])  # without the checks of __init__, which hold: a ledger may have 100,000 events
    event.__dict__ = values
    return event


def _unknown(name: str, common: Mapping[str, Any], line: Mapping[str, Any]) -> Unknown:
    return Unknown(event=name, extra={key: value for key, value in line.items() if key not in _ON_DISK}, **common)


def is_time(value: Any) -> bool:
    """Whether ``value`` can be the time of an event, in seconds since the epoch."""
    return type(value) in (int, float) and bool(0 <= value <= LAST_TIME)
