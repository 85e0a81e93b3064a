"""Runs that lose ranks again and again: ``launch`` with spare processes, ``--elastic``, and ``--when-lost go-on``.

Each run has options, ranks and kills that follow from its seed. Some kills hit a rank at a random instant, others at
one of the points of ``tests/kill_points.py``, some two ranks at once, and some come within a second of the one before.
In the end the run must be what an undisturbed run by Lightning alone is, and leave nothing behind; where ranks go on
without others, but for the order of sums.

    python -m tests.kill_campaign --kills 300 --seed 1
"""

from __future__ import annotations

import argparse
import getpass
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_resilience._processes import has_signal
from lightning_resilience.detect.hangs.rank_probe import STACKS_SIGNAL
from lightning_resilience.run.run_directory import RunDirectory
from lightning_resilience.run.settings import READS_AGAIN
from tests import harness, kill_points, test_logs
from tests.harness import command, lines
from tests.kill_points import ALL_POINTS, IN_A_RECOVERY, Aim
from tests.ledgers import read_ledger

AT_A_RANDOM_INSTANT = "at a random instant"
SOON = "within a second of the one before"
STOPPED = "stopped, with a limit of 5 s for a step"
LAST = "end of the fit"
GO_ON = "go-on"
MODES = {"spares": [], "elastic": ["--elastic"], GO_ON: ["--elastic", "--when-lost", "go-on", "--spares", "off"]}
POINTS = {GO_ON: [AT_A_RANDOM_INSTANT, SOON]}
"""For modes that are not hit at all points."""
_BATCHES, _EPOCHS = 16, 8
_PATIENCE_S = 120.0
_GONE_WITHIN_S = 10.0


@dataclass
class Account:
    """What runs have been through.

    Attributes:
        kills: By where they hit.
        ranks: How many were hit at once.
        answers: What followed.
        seconds: From each kill to the first step that no rank had made before, by what followed.
        redone: Steps that were made again after each recovery.
        problems: What was wrong.
    """

    kills: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    redone: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Account) -> None:
        """Adds what another run has been through."""
        self.kills += other.kills
        self.ranks += other.ranks
        self.answers += other.answers
        for answer, seconds in other.seconds.items():
            self.seconds.setdefault(answer, []).extend(seconds)
        self.redone += other.redone
        self.problems += other.problems

    def rows(self) -> Iterator[str]:
        """The account as tables."""
        yield "| kills | |\n|---|---|"
        yield from (f"| {point} | {count} |" for point, count in sorted(self.kills.items()))
        yield from (f"| {count} at once | {times} |" for count, times in sorted(self.ranks.items()))
        yield f"| all | {sum(self.kills.values())} |\n"
        yield "| answer | times | kill to new step, p50 | p99 |\n|---|---|---|---|"
        for answer, times in sorted(self.answers.items()):
            seconds = sorted(self.seconds.get(answer, []))
            last = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))] if seconds else 0.0
            yield f"| {answer} | {times} | {statistics.median(seconds or [0.0]):.2f} | {last:.2f} |"
        redone = sorted(self.redone) or [0]
        yield f"\nsteps made again: {statistics.mean(redone):.1f} on average, {redone[-1]} at most"
        yield from self.problems


def options_of(chance: random.Random) -> dict[str, Any]:
    """A training."""
    trainer: dict[str, Any] = {"devices": chance.choice([2, 2, 2, 3, 3, 4]), "max_epochs": _EPOCHS}
    trainer["accumulate_grad_batches"] = chance.choice([1, 1, 2])
    if chance.random() < 0.5:
        trainer["gradient_clip_val"] = 0.1
    options = {
        "trainer": trainer,
        "batches": _BATCHES,
        "data": chance.choice(["shuffle", "generator"]),
        "workers": chance.choice([0, 1, 2]),
        "batch_norm": chance.random() < 0.5,
        "dropout": chance.choice([0.0, 0.2]),
        "seeded_apart": chance.random() < 0.5,
        "bucket_cap_mb": 0.001,
        "validation": True,
        "digests": True,
        "step_s": 0.02,
        "callbacks": [],
        "keeps_nothing": chance.random() < 0.75,  # else the state of the last boundary is not saved after a loss
    }
    if chance.random() < 0.4:
        options["lightning_callbacks"] = {"EMAWeightAveraging": {"decay": 0.9}}
    if chance.random() < 0.3:
        options["loggers"] = ["CSVLogger", "TensorBoardLogger"]
    if chance.random() < 0.4:  # else those of the recipe
        options |= {
            "callbacks": ["auto_resume", "local_checkpoint"],
            "save_every": 7,
            "local": {"every_n_train_steps": 3},
        }
    return options


