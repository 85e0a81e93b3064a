"""Storage that does not answer at a start says nothing about what lies on it: nothing is moved, nothing begins anew."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_resilience import _files
from lightning_resilience._files import Patience
from lightning_resilience._lightning.lightning_strategies import StrategyTraits
from lightning_resilience.checkpoint import checkpoint_file, resume, shard
from lightning_resilience.fit import checkpoint_selector, context
from lightning_resilience.fit.context import FitContext
from lightning_resilience.run.run_directory import FitDirectory, RunDirectory, StorageFails
from tests.harness import Ranks, result, run
from tests.ledgers import Ledger, read_ledger
from tests.test_exact_resume import make, undisturbed

EVERYWHERE = "/proc/self/cwd/run"
"""A path that can be another directory for every process, as one that not every node has mounted."""


def killed(tmp: Path, **options: Any) -> dict[str, Any]:
    """A run with checkpoints of steps 15 and 20."""
    config = make(tmp, "run", **options)
    (tmp / "here").mkdir()
    stop = {"at": "train", "step": 22, "do": "SIGKILL", "once": True, "rank": 0}
    config |= {"run_dir": EVERYWHERE, "cwd": [str(tmp / "here")] * 2, "events": [stop]}
    assert -signal.SIGKILL in run(config, tmp / "run")[0]
    return config


def untouched(tmp: Path) -> bool:
    """Whether all that there was to resume from is still there, and nothing has begun."""
    here = RunDirectory(tmp / "here" / "run")
    names = [path.name for path in resume.checkpoints(here.fit(0).checkpoints)]
    fresh = [each for each in read_ledger(here.ledger) if each["event"] in ("fresh", "quarantined")]
    return len(names) == 2 and not here.fit(0).quarantine.exists() and len(fresh) == 1


@pytest.mark.slow
def test_a_run_directory_that_one_node_has_not_mounted(tmp_path: Path) -> None:
    options = {"trainer": {"num_nodes": 2}}
    config = killed(tmp_path, **options)
    there = tmp_path / "there"
    there.mkdir()
    apart = {**config, "cwd": [str(tmp_path / "here"), str(there)], "patience_s": 0.3, "own_nodes": True}
    codes, text = run(apart, tmp_path / "run")
    assert 1 in codes
    assert 0 not in codes
    assert "files that rank 0 on node-0 writes are not visible on node-1" in text
    assert list(there.iterdir()) == [], "nothing is begun where the storage ought to be"
    assert untouched(tmp_path)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert "Resuming from step 20" in text
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_one_rank_cannot_read_for_a_while(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}}
    config = killed(tmp_path, **options)
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    (there / "fit-000").mkdir(parents=True)
    for path in [*here.iterdir(), *(here / "fit-000").iterdir()]:
        target = there / path.relative_to(here)
        if path.name == "checkpoints":
            target.symlink_to(target)  # reading in it fails
        elif not target.exists():
            target.symlink_to(path)
    apart = {**config, "cwd": [str(here.parent), str(there.parent)]}
    codes, text = run({**apart, "patience_s": 0.3}, tmp_path / "run")
    assert 1 in codes
    assert 0 not in codes
    assert "The newest checkpoint cannot be read: Rank 1 on" in text
    assert untouched(tmp_path)

    ranks = Ranks(apart, tmp_path / "run")
    deadline = time.monotonic() + 60
    while "retrying for" not in ranks.text()[len(text) :]:
        assert time.monotonic() < deadline, ranks.text()
        time.sleep(0.02)
    os.symlink(here / "fit-000" / "checkpoints", there / "mended")
    os.replace(there / "mended", there / "fit-000" / "checkpoints")
    assert ranks.wait() == [0, 0], ranks.text()
    assert "storage works again" in ranks.text()
    assert "Resuming from step 20" in ranks.text()
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_what_is_unreadable_on_the_node_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is nothing else, the fit does not begin anew beside it."""
    from tests.test_local_checkpoint import Run, ends_well, parts_in

    monkeypatch.setattr(_files, "PATIENCE_S", 0.0)
    memory = Run(tmp_path)
    memory.die(memory.local(), step=14)
    with monkeypatch.context() as patch:
        patch.setattr(shard, "read_identity", lambda path, expected: os.read(-1, 1))
        with pytest.raises(StorageFails, match="some may be intact"):
            memory.fit(memory.local())
    assert len(parts_in(memory.folder)) == 2
    ends_well(memory, memory.local())
    assert memory.resumes == [("local", 12)]


def test_patience_has_an_end_for_all_reads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    patience = Patience()

    def fail() -> None:
        raise OSError(5, "no answer")

    for _ in range(3):
        with pytest.raises(OSError, match="no answer"):
            patience(fail)
    assert 60 <= clock.now < 63
    answers = iter([fail, fail, lambda: 7])
    assert Patience()(lambda: next(answers)()) == 7
    tried_until = clock.now
    for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG):
        error = OSError(number, "waiting does not help")
        with pytest.raises(OSError, match="does not help"):
            Patience()(lambda error=error: (_ for _ in ()).throw(error))
    with pytest.raises(FileNotFoundError):
        Patience()(lambda: Path("/proc/no-such-folder/run").mkdir(parents=True))
    assert clock.now == tried_until


