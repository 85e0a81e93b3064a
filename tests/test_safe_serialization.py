"""The codec: what is kept comes back equal from the files of either tier; what is not is left out whole, by name."""

import datetime
import enum
import gc
import json
import math
import random
import re
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
import torch

from lightning_resilience.checkpoint import checkpoint_file, shard
from lightning_resilience.checkpoint.safe_serialization import (
    MISSING,
    Entries,
    content,
    from_safe,
    is_rewritten,
    pack,
    safe_form,
    to_safe,
    unpack,
)

TAG = "__resilience_type__"


def through_json(value):
    """(what comes back, what was left out), the way a shard keeps it: strict JSON, tensors beside it."""
    structure, tensors, left_out = pack(value)
    return unpack(json.loads(json.dumps(structure, allow_nan=False)), tensors), left_out


def through_file(value, folder):
    """The same through a file of the run directory, as a save behind the training writes it and a resume loads it."""
    structure, tensors, left_out = pack(value)
    checkpoint_file.save(safe_form(structure, tensors), folder / "file", read_back=True)
    return from_safe(checkpoint_file.load(folder / "file")), left_out


def through_shard(value):
    """The same through a part of a local checkpoint."""
    structure, tensors, left_out = pack(value)
    specs, size = shard.arrange(tensors)
    memory = torch.zeros(size, dtype=torch.uint8)
    for tensor, spec in zip(tensors, specs, strict=True):
        shard.view(memory, spec).copy_(tensor)
    about = shard.Identity("run", 0, 0, "generation", "part", 1, {})
    trailer = shard.seal(memory, specs, about, structure, size)
    header, loaded = shard.load_bytes(torch.cat([memory, torch.frombuffer(bytearray(trailer), dtype=torch.uint8)]))
    return unpack(header.structure, loaded), left_out


def same(a, b):
    """Equal in value and type, to the bit, and in the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad) and torch.equal(a, b)
    if isinstance(a, dict):
        if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
            return False
        if not same(getattr(a, "__dict__", None), getattr(b, "__dict__", None)):
            return False
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
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
    "arrays of words and times": [
        np.array(["a", "ž\0b", ""]), np.array([b"x", b""]), np.array([""]), np.array(["2026-01-02", "NaT"], "M8[ns]"),
        np.array([1, 2], "m8[s]"),
    ],
    "words and times of NumPy": [
        np.str_("ab"), np.str_(""), np.bytes_(b"x"), np.datetime64("2026-01-02"), np.timedelta64(3, "h"),
    ],
    "odd arrays": [np.array(3.5), np.empty((0, 4)), np.arange(12).reshape(3, 4).T, np.arange(9)[::-2]],
    "numpy scalars": [np.float32(0.1), np.int64(-1), np.bool_(True), np.complex64(1j), np.float64(math.nan)],
    "paths": [Path("/a/b"), Path("relative"), Path("with \udc80 byte"), Path("\ud83d\ude00"), PurePosixPath("a"),
              PureWindowsPath("C:\\a")],
    "a set of paths": {Path("a"), PurePosixPath("b"), np.int64(3), (1, np.float32(2)), frozenset({Path("c")}), "d"},
    "frozensets": [frozenset(), frozenset({1, "a", (2, 3)}), {frozenset({1}): {frozenset({np.int8(1)})}}],
    "counts of NumPy's numbers": [
        Counter(np.array([1, 2, 2])), dict(zip(*np.unique(np.array([3.5, 1.5, 1.5]), return_counts=True), strict=True)),
    ],
    "dicts that know what is not there": [
        defaultdict(int, {"a": 1}), defaultdict(list, {1: [2]}), defaultdict(dict), defaultdict(set, a={Path("b")}),
        defaultdict(float), defaultdict(str), defaultdict(None, {"ž": 1}), defaultdict(Counter, {(1,): Counter("ab")}),
    ],
    "windows": [deque([1, 2, 3], maxlen=3), deque(), deque([Path("a"), {"b": 1}])],
    "bytes that change": [bytearray(), bytearray(b"a\0")],
    "keys in both forms": {Path("a"): {TAG: {Path("b"): 1}}, TAG: {TAG: {1: Path("c")}}},
    "times": [
        datetime.timedelta(-3, 5, 7), datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    ],
    "the same twice": [SHARED, SHARED, [SHARED[0]], SHARED[1], SHARED[1]],
    "random states": [random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state()],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_every_type_comes_back(name, tmp_path):
    for through in (through_json, through_shard, lambda value: through_file(value, tmp_path)):
        back, left_out = through(VALUES[name])
        assert left_out == []
        assert same(VALUES[name], back)


def test_tensors_and_parameters_come_back_as_such(tmp_path):
    with_attribute = torch.ones(2)
    with_attribute.hook = lambda: None
    value = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "needs grad": torch.ones(3, requires_grad=True),
        "t": torch.ones(1),
        "attribute": with_attribute,
        "attribute of a parameter": torch.nn.Parameter(torch.zeros(1)),
    }
    value["attribute of a parameter"].hook = lambda: None
    for through in (through_shard, lambda value: through_file(value, tmp_path)):
        back, left_out = through({**value, "has a history": value["p"] * 2})
        assert left_out == []
        assert same(back.pop("has a history"), torch.full((2,), 2.0))
        assert same(value, back)
        assert not vars(back["attribute"])


def test_the_versions_of_what_a_module_is_made_of_are_kept(tmp_path):
    """Without ``_metadata`` a module whose loading depends on its version cannot resume."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).state_dict()
    for through in (through_shard, lambda value: through_file(value, tmp_path)):
        for value in (state, Entries(state)):
            back, left_out = through({"state_dict": value})
            assert left_out == []
            assert same(state, back["state_dict"])
            assert back["state_dict"]._metadata["0"] == {"version": 2}


