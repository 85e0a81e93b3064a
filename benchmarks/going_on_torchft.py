"""The replica of ``going_on.py`` under torchft, as in the examples of its documentation.

python benchmarks/going_on_torchft.py RANK FOLDER
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore

STEP_S = 0.05


def main(rank: int, folder: Path) -> None:
    """Trains until it is killed.

    Args:
        rank: Number of the replica.
        folder: Where it notes its steps.
    """
    logging.getLogger("torchft").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{rank}-",
        hostname="127.0.0.1",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    with open(folder / f"rank-{rank}", "ab", buffering=0) as file:
        while True:
            optimizer.zero_grad()
            time.sleep(STEP_S)
            wrapped(torch.randn(4, 64)).square().mean().backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{time.monotonic()!r} {manager.current_step()} {os.getpid()}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
