"""A snapshot is bitwise the state at its boundary, however late it is copied and whatever happens meanwhile."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import LocalCheckpoint
from lightning_resilience.checkpoint import shard, sharded
from lightning_resilience.checkpoint.node_store import NodeStore
from lightning_resilience.checkpoint.rank_state import RankState
from lightning_resilience.checkpoint.safe_serialization import pack, unpack
from lightning_resilience.checkpoint.snapshot import Fence, Snapshots, optimizer_tensors
from lightning_resilience.fit import context
from tests import snapshot_worker
from tests.harness import CONTEXT, free_port
from tests.snapshot_worker import PATIENCE_S, OnPurpose, Witness, same

pytestmark = pytest.mark.filterwarnings("ignore")

Adam = functools.partial(torch.optim.Adam, lr=0.1)
ALL = [1, 2, 3, 4, 5]
"""The steps that are saved: the first batch is trained before the first save, and the last needs none."""


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    monkeypatch.setattr(context, "fits_begun", {})
    return Witness(monkeypatch)


class Module(L.LightningModule):
    """Dropout, batch normalisation, and a buffer that forward writes into.

    Args:
        net: What is trained, 4 numbers to any.
        optimizer: Makes it, given the parameters.
        hooks: Methods of this module by name.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[list[nn.Parameter]], Any] = Adam,
        hooks: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = net or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(4))
        self.make = optimizer
        self.events: list[str] = []
        for name, hook in (hooks or {}).items():
            setattr(self, name, hook.__get__(self))

    def loss(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        self.events.append("forward")
        return self.net(batch[0]).float().pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_after_backward(self) -> None:
        self.events.append("backward")

    def configure_optimizers(self) -> Any:
        return self.make([parameter for parameter in self.parameters() if parameter.requires_grad])


def fit(
    witness: Witness, tmp: Path, module: L.LightningModule, callbacks: Iterable[Any] = (), **options: Any
) -> L.Trainer:
    """Trains 2 epochs of 3 batches, unless told otherwise, and saves at every boundary."""
    local = LocalCheckpoint(tmp / "local", every_n_train_steps=1, run_dir=tmp / "run")
    trainer = L.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": str(tmp),
            **options,
        },
        callbacks=[*callbacks, local],
    )
    witness.trainer = trainer
    if isinstance(module, Module):
        module.events = witness.events
    data = TensorDataset(torch.randn(9, 4, generator=torch.Generator().manual_seed(3)))
    trainer.fit(module, DataLoader(data, 3), DataLoader(data, 6))
    return trainer


# -- in a Trainer: how the optimizer is called -------------------------------------------------------------------------


class Gan(Module):
    """Two optimizers by hand: the second as it is, the first as it is or as Lightning wraps it."""

    automatic_optimization = False

    def __init__(self, closures: bool, raw: bool) -> None:
        super().__init__()
        self.closures, self.raw = closures, raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        # Lightning counts the steps of wrapped ones only.
        for optimizer in (self.optimizers(not self.raw)[0], self.optimizers()[1]):

            def closure(optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            if self.closures:
                optimizer.step(closure) if self.raw else optimizer.step(closure=closure)
            else:
                closure()
                optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:2], 0.1, momentum=0.9), Adam(parameters[2:])


