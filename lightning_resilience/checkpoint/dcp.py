"""Directories of PyTorch's distributed checkpoint (DCP), read without executing anything in them.

DCP pickles the description of a directory (``.metadata``) and every value that is no tensor, and unpickles both: anyone
who can write into the directory could execute code on every rank that resumes. Here the description is read by an
unpickler that knows the names of DCP's own classes, and gives inert stand-ins for them: nothing of this process can be
reached from the file. What it describes is made of them afterwards. Values are read as ``weights_only`` reads them.
What the description costs in memory is a multiple of its size, whatever it holds.
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
"""The file in which Lightning keeps what is neither of the module nor of an optimizer."""


# The description


class _Inert:
    """Stands for an object of one class while a pickle is read: keeps what it is to be made of, and does nothing."""

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
    """The data classes and enumerations that are defined in ``module``: whatever this version of torch has of them."""
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
_REFUSED -= {"GLOBAL"}  # of protocol 2 and 3
_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE")


def _check_opcodes(data: bytes) -> None:
    """Refuses a pickle that takes more memory than it is long, such as one that asks for the last place of a huge memo.

    Also what a pickler of today never writes: numbers and names as lines of text, classes by number, buffers.
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
        # New ones for each file: what a pickle can change of a class, it changes of these.
        return self._stand_ins.setdefault(key, type(name, (_Inert,), {"name": key}))

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeContent("a reference to another file is not allowed in it")


def read_metadata(data: bytes) -> Metadata:
    """What the content of a ``.metadata`` describes. Nothing in it is executed.

    Raises:
        UnsafeContent: If there is anything else in it than what DCP writes.
    """
    try:
        _check_opcodes(data)
        found = _Made().of(_Unpickler(data).load())
    except UnsafeContent:
        raise
    except Exception as error:  # whatever a damaged pickle, or one made on purpose, leads to
        raise UnsafeContent(f"it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise UnsafeContent("it does not describe a checkpoint")
    return found


class _Made:
    """The objects that inert ones stand for, and all that is in them: each once, however often it is referred to."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with what has it: nothing else gets it meanwhile

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


# What it describes


def is_share(name: str, rank: int, world_size: int) -> bool:
    """Whether a file of a directory is for ``rank`` to verify: what every rank reads, and shards that it has written.

    Of a directory that another number of ranks has written each file is some rank's share.
    """
    shard = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return shard is None or int(shard[1]) % world_size == rank


def check(directory: Path, mine: Callable[[str], bool]) -> None:
    """Checks that loading a directory of DCP executes nothing in it; other directories pass.

    Args:
        directory: Its files are what they were when it was sealed.
        mine: Says by a file's name whether to look into it; into those that every rank reads it is looked anyway.

    Raises:
        CorruptCheckpoint: Says what is wrong with which file.
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
        sizes: dict[str, int] = {}  # of the files, less what has been read of them
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
    except Exception as error:  # a pickle that is refused, or nothing that torch.load knows
        raise corrupt(directory, f"{name} is refused: {error}") from error


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """While this is active, loading a directory with DCP, as Lightning's strategies do, executes nothing in it.

    What only a pickle could have kept is not in it: it stays what it is now, unless it is a tensor. A strict load would
    fail, at every resume.
    """
    torch_read, torch_load = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    torch_plan = DefaultLoadPlanner.create_local_plan

    def read(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        found = read_metadata(Path(self.checkpoint_id, METADATA).read_bytes())
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def load(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        # Written anew: torch's own reading of it finds what the safe one has made, however the two may differ.
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
