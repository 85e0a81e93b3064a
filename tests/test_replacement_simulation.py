"""The shipped protocol of ``launch --elastic`` under a simulated scheduler, network and clock.

What runs is what ships: `LossPolicy` decides for the supervisor; in every rank `Membership` takes the messages,
`_enter` leaves the fit and enters it again, `DefaultGroup` opens and cuts the process group, `Replaceability` says what
can be mended, `LastBoundary`, with the real files of `OwnPartWriter`, and `LocalSavePolicy.save_after_loss` save what
survives, and `generations` finds what is complete. Simulated are processes, pipes, stores, collectives, a script of
some steps with a validation and regular saves, the watchdog, and `launch` itself. Their blocking calls run in threads,
of which one at a time goes on: whose turn it is, how long a wait and how late a message is, follow from a seed. A rank
or the supervisor may die before each turn of it; ranks hang, raise errors of the user's own, and are asked to stop.

A training state is the list of all updates, and an update is what every rank has put into it, with its batch and its
random state: two states are the same where weights would be bitwise the same. What may never be is a `Violation`:

1. A group has the processes of one generation, and one of each rank. A collective has all its members or fails.
2. All ranks resume from one boundary, and its state is the undisturbed run's. So is every generation that is complete,
   whoever has saved it, and every final state: no sample is skipped or counted twice.
3. Nobody waits for ever: the run ends soon after the last disturbance.
4. Each replacement and each restart counts as one. There are no more than there may be, and no more than ranks are
   lost. A run ends with an error only if the budget is spent.
5. An error of the user's own ends its rank: it is not taken for a loss where there is none, and the rank is not
   replaced. Nothing else ends a rank, unless it was told to.
6. When the supervisor ends, no process is left. When it dies, `launch` finds ranks that end.
7. A run that was asked to stop and ends with 0 has finished, or all its ranks have saved the same step. It is not
   stopped while ranks are replaced, which could not save.
8. A process without the newest claim publishes nothing, but for the last boundary after a loss.

With ``--when-lost go-on`` the ranks that are left make the updates of those that are absent, too, and take them in when
they are back. Newcomers are killed, fail and wait before their door, at it and behind it. Then also:

9. A generation has the members that the supervisor has named, each with the number that its slot has among them. There
   are never fewer than ``min_ranks``, rank 0 is one of them if no other can take its tasks, and all of them if the fit
   cannot go on with fewer.
10. No generation trains when a later one has trained.
11. Only a loss costs a restart, also that of a newcomer; to take newcomers in costs none, unless it fails. A newcomer
    that has failed by itself is not started again, and a run with members that go on does not end for it.

Ranks hold the state in groups of two, each a part of it. A rank that has lost the other one leaves, and waits at the
door with its process:

12. A generation has whole groups. Each rank resumes from a shard of its own part. A rank that was not lost is not
    started again.

Some ranks are on a second node, which goes away with all of them and comes back later:

13. No rank is started on a node that is away. Where those that are left can go on, nobody waits for it, also where all
    of them are restarted.

The last tests put mistakes back, and expect one of them. Many more schedules:
``python -m tests.test_replacement_simulation --schedules 5000 --seed 1 [--when-lost go-on|nodes|groups]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistError

from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint.generations import (
    Generation,
    RankLocation,
    ShardInfo,
    generations,
    rank_shard,
    replicated_shard,
)
from lightning_resilience.elastic import group, own_part
from lightning_resilience.elastic.group import DefaultGroup
from lightning_resilience.fit import context, last_boundary, local_saves, reentry
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.last_boundary import LastBoundary
from lightning_resilience.fit.local_saves import LocalSavePolicy
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.reentry import Replaceability
from lightning_resilience.launch import loss_policy, membership, newcomers
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.loss_policy import LossPolicy, Member
from lightning_resilience.launch.membership import Membership
from lightning_resilience.launch.newcomers import Newcomers
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.events import Resumed, Saved
from lightning_resilience.run.run_directory import JOINS_VARIABLE, StaleAttempt
from tests.test_agreement_simulation import Violation, schedules

STEPS, SAVE_EVERY, VALIDATE_BEHIND = 6, 2, 3
SUPERVISOR = -1
TERM_S, POLL_S = 60.0, 1.0  # the grace period; how often `launch` looks
HUNG_AFTER_S = 20.0
COLLECTIVE_TIMEOUT_S = 1800.0
LIGHTNINGS = "on_run", "accept_fewer_ranks", "leave_fit", "take_place"
CPU = SimpleNamespace(type="cpu")
SCRIPT_ENDS_S = 40.0
ENDS_WITHIN_S = (
    100.0 + SCRIPT_ENDS_S
)  # from the last disturbance: 10 s for an error, 30 s for survivors, 22 s to end all, and to train


class Killed(BaseException):
    """This thread's process is no more."""


class Exit(BaseException):
    """``os._exit``."""


class Stopped(SystemExit):
    """A rank ends because the run was asked to stop."""


class Boom(ValueError):
    """An error of the user's own."""


@dataclass(frozen=True)
class Schedule:
    """What happens in a run.

    Args:
        seed: Of all that is left to chance.
        world_size: How many ranks there are.
        falls: Who is killed, and before which of the turns of its rank, in all its lives together.
        hangs: Which ranks hang, and in which step.
        raises: Which ranks raise an error of the user's own, and in which step.
        raises_again: Whether they do so whenever they come there.
        stop_at: After how many turns the supervisor is asked to stop.
        refuses: The rank that cannot go back, if it has to.
        max_restarts: How many there may be.
        steps: How many steps there are.
        when_lost: Whether the others wait for a replacement.
        min_ranks: How many of them may go on without.
        fewer: Why the fit cannot go on with fewer ranks.
        tasks: Why no other rank can take those of rank 0.
        spares: How often a spare is ready.
        start_s: How long a process takes up to the script; 0: as the seed says.
        newcomers_fail: Which newcomers raise an error of the user's own before their fit.
        node: The ranks on the second node: when one of them falls, all are lost with it.
        away_s: How long it is away then.
        leaves_at: After how many turns the second node is told to stop.
        group: How many ranks hold the state together.
    """

    seed: int
    world_size: int
    falls: frozenset[tuple[int, int]] = frozenset()
    hangs: frozenset[tuple[int, int]] = frozenset()
    raises: frozenset[tuple[int, int]] = frozenset()
    raises_again: bool = False
    stop_at: int | None = None
    refuses: int | None = None
    max_restarts: int = 50
    steps: int = STEPS
    when_lost: loss_policy.WhenLost = "hold"
    min_ranks: int = 1
    fewer: str = ""
    tasks: str = ""
    spares: float = 0.0
    start_s: float = 0.0
    newcomers_fail: frozenset[int] = frozenset()
    node: frozenset[int] = frozenset()
    away_s: float = 0.0
    leaves_at: int | None = None
    group: int = 1

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """What follows from a seed."""
        chosen = random.Random(seed)
        world_size = chosen.choice([2, 3, 3, 4])
        # Most when there is something to go back to; a rank has some 90 turns where nothing happens.
        first, options = chosen.randrange(*chosen.choice([(0, 50), (45, 110), (45, 110), (90, 140)])), dict[str, Any]()
        later = [chosen.randrange(chosen.choice([5, 30, 100])) for _ in range(chosen.randrange(4))]
        falls = {(chosen.randrange(world_size), first + each) for each in (0, *later)}
        place = (chosen.randrange(world_size), chosen.randrange(STEPS))
        kind = chosen.randrange(12)
        if kind == 0:
            options["hangs"] = frozenset({place})
        elif kind in (1, 2):
            every = {(rank, place[1]) for rank in range(world_size)}
            options["raises"] = frozenset({place} if chosen.random() < 0.6 else every)
            options["raises_again"] = chosen.random() < 0.3
            options["max_restarts"] = chosen.randrange(4)
        elif kind in (3, 4):
            options["stop_at"] = chosen.randrange(600)
        elif kind == 5:
            falls |= {(SUPERVISOR, chosen.randrange(60))}
        elif kind == 6:
            options["refuses"] = place[0]
        elif kind == 7:
            options["max_restarts"] = chosen.randrange(3)
        return cls(seed, world_size, frozenset(falls if chosen.random() < 0.9 else ()), **options)

    @classmethod
    def going_on(cls, seed: int) -> Schedule:
        """The same with ``--when-lost go-on``: there are steps enough for newcomers to come back, and to be lost."""
        chosen, base = random.Random(f"go on {seed}"), cls.of(seed)
        size, steps = base.world_size, chosen.choice([8, 14, 14])
        others = [*range(1, size)] * 3
        first, who = 50 + chosen.randrange(7 * steps), chosen.choice([0, *others, *others])
        falls = {each for each in base.falls if each[0] == SUPERVISOR} | {(who, first)}
        for _ in range(chosen.randrange(5)):
            later = chosen.randrange(chosen.choice([5, 12, 30, 90]))
            falls.add((who if chosen.random() < 0.5 else chosen.choice([0, *others]), first + later))
        return replace(
            base,
            falls=frozenset(falls),
            raises=base.raises if chosen.random() < 0.3 else frozenset(),
            steps=steps,
            when_lost="go_on",
            min_ranks=chosen.choice([1, 1, 1, 1, 1, 2, 3 if size > 2 else 1]),
            fewer=chosen.choice([*11 * [""], "of the test"]),
            tasks=chosen.choice(["", "of the test"]),
            spares=chosen.choice([0.0, 0.0, 0.0, 0.3, 1.0]),
            start_s=chosen.choice([0.03, 0.03, 0.1, 0.5, 3.0]),
            newcomers_fail=frozenset({who} if chosen.random() < 0.2 else ()),
        )

    @classmethod
    def of_groups(cls, seed: int) -> Schedule:
        """The same with ranks that hold the state in groups of two."""
        chosen, base = random.Random(f"groups {seed}"), cls.going_on(seed)
        size = chosen.choice([4, 4, 6])
        falls = {
            (rank if rank == SUPERVISOR else chosen.choice([rank, rank ^ 1, chosen.randrange(size)]), turn)
            for rank, turn in base.falls
        }
        fails = {rank ^ chosen.randrange(2) for rank in base.newcomers_fail}
        return replace(
            base, world_size=size, falls=frozenset(falls), newcomers_fail=frozenset(fails), group=2, min_ranks=1
        )

    @classmethod
    def of_nodes(cls, seed: int) -> Schedule:
        """The same with a node that goes away."""
        chosen, base = random.Random(f"nodes {seed}"), cls.going_on(seed)
        node = frozenset(range(chosen.randrange(1, base.world_size), base.world_size))
        falls = {(min(node), turn) if chosen.random() < 0.5 else (rank, turn) for rank, turn in base.falls if rank >= 0}
        falls |= {each for each in base.falls if each[0] == SUPERVISOR}
        away_s = chosen.choice([0.0, 0.3, 1.0, 3.0, 60.0])
        leaves_at = chosen.randrange(200, 1500) if chosen.random() < 0.5 else None
        return replace(base, falls=frozenset(falls), node=node, away_s=away_s, leaves_at=leaves_at)


