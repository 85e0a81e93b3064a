"""The facts of the job that this process belongs to, for the log and the ledger."""

from __future__ import annotations

import functools
import logging
import os
import platform
from importlib import metadata
from typing import Any

from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.events import JobInfo
from lightning_resilience.run.ledger import Ledger

log = logging.getLogger(__name__)

_PACKAGES = ("lightning-resilience", "torch", "lightning", "pytorch-lightning", "nvidia-resiliency-ext")


def job_info() -> dict[str, Any]:
    """Host, world, scheduler and versions, without importing any of the packages."""
    environment = os.environ.get
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "world_size": _int(environment("WORLD_SIZE")) or 1,
        "local_world_size": _int(environment("LOCAL_WORLD_SIZE")) or 1,
        "nodes": _int(environment("GROUP_WORLD_SIZE")) or 1,
        "visible_devices": environment("CUDA_VISIBLE_DEVICES"),
        "elastic_run_id": environment("TORCHELASTIC_RUN_ID"),
        "restart_count": _int(environment("TORCHELASTIC_RESTART_COUNT")) or 0,
        "slurm": current_scheduler().job_info(),  # the name in the ledger under any scheduler
        "versions": {"python": platform.python_version(), **versions()},
    }


def log_job_info(ledger: Ledger | None = None) -> dict[str, Any]:
    """Logs the facts of the job in one line, records them in ``ledger`` and returns them.

    Args:
        ledger: The ledger in which to record them as a ``job_info`` event, if any.
    """
    info = job_info()
    log.info("Job: %s", ", ".join(f"{name}={value}" for name, value in info.items() if value is not None))
    if ledger is not None:
        ledger.record(JobInfo(**info))
    return info


@functools.cache  # reading them takes longer than everything else that is recorded of a start
def versions() -> dict[str, str]:
    """The versions of the packages that matter and are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _int(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdecimal() else None
