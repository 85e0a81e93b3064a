"""A hang of the device, or of a collective, is found and named, and the run goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import AutoResume, FaultTolerance
from lightning_resilience.detect.hangs.process_probe import ask
from lightning_resilience.run import exit_codes
from tests.gpu.device import Device, nvml
from tests.gpu.runner import Bench, check, text, wait
from tests.gpu.training import Module, Times, batches, network

STEPS, HANGS_AT = 20, 12


class Hangs(L.Callback):
    """One step that the device never gets done with, and the host waits for it."""

    def __init__(self, device: Device, path: Path) -> None:
        self.device, self.path = device, path

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HANGS_AT and not self.path.exists():
            self.path.write_text(str(time.time()))
            self.device.busy(600)
            number = torch.ones((), device=trainer.strategy.root_device)
            number.item()


class Sleeps(L.Callback):
    """One rank does something else for ever, and the others wait for it in a collective."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == HANGS_AT and not self.path.exists():
            self.path.write_text(str(time.time()))
            time.sleep(600)


def train(rank: int, device: Device, ranks: int, folder: Path, limit_s: float, attempt: int) -> None:
    run_dir = folder / "run"
    L.seed_everything(1, verbose=False)
    hang = folder / "hang"
    callbacks = [
        FaultTolerance(run_dir=run_dir, section_timeouts={"setup": 60.0, "step": limit_s, "out_of_section": 60.0}),
        AutoResume(run_dir, every_n_train_steps=5),
        Times(folder / f"{attempt}-{rank}.began"),
        Hangs(device, hang) if ranks == 1 else Sleeps(hang),
    ]
    trainer = device.trainer(callbacks, folder, ranks=None if ranks == 1 else ranks, use_distributed_sampler=False)
    trainer.fit(Module(network(64), "AdamW fused"), batches(STEPS, 64))
    if rank == 0:
        (folder / "end").write_text(str(trainer.global_step))


def memory_used() -> int | None:
    """Bytes on the first GPU, by whomever."""
    with nvml() as library:
        if library is None:
            return None
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        by_number = first.isdigit()
        find = library.nvmlDeviceGetHandleByIndex if by_number else library.nvmlDeviceGetHandleByUUID
        return int(library.nvmlDeviceGetMemoryInfo(find(int(first) if by_number else first)).used)


def hang(bench: Bench, ranks: int) -> str:
    """Has a run hang, be ended and be started again; returns what was said of it."""
    folder, limit_s = bench.folder, 2.0 if bench.quick else 10.0
    before = memory_used() if bench.device.is_gpu else None
    processes = bench.ranks(ranks, train, bench.device, ranks, folder, limit_s, 0)
    codes = wait(processes, 100)
    ended = time.time()
    assert (folder / "hang").exists(), f"it ended before it hung: {codes}: {text(processes).strip().splitlines()[-1:]}"
    bench.figure(f"s to its end, limit {limit_s:g} s", ended - float((folder / "hang").read_text()))
    bench.figure("exit codes", codes)
    bench.expect(exit_codes.HUNG in codes, f"it ended with {codes}, not with {exit_codes.HUNG}")
    said = [each for each in text(processes).splitlines() if "stuck" in each or "wait" in each]
    verdict = re.sub(r" \(\w+, pid \d+\)|\. Diagnosis: .*|^\[.*?\] ", "", said[0]) if said else "none"
    bench.figure("verdict", verdict)
    if before is not None:
        while time.time() < ended + 20 and (memory_used() or 0) > before + 2**28:
            time.sleep(0.1)
        bench.figure("s until the memory is free", time.time() - ended)
        bench.expect((memory_used() or 0) <= before + 2**28, "the memory is not free after 20 s")
    processes = bench.ranks(ranks, train, bench.device, ranks, folder, limit_s, 1)
    codes = wait(processes, 100)
    done = (folder / "end").exists() and (folder / "end").read_text() == str(STEPS)
    last = "".join(text(processes).strip().splitlines()[-1:])
    bench.expect(codes == [0] * ranks and done, f"started again, it ended with {codes}: {last}")
    if (path := folder / "1-0.began").exists():
        bench.figure("resumed at step", json.loads(path.read_text())["step"])
    return verdict


@check("a kernel that never ends: the rank is ended with 44, its memory is free, the next start goes on", limit_s=240)
def hung_kernel(bench: Bench) -> None:
    os.environ["AS_ON_GPU_SPINS"] = "1"
    said = hang(bench, 1)
    bench.expect("on_train_batch_start" in said or "hangs.py" in said, f"the place is not named: {said[-200:]}")


@check("a rank that never comes to a collective is named, not those that wait for it", limit_s=240)
def hung_rank(bench: Bench) -> None:
    if bench.device.is_gpu and bench.device.count < 2:
        bench.skip("needs 2 GPUs: NCCL refuses two ranks on one")
    said = hang(bench, 2)
    bench.expect("rank 1 is stuck" in said, f"rank 1 is not named as the one that is stuck: {said[-200:]}")


def record(rank: int, folder: Path) -> None:
    from lightning_resilience.detect.hangs.rank_probe import _start_worker_server

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    for _ in range(5):
        torch.distributed.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()
    server = _start_worker_server(folder / "server.socket")
    found = {}
    for handler in (
        "fr_trace_json?includestacktraces=false",
        "dump_nccl_trace_json?includecollectives=true&onlyactive=false",
    ):
        began = time.monotonic()
        answer = ask(folder / "server", handler, 10.0)
        found[handler.split("?")[0]] = {
            "seconds": time.monotonic() - began,
            "text": None if answer is None else answer.decode(),
        }
    (folder / "found").write_text(json.dumps(found))
    del server
    torch.distributed.destroy_process_group()


@check("NCCL's Flight Recorder answers with its collectives, and we can read them", limit_s=120, needs_gpu="NCCL")
def flight_recorder(bench: Bench) -> None:
    from lightning_resilience.detect.hangs import flight_recorder as ours

    processes = [bench.start(record, 0, bench.folder)]
    codes = wait(processes, 90)
    assert codes == [0], f"ended with {codes}: {text(processes)[-300:]}"
    found: dict[str, Any] = json.loads((bench.folder / "found").read_text())
    for name, each in found.items():
        dump = json.loads(each["text"]) if each["text"] else {}
        entries = dump.get("entries") or []
        bench.figure(f"{name}: entries", len(entries) if each["text"] else "no answer")
        bench.figure(f"{name}: s", each["seconds"])
        if name == "dump_nccl_trace_json":
            bench.expect(len(entries) >= 5, "NCCL's recorder has fewer entries than there were collectives")
            bench.figure("fields of an entry", sorted(entries[0]) if entries else [])
            bench.figure("version", dump.get("version"))
            read = ours.collectives(dump)
            bench.figure("read by us", f"{len(read)} of {len(entries)}, such as {read[-1] if read else None}")
            bench.expect(len(read) >= 5, "we cannot read the entries")
