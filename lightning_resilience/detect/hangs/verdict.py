"""Judges from the evidence of all ranks which ranks hang, and how. This module reads nothing itself.

A hang stops every rank, because all ranks soon wait for the hanging one. So the question is which ranks wait for which:

- A rank with a collective under way waits for the members of the group that have not entered this collective. If all
  members have entered it, the rank waits for those whose device is known to be behind.
- A rank that waits in a store, in a barrier that no backend records, or in the agreement waits for the ranks whose last
  boundary is before its own. If there is no such rank, it waits for the ranks that do not wait.

The culprits are the ranks that are dead or stopped. Without such ranks, they are the ranks that others wait for and
that do not wait themselves. If there are none of these either, the ranks wait in a circle, because one rank has called
another collective than the other ranks, or has left a collective out. The odd one out is the culprit; if no rank is
odd, the ranks that most others wait for are the culprits.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_resilience.detect.hangs.evidence import Frame, ProcessEvidence, RankEvidence
from lightning_resilience.detect.hangs.flight_recorder import Collective, collectives
from lightning_resilience.detect.hangs.stacks import inner, is_own, is_standard, place, short_path, show

Kind = Literal[
    "dead",
    "stopped",
    "uninterruptible",
    "debugged",
    "gil_held",
    "stuck",
    "waiting",
    "mismatch",
    "unfinished",
    "slow_checkpoint",
    "data_loader",
    "left",
    "outside",
    "unknown",
]
"""The state of a rank. ``mismatch``: it called another collective than its peers; ``unfinished``: it is in a collective
that all its ranks have entered; ``left``: it has left the fit; ``outside``: it is before or after a fit, and may wait
for something other than a rank; ``unknown``: there is no evidence about it."""

_BROKEN: frozenset[Kind] = frozenset({"dead", "stopped"})
_EXCUSED: frozenset[Kind] = frozenset({"debugged", "slow_checkpoint", "outside"})
_MAY_BE_SLOW: frozenset[Kind] = frozenset({"stuck", "gil_held", "data_loader"})
"""The states of a rank that may merely do much work between two signs of progress."""

_WRITES_FROM = 1e6  # bytes per second: less may be a log
_BUSY_FROM = 0.2  # of one CPU: on a busy machine a process may get no more
_MAX_CLAUSES = 4
_ALONE = 6
"""How many times its limit a rank outside of a fit may take if no other rank is seen to wait for it: it may wait for
something other than a rank, such as data. With the default limit this is one hour, NVRx's limit for the first
heartbeat."""

_AGREEMENT = "lightning_resilience/agreement.py"
# Files in which Python code waits for other ranks without a record of the Flight Recorder.
_WAITING = frozenset(
    {
        _AGREEMENT,
        "torch/distributed/_functional_collectives.py",
        "torch/distributed/distributed_c10d.py",
        "torch/distributed/elastic/utils/store.py",
        "torch/distributed/rendezvous.py",
        "torch/distributed/utils.py",
        "torch/nn/parallel/distributed.py",
    }
)
_WRAPPERS = frozenset({"torch/_ops.py", "torch/distributed/c10d_logger.py"})
_DATA_LOADERS = ("torch/utils/data/", "torchdata/")
_DEBUGGERS = ("pdb.py", "bdb.py", "debugpy/", "ipdb/", "pydevd", "_pydevd")
# Files in which Python code waits for a user's input; ``terminal_input`` wraps every input().
_INTERACTIVE = ("lightning_resilience/detect/hangs/terminal_input.py", "code.py", "getpass.py", "prompt_toolkit/")
# Files of Python's standard library in which a thread waits without holding the interpreter lock.
_IDLE = (
    "asyncio/",
    "concurrent/futures/",
    "multiprocessing/",
    "queue.py",
    "selectors.py",
    "socket.py",
    "socketserver.py",
    "subprocess.py",
    "threading.py",
)

# Collectives with the same number of elements on every rank. In other collectives ranks may differ, or the root does.
_SAME_SIZES = frozenset(
    {
        "_all_gather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_barrier",
        "allreduce_coalesced",
        "barrier",
        "broadcast",
        "reduce",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
    }
)


@dataclass(frozen=True)
class Finding:
    """The state of one rank.

    Args:
        rank: Its global rank.
        node: Its host; empty without evidence.
        pid: Its process on that host; ``None`` without evidence.
        kind: Its state.
        text: Its state, readable, such as ``stuck in training_step (train.py:41)``.
        waits_for: The ranks that it waits for.
        seconds: How many seconds ago it last made progress.
        section: What it was doing, see ``progress.Section``; empty without evidence.
        step: ``trainer.global_step``; ``None`` without evidence.
        waits_in: Where it waits for them, such as ``all_reduce #57 of default_pg``.
        is_busy: Whether it does not wait, but computes or writes, or one of its child processes does: it may be slow.
    """

    rank: int
    node: str
    pid: int | None
    kind: Kind
    text: str
    waits_for: tuple[int, ...]
    seconds: float
    section: str
    step: int | None
    waits_in: str = ""
    is_busy: bool = False


@dataclass(frozen=True)
class Verdict:
    """Which ranks hang, and which only wait for them.

    Args:
        culprits: The ranks that hang, sorted by rank; several if all hang or cannot be distinguished.
        victims: All other ranks, sorted by rank.
    """

    culprits: list[Finding]
    victims: list[Finding]

    @property
    def is_hang(self) -> bool:
        """False if each culprit is held by a debugger, writes a checkpoint, or may wait for something outside."""
        return not self.culprits or any(culprit.kind not in _EXCUSED for culprit in self.culprits)

    @property
    def is_busy(self) -> bool:
        """Whether all culprits compute or write."""
        return bool(self.culprits) and all(culprit.is_busy for culprit in self.culprits)

    @property
    def may_be_slow(self) -> bool:
        """Whether the ranks might have advanced with a longer limit."""
        return bool(self.culprits) and all(culprit.kind in _MAY_BE_SLOW for culprit in self.culprits)

    @property
    def line(self) -> str:
        """The verdict in one sentence, without a full stop."""
        if not self.culprits:
            return "no evidence came from any rank"
        clauses = _culprit_clauses(self.culprits) + _victim_clauses(self.culprits, self.victims)
        return "; ".join(clauses)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain types, with the sentence for readers of the file."""
        return {"line": self.line, "is_hang": self.is_hang, **asdict(self)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Verdict:
        """Restores the verdict from the result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: If ``content`` is no such result.
        """
        findings = [
            [Finding(**{**each, "waits_for": tuple(each["waits_for"])}) for each in content[key]]
            for key in ("culprits", "victims")
        ]
        return Verdict(*findings)


def diagnose(evidence: Sequence[RankEvidence], world_size: int) -> Verdict:
    """Judges a job that does not advance.

    Args:
        evidence: The evidence about each rank that could be probed.
        world_size: The number of ranks.
    """
    return _Diagnosis(evidence, world_size).judge()


# -- the diagnosis ---------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """A process group as one backend sees it, pieced together from the records of all ranks.

    Args:
        backend: ``gloo`` or ``nccl``.
        members: Its global ranks, as far as they are known.
        is_closed: Whether these are all members.
        reached: The number of the last collective that each rank has entered.
        records: The record of each rank, by the number of the collective.
        pending: The numbers of the collectives that each rank has entered and not done yet, in order.
        missing: The ranks that a collective waits for, by its number; filled when asked for.
    """

    backend: str
    members: set[int]
    is_closed: bool
    reached: dict[int, int] = field(default_factory=dict)
    records: defaultdict[int, dict[int, Collective]] = field(default_factory=lambda: defaultdict(dict))
    pending: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def mismatch(self) -> tuple[int, list[list[int]]] | None:
        """The first number at which ranks called different collectives, and the ranks by call, most ranks first."""
        for sequence, records in sorted(self.records.items()):
            called: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
            for rank, record in records.items():
                has_sizes = record.op in _SAME_SIZES
                called[record.op, record.elements if has_sizes else 0, record.dtypes if has_sizes else ()].append(rank)
            if len(called) > 1:
                return sequence, sorted(map(sorted, called.values()), key=lambda ranks: (-len(ranks), ranks))
        return None


@dataclass
class _Wait:
    """A place where ranks wait, and the ranks that they wait for (``targets``)."""

    where: str
    targets: tuple[int, ...]
    group: _Group | None = None
    ranks: set[int] = field(default_factory=set)


class _Diagnosis:
    def __init__(self, evidence: Sequence[RankEvidence], world_size: int) -> None:
        self.evidence = {each.rank: each for each in evidence}
        self.ranks = sorted(self.evidence.keys() | set(range(world_size)))
        self.halted = {rank: found for rank, each in self.evidence.items() if (found := _halted(each)) is not None}
        self.recorded: set[tuple[int, str]] = set()  # (rank, backend): the rank's collectives of the backend are known
        self.groups: dict[tuple[Any, ...], _Group] = {}
        self.exchanges: dict[int, list[Collective]] = {}  # each rank's point-to-point operations that are not done
        self.waits: dict[int, list[_Wait]] = {}
        self.unfinished: dict[int, tuple[_Group | None, Collective]] = {}  # all their ranks have entered
        self.blamed: dict[int, tuple[Kind, str]] = {}  # states that only the comparison of ranks has shown
        for rank, each in self.evidence.items():
            self._read(rank, each)
        self._wait_in_collectives()
        self._wait_in_exchanges()
        self._wait_elsewhere()

    def judge(self) -> Verdict:
        culprits = set(self._culprits())
        findings = {rank: self._find(rank) for rank in self.ranks}
        return Verdict(
            culprits=[finding for rank, finding in findings.items() if rank in culprits],
            victims=[finding for rank, finding in findings.items() if rank not in culprits],
        )

    # -- which ranks wait for which -----------------------------------------------------------------------------------

    def _read(self, rank: int, each: RankEvidence) -> None:
        """Adds the collectives of a rank to the groups."""
        for record in collectives(each.collectives):
            self.recorded.add((rank, record.backend))
            if record.is_p2p:
                if record.state != "done" and rank not in self.halted:
                    self.exchanges.setdefault(rank, []).append(record)
                continue
            is_world = record.description == "default_pg"
            members = tuple(self.ranks) if is_world else record.members
            # A group may have several backends, each with its own numbers; and ranks may give different groups the same
            # name.
            key = (record.backend, record.group, None if is_world else members)
            if (group := self.groups.get(key)) is None:
                group = _Group(record.backend, set(members or ()), members is not None)
                self.groups[key] = group
            group.members.add(rank)
            group.reached[rank] = max(record.sequence, group.reached.get(rank, -1))
            group.records[record.sequence][rank] = record
            if record.state != "done" and rank not in self.halted:
                group.pending[rank].append(record.sequence)

    def _wait_in_collectives(self) -> None:
        for group in self.groups.values():
            waits: dict[int, _Wait] = {}
            for pending in group.pending.values():
                pending.sort()
            for rank, pending in group.pending.items():
                sequence = pending[0]
                if group.backend == "gloo":  # runs several at once: the first may not be the one that waits for ranks
                    waiting = (number for number in pending if set(self._missing(group, number)) - {rank})
                    sequence = next(waiting, sequence)
                targets, record = self._missing(group, sequence), group.records[sequence][rank]
                if not targets or rank in targets:
                    self.unfinished.setdefault(rank, (group, record))
                    continue
                if sequence not in waits:
                    waits[sequence] = _Wait(record.name, targets, group)
                self._wait(rank, waits[sequence])

    def _missing(self, group: _Group, sequence: int) -> tuple[int, ...]:
        if sequence not in group.missing:
            group.missing[sequence] = tuple(sorted(self._find_missing(group, sequence)))
        return group.missing[sequence]

    def _find_missing(self, group: _Group, sequence: int) -> list[int]:
        """The ranks that have not entered a collective; if all have entered it, the ranks whose device is behind."""
        absent = [rank for rank in group.members if group.reached.get(rank, -1) < sequence]
        certainly = [rank for rank in absent if (rank, group.backend) in self.recorded or rank in self.halted]
        if absent:
            return certainly or absent
        behind = [rank for rank, pending in group.pending.items() if pending[0] < sequence]
        states = {rank: record.state for rank, record in group.records[sequence].items()}
        queued = [rank for rank, state in states.items() if state == "queued"]
        if behind or (queued and "running" in states.values()):
            return behind or queued
        if not group.is_closed and len(group.pending) == len(group.members):
            # A rank without any call in a group cannot be distinguished from a rank outside of the group.
            return [rank for rank in self.ranks if rank not in group.members]
        return []

    def _wait_in_exchanges(self) -> None:
        awaited = {(rank, peer) for rank, records in self.exchanges.items() for each in records for peer in each.peers}
        for rank, records in self.exchanges.items():
            record = records[0]
            targets = tuple(sorted(peer for peer in record.peers if (peer, rank) not in awaited))
            if targets:
                self._wait(rank, _Wait(record.name, targets))
            else:
                self.unfinished.setdefault(rank, (None, record))

    def _wait_elsewhere(self) -> None:
        places = {
            rank: where
            for rank, each in self.evidence.items()
            if not self._is_accounted_for(rank) and (where := _waiting_place(_main_frames(each.process))) is not None
        }
        if not places:
            return
        idle = [rank for rank in self.ranks if rank not in places and rank not in self.waits]
        idle = [rank for rank in idle if rank not in self.unfinished]
        here = [rank for rank in idle if rank in self.evidence and self._kind(rank) != "left"]
        ordered = sorted((each.position, rank) for rank, each in self.evidence.items())
        waits: dict[tuple[str, Any], _Wait] = {}
        for rank, where in places.items():
            position = self.evidence[rank].position
            if (where, position) not in waits:
                behind = [each for _, each in ordered[: bisect.bisect_left(ordered, (position, -1))]]
                waits[where, position] = _Wait(where, tuple(sorted(behind or here or idle)))
            if waits[where, position].targets:
                self._wait(rank, waits[where, position])

    def _wait(self, rank: int, wait: _Wait) -> None:
        wait.ranks.add(rank)
        self.waits.setdefault(rank, []).append(wait)

    def _is_accounted_for(self, rank: int) -> bool:
        return rank in self.halted or rank in self.waits or rank in self.unfinished

    # -- the culprits -------------------------------------------------------------------------------------------------

    def _culprits(self) -> Iterable[int]:
        awaited = {target for waits in self.waits.values() for wait in waits for target in wait.targets}
        ends = [rank for rank in self.ranks if rank in awaited and rank not in self.waits]
        certain = [rank for rank in ends if self._kind(rank) in ("uninterruptible", "gil_held")]
        if broken := [rank for rank in self.ranks if self._kind(rank) in _BROKEN]:
            return broken + certain
        if certain:
            return certain
        if ends:
            return self._odd_ones_out(self._overdue(ends))
        if self.waits:
            return self._break_circle()
        return self._odd_ones_out(self._furthest_behind())

    def _overdue(self, ranks: list[int]) -> list[int]:
        """The ranks that have exceeded their limit, or all if none has: a rank within its limit may still advance."""
        known = [self.evidence[rank] for rank in ranks if rank in self.evidence]
        late = {each.rank for each in known if each.seconds > each.timeout}
        no_limit = self.halted.keys() | (set(ranks) - self.evidence.keys())
        return [rank for rank in ranks if rank in late or rank in no_limit] if late else ranks

    def _furthest_behind(self) -> list[int]:
        """The culprits if no rank is seen to wait for another: the late ranks at the earliest boundary."""
        inside = [rank for rank in self.evidence if self._kind(rank) != "left"] or list(self.evidence)
        late = sorted(self._overdue(inside))
        last = min((self.evidence[rank].position for rank in late), default=None)
        silent = [rank for rank in self.ranks if rank not in self.evidence]
        return [rank for rank in late if self.evidence[rank].position == last] + silent

    def _odd_ones_out(self, ranks: list[int]) -> Iterable[int]:
        """The ranks that called another collective than the others, for ranks in an unfinished one; or ``ranks``."""
        for rank in ranks:
            group, _ = self.unfinished.get(rank, (None, None))
            if group is not None and (odd := self._blame_mismatch(group)):
                return odd
        return ranks

    def _blame_mismatch(self, group: _Group) -> list[int]:
        if (found := group.mismatch()) is None:
            return []
        sequence, parties = found
        records = group.records[sequence]
        has_majority = len(parties[0]) > len(parties[1])
        odd = [rank for party in (parties[1:] if has_majority else parties) for rank in party]
        for rank in odd:
            mine = records[rank]
            others = next(party for party in parties if rank not in party)
            theirs = records[others[0]]
            same = mine.dtypes == theirs.dtypes
            self.blamed[rank] = (
                "mismatch",
                f"called {_call(mine, not same)} as #{sequence} of {mine.group_name}, where {_name(others)} called "
                f"{_call(theirs, not same)}",
            )
        return odd

    def _break_circle(self) -> Iterable[int]:
        """The culprits if every rank that other ranks wait for waits itself."""
        active = {id(wait): wait for waits in self.waits.values() for wait in waits}
        sizes = {key: len(wait.ranks) for key, wait in active.items()}
        incoming = Counter(target for wait in active.values() for target in wait.targets)
        outside = [rank for rank in self.waits if not incoming[rank]]
        while outside:  # no rank waits for these, so they are not in the circle
            for wait in self.waits[outside.pop()]:
                sizes[id(wait)] -= 1
                if not sizes[id(wait)]:
                    del active[id(wait)]
                    for target in wait.targets:
                        incoming[target] -= 1
                        if not incoming[target]:
                            outside.append(target)
        for wait in active.values():
            if wait.group is not None and (odd := self._blame_mismatch(wait.group)):
                return odd
        awaited_by: Counter[int] = Counter()
        for key, wait in active.items():
            for target in wait.targets:
                awaited_by[target] += sizes[key]
        most = max(awaited_by.values())
        culprits = sorted(rank for rank, count in awaited_by.items() if count == most)
        if len(culprits) == 1:
            (culprit,) = culprits
            entered_without = [wait for wait in active.values() if culprit in wait.targets]
            theirs = max(entered_without, key=lambda wait: len(wait.ranks))
            waiting = sorted(theirs.ranks)
            self.blamed[culprit] = (
                "waiting",
                f"has moved on to {self.waits[culprit][0].where} without entering {theirs.where}, where "
                f"{_name(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it",
            )
        return culprits

    # -- the state of a rank ------------------------------------------------------------------------------------------

    def _kind(self, rank: int) -> Kind:
        return self._state_of(rank)[0]

    def _find(self, rank: int) -> Finding:
        kind, text = self.blamed.get(rank) or self._state_of(rank)
        wait = self.waits[rank][0] if rank in self.waits else None
        each = self.evidence.get(rank)
        return Finding(
            rank=rank,
            node=each.node if each is not None else "",
            pid=each.process.pid if each is not None else None,
            kind=kind,
            text=text,
            waits_for=wait.targets if wait is not None else (),
            seconds=each.seconds if each is not None else 0.0,
            section=each.section if each is not None else "",
            step=each.step if each is not None else None,
            waits_in=wait.where if wait is not None else "",
            is_busy=each is not None and kind in _MAY_BE_SLOW and _activity(each.process) != "",
        )

    def _state_of(self, rank: int) -> tuple[Kind, str]:
        each = self.evidence.get(rank)
        if each is None:
            return "unknown", "silent: no evidence was found"
        if rank in self.halted:
            return self.halted[rank]
        if rank in self.waits:
            wait = self.waits[rank][0]
            return "waiting", f"waiting for {_name(wait.targets)} in {wait.where}"
        where = _where(each.process)
        if each.answers and each.python_answers is False:
            return "gil_held", f"holds the interpreter lock in {_holder(each.process)}"
        if each.section == "checkpointing" and (rate := _rate(each.process)) >= _WRITES_FROM:
            return "slow_checkpoint", f"in a slow checkpoint, writing {rate / 1e6:.0f} MB/s in {where}"
        if (loading := _data_loader(each)) is not None:
            return "data_loader", f"stuck in its data loader: {loading}"
        if rank in self.unfinished:
            return self._unfinished(*self.unfinished[rank], where)
        if each.section == "start" and self._may_wait_outside(each):
            return "outside", f"waiting for something other than a rank in {where}"
        waits = ", while its device has work left" if each.process.device_works else ""
        return "stuck", f"stuck in {where}" + (_activity(each.process) or waits)

    def _may_wait_outside(self, each: RankEvidence) -> bool:
        """Whether a rank outside of a fit may wait for something unseen, such as data that another rank fetches."""
        others = (other for other in self.evidence.values() if not self._is_accounted_for(other.rank))
        if any(other.seconds <= other.timeout for other in others):
            return True
        return not self.waits and each.seconds <= _ALONE * each.timeout

    def _unfinished(self, group: _Group | None, record: Collective, where: str) -> tuple[Kind, str]:
        records = group.records[record.sequence] if group is not None else {}
        done = sorted(rank for rank, other in records.items() if other.state == "done")
        running = sorted(rank for rank, other in records.items() if other.state == "running")
        finished = f"{_name(done)} {'has' if len(done) == 1 else 'have'} finished" if done else ""
        if record.state == "queued" and (running or done):
            what = f"it runs on {_name(running)}" if running else finished
            return "stuck", (
                f"stuck on its device, which has not begun {record.name} although {what}; its main thread is in {where}"
            )
        if done:
            return "unfinished", f"in {record.name}, which {finished}: its network or device"
        return "unfinished", (
            f"in {record.name}, which all its ranks have entered and which does not finish: network or device"
        )


# -- one rank on its own -----------------------------------------------------------------------------------------------


def _halted(each: RankEvidence) -> tuple[Kind, str] | None:
    """The state of a rank that does nothing at all, or nothing in this fit; ``None`` for any other rank."""
    process = each.process
    if each.section == "left":
        return "left", "has left the fit" + (", and its process has ended" if process.state == "gone" else "")
    frames = _main_frames(process)
    where = f" in {_where(process)}" if frames else ""
    if process.state == "gone":
        return "dead", "dead"
    if process.state == "stopped":
        return "stopped", "stopped (SIGSTOP)"
    if process.state == "traced" or _is_within(frames, _DEBUGGERS):
        return "debugged", f"held by a debugger{where}"
    if _is_within(frames, _INTERACTIVE):
        return "debugged", f"waiting for a person{where}"
    is_saving = each.section == "checkpointing" and _rate(process) >= _WRITES_FROM
    if process.state == "uninterruptible" and not is_saving:
        return "uninterruptible", f"uninterruptible{where}: the kernel does not return, usually from storage"
    return None


def _main_frames(process: ProcessEvidence) -> Sequence[Frame]:
    return inner(next((thread.frames for thread in process.threads if thread.is_main), []))


def _where(process: ProcessEvidence) -> str:
    if not process.threads:
        return "an unknown place: it left no stack"
    return place(_main_frames(process)) or "code that is not Python"


def _rate(process: ProcessEvidence) -> float:
    """Bytes that the process writes per second."""
    return process.written_bytes / process.watched_s if process.watched_s > 0 else 0.0


def _waiting_place(frames: Sequence[Frame]) -> str | None:
    """The place where a stack waits for other ranks; ``None`` if it does not wait for them."""
    relevant = (frame for frame in frames if not is_standard(frame) and short_path(frame) not in _WRAPPERS)
    innermost = next(relevant, None)
    if innermost is None or (path := short_path(innermost)) not in _WAITING:
        return None
    if path != _AGREEMENT:
        return place(frames)
    within = [frame for frame in frames if short_path(frame) == path]
    return show(next((frame for frame in within if frame.function.isalpha()), innermost))  # not _wait, nor a lambda


def _activity(process: ProcessEvidence) -> str:
    """What a process is busy with, as a readable clause; empty if it is idle."""
    is_running = process.state == "running" or process.cpu_s >= _BUSY_FROM * process.watched_s > 0
    if is_running and not process.device_works:  # a process that waits for its GPU polls, and looks busy
        return ", busy on the CPU"
    if _rate(process) >= _WRITES_FROM:
        return f", writing {_rate(process) / 1e6:.0f} MB/s"
    if process.children_cpu_s >= _BUSY_FROM * process.watched_s > 0:
        return ", while one of its child processes is busy on the CPU"
    return ""


def _is_within(frames: Sequence[Frame], files: tuple[str, ...]) -> bool:
    """Whether the innermost frame of the user's code, or a function that it has called, is in one of these files."""
    for frame in frames:
        if short_path(frame).startswith(files):
            return True
        if is_own(frame):
            break
    return False


def _holder(process: ProcessEvidence) -> str:
    """The place of the thread that seems to hold the interpreter lock: the main thread, unless it waits."""
    stacks = sorted((thread for thread in process.threads if thread.frames), key=lambda thread: not thread.is_main)
    for thread in stacks:
        innermost = thread.frames[0]
        is_idle = is_standard(innermost) and short_path(innermost).startswith(_IDLE)
        if not is_idle and _waiting_place(thread.frames) is None:
            return place(thread.frames)
    return _where(process)


def _data_loader(each: RankEvidence) -> str | None:
    """What blocks the data loader of a rank; ``None`` if the rank is not in its data loader."""
    if not any(short_path(frame).startswith(_DATA_LOADERS) for frame in _main_frames(each.process)):
        return None
    if not each.workers:
        return _where(each.process)
    states = [f"worker {worker.pid} {state}" for worker in each.workers if (state := _worker_state(worker))]
    if not states:
        return f"none of its workers ({', '.join(str(worker.pid) for worker in each.workers)}) shows any activity"
    more = f" and {len(states) - _MAX_CLAUSES} more" if len(states) > _MAX_CLAUSES else ""
    return ", ".join(states[:_MAX_CLAUSES]) + more


def _worker_state(worker: ProcessEvidence) -> str:
    if worker.state in ("gone", "stopped", "traced", "uninterruptible"):
        return f"is {'dead' if worker.state == 'gone' else worker.state}"
    frames = _main_frames(worker)
    loop = next((index for index, frame in enumerate(frames) if frame.function == "_worker_loop"), len(frames))
    # A worker that waits for work is in a queue of the standard library.
    return "" if all(is_standard(frame) for frame in frames[:loop]) else f"in {place(frames[:loop])}"


# -- sentences -------------------------------------------------------------------------------------------------------


def _call(record: Collective, with_dtypes: bool) -> str:
    sizes = " ".join(str(list(shape)) for shape in record.sizes[:_MAX_CLAUSES])
    dtypes = " " + "/".join(dict.fromkeys(record.dtypes)) if with_dtypes and record.dtypes else ""
    return f"{record.op} {sizes}".rstrip() + dtypes


def _name(ranks: Sequence[int]) -> str:
    """Sorted ranks as text: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0-511 except 76``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    first, last = ranks[0], ranks[-1]
    holes = last - first + 1 - len(ranks)
    if 0 < holes <= 3 and len(ranks) > 8:
        present = set(ranks)
        return f"ranks {first}-{last} except {_enumerate([r for r in range(first, last) if r not in present])}"
    parts = [part for a, b in runs for part in ([f"{a}-{b}"] if b > a + 1 else map(str, range(a, b + 1)))]
    if len(parts) > 8:
        return f"ranks {', '.join(parts[:6])} and others, {len(ranks)} in all"
    return f"ranks {_enumerate(parts)}"


def _enumerate(parts: Sequence[Any]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last


def _culprit_clauses(culprits: list[Finding]) -> list[str]:
    same: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for culprit in culprits:
        same[culprit.text, _when(culprit)].append(culprit)
    clauses = []
    for (text, at), findings in same.items():
        who = _name([finding.rank for finding in findings])
        if len(findings) == 1 and findings[0].pid is not None:
            who += f" ({findings[0].node}, pid {findings[0].pid})"
        verb, _, rest = text.partition(" ")
        if verb in ("has", "holds"):
            verb = verb if len(findings) == 1 else {"has": "have", "holds": "hold"}[verb]
            predicate = f"{verb} {rest}"
        else:
            predicate = text if verb == "called" else f"{'is' if len(findings) == 1 else 'are'} {text}"
        clauses.append(f"{who} {predicate}{',' if ',' in predicate and at else ''}{at}")
    return _at_most(clauses)


def _when(culprit: Finding) -> str:
    if culprit.step is None:
        return ""
    if culprit.section == "start":
        return " after a fit" if culprit.step else " before the first fit"
    return f" at step {culprit.step}"


def _victim_clauses(culprits: list[Finding], victims: list[Finding]) -> list[str]:
    blamed = {culprit.rank for culprit in culprits}
    waiting: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for victim in victims:
        if victim.waits_for and not any(victim.waits_in in culprit.text for culprit in culprits):
            waiting[victim.waits_in, victim.waits_for].append(victim.rank)
    clauses = []
    for (where, targets), ranks in sorted(waiting.items(), key=lambda item: -len(item[1])):
        whom = _name(targets)
        if blamed.issuperset(targets) and len(targets) == len(blamed):
            whom = "it" if len(blamed) == 1 else "them"
        clauses.append(f"{_name(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {whom} in {where}")
    return _at_most(clauses)


def _at_most(clauses: list[str]) -> list[str]:
    more = len(clauses) - _MAX_CLAUSES
    return [*clauses[:_MAX_CLAUSES], f"and {more} more"] if more > 0 else clauses
