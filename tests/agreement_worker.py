"""One rank of a small training, for the tests of the agreement with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_resilience.agreement import Agreement
from lightning_resilience.agreement_protocol import Needs, PeerLost, Position, end_of_evaluation, evaluation, training

BATCHES, EVALUATE_EVERY = 30, 10
VICTIM = {"a rank dies": 2, "the store's owner dies": 0, "a rank raises": 2, "a node's second rank dies": 3}
DEADLINES = {"answer_timeout": timedelta(seconds=2), "arrival_timeout": timedelta(seconds=6)}


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


class Training:
    def __init__(self, rank: int, fit: int, scenario: str, nodes: list[list[int]]) -> None:
        self.rank, self.scenario = rank, scenario
        self.random = random.Random(f"{fit}/{rank}")
        deadlines = {} if scenario == "healthy" else DEADLINES
        self.agreement = Agreement(rank, dist.get_world_size(), prefix=f"agreement/{fit}", nodes=nodes, **deadlines)
        self.acted: list[tuple[Any, Position]] = []
        self.askers = [threading.Thread(target=self.ask, args=(number,)) for number in range(2)]

    def ask(self, number: int) -> None:
        """Asks from a thread of its own at random moments; some of them come after the last batch."""
        chosen = random.Random(f"{self.rank}/{number}")
        for count in range(3):
            time.sleep(chosen.uniform(0, 0.15))
            needs = chosen.choice([Needs.NOTHING, Needs.CLEAN, Needs.TRAINING])
            self.agreement.request("save", {"id": f"{self.rank}/{number}/{count}"}, needs)

    def run(self) -> list[str]:
        for asker in self.askers:
            asker.start()
        self.evaluate(0)
        for batches in range(1, BATCHES + 1):
            time.sleep(self.random.uniform(0, 0.01))
            reduce()
            if batches % EVALUATE_EVERY == 0:
                self.evaluate(batches)
            self.boundary(training(batches), Needs.TRAINING | (Needs.NOTHING if batches % 2 else Needs.CLEAN))
        for asker in self.askers:
            asker.join()
        self.agreement.request("save", {"id": f"{self.rank}/last"})
        return sorted(event.payload["id"] for event in self.agreement.close())

    def evaluate(self, batches: int) -> None:
        for index in range(2 + 3 * self.rank):
            time.sleep(self.random.uniform(0, 0.005))
            self.boundary(evaluation(batches, 0, index), Needs.NOTHING)
        self.boundary(end_of_evaluation(batches), Needs.NOTHING)
        reduce()

    def boundary(self, position: Position, allows: Needs) -> None:
        if position == training(15):
            self.misbehave()
        for event in self.agreement.boundary(position, allows):
            self.agreement.arrive(event)
            self.acted.append((event.payload["id"], position))
            reduce()

    def misbehave(self) -> None:
        if self.scenario == "healthy":
            return
        if self.rank == VICTIM[self.scenario]:
            time.sleep(0.3)  # everybody is out of the last collective
            if self.scenario == "a rank raises":
                raise ValueError("out of memory")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6)
        self.agreement.request("save", {"id": "asked of the dead"})
        while True:  # what these ranks wait for is the agreement alone
            self.agreement.boundary(training(15))
            time.sleep(0.01)


def shared_store(rank: int, port_file: Path) -> dist.TCPStore:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        beside = port_file.with_suffix(".tmp")
        beside.write_text(str(store.port))
        beside.rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)


def run(rank: int, world_size: int, directory: Path, scenario: str, nodes: list[list[int]]) -> None:
    """Trains, and writes what happened to `rank-N.json`; what is printed goes to `rank-N.log`."""
    with open(directory / f"rank-{rank}.log", "wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    store = shared_store(rank, directory / "port")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    report: dict[str, Any] = {"fits": [], "error": None}
    current = None
    try:
        for fit in range(2):
            current = Training(rank, fit, scenario, nodes)
            left_over = current.run()
            report["fits"].append({"acted": current.acted, "left_over": left_over})
    except PeerLost as error:
        report["error"] = str(error)
        current.agreement.stop()
    except ValueError as error:
        current.agreement.abort(str(error))
    report["threads"] = [thread.name for thread in threading.enumerate() if "agreement" in thread.name]
    beside = directory / f"rank-{rank}.tmp"
    beside.write_text(json.dumps(report))
    beside.rename(beside.with_suffix(".json"))
    if scenario != "healthy":
        while rank == 0 and len(list(directory.glob("rank-*.json"))) + scenario.endswith("dies") < world_size:
            time.sleep(0.02)  # on a busy machine, the others may read the reason only now
        os._exit(0)  # a process group whose peers are dead has no clean end
    dist.destroy_process_group()
