"""Trains ``examples/gpt.py`` twice, once undisturbed and once under fire, and compares the final weights bit by bit."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lightning_resilience.ledger import read_ledger
from lightning_resilience.run_directory import RunDirectory

GPT = Path(__file__).with_name("gpt.py")
LAUNCHER = Path(sysconfig.get_path("scripts")) / "lightning-resilience"
PROCESSES = 2
SAVE_EVERY = 20
PATIENCE_S = 180.0
VANISH_WITHIN_S = 15.0

STARTED = time.monotonic()
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ
BOLD, DIM, RED, GREEN = ("\33[1m", "\33[2m", "\33[31m", "\33[32m") if COLOURS else ("", "", "", "")
PLAIN = "\33[0m" if COLOURS else ""


def say(text: str, style: str = "") -> None:
    print(f"{DIM}{time.monotonic() - STARTED:5.0f} s{PLAIN}  {style}{text}{PLAIN}", flush=True)


def explain(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}\n", flush=True)


class Failed(Exception):
    """Something that this demo promises did not happen."""


class Training:
    """A training in processes of its own, watched from outside: by what it prints and by its ledger.

    Args:
        command: Starts the training, or resumes it.
        log: The file for everything that it prints.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.command = command
        self.log = log
        self.step = 0
        self.furthest_step = 0
        self.weights: str | None = None
        self.writes: list[str] = []
        self._is_writing = False

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.launcher = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches this demo alone, which then ends what it has started
        )
        self._reader = threading.Thread(target=self._read, args=[self.launcher.stdout], daemon=True)
        self._reader.start()

    def _read(self, output: Any) -> None:
        with open(self.log, "a") as log:
            for line in output:
                log.write(line)
                log.flush()
                self._notice(line.rstrip())

    def _notice(self, line: str) -> None:
        if match := re.match(r"step +(\d+) of \d+ ", line):
            self.step = int(match[1])
            self.furthest_step = max(self.furthest_step, self.step)
            if self.step == 1 or self.step % SAVE_EVERY == 0:
                say(line, DIM)
        elif match := re.match(r"sha256 of the weights: (\w+)", line):
            self.weights = match[1]
            self._is_writing = False
        elif line == "The model writes:":
            self._is_writing = True
        elif self._is_writing:
            self.writes.append(line)

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.launcher.poll() is not None and not self._reader.is_alive() and not condition():
                raise Failed(f"{what}: the training has ended before, with exit code {self.launcher.returncode}")
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {PATIENCE_S:.0f} s")
            time.sleep(0.02)

    def wait_for_end(self) -> int:
        """Waits for the end and returns the exit code."""
        try:
            exit_code = self.launcher.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"the training has not ended within {PATIENCE_S:.0f} s") from None
        self._reader.join(VANISH_WITHIN_S)
        return exit_code

    def finish(self) -> None:
        """Waits for the end, with success."""
        if (exit_code := self.wait_for_end()) != 0 or self.weights is None:
            raise Failed(f"the training ended with exit code {exit_code} and no weights")
        say(f"finished; sha256 of the weights: {self.weights[:16]}...", BOLD)

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything below it, every process after its parent."""
        try:
            launcher = psutil.Process(self.launcher.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The training processes, by rank."""
        found: dict[str, psutil.Process] = {}
        for process in self.processes():
            try:
                rank = process.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None:
                found.setdefault(rank, process)  # its data-loader workers have the same environment, and come later
        return [found[rank] for rank in sorted(found)]


class ResilientTraining(Training):
    """The same under ``lightning-resilience launch``."""

    def __init__(self, run_dir: Path, script: list[str], log: Path) -> None:
        command = [str(LAUNCHER), "launch", f"--run-dir={run_dir}", f"--nproc-per-node={PROCESSES}", *script]
        super().__init__(command, log)
        self.run_directory = RunDirectory(run_dir)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_directory.ledger) if event["event"] == name]

    def relaunch(self) -> None:
        say("         the same command again")
        self.start()


def kill_one_worker(training: ResilientTraining) -> None:
    worker = training.workers()[1]
    say(f"         kill -9 {worker.pid}, which is rank 1 of {PROCESSES}")
    worker.kill()


