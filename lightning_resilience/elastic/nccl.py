"""Environment variables for NCCL in the ranks of ``launch --elastic``, so that they survive a failed collective.

By default torch ends a process in which an NCCL collective has failed or timed out, since the device computes arbitrary
results from then on. Here the process must survive: it leaves its fit, and everything is restored from a checkpoint.
Variables that are already set are not changed; :func:`why_not` reports whether they would end the survivors of a loss.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

ENVIRONMENT = {
    # torch's NCCL watchdog only logs a failed collective. Our own watchdog finds hangs.
    _HANDLING: "0",
    # A device error does not end the process in NCCL's watchdog thread: the main thread raises it, with its place.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor of NCCL's watchdog would end the process if an abort takes long.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # It would query a closed store each second, and sleep for minutes before it ends; the group waits for its end.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After a failure the watchdog sleeps four times this long, and the group waits for its end.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    # Communicators with NVLink SHARP cannot be aborted safely (known issue of NVRx's in-process restart).
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables of the ranks, for those that are not set already."""


def why_not(environment: Mapping[str, str]) -> str | None:
    """Why torch would end this process when another rank is lost; ``None`` if it would not.

    Args:
        environment: Environment variables of the process.
    """
    # The second name is the older one, which torch still reads.
    handling = environment.get(_HANDLING, environment.get("NCCL_ASYNC_ERROR_HANDLING"))
    if handling != "0":
        found = "not set" if handling is None else handling
        return f"{_HANDLING} is {found}, not 0: torch would end the remaining ranks"
    is_on = environment.get("TORCH_NCCL_DESYNC_DEBUG", "0").lower() in ("1", "y", "yes", "t", "true")
    if is_on or environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        name = "TORCH_NCCL_DESYNC_DEBUG" if is_on else "TORCH_DISTRIBUTED_DEBUG=DETAIL"
        return f"with {name} torch would end the remaining ranks"
    return None
