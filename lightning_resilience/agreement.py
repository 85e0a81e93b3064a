"""Runs the protocol of ``agreement_protocol.py``, which explains it, in a thread and on real stores."""

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
    """A name for the set of processes that reach each other by the loopback interface: they all have the same name."""
    name = os.uname().nodename
    with suppress(OSError):
        name += f" {boot_id()}"
        name += f" {os.stat('/proc/self/ns/net').st_ino}"
    return name


def nodes_of(neighbourhoods: Sequence[str]) -> list[list[int]]:
    """The ranks of every node, the node of rank 0 first.

    Args:
        neighbourhoods: The :func:`neighbourhood` of each rank.
    """
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(neighbourhoods):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


class Agreement:
    """Makes all ranks act on an event at the same boundary.

    The agreement starts at once; :meth:`close`, :meth:`abort` or :meth:`stop` ends it. It can't be pickled.

    Args:
        rank: This rank.
        world_size: The number of ranks that take part.
        store: The store that the ranks share; default with several ranks: the default process group's store. It is
            cloned.
        prefix: The prefix of all keys, the same on all ranks and never used before on this store: a second fit, or a
            restarted one, must not see an old event again.
        nodes: The ranks of each node, the same on all ranks, the node of rank 0 first; by default all ranks share one
            node. The first rank of each node passes messages to and from the others, by a store in its process that
            only these can reach.
        answer_timeout: How long the watcher of another rank may take to answer. A watcher can answer in the middle of a
            step. After a rank has finished, this is five times as long.
        arrival_timeout: How long the main thread of another rank may take to reach a boundary after this rank has
            reached it.
        on_event: Called from the watcher with every event as soon as this rank knows of it, before its boundary. The
            watcher answers no rank meanwhile, so ``on_event`` must be quick and must not wait for the main thread.
    """

    _STORE_PATIENCE_S = 10.0
    """By how many seconds the main thread waits longer than ``answer_timeout`` for any move of its watcher.

    Normally the watcher gives up on other ranks. But its call to a store on an unresponsive host never returns.
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
        """Requests an action of all ranks. Returns at once. May be called in any thread, but not in a signal handler.

        A request after all ranks have finished is dropped.

        Args:
            kind: The kind of action, known to the callers of :meth:`boundary`.
            payload: Further data for them, JSON-serializable.
            needs: Requirements on the boundary where ranks act.
        """
        with self._lock:
            self._member.request(kind, payload or {}, needs)
        self._wake.set()

    def expect(self) -> None:
        """Makes the watcher poll often for a moment, since another rank is about to make a request. For any thread.

        Otherwise this rank may see the request up to a tenth of a second later, and all ranks wait for it at their next
        boundary.
        """
        with self._lock:
            self._member.expect()
            if self._relay is not None:
                self._relay.look_at_once()
        self._wake.set()

    def boundary(self, position: Position, allows: Needs = Needs.CLEAN | Needs.TRAINING) -> tuple[Event, ...]:
        """Passes a boundary; the main thread calls this in every gap between two batches.

        Args:
            position: Where this rank is: :func:`.training`, :func:`.evaluation` or :func:`.end_of_evaluation`.
            allows: The requirements that this boundary meets, the same on all ranks.

        Returns:
            The events on which every rank acts here; nearly always none. Act on them one by one in this order, and
            ignore the rest after an event that ends the loop: within an evaluation, a rank with more batches may get
            the same events over several boundaries. At a training boundary all ranks get the same events.

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
        """Waits until every rank is about to act on ``event``; call it before the first collective of the action.

        Args:
            event: The event.
            waiting: Called repeatedly meanwhile.

        Raises:
            PeerLost: If some rank can't arrive any more, or has not arrived within ``arrival_timeout``.
        """
        with self._lock:
            self._member.arrive(event)
        self._wake.set()

        def arrived() -> bool | None:
            waiting()
            return self._member.arrived()

        self._wait(arrived)

    def abort(self, reason: str, peer_is_lost: bool = False) -> None:
        """Notifies every rank that this rank fails, and stops. All others get a :class:`PeerLost` with the reason.

        Never raises, and returns within 20 s even if the store does not answer.

        Args:
            reason: Why this rank fails.
            peer_is_lost: Whether it fails because another rank is lost. Then it waits for no rank, and the error of the
                other ranks may instead name the loss of the store.
        """
        with self._lock:
            self._member.abort(reason, peer_is_lost)
        self._wake.set()
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or self._stopped, self._STORE_PATIENCE_S)
        self.stop()

    def close(self, waiting: Callable[[], None] = lambda: None) -> tuple[Event, ...]:
        """Waits until every rank has finished, and stops. This rank passes no boundary any more.

        The wait has no limit while all ranks are alive, which is checked from time to time: the last work of rank 0 may
        take hours.

        Args:
            waiting: Called repeatedly meanwhile.

        Returns:
            The events on which no rank has acted: requested too late, or no boundary met their requirements.

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
        """Ends the watcher without notifying other ranks. Harmless if repeated."""
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
        """Runs all watchers of this rank in turn, until each has ended."""
        watchers = {self._member.watch(): 0.0}  # each with the time until which it sleeps
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
                if self._stores.changed:  # the other watcher must look at once
                    watchers = dict.fromkeys(watchers, 0.0)
                if seconds is None:
                    del watchers[watcher]
                else:
                    watchers[watcher] = time.monotonic() + seconds

    def _advance(self, watcher: Watching[None]) -> float | None:
        """Runs a watcher until it sleeps; returns for how many seconds, ``None`` if it has ended."""
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
            except Exception:  # must not end this watcher, for whose answers the other ranks wait
                log.exception("on_event raised for %s", event)


class _Stores:
    """The store of the job and the store of this rank's node.

    With a single node both are the same. With several nodes, the first rank of each node serves a store for the node,
    which listens on the loopback interface only, and only this rank uses the job's store.
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
        # A client serializes its calls: the watcher needs its own, so that it never waits for the main thread's calls.
        own = shared.clone()
        self._above = PrefixStore(f"{prefix}/job", own)
        self._here = PrefixStore(f"{prefix}/node", own)

    def open(self) -> None:
        """Connects the ranks of the node. Runs in the watcher's thread, because the first rank may come later."""
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
        """Applies an operation that a watcher has yielded."""
        self.changed |= changes(wanted)
        return wanted.operation.apply(self._above) if isinstance(wanted, Above) else wanted.apply(self._here)
