"""The identity of a start of the workers, for each of its processes. Imports neither torch nor Lightning."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from lightning_resilience.run.run_directory import ELASTIC_VARIABLE


def worker_group(environment: Mapping[str, str] = os.environ) -> str:
    """An id that is the same for all workers of one start on all nodes, and differs for the workers that replace them.

    Args:
        environment: The environment of one of these workers, or of a process that it has started.
    """
    names = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"]
    # The restart count identifies a start on a single node only: a failure on another node is not counted. But every
    # start of several nodes has a store of its own, at a port that rank 0's node has chosen for it.
    if environment.get("GROUP_WORLD_SIZE", "1") == "1" or ELASTIC_VARIABLE in environment:
        names.append("TORCHELASTIC_RESTART_COUNT")
    return hashlib.sha256(" ".join(environment.get(name, "") for name in names).encode()).hexdigest()[:32]
