"""State of every kind that users keep: a fit with it resumes from either tier as it was, or says what is lost."""

from __future__ import annotations

import enum
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.fit import context, saving
from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import read_ledger
from tests.program import digest

STEPS, FAILS_AT = 8, 5


class Mode(enum.Enum):
    FAST = 1


class Encoder:
    """Can only be pickled."""

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by


class Versioned(torch.nn.Linear):
    """Cannot be loaded without its version, as torchvision's ``MNASNet``."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *args)


class WithExtraState(torch.nn.Identity):
    mode, count = Mode.FAST, 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"mode": self.mode, "count": self.count}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.mode, self.count = state["mode"], state["count"]


class Scaled(torch.optim.lr_scheduler.LRScheduler):
    """Keeps functions in its state."""

    def __init__(self, optimizer: Any) -> None:
        self.functions = [lambda step: 0.9**step]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.functions[0](self.last_epoch) for base in self.base_lrs]


class Labels(torch.Tensor):
    """As the tensors of torchvision."""


class Model(L.LightningModule):
    def __init__(self, made_by: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            Versioned(2, 4), WithExtraState(), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
        )
        self.unused = torch.nn.LazyLinear(3)  # uninitialized
        self.register_buffer("labels", torch.zeros(2).as_subclass(Labels))
        self.encoder = Encoder(made_by)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.labels += 1
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        layers = self.layers.parameters()
        optimizer = torch.optim.Adam([{"params": layers, "encode": self.encoder}], 0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Scaled(optimizer), "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = self.encoder
        checkpoint["history"] = {"mode": Mode.FAST, "of": [self.global_step]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["loss"] is self.encoder
        assert checkpoint["history"]["mode"] is Mode.FAST


class Keeps(L.Callback):
    """Keeps a state of its own, in which what it has counted is."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.extra: Any = None

    @property
    def state_key(self) -> str:
        return "Keeps"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.state["counts"]["steps"] += 1
        self.state["seen"].add(Path(f"batch-{batch_idx}"))
        self.state["labels"].update(np.array([batch_idx % 2, 1]))
        self.state["unique"] = dict(zip(*np.unique(np.array([1.5, float(batch_idx)]), return_counts=True), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class KeepsObjects(L.Callback):
    """Gives the checkpoint what can only be pickled, and asks for it."""

    def __init__(self) -> None:
        self.encoder, self.counts, self.loaded = Encoder("callback"), Counter({Mode.FAST: 1}), 0

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "best": 1.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["counts"] is not self.counts or not state["counts"]
        self.loaded += 1

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = {"encoder": self.encoder, "size": 3}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["tokenizer"]["encoder"] is self.encoder


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == FAILS_AT:
            raise RuntimeError("on purpose")


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("lightning_resilience"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning_resilience")


def fit(
    tmp: Path,
    module: L.LightningModule,
    own: list[Any],
    tier: str,
    monkeypatch: pytest.MonkeyPatch,
    steps: int = STEPS,
) -> None:
    """One fit, which takes itself for the first of a new process."""
    monkeypatch.setattr(context, "fits_begun", {})
    run = tmp / "run"
    ours: dict[str, list[Any]] = {
        "none": [],
        "global": [AutoResume(run, every_n_train_steps=1, async_save=False)],
        "behind": [AutoResume(run, every_n_train_steps=1)],
        "local": [LocalCheckpoint(tmp / "node", every_n_train_steps=1, async_save=False, run_dir=run), AutoResume(run)],
    }
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp, callbacks=[*ours[tier], *own],
    )  # fmt: skip
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2) / 24), 2, shuffle=True))


def kept() -> dict[str, Any]:
    return {"counts": defaultdict(int), "seen": set(), "labels": Counter(), "unique": {}}


def interrupted_and_resumed(
    tmp: Path, make: Callable[[], tuple[L.LightningModule, list[Any]]], tier: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[L.LightningModule, list[Any]]:
    module, own = make()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp, module, [*own, Fails()], tier, monkeypatch)
    module, own = make()
    fit(tmp, module, own, tier, monkeypatch)
    return module, own


