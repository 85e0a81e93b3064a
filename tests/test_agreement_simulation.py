"""The shipped agreement under a simulated scheduler, store and clock, so that thousands of interleavings can be tried.

Every rank runs a small training script against its `Member`, beside its watcher and somebody who makes requests at
random moments. The scheduler decides after every step of anybody who goes next, and how long a sleep really takes. What
a healthy agreement may never do is a `Violation`; the last tests put old mistakes back and expect one.
"""

from __future__ import annotations

import json
import math
import random
import runpy
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.agreement_protocol import (
    FINISHED,
    Above,
    Add,
    Announce,
    Event,
    Get,
    LocalStore,
    Member,
    Needs,
    PeerLost,
    Position,
    Relay,
    Sleep,
    _meet,
    _missing,
    changes,
    end_of_evaluation,
    evaluation,
    training,
)

ANSWER_TIMEOUT, ARRIVAL_TIMEOUT, COLLECTIVE_TIMEOUT = 3.0, 10.0, 2.0
WINDOW, EVALUATE_EVERY = 2, 2


class Violation(AssertionError):
    """The ranks did something that deadlocks or corrupts a real training."""


class CollectiveBroken(RuntimeError):
    """What gloo and NCCL raise some time after a peer has died in a collective."""


class Boom(RuntimeError):
    """An error in the training script of one rank."""


class Prefixed:
    """A view of a shared store, gone once the process that owned the store has died."""

    def __init__(self, store: LocalStore, is_lost: Callable[[], bool], prefix: str) -> None:
        self.store, self.is_lost, self.prefix = store, is_lost, prefix

    def _store(self) -> LocalStore:
        if self.is_lost():
            raise ConnectionError("Broken pipe")
        return self.store

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._store().compare_set(self.prefix + key, expected, value)

    def append(self, key: str, value: str) -> None:
        self._store().append(self.prefix + key, value)

    def set(self, key: str, value: str) -> None:
        self._store().set(self.prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store().add(self.prefix + key, amount)

    def delete_key(self, key: str) -> bool:
        return self._store().delete_key(self.prefix + key)


@dataclass(frozen=True)
class Wait:
    """Yielded by whoever can't go on before `until`, or before `ready`, whichever comes first."""

    until: float = float("inf")
    ready: Callable[[], bool] = lambda: False


Steps = Generator[Wait, None, Any]
AT_ONCE = Wait(until=0.0)


@dataclass
class Actor:
    rank: int
    steps: Steps
    wait: Wait = AT_ONCE


@dataclass
class Fit:
    """What one rank did in one fit."""

    member: Member
    relay: Relay | None = None
    watchers: int = 0  # that have not ended; they share a thread, so an error of one ends both
    requested: list[int] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)
    acted: list[tuple[int, Position]] = field(default_factory=list)
    left_over: list[int] | None = None
    boundaries: int = 0


@dataclass
class Mistakes:
    """Mistakes that an agreement, or its user, could make."""

    member: type[Member] = Member
    relay: type[Relay] = Relay
    stale_keys: bool = False
    plain_counter: bool = False
    no_end_of_evaluation: bool = False
    no_arrival: bool = False


class Stop(Exception):
    """The fit ends early, on all ranks at the same boundary."""

    def __init__(self, untouched: tuple[Event, ...]) -> None:
        self.untouched = untouched


