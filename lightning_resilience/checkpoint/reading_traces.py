"""Whether workers of data loaders change while they read: else their place in the data is found without reading again.

The place of a loader is that of its sampler, which is moved on in no time, and what its workers hold: the state of
their random generators, and what a dataset of the user's remembers from one read to the next. If a worker has drawn no
random number, and nothing in its dataset and its collation has changed, a new worker is as good as one that has read
everything up to there. So the workers look, behind each batch, and leave word in shared memory.

What they see is what Python shows: not the state of generators in C, say. So it is for the user to say that samples
depend on nothing but their index, and the look is there to notice when that is not so.

What the first read changes is no trace: datasets open their files when they first need them, in each worker.
"""

from __future__ import annotations

import array
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

from lightning_resilience.signals import WorkerGuard

log = logging.getLogger(__name__)

_MOST_PARTS = 2000
_MOST_ITEMS = 32
_MOST_BYTES = 4096
"""Of an object, a container and an array: what is larger is looked at in part."""
_UNCHANGED, _CHANGED = 1, 2
"""What a worker has seen; 0: it has not looked twice."""

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_CONSTANT = (types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, logging.Logger, DataLoader)
_LIBRARIES = {
    *("abc", "array", "builtins", "collections", "contextlib", "copyreg", "ctypes", "datetime", "enum", "functools"),
    *("io", "itertools", "lightning", "lightning_resilience", "logging", "multiprocessing", "numpy", "pathlib"),
    *("pytorch_lightning", "random", "re", "threading", "torch", "types", "typing", "weakref"),
}
"""Packages whose classes and functions keep no state that reads change."""


class ReadingTraces:
    """Watches the workers of training data loaders.

    Args:
        is_asked: Whether it does so.

    Attributes:
        is_asked: The same.
    """

    def __init__(self, is_asked: bool = True) -> None:
        self.is_asked = is_asked
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # an epoch may create new loaders

    def watch(self, loaders: Iterable[Any]) -> None:
        """Has the workers of these loaders look, from their next iterators on; what cannot be watched is left out.

        Args:
            loaders: Their workers are guarded. Some may be watched already.
        """
        for loader in loaders if self.is_asked else ():
            if not _can_be_watched(loader) or loader in self._watched:
                continue
            guard, flags = loader.worker_init_fn, torch.zeros(loader.num_workers, dtype=torch.uint8)
            watch = loader.collate_fn = _Watch(loader.collate_fn, guard.inner, flags)
            guard.inner = watch.begin
            self._watched.add(loader)

    def forget(self) -> None:
        """Other workers begin."""
        for loader in self._watched:
            if isinstance(watch := loader.collate_fn, _Watch):
                watch.flags.zero_()

    def are_none(self, loaders: Collection[Any]) -> bool:
        """Whether the workers of all these loaders are watched, and have seen that they do not change."""
        watches = [each.collate_fn if isinstance(each, DataLoader) else None for each in loaders]
        return bool(watches) and all(isinstance(each, _Watch) and each.has_seen_no_change for each in watches)

    def leave(self) -> None:
        """Has loaders collate as they did; with what guards their workers the rest goes."""
        for loader in self._watched:
            if isinstance(watch := loader.collate_fn, _Watch):
                loader.collate_fn = watch.collate
        self._watched.clear()


def _can_be_watched(loader: Any) -> bool:
    """Whether it has workers that begin anew with each iterator, and does not find its place by itself."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.worker_init_fn, WorkerGuard)
        and not isinstance(loader.dataset, IterableDataset)
        and not loader.persistent_workers
        and not hasattr(loader, "load_state_dict")
    )


class _Watch:
    """In the place of a loader's ``collate_fn``, which a worker calls with each batch.

    Args:
        collate: The loader's own.
        init: Its own ``worker_init_fn``.
        flags: For what each worker has seen; they are moved to shared memory.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None, flags: Any) -> None:
        self.collate, self.init, self.flags = collate, init, flags.share_memory_()
        self._worker: int | None = None
        self._random: Any = None
        self._outline: list[Any] | None = None

    @property
    def has_seen_no_change(self) -> bool:
        """Whether every worker has looked, and none has seen a change."""
        return bool((self.flags.numpy() == _UNCHANGED).all())

    def begin(self, worker: int) -> None:
        """In the place of its ``worker_init_fn``: called in the worker, before it reads."""
        if self.init is not None:
            self.init(worker)
        self._worker, self._random, self._outline = worker, _random_state(), None

    def __call__(self, samples: Any) -> Any:
        """The loader's ``collate_fn``."""
        batch = self.collate(samples)
        if self._worker is not None:
            self._look(self._worker)
        return batch

    def _look(self, worker: int) -> None:
        info: Any = get_worker_info()
        try:
            now = outline(info.dataset, self.collate)
        except Exception:  # of an object that does not like to be looked at
            log.debug("A dataset cannot be looked at", exc_info=True)
            now = None
        is_first, self._outline = self._outline is None, self._outline or now
        if now is None or now != self._outline or self._random != _random_state():
            self.flags[worker] = _CHANGED
            self._worker = self._random = self._outline = None  # which keeps alive what it was made of
        elif not is_first:
            self.flags[worker] = _UNCHANGED


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
    containers the size and some items, of functions and classes of the script what they refer to, and of what has no
    attributes only which object it is.

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
        elif id(each) in seen or isinstance(each, _CONSTANT) or _is_of_library(each):
            found.append(_Same(each))
        else:
            if len(seen) >= _MOST_PARTS or (isinstance(each, Iterator) and not isinstance(each, io.IOBase)):
                return None
            seen.add(id(each))
            found += [_Same(each), *_about(each)]
            rest.extend(_parts(each))
    return found


