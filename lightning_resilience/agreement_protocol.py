"""Makes every rank act on an event at the same boundary, without a collective. Imports no Lightning.

A *boundary* is the gap between two batches, in any loop, where the main thread calls :meth:`.Agreement.boundary`. A
watcher thread on every rank polls the store of its node. On one rank of each node this thread is also the node's
*relay*. Only relays poll the store of the job, so the cost of polling grows with the number of nodes, not of ranks. An
event takes one round:

1. The requesting rank describes the event in the store of its node, and the relay passes it on. The relay of rank 0
   lists all open events as the next *round*; a signal that hits a thousand ranks becomes one event. All relays copy the
   round to the stores of their nodes.
2. A watcher that sees the round notes the last boundary that its main thread passed, and in the same atomic transition
   holds the main thread at the next one. Then it posts that position. It does not need the main thread, so a rank
   inside a step, or blocked in a collective, answers too.
3. The last watcher of a node to answer posts the node's largest position, the last node of a group posts the group's,
   and so on. The relays copy the largest position of all ranks back to their nodes, and the watchers release the main
   threads. Every rank acts at its first boundary *strictly after* that position whose ``allows`` covers the event's
   ``needs``.

No rank can have passed that boundary, and the order of :data:`Position` is the same on all ranks, even if they evaluate
different numbers of batches. A main thread waits only if it reaches a boundary during a round, which takes a few polls.
Acting some boundaries later would avoid that wait, but with slow steps it would cost part of a preemption's grace
period. A run of a single rank waits at its next boundary for its own requests: with short steps its watcher might miss
the last boundary.

A rank can die between agreement and action, so :meth:`.Agreement.arrive` precedes any collective. The end is agreed too
(:meth:`.Agreement.close`): a finished rank counts as past every boundary, and answers until all ranks have finished.
The last work of a rank may take hours (uploading the model), so finished ranks wait without limit while all watchers
answer. To check this, the relay of rank 0 opens empty rounds from time to time, which hold no main thread. A rank that
does not answer an empty round is lost; if no round comes, rank 0 is lost. Keys are deleted when no rank can read them
any more, so the stores do not grow.

:class:`Member` and :class:`Relay` make all decisions and hold no thread, lock or store: their watchers are generators
that *yield* store operations. :class:`.Agreement` runs them on real stores, the tests on simulated ones, in thousands
of interleavings.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

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
    """Requirements of an event on the boundary where ranks act on it; a boundary meets the same ones on all ranks."""

    NOTHING = 0
    CLEAN = 1
    """No accumulation window is open."""
    TRAINING = 2
    """A boundary of the training loop, not of an evaluation."""


@dataclass(frozen=True)
class Event:
    """An action of all ranks.

    Args:
        number: Sequence number in this agreement.
        kind: Kind of action, known to the callers.
        rank: The rank that requested it.
        needs: Requirements on the boundary.
        payload: Data of the request.
    """

    number: int
    kind: str
    rank: int
    needs: Needs
    payload: dict[str, Any]


class PeerLost(RuntimeError):
    """Another rank died, raised, or does not answer, so the ranks can no longer agree."""


# What watchers yield. ``store`` is an object with the methods of torch's stores.


_ABSENT = "-"  # no key ever has this value


@dataclass(frozen=True)
class Get:
    """Reads a key; ``None`` if missing. Never waits: a thread blocked in a store aborts the interpreter at its exit."""

    key: str

    def apply(self, store: Any) -> bytes | None:
        """Reads the key in one request; the stores' ``get`` waits, and to avoid that would take three requests."""
        value: bytes = store.compare_set(self.key, _ABSENT, _ABSENT)  # does not create the key
        return None if value == _ABSENT.encode() else value


@dataclass(frozen=True)
class Set:
    """Sets a key."""

    key: str
    value: str

    def apply(self, store: Any) -> None:
        """Runs it on ``store``."""
        store.set(self.key, self.value)


@dataclass(frozen=True)
class Append:
    """Appends to the value of a key; creates it if needed."""

    key: str
    value: str

    def apply(self, store: Any) -> None:
        """Runs it on ``store``."""
        store.append(self.key, self.value)


@dataclass(frozen=True)
class Replace:
    """Sets a key if its value is still ``known``, or if it is missing and ``known`` is empty; returns if it did."""

    key: str
    known: str
    value: str

    def apply(self, store: Any) -> bool:
        """Runs it on ``store``."""
        return bool(store.compare_set(self.key, self.known, self.value) == self.value.encode())


