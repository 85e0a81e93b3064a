"""Watches snapshots being taken: alone in a test, and on the ranks of a job that trains, is ended and resumes."""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import LocalCheckpoint
from lightning_resilience._torch import local
from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.generations import rank_shard
from lightning_resilience.checkpoint.local import LocalSaves
from lightning_resilience.checkpoint.node_store import ShardWriter
from lightning_resilience.checkpoint.safe_serialization import pack, unpack
from lightning_resilience.checkpoint.save_coordinator import SaveCoordinator
from lightning_resilience.checkpoint.snapshot import Snapshot
from lightning_resilience.fit import context
from tests.ledgers import read_ledger
from tests.program import Fsdp1OnCpu

PATIENCE_S = 60.0
WORLD_SIZE = 2


def same(first: Any, second: Any) -> bool:
    """Whether two values are the same, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        if not isinstance(second, torch.Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        if first.is_meta or second.is_meta:
            return first.is_meta and second.is_meta
        return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (first, second)))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(*pair) for pair in zip(first, second, strict=True))
    return bool(first == second)


class Witness:
    """Keeps what was at every boundary, has every copy come as late as it may, and reads back what is published.

    One half of the tensors is copied at once and the other only when the training waits at the fence, so whatever
    changes in between shows in one of them; the next time it is the other way round. Every boundary that is due is
    saved: the training waits for the save before.

    Attributes:
        expected: By step what was at its boundary, copied there.
        published: By step what was published.
        events: What has happened, in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.expected: dict[int, dict[str, Any]] = {}
        self.published: dict[int, dict[str, Any]] = {}
        self.events: list[str] = []
        self.trainer: Any = None
        self._reached: weakref.WeakKeyDictionary[Snapshot, threading.Event] = weakref.WeakKeyDictionary()
        self._copies = 0
        take, at_boundary, publish = LocalSaves.take, LocalSaves.at_boundary, ShardWriter.publish
        copy_tensors, fence = Snapshot.copy, Snapshot.fence

        def patched_take(saves: LocalSaves, planned: Any, step: int, state: Any, *rest: Any) -> Any:
            structure, tensors, _ = pack(state)
            self.expected[step] = {
                "structure": json.dumps(structure),
                "tensors": [tensor.detach().clone() for tensor in tensors],
                "live": copy.deepcopy(live(self.trainer)) if self.trainer.world_size == 1 else {},
            }
            self.events.append(f"boundary {step}")
            return take(saves, planned, step, state, *rest)

        def patched_at_boundary(saves: LocalSaves, *args: Any) -> Any:
            with saves._changed:
                assert saves._changed.wait_for(lambda: not saves._busy, PATIENCE_S)
            return at_boundary(saves, *args)

        def patched_publish(writer: ShardWriter, step: int, *args: Any) -> Path:
            path = publish(writer, step, *args)
            header, tensors = shard.load(path)
            parts = self.published.setdefault(step, {})
            if path.stem == rank_shard(self.trainer.global_rank):
                parts.update(own=tensors, structure=header.structure["state"], places=header.structure["places"])
            else:
                parts["common"] = tensors
            return path

        def patched_copy(snapshot: Snapshot, destinations: Iterable[tuple[int, torch.Tensor]], *digested: Any) -> None:
            def late() -> Iterator[tuple[int, torch.Tensor]]:
                pairs = list(destinations)
                self._copies += 1
                yield from pairs[self._copies % 2 :: 2]
                assert self._event(snapshot).wait(PATIENCE_S), "the training never came to the fence"
                yield from pairs[(self._copies + 1) % 2 :: 2]

            copy_tensors(snapshot, late(), *digested)

        def patched_fence(snapshot: Snapshot, *waiting: Any) -> None:
            if not snapshot._fenced.is_set():
                self.events.append("fence")
            self._event(snapshot).set()
            fence(snapshot, *waiting)

        patch.setattr(LocalSaves, "take", patched_take)
        patch.setattr(LocalSaves, "at_boundary", patched_at_boundary)
        patch.setattr(ShardWriter, "publish", patched_publish)
        patch.setattr(Snapshot, "copy", patched_copy)
        patch.setattr(Snapshot, "fence", patched_fence)

    def _event(self, snapshot: Snapshot) -> threading.Event:
        return self._reached.setdefault(snapshot, threading.Event())

    def wrong(self) -> list[str]:
        """Everything in what was published that is not what was at its boundary."""
        found = []
        local_rank = self.trainer.local_rank
        for step, parts in self.published.items():
            expected = self.expected[step]
            if json.dumps(parts["structure"]) != expected["structure"]:
                found.append(f"structure of step {step}")
            tensors: list[Any] = [
                parts["own"][position] if number < 0 else parts["common"][position] if number == local_rank else None
                for number, position in parts["places"]
            ]
            pairs = list(zip(tensors, expected["tensors"], strict=True))
            found += [
                f"tensor {i} of step {step}" for i, (a, b) in enumerate(pairs) if a is not None and not same(a, b)
            ]
            if expected["live"]:
                state = unpack(parts["structure"], tensors)
                state["state_dict"] = state.get("current_model_state", state["state_dict"])
                state["callbacks"] = {key: state["callbacks"][key] for key in expected["live"]["callbacks"]}
                found += [
                    f"{key} of step {step}" for key in expected["live"] if not same(state[key], expected["live"][key])
                ]
        return found


