"""Decides what follows when a step stays bad in reruns, and which devices are to blame. No Trainer, no torch.

A bad step is run again at once, with the same random numbers. If it is good then, the fault was transient. If it is bad
again, either its data or the device is to blame, and only a run on another device shows which. These are the decisions
of Megatron-core's rerun machine (``rerun_state_machine.py``), but the number of restarts is limited: Megatron restarts
on the same device forever if there is no other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Decision = Literal["elsewhere", "correct", "older", "end"]
"""What follows a step that was bad twice.

``elsewhere``: restart, if possible on other devices. ``correct``: the step is bad on other devices too, so data and
weights cause it, and the policy for bad steps decides. ``older``: no other devices came, so perhaps the weights are to
blame; restart from an older checkpoint. ``end``: the older checkpoint has not helped either; end the run.
"""


@dataclass(frozen=True)
class PendingRerun:
    """A step that was bad twice on the same devices.

    Attributes:
        batch: The step's epoch and first batch.
        devices: The devices of all ranks.
        reason: What was bad.
        reruns: How many restarts there have been for this step.
        older: Whether the run has resumed from an older checkpoint because of this step.
    """

    batch: tuple[int, int]
    devices: tuple[str, ...]
    reason: str
    reruns: int = 1
    older: bool = False

    def to_json(self) -> dict[str, Any]:
        """The values as plain types."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any] | None) -> PendingRerun | None:
        """Restores the result of :meth:`to_json`; ``None`` for empty content."""
        if not content:
            return None
        epoch, batch = content["batch"]
        return PendingRerun(
            (epoch, batch), tuple(content["devices"]), content["reason"], content["reruns"], content["older"]
        )


def decide_rerun(
    suspect: PendingRerun | None, batch: tuple[int, int], devices: Sequence[str], reason: str, max_reruns: int
) -> tuple[Decision, PendingRerun | None]:
    """Decides about a step that was bad twice.

    Args:
        suspect: The step that was bad twice before the last restart, if any.
        batch: The step's epoch and first batch.
        devices: The devices of all ranks, on which the step was bad.
        reason: What was bad.
        max_reruns: How many restarts a step gets on the same devices.

    Returns:
        The decision, and the suspect to remember for the time after a restart.
    """
    if suspect is None or suspect.batch != batch:
        return "elsewhere", PendingRerun(batch, tuple(devices), reason)
    if suspect.devices != tuple(devices):
        return "correct", None
    if suspect.reruns < max_reruns:
        return "elsewhere", replace(suspect, reruns=suspect.reruns + 1)
    return ("end", suspect) if suspect.older else ("older", replace(suspect, older=True))


def blamed_devices(suspect: PendingRerun, devices: Sequence[str]) -> list[str]:
    """The devices to blame after the step was good: those that were replaced; none if all devices are the same.

    Args:
        suspect: The step that was bad twice before the restart.
        devices: The devices of all ranks, on which the step was good.
    """
    return [f"rank {rank} on {before}" for rank, before in enumerate(suspect.devices) if before != devices[rank]]
