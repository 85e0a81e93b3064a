"""The verdict on a hang: from evidence made by hand for every kind, and from real gloo ranks that are stuck for real.

The diagnosis is given evidence only, never which rank was told to do what.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_resilience.detect.hangs.comm_wait import CommWaitTimer
from lightning_resilience.detect.hangs.evidence import Frame, ProcessEvidence, RankEvidence, Thread
from lightning_resilience.detect.hangs.flight_recorder import Collective, collectives
from lightning_resilience.detect.hangs.stacks import parse_stacks, place
from lightning_resilience.detect.hangs.verdict import Finding, Verdict, diagnose
from tests.harness import CONTEXT

SITE = "/opt/venv/lib/python3.11/site-packages"
STDLIB = "/usr/lib/python3.11"
MAIN = 0x7F2AFBC95B80
OTHER = 0x7F2AD8B126C0


# -- stacks ------------------------------------------------------------------------------------------------------------


def dump(main: str = "step", *, header: str = "Current thread") -> str:
    return (
        f"Thread 0x{OTHER:016x} (most recent call first):\n"
        f'  File "{STDLIB}/threading.py", line 331 in wait\n'
        "\n"
        f"{header} 0x{MAIN:016x} (most recent call first):\n"
        f'  File "/home/me/train.py", line 41 in {main}\n'
        f'  File "/home/me/train.py", line 90 in <module>\n'
    )


def functions(threads: list[Thread], main: bool = True) -> list[str]:
    (thread,) = (thread for thread in threads if thread.is_main == main)
    return [frame.function for frame in thread.frames]


def test_threads_and_frames_are_read() -> None:
    other, main = parse_stacks(dump(), MAIN)
    assert (other.ident, other.is_main, main.ident, main.is_main) == (OTHER, False, MAIN, True)
    assert main.frames[0] == Frame("/home/me/train.py", 41, "step")
    assert [frame.function for frame in main.frames] == ["step", "<module>"]


def test_the_main_thread_need_not_be_the_current_one() -> None:
    assert functions(parse_stacks(dump(header="Thread"), MAIN)) == ["step", "<module>"]


HEADER = f"Current thread 0x{MAIN:016x} (most recent call first):\n"
C_STACK = (
    "\nCurrent thread's C stack trace (most recent call first):\n"
    '  Binary file "/usr/bin/python", at _Py_DumpStack+0x44 [0x104f92e5c]\n'
    "  <truncated rest of calls>\n"
)
VERSIONS = {
    "3.14, named, no frame": (HEADER.replace(" (most", " [python3 (x) y] (most") + "  <no Python frame>\n", []),
    "unknown file": (HEADER + '  File ???, line ??? in f\n  File "a", line 3 in ???\n', ["f", "???"]),
    "truncated": (HEADER + '  File "a", line 3 in f\n  ...\n', ["f"]),
    "free-threaded": (
        "<Cannot show all threads while the GIL is disabled>\n"
        'Stack (most recent call first):\n  File "a", line 3 in f\n',
        ["f"],
    ),
    "something else after it": (HEADER + '  File "a", line 3 in f\nModules:\n  File "b", line 4 in g\n', ["f"]),
    "C stack": (dump() + C_STACK, ["step", "<module>"]),
}


@pytest.mark.parametrize(("text", "main"), VERSIONS.values(), ids=VERSIONS)
def test_what_other_versions_of_python_write(text: str, main: list[str]) -> None:
    assert functions(parse_stacks(text, MAIN)) == main


def test_the_last_of_several_dumps_counts() -> None:
    threads = parse_stacks(dump("first") + dump("second") + dump("third"), MAIN)
    assert len(threads) == 2
    assert functions(threads) == ["third", "<module>"]


def test_a_torn_dump_is_no_dump() -> None:
    whole = dump("whole")
    for length in range(len(dump("torn")) - 1):
        found = functions(parse_stacks(whole + dump("torn")[:length], MAIN))
        assert found in (["whole", "<module>"], ["torn"], []), length
        # and the dump after it is read in any case
        assert functions(parse_stacks(dump("torn")[:length] + whole, MAIN)) == ["whole", "<module>"], length


@pytest.mark.parametrize("text", ["", "\n\n", "Segmentation fault\n", '  File "a", line 3 in f\n', "\x00\xff" * 50])
def test_a_text_without_stacks_gives_none(text: str) -> None:
    assert parse_stacks(text, MAIN) == []


def test_stacks_of_this_python(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w+b", buffering=0) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = parse_stacks(file.read().decode(), threading.main_thread().ident or 0)
    assert functions(threads)[0] == "test_stacks_of_this_python"


def test_the_stopwatch_around_a_wait_is_not_where_a_rank_is(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w+b", buffering=0) as file:

        def wait() -> None:
            faulthandler.dump_traceback(file, all_threads=False)

        CommWaitTimer()._timed(wait)()
        file.seek(0)
        text = file.read().decode()
    assert "in timed" in text
    found = functions(parse_stacks(text, threading.main_thread().ident or 0))
    assert found[:2] == ["wait", "test_the_stopwatch_around_a_wait_is_not_where_a_rank_is"]


def frames(*described: str) -> list[Frame]:
    """From ``function path:line``, innermost first."""
    found = []
    for each in described:
        function, where = each.split(" ")
        file, line = where.rsplit(":", 1)
        prefixes = {"torch": f"{SITE}/", "lightning": f"{SITE}/", "std": "", "numpy": f"{SITE}/", "me": "/home/"}
        top, rest = file.split("/", 1)
        path = f"{STDLIB}/{rest}" if top == "std" else f"{prefixes[top]}{file}"
        found.append(Frame(path, int(line), function))
    return found


TRAINER = (
    "advance lightning/pytorch/loops/training_epoch_loop.py:150",
    "main me/train.py:90",
    "<module> me/train.py:95",
)


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        (["nap me/train.py:41", "training_step me/train.py:12", *TRAINER], "nap (train.py:41)"),
        (
            ["fetch torch/utils/data/_utils/fetch.py:54", "training_step me/train.py:12", *TRAINER],
            "fetch (torch/utils/data/_utils/fetch.py:54) called from training_step (train.py:12)",
        ),
        (
            ["poll std/multiprocessing/connection.py:257", "_try_get_data torch/utils/data/dataloader.py:7", *TRAINER],
            "_try_get_data (torch/utils/data/dataloader.py:7) called from main (train.py:90)",
        ),
        (["wait std/threading.py:331", "go me/train.py:5"], "wait (threading.py:331) called from go (train.py:5)"),
        (["mean numpy/core/fromnumeric.py:3504", "go me/train.py:5"], "mean (numpy/core/fromnumeric.py:3504)"),
        (["barrier torch/distributed/distributed_c10d.py:53"], "barrier (torch/distributed/distributed_c10d.py:53)"),
        (
            ["wait std/threading.py:331", "_bootstrap std/multiprocessing/process.py:314", "start me/parent.py:7"],
            "wait (threading.py:331)",
        ),
        ([], ""),
    ],
)
def test_the_place_is_the_users(stack: list[str], where: str) -> None:
    assert place(frames(*stack)) == where


# -- the Flight Recorder -----------------------------------------------------------------------------------------------


def entry(op: str, sequence: int, group: str = "0", sizes: list[int] | None = None, **other: Any) -> dict[str, Any]:
    """As torch writes it; done unless said otherwise."""
    backend = op.split(":")[0]
    is_gloo = backend == "gloo"
    shapes = [] if op.endswith("barrier") and is_gloo else [sizes or [128]]
    description = "default_pg" if group == "0" else "undefined"
    return {
        "record_id": 0,
        "pg_id": int(group),
        "process_group": [group, description],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": op,
        "time_created_ns": 1795261495031803915,
        "input_sizes": shapes,
        "input_dtypes": ["Float"] * len(shapes),
        "output_sizes": shapes,
        "output_dtypes": ["Float"] * len(shapes),
        "state": "scheduled" if is_gloo else "completed",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": True,
        "timeout_ms": 1800000,
        "is_p2p": False,
        **other,
    }


PENDING: dict[str, Any] = {"state": "scheduled", "retired": False}
STARTED: dict[str, Any] = {"state": "started", "retired": False, "time_discovered_started_ns": 1795261495031803915}


def pending(op: str, sequence: int, group: str = "0", **other: Any) -> dict[str, Any]:
    return entry(op, sequence, group, **{**PENDING, **other})


def gloo(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "2.10",
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "2"}},
        "entries": list(entries),
    }


def nccl(*entries: dict[str, Any], world_size: int = 4, groups: dict[str, list[int]] | None = None) -> dict[str, Any]:
    members = {"0": list(range(world_size)), **(groups or {})}
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in members.items()}
    return {**gloo(*entries), "comm_lib_version": "2.27.5", "pg_config": config}


def test_gloo_says_only_by_retiring_that_an_operation_is_done() -> None:
    first, second = collectives(gloo(entry("gloo:all_reduce", 1), pending("gloo:barrier", 2, "1")))
    everything = ("gloo", "0", "default_pg", 1, "all_reduce", ((128,),), ("Float",), False, "done", None)
    assert first == Collective(*everything)  # type: ignore[arg-type]
    assert (first.name, second.name) == ("all_reduce #1 of default_pg", "barrier #2 of group '1'")
    assert (second.state, second.sizes) == ("running", ())


def test_nccl_says_when_an_operation_has_begun_only_where_starts_are_recorded() -> None:
    untimed = collectives(nccl(entry("nccl:all_reduce", 1), pending("nccl:all_reduce", 2)))
    assert [each.state for each in untimed] == ["done", "running"]
    started = entry("nccl:all_reduce", 2, **STARTED)
    timed = collectives(nccl(entry("nccl:all_reduce", 1), started, pending("nccl:all_reduce", 3)))
    assert [each.state for each in timed] == ["done", "running", "queued"]
    assert timed[0].members == (0, 1, 2, 3)


def test_an_operation_of_nccl_that_timed_out_is_not_done() -> None:
    (record,) = collectives(nccl(entry("nccl:all_reduce", 1, **{**STARTED, "retired": True})))
    assert record.state == "running"


def test_peers_are_global_ranks() -> None:
    exchange = {"is_p2p": True, "p2p_seq_id": 7, "collective_seq_id": 3}
    dumped = nccl(entry("nccl:send 0->1", 0, "5", **exchange), groups={"5": [2, 6]})
    (record,) = collectives(dumped)
    assert (record.op, record.sequence, record.is_p2p, record.peers) == ("send", 7, True, (6,))


def test_a_coalesced_operation_stands_for_its_parts() -> None:
    exchange = {"is_p2p": True, "p2p_seq_id": 7, "collective_seq_id": 3}
    parts = [entry(f"nccl:{op}", 3, **{**exchange, **PENDING}) for op in ("send 0->1", "recv 0<-3")]
    done = {**exchange, "input_sizes": [], "output_sizes": []}
    (record,) = collectives(nccl(*parts, entry("nccl:coalesced", 3, **done)))
    assert (record.op, record.state, record.peers) == ("coalesced", "done", (1, 3))


@pytest.mark.parametrize("key", list(entry("nccl:all_reduce", 1)))
def test_a_foreign_value_never_raises(key: str) -> None:
    for value in (None, 3, "x", [], {}, [[]], {"a": 1}, "nccl:", [1, 2, 3], True):
        collectives(nccl({**entry("nccl:all_reduce", 1), key: value}, entry("nccl:all_reduce", 2)))
    without = {name: each for name, each in entry("nccl:all_reduce", 1).items() if name != key}
    assert collectives(nccl(without, entry("nccl:all_reduce", 2)))[-1].sequence == 2


@pytest.mark.parametrize(
    "dumped",
    [
        None,
        [],
        {},
        {"entries": None},
        {"entries": [None, 3, [], "x"]},
        {"entries": [], "pg_config": []},
        {
            "entries": [entry("nccl:all_reduce", 1)],
            "pg_config": {"0": {"ranks": "[0, x"}, "1": None, "2": {"ranks": 5}},
        },
    ],
)
def test_a_foreign_dump_never_raises(dumped: Any) -> None:
    assert all(each.members is None for each in collectives(dumped))


# -- the verdict, from evidence made by hand ---------------------------------------------------------------------------

COMPUTING = frames("training_step me/train.py:41", *TRAINER)
BACKWARD = frames("_engine_run_backward torch/autograd/graph.py:829", *TRAINER)


def process(rank: int, stack: list[Frame], **options: Any) -> ProcessEvidence:
    threads = [Thread(MAIN, True, stack)] if stack else []
    return ProcessEvidence(**{"pid": 4000 + rank, "state": "sleeping", "watched_s": 1.0, "threads": threads, **options})


def evidence(
    rank: int, collectives: dict[str, Any] | None = None, stack: list[Frame] | None = None, **options: Any
) -> RankEvidence:
    of_process = {key: options.pop(key) for key in list(options) if key in ProcessEvidence.__dataclass_fields__}
    about: dict[str, Any] = {
        "node": f"node-{rank // 2}",
        "process": process(rank, BACKWARD if stack is None else stack, **of_process),
        "section": "step",
        "step": 23,
        "position": (23, 1, 0, 0),
        "seconds": 6.0,
        "timeout": 5.0,
        "answers": True,
        "python_answers": True,
        "collectives": collectives,
    }
    return RankEvidence(rank=rank, **{**about, **options})


WAITING = gloo(entry("gloo:all_reduce", 56), pending("gloo:all_reduce", 57))
BEFORE = gloo(entry("gloo:all_reduce", 56))


def among(*, world_size: int = 4, **others: RankEvidence | None) -> Verdict:
    """Ranks that wait in all_reduce #57, and others instead of some of them (``r1=...``)."""
    given = {int(name[1:]): each for name, each in others.items()}
    ranks = [given.get(rank, evidence(rank, WAITING)) for rank in range(world_size)]
    return diagnose([each for each in ranks if each is not None], world_size)


