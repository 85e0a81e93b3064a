"""The generations of a node: what kills, full storage, other processes and other users can do to them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.checkpoint import node_store as module
from lightning_resilience.checkpoint.capacity import in_node_memory
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter

PAGE = mmap.PAGESIZE
SHM = Path("/dev/shm")

on_tmpfs = pytest.mark.skipif(not (SHM.is_dir() and in_node_memory(SHM)), reason="needs /dev/shm")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in node memory that is not there yet."""
    if not (SHM.is_dir() and in_node_memory(SHM)):
        pytest.skip("needs /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHM))
    yield folder / "fit-000"
    shutil.rmtree(folder)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is taken for one on a disk. It is none where that can be helped: many small files are synced."""
    monkeypatch.setattr(module, "in_node_memory", lambda _: False)
    if SHM.is_dir() and in_node_memory(SHM):
        found: Path = request.getfixturevalue("memory")
        return found
    return tmp_path / "fit-000"


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def generation(step: int) -> str:
    return f"{step % 2**32:08x}"


def content(step: int, nbytes: int = 3 * PAGE + 5) -> bytes:
    return ((step % 2**32).to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


def trailer_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(data).encode()


def is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return trailer_of(data[:-32]) == data[-32:]


def check(path: Path) -> None:
    if not is_whole(path):
        raise ValueError("it is not whole")


def fill(writer: ShardWriter, data: bytes) -> None:
    if data:
        writer.memory[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def save(store: NodeStore, step: int, part: str = "rank-00000", data: bytes | None = None) -> Path:
    data = content(step) if data is None else data
    writer = store.reserve(part, len(data))
    fill(writer, data)
    return writer.publish(step, generation(step), len(data), trailer_of(data))


def hidden(folder: Path) -> set[str]:
    """Everything but generations, and the claims of this process."""
    claims = {f".writer-{claim}" for claim, pid in module._own_claims.items() if pid == os.getpid()}
    return {path.name for path in folder.iterdir() if not path.name.startswith("step-")} - claims


def in_child(action: Callable[[], object]) -> int:
    """Runs ``action`` in a forked process; 0, 1 if it raised, or minus the signal that killed it."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# A part


def test_what_is_published_is_what_was_written(place: Path) -> None:
    store = NodeStore(place, verify=check)
    assert store.in_memory == in_node_memory(place) or not store.in_memory
    path = save(store, 12)
    assert path == place / "step-000000000012-0000000c" / "rank-00000.shard"
    assert path == store.path(12, generation(12), "rank-00000")
    assert path.read_bytes() == content(12) + trailer_of(content(12))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (place, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert hidden(place) == set()
    store.close()
    assert path.exists()


def test_where_temporary_files_are(tmp_path: Path) -> None:
    """On a real disk, where this machine has one there."""
    store = NodeStore(tmp_path / "fit-000", verify=check)
    for step in range(4):
        assert is_whole(save(store, step))
        store.retire({generation(step), generation(step - 1)}, lambda part: True)
    assert [h.step for h in store.shard_files()] == [3, 2]
    store.close()
    assert len(list((tmp_path / "fit-000").iterdir())) == 2


@pytest.mark.parametrize("reserved", [0, 1, PAGE, 3 * PAGE + 1])
def test_every_size(place: Path, reserved: int) -> None:
    """Less than was reserved, nothing at all, no trailer, one of several pages."""
    store = NodeStore(place)
    for step, (size, trailer) in enumerate((s, t) for s in {0, reserved // 2, reserved} for t in (b"", b"x" * 9999)):
        writer = store.reserve("rank-00000", reserved)
        assert writer.memory.dtype == torch.uint8
        assert writer.memory.shape == (reserved,)
        writer.memory.fill_(7)
        path = writer.publish(step, generation(step), size, trailer)
        assert path.read_bytes() == b"\x07" * size + trailer
        store.retire({generation(step)}, lambda part: True)


def test_what_is_held(place: Path) -> None:
    store = NodeStore(place)
    assert store.shard_files() == []
    for step, part in [(5, "rank-00000"), (10**12, "rank-00001"), (7, "common-00-of-02"), (7, "rank-00000")]:
        save(store, step, part)
    store.reserve("rank-00003", 100)
    (place / "step-5").mkdir()  # not ours, in name or kind
    (place / "step-000000000009-00000009").touch()
    folder = place / "step-000000000007-00000007"
    (folder / "notes.txt").touch()
    (folder / "notes").touch()
    (folder / "a b.shard").touch()
    (folder / "rank-00009.shard").symlink_to("rank-00000.shard")
    os.mkfifo(folder / "rank-00008.shard")
    (place / "step-000000000008-00000008").symlink_to(folder)
    held = store.shard_files()
    assert [(h.step, h.name) for h in held] == [
        (10**12, "rank-00001"),
        (7, "common-00-of-02"),
        (7, "rank-00000"),
        (5, "rank-00000"),
    ]
    assert all(h.size == h.path.stat().st_size and h.generation == generation(h.step) for h in held)


@pytest.mark.parametrize("part", ["", "../x", "a/b", ".x", "a.b", "x" * 101, "ä"])
def test_names_of_parts(place: Path, part: str) -> None:
    with pytest.raises(ValueError, match="invalid shard name"):
        NodeStore(place).reserve(part, 1)


def test_wrong_use_leaves_nothing(place: Path) -> None:
    store = NodeStore(place)
    save(store, 1)
    elsewhere = place.parent / "ab"
    elsewhere.mkdir()
    for step, name, size in [
        (-1, "00000001", 5),
        (1, "1", 5),
        (1, "0000000g", 5),
        (1, "../../ab", 5),
        (2, "00000002", 11),
    ]:
        writer = store.reserve("rank-00000", 10)
        with pytest.raises(ValueError):
            writer.publish(step, name, size, b"")
        with pytest.raises(RuntimeError, match="closed"):
            writer.publish(2, generation(2), 5, b"")
    with pytest.raises(ValueError, match="-1 bytes"):
        store.reserve("rank-00000", -1)
    assert elsewhere.exists()
    writer = store.reserve("rank-00000", 10)
    with pytest.raises(RuntimeError, match="open writer"):
        store.reserve("rank-00000", 10)
    writer.publish(2, generation(2), 5, b"")
    writer.abandon()
    assert [h.step for h in store.shard_files()] == [2, 1]
    assert hidden(place) == set()


def test_after_the_end(place: Path) -> None:
    store = NodeStore(place)
    path = save(store, 1)
    writer = store.reserve("rank-00000", 10)
    store.close()
    store.close()
    assert [p.name for p in place.iterdir()] == [path.parent.name]
    for call in (lambda: store.reserve("rank-00000", 1), lambda: store.retire((), bool)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="closed"):
        writer.publish(1, generation(1), 1, b"")
    assert is_whole(path)


def test_a_finished_fit_leaves_nothing(place: Path) -> None:
    one, other = NodeStore(place), NodeStore(place)
    save(one, 1)
    other.reserve("rank-00001", 10)
    one.quarantine(save(one, 2), "bad")
    one.clear()
    assert not place.exists()
    other.clear()
    other.close()
    assert other.shard_files() == []


# What a save costs


def test_a_save_takes_no_new_memory(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NodeStore(memory)
    keep = 2
    inodes, addresses, blocks = set(), set(), set()

    def one(step: int) -> None:
        data = content(step)
        writer = store.reserve("rank-00000", len(data))
        addresses.add(writer.memory.data_ptr())
        inodes.add(writer.path.stat().st_ino)
        fill(writer, data)
        path = writer.publish(step, generation(step), len(data), trailer_of(data))
        blocks.add(path.stat().st_blocks)
        store.retire({generation(step - old) for old in range(keep)}, lambda part: True)
        assert [h.step for h in store.shard_files()] == [step, step - 1][: step + 1]
        assert all(is_whole(h.path) for h in store.shard_files())

    for step in range(keep + 1):
        one(step)
    with monkeypatch.context() as warm:
        for name in ("posix_fallocate",):
            warm.setattr(os, name, lambda *_: pytest.fail("allocates"))
        warm.setattr(torch, "from_file", lambda *_, **__: pytest.fail("maps"))
        for step in range(keep + 1, 30):
            one(step)
    assert len(inodes) == len(addresses) == keep + 1
    assert blocks == {4 * PAGE // 512}


def test_the_copy_meets_no_page_faults(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, known = module._advise, {}

    def advise(tensor: torch.Tensor, advice: int) -> bool:
        known[advice] = real(tensor, advice)
        return known[advice]

    monkeypatch.setattr(module, "_advise", advise)
    writer = NodeStore(memory).reserve("rank-00000", 2000 * PAGE)
    if not known[module._MADV_POPULATE_WRITE]:
        pytest.skip("this kernel cannot do that in advance")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    writer.memory.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500


def test_nothing_is_copied_to_publish(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, position: int) -> int:
        nonlocal written
        written += len(data)
        return real(fd, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    store = NodeStore(memory)
    writer = store.reserve("rank-00000", 1 << 20)
    writer.memory.fill_(1)
    inode = writer.path.stat().st_ino
    path = writer.publish(1, generation(1), 1 << 20, b"end")
    assert written == 3
    assert path.stat().st_ino == inode


def test_memory_for_a_disk_is_kept(disk: Path) -> None:
    store = NodeStore(disk)
    addresses = set()
    for step in range(5):
        writer = store.reserve("rank-00000", (1 << 20) - step)
        addresses.add(writer.memory.data_ptr())
        writer.publish(step, generation(step), 10, b"") if step % 2 else writer.abandon()
    assert len(addresses) == 1
    writer = store.reserve("rank-00000", 100)  # Not a megabyte for a hundred bytes, for ever.
    assert writer.memory.untyped_storage().nbytes() == 100


def test_what_is_abandoned_is_used_again(memory: Path) -> None:
    store = NodeStore(memory)
    inodes = set()
    for _ in range(3):
        writer = store.reserve("rank-00000", 3 * PAGE)
        inodes.add(writer.path.stat().st_ino)
        writer.abandon()
        writer.abandon()
    path = save(store, 1)
    assert inodes == {path.stat().st_ino}
    store.close()
    assert [p.name for p in memory.iterdir()] == [path.parent.name]


def test_sizes_that_change(place: Path) -> None:
    store = NodeStore(place)
    for step, nbytes in enumerate([10, 5 * PAGE, 4 * PAGE + 1, 1, 0, 20 * PAGE, 20 * PAGE + 1, 3, 3]):
        path = save(store, step, data=content(step, nbytes))
        store.retire({generation(step)}, lambda part: True)
        assert path.read_bytes() == content(step, nbytes) + trailer_of(content(step, nbytes))
        assert path.stat().st_blocks * 512 <= nbytes + 32 + 2 * PAGE
        assert [h.step for h in store.shard_files()] == [step]


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def maps_of(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.slow
@on_tmpfs
def test_no_file_and_no_mapping_is_left_open(place: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # What other tests have left must not go away in between.
    before = descriptors()
    store = NodeStore(place)
    counts = set()
    for step in range(200):
        save(store, step, "rank-00000")
        save(store, step, "common-00-of-01", content(step, PAGE * (1 + step % 3)))
        if step % 7 == 0:
            store.reserve("rank-00000", 10).abandon()
        store.retire({generation(step), generation(step - 1)}, lambda part: True)
        counts.add((descriptors(), len(maps_of(place)) <= 6))
    assert counts == {(before + 1, True)}  # The claim.
    store.close()
    gc.collect()
    assert descriptors() == before
    assert maps_of(place) == []


def test_a_forked_worker_does_not_keep_the_memory(memory: Path) -> None:
    store = NodeStore(memory)
    path = save(store, 1)
    writer = store.reserve("rank-00001", PAGE)
    assert len(maps_of(memory)) == 2

    address = store._mapped[path].memory.data_ptr()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def worker() -> None:
        # At the addresses of the mapping there may be anything now, and freeing the tensor must not unmap it. (Nothing
        # is collected here: other tests have left garbage.)
        libc.mmap(address, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert is_mapped(address), "by this, or by what has taken them before"
        assert maps_of(memory) == []
        store._mapped.clear()
        assert is_mapped(address)

    assert in_child(worker) == 0
    writer.memory.fill_(1)
    assert writer.publish(1, generation(1), PAGE, b"").read_bytes() == b"\1" * PAGE


# Retiring


def test_parts_that_nobody_writes_any_more_give_their_memory_back(memory: Path) -> None:
    old = NodeStore(memory)
    save(old, 1, "rank-00000")
    save(old, 1, "rank-00001")
    old.close()
    store = NodeStore(memory)
    save(store, 2, "rank-00000")
    store.retire({generation(2)}, lambda part: True)
    assert [h.step for h in store.shard_files()] == [2]
    assert {name.split(".")[1] for name in hidden(memory)} == {"spare-rank-00000"}


def test_copies_give_their_memory_back(place: Path) -> None:
    store = NodeStore(place)
    store.reserve("rank-00003", PAGE, is_copy=True).publish(1, generation(1), PAGE, b"")
    assert not store._buffers
    store.retire((), lambda part: True)
    assert not list(place.glob(".spare-*"))
    assert not list(place.glob("step-*"))
    save(store, 2, "rank-00003")
    store.retire((), lambda part: True)
    assert len(list(place.glob(".spare-*"))) == store.in_memory, "now it is one of its own"
    store.close()


def test_only_own_parts_are_retired(place: Path) -> None:
    store = NodeStore(place)
    for step in (1, 2, 3):
        for part in ("rank-00000", "rank-00001"):
            save(store, step, part)
    store.retire({generation(3)}, lambda part: part == "rank-00001")
    assert [(h.step, h.name) for h in store.shard_files()] == [
        (3, "rank-00000"),
        (3, "rank-00001"),
        (2, "rank-00000"),
        (1, "rank-00000"),
    ]
    store.retire((), lambda part: True)
    assert store.shard_files() == []
    assert not list(place.glob("step-*"))
    assert len(hidden(place)) == (2 if store.in_memory else 0)  # One for each name, no matter how many were retired.


def test_retiring_while_a_part_is_written(memory: Path) -> None:
    store = NodeStore(memory)
    save(store, 1)
    writer = store.reserve("rank-00000", 100)
    writer.memory.fill_(2)
    store.retire((), lambda part: True)
    assert writer.publish(2, generation(2), 100, b"").read_bytes() == b"\2" * 100


def test_retiring_just_before_a_file_is_made(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NodeStore(memory)
    save(store, 1)
    real = os.open

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_EXCL:  # From another thread.
            store.retire((), lambda part: True)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)
    assert is_whole(save(store, 2))
    assert [h.step for h in store.shard_files()] == [2]


def test_of_two_files_the_one_that_is_mapped_is_used_again(memory: Path) -> None:
    old = NodeStore(memory)
    save(old, 1)
    old.close()
    store = NodeStore(memory)
    writer = store.reserve("rank-00000", 100)
    address = writer.memory.data_ptr()
    writer.abandon()
    store.retire((), lambda part: True)
    assert store.reserve("rank-00000", 100).memory.data_ptr() == address


def test_a_generation_that_somebody_has_linked_is_not_written_over(memory: Path, tmp_path: Path) -> None:
    store = NodeStore(memory)
    kept = memory.parent / "kept.shard"
    os.link(save(store, 1), kept)
    store.retire((), lambda part: True)
    before = len(os.listdir("/proc/self/fd"))
    save(store, 2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert kept.read_bytes() == content(1) + trailer_of(content(1))


def test_a_file_that_is_exchanged_while_it_is_written(memory: Path) -> None:
    store = NodeStore(memory)
    save(store, 1)
    writer = store.reserve("rank-00000", 10)
    (memory / "other").write_bytes(b"something else")
    os.replace(memory / "other", writer.path)
    with pytest.raises(OSError, match="replaced") as raised:
        writer.publish(2, generation(2), 10, b"")
    assert raised.value.errno == errno.ESTALE
    assert [h.step for h in store.shard_files()] == [1]
    assert hidden(memory) == set()


def test_readers_of_retired_files_do_no_harm(memory: Path) -> None:
    store = NodeStore(memory)
    path = save(store, 1)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        store.retire((), lambda part: True)
        newer = save(store, 2)
        assert mapped[:4] == content(2)[:4]  # It has been used again, under the reader.
    assert is_whole(newer)


def test_two_processes_retire_the_same(place: Path) -> None:
    store = NodeStore(place)
    steps = range(40)
    for step in steps:
        save(store, step, data=content(step, 100))
    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            try:
                mine = NodeStore(place)
                mine._reserved.add("rank-00000")
                for step in steps:
                    mine.retire({generation(s) for s in range(step, 40)}, lambda part: True)
                mine.close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    assert [h.step for h in store.shard_files()] == [39]
    assert hidden(place) == set()


def test_many_ranks_at_once(place: Path) -> None:
    """Ranks publish and retire, others come and go and clean up; a reader finds nothing that is not whole."""
    NodeStore(place).close()
    steps = 40

    def rank(number: int) -> None:
        store = NodeStore(place, verify=check)
        for step in range(steps):
            save(store, step, f"rank-{number:05d}", content(step, 1000 * (1 + step % 3)))
            store.retire({generation(step), generation(step - 1)}, lambda part: part == f"rank-{number:05d}")
        store.close()

    def comer() -> None:
        for _ in range(150):
            NodeStore(place).close()

    children = []
    for number in range(4):
        if (pid := os.fork()) == 0:
            try:
                rank(number) if number < 3 else comer()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    store = NodeStore(place)
    while children:
        for held in store.shard_files():
            try:
                whole, vanished = is_whole(held.path), False
            except FileNotFoundError:
                continue
            if not whole:
                # In node memory a retired file is written into while it is read.
                vanished = not held.path.exists()
                assert vanished
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0
                children.remove(pid)
    assert [(h.step, h.name) for h in store.shard_files()] == [
        (step, f"rank-{number:05d}") for step in (steps - 1, steps - 2) for number in range(3)
    ]
    assert hidden(place) == set()


def test_many_threads_at_once(place: Path) -> None:
    store = NodeStore(place)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        part = f"rank-{number:05d}"
        try:
            for step in range(30):
                assert is_whole(save(store, step, part, content(step, 500)))
                store.retire({generation(s) for s in range(step - 1, 31)}, lambda name: name == part)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# Kills and errors. Every call with an effect on the storage is a point at which the process ends, or the call fails.

CALLS = {
    os: ["open", "mkdir", "rename", "replace", "unlink", "rmdir", "ftruncate", "posix_fallocate", "fsync", "pwrite"],
    torch: ["from_file"],
    fcntl: ["lockf"],
}


class Points:
    """Counts the calls that touch the storage, before and after each, and half-way through a write."""

    def __init__(self, at: int, act: Callable[[], None], lasting: bool = False) -> None:
        self.left = at
        self.act = act
        self.lasting = lasting
        self.passed: list[str] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def point(self, what: str) -> None:
        self.left -= 1
        self.passed.append(what)
        if self.left == 0 or (self.lasting and self.left < 0):
            self.act()

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.point(f"before {name}")
            if name == "pwrite" and self.left == 1 and len(args[1]) > 1:
                function(args[0], args[1][: len(args[1]) // 2], args[2])
                self.point("half-way through pwrite")
            result = function(*args, **kwargs)
            self.point(f"after {name}")
            return result

        return wrapped


def life(folder: Path, points: Points) -> None:
    """All that a rank does to its store: generation 1 is there, 2 to 4 are written, older ones go."""
    store = NodeStore(folder, verify=check, before_publish=lambda: points.point("before_publish"))
    for step in (2, 3, 4):
        for part in ("rank-00000", "common-00-of-01"):
            data = content(step, 2 * PAGE + 100 * step)
            writer = store.reserve(part, len(data))
            fill(writer, data[:PAGE])
            points.point("half-way through the copy")
            fill(writer, data)
            if step == 3 and part == "rank-00000":
                writer.abandon()
                continue
            writer.publish(step, generation(step), len(data), trailer_of(data))
        store.retire({generation(step), generation(step - 1)}, lambda part: part != "rank-00001")
    store.quarantine(store.path(4, generation(4), "common-00-of-01"), "it is bad")
    store.close()


@pytest.mark.slow
def test_killed_at_every_point(place: Path) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = NodeStore(place)
    save(before, 1)
    before.close()
    shutil.copytree(place, first := place.parent / "first")
    shutil.rmtree(place)
    for at in range(1, 2000):
        shutil.copytree(first, place)
        living = NodeStore(place)
        other = living.reserve("rank-00001", 50)
        other.memory.fill_(1)

        def run(at: int = at) -> None:
            points = Points(at, kill)
            points.patch(pytest.MonkeyPatch())
            life(place, points)
            assert {"after rename", "half-way through pwrite", "after lockf"} & set(points.passed)
            assert points.left > 0

        code = in_child(run)
        # Whatever is published is whole, and one generation of each part that has ever been is there.
        held = living.shard_files()
        assert all(is_whole(h.path) for h in held)
        assert any(h.name == "rank-00000" for h in held)
        # Of the dead everything goes; what lives stays and goes on.
        ours = hidden(place)
        after = NodeStore(place)
        left = hidden(place)
        assert left <= ours
        quarantined = {"quarantine"} & left
        expected = {other.path.name} if living.in_memory else set()
        assert left - quarantined == expected
        assert not list(place.glob("quarantine/.*"))
        assert all(list(folder.iterdir()) for folder in place.glob("step-*"))
        assert after.shard_files() == held
        assert other.publish(9, generation(9), 50, b"").read_bytes() == b"\1" * 50
        assert is_whole(save(after, 10))
        living.close()
        after.close()
        shutil.rmtree(place)
        if code == 0:
            assert at > 100
            break
        assert code == -signal.SIGKILL
    else:
        raise AssertionError("it does not end")
    shutil.rmtree(first)


@pytest.mark.parametrize(("code", "lasting"), [(errno.ENOSPC, False), (errno.EROFS, True)])
def test_an_error_at_every_point(place: Path, code: int, lasting: bool) -> None:
    """Full, over quota, read-only or broken: the save fails with that error, and leaves no trace.

    If the storage fails from then on, it leaves what cannot be removed; and the next save works when it is back.
    """

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    failures = set()
    for at in range(1, 500):
        store = NodeStore(place, verify=check)
        for step in (1, 2):
            save(store, step)
        store.retire({generation(2)}, lambda part: True)
        data = content(3, 20 * PAGE)
        points = Points(at, fail, lasting)
        with pytest.MonkeyPatch.context() as monkeypatch:
            points.patch(monkeypatch)
            error = error_of(save, store, 3, "rank-00000", data)
        if error is None:
            assert points.left > 0, f"nobody has noticed: {points.passed[at - 1]}"
            assert [h.step for h in store.shard_files()] == [3, 2]
            break
        assert error.errno == code, points.passed[at - 1]
        assert os.strerror(code) in str(error)
        assert "untouched" in str(error)
        failures.add(points.passed[at - 1])
        renamed = lasting and "after rename" in points.passed[:at]
        assert [h.step for h in store.shard_files()] == [3, 2][not renamed :], points.passed
        assert all(is_whole(h.path) for h in store.shard_files())
        if not lasting:
            assert hidden(place) == set(), points.passed
            assert len(list(place.glob("step-*"))) == 1
        assert is_whole(save(store, 3, data=data))
        store.clear()
    assert {"before rename", "before open", "before pwrite"} <= failures
    assert "before posix_fallocate" in failures
    assert ("before fsync" in failures) == (not store.in_memory)


@pytest.mark.parametrize("error", [SystemExit("a newer attempt owns this run"), KeyboardInterrupt(), ValueError("no")])
@pytest.mark.parametrize("where", ["before_publish", "verify"])
def test_a_stopped_publication_leaves_nothing(place: Path, where: str, error: BaseException) -> None:
    def stop(*_: object) -> None:
        raise error

    save(NodeStore(place), 1)
    store = NodeStore(place, **{where: stop})
    with pytest.raises(type(error)):
        save(store, 2)
    assert [h.step for h in store.shard_files()] == [1]
    assert hidden(place) == set()
    assert len(list(place.glob("step-*"))) == 1


def test_a_failed_publication_leaves_the_same_part_from_before(place: Path) -> None:
    def stop() -> None:
        raise SystemExit

    path = save(NodeStore(place), 1)
    with pytest.raises(SystemExit):
        save(NodeStore(place, before_publish=stop), 1)
    assert is_whole(path)


def test_the_data_is_on_disk_before_the_name(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss keeps only what was synced: file, then rename, then both directories."""
    store = NodeStore(
        disk, verify=lambda path: points.point("verify"), before_publish=lambda: points.point("before_publish")
    )
    points = Points(0, lambda: None)
    points.patch(monkeypatch)
    save(store, 1)
    calls = [call.removeprefix("before ") for call in points.passed if not call.startswith("after ")]
    memory = ("posix_fallocate", "from_file")
    assert [call for call in calls if call not in ("open", *memory)] == [
        "unlink",
        "pwrite",
        "pwrite",
        "fsync",
        "verify",
        "before_publish",
        "mkdir",
        "rename",
        "fsync",
        "fsync",
    ]


def test_the_folder_of_a_generation_vanishes_again_and_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank removes it while it is empty."""
    real, removed = os.mkdir, []

    def mkdir(path: Any, mode: int = 0o777) -> None:
        real(path, mode)
        if len(removed) < 5:
            os.rmdir(path)
            removed.append(path)

    store = NodeStore(place)
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert is_whole(save(store, 1))
    assert len(removed) == 5


# Storage that does not take it


@contextmanager
def small_tmpfs(size: int) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    try:
        mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, timeout=20).returncode == 0
        if not mounted:
            pytest.skip("cannot mount a tmpfs here")
        try:
            yield folder
        finally:
            gc.collect()
            subprocess.run(["umount", "-l", folder], check=True, timeout=20)
    finally:
        folder.rmdir()


def error_of(action: Callable[..., object], *args: object) -> OSError | None:
    try:
        action(*args)
    except OSError as error:
        return error
    return None


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_a_full_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALLOCATION_CHUNK", (1 << 20) + 5)
    with small_tmpfs(8 << 20) as base:
        store = NodeStore(base / "fit-000")
        assert store.in_memory
        old = save(store, 1, data=content(1, 3 << 20))
        room = free(base)
        with pytest.raises(
            OSError, match=r"no room for 6.0 MiB of shard rank-00000 \(No space left.*untouched"
        ) as raised:
            store.reserve("rank-00000", 6 << 20)
        assert raised.value.errno == errno.ENOSPC
        assert free(base) == room
        # The data fits, but the rest of the file does not.
        writer = store.reserve("rank-00000", 4 << 20)
        writer.memory.fill_(1)
        with pytest.raises(OSError, match=r"cannot publish.*No space left"):
            writer.publish(2, generation(2), 4 << 20, b"x" * (2 << 20))
        assert free(base) == room
        assert [h.step for h in store.shard_files()] == [1]
        assert is_whole(old)
        # A spare that would have to grow by too much.
        save(store, 2, data=content(2, 3 << 20))
        store.retire({generation(1)}, lambda part: True)
        with pytest.raises(OSError, match="No space left"):
            store.reserve("rank-00000", 6 << 20)
        assert free(base) == room
        # One with holes, whoever has made them.
        save(store, 2, data=content(2, 3 << 20))
        store.retire({generation(1)}, lambda part: True)
        (spare,) = base.glob("fit-000/.spare-*")
        os.truncate(spare, 0)
        os.truncate(spare, 6 << 20)
        with pytest.raises(OSError, match="No space left"):
            store.reserve("rank-00000", 6 << 20)
        assert free(base) == room
        assert is_whole(save(store, 3, data=content(3, 4 << 20)))
        store.retire({generation(3)}, lambda part: True)
        for step in range(4, 20):  # No room for two of them: it must be the file of the one before.
            store.retire((), lambda part: True)
            assert is_whole(save(store, step, data=content(step, 4 << 20)))
        store.clear()
        assert free(base) > (8 << 20) - 4 * PAGE


def test_no_memory(place: Path) -> None:
    """A limit of the address space, for one."""
    store = NodeStore(place)
    save(store, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    def limited() -> None:
        store = NodeStore(place)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"no room for 128\.0 MiB") as raised:
            store.reserve("rank-00000", 128 << 20)
        assert raised.value.errno == errno.ENOMEM
        assert not list(place.glob(".spare-*"))
        assert is_whole(save(store, 2))

    assert in_child(limited) == 0
    assert [h.step for h in store.shard_files()] == [2, 1]


def test_whatever_torch_is_set_to(place: Path) -> None:
    store = NodeStore(place)
    with torch.inference_mode(), torch.device("meta"):
        writer = store.reserve("rank-00000", 10)
    writer.memory[2:].fill_(7)
    assert writer.publish(1, generation(1), 10, b"").read_bytes()[2:] == b"\7" * 8
    store.retire((), lambda part: True)
    with torch.inference_mode():
        writer = store.reserve("rank-00000", 10)
    writer.memory.copy_(torch.arange(10))
    assert writer.publish(2, generation(2), 10, b"").read_bytes() == bytes(range(10))


def test_memory_is_free_when_the_store_is_closed() -> None:
    with small_tmpfs(8 << 20) as base:
        room = free(base)
        store = NodeStore(base / "fit-000")
        for step in range(4):
            save(store, step, data=content(step, 1 << 20))
            store.retire({generation(step)}, lambda part: True)
        path = store.shard_files()[0].path
        other = NodeStore(base / "fit-000")
        used = room - free(base)
        os.unlink(path)  # By another process; here it is mapped still.
        assert room - free(base) >= used - PAGE
        store.retire((), lambda part: True)
        gc.collect()
        assert room - free(base) <= used - (1 << 20)
        save(store, 5, data=content(5, 10))
        store.close()
        other.clear()
        assert room - free(base) <= PAGE


def test_a_file_that_may_not_grow(place: Path) -> None:
    """RLIMIT_FSIZE: as with a full disk, half of it is written before the error comes."""
    store = NodeStore(place)
    save(store, 1)
    store.close()

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = NodeStore(place)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, 2 * PAGE))
        with pytest.raises(OSError, match="File too large") as raised:
            save(store, 2)
        assert raised.value.errno == errno.EFBIG
        assert hidden(place) == set()
        store.close()

    assert in_child(limited) == 0
    assert [p.name for p in place.iterdir()] == ["step-000000000001-00000001"]


def test_the_folder_is_removed_while_in_use(place: Path) -> None:
    """As session managers do it with node memory when a user logs out."""
    store = NodeStore(place)
    save(store, 1)
    writer = store.reserve("rank-00000", 10)
    shutil.rmtree(place)
    assert store.shard_files() == []
    writer.memory.fill_(1)
    with pytest.raises(FileNotFoundError, match="cannot publish"):
        writer.publish(2, generation(2), 10, b"")
    assert is_whole(save(store, 3))
    store.retire({generation(3)}, lambda part: True)
    assert [h.step for h in store.shard_files()] == [3]
    NodeStore(place)
    assert is_whole(save(store, 4))
    store.close()
    assert len(list(place.glob("step-*"))) == 2


# Whose folder it is


def test_folders_of_others(memory: Path) -> None:
    memory.parent.chmod(0o1777)
    memory.mkdir(mode=0o700)
    memory.chmod(0o770)
    with pytest.raises(PermissionError, match="other users can write"):
        NodeStore(memory)
    memory.chmod(0o755)
    NodeStore(memory).close()
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700  # Nobody else could write; nor read now.
    memory.rmdir()
    memory.write_text("precious")
    with pytest.raises(NotADirectoryError):
        NodeStore(memory)
    memory.unlink()
    elsewhere = memory.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    memory.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError, match="link"):
        NodeStore(memory)
    assert list(elsewhere.iterdir()) == []


@as_root
def test_folders_that_another_user_has_made(memory: Path) -> None:
    base = memory.parent
    base.chmod(0o1777)
    trap, prey = base / "lightning-resilience-0", base / "prey"
    prey.mkdir(mode=0o700)
    for make in (lambda: trap.mkdir(mode=0o777), lambda: trap.symlink_to(prey)):
        make()
        os.chown(trap, 65534, 65534, follow_symlinks=False)
        with pytest.raises(PermissionError, match="this folder belongs to another user"):
            NodeStore(trap / "run" / "fit-000")
        assert list(prey.iterdir()) == []
        shutil.rmtree(trap) if not trap.is_symlink() else trap.unlink()
    memory.mkdir(mode=0o700)
    os.chown(memory, 65534, 65534)
    for mode in (0o1777, 0o700):
        base.chmod(mode)
        with pytest.raises(PermissionError):
            NodeStore(memory)


@as_root
def test_as_an_ordinary_user(memory: Path) -> None:
    memory.parent.chmod(0o1777)

    def run() -> None:
        os.setgid(65534)
        os.setuid(65534)
        os.umask(0)
        store = NodeStore(memory / "run" / "fit-000")
        assert is_whole(save(store, 1))
        for folder in (memory, memory / "run"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        store.close()
        locked = memory / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            NodeStore(locked / "fit-000")

    assert in_child(run) == 0


def test_a_folder_that_is_writable_but_not_readable(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(errno.EACCES, "not readable", os.fspath(directory))

    monkeypatch.setattr(module, "sync_directory", refuse)
    store = NodeStore(memory)
    assert store.shard_files() == []
    store.close()


def test_shards_that_another_process_removes_after_they_were_listed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_entries, removed = module._entries, ""

    def list_and_remove(folder: Path) -> list[os.DirEntry[str]]:
        entries = list_entries(folder)
        for entry in entries:
            if removed and entry.name.startswith(removed):
                os.unlink(entry.path)
        return entries

    store = NodeStore(place)
    for step in (1, 2):
        for name in ("rank-00000", "rank-00001", "rank-00002"):
            save(store, step, name)
    monkeypatch.setattr(module, "_entries", list_and_remove)
    removed = "rank-00001"
    there = [(step, name) for step in (2, 1) for name in ("rank-00000", "rank-00002")]
    assert [(file.step, file.path.stem) for file in store.shard_files()] == there
    damaged = store.path(2, generation(2), "rank-00002")
    removed = damaged.name
    store.quarantine(damaged, "damaged")
    removed = ""
    assert not damaged.exists()
    damaged, move = store.path(1, generation(1), "rank-00002"), checkpoint_file.quarantine

    def remove_and_move(path: Path, *more: Any) -> Path:
        path.unlink()
        return move(path, *more)

    monkeypatch.setattr(checkpoint_file, "quarantine", remove_and_move)
    store.quarantine(damaged, "damaged")
    list_shards = store.shard_files

    def list_and_remove_all() -> list[Any]:
        files = list_shards()
        for file in files:
            file.path.unlink()
        return files

    monkeypatch.setattr(store, "shard_files", list_and_remove_all)
    store.retire([], lambda name: True)
    assert list_shards() == []
    store.close()


def test_links_at_the_names_of_our_files(place: Path) -> None:
    store = NodeStore(place)
    prey = place.parent / "prey"
    prey.write_text("precious")
    writer = store.reserve("rank-00000", 10)
    spare = writer.path
    writer.abandon()
    spare.unlink(missing_ok=True)
    spare.symlink_to(prey)
    error = error_of(save, store, 1)
    assert (error is not None and error.errno == errno.ELOOP) == store.in_memory  # On a disk it is replaced.
    assert prey.read_text() == "precious"
    assert is_whole(save(store, 2))
    assert prey.read_text() == "precious"


# What killed processes leave


def test_leftovers(place: Path) -> None:
    def die() -> None:
        store = NodeStore(place)
        save(store, 1)
        save(store, 2)
        store.retire({generation(2)}, lambda part: True)
        store.reserve("rank-00001", 10)
        (place / "step-000000000009-00000009").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    living = NodeStore(place)
    writer = living.reserve("rank-00002", 10)
    assert in_child(die) == -signal.SIGKILL
    (place / ".spare-rank-00007.0123abcd").touch()  # of nobody
    for foreign in ("notes.txt", ".spare-x", ".writer-x", ".spare-rank-00007.0123abcd.bak"):
        (place / foreign).touch()
    before = hidden(place)
    descriptors = len(os.listdir("/proc/self/fd"))
    store = NodeStore(place)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    assert hidden(place) == {
        p
        for p in before
        if "rank-00002" in p or p in {"notes.txt", ".spare-x", ".writer-x", ".spare-rank-00007.0123abcd.bak"}
    }
    assert [p.name for p in place.glob("step-*")] == ["step-000000000002-00000002"]
    assert is_whole(store.shard_files()[0].path)
    writer.memory.fill_(3)
    assert writer.publish(3, generation(3), 10, b"").read_bytes() == b"\3" * 10


def test_all_ranks_of_a_node_clean_up_at_once(place: Path) -> None:
    NodeStore(place).close()
    for number in range(40):
        for name in (f".writer-{number:08x}", f".spare-rank-00000.{number:08x}", f".spare-rank-00001.{number:08x}"):
            (place / name).touch()
        (place / f"step-{number:012d}-{number:08x}").mkdir()
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                NodeStore(place).close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    NodeStore(place).close()
    assert list(place.iterdir()) == []


def test_what_lives_is_left_alone_even_if_stopped(place: Path) -> None:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            store = NodeStore(place)
            writer = store.reserve("rank-00000", 100)
            if not store.in_memory:
                writer.path.touch()
            os.write(write, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)
            writer.memory.fill_(5)
            writer.publish(5, generation(5), 100, b"")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"x"
    os.waitpid(pid, os.WUNTRACED)
    for _ in range(2):
        NodeStore(place).close()
    assert len(hidden(place)) == 2
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store = NodeStore(place)
    assert [h.path.read_bytes() for h in store.shard_files()] == [b"\5" * 100]
    assert hidden(place) == set()


def test_a_forked_child_does_not_count_as_the_one_that_died(place: Path) -> None:
    """A data-loader worker that has outlived its rank: it has inherited everything that can be inherited."""
    read, write = os.pipe()
    end_read, end_write = os.pipe()

    def rank() -> None:
        store = NodeStore(place)
        store.reserve("rank-00000", 10)
        if os.fork() == 0:
            os.close(end_write)
            os.write(write, b"x")
            os.read(end_read, 1)
            os._exit(0)
        os.read(read, 1)
        os.write(write, b"x")
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert in_child(rank) == -signal.SIGKILL
        NodeStore(place)
        assert hidden(place) == set()
    finally:
        for fd in (read, write, end_read, end_write):
            os.close(fd)


def test_a_forked_child_cleans_up_after_its_parent(place: Path) -> None:
    read, write = os.pipe()

    def rank() -> None:
        store = NodeStore(place)
        store.reserve("rank-00000", 10)
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                threading.Event().wait(0.01)
            NodeStore(place)
            os.write(write, json.dumps(sorted(hidden(place))).encode())
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert in_child(rank) == -signal.SIGKILL
        assert json.loads(os.read(read, 1000)) == []
    finally:
        os.close(read)
        os.close(write)


def test_a_claim_that_is_looked_at_before_it_is_locked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes it for abandoned and removes it, or has it locked for just that moment."""
    real, seen = fcntl.lockf, []

    def lockf(fd: int, operation: int) -> None:
        seen.append(fd)
        if len(seen) == 1:
            raise BlockingIOError(errno.EAGAIN, "locked")
        if len(seen) == 2:
            for path in place.glob(".writer-*"):
                path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    store = NodeStore(place)
    assert len(seen) >= 3
    assert is_whole(save(store, 1))
    assert store._claim is not None
    assert store._claim.holds()


def test_a_store_that_cannot_be_made_anew_closes_nobody_elses_file(place: Path, tmp_path: Path) -> None:
    """Node memory was cleaned up, and there is no room for its folder: a save later there may be."""
    store = NodeStore(place)
    shutil.rmtree(place)
    place.symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        store.reserve("rank-00000", 100)
    with open(tmp_path / "theirs", "w+") as theirs:  # it may get the number of a file that was closed
        with pytest.raises(OSError, match="link"):
            store.reserve("rank-00000", 100)
        os.fstat(theirs.fileno())
    place.unlink()
    assert is_whole(save(store, 1))


def test_a_storage_without_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert in_child(lambda: (NodeStore(place).reserve("rank-00000", 10), os.kill(os.getpid(), signal.SIGKILL))) < 0
    left = hidden(place)
    store = NodeStore(place)
    assert hidden(place) == left  # Whose they are, nobody knows.
    assert is_whole(save(store, 1))


# Quarantine


def test_quarantine(place: Path) -> None:
    store = NodeStore(place)
    store.quarantine(store.path(1, generation(1), "rank-00000"), "never was")
    assert hidden(place) == set()
    paths = [save(store, step) for step in range(4)]
    for step, path in enumerate(paths[:3]):
        store.quarantine(path, f"reason {step}")
        os.utime(place)  # Times of files advance in ticks of some milliseconds.
        threading.Event().wait(0.02)
    folder = place / "quarantine"
    gc.collect()
    assert maps_of(folder) == []
    reasons = sorted(folder.glob("*.reason.txt"))
    assert sorted(r.read_text().splitlines()[1] for r in reasons) == ["reason 0", "reason 1", "reason 2"]
    whole = [p for p in folder.iterdir() if p not in reasons]
    assert sorted(p.read_bytes()[:4] for p in whole) == [content(1)[:4], content(2)[:4]]
    assert [h.step for h in store.shard_files()] == [3]
    store.quarantine(paths[0], "again")
    store.quarantine(place / "step-000000000077-00000077" / "rank-00000.shard", "never was")
    assert len(list(folder.iterdir())) == 5
    NodeStore(place)
    assert len(list(folder.iterdir())) == 5
    # The memory of a quarantined part is not written into again.
    save(store, 5)
    assert {p.read_bytes()[:4] for p in whole} == {content(1)[:4], content(2)[:4]}


def test_quarantine_that_does_not_take_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NodeStore(place)
    path = save(store, 1)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if "quarantine" in str(target):
            raise OSError(errno.EROFS, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="skip it"):
        store.quarantine(path, "bad")
    assert path.exists()


@pytest.mark.slow
def test_needs_no_lightning() -> None:
    code = (
        "import sys, lightning_resilience.checkpoint.node_store;"
        "assert not {'lightning', 'lightning_fabric', 'pytorch_lightning'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_storage_that_refuses_before_it_looks(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does: a client that is to create a folder leaves out to look whether it is there."""
    memory.mkdir(0o700)
    mkdir = os.mkdir

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).parent == memory.parent:  # such as /home, in which users may create nothing
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    NodeStore(memory / "run").close()
