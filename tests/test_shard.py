"""Shard files: what goes in comes out to the bit, and nothing that happens to a file goes unnoticed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.checkpoint.safe_serialization import pack, unpack
from lightning_resilience.checkpoint.shard import (
    ALIGNMENT,
    Identity,
    arrange,
    load,
    load_bytes,
    read_identity,
    seal,
    verify,
    view,
)

IDENTITY = Identity(
    run="5f3c", fit=0, step=12, generation="1a2b3c4d", part="rank-00003", world_size=8, layout={"common": 2, "l": [1]}
)


def make(tensors, identity=IDENTITY, structure=None):
    """The bytes of a shard, made the way a save does it."""
    specs, size = arrange(tensors)
    memory = torch.full((size + 100,), 0xAB, dtype=torch.uint8)  # as in recycled memory
    for spec, tensor in zip(specs, tensors, strict=True):
        if not tensor.is_meta:
            with torch.no_grad():
                view(memory, spec).copy_(tensor)
    trailer = seal(memory, specs, identity, structure, size)
    return memory[:size].numpy().tobytes() + trailer


def in_memory(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def to_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def rejects(path, match=".", expected=None):
    """All readers refuse it, and none with another error; returns the reason given."""
    with pytest.raises(CorruptCheckpoint, match=match) as caught:
        load(path, expected)
    with pytest.raises(CorruptCheckpoint):
        verify(path, expected)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank-00003.shard"


# What goes in comes out


ALL_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
TORCH_CANNOT_COPY = {f"torch.{u}int{n}" for u in ("", "u") for n in range(1, 8)}
QUANTIZED = {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_type_of_torch_comes_back_or_is_refused_by_name(dtype, path):
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 16 * 12, dtype=np.uint8))
    tensor = raw.remainder(2).view(torch.bool) if dtype == torch.bool else raw.view(dtype)
    if str(dtype) in TORCH_CANNOT_COPY | QUANTIZED:
        with pytest.raises(TypeError, match=rf"tensor 1 \(torch.Tensor, {dtype}"):
            arrange([torch.ones(1), tensor])
        return
    tensors = [tensor, tensor.view(4, -1).t(), tensor[:0], tensor[3], tensor[1:2]]
    path.write_bytes(make(tensors))
    header, loaded = load(path)
    assert [spec.dtype for spec in header.tensors] == [str(dtype)[len("torch.") :]] * 5
    for before, after in zip(tensors, loaded, strict=True):
        assert (after.dtype, after.shape, after.stride()) == (before.dtype, before.shape, before.stride())
        assert to_bytes(after) == to_bytes(before)


def test_values_that_comparisons_hide_come_back_to_the_bit(path):
    words = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000, -1], dtype=torch.int64).to(torch.int32)
    path.write_bytes(make([words.view(torch.float32), words.view(torch.bfloat16), words.view(torch.complex64)]))
    for tensor in load(path)[1]:
        assert to_bytes(tensor) == to_bytes(words)


base = torch.arange(4096.0)
KEPT = {
    "scalar": torch.tensor(3.5),
    "one element": torch.tensor([3.5]),
    "channels last": base[:240].view(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
    "channels last 3d": base[:240].view(1, 2, 3, 5, 8).contiguous(memory_format=torch.channels_last_3d),
    "transposed": base[:12].view(3, 4).t(),
    "permuted": base[:24].view(2, 3, 4).permute(2, 0, 1),
    "in the middle of another": base[100:112].view(3, 4),
    "odd stride of length one": base.as_strided((1, 4), (1000, 1)),
    "odd stride of length one, last": base.as_strided((4, 1), (1, 77)),
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(3, 0, 4),
    "empty, permuted": torch.empty(2, 0, 3).permute(2, 0, 1),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "parameter, transposed": torch.nn.Parameter(torch.ones(3, 2).t()),
    "buffer": torch.nn.Buffer(torch.ones(3)),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag.clone(),
    "larger than a batch": torch.arange(700_000),
}
MADE_CONTIGUOUS = {
    "expanded": torch.arange(3.0).expand(4, 3),
    "expanded scalar": torch.tensor(2.0).expand(5),
    "overlapping": base.as_strided((5, 4), (1, 1)),
    "overlapping windows": base[:20].unfold(0, 8, 2),
    "with gaps": base[:40].view(4, 10)[:, :3],
    "every other": base[:40][::2],
    "gaps, permuted": base[:40].view(4, 10)[:, :3].t(),
    "negative, a view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("name", [*KEPT, *MADE_CONTIGUOUS])
def test_every_shape_comes_back(name, path):
    tensor = KEPT.get(name, MADE_CONTIGUOUS.get(name))
    path.write_bytes(make([torch.ones(1), tensor, torch.ones(1)]))
    header, (_, loaded, _) = load(path)
    assert torch.equal(loaded, tensor)
    assert loaded.dtype == tensor.dtype
    assert loaded.stride() == (tensor.stride() if name in KEPT else tensor.contiguous().stride())
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad
    assert not loaded.is_conj()
    assert header.tensors[1].nbytes == tensor.nbytes
    loaded.add_(1)
    with contextlib.suppress(RuntimeError):
        assert not torch.equal(loaded, tensor) or not tensor.numel(), "memory of its own"


def test_tensors_without_content_come_back_without(path):
    tensors = [torch.empty(4, 5, device="meta").t(), torch.ones(2), torch.empty(10**12, device="meta")]
    path.write_bytes(make(tensors))
    assert path.stat().st_size < 2000
    header, loaded = load(path)
    assert [spec.nbytes for spec in header.tensors] == [0, 8, 0]
    assert [tensor.device.type for tensor in loaded] == ["meta", "cpu", "meta"]
    assert [(t.shape, t.stride()) for t in loaded] == [(t.shape, t.stride()) for t in tensors]


def test_a_shard_may_have_no_tensors(path):
    path.write_bytes(make([], structure={"a": [1, None, "ü"]}))
    header, tensors = load(path)
    assert (header.structure, tensors, header.tensors) == ({"a": [1, None, "ü"]}, [], ())
    assert verify(path) == header


def test_what_a_shard_says_about_itself(path):
    data = make([torch.ones(3), torch.zeros(2, 2, dtype=torch.int8)], structure=[1])
    path.write_bytes(data)
    header = read_identity(path)
    assert header == verify(path) == load(path)[0] == load_bytes(in_memory(data))[0]
    assert header.identity == IDENTITY
    assert header.tensors == (
        shard.TensorSpec("float32", (3,), (1,), 64, 12),
        shard.TensorSpec("int8", (2, 2), (2, 1), 128, 4),
    )
    assert header.torch_version == torch.__version__
    assert header.size == len(data)
    assert header.checksums == tuple(xxhash.xxh3_128_hexdigest(data[start : start + ALIGNMENT]) for start in (64, 128))
    assert header.created.startswith("20")
    assert header.created.endswith("+00:00")


def training_state(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Linear(9, 9), torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9)
    )
    model[2].weight = model[1].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "random": {"python": random.Random(seed).getstate(), "torch": torch.get_rng_state()},
        "global_step": seed,
    }


def test_a_training_state_survives(path):
    state = training_state(3)
    structure, tensors, left_out = pack(state)
    path.write_bytes(make(tensors, structure=structure))
    header, loaded = load(path)
    back = unpack(header.structure, loaded)
    assert left_out == []
    assert back["state_dict"]["1.weight"] is back["state_dict"]["2.weight"]
    assert back["random"]["python"] == state["random"]["python"]
    assert list(back["state_dict"]) == list(state["state_dict"])
    again, tensors_again, _ = pack(back)
    assert again == structure
    assert all(map(torch.equal, tensors, tensors_again))
    model = torch.nn.Linear(6, 9)
    model.load_state_dict({"weight": back["state_dict"]["0.weight"], "bias": back["state_dict"]["0.bias"]})


# What cannot be kept


def refused():
    class Special(torch.Tensor):
        pass

    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "subclass": torch.ones(2).as_subclass(Special),
        "parameter subclass": torch.nn.Parameter(torch.ones(2).as_subclass(Special)),
        "uninitialized": torch.nn.UninitializedParameter(),
        "int4": torch.empty(4, dtype=torch.uint8).view(torch.int4),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sparse", "csr", "nested", "jagged", "quantized", "subclass", "parameter subclass",
                                  "uninitialized", "int4"])  # fmt: skip
def test_what_is_more_than_its_bytes_is_refused_by_name(name):
    with pytest.raises(TypeError, match=r"tensor 1 .*cannot be kept byte for byte"):
        arrange([torch.ones(1), refused()[name]])


# Sealing


def test_nothing_is_copied_to_be_sealed(monkeypatch):
    specs, size = arrange([torch.ones(300_000), torch.ones(3), torch.ones(5)])
    memory = torch.zeros(size, dtype=torch.uint8)
    hashed = []
    digest = xxhash.xxh3_128_hexdigest

    def spy(data):
        hashed.append((np.frombuffer(data, np.uint8).ctypes.data - memory.data_ptr(), len(data)))
        return digest(data)

    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", spy)
    seal(memory, specs, IDENTITY, None, size)
    assert hashed == [(64, 1_200_000), (64 + 1_200_000, 64), (128 + 1_200_000, 64)]


def test_what_was_in_the_memory_before_is_not_in_the_file():
    data = make([torch.ones(3), torch.ones(17), torch.ones(0), torch.ones(16), torch.tensor(True)])
    assert data[76:128] == bytes(52)
    assert data[196:256] == bytes(60)
    assert data[321:384] == bytes(63)
    assert b"\xab" not in data[:64]


def test_a_save_does_not_write_behind_its_data():
    specs, size = arrange([torch.ones(3)])
    memory = torch.full((size + 64,), 7, dtype=torch.uint8)
    seal(memory, specs, IDENTITY, None, size)
    assert set(memory[size:].tolist()) == {7}


@pytest.mark.parametrize(
    ("memory", "size", "match"),
    [
        (torch.zeros(128, dtype=torch.uint8), 192, "take 128 bytes before the header, not 192"),
        (torch.zeros(127, dtype=torch.uint8), 128, "the memory has 127 bytes; the tensors take 128"),
        (torch.zeros(128), 128, "bytes .uint8. of one dimension in host memory"),
        (torch.zeros(2, 128, dtype=torch.uint8), 128, "of one dimension"),
        (torch.zeros(256, dtype=torch.uint8)[::2], 128, "of one dimension"),
        (torch.zeros(128, dtype=torch.uint8, device="meta"), 128, "in host memory"),
    ],
)
def test_sealing_something_else_is_refused(memory, size, match):
    specs, _ = arrange([torch.ones(3)])
    with pytest.raises(ValueError, match=match):
        seal(memory, specs, IDENTITY, None, size)


@pytest.mark.parametrize("structure", [{"a": torch.ones(1)}, float("nan"), {(1, 2): 3}])
def test_a_structure_that_json_cannot_hold_is_refused(structure):
    with pytest.raises((TypeError, ValueError)):
        make([torch.ones(1)], structure=structure)


# Loading


def test_what_is_loaded_has_memory_of_its_own(path, monkeypatch):
    path.write_bytes(make([torch.ones(5), torch.ones(9), torch.ones(500_000), torch.ones(7, 3).t(), torch.ones(2)]))
    copy, copied = shard._copy, []
    monkeypatch.setattr(shard, "_copy", lambda tensor, spec: copied.append(spec.nbytes) or copy(tensor, spec))
    _, tensors = load(path)
    assert sorted(copied) == [8, 20, 36, 84], "the large one is where it was read to"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 5
    for tensor in tensors:  # or torch.save would write others along with it
        assert tensor.untyped_storage().nbytes() - tensor.nbytes < ALIGNMENT
        tensor.add_(1)
    assert not any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_bytes_from_elsewhere_are_not_copied():
    data = make([torch.ones(5), torch.ones(5, dtype=torch.float64)], structure=1)
    memory = in_memory(data)
    header, tensors = load_bytes(memory)
    assert [tensor.data_ptr() - memory.data_ptr() for tensor in tensors] == [spec.offset for spec in header.tensors]
    assert tensors[1].tolist() == [1.0] * 5


def test_bytes_from_elsewhere_may_begin_anywhere():
    data = make([torch.ones(5), torch.ones(5, dtype=torch.complex128)])
    memory = in_memory(b"xyz" + data)[3:]
    assert load_bytes(memory)[1][1].tolist() == [1.0] * 5
    with pytest.raises(CorruptCheckpoint, match="shard of rank 3 cannot be used"):
        load_bytes(memory[:-1], source="of rank 3")
    with pytest.raises(ValueError, match="bytes"):
        load_bytes(torch.ones(3))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("piece", [128, 1000, 1 << 20])
def test_in_whatever_pieces_it_is_read(path, piece, threads, monkeypatch):
    monkeypatch.setattr(shard, "_PIECE", piece)
    monkeypatch.setattr(shard, "_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    rng = random.Random(5)
    tensors = [torch.arange(rng.choice([0, 1, 3, 16, 17, 40, 900, 5000])) for _ in range(60)]
    tensors.insert(7, torch.empty(3, device="meta"))
    data = make(tensors)
    path.write_bytes(data)
    for header, loaded in (load(path), load_bytes(in_memory(data))):
        assert header == verify(path)
        assert all(torch.equal(a, b) for a, b in zip(tensors, loaded, strict=True) if not a.is_meta)
    for index in (0, 33, 60):
        spec = header.tensors[index]
        position = spec.offset + rng.randrange(max(spec.nbytes, 1))
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        if position < header.tensors[-1].offset:
            reason = rejects(path, "tensor [0-9]+ .*is damaged")
            assert (
                f"from byte {next(s.offset for s in reversed(header.tensors) if s.nbytes and s.offset <= position)} on"
                in reason
            )
        with pytest.raises(CorruptCheckpoint):
            load_bytes(in_memory(damaged))


def test_an_error_of_the_storage_is_no_verdict(path, monkeypatch):
    path.write_bytes(make([torch.ones(9)]))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    for reader in (load, verify, read_identity):
        with pytest.raises(OSError, match="Input/output"):
            reader(path)


def test_a_lack_of_memory_is_no_verdict(path, monkeypatch):
    path.write_bytes(make([torch.ones(9)]))

    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(shard.torch, "empty", fail)
    with pytest.raises(OSError, match="there is not enough memory for 64 bytes"):
        load(path)


def test_no_descriptor_is_left_open(path, tmp_path):
    path.write_bytes(make([torch.ones(9)]))
    (tmp_path / "bad").write_bytes(path.read_bytes()[:-1])
    before = set(os.listdir("/proc/self/fd"))
    for reader in (load, verify, read_identity):
        reader(path)
        for bad in (tmp_path / "bad", tmp_path, tmp_path / "missing"):
            with pytest.raises(CorruptCheckpoint):
                reader(bad)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("when", range(6))
def test_a_file_that_is_cut_while_it_is_read(path, when, monkeypatch):
    data = make([torch.ones(5000), torch.ones(3)])
    path.write_bytes(data)
    monkeypatch.setattr(shard, "_PIECE", 8192)
    preadv, calls = os.preadv, []

    def cut(file, buffers, offset):
        calls.append(offset)
        if len(calls) == when + 1:
            os.truncate(path, 40)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CorruptCheckpoint, match="shorter while it was read"):
        load(path)
    assert len(calls) in (when + 1, when + 2)


def test_a_file_that_is_written_over_while_it_is_read(path, monkeypatch):
    """As a retired one is that is used again."""
    data = make([torch.ones(5000), torch.ones(3)])
    other = make([torch.zeros(5000), torch.zeros(3)], Identity("5f3c", 0, 14, "9", "rank-00003", 8, {}))
    path.write_bytes(data)
    preadv = os.preadv

    def overwrite(file, buffers, offset):
        if offset == 64:
            path.write_bytes(other)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", overwrite)
    with pytest.raises(CorruptCheckpoint, match=r"tensor 0 .*is damaged"):
        load(path)


# What is no shard


def no_shards(folder):
    data = make([torch.ones(9)])
    folder.mkdir()
    names = {}

    def add(name, content=None):
        names[name] = folder / name
        if content is not None:
            names[name].write_bytes(content)
        return names[name]

    add("missing")
    add("empty", b"")
    add("one byte", b"\x93")
    add("preamble only", data[:64])
    add("zeros", bytes(10_000))
    add("text", b"hello world " * 100)
    add("zip", b"PK\x03\x04" + bytes(1000))
    add("directory").mkdir()
    os.mkfifo(add("pipe"))
    os.symlink("loop", add("loop"))
    os.symlink("nowhere", add("dangling"))
    names["below a file"] = names["text"] / "x"
    names["long name"] = folder / ("x" * 300)
    names["device"] = Path("/dev/zero")
    with open(add("sparse"), "wb") as file:
        file.truncate(1 << 42)
    with open(add("sparse with a preamble"), "wb") as file:
        file.write(data[:64])
        file.truncate(1 << 42)
    with open(add("huge header"), "wb") as file:  # a footer that asks for everything as the header
        file.write(data[:64])
        file.seek((1 << 42) - 40)
        file.write(struct.pack("<QQ16s8s", 64, (1 << 42) - 40 - 64, bytes(16), b"LRSHREND"))
    for number, (start, length) in enumerate(
        [(0, 2**64 - 1), (2**64 - 64, 64), (2**63, 2**63), (64, 2**40), (2**64 - 64, len(data) - 40 + 64), (0, 0)]
    ):
        add(f"bogus length {number}", data[:-40] + struct.pack("<QQ", start, length) + data[-24:])
    return names


def test_what_is_no_shard_is_refused(tmp_path):
    server = socket.socket(socket.AF_UNIX)
    names = no_shards(tmp_path / "f")
    names["socket"] = tmp_path / "socket"
    server.bind(os.fspath(names["socket"]))
    for name, path in names.items():
        reason = rejects(path)
        assert os.fspath(path) in reason, name
        with pytest.raises(CorruptCheckpoint):
            read_identity(path)
    server.close()


def test_what_is_no_file_is_not_even_opened(tmp_path, monkeypatch):
    """To open a device may do anything, and to open a pipe may wake up whoever waits to write into it."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "open", None)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        rejects(path, "it is not a regular file")


