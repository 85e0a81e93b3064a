"""A rank that has gone: the others are ended, though nothing reaches them, and it is said which rank it was and how."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lightning_resilience._files import write_json
from lightning_resilience.detect.hangs import deaths, watchdog
from lightning_resilience.detect.hangs.deaths import Death, ExitWatcher, MemoryShortage, has_active_thread, is_ending
from lightning_resilience.detect.hangs.process_probe import Usage
from lightning_resilience.detect.hangs.watchdog import Watchdog
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import Ranks, result, samples
from tests.ledgers import events_of, read_ledger
from tests.test_exact_resume import undisturbed
from tests.test_fault_tolerance import events, eventually, nothing_left, ours, watched
from tests.test_launchers import finish, start, torchrun

TRAINER = {"devices": 2}
BLOCKED = {"at": "train", "step": 20, "rank": 0, "do": "block", "once": True}
"""As NCCL's survivors are: in C, where neither an exception nor a signal's Python handler gets."""


# -- what the kernel tells ---------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[Callable[[str], int]]:
    """Starts Python code in a process of its own, and says its number."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", f"import os, signal, time; {code}"]))
        return started[-1].pid

    yield run
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "was killed by signal 35"),
    ],
)
def test_how_a_process_ended_is_known_to_others_than_its_parent(
    child: Callable[[str], int], code: str, said: str
) -> None:
    pid, exits = child(f"time.sleep(0.2); {code}"), ExitWatcher()
    exits.add(pid)
    assert not is_ending(pid)
    began = time.monotonic()
    while not is_ending(pid):
        exits.wait(20)
    assert time.monotonic() - began < 10, "its end has woken nobody"
    assert str(Death(exits.status(pid))) == said
    exits.wait(0.01)  # and it wakes nobody again


def test_a_process_that_nobody_can_tell_of_has_died() -> None:
    assert ExitWatcher().status(2**22 + 1) is None
    assert str(Death(None)) == "died"
    assert Death(None).is_from_outside
    assert str(Death(signal.SIGKILL, out_of_memory=True)) == "was killed by SIGKILL: the kernel was out of memory"
    assert not Death(signal.SIGKILL, out_of_memory=True).is_from_outside
    assert not Death(signal.SIGSEGV).is_from_outside
    assert not Death(3 << 8).is_from_outside


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/step/memory.events"),
        ("4:memory:/job\n0::/", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("0::/../elsewhere", "proc/vmstat"),
    ],
)
def test_the_kernels_counters_of_killed_processes(tmp_path: Path, cgroup: str, counter: str) -> None:
    files = {f"proc/{os.getpid()}/cgroup": cgroup, "proc/vmstat": "nr_free_pages 5\noom_kill 3\n"}
    for name, text in {**files, counter: "low 0\noom_kill 7\noom_group_kill 0\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shortage = MemoryShortage(os.getpid(), tmp_path)
    assert not shortage.is_recent()
    (tmp_path / counter).write_text("low 0\noom_kill 8\noom_group_kill 0\n")
    assert shortage.is_recent()
    assert not MemoryShortage(os.getpid(), tmp_path / "nothing").is_recent()
    shortage = MemoryShortage(os.getpid(), tmp_path)
    (tmp_path / counter).unlink()
    assert not shortage.is_recent()  # its cgroup has gone, as it does with the job


def test_each_rank_may_have_a_cgroup_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm makes them for the tasks of a step."""
    for rank in (0, 1):
        write_json(tmp_path / f"rank-{rank}.json", {"rank": rank, "pid": os.getpid() - rank})
        (tmp_path / f"rank-{rank}.progress").touch()
        (tmp_path / f"{os.getpid() - rank}").write_text("oom_kill 0\n")
    monkeypatch.setattr(deaths, "_counters", lambda pid, root: [tmp_path / str(pid)])
    node = Watchdog(tmp_path)
    node._find_ranks()
    (tmp_path / f"{os.getpid() - 1}").write_text("oom_kill 1\n")
    assert [node._death_of(node.ranks[rank]).out_of_memory for rank in (0, 1)] == [False, True]


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A cgroup in which 64 MB are the limit."""
    for limit, base in (("memory.max", "/sys/fs/cgroup"), ("memory.limit_in_bytes", "/sys/fs/cgroup/memory")):
        group = Path(base) / f"lightning-resilience-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                if (group / limit).exists():
                    (group / limit).write_text(str(64_000_000))
                    with suppress(OSError):
                        (group / "memory.swap.max").write_text("0")
                    yield group
                    return
            finally:
                group.rmdir()
    pytest.skip("no cgroup can be made here")


def test_a_process_for_which_the_memory_did_not_suffice(child: Callable[[str], int], little_memory: Path) -> None:
    pid, exits = child("time.sleep(0.5); kept = b'x' * 10**9"), ExitWatcher()
    (little_memory / "cgroup.procs").write_text(str(pid))
    shortage = MemoryShortage(pid)
    exits.add(pid)
    exits.wait(20)
    death = Death(exits.status(pid), shortage.is_recent())
    assert str(death) == "was killed by SIGKILL: the kernel was out of memory"
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("status", "is_loss"),
    [
        (None, False),
        (0, False),
        (3 << 8, True),
        (signal.SIGKILL, True),
        (signal.SIGSEGV, True),
        (signal.SIGTERM, False),
    ],
)
def test_which_deaths_are_losses(status: int | None, is_loss: bool) -> None:
    assert Death(status).is_loss == is_loss