def the_culprit(verdict: Verdict) -> Finding:
    assert len(verdict.culprits) == 1, verdict.line
    return verdict.culprits[0]


def worker(pid: int, *stack: str, state: str = "sleeping") -> ProcessEvidence:
    loop = ("_worker_loop torch/utils/data/_utils/worker.py:349", "_bootstrap std/multiprocessing/process.py:314")
    return ProcessEvidence(pid, state, threads=[Thread(MAIN, True, frames(*stack, *loop, *TRAINER))])


IDLE = worker(1233, "poll std/multiprocessing/connection.py:257", "get std/multiprocessing/queues.py:113")
READING = ("__getitem__ me/data.py:20", "fetch torch/utils/data/_utils/fetch.py:54")
LOADING = frames(
    "poll std/multiprocessing/connection.py:257", "_try_get_data torch/utils/data/dataloader.py:1275", *TRAINER
)
CONSOLE = frames("raw_input std/code.py:310", "interact std/code.py:240", "training_step me/train.py:41", *TRAINER)
PDB = frames("_cmdloop std/pdb.py:396", "user_line std/bdb.py:50", "training_step me/train.py:41", *TRAINER)
HERE = "training_step (train.py:41)"


def stuck(rank: int = 1, stack: list[Frame] = COMPUTING, **options: Any) -> RankEvidence:
    return evidence(rank, BEFORE, stack, **options)


