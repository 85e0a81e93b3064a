"""Killed anywhere, resumed, the run ends bitwise as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, WeightedRandomSampler

from lightning_resilience.checkpoint import data_position
from lightning_resilience.run.settings import IF_CHANGED, READ_AGAIN_VARIABLE
from tests.harness import result, run, samples, undisturbed


def make(tmp: Path, name: str, **options: Any) -> dict[str, Any]:
    folder = tmp / name
    folder.mkdir()
    return {"run_dir": str(folder / "run"), "out": str(folder / "out"), "log": str(folder / "log"), **options}


def some(cases: dict[str, Any], *long: str) -> list[Any]:
    """Cases by their names; those whose names begin with one of ``long`` are for the campaign."""
    return [
        pytest.param(case, id=name, marks=pytest.mark.campaign if name.startswith(long) else ())
        for name, case in cases.items()
    ]


def killed_and_resumed(
    tmp: Path, events: list[dict[str, Any]], environment: dict[str, str] | None = None, **options: Any
) -> tuple[Any, Any, str]:
    """Runs the program until it gets through; every event happens once."""
    config = make(tmp, "disturbed", events=[{"once": True, "do": "SIGKILL", **event} for event in events], **options)
    output = ""
    for _ in range(len(events) + 2):
        codes, output = run(config, tmp / "disturbed", environment=environment or {})
        if set(codes) == {0} and Path(config["out"]).exists():
            return result(config), samples(config), output
        assert -signal.SIGKILL in codes or set(codes) == {0} or 75 in codes, output
    raise AssertionError(f"did not get through:\n{output}")


LOADERS = [
    {"data": "shuffle"},
    {"data": "shuffle", "workers": 2},
    {"data": "generator"},
    {"data": "iterable", "workers": 2},
    {"data": "stateful", "augment": False, "workers": 2},
    {"data": "shuffle", "workers": 2, "persistent": True},
]
MORE_LOADERS = [
    {"data": "sequential"},
    {"data": "sequential", "workers": 2},
    {"data": "iterable"},
    {"data": "stateful", "augment": False},
    {"data": "stateful_iterable", "workers": 2},
]


@pytest.mark.slow_but_for("cpu-shuffle", "as on a GPU-shuffle")
@pytest.mark.also_as_on_gpu("shuffle", "stateful-False-2")
@pytest.mark.parametrize(
    "options",
    [*LOADERS, *(pytest.param(options, marks=pytest.mark.campaign) for options in MORE_LOADERS)],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert killed_and_resumed(tmp_path, [{"at": "train", "step": 27}], **options)[:2] == undisturbed(
        tmp_path, **options
    )


TRAINERS = {
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}, "save_every": 1},
    "validation within the epoch": {"validation": True, "plateau": True, "trainer": {"val_check_interval": 4}},
    "plateau on the training loss": {"plateau": True, "save_every": 3},
    "early stopping": {"validation": True, "early_stopping": True, "trainer": {"max_epochs": 8}, "save_every": 3},
    "manual optimization": {"manual": True},
    "manual optimization that accumulates": {"manual": "accumulate", "interval_s": 0.001, "save_every": 1},
    "several optimizers of which one accumulates": {"manual": "apart", "save_every": 1},
    "max_steps": {"trainer": {"max_steps": 40, "max_epochs": -1}},
    "hooks that draw before the first batch": {"draws_at_start": True},
    "hooks that draw, with workers": {"draws_at_start": True, "workers": 2},
    "a schedule that needs the data early": {"one_cycle": True},
    "accumulation that changes with the epoch": {"accumulates": {0: 1, 1: 2}, "save_every": 3},
    "validation workers that persist": {"validation": True, "persistent_validation": True},
    "loaders made anew": {"trainer": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}, "validation": True},
    "validations without batches": {"validation": "no batches"},
}


@pytest.mark.slow_but_for("31-accumulation", "31-validations without batches")
@pytest.mark.parametrize(
    "options", some(TRAINERS, "manual optimization", "early stopping", "max_steps", "hooks that draw")
)
@pytest.mark.parametrize("step", [pytest.param(17, marks=pytest.mark.campaign), 31])
def test_what_the_trainer_does_beside(tmp_path: Path, options: dict[str, Any], step: int) -> None:
    events = [{"at": "train", "step": step}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


ANEW: dict[str, dict[str, Any]] = {
    "every second epoch": {"reload_dataloaders_every_n_epochs": 2},
    "every epoch, and validated every second": {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
    "rarely, and validated more often": {"reload_dataloaders_every_n_epochs": 3, "check_val_every_n_epoch": 2},
    "once, and validated rarely": {"check_val_every_n_epoch": 3},
    "validated within the epoch": {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 4},
    "with no sanity check": {"reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ANEW.values(), ids=ANEW)
def test_loaders_that_draw_random_numbers_when_they_are_made(tmp_path: Path, trainer: dict[str, Any]) -> None:
    """In an epoch in which they were made, after it, at its end, and in a validation."""
    options = {
        "data": "some anew",
        "validation": True,
        "plateau": "check_val_every_n_epoch" not in trainer,
        "save_every": 1,
    }
    options |= {"trainer": {"max_epochs": 7, **trainer}}
    events = [{"at": "train", "step": step} for step in (5, 24, 32, 50, 65)]
    events += [{"at": "validation", "step": 48}, {"at": "validation", "step": 64}]
    events += [{"at": "validation", "step": 96, "do": "SIGTERM"}]
    found = killed_and_resumed(tmp_path, events, **options)
    assert found[:2] == undisturbed(tmp_path, **options)


PERSISTENT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "epochs that are cut off": {"trainer": {"limit_train_batches": 9, "max_epochs": 5}},
    "loaders made anew": {"data": "anew", "trainer": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}},
    "hooks that draw": {"draws_at_start": True, "validation": True},
    "a loader that validates, too": {"validation": "same loader", "trainer": {"num_sanity_val_steps": 0}},
    "two ranks": {"trainer": {"devices": 2}},
}


@pytest.mark.parametrize("again", ["always", IF_CHANGED])
@pytest.mark.parametrize("options", PERSISTENT.values(), ids=PERSISTENT)
@pytest.mark.slow
def test_persistent_workers_that_draw(tmp_path: Path, options: dict[str, Any], again: str) -> None:
    """Twice in an epoch, at its end, and at the begin of the next one."""
    options = {"workers": 2, "persistent": True, "save_every": 1, **options}
    events = [{"at": "train", "step": step} for step in (18, 21, 31, 32, 33, 37)]
    found = killed_and_resumed(tmp_path, events, {READ_AGAIN_VARIABLE: again}, **options)
    assert found[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("again", ["always", IF_CHANGED])
@pytest.mark.slow
def test_persistent_workers_that_were_started_in_a_later_epoch(tmp_path: Path, again: str) -> None:
    """By a fit that began with a checkpoint of Lightning's own: there they had drawn their seed."""
    options: dict[str, Any] = {"workers": 2, "persistent": True, "keeps_nothing": True}
    saves = {"dirpath": str(tmp_path), "filename": "own", "save_on_train_epoch_end": True}
    first = make(tmp_path, "first", callbacks=[], model_checkpoint=saves, trainer={"max_epochs": 2}, **options)
    assert run(first, tmp_path / "first")[0] == [0]
    options |= {"ckpt_path": str(tmp_path / "own.ckpt"), "trainer": {"max_epochs": 5}, "save_every": 1}
    found = killed_and_resumed(tmp_path, [{"at": "train", "step": 39}], {READ_AGAIN_VARIABLE: again}, **options)
    assert "Resuming from step" in found[2]
    assert found[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("again", ["always", IF_CHANGED])
@pytest.mark.slow
def test_persistent_workers_go_back_with_the_training(tmp_path: Path, again: str) -> None:
    """In one process, whose workers are those of a later place."""
    options = {"workers": 2, "persistent": True, "keep": 8}
    events = [{"at": "train", "step": 29, "do": "go_back", "until": 22, "once": True}]
    config = make(tmp_path, "run", events=events, **options)
    codes, text = run(config, tmp_path / "run", environment={READ_AGAIN_VARIABLE: again})
    assert codes == [0], text
    assert result(config)[0]["weights"] == undisturbed(tmp_path, **options)[0][0]["weights"]


ON_RANKS: dict[str, dict[str, Any]] = {
    "plain": {"data": "shuffle"},
    "workers and validation": {"data": "shuffle", "workers": 2, "validation": True, "plateau": True},
    "data needed early": {"data": "shuffle", "workers": 1, "one_cycle": True},
    "each shuffles its own": {"data": "shuffle", "trainer": {"use_distributed_sampler": False}},
    "a sampler that is not found": {"data": "hidden sampler"},
    "a sampler with a generator": {"data": "weighted by a generator"},
}
LONG = {
    ("plain", 2),
    ("plain", 4),
    ("data needed early", 2),
    ("data needed early", 4),
    ("workers and validation", 4),
    ("each shuffles its own", 4),
    ("a sampler that is not found", 4),
    ("a sampler with a generator", 4),
}


@pytest.mark.also_as_on_gpu
@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param(options, ranks, id=f"{name}-{ranks}", marks=pytest.mark.campaign if (name, ranks) in LONG else ())
        for name, options in ON_RANKS.items()
        for ranks in (2, 4)
    ],
)
@pytest.mark.slow_but_for("cpu-workers and validation-2")
def test_ranks(tmp_path: Path, world_size: int, options: dict[str, Any]) -> None:
    options = {**options, "trainer": {**options.get("trainer", {}), "devices": world_size}}
    events = [{"at": "train", "step": 23, "rank": 1}, {"at": "train", "step": 40, "rank": 0}]
    found = killed_and_resumed(tmp_path, events, weighs=True, **options)[:2]
    assert found == undisturbed(tmp_path, **options)
    weights = [max(map(int, path.read_text().split())) for path in tmp_path.rglob("log.gathered.*")]
    assert len(weights) == world_size
    assert max(weights) <= 4096, "random states that are the same on all ranks are given by all"


