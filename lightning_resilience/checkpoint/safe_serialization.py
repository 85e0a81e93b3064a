"""The codec of training state: writes only types that a safe load reads, so that no resume ever unpickles.

Common values in users' state besides tensors (NumPy arrays and numbers, paths, times, ...) are written in a tagged form
and rebuilt on load. Any other object could only be pickled: the value that contains it is left out as a whole and
reported by name.

The state is written in one of two forms. The *structure* is a JSON document next to a list of tensors; the shards of
local checkpoints hold it. The *safe form* has the same content, tensors included, in types that
``torch.load(weights_only=True)`` knows; the files in the run directory hold it. :func:`pack` makes the structure, and
the safe form is made from it, so :func:`pack` alone decides what is kept.
"""

from __future__ import annotations

import base64
import datetime
import gc
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from lightning_resilience.checkpoint.tensor_bytes import DTYPES

_TAG = "__resilience_type__"
_LEFT_OUT = object()

_ARRAY_AS_TENSOR = 16 << 10  # bytes; from this size on an array is cheaper as a tensor than as text
_DEEPEST = 100  # nested containers; json recurses, too
_INT64 = 1 << 63
_ARRAY_KINDS = "biufcSUmM"  # kinds of NumPy types whose bytes are the whole value

# The place of a value: the place of its container, its key or index there, and whether that is an index.
_Where = tuple[Any, Any, bool] | None


class Entries:
    """Marks a dict whose entries are kept or left out one by one; any other value is kept or left out as a whole.

    A partial value would make the ``load_state_dict`` that receives it fail at every resume.

    Args:
        of: The dict. Whatever its class, it comes back as a ``dict`` or an ``OrderedDict``.
    """

    __slots__ = ("of",)

    def __init__(self, of: Mapping[Any, Any]) -> None:
        self.of = of


class _Missing:
    """See :data:`MISSING`."""


MISSING = _Missing()
"""Placeholder: :func:`pack` replaces it by the paths of all values left out, each path a list of keys and indices."""


# Into the structure


def pack(value: Any) -> tuple[Any, list[torch.Tensor], list[str]]:
    """Separates a value into a JSON document and the tensors in it. Copies no tensor.

    It is fast, since it runs in the training thread.

    Args:
        value: Nested dicts, lists, tuples and sets of anything. It is kept or left out as a whole, except for
            :class:`Entries`.

    Returns:
        * The structure: serializable by ``json``, and without mutable parts of ``value``. Each tensor is replaced by
          ``{"__resilience_type__": "tensor", "index": i}``. ``None`` if the whole value is left out.
        * The tensors. Tensors with the same memory, shape, strides and type appear once, so tied tensors stay tied.
          Large NumPy arrays are among them, as bytes; they are not copied either, and change with the array.
        * The path and type of each object that causes an omission, because it can only be pickled or contains itself,
          for example ``callbacks.MyCallback.encoder (LabelEncoder)``.
    """
    packing = _Packing()
    # The many small objects would trigger garbage collections of the whole heap: 0.1 s in the training thread.
    collecting = gc.isenabled()
    gc.disable()
    try:
        structure = packing.pack(value, None)
    finally:
        if collecting:
            gc.enable()
    if structure is _LEFT_OUT:
        return None, [], packing.left_out
    return structure, packing.tensors, packing.left_out


