"""An event on any rank becomes the same boundary on every rank, without a collective. Imports no Lightning.

A *boundary* is the gap between two batches, in any loop. The main thread calls :meth:`Agreement.boundary` in each. A
watcher thread on every rank polls the store that the ranks share; nothing else touches the store. An event takes one
round:

1. The rank that asks numbers the event (``add``) and describes it in the store. Rank 0's watcher lists all open events
   as the next *round*: a signal that hits a thousand ranks at once costs a round or two, not a thousand.
2. Every watcher that sees the round notes the last boundary its main thread passed and, in the same breath, holds the
   main thread: it may pass no further one. Then it posts that position. It does not need the main thread for this, so
   a rank in the middle of a step, or blocked in a collective, answers as well.
3. The last watcher to answer publishes the largest position posted, and the holds are released. Every rank acts at its
   first boundary *strictly after* that position whose ``allows`` covers the event's ``needs``.

No rank can have passed that place by then, and a :data:`Position` has an order that all ranks share, even where they
evaluate different numbers of batches. A main thread waits only if it reaches a boundary within the few polls that a
round takes. Acting a few boundaries later would spare even that, but with slow steps it would eat a preemption's grace
period.

Between the agreement and the action a rank can die: :meth:`Agreement.arrive` goes before any collective. The end is
agreed as well (:meth:`Agreement.close`): a rank that has finished counts as being past everything, and answers until
all have.

:class:`Participant` makes all decisions and holds no thread, lock or store: its watcher is a generator that *yields*
what the store shall do. :class:`Agreement` runs it on a real store; the tests run it on a simulated one, in thousands
of interleavings.
"""

from __future__ import annotations

import atexit
import enum
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)
_T = TypeVar("_T")

Position: TypeAlias = "tuple[int, int, int, int]"
"""Where a main thread is: ``(training batches completed in this fit, phase, loader, index)``, ordered as tuples are.

The evaluation after batch ``n`` comes before the training boundary ``n``. A rank's positions only ever increase.
"""

_EVALUATION, _TRAINING = 0, 1
_BEYOND = sys.maxsize
START: Position = (-1, 0, 0, 0)
FINISHED: Position = (_BEYOND, 0, 0, 0)


def training(batches: int) -> Position:
    """The boundary after ``batches`` training batches, and after the evaluation that was due then."""
    return (batches, _TRAINING, 0, 0)


def evaluation(batches: int, loader: int, index: int) -> Position:
    """The boundary after batch ``index`` of ``loader``, in the evaluation after ``batches`` training batches."""
    return (batches, _EVALUATION, loader, index)


def end_of_evaluation(batches: int) -> Position:
    """The boundary after the last batch of an evaluation and before its reductions, where uneven ranks meet."""
    return (batches, _EVALUATION, _BEYOND, 0)


class Needs(enum.IntFlag):
    """What a boundary must offer for an event to be acted on there. At the same boundary, all ranks offer the same."""

    NOTHING = 0
    CLEAN = 1
    """No accumulation window is cut in two."""
    TRAINING = 2
    """A training boundary, which all ranks have; no evaluation is under way."""


@dataclass(frozen=True)
class Event:
    """Something that all ranks do together.

    Args:
        number: Its place in the order of all events of this agreement.
        kind: What it is.
        rank: Who asked.
        needs: Where it may be acted on.
        payload: Whatever the asker added.
    """

    number: int
    kind: str
    rank: int
    needs: Needs
    payload: dict[str, Any]


class PeerLost(RuntimeError):
    """Another rank died, raised, or does not answer: the ranks can't agree on anything any more."""


# What the watcher asks of the world. A store has the `check`, `get`, `multi_get`, `set` and `add` of torch's stores.


@dataclass(frozen=True)
class Get:
    """The value of a key, or ``None``. Does not wait for one: a thread that does aborts the interpreter at its exit."""

    key: str

    def apply(self, store: Any) -> bytes | None:
        """Does it."""
        return store.get(self.key) if store.check([self.key]) else None


@dataclass(frozen=True)
class GetAll:
    """The values of keys that are all known to exist."""

    keys: list[str]

    def apply(self, store: Any) -> list[bytes]:
        """Does it."""
        return list(store.multi_get(self.keys))


