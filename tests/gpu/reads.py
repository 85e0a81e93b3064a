"""Numbers that are read late arrive whole and in order."""

from __future__ import annotations

import random

import torch

from lightning_resilience.detect.numerics.numerics import LateReads
from tests.gpu.runner import Bench, check


@check("numbers that are read late are those that were put, in their order", limit_s=120)
def late_reads(bench: Bench) -> None:
    device, count = bench.device, 500 if bench.quick else 10_000
    chance = random.Random(1)
    reads, found, most, waiting = LateReads(), [], 0, 0
    number = torch.zeros((), device=device.at())
    for tag in range(count):
        if chance.random() < 0.02:
            device.busy(0.002)
        number.fill_(tag)  # the one before may be on its way still
        reads.put(tag, number)
        waiting += 1
        arrived = reads.ready() if chance.random() < 0.5 else []
        waiting -= len(arrived)
        most = max(most, waiting)
        found += arrived
    found += reads.drain()
    wrong = sum(1 for tag, (given, value) in enumerate(found) if not tag == given == value)
    bench.figure("numbers", count)
    bench.figure("most on their way", most)
    bench.expect(
        len(found) == count and not wrong, f"{count - len(found)} are missing, {wrong} are wrong or out of order"
    )
