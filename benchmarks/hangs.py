"""How long a hang stays unnoticed, and who is blamed: this package against NVRx's own callback, in the same table.

Every hang is made once under ``FaultTolerance`` and once under NVRx's ``FaultToleranceSectionsCallback``, on the same
two DDP ranks under the same ``ft_launcher`` with the same limits: 5 s for a step, 20 s out of section. Neither is told
what happens.

    python benchmarks/hangs.py [--only NAME] [--out-of-section 20]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANK_WITH_FAULT = 1
AT_STEP = 20
STEP_LIMIT_S = 5.0

HANGS = {
    "stopped": "SIGSTOP in training_step",
    "training_step": "sleeps in training_step",
    "callback": "sleeps in a callback's on_train_batch_end",
    "data": "sleeps in the data loader",
    "validation": "sleeps in validation_step",
    "collective": "skips an all-reduce of the module's own",
    "gil": "a C call holds the interpreter lock",
}


def worker(hang: str, suite: str, folder: Path) -> None:
    """One rank: trains, and hangs once."""
    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader, Dataset

    rank = int(os.environ["RANK"])

    def reached(place: str, step: int) -> bool:
        if place != hang or step != AT_STEP or rank != RANK_WITH_FAULT:
            return False
        (folder / "began").write_text(str(time.time()))
        return True

    class Data(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4000

        fetched = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.fetched += 1
            if self.fetched == AT_STEP * 4 and reached("data", AT_STEP):
                time.sleep(600)
            return torch.randn(8)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def on_train_start(self) -> None:
            self.group = torch.distributed.new_group()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if reached("stopped", batch_idx):
                os.kill(os.getpid(), signal.SIGSTOP)
            if reached("training_step", batch_idx):
                time.sleep(600)
            if reached("gil", batch_idx):
                libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                libc.pthread_mutex_lock(mutex)
                libc.pthread_mutex_lock(mutex)
            if not reached("collective", batch_idx):
                torch.distributed.all_reduce(torch.ones(3), group=self.group)
            time.sleep(0.02)
            return self.net(batch).pow(2).mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            if not self.trainer.sanity_checking and reached("validation", AT_STEP):
                time.sleep(600)
            self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    class User(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
            if reached("callback", trainer.global_step):
                time.sleep(600)

    if suite == "ours":
        from lightning_resilience import FaultTolerance

        callbacks: list[L.Callback] = [FaultTolerance(run_dir=folder / "run", calculate_timeouts=False)]
    else:
        from nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_sections_callback import (
            FaultToleranceSectionsCallback,
        )

        callbacks = [FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=False, exp_dir=folder)]
    trainer = L.Trainer(
        max_steps=200,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[*callbacks, User()],
        val_check_interval=AT_STEP + 5,
        limit_val_batches=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(Data(), 4), DataLoader(Data(), 4))


def measure(hang: str, suite: str, out_of_section_s: float) -> tuple[float | None, str]:
    """Seconds from the hang to the end of the rank that hangs, and what was said about it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _measure(hang, suite, out_of_section_s, Path(folder))


def _measure(hang: str, suite: str, out_of_section_s: float, folder: Path) -> tuple[float | None, str]:
    limits = f"setup:60,step:{STEP_LIMIT_S:g},checkpointing:60"
    command = [sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"]
    config = folder / "ft.yaml"
    timeouts: dict[str, Any] = {"initial_rank_heartbeat_timeout": None, "rank_heartbeat_timeout": None}
    if suite == "nvrx":
        sections = dict(part.split(":") for part in limits.split(","))
        timeouts["rank_section_timeouts"] = {name: float(seconds) for name, seconds in sections.items()}
        timeouts["rank_out_of_section_timeout"] = out_of_section_s
        timeouts["workload_check_interval"] = 0.5
    config.write_text(json.dumps({"fault_tolerance": timeouts}))
    command += [f"--ft-cfg-path={config}", "--ft-enable-nic-monitor=false", "--workers-stop-timeout=5"]
    command += [__file__, "worker", hang, suite, str(folder)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "LIGHTNING_RESILIENCE_SECTION_TIMEOUTS": f"{limits},out_of_section:{out_of_section_s:g}",
        "FAULT_TOL_FINISHED_FLAG_FILE": str(folder / "finished"),
    }
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            found = _wait_for_end(folder, process)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    text = (folder / "log").read_text(errors="replace")
    return found, _said(text) if found is not None else "not found"


def _wait_for_end(folder: Path, process: subprocess.Popen[bytes]) -> float | None:
    """Seconds from the hang until it was noticed: the first line about it in the log."""
    deadline = time.monotonic() + 150
    began = folder / "began"
    pattern = re.compile(r"No progress of|has been open for|out of section|Out of section", re.IGNORECASE)
    while time.monotonic() < deadline:
        if began.exists() and (content := began.read_text()) and pattern.search(_log(folder)):
            noticed = time.time() - float(content)
            time.sleep(4.0)  # for the rest of what is said
            return noticed
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    return None


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def _said(text: str) -> str:
    if match := re.search(r"Hang: (.*?)\. Diagnosis", text):
        return match[1]
    found = re.findall(r"RankMonServer\d+@[^\]]*:(\d+)\] (Section .*? open|Was out of section)", text)
    return "; ".join(f"rank {rank}: {what.lower()}" for rank, what in dict(found).items()) or "nothing"


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=HANGS, action="append")
    parser.add_argument("--out-of-section", type=float, default=20.0, metavar="SECONDS")
    arguments = parser.parse_args()
    print(f"{'hang':16} {'callback':16} {'noticed after':>13}  what was said")
    for hang in arguments.only or HANGS:
        for suite, name in (("ours", "FaultTolerance"), ("nvrx", "NVRx sections")):
            seconds, said = measure(hang, suite, arguments.out_of_section)
            after = "-" if seconds is None else f"{seconds:.1f} s"
            print(f"{hang:16} {name:16} {after:>13}  {said}", flush=True)


if __name__ == "__main__":
    main()
