"""Whether generations fit, on machines that are made up, and how often to save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_resilience._formatting import format_bytes
from lightning_resilience.checkpoint import capacity
from lightning_resilience.checkpoint.capacity import available_bytes, check, in_node_memory, needed_bytes
from lightning_resilience.run.save_interval import (
    chosen_interval_s,
    growing_interval_s,
    mean_time_to_failure_s,
    optimal_interval_s,
)

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"


class Machine:
    """The files of a made-up ``/proc`` and of its control groups."""

    def __init__(self, folder: Path, available: int | None = 100 * GIB) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "cgroup fs"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir(parents=True)
        self.mounts = ["garbage", "22 27 0:21 / /proc rw,relatime - proc proc rw"]
        self.memberships: list[str] = []
        if available is not None:
            (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\nx: 1 kB\n")

    def mount(self, kind: str, device: str, place: Path, root: str = "/", options: str = "rw") -> None:
        escaped = str(place).replace(" ", "\\040")
        self.mounts.append(f"31 23 {device} {root} {escaped} rw,nosuid shared:7 master:1 - {kind} none {options}")
        (self.proc / "self" / "mountinfo").write_text("\n".join(self.mounts) + "\n")

    def member(self, line: str) -> None:
        self.memberships.append(line)
        (self.proc / "self" / "cgroup").write_text("\n".join(self.memberships) + "\n")

    def group(self, path: str, **values: object) -> Path:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")
        return folder

    def memory(self) -> capacity.Room:
        return available_bytes("/", self.proc).memory


def unified(tmp_path: Path, path: str, root: str = "/") -> Machine:
    machine = Machine(tmp_path)
    machine.mount("cgroup2", "0:41", machine.groups, root)
    machine.member(f"0::{path}")
    return machine


def first_version(tmp_path: Path, path: str, root: str = "/") -> Machine:
    machine = Machine(tmp_path)
    machine.mount("cgroup", "0:40", machine.groups / "cpu", "/", "rw,cpu")
    machine.mount("cgroup", "0:41", machine.groups, root, "rw,memory")
    machine.mount("cgroup2", "0:42", machine.groups / "unified")
    for line in ("9:name=systemd:/elsewhere", "5:cpu,cpuacct:/cpus", f"4:memory:{path}", "0::/"):
        machine.member(line)
    return machine


# Memory


def test_without_limits_it_is_what_the_node_has(tmp_path: Path) -> None:
    machine = unified(tmp_path, "/job/step")
    machine.group("job/step", max="max", high="max", current=5 * GIB, stat="inactive_file 1\nactive_file 1")
    assert machine.memory() == capacity.Room(100 * GIB, "the memory that this node has available")


def test_nothing_known_is_no_limit(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=None)
    assert machine.memory().nbytes >= 1 << 60
    assert not in_node_memory("/", machine.proc)
    check(tmp_path, 1, 2, proc=machine.proc)


@pytest.mark.parametrize("strictest", ["job", "job/step", "job/step/task"])
def test_each_group_above_counts(tmp_path: Path, strictest: str) -> None:
    """Slurm limits the job, the scheduler of a cloud the container, systemd the user."""
    machine = unified(tmp_path, "/job/step/task")
    for group in ("job", "job/step", "job/step/task"):
        limit = 10 if group == strictest else 50
        machine.group(group, max=limit * GIB, high="max", current=4 * GIB, stat="anon 5\nfile 7")
    room = machine.memory()
    assert room.nbytes == 6 * GIB
    assert str(machine.groups / strictest) in room.limit
    assert "10.0 GiB" in room.limit


def test_the_cache_of_files_is_not_in_the_way(tmp_path: Path) -> None:
    """A job that has read its data has used all of its limit; shared memory, though, is not given up."""
    machine = unified(tmp_path, "/job")
    stat = f"anon 1\nfile {7 * GIB}\nshmem {3 * GIB}\ninactive_anon 9\ninactive_file {3 * GIB}\nactive_file {GIB}"
    machine.group("job", max=8 * GIB, current=8 * GIB, stat=stat)
    assert machine.memory().nbytes == 4 * GIB
    machine.group("job", max=8 * GIB, current=9 * GIB, stat="inactive_file 0")
    assert machine.memory().nbytes == 0
    machine.group("job", max=8 * GIB, current=GIB, stat=stat)  # read at different moments
    assert machine.memory().nbytes == 8 * GIB


def test_a_group_that_is_slowed_down(tmp_path: Path) -> None:
    machine = unified(tmp_path, "/job")
    machine.group("job", max=50 * GIB, high=20 * GIB, current=GIB, stat="")
    assert machine.memory().nbytes == 19 * GIB


@pytest.mark.parametrize(
    ("path", "root"), [("/", "/"), ("/docker/1234", "/docker/1234"), ("/../..", "/"), ("/x", "/y")]
)
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, path: str, root: str) -> None:
    machine = unified(tmp_path, path, root)
    machine.group("", max=9 * GIB, current=GIB, stat="")
    for name in ("memory.max", "memory.current"):  # above the groups
        (tmp_path / name).write_text("0\n")
    assert machine.memory().nbytes == 8 * GIB


def test_a_group_in_a_container(tmp_path: Path) -> None:
    machine = unified(tmp_path, "/docker/1234/job", "/docker/1234")
    machine.group("", max=9 * GIB, current=GIB, stat="")
    machine.group("job", max=6 * GIB, current=GIB)  # no statistics
    assert machine.memory().nbytes == 5 * GIB
    other = (
        unified(tmp_path / "other", "/docker/12345", "/docker/1234") if (tmp_path / "other").mkdir() is None else None
    )
    assert other is not None
    other.group("", max=9 * GIB, current=GIB, stat="")
    other.group("5", max=1, current=0, stat="")  # not what the name of our group ends with
    assert other.memory().nbytes == 8 * GIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    machine = first_version(tmp_path, "/slurm/uid_1/job_2/step_0")
    for group in ("", "slurm", "slurm/uid_1", "slurm/uid_1/job_2/step_0"):
        machine.group(group, limit_in_bytes=NO_LIMIT, usage_in_bytes=7 * GIB, stat="")
    stat = f"inactive_file {GIB}\nactive_file 0\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}"
    machine.group("slurm/uid_1/job_2", limit_in_bytes=16 * GIB, usage_in_bytes=7 * GIB, stat=stat)
    machine.group("elsewhere", limit_in_bytes=1, usage_in_bytes=0, stat="")
    machine.group("cpus", limit_in_bytes=1, usage_in_bytes=0, stat="")
    machine.group("unified/cpus", max=1, current=0, stat="")
    machine.group("cpu", limit_in_bytes=1, usage_in_bytes=0, stat="")
    assert machine.memory().nbytes == 12 * GIB


def test_the_first_version_in_a_container(tmp_path: Path) -> None:
    machine = first_version(tmp_path, "/docker/1234", "/docker/1234")
    machine.group("", limit_in_bytes=3 * GIB, usage_in_bytes=GIB, stat="total_inactive_file 0")
    assert machine.memory().nbytes == 2 * GIB


@pytest.mark.parametrize("damage", ["x", "", "-1", "1e9", "max\nmax"])
def test_files_that_say_something_else(tmp_path: Path, damage: str) -> None:
    machine = unified(tmp_path, "/job")
    machine.group("job", max=damage, current=GIB, stat=damage)
    machine.member("garbage")
    assert machine.memory().nbytes == 100 * GIB
    machine.group("job", max=GIB, current=damage, stat=damage)
    assert machine.memory().nbytes == 100 * GIB


def test_this_machine() -> None:
    found = available_bytes(Path.cwd())
    assert found.memory.nbytes > 0
    assert found.files.nbytes >= 0
    if os.path.isdir("/dev/shm"):
        shared = available_bytes("/dev/shm/never-made/fit-000")
        assert shared.in_memory == in_node_memory("/dev/shm")
        assert shared.files.nbytes <= shared.memory.nbytes or not shared.in_memory
    assert not os.path.exists("/sys") or not in_node_memory("/sys")


# The folder


def device_of(folder: Path) -> str:
    device = folder.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def on_file_system(tmp_path: Path, kind: str, available: int = 100 * GIB) -> Machine:
    machine = Machine(tmp_path, available)
    machine.mount(kind, device_of(tmp_path), tmp_path)
    return machine


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("tmpfs", True), ("devtmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False), ("hugetlbfs", False)],
)
def test_what_is_memory(tmp_path: Path, kind: str, expected: bool) -> None:
    machine = on_file_system(tmp_path, kind)
    assert in_node_memory(tmp_path, machine.proc) == expected
    found = available_bytes(tmp_path / "not" / "there", machine.proc)
    assert found.in_memory == expected
    assert (found.files.limit == found.memory.limit) == (expected and found.files.nbytes == 100 * GIB)


def statvfs(monkeypatch: pytest.MonkeyPatch, blocks: int, free: int) -> None:
    values = [4096, 4096, blocks // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))


def test_the_folder_is_smaller_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MiB, for one."""
    machine = on_file_system(tmp_path, "tmpfs")
    statvfs(monkeypatch, 64 << 20, 60 << 20)
    found = available_bytes(tmp_path, machine.proc)
    assert found.files.nbytes == (60 << 20) + capacity._held_bytes(tmp_path)
    assert "free space" in found.files.limit
    statvfs(monkeypatch, 0, 0)  # a tmpfs without a size
    assert available_bytes(tmp_path, machine.proc).files.nbytes == 100 * GIB + capacity._held_bytes(tmp_path)


