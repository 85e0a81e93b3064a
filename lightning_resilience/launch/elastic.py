"""The supervisor of ``launch --elastic``: starts the ranks of a node and replaces a lost one while the others go on.

It stands in the place of torch's elastic launcher and gives each rank the same environment. That launcher can't be
extended to this: its ``LocalElasticAgent`` holds all ranks in one ``PContext``, which closes all of them as soon as one
has failed and whose handles are private, polls them every 0.1 s, and has one store for each start, which a replacement
would need before the survivors have left the old one.

Each start of the ranks, and each replacement, is a *generation* with a store of its own in this process: so the death
of rank 0 is like any other one, nothing of an older generation reaches a newer one, and to close the store of a
generation frees every rank that is blocked there. The generation is the restart count, and each counts as one restart
inside the job.

A death is noticed by a pidfd. It is mended by a replacement if the rank was killed (by a signal, or by its watchdog for
a hang), all others are in a fit and have agreed to be rejoined (see ``fit/reentry.py``), a state was saved, and the
budget has a restart left. An exception that ends a rank is the user's own, and restarts all ranks. So does a
replacement that is refused or takes too long.
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
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from lightning_resilience import _nvrx
from lightning_resilience._loopback import ADDRESS, listen, serve_store
from lightning_resilience._output import introduce, log_line
from lightning_resilience.detect.hangs.deaths import Death
from lightning_resilience.elastic import nccl
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.spares import SPARES_VARIABLE, Workers
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.events import RanksReplaced
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.01
_HEARD_WITHIN_S = 0.5


@dataclass
class Member:
    """A rank in its present life.

    Args:
        rank: Its global rank.
        process: Its process.
        generation: The generation in which it is, as it says.
        state: What it has said last; ``starting``: nothing since it was started.
        reason: Why it has refused.
    """

    rank: int
    process: subprocess.Popen[bytes]
    generation: int
    state: str = "starting"
    reason: str = ""
    pidfd: int | None = None

    @property
    def exit_code(self) -> int | None:
        """How its process has ended, if it has."""
        return self.process.poll()


def is_replaceable(exit_code: int) -> bool:
    """Whether a rank that ended so was killed; what an exception ends is the user's own.

    Args:
        exit_code: As ``subprocess`` gives it: of a signal the negative number.
    """
    return exit_code < 0 or exit_code == exit_codes.HUNG


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
        self._term_timeout_s = term_timeout_s
        self._ledger = ledger
        self._said: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Message]] = queue.SimpleQueue()
        self._workers = Workers(makes_spares, log, self._put)
        self._generation = 0
        self._members: dict[int, Member] = {}
        self._has_saved = False
        self._replacing_since: float | None = None
        self._stop_asked = False
        self._stops_until: float | None = None
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
            self._start(rank)
        self._store = serve_store(deadlines.STORE_WITHIN_S, server)  # imports torch, as the ranks do meanwhile
        while (result := self._step()) is None:
            has_pidfds = all(member.pidfd is not None for member in self._members.values())
            self._listen(_POLL_S if has_pidfds else _POLL_WITHOUT_PIDFD_S)
        return result

    def _listen(self, within_s: float) -> None:
        for key, _ in self._selector.select(within_s):
            key.data()
        with suppress(queue.Empty):
            while True:
                self._hear(*self._said.get_nowait())

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
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
            "TORCHELASTIC_RESTART_COUNT": str(self._generation),
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
        process = self._workers.start(rank, self._command, defaults | os.environ | environment, None, None)
        member = self._members[rank] = Member(rank, process, self._generation)
        with suppress(OSError, AttributeError):  # an old kernel: it is polled
            member.pidfd = os.pidfd_open(process.pid)
            # It stays readable.
            done = functools.partial(self._selector.unregister, member.pidfd)
            self._selector.register(member.pidfd, selectors.EVENT_READ, done)

    def _forget(self, member: Member) -> None:
        if member.pidfd is not None:
            with suppress(KeyError):
                self._selector.unregister(member.pidfd)
            os.close(member.pidfd)
        member.pidfd = None

    # -- what they say -------------------------------------------------------------------------------------------------

    def _put(self, process: subprocess.Popen[bytes], message: Message) -> None:
        """Called in the thread of a channel."""
        self._said.put((process, message))
        with suppress(BlockingIOError):  # it is awake
            self._waker.send(b"\0")

    def _hear(self, process: subprocess.Popen[bytes], message: Message) -> None:
        if message.kind == "saved":
            self._has_saved = True
        if message.kind != "state":
            return
        for member in self._members.values():
            if member.process is process:  # else it has been ended before it was heard
                member.state, member.generation = str(message.fields["state"]), int(message.fields["generation"])
                member.reason = str(message.fields["reason"])

    # -- what follows --------------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        """Acts on what has happened; returns the exit code when it is over."""
        now = time.monotonic()
        codes = {member.rank: member.exit_code for member in self._members.values()}
        if all(code is not None for code in codes.values()) and (self._stops_until or not any(codes.values())):
            return 0 if not any(codes.values()) else 1
        if self._stops_until is not None:
            if now > self._stops_until:
                self._signal(signal.SIGKILL)
            return None
        if any(codes.values()):
            if self._stop_asked:  # it had no time to save, and the others cannot without it
                self._stops_until = now + self._term_timeout_s
                self._signal(signal.SIGTERM)
                return None
            time.sleep(deadlines.DIE_TOGETHER_WITHIN_S)
            while not self._workers.are_heard and time.monotonic() < now + _HEARD_WITHIN_S:
                time.sleep(0.001)
            self._listen(0)  # what was said before
            return self._mend([member for member in self._members.values() if member.exit_code])
        if self._replacing_since is not None:
            self._check_replacement(now - self._replacing_since)
        if self._stop_asked and self._replacing_since is None:  # else they could not save
            self._stops_until = now + self._term_timeout_s
            self._signal(signal.SIGTERM)
        return None

    def _check_replacement(self, seconds: float) -> None:
        """Looks whether the ranks of a new generation have come together, or never will."""
        members = self._members.values()
        if refusal := next((member for member in members if member.state == "refused"), None):
            self._restart(f"rank {refusal.rank} cannot go back: {refusal.reason}")
        elif all(member.state in ("ready", "done") and member.generation == self._generation for member in members):
            self._replacing_since = None
        elif seconds > deadlines.REPLACED_WITHIN_S:
            self._restart(f"the replacement has not begun to train within {seconds:.0f} s")
        elif seconds > deadlines.SURVIVORS_LEAVE_WITHIN_S:
            for member in members:
                if member.exit_code is not None:
                    return self._restart(f"rank {member.rank} has ended instead of joining the others")
                if member.state == "ready" and self._is_behind(member):
                    return self._restart(f"rank {member.rank} has not left the fit within {seconds:.0f} s")
        return None

    def _is_behind(self, member: Member) -> bool:
        return member.generation < self._generation

    def _mend(self, dead: list[Member]) -> int | None:
        """Replaces the ranks that have ended, or restarts all."""
        how = {member.rank: _how(member.process.returncode) for member in dead}
        who = ", ".join(f"rank {rank} {what}" for rank, what in sorted(how.items()))
        if self._generation >= self._max_restarts:
            log_line(f"{who[0].upper()}{who[1:]}; no restart inside the job is left.")
            self._end_all()
            return 1
        if (reason := self._why_not(dead)) is not None:
            self._restart(f"{who}, and {reason}")
            return None
        self._generation += 1
        log_line(
            f"{who[0].upper()}{who[1:]}: starting a replacement (restart {self._generation}). The other ranks keep "
            "their processes."
        )
        old, self._store = self._store, serve_store(deadlines.STORE_WITHIN_S)
        self._port = self._store.port
        for member in self._members.values():
            if member not in dead:
                self._workers.tell(member.rank, "replace", generation=self._generation, port=self._port, lost=how)
        del old  # whoever is blocked there is free
        self._workers.ended(*how)
        for member in dead:
            self._forget(member)
            self._start(member.rank)
        self._replacing_since = time.monotonic()
        self._record(how)
        return None

    def _why_not(self, dead: list[Member]) -> str | None:
        """Why a loss is not mended by a replacement."""
        if not all(is_replaceable(member.process.returncode) for member in dead):
            return "what an exception ends is not replaced"
        if not self._has_saved:
            return "nothing was saved yet"
        others = [member for member in self._members.values() if member not in dead]
        if not others:
            return "there is no other rank"
        for member in others:
            is_starting = self._replacing_since is not None and member.state in ("starting", "left")
            if member.state != "ready" and not is_starting:
                return f"rank {member.rank} is not in a fit" + (f": {member.reason}" if member.reason else "")
        return None

    def _record(self, how: dict[int, str]) -> None:
        event = RanksReplaced(
            ranks=sorted(how),
            kept=self._world_size - len(how),
            elastic_run_id=self._run_id,
            restart_count=self._generation,
            reason="; ".join(f"rank {rank} {what}" for rank, what in sorted(how.items())),
        )
        # In a thread: the storage may not answer.
        threading.Thread(target=lambda: self._ledger.record(event), daemon=True).start()

    def _restart(self, reason: str) -> None:
        """Ends all ranks and starts them again."""
        if self._generation >= self._max_restarts:
            log_line(f"All ranks end: {reason}; no restart inside the job is left.")
            self._max_restarts = -1
        else:
            log_line(f"Restarting all ranks: {reason}.", is_detail=True)
        self._end_all()
        self._replacing_since = None
        if self._max_restarts < 0:
            self._stops_until = time.monotonic()
            return
        self._generation += 1
        self._store = serve_store(deadlines.STORE_WITHIN_S)
        self._port = self._store.port
        for rank in range(self._world_size):
            self._forget(self._members[rank])
            self._start(rank)

    def _end_all(self) -> None:
        for rank in self._members:
            self._workers.tell(rank, "restart")
        for signum, within_s in (
            (None, deadlines.PEERS_RAISE_WITHIN_S),
            (signal.SIGTERM, deadlines.WORKERS_STOP_TIMEOUT_S),
            (signal.SIGKILL, deadlines.LEFTOVERS_PATIENCE_S),
        ):
            if signum is not None:
                self._signal(signum)
            until = time.monotonic() + within_s
            while any(member.exit_code is None for member in self._members.values()):
                if time.monotonic() > until:
                    break
                time.sleep(_POLL_WITHOUT_PIDFD_S)

    def _signal(self, signum: signal.Signals) -> None:
        for member in self._members.values():
            if member.exit_code is None:
                member.process.send_signal(signum)

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop_asked = True


def _how(exit_code: int) -> str:
    if exit_code == exit_codes.HUNG:
        return "hung and was ended by its watchdog"
    return str(Death(-exit_code if exit_code < 0 else exit_code << 8))


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
