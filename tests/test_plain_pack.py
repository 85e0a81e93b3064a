"""What pack() separates, unpack() puts together: every type, over JSON, without sharing or losing anything."""

import datetime
import enum
import gc
import json
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from lightning_resilience.checkpoint.plain import from_plain, pack, to_plain, unpack

TAG = "__resilience_type__"


def through_json(value):
    """(what comes back, what was left out), the way a shard keeps it: strict JSON, tensors beside it."""
    skeleton, tensors, left_out = pack(value)
    return unpack(json.loads(json.dumps(skeleton, allow_nan=False)), tensors), left_out


def same(a, b):
    """Equal in value and type, to the bit, and in the order of keys."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and b.flags.writeable
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


SHARED = [{"a": [1]}, [(1,), {2}]]
VALUES = {
    "none": None,
    "bools": [True, False, 1, 0],
    "ints": [0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**60],
    "int with more digits than Python reads": [1 << 20_000, -(1 << 20_000), 3],
    "short ints": [5],
    "floats": [0.1, -0.0, 1e-320, sys.float_info.max, 1 / 3, math.inf, -math.inf, math.nan],
    "complex": [1 - 2j, complex(math.nan, -math.inf), complex(0.1, -0.0)],
    "text": ["", "plain", "žluťoučký", "\u2028 \0 \"\\", "\ud83d\ude00", "\udc80", "😀"],
    "bytes": [b"", bytes(range(256))],
    "containers": [[], (), set(), {}, [[]], ([],), {"a": ()}, (1,), (1, (2, (3,)))],
    "set": {1, "a", (2, 3), None, 2.5},
    "keys": {1: "a", "1": "b", (0, "x"): "c", None: "d", 2.5: "e", b"k": "f", True + 1: "g", (): "h"},
    "keys of other types": {
        torch.float16: 1, torch.device("cpu"): 2, Path("/a"): 3, np.int64(5): 4, datetime.timedelta(1): 5, 1j: 6,
        math.inf: 7, 2**70: 8, torch.Size([1]): 9, "\ud83d\ude00": 10, "ž": 11,
    },
    "names in other scripts": {"ž": 1, "\ud83d\ude00": 2, "😀": 3, "a": 4},
    "order": {"b": 1, "a": 2, "c": {"z": 1, "y": 2}},
    "dicts": [OrderedDict([("b", 1), (2, [3])]), Counter({"a": 3, 7: 1}), OrderedDict()],
    "reserved key": {TAG: "tensor", "index": 0},
    "reserved key within": [{TAG: {TAG: None}, 3: 4}, {"x": {TAG: "dict", "items": []}}],
    "torch": [torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.float8_e5m2, torch.device("cuda:1")],
    "arrays": [
        np.array([[1, 0, 2], [3, 0, 4]]).astype(dtype)
        for dtype in ("<f4", ">f8", "<u2", "int8", "bool", "<c8", "<f2", "longdouble")
    ],
    "odd arrays": [np.array(3.5), np.empty((0, 4)), np.arange(12).reshape(3, 4).T, np.arange(9)[::-2]],
    "numpy scalars": [np.float32(0.1), np.int64(-1), np.bool_(True), np.complex64(1j), np.float64(math.nan)],
    "paths": [Path("/a/b"), Path("relative"), Path("with \udc80 byte"), Path("\ud83d\ude00")],
    "times": [
        datetime.timedelta(-3, 5, 7), datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    ],
    "the same twice": [SHARED, SHARED, [SHARED[0]], SHARED[1], SHARED[1]],
    "random states": [random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state()],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_every_type_comes_back(name):
    back, left_out = through_json(VALUES[name])
    assert left_out == []
    assert same(VALUES[name], back)


def test_what_changes_its_type_is_what_always_did():
    value = {
        "default": defaultdict(list, {"a": [1], 2: 3}),
        "path": PurePosixPath("a"),
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    back, left_out = through_json(value)
    assert left_out == []
    assert same(back, {"default": {"a": [1], 2: 3}, "path": Path("a"), "p": torch.ones(2)})


@pytest.mark.parametrize("count", [100, 100_000])  # as text, as a tensor
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<u2", "bool", "<c16", "longdouble"])
def test_arrays_of_any_size(count, dtype):
    array = (np.arange(count) % 2).astype(dtype).reshape(2, -1)
    fixed = array.copy()
    fixed.flags.writeable = False
    value = [array, array[:, ::3], array.T, array.reshape(-1)[::-2], fixed, array]
    skeleton, tensors, _ = pack(value)
    assert len(tensors) == (5 if count == 100_000 else 0)  # `array` once
    assert fixed.ctypes.data not in {tensor.data_ptr() for tensor in tensors}, "it must not be written to"
    back = unpack(json.loads(json.dumps(skeleton)), tensors)
    assert same(value, back)
    back[0][:] = 0
    assert not same(back[0], array), "the array that came back is another one, in memory of its own"


def test_a_large_array_is_not_copied_nor_text():
    array = np.zeros(1 << 20)
    skeleton, tensors, _ = pack({"a": array})
    assert tensors[0].data_ptr() == array.ctypes.data
    assert len(json.dumps(skeleton)) < 1000


# Tensors


def test_tensors_are_taken_as_they_are_and_named_in_order():
    a, b, c = torch.ones(2), torch.nn.Parameter(torch.zeros(3)), torch.nn.Buffer(torch.ones(1))
    skeleton, tensors, left_out = pack({"x": a, "y": [b, (c,)]})
    assert skeleton["x"] == {TAG: "tensor", "index": 0}
    assert [id(t) for t in tensors] == [id(a), id(b), id(c)]
    assert left_out == []


def test_tied_tensors_stay_tied():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    value = {"a": weight, "b": weight, "c": weight.detach(), "d": weight.data, "e": weight.view(4, 4)}
    skeleton, tensors, _ = pack(value)
    assert len(tensors) == 1
    back = unpack(skeleton, [torch.ones(4, 4)])
    assert len({id(tensor) for tensor in back.values()}) == 1


def test_what_only_looks_tied_is_told_apart():
    base = torch.arange(16.0)
    z = torch.tensor([1 + 1j, 2 - 2j])
    different = [
        base, base[:8], base[8:], base.view(4, 4), base.view(4, 4).t(), base.view(torch.int32), base.view(2, 8),
        base[0], base[:1], base[::2], torch.arange(16.0), z, z.conj(), z.conj().imag, z.imag,
    ]  # fmt: skip
    assert len(pack(different)[1]) == len(different)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_without_an_address(device):
    a, b = (
        torch.empty(0 if device == "cpu" else 4, device=device),
        torch.empty(0 if device == "cpu" else 4, device=device),
    )
    _, tensors, _ = pack([a, b, a, a.detach()])
    assert [id(t) for t in tensors] == [id(a), id(b)]


def test_tensors_of_every_kind_are_listed_for_others_to_judge():
    class Special(torch.Tensor):
        pass

    sparse = torch.eye(3).to_sparse()
    special = torch.ones(2).as_subclass(Special)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    skeleton, tensors, left_out = pack([sparse, special, nested, sparse, torch.eye(3).to_sparse_csr()])
    assert [type(t) for t in tensors] == [torch.Tensor, Special, torch.Tensor, torch.Tensor]
    assert skeleton[0] == skeleton[3]
    assert left_out == []


def test_a_tensor_in_a_set_comes_back():
    back, _ = through_json({"s": {torch.ones(1)}})
    assert same(next(iter(back["s"])), torch.ones(1))


# What is left out


class Pickled:
    pass


Point = namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED")


def test_what_is_left_out_is_what_to_plain_leaves_out_by_the_same_names():
    value = {
        "callbacks": {"Mine": {"encoder": Pickled(), "kept": 1, "list": [Pickled(), 2, (Pickled(),)]}},
        3: {"x": [0, {"y": Pickled()}]},
        "point": Point(1, 2),
        "colour": Colour.RED,
        "words": np.array(["a"]),
        "frozen": frozenset([1]),
        "set": {1, Point(3, 4)},
        "date": datetime.date(2026, 1, 1),
        "subclass": type("MyDict", (dict,), {})({"a": 1}),
    }
    plain, expected = to_plain(value)
    back, left_out = through_json(value)
    assert left_out == expected
    assert same(from_plain(plain), back)
    for single in (Pickled(), [Pickled()], [[{"a": Pickled()}]]):
        plain, expected = to_plain(single)
        assert (through_json(single)) == (from_plain(plain), expected)


def test_keys_that_are_not_plain_are_left_out_by_name():
    tensor = torch.ones(1)
    value = {"a": {Pickled: 1, Colour.RED: 2, tensor: 3, (1, frozenset()): 4, "kept": 5, 6: 7}}
    back, left_out = through_json(value)
    assert back == {"a": {"kept": 5, 6: 7}}
    assert len(left_out) == 4
    assert all(line.startswith("a.") and "(key of type " in line for line in left_out)
    assert pack({tensor: 1})[1] == []


def test_what_contains_itself_is_left_out_where_it_begins_again():
    loop = [1, 2]
    loop.append({"again": loop})
    back, left_out = through_json({"loop": loop, "twice": [(1,)] * 2})
    assert back == {"loop": [1, 2, {}], "twice": [(1,), (1,)]}
    assert left_out == ["loop[2].again (contains itself, or is too deep)"]


def test_what_is_too_deep_for_json_is_left_out():
    value = deep = []
    for _ in range(5000):
        value.append([])
        value = value[0]
    back, left_out = through_json({"deep": deep, "kept": 1})
    assert back["kept"] == 1
    assert len(left_out) == 1
    assert left_out[0].startswith("deep[0][0]")
    key = ()
    for _ in range(98):
        key = (key,)
    assert through_json({key: 1})[0] == {key: 1}


# Nothing is shared


def test_the_skeleton_shares_nothing_that_may_change():
    inner = {"l": [1, 2, 3], "d": {"x": [1.5]}, "a": np.arange(5), "o": OrderedDict(a=[1]), "s": {1}, "e": []}
    state = {"inner": inner, "ints": list(range(700))}
    skeleton, tensors, _ = pack(state)
    before = json.dumps(skeleton)
    inner["l"].append(4)
    inner["d"]["x"][0] = 2.5
    inner["a"][:] = 9
    inner["o"]["a"].append(2)
    inner["s"].add(2)
    inner["e"].append(1)
    state["ints"][0] = -1
    inner["new"] = 1
    assert json.dumps(skeleton) == before
    assert tensors == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_stays_as_it_was(enabled):
    seen = []

    class Seeing(PurePosixPath):
        def __str__(self):
            seen.append(gc.isenabled())
            return "x" if len(seen) == 1 else 1 / 0

    try:
        (gc.enable if enabled else gc.disable)()
        pack([Seeing("a")])
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            pack([Seeing("a")])
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False, False]


def test_unpacking_twice_gives_two_values():
    skeleton, tensors, _ = pack({"l": [1], "d": {"a": 1}})
    first, second = unpack(skeleton, tensors), unpack(skeleton, tensors)
    first["l"].append(2)
    first["d"]["b"] = 2
    assert second == {"l": [1], "d": {"a": 1}}


# Any tree


def random_value(rng, depth=0):
    kinds = ["scalar"] * 6 + ["list", "tuple", "dict", "odd dict", "ordered", "set"] * (depth < 5)
    kind = rng.choice(kinds)
    size = rng.randrange(5)
    if kind == "scalar":
        leaf = rng.choice([value for values in VALUES.values() if isinstance(values, list) for value in values])
        return rng.choice([leaf, torch.full((size,), rng.random()), Pickled()]) if rng.random() < 0.3 else leaf
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(random_value(rng, depth + 1) for _ in range(size))
    if kind == "set":
        return {rng.choice([rng.randrange(99), "t", (1, 2), None]) for _ in range(size)}
    keys = [
        rng.choice(["a", "b", TAG, "ž", "k"]) if kind == "dict" else rng.choice([1, (2, "x"), "c", b"d", None])
        for _ in range(size)
    ]
    return (OrderedDict if kind == "ordered" else dict)((key, random_value(rng, depth + 1)) for key in keys)


def holds_tag(value):
    if isinstance(value, dict):
        return TAG in value or any(map(holds_tag, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_tag, value))


def test_random_trees_are_packed_as_to_plain_would():
    rng = random.Random(20260101)
    leaves = 0
    for _ in range(400):
        value = random_value(rng)
        back, left_out = through_json(value)
        if not holds_tag(value):  # to_plain takes a reserved key for its own
            plain, expected = to_plain(value)
            assert left_out == expected
            assert same(from_plain(plain), back)
        again, _ = through_json(back)
        assert same(again, back)
        leaves += len(left_out)
    assert leaves > 50, "the trees have something to leave out"


# Malformed skeletons


@pytest.mark.parametrize(
    "skeleton",
    [
        {TAG: "tensor"},
        {TAG: "tensor", "index": 2},
        {TAG: "tensor", "index": -1},
        {TAG: "tensor", "index": True},
        {TAG: "tensor", "index": "0"},
        {TAG: "tensor", "index": 1.0},
        {TAG: "no such type"},
        {TAG: ["list"]},
        {TAG: 7},
        {TAG: None},
        {TAG: "dict"},
        {TAG: "dict", "items": [[1]]},
        {TAG: "dict", "items": [[[1], 2]]},
        {TAG: "dict", "items": 7},
        {TAG: "tuple", "items": None},
        {TAG: "set", "items": [[]]},
        {TAG: "bytes", "data": "not base64!"},
        {TAG: "bytes", "data": 3},
        {TAG: "ndarray", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {TAG: "ndarray", "dtype": "<f4", "shape": [3], "data": "AAAAAAAAAAA="},
        {TAG: "ndarray", "dtype": "<f4", "shape": [2], "data": {TAG: "tensor", "index": 9}},
        {TAG: "ndarray", "dtype": "no such", "shape": [2], "data": "AAAAAAAAAAA="},
        {TAG: "scalar", "dtype": "<f4", "data": ""},
        {TAG: "dtype", "data": "nn"},
        {TAG: "dtype", "data": 3},
        {TAG: "device", "data": "no such"},
        {TAG: "float", "data": "x"},
        {TAG: "int", "data": "0xg"},
        {TAG: "complex", "data": ["0x1p0"]},
        {TAG: "timedelta", "data": ["a"]},
        {TAG: "datetime", "data": "yesterday"},
        {TAG: "size", "data": [1.5]},
        {TAG: "str", "data": "/w=="},
        {TAG: "path", "data": None},
        [[[{TAG: "tensor", "index": 5}]]],
    ],
    ids=json.dumps,
)
def test_a_malformed_skeleton_is_a_value_error(skeleton):
    with pytest.raises(ValueError):
        unpack(skeleton, [torch.ones(1), torch.ones(2)])


def test_a_bottomless_skeleton_is_a_value_error():
    skeleton = []
    for _ in range(100_000):
        skeleton = [skeleton]
    with pytest.raises(ValueError):
        unpack(skeleton, [])
