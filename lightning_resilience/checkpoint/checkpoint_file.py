"""Checkpoints that a crash cannot leave half written, and whose damage is always detected: torch and files, no Trainer.

**A file** is what ``torch.save`` writes: an ordinary zip archive that plain Lightning and ``torch.load`` read. At its
very end, where the zip format has room for a comment, is a trailer:

```
archive as torch wrote it ... | length of comment | {"format": 1, "size": ..., "metadata": {...}, "xxh3_128": "..."}
```

The digest is the last entry in the file and covers everything before it. The length of the comment is known only when
the trailer is finished, so it counts as zero; it must match the file's size exactly. Checksum and content become
visible by the same rename.

**A directory** (sharded strategies: many ranks write many files in place) is complete once it holds the marker
``COMPLETE``, which lists every file with its size and digest and is written last.

This module reads and writes in pieces: no checkpoint is ever in memory as a whole.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import shutil
import stat
import struct
import uuid
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from glob import escape
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

import torch
import xxhash

from lightning_resilience._files import (
    is_temporary,
    make_directory,
    publish,
    publish_link,
    sync_directory,
    temporary_path,
    write_json,
)

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
"""Name of the file that makes a directory a complete checkpoint."""

_FORMAT = 1
_BLOCK = 8 << 20

_END_RECORD = b"PK\x05\x06"
_END_RECORD_SIZE = 22  # The last two bytes are the length of the comment, which follows.
_LONGEST_COMMENT = 0xFFFF
_CLOSING = b'"}'
_DIGEST_SIZE = 32

_SEALING_THREADS = 8  # They read many files from network storage at once; hashing releases the GIL.


@dataclass(frozen=True)
class Stamp:
    """The trailer of a checkpoint file, or the marker of a directory.

    Args:
        digest: xxh3-128 over the content, as 32 hexadecimal digits.
        size: Bytes of the archive without its trailer, or of all files of a directory.
        metadata: Metadata that is readable without loading the checkpoint.
        file: Identity of the file if every byte was verified, otherwise empty; for :func:`load`.
    """

    digest: str
    size: int
    metadata: dict[str, Any]
    file: tuple[int, ...] = field(default=(), compare=False)


class CorruptCheckpoint(ValueError):
    """A checkpoint or a shard is missing, incomplete or damaged, belongs to something else, or is no checkpoint at all.

    Failing storage and a lack of memory raise ``OSError`` and ``MemoryError`` instead: the checkpoint may be intact.

    Args:
        message: What is wrong, with the path.
        reason: What is wrong, without the path. Default: the message.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


def corrupt(path: str | os.PathLike[str], reason: str, kind: str = "checkpoint") -> CorruptCheckpoint:
    """The error that ``path``, a checkpoint or a ``shard``, cannot be used."""
    return CorruptCheckpoint(f"{kind} {os.fspath(path)} cannot be used: {reason}", reason)


# Files: writing


