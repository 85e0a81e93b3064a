"""When to save: the interval that loses the least time, from what a save costs and how often runs fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_PRIOR_RANKS = 1024
_PRIOR_MEAN_TIME_S = 7.9 * 3600  # of jobs with 1,024 GPUs on Meta's research clusters (arXiv 2410.21680)


def optimal_interval_s(stall_s: float, mean_time_to_failure_s: float, recovery_s: float) -> float:
    """The interval between two saves with which a run makes the most progress.

    In an interval ``Tc`` the training stands still for ``Ts`` and advances for ``Tc - Ts``. A failure comes after
    ``Tf`` on average; it costs ``Tr`` until the training advances again, and half an interval of work. So the part of
    the time in which the run advances is ``(1 - Ts / Tc) * Tf / (Tf + Tr + Tc / 2)``, which is largest at

        Tc = Ts + sqrt(2 (Tf + Tr) Ts + Ts^2)        (arXiv 2410.18124)

    Args:
        stall_s: ``Ts``: for how long a save holds the training up; what happens behind the training does not count.
        mean_time_to_failure_s: ``Tf``, for example from :func:`mean_time_to_failure_s`.
        recovery_s: ``Tr``: from a failure until the training is where the loaded checkpoint was made.

    Returns:
        Seconds from the beginning of a save to that of the next. Zero if a save costs nothing: then what bounds the
        interval is how fast saves can follow one another.

    """
    return stall_s + math.sqrt(2 * (mean_time_to_failure_s + recovery_s) * stall_s + stall_s**2)


def mean_time_to_failure_s(world_size: int, failures: int, observed_s: float) -> float:
    """How long a run of this size goes on until something ends it, on average.

    Failures are taken to come at a constant rate for each rank. Before a run has seen any, the rate is that of Meta's
    research clusters: 7.9 hours between two failures at 1,024 GPUs (arXiv 2410.21680), which is 337 days for a single
    one. It weighs as much as one failure seen; every failure of the run itself weighs the same (the mean of a gamma
    distribution after the observation), so after a few of them it is the run's own rate that counts.

    Args:
        world_size: Ranks of the run.
        failures: How many the run has had.
        observed_s: Over how many seconds, all attempts together.
    """
    expected_s = _PRIOR_MEAN_TIME_S * _PRIOR_RANKS / world_size
    return (expected_s + observed_s) / (1 + failures)


@dataclass
class Schedule:
    """When a save is due: one of the two.

    Args:
        every_n_train_steps: Whenever ``global_step`` has come to a multiple of this.
        interval_s: When so many seconds have passed since the last one; asked again each time.
    """

    every_n_train_steps: int | None
    interval_s: Callable[[], float]
    _next: float = field(default=float("inf"), init=False)

    def begin(self) -> None:
        """Counts from now."""
        if self.every_n_train_steps is None:
            self._next = time.monotonic() + self.interval_s()

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save now."""
        n = self.every_n_train_steps
        # Made up for if it could not be done at the very step.
        return time.monotonic() >= self._next if n is None else step // n > last // n

    def step_ahead(self, earliest: int) -> int | None:
        """The step of the next save, not before ``earliest``, or ``None`` if the time has not come."""
        n = self.every_n_train_steps
        if n is not None:
            return -(-earliest // n) * n
        return earliest if time.monotonic() >= self._next else None

    def seconds_left(self) -> float:
        """Until the time has come; also a good time to look again."""
        return min(max(self._next - time.monotonic(), 0.01), 60.0)