class Simulation:
    def __init__(
        self,
        seed: int,
        mistakes: Mistakes | None = None,
        *,
        fall: tuple[int, int] | None = None,
        raises: bool = False,
        rank_0_owns_store: bool = True,
        store: LocalStore | None = None,
        attempt: int = 0,
        small: bool = False,
        alone: bool = False,
        deadlines: tuple[float, float] = (ANSWER_TIMEOUT, ARRIVAL_TIMEOUT),
        long_end: float = 0.0,
    ) -> None:
        """`fall`: which rank dies (or `raises`), and before which of its own steps. `small`: one short fit, 2 ranks.

        `alone`: 1 rank. `long_end`: how long one of the ranks takes when its last batch is done.
        """
        self.random = random.Random(seed)
        self.mistakes = mistakes or Mistakes()
        self.fall, self.raises = fall, raises
        self.rank_0_owns_store = rank_0_owns_store
        self.store = store or LocalStore()
        self.attempt = attempt
        self.deadlines = deadlines
        self.long_end = long_end
        self.lasts_s = 2.5 * (ANSWER_TIMEOUT + ARRIVAL_TIMEOUT) + long_end  # a fit at most
        self.ends_late = seed // 2 % 2  # a rank that each has
        self.finished_at: dict[int, float] = {}
        self.told_at: dict[int, float] = {}
        self.fell_at = 0.0

        self.world_size = 1 if alone else 2 if small else self.random.choice([2, 2, 3, 3, 4])
        if small:
            self.nodes = self.random.choice([[[0, 1]], [[0], [1]]])
        else:
            of = [self.random.randrange(self.world_size) for _ in range(self.world_size)]
            self.nodes = sorted([rank for rank in range(self.world_size) if of[rank] == node] for node in {*of})
        self.node_of = {rank: index for index, ranks in enumerate(self.nodes) for rank in ranks}
        self.node_stores = [self.store if len(self.nodes) == 1 else LocalStore() for _ in self.nodes]
        self.batches = 2 if small else 4
        self.evaluation_batches = [self.random.choice([1, 2, 5]) for _ in range(self.world_size)]
        self.fits = 1 if small else self.random.choice([1, 1, 2])
        self.slowness = self.random.choice([0.003, 0.03])
        self.starved = self.random.randrange(
            2 * self.world_size
        )  # in half of the schedules, a rank hardly ever gets to run
        self.now = 0.0
        self.steps_of = [0] * self.world_size
        self.gone: set[int] = set()
        self.collectives: list[list[tuple[Any, ...]]] = [[] for _ in range(self.world_size)]
        self.reached: dict[tuple[int, int], set[int]] = {}  # (fit, event) -> ranks about to act
        self.done: list[list[Fit]] = [[] for _ in range(self.world_size)]
        self.errors: dict[int, Exception] = {}
        self.moved = [False] * self.world_size  # the watcher has moved since the main thread looked
        self.woken: list[dict[Any, bool]] = [{} for _ in range(self.world_size)]  # its watchers, to look now
        self.actors = [Actor(rank, self.script(rank)) for rank in range(self.world_size)]
        self.mains = list(self.actors)

    # ---- the scheduler

    def run(self) -> None:
        while any(main in self.actors for main in self.mains):
            ready = [actor for actor in self.actors if actor.wait.until <= self.now or actor.wait.ready()]
            if not ready:
                self.now = min(actor.wait.until for actor in self.actors)
                if self.now > self.fits * self.lasts_s:
                    raise Violation(f"hangs; errors so far: {self.errors}")
                continue
            actor = self.random.choice(ready)
            if actor.rank == self.starved and self.random.random() < 0.9:
                actor = self.random.choice(ready)
            if self.fall == (actor.rank, self.steps_of[actor.rank]):
                self.fall, self.fell_at = None, self.now
                if not self.raises:
                    self.die(actor.rank)
                elif self.in_fit(actor.rank):
                    main = self.mains[actor.rank]
                    self.advance(main, lambda main=main: main.steps.throw(Boom("out of memory")))
                continue
            self.steps_of[actor.rank] += 1
            self.advance(actor, lambda chosen=actor: next(chosen.steps))

    def advance(self, actor: Actor, step: Callable[[], Wait]) -> None:
        try:
            actor.wait = step()
        except StopIteration:
            self.actors.remove(actor)

    def die(self, rank: int) -> None:
        self.actors = [actor for actor in self.actors if actor.rank != rank]
        self.gone.add(rank)

    def lost(self, owner: int) -> bool:
        """Whether the store of a process is gone: that of a node is its first rank's, that of the job perhaps."""
        return owner in self.gone and (owner > 0 or len(self.nodes) > 1 or self.rank_0_owns_store)

    def in_fit(self, rank: int) -> bool:
        return rank not in self.errors and bool(self.done[rank]) and self.done[rank][-1].left_over is None

    def sleep(self, seconds: float) -> Wait:
        return Wait(until=self.now + seconds * self.random.choice([0.0, 0.5, 1.0, 1.0, 4.0]))

    # ---- one rank

    def script(self, rank: int) -> Steps:
        try:
            for number in range(self.fits):
                yield from self.run_fit(rank, number)
        except (PeerLost, CollectiveBroken, Boom) as error:
            self.errors[rank], self.told_at[rank] = error, self.now
            member = self.done[rank][-1].member
            yield from self.saves_end(rank, self.done[rank][-1])
            member.abort(str(error), peer_is_lost=isinstance(error, CollectiveBroken))
            self.wake(rank)
            while not self.is_over(self.done[rank][-1]):
                yield self.until_moved(rank)
        self.gone.add(rank)

    def is_over(self, fit: Fit) -> bool:
        return fit.watchers == 0

    def run_fit(self, rank: int, number: int) -> Steps:
        prefix = "" if self.mistakes.stale_keys else f"{self.attempt}/{number}/"
        node = self.node_of[rank]
        ranks = self.nodes[node]
        limits = (lambda: self.now, *self.deadlines)
        relay = self.mistakes.relay(self.nodes, node, *limits)
        member = self.mistakes.member(self.nodes, node, ranks.index(rank), *limits)
        fit = Fit(member, relay if rank == ranks[0] else None)
        self.done[rank].append(fit)
        here = Prefixed(self.node_stores[node], lambda: self.lost(ranks[0]), f"{prefix}here/")
        above = Prefixed(self.store, lambda: self.rank_0_owns_store and 0 in self.gone, f"{prefix}above/")
        for watch in (member.watch(), fit.relay and fit.relay.watch()):
            if watch is not None:
                fit.watchers += 1
                self.actors.append(Actor(rank, self.watch(rank, fit, watch, here, above)))
        self.actors.append(Actor(rank, self.ask(rank, fit)))
        self.saves_begin(rank, number, fit)
        untouched: tuple[Event, ...] = ()
        try:
            yield from self.evaluate(rank, number, fit, 0)
            for batches in range(1, self.batches + 1):
                yield self.sleep(self.slowness)
                yield from self.collective(rank, number, "gradients", batches)
                if batches % EVALUATE_EVERY == 0:
                    yield from self.evaluate(rank, number, fit, batches)
                clean = Needs.CLEAN if batches % WINDOW == 0 else Needs.NOTHING
                yield from self.boundary(rank, number, fit, training(batches), Needs.TRAINING | clean)
                yield from self.save_locally(rank, number, fit, batches, clean)
        except Stop as stop:
            untouched = stop.untouched
        if self.long_end and rank == self.ends_late:
            yield Wait(until=self.now + self.long_end)
        if self.random.random() < 0.3:
            self.request(rank, fit, "save", Needs.NOTHING)
        yield from self.saves_end(rank, fit)
        self.finished_at[rank] = self.now
        member.finish()
        untouched += yield from self.wait_for(rank, lambda: member.ended() if self.is_over(fit) else None)
        fit.left_over = sorted(event.payload["id"] for event in untouched)

    # What test_save_simulation.py has beside it.

    def saves_begin(self, rank: int, number: int, fit: Fit) -> None:
        pass

    def save_locally(self, rank: int, number: int, fit: Fit, step: int, clean: Needs) -> Steps:
        yield from ()

    def saves_end(self, rank: int, fit: Fit) -> Steps:
        yield from ()

    def evaluate(self, rank: int, number: int, fit: Fit, batches: int) -> Steps:
        clean = Needs.CLEAN if batches % WINDOW == 0 else Needs.NOTHING
        for index in range(self.evaluation_batches[rank]):
            yield self.sleep(self.slowness)
            yield from self.boundary(rank, number, fit, evaluation(batches, 0, index), clean)
        if not self.mistakes.no_end_of_evaluation:
            yield from self.boundary(rank, number, fit, end_of_evaluation(batches), clean)
        yield from self.collective(rank, number, "reduce", batches)

    def boundary(self, rank: int, number: int, fit: Fit, position: Position, allows: Needs) -> Steps:
        fit.boundaries += 1
        place = (fit.boundaries, 1, 0, 0) if self.mistakes.plain_counter else position
        events = yield from self.wait_for(rank, lambda: fit.member.cross(place, allows))
        for done, event in enumerate(events, start=1):
            if event.needs not in allows:
                raise Violation(f"{event} acted on at {position}, which allows {allows}")
            self.reached.setdefault((number, event.number), set()).add(rank)
            if not self.mistakes.no_arrival:
                fit.member.arrive(event)
                yield from self.wait_for(rank, fit.member.arrived)
            fit.acted.append((event.payload["id"], position))
            yield from self.collective(rank, number, "act", event.number)
            if event.kind == "stop":  # a rank that evaluates more batches may get the others only later, so never
                raise Stop(events[done:])

    def wait_for(self, rank: int, step: Callable[[], Any]) -> Steps:
        self.wake(rank)
        while (result := step()) is None:
            yield self.until_moved(rank)
        return result

    def wake(self, rank: int, but: Any = None) -> None:
        self.woken[rank] |= {watch: True for watch in self.woken[rank] if watch is not but}

    def until_moved(self, rank: int) -> Wait:
        self.moved[rank] = False
        return Wait(ready=lambda: self.moved[rank])

    def watch(self, rank: int, fit: Fit, watch: Any, here: Prefixed, above: Prefixed) -> Steps:
        result, failure = None, None
        self.woken[rank][watch] = False
        while fit.watchers:
            self.moved[rank] = True
            try:
                wanted = watch.send(result) if failure is None else watch.throw(failure)
            except StopIteration:
                fit.watchers -= 1
                return
            except ConnectionError as error:
                fit.watchers = 0
                fit.member.lose_touch(error)
                self.moved[rank] = True
                return
            result = failure = None
            if isinstance(wanted, Sleep):
                until = self.sleep(wanted.seconds).until if wanted.seconds < math.inf else math.inf
                yield Wait(until, lambda: self.woken[rank][watch])
                self.woken[rank][watch] = False
            elif isinstance(wanted, Announce):
                fit.announced.append(wanted.event.payload["id"])
            else:
                yield AT_ONCE  # between the transition and the operation
                try:
                    is_above = isinstance(wanted, Above)
                    result = wanted.operation.apply(above) if is_above else wanted.apply(here)
                    if self.world_size == 1 and changes(wanted):
                        self.wake(rank, but=watch)
                except ConnectionError as error:
                    failure = error
                yield AT_ONCE  # between the operation and the next transition

    def ask(self, rank: int, fit: Fit) -> Steps:
        for _ in range(self.random.choice([0, 0, 1, 2, 3])):
            yield self.sleep(self.slowness * self.random.choice([0, 3, 10]))
            if fit.member.passed < FINISHED:  # what is asked after the end may be dropped
                needs = self.random.choice([Needs.NOTHING, Needs.NOTHING, Needs.TRAINING, Needs.CLEAN])
                self.request(rank, fit, self.random.choice(["save"] * 5 + ["stop"]), needs)

    def request(self, rank: int, fit: Fit, kind: str, needs: Needs) -> None:
        name = self.random.randrange(2**31)
        fit.requested.append(name)
        fit.member.request(kind, {"id": name}, needs)
        self.wake(rank)

    def collective(self, rank: int, *name: Any) -> Steps:
        """Lets nobody go before all ranks are in it, and no rank be in another one."""
        entered = self.collectives
        entered[rank].append(name)
        number = len(entered[rank]) - 1
        for other in {*range(self.world_size)} - self.gone:  # what a rank has died in fails for the others anyway
            if len(entered[other]) > number and entered[other][number] != name:
                raise Violation(f"rank {rank} is in {name}, rank {other} in {entered[other][number]}")

        def broken() -> bool:
            return any(len(entered[other]) <= number for other in self.gone)

        def complete() -> bool:
            return all(len(names) > number for names in entered)

        while not complete():
            yield Wait(ready=lambda: complete() or broken())
            if broken():
                yield Wait(until=self.now + COLLECTIVE_TIMEOUT)
                raise CollectiveBroken(f"a peer of rank {rank} died in {name}")

    # ---- what must hold

    def check_actions(self) -> None:
        """Whatever happened: nobody acted alone, twice, in another order, or anywhere else than the others."""
        for rank, names in enumerate(self.collectives):
            for fit, action, event in names:
                if action == "act" and len(self.reached[fit, event]) < self.world_size:
                    raise Violation(
                        f"rank {rank} acted on event {event} and had only {self.reached[fit, event]} beside it"
                    )
        for number in range(self.fits):
            fits = [fits[number] for fits in self.done if len(fits) > number]
            for acted in zip(*(fit.acted for fit in fits), strict=False):  # who lost a peer did less
                ids, positions = zip(*acted, strict=True)
                places = {position for position in positions if position != end_of_evaluation(position[0])}
                if len(set(ids)) > 1 or len(places) > 1 or len({position[:2] for position in positions}) > 1:
                    raise Violation(f"acted on {ids} at {positions}")
            for fit in fits:
                settled = [name for name, _ in fit.acted] + (fit.left_over or [])
                if len(settled) != len(set(settled)):
                    raise Violation(f"acted twice: {settled}")

    def check_undisturbed(self) -> None:
        """Nothing failed, and every event was acted on by all ranks or left over on all."""
        if self.errors:
            raise Violation(f"nobody died, and yet: {self.errors}")
        self.check_actions()
        for number in range(self.fits):
            fits = [fits[number] for fits in self.done]
            if len({(tuple(name for name, _ in fit.acted), tuple(fit.left_over or ())) for fit in fits}) > 1:
                raise Violation(f"the ranks differ in what they did: {fits}")
            settled = {name for name, _ in fits[0].acted} | set(fits[0].left_over or ())
            if settled != {name for fit in fits for name in fit.requested}:
                raise Violation(f"requested {[fit.requested for fit in fits]}, but acted on or left over {settled}")
            if any(set(fit.announced) != settled for fit in fits):
                raise Violation("an event was not announced on every rank")


