"""File format of the shards of a generation: tensors byte for byte, and a header that describes them. torch and files.

```
preamble (64 bytes) | tensors, each at a multiple of 64 and padded with zeros | header, JSON | footer (40 bytes)
```

The tensors come first because they are copied into memory that is already the file. The header is made at the end,
since it holds the digest of every tensor. The footer holds the digest of preamble and header, so any byte that is
changed, cut off, added or moved is noticed. Nothing is ever unpickled. docs/checkpoints.md describes the format.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import partial
from io import BufferedReader
from math import prod
from typing import Any

import torch
import xxhash

from lightning_resilience.checkpoint.checkpoint_file import corrupt, open_regular
from lightning_resilience.checkpoint.tensor_bytes import DTYPES, host_bytes, is_dense

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""

_FORMAT = 1
_MAGIC = b"\x93LRSHARD\r\n\x1a\n"
_END_MAGIC = b"LRSHREND"
_PREAMBLE = struct.pack("<12sI48x", _MAGIC, _FORMAT)
_PLACE = struct.Struct("<QQ")  # start and length of the header
_FOOTER_SIZE = _PLACE.size + 16 + len(_END_MAGIC)
_LONGEST_HEADER = 1 << 30

_PIECE = 1 << 20  # bytes read and then hashed while still in the cache; the hash releases the GIL
_THREADS = 4  # of a load; a single thread reads at half the speed of the memory
_ZEROS = bytes(ALIGNMENT)

# Quantized tensors consist of more than their bytes, and torch cannot copy integers of less than one byte.
_NOT_KEPT = re.compile(r"u?int[1-7]|qu?int\d.*")
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not _NOT_KEPT.fullmatch(name)}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Position and type of a tensor in a shard.

    Args:
        dtype: Name of the type in torch, such as ``bfloat16``.
        shape: Its shape.
        stride: Its strides, in elements.
        offset: Position of its first byte in the file.
        nbytes: Number of its bytes; 0 on the meta device.
        device: ``meta`` for a tensor without content, otherwise ``cpu``: the device to which it is loaded.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True)
class Identity:
    """The run, fit, step, generation and part to which a shard belongs.

    Args:
        run: Identity of the run.
        fit: Number of the fit in the script, from 0.
        step: ``trainer.global_step``.
        generation: Identity of the generation, the same in all its shards.
        part: Name of the shard, such as ``rank-00003``.
        world_size: Number of ranks of the job.
        layout: How the state is partitioned into shards; JSON-serializable.
    """

    run: str
    fit: int
    step: int
    generation: str
    part: str
    world_size: int
    layout: dict[str, Any]


_TYPES: dict[Any, type] = {"str": str, "int": int}
_IDENTITY_TYPES = {each.name: _TYPES.get(each.type, dict) for each in fields(Identity)}


@dataclass(frozen=True)
class Header:
    """The header of a shard.

    Args:
        identity: Identity of the shard.
        tensors: Its tensors, in the order of their positions.
        structure: The argument ``structure`` of :func:`seal`.
        torch_version: Version of torch that wrote it.
        created: Time at which it was sealed, ISO 8601, UTC.
        digest: Digest of the whole shard, 32 hexadecimal digits: shards with the same digest are the same.
        size: Bytes of the whole file.
        checksums: xxh3-128 of each tensor and its padding, as 32 hexadecimal digits.
    """

    identity: Identity
    tensors: tuple[TensorSpec, ...]
    structure: Any
    torch_version: str
    created: str
    digest: str
    size: int
    checksums: tuple[str, ...]


Expected = Identity | Mapping[str, Any] | None
"""The expected identity of a shard: the whole identity, some fields by name, or ``None`` for any."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# Writing


def arrange(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorSpec], int]:
    """Assigns positions in a shard to tensors.

    A tensor that fills its memory without gaps keeps its strides (``channels_last``, transposed). Any other tensor,
    such as an expanded one, is stored as if it were contiguous.

    Args:
        tensors: Tensors on any device, in the order in which they will be stored.

    Returns:
        The position of each tensor, and the number of bytes in the file before its header.

    Raises:
        TypeError: If a tensor cannot be kept byte for byte: a sparse, nested or quantized tensor, or a subclass.
    """
    specs = []
    position = len(_PREAMBLE)
    for index, tensor in enumerate(tensors):
        name = str(tensor.dtype).removeprefix("torch.")
        if (
            name not in _DTYPES
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.is_nested
        ):
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}, {tensor.dtype}, {tensor.layout}"
            raise TypeError(f"tensor {index} ({kind}) cannot be kept byte for byte in a shard")
        shape, stride = tuple(tensor.shape), tensor.stride()
        if tensor.is_meta:
            specs.append(TensorSpec(name, shape, stride, position, 0, "meta"))
            continue
        if not tensor.is_contiguous() and not is_dense(shape, stride):
            stride = torch.empty(shape, device="meta").stride()
        nbytes = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, shape, stride, position, nbytes))
        position += _padded(nbytes)
    return specs, position


