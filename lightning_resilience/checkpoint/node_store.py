"""Stores local checkpoints on a node: shard files are written under a temporary name, verified and renamed.

All ranks of a node write shards of different names into the same folder, which only this user may enter:

```
<directory>/
  step-000000000012-1a2b3c4d/     a generation: its step and its random id
    rank-00003.shard                a published shard, always complete
  own/                            what `fit/last_boundary.py` keeps for each rank
  .spare-rank-00003.5e6f7a8b      a file that is being written, or a retired one that the next save reuses
  .writer-5e6f7a8b                locked while the process that owns the files with this suffix lives
  quarantine/                     shards that failed verification
```

**In node memory** (tmpfs) ranks copy their state directly into the mapped file, so publishing moves no data. The next
save reuses the file and mapping of a retired generation, so it allocates no pages. A file is allocated before it is
mapped: a full tmpfs then raises an error instead of killing the process by SIGBUS in the middle of a copy.

**On a disk** a shard is copied into a reused buffer, written to a temporary file, synced, and read back from the disk
for verification before it is published.
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
from lightning_resilience._formatting import format_bytes
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.checkpoint.capacity import in_node_memory
from lightning_resilience.checkpoint.devices import Registration, register
from lightning_resilience.checkpoint.generations import GENERATION_FOLDER, SHARD_SUFFIX, shard_path

log = logging.getLogger(__name__)

_QUARANTINE = "quarantine"
_MAX_QUARANTINED = 2  # memory is scarce; for older files only the reason is kept
_GENERATION = re.compile(r"[0-9a-f]{8}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_WRITER = re.compile(r"\.writer-(?P<id>[0-9a-f]{8})")
_SPARE = re.compile(r"\.spare-[A-Za-z0-9_-]+\.(?P<id>[0-9a-f]{8})")

_ALLOCATION_CHUNK = 16 << 20  # a signal makes an allocation start over
_WRITE_CHUNK = 64 << 20


@dataclass(frozen=True)
class ShardFile:
    """A published shard.

    Args:
        step: ``trainer.global_step`` of its generation.
        generation: Random id of the generation.
        name: Name of the shard: the file name without ``.shard``.
        path: The file. Another process may retire it at any time.
        size: Bytes.
    """

    step: int
    generation: str
    name: str
    path: Path
    size: int


class NodeStore:
    """Reads and writes the generations of one fit on one node.

    The constructor removes files that killed processes left in the folder. The store is thread-safe; a
    :class:`ShardWriter` is not.

    Args:
        directory: Folder of the fit; created if needed.
        before_publish: Called after ``verify``, right before a shard becomes visible; an exception cancels publishing.
        verify: Called with the path of a written shard; an exception cancels publishing. On a disk it reads what the
            disk holds. In node memory the content was never anywhere else, so checking the end of the file is enough.

    Raises:
        PermissionError: If another user owns the folder or could write into it.
        OSError: If the folder cannot be created.
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
        self._reserved: set[str] = set()  # names of the shards that this process saves
        self._mapped: dict[Path, MappedFile] = {}  # in node memory: own files by their current path
        self._buffers: dict[str, MappedFile] = {}  # on a disk: by shard
        self._claim: _Claim | None = None
        self._open()
        self.in_memory = in_node_memory(self.directory)
        _remove_leftovers(self.directory)

    def _open(self) -> None:
        _make_private(self.directory)
        self._claim = _Claim(self.directory)

    # Writing

    def reserve(self, name: str, nbytes: int, device: torch.device | None = None, is_copy: bool = False) -> ShardWriter:
        """Reserves memory for a shard of the next generation, or for a copy of one of an older generation.

        Args:
            name: Name of the shard: letters, digits, ``-`` and ``_``. Only one writer can be open for a name.
            nbytes: Maximum size of the content.
            device: Accelerator to copy from; the memory is registered with it. ``None`` for the host.
            is_copy: Whether it is a copy of an older shard. Its memory is not kept for later saves, since this process
                may never write a shard of this name again.

        Raises:
            OSError: If there is no room (``ENOSPC``, ``EDQUOT``) or the storage fails. Published shards are untouched.
        """
        if _SHARD_NAME.fullmatch(name) is None:
            raise ValueError(f"invalid shard name {name!r}: use letters, digits, - and _ only")
        if nbytes < 0:
            raise ValueError(f"a shard cannot have {nbytes} bytes")
        with self._lock:
            if self._claim is None:
                raise RuntimeError(f"the store of {self.directory} is closed")
            if name in self._writers:
                raise RuntimeError(f"shard {name} already has an open writer: publish or abandon it first")
            if not self._claim.holds():  # node memory was cleaned up, perhaps by the node's session manager
                gone = self._claim
                self._open()
                gone.release()
            writer = self._writers[name] = ShardWriter(self, name, self._claim.spare(name))
            if not is_copy:
                self._reserved.add(name)
        try:
            with torch.inference_mode(False):  # a tensor made in a validation's inference mode would be read-only later
                file = self._map(writer.path, nbytes) if self.in_memory else self._buffer(name, nbytes)
                writer.attach(file, nbytes, device)
            if is_copy:
                self._buffers.pop(name, None)
        except BaseException as error:
            self._discard(writer)
            if isinstance(error, (OSError, RuntimeError)):  # torch raises the latter if there is no memory
                raise OSError(
                    getattr(error, "errno", errno.ENOMEM),
                    f"no room for {format_bytes(nbytes)} of shard {name} ({getattr(error, 'strerror', None) or error});"
                    " published shards are untouched",
                    os.fspath(self.directory),
                ) from error
            raise
        return writer

    def _map(self, path: Path, nbytes: int) -> MappedFile:
        """Maps the file ``path``, which may exist from a retired generation."""
        size = max(nbytes, 1)
        fd = _open_unlinked(path)
        try:
            status = os.fstat(fd)
            # Allocating again would touch every page.
            if status.st_size < size or status.st_blocks * 512 < size:
                _allocate(fd, size)
            with self._lock:
                mapped = self._mapped.pop(path, None)
            if mapped is None or not mapped.is_file(status) or not mapped.covers(size, status):
                mapped = MappedFile(fd, size)
        finally:
            os.close(fd)
        with self._lock:
            self._mapped[path] = mapped
        return mapped

    def _buffer(self, name: str, nbytes: int) -> MappedFile:
        buffer = self._buffers.get(name)
        if buffer is None or not nbytes <= buffer.memory.numel() <= 2 * nbytes:
            self._buffers.pop(name, None)
            del buffer  # frees it before the new one is allocated
            buffer = self._buffers[name] = MappedFile.unnamed(max(nbytes, 1))
        return buffer

    def _publish(self, writer: ShardWriter, step: int, generation: str, data_size: int, trailer: bytes) -> Path:
        if step < 0 or _GENERATION.fullmatch(generation) is None:
            self._discard(writer)
            raise ValueError(f"invalid generation: step {step}, id {generation!r}")
        if not 0 <= data_size <= (reserved := writer.memory.numel()):
            self._discard(writer)
            raise ValueError(f"shard {writer.name} has {data_size} bytes, but {reserved} are reserved")
        target = self.path(step, generation, writer.name)
        written: os.stat_result | None = None
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
                written = os.stat(writer.path)
                _move_into(writer.path, target)
                if (mapped := self._mapped.pop(writer.path, None)) is not None:
                    self._mapped[target] = mapped
            if not self.in_memory:
                sync_directory(target.parent)
                sync_directory(self.directory)
        except BaseException as error:
            self._discard(writer)
            with contextlib.suppress(OSError):
                if written is not None and os.path.samestat(written, os.lstat(target)):
                    target.unlink()
            with contextlib.suppress(OSError):  # not empty: other ranks have published
                target.parent.rmdir()
            if isinstance(error, OSError):
                raise OSError(
                    error.errno,
                    f"cannot publish shard {writer.name} of step {step} ({error.strerror or error}); older generations "
                    "are untouched",
                    os.fspath(target),
                ) from error
            raise
        self._close(writer)
        return target

    def _finish_in_memory(self, writer: ShardWriter, data_size: int, trailer: bytes) -> None:
        fd = os.open(writer.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mapped = self._mapped.get(writer.path)
            if mapped is None or not mapped.is_file(os.fstat(fd)):
                raise OSError(errno.ESTALE, "the file was replaced while it was being written")
            _write(fd, memoryview(trailer), data_size)
            os.ftruncate(fd, data_size + len(trailer))
        finally:
            os.close(fd)

    def _discard(self, writer: ShardWriter) -> None:
        with contextlib.suppress(OSError):  # the first error counts, for example that the storage is read-only
            writer.path.unlink(missing_ok=True)
        with self._lock:
            self._mapped.pop(writer.path, None)
        self._close(writer)

    def _close(self, writer: ShardWriter) -> None:
        writer.memory = _empty()
        with self._lock:
            if self._writers.get(writer.name) is writer:
                del self._writers[writer.name]

    # Reading

    def path(self, step: int, generation: str, name: str) -> Path:
        """Path of a published shard, whether it exists or not."""
        return shard_path(self.directory, step, generation, name)

    def shard_files(self) -> list[ShardFile]:
        """Lists the published shards of all ranks, newest step first, without checking their content."""
        found = []
        for folder, step, generation in self._generations():
            for entry in _entries(folder):
                name = entry.name.removesuffix(SHARD_SUFFIX)
                if name == entry.name or _SHARD_NAME.fullmatch(name) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(ShardFile(step, generation, name, Path(entry.path), status.st_size))
        return sorted(found, key=lambda file: (-file.step, file.generation, file.name))

    def _generations(self) -> Iterator[tuple[Path, int, str]]:
        for entry in _entries(self.directory):
            name = GENERATION_FOLDER.fullmatch(entry.name)
            if name is not None and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), int(name["step"]), name["generation"]

    # Removing

    def retire(self, keep: Collection[str], is_own: Callable[[str], bool]) -> None:
        """Removes shards of older generations. Call it when a newer one is complete, before the next :meth:`reserve`.

        In node memory the next :meth:`reserve` of the same name reuses the file.

        Args:
            keep: Ids of the generations to keep.
            is_own: Whether this process removes shards of the given name.
        """
        with self._lock:
            if self._claim is None:
                raise RuntimeError(f"the store of {self.directory} is closed")
            for file in self.shard_files():
                if file.generation not in keep and is_own(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        self._retire(file, self._claim.spare(file.name))
            for path in [path for path in self._mapped if not path.exists()]:  # removed by another process
                del self._mapped[path]
        for folder, _, generation in self._generations():
            if generation not in keep:
                with contextlib.suppress(OSError):  # not empty: shards of other ranks
                    folder.rmdir()

    def _retire(self, file: ShardFile, spare: Path) -> None:
        mapped = self._mapped.pop(file.path, None)
        # Replacing the file of an open writer would publish the old content under the new name. And shards that this
        # process never writes, such as those of ranks that no longer exist, need no spare file.
        is_reusable = self.in_memory and file.name in self._reserved and file.name not in self._writers
        if not is_reusable or os.path.lexists(spare):
            file.path.unlink()
            return
        os.rename(file.path, spare)
        if mapped is not None:
            self._mapped[spare] = mapped

    def quarantine(self, path: Path, reason: str) -> None:
        """Moves a bad shard to ``quarantine/``. Does nothing if it no longer exists.

        The two newest files are kept; for older ones only the reason.

        Args:
            path: See :attr:`ShardFile.path`.
            reason: What is wrong with the shard.

        Raises:
            OSError: If the shard cannot be moved; it is still at ``path``.
        """
        folder = self.directory / _QUARANTINE
        if not os.path.lexists(path):
            return
        with contextlib.suppress(FileNotFoundError):
            checkpoint_file.quarantine(path, folder, reason)
        with self._lock:
            self._mapped.pop(path, None)
        files = []
        for entry in _entries(folder):
            with contextlib.suppress(FileNotFoundError):
                if not entry.name.endswith(".reason.txt") and not is_temporary(entry.name):
                    files.append((entry.stat(follow_symlinks=False).st_ctime_ns, entry.path))
        for _, old in sorted(files, reverse=True)[_MAX_QUARANTINED:]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)

    def clear(self) -> None:
        """Closes the store and removes its folder with everything in it."""
        self.close()
        for _ in range(3):  # another rank may create a file meanwhile
            shutil.rmtree(self.directory, ignore_errors=True)
            if not os.path.lexists(self.directory):
                return
        log.warning("Cannot remove %s; its files are no longer needed, delete it by hand.", self.directory)

    def close(self) -> None:
        """Frees everything except published shards, and abandons open writers."""
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
    """Writes one shard; made by :meth:`NodeStore.reserve`.

    Attributes:
        memory: Uninitialized one-dimensional ``uint8`` tensor of the reserved size, for the content. Do not write to it
            after :meth:`publish` or :meth:`abandon`: in node memory it is the published file.
    """

    def __init__(self, store: NodeStore, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.memory = _empty()
        self._store = store
        self._registration: Registration | None = None

    def attach(self, file: MappedFile, nbytes: int, device: torch.device | None) -> None:
        """Makes the first ``nbytes`` of ``file`` the memory of this writer."""
        self.memory = file.memory[:nbytes]
        # Lives as long as this writer: a stuck device may still be writing after the store is closed.
        self._registration = file.register(device)

    def publish(self, step: int, generation: str, data_size: int, trailer: bytes) -> Path:
        """Publishes ``memory[:data_size]`` followed by ``trailer``, and closes this writer.

        After an error nothing is published, no temporary file is left, and the writer is closed too.

        Args:
            step: ``trainer.global_step`` of the generation.
            generation: Id of the generation, 8 hexadecimal digits.
            data_size: Bytes of content in :attr:`memory`.
            trailer: Rest of the file.

        Returns:
            Path of the published shard.

        Raises:
            OSError: If the file cannot be written.
            ValueError: If ``step``, ``generation`` or ``data_size`` is invalid.
            RuntimeError: If this writer is closed.
        """
        if self._store._writers.get(self.name) is not self:
            raise RuntimeError(f"the writer of shard {self.name} is closed")
        return self._store._publish(self, step, generation, data_size, trailer)

    def abandon(self) -> None:
        """Closes this writer without publishing; its memory is reused. Does nothing if it is already closed."""
        self._store._close(self)


# Files


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_private(directory: Path) -> None:
    """Creates ``directory`` for this user only; raises if another user owns it or may write into it."""
    for folder in reversed((directory, *directory.parents[:-1])):
        with contextlib.suppress(FileExistsError):
            # NFS and automounters may answer "permission denied" to a mkdir of an existing folder.
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700)
                with contextlib.suppress(PermissionError):  # writable but not readable
                    sync_directory(folder.parent)
        # In a folder that everybody may write to, another user may have planted this one, or a link.
        if folder.parent.stat().st_mode & stat.S_IWOTH and folder.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "this folder belongs to another user; set another", os.fspath(folder))
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder (a link to one is refused)", os.fspath(directory))
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "other users can write into this folder; set another one", os.fspath(directory)
        )
    if status.st_mode & 0o055:
        directory.chmod(0o700)


