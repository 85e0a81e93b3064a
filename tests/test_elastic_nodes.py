"""``launch --elastic`` over several nodes: one supervisor decides, and those of the other nodes do what it says."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.fit.last_boundary import ranks_to_save
from lightning_resilience.fit.own_values import StateUnknown
from lightning_resilience.launch import follower, node_line, nodes
from lightning_resilience.launch.channel import Channel
from lightning_resilience.launch.elastic import Supervisor
from lightning_resilience.launch.follower import FirstNodeLost, Follower
from lightning_resilience.launch.membership import Membership, Replacement
from lightning_resilience.launch.node_line import Line
from lightning_resilience.launch.nodes import BOARD, Board, Plan, Pulse
from lightning_resilience.launch.other_nodes import NodesMissing, OtherNodes, numbered
from lightning_resilience.run import deadlines
from lightning_resilience.run.deadlines import STOP_IS_DECIDED_WITHIN_S
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, RunDirectory
from tests import test_absent_ranks
from tests.harness import command, differences, free_port, reference, result, samples, state_at_the_end
from tests.ledgers import Ledger, read_ledger
from tests.test_absent_ranks import with_ranks
from tests.test_exact_resume import make, undisturbed
from tests.test_launch import wait_until
from tests.test_launchers import finish, start
from tests.test_replacement import MENDED, RANK, lives

# -- who is who --------------------------------------------------------------------------------------------------------


class Node:
    """As far as its number depends on it."""

    def __init__(self, node_rank: int | None) -> None:
        self.node_rank = node_rank


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([2, 1], [1, 0]),
        ([None, None], [0, 1]),
        ([None, 1], [1, 0]),  # a spare takes the place that is left
        ([1], [0, None]),
        ([1, 1], [1, None]),
        ([2], [None, 0]),
        ([3, 1], [1, 0]),  # of three nodes one was left out
        ([2, 3], [1, 0]),
        ([None, None, None], [0, 1]),
    ],
)
def test_nodes_have_the_numbers_that_they_were_given(given: list[int | None], expected: list[int | None]) -> None:
    nodes: list[Any] = [Node(each) for each in given]
    assert [each and nodes.index(each) for each in numbered(nodes, 2)] == expected


def test_the_first_survivor_of_a_node_saves_for_those_that_it_has_lost() -> None:
    locations = rank_locations([("a", 0), ("a", 0), ("b", 1), ("b", 1), ("b", 1)])
    assert {rank: ranks_to_save(locations, {0, 2, 4}, rank) for rank in (1, 3)} == {1: [1, 0], 3: [3, 2, 4]}
    assert {rank: ranks_to_save(locations, {1}, rank) for rank in (0, 2, 3, 4)} == {0: [0, 1], 2: [2], 3: [3], 4: [4]}
    with pytest.raises(StateUnknown):  # nobody reads what ranks of that node have left
        ranks_to_save(locations, {0, 1}, 2)


def test_of_groups_the_first_that_holds_the_same_saves_for_those_that_are_lost() -> None:
    locations = rank_locations([("a", 0)] * 6)
    lost = {2, 3, 5}
    assert {rank: ranks_to_save(locations, lost, rank, 2) for rank in (0, 1, 4)} == {0: [0, 2], 1: [1, 3, 5], 4: [4]}
    with pytest.raises(StateUnknown, match="that holds what rank 1 does"):
        ranks_to_save(locations, {1, 3, 5}, 0, 2)


# -- the connection ----------------------------------------------------------------------------------------------------

SECRET = b"s" * 32


@pytest.fixture
def first() -> Iterator[OtherNodes]:
    nodes = OtherNodes("127.0.0.1", 0, 2, 2, SECRET, lambda process, message: None)
    yield nodes
    nodes.finish(1)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "FIRST_NODE_WITHIN_S", 0.3)


def test_a_run_that_has_a_state_does_not_wait_for_all_nodes(first: OtherNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "NODES_AWAITED_S", 0.2)
    with pytest.raises(NodesMissing, match="0 of 1 other nodes"):
        first.gather(0.5, lambda: False)
    first.gather(60.0, lambda: False, least=0)
    assert [(node.name, node.is_lost) for node in first.nodes] == [("node 1", True)]
    assert first.nodes[0].start(0, {}).poll() == -signal.SIGKILL
    line = follower.join(("127.0.0.1", first.port), lambda: SECRET, 1, 2)  # it comes later
    wait_until(lambda: first._joined)
    first.readmit()
    assert [node.is_lost for node in first.nodes] == [False]
    line.close()


@pytest.mark.usefixtures("soon")
def test_who_does_not_know_the_secret_cannot_join(first: OtherNodes, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FirstNodeLost):
        follower.join(("127.0.0.1", first.port), lambda: b"x" * 32, 1, 2)
    line = follower.join(("127.0.0.1", first.port), lambda: SECRET, 1, 3)  # nor who has another number of ranks
    told = line.receive()
    assert told is not None
    assert (told.kind, told.fields) == ("end", {"code": 1})
    line.close()
    assert first._joined == []
    assert "it has 3 ranks, but the first node has 2" in capfd.readouterr().err


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("said", [b"", b"\0\0\0\2{}", b"\xff" * 8, b'\0\0\0\x0e{"kind": "a"} '])
def test_what_is_no_message_joins_nothing(first: OtherNodes, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", first.port)) as connection:
        connection.settimeout(30)
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(100):  # it closes
            pass
    assert first._joined == []


@pytest.mark.usefixtures("soon")
def test_a_node_does_not_follow_somebody_who_does_not_know_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            while True:
                try:
                    line = Line(server.accept()[0])
                except OSError:
                    return
                line.send("who", nonce="1")
                line.receive()
                line.send("welcome", proof="0" * 64)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(FirstNodeLost):
            follower.join(server.getsockname(), lambda: SECRET, None, 1)
        server.shutdown(socket.SHUT_RDWR)


def test_a_first_node_that_was_lost_is_looked_for_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: now))
    board = Board(tmp_path / BOARD, "launch")
    plan = Plan("launch", "abc", max_restarts=3, job_attempt=0)
    pulse = Pulse(Board(tmp_path / BOARD, ""), "abc")
    assert not pulse.has_stopped(), "the storage may not answer for a while"
    for _ in range(3):
        plan = replace(plan, beat=plan.beat + 1)
        board.publish(plan)
        now += deadlines.FIRST_NODE_STILL_AFTER_S - 1.0
        assert not pulse.has_stopped()
    now += deadlines.FIRST_NODE_STILL_AFTER_S + 1.0
    assert pulse.has_stopped()
    for over in (replace(plan, beat=9, exit_code=0), replace(plan, beat=9, run_id="another")):
        board.publish(replace(plan, beat=8))
        pulse = Pulse(Board(tmp_path / BOARD, ""), "abc")
        assert not pulse.has_stopped()
        board.publish(over)
        now += 2.0
        assert pulse.has_stopped()


def test_a_first_node_whose_storage_is_full_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    now = 100.0
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: now))
    board = Board(tmp_path / BOARD, "launch")
    board.publish(Plan("launch", "abc", max_restarts=3, job_attempt=0))
    monkeypatch.setattr(nodes, "write_json", full)
    now += 1000.0
    board.beat()
    board.finish(0)


def test_proofs_that_are_no_ascii_are_none() -> None:
    assert node_line._is_same("abc", "abc")
    for said in ("abd", "ab\xe9", "\udcff", None, 3):
        assert not node_line._is_same(said, "abc")


def test_a_secret_that_others_can_read_is_none(tmp_path: Path) -> None:
    path = node_line.secret_path(tmp_path, "abc")
    assert node_line.read_secret(path) is None
    assert node_line.make_secret(path) == node_line.read_secret(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        node_line.read_secret(path)


def test_who_takes_the_place_of_a_node_keeps_it(first: OtherNodes, capfd: pytest.CaptureFixture[str]) -> None:
    lines = []
    for joined, process in [(1, "broken"), (2, "in its place"), (2, "broken"), (3, "in its place")]:
        lines.append(follower.join(("127.0.0.1", first.port), lambda: SECRET, 1, 2, process=process))
        wait_until(lambda joined=joined: len(first._joined) == joined)  # type: ignore[misc]
    told = lines[2].receive()  # when its cable is back
    assert told is not None
    assert (told.kind, told.fields) == ("end", {"code": 1})
    wait_until(lambda: [each.is_lost for each in first._joined] == [True, True, False])
    assert [each.process for each in first._joined] == ["broken", "in its place", "in its place"]
    assert "node 1 is another process now" in capfd.readouterr().err
    for line in lines:
        line.close()


def test_a_silent_node_is_lost(monkeypatch: pytest.MonkeyPatch, first: OtherNodes) -> None:
    line = follower.join(("127.0.0.1", first.port), lambda: SECRET, 1, 2)
    first.gather(30, lambda: False)
    process = first.nodes[0].start(0, {})
    first.close_silent()
    assert not first.nodes[0].is_lost
    monkeypatch.setattr(deadlines, "NODE_SILENT_AFTER_S", -1.0)
    first.close_silent()
    wait_until(lambda: first.nodes[0].is_lost)
    assert process.poll() == -signal.SIGKILL
    line.close()


# -- ranks that only talk to it, of two nodes --------------------------------------------------------------------------


def supervise(
    tmp_path: Path, script: str, max_restarts: int = 3, **options: Any
) -> tuple[int, list[int], list[list[int]]]:
    """Runs 2 and 2 ranks that do what ``script`` says; the exit codes, and rank and life of every process."""
    program, log = tmp_path / "rank.py", tmp_path / "log"
    program.write_text(RANK.replace("range(3)", "range(4)") + textwrap.dedent(script))
    (tmp_path / "run").mkdir()
    ranks = [sys.executable, "-IS", str(program), str(log)]
    secret = node_line.secret_path(tmp_path / "run", "abc")
    others = partial(OtherNodes, "127.0.0.1", port := free_port(), 2, 2, node_line.make_secret(secret))
    codes: list[int] = []

    def follow() -> None:
        codes.append(Follower(ranks, 2, "abc").run(("127.0.0.1", port), secret, None))

    thread = threading.Thread(target=follow)
    thread.start()
    ledger = Ledger(tmp_path / "run", rank=None)
    ledger.record("launch", budget={"in_job_restarts": 0})  # no more than max_restarts
    code = Supervisor(ranks, 4, max_restarts, "abc", 5.0, ledger, others=others, **options).run()
    thread.join()
    return code, codes, [[int(word) for word in line.split()] for line in log.read_text().splitlines()]


ALL = {(0, 0), (1, 0), (2, 0), (3, 0)}


@pytest.mark.parametrize("lost", [{2}, {1}, {0, 3}], ids=["follower", "first", "one of each"])
def test_a_killed_rank_of_any_node_is_replaced_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: set[int]
) -> None:
    place = 'assert (int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])) == (rank % 2, rank // 2)\n'
    monkeypatch.setattr(deadlines, "DIE_TOGETHER_WITHIN_S", 0.02 if len(lost) == 1 else 1.0)
    script = MENDED.format(last=1, then="").replace("rank == 1", f"rank in {lost}")
    code, codes, started = supervise(tmp_path, place + script)
    assert (code, codes) == (0, [0])
    assert lives(started) == ALL | {(rank, 1) for rank in lost}
    assert len(started) == 4 + len(lost)


def test_what_ranks_of_another_node_have_said_before_a_death_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = Follower._act

    def act(self: Follower, line: Line, message: Any) -> None:
        if message.kind == "said" and message.fields["message"] == "saved":
            time.sleep(0.2)  # its node is slow
        acts(self, line, message)

    monkeypatch.setattr(Follower, "_act", act)
    monkeypatch.setattr(deadlines, "DIE_TOGETHER_WITHIN_S", 0.0)
    monkeypatch.setattr(deadlines, "WORDS_HEARD_WITHIN_S", 30.0)  # this one may be slow, too
    script = """
        ready(saved=False)
        if rank == 2:
            others()
            tell(kind="saved")
            [pid] = [int(line.split()[2]) for line in open(log) if line[0] == "1"]
            os.kill(pid, signal.SIGKILL)
        while generation < 1:
            generation = hear()
            ready()
    """
    code, codes, started = supervise(tmp_path, script)
    assert (code, codes) == (0, [0])
    assert lives(started) == ALL | {(1, 1)}


def test_what_is_not_mended_restarts_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    code, codes, started = supervise(tmp_path, "ready(); others()\nif not life: sys.exit(rank == 3 or hear())")
    assert (code, codes) == (0, [0])
    assert lives(started) == ALL | {(rank, 1) for rank in range(4)}


def test_the_budget_ends_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    code, codes, started = supervise(tmp_path, "if rank == 2: die()\nhear()", max_restarts=0)
    assert (code, codes) == (1, [1])
    assert lives(started) == ALL


@pytest.fixture
def is_unplugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The line to the other node is cut, once, when one of its ranks says something and this file is there."""
    unplugged = tmp_path / "unplugged"
    acts = Follower._act

    def act(self: Follower, line: Line, message: Any) -> None:
        if message.kind == "said" and unplugged.exists():
            unplugged.rename(tmp_path / "was unplugged")
            line.close()
        acts(self, line, message)

    def join(*args: Any) -> Line:
        if (tmp_path / "was unplugged").exists():
            time.sleep(1.0)  # else it may be back before it is missed
        return joins(*args)

    joins = follower.join
    monkeypatch.setattr(follower, "join", join)
    monkeypatch.setattr(Follower, "_act", act)
    return unplugged