def run_undisturbed(seed: int, mistakes: Mistakes | None = None, *, small: bool = False, **options: Any) -> Simulation:
    simulation = Simulation(seed, mistakes, small=small, **options)
    simulation.run()
    simulation.check_undisturbed()
    return simulation


def run_with_a_fall(seed: int, rank: int, step: int, mistakes: Mistakes | None = None, **options: Any) -> Simulation:
    simulation = Simulation(seed, mistakes, fall=(rank, step), **options)
    simulation.run()
    simulation.check_actions()
    for survivor in set(range(simulation.world_size)) - {rank}:
        if survivor in simulation.errors and simulation.done[survivor][-1].member._end_agreed:
            raise Violation(f"rank {survivor} failed after the end was agreed: {simulation.errors}")
        if survivor not in simulation.errors and simulation.done[rank][-1].member.passed != FINISHED:
            raise Violation(f"rank {survivor} ended well although rank {rank} never did")
    return simulation


def every_fall(seeds: range, stride: int = 1) -> Iterator[tuple[int, int, int]]:
    """Every rank of a short fit before each of its steps, or every few: (seed, rank, step)."""
    for seed in seeds:
        for rank, steps in enumerate(run_undisturbed(seed, small=True).steps_of):
            for step in range(seed % stride, steps, stride):
                yield seed, rank, step


