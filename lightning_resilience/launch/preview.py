"""``lightning-resilience launch --plan``: what a launch would do, with which limits, where, and whether it can."""

from __future__ import annotations

import os
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_resilience._formatting import duration, format_bytes, or_dash, table
from lightning_resilience.checkpoint.capacity import file_systems
from lightning_resilience.checkpoint.local_folders import base_folder
from lightning_resilience.launch import preflight
from lightning_resilience.launch.budget import failures_today
from lightning_resilience.launch.job import Launch, LaunchSettings, Preview
from lightning_resilience.launch.job_info import job_info
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run import deadlines
from lightning_resilience.run.events import WorkersStart
from lightning_resilience.run.run_directory import RunDirectory

_SHOWN = re.compile(r"(LIGHTNING_RESILIENCE|NCCL|GLOO|WANDB|CUDA|OMP|TORCH|PYTORCH|TORCHELASTIC|SLURM_JOB)_\w+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_DRIVERS = ("nvidia", "amdgpu")


def plan(settings: LaunchSettings, batch_script: str | None = None, as_json: bool = False) -> tuple[str, bool]:
    """What a launch would do. This function writes and starts nothing.

    Args:
        settings: The settings of the launch.
        batch_script: The script of the job that would run the launch, if a job would be submitted.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.

    Returns:
        The text, and whether no check has found anything that would refuse or fail the launch.
    """
    found = _content(settings, batch_script)
    is_good = all(each["level"] != "fail" for each in found["checks"])
    return to_json(found) if as_json else "\n".join(_text(found)), is_good


def _content(settings: LaunchSettings, batch_script: str | None) -> dict[str, Any]:
    preview = Launch(settings).preview()
    history, failures = preview.history, preview.history.failures
    most_nodes = int(settings.nnodes.rpartition(":")[2])
    if preview.finished is not None:
        would = "nothing"
    elif preview.refusal is not None or preview.decision.action == "give_up":
        would = "refuse"
    else:
        would = "resume" if history.events else "begin"
    scheduler = current_scheduler()
    return {
        "would": would,
        "run_dir": str(settings.run_dir),
        "safe_step": history.safe_step(RunDirectory(settings.run_dir)),
        "starts": len(history.of(WorkersStart)),
        "changes": preview.changes or None,
        "script": settings.command,
        "command": preview.command,
        "environment": preview.environment | _of_user(preview.environment),
        "recipe": settings.recipe,
        "nodes": settings.nnodes,
        "ranks_per_node": settings.nproc_per_node,
        "devices": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "limits": asdict(settings.budget),
        "used": {
            "in_job_restarts": failures.in_job,
            "job_retries": failures.job_retries,
            "max_failures_per_day": failures_today(history, time.time()),
        },
        "max_restarts": preview.decision.max_restarts,
        "deadlines": _deadlines(settings, preview),
        "section_timeouts": str(settings.section_timeouts),
        "directories": [
            _directory("run", settings.run_dir),
            _directory("local checkpoints", base_folder(settings.local_dir)),
        ],
        "versions": job_info()["versions"] | _drivers(),
        "scheduler": scheduler.name or None,
        "job_id": scheduler.job_id,
        "batch_options": re.findall(r"(?m)^#SBATCH (.+)$", batch_script or ""),
        "checks": [each._asdict() for each in preflight.checks(settings, preview, most_nodes)],
    }


def _of_user(ours: dict[str, str]) -> dict[str, str]:
    """The variables of the user's environment that matter to workers, without secrets."""
    found = {name: value for name, value in sorted(os.environ.items()) if _SHOWN.fullmatch(name)}
    return {name: value for name, value in found.items() if name not in ours and not _SECRET.search(name)}


def _deadlines(settings: LaunchSettings, preview: Preview) -> dict[str, float | None]:
    grace_s = settings.grace_period_s
    return {
        "grace_period": grace_s,
        "elastic_launcher_ends_workers": grace_s + deadlines.TERM_MARGIN_S,
        "launch_ends_all": grace_s + deadlines.KILL_MARGIN_S,
        "last_save": preview.history.last_save_s,
    }


def _directory(name: str, path: Path) -> dict[str, Any]:
    folder = preflight.existing(path)
    about = os.statvfs(folder)
    return {
        "name": name,
        "path": str(path),
        "exists": folder == path,
        "file_system": next(iter(file_systems(folder)), None),
        "free": about.f_bavail * about.f_frsize,
        "is_writable": preflight.why_not_writable(path) is None,
    }


def _drivers() -> dict[str, str]:
    paths = {name: Path("/sys/module") / name / "version" for name in _DRIVERS}
    return {f"{name} driver": path.read_text().strip() for name, path in paths.items() if path.exists()}


def _text(found: dict[str, Any]) -> list[str]:
    would = {
        "begin": "a new run would begin",
        "resume": "the run would resume",
        "nothing": "the run has finished: nothing would be started",
        "refuse": "the launch would be refused, or end at once",
    }[found["would"]]
    safe = (
        "" if found["would"] == "begin" else f", start {found['starts'] + 1}, safe step {or_dash(found['safe_step'])}"
    )
    limits = [
        f"{max(0, limit - found['used'][name])} of {limit} {name.replace('_', ' ')} left"
        for name, limit in found["limits"].items()
    ]
    times = [
        f"{name.replace('_', ' ')} {duration(each)}" for name, each in found["deadlines"].items() if each is not None
    ]
    job = f"{found['scheduler']}, job {found['job_id']}" if found["scheduler"] else "none"
    devices = f"{found['devices']} NVIDIA devices here"
    rows = [
        ("Plan", f"{would}; now nothing is started"),
        ("Run", f"{found['run_dir']}{safe}"),
        *([("Changed", found["changes"])] if found["changes"] else []),
        ("Script", shlex.join(found["script"])),
        ("Ranks", f"{found['nodes']} x {found['ranks_per_node']} ({devices}), recipe {found['recipe']}"),
        ("Limits", ", ".join(limits)),
        ("Deadlines", ", ".join(times)),
        ("Hangs", found["section_timeouts"]),
        ("Versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("Scheduler", job),
        *(("Batch job", each) for each in found["batch_options"]),
        *(("Directory", _directory_text(each)) for each in found["directories"]),
        ("Command", shlex.join(found["command"])),
        *(("Variable", f"{name}={value}") for name, value in found["environment"].items()),
    ]
    lines = [f"{name:<11}{text}" for name, text in rows]
    results = [[each["level"], each["name"], each["text"]] for each in found["checks"]]
    return [*lines, "", *table(["check", "of", "what was found"], results)]


def _directory_text(each: dict[str, Any]) -> str:
    kind = f"{each['file_system'] or 'unknown'}{'' if each['exists'] else ', to be created'}"
    writable = "writable" if each["is_writable"] else "not writable"
    return f"{each['name']}: {each['path']} ({kind}), {format_bytes(each['free'])} free, {writable}"
