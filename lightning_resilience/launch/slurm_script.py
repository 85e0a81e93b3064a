"""The batch script of ``lightning-resilience slurm``: short, because all decisions are taken in ``slurm_job``."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_resilience import __version__
from lightning_resilience._files import make_directory

PREEMPT_TIME_S = 60
"""Seconds from SIGTERM to the time limit; NeMo's ``preempt_time``."""

AFTER_GRACE_S = 10  # the workers have ended by then; the launches and srun come after them
SHORTEST_GRACE_S = 10
_SIGNAL_EARLY_S = 60  # Slurm looks at the limits only now and then, and sends the signal up to so much too early
_NAME = re.compile(r"--(?P<long>[A-Za-z-]+)|-(?P<short>[A-Za-z])")
_OURS = (
    *("nodes", "N", "ntasks", "n", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "output", "o"),
    *("chdir", "D", "array", "a", "wrap", "time", "t"),
)


@dataclass(frozen=True)
class BatchScript:
    """What the command line of ``slurm`` says.

    Args:
        launch: The arguments of ``launch``, without ``--run-dir``, nodes and the grace period.
        run_dir: The run directory.
        directory: Where the job runs.
        nodes: How many nodes.
        job_name: The job's name.
        time: The time limit in Slurm's notation; ``None``: that of the partition.
        gpus_per_node: GPUs of each node; ``None``: none are asked for.
        partition: The partition; ``None``: Slurm's default.
        account: The account; ``None``: the user's default.
        sbatch: Further options of sbatch, each ``--name=value``.
        env_setup: Lines for the shell before anything is started.
        preempt_time_s: How long before the time limit SIGTERM is sent, at least.
        grace_period_s: How long the workers have to save after it; ``None``: 10 s less than that.
        max_requeues: How often the job may be requeued.
        python: The interpreter on the nodes.

    Raises:
        ValueError: If these cannot work together, with the reason.
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
        least = SHORTEST_GRACE_S + AFTER_GRACE_S
        if not least <= self.preempt_time_s <= 65535:
            raise ValueError(
                f"--preempt-time {self.preempt_time_s}: it must be {least} to 65535 s, since the workers have "
                f"{AFTER_GRACE_S} s less than that to save"
            )
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
            name = _NAME.match(option)
            if name is None:
                raise ValueError(f"--sbatch {option!r} is no option: give it as --sbatch=--name=value")
            given = name["long"] or name["short"]
            if given in _OURS or (len(given) > 1 and any(own.startswith(given) for own in _OURS)):  # sbatch takes both
                raise ValueError(
                    f"--sbatch={option}: {name[0]} is given by this command itself, or it would not work with it"
                )
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

    @property
    def path(self) -> Path:
        """Where the script is kept when it is submitted."""
        return self.run_dir / "slurm" / "job.sbatch"

    def render(self) -> str:
        """The text of the script."""
        lines = [
            "#!/bin/bash",
            f"# Made by lightning-resilience {__version__}. For sbatch. Submitted again, it goes on with the run.",
            *(f"#SBATCH {option}" for option in self._options()),
            "",
        ]
        if self.env_setup:
            lines += [*self.env_setup, ""]
        lines += [
            "# Starts `lightning-resilience launch` on every node. When that has ended, it ends or requeues this job.",
            "# exec: SIGTERM must reach this program, which waits until all have saved, and no shell, which would end.",
        ]
        begin = [shlex.quote(self.python), "-m", "lightning_resilience.launch.slurm_job"]
        own = [f"--run-dir={self.run_dir}", f"--max-requeues={self.max_requeues}", f"--lead={self.preempt_time_s}"]
        rest = ["--", f"--grace-period={self.grace_s:g}", *self.launch]
        command = [" ".join(["exec", *begin]), shlex.join(own), shlex.join(rest)]
        return "\n".join([*lines, " \\\n    ".join(command), ""])

    def submit(self) -> str:
        """Writes the script into the run directory and submits it.

        Returns:
            The id of the job.

        Raises:
            OSError: If it cannot be written, there is no sbatch, or sbatch refuses it.
        """
        self.make_output_directory()
        self.path.write_text(self.render())
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(self.path)], capture_output=True, text=True, timeout=120, check=False
            )
        except FileNotFoundError:
            raise OSError("there is no sbatch here; submit the script on a node of the cluster") from None
        except subprocess.TimeoutExpired:
            raise OSError("sbatch has not answered within 2 minutes; squeue says whether it got the job") from None
        if done.returncode != 0:
            raise OSError(f"sbatch has refused {self.path}: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]

    def make_output_directory(self) -> None:
        """Makes the folder of the job's output: Slurm does not, and without it a job fails and says nothing."""
        make_directory(self.path.parent)

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
        # Without "B:" the signal goes to the processes of the steps, as that of a preemption does.
        late = {
            "signal": f"TERM@{self.preempt_time_s}",
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


def _quoted(option: str) -> str:
    """An option as the user has written it, its value in quotes if it needs them."""
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
        ValueError: If it is none.
    """
    if time.upper() in ("UNLIMITED", "INFINITE", "0"):
        return None
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", time)
    if match is None:
        raise ValueError(f"--time {time!r} is no time limit of Slurm's; write it as hours:minutes:seconds")
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