class _Packing:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.left_out: list[str] = []
        self._missing: list[list[Any]] = []
        self._has_entries = False
        self._outermost: _Where = None  # place of the outermost entries: names and paths begin there
        self._known: dict[Any, list[int]] = {}  # by start address, the indices of the tensors
        self._open: set[int] = set()  # ids of the containers around the current value
        self._containers: dict[type, Callable[[Any, _Where], Any]] = {
            **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), self._dict),
            **dict.fromkeys((list, tuple, set, frozenset, deque), self._sequence),
            Entries: self._entries,
            _Missing: lambda value, where: self._missing,
        }

    def pack(self, value: Any, where: _Where) -> Any:
        kind = type(value)
        if kind in _PACKED:
            return _PACKED[kind](value)
        if kind in self._containers:
            return self._containers[kind](value, where)
        if kind is torch.nn.Parameter:
            return {_TAG: "parameter", "data": self._tensor(value.detach()), "requires_grad": value.requires_grad}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return self._array(value)
        if _is_plain_scalar(value):
            return {_TAG: "scalar", "dtype": value.dtype.str, "data": _text_of_bytes(value.tobytes())}
        if kind is datetime.datetime and _has_plain_zone(value):
            return {_TAG: "datetime", "data": value.isoformat()}
        if isinstance(value, torch.Tensor) and is_known_to_torch(kind):
            return self._tensor(value)
        return self._leave_out(f"{kind.__module__}.{kind.__qualname__}", where)

    def _leave_out(self, what: str, where: _Where) -> Any:
        pieces = []
        while where is not self._outermost:
            assert where is not None
            where, key, is_index = where
            pieces.append(f"[{key}]" if is_index else f".{key}")
        self.left_out.append(f"{''.join(reversed(pieces)).removeprefix('.') or 'value'} ({what})")
        return _LEFT_OUT

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        is_plain = type(value) is torch.Tensor
        needs_grad = is_plain and value.requires_grad and value.is_leaf
        if is_plain and value.requires_grad:
            value = value.detach()
        try:
            # Tensors without an address (meta or empty) are distinguished by their storage.
            place: Any = (value.data_ptr() or (value.untyped_storage()._cdata,)) if is_plain else (id(value),)
        except RuntimeError:  # sparse tensors and the like; whether they can be kept is decided elsewhere
            place = (id(value),)
        indices = self._known.setdefault(place, [])
        for index in indices:
            if _is_same(self.tensors[index], value):
                break
        else:
            index = len(self.tensors)
            indices.append(index)
            self.tensors.append(value)
        if needs_grad:
            return {_TAG: "tensor", "index": index, "requires_grad": True}
        return {_TAG: "tensor", "index": index}

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
        else:
            if not self._enter(value):
                return self._leave_out("contains itself, or is too deep", where)
            items = [self.pack(item, (where, index, True)) for index, item in enumerate(value)]
            self._open.remove(id(value))
            if _LEFT_OUT in items:
                return _LEFT_OUT
        if kind is list:
            return items
        if kind is deque:
            return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
        return {_TAG: kind.__name__, "items": items}

    def _dict(self, value: Any, where: _Where) -> Any:
        kind = type(value)
        about: dict[str, Any] = {_TAG: kind.__name__}
        if kind is defaultdict:
            made_by = value.default_factory
            factory = _FACTORY_NAMES.get(made_by) if made_by is None or type(made_by) is type else None
            if factory is None:
                return self._leave_out(f"default_factory of type {type(made_by).__qualname__}", where)
            about["factory"] = factory
        if not self._enter(value):
            return self._leave_out("contains itself, or is too deep", where)
        items = {key: self.pack(item, (where, key, False)) for key, item in value.items()}
        attributes: Any = {}
        if kind is OrderedDict and value.__dict__:  # a module's state dict keeps the versions of its layers there
            attributes = self.pack(value.__dict__, where)
        self._open.remove(id(value))
        if attributes is _LEFT_OUT or _LEFT_OUT in items.values():
            return _LEFT_OUT
        return self._pack_items(about, items, attributes, where)

    def _entries(self, value: Entries, where: _Where) -> Any:
        kind = OrderedDict if isinstance(value.of, OrderedDict) else dict
        is_outermost = not self._has_entries
        if is_outermost:
            self._has_entries, self._outermost = True, where
        if not self._enter(value.of):
            return self._leave_out("contains itself, or is too deep", where)
        items = {}
        for key, item in value.of.items():
            packed = self._entry(item, (where, key, False))
            if packed is not _LEFT_OUT and self._pack_key(key, where) is not _LEFT_OUT:
                items[key] = packed
        attributes: Any = {}
        if kind is OrderedDict and value.of.__dict__:
            packed = {name: self._entry(item, (where, name, False)) for name, item in value.of.__dict__.items()}
            attributes = {name: item for name, item in packed.items() if item is not _LEFT_OUT}
        self._open.remove(id(value.of))
        made = self._pack_items({_TAG: kind.__name__}, items, attributes, where)
        if is_outermost:
            self._has_entries, self._outermost = False, None
        return made

    def _entry(self, value: Any, where: _Where) -> Any:
        """Packs a value; if it is left out, drops its tensors and notes its path."""
        before = len(self.tensors)
        packed = self.pack(value, where)
        if packed is _LEFT_OUT:
            del self.tensors[before:]
            for indices in self._known.values():
                while indices and indices[-1] >= before:
                    indices.pop()
            path: list[Any] = []
            while where is not self._outermost:
                assert where is not None
                where, key, _ = where
                path.insert(0, key)
            if all(type(key) in (str, int) for key in path):
                self._missing.append([_pack_str(key) if type(key) is str else key for key in path])
        return packed

    def _pack_items(
        self, about: dict[str, Any], items: dict[Any, Any], attributes: dict[str, Any], where: _Where
    ) -> Any:
        if about[_TAG] == "dict" and _are_names(items):
            return items
        pairs = []
        for key, item in items.items():
            if (packed_key := self._pack_key(key, where)) is _LEFT_OUT:
                return _LEFT_OUT
            pairs.append([packed_key, item])
        about["items"] = pairs
        if attributes:
            about["attributes"] = attributes
        return about

    def _pack_key(self, key: Any, where: _Where) -> Any:
        if _is_plain_key(key):
            return self.pack(key, (where, key, False))
        return self._leave_out(f"key of type {type(key).__module__}.{type(key).__qualname__}", (where, key, False))

    def _enter(self, container: Any) -> bool:
        if id(container) in self._open or len(self._open) == _DEEPEST:
            return False
        self._open.add(id(container))
        return True


