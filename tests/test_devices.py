"""What a copy of a state from an accelerator must and must not do; each test in a process that has one."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_resilience.checkpoint import background, devices, snapshot
from lightning_resilience.checkpoint.generations import RankLocation
from lightning_resilience.checkpoint.local import LocalSaves, Peers
from lightning_resilience.checkpoint.node_store import NodeStore
from lightning_resilience.checkpoint.safe_serialization import unpack
from lightning_resilience.checkpoint.schedule import Schedule
from lightning_resilience.checkpoint.shard import load
from lightning_resilience.checkpoint.snapshot import Snapshot, Snapshots
from lightning_resilience.fit import context
from tests import as_on_gpu
from tests.harness import CONTEXT
from tests.snapshot_worker import Witness, same
from tests.test_snapshot import Ema, Module, fit

pytestmark = pytest.mark.skipif(as_on_gpu.missing() is not None, reason=str(as_on_gpu.missing()))

_CASES: dict[str, Callable[..., None]] = {}


def with_an_accelerator(case: Callable[..., None]) -> Callable[..., None]:
    """Runs the test in a process of its own: a process that has an accelerator has it for ever."""
    _CASES[case.__name__] = case

    @functools.wraps(case)
    def test(tmp_path: Path) -> None:
        as_on_gpu.build()
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_run, args=(case.__name__, str(tmp_path), sender))
        process.start()
        sender.close()
        try:
            problem = receiver.recv() if receiver.poll(60) else "the test does not end"
        except EOFError:
            problem = "the process of the test has died"
        process.kill()
        process.join()
        if problem is not None:
            pytest.fail(problem)

    del test.__wrapped__  # type: ignore[attr-defined]  # its arguments are not fixtures
    return test


def _run(name: str, folder: str, sender: Any) -> None:
    os.environ["FAKEGPU_COUNT"] = "2"
    os.chdir(folder)
    logging.disable()
    try:
        gpu = as_on_gpu.load()
        gpu.lag(1000)  # nothing is done before somebody waits for it
        with pytest.MonkeyPatch.context() as patch:
            _CASES[name](gpu, patch)
        sender.send(None)
    except BaseException:
        sender.send(traceback.format_exc())
    os._exit(0)


class Net:
    """Parameters on the second device, and something that changes before the fence."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.arange(2500.0).view(50, 50).to("fakegpu:1"))
        self.buffer = torch.ones(40).to("fakegpu:1")
        self.step = torch.zeros(())

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "buffer": self.buffer, "step": self.step}


def copied(taken: Snapshot, meanwhile: Callable[[], Any] = lambda: None) -> list[torch.Tensor]:
    """What another thread has copied, as one of a save does."""
    copies = [torch.full(tensor.shape, -1.0).to(tensor.dtype).pin_memory() for tensor in taken.tensors]
    problems: list[BaseException] = []

    def work() -> None:
        try:
            taken.copy(enumerate(copies))
        except BaseException as error:
            problems.append(error)
        finally:
            taken.release()

    meanwhile()
    thread = threading.Thread(target=work)
    thread.start()
    taken.fence()
    thread.join()
    if problems:
        raise problems[0]
    return copies


def of_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


