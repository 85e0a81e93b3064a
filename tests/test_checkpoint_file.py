"""Checkpoint files and directories: what a crash, a full disk or a flipped bit can do to them."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resilience import _files
from lightning_resilience._files import clean_temporaries, matching
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint

METADATA = {"run": "ü", "fit": 0, "step": 12, "world_size": 2}


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(64, 8, generator=generator), "half": torch.ones(3).half(), "step": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["step"] == other["step"]
        and torch.equal(one["weight"], other["weight"])
        and torch.equal(one["half"], other["half"])
    )


def in_child(action: Callable[[], None]) -> int:
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


# A file


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    stamp = checkpoint_file.save(state(1), path, METADATA)
    assert checkpoint_file.read_stamp(path) == checkpoint_file.verify(path) == stamp
    assert stamp.metadata == METADATA
    assert same(checkpoint_file.load(path), state(1))
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_everybody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint_file.save(state(1), path, METADATA)
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        assert same(torch.load(path, **options), state(1))
    with open(path, "rb") as file:
        assert same(torch.load(file), state(1))
    archive = zipfile.ZipFile(path)
    assert archive.testzip() is None
    assert json.loads(archive.comment)["metadata"] == METADATA
    assert same(torch.load(path, weights_only=True), state(1))


def test_archives_are_zip64(tmp_path: Path) -> None:
    """So every test here covers what archives above 4 GiB or 65535 records look like."""
    checkpoint_file.save(state(1), tmp_path / "a.ckpt")
    assert b"PK\x06\x06" in (tmp_path / "a.ckpt").read_bytes()
    assert b"PK\x06\x07" in (tmp_path / "a.ckpt").read_bytes()


def test_loads_only_what_is_safe(tmp_path: Path) -> None:
    checkpoint_file.save({"path": Path("/")}, tmp_path / "a.ckpt")
    with pytest.raises(CorruptCheckpoint, match=r"it is refused: it holds pathlib\.\S*PosixPath, which a safe load"):
        checkpoint_file.load(tmp_path / "a.ckpt")
    assert checkpoint_file.load(tmp_path / "a.ckpt", weights_only=False) == {"path": Path("/")}


@pytest.mark.slow
def test_memory_does_not_hold_the_file(tmp_path: Path) -> None:
    size = 256 << 20

    def limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, resource.RLIM_INFINITY))

    tensor = torch.zeros(size, dtype=torch.uint8)

    def save_and_verify() -> None:
        limit()
        checkpoint_file.save(tensor, tmp_path / "a.ckpt")
        checkpoint_file.verify(tmp_path / "a.ckpt")

    assert in_child(save_and_verify) == 0


def test_what_a_process_has_verified_another_one_loads_without_hashing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint_file.save({"weight": torch.arange(100_000)}, path)
    verified = checkpoint_file.verify(path)
    assert verified is not None
    hashed = []
    hash_blocks = checkpoint_file._hash_blocks
    monkeypatch.setattr(checkpoint_file, "_hash_blocks", lambda *args: hashed.append(hash_blocks(*args)) or hashed[-1])
    checkpoint_file.load(path, verified=verified.file)
    assert hashed == []

    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the trailer, of which torch knows nothing
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):  # it is not that file any more
        checkpoint_file.load(path, verified=verified.file)


def test_metadata_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 KiB"):
        checkpoint_file.save(state(1), tmp_path / "a.ckpt", {"text": "x" * 70_000})
    assert os.listdir(tmp_path) == []
    stamp = checkpoint_file.save(state(1), tmp_path / "a.ckpt", {"text": "x" * 65_000})
    assert checkpoint_file.verify(tmp_path / "a.ckpt") == stamp


def test_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 125 + ".ckpt")
    checkpoint_file.save(state(1), path)
    assert checkpoint_file.verify(path) is not None


# Damage


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint_file.save({"weight": torch.arange(8)}, path, METADATA)
    content = path.read_bytes()
    for length in range(len(content)):
        os.truncate(path, length) if length == 0 else path.write_bytes(content[:length])
        for check in (checkpoint_file.verify, checkpoint_file.read_stamp, checkpoint_file.load):
            with pytest.raises(CorruptCheckpoint):
                check(path)


@pytest.mark.slow_but_for("None")
@pytest.mark.parametrize("comment_length", [None, 256])
def test_every_flipped_bit_is_noticed(tmp_path: Path, comment_length: int | None) -> None:
    """256: one flipped bit makes the length of the trailer zero, as if there were none."""
    path = tmp_path / "a.ckpt"
    checkpoint_file.save({"weight": torch.arange(8)}, path, {"pad": ""})
    if comment_length is not None:
        missing = comment_length - len(zipfile.ZipFile(path).comment)
        checkpoint_file.save({"weight": torch.arange(8)}, path, {"pad": "x" * missing})
        assert len(zipfile.ZipFile(path).comment) == comment_length
    content = bytearray(path.read_bytes())
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(content)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([content[position] ^ (1 << bit)]), position)
                with pytest.raises(CorruptCheckpoint):
                    checkpoint_file.verify(path)
            os.pwrite(file.fileno(), bytes([content[position]]), position)
    assert checkpoint_file.verify(path) is not None


def test_bytes_after_the_end_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint_file.save(state(1), path)
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptCheckpoint, match="end is damaged"):
        checkpoint_file.verify(path)


def test_bytes_before_the_trailer_are_noticed(tmp_path: Path) -> None:
    """The digest ends where the trailer says that the archive does."""
    path = tmp_path / "a.ckpt"
    size = checkpoint_file.save(state(1), path).size
    content = path.read_bytes()
    end_record = 22  # of a zip archive
    path.write_bytes(content[: size - 2] + b"\0\0" + content[size - end_record :])
    for check in (checkpoint_file.verify, checkpoint_file.read_stamp):
        with pytest.raises(CorruptCheckpoint, match="size is not the one"):
            check(path)


def _nothing(path: Path) -> None:
    pass


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


def _newer_format(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = b'{"format": 2, "size": 1, "metadata": {}, "xxh3_128": "0"}'


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere.ckpt")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nothing, "does not exist"),
        (_dangling, "does not exist"),
        (Path.touch, "is empty"),
        (Path.mkdir, "not a regular file"),
        (_pipe, "not a regular file"),
        (lambda path: path.write_bytes(os.urandom(100_000)), "no zip archive"),
        (lambda path: path.write_bytes(bytes(100_000)), "no zip archive"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100_000)), "truncated"),
        (_foreign_zip, "not one written by torch.save"),
        (_newer_format, "format 2"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "a.ckpt"
    make(path)
    with pytest.raises(CorruptCheckpoint, match=message) as raised:
        checkpoint_file.verify(path)
    assert str(path) in str(raised.value)


# Files of plain Lightning


def test_folders_that_go_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.json").touch()
    scan = os.scandir

    def scan_late(folder: Any = ".") -> Any:
        if str(folder).endswith("one"):
            shutil.rmtree(tmp_path / "one", ignore_errors=True)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert matching(tmp_path, "*/rank-*.json", "none-*") == [tmp_path / "two" / "rank-0.json"]


def test_unstamped_files_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(state(1), path)
    assert checkpoint_file.verify(path) is None
    assert checkpoint_file.read_stamp(path) is None
    assert same(checkpoint_file.load(path), state(1))


def test_unstamped_files_without_checksums_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(1), path)
        checkpoint_file.save(state(2), tmp_path / "b.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint_file.verify(path) is None
    assert same(checkpoint_file.load(path), state(1))
    assert same(checkpoint_file.load(tmp_path / "b.ckpt"), state(2))


@pytest.mark.slow
def test_damage_to_unstamped_files(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"weight": torch.arange(8)}, path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpoint):
            checkpoint_file.verify(path)
    data = content.index(torch.arange(8).numpy().tobytes())
    for position in range(data, data + 64):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CorruptCheckpoint, match="damaged"):
            checkpoint_file.verify(path)
    # Anywhere else it is noticed or does no harm, but never raises anything else.
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x80]) + content[position + 1 :])
        try:
            checkpoint_file.verify(path)
        except CorruptCheckpoint:
            pass


def test_a_truncation_that_leaves_an_inner_archive(tmp_path: Path) -> None:
    inner = tmp_path / "inner.ckpt"
    torch.save(torch.arange(8), inner)
    content = inner.read_bytes()
    path = tmp_path / "a.ckpt"
    torch.save(torch.frombuffer(bytearray(content), dtype=torch.uint8), path)
    outer = path.read_bytes()
    path.write_bytes(outer[: outer.index(content) + len(content)])
    with pytest.raises(CorruptCheckpoint, match="incomplete"):
        checkpoint_file.verify(path)


# Crashes. Every system call with an effect on the disk is a fail-point, and the process is killed at each in turn.

CALLS = ["fsync", "replace", "rename", "unlink", "symlink", "mkdir", "rmdir"]


class FailPoints:
    """Kills this process at its ``kill_at``-th call that touches the disk, half-way through if the call is a write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kill_at: int, writes: bool = True) -> None:
        self.left = kill_at
        self.passed: list[str] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        self._open = _files.__dict__.get("open", open)
        if writes:
            monkeypatch.setattr(_files, "open", self._opened, raising=False)

    def point(self, what: str, half: Callable[[], object] = lambda: None) -> None:
        self.left -= 1
        if self.left == 0:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(what)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.point(function.__name__)
            return function(*args, **kwargs)

        return wrapped

    def _opened(self, *args: Any, **kwargs: Any) -> Any:
        self.point("open")
        return WatchedFile(self._open(*args, **kwargs), self)