@pytest.mark.parametrize("count", [100, 100_000])  # as text, as a tensor
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<u2", "bool", "<c16", "longdouble"])
def test_arrays_of_any_size(count, dtype):
    array = (np.arange(count) % 2).astype(dtype).reshape(2, -1)
    fixed = array.copy()
    fixed.flags.writeable = False
    value = [array, array[:, ::3], array.T, array.reshape(-1)[::-2], fixed, array]
    structure, tensors, _ = pack(value)
    assert len(tensors) == (5 if count == 100_000 else 0)  # `array` once
    assert fixed.ctypes.data not in {tensor.data_ptr() for tensor in tensors}, "it must not be written to"
    back = unpack(json.loads(json.dumps(structure)), tensors)
    assert same(value, back)
    back[0][:] = 0
    assert not same(back[0], array), "the array that came back is another one, in memory of its own"


def test_a_large_array_is_not_copied_nor_text():
    array = np.zeros(1 << 20)
    structure, tensors, _ = pack({"a": array})
    assert tensors[0].data_ptr() == array.ctypes.data
    assert len(json.dumps(structure)) < 1000


# Tensors


def test_tensors_are_taken_as_they_are_and_named_in_order():
    a, b, c = torch.ones(2), torch.nn.Parameter(torch.zeros(3)), torch.nn.Buffer(torch.ones(1))
    structure, tensors, left_out = pack({"x": a, "y": [b, (c,)]})
    assert structure["x"] == {TAG: "tensor", "index": 0}
    assert [t.data_ptr() for t in tensors] == [a.data_ptr(), b.data_ptr(), c.data_ptr()]
    assert not any(t.requires_grad for t in tensors)
    assert left_out == []


def test_tied_tensors_stay_tied():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    value = {"a": weight, "b": weight, "c": weight.detach(), "d": weight.data, "e": weight.view(4, 4)}
    structure, tensors, _ = pack(value)
    assert len(tensors) == 1
    back = unpack(structure, [torch.ones(4, 4)])
    assert len({tensor.data_ptr() for tensor in back.values()}) == 1
    sparse = torch.eye(2).to_sparse_csr()  # has no strides to compare
    assert len(pack([sparse, sparse])[1]) == 1


def test_what_torch_reads_safely_is_saved_as_it_is():
    value = [
        b"x", bytearray(b"x"), 2**70, float("inf"), 1j, torch.Size([2]), torch.float16, torch.device("cpu"), (1, "a"),
        {1, 2}, {3: (4,)}, OrderedDict(a=1), Counter(a=1),
    ]  # fmt: skip
    saved, left_out = to_safe(value)
    assert left_out == []
    assert saved == value
    assert [*map(type, saved)] == [*map(type, value)]
    assert not is_rewritten(value)


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


