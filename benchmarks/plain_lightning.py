"""What plain Lightning does when something goes wrong: every row of the table in README's "Why", seen once.

Each row starts trainings as processes of their own, without a callback of this package, and makes the fault for real:
signals, SIGKILL, damaged files. Every process is ended when its time is up.

    python benchmarks/plain_lightning.py [--only ROW ...] [--patience 20] [--state-gb 1.2]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BATCHES, BATCH_SIZE, EPOCHS = 16, 4, 2
START_S = 180.0  # until a training has begun, and until an undisturbed one has ended


# --- one training ---


def train(
    folder: Path,
    shuffle: bool = False,
    dropout: float = 0.0,
    epochs: int = EPOCHS,
    save_at: int = 0,
    kill_at: int = 0,
    resume: str | None = None,
    continue_data_at: int = 0,
    nan_at: int = -1,
    step_s: float = 0.0,
    late_s: float = 0.0,
) -> None:
    """One rank of a training. Notes what it does in ``folder``: who it is, and what it trains on.

    Args:
        folder: Where everything is written.
        shuffle: Whether the data are shuffled.
        dropout: Of the model.
        epochs: How long it trains.
        save_at: Every how many steps ``ModelCheckpoint`` saves; 0: at the end of an epoch, its default.
        kill_at: After which step rank 0 kills itself; 0: never.
        resume: The checkpoint to resume from.
        continue_data_at: The batch of the first epoch at which the data begin: what a resume would need.
        nan_at: The step whose loss is NaN.
        step_s: How long a step takes, at least.
        late_s: By how much rank 1 is behind the others in a step.
    """
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, Dataset, Sampler

    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("RANKS", "1")))
    L.seed_everything(1)

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return ranks * BATCHES * BATCH_SIZE

        def __getitem__(self, index: int) -> Any:
            return torch.randn(32, generator=torch.Generator().manual_seed(index)), index

    class InOrder(Sampler[int]):
        begin = continue_data_at

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

        def __iter__(self) -> Iterator[int]:
            begin, self.begin = self.begin, 0
            return iter(range(trainer.global_rank, ranks * len(self), ranks)[begin * BATCH_SIZE :])

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(256, 1)
            )

        def on_train_start(self) -> None:
            (folder / f"pid-{self.global_rank}").write_text(str(os.getpid()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, samples = batch
            with open(folder / f"trained-{self.global_rank}", "a") as notes:
                notes.write(json.dumps([self.global_step, samples.tolist()]) + "\n")
            time.sleep(step_s + (late_s if self.global_rank == 1 else 0.0))
            loss = (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()
            return loss * math.nan if self.global_step == nan_at else loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == kill_at and self.global_rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    saver = ModelCheckpoint(folder, save_last=True, save_top_k=-1, every_n_train_steps=save_at or None)
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=False,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    order: Any = {"shuffle": True} if shuffle else {"sampler": InOrder()}
    loader = DataLoader(Data(), BATCH_SIZE, **order)
    trainer.fit(module, loader, ckpt_path=resume)
    if trainer.is_global_zero:
        weights = torch.cat([each.detach().flatten() for each in module.parameters()])
        lost = 1 - float(torch.isfinite(weights).float().mean())
        (folder / "ended").write_text(json.dumps({"weights": weights.numpy().tobytes().hex(), "lost": lost}))


def save_often(folder: Path, megabytes: int, times: int) -> None:
    """Saves a checkpoint of that size under one name, again and again, and notes how long that and a copy take."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Large(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.nn.Parameter(torch.zeros(megabytes * 10**6 // 4), requires_grad=False)

    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Large()
    trainer.fit(module)
    room = torch.ones_like(module.state)
    for number in range(times):
        began = time.perf_counter()
        room.copy_(module.state)
        copied = time.perf_counter()
        trainer.save_checkpoint(folder / "last.ckpt")
        saved = time.perf_counter()
        (folder / "saved").write_text(json.dumps([number + 1, saved - copied, copied - began]))
        while number + 1 < times and not (folder / f"go-{number + 1}").exists():
            time.sleep(0.01)


# --- processes ---


