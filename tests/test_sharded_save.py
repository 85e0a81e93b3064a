"""Global saves of sharded strategies: each rank writes its shards, all publish one directory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from lightning_resilience.checkpoint import checkpoint_file, resume, store_messages
from lightning_resilience.checkpoint.sharded_save import Outcome, Save, ShardedSaves
from lightning_resilience.checkpoint.store_messages import StoreMessages
from lightning_resilience.run.run_directory import RunDirectory, StaleAttempt
from tests.harness import Ranks, result, run, run_command, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import killed_and_resumed, make, undisturbed

OPTIONS: dict[str, Any] = {"sharded": True, "trainer": {"devices": 2}}
ASYNC: dict[str, Any] = {**OPTIONS, "async_save": True, "step_s": 0.02}


# Ranks that are threads


class Job:
    """Ranks that save together, each in a thread."""

    def __init__(self, folder: Path, world_size: int = 3) -> None:
        self.folder, self.world_size = folder, world_size
        self.store = torch.distributed.HashStore()
        self.gathered: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self.owner: Callable[[], None] = lambda: None
        self.messages = [StoreMessages(lambda: self.store) for _ in range(world_size)]
        self.saves = [
            ShardedSaves(rank, world_size, messages, self.gather(rank), lambda: self.owner())
            for rank, messages in enumerate(self.messages)
        ]
        self.state = {"module": {f"rank{rank}": torch.full((3,), float(rank)) for rank in range(world_size)}}

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.gathered[rank] = value
            self.barrier.wait(20)
            gathered = list(self.gathered)
            self.barrier.wait(20)
            return gathered

        return gather

    def save(
        self, step: int, absent: tuple[int, ...] = (), part: Callable[[int, Any], Any] = lambda rank, own: own
    ) -> list[Outcome]:
        path = self.folder / resume.checkpoint_name(step)
        save = Save(path, self.folder / f".{path.name}.tmp", {"fit": 0, "step": step})
        outcomes: list[Outcome] = [Outcome("failed", "absent")] * self.world_size

        def act(rank: int) -> None:
            draft = self.saves[rank].draft(self.state)
            own = self.saves[rank].part(draft, any(self.gather(rank)(draft.is_new)))
            if rank not in absent:
                outcomes[rank] = self.saves[rank].write(save, part(rank, own), {"rest": step})

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "it waits for ever"
        return outcomes

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def check(self, step: int) -> None:
        path = self.folder / resume.checkpoint_name(step)
        assert resume.verify(path, {"fit": 0, "step": step})
        state = {"module": {name: torch.zeros(3) for name in self.state["module"]}}
        torch_dcp.load(state, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(state["module"][name], tensor) for name, tensor in self.state["module"].items())
        assert torch.load(path / "meta.pt", weights_only=True) == {"rest": step}


def test_all_write_and_one_directory_is_published(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in (1, 2, 2):  # the last one in the place of one that is there
        assert job.save(step) == [Outcome("published")] * 3
        job.check(step)
    assert job.names == [resume.checkpoint_name(1), resume.checkpoint_name(2)]
    assert len(list((tmp_path / job.names[0]).glob("*.distcp"))) == 3
    assert job.store.num_keys() <= 2, "what was said is cleared away"


def test_shapes_that_change_are_planned_anew(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(1)
    job.state["module"]["rank1"] = torch.ones(5)
    job.state["module"].pop("rank2")
    assert job.save(2) == [Outcome("published")] * 3
    stored = {"module": {"rank0": torch.zeros(3), "rank1": torch.zeros(5)}}
    torch_dcp.load(stored, checkpoint_id=tmp_path / resume.checkpoint_name(2), no_dist=True)
    assert torch.equal(stored["module"]["rank1"], torch.ones(5))


def refuse(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


FAILURES: dict[str, Any] = {
    "one rank's copy was no good": (lambda rank, own: None if rank == 1 else own, "invalidated", ""),
    "rank 0's copy was no good": (lambda rank, own: None if rank == 0 else own, "invalidated", ""),
    "a value is missing": (lambda rank, own: {} if rank == 2 else own, "failed", "rank 2: KeyError"),
    "both": (lambda rank, own: [own, None, {}][rank], "failed", "rank 2: KeyError"),
}


@pytest.mark.parametrize(("part", "how", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_what_goes_wrong_on_one_rank_is_known_to_all_and_nothing_is_published(
    tmp_path: Path, part: Any, how: str, reason: str
) -> None:
    job = Job(tmp_path)
    outcomes = job.save(1, part=part)
    assert len(set(outcomes)) == 1
    assert outcomes[0].how == how
    assert outcomes[0].reason.startswith(reason)
    assert job.names == []
    assert job.save(2) == [Outcome("published")] * 3
    job.check(2)


def test_what_goes_wrong_while_it_is_published_is_known_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.save(1)

    def taken_over() -> None:
        raise StaleAttempt("another attempt owns the run")

    job.owner = taken_over
    assert job.save(2) == [Outcome("stale", "another attempt owns the run")] * 3
    job.owner = lambda: None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", refuse)
        outcomes = job.save(3)
    assert {each.how for each in outcomes} == {"failed"}
    assert job.names == [resume.checkpoint_name(1)]
    assert job.save(4) == [Outcome("published")] * 3


def test_one_that_cannot_take_the_place_of_another_leaves_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, replace = Job(tmp_path), os.replace
    job.save(1)
    path = tmp_path / resume.checkpoint_name(1)

    def fails_once(source: Any, target: Any) -> None:
        if Path(target) == path:
            monkeypatch.setattr(os, "replace", replace)
            refuse()
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    assert {each.how for each in job.save(1)} == {"failed"}
    job.check(1)
    assert job.names == [path.name]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_messages, "_LAST_WORDS_S", 0.3)
    job = Job(tmp_path)
    for each in job.messages:  # their fit has failed
        each.hurry()
    outcomes = job.save(1, absent=(gone,))
    assert {each.how for each in outcomes} == {"failed"}
    assert resume.checkpoints(tmp_path) == []


def test_storage_that_is_not_shared_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each node has its own run directory, the shards of the others are not there."""
    job = Job(tmp_path)
    hash_file = checkpoint_file.hash_file

    def elsewhere(path: Path, *args: Any, **kwargs: Any) -> Any:
        digest = hash_file(path, *args, **kwargs)
        if path.name.startswith("__2_"):
            path.unlink()
        return digest

    monkeypatch.setattr(checkpoint_file, "hash_file", elsewhere)
    outcomes = job.save(1)
    assert len(set(outcomes)) == 1
    assert outcomes[0].how == "failed"
    assert "__2_0.distcp" in outcomes[0].reason
    assert job.names == []


