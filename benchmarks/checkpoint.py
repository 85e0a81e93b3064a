"""How much each way of checkpointing disturbs a training, next to a plain copy of the same bytes in memory.

One run measures all of them: 100 M parameters with Adam (1.2 GB of state) and 1 M (12 MB), on disk and in node memory,
where a step takes longer than the copy and where it takes less (the large state on disk: longer only). Every fit is a
process of its own, one after the other; the order of the methods is rotated from round to round, and there are as many
rounds as the time allows: n says how many saves each number is the median of. "nothing (noise)" saves nothing: what it
shows is how much the other rows are off.

A step is forward and backward through matrices and Adam, on one thread: real work, that shares cores and memory with
whoever saves. In short steps each batch goes through few of the layers, as in a mixture of experts: the state is as
large, the step is shorter than its copy.

**blocked** is what the gap between two steps (hooks, boundary) and the gap between backward and optimizer (where a
copy behind the training is waited for) take longer in the step that saves than in others. **slowdown** is what all
steps from there to the one in which the checkpoint is complete take longer than the median step without a save.
**complete** is the time until then; "synced" says whether it is on the disk by then, or in the page cache. **memory**
is the peak of anonymous memory, files in node memory and what forks do not share, over that of the same fit without
saves; it is looked at every 10 ms, in forks every 250 ms. Ratios (x) are to the fastest copy into memory that was there
before, of all that this run has measured; those of memory to the size of the state. First saves, which allocate, are
shown apart.

What is not ours keeps one checkpoint, as it does by default, and has $TMPDIR where it saves, so that it need not copy
between file systems. NVRx does not support tensors on CPU: "patched for CPU" is with stand-ins for its calls to CUDA.

    python benchmarks/checkpoint.py [--quick] [--minutes 5.5] [--disk DIRECTORY] [--only NAME]

Needs a machine with nothing else to do, and says how busy the others were.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import logging
import mmap
import multiprocessing as mp
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import escape, glob
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
warnings.filterwarnings("ignore")

import lightning.pytorch as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

try:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict as Container
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import dict_list_map_inplace as map_inplace
except ImportError:
    Container = None

MEMORY = Path("/dev/shm")
TARGET_HIDDEN, TARGET_SHORT, TARGET_LOAD = 0.2, 1.15, 0.5
LONG_STEP = 3  # forward and backward of a long step, in copies of the state
FIT_LIMIT_S = 150.0
OURS = ["LocalCheckpoint", "AutoResume", "AutoResume(async_save=False)"]
ALWAYS = ["nothing (noise)", "copy into warm memory"]  # what the others are compared with
PRELOADED = [
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "lightning_resilience.callbacks",
    "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager",
]


@dataclass(frozen=True)
class Size:
    name: str
    layers: int
    width: int
    routed: int  # layers that a short step goes through
    period: int  # optimizer steps from save to save
    healthy: tuple[int, int]  # long and short steps right before a save that show what a step takes without one
    pretend_s: float  # when a save that does nothing says that it is complete
    settle_s: float  # rest after a save, longer in the beginning: some methods skip saves while they allocate
    limit_s: float  # a save that is not complete by then was skipped

    @property
    def state_bytes(self) -> int:
        return 3 * 4 * self.layers * self.width**2


LARGE = Size("100 M", 100, 1000, 4, 500, (2, 30), 0.8, 0.3, 20.0)
SMALL = Size("1 M", 16, 250, 1, 120, (8, 30), 0.02, 0.03, 5.0)


@dataclass(frozen=True)
class Cell:
    """What is trained, in steps of which lengths ("long", "short"), and where it is saved ("memory", "disk")."""

    size: Size
    storage: str
    steps: tuple[str, ...]
    saves: int  # of a fit that count, for each length

    def title(self, step: str | None = None) -> str:
        where = "node memory (/dev/shm)" if self.storage == "memory" else "disk"
        title = f"{self.size.name} parameters, {self.size.state_bytes / 1e9:.3g} GB, {where}"
        return title if step is None else f"{title}, step {'longer' if step == 'long' else 'shorter'} than the copy"


# What the process that trains and the one that watches it tell each other.


class Clock:
    """Times of the save in progress, in memory that both processes share; the system's monotonic clock in seconds."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def watch_memory(self, on: bool) -> None:
        self._shared[2] = on

    @property
    def memory_watched(self) -> bool:
        return bool(self._shared[2])

    def begin(self, step: int) -> None:
        self._shared[1] = 0.0
        self._shared[0] = step

    def complete(self) -> None:
        if self._shared[1] == 0.0:
            self._shared[1] = time.monotonic()

    @property
    def step(self) -> int:
        return int(self._shared[0])

    @property
    def completed(self) -> float:
        return float(self._shared[1])


