"""The plan that the nodes of a run follow: the first node makes and publishes it.

The plan is a small file in the run directory, which all nodes share. A counter in it moves while its owner lives. So a
node can distinguish the file of a dead launch from that of a live one without comparing the clocks of two machines.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from lightning_resilience._files import read_json, write_json
from lightning_resilience.run.deadlines import BEAT_INTERVAL_S, FIRST_NODE_STILL_AFTER_S

BOARD = "decision.json"
"""The plan's name in the run directory."""

_READ_EVERY_S = 1.0


class FirstNodeMissing(Exception):
    """The node that decides has published nothing for too long."""


class AnotherLaunch(Exception):
    """The nodes of another launch, which meet elsewhere, work in the run directory."""


@dataclass(frozen=True)
class Plan:
    """What all nodes do.

    Args:
        owner: Launch id of the deciding launch.
        run_id: Id of the rendezvous to join.
        max_restarts: How often the elastic launcher may restart the workers.
        job_attempt: Number of the job retry.
        nnodes: How many nodes meet: a number or ``MIN:MAX``.
        endpoint: Where the nodes meet; a node that was given another endpoint does not belong to them.
        node: The first node.
        excluded: The excluded nodes.
        replacements: Launch ids of the spares that replace them.
        spares: The spare nodes that wait.
        ends_for_new_job: Whether nodes are excluded by a new job, and not by this launch.
        exit_code: Set once the run is over.
        beat: A counter that moves while the owner lives.
    """

    owner: str
    run_id: str
    max_restarts: int
    job_attempt: int
    nnodes: str = "1"
    endpoint: str = ""
    node: str = ""
    excluded: list[str] = field(default_factory=list)
    replacements: list[str] = field(default_factory=list)
    spares: list[str] = field(default_factory=list)
    ends_for_new_job: bool = False
    exit_code: int | None = None
    beat: int = 0

    def why_not_excluded(self, nodes: Collection[str], count: int) -> str | None:
        """Why the run must continue with these nodes; ``None``: they can be excluded.

        Args:
            nodes: Their names.
            count: How many nodes take part, including these.
        """
        if self.ends_for_new_job:
            return None
        if 2 * len(nodes) > count:
            return "these are more than half of its nodes"
        if self.node in nodes:
            return f"all other nodes connect to the first node, {self.node}"
        least = int(self.nnodes.partition(":")[0])
        if count - len(nodes) + len(self.spares) < least:
            return f"it needs {least} nodes, and no launch --spare waits"
        return None