def _is_of_library(each: Any) -> bool:
    """Whether it is a class or a function of a package that keeps no state in it."""
    module = getattr(each, "__module__", None) if isinstance(each, (type, types.FunctionType)) else ""
    return module is None or module.partition(".")[0] in _LIBRARIES


def _about(each: Any) -> list[Any]:
    """What is known of an object beside its parts."""
    if isinstance(each, random.Random):
        return [each.getstate()]
    if isinstance(each, np.random.RandomState):
        return [pickle.dumps(each.get_state(legacy=False))]
    if isinstance(each, (np.random.Generator, np.random.BitGenerator)):
        return [pickle.dumps((each if isinstance(each, np.random.BitGenerator) else each.bit_generator).state)]
    if isinstance(each, np.random.SeedSequence):
        return [repr(each.state)]
    if isinstance(each, torch.Generator):
        return [_bytes_of(each.get_state())]
    if isinstance(each, torch.Tensor):
        is_small = each.device.type == "cpu" and each.layout == torch.strided and each.nbytes <= _MOST_BYTES
        return [each._version, each.detach().tolist() if is_small and not each.is_quantized else None]
    if isinstance(each, np.ndarray):
        return [each.tobytes()] if each.nbytes <= _MOST_BYTES and not each.dtype.hasobject else []
    if isinstance(each, (bytearray, array.array)):
        return [len(each), bytes(memoryview(each).cast("B")[:_MOST_BYTES])]
    return [len(each)] if isinstance(each, _CONTAINERS) else []


def _parts(each: Any) -> Iterator[Any]:
    if isinstance(each, _CONTAINERS):
        yield from _ends(each)
        if isinstance(each, dict):
            yield from _ends(each.values())
    elif isinstance(each, np.ndarray) and each.dtype.hasobject:
        yield from _ends(each.ravel().tolist())
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, types.FunctionType):
        yield from _parts_of_function(each)
    elif isinstance(each, (types.MethodType, staticmethod, classmethod)):
        yield from (each.__func__, getattr(each, "__self__", None))
    elif isinstance(each, property):
        yield each.fget
    elif isinstance(each, type):
        yield from (value for name, value in vars(each).items() if not (name.startswith("__") and name.endswith("__")))
        yield from (vars(each).get(name) for name in ("__init__", "__call__", "__getitem__", "__getitems__"))
        yield from each.__bases__
        return
    yield from getattr(each, "__dict__", {}).values()
    if not isinstance(each, types.FunctionType):
        yield type(each)
        slots = (slot for cls in type(each).__mro__ for slot in vars(cls).values())
        for slot in slots:
            if isinstance(slot, types.MemberDescriptorType) and not _is_of_library(slot.__objclass__):
                try:
                    yield slot.__get__(each)
                except AttributeError:  # it is not set
                    yield None


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    yield from (function.__defaults__, function.__kwdefaults__)
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            if not isinstance(found := function.__globals__.get(name), (types.FunctionType, type)):
                yield found


def _ends(items: Any) -> Iterator[Any]:
    """The first items, and the last: what is added, or taken away, is at one of the ends."""
    if len(items) <= _MOST_ITEMS:
        yield from items
        return
    yield from islice(items, _MOST_ITEMS // 2)
    if hasattr(items, "__reversed__"):
        yield from islice(reversed(items), _MOST_ITEMS // 2)