@dataclass(frozen=True)
class Add:
    """Adds to a counter and returns the sum; adding 0 reads it."""

    key: str
    amount: int

    def apply(self, store: Any) -> int:
        """Runs it on ``store``."""
        return int(store.add(self.key, self.amount))


@dataclass(frozen=True)
class Delete:
    """Deletes a key, if it exists."""

    key: str

    def apply(self, store: Any) -> None:
        """Runs it on ``store``."""
        store.delete_key(self.key)


Operation: TypeAlias = "Get | Set | Append | Replace | Add | Delete"


@dataclass(frozen=True)
class Above:
    """Runs an operation on the job's store instead of the node's store."""

    operation: Operation


@dataclass(frozen=True)
class Sleep:
    """Waits, at most until the main thread posts something."""

    seconds: float


@dataclass(frozen=True)
class Announce:
    """Reports on this rank that an event was seen, before its boundary is known."""

    event: Event


Watching: TypeAlias = "Generator[Operation | Above | Sleep | Announce, Any, _T]"


def changes(wanted: Operation | Above) -> bool:
    """Whether an operation changes what watchers read."""
    operation = wanted.operation if isinstance(wanted, Above) else wanted
    return isinstance(operation, Set | Append) or (isinstance(operation, Add) and operation.amount > 0)


class LocalStore:
    """An in-process store, for a run of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Sets ``key``."""
        self._values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        """Appends to the value of ``key``."""
        self._values[key] = self._values.get(key, b"") + value.encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Sets ``key`` if its value is ``expected``, or if it is missing and ``expected`` is empty.

        Returns:
            The new value, ``expected`` if the key is missing.
        """
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = value.encode()
        return self._values.get(key, expected.encode())

    def add(self, key: str, amount: int) -> int:
        """Adds ``amount`` to the counter ``key`` and returns the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        """Deletes ``key``; returns whether it existed."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """The number of keys."""
        return len(self._values)


_ASKED_AFTER = 0.5
"""How long after a rank has finished, or after the last round, all ranks are asked whether they are alive; in answer
timeouts."""

_SILENT_FOR = 5.0
"""How long a watcher may take to answer then, in answer timeouts.