def options_of_go_on(chance: random.Random) -> dict[str, Any]:
    """A training whose sums differ so little by their order that it shows whether it was the same one."""
    trainer = {"devices": 4, "max_epochs": _EPOCHS, "precision": "64-true"}
    options = {**options_of(chance), "validation": False, "data": "shuffle", "dropout": 0.2}
    return {**options, "trainer": {**options["trainer"], **trainer}, "lightning_callbacks": {}, "loggers": []}


def _differences_but_for_rounding(config: dict[str, Any], undisturbed: dict[str, Any]) -> Iterator[str]:
    """In what a run with changing numbers of ranks differs from one with all: samples of each step, state, metrics."""
    ours, theirs = ({**config, "log": each["log"]} for each in (config, undisturbed))
    if (trained := samples_of_steps(ours)) != (wanted := samples_of_steps(theirs)):
        wrong = [step for step in trained.keys() | wanted.keys() if trained.get(step) != wanted.get(step)]
        yield f"samples of {len(wrong)} steps differ, such as {min(wrong)}: {trained.get(min(wrong))}"
    state, known = map(harness.state_at_the_end, (config, undisturbed))
    for name, tensor in known.items():
        if not torch.allclose(state[name], tensor, rtol=1e-6, atol=1e-9):
            yield f"{name} differs by up to {(state[name] - tensor).abs().max().item():.1e}"
    metrics, known_metrics = (harness.result(each)[0]["metrics"] for each in (config, undisturbed))
    for name in ("train_loss_epoch", "train_metric"):
        if abs(metrics[name] - known_metrics[name]) > 1e-6 * abs(known_metrics[name]):
            yield f"{name} is {metrics[name]}, not {known_metrics[name]}"


def samples_of_steps(config: dict[str, Any]) -> dict[int, list[int]]:
    """What all ranks together have trained on, by steps, each sample once."""
    found: dict[int, set[int]] = {}
    for rank in range(config["trainer"]["devices"]):
        for _, step, ids in lines(Path(f"{config['log']}.{rank}")):
            found.setdefault(step, set()).update(ids)
    return {step: sorted(ids) for step, ids in sorted(found.items())}


def _differences_of_logs(ours: Path, theirs: Path) -> Iterator[str]:
    """In what Lightning's loggers have written, each row once."""

    def shown(folder: Path) -> Any:
        return test_logs.of_the_training(test_logs.shown(folder))

    readers: dict[str, Any] = {"CSVLogger": test_logs.rows, "TensorBoardLogger": shown}
    for kind, read in readers.items():
        if (theirs / kind).exists() and read(ours) != read(theirs):
            yield f"{kind} has other rows"


def draw_points(chance: random.Random, count: int, among: Sequence[str] | None = None) -> list[str]:
    """Where a run is hit."""
    points = chance.choices(among or [AT_A_RANDOM_INSTANT] * 6 + [SOON] * 6 + ALL_POINTS, k=count)
    return sorted(points, key=LAST.__eq__)


