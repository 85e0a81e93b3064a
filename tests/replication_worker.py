"""One rank of a job whose ranks give their parts to each other, for the tests of the replicas with real processes.

Ranks 0 and 1 are one node, 2 and 3 the other; each scenario is a function that returns what the test looks at.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_resilience.checkpoint import replication as module
from lightning_resilience.checkpoint.generations import Transfer
from lightning_resilience.checkpoint.replication import ReplicaError, Replicas, cliques, fetch
from tests.agreement_worker import shared_store

WORLD_SIZE = 4
PATIENT, SHORT = timedelta(seconds=30), timedelta(seconds=1.5)
PIECE = 4096
SIZES = [0, 1, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5, 20 * PIECE]

SCENARIOS: dict[str, Callable[[int], Any]] = {}

directory = Path()
kept: list[Any] = []  # what is merely forgotten would close its connections as well


def scenario(function: Callable[[int], Any]) -> Callable[[int], Any]:
    SCENARIOS[function.__name__] = function
    return function


def content(rank: int, number: int, size: int) -> torch.Tensor:
    """What a rank's part of some generation is; anybody can tell."""
    return torch.frombuffer(bytearray(random.Random(f"{rank}/{number}").randbytes(size + 1)), dtype=torch.uint8)[:size]


def reserve(_: Any, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes + 3,), 0xEE, dtype=torch.uint8)


def make(rank: int, clique: list[int] | None = None, timeout: timedelta = PATIENT) -> Replicas:
    clique = clique or next(
        each for each in cliques([f"node {each // 2}" for each in range(WORLD_SIZE)], 2, 2) if rank in each
    )
    replicas = Replicas(rank, clique, "test/replicas", timeout)
    kept.append(replicas)
    return replicas


def attempt(replicas: Replicas, generation: str, part: torch.Tensor | None, trailer: bytes = b"", **kwargs: Any) -> Any:
    """The ranks from which parts came, each checked, and what the exchange says."""
    error = None
    try:
        received = replicas.exchange(generation, part, trailer, kwargs.get("reserve", reserve))
    except ReplicaError as raised:
        received, error = raised.received, str(raised)
    number, size = int(generation[1:]), kwargs.get("size", 0 if part is None else part.numel())
    for peer, memory in received.items():
        expected = torch.cat([content(peer, number, size), module._as_tensor(trailer)])
        assert torch.equal(memory, expected), f"rank {peer}"
    return {"from": sorted(received), "error": error, "broken": replicas.broken}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def await_file(name: str) -> None:
    while not (directory / name).exists():
        time.sleep(0.01)


@scenario
def round_trips(rank: int) -> Any:
    """Exchanges in a thread, all_reduces in the main thread."""
    module._CHUNK = PIECE
    replicas = make(rank)
    jobs = [(f"g{number}", size, trailer) for number, size in enumerate(SIZES) for trailer in (b"", b"x", b"y" * 9000)]
    results: list[Any] = []

    def run() -> None:
        for generation, size, trailer in jobs:
            results.append(attempt(replicas, generation, content(rank, int(generation[1:]), size), trailer))

    thread = threading.Thread(target=run)
    thread.start()
    steps = 0
    finished = torch.zeros(1)
    while not finished.item():
        values = torch.full((50_000,), float(rank + steps))
        dist.all_reduce(values)
        assert (values == 6 + 4 * steps).all()
        steps += 1
        finished = torch.tensor([float(not thread.is_alive())])
        dist.all_reduce(finished, dist.ReduceOp.MIN)
    thread.join()
    replicas.close()
    return results


