"""``launch --elastic`` over several nodes: one supervisor decides, and those of the other nodes do what it says."""

from __future__ import annotations

import itertools
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.fit import last_boundary
from lightning_resilience.fit.last_boundary import ranks_to_save
from lightning_resilience.launch import follower, node_line
from lightning_resilience.launch.elastic import Supervisor
from lightning_resilience.launch.follower import FirstNodeLost, Follower
from lightning_resilience.launch.node_line import Line
from lightning_resilience.launch.other_nodes import OtherNodes, numbered
from lightning_resilience.run import deadlines
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import command, differences, free_port, reference, result, samples
from tests.ledgers import Ledger, read_ledger
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
        ([1], None),
        ([1, 1], None),
        ([3, 1], None),  # there is no such place
        ([None, None, None], [0, 1]),
    ],
)
def test_nodes_have_the_numbers_that_they_were_given(given: list[int | None], expected: list[int] | None) -> None:
    nodes: list[Any] = [Node(each) for each in given]
    found = numbered(nodes, 2)
    assert (found and [nodes.index(each) for each in found]) == expected


def test_the_first_survivor_of_a_node_saves_for_those_that_it_has_lost() -> None:
    locations = rank_locations([("a", 0), ("a", 0), ("b", 1), ("b", 1), ("b", 1)])
    assert {rank: ranks_to_save(locations, {0, 2, 4}, rank) for rank in (1, 3)} == {1: [1, 0], 3: [3, 2, 4]}
    assert {rank: ranks_to_save(locations, {1}, rank) for rank in (0, 2, 3, 4)} == {0: [0, 1], 2: [2], 3: [3], 4: [4]}
    with pytest.raises(last_boundary._Unknown):  # nobody reads what ranks of that node have left
        ranks_to_save(locations, {0, 1}, 2)


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
    assert "it has 3 ranks, and the first node 2" in capfd.readouterr().err


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


def test_a_secret_that_others_can_read_is_none(tmp_path: Path) -> None:
    path = node_line.secret_path(tmp_path, "abc")
    assert node_line.read_secret(path) is None
    assert node_line.make_secret(path) == node_line.read_secret(path)
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        node_line.read_secret(path)


def test_a_silent_node_is_lost(monkeypatch: pytest.MonkeyPatch, first: OtherNodes) -> None:
    line = follower.join(("127.0.0.1", first.port), lambda: SECRET, 1, 2)
    first.gather(30, lambda: False)
    process = first.nodes[0].start(0, {})
    first.close_silent()
    assert first.lost == []
    monkeypatch.setattr(deadlines, "NODE_SILENT_AFTER_S", -1.0)
    first.close_silent()
    wait_until(lambda: len(first.lost) == 1)
    assert process.poll() == -signal.SIGKILL
    line.close()


# -- ranks that only talk to it, of two nodes --------------------------------------------------------------------------


def supervise(
    tmp_path: Path, script: str, followers: int = 1, max_restarts: int = 3
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
        for _ in range(followers):
            codes.append(Follower(ranks, 2, "abc").run(("127.0.0.1", port), secret, None))

    thread = threading.Thread(target=follow)
    thread.start()
    ledger = Ledger(tmp_path / "run", rank=None)
    code = Supervisor(ranks, 4, max_restarts, "abc", 5.0, ledger, others=others).run()
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


def test_all_are_started_again_when_a_lost_node_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = tmp_path / "lost"
    acts = Follower._act

    def act(self: Follower, line: Line, message: Any) -> None:
        if message.kind == "said" and not lost.exists():
            lost.touch()
            line.close()
        acts(self, line, message)

    monkeypatch.setattr(Follower, "_act", act)
    code, codes, started = supervise(tmp_path, "ready()\nif not life: hear()", followers=2)
    assert (code, codes) == (0, [1, 0])  # whose launcher starts it again
    assert lives(started) == ALL | {(rank, 1) for rank in range(4)}


def test_the_ranks_of_a_node_end_when_the_first_node_is_lost(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK + "hear()")
    log = tmp_path / "log"
    secret = node_line.secret_path(tmp_path, "abc")
    first = OtherNodes("127.0.0.1", 0, 2, 2, node_line.make_secret(secret), lambda process, message: None)
    codes: list[int] = []
    node = Follower([sys.executable, "-IS", str(program), str(log)], 2, "abc")
    thread = threading.Thread(target=lambda: codes.append(node.run(("127.0.0.1", first.port), secret, 1)))
    thread.start()
    first.gather(30, lambda: False)
    for rank in range(2):
        first.nodes[0].start(rank, {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"})
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    first.nodes[0].line.close()
    thread.join()
    assert codes == [1]
    assert not [line for line in log.read_text().splitlines() if psutil.pid_exists(int(line.split()[2]))]
    first.finish(1)


# -- real ranks, of nodes that share a host ----------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"digests": True, "validation": True, "data": "shuffle", "workers": 0, "save_every": 5}


def start_nodes(config: dict[str, Any], ranks: int, output: Path, *more: str) -> list[Any]:
    """The launches of two nodes with so many ranks each."""
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--nnodes=2", *more]
    launch += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nproc-per-node", str(ranks)]
    launch += ["--run-dir", config["run_dir"]]
    return [start([*launch, f"--node-rank={node}", *command(config)[1:]], output) for node in range(2)]


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
def test_a_stop_of_the_other_node_saves_and_ends_both(tmp_path: Path) -> None:
    is_stopped, output = tmp_path / "stopped", tmp_path / "output"
    options = {**OPTIONS, "trainer": {"devices": 1, "num_nodes": 2}}
    event = {"at": "train", "step": 13, "do": "sleep", "seconds": 0.5, "after_file": str(is_stopped), "once": True}
    config = make(tmp_path, "disturbed", events=[{**event, "within_s": 100.0}], **options)
    nodes = start_nodes(config, 1, output)
    wait_until(lambda: any(each["step"] == 10 for each in events_of(config, "saved")), within_s=100.0)
    nodes[1].send_signal(signal.SIGTERM)
    is_stopped.touch()
    assert [finish(node, output) for node in nodes] == [75, 75], output.read_text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert (outcome.status, (outcome.step or 0) > 10) == ("interrupted", True)
    assert [finish(node, output) for node in start_nodes(config, 1, output)] == [0, 0], output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()
