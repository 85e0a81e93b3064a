"""Bad numbers planted in real fits: what becomes of the step, of the model, and of the run."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import itertools
import json
import logging
import math
import multiprocessing
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint, NaNGuard, TrainingDiverged
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.callbacks import nan_guard
from lightning_resilience.detect.numerics import step_guard
from lightning_resilience.detect.numerics.numerics import SpikeReference
from lightning_resilience.detect.numerics.rollback_history import RollbackHistory
from lightning_resilience.fit import context, numerics_policy
from lightning_resilience.launch.report import report
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run, weights
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, some

BATCHES = 8
CAMPAIGN = pytest.mark.campaign

Spoil = Callable[["Model", torch.Tensor], torch.Tensor]


def saving(every: int) -> AutoResume:
    """Saves at exactly these steps: the training waits for each."""
    return AutoResume(every_n_train_steps=every, async_save=False)


def nan_loss(model: Model, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan


def inf_loss(model: Model, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.inf


def constant_nan(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """The gradients of this one are finite."""
    return loss + math.nan


def masked(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """The gradients of this one are zero, whatever is multiplied with them."""
    return torch.where(torch.tensor(False), loss, torch.tensor(math.nan))


def nan_input(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """Batch normalisation takes it into its running statistics."""
    return model.net(torch.full((4, 4), math.nan)).mean()


def nan_gradient(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """The loss is finite: the root of zero, as in many a distance."""
    return loss + 0 * (model.net[0].weight[0, 0] * 0).sqrt()


def inf_gradient(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """The loss is finite: the root of zero again."""
    return loss + (model.net[0].weight[0, 0] - model.net[0].weight[0, 0].detach()).abs().sqrt().sum()


SPOILS: dict[str, Spoil] = {
    "NaN loss": nan_loss,
    "infinite loss": inf_loss,
    "NaN loss with finite gradients": constant_nan,
    "NaN loss without gradients": masked,
    "NaN in the batch": nan_input,
    "NaN in one gradient": nan_gradient,
    "an infinite gradient": inf_gradient,
}


class Model(L.LightningModule):
    """Says what it was made of around every batch."""

    def __init__(
        self,
        spoils: dict[int, Spoil] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        manual: str = "",
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.spoils = spoils or {}
        self.make_optimizer = optimizer
        self.manual = manual
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.states: dict[int, list[torch.Tensor]] = {}
        self.losses: list[float] = []

    def batch(self) -> int:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.states[self.batch()] = self.state()
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        if (spoil := self.spoils.get(self.batch())) is not None:
            loss = spoil(self, loss)
        self.losses.append(float(loss))
        if self.manual:
            optimizers = self.optimizers() if self.manual == "two" else [self.optimizers()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        """Everything that a step changes."""
        optimizers = self.trainer.optimizers
        kept = [value for each in optimizers for state in each.state.values() for value in state.values()]
        tensors = [*self.parameters(), *self.buffers(), *(each for each in kept if isinstance(each, torch.Tensor))]
        return [each.detach().clone() for each in tensors]

    def configure_optimizers(self) -> Any:
        if self.manual == "two":
            return [self.make_optimizer(self.net[0].parameters()), self.make_optimizer(self.net[3].parameters())]
        return self.make_optimizer(self.parameters())


@pytest.fixture(autouse=True)
def first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "fits_begun", {})


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on an accelerator, where the host may not wait for a verdict; or as on the CPU."""
    if request.param:
        monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)
    return bool(request.param)


def fit(model: Model, tmp_path: Path, *callbacks: Any, loader: Any = None, **options: Any) -> L.Trainer:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(4 * BATCHES, 4))
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    trainer = L.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader if loader is not None else DataLoader(data, 4))
    return trainer


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def events(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [each for each in read_ledger(RunDirectory(tmp_path / "resilience").ledger) if each["event"] == name]


# -- a skipped step is none --------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
}


WAYS: dict[str, tuple[str, int, bool]] = {
    "AdamW, in the first step": ("AdamW", 0, False),
    "AdamW": ("AdamW", 5, False),
    "SGD with momentum": ("SGD with momentum", 5, False),
    "NAdam, in the first step, late": ("NAdam", 0, True),
    "fused AdamW, late": ("fused AdamW", 5, True),
}
"""The optimizer, the bad step, and whether the host learns late of it, when only a fused one has not acted yet."""
MORE_WAYS = {
    f"{name} {at} {late}": pytest.param((name, at, late), marks=pytest.mark.slow)
    for name in OPTIMIZERS
    for at, late in ((0, False), (0, True), (5, False), (5, True))
    if (name, at, late) not in WAYS.values() and ((at, late) != (5, True) or name == "fused AdamW")
}