class Accumulating(Module):
    """Accumulates by hand: of every two batches the first changes no weights."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def assert_overlapped(events: list[str]) -> None:
    """After every boundary come forward and backward of a batch, and only then the fence."""
    boundaries = [index for index, event in enumerate(events) if event.startswith("boundary")]
    assert boundaries
    for start in boundaries:
        fence = events.index("fence", start)
        assert events[start + 1 : fence].count("forward") == events[start + 1 : fence].count("backward") == 1


OPTIMIZATION: dict[str, Any] = {
    "automatic": (Module, {}),
    "bf16-mixed": (Module, {"precision": "bf16-mixed"}),
    "bf16-true": (Module, {"precision": "bf16-true"}),
    "16-mixed, with a gradient scaler": (Module, {"precision": "16-mixed"}),
    "clipped": (Module, {"gradient_clip_val": 0.1}),
    "accumulating": (Module, {"accumulate_grad_batches": 2}),
    "accumulating by hand": (Accumulating, {}),
    "two by hand": (lambda: Gan(closures=False, raw=False), {}),
    "two by hand, closures": (lambda: Gan(closures=True, raw=False), {}),
    "two by hand, one of torch": (lambda: Gan(closures=False, raw=True), {}),
    "two by hand, one of torch, closures": (lambda: Gan(closures=True, raw=True), {}),
}


@pytest.mark.slow_but_for("automatic", "accumulating", "two by hand")
@pytest.mark.parametrize(("make", "options"), OPTIMIZATION.values(), ids=OPTIMIZATION)
def test_the_optimizer_waits_and_forward_and_backward_do_not(
    make: Callable[[], Module], options: dict[str, Any], witness: Witness, tmp_path: Path
) -> None:
    fit(witness, tmp_path, make(), **options)
    assert len(witness.published) == len(witness.expected) >= 2
    assert not witness.wrong()
    assert_overlapped(witness.events)
    states = [state["live"]["state_dict"] for state in witness.expected.values()]
    assert not any(same(*pair) for pair in itertools.pairwise(states))  # else this test shows nothing


# -- in a Trainer: optimizers ------------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """As they were written once: what it writes torch does not count."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])
        return loss


class Hoarder(torch.optim.SGD):
    """Keeps what is no tensor, and tensors deep inside; allocates in its third step; not all it writes is counted."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.update(n=state.get("n", 0) + 1, none=None, inf=float("inf"), big=2**70)
            if state["n"] == 3:
                state["deep"] = {"list": [torch.zeros_like(parameter), ("name", torch.tensor(1))], "dtype": torch.half}
                state["view"] = state["deep"]["list"][0].view(-1)[:2]
            if state["n"] >= 3:
                state["deep"]["list"][0].data.add_(parameter.detach())
        return loss


class _WithSchedule(Module):
    """The learning rate is a tensor, which the schedule writes into."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.1), amsgrad=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


OPTIMIZERS: dict[str, Callable[[], Module]] = {
    "LBFGS": lambda: Module(optimizer=functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3)),
    "Adam foreach": lambda: Module(optimizer=functools.partial(Adam, foreach=True)),
    "Adam fused": lambda: Module(optimizer=functools.partial(Adam, fused=True)),
    "AdamW, learning rate a tensor": _WithSchedule,
    "SGD": lambda: Module(optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "Adafactor": lambda: Module(optimizer=torch.optim.Adafactor),
    "ASGD": lambda: Module(optimizer=torch.optim.ASGD),
    "Rprop": lambda: Module(optimizer=torch.optim.Rprop),
    "Muon": lambda: Module(_matrices(), torch.optim.Muon),
    "writes data": lambda: Module(optimizer=Plain),
    "keeps everything": lambda: Module(optimizer=Hoarder),
}


@pytest.mark.slow_but_for("Adam fused", "SGD", "LBFGS")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: Callable[[], Module], witness: Witness, tmp_path: Path) -> None:
    fit(witness, tmp_path, make())
    assert sorted(witness.published) == sorted(witness.expected) == ALL
    assert not witness.wrong()
    assert_overlapped(witness.events)


@pytest.mark.parametrize("kind", [Adam, Plain], ids=["Adam", "writes data"])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_end"])
def test_optimizers_that_are_made_anew_are_waited_for_too(
    kind: Any, hook: str, witness: Witness, tmp_path: Path
) -> None:
    def exchange(self: Module, *args: Any) -> None:
        self.trainer.strategy.optimizers = [kind(self.parameters())]

    fit(witness, tmp_path, Module(optimizer=kind, hooks={hook: exchange}))
    assert sorted(witness.published) == ALL
    assert not witness.wrong()


def test_parameters_that_are_added_later(witness: Witness, tmp_path: Path) -> None:
    def unfreeze(self: Module, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            for parameter in self.net[0].parameters():
                parameter.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.5})

    module = Module(hooks={"on_train_batch_start": unfreeze})
    module.net[0].requires_grad_(False)
    fit(witness, tmp_path, module)
    assert sorted(witness.published) == ALL
    assert not witness.wrong()
    assert len(witness.expected[ALL[-1]]["live"]["optimizer_states"][0]["param_groups"]) == 2


# -- in a Trainer: what else changes the state -------------------------------------------------------------------------


