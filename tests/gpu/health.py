"""The check of a node's health: in time, also cold and at once with others."""

from __future__ import annotations

import json
import time
from pathlib import Path

from lightning_resilience.detect.health import check_gpu_health
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check, text, wait


def examine(rank: int, device: Device, folder: Path, together: bool) -> None:
    target = device.at(rank % device.count)
    times, problems = [], []
    for _ in range(3):
        began = time.monotonic()
        problems += [each.detail for each in check_gpu_health(target) if not each.ok]
        times.append(time.monotonic() - began)
    name = f"{'together' if together else 'alone'}-{rank}"
    kept = device.load().memory_allocated(target)
    facts = [each.name for each in check_gpu_health(target)]
    (folder / name).write_text(json.dumps({"times": times, "problems": problems, "kept": kept, "facts": facts}))


@check("the health check of a sound GPU passes in time: cold, warm, and eight at once", limit_s=200)
def health(bench: Bench) -> None:
    number = 3 if bench.quick else 8
    for count, together in ((1, False), (number, True)):
        processes = [bench.start(examine, rank, bench.device, bench.folder, together) for rank in range(count)]
        codes = wait(processes, 90)
        assert set(codes) == {0}, f"ended with {codes}: {''.join(text(processes).strip().splitlines()[-1:])}"
        name = "together" if together else "alone"
        found = [json.loads((bench.folder / f"{name}-{rank}").read_text()) for rank in range(count)]
        title = f"{count} at once" if together else "alone"
        bench.figure(f"{title}: s cold", max(each["times"][0] for each in found))
        bench.figure(f"{title}: s warm", max(min(each["times"]) for each in found))
        if not together:
            bench.figure("facts", found[0]["facts"])
            bench.figure("bytes kept", found[0]["kept"])
        problems = sorted({each for one in found for each in one["problems"]})
        bench.expect(not problems, f"{title}: {problems}")
        slowest = max(each["times"][0] for each in found)
        bench.expect(slowest < 15, f"{title}: {slowest:.0f} s, half of the limit of 30 s", timing=True)