@scenario
def all_in_one_clique(rank: int) -> Any:
    """Parts of different sizes, some with nothing; the memory is the same in every exchange."""
    module._CHUNK = PIECE
    replicas = make(rank, [0, 1, 2, 3])
    memories: dict[int, torch.Tensor] = {}
    one_at_a_time = threading.Lock()

    def reuse(peer: int, nbytes: int) -> torch.Tensor:
        assert nbytes == size(peer)
        assert one_at_a_time.acquire(blocking=False)
        time.sleep(0.01)
        one_at_a_time.release()
        return memories.setdefault(peer, torch.zeros(100 * PIECE, dtype=torch.uint8))

    def size(peer: int) -> int:
        return (peer + 1) * number * 1500

    results = []
    for number in range(6):
        part = None if number % 4 == rank else content(rank, number, size(rank))
        received = replicas.exchange(f"g{number}", part, b"", reuse)
        for peer, memory in received.items():
            assert torch.equal(memory, content(peer, number, size(peer)))
            assert memory.data_ptr() == memories[peer][: memory.numel()].data_ptr()
        results.append(sorted(received))
    return results


@scenario
def large(rank: int) -> Any:
    """More than a piece of the real size, to one partner."""
    if rank % 2:
        return True
    size = module._CHUNK + 12345
    replicas = make(rank)
    data = torch.arange(size + 8, dtype=torch.int64).to(torch.uint8)[rank : rank + size]
    (received,) = replicas.exchange("g1", data, b"tail", reserve).values()
    expected = torch.arange(size + 8, dtype=torch.int64).to(torch.uint8)[(rank + 2) % 4 :][:size]
    return bool(torch.equal(received[:size], expected)) and received[size:].numpy().tobytes() == b"tail"


@scenario
def nothing_to_give(rank: int) -> Any:
    replicas = make(rank)
    return [
        attempt(replicas, "g0", None if rank < 2 else content(rank, 0, 10), size=10),
        attempt(replicas, "g1", None),
        attempt(replicas, "g2", content(rank, 2, 10)),
    ]


@scenario
def dies_with_the_part_in_flight(rank: int) -> Any:
    module._CHUNK = PIECE
    if rank == 1:
        return None
    replicas = make(rank, [0, 2, 3], SHORT * 4)
    results = [attempt(replicas, "g0", content(rank, 0, PIECE))]
    if rank == 2:
        send, count = module._Channel.send, []

        def send_or_die(channel: Any, piece: torch.Tensor) -> Any:
            count.append(piece)
            return die() if len(count) == 12 else send(channel, piece)

        module._Channel.send = send_or_die  # type: ignore[method-assign]
    results.append(attempt(replicas, "g1", content(rank, 1, 50 * PIECE)))
    results.append(attempt(replicas, "g2", content(rank, 2, 10)))
    return results


@scenario
def dies_before_it_comes(rank: int) -> Any:
    replicas = make(rank, timeout=SHORT * 4)
    attempt(replicas, "g0", content(rank, 0, 100))
    if rank == 2:
        die()
    return [attempt(replicas, "g1", content(rank, 1, 100)), attempt(replicas, "g2", content(rank, 2, 100))]


@scenario
def does_not_come(rank: int) -> Any:
    """Rank 2 comes when the others have given it up; they wait for it, and not for each other."""
    if rank == 1:
        return None
    replicas = make(rank, [0, 2, 3], SHORT)
    if rank == 2:
        await_file("noticed-0")
        await_file("noticed-3")
    results = [attempt(replicas, "g1", content(rank, 1, 100)), attempt(replicas, "g2", content(rank, 2, 100))]
    (directory / f"noticed-{rank}").touch()
    return results


@scenario
def stops_in_the_middle(rank: int) -> Any:
    """Hangs where it reserves memory: it has come, and its part is announced."""
    replicas = make(rank, timeout=SHORT)

    def hang(_: int, nbytes: int) -> torch.Tensor:
        await_file("noticed")
        return torch.empty(nbytes, dtype=torch.uint8)

    result = attempt(replicas, "g1", content(rank, 1, 100), reserve=hang if rank == 2 else reserve)
    if rank == 0:
        (directory / "noticed").touch()
    return result