def scale(hidden: bool) -> Callable[..., None]:
    """A hook that changes every parameter, counted by torch or not."""

    def hook(self: Module, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                (parameter.data if hidden else parameter).mul_(0.9)

    return hook


@pytest.mark.slow_but_for("on_train_batch_end-counted", "on_validation_start-hidden")
@pytest.mark.parametrize("hidden", [False, True], ids=["counted", "hidden"])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start"]
)
def test_hooks_behind_the_fence_may_change_what_they_like(
    hook: str, hidden: bool, witness: Witness, tmp_path: Path
) -> None:
    fit(witness, tmp_path, Module(hooks={hook: scale(hidden)}))
    assert sorted(witness.published) == ALL
    assert not witness.wrong()


@pytest.mark.slow_but_for("counted-on_train_batch_start", "hidden-on_after_backward")
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("hidden", [False, True], ids=["counted", "hidden"])
def test_hooks_before_the_fence_are_noticed(hook: str, hidden: bool, witness: Witness, tmp_path: Path) -> None:
    fit(witness, tmp_path, Module(hooks={hook: scale(hidden)}))
    # The first is spoiled. What was copied before a hidden write was right, and is known to change only the next time.
    assert set(ALL[2:]) <= set(witness.published) < set(witness.expected)
    assert not witness.wrong()


def test_data_that_is_replaced_leaves_the_snapshot_what_it_had(witness: Witness, tmp_path: Path) -> None:
    def replace(self: Module, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9

    fit(witness, tmp_path, Module(hooks={"on_train_batch_start": replace}))
    assert sorted(witness.published) == ALL
    assert not witness.wrong()


def test_what_changes_is_known_again_where_its_memory_is_another(witness: Witness, tmp_path: Path) -> None:
    def replace_and_write(self: Module, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)
                parameter.data = parameter.data.clone()

    fit(witness, tmp_path, Module(hooks={"on_train_batch_start": replace_and_write}))
    assert sorted(witness.published) == ALL[1:]
    assert not witness.wrong()


class Ema(L.Callback):
    """An average of the weights, in the callback and in a part of the module that is not trained."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self.shadow: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weights = dict(module.net.named_parameters())
        for name, teacher in module.teacher.named_parameters():
            shadow = self.shadow.setdefault(name, torch.zeros_like(teacher))
            if self.hidden:
                teacher.data.mul_(0.5).add_(weights[name].data, alpha=0.5)
                shadow.data.lerp_(weights[name].data, 0.1)
            else:
                with torch.no_grad():
                    teacher.lerp_(weights[name], 0.5)
                    shadow.lerp_(weights[name], 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


@pytest.mark.parametrize("hidden", [False, True], ids=["counted", "hidden"])
def test_averages_of_the_users(hidden: bool, witness: Witness, tmp_path: Path) -> None:
    module = Module()
    module.teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
    module.teacher.requires_grad_(False)
    fit(witness, tmp_path, module, [Ema(hidden)])
    assert sorted(witness.published) == ALL
    assert not witness.wrong()


@pytest.mark.parametrize(
    "average",
    [
        lambda: L.callbacks.EMAWeightAveraging(decay=0.5),
        lambda: L.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1),
    ],
    ids=["EMAWeightAveraging", "StochasticWeightAveraging"],
)
def test_averages_of_lightning(
    average: Callable[[], Any], witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, take, behind = average(), Snapshots.take, []

    def look(*args: Any) -> Any:
        snapshot = take(*args)
        sources = {tensor.data_ptr() for tensor in snapshot.tensors}
        behind.append(sources >= {tensor.data_ptr() for tensor in callback._average_model.parameters()})
        return snapshot

    monkeypatch.setattr(Snapshots, "take", look)
    fit(witness, tmp_path, Module(), [callback], max_epochs=4)
    assert sorted(witness.published) == sorted(witness.expected)
    assert len(witness.published) >= 11
    assert not witness.wrong()
    assert all(behind), "a second model is not copied while training waits, on a device into memory of the training"


class Embedding(nn.Module):
    """Its weights are written in forward, which torch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, max_norm=0.1)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding((3 * x).abs().long().clamp(0, 9)))