def view(memory: torch.Tensor, spec: TensorSpec, start: int = 0) -> torch.Tensor:
    """The tensor at its position in ``memory``: a view, not a copy.

    Args:
        memory: Content of a shard, complete or not: bytes (uint8), one dimension.
        spec: The tensor's spec. A tensor on the meta device is made anew, outside of ``memory``.
        start: Position in the shard at which ``memory`` begins, in bytes.
    """
    dtype = _DTYPES[spec.dtype]
    if spec.device == "meta":
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta")
    begin = spec.offset - start
    return memory[begin : begin + spec.nbytes].view(dtype).as_strided(spec.shape, spec.stride)


def seal(
    memory: torch.Tensor, specs: Sequence[TensorSpec], identity: Identity, structure: Any, data_size: int
) -> bytes:
    """Completes a shard after its tensors were copied to their positions. The file is ``memory[:data_size]`` + this.

    Writes the preamble and the padding between tensors into ``memory`` and hashes it, without copying it.

    Args:
        memory: Bytes (uint8), one dimension, on the host, at least ``data_size``.
        specs: As returned by :func:`arrange`.
        identity: Identity of the shard.
        structure: Anything that JSON can hold, see :func:`~.safe_serialization.pack`.
        data_size: As returned by :func:`arrange`.

    Returns:
        The rest of the file: header and footer.
    """
    if data_size != _end_of(specs):
        raise ValueError(f"these tensors take {_end_of(specs)} bytes before the header, not {data_size}")
    if memory.numel() < data_size:
        raise ValueError(f"the memory has {memory.numel()} bytes; the tensors take {data_size}")
    content = host_bytes(memory)
    content[: len(_PREAMBLE)] = _PREAMBLE
    rows = []  # as text: thousands of lists would trigger garbage collections of the whole heap
    for spec in specs:
        end = spec.offset + spec.nbytes
        padded_end = _end(spec)
        if padded_end > end:
            content[end:padded_end] = _ZEROS[: padded_end - end]
        checksum = xxhash.xxh3_128_hexdigest(content[spec.offset : padded_end])
        numbers = f"{[*spec.shape]},{[*spec.stride]},{spec.offset},{spec.nbytes}"
        rows.append(f'["{spec.dtype}",{numbers},"{spec.device}","{checksum}"]')
    document = {
        "identity": vars(identity),
        "torch": str(torch.__version__),
        "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "byteorder": sys.byteorder,
        "skeleton": structure,
        "tensors": [],
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":")).removesuffix("]}")
    header = f"{text}{','.join(rows)}]}}".encode("ascii")
    if len(header) > _LONGEST_HEADER:
        raise ValueError(f"the state other than tensors takes {len(header)} bytes as JSON; a shard has room for 1 GiB")
    place = _PLACE.pack(data_size, len(header))
    return b"".join((header, place, _digest(_PREAMBLE, header, place), _END_MAGIC))


def _end(spec: TensorSpec) -> int:
    return spec.offset + _padded(spec.nbytes)


def _end_of(specs: Sequence[TensorSpec]) -> int:
    return _end(specs[-1]) if specs else len(_PREAMBLE)


def _digest(preamble: bytes, header: bytes, place: bytes) -> bytes:
    hasher = xxhash.xxh3_128(preamble)
    hasher.update(header)
    hasher.update(place)
    return bytes(hasher.digest())


# Reading

_Read = Callable[[int, int], memoryview]  # returns the bytes from a start to an end position


def read_identity(path: str | os.PathLike[str], expected: Expected = None) -> Header:
    """Reads and checks the header of a shard, not its tensors; see :func:`verify`.

    Args:
        path: The file.
        expected: The identity that it must have.

    Raises:
        CorruptCheckpoint: If it is no shard, its start or end is damaged, or it has another identity.
    """
    with open_regular(path, "shard") as file:
        return _read_header(_reader(file, path), os.fstat(file.fileno()).st_size, path, expected)


def verify(path: str | os.PathLike[str], expected: Expected = None) -> Header:
    """Reads every byte of a shard and checks it. Takes a few MiB of memory and one processor.

    Args:
        path: The file.
        expected: The identity that it must have.

    Raises:
        CorruptCheckpoint: If it is not intact, or has another identity.
    """
    with open_regular(path, "shard") as file:
        read = _reader(file, path, memoryview(bytearray(_PIECE)))
        header = _read_header(read, os.fstat(file.fileno()).st_size, path, expected)
        _check(header, read, range(len(header.tensors)), path)
        return header