def random_falls(seeds: range) -> Iterator[tuple[int, int, int]]:
    """A random rank of a longer run before a random step: (seed, rank, step)."""
    for seed in seeds:
        chosen = random.Random(seed)
        yield seed, chosen.randrange(2), chosen.randrange(600)


def schedules(fast: int, all_: int) -> pytest.MarkDecorator:
    """The seeds of a test: so many of them in `make test`, and the rest in CI."""
    # A simulation changes threads at every step, for which those that run beside it make it wait.
    marks = (pytest.mark.slow, pytest.mark.timeout(1800))
    rest = pytest.param(range(fast, all_), marks=marks, id="the rest")
    return pytest.mark.parametrize("seeds", [pytest.param(range(fast), id="some"), rest])


@schedules(80, 250)
def test_all_ranks_act_at_the_same_boundary_or_none_does(seeds: range) -> None:
    acted = left_over = between = several = 0
    for seed in seeds:
        simulation = run_undisturbed(seed)
        several += len(simulation.nodes) > 1
        for store in (simulation.store, *simulation.node_stores):
            assert store.num_keys() <= 40 * simulation.fits, "it grows with the events"
        for fit in simulation.done[0]:
            acted += len(fit.acted)
            left_over += len(fit.left_over or ())
            between += sum(position[1] == 0 for _, position in fit.acted)
    # The schedules reach what they are meant to reach.
    assert acted > 0.7 * len(seeds)
    assert several > 0.2 * len(seeds)
    assert left_over > 0.12 * len(seeds)
    assert between > 0.12 * len(seeds)


def test_a_rank_alone_acts_without_polling() -> None:
    acted = 0
    for seed in range(40):
        simulation = run_undisturbed(seed, alone=True, deadlines=(1e6, 1e6))  # no deadline wakes a watcher
        acted += sum(len(fit.acted) for fit in simulation.done[0])
        run_with_a_fall(seed, 0, seed + 30, alone=True, raises=True)
    assert acted > 20


QUICK, LONG_END = (0.5, 0.5), 12.0


