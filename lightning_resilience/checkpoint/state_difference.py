"""Reduces a rank's state to its differences from the state of rank 0, and rebuilds it from them.

The states are mostly the same: a rank that draws the random numbers of rank 0 sends a few hundred bytes instead of the
37 kB of its generators. This works on the packed form (:mod:`.safe_serialization`), which does not depend on how a
pickle was made, and uses no collective.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lightning_resilience.checkpoint.tensor_bytes import DTYPES

Path: TypeAlias = "tuple[str, ...]"
Pieces: TypeAlias = "dict[Path, bytes | torch.Tensor]"
"""A packed state, divided by the paths in it. A piece is bytes, or a tensor without plain bytes (such as sparse)."""

_STATE, _TENSORS = "state", "tensors"
_SMALL = 256  # bytes; up to this size a piece is neither divided further nor compressed
_LONG = 1 << 20  # bytes; from this size on a piece is not compressed: that would take longer than to send it
_KEYS, _VALUE, _TENSOR, _COMPRESSED = b"k", b"v", b"t", b"z"


def pieces(structure: Any, tensors: Sequence[torch.Tensor]) -> Pieces:
    """Divides a state into pieces.

    Args:
        structure: As :func:`.safe_serialization.pack` returns it.
        tensors: The tensors of the same call, in host memory. They are copied.
    """
    found: Pieces = dict(_divided(structure, (_STATE,)))
    found[(_TENSORS,)] = _VALUE + str(len(tensors)).encode()
    found.update({(_TENSORS, str(index)): _of_tensor(tensor) for index, tensor in enumerate(tensors)})
    return found


def digests(of: Pieces) -> dict[Path, bytes]:
    """The digest of each piece of bytes, to compare two states."""
    return {
        path: hashlib.blake2b(piece, digest_size=16).digest() for path, piece in of.items() if isinstance(piece, bytes)
    }


def differing(mine: Pieces, first: Mapping[Path, bytes]) -> Pieces:
    """The pieces of a state that differ from another state, given by its digests."""
    own, sent = digests(mine), dict[bytes, bytes]()
    different: Pieces = {}
    for path, piece in mine.items():
        if not isinstance(piece, bytes):
            different[path] = piece
        elif first.get(path) != own[path]:
            # Equal pieces become one object, which is pickled once.
            different[path] = sent.setdefault(own[path], _compressed(piece))
    return different


def joined(first: Pieces, different: Pieces) -> tuple[Any, list[torch.Tensor]]:
    """Rebuilds a state from another state and the pieces that differ, as :func:`.safe_serialization.pack` returns it.

    States that are rebuilt from the same ``first`` share the tensors that do not differ.
    """

    def structure(path: Path) -> Any:
        content = _decompressed(different.get(path, first.get(path)))
        value = json.loads(content[1:])
        if content[:1] == _VALUE:
            return value
        return {key: structure((*path, key)) for key in value}

    count = json.loads(_decompressed(different.get((_TENSORS,), first.get((_TENSORS,))))[1:])
    paths = [(_TENSORS, str(index)) for index in range(count)]
    return structure((_STATE,)), [_tensor(different, first, path) for path in paths]


def _divided(value: Any, path: Path) -> Iterator[tuple[Path, bytes]]:
    text = _text(value)
    if len(text) <= _SMALL or type(value) is not dict:
        yield path, _VALUE + text
        return
    yield path, _KEYS + _text(list(value))
    for key, each in value.items():
        yield from _divided(each, (*path, key))


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _of_tensor(tensor: torch.Tensor) -> bytes | torch.Tensor:
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.device.type != "cpu"
    ):
        return tensor.detach().clone()  # the training may change the tensor before this is written
    head = _text([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return b"".join((_TENSOR, len(head).to_bytes(4, "little"), head, content))


def _tensor(different: Pieces, first: Pieces, path: Path) -> torch.Tensor:
    piece = different.get(path)
    if piece is None:
        piece = first[path]
        if isinstance(piece, bytes):  # from here on all states that share it use the same tensor
            piece = first[path] = _made_tensor(piece)
    return piece if isinstance(piece, torch.Tensor) else _made_tensor(piece)


def _made_tensor(piece: bytes) -> torch.Tensor:
    content = _decompressed(piece)
    begin = 5 + int.from_bytes(content[1:5], "little")
    dtype, shape = json.loads(content[5:begin])
    if begin == len(content):
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(content[begin:]), dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def _compressed(piece: bytes) -> bytes:
    if not _SMALL < len(piece) < _LONG:
        return piece
    return min(piece, _COMPRESSED + zlib.compress(piece, 1), key=len)


def _decompressed(piece: bytes | torch.Tensor | None) -> bytes:
    assert isinstance(piece, bytes)
    return zlib.decompress(piece[1:]) if piece[:1] == _COMPRESSED else piece
