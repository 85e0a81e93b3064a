"""What it costs to compare the replicas of a DDP job: a healthy step nothing, a save one more reading of the state.

Two ranks train with local saves. Every other save digests the state, as the package does; the others do not, as before
there was a comparison: so both are of the same minute and the same machine, and only their ratio counts. Steps without
a save are timed in alternating fits with and without ``ReplicaCheck``. **blocked** is for how long the training stands
still for a local save: the boundary, and the wait for the copy before the optimizer's step. **behind** is what the save
takes until it is complete. **global save** is the wait for the digest at a save to the run directory.

    python benchmarks/replica_check.py [--width 1024] [--layers 8] [--steps 120] [--rounds 3]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import lightning.pytorch as L  # noqa: E402
import torch  # noqa: E402

from lightning_resilience import LocalCheckpoint, NaNGuard, ReplicaCheck  # noqa: E402
from lightning_resilience._lightning import lightning_strategies  # noqa: E402
from lightning_resilience.checkpoint.digest import digest_of  # noqa: E402
from lightning_resilience.checkpoint.local import LocalSaves  # noqa: E402
from lightning_resilience.checkpoint.snapshot import Snapshot  # noqa: E402

EVERY = 10


class Layers(L.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-4)


class Steps(L.Callback):
    """Times each step from batch to batch, and says which are none of a save."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch_idx % EVERY in (5, 6, 7, 8):
            self.seconds.append(now - self.began)
        self.began = now


def rank(number: int, port: int, folder: str, arguments: argparse.Namespace, results: Any) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    saves: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    digests, steps = [], {True: [], False: []}
    count = 0
    copy, completed = Snapshot.copy, LocalSaves._round

    def alternately(self: Snapshot, destinations: Any, digested: Any = ()) -> None:
        nonlocal count
        count += 1
        copy(self, destinations, digested if count % 2 else ())

    def noted(self: LocalSaves, taken: Any, planned: Any) -> None:
        completed(self, taken, planned)
        if self.stats.published > 2:  # the first ones allocate
            saves[bool(count % 2)].append((self.stats.stall_s, self.stats.save_s))

    Snapshot.copy, LocalSaves._round = alternately, noted  # type: ignore[method-assign]
    data = torch.utils.data.DataLoader(torch.randn(2 * arguments.steps * 16, arguments.width), 16)
    for fit in range(2 * arguments.rounds):
        checks, watch = bool(fit % 2), Steps()
        own = [ReplicaCheck()] if checks else []
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=f"{folder}/{fit}",
            callbacks=[LocalCheckpoint(f"{folder}/local", every_n_train_steps=EVERY), NaNGuard(), *own, watch],
        )
        module = Layers(arguments.width, arguments.layers)
        trainer.fit(module, data)
        steps[checks] += watch.seconds[4:]
        tensors = lightning_strategies.trained_tensors(trainer, list(module.parameters()))
        for _ in range(3):
            began = time.perf_counter()
            digest_of(tensors)
            digests.append(time.perf_counter() - began)
        state = sum(tensor.nbytes for tensor in tensors)
    if number == 0:
        results.put((state, saves, digests, steps))
    results.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = mp.get_context("fork")
    results = context.Queue()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        ranks = [context.Process(target=rank, args=(n, port, folder, arguments, results)) for n in range(2)]
        for each in ranks:
            each.start()
        state, saves, digests, steps = results.get(timeout=3000)
        for each in ranks:
            each.join()
    print(f"{state / 1e6:.0f} MB of state, 2 ranks; n: {len(saves[True])} and {len(saves[False])} saves")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| | without | with | ratio |\n|---|---|---|---|")

    def row(name: str, without: list[float], those: list[float]) -> None:
        before, now = statistics.median(without), statistics.median(those)
        print(f"| {name} | {before * 1e3:.2f} ms | {now * 1e3:.2f} ms | {now / before:.3f} |")

    row("a step without a save", steps[False], steps[True])
    row("a local save, blocked", [each[0] for each in saves[False]], [each[0] for each in saves[True]])
    row("a local save, behind", [each[1] for each in saves[False]], [each[1] for each in saves[True]])
    print(f"| a global save, the digest | - | {statistics.median(digests) * 1e3:.2f} ms | - |")


if __name__ == "__main__":
    main()
