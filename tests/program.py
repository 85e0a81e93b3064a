"""A training program for the tests: what it trains, on what data, and what happens to it when, all from one config."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import functools
import gc
import glob
import hashlib
import importlib
import itertools
import json
import os
import pdb
import pickle
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchmetrics import MeanMetric

from lightning_resilience import _files, _processes
from lightning_resilience._torch import local
from lightning_resilience.agreement_protocol import Needs
from lightning_resilience.checkpoint import checkpoint_file, resume, shard
from lightning_resilience.checkpoint.node_store import ShardWriter
from lightning_resilience.detect import health
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.hangs import progress, timeouts
from lightning_resilience.detect.hangs.rank_probe import node_directory
from lightning_resilience.detect.numerics import numerics
from lightning_resilience.fit import joining, numerics_policy
from lightning_resilience.launch import membership
from lightning_resilience.run import deadlines
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.run_directory import RunDirectory

sys.path.append(str(Path(__file__).parents[1]))  # also where it is started as a program
from tests import as_on_gpu, kill_points
from tests.late import Travelling
from tests.participants import GoesBack

BATCH = 4
BATCHES = 16

DEFAULTS: dict[str, Any] = {
    "run_dir": None,
    "weighs": False,  # what is gathered
    "seeded_apart": False,  # every rank draws random numbers of its own
    "constants": {},  # {"module:name": value}: other limits than the package's own
    "out": None,  # the result is written here by rank 0
    "log": None,  # every rank writes the samples of every step here
    "data": "shuffle",
    "workers": 0,
    "batches": BATCHES,  # of each rank in an epoch
    "global_batch": None,  # which the script divides among the ranks, rounded down
    "size": None,  # samples of all ranks in an epoch, in place of the batches
    "persistent": False,
    "loader": {},  # more arguments of it
    "augment": True,
    "dropout": 0.2,
    "batch_norm": False,
    "bucket_cap_mb": None,  # of DDP
    "digests": False,  # every rank writes what it has logged, and what its whole state is in the end
    "loggers": [],  # Lightning's, by their names; beside what the module logs, a callback gives them numbers
    "kill_points": None,  # the folder of tests/kill_points.py
    "trainer": {},
    "validation": False,
    "validation_draws": True,  # random numbers
    "plateau": False,
    "early_stopping": False,
    # or True, "accumulate", "twice" (two backward passes for a step) or "apart" (two optimizers; one accumulates)
    "manual": False,
    "clips": False,  # by hand, without effect
    "save_every": 5,
    "model_checkpoint": None,
    "recipe": None,  # the name of one, in the place of the callbacks
    "callbacks": ["preemption", "auto_resume"],  # or the names of classes, which get no arguments
    "ckpt_path": None,
    "grace_period_s": 60.0,
    "fits": 1,
    "evaluates_after": False,  # every fit, with its Trainer and with another one
    "events": [],  # {"at": "train", "step": 23, "rank": 1, "do": "SIGKILL"}
    "step_s": 0.0,
    # or True (FSDP2), "hybrid" (replicas of its shards), "own mesh" (the same, with a mesh of the module's own, and
    # other samples on each rank), "whole file" (what is saved is gathered), "fsdp1 sharded" or "fsdp1 full"
    "sharded": False,
    "wraps": False,  # the module itself wraps a layer, for FSDP1
    "data_parallel": None,  # of the sharded ranks; the others share out tensors
    "draws_at_start": False,  # hooks draw random numbers before the first batch of an epoch
    "halves_at_end": False,  # the module's on_train_end changes the weights, and draws random numbers
    "numpy_rate": False,  # a schedule that calculates with NumPy
    "by_length": False,  # a schedule of which nothing is saved: by the number of steps, asked for in this hook
    "one_cycle": False,  # a schedule that needs the number of steps, hence the data, before the training
    "accumulates": None,  # {epoch: batches}
    "persistent_validation": False,
    "lr_finder": False,
    "lightning_callbacks": {},  # more of Lightning's, by their names, with their arguments
    "slurm": False,
    "folds": False,  # every fit has its own part of the data
    "skip_fits": 0,  # the script itself leaves out as many
    "interval_s": None,
    "unreadable": None,  # [rank, file name]
    "fails": [],  # {"rank": 1, "what": "module:name", "of": part of its first argument, "call": 0, "do": "SIGKILL"}
    "disk_full_at": None,  # a step
    "disk_full_rank": None,  # whose shards of that step find no space
    "slow_shards_s": None,  # [rank, seconds]: how long its shards take, or the one file
    "touches": None,  # [rank, step]: where its parameters are written to in the middle of a step
    "stuck_local_from": None,  # a step: from there on the storage of local checkpoints does not answer
    "taken_over_at": None,  # a step: another attempt claims the run
    "numpy": True,  # something in the checkpoint that a safe load cannot read
    "keeps_nothing": False,  # the module has no state but its tensors
    "fault_tolerance": {},  # arguments of the callback "fault_tolerance"
    "async_save": False,
    "keep": 2,
    "local": {},  # arguments of the callback "local_checkpoint"
    "replica_check": {},  # arguments of the callback "replica_check"
    "nan_guard": {},  # arguments of the callback "nan_guard"
    "straggler_detection": {},  # arguments of the callback "straggler_detection"
    "local_sgd": {},  # arguments of the callback "local_sgd"; "outer": True for that of DiLoCo
    "own_nodes": False,  # every node has a name of its own
    "as_on_gpu": None,  # on the simulated accelerator: {"lag": how many operators behind the host it is}
    "device": None,  # what this process trains on, as it says
    "flips": [],  # {"step": 23, "rank": 1, "what": "weight", "bit": 12}, or "moment", "nan", "anything" with a "seed"
    "lbfgs": False,
    "asks_early": False,  # the module's setup needs the number of steps, hence the data
    "logs_at_end": False,  # of the epoch, and meets the other ranks only there
    "logs_once": False,  # values that only the second batch of an epoch has
    "changes_batch": False,  # a step takes its batch apart
    "batch_object": False,  # batches are objects of a class of the script's own
    "teacher": False,  # an average of weights from which the model learns, moved in on_before_zero_grad, or "in step"
    "normalises": False,  # by what has run through before, in a buffer
    "drifts": False,  # the ranks change their weights in ways of their own
    "spoils": [],  # {"step": 23, "rank": 1, "what": "loss"}, or "gradient"
    "without": None,  # [[epoch, batch]]: what the loader leaves out
    "collective_timeout_s": None,  # of DDP's process group
    "ddp": None,  # arguments of DDPStrategy as it is on an accelerator: see OnDevice
    "second_group": False,  # an all-reduce of its own in every step
    "floor_s": None,  # calculated timeouts may be as short as this
    "ping_within_s": None,  # how long a health check between steps may take
    "sick_rank": None,  # whose node fails its health check
    "sickness": ["memory", False, "1 word of 4 came back changed"],  # the check that fails, see health.Check
    "policy": None,  # what is asked of the launcher after an error of this program: see policy()
    "fused": False,  # the optimizer
    "late": None,  # of each rank, by how many batches a verdict comes later, as on an accelerator
    "collectives": None,  # every rank writes here which there were in some healthy steps
    "trace": None,  # every rank writes here which section it enters, with its limits, and what happens in between
    "cwd": None,  # of each rank, so that /proc/self/cwd is another directory for each
    "patience_s": None,  # with storage that does not answer at a start
    "slow_writer_s": None,  # ModelCheckpoint's files are written in the background, and take this long
}


LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
"""Of this process: its rank's number of restarts before it."""