def _are_names(keys: Mapping[Any, Any]) -> bool:
    """Whether these keys can be the names of a JSON object and do not clash with the tag."""
    return set(map(type, keys)) <= {str} and _TAG not in keys and "".join(keys).isascii()


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are the same numbers in the same form."""
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


def is_known_to_torch(kind: type[torch.Tensor]) -> bool:
    """Whether torch loads tensors of this class: its own classes, and classes that are declared safe.

    Safe are those given to ``torch.serialization.add_safe_globals``, and the sharded tensors of strategies (DTensor,
    ShardedTensor), which PyTorch's distributed checkpoint takes apart.
    """
    return (
        kind in (torch.Tensor, torch.nn.Parameter)
        or kind in torch.serialization.get_safe_globals()
        or kind.__module__.startswith("torch.distributed.")
    )


def content(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass as a plain tensor on the same memory, if the subclass keeps its content in that memory.

    Otherwise, and for classes that torch knows, the tensor itself. For content to be loaded into a live tensor, which
    keeps its class.
    """
    kind: Any = type(tensor)
    if is_known_to_torch(kind) or is_lazy(tensor):
        return tensor
    keeps_itself = getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    return tensor.detach().as_subclass(torch.Tensor) if keeps_itself else tensor


def _is_plain_key(key: Any) -> bool:
    kind = type(key)
    if kind in (tuple, frozenset):
        return all(map(_is_plain_key, key))
    if kind is datetime.datetime:
        return _has_plain_zone(key)
    return kind in _PACKED or _is_plain_scalar(key)


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) and type(value) is value.dtype.type and value.dtype.kind in _ARRAY_KINDS


def _has_plain_zone(value: datetime.datetime) -> bool:
    return value.tzinfo is None or type(value.tzinfo) is datetime.timezone


def _text_of_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _pack_int(value: int) -> Any:
    # Python refuses to read or write very long decimal numbers.
    return value if -_INT64 <= value < _INT64 else {_TAG: "int", "data": hex(value)}