class Disturbed:
    """A run under ``launch``.

    Args:
        config: Of the test program.
        mode: One of :data:`MODES`.
        folder: For all that it writes.
        chance: For what is chosen at random.
        points: Where it is hit.
    """

    def __init__(
        self, config: dict[str, Any], mode: str, folder: Path, chance: random.Random, points: Sequence[str]
    ) -> None:
        self._config, self._folder, self._chance = config, folder, chance
        self._world_size = config["trainer"]["devices"]
        self._points = points
        self._goes_on = mode == GO_ON
        self._temporary = tempfile.mkdtemp(prefix="kills-", dir="/tmp")  # a path of a socket is short
        self._memory = Path(tempfile.mkdtemp(prefix="kills-", dir="/dev/shm"))
        self._killed = Path(config["kill_points"])
        self._killed.mkdir()
        self._output = folder / "output"
        launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", *MODES[mode]]
        if STOPPED in points:
            launch += ["--section-timeouts", "step:5"]
        if os.geteuid() == 0:  # its node memory is another folder, so that what is left there is known to be its own
            mount = 'mount --bind "$0" /dev/shm && exec "$@"'
            launch = ["unshare", "--mount", "sh", "-c", mount, str(self._memory), *launch]
        launch += ["--in-job-restarts", "1000", "--max-failures-per-day", "10000", "--run-dir", config["run_dir"]]
        launch += ["--read-again", chance.choice(READS_AGAIN)]
        launch += ["--nproc-per-node", str(self._world_size), *command(config)[1:]]
        root = str(Path(__file__).parents[1])
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": root,
            "TMPDIR": self._temporary,
            "PYTHONWARNINGS": "ignore",
        }
        with open(self._output, "w") as output:
            self._launch = subprocess.Popen(
                launch, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
            )

    def survive(self) -> Account:
        """Kills ranks, and says what came of it."""
        problems: list[str] = []
        try:
            all(self._kill(number, point) for number, point in enumerate(self._points))
            reached: list[int] = []
            while not self._wait_for(self._is_over) and self._reached() != reached:
                reached = self._reached()
            if self._is_over():
                problems += [f"exit code {self._launch.returncode}"] if self._launch.returncode else []
            else:
                problems.append("hangs")
                self._show_stacks()
        finally:
            problems += self._left()
            self._end()
        if self._launch.returncode == 0:
            options = {name: each for name, each in self._config.items() if name not in ("run_dir", "out", "log")}
            undisturbed = self._undisturbed(options) if self._goes_on else harness.reference(**options)
            compare = _differences_but_for_rounding if self._goes_on else harness.differences
            problems += compare(self._config, undisturbed)
            problems += _differences_of_logs(*(Path(each["run_dir"]).parent for each in (self._config, undisturbed)))
        account = self._account()
        account.problems = problems
        return account

    def _undisturbed(self, options: dict[str, Any]) -> dict[str, Any]:
        """A run that leaves its final state."""
        folder = self._folder / "undisturbed"
        folder.mkdir()
        config = {**options, "callbacks": ["preemption", "auto_resume"], "kill_points": None}
        config |= {name: str(folder / name) for name in ("out", "log")} | {"run_dir": str(folder / "run")}
        codes, output = harness.run(config, folder)
        assert set(codes) == {0}, output
        return config

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _kill(self, number: int, point: str) -> bool:
        """Kills at a point; whether there may be another one."""
        count = 2 if self._world_size > 2 and (self._chance.random() < 0.25 or point == kill_points.SKEWED) else 1
        ranks = self._chance.sample(range(self._world_size), count)
        new_steps = self._chance.randint(1, 6)
        if point == SOON and number:
            time.sleep(self._chance.uniform(0.0, 1.0))
            return self._kill_now(point, ranks)
        wanted = max(self._reached()) + new_steps
        furthest = max if self._goes_on else min  # of ranks that are absent nothing is heard
        if not self._wait_for(lambda: self._is_over() or furthest(self._reached()) >= wanted) or self._is_over():
            return False
        if point in (AT_A_RANDOM_INSTANT, SOON, STOPPED):
            # A spare process is made again within some seconds.
            time.sleep(8.0 if point == STOPPED else self._chance.uniform(0.0, 0.1))
            return self._kill_now(STOPPED if point == STOPPED else AT_A_RANDOM_INSTANT, ranks)
        first, *others = ranks
        recorded = self._recorded()
        Aim(point, self._chance.choice([0, 0, 1, 2]) if point not in IN_A_RECOVERY else 0, others).write(
            self._killed, first
        )
        if point in IN_A_RECOVERY:
            self._kill_now("before that", [self._chance.randrange(self._world_size)])
            recorded += 1
        self._wait_for(
            lambda: self._is_over() or self._recorded() > recorded or min(self._reached()) > wanted + _BATCHES
        )
        if self._recorded() == recorded:
            (self._killed / f"aim-{first}").unlink(missing_ok=True)
            self._kill_now(AT_A_RANDOM_INSTANT, ranks)
        return not self._is_over()

    def _kill_now(self, point: str, ranks: Sequence[int]) -> bool:
        found = self._processes()
        pids = [self._chance.choice(found[rank]) for rank in ranks if found.get(rank)]
        if pids and not self._is_over():
            kill_points.record(self._killed, point, ranks)
            for process in pids:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP if point == STOPPED else signal.SIGKILL)
        return not self._is_over()

    def _processes(self) -> dict[int, list[psutil.Process]]:
        """The processes of each rank: the one whose script has begun, else all that there are, spares too."""
        found: dict[int, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launch.pid).children(recursive=True):
                with suppress(psutil.Error):
                    environment = process.environ()
                    if "lightning_resilience.launch.worker" in process.cmdline() and "RANK" in environment:
                        if process.parent() is not None and "RANK" in process.parent().environ():
                            continue  # a data-loader worker
                        found.setdefault(int(environment["RANK"]), []).append(process)
        for rank, processes in found.items():
            with suppress(FileNotFoundError):
                pid = int((self._killed / f"pid-{rank}").read_text())
                found[rank] = [each for each in processes if each.pid == pid] or processes
        return found

    def _recorded(self) -> int:
        with suppress(FileNotFoundError):
            return len((self._killed / "killed").read_text().splitlines())
        return 0

    def _reached(self) -> list[int]:
        """The furthest step of each rank."""
        paths = [Path(f"{self._config['log']}.metrics.{rank}") for rank in range(self._world_size)]
        return [max((line[2] for line in lines(path)), default=-1) for path in paths]

    def _kills(self) -> list[dict[str, Any]]:
        return lines(self._killed / "killed")

    def _is_over(self) -> bool:
        return self._launch.poll() is not None

    def _wait_for(self, condition: Any, within_s: float = _PATIENCE_S) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _own_processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("TMPDIR") == self._temporary and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _left(self) -> Iterator[str]:
        """What the launch has left behind. A process of it may be about to end."""
        if not self._is_over():
            return
        self._wait_for(lambda: not self._own_processes(), _GONE_WITHIN_S)
        for process in self._own_processes():
            with suppress(psutil.NoSuchProcess):
                yield f"process {process.pid} is left: {' '.join(process.cmdline())[:200]}"
        for path in Path(self._temporary).rglob("*"):
            if path.name == f"torchinductor_{getpass.getuser()}":  # torch's cache
                continue
            yield f"{path} is left"
        for path in self._memory.rglob("*"):
            # A loader's worker that is killed right after it has opened a tensor's memory has not unlinked it yet.
            if not path.is_dir() and not path.name.startswith("torch_"):
                yield f"{path} is left: {path.stat().st_size} bytes"

    def _end(self) -> None:
        if self._launch.poll() is None:
            self._launch.kill()
            self._launch.wait()
        for process in self._own_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for folder in (self._temporary, self._memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _show_stacks(self) -> None:
        for process in self._own_processes():
            if has_signal(process.pid, STACKS_SIGNAL, "SigCgt:"):
                process.send_signal(STACKS_SIGNAL)
        time.sleep(1.0)
        with open(self._output, "a") as output:
            for path in self._memory.rglob("*.stacks"):
                output.write(f"\n{path.name}:\n{path.read_text()}")

    def _events(self, name: str) -> list[dict[str, Any]]:
        ledger = RunDirectory(self._config["run_dir"]).ledger
        return [event for event in read_ledger(ledger) if event["event"] == name] if Path(ledger).exists() else []

    def _account(self) -> Account:
        account, kills = Account(), self._kills()
        saved = [event["time"] for event in self._events("saved") if event["reason"] == "after a loss"]
        marks = sorted(
            (line[0], line[2])
            for rank in range(self._world_size)
            for line in lines(Path(f"{self._config['log']}.metrics.{rank}"))
            if line[2] is not None
        )
        for kill, after in zip(kills, [*(each["time"] for each in kills[1:]), float("inf")], strict=False):
            account.kills[kill["point"]] += 1
            account.ranks[len(kill["ranks"])] += 1
            since = kill["time"]
            happened = {
                name
                for name in ("replaced", "start", "fresh")
                for event in self._events(name)
                if since < event["time"] < after
            }
            reached = max((step for at, step in marks if at < since), default=-1)
            seconds = next((at - since for at, step in marks if since < at < after and step > reached), None)
            again = next((step for at, step in marks if since + 0.1 < at < after), None)
            answer = "none before the next kill"
            if seconds is not None:
                answer = (
                    "replaced" if "replaced" in happened else "restarted" if "start" in happened else "a spare was hit"
                )
                answer += ", from scratch" if "fresh" in happened else ""
                answer += ", from the last boundary" if any(since < each < after for each in saved) else ""
                account.seconds.setdefault(answer, []).append(seconds)
                account.redone.append(max(0, reached + 1 - (again or 0)))
            account.answers[answer] += 1
        return account


def survive(folder: Path, seed: str, points: Sequence[str], mode: str, **options: Any) -> Account:
    """A run with kills at these points.

    Args:
        folder: A new one, for all that it writes.
        seed: For the rest.
        points: :data:`AT_A_RANDOM_INSTANT`, :data:`SOON`, :data:`STOPPED`, or some of :data:`ALL_POINTS`.
        mode: One of :data:`MODES`.
        **options: Of the test program, in the place of those that follow from the seed.
    """
    chance = random.Random(seed)
    config = {**(options_of_go_on(chance) if mode == GO_ON else options_of(chance)), **options}
    config |= {name: str(folder / name) for name in ("out", "log", "kill_points")} | {"run_dir": str(folder / "run")}
    return Disturbed(config, mode, folder, chance, points).survive()


def main() -> None:
    """Runs until there were so many kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--each", type=int, default=10, help="kills in a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="*", choices=[*MODES], default=[*MODES])
    parser.add_argument("--points", nargs="*", choices=[AT_A_RANDOM_INSTANT, SOON, STOPPED, *ALL_POINTS])
    parser.add_argument("--out", type=Path, help="what runs with a problem have written is left there")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-campaign-"))
    harness.SHARED = folder
    accounts = {mode: Account() for mode in options.modes}
    number = 0
    while sum(sum(each.kills.values()) for each in accounts.values()) < options.kills:
        mode, seed = options.modes[number % len(options.modes)], f"{options.seed}-{number}"
        number += 1
        chance = random.Random(seed)
        points = draw_points(chance, options.each, options.points or POINTS.get(mode))
        own = folder / seed
        own.mkdir()
        began = time.monotonic()
        account = survive(own, seed, points, mode)
        took = time.monotonic() - began
        print(f"{mode} {seed}: {sum(account.kills.values())} kills, {took:.0f} s {account.problems or ''}", flush=True)
        accounts[mode].add(account)
        if account.problems and options.out:
            shutil.copytree(own, options.out / seed, symlinks=True, ignore=lambda _, names: [])
        shutil.rmtree(own)
    for mode, account in accounts.items():
        print(f"\n## {mode}\n", *account.rows(), sep="\n")
    shutil.rmtree(folder)
    sys.exit(any(each.problems for each in accounts.values()))


if __name__ == "__main__":
    main()