def _flat() -> nn.Module:
    """Two parameters in one piece of memory, each with a count of its own."""
    net, memory = nn.Linear(4, 4), torch.randn(20)
    net.weight.data, net.bias.data = memory[:16].view(4, 4), memory[16:]
    return net


class Parts(nn.Module):
    """Parameters as they may lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        self.gaps = nn.Parameter(torch.randn(4, 16)[:, ::2])
        self.tied, self.also_tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.also_tied.weight = self.tied.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.expanded = nn.Parameter(torch.ones(1).expand(5), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("inside", self.frozen.data[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.conv(x[:, None, :, None].expand(-1, 2, -1, 4))
        return x @ self.transposed @ self.gaps.t() + self.also_tied(self.tied(x)) + image.mean() + self.empty.sum()


def _normed() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Linear(4, 4)),
        weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


@pytest.mark.parametrize(
    ("net", "spoiled"),
    [(Embedding, {1}), (_flat, set()), (Parts, set()), (_normed, set())],
    ids=["embedding with max_norm", "one piece of memory", "layouts", "normed weights"],
)
def test_modules(net: Callable[[], nn.Module], spoiled: set[int], witness: Witness, tmp_path: Path) -> None:
    fit(witness, tmp_path, Module(net()))
    assert set(witness.published) == set(ALL) - spoiled
    assert not witness.wrong()


@pytest.mark.parametrize("write", ["weight", "bias"])
def test_of_what_shares_memory_a_write_to_any_is_noticed(write: str, witness: Witness, tmp_path: Path) -> None:
    def hook(self: Module, *args: Any) -> None:
        with torch.no_grad():
            getattr(self.net, write).mul_(0.9)

    fit(witness, tmp_path, Module(_flat(), hooks={"on_train_batch_start": hook}))
    assert sorted(witness.published) == ALL[1:]
    assert not witness.wrong()


def test_a_buffer_inside_of_a_parameter(witness: Witness, tmp_path: Path) -> None:
    def hook(self: Module, *args: Any) -> None:
        self.net.inside.add_(1.0)  # counted, but not for the parameter

    net = nn.Linear(4, 4)
    net.register_buffer("inside", net.weight.data.view(-1)[:2])
    fit(witness, tmp_path, Module(net, hooks={"on_train_batch_start": hook}))
    assert sorted(witness.published) == ALL[1:]
    assert not witness.wrong()


# -- in a Trainer: what goes wrong -------------------------------------------------------------------------------------


def test_a_step_that_raises(witness: Witness, tmp_path: Path) -> None:
    def fail(self: Module, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step == 3:
            raise OnPurpose
        return loss

    with pytest.raises(OnPurpose):
        fit(witness, tmp_path, Module(hooks={"training_step": fail}))
    assert sorted(witness.published) == [1, 2, 3]
    assert not witness.wrong()


def test_an_optimizer_that_raises_in_the_middle_of_its_step(witness: Witness, tmp_path: Path) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if len(witness.expected) == 3:
                raise OnPurpose
            return loss

    with pytest.raises(OnPurpose):
        fit(witness, tmp_path, Module(optimizer=functools.partial(Fails, lr=0.1)))
    assert sorted(witness.published) == [1, 2, 3]
    assert not witness.wrong()


def test_a_batch_that_never_comes(witness: Witness, tmp_path: Path) -> None:
    def skip_the_rest(self: Module, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None

    hooks = {"on_train_batch_start": skip_the_rest, "on_train_epoch_end": scale(hidden=True)}
    fit(witness, tmp_path, Module(hooks=hooks))
    assert sorted(witness.published) == [1, 2]
    assert not witness.wrong()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (NodeStore, "reserve", OSError(errno.ENOSPC, "No space left on device")),
        (RankState, "_reserve", RuntimeError("anything")),
    ],
    ids=["no space", "anything"],
)
def test_a_writer_that_fails_before_it_copies(
    owner: Any,
    name: str,
    error: Exception,
    witness: Witness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reserve = getattr(owner, name)

    def fail(*args: Any) -> Any:
        if len(witness.expected) == 3:
            raise error
        return reserve(*args)

    monkeypatch.setattr(owner, name, fail)
    trainer = fit(witness, tmp_path, Module())
    assert trainer.global_step == 6
    assert sorted(witness.published) == [1, 2, 4, 5]
    assert not witness.wrong()
    assert caplog.text.count("could not be saved") == 1


@pytest.mark.parametrize("place", ["_reserve", "tensor_positions"])
def test_a_writer_that_dies(place: str, witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: Any) -> Any:
        raise SystemExit("on purpose")

    monkeypatch.setattr(RankState, place, die)
    with pytest.raises(SystemExit, match="on purpose"):
        fit(witness, tmp_path, Module())
    assert not witness.published


class Wrapper(torch.Tensor):
    """Keeps its content in another tensor, as tensors of fewer bits do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "Wrapper()"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return Wrapper(function(*plain, **(kwargs or {})))


