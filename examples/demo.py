"""Trains a small GPT twice, once undisturbed and once with ten faults, and compares the final weights bit by bit."""

from __future__ import annotations

import argparse
import json
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

from lightning_resilience import read_ledger
from lightning_resilience._formatting import table
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.detect.hangs.verdict import Verdict
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.run_directory import RunDirectory

GPT = Path(__file__).with_name("gpt.py")
DRILL = Path(__file__).with_name("drill.py")
LAUNCHER = Path(sysconfig.get_path("scripts")) / "lightning-resilience"
PROCESSES = 2
SAVE_EVERY = 20
STEP_LIMIT_S = 5
SECTION_TIMEOUTS = f"setup:60,step:{STEP_LIMIT_S},checkpointing:60,out_of_section:20"
HUNG_RANK = 1
PATIENCE_S = 180.0
VANISH_WITHIN_S = 15.0

STARTED = time.monotonic()
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ
BOLD, DIM, RED, GREEN = ("\33[1m", "\33[2m", "\33[31m", "\33[32m") if COLOURS else ("", "", "", "")
PLAIN = "\33[0m" if COLOURS else ""


def say(text: str, style: str = "") -> None:
    print(f"{DIM}{time.monotonic() - STARTED:5.0f} s{PLAIN}  {style}{text}{PLAIN}", flush=True)


def say_more(text: str) -> None:
    """Prints more text for the line before."""
    first, *others = textwrap.wrap(text, 92, break_long_words=False, break_on_hyphens=False)
    say(f"         {first}")
    for line in others:
        print(f"{'':18}{line}", flush=True)


def explain(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}\n", flush=True)


class Failed(Exception):
    """Something that this demo promises did not happen."""


class Training:
    """A training in processes of its own, watched from outside, through its output and its ledger.

    Args:
        command: The command that starts the training, or resumes it.
        log: The file for everything that the training prints.
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
            start_new_session=True,  # a Ctrl-C reaches only this demo, which then ends its processes
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
        """Waits for the end; raises ``Failed`` if the training has not succeeded."""
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
        command = [str(LAUNCHER), "launch", f"--run-dir={run_dir}", f"--nproc-per-node={PROCESSES}"]
        super().__init__([*command, f"--section-timeouts={SECTION_TIMEOUTS}", *script], log)
        self.run_directory = RunDirectory(run_dir)

    def events(self, name: str) -> list[Any]:
        return [event for event in read_ledger(self.run_directory.path) if event.name == name]

    def hangs(self) -> list[Any]:
        """The hangs that the run's watchdog has found."""
        return [event for event in self.events("fault") if event.kind == "hang"]

    def relaunch(self) -> None:
        say_more("the same command again")
        self.start()


def kill_one_worker(training: ResilientTraining) -> None:
    worker = training.workers()[1]
    say_more(f"kill -9 {worker.pid}, which is rank 1 of {PROCESSES}")
    worker.kill()


def kill_all_workers(training: ResilientTraining) -> None:
    workers = training.workers()
    say_more(f"kill -9 {' '.join(str(worker.pid) for worker in workers)}, which are all {PROCESSES} ranks")
    for worker in workers:
        worker.kill()


def terminate_and_relaunch(training: ResilientTraining) -> None:
    terminate(training)
    training.relaunch()


def terminate(training: ResilientTraining) -> None:
    say_more(f"kill -TERM {training.launcher.pid}, the launcher")
    training.launcher.terminate()
    if (exit_code := training.wait_for_end()) != 75:
        raise Failed(f"the launcher ended with {exit_code}, not with 75")
    step = training.events("interrupted")[-1].step
    say_more(f"all ranks stopped together and saved step {step}; exit code 75: interrupted, run me again")


def kill_launcher_and_relaunch(training: ResilientTraining) -> None:
    kill_launcher(training)
    training.relaunch()


