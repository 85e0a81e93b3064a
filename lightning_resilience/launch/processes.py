"""The processes of one launch, found by the launch id in their environment, and the reaper that outlives the launch.

Process groups do not help here: the workers and their data-loader workers live in sessions of their own. But all of
them have the environment with which they were started. It also shows to which start of the workers a process belongs.
So what dead ranks have left behind can be distinguished from the processes of living ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from lightning_resilience._output import log_line
from lightning_resilience._processes import OUTLIVES_RANKS_VARIABLE, waited
from lightning_resilience.launch.worker_group import worker_group
from lightning_resilience.run.deadlines import LEFTOVERS_PATIENCE_S

LAUNCH_ID_VARIABLE = "LIGHTNING_RESILIENCE_LAUNCH_ID"
"""Environment variable that marks every process of a launch."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which a person or a scheduler asks a launch to stop. ``sbatch --signal`` may name any: Lightning's
docs use SIGUSR1, and submitit SIGUSR2."""


def processes_of(launch_id: str) -> list[psutil.Process]:
    """Every running process of this user on this host that was started by the launch ``launch_id``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(LAUNCH_ID_VARIABLE) == launch_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, a zombie, or another user's
    return found


_LEFTOVERS_WITHIN_S = 20.0
_GIVES_UP_AFTER_S = 60.0  # a process stuck in the kernel cannot be killed, and is left alone


def left_by_earlier_ranks() -> list[psutil.Process]:
    """Processes that earlier ranks of this launch on this node have started and left behind.

    To be called by a rank. A process counts if it has the launch's mark, was not started for the same group of ranks as
    this process, is older than this process (a spare: older than its use as a worker), and no longer descends from the
    launcher, as all living ranks and their child processes do. The restart count alone would not do: the launcher need
    not count a restart when a node joins.
    """
    launch_id = os.environ.get(LAUNCH_ID_VARIABLE)
    if launch_id is None:
        return []
    began = psutil.Process().create_time() + waited()
    left = set()
    try:
        launcher = psutil.Process(os.getppid())
        living = {launcher, *launcher.children(recursive=True)}
        for process in processes_of(launch_id):
            with suppress(psutil.Error, OSError):  # gone meanwhile
                environment = process.environ()
                is_of_mine = worker_group(environment) == worker_group()
                if is_of_mine or process in living or OUTLIVES_RANKS_VARIABLE in environment:
                    continue
                if process.create_time() < began:
                    left |= {process, *process.children(recursive=True)}
    except psutil.Error:  # the launcher has gone, and the process that ends its leftovers ends this process, too
        return []
    return list(left)


def end_what_earlier_ranks_left() -> int:
    """Ends these processes and returns how many there were. To be called by a rank before it does anything else."""
    if not left_by_earlier_ranks():
        return 0  # no process exists that could have started another one meanwhile
    return _end(left_by_earlier_ranks, LEFTOVERS_PATIENCE_S, _LEFTOVERS_WITHIN_S)


def end_processes(launch_id: str, patience_s: float = 0.0) -> int:
    """Ends every process of a launch and returns how many there were.

    Args:
        launch_id: The id of the launch.
        patience_s: How long the processes may take to end on SIGTERM before they are killed.
    """
    return _end(lambda: processes_of(launch_id), patience_s, _GIVES_UP_AFTER_S)


def _end(find: Callable[[], list[psutil.Process]], patience_s: float, give_up_after_s: float) -> int:
    seen = set()
    start = time.monotonic()
    clean_scans = 0
    while clean_scans < 2 and time.monotonic() - start < give_up_after_s:  # one scan can miss what was forked during it
        processes = find()
        clean_scans = 0 if processes else clean_scans + 1
        for process in processes:
            try:
                if time.monotonic() - start >= patience_s:
                    process.kill()
                elif process not in seen:
                    process.terminate()
            except psutil.Error:
                pass
            seen.add(process)
        if processes or clean_scans < 2:
            time.sleep(0.05)
    return len(seen)


class Reaper:
    """A process that kills everything a launch has started as soon as the launch itself is gone, however it ended.

    It reads a pipe whose other end only the launch holds. The kernel closes that end when the launch dies, also by
    SIGKILL.

    Args:
        launch_id: The id of the launch whose processes it kills.
    """

    def __init__(self, launch_id: str) -> None:
        reader, self._writer = os.pipe()  # neither end is inherited by an executed program
        environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, launch_id],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        os.close(reader)

    def dismiss(self) -> None:
        """Ends the reaper; before that, it checks once more that nothing is left."""
        os.close(self._writer)
        self._process.wait()


def main() -> None:
    """The program of the reaper."""
    for signum in STOP_SIGNALS:  # a scheduler signals all processes, but this one ends last
        signal.signal(signum, signal.SIG_IGN)
    launch_id = sys.argv[1]
    while os.read(0, 1024):
        pass
    if count := end_processes(launch_id):
        ended = f"The launcher died; terminated its {count} remaining processes."
        log_line(f"{ended} Run the same command again to resume.")


if __name__ == "__main__":
    main()