def live(trainer: L.Trainer) -> dict[str, Any]:
    """The state at hand, by none of the code under test."""
    return {
        "state_dict": dict(trainer.lightning_module.state_dict()),
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "callbacks": {
            callback.state_key: callback.state_dict()
            for callback in vars(trainer)["callbacks"]
            if callback.state_dict() and not isinstance(callback, LocalCheckpoint)
        },
    }


class OnPurpose(RuntimeError):
    pass


class _EndsEarly(L.Callback):
    """Ends the fit on all ranks once each has published a few snapshots, well before its end."""

    def __init__(self, witness: Witness, saves: int) -> None:
        self.witness, self.saves = witness, saves

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        published = torch.tensor(len(self.witness.published))
        torch.distributed.all_reduce(published, torch.distributed.ReduceOp.MIN)
        if published >= self.saves or trainer.global_step >= STEPS - 5:
            raise OnPurpose


STEPS = 40
STEP_S = 0.01  # a save is announced 20 ms ahead


class Module(L.LightningModule):
    def __init__(self, prepare: Callable[[Module], None], optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(4))
        self.prepare, self.optimizer = prepare, optimizer

    def configure_model(self) -> None:
        self.prepare(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(STEP_S)
        with torch.no_grad():
            self.seen += 1
        return self.net(batch[0] * (1 + torch.rand(()))).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def _fully_shard(module: Module) -> None:
    fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"])
    fully_shard(module.net, mesh=module.device_mesh["data_parallel"])


def _tensor_parallel(module: Module) -> None:
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
    parallelize_module(module.net, module.device_mesh["tensor_parallel"], plan)


def _wrap(module: Module) -> None:
    module.net[0] = wrap(module.net[0])
    module.net = wrap(module.net)


class _Scaled(Module):
    """Changes its parameters in a hook before forward; a DTensor counts that, its part of this rank does not."""

    def on_train_batch_start(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.999)


def _adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, 0.01)