def kill_all_workers(training: ResilientTraining) -> None:
    workers = training.workers()
    say(f"         kill -9 {' '.join(str(worker.pid) for worker in workers)}, which are all {PROCESSES} ranks")
    for worker in workers:
        worker.kill()


def terminate_and_relaunch(training: ResilientTraining) -> None:
    terminate(training)
    training.relaunch()


def terminate(training: ResilientTraining) -> None:
    say(f"         kill -TERM {training.launcher.pid}, the launcher")
    training.launcher.terminate()
    if (exit_code := training.wait_for_end()) != 75:
        raise Failed(f"the launcher ended with {exit_code}, not with 75")
    step = training.events("interrupted")[-1]["step"]
    say(f"         all ranks stopped together and saved step {step}; exit code 75: interrupted, run me again")


def kill_launcher_and_relaunch(training: ResilientTraining) -> None:
    processes = training.processes()
    say(f"         kill -9 {training.launcher.pid}, the launcher")
    killed_at = time.monotonic()
    training.launcher.kill()
    _, alive = psutil.wait_procs(processes, VANISH_WITHIN_S)
    if alive:
        raise Failed(f"{len(alive)} processes have outlived their launcher by {VANISH_WITHIN_S:.0f} s")
    training.wait_for_end()
    say(f"         its other {len(processes) - 1} processes were gone {time.monotonic() - killed_at:.1f} s later")
    training.relaunch()


