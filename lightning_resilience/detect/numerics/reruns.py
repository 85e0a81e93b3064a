"""What a step that is bad again and again says about the hardware: pure decisions, no Trainer, no torch.

A step that is bad is run again at once, with the same random numbers. If it is good then, a fault has passed. If it is
bad again, either its data or the device is to blame, and only another device can tell. These are the decisions of
Megatron-core's rerun machine (``rerun_state_machine.py``), with an end to every way: Megatron restarts on the same
device for ever if there is no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Decision = Literal["elsewhere", "correct", "older", "end"]
"""What follows a step that was bad twice.

``elsewhere``: a restart, if possible on other devices. ``correct``: it is bad on other devices too, so it is what the
data and the weights make; the policy for bad steps decides. ``older``: there are no other devices, so perhaps the
weights are to blame; from an older checkpoint. ``end``: that has not helped either.
"""


@dataclass(frozen=True)
class PendingRerun:
    """A step that was bad twice on the same devices.

    Attributes:
        batch: Its epoch and first batch.
        devices: Of all ranks.
        reason: What was bad.
        reruns: How many restarts it has been given.
        older: Whether the run has gone back to an older checkpoint because of it.
    """

    batch: tuple[int, int]
    devices: tuple[str, ...]
    reason: str
    reruns: int = 1
    older: bool = False

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any] | None) -> PendingRerun | None:
        """What :meth:`to_json` has made, or ``None``."""
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
        suspect: What is known from before the last restart.
        batch: The step's epoch and first batch.
        devices: Those of all ranks, on which it was bad.
        reason: What was bad.
        max_reruns: How many restarts a step is worth on the same devices.

    Returns:
        The decision, and what has to be known after a restart.
    """
    if suspect is None or suspect.batch != batch:
        return "elsewhere", PendingRerun(batch, tuple(devices), reason)
    if suspect.devices != tuple(devices):
        return "correct", None
    if suspect.reruns < max_reruns:
        return "elsewhere", replace(suspect, reruns=suspect.reruns + 1)
    return ("end", suspect) if suspect.older else ("older", replace(suspect, older=True))


def blamed_devices(suspect: PendingRerun, devices: Sequence[str]) -> list[str]:
    """The devices to blame, now that the step was good: those that are others than before; none if all are the same.

    Args:
        suspect: What is known from before.
        devices: Those of all ranks, on which it was good.
    """
    return [f"rank {rank} on {before}" for rank, before in enumerate(suspect.devices) if before != devices[rank]]