@pytest.mark.slow
def test_those_that_have_finished_wait_for_one_that_takes_its_time() -> None:
    for seed in range(8):
        simulation = run_undisturbed(seed, small=True, deadlines=QUICK, long_end=LONG_END)
        assert simulation.now > LONG_END
        for store in (simulation.store, *simulation.node_stores):
            assert store.num_keys() <= 40, "it grows with the time"


@pytest.mark.slow
@schedules(6, 18)
@pytest.mark.parametrize("rank_0_owns_store", [True, False], ids=["store dies with rank 0", "store survives"])
def test_those_that_have_finished_do_not_wait_for_one_that_is_gone(rank_0_owns_store: bool, seeds: range) -> None:
    """Whoever dies: the one that takes its time, or one that waits for it. Arrivals have no limit that could help."""
    forever = (QUICK[0], 1e6)
    waited = 0
    for seed in seeds:
        steps = run_undisturbed(seed, small=True, deadlines=forever, long_end=LONG_END).steps_of
        rank = seed % 2
        step = random.Random(seed).randrange(steps[rank] // 3, steps[rank])  # most of them are made at the end
        fall = {"small": True, "deadlines": forever, "rank_0_owns_store": rank_0_owns_store, "long_end": LONG_END}
        simulation = run_with_a_fall(seed, rank, step, **fall)
        for survivor, told_at in simulation.told_at.items():
            known_at = max(simulation.fell_at, simulation.finished_at.get(survivor, told_at))
            assert told_at - known_at <= 12 * QUICK[0]
            waited += known_at == simulation.fell_at
    assert waited > 1


def sizes(*owners: Any) -> int:
    """How many things its owners keep."""
    return sum(len(each) for owner in owners for each in vars(owner).values() if isinstance(each, dict | list | deque))


def most_kept(nodes: list[list[int]], events: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lets ranks ask for events, one to three at a time, until all have acted on so many.

    Returns:
        How much the stores and those that use them have kept between the events, at most, in things and in bytes of
        the stores: of the first half, of all.
    """
    chosen, now = random.Random(0), 0.0
    above, here = LocalStore(), [LocalStore() for _ in nodes]
    limits = (lambda: now, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT)
    relays = [Relay(nodes, node, *limits) for node in range(len(nodes))]
    members = [Member(nodes, node, index, *limits) for node in range(len(nodes)) for index in range(len(nodes[node]))]
    node_of = [node for node, ranks in enumerate(nodes) for _ in ranks]
    watchers = [*zip((each.watch() for each in members), node_of, strict=True)]
    watchers += [(relay.watch(), node) for node, relay in enumerate(relays)]
    due: list[deque[Event]] = [deque() for _ in members]
    acted, asked, batches = 0, 0, 0
    most: list[tuple[int, ...]] = [(0, 0), (0, 0)]
    while asked < events:
        for _ in range(chosen.choice([1, 1, 2, 3])):
            members[chosen.randrange(len(members))].request("save", {"id": asked}, Needs.NOTHING)
            asked += 1
        while acted < asked * len(members):
            now, batches = now + 0.1, batches + 1
            for member, mine in zip(members, due, strict=True):
                if mine and member.arrived():
                    acted += 1
                    mine.popleft()
                    if mine:
                        member.arrive(mine[0])
                if not mine and (crossed := member.cross(training(batches), Needs.TRAINING | Needs.CLEAN)):
                    mine.extend(crossed)
                    member.arrive(mine[0])
            for watch, node in watchers:
                result = None
                while not isinstance(wanted := watch.send(result), Sleep):
                    if isinstance(wanted, Above):
                        result = wanted.operation.apply(above)
                    else:
                        result = None if isinstance(wanted, Announce) else wanted.apply(here[node])
        things = sizes(above, *here, *relays, relays[0]._lead, *members)
        text = sum(len(value) for store in (above, *here) for value in store._values.values())
        most[1] = tuple(map(max, most[1], (things, text)))
        if 2 * asked <= events:
            most[0] = most[1]
    return most[0], most[1]


@pytest.mark.parametrize(
    ("nodes", "events"),
    [
        ([[0, 1], [2, 3]], 200),
        ([[rank] for rank in range(66)], 16),  # more than one group of nodes
        pytest.param([[0], [1]], 1_000_000, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)]),
    ],
)
def test_nothing_grows_with_the_events(nodes: list[list[int]], events: int) -> None:
    (half, half_text), (most, most_text) = most_kept(nodes, events)
    assert most <= half + 4 * len(nodes), "it grows with the events"
    assert most_text <= half_text + 100 * len(nodes), "what is kept gets longer with the events"


@pytest.mark.slow_but_for("store dies with rank 0-some")
@schedules(50, 200)
@pytest.mark.parametrize("rank_0_owns_store", [True, False], ids=["store dies with rank 0", "store survives"])
def test_nobody_hangs_or_acts_alone_wherever_a_rank_dies(rank_0_owns_store: bool, seeds: range) -> None:
    lost = 0
    for seed, rank, step in every_fall(range(4), stride=3000 // len(seeds)):  # one node or two
        simulation = run_with_a_fall(seed, rank, step, small=True, rank_0_owns_store=rank_0_owns_store)
        lost += any(isinstance(error, PeerLost) for error in simulation.errors.values())
    for seed, rank, step in random_falls(seeds):
        simulation = run_with_a_fall(seed, rank, step, rank_0_owns_store=rank_0_owns_store)
        lost += any(isinstance(error, PeerLost) for error in simulation.errors.values())
    assert lost > 0.4 * len(seeds)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_nobody_hangs_or_acts_alone_whenever_a_rank_dies(seed: int) -> None:
    for fall in every_fall(range(seed, seed + 1)):
        run_with_a_fall(*fall, small=True)


@pytest.mark.campaign
def test_all_ranks_act_at_the_same_boundary_or_none_does_at_length() -> None:
    for seed in range(1000, 6000):
        run_undisturbed(seed)


@pytest.mark.slow
@schedules(50, 150)
def test_a_rank_that_raises_is_named_to_all_others(seeds: range) -> None:
    told = 0
    for seed, rank, step in random_falls(seeds):
        forever = (ANSWER_TIMEOUT, 1e6)  # it is not by a deadline of their own that they learn of it
        simulation = run_with_a_fall(seed, rank, step, raises=True, rank_0_owns_store=False, deadlines=forever)
        for survivor, error in simulation.errors.items():
            if survivor != rank and isinstance(error, PeerLost):
                assert f"rank {rank} stopped: out of memory" in str(error)
                told += 1
    assert told > 0.15 * len(seeds)


@pytest.mark.slow
@schedules(25, 75)
def test_a_restart_on_the_same_store_sees_nothing_of_the_attempt_before(seeds: range) -> None:
    for seed, rank, step in random_falls(seeds):
        simulation = run_with_a_fall(seed, rank, step, rank_0_owns_store=False)
        run_undisturbed(seed, store=simulation.store, attempt=1)


class ByHand:
    """A watcher that makes the steps that a test wants it to make."""

    def __init__(self, watch: Any, store: LocalStore) -> None:
        self.watch = watch
        self.here, self.above = (Prefixed(store, lambda: False, prefix) for prefix in ("here/", "above/"))
        self.wanted: Any = None
        self.over = False

    def step(self) -> None:
        result: Any = None
        if isinstance(self.wanted, Above):
            result = self.wanted.operation.apply(self.above)
        elif self.wanted is not None and not isinstance(self.wanted, Sleep | Announce):
            result = self.wanted.apply(self.here)
        self.wanted = None  # where it ends
        self.wanted = self.watch.send(result)

    def run_until(self, wanted: Callable[[Any], bool]) -> None:
        """Goes on until the watcher wants this, and has not got it yet."""
        self.step()
        while not wanted(self.wanted):
            self.step()

    def pause(self) -> None:
        """Goes on until it sleeps, or to its end."""
        try:
            self.run_until(lambda wanted: isinstance(wanted, Sleep))
        except StopIteration:
            self.over = True


def two_and_a_relay(store: LocalStore) -> tuple[list[Member], list[ByHand], ByHand]:
    """Two ranks of one node."""
    limits = (lambda: 0.0, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT)
    ranks = [Member([[0, 1]], 0, rank, *limits) for rank in range(2)]
    return ranks, [ByHand(rank.watch(), store) for rank in ranks], ByHand(Relay([[0, 1]], 0, *limits).watch(), store)


def test_who_expects_that_another_rank_asks_looks_often_for_a_moment() -> None:
    """Else all others would wait for it at their next boundary until it looks by itself."""
    now = 0.0
    limits = (lambda: now, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT)
    member, relay = Member([[0, 1]], 0, 0, *limits), Relay([[0, 1]], 0, *limits)
    store = LocalStore()

    def sleeps(watching: Generator[Any, Any, None], result: Any = None) -> float:
        """How long the watcher sleeps next."""
        while not isinstance(wanted := watching.send(result), Sleep):
            result = (wanted.operation if isinstance(wanted, Above) else wanted).apply(store)
        return wanted.seconds

    for watching, expect in ((member.watch(), member.expect), (relay.watch(), relay.look_at_once)):
        sleeps(watching)
        now += 10.0
        idle = sleeps(watching)
        expect()
        assert sleeps(watching) < idle / 10
        now += 10.0
        assert sleeps(watching) == idle


@pytest.mark.parametrize(("size", "silent"), [(3, {1}), (64, {0, 63}), (130, {64, 129}), (4200, {5, 4199})])
def test_the_largest_position_is_found_and_so_is_who_is_missing(size: int, silent: set[int]) -> None:
    store, published = LocalStore(), list[str]()

    def publish(position: str) -> Generator[Any, Any, None]:
        published.append(position)
        yield Sleep(0.0)

    def run_all(steps: Generator[Any, Any, Any]) -> Any:
        result = None
        while True:
            try:
                wanted = steps.send(result)
            except StopIteration as stop:
                return stop.value
            result = None if isinstance(wanted, Sleep) else wanted.apply(store)

    late = sorted(silent)
    for index in (index for index in range(size) if index not in silent):
        run_all(_meet("round/0", index, size, json.dumps(training(index)), publish))
    assert run_all(_missing("round/0", size)) == late
    for index in late:
        assert not published
        run_all(_meet("round/0", index, size, json.dumps(training(index)), publish))
    assert published == [json.dumps(training(size - 1))]
    assert store.num_keys() == 0


@pytest.mark.parametrize("peer_is_lost", [True, False])
def test_the_owner_of_a_store_leaves_once_the_others_know_why(peer_is_lost: bool) -> None:
    """Where a rank is gone, the others notice for themselves."""
    for first in (0, 1):
        ranks, watches, _ = two_and_a_relay(LocalStore())
        ranks[first].abort("it is not to be had", peer_is_lost)
        watches[first].pause()
        watches[0].pause()
        assert ranks[0].over == (peer_is_lost or first == 1)
        watches[1].pause()
        watches[0].pause()
        assert ranks[0].over


def three(clock: Callable[[], float] = lambda: 0.0) -> tuple[list[Member], list[ByHand]]:
    """The ranks of one node, which have looked once."""
    store = LocalStore()
    ranks = [Member([[0, 1, 2]], 0, rank, clock, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT) for rank in range(3)]
    watches = [ByHand(rank.watch(), store) for rank in ranks]
    for watch in watches:
        watch.pause()
    return ranks, watches


@pytest.mark.parametrize("first", [0, 1])
def test_who_raises_counts_as_one_of_those_that_know_why(first: int) -> None:
    ranks, watches = three()
    ranks[first].abort("it is not to be had", False)
    for rank in (first, 1, 0):
        watches[rank].pause()
    assert not ranks[0].over  # rank 2 does not know yet
    for rank in (2, 0):
        watches[rank].pause()
    assert ranks[0].over


def test_the_owner_of_a_store_waits_for_those_that_are_gone_but_once() -> None:
    now = [0.0]
    ranks, watches = three(lambda: now[0])
    ranks[0].abort("it is not to be had", False)
    watches[0].pause()
    assert not ranks[0].over
    now[0] += 1.0
    watches[0].pause()
    assert ranks[0].over


def test_of_several_reasons_the_first_counts() -> None:
    ranks, watches = three()
    ranks[1].abort("out of memory", False)
    ranks[2].abort("connection closed by peer", True)
    for rank in (1, 2):
        watches[rank].run_until(lambda wanted: getattr(wanted, "key", "") == "abort" and not isinstance(wanted, Get))
    for rank in (1, 2, 0):
        watches[rank].pause()
    watches[0].pause()
    for each in ranks:
        with pytest.raises(PeerLost, match="out of memory"):
            each.ended()


@pytest.mark.parametrize("is_gone", [True, False], ids=["the store of the job is gone", "another node has failed"])
def test_what_a_relay_hears_does_not_replace_the_reason_of_its_node(is_gone: bool) -> None:
    nodes, store = [[0], [1]], LocalStore()
    member = Member(nodes, 1, 0, lambda: 0.0, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT)
    relay = ByHand(Relay(nodes, 1, lambda: 0.0, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT).watch(), store)
    relay.run_until(lambda wanted: wanted == Above(Get("status")))
    member.abort("out of memory", False)
    ByHand(member.watch(), store).pause()  # which the relay has not seen yet
    if is_gone:
        relay.wanted = relay.watch.throw(ConnectionError("Broken pipe"))
    else:
        relay.above.set("status", json.dumps({"abort": "rank 0 stopped: a mistake"}))
    relay.pause()
    assert b"out of memory" in (Get("abort").apply(relay.here) or b"")


def test_a_reason_outlives_the_store() -> None:
    ranks, watches = three()
    ranks[0].abort("out of memory", False)
    watches[0].run_until(lambda wanted: wanted == Add("told", 0))
    with suppress(ConnectionError):
        watches[0].watch.throw(ConnectionError("Broken pipe"))
        watches[0].watch.throw(ConnectionError("Broken pipe"))
    ranks[0].lose_touch(ConnectionError("Broken pipe"))
    with pytest.raises(PeerLost, match="out of memory"):
        ranks[0].ended()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("peer_is_lost", [True, False])
def test_the_owner_of_the_store_of_the_job_leaves_once_the_other_nodes_know_why(peer_is_lost: bool, first: int) -> None:
    now, nodes = [0.0], [[0], [1]]
    limits = (lambda: now[0], ANSWER_TIMEOUT, ARRIVAL_TIMEOUT)
    members = [Member(nodes, node, 0, *limits) for node in range(2)]
    relays = [Relay(nodes, node, *limits) for node in range(2)]
    watches = []
    for member, relay in zip(members, relays, strict=True):
        here = LocalStore()
        watches.append([ByHand(each.watch(), here) for each in (member, relay)])
        watches[-1][1].above = watches[0][1].above

    def turn(node: int) -> None:
        now[0] += 0.01  # within the few polls that it waits
        for each in watches[node] * 2:
            each.pause()

    members[first].abort("it is not to be had", peer_is_lost)
    turn(first)
    turn(0)
    assert watches[0][1].over == (peer_is_lost or first == 1)
    turn(1)
    turn(0)
    assert all(each.over for of_node in watches for each in of_node)
    for member in members:
        with pytest.raises(PeerLost, match="it is not to be had"):
            member.ended()


def test_what_several_ranks_ask_for_is_one_event() -> None:
    ranks, watches, relay = two_and_a_relay(LocalStore())
    for rank in ranks:
        rank.request("preempt", {"signum": 15}, Needs.NOTHING)
    ranks[1].request("preempt", {"signum": 10}, Needs.NOTHING)
    for rank in (0, 0):  # the same rank means it twice
        ranks[rank].request("save", {}, Needs.NOTHING)
    for each in (*watches, relay):
        each.pause()
    listed = json.loads(Get("round/0").apply(watches[0].here) or b"")
    assert [(event["number"], event["kind"], event["rank"]) for event in listed] == [
        (0, "preempt", 0),
        (1, "save", 0),
        (2, "save", 0),
        (3, "preempt", 1),
    ]


@pytest.mark.parametrize(
    ("ranks", "within_s"),
    [
        (1024, 0.3),
        pytest.param(16_384, 5.0, marks=pytest.mark.campaign),
        pytest.param(102_400, 10.0, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)]),
    ],
)
def test_all_act_soon_and_ask_little_of_a_store_that_answers_20_000_calls_a_second(ranks: int, within_s: float) -> None:
    benchmark = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "control_plane.py"), run_name="benchmark")
    found = benchmark["measure"](ranks, benchmark["Costs"](*[1 / 20_000] * 5), events=1)
    assert found["seconds"] <= within_s
    assert found["calls"] <= 3
    assert found["polls"] <= 4_500


def test_what_was_asked_before_the_end_is_not_lost_while_the_relay_looks() -> None:
    (first, second), (watch_1, watch_2), relay = two_and_a_relay(LocalStore())
    first.finish()
    watch_1.pause()
    relay.run_until(lambda wanted: wanted == Get("event/0"))
    relay.step()  # it sees no event
    second.request("save", {}, Needs.NOTHING)
    second.finish()
    watch_2.pause()
    while not (first.over and second.over):
        for each in (relay, watch_1, watch_2):
            each.pause()
    for rank in (first, second):
        assert [event.kind for event in rank.ended() or ()] == ["save"]


def test_a_rank_that_acted_and_finished_has_arrived() -> None:
    event = Event(0, "report", 0, Needs.NOTHING, {})
    (first, second), (watch_1, watch_2), relay = two_and_a_relay(LocalStore())
    first.request(event.kind, {}, Needs.NOTHING)
    for each in (watch_1, relay, watch_1, watch_2, relay, watch_1, watch_2):
        each.pause()
    first.arrive(event)
    watch_1.run_until(lambda wanted: wanted == Get("finished"))
    second.arrive(event)
    for each in (watch_2, relay, watch_2):
        each.pause()
    assert second.arrived()
    second.finish()
    watch_2.pause()
    watch_1.pause()
    assert first.arrived()


def test_who_has_answered_is_not_blamed_for_a_relay_that_is_silent() -> None:
    now, store = [0.0], LocalStore()
    ranks = [Member([[4, 5]], 0, index, lambda: now[0], ANSWER_TIMEOUT, ARRIVAL_TIMEOUT) for index in range(2)]
    watches = [ByHand(rank.watch(), store) for rank in ranks]
    event = {"number": 0, "kind": "save", "rank": 4, "needs": 0, "payload": {}}
    watches[0].here.set("round/0", json.dumps([event]))
    for watch in watches:
        watch.pause()
    now[0] = 3 * ANSWER_TIMEOUT
    watches[1].pause()
    assert ranks[1]._failure is not None
    assert "a rank died just when all ranks did answer" in ranks[1]._failure


def test_a_store_that_goes_after_the_agreed_end_is_not_missed() -> None:
    (rank, _), (watch, _), _ = two_and_a_relay(LocalStore())
    watch.here.set("round/0", "[]")
    rank.finish()
    watch.run_until(lambda wanted: wanted == Add("left", 1))
    rank.lose_touch(ConnectionError("Broken pipe"))
    assert rank.ended() == ()


class NeverDone(Member):
    """A rank that has finished leaves without a word."""

    def finish(self) -> None:
        self.passed = FINISHED
        self._end_agreed = True


class NeverHeld(Member):
    """The main thread goes on while its position is being compared."""

    def cross(self, position: Position, allows: Needs) -> tuple[Event, ...] | None:
        held, self._held = self._held, None
        try:
            return super().cross(position, allows)
        finally:
            self._held = held
            self._update_alert()


class OwnPositionCounts(Member):
    """Every rank acts after its own position instead of the largest one."""

    def _follow_rounds(self) -> Any:
        known = len(self._pending)
        yield from super()._follow_rounds()
        self._pending[known:] = [(self.passed, event) for _, event in self._pending[known:]]


class ForgetsAtOnce(Relay):
    """What others have not read yet is deleted."""

    def _bring_answer(self, name: str, position: str) -> Any:
        self._past[name.partition("/")[0]] = name
        yield from super()._bring_answer(name, position)


@pytest.mark.parametrize(
    "mistakes",
    [
        pytest.param(Mistakes(stale_keys=True), id="a second fit on the keys of the first"),
        pytest.param(Mistakes(plain_counter=True), id="a plain counter for a position"),
        pytest.param(Mistakes(no_end_of_evaluation=True), id="no boundary at the end of an evaluation"),
        pytest.param(Mistakes(member=NeverDone), id="the end is not an event"),
        pytest.param(Mistakes(member=NeverHeld), id="nobody is held"),
        pytest.param(Mistakes(member=OwnPositionCounts), id="no common position"),
        pytest.param(Mistakes(relay=ForgetsAtOnce), id="keys are deleted that are still wanted"),
    ],
)
def test_the_simulation_finds_a_mistake_that_is_put_back(mistakes: Mistakes) -> None:
    with pytest.raises(Violation):
        deque((run_undisturbed(seed, mistakes) for seed in range(300)), maxlen=0)


def test_the_simulation_finds_a_missing_arrival() -> None:
    mistakes = Mistakes(no_arrival=True)
    with pytest.raises(Violation, match="acted on event"):
        deque((run_with_a_fall(*fall, mistakes) for fall in random_falls(range(1000))), maxlen=0)
