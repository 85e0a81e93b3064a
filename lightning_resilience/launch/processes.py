"""The processes of one launch, found by the launch id in their environment, and the reaper that outlives the launch.

Process groups do not help here: the workers and their data-loader workers live in sessions of their own. What all of
them do have is the environment they were started with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

LAUNCH_ID_VARIABLE = "LIGHTNING_RESILIENCE_LAUNCH_ID"
"""Environment variable that marks every process of a launch."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those by which a person or a scheduler asks a launch to stop. ``sbatch --signal`` may name any: Lightning's pages say
SIGUSR1, and submitit SIGUSR2."""


def processes_of(launch_id: str) -> list[psutil.Process]:
    """Every running process of this user on this host that was started by the launch ``launch_id``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(LAUNCH_ID_VARIABLE) == launch_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, a zombie, or somebody else's
    return found


def end_processes(launch_id: str, patience_s: float = 0.0, give_up_after_s: float = 60.0) -> int:
    """Ends every process of a launch and returns how many there were.

    Args:
        launch_id: Whose processes.
        patience_s: How long they may take to end on SIGTERM before they are killed.
        give_up_after_s: A process stuck in the kernel can't be killed; after this long it is left alone.
    """
    seen = set()
    start = time.monotonic()
    clean_scans = 0
    while clean_scans < 2 and time.monotonic() - start < give_up_after_s:  # one scan can miss what was forked during it
        processes = processes_of(launch_id)
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

    It reads a pipe whose other end only the launch holds: the kernel closes that when the launch dies, by SIGKILL too.

    Args:
        launch_id: Whose processes to kill.
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
        """Lets the reaper go; it makes sure once more that nothing is left."""
        os.close(self._writer)
        self._process.wait()


def main() -> None:
    """The reaper's own program."""
    for signum in STOP_SIGNALS:  # a scheduler signals everybody, but this process ends only after all others
        signal.signal(signum, signal.SIG_IGN)
    launch_id = sys.argv[1]
    while os.read(0, 1024):
        pass
    if count := end_processes(launch_id):
        print(
            f"[lightning-resilience] The launcher is gone: ended the {count} processes it left. Run the same command "
            "again to resume.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