class _HashingWriter:
    """The file object that ``torch.save`` writes to: it passes all data on and hashes it on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.hash.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def save(
    obj: Any,
    path: str | os.PathLike[str],
    metadata: dict[str, Any] | None = None,
    before_publish: Callable[[], None] | None = None,
    read_back: bool = False,
) -> Stamp:
    """Saves ``obj`` as ``torch.save`` does, so that after any crash ``path`` holds its old content or the new one.

    When this returns, the checkpoint is on disk and survives a power loss. When it raises, ``path`` is unchanged and no
    other file is left.

    Args:
        obj: Anything that ``torch.save`` takes.
        path: The file to write or to replace. Its directory must exist.
        metadata: JSON-serializable; :func:`read_stamp` reads it without loading the checkpoint. At most 64 KiB.
        before_publish: Called when everything is written, right before the checkpoint becomes visible; an exception
            cancels the save.
        read_back: Whether a safe load must succeed before the checkpoint becomes visible. It loads to the meta device,
            so it takes no memory for tensors, except for kinds of tensors that this device does not support.

    Raises:
        UnsafeContent: With ``read_back``, if a safe load refuses the checkpoint.
    """

    def write(file: BinaryIO) -> Stamp:
        writer = _HashingWriter(file)
        try:
            torch.save(obj, cast(IO[bytes], writer))
        except RuntimeError:
            # torch keeps writing after a write has failed, and then reports a wrong position instead of the cause.
            if writer.error is not None:
                raise writer.error from None
            raise
        size = file.tell()
        trailer = json.dumps({"format": _FORMAT, "size": size, "metadata": metadata or {}}).encode()
        trailer = trailer[:-1] + b', "xxh3_128": "'
        length = len(trailer) + _DIGEST_SIZE + len(_CLOSING)
        if length > _LONGEST_COMMENT:
            raise ValueError(f"the metadata of {path} takes {length} bytes as JSON; a checkpoint has room for 64 KiB")
        writer.hash.update(trailer)
        file.seek(size - 2)
        file.write(struct.pack("<H", length) + trailer + writer.hash.hexdigest().encode() + _CLOSING)
        written = _read_trailer(file, path)
        if written is None:  # Impossible, unless torch.save ends its archives in a new way.
            raise RuntimeError(f"torch {torch.__version__} wrote {path} in a format that has no room for a checksum")
        if read_back:
            _read_back(cast(IO[bytes], file))
        return written[0]

    try:
        return publish(path, write, before_publish)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot save the checkpoint ({error.strerror or error}); the previous content of this path is untouched",
            os.fspath(path),
        ) from error


def _read_back(file: IO[bytes]) -> None:
    file.seek(0)
    try:
        safe_load(file, "meta")
    except UnsafeContent:
        raise
    except Exception:  # the meta device does not support some kinds of tensors
        file.seek(0)
        safe_load(file)


# Files: reading


# Error codes that mean a missing file. In node memory all of these are final; on shared storage an automounter may give
# another answer in a moment.
_MISSING = {
    "checkpoint": (errno.ENOENT, errno.ENOTDIR),
    "shard": (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),
}


def open_regular(path: str | os.PathLike[str], kind: str = "checkpoint") -> BufferedReader:
    """Opens a regular file for reading and refuses others: opening a pipe blocks, opening a device may do anything."""
    not_regular = corrupt(path, "it is not a regular file", kind)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise not_regular
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _MISSING[kind]:
            raise
        raise corrupt(path, f"it does not exist ({os.strerror(error.errno)})", kind) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # replaced in between
        os.close(descriptor)
        raise not_regular
    return open(descriptor, "rb")


def _hash_blocks(hasher: xxhash.xxh3_128, file: BufferedReader, count: int) -> int:
    """Hashes the next ``count`` bytes of ``file``, fewer if it ends before, and returns their number."""
    buffer = memoryview(bytearray(min(_BLOCK, max(count, 1))))
    left = count
    while left > 0 and (got := file.readinto(buffer[: min(left, len(buffer))])):
        hasher.update(buffer[:got])
        left -= got
    return count - left


def _read_trailer(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[Stamp, bytes] | None:
    """The stamp of a file and the trailer that holds it, or ``None`` if the archive ends without a comment."""
    length = file.seek(0, os.SEEK_END)
    if length == 0:
        raise corrupt(path, "it is empty")
    start = max(0, length - _END_RECORD_SIZE - _LONGEST_COMMENT)
    file.seek(start)
    tail = file.read()
    position = tail.rfind(_END_RECORD)
    if position < 0 or len(tail) - position < _END_RECORD_SIZE:
        file.seek(0)
        if file.read(4) == b"PK\x03\x04":
            raise corrupt(path, f"it is truncated or its end is damaged ({length} bytes, no end of the archive)")
        raise corrupt(path, "it is not a file written by torch.save (no zip archive)")
    (comment_length,) = struct.unpack_from("<H", tail, position + _END_RECORD_SIZE - 2)
    comment = tail[position + _END_RECORD_SIZE :]
    if len(comment) != comment_length:
        raise corrupt(
            path,
            f"it is truncated or its end is damaged (a trailer of {len(comment)} bytes instead of {comment_length})",
        )
    if not comment:
        return None
    try:
        trailer = json.loads(comment)
        stamp = Stamp(trailer["xxh3_128"], trailer["size"], trailer["metadata"])
        version = trailer["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise corrupt(path, "its trailer is damaged") from None
    if version != _FORMAT:
        raise corrupt(path, f"its trailer has format {version!r}; this version of the package reads {_FORMAT}")
    if stamp.size != start + position + _END_RECORD_SIZE:
        raise corrupt(path, "its size is not the one that was written")
    return stamp, comment


def _verify(file: BufferedReader, path: str | os.PathLike[str]) -> Stamp | None:
    found = _read_trailer(file, path)
    if found is None:
        _verify_unstamped(file, path)
        return None
    stamp, trailer = found
    hasher = xxhash.xxh3_128()
    file.seek(0)
    _hash_blocks(hasher, file, stamp.size - 2)
    hasher.update(b"\0\0")
    hasher.update(trailer[: -_DIGEST_SIZE - len(_CLOSING)])
    if trailer[-_DIGEST_SIZE - len(_CLOSING) :] != hasher.hexdigest().encode() + _CLOSING:
        raise corrupt(path, "its content is damaged (the checksum differs)")
    return stamp


def _verify_unstamped(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Checks what can be checked without our digest: the structure of the archive, and torch's CRC of every record."""
    try:
        archive = zipfile.ZipFile(file)
        records = archive.infolist()
        # All zero: written with torch.serialization.set_crc32_options(False).
        damaged = archive.testzip() if any(record.CRC for record in records) else None
    except OSError as error:
        if error.errno != errno.EINVAL:  # zipfile seeks to any position that a damaged record gives.
            raise
        raise corrupt(path, f"the archive is damaged ({error})") from error
    except Exception as error:  # zipfile raises a dozen types on damaged archives, not only BadZipFile.
        raise corrupt(path, f"the archive is damaged ({error})") from error
    if damaged is not None:
        raise corrupt(path, f"the archive's record {damaged} is damaged")
    # If an archive has lost its beginning, or is the end of another one, its first record is not at the start.
    if not records or min(record.header_offset for record in records) != 0:
        raise corrupt(path, "the archive is incomplete")
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise corrupt(path, "it is a zip archive, but not one written by torch.save")