# Simulated: ranks as threads with the very class that ships, on real files, with storage that fails anywhere


class Clock:
    """Nobody sleeps; each thread's time passes by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, time=time.time)
        monkeypatch.setattr(_files, "time", fake)

    @property
    def now(self) -> float:
        return float(getattr(self._own, "now", 0.0))

    def sleep(self, seconds: float) -> None:
        self._own.now = self.now + seconds


@dataclass
class Faults:
    """What happens to reads.

    Attributes:
        until: By rank and step, when a file can be read.
        lost_on_the_way: By rank and step, what arrives damaged although it is intact.
        listing_until: When rank 0 can list the files.
    """

    until: dict[tuple[int, int], float] = field(default_factory=dict)
    lost_on_the_way: set[tuple[int, int]] = field(default_factory=set)
    listing_until: float = 0.0

    @property
    def lasting(self) -> bool:
        return max([self.listing_until, *self.until.values()]) > 60


class Job:
    """Some ranks that start a fit; ``nodes`` says which of them share a node."""

    def __init__(self, folder: Path, nodes: list[list[int]], faults: Faults, clock: Clock) -> None:
        self.folder, self.nodes, self.faults, self.clock = folder, nodes, faults, clock
        self.world_size = world_size = sum(map(len, nodes))
        self.fit = FitDirectory(folder / "fit-000")
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.values: list[Any] = [None] * world_size
        self.rank = threading.local()

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank.number] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def start(self) -> list[Any]:
        """For each rank the step that it resumes from, ``None`` for a fresh start, or the error."""
        found: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            self.rank.number = rank
            try:
                choice = checkpoint_selector.CheckpointSelector.choose(self.chooser(rank), None)
                found[rank] = None if choice is None else resume.step_of(choice[0])
            except StorageFails as error:
                found[rank] = type(error)
            except BaseException as error:
                self.barrier.abort()
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def chooser(self, rank: int) -> checkpoint_selector.CheckpointSelector:
        first = {"is_global_zero": rank == 0, "global_rank": rank, "world_size": self.world_size}
        strategy = SimpleNamespace(
            broadcast=lambda value: self.gather(value)[0], barrier=lambda name: self.gather(0), **first
        )
        trainer = SimpleNamespace(strategy=strategy, max_steps=-1, **first)
        fit = SimpleNamespace(
            trainer=trainer, rank=rank, index=0, folder=self.fit, gather=self.gather, whoami=f"Rank {rank}",
            nodes=self.nodes,
            run=SimpleNamespace(ledger=self.folder / "ledger"), patience=Patience(), metadata={},
            ledger=Ledger(self.folder / "ledger", rank), previous_outcome=None, check_owner=lambda: None,
        )  # fmt: skip
        fit.from_rank_0 = lambda make: FitContext.from_rank_0(fit, make)
        outcome = SimpleNamespace(had_finished=False, finished_before=lambda: False)
        found = checkpoint_selector.CheckpointSelector(fit, outcome)
        found.uses_global = True
        return found

    def reads(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(path: Path, *args: Any, **kwargs: Any) -> Any:
            here = self.rank.number, resume.step_of(path)
            if self.clock.now < self.faults.until.get(here, 0.0):
                raise OSError(116, "Stale file handle", str(path))
            if here in self.faults.lost_on_the_way:
                raise checkpoint_file.CorruptCheckpoint(f"{path} has changed on its way")
            return read(path, *args, **kwargs)

        return reading

    def lists(self, directory: Path) -> list[Path]:
        if self.clock.now < self.faults.listing_until:
            raise OSError(116, "Stale file handle", str(directory))
        return CHECKPOINTS(directory)


CHECKPOINTS, VERIFY, LOAD = resume.checkpoints, resume.verify, checkpoint_file.load


def life(seed: int, folder: Path, intact: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One start, whatever happens; returns how it has ended."""
    chance = random.Random(seed)
    world_size, steps = chance.randrange(1, 4), [10, 20, 30][: chance.randrange(1, 4)]
    times = [0.0, 0.0, 0.0, 5.0, 40.0, 1e9]
    faults = Faults(
        {(rank, step): chance.choice(times) for rank in range(world_size) for step in steps},
        {(rank, step) for rank in range(1, world_size) for step in steps if chance.random() < 0.15},
        chance.choice([0.0, 0.0, 0.0, 5.0, 1e9]),
    )
    nodes = chance.choice([[[*range(world_size)]], [[rank] for rank in range(world_size)], [[0, 2], [1]]])
    nodes = [here for ranks in nodes if (here := [rank for rank in ranks if rank < world_size])]
    job = Job(folder, nodes, faults, Clock(monkeypatch))
    job.fit.create()
    corrupt = {step for step in steps if chance.random() < 0.3}
    for step in steps:
        path = job.fit.checkpoints / resume.checkpoint_name(step)
        path.write_bytes(intact.read_bytes()[: None if step not in corrupt else -20])
    monkeypatch.setattr(checkpoint_selector.lightning_strategies, "traits_of", lambda strategy: StrategyTraits())
    monkeypatch.setattr(resume, "checkpoints", job.lists)
    monkeypatch.setattr(resume, "verify", job.reads(VERIFY))
    monkeypatch.setattr(checkpoint_file, "load", job.reads(LOAD))
    found = job.start()

    about = f"seed {seed}: {found}, {faults}, corrupt: {corrupt}"
    assert all(each == found[0] for each in found), about
    moved = {int(path.name[5:17]) for path in job.fit.quarantine.glob("*") if not path.name.endswith(".txt")}
    there = {resume.step_of(path) for path in CHECKPOINTS(job.fit.checkpoints)}
    assert moved <= corrupt, about
    assert moved | there == set(steps), about
    good = [step for step in steps if step not in corrupt and all(step != lost for _, lost in faults.lost_on_the_way)]
    if found[0] is None:
        assert corrupt == set(steps), f"begun anew beside what is intact, {about}"
        return "fresh"
    if found[0] is StorageFails:
        assert faults.lasting or not good or sum(faults.until.values()) > 60, about
        return "failed"
    assert found[0] == max(good), about
    return "resumed"


