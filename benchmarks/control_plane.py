"""How long a signal on one rank takes until all act on it, with up to 100,000 ranks: in virtual time.

Every rank is a ``Participant`` as it is shipped and every node has its ``Relay``; their stores are simulated. What a
call to the job's store takes is measured first, on a real ``TCPStore`` with 500 clients that call it all at once; in
the simulation one call waits for the other. A rank that sleeps while nothing changes on its node is not woken, which
changes nothing but the time that this takes. The training is at a boundary at all times: what is measured is the
agreement alone.

    python benchmarks/control_plane.py [--ranks 1024 16384 102400] [--calls-per-s 20000]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import multiprocessing
import random
import statistics
import threading
import time
from typing import Any

from torch.distributed import TCPStore

from lightning_resilience.agreement_protocol import (
    Above,
    Announce,
    LocalStore,
    Needs,
    Participant,
    Relay,
    Set,
    Sleep,
    training,
)

NODE = 8
CLIENTS = 500
ROUND_TRIP_S = 2e-4  # between nodes
HERE_S = 1e-4  # a call to the store of the node


class Rank:
    """A rank whose main thread is always between two batches."""

    def __init__(self, job: Job, node: int, index: int, linger: float) -> None:
        ranks = job.nodes[node]
        self.job = job
        self.participant = Participant(ranks, index, lambda: job.now, 60.0, 1800.0, linger)
        self.step = 0
        self.arriving = False
        self.acted_at: list[float] = []

    def look(self) -> None:
        """What the main thread does in each boundary."""
        if self.arriving and self.participant.arrived():
            self.arriving = False
            self.acted_at.append(self.job.now)
            self.job.acted += 1
        while not self.arriving and self.participant.alert:
            self.step += 1
            events = self.participant.cross(training(self.step), Needs.CLEAN | Needs.TRAINING)
            if events is None:  # held
                return
            for event in events:
                self.arriving = True
                self.participant.arrive(event)


class Watcher:
    """A generator of the protocol, the stores that it calls, and the rank beside it."""

    def __init__(self, watch: Any, node: int, rank: Rank | None, relay: Relay | None) -> None:
        self.watch, self.node, self.rank, self.relay = watch, node, rank, relay
        self.pending: Any = None  # the call that it waits for
        self.ticket = 0  # of its next entry in the queue; older ones are void
        self.seen = -1  # how often anything had changed on its node when it began to look


class Job:
    """All ranks, in virtual time."""

    def __init__(self, world_size: int, call_s: float) -> None:
        self.now = 0.0
        self.call_s = call_s
        self.free_at = 0.0  # when the job's store has done what it was asked
        self.calls = self.acted = 0
        self.nodes = [range(first, min(first + NODE, world_size)) for first in range(0, world_size, NODE)]
        self.above = LocalStore()
        self.here = [LocalStore() for _ in self.nodes]
        self.queue: list[tuple[float, int, Watcher, int]] = []
        self.order = itertools.count()
        self.changes = [0] * len(self.nodes)
        self.sleeping: list[dict[Watcher, float]] = [{} for _ in self.nodes]  # and how long each pauses at most
        self.ranks: list[Rank] = []
        self.random = random.Random(0)
        for node, ranks in enumerate(self.nodes):
            relay = Relay(self.nodes, node, lambda: self.now, 60.0, 1800.0)
            self.start(Watcher(relay.watch(), node, None, relay))
            for index in range(len(ranks)):
                rank = Rank(self, node, index, relay.linger)
                self.ranks.append(rank)
                self.start(Watcher(rank.participant.watch(), node, rank, None))

    def start(self, watcher: Watcher) -> None:
        self.at(self.random.uniform(0, 0.05), watcher)

    def at(self, when: float, watcher: Watcher) -> None:
        watcher.ticket += 1
        heapq.heappush(self.queue, (when, next(self.order), watcher, watcher.ticket))

    def run(self, until: Any) -> None:
        while not until():
            self.now, _, watcher, ticket = heapq.heappop(self.queue)
            if ticket == watcher.ticket:
                self.advance(watcher)

    def advance(self, watcher: Watcher) -> None:
        result, wanted = None, watcher.pending
        watcher.pending = None
        self.sleeping[watcher.node].pop(watcher, None)
        if isinstance(wanted, Above):
            result = wanted.operation.apply(self.above)
        elif wanted is not None:
            result = wanted.apply(self.here[watcher.node])
            if isinstance(wanted, Set) or getattr(wanted, "amount", 0):
                self.wake(watcher.node)
        else:
            watcher.seen = self.changes[watcher.node]
        while True:
            wanted = watcher.watch.send(result)
            result = None
            if watcher.rank is not None:
                watcher.rank.look()
            if not isinstance(wanted, Announce):
                break
        if isinstance(wanted, Sleep):
            if watcher.rank is not None and watcher.rank.participant._posts:  # the main thread does not let it sleep
                self.at(self.now, watcher)
                return
            if watcher.seen != self.changes[watcher.node]:  # meanwhile
                self.at(self.now + wanted.seconds, watcher)
                return
            self.sleeping[watcher.node][watcher] = wanted.seconds
            if watcher.relay is not None:
                self.at(max(self.now + wanted.seconds, watcher.relay._look_at), watcher)
            return
        watcher.pending = wanted
        if isinstance(wanted, Above):
            self.calls += 1
            self.free_at = max(self.free_at, self.now + ROUND_TRIP_S / 2) + self.call_s
            self.at(self.free_at + ROUND_TRIP_S / 2, watcher)
        else:
            self.at(self.now + HERE_S, watcher)

    def wake(self, node: int) -> None:
        """Something has changed on the node: who sleeps sees it when its pause is over."""
        self.changes[node] += 1
        for sleeper, pause in self.sleeping[node].items():
            self.at(self.now + self.random.uniform(0, pause), sleeper)
        self.sleeping[node].clear()


def measure(world_size: int, call_s: float, events: int = 3) -> dict[str, float]:
    job = Job(world_size, call_s)
    job.run(lambda: job.now > 2 + 2 * job.ranks[0].participant._pace.longest)
    quiet = job.calls, job.now
    job.run(lambda: job.now > quiet[1] + 20)
    polls = (job.calls - quiet[0]) / 20
    seconds, calls, keys = [], [], []
    for number in range(events):
        asked = job.random.randrange(world_size)
        begun, before = job.now, job.calls
        job.ranks[asked].participant.request("preempt", {}, Needs.NOTHING)
        job.wake(asked // NODE)
        job.run(lambda number=number: job.acted == (number + 1) * world_size)
        last = max(rank.acted_at[number] for rank in job.ranks)
        seconds.append(last - begun)
        calls.append((job.calls - before - polls * (job.now - begun)) / world_size)
        job.run(lambda last=last: job.now > last + 5)
        keys.append(job.above.num_keys())
    return {
        "seconds": statistics.median(seconds),
        "worst": max(seconds),
        "calls": statistics.median(calls),
        "polls": polls,
        "keys": keys[-1],
        "grows": keys[-1] - keys[1],
    }


def call(port: int, clients: int, seconds: float, done: Any) -> None:
    """What one of the processes of clients does."""
    stores = [TCPStore("127.0.0.1", port, is_master=False) for _ in range(clients)]
    counts = [0] * clients
    done.wait()
    until = time.monotonic() + seconds

    def go(index: int) -> None:
        while time.monotonic() < until:
            stores[index].add("news", 0)
            counts[index] += 1

    threads = [threading.Thread(target=go, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.wait()
    stores[0].add("calls", sum(counts))


def calibrate(seconds: float = 5.0, processes: int = 4) -> float:
    """How many calls a second a real store answers, with many clients on the same machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    done = context.Barrier(processes)
    clients = [
        context.Process(target=call, args=(store.port, CLIENTS // processes, seconds, done)) for _ in range(processes)
    ]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return store.add("calls", 0) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384, 102400])
    parser.add_argument("--calls-per-s", type=float, help="of the job's store; measured by default")
    arguments = parser.parse_args()
    rate = arguments.calls_per_s or calibrate()
    print(f"A TCPStore with {CLIENTS} clients answers {rate:,.0f} calls a second here.\n")
    print("| ranks | until all act | the worst | calls of the job's store a rank | polls a second, quiet | keys |")
    print("|---|---|---|---|---|---|")
    for world_size in arguments.ranks:
        found = measure(world_size, 1 / rate)
        print(
            f"| {world_size:,} | {found['seconds']:.1f} s | {found['worst']:.1f} s | {found['calls']:.1f} "
            f"| {found['polls']:,.0f} | {found['keys']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
