"""What a run would have taken under another setting: predictions, compared with runs that had it, and advice.

Simulated runs are played step by step with a fake clock, once with each setting: steps of different length, validation,
saves that hold the training up and are complete some time later, interruptions in the middle of a step. From what the
first one has recorded, as a ledger would have it, the second is predicted.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.launch.cli import main
from lightning_resilience.launch.json_output import KEYS
from lightning_resilience.launch.report import report
from lightning_resilience.run import figures as figures_module
from lightning_resilience.run import replay as replay_module
from lightning_resilience.run import time_account
from lightning_resilience.run.advice import advice
from lightning_resilience.run.events import (
    Event,
    Fault,
    Finished,
    FitInterrupted,
    Fresh,
    GiveUp,
    JobStart,
    Killed,
    LaunchExit,
    LaunchStart,
    RestoredInPlace,
    Resumed,
    Rollback,
    Saved,
    Stragglers,
    TimeSpent,
)
from lightning_resilience.run.figures import figures_of
from lightning_resilience.run.goodput import Goodput, account
from lightning_resilience.run.replay import RunFigures, Saves, Strike, replay
from lightning_resilience.run.save_interval import WARM_UP_STEPS, growing_interval_s
from lightning_resilience.run.time_account import TimeAccount
from lightning_resilience.run.what_if import SETTINGS, changed, parse, predict
from tests.test_goodput import launch, run_with, spent
from tests.test_goodput_simulation import of

RUNS = 100


@dataclass(frozen=True)
class Options:
    """What is set in a run."""

    save_every_s: float
    local_every_s: float | None
    hang_limit_s: float
    local_is_chosen: bool = False


class Course:
    """What befalls a run whatever is set, by its seed: work, costs and interruptions.

    Args:
        seed: Of everything.
    """

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.steps = pick.randint(700, 1000)
        step_s = math.exp(pick.uniform(math.log(0.5), math.log(8)))
        self.step_s = [step_s * pick.uniform(0.9, 1.1) for _ in range(self.steps + 1)]
        self.loading = pick.uniform(0, 0.1)
        self.validation = pick.choice([20, 50, 10**6]), step_s * pick.uniform(1, 5)
        self.blocked_s = step_s * pick.choice([0.02, 0.5, 3.0])
        self.write_s = self.blocked_s + step_s * pick.choice([0.0, 2.0])
        length_s = step_s * self.steps
        self.starts = [[length_s * pick.uniform(0.002, 0.02) for _ in range(7)] for _ in range(9)]
        times = sorted(pick.uniform(0.02, 1.0) * length_s for _ in range(pick.choice([0, 1, 2, 4, 6])))
        self.strikes = [(each, pick.choice(["killed", "killed", "hang", "preempted"])) for each in times]
        some = pick.sample([length_s / each for each in (8, 15, 30, 60)], 2)
        self.options = Options(
            some[0], pick.choice([None, None, 5 * step_s, 12 * step_s]), step_s * pick.choice([10, 30])
        )
        change: dict[str, Any] = pick.choice(
            [
                {"save_every_s": some[1]},
                {"save_every_s": some[1]},
                {"local_every_s": 8 * step_s if self.options.local_every_s is None else None},
                {"hang_limit_s": step_s * 18},
            ]
        )
        if "hang_limit_s" in change and all(kind != "hang" for _, kind in self.strikes):
            change = {"save_every_s": some[1]}
        self.changed = replace(self.options, **change)
        names = {"save_every_s": "save_every", "local_every_s": "local", "hang_limit_s": "hang_limit"}
        self.what_if = " ".join(f"{names[name]}={each or 'off'}" for name, each in change.items())


class Played:
    """A run from its first step to its last.

    Args:
        course: What befalls it.
        options: What is set.

    Attributes:
        events: What it has recorded.
        account: Where its time went.
    """

    def __init__(self, course: Course, options: Options) -> None:
        self._course = course
        self._options = options
        self._now = 1000.0
        self._trained_s = 0.0
        self._reached = 0
        self._saved = self._saved_locally = 0
        self.events: list[Event] = []
        self._record(of(LaunchStart, began=self._now))
        self._record(JobStart(retry=False, job_attempt=0, run_id="job", max_restarts=3, reason=None))
        strikes: list[tuple[float, str] | None] = [*course.strikes, None]
        for number, strike in enumerate(strikes):
            self._now += course.starts[number][0]
            if self._life(number, strike):
                break
        self._record(of(LaunchExit, status="finished"))
        self.events.sort(key=lambda event: event.time)
        self.account = account(self.events)

    def _record(self, event: Event, time: float | None = None) -> None:
        event.time = self._now if time is None else time
        self.events.append(event)

    def _life(self, number: int, strike: tuple[float, str] | None) -> bool:
        """Trains until an interruption or the end; whether it was that."""
        course, options = self._course, self._options
        times = course.starts[number][1:]
        own = TimeAccount(0.0, lambda: self._now, lambda: self._now)
        for seconds, after in zip(times, (own.imported, own.begin_fit, None), strict=False):
            self._now += seconds
            if after is not None:
                after()
        step = max(self._saved, self._saved_locally)
        with own.during(time_account.RESTORE):
            self._now += times[3]
        tier = "local" if self._saved_locally > self._saved else "global"
        self._record(of(Resumed, fit=0, step=step, tier=tier) if step else of(Fresh, fit=0))
        own.begin_training(self._reached, True)
        save_at, local_at = self._now + options.save_every_s, self._now + (options.local_every_s or math.inf)
        first_at, interval_s = step + WARM_UP_STEPS, 0.0
        recorded_at, unrecorded = 0.0, 0
        self._now += times[4]
        pending: list[tuple[float, int, bool]] = []  # when saves will be complete
        step += 1
        own.begin_batch(step)
        strikes_at = math.inf if strike is None else self._now + strike[0] - self._trained_s
        began = batch = self._now
        while step < course.steps:
            batch = self._now
            seconds = course.step_s[step]
            after = 0.0
            if (step + 1) % course.validation[0] == 0:
                after = course.validation[1]
            kind = "" if strike is None else strike[1]
            if batch + seconds + after >= strikes_at and kind != "preempted":
                break
            self._now += seconds * course.loading
            own.batch_ready()
            self._now += seconds * (1 - course.loading)
            own.batch_done()
            if after:
                own.enter(time_account.VALIDATION)
                self._now += after
                own.enter(time_account.CALLBACKS)
            step += 1
            if self._now >= save_at and step < course.steps:
                save_at = self._now + options.save_every_s
                pending.append((self._now + course.write_s, step, True))
                started = self._now
                with own.during(time_account.CHECKPOINT_SAVE):
                    self._now += course.blocked_s
                event = of(Saved, fit=0, step=step, tier="global", seconds=course.write_s, reason="interval")
                if started + course.write_s < strikes_at:
                    self._record(event, started + course.write_s)
            if step == first_at if options.local_is_chosen and not interval_s else self._now >= local_at:
                every_s = options.local_every_s or math.inf
                interval_s = growing_interval_s(interval_s, 0.0, 0.5 * course.step_s[0], every_s)
                interval_s = interval_s if options.local_is_chosen else every_s
                local_at = self._now + interval_s
                pending.append((self._now + 0.5 * course.step_s[0], step, False))
                unrecorded += 1
                if self._now >= recorded_at:
                    local: dict[str, Any] = {"count": unrecorded, "seconds": 0.5 * course.step_s[0], "stall_s": 0.0}
                    local["every_s"] = every_s if options.local_is_chosen else None
                    if self._now + local["seconds"] < strikes_at:
                        done = self._now + local["seconds"]
                        self._record(of(Saved, fit=0, step=step, tier="local", reason="local", **local), done)
                    recorded_at, unrecorded = self._now + 60, 0
            own.begin_batch(step)
            if self._now >= strikes_at:
                break
        ends = min(max(self._now, strikes_at), strikes_at) if kind_of(strike) != "preempted" else self._now
        is_over = step >= course.steps
        for time, at, is_global in pending:
            if time <= ends or is_over:
                if is_global:
                    self._saved = max(self._saved, at)
                else:
                    self._saved_locally = max(self._saved_locally, at)
        self._reached = max(self._reached, step)
        if not is_over:
            assert strike is not None
            self._trained_s += min(ends, max(strikes_at, began)) - began
            self._trained_s = strike[0]
        self._end(number, own, "" if is_over else kind_of(strike), ends if not is_over else self._now, step)
        return is_over

    def _end(self, number: int, own: TimeAccount, kind: str, at: float, step: int) -> None:
        course = self._course
        if kind in ("", "preempted"):
            reason = "finished" if not kind else "preemption"
            with own.during(time_account.CHECKPOINT_SAVE):
                self._now += course.blocked_s
            self._record(of(Saved, fit=0, step=step, tier="global", seconds=course.blocked_s, reason=reason))
            self._saved = step
            own.end_fit(failed=False)
            self._record(of(FitInterrupted, fit=0, reason="signal 15") if kind else of(Finished, fit=0, step=step))
        spent = own.close()
        since = self._now
        verdict = {"hang": since + self._options.hang_limit_s + 1.5, "killed": at + 0.1}.get(kind, at)
        if kind in ("hang", "killed"):
            fault: dict[str, Any] = {"kind": "hang", "limit": self._options.hang_limit_s} if kind == "hang" else {}
            self._record(Fault(rank=0, fit=0, reason="", **({"kind": "died"} | fault)), verdict)
            self._now = verdict
        ended = self._now + 2.0
        self._now = ended
        values: dict[str, Any] = {"fit": 0, "attempt": str(number), "world_size": 1, "ranks": [0], "node": "n"}
        values |= {"began": [spent.began], "since": [since], "ended": [ended], "doing": [spent.doing]}
        seconds = {name: [each] for name, each in spent.seconds.items() if each}
        self._record(TimeSpent(seconds=seconds, reached=spent.reached, elastic_run_id="job", **values))


def kind_of(strike: tuple[float, str] | None) -> str:
    return "" if strike is None else strike[1]


def figures(played: Played) -> RunFigures:
    found = figures_of(played.events, played.account)
    assert found is not None
    return found


def errors(number: int) -> Iterator[tuple[int, float, float]]:
    """By how much the replay of each run as it was, and its prediction, are wrong."""
    for seed in range(number):
        course = Course(seed)
        recorded = Played(course, course.options)
        found = predict(figures(recorded), course.what_if)
        truth = Played(course, course.changed).account.ettr
        yield seed, found.replayed.ettr - recorded.account.ettr, found.predicted.ettr - truth


def check(found: list[tuple[int, float, float]], beyond: int = 0) -> None:
    """All but some predictions are right within a point, and replays of the runs as they were within a quarter."""
    assert max(abs(replayed) for _, replayed, _ in found) < 0.0025
    wrong = sorted((abs(predicted), seed) for seed, _, predicted in found)
    assert wrong[-1 - beyond][0] < 0.01, wrong[-5:]
    assert statistics.fmean(each for each, _ in wrong) < 0.0025


def test_predictions() -> None:
    """Where an interruption comes within a step of the end of a save, it may cost an interval more, or less."""
    check([*errors(RUNS)], beyond=1)


def chosen_errors(number: int) -> Iterator[tuple[int, float, float]]:
    """The same for runs whose interval of local saves is chosen, and what is predicted of them from others."""
    for seed in range(number):
        course = Course(seed)
        step_s = course.step_s[0]
        given = replace(course.options, local_every_s=12 * step_s)
        # Stalls cost nothing there, so what decides is that a save takes half a step.
        chosen = replace(given, local_every_s=max(5 * step_s, 1.0), local_is_chosen=True)
        for before, text, after in ((given, "local=auto", chosen), (chosen, f"local={12 * step_s}", given)):
            recorded = Played(course, before)
            found = predict(figures(recorded), text)
            truth = Played(course, after).account.ettr
            yield seed, found.replayed.ettr - recorded.account.ettr, found.predicted.ettr - truth


def test_predictions_with_a_chosen_interval_of_local_saves() -> None:
    check([*chosen_errors(20)])


MISTAKES: dict[str, tuple[object, str, object]] = {
    "saves-cost-nothing": (replay_module._Course, "_blocked_s", lambda self, length_s: 0.0),
    "saves-are-complete-at-once": (
        replay_module._Course,
        "_last",
        lambda self, length_s, saves, begin_s, period_s: self.step_after(length_s),
    ),
    "every-interruption-comes-again-at-once": (figures_module, "_TRAINED", ("productive",)),
    "orderly-ends-are-none": (figures_module, "_ORDERLY", ()),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(mistake: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*mistake)
    with pytest.raises(AssertionError):
        check([*errors(20)])


def test_interruptions_at_random() -> None:
    """The mean of many random courses is that of many runs with such interruptions."""
    course = Course(2)
    course.validation = 10**6, 0.0
    length_s = sum(course.step_s)
    course.strikes = [(length_s / 3, "killed"), (length_s * 2 / 3, "killed")]
    mtbf_s, chance, truths = length_s / 5, random.Random(0), []
    found = predict(figures(Played(course, course.options)), f"mtbf={mtbf_s}").predicted
    course.starts = [*course.starts[:1], *course.starts[1:3] * 15]
    for _ in range(60):
        times: list[float] = []
        while len(times) < 29:
            times.append(chance.expovariate(1 / mtbf_s) + (times[-1] if times else 0.0))
        course.strikes = [(each, "killed") for each in times]
        truths.append(Played(course, course.options).account.ettr)
    assert found.ettr == pytest.approx(statistics.fmean(truths), abs=0.025)
    assert found.spread == pytest.approx(statistics.stdev(truths), abs=0.015)


def test_the_order_of_sums_is_that_of_the_categories_whatever_the_seed_of_hashes() -> None:
    once = dict.fromkeys(time_account.CATEGORIES, 0.1)
    assert list(predict(replace(STEADY, once=once), "mtbf=9999").predicted.seconds)[: len(once)] == list(once)


# -- settings ----------------------------------------------------------------------------------------------------------

STEADY = RunFigures(
    ranks=8,
    steps=1000,
    step={"productive": 1.0, "data_loading": 0.0},
    once={"imports": 20.0, "launch": 5.0},
    strikes=[
        Strike(500.0, cause="hang", limit_s=180.0, seconds={"detection": 190.0, "imports": 20.0, "queue": 60.0}),
        Strike(800.0, cause="killed", seconds={"imports": 20.0, "restore": 9.0}),
    ],
    saves=Saves(every_s=100.0, blocked_s=2.0, write_s=10.0),
    trained_s=1200.0,
)
"""A run whose steps take a second."""


@pytest.mark.parametrize(
    ("text", "category", "expected"),
    [
        ("save_cost=4", "checkpoint_save", 2.0),
        ("save_every=50", "checkpoint_save", 2.0),
        ("save_every=200steps", "checkpoint_save", 0.5),
        ("restart=10", "imports", 0.66),
        ("restart=0.5x", "imports", 0.66),
        ("hang_limit=30s", "detection", 40 / 190),
        ("spares=on", "queue", 0.0),
        ("mtbf=1h", "imports", 0.45),
        ("mtbf=1h ranks=16", "imports", 0.6),
        ("local=1min", "wasted_progress", 0.37),
        ("save_every=off", "wasted_progress", 4.1),
    ],
)
def test_every_setting_does_what_it_says(text: str, category: str, expected: float) -> None:
    found = predict(STEADY, text)
    assert found.predicted.seconds[category] / found.replayed.seconds[category] == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nothing is changed"),
        ("sve_every=3", "did you mean save_every"),
        ("speed=3", "choose one of save_every, save_cost"),
        ("save_every", "save_every= is not valid"),
        ("save_every=fast", r"a time \(90, 90s, 5min, 2h\) or steps"),
        ("save_every=0", "not valid; it can be"),
        ("save_every=-5", "not valid; it can be"),
        ("mtbf=5steps", "not valid; it can be"),
        ("local=on", "not valid; it can be"),
        ("mtbf=1h mtbf=2h", "twice"),
        ("mtbf=0.01", "more than 10,000"),
    ],
)
def test_what_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        predict(STEADY, text)


@pytest.mark.parametrize("steps", [10, 200])
@pytest.mark.parametrize("before", [None, Saves(every_s=30.0)])
def test_local_saves_every_so_many_steps(steps: int, before: Saves | None) -> None:
    """A step takes a second."""
    run = replace(STEADY, local_saves=before)
    by_steps, by_time = (predict(run, f"local={steps}{unit}").predicted.seconds for unit in ("steps", "s"))
    assert by_steps == pytest.approx(by_time)


def test_what_a_run_does_not_have() -> None:
    """A setting that would change nothing is refused."""
    healthy = replace(STEADY, strikes=[], saves=None)
    for text in ("save_every=9", "save_cost=1", "restart=1", "hang_limit=1", "spares=on", "ranks=9"):
        with pytest.raises(ValueError, match=f"^{text.partition('=')[0]}: "):
            predict(healthy, text)
    assert predict(healthy, "mtbf=300").predicted.interruptions > 1
    assert {name for text in SETTINGS for name in parse(f"{text}={'on' if text == 'spares' else 9}")} == {*SETTINGS}


def test_steps_of_saves_are_multiples() -> None:
    """Counted from the first step, also after a resume from a step between."""
    by_steps = replace(STEADY, saves=Saves(every_s=0.0, every_steps=100), strikes=[Strike(250.0), Strike(340.0)])
    assert replay(by_steps).seconds["wasted_progress"] == pytest.approx(51 + 90, abs=2)


def test_local_saves_may_be_lost_with_their_node() -> None:
    local = replace(STEADY, local_saves=Saves(every_s=10.0, write_s=1.0))
    for keeps_local, least, most in ((True, 1, 12), (False, 80, 110)):
        strike = Strike(500.0, keeps_local=keeps_local)
        assert least < replay(replace(local, strikes=[strike])).seconds["wasted_progress"] < most


def test_where_the_interval_is_chosen_the_first_steps_are_saved() -> None:
    """At whatever time an interruption comes, at most half of what was trained since the start is done again."""
    chosen = replace(STEADY, local_saves=Saves(every_s=200.0, blocked_s=0.2, write_s=0.5, first_steps=4), saves=None)
    for after_s in (10.0, 30.0, 100.0, 250.0, 900.0):
        lost = replay(replace(chosen, strikes=[Strike(after_s)])).seconds["wasted_progress"]
        assert 0 < lost < min(after_s / 2 + 20, 200) + 2, after_s
    late = replace(chosen, local_saves=replace(chosen.local_saves, first_steps=None))
    assert replay(replace(late, strikes=[Strike(100.0)])).seconds["wasted_progress"] > 95


def test_what_is_chosen_is_known_from_short_lives_too() -> None:
    """Each process records its first save, and then one a minute: between the first ones lies less than is chosen."""
    events: list[Event] = [launch(0, 0)]
    for began, step in ((0, 0), (40, 34), (80, 68)):
        start = of(Resumed, fit=0, time=began + 5.0, step=step) if step else of(Fresh, fit=0, time=began + 5.0)
        saved = of(Saved, fit=0, time=began + 9.0, step=step + 4, tier="local", seconds=0.1, every_s=12.0, count=1)
        events += [start, saved, spent(began, began + 35, began + 38, seconds={"productive": 30.0}, reached=step + 34)]
    events.append(of(LaunchExit, time=120.0, status="finished"))
    found = figures_of(events, account(events))
    assert found is not None
    assert found.local_saves is not None
    assert (found.local_saves.every_s, found.local_saves.first_steps) == (12.0, 4)
    later = of(Saved, fit=0, time=116.0, step=100, tier="local", seconds=0.1, every_s=6.0, count=5)
    found = figures_of([*events[:-2], later, *events[-2:]], account(events))
    assert found is not None
    assert found.local_saves is not None
    assert found.local_saves.every_s == 6.0, "the first save of a process costs more than others"


def test_an_interval_that_is_chosen_follows_the_interruptions() -> None:
    local = Saves(every_s=40.0, blocked_s=0.04, write_s=0.1, first_steps=4)
    chosen = changed(replace(STEADY, local_saves=local), {"mtbf": "10min"}).local_saves
    given = changed(replace(STEADY, local_saves=replace(local, first_steps=None)), {"mtbf": "10min"}).local_saves
    assert chosen is not None
    assert given is not None
    assert (5 < chosen.every_s < 10, given.every_s) == (True, 40.0)
    assert changed(replace(STEADY, local_saves=local), {"local": "10"}).local_saves.first_steps is None
    assert changed(STEADY, {"local": "auto"}).local_saves.first_steps == WARM_UP_STEPS


def test_rollbacks_come_at_their_steps() -> None:
    """Whatever is saved: less is done again with more saves, and what is recorded of it is no more true."""
    strike = Strike(math.inf, at_step=360, seconds={"restore": 3.0}, lost_steps=70)
    found = predict(replace(STEADY, strikes=[strike]), "save_every=25")
    assert found.replayed.seconds["wasted_progress"] == pytest.approx(70, abs=1)
    assert 1 < found.predicted.seconds["wasted_progress"] < 35
    assert found.predicted.seconds["restore"] == 3
    assert found.predicted.interruptions == 0


def test_rollbacks_of_a_ledger() -> None:
    """A start in the same process, and each has its part of what all have cost."""
    seconds = {"imports": 9.0, "first_step": 4.0, "restore": 2.0, "productive": 59.0, "wasted_progress": 19.0}
    events = [
        launch(0, 0),
        of(Fresh, fit=0, time=9.0),
        of(Saved, fit=0, time=40.0, step=30, seconds=1.0, reason="interval"),
        of(Rollback, fit=0, time=63.0, step=50),
        of(RestoredInPlace, fit=0, time=65.0, step=30),
        spent(0, 93, 95, seconds=seconds, reached=61),
        of(LaunchExit, time=95.0, status="finished"),
    ]
    found = figures_of(events, account(events))
    assert found is not None
    [strike] = found.strikes
    assert (strike.at_step, strike.lost_steps, strike.seconds["restore"], strike.seconds["first_step"]) == (
        50,
        20,
        2,
        2,
    )
    assert (found.steps, found.step["productive"]) == (61, pytest.approx(1, abs=0.05))
    assert found.once["first_step"] == 2
    assert replay(found).seconds["wasted_progress"] == pytest.approx(19, abs=1)


def test_a_rollback_after_a_start_that_nothing_had_interrupted_makes_no_interruption_cheaper() -> None:
    """The workers between have ended, and others were started, without a word why."""
    steps = {"productive": 20.0, "first_step": 5.0}
    events = [
        launch(0, 0),
        of(Fresh, fit=0, time=1.0),
        of(Killed, time=29.0, reason="killed"),
        spent(0, 25, 30, seconds=steps, reached=10),
        of(Resumed, fit=0, time=41.0, step=5),
        spent(40, 65, 70, seconds={"productive": 20.0, "first_step": 0.5}, reached=20),
        of(Resumed, fit=0, time=81.0, step=15),
        of(Rollback, fit=0, time=90.0, step=25),
        of(RestoredInPlace, fit=0, time=91.0, step=20),
        spent(80, 110, 112, seconds=steps, reached=30),
        of(LaunchExit, time=112.0, status="finished"),
    ]
    found = figures_of(events, account(events))
    assert found is not None
    assert len(found.strikes) == 2
    assert all(each >= 0 for strike in found.strikes for each in strike.seconds.values())


@pytest.mark.parametrize("damaged", [True, False])
def test_a_state_that_was_saved_in_time_and_damaged_later(damaged: bool) -> None:
    """That the run had no time is then not true."""
    steps = {"productive": 20.0, "first_step": 5.0}
    events = [
        launch(0, 0),
        of(Fresh, fit=0, time=1.0),
        of(Saved, fit=0, time=10.0, step=5, reason="every_n_train_steps", seconds=0.1),
        *([of(Saved, fit=0, time=29.0, step=10, reason="preemption", seconds=0.1)] if damaged else []),
        of(FitInterrupted, fit=0, time=29.0, step=10, reason="signal 15 on rank 0"),
        spent(0, 25, 30, seconds=steps, reached=10),
        of(Resumed, fit=0, time=41.0, step=5),
        spent(40, 110, 112, seconds=steps, reached=30),
        of(LaunchExit, time=112.0, status="finished"),
    ]
    found = figures_of(events, account(events))
    assert found is not None
    [strike] = found.strikes
    assert (strike.cause, strike.is_orderly, strike.is_damaged) == ("preempted", False, damaged)
    assert any("more time" in text for text in advised(found)) is not damaged


def test_when_a_run_was_interrupted() -> None:
    """After how much training, of which what is saved because of it is no part."""
    course = Course(2)
    course.validation, course.blocked_s = (10**6, 0.0), 5 * course.step_s[0]
    course.strikes = [(100.0, "preempted"), (150.0, "hang")]
    found = figures(Played(course, course.options)).strikes
    assert [each.is_orderly for each in found] == [True, False]
    assert [each.after_s for each in found] == pytest.approx([100, 150], abs=3 * course.step_s[0])


def test_odd_ledgers() -> None:
    """Values that no writer has meant, and a save without a start of a fit."""
    course = Course(2)
    course.strikes = [(100.0, "hang")]
    played = Played(course, course.options)
    for event in played.events:
        if isinstance(event, Saved):
            event.seconds = math.inf
        if isinstance(event, Fault):
            event.limit = math.inf
    assert figures(played).saves is None
    with pytest.raises(ValueError, match=r"^hang_limit: "):
        predict(figures(played), "hang_limit=10")
    alone = [event for event in Played(course, course.options).events if isinstance(event, (Saved, TimeSpent))]
    only_save = next(event for event in alone if isinstance(event, Saved))
    kept = [event for event in alone if event is only_save or isinstance(event, TimeSpent)]
    found = figures_of(kept, played.account)
    assert found is not None
    assert found.saves is None
    assert replay(found).ettr > 0


# -- advice ------------------------------------------------------------------------------------------------------------


def advised(
    figures: RunFigures | None = None, events: tuple[Event, ...] = (), found: Goodput | None = None
) -> list[str]:
    return [f"{each.what_if}: {each.text}" for each in advice(figures, events, found or Goodput())]


def test_hangs_of_slow_steps_are_found_late_for_a_reason() -> None:
    """A first step may take long, and is no hang."""
    strikes = [replace(STEADY.strikes[0], seconds={**STEADY.strikes[0].seconds, "first_step": 20.0})]
    assert any("hang" in each for each in advised(STEADY))
    assert any("step:100" in each for each in advised(replace(STEADY, strikes=strikes)))
    strikes = [replace(strikes[0], seconds={**strikes[0].seconds, "first_step": 36.0})]
    assert not any("hang" in each for each in advised(replace(STEADY, strikes=strikes)))


def test_nothing_to_advise() -> None:
    assert advised() == []
    assert advised(replace(STEADY, strikes=[])) == []


def test_what_gains_most_is_first() -> None:
    found = advice(STEADY, [], Goodput())
    assert [each.what_if for each in found] == ["local=30s", "hang_limit=30", "save_every=49", "spares=on", None]
    assert found == sorted(found, key=lambda each: each.saved_s, reverse=True)
    before = replay(STEADY)
    for each in (found[0], found[1], found[3]):
        after = predict(STEADY, str(each.what_if)).predicted
        assert each.saved_s == pytest.approx(before.total_s - after.total_s)
        assert each.share == pytest.approx(each.saved_s / before.total_s)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": {"productive": 1.0, "data_loading": 0.3}}, "load data faster: steps wait 23.1 %"),
        ({"local_saves": Saves(every_s=10.0, blocked_s=3.0)}, "local=off: stop saving to the nodes"),
        ({"local_saves": Saves(every_s=90.0, blocked_s=0.01)}, "local=auto: let LocalCheckpoint choose how often"),
        ({"strikes": [Strike(500.0, cause="preempted")]}, "give a preempted run more time: once"),
        ({"strikes": [Strike(9.0, seconds={"first_step": 90.0})]}, "keep compiled kernels in a cache"),
        ({"saves": Saves(every_s=5.0, blocked_s=3.0, write_s=3.0)}, "save every 1 min 07 s, not every 5.0 s"),
    ],
)
def test_advice(change: dict[str, Any], text: str) -> None:
    assert any(text in each for each in advised(replace(STEADY, **change))), advised(replace(STEADY, **change))


def test_advice_from_events() -> None:
    """A budget that was spent too soon, and slow devices."""
    found = Goodput(ranks=2)
    found.add("productive", 2 * 1000.0)
    found.add("idle", 2 * 500.0)
    relaunch = LaunchStart(**dict.fromkeys(LaunchStart.own_fields) | {"time": 700.0})
    [text] = advised(None, (GiveUp(time=300.0, reason=""), relaunch), found)
    assert "the budget was spent once, and the run was not started again for 6 min 40 s" in text
    reports = [
        Stragglers(
            time=time, fit=0, step=9, ranks=[1], devices=["n1:GPU-7"], reason="rank 1 on n1:GPU-7 at 0.70 of speed"
        )
        for time in (100.0, 600.0)
    ]
    [advice_on_devices] = advice(None, reports, found)
    assert "most often n1:GPU-7" in advice_on_devices.text
    assert advice_on_devices.saved_s == pytest.approx(150)
    before_accounts = account([launch(0, 0), *reports, of(LaunchExit, time=700.0, status="finished")])
    assert advice(None, reports, before_accounts) == []


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with interruptions."""
    course = Course(2)
    return run_with(tmp_path_factory.mktemp("run"), *Played(course, course.options).events)


