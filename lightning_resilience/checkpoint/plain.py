"""Training state in types that ``torch.load(weights_only=True)`` reads, so that no resume ever unpickles.

What users put into their state beside tensors (NumPy arrays and numbers, paths, times) is written in a tagged form and
rebuilt on load. Anything else can only be pickled: it is left out, by name.
"""

from __future__ import annotations

import base64
import datetime
import gc
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
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


def to_host(value: Any) -> Any:
    """``value`` with every tensor in it in host memory: what another process is given must be on no device.

    A tensor is unpickled on the device from which it was pickled, which another process has no business on: it costs
    half a gigabyte of that device's memory, or is an error where there is no such device.

    Args:
        value: Nested dicts, lists, tuples and sets of anything.
    """
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.detach().cpu()
    if isinstance(value, (defaultdict, OrderedDict)):
        copied = value.copy()
        copied.update({key: to_host(item) for key, item in value.items()})
        return copied
    if type(value) is dict:
        return {key: to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(to_host(item) for item in value)
    return value


def device_of(value: Any) -> torch.device | None:
    """A device other than the host that holds a tensor in ``value``, nested as for :func:`to_host`, if there is one."""
    if isinstance(value, torch.Tensor):
        return None if value.is_meta or value.is_cpu else value.device
    items: Any = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple, set) else ()
    return next((found for item in items if (found := device_of(item)) is not None), None)


# For files that hold tensors beside a JSON document (shard.py)

_ARRAY_AS_TENSOR = 16 << 10  # bytes, from where on an array is cheaper as a tensor than as text
_DEEPEST = 100  # containers within each other; json recurses, too
_INT64 = 1 << 63

# Where a value is: where its container is, its key or index in it, whether that is an index.
_Where = tuple[Any, Any, bool] | None


def pack(value: Any) -> tuple[Any, list[torch.Tensor], list[str]]:
    """Separates a value into a document for JSON and the tensors in it. Copies no tensor.

    Takes what :func:`to_plain` takes, and is quick: it runs in the training thread.

    Args:
        value: Nested dicts, lists, tuples and sets of anything. Parameters count as tensors.

    Returns:
        * The skeleton: serialisable by ``json``, and sharing nothing that may change with ``value``. Each tensor in it
          is replaced by ``{"__resilience_type__": "tensor", "index": i}``.
        * The tensors. Those of the same memory, shape, strides and type are in it once, so that what is tied stays
          tied. Large NumPy arrays are among them, as bytes; they are not copied either, and change with the array.
        * The path and type of everything that had to be left out, as in :func:`to_plain`, and of what contains itself
          and of keys that are not plain.
    """
    packing = _Packing()
    # So many small objects would have the collector look at everything there is now and then: 0.1 s in the training.
    collecting = gc.isenabled()
    gc.disable()
    try:
        skeleton = packing.pack(value, None)
    finally:
        if collecting:
            gc.enable()
    return (None if skeleton is _LEFT_OUT else skeleton), packing.tensors, packing.left_out