class Strand:
    """A thread that goes on when it is told to."""

    def __init__(self, simulation: Simulation, process: Process | None, target: Callable[[], None]) -> None:
        self.process = process
        self.until, self.ready = 0.0, lambda: False
        self.over = self.killed = False
        self._simulation, self._target = simulation, target
        self._go = threading.Lock()
        self._go.acquire()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Lets it go on until it pauses or ends."""
        if self._thread is None:
            if self.killed:
                self.over = True
                return
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._simulation.strand = self
        self._go.release()
        self._simulation.back.acquire()

    def pause(self, until: float, ready: Callable[[], bool]) -> None:
        """Called in it."""
        if not self.killed:
            self.until, self.ready = until, ready
            self._simulation.back.release()
            self._go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._target()
        except Killed:
            pass
        except BaseException as error:
            self._simulation.errors.append(error)
        finally:
            self.over = True
            self._simulation.back.release()


class Lock:
    """As ``threading.Lock``, between strands."""

    def __init__(self) -> None:
        self._simulation, self._is_held = of_now(), False

    def __enter__(self) -> None:
        while self._is_held:
            self._simulation.pause(ready=lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class Condition:
    """As ``threading.Condition``; strands change places only where they pause."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, is_so: Callable[[], bool], within_s: float | None = None) -> bool:
        if not is_so():
            of_now().pause(float("inf") if within_s is None else of_now().now + within_s, is_so)
        return is_so()


class Timer:
    """As ``threading.Timer``."""

    def __init__(self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._until, self._call = of_now().now + seconds, lambda: function(*args)

    def start(self) -> None:
        def run() -> None:
            of_now().pause(self._until)
            self._call()

        of_now().start_strand(process_of_now(), run)


@dataclass
class Store:
    """The store of a generation."""

    generation: int
    size: int = 0
    is_open: bool = True
    joined: dict[int, Process] = field(default_factory=dict)
    entered: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)  # of each rank the collectives of its group
    gone: set[int] = field(default_factory=set)  # whose connections are closed
    torn: set[int] = field(default_factory=set)  # also before all was read
    event: tuple[int, Any] | None = None  # what all act on, and at which boundary
    arrived: set[int] = field(default_factory=set)  # there

    def hears_of(self, rank: int) -> bool:
        """Whether a rank notices by itself that a collective cannot end: it reads from the one before it."""
        return self.size > 1 and bool(self.gone & self.read_by(rank))

    def read_by(self, rank: int) -> set[int]:
        return {rank, (rank - 1) % self.size}


class Channel:
    """A rank's end of its channel."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self.simulation, self.process = simulation, process
        self.told: deque[tuple[float, Message | None]] = deque()
        self.said: deque[tuple[float, Message]] = deque()

    def send(self, kind: str, **fields: Any) -> None:
        self.simulation.pause()
        self._put(self.said, Message(kind, json.loads(json.dumps(fields)), []))

    def tell(self, message: Message | None) -> None:
        self._put(self.told, message)

    def _put(self, queue: deque[tuple[float, Any]], message: Message | None) -> None:
        late = self.simulation.random.choice([0.0, 0.0, 0.001, 0.01, 0.2])
        queue.append((max(self.simulation.now + late, queue[-1][0] if queue else 0.0), message))

    def listen(self, take: Callable[[Message], None], end: Callable[[], None] = lambda: None) -> None:
        def run() -> None:
            while True:
                self.simulation.pause(float("inf"), lambda: bool(self.told))
                self.simulation.pause(self.told[0][0])
                if (message := self.told.popleft()[1]) is None:
                    return end()
                take(message)

        self.simulation.start_strand(self.process, run)


class Process:
    """A process of a rank."""

    def __init__(self, simulation: Simulation, slot: int, generation: int, port: int, is_newcomer: bool) -> None:
        self.simulation, self.slot, self.pid = simulation, slot, next(simulation.pids)
        self.environ = {"RANK": str(slot), "WORLD_SIZE": str(simulation.schedule.world_size)}
        self.environ |= {"TORCHELASTIC_RESTART_COUNT": str(generation), "MASTER_PORT": str(port)}
        self.environ |= {JOINS_VARIABLE: "1"} if is_newcomer else {}
        self.is_member = not is_newcomer
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.channel = Channel(simulation, self)
        self.group = DefaultGroup()
        self.has_script = self.has_finished = self.is_stopping = False
        self.sockets: set[tuple[int, str]] = set()
        self.store: Store | None = None
        self.rank_in_store = 0
        self.is_initialized = False
        self.dist = SimpleNamespace(
            DistError=DistError,
            init_process_group=lambda: simulation.open_group(self),
            is_initialized=lambda: self.is_initialized,
            destroy_process_group=self.close_group,
            distributed_c10d=SimpleNamespace(
                _world=SimpleNamespace(group_count=0), _new_process_group_helper=lambda: None
            ),
        )
        self.rendezvous = SimpleNamespace(_create_c10d_store=simulation.connect)
        # The training state.
        self.global_step = self.batch = 0
        self.drawn: dict[int, int] = {}  # of this rank, and of those that are absent and whose updates it makes
        self.metric: dict[int, int] = {}
        self.state: tuple[Any, ...] = ()
        self.parameter = SimpleNamespace(_version=0)
        self.lost: Collection[int] = ()
        self.ready_in = -1
        self.is_lost_with_node = False
        self.was_disturbed = False  # killed, hung, failed or refused
        self.raised_at: float | None = None
        self.line: Membership
        self.session: Any = None
        self.boundary: Boundary | None = None
        self.policy: Policy

    @property
    def generation(self) -> int:
        return int(self.environ["TORCHELASTIC_RESTART_COUNT"])

    @property
    def rank(self) -> int:
        return int(self.environ["RANK"])

    @property
    def size(self) -> int:
        return int(self.environ["WORLD_SIZE"])

    @property
    def waits(self) -> bool:
        return self.has_script and JOINS_VARIABLE in self.environ

    @property
    def own(self) -> Any:
        return self.batch, tuple(sorted(self.drawn.items())), tuple(sorted(self.metric.items()))

    def close_group(self) -> None:
        self.is_initialized = False
        self.cut(is_torn=False)  # its sockets stay open, until the next group is

    def cut(self, is_torn: bool = True) -> None:
        if self.store is not None:
            self.store.gone.add(self.rank_in_store)
            if is_torn:
                self.store.torn.add(self.rank_in_store)


class Values:
    """Stands for `OwnValues`: of each place a count of random numbers, and a metric."""

    layout, names = 7, ()

    def __init__(self, process: Process) -> None:
        self._process = process
        self._places = range(process.simulation.schedule.world_size)
        self.size = 8 * (1 + 2 * len(self._places))

    def read(self, begun: int, workers: Any, logs: Any) -> tuple[list[float], list[Any]]:
        process = self._process
        return [begun, *(of.get(place, -1) for of in (process.drawn, process.metric) for place in self._places)], []

    def write(self, part: own_part.OwnPart) -> tuple[int, None, list[Any]]:
        count = len(self._places)
        (begun, *numbers), _ = part.values(1 + 2 * count, [])
        self._process.drawn, self._process.metric = (
            {place: int(number) for place, number in zip(self._places, of, strict=True) if number >= 0}
            for of in (numbers[:count], numbers[count:])
        )
        return int(begun), None, []


class Boundary(LastBoundary):
    """Without a Trainer: which values there are, and the file of an epoch's begin."""

    def _set_up(self) -> None:
        process = self._session.process
        self._changed, self._unchanged = [(vars(process), "batch")], [(vars(process), "global_step")]
        self._parameters, self._optimizer = [process.parameter], SimpleNamespace(param_groups=[{}])
        self._modes, self._group = None, process.simulation.schedule.group
        self._values = Values(process)
        self._open(self._values.size)

    @property
    def _folder(self) -> Path:
        folder: Path = self._session.process.simulation.folder
        return folder

    def _has_new_metrics(self) -> bool:
        return False

    def _turn_off(self, reason: str) -> None:
        raise Violation(f"the last boundary is not kept: {reason}")

    def _arrange(self, position: int) -> None:
        self._begun = self._session.exact.epoch_begun

    def _digest(self) -> str:
        return ""

    def _epoch_of(self, rank: int, begun_at: int) -> dict[str, Any]:
        return {"epoch": None, "first_batch": None, "absent": {}}


