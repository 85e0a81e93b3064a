"""FSDP2: every rank holds, and saves, a part of each weight.

lightning-resilience launch --nproc-per-node 2 examples/fsdp.py [--kill-at-step 25]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import warnings
from dataclasses import replace

import lightning as L
from gpt import GPT, Progress, StandardLibrary
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_resilience import LocalCheckpoint, recipes
from lightning_resilience.faults import SimulatedFault


class ShardedGPT(GPT):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at-step", type=int, metavar="STEP", help="rank 1 is killed there, once per run")
    options = parser.parse_args()

    recipe = recipes.nemo()  # uses the launcher's run directory
    if options.kill_at_step is not None:
        recipe = recipes.drill(fault=SimulatedFault(fault_type="rank_killed", rank=1, at_step=options.kill_at_step))
    recipe = replace(recipe, local_checkpoint=LocalCheckpoint(every_n_train_steps=10))  # because the training is short

    L.seed_everything(1, workers=True, verbose=False)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    model = ShardedGPT(length=64, layers=2, width=96, heads=4, dropout=0.1, learning_rate=1e-3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=ModelParallelStrategy(),
        max_steps=options.steps,
        callbacks=[Progress(5), *recipe.callbacks],
        logger=False,
        enable_checkpointing=False,  # AutoResume saves the parts of all ranks
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(StandardLibrary(64, "train"), 8, shuffle=True, num_workers=2))
    weights = b"".join(parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters())
    if trainer.is_global_zero:
        print(f"sha256 of the weights: {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
