"""Compares what objects consist of before and after a use, to see whether reading a dataset changes its state.

It sees only what Python shows, not the state of generators in C or the position in a file.
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
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_MOST_PARTS = 2000
_MOST_ITEMS = 32
_MOST_BYTES = 4096
"""Limits for one outline, one container and one array: too many parts give no outline, larger data are seen in part."""

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_CONSTANT = (types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, logging.Logger, DataLoader)
_LIBRARIES = {
    *("abc", "array", "builtins", "collections", "contextlib", "copyreg", "ctypes", "datetime", "enum", "functools"),
    *("io", "itertools", "lightning", "lightning_resilience", "logging", "multiprocessing", "numpy", "pathlib"),
    *("pytorch_lightning", "random", "re", "threading", "torch", "types", "typing", "weakref"),
}
"""Packages whose classes and functions keep no state that reads change."""


class _Same:
    """An object, equal only to itself. Keeps it alive, since otherwise a new object could get the same address."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    __hash__ = None  # type: ignore[assignment]


def outline(*things: Any) -> list[Any] | None:
    """An outline of what objects consist of, as far as attributes show it. Outlines are equal if nothing has changed.

    It has the state of random generators, the identity of tensors and arrays and the values of small ones, the size and
    some items of large containers, what the script's functions and classes refer to, and only the identity of objects
    without attributes.

    Args:
        things: The objects.

    Returns:
        ``None`` if they have too many parts, or a part that every use changes (an iterator).
    """
    found: list[Any] = []
    seen = set[int]()
    rest = [*things]
    while rest:
        each = rest.pop()
        if each is None or isinstance(each, (bool, int, float, complex, str, bytes)):
            found.append(each if each == each else repr(each))  # as text, NaN is equal to itself
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
    """Whether ``each`` is a class or a function of a package that keeps no state there."""
    module = getattr(each, "__module__", None) if isinstance(each, (type, types.FunctionType)) else ""
    return module is None or module.partition(".")[0] in _LIBRARIES


def _about(each: Any) -> list[Any]:
    """The content of an object apart from its parts."""
    if isinstance(each, random.Random):
        return [each.getstate()]
    if isinstance(each, np.random.RandomState):
        return [pickle.dumps(each.get_state(legacy=False))]
    if isinstance(each, (np.random.Generator, np.random.BitGenerator)):
        return [pickle.dumps((each if isinstance(each, np.random.BitGenerator) else each.bit_generator).state)]
    if isinstance(each, np.random.SeedSequence):
        return [repr(each.state)]
    if isinstance(each, torch.Generator):
        return [each.get_state().numpy().tobytes()]
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
    """The first and the last items: items are usually added or removed at one of the ends."""
    if len(items) <= _MOST_ITEMS:
        yield from items
        return
    yield from islice(items, _MOST_ITEMS // 2)
    if hasattr(items, "__reversed__"):
        yield from islice(reversed(items), _MOST_ITEMS // 2)