def do(config: dict[str, Any], at: str, step: int, rank: int) -> bool:
    """Does what the config says shall happen at this place; returns whether that is to leave something out."""
    trace(config, rank, f"{at} {step}")
    if config["kill_points"]:
        kill_points.passes(kill_points.IN_THE_PROGRAM.get(at, ""))
    if at == "train":
        config["furthest"] = max(step, config.get("furthest", 0))
    for number, event in enumerate(config["events"]):
        if event["at"] != at or event.get("step", 0) != step or event.get("rank", rank) != rank:
            continue
        if event.get("fit", config.get("fit")) != config.get("fit"):
            continue
        if event.get("node", node_name()) != node_name() or event.get("life", LIFE) != LIFE:
            continue
        if event.get("after", 0) > config.setdefault("furthest", 0):
            continue
        if event.get("passes", 0) > 0:  # a process that takes places of absent ranks makes their passes, too
            event["passes"] -= 1
            continue
        if event.get("once"):
            marker = Path(config["run_dir"]).with_suffix(f".event{number}-{rank}")
            if marker.exists():
                continue
            marker.touch()
        deadline = time.monotonic() + event.get("within_s", 30)
        while not glob.glob(event.get("after_file", "/"), recursive=True) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(event.get("after_s", 0.0))
        what = event["do"]
        if what == "raise":
            raise RuntimeError("on purpose")
        if what == "exit":
            os._exit(3)
        if what == "skip":  # a collective, or the step
            return True
        if what == "sleep":
            time.sleep(event["seconds"])
        elif what == "write":
            end = time.monotonic() + event["seconds"]
            with open(f"{config['run_dir']}.written-{rank}", "wb") as file:
                while time.monotonic() < end:
                    file.seek(0)
                    file.write(bytes(1_000_000))
                    time.sleep(0.02)
        elif what == "spin":  # busy until somebody makes the file
            end = time.monotonic() + 60
            while not Path(event["until"]).exists() and time.monotonic() < end:
                pass
        elif what == "input":
            with open(event["stdin"]) as sys.stdin:
                input()
        elif what == "pdb":
            with open(event["stdin"]) as stdin:
                pdb.Pdb(stdin=stdin, stdout=sys.stdout, nosigint=True).set_trace()
        elif what == "clog":  # the storage does not answer when a hang is to be written down
            run = RunDirectory(config["run_dir"])
            (run.path / "diagnostics").mkdir()
            os.mkfifo(run.path / "diagnostics" / f".{run.attempt}-0.json")
        elif what == "go_back":
            go_back(event.get("until"))
        elif what == "kill_watchdog":
            record = node_directory(str(RunDirectory(config["run_dir"]).attempt), 0) / "watchdog.json"
            while not record.exists():
                time.sleep(0.01)  # it starts beside the training
            os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        elif what == "lose_peer":  # its reduction has failed, although that of others may not have
            line = membership.current()
            assert line is not None
            assert line.replacement(60.0) is not None
            raise RuntimeError("Connection closed by peer, as the test has it")
        elif what == "break_device":
            as_on_gpu.load().break_down()
        elif what == "forgotten":  # as by gloo: it stands in a collective, and nothing ends that
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            path = os.path.join(os.path.dirname(torch.__file__), "distributed", "collectives.py")
            exec(compile("lock(mutex); lock(mutex)", path, "exec"), {"lock": libc.pthread_mutex_lock, "mutex": mutex})
        elif what in ("hold_gil", "block"):  # the latter as whoever waits for a device: no exception gets there
            libc = (ctypes.PyDLL if what == "hold_gil" else ctypes.CDLL)(None)
            mutex = ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # for ever; unlike a sleep no signal ends it
        else:
            os.kill(os.getpid(), getattr(signal, what))
    return False


def go_back(until: int | None) -> None:
    """Has the fit go back to its newest state, or an older one, in this process."""
    active = joining._active

    def nothing() -> None:
        raise RuntimeError("nothing to go back to")

    active.fit.participants.add(GoesBack(active, until, nothing))
    if active.fit.rank == 0:
        active.fit.agreement.request("back", {}, Needs.CLEAN | Needs.TRAINING)


def trace(config: dict[str, Any], rank: int, *line: Any) -> None:
    if config["trace"] and (not line or not str(line[0]).startswith("data")):
        with open(f"{config['trace']}.{rank}", "a") as file:
            file.write(json.dumps(line) + "\n")


