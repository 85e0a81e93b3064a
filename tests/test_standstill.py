"""Imports that stand still while ranks go back to their fit: a real gate, real processes that import, real channels."""

from __future__ import annotations

import importlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightning_resilience.launch import standstill
from lightning_resilience.launch.channel import Message
from lightning_resilience.launch.spares import Workers
from lightning_resilience.launch.standstill import Standstill
from lightning_resilience.run.run_directory import JOINS_VARIABLE
from tests.test_launch import wait_until

IMPORTS = """
import importlib, sys
from lightning_resilience.launch import standstill
standstill.mind(int(sys.argv[1]))
standstill.OPENED_WITHIN_S = 1000.0
for line in sys.stdin:
    if line == "leave\\n":
        standstill.leave()
    else:
        importlib.import_module(line.strip())
    print(line, end="", flush=True)
"""


class Importing:
    """A process that imports what it is told, and minds a gate."""

    def __init__(self, gate: int) -> None:
        command = [sys.executable, "-c", IMPORTS, str(gate)]
        self._process = subprocess.Popen(
            command, pass_fds=[gate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._told, self._says = self._process.stdin, self._process.stdout

    def told(self, what: str) -> Importing:
        self._told.write(f"{what}\n")
        return self

    def does(self, what: str) -> bool:
        return bool(select.select([self._says], [], [], 60.0)[0]) and self._says.readline() == f"{what}\n"

    def stands_still(self) -> bool:
        return not select.select([self._says], [], [], 0.2)[0]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._told.close()
        self._says.close()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standstill]:
    monkeypatch.setattr(standstill, "IMPORTS_STAND_STILL_FOR_S", 1000.0)
    monkeypatch.setattr(standstill, "IMPORTS_GO_ON_AFTER_S", 0.0)
    still = Standstill()
    yield still
    still.wait_for(-1)
    os.close(still.gate)


@pytest.fixture
def process(still: Standstill) -> Iterator[Importing]:
    process = Importing(still.gate)
    assert process.told("wave").does("wave")
    yield process
    process.end()


def test_imports_stand_still_until_all_ranks_are_there(still: Standstill, process: Importing) -> None:
    still.begin(0)
    still.begin(1)
    still.begin(1)
    assert process.told("colorsys").stands_still()
    still.end(1)
    still.end(7)  # which was there
    assert process.stands_still()
    still.end(0)
    assert process.does("colorsys")
    still.end(0)
    assert process.told("sched").does("sched")


def test_imports_go_on_where_somebody_waits_for_them_or_it_takes_long(
    still: Standstill, process: Importing, monkeypatch: pytest.MonkeyPatch
) -> None:
    still.begin(0)
    assert process.told("colorsys").stands_still()
    still.wait_for(7)
    assert process.does("colorsys")
    still.begin(0)
    assert process.told("pty").does("pty"), "still"
    still.end(7)
    monkeypatch.setattr(standstill, "IMPORTS_STAND_STILL_FOR_S", 0.3)
    still.begin(0)
    assert process.told("sched").does("sched")


def test_who_is_waited_for_goes_on(still: Standstill, process: Importing) -> None:
    still.begin(0)
    assert process.told("leave").does("leave")
    assert process.told("colorsys").does("colorsys")
    assert process.told("leave").does("leave")


def test_imports_go_on_without_their_launcher(still: Standstill, process: Importing) -> None:
    still.begin(0)
    assert process.told("colorsys").stands_still()
    still._opens, writes = os.dup(still.gate), still._opens  # what the test closes at its end
    os.close(writes)
    assert process.does("colorsys")
    os.close(still._opens)
    still._is_open = True


def test_a_launcher_that_is_stopped_is_not_waited_for_long(still: Standstill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "OPENED_WITHIN_S", 0.01)
    before = list(sys.meta_path)
    still.begin(0)
    standstill.mind(os.dup(still.gate))
    # The first finder behind it must be asked as well.
    finder = MagicMock(find_spec=lambda name, path=None, target=None: asked.append(name))
    asked: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], finder, *before])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_none")
    assert asked == ["there_is_none"]
    monkeypatch.setattr(standstill, "OPENED_WITHIN_S", 1000.0)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.import_module("colorsys")
    standstill.leave()
    assert sys.meta_path == [finder, *before]


RANK = """
import os
from lightning_resilience.launch import channel, park, standstill
park.enter()
channel = channel.of_worker()
channel.send("minds", minds=standstill._stop is not None)
while (message := channel.receive()) is not None:
    channel.send("state", state=message.fields["state"])
"""


class Recorded:
    """In the place of a :class:`Standstill`: what has happened to it."""

    def __init__(self, gate: int) -> None:
        self.gate = gate
        self.happened: list[Any] = []

    def begin(self, rank: int) -> None:
        self.happened.append(("begin", rank))

    def end(self, rank: int) -> None:
        self.happened.append(("end", rank))

    def wait_for(self, rank: int) -> None:
        self.happened.append(("wait for", rank))


def test_a_launcher_has_imports_stand_still_as_long_as_nobody_waits_for_them(still: Standstill, tmp_path: Path) -> None:
    said: list[tuple[int, Message]] = []
    workers = Workers(False, heard=lambda process, message: said.append((process.pid, message)))
    recorded = Recorded(still.gate)
    workers._standstill = recorded  # type: ignore[assignment]
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, **environment: str) -> bool:
        command = (sys.executable, "-c", RANK)
        process = workers.start(rank, command, {**os.environ, **environment}, None, None)
        started.append(process)
        count = len(said) + 1
        wait_until(lambda: len(said) == count)
        assert said[-1][0] == process.pid
        minds: bool = said[-1][1].fields["minds"]
        return minds

    def is_told(rank: int, kind: str, state: str) -> list[Any]:
        recorded.happened.clear()
        count = len(said) + 1
        workers.tell(rank, kind, state=state)
        wait_until(lambda: len(said) == count)
        return recorded.happened

    try:
        assert not start(0), "of those that start together none waits"
        assert recorded.happened == [("wait for", 0)]
        assert is_told(0, "say", "ready") == [("end", 0)]
        assert is_told(0, "replace", "left") == [("begin", 0)]
        assert is_told(0, "say", "ready") == [("end", 0)]
        recorded.happened.clear()
        assert start(1, **{JOINS_VARIABLE: "1"}), "a newcomer that the others do not wait for"
        assert recorded.happened == []
        assert is_told(1, "replace", "left") == [("wait for", 1)], "they do wait for it"
        assert is_told(1, "say", "waiting") == [("end", 1)]
        assert is_told(1, "replace", "refused") == [("begin", 1), ("end", 1)]
        recorded.happened.clear()
        workers.ended(0)
        assert recorded.happened == [("end", 0)]
    finally:
        for process in started:
            process.kill()
            process.wait()
        for worker in workers._workers.values():
            worker.channel.close()