def _zero(parameters: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


def _nothing(module: Module) -> None:
    pass


_EVERY_BATCH = {"val_check_interval": 1, "limit_val_batches": 1}

CASES: dict[str, tuple[Callable[[], Any], type[Module], Any, Any, dict[str, Any]]] = {
    "ddp": (lambda: DDPStrategy(), Module, _nothing, _adam, {}),
    "zero": (lambda: DDPStrategy(), Module, _nothing, _zero, {}),
    # After a validation the outermost FSDP2 module has whole parameters, until its state is asked for: from then on its
    # next forward has one collective more, on all ranks or none.
    "fsdp2": (lambda: ModelParallelStrategy(2, 1), Module, _fully_shard, _adam, _EVERY_BATCH),
    "fsdp2_missed": (lambda: ModelParallelStrategy(2, 1), Module, _fully_shard, _adam, _EVERY_BATCH),
    "fsdp2_written": (lambda: ModelParallelStrategy(2, 1), _Scaled, _fully_shard, _adam, {}),
    "tensor_parallel": (lambda: ModelParallelStrategy(1, 2), Module, _tensor_parallel, _adam, {}),
    "fsdp1": (lambda: Fsdp1OnCpu(use_orig_params=True), Module, _wrap, _adam, {}),
    "fsdp1_flat": (lambda: Fsdp1OnCpu(use_orig_params=False), Module, _wrap, _adam, {}),
}


def _miss_every_other_save() -> None:
    """As if this rank had heard of it too late."""
    agree = SaveCoordinator.agree

    def patched_agree(rounds: SaveCoordinator, number: int, in_time: bool) -> Any:
        return agree(rounds, number, in_time and number % 2 == 0)

    SaveCoordinator.agree = patched_agree  # type: ignore[method-assign]


def train_and_resume(case: str, folder: Path) -> dict[str, Any]:
    """Trains undisturbed, then with local saves until an exception, and from there to the end.

    Returns:
        What the test looks at: of this rank.
    """
    make_strategy, kind, prepare, optimizer, options = CASES[case]

    def fit(*callbacks: Any) -> tuple[L.Trainer, list[torch.Tensor]]:
        context.fits_begun.clear()
        torch.manual_seed(5)
        module = kind(prepare, optimizer)
        trainer = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=make_strategy(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=str(folder),
            callbacks=list(callbacks),
            **options,
        )
        if watching:
            watching[0].trainer = trainer
        data = TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(3)))
        try:
            trainer.fit(module, DataLoader(data, 2), DataLoader(data, 2) if options else None)
        except OnPurpose:
            pass
        return trainer, [local(each).detach().clone() for each in (*module.parameters(), *module.buffers())]

    if case == "fsdp2_missed" and os.environ["RANK"] == "1":
        _miss_every_other_save()

    def saves() -> LocalCheckpoint:
        return LocalCheckpoint(folder / "local", every_n_train_steps=1, run_dir=folder / "run")

    watching: list[Witness] = []
    _, undisturbed = fit()
    with pytest.MonkeyPatch.context() as patch:
        watching.append(witness := Witness(patch))
        ended, _ = fit(_EndsEarly(witness, 4), saves())
    watching.clear()
    resumed, weights = fit(saves())
    ledger = list(read_ledger(folder / "run" / "ledger"))
    return {
        "taken": sorted(witness.expected),
        "published": sorted(witness.published),
        "wrong": witness.wrong(),
        "ended_at": ended.global_step,
        "resumed_at": [each["step"] for each in ledger if each["event"] == "resumed"],
        "tiers": [each["tier"] for each in ledger if each["event"] == "resumed"],
        "final_step": resumed.global_step,
        "as_undisturbed": same(weights, undisturbed),
        "waits": witness.events.count("fence"),
    }


def main(rank: int, port: int, folder: str, cases: list[str]) -> None:
    """Runs cases one after the other, as one rank of a job."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        TORCHELASTIC_RUN_ID="test",
    )
    torch.set_num_threads(1)
    output = os.open(Path(folder, f"output-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    results: dict[str, Any] = {}
    for case in cases:
        results[case] = {"error": ""}
        try:
            results[case].update(train_and_resume(case, Path(folder, case)))
        except BaseException:
            results[case]["error"] = traceback.format_exc()
        Path(folder, f"results-{rank}.json").write_text(json.dumps(results))
        if results[case]["error"]:
            break  # the other rank may be anywhere
    os._exit(0)  # a peer that has failed may be waited for
