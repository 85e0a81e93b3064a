"""A ledger that several hosts write over a network file system, simulated: late, torn, and with clocks that differ.

What ships does the work: each process is a real :class:`Ledger`, which writes into and reads from the folder that its
host sees. Simulated are the clocks, and the server: what a host has written is there at once; what others have written
a host sees later, up to any byte. A host that appends does so where it takes the end of the file to be.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.launch.budget import Budget
from lightning_resilience.run import history
from lightning_resilience.run import ledger as module
from lightning_resilience.run.history import History, LiveHistory, read_history
from lightning_resilience.run.ledger import Reader, read_ledger
from tests.ledgers import Ledger, events_of

Break = Callable[[pytest.MonkeyPatch], None]


class Host:
    """A host, and the folder as it sees it."""

    def __init__(self, number: int, folder: Path, server: Path, ahead_s: float) -> None:
        self.name = f"n{number}"
        self.folder = folder / self.name / "ledger"
        self.folder.mkdir(parents=True)
        self.server = server
        self.ahead_s = ahead_s

    def send(self, before: dict[str, int]) -> None:
        """What was appended here is written on the server, at the end of the file as it was seen here."""
        for file in self.folder.iterdir():
            size = before.get(file.name, 0)
            if added := file.read_bytes()[size:]:
                fd = os.open(self.server / file.name, os.O_WRONLY | os.O_CREAT)
                os.pwrite(fd, added, size)
                os.close(fd)

    def sizes(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self.folder.iterdir()}

    def sync(self, visible: Callable[[int], int]) -> None:
        """Sees more of what there is."""
        for file in self.server.iterdir():
            content = file.read_bytes()
            here = self.folder / file.name
            seen = here.stat().st_size if here.exists() else 0
            if (size := max(seen, visible(len(content)))) > 0:
                here.write_bytes(content[:size])


class Process:
    """A process, which knows what it has read and written."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.readers: dict[str, Reader] = {}
        self.histories: dict[str, LiveHistory] = {}
        self.ledger = Ledger(host.folder)
        self.latest: dict[str, float] = {}
        self.history = LiveHistory(self.ledger)
        self.known: set[int] = set()