class Board:
    """The file in which the first node publishes its plan.

    Args:
        path: The file, on storage that all nodes share.
        launch_id: The id of this launch, if it publishes the plan.
        endpoint: Where this node was told that the nodes meet.
    """

    def __init__(self, path: Path, launch_id: str, endpoint: str = "") -> None:
        self.path = path
        self._launch_id = launch_id
        self._endpoint = endpoint
        self._published: Plan | None = None
        self._beat_at = 0.0

    def note_spares(self, spares: list[str]) -> None:
        """First node: publishes which spare nodes wait."""
        if self._published is not None and self._published.spares != spares:
            self.publish(replace(self._published, spares=spares))

    def publish(self, plan: Plan) -> None:
        """First node: publishes a plan."""
        self._published = plan
        self._beat_at = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(plan))

    def beat(self) -> None:
        """First node: shows that it lives; must be called often. If it cannot write, the other nodes are patient."""
        if self._published is not None and time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            with suppress(OSError):
                self.publish(replace(self._published, beat=self._published.beat + 1))

    def finish(self, exit_code: int) -> None:
        """First node: publishes the exit code of the run."""
        published = self._published or Plan(self._launch_id, "", max_restarts=0, job_attempt=0)
        with suppress(OSError):  # the other nodes end when the file does not change for too long
            self.publish(replace(published, exit_code=exit_code, beat=published.beat + 1))

    def read(self) -> Plan | None:
        """The plan that is published now, if it can be read."""
        content = read_json(self.path)
        try:
            return Plan(**content) if content is not None else None
        except TypeError:  # written by another version
            return None

    def wait_for(self, after: Plan | None, within_s: float, stop: Callable[[], bool]) -> Plan | None:
        """Other nodes: waits for the next plan of a living owner.

        Args:
            after: The plan that was followed last; ``None`` for the first one, which must not be a dead owner's.
            within_s: How long the file may stay unchanged.
            stop: Whether to stop waiting.

        Returns:
            The plan; ``None`` if ``stop`` has returned true.

        Raises:
            AnotherLaunch: If the living owner belongs to other nodes.
            FirstNodeMissing: If the file has not changed for ``within_s``.
        """
        first = after if after is not None else self.read()
        last = first
        moved_at = time.monotonic()
        while not stop():
            plan = self.read()
            if plan != last and plan is not None and not meet_alike(plan.endpoint, self._endpoint):
                if plan.exit_code is None and plan.beat > 0:
                    raise AnotherLaunch(
                        f"other nodes, with rendezvous {plan.endpoint} instead of {self._endpoint}, run "
                        f"{self.path.parent} already"
                    )
                plan = last
            if plan != last:
                last, moved_at = plan, time.monotonic()
            if plan is not None and plan != first:
                is_next = after is None or plan.exit_code is not None or plan.run_id != after.run_id
                if is_next:
                    return plan
            if time.monotonic() - moved_at > within_s:
                raise FirstNodeMissing(
                    f"the first node has written nothing to {self.path} for {within_s:.0f} s; is it running, and is "
                    "the run directory on storage that all nodes share?"
                )
            time.sleep(0.2)
        return None


class Pulse:
    """Checks on another node whether the first node still follows a plan.

    Args:
        board: Where the plan is published.
        run_id: Id of the plan's rendezvous.
    """

    def __init__(self, board: Board, run_id: str) -> None:
        self._board, self._run_id = board, run_id
        self._last: Plan | None = None
        self._moved_at = self._read_at = 0.0

    def has_stopped(self) -> bool:
        """Whether the first node has another plan, has ended, or has shown no sign of life; must be called often."""
        if time.monotonic() - self._read_at < _READ_EVERY_S:
            return False
        plan = self._board.read()
        now = self._read_at = time.monotonic()  # the storage may have hung
        if plan is not None and (plan.run_id != self._run_id or plan.exit_code is not None):
            return True
        if plan != self._last or self._moved_at == 0.0:
            self._last, self._moved_at = plan, now
        return now - self._moved_at > FIRST_NODE_STILL_AFTER_S


def why_not_excluded(run_dir: Path, nodes: Collection[str], count: int) -> str | None:
    """Why the run would continue with these nodes if a rank asked to exclude them; ``None`` also if that is unknown.

    Args:
        run_dir: The run directory.
        nodes: Their names.
        count: How many nodes take part, including these.
    """
    plan = Board(run_dir / BOARD, "").read()
    if plan is None or plan.run_id != os.environ.get("TORCHELASTIC_RUN_ID"):
        return None if count > 1 else "there is no other node to continue with"
    return plan.why_not_excluded(nodes, count)


def meet_alike(endpoint: str, other: str) -> bool:
    """Whether two nodes with these endpoints will meet; true also if that cannot be found out.

    Args:
        endpoint: ``HOST:PORT``, or empty.
        other: The endpoint of the other node.
    """
    if not endpoint or not other:
        return True
    (host, _, port), (other_host, _, other_port) = endpoint.rpartition(":"), other.rpartition(":")
    if port != other_port:
        return False
    addresses, others = _addresses(host), _addresses(other_host)
    is_known = addresses and others and not any(address.startswith(("127.", "::1")) for address in addresses | others)
    return host == other_host or not is_known or bool(addresses & others)


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def is_this_host(name: str) -> bool:
    """Whether ``name`` is a name or an address of this machine."""
    return not _addresses(name).isdisjoint(
        address.address for nics in psutil.net_if_addrs().values() for address in nics
    )