@pytest.mark.slow_but_for(
    "fused AdamW, late-NaN in the batch",
    "AdamW-NaN in one gradient",
    "SGD with momentum-NaN loss",
    "NAdam, in the first step, late-infinite loss",
    "AdamW-an infinite gradient",
    "AdamW-NaN loss without gradients",
)
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
@pytest.mark.parametrize("way", [*WAYS.values(), *MORE_WAYS.values()], ids=[*WAYS, *MORE_WAYS])
def test_a_skipped_step_changes_nothing(
    spoil: Spoil, way: tuple[str, int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, at, late = way
    if late:
        monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)
    model, guard = Model({at: spoil}, OPTIMIZERS[optimizer]), NaNGuard()
    trainer = fit(model, tmp_path, guard)
    assert same(model.states[at], model.states[at + 1])
    assert not same(model.states[at + 1], model.states[at + 2])
    assert guard.skipped_steps == 1
    assert trainer.global_step == 2 * BATCHES
    assert all(torch.isfinite(each).all() for each in model.state())
    (event,) = events(tmp_path, "bad_step")
    assert (event["step"], event["epoch"], event["batches"], event["skipped"]) == (at, 0, [at, at + 1], True)


@pytest.mark.parametrize("late", [pytest.param(None, marks=CAMPAIGN), [3]])
def test_a_skipped_step_ends_no_run_through_its_metrics(late: list[int] | None, tmp_path: Path) -> None:
    """One NaN in an epoch's mean would end the fit by EarlyStopping, and be a bad epoch for a scheduler."""
    config = make(
        tmp_path,
        "run",
        callbacks=["auto_resume", "nan_guard"],
        late=late,
        fused=late is not None,
        plateau=True,
        spoils=[{"step": step, "what": "loss"} for step in (4, 15, 20)],  # 15 is the last one of an epoch
        lightning_callbacks={"EarlyStopping": {"monitor": "train_loss_epoch", "patience": 9, "check_finite": True}},
    )
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    (found,) = result(config)
    assert found["epoch"] == 3, text
    assert "The fit has finished with trouble: 3 steps were bad." in text
    assert math.isfinite(found["metrics"]["train_loss_epoch"])
    steps = [
        event["step"] for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == "bad_step"
    ]
    assert len(steps) == 3


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_samples_are_named(workers: int, persistent: bool, tmp_path: Path) -> None:
    """Those that workers were asked for before anybody looked are not known."""
    torch.manual_seed(3)
    loader = DataLoader(
        [torch.randn(4) for _ in range(4 * 16)],
        batch_sampler=BatchSampler(list(range(4 * 16)), 4, False),
        num_workers=workers,
        persistent_workers=persistent,
        collate_fn=lambda batch: [torch.stack(batch)],
    )
    fit(Model(dict.fromkeys((0, 9, 25), nan_loss)), tmp_path, NaNGuard(), loader=loader)
    found = [each["samples"] for each in events(tmp_path, "bad_step")]
    assert found == [None if workers else [0, 1, 2, 3], [36, 37, 38, 39], [36, 37, 38, 39]]


HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {"precision": "bf16-mixed"}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "manual": ({"manual": "one"}, {}),
    "two optimizers": ({"manual": "two"}, {}),
}


