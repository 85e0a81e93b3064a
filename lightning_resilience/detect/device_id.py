"""Where a rank runs, by names that no other place has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_resilience.run.ledger import node_name


@dataclass(frozen=True)
class DeviceId:
    """A node and a device on it.

    Attributes:
        node: Its name, see :func:`~lightning_resilience.run.ledger.node_name`.
        device: A GPU by its UUID, which it keeps wherever the driver lists it; others by torch's name.
    """

    node: str
    device: str

    @staticmethod
    def of(device: torch.device) -> DeviceId:
        """That of this process, which computes on ``device``."""
        name = str(device)
        if device.type == "cuda":
            name = f"GPU {torch.cuda.get_device_properties(device).uuid}"
        return DeviceId(node_name(), name)

    def __str__(self) -> str:
        return f"{self.node} ({self.device})"
