"""Which start of the workers a process belongs to. Imports neither torch nor Lightning."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from lightning_resilience.run.run_directory import ELASTIC_VARIABLE


def worker_group(environment: Mapping[str, str] = os.environ) -> str:
    """The same for all workers of one start on all nodes, and another one for those that replace them.

    Args:
        environment: Of one of them, or of a process that it has started.
    """
    names = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"]
    # The restart count says it on a single node only: where another node has failed, it is not counted. Every start of
    # several nodes has a store of its own, at a port that rank 0's node has chosen then.
    if environment.get("GROUP_WORLD_SIZE", "1") == "1" or ELASTIC_VARIABLE in environment:
        names.append("TORCHELASTIC_RESTART_COUNT")
    return hashlib.sha256(" ".join(environment.get(name, "") for name in names).encode()).hexdigest()[:32]
