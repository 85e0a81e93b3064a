"""What local saves take of the training: as often as `LocalCheckpoint` chooses, and every 10 s, as it did before.

Trains the demo's model and a tiny one in one process with a save every half second, and takes the CPU time of each
save: of the training thread at the boundary, which stops the training, and of the thread that writes beside it. CPU
time, since on a busy machine a thread also waits for its core. The intervals are those chosen for such costs.

    PYTHONPATH=. python benchmarks/local_interval.py [--seconds 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gpt  # noqa: E402
import lightning.pytorch as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from benchmarks.overhead import Model  # noqa: E402
from lightning_resilience import LocalCheckpoint  # noqa: E402
from lightning_resilience.checkpoint.local import LocalSaves  # noqa: E402
from lightning_resilience.fit.local_saves import LocalSavePolicy  # noqa: E402
from lightning_resilience.run.save_interval import chosen_interval_s, growing_interval_s  # noqa: E402

NEVER_S = 1e9
FORMERLY_S = 10.0


class Costs:
    """CPU seconds of the local saves of this process."""

    def __init__(self) -> None:
        self.at_boundary: list[float] = []
        self.behind: list[float] = []
        at_boundary, save = LocalSavePolicy.at_boundary, LocalSaves._round

        def timed_boundary(policy: Any, *given: Any) -> None:
            began, before = time.thread_time(), policy._saves and policy._saves._last
            at_boundary(policy, *given)
            if policy._saves is not None and policy._saves._last != before:
                self.at_boundary.append(time.thread_time() - began)

        def timed_save(saves: Any, *given: Any) -> None:
            began = time.thread_time()
            save(saves, *given)
            self.behind.append(time.thread_time() - began)

        LocalSavePolicy.at_boundary = timed_boundary  # type: ignore[method-assign]
        LocalSaves._round = timed_save  # type: ignore[method-assign]


class StopAfter(L.Callback):
    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = time.monotonic() > self.until


def measure(costs: Costs, model: L.LightningModule, data: Any, seconds: float) -> tuple[float, float]:
    """Median CPU seconds of a save, but for the first ones: at the boundary, and behind the training."""
    costs.at_boundary.clear()
    costs.behind.clear()
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            callbacks=[LocalCheckpoint(train_time_interval=0.5, run_dir=folder), StopAfter(seconds)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(model, DataLoader(data, 8, shuffle=True))
    return statistics.median(costs.at_boundary[2:]), statistics.median(costs.behind[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    costs = Costs()
    demo = gpt.GPT(length=64, layers=2, width=96, heads=4, dropout=0.1, learning_rate=1e-3)
    rows = [("tiny", Model(), TensorDataset(torch.randn(64_000, 64)))]
    rows.append(("the demo's", demo, gpt.StandardLibrary(64, "train")))
    print("| model | stall | behind | every | of the time, stopped | of a core, behind | first saves after |")
    print("|---|---|---|---|---|---|---|")
    for name, model, data in rows:
        stall_s, behind_s = measure(costs, model, data, seconds)
        chosen_s, interval_s, first = chosen_interval_s(stall_s, behind_s, NEVER_S, 60.0), 0.0, []
        while interval_s < chosen_s:
            interval_s = growing_interval_s(interval_s, stall_s, behind_s, chosen_s)
            first.append(f"{interval_s:.1f}")
        for every_s, after in ((FORMERLY_S, "-"), (chosen_s, ", ".join(first) + " s")):
            times = f"{1e3 * stall_s:.1f} ms | {1e3 * behind_s:.1f} ms | {every_s:.1f} s"
            print(f"| {name} | {times} | {stall_s / every_s:.3%} | {behind_s / every_s:.3%} | {after} |")


if __name__ == "__main__":
    main()