@pytest.mark.slow_but_for(
    "at once-bf16-nan_loss",
    "at once-manual-nan_gradient",
    "late-two optimizers-constant_nan",
    "late-clipped-nan_gradient",
)
@pytest.mark.parametrize("spoil", [nan_loss, constant_nan, nan_gradient])
@pytest.mark.parametrize(("of_model", "of_trainer"), HOW.values(), ids=HOW.keys())
def test_however_it_is_trained(
    spoil: Spoil, of_model: dict[str, Any], of_trainer: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    fused = OPTIMIZERS["fused AdamW"] if late else torch.optim.AdamW
    model, guard = Model({5: spoil}, fused, **of_model), NaNGuard()
    fit(model, tmp_path, guard, **of_trainer)
    before, after = model.states[5], model.states[6]
    if of_model.get("manual") == "two" and spoil is nan_gradient:  # the other's gradients are fine
        assert same(before[:2], after[:2])
        assert not same(before, after)
    else:
        assert same(before, after)
    assert guard.skipped_steps == 1
    assert all(torch.isfinite(each).all() for each in model.state())


def huge(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """Its gradients are numbers, and the sum of their squares is not."""
    return loss * 1e25


class ClipsAndGoesOn(Model):
    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **others: Any) -> None:
        self.clip_gradients(optimizer, *limits, **others)
        if self.batch() == 5:
            self.net[0].weight.grad[0, 0] = math.nan


class Halves(Model):
    """Its gradients are numbers of 16 bits, and their norm is none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net[0].weight.register_hook(lambda gradient: torch.full_like(gradient, 30_000.0))
        return loss


LOOKS: dict[str, tuple[Callable[[], Model], dict[str, Any], bool, int]] = {
    "its norm tells": (lambda: Model({5: nan_gradient}, OPTIMIZERS["fused AdamW"]), {}, False, 1),
    "of a bad loss, too": (lambda: Model({5: masked}, OPTIMIZERS["fused AdamW"]), {}, False, 1),
    "too large for a norm": (lambda: Model({5: huge}, OPTIMIZERS["fused AdamW"]), {}, False, 1),
    "changed after it": (lambda: ClipsAndGoesOn({}, OPTIMIZERS["fused AdamW"]), {}, True, 1),
    "of 16 bits": (lambda: Halves({}, torch.optim.SGD), {"precision": "16-true"}, True, 0),
    "by value": (lambda: Model({5: huge}), {"gradient_clip_algorithm": "value"}, True, 0),
}


@pytest.mark.parametrize(("make_model", "options", "looks", "bad"), LOOKS.values(), ids=LOOKS.keys())
def test_what_is_clipped_is_looked_at_once(
    make_model: Callable[[], Model],
    options: dict[str, Any],
    looks: bool,
    bad: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients, looked = step_guard._gradients, []
    monkeypatch.setattr(step_guard, "_gradients", lambda optimizer: looked.append(1) or gradients(optimizer))
    monkeypatch.setattr(step_guard, "_norms", lambda optimizer: [])  # only for the report
    model, guard = make_model(), NaNGuard()
    fit(model, tmp_path, guard, gradient_clip_val=0.5, **options)
    assert bool(looked) == looks
    assert guard.skipped_steps == bad
    if bad:
        assert same(model.states[5], model.states[6])
    if model.spoils.get(5) is huge and bad and not late:
        assert events(tmp_path, "bad_step")[0]["reason"] == "the gradients are too large: their norm is infinite"


def overflow(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """Infinite gradients of a finite loss: what a gradient scaler lowers its scale for."""
    return loss + (model.net[0].bias - model.net[0].bias.detach()).sum() * 1e36


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))


@pytest.mark.parametrize(("spoil", "bad"), [(nan_loss, 1), (constant_nan, 1), (nan_input, 1), (overflow, 0)])
def test_with_a_gradient_scaler(spoil: Spoil, bad: int, tmp_path: Path) -> None:
    """Infinite gradients are its business, and normal; a loss that is not finite is not."""
    model, guard = Model({5: spoil}), NaNGuard(max_consecutive=1)
    with contextlib.suppress(TrainingDiverged):
        fit(model, tmp_path, guard, saving(2), plugins=[scaled()])
    parameters = len(list(model.parameters()))  # the scaler leaves batch normalisation as it is
    assert same(model.states[5][: None if bad else parameters], model.states[6][: None if bad else parameters])
    assert len(events(tmp_path, "bad_step")) == bad
    assert len(events(tmp_path, "rollback")) == bad
    assert all(torch.isfinite(each).all() for each in model.state())


@pytest.mark.parametrize("at", [3, 4, 5])
def test_the_whole_window_of_accumulated_batches_is_skipped(at: int, late: bool, tmp_path: Path) -> None:
    model, guard = Model({at: nan_input}, OPTIMIZERS["fused AdamW"]), NaNGuard()
    trainer = fit(model, tmp_path, guard, accumulate_grad_batches=3)
    assert same(model.states[3], model.states[6])
    assert not same(model.states[6], model.states[7])
    assert trainer.global_step == 6
    assert guard.skipped_steps == 1
    assert events(tmp_path, "bad_step")[0]["batches"] == [3, 6]


@pytest.mark.parametrize("scheme", ["ema"])
def test_averaged_weights_take_no_part_in_a_skipped_step(scheme: str, tmp_path: Path) -> None:
    seen: dict[int, list[torch.Tensor]] = {}

    class Average(EMAWeightAveraging):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            seen[pl_module.batch()] = [each.detach().clone() for each in self._average_model.parameters()]

    fit(Model({5: nan_loss}), tmp_path, Average(decay=0.5), NaNGuard())
    assert same(seen[4], seen[5])
    assert not same(seen[5], seen[6])


# -- going back --------------------------------------------------------------------------------------------------------

GUARDED: dict[str, Any] = {"callbacks": ["preemption", "auto_resume", "nan_guard"], "nan_guard": {"action": "rollback"}}


@pytest.mark.parametrize(
    ("what", "save_every", "workers"),
    [
        pytest.param(*case, marks=() if case in (("loss", 5, 0), ("gradient", 1, 1)) else pytest.mark.campaign)
        for case in itertools.product(["loss", "gradient"], [5, 1], [0, 1])
    ],
)
@pytest.mark.slow_but_for("gradient-1-1")
def test_as_if_the_bad_batches_had_never_been_there(what: str, save_every: int, workers: int, tmp_path: Path) -> None:
    options = {**GUARDED, "save_every": save_every, "workers": workers, "augment": workers == 0, "without": []}
    spoils = [{"step": step, "what": what} for step in (13, 29)]
    config = make(tmp_path, "guarded", **options, spoils=spoils)
    codes, text = run(config, tmp_path / "guarded")
    assert codes == [0], text
    assert text.count("Rolled back to the last good checkpoint") == 2, text
    reference = make(tmp_path, "reference", **{**options, "without": [[0, 13], [1, 13]]})
    codes, text = run(reference, tmp_path / "reference")
    assert codes == [0], text
    assert "Rolled back" not in text
    assert result(config) == result(reference)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("spoil", [nan_loss, nan_gradient, nan_input])
def test_a_verdict_that_comes_too_late_is_gone_back_from(
    spoil: Spoil, action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an optimizer that cannot skip a step on its device."""
    monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)
    model = Model({9: spoil})
    fit(model, tmp_path / "late", NaNGuard(action), saving(2), max_epochs=4)
    (event,) = events(tmp_path / "late", "bad_step")
    assert (event["batches"], event["skipped"]) == ([1, 2], False)
    assert len(events(tmp_path / "late", "rollback")) == 1
    monkeypatch.undo()
    monkeypatch.setattr(context, "fits_begun", {})
    at_once = Model({9: spoil})
    fit(at_once, tmp_path / "at once", NaNGuard("rollback"), saving(2), max_epochs=4)
    assert same(model.state(), at_once.state())