# Training


class Done(Exception):
    """Everything is measured."""


@dataclass
class Step:
    kind: str
    begun: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    ended: float = 0.0
    left: float = 0.0  # when the gap before the next step began: what this benchmark does in between is no part of it


class Plan:
    """Says of every step what it does, and notes when. A save is due after every ``period`` steps.

    Between the saves the steps are real ones from the save until it is complete, real ones again right before the next
    (they show what a step takes without one), and nearly empty in between, to save time. The first saves of a fit are
    given the time to complete, and not measured but for the very first.
    """

    def __init__(self, cell: Cell, warm_saves: int, clock: Clock) -> None:
        self.size, self.period, self.clock = cell.size, cell.size.period, clock
        self.warm_saves = warm_saves
        self.kinds = ["long"] * warm_saves + [*cell.steps] * cell.saves  # of the steps around each save
        self.steps: list[Step] = [Step("start")]  # numbered from 1, like the optimizer's
        self.saved: dict[int, tuple[float, int, bool]] = {}  # by step: completed, in which step, whether we had to wait
        self.skipped = 0
        self._open = 0
        self._unsettled = False

    def begin(self) -> str:
        """Called right before a step; returns its kind."""
        number = len(self.steps)
        position, saves = (number - 1) % self.period, (number - 1) // self.period
        warm = saves <= self.warm_saves
        ending = saves >= self.warm_saves and position >= self.period - self._healthy(saves + 1)
        self.steps[-1].left -= (began := time.monotonic())
        if self._open and (ending or (warm and position > 0)):
            self._wait(began + self.size.limit_s, truncated=ending)
        if self._open == 0 and saves == len(self.kinds):
            self.clock.watch_memory(False)
            raise Done
        if number == 3:  # the gradients of all layers are gone: let the memory be nobody's
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
            self.clock.watch_memory(True)
        if self._unsettled or number == 3:
            self._unsettled = False
            time.sleep(self.size.settle_s * (self.warm_saves if warm else 1))
        self.steps[-1].left += time.monotonic()
        if number == 1:
            kind = "all"  # Adam allocates its state
        elif ending:
            kind = self.kinds[saves]
        elif self._open and (not warm or saves == 1):
            kind = self.kinds[saves - 1]
        else:
            kind = "empty"
        self.steps.append(Step(kind, begun=time.monotonic()))
        return kind

    def _healthy(self, save: int) -> int:
        """How many steps before this save, counted from 1, show what a step takes."""
        if save > len(self.kinds):
            return 0
        return self.size.healthy[0 if self.kinds[save - 1] == "long" else 1]

    def end(self) -> None:
        """Called right after a step."""
        number = len(self.steps) - 1
        self.steps[number].ended = time.monotonic()
        if self._open and self.clock.completed and number > self._open:
            self._close(number, False)
        if number % self.period == 0:
            self._open = number
            self.clock.begin(number)
        self.steps[number].left = time.monotonic()

    def _wait(self, until: float, truncated: bool) -> None:
        while not self.clock.completed:
            if time.monotonic() > until:
                self.skipped += 1
                self._open = 0
                return
            time.sleep(0.001)
        self._close(len(self.steps) - 1, truncated)

    def _close(self, number: int, truncated: bool) -> None:
        self.saved[self._open] = (self.clock.completed, number, truncated)
        self._open, self._unsettled = 0, True

    def result(self) -> list[Save]:
        """What the saves have cost."""
        steps, period = self.steps, self.period

        def between(n: int) -> float:
            return steps[n].begun - steps[n - 1].left + steps[n].optimizer - steps[n].backward

        def work(n: int) -> float:
            return steps[n].backward - steps[n].begun + steps[n].ended - steps[n].optimizer

        healthy: dict[str, list[int]] = {}
        for save in range(self.warm_saves + 1, len(self.kinds) + 1):
            before = range(save * period - self._healthy(save) + 1, save * period + 1)
            healthy.setdefault(self.kinds[save - 1], []).extend(before)
        saves = []
        for step, (completed, last, truncated) in sorted(self.saved.items()):
            kind, first = self.kinds[step // period - 1], step + 1
            gap, busy = (statistics.median(map(of, healthy[kind])) for of in (between, work))
            window = range(first, max(first, last) + 1)
            saves.append(
                Save(
                    kind=kind,
                    first=step == period,
                    warm=step > self.warm_saves * period,
                    blocked_s=between(first) - gap,
                    slowdown_s=sum(work(n) - busy for n in window) + sum(between(n) - gap for n in window[1:]),
                    complete_s=completed - steps[step].ended,
                    step_s=busy + gap,
                    truncated=truncated,
                )
            )
        return saves


@dataclass
class Save:
    kind: str
    first: bool
    warm: bool
    blocked_s: float
    slowdown_s: float
    complete_s: float
    step_s: float
    truncated: bool


class Adam(torch.optim.Adam):
    """Notes when it begins to work: after the closure with forward and backward, and whatever waits behind that."""

    plan: Plan

    def _init_group(self, *arguments: Any, **keywords: Any) -> Any:
        self.plan.steps[-1].optimizer = time.monotonic()
        return super()._init_group(*arguments, **keywords)  # type: ignore[no-untyped-call]


class Model(L.LightningModule):
    def __init__(self, size: Size, batch: int, plan: Plan) -> None:
        super().__init__()
        self.size, self.plan = size, plan
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers)
        )
        self.rest = torch.nn.Parameter(torch.zeros(1))
        # Neither parameters nor buffers: nobody's state.
        self.inputs = {"long": torch.randn(batch, size.width), "short": torch.randn(1, size.width)}
        self.inputs["all"] = self.inputs["short"]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kind = self.plan.begin()
        if kind == "empty":
            return self.rest.sum() * 1.0
        chosen: Sequence[int] = range(len(self.layers))
        if kind == "short":
            first = batch_idx * self.size.routed
            chosen = [(first + k) % len(self.layers) for k in range(self.size.routed)]
        x = self.inputs[kind]
        for index in chosen:
            x = x + 0.1 * self.layers[index](x)
        return x.pow(2).mean()

    def backward(self, loss: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        super().backward(loss, *arguments, **keywords)
        self.plan.steps[-1].backward = time.monotonic()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = Adam(self.parameters(), 1e-5, fused=True)
        optimizer.plan = self.plan
        # Before everybody else's: the first hook after the step.
        optimizer.register_step_post_hook(lambda *_: self.plan.end())
        return optimizer


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


# Methods


@dataclass
class Setup:
    """What a method saves with, in one fit."""

    callbacks: list[L.Callback] = field(default_factory=list)
    plugins: list[Any] = field(default_factory=list)
    files: Callable[[], list[str]] = list
    """Of the newest checkpoint."""
    load: Callable[[L.Trainer, str], Any] | None = None
    """Given the first of those, loads that checkpoint; verified, if the method can."""


@dataclass(frozen=True)
class Method:
    name: str
    setup: Callable[[Path, int, Clock], Setup]
    """Given the folder, how many steps lie between saves, and the clock to tell when one is complete."""
    synced: str = "no"
    verified: str = "no"
    warm_saves: int = 1
    """Saves until nothing is allocated any more."""
    published: str | None = None
    """Pattern of the file that appears when a checkpoint is complete, where nothing else tells."""
    storages: tuple[str, ...] = ("memory", "disk")


class InHook(L.Callback):
    """Saves where ``ModelCheckpoint`` does."""

    def __init__(self, every: int, save: Callable[[L.Trainer, int], None]) -> None:
        self.every, self.save = every, save

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.save(trainer, trainer.global_step)


def state_of(trainer: L.Trainer) -> dict[str, Any]:
    """What Lightning saves; containers of its own, tensors of the training."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def nothing(pretend_s: float) -> Callable[[Path, int, Clock], Setup]:
    """A "save" that does nothing and is "complete" some time later: what this benchmark reads when there is nothing."""

    def setup(folder: Path, every: int, clock: Clock) -> Setup:
        return Setup([InHook(every, lambda trainer, step: threading.Timer(pretend_s, clock.complete).start())])

    return setup


def plain_copy(folder: Path, every: int, clock: Clock) -> Setup:
    memory: list[torch.Tensor] = []

    def save(trainer: L.Trainer, step: int) -> None:
        tensors = list(tensors_in(state_of(trainer)))
        if not memory:
            memory.extend(torch.zeros_like(tensor) for tensor in tensors)
        for kept, tensor in zip(memory, tensors, strict=True):
            kept.copy_(tensor)
        clock.complete()

    return Setup([InHook(every, save)])


class TimedIO(TorchCheckpointIO):
    """Lightning's own, which tells when a save has ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        super().save_checkpoint(*arguments, **keywords)
        self.clock.complete()


def lightnings(folder: Path, every: int, clock: Clock, wrap: Callable[[TorchCheckpointIO], Any]) -> Setup:
    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=every, save_top_k=1)
    return Setup(
        [callback],
        [wrap(TimedIO(clock))],
        lambda: [callback.best_model_path],
        lambda trainer, path: TorchCheckpointIO().load_checkpoint(path, weights_only=True),
    )