def test_threads_that_run_are_told_from_those_that_sleep(child: Callable[[str], int], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    sleeps = child(f"open({str(ready)!r}, 'w').close(); time.sleep(60)")
    while not ready.exists() or has_active_thread(sleeps):
        time.sleep(0.01)
    computes = child("import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()")
    while not has_active_thread(computes):
        time.sleep(0.01)
    assert not has_active_thread(2**22 + 1)


class Survivor(NamedTuple):
    """A rank whose peer is lost, as far as that matters."""

    pid: int = 1
    section: str = "step"


@pytest.mark.parametrize(
    ("cpu_s", "written", "active", "section", "limit"),
    [
        (0.0, 0, False, "step", "CHECK_SURVIVORS_EVERY_S"),
        (9.0, 0, False, "step", "PEERS_RAISE_WITHIN_S"),
        (0.0, 0, True, "step", "PEERS_RAISE_WITHIN_S"),
        (0.0, 10**7, False, "step", "SURVIVORS_SAVE_WITHIN_S"),
        (0.0, 0, False, "checkpointing", "SURVIVORS_SAVE_WITHIN_S"),
    ],
    ids=["waits", "computes", "runs", "writes", "saves"],
)
def test_how_long_a_survivor_gets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_s: float,
    written: int,
    active: bool,
    section: str,
    limit: str,
) -> None:
    """By a clock that only sleep moves."""
    now, looks, ended = [0.0], [0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))

    def usage(pid: int) -> Usage:
        looks[0] += 1
        return Usage(cpu_s * looks[0], 0, written * looks[0])

    node, rank = Watchdog(tmp_path), Survivor(section=section)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "usage", usage)
    monkeypatch.setattr(watchdog, "has_active_thread", lambda pid: active)
    monkeypatch.setattr(node, "_survivors", lambda among: [] if ended else [rank])
    monkeypatch.setattr(node, "_end_ranks", lambda ranks, why: ended.append(now[0]))
    node._end_survivors("rank 1", deadlines.PEERS_RAISE_WITHIN_S)
    assert 0 <= ended[0] - getattr(deadlines, limit) <= deadlines.CHECK_SURVIVORS_EVERY_S + 1e-6


# -- real ranks --------------------------------------------------------------------------------------------------------


def ended(config: dict[str, Any]) -> dict[str, Any]:
    """The one fault of a rank that died."""
    (died,) = [fault for fault in events(config, "fault") if fault["kind"] == "died"]
    return died


