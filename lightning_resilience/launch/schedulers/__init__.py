"""The batch systems that the launcher knows. A further one needs a file in this folder, and its class in ``KINDS``."""

from __future__ import annotations

from lightning_resilience.launch.schedulers.base import Scheduler
from lightning_resilience.launch.schedulers.slurm import Slurm

KINDS: tuple[type[Scheduler], ...] = (Slurm,)


def current_scheduler() -> Scheduler:
    """The scheduler in whose job this process runs; a plain :class:`Scheduler` outside of any job."""
    return next((found for kind in KINDS if (found := kind()).job_id is not None), Scheduler())
