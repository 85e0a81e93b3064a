"""Runs of which it is known what every rank has done in every second, and what the account of each says.

Simulated are clocks and what ranks, nodes, launcher and scheduler do, a random story for each seed. What ships does the
rest: ranks count in a :class:`TimeAccount` that is shared with their watchdog, which keeps it and records it in the
ledger; goodput folds what is read from there. The truth comes from the story by the definitions of ``run/goodput.py``.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.stragglers.stragglers import Period, Report, Straggler
from lightning_resilience.run import goodput, ledger, time_account
from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    Event,
    Fault,
    FitInterrupted,
    Fresh,
    JobFailed,
    JobStart,
    Killed,
    LauncherKilled,
    LaunchExit,
    LaunchStart,
    RestoredInPlace,
    Resumed,
    Rollback,
    Saved,
    ScriptOutcome,
    Stragglers,
    StragglerStop,
    TimeSpent,
    WorkersStart,
)
from lightning_resilience.run.goodput import Goodput, Loss, account
from lightning_resilience.run.ledger import Ledger, read_ledger
from lightning_resilience.run.time_account import Spent, TimeAccount, read_account
from tests.test_goodput import assert_in_time

RUNS = 200
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
KEPT_EVERY_S = 30.0
CLOCKS_DIFFER_S = 0.05

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("hang", {"kind": "hang", "reason": "stuck"}),
    ("killed", {"kind": "died", "reason": "rank 1 was killed by SIGKILL"}),
    ("crash", {"kind": "RuntimeError", "reason": "CUDA error: uncorrectable ECC error"}),
    ("NaN", {"kind": "TrainingDiverged", "reason": "loss is nan"}),
    ("disk", {"kind": "OSError", "reason": "[Errno 28] No space left on device"}),
    ("script", {"kind": "NameError", "reason": "name 'x' is not defined", "mistake": "code"}),
]


def of(kind: type[Event], **values: Any) -> Any:
    """An event in which nothing else is known."""
    return kind(**dict.fromkeys(name for name, required in kind.own_fields.items() if required) | values)


@dataclass
class Action:
    """What a rank does at a moment, and what it is doing from then on."""

    time: float
    act: Callable[[], object]
    category: str
    is_written: bool = True
    """Whether others can see that it does."""
    begins: int | None = None
    """The step whose batch begins."""
    step: str = ""
    """What that step is."""
    report: str = ""
    """The report that says so, if it is made."""


@dataclass
class End:
    """How a group of workers ends.

    Attributes:
        kind: ``finished``, ``look`` (it runs), ``preempted``, ``straggler``, ``killed`` (all at once), ``fault``,
            ``node lost``, ``all lost`` or ``killed, unwatched`` (all at once, without a watchdog).
        cause: As the account names it.
        fault: Its fields.
        rank: That which it is due to.
        node: Where, as the account names it.
        failing: The ranks of which an exception ends the fit.
        at: From when on no rank goes on.
        verdict: When that is known.
        ended: When the processes are gone.
    """

    kind: str
    at: float
    cause: str = ""
    fault: dict[str, Any] = field(default_factory=dict)
    verdict: float = math.nan
    ended: float = math.nan
    rank: int = 0
    node: str = ""
    failing: set[int] = field(default_factory=set)


class World:
    """Clocks and the run directory."""

    def __init__(self, seed: int, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.run_dir = run_dir
        self.now = 1.7e9
        self.node = "n0"
        self.ahead: defaultdict[str, float] = defaultdict(
            lambda: self.random.uniform(-CLOCKS_DIFFER_S / 2, CLOCKS_DIFFER_S / 2)
        )
        clocks = SimpleNamespace(time=self.clock, monotonic=lambda: self.now - 1.6e9)
        patch.setattr(ledger, "time", clocks)
        patch.setattr(time_account, "time", clocks)
        patch.setattr(ledger, "platform", SimpleNamespace(node=lambda: self.node))
        patch.delenv("SLURMD_NODENAME", raising=False)
        self.ledgers: dict[tuple[str, int | None], Ledger] = {}

    def clock(self) -> float:
        return self.now + self.ahead[self.node]

    def record(self, time: float, node: str, rank: int | None, event: Event) -> None:
        self.now, self.node = time, node
        if (node, rank) not in self.ledgers:
            self.ledgers[node, rank] = Ledger(self.run_dir / "ledger", rank)
        self.ledgers[node, rank].record(event)

    def some(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def chance(self, share: float) -> bool:
        return self.random.random() < share


@dataclass
class Rank:
    """A process of a group."""

    rank: int
    node: str
    began: float
    account: TimeAccount
    file: Path | None
    truth_node: str | None = None  # where the account does not know its node
    kept: Spent | None = None
    ended: float = math.nan
    number_recorded: int = 0
    fit: int = 0
    kept_fit: int = 0
    step: str = ""
    """What the step is that it has begun last."""
    fits: list[tuple[float, str]] = field(default_factory=list)
    """Ends of its fits, where each has an account of its own, and the causes."""


class Run:
    """A run from its first launch to its end, or to when it is looked at."""

    def __init__(self, seed: int, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.world = world = World(seed, run_dir, patch)
        pick = world.random
        self.nodes = [f"n{number}" for number in range(pick.choice([1, 1, 2, 2, 3, 4]))]
        self.per_node = pick.choice([1, 2, 2, 3, 4])
        self.world_size = len(self.nodes) * self.per_node
        self.has_launcher = world.chance(0.85)
        self.is_batch_job = self.has_launcher and world.chance(0.4)
        self.splits_steps = world.chance(0.5)
        self.has_two_fits = world.chance(0.25)
        self.step_s = math.exp(world.some(math.log(0.3), math.log(8)))
        self.straggler = world.random.randrange(self.world_size) if self.world_size > 1 and world.chance(0.3) else None
        self.behind_s = self.step_s * world.some(0.3, 1.5)
        self.reported: dict[str, float] = {}
        self.new_nodes = 0
        self.fit = 0
        self.done: Counter[int] = Counter()
        self.saved: Counter[int] = Counter()
        self.token = 0
        self.elastic_run_id = ""
        self.restart_count = 0
        self.is_known_in_full = True  # else nothing was kept of a node, and its ranks are taken to be as the others
        self.requeues = 0
        self.before: list[Rank] = []
        self.cause = ""
        self.base = "launch"  # what happens after the end of a process
        self.marks: list[tuple[float, str]] = []  # and from when on something else does
        self.truth: defaultdict[Loss, float] = defaultdict(float)
        self.interruptions: list[tuple[str, str]] = []
        self.stories: list[str] = []
        self.found = Goodput()
        self.began = world.now
        self.now: float | None = None
        self.ended = math.nan

    # -- launcher and scheduler ----------------------------------------------------------------------------------------

    def launcher(self, after_s: float, event: Event, category: str) -> None:
        """The launcher records something ``after_s`` later; from then on it does something else."""
        self.at += after_s
        self.marks.append((self.at, category))
        self.world.record(self.at, "n0", None, event)

    def launch(self, was_killed: bool = False) -> None:
        if self.is_batch_job:
            start = of(AllocationStart, slurm_job_id="1", restart_count=self.requeues, node_list=self.nodes)
            self.launcher(0.0, start, "launch")
            self.at += self.world.some(1, 7)
        began, self.at = self.at, self.at + 2
        self.marks.append((began, "launch"))
        if was_killed:
            self.world.record(self.at, "n0", None, LauncherKilled())
        self.world.record(self.at, "n0", None, of(LaunchStart, began=began + self.world.ahead["n0"]))
        self.job()

    def job(self) -> None:
        self.elastic_run_id = f"job-{self.world.random.random()}"
        self.restart_count = 0
        self.launcher(self.world.some(0.5, 3), of(JobStart, run_id=self.elastic_run_id), "rendezvous")
        self.at += self.world.some(1, 8)

    def exit(self, status: str, **fields: Any) -> None:
        self.launcher(self.world.some(0.5, 5), of(LaunchExit, status=status, exit_code=1, **fields), "idle")
        if self.is_batch_job:
            self.marks[-1] = (self.marks[-1][0], "teardown")

    def go_on(self, end: End) -> bool:
        """What follows the end of a group; whether another one does."""
        world, some, self.marks = self.world, self.world.some, []
        self.at, self.base = max(rank.ended for rank in self.before) + 0.6, "teardown"
        if end.kind == "finished":
            world.record(self.at - 0.4, self.nodes[0], 0, of(ScriptOutcome, status="finished"))
            if self.has_launcher:
                self.exit("finished")
            if self.is_batch_job:
                self.launcher(some(0.5, 3), of(AllocationEnd, then="end"), "idle")
            return False
        if not self.has_launcher:
            self.base = "idle"
            self.at += some(5, 60)
            self.record_killed()
            return True
        if end.kind == "node lost":
            self.new_nodes += 1
            self.nodes[-1] = f"n{10 + self.new_nodes}"
        if end.kind == "all lost":
            self.at += some(20, 60)
            self.base = "queue" if self.is_batch_job else "idle"
            self.requeues += 1
            self.launch(was_killed=True)
        elif end.kind == "preempted":
            self.exit("interrupted")
            self.in_new_allocation(recorded=world.chance(0.7))
        elif end.kind == "killed":
            self.base = "idle"
            self.at += some(10, 80)
            is_batch_job, self.is_batch_job = self.is_batch_job, False
            self.launch(was_killed=True)
            self.is_batch_job = is_batch_job
        else:
            self.after_fault(end)
        return True

    def after_fault(self, end: End) -> None:
        world, some = self.world, self.world.some
        if end.cause == "script":
            self.exit("halted")
            if self.is_batch_job:
                self.launcher(some(0.5, 3), of(AllocationEnd, then="end"), "idle")
            self.at += some(20, 90)
            self.requeues = 0
            self.launch()
        elif end.kind in ("fault", "straggler") and world.chance(0.6):
            self.base = "rendezvous"  # a restart inside the job
            self.restart_count += 1
            self.at += some(1, 8)
        else:
            self.launcher(some(0.5, 20), of(JobFailed, run_id=self.elastic_run_id), "launch")
            if world.chance(0.5):
                self.at += some(0.2, 2)
                self.job()
            else:
                self.exit("interrupted", new_job=True)
                if not self.is_batch_job:
                    self.marks[-1] = (self.marks[-1][0], "queue")
                self.in_new_allocation(recorded=True, is_new_job=True)

    def in_new_allocation(self, recorded: bool, is_new_job: bool = False) -> None:
        self.requeues += 1
        if self.is_batch_job and recorded:
            self.launcher(self.world.some(0.5, 3), of(AllocationEnd, then="requeue"), "queue")
        elif self.is_batch_job:
            self.marks[-1] = (self.marks[-1][0], "queue")
        self.at += self.world.some(10, 80)
        self.launch()

    def gap(self, begin: float, end: float, rank: Rank) -> None:
        category = self.base
        for time, following in [*self.marks, (end, "")]:
            if (seconds := min(time, end) - begin) > 0:
                self.add(category, seconds, "" if category == "idle" else self.cause, rank)
                begin = time
            category = following

    def add(self, category: str, seconds: float, cause: str, rank: Rank) -> None:
        self.truth[Loss(category, cause, rank.node if rank.truth_node is None else rank.truth_node)] += seconds

    # -- groups --------------------------------------------------------------------------------------------------------

    def play(self) -> Goodput:
        world = self.world
        self.at = world.now
        if self.has_launcher:
            self.launch()
        for number in range(world.random.choice([1, 1, 2, 3, 3, 4]), 0, -1):
            end = self.group(is_last=number == 1)
            if end.kind == "look":
                break
            if end.cause:
                self.interruptions.append((end.cause, end.node))
            if not self.go_on(end):
                break
        if self.now is None:
            self.ended = max(self.at, *(rank.ended for rank in self.before)) if self.has_launcher else self.at - 0.4
            for rank in self.before:
                self.gap(rank.ended, self.ended, rank)
        return account(read_ledger(self.run_dir), time_account.kept(self.run_dir), self.now, with_segments=True)

    @property
    def run_dir(self) -> Path:
        return self.world.run_dir

    def group(self, is_last: bool) -> End:
        world, some = self.world, self.world.some
        self.token += 1
        ranks = []
        for rank in range(self.world_size):
            world.node = node = self.nodes[rank // self.per_node]
            world.now = began = self.at + some(0, 0.3)
            world.now += (age := some(0.02, 0.2))
            file = self.run_dir / f"{self.token}-{rank}.time" if self.has_launcher else None
            own = TimeAccount(age, lambda: world.now - 1.6e9, world.clock)
            if file is not None:
                own.share(file)
            ranks.append(Rank(rank, node, began, own, file))
        world.record(self.at + 0.6, self.nodes[0], 0, of(WorkersStart, attempt=str(self.token)))
        plan, ready = self.plan(ranks, caught=self.has_two_fits and world.chance(0.3))
        end = self.end(ranks, is_last, ready)
        kept_at = self.kept_at(end)
        self.group_began = min(rank.began for rank in ranks if kept_at[rank.node] > -math.inf)
        for rank in ranks:
            if kept_at[rank.node] == -math.inf:
                rank.began, rank.truth_node = self.group_began, ""
            before = self.before[rank.rank].ended if self.before else self.began if self.has_launcher else math.nan
            self.gap(self.group_began if math.isnan(before) else before, rank.began, rank)
        self.steps_begun: Counter[int] = Counter()
        if self.straggler is not None:
            slow = ranks[self.straggler]
            self.straggler_node = slow.node if slow.truth_node is None else slow.truth_node
        for rank in ranks:
            self.run_rank(rank, plan[rank.rank], end, kept_at[rank.node])
        self.done |= self.steps_begun
        if end.kind == "killed, unwatched" and not any(rank.file for rank in ranks):
            end.cause = ""  # between two fits: nobody knows
        self.record_end(ranks, end, kept_at)
        self.stories.append(end.kind)
        self.before, self.cause = ranks, end.cause
        return end

    def plan(self, ranks: list[Rank], caught: bool) -> tuple[dict[int, list[Action]], float]:
        """What every rank does if nothing comes between, and when all of them train."""
        some = self.world.some
        plan: dict[int, list[Action]] = {rank.rank: [] for rank in ranks}
        self.planned = Counter(self.done)
        at = max(rank.began for rank in ranks) + 0.7
        for rank in ranks:
            imported = at + some(1, 9)
            plan[rank.rank].append(Action(imported, rank.account.imported, "script"))
            plan[rank.rank].append(Action(imported + some(0.1, 5), self.begins_fit(rank, self.fit), "setup"))
        at += 14
        ready = 0.0
        fits = 2 if self.has_two_fits else 1
        for fit in range(self.fit, fits):
            at = self.plan_fit(ranks, plan, fit, at)
            ready = at if caught else ready or at
            at = self.plan_steps(ranks, plan, fit, at)
            is_over = fit == fits - 1
            for rank in ranks:
                actions = plan[rank.rank]
                actions.append(Action(at, self.enters(rank, time_account.CALLBACKS), "callbacks"))
                if caught and not is_over:  # the script goes on with its next fit
                    actions.append(Action(at + 2, self.fails(rank, fit), "teardown"))
                    continue
                actions.append(Action(at + 0.5, self.enters(rank, time_account.CHECKPOINT_SAVE), "checkpoint_save"))
                actions.append(Action(at + 2, self.ends_fit(rank, fit), "teardown"))
            at += some(3, 6)
            if not is_over:
                for rank in ranks:
                    plan[rank.rank].append(Action(at, self.begins_fit(rank, fit + 1), "setup"))
        self.over = at
        return plan, ready

    def plan_fit(self, ranks: list[Rank], plan: dict[int, list[Action]], fit: int, at: float) -> float:
        some = self.world.some
        restore, fast_forward, first = at + some(0.5, 5), at + some(5.5, 9), at + some(10, 14)
        step = self.saved[fit]
        begun: dict[str, int] = {}
        for rank in ranks:
            actions = plan[rank.rank]
            if step:
                actions += self.during(rank, time_account.RESTORE, restore, fast_forward, "restore", "setup")
                if rank.rank == 0:
                    resumed = of(Resumed, fit=fit, step=step)
                    actions.append(Action(fast_forward, self.records(0, resumed), "setup", False))
            elif rank.rank == 0:
                actions.append(Action(restore, self.records(0, of(Fresh, fit=fit)), "setup", False))
            between = first - 1, first, "fast_forward", "first_step"
            actions += self.during(rank, time_account.FAST_FORWARD, *between)
            actions[-2].act = self.both(self.keeps(rank, fit), actions[-2].act)
            actions[-1].act = self.both(actions[-1].act, self.begins_training(rank, fit, begun))
        return first

    def plan_steps(self, ranks: list[Rank], plan: dict[int, list[Action]], fit: int, at: float) -> float:
        """Steps, with what comes between two of them."""
        world, some = self.world, self.world.some
        step, count = self.saved[fit], world.random.randint(20, 40)
        every = world.random.choice([5, 8, 13]), world.random.choice([6, 9, 100])
        rolls_back = step + world.random.randint(8, 30) if world.chance(0.2) else None
        done, saved, is_first = self.planned[fit], step, True
        period, name = None, ""
        category, behind_s = "", 0.0 if self.straggler is None else self.behind_s
        reports_every = world.random.randint(5, 12)
        for _ in range(count):
            if behind_s and period is not None and period.batches >= reports_every:
                after = "callbacks" if self.splits_steps else category
                act = self.both(self.records(0, self.report(fit, step, period)), self.has_begun(fit, step))
                plan[0].append(Action(at, act, after, False))
                self.reported[name] = at
                period = None
            if not is_first and period is None:
                period, name = Period(step, done), f"{self.token}-{fit}-{step}-{at}"
            if period is not None:
                period.batches += 1
            seconds = self.step_s * some(0.8, 1.2)
            category = "first_step" if is_first else "wasted_progress" if step < done else "productive"
            for rank in ranks:
                own, actions = rank.account, plan[rank.rank]
                if not is_first:
                    loads = "data_loading" if self.splits_steps else category
                    actions.append(Action(at, self.begins_batch(rank, step), loads, True, step, category))
                loaded = at + seconds * some(0.02, 0.3)
                actions.append(Action(loaded, own.batch_ready, category, False))
                if behind_s and category == "productive" and rank.rank != self.straggler:
                    waits = at + seconds * 0.9
                    actions.append(Action(waits, int, f"straggler_wait {name}", False, report=name))
                    actions.append(Action(waits + behind_s, int, category, False, report=name))
                after = "callbacks" if self.splits_steps and not is_first else category
                actions.append(Action(at + seconds * 0.95 + behind_s, own.batch_done, after, False))
            is_begun = not is_first
            at, is_first, step = at + seconds + behind_s, False, step + 1
            if not is_begun:
                continue
            after = "callbacks" if self.splits_steps else category
            if step % every[1] == 0:
                length = some(1, 8)
                for rank in ranks:
                    actions = plan[rank.rank]
                    actions.append(Action(at, self.enters(rank, time_account.VALIDATION), "validation"))
                    actions.append(Action(at + length, self.enters(rank, time_account.CALLBACKS), "callbacks"))
                after, at = "callbacks", at + length + 0.3
            if step % every[0] == 0:
                length, saved = some(0.2, 4), step
                for rank in ranks:
                    save = self.during(
                        rank, time_account.CHECKPOINT_SAVE, at, at + length, "checkpoint_save", after, step
                    )
                    plan[rank.rank] += save
                event = of(Saved, fit=fit, step=step, tier="global", seconds=length)
                plan[0].append(Action(at + length, self.both(self.records(0, event), self.saves(fit, step)), after))
                at += length
            if step == rolls_back and saved < step:
                at = self.plan_rollback(ranks, plan, fit, at, saved, step)
                done, step, is_first = max(done, step), saved, True
                period = None
        return at

    def report(self, fit: int, step: int, period: Period) -> Stragglers:
        """What rank 0 records of the straggler: steps of the others differ, and they wait for each other a little."""
        assert self.straggler is not None
        own = self.step_s * torch.tensor([self.world.some(0.98, 1.0) for _ in range(self.world_size)])
        own[0 if self.straggler else 1], own[self.straggler] = self.step_s, self.step_s + self.behind_s
        waited = own.max() - own + 0.1 * self.step_s
        unknown, places = torch.full_like(own, torch.nan), [DeviceId("", "")] * self.world_size
        scores, sections = [unknown] * 5, [own.unsqueeze(1), unknown.unsqueeze(1), unknown.unsqueeze(1)]
        made = Report(step, places, *scores, *sections, waited=waited)
        slowest, seconds = made.waiting([Straggler(self.straggler, places[0], "relative", 0.5, "")]) or (None, 0.0)
        waited_s = seconds * period.new_batches(step)
        return of(Stragglers, fit=fit, step=step, ranks=[self.straggler], slowest=slowest, waited=waited_s)

    def plan_rollback(
        self, ranks: list[Rank], plan: dict[int, list[Action]], fit: int, at: float, to: int, step: int
    ) -> float:
        begun: dict[str, int] = {}
        for rank in ranks:
            actions = plan[rank.rank]
            found = Action(at, self.enters(rank, time_account.RESTORE), "restore", True, step)
            if rank.rank == 0:
                found.act = self.both(self.records(0, of(Rollback, fit=fit, step=step)), found.act)
            actions.append(found)
            if rank.rank == 0:
                event = of(RestoredInPlace, fit=fit, step=to)
                actions.append(Action(at + 2, self.records(0, event), "restore", False))
            actions += self.during(rank, time_account.FAST_FORWARD, at + 2, at + 3, "fast_forward", "first_step")
            actions[-1].act = self.both(actions[-1].act, self.begins_training(rank, fit, begun))
        return at + 3

    # -- what a rank does ----------------------------------------------------------------------------------------------

    def during(
        self, rank: Rank, number: int, begin: float, end: float, category: str, after: str, step: int | None = None
    ) -> list[Action]:
        section = rank.account.during(number)
        leave = lambda: section.__exit__(None, None, None)  # noqa: E731
        return [Action(begin, section.__enter__, category, True), Action(end, leave, after, True, step)]

    @staticmethod
    def both(*acts: Callable[[], object]) -> Callable[[], object]:
        return lambda: [act() for act in acts]

    @staticmethod
    def enters(rank: Rank, number: int) -> Callable[[], object]:
        return lambda: rank.account.enter(number)

    @staticmethod
    def begins_fit(rank: Rank, fit: int) -> Callable[[], object]:
        def act() -> None:
            rank.fit = fit
            rank.account.begin_fit()

        return act

    def keeps(self, rank: Rank, fit: int) -> Callable[[], object]:
        def act() -> None:
            if not self.has_launcher:
                rank.file = self.run_dir / f"{self.token}-{rank.rank}-{fit}.time"
                rank.account.share(rank.file)

        return act

    @staticmethod
    def begins_batch(rank: Rank, step: int) -> Callable[[], object]:
        return lambda: rank.account.begin_batch(step)

    def begins_training(self, rank: Rank, fit: int, found: dict[str, int]) -> Callable[[], object]:
        def act() -> None:
            if not found:  # rank 0 tells the others
                found["reached"] = goodput.reached_step(self.run_dir, read_ledger(self.run_dir), fit)
            self.fit = fit
            rank.account.begin_training(found["reached"], self.splits_steps)

        return act

    def records(self, rank: int, event: Event) -> Callable[[], object]:
        node = self.nodes[rank // self.per_node]
        return lambda: self.world.record(self.world.now, node, rank, event)

    def has_begun(self, fit: int, step: int) -> Callable[[], object]:
        return lambda: self.steps_begun.__setitem__(fit, max(self.steps_begun[fit], step))

    def saves(self, fit: int, step: int) -> Callable[[], object]:
        return lambda: self.saved.__setitem__(fit, step)

    def fails(self, rank: Rank, fit: int) -> Callable[[], object]:
        def act() -> None:
            if rank.rank == 0:
                fault = Fault(kind="ValueError", fit=fit, reason="data are missing")
                self.world.record(self.world.now - 0.1, rank.node, 0, fault)
                self.world.now += 0.1
                if not self.has_launcher:
                    self.interruptions.append(("crash", rank.node))
            rank.account.end_fit(failed=True)
            if not self.has_launcher:
                rank.fits.append((self.world.now, "crash"))
                self.record_fit(rank, fit)

        return act

    def ends_fit(self, rank: Rank, fit: int) -> Callable[[], object]:
        def act() -> None:
            rank.account.end_fit(failed=False)
            self.saved[fit] = 10**6
            if not self.has_launcher:
                rank.fits.append((self.world.now, ""))
                self.record_fit(rank, fit)

        return act

    def record_fit(self, rank: Rank, fit: int) -> None:
        self.record_account(rank, fit, rank.account.close(), was_killed=False)

    def record_killed(self) -> None:
        """The next start records those of which a file is left."""
        for rank in self.before:
            self.world.now, self.world.node = self.at, rank.node
            if rank.file is not None:
                self.record_account(rank, rank.fit, self.read(rank), was_killed=True)

    def record_account(self, rank: Rank, fit: int, spent: Spent, was_killed: bool) -> None:
        event = time_account.time_spent({rank.rank: spent}, {rank.rank: spent.since} if was_killed else {})
        event.killed, rank.file = was_killed or None, None
        rank.number_recorded += 1
        event.fit, event.attempt = fit, f"{self.token}-{rank.number_recorded}"
        event.world_size = self.world_size
        self.world.record(self.world.now, rank.node, rank.rank, event)

    # -- the end of a group --------------------------------------------------------------------------------------------

    def end(self, ranks: list[Rank], is_last: bool, ready: float) -> End:
        world, some = self.world, self.world.some
        at = some(max(ready, ranks[0].began + 1.2 * KEPT_EVERY_S), self.over)
        if is_last:
            if self.has_launcher and world.chance(0.25):
                self.now = at
                return End("look", at, ended=at)
            return End("finished", math.inf, ended=self.over)
        kinds = ["fault"] * 5 + ["preempted"] * 2 + ["straggler"]
        if self.has_launcher:
            kinds += ["killed", "all lost"] + ["node lost"] * (2 if len(self.nodes) > 1 else 0)
        else:
            kinds += ["killed, unwatched"] * 3
        kind = world.random.choice(kinds)
        due_to = world.random.choice(ranks)
        everyone, some_of_them = {rank.rank for rank in ranks}, {rank.rank for rank in ranks if world.chance(0.3)}
        if kind == "fault":
            faults = FAULTS if self.has_launcher else FAULTS[2:5]
            cause, fault = world.random.choice(faults)
            late = {"hang": some(20, 90), "killed": some(0.1, 1)}.get(cause, 0.0)
            failing = some_of_them - {due_to.rank} if late else some_of_them | {due_to.rank}
            end = End(kind, at, cause, fault, at + late, at + late + some(1, 9), due_to.rank, due_to.node, failing)
        elif kind == "node lost":
            fault = {"kind": "PeerLost", "reason": "PeerLost: rank 3 does not answer"}
            late = some(3, 40)
            end = End(kind, at, "killed", fault, at + late, at + late + some(1, 9), failing=some_of_them)
        elif kind == "preempted":
            end = End(kind, at, kind, {}, at + 3, at + 3 + some(1, 9), failing=everyone)
        elif kind == "straggler":
            end = End(kind, at, kind, {}, at + 3, at + 3 + some(1, 9), due_to.rank, due_to.node, everyone)
        else:
            end = End(kind, at, "killed", {}, math.nan, at + (some(0.1, 3) if kind == "killed" else 0))
        if kind == "killed, unwatched":
            end.node = self.nodes[0] if len(self.nodes) == 1 else ""
        elif not self.has_launcher:
            end.failing = everyone
        return end

    def kept_at(self, end: End) -> dict[str, float]:
        """When something was last kept of every node; never: infinite, and before it went down: negative."""
        kept = {}
        self.lost = {"look": set(self.nodes), "all lost": set(self.nodes), "node lost": {self.nodes[-1]}}.get(
            end.kind, set()
        )
        for node in self.nodes:
            is_kept = node in self.lost or (self.has_launcher and self.world.chance(0.2))
            kept[node] = min(end.at, self.over) - self.world.some(0, KEPT_EVERY_S) if is_kept else math.inf
        if end.kind == "node lost" and len(self.nodes) > 1 and self.world.chance(0.15):
            kept[self.nodes[-1]] = -math.inf
            self.is_known_in_full = False
        return kept

    def run_rank(self, rank: Rank, actions: list[Action], end: End, kept_at: float) -> None:
        world = self.world
        world.node = rank.node
        until, written, category, visible = end.at, 0, "imports", rank.began
        intervals: list[tuple[float, float, str]] = []  # all that is over
        since = rank.began
        kept_truth: list[tuple[float, float, str]] | None = None
        for action in sorted(actions, key=lambda each: each.time):
            if kept_truth is None and action.time > kept_at > -math.inf:
                kept_truth = self.keep(rank, intervals, written, visible, category)
            if action.time >= until:
                break
            if action.report and self.reported.get(action.report, math.inf) >= until:
                continue
            world.now, world.node = action.time, rank.node
            action.act()
            if action.category == category and not action.is_written:
                continue  # on an accelerator all of a step is one
            if category == "teardown":  # it was not the last fit
                category = "script"
            intervals.append((since, action.time, category))
            since, category = action.time, action.category
            is_forgotten = end.kind == "all lost" and action.time > kept_at and action.category != "restore"
            rank.step = action.step or rank.step
            if action.begins is not None and not is_forgotten:  # of a rollback the ledger has the step
                self.steps_begun[self.fit] = max(self.steps_begun[self.fit], action.begins)
            if action.is_written:
                visible, written = action.time, len(intervals)
        if kept_truth is None and kept_at < math.inf:
            kept_truth = self.keep(rank, intervals, written, visible, category)
        if end.kind == "killed, unwatched":
            kept_truth = self.found_of_killed(rank, intervals, written, visible, category)
        elif rank.node not in self.lost or kept_at == -math.inf:
            kept_truth = None
        self.finish(rank, end, intervals, written, since, category, kept_truth, kept_at)

    def keep(
        self, rank: Rank, intervals: list[tuple[float, float, str]], written: int, visible: float, category: str
    ) -> list[tuple[float, float, str]]:
        """What is known of it when it is kept, and from when on nothing more is."""
        rank.kept, rank.kept_fit = self.read(rank), rank.fit
        doing = [*intervals, (visible, visible, category)][written][2]
        if doing == "data_loading":  # a step has begun
            doing = rank.step
        return [*intervals[:written], (visible, visible, doing)]

    def found_of_killed(
        self, rank: Rank, intervals: list[tuple[float, float, str]], written: int, visible: float, category: str
    ) -> list[tuple[float, float, str]]:
        """What the next start knows; of what it has done between two fits, nothing."""
        if rank.file is not None:
            return self.keep(rank, intervals, written, visible, category)
        ended, _ = rank.fits[-1]
        return [*(each for each in intervals if each[1] <= ended), (ended, ended, "script")]

    def finish(
        self,
        rank: Rank,
        end: End,
        intervals: list[tuple[float, float, str]],
        written: int,
        since: float,
        category: str,
        kept: list[tuple[float, float, str]] | None,
        kept_at: float,
    ) -> None:
        """What it has done at last: how it ends, or what is known of that."""
        rank.ended = end.ended
        if kept is not None:  # all else that it did is lost
            *intervals, (since, _, category) = kept
        elif end.kind == "finished" or category in ("script", "teardown") or rank.rank in end.failing:
            pass  # it is there to say what it has done
        else:
            since, _, category = [*intervals, (since, since, category)][written]
            del intervals[written:]
            if category == "data_loading":  # a step has begun
                category = rank.step
        before = self.cause_before(rank, category, since)
        tail: list[tuple[float, str, str]]
        if end.kind == "all lost":
            rank.ended = kept_at
        is_unwatched = end.kind == "killed, unwatched"
        if is_unwatched:
            rank.ended, tail = since, []
        elif end.kind in ("finished", "look") or category in ("script", "other"):
            tail = [(rank.ended, category, before)]
        elif category == "teardown":
            tail = [(rank.ended, category, end.cause)]
        elif math.isnan(end.verdict):
            tail = [(rank.ended, "wasted_progress" if category == "productive" else category, end.cause)]
        elif rank.rank in end.failing and kept is None:
            tail = self.stop(rank, end, category, before)
        else:
            tail = [(end.verdict, "detection", end.cause), (end.ended, "teardown", end.cause)]
        if not self.has_launcher and not is_unwatched:  # its account ends with its fit
            if tail[0][1] != "teardown":
                self.record_fit(rank, self.fit)
            *tail, _ = tail
            rank.ended = tail[-1][0] if tail else since
        newest = since + 1 if kept is not None and not is_unwatched else math.inf
        for begin, until, what in intervals:
            if (report := what.removeprefix("straggler_wait ")) != what:
                self.waits(rank, until - begin, is_known=self.reported[report] <= newest)
                continue
            self.add(what, until - begin, self.cause_before(rank, what, begin), rank)
        for until, what, cause in tail:
            self.add(what, until - since, cause, rank)
            since = until

    def waits(self, rank: Rank, seconds: float, is_known: bool) -> None:
        """It waits for the straggler; where that is not known of it, it computes."""
        if is_known:
            self.truth[Loss("straggler_wait", "straggler", self.straggler_node)] += seconds
        else:
            self.add("productive", seconds, "", rank)

    def cause_before(self, rank: Rank, category: str, time: float) -> str:
        """To start, and to do steps again, is due to the interruption before."""
        cause = next((cause for ended, cause in reversed(rank.fits) if ended <= time), self.cause)
        return cause if category in START or category == "wasted_progress" else ""

    def stop(self, rank: Rank, end: End, category: str, before: str) -> list[tuple[float, str, str]]:
        """An exception ends its fit, if it is to save after that. Returns what it does, until when, and the causes."""
        world = self.world
        world.now, world.node = end.at, rank.node
        teardown = end.ended, "teardown", end.cause
        if end.kind in ("preempted", "straggler"):
            with rank.account.during(time_account.CHECKPOINT_SAVE):
                world.now = end.verdict
            rank.account.end_fit(failed=True)
            return [(end.at, category, before), (end.verdict, "checkpoint_save", ""), teardown]
        world.now = end.verdict
        rank.account.end_fit(failed=True)
        if category in ("data_loading", "productive", "wasted_progress"):
            return [(end.verdict, "detection", end.cause), teardown]
        return [(end.verdict, category, before), teardown]

    def record_end(self, ranks: list[Rank], end: End, kept_at: dict[str, float]) -> None:
        """What the watchdogs of the nodes keep and record."""
        world = self.world
        first, culprit = self.nodes[0], ranks[end.rank]
        if end.kind == "preempted":
            event = of(FitInterrupted, fit=self.fit, reason="signal 15")
            world.record(end.verdict, first, 0, event)
        elif end.kind == "killed":
            world.record(end.at + 0.05, first, 0, of(Killed, fit=self.fit, signal="SIGKILL"))
        elif end.kind == "straggler":
            world.record(end.verdict - 0.1, first, 0, of(StragglerStop, fit=self.fit, ranks=[end.rank], reason="slow"))
            fault = Fault(kind="StragglersFound", fit=self.fit, reason="too slow: slow")
            world.record(end.verdict, culprit.node, end.rank, fault)
        elif end.fault:
            world.record(end.verdict, culprit.node, end.rank, Fault(fit=self.fit, **end.fault))
            reason = "PeerLost: Connection closed by peer" if end.cause != "hang" else "RuntimeError: timed out"
            for rank in sorted(end.failing - {end.rank}):
                fault = Fault(kind="RuntimeError", fit=self.fit, reason=reason)
                world.record(end.verdict + 0.01, ranks[rank].node, rank, fault)
        if not self.has_launcher:
            return
        for node in self.nodes:
            own = [rank for rank in ranks if rank.node == node]
            name = f"{self.token}-{node}"
            if math.isfinite(kept_at[node]):
                world.now, world.node = kept_at[node], node
                spent = {rank.rank: rank.kept for rank in own if rank.kept is not None}
                time_account.keep(self.run_dir, name, self.filled(time_account.time_spent(spent, {}), own[0].kept_fit))
            if node in self.lost:
                continue
            world.now, world.node = end.ended + 0.5, node
            read = {rank.rank: self.read(rank) for rank in own}
            ended = {rank.rank: rank.ended - 1.6e9 for rank in own}
            world.record(world.now, node, None, self.filled(time_account.time_spent(read, ended), own[0].fit))
            if world.chance(0.5):  # else the watchdog was killed just now
                time_account.forget(self.run_dir, name)

    @staticmethod
    def read(rank: Rank) -> Spent:
        assert rank.file is not None
        with open(rank.file, "rb", buffering=0) as file:
            found = read_account(file)
        assert found is not None
        return found

    def filled(self, event: TimeSpent, fit: int) -> TimeSpent:
        event.fit, event.attempt, event.world_size = fit, str(self.token), self.world_size
        event.elastic_run_id, event.restart_count = self.elastic_run_id, self.restart_count
        return event


START = ("launch", "rendezvous", "imports", "script", "setup", "restore", "fast_forward", "first_step")


def share_right(found: dict[Any, float], truth: dict[Any, float]) -> float:
    """How much of the time is where it belongs."""
    return sum(min(seconds, found.get(key, 0.0)) for key, seconds in truth.items()) / sum(truth.values())


def summed(losses: dict[Loss, float], *names: str) -> dict[Any, float]:
    found: defaultdict[Any, float] = defaultdict(float)
    for loss, seconds in losses.items():
        found[tuple(getattr(loss, name) for name in names)] += seconds
    return dict(found)


def confusions(found: dict[Any, float], truth: dict[Any, float]) -> Counter[tuple[str, str]]:
    """Seconds of a category that were taken for those of another one, where one does for all that it lacks."""
    lacks = Counter({key: seconds - found.get(key, 0.0) for key, seconds in truth.items()})
    taken = Counter({key: seconds - truth.get(key, 0.0) for key, seconds in found.items()})
    confused: Counter[tuple[str, str]] = Counter()
    for (key, seconds), (other, more) in zip(lacks.most_common(), taken.most_common(), strict=False):
        confused[", ".join(key), ", ".join(other)] += min(seconds, more)
    return +confused


def difference(found: dict[Any, float], truth: dict[Any, float]) -> str:
    keys = sorted(key for key in {*found, *truth} if abs(found.get(key, 0.0) - truth.get(key, 0.0)) > 0.5)
    return "\n".join(f"{key}: {found.get(key, 0.0):.2f}, not {truth.get(key, 0.0):.2f}" for key in keys)


def check(seed: int, folder: Path, patch: pytest.MonkeyPatch) -> Run:
    run_dir = folder / str(seed)
    run_dir.mkdir()
    run = Run(seed, run_dir, patch)
    run.found = found = run.play()
    for names in (("category",), ("category", "cause", "node")):
        accounted, truth = summed(found.seconds, *names), summed(run.truth, *names)
        assert share_right(accounted, truth) >= (0.995 if run.is_known_in_full else 0.99), (
            f"seed {seed}, by {names}:\n{difference(accounted, truth)}"
        )
    wall = found.ended - found.began
    assert abs(found.total - run.world_size * wall) < 0.02 * run.world_size * run.token * run.has_two_fits + 0.5
    causes = [(each.cause, each.node) for each in found.interruptions]
    assert causes == run.interruptions, f"seed {seed}: {causes}, not {run.interruptions}"
    assert min(found.seconds.values()) > -0.01
    return run


def runs(number: int) -> Iterator[Run]:
    """Runs that have been checked, one after the other."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for seed in range(number):
            with pytest.MonkeyPatch.context() as patch:
                yield check(seed, Path(folder), patch)