@pytest.mark.parametrize(
    "odd", [lambda: torch.eye(4).to_sparse(), lambda: Wrapper(torch.ones(4))], ids=["sparse", "wrapper"]
)
def test_what_cannot_be_saved_does_not_end_the_training(
    odd: Callable[[], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "fits_begun", {})
    monkeypatch.setattr(snapshot_worker, "live", lambda trainer: {})  # torch cannot copy it either
    net = nn.Linear(4, 4)
    net.register_buffer("odd", odd())
    witness = Witness(monkeypatch)
    assert fit(witness, tmp_path, Module(net)).global_step == 6
    assert not witness.published
    assert caplog.text.count("odd cannot be saved") == 1


# -- without a Trainer -------------------------------------------------------------------------------------------------


class Taken:
    """A snapshot and the memory that it goes to, copied whenever the test likes."""

    def __init__(self, state: Any, stable: Iterable[torch.Tensor], snapshots: Snapshots | None = None) -> None:
        self.expected = [tensor.detach().clone() for tensor in pack(state)[1]]
        self.snapshot = (snapshots or Snapshots()).take(state, stable)
        self.specs, size = shard.arrange(self.snapshot.tensors)
        memory = torch.zeros(size, dtype=torch.uint8)
        self.copies = [shard.view(memory, spec) for spec in self.specs]

    def copy(self) -> None:
        self.snapshot.copy((i, each) for i, each in enumerate(self.copies) if not each.is_meta)
        self.snapshot.release()

    def is_right(self) -> bool:
        return same(self.copies, self.expected)

    def is_good(self) -> bool:
        return self.snapshot.is_good(PATIENCE_S)


def taken_with(
    write: Callable[[], Any], state: Any, stable: Iterable[torch.Tensor], snapshots: Snapshots | None = None
) -> Taken:
    """A snapshot that is copied only after ``write``, which comes before the fence."""
    taken = Taken(state, stable, snapshots)
    write()
    taken.copy()
    taken.snapshot.fence()
    return taken


def counted(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def test_every_kind_of_tensor() -> None:
    not_numbers = torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    with torch.inference_mode():
        inferred = torch.ones(3)
    module = Parts()
    extra = {
        "meta": torch.empty(3, device="meta"),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex128),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "bfloat16": torch.randn(7).to(torch.bfloat16),
        "int8": torch.arange(3, dtype=torch.int8),
        "scalar": torch.tensor(2.0),
        "not numbers": not_numbers,
        "reversed": torch.randn(2, 3, 4).permute(2, 0, 1),
        "inferred": inferred,
        "unaligned": torch.arange(9, dtype=torch.float32)[1:],
    }
    parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in extra.items() if name != "inferred"}
    state = {"module": module.state_dict(), "extra": extra, "parameters": parameters}
    for stable in ([], [*module.parameters(), *extra.values(), *parameters.values()]):
        snapshots = Snapshots()
        for _ in range(3):  # all of them are looked at, then samples; memory is reused
            taken = taken_with(lambda: None, state, stable, snapshots)
            assert taken.is_right()
            assert taken.is_good()


def test_buffers_are_copied_at_once() -> None:
    weight, buffer = nn.Parameter(torch.randn(4, 4)), torch.randn(4)
    taken = taken_with(lambda: buffer.add_(1), {"w": weight, "b": buffer}, [weight])
    assert taken.is_good()
    assert taken.is_right()


