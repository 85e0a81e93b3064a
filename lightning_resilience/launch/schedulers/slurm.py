"""Everything that the launcher knows about Slurm: the facts of a job, the commands, and the batch script.

Slurm keeps id, options and priority of a requeued job. It changes the list of excluded nodes only of a pending job. A
job is pending as soon as Slurm has agreed to requeue it; its processes live for some time after that.

Imports neither torch nor Lightning.
"""
# ruff: noqa: D102  (what a scheduler is asked is documented in base.py)

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_resilience import __version__
from lightning_resilience.launch.schedulers.base import (
    AFTER_GRACE_S,
    PORTS,
    PREEMPT_TIME_S,
    REQUEUE_EVERY_S,
    REQUEUE_WITHIN_S,
    SHORTEST_GRACE_S,
    JobStatus,
    Scheduler,
)
from lightning_resilience.run import exit_codes

# No node is ended because another one has: the launches inform each other. Each may use all cores of the job.
SRUN_OPTIONS = ("--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none")

HEAD_NODE_VARIABLE = "LIGHTNING_RESILIENCE_HEAD_NODE"
"""Environment variable in which :func:`requeue_trap` gives :func:`launch_step` the address of the first node."""

_COMMAND_TIMEOUT_S = 60.0
_SUBMIT_TIMEOUT_S = 120.0
_BEGIN_TRIES = 3
_SIGNAL_EARLY_S = 60  # Slurm checks time limits only now and then, and sends the signal up to this much too early
_OPTION_NAME = re.compile(r"--(?P<long>[A-Za-z-]+)|-(?P<short>[A-Za-z])")
_OWN_OPTIONS = (
    *("nodes", "N", "ntasks", "n", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "output", "o"),
    *("chdir", "D", "array", "a", "wrap", "time", "t"),
)


@dataclass(frozen=True)
class SlurmInfo:
    """The Slurm job of this process. A fact that is unknown or unreadable is ``None``.

    Args:
        job_id: The job's id; a requeued job keeps it.
        job_name: The job's name.
        node_list: The nodes in Slurm's own notation, such as ``node[01-04]``.
        num_nodes: How many nodes the job has.
        ntasks_per_node: Tasks on this node.
        node_rank: The number of this node in the job.
        restart_count: How often the job has been requeued.
        partition: The job's partition.
        array_job_id: The id of the job array to which the job belongs.
        array_task_id: The job's index in that array.
    """

    job_id: str
    job_name: str | None
    node_list: str | None
    num_nodes: int | None
    ntasks_per_node: int | None
    node_rank: int | None
    restart_count: int
    partition: str | None
    array_job_id: str | None
    array_task_id: int | None


def get_slurm_info(environment: Mapping[str, str] | None = None) -> SlurmInfo | None:
    """Reads the ``SLURM_*`` variables.

    Args:
        environment: Where to read; default: this process's environment.

    Returns:
        The job's facts, or ``None`` outside a Slurm job.
    """
    variables = os.environ if environment is None else environment

    def text(*names: str) -> str | None:
        return next((value for name in names if (value := variables.get(f"SLURM_{name}", "").strip())), None)

    def number(*names: str) -> int | None:
        return next((int(value) for name in names if (value := text(name)) and re.fullmatch(r"[0-9]+", value)), None)

    job_id = text("JOB_ID", "JOBID")
    if job_id is None:
        return None
    node_rank = number("NODEID")
    return SlurmInfo(
        job_id=job_id,
        job_name=text("JOB_NAME"),
        node_list=text("JOB_NODELIST", "NODELIST"),
        num_nodes=number("JOB_NUM_NODES", "NNODES"),
        ntasks_per_node=_on_node(text("NTASKS_PER_NODE", "STEP_TASKS_PER_NODE", "TASKS_PER_NODE"), node_rank or 0),
        node_rank=node_rank,
        restart_count=number("RESTART_COUNT") or 0,
        partition=text("JOB_PARTITION"),
        array_job_id=text("ARRAY_JOB_ID"),
        array_task_id=number("ARRAY_TASK_ID"),
    )


