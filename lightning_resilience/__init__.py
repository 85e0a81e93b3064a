"""Callbacks and a launcher that let any PyTorch Lightning training run survive what kills training runs.

Nothing is imported before it is used, because the launcher must run before torch and Lightning are imported.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_resilience import recipes
    from lightning_resilience.callbacks import (
        AutoResume,
        FaultTolerance,
        LocalCheckpoint,
        LocalSGD,
        NaNGuard,
        Preemption,
        ReplicaCheck,
        StragglerDetection,
    )
    from lightning_resilience.checkpoint.resume import resolve_resume_path
    from lightning_resilience.fit.joining import report_progress
    from lightning_resilience.fit.numerics_policy import TrainingDiverged
    from lightning_resilience.fit.replica_comparison import ReplicasDiverged
    from lightning_resilience.launch.job_info import log_job_info
    from lightning_resilience.launch.schedulers.slurm import get_slurm_info
    from lightning_resilience.run.ledger import read_ledger
    from lightning_resilience.signals import Interrupted

__version__ = "0.1.0.dev0"

_WHERE = {
    "AutoResume": "callbacks",
    "FaultTolerance": "callbacks",
    "Interrupted": "signals",
    "LocalCheckpoint": "callbacks",
    "LocalSGD": "callbacks",
    "NaNGuard": "callbacks",
    "Preemption": "callbacks",
    "ReplicaCheck": "callbacks",
    "ReplicasDiverged": "fit.replica_comparison",
    "StragglerDetection": "callbacks",
    "TrainingDiverged": "fit.numerics_policy",
    "get_slurm_info": "launch.schedulers.slurm",
    "log_job_info": "launch.job_info",
    "read_ledger": "run.ledger",
    "report_progress": "fit.joining",
    "resolve_resume_path": "checkpoint.resume",
}

__all__ = [
    "AutoResume",
    "FaultTolerance",
    "Interrupted",
    "LocalCheckpoint",
    "LocalSGD",
    "NaNGuard",
    "Preemption",
    "ReplicaCheck",
    "ReplicasDiverged",
    "StragglerDetection",
    "TrainingDiverged",
    "get_slurm_info",
    "log_job_info",
    "read_ledger",
    "recipes",
    "report_progress",
    "resolve_resume_path",
]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module("lightning_resilience.recipes")
    if name in _WHERE:
        found = getattr(importlib.import_module(f"lightning_resilience.{_WHERE[name]}"), name)
        if _WHERE[name] == "callbacks":  # for a LightningCLI of a package imported later
            importlib.import_module("lightning_resilience._lightning.lightning_callbacks").adopt_namespaces()
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _log_to_stderr() -> None:
    # Like Lightning's own logger: readable without any setup, and unchanged if the program has set up logging.
    logger = logging.getLogger(__name__)
    logger.setLevel(logging.INFO)
    if not logging.root.hasHandlers():
        from lightning_resilience import _output

        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_output.Formatter())
        handler.setLevel(logging.WARNING if _output.is_quiet() else logging.NOTSET)
        logger.addHandler(handler)
        logger.propagate = False


_log_to_stderr()