@pytest.mark.parametrize("elements", [3, 64, 65, 1000, 4097])
@pytest.mark.parametrize("hidden", [False, True], ids=["counted", "hidden"])
def test_what_was_written_spoils_one_snapshot_and_no_more(elements: int, hidden: bool) -> None:
    weight, other = nn.Parameter(torch.randn(elements)), nn.Parameter(torch.randn(5))
    state, snapshots = {"weight": weight, "other": other}, Snapshots()

    def write() -> None:
        counted(weight.data if hidden else weight)

    assert not taken_with(write, state, [weight, other], snapshots).is_good()
    for _ in range(3):
        taken = taken_with(write, state, [weight, other], snapshots)
        assert taken.is_good()
        assert taken.is_right()
    # What has not been written is copied behind the training still.
    assert taken.snapshot.tensors[1].data_ptr() == other.data_ptr()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_of_what_shares_memory_is_watched(place: int) -> None:
    memory = torch.randn(10)
    # Each with a count of its own. None is a parameter, so what they hold is not looked at.
    stable = [memory.data[:5], memory.data[5:]]
    tensors = [*stable, memory.data[2:7]]
    assert not taken_with(lambda: counted(tensors[place]), tensors, stable).is_good()


def test_data_that_is_replaced_is_not_what_is_copied() -> None:
    weight = nn.Parameter(torch.randn(4))

    def replace() -> None:
        weight.data = weight.data * 2

    taken = taken_with(replace, [weight], [weight])
    assert taken.is_good()
    assert taken.is_right()


def test_memory_shared_with_what_was_made_for_inference() -> None:
    with torch.inference_mode():
        inferred = torch.ones(4)  # counts no writes
    shared = torch.empty(0).set_(inferred.untyped_storage(), 0, (4,))
    taken = taken_with(lambda: None, [shared, inferred], [shared])
    assert taken.is_good()
    assert taken.is_right()


def test_one_hidden_write_to_one_element_is_noticed_and_the_next_ones_too() -> None:
    weights = [nn.Parameter(torch.randn(10_001)), nn.Parameter(torch.randn(10_001))]
    snapshots = Snapshots()

    def write(number: int) -> Callable[[], None]:
        return lambda: weights[number].data[4321].add_(1)

    assert not taken_with(write(0), weights, weights, snapshots).is_good()
    assert not taken_with(write(1), weights, weights, snapshots).is_good()
    assert taken_with(lambda: (write(0)(), write(1)()), weights, weights, snapshots).is_good()


def test_a_hidden_write_that_begins_late_is_seen_in_a_sample() -> None:
    weight, snapshots = nn.Parameter(torch.randn(100, 100)), Snapshots()
    assert taken_with(lambda: None, [weight], [weight], snapshots).is_good()
    snapshots._look_at_all = float("inf")
    assert taken_with(lambda: None, [weight], [weight], snapshots).is_good()
    assert not taken_with(lambda: weight.data.mul_(0.999), [weight], [weight], snapshots).is_good()
    assert taken_with(lambda: weight.data.mul_(0.999), [weight], [weight], snapshots).is_good()


def test_a_hidden_write_behind_the_copy_does_no_harm() -> None:
    weight = nn.Parameter(torch.randn(100))
    taken = Taken([weight], [weight])
    taken.copy()
    weight.data.mul_(2)
    taken.snapshot.fence()
    assert taken.is_good()
    assert taken.is_right()