def _on_node(counts: str | None, node_rank: int) -> int | None:
    """The entry of ``counts`` for one node. Slurm writes ``2(x3),1`` for 2, 2, 2 and 1."""
    first = 0
    for part in (counts or "").split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            return None
        first += int(match[2] or 1)
        if node_rank < first:
            return int(match[1])
    return None


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm, for a minute at most.

    Args:
        command: Name and arguments of the command.

    Returns:
        The result. A command that is missing or does not answer counts as failed, with the reason as its error output.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # names may be in any encoding
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
            env=os.environ | {"SLURM_TIME_FORMAT": "standard"},  # which a user may have set to another
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def show_job(job_id: str) -> dict[str, str]:
    """The fields of ``scontrol show job``; empty if they are unknown.

    Args:
        job_id: Its id.
    """
    shown = run_slurm("scontrol", "--oneliner", "show", "job", job_id)
    # Comments are text of any user, and come after all fields that are read here.
    fields = re.split(r"\s[A-Za-z]*Comment=", shown.stdout)[0] if shown.returncode == 0 else ""
    return dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", fields))


def node_names(node_list: str) -> list[str]:
    """Expands a node list into names, in Slurm's order; empty if that fails.

    Args:
        node_list: Such as ``node[01-04]``.
    """
    shown = run_slurm("scontrol", "show", "hostnames", node_list)
    return shown.stdout.split() if shown.returncode == 0 else []


def lost_nodes(node_list: str) -> list[str]:
    """The nodes of a list that are down or failed.

    Args:
        node_list: In Slurm's own notation.
    """
    shown = run_slurm("sinfo", "--noheader", "--Node", f"--nodes={node_list}", "--states=down,fail", "--format=%N")
    return sorted(set(shown.stdout.split())) if shown.returncode == 0 else []


def usable_nodes(partition: str) -> list[str] | None:
    """The nodes of a partition that a job can get, now or once they are free; ``None`` if that is unknown.

    Args:
        partition: Its name.
    """
    states = "idle,alloc,mix,comp"
    shown = run_slurm("sinfo", "--noheader", "--Node", f"--partition={partition}", f"--states={states}", "--format=%N")
    return sorted(set(shown.stdout.split())) if shown.returncode == 0 else None


