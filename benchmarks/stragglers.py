"""What ``StragglerDetection`` costs: in a healthy step, and on rank 0 for one report, of up to 100,000 ranks.

The first table is made as in ``overhead.py``: the callback is switched off and on every 10 steps of one run. The second
one is what rank 0 has to do with what the ranks have sent it, here made up, beside NVRx's ``ReportGenerator``, whose
comm are replaced in the same way: each gives at once what a process group would give, and makes the same tensors
for it. The third one scores all kernels of all ranks at once, for which a report has no need.

The second and the third table are of the time that the thread has computed, so that a busy machine does not count.

    python benchmarks/stragglers.py [--only step|report|matrix] [--steps 4000] [--repeat 3] [--ranks 512 4096]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from overhead import EveryStepWithSeveralRanks, measure, ours_on, row

from lightning_resilience import Preemption, StragglerDetection, wandb_panels
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.stragglers.scores import scores
from lightning_resilience.detect.stragglers.step_timer import SECTIONS, Sample
from lightning_resilience.detect.stragglers.stragglers import Comm, History, Kernels, Report, make_report
from lightning_resilience.fit.straggler_reports import _formatted


def step(steps: int, repeat: int) -> None:
    variants: dict[str, Callable[[], list[L.Callback]]] = {
        "an empty Callback": lambda: [L.Callback()],
        "Preemption": lambda: [Preemption()],
        "StragglerDetection": lambda: [StragglerDetection()],
        "the same, in steps that are timed": lambda: [EveryStepWithSeveralRanks()],
    }
    runs: dict[str, list[Any]] = {name: [] for name in variants}
    for _ in range(repeat):
        for name, make in variants.items():
            runs[name].append(measure(make, steps, ours_on))
    print(f"{'callback':42} {'bare step':>10} {'added':>9} {'added CPU':>10}")
    for name, of_variant in runs.items():
        _, base, added, cpu = row(name, of_variant)
        print(f"{name:42} {base:7.0f} us {added:6.1f} us {cpu:7.1f} us", flush=True)


class Ranks:
    """What many ranks have measured, as far as rank 0 gets to see it."""

    def __init__(self, count: int, kernels: int, slow: int) -> None:
        chosen = random.Random(1)
        self.count = count
        self.names = [
            f"void at::native::vectorized_elementwise_kernel<{number}, at::native::CUDAFunctor_add<float>>(int, float*)"
            for number in range(kernels)
        ]
        self.medians = [chosen.uniform(1e-5, 1e-3) for _ in self.names]
        self.totals = [median * chosen.randint(100, 1000) for median in self.medians]
        self.places = [DeviceId(f"node-{rank // 8:05}", f"GPU 00000000-{rank % 8}") for rank in range(count)]
        generator = torch.Generator().manual_seed(1)
        self.speed = torch.rand(count, generator=generator, dtype=torch.float64) * 0.2 + 0.8
        self.speed[torch.randperm(count, generator=generator)[:slow]] = 0.5
        self.generator = generator

    def ours(self) -> Callable[[], Report]:
        """Makes a report, as rank 0 does."""
        kernels = dict(zip(self.names, zip(self.medians, self.totals, strict=True), strict=True))
        sample = Sample.of(torch.rand(1000, len(SECTIONS), generator=self.generator, dtype=torch.float64))
        history = History("device")
        matrix = torch.rand(self.count, 4 + 2 * len(SECTIONS), generator=self.generator, dtype=torch.float64)
        matrix[:, :3] = self.speed[:, None]
        matrix[:, 3] = 0.01
        matrix[:, 4 : 4 + len(SECTIONS)] = 0.1 / self.speed[:, None]
        sent = [each.clone() for each in matrix]

        def gather(own: torch.Tensor) -> torch.Tensor:
            room = [torch.empty_like(own) for _ in range(self.count)]
            assert room[0].shape == sent[0].shape
            return torch.stack(sent).cpu()

        comm = Comm(lambda tensor: tensor * 0.9, gather, lambda tensor: tensor)

        def made() -> Report:
            report = make_report(1, self.places, sample, Kernels.of(kernels), history, comm)
            assert report is not None
            return report

        return made

    def nvrx(self) -> Callable[[], Any] | None:
        """Makes NVRx's report of the same kernels and as many sections; ``None`` where NVRx is not installed."""
        for package in ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler"):
            try:
                reporting, mapper, comm, summaries = (
                    importlib.import_module(f"{package}.{name}")
                    for name in ("reporting", "name_mapper", "dist_utils", "statistics")
                )
                break
            except ImportError:
                continue
        else:
            return None
        kind = summaries.Statistic
        kernels = {
            name: {kind.MED: median, kind.NUM: 100, kind.AVG: total / 100}
            for name, median, total in zip(self.names, self.medians, self.totals, strict=True)
        }
        sections = {name: {kind.MED: 0.1, kind.NUM: 100, kind.AVG: 0.1} for name in SECTIONS}
        # Two scores of the kernels, two of each section.
        matrix = self.speed[:, None].expand(-1, 2 + 2 * len(SECTIONS)).float()
        sent = [each.clone() for each in matrix]

        def gather_object(value: Any, group: Any) -> list[Any]:
            if isinstance(value[0], int):
                return [(rank, place.node) for rank, place in enumerate(self.places)]
            return [value] * self.count  # nothing is unpickled: a process group takes longer

        def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
            room = [torch.empty_like(tensor) for _ in range(self.count)]
            for rank in range(self.count):
                room[rank] = sent[rank].to(tensor.device)
            return room

        replaced = {
            "get_world_size": lambda group: self.count,
            "get_rank": lambda group: 0,
            "all_reduce": lambda tensor, op=None, group=None, async_op=False: tensor.mul_(0.9),
            "gather_on_rank0": gather,
            "all_gather_object": gather_object,
            "is_all_true": lambda flag, group=None: flag,
        }
        for name, function in replaced.items():
            for module in (comm, mapper):
                if hasattr(module, name):
                    setattr(module, name, function)
        generator = reporting.ReportGenerator(["relative_perf_scores", "individual_perf_scores"])
        return lambda: generator.generate_report(sections, kernels)


