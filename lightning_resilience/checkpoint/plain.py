"""Training state in types that ``torch.load(weights_only=True)`` reads, so that no resume ever unpickles.

What users put into their state beside tensors (NumPy arrays and numbers, paths, times) is written in a tagged form and
rebuilt on load. Anything else can only be pickled: it is left out, by name.
"""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_TAG = "__resilience_type__"
_PLAIN = (str, bytes, bool, int, float, complex, torch.Tensor, torch.Size, torch.dtype, torch.device)
_LEFT_OUT = object()


def to_plain(value: Any) -> tuple[Any, list[str]]:
    """Rewrites ``value`` for a safe load.

    Args:
        value: Nested dicts, lists, tuples and sets of anything. Tensors are passed through, not copied.

    Returns:
        The rewritten value, and the path and type of everything that had to be left out, for example
        ``callbacks.MyCallback.encoder (LabelEncoder)``.
    """
    left_out: list[str] = []
    plain = _to_plain(value, "", left_out)
    return (None if plain is _LEFT_OUT else plain), left_out


def _to_plain(value: Any, path: str, left_out: list[str]) -> Any:
    # Exact types: a subclass of a tensor, str or dict comes back from a safe load only if torch knows it.
    if value is None or type(value) in _PLAIN or isinstance(value, torch.nn.Parameter):
        return value
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        items = {key: _to_plain(item, f"{path}.{key}" if path else str(key), left_out) for key, item in value.items()}
        kept = {key: item for key, item in items.items() if item is not _LEFT_OUT}
        return type(value)(kept) if type(value) in (OrderedDict, Counter) else kept
    if type(value) in (list, tuple, set):
        kept_items = [_to_plain(item, f"{path}[{index}]", left_out) for index, item in enumerate(value)]
        return type(value)(None if item is _LEFT_OUT else item for item in kept_items)
    if isinstance(value, torch.Tensor):
        return value  # DTensor and the like: torch decides
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {_TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {_TAG: "scalar", "dtype": value.dtype.str, "data": value.tobytes()}
    if isinstance(value, PurePath):
        return {_TAG: "path", "data": str(value)}
    if type(value) is datetime.timedelta:
        return {_TAG: "timedelta", "data": [value.days, value.seconds, value.microseconds]}
    if type(value) is datetime.datetime:
        return {_TAG: "datetime", "data": value.isoformat()}
    left_out.append(f"{path or 'value'} ({type(value).__module__}.{type(value).__qualname__})")
    return _LEFT_OUT


def from_plain(value: Any) -> Any:
    """Rebuilds what :func:`to_plain` rewrote."""
    if isinstance(value, dict):
        match value.get(_TAG):
            case "ndarray":
                return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
            case "scalar":
                return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"]))[0]
            case "path":
                return Path(value["data"])
            case "timedelta":
                days, seconds, microseconds = value["data"]
                return datetime.timedelta(days, seconds, microseconds)
            case "datetime":
                return datetime.datetime.fromisoformat(value["data"])
            case _:
                items = {key: from_plain(item) for key, item in value.items()}
                return type(value)(items) if isinstance(value, (OrderedDict, Counter)) else items
    if type(value) in (list, tuple, set):
        return type(value)(from_plain(item) for item in value)
    return value
