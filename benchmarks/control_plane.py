"""How long a signal on one rank takes until all act on it, with up to 100,000 ranks: in virtual time.

Every rank is a ``Member`` as it is shipped and every node has its ``Relay``; their stores are simulated. What a
call to the job's store takes is measured first, on a real ``TCPStore`` (libuv) with up to 500 connected clients that
call it all at once, for every kind of call that the protocol makes; in the simulation one call waits for the other, and
each takes what it took there with the most clients. A rank that sleeps while nothing changes on its node is not woken,
which changes nothing but the time that this takes. The training is at a boundary at all times: what is measured is the
agreement alone.

    python benchmarks/control_plane.py [--ranks 64 1024 16384 102400] [--calls-per-s 20000] [--everywhere]
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import itertools
import multiprocessing
import os
import random
import resource
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore

from lightning_resilience.agreement_protocol import (
    Above,
    Add,
    Announce,
    Append,
    Delete,
    Event,
    Get,
    LocalStore,
    Member,
    Needs,
    Relay,
    Set,
    Sleep,
    changes,
    training,
)

NODE = 8
CLIENTS = (8, 64, 500)
PROCESSES = 4  # of clients
MEASURE_S = 1.0  # each kind of call
ROUND_TRIP_S = 2e-4  # between nodes
HERE_S = 1e-4  # a call to the store of the node


@dataclass(frozen=True)
class Costs:
    """What the job's store is busy for, in seconds, by the kind of call.

    Args:
        count: ``add``, also by 0 to read.
        absent: To ask for what is not there.
        present: To ask for what is, or to replace it.
        put: ``set`` or ``append``, which are not answered.
        delete: ``delete_key``.
    """

    count: float
    absent: float
    present: float
    put: float
    delete: float

    def of(self, wanted: Any, store: LocalStore) -> tuple[float, bool]:
        """How long the store is busy with a call, and whether the caller waits for an answer."""
        if isinstance(wanted, Add):
            return self.count, True
        if isinstance(wanted, Set | Append):
            return self.put, False
        if isinstance(wanted, Delete):
            return self.delete, True
        return self.present if Get(wanted.key).apply(store) is not None else self.absent, True


class Rank:
    """A rank whose main thread is always between two batches."""

    def __init__(self, job: Job, node: int, index: int) -> None:
        self.job = job
        self.member = Member(job.nodes, node, index, lambda: job.now, 60.0, 1800.0)
        self.step = 0
        self.due: list[Event] = []  # the first of them is arrived for
        self.acted_at: list[float] = []

    def look(self) -> None:
        """What the main thread does in each boundary."""
        while True:
            while self.due and self.member.arrived():
                del self.due[0]
                self.acted_at.append(self.job.now)
                self.job.acted += 1
                if self.due:
                    self.member.arrive(self.due[0])
            if self.due or not self.member.alert:
                return
            self.step += 1
            events = self.member.cross(training(self.step), Needs.CLEAN | Needs.TRAINING)
            if events is None:  # held
                return
            if events:
                self.due = list(events)
                self.member.arrive(self.due[0])


class Watcher:
    """A generator of the protocol, the stores that it calls, and the rank beside it."""

    def __init__(self, watch: Any, node: int, rank: Rank | None, relay: Relay | None) -> None:
        self.watch, self.node, self.rank, self.relay = watch, node, rank, relay
        self.pending: Any = None  # the call that it waits for
        self.ticket = 0  # of its next entry in the queue; older ones are void
        self.seen = -1  # how often anything had changed on its node when it began to look


class Job:
    """All ranks, in virtual time."""

    def __init__(self, world_size: int, costs: Costs) -> None:
        self.now = 0.0
        self.costs = costs
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
                rank = Rank(self, node, index)
                self.ranks.append(rank)
                self.start(Watcher(rank.member.watch(), node, rank, None))
        self.quiet_after = 2 + 5 * relay._above.longest  # of an event, or the start

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
            if changes(wanted):
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
            if watcher.rank is not None and watcher.rank.member._posts:  # the main thread does not let it sleep
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
            seconds, is_answered = self.costs.of(wanted.operation, self.above)
            self.calls += 1
            self.free_at = max(self.free_at, self.now + ROUND_TRIP_S / 2) + seconds
            self.at(self.free_at + (is_answered - 0.5) * ROUND_TRIP_S, watcher)
        else:
            self.at(self.now + HERE_S, watcher)

    def wake(self, node: int) -> None:
        """Something has changed on the node: who sleeps sees it when its pause is over."""
        self.changes[node] += 1
        for sleeper, pause in self.sleeping[node].items():
            self.at(self.now + self.random.uniform(0, pause), sleeper)
        self.sleeping[node].clear()


def measure_everywhere(world_size: int, costs: Costs) -> float:
    """How long until every rank acts on the first event, if the same signal hits all of them at once."""
    job = Job(world_size, costs)
    job.run(lambda: job.now > job.quiet_after)
    begun = job.now
    for rank in job.ranks:
        rank.member.request("preempt", {}, Needs.NOTHING)
    for node in range(len(job.nodes)):
        job.wake(node)
    job.run(lambda: job.acted >= world_size and all(rank.acted_at for rank in job.ranks))
    return max(rank.acted_at[0] for rank in job.ranks) - begun


def measure(world_size: int, costs: Costs, events: int = 3) -> dict[str, float]:
    job = Job(world_size, costs)
    job.run(lambda: job.now > job.quiet_after)
    quiet = job.calls, job.now
    job.run(lambda: job.now > quiet[1] + max(5.0, job.quiet_after - 2))  # whole pauses: they may poll in step
    polls = (job.calls - quiet[0]) / (job.now - quiet[1])
    seconds, calls, keys = [], [], []
    for number in range(events):
        asked = job.random.randrange(world_size)
        begun, before = job.now, job.calls
        job.ranks[asked].member.request("preempt", {}, Needs.NOTHING)
        job.wake(asked // NODE)
        job.run(lambda number=number: job.acted == (number + 1) * world_size)
        last = max(rank.acted_at[number] for rank in job.ranks)
        seconds.append(last - begun)
        job.run(lambda last=last: job.now > last + job.quiet_after)
        calls.append((job.calls - before - polls * (job.now - begun)) / world_size)
        keys.append(job.above.num_keys())
    return {
        "seconds": statistics.median(seconds),
        "worst": max(seconds),
        "calls": statistics.median(calls),
        "polls": polls,
        "keys": keys[-1],
    }


# ---- a real store


def _set(store: Any) -> None:
    store.set("round/1/0/7", "[123456, 1, 0, 0]")
    store.add("news", 0)  # a set is not answered: else it is the client's buffers that are measured


KINDS: dict[str, Any] = {
    "count": lambda store: store.add("news", 0),
    "absent": lambda store: Get("abort").apply(store),
    "present": lambda store: Get("status").apply(store),
    "put": _set,
    "delete": lambda store: store.delete_key("gone"),
}


def _connect(port: int, clients: int) -> list[Any]:
    """Opens them all at once: a name server that does not answer costs every one the same second."""
    stores: list[Any] = [None] * clients

    def connect(index: int) -> None:
        stores[index] = TCPStore("127.0.0.1", port, is_master=False)

    _together(connect, clients)
    return stores


def _together(go: Any, count: int) -> None:
    threads = [threading.Thread(target=go, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _call(share: int, port: Any, turn: Any, found: Any) -> None:
    """What one of the processes of clients does."""
    turn.wait()  # the store is there
    all_stores = _connect(port.value, share)
    for clients in CLIENTS:
        stores = all_stores[: clients // PROCESSES]
        for call in KINDS.values():
            counts = [0] * len(stores)
            turn.wait()
            until = time.monotonic() + MEASURE_S

            def go(
                index: int, call: Any = call, stores: Any = stores, counts: Any = counts, until: Any = until
            ) -> None:
                while time.monotonic() < until:
                    call(stores[index])
                    counts[index] += 1

            _together(go, len(stores))
            with found:
                found.value += sum(counts)
            turn.wait()


def calibrate() -> dict[int, dict[str, tuple[float, float]]]:
    """What calls cost on a real store, by the number of clients and by kind.

    Returns:
        Calls a second while clients and store share the cores of this machine, and the store's own time for one.

    Raises:
        threading.BrokenBarrierError: If the clients do not get there within a minute.
    """
    # So that a name server that does not answer costs a new connection 1 s and not 5: torch asks for its own name.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    context = multiprocessing.get_context("fork")  # before there is any thread
    turn = context.Barrier(PROCESSES + 1, timeout=60)
    port, found = context.Value(ctypes.c_int, 0), context.Value(ctypes.c_longlong, 0)
    processes = [
        context.Process(target=_call, args=(max(CLIENTS) // PROCESSES, port, turn, found), daemon=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    results: dict[int, dict[str, tuple[float, float]]] = {}
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
        port.value = store.port
        store.set("status", "x" * 150)
        turn.wait()
        for clients in CLIENTS:
            results[clients] = {}
            for kind in KINDS:
                turn.wait()
                found.value, before, begun = 0, _own_time(), time.monotonic()
                turn.wait()
                seconds, busy, calls = time.monotonic() - begun, _own_time() - before, max(1, found.value)
                results[clients][kind] = calls / seconds, busy / calls
    finally:
        for process in processes:
            process.terminate()
    return results


def _own_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 16384, 102400])
    parser.add_argument("--calls-per-s", type=float, help="of the job's store, each request; measured by default")
    parser.add_argument("--everywhere", action="store_true", help="the signal hits all ranks at once, instead of one")
    arguments = parser.parse_args()
    if arguments.calls_per_s:
        request = 1 / arguments.calls_per_s
        costs = Costs(request, request, request, request, request)
        print(f"A store that answers {arguments.calls_per_s:,.0f} requests a second is assumed.\n")
    else:
        results = calibrate()
        print("A real TCPStore: calls a second (the store's own time for one, in µs)\n")
        print("| clients | " + " | ".join(KINDS) + " |")
        print("|---" * (len(KINDS) + 1) + "|")
        for clients, of in results.items():
            cells = [f"{rate:,.0f} ({busy * 1e6:.0f})" for rate, busy in of.values()]
            print(f"| {clients} | " + " | ".join(cells) + " |", flush=True)
        costs = Costs(**{kind: 1 / rate for kind, (rate, _) in results[max(CLIENTS)].items()})
        print()
    if arguments.everywhere:
        for world_size in arguments.ranks:
            print(f"{world_size:,} ranks: {measure_everywhere(world_size, costs):.1f} s", flush=True)
        return
    if arguments.ranks:
        print("| ranks | until all act | the worst | requests to the job's store a rank | a second, quiet | keys |")
        print("|---|---|---|---|---|---|")
    for world_size in arguments.ranks:
        found = measure(world_size, costs)
        print(
            f"| {world_size:,} | {found['seconds']:.1f} s | {found['worst']:.1f} s | {found['calls']:.1f} "
            f"| {found['polls']:,.0f} | {found['keys']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
