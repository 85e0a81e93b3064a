"""Runs the checks: each in a process of its own, with a limit of time; a failure never stops the others."""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.device import FAKE, Device, prepare_environment

_WHERE_ARE_YOU = signal.SIGRTMIN + 5

Function = Callable[["Bench"], None]

ORDER = (
    "resume",
    "replacement",
    "memory",
    "bad_numbers",
    "syncs",
    "snapshots",
    "hangs",
    "overhead",
    "kernels",
    "times",
    "exits",
    "health",
    "reads",
)
"""The modules that have the checks, those of most value first."""


@dataclass(frozen=True)
class Check:
    """One of the checks.

    Attributes:
        name: On the command line.
        claim: What holds if it passes, for the table.
        limit_s: It has failed if it takes longer.
        needs_gpu: What of CUDA it needs that the simulated accelerator has not; empty: nothing.
        function: Called in a process of its own.
    """

    name: str
    claim: str
    limit_s: float
    needs_gpu: str
    function: Function


class Skipped(Exception):
    """A check cannot be made here."""


_checks: dict[str, Check] = {}


def check(claim: str, limit_s: float, needs_gpu: str = "") -> Callable[[Function], Function]:
    """Makes a check of a function, whose name it has."""

    def register(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        _checks[name] = Check(name, claim, limit_s, needs_gpu, function)
        return function

    return register


def all_checks() -> dict[str, Check]:
    """All of them by name, in the order in which they are run."""
    for module in ORDER:
        importlib.import_module(f"tests.gpu.{module}")
    # Somebody may have imported one of them earlier.
    return dict(sorted(_checks.items(), key=lambda each: ORDER.index(each[1].function.__module__.rpartition(".")[2])))


class Bench:
    """What a check is given.

    Attributes:
        device: The device.
        quick: Whether only every line shall run, in small sizes.
        folder: An empty folder of its own.
        memory: Another one, in node memory.
    """

    def __init__(self, device: Device, quick: bool, folder: Path, memory: Path, result: Path) -> None:
        self.device = device
        self.quick = quick
        self.folder = folder
        self.memory = memory
        self._result = result
        self._found: dict[str, Any] = {"status": "FAIL", "figures": {}, "failures": ["it did not come to its end"]}
        self._failures: list[str] = []
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """A number, or what else was found. Also of a check that fails later, or takes too long."""
        self._found["figures"][name] = round(value, 4) if isinstance(value, float) else value
        self._write()

    def expect(self, holds: bool, otherwise: str, timing: bool = False) -> None:
        """Fails the check if something does not hold; it goes on.

        Args:
            holds: Whether it does.
            otherwise: What is the case if not.
            timing: Whether that is about time, which means nothing on the simulated accelerator.
        """
        if not holds and (self.device.is_gpu or not timing):
            self._failures.append(otherwise)

    def skip(self, why: str) -> None:
        raise Skipped(why)

    def start(self, function: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None) -> Any:
        """Starts ``function`` in a process of its own; it must be one of a module.

        A forked process cannot use a GPU that its parent has used, and forks are fast: so the simulated accelerator has
        forks, and a check that starts processes must not train in its own.
        """
        context: Any = multiprocessing.get_context("spawn" if self.device.is_gpu else "fork")
        output = self.folder / f"output-{len(list(self.folder.glob('output-*')))}"
        process = context.Process(target=_run_beside, args=(function, arguments, environment or {}, output))
        process.start()
        process.output = output
        return process

    def ranks(self, count: int, function: Callable[..., None], *arguments: Any) -> list[Any]:
        """Starts ``count`` ranks of a job; each gets its rank and ``arguments``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environments = [self.device.environment(rank, count, port) if count > 1 else {} for rank in range(count)]
        return [
            self.start(function, rank, *arguments, environment=environment)
            for rank, environment in enumerate(environments)
        ]

    def passed(self, skipped: str | None = None) -> None:
        """The end of the check."""
        self._found["failures"] = self._failures
        self._found["status"] = "SKIPPED" if skipped is not None else "FAIL" if self._failures else "PASS"
        if skipped is not None:
            self._found["reason"] = skipped
        self._write()

    def _write(self) -> None:
        new = self._result.with_suffix(".new")
        new.write_text(json.dumps(self._found, default=str))
        new.rename(self._result)


def wait(processes: Sequence[Any], timeout_s: float) -> list[int | None]:
    """The exit codes; as a launcher does, ends the other ranks when one has died, and all when the time is over."""
    deadline = time.monotonic() + timeout_s
    while any(each.is_alive() for each in processes):
        died = any(each.exitcode not in (None, 0) for each in processes)
        if died or time.monotonic() > deadline:
            time.sleep(0.5)
            for each in processes:
                if each.is_alive():
                    each.kill()
                    each.join()
        time.sleep(0.02)
    return [each.exitcode for each in processes]


def text(processes: Sequence[Any]) -> str:
    """What processes have printed."""
    return "".join(each.output.read_text(errors="replace") for each in processes if each.output.exists())


def _run_beside(function: Callable[..., None], arguments: Any, environment: dict[str, str], output: Path) -> None:
    _redirect(output)
    os.environ.update(environment)
    faulthandler.enable()
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    function(*arguments)


def _redirect(output: Path) -> None:
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


def _run_here(name: str, device: str, quick: bool, folder: Path, memory: Path, result: Path) -> None:
    """A check's process."""
    os.setsid()
    prepare_environment(device)
    _redirect(folder / "output")
    faulthandler.enable()
    faulthandler.register(_WHERE_ARE_YOU, all_threads=True)
    import torch

    torch.set_num_threads(1)
    work = folder / "work"
    work.mkdir()
    bench = Bench(Device(device), quick, work, memory, result)
    try:
        all_checks()[name].function(bench)
        bench.passed()
    except Skipped as reason:
        bench.passed(str(reason))
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        bench.expect(False, f"{type(error).__name__}: {lines[0] if lines else ''}")
        bench.passed()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a check leaves behind in its process must not hold it up


def run_check(name: str, device: str, quick: bool, context: Any = None, at_most_s: float = 1e9) -> dict[str, Any]:
    """Runs one check in a process of its own and returns what was found.

    Args:
        name: Of the check.
        device: PyTorch's name of the device.
        quick: See :class:`Bench`.
        context: Of :mod:`multiprocessing`, if not a new interpreter is wanted.
        at_most_s: It has failed if it takes longer, whatever its own limit is.
    """
    about = all_checks()[name]
    limit_s = min(about.limit_s, at_most_s)
    began = time.monotonic()
    if about.needs_gpu and device == FAKE:
        return {
            "status": "SKIPPED",
            "reason": f"needs {about.needs_gpu}",
            "figures": {},
            "failures": [],
            "seconds": 0.0,
        }
    prepare_environment(device)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    memory = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/dev/shm"))
    result = folder / "result.json"
    process = (context or multiprocessing.get_context("spawn")).Process(
        target=_run_here, args=(name, device, quick, folder, memory, result)
    )
    try:
        process.start()
        process.join(limit_s)
        if late := process.is_alive():
            os.kill(process.pid, _WHERE_ARE_YOU)
            process.join(1.0)
        _end(process.pid)
        process.join()
        found = json.loads(result.read_text()) if result.exists() else {"status": "FAIL", "figures": {}, "failures": []}
        if late:
            found["failures"] = [f"it did not come to its end within {limit_s:.0f} s"]
        elif found["status"] == "FAIL" and process.exitcode != 0:
            found["failures"] = [f"its process ended with exit code {process.exitcode}", *found["failures"]]
        found["seconds"] = round(time.monotonic() - began, 1)
        outputs = [folder / "output", *sorted((folder / "work").glob("output*"))]
        found["output"] = "".join(each.read_text(errors="replace")[-6000:] for each in outputs if each.exists())
        return found
    finally:
        if process.pid is not None:  # also where somebody has pressed Ctrl-C
            _end(process.pid)
        for each in (folder, memory):
            shutil.rmtree(each, ignore_errors=True)


def _end(pid: int | None) -> None:
    """Ends a check's process and whatever it has started: all of them have its session, or descend from it."""
    left = []
    for each in psutil.process_iter():
        try:
            if each.pid != os.getpid() and os.getsid(each.pid) == pid:
                left.append(each)
        except (ProcessLookupError, PermissionError):
            continue
    try:
        left += psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        pass
    for each in left:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue


def line(name: str, found: dict[str, Any]) -> str:
    """What is printed about a check."""
    figures = "; ".join(f"{key}: {shown(value)}" for key, value in found["figures"].items())
    why = found.get("reason") or "; ".join(found["failures"])
    return f"{found['status']:8}{name:18}{found['seconds']:6.1f} s  " + " | ".join(
        each for each in (why, figures) if each
    )


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