def saving(**options: Any) -> RankEvidence:
    return stuck(stack=frames("save me/io.py:9"), section="checkpointing", **options)


def loading(*workers: ProcessEvidence) -> RankEvidence:
    return stuck(stack=LOADING, workers=list(workers))


WRITING = 210_000_000
KINDS: list[tuple[RankEvidence | None, str, str]] = [
    (evidence(1, state="gone", stack=[]), "dead", "dead"),
    (evidence(1, state="stopped", stack=[], answers=False), "stopped", "stopped (SIGSTOP)"),
    (stuck(state="uninterruptible"), "uninterruptible", f"uninterruptible in {HERE}"),
    (evidence(1, state="traced", stack=[]), "debugged", "held by a debugger"),
    (stuck(stack=PDB), "debugged", f"held by a debugger in _cmdloop (pdb.py:396) called from {HERE}"),
    (stuck(stack=CONSOLE), "debugged", f"waiting for a person in raw_input (code.py:310) called from {HERE}"),
    (stuck(python_answers=False), "gil_held", f"holds the interpreter lock in {HERE}"),
    (stuck(), "stuck", f"stuck in {HERE}"),
    (stuck(cpu_s=0.98), "stuck", f"stuck in {HERE}, busy on the CPU"),
    (stuck(state="running"), "stuck", f"stuck in {HERE}, busy on the CPU"),
    (stuck(written_bytes=WRITING), "stuck", f"stuck in {HERE}, writing 210 MB/s"),
    (stuck(children_cpu_s=0.98), "stuck", f"stuck in {HERE}, while one of its child processes is busy on the CPU"),
    (stuck(stack=[]), "stuck", "stuck in an unknown place: it left no stack"),
    (saving(written_bytes=WRITING), "slow_checkpoint", "in a slow checkpoint, writing 210 MB/s in save (io.py:9)"),
    (
        saving(written_bytes=WRITING, state="uninterruptible"),
        "slow_checkpoint",
        "in a slow checkpoint, writing 210 MB/s",
    ),
    (saving(written_bytes=2000), "stuck", "stuck in save (io.py:9)"),
    (loading(IDLE, worker(1234, *READING)), "data_loader", "data loader: worker 1234 in __getitem__ (data.py:20)"),
    (loading(IDLE, worker(1234, state="stopped")), "data_loader", "data loader: worker 1234 is stopped"),
    (loading(IDLE), "data_loader", "data loader: none of its workers (1233) shows any activity"),
    (stuck(stack=frames(*READING, *TRAINER)), "data_loader", "stuck in its data loader: __getitem__ (data.py:20)"),
    (evidence(1, section="left", state="gone", stack=[]), "left", "has left the fit, and its process has ended"),
    (stuck(section="left"), "left", "has left the fit"),
    (None, "unknown", "silent: no evidence was found"),
]


