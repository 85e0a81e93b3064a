"""The supervisor of ``launch --elastic`` on every node except the first: does what the first node's supervisor asks.

It starts and signals the ranks of its node as it is told, and passes on their messages and how they end
(:mod:`~lightning_resilience.launch.node_line`). If it loses the first node, it ends its ranks and tries to
reconnect while there are signs that the first node is alive: a network cable may have been unplugged.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lightning_resilience._output import log_line
from lightning_resilience.elastic import nccl
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.node_line import Line, introduce, read_secret
from lightning_resilience.launch.spares import Workers
from lightning_resilience.run import deadlines
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, JOINS_VARIABLE

_POLL_S = 0.05
_PASSED_ON = ("state", "saved")
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *(ELASTIC_VARIABLE, JOINS_VARIABLE),
)


def rank_environment(own: Mapping[str, str], count: int, run_id: str) -> dict[str, str]:
    """The environment of a rank.

    Args:
        own: The variables that differ between ranks and generations.
        count: How many ranks its node has.
        run_id: ``TORCHELASTIC_RUN_ID`` of the ranks.
    """
    # As torch's launcher does: all ranks together must not have more threads than cores. And torch need not log that a
    # store was closed under its clients.
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"OMP_NUM_THREADS": "1"} if count > 1 else {})
    always = {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # there is one for each generation
        "TORCH_GLOO_LAZY_INIT": "0",  # only connections that are made when a group is opened can be cut at a loss
    }
    return {**defaults, **nccl.ENVIRONMENT, **os.environ, **own, **always}


def handle_signals(stop: Callable[[int, FrameType | None], None]) -> None:
    """Makes this process stop on SIGTERM and SIGINT, and ignore the other signals of a scheduler.

    Args:
        stop: The handler.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signum, lambda signum, frame: None)  # unlike SIG_IGN, child processes do not inherit it


class FirstNodeLost(Exception):
    """The first node cannot be reached, or another program answers there."""


def join(
    endpoint: tuple[str, int],
    secret: Callable[[], bytes | None],
    node_rank: int | None,
    count: int,
    has_stopped: Callable[[], bool] = lambda: False,
    within_s: float | None = None,
    process: str = "",
) -> Line:
    """Connects to the first node.

    Args:
        endpoint: Host and port of the first node.
        secret: Reads the secret; returns ``None`` while it does not exist.
        node_rank: The number of this node, if it was given one.
        count: How many ranks it has.
        has_stopped: Whether to stop trying.
        within_s: How long to try; default: ten minutes.
        process: Distinguishes this process from others with the same number.

    Raises:
        FirstNodeLost: If no attempt has succeeded in this time.
    """
    within_s = deadlines.FIRST_NODE_WITHIN_S if within_s is None else within_s
    until, problem = time.monotonic() + within_s, "it has not made a secret in the run directory"
    while time.monotonic() < until and not has_stopped():
        if (known := secret()) is not None:
            try:
                line = Line(socket.create_connection(endpoint, deadlines.NODE_JOINS_WITHIN_S))
            except OSError as error:
                problem = str(error)
            else:
                if introduce(line, known, node_rank, count, process):
                    return line
                line.close()
                problem = "it does not know the secret of this run, or does not answer"
        time.sleep(_POLL_S)
    raise FirstNodeLost(f"the first node cannot be joined at {endpoint[0]}:{endpoint[1]}: {problem}")


