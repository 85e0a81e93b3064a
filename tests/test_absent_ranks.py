"""A run goes on with fewer ranks, in the midst of an epoch: no sample is left out or trained on twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import pytest
import torch
import torchmetrics
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_resilience._lightning import lightning_metrics, lightning_micro_batches
from lightning_resilience._lightning.lightning_micro_batches import Division, TrainingData
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint import checkpoint_file, data_position
from lightning_resilience.fit.exact_state import ExactState
from lightning_resilience.run.settings import (
    GLOBAL_BATCH_VARIABLE,
    IF_CHANGED,
    READ_AGAIN_VARIABLE,
    global_batch,
    read_again,
)
from tests.harness import differences, result, run, state_at_the_end, weights
from tests.ledgers import read_ledger
from tests.test_exact_resume import make
from tests.test_launchers import finish, start

BATCHES = 48  # of all ranks in an epoch


def with_ranks(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    return {**config, "batches": BATCHES // ranks, "trainer": {**config["trainer"], "devices": ranks}}


def samples(log: str, ranks: Collection[int] = range(10)) -> dict[int, list[int]]:
    """What ranks together have trained on, by steps, each sample once."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in Path(log).parent.glob(f"{Path(log).name}.[0-9]"):
        if int(path.suffix[1:]) not in ranks:
            continue
        for _, step, ids in map(json.loads, path.read_text().splitlines()):
            found[step] += ids
    return {step: sorted(set(ids)) for step, ids in sorted(found.items())}


def kill(config: dict[str, Any], step: int) -> dict[str, Any]:
    """Of all ranks in a step, when there is a checkpoint."""
    saved = f"{config['run_dir']}/fit-000/checkpoints/*.ckpt"
    return {"at": "train", "step": step, "do": "SIGKILL", "after_file": saved}


def killed_and_resumed(
    tmp: Path, *ranks: int, environment: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Any], dict[int, list[int]], str]:
    """Kills a run in its eighth step, its sixteenth and so on, and resumes it with other numbers of ranks.

    Returns:
        Its config, the samples that count of each step, and the output of the last part.
    """
    config = make(tmp, "disturbed", **{"trainer": {"max_epochs": 3}, **options})
    trained: dict[int, list[int]] = {}
    output = ""
    for number, count in enumerate(ranks):
        is_last = number == len(ranks) - 1
        log = f"{config['log']}-{number}"
        events = [] if is_last else [kill(config, 8 + 8 * number)]
        events += options.get("events", [])
        part = {**with_ranks(config, count), "log": log, "events": events}
        codes, output = run(part, tmp / "disturbed", environment=environment)
        assert (set(codes) == {0}) if is_last else (-signal.SIGKILL in codes), output
        trained |= samples(log)
    return config, trained, output


def undisturbed(tmp: Path, ranks: int, **options: Any) -> tuple[dict[str, Any], dict[int, list[int]]]:
    config = with_ranks(make(tmp, "undisturbed", **{"trainer": {"max_epochs": 3}, **options, "events": []}), ranks)
    codes, output = run(config, tmp / "undisturbed")
    assert set(codes) == {0}, output
    return config, samples(config["log"])


def assert_the_same_run(
    tmp: Path,
    *ranks: int,
    tolerance: float = 1e-5,
    by_rank: Collection[str] = (),
    environment: dict[str, str] | None = None,
    **options: Any,
) -> str:
    """Steps have the samples that they would have had, with the same augmentation and dropout, and so the losses.

    Args:
        tmp: A folder.
        ranks: How many there are in each part.
        tolerance: For what is logged.
        by_rank: What is logged or kept of a rank's own batches, and so by how large those are.
        environment: Of the disturbed run.
        options: Of the config.
    """
    got, trained, output = killed_and_resumed(tmp, *ranks, environment=environment, **options)
    wanted, steps = undisturbed(tmp, ranks[0], **options)
    assert trained == steps
    once = {"once_mean", "once_max", "once_min"} if options.get("logs_once") else set()
    for name in {"train_loss_epoch", "train_metric", *once} - set(by_rank):
        value, known = (result(config)[0]["metrics"][name] for config in (got, wanted))
        assert value == pytest.approx(known, rel=tolerance), name
    if tolerance < 1e-3:
        states = [
            {name: each for name, each in state_at_the_end(config).items() if name not in by_rank}
            for config in (got, wanted)
        ]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
    return output


@pytest.mark.slow
@pytest.mark.also_as_on_gpu("4-2-4")
@pytest.mark.parametrize(
    "ranks", [(4, 2, 4), (4, 3), (4, 3, 1, 4), (3, 2), (2, 1)], ids=lambda x: "-".join(map(str, x))
)
def test_steps_are_those_of_the_run_as_it_was_begun(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    # With one epoch, its means are of steps before and after.
    output = assert_the_same_run(tmp_path, *ranks, trainer={"max_epochs": 1 if len(ranks) == 2 else 3})
    if ranks == (4, 3):
        assert (
            "was saved by a run of 4 ranks and is resumed by 3: each rank also trains on batches of absent ranks"
            in output
        )
        assert "take up to 2 times as long" in output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(4, 3, 4), (4, 1)], ids=lambda x: "-".join(map(str, x)))