def lightning_default(folder: Path, every: int, clock: Clock) -> Setup:
    return lightnings(folder, every, clock, lambda io: io)


def lightning_async(folder: Path, every: int, clock: Clock) -> Setup:
    return lightnings(folder, every, clock, AsyncCheckpointIO)


def distributed_checkpoint(folder: Path, every: int, clock: Clock) -> Setup:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
    from torch.distributed.checkpoint.state_dict_saver import async_save

    stager = DefaultStager(StagingOptions(False, False, False, False))  # the others need CUDA, or processes
    running: list[Any] = []
    kept: list[Path] = []

    def save(trainer: L.Trainer, step: int) -> None:
        if running:
            running.pop().result()
        path = folder / f"step-{step}"
        future: Any = async_save(state_of(trainer), checkpoint_id=path, async_stager=stager, no_dist=True)
        future.add_done_callback(lambda _: ended(path))
        running.append(future)

    def ended(path: Path) -> None:
        before, kept[:] = kept[:], [path]
        clock.complete()
        for old in before:
            shutil.rmtree(old)

    def load(trainer: L.Trainer, path: str) -> Any:
        state = state_of(trainer)
        load_distributed(state, checkpoint_id=kept[0], no_dist=True)
        return state

    return Setup([InHook(every, save)], [], lambda: glob(f"{escape(str(kept[0]))}/*.distcp"), load)