def test_all_are_started_again_when_a_lost_node_is_back(
    tmp_path: Path, is_unplugged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "FIRST_NODE_WITHIN_S", 20.0)
    is_unplugged.touch()
    code, codes, started = supervise(tmp_path, "ready()\nif not life: hear()")
    assert (code, codes) == (0, [0])
    assert lives(started) == ALL | {(rank, 1) for rank in range(4)}


def test_the_ranks_of_the_first_node_go_on_without_the_other_until_it_is_back(
    tmp_path: Path, is_unplugged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"""
        def hear():
            message = json.loads(line.read(struct.unpack("!I", line.read(4))[0]))
            if message["kind"] == "restart": sys.exit(1)
            print(rank, message["lost"], message["members"], file=open(f"{{log}}.told", "a"))
            return message["generation"]
        def ready():
            tell(kind="state", state="ready", generation=generation, reason="", fewer="", tasks="")
            tell(kind="saved")
            print(file=open(f"{{log}}.{{rank}}.{{generation}}", "w"))
        if "LIGHTNING_RESILIENCE_JOINS" in os.environ:
            assert socket.socket().connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"])))  # nobody is there
            say("waiting")
            generation = hear()
        ready()
        if not life: others()
        if life == 0 and rank == 2:
            open({str(is_unplugged)!r}, "w").close()
            ready()
        if life == 0 and rank > 1: hear()
        while generation < 2:
            generation = hear()
            say("left")
            ready()
        say("done")
    """
    code, codes, started = supervise(tmp_path, script, when_lost="go_on")
    assert (code, codes) == (0, [0])
    assert lives(started) == ALL | {(2, 1), (3, 1)}
    told = (tmp_path / "log.told").read_text().splitlines()
    lost = {str(rank): f"was lost with {node_name()}" for rank in (2, 3)}
    assert sorted(told)[:4] == sorted(
        f"{rank} {of} {members}" for rank in (0, 1) for of, members in ((lost, [0, 1]), ({}, [0, 1, 2, 3]))
    )
    said = capfd.readouterr().err
    assert f"Ranks 2 and 3 were lost with {node_name()}: continuing with 2 of 4 ranks (restart 1)." in said
    assert "A node has joined for ranks 2 and 3" in said


def test_the_ranks_of_a_node_end_when_the_first_node_is_lost(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK + "hear()")
    log = tmp_path / "log"
    secret = node_line.secret_path(tmp_path, "abc")
    first = OtherNodes("127.0.0.1", 0, 2, 2, node_line.make_secret(secret), lambda process, message: None)
    codes: list[int] = []
    node = Follower([sys.executable, "-IS", str(program), str(log)], 2, "abc")
    thread = threading.Thread(target=lambda: codes.append(node.run(("127.0.0.1", first.port), secret, 1, lambda: True)))
    thread.start()
    first.gather(30, lambda: False)
    for rank in range(2):
        first.nodes[0].start(rank, {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0", ELASTIC_VARIABLE: "hold"})
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    first.nodes[0].line.close()
    thread.join()
    assert codes == [1]
    assert not [line for line in log.read_text().splitlines() if psutil.pid_exists(int(line.split()[2]))]
    first.finish(1)


@pytest.mark.parametrize(
    ("members", "slot", "rank", "local", "node"),
    [
        ([0, 1], 1, (1, 2), (1, 2), (0, 1)),  # the other node is lost
        ([0, 2, 3], 3, (2, 3), (1, 2), (1, 2)),
        ([2, 3], 2, (0, 2), (0, 2), (0, 1)),  # all ranks of the first node
        ([1, 3], 3, (1, 2), (0, 1), (1, 2)),
    ],
)
def test_a_rank_knows_its_numbers_among_those_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
    members: list[int],
    slot: int,
    rank: tuple[int, int],
    local: tuple[int, int],
    node: tuple[int, int],
) -> None:
    for name in ("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "of before")
    for name, value in {"RANK": slot, "GROUP_RANK": slot // 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    ours, theirs = socket.socketpair()
    line = Membership(Channel(ours), 0)
    line.begin(Replacement(1, 4711, {}, tuple(members)))
    for (number, count), prefixes in ((rank, ["", "ROLE_"]), (local, ["LOCAL_"]), (node, ["GROUP_"])):
        for prefix in prefixes:
            assert (os.environ[f"{prefix}RANK"], os.environ[f"{prefix}WORLD_SIZE"]) == (str(number), str(count))
    line.begin(Replacement(2, 4712, {}, (0, 1, 2, 3)))
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == [
        *map(str, (slot, slot % 2, slot // 2))
    ]
    theirs.close()


# -- real ranks, of nodes that share a host ----------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"digests": True, "validation": True, "data": "shuffle", "workers": 0, "save_every": 5}


def start_nodes(config: dict[str, Any], ranks: int, output: Path, *more: str, count: int = 2) -> list[Any]:
    """The launches of so many nodes with so many ranks each."""
    launch = [
        sys.executable,
        "-m",
        "lightning_resilience.launch.cli",
        "launch",
        "--elastic",
        f"--nnodes={count}",
        *more,
    ]
    launch += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nproc-per-node", str(ranks)]
    launch += ["--run-dir", config["run_dir"]]
    return [start([*launch, f"--node-rank={node}", *command(config)[1:]], output) for node in range(count)]


def rank_of(node: Any, rank: int) -> psutil.Process:
    """The process of a rank of this node, and not one that it has started."""
    there = psutil.Process(node.pid).children(recursive=True)
    of_rank = {each.pid for each in there if each.environ().get("RANK") == str(rank)}
    [found] = [each for each in there if each.pid in of_rank and each.ppid() not in of_rank]
    return found


def launched(
    tmp_path: Path,
    ranks: int,
    events: list[dict[str, Any]],
    *more: str,
    meanwhile: Callable[[dict[str, Any], list[Any]], None] = lambda config, nodes: None,
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """Runs a launch on two nodes with so many ranks each; the end must be that of the undisturbed run."""
    options = {**OPTIONS, "trainer": {"devices": ranks, "num_nodes": 2}, **options}
    config = make(tmp_path, "disturbed", events=[{"do": "SIGKILL", "once": True, **each} for each in events], **options)
    output = tmp_path / "output"
    nodes = start_nodes(config, ranks, output, *more)
    try:
        meanwhile(config, nodes)
        codes = [finish(node, output) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()
    assert not [*differences(config, reference(**options))], output.read_text()
    assert not [each for each in psutil.process_iter(["cmdline"]) if config["run_dir"] in (each.info["cmdline"] or [])]
    assert not [*Path(config["run_dir"]).glob("elastic/secret-*")]
    return config, output.read_text()


def events_of(config: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(Path(config["run_dir"]) / "ledger") if event["event"] == kind]


def saved_after_losses(config: dict[str, Any]) -> list[int | None]:
    """After each loss the step that was saved and resumed from; ``None``: an older one was."""
    found: list[int | None] = []
    generation = "none"
    for event in read_ledger(Path(config["run_dir"]) / "ledger"):
        if event["event"] == "replaced":
            found.append(None)
        elif event["event"] == "saved" and event["reason"] == "after a loss":
            generation = event["generation"]
        elif event["event"] == "resumed" and found and event.get("generation") == generation:
            found[-1] = event["step"]
    return found


LAST_BOUNDARY: dict[str, Any] = {
    "keeps_nothing": True,
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "local": {"every_n_train_steps": 7},
}


@pytest.mark.slow
def test_killed_ranks_of_both_nodes_are_replaced_and_only_one_step_is_done_again(tmp_path: Path) -> None:
    events = [{"at": "train", "step": step, "rank": rank} for step, rank in [(12, 3), (18, 0), (18, 2)]]
    config, output = launched(tmp_path, 2, events, **LAST_BOUNDARY)
    replaced = [event["ranks"] for event in events_of(config, "replaced")]
    assert sorted(itertools.chain(*replaced)) == [0, 2, 3], output
    pids = {event["pid"] for event in events_of(config, "start")}
    assert len(pids) == 2, output  # rank 0 was replaced once, and lived on else
    assert saved_after_losses(config)[0] == 12, output  # the two may not have died within 20 ms


@pytest.mark.campaign
def test_a_node_that_has_lost_all_its_ranks_goes_back_with_the_others(tmp_path: Path) -> None:
    config, output = launched(tmp_path, 1, [{"at": "train", "step": 18, "rank": 1}], **LAST_BOUNDARY)
    assert saved_after_losses(config) == [None], output
    assert "no rank is left on" in output
    assert len({event["pid"] for event in events_of(config, "start")}) == 1


@pytest.mark.campaign
def test_a_hung_rank_of_the_other_node_is_replaced(tmp_path: Path) -> None:
    event = {"at": "train", "step": 18, "rank": 2, "do": "SIGSTOP"}
    config, output = launched(tmp_path, 2, [event], "--section-timeouts", "step:5")
    assert [event["ranks"] for event in events_of(config, "replaced")] == [[2]], output


@pytest.mark.slow
def test_all_ranks_are_started_again_when_a_killed_launch_of_a_node_is_back(tmp_path: Path) -> None:
    is_lost = tmp_path / "lost"
    event = {
        "at": "train",
        "step": 13,
        "rank": 0,
        "do": "sleep",
        "seconds": 0,
        "after_file": str(is_lost),
        "within_s": 100.0,
    }

    def meanwhile(config: dict[str, Any], nodes: list[Any]) -> None:
        wait_until(lambda: any(event["step"] == 10 for event in events_of(config, "saved")), within_s=100.0)
        nodes[1].kill()
        nodes[1].wait()
        nodes[1] = start(nodes[1].args, tmp_path / "output")
        is_lost.touch()

    config, output = launched(tmp_path, 1, [event], meanwhile=meanwhile)
    assert events_of(config, "replaced") == [], output
    assert [event["retry"] for event in events_of(config, "job_start")] == [False], output
    assert len({event["pid"] for event in events_of(config, "start")}) == 2, output


@pytest.mark.campaign
@pytest.mark.parametrize("what", ["launch", "rank", "rank, and they might go on without"])
def test_a_stop_of_the_other_node_saves_and_ends_both(tmp_path: Path, what: str) -> None:
    """Whether its launch was told, or one of its ranks alone."""
    is_stopped, output = tmp_path / "stopped", tmp_path / "output"
    options = {**OPTIONS, "trainer": {"devices": 1, "num_nodes": 2}}
    goes_on = what.endswith("without")
    # With go-on the rank waits for what its launch has to say: not beyond the end of the training.
    event = {"at": "train", "step": 13, "rank": 0, "do": "sleep", "after_file": str(is_stopped), "once": True}
    waits = {**event, "seconds": STOP_IS_DECIDED_WITHIN_S + 1.0 if goes_on else 0.5, "within_s": 100.0}
    config = make(tmp_path, "disturbed", events=[waits], **options)
    nodes = start_nodes(config, 1, output, "--spares=off", *(["--when-lost=go-on"] if goes_on else []))
    wait_until(lambda: any(each["step"] == 10 for each in events_of(config, "saved")), within_s=100.0)
    (nodes[1] if what == "launch" else rank_of(nodes[1], 1)).send_signal(signal.SIGTERM)
    is_stopped.touch()
    assert [finish(node, output) for node in nodes] == [75, 75], output.read_text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert (outcome.status, (outcome.step or 0) > 10) == ("interrupted", True)
    assert [finish(node, output) for node in start_nodes(config, 1, output)] == [0, 0], output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()


@pytest.mark.campaign
def test_a_stop_of_one_rank_is_not_forgotten_when_another_one_is_lost(tmp_path: Path) -> None:
    """It was asked for in a fit that is left: the next one stops."""
    is_lost, output = tmp_path / "lost", tmp_path / "output"
    options: dict[str, Any] = {**OPTIONS, "trainer": {"devices": 1, "num_nodes": 3}}
    wait = {"at": "train", "rank": 0, "do": "sleep", "seconds": 0.0, "once": True}
    config = make(tmp_path, "disturbed", **options)
    config["events"] = [
        {**wait, "step": 13, "after_file": str(is_lost), "within_s": 100.0},
        {**wait, "step": 20, "seconds": STOP_IS_DECIDED_WITHIN_S + 2.0},
    ]
    more = ("--nnodes=2:3", "--spares=off", "--section-timeouts=step:none")
    nodes = start_nodes(config, 1, output, *more, count=3)
    try:
        wait_until(lambda: any(each["step"] == 10 for each in events_of(config, "saved")), within_s=100.0)
        rank_of(nodes[2], 2).send_signal(signal.SIGTERM)
        rank_of(nodes[1], 1).kill()
        is_lost.touch()
        codes = [finish(node, output) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [75, 75, 75], output.read_text()
    assert [each["ranks"] for each in events_of(config, "replaced")][:1] == [[1]], output.read_text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "interrupted"


@pytest.mark.parametrize(
    ("signum", "what"),
    [
        pytest.param(signal.SIGKILL, "launch", id="killed"),
        pytest.param(signal.SIGTERM, "launch", id="told to stop"),
        pytest.param(signal.SIGTERM, "all", id="all its processes are told to stop, as by Slurm"),
    ],
)
@pytest.mark.slow
def test_the_first_node_trains_on_while_the_other_is_away_and_takes_its_ranks_in(
    tmp_path: Path, signum: signal.Signals, what: str
) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": 3}
    is_lost = tmp_path / "lost"
    is_back = f"{config['run_dir']}/logs/attempt-4/*"  # behind that of all, that of two, and that of who comes back
    wait = {"at": "train", "rank": 0, "do": "sleep", "seconds": 0.0, "within_s": 200, "once": True}
    config["events"] = [{**wait, "step": 13, "after_file": str(is_lost)}, {**wait, "step": 30, "after_file": is_back}]
    nodes = start_nodes(
        config,
        1,
        output := tmp_path / "output",
        "--nnodes=2:3",
        "--spares=off",
        "--section-timeouts=step:none",
        count=3,
    )
    try:
        wait_until(lambda: any(event["step"] == 10 for event in events_of(config, "saved")), within_s=100.0)
        there = psutil.Process(nodes[1].pid).children(recursive=True) if what == "all" else []
        nodes[1].send_signal(signum)
        for process in there:
            process.send_signal(signum)
        assert nodes[1].wait(100.0) == (-signum if signum == signal.SIGKILL else 75)
        is_lost.touch()
        wait_until(lambda: len(events_of(config, "replaced")) == 1, within_s=100.0)
        nodes[1] = start(nodes[1].args, output)
        codes = [finish(node, output) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0, 0], output.read_text()
    changed = [(each["ranks"], each["members"]) for each in events_of(config, "replaced")]
    lost = [1] if signum == signal.SIGKILL else []  # it is no failure
    assert changed == [(lost, [0, 2]), ([], [0, 1, 2])], output.read_text()
    wanted, steps = test_absent_ranks.undisturbed(tmp_path, 3, **options)
    assert test_absent_ranks.samples(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


def begun_again_by_two_of_three(config: dict[str, Any], folder: Path, said: str, *more: str) -> str:
    """Has all three nodes of a run told to stop, and the third one come back only when the others have said this."""
    is_stopped, output = folder / "stopped", folder / "output"
    wait = {"at": "train", "step": 13, "rank": 0, "do": "sleep", "seconds": 0.5, "within_s": 200, "once": True}
    config["events"].append({**wait, "after_file": str(is_stopped)})
    nodes = start_nodes(config, 1, output, "--nnodes=2:3", "--spares=off", *more, count=3)
    try:
        wait_until(lambda: any(event["step"] == 10 for event in events_of(config, "saved")), within_s=100.0)
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        is_stopped.touch()
        assert [finish(node, output) for node in nodes] == [75] * 3, output.read_text()
        *first_two, third = [node.args for node in nodes]
        nodes = [start(each, output) for each in first_two]
        wait_until(lambda: said in output.read_text(), output.read_text, within_s=200.0)
        nodes.append(start(third, output))
        codes = [finish(node, output) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0, 0], output.read_text()
    assert "Not all nodes are there: continuing with 2 of 3 ranks" in output.read_text()
    return output.read_text()


@pytest.mark.campaign
def test_a_run_that_all_nodes_have_left_begins_again_with_some_and_takes_in_the_others(tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 3)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": 3}
    wait = {"at": "train", "step": 30, "rank": 0, "do": "sleep", "seconds": 0.0, "within_s": 200, "once": True}
    has_begun = f"{config['run_dir']}/logs/attempt-5/*"  # the third one's process; it has to come to the fit
    config["events"] = [{**wait, "after_file": has_begun, "after_s": 15.0}]
    output = begun_again_by_two_of_three(config, tmp_path, "Resuming from step", "--section-timeouts=step:none")
    changed = [(each["ranks"], each["members"]) for each in events_of(config, "replaced")]
    assert changed == [([], [0, 1, 2])], output
    wanted, steps = test_absent_ranks.undisturbed(tmp_path, 3, **options)
    assert test_absent_ranks.samples(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.campaign
def test_a_run_that_needs_all_ranks_does_not_begin_again_with_some(tmp_path: Path) -> None:
    """That it needs them only its ranks know."""
    options: dict[str, Any] = {**OPTIONS, "trainer": {"devices": 1, "num_nodes": 3}, "manual": True}
    config = make(tmp_path, "disturbed", events=[], **options)
    output = begun_again_by_two_of_three(config, tmp_path, "waiting up to 600 s for a launch in its place")
    assert "This fit cannot continue with 2 of 3 ranks: the module uses manual optimization" in output
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output


@pytest.mark.slow
def test_nodes_with_different_numbers_of_ranks_have_local_checkpoints(tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    callbacks = ["preemption", "auto_resume", "local_checkpoint"]
    about = {"callbacks": callbacks, "local": {"every_n_train_steps": 1}, "save_every": 1000, "step_s": 0.05}
    config = with_ranks(make(tmp_path, "disturbed", **options, **about), 4)
    config["trainer"] = {**config["trainer"], "devices": 2, "num_nodes": 2}
    is_back = f"{config['run_dir']}/logs/attempt-4/*"
    wait = {"at": "train", "rank": 0, "do": "sleep", "seconds": 0.0, "within_s": 200, "once": True}
    lost = {"at": "train", "step": 8, "rank": 3, "do": "SIGKILL", "once": True}
    config["events"] = [lost, {**wait, "step": 24, "after_file": is_back}]
    more = ("--when-lost=go-on", "--spares=off", "--section-timeouts=step:none")
    nodes = start_nodes(config, 2, output := tmp_path / "output", *more)
    try:
        codes = [finish(node, output) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    said = output.read_text()
    assert codes == [0, 0], said
    changed = [(each["ranks"], each["members"]) for each in events_of(config, "replaced")]
    assert changed == [([3], [0, 1, 2]), ([], [0, 1, 2, 3])], said
    assert re.search(r"Resuming from step \d+ \(local checkpoint \S+, saved by 3 ranks", said), said
    assert test_absent_ranks.samples(config["log"]) == test_absent_ranks.undisturbed(tmp_path, 4, **options)[1]
