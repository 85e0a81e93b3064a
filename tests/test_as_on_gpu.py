"""The simulated accelerator: what makes it one to a program, each in a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_group

from tests import as_on_gpu
from tests.harness import CONTEXT, free_port

pytestmark = pytest.mark.skipif(as_on_gpu.missing() is not None, reason=str(as_on_gpu.missing()))


def _main(part: Callable[..., None], arguments: tuple[Any, ...], errors: str) -> None:
    try:
        part(*arguments)
    except BaseException as error:
        Path(errors).write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def begin(part: Callable[..., None], tmp: Path, *arguments: Any) -> Any:
    as_on_gpu.build()
    errors = tmp / f"{part.__name__}-{'-'.join(map(str, arguments))}"
    process = CONTEXT.Process(target=_main, args=(part, arguments, str(errors)))
    process.start()
    process.errors = errors
    return process


def succeeds(process: Any, timeout_s: float = 60.0) -> None:
    process.join(timeout_s)
    alive = process.is_alive()
    if alive:
        process.kill()
    assert not alive, "still running"
    assert process.exitcode == 0, process.errors.read_text() if process.errors.exists() else process.exitcode


def apart() -> None:
    gpu = as_on_gpu.load()
    device = torch.device("fakegpu", 0)
    there, here = torch.ones(3, device=device), torch.ones(3)
    for together in (lambda: there + here, lambda: torch.stack([there, here]), lambda: there.add_(here)):
        with pytest.raises(RuntimeError, match="same device"):
            together()
    assert pickle.loads(pickle.dumps(there)).device == device  # wherever it is unpickled
    assert torch.equal((there + 1).cpu(), here + 1)
    before = gpu.waits_of_the_host()
    fine = torch.isfinite(there).all() & (there > 0).all()
    assert gpu.waits_of_the_host() == before
    assert bool(fine)
    assert gpu.waits_of_the_host() == before + 1
    gpu.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        there.sum().item()


def late() -> None:
    gpu = as_on_gpu.load()
    gpu.lag(3, ticks=True)
    source = torch.full((1,), 5.0, device="fakegpu")
    target = torch.zeros(1, pin_memory=True)
    target.copy_(source, non_blocking=True)
    arrival = gpu.current_stream().record_event()
    source.fill_(7.0)  # later in the same stream
    for _ in range(3):
        assert not arrival.query()
        assert target.item() == 0.0
        gpu.tick()
    assert arrival.query()
    assert target.item() == 5.0


def busy() -> None:
    gpu = as_on_gpu.load()
    first, second = (torch.Event("fakegpu", enable_timing=True) for _ in range(2))
    first.record()
    gpu.occupy(0.05)
    second.record()
    assert not second.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 50


def random_numbers() -> None:
    gpu = as_on_gpu.load()
    torch.manual_seed(3)
    host = torch.get_rng_state()
    state = gpu.get_rng_state()
    drawn = torch.rand(5, device="fakegpu")
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(gpu.get_rng_state(), state)
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="fakegpu").cpu(), drawn.cpu())


def trains_as_the_cpu_does() -> None:
    as_on_gpu.load()

    def train(device: str, fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, 1)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(8, 1, 8, 8).to(device)).pow(2).mean().backward()
            optimizer.step()
        return [each.detach().cpu() for each in [*net.parameters(), *net.buffers()]]

    for fused in (False, True):
        for mine, its in zip(train("cpu", fused), train("fakegpu", fused), strict=True):
            assert torch.equal(mine, its)


def of_two(rank: int, port: int, dies: bool) -> None:
    as_on_gpu.load()
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    torch.distributed.init_process_group(as_on_gpu.collectives(), store=store, rank=rank, world_size=2)
    number = torch.full((4,), float(rank + 1), device="fakegpu")
    torch.distributed.all_reduce(number)
    assert number.tolist() == [3.0] * 4
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.AVG)
    assert number.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="No backend type associated with device type"):
        torch.distributed.all_reduce(torch.ones(1))
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        work = torch.distributed.all_reduce(number, async_op=True)
        waits = threading.Thread(target=work.wait)
        waits.start()
        waits.join(1)
        assert waits.is_alive()  # nobody has told it
        _get_default_group().abort()
        waits.join()
        assert number.isnan().all()  # and nobody tells it now
        with pytest.raises(RuntimeError, match="NCCL communicator was aborted"):
            torch.distributed.all_reduce(number)
        torch.distributed.destroy_process_group()


def races(which: str) -> None:
    gpu = as_on_gpu.load()
    source, target = torch.ones(4, device="fakegpu"), torch.zeros(4, pin_memory=True)
    side = gpu.Stream()

    def copy() -> None:
        with gpu.stream(side):
            target.copy_(source, non_blocking=True)

    if which == "late":
        side.wait_stream(gpu.current_stream())
        copy()
    with pytest.raises(RuntimeError, match="nothing says which of them comes first"):
        source.fill_(2.0) if which == "late" else copy()
    side.synchronize()
    source.fill_(3.0)
    assert target.tolist() == ([1.0] * 4 if which == "late" else [0.0] * 4)


def forks() -> None:
    """As a worker of a data loader does while another thread copies a snapshot."""
    gpu = as_on_gpu.load()
    ended = threading.Event()

    def works() -> None:
        one = torch.zeros(1, device="fakegpu")
        while not ended.is_set():
            one.add_(1)

    threads = [threading.Thread(target=works) for _ in range(2)]
    for thread in threads:
        thread.start()
    kept = torch.ones(2, device="fakegpu")
    for _ in range(30):
        child = os.fork()
        if child == 0:
            del kept
            torch.manual_seed(1)
            gpu.manual_seed_all(1)
            os._exit(0)
        waited = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > waited:
                os.kill(child, signal.SIGKILL)
                os._exit(3)
            time.sleep(0.001)
    ended.set()


@pytest.mark.parametrize(
    "part", [apart, late, busy, random_numbers, trains_as_the_cpu_does, forks], ids=lambda part: part.__name__
)
def test_as_an_accelerator(part: Callable[[], None], tmp_path: Path) -> None:
    succeeds(begin(part, tmp_path))


@pytest.mark.parametrize("which", ["early", "late"])
def test_copies_that_nothing_orders_are_an_error(which: str, tmp_path: Path) -> None:
    succeeds(begin(races, tmp_path, which))


@pytest.mark.parametrize("dies", [False, True])
def test_collectives_as_those_of_nccl(dies: bool, tmp_path: Path) -> None:
    port = free_port()
    first, second = (begin(of_two, tmp_path, rank, port, dies) for rank in (0, 1))
    if not dies:
        succeeds(first)
        succeeds(second)
        return
    second.join(60)
    assert second.exitcode == -signal.SIGKILL
    succeeds(first)