def corrupt_newest_checkpoint_and_relaunch(training: ResilientTraining) -> None:
    terminate(training)
    newest = Path(training.events("saved")[-1]["path"])
    middle = newest.stat().st_size // 2
    with open(newest, "r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    say(f"         one bit of the newest checkpoint flipped: {newest.name}, byte {middle}")
    training.relaunch()
    training.wait_until(lambda: training.events("quarantined"), "the damaged checkpoint is noticed")
    say("         the damage was noticed: the checkpoint is in quarantine, the one before it is taken")


def end_all() -> None:
    """Leaves no process behind."""
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            pass
    psutil.wait_procs(processes, VANISH_WITHIN_S)


@dataclass(frozen=True)
class Fault:
    name: str
    inflict: Callable[[ResilientTraining], None]


FAULTS = [
    Fault("SIGKILL of one worker", kill_one_worker),
    Fault("SIGKILL of all workers", kill_all_workers),
    Fault("SIGTERM, then relaunch", terminate_and_relaunch),
    Fault("SIGKILL of the launcher, then relaunch", kill_launcher_and_relaunch),
    Fault("newest checkpoint corrupted, then relaunch", corrupt_newest_checkpoint_and_relaunch),
]


@dataclass(frozen=True)
class Result:
    fault: str
    resumed_from: int
    steps_redone: int
    seconds_lost: float


def drill(training: ResilientTraining, fault: Fault, title: str, at_step: int) -> Result:
    """Waits for ``at_step``, inflicts a fault, and waits until the training is further than it was."""
    training.wait_until(lambda: training.step >= at_step, f"the training reaches step {at_step}")
    starts = len(training.events("resumed") + training.events("fresh"))
    say(f"step {training.step}: {title}: {fault.name}", BOLD)
    inflicted_at = time.monotonic()
    fault.inflict(training)
    training.wait_until(lambda: len(training.events("resumed") + training.events("fresh")) > starts, "a resume")
    reached = training.furthest_step
    resumed_from = int(training.events("resumed")[-1]["step"])
    say(f"         resumed from step {resumed_from}; it had got to step {reached}")
    training.wait_until(lambda: training.furthest_step > reached, f"the training gets beyond step {reached}")
    result = Result(fault.name, resumed_from, reached - resumed_from, time.monotonic() - inflicted_at)
    say(f"         back after {result.seconds_lost:.1f} s, {result.steps_redone} steps redone", GREEN)
    return result


def print_table(faults: list[Fault], results: list[Result]) -> None:
    rows = [["fault", "recovered", "resumed from", "steps redone", "seconds lost"]]
    for index, fault in enumerate(faults):
        if index < len(results):
            result = results[index]
            cells = [f"step {result.resumed_from}", str(result.steps_redone), f"{result.seconds_lost:.1f}"]
            rows.append([fault.name, "yes", *cells])
        else:
            rows.append([fault.name, "NO" if index == len(results) else "not tried", "-", "-", "-"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def introduce(faults: list[Fault], out: Path, about: str) -> None:
    explain("What you are about to see")
    text = (
        f"A small GPT learns to write Python, in {PROCESSES} processes of this machine. It is trained twice: once "
        f"undisturbed, and once under `lightning-resilience launch` while this demo kills it in {len(faults)} ways. "
        "Every time it has to recover, and in the end the weights of both trainings must be the same, bit for bit. "
        f"This takes about {about}. Everything that is written goes to {out}."
    )
    print(textwrap.fill(text, 110))


def conclude(undisturbed: Training, disturbed: ResilientTraining) -> int:
    """Compares the final weights and returns the exit code."""
    print("\n  Steps redone: those between the checkpoint and the fault.")
    print("  Seconds lost: from the fault until the training was further than it had been.\n")
    print(f"  sha256 of the final weights, undisturbed: {undisturbed.weights}")
    print(f"  sha256 of the final weights, under fire:  {disturbed.weights}")
    if undisturbed.weights != disturbed.weights:
        print(f"\n  {RED}{BOLD}The final weights DIFFER.{PLAIN}")
        return 1
    print(f"\n  {GREEN}{BOLD}The final weights are bitwise identical.{PLAIN}")
    print("\n  What the model writes after so short a training:\n")
    print("".join(f"    {line}\n" for line in disturbed.writes))
    run_dir = os.path.relpath(disturbed.run_directory.path)
    print(f"  The whole story, from the run's own ledger: {os.path.relpath(LAUNCHER)} report {run_dir}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two of the faults")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up below

    faults, steps = (FAULTS[0:3:2], 120) if options.quick else (FAULTS, 240)
    out, gpt = options.out, os.path.relpath(GPT)
    for name in ("undisturbed", "disturbed", "run"):  # of an earlier demo
        shutil.rmtree(out / name, ignore_errors=True)
        (out / f"{name}.log").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    introduce(faults, out, "a minute" if options.quick else "4 minutes")

    arguments = [f"--steps={steps}", f"--save-every={SAVE_EVERY}", "--print-every=1", "--accelerator=cpu"]
    if options.quick:
        arguments += ["--layers=2", "--width=96"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}"]
    undisturbed = Training([*torchrun, gpt, f"--out={out / 'undisturbed'}", *arguments], out / "undisturbed.log")
    disturbed = ResilientTraining(out / "run", [gpt, f"--out={out / 'disturbed'}", *arguments], out / "disturbed.log")
    training: Training = undisturbed
    results: list[Result] = []
    try:
        explain(f"1. Undisturbed, and without lightning-resilience: torchrun --nproc-per-node {PROCESSES} {gpt}")
        undisturbed.start()
        undisturbed.finish()

        explain(f"2. The same under fire: lightning-resilience launch --nproc-per-node {PROCESSES} {gpt}")
        training = disturbed
        disturbed.start()
        for number, fault in enumerate(faults, start=1):
            # A while after a save, so that there are steps to lose.
            at_step = 2 * number * SAVE_EVERY + SAVE_EVERY // 3
            results.append(drill(disturbed, fault, f"fault {number} of {len(faults)}", at_step))
        disturbed.finish()
    except Failed as failure:
        say(f"FAILED: {failure}. All that the training has printed is in {training.log}; its last lines:", RED)
        print("".join(f"  | {line}\n" for line in training.log.read_text(errors="replace").splitlines()[-40:]))
        if training is disturbed:
            print_table(faults, results)
        return 1
    except KeyboardInterrupt:
        say("Interrupted; ending what was started.")
        return 130
    finally:
        end_all()

    explain("3. The result")
    print_table(faults, results)
    return conclude(undisturbed, disturbed)


if __name__ == "__main__":
    sys.exit(main())
