"""The agreement with real processes, threads, stores and clocks. test_agreement_simulation.py has the interleavings."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from lightning_resilience.agreement import Agreement
from lightning_resilience.agreement_protocol import (
    FINISHED,
    START,
    Event,
    LocalStore,
    Needs,
    PeerLost,
    end_of_evaluation,
    evaluation,
    training,
)
from tests import agreement_worker
from tests.harness import CONTEXT
from tests.test_agreement_simulation import Prefixed

WORLD_SIZE = 4
SOON = {"answer_timeout": timedelta(seconds=0.5), "arrival_timeout": timedelta(seconds=0.5)}


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if "agreement" in thread.name] == []


ONE_NODE = [[0, 1, 2, 3]]
TWO_NODES = [[0, 1], [2, 3]]


def run_ranks(directory: Path, scenario: str, nodes: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Runs 4 gloo ranks and returns what those that lived to tell wrote."""
    ranks = [
        CONTEXT.Process(target=agreement_worker.run, args=(rank, WORLD_SIZE, directory, scenario, nodes))
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    logs = "".join(path.read_text(errors="replace") for path in sorted(directory.glob("rank-*.log")))
    assert "Traceback" not in logs, logs
    assert "terminate called" not in logs, logs
    return {
        rank: json.loads(path.read_text())
        for rank in range(WORLD_SIZE)
        if (path := directory / f"rank-{rank}.json").exists()
    }


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.slow_but_for("two nodes")
def test_four_processes_act_on_every_event_at_the_same_boundary(tmp_path: Path, nodes: list[list[int]]) -> None:
    reports = run_ranks(tmp_path, "healthy", nodes)
    assert sorted(reports) == list(range(WORLD_SIZE))
    requested = {f"{rank}/{asker}/{count}" for rank in range(WORLD_SIZE) for asker in range(2) for count in range(3)}
    requested |= {f"{rank}/last" for rank in range(WORLD_SIZE)}
    for fit in range(2):
        done = [reports[rank]["fits"][fit] for rank in range(WORLD_SIZE)]
        assert len({tuple(event for event, _ in one["acted"]) for one in done}) == 1
        assert len({tuple(one["left_over"]) for one in done}) == 1
        settled = [event for event, _ in done[0]["acted"]] + done[0]["left_over"]
        assert sorted(settled) == sorted(requested)
        assert len(done[0]["acted"]) >= 5
        for same in zip(*(one["acted"] for one in done), strict=True):
            positions = {tuple(position) for _, position in same}
            assert len(positions - {end_of_evaluation(position[0]) for position in positions}) <= 1, same
            assert len({position[:2] for position in positions}) == 1, same
    assert [report["threads"] for report in reports.values()] == [[]] * WORLD_SIZE


@pytest.mark.parametrize(
    ("nodes", "scenario", "victim", "told"),
    [
        pytest.param(ONE_NODE, "a rank dies", 2, r"ranks \[2\] did not answer", marks=pytest.mark.slow),
        (ONE_NODE, "the store's owner dies", 0, "lost contact with the other"),
        pytest.param(ONE_NODE, "a rank raises", 2, "rank 2 stopped: out of memory", marks=pytest.mark.slow),
        pytest.param(TWO_NODES, "a node's second rank dies", 3, r"ranks \[3\] did not answer", marks=pytest.mark.slow),
        (TWO_NODES, "a rank dies", 2, r"ranks \[2, 3\] did not answer|rank 3 lost contact with the other"),
        pytest.param(TWO_NODES, "a rank raises", 2, "rank 2 stopped: out of memory", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow_but_for("nodes1-the store's owner dies-0-lost contact with the other")
def test_survivors_are_told(tmp_path: Path, nodes: list[list[int]], scenario: str, victim: int, told: str) -> None:
    reports = run_ranks(tmp_path, scenario, nodes)
    for rank in set(range(WORLD_SIZE)) - {victim}:
        assert reports[rank]["error"] is not None
        assert pytest.raises(PeerLost, match=told).matches(PeerLost(reports[rank]["error"])), reports[rank]["error"]
        assert reports[rank]["threads"] == []
    assert (victim in reports) == (scenario == "a rank raises")


def test_positions_are_ordered_as_a_fit_runs() -> None:
    as_run = [
        START,
        *(evaluation(0, 0, 0), evaluation(0, 0, 1), evaluation(0, 1, 0), end_of_evaluation(0)),
        training(1),
        *(evaluation(2, 0, 0), end_of_evaluation(2)),
        training(2),
        FINISHED,
    ]
    assert as_run == sorted(as_run)


def wait_for_events(agreement: Agreement, start: int = 1, **allows: Needs) -> tuple[int, tuple[Event, ...]]:
    """Passes training boundaries until one has events."""
    for batches in range(start, start + 10_000):
        if events := agreement.boundary(training(batches), **allows):
            return batches, events
        time.sleep(0.001)
    raise AssertionError("no event came")


def test_one_process_needs_no_store() -> None:
    seen: list[Event] = []
    agreement = Agreement(on_event=seen.append)
    assert agreement.boundary(training(1)) == ()
    agreement.request("save", {"why": "clock"}, Needs.CLEAN)
    batches, events = wait_for_events(agreement, start=2)
    assert events == (Event(0, "save", 0, Needs.CLEAN, {"why": "clock"}),)
    agreement.arrive(events[0])
    assert agreement.boundary(training(batches + 1)) == ()
    agreement.request("stop")
    assert [event.kind for event in agreement.close()] == ["stop"]
    assert [event.kind for event in seen] == ["save", "stop"]
    assert agreement.close() == ()


def test_an_event_waits_for_a_boundary_that_offers_what_it_needs() -> None:
    agreement = Agreement()
    agreement.request("save", needs=Needs.CLEAN | Needs.TRAINING)
    agreement.request("report")
    batches, events = wait_for_events(agreement, allows=Needs.TRAINING)
    assert [event.kind for event in events] == ["report"]
    assert agreement.boundary(end_of_evaluation(batches + 1), Needs.CLEAN) == ()
    assert [event.kind for event in agreement.boundary(training(batches + 1))] == ["save"]
    agreement.close()


def both(*steps: Any) -> list[Any]:
    """Runs each step in a thread of its own, as two ranks would, and returns results or exceptions."""
    results: list[Any] = [None] * len(steps)

    def run(index: int) -> None:
        try:
            results[index] = steps[index]()
        except PeerLost as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "HashStore":
        return dist.HashStore()
    if request.param == "FileStore":
        return dist.FileStore(str(tmp_path / "store"), 2)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_every_store_of_torch_will_do(store: dist.Store) -> None:
    ranks = [Agreement(rank, 2, store, "first") for rank in range(2)]
    ranks[1].request("save")
    acted = both(*(lambda rank=rank: wait_for_events(rank) for rank in ranks))
    assert acted[0] == acted[1]
    assert both(*(lambda rank=rank: rank.arrive(acted[0][1][0]) for rank in ranks)) == [None, None]
    assert both(*(rank.close for rank in ranks)) == [(), ()]

    again = [Agreement(rank, 2, store, "second") for rank in range(2)]
    assert again[0].boundary(training(1)) == ()
    assert both(*(rank.close for rank in again)) == [(), ()]


def test_all_ranks_asking_at_once_cost_a_round_or_two() -> None:
    store = dist.HashStore()
    ranks = [Agreement(rank, 3, store, "all") for rank in range(3)]
    for _ in range(20):
        for rank in ranks:
            rank.request("preempt")
    acted = both(*(lambda rank=rank: wait_for_events(rank) for rank in ranks))
    assert acted[0] == acted[1] == acted[2]
    both(*(rank.close for rank in ranks))
    assert not store.check(["all/round/20"])  # not one for each of the 60


def test_nobody_acts_alone() -> None:
    store = dist.HashStore()
    ranks = [Agreement(rank, 2, store, "alone", **SOON) for rank in range(2)]
    ranks[0].request("save")
    acted = both(*(lambda rank=rank: wait_for_events(rank) for rank in ranks))
    lost = both(lambda: ranks[0].arrive(acted[0][1][0]))[0]
    assert "ranks [1] did not reach the boundary where all ranks act on event 0 ('save')" in str(lost)
    with pytest.raises(PeerLost, match=r"ranks \[1\] did not reach"):
        wait_for_events(ranks[1], start=20_000)
    for rank in ranks:
        rank.stop()


def test_a_rank_that_has_finished_is_not_waited_for() -> None:
    store = dist.HashStore()
    ranks = [Agreement(rank, 2, store, "finished") for rank in range(2)]
    ranks[0].request("save")
    acted = both(*(lambda rank=rank: wait_for_events(rank) for rank in ranks))
    lost = both(lambda: ranks[0].arrive(acted[0][1][0]), ranks[1].close)
    assert all("although a rank has finished already" in str(error) for error in lost), lost
    ranks[0].stop()


def test_closing_waits_for_a_rank_that_lives_however_long_it_takes() -> None:
    limits = {"answer_timeout": timedelta(seconds=1), "arrival_timeout": timedelta(seconds=0.01)}
    store, told = dist.HashStore(), threading.Event()
    ranks = [Agreement(rank, 2, store, "close", **limits) for rank in range(2)]
    begun = time.monotonic()

    def waiting() -> None:
        if time.monotonic() > begun + 1.5:  # so it was asked whether it lives
            told.set()

    def close_late() -> tuple[Event, ...]:
        assert told.wait(60)
        return ranks[1].close()

    assert both(lambda: ranks[0].close(waiting), close_late) == [(), ()]


@pytest.mark.parametrize(
    ("gone", "told"), [(1, r"ranks \[1\] did not answer"), (0, "rank 0 did not respond for 1 s at the end")]
)
def test_closing_names_who_is_gone(gone: int, told: str) -> None:
    """Soon: half an hour, which is what a rank may take to reach a boundary, is not waited for it."""
    store = dist.HashStore()
    ranks = [Agreement(rank, 2, store, "close", answer_timeout=timedelta(seconds=0.2)) for rank in range(2)]
    ranks[gone].stop()
    lost = both(ranks[1 - gone].close)[0]
    assert isinstance(lost, PeerLost)
    assert pytest.raises(PeerLost, match=told).matches(lost), lost
    assert ranks[1 - gone].close() == ()


class MuteStore:
    """A store whose host does not answer any more, as after a network partition."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def clone(self) -> MuteStore:
        return self

    def add(self, key: str, amount: int) -> int:
        self.answers.wait()
        raise ConnectionError("Connection reset by peer")


def test_a_mute_store_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_STORE_PATIENCE_S", 0.2)
    mute = MuteStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d.PrefixStore", lambda prefix, store: store)
    agreement = Agreement(0, 2, mute, "mute", answer_timeout=SOON["answer_timeout"])  # type: ignore[arg-type]
    agreement.request("save")
    with pytest.raises(PeerLost, match="does not answer rank 0"):
        agreement.close()
    agreement.abort("the store is mute")
    mute.answers.set()
    agreement._watcher.join(10)


class ClosingStore(LocalStore):
    """A store whose owner ends when this rank has finished."""

    def clone(self) -> ClosingStore:
        return self


def test_a_store_that_closes_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two watchers of the first rank one notices, and no other one has then to be waited for."""
    monkeypatch.setattr(Agreement, "_STORE_PATIENCE_S", 0.2)
    finished = threading.Event()
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d.PrefixStore",
        lambda prefix, store: Prefixed(store, finished.is_set, f"{prefix}/"),
    )
    agreement = Agreement(0, 2, ClosingStore(), "closes", **SOON)  # type: ignore[arg-type]
    finish = agreement._member.finish
    monkeypatch.setattr(agreement._member, "finish", lambda: (finish(), finished.set()))
    with pytest.raises(PeerLost, match=r"lost contact .*Broken pipe"):
        agreement.close()


def test_a_listener_that_raises_does_not_stop_the_watcher(caplog: pytest.LogCaptureFixture) -> None:
    def raises(event: Event) -> None:
        raise ValueError("a bug")

    agreement = Agreement(on_event=raises)
    agreement.request("save")
    wait_for_events(agreement)
    assert agreement.close() == ()
    assert "on_event raised" in caplog.text


@pytest.mark.campaign
def test_the_store_does_not_grow_with_the_events() -> None:
    store = dist.HashStore()
    ranks = [Agreement(rank, 2, store, "many") for rank in range(2)]
    sizes = []
    for number in range(12):
        ranks[number % 2].request("save")
        start = 1 + 20_000 * number
        acted = both(*(lambda rank=rank, start=start: wait_for_events(rank, start) for rank in ranks))
        event = acted[0][1][0]
        both(*(lambda rank=rank, event=event: rank.arrive(event) for rank in ranks))
        sizes.append(store.num_keys())
    assert sizes[-1] <= max(sizes[2:5])
    both(*(rank.close for rank in ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_healthy_boundary_asks_nobody_and_does_next_to_nothing(ranks: int) -> None:
    """No message, no file, no clock: what it calls is counted, since on a busy machine a time proves nothing."""
    store = dist.HashStore()
    members = [Agreement(rank, 2, store, "cheap") for rank in range(2)] if ranks > 1 else [Agreement()]
    agreement = members[0]
    agreement.boundary(training(0))
    places = [training(batches) for batches in range(1, 101)]
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_name if event == "call" else argument.__qualname__] += 1

    sys.setprofile(count)
    try:
        for place in places:
            agreement.boundary(place)
    finally:
        sys.setprofile(None)
    both(*(each.close for each in members))
    # A lock that nobody holds; and in front of it, what an event of another rank could have changed.
    assert calls == {"boundary": 100, "lock.__exit__": 100, "setprofile": 1}


def test_a_rank_alone_acts_at_the_very_next_boundary() -> None:
    """However short its steps are: the one in which it has asked may have been the last but one."""
    agreement = Agreement()
    for step in range(200):
        agreement.request("save", {"step": step})
        agreement.request("report", {"step": step})
        due = agreement.boundary(training(step))
        assert [(event.kind, event.payload["step"]) for event in due] == [("save", step), ("report", step)]
    assert agreement.close() == ()


def test_a_rank_alone_does_not_poll() -> None:
    """Its watcher sleeps until it is woken: nobody else changes what it looks at."""
    agreement = Agreement()

    def switches() -> int:
        status = Path(f"/proc/self/task/{agreement._watcher.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    agreement.request("save")
    _, events = wait_for_events(agreement)
    agreement.arrive(events[0])
    time.sleep(0.2)
    before = switches()
    time.sleep(0.5)
    assert switches() == before
    assert agreement.close() == ()