@dataclass(frozen=True)
class Set:
    """Sets a key."""

    key: str
    value: str

    def apply(self, store: Any) -> None:
        """Does it."""
        store.set(self.key, self.value)


@dataclass(frozen=True)
class Add:
    """Adds to a counter and returns the sum; adding 0 reads it."""

    key: str
    amount: int

    def apply(self, store: Any) -> int:
        """Does it."""
        return int(store.add(self.key, self.amount))


@dataclass(frozen=True)
class Sleep:
    """Waits, at most until the main thread has something to post."""

    seconds: float


@dataclass(frozen=True)
class Announce:
    """Tells whoever listens on this rank that an event was seen; its boundary is not known yet."""

    event: Event


Watching: TypeAlias = "Generator[Get | GetAll | Set | Add | Sleep | Announce, Any, _T]"


class LocalStore:
    """A store within the process, for a run of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Sets ``key``."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """The value of ``key``, which exists."""
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``, which exist."""
        return [self._values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` exist."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Adds ``amount`` to the counter ``key`` and returns the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total


class Participant:
    """One rank's part in the agreement: pure state, to be driven by :class:`Agreement` or by a simulator.

    Two sides share it. The main side calls the methods below; one that returns ``None`` is to be called again once the
    watcher has moved. The watcher's side is the generator :meth:`watch`; between two of its yields it makes one atomic
    transition: the driver holds a lock while it advances the generator or calls a method, and none while the store
    works.

    Args:
        rank: This rank. Rank 0 opens the rounds.
        world_size: How many ranks take part.
        clock: Seconds, monotonic.
        answer_timeout: Seconds for a peer's watcher to answer.
        arrival_timeout: Seconds for a peer's main thread to reach a boundary or its end.
    """

    def __init__(
        self, rank: int, world_size: int, clock: Callable[[], float], answer_timeout: float, arrival_timeout: float
    ) -> None:
        self.passed: Position = START
        self.alert = False  # the one thing a healthy boundary looks at: held, something to act on, or failed
        self.over = False  # the watcher has ended

        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._arrival_timeout = arrival_timeout
        # All ranks together poll at most 2000 times a second in quiet, and 20 000 times within the moments of a round.
        self._longest_pause = max(0.05, world_size / 2_000)
        self._shortest_pause = max(0.002, world_size / 20_000)
        self._stirred = clock()  # when something last happened; polling slows down from there
        self._since: dict[str, float] = {}  # when a wait was first looked at

        self._posts: deque[Watching[None]] = deque()  # what the main side wants in the store
        self._round = 0
        self._next_event = 0  # rank 0: the first event that is in no round yet
        self._held: list[Event] | None = None  # the events of the open round, while its answer is awaited
        self._pending: list[tuple[Position, Event]] = []  # agreed: act at the first fitting boundary after the position
        self._arriving: Event | None = None
        self._finished = False
        self._end_agreed = False
        self._failure: str | None = None

    # ---- the main side

    def request(self, kind: str, payload: dict[str, Any], needs: Needs) -> None:
        """Asks all ranks to act on something."""
        event = {"kind": kind, "rank": self._rank, "needs": int(needs), "payload": payload}
        self._posts.append(self._post_event(json.dumps(event)))

    def cross(self, position: Position, allows: Needs) -> tuple[Event, ...] | None:
        """Passes a boundary and returns what is to be done there; ``None`` while held."""
        self._raise_failure()
        if self._held is not None:
            return None
        self.passed = position
        due = [(after, event) for after, event in self._pending if position > after and event.needs in allows]
        self._pending = [item for item in self._pending if item not in due]
        self._update_alert()
        return tuple(event for _, event in due)

    def arrive(self, event: Event) -> None:
        """Posts that this rank is about to act on ``event``."""
        self._arriving = event
        self._posts.append(self._meet(_arrival(event)))

    def arrived(self) -> bool | None:
        """True once every rank is about to act on the event that this one arrived for; ``None`` until then."""
        self._raise_failure()
        return True if self._arriving is None else None

    def finish(self) -> None:
        """Posts that this rank passes no boundary any more."""
        self.passed = FINISHED
        self._finished = True
        self._posts.append(self._meet("done"))

    def ended(self) -> tuple[Event, ...] | None:
        """The events that were never acted on, once every rank has finished; ``None`` until then."""
        self._raise_failure()
        return tuple(event for _, event in self._pending) if self.over else None

    def abort(self, reason: str) -> None:
        """Posts that this rank gives up."""
        self._posts.append(self._give_up(f"rank {self._rank} stopped: {reason}"))

    def lose_touch(self, error: BaseException) -> None:
        """Takes note of an error that ended the watcher: nearly always, the store is gone."""
        self.over = True
        if not self._end_agreed:  # after that, nobody needs the store
            first_line = (str(error).splitlines() or [""])[0]
            self._fail(
                f"rank {self._rank} lost touch with the other ranks ({type(error).__name__}: {first_line}), as happens "
                "when the process that owns the store they share has ended or its node can't be reached"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PeerLost(
                f"{self._failure}. The ranks can't act together any more. See the log of the rank that failed first, "
                "then restart the job; it resumes from its newest checkpoint."
            )

    def _update_alert(self) -> None:
        self.alert = self._held is not None or bool(self._pending) or self._failure is not None

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._update_alert()

    # ---- the watcher's side

    def watch(self) -> Watching[None]:
        """What the watcher does, from the start to the agreed end or a failure."""
        while self._failure is None and not self._end_agreed:
            while self._posts:
                self._stirred = self._clock()
                yield from self._posts.popleft()
            if (reason := (yield Get("abort"))) is not None:
                yield from self._fail_last(reason.decode())
                break
            yield from self._follow_rounds()
            yield from self._look_for_arrivals()
            if self._finished and not self._end_agreed and self._overdue("done", self._arrival_timeout):
                yield from self._give_up_on("done", "finish", self._arrival_timeout)
            quiet = self._clock() - self._stirred
            if not self._posts:
                yield Sleep(min(self._longest_pause, max(self._shortest_pause, quiet)))
        if self._end_agreed:
            yield from self._leave()
        self.over = True

    def _post_event(self, description: str) -> Watching[None]:
        number = (yield Add("events", 1)) - 1
        yield Set(f"event/{number}", description)

    def _meet(self, name: str) -> Watching[None]:
        """Posts this rank's position under ``name``; the last rank publishes the largest one as ``name/all``."""
        yield Set(f"{name}/{self._rank}", json.dumps(self.passed))
        if (yield Add(f"{name}/count", 1)) == self._world_size:
            positions = yield GetAll([f"{name}/{rank}" for rank in range(self._world_size)])
            yield Set(f"{name}/all", json.dumps(max(map(_position, positions))))

    def _follow_rounds(self) -> Watching[None]:
        name = f"round/{self._round}"
        if self._held is None:
            if self._rank == 0:
                yield from self._open_round(name)
            if (listed := (yield Get(name))) is None:
                return
            events = [Event(**{**event, "needs": Needs(event["needs"])}) for event in json.loads(listed)]
            self._stirred = self._clock()
            if not events:  # the end is a round without events
                self._end_agreed = True
                return
            # From here to the first yield in `_meet` nothing else runs: what is posted is the last boundary passed.
            self._held = events
            self._update_alert()
            yield from self._meet(name)
            for event in events:
                yield Announce(event)
        if (answer := (yield Get(f"{name}/all"))) is not None:
            after = _position(answer)
            self._pending += [(after, event) for event in self._held]
            self._held = None
            self._update_alert()
            self._round += 1
            self._stirred = self._clock()
        elif self._overdue(name, self._answer_timeout):
            yield from self._give_up_on(name, "answer", self._answer_timeout)

    def _open_round(self, name: str) -> Watching[None]:
        """Rank 0: lists all open events as the next round; none at all, once every rank has finished."""
        # This is read first, so that what a rank asked before it finished is among the events.
        all_finished = self._finished and (yield Get("done/all")) is not None
        events = []
        while (described := (yield Get(f"event/{self._next_event}"))) is not None:
            events.append({"number": self._next_event, **json.loads(described)})
            self._next_event += 1
        if events or all_finished:
            yield Set(name, json.dumps(events))

    def _look_for_arrivals(self) -> Watching[None]:
        if (event := self._arriving) is None:
            return
        name = _arrival(event)
        # This is read first: a rank that acted on the event finished after all had arrived.
        somebody_finished = (yield Add("done/count", 0)) > 0
        if (yield Get(f"{name}/all")) is not None:
            self._arriving = None
            self._stirred = self._clock()
        elif somebody_finished or self._overdue(name, self._arrival_timeout):
            waited_for = f"reach the boundary where all act on event {event.number} ({event.kind!r})"
            if somebody_finished:
                waited_for += ", although a rank has finished already"
            yield from self._give_up_on(name, waited_for, self._arrival_timeout)

    def _leave(self) -> Watching[None]:
        """The store may live in rank 0's process, so rank 0 goes last."""
        left = yield Add("left", 1)
        while self._rank == 0 and left < self._world_size and not self._overdue("left", self._answer_timeout):
            yield Sleep(self._shortest_pause)
            left = yield Add("left", 0)

    def _overdue(self, name: str, timeout: float) -> bool:
        return self._clock() - self._since.setdefault(name, self._clock()) > timeout

    def _give_up_on(self, name: str, what: str, timeout: float) -> Watching[None]:
        missing = []
        for rank in range(self._world_size):
            if (yield Get(f"{name}/{rank}")) is None:
                missing.append(rank)
        who = f"ranks {missing} did not" if missing else "a rank died just when all of them did"
        yield from self._give_up(f"{who} {what} (rank {self._rank} waited for it, at most {timeout:.0f} s)")

    def _give_up(self, reason: str) -> Watching[None]:
        """Fails, and makes every other rank fail for the same reason. The first reason is the one that counts."""
        posted = yield Get("abort")
        if posted is None:
            yield Set("abort", reason)
        yield from self._fail_last(reason if posted is None else posted.decode())

    def _fail_last(self, reason: str) -> Watching[None]:
        """The store may die with rank 0, so the others get a few polls to read the reason before rank 0 raises."""
        until = self._clock() + 3 * self._longest_pause
        while self._rank == 0 and self._world_size > 1 and self._clock() < until:
            yield Sleep(self._shortest_pause)
        self._fail(reason)


def _arrival(event: Event) -> str:
    return f"arrival/{event.number}"


def _position(text: bytes) -> Position:
    batches, phase, loader, index = json.loads(text)
    return (batches, phase, loader, index)


class Agreement:
    """Makes all ranks act on an event at the same boundary.

    It starts at once and is ended by one of :meth:`close`, :meth:`abort` and :meth:`stop`. It can't be pickled.

    Args:
        rank: This rank.
        world_size: How many ranks take part.
        store: The store that they share; that of the default process group if there are several ranks. It is cloned.
        prefix: Of all keys, the same on all ranks and never used before on this store: an old event must not be seen
            again by a second fit or after a restart.
        answer_timeout: How long a peer's watcher may take to answer. A watcher needs no step to end for that.
        arrival_timeout: How long a peer's main thread may take to reach a boundary, or its end once this rank is there.
        on_event: Called from the watcher with every event as soon as this rank knows of it, before its boundary. The
            watcher answers nobody meanwhile, so it must be quick and must not wait for the main thread.
    """

    _STORE_PATIENCE_S = 10.0
    """How much longer than its watcher the main thread waits: a call to a store on a mute host never returns."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        prefix: str = "",
        *,
        answer_timeout: timedelta = timedelta(seconds=60),
        arrival_timeout: timedelta = timedelta(minutes=30),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._answer_timeout_s = answer_timeout.total_seconds()
        self._arrival_timeout_s = arrival_timeout.total_seconds()
        self._rank = rank
        self._participant = Participant(
            rank, world_size, time.monotonic, self._answer_timeout_s, self._arrival_timeout_s
        )
        self._store = _open_store(world_size, store, prefix)
        self._on_event = on_event
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._stopped = False
        self._watcher = threading.Thread(target=self._watch, name="agreement-watcher", daemon=True)
        self._watcher.start()
        # A daemon thread that returns from C++ while the interpreter shuts down aborts the process.
        atexit.register(self.stop)

    def request(self, kind: str, payload: dict[str, Any] | None = None, needs: Needs = Needs.NOTHING) -> None:
        """Asks all ranks to act on something. Returns at once; for any thread, but not for a signal handler.

        What is asked after all ranks have finished is dropped.

        Args:
            kind: What to do; a word that the readers of :meth:`boundary` know.
            payload: Whatever else they need, JSON-serialisable.
            needs: Where it may be done.
        """
        with self._lock:
            self._participant.request(kind, payload or {}, needs)
        self._wake.set()

    def boundary(self, position: Position, allows: Needs = Needs.CLEAN | Needs.TRAINING) -> tuple[Event, ...]:
        """Passes a boundary: called by the main thread in every gap between two batches.

        Args:
            position: Where this rank is: :func:`training`, :func:`evaluation` or :func:`end_of_evaluation`.
            allows: What this boundary offers, the same on all ranks.

        Returns:
            The events that every rank acts on here; nearly always none. Act on them one by one and in this order, and
            after one that ends the loop leave the rest: within an evaluation, a rank with more batches may get the
            same events over several boundaries. At a training boundary all ranks get the same ones.

        Raises:
            PeerLost: If another rank gave up or does not answer.
        """
        participant = self._participant
        with self._lock:
            if not participant.alert:
                participant.passed = position
                return ()
        return self._wait(lambda: participant.cross(position, allows), self._answer_timeout_s)

    def arrive(self, event: Event) -> None:
        """Waits until every rank is about to act on ``event``: called before the first collective of the action.

        Raises:
            PeerLost: If that can't happen any more, or not within ``arrival_timeout``.
        """
        with self._lock:
            self._participant.arrive(event)
        self._wake.set()
        self._wait(self._participant.arrived, self._arrival_timeout_s)

    def abort(self, reason: str) -> None:
        """Tells every rank that this one raises, and stops. All others get a :class:`PeerLost` that names the reason.

        Never raises, and returns after a few seconds even if the store does not answer.
        """
        with self._lock:
            self._participant.abort(reason)
        self._wake.set()
        with self._moved:
            self._moved.wait_for(lambda: self._participant.over or self._stopped, self._STORE_PATIENCE_S)
        self.stop()

    def close(self) -> tuple[Event, ...]:
        """Waits until every rank has finished, and stops. This rank passes no boundary any more.

        Returns:
            The events that no rank has acted on: asked too late, or no boundary offered what they need.

        Raises:
            PeerLost: If another rank gave up, died or does not finish within ``arrival_timeout``.
        """
        if self._stopped:
            return ()
        with self._lock:
            self._participant.finish()
        self._wake.set()
        try:
            return self._wait(self._participant.ended, self._arrival_timeout_s + self._answer_timeout_s)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the watcher without telling anyone. Harmless if repeated."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stopped = True
        self._wake.set()
        self._watcher.join(self._STORE_PATIENCE_S)
        if self._watcher.is_alive():
            log.warning("The agreement's watcher is stuck in a call to the store of this job and is left behind.")

    def _wait(self, step: Callable[[], _T | None], timeout_s: float) -> _T:
        """Repeats ``step`` after every move of the watcher until it returns something."""
        deadline = time.monotonic() + timeout_s + self._STORE_PATIENCE_S
        with self._moved:
            while (result := step()) is None:
                if not self._moved.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerLost(
                        f"the store that the ranks share does not answer rank {self._rank}: the process that owns it "
                        "is stuck or its node can't be reached. Restart the job; it resumes from its newest checkpoint."
                    )
            return result

    def _watch(self) -> None:
        try:
            self._drive(self._participant.watch())
        except Exception as error:
            log.debug("The agreement's watcher ended", exc_info=True)
            with self._moved:
                self._participant.lose_touch(error)
                self._moved.notify_all()

    def _drive(self, watch: Watching[None]) -> None:
        result: Any = None
        while True:
            with self._moved:
                if self._stopped:
                    return
                try:
                    wanted = watch.send(result)
                except StopIteration:
                    return
                finally:
                    self._moved.notify_all()
            result = None
            if isinstance(wanted, Sleep):
                self._wake.wait(wanted.seconds)
                self._wake.clear()
            elif isinstance(wanted, Announce):
                self._announce(wanted.event)
            else:
                result = wanted.apply(self._store)

    def _announce(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # of no concern to the other ranks, which wait for this watcher's answers
                log.exception("on_event raised for %s", event)


def _open_store(world_size: int, store: Store | None, prefix: str) -> Any:
    if store is None and world_size == 1:
        return LocalStore()
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    shared: Any = store or _get_default_store()
    # A client serialises its calls: the watcher needs one of its own, or it would wait while the main thread does.
    return PrefixStore(prefix, shared.clone())