@pytest.mark.parametrize(
    ("rank", "kind", "text"), KINDS, ids=[f"{number}-{each[1]}" for number, each in enumerate(KINDS)]
)
def test_every_kind(rank: RankEvidence | None, kind: str, text: str) -> None:
    verdict = among(r1=rank)
    culprit = the_culprit(verdict)
    assert (culprit.rank, culprit.kind) == (1, kind)
    assert text in culprit.text
    assert culprit.is_busy == verdict.is_busy == (kind == "stuck" and ("busy" in text or "writing" in text))
    assert [(victim.rank, victim.kind) for victim in verdict.victims] == [
        (0, "waiting"),
        (2, "waiting"),
        (3, "waiting"),
    ]
    assert {victim.text for victim in verdict.victims} == {"waiting for rank 1 in all_reduce #57 of default_pg"}
    assert verdict.line.endswith("; ranks 0, 2 and 3 wait for it in all_reduce #57 of default_pg")
    assert verdict.is_hang == (kind not in ("debugged", "slow_checkpoint"))


def test_the_sentence() -> None:
    verdict = among(r1=evidence(1, state="stopped", stack=[], node="node-3"))
    assert verdict.line == (
        "rank 1 (node-3, pid 4001) is stopped (SIGSTOP) at step 23; "
        "ranks 0, 2 and 3 wait for it in all_reduce #57 of default_pg"
    )


def test_a_verdict_survives_its_file() -> None:
    verdict = among(r1=stuck(), r3=None)
    content = json.loads(json.dumps(verdict.to_json()))
    assert Verdict.from_json(content) == verdict
    assert content["line"] == verdict.line
    for foreign in ([], {}, *({"culprits": culprits, "victims": []} for culprits in (None, [3], [{}], [{"rank": 1}]))):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Verdict.from_json(foreign)  # type: ignore[arg-type]


def test_a_single_rank_is_to_blame_itself() -> None:
    verdict = diagnose([evidence(0, BEFORE, stack=COMPUTING)], 1)
    assert verdict.line == "rank 0 (node-0, pid 4000) is stuck in training_step (train.py:41) at step 23"


def test_a_stopped_rank_is_to_blame_even_if_another_is_slow() -> None:
    verdict = among(r1=stuck(), r2=evidence(2, state="stopped", stack=[]))
    assert the_culprit(verdict).rank == 2


def test_of_those_that_are_missing_the_ones_in_time_are_not_to_blame() -> None:
    verdict = among(r1=stuck(seconds=2.0), r2=stuck(2))
    assert the_culprit(verdict).rank == 2


def test_what_is_known_outweighs_what_is_not() -> None:
    verdict = among(r1=stuck(), r2=evidence(2, None), r3=None)
    assert the_culprit(verdict).rank == 1


def test_a_rank_that_has_left_shares_the_blame() -> None:
    verdict = among(r1=evidence(1, None, section="left", timeout=float("inf")), r2=stuck(2))
    assert [(culprit.rank, culprit.kind) for culprit in verdict.culprits] == [(1, "left"), (2, "stuck")]
    assert "; ranks 0 and 3 wait for them in all_reduce #57" in verdict.line


