"""Nothing that lies in a directory which a run resumes from is executed."""

from __future__ import annotations

import builtins
import collections
import copyreg
import enum
import functools
import io
import json
import operator
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_resilience.checkpoint import checkpoint_file, dcp, resume
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed

EXECUTED: list[Any] = []


class Reduced:
    """Pickled as a call."""

    def __init__(self, call: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (call, arguments, state) if state is not None else (call, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def written(folder: Path) -> Path:
    """A directory as DCP writes it."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"state_dict": module.state_dict(), "optimizer_0": optimizer.state_dict(), "odd": {"a": [1, None, "b"]}}
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_reads_what_torch_has_written(tmp_path: Path) -> None:
    data = (written(tmp_path) / dcp.METADATA).read_bytes()
    found, expected = dcp.read_metadata(data), pickle.loads(data)
    assert os.fspath(found.storage_meta.checkpoint_id) == os.fspath(expected.storage_meta.checkpoint_id)
    found.storage_meta.checkpoint_id = expected.storage_meta.checkpoint_id = None
    assert found == expected
    assert [index.index for index in found.storage_data] == [index.index for index in expected.storage_data]
    dcp.check(tmp_path, lambda name: True)


def test_every_class_of_a_description_is_known() -> None:
    """What this version of torch describes a checkpoint with: each in it comes back as it was."""
    size, chunk = torch.Size([3, 4]), metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    layouts = (torch.strided, torch.sparse_coo, torch.sparse_csr)
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    tensors = {
        f"{dtype} {layout} {form}": metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype, layout, memory_format=form), size, [chunk]
        )
        for dtype in dtypes
        for layout in layouts
        for form in formats
    }
    index = metadata.MetadataIndex("a", [0, 0], 1)
    described = metadata.Metadata(
        {**tensors, "b": metadata.BytesStorageMetadata()},
        planner_data={"a": ("a", 0, "b")},
        storage_data={index: filesystem._StorageInfo("__0_0.distcp", 3, 4, ["zstd"])},
        storage_meta=metadata.StorageMeta("here", "save", "load", ["m"]),
        version="1.0.0",
    )
    assert dcp.read_metadata(pickle.dumps(described)) == described
    # A new class of torch's would be one more that has to be looked at here.
    assert {name for module, name in dcp._RECORDS if module == metadata.__name__} <= {
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "Metadata",
        "MetadataIndex",
    }


def described(**parts: Any) -> metadata.Metadata:
    return metadata.Metadata({}, **{"storage_data": {}, **parts})


def nested(call: Any, *arguments: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(Reduced(call, *arguments), buffer)
    return buffer.getvalue()


class Chunk(metadata.ChunkStorageMetadata):
    """A subclass is another class."""


copyreg.add_extension("builtins", "eval", 0xF1)

PLANTED: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Reduced(os.system, "exit 3"),
    "posix.system, in the planner's data": lambda: described(planner_data={"a": Reduced(os.system, "exit 3")}),
    "subprocess": lambda: Reduced(subprocess.run, ["true"]),
    "eval": lambda: described(storage_meta=Reduced(eval, "1")),
    "exec": lambda: Reduced(exec, "pass"),
    "getattr": lambda: Reduced(getattr, "a", "upper"),
    "setattr": lambda: Reduced(setattr, Reduced(__import__, "os"), "a", 1),
    "import": lambda: Reduced(builtins.__import__, "os"),
    "torch.load, nested": lambda: described(planner_data=Reduced(torch.load, nested(os.getpid))),
    "torch's storages": lambda: Reduced(torch.storage._load_from_bytes, nested(os.getpid)),
    "functools.partial": lambda: Reduced(functools.partial, os.system, "exit 3"),
    "operator.methodcaller": lambda: Reduced(operator.methodcaller, "upper"),
    "a module of torch": lambda: Reduced(torch.hub.load, "a", "b"),
    "a tensor": lambda: described(planner_data=torch.ones(2)),
    "a class of DCP that is no description": lambda: Reduced(FileSystemReader, "here"),
    "a class of DCP, made by a call": lambda: Reduced(metadata.ChunkStorageMetadata, torch.Size([1]), torch.Size([1])),
    "an attribute that a class of DCP has not": lambda: described(planner_data=[_with(evil=1)]),
    "methods of a class of DCP": lambda: Reduced(
        metadata.Metadata, {}, state=(None, {"__setstate__": 1, "__class__": metadata.StorageMeta})
    ),
    "a class of DCP itself is given a state": lambda: _with_state_of_a_class(),
    "a state that is none": lambda: Reduced(metadata.StorageMeta, state="abc"),
    "layout of something else": lambda: described(planner_data=Reduced(torch.serialization._get_layout, "load")),
    "a subclass": lambda: described(planner_data=Chunk(torch.Size([0]), torch.Size([1]))),
    "an extension": lambda: Raw(pickle.PROTO + b"\x02" + pickle.EXT1 + b"\xf1" + b"(X\x01\x00\x00\x001tR."),
    "a dotted name": lambda: Raw(b"\x80\x04\x8c\x05torch\x8c\x12Size.__init__.mean\x93."),
    "a persistent id": lambda: Raw(b"\x80\x02K\x01Q."),
    "contains itself": lambda: described(planner_data=_cyclic()),
    "an ordered dictionary": lambda: described(planner_data=collections.OrderedDict(a=1)),
    "a set": lambda: described(planner_data={1}),
    "an enumeration of its own": lambda: described(planner_data=signal.SIGTERM),
    "a number": lambda: 3,
    "no description": lambda: metadata.StorageMeta(),
    "no storage": lambda: metadata.Metadata({}),
    "an extension, called": lambda: Raw(b"\x80\x02\x82\xf1X\x01\x00\x00\x001\x85R."),
    "a place in a memo of 64 GB": lambda: Raw(b"\x80\x02]r\xff\xff\xff\xff."),
    "a buffer of 64 GB": lambda: Raw(b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little") + b"."),
    "numbers as text": lambda: Raw(b"I1\n."),
    "nothing": lambda: Raw(b""),
    "cut off": lambda: Raw(pickle.dumps(described())[:-4]),
}


class Raw:
    """Bytes that are no pickle of anything."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _with(**attributes: Any) -> metadata.StorageMeta:
    made = metadata.StorageMeta()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _with_state_of_a_class() -> Any:
    """``Metadata`` pushed, and a state built into the class itself."""
    name = b"\x8c" + bytes([len(metadata.__name__)]) + metadata.__name__.encode() + b"\x8c\x08Metadata\x93"
    return Raw(b"\x80\x04" + name + b"N}\x8c\x07version\x8c\x01xs\x86b.")


def _doubled(times: int, value: Any) -> Any:
    """Short as a pickle; no end of it for who looks at each part as often as it is referred to."""
    for _ in range(times):
        value = [value, value]
    return value


def _cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the process is reached while something is read: every class and function that is looked up."""
    found: list[str] = []
    for owner, name in ((os, "system"), (subprocess, "run"), (torch.hub, "load"), (torch, "load")):
        monkeypatch.setattr(owner, name, lambda *args, name=name, **kwargs: found.append(name))
    return found


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_what_is_planted_in_a_description_is_refused(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant()
    data = planted.data if isinstance(planted, Raw) else pickle.dumps(planted)
    before = {name: dict(vars(each)) for name, each in dcp._RECORDS.items() if not issubclass(each, enum.Enum)}
    found = executed(monkeypatch)
    with pytest.raises(checkpoint_file.UnsafeContent):
        dcp.read_metadata(data)
    assert found == []
    assert before == {name: dict(vars(dcp._RECORDS[name])) for name in before}, "classes are what they were"


def test_a_huge_memo_is_refused_before_there_is_any() -> None:
    """The unpickler would take the memory for it, and fail only where that is too much."""
    with pytest.raises(checkpoint_file.UnsafeContent, match=r"^it asks for more memory"):
        dcp.read_metadata(b"\x80\x02]r\x00\x00\x10\x00.")


def test_what_is_referred_to_often_is_made_once() -> None:
    small = described(planner_data={"a": _doubled(60, ["b"])})
    found = dcp.read_metadata(pickle.dumps(small))
    for _ in range(60):
        assert found.planner_data["a"][0] is found.planner_data["a"][1]
        found.planner_data["a"] = found.planner_data["a"][0]
    assert found.planner_data == {"a": ["b"]}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_way_of_pickling_is_read(protocol: int) -> None:
    tensor = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.float32),
        torch.Size([3]),
        [metadata.ChunkStorageMetadata(*[torch.Size([3])] * 2)],
    )
    names = {f"{'long' * 100}{number}": (number, -1.5, 2**70, "ž" * 300, None, True) for number in range(300)}
    expected = metadata.Metadata({"a": tensor}, planner_data=names, storage_data={})
    assert dcp.read_metadata(pickle.dumps(expected, protocol=protocol)) == expected


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (("../elsewhere", 0, 3), "it is not in the directory"),
        (("..", 0, 3), "it is not in the directory"),
        (("gone", 0, 3), "it is not in the directory"),
        (("here", 0, -1), "this package writes no such entry"),
        (("here", -1, 3), "this package writes no such entry"),
        (("here", 0, 3, ["zstd"]), "this package writes no such entry"),
        (("here", 0, 1 << 40), "it is shorter"),
    ],
)
def test_descriptions_that_lead_elsewhere_are_refused(tmp_path: Path, info: tuple[Any, ...], reason: str) -> None:
    planted = metadata.Metadata(
        {"a": metadata.BytesStorageMetadata()},
        storage_data={metadata.MetadataIndex("a"): filesystem._StorageInfo(*info)},
    )
    (tmp_path / "here").write_bytes(b"123")
    (tmp_path / dcp.METADATA).write_bytes(pickle.dumps(planted))
    with pytest.raises(checkpoint_file.CorruptCheckpoint, match=f"{info[0]} is refused: {reason}"):
        dcp.check(tmp_path, lambda name: True)


def test_what_lies_in_a_file_is_read_once(tmp_path: Path) -> None:
    with io.BytesIO() as buffer:
        torch.save(1, buffer)
        data = buffer.getvalue()
    (tmp_path / "here").write_bytes(data)
    names = [f"name {number}" for number in range(2)]
    planted = metadata.Metadata(
        {name: metadata.BytesStorageMetadata() for name in names},
        storage_data={metadata.MetadataIndex(name): filesystem._StorageInfo("here", 0, len(data)) for name in names},
    )
    (tmp_path / dcp.METADATA).write_bytes(pickle.dumps(planted))
    with pytest.raises(checkpoint_file.CorruptCheckpoint, match="here is refused: it is shorter"):
        dcp.check(tmp_path, lambda name: True)


def test_torch_loads_it_without_unpickling_and_is_as_before_afterwards(tmp_path: Path) -> None:
    plain = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    state: dict[str, Any] = {"odd": {"a": [0, 0, 0]}}
    written(tmp_path)
    with dcp.nothing_unpickled():
        torch_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state == {"odd": {"a": [1, None, "b"]}}
    assert plain == (FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes)

    marker = tmp_path / "executed"
    plant_value(tmp_path, "odd", marker)
    with dcp.nothing_unpickled(), pytest.raises(CheckpointException, match=r"it holds posix.mkdir, which a safe load"):
        torch_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    plant_metadata(tmp_path, marker)
    with dcp.nothing_unpickled(), pytest.raises(CheckpointException, match=r"posix.mkdir is not allowed in it"):
        torch_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert not marker.exists()
    torch_dcp.load({}, checkpoint_id=tmp_path, no_dist=True)
    assert marker.exists(), "the very same is executed otherwise"


def test_what_could_not_be_saved_stays_what_it_is_now(tmp_path: Path) -> None:
    """As the extra state of a layer, which only a pickle can keep: no resume must fail for it."""
    torch_dcp.save({"module": {"weight": torch.ones(2), "steps": 3}}, checkpoint_id=tmp_path, no_dist=True)
    extra = io.BytesIO(b"now")
    state = {"module": {"weight": torch.zeros(2), "steps": 0, "_extra_state": extra}}
    with dcp.nothing_unpickled():
        torch_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["module"].pop("weight"), torch.ones(2))
    assert state == {"module": {"steps": 3, "_extra_state": extra}}
    with dcp.nothing_unpickled(), pytest.raises(CheckpointException, match=r"Missing key .* bias"):
        torch_dcp.load({"bias": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)


def test_who_verifies_which_file() -> None:
    names = [".metadata", "meta.pt", *(f"__{rank}_{part}.distcp" for rank in range(4) for part in range(2))]
    for world_size in (1, 2, 3, 4, 6):
        shares = [{name for name in names if dcp.is_share(name, rank, world_size)} for rank in range(world_size)]
        assert set().union(*shares) == set(names)
        assert all({".metadata", "meta.pt"} <= share for share in shares)
        assert sum(map(len, shares)) == len(names) + 2 * (world_size - 1)
    assert dcp.is_share("__3_0.distcp", 3, 4), "what it has written is what it reads"


# On two ranks


def plant_metadata(directory: Path, marker: Path) -> None:
    found = pickle.loads((directory / dcp.METADATA).read_bytes())
    found.planner_data["planted"] = Reduced(os.mkdir, str(marker))
    (directory / dcp.METADATA).write_bytes(pickle.dumps(found))


def plant_value(directory: Path, name: str, marker: Path) -> None:
    """In the place of a value that is no tensor."""
    found = pickle.loads((directory / dcp.METADATA).read_bytes())
    index = next(
        index
        for index, described in found.state_dict_metadata.items()
        if name in index and isinstance(described, metadata.BytesStorageMetadata)
    )
    key = metadata.MetadataIndex(index)
    stored = found.storage_data[key]
    data = nested(os.mkdir, str(marker))
    with open(directory / stored.relative_path, "ab") as file:
        found.storage_data[key] = filesystem._StorageInfo(stored.relative_path, file.tell(), len(data))
        file.write(data)
    (directory / dcp.METADATA).write_bytes(pickle.dumps(found))


def plant_rest(directory: Path, marker: Path) -> None:
    rest = torch.load(directory / dcp.REST, weights_only=True)
    torch.save({**rest, "planted": Reduced(os.mkdir, str(marker))}, directory / dcp.REST)


def reseal(directory: Path) -> None:
    """As anybody can who can write there."""
    kept = json.loads((directory / checkpoint_file.MARKER).read_text())["metadata"]
    (directory / checkpoint_file.MARKER).unlink()
    checkpoint_file.seal_directory(directory, kept)


@pytest.mark.slow
def test_planted_objects_are_quarantined_and_the_next_best_checkpoint_is_taken(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sharded": True, "trainer": {"devices": 2}}
    config = make(tmp_path, "run", keep=5, **options)
    codes, text = run({**config, "events": [{"at": "train", "step": 23, "do": "SIGKILL"}]}, tmp_path / "run")
    assert -signal.SIGKILL in codes, text
    fit = RunDirectory(config["run_dir"]).fit(0)
    found = {resume.step_of(path): path for path in resume.checkpoints(fit.checkpoints)}
    assert set(found) == {5, 10, 15, 20}, text
    marker = tmp_path / "executed"
    plant_metadata(found[20], marker)
    plant_value(found[15], "lr", marker)
    plant_rest(found[10], marker)
    for step in (10, 15, 20):
        reseal(found[step])
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert not marker.exists(), "it was executed"
    assert "Resuming from step 5 " in text
    events = read_ledger(RunDirectory(config["run_dir"]).ledger)
    reasons = [event["reason"] for event in events if event["event"] == "quarantined"]
    assert [reason.partition("cannot be used: ")[2].partition(" is refused")[0][-9:] for reason in reasons] == [
        ".metadata",
        "_0.distcp",
        "meta.pt",
    ]
    assert "posix.mkdir is not allowed in it" in reasons[0]
    assert len(list(fit.quarantine.glob("*.reason.txt"))) == 3
    assert result(config) == undisturbed(tmp_path, **options)[0]


@pytest.mark.slow
def test_a_damaged_shard_is_found_by_the_rank_that_reads_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sharded": True, "trainer": {"devices": 2}}
    config = make(tmp_path, "run", keep=5, **options)
    run({**config, "events": [{"at": "train", "step": 13, "do": "SIGKILL"}]}, tmp_path / "run")
    newest = resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)[0]
    shard = newest / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert "its file __1_0.distcp is damaged" in text
    assert "Resuming from step 5 " in text
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_what_the_process_has_loaded_by_its_number_is_refused_all_the_same() -> None:
    by_number = pickle.PROTO + b"\x02" + pickle.EXT1 + b"\xf1" + b"X\x01\x00\x00\x001\x85R."
    assert pickle.loads(by_number) == 1  # from here on no unpickler asks for the class
    with pytest.raises(dcp.UnsafeContent, match="opcode"):
        dcp.read_metadata(by_number)