def load(path: str | os.PathLike[str], expected: Expected = None) -> tuple[Header, list[torch.Tensor]]:
    """Reads a shard into new memory, verifies that memory, and returns the tensors in it.

    So the returned tensors are the verified ones, whatever happens to the file later.

    Args:
        path: The file.
        expected: The identity that it must have.

    Returns:
        The header, and the tensors in the order of ``header.tensors``. They share no memory with each other.

    Raises:
        CorruptCheckpoint: If it is not intact, or has another identity. Nothing has been loaded then.
    """
    with open_regular(path, "shard") as file:
        header = _read_header(_reader(file, path), os.fstat(file.fileno()).st_size, path, expected)
        tensors: dict[int, torch.Tensor] = {}

        def load_batch(batch: range) -> None:
            start, end = header.tensors[batch[0]].offset, _end(header.tensors[batch[-1]])
            memory = _allocate(end - start, path)
            content = host_bytes(memory)

            def read(start_of_piece: int, end_of_piece: int) -> memoryview:
                piece = content[start_of_piece - start : end_of_piece - start]
                _read_into(file, piece, start_of_piece, path)
                return piece

            _check(header, read, batch, path)
            for index in batch:
                spec = header.tensors[index]
                tensor = view(memory, spec, start)
                # As a view, a small tensor would keep its whole batch in memory, and torch.save would write all of it.
                tensors[index] = tensor if len(batch) == 1 else _copy(tensor, spec)

        _for_each_batch(load_batch, header)
        return header, [tensors[index] for index in range(len(header.tensors))]


def load_bytes(
    memory: torch.Tensor, expected: Expected = None, source: str = "in memory"
) -> tuple[Header, list[torch.Tensor]]:
    """Verifies a whole shard in memory, such as one received from another node, and returns the tensors in it.

    Args:
        memory: Exactly the bytes of the shard (uint8), one dimension. Do not change it afterwards.
        expected: The identity that it must have.
        source: Replaces the path in errors.

    Returns:
        As :func:`load`, but the tensors are views of ``memory`` if its alignment allows that.

    Raises:
        CorruptCheckpoint: If it is not intact, or has another identity.
    """
    content = host_bytes(memory)
    read = lambda start, end: content[start:end]  # noqa: E731
    header = _read_header(read, len(content), source, expected)
    _for_each_batch(lambda batch: _check(header, read, batch, source), header)
    if memory.storage_offset() % ALIGNMENT:  # torch cannot view bytes at an unaligned offset as another type
        memory = memory.clone()
    return header, [view(memory, spec) for spec in header.tensors]


_corrupt = partial(corrupt, kind="shard")


def _read_into(file: BufferedReader, piece: memoryview, start: int, path: str | os.PathLike[str]) -> None:
    done = 0
    while done < len(piece):
        got = os.preadv(file.fileno(), [piece[done:]], start + done)
        if not got:
            raise _corrupt(path, "it has become shorter while it was read")
        done += got


def _reader(file: BufferedReader, path: str | os.PathLike[str], buffer: memoryview | None = None) -> _Read:
    """Returns a function that reads into ``buffer`` if that is given and large enough, otherwise into new memory."""

    def read(start: int, end: int) -> memoryview:
        length = end - start
        piece = memoryview(bytearray(length)) if buffer is None or length > len(buffer) else buffer[:length]
        _read_into(file, piece, start, path)
        return piece

    return read


def _read_header(read: _Read, size: int, source: str | os.PathLike[str], expected: Expected) -> Header:
    if size < len(_PREAMBLE) + _FOOTER_SIZE:
        raise _corrupt(source, f"it is {f'truncated ({size} bytes)' if size else 'empty'}")
    preamble = bytes(read(0, len(_PREAMBLE)))
    if preamble != _PREAMBLE:
        magic, version = struct.unpack_from("<12sI", preamble)
        if magic == _MAGIC and version != _FORMAT:
            reason = f"it has format {version}, or is damaged; this version of the package reads format {_FORMAT}"
            raise _corrupt(source, reason)
        raise _corrupt(source, "it is not a shard, or its first 64 bytes are damaged")
    footer = bytes(read(size - _FOOTER_SIZE, size))
    if not footer.endswith(_END_MAGIC):
        raise _corrupt(source, f"it is truncated, or its end is damaged ({size} bytes)")
    place, digest = footer[: _PLACE.size], footer[_PLACE.size : -len(_END_MAGIC)]
    start, length = _PLACE.unpack(place)
    if length > _LONGEST_HEADER or start + length + _FOOTER_SIZE != size:
        raise _corrupt(source, f"its size ({size} bytes) is not the one that was written, or its end is damaged")
    header = bytes(read(start, start + length))
    if _digest(preamble, header, place) != digest:
        raise _corrupt(source, "its header is damaged (the checksum differs)")
    try:
        found = _parse_header(json.loads(header), digest.hex(), size)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(source, f"its header is malformed ({type(error).__name__}: {error})") from None
    if _end_of(found.tensors) != start:
        raise _corrupt(source, "its tensors do not end where its header begins")
    if foreign := _foreign(found.identity, expected):
        raise _corrupt(source, f"it is not the expected one: {foreign}")
    return found


