"""What the training has left behind does not come back, from whichever node, and what is bad does not eat all tries."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as L
import pytest

from lightning_resilience import NaNGuard
from lightning_resilience.agreement_protocol import Needs
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.checkpoint.generations import ShardInfo, generations, is_on_course
from lightning_resilience.fit import joining
from lightning_resilience.fit.checkpoint_selector import MAX_MARKED_BAD, BadCheckpoint
from lightning_resilience.fit.numerics_policy import TrainingDiverged
from lightning_resilience.run.run_directory import RunDirectory
from tests.participants import GoesBack
from tests.test_local_checkpoint import Run, ends_well, ledger, mark_bad, parts_in, spoil, steps_in, watched


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def checkpoint_of(run: Run, step: int) -> Path:
    return RunDirectory(run.path).fit(0).checkpoints / resume.checkpoint_name(step)


def go_back(until: int) -> Callable[[L.Trainer], None]:
    """Has the fit go back, at the next boundary."""

    def ask(trainer: L.Trainer) -> None:
        active = joining._active
        assert active is not None
        active.fit.participants.add(GoesBack(active, until, lambda: pytest.fail("nowhere to go")))
        active.fit.agreement.request("back", {}, Needs.CLEAN | Needs.TRAINING)

    return ask


# On two nodes, each with a folder of its own


def test_a_state_of_before_a_rollback_does_not_come_back_from_another_node(run: Run) -> None:
    """On node A to 14; from step 6 on anew on node B; then on A again, whose memory still holds step 12."""
    on_a, on_b = run.folder / "a", run.folder / "b"
    run.die(run.resume(6), run.local(dir=on_a), step=14)
    assert steps_in(on_a) == [9, 12]
    run.die(run.resume(6), run.local(dir=on_b), step=10, ckpt_path=checkpoint_of(run, 6))
    assert steps_in(on_b) == [9]
    ends_well(run, run.resume(6), run.local(dir=on_a))
    assert run.resumes == [("global", 6)]
    assert RunDirectory(run.path).fit(0).forks == [6]


def test_a_state_of_before_going_back_does_not_come_back_from_another_node(run: Run) -> None:
    on_a, on_b = run.folder / "a", run.folder / "b"
    run.die(run.resume(6, keep=5), run.local(dir=on_a), step=14)
    run.die(run.resume(6, keep=5), run.local(dir=on_b), step=10, at={13: go_back(7)})
    assert run.resumes == [("global", 12)]
    ends_well(run, run.resume(6, keep=5), run.local(dir=on_a))
    assert run.resumes == [("global", 12), ("global", 6)]
    assert RunDirectory(run.path).fit(0).forks == [6]


def test_what_lies_on_the_way_counts_on_every_node(run: Run) -> None:
    """A state of a course that was left later on is one of this course too."""
    on_a, on_b = run.folder / "a", run.folder / "b"
    run.die(run.resume(6, keep=5), run.local(dir=on_a, every_n_train_steps=1, keep=9), step=14)
    run.die(run.resume(6, keep=5), run.local(dir=on_b, every_n_train_steps=1), step=9, at={13: go_back(7)})
    assert steps_in(on_b) == [8, 9]
    shutil.move(on_b, run.folder / "away")
    run.die(run.resume(6, keep=5), run.local(dir=on_a, every_n_train_steps=1), step=8)
    shutil.move(run.folder / "away", on_b)
    ends_well(run, run.resume(6, keep=5), run.local(dir=on_b, every_n_train_steps=1))
    assert run.resumes[1:] == [("local", 6), ("local", 9)]


# Bad ones


class Condemns(L.Callback):
    """Finds out two steps after a resume that the training has gone wrong."""

    def __init__(self, run: Run, steps: tuple[int, ...]) -> None:
        self.run, self.steps = run, steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        active = joining._active
        assert active is not None
        loaded = active.selector.loaded
        if loaded is not None and loaded.step in self.steps and trainer.global_step == loaded.step + 2:
            mark_bad(active, "found late")


def test_what_has_come_from_a_condemned_state_is_not_resumed_from(run: Run) -> None:
    run.die(run.local(), step=14)
    with pytest.raises(BadCheckpoint):
        run.fit(run.local(every_n_train_steps=1, keep=4), Condemns(run, (12,)))
    assert 13 in steps_in(run.folder)
    ends_well(run, run.local(), Condemns(run, (12,)))
    assert run.resumes == [("local", 12), ("local", 9)]


def test_a_global_one_that_has_come_from_a_condemned_state_is_not_resumed_from(run: Run) -> None:
    run.die(run.resume(6), step=14)
    with pytest.raises(BadCheckpoint):
        run.fit(run.resume(1, keep=5), Condemns(run, (12,)))
    assert checkpoint_of(run, 13).exists()
    ends_well(run, run.resume(6), Condemns(run, (12,)))
    assert run.resumes == [("global", 12), ("global", 6)]


def test_states_behind_a_condemned_one_with_nothing_to_go_back_to_count(run: Run) -> None:
    """Those before do not."""
    went_on: list[bool] = []

    def condemn(trainer: L.Trainer) -> None:
        active = joining._active
        assert active is not None
        assert active.selector.mark_bad("found late", trainer.global_step) is None
        active.fit.participants.add(GoesBack(active, 6, lambda: went_on.append(True)))
        active.fit.agreement.request("back", {}, Needs.CLEAN | Needs.TRAINING)

    run.die(run.local(), step=5)
    run.die(run.local(every_n_train_steps=1, keep=9), step=9, at={5: condemn})
    assert (went_on, run.resumes) == ([True], [("local", 3)])
    assert RunDirectory(run.path).fit(0).forks == [3]
    assert steps_in(run.folder)[-1] == 9
    ends_well(run, run.local(keep=9))
    assert run.resumes[1:] == [("local", 9)]


def test_a_checkpoint_under_the_name_of_another_step_is_not_resumed_from(run: Run) -> None:
    run.die(run.resume(6), step=8)
    shutil.copy(checkpoint_of(run, 6), checkpoint_of(run, 7))
    ends_well(run, run.resume(6))
    assert run.resumes == [("global", 6)]
    (reason,) = RunDirectory(run.path).fit(0).quarantine.glob("*.reason.txt")
    assert "its step is 6, not 7" in reason.read_text()


def with_bad_local_ones(run: Run) -> None:
    """A run with so many bad local states as may be marked bad, and one more, and a good global one of before."""
    run.die(run.resume(1), step=3)
    run.die(run.local(keep=MAX_MARKED_BAD + 1), step=16)
    assert steps_in(run.folder) == [6, 9, 12, 15]
    for path in parts_in(run.folder):
        spoil(path)


def test_local_states_leave_the_global_one_a_try(run: Run) -> None:
    with_bad_local_ones(run)
    options = {"keep": MAX_MARKED_BAD + 1}
    for _ in range(MAX_MARKED_BAD):
        with pytest.raises(BadCheckpoint):
            run.fit(run.resume(), *watched(run, **options))
        assert run.outcome.status == "failed"
    ends_well(run, run.resume(), *watched(run, **options))
    assert run.resumes == [("local", 15), ("local", 12), ("local", 9), ("global", 3)]


@pytest.mark.slow
def test_a_bad_global_state_ends_the_run_when_none_is_left(run: Run) -> None:
    with_bad_local_ones(run)
    for path in resume.checkpoints(RunDirectory(run.path).fit(0).checkpoints):
        state = checkpoint_file.load(path)
        state["state_dict"]["layers.0.weight"][0] = float("nan")
        checkpoint_file.save(state, path, {"fit": 0})
    for number in range(MAX_MARKED_BAD + 2):
        with pytest.raises(BadCheckpoint):
            run.fit(run.resume(), *watched(run, keep=MAX_MARKED_BAD + 1))
        assert run.outcome.status == ("halted" if number == MAX_MARKED_BAD + 1 else "failed")
    assert [tier for tier, _ in run.resumes] == ["local"] * 3 + ["global"] * 2
    assert "5 checkpoints of this fit were marked bad" in run.outcome.reason


@pytest.mark.parametrize("max_rollbacks", [1, 2])
@pytest.mark.slow_but_for("2")
def test_going_back_to_local_states_leaves_the_global_one_a_try(run: Run, max_rollbacks: int) -> None:
    with_bad_local_ones(run)
    guard = NaNGuard("rollback", max_rollbacks=max_rollbacks)
    ends_well(run, run.resume(), run.local(keep=MAX_MARKED_BAD + 1), guard)
    went = [(each["tier"], each["step"]) for each in ledger(run.path, "went_back")]
    assert went == [*[("local", 12), ("local", 9)][:max_rollbacks], ("global", 3)]


def test_going_back_still_ends(run: Run) -> None:
    """When the global one is no better, and without one."""
    with_bad_local_ones(run)
    for path in resume.checkpoints(RunDirectory(run.path).fit(0).checkpoints):
        path.unlink()
    with pytest.raises(TrainingDiverged, match="has gone back 1 times"):
        run.fit(run.resume(), run.local(keep=4), NaNGuard("rollback", max_rollbacks=1))


# Simulated: what each state has come from is known, and no state counts that has not come the way that was decided


@dataclass(frozen=True)
class State:
    """Identifies what has led to it: for each step the course on which it was made. Else the training is exact."""

    course: int
    way: tuple[int, ...]


@dataclass
class World:
    chance: random.Random
    forks: list[int] = field(default_factory=list)
    way: tuple[int, ...] = ()
    nodes: dict[str, dict[str, State]] = field(default_factory=lambda: {"a": {}, "b": {}, "c": {}})
    names: int = 0
    filters: bool = True

    @property
    def step(self) -> int:
        return len(self.way)

    def course_of(self, step: int) -> int:
        course = len(self.forks)
        while course and step <= self.forks[course - 1]:
            course -= 1
        return course

    def train(self, node: str) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            self.way = (*self.way, self.course_of(self.step + 1))
            if self.chance.random() < 0.5:
                self.names += 1
                self.nodes[node][f"{self.names:08x}"] = State(len(self.forks), self.way)

    def resume(self, node: str, before: tuple[int, ...]) -> None:
        """A new process on a node; the states of the others are not there."""
        holdings = [
            ShardInfo(node, len(state.way), name, "rank-00000", 1, 1, "whole", 0, course=state.course)
            for name, state in self.nodes[node].items()
        ]
        found = [
            each
            for each in generations(holdings)
            if not each.missing and (not self.filters or is_on_course(self.forks, each.course, each.step))
        ]
        self.way = self.nodes[node][found[0].name].way if found else ()
        # It was decided at each fork which way the training goes: what it goes on from now is on that way.
        assert self.way[: len(before)] == before[: len(self.way)], (self.forks, self.way, before)

    def go_back(self) -> tuple[int, ...]:
        step = self.chance.randrange(self.step + 1)
        self.forks.append(step)
        self.way = self.way[:step]
        return self.way


def live(seed: int, filters: bool = True) -> int:
    world = World(random.Random(seed), filters=filters)
    decided: tuple[int, ...] = ()
    node = "a"
    for _ in range(40):
        what = world.chance.choice(["train", "train", "move", "back"])
        if what == "train":
            world.train(node)
        elif what == "move":
            node = world.chance.choice("abc")
            world.resume(node, decided)
        elif world.step:
            decided = world.go_back()
    return len(world.forks)


def test_whatever_nodes_come_and_go_the_training_stays_on_its_course() -> None:
    assert sum(live(seed) for seed in range(1000)) > 1000


def test_the_simulation_finds_what_it_is_for() -> None:
    with pytest.raises(AssertionError):
        sum(live(seed, filters=False) for seed in range(1000))