class Policy(LocalSavePolicy):
    """The local saves, whose files are the simulation's."""

    def __init__(self, process: Process, session: Any) -> None:
        size = process.size
        self.process, self.session = process, session
        self.locations = [RankLocation(rank, size, rank, size, "node") for rank in range(size)]
        self.location = self.locations[process.rank]
        self._compared: Any = [0]
        self._kept_here, self._unrecorded = range(size), 0
        self._shards = 1
        self._saves: Any = SimpleNamespace(sees_writes=False, save_now=self.save_now)
        self.store: Any = SimpleNamespace(path=self.path)

    def _state(self) -> Any:
        process = self.process
        return process.own, process.state, process.global_step

    def path(self, step: int, generation: str, name: str) -> Any:
        process = self.process
        process.simulation.pause()
        return SimpleNamespace(exists=lambda: (step, generation, name) in process.simulation.files)

    def save_now(
        self, generation: str, step: int, own: Any, state: Any, counted: int, left_s: float, location: RankLocation
    ) -> Any:
        """As `LocalSaves.save_now`: ``None`` if it was not published."""
        simulation, size = self.process.simulation, location.world_size
        digest, part = str(hash(state)), self.process.rank % simulation.schedule.group
        try:
            for name, content in (
                (rank_shard(location.rank), (own, part)),
                (replicated_shard(location.local_rank, size), state),
            ):
                simulation.sleep(0.01)
                self.session.fit.check_owner()
                simulation.publish(
                    self.process, ShardInfo("node", step, generation, name, 1, size, "ddp", size, digest), content
                )
        except StaleAttempt:
            return None
        return SimpleNamespace(replicated_digest=lambda: digest, at_hand=lambda _: None)

    def save_locally(self, reason: str, within_s: float, gone: Collection[int] = ()) -> bool:
        fit, step = self.session.fit, self.process.global_step
        name = blake2b(f"{fit.nonce} {reason} {step}".encode(), digest_size=4).hexdigest()
        saved = self.save_now(name, step, *self._state(), within_s, self.location)
        if None in fit.gather(saved and saved.replicated_digest()):
            return False
        self.process.simulation.saved_to_leave += fit.rank == 0 and bool(gone)
        return True

    def _record(self, step: int, generation: str, reason: str, seconds: float | None = None) -> None:
        simulation = self.process.simulation
        simulation.saved_after_loss += reason == "after a loss"
        self.session.replaceability.on_record(object.__new__(Saved))


_now: list[Simulation] = []


def of_now() -> Simulation:
    """The simulation that runs."""
    return _now[-1]


def process_of_now() -> Process:
    """The process whose strand runs."""
    strand = of_now().strand
    assert strand is not None
    assert strand.process is not None
    return strand.process