def test_a_global_batch_that_the_script_divides_among_the_ranks(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """18 are 4 for each of 4, and 6 for each of 3: these have the 16 of before."""
    epochs = 1 if len(ranks) == 2 else 3
    assert_the_same_run(tmp_path, *ranks, global_batch=18, trainer={"max_epochs": epochs})


OPTIONS: dict[str, dict[str, Any]] = {
    "workers": {"workers": 2},
    "a step that takes its batch apart": {"changes_batch": True},
    "an optimizer that makes several steps": {"lbfgs": True},
    "batch norm": {"batch_norm": True},
    "batches of a class of its own": {"batch_object": True, "changes_batch": True},
    "a teacher that is moved before gradients are reset": {"teacher": True, "dropout": 0.0},
    "a teacher that is moved in the step, and a buffer that is replaced": {"teacher": "in step", "dropout": 0.0},
    "a buffer in the loss, and accumulation": {
        "normalises": True,
        "trainer": {"max_epochs": 3, "accumulate_grad_batches": 3},
        "save_every": 1,
    },
    "a sampler with a generator": {"data": "weighted by a generator"},
    "means of other numbers of samples": {"size": 248},
    "accumulation": {"trainer": {"max_epochs": 3, "accumulate_grad_batches": 3}, "save_every": 1},
    "a schedule that needs the data early": {"one_cycle": True, "workers": 1},
    "a schedule by the number of steps, asked for in setup": {"by_length": "setup"},
    "validation within the epoch": {
        "validation": True,
        "validation_draws": False,
        "plateau": True,
        "trainer": {"max_epochs": 3, "val_check_interval": 6},
    },
    "loaders made anew": {"trainer": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}},
    "data that can be skipped": {"data": "tensors"},
    "NaNGuard": {"callbacks": ["preemption", "auto_resume", "nan_guard"]},
    "each batch is run twice": {
        "callbacks": ["preemption", "auto_resume", "nan_guard"],
        "nan_guard": {"rerun": "report_determinism_stats"},
    },
    "batches that are skipped": {
        "callbacks": ["preemption", "auto_resume", "nan_guard"],
        "nan_guard": {"action": "rollback"},
        "spoils": [{"step": 20, "what": "loss"}],
    },
    "a way back": {"events": [{"at": "train", "step": 20, "do": "go_back", "once": True}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_with_what_else_there_is(tmp_path: Path, options: dict[str, Any]) -> None:
    # What draws random numbers outside of training steps and of loaders' iterators is not done for absent ranks.
    draws = options.get("trainer", {}).get("reload_dataloaders_every_n_epochs")
    output = assert_the_same_run(tmp_path, 4, 3, tolerance=0.1 if draws else 1e-5, **options)
    assert "The validation draws random numbers" not in output
    assert output.count("each rank also trains on batches") == 1


SAME_FOR_ALL = {"augment": False, "dropout": 0.0}  # random numbers are others with other ranks


MORE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a sampler of the script's for several ranks": ((1, 2), {"data": "own sampler", "trainer": {"max_epochs": 1}}),
    "a sampler of the script's, and one rank": ((2, 1), {"data": "own sampler", "trainer": {"max_epochs": 1}}),
    "a CombinedLoader": (
        (2, 4, 4),
        {"data": "combined", "trainer": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}},
    ),
    "data that a setup needs": ((2, 4), {"asks_early": True}),
    "a schedule by the number of steps, asked for in setup": ((2, 4), {"by_length": "setup"}),
    "in order": ((1, 4, 2), {"data": "sequential", "trainer": {"max_epochs": 1}}),
    "validation, a schedule, workers": (
        (2, 4),
        {"validation": True, "one_cycle": True, "workers": 1, "trainer": {"max_epochs": 2}},
    ),
    "local checkpoints": (
        (2, 4, 3),
        {"callbacks": ["preemption", "auto_resume", "local_checkpoint"], "local": {"every_n_train_steps": 1}},
    ),
    "a way back": ((2, 4), {"events": [{"at": "train", "step": 20, "do": "go_back", "once": True}]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), MORE.values(), ids=MORE.keys())
def test_more_ranks_with_what_else_there_is(tmp_path: Path, ranks: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_the_same_run(tmp_path, *ranks, by_rank=["train_metric", "average"], **{**SAME_FOR_ALL, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [
        pytest.param(
            (1, 2), {"data": "weighted"}, "this epoch has the order of a WeightedRandomSampler", id="its own order"
        ),
        pytest.param(
            (2, 4), {"loader": {"drop_last": True}, "size": 189}, "drop_last would leave out different", id="the last"
        ),
        pytest.param((3, 4), {"global_batch": 18}, "a batch of 6 cannot be divided so", id="a rounded batch"),
        pytest.param((2, 3), {}, "a batch of 4 cannot be divided so that a step keeps its samples", id="a batch"),
    ],
)
def test_more_ranks_that_would_have_other_steps(
    tmp_path: Path, ranks: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    _, _, output = killed_and_resumed(tmp_path, *ranks, **options)
    assert f"was saved by a run of {ranks[0]} ranks and is resumed by {ranks[1]}, and {reason}" in output
    assert re.search(r"continues from batch (\d+) of each rank", output)


@pytest.mark.slow
def test_batches_that_are_skipped_are_the_same_with_more_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "callbacks": ["preemption", "auto_resume", "nan_guard"],
        "nan_guard": {"action": "rollback"},
        "spoils": [{"step": 5, "what": "loss"}],
    }
    config, trained, output = killed_and_resumed(tmp_path, 2, 4, **SAME_FOR_ALL, **options)
    wanted, steps = undisturbed(tmp_path, 2, **SAME_FOR_ALL, **options)
    assert "marked bad" not in output
    assert trained == steps
    states = [{**state_at_the_end(each), "average": 0} for each in (config, wanted)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)


@pytest.fixture
def prepared() -> Callable[..., TrainingData]:
    """What becomes of loaders of a script that are divided for 4 ranks that were 2."""

    def prepare(loaders: Any, **about: Any) -> TrainingData:
        trainer = L.Trainer(logger=False, barebones=True)
        trainer.fit_loop._data_source.instance = loaders
        data = TrainingData(trainer, Patches(), Division(**{**OF_TWO, **about}))
        found = trainer.fit_loop._data_source.dataloader()
        assert found is loaders
        return data

    return prepare


OF_TWO: dict[str, Any] = {"ranks": range(1), "among": 4, "before": 2, "share": Fraction(1, 2)}


@pytest.mark.parametrize(
    ("resumed", "left_out", "recorded"),
    [
        pytest.param({}, 7, [7], id="left out"),
        pytest.param({}, 0, [0], id="trained on after all: it has gone back"),
        pytest.param(None, 0, [], id="not known: it has not begun"),
    ],
)
def test_how_many_batches_are_left_out_is_recorded(
    resumed: dict[str, Any] | None, left_out: int, recorded: list[int]
) -> None:
    state: Any = ExactState.__new__(ExactState)
    state._recorder = state._absent = None
    state._global_batch, state.resumed, state._left_out = "shrink", resumed, left_out
    state.fit = MagicMock(rank=0)
    state.stop()
    assert [call.args[0].left_out for call in state.fit.ledger.record.call_args_list] == recorded


def test_either_all_loaders_are_divided_or_none(prepared: Callable[..., TrainingData]) -> None:
    data = TensorDataset(torch.zeros(64))
    fits, does_not = DataLoader(data, 4), DataLoader(data, 3)
    assert prepared([fits]).refused is None
    assert prepared([fits]).share == Fraction(1, 2)
    own_batches = DataLoader(data, batch_sampler=Batches(SequentialSampler(data), 4, False))
    of_one_loader = {"orders": [["SequentialSampler"]], "epoch": 0}
    for loaders, about, reason in (
        ([fits, does_not], {}, "a batch of 3 cannot be divided"),
        ({"a": fits, "b": [1, 2]}, {}, "list is not a torch DataLoader"),
        ([own_batches], {}, "a Batches makes the batches"),
        ([fits, fits], of_one_loader, "there are 2 data loaders, formerly 1"),
    ):
        found = prepared(loaders, **about)
        assert reason in (found.refused or "")
        assert found.share == 1


@pytest.mark.parametrize(
    ("size", "refused", "sizes"),
    [
        pytest.param(4, None, [4], id="the same"),
        pytest.param(8, None, [4], id="a batch of all, divided"),
        pytest.param(9, None, [4], id="a batch of all, rounded down before"),
        pytest.param(10, "the script's batches have 10 samples and had 4", [10], id="another one"),
        pytest.param(7, "the script's batches have 7 samples and had 4", [7], id="another one, smaller"),
    ],
)
def test_the_batches_of_a_script_that_divides_them_by_itself(
    prepared: Callable[..., TrainingData], size: int, refused: str | None, sizes: list[int]
) -> None:
    about = {"among": 2, "share": Fraction(1), "sizes": [Fraction(4)], "kept": [Fraction(8)]}
    data = prepared([DataLoader(TensorDataset(torch.zeros(64)), size)], **about)
    assert (data.refused, [*data._sizes]) == (refused, sizes)
    assert bool(data.resized) is (refused is None and size != 4)


@pytest.mark.parametrize(
    ("world", "sizes", "is_by_script", "refused"),
    [
        pytest.param(2, [8, 8], True, None, id="a batch of all, divided"),
        pytest.param(2, [8, None], True, None, id="as far as it is known"),
        pytest.param(2, [4, 4], False, None, id="the same"),
        pytest.param(2, [8, 9], False, "a Batches makes the batches", id="rounded, which cannot be set"),
        pytest.param(1, [16, 16], False, "a Batches makes the batches", id="of a single rank, which cannot be set"),
    ],
)
def test_batch_samplers_of_a_script_that_divides_batches_by_itself(
    monkeypatch: pytest.MonkeyPatch, world: int, sizes: list[int | None], is_by_script: bool, refused: str | None
) -> None:
    """Four ranks had 4 samples each, in loaders of which the second has a batch sampler of the script's own."""
    trainer = L.Trainer(logger=False, barebones=True)
    monkeypatch.setattr(type(trainer), "world_size", world)
    about: dict[str, Any] = {"sizes": [Fraction(4)] * 2, "kept": [Fraction(16, world)] * 2}
    data = TrainingData(trainer, Patches(), Division(range(0, 4, world), 4, 4, **about))
    samples = TensorDataset(torch.zeros(64))
    batches = [[0]] if sizes[1] is None else Batches(SequentialSampler(samples), sizes[1], False)
    own = DataLoader(samples, batch_sampler=batches)
    data.decide([DataLoader(samples, sizes[0]), own])
    assert (data.is_by_script, data.refused) == (is_by_script, refused)


class Batches(BatchSampler):
    """One of a script's own."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(4, 3, 4), (2, 4), (1, 2)], ids=lambda x: "-".join(map(str, x)))
def test_who_comes_in_the_midst_of_an_epoch_knows_what_others_have_logged(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    by_rank = ["train_metric", "average", "once_max", "once_min"] if ranks[0] < ranks[-1] else []
    # When ranks come, a batch has been trained on that logs more than others, and the epoch has not ended. The last
    # would end the fit if it were no number on one of them.
    # An epoch after that which a single rank has begun has another order.
    epochs = 2 if ranks[0] > 1 else 1
    options = {"trainer": {"max_epochs": epochs}, "logs_once": True, "save_every": 3, **SAME_FOR_ALL}
    early = {"EarlyStopping": {"monitor": "once_of_rank", "patience": 100}}
    assert_the_same_run(tmp_path, *ranks, by_rank=by_rank, lightning_callbacks=early, **options)


@pytest.mark.parametrize(
    "ranks",
    [(2, 4), (2, 4, 2), (3, 4, 4, 3), (2, 4, 3, 4), (2, 4, 1, 2), (1, 2), (1, 4, 4, 1), (1, 4, 2)],
    ids=lambda x: "-".join(map(str, x)),
)
@pytest.mark.slow_but_for("2-4")
def test_more_ranks_have_smaller_batches(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    # With one epoch, its means are of steps before and after.
    epochs = 1 if len(ranks) == 2 or ranks[0] == 1 else 3
    options = {"trainer": {"max_epochs": epochs}, **SAME_FOR_ALL}
    output = assert_the_same_run(tmp_path, *ranks, by_rank=["train_metric", "average"], **options)
    if ranks == (2, 4):
        assert (
            "was saved by a run of 2 ranks and is resumed by 4: each rank has batches of 2. Steps have the same"
            in output
        )


LEFT_OUT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "4-3": ((4, 3), {}),
    "4-2-4": ((4, 2, 4), {"workers": 1}),
    "4-2-3": ((4, 2, 3), {"batch_norm": True}),
    "accumulation": ((4, 3), {"trainer": {"max_epochs": 3, "accumulate_grad_batches": 3}, "save_every": 1}),
    "a way back": ((4, 3), {"events": [{"at": "train", "step": 20, "do": "go_back", "once": True}]}),
}


@pytest.mark.parametrize(("ranks", "options"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
@pytest.mark.slow
def test_the_batches_of_absent_ranks_are_left_out(
    tmp_path: Path, ranks: tuple[int, ...], options: dict[str, Any]
) -> None:
    shrink = {GLOBAL_BATCH_VARIABLE: "shrink"}
    config, trained, output = killed_and_resumed(tmp_path, *ranks, environment=shrink, **options)
    wanted, steps = undisturbed(tmp_path, ranks[0], **options)
    there = {}  # in each step
    for number, count in enumerate(ranks):
        there |= dict.fromkeys(samples(f"{config['log']}-{number}"), count)
    assert trained.keys() == steps.keys()
    for step, ids in trained.items():
        assert ids == samples(wanted["log"], range(there[step]))[step]
    if ranks == (4, 3):
        assert "is resumed by 3: the batches of absent ranks are left out, as --global-batch" in output
    events = [each for each in read_ledger(Path(config["run_dir"]) / "ledger") if each["event"] == "batches_left_out"]
    assert events[-1]["left_out"] == sum(ranks[0] - count for count in there.values())


@pytest.mark.parametrize("ranks", [(4, 3, 4), (4, 1, 3)], ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize(
    ("again", "persist"), [(IF_CHANGED, False), (IF_CHANGED, True), ("always", True)], ids=lambda x: str(x)
)
@pytest.mark.slow
def test_workers_of_absent_ranks_go_on_where_those_before_were(
    tmp_path: Path, ranks: tuple[int, ...], again: str, persist: bool
) -> None:
    environment, options = {READ_AGAIN_VARIABLE: again}, {"workers": 2, "seeded_apart": True, "persistent": persist}
    output = assert_the_same_run(tmp_path, *ranks, environment=environment, **options)
    assert ("Fetching the first" not in output) == (again == IF_CHANGED)


@pytest.mark.slow
def test_a_save_in_a_validation_holds_what_workers_of_absent_ranks_held(tmp_path: Path) -> None:
    ends = []
    for again in ("always", IF_CHANGED):
        (tmp_path / again).mkdir()
        trainer = {"max_epochs": 2, "val_check_interval": 6}
        options = {
            "validation": True,
            "validation_draws": False,
            "workers": 2,
            "seeded_apart": True,
            "trainer": trainer,
        }
        config = make(tmp_path / again, "disturbed", **options)
        stop = {"at": "validation", "step": 18, "rank": 0, "do": "SIGTERM"}
        for part, (count, events) in enumerate(((2, [kill(config, 8)]), (1, [stop]), (2, []))):
            here = {**with_ranks(config, count), "log": f"{config['log']}-{part}", "events": events}
            _, output = run(here, tmp_path / again / "disturbed", environment={READ_AGAIN_VARIABLE: again})
        assert ("Fetching the first" in output) == (again == "always"), output
        ends.append(state_at_the_end(config))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)  # a stop may come a step later


@pytest.mark.slow
def test_it_is_said_where_a_validation_draws_more_than_seeds(tmp_path: Path) -> None:
    options = {"validation": True, "trainer": {"max_epochs": 1, "val_check_interval": 4}}
    _, _, output = killed_and_resumed(tmp_path, 2, 1, **options)
    assert output.count("The validation draws random numbers. From here on, random states of absent ranks differ") == 1


def test_the_seeds_that_loaders_have_drawn_are_counted() -> None:
    torch.manual_seed(1)
    torch.randn(3)  # one of a pair is left
    before, others = torch.get_rng_state(), torch.Generator().manual_seed(2)
    for loader in 3 * [DataLoader(range(4))]:
        list(loader)
    assert data_position.seeds_drawn(before, before) == 0
    assert data_position.seeds_drawn(before, torch.get_rng_state()) == 3
    state = data_position.after_seeds(others.get_state(), 3)
    for _ in range(3):
        list(DataLoader(range(4), generator=others))
    assert torch.equal(state, others.get_state())
    torch.rand(1)
    assert data_position.seeds_drawn(before, torch.get_rng_state()) is None


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_knows_less(tmp_path: Path) -> None:
    config = make(tmp_path, "disturbed", workers=1, trainer={"max_epochs": 2})
    for count, step in ((2, 8), (1, 16)):
        run({**with_ranks(config, count), "events": [kill(config, step)]}, tmp_path / "disturbed")
    path = max(Path(config["run_dir"]).glob("fit-000/checkpoints/*.ckpt"))
    checkpoint, stamp = torch.load(path, weights_only=True), checkpoint_file.read_stamp(path)
    assert stamp is not None
    for own in checkpoint["lightning_resilience"]["ranks"]:
        assert [*own["absent"]] == ["1"]
        for each in (own, *own["absent"].values()):
            del each["worker_states"], each["left_out"]
    checkpoint_file.save(checkpoint, path, stamp.metadata)
    codes, output = run(with_ranks(config, 1), tmp_path / "disturbed")
    assert codes == [0], output
    assert "Resuming from step 15" in output


@pytest.mark.slow
def test_what_workers_held_is_no_help_to_more_ranks(tmp_path: Path) -> None:
    """Their workers would have drawn other numbers, for smaller batches: they read again."""
    ends = []
    for again in ("always", IF_CHANGED):
        (tmp_path / again).mkdir()
        environment, options = {READ_AGAIN_VARIABLE: again}, {"workers": 2, "seeded_apart": True}
        config, *_ = killed_and_resumed(tmp_path / again, 2, 4, environment=environment, **options)
        ends.append(state_at_the_end(config))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_what_is_no_choice_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOBAL_BATCH_VARIABLE, "smaller")
    with pytest.raises(ValueError, match="GLOBAL_BATCH must be constant or shrink, not 'smaller'"):
        global_batch()
    monkeypatch.setenv(READ_AGAIN_VARIABLE, "never")
    with pytest.raises(ValueError, match="READ_AGAIN must be always or if-changed, not 'never'"):
        read_again()


@pytest.mark.slow
def test_local_checkpoints_of_fewer_ranks_hold_the_states_of_all(tmp_path: Path) -> None:
    callbacks = ["preemption", "auto_resume", "local_checkpoint"]
    options = {"callbacks": callbacks, "local": {"every_n_train_steps": 1}, "save_every": 7, "step_s": 0.05}
    output = assert_the_same_run(tmp_path, 4, 3, 3, trainer={"max_epochs": 2}, **options)
    assert re.search(r"Resuming from step \d+ \(local checkpoint", output)


# -- ranks are lost while others are absent ----------------------------------------------------------------------------


def begun(tmp: Path, name: str, ranks: int, **options: Any) -> dict[str, Any]:
    """A run that 4 ranks have begun, as ``ranks`` ranks go on with it."""
    config = make(tmp, name, **{"keeps_nothing": True, **options})
    events = [kill(config, 8)]
    codes, output = run({**with_ranks(config, 4), "log": f"{config['log']}-begun", "events": events}, tmp / name)
    assert -signal.SIGKILL in codes, output
    return {
        **with_ranks(config, ranks),
        "digests": True,
        "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
        "local": {"every_n_train_steps": 7},
    }


LOST: dict[str, tuple[int, dict[str, Any], list[dict[str, Any]], list[int]]] = {
    "3 ranks": (
        3,
        {"batch_norm": True},
        [
            {"at": "backward", "step": 9, "rank": 2, "passes": 1},
            {"at": "train", "step": 12, "rank": 1, "passes": 1},  # the first of an epoch
            {"at": "train", "step": 20, "rank": 0},  # in the batch of rank 3
            {"at": "train", "step": 26, "rank": 0, "passes": 1},
            {"at": "train", "step": 26, "rank": 1, "passes": 1},
        ],
        [9, 12, 20, 26],
    ),
    "2 ranks, workers": (
        2,
        {"workers": 1, "seeded_apart": True},
        [
            {"at": "backward", "step": 12, "rank": 1},
            # Killed within the optimizer's step; the other one has not finished its reduction.
            {"at": "reduced", "step": 23, "rank": 1, "do": "lose_peer", "passes": 1},
            {"at": "batch_end", "step": 23, "rank": 0},
        ],
        [12, 23],
    ),
    "2 ranks, accumulation": (
        2,
        {"trainer": {"max_epochs": 3, "accumulate_grad_batches": 3}, "save_every": 1},
        [{"at": "train", "step": 13, "rank": 0}, {"at": "train", "step": 14, "rank": 1, "passes": 1}],
        [4, 4],
    ),
}


@pytest.mark.parametrize(
    ("ranks", "options", "events", "saved"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.campaign if number > 1 else ())
        for number, (name, case) in enumerate(LOST.items())
    ],
)
@pytest.mark.slow
def test_what_ranks_have_trained_for_absent_ones_is_not_lost_with_them(
    tmp_path: Path, ranks: int, options: dict[str, Any], events: list[dict[str, Any]], saved: list[int]
) -> None:
    options = {"trainer": {"max_epochs": 3}, **options}
    undisturbed = begun(tmp_path, "undisturbed", ranks, **options)
    codes, output = run(undisturbed, tmp_path / "undisturbed")
    assert set(codes) == {0}, output
    config = begun(tmp_path, "disturbed", ranks, **options)
    config["events"] = [{"do": "SIGKILL", "once": True, **each} for each in events]
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--in-job-restarts", "9"]
    program, path = tmp_path / "train.py", tmp_path / "output"
    program.write_text("import json, sys\nfrom tests.program import main\nmain(json.loads(sys.argv[1]))\n")
    launch += ["--nproc-per-node", str(ranks), "--run-dir", config["run_dir"], str(program), json.dumps(config)]
    assert finish(start(launch, path), path) == 0, path.read_text()
    found = [
        event["step"]
        for event in read_ledger(Path(config["run_dir"]) / "ledger")
        if event["event"] == "saved" and event["reason"] == "after a loss"
    ]
    assert found == saved, path.read_text()
    assert not [*differences(config, undisturbed)], path.read_text()


class Locally:
    """A run that is killed and goes on with other numbers of ranks, from local checkpoints; then from global ones.

    Attributes:
        resumed: From which steps it has gone on.
        output: Of all its parts.
    """

    KILLED_AT = (8, 20)

    def __init__(self, tmp: Path, *ranks: int, **options: Any) -> None:
        self.tmp, self.ranks = tmp, ranks
        self.options = {"trainer": {"max_epochs": 2}, **options}
        self.memory = tmp / "memory"
        self.resumed: list[int] = []
        self.output = ""

    def shards(self, name: str) -> list[Path]:
        """Of the newest generation that is complete, the shards of this name, on all nodes."""
        generations = sorted({path.parent.name for path in self.memory.glob("local_ckpt-*/*/*/fit-000/step-*/*")})
        for generation in reversed(generations):
            found = list(self.memory.glob(f"local_ckpt-*/*/*/fit-000/{generation}/*.shard"))
            if len({path.stem for path in found if path.stem.startswith("rank-")}) == self.ranks[len(self.resumed)]:
                return [path for path in found if path.stem == name]
        raise AssertionError("nothing is saved")

    def run(
        self,
        between: Callable[[], None] = lambda: None,
        first: dict[str, int] | None = None,
    ) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """Returns its config, and the samples that count of each step.

        Args:
            between: What happens between its parts.
            first: The nodes and ranks per node of its first part.
        """
        local = {"every_n_train_steps": 1, "dir": str(self.memory)}
        callbacks = ["preemption", "auto_resume", "local_checkpoint"]
        about = {"callbacks": callbacks, "local": local, "save_every": 1000, "step_s": 0.05}
        config = make(self.tmp, "locally", **{**self.options, **about})
        return config, self._parts(config, between, first)

    def run_from_global(self) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """The same with global checkpoints alone, from the same steps."""
        config = make(self.tmp, "globally", **self.options)
        return config, self._parts(config, lambda: None, None)

    def _parts(
        self, config: dict[str, Any], between: Callable[[], None], first: dict[str, int] | None
    ) -> dict[int, list[int]]:
        trained: dict[int, list[int]] = {}
        steps = iter(tuple(self.resumed))
        for number, count in enumerate(self.ranks):
            is_last = number == len(self.ranks) - 1
            log = f"{config['log']}-{number}"
            part = {**with_ranks(config, count), "log": log, "events": []}
            if not is_last:
                at = self.KILLED_AT[number]
                if "local" not in config:
                    part["save_every"] = next(steps)
                    at = part["save_every"] + 3
                part["events"] = [{"at": "train", "step": at, "rank": count - 1, "do": "SIGKILL"}]
            if first and number == 0:
                part["trainer"] = {**part["trainer"], **first}
            folder = self.tmp / f"{Path(config['log']).parent.name}-{number}"
            folder.mkdir()
            codes, output = run(part, folder)
            assert (set(codes) == {0}) if is_last else (-signal.SIGKILL in codes), output
            self.output += output
            if number and "local" in config:
                found = re.search(r"Resuming from step (\d+) \(local checkpoint \S+, saved by (\d) ranks?", output)
                assert found is not None, output
                assert int(found[2]) == self.ranks[number - 1]
                self.resumed.append(int(found[1]))
            trained |= samples(log)
            if not is_last:
                between()
        return trained

    def is_as_from_global(self, config: dict[str, Any], trained: dict[int, list[int]]) -> None:
        wanted, steps = self.run_from_global()
        assert trained == steps
        for each in (config, wanted):
            each["trainer"] = {**each["trainer"], "devices": self.ranks[-1]}
        assert weights(config) == weights(wanted)
        assert result(config)[0]["metrics"] == result(wanted)[0]["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(4, 3, 4), (3, 1, 2)], ids=lambda x: "-".join(map(str, x)))
def test_local_checkpoints_of_another_number_of_ranks(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    local = Locally(tmp_path, *ranks, batch_norm=ranks[0] == 3)
    local.is_as_from_global(*local.run())
    left = {path.name for path in local.memory.rglob("*") if not path.is_dir()}
    assert not {name for name in left if name.endswith(".shard") or name.startswith(".")}


@pytest.mark.slow
def test_a_corrupt_local_shard_of_an_absent_rank(tmp_path: Path) -> None:
    local = Locally(tmp_path, 4, 3)

    def damage() -> None:
        (path,) = local.shards("rank-00003")  # of which rank 0 takes the place
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    config, trained = local.run(damage)
    assert re.search(r"Rank 0: local checkpoint rejected: .*rank-00003.*damaged", local.output)
    local.is_as_from_global(config, trained)


@pytest.mark.slow
def test_half_the_ranks_go_on_from_the_local_checkpoints_of_a_node_that_is_left(tmp_path: Path) -> None:
    local = Locally(tmp_path, 4, 2)

    def lose_the_first_node() -> None:
        (folder,) = local.memory.glob("local_ckpt-*")
        node = os.uname().nodename
        shutil.rmtree(folder / f"{node}-0")
        (folder / f"{node}-1").rename(folder / node)  # as it is called alone

    local.is_as_from_global(*local.run(lose_the_first_node, {"num_nodes": 2, "devices": 2}))


@pytest.mark.slow
def test_data_that_cannot_be_divided_are_rounded_down_from_local_checkpoints_too(tmp_path: Path) -> None:
    local = Locally(tmp_path, 4, 2, data="iterable")
    local.run()
    assert (
        "was saved by a run of 4 ranks and is resumed by 2, and an iterable dataset divides its own samples"
        in local.output
    )
    batch = re.search(r"continues from batch (\d+) of each rank", local.output)
    assert batch is not None
    assert int(batch[1]) == 2 * local.resumed[0]


REFUSED = {
    "an iterable dataset divides its own samples": {"data": "iterable"},
    "StatefulDataLoader keeps its own position": {"data": "stateful"},
    "the module uses manual optimization": {"manual": True},
    "DDP has static_graph=True": {"ddp": {"static_graph": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize(("why", "options"), REFUSED.items(), ids=REFUSED.keys())
def test_where_they_cannot_it_is_said_and_rounded_down(tmp_path: Path, why: str, options: dict[str, Any]) -> None:
    _, _, output = killed_and_resumed(tmp_path, 4, 2, **options)
    assert f"was saved by a run of 4 ranks and is resumed by 2, and {why}: weights" in output
    batch = re.search(r"continues from batch (\d+) of each rank", output)
    assert batch is not None
    assert int(batch[1]) == 10


@pytest.mark.slow
def test_losses_of_fewer_ranks_are_no_spikes_and_make_none(tmp_path: Path) -> None:
    callbacks = ["preemption", "auto_resume", "nan_guard"]
    guard = {"spiky_loss_factor": 2.5, "spike_window": 8}
    output = assert_the_same_run(tmp_path, 4, 3, 4, callbacks=callbacks, nan_guard=guard)
    assert "Skipped" not in output


def test_what_was_logged_is_merged() -> None:
    meta = {"on_epoch": True}

    def logged(value: float, batch: float | None, reduce: str, has_reset: bool = False) -> dict[str, Any]:
        return {
            "meta": meta,
            "reduce": reduce,
            "value": torch.tensor(value),
            "cumulated_batch_size": None if batch is None else torch.tensor(batch),
            "updates": 2,
            "has_reset": has_reset,
        }

    merged = lightning_metrics._merged_result
    both = merged(logged(3.0, 4.0, "mean"), logged(5.0, 8.0, "mean"))
    assert (both["value"].item(), both["cumulated_batch_size"].item(), both["updates"]) == (8.0, 12.0, 4)
    assert merged(logged(3.0, None, "max"), logged(5.0, None, "max"))["value"].item() == 5.0
    assert merged(logged(3.0, None, "min"), logged(5.0, None, "min"))["value"].item() == 3.0
    assert merged(logged(3.0, None, "sum"), logged(5.0, None, "sum"))["value"].item() == 8.0
    assert merged(logged(0.0, 0.0, "mean", has_reset=True), logged(5.0, 8.0, "mean"))["value"].item() == 5.0


def test_states_of_metrics_are_merged_as_they_are_reduced_over_ranks(caplog: pytest.LogCaptureFixture) -> None:
    class Mean(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
            self.add_state("own", torch.tensor(0.0), dist_reduce_fx=None)

        def update(self) -> None: ...
        def compute(self) -> None: ...

    states = [
        {"state": {"mean": torch.tensor(each), "own": torch.tensor(each)}, "updates": 1} for each in (0.0, 0.0, 6.0)
    ]
    with caplog.at_level("WARNING"):
        merged = lightning_metrics._merged_metric(Mean(), states)
    assert merged["state"]["mean"].item() == 2.0
    assert merged["updates"] == 3
    assert caplog.messages == [
        "Mean has no reduction over ranks for own: the values of absent ranks are left out in this epoch."
    ]


def test_what_cannot_be_copied_of_a_batch_does_not_end_the_fit() -> None:
    calculated = torch.ones(2, requires_grad=True) * 2
    batch = {"x": calculated, "lock": threading.Lock()}
    copied = lightning_micro_batches._copied(batch)
    assert copied["x"] is not calculated
    assert torch.equal(copied["x"], calculated)
    assert copied["lock"] is batch["lock"]


@pytest.mark.slow
def test_statistics_that_a_callback_renews_for_an_epoch_are_right_while_a_rank_is_absent(tmp_path: Path) -> None:
    """StochasticWeightAveraging has tensors of its own for those of batch normalization, in the last epoch."""
    script, statistics = tmp_path / "train.py", {}
    script.write_text("""
import os, signal, sys, time
import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
rank, name, path = os.environ["RANK"], *sys.argv[1:]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and rank == "1" and name == "disturbed":
    while not os.path.exists(path):
        time.sleep(0.1)
class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    def training_step(self, batch, batch_idx):
        if (self.global_step, rank, name) == (20, "1", "disturbed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.layer(batch) - 1).pow(2).mean()
    def train_dataloader(self):
        samples = torch.arange(64.0)[:, None] + torch.tensor([0.0, 1.0, 5.0, 7.0])
        return torch.utils.data.DataLoader(torch.sin(samples), 4)
    def on_train_end(self):
        if rank == "0":
            torch.save((self.layer[1].running_mean, self.layer[1].running_var), path)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
torch.manual_seed(7)
averages = StochasticWeightAveraging(0.05, 1)
quiet |= {"max_epochs": 3, "limit_val_batches": 0, "callbacks": averages}
trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", **quiet)
trainer.fit(Model())
""")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--when-lost", "go-on"]
    for name in ("undisturbed", "disturbed"):
        output = tmp_path / f"output of {name}"
        run_dir = ["--nproc-per-node=2", f"--run-dir={tmp_path / f'run {name}'}", str(script)]
        assert finish(start([*launch, *run_dir, name, str(tmp_path / name)], output), output) == 0, output.read_text()
        statistics[name] = torch.load(tmp_path / name)
    assert "continuing with 1 of 2 ranks" in output.read_text()
    for ours, theirs in zip(*statistics.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