class Recorded:
    """A fence, and what came before and behind it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.events: list[str] = []
        self.taken = Taken([tensor], [tensor])
        self.fence = Fence()
        self.fence.pending = self.taken.snapshot
        passed = self.taken.snapshot.fence
        self.taken.snapshot.fence = lambda *_: (self.events.append("fence"), passed())  # type: ignore[method-assign]
        threading.Timer(0.05, self.taken.copy).start()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4))


@pytest.fixture
def recorded(weight: nn.Parameter) -> Iterator[Recorded]:
    recorded = Recorded(weight)
    yield recorded
    recorded.fence.remove()


@pytest.mark.parametrize("how", ["argument", "keyword", "none"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Plain, functools.partial(torch.optim.LBFGS, max_iter=3)])
def test_the_fence_comes_between_backward_and_step(
    how: str, kind: Any, weight: nn.Parameter, recorded: Recorded
) -> None:
    def closure() -> torch.Tensor:
        recorded.events.append("backward")
        weight.grad = None
        loss = weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer = kind([weight], lr=0.1)
    if how == "none" and not isinstance(optimizer, torch.optim.LBFGS):
        closure()
        optimizer.step()
    else:
        optimizer.step(*[closure] * (how == "argument"), **{"closure": closure} if how != "argument" else {})
    assert recorded.events[:2] == ["backward", "fence"]
    assert recorded.events.count("fence") == 1
    assert recorded.taken.is_good()
    assert recorded.taken.is_right()
    assert not same(weight, recorded.taken.expected[0])


def test_a_closure_that_raises_leaves_the_fence_where_it_is(weight: nn.Parameter, recorded: Recorded) -> None:
    def closure() -> torch.Tensor:
        raise OnPurpose

    with pytest.raises(OnPurpose):
        torch.optim.SGD([weight], 0.1).step(closure)
    assert not recorded.taken.snapshot.is_good(timeout_s=0.0)
    recorded.fence.now()
    assert recorded.taken.is_good()
    recorded.fence.now()
    assert recorded.events == ["fence"]


def test_the_fence_comes_before_other_hooks_of_the_optimizer(weight: nn.Parameter, recorded: Recorded) -> None:
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.register_step_pre_hook(lambda *args: counted(weight.data))
    optimizer.step()
    assert recorded.taken.is_good()
    assert recorded.taken.is_right()


def test_a_fence_that_is_removed_is_passed_by_nobody(weight: nn.Parameter) -> None:
    fence = Fence()
    fence.pending = Taken([weight], [weight]).snapshot
    fence.remove()
    torch.optim.SGD([weight], 0.1).step()
    assert not fence.pending.is_good(timeout_s=0.0)


def test_a_writer_that_gives_up_holds_nobody(weight: nn.Parameter) -> None:
    taken = Taken([weight], [weight])
    assert not taken.snapshot.is_good(timeout_s=0.0)
    taken.snapshot.release()
    taken.snapshot.fence()
    assert taken.snapshot.is_good(timeout_s=0.0)


def test_tensors_that_optimizers_keep() -> None:
    weight = nn.Parameter(torch.randn(4))
    optimizer = Hoarder([weight])
    for _ in range(3):
        weight.grad = torch.ones(4)
        optimizer.step()
    found = list(optimizer_tensors([optimizer]))
    assert {id(each) for each in found} >= {
        id(optimizer.state[weight]["view"]),
        id(optimizer.state[weight]["deep"]["list"][0]),
        id(optimizer.state[weight]["deep"]["list"][1][1]),
    }


# -- tensors that several ranks share out ------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


WRITES: dict[str, Callable[[Any], None]] = {
    "counted by the DTensor": counted,
    "counted by both": lambda tensor: counted(tensor.to_local()),
    "counted by its part": lambda tensor: counted(tensor._local_tensor),
    "hidden": lambda tensor: counted(tensor._local_tensor.data),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_dtensor_is_noticed(write: Callable[[Any], None], mesh: Any) -> None:
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
    moment = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    state = sharded.to_local({"weight": weight, "moment": moment})
    assert taken_with(lambda: None, state, [weight, moment]).is_good()
    assert not taken_with(lambda: write(weight), state, [weight, moment]).is_good()
    if write is not WRITES["hidden"]:  # nobody writes like that into what only optimizers know
        assert not taken_with(lambda: write(moment), state, [weight, moment]).is_good()


def _through_json(state: Any) -> Any:
    structure, tensors, left_out = pack(state)
    assert not left_out
    return unpack(json.loads(json.dumps(structure)), [tensor.clone() for tensor in tensors])


class Sharded(torch.optim.Optimizer):
    """Keeps tensors of other layouts than its parameters have, in lists and dicts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "moment": parameter * 2,
                "rows": parameter.sum(-1, keepdim=True),
                "norm": parameter.redistribute(placements=[Replicate()]).pow(2).sum(),
                "history": [parameter * 3, (parameter * 4, 1)],
                "deep": {"plain": torch.ones(2), "n": 3},
            }