class OfProcess:
    """Stands for something that each process has for itself."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(process_of_now(), object.__getattribute__(self, "_name")), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(process_of_now(), object.__getattribute__(self, "_name")), name, value)


def shut_down(fd: int, how: int) -> None:
    """Shuts down a socket of this process: those of its group fall together. For reading, others do not see it."""
    process_of_now().cut(is_torn=how != socket.SHUT_RD)


class Simulation:
    """A run.

    Args:
        schedule: What happens in it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.random = random.Random(schedule.seed)
        self.now = self.last_disturbance = 0.0
        self.back = threading.Lock()
        self.back.acquire()
        self.strand: Strand | None = None
        self.strands: list[Strand] = []
        self.errors: list[BaseException] = []
        self.turns: Counter[int] = Counter()
        self.pids = iter(range(100, 1 << 20))
        self.starved = self.random.randrange(2 * schedule.world_size)
        start_s = self.random.choice([0.1, 0.1, 3.0])
        self.start_s = schedule.start_s or start_s
        self.ports: dict[int, Store] = {}
        self.processes: list[Process] = []
        self.members: dict[int, Process] = {}
        self.members_of = {0: list(range(schedule.world_size))}  # each generation
        self.last_trained = 0
        self.files: dict[tuple[int, str, str], tuple[ShardInfo, Any]] = {}
        self.claim = ""
        self.claims = 0
        self.results: list[tuple[Process, tuple[Any, ...]]] = []
        self.stopped: dict[int, int] = {}  # of each slot that was asked to stop the step that it has saved
        self.raised: set[tuple[int, int]] = set()
        self.fallen: list[int] = []
        self.replacements = self.restarts = self.saved_after_loss = self.growths = self.newcomers_lost = 0
        self.restarted_in = 0
        self.gone_on = self.at_once = self.sent_back = self.agreed_growths = self.saved_to_leave = 0
        self.grown_at: list[float] = []
        self.last_kept: list[Process] = []  # by those that have taken newcomers in
        self.resumed: Counter[int] = Counter()
        self.supervisor_is_dead = False
        self.replaced_in = -1
        self.is_there_at = 0.0  # the second node
        self.leaves = self.has_left = False
        self.dismissed = self.nodes_lost = self.newcomers_away = self.restarted_without = 0

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def run(self, folder: Path) -> Simulation:
        """Runs it.

        Args:
            folder: For own parts.
        """
        self.folder = folder
        _now.append(self)
        try:
            schedule = self.schedule
            options = (schedule.when_lost, schedule.min_ranks)
            self.policy = LossPolicy(self, schedule.world_size, schedule.max_restarts, TERM_S, *options)
            self.supervisor = self.start_strand(None, self.supervise)
            self.start_strand(None, self.launch)
            while self.strands:
                self._turn()
                if self.errors:
                    raise self.errors[0]
            self.check()
        finally:
            for strand in [*self.strands]:
                self._unwind(strand)
            _now.pop()
        return self

    def _turn(self) -> None:
        ready = [each for each in self.strands if each.until <= self.now or each.ready()]
        if not ready:
            self.now = min(each.until for each in self.strands)
            if self.now > self.last_disturbance + ENDS_WITHIN_S:
                raise Violation(f"at {self.now:.1f} s the run has not ended: {self.describe()}")
            return
        strand = self.random.choice(ready)
        if self.rank_of(strand) == self.starved and self.random.random() < 0.9:
            strand = self.random.choice(ready)
        rank = self.rank_of(strand)
        if rank is not None:
            turn = self.turns[rank]
            self.turns[rank] += 1
            if (rank, turn) in self.schedule.falls:
                self.fall(strand)
                return
        strand.resume()
        if strand.over:
            self.strands.remove(strand)
        for each in [each for each in self.strands if each.killed]:
            self._unwind(each)

    def rank_of(self, strand: Strand) -> int | None:
        if strand.process is not None:
            return strand.process.slot
        return SUPERVISOR if strand is self.supervisor else None

    def fall(self, strand: Strand) -> None:
        self.last_disturbance = self.now
        if strand.process is None:
            self.supervisor_is_dead = True
            self._unwind(strand)
            for port in self.ports.values():
                port.is_open = False
            for process in self.processes:
                process.channel.tell(None)
            return
        self.fallen.append(strand.process.slot)
        lost = [strand.process]
        if strand.process.slot in self.schedule.node:
            self.nodes_lost += 1
            self.last_disturbance = self.is_there_at = self.now + self.schedule.away_s
            lost = [each for each in self.processes if each.slot in self.schedule.node and each.exit_code is None]
        for process in lost:
            process.was_disturbed = True
            process.is_lost_with_node = process.slot in self.schedule.node
            self.newcomers_away += process.is_lost_with_node and not process.is_member
            self.end(process, -signal.SIGKILL)
        for each in [each for each in self.strands if each.killed]:
            self._unwind(each)

    def _unwind(self, strand: Strand) -> None:
        strand.killed = True
        if strand in self.strands:
            self.strands.remove(strand)
        if not strand.over:
            strand.resume()

    def end(self, process: Process, code: int) -> None:
        """A process ends."""
        if process.exit_code is None:
            process.exit_code, process.ended_at = code, self.now
            process.cut(is_torn=code != 0)
            for strand in self.strands:
                if strand.process is process:
                    strand.killed = True

    def start_strand(self, process: Process | None, target: Callable[[], None]) -> Strand:
        strand = Strand(self, process, target)
        self.strands.append(strand)
        return strand

    def pause(self, until: float = 0.0, ready: Callable[[], bool] = lambda: False) -> None:
        """Lets others go on, until then, or until it is so."""
        assert self.strand is not None
        self.strand.pause(until, ready)

    def sleep(self, seconds: float) -> None:
        """About as long."""
        self.pause(self.now + seconds * self.random.choice([0.0, 0.5, 1.0, 1.0, 4.0]))

    def describe(self) -> str:
        members = [(each.rank, each.generation, each.state, each.exit_code) for each in self.policy.members.values()]
        coming = [*self.policy._newcomers.coming.values()]
        return f"{self.schedule}, generation {self.policy.generation}, {members}, coming: {coming}"

    # -- the supervisor and `launch` -----------------------------------------------------------------------------------

    def supervise(self) -> None:
        self.open_store()
        for rank in range(self.schedule.world_size):
            self._start(rank, 0, is_newcomer=False)
        while self.policy.result is None:
            heard = self.look()
            if self.schedule.stop_at is not None and sum(self.turns.values()) >= self.schedule.stop_at:
                self.policy.ask_to_stop()
            if (at := self.schedule.leaves_at) is not None and not self.has_left and sum(self.turns.values()) >= at:
                self.leaves = self.has_left = True
                self.last_disturbance = self.now
            self.leaves &= self.now >= self.is_there_at
            self.policy.ask_to_leave(self.schedule.node if self.leaves else ())
            self.policy.step(self.now, heard)
            self.pause(self.policy.wakes_at, self.has_news)
        if living := [each.slot for each in self.processes if each.exit_code is None]:
            raise Violation(f"ranks {living} are left: {self.describe()}")

    def has_news(self) -> bool:
        return any(
            (each.exit_code is not None and (of := self.policy._life_of(each.slot)) and of.exit_code is None)
            or (each.channel.said and each.channel.said[0][0] <= self.now)
            for each in self.members.values()
        )

    def look(self) -> bool:
        for rank, process in self.members.items():
            if process.exit_code is not None:
                self.policy.ended(rank, process.exit_code)
        is_heard = True
        for process in self.processes:
            said, is_member = process.channel.said, self.members.get(process.slot) is process
            while said and said[0][0] <= self.now:
                _, message = said.popleft()
                self.policy.heard(process.slot if is_member else None, message.kind, message.fields)
            is_heard &= not said
        return is_heard

    def open_store(self) -> int:
        self.pause()
        port = 5000 + len(self.ports)
        self.ports[port] = Store(self.policy.generation)
        return port

    def close_old_store(self) -> None:
        self.pause()
        for port in list(self.ports.values())[:-1]:
            port.is_open = False

    def close_stores(self) -> None:
        self.pause()
        for port in self.ports.values():
            port.is_open = False

    def start(self, ranks: Collection[int], generation: int, is_newcomer: bool) -> None:
        is_restart = {*ranks} == self.policy.members.keys()
        if away := [rank for rank in ranks if self.lost_node(rank)]:
            if not is_restart or is_newcomer:
                raise Violation(f"ranks {away} are started on a node that is away")
            there = [rank for rank in ranks if rank not in away]
            if self.can_go_on(there):
                raise Violation(f"ranks {there} wait for a node, and could go on without it")
            self.pause(self.is_there_at)
        if is_restart:
            self.restarts += 1
            self.restarted_in = generation
            self.restarted_without += is_newcomer
            self.members_of[generation] = list(ranks)
            if living := [each.slot for each in self.processes if each.exit_code is None]:
                raise Violation(f"ranks {living} are left at a restart")
            finished = [each for each in self.last_kept if each.has_finished and each.generation < generation - 1]
            if finished and finished == self.last_kept and not any(each.was_disturbed for each in finished):
                raise Violation("the run was over, and is restarted for newcomers")
            self.last_kept = []
        for rank in ranks:
            self.pause()
            last = self.members[rank]
            if last.exit_code is None:
                raise Violation(f"rank {rank} is started beside itself")
            if not last.is_member and is_newcomer and not is_restart:
                self.newcomers_lost += last.was_disturbed and not last.is_lost_with_node
                if last.exit_code == 1:
                    raise Violation(f"newcomer {rank} has failed by itself, and is started again")
            was_lost = last.was_disturbed or last.is_lost_with_node or last.generation < self.restarted_in
            if is_newcomer and not is_restart and not was_lost:  # nor left out by a restart
                raise Violation(f"rank {rank} is started again, and was not lost")
            self._start(rank, generation, is_newcomer)

    def _start(self, slot: int, generation: int, is_newcomer: bool) -> None:
        process = self.members[slot] = Process(self, slot, generation, 4999 + len(self.ports), is_newcomer)
        self.processes.append(process)
        self.start_strand(process, lambda: self.main(process))

    def restarts_left(self) -> int:
        return 0

    def has_spare(self, rank: int) -> bool:
        return not self.lost_node(rank) and self.random.random() < self.schedule.spares

    def lost_node(self, rank: int) -> str | None:
        return "the second" if rank in self.schedule.node and self.now < self.is_there_at else None

    def dismiss(self, ranks: Collection[int]) -> None:
        if {*ranks} != self.schedule.node:
            raise Violation(f"{ranks} leave, and are not the second node")
        if self.schedule.node & self.policy.members.keys():
            raise Violation(f"{ranks} leave, and are members")
        self.last_disturbance = self.is_there_at = self.now + self.schedule.away_s
        self.dismissed += 1
        self.leaves = False  # who comes in its place was not told to stop
        for rank in ranks:
            self.members[rank].is_lost_with_node = True  # also if it has ended right before
        for process in self.processes:
            if process.slot in ranks and process.exit_code is None:
                process.was_disturbed = process.is_lost_with_node = True
                self.end(process, -signal.SIGKILL)

    def can_go_on(self, ranks: Collection[int]) -> bool:
        """Whether these can without the others."""
        schedule = self.schedule
        is_enough = len(ranks) >= schedule.min_ranks and (0 in ranks or not schedule.tasks)
        # What a fit can, it has said to this supervisor, and there is a state.
        is_known = self.policy._has_saved and any(each.ready_in >= 0 for each in self.processes)
        return schedule.when_lost == "go_on" and is_enough and not schedule.fewer and is_known

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        if kind == "replace":
            self.members_of[fields["generation"]] = members = fields["members"]
            self.check_members(members)
        for rank in ranks:
            self.pause()
            if kind == "replace":
                self.members[rank].is_member = rank in fields["members"]
                self.sent_back += rank not in fields["members"]
            self.members[rank].channel.tell(Message(kind, json.loads(json.dumps(fields)), []))

    def check_members(self, members: list[int]) -> None:
        schedule = self.schedule
        is_whole = len(members) == schedule.world_size
        counts = Counter(slot // schedule.group for slot in members)
        if {*counts.values()} - {schedule.group}:
            raise Violation(f"{members} are not whole groups")
        if len({*members}) < len(members) or members != sorted(members):
            raise Violation(f"{members} are not the members of a generation")
        if not is_whole and (schedule.fewer or schedule.when_lost == "hold"):
            raise Violation(f"the fit cannot go on with {members} only")
        if len(members) < schedule.min_ranks or (schedule.tasks and 0 not in members):
            raise Violation(f"{members} go on, and are too few")

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        members = [self.members[rank] for rank in self.policy.members]
        ready_in = [each.ready_in for each in members if each.exit_code is None]
        is_stop = signum == signal.SIGTERM and not self.policy._ending and len(ready_in) == len(members)
        is_over = all(each.has_finished for each in members)  # and newcomers were turned away
        if is_stop and self.replaced_in == self.policy.generation not in ready_in and not is_over:
            raise Violation("a stop is passed on while ranks are replaced, which cannot save")
        for rank in ranks:
            self.pause()
            self.signal(self.members[rank], signum)

    def signal(self, process: Process, signum: signal.Signals) -> None:
        if signum == signal.SIGKILL or not process.has_script:
            self.end(process, -signum)
        process.is_stopping = True
        self.last_disturbance = self.now  # it has its time to save

    def record(
        self, lost: Mapping[int, str], generation: int, members: Collection[int] | None, kept: Collection[int]
    ) -> None:
        self.replacements += bool(lost)
        self.growths += not lost
        self.grown_at += [] if lost else [self.now]
        self.last_kept = [] if lost else [self.members[rank] for rank in kept]
        self.gone_on += bool(lost) and members is not None and len(members) == len(kept)
        self.at_once += bool(lost) and members is not None and len(members) > len(kept)
        self.replaced_in = generation
        for rank in lost:
            ended = [each for each in self.processes if each.slot == rank and each.exit_code is not None]
            if (code := ended[-1].exit_code) == 1 and (members is None or rank in members):
                raise Violation(f"rank {rank} is replaced, and ended with {code}")

    def launch(self) -> None:
        """Ends what the supervisor leaves."""
        self.pause(float("inf"), lambda: self.supervisor.over)
        self.sleep(POLL_S)
        for signum, within_s in ((signal.SIGTERM, deadlines.LEFTOVERS_PATIENCE_S), (signal.SIGKILL, 0.0)):
            for process in self.processes:
                if process.exit_code is None:
                    self.signal(process, signum)
            self.pause(self.now + within_s)

    # -- a rank --------------------------------------------------------------------------------------------------------

    def main(self, process: Process) -> None:
        code = 0
        try:
            self.sleep(self.start_s)
            process.has_script = True
            process.line = line = membership.Membership(process.channel, process.generation)  # type: ignore[arg-type]
            line.begin_generation = lambda: self.begin_generation(process)
            if not line.is_at_door:
                self.begin_generation(process)
            self.sleep(0.1)
            if line.is_at_door and process.slot in self.schedule.newcomers_fail:
                process.was_disturbed = True
                self.last_disturbance = self.now
                raise Boom("a newcomer's own error")
            reentry.install(lambda trainer, lost: None)
            trainer: Any = SimpleNamespace(is_global_zero=False, strategy=SimpleNamespace(root_device=CPU))
            start: Any = None
            reentry._enter(trainer, lambda: self.fit(process), line, lambda lost: self.leave(process, lost), start)
            process.has_finished = True
            self.results.append((process, (process.state, process.own)))
            self.pause(self.now + self.random.choice([0.1, 0.5, SCRIPT_ENDS_S]))  # the script does something else
        except Stopped:
            pass
        except Exit as error:
            code = error.args[0]
        except (RuntimeError, Boom) as error:
            is_told = process.line._restarts or self.supervisor_is_dead or process.is_stopping
            if not isinstance(error, Boom) and not is_told:
                raise Violation(f"rank {rank_and_generation(process)} fails by itself: {error}") from error
            self.sleep(0.5)
            code = 1
        self.end(process, code)

    def begin_generation(self, process: Process) -> None:
        if process.rank == 0:
            self.pause()
            self.claims += 1
            self.claim = f"claim {self.claims}"

    def connect(self, host: str, port: int, rank: int, world_size: int, timeout: Any) -> Any:
        """``_create_c10d_store``."""
        self.sleep(0.01)
        if not self.ports[port].is_open:
            self.pause(self.now + timeout.total_seconds())
            raise DistError("the client socket has timed out")
        return SimpleNamespace(set_timeout=lambda timeout: None, store=self.ports[port])

    def open_group(self, process: Process) -> None:
        """torch's ``init_process_group``: all meet in the store, and connect to each other."""
        size, members = process.size, self.members_of[process.generation]
        if members[process.rank : process.rank + 1] != [process.slot] or len(members) != size:
            raise Violation(f"{rank_and_generation(process)} of {size} is slot {process.slot} of {members}")
        port = int(process.environ["MASTER_PORT"])
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store: Store = process.rendezvous._create_c10d_store("127.0.0.1", port, process.rank, size, timeout).store
        if store.generation != process.generation:
            raise Violation(f"{process.rank} of generation {process.generation} is in that of {store.generation}")
        if process.rank in store.joined:
            raise Violation(f"rank {process.rank} is twice in generation {store.generation}")
        store.joined[process.rank] = process
        store.size = size
        process.store, process.rank_in_store = store, process.rank
        process.sockets = {(5, f"socket:[{port}]")}
        self.pause(ready=lambda: len(store.joined) == size or not store.is_open, until=self.now + COLLECTIVE_TIMEOUT_S)
        self.sleep(0.01)
        if len(store.joined) < size or (not store.is_open and self.random.random() < 0.5):
            raise RuntimeError("recvValue failed: Connection reset by peer")
        self.sleep(0.01)
        if store.gone:
            self.sleep(1.0)
            raise RuntimeError("gloo connectFullMesh failed")
        process.is_initialized = True

    def collective(self, process: Process, what: Any, mine: Any = None) -> dict[int, Any]:
        """Lets nobody go before all are in it. Where one dies then, some of the others fail."""
        store, rank = process.store, process.rank
        assert store is not None
        size = store.size
        entered = store.entered.setdefault(rank, [])
        number = len(entered)
        self.pause()
        if rank in store.gone and size > 1:
            raise RuntimeError("gloo: Connection closed by peer")
        entered.append((what, mine))
        for other, theirs in store.entered.items():
            if len(theirs) > number and theirs[number][0] != what:
                raise Violation(f"rank {rank} is in {what}, rank {other} in {theirs[number][0]}")

        def is_complete() -> bool:
            return all(len(store.entered.get(other, ())) > number for other in range(size))

        self.pause(self.now + COLLECTIVE_TIMEOUT_S, lambda: is_complete() or store.hears_of(rank))
        self.sleep(self.random.choice([0.001, 0.01, 0.1]))
        is_torn = size > 1 and store.torn & store.read_by(rank)
        if not is_complete() or (is_torn and self.random.random() < 0.5):
            raise RuntimeError(f"gloo: Connection closed by peer in {what}")
        return {other: store.entered[other][number][1] for other in range(size)}

    # -- its fit -------------------------------------------------------------------------------------------------------

    def fit(self, process: Process) -> None:
        """What Lightning and a session do in a fit."""
        if process.raised_at is not None and not self.was_lost(process, process.raised_at):
            raise Violation(f"an error of rank {process.slot}'s own is taken for a loss")
        process.raised_at, process.lost, process.boundary = None, (), None
        process.dist.init_process_group()
        rank, size = process.rank, process.size
        token, nonce = self.collective(process, "token", (self.claim, f"{process.pid} {self.now}"))[0]
        exact = SimpleNamespace(
            epoch_begun=object(), resumed=None, before_evaluation=None, logs=None, worker_states=None, places=size
        )
        # What is known of absent ranks is among the values of this one.
        exact.absent_states, exact.put_back_absent, exact.stand_in = {}, lambda _: None, lambda *_: None
        trainer = SimpleNamespace(is_global_zero=rank == 0, world_size=size, strategy=SimpleNamespace(root_device=CPU))
        trainer.num_nodes = 1
        run = SimpleNamespace(check_owner=self.check_owner, is_claimed_by_sibling=lambda: True)
        fit: Any = SimpleNamespace(trainer=trainer, rank=rank, nonce=nonce, token=token, run=run, saves_paused=False)
        fit.module, fit.rank_0_may_go_ahead, fit.replicas_differ = torch.nn.Module(), False, False
        fit.steps_counted = 0
        fit.gather = lambda value: [*self.collective(process, "leaving", value).values()]
        fit.saving, fit.check_owner = nullcontext, lambda: FitContext.check_owner(fit)
        fit.agreement = SimpleNamespace(request=lambda kind, needs: self.request(process, kind), expect=lambda: None)
        session: Any = SimpleNamespace(fit=fit, exact=exact, process=process)
        session.replaceability = replaceability = Replaceability(fit)
        policy = Policy(process, session)
        methods = {Participant.save_after_loss: policy.save_after_loss, Participant.save_locally: policy.save_locally}
        fit.participants = SimpleNamespace(implement=lambda method: [methods[method]] if method in methods else [])
        session.selector = SimpleNamespace(local=policy)
        process.session, process.boundary, process.policy = session, Boundary(session), policy
        self.resume(process)
        replaceability.check_has_state(process.global_step > 0)
        # Which boundary it is, all have compared.
        if len(set(self.collective(process, "resumed", (process.global_step, process.state)).values())) > 1:
            raise Violation("ranks resume from different boundaries")
        is_refused = self.schedule.refuses == process.slot and not process.line.is_start
        session.why_not = "of the test" if is_refused else None
        process.was_disturbed |= is_refused
        replaceability.begin(session)
        replaceability.before_training_data([])
        process.ready_in = process.generation
        self.pause()
        try:
            self.train(process)
            self.sleep(0.1)  # hooks of the end
            replaceability.end()
        except Stopped:
            raise
        except BaseException as error:
            replaceability.is_loss(error)
            raise

    def request(self, process: Process, kind: str) -> None:
        """Of the agreement, which has a simulation of its own: all act at a boundary that none of them has passed."""
        assert process.store is not None
        furthest = max(each.global_step for each in process.store.joined.values())
        process.store.event = furthest + 1, SimpleNamespace(kind=kind)

    def arrive(self, store: Store, rank: int) -> None:
        store.arrived.add(rank)
        self.pause(float("inf"), lambda: len(store.arrived) == store.size or bool(store.gone) or not store.is_open)
        if len(store.arrived) < store.size:
            raise PeerLost("not all act on an event")

    def resume(self, process: Process) -> None:
        """All take the newest complete generation, as rank 0 sees it."""
        self.pause()
        found = [each for each in generations(info for info, _ in self.files.values()) if not each.missing]
        found = [each for each in found if not each.differs]
        newest = (found[0].step, found[0].name, found[0].world_size) if found else (0, "", 0)
        step, name, size = self.collective(process, "newest", newest)[0]
        process.global_step, process.state, process.batch = step, (), 0
        places = range(self.schedule.world_size)
        drawn, metric = dict.fromkeys(places, 0), dict.fromkeys(places, 0)
        if name:
            # Of as many ranks as there were. Each takes what is there of the places that it has now.
            names = [*map(rank_shard, range(size)), replicated_shard(0, size)]
            if any((step, name, each) not in self.files for each in names):
                raise Violation(f"rank {process.rank} resumes from what is not complete")
            *shards, process.state = (self.files[step, name, each][1] for each in names)
            owns = [own for own, _ in shards]
            if any(part != number % self.schedule.group for number, (_, part) in enumerate(shards)):
                raise Violation("a rank resumes from another part of the state than its own")
            process.batch, drawn, metric = owns[0][0], {}, {}
            for _, of_drawn, of_metric in owns:
                drawn.update(of_drawn)
                metric.update(of_metric)
            process.session.replaceability.on_record(object.__new__(Resumed))
        process.drawn, process.metric = ({place: of[place] for place in self.places(process)} for of in (drawn, metric))
        self.check_state(process.rank, process.size, step, process.state, process.own)
        self.resumed[step] += 1
        process.session.fit.steps_counted = trainer_step = step
        process.session.fit.trainer.global_step = trainer_step

    def places(self, process: Process) -> range:
        return range(process.rank, self.schedule.world_size, process.size)

    def check_state(self, rank: int, size: int, step: int, state: Any, own: Any) -> None:
        places = tuple((place, step) for place in range(rank, self.schedule.world_size, size))
        if (state, own) != (self.undisturbed(step), (step, places, places)):
            raise Violation(f"rank {rank} of {size} at step {step} has {state} and {own}")

    def undisturbed(self, steps: int) -> Any:
        return tuple(tuple((rank, step, step) for rank in range(self.schedule.world_size)) for step in range(steps))

    def train(self, process: Process) -> None:
        session, boundary = process.session, process.boundary
        stops = False
        while True:
            step = process.global_step
            session.replaceability.check()
            if stops:
                self.save(process, f"stop {step}")
                self.collective(process, ("stopped", step))
                self.stopped[process.slot] = step
                raise Stopped
            if step % SAVE_EVERY == 1 and not self.is_saved(step):
                self.save(process, f"regular {step}")
            if step == self.schedule.steps:
                self.collective(process, "trained")
                return
            if process.store.event is not None and process.store.event[0] == step:
                self.arrive(process.store, process.rank)
                self.agreed_growths += process.rank == 0
                session.replaceability.on_event(process.store.event[1])
            boundary.after_batch(True)
            boundary.before_batch()
            if session.replaceability.leaves:
                boundary.save_together(session.replaceability.not_in_next)
            session.replaceability.check_members()
            self.sleep(0.05)
            mine = [(place, step, process.drawn[place]) for place in self.places(process)]
            for place in self.places(process):
                process.drawn[place] += 1
                process.metric[place] += 1
            process.batch += 1
            self.pause()
            self.disturb(process, step)
            updates = self.collective(process, ("gradients", step), (mine, process.is_stopping))
            if process.generation < self.last_trained:
                raise Violation(f"{rank_and_generation(process)} trains, and generation {self.last_trained} has")
            self.last_trained = process.generation
            stops = any(is_stopping for _, is_stopping in updates.values())
            boundary._begin()
            self.pause()
            process.parameter._version += 1
            process.state += (tuple(sorted(update for of_rank, _ in updates.values() for update in of_rank)),)
            self.pause()
            process.global_step = session.fit.trainer.global_step = session.fit.steps_counted = step + 1
            if step == VALIDATE_BEHIND:
                session.exact.before_evaluation = 1
                self.collective(process, ("validation", step))
                session.exact.before_evaluation = None

    def disturb(self, process: Process, step: int) -> None:
        place = process.slot, step
        may_raise = place not in self.raised or self.schedule.raises_again
        process.was_disturbed |= place in self.schedule.hangs | self.schedule.raises and may_raise
        if place in self.schedule.hangs and place not in self.raised:
            self.raised.add(place)
            self.pause(self.now + HUNG_AFTER_S)
            self.last_disturbance = self.now
            raise Exit(exit_codes.HUNG)
        if place in self.schedule.raises and may_raise:
            self.raised.add(place)
            self.last_disturbance = self.now
            process.raised_at = self.now
            raise Boom("a loss that is no number")

    def is_saved(self, step: int) -> bool:
        return any(
            each.step == step and not each.missing for each in generations(info for info, _ in self.files.values())
        )

    def save(self, process: Process, reason: str) -> None:
        """A regular save, after which rank 0 knows whether it is complete."""
        policy, fit = process.policy, process.session.fit
        name = blake2b(f"{fit.nonce} {reason}".encode(), digest_size=4).hexdigest()
        policy.save_now(name, process.global_step, *policy._state(), 0.0, policy.location)
        self.pause()
        if process.rank == 0 and self.is_saved(process.global_step):
            policy._record(process.global_step, name, "local")

    def check_owner(self, token: str) -> None:
        if token != self.claim:
            raise StaleAttempt("this process belongs to another attempt")

    def publish(self, process: Process, info: ShardInfo, content: Any) -> None:
        key = info.step, info.generation, info.name
        if process.session.fit.token != self.claim and not process.session.fit.rank_0_may_go_ahead:
            raise Violation(f"rank {process.rank} publishes with an old token")
        if key in self.files and self.files[key][1] != content:
            raise Violation(f"{key} changes")
        self.files[key] = info, content

    def leave(self, process: Process, lost: Collection[int]) -> None:
        """As ``leave_without_peers``."""
        process.lost = lost
        if process.boundary is not None:  # else the fit had not begun
            process.boundary.save(lost)
            process.boundary.leave()
        self.sleep(0.05)

    # -- what must hold in the end -------------------------------------------------------------------------------------

    def was_lost(self, process: Process, at: float) -> bool:
        """Whether another rank was lost, or taken in, when this one has raised."""
        until = at + deadlines.OWN_ERROR_RAISED_AFTER_S
        times = [*self.grown_at, *(each.ended_at for each in self.processes if each.exit_code)]
        return any(at - 1.0 <= each <= until for each in times)

    def check(self) -> None:
        schedule, policy, result = self.schedule, self.policy, self.policy.result
        if left := [each.slot for each in self.processes if each.exit_code is None]:
            raise Violation(f"ranks {left} are left")
        for process, (state, own) in self.results:
            self.check_state(process.rank, process.size, schedule.steps, state, own)
        for each in generations(info for info, _ in self.files.values()):
            for rank in range(each.world_size) if not each.missing and not each.differs else ():
                (own, part), state = (
                    self.files[each.step, each.name, name][1] for name in (rank_shard(rank), each.replicated[0])
                )
                self.check_state(rank, each.world_size, each.step, state, own)
                if part != rank % schedule.group:
                    raise Violation(f"the shard of rank {rank} has been saved by one that holds another part")
        if self.supervisor_is_dead:
            return
        used = self.replacements + self.restarts + self.newcomers_lost
        begun = self.replacements + self.restarts + self.growths
        # A newcomer that is lost with its node costs nothing, unless there was a node again before it was known.
        is_counted = policy.restarts in range(used, used + self.newcomers_away + 1)
        if result is None or policy.generation != begun or not is_counted or policy.restarts > schedule.max_restarts:
            raise Violation(
                f"{self.replacements} replacements, {self.restarts} restarts, {self.newcomers_lost} newcomers lost, "
                f"{self.growths} growths, {policy.restarts} counted: {self.describe()}"
            )
        ends = len([each for each in self.processes if each.was_disturbed])
        in_vain = any(each.has_finished for each in self.processes if self.members[each.slot] is not each)
        if policy.restarts > ends and not in_vain:  # else it was known too late that a rank would not come
            raise Violation(f"{ends} ranks are lost, and it costs more restarts: {self.describe()}")
        members = policy.members.keys()
        self.check_members([*members])
        finished = {slot for slot in members if self.members[slot].has_finished}
        stopped = (schedule.stop_at, schedule.leaves_at) != (None, None) and self.policy._stop_asked
        if result == 0 and finished < members:
            steps = {self.stopped.get(slot) for slot in members}
            if not stopped or len(steps) > 1 or None in steps:
                raise Violation(
                    f"it ends with 0, and {finished} have finished, {self.stopped} saved: {self.describe()}"
                )
        if result == 1 and not stopped and policy.restarts < schedule.max_restarts:
            raise Violation(f"it ends before the budget is spent: {self.describe()}")


def rank_and_generation(process: Process) -> str:
    return f"{process.rank} of generation {process.generation}"


def current() -> Membership | None:
    """The `Membership` of the process whose strand runs."""
    return process_of_now().line


class Virtual:
    """Stands for ``time``."""

    @staticmethod
    def monotonic() -> float:
        return of_now().now

    @staticmethod
    def sleep(seconds: float) -> None:
        of_now().sleep(seconds)


def end_now(code: int) -> None:
    """``os._exit``."""
    raise Exit(code)


class Complains(logging.LoggerAdapter[Any]):
    """A log in which nothing may be that is a mistake of ours."""

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        of_now().errors.append(Violation(f"a warning: {msg}"))


class AbsentRanks:
    """Stands for :mod:`~lightning_resilience.fit.absent_ranks`."""

    @staticmethod
    def why_not(trainer: Any, before: int, some_are_absent: bool) -> str | None:
        assert some_are_absent, "it is asked while all are there"
        simulation = of_now()
        return None if simulation.schedule.seed % 2 else simulation.schedule.fewer or None

    @staticmethod
    def why_not_divided(trainer: Any, loaders: Any) -> str | None:
        return of_now().schedule.fewer or None


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is shipped runs in processes of the simulation; gives a folder for own parts."""
    sources, quiet = own_part._Sources(), logging.getLogger("quiet")
    quiet.setLevel(logging.CRITICAL)
    quiet.propagate = False
    for module, name, value in (
        (membership, "threading", SimpleNamespace(Condition=Condition, Timer=Timer)),
        (membership, "os", Os()),
        (membership, "current", current),
        (reentry, "DEFAULT", OfProcess("group")),
        (context, "DEFAULT", OfProcess("group")),
        (reentry, "gc", SimpleNamespace(collect=lambda: None)),
        (reentry, "os", Os()),
        (reentry, "threading", SimpleNamespace(Thread=lambda **options: SimpleNamespace(start=lambda: None))),
        (reentry, "lightning_reentry", SimpleNamespace(**dict.fromkeys(LIGHTNINGS, lambda *_: None))),
        (
            reentry,
            "devices",
            SimpleNamespace(why_unusable=lambda device, within_s: None, release_memory=lambda device: None),
        ),
        (reentry, "time_account", SimpleNamespace(OF_PROCESS=SimpleNamespace(enter=lambda where: None), RENDEZVOUS=0)),
        (reentry, "why_not", lambda session: session.why_not),
        (reentry, "absent_ranks", AbsentRanks),
        (reentry, "lightning_strategies", SimpleNamespace(group_size=lambda trainer: of_now().schedule.group)),
        (
            reentry,
            "lightning_loggers",
            SimpleNamespace(why_others_cannot_log=lambda trainer: of_now().schedule.tasks or None),
        ),
        (reentry, "log", quiet),
        (group, "dist", OfProcess("dist")),
        (group, "importlib", SimpleNamespace(import_module=lambda name: process_of_now().rendezvous)),
        (group, "threading", SimpleNamespace(Lock=Lock)),
        (group, "os", Os()),
        (group, "time", Virtual),
        (group, "_sockets", sockets),
        (group, "_held", lambda sockets: [fd for fd, _ in sockets]),
        (group, "_shut_down", shut_down),
        (group, "_backends", lambda: {"gloo": None}),
        (last_boundary, "register_optimizer_step_pre_hook", lambda hook: SimpleNamespace(remove=lambda: None)),
        (last_boundary, "lightning_boundary", SimpleNamespace(forget_new_metrics=lambda trainer, names: None)),
        (last_boundary, "lightning_loops", SimpleNamespace(train_eval_modes=lambda trainer, module: None)),
        (last_boundary, "lightning_loggers", SimpleNamespace(file_loggers=lambda trainer: [])),
        (last_boundary, "time", Virtual),
        (last_boundary, "log", Complains(quiet, {})),
        (local_saves, "time", Virtual),
        (own_part, "_Sources", lambda: sources),
        (loss_policy, "log_line", lambda text, is_detail=False: None),
        (deadlines, "STOP_REACHES_ALL_WITHIN_S", 0.1),  # of a run of seconds
        (deadlines, "TRAINS_BEFORE_OTHERS_COME_S", 0.1),
        (deadlines, "IMPORTS_GO_ON_AFTER_S", 0.02),
        (deadlines, "IMPORTS_STAND_STILL_FOR_S", 0.3),
        (newcomers, "log_line", lambda text, is_detail=False: None),
    ):
        monkeypatch.setattr(module, name, value)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


class Os:
    """Stands for ``os``."""

    _exit = staticmethod(end_now)
    close = staticmethod(lambda fd: None)

    @property
    def environ(self) -> dict[str, str]:
        return process_of_now().environ

    def getpid(self) -> int:
        return process_of_now().pid


def sockets() -> set[tuple[int, str]]:
    """Those of the process whose strand runs."""
    of_now().pause()
    return {*process_of_now().sockets}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Any:
    with simulated(monkeypatch) as folder:
        yield folder


def run_all(seeds: Iterable[int], folder: Path, schedule: Callable[[int], Schedule] = Schedule.of) -> Counter[str]:
    """Runs the schedules of these seeds; what they have come to."""
    found = Counter[str]()
    for seed in seeds:
        done = Simulation(schedule(seed)).run(folder)
        found["kills"] += len(done.fallen)
        found["replacements"] += done.replacements
        found["restarts"] += done.restarts
        found["saves after a loss"] += done.saved_after_loss
        found["supervisors lost"] += done.supervisor_is_dead
        found["stopped"] += len(done.stopped) == done.schedule.world_size
        found["finished"] += done.policy.result == 0
        found["gone on with fewer"] += done.gone_on
        found["replaced at once"] += done.at_once
        found["taken in"] += done.growths
        found["newcomers lost"] += done.newcomers_lost
        found["sent back"] += done.sent_back
        found["at an agreed boundary"] += done.agreed_growths
        found["given up"] += bool(done.policy._newcomers.given_up)
        found["nodes lost"] += done.nodes_lost
        found["nodes that leave"] += done.dismissed
        found["saved before a node leaves"] += done.saved_to_leave
        found["restarted without a node"] += done.restarted_without
    return found


@schedules(100, 600)
def test_every_run_ends_as_the_undisturbed_one(folder: Path, seeds: range) -> None:
    found = run_all(seeds, folder)
    # The schedules reach what they are meant to reach.
    assert found["replacements"] > 0.25 * len(seeds)
    assert found["finished"] > 0.5 * len(seeds)
    for each in ("saves after a loss", "restarts", "supervisors lost", "stopped"):
        assert found[each] > 0.01 * len(seeds), each


@schedules(40, 600)
def test_every_run_that_goes_on_with_fewer_ranks_ends_as_the_undisturbed_one(folder: Path, seeds: range) -> None:
    found = run_all(seeds, folder, Schedule.going_on)
    assert found["gone on with fewer"] > 0.25 * len(seeds)
    assert found["finished"] > 0.5 * len(seeds)
    for each in ("taken in", "replaced at once", "newcomers lost", "given up", "restarts"):
        assert found[each] > 0.01 * len(seeds), each


@pytest.mark.slow
@schedules(40, 600)
def test_every_run_of_groups_ends_as_the_undisturbed_one(folder: Path, seeds: range) -> None:
    found = run_all(seeds, folder, Schedule.of_groups)
    assert found["finished"] > 0.5 * len(seeds)
    for each in ("gone on with fewer", "taken in", "sent back", "at an agreed boundary"):
        assert found[each] > 0.04 * len(seeds), each
    assert found["newcomers lost"] > 0.01 * len(seeds)


@pytest.mark.slow
@schedules(40, 600)
def test_every_run_that_loses_nodes_ends_as_the_undisturbed_one(folder: Path, seeds: range) -> None:
    found = run_all(seeds, folder, Schedule.of_nodes)
    assert found["nodes lost"] > 0.5 * len(seeds)
    assert found["finished"] > 0.5 * len(seeds)
    for each in ("gone on with fewer", "taken in", "restarts"):
        assert found[each] > 0.05 * len(seeds), each
    for each in ("restarted without a node", "nodes that leave", "saved before a node leaves"):
        assert found[each] > 0.001 * len(seeds), each


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_run_ends_as_the_undisturbed_one_at_length(folder: Path) -> None:
    run_all(range(10_000, 30_000), folder)
    run_all(range(10_000, 20_000), folder, Schedule.going_on)
    run_all(range(10_000, 20_000), folder, Schedule.of_nodes)
    run_all(range(10_000, 20_000), folder, Schedule.of_groups)


# -- mistakes that are put back ----------------------------------------------------------------------------------------


class ReplacesAll(LossPolicy):
    """What an exception has ended is replaced."""

    def _why_not(self, dead: list[Member], members: Collection[int]) -> str | None:
        dead = [replace(each, exit_code=-9) if each.exit_code == 1 else each for each in dead]
        return super()._why_not(dead, members)


class NeverSpent(LossPolicy):
    """The budget is looked at after the restart that it does not have."""

    def _mend(self, now: float) -> None:
        self._max_restarts += 1
        super()._mend(now)
        self._max_restarts -= 1


class DoesNotWaitForTheEnd(LossPolicy):
    """Ranks are started beside those that are ended."""

    def _living(self) -> list[int]:
        return [] if self._ending else super()._living()


class NoDeadlineForSurvivors(LossPolicy):
    """It is not looked whether they leave."""

    def _check_replacement(self, now: float, seconds: float) -> None:
        super()._check_replacement(now, min(seconds, deadlines.SURVIVORS_LEAVE_WITHIN_S))


class ForgetsTheBudget(LossPolicy):
    """A replacement counts as none."""

    def _begin_generation(self, now: float, members: list[int], lost: Mapping[int, str]) -> None:
        self._max_restarts += 1
        super()._begin_generation(now, members, lost)


class StopsAtOnce(LossPolicy):
    """A stop is passed on while ranks are replaced, which cannot save."""

    def _check_replacement(self, now: float, seconds: float) -> None:
        if self._stop_asked:
            return self._stop(now)
        return super()._check_replacement(now, seconds)


class CutsTooLate(Membership):
    """The main thread knows of the loss before its group is cut."""

    def _take(self, message: Message) -> None:
        cut, self.cut = self.cut, lambda: None
        super()._take(message)
        of_now().sleep(0.5)
        self.cut = cut
        cut()


class KeepsWhatIsOver(Membership):
    """What has been answered is answered again."""

    def begin(self, replacement: membership.Replacement) -> None:
        super().begin(replacement)
        self._replacement = self._replacement or replacement


class ForgetsTheNext(Membership):
    """Another loss is forgotten that was told before this one was answered."""

    def begin(self, replacement: membership.Replacement) -> None:
        self._replacement = None
        super().begin(replacement)


class NeverOver(Membership):
    """A group is opened, and entered, though another rank is lost already."""

    is_over = property(lambda self: False)  # type: ignore[assignment]


class DoesNotWaitForWord(Membership):
    """An error is raised before the supervisor can say who was lost."""

    def replacement(self, within_s: float = 0.0) -> membership.Replacement | None:
        return super().replacement(0.0)


class NeverDoubts(Boundary):
    """It is not asked whether a rank has gone on from the last boundary."""

    def _known(self) -> Any:
        return self._note if self._note is not None else super()._known()


class DoesNotPutBack(Boundary):
    """What the forward pass has changed is saved."""

    def _put_back(self, note: Any, ranks: Collection[int]) -> Iterator[int]:
        for rank in super()._put_back(note, ranks):
            if rank == self._session.fit.rank:
                self._session.process.drawn[rank] += 1
            yield rank


class TakesTheNewest(Boundary):
    """The own part of a lost rank is that of another boundary."""

    def _part_of(self, rank: int, position: int) -> own_part.OwnPart:
        parts = own_part.read_own_parts(self._path(rank), self._session.fit.nonce)
        return parts[0] if parts else super()._part_of(rank, position)


class ForgetsTheLost(Boundary):
    """The first survivor saves its own random states in the name of the lost rank."""

    def _part_of(self, rank: int, position: int) -> own_part.OwnPart:
        part = super()._part_of(rank, position)
        return part if rank == self._session.fit.rank else replace(part, content=bytes(len(part.content)))


simulation = sys.modules[__name__]
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "an exception is replaced": (simulation, "LossPolicy", ReplacesAll),
    "one restart too many": (simulation, "LossPolicy", NeverSpent),
    "a replacement costs nothing": (simulation, "LossPolicy", ForgetsTheBudget),
    "the end of ranks is not awaited": (simulation, "LossPolicy", DoesNotWaitForTheEnd),
    "survivors have no deadline": (simulation, "LossPolicy", NoDeadlineForSurvivors),
    "a stop is passed on at once": (simulation, "LossPolicy", StopsAtOnce),
    "the old store stays open": (Simulation, "close_old_store", lambda self: None),
    "cut after the news": (membership, "Membership", CutsTooLate),
    "an answer counts twice": (membership, "Membership", KeepsWhatIsOver),
    "a second loss is forgotten": (membership, "Membership", ForgetsTheNext),
    "a group of a generation that is over": (membership, "Membership", NeverOver),
    "no word is awaited": (membership, "Membership", DoesNotWaitForWord),
    "a rank that has gone on": (simulation, "Boundary", NeverDoubts),
    "random states are not put back": (simulation, "Boundary", DoesNotPutBack),
    "another boundary of the lost rank": (simulation, "Boundary", TakesTheNewest),
    "a lost rank's own part is not taken": (simulation, "Boundary", ForgetsTheLost),
    "not all shards are there": (Generation, "missing", property(lambda self: [])),
}


class CostsAGrowth(LossPolicy):
    """To take newcomers in counts as a restart."""

    def _grow(self, now: float) -> None:
        self.restarts += 1
        super()._grow(now)


class NewcomersCostNothing(LossPolicy):
    """A newcomer that was lost is started again for nothing."""

    def _look_after_newcomers(self, now: float) -> None:
        before = self.restarts
        super()._look_after_newcomers(now)
        self.restarts = before


class GoesOnWithTooFew(LossPolicy):
    """``min_ranks`` is not looked at."""

    def _why_not_without(self, left: Collection[int]) -> str | None:
        self._min_ranks = 0
        return super()._why_not_without(left)


class GoesOnWithoutRank0(LossPolicy):
    """Rank 0 is a rank like others."""

    def _why_not_without(self, left: Collection[int]) -> str | None:
        for each in self.members.values():
            each.tasks = ""
        return super()._why_not_without(left)


class DoesNotAsk(LossPolicy):
    """It is not asked whether the fit can go on with fewer ranks."""

    def _why_not_without(self, left: Collection[int]) -> str | None:
        for each in self.members.values():
            each.fewer = ""
        return super()._why_not_without(left)


class LeavesNewcomersBehind(Newcomers):
    """Newcomers that are on their way are not ended with the run."""

    def end(self, now: float, members: Collection[Member] | None = None) -> None: ...


class StartsWhatFails(Newcomers):
    """A newcomer that fails by itself is started again."""

    def look_after(self, *args: Any) -> int:
        for each in self.coming.values():
            each.exit_code = each.exit_code and -9
        return super().look_after(*args)


def tells_who_is_there(self: Simulation, ranks: Collection[int], kind: str, **fields: Any) -> None:
    """A newcomer that is not at the door yet is not told that it is a member."""
    there = [rank for rank in ranks if self.members[rank].is_member or self.members[rank].waits]
    tells(self, there, kind, **fields)


tells = Simulation.tell


class TurnsNobodyAway(LossPolicy):
    """Newcomers that are taken in when the fit is over wait for the others."""

    def _are_too_late(self, seconds: float) -> bool:
        return False


class TakesInWhoeverComes(LossPolicy):
    """Newcomers are taken in while ranks come together."""

    def _check_replacement(self, now: float, seconds: float) -> None:
        if self._newcomers.at_door and self._goes_on:
            return self._grow(now)
        return super()._check_replacement(now, seconds)


class IsAsBefore(Membership):
    """A rank keeps its number when others are lost."""

    def begin(self, replacement: membership.Replacement) -> None:
        super().begin(replacement)
        process_of_now().environ["RANK"] = str(self.slot)


GOING_ON: dict[str, tuple[Any, str, Any]] = {
    "to take in costs a restart": (simulation, "LossPolicy", CostsAGrowth),
    "a newcomer costs nothing": (simulation, "LossPolicy", NewcomersCostNothing),
    "too few go on": (simulation, "LossPolicy", GoesOnWithTooFew),
    "rank 0 is not waited for": (simulation, "LossPolicy", GoesOnWithoutRank0),
    "the fit is not asked": (simulation, "LossPolicy", DoesNotAsk),
    "newcomers are left": (loss_policy, "Newcomers", LeavesNewcomersBehind),
    "a newcomer's own error": (loss_policy, "Newcomers", StartsWhatFails),
    "newcomers are not told in time": (Simulation, "tell", tells_who_is_there),
    "newcomers come too late": (simulation, "LossPolicy", TurnsNobodyAway),
    "nobody is cut": (DefaultGroup, "cut", lambda self: None),
    "a rank keeps its number": (membership, "Membership", IsAsBefore),
    "the old store stays open": (Simulation, "close_old_store", lambda self: None),
    "random states are not put back": (simulation, "Boundary", DoesNotPutBack),
}


class StartsWhereNobodyIs(Newcomers):
    """It is not asked whether there is a node."""

    def start(self, slots: Collection[int], generation: int, now: float) -> None:
        self.coming.update({slot: Member(slot, generation, now) for slot in slots})
        self._ranks.start(slots, generation, is_newcomer=True)


class ReplacesWhereNobodyIs(LossPolicy):
    """The same for replacements for which all wait."""

    def _why_not(self, dead: list[Member], members: Collection[int]) -> str | None:
        reason = super()._why_not(dead, members)
        return None if reason and reason.endswith("has not been replaced") else reason


class WaitsForTheNode(LossPolicy):
    """A restart of all ranks is one of all, wherever they are."""

    def _members_after_restart(self) -> list[int]:
        return self._slots


class TakesInHalfAGroup(Newcomers):
    """Who is at the door is taken in alone."""

    at_door = Newcomers.waiting


class GoesOnWithHalfAGroup(LossPolicy):
    """Who is left of a group goes on."""

    def _in_whole_groups(self, slots: Iterable[int]) -> list[int]:
        return sorted(slots)


class ForgetsWhoIsLeft(Newcomers):
    """Who is left of a group is told nothing, and not awaited."""

    def send_back(self, members: Mapping[int, Member], now: float) -> None: ...


class StartsWhoIsLeft(Newcomers):
    """Who is left of a group is ended, and started again."""

    def send_back(self, members: Mapping[int, Member], now: float) -> None:
        super().send_back(members, now)
        self._ranks.send_signal(members.keys(), signal.SIGKILL)


def saves_for_everybody(*about: Any) -> list[int]:
    """A rank saves for all that are lost, whatever part of the state they had."""
    return ranks_to_save(*about[:3])


ranks_to_save = last_boundary.ranks_to_save


OF_GROUPS: dict[str, tuple[Any, str, Any]] = {
    "half a group is taken in": (loss_policy, "Newcomers", TakesInHalfAGroup),
    "half a group goes on": (simulation, "LossPolicy", GoesOnWithHalfAGroup),
    "who is left of a group is forgotten": (loss_policy, "Newcomers", ForgetsWhoIsLeft),
    "who is left of a group is started again": (loss_policy, "Newcomers", StartsWhoIsLeft),
    "another part of the state is saved": (last_boundary, "ranks_to_save", saves_for_everybody),
    "random states are not put back": (simulation, "Boundary", DoesNotPutBack),
    "nobody is cut": (DefaultGroup, "cut", lambda self: None),
}


OF_NODES: dict[str, tuple[Any, str, Any]] = {
    "newcomers on a node that is away": (loss_policy, "Newcomers", StartsWhereNobodyIs),
    "replacements on a node that is away": (simulation, "LossPolicy", ReplacesWhereNobodyIs),
    "a restart waits for a node": (simulation, "LossPolicy", WaitsForTheNode),
}


def found_after(
    owner: Any,
    name: str,
    mistake: Any,
    folder: Path,
    seeds: Iterable[int],
    schedule: Callable[[int], Schedule] = Schedule.of,
) -> str | None:
    """The first violation that a mistake leads to; ``None``: there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, mistake)
        for seed in seeds:
            try:
                Simulation(schedule(seed)).run(folder)
            except Violation as violation:
                return f"{seed}: {violation}"
    return None