class WatchedFile:
    def __init__(self, file: Any, points: FailPoints) -> None:
        self._file, self._points = file, points

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.flush()

        self._points.point("write", half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def killed_everywhere(
    prepare: Callable[[Path], None], action: Callable[[Path], object], root: Path, writes: bool = True
) -> Iterator[Path]:
    """Yields a prepared folder in which ``action`` was killed, once for each of its fail-points."""
    for kill_at in range(1, 1000):
        folder = root / f"kill-{kill_at}"
        folder.mkdir()
        prepare(folder)

        def run(folder: Path = folder, kill_at: int = kill_at) -> None:
            points = FailPoints(pytest.MonkeyPatch(), kill_at, writes)
            action(folder)
            assert {"fsync", "replace"} <= set(points.passed), "the fail-points have missed the save"

        code = in_child(run)
        if code == 0:
            assert kill_at > 5
            return
        assert code == -signal.SIGKILL
        yield folder
        shutil.rmtree(folder)
    raise AssertionError("the save does not end")


def test_killed_at_every_point_of_a_save(tmp_path: Path) -> None:
    published = 0
    for folder in killed_everywhere(
        lambda folder: checkpoint_file.save(state(1), folder / "a.ckpt") and None,
        lambda folder: checkpoint_file.save(state(2), folder / "a.ckpt"),
        tmp_path,
    ):
        found = checkpoint_file.load(folder / "a.ckpt")
        assert same(found, state(found["step"]))
        published += found["step"] == 2
        leftovers = {path.name for path in folder.iterdir()} - {"a.ckpt"}
        assert {path.name for path in clean_temporaries(folder)} == leftovers
    assert published == 1  # Only what follows the rename, the fsync of the directory, has the new one.


def test_killed_at_every_point_of_a_link(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        checkpoint_file.save(state(1), folder / "1.ckpt")
        checkpoint_file.save(state(2), folder / "2.ckpt")
        checkpoint_file.link(folder / "1.ckpt", folder / "last.ckpt")

    def action(folder: Path) -> None:
        checkpoint_file.link(folder / "2.ckpt", folder / "last.ckpt")
        checkpoint_file.remove(folder / "1.ckpt")
        checkpoint_file.save(state(3), folder / "3.ckpt")

    for folder in killed_everywhere(prepare, action, tmp_path, writes=False):
        found = checkpoint_file.load(folder / "last.ckpt")
        assert same(found, state(found["step"]))


def write_shards(folder: Path, seed: int) -> None:
    """As ranks do it: in place, one after the other, the last of them cut short by whatever kills us."""
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    _files.sync_directory(folder)  # A fail-point before, between and after the shards.
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "deep/meta.pt"):
        (folder / name).write_bytes(f"{name} {seed}".encode() * 10)
        _files.sync_directory(folder)
    (folder / f"only-in-{seed}").touch()


def seed_of(folder: Path) -> int:
    checkpoint_file.verify_directory(folder)
    seeds = {int(path.read_bytes().split()[-1].decode()[:1]) for path in folder.rglob("*.distcp")}
    assert len(seeds) == 1
    return seeds.pop()


@pytest.mark.slow
def test_killed_at_every_point_of_a_directory(tmp_path: Path) -> None:
    def save(folder: Path, seed: int) -> None:
        checkpoint_file.set_aside(folder / "a.ckpt")
        write_shards(folder / "a.ckpt", seed)
        checkpoint_file.seal_directory(folder / "a.ckpt")
        checkpoint_file.discard_aside(folder / "a.ckpt")

    def complete(folder: Path) -> list[int]:
        found = []
        for path in folder.glob("*.ckpt"):
            try:
                found.append(seed_of(path))
            except CorruptCheckpoint:
                pass
        return found

    for folder in killed_everywhere(lambda folder: save(folder, 1), lambda folder: save(folder, 2), tmp_path):
        assert set(complete(folder)) & {1, 2}
        save(folder, 3)  # Goes on from whatever the kill left, and leaves nothing of it.
        assert complete(folder) == [3]
        assert [path.name for path in (folder / "a.ckpt").glob("only-in-*")] == ["only-in-3"]
        clean_temporaries(folder)
        assert [path.name for path in folder.iterdir()] == ["a.ckpt"]


def test_the_data_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss keeps only what was synced: file, then rename, then directory."""
    points = FailPoints(monkeypatch, 0)
    checkpoint_file.save(state(1), tmp_path / "a.ckpt", before_publish=lambda: points.point("before_publish"))
    assert points.passed[0] == "open"
    assert set(points.passed[1:-4]) == {"write"}
    assert points.passed[-4:] == ["fsync", "before_publish", "replace", "fsync"]

    write_shards(tmp_path / "dir.ckpt", 1)
    points.passed.clear()
    checkpoint_file.seal_directory(tmp_path / "dir.ckpt")
    marker = points.passed.index("open")
    assert points.passed[:marker] == ["fsync"] * 8  # Five files, the two directories they are in, the one around.
    assert points.passed[-3:] == ["fsync", "replace", "fsync"]


# Storage that does not take it


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root writes into read-only directories."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    big = [torch.full((64, 64), float(value)) for value in range(4)]  # More than fits into the buffer of the file.
    checkpoint_file.save(big, path)

    def save_with_room_for(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises(OSError, match=r"cannot save the checkpoint \(File too large\).*untouched") as raised:
            checkpoint_file.save(big[:-1] + big[:1], path)
        assert raised.value.errno == errno.EFBIG
        assert str(path) in str(raised.value)

    content = path.read_bytes()
    for size in range(0, len(content) * 3 // 4, 997):
        assert in_child(lambda size=size: save_with_room_for(size)) == 0
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_read_only_or_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot save the checkpoint"):
        checkpoint_file.save(state(1), tmp_path / "missing" / "a.ckpt")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # Below tmp_path an unprivileged user would not even arrive.
    try:
        folder.chmod(0o555)
        with unprivileged(), pytest.raises(PermissionError, match="cannot save the checkpoint"):
            checkpoint_file.save(state(1), folder / "a.ckpt")
        assert os.listdir(folder) == []
    finally:
        folder.rmdir()


@pytest.mark.parametrize("write", [_files.write_json, _files.create_json])
def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path, write: Callable[..., Any]) -> None:
    path = tmp_path / "missing" / "a.json"
    with pytest.raises(FileNotFoundError) as raised:
        write(path, {})
    assert raised.value.filename == str(path)


def test_a_stopped_publication_leaves_the_old_content(tmp_path: Path) -> None:
    def stop() -> None:
        raise SystemExit("a newer attempt owns this run")

    checkpoint_file.save(state(1), tmp_path / "a.ckpt")
    with pytest.raises(SystemExit, match="newer attempt"):
        checkpoint_file.save(state(2), tmp_path / "a.ckpt", before_publish=stop)
    assert same(checkpoint_file.load(tmp_path / "a.ckpt"), state(1))
    write_shards(tmp_path / "dir.ckpt", 1)
    with pytest.raises(SystemExit, match="newer attempt"):
        checkpoint_file.seal_directory(tmp_path / "dir.ckpt", before_publish=stop)
    with pytest.raises(CorruptCheckpoint, match="never finished"):
        checkpoint_file.verify_directory(tmp_path / "dir.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "dir.ckpt"}


def test_the_first_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    """A class that cannot be pickled, not what torch makes of the unfinished archive."""
    with pytest.raises((AttributeError, TypeError), match=r"pickle"):
        checkpoint_file.save({"function": lambda: None}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        checkpoint_file.save(
            state(1), tmp_path / "dead.ckpt", before_publish=lambda: os.kill(os.getpid(), signal.SIGKILL)
        )

    assert in_child(killed) == -signal.SIGKILL
    dead = {path.name for path in tmp_path.iterdir()}
    assert len(dead) == 1
    own = _files.temporary_path(tmp_path / "own.ckpt")
    own.touch()
    no_process = int(dead.copy().pop().split("-")[-2])
    with monkeypatch.context() as other_host:
        other_host.setattr(_files, "_host", lambda: "00000000")
        other_host.setattr(os, "getpid", lambda: no_process)
        elsewhere, old = (_files.temporary_path(tmp_path / name) for name in ("elsewhere.ckpt", "old.ckpt"))
    elsewhere.touch()
    old.touch()
    os.utime(old, (0, time.time() - 25 * 3600))
    (tmp_path / ".somebody-elses.tmp").touch()
    assert {path.name for path in clean_temporaries(tmp_path)} == dead | {old.name}
    assert {path.name for path in tmp_path.iterdir()} == {own.name, elsewhere.name, ".somebody-elses.tmp"}


def test_a_writer_in_another_container_of_this_host_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of the host, and other numbers of processes."""
    with monkeypatch.context() as there:
        there.setattr(_files, "pid_namespace", lambda: "pid:[1]")
        there.setattr(os, "getpid", lambda: 1 << 22)  # larger than any
        elsewhere = _files.temporary_path(tmp_path / "a.ckpt")
    elsewhere.touch()
    assert clean_temporaries(tmp_path) == []


# Directories


def test_a_sealed_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    write_shards(folder, 1)
    with pytest.raises(CorruptCheckpoint, match="never finished"):
        checkpoint_file.verify_directory(folder)
    checkpoint_file.seal_directory(folder, METADATA)
    stamp = checkpoint_file.verify_directory(folder)
    assert stamp.metadata == METADATA
    assert stamp.size == sum(
        path.stat().st_size for path in folder.rglob("*") if path.name != checkpoint_file.MARKER and path.is_file()
    )


def test_what_a_killed_sealing_left_is_not_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    write_shards(folder, 1)
    _files.temporary_path(folder / checkpoint_file.MARKER).touch()
    checkpoint_file.seal_directory(folder)
    for path in folder.glob(".*.tmp"):
        path.unlink()
    checkpoint_file.verify_directory(folder)


def test_an_unsealed_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    write_shards(folder, 1)
    checkpoint_file.seal_directory(folder)
    (folder / checkpoint_file.MARKER).unlink()
    with pytest.raises(CorruptCheckpoint, match="never finished"):
        checkpoint_file.verify_directory(folder)


@pytest.mark.slow
def test_killed_at_every_point_of_the_publication_of_a_directory(tmp_path: Path) -> None:
    """The one that was there before counts again under its name."""

    def publish(folder: Path, seed: int) -> None:
        written = _files.temporary_path(folder / "a.ckpt")
        write_shards(written, seed)
        checkpoint_file.publish_directory(written, folder / "a.ckpt", {}, lambda: None, {})

    for folder in killed_everywhere(lambda folder: publish(folder, 1), lambda folder: publish(folder, 2), tmp_path):
        checkpoint_file.put_back_aside(folder)
        assert seed_of(folder / "a.ckpt") in (1, 2)
        publish(folder, 3)
        clean_temporaries(folder)
        assert seed_of(folder / "a.ckpt") == 3
        assert [path.name for path in folder.iterdir()] == ["a.ckpt"]


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    for name in ("data", "previous-data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    checkpoint_file.set_aside(tmp_path / "data")
    checkpoint_file.discard_aside(tmp_path / "data")
    checkpoint_file.set_aside(tmp_path / "missing")
    (tmp_path / "previous-other").mkdir()
    checkpoint_file.put_back_aside(tmp_path)
    assert (tmp_path / "previous-other").exists(), "it was never sealed"
    for name in ("data", "previous-data"):
        assert (tmp_path / name / "precious").exists()


def test_a_removal_leaves_no_half(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_shards(folder / "a.ckpt", 1)
        checkpoint_file.seal_directory(folder / "a.ckpt")

    def action(folder: Path) -> None:
        checkpoint_file.remove(folder / "a.ckpt")
        checkpoint_file.save(state(1), folder / "b.ckpt")

    for folder in killed_everywhere(prepare, action, tmp_path, writes=False):
        if (folder / "a.ckpt").exists():
            checkpoint_file.verify_directory(folder / "a.ckpt")
        clean_temporaries(folder)
        assert {path.name for path in folder.iterdir()} <= {"a.ckpt", "b.ckpt"}


@pytest.mark.slow
def test_every_flipped_bit_in_a_directory_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    (folder / "shard").write_bytes(b"abcdefgh")
    checkpoint_file.seal_directory(folder, METADATA)
    for path in (folder / "shard", folder / checkpoint_file.MARKER):
        content = path.read_bytes()
        for position in range(len(content)):
            for bit in range(8):
                path.write_bytes(content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :])
                try:
                    checkpoint_file.verify_directory(folder)
                except CorruptCheckpoint:
                    continue
                # White space between the tokens of the marker, for one, means nothing.
                assert path.name == checkpoint_file.MARKER
                assert json.loads(path.read_bytes()) == json.loads(content)
        path.write_bytes(content)
    checkpoint_file.verify_directory(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: os.truncate(folder / ".metadata", 3), r"\.metadata has 3 bytes instead of"),
        (lambda folder: (folder / checkpoint_file.MARKER).write_text("{}"), "marker is damaged"),
        (lambda folder: (folder / checkpoint_file.MARKER).write_text("[]"), "marker is damaged"),
        (lambda folder: (folder / checkpoint_file.MARKER).write_bytes(b""), "marker is damaged"),
        (shutil.rmtree, "does not exist"),
        (lambda folder: (shutil.rmtree(folder), folder.touch()), "not a directory"),
    ],
)
def test_damage_to_a_directory(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "a.ckpt"
    write_shards(folder, 1)
    checkpoint_file.seal_directory(folder)
    damage(folder)
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoint_file.verify_directory(folder)


def test_an_empty_directory_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="no files to seal"):
        checkpoint_file.seal_directory(tmp_path)


