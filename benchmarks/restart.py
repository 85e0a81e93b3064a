"""From the kill of a rank to the next new step: restarts of this package with and without spares, and those of others.

In each arm a training runs under its launcher, and one of its ranks is killed with SIGKILL again and again, each time
after some new steps; the arms take turns. *First step* is the first one that any rank has made since, *new step* the
first one that no rank had made before.

    PYTHONPATH=. python benchmarks/restart.py [--kills 30] [--ranks 2 4] [--models tiny gpt] [--arms ...]

With ``--gpu`` the tiny model is on GPUs; ranks for which there is none share the first one, over gloo.
``--events N`` gives the run a past of so many events in its ledger; a month has some 10,000.
``--idle SECONDS`` measures instead what the spare processes of a training take while they wait.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_resilience.launch.channel import CHANNEL_VARIABLE
from lightning_resilience.launch.park import SPARE

PROGRAM = Path(__file__).with_name("restart_program.py")
OURS = (sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--recipe", "nemo", "--quiet")
BUDGET = ("--max-failures-per-day", "10000")
NVRX = ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-enable-nic-monitor=false", "--max-restarts=1000")
ARMS = {
    "`launch --spares off`": [*OURS, *BUDGET, "--spares", "off"],
    "`launch --spares auto`": [*OURS, *BUDGET, "--spares", "auto"],
    "`launch --elastic`": [*OURS, *BUDGET, "--elastic"],
    "`ft_launcher`, Lightning's checkpoints": [sys.executable, *NVRX],
    "`torchrun`, Lightning's checkpoints": [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1000"],
}
PATIENCE_S = 180.0
BETWEEN_S = 2.0
"""Between a recovery, and the moment when spares are there again, and the next kill."""


@dataclass(frozen=True)
class Mark:
    """A step that a rank has made.

    Attributes:
        seconds: When, in ``time.monotonic()``.
        step: Which.
        pid: Of its process.
    """

    seconds: float
    step: int
    pid: int


class Notes:
    """What a rank has noted.

    Args:
        path: Of its notes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.marks: list[Mark] = []

    def look(self) -> list[Mark]:
        """The steps that it has made since the last look."""
        content = b""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._read)
                content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [Mark(float(at), int(step), int(pid)) for at, step, pid in map(bytes.split, whole.splitlines())]
        self.marks += new
        return new


class Arm:
    """A training under a launcher.

    Args:
        command: The launcher with its options.
        model: ``tiny`` or ``gpt``.
        ranks: How many.
        folder: For all that it writes.
        gpu: Whether it trains on GPUs.
        events: How many are in the ledger of the run when it begins.
    """

    def __init__(
        self, command: list[str], model: str, ranks: int, folder: Path, gpu: bool = False, events: int = 0
    ) -> None:
        marks = folder / "marks"
        marks.mkdir(parents=True)
        self._watch(folder, ranks)
        self._taken = {"auto": ranks, "--elastic": 1}.get(command[-1], 0)  # spares, at each kill
        self._spares = ranks if self._taken else 0  # that were made until now
        is_ours = "lightning_resilience.launch.cli" in command
        if events:
            write_past(folder / "run" / "ledger", events)
        options = {"model": model, "marks": str(marks), "steps": 1_000_000, "ours": is_ours, "gpu": gpu}
        where = (
            ["--run-dir", str(folder / "run")] if is_ours else ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        )
        root = str(Path(__file__).parents[1])
        # Else torchrun's restarted gloo group meets the addresses of the one before in its store, and hangs.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(folder / "output", "w") as output:
            self._process = subprocess.Popen(
                [*command, *where, f"--nproc-per-node={ranks}", str(PROGRAM), json.dumps(options)],
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **own_store,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join((root, *sys.path)),
                },
                cwd=folder,
                start_new_session=True,
            )

    def _watch(self, folder: Path, ranks: int) -> None:
        self.folder, self._output = folder, folder / "output"
        self._notes = [Notes(folder / "marks" / f"rank-{rank}") for rank in range(ranks)]

    def look(self) -> list[Mark]:
        """All steps that ranks have made so far, rank by rank."""
        for notes in self._notes:
            notes.look()
        return [mark for notes in self._notes for mark in notes.marks]

    def look_back(self, since: float) -> list[Mark]:
        """The steps that ranks have made since then: to go through all of them takes longer and longer."""
        found = []
        for notes in self._notes:
            notes.look()
            found += itertools.takewhile(lambda mark: mark.seconds > since, reversed(notes.marks))
        return found

    def look_after(self) -> None:
        """What a launcher would do in between."""

    def train_on(self, seconds: float) -> None:
        """Waits until all ranks have made a step from now on, and each has a spare again; and for so long."""
        since, deadline = time.monotonic(), time.monotonic() + PATIENCE_S
        for notes in self._notes:
            while not notes.look() or notes.marks[-1].seconds < since:
                self.wait(deadline)
        self._await_spares(deadline)
        time.sleep(seconds)

    def _await_spares(self, deadline: float) -> None:
        logs = self.folder / "run" / "logs"
        while sum(log.read_text().count("is ready") for log in logs.glob("launcher-*")) < self._spares:
            self.wait(deadline)

    def kill(self, rank: int) -> tuple[float, float]:
        """Kills a rank; the seconds until the next step of its successor, and until that one's first new step."""
        for notes in self._notes:
            notes.look()
        notes = self._notes[rank]
        pid, since = notes.marks[-1].pid, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._spares += self._taken
        deadline, made = since + PATIENCE_S, []
        reached = max(each.marks[-1].step for each in self._notes)
        while not made or made[-1].step <= reached:
            made += [mark for mark in notes.look() if mark.pid != pid]
            self.wait(deadline)
        new = next(mark for mark in made if mark.step > reached)
        return made[0].seconds - since, new.seconds - since

    def spares(self) -> list[int]:
        """Waits until each rank has a spare that is ready; their processes."""
        self._await_spares(time.monotonic() + PATIENCE_S)
        children = psutil.Process(self._process.pid).children(recursive=True)
        kinds = {child.pid: child.environ().get(CHANNEL_VARIABLE, "").rpartition(",")[2] for child in children}
        return [pid for pid, kind in kinds.items() if kind == SPARE]

    def wait(self, deadline: float) -> None:
        """A moment; an error if the launcher has ended, or behind the deadline."""
        if self.has_ended() or time.monotonic() > deadline:
            raise RuntimeError(f"it has ended, or waits for something:\n{self._output.read_text()[-3000:]}")
        time.sleep(0.005)

    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it, and all that it has started."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.send_signal(signum)
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                continue
            break
        # What other launchers leave: processes of their own, and ranks, which have sessions of their own.
        for group in (self._process.pid, *(notes.marks[-1].pid for notes in self._notes if notes.marks)):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def write_past(folder: Path, events: int) -> None:
    """Writes the ledger of a run that has saved to node memory every minute, and has ended."""
    folder.mkdir(parents=True)
    began = time.time() - 60.0 * events - 3600.0
    with open(folder / "past-00000000.jsonl", "w") as file:
        for number in range(events):
            line = {
                **{"event": "saved", "time": began + 60.0 * number, "rank": 0, "node": "past", "fit": 0},
                **{"step": number, "seconds": 0.2, "reason": "local", "tier": "local", "count": 60},
                **{"generation": f"{number:08x}", "stall_s": 0.001, "skipped": 0, "failed": 0, "every_s": 1.0},
            }
            file.write(json.dumps(line) + "\n")


