"""The local saves of all ranks under the simulated scheduler, stores and clock of the agreement's simulation.

The shipped `SaveCoordinator` and `LocalSaves` run beside the agreement. Their blocking calls run in threads of which
one at a time goes on, when the scheduler says so: a call to the store, or a wait, is where it may take another one.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_resilience.agreement_protocol import Get, Needs, PeerLost
from lightning_resilience.checkpoint import local, schedule
from lightning_resilience.checkpoint.generations import RankLocation
from lightning_resilience.checkpoint.local import LocalSaves, Peers
from lightning_resilience.checkpoint.rank_state import RankState
from lightning_resilience.checkpoint.save_coordinator import SaveCoordinator
from lightning_resilience.checkpoint.schedule import ChosenInterval, Schedule
from lightning_resilience.run.save_interval import WARM_UP_STEPS
from tests.test_agreement_simulation import AT_ONCE, Actor, Fit, Simulation, Steps, Violation, Wait, schedules

BATCHES, EVERY = 16, 2
FAILS = 0.1
STALL_S, CHOSEN_S, FIRST_S = 0.016, 16.0, 1.6  # what a save costs, and the intervals that follow from it
PREPARES_S = 0.9  # now and then, as where memory is hard to get
MESSAGES, SLOWEST = 15, 4  # that an answer takes, with some to spare; how many times longer a sleep may be
current = threading.local()


class Killed(BaseException):
    """The simulation is over, and this thread with it."""


class StoreGone(RuntimeError):
    """As torch's, when the process that owned the store has died."""


class Strand:
    """A thread that goes on when it is told to, as the generators of the simulation do."""

    def __init__(self, target: Callable[[], Any]) -> None:
        self.over = self.killed = False
        self.wait = AT_ONCE
        self._target = target
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def steps(self) -> Steps:
        self._thread.start()
        while True:
            self._go.release()
            self._paused.acquire()
            if self.over:
                if self._error is not None:
                    raise self._error
                return self._result
            yield self.wait

    def pause(self, wait: Wait) -> None:
        """Called by the thread: it goes on when the wait is over."""
        self.wait = wait
        self._paused.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        if self._thread.ident is not None and not self.over:
            self.killed = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        current.strand = self
        try:
            if not self.killed:
                self._result = self._target()
        except BaseException as error:
            self._error = error
        self.over = True
        self._paused.release()


class Condition:
    """Of the threads of one rank, which only give way in a wait: a forgotten notification is missed here too."""

    def __init__(self, simulation: Saves) -> None:
        self._simulation = simulation
        self._notified = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        self._notified += 1

    def wait(self, timeout: float | None = None) -> None:
        seen = self._notified
        until = self._simulation.now + (timeout if timeout is not None else float("inf"))
        current.strand.pause(Wait(until, lambda: self._notified != seen))

    def wait_for(self, condition: Callable[[], bool], timeout: float = float("inf")) -> bool:
        until = self._simulation.now + timeout
        while not condition() and self._simulation.now < until:
            self.wait(until - self._simulation.now)
        return condition()


