"""How long ranks with a large state stand still for one that was lost, and for the one that comes in its place.

Ranks of a model with 100 million parameters (1.2 GB with what AdamW keeps of them) train under ``launch --elastic
--when-lost go-on``. One is killed with SIGKILL again and again, each time after some steps of all. *Goes on* is the
time from the kill to the next step of the others, *takes in* the time between two of their steps in which the new rank
has come. In both a step is done. *Stands still* is what of *takes in* comes before that: the state of the boundary is
saved, and the fit entered again. *GB/s* is how much of the state is handed over in a second of that.

    PYTHONPATH=. python benchmarks/healing.py [--kills 5] [--ranks 2]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from restart import BUDGET, OURS, PATIENCE_S, Arm, Notes, row
from restart_program import SAVE_EVERY

GO_ON = [*OURS, *BUDGET, "--elastic", "--when-lost", "go-on", "--spares", "off"]
BETWEEN_S = 8.0
STATE_GB = 1.2


def wait_for_all(arm: Arm, ranks: int, since: float) -> set[int]:
    """Waits until so many processes have saved, and have trained together for a while; these.

    Args:
        arm: The training.
        ranks: How many.
        since: What was before does not count.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        marks = arm.look()
        there = {mark.pid for mark in marks if mark.seconds > since}
        if len(there) == ranks and marks[-1].step > 1.5 * SAVE_EVERY["large"]:  # else there is no state to go back to
            time.sleep(BETWEEN_S)
            return there
        arm.wait(deadline)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    draw = random.Random(1)
    steps: list[float] = []
    goes_on: list[float] = []
    takes_in: list[float] = []
    stands_still: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(GO_ON, "large", options.ranks, Path(folder, "run"))
        try:
            there = wait_for_all(arm, options.ranks, since=0.0)
            for _ in range(options.kills):
                victim, killed = draw.choice(sorted(there)), time.monotonic()
                os.kill(victim, signal.SIGKILL)
                before, there = there - {victim}, wait_for_all(arm, options.ranks, killed + 0.1)
                others = sorted(mark.seconds for mark in arm.look() if mark.pid == min(before))
                came = min(mark.seconds for mark in arm.look() if mark.pid in there - before)
                gaps = [(b - a, b) for a, b in itertools.pairwise(others)]
                goes_on.append(min(b for _, b in gaps if b > killed) - killed)
                gap, end = max((gap, b) for gap, b in gaps if killed + goes_on[-1] < b <= came + 1.0)
                takes_in.append(gap)
                begun = [Notes(arm.folder / "marks" / f"begun-{rank}") for rank in range(options.ranks)]
                of_others = [mark.seconds for notes in begun for mark in notes.look() if mark.pid == min(before)]
                stands_still.append(max(each for each in of_others if each < end) - (end - gap))
                steps += [gap for gap, b in gaps if killed - BETWEEN_S < b < killed]
                print(f"goes on after {goes_on[-1]:.2f} s, takes in in {takes_in[-1]:.2f} s", end=", ", file=sys.stderr)
                print(f"of which it stands still for {stands_still[-1]:.2f} s", file=sys.stderr)
        finally:
            arm.end()
    still = "stands still, p50 | longest | GB/s"
    print(f"| ranks | a step, p50 | goes on, p50 | longest | takes in, p50 | longest | {still} |")
    print("|---|---|---|---|---|---|---|---|---|")
    times = " | ".join(map(row, (goes_on, takes_in, stands_still)))
    rate = STATE_GB / statistics.median(stands_still)
    print(f"| {options.ranks} | {statistics.median(steps):.2f} | {times} | {rate:.2f} |")


if __name__ == "__main__":
    main()