class _Packing:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.left_out: list[str] = []
        self._known: dict[Any, list[int]] = {}  # indices of the tensors that begin at one place in memory
        self._open: set[int] = set()  # ids of the containers around the value at hand
        self._containers: dict[type, Callable[[Any, _Where], Any]] = {
            **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), self._dict),
            **dict.fromkeys((list, tuple, set), self._sequence),
        }

    def pack(self, value: Any, where: _Where) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind in _PACKED:
            return _PACKED[kind](value)
        if kind in self._containers:
            return self._containers[kind](value, where)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return self._array(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {_TAG: "scalar", "dtype": value.dtype.str, "data": _text_of_bytes(value.tobytes())}
        if isinstance(value, PurePath):
            return {_TAG: "path", "data": _pack_str(str(value))}
        return self._leave_out(f"{kind.__module__}.{kind.__qualname__}", where)

    def _leave_out(self, what: str, where: _Where) -> Any:
        pieces: list[str] = []
        while where is not None:
            where, key, is_index = where
            pieces.append(f"[{key}]" if is_index else str(key) if where is None else f".{key}")
        self.left_out.append(f"{''.join(reversed(pieces)) or 'value'} ({what})")
        return _LEFT_OUT

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        try:
            # What has no address (meta, or empty) is told apart by its storage.
            place: Any = value.data_ptr() or (value.untyped_storage()._cdata,)
        except RuntimeError:  # sparse and the like; whether they can be kept is not decided here
            place = (id(value),)
        indices = self._known.setdefault(place, [])
        for index in indices:
            if _is_same(self.tensors[index], value):
                return {_TAG: "tensor", "index": index}
        indices.append(len(self.tensors))
        self.tensors.append(value)
        return {_TAG: "tensor", "index": indices[-1]}

    def _array(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        data: Any
        if value.nbytes < _ARRAY_AS_TENSOR:
            data = _text_of_bytes(value.tobytes())
        else:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            data = self._tensor(torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
        return {_TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}

    def _sequence(self, value: Any, where: _Where) -> Any:
        kind = type(value)
        if set(map(type, value)) == {int} and min(value) >= -_INT64 and max(value) < _INT64:
            items = list(value)  # Python's random state has 625
        elif not self._enter(value):
            return self._leave_out("contains itself, or is too deep", where)
        else:
            items = [self.pack(item, (where, index, True)) for index, item in enumerate(value)]
            items = [None if item is _LEFT_OUT else item for item in items]
            self._open.remove(id(value))
        return items if kind is list else {_TAG: kind.__name__, "items": items}

    def _dict(self, value: Any, where: _Where) -> Any:
        kind = type(value)
        if not self._enter(value):
            return self._leave_out("contains itself, or is too deep", where)
        items = [(key, self.pack(item, (where, key, False))) for key, item in value.items()]
        self._open.remove(id(value))
        has_names = kind in (dict, defaultdict) and set(map(type, value)) <= {str} and _TAG not in value
        if has_names and "".join(value).isascii():
            return {key: item for key, item in items if item is not _LEFT_OUT}
        kept = []
        for key, item in items:
            if item is _LEFT_OUT:
                continue
            packed_key = self.pack(key, (where, key, False)) if _is_plain_key(key) else _LEFT_OUT
            if packed_key is _LEFT_OUT:
                self._leave_out(f"key of type {type(key).__module__}.{type(key).__qualname__}", (where, key, False))
            else:
                kept.append([packed_key, item])
        return {_TAG: "dict" if kind is defaultdict else kind.__name__, "items": kept}

    def _enter(self, container: Any) -> bool:
        if id(container) in self._open or len(self._open) == _DEEPEST:
            return False
        self._open.add(id(container))
        return True


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same place are the same numbers in the same form."""
    if first is second:
        return True
    try:
        return (
            (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)
            and first.stride() == second.stride()
            and (first.is_conj(), first.is_neg()) == (second.is_conj(), second.is_neg())
        )
    except RuntimeError:
        return False


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain_key, key))
    return (
        type(key) in _PACKED or isinstance(key, PurePath) or (isinstance(key, np.generic) and key.dtype.kind in "biufc")
    )


def _text_of_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _pack_int(value: int) -> Any:
    # Python refuses to read or write very long decimal numbers.
    return value if -_INT64 <= value < _INT64 else {_TAG: "int", "data": hex(value)}


def _pack_float(value: float) -> Any:
    return value if math.isfinite(value) else {_TAG: "float", "data": value.hex()}  # JSON knows finite numbers only


def _pack_str(value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON makes one character of two surrogates that follow each other
        return {_TAG: "str", "data": _text_of_bytes(value.encode("utf-8", "surrogatepass"))}
    return value


_PACKED: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _pack_int,
    float: _pack_float,
    str: _pack_str,
    bytes: lambda value: {_TAG: "bytes", "data": _text_of_bytes(value)},
    complex: lambda value: {_TAG: "complex", "data": [value.real.hex(), value.imag.hex()]},
    torch.Size: lambda value: {_TAG: "size", "data": list(value)},
    torch.dtype: lambda value: {_TAG: "dtype", "data": str(value).removeprefix("torch.")},
    torch.device: lambda value: {_TAG: "device", "data": str(value)},
    datetime.timedelta: lambda value: {_TAG: "timedelta", "data": [value.days, value.seconds, value.microseconds]},
    datetime.datetime: lambda value: {_TAG: "datetime", "data": value.isoformat()},
}


def unpack(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Puts together what :func:`pack` has separated.

    Args:
        skeleton: As returned by :func:`pack`, or read back from JSON.
        tensors: As returned by :func:`pack`, or what was saved of them, in the same order. They become part of the
            value, not copies of them.

    Raises:
        ValueError: If the skeleton is none, or does not belong to these tensors.
    """
    try:
        return _unpack(skeleton, tensors)
    except (
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RuntimeError,
    ) as error:  # RecursionError, too
        raise ValueError(f"the skeleton is malformed ({type(error).__name__}: {error})") from error


def _unpack(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is list:
        return [_unpack(item, tensors) for item in value]
    if kind is not dict:
        return value
    if _TAG not in value:
        return {key: _unpack(item, tensors) for key, item in value.items()}
    tag = value[_TAG]
    if tag == "tensor":
        index = value["index"]
        if type(index) is not int or not 0 <= index < len(tensors):
            raise ValueError(f"the skeleton names tensor {index!r} of {len(tensors)}")
        return tensors[index]
    if tag in _DICTS:
        return _DICTS[tag]({_unpack(key, tensors): _unpack(item, tensors) for key, item in value["items"]})
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_unpack(item, tensors) for item in value["items"])
    if tag == "ndarray":
        data = value["data"]
        content = base64.b64decode(data) if type(data) is str else _unpack(data, tensors).numpy()
        # A copy: it can be written to, and does not keep a whole file in memory.
        return np.frombuffer(content, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if tag == "path":
        return Path(_unpack(value["data"], tensors))
    if tag not in _UNPACKED:
        raise ValueError(f"the skeleton has a value of the unknown type {tag!r}")
    return _UNPACKED[tag](value)


def _unpack_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no type {name!r}")
    return dtype


def _unpack_complex(real: str, imaginary: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imaginary))


_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set}
_UNPACKED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda value: int(value["data"], 16),
    "float": lambda value: float.fromhex(value["data"]),
    "str": lambda value: base64.b64decode(value["data"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda value: base64.b64decode(value["data"]),
    "complex": lambda value: _unpack_complex(*value["data"]),
    "scalar": lambda value: np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))[0],
    "size": lambda value: torch.Size(value["data"]),
    "dtype": lambda value: _unpack_dtype(value["data"]),
    "device": lambda value: torch.device(value["data"]),
    "timedelta": lambda value: datetime.timedelta(*value["data"]),
    "datetime": lambda value: datetime.datetime.fromisoformat(value["data"]),
}


def tensor_names(skeleton: Any) -> dict[int, str]:
    """Where in the value each tensor is, such as ``state_dict.weight``: the first place, if there are several.

    Args:
        skeleton: As for :func:`unpack`.

    Raises:
        ValueError: If the skeleton is none.
    """
    names: dict[int, str] = {}
    try:
        _name_tensors(skeleton, "", names)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the skeleton is malformed ({type(error).__name__}: {error})") from error
    return names


def _name_tensors(value: Any, path: str, names: dict[int, str]) -> None:
    items: Any = ()
    indexed = type(value) is list
    if indexed:
        items = enumerate(value)
    elif type(value) is dict:
        tag = value.get(_TAG)
        if tag == "tensor":
            names.setdefault(value["index"], path or "value")
        elif tag == "ndarray":
            _name_tensors(value["data"], path, names)
        elif tag in _SEQUENCES:
            _name_tensors(value["items"], path, names)
        elif tag in _DICTS:
            items = ((_unpack(key, ()), item) for key, item in value["items"])
        elif tag is None:
            items = value.items()
    for key, item in items:
        _name_tensors(item, f"{path}[{key}]" if indexed else f"{path}.{key}" if path else str(key), names)