def took(function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.thread_time()
    result = function()
    return time.thread_time() - began, result


def often(function: Callable[[], Any], repeat: int) -> float:
    return statistics.median(took(function)[0] for _ in range(repeat))


def identified(report: Report) -> int:
    return len(report.slow("relative", 0.7)) + len(report.slow("individual", 0.7))


def report(counts: Sequence[int], kernels: int, slow_ranks: int, repeat: int, nvrx_up_to: int) -> None:
    columns = ("first", "then", "slow ranks", "text", "W&B", "NVRx first", "then", "slow ranks", "faster first", "then")
    print(f"{'ranks':>8}" + "".join(f"{column:>13}" for column in columns))
    for count in counts:
        ranks = Ranks(count, kernels, slow_ranks)
        made = ranks.ours()
        first, found = took(made)
        then = often(made, repeat)
        slow = found.slow("relative", 0.7)
        assert {each.rank for each in slow} == set((ranks.speed < 0.7).nonzero().flatten().tolist())
        panels = wandb_panels.Panels()

        def text(found: Report = found) -> list[str]:
            return [_formatted(each, found.device_ids, 5) for each in (found.relative, found.individual)]

        def shown(found: Report = found, panels: Any = panels, slow: Any = slow) -> Any:
            panels._remember(found, 1)
            return wandb_panels._rows(found, slow)

        naming = often(lambda found=found: identified(found), repeat)  # type: ignore[misc]
        numbers = [first, then, naming, often(text, repeat), often(shown, repeat)]
        line = f"{count:8,}" + "".join(f"{1000 * each:10.2f} ms" for each in numbers)
        theirs = ranks.nvrx() if count <= nvrx_up_to else None
        if theirs is not None:
            their_first, their_report = took(theirs)
            their_then = often(theirs, repeat)
            their_naming = often(their_report.identify_stragglers, repeat)
            line += "".join(f"{1000 * each:10.1f} ms" for each in (their_first, their_then, their_naming))
            line += f"{(their_first + their_naming) / (first + naming):12.1f}x"
            line += f"{(their_then + their_naming) / (then + naming):12.1f}x"
        print(line, flush=True)


def matrix(counts: Sequence[int], kernels: int, repeat: int, chunk: int) -> None:
    print(f"\n{'ranks':>8} {'numbers':>12} {'at once':>12} {f'{chunk:,} ranks at a time':>24}")
    for count in counts:
        medians, weights = (torch.rand(count, kernels, dtype=torch.float64) for _ in range(2))

        def at_once(medians: torch.Tensor = medians, weights: torch.Tensor = weights) -> torch.Tensor:
            return scores(medians, weights, medians.amin(0))

        def in_chunks(medians: torch.Tensor = medians, weights: torch.Tensor = weights) -> torch.Tensor:
            parts = list(zip(medians.split(chunk), weights.split(chunk), strict=True))
            reference = torch.stack([each.amin(0) for each, _ in parts]).amin(0)
            return torch.cat([scores(each, weight, reference) for each, weight in parts])

        assert torch.equal(at_once(), in_chunks())
        whole, parts = often(at_once, repeat), often(in_chunks, repeat)
        print(f"{count:8,} {medians.numel():12,} {1000 * whole:9.1f} ms {1000 * parts:21.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["step", "report", "matrix"])
    parser.add_argument("--steps", type=int, default=4000, help="of each run of the first table")
    parser.add_argument("--repeat", type=int, default=3, help="of each measurement")
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 4096, 32_768, 100_000])
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument("--slow", type=int, default=10, help="how many of the ranks are slow in each report")
    parser.add_argument("--nvrx-up-to", type=int, default=100_000, help="ranks for which NVRx is measured too")
    parser.add_argument("--chunk", type=int, default=1024, help="ranks that are scored at a time in the third table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning_resilience"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.only in (None, "step"):
        step(arguments.steps, arguments.repeat)
    if arguments.only in (None, "report"):
        print()
        report(arguments.ranks, arguments.kernels, arguments.slow, arguments.repeat, arguments.nvrx_up_to)
    if arguments.only in (None, "matrix"):
        matrix(arguments.ranks, arguments.kernels, arguments.repeat, arguments.chunk)


if __name__ == "__main__":
    main()