@pytest.mark.parametrize("number", [80, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_every_second_is_in_its_category(number: int) -> None:
    stories: Counter[str] = Counter()
    for run in runs(number):
        stories.update(run.stories)
        assert_in_time(run.found)
    assert stories.keys() == {
        *("finished", "look", "preempted", "straggler", "killed", "fault", "node lost", "all lost"),
        "killed, unwatched",
    }


MISTAKES: dict[str, tuple[object, str, object]] = {
    "steps-done-again-are-new": (goodput, "reached_step", lambda *_: 0),
    "a-step-that-fails-is-done": (TimeAccount, "end_fit", lambda self, failed: self.enter(time_account.TEARDOWN)),
    "a-queue-is-nothing": (goodput, "_between", lambda before, after, otherwise: otherwise),
    "what-was-kept-goes-on-no-further": (goodput._Group, "extend", lambda self, now: None),
    "a-fault-that-was-caught-ends-workers": (
        goodput,
        "faults_of",
        lambda events: [event for event in events if isinstance(event, Fault)],
    ),
    "the-first-fault-is-the-cause": (goodput, "first_cause", lambda faults: faults[0]),
    "who-waits-works": (goodput._Group, "find_waits", lambda self: None),
    "steps-done-again-wait-too": (Period, "new_batches", lambda self, step: self.batches),
    "what-was-kept-has-waited-since": (goodput, "_CLOCKS_DIFFER_S", math.inf),
    "a-crash-is-a-kill": (goodput, "_kind_of", lambda fault: "killed"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(mistake: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*mistake)
    with pytest.raises(AssertionError, match=r"seed \d+"):
        deque(runs(RUNS), maxlen=0)