def policy(config: dict[str, Any]) -> Any:
    """What the config asks for, after an error of this program itself."""
    name = config["policy"]

    def ask(exception: BaseException) -> Any:
        if type(exception) is not RuntimeError or "on purpose" not in str(exception):
            return None
        if name == "raise":
            raise ValueError("the policy itself")
        if not name.startswith("nvrx."):
            return name
        from nvidia_resiliency_ext.fault_tolerance.data import WorkloadAction, WorkloadControlRequest

        return WorkloadControlRequest(WorkloadAction[name.removeprefix("nvrx.")], "a request of NVRx's own")

    return ask


class SlowWriter(TorchCheckpointIO):
    """Storage on which files take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        super().save_checkpoint(*args, **kwargs)


class Data(Dataset):
    def __init__(self, size: int, augment: bool, config: dict[str, Any] | None = None) -> None:
        self.size, self.augment = size, augment
        happens = config is not None and any(each["at"] == "data" for each in config["events"])
        self.config, self.fetched = config if happens else None, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.config is not None:
            self.fetched += 1
            do(self.config, "data", self.fetched, int(os.environ.get("RANK", "0")))
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if self.augment:
            x = x + torch.rand(1) * 0.1 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return {"x": x, "id": index}


class Batch:
    """A batch as libraries for graphs have them."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.fields = default_collate(samples)

    def to(self, device: torch.device, **kwargs: Any) -> Batch:
        self.fields = {name: each.to(device) for name, each in self.fields.items()}
        return self