def nvrx(is_async: bool) -> Callable[[Path, int, Clock], Setup]:
    def setup(folder: Path, every: int, clock: Clock) -> Setup:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        # Its managers gather over the default group, and ask CUDA to finish what CPU has finished.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        manager = LocalCheckpointManager(folder)
        queue = AsyncCallsQueue(persistent=False)

        class Save(InHook):
            def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
                queue.maybe_finalize_async_calls(blocking=trainer.global_step % every == 0, no_dist=True)
                super().on_train_batch_end(trainer, *arguments)

        def save(trainer: L.Trainer, step: int) -> None:
            request = manager.save(StateOnCPU(state_of(trainer), is_async), step, is_async)
            if request is not None:
                queue.schedule_async_request(request)

        def load(trainer: L.Trainer, path: str) -> Any:
            manager.find_latest()
            return manager.load()

        return Setup([Save(every, save)], [], lambda: newest(folder, "iter_*_local.pt"), load)

    return setup


class StateOnCPU(Container or object):  # type: ignore[misc]
    """NVRx's container of tensors on CUDA, with those on CPU: one level up, since it is pickled by its name.

    Where NVRx copies to the host, tensors on CPU must be copied if they are written behind the training, and need not
    be if the training waits.
    """

    def __init__(self, state_dict: dict[str, Any], copied: bool) -> None:
        self.state_dict, self.copied = state_dict, copied
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        if self.copied:
            map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def newest(folder: Path, name: str) -> list[str]:
    return [max(glob(f"{escape(str(folder))}/**/{name}", recursive=True), key=os.path.getmtime)]


def ours_local(folder: Path, every: int, clock: Clock) -> Setup:
    from lightning_resilience import LocalCheckpoint
    from lightning_resilience.checkpoint import shard

    callback = LocalCheckpoint(dir=folder / "local", every_n_train_steps=every, run_dir=folder / "run")
    return Setup(
        [callback], [], lambda: newest(folder, "step-*/rank-00000.shard"), lambda trainer, path: shard.load(path)
    )


def ours_global(**options: Any) -> Callable[[Path, int, Clock], Setup]:
    def setup(folder: Path, every: int, clock: Clock) -> Setup:
        from lightning_resilience import AutoResume
        from lightning_resilience.checkpoint import checkpoint_file

        callback = AutoResume(run_dir=folder / "run", every_n_train_steps=every, **options)
        return Setup(
            [callback], [], lambda: newest(folder, "step-*.ckpt"), lambda trainer, path: checkpoint_file.load(path)
        )

    return setup


