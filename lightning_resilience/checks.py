"""Health checks that a program can run itself: of a device, a folder, the clock, a whole node, and all ranks.

``FaultTolerance`` runs them when a rank joins, and pings the ranks every ``health_check_interval_steps`` steps.
``NaNGuard(rerun="report_determinism_stats")`` counts how often the two runs of a batch had different results:
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