class HiddenSampler(BatchSampler):
    """A batch sampler that keeps the one that divides the data where nobody looks for it."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.inner, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Any:
        return iter(BatchSampler(self.inner, self.batch_size, self.drop_last))

    def __len__(self) -> int:
        return len(BatchSampler(self.inner, self.batch_size, self.drop_last))


class Stream(IterableDataset):
    """Endless for a loader that asks for its length; samples drawn with NumPy."""

    def __init__(self, size: int, augment: bool) -> None:
        self.size, self.augment = size, augment

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        data = Data(self.size, self.augment)
        for index in range(info.id if info else 0, self.size, info.num_workers if info else 1):
            yield data[index]


def loader(config: dict[str, Any], world_size: int, rank: int) -> Any:
    size = config["size"] or BATCH * config["batches"] * world_size
    kind, workers = config["data"], config["workers"]
    keep = {"num_workers": workers, "persistent_workers": config["persistent"] and workers > 0}
    keep |= config["loader"]
    if config["batch_object"]:
        keep["collate_fn"] = Batch
    data = Data(size, config["augment"], config)
    if config["folds"]:
        data = Subset(
            Data(2 * size, config["augment"]), range(config["fit"] * size // 2, config["fit"] * size // 2 + size)
        )
    if config["without"] is not None:
        sampler = RandomSampler(data) if world_size == 1 else DistributedSampler(data, world_size, rank)
        return DataLoader(data, batch_sampler=Without(sampler, BATCH, config["without"]), **keep)
    if kind in ("split", "anew", "some anew"):  # by whom the loader is asked for
        return None
    if kind == "tensors":
        return DataLoader(TensorDataset(torch.randn(size, 8)), BATCH, shuffle=True, **keep)
    if kind in ("own sampler", "combined"):  # as torch's examples have it
        sampler = DistributedSampler(data, world_size, rank, seed=3) if world_size > 1 else None
        made = DataLoader(data, BATCH, sampler=sampler, shuffle=sampler is None, **keep)
        return made if kind == "own sampler" else CombinedLoader({"x": DataLoader(data, BATCH, shuffle=True, **keep)})
    if kind == "hidden sampler":
        sampler = DistributedSampler(data, world_size, rank) if world_size > 1 else RandomSampler(data)
        return DataLoader(data, batch_sampler=HiddenSampler(sampler, BATCH, False), **keep)
    if kind == "weighted by a generator":
        weights, draw = [1.0] * size, torch.Generator().manual_seed(9)
        return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, size, True, draw), **keep)
    if kind == "weighted":
        return DataLoader(data, BATCH, sampler=WeightedRandomSampler([1.0] * size, size, replacement=False), **keep)
    if kind == "sequential":
        return DataLoader(data, BATCH, **keep)
    if kind == "shuffle":
        return DataLoader(data, (config["global_batch"] or BATCH * world_size) // world_size, shuffle=True, **keep)
    if kind == "generator":
        return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **keep)
    if kind == "iterable":
        return DataLoader(Stream(BATCH * BATCHES, config["augment"]), BATCH, **keep)
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    if kind == "stateful":
        return StatefulDataLoader(data, BATCH, shuffle=True, **keep)
    if kind == "stateful_distributed":
        sampler = StatefulDistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
        return StatefulDataLoader(data, BATCH, sampler=sampler, **keep)
    if kind == "stateful_with_luggage":
        sampler = StatefulDistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
        return with_luggage(StatefulDataLoader(data, BATCH, sampler=sampler, **keep), rank)
    if kind == "stateful_iterable":
        return StatefulDataLoader(Stream(BATCH * BATCHES, config["augment"]), BATCH, **keep)
    raise ValueError(kind)


def with_luggage(loader: Any, rank: int) -> Any:
    """A loader that keeps more on one rank than on another, and gets back what it has kept, or fails."""
    draw = torch.Generator().manual_seed(rank)
    mine = {
        "tensors": [
            torch.randn(1000 if rank != 1 else 300_000, generator=draw),
            torch.tensor([rank], dtype=torch.int8),
        ],
        "only on some" if rank > 0 else "of the first": {"number": rank / 3, "same": list(range(200)), "none": None},
    }
    state_dict, load_state_dict = loader.state_dict, loader.load_state_dict

    def load(state: dict[str, Any]) -> None:
        found = state.pop("luggage")
        assert repr(found) == repr(mine), f"rank {rank}: {found}"
        assert all(map(torch.equal, found["tensors"], mine["tensors"])), f"rank {rank}"
        print(f"rank {rank} has its luggage", flush=True)
        load_state_dict(state)

    loader.state_dict, loader.load_state_dict = lambda: {**state_dict(), "luggage": mine}, load
    return loader


def weigh_gathered(log: str) -> None:
    """Notes how many bytes this process gives all others at once."""
    gather = torch.distributed.all_gather_object

    def weighed(object_list: list[Any], obj: Any, *rest: Any, **options: Any) -> None:
        by_torch = sys._getframe(1).f_globals["__name__"].startswith("torch.")  # of FSDP1's own
        if not by_torch and not type(obj).__module__.startswith("torch."):  # plans of DCP, made once
            with open(f"{log}.gathered.{torch.distributed.get_rank()}", "a") as file:
                file.write(f"{len(pickle.dumps(obj))}\n")
        gather(object_list, obj, *rest, **options)

    torch.distributed.all_gather_object = weighed


class Module(L.LightningModule):
    def __init__(self, config: dict[str, Any], width: int = 32) -> None:
        super().__init__()
        self.config = config
        self.lr = 1e-2
        self.automatic_optimization = not config["manual"]
        first, second = torch.nn.Linear(8, width), torch.nn.Linear(width, width)
        self.net = torch.nn.Sequential(
            first,
            torch.nn.BatchNorm1d(width) if config["batch_norm"] else torch.nn.ReLU(),
            torch.nn.Dropout(config["dropout"]),
            second,
            torch.nn.Tanh(),
            torch.nn.Linear(width, 1),
        )
        self.register_buffer("average", torch.zeros(()))
        if config["teacher"]:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("queue", torch.zeros(()))
        if config["normalises"]:
            self.register_buffer("seen", torch.ones(8))
        self.metric = MeanMetric()
        self.is_watched = False

    def configure_model(self) -> None:
        if str(self.config["sharded"]).startswith("fsdp1"):
            if self.config["wraps"]:
                from torch.distributed.fsdp.wrap import wrap

                self.net[3] = wrap(self.net[3])
        elif self.config["sharded"]:
            from torch.distributed.fsdp import fully_shard

            if self.config["as_on_gpu"] is not None:
                self.net.to(self.trainer.strategy.root_device)  # fully_shard does it itself for CUDA, by other means
            # The other ranks share out tensors, or with "hybrid" each of the groups has a replica.
            mesh = self.device_mesh if self.config["sharded"] == "hybrid" else self.device_mesh["data_parallel"]
            if self.config["sharded"] == "own mesh":
                from torch.distributed.device_mesh import init_device_mesh

                device, sizes = self.trainer.strategy.root_device.type, (self.trainer.world_size // 2, 2)
                mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
                fully_shard(self.net[3], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        rank, step = self.trainer.global_rank, self.trainer.fit_loop.epoch_loop.total_batch_idx
        own = batch
        if isinstance(batch, Batch):
            batch = dict(batch.fields)
        if "x" in batch and isinstance(batch["x"], dict):
            batch = batch["x"]
        if isinstance(batch, list):
            batch = {"x": batch[0], "id": torch.zeros(0)}
        if self.config["log"]:
            with open(f"{self.config['log']}.{rank}", "a") as file:
                file.write(json.dumps([self.config["fit"], step, batch["id"].tolist()]) + "\n")
        if self.config["teacher"] == "in step":
            self.move_teacher()
            self.queue = 0.9 * self.queue + 0.1  # another tensor in its place
        if self.config["changes_batch"]:
            batch.pop("id")
            batch["x"].mul_(0.5)
            if isinstance(own, Batch):
                own.fields["x"] = batch["x"]
        if self.config["normalises"]:
            self.seen.copy_(0.5 * self.seen + 0.5 * batch["x"].abs().mean(0))
            batch = {**batch, "x": batch["x"] / self.seen}
        if do(self.config, "train", step, rank):
            return None
        flip(self.config, step, rank, self)
        if self.config["late"]:
            numerics._send.now += 1
        if self.config["second_group"]:
            self.group = getattr(self, "group", None) or torch.distributed.new_group()
            if not do(self.config, "all_reduce", step, rank):
                torch.distributed.all_reduce(torch.ones(3, device=self.device), group=self.group)
        if self.config["touches"] == [rank, step]:
            with torch.no_grad():
                next(self.net.parameters()).mul_(1.0)
        if step == self.config["taken_over_at"]:
            RunDirectory(self.config["run_dir"]).claim()
        if self.config["step_s"]:
            time.sleep(self.config["step_s"])
        loss = spoilt(self.config, step, rank, self.net, self.net(batch["x"]).pow(2).mean())
        if self.config["teacher"]:
            loss = loss + (self.net(batch["x"]) - self.teacher(batch["x"])).pow(2).mean() * (1.0 + self.queue)
        self.average.copy_(0.9 * self.average + 0.1 * loss.detach())
        self.metric.update(loss.detach())
        if self.config["logs_once"] and batch_idx == 1:
            for reduce in ("mean", "max", "min"):
                options = {"on_step": False, "on_epoch": True, "sync_dist": True, "reduce_fx": reduce}
                self.log(f"once_{reduce}", loss.detach(), **options)
            self.log("once_of_rank", loss.detach(), on_step=False, on_epoch=True)
        self.log("train_metric", self.metric, on_step=False, on_epoch=True)
        options = {"batch_size": BATCH} if isinstance(own, Batch) else {}
        self.log("train_loss", loss, on_step=not self.config["logs_at_end"], on_epoch=True, sync_dist=True, **options)
        if self.config["manual"] == "apart":
            first, second = self.optimizers()
            if batch_idx % 4 == 0:
                second.zero_grad()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            if batch_idx % 4 == 3:
                second.step()
        elif self.config["manual"]:
            optimizer = self.optimizers()
            window = 3 if self.config["manual"] == "accumulate" else 1
            if batch_idx % window == 0:
                optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=self.config["manual"] == "twice")
            if self.config["manual"] == "twice":
                self.manual_backward(loss.square())
            if batch_idx % window == window - 1:
                if self.config["clips"]:
                    self.clip_gradients(optimizer, float("inf"))
                optimizer.step()
        return loss

    def train_dataloader(self) -> Any:
        if self.config["data"] == "anew":
            return loader({**self.config, "data": "shuffle"}, 1, 0)
        if self.config["data"] != "split":
            raise NotImplementedError
        half, _ = random_split(Data(2 * BATCH * BATCHES, self.config["augment"]), [0.5, 0.5])
        return DataLoader(half, BATCH, shuffle=True)

    def on_fit_start(self) -> None:
        if self.config["seeded_apart"]:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(100 + self.trainer.global_rank)

    def teardown(self, stage: str) -> None:
        if hasattr(self, "hook"):
            self.hook.remove()

    def on_train_start(self) -> None:
        if self.config["draws_at_start"]:
            torch.rand(3)
        if any(event["at"] == "backward" for event in self.config["events"]):  # when other layers have their gradients
            if self.config["sharded"]:  # FSDP2 has no hooks of parameters called
                self.hook = self.net[2].register_full_backward_hook(lambda *_: self.happens("backward"))
            else:
                self.hook = self.net[0].weight.register_hook(lambda gradient: self.happens("backward"))
        if any(event["at"] == "optimizer" for event in self.config["events"]):  # when it has changed the parameters
            optimizer = self.trainer.optimizers[0]
            optimizer.register_step_post_hook(lambda *step: self.happens("optimizer"))

        if any(event["at"] == "capture" for event in self.config["events"]):  # when its state is saved
            strategy = self.trainer.strategy
            captures = type(strategy).lightning_module_state_dict

            def capture() -> Any:
                self.happens("capture")
                return captures(strategy)

            strategy.lightning_module_state_dict = capture

    def happens(self, at: str) -> None:
        do(self.config, at, self.trainer.fit_loop.epoch_loop.total_batch_idx, self.trainer.global_rank)

    def on_train_epoch_start(self) -> None:
        do(self.config, "epoch_start", self.trainer.current_epoch, self.trainer.global_rank)
        if self.config["draws_at_start"]:
            torch.rand(2)

    def on_train_end(self) -> None:
        if self.config["halves_at_end"]:
            torch.rand(3)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)
        do(self.config, "train_end", self.trainer.global_step, self.trainer.global_rank)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.config["teacher"] is True:
            self.move_teacher()

    def move_teacher(self) -> None:
        for number, (mine, its) in enumerate(zip(self.net.parameters(), self.teacher.parameters(), strict=True)):
            if number % 2:
                its.data = 0.5 * its.data + 0.5 * mine.data
            else:
                its.data.lerp_(mine.data, 0.5)

    def on_after_backward(self) -> None:
        if self.config["kill_points"] or any(event["at"] == "reduced" for event in self.config["events"]):
            self.happens("reduced")

    def on_train_batch_end(self, *args: Any) -> None:
        do(self.config, "batch_end", self.trainer.fit_loop.epoch_loop.total_batch_idx, self.trainer.global_rank)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        at = "sanity" if self.trainer.sanity_checking else "validation"
        do(self.config, at, self.trainer.global_step if at == "validation" else batch_idx, self.trainer.global_rank)
        drawn = torch.rand(()) if self.config["validation_draws"] else 0.5
        self.log("val_loss", self.net(batch["x"]).pow(2).mean() * (1 + drawn), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        do(self.config, "epoch_end", self.trainer.current_epoch, self.trainer.global_rank)

    def setup(self, stage: str) -> None:
        if self.config["kill_points"] and not self.is_watched:
            self.is_watched = True  # also where the fit is entered again
            kill_points.watch_gradients(self.net[-1].weight, self.net[0].weight)
        do(self.config, "setup", 0, self.trainer.global_rank)
        if self.config["by_length"] == "setup":
            self.steps = int(self.trainer.estimated_stepping_batches)
        if self.config["asks_early"]:
            print(f"there will be {self.trainer.estimated_stepping_batches:g} steps", flush=True)
        if self.config["as_on_gpu"] is not None and membership.current() is not None:
            holders = (torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel)
            held = [type(each).__name__ for each in gc.get_objects() if issubclass(type(each), holders)]
            with open(f"{self.config['run_dir']}.device-{self.trainer.global_rank}", "a") as file:
                file.write(json.dumps([os.getpid(), held, as_on_gpu.load().registered()]) + "\n")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.config["numpy"]:
            checkpoint["numpy"] = np.arange(3)
        do(self.config, "save", self.trainer.global_step, self.trainer.global_rank)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "numpy" in checkpoint or not self.config["numpy"]

    def configure_optimizers(self) -> Any:
        if self.config["lbfgs"]:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0)
        if self.config["manual"] == "apart":
            return [torch.optim.AdamW(each.parameters(), self.lr) for each in (self.net[0], self.net[1:])]
        # On an accelerator as the docs advise, so that a step can be skipped there.
        optimizer = torch.optim.AdamW(
            self.parameters(), self.lr, fused=self.config["fused"] or self.config["as_on_gpu"] is not None or None
        )
        if self.config["one_cycle"]:
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        if self.config["by_length"]:
            steps = self.steps if self.config["by_length"] == "setup" else int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.config["numpy_rate"]:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(1 / (1 + step / 7)))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if not self.config["plateau"]:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 48)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        monitor = {"scheduler": scheduler, "monitor": config_monitor(self.config), "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": monitor}


class SomeAnew(Module):
    """Trains and validates on other samples each time that it is asked for its data."""

    def some(self, batches: int) -> Any:
        indices = torch.randperm(2 * BATCH * batches)[: BATCH * batches].tolist()
        for shuffle in (random.shuffle, np.random.shuffle):
            shuffle(indices)
        return Subset(Data(2 * BATCH * batches, self.config["augment"]), indices)

    def train_dataloader(self) -> Any:
        return DataLoader(self.some(BATCHES), BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.some(3), BATCH) if self.config["validation"] else []


class KeepsNothing(Module):
    """A module without a state of its own."""

    on_save_checkpoint = L.LightningModule.on_save_checkpoint
    on_load_checkpoint = L.LightningModule.on_load_checkpoint


def spoilt(config: dict[str, Any], step: int, rank: int, net: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, with what the config has planted."""
    for each in config["spoils"]:
        if each["step"] <= step < each.get("until", each["step"] + 1) and each.get("rank", rank) == rank:
            if each.get("device", config["device"]) != config["device"]:
                continue
            each["times"] = each.get("times", 1_000_000) - 1
            if each["times"] < 0:
                continue
            if each["what"] == "loss":
                return loss * float("nan")
            if each["what"] == "masked":  # no gradient says anything
                return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.full_like(loss, float("nan")))
            weight = net[0].weight  # the root of zero, whose gradient is not finite
            return loss + (weight.flatten()[:1] * 0).sqrt().sum()
    return loss