def test_what_takes_the_place_of_a_file_in_the_last_moment(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    before = os.stat(file)
    monkeypatch.setattr(os, "stat", lambda *_: before)
    rejects(tmp_path / "pipe", "it is not a regular file")
    rejects(tmp_path, "it is not a regular file")


def test_a_read_that_brings_less_than_was_asked_for_is_continued(path, monkeypatch):
    path.write_bytes(make([torch.arange(1000)]))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset))
    assert load(path)[1][0].tolist() == list(range(1000))


def test_reasons_say_what_is_wrong(tmp_path):
    names = no_shards(tmp_path / "f")
    for name, reason in {
        "missing": "it does not exist",
        "dangling": "it does not exist",
        "loop": "it does not exist .*symbolic links",
        "directory": "it is not a regular file",
        "pipe": "it is not a regular file",
        "empty": "it is empty",
        "one byte": r"it is truncated \(1 bytes\)",
        "preamble only": r"it is truncated \(64 bytes\)",
        "text": "it is not a shard",
        "sparse with a preamble": "it is truncated, or its end is damaged",
        "huge header": "not the one that was written",
    }.items():
        rejects(names[name], reason)


# Whose it is


FOREIGN = {
    "run": "ffff",
    "fit": 1,
    "step": 13,
    "generation": "deadbeef",
    "part": "rank-00004",
    "world_size": 4,
    "layout": {"common": 1, "l": [1]},
}