def test_a_lock_held_in_a_collective_is_no_crime() -> None:
    verdict = among(r1=stuck(), r2=evidence(2, WAITING, python_answers=False))
    assert the_culprit(verdict).rank == 1
    assert {victim.kind for victim in verdict.victims} == {"waiting"}


def test_the_thread_that_holds_the_lock_need_not_be_the_main_one() -> None:
    main = Thread(MAIN, True, frames("wait std/threading.py:331", "join me/train.py:8"))
    other = Thread(OTHER, False, frames("parse me/parser.py:12", "run std/threading.py:982"))
    verdict = among(r1=evidence(1, BEFORE, threads=[other, main], python_answers=False))
    assert the_culprit(verdict).text == "holds the interpreter lock in parse (parser.py:12)"


def test_who_waits_for_a_waiting_rank_is_followed_to_the_end() -> None:
    # Rank 1 is stuck; 0 waits for it in their pair; 2 and 3 wait for both in the default group.
    pair = gloo(entry("gloo:all_reduce", 56), entry("gloo:barrier", 4, "1"), pending("gloo:barrier", 5, "1"))
    behind = gloo(entry("gloo:all_reduce", 56), entry("gloo:barrier", 4, "1"))
    verdict = among(r0=evidence(0, pair), r1=evidence(1, behind, stack=COMPUTING))
    assert the_culprit(verdict).rank == 1
    assert "; ranks 2 and 3 wait for ranks 0 and 1 in all_reduce #57 of default_pg" in verdict.line
    assert "; rank 0 waits for it in barrier #5 of group '1'" in verdict.line


def test_gloo_does_not_say_who_is_in_a_group_that_nobody_has_used_yet() -> None:
    waits = gloo(entry("gloo:all_reduce", 56), pending("gloo:barrier", 1, "1"))
    verdict = among(r0=evidence(0, waits), r1=stuck())
    assert the_culprit(verdict).rank == 1


TOGETHER = (entry("gloo:all_reduce", 57), entry("gloo:all_reduce", 2, "1"))
IN_GROUP = gloo(*TOGETHER, pending("gloo:all_reduce", 3, "1"))
AHEAD = gloo(*TOGETHER, pending("gloo:all_reduce", 58))


def all_but(odd: int, content: dict[str, Any], others: dict[str, Any]) -> list[RankEvidence]:
    return [evidence(rank, content if rank == odd else others) for rank in range(4)]


def test_a_rank_that_left_a_collective_out() -> None:
    verdict = diagnose(all_but(1, AHEAD, IN_GROUP), 4)
    culprit = the_culprit(verdict)
    assert (culprit.rank, culprit.kind) == (1, "waiting")
    assert culprit.text == (
        "has moved on to all_reduce #58 of default_pg without entering all_reduce #3 of group '1', where ranks 0, 2 "
        "and 3 wait for it"
    )
    assert verdict.line.count("group '1'") == 1


def test_the_ranks_that_wait_for_a_circle_have_no_say_in_it() -> None:
    # Rank 6 left out a collective of its group of four: the other three are waited for by all the world.
    def of(rank: int) -> dict[str, Any]:
        groups = {"1": [0, 1, 2, 3], "2": [4, 5, 6, 7]}
        done = [entry("nccl:all_reduce", 57)] + [entry("nccl:all_gather", 8, "2")] * (4 <= rank < 8)
        in_group = rank in (4, 5, 7)
        last = pending("nccl:all_gather", 9, "2") if in_group else pending("nccl:all_reduce", 58)
        return nccl(*done, last, world_size=16, groups=groups)

    verdict = diagnose([evidence(rank, of(rank)) for rank in range(16)], 16)
    assert the_culprit(verdict).rank == 6
    assert "without entering all_gather #9 of group '2', where ranks 4, 5 and 7 wait for it" in verdict.line


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    verdict = diagnose([evidence(0, IN_GROUP), evidence(1, AHEAD)], 2)
    assert [culprit.text for culprit in verdict.culprits] == [
        "waiting for rank 1 in all_reduce #3 of group '1'",
        "waiting for rank 0 in all_reduce #58 of default_pg",
    ]
    assert verdict.is_hang


def test_a_rank_that_called_something_else() -> None:
    before = entry("gloo:all_reduce", 11)
    others = gloo(before, pending("gloo:all_reduce", 12))
    odd = gloo(before, entry("gloo:broadcast", 12, sizes=[4]), pending("gloo:all_reduce", 13))
    culprit = the_culprit(diagnose(all_but(3, odd, others), 4))
    assert (culprit.rank, culprit.kind) == (3, "mismatch")
    assert culprit.text == "called broadcast [4] as #12 of default_pg, where ranks 0-2 called all_reduce [128]"


@pytest.mark.parametrize(
    ("mine", "called", "theirs"),
    [
        ({"sizes": [64]}, "all_reduce [64]", "all_reduce [128]"),
        ({"input_dtypes": ["Half"]}, "all_reduce [128] Half", "all_reduce [128] Float"),
    ],
)
def test_a_rank_that_called_the_same_with_something_else(mine: dict[str, Any], called: str, theirs: str) -> None:
    odd = nccl(pending("nccl:all_reduce", 12, **mine))
    culprit = the_culprit(diagnose(all_but(3, odd, nccl(pending("nccl:all_reduce", 12))), 4))
    assert culprit.text == f"called {called} as #12 of default_pg, where ranks 0-2 called {theirs}"


