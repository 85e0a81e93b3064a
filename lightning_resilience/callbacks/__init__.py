"""The callbacks, one file each."""

from lightning_resilience.callbacks.auto_resume import AutoResume
from lightning_resilience.callbacks.fault_tolerance import FaultTolerance
from lightning_resilience.callbacks.local_checkpoint import LocalCheckpoint
from lightning_resilience.callbacks.local_sgd import LocalSGD
from lightning_resilience.callbacks.nan_guard import NaNGuard
from lightning_resilience.callbacks.preemption import Preemption
from lightning_resilience.callbacks.replica_check import ReplicaCheck
from lightning_resilience.callbacks.straggler_detection import StragglerDetection
from lightning_resilience.run.time_account import OF_PROCESS

__all__ = [
    "AutoResume",
    "FaultTolerance",
    "LocalCheckpoint",
    "LocalSGD",
    "NaNGuard",
    "Preemption",
    "ReplicaCheck",
    "StragglerDetection",
]

OF_PROCESS.imported()
