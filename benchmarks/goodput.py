"""How right the account of a run's time is, and what it takes: files, and the time of ``report``.

*Right* is measured on simulated runs of which it is known what every rank has done in every second
(``tests/test_goodput_simulation.py``). The files are those of a month of 128 nodes with 8 ranks each, written by what
ships with clocks that are set: a local save is recorded each minute, one on shared storage each hour, stragglers are
reported four times a day, and there are 60 interruptions. After two of three every rank records what it raised, twice,
as it does when a rank has died: in the fit and where the process ends.

    PYTHONPATH=. python benchmarks/goodput.py [--runs 200] [--nodes 128] [--interruptions 60]
"""

from __future__ import annotations

import argparse
import cProfile
import math
import os
import pstats
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lightning_resilience.launch.report import report
from lightning_resilience.run import ledger, time_account
from lightning_resilience.run.events import (
    Event,
    Fault,
    JobStart,
    LaunchStart,
    Resumed,
    Saved,
    Stragglers,
    WorkersStart,
)
from lightning_resilience.run.goodput import account
from lightning_resilience.run.history import read_history
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.time_account import CATEGORIES, Category, Spent
from tests.test_goodput_simulation import confusions, of, runs, share_right, summed

PER_NODE = 8
MONTH_S = 30 * 86400.0
START_S = 180.0  # of workers
STEP_S = 4.0
KEYS = {"category": ("category",), "category, cause and node": ("category", "cause", "node")}
PRODUCTIVE: Category = "productive"


def accuracy(number: int) -> None:
    """Prints how much time of simulated runs is where it belongs."""
    shares: dict[str, list[float]] = {name: [] for name in KEYS}
    confused: Counter[tuple[str, str]] = Counter()
    total = 0.0
    for run in runs(number):
        total += sum(run.truth.values())
        confused.update(confusions(summed(run.found.seconds, "category"), summed(run.truth, "category")))
        for name, keys in KEYS.items():
            shares[name].append(share_right(summed(run.found.seconds, *keys), summed(run.truth, *keys)))
    print(f"{number} simulated runs, {total / 3600:.0f} rank-hours:\n\n| right by | mean | worst run | its seed |")
    print("|---|---|---|---|")
    for name, found in shares.items():
        worst = min(range(number), key=found.__getitem__)
        print(f"| {name} | {statistics.mean(found):.3%} | {found[worst]:.3%} | {worst} |")
    for (truth, other), seconds in confused.most_common(3):
        print(f"\nconfused: {truth}, taken for {other}: {seconds:.1f} s, {seconds / total:.3%} of all")


