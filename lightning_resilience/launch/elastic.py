"""The supervisor of ``launch --elastic``: starts the ranks and replaces a lost rank while the other ranks keep running.

It takes the role of torch's elastic launcher and gives each rank the same environment. torch's launcher can't be
extended to this. Its ``LocalElasticAgent`` holds all ranks in one ``PContext``, which closes all of them as soon as one
has failed, whose handles are private, and which is polled every 0.1 s. It also has one store for each start, but a
replacement needs a new store before the survivors have left the old one.

Each start of the ranks, and each replacement, is a *generation* with a store of its own in this process. So the death
of rank 0 is like the death of any other rank, nothing of an older generation reaches a newer one, and closing the store
of a generation frees every rank that is blocked in it. The number of a generation is the restart count in the
environment of its ranks. Every generation after the first counts as one restart inside the job, except where newcomers
are admitted, where ranks leave with their node, and where all ranks start again to begin another fit.

The supervisor notices the death of a process on its node by a pidfd. The class in
:mod:`~lightning_resilience.launch.loss_policy` decides what follows.
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
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO, TypeVar, Union

from lightning_resilience import _nvrx
from lightning_resilience._daemon import in_daemon_thread
from lightning_resilience._loopback import ADDRESS, listen, serve_store
from lightning_resilience._output import introduce, log_line
from lightning_resilience.launch import follower, node_line, nodes, other_nodes
from lightning_resilience.launch.budget import budget_of
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.loss_policy import LossPolicy, WhenLost
from lightning_resilience.launch.other_nodes import NodesMissing, OtherNode, OtherNodes, RemoteProcess
from lightning_resilience.launch.spares import SPARES_VARIABLE, Workers
from lightning_resilience.run import deadlines
from lightning_resilience.run.events import RanksReplaced
from lightning_resilience.run.history import History
from lightning_resilience.run.ledger import Ledger, read_ledger
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, JOINS_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

_POLL_WITHOUT_PIDFD_S = 0.01
_RECORDED_WITHIN_S = 1.0
_READ_WITHIN_S = 3.0

_T = TypeVar("_T")

Process = Union["subprocess.Popen[bytes]", RemoteProcess]


class Supervisor:
    """Runs the ranks to their end.

    Args:
        command: The command that each rank runs.
        world_size: How many ranks there are.
        max_restarts: How many restarts are allowed before the ledger is asked how many are left.
        run_id: ``TORCHELASTIC_RUN_ID`` of the ranks.
        term_timeout_s: How long the ranks may take to end after this process was told to stop.
        ledger: The ledger of the run.
        makes_spares: Whether spare processes wait to replace ranks.
        log: The file for log lines about spares.
        others: Makes this supervisor the first of several nodes: returns the object for the other nodes.
        when_lost: ``hold``: the other ranks wait for a replacement for which no spare is ready. ``go_on``: they keep
            training without it.
        min_ranks: With ``go_on``, the other ranks also wait if fewer ranks than this would keep training.
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
        others: Callable[[Callable[[RemoteProcess | None, Message], None]], OtherNodes] | None = None,
        when_lost: WhenLost = "hold",
        min_ranks: int = 1,
    ) -> None:
        self._command = command
        self._world_size = world_size
        self._max_restarts = max_restarts
        self._run_id = run_id
        self._ledger = ledger
        self._said: queue.SimpleQueue[tuple[Process | None, Message]] = queue.SimpleQueue()
        self._workers = Workers(makes_spares, log, self._put)
        self._goes_on, self._min_ranks = when_lost == "go_on", min_ranks
        self._policy = LossPolicy(self, world_size, max_restarts, term_timeout_s, when_lost, min_ranks)
        self._doors: dict[int, socket.socket] = {}
        self._processes: dict[int, Process] = {}
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(64))
        self._others = others(self._put) if others is not None else None
        self._count = world_size // (self._others.count if self._others is not None else 1)
        self._ended: set[Process] = set()

    def handle_signals(self) -> None:
        """Ends the ranks in order on SIGTERM and SIGINT; ignores the other signals of a scheduler."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        follower.handle_signals(self._ask_to_stop)

    def run(self) -> int:
        """Runs all ranks; returns 0 if all of them have ended with exit code 0, otherwise 1."""
        try:
            self._gather(begins=True)
            server = self._open()
            there = [rank for rank in range(self._world_size) if self.lost_node(rank) is None]
            if len(there) < self._world_size:
                log_line(f"Not all nodes are there: continuing with {len(there)} of {self._world_size} ranks.")
                self._policy.begin_with(time.monotonic(), there, self._port)
            else:
                for rank in there:
                    self._start(rank, generation=0, is_newcomer=False)
            self._store = serve_store(deadlines.STORE_WITHIN_S, server)  # imports torch, as the ranks do meanwhile
            while self._policy.result is None:
                self._policy.step(time.monotonic(), self._look())
                self._listen()
            code = self._policy.result
        except NodesMissing as missing:
            log_line(f"The ranks are not started: {missing}.")
            code = 1
        if self._others is not None:
            self._others.finish(code)
        return code

    def _gather(self, begins: bool = False) -> None:
        """Waits for the other nodes; with ``go_on`` and a verified state, the first start needs only enough of them."""
        if self._others is not None:
            may_begin = begins and self._goes_on and self._read(lambda history: history.verified_step is not None)
            least = -(-self._min_ranks // self._count) - 1 if may_begin else None
            self._others.gather(deadlines.FIRST_NODE_WITHIN_S, lambda: self._policy.is_stopping, least)

    def _open(self) -> socket.socket:
        server = listen() if self._others is None else other_nodes.listen(self._others.host)
        self._port = server.getsockname()[1]
        return server

    def _listen(self) -> None:
        within_s = self._policy.wakes_at - time.monotonic()
        if len(self._pidfds) < self._count:
            within_s = min(within_s, _POLL_WITHOUT_PIDFD_S)
        for key, _ in self._selector.select(max(0.0, within_s)):
            key.data()

    def _look(self) -> bool:
        """Passes events on to the policy; returns whether every message that ended ranks had sent was read."""
        if self._others is not None:
            self._others.close_silent()
            if self._goes_on:
                self._others.readmit()
        ended = set()
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                self._policy.ended(rank, code)
                ended.add(process)
        are_heard = self._workers.are_heard
        if self._others is not None:
            nodes = enumerate(self._others.nodes, 1)
            stopped = [number for number, node in nodes if node.has_stopped and not node.is_lost]
            self._policy.ask_to_leave([rank for rank in self._processes if self._place(rank)[0] in stopped])
            if ended - self._ended:
                self._others.settle()
            are_heard = are_heard and self._others.are_settled
        self._ended = ended
        with suppress(queue.Empty):
            while True:
                self._hear(*self._said.get_nowait())
        return are_heard

    # -- what the policy asks for --------------------------------------------------------------------------------------

    def open_store(self) -> int:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        self._old_store, self._store = self._store, serve_store(deadlines.STORE_WITHIN_S, self._open())
        port: int = self._port
        return port

    def close_old_store(self) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        self._old_store = None

    def close_stores(self) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        self._old_store = self._store = None

    def start(self, ranks: Collection[int], generation: int, is_newcomer: bool) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        lost = {name for name in map(self.lost_node, ranks) if name is not None}
        if lost and len(ranks) == self._world_size:  # otherwise the node was lost after the decision, with its ranks
            within_s = deadlines.FIRST_NODE_WITHIN_S
            log_line(f"Lost {', '.join(sorted(lost))}: waiting up to {within_s:.0f} s for a launch in its place.")
            self._gather()
        self._workers.ended(*(rank for rank in ranks if rank < self._count and rank in self._processes))
        for number, node in enumerate(self._others.nodes if self._others is not None else [], 1):
            if here := [local for rank in ranks for group, local in [self._place(rank)] if group == number]:
                node.clear(here)
        for rank in ranks:
            self._forget(rank)
            self._start(rank, generation, is_newcomer)

    def has_spare(self, rank: int) -> bool:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        group, local = self._place(rank)
        return self._workers.has_spare(local) if (node := self._node(group)) is None else node.has_spare(local)

    def lost_node(self, rank: int) -> str | None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        node = self._node(self._place(rank)[0])
        return node.name if node is not None and node.is_lost else None

    def dismiss(self, ranks: Collection[int]) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        for node in {self._node(self._place(rank)[0]) for rank in ranks}:
            if node is not None:
                node.dismiss()

    def tell(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        for rank in ranks:
            group, local = self._place(rank)
            (self._node(group) or self._workers).tell(local, kind, **fields)

    def send_signal(self, ranks: Collection[int], signum: signal.Signals) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        if self._others is not None and self._policy.is_stopping and signum == signal.SIGTERM:
            self.tell(ranks, "stop")  # otherwise they take SIGTERM for a scheduler's, perhaps to their node alone
        for rank in ranks:
            self._processes[rank].send_signal(signum)

    def restarts_left(self) -> int:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""

        def ask(history: History) -> int:
            decision = budget_of(history).decide(history, time.time())
            return decision.max_restarts if decision.action == "start" else 0

        return self._read(ask) or 0  # if the ledger cannot be read, all ranks end, and the launch decides

    def _read(self, ask: Callable[[History], _T]) -> _T | None:
        """What ``ask`` returns for the run's history; ``None`` if that fails. In a thread: the storage may hang."""

        def read() -> _T:  # in a thread of its own: a read that hangs must not delay the next one
            return ask(History(read_ledger(self._ledger.path)))

        try:
            return in_daemon_thread(read, "reads-history").result(_READ_WITHIN_S)
        except Exception:
            return None

    def record(
        self, lost: Mapping[int, str], generation: int, members: Collection[int] | None, kept: Collection[int]
    ) -> None:
        """See :class:`~lightning_resilience.launch.newcomers.Ranks`."""
        event = RanksReplaced(
            ranks=sorted(lost),
            kept=len(kept),
            members=None if members is None else sorted(members),
            elastic_run_id=self._run_id,
            restart_count=generation,
            reason="; ".join(f"rank {rank} {what}" for rank, what in sorted(lost.items())) or None,
        )
        # In a thread: the storage may not answer.
        thread = threading.Thread(target=lambda: self._ledger.record(event), daemon=True)
        thread.start()
        if not lost:
            thread.join(_RECORDED_WITHIN_S)

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, generation: int, is_newcomer: bool) -> None:
        group, local = self._place(rank)
        groups = 1 if self._others is None else self._others.count
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": str(group),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._count),
            "ROLE_WORLD_SIZE": str(self._world_size),
            "GROUP_WORLD_SIZE": str(groups),
            "MASTER_ADDR": ADDRESS if self._others is None else self._others.host,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            ELASTIC_VARIABLE: "go_on" if self._goes_on else "hold",
        }
        if is_newcomer:
            # A newcomer is in no generation. Files and logs that are named after its port must not be shared with a
            # member, so it has a port of its own, at which nobody listens.
            door = self._doors[rank] = socket.socket()
            door.bind((ADDRESS if self._others is None else "", 0))
            environment |= {JOINS_VARIABLE: "1", "MASTER_PORT": str(door.getsockname()[1])}
        if (node := self._node(group)) is not None:
            self._processes[rank] = node.start(local, environment)
            return
        full = follower.rank_environment(environment, self._count, self._run_id)
        started = self._processes[rank] = self._workers.start(rank, self._command, full, None, None)
        with suppress(OSError, AttributeError):  # an old kernel has no pidfd: the process is polled
            pidfd = self._pidfds[rank] = os.pidfd_open(started.pid)
            # A pidfd stays readable after the death.
            self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._selector.unregister, pidfd))

    def _place(self, rank: int) -> tuple[int, int]:
        """The number of a rank's node, and the number of the rank on that node."""
        return divmod(rank, self._count)

    def _node(self, number: int) -> OtherNode | None:
        return self._others.nodes[number - 1] if number and self._others is not None else None

    def _forget(self, rank: int) -> None:
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            with suppress(KeyError):
                self._selector.unregister(pidfd)
            os.close(pidfd)
        if (door := self._doors.pop(rank, None)) is not None:
            door.close()

    # -- what ranks report ---------------------------------------------------------------------------------------------

    def _put(self, process: Process | None, message: Message) -> None:
        """Queues a message and wakes the main loop; called in the thread of a channel."""
        self._said.put((process, message))
        with suppress(BlockingIOError):  # the socket is full, so the loop wakes up anyway
            self._waker.send(b"\0")

    def _hear(self, process: Process | None, message: Message) -> None:
        rank = next((rank for rank, each in self._processes.items() if each is process), None)
        self._policy.heard(rank, message.kind, message.fields)

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._policy.ask_to_stop()


