"""The replicas, with real processes: what arrives is what was sent, and whatever goes wrong is said with names."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience.checkpoint.generations import Transfer
from lightning_resilience.checkpoint.replication import Replicas, cliques, fetch
from tests.harness import CONTEXT
from tests.replication_worker import SIZES, WORLD_SIZE, run

Job = Callable[..., list[Any]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Runs a scenario on all ranks; returns their results, ``None`` for a rank that died."""

    def start(scenario: str, dead: tuple[int, ...] = ()) -> list[Any]:
        processes = [CONTEXT.Process(target=run, args=(rank, WORLD_SIZE, tmp_path, scenario)) for rank in range(4)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline and len(list(tmp_path.glob("rank-*.json"))) < WORLD_SIZE - len(dead):
                if any(process.exitcode not in (None, -signal.SIGKILL) for process in processes):
                    break
                time.sleep(0.02)
            (tmp_path / "end").touch()
            for process in processes:
                process.join(max(1.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
            logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("rank-*.log")))
            expected = [-signal.SIGKILL if rank in dead else 0 for rank in range(WORLD_SIZE)]
            assert codes == expected, f"{codes}\n{logs}"
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        return [None if rank in dead else json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]

    return start


def fine(*ranks: int) -> dict[str, Any]:
    return {"from": list(ranks), "error": None, "broken": False}


# Cliques


def on_nodes(world_size: int, ranks: int) -> list[str]:
    return [f"node {rank // ranks}" for rank in range(world_size)]


@pytest.mark.nvrx
def test_cliques_are_those_of_nvrx() -> None:
    from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import parse_group_sequence

    compared = 0
    for world_size, jump, factor in itertools.product(range(1, 25), repeat=3):
        if factor > 1 and world_size % (jump * factor) == 0:
            theirs = parse_group_sequence(jump, factor, world_size)
            assert cliques(on_nodes(world_size, jump), jump, factor) == [list(group) for group in theirs]
            compared += 1
    assert compared > 100


def test_every_rank_has_a_partner_on_another_node() -> None:
    for world_size, jump, factor in itertools.product(range(1, 25), repeat=3):
        try:
            groups = cliques(on_nodes(world_size, jump), jump, factor)
        except ValueError:
            assert factor < 2 or world_size % jump or world_size == jump
            continue
        assert sorted(itertools.chain(*groups)) == list(range(world_size))
        for group in groups:
            nodes = [rank // jump for rank in group]
            assert group == sorted(group)
            assert len(set(nodes)) == len(nodes) >= min(factor, world_size // jump)
            assert len(nodes) < 2 * factor
            assert len({rank % jump for rank in group}) == 1


def test_left_over_nodes_join_the_last_group() -> None:
    assert cliques(on_nodes(6, 2), 2, 2) == [[0, 2, 4], [1, 3, 5]]
    assert cliques(on_nodes(5, 1), 1, 2) == [[0, 1], [2, 3, 4]]
    assert cliques(on_nodes(2, 1), 1, 4) == [[0, 1]]


def test_copies_on_the_node_of_the_rank_itself_are_none() -> None:
    assert cliques(on_nodes(8, 2), 4, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="ranks of one node keep each other's copies"):
        cliques(on_nodes(8, 4), 2, 2)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ((8, 8, 2), "turn replication off"),
        ((8, 3, 2), "number of ranks on a node"),
        ((8, 0, 2), "number of ranks on a node"),
        ((8, 16, 2), "number of ranks on a node"),
        ((8, 2, 1), "2 or more"),
    ],
)
def test_impossible_cliques_say_what_to_set(arguments: tuple[int, int, int], advice: str) -> None:
    world_size, jump, factor = arguments
    with pytest.raises(ValueError, match=advice):
        cliques(on_nodes(world_size, 2), jump, factor)


# Exchanges


def test_parts_of_all_sizes_arrive_while_training_communicates(job: Job) -> None:
    for rank, results in enumerate(job("round_trips")):
        assert results == [fine((rank + 2) % 4)] * (3 * len(SIZES))


def test_parts_of_different_sizes_in_a_clique_of_four(job: Job) -> None:
    for rank, results in enumerate(job("all_in_one_clique")):
        assert results == [[peer for peer in range(4) if peer not in (rank, number % 4)] for number in range(6)]


@pytest.mark.slow
def test_large_parts(job: Job) -> None:
    assert job("large") == [True] * 4


def test_partner_without_a_part(job: Job) -> None:
    results = job("nothing_to_give")
    assert results[0] == [fine(2), fine(), fine(2)]
    assert results[3] == [fine(), fine(), fine(1)]


def test_partner_dies_with_its_part_in_flight(job: Job) -> None:
    results = job("dies_with_the_part_in_flight", dead=(2,))
    for rank, other in ((0, 3), (3, 0)):
        before, during, after = results[rank]
        assert before == fine(*sorted({2, other}))
        assert during["from"] == [other], "what came from the other partner is kept"
        assert during["broken"]
        assert "rank 2: " in during["error"]
        assert f"rank {other}: " not in during["error"]
        assert after["from"] == []
        assert "rank 2: " in after["error"]


def test_partner_dies_between_exchanges(job: Job) -> None:
    results = job("dies_before_it_comes", dead=(2,))
    assert results[1] == [fine(3)] * 2, "of no concern to other cliques"
    first, second = results[0]
    assert first["broken"]
    assert "rank 2: its process ended" in first["error"]
    assert "rank 2" in second["error"]


def test_partner_does_not_come(job: Job) -> None:
    results = job("does_not_come")
    for rank, other in ((0, 3), (3, 0)):
        first, second = results[rank]
        assert first["from"] == [other]
        assert "rank 2: no data for 1.5 s" in first["error"]
        assert f"rank {other}: " not in first["error"]
        assert "replication has stopped" in second["error"]
    late = results[2][0]
    assert late["broken"]
    for rank in (0, 3):
        assert f"rank {rank}: its process ended, or it closed the connection" in late["error"]


def test_partner_hangs_in_the_middle(job: Job) -> None:
    results = job("stops_in_the_middle")
    assert "rank 2: no data for 1.5 s" in results[0]["error"]
    assert results[0]["broken"]
    assert "rank 0: " in results[2]["error"]


def test_partners_out_of_step_are_named_with_their_generations(job: Job) -> None:
    results = job("out_of_step")
    text = "rank 2: it is out of step: it exchanges g4 as number 1, this rank g3 as number 1"
    assert text in results[0][0]["error"]
    assert "rank 0: it is out of step: it exchanges g3" in results[2][0]["error"]
    assert results[0][1] == fine(2)
    assert not results[0][0]["broken"]
    assert results[2][1] == fine(0)
    assert "it exchanges g5 as number 3, this rank g6 as number 3" in results[0][2]["error"]
    assert "it exchanges g7 as number 4, this rank g7 as number 5" in results[0][3]["error"]
    assert results[1] == [fine(3), fine(3), fine(3), fine(3)]


def test_a_bit_that_flips_on_the_way_is_noticed(job: Job) -> None:
    results = job("damaged_on_the_way")
    assert results[0][0]["from"] == []
    assert "rank 2: its shard was corrupted in transit" in results[0][0]["error"]
    assert results[0][1] == fine(2)
    assert results[2] == [fine(0), fine(0)]


def test_a_damaged_message_ends_the_connection(job: Job) -> None:
    results = job("damaged_message")
    assert "rank 2: its message is invalid" in results[0][0]["error"]
    assert "rank 0: its process ended, or it closed the connection" in results[2][0]["error"]
    assert results[0][0]["broken"]
    assert results[2][0]["broken"]
    assert results[1] == [fine(3)] * 2


def test_without_memory_for_one_part_all_others_arrive(job: Job) -> None:
    results = job("no_memory")
    first, second = results[0]
    assert first["from"] == [1]
    assert "rank 2: no memory for the 40971 bytes of its shard: OSError(28" in first["error"]
    assert "rank 3: no memory" in first["error"]
    assert "40970 bytes were reserved" in first["error"]
    assert not first["broken"]
    assert second == fine(1, 2, 3)
    for rank in (1, 2, 3):
        assert results[rank] == [fine(*(peer for peer in range(4) if peer != rank))] * 2


def test_an_error_of_one_rank_does_not_leave_its_partner_waiting(job: Job) -> None:
    results = job("fails_here")
    assert "not torch.float32" in results[2]["error"]
    assert "at most 200 bytes" in results[3]["error"]
    for rank in (0, 1):
        assert f"rank {rank + 2}: its process ended, or it closed the connection" in results[rank]["error"]
        assert results[rank + 2]["broken"]


def test_what_ends_a_thread_ends_the_exchange(job: Job) -> None:
    results = job("interrupted")
    assert results[0] == {"from": [], "error": "enough", "broken": True}
    assert "rank 0: its process ended, or it closed the connection" in results[2]["error"]
    assert results[3] == fine(0, 2)


def test_closing_tells_the_partners(job: Job) -> None:
    results = job("closed")
    for rank in (0, 1):
        *_, first, second = results[rank]
        assert f"rank {rank + 2}: its process ended, or it closed the connection" in first["error"]
        assert first["broken"]
        assert second["error"]
    assert results[0][0] == "another thread is in an exchange; only one can run at a time"
    assert results[2][0]["error"] == "the replicas of rank 2 are closed"


def test_a_clique_without_partners() -> None:
    for clique in ([0], [0, 0], [1, 2]):
        with pytest.raises(ValueError, match="rank 0 needs a clique of itself and at least one other rank"):
            Replicas(0, clique, "test", timedelta(seconds=1))


def test_losing_one_of_two_partners_tells_the_other(job: Job) -> None:
    results = job("one_of_three_is_lost")
    lost = [rank for rank in (2, 3) if f"rank {rank}: its message is invalid" in results[0][0]["error"]]
    assert len(lost) == 1
    other = 5 - lost[0]
    assert results[0][0]["from"] == [other]
    assert results[other][0] == fine(*sorted({0, lost[0]}))
    assert results[lost[0]][0]["from"] == [other]
    assert "rank 0: its process ended, or it closed the connection" in results[lost[0]][0]["error"]
    assert "rank 0: its process ended, or it closed the connection" in results[other][1]["error"]


def test_a_partner_that_never_connects_is_named(job: Job) -> None:
    results = job("cannot_connect")
    assert [result.split(" cannot")[0] for result in results[:3]] == [
        "rank 0 and rank 3",
        "rank 1 and rank 3",
        "rank 2 and rank 3",
    ]


# Transfers


def test_parts_are_brought_where_they_are_needed(job: Job) -> None:
    results = job("transfers")
    assert [result[0] for result in results] == [[]] * 4
    assert [result[1] for result in results] == [
        [["rrr", True]],
        [["pp", True], ["r", True], ["s", True]],
        [["ppp", True], ["rr", True]],
        [["pppp", True], ["rrrr", True]],
    ]
    assert results[2][2] == [["tt", True]]


def test_files_that_are_not_there_any_more(job: Job) -> None:
    results = job("missing_files")
    parts = ["gone", "a folder", "a pipe", "longer", "shorter", "cut", "unreadable", "whole"]
    assert results[0] == results[1] == []
    assert results[2] == results[3] == [[part, part == "whole"] for part in parts]


def test_no_memory_at_the_destination(job: Job) -> None:
    brought, said = job("nowhere_to_put")[2]
    assert brought == [["full", False], ["small", False], ["fits", True]]
    reasons = [line.partition(" failed: ")[2] for line in said if " failed: " in line]
    assert [reason.partition(" for its")[0] for reason in reasons] == ["no memory"] * 2, reasons


def test_transfer_damaged_on_the_way(job: Job) -> None:
    assert job("transfer_damaged")[2] == [["x", False], ["yy", True]]


def test_source_dies(job: Job) -> None:
    results = job("source_dies", dead=(0,))
    assert results[1] == []
    assert "yy from rank 0 to rank 2 failed: " in results[2]
    assert "zzz from rank 0 to rank 3 failed: " in results[3]


def test_destination_does_not_come(job: Job) -> None:
    results = job("destination_missing")
    assert "rank 0 and rank 3 cannot connect" in results[0]
    assert "x from rank 0 to rank 1 failed: its process ended, or it closed the connection" in results[1]


def test_the_last_in_a_long_queue_is_served(job: Job) -> None:
    assert job("long_queue")[1:3] == [[["x", True], ["yy", True]], [["zzz", True]]]


def test_transfers_within_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x from rank 0 to rank 0 .* is not a transfer between two ranks"):
        fetch(0, [Transfer(0, 0, "x", 1)], lambda _: torch.empty(1), "test", timedelta(seconds=1))


def test_different_lists_are_an_error(job: Job) -> None:
    results = job("different_lists")
    assert "it sends x with 100 bytes as number 0, this rank expects x with 50 as number 0" in results[2]
    for rank in (0, 1):
        assert "its process ended, or it closed the connection" in results[rank]
    assert "it sends yy with 100 bytes as number 1, this rank expects zz with 100 as number 1" in results[3]


def test_the_last_word_arrives_though_the_source_closes(job: Job) -> None:
    results = job("many_short_lives")
    assert results[2] == results[3] == [[["x", True]]] * 60
