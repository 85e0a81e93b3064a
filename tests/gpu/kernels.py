"""NVRx's profiler of kernels (CUPTI): what it sees, what it costs, and whether it lives beside others."""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import StragglerDetection, _nvrx
from tests.gpu.overhead import Timer
from tests.gpu.runner import Bench, check
from tests.gpu.training import Module, batches, network

NEEDS = "CUPTI"


def profiled(straggler: StragglerDetection) -> bool:
    return straggler.report is not None and straggler.report.of_kernels


@check("CUPTI sees the kernels of a step, also those that are under way when it stops", limit_s=120, needs_gpu=NEEDS)
def cupti_kernels(bench: Bench) -> None:
    profiler, problem = _nvrx.kernel_profiler()
    if profiler is None:
        bench.skip(str(problem))
        return
    net = network(512, 4, norm=True).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, seen = torch.randn(64, 512, device="cuda"), {}
    for waits in (True, False):
        for _ in range(3 + 20):
            if hasattr(profiler, "allow"):
                profiler.allow(1e6)
            profiler.start()
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()
            if waits:
                torch.cuda.synchronize()
            profiler.stop()
            torch.cuda.synchronize()
        seen[waits] = set(profiler.take())
    bench.figure("kernels by name, waiting before the stop", len(seen[True]))
    bench.figure("without waiting", len(seen[False]))
    bench.expect(bool(seen[True]), "no kernel is seen")
    bench.expect(len(seen[False]) > 0.5 * len(seen[True]), "most kernels are missed where nobody waits", timing=True)


@check("what a profiled step pays, and what one does that is not", limit_s=180, needs_gpu=NEEDS)
def cupti_cost(bench: Bench) -> None:
    if (problem := _nvrx.kernel_profiler()[1]) is not None:
        bench.skip(problem)
    ms: dict[str, list[float]] = {}
    for number in range(3):
        for backend in ("none", "timer", "auto", "cupti"):
            callbacks: list[L.Callback] = [timer := Timer(bench.device, 20, 420)]
            if backend != "none":
                run_dir = bench.folder / f"{backend} {number}"
                callbacks.insert(
                    0,
                    StragglerDetection(report_time_interval=3600, backend=backend, run_dir=run_dir),  # type: ignore
                )
            trainer = bench.device.trainer(callbacks, bench.folder)
            trainer.fit(Module(network(256, 4)), batches(430, 256))
            ms.setdefault(backend, []).append(timer.ms)
    for backend, found in ms.items():
        bench.figure(f"ms per step, {backend}", statistics.median(found))
    more = statistics.median(ms["cupti"]) - statistics.median(ms["none"])
    bench.expect(more < 0.3, f"CUPTI takes {more:.2f} ms of every step", timing=True)


@check(
    "CUPTI works in the second fit of a process, and beside PyTorch's profiler nothing breaks",
    limit_s=180,
    needs_gpu=NEEDS,
)
def cupti_again(bench: Bench) -> None:
    if (problem := _nvrx.kernel_profiler()[1]) is not None:
        bench.skip(problem)
    for title, options, must_work in (
        ("first fit", {}, True),
        ("second fit", {}, True),
        ("with profiler", {"profiler": "pytorch"}, False),
        ("after", {}, False),  # PyTorch's has taken CUPTI over; that is said, once
    ):
        straggler = StragglerDetection(report_time_interval=0.5, backend="cupti", run_dir=bench.folder / title)
        trainer = bench.device.trainer([straggler, Lasts()], bench.folder, max_epochs=-1, **options)
        try:
            trainer.fit(Module(network(256, 4)), batches(200, 256))
        except Exception as error:
            bench.expect(False, f"{title}: {type(error).__name__}: {str(error)[:200]}")
            continue
        bench.figure(f"{title}: kernels in the report", profiled(straggler))
        if must_work:
            bench.expect(profiled(straggler), f"{title}: no kernels are profiled")


class Lasts(L.Callback):
    """Ends a fit after two seconds."""

    def on_train_start(self, *arguments: Any) -> None:
        self.until = time.monotonic() + 2.0

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        trainer.should_stop = time.monotonic() > self.until
