"""The workers of a node, seen from their launcher: their channels, and the spares that replace them at a restart.

A worker that starts needs seconds of CPU time for imports. So when the workers have begun to train, the launcher starts
one process for each of them, one after the other. This *spare* does the imports and waits
(:mod:`~lightning_resilience.launch.park`). The elastic launcher, or the supervisor of ``launch --elastic``, then uses
it where it would start a worker: the spare is its child and has the same command line, and nothing else of a restart
changes. Whenever a spare cannot be used, a worker is started as without spares.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from lightning_resilience.checkpoint.capacity import memory_left
from lightning_resilience.launch.channel import CHANNEL_VARIABLE, Channel, Message
from lightning_resilience.launch.park import PLAIN, RECORDS, SPARE
from lightning_resilience.launch.standstill import NO_GATE, Standstill
from lightning_resilience.run.run_directory import JOINS_VARIABLE

SPARES_VARIABLE = "LIGHTNING_RESILIENCE_SPARES"
"""Environment variable by which ``launch`` asks the elastic launcher for spares."""

HANDLERS = {
    "nvidia_resiliency_ext.fault_tolerance.launcher": (
        "nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing.subprocess_handler"
        ".subprocess_handler",
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    ),
    "torch.distributed.run": ("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",),
}
"""Where elastic launchers start a worker: NVRx 0.4 has a copy of torch's class, later versions use torch's."""

_MEMORY_SHARE = 0.1
_ANSWERS_WITHIN_S = 5.0
_READY_WITHIN_S = 900.0


class Worker:
    """A process that is a worker, or may become one.

    Args:
        args: Its command line.
        env: Its environment.
        kind: Its purpose, as :mod:`~lightning_resilience.launch.park` names it.
        gate: The descriptor of the gate of its imports, or -1.
        stdout: A file or ``subprocess.PIPE`` for its standard output; ``None``: the launcher's standard output.
        stderr: The same for its standard error.

    Attributes:
        args: Its command line.
        env: Its environment.
        process: Its process.
        channel: The launcher's end of its channel.
        is_warm: Whether it was a spare.
        start: Number of the start by which it became a worker; workers that are started together have the same.
        noted: What it has imported, once it has begun to train.
        problem: Why this spare cannot be used.
        memory: Bytes of memory that this spare shares with no other process.
        is_ready: Whether this spare has imported everything.
        is_gone: Whether the other end of the channel is closed.
        has_state: Whether it has reported a state.
    """

    def __init__(
        self, args: tuple[str, ...], env: Mapping[str, str], kind: str, gate: int, stdout: Any, stderr: Any
    ) -> None:
        self.args, self.env = args, dict(env)
        self.is_warm = False
        self.start = 0
        self.noted: dict[str, Any] | None = None
        self.problem: str | None = None
        self.memory = 0
        self.is_ready = self.is_gone = self.has_state = self._is_told = False
        self._answered, self._going = threading.Event(), threading.Event()
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(  # as the elastic launchers do
            args,
            env={**env, CHANNEL_VARIABLE: f"{theirs.fileno()},{gate},{kind}"},
            pass_fds=[fd for fd in (theirs.fileno(), gate) if fd != NO_GATE],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)

    def take(self, message: Message) -> None:
        """Takes over what the process reports about itself.

        Args:
            message: Its message.
        """
        if message.kind == "begun":
            self.noted = message.fields
        elif message.kind == "ready":
            self.problem, self.memory = message.fields["problem"], message.fields["memory"]
            self.is_ready = True
            self._answered.set()
        elif message.kind == "going":
            self._going.set()
            self._answered.set()
        elif message.kind == "state":
            self.has_state = True

    @property
    def imports(self) -> bool:
        """Whether it may still be importing: it has reported no state, and was no spare with its imports done."""
        return not self.has_state and not (self.is_warm and self.is_ready)

    def has_gone(self) -> None:
        """Notes that the other end of the channel is closed."""
        self.is_gone = True
        self._answered.set()

    def prepare(self, noted: Mapping[str, Any]) -> bool:
        """Makes this spare import, and waits until it has done so, is taken or has ended.

        Args:
            noted: What the worker of its rank has imported.

        Returns:
            Whether it can be used.
        """
        self._is_told = self.channel.send("import", **{**noted, "parent": os.getpid()})
        if self._is_told:
            self._answered.wait(_READY_WITHIN_S)
        return self._answered.is_set() and self.problem is None and self.process.poll() is None

    def becomes(self, args: tuple[str, ...], env: Mapping[str, str], stdout: Any, stderr: Any) -> bool:
        """Makes this spare a worker.

        Args:
            args: The command line of the worker.
            env: Its environment.
            stdout: As in the constructor.
            stderr: As in the constructor.

        Returns:
            Whether it is a worker now.
        """
        files = {fd: file for fd, file in ((1, stdout), (2, stderr)) if file is not None}
        if not self._is_told or self.problem is not None or self.args != args or self.process.poll() is not None:
            return False
        if any(isinstance(file, int) for file in files.values()):  # a pipe, which can be made only with the process
            return False
        fds = [file.fileno() for file in files.values()]
        if not self.channel.send("go", fds, env=dict(env), cwd=os.getcwd(), redirected=list(files)):
            return False
        if self.is_ready and not self._going.wait(_ANSWERS_WITHIN_S):  # a spare that is still importing takes its time
            return False
        self.is_warm, self.env = True, dict(env)
        return self.process.poll() is None

    def dismiss(self) -> None:
        """Ends the process."""
        self.channel.close()
        with suppress(OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(_ANSWERS_WITHIN_S)


class Workers:
    """All workers of this node, and their spares.

    Args:
        makes_spares: Whether spares are made.
        log: The file for log lines about spares; default: ``sys.stderr``, which is the elastic launcher's own log.
        heard: Called in a thread with the process of a worker and each of its messages.

    Attributes:
        makes_spares: Whether more spares are made.
        spares: The spares that wait, or still import, by local rank.
    """

    def __init__(
        self,
        makes_spares: bool,
        log: TextIO | None = None,
        heard: Callable[[subprocess.Popen[bytes], Message], None] = lambda process, message: None,
    ) -> None:
        self.makes_spares = makes_spares
        self._log_file, self._heard = log, heard
        self._start = 0
        self._workers: dict[int, Worker] = {}
        self.spares: dict[int, Worker] = {}
        self._lock = threading.RLock()
        self._begun: queue.SimpleQueue[tuple[int, Worker]] = queue.SimpleQueue()
        self._standstill = Standstill()
        if makes_spares:
            threading.Thread(target=self._make_spares, name="resilience-spares", daemon=True).start()

    def start(
        self, rank: int, args: Iterable[str], env: Mapping[str, str], stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a worker; called by the elastic launcher.

        Args:
            rank: Its local rank. If this rank has a worker that was not reported by :meth:`ended`, all workers have
                ended.
            args: Its command line.
            env: Its environment.
            stdout: A file or ``subprocess.PIPE``; ``None``: the launcher's standard output.
            stderr: The same for standard error.

        Raises:
            OSError: If it cannot be started.
        """
        args = tuple(args)
        with self._lock:
            if rank in self._workers:
                self.ended(*self._workers)
            spare = self.spares.pop(rank, None)
            worker = spare if spare is not None and self._is_taken(rank, spare, args, env, stdout, stderr) else None
            if worker is None:
                gate = self._standstill.gate if JOINS_VARIABLE in env else NO_GATE
                worker = Worker(args, env, RECORDS if self.makes_spares else PLAIN, gate, stdout, stderr)
                self._listen(rank, worker)
            if worker.imports and JOINS_VARIABLE not in env:
                self._standstill.wait_for(rank)
            worker.start = self._start
            self._workers[rank] = worker
        return worker.process

    def ended(self, *ranks: int) -> None:
        """Notes that these workers have ended; other workers are started as their replacements.

        Args:
            ranks: Their local ranks. If these are not all ranks, the other workers continue.
        """
        with self._lock:
            self._start += 1
            have_trained = {each.start for each in self._workers.values() if each.noted is not None}
            workers = [self._workers.pop(rank) for rank in ranks]
            for worker in workers:
                worker.channel.close()
            for rank in ranks:
                self._standstill.end(rank)
            if any(each.is_warm and each.start not in have_trained for each in workers):
                self.make_no_more("workers started from spares ended before they trained")

    def tell(self, rank: int, kind: str, **fields: Any) -> None:
        """Sends a worker a message.

        Args:
            rank: Its local rank.
            kind: The type of the message, see :mod:`~lightning_resilience.launch.channel`.
            fields: Its content.
        """
        worker = self._workers[rank]
        worker.channel.send(kind, **fields)
        if kind == "replace" and worker.imports:
            self._standstill.wait_for(rank)
        elif kind == "replace":
            self._standstill.begin(rank)

    def has_spare(self, rank: int) -> bool:
        """Whether a spare that has done its imports waits for the place of a worker.

        Args:
            rank: Its local rank.
        """
        with self._lock:
            spare = self.spares.get(rank)
            return spare is not None and spare.is_ready and not spare.is_gone and spare.problem is None

    @property
    def are_heard(self) -> bool:
        """Whether every message of the workers was read."""
        return all(each.is_gone or not each.channel.is_readable() for each in self._workers.values())

    def _is_taken(
        self, rank: int, spare: Worker, args: tuple[str, ...], env: Mapping[str, str], stdout: Any, stderr: Any
    ) -> bool:
        try:
            if spare.becomes(args, env, stdout, stderr):
                self._log(f"the spare of local rank {rank} replaces it")
                return True
            self._log(f"the spare of local rank {rank} is not used")
        except Exception as error:
            self._log(f"the spare of local rank {rank} is not used ({type(error).__name__}: {error})")
        spare.dismiss()
        return False

    def _listen(self, rank: int, worker: Worker) -> None:
        def take(message: Message) -> None:
            worker.take(message)
            if message.kind == "begun" and "modules" in message.fields:
                self._begun.put((rank, worker))
            if message.kind == "state" and message.fields["state"] != "left":
                self._standstill.end(rank)
            self._heard(worker.process, message)

        worker.channel.listen(take, worker.has_gone)

    def _make_spares(self) -> None:
        while True:
            rank, worker = self._begun.get()
            try:
                self._make_spare(rank, worker)
            except Exception as error:  # if this thread ended with the error, no log would mention it
                self.make_no_more(f"{type(error).__name__}: {error}")

    def _make_spare(self, rank: int, worker: Worker) -> None:
        with self._lock:
            # Not during a restart: the imports of the restarted workers would take longer.
            if not self.makes_spares or self._workers.get(rank) is not worker or rank in self.spares:
                return
            spare = self.spares[rank] = Worker(worker.args, worker.env, SPARE, self._standstill.gate, None, None)
            self._listen(rank, spare)
            count = len(self._workers)
        assert worker.noted is not None
        is_usable = spare.prepare(worker.noted)
        with self._lock:
            if self.spares.get(rank) is not spare:
                return  # taken
            if spare.problem is not None:
                self.make_no_more(spare.problem)
            elif not is_usable:
                self.spares.pop(rank).dismiss()
            elif spare.memory * count > _MEMORY_SHARE * (free := memory_left().nbytes):
                needed = f"{spare.memory * count >> 20} MB for {count} spares"
                self.make_no_more(f"{needed} are more than {_MEMORY_SHARE:.0%} of the {free >> 20} MB of free memory")
            else:
                self._log(f"the spare of local rank {rank} is ready, with {spare.memory >> 20} MB of its own")

    def make_no_more(self, reason: str) -> None:
        """Ends all spares and makes no more.

        Args:
            reason: The reason, for the log.
        """
        with self._lock:
            self.makes_spares = False
            spares, self.spares = self.spares, {}
        for spare in spares.values():
            spare.dismiss()
        self._log(f"no more spares in this job: {reason}")

    def _log(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"[lightning-resilience] {text}", file=self._log_file or sys.stderr, flush=True)


def install(launcher: str, makes_spares: bool) -> None:
    """Makes the elastic launcher that will run in this process start its workers with channels.

    Args:
        launcher: The module of the elastic launcher.
        makes_spares: Whether spares are made.
    """
    workers = Workers(makes_spares)

    def start(self: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return workers.start(self.local_rank_id, args, env, self._stdout, self._stderr)

    for name in HANDLERS.get(launcher, ()):
        with suppress(ImportError):
            importlib.import_module(name).SubprocessHandler._popen = start
