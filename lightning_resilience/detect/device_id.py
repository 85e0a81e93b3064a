"""Names the node and the device on which a rank runs; no other node or device has the same names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_resilience.run.ledger import node_name


@dataclass(frozen=True)
class DeviceId:
    """A node and a device on it.

    Attributes:
        node: The node's name, see :func:`~lightning_resilience.run.ledger.node_name`.
        device: For a GPU its UUID, which stays the same wherever the driver lists the GPU; for any other device
            torch's name.
    """

    node: str
    device: str

    @staticmethod
    def of(device: torch.device) -> DeviceId:
        """The names for this process, which computes on ``device``."""
        name = str(device)
        if device.type == "cuda":
            name = f"GPU {torch.cuda.get_device_properties(device).uuid}"
        return DeviceId(node_name(), name)

    def __str__(self) -> str:
        return f"{self.node} ({self.device})"
