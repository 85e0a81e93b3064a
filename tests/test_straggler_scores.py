"""Scores, reports and what they are made of: own time and waiting, without a Trainer."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nan, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.hangs import comm_wait as waits
from lightning_resilience.detect.hangs.comm_wait import CommWaitTimer
from lightning_resilience.detect.stragglers.scores import lost, scores
from lightning_resilience.detect.stragglers.step_timer import (
    CALLBACKS,
    COMPUTE,
    DATA,
    NO_SECTION,
    SECTIONS,
    DeviceStepTimer,
    HostStepTimer,
    Sample,
    SamplingWindow,
)
from lightning_resilience.detect.stragglers.stragglers import (
    Comm,
    History,
    Kernels,
    Kind,
    Period,
    Report,
    Straggler,
    Streaks,
    _kernel_id,
    make_report,
)
from tests.harness import CONTEXT

INF = math.inf
T = TypeVar("T")
Times = Mapping[str, tuple[float, float]]
"""The median and the total time of each kernel."""


def of(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def rows(*lines: Sequence[float]) -> Tensor:
    return torch.tensor(lines, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True)


def places(count: int) -> list[DeviceId]:
    return [DeviceId(f"node-{rank // 2}", f"device {rank}") for rank in range(count)]


class Together:
    """Ranks that are threads, and what they give each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.own = threading.local()
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._given: list[Any] = [None] * ranks

    def all(self, value: T) -> list[T]:
        """Gives a value; returns those of all ranks."""
        self._given[self.own.rank] = value
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def tensors(self, tensor: Tensor) -> list[Tensor]:
        given = self.all(tensor)
        assert len({(each.dtype, each.shape) for each in given}) == 1, "a process group would not get over this"
        return given

    def exchange(self) -> Comm:
        def gather(tensor: Tensor) -> Tensor | None:
            given = self.tensors(tensor)
            return torch.stack(given) if self.own.rank == 0 else None

        return Comm(
            lambda tensor: torch.stack(self.tensors(tensor)).amin(0),
            gather,
            lambda tensor: self.tensors(tensor)[0],
        )

    def run(self, target: Callable[[int], T]) -> list[T]:
        """Calls it once for every rank, at the same time; returns what the calls returned."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = target(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors
        return [results[rank] for rank in range(self.ranks)]


def reports(
    rounds: Sequence[Sequence[Times | None]], samples: Sequence[Sample] | None = None, histories: Any = None
) -> list[Report]:
    """What rank 0 makes of each round of kernels, given for every rank, in the order of that rank."""
    together = Together(len(rounds[0]))
    histories = histories or [History("device") for _ in rounds[0]]
    samples = samples or [Sample.of(rows([1, 1, 1])) for _ in rounds[0]]

    def rank(number: int) -> list[Report | None]:
        return [
            make_report(
                step,
                places(together.ranks),
                samples[number],
                None if (times := kernels[number]) is None else Kernels.of(times),
                histories[number],
                together.exchange(),
            )
            for step, kernels in enumerate(rounds)
        ]

    made, *others = together.run(rank)
    assert not any(any(each) for each in others), "rank 0 alone has a report"
    found = [each for each in made if each is not None]
    assert len(found) == len(rounds)
    return found


def test_the_ranks_that_are_threads_tell_when_one_of_them_gives_something_else() -> None:
    together = Together(2)
    with pytest.raises(AssertionError, match="get over"):
        together.run(lambda rank: together.tensors(torch.ones(1 + rank)))


# -- the same scores as NVRx's -----------------------------------------------------------------------------------------


Scores = tuple[dict[int, float], dict[int, float]]


@pytest.fixture
def nvrx(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Sequence[Times]]], list[Scores]]:
    """NVRx's relative and individual scores of each round, by rank; its ranks are threads."""
    for package in ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler"):
        try:
            reporting, mapper, collectives, statistics = (
                importlib.import_module(f"{package}.{name}")
                for name in ("reporting", "name_mapper", "dist_utils", "statistics")
            )
            break
        except ImportError:
            continue
    else:
        pytest.skip("NVRx is not installed")
    statistic = statistics.Statistic

    def of_rounds(rounds: Sequence[Sequence[Times]]) -> list[Scores]:
        together = Together(len(rounds[0]))

        def reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
            assert op == dist.ReduceOp.MIN
            tensor.copy_(torch.stack(together.all(tensor.clone())).amin(0))

        replaced = {
            "get_world_size": lambda group: together.ranks,
            "get_rank": lambda group: together.own.rank,
            "all_reduce": reduce,
            "gather_on_rank0": lambda tensor, group=None: together.all(tensor),
            "all_gather_object": lambda value, group: together.all(value),
            "is_all_true": lambda flag, group=None: all(together.all(flag)),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(collectives, name, function)
            if hasattr(mapper, name):
                monkeypatch.setattr(mapper, name, function)

        def rank(number: int) -> list[Any]:
            generator = reporting.ReportGenerator(["relative_perf_scores", "individual_perf_scores"])
            made = []
            for kernels in rounds:
                summaries = {
                    name: {statistic.MED: median, statistic.NUM: 8, statistic.AVG: total / 8}
                    for name, (median, total) in kernels[number].items()
                }
                made.append(generator.generate_report({}, summaries))
            return made

        return [(each.gpu_relative_perf_scores, each.gpu_individual_perf_scores) for each in together.run(rank)[0]]

    return of_rounds


def random_rounds(seed: int, ranks: int = 5, kernels: int = 40, count: int = 3) -> list[list[Times]]:
    chosen = random.Random(seed)
    names = [f"void kernel<{number}>(float const*, int)" for number in range(kernels)]
    usual = {name: 10 ** chosen.uniform(-6, -2) for name in names}

    def times() -> Times:
        order = chosen.sample(names, kernels)
        medians = {name: usual[name] * chosen.uniform(1, 3) for name in order}
        return {name: (median, median * chosen.uniform(1, 400)) for name, median in medians.items()}

    return [[times() for _ in range(ranks)] for _ in range(count)]


@pytest.mark.nvrx
@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_nvrx(nvrx: Callable[[Any], list[Scores]], seed: int) -> None:
    rounds = random_rounds(seed)
    for ours, (relative, individual) in zip(reports(rounds), nvrx(rounds), strict=True):
        assert ours.relative.tolist() == pytest.approx([*relative.values()], rel=1e-5)  # theirs are of 32 bits
        assert ours.individual.tolist() == pytest.approx([*individual.values()], rel=1e-5)
        assert len({round(score, 3) for score in relative.values()}) > 1, "the scores differ from rank to rank"
    assert min(individual.values()) < 0.95, "ranks were faster before"


@pytest.mark.nvrx
def test_a_rank_without_kernels_spoils_nobodys_score(nvrx: Callable[[Any], list[Scores]]) -> None:
    rounds: list[list[Times]] = [[{"a": (1.0, 8.0)}, {"a": (2.0, 8.0)}, {}]]
    relative, individual = nvrx(rounds)[0]
    assert [*map(math.isnan, relative.values())] == [True, True, True], "as it is in NVRx"
    assert [*map(math.isnan, individual.values())] == [False, False, True]
    (report,) = reports(rounds)
    close(report.relative, of(1, 0.5, nan))
    close(report.individual, of(1, 1, nan))


@pytest.mark.nvrx
def test_a_kernel_that_a_rank_does_not_run_is_compared_among_the_others(nvrx: Callable[[Any], list[Scores]]) -> None:
    both: Times = {"a": (1.0, 4.0), "b": (1.0, 4.0)}
    rounds: list[list[Times]] = [[both, {"a": (1.0, 4.0), "b": (4.0, 12.0)}, {"a": (1.0, 4.0)}]]
    assert [*nvrx(rounds)[0][0].values()] == [1, 1, 1], "NVRx leaves the kernel out"
    (report,) = reports(rounds)
    close(report.relative, of(1, (4 * 1 + 12 * 0.25) / 16, 1))


# -- scores ------------------------------------------------------------------------------------------------------------


def fastest(medians: Tensor) -> Tensor:
    return medians.nan_to_num(nan=INF).amin(dim=0)


def test_a_score_weighs_signals_by_the_time_that_goes_into_them() -> None:
    medians, weights = rows([1, 4], [2, 4]), rows([10, 30], [20, 20])
    close(fastest(medians), of(1, 4))
    close(scores(medians, weights, fastest(medians)), of(1, 0.75))
    close(lost(medians, weights, fastest(medians)), rows([0, 0], [0.25, 0]))


def test_unknown_numbers_count_for_nothing() -> None:
    medians = rows([1, nan, nan], [2, nan, 3], [nan, nan, nan])
    weights = rows([1, 5, 5], [1, nan, 1], [0, 0, 0])
    close(fastest(medians), of(1, INF, 3))
    close(scores(medians, weights, fastest(medians)), of(1, 0.75, nan))
    close(lost(medians, weights, fastest(medians)), rows([0, 0, 0], [0.25, 0, 0], [0, 0, 0]))
    for unknown in (nan, INF):
        close(scores(of(1, 2), of(3, 1), of(unknown, 1)), torch.tensor(0.5, dtype=torch.float64))
        close(scores(of(1, 2), of(3, 1), of(unknown, unknown)), torch.tensor(nan, dtype=torch.float64))
        close(lost(of(1, 2), of(3, 1), of(unknown, 1)), of(0, 0.5))


def test_what_takes_no_time_is_as_fast_as_can_be() -> None:
    medians = rows([0, 1], [0, 2])
    close(scores(medians, rows([0, 1], [0, 2]), fastest(medians)), of(1, 0.5))
    close(scores(medians, rows([1, 1], [1, 1]), fastest(medians)), of(1, 0.75))
    close(scores(rows([0], [3]), rows([1], [1]), of(0)), of(1, 0))
    close(scores(of(0), of(1), of(5)), torch.tensor(1.0, dtype=torch.float64))


def test_nobody_is_faster_than_the_reference() -> None:
    close(scores(of(1, 2), of(1, 1), of(3, 1)), torch.tensor(0.75, dtype=torch.float64))
    close(lost(of(1, 2), of(1, 1), of(3, 1)), of(0, 0.25))


def test_one_rank_is_the_fastest() -> None:
    medians = rows([0.5, 2, nan])
    close(scores(medians, rows([1, 1, 1]), fastest(medians)), of(1))


def test_all_ranks_at_once_are_what_each_rank_is_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    medians, weights = (torch.rand(6, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    medians[torch.rand(6, 11, generator=generator) < 0.2] = nan
    reference = fastest(medians)
    together = scores(medians, weights, reference)
    for rank in range(6):
        close(scores(medians[rank], weights[rank], reference), together[rank])
    close(1 - lost(medians, weights, reference).sum(-1), together)
    own = medians.nan_to_num(nan=INF) / 2
    close(scores(medians, weights, own), torch.full((6,), 0.5, dtype=torch.float64))


# -- what a rank was like before ---------------------------------------------------------------------------------------


def test_the_best_is_remembered() -> None:
    history = History("gpu 1")
    assert history.state_dict()["sections"] == [INF, INF, INF]
    history.observe(Sample.of(rows([1, 2, 3])))
    close(history.observe(Sample(of(2, 1, nan), torch.tensor(0.0), 1)), of(1, 1, 3))
    close(history.observe_kernels(Kernels.of({"a": (2, 1), "b": (3, 1)})), of(2, 3))
    close(history.observe_kernels(Kernels.of({"c": (5, 1), "b": (1, 1), "a": (4, 1)})), of(5, 1, 2))
    assert history.kernels == {_kernel_id("a"): 2, _kernel_id("b"): 1, _kernel_id("c"): 5}
    close(history.observe_kernels(Kernels.of({"c": (6, 1)})), of(5))
    close(history.observe_kernels(Kernels.of({"a": (3, 1)})), of(2))


def test_what_is_remembered_is_plain_and_comes_back_on_the_same_device() -> None:
    history = History("gpu 1")
    history.observe(Sample.of(rows([1, 2, 3])))
    history.observe_kernels(Kernels.of({"a": (2, 1)}))
    state = json.loads(json.dumps(history.state_dict()))
    same, other = History("gpu 1"), History("gpu 2")
    same.load_state_dict(state)
    assert same.state_dict() == history.state_dict()
    assert {each.min_value.dtype for each in (same.total, *same.sections)} == {torch.float64}
    other.load_state_dict(state)
    assert other.state_dict() == History("gpu 2").state_dict()


def test_sections_that_are_others_now_are_forgotten() -> None:
    history = History("gpu 1")
    history.load_state_dict({"device": "gpu 1", "sections": [1.0], "kernels": {"a": 1.0}})
    assert history.state_dict() == History("gpu 1").state_dict()


def test_nothing_was_seen_yet() -> None:
    history = History("gpu 1")
    history.load_state_dict(json.loads(json.dumps(history.state_dict())))
    close(history.observe(Sample.of(torch.empty(0, 3))), of(INF, INF, INF))
    close(history.observe_kernels(Kernels.of({})), of())


def test_a_kernel_without_a_time_is_not_remembered() -> None:
    history = History("gpu 1")
    history.observe_kernels(Kernels.of({"a": (nan, 0)}))
    close(history.observe_kernels(Kernels.of({"a": (2, 1)})), of(2))


# -- reports -----------------------------------------------------------------------------------------------------------


def report(
    relative: Sequence[float],
    step_relative: Sequence[float] | None = None,
    by_section: Sequence[Sequence[float]] | None = None,
    noise: float = 0.0,
) -> Report:
    """With individual scores that are as the relative ones, of the ranks in the other order."""
    ranks = len(relative)
    whole, step = of(*relative), of(*(step_relative or relative))
    sections = rows(*(by_section or [[0, 0, 0]] * ranks))
    return Report(
        7,
        places(ranks),
        whole,
        whole.flip(0),
        step,
        step.flip(0),
        torch.full((ranks,), noise),
        torch.ones(ranks, 3),
        sections,
        sections.flip(0),
        of_kernels=step_relative is not None,
    )


def test_the_slowest_comes_first() -> None:
    found = report([0.5, 1.0, 0.2, 0.69, 0.7, 0.4]).slow("relative", 0.7)
    assert [each.rank for each in found] == [2, 5, 0, 3]
    assert [each.score for each in found] == pytest.approx([0.2, 0.4, 0.5, 0.69])
    assert {each.kind for each in found} == {"relative"}
    assert [each.device_id for each in found] == [places(6)[rank] for rank in (2, 5, 0, 3)]


def test_each_kind_has_its_own_scores() -> None:
    made = report([0.5, 1.0, 1.0], by_section=[[0, 0, 0.5], [0, 0, 0], [0, 0, 0]])
    assert [(each.rank, each.kind, each.cause) for each in made.slow("relative", 0.7)] == [(0, "relative", "callbacks")]
    assert [(each.rank, each.kind, each.cause) for each in made.slow("individual", 0.7)] == [
        (2, "individual", "callbacks")
    ]


def test_the_cause_is_the_section_that_loses_most() -> None:
    by_section = [[0.3, 0.1, 0.2], [0.1, 0.3, 0.2], [0.1, 0.2, 0.3]]
    found = report([0.4, 0.41, 0.42], by_section=by_section).slow("relative", 0.7)
    assert [each.cause for each in found] == [*SECTIONS]
    assert str(found[0]) == "rank 0 on node-0 (device 0) at 0.40 of the other ranks' speed, in data loading"
    assert "of its own best speed" in str(report([0.4, 1.0]).slow("individual", 0.7)[0])


def test_where_only_kernels_are_slow_the_cause_is_computing() -> None:
    made = report([0.5, 0.5, nan, 0.9], [0.9, 0.3, 0.4, 0.6], [[0.1, 0, 0], [0, 0, 0.7], [0.6, 0, 0], [0.4, 0, 0]])
    assert [(each.rank, each.score, each.cause) for each in made.slow("relative", 0.7)] == [
        (1, pytest.approx(0.3), "callbacks"),
        (2, pytest.approx(0.4), "data loading"),
        (0, pytest.approx(0.5), "compute"),
        (3, pytest.approx(0.6), "data loading"),
    ]


def test_where_only_kernels_were_measured_the_cause_is_computing() -> None:
    assert report([0.5, 1.0], [nan, nan]).slow("relative", 0.7)[0].cause == "compute"


def test_a_rank_is_slow_only_beyond_the_noise_of_its_steps() -> None:
    """A score of 0.5 is surely below 0.7 if it is known to 14 %, twice."""
    scores = [0.5, 1.0, 0.6]
    assert [each.rank for each in report(scores, noise=0.14).slow("relative", 0.7)] == [0]
    assert report(scores, noise=0.15).slow("relative", 0.7) == []
    assert report(scores, noise=0.6).slow("relative", 0.7) == []
    found = report(scores, scores, noise=0.6).slow("relative", 0.7)  # the medians of kernels have none
    assert [(each.rank, each.cause) for each in found] == [(0, "compute"), (2, "compute")]


def test_the_others_wait_for_the_slowest_straggler() -> None:
    """For no longer than it is behind the slowest of them, and no longer than they were measured to wait."""
    totals = [1.0, 1.2, 3.0, 5.0, nan]

    def waiting(waited: Sequence[float], *slow: int, kind: Kind = "relative") -> tuple[int, float] | None:
        made = replace(report([nan] * 5), seconds=rows(*[[each, 0, 0] for each in totals]), waited=of(*waited))
        return made.waiting([Straggler(rank, made.device_ids[rank], kind, 0.5, "compute") for rank in slow])

    assert waiting([9, 9, 9, 9, 9], 2, 3) == (3, pytest.approx(3.8))
    assert waiting([1.8, 1, 9, 9, 9], 2, 3) == (3, pytest.approx(1.4))
    assert waiting([9, 9, 9, 9, 9], 3) == (3, pytest.approx(2.0)), "than the other slow rank, which is none"
    assert waiting([9, 9, 9, 9, 9], 0) is None, "only its kernels are slow"
    assert waiting([9, 9, 9, 9, 9], 3, kind="individual") is None
    assert waiting([nan, 0, 0, 9, 9], 3) is None
    assert report([nan] * 5).waiting([Straggler(3, places(1)[0], "relative", 0.5, "compute")]) is None


def test_of_the_batches_of_a_period_those_of_new_steps_count() -> None:
    period = Period(10, reached=16)
    period.batches = 40
    assert (period.new_batches(10), period.new_batches(14), period.new_batches(20)) == (0, 0, 16)
    period = Period(20, reached=16)
    period.batches = 5
    assert period.new_batches(25) == 5


def test_a_score_that_is_unknown_is_not_below_anything() -> None:
    made = report([nan, 1.0, nan])
    assert made.slow("relative", 1.0) == made.slow("individual", 1.0) == []
    assert made.missing == [0, 2]
    assert report([1.0]).missing == []


def test_a_rank_whose_steps_were_measured_is_not_missing() -> None:
    made = reports([[{}, {"a": (1.0, 1.0)}]])[0]
    assert not torch.isnan(made.step_relative).any()
    assert made.missing == []


def straggler(rank: int, kind: Any = "relative") -> Straggler:
    return Straggler(rank, DeviceId("node", f"device {rank}"), kind, 0.5, "compute")


def test_once_is_enough() -> None:
    streaks = Streaks(1)
    assert streaks.of([straggler(3)]) == [straggler(3)]
    assert streaks.of([]) == []
    assert streaks.of([straggler(3), straggler(1)]) == [straggler(3), straggler(1)]


def test_twice_in_a_row() -> None:
    streaks = Streaks(2)
    named = [[each.rank for each in streaks.of([*map(straggler, ranks)])] for ranks in ([1, 2], [2], [1, 2], [1], [1])]
    assert named == [[], [2], [2], [1], [1]]


def test_kinds_are_counted_apart() -> None:
    streaks = Streaks(2)
    assert streaks.of([straggler(1, "relative")]) == []
    assert streaks.of([straggler(1, "individual")]) == []
    both = [straggler(1, "individual"), straggler(1, "relative")]
    assert streaks.of(both) == [straggler(1, "individual")]
    assert streaks.of(both) == both


# -- a report of several ranks -----------------------------------------------------------------------------------------


def test_one_rank_alone() -> None:
    history = History("device")
    for seconds, individual in ((1.0, 1.0), (2.0, 0.5)):
        made = make_report(3, places(1), Sample.of(rows([seconds] * 3)), None, history, Comm())
        assert made is not None
        assert (made.step, made.relative.tolist(), made.individual.tolist()) == (3, [1], [individual])
        close(made.seconds, rows([seconds] * 3))
        assert made.elapsed > 0


def test_sections_of_several_ranks() -> None:
    """The middle one is the reference: of four the second fastest, of two the fastest."""
    seconds = [[1, 4, 1], [5, 4, 1], [1, 4, 3], [0, 4, 1]]
    samples = [Sample.of(rows(*[each] * 2)) for each in seconds]
    histories = [History(str(rank)) for rank in range(4)]
    histories[1].observe(Sample.of(rows([5, 2, 1])))
    made = reports([[None] * 4], samples, histories)[0]
    close(made.relative, of(1, 0.6, 0.75, 1))
    close(made.relative, made.step_relative)
    close(made.individual, of(1, 0.8, 1, 1))
    close(made.individual, made.step_individual)
    close(made.seconds, rows(*seconds))
    close(made.relative_lost, rows([0, 0, 0], [0.4, 0, 0], [0, 0, 0.25], [0, 0, 0]))
    close(made.individual_lost, rows([0, 0, 0], [0, 0.2, 0], [0, 0, 0], [0, 0, 0]))
    assert [(each.rank, each.cause) for each in made.slow("relative", 0.7)] == [(1, "data loading")]
    assert list(made.device_ids) == places(4)


VARIED: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "by half, evenly": lambda g, ranks, steps: 0.5 + torch.rand(ranks, steps, generator=g),
    "by a third": lambda g, ranks, steps: torch.exp(0.3 * torch.randn(ranks, steps, generator=g)),
    "one in ten takes three times as long": lambda g, ranks, steps: (
        1 + 2.0 * (torch.rand(ranks, steps, generator=g) < 0.1)
    ),
}


@pytest.mark.parametrize("varied", VARIED.values(), ids=VARIED.keys())
@pytest.mark.parametrize(("ranks", "steps"), [(4, 10), (64, 20), (64, 200)])
@pytest.mark.slow_but_for("4-10-by a third")
def test_healthy_ranks_whose_steps_vary_are_not_slow(
    varied: Callable[[torch.Generator, int, int], Tensor], ranks: int, steps: int
) -> None:
    """In 20 reports, of which one may be wrong; and one at half its speed is found where there are steps enough."""
    wrong = found = 0
    for seed in range(20):
        seconds = varied(torch.Generator().manual_seed(seed), ranks, steps).double()
        seconds[0] *= 2
        samples = [Sample.of(torch.stack([0 * of_rank, of_rank, 0 * of_rank], 1)) for of_rank in seconds]
        slow = {each.rank for each in reports([[None] * ranks], samples)[0].slow("relative", 0.7)}
        wrong += bool(slow - {0})
        found += 0 in slow
    assert wrong <= 1
    assert found == 20 or steps < 200


def test_ranks_that_are_fast_at_different_things_are_equally_fast() -> None:
    made = reports([[None] * 2], [Sample.of(rows([10, 20, 0])), Sample.of(rows([20, 10, 0]))])[0]
    close(made.relative, of(1, 1))
    assert made.slow("relative", 0.7) == []


def test_a_wait_that_was_not_noticed_accuses_nobody() -> None:
    """One rank is slow with its data; the others wait for it while they compute, and nothing says so."""
    samples = [Sample.of(rows([1, 40, 1]))] * 7 + [Sample.of(rows([21, 20, 1]))]
    made = reports([[None] * 8], samples)[0]
    assert made.slow("relative", 0.7) == []


@pytest.mark.parametrize(("count", "late_every"), [(100, 4), (1000, 8), (12, 2)])
def test_a_loader_that_is_late_now_and_then_counts_and_one_long_pause_does_not(count: int, late_every: int) -> None:
    steps = [[0.3 if step % late_every == 0 else 0.0, 0.02, 0.001] for step in range(count)]
    sample = Sample.of(torch.tensor(steps, dtype=torch.float64))
    assert float(sample.total) == pytest.approx(0.3 / late_every + 0.021, rel=0.4)
    calm = torch.tensor([[0.001, 0.02, 0.001]] * count, dtype=torch.float64)
    calm[count // 2, 2] = 60.0
    assert float(Sample.of(calm).total) == pytest.approx(0.022)


def test_kernels_in_any_order_and_some_unknown_to_rank_0() -> None:
    """Relative scores are of what rank 0 runs, individual ones of what the rank itself does."""
    first: list[Times] = [
        {"a": (1.0, 1.0), "b": (2.0, 4.0), "only here": (1.0, 9.0)},
        {"new": (3.0, 3.0), "b": (4.0, 4.0), "a": (1.0, 4.0)},
        {"b": (1.0, 1.0)},
        {"other": (1.0, 1.0)},
    ]
    second: list[Times] = [
        first[0],
        {"a": (1.0, 4.0), "new": (6.0, 4.0), "b": (4.0, 4.0)},
        {"a": (2.0, 1.0), "new": (9.0, 9.0), "b": (2.0, 3.0)},
        {"other": (4.0, 1.0)},
    ]
    one, two = reports([first, second])
    close(one.relative, of((1 + 4 * 0.5 + 9) / 14, (4 * 0.25 + 4) / 8, 1, nan))
    close(one.individual, of(1, 1, 1, 1))
    close(two.relative, of(1, (4 + 4 * 0.5) / 8, (0.5 * 1 + 3) / 4, nan))
    close(two.individual, of(1, (4 + 4 * 0.5 + 4) / 12, (1 + 9 + 3 * 0.5) / 13, 0.25))
    close(two.step_relative, of(1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_each_run_a_part(seed: int) -> None:
    """Beside the same numbers in one matrix, in rank 0's order."""
    chosen = random.Random(seed)
    rounds = [
        [dict(chosen.sample([*times.items()], chosen.randint(0, 40))) for times in of_ranks]
        for of_ranks in random_rounds(seed)
    ]
    for made, of_ranks in zip(reports(rounds), rounds, strict=True):
        own = [[times.get(name, (nan, 0)) for name in of_ranks[0]] for times in of_ranks]
        medians, weights = torch.tensor(own, dtype=torch.float64).reshape(len(of_ranks), -1, 2).unbind(-1)
        close(made.relative, scores(medians, weights, fastest(medians)))


def test_rank_0_without_kernels() -> None:
    made = reports([[{}, {"a": (1.0, 1.0)}], [{}, {"a": (2.0, 1.0)}]])[1]
    close(made.relative, of(nan, nan))
    close(made.individual, of(nan, 0.5))


def test_a_rank_without_steps_is_missing_and_nobody_else_minds() -> None:
    nothing = Sample(of(nan, nan, nan), torch.tensor(nan).double(), 0)
    made = reports([[None] * 3], [Sample.of(rows(*[[1, 1, 1]] * 2)), nothing, Sample.of(rows(*[[1, 2, 1]] * 2))])[0]
    close(made.relative, of(1, nan, 0.75))
    close(made.individual, of(1, nan, 1))
    close(made.seconds[1], of(nan, nan, nan))
    close(made.relative_lost[1], of(0, 0, 0))
    assert made.missing == [1]
    assert made.slow("relative", 1.0)[0].rank == 2


def test_a_sample_of_no_steps_is_of_the_same_type_as_others() -> None:
    clock = Clock()
    idle = HostStepTimer(CommWaitTimer(clock=clock), SamplingWindow(), clock).take()
    close(idle.typical, of(nan, nan, nan))
    made = reports([[None] * 2], [Sample.of(rows([1, 1, 1])), idle])[0]
    close(made.relative, of(1, nan))


# -- own time, by the host's clock -------------------------------------------------------------------------------------


class Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waiting(clock: Clock) -> CommWaitTimer:
    return CommWaitTimer(clock=clock)


def step(clock: Clock, timed: HostStepTimer, data: float, compute: float, callbacks: float) -> None:
    timed.begin()
    clock.sleep(data)
    timed.enter(CALLBACKS)
    clock.sleep(callbacks / 4)
    timed.enter(COMPUTE)
    clock.sleep(compute)
    timed.enter(CALLBACKS)
    clock.sleep(callbacks * 3 / 4)


def test_the_host_tells_sections_apart(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    for data, compute, callbacks in ((1, 2, 4), (3, 2, 8), (2, 8, 16)):
        step(clock, timed, data, compute, callbacks)
    timed.begin()
    sample = timed.take()
    close(sample.typical, of(1, 2, 4))
    assert sample.steps == 3


def test_a_step_is_complete_when_the_next_one_begins(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    step(clock, timed, 1, 2, 4)
    assert timed.take().steps == 0
    clock.sleep(3)  # such as a validation
    timed.begin()
    sample = timed.take()
    close(sample.typical, of(1, 2, 7))
    assert (sample.steps, timed.take().steps) == (1, 0)


def test_waiting_is_nobodys_own_time(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    timed.begin()
    for section, own in ((DATA, 1), (COMPUTE, 2), (CALLBACKS, 4)):
        timed.enter(section)
        clock.sleep(own + 10)
        waiting.seconds += 10
    timed.enter(NO_SECTION)
    clock.sleep(5)
    waiting.seconds += 5  # in a validation
    timed.begin()
    sample = timed.take()
    close(sample.typical, of(1, 2, 4))
    assert sample.waited == 30


def test_every_third_step(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(every=3), clock)
    for number in range(1, 10):
        step(clock, timed, number, 1, 0)
    timed.begin()
    sample = timed.take()
    assert sample.steps == 3
    close(sample.typical, of(3, 1, 0))


@pytest.mark.parametrize(
    ("seconds", "share"), [(0.001, 32 / 1172), (0.01, 32 / 118), (0.03, 32 / 40), (0.04, 1), (5, 1)]
)
def test_of_short_steps_as_many_are_timed_as_a_report_needs(clock: Clock, seconds: float, share: float) -> None:
    """And 32 of them in a row."""
    sampling = SamplingWindow(until_report=300.0, clock=clock)
    taken = []
    for _ in range(10_000):
        taken.append(sampling.samples_next())
        clock.sleep(seconds)
    assert sum(taken) == pytest.approx(len(taken) * share, rel=0.12)
    lengths = [len(list(group)) for timed, group in itertools.groupby(taken) if timed]
    assert set(lengths[:-1]) <= {32}
    assert len(lengths) == 1 or share < 1


def test_a_report_is_made_of_no_more_than_is_remembered(clock: Clock) -> None:
    sampling = SamplingWindow(until_report=300.0, clock=clock)
    taken = 0
    for _ in range(300_000):
        taken += sampling.samples_next()
        clock.sleep(0.001)
    assert 7_900 < taken <= 8192


def test_a_dropped_step_does_not_count(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    timed.enter(COMPUTE)  # before any step began
    step(clock, timed, 1, 1, 1)
    step(clock, timed, 1000, 1, 1)
    timed.drop()
    timed.enter(CALLBACKS)
    clock.sleep(500)
    step(clock, timed, 3, 1, 1)
    timed.begin()
    sample = timed.take()
    assert sample.steps == 2


def test_the_host_remembers_so_many_steps(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    for number in range(10_001):
        timed.begin()
        clock.sleep(number)
    sample = timed.take()
    assert sample.steps == 8192
    close(sample.typical[:1], of(10_000 - 8192 + 63 * 32 + 15.5))  # the 64th of 256 blocks


def test_what_else_a_node_has_to_do_does_not_count() -> None:
    """As long as a quarter of the blocks of steps are without it."""
    close(Sample.of(rows([3, 2, 9], [1, 2, 3])).typical, of(1, 2, 3))
    steps = [[1.0, 1.0, 1.0]] * 40 + [[1.0, 9.0, 1.0]] * 60
    close(Sample.of(rows(*steps)).typical, of(1, 1, 1))


def test_a_validation_is_no_part_of_a_step(clock: Clock, waiting: CommWaitTimer) -> None:
    timed = HostStepTimer(waiting, SamplingWindow(), clock)
    step(clock, timed, 1, 2, 4)
    timed.enter(NO_SECTION)
    clock.sleep(50)
    timed.enter(CALLBACKS)
    clock.sleep(1)
    timed.begin()
    close(timed.take().typical, of(1, 2, 5))


# -- own time, by events of a device -----------------------------------------------------------------------------------


class Device:
    """Has a clock of its own, and gets later to what it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[Event] = []

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def event(self) -> Event:
        return Event(self)

    def catch_up(self, events: int | None = None) -> None:
        for each in self.events[:events]:
            each.happened = True


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.happened = False

    def record(self) -> None:
        self.at = self.device.now
        self.device.events.append(self)

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, end: Event) -> float:
        assert self.happened, "one that has not happened has no time"
        assert end.happened, "one that has not happened has no time"
        return (end.at - self.at) * 1000


def device_step(device: Device, timed: DeviceStepTimer, data: float, compute: float, callbacks: float) -> None:
    timed.begin()
    device.compute(data)
    timed.enter(COMPUTE)
    device.compute(compute)
    timed.enter(CALLBACKS)
    device.compute(callbacks)


def test_the_device_tells_sections_apart() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    for numbers in ((1, 2, 4), (3, 2, 8), (2, 8, 16)):
        device_step(device, timed, *numbers)
    timed.begin()
    assert timed.take().steps == 0, "the host does not wait"
    device.catch_up()
    sample = timed.take()
    assert sample.steps == 3
    close(sample.typical, of(1, 2, 4))
    assert timed.take().steps == 0


def test_steps_are_taken_as_far_as_the_device_is() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    for number in range(4):
        device_step(device, timed, number, 1, 1)
    device.catch_up(6)  # all of the second step but for its end
    assert timed.take().steps == 1
    device.catch_up(7)
    close(timed.take().typical, of(1, 1, 1))
    device.catch_up()
    close(timed.take().typical, of(2, 1, 1))


class LateDevice:
    """Does what it is told steps after the host has said so. An event has no time until then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: deque[float | LateDevice.Event] = deque()

    class Event:
        at: float | None = None

        def __init__(self, device: LateDevice) -> None:
            self.device = device

        def record(self) -> None:
            self.device.told.append(self)

        def query(self) -> bool:
            return self.at is not None

        def elapsed_time(self, end: LateDevice.Event) -> float:
            assert self.at is not None, "read before its time"
            assert end.at is not None, "read before its time"
            return (end.at - self.at) * 1000

    def event(self) -> LateDevice.Event:
        return self.Event(self)

    def compute(self, seconds: float) -> None:
        self.told.append(seconds)

    def go_on(self, until_left: int) -> None:
        while len(self.told) > until_left:
            what = self.told.popleft()
            if isinstance(what, float | int):
                self.now += what
            else:
                what.at = self.now


@pytest.mark.parametrize("late", [0, 1, 3, 8])
def test_delays_of_a_device_that_is_steps_behind_the_host(late: int) -> None:
    device = LateDevice()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    known, in_a_step = [], 0
    for _ in range(20):
        timed.begin()
        known.append(len(timed))
        device.compute(0.25)
        timed.enter(COMPUTE)
        device.compute(0.5)
        timed.wait(True)
        device.compute(4)  # for other ranks
        timed.wait(False)
        device.compute(1)
        timed.enter(CALLBACKS)
        device.compute(0.125)
        in_a_step = in_a_step or len(device.told)
        device.go_on(late * in_a_step)
    # The last event of a step is the first one of the next.
    assert known == [max(0, step - late - 1) for step in range(20)]
    sample = timed.take()
    assert sample.steps == 20 - 1 - late
    close(sample.typical, of(0.25, 1.5, 0.125))
    timed.begin()
    device.go_on(0)
    close(timed.take().typical, of(0.25, 1.5, 0.125))
    assert not timed.take().steps


def test_a_later_step_that_is_ready_waits_for_an_earlier_one() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    for number in range(3):
        device_step(device, timed, number, 1, 1)
    timed.begin()
    for each in device.events[3:]:
        each.happened = True  # as of another stream
    device.events[3].happened = False
    assert timed.take().steps == 0
    device.catch_up()
    assert timed.take().steps == 3


def test_a_host_that_is_far_ahead_loses_the_oldest() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    for number in range(100):
        device_step(device, timed, number, 1, 1)
    timed.begin()
    device.catch_up()
    sample = timed.take()
    assert sample.steps == 64
    close(sample.typical[:1], of(55))  # the mean of 49 to 61, the second of five blocks


def test_a_device_that_waits_does_not_compute() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    timed.wait(True)  # a backward pass of nobody's step, which has failed
    timed.begin()
    device.compute(1)
    timed.enter(COMPUTE)
    for own, others in ((2, 10), (3, 20)):
        device.compute(own)
        timed.wait(True)
        device.compute(others)
        timed.wait(True)  # a collective that DDP waits for
        device.compute(others)
        timed.wait(False)
        device.compute(others)
        timed.wait(False)
    device.compute(4)
    timed.enter(CALLBACKS)
    device.compute(0.5)
    timed.wait(True)
    device.compute(7)
    timed.wait(False)
    device.compute(0.25)
    timed.enter(NO_SECTION)
    timed.wait(True)  # in a validation
    device.compute(100)
    timed.wait(False)
    timed.begin()
    device.catch_up()
    sample = timed.take()
    close(sample.typical, of(1, 9, 0.75))
    assert sample.waited == pytest.approx(10 * 3 + 20 * 3 + 7)


def test_every_other_step_of_a_device() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow(every=2))
    for number in range(1, 7):
        device_step(device, timed, number, 1, 0)
        timed.wait(True)
        timed.wait(False)
    timed.begin()
    device.catch_up()
    sample = timed.take()
    assert sample.steps == 3
    close(sample.typical, of(2, 1, 0))
    assert len(device.events) == 3 * 6, "a step that is not timed has no events"


def test_a_dropped_step_of_a_device_does_not_count() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    device_step(device, timed, 1, 1, 1)
    device_step(device, timed, 1000, 1, 1)
    timed.drop()
    timed.enter(CALLBACKS)
    device_step(device, timed, 3, 1, 1)
    timed.begin()
    device.catch_up()
    sample = timed.take()
    assert sample.steps == 2


def test_a_device_is_remembered_for_so_many_steps() -> None:
    device = Device()
    timed = DeviceStepTimer(device.event, SamplingWindow())
    for number in range(8200):
        device_step(device, timed, number, 1, 1)
        device.catch_up()
        device.events.clear()
    timed.begin()
    device.catch_up()
    sample = timed.take()
    assert sample.steps == 8192
    close(sample.typical[:1], of(8 + 63 * 32 + 15.5))


class Streams:
    """A device with two streams, each with a clock of its own, one of which is the current one."""

    def __init__(self) -> None:
        class Stream:
            """As a device's module has it."""

            now = 0.0

            def wait_event(self, event: Event) -> None:
                self.now = max(self.now, event.at)

        self.kind = Stream
        self.main, self.side = Stream(), Stream()
        self.current = self.main

    def event(self) -> Any:
        streams = self

        class Mark(Event):
            def record(self, stream: Any = None) -> None:
                self.at = (stream or streams.current).now
                self.happened = True

        return Mark(None)  # type: ignore[arg-type]


def test_a_stream_that_waits_for_a_collective_in_another_one_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers in a stream of its own, and has that of the step wait for an event of it."""
    streams = Streams()
    others_s = 0.0

    def gather(tensor: Any) -> None:
        streams.current.now += 0.5 + others_s

    monkeypatch.setattr(functional, "wait_tensor", gather)
    timed = DeviceStepTimer(streams.event, SamplingWindow(), lambda: streams.current)
    waiting = CommWaitTimer(timed.wait, streams=streams.kind)
    before = vars(streams.kind)["wait_event"]
    waiting.start()

    def arrived(seconds: float) -> Any:
        """An event of the side stream, which has copied something for so long."""
        streams.side.now = max(streams.side.now, streams.main.now) + seconds
        event = streams.event()
        event.record(streams.side)
        return event

    found = []
    for others_s, collective in ((0.0, False), (7.0, True), (30.0, True)):
        for _ in range(3):
            timed.begin()
            streams.main.wait_event(arrived(2))  # such as data that are copied: no collective
            timed.enter(COMPUTE)
            streams.main.now += 1
            if collective:
                streams.side.now, streams.current = streams.main.now, streams.side
                functional.wait_tensor(None)
                streams.side.wait_event(arrived(0))
                held = streams.event()
                held.record(streams.side)
                if others_s == 7:
                    streams.current = streams.main
                streams.main.wait_event(held)
                streams.current = streams.main
            streams.main.now += 2
            timed.enter(CALLBACKS)
        timed.begin()
        timed.drop()
        found.append(timed.take().typical.tolist())
    waiting.stop()
    assert found == [[2, 3, 0]] * 3
    assert vars(streams.kind)["wait_event"] is before


def test_streams_that_are_written_in_c_are_left_alone() -> None:
    waiting = CommWaitTimer(lambda begins: None, streams=torch.Stream)
    waiting.start()
    waiting.stop()


# -- waiting: what is counted ------------------------------------------------------------------------------------------


@pytest.fixture
def slow_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each wait for a collective takes 2 seconds."""
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: clock.sleep(2))
    monkeypatch.setattr(torch.distributed.Work, "wait", lambda self: clock.sleep(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("slow_wait")
def test_collectives_count_from_start_to_stop(waiting: CommWaitTimer) -> None:
    before = torch.distributed.Work.wait, functional.wait_tensor
    dist.barrier()
    waiting.start()
    assert waiting.seconds == 0
    dist.all_reduce(torch.ones(1))
    assert waiting.seconds == 2
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.barrier()
    functional.wait_tensor(torch.ones(1))
    assert waiting.seconds == 8
    waiting.stop()
    dist.barrier()
    assert waiting.seconds == 8
    assert before == (torch.distributed.Work.wait, functional.wait_tensor)
    other = CommWaitTimer()
    other.start()
    its = torch.distributed.Work.wait, functional.wait_tensor
    waiting.stop()
    assert its == (torch.distributed.Work.wait, functional.wait_tensor), "what has stopped leaves others alone"
    other.stop()
    assert before == (torch.distributed.Work.wait, functional.wait_tensor)


@pytest.mark.usefixtures("slow_wait")
def test_what_another_thread_waits_for_does_not_count(waiting: CommWaitTimer) -> None:
    waiting.start()
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()
    assert waiting.seconds == 0
    dist.barrier()
    waiting.stop()
    assert waiting.seconds == 2


LOCAL = {
    *("rank", "size", "name", "get_group_store", "boxed", "unbox", "group_desc", "group_name", "get_backend"),
    *("_id", "_backend_id", "_get_backend", "_get_backend_name", "_has_hooks", "_get_sequence_number_for_group"),
    *("set_timeout", "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name"),
    *("_set_sequence_number_for_group", "_enable_collectives_timing", "_start_coalescing"),
    *("_register_on_completion_hook", "register_abort_hook", "unregister_abort_hook", "register_pre_hook"),
    *("unregister_pre_hook", "register_post_hook", "unregister_post_hook", "get_reconfigure_handle", "new_window"),
    # In which ranks may wait for each other, but in no step.
    *("split_group", "merge_remote_group", "abort", "shutdown", "_wait_for_pending_works"),
    "monitored_barrier",  # of torch.distributed is the one that counts
}
"""Methods of a process group that begin no collective, in any version from 2.8 on."""


def test_every_method_of_a_process_group_is_known_to_be_a_collective_or_none() -> None:
    found = waits.collectives()
    others = {
        name
        for name, value in vars(dist.ProcessGroup).items()
        if callable(getattr(dist.ProcessGroup, name)) and not isinstance(value, type) and not name.startswith("__")
    }
    assert others - {*found} - LOCAL - {"_pybind11_conduit_v1_"} == set(), "is it one that ranks wait in?"
    assert not LOCAL & {*found}
    assert {"allreduce", "broadcast", "barrier", "send", "recv", "_end_coalescing", "allreduce_coalesced"} <= {*found}


def test_a_backward_pass_in_a_thread_of_autograd_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of every accelerator. On a CPU only passes that lie deeper within each other than the stack may be."""
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: clock.sleep(2))
    marks: list[bool] = []
    threads: list[int] = []

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Tensor, depth: int) -> Tensor:
            context.depth = depth
            return tensor.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if context.depth:
                with torch.enable_grad():
                    inner = Within.apply(torch.ones(1, requires_grad=True), context.depth - 1).sum()
                Variable._execution_engine.run_backward(
                    (inner,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            else:
                threads.append(threading.get_ident())
                functional.wait_tensor(gradient)
            return gradient, None

    waiting = CommWaitTimer(marks.append, clock)
    waiting.start()
    Within.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    waiting.stop()
    assert threads != [threading.get_ident()]
    assert waiting.seconds == 2
    assert marks == [True, False, True, False], "the wait, and the end of the pass"


def test_waits_of_two_threads_of_autograd_count_as_long_as_either_waits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model on two devices."""
    entered, left = threading.Event(), threading.Event()

    def wait_tensor(name: str) -> None:
        clock.sleep(1)
        if name == "outer":
            entered.set()
            assert left.wait(60)
        clock.sleep(1)

    monkeypatch.setattr(functional, "wait_tensor", wait_tensor)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    waiting = CommWaitTimer(clock=clock)
    waiting.start()
    thread = threading.Thread(target=lambda: functional.wait_tensor("outer"))
    thread.start()
    assert entered.wait(60)
    functional.wait_tensor("inner")
    left.set()
    thread.join()
    waiting.stop()
    assert waiting.seconds == 4


def test_a_wait_that_fails_counts_too(clock: Clock, waiting: CommWaitTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(tensor: Any) -> None:
        clock.sleep(3)
        raise RuntimeError("a rank has died")

    monkeypatch.setattr(functional, "wait_tensor", failing)
    waiting.start()
    with pytest.raises(RuntimeError, match="died"):
        functional.wait_tensor(torch.ones(1))
    waiting.stop()
    assert waiting.seconds == 3


# -- waiting: the backward pass ----------------------------------------------------------------------------------------


class Reduced:
    """A parameter whose gradient takes a second to compute; when it is there, something waits for the other ranks."""

    def __init__(self, clock: Clock, wait: Callable[[], object]) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.before: Callable[[], object] = lambda: None

        def computed(gradient: Tensor) -> None:
            self.before()
            clock.sleep(1)
            Variable._execution_engine.queue_callback(wait)  # as DDP does

        self.weight.register_hook(computed)

    def loss(self) -> Tensor:
        return (self.weight * 2).sum()


def test_what_comes_behind_the_own_gradients_is_waiting(clock: Clock) -> None:
    marks: list[tuple[bool, float]] = []
    waiting = CommWaitTimer(lambda begins: marks.append((begins, clock())), clock)
    module = Reduced(clock, lambda: clock.sleep(5))
    waiting.start()
    for number in (1, 2):
        clock.now = 0
        loss = module.loss()
        loss.backward()
        assert waiting.seconds == 5 * number
        assert marks == [(True, 1), (False, 6)] * number
    waiting.stop()
    close(module.weight.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


def test_two_passes_from_one_loss(clock: Clock) -> None:
    marks: list[tuple[bool, float]] = []
    waiting = CommWaitTimer(lambda begins: marks.append((begins, clock())), clock)
    module = Reduced(clock, lambda: clock.sleep(5))
    clock.now = 0
    loss = module.loss()
    waiting.start()
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
    waiting.stop()
    assert waiting.seconds == 15
    assert not loss._backward_hooks
    assert marks == [(True, 1), (False, 6), (True, 7), (False, 12), (True, 13), (False, 18)]


@pytest.mark.usefixtures("slow_wait")
def test_collectives_in_a_backward_pass_count_once(clock: Clock, waiting: CommWaitTimer) -> None:
    def wait() -> None:
        dist.barrier()
        clock.sleep(1)

    module = Reduced(clock, wait)
    module.before = dist.barrier  # such as one that gathers parameters, before the own gradients are there
    waiting.start()
    loss = module.loss()
    loss.backward()
    waiting.stop()
    assert waiting.seconds == 2 + 3


def test_a_backward_pass_that_fails_is_forgotten(clock: Clock, waiting: CommWaitTimer) -> None:
    module = Reduced(clock, lambda: clock.sleep(5))

    def fails() -> None:
        raise RuntimeError("out of memory")

    waiting.start()
    module.before = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        module.loss().backward()
    assert waiting.seconds == 0
    module.before = lambda: None
    module.loss().backward()
    waiting.stop()
    assert waiting.seconds == 5


@pytest.mark.parametrize("mark", [None, lambda begins: None])
def test_collectives_work_as_before_when_it_is_over(mark: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            waiting = CommWaitTimer(mark)
            waiting.start()
            dist.barrier()
            waiting.stop()
            tensor = torch.ones(2)
            dist.barrier()
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            dist.broadcast(tensor, 0)
            dist.all_gather_object([None], 3)
            assert (functional.all_reduce(tensor, "sum", dist.group.WORLD) * 2).tolist() == [2, 2]
    finally:
        dist.destroy_process_group()


def test_a_pass_within_a_pass(clock: Clock, waiting: CommWaitTimer) -> None:
    """Reentrant checkpointing: what DDP waits for is then part of the inner one."""
    module = Reduced(clock, lambda: clock.sleep(5))

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                torch.autograd.backward(module.loss())
            clock.sleep(2)
            return gradient

    waiting.start()
    before = clock()
    Within.apply(torch.ones(1, requires_grad=True)).sum().backward()
    waiting.stop()
    assert waiting.seconds == 5
    assert clock() - before == 8


@pytest.mark.parametrize("given", [iter, tuple, list, lambda roots: map(torch.clone, roots)])
def test_roots_in_any_form(clock: Clock, waiting: CommWaitTimer, given: Callable[[Any], Any]) -> None:
    modules = [Reduced(clock, lambda: clock.sleep(5)) for _ in range(2)]
    waiting.start()
    torch.autograd.backward(given([module.loss() for module in modules]))
    waiting.stop()
    assert waiting.seconds == 10
    for module in modules:
        close(module.weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("within", [lambda edge: edge, lambda edge: [edge]])
def test_a_pass_that_begins_at_an_edge(clock: Clock, waiting: CommWaitTimer, within: Callable[[Any], Any]) -> None:
    """As in pipelines."""
    module = Reduced(clock, lambda: clock.sleep(5))
    waiting.start()
    torch.autograd.backward(within(get_gradient_edge(module.loss())), torch.ones(()))
    waiting.stop()
    assert waiting.seconds == 5
    close(module.weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_a_leaf_and_a_tensor_without_gradients(waiting: CommWaitTimer) -> None:
    leaf = torch.ones((), requires_grad=True)
    waiting.start()
    leaf.backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    waiting.stop()
    assert leaf.grad == 1


@pytest.mark.usefixtures("slow_wait")
def test_a_pass_while_it_waits_counts_once(
    clock: Clock, waiting: CommWaitTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Reduced(clock, lambda: clock.sleep(5))
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: module.loss().backward())
    waiting.start()
    functional.wait_tensor(torch.ones(1))
    waiting.stop()
    assert waiting.seconds == 6


def test_what_others_have_put_around_it_stays(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on without ours, as two of ours do that stop in the order in which they have started."""
    monkeypatch.setattr(functional, "wait_tensor", original := lambda tensor: clock.sleep(2))
    first, second = CommWaitTimer(clock=clock), CommWaitTimer(clock=clock)
    first.start()
    second.start()
    first.stop()
    functional.wait_tensor(torch.ones(1))
    assert (first.seconds, second.seconds) == (0, 2)
    second.stop()
    monkeypatch.setattr(functional, "wait_tensor", original)
    first = CommWaitTimer(clock=clock)
    first.start()
    ours = functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", others := lambda tensor: ours(tensor))
    first.stop()
    assert functional.wait_tensor is others
    functional.wait_tensor(torch.ones(1))
    assert first.seconds == 0


def test_compiled_backward_passes_are_left_alone(
    clock: Clock, waiting: CommWaitTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Reduced(clock, lambda: clock.sleep(5))
    monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", SimpleNamespace(compiled_autograd_enabled=True))
    waiting.start()
    module.loss().backward()
    waiting.stop()
    assert waiting.seconds == 0


def test_collectives_of_compiled_code_compile_as_before() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    waiting = CommWaitTimer()
    waiting.start()
    try:

        @torch.compile(backend="aot_eager", fullgraph=True)
        def doubled(tensor: Tensor) -> Tensor:
            return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)

        close(doubled(torch.ones(2)) + 0, torch.full((2,), 2.0))
    finally:
        waiting.stop()
        dist.destroy_process_group()
        torch.compiler.reset()


# -- waiting: real ranks -----------------------------------------------------------------------------------------------

NAP_S = 0.3
Step = Callable[[Callable[[], None], CommWaitTimer], None]
"""One step: naps where it is told to nap."""


class Naps(torch.autograd.Function):
    """Naps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, nap: Callable[[], None]) -> Tensor:
        ctx.nap = nap
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.nap()
        return gradient, None


class Napper(nn.Module):
    """Naps in the middle of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tensor: Tensor, nap: Callable[[], None]) -> Tensor:
        return self.two(Naps.apply(self.one(tensor), nap)).sum()


def reduces() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        dist.all_reduce(torch.ones(2))

    return run


def reduces_later() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()

    return run


def gathers_objects() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        dist.all_gather_object([None, None], {"some": "thing"})

    return run


def waits_for_a_future() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

    return run


def is_functional() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        tensor = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert (tensor * 2).tolist() == [4, 4]  # waits at first use

    return run


def ddp() -> Step:
    model = DistributedDataParallel(Napper())

    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        loss = model(torch.ones(2, 4), nap)
        loss.backward()

    return run


def accumulates() -> Step:
    """A nap in the first pass; only in the last one do the ranks meet."""
    model = DistributedDataParallel(Napper())

    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                loss = model(torch.ones(2, 4), nap if number == 0 else lambda: None)
                loss.backward()

    return run


def recomputes() -> Step:
    """With reentrant checkpointing DDP waits in a backward pass within the backward pass."""
    model = DistributedDataParallel(Recomputed())

    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        loss = model(torch.ones(2, 4, requires_grad=True), nap)
        loss.backward()

    return run


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, batch: Tensor, nap: Callable[[], None]) -> Tensor:
        nap()
        return checkpoint(self.one, batch, use_reentrant=True).sum()


def has_buffers() -> Step:
    """DDP hands out rank 0's buffers when a forward pass begins."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()

    return run


def coalesces() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))

    return run


def sends_and_receives() -> Step:
    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        other = 1 - dist.get_rank()
        sent, received = dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.ones(2), other)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return run


def redistributes() -> Step:
    mesh = dist.init_device_mesh("cpu", (2,))

    def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
        nap()
        whole = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        assert (whole.to_local() * 2).tolist() == [2] * 4

    return run


def fsdp2(where: str) -> Callable[[], Step]:
    def prepared() -> Step:
        model = Napper()
        for each in (model.one, model.two, model):
            fully_shard(each, mesh=dist.init_device_mesh("cpu", (2,)))

        def run(nap: Callable[[], None], waiting: CommWaitTimer) -> None:
            if where == "forward":
                nap()
            model(torch.ones(2, 4), nap if where == "backward" else lambda: None).backward()

        return run

    return prepared


STEPS: dict[str, tuple[Callable[[], Step], int]] = {
    "all_reduce": (reduces, 1),
    "all_reduce that is waited for later": (reduces_later, 1),
    "all_gather_object": (gathers_objects, 1),
    "future of a collective": (waits_for_a_future, 1),
    "functional collective": (is_functional, 1),
    "coalesced collectives": (coalesces, 1),
    "batch_isend_irecv": (sends_and_receives, 1),
    "DTensor": (redistributes, 1),
    "DDP": (ddp, 1),
    "DDP, the first rank": (ddp, 0),
    "DDP that accumulates": (accumulates, 1),
    "DDP with buffers": (has_buffers, 0),
    "DDP that recomputes": (recomputes, 1),
    "FSDP2, forward pass": (fsdp2("forward"), 1),
    "FSDP2, backward pass": (fsdp2("backward"), 1),
}
"""And which rank naps."""


ONE, TWO, OBJECTS = torch.ones(2), torch.ones(4), [{"some": "thing"}, None]
CALLS: dict[str, Callable[[], object]] = {
    "all_gather": lambda: dist.all_gather([ONE.clone(), ONE.clone()], ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(TWO.clone(), ONE),
    "all_gather_coalesced": lambda: dist.all_gather_coalesced([[ONE.clone()], [ONE.clone()]], [ONE]),
    "all_gather_object": lambda: dist.all_gather_object([None, None], OBJECTS),
    "all_reduce": lambda: dist.all_reduce(ONE.clone()),
    "all_reduce, async": lambda: dist.all_reduce(ONE.clone(), async_op=True).wait(),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([ONE.clone(), TWO.clone()]),
    "all_to_all": lambda: dist.all_to_all([ONE[:1].clone(), ONE[:1].clone()], [*ONE.split(1)]),
    "all_to_all_single": lambda: dist.all_to_all_single(TWO.clone(), TWO),
    "barrier": lambda: dist.barrier(),
    "broadcast": lambda: dist.broadcast(ONE.clone(), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([*OBJECTS], 0),
    "gather": lambda: dist.gather(ONE, None if dist.get_rank() else [ONE.clone(), ONE.clone()]),
    "gather_object": lambda: dist.gather_object(OBJECTS, None if dist.get_rank() else [None, None]),
    "reduce": lambda: dist.reduce(ONE.clone(), 0),
    "reduce_scatter": lambda: dist.reduce_scatter(ONE.clone(), [ONE, ONE]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ONE.clone(), TWO),
    "scatter": lambda: dist.scatter(ONE.clone(), None if dist.get_rank() else [ONE, ONE]),
    "scatter_object_list": lambda: dist.scatter_object_list([None], [*OBJECTS], 0),
    "send and recv": lambda: dist.recv(ONE.clone(), 1) if not dist.get_rank() else dist.send(ONE, 0),
    "recv of anybody": lambda: dist.recv(ONE.clone()) if not dist.get_rank() else dist.send(ONE, 0),
    "batch_isend_irecv": lambda: sends_and_receives()(lambda: None, CommWaitTimer()),
    "coalesced all_reduce": lambda: coalesces()(lambda: None, CommWaitTimer()),
    "DTensor": lambda: redistributes()(lambda: None, CommWaitTimer()),
    "DDP": lambda: ddp()(lambda: None, CommWaitTimer()),
    "FSDP2": lambda: fsdp2("forward")()(lambda: None, CommWaitTimer()),
}
"""Calls of the public API of torch.distributed, as far as gloo can."""


def unmarked(call: Callable[[], object]) -> list[str]:
    """Which methods of a process group it calls that begin a collective while no wait is marked."""
    depth = 0
    found = []

    def mark(begins: bool) -> None:
        nonlocal depth
        depth += 1 if begins else -1

    def watched(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any, **kwargs: Any) -> object:
            result = method(*args, **kwargs)
            if isinstance(result, dist.Work) and depth == 0:
                found.append(name)
            return result

        called.__doc__ = method.__doc__
        return called

    waiting = CommWaitTimer(mark)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in [*vars(dist.ProcessGroup).items()]:
            method = getattr(dist.ProcessGroup, name)
            if callable(method) and not isinstance(value, type) and not name.startswith("__"):
                patch.setattr(dist.ProcessGroup, name, watched(name, method))
        waiting.start()
        try:
            call()
        finally:
            waiting.stop()
    assert depth == 0
    return found


def is_told_apart(waited: Sequence[float], napper: int) -> bool:
    """Whether the other rank has waited for the nap, and the one that napped has not."""
    return waited[1 - napper] > NAP_S / 2 > waited[napper]


def rank_of_two(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    waited = {}
    for name, (prepare, napper) in STEPS.items():
        run = prepare()
        for _ in range(3):  # DDP makes its buckets anew in the second step
            run(lambda: None, CommWaitTimer())
        for _ in range(5):  # a busy machine makes a rank nap that should not
            dist.barrier()
            before = torch.distributed.Work.wait, functional.wait_tensor
            waiting = CommWaitTimer()
            waiting.start()
            try:
                run((lambda: time.sleep(NAP_S)) if rank == napper else (lambda: None), waiting)
            finally:
                waiting.stop()
            assert before == (torch.distributed.Work.wait, functional.wait_tensor)
            both = [0.0, 0.0]
            dist.all_gather_object(both, waiting.seconds)
            waited[name] = both
            if is_told_apart(both, napper):
                break
    missed = {name: unmarked(call) for name, call in CALLS.items()}
    (folder / f"{rank}.json").write_text(json.dumps({"waited": waited, "missed": missed}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks have to tell, of which one naps in each step."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [CONTEXT.Process(target=rank_of_two, args=(rank, folder)) for rank in range(2)]
    for each in processes:
        each.start()
    try:
        for each in processes:
            each.join(240)
        assert [each.exitcode for each in processes] == [0, 0]
    finally:
        for each in processes:
            each.kill()
            each.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", STEPS)
def test_the_other_rank_has_waited_and_the_slow_one_has_not(two_ranks: list[dict[str, Any]], kind: str) -> None:
    waited = two_ranks[0]["waited"][kind]
    assert is_told_apart(waited, STEPS[kind][1]), waited


@pytest.mark.parametrize("call", CALLS)
def test_the_device_is_marked_as_waiting_in_every_collective(two_ranks: list[dict[str, Any]], call: str) -> None:
    assert [rank["missed"][call] for rank in two_ranks] == [[], []]