class Client:
    """A client of the job's store, whose messages take as long as the scheduler likes."""

    def __init__(self, simulation: Saves, is_lost: Callable[[], bool], prefix: str) -> None:
        self._simulation, self._store = simulation, simulation.store
        self._is_lost, self._prefix = is_lost, prefix

    def _do(self, operation: Callable[[], Any]) -> Any:
        current.strand.pause(self._simulation.sleep(self._simulation.delay))
        if self._is_lost():
            raise StoreGone("Broken pipe")
        result = operation()
        current.strand.pause(AT_ONCE)
        return result

    def _value(self, key: str) -> bytes | None:
        return Get(self._prefix + key).apply(self._store)

    def wait(self, keys: list[str], timeout: object) -> None:
        current.strand.pause(Wait(ready=lambda: self._is_lost() or all(self._value(key) is not None for key in keys)))
        self._do(lambda: None)

    def get(self, key: str) -> bytes | None:
        return self._do(lambda: self._value(key))

    def multi_get(self, keys: list[str]) -> list[bytes | None]:
        return self._do(lambda: [self._value(key) for key in keys])

    def set(self, key: str, value: str) -> None:
        self._do(lambda: self._store.set(self._prefix + key, value))

    def add(self, key: str, amount: int) -> int:
        return self._do(lambda: self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        return self._do(lambda: self._store.delete_key(self._prefix + key))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        assert expected == ""
        self._do(lambda: self._store.set(self._prefix + key, value) if self._value(key) is None else None)


class SimulatedSaves(LocalSaves):
    """With all its decisions, and without files."""

    def __init__(self, simulation: Saves, rank: int, coordinator: SaveCoordinator) -> None:
        peers = Peers(RankLocation(rank, simulation.world_size, 0, 1, f"n{rank}"), [rank], coordinator)
        layout = {"layout": {"commons": 1}}
        self.simulation = simulation
        super().__init__(None, peers, layout, simulation.schedule(self), 2)  # type: ignore[arg-type]
        self.kept: list[str] = []  # what this rank has published
        self.complete: list[str] = []  # what it counts as complete
        self.digests: dict[str, str] = {}  # of what it has published
        self.taken: list[str] = []
        self._hooks.published = lambda step, generation: self.complete.append(generation)
        self._changed: Any = Condition(simulation)
        self._fence: Any = SimpleNamespace(pending=None, now=lambda: None, remove=lambda: None)
        empty: dict[str, Any] = {"addresses": [], "left_out": [], "through_host": {}, "tensors": [], "waited_s": 0.0}
        calls: dict[str, Any] = {"written": lambda found: [], "note_written": list, "is_good": lambda: True}
        snapshot = SimpleNamespace(release=lambda: None, **calls, **empty)
        self._snapshots: Any = SimpleNamespace(take=lambda state, stable: snapshot)
        self.boundaries: list[tuple[float, bool]] = []  # when, and whether its state was taken
        self._last = self._passed = 0
        self._busy = True
        self._schedule.start(0)

    def _begin_stall(self) -> Any:
        # The first save does much for the first time.
        return SimpleNamespace(over=lambda: None, seconds=lambda: STALL_S if self.stats.published else 60 * STALL_S)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        return self._changed.wait_for(condition, timeout_s)

    def _save(self, taken: RankState) -> list[Any]:
        current.strand.pause(self.simulation.sleep(self.simulation.saves_in_s))
        if self.simulation.random.random() < self.simulation.fails:
            raise OSError("no space left")
        self.kept.append(taken.generation)
        shard = self._location.rank % self.simulation.shards
        is_wrong = self.simulation.random.random() < self.simulation.fails
        taken._digest = self.digests[taken.generation] = f"tensors-{shard}{' and one bit' * is_wrong}"
        return [SimpleNamespace(name="")]

    def _replicate(self, *args: Any) -> None:
        pass

    def _prepare(self) -> None:
        if self.simulation.random.random() < self.simulation.fails:
            current.strand.pause(self.simulation.sleep(PREPARES_S))

    def _retire(self) -> None:
        pass

    def fail(self, step: int, error: BaseException) -> None:
        self.stats.failed += 1


class Saves(Simulation):
    """All ranks save locally at the training boundaries between which they agree on events."""

    def __init__(self, seed: int, coordinator: type[SaveCoordinator] = SaveCoordinator, **options: Any) -> None:
        super().__init__(seed, **options)
        self.batches, self.fails, self.saves_in_s = BATCHES, FAILS, self.slowness
        self.delay = self.random.choice([0.001, 0.01, 0.05])  # of a message
        self.longest_wait = 0.0
        self.coordinator = coordinator
        self.shards = 2 if seed % 2 and self.world_size % 2 == 0 else 1
        self.strands: list[Strand] = []
        self.saves: dict[int, list[SimulatedSaves]] = {rank: [] for rank in range(self.world_size)}
        self.threads: dict[int, Strand] = {}

    def schedule(self, saves: SimulatedSaves) -> Schedule:
        return Schedule(EVERY, lambda before_s: 0.0)

    def strand(self, target: Callable[[], Any]) -> Strand:
        self.strands.append(Strand(target))
        return self.strands[-1]

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(monotonic=lambda: self.now)
            patch.setattr(local, "time", clock)
            patch.setattr(schedule, "time", clock)
            patch.setattr(local, "_AGREE_TIMEOUT_S", 1.0)
            try:
                super().run()
            finally:
                for strand in self.strands:
                    strand.kill()

    def saves_begin(self, rank: int, number: int, fit: Fit) -> None:
        def is_lost() -> bool:
            return self.rank_0_owns_store and 0 in self.gone

        client, bell = (Client(self, is_lost, f"{self.attempt}/{number}/saves/") for _ in range(2))
        about: Any = client, self.world_size, bell, self.shards, rank % self.shards
        coordinator = self.coordinator(*about)
        self.saves[rank].append(SimulatedSaves(self, rank, coordinator))
        self.threads[rank] = self.strand(self.saves[rank][-1]._run)
        self.actors.append(Actor(rank, self.threads[rank].steps()))

    def save_locally(self, rank: int, number: int, fit: Fit, step: int, clean: Needs) -> Steps:
        saves, began = self.saves[rank][-1], self.now
        try:
            planned = yield from self.strand(lambda: saves.at_boundary(step, lambda: bool(clean))).steps()
        except StoreGone as error:
            raise PeerLost("the store has gone") from error
        self.longest_wait = max(self.longest_wait, self.now - began)
        saves.boundaries.append((self.now, planned is not None))
        if planned is None:
            return
        saves.taken.append(planned.generation)
        yield from self.collective(rank, number, "hooks of a save", planned.number)
        if self.random.random() < self.fails:
            saves.miss(step, RuntimeError("a hook has failed"))
        else:
            saves.take(planned, step, None, [], [])

    def saves_end(self, rank: int, fit: Fit) -> Steps:
        yield from self.strand(lambda: self.saves[rank][-1].stop(1.0)).steps()
        yield Wait(self.now + 5.0, lambda: self.threads[rank].over)
        if not self.threads[rank].over:
            raise Violation(f"the thread of rank {rank} waits forever")

    def check_actions(self) -> None:
        super().check_actions()
        for fits in zip(*self.saves.values(), strict=False):
            complete = max((saves.complete for saves in fits), key=len)
            for saves in fits:
                if not {*complete} <= {*saves.kept}:
                    raise Violation(f"{complete} count as complete; a rank has {saves.kept}")
            for one in complete:
                digests = [saves.digests[one] for saves in fits]
                if any(len({*digests[shard :: self.shards]}) > 1 for shard in range(self.shards)):
                    raise Violation(f"{one} counts as complete, and replicas differ: {digests}")
            for saves in fits:
                # Who has left, or has lost the others, does not know how the last round ended.
                if saves.complete not in (complete, complete[:-1]):
                    raise Violation(f"ranks differ in what is complete: {saves.complete}, {complete}")

    def check_undisturbed(self) -> None:
        super().check_undisturbed()
        if self.longest_wait > SLOWEST * MESSAGES * self.delay:
            raise Violation(f"a rank has waited {self.longest_wait:.3f} s at a boundary; a message takes {self.delay}")


def undisturbed(seed: int, **options: Any) -> Saves:
    simulation = Saves(seed, **options)
    simulation.run()
    simulation.check_undisturbed()
    return simulation


def with_a_fall(seed: int, **options: Any) -> Saves:
    """A random rank dies before a random step of its own."""
    chosen = random.Random(seed)
    simulation = Saves(seed, fall=(chosen.randrange(2), chosen.randrange(2500)), **options)
    simulation.run()
    simulation.check_actions()
    return simulation


def all_saves(simulation: Saves) -> Iterator[SimulatedSaves]:
    return (each for fits in simulation.saves.values() for each in fits)


@pytest.mark.slow
@schedules(20, 80)
def test_a_generation_counts_where_every_rank_has_it_and_no_rank_waits_forever(seeds: range) -> None:
    complete = taken = given_up = 0
    for seed in seeds:
        simulation = undisturbed(seed)
        for fits in zip(*simulation.saves.values(), strict=True):
            assert len({tuple(saves.taken) for saves in fits}) == 1, "nobody takes a state alone"
        for saves in all_saves(simulation):
            complete += len(saves.complete)
            taken += len(saves.taken)
            given_up += saves.stats.failed
    # The schedules reach what they are meant to reach.
    assert complete > len(seeds) / 2
    assert given_up > len(seeds) / 10
    assert taken > complete


@pytest.mark.slow_but_for("some-store survives")
@pytest.mark.parametrize("rank_0_owns_store", [True, False], ids=["store dies with rank 0", "store survives"])
@schedules(12, 60)
def test_the_same_wherever_a_rank_dies(seeds: range, rank_0_owns_store: bool) -> None:
    fallen = 0
    for seed in seeds:
        simulation = with_a_fall(seed, rank_0_owns_store=rank_0_owns_store)
        fallen += simulation.fell_at > 0
        if seed % 4 == 0 and not rank_0_owns_store:
            undisturbed(seed, store=simulation.store, attempt=1)  # a restart sees nothing of it
    assert fallen > len(seeds) / 3


class IsAlwaysInTime(SaveCoordinator):
    """A rank that has heard too late does not say so."""

    def agree(self, number: int, in_time: bool) -> bool | None:
        return super().agree(number, True)


class CountsWhatFailed(SaveCoordinator):
    """A rank says that it has published what it has not."""

    def finish(self, number: int, published: bool, digest: str = "") -> bool | None:
        return super().finish(number, True, digest)


class ComparesNothing(SaveCoordinator):
    """Whether those with the same shard have the same is not asked."""

    def finish(self, number: int, published: bool, digest: str = "") -> bool | None:
        return super().finish(number, published)


class LeavesSilently(SaveCoordinator):
    """The thread is not told that its rank leaves."""

    def end(self) -> None:
        self.over = True


class AnswersAtOnce(SaveCoordinator):
    """A rank acts on its own answer instead of that of all."""

    def agree(self, number: int, in_time: bool) -> bool | None:
        super().agree(number, in_time)
        return in_time


class IsReadyAtOnce(SaveCoordinator):
    """Rank 0 does not wait until the others have done with the last round: the training waits for them."""

    def all_are_ready(self, number: int) -> bool:
        return not self.over


@pytest.mark.slow_but_for("LeavesSilently")
@pytest.mark.parametrize(
    "mistake", [IsAlwaysInTime, CountsWhatFailed, ComparesNothing, LeavesSilently, AnswersAtOnce, IsReadyAtOnce]
)
def test_the_simulation_finds_a_mistake_of_the_saves(mistake: type[SaveCoordinator]) -> None:
    with pytest.raises(Violation):
        deque((undisturbed(seed, coordinator=mistake) for seed in range(100)), maxlen=0)


class ByTime(Saves):
    """One fit of two ranks that saves as often as is chosen: every 16 s after the first saves."""

    def __init__(
        self, seed: int, how: type[Schedule] = Schedule, chosen: type[ChosenInterval] = ChosenInterval
    ) -> None:
        self.how, self.chosen = how, chosen
        super().__init__(seed, small=True)
        self.batches, self.fails, self.lasts_s = 100, 0.0, 120.0
        self.delay, self.slowness, self.saves_in_s = self.random.choice([0.001, 0.003]), 0.1, 0.02

    def schedule(self, saves: SimulatedSaves) -> Schedule:
        return self.how(None, self.chosen(saves.costs, 1e9, 60.0), is_early=True)

    def check(self) -> None:
        """What must hold at every time."""
        boundaries = self.saves[0][0].boundaries
        if len(boundaries) < 2 * WARM_UP_STEPS:
            return  # stopped
        slack_s = 4 * max(after - before for (before, _), (after, _) in pairwise(boundaries))
        slack_s += SLOWEST * MESSAGES * self.delay
        warm_at = boundaries[WARM_UP_STEPS - 1][0]
        first_at = last_at = None
        number = 0
        for now, is_taken in boundaries:
            if first_at is None and now > warm_at + slack_s and not is_taken:
                raise Violation(f"nothing is saved {now - warm_at:.1f} s after the warm-up")
            if first_at is not None and last_at is not None:
                if now - last_at > min((now - first_at + FIRST_S) / 2, CHOSEN_S) + slack_s:
                    raise Violation(f"{now - last_at:.1f} s of {now - first_at:.1f} s would be lost")
                if number * STALL_S > 0.001 * (now - first_at) + 5 * STALL_S:
                    raise Violation(f"{number} saves in {now - first_at:.1f} s are dear")
            if is_taken:
                number += 1
                first_at, last_at = first_at or now, now


def by_time(seed: int, **options: Any) -> ByTime:
    simulation = ByTime(seed, **options)
    simulation.run()
    simulation.check_undisturbed()
    simulation.check()
    return simulation


@pytest.mark.slow
def test_little_is_lost_at_any_time_and_saves_cost_little() -> None:
    taken = [len(by_time(seed).saves[0][0].taken) for seed in range(10)]
    assert sum(number >= 5 for number in taken) >= 4, "schedules that are not stopped"


class NotEarly(Schedule):
    """The first save comes after an interval, as all others."""

    def start(self, step: int) -> None:
        super().start(step)
        self._next += 10.0


class ForgetsItsGrowth(ChosenInterval):
    """The interval is the chosen one from the first save on."""

    def __call__(self, before_s: float) -> float:
        super().__call__(before_s)
        return self.chosen_s or 1.0


class AlwaysAsAtFirst(ChosenInterval):
    """The interval does not grow."""

    def __call__(self, before_s: float) -> float:
        return super().__call__(0.0)


class TakesTheShortest(ChosenInterval):
    """The shortest interval that there is, although a save stops the training for longer than a millisecond."""

    def __call__(self, before_s: float) -> float:
        return super().__call__(before_s) and 1.0


class IsNotAdjusted(Schedule):
    """What the first save has cost is not waited for, and the intervals are those of a save that costs nothing."""

    def adjust(self) -> None:
        self._interval = min(max(1.0, 2 * self._before), 2.0)
        self._next = self._began + self._interval


@pytest.mark.slow_but_for("IsNotAdjusted")
@pytest.mark.parametrize(
    "mistake",
    [
        {"how": NotEarly},
        {"chosen": ForgetsItsGrowth},
        {"chosen": AlwaysAsAtFirst},
        {"chosen": TakesTheShortest},
        {"how": IsNotAdjusted},
    ],
    ids=lambda mistake: next(iter(mistake.values())).__name__,
)
def test_the_simulation_finds_a_mistake_of_the_schedule(mistake: dict[str, Any]) -> None:
    with pytest.raises(Violation, match=r"nothing is saved|would be lost|are dear"):
        deque((by_time(seed, **mistake) for seed in range(30)), maxlen=0)