def measure(
    name: str, model: str, ranks: int, kills: int, seed: int, gpu: bool, events: int
) -> list[tuple[float, float]]:
    """The times of some kills, one after the other in one training."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(ARMS[name], model, ranks, Path(folder), gpu, events)
        found = []
        try:
            arm.train_on(BETWEEN_S)
            for _ in range(kills):
                found.append(arm.kill(draw.randrange(ranks)))
                print(f"{name}, {model}, {ranks} ranks: {found[-1][1]:.2f} s", file=sys.stderr, flush=True)
                arm.train_on(BETWEEN_S + draw.random())
        finally:
            arm.end()
    return found


def used(pid: int) -> tuple[int, int]:
    """How many nanoseconds of CPU time the threads of a process have used, and how often one has begun to run."""
    fields = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(each[0]) for each in fields), sum(int(each[2]) for each in fields)


def measure_idle(model: str, ranks: int, seconds: float) -> None:
    """Prints what spares that wait take of a core and of the memory."""
    with tempfile.TemporaryDirectory() as folder:
        arm = Arm(ARMS["`launch --spares auto`"], model, ranks, Path(folder))
        try:
            before = {pid: used(pid) for pid in arm.spares()}
            time.sleep(seconds)
            for pid, (earlier, runs) in before.items():
                now, runs_now = used(pid)
                sizes = re.findall(r"^(Private|Rss).*: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
                own, resident = (
                    sum(int(kb) for name, kb in sizes if name == which) >> 10 for which in ("Private", "Rss")
                )
                took, share = (now - earlier) / 1e6, (now - earlier) / seconds / 1e9
                print(
                    f"| {model} | {took:.2f} ms, {share:.4%} | {runs_now - runs} | {own} MB | {resident} MB |",
                    flush=True,
                )
        finally:
            arm.end()


def row(values: list[float]) -> str:
    """Median and 99th percentile (of few values, the largest)."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} | {ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]:.2f}"


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="in each cell (default: %(default)s)")
    parser.add_argument("--each", type=int, default=5, help="kills before the next arm's turn (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--models", nargs="*", choices=["tiny", "gpt"], default=["tiny", "gpt"])
    parser.add_argument("--arms", nargs="*", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--gpu", action="store_true", help="the tiny model on GPUs")
    parser.add_argument("--events", type=int, default=0, help="in the ledger of the run already (default: %(default)s)")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="measure spare processes that wait, for so long")
    options = parser.parse_args()
    if options.gpu and options.models != ["tiny"]:
        parser.error("--gpu needs --models tiny")
    if options.idle is not None:
        print(f"| model | CPU time in {options.idle:g} s, of a core | wake-ups | own memory | resident |")
        print("|---|---|---|---|---|")
        for model in options.models:
            measure_idle(model, options.ranks[0], options.idle)
        return
    print("| model | ranks | | first step, p50 | p99 | new step, p50 | p99 | of the first row |")
    print("|---|---|---|---|---|---|---|---|")
    for model in options.models:
        for ranks in options.ranks:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.arms}
            for turn in range(-(-options.kills // options.each)):
                for name in options.arms:
                    found[name] += measure(name, model, ranks, options.each, turn, options.gpu, options.events)
            base = statistics.median(new for _, new in found[options.arms[0]])
            for name, times in found.items():
                first, new = zip(*times, strict=True)
                ratio = statistics.median(new) / base
                print(f"| {model} | {ranks} | {name} | {row([*first])} | {row([*new])} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
