"""An event on any rank becomes the same boundary on every rank, without a collective. Imports no Lightning.

A *boundary* is the gap between two batches, in any loop. The main thread calls :meth:`.Agreement.boundary` in each. A
watcher thread on every rank polls the store that the ranks of its node share; nothing else touches that. On one rank of
each node it is also the node's *relay*, the only one there that polls the store of the whole job: what a poll costs
grows with the nodes, not with the ranks. An event takes one round:

1. The rank that asks describes the event in the store of its node; the relay numbers it (``add``) and passes it on. The
   relay of rank 0 lists all open events as the next *round*: a signal that hits a thousand ranks at once costs a round
   or two, not a thousand. All relays bring it to their nodes.
2. Every watcher that sees the round notes the last boundary its main thread passed and, in the same breath, holds the
   main thread: it may pass no further one. Then it posts that position. It does not need the main thread for this, so
   a rank in the middle of a step, or blocked in a collective, answers as well.
3. The last watcher of a node to answer posts the largest position of the node, the last node of a group of nodes that
   of the group, and so on, up to the largest of all. The relays bring that back and the holds are released. Every rank
   acts at its first boundary *strictly after* that position whose ``allows`` covers the event's ``needs``.

No rank can have passed that place by then, and a :data:`Position` has an order that all ranks share, even where they
evaluate different numbers of batches. A main thread waits only if it reaches a boundary within the few polls that a
round takes. Acting a few boundaries later would spare even that, but with slow steps it would eat a preemption's grace
period.

Between the agreement and the action a rank can die: :meth:`.Agreement.arrive` goes before any collective. The end is
agreed as well (:meth:`.Agreement.close`): a rank that has finished counts as being past everything, and answers until
all have. Keys are deleted when nobody can want them any more: the stores do not grow with the events.

:class:`Participant` and :class:`Relay` make all decisions and hold no thread, lock or store: their watchers are
generators that *yield* what a store shall do. :class:`.Agreement` runs them on real stores; the tests run them on
simulated ones, in thousands of interleavings.
"""

from __future__ import annotations

import enum
import json
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
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


# What a watcher asks of the world. A store has the methods of torch's stores.


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
class Delete:
    """Deletes a key, if it exists."""

    key: str

    def apply(self, store: Any) -> None:
        """Does it."""
        store.delete_key(self.key)


@dataclass(frozen=True)
class Above:
    """The same, in the store of the job instead of that of the node."""

    operation: Get | GetAll | Set | Add | Delete


@dataclass(frozen=True)
class Sleep:
    """Waits, at most until the main thread has something to post."""

    seconds: float


@dataclass(frozen=True)
class Announce:
    """Tells whoever listens on this rank that an event was seen; its boundary is not known yet."""

    event: Event


Watching: TypeAlias = "Generator[Get | GetAll | Set | Add | Delete | Above | Sleep | Announce, Any, _T]"


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

    def delete_key(self, key: str) -> bool:
        """Deletes ``key``; returns whether it existed."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys exist."""
        return len(self._values)


_FAN_OUT = 64
"""How many positions one participant compares: the last of so many nodes, or ranks of a node, to answer."""


def _meet(
    name: str, index: int, size: int, position: str, publish: str, at: Callable[[Any], Any] = lambda each: each
) -> Watching[bool]:
    """Posts a position under ``name``; the last of ``size`` to do so publishes the largest one as ``publish``.

    In a tree: the last of each group of 64 posts for its group, and deletes what the group has posted.

    Returns:
        Whether this was the last one.
    """
    level = 0
    done_with: list[str] = []
    while True:
        yield at(Set(f"{name}/{level}/{index}", position))
        for key in done_with:  # who looks for what is missing looks above first
            yield at(Delete(key))
        group, groups = index // _FAN_OUT, -(-size // _FAN_OUT)
        members = range(group * _FAN_OUT, min((group + 1) * _FAN_OUT, size))
        keys, count = [f"{name}/{level}/{member}" for member in members], f"{name}/{level}/count/{group}"
        if (yield at(Add(count, 1))) < len(members):
            return False
        position = json.dumps(max(map(_position, (yield at(GetAll(keys))))))
        done_with = [*keys, count]
        if groups == 1:
            yield at(Set(publish, position))
            for key in done_with:
                yield at(Delete(key))
            return True
        index, size, level = group, groups, level + 1