def read_stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Reads the trailer of a checkpoint without checking its content; :func:`verify` does that.

    Returns:
        ``None`` for an archive without a trailer, as plain Lightning writes it.

    Raises:
        CorruptCheckpoint: If the file is no checkpoint or its end is missing or damaged.
    """
    with open_regular(path) as file:
        found = _read_trailer(file, path)
    return None if found is None else found[0]


def verify(path: str | os.PathLike[str]) -> Stamp | None:
    """Reads every byte of a checkpoint file and checks it.

    Returns:
        ``None`` for an intact archive without a trailer, as plain Lightning writes it. Its tensors are checked against
        the CRC that torch has written for each tensor.

    Raises:
        CorruptCheckpoint: If the checkpoint is not intact.
    """
    with open_regular(path) as file:
        which = _which(file)
        stamp = _verify(file, path)
    return None if stamp is None else replace(stamp, file=which)


def _which(file: BufferedReader) -> tuple[int, ...]:
    """Identity of an open file on this node; any write to the file changes it."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def load(
    path: str | os.PathLike[str],
    map_location: Any = "cpu",
    weights_only: bool | None = True,
    verified: tuple[int, ...] = (),
) -> Any:
    """Verifies a checkpoint file and loads it.

    Args:
        path: Written by :func:`save` or by plain Lightning.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``, where ``None`` is torch's default.
        verified: :attr:`Stamp.file` of a file that a process of this node has just verified. If ``path`` is the same
            file, it is not hashed again: the verification has brought it into the page cache, from which it is loaded.

    Raises:
        CorruptCheckpoint: If the checkpoint is not intact, or if with ``weights_only=True`` it holds objects that a
            safe load does not read. Nothing has been loaded then.
    """
    # The file is opened once: the loaded content is the verified one, even if another file takes the name meanwhile.
    with open_regular(path) as file:
        # The checks are against damage, not against forged inodes and times. The second read, for the load, comes from
        # the page cache, which the processes of a node share.
        if not verified or verified != _which(file):
            _verify(file, path)
        file.seek(0)
        if weights_only:
            try:
                return safe_load(file, map_location)
            except UnsafeContent as error:
                raise corrupt(path, f"it is refused: {error}") from None
            except Exception as error:
                # Failing storage and a lack of memory do not mean that the checkpoint is bad.
                if isinstance(error, (OSError, MemoryError)) or "allocate memory" in str(error):
                    raise
                raise corrupt(path, f"its content cannot be read ({type(error).__name__}: {error})") from error
        return torch.load(file, map_location=map_location, weights_only=weights_only)


class UnsafeContent(ValueError):
    """A file holds objects that a safe load does not read; nothing in it was executed."""