def flip(config: dict[str, Any], step: int, rank: int, module: Module) -> None:
    """Spoils this rank's state, as a particle would: nothing counts that write. Each time once in a run."""
    for number, each in enumerate(config["flips"]):
        marker = Path(config["run_dir"]).with_suffix(f".flip{number}")
        if each["step"] != step or each["rank"] != rank or marker.exists():
            continue
        marker.touch()
        weight = module.net[3].weight
        optimizer = module.trainer.optimizers[0]
        if each["what"] == "anything":
            chance = random.Random(each["seed"])
            state = [*module.net.parameters(), *(t for one in optimizer.state.values() for t in one.values())]
            content = chance.choice(state).detach().view(-1).view(torch.uint8).numpy()
            content[chance.randrange(content.size)] ^= 1 << chance.randrange(8)
        elif each["what"] == "nan":
            weight.data[3, 4] = float("nan")
        else:
            spoilt = optimizer.state[weight]["exp_avg"] if each["what"] == "moment" else weight
            local(spoilt).data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << each["bit"])
    if config["drifts"]:
        with torch.no_grad():
            module.net[3].weight.mul_(1 + 1e-6 * rank)


class Without:
    """Batches of a sampler, but for some of some epochs."""

    def __init__(self, sampler: Any, batch_size: int, without: list[list[int]]) -> None:
        self.sampler, self.batch_size, self.without, self.epoch = sampler, batch_size, without, -1
        self.drop_last = False

    def __iter__(self):
        self.epoch += 1
        batches = torch.utils.data.BatchSampler(self.sampler, self.batch_size, False)
        for number, batch in enumerate(batches):
            if [self.epoch, number] not in self.without:
                yield batch

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size