def main() -> None:
    """The program of the supervisor: ``--nproc-per-node N --max-restarts N ... -- SCRIPT ARGUMENTS``.

    With ``--nnodes N --rdzv-endpoint HOST:PORT`` it runs as the first of several nodes, with ``--follow`` as another.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node")
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--term-timeout", type=float)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--rdzv-endpoint", default="")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--when-lost", default="hold")
    parser.add_argument("--min-ranks", type=int, default=1)
    parser.add_argument("--min-nodes", type=int, default=0)
    separator = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:separator])
    count = options.nproc_per_node
    ranks = _nvrx.device_count() if count == "auto" else int(count)
    command = [sys.executable, "-m", "lightning_resilience.launch.worker", *sys.argv[separator + 1 :]]
    run_id = os.environ.pop(_nvrx.RUN_ID_VARIABLE)
    introduce("launch")
    run_directory = RunDirectory(os.environ[RUN_DIR_VARIABLE])
    ledger = Ledger(run_directory.ledger, rank=None)
    timeout_s = options.term_timeout
    log = _nvrx.open_log(str(_nvrx.elastic_log(run_directory.path)))
    makes_spares = os.environ.pop(SPARES_VARIABLE, "") == "auto" and sys.platform == "linux"
    host, _, port = options.rdzv_endpoint.rpartition(":")
    host = host.strip("[]")
    path = node_line.secret_path(run_directory.path, run_id)
    if options.follow:
        here = follower.Follower(command, ranks, run_id, makes_spares, log)
        here.handle_signals()
        pulse = nodes.Pulse(nodes.Board(run_directory.path / nodes.BOARD, "", options.rdzv_endpoint), run_id)
        code = here.run((host, int(port)), path, options.node_rank, pulse.has_stopped)
    else:
        others = None
        if options.nnodes > 1:
            secret = node_line.make_secret(path)
            others = functools.partial(OtherNodes, host, int(port), options.nnodes, ranks, secret)
        world_size = ranks * options.nnodes
        policy = (options.when_lost, max(options.min_ranks, options.min_nodes * ranks))
        supervisor = Supervisor(
            command, world_size, options.max_restarts, run_id, timeout_s, ledger, makes_spares, log, others, *policy
        )
        supervisor.handle_signals()
        code = supervisor.run()
        with suppress(OSError):
            path.unlink()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
