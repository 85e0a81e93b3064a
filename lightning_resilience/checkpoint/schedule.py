"""When to save to the nodes: at which steps or times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_resilience.run.save_interval import WARM_UP_STEPS, chosen_interval_s, growing_interval_s

_UNKNOWN_INTERVAL_S = 10.0


@dataclass
class ChosenInterval:
    """The interval where the user gives none: what saves cost is measured, and the first intervals grow.

    Args:
        costs: What a save costs: for how long the training stands still, and for how long threads, network and store
            are busy with it, in seconds; ``None``: not known yet.
        mean_time_to_failure_s: See :func:`~.save_interval.optimal_interval_s`.
        recovery_s: See :func:`~.save_interval.optimal_interval_s`.

    Attributes:
        chosen_s: The interval after the first ones; ``None``: not known yet.
    """

    costs: Callable[[], tuple[float, float] | None]
    mean_time_to_failure_s: float
    recovery_s: float
    chosen_s: float | None = field(default=None, init=False)

    def __call__(self, before_s: float) -> float:
        """Seconds to the next save, after ``before_s`` between the last two."""
        costs = self.costs()
        if costs is None:
            return growing_interval_s(before_s, 0.0, 0.0, _UNKNOWN_INTERVAL_S)
        self.chosen_s = chosen_interval_s(*costs, self.mean_time_to_failure_s, self.recovery_s)
        return growing_interval_s(before_s, *costs, self.chosen_s)


@dataclass
class Schedule:
    """When a save is due: one of the two.

    Args:
        every_n_train_steps: Whenever ``global_step`` has come to a multiple of this.
        interval_s: When so many seconds have passed since the last one; is passed the interval before that, 0 after the
            first save. Asked again when a save has begun, and when it is known what it costs.
        is_early: Whether the first save comes when the training is warm, and not after an interval.
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
        """Call it when the training starts, at this ``global_step``."""
        if self.is_early:
            self._not_before = step + WARM_UP_STEPS
            self._next = time.monotonic()
        else:
            self.begin()

    def begin(self) -> None:
        """Counts from now."""
        self._began, self._before = time.monotonic(), self._interval
        self.adjust()

    def adjust(self) -> None:
        """Call it when the costs of a save are known: when the next one is due follows from them."""
        if self.every_n_train_steps is None:
            self._interval = self.interval_s(self._before)
            self._next = self._began + self._interval

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save now."""
        n = self.every_n_train_steps
        # Made up for if it could not be done at the very step.
        return time.monotonic() >= self._next and step >= self._not_before if n is None else step // n > last // n

    def step_ahead(self, earliest: int) -> int | None:
        """The step of the next save, not before ``earliest``, or ``None`` if the time has not come."""
        n = self.every_n_train_steps
        if n is not None:
            return -(-earliest // n) * n
        return max(earliest, self._not_before) if time.monotonic() >= self._next else None

    def seconds_left(self) -> float:
        """Until the time has come; also a good time to look again."""
        return min(max(self._next - time.monotonic(), 0.01), 60.0)