def dies(tmp: Path, do: str, step: int = 20, **options: Any) -> dict[str, Any]:
    death = {"at": "train", "step": step, "rank": 1, "do": do, "after_s": 0.3, "once": True}
    return watched(tmp, limits="step:180", trainer=TRAINER, events=[BLOCKED, death], **options)


@pytest.mark.slow_but_for("exit-3-exit code 3")
@pytest.mark.parametrize(("do", "code", "how"), [("SIGKILL", -9, "was killed by SIGKILL"), ("exit", 3, "exit code 3")])
def test_the_survivors_of_a_dead_rank_are_ended_and_it_is_named(tmp_path: Path, do: str, code: int, how: str) -> None:
    config = dies(tmp_path, do)
    ranks = Ranks(config, tmp_path / "run")
    codes = ranks.wait(60, kill_rest=False)
    assert codes == [exit_codes.HUNG, code], ranks.text()
    nothing_left(config)  # the watchdog has said all it has to say
    died = ended(config)
    assert (died["rank"], died["step"], died["section"]) == (1, 20, "step")
    assert re.fullmatch(f"rank 1 .*{how}.*", died["reason"])
    assert (died["signal"], died["exit_code"]) == (("SIGKILL", None) if code < 0 else (None, code))
    said = ranks.text()
    pid = ranks.processes[1].pid
    assert re.search(rf"\] At step 20 \(section step\) rank 1 \(.+, pid {pid}\) .*{how}.*\.", said)
    assert re.search(rf"Ended 1 rank of .+, blocked without rank 1 of .+, which .*{how}", said)


def test_the_survivors_of_a_failed_rank_are_ended(tmp_path: Path) -> None:
    config = dies(tmp_path, "raise")
    ranks = Ranks(config, tmp_path / "run")
    assert ranks.wait(60, kill_rest=False) == [exit_codes.HUNG, 1], ranks.text()
    nothing_left(config)
    assert [(fault["rank"], fault["kind"]) for fault in events(config, "fault")] == [(1, "RuntimeError")]
    assert re.search("Ended 1 rank of .+, blocked without rank 1 of .+, which has failed", ranks.text())


@pytest.mark.campaign
def test_a_rank_whose_callbacks_take_long_over_an_error_of_all_is_no_survivor(tmp_path: Path) -> None:
    """It uploads a report, say, before our callback is told."""
    error = {"at": "train", "step": 20, "do": "raise"}
    upload = {"at": "exception", "rank": 0, "do": "sleep", "seconds": 9.0}
    callbacks = ["user", "fault_tolerance", "auto_resume"]
    config = watched(tmp_path, limits="step:180", trainer=TRAINER, callbacks=callbacks, events=[error, upload])
    ranks = Ranks(config, tmp_path / "run")
    assert ranks.wait(60, kill_rest=False) == [1, 1], ranks.text()
    nothing_left(config)
    assert "Ended" not in ranks.text()
    assert [fault["kind"] for fault in events(config, "fault")] == ["RuntimeError"] * 2


def test_a_survivor_that_notices_ends_by_itself(tmp_path: Path) -> None:
    """gloo's raise: what they have to say is recorded, and nobody ends them."""
    death = {"at": "train", "step": 20, "rank": 1, "do": "SIGKILL", "once": True}
    config = watched(tmp_path, trainer=TRAINER, events=[death])
    ranks = Ranks(config, tmp_path / "run")
    assert ranks.wait(60, kill_rest=False) == [1, -signal.SIGKILL], ranks.text()
    nothing_left(config)
    assert sorted(fault["rank"] for fault in events(config, "fault")) == [0, 1]
    assert ended(config)["rank"] == 1
    assert "Ended 1 rank" not in ranks.text()


