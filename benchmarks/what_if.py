"""Ten drills of ``report --what-if``: what a ledger predicts for another setting, and the real run with that.

Each drill is two real runs under ``launch`` with the same work, steps that sleep, and faults at the same times of
training: A with one setting, B with another. From the ledger of A alone comes the ETTR that B should have.

    PYTHONPATH=. python benchmarks/what_if.py DIR [--only save-rarely ...]

DIR keeps the run directories; what is finished there is not run again. On a machine with other work, how long a process
takes to start is not the same twice: start it with ``nice -n -10``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience.launch.report import read_run
from lightning_resilience.run.figures import figures_of
from lightning_resilience.run.goodput import START, TRAINING, share_of
from lightning_resilience.run.what_if import predict

PROGRAM = Path(__file__).with_name("what_if_program.py")
STEP_S = 0.15
STEPS = 3200
ENDED = 75  # by a signal: the same command goes on


@dataclass(frozen=True)
class Drill:
    """Two runs.

    Attributes:
        change: What is asked of the ledger of A.
        a: Options of A, see ``what_if_program.py``; ``timeout_s`` is that of a step.
        b: Those of B that differ.
        ranks: Of each run.
    """

    change: str
    a: dict[str, Any]
    b: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def options(self, run: str) -> dict[str, Any]:
        """All options of a run.

        Args:
            run: ``a`` or ``b``.
        """
        return {
            "steps": STEPS,
            "step_s": STEP_S,
            "save_every_s": 60,
            "faults": [],
            **self.a,
            **(self.b if run == "b" else {}),
        }


def kills(*seconds: float) -> list[tuple[float, str]]:
    """Faults that kill a rank."""
    return [(each, "kill") for each in seconds]


SLOW = {"async_save": False, "save_s": 3.0}
DRILLS = {
    "save more rarely": Drill("save_every=120", {"save_every_s": 20, "faults": kills(170, 330)}, {"save_every_s": 120}),
    "save more often": Drill(
        "save_every=20", {"save_every_s": 120, "faults": kills(110, 285, 400)}, {"save_every_s": 20}
    ),
    "save locally too": Drill("local=10", {"save_every_s": 120, "faults": kills(105, 230, 355)}, {"local_every_s": 10}),
    "save no more locally": Drill(
        "local=off", {"save_every_s": 120, "local_every_s": 10, "faults": kills(170, 330)}, {"local_every_s": None}
    ),
    "slow saves more rarely": Drill(
        "save_every=90", {"save_every_s": 15, "faults": kills(170, 330), **SLOW}, {"save_every_s": 90}
    ),
    "slow saves more often": Drill(
        "save_every=15", {"save_every_s": 90, "faults": kills(85, 260), **SLOW}, {"save_every_s": 15}
    ),
    "find hangs sooner": Drill(
        "hang_limit=15",
        {"save_every_s": 30, "timeout_s": 60, "faults": [(100, "hang"), (245, "hang")]},
        {"timeout_s": 15},
    ),
    "preempted": Drill(
        "save_every=20",
        {
            "save_every_s": 120,
            "faults": [(110, "sigterm"), (235, "kill"), (400, "sigterm")],
            "save_s": 2.0,
            "async_save": False,
        },
        {"save_every_s": 20},
    ),
    "roll back further": Drill("save_every=100", {"save_every_s": 20, "nan_at": [1050, 2300]}, {"save_every_s": 100}),
    "two ranks, two changes": Drill(
        "save_every=120 hang_limit=20",
        {"save_every_s": 30, "timeout_s": 45, "faults": [(100, "kill"), (230, "hang"), (360, "kill")]},
        {"save_every_s": 120, "timeout_s": 20},
        ranks=2,
    ),
}


def train(drill: Drill, run: str, run_dir: Path) -> None:
    """Runs A or B to its end, as often as it takes.

    Args:
        drill: The drill.
        run: ``a`` or ``b``.
        run_dir: Its run directory.
    """
    if (run_dir / "done").exists():
        return
    options = drill.options(run)
    launcher = [
        *(sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--recipe", "none"),
        *("--run-dir", str(run_dir), "--nproc-per-node", str(drill.ranks), "--in-job-restarts", "9"),
        *("--section-timeouts", f"step:{options.get('timeout_s', 60)}", str(PROGRAM), json.dumps(options)),
    ]
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "output", "a") as output:
        while code := subprocess.run(launcher, stdout=output, stderr=output, env=environment(), check=False).returncode:
            if code != ENDED:
                raise RuntimeError(f"{run_dir} ended with {code}: see {output.name}")
    (run_dir / "done").touch()


def outcome(drill: Drill, folder: Path) -> tuple[float, float, float, float]:
    """The ETTR of A, what its ledger predicts for B, that with starts and ends that took as long as in B, and B's.

    Args:
        drill: The drill.
        folder: Of its two run directories.
    """
    recorded, truth = read_run(folder / "a"), read_run(folder / "b")
    figures = figures_of(recorded.events, recorded.goodput)
    assert figures is not None
    predicted = predict(figures, drill.change).predicted
    own = {name: seconds / truth.goodput.ranks for name, seconds in truth.goodput.by_category.items()}
    known = {**predicted.seconds, **{name: own[name] for name in (*START, "teardown")}}
    return recorded.goodput.ettr, predicted.ettr, share_of(known, TRAINING), truth.goodput.ettr


def environment() -> dict[str, str]:
    """That of a run."""
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((root, *sys.path))}


def main() -> None:
    """Runs the drills and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*DRILLS], default=[*DRILLS], help="default: all")
    parser.add_argument("--parallel", type=int, default=20, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--apart", type=float, default=20.0, help="seconds between the starts of two drills (default: %(default)s)"
    )
    options = parser.parse_args()
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = []
        for name in options.only:
            for run in "ab":
                folder = options.dir / name.replace(" ", "-") / run
                runs.append(pool.submit(train, DRILLS[name], run, folder))
            time.sleep(options.apart)  # else faults at the same times have all of them start again at once
        for each in runs:
            each.result()
    print("| drill | what if | ETTR of A | predicted for B | B | difference | with the starts of B |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only:
        drill, folder = DRILLS[name], options.dir / name.replace(" ", "-")
        recorded, predicted, known, truth = (100 * each for each in outcome(drill, folder))
        numbers = f"{recorded:.2f} % | {predicted:.2f} % | {truth:.2f} %"
        print(f"| {name} | `{drill.change}` | {numbers} | {predicted - truth:+.2f} | {known - truth:+.2f} |")


if __name__ == "__main__":
    main()
