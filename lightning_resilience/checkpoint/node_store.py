"""The generations that a node keeps: parts are written beside, verified and published by one rename.

Every rank of a node writes parts of its own names into the same folder, which only this user may enter:

```
<directory>/
  step-000000000012-1a2b3c4d/     a generation: its step and its random id
    rank-00003.shard                what is here is whole, whenever and however a process has ended
  .spare-rank-00003.5e6f7a8b      a file that is being written, or a retired one that the next save is written into
  .writer-5e6f7a8b                locked while the process lives whose files end like this
  quarantine/                     what failed its verification
```

**In node memory** (tmpfs) the memory that a rank copies its state into is the file already, so publishing moves no
data. A file of a retired generation becomes the one that the next is written into, and stays mapped: once every
generation has been written, a save takes no new page, and its copy is as fast as one into warm memory. A file is
allocated before it is mapped, so that a full tmpfs is an error here and not a signal in the middle of a copy.

**On a disk** a part is copied into memory that is kept, written from there to a temporary file, synced, and read again
from the disk for its verification before it is published.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import re
import shutil
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_resilience._files import clean_temporaries, is_temporary, sync_directory
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.checkpoint.capacity import format_bytes, in_node_memory
from lightning_resilience.checkpoint.devices import Registration, register
from lightning_resilience.checkpoint.generations import GENERATION_FOLDER, SHARD_SUFFIX, shard_path

log = logging.getLogger(__name__)

_QUARANTINE = "quarantine"
_QUARANTINED_WHOLE = 2  # memory is scarce; of older ones the reason is left
_GENERATION = re.compile(r"[0-9a-f]{8}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_WRITER = re.compile(r"\.writer-(?P<id>[0-9a-f]{8})")
_SPARE = re.compile(r"\.spare-[A-Za-z0-9_-]+\.(?P<id>[0-9a-f]{8})")

_ALLOCATED_AT_ONCE = 16 << 20  # an allocation that a signal interrupts begins again
_WRITTEN_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class ShardFile:
    """A published part.

    Args:
        step: Of its generation.
        generation: The generation's random id.
        part: Its name, which is that of the file without ``.shard``.
        path: Where it is. Another process may retire it at any time.
        size: Bytes.
    """

    step: int
    generation: str
    part: str
    path: Path
    size: int


class NodeStore:
    """The generations of one fit on one node, as one rank sees them.

    Making one removes what killed processes have left in the folder, and nothing of living ones. Methods may be called
    from several threads, those of one writer from one at a time.

    Args:
        directory: Made if needed. If it is in node memory, parts are kept there; else as on a disk.
        before_publish: Called when a part is written and verified, right before it becomes visible; what it raises
            stops that.
        verify: Called before that with the path of the part; what it raises stops that too. What it reads is what the
            disk has. In node memory the content has never been anywhere else, so that its end is all there is to check.

    Raises:
        PermissionError: If others than this user could write into the folder or have made it.
        OSError: If it cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        before_publish: Callable[[], None] | None = None,
        verify: Callable[[Path], object] | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._before_publish = before_publish
        self._verify = verify
        self._lock = threading.RLock()
        self._writers: dict[str, ShardWriter] = {}
        self._written: set[str] = set()  # names of parts that this process has reserved
        self._mapped: dict[Path, MappedFile] = {}  # own files by where they are now; in node memory
        self._buffers: dict[str, MappedFile] = {}  # by part; on a disk
        self._claim: _Claim | None = None
        self._open()
        self.in_memory = in_node_memory(self.directory)
        _remove_leftovers(self.directory)

    def _open(self) -> None:
        _make_private(self.directory)
        self._claim = _Claim(self.directory)

    # Writing

    def reserve(self, part: str, nbytes: int, device: torch.device | None = None) -> ShardWriter:
        """Memory for one part of the next generation.

        Args:
            part: Its name; letters, digits, ``-`` and ``_``. One writer at a time can be open for it.
            nbytes: How much will be copied into that memory, at most.
            device: The accelerator that it will be copied from, which can write into it by itself if it is told so.

        Raises:
            OSError: If there is no room (``ENOSPC``, ``EDQUOT``) or the storage fails. Nothing is taken then, and what
                has been published is untouched.
        """
        if _PART.fullmatch(part) is None:
            raise ValueError(f"{part!r} cannot be the name of a part: letters, digits, - and _ only")
        if nbytes < 0:
            raise ValueError(f"a part cannot have {nbytes} bytes")
        with self._lock:
            if self._claim is None:
                raise RuntimeError(f"the store of {self.directory} is closed")
            if part in self._writers:
                raise RuntimeError(f"part {part} has an open writer already: publish or abandon that one first")
            if not self._claim.holds():  # Somebody has cleaned up node memory, for one the session manager of the node.
                self._claim.release()
                self._open()
            writer = self._writers[part] = ShardWriter(self, part, self._claim.spare(part))
            self._written.add(part)
        try:
            with torch.inference_mode(False):  # What is made in it, as in a validation, cannot be written to later.
                file = self._map(writer.path, nbytes) if self.in_memory else self._buffer(part, nbytes)
                writer.use(file, nbytes, device)
        except BaseException as error:
            self._discard(writer)
            if isinstance(error, (OSError, RuntimeError)):  # torch's, if there is no memory
                raise OSError(
                    getattr(error, "errno", errno.ENOMEM),
                    f"no room for {format_bytes(nbytes)} of part {part} ({getattr(error, 'strerror', None) or error}); "
                    "what has been published is untouched",
                    os.fspath(self.directory),
                ) from error
            raise
        return writer

    def _map(self, path: Path, nbytes: int) -> MappedFile:
        """The file ``path``, which is there from a retired generation or is made."""
        size = max(nbytes, 1)
        fd = _open_alone(path)
        try:
            status = os.fstat(fd)
            # Allocating again what is allocated would look at every page.
            if status.st_size < size or status.st_blocks * 512 < size:
                _allocate(fd, size)
            with self._lock:
                mapped = self._mapped.pop(path, None)
            if mapped is None or not mapped.is_of(status) or not mapped.has(size, status):
                mapped = MappedFile(fd, size)
        finally:
            os.close(fd)
        with self._lock:
            self._mapped[path] = mapped
        return mapped

    def _buffer(self, part: str, nbytes: int) -> MappedFile:
        buffer = self._buffers.get(part)
        if buffer is None or not nbytes <= buffer.memory.numel() <= 2 * nbytes:
            self._buffers.pop(part, None)
            del buffer  # never two of them
            buffer = self._buffers[part] = MappedFile.unnamed(max(nbytes, 1))
        return buffer

    def _publish(self, writer: ShardWriter, step: int, generation: str, data_size: int, trailer: bytes) -> Path:
        if step < 0 or _GENERATION.fullmatch(generation) is None:
            self._discard(writer)
            raise ValueError(f"there can be no generation with step {step} and id {generation!r}")
        if not 0 <= data_size <= (reserved := writer.memory.numel()):
            self._discard(writer)
            raise ValueError(f"{reserved} bytes are reserved for part {writer.part}, not {data_size}")
        target = self.path(step, generation, writer.part)
        ours: os.stat_result | None = None
        try:
            if self.in_memory:
                self._finish_in_memory(writer, data_size, trailer)
            else:
                _write_to_disk(writer.path, writer.memory[:data_size], trailer)
            if self._verify is not None:
                self._verify(writer.path)
            if self._before_publish is not None:
                self._before_publish()
            with self._lock:
                ours = os.stat(writer.path)
                _move_into(writer.path, target)
                if (mapped := self._mapped.pop(writer.path, None)) is not None:
                    self._mapped[target] = mapped
            if not self.in_memory:
                sync_directory(target.parent)
                sync_directory(self.directory)
        except BaseException as error:
            self._discard(writer)
            with contextlib.suppress(OSError):
                if ours is not None and os.path.samestat(ours, os.lstat(target)):
                    target.unlink()
            with contextlib.suppress(OSError):  # parts of other ranks are in it
                target.parent.rmdir()
            if isinstance(error, OSError):
                raise OSError(
                    error.errno,
                    f"cannot publish part {writer.part} of step {step} ({error.strerror or error}); older generations "
                    "are untouched",
                    os.fspath(target),
                ) from error
            raise
        self._forget(writer)
        return target

    def _finish_in_memory(self, writer: ShardWriter, data_size: int, trailer: bytes) -> None:
        fd = os.open(writer.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mapped = self._mapped.get(writer.path)
            if mapped is None or not mapped.is_of(os.fstat(fd)):
                raise OSError(errno.ESTALE, "the file has been exchanged while it was being written")
            _write(fd, memoryview(trailer), data_size)
            os.ftruncate(fd, data_size + len(trailer))
        finally:
            os.close(fd)

    def _discard(self, writer: ShardWriter) -> None:
        with contextlib.suppress(OSError):  # On storage that has just become read-only; the first error counts.
            writer.path.unlink(missing_ok=True)
        with self._lock:
            self._mapped.pop(writer.path, None)
        self._forget(writer)

    def _forget(self, writer: ShardWriter) -> None:
        writer.memory = _nothing()
        with self._lock:
            if self._writers.get(writer.part) is writer:
                del self._writers[writer.part]

    # What there is

    def path(self, step: int, generation: str, part: str) -> Path:
        """Where a published part is, if it is here."""
        return shard_path(self.directory, step, generation, part)

    def shard_files(self) -> list[ShardFile]:
        """Every part that is published in this folder, by whichever rank: the newest step first.

        Whether it is intact, and whose, its content says.
        """
        found = []
        for folder, step, generation in self._generations():
            for entry in _entries(folder):
                part = entry.name.removesuffix(SHARD_SUFFIX)
                if part == entry.name or _PART.fullmatch(part) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(ShardFile(step, generation, part, Path(entry.path), status.st_size))
        return sorted(found, key=lambda held: (-held.step, held.generation, held.part))

    def _generations(self) -> Iterator[tuple[Path, int, str]]:
        for entry in _entries(self.directory):
            name = GENERATION_FOLDER.fullmatch(entry.name)
            if name is not None and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), int(name["step"]), name["generation"]

    # Letting go

    def retire(self, keep: Collection[str], mine: Callable[[str], bool]) -> None:
        """Removes parts of older generations. Call it when a newer one is complete, and before the next is reserved.

        In node memory the file of a removed part is what the next :meth:`reserve` of the same name writes into, if
        this process has reserved one of that name before.

        Args:
            keep: Ids of generations that stay.
            mine: Whether this process is the one that writes the part of this name.
        """
        with self._lock:
            if self._claim is None:
                raise RuntimeError(f"the store of {self.directory} is closed")
            for held in self.shard_files():
                if held.generation not in keep and mine(held.part):
                    with contextlib.suppress(FileNotFoundError):
                        self._retire(held, self._claim.spare(held.part))
            for path in [path for path in self._mapped if not path.exists()]:  # gone by another process
                del self._mapped[path]
        for folder, _, generation in self._generations():
            if generation not in keep:
                with contextlib.suppress(OSError):  # parts of other ranks are in it, or it is gone
                    folder.rmdir()

    def _retire(self, held: ShardFile, spare: Path) -> None:
        mapped = self._mapped.pop(held.path, None)
        # Never over a file that a writer has open: publishing would give the old content the new name. Nor where no
        # next one will come, as for the parts of ranks that there are no more.
        wanted = self.in_memory and held.part in self._written and held.part not in self._writers
        if not wanted or os.path.lexists(spare):
            held.path.unlink()
            return
        os.rename(held.path, spare)
        if mapped is not None:
            self._mapped[spare] = mapped

    def quarantine(self, path: Path, reason: str) -> None:
        """Moves a bad part out of the way, never to be chosen again.

        The newest two are kept whole, of older ones only the reason. If another process has moved or removed the part
        already, nothing is done.

        Args:
            path: See :attr:`ShardFile.path`.
            reason: What is wrong with it.

        Raises:
            OSError: If it cannot be moved: it is where it was, and must be passed over.
        """
        folder = self.directory / _QUARANTINE
        if not os.path.lexists(path):
            return
        with contextlib.suppress(FileNotFoundError):
            checkpoint_file.quarantine(path, folder, reason)
        with self._lock:
            self._mapped.pop(path, None)
        whole = []
        for entry in _entries(folder):
            with contextlib.suppress(FileNotFoundError):
                if not entry.name.endswith(".reason.txt") and not is_temporary(entry.name):
                    whole.append((entry.stat(follow_symlinks=False).st_ctime_ns, entry.path))
        for _, old in sorted(whole, reverse=True)[_QUARANTINED_WHOLE:]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)

    def clear(self) -> None:
        """The fit has finished: nothing of it is needed any more, and the folder goes with all that is in it."""
        self.close()
        for _ in range(3):  # Another rank may make a file in a folder that is just being emptied.
            shutil.rmtree(self.directory, ignore_errors=True)
            if not os.path.lexists(self.directory):
                return
        log.warning("%s cannot be removed; nothing in it is needed any more.", self.directory)

    def close(self) -> None:
        """Gives back everything but what has been published. Writers that are still open are abandoned."""
        with self._lock:
            claim, self._claim = self._claim, None
            if claim is None:
                return
            for writer in list(self._writers.values()):
                self._discard(writer)
            self._mapped.clear()
            self._buffers.clear()
            claim.remove_files()
            claim.release()


