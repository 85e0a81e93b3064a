"""A training in a real terminal, and a second one in which a rank is killed: what both show, and when."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sysconfig
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.launch.channel import CHANNEL_VARIABLE
from lightning_resilience.launch.park import SPARE
from lightning_resilience.run.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
NODE = "gpu-07"
"""Shown in place of the name of the machine that records."""
COLUMNS = 64
PROMPT = "$ "
LAUNCH = "lightning-resilience launch --nproc-per-node 2 train.py"
PATIENCE_S = 180.0
KEY_S = 0.025
LOSES_S = 1.5
"""How long the training goes on after its last checkpoint."""

Output = list[tuple[float, str]]
"""What was written, and when."""


class Terminal:
    """A shell in a terminal.

    Args:
        folder: Where the shell is.
        start: The moment from which its times count.
    """

    def __init__(self, folder: Path, start: float) -> None:
        self.output: Output = []
        self._start = start
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        scripts = sysconfig.get_path("scripts")
        environment = os.environ | {"PS1": PROMPT, "TERM": "xterm", "HISTFILE": "/dev/null", "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{scripts}:{os.environ['PATH']}"
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def read(self) -> None:
        """Takes what has been written by now."""
        while select.select([self._master], [], [], 0)[0]:
            data = os.read(self._master, 65536).decode(errors="replace")
            self.output.append((time.monotonic() - self._start, data))

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(data for _, data in self.output)

    def type(self, text: str) -> None:
        """Presses one key after the other."""
        for key in text:
            os.write(self._master, key.encode())
            time.sleep(KEY_S)
            self.read()

    def close(self) -> None:
        """Ends the shell and all that it has started."""
        for process in [*psutil.Process(self.shell.pid).children(recursive=True), psutil.Process(self.shell.pid)]:
            process.kill()
        self.shell.wait()
        os.close(self._master)


def record(folder: Path) -> tuple[Output, Output]:
    """Launches the script of the documentation's first page, kills rank 1 when it can resume, waits for the end.

    One long epoch takes the place of three: on fast cores those end before a local checkpoint is due.

    Args:
        folder: Where; what a former recording left there is deleted.

    Returns:
        What both terminals have shown.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    [script] = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    (folder / "train.py").write_text(script.replace("max_epochs=3", "max_epochs=1").replace("65536", "262144"))
    start = time.monotonic()
    training, other = Terminal(folder, start), Terminal(folder, start)

    def wait(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:.0f} s. The terminal:\n{training.text[-3000:]}")
            time.sleep(0.01)
            training.read()
            other.read()

    try:
        wait(lambda: PROMPT in training.text and PROMPT in other.text, "two prompts")
        training.type(f"{LAUNCH}\n")
        run_dir = folder / "runs" / "train"
        wait(lambda: spares_of(run_dir) == 2, "a spare process for each rank")
        wait(lambda: newest_local_step(run_dir) > last_epoch(training.text), "a local checkpoint within an epoch")
        go_on = time.monotonic() + LOSES_S
        wait(lambda: time.monotonic() > go_on, "steps to lose")
        other.type(f"kill -9 {pid_of_rank_1(training.shell.pid)}  # rank 1\n")
        wait(lambda: training.text.endswith(PROMPT), "the end")
    finally:
        training.close()
        other.close()
    return tuple([(at, shortened(data, folder)) for at, data in each] for each in (training.output, other.output))


def spares_of(run_dir: Path) -> int:
    """How many spare processes have been ready so far."""
    return sum(log.read_text().count("is ready") for log in run_dir.glob("logs/launcher-*"))


def pid_of_rank_1(shell: int) -> int:
    """The process of rank 1 among those that a shell has started, and not its spare."""
    for process in psutil.Process(shell).children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        environment = process.environ()
        if environment.get("RANK") == "1" and not environment.get(CHANNEL_VARIABLE, "").endswith(SPARE):
            return process.pid
    raise LookupError("rank 1 is not there")


def newest_local_step(run_dir: Path) -> int:
    """The step of the newest local checkpoint of both ranks."""
    folders = [
        path for own in own_directories() for path in own.glob(f"local_ckpt/*/{RunDirectory(run_dir).identity()}")
    ]
    found = (each for path in folders for each in path.glob("fit-*/step-*") if len([*each.glob("rank-*.shard")]) == 2)
    return max((int(re.findall(r"step-(\d+)", each.name)[0]) for each in found), default=0)


def last_epoch(text: str) -> int:
    """The step at which the present epoch began, after which a checkpoint was saved on shared storage."""
    bars = re.findall(r"Epoch (\d+): [^\r\n]*?/(\d+) \[", text[-1000:])
    return int(bars[-1][0]) * int(bars[-1][1]) if bars else 0


def shortened(text: str, folder: Path) -> str:
    """Without the names of the machine and the folder, which are nobody's business, and what is no text."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", NODE, text.replace(f"{folder.resolve()}/", ""))
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