def _pack_float(value: float) -> Any:
    return value if math.isfinite(value) else {_TAG: "float", "data": value.hex()}  # JSON knows finite numbers only


def _pack_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON would merge two adjacent surrogates into one character
        return {_TAG: "str", "data": _text_of_bytes(value.encode("utf-8", "surrogatepass"))}
    return value


def _pack_path(value: PurePath) -> Any:
    return {_TAG: "path", "data": _pack_str(str(value))}


_PACKED: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _pack_int,
    float: _pack_float,
    str: _pack_str,
    bytes: lambda value: {_TAG: "bytes", "data": _text_of_bytes(value)},
    bytearray: lambda value: {_TAG: "bytearray", "data": _text_of_bytes(value)},
    complex: lambda value: {_TAG: "complex", "data": [value.real.hex(), value.imag.hex()]},
    torch.Size: lambda value: {_TAG: "size", "data": list(value)},
    torch.dtype: lambda value: {_TAG: "dtype", "data": str(value).removeprefix("torch.")},
    torch.device: lambda value: {_TAG: "device", "data": str(value)},
    datetime.timedelta: lambda value: {_TAG: "timedelta", "data": [value.days, value.seconds, value.microseconds]},
    datetime.date: lambda value: {_TAG: "date", "data": value.isoformat()},
    type(Path()): _pack_path,
    PurePosixPath: lambda value: {**_pack_path(value), "pure": "posix"},
    PureWindowsPath: lambda value: {**_pack_path(value), "pure": "windows"},
}

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (int, float, bool, str, bytes, list, tuple, dict, set)},
    **{kind.__name__: kind for kind in (OrderedDict, Counter, deque)},
}
_FACTORY_NAMES: dict[Any, str] = {factory: name for name, factory in _FACTORIES.items()}


# Out of the structure


