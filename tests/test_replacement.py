"""``launch --elastic``: a lost rank is replaced while the others keep their processes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import signal
import socket
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

from lightning_resilience import AutoResume, FaultTolerance, Interrupted, NaNGuard, _torch
from lightning_resilience._lightning import lightning_reentry
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.elastic import group, nccl, stuck
from lightning_resilience.elastic.group import DefaultGroup
from lightning_resilience.fit import joining, reentry
from lightning_resilience.launch import elastic, membership, park, standstill
from lightning_resilience.launch.channel import Channel, Message
from lightning_resilience.launch.elastic import Supervisor
from lightning_resilience.launch.loss_policy import LossPolicy
from lightning_resilience.launch.membership import Membership, Replacement
from lightning_resilience.launch.newcomers import how_ended, is_replaceable
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.ledger import reader_of
from lightning_resilience.run.run_directory import JOINS_VARIABLE, RunDirectory
from tests import as_on_gpu, test_logs
from tests.harness import CONTEXT, command, differences, free_port, reference, result, run_ranks, samples
from tests.ledgers import Ledger, read_ledger
from tests.test_exact_resume import make, undisturbed
from tests.test_launch import wait_until
from tests.test_launchers import finish, start

# -- a rank ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Membership, Channel]]:
    """What a rank knows, and the supervisor's end of its channel."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    ours, theirs = (Channel(each) for each in socket.socketpair())
    yield Membership(theirs, generation=0), ours
    ours.close()


