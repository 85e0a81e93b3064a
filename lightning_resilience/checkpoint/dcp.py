"""Reads directories of PyTorch's distributed checkpoint (DCP) without executing anything in them.

DCP pickles the description of a directory (``.metadata``) and every value that is not a tensor, and unpickles both. So
anyone who can write into the directory could execute code on every rank that resumes. Here an unpickler reads the
description: it accepts only the names of DCP's own classes and returns inert stand-ins for them, so the file can reach
no object of this process. The real objects are made from the stand-ins afterwards. Values are read with
``weights_only``. To read the description takes memory of a multiple of its size, regardless of its content.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pathlib
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan

from lightning_resilience.checkpoint.checkpoint_file import UnsafeContent, corrupt, safe_load

METADATA = ".metadata"
"""The file in which DCP describes a directory."""

REST = "meta.pt"
"""The file in which Lightning keeps all state that belongs neither to the module nor to an optimizer."""


# The description


class _Inert:
    """Stands for an object of one class while a pickle is read: only keeps what the object will be made from."""

    name: tuple[str, str]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Inert:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _classes(module: Any) -> dict[tuple[str, str], type]:
    """The data classes and enumerations that ``module`` defines in the installed version of torch, by full name."""
    return {
        (module.__name__, name): each
        for name, each in vars(module).items()
        if isinstance(each, type)
        and each.__module__ == module.__name__
        and (dataclasses.is_dataclass(each) or issubclass(each, enum.Enum))
    }


_RECORDS = {**_classes(metadata), **_classes(filesystem)}

_PATHS = ("PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath")
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: _constant(name.removeprefix("torch."), torch.layout),
    **{(module, name): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


def _constant(name: str, kind: type) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise UnsafeContent(f"torch.{name} is not a {kind.__name__}")
    return found


_REFUSED = {"EXT1", "EXT2", "EXT4", "BINPERSID", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
_REFUSED |= {each.name for each in pickletools.opcodes if each.arg and each.arg.n == pickletools.UP_TO_NEWLINE}
_REFUSED -= {"GLOBAL"}  # protocols 2 and 3 use it
_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE")


def _check_opcodes(data: bytes) -> None:
    """Refuses a pickle that takes far more memory than its length, such as one that uses only the last slot of a memo.

    Also refuses what current picklers never write: numbers and names as lines of text, classes by number, buffers.
    """
    puts = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _REFUSED:
            raise UnsafeContent(f"the opcode {opcode.name} is not allowed in it")
        if opcode.name in _PUTS:
            if opcode.name == "LONG_BINPUT" and (argument or 0) > puts:
                raise UnsafeContent("it asks for more memory than it can need")
            puts += 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return _constant(name, torch.dtype)
        if (key := (module, name)) not in _RECORDS and key not in _CALLS:
            raise UnsafeContent(f"{module}.{name} is not allowed in it")
        # New classes for each file: a pickle can change attributes of a class, but only of these.
        return self._stand_ins.setdefault(key, type(name, (_Inert,), {"name": key}))

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeContent("a reference to another file is not allowed in it")


def read_metadata(data: bytes) -> Metadata:
    """Reads the content of a ``.metadata`` file. Nothing in it is executed.

    Raises:
        UnsafeContent: If it holds anything other than what DCP writes.
    """
    try:
        _check_opcodes(data)
        found = _Made().of(_Unpickler(data).load())
    except UnsafeContent:
        raise
    except Exception as error:  # a damaged or malicious pickle can raise anything
        raise UnsafeContent(f"it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UnsafeContent("it does not describe a checkpoint")
    return found


class _Made:
    """Makes real objects from inert ones and from their content: each only once, however often it is referenced."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # by id; the original is kept, so its id is not reused

    def of(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (str, int, float, bool, bytes, torch.dtype):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        made = self._make(value, kind)
        self._made[id(value)] = value, made
        return made

    def _make(self, value: Any, kind: type) -> Any:
        if isinstance(value, _Inert):
            if (call := _CALLS.get(value.name)) is not None:
                return call(*self.of(list(value.arguments)))
            return self._make_record(_RECORDS[value.name], value)
        if kind in (list, tuple):
            return kind(self.of(each) for each in value)
        if kind is dict:
            return {self.of(key): self.of(each) for key, each in value.items()}
        raise UnsafeContent(f"a {kind.__name__} is not allowed in it")

    def _make_record(self, cls: type, value: _Inert) -> Any:
        if issubclass(cls, enum.Enum):
            return cls(*self.of(list(value.arguments)))
        record, state = object.__new__(cls), self.of(value.state)
        if isinstance(state, tuple) and hasattr(cls, "__setstate__"):
            record.__setstate__(state)  # type: ignore[attr-defined]
        else:
            fields = dataclasses.fields(cls)  # type: ignore[arg-type]
            new = {each.name: each.default_factory() for each in fields if callable(each.default_factory)}
            for name, each in {**new, **(state or {})}.items():
                if name not in {field.name for field in fields}:
                    raise UnsafeContent(f"a {cls.__name__} has no {name!r}")
                object.__setattr__(record, name, each)
        return record


# The directory that it describes


def is_share(name: str, rank: int, world_size: int) -> bool:
    """Whether ``rank`` verifies the file ``name`` of a directory: one that every rank reads, or a shard of its own.

    If another number of ranks has written the directory, each shard is still exactly one rank's share.
    """
    shard = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return shard is None or int(shard[1]) % world_size == rank


def check(directory: Path, mine: Callable[[str], bool]) -> None:
    """Checks that loading a directory of DCP executes nothing in it; other directories pass.

    Args:
        directory: The directory; its files must be verified as unchanged since it was sealed.
        mine: Whether to check the values in the file of the given name. ``.metadata`` and ``meta.pt``, which every rank
            reads, are always checked.

    Raises:
        CorruptCheckpoint: If loading is refused. The message names the file and the reason.
    """
    if not (directory / METADATA).is_file():
        return
    name = METADATA
    try:
        described = read_metadata((directory / METADATA).read_bytes())
        name = REST
        if (directory / REST).is_file():
            with open(directory / REST, "rb") as file:
                safe_load(file)
        sizes: dict[str, int] = {}  # of each file, minus the bytes already read from it
        for index, stored in described.storage_data.items():
            name = stored.relative_path
            if name not in sizes:
                if Path(name).name != name or not (directory / name).is_file():
                    raise UnsafeContent("it is not in the directory")
                sizes[name] = (directory / name).stat().st_size
            if stored.offset < 0 or stored.length < 0 or getattr(stored, "transform_descriptors", None):
                raise UnsafeContent("this package writes no such entry")
            if not mine(name) or not isinstance(described.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                continue
            sizes[name] -= stored.length
            if sizes[name] < 0:
                raise UnsafeContent("it is shorter than its metadata says")
            with open(directory / name, "rb") as file:
                file.seek(stored.offset)
                safe_load(io.BytesIO(file.read(stored.length)))
    except OSError as error:
        raise corrupt(directory, f"{name} cannot be read ({error})") from error
    except Exception as error:  # a refused pickle, or content that torch.load does not know
        raise corrupt(directory, f"{name} is refused: {error}") from error


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """While this is active, loading a directory with DCP, as Lightning's strategies do, executes nothing in it.

    Values that only a pickle could have kept were not saved. They keep their present value, since a strict load would
    otherwise fail at every resume. A missing tensor is still an error.
    """
    torch_read, torch_load = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    torch_plan = DefaultLoadPlanner.create_local_plan

    def read(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        found = read_metadata(Path(self.checkpoint_id, METADATA).read_bytes())
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def load(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        # The safely loaded value is written anew, so torch reads that, even if its own loader would read more.
        safe = io.BytesIO()
        torch.save(safe_load(value), safe)
        safe.seek(0)
        torch_load(self, read_item, safe)

    def plan(self: DefaultLoadPlanner) -> LoadPlan:
        saved = self.metadata.state_dict_metadata if self.metadata is not None else {}
        here = self.state_dict.items()
        self.state_dict = {name: each for name, each in here if name in saved or isinstance(each, torch.Tensor)}
        return torch_plan(self)

    FileSystemReader.read_metadata = read  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = load  # type: ignore[method-assign]
    DefaultLoadPlanner.create_local_plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_metadata = torch_read  # type: ignore[method-assign]
        DefaultLoadPlanner.load_bytes = torch_load  # type: ignore[method-assign]
        DefaultLoadPlanner.create_local_plan = torch_plan  # type: ignore[method-assign]