class World:
    """Hosts and processes; everything that happens follows from the seed."""

    def __init__(self, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.now = 1.7e9
        self.patch = patch
        server = folder / "server"
        server.mkdir()
        hosts = self.random.randint(2, 4)
        self.hosts = [Host(n, folder, server, self.random.uniform(-60, 60)) for n in range(hosts)]
        self.processes = [Process(host) for host in self.hosts for _ in range(self.random.randint(1, 2))]
        self.numbers = itertools.count()
        self.causes: dict[int, set[int]] = {}  # of each event: what its process knew of
        self.torn = 0

    def acts(self, process: Process) -> None:
        """From here on it is this process that does something."""
        self.now += self.random.expovariate(2.0)
        host = process.host
        self.patch.setattr(module, "_latest", process.latest)
        self.patch.setattr(module, "_readers", process.readers)
        self.patch.setattr(history, "_histories", process.histories)
        self.patch.setattr(time, "time", lambda: self.now + host.ahead_s)
        self.patch.setattr(platform, "node", lambda: host.name)

    def record(self, process: Process) -> None:
        number, before = next(self.numbers), process.host.sizes()
        process.ledger.record(number=number, **self.event())
        process.host.send(before)
        self.causes[number] = set(process.known)
        process.known.add(number)

    def event(self) -> dict[str, Any]:
        step, fit = self.random.randrange(50), self.random.randrange(2)
        return self.random.choice(
            [
                {"event": "job_start", "retry": self.random.random() < 0.3},
                {"event": "start", "restart_count": self.random.randrange(3), "world_size": 2},
                {"event": "resumed", "fit": fit, "step": step},
                {"event": "saved", "fit": fit, "step": step},
                {"event": "fault", "fit": fit, "step": step, "kind": "E", "reason": f"x{self.random.randrange(2)}"},
                {"event": "failure", "reason": "x"},
                {"event": "launcher_killed"},
                {"event": "give_up"},
            ]
        )

    def tear(self, process: Process) -> None:
        """A process is killed in the middle of its line, and another one takes its place."""
        before, number = process.host.sizes(), next(self.numbers)
        process.ledger.record(number=number, **self.event())
        for file in process.host.folder.iterdir():
            if (size := file.stat().st_size) > before.get(file.name, 0):
                os.truncate(file, self.random.randrange(before.get(file.name, 0), size - 1))
        process.host.send(before)
        self.torn += 1
        self.processes[self.processes.index(process)] = Process(process.host)

    def read(self, process: Process) -> None:
        events = process.ledger.events()
        assert events == Reader(process.host.folder).read()[0], "read on, it is another than read anew"
        assert events == read_history(process.host.folder).events
        process.known |= {event.extra["number"] for event in events}
        decided = Budget().decide(process.history.now(), self.now)
        assert decided == Budget().decide(History(events), self.now), "what was folded before counts differently"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            process = self.random.choice(self.processes)
            self.acts(process)
            self.random.choices([self.record, self.read, self.see, self.tear], weights=[8, 4, 8, 1])[0](process)
        for host in self.hosts:
            host.sync(lambda size: size)
        for process in self.processes:
            self.acts(process)
            self.read(process)
        self.check()

    def see(self, process: Process) -> None:
        process.host.sync(lambda size: self.random.randint(0, size))

    def check(self) -> None:
        [order, *others] = [[event.extra["number"] for event in process.ledger.events()] for process in self.processes]
        assert all(other == order for other in others), "readers differ"
        assert sorted(order) == sorted(self.causes), "events are lost, or there twice"
        place = {number: index for index, number in enumerate(order)}
        for number, causes in self.causes.items():
            assert all(place[cause] < place[number] for cause in causes), "an effect comes before its cause"
        decisions = {repr(Budget().decide(process.history.now(), self.now)) for process in self.processes}
        assert len(decisions) == 1, "readers decide differently"


def simulate(folder: Path, seeds: range, steps: int = 60) -> int:
    torn = 0
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            (own := folder / str(seed)).mkdir()
            world = World(seed, own, patch)
            world.run(steps)
            torn += world.torn
    return torn


def test_all_who_read_agree_and_nothing_is_lost(tmp_path: Path) -> None:
    assert simulate(tmp_path, range(40)) > 40


@pytest.mark.campaign
def test_all_who_read_agree_and_nothing_is_lost_in_many_runs(tmp_path: Path) -> None:
    simulate(tmp_path, range(1000, 1300), steps=120)


def one_file(patch: pytest.MonkeyPatch) -> None:
    """As it was: all hosts append to the same file."""
    patch.setattr(module, "_own_file", lambda folder: folder / "all.jsonl")


def clocks_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_next", lambda self, now: now)


def half_lines(patch: pytest.MonkeyPatch) -> None:
    """What is being written is taken for a torn line, and passed over for good."""
    read_on = module._read_on

    def past_the_end(path: Path, is_old: bool, read: Any) -> Any:
        yield from read_on(path, is_old, read)
        read.size = path.stat().st_size

    patch.setattr(module, "_read_on", past_the_end)


def no_fresh_line(patch: pytest.MonkeyPatch) -> None:
    """After a torn line the next is written behind it, and lost with it."""
    patch.setattr(os, "pread", lambda fd, count, place: b"\n")


def folded_as_read(patch: pytest.MonkeyPatch) -> None:
    """What comes late is counted last."""
    reads = Reader.read
    patch.setattr(Reader, "read", lambda reader: (reads(reader)[0], Reader))


@pytest.mark.parametrize("mistake", [one_file, clocks_alone, half_lines, no_fresh_line, folded_as_read])
def test_mistakes_are_found(tmp_path: Path, mistake: Break) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            simulate(tmp_path, range(40))


def test_what_an_earlier_version_has_written_comes_first(tmp_path: Path) -> None:
    old = [{"event": "start", "time": time.time() + 1e6}, {"event": "saved", "time": 5.0, "step": 3}]
    (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, old)))  # the last one without its end
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.events() == events_of(old)
    ledger.record("failure")
    assert [event.name for event in ledger.events()] == ["start", "saved", "failure"]
    assert [event.name for event in read_ledger(ledger.path)] == ["start", "saved", "failure"]
    assert (tmp_path / "ledger.jsonl").read_text() == "\n".join(map(json.dumps, old))