@pytest.mark.parametrize("field", FOREIGN)
def test_a_foreign_shard_is_refused_with_what_is_foreign(field, path):
    data = make([torch.ones(3)])
    path.write_bytes(data)
    whole = Identity(**{**vars(IDENTITY), field: FOREIGN[field]})
    for expected in (whole, {field: FOREIGN[field]}, {"run": "5f3c", field: FOREIGN[field]}):
        reason = rejects(path, "it is not the expected one", expected)
        assert f"{field} is {vars(IDENTITY)[field]!r}, not {FOREIGN[field]!r}" in reason
        assert reason.count(" is ") == 2, "nothing else is said to differ"
        for attempt in (lambda e=expected: read_identity(path, e), lambda e=expected: load_bytes(in_memory(data), e)):
            with pytest.raises(CorruptCheckpoint, match=field):
                attempt()


def test_an_expected_shard_is_taken(path):
    path.write_bytes(make([torch.ones(3)]))
    tuples = Identity(**{**vars(IDENTITY), "layout": {"common": 2, "l": (1,)}})  # JSON makes lists of them
    for expected in (None, {}, IDENTITY, tuples, {"step": 12}, {"generation": "1a2b3c4d", "part": "rank-00003"}):
        assert load(path, expected)[0].identity == IDENTITY


