"""Sends messages from rank to rank through the store of the job; a collective would send each message to all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import cached_property
from typing import Any

from lightning_resilience._daemon import in_daemon_thread

log = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0
"""How long a rank whose fit has failed waits for other ranks, which may be gone."""

_AT_ONCE = 256  # keys in one request
_LOOK_EVERY_S = 0.05
_FIRST_PAUSE_S = 0.001


class StoreMessages:
    """The messages of one fit.

    Args:
        connect: Makes a client of the store for this object alone, with its own prefix. Called at the first use.

    Attributes:
        works: Whether so far all messages could be sent and all awaited messages have arrived.
        failing_since: When the fit failed, in seconds of ``time.monotonic()``; ``None`` if it has not.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self.works = True
        self.failing_since: float | None = None

    @cached_property
    def _store(self) -> Any:
        return self._connect()

    def hurry(self) -> None:
        """Call it when the fit has failed: waits for other ranks, which may be gone, become short. For any thread."""
        self.failing_since = time.monotonic()

    def send(self, key: str, value: bytes) -> None:
        """Sends a message without waiting for its reader. If the store is gone, the message is lost with a warning."""
        try:
            self._store.set(key, value)
        except (OSError, RuntimeError) as error:
            self.works = False
            log.warning("The store that the ranks share does not accept %s (%s).", key, error)

    def delete(self, key: str) -> None:
        """Removes a message, if it exists; all its readers must have read it."""
        self._store.delete_key(key)

    def receive(self, keys: Sequence[str], patience_s: float, delete: bool = False) -> Receipt:
        """Begins to read messages.

        Args:
            keys: The keys of the messages.
            patience_s: Longest time without a new message, in seconds.
            delete: Whether to delete the messages afterwards, since no other rank reads them.
        """
        return Receipt(self, keys, patience_s, delete)

    def give_up(self) -> None:
        """Call it when awaited messages have not arrived: drops the client, since its call may never return."""
        self.works = False
        self.__dict__.pop("_store", None)

    def read(self, keys: list[str], is_late: Callable[[], bool], delete: bool) -> list[bytes]:
        """Waits for a few messages and returns them; returns no message if they are late."""
        store, pause_s = self._store, _FIRST_PAUSE_S
        while not store.check(keys):
            if is_late():
                return []
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_EVERY_S)
        read = [bytes(value) for value in store.multi_get(keys)]
        for key in keys if delete else ():
            store.delete_key(key)
        return read


class Receipt:
    """Messages that a separate thread is reading, since a call to a store whose host does not answer never ends."""

    def __init__(self, messages: StoreMessages, keys: Sequence[str], patience_s: float, delete: bool) -> None:
        self._messages = messages
        self._keys = list(keys)
        self._patience_s = patience_s
        self._delete = delete
        self._received: list[bytes] = []
        self._since = time.monotonic()
        self._reading = in_daemon_thread(self._read, "store-messages")

    def wait(self) -> list[bytes]:
        """Waits for all messages and returns them in the order of their keys.

        Raises:
            TimeoutError: If no message has come for too long, or the store has not answered.
            RuntimeError: If the store is gone.
        """
        while not futures.wait([self._reading], _LOOK_EVERY_S).done and not self._is_late():
            pass
        if self._reading.done():
            self._reading.result()
        if len(self._received) < len(self._keys):
            self._messages.give_up()
            raise TimeoutError(f"{len(self._received)} of {len(self._keys)} messages arrived")
        return self._received

    def _is_late(self) -> bool:
        since, patience_s, failing_since = self._since, self._patience_s, self._messages.failing_since
        if failing_since is not None:
            since, patience_s = max(since, failing_since), min(patience_s, _LAST_WORDS_S)
        return time.monotonic() - since > patience_s

    def _read(self) -> None:
        try:
            for first in range(0, len(self._keys), _AT_ONCE):
                read = self._messages.read(self._keys[first : first + _AT_ONCE], self._is_late, self._delete)
                if not read:
                    break
                self._received += read
                self._since = time.monotonic()
        except BaseException:
            self._messages.works = False
            raise
