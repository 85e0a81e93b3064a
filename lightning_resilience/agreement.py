"""Runs the protocol of ``agreement_protocol.py``, which says how it works, in a thread and on real stores."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_resilience._loopback import ADDRESS, serve_store
from lightning_resilience._processes import boot_id
from lightning_resilience.agreement_protocol import (
    Above,
    Announce,
    Event,
    LocalStore,
    Member,
    Needs,
    Operation,
    PeerLost,
    Position,
    Relay,
    Sleep,
    Watching,
    changes,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)
_T = TypeVar("_T")


def neighbourhood() -> str:
    """Names the processes that this one reaches by the loopback interface: they have the same."""
    name = os.uname().nodename
    with suppress(OSError):
        name += f" {boot_id()}"
        name += f" {os.stat('/proc/self/ns/net').st_ino}"
    return name


def nodes_of(neighbourhoods: Sequence[str]) -> list[list[int]]:
    """The ranks of every node, that of rank 0 first.

    Args:
        neighbourhoods: For each rank its :func:`neighbourhood`.
    """
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(neighbourhoods):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


class Agreement:
    """Makes all ranks act on an event at the same boundary.

    It starts at once and is ended by one of :meth:`close`, :meth:`abort` and :meth:`stop`. It can't be pickled.

    Args:
        rank: This rank.
        world_size: How many ranks take part.
        store: The store that they share; that of the default process group if there are several ranks. It is cloned.
        prefix: Of all keys, the same on all ranks and never used before on this store: an old event must not be seen
            again by a second fit or after a restart.
        nodes: Which ranks share a node, the same on all ranks, that of rank 0 first; by default all of them do. The
            first one of each node brings what concerns the others, by a store in its process that they alone can reach.
        answer_timeout: How long a peer's watcher may take to answer. A watcher needs no step to end for that. When a
            rank has finished it is five times as long.
        arrival_timeout: How long a peer's main thread may take to reach a boundary once this rank is there.
        on_event: Called from the watcher with every event as soon as this rank knows of it, before its boundary. The
            watcher answers nobody meanwhile, so it must be quick and must not wait for the main thread.
    """

    _STORE_PATIENCE_S = 10.0
    """How much longer than ``answer_timeout`` the main thread waits for its watcher to move at all.

    It is the watcher that gives up on others. But a call to a store on a mute host never returns.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        prefix: str = "",
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        answer_timeout: timedelta = timedelta(seconds=60),
        arrival_timeout: timedelta = timedelta(minutes=30),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._answer_timeout_s = answer_timeout.total_seconds()
        self._rank = rank
        nodes = nodes or [range(world_size)]
        node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
        limits = (time.monotonic, self._answer_timeout_s, arrival_timeout.total_seconds())
        relay = Relay(nodes, node, *limits)
        self._member = Member(nodes, node, nodes[node].index(rank), *limits)
        self._relay = relay if rank == nodes[node][0] else None
        self._stores = _Stores(world_size, store, prefix, nodes, node, rank == nodes[node][0], self._answer_timeout_s)
        self._on_event = on_event
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._stopped = self._is_over = False
        self._watcher = threading.Thread(target=self._watch, name="agreement-watcher", daemon=True)
        self._watcher.start()
        # A daemon thread that returns from C++ while the interpreter shuts down aborts the process.
        atexit.register(self.stop)

    def request(self, kind: str, payload: dict[str, Any] | None = None, needs: Needs = Needs.NOTHING) -> None:
        """Asks all ranks to act on something. Returns at once; for any thread, but not for a signal handler.

        What is asked after all ranks have finished is dropped.

        Args:
            kind: What to do; a word that the readers of :meth:`boundary` know.
            payload: Whatever else they need, JSON-serialisable.
            needs: Where it may be done.
        """
        with self._lock:
            self._member.request(kind, payload or {}, needs)
        self._wake.set()

    def expect(self) -> None:
        """Another rank is about to ask something: looks often for a moment. For any thread.

        Else this rank may look up to a tenth of a second later, and all wait for it at their next boundary.
        """
        with self._lock:
            self._member.expect()
            if self._relay is not None:
                self._relay.look_at_once()
        self._wake.set()

    def boundary(self, position: Position, allows: Needs = Needs.CLEAN | Needs.TRAINING) -> tuple[Event, ...]:
        """Passes a boundary: called by the main thread in every gap between two batches.

        Args:
            position: Where this rank is: :func:`.training`, :func:`.evaluation` or :func:`.end_of_evaluation`.
            allows: What this boundary offers, the same on all ranks.

        Returns:
            The events that every rank acts on here; nearly always none. Act on them one by one and in this order, and
            after one that ends the loop leave the rest: within an evaluation, a rank with more batches may get the
            same events over several boundaries. At a training boundary all ranks get the same ones.

        Raises:
            PeerLost: If another rank gave up or does not answer.
        """
        member = self._member
        with self._lock:
            if not member.alert:
                member.passed = position
                return ()
        return self._wait(lambda: member.cross(position, allows))

    def arrive(self, event: Event, waiting: Callable[[], None] = lambda: None) -> None:
        """Waits until every rank is about to act on ``event``: called before the first collective of the action.

        Args:
            event: The event.
            waiting: Called now and then meanwhile.

        Raises:
            PeerLost: If that can't happen any more, or not within ``arrival_timeout``.
        """
        with self._lock:
            self._member.arrive(event)
        self._wake.set()

        def arrived() -> bool | None:
            waiting()
            return self._member.arrived()

        self._wait(arrived)

    def abort(self, reason: str, peer_is_lost: bool = False) -> None:
        """Tells every rank that this one raises, and stops. All others get a :class:`PeerLost` that names the reason.

        Never raises, and returns within 20 s even if the store does not answer.

        Args:
            reason: Why.
            peer_is_lost: Whether because another rank is gone. Then nobody is waited for, and what the others get may
                say instead that the store is gone.
        """
        with self._lock:
            self._member.abort(reason, peer_is_lost)
        self._wake.set()
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or self._stopped, self._STORE_PATIENCE_S)
        self.stop()

    def close(self, waiting: Callable[[], None] = lambda: None) -> tuple[Event, ...]:
        """Waits until every rank has finished, and stops. This rank passes no boundary any more.

        For as long as all of them live, which they are asked from time to time: what rank 0 does last may take hours.

        Args:
            waiting: Called now and then meanwhile.

        Returns:
            The events that no rank has acted on: asked too late, or no boundary offered what they need.

        Raises:
            PeerLost: If another rank gave up, died or does not answer.
        """
        if self._stopped:
            return ()
        with self._lock:
            self._member.finish()
        self._wake.set()

        def ended() -> tuple[Event, ...] | None:
            waiting()
            return self._member.ended() if self._is_over else None

        try:
            return self._wait(ended)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the watcher without telling anyone. Harmless if repeated."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stopped = True
        self._wake.set()
        self._watcher.join(self._STORE_PATIENCE_S)
        if self._watcher.is_alive():
            log.warning("The agreement's watcher thread is stuck in a call to the store of this job and is abandoned.")

    def _wait(self, step: Callable[[], _T | None]) -> _T:
        """Repeats ``step`` after every move of the watcher until it returns something."""
        with self._moved:
            while (result := step()) is None:
                if not self._moved.wait(self._answer_timeout_s + self._STORE_PATIENCE_S):
                    raise PeerLost(
                        f"the store that the ranks share does not answer rank {self._rank}: the process that owns it "
                        "is stuck or its node can't be reached. Restart the job; it resumes from its newest checkpoint."
                    )
            return result

    def _watch(self) -> None:
        try:
            self._stores.open()
            self._drive()
        except Exception as error:
            log.debug("The agreement's watcher ended", exc_info=True)
            with self._lock:
                self._member.lose_touch(error)
        with self._moved:
            self._is_over = True
            self._moved.notify_all()

    def _drive(self) -> None:
        """Takes turns with all watchers of this rank, until each has ended."""
        watchers = {self._member.watch(): 0.0}  # and until when each sleeps
        if self._relay is not None:
            watchers[self._relay.watch()] = 0.0
        while watchers:
            until = min(watchers.values())
            woken = self._wake.wait(max(0.0, until - time.monotonic()) if until < math.inf else None)
            self._wake.clear()
            for watcher, until in list(watchers.items()):
                if not woken and time.monotonic() < until:
                    continue
                self._stores.changed = False
                seconds = self._advance(watcher)
                if self._stopped:
                    return
                if self._stores.changed:  # which concerns the other one
                    watchers = dict.fromkeys(watchers, 0.0)
                if seconds is None:
                    del watchers[watcher]
                else:
                    watchers[watcher] = time.monotonic() + seconds

    def _advance(self, watcher: Watching[None]) -> float | None:
        """Goes on with a watcher until it sleeps; returns for how long, ``None`` if it has ended."""
        result: Any = None
        error: Exception | None = None
        while True:
            with self._moved:
                if self._stopped:
                    return None
                try:
                    wanted = watcher.send(result) if error is None else watcher.throw(error)
                except StopIteration:
                    return None
                finally:
                    self._moved.notify_all()
            result = error = None
            if isinstance(wanted, Sleep):
                return wanted.seconds
            if isinstance(wanted, Announce):
                self._announce(wanted.event)
                continue
            try:
                result = self._stores.apply(wanted)
            except Exception as raised:
                error = raised

    def _announce(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # of no concern to the other ranks, which wait for this watcher's answers
                log.exception("on_event raised for %s", event)


class _Stores:
    """The store of the job and that of this rank's node.

    Within one node they are the same. Else the first rank of the node has a store for it, which listens on the loopback
    interface only, and only that rank speaks with the job's.
    """

    def __init__(
        self,
        world_size: int,
        store: Store | None,
        prefix: str,
        nodes: Sequence[Sequence[int]],
        node: int,
        is_first: bool,
        timeout_s: float,
    ) -> None:
        self._several = len(nodes) > 1
        self.changed = False
        self._port = f"port/{node}"
        self._is_first = is_first
        self._timeout_s = timeout_s
        if store is None and world_size == 1:
            self._above: Any = LocalStore()
            self._here: Any = LocalStore()
            return
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        shared: Any = store or _get_default_store()
        # A client serialises its calls: the watcher needs one of its own, or it would wait while the main thread does.
        own = shared.clone()
        self._above = PrefixStore(f"{prefix}/job", own)
        self._here = PrefixStore(f"{prefix}/node", own)

    def open(self) -> None:
        """Meets the others of the node. In the watcher's thread: the first one may come later."""
        if not self._several:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._is_first:
            self._server = self._here = serve_store(self._timeout_s)
            self._above.set(self._port, str(self._server.port))
            return
        until = time.monotonic() + self._timeout_s
        while not self._above.check([self._port]):
            if time.monotonic() > until:
                raise TimeoutError("the first rank of this node has not started")
            time.sleep(0.05)
        port = int(self._above.get(self._port))
        self._here = TCPStore(ADDRESS, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))
        self._above = None

    def apply(self, wanted: Operation | Above) -> Any:
        """Does what a watcher wants."""
        self.changed |= changes(wanted)
        return wanted.operation.apply(self._above) if isinstance(wanted, Above) else wanted.apply(self._here)
