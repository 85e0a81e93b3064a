"""A pretraining with a recipe in code, and one Weights & Biases run over all its restarts.

lightning-resilience launch --nproc-per-node 2 examples/pretrain_wandb.py [--kill-at-step 60] [arguments of gpt.py]
"""

from __future__ import annotations

import argparse

import gpt

from lightning_resilience import recipes
from lightning_resilience.faults import SimulatedFault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", default="runs/pretrain_wandb", help="as launch's (default: %(default)s)")
    parser.add_argument("--kill-at-step", type=int, metavar="STEP", help="rank 0 is killed there, once per run")
    options, rest = parser.parse_known_args()
    recipe = recipes.nemo(options.run_dir)
    if options.kill_at_step is not None:
        recipe = recipes.drill(
            options.run_dir, SimulatedFault(fault_type="rank_killed", rank=0, at_step=options.kill_at_step)
        )
    # Offline: `wandb sync runs/pretrain_wandb/wandb/offline-run-*` uploads the folders as one run.
    gpt.main(rest, recipe.callbacks, recipe.wandb_logger(project="gpt", offline=True))


if __name__ == "__main__":
    main()