def test_shapes_that_may_differ_between_ranks_are_no_mismatch() -> None:
    uneven = [evidence(rank, nccl(pending("nccl:all_to_all", 12, sizes=[rank + 1]))) for rank in range(4)]
    flat, square = (nccl(pending("nccl:all_reduce", 12, sizes=sizes)) for sizes in ([16], [4, 4]))
    for ranks in (uneven, all_but(2, square, flat)):
        assert {culprit.kind for culprit in diagnose(ranks, 4).culprits} == {"unfinished"}


def test_a_mismatch_explains_a_circle() -> None:
    # Rank 3 has called one more than the others, which its peers took for their own.
    extra = gloo(entry("gloo:all_reduce", 56, sizes=[7]), *AHEAD["entries"])
    others = gloo(entry("gloo:all_reduce", 56), *IN_GROUP["entries"])
    culprit = the_culprit(diagnose(all_but(3, extra, others), 4))
    assert (culprit.rank, culprit.kind) == (3, "mismatch")
    assert culprit.text.startswith(
        "called all_reduce [7] as #56 of default_pg, where ranks 0-2 called all_reduce [128]"
    )


def test_half_and_half_are_all_named() -> None:
    calls = [nccl(pending(op, 12)) for op in ("nccl:all_reduce", "nccl:all_reduce", "nccl:barrier", "nccl:barrier")]
    verdict = diagnose([evidence(rank, calls[rank]) for rank in range(4)], 4)
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1, 2, 3]
    assert "ranks 0 and 1 called all_reduce [128] as #12 of default_pg, where ranks 2 and 3 called" in verdict.line


def test_a_collective_that_all_have_entered_and_that_does_not_finish() -> None:
    verdict = diagnose([evidence(rank, nccl(pending("nccl:all_reduce", 57))) for rank in range(4)], 4)
    assert verdict.line == (
        "ranks 0-3 are in all_reduce #57 of default_pg, which all its ranks have entered and which does not finish: "
        "network or device, at step 23"
    )


def test_the_main_thread_may_run_ahead_of_the_device() -> None:
    # Rank 1 never called #57; the others have called #57 and #58 and are somewhere in their own code.
    ahead = nccl(entry("nccl:all_reduce", 56), *(pending("nccl:all_reduce", n) for n in (57, 58)))
    ranks = [evidence(rank, ahead, stack=COMPUTING) for rank in range(4)]
    ranks[1] = evidence(1, nccl(entry("nccl:all_reduce", 56)), stack=frames("item me/loss.py:3"))
    verdict = diagnose(ranks, 4)
    assert the_culprit(verdict).text == "stuck in item (loss.py:3)"
    assert {victim.waits_in for victim in verdict.victims} == {"all_reduce #57 of default_pg"}


def test_the_device_counts_not_how_far_the_main_thread_has_run_ahead() -> None:
    # All have called #57, which does not finish; that rank 1 waits for its result before it calls #58 is no fault.
    ahead = nccl(pending("nccl:all_reduce", 57), pending("nccl:all_reduce", 58))
    verdict = diagnose(all_but(1, nccl(pending("nccl:all_reduce", 57)), ahead), 4)
    assert [culprit.kind for culprit in verdict.culprits] == ["unfinished"] * 4
    assert "ranks 0-3 are in all_reduce #57 of default_pg" in verdict.line


def test_a_device_that_has_not_begun_what_the_others_run() -> None:
    done = entry("nccl:all_reduce", 56, time_discovered_started_ns=5)
    queued, running = pending("nccl:all_reduce", 57), entry("nccl:all_reduce", 57, **STARTED)
    verdict = diagnose(all_but(2, nccl(done, queued), nccl(done, running)), 4)
    assert the_culprit(verdict).text.startswith(
        "stuck on its device, which has not begun all_reduce #57 of default_pg although it runs on ranks 0, 1 and 3"
    )
    assert [victim.waits_for for victim in verdict.victims] == [(2,)] * 3


def test_a_device_that_does_not_finish_what_the_others_have() -> None:
    others = nccl(entry("nccl:all_reduce", 56), pending("nccl:all_reduce", 57))
    late = nccl(pending("nccl:all_reduce", 56), pending("nccl:all_reduce", 57))
    verdict = diagnose(all_but(2, late, others), 4)
    culprit = the_culprit(verdict)
    assert (culprit.rank, culprit.kind) == (2, "unfinished")
    assert "which ranks 0, 1 and 3 have finished: its network or device" in culprit.text


def test_an_operation_of_gloo_that_one_rank_does_not_finish() -> None:
    late = gloo(pending("gloo:all_reduce", 50), pending("gloo:all_reduce", 57))
    culprit = the_culprit(diagnose(all_but(2, late, gloo(entry("gloo:all_reduce", 50), *WAITING["entries"])), 4))
    assert (culprit.rank, culprit.kind) == (2, "unfinished")
    assert culprit.text.startswith("in all_reduce #50 of default_pg, which ranks 0, 1 and 3 have finished")


def test_groups_may_have_the_same_name() -> None:
    def of(rank: int) -> dict[str, Any]:
        members = {"1": [0, 1] if rank < 2 else [2, 3]}
        last = [pending("nccl:all_gather", 5, "1")] if rank < 2 else [pending("nccl:all_reduce", 57)]
        return nccl(entry("nccl:all_reduce", 56), entry("nccl:all_gather", 3, "1"), *last, groups=members)

    verdict = diagnose([evidence(rank, of(rank)) for rank in range(4)], 4)
    assert [(culprit.rank, culprit.kind) for culprit in verdict.culprits] == [(0, "unfinished"), (1, "unfinished")]
    assert "ranks 0 and 1 are in all_gather #5 of group '1'" in verdict.line