def test_the_command_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run_dir), "--what-if", "save_every=5min local=off"])
    text = capsys.readouterr().out
    assert "If it had been save_every=5min local=off" in text
    assert re.search(r"\nETTR +\d+\.\d % +\d+\.\d % +[+-]\d", text)
    with pytest.raises(SystemExit):
        main(["report", str(run_dir), "--what-if", "every=5"])
    assert "--what-if: there is no setting 'every'" in capsys.readouterr().err


def test_the_report(run_dir: Path) -> None:
    found = json.loads(report(run_dir, as_json=True, what_if="mtbf=100"))
    assert found["what_if"]["settings"] == {"mtbf": "100"}
    assert found["what_if"]["replayed_ettr"] == pytest.approx(found["ettr"], abs=0.002)
    keys = {key.partition(".")[2] for key in KEYS["report"] if key.startswith("advice[].")}
    assert all(each.keys() == keys for each in found["advice"])
    assert found["advice"][0]["text"][1:] in report(run_dir)


# -- a real run --------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_real_run(tmp_path: Path) -> None:
    """In short runs the start of processes, of which no two take as long, is much; in the benchmark they are longer."""
    from benchmarks import what_if as drills

    options = {"steps": 600, "step_s": 0.1, "save_every_s": 3, "faults": drills.kills(25, 50)}
    drill = drills.Drill("save_every=20", options, {"save_every_s": 20})
    for run in ("a", "b"):
        drills.train(drill, run, tmp_path / run)
    recorded, predicted, known, truth = drills.outcome(drill, tmp_path)
    assert abs(predicted - truth) < abs(recorded - truth)
    assert known == pytest.approx(truth, abs=0.02)