class User(L.Callback):
    """A callback of the user's own."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        do(self.config, "callback", trainer.fit_loop.epoch_loop.total_batch_idx, trainer.global_rank)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        do(self.config, "fit_end", 0, trainer.global_rank)

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        do(self.config, "exception", 0, trainer.global_rank)


class LogsItself(L.Callback):
    """Gives numbers to the loggers itself, in every step, as ``LearningRateMonitor`` does: they write them later."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics({"by itself": float(next(module.parameters()).sum())}, step)
            if isinstance(logger, L.loggers.TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_histogram("weights", next(module.parameters()), step)


class Collectives(L.Callback):
    """Writes down the collectives of this process in some steps in the middle: torch's own record of them."""

    def __init__(self, path: str) -> None:
        self.path, self.before = path, 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (6, 12):
            entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
            if batch_idx == 6:
                self.before = len(entries)
            else:
                found = [[entry["profiling_name"], entry["input_sizes"]] for entry in entries[self.before :]]
                Path(f"{self.path}.{trainer.global_rank}").write_text(json.dumps(found))


class Lines(Logger):
    """Every rank writes what is logged, and when."""

    name, version = "lines", 0

    def __init__(self, log: str) -> None:
        super().__init__()
        self.path = f"{log}.metrics.{os.environ.get('RANK', '0')}"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([time.time(), os.getpid(), step, metrics]) + "\n")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""


def config_monitor(config: dict[str, Any]) -> str:
    return "val_loss" if config["validation"] not in (False, "no batches") else "train_loss_epoch"


def digest(module: torch.nn.Module, buffers: bool = True) -> str:
    tensors = [*module.parameters(), *(b for b in module.buffers() if buffers)]
    full = [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone() for t in tensors]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in full)).hexdigest()[:16]