def methods(size: Size) -> list[Method]:
    # {} stands for the step.
    checkpoint = "run/fit-000/checkpoints/step-{:012d}.ckpt"
    return [
        Method("nothing (noise)", nothing(size.pretend_s), storages=("memory",)),
        Method("copy into warm memory", plain_copy, storages=("memory",)),
        Method(
            "LocalCheckpoint",
            ours_local,
            synced="yes",
            verified="yes",
            warm_saves=3,  # it keeps two, and writes the next into the file of one before
            published="local/**/step-{:012d}-*/rank-00000.shard",
        ),
        Method("AutoResume", ours_global(), "yes", "yes", warm_saves=2, published=checkpoint, storages=("disk",)),
        Method(
            "AutoResume(async_save=False)",
            ours_global(async_save=False),
            "yes",
            "yes",
            published=checkpoint,
            storages=("disk",),
        ),
        Method("Lightning ModelCheckpoint", lightning_default),
        Method("Lightning AsyncCheckpointIO", lightning_async),
        Method("DCP async_save, kept stager", distributed_checkpoint, synced="yes"),
        Method("NVRx local, patched for CPU", nvrx(False), published="**/iter_{:07d}_0_local.pt"),
        Method("NVRx local async, patched", nvrx(True), published="**/iter_{:07d}_0_local.pt"),
    ]


def missing(method: Method) -> str | None:
    """Why a method cannot be measured here."""
    try:
        if method.name.startswith("NVRx"):
            return None if Container is not None else "NVRx is not installed"
        if method.name == "LocalCheckpoint":
            from lightning_resilience import LocalCheckpoint  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


# One fit, in a process of its own


@dataclass
class Fit:
    """What a process has measured."""

    saves: list[Save] = field(default_factory=list)
    skipped: int = 0
    load_s: float | None = None
    read_s: float | None = None
    error: str | None = None
    memory: int = 0
    """Bytes, at most."""
    cpu_s: float = 0.0
    took_s: float = 0.0


def fit(
    cell: Cell, name: str, folder: str, batch: int, with_load: bool, shared: Any, answer: Connection[Any, Any]
) -> None:
    _quiet()
    result = Fit()
    try:
        _fit(
            cell, next(m for m in methods(cell.size) if m.name == name), Path(folder), batch, with_load, shared, result
        )
    except BaseException:
        result.error = traceback.format_exc(limit=-3)
    result.cpu_s = cpu_used()
    answer.send(result)
    answer.close()
    # No exit handlers: what is left here goes with the folder.
    sys.stdout.flush()
    os._exit(0)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def _fit(cell: Cell, method: Method, folder: Path, batch: int, with_load: bool, shared: Any, result: Fit) -> None:
    tempfile.tempdir = str(folder)
    clock = Clock(shared)
    plan = Plan(cell, method.warm_saves, clock)
    setup = method.setup(folder, cell.size.period, clock)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=setup.callbacks,
        plugins=setup.plugins,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in setup.callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = Model(cell.size, batch, plan)
    try:
        trainer.fit(model, DataLoader(Batches(), batch_size=None))
    except Done:
        pass
    result.saves, result.skipped = plan.result(), plan.skipped
    if with_load and setup.load is not None:
        repeat = 2 if cell.size == LARGE else 10
        files = setup.files()
        result.read_s = _fastest_read(files, repeat)
        times = []
        for _ in range(repeat):
            began = time.monotonic()
            loaded = setup.load(trainer, files[0])
            times.append(time.monotonic() - began)
            del loaded
        result.load_s = min(times)


def _fastest_read(files: list[str], repeat: int) -> float:
    """Seconds to read files that are in the page cache, into memory that was there before."""
    memory = memoryview(bytearray(max(map(os.path.getsize, files))))
    times = []
    for _ in range(repeat):
        began = time.monotonic()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                position = 0
                while got := file.readinto(memory[position : position + (8 << 20)]):
                    position += got
        times.append(time.monotonic() - began)
    return min(times)


# The process that starts and watches them