@scenario
def out_of_step(rank: int) -> Any:
    """Rank 2 is a generation ahead, and then rank 0; at last they agree again."""
    replicas = make(rank)
    results = []
    for mine in ([3, 4, 6], [4, 4, 5], [4, 4, 6])[0 if rank == 0 else 1 if rank == 2 else 2]:
        results.append(attempt(replicas, f"g{mine}", content(rank, mine, 100)))
    if rank == 0:
        replicas._number += 1
    results.append(attempt(replicas, "g7", content(rank, 7, 100)))
    return results


@scenario
def damaged_on_the_way(rank: int) -> Any:
    module._CHUNK = PIECE
    replicas = make(rank)
    send = module._Channel.send
    sent: list[torch.Tensor] = []

    def damage(channel: Any, piece: torch.Tensor) -> Any:
        sent.append(piece)
        if len(sent) == 3:
            piece = piece.clone()
            piece[100] ^= 1
        return send(channel, piece)

    if rank == 2:
        module._Channel.send = damage  # type: ignore[method-assign]
    return [attempt(replicas, f"g{number}", content(rank, number, 5 * PIECE)) for number in range(2)]


@scenario
def damaged_message(rank: int) -> Any:
    """The size in it cannot be believed, so nothing more may come over this connection."""
    replicas = make(rank)
    encode = module._Message.encode

    def damage(message: Any) -> torch.Tensor:
        data = encode(message)
        data[18] ^= 1
        return data

    if rank == 2:
        module._Message.encode = damage  # type: ignore[method-assign]
    return [attempt(replicas, f"g{number}", content(rank, number, 1000)) for number in range(2)]


@scenario
def no_memory(rank: int) -> Any:
    module._CHUNK = PIECE
    replicas = make(rank, [0, 1, 2, 3])

    def refuse(peer: int, nbytes: int) -> torch.Tensor:
        if peer == 2:
            raise OSError(28, "No space left on device")
        return torch.empty(nbytes - (peer == 3), dtype=torch.uint8)

    return [
        attempt(replicas, "g0", content(rank, 0, 10 * PIECE + 1), b"z" * 10, reserve=refuse if rank == 0 else reserve),
        attempt(replicas, "g1", content(rank, 1, 10 * PIECE)),
    ]


@scenario
def fails_here(rank: int) -> Any:
    """Errors of single ranks, for instance of their callers: the partners must not wait for them."""
    replicas = make(rank)
    dist.barrier()  # a rank that fails while another still connects to it is another story
    part = content(rank, 1, 100)
    name = "g1" + 199 * "x" * (rank == 3)
    try:
        return attempt(replicas, name, part.float() if rank == 2 else part)
    except ValueError as error:
        return {"from": [], "error": str(error), "broken": replicas.broken}


@scenario
def interrupted(rank: int) -> Any:
    """What ends a thread that serves a partner is not lost with the thread."""
    if rank == 1:
        return None
    replicas = make(rank, [0, 2, 3])

    def leave(peer: int, nbytes: int) -> torch.Tensor:
        if (rank, peer) == (0, 2):
            sys.exit("enough")
        return reserve(peer, nbytes)

    try:
        return attempt(replicas, "g1", content(rank, 1, 100), reserve=leave)
    except SystemExit as error:
        return {"from": [], "error": str(error), "broken": replicas.broken}


@scenario
def closed(rank: int) -> Any:
    """Ranks 2 and 3 close while an exchange of the others waits for them; the others close during it."""
    replicas = make(rank)
    results: list[Any] = []
    if rank < 2:
        thread = threading.Thread(target=lambda: results.append(attempt(replicas, "g1", content(rank, 1, 100))))
        thread.start()
        while not replicas._busy.locked():
            time.sleep(0.01)
        if rank == 1:
            replicas.close()
            replicas.close()
        else:
            try:
                attempt(replicas, "g1", None)
            except RuntimeError as error:
                results.append(str(error))
        (directory / f"waiting-{rank}").touch()
        thread.join()
        (directory / f"told-{rank}").touch()
    else:
        await_file("waiting-0")
        await_file("waiting-1")
        time.sleep(0.3)
        replicas.close()
        await_file(f"told-{rank - 2}")
    results.append(attempt(replicas, "g2", content(rank, 2, 100)))
    return results