class Follower:
    """The supervisor of a node that is not the first.

    Args:
        command: The command that each rank runs.
        count: How many ranks this node has.
        run_id: ``TORCHELASTIC_RUN_ID`` of the ranks.
        makes_spares: Whether spare processes wait to replace ranks.
        log: The file for log lines about spares.
    """

    def __init__(
        self, command: list[str], count: int, run_id: str, makes_spares: bool = False, log: TextIO | None = None
    ) -> None:
        self._command, self._count, self._run_id = command, count, run_id
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._workers = Workers(makes_spares, log, self._hear)
        self._lives: dict[int, subprocess.Popen[bytes]] = {}
        self._ranks: set[int] = set()
        self._has_stopped = False
        self._process = secrets.token_hex(8)
        self._is_given_up: Callable[[], bool] = lambda: False

    def handle_signals(self) -> None:
        """Passes SIGTERM and SIGINT on to the first node; ignores the other signals of a scheduler."""
        handle_signals(self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._has_stopped = True
        self._put("stop")

    def _is_over(self) -> bool:
        return self._has_stopped or self._is_given_up()

    def _put(self, kind: str, **fields: Any) -> None:
        self._events.put(Message(kind, fields, []))

    def _hear(self, process: subprocess.Popen[bytes], message: Message) -> None:
        if message.kind in _PASSED_ON:
            self._put("said", process=process, message=message.kind, fields=message.fields)

    def run(
        self,
        endpoint: tuple[str, int],
        secret: Path,
        node_rank: int | None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> int:
        """Does what the first node asks, until the run is over; returns the exit code.

        Args:
            endpoint: Host and port of the first node.
            secret: The path of the secret, see :func:`~lightning_resilience.launch.node_line.secret_path`.
            node_rank: The number of this node, if it was given one.
            is_given_up: Whether a first node that was lost will not come back.
        """
        within_s, kept = deadlines.FIRST_NODE_WITHIN_S, b""

        def known() -> bytes | None:
            nonlocal kept
            kept = kept or read_secret(secret) or b""  # once: the storage may need the same network cable
            return kept or None

        while True:
            try:
                line = join(endpoint, known, node_rank, self._count, self._is_over, within_s, self._process)
            except (FirstNodeLost, OSError) as error:
                why = "the supervisor of the first node has ended" if self._is_given_up() else error
                log_line(f"No ranks are started on {node_name()}: {why}.")
                return 1
            if (code := self._follow(line)) is not None or self._has_stopped:
                return 1 if code is None else code
            self._is_given_up, within_s = is_given_up, math.inf  # earlier, the first node may not have begun
            self._events, self._lives = queue.SimpleQueue(), {}
            self._workers.ended(*self._ranks)
            self._ranks.clear()

    def _follow(self, line: Line) -> int | None:
        """Follows the first node until the run is over, and returns the exit code; ``None``: the first node is lost."""
        events = self._events
        line.listen(events.put, lambda: events.put(Message("gone", {}, [])))
        while True:
            try:
                message = self._events.get(timeout=deadlines.NODE_BEAT_S)
            except queue.Empty:
                line.close_if_silent()
                continue
            if message.kind in ("gone", "end"):
                break
            self._act(line, message)
        if message.kind == "gone" and not self._has_stopped:
            log_line("Lost the connection to the first node: stopping this node's ranks and trying to reconnect.")
        for rank in self._ranks:
            self._workers.tell(rank, "restart")
        _end_in_order(self._lives.values())
        line.close()
        return None if message.kind == "gone" else int(message.fields.get("code", 1))

    def _act(self, line: Line, message: Message) -> None:
        fields = message.fields
        if message.kind == "start":
            self._start(**fields)
        elif message.kind == "clear":
            self._workers.ended(*self._ranks.intersection(fields["ranks"]))
            self._ranks.difference_update(fields["ranks"])
        elif message.kind == "tell":
            if fields["rank"] in self._ranks:  # otherwise it was a rank of the node that this one replaces
                self._workers.tell(fields["rank"], fields["message"], **fields["fields"])
        elif message.kind == "signal":
            if (process := self._lives[fields["life"]]).poll() is None:
                process.send_signal(fields["signum"])
        elif message.kind == "said":
            if (life := self._life_of(fields["process"])) is not None:
                line.send("said", life=life, message=fields["message"], fields=fields["fields"])
        elif message.kind in ("ended", "settle") and not fields.get("is_last"):
            self._await_words()
            self._events.put(Message(message.kind, {**fields, "is_last": True}, []))  # after these messages
        elif message.kind == "ended":
            line.send("ended", life=fields["life"], code=fields["code"])
        elif message.kind == "settle":
            spares = [rank for rank in self._ranks if self._workers.has_spare(rank)]
            line.send("settled", number=fields["number"], spares=spares)
        elif message.kind == "stop":
            line.send("stop")

    def _await_words(self) -> None:
        until = time.monotonic() + deadlines.WORDS_HEARD_WITHIN_S
        while not self._workers.are_heard and time.monotonic() < until:
            time.sleep(0.001)

    def _life_of(self, process: subprocess.Popen[bytes]) -> int | None:
        return next((life for life, each in self._lives.items() if each is process), None)

    def _start(self, rank: int, life: int, environment: Mapping[str, str]) -> None:
        own = {name: str(value) for name, value in environment.items() if name in _OF_A_RANK}
        full = rank_environment(own, self._count, self._run_id)
        process = self._lives[life] = self._workers.start(rank, self._command, full, None, None)
        self._ranks.add(rank)
        events = self._events  # of this connection: after a new one, the first node does not know this life

        def wait() -> None:
            events.put(Message("ended", {"life": life, "code": process.wait()}, []))

        threading.Thread(target=wait, name="resilience-wait", daemon=True).start()


def _end_in_order(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Waits for ranks that were told to end; then ends them by SIGTERM and SIGKILL."""
    for signum, within_s in (
        (None, deadlines.PEERS_RAISE_WITHIN_S),
        (signal.SIGTERM, deadlines.WORKERS_STOP_TIMEOUT_S),
        (signal.SIGKILL, deadlines.LEFTOVERS_PATIENCE_S),
    ):
        until = time.monotonic() + within_s
        for process in processes:
            if signum is not None and process.poll() is None:
                process.send_signal(signum)
        while any(process.poll() is None for process in processes):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
