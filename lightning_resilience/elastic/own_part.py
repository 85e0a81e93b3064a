"""Copies the training state that only this rank has to node memory, where it survives the rank's process.

Ranks of data-parallel training share parameters and optimizer state, but each draws its own random numbers, has its own
running statistics, and accumulates its own metrics. After a rank was killed, the state of the last boundary can be
rebuilt from this own part and the state of a survivor. So at each boundary each rank copies the random states of torch,
NumPy and Python, numbers, and small tensors into one of four *slots* of a mapped file. That takes some microseconds,
because the states are copied in their memory layout.

```
header (64 bytes) | 4 slots: digest (16 bytes), fixed fields, random states, numbers, tensors
```

The digest covers the rest of its slot and is written last. A process that is killed within a write leaves a slot whose
digest differs; the other three slots are intact. Nothing is pickled, and only this user may read the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

_FORMAT = 2
_MAGIC = b"\x93LROWN\r\n\x1a\n\0\0"
_HEADER = struct.Struct("<12sIII16s24x")  # magic, format, size of torch's state, room for content, digest of the token
_FIELDS = struct.Struct("<QqQdIB3x")  # sequence, position, layout, Python's gauss, bytes of content, has gauss
_SLOTS = 4
_DIGEST_SIZE = 16
_WORDS = 624  # state words of a Mersenne twister; its position follows them
_TWISTER_SIZE = 4 * _WORDS + 4
_TWISTER = struct.Struct(f"<{_WORDS + 1}I")
_GAUSS = struct.Struct("<i4xd")  # whether NumPy has a second normal number, and that number
_MOST_CONTENT = 1 << 24

_PYTHON = _DIGEST_SIZE + _FIELDS.size  # offsets of the parts of a slot; multiples of 8
_NUMPY = _PYTHON + _TWISTER_SIZE + 4
_NUMPY_GAUSS = _NUMPY + _TWISTER_SIZE + 4
_TORCH = _NUMPY_GAUSS + _GAUSS.size


class ForeignFile(ValueError):
    """The file was not written by a rank of this start of the fit, or is damaged."""


@dataclass(frozen=True)
class OwnPart:
    """The own part of a rank at one boundary.

    Args:
        sequence: Number of the write; grows with each write.
        position: Position of the boundary.
        layout: Layout of the content, as given to :meth:`OwnPartWriter.put`.
        content: Numbers and tensors, one after the other; see :meth:`values`.
        python_state: Python's random state, as ``random.setstate`` takes it.
        numpy_state: NumPy's random state, as ``numpy.random.set_state`` takes it.
        torch_state: torch's random state on the CPU.
    """

    sequence: int
    position: int
    layout: int
    content: bytes
    python_state: tuple[int, tuple[int, ...], float | None]
    numpy_state: tuple[str, np.ndarray[Any, Any], int, int, float]
    torch_state: torch.Tensor

    def restore_random_state(self) -> None:
        """Sets the random states of this process."""
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(self.torch_state)

    def values(self, numbers: int, like: Sequence[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
        """The numbers and the tensors.

        Args:
            numbers: How many numbers there are.
            like: Tensors with the shapes and types of the written ones.

        Raises:
            ValueError: If the content has another size.
        """
        found, at = list(struct.unpack_from(f"<{numbers}d", self.content)), 8 * numbers
        tensors = []
        for each in like:
            tensor = torch.empty_like(each, requires_grad=False)
            if each.nbytes:
                data = bytearray(self.content[at : at + each.nbytes].ljust(each.nbytes, b"\0"))
                tensor.copy_(torch.frombuffer(data, dtype=each.dtype).reshape(each.shape))
            tensors.append(tensor)
            at += _padded(each.nbytes)
        if at != len(self.content):
            raise ValueError(f"the content has {len(self.content)} bytes, not {at}")
        return found, tensors


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank.

    Args:
        folder: Folder in node memory that only this user may enter.
        rank: Global rank.
    """
    return folder / f"rank-{rank:05d}.own"