def kill_launcher(training: ResilientTraining) -> None:
    processes = training.processes()
    say_more(f"kill -9 {training.launcher.pid}, the launcher")
    killed_at = time.monotonic()
    training.launcher.kill()
    _, alive = psutil.wait_procs(processes, VANISH_WITHIN_S)
    if alive:
        raise Failed(f"{len(alive)} processes have outlived their launcher by {VANISH_WITHIN_S:.0f} s")
    training.wait_for_end()
    say_more(f"its other {len(processes) - 1} processes were gone {time.monotonic() - killed_at:.1f} s later")


def corrupt_newest_checkpoint_and_relaunch(training: ResilientTraining) -> None:
    terminate(training)
    newest = Path(training.events("saved")[-1].path)
    byte = flip_bit(newest)
    say_more(f"one bit of the newest checkpoint flipped: {newest.name}, byte {byte}")
    training.relaunch()
    training.wait_until(lambda: training.events("quarantined"), "the damaged checkpoint is noticed")
    say_more("the damage was noticed: the checkpoint is in quarantine, the one before it is taken")


def flip_bit(path: Path) -> int:
    """Flips a bit in the middle of a file; returns the number of its byte."""
    middle = path.stat().st_size // 2
    with open(path, "r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    return middle


def local_checkpoints(training: ResilientTraining) -> Path:
    """The folder in node memory with the local checkpoints of this run."""
    run_id = training.run_directory.identity()
    found = [path for own in own_directories() for path in own.glob(f"local_ckpt/*/{run_id}")]
    if not found:
        raise Failed("there are no local checkpoints of this run in node memory")
    return found[0]


def lose_node_memory_and_relaunch(training: ResilientTraining) -> None:
    kill_launcher(training)
    folder = local_checkpoints(training)
    shutil.rmtree(folder)
    say_more(f"node memory wiped: {folder}")
    training.relaunch()


def corrupt_newest_local_and_relaunch(training: ResilientTraining) -> None:
    kill_launcher(training)
    found = sorted(local_checkpoints(training).glob("fit-*/step-*"))
    most = max(len(list(generation.iterdir())) for generation in found)
    newest = [generation for generation in found if len(list(generation.iterdir())) == most][-1]  # of all ranks
    quarantined = len(training.events("quarantined"))
    part = max(newest.glob("*.shard"), key=lambda path: path.stat().st_size)
    byte = flip_bit(part)
    say_more(f"one bit of the newest local checkpoint flipped: {newest.name}/{part.name}, byte {byte}")
    training.relaunch()
    training.wait_until(lambda: len(training.events("quarantined")) > quarantined, "the damaged checkpoint is noticed")
    say_more("the damage was noticed: it is in quarantine, the next best one is taken")


def stop_one_worker(training: ResilientTraining) -> None:
    worker = training.workers()[HUNG_RANK]
    say_more(f"kill -STOP {worker.pid}, which is rank {HUNG_RANK} of {PROCESSES}")
    worker.suspend()


def stop_data_loader(training: ResilientTraining) -> None:
    loaders = training.workers()[HUNG_RANK].children()
    pids = " ".join(str(loader.pid) for loader in loaders)
    say_more(f"kill -STOP {pids}, which load the data of rank {HUNG_RANK}")
    for loader in loaders:
        loader.suspend()


def leave_collective(training: ResilientTraining) -> None:
    # No signal causes this fault. drill.py was told to cause it; the watchdog does not know of it.
    training.wait_until(lambda: training.events("simulated_fault"), "the simulated fault happens")
    say_more(f"drill.py has rank {HUNG_RANK} wait for a message that nobody sends")


def end_all() -> None:
    """Kills all processes that this demo has started."""
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
    is_hang: bool = False


KILLED_WORKER = Fault("SIGKILL of one worker", kill_one_worker)
TERMINATED = Fault("SIGTERM, then relaunch", terminate_and_relaunch)
HUNG = Fault("one rank hangs (SIGSTOP)", stop_one_worker, is_hang=True)
STUCK_IN_COLLECTIVE = Fault("one rank stuck in a collective", leave_collective, is_hang=True)
FAULTS = [
    KILLED_WORKER,
    Fault("SIGKILL of all workers", kill_all_workers),
    HUNG,
    TERMINATED,
    STUCK_IN_COLLECTIVE,
    Fault("SIGKILL of the launcher, then relaunch", kill_launcher_and_relaunch),
    Fault("node memory wiped, then relaunch", lose_node_memory_and_relaunch),
    Fault("one rank stuck in its data loader", stop_data_loader, is_hang=True),
    Fault("newest checkpoint corrupted, then relaunch", corrupt_newest_checkpoint_and_relaunch),
    Fault("newest local one corrupted, then relaunch", corrupt_newest_local_and_relaunch),
]
QUICK_FAULTS = [KILLED_WORKER, HUNG, TERMINATED]


def step_of(number: int) -> int:
    """The step of the fault with this number, from 1: a while after a save, so that there are steps to lose."""
    return number * SAVE_EVERY + SAVE_EVERY // 3


@dataclass(frozen=True)
class Result:
    found: str
    found_after_s: float | None
    resumed_from: int
    tier: str
    steps_redone: int
    seconds_lost: float


def drill(training: ResilientTraining, fault: Fault, title: str, at_step: int) -> Result:
    """Waits for ``at_step``, inflicts a fault, and waits until the training is further than before the fault."""
    training.wait_until(lambda: training.step >= at_step, f"the training reaches step {at_step}")
    starts, hangs = len(training.events("resumed") + training.events("fresh")), len(training.hangs())
    say(f"step {training.step}: {title}: {fault.name}", BOLD)
    inflicted_at = time.time()
    fault.inflict(training)
    found_after_s = None
    if fault.is_hang:
        training.wait_until(lambda: len(training.hangs()) > hangs, "the hang is found")
        hang = training.hangs()[-1]
        found_after_s = hang.noticed - inflicted_at
        say(f"         found after {found_after_s:.1f} s, with {STEP_LIMIT_S} s allowed for a step:")
        say_more(hang.reason)
    training.wait_until(lambda: len(training.events("resumed") + training.events("fresh")) > starts, "a resume")
    reached = training.furthest_step
    resumed = training.events("resumed")[-1]
    resumed_from, tier = resumed.step, resumed.tier
    say_more(f"resumed from step {resumed_from}, {tier} checkpoint; it had got to step {reached}")
    training.wait_until(lambda: training.furthest_step > reached, f"the training gets beyond step {reached}")
    seconds_lost = time.time() - inflicted_at
    say(f"         back after {seconds_lost:.1f} s, {number_of_steps(reached - resumed_from)} redone", GREEN)
    found = what_was_found(training, fault, inflicted_at)
    return Result(found, found_after_s, resumed_from, tier, reached - resumed_from, seconds_lost)


def what_was_found(training: ResilientTraining, fault: Fault, since: float) -> str:
    """The run's own description of the last fault."""
    if fault.is_hang:
        verdict = Path(training.hangs()[-1].diagnostics) / "verdict.json"
        culprits = Verdict.from_json(json.loads(verdict.read_bytes())).culprits
        if [culprit.rank for culprit in culprits] != [HUNG_RANK]:
            raise Failed(f"rank {HUNG_RANK} hangs, and another verdict is in {verdict}")
        return f"hang: rank {HUNG_RANK}, {culprits[0].kind.replace('_', ' ')}"
    quarantined = any(event.time > since for event in training.events("quarantined"))
    kind = interruptions(read_ledger(training.run_directory.path))[-1].kind
    return f"{kind}, bad checkpoint" if quarantined else kind


def number_of_steps(count: int) -> str:
    """The number of steps, in words."""
    return f"{count} step{'s' * (count != 1)}"


def print_table(faults: list[Fault], results: list[Result]) -> None:
    rows = []
    for index, fault in enumerate(faults):
        if index < len(results):
            result = results[index]
            after = "-" if result.found_after_s is None else f"{result.found_after_s:.1f} s"
            redone, lost = number_of_steps(result.steps_redone), f"{result.seconds_lost:.1f} s"
            origin = f"{result.resumed_from} ({result.tier})"
            rows.append([fault.name, "yes", result.found, after, origin, redone, lost])
        else:
            rows.append([fault.name, "NO" if index == len(results) else "not tried", *"-----"])
    for line in table(["fault", "recovered", "found", "after", "from step", "redone", "lost"], rows):
        print(f"  {line}")


def introduce(faults: list[Fault], out: Path, about: str) -> None:
    explain("What you are about to see")
    text = (
        f"A small GPT learns to write Python, in {PROCESSES} processes of this machine. It is trained twice: once "
        f"undisturbed, and once under `lightning-resilience launch` while this demo kills it, or has it hang, in "
        f"{len(faults)} ways. Every time it has to recover, and in the end the weights of both trainings must be the "
        f"same, bit for bit. This takes about {about}. Everything that is written goes to {out}."
    )
    print(textwrap.fill(text, 110))


def conclude(undisturbed: Training, disturbed: ResilientTraining) -> int:
    """Compares the final weights and returns the exit code."""
    print("\n  found:  in the run's own words; for a hang the rank that is to blame, and after how long it was noticed")
    print("  redone: the steps between the checkpoint and the fault")
    print("  lost:   the time from the fault until the training was further than it had been\n")
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
    print(f"  The newest hang, rank by rank:              {os.path.relpath(LAUNCHER)} diagnose {run_dir}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and three of the faults")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up below

    faults, steps = (QUICK_FAULTS, 90) if options.quick else (FAULTS, 230)
    out, gpt, drill_py = options.out, os.path.relpath(GPT), os.path.relpath(DRILL)
    for name in ("undisturbed", "disturbed", "run"):  # of an earlier demo
        shutil.rmtree(out / name, ignore_errors=True)
        (out / f"{name}.log").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    introduce(faults, out, "a minute" if options.quick else "4 to 5 minutes")

    arguments = [f"--steps={steps}", f"--save-every={SAVE_EVERY}", "--print-every=1", "--accelerator=cpu"]
    arguments.append(f"--validate-every={2 * SAVE_EVERY}")
    if options.quick:
        arguments += ["--layers=2", "--width=96"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}"]
    undisturbed = Training([*torchrun, gpt, f"--out={out / 'undisturbed'}", *arguments], out / "undisturbed.log")
    script = [drill_py, f"--out={out / 'disturbed'}", *arguments]
    if STUCK_IN_COLLECTIVE in faults:
        at_step = step_of(faults.index(STUCK_IN_COLLECTIVE) + 1)
        script += ["--fault=stuck_in_collective", f"--rank={HUNG_RANK}", f"--at-step={at_step}"]
    disturbed = ResilientTraining(out / "run", script, out / "disturbed.log")
    training: Training = undisturbed
    results: list[Result] = []
    try:
        explain(f"1. Undisturbed, and without lightning-resilience: torchrun --nproc-per-node {PROCESSES} {gpt}")
        undisturbed.start()
        undisturbed.finish()

        explain(f"2. The same under fire: lightning-resilience launch --nproc-per-node {PROCESSES} {drill_py}")
        about = (
            f"{drill_py} is {gpt} with two callbacks of its own. One saves to node memory every 5 steps; one keeps "
            f"the limit for a step at {STEP_LIMIT_S} s and makes the only fault that no signal can make. Of the others "
            "the run is not told."
        )
        print(textwrap.fill(about, 110) + "\n")
        training = disturbed
        disturbed.start()
        for number, fault in enumerate(faults, start=1):
            results.append(drill(disturbed, fault, f"fault {number} of {len(faults)}", step_of(number)))
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
