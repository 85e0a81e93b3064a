"""Checks before training whether the local checkpoints of a node fit into its memory or on its disk.

Files in node memory (tmpfs) count against the size of the file system, and against the memory of the machine and of the
job's control group. A full file system fails a save; a lack of memory kills a rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience._files import matching
from lightning_resilience._formatting import UNLIMITED_BYTES, format_bytes

_MEMORY_FILE_SYSTEMS = {"tmpfs", "devtmpfs", "ramfs"}
_SHARED_MEMORY = Path("/dev/shm")
_MAX_LEFT_FREE = 8 << 30
_PROC = Path("/proc")


@dataclass(frozen=True)
class Room:
    """Available bytes, and what limits them."""

    nbytes: int
    limit: str


@dataclass(frozen=True)
class Available:
    """Space that a node has for generations.

    Args:
        in_memory: Whether the folder is in node memory.
        files: Space for files in the folder, including files that it already holds, which are reused. In node memory
            never more than ``memory``.
        memory: Memory for buffers, and for files in node memory.
    """

    in_memory: bool
    files: Room
    memory: Room


@dataclass(frozen=True)
class Needed:
    """Bytes that all ranks of a node need in files, and in memory for buffers."""

    files: int
    buffers: int


def in_node_memory(directory: str | os.PathLike[str], proc: Path = _PROC) -> bool:
    """Whether files in the existing ``directory`` are in memory; false if unknown, which is slower but safe."""
    return any(kind in _MEMORY_FILE_SYSTEMS for kind in file_systems(directory, proc))


def file_systems(directory: str | os.PathLike[str], proc: Path = _PROC) -> list[str]:
    """The kind of the file system of an existing directory, such as ``nfs4``; empty if unknown."""
    status = os.stat(directory)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return [mount.kind for mount in _mounts(proc) if mount.device == device]


def available_bytes(directory: str | os.PathLike[str], proc: Path = _PROC) -> Available:
    """Measures the space for generations in ``directory``.

    Memory is the minimum of ``MemAvailable`` and of limit minus usage of the control group of this process and of each
    group above it. The file cache does not count as used, because the kernel reclaims it first. Half of ``/dev/shm``,
    at most 8 GiB, is left free: where it is small, as in a container (64 MiB by default), data-loader workers would
    otherwise fail with "no space left".

    Args:
        directory: May not exist yet; its file system is that of the nearest existing folder.
        proc: Mount point of the ``proc`` file system.
    """
    folder = Path(directory).absolute()
    held = _held_bytes(folder)
    while not folder.is_dir():
        folder = folder.parent
    status = os.statvfs(folder)
    in_memory = in_node_memory(folder, proc)
    memory = memory_left(proc)
    # A tmpfs without a size limit reports no blocks.
    free = status.f_bavail * status.f_frsize if status.f_blocks else UNLIMITED_BYTES
    files = Room(free + held, f"the free space of the file system of {folder}")
    if status.f_blocks and _is_shared_memory(folder):
        left = min(status.f_blocks * status.f_frsize // 2, _MAX_LEFT_FREE)
        limit = f"{files.limit}, less {format_bytes(left)} for data-loader workers"
        files = Room(max(files.nbytes - left, 0), limit)
    if in_memory:
        memory = Room(memory.nbytes + held, memory.limit)
        files = min(files, memory, key=lambda room: room.nbytes)
    return Available(in_memory, files, memory)


def _is_shared_memory(folder: Path) -> bool:
    """Whether ``folder`` is in ``/dev/shm``, where data-loader workers put batches and NCCL its buffers."""
    try:
        return folder.stat().st_dev == _SHARED_MEMORY.stat().st_dev
    except OSError:
        return False


def memory_left(proc: Path = _PROC) -> Room:
    """Available memory of this node; see :func:`available_bytes`."""
    return min(_memory_limits(proc), key=lambda room: room.nbytes)


def needed_bytes(shard_bytes: int, keep: int, replicas_received: int, in_memory: bool) -> Needed:
    """Computes the space that the generations of a node need.

    There are ``keep`` generations and the one being written. Replicas are assumed to be as large as the node's own
    shards. On a disk each shard also has a buffer in memory:

        files   = shard_bytes * (1 + replicas_received) * (keep + 1)
        buffers = 0 in node memory, otherwise shard_bytes * (1 + replicas_received)

    Args:
        shard_bytes: Bytes that the ranks of this node write per generation: with DDP about one copy of parameters and
            optimizer state, otherwise the sum of the ranks' shards.
        keep: Number of complete generations to keep.
        replicas_received: Number of other nodes whose replicas each rank keeps.
        in_memory: Whether the files are in node memory.
    """
    total = shard_bytes * (1 + replicas_received)
    return Needed(files=total * (keep + 1), buffers=0 if in_memory else total)


def check(
    directory: str | os.PathLike[str],
    shard_bytes: int,
    keep: int,
    replicas_received: int = 0,
    proc: Path = _PROC,
) -> None:
    """Raises if the generations will not fit. Call it before any rank reserves memory for its first save.

    Args:
        directory: Folder of the generations; may not exist yet.
        shard_bytes: See :func:`needed_bytes`.
        keep: See :func:`needed_bytes`.
        replicas_received: See :func:`needed_bytes`.
        proc: Mount point of the ``proc`` file system.

    Raises:
        ValueError: If they will not fit. The message names the needed and the available space and what to set.
    """
    available = available_bytes(directory, proc)
    needed = needed_bytes(shard_bytes, keep, replicas_received, available.in_memory)
    smaller = "keep fewer generations (keep=)" if keep > 1 else "save less often or less state"
    if needed.files > available.files.nbytes:
        what = f"{keep} generations and the one being written, {format_bytes(shard_bytes)} each"
        if replicas_received:
            what += f", and as much for each of {replicas_received} other nodes"
        elsewhere = "a folder on a local disk" if available.in_memory else "a folder with more space"
        raise ValueError(
            f"the local checkpoints need {format_bytes(needed.files)} in {directory} ({what}), but only "
            f"{format_bytes(available.files.nbytes)} are available ({available.files.limit}): {smaller} or set "
            f"{elsewhere} (dir=, --local-dir)"
        )
    memory = needed.buffers + (needed.files if available.in_memory else 0)
    if memory > available.memory.nbytes:
        advice = "give the job more memory, or leave the local checkpoints out"
        if available.in_memory:
            advice = f"{smaller} or set a folder on a local disk (dir=, --local-dir)"
        raise ValueError(
            f"the local checkpoints in {directory} need {format_bytes(memory)} of memory on this node, but only "
            f"{format_bytes(available.memory.nbytes)} are available ({available.memory.limit}): {advice}"
        )


def _held_bytes(directory: Path) -> int:
    """Bytes of the generations and spare files in ``directory``."""
    total = 0
    for path in matching(directory, ".spare-*", "step-*/*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:  # retired meanwhile
            continue
    return total


# Limits of the machine


@dataclass(frozen=True)
class _Mount:
    device: str
    root: str
    path: Path
    kind: str
    options: list[str]


def _mounts(proc: Path) -> list[_Mount]:
    mounts = []
    for line in _read(proc / "self" / "mountinfo").splitlines():
        before, after = (half.split() for half in line.partition(" - ")[::2])
        if len(before) >= 5 and len(after) >= 2:
            options = after[2].split(",") if len(after) > 2 else []
            mounts.append(_Mount(before[2], _unescape(before[3]), Path(_unescape(before[4])), after[0], options))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    """The content of a small file of the kernel; empty if it does not exist."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """The number in a file; ``None`` for a missing file and for ``max``."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _memory_limits(proc: Path) -> Iterator[Room]:
    """Available memory according to each limit."""
    yield Room(UNLIMITED_BYTES, "no limit")
    if (found := re.search(r"^MemAvailable:\s*(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)) is not None:
        yield Room(int(found[1]) * 1024, "the memory that this node has available")
    for group, version in _control_groups(proc):
        if version == 2:
            # Above "high" a group is not killed, but throttled until it no longer advances.
            limits = [_read_number(group / "memory.max"), _read_number(group / "memory.high")]
            usage, prefix = _read_number(group / "memory.current"), ""
        else:
            limits = [_read_number(group / "memory.limit_in_bytes")]
            usage, prefix = _read_number(group / "memory.usage_in_bytes"), "total_"
        for limit in limits:
            if limit is not None and usage is not None:
                cache = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
                left = limit - max(usage - sum(map(int, cache)), 0)
                yield Room(max(left, 0), f"the memory limit of {format_bytes(limit)} of the control group {group}")


def _control_groups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Folder and version of the memory control group of this process, and of each group above it."""
    memberships = [line.split(":", 2) for line in _read(proc / "self" / "cgroup").splitlines()]
    for mount in _mounts(proc):
        for _, controllers, path in (fields for fields in memberships if len(fields) == 3):
            unified = mount.kind == "cgroup2" and not controllers
            if not unified and not (
                mount.kind == "cgroup" and "memory" in mount.options and "memory" in controllers.split(",")
            ):
                continue
            # In a container the mount starts at the container's own group, regardless of the path.
            root = mount.root.rstrip("/")
            inside = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
            names = [name for name in inside.split("/") if name]
            if ".." in names:
                names = []
            for depth in range(len(names), -1, -1):
                yield mount.path.joinpath(*names[:depth]), 2 if unified else 1