class Slurm(Scheduler):
    """Slurm, asked by its commands.

    Args:
        environment: Where the job's variables are read; default: this process's environment.
    """

    name = "slurm"
    title = "Slurm"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.info = get_slurm_info(environment)
        if self.info is not None:
            self.job_id = self.info.job_id
            self.restart_count = self.info.restart_count
            self.num_nodes = self.info.num_nodes or 1
            self.node_rank = self.info.node_rank

    def job_info(self) -> dict[str, Any] | None:
        return asdict(self.info) if self.info else None

    def node_names(self) -> list[str]:
        return node_names(self._node_list)

    def run_on_every_node(self) -> tuple[list[str], dict[str, str]]:
        command = ["srun", *SRUN_OPTIONS, "--export=ALL", "--label"]
        command += [f"--nodes={self.num_nodes}", f"--ntasks={self.num_nodes}", "--ntasks-per-node=1"]
        cores = os.environ.get("SLURM_CPUS_PER_TASK")  # since Slurm 22.05 srun does not read this variable any more
        return command, os.environ | ({"SRUN_CPUS_PER_TASK": cores} if cores else {})

    def status(self) -> JobStatus:
        job = self._show_job()
        restarts = job.get("Restarts", "")
        is_requeued = restarts.isdecimal() and int(restarts) > self.restart_count
        is_preempted = _time_of(job.get("PreemptTime")) is not None
        # While the processes of a job still exist, Slurm reports of every job that it ends only that it is completing.
        if job.get("JobState") != "COMPLETING" or is_requeued or is_preempted:
            is_cancelled = job.get("JobState", "").startswith("CANCELLED")
        else:
            is_cancelled = not _has_reached_its_limit(job)
        return JobStatus(is_cancelled, is_requeued, is_preempted, _time_of(job.get("EndTime")))

    def lost_nodes(self) -> list[str]:
        return lost_nodes(self._node_list)

    def usable_nodes(self) -> list[str] | None:
        job = self._show_job()
        if any(job.get(field, "(null)") != "(null)" for field in ("ReqNodeList", "Features")):
            return None
        return usable_nodes((self.info.partition if self.info else None) or "")

    def excluded_nodes(self) -> list[str] | None:
        listed = self._show_job().get("ExcNodeList")
        if listed == "(null)":
            return []
        return (node_names(listed) or None) if listed else None

    def exclude(self, nodes: Sequence[str]) -> str | None:
        return _refusal(run_slurm("scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={','.join(nodes)}"))

    def requeue(self) -> str | None:
        job = str(self.job_id)
        if self.info is not None and self.info.array_job_id is not None and self.info.array_task_id is not None:
            job = f"{self.info.array_job_id}_{self.info.array_task_id}"
        return _refusal(run_slurm("scontrol", "requeue", job))

    def show_comment(self, text: str) -> None:
        run_slurm("scontrol", "update", f"JobId={self.job_id}", f"Comment={text}")

    def is_at_work(self, job_id: str) -> bool:
        return show_job(job_id).get("JobState") in ("RUNNING", "COMPLETING", "SUSPENDED")

    def queue_state(self, job_id: str) -> str | None:
        if shutil.which("squeue") is None:
            return None
        shown = run_slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r|%N|%k")
        if shown.returncode != 0 or "|" not in shown.stdout:
            return None
        state, reason, nodes, comment = shown.stdout.splitlines()[0].split("|", 3)
        where = f" on {nodes}" if nodes else f" ({reason})"
        said = f": {comment}" if comment not in ("", "(null)") else ""
        return f"job {job_id} is {state}{where}{said}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--time", metavar="LIMIT", help="time limit of one job, as sbatch's (default: the partition's)"
        )
        parser.add_argument("--partition", metavar="NAME", help="as sbatch's")
        parser.add_argument("--account", metavar="NAME", help="as sbatch's")
        parser.add_argument(
            "--sbatch",
            action="append",
            default=[],
            metavar="OPTION",
            help="further option of sbatch: --sbatch=--qos=high",
        )

    def batch_script(
        self,
        options: argparse.Namespace,
        launch: Sequence[str],
        run_dir: Path,
        job_name: str,
        grace_period_s: float | None,
    ) -> str:
        script = BatchScript(
            launch=launch,
            run_dir=run_dir,
            directory=Path.cwd(),
            nodes=options.nodes,
            job_name=job_name,
            time=options.time,
            gpus_per_node=options.gpus_per_node,
            partition=options.partition,
            account=options.account,
            sbatch=options.sbatch,
            env_setup=options.env_setup,
            preempt_time_s=options.preempt_time,
            grace_period_s=grace_period_s,
            max_requeues=options.max_requeues,
            python=options.python,
        )
        return script.render()

    def submit(self, script: Path) -> str:
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(script)],
                capture_output=True,
                text=True,
                errors="replace",  # names may be in any encoding
                timeout=_SUBMIT_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError:
            raise OSError("sbatch was not found; submit the script on a node of the cluster") from None
        except subprocess.TimeoutExpired:
            raise OSError(
                "sbatch has not answered within 2 minutes; squeue shows whether it received the job"
            ) from None
        if done.returncode != 0:
            raise OSError(f"sbatch has refused {script}: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]

    @property
    def _node_list(self) -> str:
        return (self.info.node_list if self.info else None) or ""

    def _show_job(self) -> dict[str, str]:
        return show_job(str(self.job_id))


def _refusal(asked: subprocess.CompletedProcess[str]) -> str | None:
    return None if asked.returncode == 0 else asked.stderr.strip()


def _has_reached_its_limit(job: dict[str, str]) -> bool:
    began, ended = _time_of(job.get("StartTime")), _time_of(job.get("EndTime"))
    try:
        limit = seconds_of(job.get("TimeLimit", ""))
    except ValueError:
        return False
    return began is not None and ended is not None and limit is not None and ended - began >= limit


def _time_of(text: str | None) -> float | None:
    """A time as scontrol writes it, in seconds since the epoch; ``None`` for Unknown, None and the like."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class BatchScript:
    """The batch script of ``lightning-resilience slurm``. It is short, because ``batch_job`` makes all decisions.

    Args:
        launch: The arguments of ``launch``, without ``--run-dir``, nodes and the grace period.
        run_dir: The run directory.
        directory: The working directory of the job.
        nodes: How many nodes.
        job_name: The job's name.
        time: The time limit in Slurm's notation; ``None``: the partition's.
        gpus_per_node: GPUs of each node; ``None``: none are asked for.
        partition: The partition; ``None``: Slurm's default.
        account: The account; ``None``: the user's default.
        sbatch: Further options of sbatch, each ``--name=value``.
        env_setup: Lines for the shell before anything is started.
        preempt_time_s: Minimum number of seconds from SIGTERM to the time limit.
        grace_period_s: Seconds that the workers have to save after SIGTERM; ``None``: 10 s less than
            ``preempt_time_s``.
        max_requeues: How often the job may be requeued.
        python: The interpreter on the nodes.

    Raises:
        ValueError: If the arguments cannot work together; its message is the reason.
    """

    launch: Sequence[str]
    run_dir: Path
    directory: Path
    nodes: int = 1
    job_name: str = "lightning-resilience"
    time: str | None = None
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    sbatch: Sequence[str] = ()
    env_setup: Sequence[str] = ()
    preempt_time_s: int = PREEMPT_TIME_S
    grace_period_s: float | None = None
    max_requeues: int = 100
    python: str = field(default_factory=lambda: sys.executable)

    def __post_init__(self) -> None:
        if (problem := preempt_time_problem(self.preempt_time_s)) is not None:
            raise ValueError(f"--preempt-time {self.preempt_time_s}: {problem}")
        if self.grace_s > self.preempt_time_s - AFTER_GRACE_S:
            raise ValueError(
                f"--grace-period {self.grace_s:g} does not fit: the time limit may come {self.preempt_time_s} s after "
                f"SIGTERM, and ending takes {AFTER_GRACE_S} s; use --preempt-time "
                f"{self.grace_s + AFTER_GRACE_S:.0f}, or a shorter grace period"
            )
        limit = None if self.time is None else seconds_of(self.time)
        if limit is not None and limit <= self.preempt_time_s + _SIGNAL_EARLY_S:
            raise ValueError(
                f"--time {self.time} is {limit} s, and SIGTERM may come {self.preempt_time_s + _SIGNAL_EARLY_S} s "
                "before its end: there would be no time to train; use a longer --time, or a shorter --preempt-time"
            )
        for option in self.sbatch:
            name = _OPTION_NAME.match(option)
            if name is None:
                raise ValueError(f"--sbatch {option!r} is not an option: give it as --sbatch=--name=value")
            given = name["long"] or name["short"]
            if given in _OWN_OPTIONS or (
                len(given) > 1 and any(own.startswith(given) for own in _OWN_OPTIONS)
            ):  # sbatch takes both
                raise ValueError(f"--sbatch={option}: {name[0]} is set by this command or does not work with it")
        texts = (self.job_name, str(self.run_dir), str(self.directory), self.account, self.partition, *self.sbatch)
        for text in filter(None, texts):
            if "\n" in text or '"' in text or "\\" in text:
                raise ValueError(
                    f"{text!r} holds a quote, a backslash or a line break, which #SBATCH lines cannot hold"
                )

    @property
    def grace_s(self) -> float:
        """How long the workers have to save after SIGTERM."""
        return self.preempt_time_s - AFTER_GRACE_S if self.grace_period_s is None else self.grace_period_s

    def render(self) -> str:
        """The text of the script."""
        lines = [
            "#!/bin/bash",
            f"# Made by lightning-resilience {__version__}. For sbatch. Submitted again, it continues the run.",
            *(f"#SBATCH {option}" for option in self._options()),
            "",
        ]
        if self.env_setup:
            lines += [*self.env_setup, ""]
        lines += [
            "# Starts `lightning-resilience launch` on every node. When the launch has ended, it ends or requeues "
            "this job.",
            "# exec: SIGTERM must reach this program, which waits until all ranks have saved, not a shell, which "
            "would end.",
        ]
        begin = [shlex.quote(self.python), "-m", "lightning_resilience.launch.batch_job"]
        own = [f"--run-dir={self.run_dir}", f"--max-requeues={self.max_requeues}", f"--lead={self.preempt_time_s}"]
        rest = ["--", f"--grace-period={self.grace_s:g}", *self.launch]
        command = [" ".join(["exec", *begin]), shlex.join(own), shlex.join(rest)]
        return "\n".join([*lines, " \\\n    ".join(command), ""])

    def _options(self) -> list[str]:
        values = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        late = {
            "signal": signal_option(self.preempt_time_s),
            "open-mode": "append",
            "chdir": str(self.directory),
            "output": f"{str(self.run_dir).replace('%', '%%')}/slurm/%j.out",
        }
        given = [_option(name, value) for name, value in values.items() if value is not None]
        return [
            *given,
            "--requeue",
            *(_option(name, value) for name, value in late.items()),
            *map(_quoted, self.sbatch),
        ]


def preempt_time_problem(seconds: int) -> str | None:
    """What is wrong with the time between the signal and the time limit; ``None``: nothing.

    Args:
        seconds: Minimum number of seconds before the time limit at which Slurm sends the signal.
    """
    least = SHORTEST_GRACE_S + AFTER_GRACE_S
    if least <= seconds <= 65535:
        return None
    return f"it must be {least} to 65535 s, since the workers have {AFTER_GRACE_S} s less than that to save"


def signal_option(seconds: int, signum: signal.Signals = signal.SIGTERM) -> str:
    """The value of sbatch's ``--signal``.

    Args:
        seconds: Minimum number of seconds before the time limit at which Slurm sends the signal.
        signum: The signal.
    """
    # Without "B:" the signal goes to the processes of the steps, as the signal of a preemption does.
    return f"{signum.name.removeprefix('SIG')}@{seconds}"


def _quoted(option: str) -> str:
    """An option as the user has written it, with its value in quotes if it needs them."""
    name, equals, value = option.partition("=")
    return _option(name.removeprefix("--"), value) if equals and name.startswith("--") else option


def _option(name: str, value: object) -> str:
    text = str(value)
    return f"--{name}={text}" if re.fullmatch(r"[\w@%+=:,./-]+", text) else f'--{name}="{text}"'


def seconds_of(time: str) -> int | None:
    """A time limit in Slurm's notation, in seconds; ``None``: no limit.

    Args:
        time: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``, and so on.

    Raises:
        ValueError: If the text is no such time limit.
    """
    if time.upper() in ("UNLIMITED", "INFINITE", "0"):
        return None
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", time)
    if match is None:
        raise ValueError(f"--time {time!r} is not a Slurm time limit; write it as hours:minutes:seconds")
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


# Below: for a job whose batch script and srun another program makes, and on whose first node this package need not be
# installed. NeMo-Run runs a container on every node, without scontrol in it. So bash does the work of `batch_job`.

_LAUNCH_STEP = """\
if [ "${{SLURM_JOB_NUM_NODES:-1}}" -gt 1 ]; then
    port=$(( {first_port} + (SLURM_JOB_ID + ${{SLURM_RESTART_COUNT:-0}}) % {ports} ))
    command+=(--nnodes="$SLURM_JOB_NUM_NODES" --node-rank=slurm --rdzv-endpoint="${head_variable}:$port")
fi
say() {{ if [ "${{SLURM_NODEID:-0}}" = 0 ]; then echo "$1" > {verdict}; fi; }}
say begun
trap : TERM INT HUP USR1  # they are for the launch, which gets them as well; this shell waits for it
{launch}
code=$?
say "$code"
exit "$code"
"""

_REQUEUE_TRAP = """\
# lightning-resilience: what the launch on the first node writes here decides whether the job ends or is requeued.
resilience_verdict={verdict}
rm -f "$resilience_verdict"
export {head_variable}="${{{head_node_ip}%% *}}"
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
resilience_end() {{
    local code=$? verdict why tries
    trap - EXIT
    set +evx
    verdict=$(cat "$resilience_verdict" 2> /dev/null)
    if [ -n "$verdict" ]; then rm -f "$resilience_verdict.tries"; fi
    case $verdict in
        {interrupted}) why='interrupted, or must be retried in a new job' ;;
        begun | 12[89] | 1[3-9][0-9] | 2[0-9][0-9]) why='the launch was killed' ;;
        '')
            echo x >> "$resilience_verdict.tries"
            tries=$(wc -l < "$resilience_verdict.tries")
            why="the launch has not begun (srun ended with $code)"
            if [ "${{tries:-{begin_tries}}}" -ge {begin_tries} ]; then
                echo "[lightning-resilience] The job ends: $why, $tries times in a row."
                if [ "$code" -eq 0 ]; then code=1; fi
                exit "$code"
            fi ;;
        *) echo "[lightning-resilience] The job ends with $verdict."; exit "$verdict" ;;
    esac
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_requeues} ]; then
        echo "[lightning-resilience] The job ends: $why, and it has been requeued {max_requeues} times."
        exit 1
    fi
    echo "[lightning-resilience] Requeuing the job: $why."
    for _ in {{1..{requeue_tries}}}; do
        if scontrol requeue "$SLURM_JOB_ID"; then
            # A job whose script ends before Slurm has taken it back counts as completed.
            for _ in {{1..{requeue_within_s}}}; do sleep 1; done
            exit {interrupted}
        fi
        sleep {requeue_every_s}
    done
    echo '[lightning-resilience] The job could not be requeued; run the experiment again, with the same run_dir.'
    exit {interrupted}
}}
trap resilience_end EXIT
trap 'trap - EXIT; exit 143' TERM
"""


def launch_step(launch: str, verdict: str) -> str:
    """Bash for a step on every node: runs a launch, and writes on the first node how it has ended.

    Args:
        launch: The shell command; it contains ``"${command[@]}"``, the arguments of ``launch``, an array that is set
            before.
        verdict: Path of the file for its exit code, the same inside and outside of a container.
    """
    return _LAUNCH_STEP.format(
        launch=launch,
        verdict=shlex.quote(verdict),
        head_variable=HEAD_NODE_VARIABLE,
        first_port=PORTS.start,
        ports=len(PORTS),
    )


def requeue_trap(verdict: str, head_node_ip: str, max_requeues: int) -> str:
    """Bash for the beginning of a batch script: requeues or ends the job by what :func:`launch_step` has written.

    :data:`.exit_codes.BATCH_JOB` holds the rules. A launch that does not begin is requeued at most twice in a row.

    SIGTERM to the batch shell itself means that Slurm ends the job and everything in it: the job is cancelled, its time
    is up, or its nodes are taken away. In that case the script decides nothing. Slurm itself requeues a job whose nodes
    it took.

    Args:
        verdict: Path of the file.
        head_node_ip: Name of the shell variable that holds the addresses of the first node.
        max_requeues: How often the job may be requeued.
    """
    return _REQUEUE_TRAP.format(
        verdict=shlex.quote(verdict),
        head_node_ip=head_node_ip,
        head_variable=HEAD_NODE_VARIABLE,
        interrupted=exit_codes.INTERRUPTED,
        begin_tries=_BEGIN_TRIES,
        max_requeues=max_requeues,
        requeue_tries=REQUEUE_WITHIN_S // REQUEUE_EVERY_S,
        requeue_every_s=REQUEUE_EVERY_S,
        requeue_within_s=REQUEUE_WITHIN_S,
    )
