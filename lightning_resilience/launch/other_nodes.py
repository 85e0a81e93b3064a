"""The other nodes for the supervisor of ``launch --elastic`` on the first node: their ranks look like its own ranks.

The supervisors of the other nodes (:mod:`~lightning_resilience.launch.follower`) do what the first node's supervisor
asks, so everything is decided in one place. If a node is lost, its ranks count as killed.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from lightning_resilience import _loopback
from lightning_resilience._output import log_line
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.node_line import Line, greet
from lightning_resilience.run import deadlines

_JOINING_AT_ONCE = 64
_POLL_S = 0.05


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket to which all nodes can connect.

    Args:
        host: The name or address by which the other nodes know this node.
        port: The port; default: any.
    """
    if host in (_loopback.ADDRESS, "localhost"):
        return socket.create_server((_loopback.ADDRESS, port))
    # On all interfaces, as torch does: on this node the name may resolve to another address (127.0.1.1) than elsewhere.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


class RemoteProcess:
    """The process of a rank on another node.

    Args:
        node: The node.
        life: Its number, by which both nodes know it.

    Attributes:
        returncode: How it has ended, as ``subprocess.Popen`` gives it; ``None``: it has not.
    """

    def __init__(self, node: OtherNode, life: int) -> None:
        self._node, self._life = node, life
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How the process has ended; ``None``: it has not."""
        return self.returncode

    def send_signal(self, signum: signal.Signals) -> None:
        """Sends the process a signal."""
        self._node.line.send("signal", life=self._life, signum=int(signum))


class OtherNode:
    """A node that follows the first one.

    Args:
        line: The connection to it.
        name: Its name.
        node_rank: The number that it was given, if any.
        heard: Called in a thread with each message of a rank; with ``None`` when something else has happened.
        process: Distinguishes its follower from other followers with the same number.

    Attributes:
        is_lost: Whether its connection has ended.
        spares: The local ranks for which a spare was ready when the node was last asked.
        has_stopped: Whether its launcher was told to stop.
    """

    def __init__(
        self,
        line: Line,
        name: str,
        node_rank: int | None,
        heard: Callable[[RemoteProcess | None, Message], None],
        process: str = "",
    ) -> None:
        self.line, self.name, self.node_rank, self.process = line, name, node_rank, process
        self.is_lost = self.has_stopped = False
        self.spares: frozenset[int] = frozenset()
        self._heard = heard
        self._lives: list[RemoteProcess] = []
        self._asked = self._answered = 0
        line.listen(self._take, self._end)

    def start(self, rank: int, environment: Mapping[str, str]) -> RemoteProcess:
        """Starts a rank.

        Args:
            rank: Its local rank.
            environment: The environment variables that differ from rank to rank.
        """
        process = RemoteProcess(self, len(self._lives))
        self._lives.append(process)
        if self.is_lost or not self.line.send("start", rank=rank, life=len(self._lives) - 1, environment=environment):
            process.returncode = -signal.SIGKILL
        return process

    def clear(self, ranks: Collection[int]) -> None:
        """Reports to the node that these ranks have ended.

        Args:
            ranks: Their local ranks.
        """
        self.line.send("clear", ranks=[*ranks])

    def tell(self, rank: int, kind: str, **fields: Any) -> None:
        """Sends a rank a message.

        Args:
            rank: Its local rank.
            kind: The type of the message, see :mod:`~lightning_resilience.launch.channel`.
            fields: Its content.
        """
        self.line.send("tell", rank=rank, message=kind, fields=fields)

    def has_spare(self, rank: int) -> bool:
        """Whether a spare process is ready for a rank.

        Args:
            rank: Its local rank.
        """
        return not self.is_lost and rank in self.spares

    def dismiss(self) -> None:
        """Makes the node end its ranks and leave the run."""
        self.line.send("end", code=0)
        self._end()

    def settle(self) -> None:
        """Asks the node to pass on all messages of its ranks."""
        self._asked += 1
        self.line.send("settle", number=self._asked)

    @property
    def is_settled(self) -> bool:
        """Whether the node has passed on everything that was asked for."""
        return self.is_lost or self._answered == self._asked

    def _take(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "said":
            self._heard(self._lives[fields["life"]], Message(fields["message"], fields["fields"], []))
            return
        if message.kind == "ended":
            self._lives[fields["life"]].returncode = int(fields["code"])
        elif message.kind == "settled":
            self.spares = frozenset(map(int, fields["spares"]))
            self._answered = int(fields["number"])
        elif message.kind == "stop":
            self.has_stopped = True
        self._heard(None, message)

    def _end(self) -> None:
        self.is_lost = True
        for process in self._lives:
            if process.returncode is None:
                process.returncode = -signal.SIGKILL
        self._heard(None, Message("gone", {}, []))


class NodesMissing(Exception):
    """Not enough nodes have connected."""


class OtherNodes:
    """All nodes except the first, on which this object exists.

    Args:
        host: Name or address at which the nodes meet.
        port: Port at which the nodes meet.
        count: How many nodes there are, including the first.
        ranks: How many ranks each of them has.
        secret: The secret in the run directory, which followers have read.
        heard: See :class:`OtherNode`.

    Attributes:
        host: Name or address at which the nodes meet.
        port: Port at which the nodes meet.
        count: How many nodes there are, including the first.
        nodes: The nodes that take part, by node rank - 1, once they have been gathered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        count: int,
        ranks: int,
        secret: bytes,
        heard: Callable[[RemoteProcess | None, Message], None],
    ) -> None:
        self.host = host
        self.nodes: list[OtherNode] = []
        self.count = count
        self._others, self._ranks, self._secret, self._heard = count - 1, ranks, secret, heard
        self._joined: list[OtherNode] = []
        self._admitting, self._superseded = threading.Lock(), set[str]()
        self._joining = threading.Semaphore(_JOINING_AT_ONCE)
        self._server = listen(host, port)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="resilience-nodes", daemon=True).start()

    def gather(self, within_s: float, has_stopped: Callable[[], bool], least: int | None = None) -> None:
        """Waits until all nodes have connected.

        Args:
            within_s: How long to wait.
            has_stopped: Whether to stop waiting.
            least: Once this many other nodes have connected, the wait for more is shorter; missing nodes then count as
                lost.

        Raises:
            NodesMissing: If too few have connected, or the wait was stopped.
        """
        began = time.monotonic()
        while True:
            self.close_silent()
            present = [node for node in self._joined if not node.is_lost]
            waited_s = time.monotonic() - began
            places = numbered(present, self._others)
            is_enough = least is not None and len(present) >= least and waited_s > deadlines.NODES_AWAITED_S
            if None not in places or is_enough:
                self.nodes = [node or self._absent(place) for place, node in enumerate(places, 1)]
                return
            if has_stopped() or waited_s > within_s:
                raise NodesMissing(f"{len(present)} of {self._others} other nodes have connected")
            time.sleep(_POLL_S)

    def _absent(self, number: int) -> OtherNode:
        """A node that counts as lost, as a placeholder for a node that has not come."""
        with socket.create_server((_loopback.ADDRESS, 0)) as server:
            closed = socket.create_connection(server.getsockname())
        node = OtherNode(Line(closed), f"node {number}", None, self._heard)
        node.is_lost = True
        return node

    def readmit(self) -> None:
        """Gives the places of lost nodes to nodes that have connected since."""
        free = [node for node in self._joined if not node.is_lost and node not in self.nodes]
        for place, node in enumerate(self.nodes):
            fits = [each for each in free if _place(each, len(self.nodes)) in (None, place)]
            if node.is_lost and fits:
                self.nodes[place] = fits[0]
                free.remove(fits[0])

    def close_silent(self) -> None:
        """Closes the connections to nodes that have been silent for too long: they are lost."""
        for node in self._joined:
            node.line.close_if_silent()

    def settle(self) -> None:
        """Asks all nodes to pass on all messages of their ranks."""
        for node in self.nodes:
            node.settle()

    @property
    def are_settled(self) -> bool:
        """Whether all nodes have passed on everything that was asked for."""
        return all(node.is_settled for node in self.nodes)

    def finish(self, code: int) -> None:
        """Reports the end of the run to all nodes, and waits until they have closed their connections.

        Args:
            code: The exit code of the run.
        """
        for node in self._joined:
            node.line.send("end", code=code)
        until = time.monotonic() + deadlines.LEFTOVERS_PATIENCE_S
        for node in self._joined:
            node.line.wait_for_end(until - time.monotonic())
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # otherwise the thread would keep waiting
        self._server.close()

    def _accept(self) -> None:
        while True:
            self._joining.acquire()
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                self._joining.release()
                time.sleep(_POLL_S)
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            line = Line(connection)
            if (said := greet(line, self._secret)) is None:
                return line.close()
            node_rank, count = said["node_rank"], said["count"]
            if count != self._ranks:
                log_line(
                    f"{said['node']} cannot take part: it has {count} ranks, but the first node has {self._ranks}."
                )
                line.send("end", code=1)
                return line.close()
            with self._admitting:
                if (process := said["process"]) in self._superseded:
                    log_line(f"{said['node']} cannot take part: node {node_rank} is another process now.")
                    line.send("end", code=1)
                    return line.close()
                for other in self._joined:
                    if node_rank is not None and other.node_rank == node_rank:
                        other.line.close()  # this node was started again
                        if other.process != process:
                            self._superseded.add(other.process)
                self._joined.append(OtherNode(line, said["node"], node_rank, self._heard, process))
            self._heard(None, Message("joined", {}, []))
        except (OSError, TypeError, KeyError):  # the node is gone, or sends something else
            connection.close()
        finally:
            self._joining.release()
        return None


def numbered(nodes: list[OtherNode], count: int) -> list[OtherNode | None]:
    """These nodes by their numbers, which start at 1; nodes without a number fill the gaps in the order of connection.

    Args:
        nodes: The nodes that have connected.
        count: How many other nodes take part.

    Returns:
        One entry for each place; ``None`` where a node is missing.
    """
    places: list[OtherNode | None] = [None] * count
    for node in nodes:
        if (place := _place(node, count)) is not None:
            places[place] = node
    others = iter([node for node in nodes if _place(node, count) is None])
    return [node if node is not None else next(others, None) for node in places]


def _place(node: OtherNode, count: int) -> int | None:
    """The place of this node; ``None``: any, since it has no number, or a number that is too large for this run."""
    return node.node_rank - 1 if node.node_rank is not None and 1 <= node.node_rank <= count else None