@pytest.mark.parametrize("kind", [numerics_policy._STOP, numerics_policy._RERUN])
def test_what_was_undone_by_a_rollback_is_not_answered(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for before, and another reason has all go back first."""
    answered, after_rollback = [], numerics_policy.NumericsPolicy.after_rollback

    def ask_late(self: numerics_policy.NumericsPolicy) -> None:
        asked_at = self.session.fit.steps_counted - 1
        after_rollback(self)
        payload = {"asked_at": asked_at, "reason": "x", "window": [0, 5, 6, 5]}
        self.on_event(Event(1, kind, 0, Needs.CLEAN, payload))
        answered.append(kind)

    monkeypatch.setattr(numerics_policy.NumericsPolicy, "after_rollback", ask_late)
    fit(Model({5: nan_loss}), tmp_path, NaNGuard("rollback"), saving(2), max_epochs=4)
    assert answered == [kind]


@pytest.mark.slow
def test_a_bad_batch_costs_one_checkpoint_whatever_is_killed_in_between(tmp_path: Path) -> None:
    """Close behind a resume the checkpoint is suspected first; a restart must not suspect the next one too."""
    options = {**GUARDED, "save_every": 5, "keep": 6, "without": []}
    kills = [
        {"at": "train", "step": 22, "do": "SIGKILL", "once": True},
        {"at": "train", "step": 17, "do": "SIGKILL", "once": True, "after": 23},
    ]
    config = make(tmp_path, "guarded", **options, spoils=[{"step": 23, "what": "loss"}], events=kills)
    for expected in (-signal.SIGKILL, -signal.SIGKILL, 0):
        codes, text = run(config, tmp_path / "guarded")
        assert codes == [expected], text
    ledger = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert [each["step"] for each in ledger if each["event"] == "condemned"] == [20]
    assert [each["step"] for each in ledger if each["event"] in ("resumed", "went_back")] == [20, 15, 15, 20]
    reference = make(tmp_path, "reference", **{**options, "without": [[1, 7]]})
    assert run(reference, tmp_path / "reference")[0] == [0]
    assert result(config) == result(reference)


@pytest.mark.parametrize("action", ["skip", pytest.param("rollback", marks=pytest.mark.slow)])
def test_a_stop_within_a_bad_step_changes_nothing(action: str, tmp_path: Path) -> None:
    """The step is judged before the signal is acted on: nothing is saved that a resume would not judge any more."""
    options = {**GUARDED, "save_every": 5, "without": [], "nan_guard": {**GUARDED["nan_guard"], "action": action}}
    found = []
    for name, events in (("alone", []), ("stopped", [{"at": "train", "step": 23, "do": "SIGTERM", "once": True}])):
        config = make(tmp_path, name, **options, spoils=[{"step": 23, "what": "loss"}], events=events)
        for expected in [75, 0] if events else [0]:
            codes, text = run(config, tmp_path / name)
            assert codes == [expected], text
        found.append(result(config))
    stopped = re.search(r"Stopped at step (\d+)", text)
    assert stopped is not None, text
    is_late = int(stopped[1]) > 24  # of the bad one, where the ranks have agreed a step later
    assert is_late or "nothing was saved because the last step was bad" in text
    assert found[0] == found[1]


@pytest.mark.slow
def test_as_if_the_bad_batches_had_never_been_there_with_ranks(tmp_path: Path) -> None:
    options = {**GUARDED, "without": [], "trainer": {"devices": 2, "use_distributed_sampler": False}}
    spoils = [{"step": 13, "what": "loss", "rank": 1}, {"step": 29, "what": "gradient", "rank": 0}]
    config = make(tmp_path, "guarded", **options, spoils=spoils)
    codes, text = run(config, tmp_path / "guarded")
    assert set(codes) == {0}, text
    assert text.count("Rolled back to the last good checkpoint") == 2, text
    reference = make(tmp_path, "reference", **{**options, "without": [[0, 13], [1, 13]]})
    assert set(run(reference, tmp_path / "reference")[0]) == {0}
    assert result(config) == result(reference)
    assert len(set(weights(config))) == 1


# -- what is saved -----------------------------------------------------------------------------------------------------


class Broken(L.Callback):
    """Spoils a weight itself, which no look at gradients can see."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at, self.times = at, times

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if pl_module.batch() == self.at and self.times > 0:
            self.times -= 1
            pl_module.net[0].weight.data[1, 2] = math.inf


def unfit(path: Path) -> bool:
    checkpoint = torch.load(path, weights_only=False)
    tensors = [*checkpoint["state_dict"].values()]
    tensors += [each for state in checkpoint["optimizer_states"][0]["state"].values() for each in state.values()]
    return not all(torch.isfinite(each).all() for each in tensors)


@pytest.mark.slow_but_for("warn-1")
@pytest.mark.parametrize("top_k", [1, -1])
@pytest.mark.parametrize("action", ["skip", "warn"])
def test_no_file_holds_what_is_not_finite(action: Any, top_k: int, tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path / "own", every_n_train_steps=2, save_top_k=top_k, save_last=True)
    callbacks = [Broken(7), saving(3), LocalCheckpoint(tmp_path / "local", 1), own]
    model = Model()
    with contextlib.suppress(TrainingDiverged):
        fit(model, tmp_path, NaNGuard(action, max_consecutive=4), *callbacks, enable_checkpointing=True)
    files = [*(tmp_path / "own").glob("*.ckpt"), *(tmp_path / "resilience").glob("fit-*/checkpoints/*.ckpt")]
    assert len(files) >= 4
    assert not any(unfit(path) for path in files)
    assert (tmp_path / "own" / "last.ckpt").exists()


def test_what_is_infinite_from_the_beginning_is_meant_so(tmp_path: Path) -> None:
    model = Model()
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    fit(model, tmp_path, NaNGuard(), saving(3), LocalCheckpoint(tmp_path / "local", 2))
    assert events(tmp_path, "save_refused") == []
    assert {each["tier"] for each in events(tmp_path, "saved")} == {"local", "global"}


# -- what follows ------------------------------------------------------------------------------------------------------


def outcome(tmp_path: Path) -> tuple[str, str]:
    found = RunDirectory(tmp_path / "resilience").fit(0).outcome
    assert found is not None
    return found.status, found.reason


def test_warnings_change_nothing(tmp_path: Path) -> None:
    guard = NaNGuard("warn")
    model = Model({5: nan_loss})
    fit(model, tmp_path, guard)
    assert torch.isnan(model.net[0].weight).all()
    assert guard.skipped_steps > 1


def test_stopping_saves_what_was_good(tmp_path: Path) -> None:
    model = Model({5: nan_loss})
    with pytest.raises(TrainingDiverged, match="the loss is nan, after step 5"):
        fit(model, tmp_path, NaNGuard("stop"), AutoResume())
    assert outcome(tmp_path) == ("halted", "the loss is nan, after step 5")
    assert [each["reason"] for each in events(tmp_path, "saved")] == ["bad step"]


def test_weights_that_are_bad_are_gone_back_from(tmp_path: Path) -> None:
    """Whatever batch comes next, the loss is not finite: only older weights help."""
    model = Model()
    fit(model, tmp_path, NaNGuard(max_consecutive=3), Broken(7), saving(3), max_epochs=4)
    (event,) = events(tmp_path, "rollback")
    assert event["step"] >= 10
    assert [each["step"] for each in events(tmp_path, "went_back")] == [6]
    assert all(torch.isfinite(each).all() for each in model.state())


def test_what_never_gets_better_ends_with_the_reason(tmp_path: Path) -> None:
    guard, model = NaNGuard(max_consecutive=2, max_rollbacks=2), Model(dict.fromkeys(range(6, 500), nan_loss))
    with pytest.raises(TrainingDiverged, match="has gone back 2 times because of it"):
        fit(model, tmp_path, guard, saving(2), max_epochs=20)
    assert outcome(tmp_path)[0] == "halted"
    assert [each["times"] for each in events(tmp_path, "rollback")] == [1, 2]


def test_what_cannot_be_written_down_is_kept_in_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the fit would go back to the same batch for ever."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RollbackHistory, "write", full)
    model = Model({9: nan_loss, 30: nan_loss})
    fit(model, tmp_path, NaNGuard("rollback"), saving(2), max_epochs=5)
    assert len(events(tmp_path, "rollback")) == 2
    assert len(events(tmp_path, "bad_step")) == 2


def test_without_any_checkpoint_there_is_nowhere_to_go(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match="no checkpoint to go back to"):
        fit(Model(dict.fromkeys(range(3, 500), nan_loss)), tmp_path, NaNGuard(max_consecutive=2), max_epochs=20)
    assert outcome(tmp_path)[0] == "failed"  # it may be tried again: from its beginning it skips what was bad


def test_a_bad_step_that_was_skipped_before_any_checkpoint_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning_resilience"), "propagate", True)
    fit(Model({3: nan_loss}), tmp_path, NaNGuard("rollback"))
    assert outcome(tmp_path)[0] == "finished"
    (line,) = [each for each in caplog.messages if "no checkpoint to go back to" in each]
    assert line.endswith("Its step was skipped, and training goes on.")


@pytest.mark.parametrize("window", [None, 4])
def test_spikes_are_skipped(window: int | None, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spike(model: Model, loss: torch.Tensor) -> torch.Tensor:
        return loss * 1e6

    model = Model({9: spike}, OPTIMIZERS["fused AdamW"])
    monkeypatch.setattr(nan_guard, "SpikeReference", functools.partial(SpikeReference, samples=6))
    guard = NaNGuard(spiky_loss_factor=10.0, spike_window=window)
    fit(model, tmp_path, guard)
    assert same(model.states[9], model.states[10])
    assert guard.skipped_steps == 1
    assert torch.isfinite(torch.tensor(model.losses)).all()


def test_every_logger_is_told(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    fit(Model({5: nan_gradient, 9: nan_gradient}), tmp_path, NaNGuard(), logger=logger, log_every_n_steps=1)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("nan_guard/skipped_steps")]
    told = [(row["step"], row["nan_guard/skipped_steps"], row["nan_guard/grad_norm"]) for row in rows]
    assert told == [("6", "1.0", "nan"), ("10", "2.0", "nan")]


class Words(L.LightningModule):
    """Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(10, 4, sparse=True)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.words.weight.detach().clone())
        return self.words(torch.tensor([batch_idx])).pow(2).sum() * (math.nan if batch_idx == 3 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters())


def test_sparse_gradients(tmp_path: Path) -> None:
    model, guard = Words(), NaNGuard()
    fit(model, tmp_path, guard, max_epochs=1)  # type: ignore[arg-type]
    assert guard.skipped_steps == 1
    assert torch.equal(model.seen[3], model.seen[4])
    assert not torch.equal(model.seen[4], model.seen[5])


def test_what_is_saved_because_of_an_error_is_looked_at_too(tmp_path: Path) -> None:
    """By whoever is told of the error after us."""

    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if pl_module.batch() == 7:
                raise RuntimeError("on purpose")

    for broken, saved in ((Broken(6), 0), (Broken(99), 1)):
        own = ModelCheckpoint(tmp_path / "own", save_on_exception=True, every_n_train_steps=100)
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(Model(), tmp_path, NaNGuard(), broken, Fails(), own, enable_checkpointing=True)
        assert len(list((tmp_path / "own").glob("*.ckpt"))) == saved


def test_every_fit_counts_for_itself(tmp_path: Path) -> None:
    guard = NaNGuard(spiky_loss_factor=100.0)
    for _ in range(2):
        fit(Model({5: nan_loss}), tmp_path, guard)
        assert guard.skipped_steps == 1


def test_where_only_a_restart_goes_back_the_fit_fails_and_says_so(tmp_path: Path) -> None:
    average = StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
    model = Model(dict.fromkeys(range(10, 13), nan_loss))
    with pytest.raises(RuntimeError, match="only a restart can recreate them"):
        fit(model, tmp_path, NaNGuard("rollback"), average, saving(3), max_epochs=4)
    assert outcome(tmp_path)[0] == "failed"


def test_a_resume_in_the_middle_of_averaging_goes_back_by_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume itself has the callback exchange the scheduler, of which an older state knows nothing."""

    class Dies(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 20:
                raise RuntimeError("on purpose")

    def attempt(*more: Any) -> None:
        monkeypatch.setattr(context, "fits_begun", {})
        average = StochasticWeightAveraging(1e-2, swa_epoch_start=3, annealing_epochs=1)
        model = Model(dict.fromkeys(range(26, 29), nan_loss))
        fit(model, tmp_path, NaNGuard("rollback"), average, saving(3), *more, max_epochs=6)

    with pytest.raises(RuntimeError, match="on purpose"):
        attempt(Dies())
    with pytest.raises(RuntimeError, match="only a restart can recreate them"):
        attempt()
    assert outcome(tmp_path)[0] == "failed"


def test_workers_end_with_their_epoch(tmp_path: Path) -> None:
    """Also where batches are left over."""
    alive: list[int] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            alive.append(len(multiprocessing.active_children()))

    loader = DataLoader(TensorDataset(torch.randn(64, 4)), 4, num_workers=1)
    fit(Model(), tmp_path, NaNGuard(), Look(), loader=loader, limit_train_batches=3, max_epochs=4)
    assert max(alive) <= 2


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "ignore"}, "action must be 'skip', 'rollback', 'stop' or 'warn'"),
        ({"max_consecutive": 0}, "max_consecutive must be at least 1"),
        ({"max_rollbacks": -1}, "max_rollbacks must not be negative"),
        ({"spike_window": 4}, "set spiky_loss_factor, too"),
        ({"spiky_loss_factor": 1.0}, "factor must be above 1"),
        ({"spiky_loss_factor": 2.0, "spike_window": 1}, "window must be at least 2"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NaNGuard(**arguments)


def test_a_step_of_lbfgs_cannot_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        fit(Model(optimizer=torch.optim.LBFGS), tmp_path, NaNGuard())


# -- ranks -------------------------------------------------------------------------------------------------------------

RANKS: dict[str, dict[str, Any]] = {
    "ddp": {"trainer": {"devices": 2}},
    "ddp, clipped": {"trainer": {"devices": 2, "gradient_clip_val": 0.5}},
    "ddp, losses only": {"trainer": {"devices": 2}, "nan_guard": {"check_grads": False}},
    "sharded": {"trainer": {"devices": 2, "gradient_clip_val": math.inf}, "sharded": True},
    "sharded and clipped": {"trainer": {"devices": 2, "gradient_clip_val": 0.5}, "sharded": True},
    "sharded and clipped by hand": {"trainer": {"devices": 2}, "sharded": True, "manual": True, "clips": True},
}


@pytest.mark.slow_but_for("as on a GPU-ddp-loss")
@pytest.mark.also_as_on_gpu("ddp-loss", "ddp, clipped-masked", "sharded-gradient", "sharded and clipped-masked")
@pytest.mark.parametrize("what", ["loss", "gradient", "masked"])
@pytest.mark.parametrize("options", RANKS.values(), ids=RANKS.keys())
def test_what_one_rank_sees_all_skip(options: dict[str, Any], what: str, tmp_path: Path) -> None:
    if what == "gradient" and "nan_guard" in options:
        pytest.skip("nobody looks")
    config = make(
        tmp_path,
        "run",
        callbacks=["auto_resume", "nan_guard"],
        spoils=[{"step": step, "what": what, "rank": 1} for step in (0, 13)],
        save_every=1000,
        **options,
    )
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    found = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "bad_step"]
    assert {each["step"] for each in found} == {0, 13}
    assert len(set(weights(config))) == 1


GOING_BACK = {
    "ddp": RANKS["ddp"],
    "sharded": {"trainer": {"devices": 2}, "sharded": True},
    "sharded and clipped": RANKS["sharded and clipped"],
}


@pytest.mark.also_as_on_gpu("ddp-local", "sharded-global")
@pytest.mark.parametrize("tier", ["global", "local"])
@pytest.mark.parametrize("options", GOING_BACK.values(), ids=GOING_BACK.keys())
@pytest.mark.slow_but_for("cpu-ddp-local")
def test_ranks_go_back_together(options: dict[str, Any], tier: str, tmp_path: Path) -> None:
    """With the bad batches skipped on all ranks, the run is that of a resume."""
    local = {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}
    config = make(
        tmp_path,
        "run",
        callbacks=["auto_resume", "nan_guard", *(["local_checkpoint"] if tier == "local" else [])],
        local=local,
        nan_guard={"action": "rollback"},
        spoils=[{"step": 21, "what": "gradient", "rank": 1}],
        save_every=1000 if tier == "local" else 5,
        step_s=0.03 if tier == "local" else 0.0,
        **options,
    )
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    assert text.count("Rolled back to the last good checkpoint") == 1
    backs = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "went_back"]
    assert [(each["tier"], each["step"]) for each in backs] == [(tier, 20)]
    assert "No interruption." in report(config["run_dir"])
    (rollback,) = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "rollback"]
    assert len(rollback["losses"]) == 2
    assert result(config)[0]["step"] == 47
    assert len(set(weights(config))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gradient", *(pytest.param(each, marks=CAMPAIGN) for each in ("loss", "masked"))])
def test_what_only_one_rank_can_know_in_time_is_gone_back_from(what: str, tmp_path: Path) -> None:
    """No rank skips alone; and what the other sees of the damage does not count as a bad batch of its own."""
    options = {
        "callbacks": ["auto_resume", "nan_guard"],
        "sharded": True,
        "trainer": {"devices": 2, "use_distributed_sampler": False},
        "save_every": 5,
        "without": [],
    }
    config = make(tmp_path, "run", spoils=[{"step": 21, "what": what, "rank": 1}], **options)
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    assert text.count("the run goes back instead of skipping it") == 1, text
    ledger = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert {each["skipped"] for each in ledger if each["event"] == "bad_step"} == {False}
    assert [each["step"] for each in ledger if each["event"] == "went_back"] == [20]
    reference = make(tmp_path, "reference", **{**options, "without": [[1, 5]]})
    assert set(run(reference, tmp_path / "reference")[0]) == {0}
    assert result(config) == result(reference)


def test_warnings_change_nothing_on_any_rank(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        callbacks=["nan_guard"],
        nan_guard={"action": "warn"},
        sharded=True,
        trainer={"devices": 2, "max_epochs": 1},
        spoils=[{"step": 13, "what": "gradient", "rank": 1}],
    )
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    found = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "bad_step"]
    assert {each["step"] for each in found} == {13, 14, 15}