class ShardWriter:
    """One part that is being written; from :meth:`NodeStore.reserve`.

    Attributes:
        memory: For the content: uint8, one dimension, as many elements as were reserved. What is in it at first is
            anything. No view of it may be written to after :meth:`publish` or :meth:`abandon`: in node memory it is
            the published file.
    """

    def __init__(self, store: NodeStore, part: str, path: Path) -> None:
        self.part = part
        self.path = path
        self.memory = _nothing()
        self._store = store
        self._registration: Registration | None = None

    def use(self, file: MappedFile, nbytes: int, device: torch.device | None) -> None:
        """Has ``file`` for the memory of this writer."""
        self.memory = file.memory[:nbytes]  # What lies behind is no part of the file.
        # A device that is still writing into it (one that is stuck, say) has this writer stay, whatever is closed.
        self._registration = file.register(device)

    def publish(self, step: int, generation: str, data_size: int, trailer: bytes) -> Path:
        """Publishes ``memory[:data_size]`` followed by ``trailer``, and closes this writer.

        If it raises, nothing is published and nothing temporary is left; the writer is closed then too.

        Args:
            step: Of the generation.
            generation: Its id, 8 hexadecimal digits.
            data_size: How much of the memory is content.
            trailer: The rest of the file.

        Returns:
            Where the part is now.
        """
        if self._store._writers.get(self.part) is not self:
            raise RuntimeError(f"this writer of part {self.part} is closed")
        return self._store._publish(self, step, generation, data_size, trailer)

    def abandon(self) -> None:
        """Closes this writer without publishing; what it has reserved is used again. Does nothing if it is closed."""
        self._store._forget(self)