def _open_unlinked(path: Path) -> int:
    """Opens the file ``path`` for writing; replaces it with a new one if it has other hard links."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, flags)
        if os.fstat(fd).st_nlink == 1:
            return fd
        os.close(fd)  # a user or program keeps a retired generation by hard links
        os.unlink(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)


def _allocate(fd: int, size: int) -> None:
    for start in range(0, size, _ALLOCATION_CHUNK):
        os.posix_fallocate(fd, start, min(_ALLOCATION_CHUNK, size - start))


def _move_into(path: Path, target: Path) -> None:
    """Renames ``path`` to ``target``; other ranks remove its folder whenever they find it empty."""
    for _ in range(100):
        with contextlib.suppress(FileExistsError):
            os.mkdir(target.parent, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
            return
    raise OSError(errno.ENOENT, "the folder of the generation keeps being removed", os.fspath(target.parent))


def _write(fd: int, data: memoryview, position: int) -> None:
    while len(data) > 0:
        written = os.pwrite(fd, data[:_WRITE_CHUNK], position)
        data, position = data[written:], position + written


def _write_to_disk(path: Path, data: Tensor, trailer: bytes) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _write(fd, data.numpy().data, 0)
        _write(fd, memoryview(trailer), data.numel())
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):  # drops the file from the cache, so that verification reads the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# Memory


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


class MappedFile:
    """A mapped file in memory. It stays mapped while a tensor refers to its memory; no descriptor stays open."""

    def __init__(self, fd: int, size: int) -> None:
        status = os.fstat(fd)
        self._inode = (status.st_dev, status.st_ino)  # not reused by another file while this one is mapped
        self.memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8, device="cpu")
        # Forked data-loader workers may outlive the fit and must not keep its memory.
        if _advise(self.memory, _MADV_DONTFORK):
            _not_inherited[self.memory.data_ptr()] = self.memory
        _advise(self.memory, _MADV_POPULATE_WRITE)  # one call now instead of a fault per page of the copy
        self._registration: Registration | None = None

    @classmethod
    def unnamed(cls, size: int) -> MappedFile:
        """New memory of ``size`` bytes, in an anonymous file."""
        fd = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        try:
            _allocate(fd, size)
            return cls(fd, size)
        finally:
            os.close(fd)

    def is_file(self, status: os.stat_result) -> bool:
        """Whether ``status`` belongs to the mapped file."""
        return self._inode == (status.st_dev, status.st_ino)

    def covers(self, size: int, status: os.stat_result) -> bool:
        """Whether ``size`` bytes of the file are mapped, for the host and for a registered device."""
        # After a truncation the device still writes to the old page, while the file gets a new one.
        is_whole = self._registration is None or status.st_size >= self.memory.numel()
        return is_whole and self.memory.numel() >= size

    def register(self, device: torch.device | None) -> Registration | None:
        """Registers the memory with ``device`` until neither this object nor the returned one exists."""
        if self._registration is None:
            self._registration = register(self.memory, device)
        return self._registration


_MADV_DONTFORK = 10  # linux/mman.h
_MADV_POPULATE_WRITE = 23  # since Linux 5.14, ignored before

_not_inherited: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by address
_never_freed: list[Tensor] = []

# A child that frees such a tensor would unmap its own later mappings at these addresses, so the child never frees it.
os.register_at_fork(after_in_child=lambda: _never_freed.extend(_not_inherited.values()))


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _advise(memory: Tensor, advice: int) -> bool:
    return _madvise()(memory.data_ptr(), memory.numel(), advice) == 0


# Files of killed processes


_own_claims: dict[str, int] = {}  # claim id -> pid: a process can always lock a file on which it holds a lock already


class _Claim:
    """Marks the unpublished files of a live process by an id in their names and a locked file.

    The kernel releases the ``fcntl`` lock when the process ends. Forked children do not inherit it. It is visible from
    other containers, where the process has another pid or none.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        while True:
            self.id = uuid.uuid4().hex[:8]
            self._path = directory / f".writer-{self.id}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _own_claims[self.id] = os.getpid()
            if _lock(self._fd) is not False and self.holds():
                return
            self.release()  # another process removed the file before it was locked

    def spare(self, name: str) -> Path:
        return self._directory / f".spare-{name}.{self.id}"

    def holds(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def remove_files(self) -> None:
        """Removes the spare files, then the claim: spare files without a claim count as abandoned."""
        with contextlib.suppress(OSError):
            for entry in _entries(self._directory):
                if (name := _SPARE.fullmatch(entry.name)) is not None and name["id"] == self.id:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
            self._path.unlink()

    def release(self) -> None:
        os.close(self._fd)
        _own_claims.pop(self.id, None)


def _remove_leftovers(directory: Path) -> None:
    """Removes the files of dead processes. May be killed at any point; the next call continues."""
    for entry in _entries(directory):
        if (name := _WRITER.fullmatch(entry.name)) is not None and _own_claims.get(name["id"]) != os.getpid():
            with contextlib.suppress(FileNotFoundError):
                _remove_if_abandoned(entry.path)
    for entry in _entries(directory):
        # A claim is created before its files and removed after them.
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
        if _lock(fd):  # otherwise its owner lives, or the storage has no locks
            os.unlink(claim)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool | None:
    """Locks a file; returns whether it was free, ``None`` on storage without locks."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