def state_digests(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    state = optimizer.state_dict()
    parts = {"weights": list(module.parameters()), "buffers": list(module.buffers())}
    parts["optimizer"] = [t for each in state["state"].values() for _, t in sorted(each.items())]
    digests = {
        name: hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()[:16]
        for name, tensors in parts.items()
    }
    return digests | {"groups": json.dumps(state["param_groups"], default=str)}


def whole(trainer: L.Trainer) -> Any:
    """Within it FSDP1's parameters are whole."""
    if not isinstance(trainer.strategy, L.strategies.FSDPStrategy):
        return contextlib.nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(trainer.strategy.model, writeback=False)


def main(config: dict[str, Any]) -> None:
    config = {**DEFAULTS, **config}
    torch.set_num_threads(1)
    if config["as_on_gpu"] is not None:
        as_on_gpu.load().lag(config["as_on_gpu"].get("lag", 0))
    if config["collectives"]:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    sabotage(config)
    if config["kill_points"]:
        kill_points.install(Path(config["kill_points"]))
    if config["weighs"]:
        weigh_gathered(config["log"])
    if config["cwd"] is not None:
        os.chdir(config["cwd"][int(os.environ.get("RANK", "0"))])
    world_size = config["trainer"].get("devices", 1) * config["trainer"].get("num_nodes", 1)
    results = []
    if config["log"]:
        with open(f"{config['log']}.started.{os.environ.get('RANK', '0')}", "a") as file:
            file.write("warm\n" if _processes.waited() > 0 else "cold\n")
    L.seed_everything(1, verbose=False)
    for fit in range(config["skip_fits"], config["fits"]):
        config["fit"] = fit
        do(config, "between", fit, int(os.environ.get("LOCAL_RANK", 0)))
        # made after the fit before: its weights depend on the random state that that one left
        kind = SomeAnew if config["data"] == "some anew" else KeepsNothing if config["keeps_nothing"] else Module
        module = kind(config, 32 + (0 if config["folds"] else fit))
        trainer = make_trainer(config, world_size)
        keep = {"num_workers": 1, "persistent_workers": True} if config["persistent_validation"] else {}
        val = DataLoader(Data(BATCH * 3 * world_size, False), BATCH, **keep) if config["validation"] else None
        val = None if config["data"] == "some anew" else val
        train = loader(config, world_size, trainer.global_rank)
        val = {"same loader": train, "no batches": []}.get(config["validation"], val)
        trainer.fit(module, *([] if train is None else [train]), val_dataloaders=val, ckpt_path=config["ckpt_path"])
        do(config, "after", fit, trainer.global_rank)
        for each in (trainer, make_trainer(config, world_size)) if config["evaluates_after"] else ():
            (found,) = each.validate(module, val, verbose=False)
            assert found.keys() == {"val_loss"}, found
        if config["digests"]:
            state = state_digests(module, trainer.optimizers[0])
            Path(f"{config['out']}.state.{trainer.global_rank}").write_text(json.dumps(state) + "\n")
        metrics = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
        with whole(trainer):
            found = digest(module), digest(module, buffers=False)
        results.append(
            {
                "weights": found[0],
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "metrics": metrics,
                "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
                "random": torch.rand(()).item(),
            }
        )
    if config["out"]:
        Path(f"{config['out']}.{trainer.global_rank}").write_text(found[1])
    if trainer.is_global_zero and config["out"]:
        Path(config["out"]).write_text(json.dumps(results))


class OnDevice(L.strategies.DDPStrategy):
    """DDP as Lightning makes it on every accelerator: told its device, and with the communication hook asked for."""

    def __init__(self, hook: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.hook = hook

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.model.device_ids is None:
            self.model.device_ids = [self.root_device.index or 0]
        if self.hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Fsdp1OnCpu(L.strategies.FSDPStrategy):
    """Lightning refuses its own class without a GPU, and names a GPU to FSDP.

    And what is "offloaded" from a CPU to a CPU is no copy, but what FSDP frees in the next moment.
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        from torch.distributed import fsdp

        state_dict_type = fsdp.FullyShardedDataParallel.state_dict_type

        def without_offload(**options: Any) -> Any:
            for config in options.values():
                if hasattr(config, "rank0_only"):
                    config.offload_to_cpu = False
            return state_dict_type(**options)

        fsdp.FullyShardedDataParallel.state_dict_type = without_offload

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=torch.device("cpu"), **self.kwargs):
            yield

    def _determine_device_ids(self) -> Any:
        return None


def fail(what: dict[str, Any]) -> None:
    """Has a function raise on this rank."""
    module, name = what["what"].split(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if what.get("of", "") in str(args[:1]) and next(calls) == what.get("call", 0):
            if what.get("do") == "nothing":
                return None
            if "do" in what:
                os.kill(os.getpid(), getattr(signal, what["do"]))
            raise OSError(errno.EIO, f"the test has {name} fail")
        return function(*args, **kwargs)

    setattr(owner, name, failing)


def sabotage(config: dict[str, Any]) -> None:
    """What goes wrong with the storage, as the code sees it."""
    load, save = checkpoint_file.load, checkpoint_file.save
    if config["unreadable"] is not None and config["unreadable"][0] == int(os.environ.get("RANK", "0")):

        def no_load(path: Path, *args: Any, **kwargs: Any) -> Any:
            if Path(path).name == config["unreadable"][1]:
                raise checkpoint_file.CorruptCheckpoint(f"{path} is damaged on its way to this rank")
            return load(path, *args, **kwargs)

        checkpoint_file.load = no_load
    if config["disk_full_at"] is not None:

        def no_save(obj: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
            if resume.step_of(path) == config["disk_full_at"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return save(obj, path, *args, **kwargs)

        checkpoint_file.save = no_save

    for place, value in config["constants"].items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, value)
    rank = int(os.environ.get("RANK", "0"))
    for each in config["fails"]:
        if each["rank"] == rank:
            fail(each)
    write_data = FileSystemWriter.write_data
    if config["slow_shards_s"] is not None and config["slow_shards_s"][0] == rank:
        slow = checkpoint_file.save

        def slow_save(*args: Any, **kwargs: Any) -> Any:
            time.sleep(config["slow_shards_s"][1])
            return slow(*args, **kwargs)

        checkpoint_file.save = slow_save

    def bad_write_data(self: FileSystemWriter, *args: Any) -> Any:
        if config["slow_shards_s"] is not None and config["slow_shards_s"][0] == rank:
            time.sleep(config["slow_shards_s"][1])
        if config["disk_full_rank"] == rank and f"{config['disk_full_at']:012d}" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_data(self, *args)

    FileSystemWriter.write_data = bad_write_data

    if config["stuck_local_from"] is not None:
        publish = ShardWriter.publish

        def no_publish(self: ShardWriter, step: int, *args: Any) -> Path:
            if step >= config["stuck_local_from"]:
                time.sleep(1000)
            return publish(self, step, *args)

        ShardWriter.publish = no_publish

    if config["late"]:
        numerics_policy._reads_cost_nothing = lambda device: False
        numerics._send = Travelling(config["late"][rank])
    if config["device"] is not None:
        node = os.environ.get("GROUP_RANK", "0")
        name = f"node-{node}" if config["device"] == "by node" else config["device"]
        DeviceId.of = lambda device: DeviceId(name, "cpu")
    if config["own_nodes"]:
        name = f"node-{os.environ.get('GROUP_RANK', '0')}"
        platform.node = lambda: name
    if config["patience_s"] is not None:
        _files.PATIENCE_S = config["patience_s"]
    if config["floor_s"] is not None:
        timeouts.MIN_CALCULATED_S = config["floor_s"]
    if config["ping_within_s"] is not None:
        deadlines.LONGEST_PING_S = config["ping_within_s"]
    if config["sick_rank"] == rank:
        found = health.HealthReport((health.Check(*config["sickness"]),))
        health.begin_node_check = lambda *args, **options: lambda: found
    if config["trace"]:
        enter = progress.Progress.enter

        def traced(self: progress.Progress, section: progress.Section) -> None:
            trace(config, rank, f"[{section}]", self.timeouts)
            enter(self, section)

        progress.Progress.enter = traced
        load_shard = shard.load

        def traced_load(path: Path, *args: Any) -> Any:
            trace(config, rank, "shard", os.getpid(), Path(path).stem)
            return load_shard(path, *args)

        shard.load = traced_load


def local_sgd(exchange_every: int, outer: bool = False) -> L.Callback:
    from lightning_resilience import LocalSGD

    diloco = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return LocalSGD(exchange_every, diloco if outer else None)


def make_trainer(config: dict[str, Any], world_size: int) -> L.Trainer:
    import lightning_resilience
    from lightning_resilience import AutoResume, Preemption

    available = {
        "preemption": lambda: Preemption(run_dir=config["run_dir"], grace_period_s=config["grace_period_s"]),
        "auto_resume": lambda: AutoResume(
            config["run_dir"],
            every_n_train_steps=config["save_every"],
            async_save=config["async_save"],
            keep=config["keep"],
            **({"train_time_interval": timedelta(seconds=config["interval_s"])} if config["interval_s"] else {}),
        ),
        "fault_tolerance": lambda: lightning_resilience.FaultTolerance(
            run_dir=config["run_dir"],
            exc_handling_policy=policy(config) if config["policy"] else None,
            **config["fault_tolerance"],
        ),
        "local_checkpoint": lambda: lightning_resilience.LocalCheckpoint(run_dir=config["run_dir"], **config["local"]),
        "nan_guard": lambda: lightning_resilience.NaNGuard(run_dir=config["run_dir"], **config["nan_guard"]),
        "replica_check": lambda: lightning_resilience.ReplicaCheck(
            run_dir=config["run_dir"], **config["replica_check"]
        ),
        "straggler_detection": lambda: lightning_resilience.StragglerDetection(
            run_dir=config["run_dir"], **config["straggler_detection"]
        ),
        "local_sgd": lambda: local_sgd(**config["local_sgd"]),
        "user": lambda: User(config),
    }
    names = [name for name in config["callbacks"] if name != "nemo"]
    callbacks: list[Any] = [available.get(name, getattr(lightning_resilience, name, None))() for name in names]
    if config["recipe"]:
        recipe = getattr(lightning_resilience.recipes, config["recipe"])(config["run_dir"])
        auto_resume = AutoResume(
            every_n_train_steps=config["save_every"], train_time_interval=config["interval_s"], keep=config["keep"]
        )
        local = lightning_resilience.LocalCheckpoint(**config["local"]) if config["local"] else None
        callbacks = replace(recipe, auto_resume=auto_resume, local_checkpoint=local).callbacks
    if "nemo" in config["callbacks"]:
        recipe = lightning_resilience.recipes.nemo(config["run_dir"])
        callbacks += replace(recipe, nan_guard=lightning_resilience.NaNGuard(**config["nan_guard"])).callbacks
    if config["collectives"]:
        callbacks.append(Collectives(config["collectives"]))
    if config["loggers"]:
        callbacks.append(LogsItself())
    if config["early_stopping"]:
        callbacks.append(L.callbacks.EarlyStopping(config_monitor(config), patience=1, min_delta=0.5))
    if config["accumulates"]:
        callbacks.append(L.callbacks.GradientAccumulationScheduler(config["accumulates"]))
    for name, arguments in config["lightning_callbacks"].items():
        callbacks.append(getattr(L.callbacks, name)(**arguments))
    if config["lr_finder"]:
        callbacks.append(L.callbacks.LearningRateFinder(num_training_steps=10))
    if config["model_checkpoint"] is not None:
        callbacks.append(L.callbacks.ModelCheckpoint(**config["model_checkpoint"]))
    options = {
        "max_epochs": 3,
        "devices": 1,
        "accelerator": "cpu",
        "strategy": "ddp" if world_size > 1 else "auto",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": config["model_checkpoint"] is not None,
        "default_root_dir": str(Path(config["run_dir"]).parent),
        **config["trainer"],
    }
    if config["slow_writer_s"] is not None:
        options["plugins"] = [AsyncCheckpointIO(SlowWriter(config["slow_writer_s"]))]
    if config["slurm"]:
        options["plugins"] = [SLURMEnvironment(auto_requeue=True)]
    collectives = {}
    if config["as_on_gpu"] is not None:
        options["accelerator"] = as_on_gpu.accelerator()
        collectives = {"process_group_backend": as_on_gpu.collectives()} if world_size > 1 else {}
        single = L.strategies.SingleDeviceStrategy(torch.device(as_on_gpu.NAME, 0))
        options["strategy"] = L.strategies.DDPStrategy(**collectives) if world_size > 1 else single
    if config["bucket_cap_mb"]:
        options["strategy"] = L.strategies.DDPStrategy(bucket_cap_mb=config["bucket_cap_mb"], **collectives)
    if config["digests"]:
        options |= {"logger": [Lines(config["log"])], "log_every_n_steps": 1}
    for name in config["loggers"]:
        logger = getattr(L.loggers, name)(Path(config["run_dir"]).parent, name=name)
        options |= {"logger": [*(options["logger"] or []), logger], "log_every_n_steps": 10}
    if config["collective_timeout_s"]:
        seconds = timedelta(seconds=config["collective_timeout_s"])
        options["strategy"] = L.strategies.DDPStrategy(timeout=seconds, **collectives)
    if config["ddp"] is not None:
        options["strategy"] = OnDevice(**config["ddp"], **collectives)
    if str(config["sharded"]).startswith("fsdp1"):
        options["strategy"] = Fsdp1OnCpu(state_dict_type=config["sharded"].split()[1])
    elif config["sharded"]:
        size = config["data_parallel"] or world_size
        sizes = ("auto", "auto") if size == "auto" else (size, world_size // size)
        options["strategy"] = L.strategies.ModelParallelStrategy(
            *sizes, save_distributed_checkpoint=config["sharded"] != "whole file", **collectives
        )
    return L.Trainer(callbacks=callbacks, **options)


if __name__ == "__main__":
    with contextlib.suppress(IndexError):
        main(json.loads(sys.argv[1]))