def _parse_header(document: dict[str, Any], digest: str, size: int) -> Header:
    if document["byteorder"] != sys.byteorder:
        raise ValueError(f"it was written on a {document['byteorder']}-endian machine, and this one is not")
    about = document["identity"]
    identity = Identity(**{name: about[name] for name in _IDENTITY_TYPES})
    if any(type(about[name]) is not kind for name, kind in _IDENTITY_TYPES.items()):
        raise ValueError(f"its identity is invalid: {about}")
    specs, checksums = [], []
    position = len(_PREAMBLE)
    for dtype, shape, stride, offset, nbytes, device, checksum in document["tensors"]:
        spec = TensorSpec(dtype, tuple(shape), tuple(stride), offset, nbytes, device)
        _check_spec(spec, position)
        position += _padded(nbytes)
        specs.append(spec)
        checksums.append(checksum)
    return Header(
        identity,
        tuple(specs),
        document["skeleton"],
        document["torch"],
        document["created"],
        digest,
        size,
        tuple(checksums),
    )


def _check_spec(spec: TensorSpec, position: int) -> None:
    """Refuses a tensor that does not fit its bytes: the digest proves only that the file is as it was written."""
    if spec.dtype not in _DTYPES:
        raise ValueError(f"this version of torch has no type {spec.dtype}")
    numbers = (*spec.shape, *spec.stride)
    if any(type(number) is not int or number < 0 for number in numbers) or len(spec.shape) != len(spec.stride):
        raise ValueError(f"a tensor of shape {spec.shape} cannot have strides {spec.stride}")
    count = prod(spec.shape)
    if spec.device == "meta":
        count = 0
    elif spec.device != "cpu" or (count and not is_dense(spec.shape, spec.stride)):
        raise ValueError(f"a tensor cannot be kept on {spec.device} with shape {spec.shape} and strides {spec.stride}")
    if spec.offset != position or spec.nbytes != count * _DTYPES[spec.dtype].itemsize:
        raise ValueError(f"a tensor of shape {spec.shape} is not at its place, {position}")


def _foreign(found: Identity, expected: Expected) -> str:
    """The differences between ``found`` and ``expected`` as text; empty if there are none."""
    if expected is None:
        return ""
    if isinstance(expected, Identity):
        expected = vars(expected)
    wanted = json.loads(json.dumps(dict(expected)))  # layouts have passed through JSON, too
    differing = [name for name, value in wanted.items() if getattr(found, name) != value]
    return "; ".join(f"{name} is {getattr(found, name)!r}, not {wanted[name]!r}" for name in differing)


def _batches(specs: Sequence[TensorSpec]) -> Iterator[range]:
    """Divides tensors into batches to load at once: small tensors together, a large one alone."""
    first = 0
    for index, spec in enumerate(specs):
        if _end(spec) - specs[first].offset > _PIECE and index > first:
            yield range(first, index)
            first = index
    if specs:
        yield range(first, len(specs))


def _check(header: Header, read: _Read, batch: range, source: str | os.PathLike[str]) -> None:
    """Reads tensors and compares their digests."""
    for index in batch:
        spec = header.tensors[index]
        end = _end(spec)
        hasher = xxhash.xxh3_128()
        for piece in range(spec.offset, end, _PIECE):
            hasher.update(read(piece, min(piece + _PIECE, end)))
        _compare(header, index, hasher.hexdigest(), source)


def _compare(header: Header, index: int, digest: str, source: str | os.PathLike[str]) -> None:
    if digest != header.checksums[index]:
        spec = header.tensors[index]
        where = f"{spec.dtype} of shape {list(spec.shape)}, {spec.nbytes} bytes from byte {spec.offset} on"
        raise _corrupt(source, f"tensor {index} ({where}) or its padding is damaged (the checksum differs)")


def _for_each_batch(task: Callable[[range], None], header: Header) -> None:
    """Runs ``task`` for all batches, in several threads if the file is large."""
    batches = list(_batches(header.tensors))
    threads = min(_THREADS, len(os.sched_getaffinity(0)), len(batches)) if header.size >= 8 * _PIECE else 1
    if threads < 2:
        for batch in batches:
            task(batch)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(task, batches))  # an error cancels the batches that have not begun


def _allocate(nbytes: int, path: str | os.PathLike[str]) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"there is not enough memory for {nbytes} bytes of it", os.fspath(path)) from error


def _copy(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.device == "meta":
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device="cpu").copy_(tensor)
