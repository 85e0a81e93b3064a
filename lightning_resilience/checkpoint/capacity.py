"""Whether the generations of a node fit where they are to be kept: what is needed, and what the machine has.

What lies in node memory (tmpfs) counts twice: against the size of that file system, and as memory, of the machine and
of the control group of the job. A file system that is full refuses a save; memory that has run out ends a rank. So
this is computed before the training begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMORY_FILE_SYSTEMS = {"tmpfs", "devtmpfs", "ramfs"}
_UNLIMITED = 1 << 60
_SHARED_MEMORY = Path("/dev/shm")
_LEFT_TO_OTHERS = 8 << 30
_PROC = Path("/proc")


@dataclass(frozen=True)
class Room:
    """So many bytes can be had, and what it is that allows no more."""

    nbytes: int
    limit: str


@dataclass(frozen=True)
class Available:
    """What a node has for its generations.

    Args:
        in_memory: Whether the folder is in node memory.
        files: For the files in the folder. What the folder holds already is included, since it is used again. In node
            memory this is never more than ``memory``.
        memory: For buffers, and for files in node memory.
    """

    in_memory: bool
    files: Room
    memory: Room


@dataclass(frozen=True)
class Needed:
    """Bytes of all ranks of a node: in files, and in memory besides."""

    files: int
    buffers: int


def in_node_memory(directory: str | os.PathLike[str], proc: Path = _PROC) -> bool:
    """Whether files in ``directory``, which exists, are in memory.

    Not so where this cannot be found out; then they are treated as files on a disk, which is slower and never wrong.
    """
    status = os.stat(directory)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return any(mount.device == device and mount.kind in _MEMORY_FILE_SYSTEMS for mount in _mounts(proc))


def available_bytes(directory: str | os.PathLike[str], proc: Path = _PROC) -> Available:
    """What there is for the generations that are kept in ``directory``.

    For memory that is the least of what the machine has available (``MemAvailable``) and of what the control group of
    this process and each group above it have left: limit minus usage, where the cache of files does not count as used,
    because the kernel gives it up before it lets a group fail. Of ``/dev/shm`` half is left to those who cannot do
    without, or 8 GiB of a large one: where it is small, as in a container (64 MiB by default), a script that worked by
    itself would end with "no space left" in its data loaders.

    Args:
        directory: Need not exist yet; its file system is that of the nearest folder which does.
        proc: Where the ``proc`` file system is.
    """
    folder = Path(directory).absolute()
    held = _held_bytes(folder)
    while not folder.is_dir():
        folder = folder.parent
    status = os.statvfs(folder)
    in_memory = in_node_memory(folder, proc)
    memory = memory_left(proc)
    # A tmpfs without a limit of its own says that it has no blocks at all.
    free = status.f_bavail * status.f_frsize if status.f_blocks else _UNLIMITED
    files = Room(free + held, f"the free space of the file system of {folder}")
    if status.f_blocks and _is_shared_memory(folder):
        left = min(status.f_blocks * status.f_frsize // 2, _LEFT_TO_OTHERS)
        limit = f"{files.limit}, but for {format_bytes(left)} that data-loader workers may need"
        files = Room(max(files.nbytes - left, 0), limit)
    if in_memory:
        memory = Room(memory.nbytes + held, memory.limit)
        files = min(files, memory, key=lambda room: room.nbytes)
    return Available(in_memory, files, memory)


def _is_shared_memory(folder: Path) -> bool:
    """Whether ``folder`` is where data-loader workers put their batches and NCCL its buffers: they fail without."""
    try:
        return folder.stat().st_dev == _SHARED_MEMORY.stat().st_dev
    except OSError:  # there is none
        return False


def memory_left(proc: Path = _PROC) -> Room:
    """What memory can be had on this node; see :func:`available_bytes`."""
    return min(_memory_limits(proc), key=lambda room: room.nbytes)


def needed_bytes(part_bytes: int, keep: int, replicas_received: int, in_memory: bool) -> Needed:
    """What the generations of a node take.

    Each part is there ``keep + 1`` times: the generations that are kept, and the one that is being written. The parts
    that come from other nodes are taken to be as large as the node's own. In node memory a file is written in place;
    on a disk each part has a buffer besides, from which it is written:

        files   = part_bytes * (1 + replicas_received) * (keep + 1)
        buffers = 0 in node memory, else part_bytes * (1 + replicas_received)

    Args:
        part_bytes: Of one generation, all parts that the ranks of this node write. In DDP that is about one copy of
            parameters and optimizer state, otherwise the sum of the ranks' shards.
        keep: Complete generations that are kept.
        replicas_received: From how many other nodes each rank receives a copy of their parts.
        in_memory: Whether the files are in node memory.
    """
    parts = part_bytes * (1 + replicas_received)
    return Needed(files=parts * (keep + 1), buffers=0 if in_memory else parts)


def check(
    directory: str | os.PathLike[str],
    part_bytes: int,
    keep: int,
    replicas_received: int = 0,
    proc: Path = _PROC,
) -> None:
    """Refuses what cannot fit. Call it before any rank of the node has reserved memory for its first save.

    Args:
        directory: Where the generations are kept; need not exist yet.
        part_bytes: See :func:`needed_bytes`, as for the other arguments.
        keep: Generations.
        replicas_received: Nodes.
        proc: Where the ``proc`` file system is.

    Raises:
        ValueError: Says in one sentence what is needed, what there is and what to set.
    """
    available = available_bytes(directory, proc)
    needed = needed_bytes(part_bytes, keep, replicas_received, available.in_memory)
    parts = f"{keep} generations and the one that is being written, {format_bytes(part_bytes)} each"
    if replicas_received:
        parts += f", and as much for each of {replicas_received} other nodes"
    smaller = "keep fewer generations (keep=)" if keep > 1 else "save less often or less state"
    if needed.files > available.files.nbytes:
        elsewhere = "a folder on a local disk" if available.in_memory else "a folder with more space"
        raise ValueError(
            f"the local checkpoints need {format_bytes(needed.files)} in {directory} ({parts}), and "
            f"{format_bytes(available.files.nbytes)} can be had ({available.files.limit}): {smaller} or set "
            f"{elsewhere} (dir=, --local-dir)"
        )
    memory = needed.buffers + (needed.files if available.in_memory else 0)
    if memory > available.memory.nbytes:
        raise ValueError(
            f"the local checkpoints in {directory} need {format_bytes(memory)} of memory on this node, and "
            f"{format_bytes(available.memory.nbytes)} can be had ({available.memory.limit}): "
            + (f"{smaller} or set a folder on a local disk (dir=, --local-dir)" if available.in_memory else "")
            + ("" if available.in_memory else "give the job more memory, or leave the local checkpoints out")
        )


def format_bytes(nbytes: int) -> str:
    """For a person: 1.2 GiB."""
    if nbytes >= _UNLIMITED:
        return "any amount"
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def _held_bytes(directory: Path) -> int:
    """What the generations in ``directory`` take now, and the files that the next are written into."""
    total = 0
    for path in [*directory.glob(".spare-*"), *directory.glob("step-*/*")]:
        try:
            total += path.lstat().st_blocks * 512
        except OSError:  # retired in the meantime
            continue
    return total


# What the machine says


@dataclass(frozen=True)
class _Mount:
    device: str
    root: str
    place: Path
    kind: str
    options: list[str]


def _mounts(proc: Path) -> list[_Mount]:
    mounts = []
    for line in _read(proc / "self" / "mountinfo").splitlines():
        place, _, file_system = line.partition(" - ")
        before, after = place.split(), file_system.split()
        if len(before) >= 5 and len(after) >= 2:
            options = after[2].split(",") if len(after) > 2 else []
            mounts.append(_Mount(before[2], _unescape(before[3]), Path(_unescape(before[4])), after[0], options))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    """The content of a small file of the kernel, or nothing where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """``None`` for a missing file and for ``max``."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _memory_limits(proc: Path) -> Iterator[Room]:
    """The memory that can be had, by everything that limits it."""
    yield Room(_UNLIMITED, "nothing limits it")
    if (found := re.search(r"^MemAvailable:\s*(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)) is not None:
        yield Room(int(found[1]) * 1024, "the memory that this node has available")
    for group, version in _control_groups(proc):
        if version == 2:
            # Above "high" a group is not ended but slowed down until nothing advances any more.
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
    """The folders of the control group that limits the memory of this process, and of those above it."""
    memberships = [line.split(":", 2) for line in _read(proc / "self" / "cgroup").splitlines()]
    for mount in _mounts(proc):
        for _, controllers, path in (fields for fields in memberships if len(fields) == 3):
            unified = mount.kind == "cgroup2" and not controllers
            if not unified and not (
                mount.kind == "cgroup" and "memory" in mount.options and "memory" in controllers.split(",")
            ):
                continue
            # A container sees the groups from its own on: its own is the root of the mount, whatever its path says.
            root = mount.root.rstrip("/")
            inside = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
            names = [name for name in inside.split("/") if name]
            if ".." in names:
                names = []
            for depth in range(len(names), -1, -1):
                yield mount.place.joinpath(*names[:depth]), 2 if unified else 1
