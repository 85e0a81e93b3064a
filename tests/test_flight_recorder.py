"""What NCCL's Flight Recorder has recorded, in the format of several versions, asked for and judged like that of gloo.

No NCCL is needed: the ranks answer as a torch with NCCL does, at a worker server that is torch's own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.detect.hangs.flight_recorder import collectives, merge, shorten
from lightning_resilience.detect.hangs.rank_probe import RankProbe, node_directory
from lightning_resilience.detect.hangs.verdict import Verdict, diagnose
from lightning_resilience.run import exit_codes
from tests.test_hangs_verdict import entry as gloo_entry
from tests.test_hangs_verdict import evidence, gloo, pending

_FORK = multiprocessing.get_context("fork")
LIMIT_S = 1.0
NOW = 1795261495031803915

# What the versions of the dump differ in: keys of the dump, and of its entries. torch 2.13 writes 2.10.
VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2.7": ({"nccl_version": "2.26.2"}, {}),
    "2.9": ({"nccl_version": "2.26.6"}, {"thread_id": "139860418627392", "thread_name": "pt_main_thread"}),
    "2.10": ({"comm_lib_version": "2.28.9"}, {"thread_id": "139860418627392", "thread_name": "pt_autograd_0"}),
}


def entry(op: str, sequence: int, state: str = "completed", group: str = "0", **other: Any) -> dict[str, Any]:
    """One operation, in the words of NCCL's recorder: a time of 0 is one that is not known."""
    sizes = [[128, 4]]
    return {
        "record_id": sequence,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "mesh_tp"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": NOW + sequence,
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "output_sizes": sizes,
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": NOW if state == "started" else 0,
        "time_discovered_completed_ns": NOW if state == "completed" else 0,
        "retired": state == "completed",
        "timeout_ms": 1800000,
        "is_p2p": False,
        **other,
    }