def _missing(name: str, size: int, at: Callable[[Any], Any] = lambda each: each) -> Watching[list[int]]:
    """Who has not posted under ``name``, where not all have."""
    sizes = [size]
    while sizes[-1] > _FAN_OUT:
        sizes.append(-(-sizes[-1] // _FAN_OUT))
    suspects = list(range(sizes[-1]))
    for level in reversed(range(len(sizes))):
        absent = []
        for index in suspects:
            if (yield at(Get(f"{name}/{level}/{index}"))) is None:
                absent.append(index)
        if level == 0:
            return absent
        below = sizes[level - 1]
        suspects = [i for each in absent for i in range(each * _FAN_OUT, min((each + 1) * _FAN_OUT, below))]
    raise AssertionError("there is a level 0")


class Participant:
    """One rank's part in the agreement: pure state, to be driven by :class:`Agreement` or by a simulator.

    Two sides share it. The main side calls the methods below; one that returns ``None`` is to be called again once the
    watcher has moved. The watcher's side is the generator :meth:`watch`; between two of its yields it makes one atomic
    transition: the driver holds a lock while it advances the generator or calls a method, and none while the store
    works.

    Args:
        ranks: Those of its node.
        index: Its own place among them. The first one is beside the relay.
        clock: Seconds, monotonic.
        answer_timeout: Seconds for a peer's watcher to answer.
        arrival_timeout: Seconds for a peer's main thread to reach a boundary or its end.
        linger: Seconds that the first one goes on after a failure, for others to read the reason.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        index: int,
        clock: Callable[[], float],
        answer_timeout: float,
        arrival_timeout: float,
        linger: float = 0.0,
    ) -> None:
        self.passed: Position = START
        self.alert = False  # the one thing a healthy boundary looks at: held, something to act on, or failed
        self.over = False  # the watcher has ended

        self._ranks = list(ranks)
        self._rank = ranks[index]
        self._index = index
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._arrival_timeout = arrival_timeout
        self._pace = _Pace(len(ranks), clock)
        self._linger = linger + 3 * self._pace.longest
        self._since: dict[str, float] = {}  # when a wait was first looked at

        self._posts: deque[Watching[None]] = deque()  # what the main side wants in the store
        self._round = 0
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
        self._posts.append(self._answer(_arrival(event.number)))

    def arrived(self) -> bool | None:
        """True once every rank is about to act on the event that this one arrived for; ``None`` until then."""
        self._raise_failure()
        return True if self._arriving is None else None

    def finish(self) -> None:
        """Posts that this rank passes no boundary any more."""
        self.passed = FINISHED
        self._finished = True
        self._posts.append(self._say_done())

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
                self._pace.stir()
                yield from self._posts.popleft()
            if (reason := (yield Get("abort"))) is not None:
                yield from self._fail_last(reason.decode())
                break
            yield from self._follow_rounds()
            yield from self._look_for_arrivals()
            if self._finished and not self._end_agreed:
                yield from self._give_up_if_overdue("done", "finish", self._arrival_timeout)
            if not self._posts:
                yield Sleep(self._pace.pause())
        if self._end_agreed:
            yield Add("left", 1)
        self.over = True

    def _post_event(self, description: str) -> Watching[None]:
        number = (yield Add("events", 1)) - 1
        yield Set(f"event/{number}", description)
        yield Add("news", 1)

    def _say_done(self) -> Watching[None]:
        yield Set("finished", "")
        yield Add("news", 1)
        yield from self._answer("done")

    def _answer(self, name: str) -> Watching[None]:
        """Posts this rank's position under ``name``."""
        if (yield from _meet(name, self._index, len(self._ranks), json.dumps(self.passed), f"{name}/here")):
            yield Add("news", 1)

    def _follow_rounds(self) -> Watching[None]:
        name = f"round/{self._round}"
        if self._held is None:
            if (listed := (yield Get(name))) is None:
                return
            events = [Event(**{**event, "needs": Needs(event["needs"])}) for event in json.loads(listed)]
            self._pace.stir()
            if not events:  # the end is a round without events
                self._end_agreed = True
                return
            # From here to the first yield in `_meet` nothing else runs: what is posted is the last boundary passed.
            self._held = events
            self._update_alert()
            yield from self._answer(name)
            for event in events:
                yield Announce(event)
        if (answer := (yield Get(f"{name}/all"))) is not None:
            after = _position(answer)
            self._pending += [(after, event) for event in self._held]
            self._held = None
            self._since.pop(name, None)
            self._update_alert()
            self._round += 1
            self._pace.stir()
        else:
            yield from self._give_up_if_overdue(name, "answer", self._answer_timeout)

    def _look_for_arrivals(self) -> Watching[None]:
        if (event := self._arriving) is None:
            return
        name = _arrival(event.number)
        # This is read first: a rank that acted on the event finished after all had arrived.
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
        # If all of this node have answered it is for the relay to find out who has not.
        if waited > 2 * timeout + self._linger or (yield Get(f"{name}/here")) is None:
            yield from self._give_up_on(name, what, timeout)

    def _give_up_on(self, name: str, what: str, timeout: float) -> Watching[None]:
        missing: list[int] = []
        if (yield Get(f"{name}/here")) is None:  # else what they have posted is deleted
            missing = yield from _missing(name, len(self._ranks))
        yield from self._give_up(_blame([self._ranks[each] for each in missing], what, timeout))

    def _give_up(self, reason: str) -> Watching[None]:
        """Fails, and makes every other rank fail for the same reason. The first reason is the one that counts."""
        posted = yield Get("abort")
        if posted is None:
            yield Set("abort", reason)
            yield Add("news", 1)
        yield from self._fail_last(reason if posted is None else posted.decode())

    def _fail_last(self, reason: str) -> Watching[None]:
        """A store may die with the process of the relay, so the others get a few polls to read the reason before."""
        until = self._clock() + self._linger
        while self._index == 0 and self._clock() < until:
            yield Sleep(self._pace.shortest)
        self._fail(reason)


_ALTHOUGH = "although a rank has finished already"


def _reach(number: int, kind: str) -> str:
    return f"reach the boundary where all act on event {number} ({kind!r})"


def _blame(ranks: Sequence[int], what: str, timeout: float) -> str:
    who = f"ranks {_brief(ranks)} did not" if ranks else "a rank died just when all of them did"
    return f"{who} {what} (others waited for it, at most {timeout:.0f} s)"


def _brief(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 32 else f"[{', '.join(map(str, ranks[:32]))}, ...] ({len(ranks)} of them)"


class _Pace:
    """How long a watcher sleeps: little while something happens, more the longer nothing has.

    Args:
        watchers: How many poll the same store. All together do it some 4,000 times a second in quiet, and 40,000 times
            within the moments of a round.
        clock: Seconds.
    """

    def __init__(self, watchers: int, clock: Callable[[], float]) -> None:
        self.longest = max(0.05, watchers / 4_000)
        self.shortest = max(0.002, watchers / 40_000)
        self._clock = clock
        self._stirred = clock()

    def stir(self) -> None:
        """Something has happened."""
        self._stirred = self._clock()

    def pause(self) -> float:
        """How long to sleep now."""
        return min(self.longest, max(self.shortest, self._clock() - self._stirred))


@dataclass
class _Meeting:
    what: str  # all ranks are to do
    timeout: float
    posted: float | None = None  # when all of this node had, and it was passed on
    asked: float | None = None  # when the others were asked who has not


class Relay:
    """A node's part in the agreement: brings what its ranks say to the job's store, and back what concerns them.

    To be driven as a :class:`Participant` is. It has no main side.

    Args:
        nodes: The ranks of every node. The relay of the first one opens the rounds.
        index: Which of them is its own.
        clock: Seconds, monotonic.
        answer_timeout: As for a participant.
        arrival_timeout: As for a participant.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        index: int,
        clock: Callable[[], float],
        answer_timeout: float,
        arrival_timeout: float,
    ) -> None:
        self.over = False
        self.linger = 3 * _Pace(len(nodes), clock).longest if len(nodes) > 1 else 0.0
        """How long it may take until all others have read what has been published, in seconds."""

        self._nodes = nodes
        self._ranks = nodes[index]
        self._index = index
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._arrival_timeout = arrival_timeout
        self._here = _Pace(len(self._ranks), clock)
        self._above = _Pace(1 if index == 0 else len(nodes), clock)
        self._look_at = clock()  # when to look above again
        self._news = self._news_here = -1  # how much had been published, above and here, when it last looked
        self._next_here = 0  # the first event of this node that is not passed on yet
        self._round = 0
        self._is_open = False  # whether the round has been brought here
        self._listed: list[dict[str, Any]] = []  # its events
        self._meetings = {"done": _Meeting("finish", arrival_timeout)}
        self._past: dict[str, str] = {}  # by kind: the meeting before
        self._finished = False  # a rank has, as is known here and above
        self._failed = self._ends = False
        self._lead = _Lead(self) if index == 0 else None

    def watch(self) -> Watching[None]:
        """What it does, from the start to the agreed end or a failure."""
        try:
            while not self._failed and not self._ends:
                if (news := (yield Add("news", 0))) != self._news_here:
                    self._news_here = news
                    yield from self._pass_on_events()
                    yield from self._pass_on_answers()
                    yield from self._pass_on_failure()
                if self._lead is not None:
                    yield from self._lead.look()
                if self._clock() >= self._look_at and not self._failed:
                    self._look_at = self._clock() + self._above.pause()
                    yield from self._look_above()
                if not self._failed and not self._ends:
                    yield Sleep(min(self._here.pause(), max(0.0, self._look_at - self._clock())))
            if self._ends:
                yield from self._leave()
            elif self._lead is not None:
                yield from self._lead.look()  # what it has failed for
        except Exception as error:  # nearly always, the store of the job is gone
            if self._ends:
                return
            first_line = (str(error).splitlines() or [""])[0]
            yield Set(
                "abort",
                f"ranks {_brief(self._ranks)} lost touch with the others ({type(error).__name__}: {first_line}), as "
                "happens when the process that owns the store they share has ended or its node can't be reached",
            )
        finally:
            self.over = True

    def _say(self, key: str, value: str) -> Watching[None]:
        yield Above(Set(key, value))
        yield from self._call_the_lead()

    def _call_the_lead(self) -> Watching[None]:
        yield Above(Add("said", 1))
        self._stir()

    def _stir(self) -> None:
        self._here.stir()
        self._above.stir()

    def look_at_once(self) -> None:
        """Something was published for it."""
        self._look_at = self._clock()
        self._stir()

    # ---- what its ranks say

    def _pass_on_events(self) -> Watching[None]:
        while (described := (yield Get(f"event/{self._next_here}"))) is not None:
            number = (yield Above(Add("events", 1))) - 1
            yield from self._say(f"event/{number}", described.decode())
            yield Delete(f"event/{self._next_here}")
            self._next_here += 1

    def _pass_on_answers(self) -> Watching[None]:
        if not self._finished and (yield Get("finished")) is not None:
            self._finished = True
            yield from self._say("finished", "")
        for name, meeting in self._meetings.items():
            if meeting.posted is None and (position := (yield Get(f"{name}/here"))) is not None:
                yield from self._pass_on_events()  # what a rank asked before it finished is among the events
                meeting.posted = self._clock()
                self._stir()
                if (yield from _meet(name, self._index, len(self._nodes), position.decode(), f"{name}/all", Above)):
                    yield from self._call_the_lead()

    def _pass_on_failure(self) -> Watching[None]:
        if (reason := (yield Get("abort"))) is not None:
            self._failed = True
            if (yield Above(Get("abort"))) is None:
                yield from self._say("abort", reason.decode())

    # ---- what concerns them

    def _look_above(self) -> Watching[None]:
        if (news := (yield Above(Add("news", 0)))) != self._news:
            self._news = news
            yield from self._follow()
        yield from self._look_for_the_missing()

    def _follow(self) -> Watching[None]:
        if self._news == 0:
            return
        (published,) = yield Above(GetAll(["status"]))  # it is there, so nobody has to ask whether it is
        status = json.loads(published)
        self._stir()
        if status["abort"] is not None:
            self._failed = True
            yield Set("abort", status["abort"])
            return
        for name, position in status["answers"].values():
            meeting = self._meetings.get(name)
            if meeting is not None and meeting.posted is not None:
                yield from self._bring_answer(name, position)
        if status["finished"] and not self._finished:  # after the answers: who acted had arrived before
            self._finished = True
            yield Set("finished", "")
        number, events = status["round"]
        if number == self._round and not self._is_open:
            self._is_open, self._listed = True, events
            if events:
                self._meetings[f"round/{number}"] = _Meeting("answer", self._answer_timeout)
            else:  # the end is a round without events
                self._ends = True
            yield Set(f"round/{number}", json.dumps(events))
        if status["asked"] is not None:
            yield from self._say_who_is_missing(*status["asked"])

    def _bring_answer(self, name: str, position: str) -> Watching[None]:
        del self._meetings[name]
        if name == f"round/{self._round}":
            self._round, self._is_open = self._round + 1, False
            for event in self._listed:
                what = _reach(event["number"], event["kind"])
                self._meetings[_arrival(event["number"])] = _Meeting(what, self._arrival_timeout)
        yield Set(f"{name}/all", position)
        # All ranks have come to this meeting, and know how the one before it has ended.
        kind = name.partition("/")[0]
        before, self._past[kind] = self._past.get(kind), name
        if before is not None:
            for key in (before, f"{before}/all", f"{before}/here"):
                yield Delete(key)

    # ---- what is missing

    def _look_for_the_missing(self) -> Watching[None]:
        """Asks all relays which rank does not come, and gives up on nodes that do not say.

        Their own participants know it first, and are left time to say it.
        """
        now = self._clock()
        for name, meeting in self._meetings.items():
            if meeting.posted is None:
                continue
            late = self._finished and name.startswith("arrival/")
            if late and _ALTHOUGH not in meeting.what:
                meeting.what += f", {_ALTHOUGH}"
            if meeting.asked is not None:
                if now - meeting.asked > self.linger + 1.0:
                    self._news = yield Above(Add("news", 0))
                    yield from self._follow()
                    if name in self._meetings and not self._failed:
                        nodes = yield from _missing(name, len(self._nodes), Above)
                        yield from self._give_up([rank for node in nodes for rank in self._nodes[node]], meeting)
                    return
            elif late or now - meeting.posted > 1.25 * meeting.timeout:
                meeting.asked = now
                yield from self._say("asked", json.dumps([name, meeting.what]))

    def _say_who_is_missing(self, name: str, what: str) -> Watching[None]:
        meeting = self._meetings.get(name)
        if meeting is not None and meeting.posted is None and (yield Get(f"{name}/here")) is None:
            meeting.what = what
            missing = yield from _missing(name, len(self._ranks))
            yield from self._give_up([self._ranks[each] for each in missing], meeting)

    def _give_up(self, ranks: Sequence[int], meeting: _Meeting) -> Watching[None]:
        if (yield Get("abort")) is None:
            yield Set("abort", _blame(ranks, meeting.what, meeting.timeout))
        yield from self._pass_on_failure()

    def _leave(self) -> Watching[None]:
        """The stores may live in the processes of the relays, so those go last, and that of rank 0 last of all."""
        until = self._clock() + self._answer_timeout
        while (yield Add("left", 0)) < len(self._ranks) and self._clock() < until:
            yield Sleep(self._here.shortest)
        left = yield Above(Add("left", 1))
        while self._index == 0 and left < len(self._nodes) and self._clock() < until:
            yield Sleep(self._above.shortest)
            left = yield Above(Add("left", 0))


class _Lead:
    """What the relay of rank 0 does for the job: puts together what all relays have to know, in one key.

    Whoever has something to say counts ``said`` up; it counts ``news`` up, and every relay reads the key once.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._said = -1
        self._next_event = 0  # the first that is in no round yet
        self._open: list[str] = ["done"]  # what is met for
        self._is_open = False
        self._status: dict[str, Any] = {
            "round": [-1, []],
            "answers": {},  # by kind, the newest: nobody can want an older one
            "finished": False,
            "asked": None,
            "abort": None,
        }

    def look(self) -> Watching[None]:
        """Reads what was said, and publishes what follows from it."""
        if (said := (yield Above(Add("said", 0)))) == self._said:
            return
        self._said = said
        while (yield from self._take()):
            yield Above(Set("status", json.dumps(self._status)))
            yield Above(Add("news", 1))
            for name, _ in self._status["answers"].values():
                yield Above(Delete(f"{name}/all"))
            self._relay.look_at_once()

    def _take(self) -> Watching[bool]:
        status = json.dumps(self._status)
        if (reason := (yield Above(Get("abort")))) is not None:
            self._status["abort"] = reason.decode()
            return json.dumps(self._status) != status
        # This is read first: a rank that acted on an event finished after all had arrived.
        self._status["finished"] = self._status["finished"] or (yield Above(Get("finished"))) is not None
        all_finished = False
        for name in list(self._open):
            if (position := (yield Above(Get(f"{name}/all")))) is None:
                continue
            if name == "done":
                all_finished = True
                continue
            self._open.remove(name)
            self._status["answers"][name.partition("/")[0]] = [name, position.decode()]
            if name.startswith("round/"):
                self._is_open = False
                self._open += [_arrival(event["number"]) for event in self._status["round"][1]]
        if not self._is_open:
            yield from self._open_round(all_finished)
        if (asked := (yield Above(Get("asked")))) is not None:
            self._status["asked"] = json.loads(asked)
        return json.dumps(self._status) != status

    def _open_round(self, all_finished: bool) -> Watching[None]:
        """Lists all open events as the next round; none at all, once every rank has finished."""
        events = []
        while (described := (yield Above(Get(f"event/{self._next_event}")))) is not None:
            events.append({"number": self._next_event, **json.loads(described)})
            yield Above(Delete(f"event/{self._next_event}"))
            self._next_event += 1
        if events or all_finished:
            number = self._status["round"][0] + 1
            self._status["round"] = [number, events]
            self._is_open = True
            self._open.append(f"round/{number}")


def _arrival(number: int) -> str:
    return f"arrival/{number}"


def _position(text: bytes) -> Position:
    batches, phase, loader, index = json.loads(text)
    return (batches, phase, loader, index)