Longer than at a boundary: an export at the end may hold the interpreter for minutes, and the training is complete.
"""

_FAN_OUT = 64
"""The size of a group in the tree of positions: the last of so many ranks, or nodes, to answer compares them."""


def _post(key: str, value: str) -> Watching[None]:
    """Sets a key of the node's store, and makes the node's watchers look."""
    yield Set(key, value)
    yield Add("news", 1)


def _post_failure(reason: str) -> Watching[str]:
    """Posts to the node why its ranks fail. Returns the reason that counts: the one that was posted first."""
    if (yield Replace("abort", "", reason)):
        yield Add("news", 1)
        return reason
    return (yield Get("abort")).decode()  # type: ignore[no-any-return]


def _meet(
    name: str,
    index: int,
    size: int,
    position: str,
    publish: Callable[[str], Watching[None]],
    at: Callable[[Any], Any] = lambda each: each,
) -> Watching[None]:
    """Posts a position under ``name``; the last of ``size`` members to do so publishes the largest position.

    The positions are compared in a tree: the last member of each group of 64 posts the group's largest position, and
    then deletes what the group has posted.
    """
    level = 0
    done_with: list[str] = []
    while True:
        group, groups = index // _FAN_OUT, -(-size // _FAN_OUT)
        posted, count = f"{name}/{level}/{group}", f"{name}/{level}/count/{group}"
        yield at(Append(posted, f"[{index}, {position}],"))
        for key in done_with:  # only now, because _missing reads the upper levels first
            yield at(Delete(key))
        if (yield at(Add(count, 1))) < min(_FAN_OUT, size - group * _FAN_OUT):
            return
        position = json.dumps(max(_posted((yield at(Get(posted)))).values()))
        done_with = [posted, count]
        if groups == 1:
            yield from publish(position)
            for key in done_with:
                yield at(Delete(key))
            return
        index, size, level = group, groups, level + 1


def _posted(text: bytes | None) -> dict[int, Position]:
    """The members of a group that have posted, with their positions."""
    return {index: _position(position) for index, position in json.loads(b"[" + (text or b"")[:-1] + b"]")}


def _missing(name: str, size: int, at: Callable[[Any], Any] = lambda each: each) -> Watching[list[int]]:
    """The members that have not posted under ``name``, if not all have."""
    sizes = [size]
    while sizes[-1] > _FAN_OUT:
        sizes.append(-(-sizes[-1] // _FAN_OUT))
    suspects = [0]  # the groups whose largest position is not posted
    for level in reversed(range(len(sizes))):
        absent: list[int] = []
        for group in suspects:
            posted = _posted((yield at(Get(f"{name}/{level}/{group}"))))
            members = range(group * _FAN_OUT, min((group + 1) * _FAN_OUT, sizes[level]))
            absent += [index for index in members if index not in posted]
        suspects = absent
    return suspects


class Member:
    """State machine of one rank in the agreement, run by :class:`.Agreement` or by a simulator.

    The main thread calls the methods; if a method returns ``None``, call it again after the watcher has advanced. The
    watcher runs the generator :meth:`watch`, with one atomic transition between two yields: hold a lock while advancing
    the generator or calling a method, and hold no lock during a store operation.

    Args:
        nodes: The ranks of every node.
        node: Index of this rank's node.
        index: Index of this rank in its node; the relay runs on the first one.
        clock: Returns monotonic seconds.
        answer_timeout: Seconds for the watcher of another rank to answer.
        arrival_timeout: Seconds for the main thread of another rank to reach a boundary.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        node: int,
        index: int,
        clock: Callable[[], float],
        answer_timeout: float,
        arrival_timeout: float,
    ) -> None:
        self.passed: Position = START
        self.alert = False  # the only thing a healthy boundary reads: true if held, failed, or with an event pending
        self.over = False  # the watcher has ended

        self._ranks = nodes[node]
        self._rank = self._ranks[index]
        self._index = index
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._arrival_timeout = arrival_timeout
        self._is_alone = _is_alone(nodes)
        self._unlisted = 0  # requests of a single rank that are in no round yet
        self._pace = _Pace(len(self._ranks), clock, self._is_alone)
        self._linger = _linger(nodes, clock) + 3 * self._pace.longest
        self._since: dict[str, float] = {}  # when each wait began

        self._posts: deque[Watching[None]] = deque()  # what the main side wants to post to the store
        self._news = -1  # the number of changes of the node's store at the last look
        self._round = 0
        self._is_open = False  # whether the round's result is awaited
        self._held: list[Event] | None = None  # the round's events while the main thread is held
        self._pending: list[tuple[Position, Event]] = []  # agreed: act at the first fitting boundary after the position
        self._arriving: Event | None = None
        self._finished = False
        self._end_agreed = False
        self._failure: str | None = None

    # ---- the main side

    def request(self, kind: str, payload: dict[str, Any], needs: Needs) -> None:
        """Requests an action of all ranks."""
        event = {"kind": kind, "rank": self._rank, "needs": int(needs), "payload": payload}
        self._posts.append(self._post_event(json.dumps(event)))
        if self._is_alone:
            self._unlisted += 1
            self._update_alert()

    def cross(self, position: Position, allows: Needs) -> tuple[Event, ...] | None:
        """Passes a boundary and returns the events to act on there; ``None`` while held."""
        self._raise_failure()
        if self._held is not None or self._unlisted:
            return None
        self.passed = position
        due = [(after, event) for after, event in self._pending if position > after and event.needs in allows]
        self._pending = [item for item in self._pending if item not in due]
        self._update_alert()
        return tuple(event for _, event in due)

    def arrive(self, event: Event) -> None:
        """Posts that this rank is about to act on ``event``."""
        self._arriving = event
        self._posts.append(self._answer(_arrival(event.number)))

    def arrived(self) -> bool | None:
        """True once every rank is about to act on the event for which this rank has arrived; ``None`` until then."""
        self._raise_failure()
        return True if self._arriving is None else None

    def expect(self) -> None:
        """Polls often for a moment, since another rank is about to make a request: then no rank waits for this one."""
        self._pace.stir()

    def finish(self) -> None:
        """Posts that this rank passes no boundary any more."""
        self.passed = FINISHED
        self._finished = True
        self._posts.append(self._say_done())

    def ended(self) -> tuple[Event, ...] | None:
        """The events that were never acted on, once every rank has finished; ``None`` until then."""
        self._raise_failure()
        return tuple(event for _, event in self._pending) if self.over else None

    def abort(self, reason: str, peer_is_lost: bool) -> None:
        """Posts that this rank gives up."""
        self._posts.append(self._give_up(f"{_PEER_IS_LOST * peer_is_lost}rank {self._rank} stopped: {reason}"))

    def lose_touch(self, error: BaseException) -> None:
        """Takes note of an error that ended the watcher: nearly always the store has been lost."""
        self.over = True
        if not self._end_agreed:  # after the agreed end no rank needs the store
            first_line = (str(error).splitlines() or [""])[0]
            self._fail(
                f"rank {self._rank} lost contact with the other ranks ({type(error).__name__}: {first_line}); this "
                "happens when the process that owns the shared store has ended or its node can't be reached"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PeerLost(
                f"{self._failure}. The ranks can't act together any more. See the log of the rank that failed first, "
                "then restart the job; it resumes from its newest checkpoint."
            )

    def _update_alert(self) -> None:
        self.alert = self._held is not None or bool(self._pending or self._unlisted) or self._failure is not None

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._update_alert()

    # ---- the watcher's side

    def watch(self) -> Watching[None]:
        """Runs the watcher, from the start to the agreed end or a failure."""
        while self._failure is None and not self._end_agreed:
            while self._posts:
                self._pace.stir()
                yield from self._posts.popleft()
            news = yield Add("news", 0)  # without news, a poll costs only this request
            if news != self._news or self._is_open or self._arriving is not None or self._finished:
                self._news = news
                if (reason := (yield Get("abort"))) is not None:
                    yield from self._fail_last(reason.decode())
                    break
                yield from self._follow_rounds()
                yield from self._look_for_arrivals()
                if self._finished and not self._end_agreed and not self._is_open:
                    yield from self._give_up_if_nobody_asks()
            if not self._posts and self._news >= 0 and not self._end_agreed:
                yield Sleep(self._pace.pause())
        if self._end_agreed:
            yield Add("left", 1)
        elif self._index:
            yield Add("told", 1)
        self.over = True

    def _post_event(self, description: str) -> Watching[None]:
        number = (yield Add("events", 1)) - 1
        yield from _post(f"event/{number}", description)

    def _say_done(self) -> Watching[None]:
        yield from _post("finished", "")
        yield from self._answer("done")

    def _answer(self, name: str) -> Watching[None]:
        """Posts this rank's position under ``name``."""
        publish = partial(_post, f"{name}/here")
        yield from _meet(name, self._index, len(self._ranks), json.dumps(self.passed), publish)

    def _follow_rounds(self) -> Watching[None]:
        name = f"round/{self._round}"
        if not self._is_open:
            if (listed := (yield Get(name))) is None:
                return
            listing = json.loads(listed)
            self._pace.stir()
            if listing == []:  # the end is a round without events
                self._end_agreed = True
                return
            self._is_open = True
            self._since.pop("asked", None)
            events = [Event(**{**event, "needs": Needs(event["needs"])}) for event in listing or []]
            if events:
                # Nothing else runs from here to the first yield in `_meet`: it posts the last boundary passed.
                self._held = events
                self._unlisted = max(0, self._unlisted - len(events))
                self._update_alert()
            yield from self._answer(name)
            for event in events:
                yield Announce(event)
        if (answer := (yield Get(f"{name}/all"))) is not None:
            after = _position(json.loads(answer))
            self._pending += [(after, event) for event in self._held or []]
            self._is_open, self._held = False, None
            self._since.pop(name, None)
            self._update_alert()
            self._round += 1
            self._news = -1  # the next round may exist already
            self._pace.stir()
        else:
            timeout = _answers_within(self._answer_timeout, at_the_end=self._held is None)
            yield from self._give_up_if_overdue(name, "answer", timeout)

    def _give_up_if_nobody_asks(self) -> Watching[None]:
        """Gives up if rank 0 opens no rounds any more. While it does, the other ranks may take any time to finish."""
        since = self._since.setdefault("asked", self._clock())
        if self._clock() - since > (limit := (_ASKED_AFTER + _SILENT_FOR) * self._answer_timeout):
            yield from self._give_up(f"rank 0 did not respond for {limit:.0f} s at the end of the fit")

    def _look_for_arrivals(self) -> Watching[None]:
        if (event := self._arriving) is None:
            return
        name = _arrival(event.number)
        # This is read first: a rank that acted on the event finished after all ranks had arrived.
        somebody_finished = (yield Get("finished")) is not None
        if (yield Get(f"{name}/all")) is not None:
            self._arriving = None
            self._since.pop(name, None)
            self._pace.stir()
            return
        what = _reach(event.number, event.kind)
        if somebody_finished and (yield Get(f"{name}/here")) is None:
            yield from self._give_up_on(name, f"{what}, {_ALTHOUGH}", self._arrival_timeout)
        else:
            yield from self._give_up_if_overdue(name, what, self._arrival_timeout)

    def _give_up_if_overdue(self, name: str, what: str, timeout: float) -> Watching[None]:
        waited = self._clock() - self._since.setdefault(name, self._clock())
        if waited <= timeout:
            return
        # If all ranks of this node have answered, the relay finds out which ranks have not.
        if waited > 2 * timeout + self._linger or (yield Get(f"{name}/here")) is None:
            yield from self._give_up_on(name, what, timeout)

    def _give_up_on(self, name: str, what: str, timeout: float) -> Watching[None]:
        missing: list[int] = []
        if (yield Get(f"{name}/here")) is None:  # otherwise their posts are deleted
            missing = yield from _missing(name, len(self._ranks))
        yield from self._give_up(_blame([self._ranks[each] for each in missing], what, timeout))

    def _give_up(self, reason: str) -> Watching[None]:
        """Fails, and makes every other rank fail for the same reason. The first posted reason counts."""
        yield from self._fail_last((yield from _post_failure(reason)))

    def _fail_last(self, reason: str) -> Watching[None]:
        """Fails; the rank that serves the node's store fails last, so that the others can read the reason in it."""
        if self._index == 0 and self._failure is None and not reason.startswith(_PEER_IS_LOST):
            with contextlib.suppress(Exception):  # the store may already be lost
                yield from _wait_until_told(len(self._ranks), self._clock)
        self._fail(reason)


def _wait_until_told(
    watchers: int, clock: Callable[[], float], at: Callable[[Any], Any] = lambda each: each
) -> Watching[None]:
    """Waits until all other watchers of a store know why this rank fails; only for a few polls, as they may be lost.

    If the reason is the loss of a rank, nothing waits here: the other ranks notice the loss themselves.
    """
    pace = _Pace(watchers, clock)
    until = clock() + 3 * pace.longest
    while (yield at(Add("told", 0))) < watchers - 1 and clock() < until:
        yield Sleep(pace.shortest)


_ALTHOUGH = "although a rank has finished already"
_PEER_IS_LOST = "a rank is gone: "


def _answers_within(answer_timeout: float, at_the_end: bool) -> float:
    return answer_timeout * (_SILENT_FOR if at_the_end else 1.0)


def _reach(number: int, kind: str) -> str:
    return f"reach the boundary where all ranks act on event {number} ({kind!r})"


def _blame(ranks: Sequence[int], what: str, timeout: float) -> str:
    who = f"ranks {_brief(ranks)} did not" if ranks else "a rank died just when all ranks did"
    return f"{who} {what} (the other ranks waited for at most {timeout:.0f} s)"


def _brief(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 32 else f"[{', '.join(map(str, ranks[:32]))}, ...] ({len(ranks)} of them)"


def _is_alone(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether the job has one rank: then only its own watchers change the store, and they wake each other."""
    return len(nodes) == len(nodes[0]) == 1


def _linger(nodes: Sequence[Sequence[int]], clock: Callable[[], float]) -> float:
    """How many seconds it may take until all other nodes have read something that was published."""
    return 3 * _Pace(len(nodes), clock).longest if len(nodes) > 1 else 0.0


class _Pace:
    """Polling interval of a watcher: short after activity, and longer the longer nothing has happened.

    Args:
        watchers: Number of watchers that poll the same store. Together they poll at most 4,000 times a second when
            idle, and 10,000 times a second during a round; more polls would delay their own messages.
        clock: Returns monotonic seconds.
        alone: Whether no other process changes the store.
    """

    def __init__(self, watchers: int, clock: Callable[[], float], alone: bool = False) -> None:
        self.longest = max(0.1, watchers / 4_000)
        self.shortest = max(0.002, watchers / 10_000)
        self._clock = clock
        self._alone = alone
        self._stirred = clock()

    def stir(self) -> None:
        """Shortens the interval, because something has happened."""
        self._stirred = self._clock()

    def pause(self) -> float:
        """How many seconds to sleep now."""
        if self._alone:
            return math.inf
        return min(self.longest, max(self.shortest, (self._clock() - self._stirred) / 4))


@dataclass
class _Meeting:
    what: str  # what all ranks must do
    timeout: float
    posted: float | None = None  # when all ranks of this node had posted, and the relay has passed that on
    asked: float | None = None  # when the relays were asked which ranks have not posted


class Relay:
    """State machine of one node in the agreement: copies messages between the node's store and the job's.

    Run it like a :class:`Member`; the main thread does not use it.

    Args:
        nodes: The ranks of every node. The relay of the first node opens the rounds.
        index: Index of the relay's node.
        clock: Returns monotonic seconds.
        answer_timeout: See :class:`Member`.
        arrival_timeout: See :class:`Member`.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        index: int,
        clock: Callable[[], float],
        answer_timeout: float,
        arrival_timeout: float,
    ) -> None:
        self._nodes = nodes
        self._ranks = nodes[index]
        self._index = index
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._arrival_timeout = arrival_timeout
        self._here = _Pace(len(self._ranks), clock, _is_alone(nodes))
        self._above = _Pace(1 if index == 0 else len(nodes), clock, _is_alone(nodes))
        self._look_at = clock()  # when to look at the job's store again
        self._status: bytes | None = None  # the status in the job's store at the last look
        self._news_here = -1  # the number of changes of the node's store at the last look
        self._next_here = 0  # the first event of this node that is not passed on yet
        self._round = 0
        self._is_open = False  # whether the round has been copied to the node's store
        self._listed: list[dict[str, Any]] = []  # the round's events
        self._meetings = {"done": _Meeting("finish", math.inf)}
        self._past: dict[str, str] = {}  # by kind: the previous meeting
        self._finished = False  # whether a rank has finished, as both stores know
        self._failure: str | None = None
        self._ends = False
        self._lead = _Lead(self, clock, answer_timeout) if index == 0 else None

    def watch(self) -> Watching[None]:
        """Runs the relay, from the start to the agreed end or a failure."""
        try:
            while self._failure is None and not self._ends:
                if (news := (yield Add("news", 0))) != self._news_here:
                    self._news_here = news
                    yield from self._pass_on_events()
                    yield from self._pass_on_answers()
                    yield from self._pass_on_failure()
                if self._lead is not None:
                    yield from self._lead.look()
                if self._clock() >= self._look_at and self._failure is None:
                    yield from self._look_above()
                    self._look_at = self._clock() + self._above.pause()
                if self._failure is None and not self._ends:
                    yield Sleep(min(self._here.pause(), max(0.0, self._look_at - self._clock())))
            if self._ends:
                yield from self._leave()
            elif self._lead is None:
                yield Above(Add("told", 1))
            else:
                yield from self._lead.look()  # publishes the reason of the failure
                if not (self._failure or "").startswith(_PEER_IS_LOST):
                    yield from _wait_until_told(len(self._nodes), self._clock, Above)
        except Exception as error:  # nearly always the store of the job has been lost
            if self._ends or self._failure is not None:  # this node already knows of it
                return
            first_line = (str(error).splitlines() or [""])[0]
            yield from _post_failure(
                f"ranks {_brief(self._ranks)} lost contact with the other ranks ({type(error).__name__}: "
                f"{first_line}); this happens when the process that owns the shared store has ended or its node can't "
                "be reached"
            )

    def _say(self, *message: Any) -> Watching[None]:
        """Sends a message to the lead."""
        yield Above(Append("said", json.dumps(message) + "\n"))
        self._stir()

    def _stir(self) -> None:
        self._here.stir()
        self._above.stir()

    def look_at_once(self) -> None:
        """Makes the relay look at once, because something was published for it."""
        self._look_at = self._clock()
        self._stir()

    # ---- from its ranks to the job

    def _pass_on_events(self) -> Watching[None]:
        asked = _Asked()
        while (described := (yield Get(f"event/{self._next_here}"))) is not None:
            asked.add(json.loads(described))
            yield Delete(f"event/{self._next_here}")
            self._next_here += 1
        for event in asked.events:
            yield from self._say("event", event)

    def _pass_on_answers(self) -> Watching[None]:
        if not self._finished and (yield Get("finished")) is not None:
            self._finished = True
            yield from self._say("finished")
        for name, meeting in self._meetings.items():
            if meeting.posted is None and (position := (yield Get(f"{name}/here"))) is not None:
                yield from self._pass_on_events()  # passes on what a rank requested before it finished
                meeting.posted = self._clock()
                self._stir()
                publish = partial(self._say, "met", name)
                yield from _meet(name, self._index, len(self._nodes), position.decode(), publish, Above)

    def _pass_on_failure(self) -> Watching[None]:
        if (reason := (yield Get("abort"))) is not None:
            self._failure = reason.decode()
            published = yield Above(Get("status"))  # by far most ranks fail because another rank has failed
            if published is None or json.loads(published)["abort"] is None:
                yield from self._say("abort", self._failure)

    # ---- from the job to its ranks

    def _look_above(self) -> Watching[None]:
        yield from self._follow()
        yield from self._look_for_the_missing()

    def _follow(self) -> Watching[None]:
        published = self._lead.published if self._lead is not None else (yield Above(Get("status")))
        if published is None or published == self._status:
            return
        self._status = published
        status = json.loads(published)
        self._stir()
        if status["abort"] is not None:
            self._failure = status["abort"]
            yield from _post_failure(status["abort"])
            return
        for name, position in status["answers"].values():
            meeting = self._meetings.get(name)
            if meeting is not None and meeting.posted is not None:
                yield from self._bring_answer(name, position)
        if status["finished"] and not self._finished:  # after the answers: a rank that acted had arrived before
            self._finished = True
            yield from _post("finished", "")
        if status["round"] == self._round and not self._is_open:
            name = f"round/{self._round}"
            described = (yield Above(Get(name))).decode()
            listing = json.loads(described)
            self._is_open, self._listed = True, listing or []
            if listing == []:  # the end is a round without events
                self._ends = True
            else:
                timeout = _answers_within(self._answer_timeout, at_the_end=listing is None)
                self._meetings[name] = _Meeting("answer", timeout)
            yield from _post(name, described)
        if status["asked"] is not None:
            yield from self._say_who_is_missing(*status["asked"])

    def _bring_answer(self, name: str, position: str) -> Watching[None]:
        del self._meetings[name]
        if name == f"round/{self._round}":
            self._round, self._is_open = self._round + 1, False
            for event in self._listed:
                what = _reach(event["number"], event["kind"])
                self._meetings[_arrival(event["number"])] = _Meeting(what, self._arrival_timeout)
        yield from _post(f"{name}/all", position)
        # All ranks have come to this meeting, so they know the result of the previous one.
        kind = name.partition("/")[0]
        before, self._past[kind] = self._past.get(kind), name
        if before is not None:
            for key in (before, f"{before}/all", f"{before}/here"):
                yield Delete(key)

    # ---- missing ranks

    def _look_for_the_missing(self) -> Watching[None]:
        """Asks all relays which rank does not come, and gives up on nodes that do not answer.

        The members of a node with a missing rank know it first, and get time to report it.
        """
        now = self._clock()
        for name, meeting in self._meetings.items():
            if meeting.posted is None:
                continue
            late = self._finished and name.startswith("arrival/")
            if late and _ALTHOUGH not in meeting.what:
                meeting.what += f", {_ALTHOUGH}"
            if meeting.asked is not None:
                if now - meeting.asked > _linger(self._nodes, self._clock) + 1.0:
                    yield from self._follow()
                    if name in self._meetings and self._failure is None:
                        nodes = yield from _missing(name, len(self._nodes), Above)
                        yield from self._give_up([rank for node in nodes for rank in self._nodes[node]], meeting)
                    return
            elif late or now - meeting.posted > 1.25 * meeting.timeout:
                meeting.asked = now
                yield from self._say("missing", name, meeting.what)

    def _say_who_is_missing(self, name: str, what: str) -> Watching[None]:
        meeting = self._meetings.get(name)
        if meeting is not None and meeting.posted is None and (yield Get(f"{name}/here")) is None:
            meeting.what = what
            missing = yield from _missing(name, len(self._ranks))
            yield from self._give_up([self._ranks[each] for each in missing], meeting)

    def _give_up(self, ranks: Sequence[int], meeting: _Meeting) -> Watching[None]:
        yield from _post_failure(_blame(ranks, meeting.what, meeting.timeout))
        yield from self._pass_on_failure()

    def _leave(self) -> Watching[None]:
        """Waits for the other ranks to leave: relays may serve the stores, so they end last, rank 0's very last."""
        until = self._clock() + self._answer_timeout
        while (yield Add("left", 0)) < len(self._ranks) and self._clock() < until:
            yield Sleep(self._here.shortest)
        left = yield Above(Add("left", 1))
        while self._index == 0 and left < len(self._nodes) and self._clock() < until:
            yield Sleep(self._above.shortest)
            left = yield Above(Add("left", 0))


class _Lead:
    """Coordinates the job on the relay of rank 0: publishes a status in one key, which all relays poll.

    Relays append messages to the key ``said``. The status is short, because it is polled; the events of a round are in
    another key.
    """

    def __init__(self, relay: Relay, clock: Callable[[], float], answer_timeout: float) -> None:
        self._relay = relay
        self._read = 0  # how many bytes of ``said`` have been read
        self._asked = _Asked()  # requests that are in no round yet
        self._numbered = 0  # how many events are in a round
        self._all_finished = self._is_open = False
        self._clock = clock
        self.published: bytes | None = None  # the status that all relays read
        self._ask_after = _ASKED_AFTER * answer_timeout
        self._quiet_since = clock()  # when a rank has finished, or when the last round has ended
        self._status: dict[str, Any] = {
            "round": -1,
            "answers": {},  # by kind, the newest: no relay can need an older one
            "finished": False,
            "asked": None,
            "abort": None,
        }

    def look(self) -> Watching[None]:
        """Reads the messages, and publishes the new status."""
        said = (yield Above(Get("said"))) or b""
        if len(said) == self._read and not self._asks():
            return
        before = json.dumps(self._status)
        over: list[str] = []
        for message in said[self._read :].splitlines():
            over += self._take(*json.loads(message))
        self._read = len(said)
        if not self._is_open and (self._asked.events or self._all_finished or self._asks()):
            yield from self._open_round()
        if (status := json.dumps(self._status)) != before:
            yield Above(Set("status", status))
            self.published = status.encode()
            self._relay.look_at_once()
        for name in over:
            yield Above(Delete(name))
        if (yield Above(Replace("said", said.decode(), "\n"))):  # otherwise a new message came: next time
            self._read = 1

    def _take(self, what: str, *said: Any) -> list[str]:
        """Takes note of a message; returns the keys that no rank needs any more."""
        status = self._status
        if what == "event":
            self._asked.add(said[0])
        elif what == "finished":
            if not status["finished"]:
                status["finished"], self._quiet_since = True, self._clock()
        elif what == "missing":
            status["asked"] = said
        elif what == "abort":
            status["abort"] = status["abort"] or said[0]
        elif said[0] == "done":
            self._all_finished = True
        else:
            name, _ = said
            kind = name.partition("/")[0]
            status["answers"][kind] = said
            if kind == "round":
                self._is_open, self._quiet_since = False, self._clock()
                return [name]
        return []

    def _open_round(self) -> Watching[None]:
        """Opens the next round with a list of all open events; an empty list once every rank has finished.

        While only some ranks have finished and no event is open, the round has no list: it shows which ranks live.
        """
        events = [{"number": number, **event} for number, event in enumerate(self._asked.events, self._numbered)]
        self._asked, self._numbered = _Asked(), self._numbered + len(events)
        self._is_open = True
        self._status["round"] += 1
        listing = events if events or self._all_finished else None
        yield Above(Set(f"round/{self._status['round']}", json.dumps(listing)))

    def _asks(self) -> bool:
        """Whether it is time to ask which ranks are alive."""
        waits = self._status["finished"] and not self._is_open
        return waits and self._clock() - self._quiet_since > self._ask_after


class _Asked:
    """Requested events in order, without equal requests of further ranks: a signal often hits all ranks.

    Attributes:
        events: The descriptions of the events.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._first: dict[str, int] = {}  # the rank that first made each request

    def add(self, event: dict[str, Any]) -> None:
        """Adds the request of a rank."""
        if self._first.setdefault(json.dumps({**event, "rank": None}), event["rank"]) == event["rank"]:
            self.events.append(event)


def _arrival(number: int) -> str:
    return f"arrival/{number}"


def _position(listed: Sequence[int]) -> Position:
    batches, phase, loader, index = listed
    return (batches, phase, loader, index)
