"""The supervisor of ``launch --elastic``: starts the ranks of a node and replaces a lost one while the others go on.

It stands in the place of torch's elastic launcher and gives each rank the same environment. That launcher can't be
extended to this: its ``LocalElasticAgent`` holds all ranks in one ``PContext``, which closes all of them as soon as one
has failed and whose handles are private, polls them every 0.1 s, and has one store for each start, which a replacement
would need before the survivors have left the old one.

Each start of the ranks, and each replacement, is a *generation* with a store of its own in this process: so the death
of rank 0 is like any other one, nothing of an older generation reaches a newer one, and to close the store of a
generation frees every rank that is blocked there. The generation is the restart count, and each counts as one restart
inside the job.

A death is noticed by a pidfd. What follows is decided in :mod:`~lightning_resilience.launch.loss_policy`.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from lightning_resilience import _nvrx
from lightning_resilience._loopback import ADDRESS, listen, serve_store
from lightning_resilience._output import introduce
from lightning_resilience.elastic import nccl
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.loss_policy import LossPolicy
from lightning_resilience.launch.spares import SPARES_VARIABLE, Workers
from lightning_resilience.run import deadlines
from lightning_resilience.run.events import RanksReplaced
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

_POLL_WITHOUT_PIDFD_S = 0.01


class Supervisor:
    """Runs the ranks to their end.

    Args:
        command: What each rank runs.
        world_size: How many ranks there are.
        max_restarts: How many generations may follow the first.
        run_id: ``TORCHELASTIC_RUN_ID`` of the ranks.
        term_timeout_s: How long the ranks may take to end after this process was told to stop.
        ledger: Of the run.
        makes_spares: Whether processes wait to replace ranks.
        log: Where it is said what becomes of those.
    """

    def __init__(
        self,
        command: list[str],
        world_size: int,
        max_restarts: int,
        run_id: str,
        term_timeout_s: float,
        ledger: Ledger,
        makes_spares: bool = False,
        log: TextIO | None = None,
    ) -> None:
        self._command = command
        self._world_size = world_size
        self._max_restarts = max_restarts
        self._run_id = run_id
        self._ledger = ledger
        self._said: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Message]] = queue.SimpleQueue()
        self._workers = Workers(makes_spares, log, self._put)
        self._policy = LossPolicy(self, world_size, max_restarts, term_timeout_s)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(64))

    def handle_signals(self) -> None:
        """Ends the ranks in order on SIGTERM and SIGINT, and on no other signal of a scheduler."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._ask_to_stop)
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(signum, lambda signum, frame: None)  # unlike SIG_IGN, it is not passed on

    def run(self) -> int:
        """Returns 0 if all ranks have ended with 0, else 1."""
        server = listen()
        self._port = server.getsockname()[1]
        for rank in range(self._world_size):
            self._start(rank, generation=0)
        self._store = serve_store(deadlines.STORE_WITHIN_S, server)  # imports torch, as the ranks do meanwhile
        while self._policy.result is None:
            self._policy.step(time.monotonic(), self._look())
            self._listen()
        return self._policy.result

    def _listen(self) -> None:
        within_s = self._policy.wakes_at - time.monotonic()
        if len(self._pidfds) < self._world_size:
            within_s = min(within_s, _POLL_WITHOUT_PIDFD_S)
        for key, _ in self._selector.select(max(0.0, within_s)):
            key.data()

    def _look(self) -> bool:
        """Passes on what has happened; returns whether that is all that ranks had said before they ended."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                self._policy.ended(rank, code)
        are_heard = self._workers.are_heard
        with suppress(queue.Empty):
            while True:
                self._hear(*self._said.get_nowait())
        return are_heard

    # -- what is decided -----------------------------------------------------------------------------------------------

    def open_store(self) -> int:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        self._old_store, self._store = self._store, serve_store(deadlines.STORE_WITHIN_S)
        port: int = self._store.port
        self._port = port
        return port

    def close_old_store(self) -> None:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        del self._old_store

    def start(self, ranks: Collection[int], generation: int) -> None:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        self._workers.ended(*ranks)
        for rank in ranks:
            self._forget(rank)
            self._start(rank, generation)

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        for rank in ranks:
            self._workers.tell(rank, kind, **fields)

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        for rank in ranks:
            self._processes[rank].send_signal(signum)

    def record(self, lost: Mapping[int, str], generation: int) -> None:
        """See :class:`~lightning_resilience.launch.loss_policy.Ranks`."""
        event = RanksReplaced(
            ranks=sorted(lost),
            kept=self._world_size - len(lost),
            elastic_run_id=self._run_id,
            restart_count=generation,
            reason="; ".join(f"rank {rank} {what}" for rank, what in sorted(lost.items())),
        )
        # In a thread: the storage may not answer.
        threading.Thread(target=lambda: self._ledger.record(event), daemon=True).start()

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, generation: int) -> None:
        local = str(self._world_size)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_NAME": "default",
            "WORLD_SIZE": local,
            "LOCAL_WORLD_SIZE": local,
            "ROLE_WORLD_SIZE": local,
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # there is one for each generation
            ELASTIC_VARIABLE: "1",
        }
        # As torch's: all ranks together must not have more threads than cores. And a store that is closed under its
        # clients is no news.
        defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"OMP_NUM_THREADS": "1"} if self._world_size > 1 else {})
        defaults |= nccl.ENVIRONMENT
        started = self._workers.start(rank, self._command, defaults | os.environ | environment, None, None)
        self._processes[rank] = started
        with suppress(OSError, AttributeError):  # an old kernel: it is polled
            pidfd = self._pidfds[rank] = os.pidfd_open(started.pid)
            # It stays readable.
            self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._selector.unregister, pidfd))

    def _forget(self, rank: int) -> None:
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            with suppress(KeyError):
                self._selector.unregister(pidfd)
            os.close(pidfd)

    # -- what they say -------------------------------------------------------------------------------------------------

    def _put(self, process: subprocess.Popen[bytes], message: Message) -> None:
        """Called in the thread of a channel."""
        self._said.put((process, message))
        with suppress(BlockingIOError):  # it is awake
            self._waker.send(b"\0")

    def _hear(self, process: subprocess.Popen[bytes], message: Message) -> None:
        rank = next((rank for rank, each in self._processes.items() if each is process), None)
        self._policy.heard(rank, message.kind, message.fields)

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._policy.ask_to_stop()


def main() -> None:
    """The supervisor's own program: ``--nproc-per-node N --max-restarts N ... -- SCRIPT ARGUMENTS``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node")
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--term-timeout", type=float)
    separator = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:separator])
    count = options.nproc_per_node
    world_size = _nvrx.device_count() if count == "auto" else int(count)
    command = [sys.executable, "-m", "lightning_resilience.launch.worker", *sys.argv[separator + 1 :]]
    run_id = os.environ.pop(_nvrx.RUN_ID_VARIABLE)
    introduce("launch")
    run_directory = RunDirectory(os.environ[RUN_DIR_VARIABLE])
    ledger = Ledger(run_directory.ledger, rank=None)
    timeout_s = options.term_timeout
    log = _nvrx.open_log(str(_nvrx.elastic_log(run_directory.path)))
    makes_spares = os.environ.pop(SPARES_VARIABLE, "") == "auto" and sys.platform == "linux"
    supervisor = Supervisor(command, world_size, options.max_restarts, run_id, timeout_s, ledger, makes_spares, log)
    supervisor.handle_signals()
    code = supervisor.run()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