# Links, removal, quarantine


def test_a_link_takes_the_place_of_anything(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    checkpoint_file.save(state(1), target)
    last = tmp_path / "last.ckpt"
    checkpoint_file.link(target, last)
    assert os.readlink(last) == "a.ckpt"
    last.unlink()
    last.write_text("a file")
    checkpoint_file.link(target, last)
    last.unlink()
    last.mkdir()
    (last / "shard").touch()
    checkpoint_file.link(target, last)
    assert os.readlink(last) == "a.ckpt"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint_file.link(tmp_path / "missing.ckpt", last)
    assert same(checkpoint_file.load(last), state(1))
    checkpoint_file.remove(last)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_storage_without_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    checkpoint_file.save(state(1), tmp_path / "a.ckpt")
    checkpoint_file.link(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert same(checkpoint_file.load(tmp_path / "last.ckpt"), state(1))


def test_quarantine(tmp_path: Path) -> None:
    bad, folder = tmp_path / "step[1].ckpt", tmp_path / "deep" / "quarantine"
    places = []
    for content in ("one", "two"):
        bad.write_text(content)
        places.append(checkpoint_file.quarantine(bad, folder, f"it is {content}"))
    bad.mkdir()
    (bad / "shard").touch()
    places.append(checkpoint_file.quarantine(bad, folder, "a directory"))
    assert [places[0].read_text(), places[1].read_text()] == ["one", "two"]
    assert (places[2] / "shard").exists()
    assert not bad.exists()
    assert "it is one" in places[0].with_name(f"{places[0].name}.reason.txt").read_text()
    # Another process has been faster.
    assert checkpoint_file.quarantine(bad, folder, "again") == places[2]
    with pytest.raises(FileNotFoundError):
        checkpoint_file.quarantine(tmp_path / "never-was.ckpt", folder, "missing")


def test_quarantine_by_many_processes_at_once(tmp_path: Path) -> None:
    bad, folder = tmp_path / "a.ckpt", tmp_path / "quarantine"
    bad.write_text("bad")
    children = []
    for _ in range(8):
        if (pid := os.fork()) == 0:
            try:
                os._exit(0 if checkpoint_file.quarantine(bad, folder, "bad").read_text() == "bad" else 1)
            finally:
                os._exit(2)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 8
    assert len(list(folder.iterdir())) == 2


def test_quarantine_on_storage_that_does_not_take_it(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    bad = folder / "a.ckpt"
    bad.write_text("bad")
    try:
        folder.chmod(0o555)
        with unprivileged(), pytest.raises(PermissionError, match="skip it"):
            checkpoint_file.quarantine(bad, folder / "quarantine", "bad")
        assert bad.read_text() == "bad"
    finally:
        folder.chmod(stat.S_IRWXU)
        shutil.rmtree(folder)


def test_quarantine_on_a_full_disk_still_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = tmp_path / "a.ckpt"
    bad.write_text("bad")
    with pytest.MonkeyPatch.context() as full:
        full.setattr(
            checkpoint_file, "publish", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
        )
        place = checkpoint_file.quarantine(bad, tmp_path / "quarantine", "checksum differs")
    assert place.read_text() == "bad"
    assert "checksum differs" in caplog.text


@pytest.mark.skipif(
    not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev,
    reason="needs two file systems",
)
def test_quarantine_to_another_file_system_stays_on_this_one(tmp_path: Path) -> None:
    bad = tmp_path / "a.ckpt"
    bad.write_text("bad")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        place = checkpoint_file.quarantine(bad, Path(elsewhere), "bad")
        assert place.parent == tmp_path / "quarantine"
        assert checkpoint_file.quarantine(bad, Path(elsewhere), "bad") == place


@pytest.mark.slow
def test_needs_no_lightning() -> None:
    code = (
        "import sys, lightning_resilience.checkpoint.checkpoint_file;"
        "assert not {'lightning', 'lightning_fabric', 'pytorch_lightning'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_loop_of_links_on_shared_storage_is_no_damage(tmp_path: Path) -> None:
    """An automounter may give another answer in a moment."""
    path = tmp_path / "loop.ckpt"
    path.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        checkpoint_file.verify(path)