def test_states_of_optimizers_are_sharded_as_they_were(mesh: Any) -> None:
    def make() -> tuple[Any, Sharded]:
        torch.manual_seed(1)
        weight = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
        return weight, Sharded([weight])

    weight, optimizer = make()
    optimizer.step()
    saved = _through_json(sharded.to_local(optimizer.state_dict()))
    fresh, restored = make()
    restored.load_state_dict(sharded.optimizer_state_from_local(restored, saved))
    before, after = optimizer.state[weight], restored.state[fresh]
    assert list(after) == list(before)
    pairs = [(before[key], after[key]) for key in ("moment", "rows", "norm")]
    pairs += [(before["history"][0], after["history"][0]), (before["history"][1][0], after["history"][1][0])]
    for was, now in pairs:
        assert isinstance(now, DTensor)
        assert (now.placements, now.shape, now.stride()) == (was.placements, was.shape, was.stride())
        assert same(now.to_local(), was.to_local())
    assert same(after["deep"], before["deep"])
    assert after["history"][1][1] == 1


def test_a_layout_that_has_changed_is_refused(mesh: Any) -> None:
    weight = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    saved = _through_json(sharded.to_local({"weight": weight}))["weight"]
    assert same(sharded.from_local(saved, weight).to_local(), weight.to_local())
    for like in (distribute_tensor(torch.randn(4, 3), mesh, [Shard(1)]), torch.randn(4, 3), None):
        with pytest.raises(ValueError, match="layout"):
            sharded.from_local(saved, like)
    optimizer = torch.optim.Adam([nn.Parameter(torch.randn(4, 3))])
    with pytest.raises(ValueError, match="cannot be sharded"):
        sharded.optimizer_state_from_local(optimizer, {"state": {0: {"moment": saved}}, "param_groups": []})
    assert sharded.from_local(torch.ones(2), weight).shape == (2,)  # what was whole is given back as it is


# -- several ranks: trained, ended by an exception, resumed ------------------------------------------------------------


def run_ranks(folder: Path, cases: list[str]) -> dict[str, list[dict[str, Any]]]:
    port = free_port()
    ranks = [
        CONTEXT.Process(target=snapshot_worker.main, args=(rank, port, str(folder), cases))
        for rank in range(snapshot_worker.WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    results = []
    for rank, process in enumerate(ranks):
        process.join(150)
        process.kill()
        process.join()
        path = folder / f"results-{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else {})
    codes = [process.exitcode for process in ranks]
    texts = [(folder / f"output-{rank}").read_text(errors="replace")[-5000:] for rank in range(len(ranks))]
    lost = {"error": "\n".join([f"not reached; the ranks ended with {codes}:", *texts])}
    return {case: [result.get(case, lost) for result in results] for case in cases}


def assert_resumed_exactly(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert not result["error"], result["error"]
        assert not result["wrong"]
        assert len(result["published"]) >= 3
        assert result["waits"] >= len(result["published"])
        assert result["tiers"] == ["local"]
        assert result["resumed_at"][0] in result["published"]
        assert result["resumed_at"][0] < result["final_step"] == snapshot_worker.STEPS
        assert result["as_undisturbed"]


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All cases that this session tests, on the same two ranks."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    cases = [item.callspec.params["case"] for item in items if item.originalname == "test_ranks"]
    return run_ranks(tmp_path_factory.mktemp("job"), cases)


@pytest.mark.parametrize("case", ["zero", "fsdp2", "tensor_parallel", "fsdp1"])
@pytest.mark.slow
def test_ranks(case: str, job: dict[str, list[dict[str, Any]]]) -> None:
    assert_resumed_exactly(job[case])


@pytest.mark.campaign
@pytest.mark.parametrize("case", ["ddp", "fsdp1_flat"])
def test_more_ranks(case: str, tmp_path: Path) -> None:
    assert_resumed_exactly(run_ranks(tmp_path, [case])[case])


@pytest.mark.campaign
def test_ranks_whose_shards_are_written_before_the_fence(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, ["fsdp2_written"])["fsdp2_written"]
    assert_resumed_exactly(results)
    assert all(result["taken"][0] not in result["published"] for result in results)


@pytest.mark.campaign
def test_a_rank_that_misses_a_save_changes_no_collective(tmp_path: Path) -> None:
    assert_resumed_exactly(run_ranks(tmp_path, ["fsdp2_missed"])["fsdp2_missed"])


def test_lightning_has_no_fsdp1_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        L.Trainer(strategy="fsdp", accelerator="cpu")
