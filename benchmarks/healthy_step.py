"""What a step takes more under ``launch --elastic --when-lost go-on`` than with plain DDP, and whom it calls.

Two ranks train under ``torchrun`` with plain Lightning, and two under ``launch`` with all callbacks of the ``nemo``
recipe, with the same model and steps of three lengths, all of it computing; at the same time, or they would differ by
how fast the machine is just then. *CPU* is that of the whole process (its other threads and local saves included),
*training thread* that of the thread which trains. Then one rank of each is watched by ``strace``, which counts what it
sends over TCP.

    PYTHONPATH=. python benchmarks/healthy_step.py [--turns 5] [--seconds 20]
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

MS = (10, 50, 200)
RANKS = 2
WARM_UP = 20  # steps
ARMS = {
    "plain": ["-m", "torch.distributed.run"],
    "go-on": ["-m", "lightning_resilience.launch.cli", "launch", "--quiet", "--elastic", "--when-lost", "go-on"],
}
TO_PEERS, TO_THE_STORE = "writev", "sendto"
"""How gloo and torch's ``TCPStore`` send."""


class Works(L.LightningModule):
    """A model whose steps compute for about so long."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.matrix = torch.randn(256, 256)
        self.times = round(ms / MS_EACH)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix)
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MS_EACH = 0.35
"""About how long a multiplication takes; both arms make as many of them."""


class Clock(L.Callback):
    """Notes what each step has taken of the CPU, in this process and in this thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, [(0.0, 0.0)]

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self._seen.append((time.process_time(), time.thread_time()))
        os.getppid()  # by which strace counts steps
        if trainer.global_step == WARM_UP:
            Path(f"{self._path}.pid").write_text(str(os.getpid()))

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        series = zip(*self._seen[WARM_UP:], strict=True)
        process, thread = ([b - a for a, b in itertools.pairwise(each)] for each in series)
        # A save is part of what a process takes in the mean; of the thread's steps the median is the healthy one.
        self._path.write_text(json.dumps([statistics.mean(process), statistics.median(thread)]))


def train(out: str, ms: float, steps: int) -> None:
    """A rank."""
    torch.set_num_threads(1)
    # Ranks of both arms share a core each: who is moved between cores and caches scatters by ten times as much.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=steps,
        callbacks=[Clock(Path(out, f"rank-{os.environ['RANK']}"))],
        enable_checkpointing=False,
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Works(ms), DataLoader(TensorDataset(torch.randn(40_000, 64)), batch_size=4))


def start(arm: str, folder: Path, ms: float, steps: int) -> subprocess.Popen[bytes]:
    """Starts a training."""
    where = ["--standalone"] if arm == "plain" else ["--run-dir", str(folder / "run"), "--recipe", "nemo"]
    program = [str(Path(__file__).absolute()), "--train", json.dumps([str(folder), ms, steps])]
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            [sys.executable, *ARMS[arm], *where, f"--nproc-per-node={RANKS}", *program],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )


def measure(ms: float, steps: int) -> dict[str, list[list[float]]]:
    """CPU seconds of a step of each rank of each arm: of the process, and of the thread that trains."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {arm: Path(temporary, arm) for arm in ARMS}
        for folder in folders.values():
            folder.mkdir()
        processes = {arm: start(arm, folder, ms, steps) for arm, folder in folders.items()}
        codes = {arm: process.wait(600) for arm, process in processes.items()}
        noted = {arm: [folder / f"rank-{rank}" for rank in range(RANKS)] for arm, folder in folders.items()}
        # What is done by then counts: plain processes now and then abort when they tear gloo down.
        for arm, of_ranks in noted.items():
            if not all(each.exists() for each in of_ranks):
                raise RuntimeError(
                    f"{arm} has ended with {codes[arm]}:\n{(folders[arm] / 'output').read_text()[-3000:]}"
                )
        return {arm: [json.loads(each.read_text()) for each in of_ranks] for arm, of_ranks in noted.items()}


def messages(arm: str, ms: float, seconds: float) -> tuple[float, float, float]:
    """What rank 0 sends over TCP, by ``strace``.

    Returns:
        Messages of its training thread in a step, those to other ranks in a step, those to the store in a second.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = start(arm, Path(folder), ms, round(10 * seconds * 1e3 / ms))
        try:
            noted = Path(folder, "rank-0.pid")
            while not noted.exists():
                time.sleep(0.1)
            pid, out = noted.read_text(), Path(folder, "strace")
            trace = f"trace=getppid,{TO_PEERS},{TO_THE_STORE}"
            with subprocess.Popen(["strace", "-f", "-yy", "-qq", "-e", trace, "-o", str(out), "-p", pid]) as strace:
                time.sleep(seconds)
                strace.send_signal(signal.SIGINT)
            seen = out.read_text()
            steps, sent = seen.count("getppid("), re.findall(r"^(\d+) +(\w+)\(\d+<TCP", seen, re.M)
            kinds = [kind for _, kind in sent]
            own = sum(thread == pid for thread, _ in sent)
            return own / steps, kinds.count(TO_PEERS) / steps, kinds.count(TO_THE_STORE) / seconds
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="trainings of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each (default: %(default)s)")
    parser.add_argument("--only-messages", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*json.loads(options.train))
        return
    print("| step | CPU, plain | CPU, go-on | ratio | training thread, plain | go-on | ratio |")
    print("|---|---|---|---|---|---|---|")
    for ms in () if options.only_messages else MS:
        found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        for _ in range(options.turns):
            for arm, of_ranks in measure(ms, WARM_UP + round(options.seconds * 1e3 / ms)).items():
                found[arm] += of_ranks
                print(f"{arm}, {ms} ms: {of_ranks}", file=sys.stderr, flush=True)
        cells = []
        for kind in (0, 1):
            plain, ours = ([each[kind] for each in found[arm]] for arm in ("plain", "go-on"))
            ratio = statistics.median(map(operator.truediv, ours, plain))
            of_each = [f"{statistics.median(each) * 1e3:.2f} ms" for each in (plain, ours)]
            cells += [*of_each, f"{ratio:.3f}"]
        print(f"| {ms} ms | {' | '.join(cells)} |", flush=True)
    if shutil.which("strace") is None:
        print("strace is not installed: no messages were counted", file=sys.stderr)
        return
    print("\n| | step | of the training thread, in a step | to other ranks, in a step | to the store, in a second |")
    print("|---|---|---|---|---|")
    for ms in MS:
        for arm in ARMS:
            own, peers, store = messages(arm, ms, options.seconds)
            print(f"| {arm} | {ms} ms | {own:.2f} | {peers:.2f} | {store:.1f} |", flush=True)


if __name__ == "__main__":
    main()
