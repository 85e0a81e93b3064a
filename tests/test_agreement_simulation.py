"""The shipped agreement under a simulated scheduler, store and clock, so that thousands of interleavings can be tried.

Every rank runs a small training script against its `Participant`, beside its watcher and somebody who makes requests at
random moments. The scheduler decides after every step of anybody who goes next, and how long a sleep really takes. What a
healthy agreement may never do is a `Violation`; the last tests put old mistakes back and expect one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_resilience.agreement import (
    FINISHED,
    Announce,
    Event,
    LocalStore,
    Needs,
    Participant,
    PeerLost,
    Position,
    Sleep,
    end_of_evaluation,
    evaluation,
    training,
)

ANSWER_TIMEOUT, ARRIVAL_TIMEOUT, COLLECTIVE_TIMEOUT = 10.0, 60.0, 5.0
BATCHES, WINDOW, EVALUATE_EVERY = 4, 2, 2


class Violation(AssertionError):
    """The ranks did something that deadlocks or corrupts a real training."""


class CollectiveBroken(RuntimeError):
    """What gloo and NCCL raise some time after a peer has died in a collective."""


class Boom(RuntimeError):
    """An error in the training script of one rank."""


class Prefixed:
    """A view of the shared store, gone once the process that owned the store has died."""

    def __init__(self, simulation: Simulation, prefix: str) -> None:
        self.simulation, self.prefix = simulation, prefix

    def _store(self) -> LocalStore:
        if self.simulation.store_lost:
            raise ConnectionError("Broken pipe")
        return self.simulation.store

    def check(self, keys: list[str]) -> bool:
        return self._store().check([self.prefix + key for key in keys])

    def get(self, key: str) -> bytes:
        return self._store().get(self.prefix + key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store().multi_get([self.prefix + key for key in keys])

    def set(self, key: str, value: str) -> None:
        self._store().set(self.prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store().add(self.prefix + key, amount)


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

    participant: Participant
    requested: list[int] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)
    acted: list[tuple[int, Position]] = field(default_factory=list)
    left_over: list[int] | None = None
    boundaries: int = 0


@dataclass
class Mistakes:
    """Mistakes that an agreement, or its user, could make."""

    participant: type[Participant] = Participant
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
    ) -> None:
        """`fall`: the rank that dies (or `raises`) and before which of its own steps."""
        self.random = random.Random(seed)
        self.mistakes = mistakes or Mistakes()
        self.fall, self.raises = fall, raises
        self.rank_0_owns_store, self.store_lost = rank_0_owns_store, False
        self.store = store or LocalStore()
        self.attempt = attempt

        self.world_size = self.random.choice([2, 2, 3, 3, 4])
        self.evaluation_batches = [self.random.choice([1, 2, 5]) for _ in range(self.world_size)]
        self.fits = self.random.choice([1, 1, 2])
        self.slowness = self.random.choice([0.003, 0.03])
        self.now = 0.0
        self.steps_of = [0] * self.world_size
        self.gone: set[int] = set()
        self.collectives: list[list[tuple[Any, ...]]] = [[] for _ in range(self.world_size)]
        self.reached: dict[tuple[int, int], set[int]] = {}  # (fit, event) -> ranks about to act
        self.done: list[list[Fit]] = [[] for _ in range(self.world_size)]
        self.errors: dict[int, Exception] = {}
        self.moved = [False] * self.world_size  # the watcher has moved since the main thread looked
        self.woken = [False] * self.world_size  # the main thread wants the watcher
        self.actors = [Actor(rank, self.script(rank)) for rank in range(self.world_size)]
        self.mains = list(self.actors)

    # ---- the scheduler

    def run(self) -> None:
        while any(main in self.actors for main in self.mains):
            ready = [actor for actor in self.actors if actor.wait.until <= self.now or actor.wait.ready()]
            if not ready:
                self.now = min(actor.wait.until for actor in self.actors)
                if self.now > self.fits * 2 * (ANSWER_TIMEOUT + ARRIVAL_TIMEOUT):
                    raise Violation(f"hangs; errors so far: {self.errors}")
                continue
            actor = self.random.choice(ready)
            if self.fall == (actor.rank, self.steps_of[actor.rank]):
                self.fall = None
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
        self.store_lost = self.store_lost or (rank == 0 and self.rank_0_owns_store)

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
            self.errors[rank] = error
            participant = self.done[rank][-1].participant
            participant.abort(str(error))
            self.woken[rank] = True
            while not participant.over:
                yield self.until_moved(rank)
        self.gone.add(rank)
        if self.rank_0_owns_store and rank == 0:
            self.store_lost = True

    def run_fit(self, rank: int, number: int) -> Steps:
        prefix = "" if self.mistakes.stale_keys else f"{self.attempt}/{number}/"
        participant = self.mistakes.participant(
            rank, self.world_size, lambda: self.now, ANSWER_TIMEOUT, ARRIVAL_TIMEOUT
        )
        fit = Fit(participant)
        self.done[rank].append(fit)
        self.actors.append(Actor(rank, self.watch(rank, fit, Prefixed(self, prefix))))
        self.actors.append(Actor(rank, self.ask(rank, fit)))
        untouched: tuple[Event, ...] = ()
        try:
            yield from self.evaluate(rank, number, fit, 0)
            for batches in range(1, BATCHES + 1):
                yield self.sleep(self.slowness)
                yield from self.collective(rank, number, "gradients", batches)
                if batches % EVALUATE_EVERY == 0:
                    yield from self.evaluate(rank, number, fit, batches)
                clean = Needs.CLEAN if batches % WINDOW == 0 else Needs.NOTHING
                yield from self.boundary(rank, number, fit, training(batches), Needs.TRAINING | clean)
        except Stop as stop:
            untouched = stop.untouched
        participant.finish()
        untouched += yield from self.wait_for(rank, participant.ended)
        fit.left_over = sorted(event.payload["id"] for event in untouched)

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
        events = yield from self.wait_for(rank, lambda: fit.participant.cross(place, allows))
        for done, event in enumerate(events, start=1):
            if event.needs not in allows:
                raise Violation(f"{event} acted on at {position}, which allows {allows}")
            self.reached.setdefault((number, event.number), set()).add(rank)
            if not self.mistakes.no_arrival:
                fit.participant.arrive(event)
                yield from self.wait_for(rank, fit.participant.arrived)
            fit.acted.append((event.payload["id"], position))
            yield from self.collective(rank, number, "act", event.number)
            if event.kind == "stop":  # a rank that evaluates more batches may get the others only later, so never
                raise Stop(events[done:])

    def wait_for(self, rank: int, step: Callable[[], Any]) -> Steps:
        self.woken[rank] = True
        while (result := step()) is None:
            yield self.until_moved(rank)
        return result

    def until_moved(self, rank: int) -> Wait:
        self.moved[rank] = False
        return Wait(ready=lambda: self.moved[rank])

    def watch(self, rank: int, fit: Fit, store: Prefixed) -> Steps:
        watch, result = fit.participant.watch(), None
        while True:
            self.moved[rank] = True
            try:
                wanted = watch.send(result)
            except StopIteration:
                return
            result = None
            if isinstance(wanted, Sleep):
                self.woken[rank] = False
                pause = self.sleep(wanted.seconds)
                yield Wait(pause.until, lambda: self.woken[rank])
            elif isinstance(wanted, Announce):
                fit.announced.append(wanted.event.payload["id"])
            else:
                yield AT_ONCE  # between the transition and the operation
                try:
                    result = wanted.apply(store)
                except ConnectionError as error:
                    fit.participant.lose_touch(error)
                    self.moved[rank] = True
                    return
                yield AT_ONCE  # between the operation and the next transition

    def ask(self, rank: int, fit: Fit) -> Steps:
        for _ in range(self.random.choice([0, 0, 1, 2, 3])):
            yield self.sleep(self.slowness * self.random.choice([0, 3, 10]))
            if fit.participant.passed < FINISHED:  # what is asked after the end may be dropped
                name = self.random.randrange(2**31)
                fit.requested.append(name)
                needs = self.random.choice([Needs.NOTHING, Needs.NOTHING, Needs.TRAINING, Needs.CLEAN])
                fit.participant.request(self.random.choice(["save"] * 5 + ["stop"]), {"id": name}, needs)
                self.woken[rank] = True

    def collective(self, rank: int, *name: Any) -> Steps:
        """Lets nobody go before all ranks are in it, and no rank be in another one."""
        entered = self.collectives
        entered[rank].append(name)
        number = len(entered[rank]) - 1
        for other in range(self.world_size):
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
                    raise Violation(f"rank {rank} acted on event {event} and had only {self.reached[fit, event]} beside it")
        for number in range(self.fits):
            fits = [fits[number] for fits in self.done if len(fits) > number]
            for acted in zip(*(fit.acted for fit in fits)):
                ids, positions = zip(*acted)
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


def run_undisturbed(seed: int, mistakes: Mistakes | None = None, **options: Any) -> Simulation:
    simulation = Simulation(seed, mistakes, **options)
    simulation.run()
    simulation.check_undisturbed()
    return simulation


def run_with_a_fall(seed: int, rank: int, step: int, mistakes: Mistakes | None = None, **options: Any) -> Simulation:
    simulation = Simulation(seed, mistakes, fall=(rank, step), **options)
    simulation.run()
    simulation.check_actions()
    return simulation


def falls(seeds: range) -> Iterator[tuple[int, int, int]]:
    """Every rank before each of its steps: (seed, rank, step)."""
    for seed in seeds:
        simulation = run_undisturbed(seed)
        for rank, steps in enumerate(simulation.steps_of):
            for step in range(steps):
                yield seed, rank, step


def test_all_ranks_act_at_the_same_boundary_or_none_does() -> None:
    acted = left_over = between = 0
    for seed in range(2500):
        simulation = run_undisturbed(seed)
        for fit in simulation.done[0]:
            acted += len(fit.acted)
            left_over += len(fit.left_over or ())
            between += sum(position[1] == 0 for _, position in fit.acted)
    # The schedules reach what they are meant to reach.
    assert acted > 1000
    assert left_over > 200
    assert between > 200