class Special(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    """Has no memory of its own, as quantized and distributed tensors."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    def __init__(self, tensor):
        self.inner = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_tensors_of_torch_are_listed_for_others_to_judge(tmp_path):
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    value = [sparse, nested, sparse, torch.eye(3).to_sparse_csr()]
    structure, tensors, left_out = pack(value)
    assert len(tensors) == 3
    assert structure[0] == structure[2]
    assert left_out == []
    back, _ = through_file(value, tmp_path)
    assert torch.equal(back[0].to_dense(), torch.eye(3))
    assert torch.equal(back[3].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).as_subclass(Special), Wrapped(torch.ones(2)), torch.nn.parameter.UninitializedParameter()],
    ids=lambda tensor: type(tensor).__name__,
)
def test_tensors_of_other_classes_are_left_out_by_name(tensor):
    assert through_json(Entries({"a": {"b": tensor, "c": 1}, "d": 2})) == (
        {"d": 2},
        [f"a.b ({type(tensor).__module__}.{type(tensor).__qualname__})"],
    )


def test_the_content_of_a_tensor_of_another_class_can_be_had_where_there_is_any():
    special, plain_one = torch.ones(2).as_subclass(Special), torch.ones(2)
    assert type(content(special)) is torch.Tensor
    assert content(special).data_ptr() == special.data_ptr()
    for tensor in (
        plain_one,
        torch.nn.Parameter(plain_one),
        Wrapped(plain_one),
        torch.nn.parameter.UninitializedBuffer(),
    ):
        assert content(tensor) is tensor


def test_a_tensor_in_a_set_comes_back():
    back, _ = through_json({"s": {torch.ones(1)}})
    assert same(next(iter(back["s"])), torch.ones(1))


# What is left out


class Pickled:
    pass


Point = namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED")


UNKEPT = {
    "object": Pickled(),
    "function": test_every_type_comes_back,
    "lambda": lambda: 1,
    "class": Pickled,
    "named tuple": Point(1, 2),
    "enumeration": Colour.RED,
    "array of objects": np.array([Pickled()]),
    "array of records": np.zeros(1, [("a", int)]),
    "a matrix": np.matrix([1]),
    "a masked array": np.ma.masked_array([1], [True]),
    "dict of a class of its own": type("MyDict", (dict,), {})({"a": 1}),
    "words of a class of its own": type("MyStr", (str,), {})("a"),
    "path of a class of its own": type("MyPath", (PurePosixPath,), {})("a"),
    "dict that makes its own": defaultdict(lambda: 1),
    "time in a zone of its own": datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "tensor of a class of its own": torch.ones(2).as_subclass(Special),
    "uninitialized": torch.nn.parameter.UninitializedBuffer(),
    "set of points": {1, Point(3, 4)},
    "key: class": {Pickled: 1},
    "key: enumeration": Counter([Colour.RED]),
    "key: tensor": {torch.ones(1): 1},
    "key: within": {(1, frozenset([Colour.RED])): 1},
    "attribute of an ordered dict": OrderedDict(a=1),
}  # fmt: skip
UNKEPT["attribute of an ordered dict"].attribute = Pickled()


@pytest.mark.parametrize("name", UNKEPT)
def test_what_holds_something_that_only_a_pickle_keeps_is_left_out_whole(name, tmp_path):
    bad, large = UNKEPT[name], torch.ones(2)
    for within in (bad, [1, bad], (bad,), {"a": 1, "b": [{"c": bad}], "t": large}, deque([bad]), OrderedDict(a=bad)):
        assert through_json(within)[0] is None
        assert pack(within)[1] == [], "nor is anything that belongs to it"
        value = Entries(
            {"bad": within, "good": [large], "deep": Entries({"bad": within, "good": 2}), "missing": MISSING}
        )
        for through in (through_json, through_shard, lambda value: through_file(value, tmp_path)):
            back, left_out = through(value)
            expected = {"good": [large], "deep": {"good": 2}, "missing": [["bad"], ["deep", "bad"]]}
            assert same(back, expected)
            assert len(left_out) == 2
            assert left_out[0].startswith("bad")
            assert left_out[1].startswith("deep.bad")
        assert len(pack(value)[1]) == 1


def test_keys_of_entries_are_left_out_with_them():
    back, left_out = through_json(Entries({Pickled: 1, "ž": 2, 3: 4, "m": MISSING}))
    assert back == {"ž": 2, 3: 4, "m": []}
    assert left_out == [f"{Pickled} (key of type abc.ABCMeta)".replace("abc.ABCMeta", "builtins.type")]


def test_paths_and_names_of_what_is_missing_begin_at_the_outermost_entries():
    value = {"part": 1, "rest": Entries({"m": MISSING, "\ud83d": Pickled(), "list": [Entries({"b": Pickled()})]})}
    back, left_out = through_json(value)
    assert back == {"part": 1, "rest": {"m": [["\ud83d"], ["list", 0, "b"]], "list": [{}]}}
    assert [name.partition(" (")[0] for name in left_out] == ["\ud83d", "list[0].b"]


def test_entries_beside_each_other_name_what_is_in_them():
    back, left_out = through_json([Entries({"a": Pickled()}), Entries({"b": Pickled(), "m": MISSING})])
    assert back == [{}, {"m": [["a"], ["b"]]}]
    assert [name.partition(" (")[0] for name in left_out] == ["a", "b"]


def test_what_contains_itself_is_left_out():
    loop = [1, 2]
    loop.append({"again": loop})
    back, left_out = through_json(Entries({"loop": loop, "twice": [(1,)] * 2}))
    assert back == {"twice": [(1,), (1,)]}
    assert left_out == ["loop[2].again (contains itself, or is too deep)"]


def test_what_is_too_deep_for_json_is_left_out(tmp_path):
    value = deep = []
    for _ in range(5000):
        value.append([])
        value = value[0]
    back, left_out = through_json(Entries({"deep": deep, "kept": 1}))
    assert back == {"kept": 1}
    assert len(left_out) == 1
    assert left_out[0].startswith("deep[0][0]")
    key, value = (), {}
    for _ in range(97):
        key, value = (key,), {Path("a"): value}
    for through in (through_json, through_shard, lambda value: through_file(value, tmp_path)):
        assert through([{key: 1}, value]) == ([{key: 1}, value], [])


# Files of earlier versions


def test_the_plain_form_of_earlier_versions_is_read():
    """As ``to_safe`` of version 0.1 wrote it: its dicts had any keys, and no type of theirs but what torch knows."""
    older = {
        "array": {TAG: "ndarray", "dtype": "<i8", "shape": [1, 2], "data": b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0"},
        "scalar": {TAG: "scalar", "dtype": "<f4", "data": b"\0\0\0?"},
        "path": {TAG: "path", "data": "a/b"},
        "times": [{TAG: "timedelta", "data": [1, 2, 3]}, {TAG: "datetime", "data": "2026-01-02T00:00:00"}],
        "counts": Counter({"a": 2}),
        "ordered": OrderedDict([((1, "x"), {TAG: "path", "data": "c"})]),
        "containers": ({1, 2}, (1, [2.5, None]), {3: b"x", 1.5: 2j}),
        "torch": [torch.Size([2]), torch.float16, torch.ones(2)],
    }
    assert same(
        from_safe(older),
        {
            "array": np.array([[1, 2]]),
            "scalar": np.float32(0.5),
            "path": Path("a/b"),
            "times": [datetime.timedelta(1, 2, 3), datetime.datetime(2026, 1, 2)],
            "counts": Counter({"a": 2}),
            "ordered": OrderedDict([((1, "x"), Path("c"))]),
            "containers": ({1, 2}, (1, [2.5, None]), {3: b"x", 1.5: 2j}),
            "torch": [torch.Size([2]), torch.float16, torch.ones(2)],
        },
    )


@pytest.mark.parametrize("value", [{TAG: "no such type"}, {TAG: "path"}, [({TAG: "dict", "items": 3},)]])
def test_what_is_no_plain_form_is_a_value_error(value):
    with pytest.raises(ValueError, match="structure"):
        from_safe(value)


# Nothing is shared


def test_the_skeleton_shares_nothing_that_may_change():
    inner = {"l": [1, 2, 3], "d": {"x": [1.5]}, "a": np.arange(5), "o": OrderedDict(a=[1]), "s": {1}, "e": []}
    state = {"inner": inner, "ints": list(range(700))}
    structure, tensors, _ = pack(state)
    before = json.dumps(structure)
    inner["l"].append(4)
    inner["d"]["x"][0] = 2.5
    inner["a"][:] = 9
    inner["o"]["a"].append(2)
    inner["s"].add(2)
    inner["e"].append(1)
    state["ints"][0] = -1
    inner["new"] = 1
    assert json.dumps(structure) == before
    assert tensors == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_stays_as_it_was(enabled):
    seen = []

    class Seeing(dict):
        def __init__(self, fails):
            super().__init__()
            self.fails = fails

        def items(self):
            seen.append(gc.isenabled())
            return 1 / 0 if self.fails else ()

    try:
        (gc.enable if enabled else gc.disable)()
        pack(Entries(Seeing(False)))
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            pack(Entries(Seeing(True)))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False, False]


def test_unpacking_twice_gives_two_values():
    structure, tensors, _ = pack({"l": [1], "d": {"a": 1}})
    first, second = unpack(structure, tensors), unpack(structure, tensors)
    first["l"].append(2)
    first["d"]["b"] = 2
    assert second == {"l": [1], "d": {"a": 1}}


# Any state

LEAVES = [leaf for values in VALUES.values() if isinstance(values, list) for leaf in values]
KEYS = ["a", "ž", "", TAG, 1, -2.5, True, None, b"k", (1, "x"), np.int64(7), np.float32(0.5), Path("p"), frozenset({2}),
        datetime.timedelta(1), (Path("q"), np.int8(3)), np.str_("n"), 2**80, "\ud83d"]  # fmt: skip


def random_value(rng, depth=0):
    """A value such as a user keeps, and whether it can be kept."""
    kinds = (
        ["leaf"] * 5
        + ["tensor"]
        + ["list", "tuple", "dict", "ordered", "default", "count", "set", "deque"] * (depth < 4)
    )
    kind, size = rng.choice(kinds), rng.randrange(4)
    if kind == "leaf":
        if rng.random() < 0.1:
            return rng.choice(list(UNKEPT.values())), False
        return rng.choice(LEAVES), True
    if kind == "tensor":
        tensor = torch.full((size,), rng.random())
        return rng.choice([tensor, torch.nn.Parameter(tensor), tensor.requires_grad_(), tensor[1:].detach()]), True
    if kind == "set":
        return rng.choice([set, frozenset])(rng.sample(KEYS, size)), True
    if kind == "count":
        return Counter({key: rng.randrange(9) for key in rng.sample(KEYS, size)}), True
    items = [random_value(rng, depth + 1) for _ in range(size)]
    values, kept = [item for item, _ in items], all(good for _, good in items)
    if kind in ("list", "tuple", "deque"):
        return {"list": list, "tuple": tuple, "deque": deque}[kind](values), kept
    keyed = dict(zip(rng.sample(KEYS if rng.random() < 0.5 else ["a", "b", "c", "d"], size), values, strict=True))
    if kind == "default":
        return defaultdict(rng.choice([int, list, dict, None]), keyed), kept
    return OrderedDict(keyed) if kind == "ordered" else keyed, kept


def test_what_is_said_to_be_saved_loads_equal_and_all_else_is_named(tmp_path):
    rng = random.Random(20260101)
    lost = 0
    for _ in range(150):
        state = {f"entry {number}": random_value(rng) for number in range(6)}
        value = Entries({**{name: each for name, (each, _) in state.items()}, "missing": MISSING})
        expected = {name: each for name, (each, kept) in state.items() if kept}
        expected["missing"] = [[name] for name, (_, kept) in state.items() if not kept]
        for through in (through_shard, lambda value: through_file(value, tmp_path)):
            back, left_out = through(value)
            assert same(back, expected)
            assert {re.match(r"entry \d", name)[0] for name in left_out} == {name for (name,) in back["missing"]}
        lost += len(expected["missing"])
    assert 50 < lost < 400, "some of it is left out"


# Malformed structures


@pytest.mark.parametrize(
    "structure",
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
def test_a_malformed_skeleton_is_a_value_error(structure):
    with pytest.raises(ValueError):
        unpack(structure, [torch.ones(1), torch.ones(2)])


def test_a_bottomless_skeleton_is_a_value_error():
    structure = []
    for _ in range(100_000):
        structure = [structure]
    with pytest.raises(ValueError):
        unpack(structure, [])
