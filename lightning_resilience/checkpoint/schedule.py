"""Decides at which steps or times local checkpoints are saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_resilience.run.save_interval import WARM_UP_STEPS, chosen_interval_s, growing_interval_s

_UNKNOWN_INTERVAL_S = 10.0


@dataclass
class ChosenInterval:
    """The interval if the user gives none: it is chosen by the measured costs of saves, and the first intervals grow.

    Args:
        costs: Returns the costs of a save in seconds: how long the training stands still, and how long threads, network
            and store are busy with it. ``None`` if they are not known yet.
        mean_time_to_failure_s: See :func:`~.save_interval.optimal_interval_s`.
        recovery_s: See :func:`~.save_interval.optimal_interval_s`.

    Attributes:
        chosen_s: The interval after the first ones, in seconds; ``None`` if it is not known yet.
    """

    costs: Callable[[], tuple[float, float] | None]
    mean_time_to_failure_s: float
    recovery_s: float
    chosen_s: float | None = field(default=None, init=False)

    def __call__(self, before_s: float) -> float:
        """Seconds until the next save; ``before_s`` is the previous interval."""
        costs = self.costs()
        if costs is None:
            return growing_interval_s(before_s, 0.0, 0.0, _UNKNOWN_INTERVAL_S)
        self.chosen_s = chosen_interval_s(*costs, self.mean_time_to_failure_s, self.recovery_s)
        return growing_interval_s(before_s, *costs, self.chosen_s)


@dataclass
class Schedule:
    """When a save is due: by steps if ``every_n_train_steps`` is set, otherwise by time.

    Args:
        every_n_train_steps: A save is due whenever ``global_step`` has reached a multiple of this.
        interval_s: Returns the seconds from the begin of a save to the next save; its argument is the previous
            interval, 0 if there was none. Called when a save has begun, and again when its costs are known.
        is_early: Whether the first save is due when the training is warm, instead of after an interval.
    """

    every_n_train_steps: int | None
    interval_s: Callable[[float], float]
    is_early: bool = False
    _not_before: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _before: float = field(default=0.0, init=False)
    _interval: float = field(default=0.0, init=False)
    _next: float = field(default=math.inf, init=False)

    def start(self, step: int) -> None:
        """Call it when the training starts; ``step`` is ``global_step``."""
        if self.is_early:
            self._not_before = step + WARM_UP_STEPS
            self._next = time.monotonic()
        else:
            self.begin()

    def begin(self) -> None:
        """Begins the next interval now."""
        self._began, self._before = time.monotonic(), self._interval
        self.adjust()

    def adjust(self) -> None:
        """Call it when the costs of a save are known: the time of the next save depends on them."""
        if self.every_n_train_steps is None:
            self._interval = self.interval_s(self._before)
            self._next = self._began + self._interval

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save now, at ``step``; ``last`` is the step of the last save."""
        n = self.every_n_train_steps
        # A save that was not possible at the multiple itself is made up for later.
        return time.monotonic() >= self._next and step >= self._not_before if n is None else step // n > last // n

    def step_ahead(self, earliest: int) -> int | None:
        """The step of the next save, not before ``earliest``; ``None`` if the time for it has not come."""
        n = self.every_n_train_steps
        if n is not None:
            return -(-earliest // n) * n
        return max(earliest, self._not_before) if time.monotonic() >= self._next else None

    def seconds_left(self) -> float:
        """Seconds until the next save is due, limited to 0.01 to 60: how long to wait before looking again."""
        return min(max(self._next - time.monotonic(), 0.01), 60.0)
