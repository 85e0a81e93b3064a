"""Whether workers of data loaders change while they read: else their place in the data is found without reading again.

The place of a loader is that of its sampler, which is moved on in no time, and what its workers hold: the state of
their random generators, and what a dataset of the user's remembers from one read to the next. If a worker has drawn no
random number, and nothing in its dataset and its collation has changed, a new worker is as good as one that has read
everything up to there. So the workers look, behind each batch, and leave word in shared memory when something has
changed.

What the first read changes is no trace: datasets open their files when they first need them, in each worker.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import pickle
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

log = logging.getLogger(__name__)

_MOST_PARTS = 2000
_MOST_ITEMS = 32
_MOST_BYTES = 4096
"""Of an object, a container and an array: what is larger is looked at in part."""
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_CONSTANT = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, logging.Logger)


class ReadingTraces:
    """Watches the workers of training data loaders."""

    def __init__(self) -> None:
        # Weak: an epoch may create new loaders.
        self._watches: weakref.WeakKeyDictionary[Any, _Watch] = weakref.WeakKeyDictionary()

    def watch(self, loaders: Iterable[Any]) -> None:
        """Has the workers of these loaders look, from their next iterators on; what cannot be watched is left out.

        Args:
            loaders: Some may be watched already.
        """
        for loader in loaders:
            if not (isinstance(loader, DataLoader) and loader.num_workers > 0) or loader in self._watches:
                continue
            if not (isinstance(loader.dataset, IterableDataset) or loader.persistent_workers):
                flags: Any = torch.zeros(loader.num_workers, dtype=torch.uint8)
                flags.share_memory_()
                watch = self._watches[loader] = _Watch(loader.collate_fn, loader.worker_init_fn, flags)
                loader.collate_fn, loader.worker_init_fn = watch, watch.begin

    def forget(self) -> None:
        """Other workers begin."""
        for watch in self._watches.values():
            watch.flags.zero_()

    def are_none(self, loaders: Collection[Any]) -> bool:
        """Whether the workers of all these loaders are watched, and have changed nothing since they have begun."""
        watches = [self._watches.get(each) if isinstance(each, DataLoader) else None for each in loaders]
        return bool(watches) and all(each is not None and not each.has_seen_changes for each in watches)

    def leave(self) -> None:
        """Has loaders be as they were."""
        for loader, watch in self._watches.items():
            loader.collate_fn, loader.worker_init_fn = watch.collate, watch.init
        self._watches.clear()


class _Watch:
    """In the place of a loader's ``collate_fn``, which a worker calls with each batch.

    Args:
        collate: The loader's own.
        init: Its own ``worker_init_fn``.
        flags: In shared memory, for each worker whether it has changed.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None, flags: torch.Tensor) -> None:
        self.collate, self.init, self.flags = collate, init, flags
        self._worker: int | None = None
        self._random: Any = None
        self._outline: list[Any] | None = None

    @property
    def has_seen_changes(self) -> bool:
        """Whether any worker has."""
        return bool(self.flags.numpy().any())

    def begin(self, worker: int) -> None:
        """The loader's ``worker_init_fn``: called in the worker, before it reads."""
        if self.init is not None:
            self.init(worker)
        self._worker, self._random, self._outline = worker, _random_state(), None

    def __call__(self, samples: Any) -> Any:
        """The loader's ``collate_fn``."""
        batch = self.collate(samples)
        if self._worker is not None and self._has_changed():
            self.flags[self._worker] = 1
            self._worker = None
        return batch

    def _has_changed(self) -> bool:
        info = get_worker_info()
        if info is None or info.id != self._worker:
            return True
        try:
            now = outline(info.dataset, self.collate)
        except Exception:  # of an object that does not like to be looked at
            log.debug("A dataset cannot be looked at", exc_info=True)
            return True
        if self._outline is None:
            self._outline = now
        return now is None or now != self._outline or self._random != _random_state()


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), _bytes_of(torch.get_rng_state())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


class _Same:
    """An object, equal only to itself. Keeps it alive, or another one could come to be at the same place."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    __hash__ = None  # type: ignore[assignment]


def outline(*things: Any) -> list[Any] | None:
    """What objects consist of, as far as they say it in attributes: equal if nothing in them has changed.

    Of random generators it has the state, of tensors and arrays which they are, and small ones whole, of large
    containers the size and some items, and of what has no attributes only which object it is.

    Args:
        things: The objects.

    Returns:
        ``None`` if they have too many parts to be looked at, or one that every use changes.
    """
    found: list[Any] = []
    seen = set[int]()
    rest = [*things]
    while rest:
        each = rest.pop()
        if each is None or isinstance(each, (bool, int, float, complex, str, bytes)):
            found.append(each if each == each else repr(each))  # NaN is equal to itself here
        elif id(each) in seen or isinstance(each, _CONSTANT):
            found.append(_Same(each))
        else:
            if len(seen) >= _MOST_PARTS or (isinstance(each, Iterator) and not isinstance(each, io.IOBase)):
                return None
            seen.add(id(each))
            found += [_Same(each), *_about(each)]
            rest.extend(_parts(each))
    return found


def _about(each: Any) -> list[Any]:
    """What is known of an object beside its parts."""
    if isinstance(each, random.Random):
        return [each.getstate()]
    if isinstance(each, np.random.RandomState):
        return [pickle.dumps(each.get_state(legacy=False))]
    if isinstance(each, (np.random.Generator, np.random.BitGenerator)):
        return [pickle.dumps((each if isinstance(each, np.random.BitGenerator) else each.bit_generator).state)]
    if isinstance(each, torch.Generator):
        return [_bytes_of(each.get_state())]
    if isinstance(each, torch.Tensor):
        return [each._version]
    if isinstance(each, np.ndarray):
        return [each.tobytes()] if each.nbytes <= _MOST_BYTES and not each.dtype.hasobject else []
    return [len(each)] if isinstance(each, _CONTAINERS) else []


def _parts(each: Any) -> Iterator[Any]:
    if isinstance(each, (random.Random, torch.Tensor, np.ndarray)):
        return
    if isinstance(each, _CONTAINERS):
        yield from _ends(each)
        if isinstance(each, dict):
            yield from _ends(each.values())
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, types.FunctionType):
        yield from (cell.cell_contents for cell in each.__closure__ or () if cell != types.CellType())
    elif isinstance(each, types.MethodType):
        yield from (each.__func__, each.__self__)
    else:
        yield from getattr(each, "__dict__", {}).values()
        yield from (getattr(each, name, None) for cls in type(each).__mro__ for name in _slots(cls))


def _ends(items: Any) -> Iterator[Any]:
    """The first items, and the last: what is added, or taken away, is at one of the ends."""
    if len(items) <= _MOST_ITEMS:
        yield from items
        return
    yield from islice(items, _MOST_ITEMS // 2)
    if hasattr(items, "__reversed__"):
        yield from islice(reversed(items), _MOST_ITEMS // 2)


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
