"""The ledger of a run: append-only files of JSON lines with its events, one per writer. No torch, no Lightning.

Every line is one event: ``{"event": ..., "time": seconds since the epoch, "rank": ..., "node": ..., ...}``. A single
``write`` to a file opened for appending writes a line, so processes that write at the same time do not mix their lines,
and a ``kill -9`` costs at most the line being written. Readers skip a torn line.

**A writer** is a mount of the file system in one kernel; its file is ``ledger/<host>-<id>.jsonl``. The kernel does the
appending: on one host lines never mix. But if several hosts append to one file over NFS, their lines mix and overwrite
each other. So each host has its own file.

**The order** is the same for all readers, even if the clocks of the hosts differ. Each line has a position
(``order``): the writer's clock, moved forward to come after everything that the process has read or written. So an
effect follows its cause, and unrelated events are ordered by the clocks. Within a file the lines keep their order, and
equal positions are ordered by the file names. Events of earlier versions, which wrote one file ``ledger.jsonl`` next to
the folder, come first.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import operator
import os
import platform
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience._processes import boot_id
from lightning_resilience.run.events import LAST_TIME, Event, is_time, parse

log = logging.getLogger(__name__)

_FOLDER = "ledger"  # in a run directory
_TICK_S = 1e-6
_BEGIN = 256
"""How many bytes at the start identify a file: they hold the time of its first line, unlike a new file of its name."""

_readers: dict[str, Reader] = {}

_latest: dict[str, float] = {}
"""The last position (``order``) in each ledger that this process knows."""


class Ledger:
    """Appends events to a run's ledger, and follows it.

    Writing never ends a training: if the storage is full or gone, the event is logged instead and training continues.

    Args:
        path: The ledger's folder; it is created.
        rank: Written into every event; ``None`` for the launcher, which is no rank.
        only_reads: Whether this object is never used to record, so that its reads do not affect the positions of
            events that another thread records.
        on_record: Called with every event that this object has appended, in the thread that has recorded it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int | None = 0,
        only_reads: bool = False,
        on_record: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.path = Path(path).absolute()
        self.rank = rank
        self._on_record = on_record
        self._warned = False
        self._ahead_s = 0.0  # of this host's clock
        self._reader = Reader(self.path, moves_order=False) if only_reads else None

    def record(self, event: Event) -> None:
        """Appends one event, with the time, this rank and this node.

        Args:
            event: The event; its fields must be JSON-serializable.
        """
        now = time.time()
        line = {"event": event.name, "time": now, "order": self._next(now), "rank": self.rank, "node": node_name()}
        line |= event.fields()
        data = json.dumps(line, default=str).encode()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(_own_file(self.path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # A process killed in the middle of its line left no newline. Begin a fresh line, otherwise two events
                # are lost.
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                whole = (b"\n" if torn else b"") + data + b"\n"
                if os.write(fd, whole) < len(whole):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "The ledger %s cannot be written (%s); events are only logged from here on.", self.path, error
                )
            log.warning("Ledger event: %s", data.decode())
        self._on_record(event)

    def _next(self, now: float) -> float:
        latest = _latest.get(os.fspath(self.path), -math.inf)
        # The offset stays for later events of this process, so that their distances in time are kept.
        self._ahead_s = max(self._ahead_s, latest + _TICK_S - now)
        place = _latest[os.fspath(self.path)] = min(now + self._ahead_s, LAST_TIME)
        return place

    def events(self) -> list[Event]:
        """All events in their order. Lines that were read before are not read again.

        Raises:
            OSError: If the ledger cannot be read.
        """
        return self.read()[0]

    def read(self) -> tuple[list[Event], object]:
        """See :meth:`Reader.read`."""
        with suppress(OSError):
            os.utime(self.path)  # an NFS client may show an old state of a folder, unless it has changed the folder
        return (self._reader or reader_of(self.path)).read()

    def catch_up(self) -> None:
        """Makes later events come after everything that others have recorded so far, even if their clocks are ahead."""
        with suppress(OSError):
            reader_of(self.path).read()


def _own_file(folder: Path) -> Path:
    """The file of this kernel and mount. Two containers on a host share it exactly if that is safe."""
    boot = ""
    with suppress(OSError):
        boot = boot_id()
    writer = zlib.crc32(f"{boot}{folder.stat().st_dev}".encode())
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', platform.node())[:100]}-{writer:08x}.jsonl"


def node_name() -> str:
    """The name of this node: in a Slurm job the name that Slurm uses, otherwise the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def read_ledger(path: str | os.PathLike[str]) -> list[Event]:
    """Reads the ledger of a run; torn and foreign lines are skipped.

    Args:
        path: The run directory, or the folder ``ledger`` in it.

    Returns:
        The events in their order; empty if there is no ledger. Their classes are in
        ``lightning_resilience.run.events``.

    Raises:
        OSError: If the ledger cannot be read.

    Example:
        >>> import lightning_resilience as lr
        >>> [event.step for event in lr.read_ledger("runs/train") if event.name == "saved"]
        []
    """
    return Reader(_folder_of(path)).read()[0]


def reader_of(path: str | os.PathLike[str]) -> Reader:
    """The reader of a ledger that this whole process shares: the start of a rank asks for the events ten times.

    Args:
        path: As for :func:`read_ledger`.
    """
    folder = _folder_of(path)
    return _readers.setdefault(os.fspath(folder), Reader(folder))


def _folder_of(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).absolute()
    return folder / _FOLDER if is_ledger(folder / _FOLDER) else folder


def is_ledger(path: str | os.PathLike[str]) -> bool:
    """Whether there is a ledger at ``path``."""
    try:
        return bool(_files_of(Path(path)))
    except OSError:
        return os.path.lexists(path)  # reading it then raises the error


@dataclass
class _File:
    """How far a file has been read."""

    size: int = 0  # bytes read
    lines: int = 0
    skipped: int = 0
    order: float = -math.inf
    begin: bytes = b""


_Position = tuple[float, str, int]  # order, file, line
_POSITION = operator.itemgetter(0)


class Reader:
    """Reads the files of a ledger repeatedly, but each line only once. For any thread.

    Args:
        path: The ledger's folder.
        moves_order: Whether later events of this process come after the events that were read.

    Attributes:
        path: The ledger's folder.
    """

    def __init__(self, path: Path, moves_order: bool = True) -> None:
        self.path = path
        self._order = object()
        self._moves_order = moves_order
        self._files: dict[Path, _File] = {}
        self._found: list[tuple[_Position, Event]] = []
        self._lock = threading.Lock()

    def read(self) -> tuple[list[Event], object]:
        """All events in their order, and an object that is replaced when new events belong before known ones.

        Raises:
            OSError: If the ledger cannot be read.
        """
        with self._lock:
            while True:
                try:
                    return self._read(), self._order
                except BaseException as error:  # also of a signal's handler
                    self._begin_anew()  # some lines have been read but their events not kept
                    if not isinstance(error, _Another):
                        raise

    def _read(self) -> list[Event]:
        files = _files_of(self.path)
        if not self._files.keys() <= set(files):
            self._begin_anew()
        new: list[tuple[_Position, Event]] = []
        for path in files:
            new += _read_on(path, path.parent != self.path, self._files.setdefault(path, _File()))
        new.sort(key=_POSITION)
        if new and self._found and new[0][0] < self._found[-1][0]:
            self._order = object()
        if new:
            self._found = sorted(self._found + new, key=_POSITION)  # nearly free if they are in order already
        if new and self._moves_order:
            name = os.fspath(self.path)
            _latest[name] = max(self._found[-1][0][0], _latest.get(name, -math.inf))
        return [event for _, event in self._found]

    @property
    def skipped(self) -> int:
        """Number of lines that were no events: torn by a kill, damaged, or of another version."""
        return sum(each.skipped for each in self._files.values())

    def _begin_anew(self) -> None:
        self._order = object()
        self._files.clear()
        self._found.clear()


class _Another(Exception):
    """A file is not the same as the one read before."""


def _files_of(path: Path) -> list[Path]:
    before = path.with_suffix(".jsonl")
    files = [before] if before.exists() else []
    try:
        return files + sorted(path / name for name in os.listdir(path) if name.endswith(".jsonl"))
    except FileNotFoundError:
        return files


def _read_on(path: Path, is_old: bool, read: _File) -> Iterator[tuple[_Position, Event]]:
    """The events in ``path`` after those that have been read."""
    with open(path, "rb") as file:
        begin = os.pread(file.fileno(), _BEGIN, 0)
        if os.fstat(file.fileno()).st_size < read.size or not begin.startswith(read.begin):
            raise _Another
        read.begin = begin
        file.seek(read.size)
        for line in file:
            found = _parse(line)
            if found is None and not line.endswith(b"\n"):
                return  # the line is being written, or its writer was killed
            read.size += len(line)
            read.lines += 1
            if found is None:
                read.skipped += bool(line.strip())
            else:
                order, event = found
                read.order = -math.inf if is_old else max(read.order, order)
                yield (read.order, path.name, read.lines), event


def _parse(line: bytes) -> tuple[float, Event] | None:
    """The position (``order``) of a line, and its event; ``None`` if it holds none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    event = parse(content) if isinstance(content, dict) else None
    if event is None or not is_time(order := content.get("order") or event.time):
        return None
    return float(order), event