def test_a_small_shared_memory_is_left_to_the_data_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MiB: 18 MB of state found room three times, and the data-loader workers of the script none."""
    machine = on_file_system(tmp_path, "tmpfs")
    monkeypatch.setattr(capacity, "_SHARED_MEMORY", tmp_path)
    statvfs(monkeypatch, 64 << 20, 60 << 20)
    with pytest.raises(ValueError, match="data-loader workers"):
        check(tmp_path / "fit-000", 18_000_000, 2, proc=machine.proc)
    check(tmp_path / "fit-000", 9 << 20, 2, proc=machine.proc)  # 27 of the 28 MiB that are there but for the half
    statvfs(monkeypatch, 1 << 40, 1 << 36)
    assert available_bytes(tmp_path / "fit-000", machine.proc).files.nbytes == 56 * GIB
    statvfs(monkeypatch, 64 << 20, 8 << 20)
    assert available_bytes(tmp_path / "fit-000", machine.proc).files.nbytes == 0
    monkeypatch.setattr(capacity, "_SHARED_MEMORY", tmp_path / "missing")  # a memory of our own
    assert available_bytes(tmp_path / "fit-000", machine.proc).files.nbytes == 8 << 20


def test_what_the_folder_holds_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = on_file_system(tmp_path, "tmpfs", available=10 << 20)
    statvfs(monkeypatch, 1 << 30, 5 << 20)
    folder = tmp_path / "fit-000"
    for name in ("step-000000000001-0123abcd/rank-00000.shard", ".spare-rank-00000.0123abcd", "quarantine/bad"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())  # Some file systems allocate late.
    found = available_bytes(folder, machine.proc)
    assert found.files.nbytes == 7 << 20
    assert found.memory.nbytes == 12 << 20
    on_disk = on_file_system(tmp_path / "x", "ext4")
    assert available_bytes(folder, on_disk.proc).memory.nbytes == 100 * GIB


# Needed


def test_the_formula() -> None:
    assert needed_bytes(10, keep=2, replicas_received=0, in_memory=True) == capacity.Needed(30, 0)
    assert needed_bytes(10, keep=2, replicas_received=1, in_memory=True) == capacity.Needed(60, 0)
    assert needed_bytes(10, keep=3, replicas_received=1, in_memory=False) == capacity.Needed(80, 20)


def test_what_fits_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, folder = on_file_system(tmp_path, "tmpfs", available=30 << 20), tmp_path
    monkeypatch.setattr(capacity, "_held_bytes", lambda _: 0)
    statvfs(monkeypatch, 1 << 30, 30 << 20)
    check(folder, 10 << 20, keep=2, proc=machine.proc)
    for arguments in ({"keep": 3}, {"keep": 2, "replicas_received": 1}):
        with pytest.raises(ValueError, match="local checkpoints"):
            check(folder, 10 << 20, proc=machine.proc, **arguments)


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_held_bytes", lambda _: 0)
    memory = on_file_system(tmp_path, "tmpfs", available=20 * GIB)
    statvfs(monkeypatch, 1 << 40, 64 << 20)
    with pytest.raises(ValueError) as small_folder:
        check(tmp_path, 2 * GIB, keep=2, replicas_received=1, proc=memory.proc)
    statvfs(monkeypatch, 1 << 40, 1 << 40)
    with pytest.raises(ValueError) as small_node:
        check(tmp_path, 11 * GIB, keep=1, proc=memory.proc)
    disk = on_file_system(tmp_path / "d", "ext4", available=GIB)
    with pytest.raises(ValueError) as small_buffers:
        check(tmp_path, 2 * GIB, keep=2, proc=disk.proc)
    statvfs(monkeypatch, 1 << 40, 1 << 20)
    with pytest.raises(ValueError) as small_disk:
        check(tmp_path, 2 * GIB, keep=2, proc=disk.proc)
    for error, words in (
        (
            small_folder,
            ["12.0 GiB", "64.0 MiB", "2 generations and the one", "1 other node", "keep=", "local disk", "dir="],
        ),
        (
            small_node,
            ["22.0 GiB", "20.0 GiB", "the memory that this node has available", "save less", "local disk", "dir="],
        ),
        (small_buffers, ["2.0 GiB of memory", "1.0 GiB are available", "more memory"]),
        (small_disk, ["6.0 GiB", "1.0 MiB", "more space", "keep="]),
    ):
        text = str(error.value)
        assert all(word in text for word in [*words, str(tmp_path)]), text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_for_a_person(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_needs_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_resilience.checkpoint.capacity, lightning_resilience.run.save_interval;"
        "assert not {'torch', 'lightning', 'pytorch_lightning'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


# How often to save


@pytest.mark.parametrize("stall", [0.001, 0.5, 30.0])
@pytest.mark.parametrize("failure", [60.0, 7.9 * 3600, 30 * 86400.0])
@pytest.mark.parametrize("recovery", [0.0, 20.0, 3600.0])
def test_no_other_interval_advances_more(stall: float, failure: float, recovery: float) -> None:
    def advance(interval: float) -> float:
        return (1 - stall / interval) * failure / (failure + recovery + interval / 2)

    best = optimal_interval_s(stall, failure, recovery)
    assert best > stall
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert advance(best * factor) < advance(best)


def test_the_interval_without_a_stall() -> None:
    assert optimal_interval_s(0.0, 3600.0, 60.0) == 0.0


def test_how_often_runs_fail() -> None:
    assert mean_time_to_failure_s(1024, 0, 0.0) == pytest.approx(7.9 * 3600)
    assert mean_time_to_failure_s(1, 0, 0.0) / 86400 == pytest.approx(337, abs=1)
    assert mean_time_to_failure_s(2048, 0, 0.0) == pytest.approx(7.9 * 1800)
    # What the run has seen itself outweighs that soon, in both directions.
    assert mean_time_to_failure_s(1024, 20, 20 * 600.0) == pytest.approx(600, rel=2.5)
    assert mean_time_to_failure_s(10**6, 0, 86400.0) > 86400
    assert mean_time_to_failure_s(64, 99, 99 * 3600.0) == pytest.approx(3600, rel=1.3)
    for more in (0, 1, 5, 10):
        assert mean_time_to_failure_s(64, more, 1e5) > mean_time_to_failure_s(64, more + 1, 1e5)


def test_what_costs_a_thousandth_of_the_time_need_not_be_rarer() -> None:
    never_s, minute_s = 1e9, 60.0
    for stall_s, writing_s, failure_s, expected_s in (
        (0.0, 0.0, never_s, 1.0),  # the shortest
        (0.0004, 0.02, never_s, 1.0),
        (0.004, 0.02, never_s, 4.0),
        (0.02, 0.02, never_s, 20.0),
        (0.02, 5.0, never_s, 50.0),  # the writer is busy a tenth of the time
        (0.02, 0.02, minute_s, optimal_interval_s(0.02, minute_s, 30.0)),  # of a run that often fails
    ):
        assert chosen_interval_s(stall_s, writing_s, failure_s, 30.0) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("stall_s", "writing_s", "intervals"),
    [
        (0.0004, 0.02, [1, 1, 1]),
        (0.004, 0.02, [1, 2, 4, 4]),
        (0.05, 0.1, [5, 10, 20, 40, 50, 50]),
        (0.005, 0.4, [1.6, 3.2, 5, 5]),
    ],
    ids=["cheap", "a few milliseconds", "dear", "writes long"],
)
def test_intervals_double_until_they_are_as_chosen(stall_s: float, writing_s: float, intervals: list[float]) -> None:
    chosen_s = chosen_interval_s(stall_s, writing_s, 1e9, 30.0)
    found = [0.0]
    for _ in intervals:
        found.append(growing_interval_s(found[-1], stall_s, writing_s, chosen_s))
    assert found[1:] == pytest.approx(intervals)
    assert sum(each < chosen_s for each in found[1:]) <= 4, "saves that a start has more"


@pytest.mark.parametrize("stall_s", [0.0, 0.002, 0.03, 1.5])
def test_at_whatever_time_it_fails_at_most_half_is_lost(stall_s: float) -> None:
    chosen_s = chosen_interval_s(stall_s, 0.0, 1e9, 30.0)
    now, interval_s, saves = 0.0, 0.0, 1
    first_s = growing_interval_s(0.0, stall_s, 0.0, chosen_s)
    while interval_s < chosen_s:
        interval_s = growing_interval_s(interval_s, stall_s, 0.0, chosen_s)
        now += interval_s  # right before the next save
        assert interval_s <= (now + first_s) / 2 + 1e-9
        assert stall_s * (saves - 1) <= 0.01 * now, "the first save apart"
        saves += 1
