"""Trains ``gpt.py`` with a fault on purpose, which strikes once per run, and with section timeouts that stay as given.

    lightning-resilience launch --nproc-per-node 2 --section-timeouts step:5 examples/drill.py \\
        --fault stuck_in_collective --rank 1 --at-step 50 [arguments of gpt.py]
"""

from __future__ import annotations

import argparse
from typing import get_args

import gpt

from lightning_resilience import FaultTolerance
from lightning_resilience.faults import FaultType, SimulatedFault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=get_args(FaultType), help="default: none")
    parser.add_argument("--rank", type=int, help="default: any")
    parser.add_argument("--at-step", type=int, metavar="STEP", help="default: when training begins")
    options, rest = parser.parse_known_args()
    fault = None
    if options.fault is not None:
        fault = SimulatedFault(fault_type=options.fault, rank=options.rank, at_step=options.at_step)
    # Calculated timeouts are at least 30 seconds: much for a drill.
    gpt.main(rest, [FaultTolerance(calculate_timeouts=False, simulated_fault_params=fault)])


if __name__ == "__main__":
    main()