# Two ranks of FSDP2


def saved(config: dict[str, Any]) -> list[int]:
    events = read_ledger(RunDirectory(config["run_dir"]).ledger)
    return [event["step"] for event in events if event["event"] == "saved"]


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_a_full_disk_and_a_bad_copy_on_one_rank_cost_that_save_only(tmp_path: Path, async_save: bool) -> None:
    options = {**ASYNC, "async_save": async_save, "step_s": 0.04, "save_every": 10}
    config = make(tmp_path, "run", disk_full_at=10, disk_full_rank=1, touches=[1, 20], keep=20, **options)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert "The checkpoint of step 10 could not be saved (rank 1: OSError: [Errno 28] No space left" in text
    assert text.count("could not be saved") == 1
    steps = saved(config)
    assert 10 not in steps
    assert steps[-1] == 48, text
    if async_save:
        assert 20 not in steps, "the parameters of rank 1 were written to while they were copied"
        assert set(range(21, 48)) & set(steps), "it is taken again"
    fit = RunDirectory(config["run_dir"]).fit(0)
    for path in resume.checkpoints(fit.checkpoints):
        resume.verify(path, {"fit": 0, "step": resume.step_of(path)})
    assert {path.suffix for path in fit.checkpoints.iterdir()} == {".ckpt"}, "nothing is left of what was not published"
    assert result(config) == undisturbed(tmp_path, **{**OPTIONS, "save_every": 10})[0]


@pytest.mark.slow
def test_a_run_that_was_taken_over_ends_on_all_ranks_and_publishes_nothing(tmp_path: Path) -> None:
    config = make(tmp_path, "run", taken_over_at=12, **ASYNC)
    codes, text = run(config, tmp_path / "run")
    assert codes == [1, 1], text
    assert "it stops without writing" in text
    assert all(step <= 10 for step in saved(config))


@pytest.mark.slow
def test_preempted_while_one_is_being_written(tmp_path: Path) -> None:
    """And before it can end the training has ended: both are waited for, in their order."""
    events = [
        {"at": "train", "step": 21, "rank": 1, "do": "SIGTERM"},
        {"at": "train", "step": 30, "do": "sleep", "seconds": 1.5},  # on a busy machine the ranks agree no sooner
    ]
    options = {**ASYNC, "slow_shards_s": [3, 2], "save_every": 20}
    done = killed_and_resumed(tmp_path, events, **options)
    assert done[:2] == undisturbed(tmp_path, **{**OPTIONS, "save_every": 20})
    steps = saved({"run_dir": str(tmp_path / "disturbed" / "run")})
    assert steps[0] == 20
    assert 20 < steps[1] < 40, "that of the stop"
    assert steps[-1] == 48


