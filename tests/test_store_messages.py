"""Messages through a store: what comes, what is cleared away, and what is not waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_resilience.checkpoint import store_messages
from lightning_resilience.checkpoint.store_messages import StoreMessages
from lightning_resilience.detect.hangs.deaths import is_stopped
from tests.harness import CONTEXT, free_port

KEYS = [f"own/1/{rank}" for rank in range(600)]
WITHIN = timedelta(seconds=20)


def own(store: dist.Store) -> Callable[[], dist.Store]:
    return lambda: store


def test_all_messages_come_in_their_order_and_are_cleared_away() -> None:
    store = dist.HashStore()
    reader, writer = StoreMessages(own(store)), StoreMessages(own(store))

    def write() -> None:
        for key in reversed(KEYS):
            writer.send(key, key.encode())

    thread = threading.Thread(target=write)
    thread.start()
    assert reader.receive(KEYS, 20, delete=True).wait() == [key.encode() for key in KEYS]
    thread.join()
    assert store.num_keys() == 0
    assert reader.receive([], 0).wait() == []


def test_what_all_read_stays() -> None:
    store = dist.HashStore()
    messages = StoreMessages(own(store))
    messages.send("outcome", b"published")
    assert messages.receive(["outcome"], 20).wait() == messages.receive(["outcome"], 20).wait() == [b"published"]


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = StoreMessages(own(dist.HashStore()))
    messages.send(KEYS[0], b"")
    with pytest.raises(TimeoutError, match="0 of 2"):
        messages.receive(KEYS[:2], 0.2).wait()
    monkeypatch.setattr(store_messages, "_LAST_WORDS_S", 0.2)
    threading.Timer(0.2, messages.hurry).start()  # the fit fails meanwhile
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        messages.receive(KEYS[:2], 100).wait()
    assert time.monotonic() - begun < 20


def test_waiting_lasts_as_long_as_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_messages, "_AT_ONCE", 1)
    store = dist.HashStore()
    for number, key in enumerate(KEYS[:6]):
        threading.Timer(0.5 * number, store.set, (key, "")).start()
    assert len(StoreMessages(own(store)).receive(KEYS[:6], 2.0).wait()) == 6


def test_after_one_that_is_late_no_other_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_messages, "_AT_ONCE", 1)
    messages, asked = StoreMessages(own(dist.HashStore())), []
    read = messages.read

    def note(keys: list[str], is_late: Callable[[], bool], delete: bool) -> list[bytes]:
        asked.append(keys)
        return read(keys, is_late, delete)

    monkeypatch.setattr(messages, "read", note)
    receipt = messages.receive(KEYS[:3], 0.1)
    assert receipt._reading.result(60) is None
    assert asked == [KEYS[:1]]


def serve(port: int) -> None:
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(100)
    del server


@pytest.fixture
def server() -> Iterator[tuple[int, Callable[[], dist.Store]]]:
    """A store in a process of its own."""
    port = free_port()
    process = CONTEXT.Process(target=serve, args=(port,))
    process.start()
    assert process.pid is not None
    yield process.pid, lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=WITHIN)
    process.kill()
    process.join()


def test_a_store_that_does_not_answer_is_not_waited_for(server: tuple[int, Callable[[], dist.Store]]) -> None:
    pid, connect = server
    clients = iter([connect(), dist.HashStore()])
    messages = StoreMessages(lambda: next(clients))
    messages.send(KEYS[0], b"")
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):  # until then it may still answer
        time.sleep(0.001)
    begun = time.monotonic()
    messages.send(KEYS[1], bytes(16 << 10))
    with pytest.raises(TimeoutError):
        messages.receive(KEYS[:2], 0.5).wait()
    messages.send(KEYS[0], b"by another client: that one is never free again")
    assert time.monotonic() - begun < 10
    assert not messages.works


def test_a_store_that_has_gone_is_said(server: tuple[int, Callable[[], dist.Store]]) -> None:
    pid, connect = server
    messages = StoreMessages(connect)
    messages.send(KEYS[0], b"")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError):
        messages.receive(KEYS, 50).wait()
