"""Messages from rank to rank through the store that they share: a collective would give each of them to all ranks."""

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
"""How long a rank whose fit has failed waits for others, which may be gone."""

_AT_ONCE = 256  # keys in one request
_LOOK_EVERY_S = 0.05
_FIRST_PAUSE_S = 0.001


class StoreMessages:
    """The messages of one fit.

    Args:
        connect: Makes a client of the store that nobody else uses, with a prefix of its own. Called when it is needed.

    Attributes:
        works: Whether all messages could be sent so far, and have come that were waited for.
        failing_since: When the fit failed, if it has.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self.works = True
        self.failing_since: float | None = None

    @cached_property
    def _store(self) -> Any:
        return self._connect()

    def hurry(self) -> None:
        """The fit has failed: other ranks may be gone, and are not waited for much longer. For any thread."""
        self.failing_since = time.monotonic()

    def send(self, key: str, value: bytes) -> None:
        """Sends a message without waiting for its reader, who is told nothing where the store has gone."""
        try:
            self._store.set(key, value)
        except (OSError, RuntimeError) as error:
            self.works = False
            log.warning("The store that the ranks share does not accept %s (%s).", key, error)

    def delete(self, key: str) -> None:
        """Removes a message that everybody has read, if there is one."""
        self._store.delete_key(key)

    def receive(self, keys: Sequence[str], patience_s: float, delete: bool = False) -> Receipt:
        """Begins to read messages.

        Args:
            keys: Of these messages.
            patience_s: How long to wait while none comes.
            delete: Whether nobody else reads them.
        """
        return Receipt(self, keys, patience_s, delete)

    def give_up(self) -> None:
        """What was waited for has not come: the client in use may never be free again."""
        self.works = False
        self.__dict__.pop("_store", None)

    def read(self, keys: list[str], is_late: Callable[[], bool], delete: bool) -> list[bytes]:
        """Waits for a few messages; none of them if they are late."""
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
    """Messages that are being read, in a thread of its own: a call to a store whose host does not answer never ends."""

    def __init__(self, messages: StoreMessages, keys: Sequence[str], patience_s: float, delete: bool) -> None:
        self._messages = messages
        self._keys = list(keys)
        self._patience_s = patience_s
        self._delete = delete
        self._received: list[bytes] = []
        self._since = time.monotonic()
        self._reading = in_daemon_thread(self._read, "store-messages")

    def wait(self) -> list[bytes]:
        """The messages, by their keys.

        Raises:
            TimeoutError: If for too long none has come, or the store has not answered.
            RuntimeError: If the store has gone.
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
