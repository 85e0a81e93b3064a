"""What becomes of a training whose numbers go wrong, under several callbacks; and what ``NaNGuard`` costs until then.

The first table: every fault is made once under every callback, each in processes of its own, with Lightning's
``ModelCheckpoint`` saving every 10 steps. Then the same training is started again without the fault, from
``last.ckpt`` or from what this package resumes from. The second table: ``NaNGuard`` in the small GPT of ``examples``,
switched on and off every 10 steps of one run, as in ``overhead.py``.

    python benchmarks/bad_numbers.py [--only faults|cost] [--steps 500]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

STEPS = 40
SAVE_EVERY = 10
AT_STEP = 15

FAULTS = {
    "NaN loss": "the loss of one step is NaN",
    "NaN gradient": "one element of one gradient is NaN; the loss is finite",
    "NaN on one rank": "the loss of one step is NaN, on rank 1 of 2",
    "NaN at first": "the loss of the first step is NaN",
}
PLAIN, SPIKES, EARLY = "plain Lightning", "SpikeDetection", "EarlyStopping(check_finite)"
GUARDS = {f"NaNGuard({action!r})": action for action in ("skip", "rollback", "stop")}


def worker(fault: str, suite: str, folder: Path, again: bool) -> None:
    """One rank of a training; what has become of the model is written down however it ends."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.callbacks.spike import SpikeDetection
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_resilience import AutoResume, NaNGuard

    torch.manual_seed(1)
    at = 0 if fault == "NaN at first" else AT_STEP

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

        def on_train_start(self) -> None:
            self.began = self.trainer.global_step

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
            if self.trainer.fit_loop.epoch_loop.total_batch_idx == at and not again:
                if fault == "NaN gradient":
                    loss = loss + 0 * (self.net[0].weight[0, 0] * 0).sqrt()
                elif fault != "NaN on one rank" or self.global_rank == 1:
                    loss = loss * math.nan
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    callbacks: list[L.Callback] = [ModelCheckpoint(folder / "own", every_n_train_steps=SAVE_EVERY, save_last=True)]
    if suite in GUARDS:
        callbacks += [NaNGuard(GUARDS[suite], run_dir=folder / "run"), AutoResume(folder / "run")]  # type: ignore[arg-type]
    if suite == SPIKES:  # a spike is a rise by more than a thousand times: only what is not finite is meant
        callbacks.append(SpikeDetection(rtol=1000.0, exclude_batches_path=str(folder / "skip_batches.json")))
    if suite == EARLY:
        callbacks.append(EarlyStopping("loss", check_finite=True, patience=1000))
    module = Module()
    trainer = L.Trainer(
        max_steps=2 * STEPS if again else STEPS,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = DataLoader(TensorDataset(torch.randn(4 * 2 * STEPS, 16)), 4, shuffle=True)
    last = folder / "own" / "last.ckpt"
    problem = None
    try:
        trainer.fit(module, data, ckpt_path=last if again and suite not in GUARDS and last.exists() else None)
    except Exception as error:
        problem = type(error).__name__
        raise
    finally:
        if trainer.is_global_zero:
            finite = torch.cat([torch.isfinite(each).flatten() for each in module.parameters()])
            found = {
                "spoilt": 1 - float(finite.float().mean()),
                "began": getattr(module, "began", None),
                "step": trainer.global_step,
                "problem": problem,
            }
            (folder / "found.json").write_text(json.dumps(found))


def train(fault: str, suite: str, folder: Path, again: bool) -> tuple[int, dict[str, Any]]:
    """Runs a training in processes of its own; returns the exit code and what has become of it."""
    arguments = [__file__, "worker", fault, suite, str(folder), "again" if again else "once"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "one rank" in fault else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with open(folder / "log", "a") as log:
        ended = subprocess.run(
            [sys.executable, *ranks, *arguments], stdout=log, stderr=log, env=environment, timeout=300, check=False
        )
    found = folder / "found.json"
    if not found.exists():
        raise RuntimeError((folder / "log").read_text())
    return ended.returncode, json.loads(found.read_text())


def spoilt_files(folder: Path) -> tuple[int, int]:
    """How many checkpoints on disk hold a number that is not finite, and how many there are."""
    import torch

    spoilt = []
    for path in [*folder.glob("own/*.ckpt"), *folder.glob("run/fit-*/checkpoints/*.ckpt")]:
        checkpoint = torch.load(path, weights_only=False)
        states = [state for each in checkpoint["optimizer_states"] for state in each["state"].values()]
        tensors = [*checkpoint["state_dict"].values(), *(value for state in states for value in state.values())]
        spoilt.append(not all(torch.isfinite(each).all() for each in tensors))
    return sum(spoilt), len(spoilt)


def faults() -> None:
    print(f"{'fault':16} {'callback':28} {'exit':>4} {'step':>5} {'weights lost':>12} {'files lost':>10}  then")
    for fault in FAULTS:
        for suite in (PLAIN, SPIKES, EARLY, *GUARDS):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                folder = Path(name)
                code, found = train(fault, suite, folder, again=False)
                spoilt, files = spoilt_files(folder)
                (folder / "found.json").unlink()
                code_again, then = train(fault, suite, folder, again=True)
            outcome = f"from step {then['began']}: "
            if code_again:
                outcome += f"fails, {then['problem']}"
            else:
                outcome += "all weights NaN" if then["spoilt"] > 0.5 else "well" if not then["spoilt"] else "some NaN"
            print(
                f"{fault:16} {suite:28} {code:4} {found['step']:5} {found['spoilt']:12.0%} {f'{spoilt} of {files}':>10}"
                f"  {outcome}",
                flush=True,
            )


def cost(steps: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import lightning.pytorch as L
    import torch
    from gpt import GPT, StandardLibrary
    from overhead import Toggle, ours_on
    from torch.utils.data import DataLoader

    from lightning_resilience import NaNGuard

    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning_resilience"):
        logging.getLogger(name).setLevel(logging.ERROR)
    variants: dict[str, dict[str, Any]] = {
        "NaNGuard()": {},
        "NaNGuard(check_grads=False)": {"check_grads": False},
        "NaNGuard(spiky_loss_factor=10)": {"spiky_loss_factor": 10.0},
    }
    print(f"\n{'callback':32} {'bare step':>10} {'added':>9} {'added CPU':>10} {'share':>7}")
    for name, options in variants.items():
        guard = NaNGuard(**options)
        toggle = Toggle([guard], ours_on)
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                max_steps=steps,
                accelerator="cpu",
                gradient_clip_val=1.0,
                callbacks=[toggle, guard],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            torch.manual_seed(1)
            data = DataLoader(StandardLibrary(64, "train"), 8, shuffle=True)
            trainer.fit(GPT(length=64, layers=4, width=256, heads=4, dropout=0.1, learning_rate=1e-3), data)
        bare = statistics.median(toggle.wall[False])
        added, added_cpu = (
            statistics.median(times[True]) - statistics.median(times[False]) for times in (toggle.wall, toggle.cpu)
        )
        print(
            f"{name:32} {bare * 1e3:7.1f} ms {added * 1e3:6.2f} ms {added_cpu * 1e3:7.2f} ms {added / bare:7.1%}",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5] == "again")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["faults", "cost"])
    parser.add_argument("--steps", type=int, default=500, help="of each row of the second table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.only != "cost":
        faults()
    if arguments.only != "faults":
        cost(arguments.steps)


if __name__ == "__main__":
    main()
