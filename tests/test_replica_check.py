"""Ranks that hold another state than the others: found, named, kept out of every checkpoint, and undone."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lightning_resilience.checkpoint import digest
from lightning_resilience.checkpoint.digest import Digest, digest_of
from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.detect.numerics.rollback_history import REFILL_STEPS, Rollbacks
from lightning_resilience.fit.replica_comparison import ReplicaComparison
from lightning_resilience.recipes import RECIPE_VARIABLE
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make
from tests.test_local_checkpoint import Job, announced_right_before, are_of, bring_back  # noqa: F401


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """One bit, as a particle would: nothing counts that write."""
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    content[chance.randrange(content.size)] ^= 1 << chance.randrange(8)


# Digests

TENSORS = {
    "float32": lambda: torch.randn(300, generator=torch.Generator().manual_seed(0)),
    "bfloat16": lambda: torch.randn(301, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "float64": lambda: torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double(),
    "bool": lambda: torch.arange(70) % 3 == 0,
    "a number": lambda: torch.tensor(3.0),
    "not in order": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
}


def on_host(tensor: torch.Tensor) -> str:
    return digest_of([tensor])


def as_on_a_device(tensor: torch.Tensor) -> str:
    """What a device computes; the host does the same more slowly."""
    return str(int(digest._weighted_sum([digest._flat(tensor)], tensor.device)))


@pytest.mark.parametrize("of", [on_host, as_on_a_device])
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_every_bit_counts(make: Callable[[], torch.Tensor], of: Callable[[torch.Tensor], str]) -> None:
    tensor = make()
    flat = digest._flat(tensor).clone()
    content = flat.view(torch.uint8)
    found = {of(flat)}
    assert of(tensor) == of(flat)
    for place in range(0, content.numel(), max(1, content.numel() // 40)):
        for bit in range(8):
            content[place] ^= 1 << bit
            found.add(of(flat))
            content[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(range(0, content.numel(), max(1, content.numel() // 40)))


@pytest.mark.parametrize("of", [on_host, as_on_a_device])
def test_what_a_plain_sum_would_not_see(of: Callable[[torch.Tensor], str]) -> None:
    one = torch.arange(1.0, 200_001.0)
    swapped, negative, moved = one.clone(), one.clone(), one.roll(1 << 16)
    swapped[3], swapped[70_000] = one[70_000], one[3]
    negative[torch.tensor([4, 5, 100_000, 150_000])] *= -1
    assert len({of(each) for each in (one, swapped, negative, moved)}) == 4


def test_large_tensors_are_taken_in_pieces_and_small_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_COLUMNS", 64)
    monkeypatch.setattr(digest, "_ROWS", 4)
    chance = random.Random(1)
    tensors = [torch.randn(size) for size in (1000, 3, 3, 256, 255, 1, 700, 64)]
    sizes = [piece.numel() for piece in digest._pieces(tensors)]
    assert sum(sizes) == sum(tensor.numel() for tensor in tensors)
    assert max(sizes) <= 256
    before = int(digest._weighted_sum(tensors, torch.device("cpu")))
    for tensor in tensors:
        flip(tensor, chance)
        now = int(digest._weighted_sum(tensors, torch.device("cpu")))
        assert now != before
        before = now


def test_it_is_the_content_that_counts_not_where_it_lies() -> None:
    one, other = torch.randn(40), torch.randn(7)
    added = Digest()
    added.add([one, torch.empty(3, device="meta"), torch.empty(0)])
    added.add([other])
    assert added.hexdigest() == digest_of([one.clone(), other.clone().requires_grad_()])
    assert added.hexdigest() != digest_of([other, one])


# Who it is


@pytest.mark.parametrize(
    ("digests", "suspects", "says"),
    [
        ("aab", (2,), "rank 2 holds a different state than the other 2 ranks"),
        ("ab", (), "ranks 0 and 1 hold different states: one of the two is wrong, and it is unknown which"),
        ("aabb", (), "without a majority it is unknown which is wrong: ranks 0, 1 from ranks 2, 3"),
        ("abc", (), "without a majority it is unknown which is wrong: rank 0 from rank 1 from rank 2"),
        ("abaca", (1, 3), "ranks 1, 3 hold a different state than the other 3 ranks"),
        ("-aba", (2,), "rank 2 holds a different state than the other 2 ranks"),
        ("b" + "a" * 999, (0,), "rank 0 holds a different state than the other 999 ranks"),
    ],
)
def test_the_majority_names_the_rank(digests: str, suspects: tuple[int, ...], says: str) -> None:
    found = Divergence.between(7, [each.strip("-") for each in digests])
    assert found is not None
    assert found.suspects == suspects
    assert says in str(found)


@pytest.mark.parametrize(
    ("digests", "shards", "groups"),
    [
        ("abab", 2, None),
        ("ababac", 2, ((1, 3), (5,))),
        ("abcb", 2, ((0,), (2,))),
        ("abcabdabd", 3, ((5, 8), (2,))),
        ("abab-b", 2, None),
        ("ab", 2, None),
    ],
)
def test_those_are_compared_that_hold_the_same_shard(digests: str, shards: int, groups: Any) -> None:
    found = Divergence.between(7, [each.strip("-") for each in digests], shards)
    assert (found and found.groups) == groups


@pytest.mark.parametrize("digests", ["aaa", "a", "-aa", "---", "-a"])
def test_where_nobody_differs_there_is_nothing_to_say(digests: str) -> None:
    assert Divergence.between(7, [each.strip("-") for each in digests]) is None


def test_replicas_differ_from_when_it_is_known_until_the_run_has_gone_back() -> None:
    session = MagicMock()
    session.fit.replicas_differ = False
    comparison = ReplicaComparison(session, max_rollbacks=1, optional=False)
    comparison.on_event_known(SimpleNamespace(kind="another event"))
    assert not session.fit.replicas_differ
    comparison.on_event_known(SimpleNamespace(kind="replicas differ"))
    assert session.fit.replicas_differ
    comparison.after_rollback()
    assert not session.fit.replicas_differ


def test_rollbacks_are_counted_by_trouble() -> None:
    rollbacks = Rollbacks()
    assert [rollbacks.add(step) for step in (10, 8, 10 + REFILL_STEPS)] == [1, 2, 3]
    assert rollbacks.add(11 + 2 * REFILL_STEPS) == 1


# Local saves, of several ranks in one process


def flipped_once(folder: Path, world_size: int, chance: random.Random) -> None:
    """One bit of one rank, at any moment of a step; the next save finds it, and what is left is from before."""
    nodes = chance.choice([1, 2]) if world_size % 2 == 0 else 1
    ranks = rank_locations([(f"n{rank % nodes}", rank % nodes) for rank in range(world_size)])
    job = Job(folder, ranks, every=2)
    victim = job.ranks[chance.randrange(world_size)]
    try:
        job.train(chance.randrange(7, 11))
        advance, in_a_step = victim.model.advance, chance.random() < 0.5

        def advance_and_flip() -> None:
            victim.model.advance = advance  # type: ignore[method-assign]
            if in_a_step:  # what is being saved is being read
                flip(chance.choice(victim.model.live()), chance)
            advance()
            if not in_a_step:
                flip(chance.choice(victim.model.live()), chance)

        clean = victim.model.steps
        victim.model.advance = advance_and_flip  # type: ignore[method-assign]
        job.train(1)
        other = next(rank for rank in job.ranks if rank is not victim)
        until = time.monotonic() + 30
        while not job.ranks[0].divergences and time.monotonic() < until:  # a save is compared behind the training
            if all(map(torch.equal, victim.model.live(), other.model.live())):
                return  # rounding has taken it away before a save
            job.train(1)
        (found,) = job.ranks[0].divergences
        assert found.step <= clean + 2 + in_a_step, "by the next save"
        mine = (victim.saves._location.rank,)
        assert found.suspects == (mine if world_size > 2 else ())
        assert mine in found.groups
        assert all(max(rank.saved, default=0) <= clean for rank in job.ranks), "what differs does not count"
    finally:
        job.stop()
    tried, _, states, _ = bring_back(folder, ranks)
    assert tried[0] <= clean
    assert are_of(tried[0], states), "no rank has anything of the other state"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_flipped_bit_is_found_by_the_next_local_save(world_size: int, tmp_path: Path) -> None:
    chance = random.Random(world_size)
    for number in range(4):
        flipped_once(tmp_path / str(number), world_size, chance)


def test_what_one_rank_writes_in_the_middle_of_a_step_is_no_difference(tmp_path: Path) -> None:
    """Its snapshot is thrown away; from then on each rank keeps that for itself, and what they save is complete."""
    job = Job(tmp_path, rank_locations([("a", 0)] * 3))
    writer = job.ranks[2]
    take = writer.saves.take

    def touch(planned: Any, step: int, *args: Any) -> list[str]:
        left_out = take(planned, step, *args)
        if step == 12:
            writer.model.parameters[2].add_(0)
        return left_out

    writer.saves.take = touch  # type: ignore[method-assign]
    with torch.no_grad():
        job.train(21)
    job.stop()
    assert job.ranks[0].saved == [4, 8, 16, 20]
    assert not job.ranks[0].divergences
    tried, _, states, _ = bring_back(tmp_path, rank_locations([("a", 0)] * 3))
    assert tried == [20]
    assert are_of(20, states)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "steps"), [(2, 60_000), (4, 40_000)])
def test_in_a_hundred_thousand_healthy_steps_nobody_is_accused(world_size: int, steps: int, tmp_path: Path) -> None:
    job = Job(tmp_path, rank_locations([("a", 0)] * world_size), every=2)
    try:
        job.train(steps)
        assert not job.ranks[0].divergences
        assert len(job.ranks[0].saved) > 0.4 * steps
    finally:
        job.stop()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_hundreds_of_flipped_bits(world_size: int, tmp_path: Path) -> None:
    for number in range(334):
        flipped_once(tmp_path / str(number), world_size, random.Random(f"{world_size}.{number}"))


# Trainings

RANKS: dict[str, Any] = {
    "trainer": {"devices": 3},
    "callbacks": ["auto_resume", "local_checkpoint", "nan_guard", "replica_check"],
    "save_every": 1000,
    "step_s": 0.02,
    "replica_check": {"max_rollbacks": 3},
}


def trained(
    tmp: Path, name: str, flips: list[dict[str, Any]], timeout_s: float = 100.0, **options: Any
) -> tuple[dict[str, Any], str]:
    """A training to its end, with bits that flip on the way; its config and what it has said."""
    options = {**RANKS, "local": {"every_n_train_steps": 4, "dir": str(tmp / f"{name}-local")}, **options}
    config = make(tmp, name, flips=flips, **options)
    codes, text = run(config, tmp / name, timeout_s)
    assert set(codes) == {0}, text
    return config, text


def events(config: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == kind]


def ended(config: dict[str, Any]) -> tuple[Any, Any]:
    return result(config), samples(config)


@pytest.mark.also_as_on_gpu
@pytest.mark.slow_but_for("cpu")
def test_the_run_goes_back_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    flips = [
        {"step": 14, "rank": 1, "what": "weight", "bit": 3},
        {"step": 30, "rank": 2, "what": "moment", "bit": 21},
        {"step": 38, "rank": 0, "what": "weight", "bit": 30},  # a large number
    ]
    config, text = trained(tmp_path, "disturbed", flips)
    found = [event["ranks"] for event in events(config, "divergence")]
    # On a busy machine the next comparison may find it again before the run goes back.
    assert [ranks for ranks, _ in groupby(found)] == [[1], [2], [0]], text
    assert len(events(config, "rollback")) == 3
    assert "rank 1 holds a different state than the other 2 ranks" in text
    undisturbed, _ = trained(tmp_path, "undisturbed", [])
    assert not events(undisturbed, "divergence")
    assert ended(config) == ended(undisturbed)


@pytest.mark.slow
def test_what_differs_is_never_resumed_from(tmp_path: Path) -> None:
    """Without the callback too: each rank of a node keeps a share of what all have, and a mixture is no state."""
    options: dict[str, Any] = {"trainer": {"devices": 2}, "callbacks": ["auto_resume", "local_checkpoint"]}
    kill = [{"at": "train", "step": 30, "do": "SIGKILL", "once": True}]
    local = {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}
    flips = [{"step": 14, "rank": 1, "what": "weight", "bit": 3}]
    config = make(tmp_path, "disturbed", flips=flips, events=kill, local=local, **{**RANKS, **options})
    assert set(run(config, tmp_path / "disturbed")[0]) == {-signal.SIGKILL}
    codes, text = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, text
    assert "ranks 0 and 1 hold different states: one of the two is wrong" in text
    assert "Resuming from step 12 (local checkpoint" in text
    assert ended(config) == ended(trained(tmp_path, "undisturbed", [], **options)[0])


@pytest.mark.slow
def test_a_global_checkpoint_counts_only_if_the_ranks_agree(tmp_path: Path) -> None:
    """And steps that were bad because of a rank's weights are not blamed on their batches."""
    options: dict[str, Any] = {
        "trainer": {"devices": 2},
        "callbacks": ["auto_resume", "nan_guard", "replica_check"],
        "save_every": 5,
        "nan_guard": {"max_consecutive": 3},
        "local": {},
    }
    flips = [{"step": 12, "rank": 0, "what": "weight", "bit": 3}, {"step": 31, "rank": 1, "what": "nan"}]
    config = make(tmp_path, "disturbed", flips=flips, **{**RANKS, **options})
    codes, text = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, text
    assert [event["groups"] for event in events(config, "divergence")] == [[[0], [1]]] * 2
    assert [event["step"] for event in events(config, "went_back")] == [10, 30]
    undisturbed = make(tmp_path, "undisturbed", **{**RANKS, **options})
    assert set(run(undisturbed, tmp_path / "undisturbed")[0]) == {0}
    assert ended(config) == ended(undisturbed)