class Month:
    """A run directory with the files of a month.

    Args:
        run_dir: The run directory.
        nodes: How many.
        interruptions: How many.
    """

    def __init__(self, run_dir: Path, nodes: int, interruptions: int) -> None:
        self._random = random.Random(0)
        self._run_dir = run_dir
        self._names = [f"node{number:03}" for number in range(nodes)]
        self._ranks = nodes * PER_NODE
        self._node = self._names[0]
        self._now = 1.7e9
        self._ledger = Ledger(run_dir / "ledger", None)
        self._step = self._saved = 0
        clocks = SimpleNamespace(time=lambda: self._now, monotonic=lambda: self._now)
        with (
            mock.patch.object(ledger, "time", clocks),
            mock.patch.object(ledger, "platform", SimpleNamespace(node=lambda: self._node)),
            mock.patch.object(time_account, "time", clocks),
            mock.patch.dict(os.environ),
        ):
            os.environ.pop("SLURMD_NODENAME", None)
            self._record(None, of(LaunchStart, began=self._now))
            self._record(None, of(JobStart, run_id="job"))
            for number in range(interruptions + 1):
                self._group(number, MONTH_S / (interruptions + 1), is_last=number == interruptions)

    def _record(self, rank: int | None, event: Event, node: str | None = None) -> None:
        self._node = self._names[(rank or 0) // PER_NODE] if node is None else node
        self._ledger.rank = rank
        self._ledger.record(event)

    def _group(self, number: int, length: float, is_last: bool) -> None:
        began, end, reached = self._now, self._now + length * self._random.uniform(0.6, 1.3), self._step
        job: dict[str, Any] = {"elastic_run_id": "job", "restart_count": number}
        self._now += 20
        self._record(0, of(WorkersStart, world_size=self._ranks, attempt=str(number), **job))
        self._now = began + START_S
        first = self._step = self._saved
        self._record(0, of(Resumed, fit=0, step=first, path="a.ckpt", tier="global", saved_at=began))
        for minute in range(int((end - self._now) // 60)):
            self._now += 60
            self._step = first + int((self._now - began - START_S) / STEP_S)
            values = {"fit": 0, "step": self._step, "reason": "interval"}
            self._record(0, of(Saved, tier="local", generation=minute, count=6, stall_s=0.0213, seconds=4.1, **values))
            if minute % 60 == 59:
                self._saved = self._step
                self._record(0, of(Saved, tier="global", path=f"step={self._step}.ckpt", seconds=31.2, **values))
            if minute % 360 == 359:
                ranks = self._random.sample(range(self._ranks), 2)
                devices = [f"{self._names[rank // PER_NODE]}:GPU-{rank:032x}" for rank in ranks]
                reason = "rank 1 (gpu 0.71); rank 2 (gpu 0.74)"
                self._record(0, Stragglers(fit=0, step=self._step, ranks=ranks, devices=devices, reason=reason))
        self._now = end
        if not is_last:
            self._fault(number, job)
        for node, name in enumerate(self._names):
            self._now = end + 10 + self._random.random()
            ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
            event = time_account.time_spent({rank: self._spent(began, end, reached - first) for rank in ranks}, {})
            event.fit, event.attempt, event.world_size = 0, str(number), self._ranks
            event.elastic_run_id, event.restart_count = "job", number
            self._record(None, event, name)
            if is_last:
                time_account.keep(self._run_dir, f"{number}-{name}", event)
        self._now = end + 15

    def _fault(self, number: int, job: dict[str, Any]) -> None:
        culprit = self._random.randrange(self._ranks)
        if number % 3 == 0:
            reason = f"rank {culprit} did not call all_reduce"
            self._record(culprit, Fault(kind="hang", fit=0, step=self._step, reason=reason, section="step", **job))
            return
        reason = f"rank {culprit} was killed by SIGKILL"
        self._record(culprit, Fault(kind="died", fit=0, step=self._step, reason=reason, signal="SIGKILL", **job))
        reason = f"PeerLost: rank {culprit} of {self._names[culprit // PER_NODE]}, which was killed by SIGKILL"
        for rank in range(self._ranks):
            if rank != culprit:
                self._now += 1e-4
                fields: dict[str, Any] = {"kind": "PeerLost", "place": "train.py:80", "reason": reason}
                self._record(rank, Fault(fit=0, step=self._step, **fields))
                self._record(rank, Fault(**fields, **job))

    def _spent(self, began: float, end: float, redone: int) -> Spent:
        some = self._random.uniform
        seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        seconds |= {"imports": some(12, 16), "script": some(1, 2), "setup": some(30, 40), "restore": some(50, 60)}
        seconds |= {"fast_forward": some(1, 2), "first_step": some(20, 30), "wasted_progress": redone * STEP_S}
        seconds |= {"validation": some(300, 320), "callbacks": some(20, 30), "checkpoint_save": some(60, 70)}
        seconds[PRODUCTIVE] = max(end - began - 20 - sum(seconds.values()), 0.0)
        return Spent(began + 20, end - some(0, STEP_S), PRODUCTIVE, self._step, seconds)


def size(folder: Path) -> tuple[int, float]:
    """How many files are in a folder, and their MB."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes) / 1e6


def timed(what: Any) -> tuple[float, Any]:
    """The fastest of three, in seconds of CPU time, and what it returned."""
    best, found = math.inf, None
    for _ in range(3):
        began = time.process_time()
        found = what()
        best = min(best, time.process_time() - began)
    return best, found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulated runs (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=128, help="nodes of the month (default: %(default)s)")
    parser.add_argument("--interruptions", type=int, default=60, help="in the month (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also print where the time of the report goes")
    options = parser.parse_args()
    if options.runs:
        accuracy(options.runs)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        Month(run_dir, options.nodes, options.interruptions)
        (files, mb), (kept, kept_mb) = size(run_dir / "ledger"), size(run_dir / "time")
        read = timed(lambda: read_history(run_dir / "ledger"))
        fold = timed(lambda: account(read[1].events))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "lightning_resilience.launch.cli", "report", str(run_dir)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.count(b"\n")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        events = Counter(event.name for event in read[1].events)
        print(f"\nA month of {options.nodes * PER_NODE} ranks with {options.interruptions} interruptions:\n")
        print(
            "| events | ledger | kept of ranks that run | reading the ledger | the account | `report`, as a command "
            "| its lines |\n|---|---|---|---|---|---|---|"
        )
        print(
            f"| {sum(events.values()):,} ({', '.join(f'{number:,} {name}' for name, number in events.most_common(3))}) "
            f"| {files} files, {mb:.1f} MB | {kept} files, {kept_mb:.1f} MB | {read[0]:.2f} s "
            f"| {fold[0]:.2f} s | {whole:.2f} s | {lines:,} |"
        )
        if options.profile:
            with cProfile.Profile() as profile:
                report(run_dir)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(30)


if __name__ == "__main__":
    main()
