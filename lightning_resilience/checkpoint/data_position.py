"""The position of a rank in its random streams and its data, for an exact resume in the middle of an epoch.

A data loader's order and the random numbers of its workers follow from the state of the random generators at the moment
its iterator was made. So a position is that state, the number of batches fetched since, and the random state now. A
resume sets the first state, makes the iterator, fetches the same number of batches again, and sets the second state.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sized
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_resilience.checkpoint.safe_serialization import from_safe

log = logging.getLogger(__name__)

RandomState = dict[str, Any]
"""The state of every global random generator of a process, in plain types (see :mod:`.safe_serialization`)."""

MOST_SEEDS = 100
"""The most seeds that :func:`seeds_drawn` follows, so the most data loaders of a validation whose draws it follows."""
PROGRESS_INTERVAL_S = 5.0
"""Seconds between two log lines on the progress of a replay."""


def _accelerator(device: torch.device) -> Any | None:
    return None if device.type == "cpu" else torch.get_device_module(device)


def get_random_state(device: torch.device, generators: Iterable[torch.Generator] = ()) -> RandomState:
    """The state of the generators of Python, NumPy, torch on the CPU and torch on ``device``.

    Args:
        device: This rank's device.
        generators: Further generators, of data loaders and samplers; a resume must pass the same ones in the same
            order.
    """
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }
    if (accelerator := _accelerator(device)) is not None:
        state["accelerator"] = accelerator.get_rng_state()
    return state


def set_random_state(state: RandomState, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
    """Restores what :func:`get_random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(from_safe(state["numpy"]))  # earlier versions have saved it in safe form
    torch.set_rng_state(state["torch"])
    for generator, generator_state in zip(generators, state["generators"], strict=False):
        generator.set_state(generator_state)
    if (accelerator := _accelerator(device)) is not None and "accelerator" in state:
        accelerator.set_rng_state(state["accelerator"])


def begin_again(device: torch.device) -> None:
    """Has the generator of ``device`` give once more what it has given since it was seeded."""
    if (accelerator := _accelerator(device)) is not None:
        accelerator.manual_seed(accelerator.initial_seed())


def is_same(one: Any, other: Any) -> bool:
    """Whether two states of :func:`get_random_state`, or parts of them, are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(each, other[name]) for name, each in one.items())
    return bool(np.asarray(one == other).all())


def seeds_drawn(before: torch.Tensor, after: torch.Tensor) -> int | None:
    """How many seeds were drawn from a generator between two of its states: each iterator of a data loader draws one.

    Args:
        before: Earlier state, from ``Generator.get_state`` on the CPU.
        after: Later state, from the same.

    Returns:
        ``None`` if something other than seeds was drawn, or more than :data:`MOST_SEEDS`.
    """
    generator = torch.Generator().set_state(before)
    for count in range(MOST_SEEDS + 1):
        if torch.equal(generator.get_state(), after):
            return count
        _draw_seed(generator)
    return None


def after_seeds(state: torch.Tensor, count: int) -> torch.Tensor:
    """The state of a generator after ``count`` seeds were drawn in ``state``."""
    generator = torch.Generator().set_state(state)
    for _ in range(count):
        _draw_seed(generator)
    return generator.get_state()


def _draw_seed(generator: torch.Generator) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def loader_generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that the user gave to data loaders or samplers, each once, in a fixed order.

    Args:
        loaders: Loaders, or samplers that belong to none of them.
    """
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def batch_sizes(loaders: Iterable[Any]) -> list[int | None]:
    """The batch size of each loader; ``None`` if it is unknown."""
    sizes = []
    for loader in loaders:
        given = (getattr(owner, "batch_size", None) for owner in (loader, getattr(loader, "batch_sampler", None)))
        sizes.append(next((size for size in given if isinstance(size, int) and size > 0), None))
    return sizes


def change_of_batch_size(before: list[int | None], now: list[int | None]) -> Fraction | None:
    """How many batches of the present sizes have as many samples as one batch of the earlier sizes.

    Returns:
        ``None`` if that is unknown, or not the same for all loaders.
    """
    if len(before) != len(now):
        return None
    changes = {
        Fraction(old or 0, new or 1) if old != new else Fraction(1) for old, new in zip(before, now, strict=True)
    }
    change = changes.pop() if len(changes) == 1 else Fraction(0)
    return change if change > 0 else None


def workers_have_own_samples(loaders: Iterable[Any]) -> bool:
    """Whether workers draw samples themselves (iterable datasets): the worker of a batch then decides its samples."""
    return any(isinstance(getattr(each, "dataset", None), IterableDataset) and each.num_workers > 0 for each in loaders)


def inexact_loaders(loaders: Iterable[Any], are_kept: bool = False) -> list[str]:
    """Why a resume with these loaders is not exact: a text for each reason, with what to change.

    Args:
        loaders: The training data loaders.
        are_kept: Whether the random states of persistent workers are saved.
    """
    reasons = []
    for index, loader in enumerate(loaders):
        if keeps_workers(loader) and not are_kept:
            reasons.append(
                f"train data loader {index} keeps its workers across epochs (persistent_workers=True), and the state "
                "of their random generators cannot be read: a resume after the first epoch is exact only if the "
                "dataset draws no random numbers. Set persistent_workers=False for an exact resume."
            )
        elif not isinstance(loader, DataLoader) and not hasattr(loader, "load_state_dict"):
            reasons.append(
                f"train data loader {index} is a {type(loader).__module__}.{type(loader).__qualname__}, whose position "
                "cannot be read: a resume after the first epoch is exact only if the loader begins every epoch anew. "
                "Use a torch DataLoader, or give it state_dict and load_state_dict."
            )
    return reasons


def describe_data(loaders: Iterable[Any], like: Any = None) -> list[dict[str, Any]]:
    """What identifies the data of a fit at little cost: the length of each dataset, and the indices of a subset.

    Args:
        loaders: The data loaders of the fit.
        like: An earlier description to compare with. If an older version of this package wrote it, the result has its
            form.
    """
    described: list[dict[str, Any]] = []
    as_before = isinstance(like, list) and any(isinstance(each, dict) and "part" in each for each in like)
    for loader in loaders:
        dataset = getattr(loader, "dataset", None)
        length = len(dataset) if isinstance(dataset, Sized) else None
        indices = dataset.indices if isinstance(dataset, Subset) else None
        if as_before:
            part = None if indices is None else xxhash.xxh3_128_hexdigest(repr(list(indices)).encode())
            described.append({"length": length, "part": part})
        else:
            described.append({"length": length, "indices": None if indices is None else _digest(indices)})
    return described


def _digest(indices: Any) -> str:
    """A digest of indices: the same for the same numbers in a list, an array or a tensor."""
    try:
        # To convert millions of tensor elements one by one would take minutes.
        array = indices.cpu().numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "iu":  # the keys are not integers
        return xxhash.xxh3_128_hexdigest(repr(list(indices)).encode())
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array, dtype=np.int64).data)


def can_skip(loader: Any) -> bool:
    """Whether a resume can advance only this loader's sampler, without reading the data of the earlier batches.

    This needs parts that keep no state between two reads and draw only from the global generators, whose state is
    restored afterwards: torch's own loader without workers, with its own samplers, collation and tensor datasets. What
    a user's dataset does when it is read is unknown; reading the batches again is always right.
    """
    if type(loader) is not DataLoader or loader.num_workers > 0 or type(loader.batch_sampler) is not BatchSampler:
        return False
    known = type(loader.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    return known and loader.collate_fn is default_collate and _only_tensors(loader.dataset)


def _only_tensors(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _only_tensors(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_only_tensors(one) for one in dataset.datasets)
    return type(dataset) is TensorDataset


def keeps_workers(loader: Any) -> bool:
    """Whether the loader's workers live longer than an epoch."""
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


def start_persistent_workers(loaders: Iterable[Any]) -> None:
    """Starts persistent workers that are not yet running; they draw their seed only once, at their start."""
    for loader in loaders:
        if keeps_workers(loader) and loader._iterator is None:
            iter(loader)


def persistent_workers_run(loaders: Iterable[Any]) -> bool:
    """Whether persistent workers have been started."""
    return any(keeps_workers(loader) and loader._iterator is not None for loader in loaders)


def replay(fetch: Callable[[], Any], batches: int, rank: int = 0) -> None:
    """Fetches ``batches`` batches again, to bring the loader and its workers to their position.

    Args:
        fetch: Fetches one batch.
        batches: Number of batches that had been fetched.
        rank: This rank; rank 0 logs the progress.
    """
    started = last = time.monotonic()
    for done in range(1, batches + 1):
        try:
            fetch()
        except StopIteration:
            raise RuntimeError(
                f"The training data ended after {done - 1} of the {batches} batches that the run had trained on in "
                "this epoch. The data have become shorter, or the batches larger, since the checkpoint was saved: "
                "undo that change, or give the run another directory."
            ) from None
        now = time.monotonic()
        if rank == 0 and now - last >= PROGRESS_INTERVAL_S:
            last = now
            left = (batches - done) * (now - started) / done
            log.info("Replaying the data of this epoch: batch %d of %d, about %.0f s left.", done, batches, left)
