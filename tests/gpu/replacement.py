"""What ``launch`` does for a killed rank whose peer waits for it in the device: a replacement, or a warm restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_resilience import AutoResume, FaultTolerance
from lightning_resilience.launch.channel import CHANNEL_VARIABLE
from lightning_resilience.launch.park import SPARE
from tests.gpu.device import Device, nvml
from tests.gpu.runner import Bench, check
from tests.gpu.training import Module, Times, digest, events, network

STEPS, SAVE_EVERY, DIES_AT = 20, 5, 13
ROOT = Path(__file__).parents[2]


class Dies(L.Callback):
    """The last rank, once, as soon as it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        died = self.folder / "died"
        if trainer.global_rank == 1 and trainer.global_step == DIES_AT and not died.exists():
            while not (self.folder / "may die").exists():
                time.sleep(0.01)
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


class Waits(L.Callback):
    """Rank 0 waits, late in the epoch, until who has died is taken in again."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        if trainer.global_step == DIES_AT + 3:
            deadline = time.monotonic() + 120
            while sum(event["event"] == "replaced" for event in events(self.run_dir)) < 2:
                assert time.monotonic() < deadline, "nobody is taken in again"
                time.sleep(0.05)


def train(device: Device, folder: Path, dies: bool) -> None:
    """One rank of two."""
    L.seed_everything(1, verbose=False)
    callbacks: list[L.Callback] = [FaultTolerance(), AutoResume(every_n_train_steps=SAVE_EVERY)]
    if dies:
        callbacks += [Dies(folder), Times(folder / f"{os.getpid()}.time")]
    if os.environ.get("WAITS") and os.environ["RANK"] == "0":
        callbacks.append(Waits(folder))
    if device.is_gpu and device.count < 2:  # NCCL refuses two ranks on one GPU
        strategy = DDPStrategy(parallel_devices=[device.at()] * 2, process_group_backend="gloo")
        trainer = L.Trainer(
            accelerator="gpu",
            strategy=strategy,
            callbacks=callbacks,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
    else:
        trainer = device.trainer(callbacks, folder, ranks=2)
    samples = torch.randn(16 * STEPS, 64, generator=torch.Generator().manual_seed(1))
    module = Module(network(64, norm=True, dropout=0.1), "AdamW fused")
    trainer.fit(module, DataLoader(samples, 8, shuffle=True))  # type: ignore
    end = {"pid": os.getpid(), "step": trainer.global_step, "digest": digest(trainer)}
    (folder / f"{trainer.global_rank}.end").write_text(json.dumps(end))


class Launch:
    """A job of two ranks, of which one dies as soon as it may, or none."""

    def __init__(self, bench: Bench, name: str, dies: bool, *options: str, waits: bool = False) -> None:
        self.folder = bench.folder / name
        self.folder.mkdir()
        command = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--recipe", "none", *options]
        command += ["--nproc-per-node", "2", "--run-dir", str(self.folder / "run"), "-m", "tests.gpu.replacement"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)), "OMP_NUM_THREADS": "1"}
        environment.update({"WAITS": "1"} if waits else {})
        with open(bench.folder / f"output-{name}", "w") as output:
            self.process = subprocess.Popen(
                [*command, bench.device.name, str(self.folder), str(int(dies))],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def spares(self) -> list[int]:
        """The spare processes, as soon as each rank has one."""
        text = ""
        while text.count("is ready") < 2:
            assert self.process.poll() is None, "it has ended before there were spare processes"
            text = "".join(log.read_text() for log in (self.folder / "run" / "logs").glob("launcher-*"))
            why = "".join(line for line in text.splitlines() if "no more spares" in line)
            if why:
                self.process.terminate()
                raise AssertionError(why)
            time.sleep(0.05)
        children = psutil.Process(self.process.pid).children(recursive=True)
        kinds = {child.pid: child.environ().get(CHANNEL_VARIABLE, "").rpartition(",")[2] for child in children}
        return [pid for pid, kind in kinds.items() if kind == SPARE]

    def let_one_die(self) -> None:
        (self.folder / "may die").touch()

    def ends(self) -> list[dict[str, Any]]:
        """How the ranks have ended."""
        code = self.process.wait()
        assert code == 0, f"{self.folder.name} ended with {code}"
        return [json.loads((self.folder / f"{rank}.end").read_text()) for rank in range(2)]

    def seconds(self, pid: int) -> float:
        """From the death to the first step of the process that has taken the place."""
        began: float = json.loads((self.folder / f"{pid}.time").read_text())["began_s"]
        return began - float((self.folder / "died").read_text())


def same_end(bench: Bench, found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    same = [each["digest"] for each in found] == [each["digest"] for each in reference]
    bench.figure("bitwise equal", same)
    bench.expect(same, "it ended elsewhere")


def changes(job: Launch, of: str) -> tuple[list[Any], set[int]]:
    """This of each change of the ranks, and the processes that have begun the run: of one that was kept, its own."""
    recorded = events(job.folder / "run")
    found = [event[of] for event in recorded if event["event"] == "replaced"]
    return found, {event["pid"] for event in recorded if event["event"] == "start"}


@check("a killed rank is replaced while its peer, which waits for it in the device, keeps its process", limit_s=300)
def replaced_rank(bench: Bench) -> None:
    reference = Launch(bench, "reference", False, "--elastic").ends()
    job = Launch(bench, "killed", True, "--elastic")
    spares = job.spares()
    job.let_one_die()
    found = job.ends()
    replaced, starts = changes(job, "ranks")
    bench.figure("replaced", replaced)
    bench.expect(replaced == [[1]] and starts == {found[0]["pid"]}, f"all ranks were restarted: {replaced}, {starts}")
    bench.expect(found[1]["pid"] in spares, "no spare process took the place")
    bench.figure("s to the first step of the new one", job.seconds(found[1]["pid"]))
    same_end(bench, found, reference)


@check("a rank goes on without one that is killed, and takes it in again when it is back", limit_s=300)
def gone_on(bench: Bench) -> None:
    reference = Launch(bench, "reference", False, "--elastic").ends()
    options = "--elastic", "--when-lost", "go-on", "--min-ranks", "1", "--spares", "off"
    job = Launch(bench, "killed", True, *options, waits=True)
    job.let_one_die()
    found = job.ends()
    members, starts = changes(job, "members")
    bench.figure("members", members)
    bench.expect(members == [[0], [0, 1]] and starts == {found[0]["pid"]}, f"others went on: {members}, {starts}")
    died = float((job.folder / "died").read_text())
    bench.figure("s to the decision to go on", changes(job, "time")[0][0] - died)
    bench.figure("step at the end", [each["step"] for each in found])
    bench.expect({each["step"] for each in found} == {reference[0]["step"]}, "not all steps were made")
    same_end(bench, found, reference)


@check("spare processes wait without a context on the device, and go on from the last save after a kill", limit_s=300)
def warm_spare(bench: Bench) -> None:
    reference = Launch(bench, "reference", False).ends()
    job = Launch(bench, "killed", True)
    spares = job.spares()
    with nvml() as library:
        if library is not None and bench.device.is_gpu:
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            users = [each.pid for handle in handles for each in library.nvmlDeviceGetComputeRunningProcesses(handle)]
            bench.figure("processes with a context, spare ones among them", [len(users), len({*users} & {*spares})])
            bench.expect(not {*users} & {*spares}, "a spare process has a context on a device")
    job.let_one_die()
    found = job.ends()
    bench.expect({each["pid"] for each in found} == {*spares}, "other processes than the spare ones have gone on")
    bench.figure("s to their first step", max(job.seconds(each["pid"]) for each in found))
    same_end(bench, found, reference)


if __name__ == "__main__":
    train(Device(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
