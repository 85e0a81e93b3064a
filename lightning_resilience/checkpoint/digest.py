"""A digest of many tensors, so that ranks can compare their states. Torch only.

Tensors in host memory are hashed there (xxh3-128). Tensors on a device are not copied to the host for this: the device
sums their 32-bit words, each multiplied by its own odd number, modulo 2^64. A change of one word always changes the
sum, and different states have the same sum only by chance, even if the same bit is wrong in many places.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash

from lightning_resilience.checkpoint import devices
from lightning_resilience.checkpoint.tensor_bytes import as_words, flat, is_dense

_COLUMNS = 1 << 16
"""Number of words in a row, and number of different weights."""

_ROWS = 64
"""Number of rows multiplied at once: more take more device memory (64 rows: 32 MiB), fewer take more kernels."""


class Digest:
    """The digest of lists of tensors, added one after the other; the same lists give the same digest.

    A list may be added from any thread and on any stream: the device's work is queued on its current stream, and no
    thread waits for it before :meth:`bring`.
    """

    def __init__(self) -> None:
        self._host = xxhash.xxh3_128()
        self._sums: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds the present values of tensors in host memory or on devices; empty and meta tensors add nothing.

        Args:
            tensors: Strided tensors.
        """
        on_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_meta or not tensor.numel():
                continue
            if (device := devices.accelerator(tensor)) is not None:
                on_device.setdefault(device, []).append(_flat(tensor))
            else:
                self._host.update(_flat(tensor).view(torch.uint8).numpy().data)
        for device, elements in on_device.items():
            total = _weighted_sum(elements, device)
            before = self._sums.get(device)
            self._sums[device] = total if before is None else before * 31 + total

    def bring(self, device: torch.device) -> None:
        """Copies the sum of ``device`` to the host, on its current stream; the caller waits for it."""
        if (total := self._sums.get(device)) is not None:
            host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
            self._sums[device] = host.copy_(total, non_blocking=True)

    def hexdigest(self) -> str:
        """The digest of all added lists, as 32 hexadecimal digits. Waits for devices not covered by :meth:`bring`."""
        whole = self._host.copy()
        whole.update(repr([int(total) for total in self._sums.values()]).encode())
        return str(whole.hexdigest())


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """The digest of the present values of tensors on any devices. Waits for their devices.

    Args:
        tensors: Strided tensors.
    """
    digest = Digest()
    digest.add(tensors)
    return digest.hexdigest()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor: in memory order if they fill one piece of memory, otherwise in index order."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg() or not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return flat(tensor)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The words of all tensors in pieces to multiply at once: small tensors are joined, large ones are split."""
    together: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        for piece in torch.split(as_words(tensor).to(torch.int32), _ROWS * _COLUMNS):
            if count + piece.numel() > _ROWS * _COLUMNS:
                yield torch.cat(together)
                together, count = [], 0
            together.append(piece)
            count += piece.numel()
    if together:
        yield torch.cat(together) if len(together) > 1 else together[0]


def _weighted_sum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    weights = _weights(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    row = 0
    for words in _pieces(tensors):
        whole = words.numel() // _COLUMNS * _COLUMNS
        for part in (words[:whole].view(-1, _COLUMNS), words[whole:].view(1, -1)):
            if part.numel():
                sums = (part * weights[: part.shape[1]]).sum(1)
                begin = row % (_COLUMNS - _ROWS)
                total += (sums * weights[begin : begin + len(sums)]).sum()
                row += len(sums)
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Pseudo-random odd 64-bit numbers (splitmix64), the same in every process."""
    numbers = np.arange(1, _COLUMNS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
    weights = torch.from_numpy(numbers.view(np.int64)).to(device)
    if device.type != "cpu":
        devices.mark(device).synchronize()  # whichever stream they are used on
    return weights