class Bench:
    def __init__(self, disk: Path, cells: list[Cell], only: list[str] | None) -> None:
        self.cells = cells
        self.fits: dict[tuple[Cell, str], list[Fit]] = {}
        self.skipped: dict[str, str] = {}
        self.batch: dict[str, int] = {}
        self.cpu_s = 0.0
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.plan: dict[Cell, list[Method]] = {}
        for cell in cells:
            for method in methods(cell.size):
                if (reason := missing(method)) is not None:
                    self.skipped[method.name] = reason
                elif cell.storage in method.storages and (not only or any(o in method.name for o in [*ALWAYS, *only])):
                    self.plan.setdefault(cell, []).append(method)
        prefix = "lightning-resilience-benchmark-"
        self.folders = {
            name: Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            for name, place in (("memory", MEMORY), ("disk", disk))
        }

    def close(self) -> None:
        for folder in self.folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, until: float) -> None:
        """Goes through all cells, again and again while there is time."""
        for turn in itertools.count():
            measured = 0
            for cell, chosen in self.plan.items():
                first = turn % len(chosen)
                for method in chosen[first:] + chosen[:first]:
                    fits = self.fits.setdefault((cell, method.name), [])
                    alike = fits or [f for key in self.fits for f in self.fits[key] if key[0].size == cell.size]
                    took = max((f.took_s for f in alike), default=0.0)
                    if time.monotonic() + took > until or (fits and fits[-1].error is not None):
                        continue
                    fits.append(self.one(cell, method, with_load=turn < 2))
                    measured += 1
            if not measured:
                return

    def calibrate(self, sizes: list[Size]) -> None:
        """How large a batch must be for a long step."""
        for size in sizes:
            receiver, sender = self.context.Pipe(False)
            process = self.context.Process(target=_calibrate, args=(size, sender))
            process.start()
            sender.close()
            self.batch[size.name] = receiver.recv()
            process.join()

    def one(self, cell: Cell, method: Method, with_load: bool) -> Fit:
        began = time.monotonic()
        folder = self.folders[cell.storage] / "fit"
        folder.mkdir()
        if cell.storage == "disk":
            os.sync()  # what the one before has left to be written
        shared = self.context.Array(ctypes.c_double, 3, lock=False)
        receiver, sender = self.context.Pipe(False)
        process = self.context.Process(
            target=fit,
            args=(cell, method.name, str(folder), self.batch[cell.size.name], with_load, shared, sender),
        )
        process.start()
        sender.close()
        try:
            peak, result = self._watch(process, method, folder, Clock(shared), receiver)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            shutil.rmtree(folder, ignore_errors=True)
        result.memory = peak
        self.cpu_s += result.cpu_s
        result.took_s = time.monotonic() - began
        print(f"{result.took_s:5.1f} s  {cell.title()}: {method.name}", file=sys.stderr)
        if result.error is not None:
            print(result.error, file=sys.stderr)
        return result

    @staticmethod
    def _watch(
        process: Any, method: Method, folder: Path, clock: Clock, receiver: Connection[Any, Any]
    ) -> tuple[int, Fit]:
        """Samples memory, and tells the process when a checkpoint has appeared."""
        limit, memory = time.monotonic() + FIT_LIMIT_S, Memory(process.pid, folder)
        seen = 0
        while True:
            if receiver.poll(0.001):
                try:
                    return memory.peak, receiver.recv()
                except EOFError:
                    process.join(5)
                    return memory.peak, Fit(error=f"it ended with exit code {process.exitcode}")
            now = time.monotonic()
            step = clock.step
            if method.published is not None and step != seen and not clock.completed:
                pattern = f"{escape(str(folder))}/{method.published.format(step)}"
                if glob(pattern, recursive=True):
                    clock.complete()
                    seen = step
            if clock.memory_watched:
                memory.sample(now)
            if now > limit:
                return memory.peak, Fit(error=f"it was not done after {FIT_LIMIT_S:.0f} s")