@pytest.mark.slow
def test_the_last_step_of_one_rank_ends_all(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        callbacks=["auto_resume", "nan_guard"],
        sharded=True,
        trainer={"devices": 2},
        spoils=[{"step": 47, "what": "gradient", "rank": 1}],
    )
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {1}, text
    assert text.count("a step of the last ones was bad; started again, the run skips its batches") >= 1
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit_whose_last_steps_are_all_bad_has_not_finished(tmp_path: Path, devices: int) -> None:
    """As many as it would go back for; and where it has gone back as often as it may, that is the end."""
    config = make(
        tmp_path,
        "run",
        callbacks=["auto_resume", "nan_guard"],
        nan_guard={"max_consecutive": 3, "max_rollbacks": 1},
        trainer={"devices": devices},
        spoils=[{"step": step, "what": "loss", "rank": 0} for step in (45, 46, 47)],
    )
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {1}, text
    assert "the last 3 steps were bad; started again, the run skips its batches" in text
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    (tmp_path / "final").mkdir()
    final = {
        **config,
        "run_dir": str(tmp_path / "final" / "run"),
        "nan_guard": {"max_consecutive": 3, "max_rollbacks": 0},
    }
    codes, text = run(final, tmp_path / "final")
    assert set(codes) == {1}, text
    assert "the last steps were bad; the run has gone back 0 times" in text


