"""What is left of a training that loses a rank every two seconds: four ways to go on, under the same kills.

Four ranks train with steps of 50 ms. Two seconds after the training has gone on, a rank that takes part is killed with
SIGKILL, at a random instant. *Pause* is the longest time without a new step, of each kill until the next one; *stop*
that without any step, new or done again; *ranks* are those that have made a step, in the mean; *of its speed* are the
new steps in a second, of those without kills.

    PYTHONPATH=. python benchmarks/going_on.py [--kills 200] [--ranks 4] [--arms ...]

The arm of torchft needs its nightly version (``pip install torchft-nightly``): with the release the others end, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from restart import BUDGET, OURS, PATIENCE_S, Arm, Mark

TORCHFT = "torchft, a plain loop"
ARMS = {
    "`launch --elastic --when-lost go-on`": [*OURS, *BUDGET, "--elastic", "--when-lost", "go-on"],
    "`launch --elastic`": [*OURS, *BUDGET, "--elastic"],
    "`launch --spares auto`": [*OURS, *BUDGET, "--spares", "auto"],
    TORCHFT: [],
}
BETWEEN_S = 2.0
UNDISTURBED_S = 10.0
PRESENT_S = 1.0
"""A process takes part that has made a step within this time."""


class TorchFT(Arm):
    """Replicas under torchft: each is started again when it has ended, as its documentation has a scheduler do it."""

    def __init__(self, ranks: int, folder: Path) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # read when it is imported
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=2000
        )
        port = self._lighthouse.address().rsplit(":", 1)[1]
        self._environment = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
            "RUST_LOG": "error",
        }
        (folder / "marks").mkdir(parents=True)
        self._watch(folder, ranks)
        self._spares = 0
        self._replicas = [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("going_on_torchft.py")
        with open(self.folder / "output", "ab") as output:
            return subprocess.Popen(
                [sys.executable, str(program), str(rank), str(self.folder / "marks")],
                env={**os.environ, **self._environment},
                stdout=output,
                stderr=output,
            )

    def has_ended(self) -> bool:
        """Never: what ends is started again."""
        return False

    def look_after(self) -> None:
        """Starts again what has ended."""
        for rank, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[rank] = self._start(rank)

    def end(self) -> None:
        """Ends all."""
        for replica in self._replicas:
            replica.kill()
            replica.wait()
        self._lighthouse.shutdown()


def new_steps(marks: list[Mark]) -> list[Mark]:
    """The first mark of each step that nobody had made before."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda each: each.seconds):
        if not found or mark.step > found[-1].step:
            found.append(mark)
    return found


@dataclass
class Measured:
    """What was seen of an arm.

    Attributes:
        pauses: The longest time without a new step after each kill, in seconds.
        stops: The same without any step.
        ranks: How many ranks have made each new step.
        speeds: New steps in a second, of those without kills; of each training.
    """

    pauses: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        """The row of the table."""
        pauses = sorted(self.pauses)
        figures = [statistics.median(pauses), pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))], pauses[-1]]
        figures += [max(self.stops)]
        shown = " | ".join(f"{each:.2f}" for each in figures)
        ranks, speed = statistics.mean(self.ranks), statistics.mean(self.speeds)
        return f"| {name} | {len(pauses)} | {shown} | {ranks:.1f} | {speed:.0%} |"


def measure(name: str, ranks: int, kills: int, seed: int, found: Measured) -> None:
    """Kills ranks of one training.

    Args:
        name: Of the arm.
        ranks: How many there are.
        kills: How often one is killed.
        seed: Which ones, and when.
        found: What is seen is added to this.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        arm = (
            TorchFT(ranks, Path(folder, "run"))
            if name == TORCHFT
            else Arm(ARMS[name], "tiny", ranks, Path(folder, "run"))
        )
        try:
            arm.train_on(0.0)
            began = time.monotonic()
            time.sleep(UNDISTURBED_S)
            times = [time.monotonic()]
            while len(times) <= kills:
                if (pid := victim(arm, times[-1], draw)) is None:
                    continue
                times.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
                print(f"{name}: kill {len(times) - 1}", file=sys.stderr, flush=True)
            time.sleep(BETWEEN_S)
            marks = arm.look()
        finally:
            arm.end()
    steps = new_steps(marks)
    before = [each for each in steps if began <= each.seconds < times[0]]
    during = [each for each in steps if times[1] <= each.seconds < times[-1]]
    for kill, following in zip(times[1:], [*times[2:], times[-1] + BETWEEN_S], strict=True):
        for of, kind in ((steps, found.pauses), (sorted(marks, key=lambda each: each.seconds), found.stops)):
            moments = [each.seconds for each in of if kill <= each.seconds < following]
            moments = [max(each.seconds for each in of if each.seconds < kill), *moments]
            kind.append(max((b - a for a, b in itertools.pairwise(moments)), default=following - kill))
    found.ranks += [sum(each.step == step.step for each in marks) for step in during]
    found.speeds.append(len(during) / (times[-1] - times[1]) / (len(before) / (times[0] - began)))


def victim(arm: Arm, killed_at: float, draw: random.Random) -> int | None:
    """The process to be killed now; ``None`` if it is too early, or only one is left.

    Args:
        arm: The training.
        killed_at: When the last one was killed.
        draw: Chooses.
    """
    deadline, reached = killed_at + PATIENCE_S, max(each.step for each in arm.look())
    while True:
        arm.look_after()
        since, now = arm.look_back(killed_at + 0.2), time.monotonic()
        gone_on = min((each.seconds for each in since if each.step > reached), default=math.inf)
        present = sorted({each.pid for each in since if each.seconds > now - PRESENT_S})
        if now > gone_on + BETWEEN_S and len(present) > 1:
            time.sleep(draw.random() * 0.1)
            return draw.choice(present)
        time.sleep(0.015)
        arm.wait(deadline)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in each row (default: %(default)s)")
    parser.add_argument("--each", type=int, default=50, help="kills before the next arm's turn (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--arms", nargs="*", choices=[*ARMS], default=[*ARMS])
    options = parser.parse_args()
    found = {name: Measured() for name in options.arms}
    if TORCHFT in found and importlib.util.find_spec("torchft") is None:
        print("torchft is not installed", file=sys.stderr)
        found.pop(TORCHFT)
    for turn in range(-(-options.kills // options.each)):
        for name, of_arm in found.items():
            measure(name, options.ranks, options.each, turn, of_arm)
    print("| | kills | pause, p50 | p99 | longest | stop, longest | ranks | of its speed |")
    print("|---|---|---|---|---|---|---|---|")
    for name, of_arm in found.items():
        print(of_arm.row(name))


if __name__ == "__main__":
    main()