class Run:
    """A training in processes of its own: what it has noted, and how it has ended."""

    def __init__(self, folder: Path, launcher: str = "python", ranks: int = 1, **settings: Any) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(exist_ok=True)
        for name in ("ended", *(f"{kind}-{rank}" for kind in ("pid", "trained") for rank in range(ranks))):
            (folder / name).unlink(missing_ok=True)
        command = [sys.executable, __file__, "--training", json.dumps({"folder": str(folder), **settings})]
        if launcher == "torchrun":
            options = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command[1:1] = options
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RANKS": str(ranks)}
        with open(folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=folder
            )

    def wait(self) -> int:
        """Until it has ended by itself. Returns the exit code."""
        code = self.process.wait(START_S)
        if code not in (0, -signal.SIGKILL) and not (self.folder / "trained-0").exists():
            raise RuntimeError((self.folder / "log").read_text()[-3000:])
        return code

    def until(self, is_so: Callable[[], Any]) -> None:
        """Until something holds."""
        deadline = time.monotonic() + START_S
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{is_so} has not come about.\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.02)

    def steps(self, rank: int = 0) -> int:
        return len(self.trained(rank))

    def trained(self, rank: int = 0) -> list[Any]:
        """What this rank has trained on: a step and its samples, in this order."""
        path = self.folder / f"trained-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def signal(self, *to: int) -> None:
        """SIGTERM to these ranks."""
        for rank in to:
            os.kill(int((self.folder / f"pid-{rank}").read_text()), signal.SIGTERM)

    def how_it_ends(self, patience_s: float) -> str:
        """What becomes of it within that time: an exit code, or none."""
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {self.process.wait(patience_s)}"
        steps = [self.steps(rank) for rank in range(self.ranks)]
        time.sleep(patience_s / 4)
        if steps != [self.steps(rank) for rank in range(self.ranks)]:
            return f"trained on for {patience_s:g} s and more"
        return f"deadlock: no rank has made a step or ended for {patience_s:g} s"

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "ended").read_text())
        return found

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Run]:
    run = Run(folder, **settings)
    try:
        yield run
    finally:
        run.end()


def finished(folder: Path, **settings: Any) -> Run:
    """A training that has ended."""
    with running(folder, **settings) as run:
        run.wait()
    return run


# --- the rows ---


def resumed(folder: Path, name: str, data_at: int = 0, **settings: Any) -> tuple[Run, str]:
    """A training that is killed 4 steps after its save in the middle of the second epoch, and resumed from that.

    Returns:
        The second process, and how often the samples of that epoch were trained on by what has come of it.
    """
    place, half = folder / name, BATCHES + BATCHES // 2
    before = finished(place, save_at=half, kill_at=half + 4, **settings).trained()
    run = finished(place, resume=str(place / f"epoch=1-step={half}.ckpt"), continue_data_at=data_at, **settings)
    counts = Counter(sample for step, samples in before if BATCHES <= step < half for sample in samples)
    counts.update(sample for step, samples in run.trained() if step >= half for sample in samples)
    every = range(BATCHES * BATCH_SIZE)
    twice, never = ([sample for sample in every if counts[sample] == often] for often in (2, 0))
    return run, f"{in_batches(twice)} trained twice, {in_batches(never)} never"


def in_batches(samples: list[int]) -> str:
    if samples and samples == list(range(samples[0], samples[-1] + 1)) and len(samples) % BATCH_SIZE == 0:
        return f"batches {samples[0] // BATCH_SIZE} to {samples[-1] // BATCH_SIZE}"
    return f"{len(samples)} of {BATCHES * BATCH_SIZE} samples"


