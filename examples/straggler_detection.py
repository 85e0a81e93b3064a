"""One of two ranks is slow on purpose from some step on, and the reports name it.

lightning-resilience launch --nproc-per-node 2 examples/straggler_detection.py [--wandb] [arguments of gpt.py]
"""

from __future__ import annotations

import argparse

import gpt
from lightning.pytorch.loggers import WandbLogger

from lightning_resilience import FaultTolerance, StragglerDetection
from lightning_resilience.faults import SimulatedFault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-rank", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--slow-from-step", type=int, default=30, metavar="STEP", help="default: %(default)s")
    parser.add_argument("--slow-s", type=float, default=0.3, help="seconds for every step (default: %(default)s)")
    parser.add_argument("--wandb", action="store_true", help="scores, a table and a plot for W&B, offline")
    options, rest = parser.parse_known_args()
    slow = SimulatedFault(
        fault_type="slow_rank", rank=options.slow_rank, at_step=options.slow_from_step, slow_s=options.slow_s
    )
    gpt.main(
        rest,
        [
            # The default is a report every 5 minutes, which is too long for this example.
            StragglerDetection(report_time_interval=3.0, min_consecutive_reports=2),
            FaultTolerance(simulated_fault_params=slow),
        ],
        WandbLogger(project="stragglers", offline=True) if options.wandb else False,
    )


if __name__ == "__main__":
    main()