@scenario
def one_of_three_is_lost(rank: int) -> Any:
    """Rank 0 cannot read the message of one of its partners; the other one learns then that it has given up."""
    if rank == 1:
        return None
    replicas = make(rank, [0, 2, 3])
    decode, heard = module._Message.decode, []

    def fail_at_first(data: torch.Tensor) -> Any:
        heard.append(data)
        if len(heard) == 1:
            data[20] ^= 1
        return decode(data)

    if rank == 0:
        module._Message.decode = fail_at_first  # type: ignore[method-assign, assignment]

    def reserve_late(peer: int, nbytes: int) -> torch.Tensor:
        """Rank 0 is still busy with the other one when the lost one has noticed."""
        if rank == 0:
            await_file("noticed")
        return reserve(peer, nbytes)

    first = attempt(replicas, "g1", content(rank, 1, 100), reserve=reserve_late)
    if rank != 0 and first["error"] is not None:
        (directory / "noticed").touch()
    return [first, attempt(replicas, "g2", content(rank, 2, 100))]


@scenario
def cannot_connect(rank: int) -> Any:
    if rank == 3:
        return None
    try:
        make(rank, [0, 1, 3] if rank < 2 else [2, 3], SHORT)
    except ReplicaError as error:
        return str(error)


# Transfers


def brought(rank: int, transfers: list[Transfer], number: int, **kwargs: Any) -> Any:
    try:
        fetched = fetch(
            rank,
            transfers,
            kwargs.get("reserve", lambda transfer: reserve(None, transfer.size)),
            f"test/fetch/{number}",
            kwargs.get("timeout", PATIENT),
        )
    except ReplicaError as error:
        kept.append(error)
        return str(error)
    result = []
    for transfer, memory in fetched.items():
        assert transfer.destination == rank
        whole = memory is not None and torch.equal(memory, content(transfer.source, len(transfer.shard), transfer.size))
        assert whole or memory is None
        result.append([transfer.shard, whole])
    return result


def write(rank: int, part: str, size: int) -> Path:
    path = directory / f"{rank}-{part}"
    path.write_bytes(content(rank, len(part), size).numpy().tobytes())
    return path


def plan(rank: int, wanted: list[tuple[int, int, str, int]]) -> list[Transfer]:
    """Only the source knows the path."""
    return [
        Transfer(source, to, part, size, write(rank, part, size) if rank == source else None)
        for source, to, part, size in wanted
    ]


@scenario
def transfers(rank: int) -> Any:
    """Several destinations of one source, rings, both directions, and a list that does not concern everybody."""
    module._CHUNK = PIECE
    results = [brought(rank, [], 0)]
    wanted = [(0, to, "p" * (to + 1), SIZES[-to] + to) for to in (1, 2, 3)]
    wanted += [(2, 1, "r", 5), (1, 2, "rr", 6), (3, 0, "rrr", 0), (1, 3, "rrrr", 3 * PIECE), (3, 1, "s", 1)]
    results.append(brought(rank, plan(rank, wanted), 1))
    results.append(brought(rank, plan(rank, [(3, 2, "tt", 30000)]), 2) if rank >= 2 else None)
    return results


@scenario
def missing_files(rank: int) -> Any:
    module._CHUNK = PIECE
    parts = ["gone", "a folder", "a pipe", "longer", "shorter", "cut", "unreadable", "whole"]
    wanted = plan(rank, [(source, source ^ 2, part, 5 * PIECE) for part in parts for source in (0, 1)])
    if rank < 2:
        for part in parts[:3]:
            (directory / f"{rank}-{part}").unlink()
        (directory / f"{rank}-a folder").mkdir()
        os.mkfifo(directory / f"{rank}-a pipe")
        os.truncate(directory / f"{rank}-longer", 6 * PIECE)
        os.truncate(directory / f"{rank}-shorter", 4 * PIECE)
        opened = module._open_shard

        def open_and_change(transfer: Transfer) -> Any:
            file = opened(transfer)
            if transfer.shard == "cut":
                os.truncate(transfer.path, 2 * PIECE + 17)
            if transfer.shard == "unreadable":
                file.close()
                file = os.fdopen(os.open(transfer.path, os.O_WRONLY), "rb")
            return file

        module._open_shard = open_and_change
    return brought(rank, wanted, 0)