# Nothing goes unnoticed


def shards():
    """Real ones, small: a rank's part, the same of the next step, a common part, one without tensors."""
    made = []
    for step in (12, 13):
        structure, tensors, _ = pack(training_state(step))
        made.append(make(tensors, Identity(**{**vars(IDENTITY), "step": step}), {"state": structure}))
    twins = [torch.full((5, 3), float(i)) for i in range(3)] + [torch.ones(40), torch.ones(40).half(), torch.empty(0)]
    made.append(make(twins, Identity(**{**vars(IDENTITY), "part": "common-00-of-02"})))
    made.append(make([], Identity(**{**vars(IDENTITY), "part": "rank-00004"}), {"state": 1}))
    return made


def damage(rng, data, others):
    """(name of what was done, the damaged bytes)"""
    header = struct.unpack_from("<Q", data, len(data) - 40)[0]
    specs = json.loads(data[header:-40])["tensors"]
    regions = {"magic": (0, 64), "header": (header, len(data) - 40), "footer": (len(data) - 40, len(data))}
    if specs:
        _, _, _, offset, nbytes, _, _ = rng.choice([spec for spec in specs if spec[4]])
        regions["data"] = (offset, offset + nbytes)
        if nbytes % 64:
            regions["padding"] = (offset + nbytes, offset + nbytes + 64 - nbytes % 64)
    start, end = regions[place := rng.choice(sorted(regions))]
    out = bytearray(data)
    kind = rng.choice(
        ["flip"] * 3 + ["cut"] * 2 + ["bits", "bytes", "end", "append", "swap", "twins", "graft", "place", "hole",
                                      "insert", "torn", "tail", "remove", "number"]
    )  # fmt: skip
    if kind == "flip":
        out[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        kind = f"flip in {place}"
    elif kind == "bits":
        for _ in range(rng.randrange(2, 9)):
            out[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        length = rng.randrange(1, end - start + 1)
        at = rng.randrange(start, end - length + 1)
        out[at : at + length] = rng.randbytes(length)
    elif kind == "cut":
        del out[rng.randrange(len(out)) :]
    elif kind == "end":
        del out[len(out) - rng.randrange(1, 65) :]
    elif kind == "append":
        out += rng.choice(
            [rng.randbytes(rng.randrange(1, 200)), bytes(rng.randrange(1, 200)), data[-40:], data[header:], data]
        )
    elif kind == "swap":
        a, b = rng.sample(range(0, len(out) - 63, 64), 2)
        out[a : a + 64], out[b : b + 64] = out[b : b + 64], out[a : a + 64]
    elif kind == "twins":  # two tensors of the same type and shape
        pairs = [(a, b) for a in specs for b in specs if a[3] < b[3] and a[:3] == b[:3] and a[4]]
        if pairs:
            (*_, a, length, _, _), (*_, b, _, _, _) = rng.choice(pairs)
            out[a : a + length], out[b : b + length] = out[b : b + length], out[a : a + length]
    elif kind == "graft":  # header and footer of another shard on this data, or of this one on other data
        other = rng.choice(others)
        other_header = struct.unpack_from("<Q", other, len(other) - 40)[0]
        out = rng.choice([out[:header] + other[other_header:], other[:other_header] + data[header:]])
    elif kind == "place":  # the numbers in the footer
        struct.pack_into("<Q", out, len(out) - rng.choice([40, 32]), rng.choice([0, 64, 2**63, rng.randrange(2**64)]))
    elif kind == "hole":  # a page that was never written
        at = rng.randrange(0, len(out), 512)
        out[at : at + 512] = bytes(len(out[at : at + 512]))
    elif kind == "insert":
        at = rng.randrange(len(out))
        out[at:at] = rng.choice([out[at : at + 64], bytes(64), rng.randbytes(rng.randrange(1, 99))])
    elif kind == "torn":  # the beginning of one and the end of the next one, in the same file
        other = rng.choice(others)
        at = rng.randrange(len(out))
        out = rng.choice([data[:at] + other[at:], other[:at] + data[at:]])
    elif kind == "tail":
        at = rng.randrange(len(out))
        out[at:] = bytes(len(out) - at)
    elif kind == "remove":
        at = rng.randrange(len(out))
        del out[at : at + rng.choice([1, 64, rng.randrange(1, 512)])]
    elif kind == "number":  # a digit of the header becomes another one
        out[rng.choice([digit.start() for digit in re.finditer(rb"[0-9]", data[header:-40])]) + header] = ord(
            rng.choice("0123456789")
        )
    return kind, bytes(out)


def campaign(path, count, seed=20260301):
    """How many of ``count`` damaged files were noticed and how many not, by what was done to them."""
    rng = random.Random(seed)
    files = shards()
    identities = [load_bytes(in_memory(data))[0].identity for data in files]
    for data, identity in zip(files, identities, strict=True):
        path.write_bytes(data)
        assert load(path, identity)[0].identity == verify(path, identity).identity == identity
    noticed, missed = Counter(), Counter()
    file = os.open(path, os.O_RDWR)  # to empty a file on disk takes longer than all the rest
    while noticed.total() + missed.total() < count:
        number = rng.choice([0, 0, 1, 2, 2, 3])
        kind, damaged = damage(rng, files[number], [data for data in files if data is not files[number]])
        if damaged == files[number]:
            continue
        os.pwrite(file, damaged, 0)
        os.ftruncate(file, len(damaged))
        reader = rng.randrange(4)
        try:
            if reader == 0:
                verify(path, identities[number])
            elif reader == 1:
                load_bytes(in_memory(damaged) if damaged else torch.empty(0, dtype=torch.uint8), identities[number])
            else:
                load(path, identities[number])
        except CorruptCheckpoint:
            noticed[kind] += 1
        else:
            missed[kind] += 1
    os.close(file)
    return noticed, missed


@pytest.mark.slow
def test_no_damage_of_ten_thousand_goes_unnoticed(path):
    noticed, missed = campaign(path, 10_000)
    assert not missed
    assert len(noticed) == 20, "every kind of damage was done"
    assert min(noticed.values()) > 80, noticed


class Anything:
    """Equal to everything, and so are the checksums."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0


@pytest.mark.slow
def test_the_campaign_depends_on_the_checksums_of_tensors(path, monkeypatch):
    monkeypatch.setattr(shard, "_compare", lambda *_: None)
    _, missed = campaign(path, 1500)
    assert {"flip in data", "flip in padding", "twins", "swap", "hole", "graft", "torn"} <= set(missed)
    assert not {"flip in header", "flip in magic", "flip in footer", "cut", "append", "number"} & set(missed)


@pytest.mark.slow
def test_the_campaign_depends_on_the_digest_of_the_header(path, monkeypatch):
    digest = shard._digest

    class Trusting(bytes):
        def __ne__(self, other):
            return False

    monkeypatch.setattr(shard, "_digest", lambda *parts: Trusting(digest(*parts)))
    _, missed = campaign(path, 1500)
    assert {"flip in header", "number", "flip in footer"} <= set(missed)
    assert not {"flip in data", "flip in padding", "cut", "append"} & set(missed)


def test_every_single_byte_is_covered(path):
    data = make([torch.ones(9), torch.arange(3)], structure={"a": 1})
    header = struct.unpack_from("<Q", data, len(data) - 40)[0]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptCheckpoint):
            load_bytes(in_memory(damaged))
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint):
            verify(path)
        if not 64 <= position < header:
            with pytest.raises(CorruptCheckpoint):
                read_identity(path)


def test_every_truncation_is_noticed(path):
    data = make([torch.ones(9), torch.arange(3)], structure={"a": 1})
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpoint):
            load_bytes(in_memory(data[:length]) if length else torch.empty(0, dtype=torch.uint8))
    path.write_bytes(data)
    for length in range(len(data) - 1, 0, -7):
        os.truncate(path, length)
        rejects(path)


# The format


def written_by_hand(tensors, document, version=1):
    """A shard from its description, with nothing but struct, json and xxhash; ``tensors``: (its row, its bytes)."""
    preamble = struct.pack("<12sI48x", b"\x93LRSHARD\r\n\x1a\n", version)
    content, table = b"", []
    for row, data in tensors:
        padded = data + bytes(-len(data) % 64)
        table.append([*row, xxhash.xxh3_128_hexdigest(padded)])
        content += padded
    header = json.dumps({**document, **({} if "tensors" in document else {"tensors": table})}).encode()
    place = struct.pack("<QQ", 64 + len(content), len(header))
    digest = xxhash.xxh3_128_digest(preamble + header + place)
    return preamble + content + header + place + digest + b"LRSHREND"


ABOUT = {
    "identity": vars(IDENTITY),
    "torch": "2.8.0",
    "created": "2026-01-01T00:00:00.000+00:00",
    "byteorder": "little",
    "skeleton": {"a": 1},
}
ROW = ["float32", [3], [1], 64, 12, "cpu"]
DATA = struct.pack("<3f", 1, 2, 3)


def test_the_format_is_the_documented_one(path):
    path.write_bytes(written_by_hand([(ROW, DATA), (["int16", [2], [1], 128, 4, "cpu"], b"\1\0\2\0")], ABOUT))
    header, tensors = load(path)
    assert [tensor.tolist() for tensor in tensors] == [[1, 2, 3], [1, 2]]
    assert (header.identity, header.structure, header.torch_version) == (IDENTITY, {"a": 1}, "2.8.0")


def test_a_reader_written_from_the_description_reads_our_files(path):
    page = Path(__file__).parents[1] / "docs" / "checkpoints.md"
    code = next(
        block.partition("```")[0] for block in page.read_text().split("```python\n")[1:] if "def read_shard" in block
    )
    names = {}
    exec(compile(code, str(page), "exec"), names)
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor([True, False]), torch.empty(0), torch.ones(3).bfloat16()]
    path.write_bytes(make(tensors, structure=[1, 2]))
    header, loaded = names["read_shard"](path)
    assert (header["identity"], header["skeleton"]) == (vars(IDENTITY), [1, 2])
    assert all(map(torch.equal, loaded, tensors))
    data = bytearray(path.read_bytes())
    for position in (3, 70, 100, len(data) - 100, len(data) - 30):
        damaged = data.copy()
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(AssertionError):
            names["read_shard"](path)


MALFORMED = {
    "type unknown to this torch": [(["float3", [3], [1], 64, 12, "cpu"], DATA)],
    "type that is none": [(["nn", [3], [1], 64, 12, "cpu"], DATA)],
    "type of another type": [([[], [3], [1], 64, 12, "cpu"], DATA)],
    "too many elements": [(["float32", [300], [1], 64, 12, "cpu"], DATA)],
    "very many elements": [(["float32", [2**62], [1], 64, 2**64, "cpu"], DATA)],
    "negative shape": [(["float32", [-3], [1], 64, -12, "cpu"], DATA)],
    "shape of floats": [(["float32", [3.0], [1], 64, 12, "cpu"], DATA)],
    "strides beyond the memory": [(["float32", [3], [100], 64, 12, "cpu"], DATA)],
    "strides that overlap": [(["float32", [3], [0], 64, 12, "cpu"], DATA)],
    "negative strides": [(["float32", [3], [-1], 64, 12, "cpu"], DATA)],
    "one stride too many": [(["float32", [3], [1, 1], 64, 12, "cpu"], DATA)],
    "not at its place": [(["float32", [3], [1], 128, 12, "cpu"], DATA)],
    "at no multiple": [(["float32", [3], [1], 60, 12, "cpu"], DATA)],
    "twice at the same place": [(ROW, DATA), (ROW, DATA)],
    "fewer bytes than it has": [(["float32", [3], [1], 64, 8, "cpu"], DATA)],
    "on a device": [(["float32", [3], [1], 64, 12, "cuda"], DATA)],
    "bytes on meta": [(["float32", [3], [1], 64, 12, "meta"], DATA)],
    "bytes that are nobody's": [(ROW, DATA + bytes(100))],
    "negative shape without bytes": [(["float32", [-3], [1], 64, -12, "cpu"], b"")],
    "one stride too many of nothing": [(["float32", [0], [1, 1], 64, 0, "cpu"], b"")],
    "both at the place of the second": [(["float32", [3], [1], 128, 12, "cpu"], DATA)] * 2,
    "a row that is too short": [(ROW[:4], DATA)],
    "shape none": [(["float32", None, [1], 64, 12, "cpu"], DATA)],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_table_that_makes_no_sense_is_refused_though_its_digest_is_right(name, path):
    path.write_bytes(written_by_hand(MALFORMED[name], ABOUT))
    rejects(path, f"no type {MALFORMED[name][0][0][0]}" if name.startswith("type unknown") else "malformed|do not end")


@pytest.mark.parametrize(
    "document",
    [
        {**ABOUT, "byteorder": "big"},
        {**ABOUT, "tensors": None},
        {**ABOUT, "tensors": {}},
        {**ABOUT, "tensors": [1]},
        {**ABOUT, "identity": {}},
        {**ABOUT, "identity": [1]},
        {**ABOUT, "identity": {**ABOUT["identity"], "step": "12"}},
        {**ABOUT, "identity": {**ABOUT["identity"], "step": True}},
        {**ABOUT, "identity": {**ABOUT["identity"], "layout": None}},
        {},
    ],
)
def test_a_header_that_makes_no_sense_is_refused_though_its_digest_is_right(document, path):
    path.write_bytes(written_by_hand([(ROW, DATA)], document))
    rejects(path)


def test_headers_that_are_no_json_objects_are_refused(path):
    preamble = struct.pack("<12sI48x", b"\x93LRSHARD\r\n\x1a\n", 1)
    for header in (b"", b"[]", b"nul", b"\xff\xfe", b"7", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000):
        place = struct.pack("<QQ", 64, len(header))
        path.write_bytes(preamble + header + place + xxhash.xxh3_128_digest(preamble + header + place) + b"LRSHREND")
        rejects(path, "malformed")


def test_another_version_of_the_format_is_named(path):
    path.write_bytes(written_by_hand([(ROW, DATA)], ABOUT, version=2))
    rejects(path, "it has format 2.*this version of the package reads format 1")
