"""Local checkpoints: whole though the device is busy, fast, and what they cost is what they say."""

from __future__ import annotations

import contextlib
import gc
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import LocalCheckpoint
from lightning_resilience.checkpoint import shard
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check
from tests.gpu.training import Module, batches, network, sha, tensors


class Stop(Exception):
    """Ends a fit as a failure does: what it has saved stays."""


class Clones(L.Callback):
    """Copies the state at every boundary on its device, in order with the training, and makes the device busy."""

    def __init__(self, device: Device, busy_s: float) -> None:
        self.device, self.busy_s = device, busy_s
        self.kept: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_step not in self.kept:  # batches that are only accumulated come after
            self.kept[trainer.global_step] = [each.detach().clone() for each in tensors(trainer)]
        self.device.busy(self.busy_s)


class StopAt(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            time.sleep(0.2)  # the last save may end
            raise Stop


@contextlib.contextmanager
def on_side_stream(device: Device) -> Iterator[None]:
    module = device.load()
    with module.stream(module.Stream()):
        yield


def saved(folder: Path) -> dict[int, set[str]]:
    """The contents of all tensors in each local checkpoint below ``folder``, by step."""
    found: dict[int, set[str]] = {}
    for path in folder.rglob("step-*/rank-*"):
        header, content = shard.load(path)
        found[header.identity.step] = {sha([each]) for each in content}
    return found


@check("every local checkpoint is bitwise the state of its boundary, though the device comes to it late", limit_s=300)
def snapshot_race(bench: Bench) -> None:
    device = bench.device
    width, count, busy_s = (64, 9, 0.02) if bench.quick else (1024, 16, 0.1)
    variants: dict[str, dict[str, Any]] = {
        "AdamW fused": {"optimizer": "AdamW fused"},
        "AdamW": {"optimizer": "AdamW"},
        "another stream": {"around": on_side_stream},
        "accumulation": {"accumulate_grad_batches": 2},
        "16-mixed": {"precision": "16-mixed"},
        "averaged weights": {"averages": True},
        "torch.compile, CUDA graphs": {"compiles": True},
    }
    if bench.quick:
        variants = {name: variants[name] for name in ("accumulation", "another stream", "averaged weights")}
    for number, (title, options) in enumerate(variants.items()):
        around: Callable[[Device], Any] = options.pop("around", lambda device: contextlib.nullcontext())
        net: Any = network(width, 4, norm=True)
        if compiles := options.pop("compiles", False):
            net = torch.compile(net, mode="reduce-overhead")
        averages = [L.callbacks.EMAWeightAveraging()] if options.pop("averages", False) else []
        clones, memory = Clones(device, busy_s), bench.memory / str(number)
        local = LocalCheckpoint(dir=memory, every_n_train_steps=1, keep=count, run_dir=bench.folder / f"run {number}")
        L.seed_everything(1, verbose=False)
        module = Module(net, options.pop("optimizer", "AdamW fused"))
        trainer = device.trainer([local, *averages, clones, StopAt(count)], bench.folder, **options)
        try:
            with contextlib.suppress(Stop), around(device):
                trainer.fit(module, batches(count + 1, width))
        except Exception as error:
            if not compiles:
                raise
            bench.figure(title, f"did not run: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
            continue  # of the compiler, most likely
        shards = saved(memory)
        torn = [step for step, found in shards.items() if not {sha([each]) for each in clones.kept[step]} <= found]
        bench.figure(title, f"{len(shards)} compared")
        bench.expect(not torn, f"{title}: the states of steps {torn} are not those of their boundaries")
        bench.expect(len(shards) >= 2, f"{title}: only {len(shards)} states were saved")


class StepTimes(L.Callback):
    """The time of each step from boundary to boundary, by the device's clock; and what saves are said to cost."""

    def __init__(self, device: Device, local: LocalCheckpoint | None) -> None:
        self.device, self.local = device, local
        self.events: list[Any] = []
        self.saved_at: list[int] = []
        self.said: list[float] = []
        self.save_s: list[float] = []
        self.bytes = 0

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        self.events.append(self.device.event())
        if self.local is not None and (saves := self.local._participant._saves) is not None:
            stats = saves.stats
            if saves._last not in (0, *self.saved_at[-1:]):
                self.saved_at.append(saves._last)
            if stats.published > len(self.said):
                self.said.append(stats.stall_s)
                self.save_s.append(stats.save_s)
            self.bytes = stats.shard_bytes

    def seconds(self) -> list[float]:
        self.events[-1].synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in zip(self.events, self.events[1:], strict=False)]


class Repeats(Module):
    """Trains on one batch that is on its device: a step is not held up by its data."""

    def __init__(self, net: torch.nn.Module, x: torch.Tensor) -> None:
        super().__init__(net, "AdamW fused")
        self.x = x

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(self.x).pow(2).mean()


@check("how long a local save really holds the training up, and what it says", limit_s=240)
def true_stall(bench: Bench) -> None:
    device = bench.device
    saves = 3 if bench.quick else 6
    sizes = (
        {"small": (64, 2, 16, 6)}
        if bench.quick
        else {"1.2 GB, long steps": (5000, 4, 8192, 30), "1.2 GB, short": (5000, 4, 64, 300)}
    )  # the last number: steps between saves, in which one must be over
    for title, (width, depth, size, every) in sizes.items():
        run_dir = bench.folder / title
        local = LocalCheckpoint(dir=bench.memory / title, every_n_train_steps=every, run_dir=run_dir)
        times = StepTimes(device, local)
        L.seed_everything(1, verbose=False)
        x = torch.randn(size, width, device=device.at())
        trainer = device.trainer([local, times], bench.folder)
        trainer.fit(Repeats(network(width, depth), x), batches(every * (saves + 1), 1))
        seconds = times.seconds()  # the one with the index i ends with the boundary of step i + 2
        after_save = {step - 1 for step in times.saved_at[1:]}  # not of the first, which allocates
        usual = statistics.median(each for index, each in enumerate(seconds) if index > 2 and index not in after_save)
        stalls = [sum(seconds[index : index + 2]) - 2 * usual for index in after_save if index + 1 < len(seconds)]
        true, said = statistics.median(stalls), statistics.median(times.said[1:] or times.said or [0.0])
        bench.figure(f"{title}: ms of a step", 1000 * usual)
        bench.figure(f"{title}: ms a save really holds up", 1000 * true)
        bench.figure(f"{title}: ms it says", 1000 * said)
        if times.save_s:
            bench.figure(f"{title}: GB/s until published", times.bytes / statistics.median(times.save_s) / 1e9)
        bench.expect(len(times.saved_at) >= saves, f"{title}: saved at steps {times.saved_at} only")
        wrong = abs(said - true)
        bench.expect(wrong < max(0.005, 0.3 * usual), f"{title}: off by {1000 * wrong:.0f} ms", timing=True)


@check("how fast a state is copied to node memory: as it is, and registered with the device", limit_s=120)
def copy_speed(bench: Bench) -> None:
    device, nbytes = bench.device, 2**22 if bench.quick else 2**31
    source = torch.arange(nbytes // 4, dtype=torch.int32, device=device.at())
    path = bench.memory / "destination"
    with open(path, "w+b") as file:
        file.truncate(nbytes)
        memory = mmap.mmap(file.fileno(), nbytes)
    destination = torch.frombuffer(memory, dtype=torch.int32)
    destination.zero_()  # its pages are there from now on
    module = device.load()

    def speed(non_blocking: bool) -> float:
        found = []
        for _ in range(4):
            module.synchronize()
            began = time.perf_counter()
            destination.copy_(source, non_blocking=non_blocking)
            module.synchronize()
            found.append(nbytes / (time.perf_counter() - began) / 1e9)
        return max(found)

    pageable = speed(non_blocking=False)
    bench.figure("GB/s pageable", pageable)
    bench.expect(bool((destination[-1000:] == source[-1000:].cpu()).all()), "the copy differs")
    runtime = getattr(module, "cudart", None)
    if runtime is None:
        bench.figure("note", "memory cannot be registered with this device")
        return
    began = time.perf_counter()
    error = int(runtime().cudaHostRegister(destination.data_ptr(), nbytes, 0))
    bench.figure("s to register", time.perf_counter() - began)
    bench.expect(error == 0, f"cudaHostRegister: error {error}")
    if error == 0:
        destination.zero_()
        registered = speed(non_blocking=True)
        bench.figure("GB/s registered", registered)
        bench.expect(bool((destination[-1000:] == source[-1000:].cpu()).all()), "the registered copy differs")
        bench.expect(registered > 1.5 * pageable, "registered memory is not faster", timing=True)
        runtime().cudaHostUnregister(destination.data_ptr())


class Clamped(L.Callback):
    """As in a Wasserstein GAN: weights are clipped in place, which nobody counts."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *arguments: Any) -> None:
        for each in module.parameters():
            each.data.clamp_(-0.5, 0.5)


ON_DEVICE = 64 << 20
"""As much memory of the device as local checkpoints may keep."""


@check("local checkpoints keep no copy of the model on the device, nor of averaged or clipped weights", limit_s=180)
def ema_memory(bench: Bench) -> None:
    device = bench.device
    width, depth = (2200, 4) if bench.quick else (5000, 4)
    variants: dict[str, list[type[L.Callback]]] = {
        "plain": [],
        "averaged": [L.callbacks.EMAWeightAveraging],
        "clipped": [Clamped],
    }
    if bench.quick:
        variants = {"averaged": variants["averaged"]}
    for title, kinds in variants.items():
        used = {}
        for with_local in (False, True):
            run_dir = bench.folder / f"{title} {with_local}"
            local = LocalCheckpoint(dir=bench.memory / title, every_n_train_steps=2, run_dir=run_dir)
            gc.collect()  # a Trainer and its parts refer to each other
            before = int(device.load().memory_allocated())
            probe = Allocated(device)
            callbacks = [*([local] if with_local else []), *(kind() for kind in kinds), probe]
            L.seed_everything(1, verbose=False)
            trainer = device.trainer(callbacks, bench.folder)
            trainer.fit(Module(network(width, depth), "SGD"), batches(5, width, size=2))
            used[with_local] = probe.most - before
            model = sum(each.nbytes for each in trainer.lightning_module.parameters())
            del trainer, probe, callbacks, local
        extra = used[True] - used[False]
        bench.figure(f"{title}: MB more of a model of {model / 1e6:.0f} MB", extra / 1e6)
        bench.expect(extra <= ON_DEVICE + (4 << 20), f"{title}: {extra / model:.1f} x the model is kept on the device")


class Allocated(L.Callback):
    def __init__(self, device: Device) -> None:
        self.device, self.most = device, 0

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.most = max(self.most, int(self.device.load().memory_allocated()))


class Captures(Module):
    """Records a CUDA graph in the middle of the training, as some libraries do at their first call."""

    failures: list[str] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= 4:
            torch.cuda._sleep(10_000_000)
            static, graph = torch.zeros(1000, device=batch.device), torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):  # capture_error_mode="global", the default
                    static.add_(1)
                    time.sleep(0.02)  # other threads go on meanwhile
                graph.replay()
            except RuntimeError as error:
                self.failures.append(str(error).splitlines()[0])
                torch.cuda.synchronize()
        return loss


@check("a CUDA graph can be recorded while a local checkpoint is copied", limit_s=120, needs_gpu="CUDA graphs")
def graph_capture(bench: Bench) -> None:
    local = LocalCheckpoint(dir=bench.memory / "local", every_n_train_steps=1, run_dir=bench.folder / "run")
    module = Captures(network(2000, 4), "AdamW fused")
    trainer = bench.device.trainer([local], bench.folder)
    trainer.fit(module, batches(24, 2000))
    bench.figure("recorded", 20)
    bench.figure("failed", len(module.failures))
    bench.expect(not module.failures, f"{len(module.failures)} of 20 recordings failed: {module.failures[:1]}")