# -- what a healthy step costs the ranks -------------------------------------------------------------------------------

HEALTHY: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, losses only": {"nan_guard": {"check_grads": False}},
    "ddp, by hand": {"manual": True},
    "sharded": {"sharded": True},
    "sharded and clipped": {"sharded": True, "clip": 0.5},
    "sharded, by hand": {"sharded": True, "manual": True},
}


@pytest.mark.parametrize("options", some(HEALTHY, "ddp, losses", "sharded, by"))
@pytest.mark.slow_but_for("ddp")
def test_a_healthy_step_has_no_collective_more(options: dict[str, Any], tmp_path: Path) -> None:
    """Of all callbacks of the recipe ``nemo``; recorded by torch, in all of its process groups."""
    recorded = []
    for name, callbacks in (("alone", []), ("all", ["nemo"])):
        config = make(tmp_path, name, callbacks=callbacks, collectives=str(tmp_path / name / "collectives"), **options)
        config["trainer"] = {"devices": 2, "max_epochs": 1, "gradient_clip_val": config.pop("clip", None)}
        codes, text = run(config, tmp_path / name)
        assert set(codes) == {0}, text
        recorded.append([json.loads(Path(f"{config['collectives']}.{rank}").read_text()) for rank in range(2)])
    for alone, guarded in zip(*recorded, strict=True):
        assert len(guarded) >= 3 * 6
        left = iter(guarded)
        expected = next(left, None)
        fewer = []
        for each in alone:
            if each == expected:
                expected = next(left, None)
            else:
                fewer.append(each)
        assert expected is None, f"not without the callbacks: {expected}"
        assert fewer in ([], [["gloo:broadcast", [[1]]]] * 6)  # Lightning's, about SIGTERM, is not needed any more
