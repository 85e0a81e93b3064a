"""Settings of torch's NCCL in the ranks of ``launch --elastic``, so that they outlive a collective that fails.

By default it ends a process in which a collective has failed or timed out, since what the device computes from then on
is arbitrary. Here the process is to stay: it leaves its fit, and everything is restored from a checkpoint. What is in
the environment already is not changed; :func:`why_not` says if that would end the survivors of a loss.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

ENVIRONMENT = {
    # NCCL's watchdog leaves a failed collective alone, but for its message. Hangs are found by ours.
    _HANDLING: "0",
    # An error of the device does not end the process in that thread: the main thread raises it, with its place.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor of that watchdog would end the process where an abort takes long.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It would ask each second a store that is closed, and sleep for minutes before it ends, which the group waits for.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog sleeps four times as long after a failure, and the group waits for its end.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Communicators with NVLink SHARP cannot be aborted safely (known issue of NVRx's in-process restart).
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables of the ranks, where they are not set."""


def why_not(environment: Mapping[str, str]) -> str | None:
    """Why NCCL would end this process when another rank is lost; ``None``: it would not.

    Args:
        environment: Environment variables of the process.
    """
    # The second is the older name, which torch still reads.
    handling = environment.get(_HANDLING, environment.get("NCCL_ASYNC_ERROR_HANDLING"))
    if handling != "0":
        found = "not set" if handling is None else handling
        return f"{_HANDLING} is {found}, not 0: torch would end the remaining ranks"
    is_on = environment.get("TORCH_NCCL_DESYNC_DEBUG", "0").lower() in ("1", "y", "yes", "t", "true")
    if is_on or environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        name = "TORCH_NCCL_DESYNC_DEBUG" if is_on else "TORCH_DISTRIBUTED_DEBUG=DETAIL"
        return f"with {name} torch would end the remaining ranks"
    return None