FOUND_LATE = {
    "survivors have no deadline",
    "an answer counts twice",
    "a second loss is forgotten",
    "another boundary of the lost rank",
    "a group of a generation that is over",
}


@pytest.mark.slow_but_for("cut after the news", "a replacement costs nothing")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in FOUND_LATE else ()) for each in MISTAKES]
)
def test_the_simulation_finds_a_mistake_that_is_put_back(folder: Path, name: str) -> None:
    assert found_after(*MISTAKES[name], folder, range(400)) is not None


FOUND_SOON = {"a rank keeps its number", "newcomers are not told in time"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FOUND_SOON else pytest.mark.slow) for each in GOING_ON]
)
def test_the_simulation_of_going_on_finds_a_mistake_that_is_put_back(folder: Path, name: str) -> None:
    assert found_after(*GOING_ON[name], folder, range(400), Schedule.going_on) is not None


@pytest.mark.slow_but_for("half a group goes on")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow if each in ("half a group is taken in", "nobody is cut") else ())
        for each in OF_GROUPS
    ],
)
def test_the_simulation_of_groups_finds_a_mistake_that_is_put_back(folder: Path, name: str) -> None:
    assert found_after(*OF_GROUPS[name], folder, range(400), Schedule.of_groups) is not None


@pytest.mark.parametrize("name", OF_NODES)
def test_the_simulation_of_nodes_finds_a_mistake_that_is_put_back(folder: Path, name: str) -> None:
    assert found_after(*OF_NODES[name], folder, range(400), Schedule.of_nodes) is not None


def main() -> None:
    """Runs many schedules."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--when-lost", choices=("hold", "go-on", "nodes", "groups"), default="hold")
    options = parser.parse_args()
    began, found = time.process_time(), Counter[str]()
    kinds = {"go-on": Schedule.going_on, "nodes": Schedule.of_nodes, "groups": Schedule.of_groups}
    schedule = kinds.get(options.when_lost, Schedule.of)
    with pytest.MonkeyPatch.context() as patch, simulated(patch) as folder:
        for seed in range(options.seed, options.seed + options.schedules):
            try:
                found += run_all([seed], folder, schedule)
            except Violation as error:
                found["violations"] += 1
                print(f"seed {seed}: {error}", flush=True)
    print(f"{options.schedules} schedules in {time.process_time() - began:.1f} s of CPU: {dict(found)}")


if __name__ == "__main__":
    main()
