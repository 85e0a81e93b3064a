"""In which order things happen at a boundary, a save, a rollback, a failure and an end: written down, and held.

What is looked at are the places where callbacks, saves and records meet, by name; how they get there is free to change.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import (
    AutoResume,
    FaultTolerance,
    Interrupted,
    LocalCheckpoint,
    NaNGuard,
    Preemption,
    ReplicaCheck,
    StragglerDetection,
)
from lightning_resilience._lightning import lightning_strategies
from lightning_resilience.agreement import Agreement
from lightning_resilience.agreement_protocol import Event
from lightning_resilience.checkpoint.local import LocalSaves
from lightning_resilience.fit import context

NAN = float("nan")

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")

# What the trace calls a place, and the function that is it.
PLACES = {
    "agreement.boundary": "Agreement.boundary",
    "agreement.close": "Agreement.close",
    "agreement.abort": "Agreement.abort",
    "agreement.stop": "Agreement.stop",
    "saver.save": "Saver.save",
    "saver.close": "Saver.close",
    "saver.waits": "Saver.waits",
    "write file": "Saver._write_file",
    "outcome": "FitOutcome.write",
    "fault: started": "HangWatch.start",
    "fault: inject": "FaultInjector.at_step",
    "fault: saved": "HangWatch.after_save",
    "fault: failure": "RankProbe.fail",
    "fault: policy": "HangWatch._ask_policy",
    "fault: leave": "HangWatch.leave",
    "local: started": "LocalSavePolicy.start",
    "local: boundary": "LocalSavePolicy.at_boundary",
    "local: save now": "LocalSavePolicy.save_locally",
    "local: stop": "LocalSavePolicy._stop",
    "local: before rollback": "LocalSavePolicy.before_rollback",
    "local: after rollback": "LocalSavePolicy.after_rollback",
    "local: leave": "LocalSavePolicy.leave",
    "nan: started": "NumericsPolicy.start",
    "nan: after batch": "NumericsPolicy.after_batch",
    "nan: before end": "NumericsPolicy.before_end",
    "nan: after rollback": "NumericsPolicy.after_rollback",
    "nan: saved": "NumericsPolicy.after_save",
    "nan: check state": "NumericsPolicy.check_state",
    "nan: look back": "NumericsPolicy.looks_bad",
    "nan: roll back": "NumericsPolicy._rollback",
    "nan: failure": "NumericsPolicy.on_failure",
    "nan: leave": "NumericsPolicy.leave",
    "replicas: digest": "ReplicaComparison.digest",
    "replicas: before end": "ReplicaComparison.before_end",
    "replicas: after rollback": "ReplicaComparison.after_rollback",
    "stragglers: started": "StragglerReports.start",
    "stragglers: step": "StragglerReports.before_batch",
    "stragglers: boundary": "StragglerReports.at_boundary",
    "stragglers: after rollback": "StragglerReports.after_rollback",
    "stragglers: leave": "StragglerReports.leave",
    "resume: started": "RegularSaves.start",
    "resume: boundary": "RegularSaves.at_boundary",
    "resume: begin": "RegularSaves.after_rollback",
    "resume: retain": "RegularSaves.retain",
    "selector: verdict": "CheckpointSelector.verdict",
}
NAMES = {qualified: name for name, qualified in PLACES.items()}


class User(L.Callback):
    """A callback of the user's, whose hooks are in the trace."""

    def __init__(self, trace: list[str]) -> None:
        self.trace = trace

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.append("* on_train_start")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.trace.append(f"* batch {batch_idx}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.append("* on_train_epoch_end")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.append("* on_validation_end")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.append("* on_train_end")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.trace.append("* on_exception")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.trace.append("* teardown")


class Model(L.LightningModule):
    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.factor = factor
        self.calls = 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return self.layer(batch[0]).sum() * self.factor(self.calls)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@contextmanager
def traced(trace: list[str]) -> Iterator[None]:
    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or "lightning_resilience" not in (code := frame.f_code).co_filename:
            return
        name = NAMES.get(code.co_qualname)
        if name is not None:
            trace.append(name)
        elif code.co_qualname == "Ledger.record":
            trace.append(f"record {recorded(frame)}")
        elif code.co_qualname == "Progress.enter":
            trace.append(f"enter {frame.f_locals['section']}")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def recorded(frame: FrameType) -> str:
    return str(frame.f_locals["event"].name)


def run(tmp: Path, monkeypatch: pytest.MonkeyPatch, factor: Callable[[int], float] = lambda calls: 1.0) -> list[str]:
    monkeypatch.setattr(context, "fits_begun", {})
    monkeypatch.setattr(
        lightning_strategies, "replicated_parameters", lambda trainer: list(trainer.lightning_module.parameters())
    )
    start = LocalSaves.start

    def started(self: LocalSaves, *arguments: Any) -> None:
        start(self, *arguments)
        assert self.wait_for_save(30)  # its thread tidies up first: a save that is due before that is left out

    monkeypatch.setattr(LocalSaves, "start", started)
    trace: list[str] = []
    ours = [
        FaultTolerance(exc_handling_policy=None, autoresume=True),
        Preemption(),
        LocalCheckpoint(tmp / "node", every_n_train_steps=2, async_save=False),
        NaNGuard(max_consecutive=1),
        ReplicaCheck(),
        StragglerDetection(report_time_interval=1e6),
        AutoResume(tmp / "run", every_n_train_steps=2, async_save=False, train_time_interval=None),
    ]
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp, callbacks=[*ours, User(trace)], num_sanity_val_steps=0,
    )  # fmt: skip
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.ones(12, 2)), 2)
    with traced(trace):
        try:
            trainer.fit(Model(factor), data, DataLoader(TensorDataset(torch.ones(2, 2)), 2))
        except (Interrupted, RuntimeError, SystemExit) as error:
            trace.append(f"! {type(error).__name__}")
    return trace


def test_order_of_a_healthy_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("healthy", run(tmp_path, monkeypatch))


def test_order_of_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_known = known(monkeypatch)
    request = Agreement.request

    def requested(self: Agreement, *arguments: Any) -> None:
        is_known.clear()
        request(self, *arguments)
        assert is_known.wait(30)  # or it is due at a later boundary

    monkeypatch.setattr(Agreement, "request", requested)
    check("rollback", run(tmp_path, monkeypatch, lambda calls: NAN if calls == 4 else 1.0))


def test_order_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(calls: int) -> float:
        if calls == 4:
            raise RuntimeError("on purpose")
        return 1.0

    check("failure", run(tmp_path, monkeypatch, fail))


def test_order_of_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_known = known(monkeypatch)

    def stop(calls: int) -> float:
        if calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            assert is_known.wait(30)
        return 1.0

    check("stop", run(tmp_path, monkeypatch, stop))


def known(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the next event is known on this rank."""
    is_known = threading.Event()
    announce = Agreement._announce

    def announced(self: Agreement, event: Event) -> None:
        announce(self, event)
        is_known.set()

    monkeypatch.setattr(Agreement, "_announce", announced)
    return is_known


def check(scenario: str, trace: list[str]) -> None:
    """Compares with what is written down; ``WRITE_ORDER=1`` writes it down."""
    path = Path(__file__).with_name("order") / f"{scenario}.txt"
    if os.environ.get("WRITE_ORDER") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(trace) + "\n")
    assert trace == path.read_text().splitlines()