class OwnPartWriter:
    """Writes the own part of a rank. Only the main thread of the rank writes.

    Args:
        path: See :func:`path_of`. An existing file is replaced.
        token: Token that all ranks of this start of the fit know; readers refuse a file with another one.
        content: Most bytes of numbers and tensors.
        given: The random states to write; by default those of this process.

    Raises:
        OSError: If node memory is full or cannot be written.
        NotImplementedError: If this Python or NumPy keeps its random state at an unknown place in memory.
    """

    def __init__(self, path: Path, token: str, content: int, given: GivenState | None = None) -> None:
        if content > _MOST_CONTENT:
            raise ValueError(f"there is room for {_MOST_CONTENT} bytes, not {content}")
        self._sources = given or _Sources()
        self._room = content = _padded(content)
        torch_size = torch.default_generator.get_state().numel()
        slot_size = _slot_size(torch_size, content)
        size = _HEADER.size + _SLOTS * slot_size
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # if memory is full, this fails here instead of by SIGBUS in a step
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self._sequence = 0
        self._memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT, torch_size, content, _digest_of(token))
        self._anchor: Any = ctypes.c_char.from_buffer(self._memory)
        begin = ctypes.addressof(self._anchor)
        self._bytes = memoryview(self._memory)
        self._offsets = [_HEADER.size + index * slot_size for index in range(_SLOTS)]
        self._addresses = [begin + offset for offset in self._offsets]
        places = ((_PYTHON, _TWISTER_SIZE), (_NUMPY, _TWISTER_SIZE), (_NUMPY_GAUSS, _GAUSS.size))
        self._views = [
            tuple(self._bytes[offset + place : offset + place + size] for place, size in places)
            for offset in self._offsets
        ]
        self._content_at = _content_at(torch_size)
        self._torch_size = torch_size
        self._packers: dict[int, struct.Struct] = {}

    def put(self, position: int, layout: int, numbers: Sequence[float], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Writes the present random states, numbers and tensors into the next slot.

        Args:
            position: Position of the boundary.
            layout: Identifies what the numbers and the tensors mean.
            numbers: Numbers that float64 represents exactly.
            tensors: Tensors on the host, without gaps.

        Raises:
            ValueError: If there is no room for numbers and tensors.
            NotImplementedError: If NumPy's generator was replaced.
        """
        if os.getpid() != self._pid:
            return  # a forked child
        count = len(numbers)
        size = 8 * count + sum(_padded(each.nbytes) for each in tensors) if tensors else 8 * count
        if size > self._room:
            raise ValueError(f"there is room for {self._room} bytes, not {size}")
        sources = self._sources
        sources.check()
        self._sequence = sequence = self._sequence + 1
        offset, address = self._offsets[sequence % _SLOTS], self._addresses[sequence % _SLOTS]
        memory, memmove = self._memory, ctypes.memmove
        gauss = sources.gauss_next()
        fields = (sequence, position, layout, gauss or 0.0, size, gauss is not None)
        _FIELDS.pack_into(memory, offset + _DIGEST_SIZE, *fields)
        python, numpy, numpy_gauss = self._views[sequence % _SLOTS]  # takes a third of the time of memmove
        python[:], numpy[:], numpy_gauss[:] = sources.python, sources.numpy, sources.numpy_gauss
        state = sources.torch_state()
        memmove(address + _TORCH, state.data_ptr(), self._torch_size)
        if count:
            if (packer := self._packers.get(count)) is None:
                packer = self._packers[count] = struct.Struct(f"<{count}d")
            packer.pack_into(memory, offset + self._content_at, *numbers)
        place = address + self._content_at + 8 * count
        for tensor in tensors:
            memmove(place, tensor.data_ptr(), tensor.nbytes)
            place += _padded(tensor.nbytes)
        digest = xxhash.xxh3_128_digest(self._bytes[offset + _DIGEST_SIZE : offset + self._content_at + size])
        self._bytes[offset : offset + _DIGEST_SIZE] = digest

    def close(self) -> None:
        """Unmaps the file, which stays."""
        for view in (*(view for views in self._views for view in views), self._bytes):
            view.release()
        self._anchor = None
        self._memory.close()


def read_own_parts(path: Path, token: str) -> list[OwnPart]:
    """The last own parts that a rank has written, newest first; a slot that is not completely written is left out.

    Args:
        path: See :func:`path_of`.
        token: As given to :class:`OwnPartWriter`.

    Raises:
        ForeignFile: If the file is not private to this user, is of another start of the fit, or is damaged.
        OSError: If the file does not exist, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise ForeignFile(f"{path} is not a file that only this user may write")
        header = file.read(_HEADER.size) or b""
        if len(header) != _HEADER.size:
            raise ForeignFile(f"{path} is truncated")
        magic, version, torch_size, content, owner = _HEADER.unpack(header)
        if magic != _MAGIC or version != _FORMAT or any(header[_HEADER.size - 24 :]):
            raise ForeignFile(f"{path} is not a rank's own part, is of another version, or is damaged")
        if owner != _digest_of(token):
            raise ForeignFile(f"{path} is of another start of the fit")
        slot_size = _slot_size(torch_size, content)
        if content > _MOST_CONTENT or about.st_size != _HEADER.size + _SLOTS * slot_size:
            raise ForeignFile(f"{path} has {about.st_size} bytes, which does not fit its header")
        slots = [file.read(slot_size) or b"" for _ in range(_SLOTS)]
    parts = [part for slot in slots if (part := _parse(slot, torch_size, content)) is not None]
    return sorted(parts, key=lambda part: -part.sequence)


def _parse(slot: bytes, torch_size: int, room: int) -> OwnPart | None:
    """The own part in a slot, or ``None`` if the slot is empty or incomplete."""
    sequence, position, layout, gauss, size, has_gauss = _FIELDS.unpack_from(slot, _DIGEST_SIZE)
    if not sequence or size > room:
        return None
    begin = _content_at(torch_size)
    if xxhash.xxh3_128_digest(slot[_DIGEST_SIZE : begin + size]) != slot[:_DIGEST_SIZE]:
        return None
    index, *words = struct.unpack_from(f"<{_WORDS + 1}I", slot, _PYTHON)
    *key, numpy_position = struct.unpack_from(f"<{_WORDS + 1}I", slot, _NUMPY)
    has_numpy_gauss, numpy_gauss = _GAUSS.unpack_from(slot, _NUMPY_GAUSS)
    return OwnPart(
        sequence,
        position,
        layout,
        slot[begin : begin + size],
        (random.Random.VERSION, (*words, index), gauss if has_gauss else None),
        ("MT19937", np.array(key, dtype=np.uint32), numpy_position, has_numpy_gauss, numpy_gauss),
        torch.frombuffer(bytearray(slot[_TORCH : _TORCH + torch_size]), dtype=torch.uint8),
    )


def _digest_of(token: str) -> bytes:
    return hashlib.blake2b(token.encode(), digest_size=16).digest()


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _content_at(torch_size: int) -> int:
    return _TORCH + _padded(torch_size)


def _slot_size(torch_size: int, content: int) -> int:
    return -(-(_content_at(torch_size) + content) // 64) * 64


class GivenState:
    """A given random state for :class:`OwnPartWriter`: of a rank whose place this process takes.

    Attributes:
        python: Python's position and words, in their memory layout.
        numpy: NumPy's words and position, in their memory layout.
        numpy_gauss: NumPy's second normal number.
    """

    def __init__(self) -> None:
        self.python = self.numpy = bytes(_TWISTER_SIZE)
        self.numpy_gauss = bytes(_GAUSS.size)
        self._gauss: float | None = None
        self._torch = torch.default_generator.get_state()

    def set(self, state: Mapping[str, Any]) -> None:
        """Sets the state to write next, as :func:`.get_random_state` returns it.

        Raises:
            ValueError: If torch's state has another size than in this process.
        """
        _, (*words, index), self._gauss = state["python"]
        self.python = _TWISTER.pack(index, *words)
        numpy = state["numpy"]
        self.numpy = numpy["state"]["key"].astype("<u4").tobytes() + struct.pack("<i", numpy["state"]["pos"])
        self.numpy_gauss = _GAUSS.pack(numpy["has_gauss"], numpy["gauss"])
        if state["torch"].shape != self._torch.shape:
            raise ValueError("torch's random state has another size")
        self._torch = state["torch"]

    def check(self) -> None:
        """Does nothing, since no generator of this process is used."""

    def gauss_next(self) -> float | None:
        """Python's second normal number."""
        return self._gauss

    def torch_state(self) -> torch.Tensor:
        """The random state of torch on the CPU."""
        return self._torch


class _Sources:
    """Views of the memory in which Python and NumPy keep the state of their global generators.

    Reading the state through their functions takes 100 µs, since these make objects of the 624 words. The places in
    memory are not assumed: they are searched in generators made here, whose state is known.

    Attributes:
        python: Python's position and words.
        numpy: NumPy's words and position.
        numpy_gauss: NumPy's second normal number.
        torch_state: Returns torch's random state on the CPU.
    """

    def __init__(self) -> None:
        self.torch_state = torch.default_generator.get_state
        self._random: Any = random._inst
        self._numpy: Any = np.random.mtrand._rand
        self._bit_generator = self._numpy._bit_generator
        self.python = _memory_at(id(self._random) + _place_in_python(), _TWISTER_SIZE)
        self.numpy = _memory_at(_address_of(self._bit_generator), _TWISTER_SIZE)
        self.numpy_gauss = _memory_at(id(self._numpy) + _place_of_gauss(), _GAUSS.size)

    def check(self) -> None:
        """Raises :class:`NotImplementedError` if NumPy's generator was replaced."""
        if self._numpy._bit_generator is not self._bit_generator:
            raise NotImplementedError("NumPy's global bit generator was replaced")

    def gauss_next(self) -> float | None:
        """Python's second normal number."""
        gauss: float | None = self._random.gauss_next
        return gauss


def _memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _place_in_python() -> int:
    """Offset of position and words in a ``random.Random`` object."""
    probe = random.Random(7)
    probe.random()
    words = probe.getstate()[1]
    place = ctypes.string_at(id(probe), random.Random.__basicsize__).find(struct.pack("<I3I", words[-1], *words[:3]))
    if place < 0 or ctypes.string_at(id(probe) + place + 4, 4 * _WORDS) != struct.pack(f"<{_WORDS}I", *words[:-1]):
        raise NotImplementedError("the random state of this Python is not where it is expected")
    return place


def _address_of(bit_generator: Any) -> int:
    """Address of words and position of a NumPy Mersenne twister."""
    if type(bit_generator) is not np.random.MT19937:
        raise NotImplementedError(f"NumPy's global bit generator is a {type(bit_generator).__name__}")
    given: Any = bit_generator.ctypes.state_address
    address = int(getattr(given, "value", given))
    state = bit_generator.state["state"]
    expected = state["key"].astype("<u4").tobytes() + struct.pack("<i", state["pos"])
    if ctypes.string_at(address, _TWISTER_SIZE) != expected:
        raise NotImplementedError("the random state of this NumPy is not where it is expected")
    return address


def _place_of_gauss() -> int:
    """Offset, in a ``numpy.random.RandomState`` object, of the flag that is followed by the second normal number."""
    probe: Any = np.random.RandomState(7)
    name, key, position, *_ = probe.get_state(legacy=True)
    place = -1
    for gauss in (0.7182818284590452, -0.14159265358979312):
        probe.set_state((name, key, position, 1, gauss))
        memory = ctypes.string_at(id(probe), np.random.RandomState.__basicsize__)
        place = memory.find(_GAUSS.pack(1, gauss)[8:]) - 8
        if place < 0 or memory[place : place + 4] != struct.pack("<i", 1):
            raise NotImplementedError("NumPy's second normal number is not where it is expected")
    return place
