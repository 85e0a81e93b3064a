"""Bad numbers where the host must not wait for the device: what it learns late, and what it must not touch."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_resilience import AutoResume, LocalCheckpoint, NaNGuard
from lightning_resilience.callbacks import nan_guard
from lightning_resilience.detect.numerics import numerics
from lightning_resilience.detect.numerics.numerics import ChangingBuffers
from lightning_resilience.detect.numerics.step_guard import StepGuard
from lightning_resilience.fit import context, numerics_policy
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run
from tests.late import Travelling
from tests.ledgers import read_ledger
from tests.test_exact_resume import make
from tests.test_nan_guard import (
    OPTIMIZERS,
    Model,
    events,
    fit,
    inf_gradient,
    nan_gradient,
    nan_input,
    nan_loss,
    overflow,
    same,
    scaled,
)

FUSED = OPTIMIZERS["fused AdamW"]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "fits_begun", {})
    monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)


# -- what the host reads, and when -------------------------------------------------------------------------------------


class Late(Model):
    """Knows how far the host is ahead of the device."""

    travelling: Travelling | None = None
    step_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.travelling is not None:
            self.travelling.now += 1
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)


def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int | None, guard: NaNGuard, model: Late, **options: Any
) -> Late:
    """The model after a fit in which verdicts take so many batches; ``None``: as on the CPU, where they are at once."""
    with monkeypatch.context() as patched:
        patched.setattr(context, "fits_begun", {})
        if batches is None:
            patched.setattr(numerics_policy, "_reads_cost_nothing", lambda device: True)
        else:
            model.travelling = Travelling(batches)
            patched.setattr(numerics, "_send", model.travelling)
        callbacks = options.pop("callbacks", [])
        fit(model, tmp_path / str(batches), guard, *callbacks, max_epochs=6, **options)
    return model


def spike(model: Model, loss: Tensor) -> Tensor:
    return loss * 1e6


ADAMW = torch.optim.AdamW
TRAININGS: dict[str, tuple[dict[int, Any], Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "skipped": ({9: nan_input, 20: nan_gradient}, FUSED, {}, {}),
    "skipped in a row": (dict.fromkeys(range(14, 19), nan_loss), FUSED, {}, {}),
    "too many in a row": (dict.fromkeys(range(14, 18), nan_loss), FUSED, {"max_consecutive": 4}, {}),
    "accumulated": ({14: nan_input}, FUSED, {}, {"accumulate_grad_batches": 3}),
    "gone back from": ({14: nan_loss, 30: nan_gradient}, ADAMW, {"action": "rollback"}, {}),
    "spikes": ({40: spike}, FUSED, {"spiky_loss_factor": 10.0, "spike_window": 4}, {}),
    "the last step": ({47: nan_input}, FUSED, {}, {}),
}


@pytest.mark.slow_but_for("accumulated-3")
@pytest.mark.parametrize("batches", [1, 3, 8])
@pytest.mark.parametrize("name", TRAININGS)
def test_however_late_a_verdict_is_the_weights_are_the_same(
    name: str, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoils, optimizer, of_guard, options = TRAININGS[name]
    ends = []
    for late in (None, batches):
        model, saves = Late(spoils, optimizer), AutoResume(every_n_train_steps=5)
        trained(tmp_path, monkeypatch, late, NaNGuard(**of_guard), model, callbacks=[saves], **options)
        ends.append(model.state())
    assert same(*ends)
    assert len(events(tmp_path / str(batches), "bad_step")) >= 1


@pytest.mark.slow_but_for("3-local")
@pytest.mark.parametrize("tier", ["global", "local"])
@pytest.mark.parametrize("batches", [3, 8])
def test_the_last_good_state_is_kept_until_the_verdict_is_there(
    tier: str, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a save after every step, of which two are kept, and as many bad steps as make the run go back."""
    ends = []
    for late in (None, batches):
        folder = tmp_path / f"local-{late}"
        saves = AutoResume(every_n_train_steps=1) if tier == "global" else LocalCheckpoint(folder, 1)
        model = Late(dict.fromkeys(range(14, 24), nan_loss), FUSED)
        model.step_s = 0.0 if tier == "global" else 0.01  # so that what is saved behind the training is saved
        trained(tmp_path, monkeypatch, late, NaNGuard(), model, callbacks=[saves])
        (back,) = events(tmp_path / str(late), "went_back")
        assert back["step"] <= 14
        ends.append(model.state())
    assert same(*ends)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_healthy_training_waits_for_nothing(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Late({}, FUSED)
    trained(tmp_path, monkeypatch, 3, NaNGuard(), model, gradient_clip_val=clip)
    assert model.travelling is not None
    assert model.travelling.waits <= 6 * 3  # at the ends of 6 epochs: what judges their metrics follows


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero")
        return func(*args, **(kwargs or {}))


def guarded(module: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> StepGuard:
    options = {"skips": True, "late": True, **options}
    return StepGuard(
        lambda: optimizers, module.named_parameters, ChangingBuffers(module), torch.device("cpu"), **options
    )


@pytest.fixture
def removed() -> Iterator[list[StepGuard]]:
    guards: list[StepGuard] = []
    yield guards
    for guard in guards:
        guard.remove()


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, fused=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    ],
    ids=["SGD", "fused SGD", "fused SGD with momentum", "fused AdamW"],
)
def test_the_host_waits_in_the_first_step_only(
    make: Callable[..., torch.optim.Optimizer], removed: list[StepGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers that have no state after it will not have any later."""
    module = nn.Linear(4, 2)
    optimizer = make(module.parameters())
    guard = guarded(module, optimizer)
    removed.append(guard)
    monkeypatch.setattr(numerics, "_send", lambda tensor: (0.0, None))
    counted = []
    for step in range(6):
        guard.begin(step)
        optimizer.zero_grad()
        loss = module(torch.randn(3, 4)).pow(2).mean()
        with Reads() as counting:
            guard.check_loss(loss)
            loss.backward()
            optimizer.step()
            guard.end()
        counted.append(counting.count)
    assert counted == [1, 0, 0, 0, 0, 0]


# -- one step after the other in one batch -----------------------------------------------------------------------------


class Gan(Late):
    """The standard step of a GAN: the generator learns through a graph from before the discriminator's step."""

    def __init__(self, spoils: dict[int, Any] | None = None) -> None:
        super().__init__(spoils, FUSED, "gan")
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.states[self.batch()] = self.state()
        if self.travelling is not None:
            self.travelling.now += 1
        ours, theirs = self.optimizers()
        fake = self.generator(batch[0])
        theirs.zero_grad()
        loss = self.net(batch[0]).mean() - self.net(fake.detach()).mean()
        if (spoil := self.spoils.get(self.batch())) is not None:
            loss = spoil(self, loss)
        self.manual_backward(loss)
        theirs.step()
        ours.zero_grad()
        loss = self.net(fake).mean()
        self.manual_backward(loss)
        ours.step()

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.generator.parameters()), self.make_optimizer(self.net.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [None, 1, 8])
def test_a_gan_with_batch_normalisation_trains(
    batches: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nobody looked; and a bad batch leaves no trace."""
    alone = Gan()
    fit(alone, tmp_path, max_epochs=6)
    model = trained(tmp_path, monkeypatch, batches, NaNGuard(), Gan())  # type: ignore[assignment]
    assert same(alone.state(), model.state())
    model = trained(tmp_path, monkeypatch, batches, NaNGuard(), Gan({9: nan_input}))  # type: ignore[assignment]
    assert same(model.states[9], model.states[10])
    assert all(torch.isfinite(each).all() for each in model.state())


def test_large_buffers_that_are_put_back_have_not_changed(removed: list[StepGuard]) -> None:
    """Or they would be copied in every step from then on."""
    module = nn.Linear(4, 2)
    module.register_buffer("mask", torch.zeros(1 << 17))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    changing = ChangingBuffers(module)
    guard = StepGuard(lambda: [optimizer], module.named_parameters, changing, torch.device("cpu"), True, True)
    removed.append(guard)
    for step in range(6):
        guard.begin(step)
        optimizer.zero_grad()
        loss = module(torch.randn(3, 4)).mean()
        guard.check_loss(loss)
        loss.backward()
        optimizer.step()
    assert changing() == []


# -- gradient scalers --------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_for("3-AdamW")
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW"])
@pytest.mark.parametrize("batches", [None, 3])
def test_a_bad_batch_leaves_running_statistics_alone_in_16_bits(
    batches: int | None, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guard = Late({5: nan_input, 9: overflow}, OPTIMIZERS[optimizer]), NaNGuard()
    trained(tmp_path, monkeypatch, batches, guard, model, plugins=[scaled()], callbacks=[AutoResume()])
    assert same(model.states[5], model.states[6])
    parameters = len(list(model.parameters()))
    assert same(model.states[9][:parameters], model.states[10][:parameters])
    assert guard.skipped_steps == 1
    assert events(tmp_path / str(batches), "save_refused") == []
    assert all(torch.isfinite(each).all() for each in model.state())


def hidden(model: Model, loss: Tensor) -> Tensor:
    """Of a NaN in the batch only the running statistics tell: the loss leaves it out."""
    return model.net[:2](torch.full((4, 4), math.nan)).nan_to_num().sum() * 0 + loss


@pytest.mark.parametrize("batches", [None, 3])
def test_running_statistics_tell_a_bad_batch_from_a_scale_that_is_too_large(
    batches: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guard = Late({5: hidden}, FUSED), NaNGuard()
    trained(tmp_path, monkeypatch, batches, guard, model, plugins=[scaled()])
    assert guard.skipped_steps == 1
    assert all(torch.isfinite(each).all() for each in model.state())


class Scaling(Late):
    """Manual optimization with a gradient scaler of its own."""

    def __init__(self, spoils: dict[int, Any] | None = None, optimizer: Any = FUSED) -> None:
        super().__init__(spoils, optimizer, "own scaler")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.states[self.batch()] = self.state()
        if self.travelling is not None:
            self.travelling.now += 1
        optimizer = self.trainer.optimizers[0]
        optimizer.zero_grad()
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        if (spoil := self.spoils.get(self.batch())) is not None:
            loss = spoil(self, loss)
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())


@pytest.mark.slow_but_for("3-fused")
@pytest.mark.parametrize("optimizer", [FUSED, ADAMW], ids=["fused", "for each"])
@pytest.mark.parametrize("batches", [None, 3])
def test_a_scaler_of_the_users_own(
    batches: int | None, optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains as if nobody looked; its overflows are its own, and a bad loss is bad."""
    alone = Scaling({3: inf_gradient}, optimizer)
    fit(alone, tmp_path, max_epochs=6)
    model, guard = Scaling({3: inf_gradient}, optimizer), NaNGuard(max_consecutive=1)
    trained(tmp_path, monkeypatch, batches, guard, model)
    assert same(alone.state(), model.state())
    assert alone.scales == model.scales
    assert guard.skipped_steps == 0
    model, guard = Scaling({9: nan_input}, optimizer), NaNGuard()
    trained(tmp_path, monkeypatch, batches, guard, model)
    assert same(model.states[9], model.states[10])
    assert guard.skipped_steps == 1


# -- several devices ---------------------------------------------------------------------------------------------------


def test_verdicts_of_several_devices(removed: list[StepGuard], monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that torch only pretends to have: it refuses to bring together what lies on several."""
    sent: list[Tensor] = []

    def send(tensor: Tensor) -> tuple[Tensor, None]:
        sent.append(tensor)
        return torch.ones(()), None

    monkeypatch.setattr(numerics, "_send", send)
    with FakeTensorMode(), torch.no_grad():
        here, there = torch.device("cuda", 0), torch.device("cuda", 1)
        parameters = [nn.Parameter(torch.empty(2, device=each)) for each in (there, here)]
        optimizer = torch.optim.SGD(parameters, fused=True)
        optimizer.state[parameters[0]] = {"momentum_buffer": None}
        guard = StepGuard(
            lambda: [optimizer], lambda: [], ChangingBuffers(nn.BatchNorm1d(2, device=here)), here, True, True
        )
        removed.append(guard)
        guard.begin(0)
        guard.check_loss(torch.empty(()))  # on the CPU
        guard.check_loss(torch.empty((), device=there))
        for gradients in (None, torch.empty):
            for parameter in parameters:
                parameter.grad = None if gradients is None else gradients(2, device=parameter.device)
            guard._check_later(optimizer)
            guard._put_back(optimizer)
        guard.end()
    assert [each.device for each in sent] == [here]


def test_the_smallest_parameter_tells(removed: list[StepGuard]) -> None:
    """Not the last: that may be the head of a language model, of gigabytes."""
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 64, bias=False))
    module[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    guard = guarded(module, optimizer, replicated=True)
    removed.append(guard)
    for value, finite in ((1.0, True), (math.nan, False)):
        guard.begin(value)
        optimizer.zero_grad()
        loss = module(torch.randn(3, 4)).mean()
        loss = torch.where(torch.tensor(math.isnan(value)), torch.tensor(value), loss)  # no gradient tells
        guard.check_loss(loss)
        loss.backward()
        assert bool(torch.isfinite(module[0].weight.grad).all()) is finite
        assert torch.isfinite(module[1].weight.grad).all()
        optimizer.step()
        guard.end()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_though_no_gradient_is(value: float, removed: list[StepGuard]) -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    removed.append(guard := guarded(module, optimizer))
    for each in (1.0, value):  # in its first step an optimizer is asked otherwise
        before = module.weight.clone()
        guard.begin(each)
        optimizer.zero_grad()
        loss = module(torch.randn(3, 4)).mean()
        guard.check_loss(loss * 0 + each)
        loss.backward()
        optimizer.step()
        guard.end()
    (first, second) = guard.results(wait=True)
    assert first.problem is None
    assert (second.problem is None) == math.isfinite(value)
    assert torch.equal(module.weight, before) != math.isfinite(value)


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "late"),
    [({}, [1, 5]), ({"sharded": True, "trainer": {"gradient_clip_val": math.inf}}, [5, 1])],
    ids=["ddp", "sharded and clipped"],
)
@pytest.mark.slow
def test_ranks_that_learn_at_different_times_skip_the_same_steps(
    options: dict[str, Any], late: list[int], tmp_path: Path
) -> None:
    spoils = [{"step": 0, "what": "masked", "rank": 1}, {"step": 13, "what": "masked", "rank": 0}]
    spoils += [{"step": 21, "what": "gradient", "rank": 1}, {"step": 47, "what": "loss", "rank": 0}]
    results = []
    for name, delays in (("at once", None), ("late", late)):
        config = make(
            tmp_path,
            name,
            callbacks=["auto_resume", "nan_guard"],
            spoils=spoils,
            fused=True,
            late=delays,
            save_every=4,
            **{**options, "trainer": {"devices": 2, **options.get("trainer", {})}},
        )
        codes, text = run(config, tmp_path / name)
        assert set(codes) == {0}, text
        found = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "bad_step"]
        assert {(each["step"], each["skipped"]) for each in found} == {(step, True) for step in (0, 13, 21, 47)}
        results.append(result(config)[0]["weights"])
    assert results[0] == results[1]


@pytest.mark.parametrize("late", [[6, 1], [1, 6]], ids=["rank 0 last", "rank 1 last"])
@pytest.mark.slow
def test_the_first_bad_step_is_to_blame_whoever_learns_of_it_first(late: list[int], tmp_path: Path) -> None:
    """One rank has seen the gradient, and the other what the step has made of the weights."""
    options = {
        "callbacks": ["auto_resume", "nan_guard"],
        "sharded": True,
        "trainer": {"devices": 2, "use_distributed_sampler": False},
        "without": [],
        "fused": True,
        "late": late,
    }
    config = make(tmp_path, "run", spoils=[{"step": 21, "what": "gradient", "rank": 1}], **options)
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    ledger = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert [each["step"] for each in ledger if each["event"] == "went_back"] == [20]
    reference = make(tmp_path, "reference", **{**options, "without": [[1, 5]]})
    assert set(run(reference, tmp_path / "reference")[0]) == {0}
    assert result(config) == result(reference)


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options", "callbacks", "said"),
    [
        (ADAMW, {}, [], "AdamW cannot skip a step"),
        (FUSED, {}, [], None),
        (ADAMW, {"plugins": True}, [], "leaves infinite gradients to the gradient scaler"),
        (FUSED, {}, [EMAWeightAveraging], "averages the same weights once more"),
    ],
)
def test_what_a_user_should_know_is_said_once(
    optimizer: Any, options: Any, callbacks: list[Any], said: str | None, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    options = {"plugins": [scaled()]} if options else {}
    fit(Model({}, optimizer), tmp_path, NaNGuard(), *(each() for each in callbacks), **options)
    found = [each.getMessage() for each in caplog.records if each.name == nan_guard.__name__]
    assert [said in each for each in found] == [True] if said else found == []
