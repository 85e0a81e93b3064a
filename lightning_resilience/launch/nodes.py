"""One owner for several nodes: the first node decides what happens next and publishes it, the others follow.

The decision is a small file in the run directory, which all nodes share. A counter in it moves while its owner lives: a
file that a dead launch has left behind is told from a live one without comparing the clocks of two machines.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from lightning_resilience._files import read_json, write_json

BEAT_INTERVAL_S = 5.0
OWNER_LOST_AFTER_S = 120.0
FIRST_NODE_WITHIN_S = 600.0


class FirstNodeMissing(Exception):
    """The node that decides has not published anything for too long."""


class AnotherLaunch(Exception):
    """The nodes of another launch, which meet elsewhere, are at work in the run directory."""


@dataclass(frozen=True)
class Decision:
    """What all nodes do.

    Args:
        owner: Launch id of the deciding launch.
        run_id: Id of the rendezvous to join.
        max_restarts: How often the elastic launcher may restart the workers.
        job_attempt: Number of the job retry.
        endpoint: Where the nodes meet; one that was told to meet elsewhere is none of them.
        exit_code: Set once the run is over.
        beat: Moves as long as the owner lives.
    """

    owner: str
    run_id: str
    max_restarts: int
    job_attempt: int
    endpoint: str = ""
    exit_code: int | None = None
    beat: int = 0


class Board:
    """Where the first node publishes its decision.

    Args:
        path: The file, on storage that all nodes share.
        launch_id: Who writes, if this node does.
        endpoint: Where this node was told that the nodes meet.
    """

    def __init__(self, path: Path, launch_id: str, endpoint: str = "") -> None:
        self.path = path
        self._launch_id = launch_id
        self._endpoint = endpoint
        self._published: Decision | None = None
        self._beat_at = 0.0

    def publish(self, run_id: str, max_restarts: int, job_attempt: int) -> None:
        """The first node: makes a new job known."""
        self._write(Decision(self._launch_id, run_id, max_restarts, job_attempt, self._endpoint))

    def _write(self, decision: Decision) -> None:
        self._published = decision
        self._beat_at = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(decision))

    def beat(self) -> None:
        """The first node: shows that it lives; to be called often."""
        if self._published is not None and time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            self._write(replace(self._published, beat=self._published.beat + 1))

    def finish(self, exit_code: int) -> None:
        """The first node: tells the others how it ends."""
        published = self._published or Decision(self._launch_id, run_id="", max_restarts=0, job_attempt=0)
        self._write(replace(published, exit_code=exit_code, beat=published.beat + 1))

    def read(self) -> Decision | None:
        """The decision that stands."""
        content = read_json(self.path)
        try:
            return Decision(**content) if content is not None else None
        except TypeError:  # another version's
            return None

    def wait_for(self, after: Decision | None, within_s: float, stop: Callable[[], bool]) -> Decision | None:
        """The others: waits for the next decision of a living owner.

        Args:
            after: The decision that was followed last; ``None`` for the first one, which must not be a dead owner's.
            within_s: How long the file may stand still.
            stop: Ends the waiting.

        Returns:
            The decision, or ``None`` if ``stop`` said so.

        Raises:
            AnotherLaunch: If it is the owner of other nodes that lives.
            FirstNodeMissing: If nothing has moved for ``within_s``.
        """
        first = after if after is not None else self.read()
        last = first
        moved_at = time.monotonic()
        while not stop():
            decision = self.read()
            if decision != last and decision is not None and not meet_alike(decision.endpoint, self._endpoint):
                if decision.exit_code is None and decision.beat > 0:
                    raise AnotherLaunch(
                        f"other nodes, which meet at {decision.endpoint} and not at {self._endpoint}, run "
                        f"{self.path.parent} already"
                    )
                decision = last
            if decision != last:
                last, moved_at = decision, time.monotonic()
            if decision is not None and decision != first:
                is_next = after is None or decision.exit_code is not None or decision.run_id != after.run_id
                if is_next:
                    return decision
            if time.monotonic() - moved_at > within_s:
                raise FirstNodeMissing(
                    f"the first node has written nothing to {self.path} for {within_s:.0f} s; is it running, and is "
                    "the run directory on storage that all nodes share?"
                )
            time.sleep(0.2)
        return None


def meet_alike(endpoint: str, other: str) -> bool:
    """Whether two nodes that were given these will meet; so they will if it cannot be said that they will not.

    Args:
        endpoint: ``HOST:PORT``, or nothing.
        other: The other's.
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