CALLBACKS: dict[str, dict[str, Any]] = {
    "averaging": {"StochasticWeightAveraging": {"swa_lrs": 1e-3, "swa_epoch_start": 2}},
    "pruning": {"ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.2}},
}


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
@pytest.mark.slow
def test_ranks_with_callbacks_that_change_what_is_trained(tmp_path: Path, callbacks: dict[str, Any]) -> None:
    """Killed twice in one epoch."""
    options = {"lightning_callbacks": callbacks, "save_every": 3, "trainer": {"devices": 3}}
    events = [{"at": "train", "step": 22, "rank": 1}, {"at": "train", "step": 25, "rank": 0}]
    weights, ids, said = killed_and_resumed(tmp_path, events, **options)
    assert (weights, ids) == undisturbed(tmp_path, **options)
    assert "have changed since" not in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.also_as_on_gpu("1")
def test_a_validation_of_averaged_weights_is_not_stopped_within(tmp_path: Path, ranks: int) -> None:
    """What Lightning's callback, or one of the user's, puts into the module for it would be taken for the trained."""
    averages = {"EMAWeightAveraging": {"decay": 0.9}}
    options = {"lightning_callbacks": averages, "validation": True, "trainer": {"devices": ranks}}
    term = {"at": "validation", "step": 32, "do": "SIGTERM"}
    assert killed_and_resumed(tmp_path, [term], **options)[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("tickets", [True, False], ids=["lottery tickets", "masks only"])
def test_going_back_to_before_a_pruning(tmp_path: Path, tickets: bool) -> None:
    """Lottery tickets are trained with the weights, on one device: only a new process has the first ones."""
    pruning = {"pruning_fn": "l1_unstructured", "amount": 0.2, "use_lottery_ticket_hypothesis": tickets}
    options = {"lightning_callbacks": {"ModelPruning": {**pruning, "parameter_names": ["weight"]}}}
    events = [{"at": "train", "step": 27, "do": "go_back", "until": 12, "once": True}]
    config = make(tmp_path, "run", keep=8, events=events, **options)
    codes, text = run(config, tmp_path / "run")
    if tickets:
        assert codes == [1]
        assert "only a restart can recreate them" in text
        codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert result(config)[0]["weights"] == undisturbed(tmp_path, **options)[0][0]["weights"]


DDP: dict[str, dict[str, Any]] = {
    "told its device": {"ddp": {}},
    "told its device, with all else": {"ddp": {"gradient_as_bucket_view": True, "hook": "fp16"}, "manual": "twice"},
    "long: small buckets": {"ddp": {"bucket_cap_mb": 0.001}},
    "long: accumulation": {"ddp": {"gradient_as_bucket_view": True}, "trainer": {"accumulate_grad_batches": 3}},
    "long: unused parameters": {"ddp": {"find_unused_parameters": True}},
}


@pytest.mark.parametrize("options", some(DDP, "long"))
@pytest.mark.slow_but_for("told its device, with all else")
def test_ddp_as_on_an_accelerator(tmp_path: Path, options: dict[str, Any]) -> None:
    """There DDP moves what forward is given to its device: a replay that gave nothing failed at every resume."""
    options = {**options, "trainer": {"devices": 3, **options.get("trainer", {})}}
    events = [{"at": "train", "step": 23, "rank": 1}]
    weights, ids, said = killed_and_resumed(tmp_path, events, **options)
    assert (weights, ids) == undisturbed(tmp_path, **options)
    assert "exact" not in said


@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.slow
def test_every_rank_gets_back_what_it_has_kept_of_its_own(tmp_path: Path, async_save: bool) -> None:
    """As much as it is, and of whatever form: the ranks give each other only what differs from rank 0's."""
    options = {"data": "stateful_with_luggage", "workers": 1, "augment": False, "trainer": {"devices": 3}}
    events = [{"at": "train", "step": 23, "rank": 1}]
    weights, ids, said = killed_and_resumed(tmp_path, events, async_save=async_save, **options)
    assert (weights, ids) == undisturbed(tmp_path, **options)
    assert all(f"rank {rank} has its luggage" in said for rank in range(3))


SHARDED: dict[str, dict[str, Any]] = {"FSDP2": {"sharded": True}, "FSDP2, in one file": {"sharded": "whole file"}}
FSDP1: dict[str, dict[str, Any]] = {
    "shards of FSDP1": {"sharded": "fsdp1 sharded"},
    "FSDP1, in one file": {"sharded": "fsdp1 full", "wraps": True},
}


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
@pytest.mark.parametrize("options", some(SHARDED))
def test_sharded(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**options, "trainer": {"devices": 2}}
    events = [{"at": "train", "step": 23, "rank": 1}]
    assert killed_and_resumed(tmp_path, events, **options)[:2] == undisturbed(tmp_path, **options)


@pytest.mark.parametrize("options", some(FSDP1, "shards"))
@pytest.mark.slow
def test_sharded_by_fsdp1(tmp_path: Path, options: dict[str, Any]) -> None:
    """A directory of shards, sealed, or one file of what was gathered: the strategy itself loads both.

    The training goes on while they are written: it comes to the next save before the one before has ended.
    """
    options = {**options, "trainer": {"devices": 2}, "save_every": 2}
    events = [{"at": "train", "step": 23, "rank": 1}]
    done = killed_and_resumed(tmp_path, events, async_save=True, slow_shards_s=[0, 0.5], step_s=0.02, **options)
    assert done[:2] == undisturbed(tmp_path, **options)
    assert "is still being written" in done[2]


@pytest.mark.slow_but_for("workers", "tensors")
@pytest.mark.parametrize(
    ("options", "read_again", "skipped"),
    [
        pytest.param({"data": "tensors"}, "always", True, id="tensors"),
        pytest.param({"data": "shuffle"}, "if-changed", False, id="a dataset"),
        pytest.param({"data": "shuffle", "workers": 2, "augment": False}, "always", False, id="workers"),
        pytest.param(
            {"data": "shuffle", "workers": 2, "augment": False}, "if-changed", True, id="workers that only read"
        ),
        pytest.param(
            {"data": "shuffle", "workers": 2, "augment": False},
            "if-changed, then always",
            False,
            id="asked no more",
        ),
        pytest.param({"data": "shuffle", "workers": 2}, "if-changed", True, id="they draw random numbers"),
        *(
            pytest.param(
                {"data": "shuffle", "workers": 2, "persistent": True}, again, skipped, id=f"they persist-{again}"
            )
            for again, skipped in [
                ("always", False),
                ("if-changed", True),
                ("always, then if-changed", False),
                ("if-changed, then always", True),
            ]
        ),
    ],
)
def test_batches_are_skipped_by_the_sampler_where_nothing_is_lost(
    tmp_path: Path, options: dict[str, Any], read_again: str, skipped: bool
) -> None:
    config, (first, *_, second) = make(tmp_path, "run", **options), 2 * read_again.split(", then ")
    killed = {**config, "events": [{"at": "train", "step": 29, "do": "SIGKILL"}]}
    run(killed, tmp_path / "run", environment={READ_AGAIN_VARIABLE: first})
    codes, text = run(config, tmp_path / "run", environment={READ_AGAIN_VARIABLE: second})
    assert codes == [0], text
    assert "Resuming from step 25" in text
    assert ("Fetching the first 9 batches" not in text) == skipped
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_only_what_is_known_to_keep_no_state_is_skipped() -> None:
    class Own(TensorDataset):
        pass

    plain = TensorDataset(torch.ones(4))
    for dataset in (plain, Subset(plain, [0, 1]), ConcatDataset([plain, plain])):
        assert data_position.can_skip(DataLoader(dataset, 2, shuffle=True))
    for loader in (
        DataLoader(Own(torch.ones(4)), 2),
        DataLoader(ConcatDataset([plain, Own(torch.ones(4))]), 2),
        DataLoader(plain, 2, num_workers=1),
        DataLoader(plain, 2, collate_fn=lambda batch: batch),
        DataLoader(plain, sampler=WeightedRandomSampler([1.0] * 4, 4)),
        DataLoader(plain, batch_size=None),
    ):
        assert not data_position.can_skip(loader)
