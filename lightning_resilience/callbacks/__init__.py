"""The callbacks, one file each."""

from lightning_resilience.callbacks.auto_resume import AutoResume
from lightning_resilience.callbacks.preemption import Preemption

__all__ = ["AutoResume", "Preemption"]
