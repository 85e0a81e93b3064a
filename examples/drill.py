"""Trains ``gpt.py`` for a drill: with local checkpoints every few steps, fixed section timeouts, and a fault on
purpose, which happens once per run.

    lightning-resilience launch --nproc-per-node 2 --section-timeouts step:5 examples/drill.py \\
        --fault stuck_in_collective --rank 1 --at-step 50 [arguments of gpt.py]
"""

from __future__ import annotations

import argparse
from typing import get_args

import gpt

from lightning_resilience import FaultTolerance, LocalCheckpoint
from lightning_resilience.faults import FaultType, SimulatedFault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=get_args(FaultType), help="default: none")
    parser.add_argument("--rank", type=int, help="default: any")
    parser.add_argument("--at-step", type=int, metavar="STEP", help="default: when training begins")
    parser.add_argument("--save-locally-every", type=int, metavar="STEPS", default=5, help="default: %(default)s")
    options, rest = parser.parse_known_args()
    fault = None
    if options.fault is not None:
        fault = SimulatedFault(fault_type=options.fault, rank=options.rank, at_step=options.at_step)
    # Calculated timeouts are at least 30 seconds, which is long for a drill.
    watch = FaultTolerance(calculate_timeouts=False, simulated_fault_params=fault)
    gpt.main(rest, [watch, LocalCheckpoint(every_n_train_steps=options.save_locally_every)])


if __name__ == "__main__":
    main()