def _calibrate(size: Size, answer: Connection[Any, Any]) -> None:
    _quiet()
    layers = [torch.nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers)]
    source = [torch.zeros(size.width, size.width) for _ in range(3 * size.layers)]
    memory = [torch.zeros_like(tensor) for tensor in source]

    def step(batch: int) -> None:
        x = torch.randn(batch, size.width)
        for layer in layers:
            x = x + 0.1 * layer(x)
        torch.autograd.backward(x.pow(2).mean())

    def seconds(action: Callable[[], Any], repeat: int = 3) -> float:
        times = []
        for _ in range(repeat + 1):
            began = time.monotonic()
            action()
            times.append(time.monotonic() - began)
        return min(times[1:])

    wanted = LONG_STEP * seconds(lambda: [m.copy_(s) for m, s in zip(memory, source, strict=True)])
    small, large = seconds(lambda: step(32)), seconds(lambda: step(128))
    each = max((large - small) / 96, 1e-9)
    answer.send(max(16, min(8192, int(32 + (wanted - small) / each) // 8 * 8)))
    os._exit(0)


class Memory:
    """Peak of what a process has in memory: its anonymous pages, its files in node memory, and its forks' own pages.

    A fork shares pages with its parent until one of them writes. Counting those that are not shared is expensive for
    the kernel, so forks are looked at less often.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.peak = pid, 0
        self.folder = folder if folder.is_relative_to(MEMORY) else None
        self._next, self._next_forks, self._forks = 0.0, 0.0, 0

    def sample(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + 0.01
        try:
            if now >= self._next_forks:
                self._next_forks = now + 0.25
                with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                    self._forks = sum(self._kilobytes(f"{pid}/smaps_rollup", "Private") for pid in file.read().split())
            in_use = self._forks + self._kilobytes(f"{self.pid}/status", "RssAnon")
        except (OSError, ProcessLookupError):
            return  # it has ended
        self.peak = max(self.peak, in_use * 1024 + self._files())

    @staticmethod
    def _kilobytes(path: str, name: str) -> int:
        with open(f"/proc/{path}") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(name))

    def _files(self) -> int:
        if self.folder is None:
            return 0
        size = 0
        for place, _, names in os.walk(self.folder):
            for name in names:
                try:
                    size += os.lstat(os.path.join(place, name)).st_blocks * 512
                except FileNotFoundError:
                    pass
        return size


def available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def touch(size: int) -> None:
    """Has the machine hand out so much memory once: a virtual one may have to get it from its host first."""
    if (child := os.fork()) == 0:
        try:
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class Load:
    """How busy other programs have kept the machine."""

    def __init__(self) -> None:
        self.began, self.total, self.own = time.monotonic(), self._busy(), cpu_used()

    @staticmethod
    def _busy() -> float:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

    def others(self, fits_s: float) -> float:
        """In cores; ``fits_s``: what the fits have used."""
        others_s = self._busy() - self.total - (cpu_used() - self.own) - fits_s
        return max(0.0, others_s) / (time.monotonic() - self.began)


def cpu_used() -> float:
    """Seconds of this process and the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Tables


@dataclass
class Row:
    method: Method
    fits: list[Fit]
    failed: bool
    saves: list[Save]  # those that count, around which steps were of one length

    def median(self, of: Callable[[Save], float]) -> float:
        return statistics.median(map(of, self.saves))

    @property
    def both_s(self) -> float:
        return self.median(lambda save: save.blocked_s + save.slowdown_s)


def report(bench: Bench) -> None:
    for cell, chosen in bench.plan.items():
        copies = [save.blocked_s for save in _saves(bench, cell.size, "copy into warm memory")]
        reference = min(copies, default=float("nan"))
        control = [
            f.memory for (c, name), fits in bench.fits.items() for f in fits if (c.size, name) == (cell.size, ALWAYS[0])
        ]
        for step in cell.steps:
            rows = []
            for method in chosen:
                fits = bench.fits.get((cell, method.name), [])
                good = [f for f in fits if f.error is None]
                counted = [save for f in good for save in f.saves if save.warm and save.kind == step]
                rows.append(Row(method, good, len(good) < len(fits), counted))
            step_s = [save.step_s for row in rows for save in row.saves]
            if not step_s:
                continue
            print(f"\n{cell.title(step)} (step {statistics.median(step_s):.3g} s, copy {reference:.4g} s)")
            print(
                f"{'':28} {'blocked':>16} {'slowdown':>16} {'both':>7} {'complete':>16} {'synced':>6} {'memory':>15}"
                f" {'first blocked':>13} {'n':>3}"
            )
            for row in rows:
                print(_line(cell, row, reference, control))
            _targets(cell, step, [row for row in rows if row.saves], reference)


def _saves(bench: Bench, size: Size, name: str) -> list[Save]:
    fits = [f for key, fits in bench.fits.items() if (key[0].size, key[1]) == (size, name) for f in fits]
    return [save for f in fits for save in f.saves if save.warm]


def _line(cell: Cell, row: Row, reference: float, control: list[int]) -> str:
    name, saves = row.method.name, row.saves
    if not saves:
        return f"{name:28} {'failed' if row.failed else 'no time was left'}"

    def seconds(value: float) -> str:
        amount = f"{value:7.3f} s" if cell.size == LARGE else f"{value * 1e3:6.1f} ms"
        return f"{amount}{value / reference:6.2f}x".rjust(16)

    extra = statistics.median(f.memory for f in row.fits) - statistics.median(control or [0])
    memory = f"{extra / 1e6:6.0f} MB{extra / cell.size.state_bytes:5.1f}x"
    firsts = [save.blocked_s for f in row.fits for save in f.saves if save.first]
    blocked, slowdown = row.median(lambda save: save.blocked_s), row.median(lambda save: save.slowdown_s)
    first = f"{statistics.median(firsts) * 1e3:.0f} ms" if firsts else "-"
    synced = "-" if name in ALWAYS or cell.storage == "memory" else row.method.synced
    complete = "-" if name == ALWAYS[0] else seconds(row.median(lambda save: save.complete_s))
    notes = "  (not complete before the next save)" if any(save.truncated for save in saves) else ""
    if skipped := sum(f.skipped for f in row.fits):
        notes += f"  ({skipped} skipped)"
    if row.failed:
        notes += "  (failed once)"
    return (
        f"{name:28} {seconds(blocked)} {seconds(slowdown)} {row.both_s / reference:6.2f}x {complete:>16} {synced:>6}"
        f" {memory:>15} {first:>13} {len(saves):3}{notes}"
    )


def _targets(cell: Cell, step: str, rows: list[Row], reference: float) -> None:
    """The targets of the local tier, and whether they are met here."""
    ours = next((row for row in rows if row.method.name == "LocalCheckpoint"), None)
    if ours is None:
        return
    limit = TARGET_HIDDEN if step == "long" else TARGET_SHORT
    blocked = ours.median(lambda save: save.blocked_s) / reference
    print(f"target: LocalCheckpoint blocked <= {limit:g}x: {blocked:.2f}x, {'met' if blocked <= limit else 'MISSED'}")
    others = [row for row in rows if row.method.name not in (*ALWAYS, *OURS)]
    if others:
        best = min(others, key=lambda row: row.both_s)
        note = " (not synced)" if cell.storage == "disk" and best.method.synced == "no" else ""
        print(
            f"target: blocked and slowdown lowest of all: {ours.both_s / reference:.2f}x, next {best.method.name} "
            f"{best.both_s / reference:.2f}x{note}, {'met' if ours.both_s <= best.both_s else 'MISSED'}"
        )


def report_loads(bench: Bench) -> None:
    print("\nLoading the newest checkpoint, and a read of its files from the page cache into memory that is there")
    print(f"{'':28} {'':6} {'':7} {'load':>11} {'verified':>9} {'read':>11} {'of read bandwidth':>18}")
    rows: dict[tuple[str, str, str, str], list[Fit]] = {}
    for cell, chosen in bench.plan.items():
        for method in chosen:
            fits = [f for f in bench.fits.get((cell, method.name), []) if f.load_s is not None]
            if fits:
                rows.setdefault((cell.size.name, cell.storage, method.name, method.verified), []).extend(fits)
    for (size, storage, name, verified), fits in rows.items():
        load, read = min(f.load_s or 0.0 for f in fits), min(f.read_s or 0.0 for f in fits)
        share = read / load
        target = ""
        if verified == "yes":
            target = f"  target >= {TARGET_LOAD:.0%}: {'met' if share >= TARGET_LOAD else 'MISSED'}"
        print(
            f"{name:28} {size:6} {storage:7} {load * 1e3:8.1f} ms {verified:>9} {read * 1e3:8.1f} ms"
            f" {share:18.0%}{target}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only, in less than a minute")
    parser.add_argument("--minutes", type=float, help="how long to measure; default: 5.5, or 0.8 with --quick")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--only", action="append", metavar="NAME", help="methods with this in their name")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * (arguments.minutes or (0.8 if arguments.quick else 5.5))
    cells = [Cell(SMALL, storage, ("long", "short"), 6) for storage in ("memory", "disk")]
    if not arguments.quick:
        # To disk a save of the large state takes seconds: there is not the time for more.
        cells = [Cell(LARGE, "memory", ("long", "short"), 2), *cells, Cell(LARGE, "disk", ("long",), 1)]
        needed = 10 * LARGE.state_bytes
        if available() < needed or shutil.disk_usage(MEMORY).free < needed / 2:
            sys.exit(
                f"100 M parameters need {needed / 1e9:.0f} GB of free memory, half of it in {MEMORY}. Free some, or "
                "measure the small model: --quick."
            )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves nothing behind, and shows what there is
    load = Load()
    bench = Bench(arguments.disk, cells, arguments.only)
    try:
        if not arguments.quick:
            touch(min(10 * LARGE.state_bytes, int(0.6 * available())))
        bench.calibrate([SMALL] if arguments.quick else [SMALL, LARGE])
        bench.run(until)
    except KeyboardInterrupt:
        pass
    finally:
        bench.close()
    report(bench)
    report_loads(bench)
    for name, reason in bench.skipped.items():
        print(f"\n{name} is left out: {reason}")
    minutes, others = (time.monotonic() - load.began) / 60, load.others(bench.cpu_s)
    verdict = ": do not trust these numbers." if others > 0.1 else "."
    print(f"\n{minutes:.1f} minutes. Other programs used {others:.2f} of {os.cpu_count()} cores meanwhile{verdict}")


if __name__ == "__main__":
    main()