def test_a_message_that_nobody_sends() -> None:
    receive = pending("nccl:recv 0<-2", 0, is_p2p=True, p2p_seq_id=3)
    ranks = [evidence(rank, nccl(pending("nccl:all_reduce", 57))) for rank in range(4)]
    ranks[0] = evidence(0, nccl(entry("nccl:all_reduce", 56), receive))
    ranks[2] = evidence(2, nccl(entry("nccl:all_reduce", 56)), stack=COMPUTING)
    verdict = diagnose(ranks, 4)
    assert the_culprit(verdict).rank == 2
    assert "rank 0 waits for it in recv #3 of default_pg" in verdict.line


def test_both_backends_of_a_group_count_on_their_own() -> None:
    both = nccl(entry("gloo:barrier", 2), entry("nccl:all_reduce", 56), pending("nccl:all_reduce", 57))
    behind = nccl(entry("gloo:barrier", 90), entry("nccl:all_reduce", 56))
    verdict = diagnose(all_but(1, behind, both), 4)
    assert the_culprit(verdict).rank == 1


AGREEMENT = f"{SITE}/lightning_resilience/agreement.py"
AGREEING = [*frames("wait std/threading.py:331"), Frame(AGREEMENT, 640, "_wait"), Frame(AGREEMENT, 600, "boundary")]
RECEIVING = frames(
    "wait std/threading.py:331",
    "wrapper torch/distributed/c10d_logger.py:83",
    "recv torch/distributed/distributed_c10d.py:2799",
    *TRAINER,
)


def test_without_a_flight_recorder_the_boundaries_tell() -> None:
    ranks = [evidence(rank, stack=[*AGREEING, *COMPUTING], position=(24, 1, 0, 0)) for rank in range(5)]
    ranks[3] = evidence(3, stack=COMPUTING)
    ranks[4] = evidence(4, stack=COMPUTING, position=(24, 1, 0, 0))
    verdict = diagnose(ranks, 5)
    assert the_culprit(verdict).rank == 3
    assert "ranks 0-2 wait for it in boundary (lightning_resilience/agreement.py:600)" in verdict.line


def test_without_boundaries_the_stacks_tell() -> None:
    ranks = [evidence(rank, stack=RECEIVING) for rank in range(4)]
    ranks[3] = evidence(3, stack=COMPUTING)
    assert the_culprit(diagnose(ranks, 4)).rank == 3
    assert the_culprit(diagnose(ranks[:3], 4)).kind == "unknown"
    everyone = diagnose(ranks[:3], 3)
    assert [culprit.kind for culprit in everyone.culprits] == ["stuck"] * 3


def test_who_is_furthest_behind_is_named_if_nothing_else_is_known() -> None:
    ranks = [evidence(rank, stack=COMPUTING, position=(24, 1, 0, 0)) for rank in range(3)]
    ranks[2] = replace(ranks[2], position=(23, 1, 0, 0))
    assert the_culprit(diagnose(ranks, 3)).rank == 2


def test_nothing_at_all() -> None:
    verdict = diagnose([], 2)
    assert verdict.line == "ranks 0 and 1 are silent: no evidence was found"
    assert Verdict([], []).line == "no evidence came from any rank"


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([76], "ranks 0-511 except 76"),
        ([0], "ranks 1-511"),
        ([2, 400], "ranks 0-511 except 2 and 400"),
        (range(256), "ranks 256-511"),
        (range(0, 512, 2), "ranks 1, 3, 5, 7, 9, 11 and others, 256 in all"),
    ],
)
def test_many_ranks_are_named_briefly(missing: list[int], text: str) -> None:
    ranks = [evidence(rank, BEFORE if rank in missing else WAITING) for rank in range(512)]
    assert f"; {text} wait for" in diagnose(ranks, 512).line


