"""What `inspect` says about shards, generations and nodes; and that it says something about anything."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.node_store import NodeStore
from lightning_resilience.checkpoint.safe_serialization import pack, tensor_names
from lightning_resilience.checkpoint.shard import Identity, arrange, seal, view
from lightning_resilience.launch import cli, inspection
from lightning_resilience.launch.inspection import inspect
from tests.test_json_output import parsed


def write(path, tensors=(), structure=None, **identity):
    identity = {"run": "5f3c", "fit": 0, "step": 12, "generation": "1a2b3c4d", "part": path.stem, "world_size": 4,
                "layout": {"kind": "whole", "commons": 2}, **identity}  # fmt: skip
    specs, size = arrange(tensors)
    memory = torch.zeros(size, dtype=torch.uint8)
    for spec, tensor in zip(specs, tensors, strict=True):
        if not tensor.is_meta:
            view(memory, spec).copy_(tensor)
    path.parent.mkdir(parents=True, exist_ok=True)
    trailer = seal(memory, specs, Identity(**identity), structure, size)
    path.write_bytes(memory.numpy().tobytes() + trailer)
    return path


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


STATE = {"state_dict": {"weight": torch.zeros(300, 7), "bias": torch.ones(3)}, "steps": {0: [torch.tensor(2.0)]}}
COMMON = [0, 2]


def write_generation(folder, ranks=(0, 1, 2, 3), commons=(0, 1), **identity):
    structure, tensors, _ = pack(STATE)
    places = [[0, 0], [-1, 0], [1, 0]]
    for rank in ranks:
        write(folder / f"rank-{rank:05d}.shard", [tensors[1]], {"state": structure, "places": places}, **identity)
    for index in commons:
        write(folder / f"common-{index:02d}-of-02.shard", [tensors[COMMON[index]]], **identity)
    return folder


@pytest.fixture
def node(tmp_path):
    """Three generations: one complete, one with what one of two nodes has, one damaged."""
    node = tmp_path / "local_ckpt" / "n1" / "5f3c" / "fit-000"
    write_generation(node / "step-000000000012-1a2b3c4d")
    write_generation(node / "step-000000000014-00000002", (0, 1), step=14, generation="00000002")
    write_generation(node / "step-000000000016-00000003", (0, 1), (0,), step=16, generation="00000003")
    flip(node / "step-000000000016-00000003" / "common-00-of-02.shard", 100)
    (node / ".spare-rank-00000.5e6f7a8b").write_bytes(b"\0" * 100)
    (node / ".writer-5e6f7a8b").touch()
    (node / "quarantine").mkdir()
    (node / "quarantine" / "rank-00001.shard.12345678").write_bytes(b"x")
    (node / "quarantine" / "rank-00001.shard.12345678.reason.txt").write_text("bad")
    return node


def columns(text, first):
    """The line of a table that begins with ``first``, in cells."""
    return next(line for line in text.splitlines() if line.strip().split("  ")[0] == first).split()


def test_the_same_for_programs(node):
    damaged = node / "step-000000000016-00000003"
    views = [inspect(path, as_json=True) for path in (node, damaged / "rank-00000.shard", damaged / "no.shard")]
    assert [good for _, good in views] == [False, True, False]
    folder, intact, missing = parsed("inspect", *(text for text, _ in views))
    newest, _, oldest = folder["generations"]
    assert [newest["identity"]["step"], oldest["identity"]["step"]] == [16, 12]
    assert [Path(each["path"]).name for each in newest["shards"] if each["problem"]] == ["common-00-of-02.shard"]
    assert (oldest["needed"], oldest["missing"], oldest["missing_shards"]) == (6, 0, [])
    assert (len(folder["quarantine"]), folder["shard"]) == (1, None)
    assert [each["name"] for each in intact["shard"]["tensors"]] == ["state_dict.bias"]
    assert (missing["shard"]["identity"], missing["shard"]["tensors"]) == (None, [])


# A shard


def test_a_shard(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    path = folder / "rank-00002.shard"
    text, good = inspect(path)
    assert good
    lines = text.splitlines()
    assert lines[:2] == [str(path), "intact: yes"]
    header = shard.read_identity(path)
    expected = {
        "run": "5f3c", "fit": "0", "step": "12", "generation": "1a2b3c4d", "part": "rank-00002", "world size": "4",
        "layout": "kind: whole, commons: 2", "tensors": "1, 12 bytes", "digest": header.digest,
        "created": header.created, "torch": torch.__version__,
    }  # fmt: skip
    for name, value in expected.items():
        assert f"{name:<10}  {value}" in lines
    assert columns(text, "size")[-2:] == [f"({path.stat().st_size}", "bytes)"]
    assert lines[-2:] == [
        "tensor  name             type     shape  size      from byte",
        "     0  state_dict.bias  float32      3  12 bytes         64",
    ]


def test_the_names_of_common_tensors_come_from_a_part_beside(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    text, _ = inspect(folder / "common-00-of-02.shard")
    assert columns(text, "0") == ["0", "state_dict.weight", "float32", "300x7", "8.2", "KiB", "64"]
    text, _ = inspect(folder / "common-01-of-02.shard")
    assert columns(text, "0")[:3] == ["0", "steps.0[0]", "float32"]
    for rank in range(4):
        (folder / f"rank-{rank:05d}.shard").unlink()
    text, good = inspect(folder / "common-00-of-02.shard")
    assert good
    assert columns(text, "0") == ["0", "float32", "300x7", "8.2", "KiB", "64"]


def test_the_largest_tensors_come_first(tmp_path):
    tensors = [torch.zeros(size, dtype=torch.int8) for size in range(100)]
    tensors.append(torch.empty(10**9, device="meta"))
    text, good = inspect(write(tmp_path / "rank-00000.shard", tensors))
    assert good
    rows = text.splitlines()[text.splitlines().index("intact: yes") :]
    rows = rows[[row.startswith("tensor ") for row in rows].index(True) + 1 :]
    assert [row.split()[0] for row in rows[:-1]] == [str(index) for index in range(99, 79, -1)]
    assert rows[-1] == "... and 81 smaller ones"
    text, _ = inspect(write(tmp_path / "rank-00000.shard", tensors[-1:]))
    assert columns(text, "0") == ["0", "float32", "1000000000", "meta", "64"]


@pytest.mark.parametrize("place", ["data", "header", "footer", "cut"])
def test_a_damaged_shard(tmp_path, place):
    path = write(tmp_path / "rank-00000.shard", [torch.ones(5)])
    size = path.stat().st_size
    if place == "cut":
        os.truncate(path, size - 9)
    else:
        flip(path, {"data": 70, "header": 200, "footer": size - 1}[place])
    text, good = inspect(path)
    assert not good
    line = text.splitlines()[1]
    assert line.startswith("intact: NO: it") or line.startswith("intact: NO: tensor 0 (float32 of shape [5]")
    assert ("run         5f3c" in text) == (place == "data"), "what is known of it all the same"


def test_a_skeleton_of_somebody_else_has_no_names(tmp_path):
    for structure in (None, 7, [], {"state": 1}, {"state": {"__resilience_type__": "tensor"}, "places": [[-1, 0]]},
                     {"state": [], "places": [[1]]}, {"state": [], "places": 3}):  # fmt: skip
        text, good = inspect(write(tmp_path / "rank-00000.shard", [torch.ones(5)], structure))
        assert good
        assert columns(text, "0") == ["0", "float32", "5", "20", "bytes", "64"]


# A generation


def test_a_complete_generation(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    text, good = inspect(folder)
    assert good
    lines = text.splitlines()
    assert lines[:3] == [
        str(folder),
        "Generation 1a2b3c4d of step 12: fit 0 of run 5f3c, saved by 4 ranks",
        "Layout: kind: whole, commons: 2",
    ]
    assert lines[-1] == "Complete: all of its 6 shards are present and intact."
    assert [line.split()[0] for line in lines[5:11]] == [
        "common-00-of-02", "common-01-of-02", "rank-00000", "rank-00001", "rank-00002", "rank-00003",
    ]  # fmt: skip
    assert all(line.endswith("+00:00  yes") for line in lines[5:11])
    assert len({line.index("yes") for line in lines[5:11]}) == 1, "aligned"


def test_a_generation_of_which_parts_are_elsewhere(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d", (1, 5, 6), (1,), world_size=1024)
    text, good = inspect(folder)
    assert good
    assert text.splitlines()[-5:] == [
        "Missing or damaged: 1022 of 1026 shards. Missing ones may be on other nodes.",
        "  rank-00000",
        "  rank-00002 to rank-00004",
        "  rank-00007 to rank-01023",
        "  1 of common-00-of-02 to common-01-of-02",
    ]


def test_a_generation_without_common_parts(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d", commons=(), layout={"kind": "sharded"})
    assert inspect(folder)[0].splitlines()[-1] == "Complete: all of its 4 shards are present and intact."


def test_a_world_that_cannot_be(tmp_path):
    layout = {"commons": 10**15}
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d", (0, 7), (), world_size=10**15, layout=layout)
    text, good = inspect(folder)
    assert good
    assert "rank-00001 to rank-00006" in text


def test_a_generation_with_bad_parts(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    flip(folder / "rank-00001.shard", 70)
    shutil.copy(folder / "rank-00000.shard", folder / "rank-00002.shard")
    write(folder / "rank-00003.shard", step=13)
    (folder / "common-00-of-02.shard").write_bytes(b"")
    text, good = inspect(folder)
    assert not good
    for name, reason in {
        "rank-00000": "yes",
        "rank-00001": "NO: tensor 0",
        "rank-00002": "NO: it is not the expected one: part is 'rank-00000', not 'rank-00002'",
        "rank-00003": "NO: it is not the expected one: step is 13, not 12",
        "common-00-of-02": "NO: it is empty",
        "common-01-of-02": "yes",
    }.items():
        assert reason in next(line for line in text.splitlines() if line.startswith(name))
    assert "4 of 6 shards" in text
    assert "rank-00001 to rank-00003" in text


@pytest.mark.parametrize(
    "other", [{"run": "ffff"}, {"fit": 1}, {"world_size": 8}, {"layout": {"kind": "sharded", "commons": 2}}]
)
def test_a_stranger_in_a_generation(tmp_path, other):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    write(folder / "rank-00000.shard", **other)
    text, good = inspect(folder)
    assert not good
    assert "it does not match the other shards" in next(
        row for row in text.splitlines() if row.startswith("rank-00000")
    )
    assert text.count("NO: ") == 1
    assert "saved by 4 ranks" in text
    assert "run 5f3c" in text


def test_the_intact_parts_say_whose_a_generation_is(tmp_path):
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d")
    write(folder / "common-00-of-02.shard", step=13, world_size=9)
    text, good = inspect(folder)
    assert not good
    assert "of step 12: fit 0 of run 5f3c, saved by 4 ranks" in text


def test_a_generation_of_which_nothing_is_intact(tmp_path):
    folder = tmp_path / "step-000000000012-1a2b3c4d"
    folder.mkdir()
    (folder / "rank-00000.shard").write_bytes(b"nothing")
    text, good = inspect(folder)
    assert not good
    assert text.splitlines()[-1].startswith("Its other shards are not known")
    (folder / "rank-00000.shard").unlink()
    assert inspect(folder) == (f"There is no shard of a generation in {folder}.", False)


def test_many_parts_are_not_all_listed_but_every_bad_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "_MAX_SHARDS", 3)
    folder = write_generation(tmp_path / "step-000000000012-1a2b3c4d", range(10), (), world_size=10, layout={})
    flip(folder / "rank-00009.shard", 70)
    text, _ = inspect(folder)
    assert [line.split()[0] for line in text.splitlines() if "  yes" in line] == ["rank-00000", "rank-00001"]
    assert "rank-00009" in text
    assert "... and 7 more, all of them intact" in text


def test_shards_in_a_folder_of_another_name(tmp_path):
    write_generation(tmp_path / "copied")
    text, good = inspect(tmp_path / "copied")
    assert good
    assert "Complete: all of its 6 shards" in text


# A node


def test_a_node(node):
    text, good = inspect(node)
    assert not good
    lines = text.splitlines()
    assert lines[0] == f"{node}: 3 generations, newest first"
    rows = [line.split() for line in lines[3:6]]
    assert [row[:2] for row in rows] == [["16", "00000003"], ["14", "00000002"], ["12", "1a2b3c4d"]]
    assert "NO: 1 bad" in lines[3]
    assert lines[3].endswith("no: 4 of 6 missing")
    assert lines[4].endswith("yes     no: 2 of 6 missing") or lines[4].split()[-6:-4] == ["yes", "no:"]
    assert lines[5].split()[-2:] == ["yes", "yes"]
    assert any(line.startswith("  step-000000000016-00000003/common-00-of-02.shard: tensor 0") for line in lines)
    assert lines[-1] == f"In quarantine: 1, with the reasons beside them, in {node / 'quarantine'}"


def test_a_node_is_found_from_above(node, tmp_path):
    for above in (node.parent, node.parents[1], node.parents[2], node.parents[3]):
        assert inspect(above) == inspect(node)
    other = shutil.copytree(node, node.parents[2] / "n2" / "5f3c" / "fit-001")
    shutil.rmtree(other / "step-000000000016-00000003")
    text, good = inspect(tmp_path)
    assert not good
    assert [line for line in text.splitlines() if line.endswith("newest first")] == [
        f"{node}: 3 generations, newest first",
        f"{other}: 2 generations, newest first",
    ]


def test_a_node_where_all_is_well(node):
    shutil.rmtree(node / "step-000000000016-00000003")
    assert inspect(node)[1]


# Anything


def test_anything_at_all(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "full" / "a" / "b").mkdir(parents=True)
    (tmp_path / "full" / "step-000000000012.ckpt").write_text("a global checkpoint")
    (tmp_path / "step-000000000012-1a2b3c4d").mkdir()
    (tmp_path / "step-000000000012-1a2b3c4d" / "rank-00000.shard").mkdir()
    os.mkfifo(tmp_path / "step-000000000012-1a2b3c4d" / "rank-00001.shard")
    for path in [
        *tmp_path.iterdir(),
        tmp_path / "missing",
        tmp_path / "text" / "x",
        "\0",
        "x" * 5000,
        ".",
        "/dev/null",
    ]:
        text, good = inspect(path)
        assert not good
        assert text
        assert "\n" not in text or "Generation" in text or "intact: " in text or "shard" in text
    monkeypatch.chdir(tmp_path / "step-000000000012-1a2b3c4d")
    assert "rank-00001" in inspect(".")[0]


def test_storage_that_does_not_answer(node, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    for path in (node, node / "step-000000000012-1a2b3c4d", node / "step-000000000012-1a2b3c4d" / "rank-00000.shard"):
        text, good = inspect(path)
        assert not good
        assert "Input/output error" in text


def test_a_part_that_is_retired_while_it_is_looked_at_is_no_bad_one(node, monkeypatch):
    verify = shard.verify
    shutil.rmtree(node / "step-000000000016-00000003")

    def verify_later(path, *rest):
        if path.parent.name.startswith("step-000000000012"):
            shutil.rmtree(path.parent, ignore_errors=True)
        return verify(path, *rest)

    monkeypatch.setattr(shard, "verify", verify_later)
    text, good = inspect(node)
    assert good
    assert "NO" not in text


def test_a_generation_that_is_retired_before_it_is_looked_at(node, monkeypatch):
    listed = inspection._generations_in(node)
    shutil.rmtree(node / "step-000000000016-00000003")
    monkeypatch.setattr(inspection, "_generations_in", lambda path: listed)
    text, good = inspect(node)
    assert good
    assert "00000003" not in text


def test_what_a_file_says_is_no_command_for_the_terminal(tmp_path):
    name = "rank-\x1b[31m\udc80.shard"
    path = write(tmp_path / name, [torch.ones(1)], {"state": {"a\nb": 1}}, run="\x1b]0;x\x07\n", layout={"\x1b": "ü"})
    text, _ = inspect(path)
    assert "\x1b" not in text
    assert "\\x1b]0;x\\x07\\n" in text
    assert "ü" in text
    text.encode("utf-8")


# The names of tensors


def test_tensor_names_are_the_paths_of_what_is_left_out():
    twice = torch.ones(2)
    value = {"a": {"b": [torch.ones(1), {1: twice, (2, "x"): torch.ones(3)}]}, "t": (twice, {torch.ones(4)}), "n": 1}
    structure, tensors, _ = pack(value)
    names = tensor_names(structure)
    assert [names[index] for index in range(len(tensors))] == ["a.b[0]", "a.b[1].1", "a.b[1].(2, 'x')", "t[1][0]"]
    assert tensor_names(pack(twice)[0]) == {0: "value"}
    assert tensor_names(pack([twice])[0]) == {0: "[0]"}
    tag = "__resilience_type__"
    for bad in ({tag: "tensor"}, {tag: "dict"}, {tag: "tuple", "items": {tag: "tensor"}}, {tag: "ndarray"}):
        with pytest.raises(ValueError):
            tensor_names(bad)


def test_the_exit_code_says_whether_all_is_intact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = NodeStore(tmp_path / "store")
    writer = store.reserve("rank-00000", 256)
    specs, size = shard.arrange([torch.ones(3)])
    shard.view(writer.memory, specs[0]).fill_(1.0)
    identity = shard.Identity("run", 0, 12, "1a2b3c4d", "rank-00000", 1, {"kind": "whole", "commons": 0})
    trailer = shard.seal(writer.memory, specs, identity, {"state": {}, "places": []}, size)
    path = writer.publish(12, "1a2b3c4d", size, trailer)
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["inspect", str(path)])
    assert "rank-00000" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"^1$"):
        cli.main(["inspect", str(path)])
    assert "truncated" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^1$"):
        cli.main(["inspect", "--json", str(path)])
    assert "truncated" in json.loads(capsys.readouterr().out)["shard"]["problem"]