# Files


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_private(directory: Path) -> None:
    """Makes ``directory``, and checks that it is ours and that nobody else may enter it."""
    for folder in reversed((directory, *directory.parents[:-1])):
        with contextlib.suppress(FileExistsError):
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700)
                with contextlib.suppress(PermissionError):  # may be written to and not read
                    sync_directory(folder.parent)
        # Where everybody may make a folder, somebody else may have made ours, or a link to what he wants us to write.
        if folder.parent.stat().st_mode & stat.S_IWOTH and folder.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "another user has made this folder; set another one", os.fspath(folder))
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder (nor may it be a link to one)", os.fspath(directory))
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "others than this user may write into this folder; set another one", os.fspath(directory)
        )
    if status.st_mode & 0o055:
        directory.chmod(0o700)


def _open_alone(path: Path) -> int:
    """Opens the file ``path`` to write into it; a new one unless there is one that has no other name."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, flags)
        if os.fstat(fd).st_nlink == 1:
            return fd
        os.close(fd)  # Somebody has kept the generation that this file was part of, by a hard link.
        os.unlink(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)


def _allocate(fd: int, size: int) -> None:
    for start in range(0, size, _ALLOCATED_AT_ONCE):
        os.posix_fallocate(fd, start, min(_ALLOCATED_AT_ONCE, size - start))


def _move_into(path: Path, target: Path) -> None:
    """Renames ``path`` to ``target``, in a folder that others remove when they find it empty."""
    for _ in range(100):
        with contextlib.suppress(FileExistsError):
            os.mkdir(target.parent, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
            return
    raise OSError(errno.ENOENT, "the folder of the generation is removed again and again", os.fspath(target.parent))


def _write(fd: int, data: memoryview, position: int) -> None:
    while len(data) > 0:
        written = os.pwrite(fd, data[:_WRITTEN_AT_ONCE], position)
        data, position = data[written:], position + written


def _write_to_disk(path: Path, data: Tensor, trailer: bytes) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _write(fd, data.numpy().data, 0)
        _write(fd, memoryview(trailer), data.numel())
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):  # Out of the cache: what is verified is what the disk has.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# Memory


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


class MappedFile:
    """A file in node memory, mapped for as long as anything refers to the memory; no descriptor stays open."""

    def __init__(self, fd: int, size: int) -> None:
        status = os.fstat(fd)
        self._inode = (status.st_dev, status.st_ino)  # The mapping keeps the file, so no other one gets this number.
        self.memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8, device="cpu")
        # Data-loader workers are forked, may live longer than the fit, and must not keep its memory.
        if _advise(self.memory, _MADV_DONTFORK):
            _not_inherited[self.memory.data_ptr()] = self.memory
        _advise(self.memory, _MADV_POPULATE_WRITE)  # One call now instead of a fault for every page of the copy.
        self._registration: Registration | None = None

    @classmethod
    def unnamed(cls, size: int) -> MappedFile:
        """New memory, in a file that no file system knows."""
        fd = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        try:
            _allocate(fd, size)
            return cls(fd, size)
        finally:
            os.close(fd)

    def is_of(self, status: os.stat_result) -> bool:
        """Whether it is this file that has ``status``."""
        return self._inode == (status.st_dev, status.st_ino)

    def has(self, size: int, status: os.stat_result) -> bool:
        """Whether ``size`` bytes of the file are mapped here, for all who write into it."""
        # A registered page that was cut off the file stays what the device knows, when the file has long had another.
        is_whole = self._registration is None or status.st_size >= self.memory.numel()
        return is_whole and self.memory.numel() >= size

    def register(self, device: torch.device | None) -> Registration | None:
        """Has ``device`` write into the memory by itself, while this object or what is returned is there."""
        if self._registration is None:
            self._registration = register(self.memory, device)
        return self._registration


_MADV_DONTFORK = 10  # linux/mman.h
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; where it is not known, nothing happens

_not_inherited: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by address
_never_freed: list[Tensor] = []

# Freeing such a memory in a child would unmap whatever the child has at these addresses by then.
os.register_at_fork(after_in_child=lambda: _never_freed.extend(_not_inherited.values()))


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _advise(memory: Tensor, advice: int) -> bool:
    return _madvise()(memory.data_ptr(), memory.numel(), advice) == 0


# What killed processes leave


_living: dict[str, int] = {}  # ids of this process's claims, and its number: a lock does not keep its own holder out


class _Claim:
    """The id in the names of a process's unpublished files, and the file whose lock says that the process lives.

    The lock is that of ``fcntl``: the kernel gives it back when the process ends, however it ends; a forked child does
    not inherit it; and it is seen from other containers, in which the process has another number or none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        while True:
            self.id = uuid.uuid4().hex[:8]
            self._path = directory / f".writer-{self.id}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _living[self.id] = os.getpid()
            if _lock(self._fd) is not False and self.holds():
                return
            self.release()  # Somebody has taken it for abandoned before it was locked.

    def spare(self, part: str) -> Path:
        return self._directory / f".spare-{part}.{self.id}"

    def holds(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def remove_files(self) -> None:
        """The spare files first: what has no claim is abandoned."""
        with contextlib.suppress(OSError):
            for entry in _entries(self._directory):
                if (name := _SPARE.fullmatch(entry.name)) is not None and name["id"] == self.id:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
            self._path.unlink()

    def release(self) -> None:
        os.close(self._fd)
        _living.pop(self.id, None)


def _remove_leftovers(directory: Path) -> None:
    """Removes what processes have left that are dead now. Each step can be the last one: the next store goes on."""
    for entry in _entries(directory):
        if (name := _WRITER.fullmatch(entry.name)) is not None and _living.get(name["id"]) != os.getpid():
            with contextlib.suppress(FileNotFoundError):
                _remove_if_abandoned(entry.path)
    for entry in _entries(directory):
        # A claim is made before all that carries its id, and by its owner removed after it.
        if (name := _SPARE.fullmatch(entry.name)) is not None and not (directory / f".writer-{name['id']}").exists():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
        elif GENERATION_FOLDER.fullmatch(entry.name) is not None:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(entry.path)
    clean_temporaries(directory / _QUARANTINE)


def _remove_if_abandoned(claim: str) -> None:
    fd = os.open(claim, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _lock(fd):  # Else it lives, or this storage has no locks and nothing is known.
            os.unlink(claim)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool | None:
    """Locks a file: whether nobody else had it, or ``None`` on a storage without locks, where that is not known."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