@pytest.mark.slow
def test_whatever_fails_nothing_intact_is_moved_and_nothing_begins_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = tmp_path / "intact"
    checkpoint_file.save({"loops": {}}, intact, {"fit": 0})
    ends = [life(seed, tmp_path / f"{seed}", intact, monkeypatch) for seed in range(200)]
    assert {how: ends.count(how) > 10 for how in ("fresh", "failed", "resumed")} == dict.fromkeys(
        ("fresh", "failed", "resumed"), True
    )


class Reads:
    """Counts what the ranks of a job read of checkpoint files, and what of it they hash."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.hashed = [0] * job.world_size, [0] * job.world_size
        reads, hash_blocks = self, checkpoint_file._hash_blocks

        class Counted(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                count = super().readinto(buffer)
                reads.read[job.rank.number] += count or 0
                return count

        def hash_counted(hasher: Any, file: Any, count: int) -> int:
            self.hashed[job.rank.number] += (hashed := hash_blocks(hasher, file, count))
            return hashed

        monkeypatch.setattr(checkpoint_file, "open_regular", lambda path: io.BufferedReader(Counted(path)))
        monkeypatch.setattr(checkpoint_file, "_hash_blocks", hash_counted)


@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]], ids=str)
def test_a_file_is_hashed_once_on_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[list[int]]
) -> None:
    job = Job(tmp_path, nodes, Faults(), Clock(monkeypatch))
    job.fit.create()
    monkeypatch.setattr(checkpoint_selector.lightning_strategies, "traits_of", lambda strategy: StrategyTraits())
    path = job.fit.checkpoints / resume.checkpoint_name(10)
    size = checkpoint_file.save({"loops": {}, "state_dict": {"weight": torch.rand(1 << 20)}}, path, {"fit": 0}).size
    reads = Reads(job, monkeypatch)
    assert job.start() == [10] * 4
    for ranks in nodes:
        assert sum(reads.hashed[rank] for rank in ranks) == size - 2  # all but the length of the trailer
        whole = sum(reads.read[rank] for rank in ranks) / size
        assert whole < 1 + len(ranks) + 0.5, "once to verify it, and once on each rank to load it"


def test_a_file_that_another_one_has_replaced_meanwhile_is_verified_by_who_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, [[0, 1, 2]], Faults(), Clock(monkeypatch))
    job.fit.create()
    monkeypatch.setattr(checkpoint_selector.lightning_strategies, "traits_of", lambda strategy: StrategyTraits())
    for step in (10, 20):
        checkpoint_file.save({"loops": {}}, job.fit.checkpoints / resume.checkpoint_name(step), {"fit": 0})

    def load(path: Path, **options: Any) -> Any:
        if job.rank.number == 2 and resume.step_of(path) == 20:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1  # what torch.load does not look at
            (tmp_path / "other").write_bytes(content)
            os.replace(tmp_path / "other", path)
        return LOAD(path, **options)

    monkeypatch.setattr(checkpoint_file, "load", load)
    assert job.start() == [10] * 3


@pytest.mark.parametrize(
    ("number", "then"),
    [(errno.EIO, "start again when the storage responds"), (errno.EEXIST, "look at that path")],
)
def test_what_to_do_depends_on_what_failed(monkeypatch: pytest.MonkeyPatch, number: int, then: str) -> None:
    def make() -> None:
        raise OSError(number, os.strerror(number), "run")

    monkeypatch.setattr(context.checkpoint_io, "from_rank_zero", lambda strategy, attempt: attempt())
    trainer: Any = SimpleNamespace(global_rank=0, strategy=None)
    with pytest.raises(StorageFails, match=f"'run'. Nothing was moved: {then}"):
        context.from_rank_0(trainer, make, lambda action, who: action())  # type: ignore[arg-type]