@pytest.mark.campaign
def test_strategies_that_gather_for_the_user_resume_from_shards(tmp_path: Path) -> None:
    """``save_distributed_checkpoint=False`` is about the checkpoints of the script: a run's own are its shards."""
    options = {**OPTIONS, "sharded": "whole file"}
    done = killed_and_resumed(tmp_path, [{"at": "train", "step": 23, "rank": 1}], **options)
    assert done[0] == undisturbed(tmp_path, **OPTIONS)[0]


@pytest.mark.campaign
def test_a_learning_rate_of_numpy(tmp_path: Path) -> None:
    """As a schedule that calculates with NumPy makes it: DCP would pickle it, and a safe load refuse it."""
    options = {**OPTIONS, "numpy_rate": True}
    done = killed_and_resumed(tmp_path, [{"at": "train", "step": 23, "rank": 0}], **options)
    assert done[:2] == undisturbed(tmp_path, **options)
    assert "Resuming from step 20" in done[2]


OPENED = """
import sys
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

path, out = sys.argv[1:]
assert "lightning_resilience" not in sys.modules
dcp_to_torch_save(path, out)
whole = torch.load(out, weights_only=True)
rest = torch.load(f"{path}/meta.pt", weights_only=True)
print(rest["global_step"], sorted(whole), sorted(whole["state_dict"])[:2], len(whole["optimizer_0"]["state"]))
model = torch.nn.Linear(8, 32)
state = {"state_dict": {"net.0.weight": torch.zeros_like(whole["state_dict"]["net.0.weight"])}}
dcp.load(state, checkpoint_id=path, no_dist=True)
assert torch.equal(state["state_dict"]["net.0.weight"], whole["state_dict"]["net.0.weight"])
"""


@pytest.mark.slow
def test_opens_without_this_package(tmp_path: Path) -> None:
    """By PyTorch, as docs/checkpoints.md says, and by plain Lightning, which resumes from it."""
    config = make(tmp_path, "run", keep=9, **ASYNC)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    checkpoints = resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)
    path = next(each for each in checkpoints if not resume.is_final(each))
    step = resume.step_of(path)
    assert sorted(each.name for each in path.iterdir()) == [
        ".metadata", "COMPLETE", "__0_0.distcp", "__1_0.distcp", "meta.pt"
    ]  # fmt: skip
    done = run_command([sys.executable, "-c", OPENED, str(path), str(tmp_path / "whole.pt")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{step} ['optimizer_0', 'state_dict'] ['average', 'net.0.bias'] 6\n"
    plain = make(tmp_path, "plain", callbacks=[], ckpt_path=str(path), **OPTIONS)
    codes, text = run(plain, tmp_path / "plain")
    assert codes == [0, 0], text
    assert result(plain)[0]["step"] == 48


def survive(tmp: Path, seed: int, kills: int, batches: int) -> int:
    """Trains under the recipe ``preemptible`` with SIGKILLs at random instants; returns how many hit.

    Mostly the machine goes with the process, and with it what is in its memory.
    """
    chance = random.Random(seed)
    local = tmp / "memory"
    options: dict[str, Any] = {**OPTIONS, "batches": batches}
    reference = undisturbed(tmp, **options)
    recipe = {"recipe": "preemptible", "save_every": None, "interval_s": 0.1, "local": {"dir": str(local)}}
    config = make(tmp, "disturbed", step_s=0.02, **options, **recipe)
    ledger = RunDirectory(config["run_dir"]).ledger
    killed = 0
    while killed < kills and not Path(config["out"]).exists():
        ranks = Ranks(config, tmp / "disturbed")
        began = len(list(read_ledger(ledger)))
        while len(list(read_ledger(ledger))) == began and all(each.is_alive() for each in ranks.processes):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 1.5))
        victims = [chance.randrange(2)] if chance.random() < 0.7 else [0, 1]
        for rank in victims:
            if ranks.processes[rank].is_alive():
                os.kill(ranks.processes[rank].pid, signal.SIGKILL)
        killed += set(ranks.wait(60)) != {0}
        if chance.random() < 0.8:
            shutil.rmtree(local, ignore_errors=True)
    for _ in range(3):
        if not Path(config["out"]).exists():
            codes = Ranks(config, tmp / "disturbed").wait(100)
            assert set(codes) == {0}, (tmp / "disturbed" / "output").read_text()
    assert (result(config), samples(config)) == reference
    fit = RunDirectory(config["run_dir"]).fit(0)
    assert not fit.quarantine.exists(), "nothing was ever published that is not whole"
    return killed


@pytest.mark.slow
def test_killed_twice_under_the_recipe(tmp_path: Path) -> None:
    assert survive(tmp_path, seed=0, kills=2, batches=24) > 0


@pytest.mark.campaign
def test_killed_twenty_times_under_the_recipe(tmp_path: Path) -> None:
    assert survive(tmp_path, seed=1, kills=20, batches=300) == 20