@scenario
def nowhere_to_put(rank: int) -> Any:
    module._CHUNK = PIECE
    said: list[str] = []
    monitor = logging.Handler()
    monitor.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    module.log.addHandler(monitor)

    def refuse(transfer: Transfer) -> torch.Tensor:
        if transfer.shard == "full":
            raise OSError(28, "No space left on device")
        return torch.empty(transfer.size - (transfer.shard == "small"), dtype=torch.uint8)

    parts = ("full", "small", "fits")
    return brought(rank, plan(rank, [(0, 2, part, 20 * PIECE) for part in parts]), 0, reserve=refuse), said


@scenario
def transfer_damaged(rank: int) -> Any:
    send = module._Channel.send

    def damage(channel: Any, piece: torch.Tensor) -> Any:
        piece = piece.clone()
        piece[0] ^= 1
        return send(channel, piece)

    if rank == 0:
        module._Channel.send = damage  # type: ignore[method-assign]
    return brought(rank, plan(rank, [(0, 2, "x", 9000), (1, 2, "yy", 9000)]), 0)


@scenario
def source_dies(rank: int) -> Any:
    module._CHUNK = PIECE
    if rank == 0:
        read = module._read
        count: list[int] = []

        def read_or_die(file: Any, piece: torch.Tensor) -> str:
            count.append(1)
            if len(count) == 4:
                die()
            return read(file, piece)

        module._read = read_or_die
    wanted = plan(rank, [(1, 2, "x", 100), (0, 2, "yy", 9 * PIECE), (0, 3, "zzz", 9000)])
    return brought(rank, wanted, 0, timeout=SHORT * 4)


@scenario
def destination_missing(rank: int) -> Any:
    """Rank 0 gives up, and rank 1, which has no business with the missing one, must not wait for it in vain."""
    wanted = plan(rank, [(0, 1, "x", 100), (0, 3, "yy", 100)])
    return brought(rank, wanted, 0, timeout=SHORT if rank == 0 else PATIENT) if rank != 3 else None


@scenario
def long_queue(rank: int) -> Any:
    """Rank 2 waits longer than the timeout, since others come before it."""

    def reserve_late(transfer: Transfer) -> torch.Tensor:
        time.sleep(1.2 if rank == 1 else 0)
        return reserve(None, transfer.size)

    wanted = plan(rank, [(0, 1, "x", 100), (0, 1, "yy", 100), (0, 2, "zzz", 100)])
    return brought(rank, wanted, 0, timeout=timedelta(seconds=2), reserve=reserve_late)


@scenario
def different_lists(rank: int) -> Any:
    size = 100 if rank == 0 else 50
    wanted = plan(rank, [(0, 2, "x", size), (1, 3, "yy" if rank == 1 else "zz", 100)])
    return brought(rank, wanted, 0)


@scenario
def many_short_lives(rank: int) -> Any:
    """The source closes right after the last word; the destination must still get it."""
    return [brought(rank, plan(rank, [(rank & 1, rank & 1 | 2, "x", 10)]), number) for number in range(60)]


def run(rank: int, world_size: int, tmp: Path, name: str) -> None:
    """Runs one scenario, and writes its result to `rank-N.json`; what is printed goes to `rank-N.log`."""
    global directory
    directory = tmp
    with open(directory / f"rank-{rank}.log", "wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    store = shared_store(rank, directory / "port")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = SCENARIOS[name](rank)
    beside = directory / f"rank-{rank}.tmp"
    beside.write_text(json.dumps(result))
    beside.rename(beside.with_suffix(".json"))
    await_file("end")  # nobody shall learn from the end of this process what it had to say itself
    os._exit(0)