def test_a_rank_learns_of_a_loss_when_its_group_is_cut(ends: tuple[Membership, Channel]) -> None:
    line, end = ends
    known_at_cut: list[Any] = []
    line.cut = lambda: known_at_cut.append(line.replacement())
    end.send("replace", generation=3, port=4711, lost={0: "was killed by SIGKILL"}, members=[0])
    replacement = line.replacement_behind(RuntimeError("Connection closed by peer"))
    assert replacement == Replacement(3, 4711, {0: "was killed by SIGKILL"}, (0,))
    assert known_at_cut == [None]  # else the main thread may have opened the next group, which would be cut
    line.begin(replacement)
    assert (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"]) == ("3", "4711")
    said = end.receive()
    assert said is not None
    assert (said.kind, said.fields) == (
        "state",
        {"state": "left", "generation": 3, "reason": "", "fewer": None, "tasks": "", "group": 1, "has_trained": False},
    )
    assert line.replacement() is None
    assert not line.is_start
    end.send("replace", generation=4, port=4712, lost={}, members=[0], is_start=True)
    started = line.replacement(5.0)
    assert started is not None
    line.begin(started)
    assert line.is_start, "as all are that are in it"


@pytest.mark.parametrize(("rank", "does"), [(0, "asks"), (1, "expects")])
def test_one_rank_asks_all_to_leave_and_the_others_expect_it(rank: int, does: str) -> None:
    done: list[str] = []
    agreement = MagicMock(request=lambda kind, needs: done.append("asks"), expect=lambda: done.append("expects"))
    fit: Any = MagicMock(rank=rank, agreement=agreement)
    reentry.Replaceability(fit)._ask_to_leave()
    assert done == [does]


def test_ranks_that_leave_together_are_cut_where_they_do_not_or_another_one_is_lost(
    ends: tuple[Membership, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, end = ends
    seen: list[str] = []
    late: list[Callable[[], None]] = []

    def timer(seconds: float, call: Callable[..., None], args: tuple[Any, ...]) -> Any:
        return MagicMock(start=lambda: late.append(partial(call, *args)))

    monkeypatch.setattr(membership, "threading", MagicMock(Timer=timer))
    line.cut = lambda: seen.append("cut")

    def hear(generation: int, lost: dict[int, str]) -> None:
        end.send("replace", generation=generation, port=generation, lost=lost, members=[0], together=not lost)
        wait_until(
            lambda: (found := line.replacement()) and found.generation == generation, lambda: "nothing was heard"
        )

    def asks() -> None:
        seen.append("asks")

    line.leave_together = asks
    hear(1, {})
    assert (seen, line.is_over) == (["asks"], False)
    late.pop()()
    assert (seen, line.is_over) == (["asks", "cut"], True)
    for has_left in (lambda: line.begin(Replacement(2, 2, {}, (0,))), lambda: setattr(line, "leave_together", None)):
        line.generation, line.leave_together = 1, asks
        hear(2, {})
        seen.clear()
        has_left()  # for the next generation, or as the fit has ended
        late.pop()()
        assert not seen
    line.generation, line.leave_together = 2, asks
    hear(3, {})
    hear(4, {1: "was killed by SIGKILL"})
    late.pop()()
    assert (seen, line.is_over) == (["asks", "cut"], True)
    seen.clear()
    line.generation, line.leave_together = 4, asks
    hear(5, {})
    line.reach_boundary()  # they have time to save there
    late.pop()()
    assert (seen, line.is_over) == (["asks"], False)
    line.begin(Replacement(5, 5, {}, (0,)))
    seen.clear()
    line.leave_together = asks
    line.reach_boundary()  # before the message, which has only reached the other ranks
    hear(6, {})
    assert (seen, late, line.is_over) == ([], [], False)
    hear(7, {1: "was killed by SIGKILL"})
    assert (seen, line.is_over) == (["cut"], True)
    line.begin(Replacement(7, 7, {1: "was killed by SIGKILL"}, (0,)))
    seen.clear()
    end.send("replace", generation=7, port=7, lost={}, members=[0], together=False)  # it is late: this rank has left
    hear(8, {})
    line.begin(Replacement(8, 8, {}, (0,)))
    assert seen == ["cut"], "of 8 only"


@pytest.mark.parametrize(("error", "is_shown"), [(OSError(28, "disk full"), True), (RuntimeError("gloo: peer"), False)])
def test_what_kept_a_rank_from_saving_before_the_ranks_change_is_shown(
    ends: tuple[Membership, Channel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_shown: bool,
) -> None:
    line, end = ends
    for name in ("leave_fit", "take_place"):
        monkeypatch.setattr(reentry.lightning_reentry, name, lambda *_: None)
    monkeypatch.setattr(reentry, "DEFAULT", MagicMock())
    fails = [error]

    def fit() -> str:
        if not fails:
            return "ended"
        end.send("replace", generation=1, port=1, lost={}, members=[0], together=False)
        raise fails.pop()

    trainer: Any = MagicMock(is_global_zero=True, strategy=MagicMock(root_device=torch.device("cpu")))
    assert reentry._enter(trainer, fit, line, lambda lost: None, MagicMock()) == "ended"
    assert (f"could not save before the ranks change ({error!r})" in caplog.text) == is_shown


def test_a_rank_that_ends_with_its_node_has_not_failed(ends: tuple[Membership, Channel]) -> None:
    line, end = ends
    end.send("replace", generation=1, port=1, lost={}, members=[1], together=False)
    end.send("restart")
    assert line.await_restart(5.0)
    left = line.replacement_behind(RuntimeError("Connection closed by peer"))
    assert left == Replacement(1, 1, {}, (1,)), "it leaves the fit as the others do"
    line.step_back(left)
    assert line.await_admission() is None, "and ends"


@pytest.mark.parametrize(
    ("members", "is_at_door", "stops"),
    [
        pytest.param(None, False, True, id="nothing was decided"),
        pytest.param([0], False, True, id="another node leaves"),
        pytest.param([1], False, False, id="this node leaves"),
        pytest.param(None, True, False, id="it has left the fit"),
    ],
)
def test_a_rank_that_leaves_with_its_node_does_not_stop_the_others(
    ends: tuple[Membership, Channel],
    monkeypatch: pytest.MonkeyPatch,
    members: list[int] | None,
    is_at_door: bool,
    stops: bool,
) -> None:
    line, end = ends
    stopped: list[bool] = []
    line.stop, line.leave_together = lambda: stopped.append(True), lambda: None
    if is_at_door:
        monkeypatch.setenv(JOINS_VARIABLE, "1")
    if members is not None:
        end.send("replace", generation=1, port=1, lost={}, members=members, together=True)
        wait_until(lambda: line.replacement() is not None, lambda: "nothing was heard")
    line.stop_if_untold()
    assert (stopped, line.is_stopping) == ([True] * stops, stops)


def test_ranks_that_are_lost_before_a_generation_begins_are_lost_together(ends: tuple[Membership, Channel]) -> None:
    line, end = ends
    for generation, lost in ((1, {0: "one"}), (2, {2: "another"})):
        end.send("replace", generation=generation, port=generation, lost=lost, members=[0])
    wait_until(lambda: (line.replacement() or Replacement(0, 0, {}, (0,))).generation == 2, lambda: "nothing was heard")
    assert line.replacement() == Replacement(2, 2, {0: "one", 2: "another"}, (0,))
    line.begin(Replacement(2, 2, {0: "one", 2: "another"}, (0,)))
    end.send("replace", generation=3, port=3, lost={1: "the next"}, members=[0])
    assert line.replacement(10.0) == Replacement(3, 3, {1: "the next"}, (0,))


def test_the_ranks_of_a_generation_are_numbered_by_its_members(
    ends: tuple[Membership, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "4" if "WORLD" in name else "2")
    monkeypatch.setenv(JOINS_VARIABLE, "1")
    ours, theirs = (Channel(each) for each in socket.socketpair())
    line = Membership(theirs, generation=3)
    assert line.is_at_door
    ours.send("replace", generation=4, port=4, lost={}, members=[0, 2, 3])
    reads, writes = os.pipe()
    before = list(sys.meta_path)
    standstill.mind(reads)
    replacement = line.await_admission()
    os.close(writes)
    assert sys.meta_path == before, "the others wait for it from here on"
    assert (said := ours.receive()) is not None
    assert (said.fields["state"], said.fields["generation"]) == ("waiting", 3)
    assert replacement is not None
    line.begin(replacement)
    assert not line.is_at_door
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [*"1133"]
    ours.send("replace", generation=5, port=5, lost={1: "a newcomer", 3: "a rank"}, members=[0, 2])
    replacement = line.replacement(10.0)
    assert replacement is not None
    assert line.ranks(replacement.lost) == {2}
    line.begin(replacement)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == [*"12"]
    ours.close()


def test_who_does_not_go_on_is_not_waited_for(ends: tuple[Membership, Channel]) -> None:
    line, _ = ends
    line.members = (0, 1, 4, 5, 6, 7)
    assert line.gone(Replacement(2, 2, {4: "was killed by SIGKILL"}, (0, 1, 6, 7))) == {2, 3}
    assert line.gone(Replacement(2, 2, {}, (0, 1, 2, 3, 4, 5, 6, 7))) == set()
    assert line.gone(Replacement(2, 2, {}, (0, 1, 6, 7))) == {2, 3}, "they leave"


def test_an_error_of_the_user_is_raised(ends: tuple[Membership, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    line, end = ends
    monkeypatch.setattr(membership, "OWN_ERROR_RAISED_AFTER_S", 0.0)
    error = ValueError("a loss that is no number")
    assert line.replacement_behind(error) is None
    end.send("replace", generation=1, port=1, lost={}, members=[0])
    assert line.replacement(10.0) is not None
    assert line.replacement_behind(error) is None  # what was judged once is not taken for a consequence later


def test_an_error_is_raised_when_all_ranks_are_restarted(ends: tuple[Membership, Channel]) -> None:
    line, end = ends
    end.send("replace", generation=1, port=1, lost={}, members=[0])
    assert line.replacement(10.0) is not None
    threading.Timer(0.05, end.send, ["restart"]).start()  # the replacement was refused
    line.await_restart(10.0)
    assert line.replacement_behind(RuntimeError("[gloo] Connection closed by peer")) is None


def test_a_collection_at_a_loss_leaves_out_what_was_there_before_the_fit() -> None:
    for is_spare in (False, True):
        if is_spare:
            gc.freeze()
        try:
            with reentry._without_what_is_there():
                assert gc.get_freeze_count() > 0
            assert (gc.get_freeze_count() > 0) == is_spare  # what a fit has left behind can be freed when it is over
        finally:
            gc.unfreeze()


def test_what_a_spare_has_frozen_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 30 ms, while others wait for it."""
    monkeypatch.setattr(park, "has_frozen", True)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it was counted"))
    with reentry._without_what_is_there():
        pass


def test_garbage_of_before_the_fit_does_not_stay() -> None:
    class Garbage:
        pass

    garbage = Garbage()
    vars(garbage)["self"] = garbage
    found = weakref.ref(garbage)
    del garbage
    gc.disable()
    try:
        with reentry._without_what_is_there():
            assert found() is None
    finally:
        gc.enable()


def test_the_watchdog_starts_after_the_ranks_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_KEEPS_SURVIVORS", True)
    for count, is_put_off in (("0", False), ("1", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert (watchdog.put_off_s() > 0) == is_put_off


# -- its process group ------------------------------------------------------------------------------------------------


class Backend:
    """One whose abort ends when it may, and with what it shall raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.error = error
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """The backends of the default group, which is open; sockets are not looked at."""
    found: dict[str, Backend] = {}
    monkeypatch.setattr(group, "_backends", lambda: found)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    return found


def test_where_no_trainer_knows_of_the_package_that_is_the_reason() -> None:
    """Only on the path, it has no entry point. Once installed, a group that was opened before is the script's."""
    own = DefaultGroup()
    assert "is not installed" in str(own.why_not())
    own._is_installed = True
    assert own.why_not() == "the script has opened the process group itself"


def test_who_waits_for_a_restart_before_another_fit_can_be_stopped(
    ends: tuple[Membership, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, end = ends
    monkeypatch.setattr(reentry.lightning_reentry, "is_fit", lambda trainer: True)
    line.slots, line.members, line.is_start = (0, 1), (0,), False
    end.send("stop")
    with pytest.raises(Interrupted, match="before a fit that needs the absent ranks"):
        reentry._take_part(MagicMock(), line)
    said = end.receive()
    assert said is not None
    assert said.fields["state"] == "needs_all"


def test_what_was_computed_since_an_abort_is_not_published(backends: dict[str, Backend]) -> None:
    backends["nccl"] = backend = Backend()
    own = DefaultGroup()
    own.check_not_aborted()
    cut = threading.Thread(target=own.cut)
    cut.start()
    wait_until(lambda: backend.aborts == 1, lambda: "not aborted")
    with pytest.raises(PeerLost):  # before the abort has ended, and results come
        own.check_not_aborted()
    backend.may_end.set()
    cut.join()
    assert own.cut() is None
    assert backend.aborts == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_an_abort_that_fails_is_told(
    backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(group, "ABORTED_WITHIN_S", 0.05 if hangs else 60.0)
    backends["nccl"] = backend = Backend(RuntimeError("unhandled system error"))
    if not hangs:
        backend.may_end.set()
    problem = DefaultGroup().cut()
    assert problem is not None
    assert ("has not ended" if hangs else "unhandled system error") in problem
    backend.may_end.set()


def test_a_group_that_is_closed_meanwhile_has_no_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)  # as it was a moment before
    assert group._backends() == {}


def test_gloo_is_not_aborted(backends: dict[str, Backend]) -> None:
    backends["gloo"] = backend = Backend()
    own = DefaultGroup()
    assert own.cut() is None
    own.check_not_aborted()  # what is saved of it is right
    assert backend.aborts == 0


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, "TORCH_NCCL_DESYNC_DEBUG"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_a_rank_that_nccl_would_end_is_not_kept(variables: dict[str, str], name: str | None) -> None:
    reason = nccl.why_not({**nccl.ENVIRONMENT, **variables})
    assert (reason is None) == (name is None)
    assert name is None or name in str(reason)
    assert nccl.why_not(variables) is not None  # without what the supervisor sets


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's, of which all is put back that a :class:`DefaultGroup` puts in its place."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    for owner, name in ((rendezvous, "_create_c10d_store"), (c10d, "_new_process_group_helper")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return rendezvous


@pytest.mark.usefixtures("rendezvous")
def test_no_group_is_opened_when_another_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, opened = [False], []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda: opened.append(is_over.append(True)))
    own = DefaultGroup()
    own.install(lambda: is_over[-1])
    for _ in range(2):
        with pytest.raises(PeerLost):  # the first time while it is opened
            torch.distributed.init_process_group()
    assert len(opened) == 1


def cut_again_and_again(rank: int, ports: list[int], counts: Any) -> None:
    group, chance, descriptors = DefaultGroup(), random.Random(1), list[int]()
    group.install(lambda: False)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        torch.distributed.init_process_group("gloo")
        after_s, later_s = 0.01 * chance.random(), [0.001 * chance.random() for _ in range(2)]
        torch.distributed.barrier()
        timer = threading.Timer(after_s + later_s[rank], group.cut)
        timer.start()
        with contextlib.suppress(RuntimeError):
            while True:
                torch.distributed.barrier()
        timer.join()
        group.close()
        counts[rank] += 1
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert max(descriptors) < min(descriptors) + 20, "those of earlier groups stay open"
    counts[rank] += 1


@pytest.mark.slow
def test_no_rank_waits_for_what_it_was_sending_when_its_group_was_cut() -> None:
    counts = CONTEXT.Array("i", 2)
    ports = [free_port() for _ in range(40)]
    run_ranks(cut_again_and_again, ports, counts)
    assert list(counts) == [41, 41]


@pytest.mark.parametrize("waits", [False, True], ids=["torch's client", "when it listens"])
def test_a_store_that_is_closed_while_a_rank_connects_is_left(
    waits: bool, rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_CONNECTS_WITHIN", timedelta(seconds=0.2))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if waits:  # as in the workers of launch
        _torch.connect_when_rank_0_listens.__wrapped__()
    checks = itertools.count()
    DefaultGroup().install(lambda: next(checks) > 0)  # it is lost when the first attempt has failed
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))  # and nobody listens there
        with pytest.raises(PeerLost):
            rendezvous._create_c10d_store(*own.getsockname(), 1, 2, timedelta(seconds=20))
    assert next(checks) == 2


def test_a_store_has_the_timeout_that_was_asked_for(rendezvous: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[timedelta] = []

    class Store:
        set_timeout = made.append

    def create(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Any:
        made.append(timeout)
        return Store

    monkeypatch.setattr(rendezvous, "_create_c10d_store", create)
    DefaultGroup().install(lambda: False)
    assert rendezvous._create_c10d_store("127.0.0.1", 1, 1, 2, timedelta(minutes=30)) is Store
    assert made == [group._CONNECTS_WITHIN, timedelta(minutes=30)]


# -- the supervisor, with ranks that only talk to it -------------------------------------------------------------------

RANK = """
import json, os, signal, socket, struct, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["LIGHTNING_RESILIENCE_ELASTIC"]
line = socket.socket(fileno=int(os.environ["LIGHTNING_RESILIENCE_CHANNEL"].split(",")[0])).makefile("rwb")
def tell(**message):
    data = json.dumps(message).encode()
    line.write(struct.pack("!I", len(data)) + data)
    line.flush()
def say(state, reason=""): tell(kind="state", state=state, generation=generation, reason=reason)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def hear():
    message = json.loads(line.read(struct.unpack("!I", line.read(4))[0]))
    if message["kind"] == "restart": sys.exit(1)
    global port
    port = message["port"]
    return message["generation"]
log = sys.argv[1]
print(rank, life, os.getpid(), file=open(log, "a"))
generation = life
def ready(saved=True):
    say("ready")
    if saved: tell(kind="saved")
    print(file=open(f"{log}.{rank}.{generation}", "w"))
def others():
    files = [f"{log}.{other}.{generation}" for other in range(3) if other != rank]
    while not all(map(os.path.exists, files)): time.sleep(0.01)
"""


def supervise(tmp_path: Path, script: str, world_size: int = 3, max_restarts: int = 3) -> tuple[int, list[list[int]]]:
    """Runs ranks that do what ``script`` says; returns the exit code, and rank and life of every process."""
    program, log = tmp_path / "rank.py", tmp_path / "log"
    program.write_text(RANK + textwrap.dedent(script))
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run", rank=None)
    ledger.record("launch", budget={"in_job_restarts": 0})  # no more than max_restarts
    ranks = [sys.executable, "-IS", str(program), str(log)]
    supervisor = Supervisor(ranks, world_size, max_restarts, "abc", 5.0, ledger)
    code = supervisor.run()
    return code, [[int(word) for word in line.split()] for line in log.read_text().splitlines()]


# Rank 1 dies when the others are in the fit; those that live enter the next generation until nobody dies any more.
MENDED = """
ready()
if rank == 1 and life == 0:
    others()
    die()
while generation < {last}:
    generation = hear()
    say("left")
    {then}
    ready()
"""


def lives(started: list[list[int]]) -> set[tuple[int, int]]:
    return {(rank, life) for rank, life, _ in started}


FIRST = {(0, 0), (1, 0), (2, 0)}


def test_a_killed_rank_is_replaced_and_the_others_live_on(tmp_path: Path) -> None:
    code, started = supervise(tmp_path, MENDED.format(last=1, then=""))
    assert code == 0
    assert lives(started) == {*FIRST, (1, 1)}
    assert len(started) == 4


def test_what_an_ended_process_has_said_counts_for_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor([], 1, 3, "abc", 5.0, Ledger(tmp_path, rank=None))
    ended, living = (Popen([sys.executable, "-ISc", ""]) for _ in range(2))
    member, supervisor._processes[0] = supervisor._policy.members[0], living
    for process, state in ((ended, "starting"), (living, "refused")):
        said = {"state": "refused", "generation": member.generation, "reason": "x"}
        supervisor._hear(process, Message("state", said, []))
        assert member.state == state
        process.wait()


def test_how_many_restarts_are_left_is_read_from_the_ledger(tmp_path: Path) -> None:
    budget = {"in_job_restarts": 3, "job_retries": 2, "max_failures_per_day": 30}
    ledger = Ledger(tmp_path, rank=None)
    supervisor = Supervisor([], 2, 3, "abc", 5.0, ledger)
    ledger.record("launch", budget=budget)
    ledger.record("job_start", retry=False, run_id="abc")

    def lose(step: int | None) -> int:
        count = next(counts)
        ledger.record("start", restart_count=count, elastic_run_id="abc", world_size=2)
        if step is not None:
            ledger.record("resumed", fit=0, step=step - 1)
            ledger.record("saved", fit=0, step=step)
        ledger.record("replaced", ranks=[1], kept=1, members=None, elastic_run_id="abc", restart_count=count + 1)
        return supervisor.restarts_left()

    counts = itertools.count()
    assert all(lose(step) >= 5 for step in range(1, 25))  # as many as may fail in a day
    assert [lose(None) for _ in range(5)] == [6, 5, 4, 0, 0]


def test_no_restart_is_left_where_the_ledger_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, reads = threading.Event(), elastic.read_ledger
    monkeypatch.setattr(elastic, "read_ledger", lambda path: (answers.wait(5), reads(path))[1])
    monkeypatch.setattr(elastic, "_READ_WITHIN_S", 0.01)
    supervisor = Supervisor([], 2, 3, "abc", 5.0, Ledger(tmp_path, rank=None))
    assert supervisor.restarts_left() == 0
    monkeypatch.setattr(elastic, "_READ_WITHIN_S", 10.0)
    answers.set()
    assert supervisor.restarts_left() > 0


def test_a_read_of_the_ledger_that_never_ends_does_not_hold_up_the_supervisor(tmp_path: Path) -> None:
    supervisor = Supervisor([], 2, 3, "abc", 5.0, Ledger(tmp_path, rank=None))
    with reader_of(tmp_path)._lock:  # as whoever waits for storage has it
        assert supervisor.restarts_left() > 0


def test_another_rank_that_dies_meanwhile_is_replaced_too(tmp_path: Path) -> None:
    code, started = supervise(tmp_path, MENDED.format(last=2, then="if rank == 0 and generation == 1: die()"))
    assert code == 0
    assert lives(started) == {*FIRST, (1, 1), (0, 2)}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("ready(); last(lambda: sys.exit(1))", id="an exception"),
        pytest.param("ready(saved=False); last(die)", id="nothing saved"),
        pytest.param("ready(); say('refused', 'x'); last(die)", id="refused"),
        pytest.param("ready(); cannot_leave(); last(die)", id="cannot leave"),
    ],
)
def test_what_cannot_be_mended_restarts_all(tmp_path: Path, script: str) -> None:
    text = """
        if life: sys.exit(0)
        def last(end):
            if rank != 1: hear()
            others()
            end()
        def cannot_leave():
            if rank != 1:
                hear()
                say("refused", "x")
                hear()
    """
    code, started = supervise(tmp_path, f"{textwrap.dedent(text)}\n{script}")
    assert code == 0
    again = 2 if "cannot_leave" in script else 1  # a replacement was started before
    assert lives(started) == FIRST | {(0, again), (1, again), (2, again)} | ({(1, 1)} if again == 2 else set())


def test_nobody_waits_in_the_store_for_a_replacement_that_has_failed(tmp_path: Path) -> None:
    script = """
        ready()
        if life == 0 and rank == 1:
            others()
            die()
        if life == 1:
            while len(open(log).readlines()) < 6: time.sleep(0.01)
            sys.exit(1)
        if life == 0:
            generation = hear()
            waits = socket.create_connection(("127.0.0.1", port))
            print(rank, "waits", 0, file=open(log, "a"))
            try: waits.recv(1)
            except ConnectionError: pass
            print(rank, "is free", file=open(log, "a"))
            hear()
    """
    program, log = tmp_path / "rank.py", tmp_path / "log"
    program.write_text(RANK + textwrap.dedent(script))
    supervisor = Supervisor(
        [sys.executable, "-IS", str(program), str(log)], 3, 3, "abc", 5.0, Ledger(tmp_path, rank=None)
    )
    assert supervisor.run() == 0
    assert {"0 is free", "2 is free"} < {*log.read_text().splitlines()}


def test_the_budget_ends_the_replacements(tmp_path: Path) -> None:
    script = """
        ready()
        if rank == 1:
            others()
            die()
        while True:
            generation = hear()
            ready()
    """
    code, started = supervise(tmp_path, script, max_restarts=2)
    assert code == 1
    assert lives(started) == {*FIRST, (1, 1), (1, 2)}


def test_a_survivor_that_does_not_leave_its_fit_restarts_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SURVIVORS_LEAVE_WITHIN_S", 0.3)
    script = """
        if life > 1: sys.exit(0)
        ready()
        if rank == 1 and not life:
            others()
            die()
        hear()
        hear()
    """
    code, started = supervise(tmp_path, script)
    assert code == 0
    assert lives(started) == {*FIRST, (1, 1), (0, 2), (1, 2), (2, 2)}


def test_the_callback_of_a_cli_does_the_same_in_a_survivor_as_in_a_replacement(tmp_path: Path) -> None:
    """Its ``setup`` has collectives, of which it leaves some out in a process that has saved the configuration."""

    class Saves(SaveConfigCallback):
        def save_config(self, *_: object) -> None: ...

    callback = Saves(None, None, save_to_log_dir=False)  # type: ignore[arg-type]
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[callback], **options)  # type: ignore[arg-type]
    module = BoringModel()
    start = lightning_reentry.Start(trainer, module)
    trainer.fit(module)
    assert callback.already_saved
    vars(module)["forward"] = lambda: None  # as Lightning does where DDP calls the training step
    lightning_reentry.leave_fit(trainer, start)
    assert not callback.already_saved
    assert "forward" not in vars(module)


class Thawed(BoringModel):
    """Is trained as a whole from the second epoch on, and fails in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = torch.nn.BatchNorm1d(2)
        self.normal.requires_grad_(False)

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.normal(self.layer(batch))
        return output

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 8), 4)

    def on_train_batch_start(self, *args: Any) -> None:
        self.normal.requires_grad_(self.current_epoch > 0)
        if self.current_epoch == 2:
            raise PeerLost


def test_a_survivor_begins_the_fit_with_what_a_replacement_has(tmp_path: Path) -> None:
    averages, stops = StochasticWeightAveraging(0.1, 1), EarlyStopping("val", strict=False)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"default_root_dir": tmp_path, "max_epochs": 2, "limit_val_batches": 0}
    options["precision"] = "64-true"
    trainer = L.Trainer(callbacks=[averages, stops], **options)  # type: ignore[arg-type]
    module = Thawed()
    vars(module)["forward"] = own = lambda *inputs: Thawed.forward(module, *inputs)
    before = [dict(vars(each)) for each in (averages, stops)]
    start, drawn = lightning_reentry.Start(trainer, module), (random.random(), np.random.rand(), torch.rand(2).tolist())
    with pytest.raises(PeerLost):
        trainer.fit(module)
    assert (averages._initialized, trainer.max_epochs, module.normal.momentum) == (True, 3, None)
    assert (trainer.global_step, trainer.current_epoch) != (0, 0)
    lightning_reentry.leave_fit(trainer, start)
    assert (trainer.global_step, trainer.current_epoch) == (0, 0)
    assert [vars(each) for each in (averages, stops)] == before
    assert vars(module)["forward"] is own
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == drawn
    assert (trainer.max_epochs, module.normal.momentum) == (2, 0.1)
    assert [each.requires_grad for each in module.parameters()] == [True, True, *[False] * 4]
    # What is made in configure_model is made with the types of the precision.
    types = {name: each.dtype for name, each in module.state_dict().items() if not name.startswith("late")}
    assert set(types.values()) == {torch.float32, torch.int64}


def test_nothing_of_a_fit_that_is_left_for_a_replacement_stays_on_the_trainer(tmp_path: Path) -> None:
    """Or a save would ask the callbacks of each generation before, and those of replacements would not."""

    class Leaves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                assert "save_checkpoint" in vars(trainer)
                joining.leave_without_peers(trainer, [])
                assert "save_checkpoint" not in vars(trainer)
                assert "on_exception" not in vars(trainer.strategy)
                trainer.should_stop = True

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path, "max_steps": 5, "limit_val_batches": 0}
    L.Trainer(callbacks=[AutoResume(), NaNGuard(), FaultTolerance(), Leaves()], **quiet).fit(BoringModel())


class Ranks:
    """Takes note of what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, ranks: Any, kind: str, **fields: Any) -> None:
        self.told.append(kind)

    def open_store(self) -> int:
        return 0

    def close_old_store(self) -> None: ...

    def close_stores(self) -> None: ...

    def lost_node(self, rank: int) -> None: ...

    def start(self, ranks: Any, generation: int, is_newcomer: bool) -> None: ...

    def record(self, *change: Any) -> None: ...


@pytest.mark.parametrize("state", ["ready", "done"])
def test_a_rank_whose_fit_ends_as_another_one_dies_is_not_awaited_for_long(state: str) -> None:
    """Its script may go on for hours."""
    ranks: Any = Ranks()
    policy = LossPolicy(ranks, world_size=2, max_restarts=3, term_timeout_s=5.0)
    for rank in range(2):
        policy.heard(rank, "state", {"state": "ready", "generation": 0, "reason": ""})
    policy.heard(None, "saved", {})
    policy.ended(1, -signal.SIGKILL)
    for now in (0.0, 1.0):
        policy.step(now, all_is_heard=True)
    assert ranks.told == ["replace"]
    policy.heard(0, "state", {"state": state, "generation": 0, "reason": ""})  # it had not said so yet
    for now in (2.0, deadlines.SURVIVORS_LEAVE_WITHIN_S + 2.0):
        policy.step(now, all_is_heard=True)
    assert ranks.told == ["replace", "restart"]


def test_where_a_rank_has_failed_is_not_said_since_nobody_knows() -> None:
    """It may not have begun its fit."""
    assert how_ended(3) == "ended with exit code 3"


def test_a_rank_that_is_killed_is_replaced_and_one_that_fails_is_not() -> None:
    assert is_replaceable(-signal.SIGKILL)
    assert is_replaceable(exit_codes.HUNG)
    assert not is_replaceable(1)
    assert "SIGKILL" in how_ended(-signal.SIGKILL)
    assert "watchdog" in how_ended(exit_codes.HUNG)  # and no number of which nobody knows what it says
    assert "exit code 3" in how_ended(3)


@pytest.mark.parametrize(
    ("code", "generations"), [(exit_codes.HUNG, [[1, 2]]), (-9, [[1], [2]])], ids=["hung", "killed"]
)
def test_ranks_that_a_watchdog_ends_for_one_hang_are_one_loss(code: int, generations: list[list[int]]) -> None:
    """One of them takes longer to end."""
    ranks = MagicMock()
    ranks.lost_node.return_value = None
    policy = LossPolicy(ranks, 3, 3, 30.0)
    policy.heard(0, "saved", {})
    for rank in range(3):
        policy.heard(rank, "state", {"state": "ready", "generation": 0, "reason": ""})
    policy.ended(1, code)
    policy.step(0.0, True)
    policy.step(0.1, True)
    policy.ended(2, code)
    for now in (0.2, 0.3, 0.4, 0.5):
        policy.step(now, True)
    assert [sorted(call.args[0]) for call in ranks.start.call_args_list] == generations


# -- real ranks --------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"digests": True, "validation": True, "data": "shuffle", "workers": 1, "save_every": 5}


def launched(
    tmp_path: Path,
    ranks: int,
    events: list[dict[str, Any]],
    *more: str,
    meanwhile: Callable[[Path], None] = lambda run_dir: None,
    **options: Any,
) -> tuple[Any, str]:
    options = {**OPTIONS, "trainer": {"devices": ranks}, **options}
    config = make(tmp_path, "disturbed", events=[{"do": "SIGKILL", "once": True, **each} for each in events], **options)
    config["trace"] = str(tmp_path / "trace")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", *more]
    launch += ["--nproc-per-node", str(ranks), "--run-dir", config["run_dir"], *command(config)[1:]]
    output = tmp_path / "output"
    process = start(launch, output)
    try:
        meanwhile(Path(config["run_dir"]))
        code = finish(process, output)
    finally:
        process.kill()
    assert code == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()
    assert not [*differences(config, reference(**options))], output.read_text()
    return config, output.read_text()


def replaced(config: dict[str, Any]) -> list[list[int]]:
    return [event["ranks"] for event in read_ledger(Path(config["run_dir"]) / "ledger") if event["event"] == "replaced"]


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.slow
def test_data_need_not_be_read_again(tmp_path: Path, augment: bool) -> None:
    """Not those of the rank that was lost either: what its workers held is in node memory."""
    events = [{"at": "train", "step": 29, "rank": 1}, {"at": "train", "step": 45, "rank": 0}]
    options = {"validation": False, "workers": 2, "augment": augment, "keeps_nothing": True, "seeded_apart": True}
    _, output = launched(tmp_path, 3, events, "--read-again=if-changed", **options)
    assert output.count("after the loss: only the next one is done again") == 2, output
    assert "Fetching the first" not in output, output


REPLACED: dict[str, tuple[int, list[dict[str, Any]], list[list[int]]]] = {
    "the middle of 3, in a validation": (3, [{"at": "validation", "step": 16, "rank": 1}], [[1]]),
    "rank 0 of 2": (2, [{"at": "train", "step": 13, "rank": 0}], [[0]]),
    "the last of 4, behind a batch": (4, [{"at": "batch_end", "step": 18, "rank": 3}], [[3]]),
    "two of 4 at once": (4, [{"at": "train", "step": 20, "rank": 0}, {"at": "train", "step": 20, "rank": 2}], [[0, 2]]),
    "one after the other": (
        3,
        [{"at": "train", "step": 13, "rank": 1}, {"at": "train", "step": 27, "rank": 0}],
        [[1], [0]],
    ),
}


@pytest.mark.parametrize(
    ("ranks", "events", "lost"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.campaign if number > 1 else ())
        for number, (name, case) in enumerate(REPLACED.items())
    ],
)
@pytest.mark.slow
def test_a_run_with_a_killed_rank_ends_as_the_undisturbed_one(
    tmp_path: Path, ranks: int, events: list[dict[str, Any]], lost: list[list[int]]
) -> None:
    config, output = launched(tmp_path, ranks, events)
    assert sorted(itertools.chain(*replaced(config))) == sorted(itertools.chain(*lost)), output
    ledger = list(read_ledger(Path(config["run_dir"]) / "ledger"))
    assert len({event["pid"] for event in ledger if event["event"] == "start"}) == 1 + any(0 in each for each in lost)
    # What the others wait for a replacement is not what they take to set up, about which there would be advice.
    waited = {
        (event["restart_count"], rank)
        for event in ledger
        if event["event"] == "time_spent"
        for rank, seconds in zip(event["ranks"], event["seconds"].get("rendezvous", []), strict=False)
        if seconds
    }
    for number, ended in enumerate([range(ranks), *replaced(config)]):
        theirs = {rank for count, rank in waited if count == number}
        assert theirs.isdisjoint(ended)
        assert bool(theirs) == (number > 0), output
    assert not [each for each in psutil.process_iter(["cmdline"]) if config["run_dir"] in (each.info["cmdline"] or [])]


@pytest.mark.slow
def test_loaders_that_are_made_anew_in_each_epoch(tmp_path: Path) -> None:
    """Optimizers that ask for the number of steps need them before the epoch is known that is gone on with."""
    options = {"by_length": True, "trainer": {"devices": 2, "reload_dataloaders_every_n_epochs": 1}}
    config, output = launched(tmp_path, 2, [{"at": "train", "step": 29, "rank": 1}], **options)
    assert replaced(config) == [[1]], output
    assert "Restarting all ranks" not in output


@pytest.mark.slow
def test_a_fit_behind_one_that_was_entered_again(tmp_path: Path) -> None:
    """Survivors begin it as new as any process, although it has no checkpoint to go back to."""
    config, output = launched(tmp_path, 2, [{"at": "train", "step": 29, "rank": 1, "fit": 0}], fits=2)
    assert replaced(config) == [[1]], output
    assert "Restarting all ranks" not in output


WAITS = {"at": "train", "step": 13, "within_s": 200.0}


def when_spares_are_ready(run_dir: Path, ranks: set[int], then: Path) -> None:
    """Makes a file when these ranks have spares."""

    def are_ready() -> bool:
        text = "".join(path.read_text() for path in run_dir.glob("logs/launcher-*.log"))
        return all(f"the spare of local rank {rank} is ready" in text for rank in ranks)

    wait_until(are_ready, within_s=200.0)
    then.touch()


def were_warm(config: dict[str, Any], rank: int) -> list[str]:
    """Of every process of a rank, whether it was a spare, as it says."""
    return Path(f"{config['log']}.started.{rank}").read_text().split()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_killed_rank_and_the_next_kill_finds_none(tmp_path: Path) -> None:
    is_ready = tmp_path / "ready"
    events = [{**WAITS, "rank": 0, "after_file": str(is_ready)}, {"at": "train", "step": 14, "rank": 0}]
    config, output = launched(
        tmp_path, 2, events, meanwhile=lambda run_dir: when_spares_are_ready(run_dir, {0}, is_ready)
    )
    assert replaced(config) == [[0], [0]], output
    assert were_warm(config, 0)[:2] == ["cold", "warm"]
    assert len(were_warm(config, 0)) == 3
    assert were_warm(config, 1) == ["cold"]
    assert "the spare of" not in output
    pids = [event["pid"] for event in read_ledger(Path(config["run_dir"]) / "ledger") if event["event"] == "start"]
    assert len(set(pids)) == 3


@pytest.mark.campaign
def test_spares_take_the_places_of_all_ranks_but_one(tmp_path: Path) -> None:
    is_ready = tmp_path / "ready"
    events = [{**WAITS, "rank": rank, "after_file": str(is_ready)} for rank in (0, 2)]

    def meanwhile(run_dir: Path) -> None:
        when_spares_are_ready(run_dir, {0, 1, 2}, tmp_path / "all")
        [start] = [each for each in read_ledger(run_dir / "ledger") if each["event"] == "start"]
        of_rank_0 = [each for each in psutil.Process(start["pid"]).parent().children() if each.environ()["RANK"] == "0"]
        [spare] = [each for each in of_rank_0 if each.pid != start["pid"]]
        spare.kill()
        is_ready.touch()

    config, output = launched(tmp_path, 3, events, meanwhile=meanwhile)
    assert sorted(itertools.chain(*replaced(config))) == [0, 2], output
    assert [were_warm(config, rank) for rank in range(3)] == [["cold", "cold"], ["cold"], ["cold", "warm"]]


@pytest.mark.campaign
def test_a_hung_rank_is_ended_and_replaced(tmp_path: Path) -> None:
    event = {"at": "train", "step": 18, "rank": 1, "do": "SIGSTOP"}
    config, output = launched(tmp_path, 3, [event], "--section-timeouts", "step:5")
    assert replaced(config) == [[1]], output
    [fault] = [each for each in read_ledger(Path(config["run_dir"]) / "ledger") if each["event"] == "fault"]
    assert fault["kind"] == "hang"


@pytest.mark.slow
def test_a_survivor_that_gloo_has_forgotten_ends_and_is_replaced_too(tmp_path: Path) -> None:
    at = {"at": "train", "step": 18}
    config, output = launched(tmp_path, 3, [{**at, "rank": 1}, {**at, "rank": 2, "do": "forgotten"}])
    assert replaced(config) == [[1], [2]], output
    assert "gloo has not told it" in output
    assert "Restarting all ranks" not in output


def in_torch(does: Callable[[], object], folder: str = "distributed") -> None:
    path = os.path.join(os.path.dirname(torch.__file__), folder, "graph.py")
    exec(compile("does()", path, "exec"), {"does": does})


sleeps = partial(time.sleep, 2.0)
computes = partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 5_000_000)  # for seconds, in which other threads go on


@pytest.mark.slow_but_for("in a collective")
@pytest.mark.parametrize(
    ("does", "leaves_after_s", "expected"),
    [
        pytest.param(partial(in_torch, sleeps), math.inf, True, id="in a collective"),
        pytest.param(partial(in_torch, sleeps), 0.9, False, id="in a collective, not for so long"),
        pytest.param(partial(in_torch, sleeps, "autograd"), 0.9, True, id="in a backward pass"),
        pytest.param(partial(in_torch, sleeps), 0.1, False, id="it leaves"),
        pytest.param(partial(in_torch, computes), 1.5, False, id="it computes"),
        pytest.param(sleeps, 1.5, False, id="elsewhere"),
    ],
)
def test_only_a_rank_that_waits_in_torch_has_been_forgotten(
    does: Callable[[], object], leaves_after_s: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "STUCK_AFTER_S", 1.3)
    monkeypatch.setattr(deadlines, "STUCK_IN_BACKWARD_AFTER_S", 0.4)
    since, found = time.monotonic(), list[bool]()

    def watch() -> None:
        found.append(stuck.waits_for_ever(lambda: time.monotonic() > since + leaves_after_s))

    watcher = threading.Thread(target=watch)
    watcher.start()
    does()
    watcher.join()
    assert found == [expected]


@pytest.fixture
def crowded() -> Iterator[None]:
    """All of this process on one core, beside many others that compute."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [Popen([sys.executable, "-ISc", "while True: pass"]) for _ in range(9)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for each in others:
            each.kill()
            each.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
def test_a_rank_that_computes_and_gets_hardly_any_core_has_not_been_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    does = partial(in_torch, partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 1_000_000))
    test_only_a_rank_that_waits_in_torch_has_been_forgotten(does, 1.5, False, monkeypatch)


# -- on an accelerator, whose collectives do not tell that a peer is lost ---------------------------------------------

DEVICE: dict[str, Any] = {"as_on_gpu": {}}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := as_on_gpu.missing()) is not None:
        pytest.skip(reason)
    as_on_gpu.build()
    monkeypatch.setenv("FAKEGPU_COUNT", "3")


@pytest.mark.usefixtures("devices")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "event", "options"),
    [
        pytest.param(3, {"at": "train", "step": 18, "rank": 1}, {}, id="in a step"),
        pytest.param(2, {"at": "validation", "step": 16, "rank": 0}, {}, id="validation", marks=pytest.mark.campaign),
        pytest.param(
            2,
            {"at": "train", "step": 18, "rank": 1},
            {"trainer": {"devices": 2, "precision": "16-mixed"}},
            id="scaled gradients",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_a_rank_is_replaced_whose_peers_wait_in_the_device(
    tmp_path: Path, ranks: int, event: dict[str, Any], options: dict[str, Any]
) -> None:
    config, output = launched(tmp_path, ranks, [event], **{**DEVICE, **options})
    assert replaced(config) == [[event["rank"]]], output
    for rank in range(ranks):
        entered = [json.loads(line) for line in Path(f"{config['run_dir']}.device-{rank}").read_text().splitlines()]
        assert len({pid for pid, _, _ in entered}) == (2 if rank == event["rank"] else 1)
        # What the fit has left had of the device, and registered with it, is free.
        assert [held for _, *held in entered] == [[[], 0], [[], 0]]


@pytest.mark.usefixtures("devices")
@pytest.mark.campaign
def test_a_hung_rank_whose_peers_wait_in_the_device_is_replaced(tmp_path: Path) -> None:
    event = {"at": "train", "step": 18, "rank": 1, "do": "SIGSTOP"}
    config, output = launched(tmp_path, 3, [event], "--section-timeouts", "step:5", **DEVICE)
    assert replaced(config) == [[1]], output


@pytest.mark.usefixtures("devices")
@pytest.mark.campaign
def test_a_survivor_whose_device_is_broken_restarts_all(tmp_path: Path) -> None:
    events = [{"at": "train", "step": 18, "rank": 0, "do": "break_device"}, {"at": "train", "step": 18, "rank": 1}]
    config, output = launched(tmp_path, 2, events, **DEVICE)
    starts = [event for event in read_ledger(Path(config["run_dir"]) / "ledger") if event["event"] == "start"]
    assert len({event["pid"] for event in starts}) == 2, output
    assert "illegal memory access" in output


@pytest.mark.campaign
def test_an_exception_of_the_script_is_raised_and_restarts_all(tmp_path: Path) -> None:
    config, output = launched(tmp_path, 3, [{"at": "train", "step": 18, "rank": 1, "do": "raise"}])
    assert replaced(config) == [], output
    assert "RuntimeError: on purpose" in output


@pytest.mark.campaign
def test_a_rank_that_dies_before_the_first_save_restarts_all(tmp_path: Path) -> None:
    config, output = launched(tmp_path, 2, [{"at": "train", "step": 2, "rank": 1}])
    assert replaced(config) == [], output


# What was done with the state of the last boundary after each loss: the step that was saved, or None where it was not
# known, and all went back.
LAST_BOUNDARY: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[int | None]]] = {
    "forward and backward, BatchNorm, rank 0 too": (
        {"trainer": {"devices": 2, "gradient_clip_val": 0.5}, "batch_norm": True},
        [{"at": "train", "step": 12, "rank": 1}, {"at": "backward", "step": 18, "rank": 0}],
        [12, 18],
    ),
    "survivors that differ by a step": (
        {"trainer": {"devices": 3}, "batch_norm": True, "workers": 0, "seeded_apart": True},
        [
            # Killed within the optimizer's step; one has not finished its reduction, and one goes on to the next step.
            {"at": "reduced", "step": 12, "rank": 2, "do": "lose_peer"},
            {"at": "optimizer", "step": 12, "rank": 1},
            {"at": "reduced", "step": 23, "rank": 0, "do": "lose_peer"},
            {"at": "batch_end", "step": 23, "rank": 2},
        ],
        [12, 23],
    ),
    "survivors that come to the boundary after the loss, one of two and both": (
        {"trainer": {"devices": 3}, "batch_norm": True, "seeded_apart": True},
        [
            {"at": "batch_end", "step": 11, "rank": 2, "do": "sleep", "seconds": 1.0},
            {"at": "train", "step": 12, "rank": 1},
            *({"at": "batch_end", "step": 21, "rank": rank, "do": "sleep", "seconds": 1.0} for rank in (1, 2)),
            {"at": "train", "step": 22, "rank": 0},
        ],
        [12, 22],
    ),
    "in a local save and in one of the run": (
        {"trainer": {"devices": 3}, "batch_norm": True, "seeded_apart": True, "save_every": 10},
        [{"at": "capture", "step": 13, "rank": 1}, {"at": "capture", "step": 29, "rank": 0}],
        [14, 30],
    ),
    "accumulation and an average, then a validation and the end of an epoch": (
        {
            "trainer": {"devices": 2, "accumulate_grad_batches": 2},
            "lightning_callbacks": {"EMAWeightAveraging": {"decay": 0.9}},
        },
        [
            {"at": "train", "step": 13, "rank": 1},
            {"at": "backward", "step": 18, "rank": 0},
            {"at": "validation", "step": 16, "rank": 1},
            {"at": "epoch_end", "step": 1, "rank": 0},
        ],
        [6, 9, None, None],
    ),
    "behind a batch, in an optimizer's step, two at once": (
        {"trainer": {"devices": 3}, "batch_norm": True, "workers": 0},
        [
            {"at": "train", "step": 9, "rank": 1},
            {"at": "train", "step": 9, "rank": 0},
            {"at": "batch_end", "step": 22, "rank": 2},
            {"at": "optimizer", "step": 30, "rank": 1},
        ],
        [9, None, None],
    ),
}


@pytest.mark.parametrize(
    ("options", "events", "saved"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.campaign if number > 2 else ())
        for number, (name, case) in enumerate(LAST_BOUNDARY.items())
    ],
)
@pytest.mark.slow
def test_the_last_boundary_is_saved_after_a_loss(
    tmp_path: Path, options: dict[str, Any], events: list[dict[str, Any]], saved: list[int | None]
) -> None:
    callbacks = ["preemption", "auto_resume", "local_checkpoint"]
    options = {"keeps_nothing": True, "callbacks": callbacks, "local": {"every_n_train_steps": 7}, **options}
    ranks = options["trainer"]["devices"]
    config, output = launched(tmp_path, ranks, events, "--in-job-restarts", "9", **options)
    lines = list(read_ledger(Path(config["run_dir"]) / "ledger"))
    found: list[int | None] = []
    last = None
    for event in lines:
        if event["event"] == "saved" and event["reason"] == "after a loss":
            last = event
        elif event["event"] == "resumed":
            assert last is None or (event["step"], event["generation"]) == (last["step"], last["generation"])
            found.append(None if last is None else last["step"])
            last = None
    assert found == saved, output
    if ranks == 2 and None not in saved:
        read = [json.loads(line) for path in tmp_path.glob("trace.*") for line in path.read_text().splitlines()]
        by_process = Counter(each[1] for each in read if each[0] == "shard" and each[2].startswith("common"))
        # Each rank that takes the place of a lost one reads the two shares; the other one has what is in them.
        assert [*by_process.values()] == [2] * len(saved), read
    kills = sum(event.get("do", "SIGKILL") == "SIGKILL" for event in events)
    assert len(saved) <= len(replaced(config)) <= kills, output  # who is killed together may be lost together


@pytest.mark.slow
def test_the_connections_that_are_cut_at_a_loss_are_known_whatever_gloo_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those made at the first use would not be: only neighbours of the lost rank would leave the step."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text("""
import os, signal
import lightning.pytorch as L
import numpy as np
from lightning.pytorch.demos.boring_classes import BoringModel
class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if (self.global_step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (12, "1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
L.Trainer(max_steps=16, devices=4, accelerator="cpu", strategy="ddp", limit_val_batches=0, **quiet).fit(Model())
""")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--nproc-per-node=4"]
    assert finish(start([*launch, f"--run-dir={tmp_path / 'run'}", str(script)], output), output) == 0
    assert "Lost rank 1" in output.read_text()
    assert "Resuming from step 12" in output.read_text()


ENTERED_AGAIN = {
    "drawn in configure_model": """
    def configure_model(self):
        self.register_buffer("scale", torch.rand(2), persistent=False)
""",
    "hooks that setup adds": """
    def setup(self, stage):
        self.scale = 1.0
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)
        self.layer.register_forward_hook(lambda layer, inputs, output: output * 0.5)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ENTERED_AGAIN)
def test_what_the_script_does_before_the_training_is_the_same_in_a_survivor(tmp_path: Path, what: str) -> None:
    """It is drawn again, or all ranks are restarted."""
    script, weights = tmp_path / "train.py", {}
    script.write_text(f"""
import os, signal, sys
import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
class Model(BoringModel):
    {ENTERED_AGAIN[what]}
    def training_step(self, batch, batch_idx):
        at = self.global_step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        if at == (12, "1", "0") and sys.argv[1] == "disturbed":
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.layer(batch) * self.scale).pow(2).mean()
quiet = {{"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}}
torch.manual_seed(7)
module = Model()
L.Trainer(max_steps=16, devices=2, accelerator="cpu", strategy="ddp", limit_val_batches=0, **quiet).fit(module)
torch.save((module.layer.weight, module.scale), sys.argv[2] + os.environ["RANK"])
""")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--nproc-per-node=2"]
    for name in ("disturbed", "undisturbed"):
        output = tmp_path / f"output of {name}"
        command = [*launch, f"--run-dir={tmp_path / name}", str(script), name, str(tmp_path / f"{name} weights ")]
        assert finish(start(command, output), output) == 0, output.read_text()
        weights[name] = [torch.load(tmp_path / f"{name} weights {rank}") for rank in range(2)]
    for ours, theirs in zip(*weights.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ours, theirs, strict=True))
    text = (tmp_path / "output of disturbed").read_text()
    assert "starting a replacement" in text
    assert ("cannot go back: entering the fit again has changed how many hooks layer has" in text) == ("hooks" in what)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, "train", 12), (0, "backward", 13), (1, "train", 17)], id="twice before the logger writes"),
        pytest.param(
            [(0, "train", 10), (0, "backward", 11), (0, "train", 20), (1, "backward", 31), (0, "train", 44)],
            id="behind a row of Lightning's, and in other epochs",
            marks=pytest.mark.campaign,
        ),
    ],
)
@pytest.mark.slow
def test_rows_that_rank_0_had_not_written_are_in_its_logs_once(
    tmp_path: Path, kills: list[tuple[int, str, int]]
) -> None:
    pytest.importorskip("tensorboard")
    callbacks = ["preemption", "auto_resume", "local_checkpoint"]
    options = {"keeps_nothing": True, "callbacks": callbacks, "loggers": ["CSVLogger", "TensorBoardLogger"]}
    events = [{"at": at, "step": step, "rank": rank} for rank, at, step in kills]
    config, output = launched(
        tmp_path, 2, events, "--in-job-restarts", "9", local={"every_n_train_steps": 7}, validation=False, **options
    )
    lines = list(read_ledger(Path(config["run_dir"]) / "ledger"))
    saved = [each["step"] for each in lines if each["event"] == "saved" and each["reason"] == "after a loss"]
    assert saved == [step for _, _, step in kills], output
    of_reference = reference(**{**OPTIONS, "trainer": {"devices": 2}, "validation": False, **options})
    ours, theirs = (Path(each["run_dir"]).parent for each in (config, of_reference))
    assert test_logs.rows(ours) == test_logs.rows(theirs)
    assert test_logs.of_the_training(test_logs.shown(ours)) == test_logs.of_the_training(test_logs.shown(theirs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharded", "lost"),
    [
        pytest.param(4, "hybrid", [1], id="2 replicas of 2 shards"),
        pytest.param(2, True, [0], id="2 shards", marks=pytest.mark.campaign),
        pytest.param(6, "hybrid", [2, 3], id="3 replicas of 2 shards, one lost", marks=pytest.mark.campaign),
    ],
)
def test_ranks_with_shards_are_replaced(tmp_path: Path, ranks: int, sharded: Any, lost: list[int]) -> None:
    """All go back to a local checkpoint, since these are not in node memory, and the others keep their processes."""
    options: dict[str, Any] = {
        "trainer": {"devices": ranks},
        "sharded": sharded,
        "data_parallel": ranks // 2 if sharded == "hybrid" else None,
        "save_every": 1000,
        "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
        "step_s": 0.05,
    }
    events = [{"at": "train", "step": 24, "rank": rank, "do": "SIGKILL", "once": True} for rank in lost]
    local = {"every_n_train_steps": 4, "dir": str(tmp_path / "local")}
    config = make(tmp_path, "disturbed", events=events, local=local, **options)
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic"]
    launch += ["--nproc-per-node", str(ranks), "--run-dir", config["run_dir"], *command(config)[1:]]
    output = tmp_path / "output"
    assert finish(start(launch, output), output) == 0, output.read_text()
    assert replaced(config) == [lost], output.read_text()
    starts = [each for each in read_ledger(Path(config["run_dir"]) / "ledger") if each["event"] == "start"]
    assert len({each["pid"] for each in starts}) == 1 + (0 in lost)
    assert "(local checkpoint" in output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()


@pytest.mark.slow
def test_ranks_whose_gradients_are_compressed_with_a_state_are_restarted(tmp_path: Path) -> None:
    """PowerSGD counts iterations, and communicates something else from the one on at which it starts."""
    options: dict[str, Any] = {**OPTIONS, "trainer": {"devices": 2}, "ddp": {"hook": "powersgd"}}
    event = {"at": "train", "step": 18, "rank": 1, "do": "SIGKILL", "once": True}
    config = make(tmp_path, "run", events=[event], **options)
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--nproc-per-node=2"]
    output = tmp_path / "output"
    assert finish(start([*launch, "--run-dir", config["run_dir"], *command(config)[1:]], output), output) == 0
    assert replaced(config) == []
    assert "a communication hook of DDP keeps a state, which a replacement would not have" in output.read_text()


@pytest.mark.slow
def test_a_stop_that_was_asked_of_a_rank_is_not_forgotten_when_it_is_lost(tmp_path: Path) -> None:
    """As by a daemon that frees memory, with SIGTERM and soon SIGKILL: the others know, and stop when it is back."""
    options, output = {**OPTIONS, "trainer": {"devices": 2}}, tmp_path / "output"
    event = {"at": "train", "step": 18, "rank": 1, "once": True}
    events = [{**event, "do": "SIGTERM"}, {**event, "after_s": 1.0, "do": "SIGKILL"}]
    config = make(tmp_path, "disturbed", events=events, **options)
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--nproc-per-node=2"]
    launch += ["--run-dir", config["run_dir"], *command(config)[1:]]
    assert finish(start(launch, output), output) == 75, output.read_text()
    assert replaced(config) == [[1]], output.read_text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert (outcome.status, outcome.step) == ("interrupted", 15)
    assert finish(start(launch, output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


def with_a_rank_replaced(tmp: Path, options: dict[str, Any]) -> tuple[dict[str, Any], list[str], Popen[str]]:
    """A launch of 3 ranks in which rank 1 is being replaced."""
    event = {"at": "train", "step": 18, "rank": 1, "do": "SIGKILL", "once": True}
    config = make(tmp, "disturbed", events=[event], **options)
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic"]
    launch += ["--nproc-per-node", "3", "--run-dir", config["run_dir"], *command(config)[1:]]
    output = tmp / "output"
    process = start(launch, output)
    wait_until(lambda: replaced(config) == [[1]], output.read_text)
    return config, launch, process


@pytest.mark.campaign
def test_a_stop_while_a_rank_is_replaced_saves(tmp_path: Path) -> None:
    options, output = {**OPTIONS, "trainer": {"devices": 3}}, tmp_path / "output"
    config, launch, process = with_a_rank_replaced(tmp_path, options)
    process.send_signal(signal.SIGTERM)
    assert finish(process, output) == 75, output.read_text()
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "interrupted"  # the fit's own word: it has saved when the ranks were together again
    assert outcome.step is not None
    assert outcome.step >= 15
    assert finish(start(launch, output), output) == 0, output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


@pytest.mark.campaign
def test_a_rank_that_dies_while_it_waits_for_a_replacement_is_replaced_too(tmp_path: Path) -> None:
    options, output = {**OPTIONS, "trainer": {"devices": 3}}, tmp_path / "output"
    config, _, process = with_a_rank_replaced(tmp_path, options)
    [first, *_] = [each for each in read_ledger(Path(config["run_dir"]) / "ledger") if each["event"] == "start"]
    os.kill(first["pid"], signal.SIGKILL)  # rank 0
    assert finish(process, output) == 0, output.read_text()
    assert replaced(config) == [[1], [0]], output.read_text()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)