@pytest.mark.parametrize("tier", ["global", "behind", "local"])
def test_state_that_users_keep_survives(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> tuple[Model, list[Any]]:
        return Model("script"), [Keeps(kept()), KeepsObjects()]

    expected, (counts, _) = make()
    fit(tmp_path / "undisturbed", expected, [counts], "none", monkeypatch)
    module, (found, objects) = interrupted_and_resumed(tmp_path, make, tier, monkeypatch)
    said = "\n".join(caplog.messages)
    assert "Resuming from step" in said
    assert objects.loaded == 1

    assert {k: type(v) for k, v in found.state.items()} == {k: type(v) for k, v in counts.state.items()}
    assert found.state == counts.state
    assert found.state["counts"]["a new one"] == 0
    assert {type(key) for key in found.state["labels"]} == {np.int64}
    assert {type(key) for key in found.state["unique"]} == {np.float64}
    for name in ("unused", "labels"):
        delattr(expected, name)
    assert type(module.labels) is Labels
    assert module.labels.tolist() == [STEPS, STEPS]
    for name in ("unused", "labels"):
        delattr(module, name)
    assert digest(module) == digest(expected)

    left_out = next(each for each in caplog.messages if "can only be pickled" in each)
    taken = next(
        each
        for each in caplog.messages
        if "the script created it: loss" in each or "the script created it: state_dict" in each
    )
    for name in ("loss", "history", "tokenizer", "callbacks.KeepsObjects", "state_dict.layers.1._extra_state"):
        assert name in left_out
        assert name in taken
    for name in ("optimizer_states[0].param_groups[0].encode", "lr_schedulers[0].functions"):
        assert name in left_out
        assert any("the script created it" in each and name in each for each in caplog.messages)
    assert "not created by the script" not in said
    assert "Keeps.counts" not in left_out


class Raises(L.Callback):
    """As a hook that exports something, where that fails."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step in (2, 3):
            raise KeyError("no such adapter")


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


@pytest.mark.parametrize("tier", ["global", "behind"])
def test_a_state_that_cannot_be_collected_does_not_end_the_training(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Plain(), [Raises()], tier, monkeypatch)
    run = RunDirectory(tmp_path / "run")
    failed = [event for event in read_ledger(run.ledger) if event["event"] == "save_failed"]
    assert [event["step"] for event in failed] == [2, 3]
    assert "KeyError: 'no such adapter'" in failed[0]["reason"]
    assert resume.step_of(resume.checkpoints(run.fit(0).checkpoints)[0]) == STEPS


@pytest.mark.parametrize("tier", ["global", "behind"])
def test_the_first_save_of_a_fit_counts_when_it_was_read_back(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the codec should have let through: better no checkpoint, said, than one that no start can load."""
    for name in ("safe_form", "to_safe"):
        codec = getattr(saving, name)

        def careless(*args: Any, codec: Any = codec, name: str = name) -> Any:
            made = codec(*args)
            (made if name == "safe_form" else made[0])["careless"] = Encoder("nobody")
            return made

        monkeypatch.setattr(saving, name, careless)
    fit(tmp_path, Plain(), [], tier, monkeypatch)
    run = RunDirectory(tmp_path / "run")
    assert resume.checkpoints(run.fit(0).checkpoints) == []
    reasons = {event["reason"] for event in read_ledger(run.ledger) if event["event"] == "save_failed"}
    assert len(reasons) == 1
    assert "tests.test_user_state.Encoder, which a safe load" in reasons.pop()


def test_whatever_goes_wrong_in_loading_the_next_best_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files whose digests are right, and which hold what no version of this package understands."""
    run = RunDirectory(tmp_path / "run")
    steps = FAILS_AT + 5  # what is already at its last step would be tried last
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Plain(), [Fails()], "global", monkeypatch, steps)
    folder = run.fit(0).checkpoints
    good = resume.checkpoints(folder)[0]
    stamp, state = checkpoint_file.read_stamp(good), checkpoint_file.load(good)
    assert stamp is not None
    unknown: list[Any] = [
        {**state, "callbacks": {"a": {"__resilience_type__": "no such type"}}},
        {**state, "x": {"__resilience_type__": "ndarray", "dtype": "O", "shape": [1], "data": b"12345678"}},
        [state],
        Counter({1: 2}),
    ]
    for number, content in enumerate(unknown):
        path = folder / resume.checkpoint_name(FAILS_AT + 1 + number, False)
        checkpoint_file.save(content, path, {**stamp.metadata, "step": FAILS_AT + 1 + number})
    fit(tmp_path, Plain(), [], "global", monkeypatch, steps)
    events = read_ledger(run.ledger)
    assert sum(event["event"] == "quarantined" for event in events) == len(unknown)
    assert f"Resuming from step {FAILS_AT} " in "\n".join(caplog.messages)


def test_what_shards_cannot_keep_is_named() -> None:
    """A rank finds each value again by its place: one that is rewritten would be found nowhere, without a word."""
    weight = torch.ones(2)
    groups = [{"params": ["w"], "lr": np.float64(0.5), "of": Path("a"), "encode": Encoder("x")}]
    checkpoint = {
        "state_dict": {"w": weight, "a._extra_state": {"seen": np.arange(3)}, "b._extra_state": {"seen": [1, (2,)]}},
        "optimizer_states": [{"state": {"w": {"step": np.int64(3)}}, "param_groups": groups}],
        "epoch": 1,
    }
    shards, unkept = saving._sharded_entries(checkpoint, "state_dict")
    made, left_out = saving.to_safe(shards)
    assert checkpoint == {"epoch": 1}
    assert unkept == ["state_dict.a._extra_state (in shards)", "optimizer_0.param_groups[0].of (in shards)"]
    assert [name.partition(" (")[0] for name in left_out] == ["optimizer_0.param_groups[0].encode"]
    assert made == {
        "state_dict": {"w": weight, "b._extra_state": {"seen": [1, (2,)]}},
        "optimizer_0": {"state": {"w": {"step": 3}}, "param_groups": [{"params": ["w"], "lr": 0.5}]},
    }