@with_an_accelerator
def test_a_snapshot_is_the_state_of_its_boundary(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    net, snapshots = Net(), Snapshots()
    for at_all in (True, True, False):  # what the parameters hold is looked at, all of it and in a sample
        if not at_all:
            snapshots._look_at_all = float("inf")
        expected = of_host(net.state().values())
        taken = snapshots.take(net.state(), [net.weight])
        copies = copied(taken, lambda: net.buffer.add_(1))
        assert taken.is_good(30)
        assert same(copies, expected)
        with torch.no_grad():
            net.weight.mul_(1.5)
    gpu.check_races(False)  # this is one, and has to be noticed
    taken = snapshots.take(net.state(), [net.weight])
    copied(taken, lambda: net.weight.data.mul_(2))
    assert not taken.is_good(30)


@with_an_accelerator
def test_the_thread_that_copies_makes_no_context_on_another_device(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    # CUDA makes a context on the device on which a thread is when it calls anything; torch also puts back its stream.
    began_on = []
    patch.setattr(
        gpu, "stream", lambda stream, real=gpu.stream: (began_on.append(gpu.current_device()), real(stream))[1]
    )
    gpu.set_device(1)
    net = Net()
    taken = Snapshots().take(net.state(), [net.weight])
    copied(taken)
    assert taken.is_good(30)
    assert taken.waited_s >= 0
    assert began_on == [1]
    assert gpu.contexts() == [1]


@with_an_accelerator
def test_a_thread_goes_to_its_device_once_and_not_for_each_tensor(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    switches = []
    patch.setattr(gpu, "stream", lambda stream, real=gpu.stream: (switches.append(stream), real(stream))[1])
    tensors = [torch.ones(3).to("fakegpu:1") for _ in range(20)]
    copied(Snapshots().take(tensors, tensors))
    assert len(switches) == 1


@with_an_accelerator
def test_all_snapshots_of_a_device_are_copied_on_one_stream(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    made = []
    patch.setattr(gpu, "Stream", lambda *args, real=gpu.Stream: (made.append(args), real(*args))[1])
    tensors = [torch.ones(3).to("fakegpu:1"), torch.ones(3).to("fakegpu:0")]
    snapshots = Snapshots()
    for _ in range(3):
        assert same(copied(snapshots.take(tensors, tensors)), of_host(tensors))
    copied(Snapshots().take(tensors, tensors))
    assert len(made) == 2


@with_an_accelerator
def test_the_host_waits_for_a_device_once_and_the_training_never(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    # Such a mode is that of the whole process, so that it forbids other threads to wait as well.
    net, snapshots = Net(), Snapshots()
    gpu.set_sync_debug_mode("error")
    for _ in range(3):
        before = gpu.waits_of_the_host()
        taken = snapshots.take(net.state(), [net.weight])
        copied(taken, lambda before=before: before == gpu.waits_of_the_host() or pytest.fail("it has waited"))
        assert taken.is_good(30)


@with_an_accelerator
def test_what_a_device_still_writes_into_host_memory_is_waited_for(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    net = Net()
    moment, metric = (torch.zeros(50, 50).pin_memory() for _ in range(2))
    for each in (moment, metric):
        each.copy_(net.weight.detach(), non_blocking=True)
    state = {**net.state(), "moment": moment, "metric": metric}
    copies = copied(Snapshots().take(state, [net.weight, moment]))
    assert same(copies[3:], of_host([net.weight] * 2))


@with_an_accelerator
def test_a_copy_that_fails_leaves_nothing_under_way(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(3).to("fakegpu:1") for _ in range(3)]
    taken = Snapshots().take(tensors, tensors)
    copies = [torch.zeros(size).pin_memory() for size in (3, 3, 7)]
    with pytest.raises(RuntimeError):
        taken.copy(enumerate(copies))
    assert same(copies[:2], of_host(tensors[:2]))


@with_an_accelerator
def test_the_memory_that_is_taken_of_a_device_is_bounded(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot, "ON_DEVICE_BYTES", 3000)
    state = {"small": torch.arange(500.0), "large": torch.arange(2000.0), "also small": torch.arange(200.0)}
    state = {name: tensor.to("fakegpu:1") for name, tensor in state.items()}
    state["odd"] = torch.arange(4000.0).to("fakegpu:1")[::2]
    snapshots, before = Snapshots(), gpu.memory_allocated(1)
    for _ in range(3):
        expected = of_host(state.values())
        taken = snapshots.take(state, [])
        assert gpu.memory_allocated(1) <= before + 3000 + 1024
        assert taken.through_host == {1: 8000, 3: 8000}, "named, so that it can be said"
        copies = copied(taken, lambda: [tensor.mul_(2) for tensor in state.values()])
        assert taken.is_good(30)
        assert same(copies, expected)


@with_an_accelerator
def test_a_device_without_memory_for_a_copy(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    def clone(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    buffer, snapshots = torch.zeros(4).to("fakegpu:1"), Snapshots()
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(torch.Tensor, "clone", clone)
        taken = snapshots.take([buffer], [])
    assert same(copied(taken, lambda: buffer.add_(1)), [torch.zeros(4)])


@with_an_accelerator
def test_what_the_host_is_ahead_of_its_device_is_no_standstill(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    gpu.set_device(1)
    net = Net()
    gpu.occupy(0.5)  # the step before
    taken = Snapshots().take(net.state(), [net.weight])
    gpu.occupy(1.5)  # forward and backward pass
    started = time.monotonic()
    copied(taken)
    assert time.monotonic() - started > 0.3, "it is the copy that the fence has waited for"
    assert taken.waited_s < 0.3


@with_an_accelerator
def test_a_device_that_has_nothing_to_do_stands_still(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    net = Net()
    taken = Snapshots().take(net.state(), [net.weight])
    copies = taken.copy
    patch.setattr(taken, "copy", lambda destinations: (time.sleep(0.4), copies(destinations)))
    copied(taken)
    assert taken.waited_s > 0.3


@with_an_accelerator
def test_the_thread_says_that_it_has_no_part_in_graphs(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    modes: dict[int, int] = {}  # of each thread, as CUDA keeps them

    def exchange(mode: Any) -> int:
        me, wanted = threading.get_ident(), mode._obj.value
        mode._obj.value, modes[me] = modes.get(me, 0), wanted
        return 0

    patch.setattr(devices, "_capture_mode_function", lambda: exchange)
    net, seen = Net(), []
    copy_ = torch.Tensor.copy_

    def look(*args: Any, **kwargs: Any) -> Any:
        if args[1].device.type != "cpu":
            seen.append(modes.get(threading.get_ident()))
        return copy_(*args, **kwargs)

    taken = Snapshots().take(net.state(), [net.weight])
    patch.setattr(torch.Tensor, "copy_", look)
    copied(taken)
    assert set(seen) == {2}
    assert set(modes.values()) == {0}, "it is as it was"


class Clamping(L.Callback):
    """Changes parameters before the fence."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.5, 0.5)


FITS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], set[int]]] = {
    "plain": (list, {}, set()),
    "in bf16": (list, {"precision": "bf16-mixed"}, set()),
    "accumulating": (list, {"accumulate_grad_batches": 2}, set()),
    "averages": (lambda: [L.callbacks.EMAWeightAveraging(decay=0.5)], {}, set()),
    "averages of the user": (lambda: [Ema(hidden=True)], {}, set()),
    "clamped": (lambda: [Clamping()], {}, {1}),  # what changes is known after the first
}


@with_an_accelerator
def test_fits_save_what_was_at_their_boundaries(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    gpu.lag(50)
    accelerator, device = as_on_gpu.accelerator(), torch.device("fakegpu", 0)
    for budget in (snapshot.ON_DEVICE_BYTES, 100):
        for name, (callbacks, options, spoilt) in FITS.items():
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(snapshot, "ON_DEVICE_BYTES", budget)
                inner.setattr(context, "fits_begun", {})
                witness, module = Witness(inner), Module(optimizer=functools.partial(torch.optim.Adam, fused=True))
                module.teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
                module.teacher.requires_grad_(False)
                strategy = L.strategies.SingleDeviceStrategy(device)
                folder = Path(f"{name} {budget}").absolute()
                fit(witness, folder, module, callbacks(), accelerator=accelerator, strategy=strategy, **options)
                witness.expected = tree_map_only(torch.Tensor, torch.Tensor.cpu, witness.expected)
                assert not witness.wrong(), (name, budget)
                assert set(witness.expected) - set(witness.published) == spoilt, (name, budget)
                assert len(witness.published) >= 2


class Runtime:
    """Of CUDA, what has to do with host memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.asked = 0
        self.threads: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked += 1
        self.threads.add(threading.get_ident())
        if self.error:
            return self.error
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@with_an_accelerator
def test_memory_of_saves_is_registered_while_it_is_there(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    patch.setattr(gpu, "cudart", lambda: runtime, raising=False)
    net, store = Net(), NodeStore(Path("/dev/shm") / f"test-{os.getpid()}")
    owner = {"run": "r", "fit": 0, "layout": {"kind": "whole", "commons": 0}}
    place = RankLocation(0, 1, 0, 1, "node")
    saves = LocalSaves(
        store, Peers(place, [0]), owner, Schedule(1, lambda before_s: 0.0), 2, device=torch.device("fakegpu:1")
    )
    saves.start(0)
    try:
        assert saves.wait_for_save(30), "it has made the store ready"
        for step in range(1, 8):
            planned = saves.at_boundary(step, lambda: True)
            assert planned is not None
            saves.take(planned, step, net.state(), [net.weight], [])
            saves.fence()
            assert saves.wait_for_save(30)
            newest = max(store.shard_files(), key=lambda held: held.step)
            assert same(load(newest.path)[1], of_host(net.state().values()))
            with torch.no_grad():
                net.weight.add_(1)
        assert saves.stats.published == 7
        assert runtime.asked == len(runtime.registered) == 3, "files are used again, and stay registered"
    finally:
        saves.stop(5)
        store.clear()
    assert not runtime.registered
    assert gpu.contexts() == [1]


@with_an_accelerator
def test_a_save_async_the_training_has_memory_registered_too(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    patch.setattr(gpu, "cudart", lambda: runtime, raising=False)
    patch.setattr(background, "_REGISTERED_BYTES", 1000)
    net, saves, path = Net(), background.BackgroundSaves(), Path("saved").absolute()
    for _ in range(3):
        expected = {name: tensor.detach().cpu() for name, tensor in net.state().items()}
        saves.take(net.state(), [net.weight], lambda copy: torch.save(unpack(copy.structure, copy.tensors), path))
        assert saves.wait(30)
        saves.check()
        assert same(torch.load(path, weights_only=True), expected)
        assert path.stat().st_size < 3 * net.weight.nbytes, "each has a storage of its own, which is what is saved"
        assert list(runtime.registered.values()) == [net.weight.nbytes]
        with torch.no_grad():
            net.weight.add_(1)
    assert runtime.asked == 1
    saves.close(30)
    del saves
    assert not runtime.registered


@with_an_accelerator
def test_memory_that_cannot_be_registered_does_for_a_save(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    logging.disable(logging.NOTSET)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    devices.log.addHandler(handler)
    runtime = Runtime(error=2)
    patch.setattr(gpu, "cudart", lambda: runtime, raising=False)
    for folder in (Path("/dev/shm") / f"test-{os.getpid()}", Path("disk").absolute()):
        store = NodeStore(folder)
        for _ in range(2):
            store.reserve("part", 1000, torch.device("fakegpu:1")).abandon()
        store.clear()
    assert runtime.asked == 1
    assert len(said) == 1
    assert threading.get_ident() not in runtime.threads, "CUDA would report the error to this thread once more"


@with_an_accelerator
def test_a_file_that_was_cut_is_mapped_and_registered_anew(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    runtime, device, size = Runtime(), torch.device("fakegpu:1"), 1 << 20
    patch.setattr(gpu, "cudart", lambda: runtime, raising=False)
    store = NodeStore(Path("/dev/shm") / f"test-{os.getpid()}")

    def save(step: int, nbytes: int) -> SimpleNamespace:
        writer = store.reserve("part", size, device)
        address = writer.memory.data_ptr()
        writer.publish(step, f"{step:08x}", nbytes, b"end")
        store.retire([], lambda part: True)
        return SimpleNamespace(address=address, asked=runtime.asked)

    try:
        whole = [save(step, size) for step in (1, 2)]
        assert [each.asked for each in whole] == [1, 1]
        save(3, 1000)  # what lies behind is cut off; the device would go on writing there
        writer = store.reserve("part", size, device)
        assert runtime.asked == 2
        assert runtime.registered == {writer.memory.data_ptr(): size}
        del writer
    finally:
        store.clear()


@with_an_accelerator
def test_memory_stays_registered_as_long_as_a_writer_is_there(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    runtime, device = Runtime(), torch.device("fakegpu:1")
    patch.setattr(gpu, "cudart", lambda: runtime, raising=False)
    for folder in (Path("/dev/shm") / f"test-{os.getpid()}", Path("disk").absolute()):
        store = NodeStore(folder)
        writer = store.reserve("part", 5000, device)
        memory = writer.memory
        store.clear()
        assert runtime.registered == {memory.data_ptr(): 5000}  # a device that is stuck may come back and write
        pid = os.fork()
        if not pid:
            before = dict(runtime.registered)
            del writer
            os._exit(0 if runtime.registered == before else 1)
        assert os.waitpid(pid, 0)[1] == 0, "a forked process has nothing of the device"
        del writer
        assert not runtime.registered


@with_an_accelerator
def test_a_device_that_is_of_no_use_any_more_is_found(gpu: Any, patch: pytest.MonkeyPatch) -> None:
    device = torch.device("fakegpu", 1)
    assert devices.why_unusable(torch.device("cpu"), 60.0) is None
    assert devices.why_unusable(device, 60.0) is None
    gpu.break_down()
    assert "illegal memory access was encountered)" in str(devices.why_unusable(device, 60.0))
    released = threading.Event()
    patch.setattr(gpu, "synchronize", lambda device: released.wait(60))
    assert "does not respond" in str(devices.why_unusable(device, 0.01))
    released.set()