@pytest.mark.slow
def test_thousands_of_ranks() -> None:
    # 256 groups of 8, each one waiting: rank 1234 is stuck, its group waits for it, and all others for the group.
    world_size, stuck = 2048, 1234

    def of(rank: int) -> dict[str, Any]:
        group = f"{1 + rank // 8}"
        history = [entry("nccl:all_reduce", number) for number in range(20)]
        last = [pending("nccl:all_reduce", 20)]
        if rank // 8 == stuck // 8:
            last = [] if rank == stuck else [pending("nccl:all_gather", 1, group)]
        members = list(range(rank // 8 * 8, rank // 8 * 8 + 8))
        return nccl(*history, entry("nccl:all_gather", 0, group), *last, world_size=world_size, groups={group: members})

    verdict = diagnose([evidence(rank, of(rank)) for rank in range(world_size)], world_size)
    assert the_culprit(verdict).rank == stuck
    assert len(verdict.victims) == world_size - 1


# -- the verdict, from real ranks --------------------------------------------------------------------------------------

Scenario = Callable[[int, Callable[[], None]], None]
"""What a rank does; it says when it comes to the place at which the ranks get stuck."""

STACKS_SIGNAL = signal.SIGRTMIN + 9
STATES = {"R": "running", "T": "stopped", "D": "uninterruptible", "Z": "gone"}


def sleep_before_the_gradients_are_reduced(rank: int, arrive: Callable[[], None]) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        loss = model(torch.ones(1, 3)).sum()
        if step == 2:
            arrive()
            if rank == 2:
                time.sleep(600)
        loss.backward()


def leave_out_a_collective(rank: int, arrive: Callable[[], None]) -> None:
    group = dist.new_group(range(4))
    for step in range(3):
        if step == 2:
            arrive()
        if not (step == 2 and rank == 3):
            dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(5))


def miss_a_barrier(rank: int, arrive: Callable[[], None]) -> None:
    dist.all_reduce(torch.ones(5))
    arrive()
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def send_nothing(rank: int, arrive: Callable[[], None]) -> None:
    dist.all_reduce(torch.ones(5))
    arrive()
    if rank == 3:
        time.sleep(600)
    if rank == 0:
        dist.recv(torch.ones(2), 3)
    dist.barrier()


def call_something_else(rank: int, arrive: Callable[[], None]) -> None:
    dist.all_reduce(torch.ones(5))
    arrive()
    if rank == 2:
        dist.broadcast(torch.ones(4), 2)
    else:
        dist.all_reduce(torch.ones(128))
    dist.barrier()


def join(rank: int, directory: Path, scenario: Scenario) -> None:
    """One rank: says where it is every moment, until it is killed."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    with open(directory / f"{rank}.log", "wb", buffering=0) as log:
        os.dup2(log.fileno(), 2)
    file = open(directory / f"{rank}.stacks", "ab", buffering=0)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4)

    def report() -> None:
        while True:
            draft = directory / f"{rank}.draft"
            draft.write_bytes(_dump_fr_trace_json(True, False))
            draft.rename(directory / f"{rank}.json")
            time.sleep(0.1)

    threading.Thread(target=report, daemon=True).start()
    try:
        scenario(rank, (directory / f"{rank}.arrived").touch)
    except RuntimeError:  # gloo may notice that the others do something else
        pass
    time.sleep(600)


@pytest.fixture
def ranks_in(tmp_path: Path) -> Iterator[Callable[[Scenario], list[RankEvidence]]]:
    processes: list[BaseProcess] = []

    def start(scenario: Scenario) -> list[RankEvidence]:
        for rank in range(4):
            processes.append(CONTEXT.Process(target=join, args=(rank, tmp_path, scenario)))
            processes[-1].start()
        wait_until_nothing_moves(tmp_path)
        return [examine(rank, process.pid or 0, tmp_path) for rank, process in enumerate(processes)]

    yield start
    for each in processes:
        each.kill()
        each.join()


def wait_until_nothing_moves(directory: Path) -> None:
    deadline, before, same = time.monotonic() + 60, [b""], 0
    while same < 6 and time.monotonic() < deadline:
        time.sleep(0.1)
        now = [path.read_bytes() for path in sorted(directory.glob("*.json"))]
        moves = len(list(directory.glob("*.arrived"))) < 4 or now != before
        before, same = now, 0 if moves else same + 1
    assert same == 6, "".join(path.read_text() for path in directory.glob("*.log"))


def examine(rank: int, pid: int, directory: Path) -> RankEvidence:
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    file = directory / f"{rank}.stacks"
    threads: list[Thread] = []
    if state != "T":
        os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + 30
        while not any(thread.is_main for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.05)
            text = file.read_text()
            # The main thread is the one that ran the handler.
            idents = [line.split()[2] for line in text.splitlines() if line.startswith("Current thread")]
            threads = parse_stacks(text, int(idents[-1], 16)) if idents else []
    return RankEvidence(
        rank=rank,
        node="here",
        process=ProcessEvidence(pid, STATES.get(state, "sleeping"), threads=threads),
        section="step",
        step=2,
        position=(2, 1, 0, 0),
        seconds=6.0,
        timeout=5.0,
        answers=True,
        python_answers=True,
        collectives=json.loads((directory / f"{rank}.json").read_bytes()),
    )


SCENARIOS: list[tuple[Scenario, int, str, str]] = [
    (sleep_before_the_gradients_are_reduced, 2, "stuck", "stuck in sleep_before_the_gradients_are_reduced (test_hangs"),
    (
        leave_out_a_collective,
        3,
        "waiting",
        "has moved on to all_reduce #3 of default_pg without entering all_reduce #3 of group '1', where ranks 0-2 wait",
    ),
    (miss_a_barrier, 1, "stuck", "stuck in miss_a_barrier (test_hangs_verdict.py:"),
    (send_nothing, 3, "stuck", "stuck in send_nothing (test_hangs_verdict.py:"),
    (
        call_something_else,
        2,
        "mismatch",
        "called broadcast [4] as #2 of default_pg, where ranks 0, 1 and 3 called all_reduce [128]",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "culprit", "kind", "text"), SCENARIOS, ids=[each[0].__name__ for each in SCENARIOS]
)
def test_real_ranks(
    ranks_in: Callable[[Scenario], list[RankEvidence]],
    scenario: Scenario,
    culprit: int,
    kind: str,
    text: str,
) -> None:
    verdict = diagnose(ranks_in(scenario), 4)
    found = the_culprit(verdict)
    assert (found.rank, found.kind) == (culprit, kind), verdict.line
    assert text in found.text
    assert [victim.rank for victim in verdict.victims] == [rank for rank in range(4) if rank != culprit]