def test_ranks_that_one_hand_ends_have_not_failed(tmp_path: Path) -> None:
    config = watched(tmp_path, trainer=TRAINER, events=[{"at": "train", "step": 20, "do": "block", "once": True}])
    ranks = Ranks(config, tmp_path / "run")
    eventually(lambda: any(event["step"] == 20 for event in events(config, "saved")), ranks)
    # Not in a collective before it, from which the death of the other would be raised.
    eventually(lambda: len([*Path(config["run_dir"]).parent.glob("*.event0-*")]) == 2, ranks)
    ranks.kill(signal.SIGKILL)
    assert ranks.wait(60, kill_rest=False) == [-signal.SIGKILL] * 2
    nothing_left(config)
    assert not events(config, "fault")
    (killed,) = events(config, "killed")  # but how far they had got is known, and what has ended them
    assert (killed["step"], killed["signal"]) == (20, "SIGKILL")
    assert killed["reason"] == f"rank {killed['rank']} (pid {killed['worker']}) was killed by SIGKILL"
    begun = {"event": "resumed", "fit": 0, "step": 15, "time": time.time()}
    (interruption,) = interruptions(events_of([*read_ledger(RunDirectory(config["run_dir"]).ledger), begun]))
    assert (interruption.steps_lost, interruption.is_reached_known) == (5, True)
    assert interruption.reason == killed["reason"]


@pytest.mark.campaign
@pytest.mark.nvrx
def test_under_launch_the_dead_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    config = dies(tmp_path, "SIGKILL", callbacks=[])
    output, limits = tmp_path / "output", ("--section-timeouts", "setup:60,step:180,checkpointing:30")
    assert finish(start(ours(config, *limits), output), output) == 0, output.read_text()
    assert "Restart 1 inside the job" in output.read_text()
    assert "Before: rank 1 was killed by SIGKILL." in output.read_text()
    assert "Ended 1 rank" in output.read_text(), "the elastic launcher had to end the survivor"
    assert ended(config)["rank"] == 1
    assert (result(config), samples(config)) == undisturbed(tmp_path, trainer=TRAINER)
    nothing_left(config)


@pytest.mark.slow
@pytest.mark.nvrx
def test_under_launch_a_rank_that_sleeps_before_its_fit_is_ended_when_another_one_dies(tmp_path: Path) -> None:
    script, run, output = tmp_path / "script.py", tmp_path / "run", tmp_path / "output"
    script.write_text(
        "import os, signal, sys, time\n"
        "from lightning_resilience.detect.hangs.abandoned import read_beat\n"
        "from lightning_resilience.detect.hangs.rank_probe import probe_of_worker\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0': sys.exit()\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('asleep', 'w').close()\n"
        "    time.sleep(600)\n"
        "node, beats = probe_of_worker().directory, set()\n"
        "while not os.path.exists('asleep') or len(beats) < 2:  # the watchdog has looked at both\n"
        "    time.sleep(0.05)\n"
        "    if (node / 'watchdog.json').exists(): beats.add(read_beat(node))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--run-dir", str(run)]
    with open(output, "w") as file:
        launch = subprocess.run([*command, "--nproc-per-node=2", "script.py"], cwd=tmp_path, stdout=file, stderr=file)
    said = output.read_text()
    assert launch.returncode == 0, said
    assert "useless without rank 1 of" in said, "the elastic launcher had to kill the survivor"
    assert "Before: rank 1 was killed by SIGKILL." in said
    (died,) = [event for event in read_ledger(RunDirectory(run).ledger) if event["event"] == "fault"]
    assert (died["kind"], died["rank"], died["signal"], died["section"]) == ("died", 1, "SIGKILL", "start")


@pytest.mark.campaign
def test_under_torchrun_the_dead_rank_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dies(tmp_path, "SIGKILL")
    output = tmp_path / "output"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with_restarts = torchrun(config)
    with_restarts.insert(with_restarts.index("--nproc-per-node"), "--max-restarts=1")
    assert finish(start(with_restarts, output), output) == 0, output.read_text()
    assert "Ended 1 rank" in output.read_text(), "the elastic launcher had to end the survivor"
    assert ended(config)["rank"] == 1
    assert (result(config), samples(config)) == undisturbed(tmp_path, trainer=TRAINER)
    nothing_left(config)