def nccl(*entries: dict[str, Any], version: str = "2.10", world_size: int = 3) -> dict[str, Any]:
    of_dump, of_entries = VERSIONS[version]
    ranks = str(list(range(world_size)))
    status = {"last_enqueued_collective": "57", "last_started_collective": "-1", "last_completed_collective": "56"}
    return {
        "version": version,
        **of_dump,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": status},
        "nccl_comm_state": {},
        **({"entries": [{**each, **of_entries} for each in entries]} if entries else {}),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_the_same(version: str) -> None:
    exchange = {"is_p2p": True, "p2p_seq_id": 4}
    send = entry("send 0->2", 0, "scheduled", **exchange)
    dump = nccl(entry("all_reduce", 56), send, entry("_all_gather_base", 57, "started"), version=version)
    done, sent, running = collectives(merge([None, json.loads(json.dumps(dump))]))
    assert (done.backend, done.name, done.state, done.members) == (
        "nccl",
        "all_reduce #56 of default_pg",
        "done",
        (0, 1, 2),
    )
    assert (sent.op, sent.sequence, sent.peers, sent.state) == ("send", 4, (2,), "queued")
    assert (running.name, running.state) == ("_all_gather_base #57 of default_pg", "running")
    assert running.sizes == ((128, 4),)


def test_a_recorder_that_nobody_writes_into_has_recorded_nothing() -> None:
    empty = {"comm_lib_version": "", "nccl_comm_state": {}, "pg_config": {}, "pg_status": {}, "version": "2.10"}
    assert merge([empty, None]) is None
    assert merge([empty, nccl()]) is None  # NCCL before its first collective
    assert merge([]) is None
    recorded = nccl(entry("all_reduce", 56))
    assert merge([empty, recorded]) == recorded
    assert merge([{"entries": 3, "pg_config": 5}, recorded]) == recorded


def test_the_recorders_of_both_backends_are_read_together() -> None:
    barrier = pending("gloo:barrier", 3)
    timed = nccl(entry("all_reduce", 56), entry("all_reduce", 57, "started"), entry("all_reduce", 58, "scheduled"))
    found = collectives(merge([gloo(barrier), timed]))
    # Only where starts are recorded does an operation that has not started wait in a queue; gloo records none.
    assert [(each.backend, each.sequence, each.state) for each in found] == [
        ("gloo", 3, "running"),
        ("nccl", 56, "done"),
        ("nccl", 57, "running"),
        ("nccl", 58, "queued"),
    ]
    assert {each.members for each in found} == {(0, 1, 2)}


def test_of_each_backend_and_group_enough_is_kept() -> None:
    many = [entry("all_reduce", number) for number in range(300)]
    old = entry("all_gather_single", 7, group="5")
    dump = merge([gloo(gloo_entry("gloo:barrier", 2), gloo_entry("gloo:barrier", 3)), nccl(old, *many)])
    assert dump is not None
    kept = [(each.backend, each.group, each.sequence) for each in collectives(shorten(dump, 100))]
    assert kept == [("gloo", "0", 2), ("gloo", "0", 3), ("nccl", "5", 7), *(("nccl", "0", n) for n in range(200, 300))]


def test_a_rank_whose_recorder_says_nothing_is_not_known_to_be_behind() -> None:
    ahead = nccl(entry("all_reduce", 56), entry("all_reduce", 57, "scheduled"))
    behind = nccl(entry("all_reduce", 56))
    only_gloo = merge([gloo(gloo_entry("gloo:barrier", 9)), None])  # NCCL's recorder did not answer
    verdict = diagnose([evidence(0, ahead), evidence(1, behind), evidence(2, only_gloo)], 3)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    verdict = diagnose([evidence(0, ahead), evidence(1, behind), evidence(2, {"entries": []})], 3)
    assert [culprit.rank for culprit in verdict.culprits] == [1]


# -- from the worker server to the verdict -----------------------------------------------------------------------------


class Slow(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


def load() -> None:
    next(iter(DataLoader(Slow())))


def training_step() -> None:
    """The host waits for its device, in C: where for is not to be seen."""
    time.sleep(60)


DONE = entry("all_reduce", 56)
Scenario = Callable[[int], tuple[dict[str, Any], Callable[[], None]]]


def stuck_in_its_loader(rank: int) -> tuple[dict[str, Any], Callable[[], None]]:
    if rank == 2:
        return nccl(DONE, version="2.7"), load
    return nccl(DONE, entry("all_reduce", 57, "scheduled"), version="2.7"), training_step


def kernel_hung(rank: int) -> tuple[dict[str, Any], Callable[[], None]]:
    return nccl(DONE, entry("_reduce_scatter_base", 57, "started"), version="2.9"), training_step


def collective_left_out(rank: int) -> tuple[dict[str, Any], Callable[[], None]]:
    op = "_all_gather_base" if rank == 1 else "all_reduce"
    return nccl(DONE, entry(op, 57, "scheduled"), entry("all_reduce", 58, "scheduled")), training_step


def serve_nccl(dump: dict[str, Any]) -> None:
    """Answers as torch's FlightRecorderCUDA.cpp does: what it does not know is refused."""
    from torch._C._distributed_c10d import _register_handler

    def answer(request: Any, response: Any) -> None:
        known = request.get_param("includecollectives") in ("", "true") and request.get_param("onlyactive") != "true"
        if not known or request.get_param("includestacktraces"):
            response.set_status(400)
            response.set_content("Invalid parameters - unexpected param passed in", "text/plain")
            return
        response.set_status(200)
        response.set_content(json.dumps(dump), "application/json")

    _register_handler("dump_nccl_trace_json", answer)


def rank_of(directory: Path, run_dir: Path, rank: int, world_size: int, scenario: Scenario, begin: Any) -> None:
    fd = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    dump, hang = scenario(rank)
    serve_nccl(dump)
    about = {"run_dir": str(run_dir), "fit": 0, "token": directory.name, "node": "here", "nodes": 1}
    about |= {"world_size": world_size, "elastic_run_id": None, "restart_count": 0}
    probe = RankProbe(directory, rank, {"step": LIMIT_S}, about)
    begin.wait(60)  # one that begins late is not overdue with the others
    probe.progress.at("step", 57, (57, 1, 0, 0))
    if rank == 0:
        watchdog.start(directory)
    hang()


@pytest.fixture
def verdict_of(tmp_path: Path) -> Iterator[Callable[[Scenario], Verdict]]:
    directory = node_directory(uuid.uuid4().hex, 0)

    def run(scenario: Scenario) -> Verdict:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        about = directory, run_dir
        begin = _FORK.Barrier(3)
        ranks = [_FORK.Process(target=rank_of, args=(*about, rank, 3, scenario, begin)) for rank in range(3)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        assert [each.exitcode for each in ranks] == [exit_codes.HUNG] * 3, run_dir.with_suffix(".log").read_text()
        (verdict,) = (run_dir / "diagnostics").glob("*/verdict.json")
        return Verdict.from_json(json.loads(verdict.read_text()))

    yield run
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    ("scenario", "culprits", "kind", "said"),
    [
        (stuck_in_its_loader, [2], "data_loader", "ranks 0 and 1 wait for it in all_reduce #57 of default_pg"),
        (kernel_hung, [0, 1, 2], "unfinished", "in _reduce_scatter_base #57 of default_pg, which all its ranks have"),
        (collective_left_out, [1], "mismatch", "called _all_gather_base [128, 4] as #57 of default_pg, where ranks 0"),
    ],
)
@pytest.mark.slow_but_for(
    "stuck_in_its_loader-culprits0-data_loader-ranks 0 and 1 wait for it in all_reduce #57 of default_pg"
)
def test_the_verdict_from_what_nccl_has_recorded(
    verdict_of: Callable[[Scenario], Verdict], scenario: Scenario, culprits: list[int], kind: str, said: str
) -> None:
    verdict = verdict_of(scenario)
    assert [(each.rank, each.kind) for each in verdict.culprits] == [(rank, kind) for rank in culprits], verdict.line
    assert said in verdict.line
