"""The memory layout of tensors, for all code that copies, hashes, sends or stores their bytes. Torch only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""The types of this version of torch, by the names that checkpoints use."""


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor fill one piece of memory without gaps or overlaps, in any order."""
    expected = 1
    for step, length in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] != 1):
        if step != expected:
            return False
        expected *= length
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_words(elements: torch.Tensor, widest: int = 4) -> torch.Tensor:
    """Contiguous elements as integers of ``widest`` bytes, or fewer if that does not divide their size; perhaps a view.

    Args:
        elements: One dimension.
        widest: 1, 2, 4 or 8.
    """
    width = next(each for each in (8, 4, 2, 1) if each <= widest and elements.nbytes % each == 0)
    word = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    return (elements.clone() if elements.data_ptr() % width else elements).view(word)


def host_bytes(memory: torch.Tensor) -> memoryview:
    """The bytes of ``memory`` for use outside of torch; not a copy.

    Raises:
        ValueError: If it is not one contiguous dimension of ``uint8`` in host memory.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.device.type != "cpu":
        raise ValueError(
            f"bytes (uint8) of one dimension in host memory are needed, not {memory.dtype} of shape "
            f"{list(memory.shape)} on {memory.device}"
        )
    return memory.numpy().data