def crash_in_an_epoch(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    for shuffle in (False, True):
        yield f"`shuffle={shuffle}`: of the epoch, {resumed(folder, f'shuffle-{shuffle}', shuffle=shuffle)[1]}"
    for dropout in (0.0, 0.1):
        undisturbed = finished(folder / f"undisturbed-{dropout}", dropout=dropout).result
        run, _ = resumed(folder, f"dropout-{dropout}", dropout=dropout, data_at=BATCHES // 2)
        yield f"the place in the data restored by hand, dropout {dropout}: the weights {same(run.result, undisturbed)}"


def same(result: dict[str, Any], other: dict[str, Any]) -> str:
    return "are the same" if result["weights"] == other["weights"] else "differ"


def many_ranks(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    for ranks in (2, 3, 4):
        settings = {"launcher": "torchrun", "ranks": ranks}
        place, half = folder / f"ranks-{ranks}", BATCHES + BATCHES // 2
        undisturbed = finished(place, save_at=half, **settings).result
        checkpoint = str(place / f"epoch=1-step={half}.ckpt")
        run = finished(place, resume=checkpoint, continue_data_at=BATCHES // 2, **settings)
        yield f"{ranks} ranks: the weights {same(run.result, undisturbed)}"


def sigterm_to(folder: Path, launcher: str, to: tuple[int, ...], patience_s: float, late_s: float = 0.0) -> str:
    with running(folder, launcher=launcher, ranks=2, epochs=10_000, step_s=0.05, late_s=late_s) as run:
        run.until(lambda: run.steps(0) > 5 and run.steps(1) > 5)
        if late_s:  # then rank 0 waits for rank 1, which is still before its backward pass
            begun = run.steps(0)
            run.until(lambda: run.steps(0) > begun)
            time.sleep(late_s / 2)
        run.signal(*to)
        return run.how_it_ends(patience_s)


def sigterm_to_one_rank(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    for launcher, name in (("lightning", "Lightning's own launcher"), ("torchrun", "torchrun")):
        for rank in (0, 1):
            found = sigterm_to(folder / f"{launcher}-{rank}", launcher, (rank,), options.patience)
            yield f"{name}, rank {rank}: {found}"


def sigterm_to_both_ranks(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    yield f"Lightning's own launcher: {sigterm_to(folder / 'own', 'lightning', (0, 1), options.patience)}"
    yield f"torchrun: {sigterm_to(folder / 'torchrun', 'torchrun', (0, 1), options.patience)}"
    late = sigterm_to(folder / "late", "torchrun", (0, 1), options.patience, late_s=1.0)
    yield f"torchrun, rank 1 behind by a part of the step: {late}"


def sigterm_to_a_single_process(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    with running(folder / "run", epochs=10_000, step_s=0.05, save_at=1000) as run:
        run.until(lambda: run.steps() > 5)
        run.signal(0)
        ended = run.how_it_ends(options.patience)
    yield f"{ended}, {len(list(run.folder.glob('*.ckpt')))} checkpoints"


def truncated(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    run = finished(folder / "run")
    last = run.folder / "last.ckpt"
    os.truncate(last, last.stat().st_size // 2)
    with running(run.folder, epochs=EPOCHS + 1, resume=str(last)) as again:
        code = again.process.wait(START_S)
    error = (run.folder / "log").read_text().strip().splitlines()[-1]
    beside = [path.name for path in run.folder.glob("epoch=*.ckpt")]
    yield f"exit code {code}: `{error[:90]}...`; intact beside it: {', '.join(sorted(beside))}"


def flipped_bit(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    import torch

    run = finished(folder / "run")
    last = run.folder / "last.ckpt"
    weight = torch.load(last, weights_only=True)["state_dict"]["net.0.weight"]
    content = bytearray(last.read_bytes())
    place = content.index(weight.numpy().tobytes()[:64])
    content[place + 3] ^= 0x40  # the highest bit of the first weight's exponent
    last.write_bytes(content)
    damaged = torch.load(last, weights_only=True)["state_dict"]["net.0.weight"]
    began = (run.folder / "log").stat().st_size
    with running(run.folder, epochs=EPOCHS + 1, resume=str(last)) as again:
        code = again.wait()
    log = (run.folder / "log").read_text()[began:]
    said = [line for line in log.splitlines() if "orrupt" in line or "rror" in line]
    first, wrong = float(weight[0, 0]), float(damaged[0, 0])
    yield f"a weight of {first:.3g} is {wrong:.3g}; loaded and trained on, exit code {code}, {len(said)} lines about it"


def nan_loss(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    import torch

    with running(folder / "run", epochs=1, nan_at=9, save_at=4) as run:
        code = run.wait()
    states = {path.name: torch.load(path, weights_only=True)["state_dict"] for path in run.folder.glob("*.ckpt")}
    spoilt = [name for name, state in states.items() if not all(torch.isfinite(each).all() for each in state.values())]
    names = ", ".join(f"`{name}`" for name in sorted(spoilt))
    yield f"exit code {code}, {run.result['lost']:.0%} of the weights are NaN; so are {names} (of {len(states)} files)"


@contextmanager
def saving(folder: Path, megabytes: int, times: int, temporary: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    settings = json.dumps({"folder": str(folder), "megabytes": megabytes, "times": times})
    environment = os.environ | ({"TMPDIR": temporary} if temporary else {})
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--saving", settings], stdout=log, stderr=log, env=environment, cwd=folder
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def saved(folder: Path, process: subprocess.Popen[bytes], number: int) -> list[float]:
    """Waits for so many saves; what was noted of the last one."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ValueError):
            if (found := json.loads((folder / "saved").read_text()))[0] >= number:
                return list(found)
        if process.poll() not in (None, 0):
            break
        time.sleep(0.02)
    raise RuntimeError((folder / "log").read_text()[-3000:])


def rare_saves(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    with saving(folder, int(options.state_gb * 1000), 2) as process:
        saved(folder, process, 1)
        (folder / "go-1").touch()
        _, save_s, copy_s = saved(folder, process, 2)
    yield f"a save of {options.state_gb:g} GB stops the training for {save_s:.2g} s; copying it takes {copy_s:.2g} s"


def torn_save(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    import torch

    elsewhere = "/dev/shm"
    if os.stat(elsewhere).st_dev == os.stat(folder).st_dev:
        yield f"not tried: `TMPDIR` would have to be on another file system than {elsewhere}"
        return
    path = folder / "last.ckpt"
    with saving(folder, 300, 3, temporary=elsewhere) as process:
        saved(folder, process, 1)
        full = path.stat().st_size
        sizes: set[int] = set()
        is_over = threading.Event()

        def look() -> None:
            while not is_over.is_set():
                with suppress(FileNotFoundError):
                    sizes.add(path.stat().st_size)

        watcher = threading.Thread(target=look)
        watcher.start()
        (folder / "go-1").touch()
        _, took, _ = saved(folder, process, 2)
        is_over.set()
        watcher.join()
        (folder / "go-2").touch()
        deadline = time.monotonic() + START_S
        while path.stat().st_size in (0, full) and time.monotonic() < deadline:
            pass
        process.kill()
        process.wait()
    try:
        torch.load(path, weights_only=True)
        then = "what is there can be loaded"
    except Exception as error:
        then = f"what is there cannot be loaded ({type(error).__name__})"
    partial = len(sizes - {full})
    yield f"{partial} partial sizes under the final name during one save of {took:.1f} s; killed in the next: {then}"


ROWS: dict[str, Callable[[Path, argparse.Namespace], Iterator[str]]] = {
    "a process dies in the middle of an epoch and is resumed from a checkpoint": crash_in_an_epoch,
    "the same with 3 or 4 DDP ranks and every state restored by hand": many_ranks,
    "SIGTERM to one of two DDP ranks": sigterm_to_one_rank,
    "SIGTERM to both ranks, as `scancel` and Kubernetes send it": sigterm_to_both_ranks,
    "SIGTERM to a single process": sigterm_to_a_single_process,
    "`last.ckpt` is truncated": truncated,
    "one bit of a weight is flipped on disk": flipped_bit,
    "one loss is NaN": nan_loss,
    "a fault half an hour after the last save": rare_saves,
    "a save to another file system than `TMPDIR` is killed": torn_save,
}
"""What happens, as README's table says it, and what shows it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows whose first column contains one of these")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds without a step that are a deadlock")
    parser.add_argument("--state-gb", type=float, default=1.2, help="size of the state that is saved and copied")
    parser.add_argument("--training", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--saving", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for own, program in ((options.training, train), (options.saving, save_often)):
        if own is not None:
            program(Path(own.pop("folder")), **own)
            return
    warnings.filterwarnings("ignore")
    print("| what happens | plain Lightning |\n|---|---|", flush=True)
    for name, row in ROWS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        # Here, not where temporary files lie: that may be memory.
        with tempfile.TemporaryDirectory(dir=".", prefix="plain-lightning-", ignore_cleanup_errors=True) as folder:
            seen = "<br>".join(row(Path(folder).absolute(), options))
        print(f"| {name} | {seen} |", flush=True)


if __name__ == "__main__":
    main()
