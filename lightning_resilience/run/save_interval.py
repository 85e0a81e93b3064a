"""Computes the interval of local saves that loses the least time, shorter after a start. No torch, no Lightning."""

from __future__ import annotations

import math

_PRIOR_RANKS = 1024
_PRIOR_MEAN_TIME_S = 7.9 * 3600  # of jobs with 1,024 GPUs on Meta's research clusters (arXiv 2410.21680)

WARM_UP_STEPS = 3
"""After this many steps a training is warm: memory is allocated, kernels are compiled, DDP has regrouped buckets."""

LEAST_S = 1.0
"""The shortest interval that is chosen, in seconds."""

_STALL_SHARE, _WRITING_SHARE = 1e-3, 0.1
_FIRST_STALL_SHARE, _FIRST_WRITING_SHARE = 1e-2, 0.25


def optimal_interval_s(stall_s: float, mean_time_to_failure_s: float, recovery_s: float) -> float:
    """The interval between two saves with which a run makes the most progress.

    In an interval ``Tc`` the training stands still for ``Ts`` and advances for ``Tc - Ts``. A failure comes after
    ``Tf`` on average; it costs ``Tr`` until the training advances again, and half an interval of work. So the part of
    the time in which the run advances is ``(1 - Ts / Tc) * Tf / (Tf + Tr + Tc / 2)``, which is largest at

        Tc = Ts + sqrt(2 (Tf + Tr) Ts + Ts^2)        (arXiv 2410.18124)

    Args:
        stall_s: ``Ts``: for how long a save holds the training up; work in the background does not count.
        mean_time_to_failure_s: ``Tf``, for example from :func:`mean_time_to_failure_s`.
        recovery_s: ``Tr``: from a failure until the training is at the step of the loaded checkpoint.

    Returns:
        Seconds from the beginning of a save to the beginning of the next. Zero if a save costs nothing: then only the
        time that a save takes bounds the interval.

    """
    return stall_s + math.sqrt(2 * (mean_time_to_failure_s + recovery_s) * stall_s + stall_s**2)


def mean_time_to_failure_s(world_size: int, failures: int, observed_s: float) -> float:
    """The mean time for which a run of this size trains until a failure ends it.

    Failures are assumed to come at a constant rate for each rank. Before the first failure of a run, the rate is that
    of Meta's research clusters: 7.9 hours between two failures at 1,024 GPUs (arXiv 2410.21680), which is 337 days for
    a single GPU. This prior has the weight of one observed failure, as each failure of the run itself has (the mean of
    a gamma posterior distribution). So after a few failures the run's own rate dominates.

    Args:
        world_size: Number of ranks of the run.
        failures: Number of failures that the run has had.
        observed_s: Seconds over which they were observed, in all attempts together.
    """
    expected_s = _PRIOR_MEAN_TIME_S * _PRIOR_RANKS / world_size
    return (expected_s + observed_s) / (1 + failures)


def chosen_interval_s(stall_s: float, writing_s: float, mean_time_to_failure_s: float, recovery_s: float) -> float:
    """The interval of local saves if the user gives none.

    It is the optimal interval, but at most the interval at which stalls take a thousandth of the time: such cheap saves
    need not be rarer, and a failure then loses only seconds. It is at least a second, and at least ten times as long as
    a save takes to complete: a writer that is always busy takes cores, memory bandwidth and network from the training.

    Args:
        stall_s: See :func:`optimal_interval_s`.
        writing_s: Seconds for which threads, network and store are busy with a save.
        mean_time_to_failure_s: See :func:`optimal_interval_s`.
        recovery_s: See :func:`optimal_interval_s`.
    """
    best_s = optimal_interval_s(stall_s, mean_time_to_failure_s, recovery_s)
    return max(min(best_s, stall_s / _STALL_SHARE), writing_s / _WRITING_SHARE, LEAST_S)


def growing_interval_s(before_s: float, stall_s: float, writing_s: float, chosen_s: float) -> float:
    """The interval after one of the first saves: twice the previous interval, up to the chosen one.

    Failures are most frequent after a start (the rate at which machines of LANL fail decreases with the time since the
    last failure: Schroeder and Gibson, DSN 2006; a new script fails early too), but how frequent is unknown. With
    intervals that double, a failure at any time loses at most half of the training since the first save, plus half the
    first interval; fewer saves cannot ensure that. In the first interval the training stands still for at most a
    hundredth of the time, and the writer is busy for at most a quarter. The chosen interval is at most ten times as
    long, so this adds at most four saves, regardless of their cost.

    Args:
        before_s: The previous interval; 0 after the first save.
        stall_s: See :func:`optimal_interval_s`.
        writing_s: See :func:`chosen_interval_s`.
        chosen_s: See :func:`chosen_interval_s`.

    Example::

        >>> interval_s, of_all = 0.0, []
        >>> for _ in range(6):
        ...     interval_s = growing_interval_s(interval_s, stall_s=0.02, writing_s=0.1, chosen_s=20.0)
        ...     of_all.append(interval_s)
        >>> of_all
        [2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    """
    first_s = max(stall_s / _FIRST_STALL_SHARE, writing_s / _FIRST_WRITING_SHARE, LEAST_S)
    return min(chosen_s, max(first_s, 2 * before_s))