def unpack(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuilds the value that :func:`pack` has separated.

    Args:
        structure: As returned by :func:`pack`, or read back from JSON.
        tensors: As returned by :func:`pack`, or loaded from a file, in the same order. The value contains these
            tensors, not copies.

    Raises:
        ValueError: If the structure is malformed, or does not belong to these tensors.
    """
    try:
        return _unpack(structure, tensors)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise _malformed(error) from error  # a RecursionError is a RuntimeError


def _malformed(error: Exception) -> ValueError:
    return ValueError(f"the structure is malformed ({type(error).__name__}: {error})")


def from_safe(value: Any) -> Any:
    """Rebuilds the value that :func:`to_safe` of this or an earlier version has rewritten.

    Raises:
        ValueError: If ``value`` is malformed.
    """
    return unpack(value, ())


def _unpack(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is list:
        return [_unpack(item, tensors) for item in value]
    if kind is not dict:
        return _unpack_container(value, tensors) if kind in _SAFE_CONTAINERS else value
    if _TAG not in value:
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value.items()}
    tag = value[_TAG]
    if tag == "tensor":
        return _tensor_of(value, tensors)
    if tag in _DICTS:
        items = [(_unpack(key, tensors), _unpack(item, tensors)) for key, item in value["items"]]
        return _made_dict(value, items, _unpack(value.get("attributes", {}), tensors))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_unpack(item, tensors) for item in value["items"])
    if tag == "deque":
        return deque((_unpack(item, tensors) for item in value["items"]), value["maxlen"])
    if tag == "parameter":
        return torch.nn.Parameter(_unpack(value["data"], tensors), value["requires_grad"])
    if tag == "ndarray":
        data = value["data"]
        content = _bytes_of(data) if type(data) in (str, bytes) else _unpack(data, tensors).numpy()
        # A copy can be written to, and does not keep a whole file in memory.
        return _made_array(content, value["dtype"], value["shape"])
    if tag == "path":
        return _PATHS[value.get("pure")](_unpack(value["data"], tensors))
    return _UNPACKED[tag](value)


def _unpack_container(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuilds a container that only the safe form holds as itself, without a tag."""
    if not isinstance(value, dict):
        return type(value)(_unpack(item, tensors) for item in value)
    made = type(value)({_unpack(key, tensors): _unpack(item, tensors) for key, item in value.items()})
    made.__dict__.update(_unpack(value.__dict__, tensors))
    return made


def _tensor_of(value: dict[str, Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    index = value["index"]
    if type(index) is not int or not 0 <= index < len(tensors):
        raise ValueError(f"the structure names tensor {index!r} of {len(tensors)}")
    return tensors[index].detach().requires_grad_() if value.get("requires_grad") else tensors[index]


def _made_dict(value: dict[str, Any], items: Any, attributes: dict[str, Any]) -> Any:
    tag = value[_TAG]
    if tag == "defaultdict":
        return defaultdict(_FACTORIES[value["factory"]], items)
    made = _DICTS[tag](dict(items))
    if attributes:
        made.__dict__.update(attributes)
    return made


def _made_array(content: Any, dtype: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.itemsize == 0:
        return np.zeros(shape, kind)
    array: np.ndarray[Any, Any] = np.frombuffer(content, dtype=kind).reshape(shape).copy()
    return array


def _bytes_of(data: str | bytes) -> bytes:
    return data if type(data) is bytes else base64.b64decode(data)  # files of earlier versions hold bytes


def _unpack_complex(real: str, imaginary: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imaginary))


_SAFE_CONTAINERS = (tuple, set, OrderedDict, Counter)
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_PATHS: dict[str | None, Callable[[str], PurePath]] = {
    None: Path,
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}
_UNPACKED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda value: int(value["data"], 16),
    "float": lambda value: float.fromhex(value["data"]),
    "str": lambda value: base64.b64decode(value["data"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda value: base64.b64decode(value["data"]),
    "bytearray": lambda value: bytearray(base64.b64decode(value["data"])),
    "complex": lambda value: _unpack_complex(*value["data"]),
    "scalar": lambda value: _made_array(_bytes_of(value["data"]), value["dtype"], [1])[0],
    "size": lambda value: torch.Size(value["data"]),
    "dtype": lambda value: DTYPES[value["data"]],
    "device": lambda value: torch.device(value["data"]),
    "timedelta": lambda value: datetime.timedelta(*value["data"]),
    "datetime": lambda value: datetime.datetime.fromisoformat(value["data"]),
    "date": lambda value: datetime.date.fromisoformat(value["data"]),
}


# The safe form

_KNOWN_TO_TORCH = ("int", "float", "str", "bytes", "bytearray", "complex", "size", "dtype", "device", "parameter")


def to_safe(value: Any) -> tuple[Any, list[str]]:
    """Rewrites ``value`` for a safe load.

    Args:
        value: As for :func:`pack`. Tensors are passed through, not copied.

    Returns:
        The rewritten value, and what had to be left out, as :func:`pack` reports it.
    """
    structure, tensors, left_out = pack(value)
    return safe_form(structure, tensors), left_out


def safe_form(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Turns the result of :func:`pack` into the safe form: rebuilds the types that torch knows, keeps other tags.

    Args:
        structure: As returned by :func:`pack`.
        tensors: As for :func:`unpack`.
    """
    kind = type(structure)
    if kind is list:
        return [safe_form(item, tensors) for item in structure]
    if kind is not dict:
        return structure
    tag = structure.get(_TAG)
    if tag == "tensor":
        tensor = _tensor_of(structure, tensors)
        # Attributes of a plain tensor would be pickled with it; other classes need theirs.
        return tensor.detach() if type(tensor) is torch.Tensor and tensor.__dict__ else tensor
    if tag in _KNOWN_TO_TORCH and not _is_odd(structure):
        return _unpack(structure, tensors)
    if tag in _DICTS:
        pairs = [[safe_form(key, tensors), safe_form(item, tensors)] for key, item in structure["items"]]
        attributes = safe_form(structure.get("attributes", {}), tensors)
        if tag != "defaultdict" and all(_is_known_key(key) for key, _ in pairs):
            return _made_dict(structure, pairs, attributes)
        return {**structure, "items": pairs, "attributes": attributes}
    if tag in ("tuple", "set"):
        items = [safe_form(item, tensors) for item in structure["items"]]
        if tag == "tuple" or all(map(_is_known_key, items)):
            return _SEQUENCES[tag](items)
        return {_TAG: tag, "items": items}
    return {key: safe_form(item, tensors) for key, item in structure.items()}


def is_rewritten(value: Any) -> bool:
    """Whether ``value``, after :func:`to_safe`, holds tags that only :func:`from_safe` can rebuild."""
    return any(isinstance(item, dict) and _TAG in item for item in nested(to_safe(value)[0]))


def _is_odd(value: dict[str, Any]) -> bool:
    """Whether torch's safe load knows the type but not this value: an integer of about 2,000 bits, or empty bytes."""
    return (value[_TAG] == "int" and len(value["data"]) > 500) or (value[_TAG] == "bytes" and not value["data"])


def _is_known_key(key: Any) -> bool:
    """Whether the safe form of a key, or of an item of a set, can still be one: it must not have become a dict."""
    if type(key) is tuple:
        return all(map(_is_known_key, key))
    return type(key) is not dict and not (type(key) is str and key == _TAG)


# Other walks


def nested(value: Any) -> Iterator[Any]:
    """Yields ``value`` and everything nested in it: dicts, lists, tuples and sets, and their items."""
    yield value
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return
    for item in value:
        yield from nested(item)


def map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of ``value`` in which each item is replaced by what ``change`` returns for it.

    Args:
        value: Nested dicts, lists, tuples and sets of anything. Containers are copied.
        change: Returns the item itself to keep it. Called with a container before its items; if it replaces the
            container, the items are skipped.
    """
    if (changed := change(value)) is not value:
        return changed
    if isinstance(value, (defaultdict, OrderedDict)):
        copied = value.copy()
        copied.update({key: map_nested(item, change) for key, item in value.items()})
        return copied
    if type(value) is dict:
        return {key: map_nested(item, change) for key, item in value.items()}
    return type(value)(map_nested(item, change) for item in value) if type(value) in (list, tuple, set) else value


def to_host(value: Any) -> Any:
    """``value`` with every tensor moved to host memory, so that it can be sent to another process.

    A tensor is unpickled on the device from which it was pickled. In another process that would cost half a gigabyte of
    the device's memory, or fail where the device does not exist.

    Args:
        value: As for :func:`map_nested`.
    """

    def moved(item: Any) -> Any:
        return item.detach().cpu() if isinstance(item, torch.Tensor) and not item.is_meta else item

    return map_nested(value, moved)


def device_of(value: Any) -> torch.device | None:
    """A device, other than the host, of a tensor nested in ``value``; ``None`` if all tensors are on the host."""
    tensors = (item for item in nested(value) if isinstance(item, torch.Tensor))
    return next((tensor.device for tensor in tensors if not tensor.is_meta and not tensor.is_cpu), None)


def tensor_names(structure: Any) -> dict[int, str]:
    """The path of each tensor in the value, such as ``state_dict.weight``: the first path, if there are several.

    Args:
        structure: As for :func:`unpack`.

    Raises:
        ValueError: If the structure is malformed.
    """
    names: dict[int, str] = {}
    try:
        _name_tensors(structure, "", names)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _malformed(error) from error
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
        elif tag in ("ndarray", "parameter"):
            _name_tensors(value["data"], path, names)
        elif tag in _SEQUENCES or tag == "deque":
            _name_tensors(value["items"], path, names)
        elif tag in _DICTS:
            items = ((_unpack(key, ()), item) for key, item in value["items"])
        elif tag is None:
            items = value.items()
    for key, item in items:
        _name_tensors(item, f"{path}[{key}]" if indexed else f"{path}.{key}" if path else str(key), names)