@pytest.mark.slow
def test_ranks_that_never_agree(tmp_path: Path) -> None:
    """Once from the beginning, then a launched script is left to what it does; who asked for it gets an error."""
    environment = {RECIPE_VARIABLE: "workstation"}
    options: dict[str, Any] = {"trainer": {"devices": 2, "max_steps": 5}, "callbacks": [], "drifts": True}
    config = make(tmp_path, "run", **options)
    codes, text = run(config, tmp_path / "run", environment=environment)
    assert 1 in codes
    assert "ReplicasDiverged" in text
    codes, text = run(config, tmp_path / "run", environment=environment)
    assert set(codes) == {0}, text
    assert "ReplicaCheck is off: after step 5 ranks 0 and 1 hold different states" in text


def test_that_one_rank_has_no_replicas_goes_without_saying(tmp_path: Path) -> None:
    config = make(tmp_path, "run", callbacks=["replica_check"], trainer={"max_steps": 2})
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "ReplicaCheck" not in text


@pytest.mark.campaign
def test_where_ranks_share_out_the_state_it_is_said(tmp_path: Path) -> None:
    config = make(tmp_path, "run", callbacks=["replica_check"], trainer={"devices": 2, "max_steps": 2}, sharded=True)
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    assert text.count("ReplicaCheck has no replicas to compare: with ModelParallelStrategy") == 1


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_trainings_in_which_many_bits_flip(world_size: int, tmp_path: Path) -> None:
    count, every = 100, 40
    chance = random.Random(world_size)
    flips = [
        {"step": 20 + every * number, "rank": chance.randrange(world_size), "what": "anything", "seed": chance.random()}
        for number in range(count)
    ]
    options: dict[str, Any] = {
        "trainer": {"devices": world_size, "max_epochs": 1},
        "batches": 20 + every * count,
        "step_s": 0.004,
    }
    local = {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}
    config = make(tmp_path, "disturbed", flips=flips, local=local, **{**RANKS, **options})
    for _ in range(20):  # a step count below zero ends the process of AdamW
        codes, text = run(config, tmp_path / "disturbed", 3000.0)
        if set(codes) == {0}:
            break
        assert "ComplexFloat" in text
    assert set(codes) == {0}
    named = {(event["step"] - 20) // every: event for event in events(config, "divergence")}
    bad = {(event["step"] - 20) // every for event in events(config, "bad_step")}
    for number, event in named.items():  # a bit that flips while a save reads it is found by that one
        assert flips[number]["step"] <= event["step"]
        assert event["ranks"] == ([flips[number]["rank"]] if world_size > 2 else [])
    # The last bit of a moment is rounded away before the next save, now and then, and nothing has come of it.
    unseen = [flip for number, flip in enumerate(flips) if number not in named and number not in bad]
    print(f"{world_size} ranks: {len(named)} of {count} found, {len(unseen)} gone before the next save")
    assert len(unseen) < count // 20
    undisturbed, _ = trained(tmp_path, "undisturbed", [], timeout_s=3000.0, **options)
    assert ended(config) == ended(undisturbed)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_long_healthy_training_is_never_accused(world_size: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": {"devices": world_size, "max_epochs": 1}, "batches": 5_000, "step_s": 0.0}
    config, _ = trained(tmp_path, "healthy", [], timeout_s=3000.0, **options)
    assert not events(config, "divergence")
    assert result(config)[0]["step"] == 5_000