def safe_load(file: IO[bytes], map_location: Any = "cpu") -> Any:
    """Loads what ``torch.save`` has written, if a safe load reads all its types.

    Raises:
        UnsafeContent: If a safe load refuses a type.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message recommends an unsafe load
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise UnsafeContent(
            f"it holds {found[1]}, which a safe load (weights_only) does not read" if found else "not a safe pickle"
        ) from None


# Directories


def _files_of(directory: Path) -> list[Path]:
    def fail(error: OSError) -> NoReturn:
        raise error

    found = [Path(folder, name) for folder, _, names in os.walk(directory, onerror=fail) for name in names]
    return sorted(path for path in found if path != directory / MARKER and not is_temporary(path))


def hash_file(path: Path, sync: bool = False) -> dict[str, Any]:
    """Size and digest of a file, in the form of its directory's marker."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        size = _hash_blocks(hasher, file, os.fstat(file.fileno()).st_size)
    return {"size": size, "xxh3_128": hasher.hexdigest()}


def _digest_of(content: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode()))


def seal_directory(
    path: str | os.PathLike[str],
    metadata: dict[str, Any] | None = None,
    before_publish: Callable[[], None] | None = None,
    known: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Declares a directory a complete checkpoint; one process calls this after all ranks have written.

    Syncs every file to disk, then writes the marker with the digests of all files.

    Args:
        path: The directory.
        metadata: JSON-serializable; written into the marker.
        before_publish: Called right before the marker becomes visible; an exception cancels that.
        known: Results of :func:`hash_file`, by file name, for the files that their writers have synced and hashed.
    """
    directory, known = Path(path), known or {}
    for name, digest in known.items():
        if (directory / name).stat().st_size != digest["size"]:
            raise corrupt(path, f"its file {name} is not what was written")
    files = [file for file in _files_of(directory) if str(file.relative_to(directory)) not in known]
    if not files and not known:
        raise corrupt(path, "it holds no files to seal")
    with ThreadPoolExecutor(_SEALING_THREADS) as pool:
        digests = list(pool.map(lambda file: hash_file(file, sync=True), files))
    for folder in {directory.parent, directory, *(file.parent for file in files)}:
        sync_directory(folder)
    found = {str(file.relative_to(directory)): digest for file, digest in zip(files, digests, strict=True)}
    content = {"format": _FORMAT, "files": {**known, **found}, "metadata": metadata or {}}
    write_json(directory / MARKER, {**content, "xxh3_128": _digest_of(content)}, before_publish)


def publish_directory(
    written: Path,
    path: Path,
    metadata: dict[str, Any],
    before_publish: Callable[[], None],
    known: dict[str, dict[str, Any]],
) -> None:
    """Seals the directory ``written`` and renames it to ``path``, so that ``path`` never holds half a checkpoint.

    Args:
        written: The written directory, in the same folder as ``path``.
        path: The final name. A sealed directory that already has it is set aside until the rename, then removed.
        metadata: See :func:`seal_directory`.
        before_publish: Called right before the rename; an exception cancels it.
        known: See :func:`seal_directory`.
    """
    seal_directory(written, metadata, known=known)
    before_publish()
    set_aside(path)
    try:
        os.replace(written, path)
    except OSError:
        if (_aside(path) / MARKER).is_file() and not path.exists():
            os.replace(_aside(path), path)
        raise
    sync_directory(path.parent)
    discard_aside(path)


def verify_directory(path: str | os.PathLike[str], mine: Callable[[str], bool] = lambda name: True) -> Stamp:
    """Reads every byte of a sealed directory and checks it.

    Args:
        path: The directory.
        mine: Whether to verify the file of the given name, where several ranks partition the work. The marker is always
            verified.

    Raises:
        CorruptCheckpoint: If the marker is missing or damaged, or a file is missing, truncated or different.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise corrupt(path, "it is not a directory" if directory.exists() else "it does not exist")
    try:
        marker = json.loads((directory / MARKER).read_bytes())
        digest = marker.pop("xxh3_128")
        if _digest_of(marker) != digest:
            raise corrupt(path, f"its {MARKER} marker is damaged (the checksum differs)")
        expected: dict[str, dict[str, Any]] = marker["files"]
        stamp = Stamp(digest, sum(file["size"] for file in expected.values()), marker["metadata"])
    except FileNotFoundError:
        raise corrupt(path, f"it was never finished (no {MARKER} marker)") from None
    except CorruptCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise corrupt(path, f"its {MARKER} marker is damaged") from None

    def check(name: str) -> None:
        try:
            found = hash_file(directory / name)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise corrupt(path, f"its file {name} is missing") from None
        if found["size"] != expected[name]["size"]:
            raise corrupt(path, f"its file {name} has {found['size']} bytes instead of {expected[name]['size']}")
        if found != expected[name]:
            raise corrupt(path, f"its file {name} is damaged (the checksum differs)")

    with ThreadPoolExecutor(_SEALING_THREADS) as pool:
        list(pool.map(check, filter(mine, expected)))
    return stamp


_ASIDE = "previous-"


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{_ASIDE}{directory.name}")


def set_aside(path: str | os.PathLike[str]) -> None:
    """Moves the sealed directory ``path``, if there is one, to ``previous-<name>`` before a new one is written there.

    A directory is written in place, so this keeps the old checkpoint whole until the new one is sealed. Then
    :func:`discard_aside` removes the old one. A killed save leaves an unsealed directory at ``path`` and the good one
    aside; the next call removes the unsealed one. If no sealed one is aside, it is left alone: it may be anything.
    """
    directory = Path(path)
    aside = _aside(directory)
    if (directory / MARKER).is_file():
        discard_aside(directory)
        os.replace(directory, aside)
        sync_directory(directory.parent)
    elif (aside / MARKER).is_file():
        remove(directory)


def discard_aside(path: str | os.PathLike[str]) -> None:
    """Removes the directory that :func:`set_aside` kept; call it when ``path`` is complete."""
    aside = _aside(Path(path))
    if (aside / MARKER).is_file():
        remove(aside)


def put_back_aside(folder: str | os.PathLike[str]) -> None:
    """Renames directories in ``folder`` back that a save had set aside before it was killed."""
    for aside in sorted(Path(folder).glob(f"{_ASIDE}*")):
        directory = aside.with_name(aside.name.removeprefix(_ASIDE))
        if (aside / MARKER).is_file() and not os.path.lexists(directory):
            os.replace(aside, directory)
            sync_directory(directory.parent)


# Both


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint if it exists: a file, a link or a directory; no half of a directory keeps its name."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        temporary = temporary_path(path)
        os.replace(path, temporary)
        shutil.rmtree(temporary)
    else:
        path.unlink(missing_ok=True)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Makes ``path`` a relative link to the checkpoint ``target``, without a moment in which it is missing or dangling.

    Only a directory at ``path`` is removed first. Where the storage has no symbolic links, ``path`` becomes a copy of
    the file.
    """
    target, path = Path(target), Path(path)
    if not target.exists():
        raise FileNotFoundError(
            errno.ENOENT, f"cannot be made a link to {target}, which does not exist", os.fspath(path)
        )
    relative = os.path.relpath(target.absolute(), path.parent.absolute())
    if path.is_dir() and not path.is_symlink():
        remove(path)
    try:
        publish_link(path, relative)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS) or not target.is_file():
            raise
        with open(target, "rb") as source:
            publish(path, lambda file: shutil.copyfileobj(source, file, _BLOCK))


def quarantine(path: str | os.PathLike[str], folder: str | os.PathLike[str], reason: str) -> Path:
    """Moves a bad checkpoint to a quarantine folder: it is never chosen again, but not deleted.

    Args:
        path: A file, directory or link. If another process has moved it already, its new path is returned.
        folder: The quarantine folder; created if needed. If it is on another file system, a folder ``quarantine`` next
            to ``path`` is used instead.
        reason: Written into a ``.reason.txt`` next to the moved checkpoint, if the storage can still be written to.

    Returns:
        The checkpoint's new path.

    Raises:
        OSError: If it cannot be moved (read-only storage): it is still at ``path``, and the caller must skip it.
    """
    path, folder = Path(path), Path(folder)
    name = f"{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        make_directory(folder)
        try:
            os.rename(path, folder / name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            folder = path.parent / "quarantine"
            make_directory(folder)
            os.rename(path, folder / name)
    except FileNotFoundError:
        folders = (folder, path.parent / "quarantine")
        moved = [found for each in folders for found in each.glob(f"{escape(path.name)}.????????")]
        if not moved:
            raise
        return max(moved, key=lambda found: found.lstat().st_ctime_ns)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot move the checkpoint into {folder} ({error.strerror}); skip it", os.fspath(path)
        ) from error
    quarantined = folder / name
    try:
        sync_directory(folder)
        sync_directory(path.parent)
        text = f"{path}\n{reason}\n".encode()
        publish(folder / f"{name}.reason.txt", lambda file: file.write(text))
    except OSError as error:
        log.warning(
            "Checkpoint %s is in %s, but the reason cannot be written there (%s): %s", path, folder, error, reason
        )
    return quarantined
