"""Health checks that a program may make itself: of a device, a folder, the clock, a whole node, and all ranks.

``FaultTolerance`` makes them when a rank joins, and pings the ranks every ``health_check_interval_steps`` steps. How
often a batch that was run twice had two results is counted by ``NaNGuard(rerun="report_determinism_stats")``:
``steps_run_again`` and ``differing_steps`` of the callback.
"""

from lightning_resilience.detect.health import (
    Check,
    HealthReport,
    check_clock,
    check_collective,
    check_device_health,
    check_free_space,
    check_gpu_health,
    check_node,
)

__all__ = [
    "Check",
    "HealthReport",
    "check_clock",
    "check_collective",
    "check_device_health",
    "check_free_space",
    "check_gpu_health",
    "check_node",
]
