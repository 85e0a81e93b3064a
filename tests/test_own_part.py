"""The own part of a rank in node memory: exact, whole wherever the rank is killed, and refused if it is not its own."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_resilience.checkpoint import data_position
from lightning_resilience.elastic import own_rows
from lightning_resilience.elastic.own_part import (
    _HEADER,
    ForeignFile,
    GivenState,
    OwnPartWriter,
    path_of,
    read_own_parts,
)
from lightning_resilience.elastic.own_rows import RowsWriter, read_rows

TOKEN = "a start of the fit"


def draw() -> list[float]:
    """From every generator, also from those that keep a second normal number."""
    numbers = [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
    return [*numbers, *torch.rand(3).tolist(), *torch.randn(3).tolist()]


def path(folder: Path) -> Path:
    return path_of(folder, 3)


def writer_of(folder: Path) -> OwnPartWriter:
    return OwnPartWriter(path(folder), TOKEN, 1024)


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_what_is_read_is_what_the_rank_has_left(drawn: int, tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    random.seed(drawn), np.random.seed(drawn), torch.manual_seed(drawn)
    for _ in range(drawn):
        random.gauss(0, 1), np.random.standard_normal(), torch.rand(1)
    tensors = [torch.rand(3), torch.arange(5), torch.tensor([[True], [False]]), torch.empty(0, 2)]
    writer.put(17, 2**64 - 1, (1.5, float("nan"), -0.0), tensors)
    expected = draw()
    writer.close()
    (part,) = read_own_parts(path(tmp_path), TOKEN)
    assert (part.position, part.layout) == (17, 2**64 - 1)
    numbers, found = part.values(3, tensors)
    assert str(numbers) == "[1.5, nan, -0.0]"
    assert all(map(torch.equal, found, tensors))
    assert [each.dtype for each in found] == [each.dtype for each in tensors]
    with pytest.raises(ValueError, match="bytes"):
        part.values(3, tensors[:1])
    draw()
    part.restore_random_state()
    assert draw() == expected


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_the_random_state_of_another_rank_is_written_in_the_place_of_its_own(drawn: int, tmp_path: Path) -> None:
    given = GivenState()
    writer = OwnPartWriter(path(tmp_path), TOKEN, 0, given)
    random.seed(drawn), np.random.seed(drawn), torch.manual_seed(drawn)
    for _ in range(drawn):
        random.gauss(0, 1), np.random.standard_normal(), torch.rand(1)
    given.set(data_position.get_random_state(torch.device("cpu")))
    expected = draw()
    writer.put(17, 0, ())
    with pytest.raises(ValueError, match="another size"):
        given.set({**data_position.get_random_state(torch.device("cpu")), "torch": torch.zeros(8, dtype=torch.uint8)})
    writer.close()
    draw()
    (part,) = read_own_parts(path(tmp_path), TOKEN)
    part.restore_random_state()
    assert draw() == expected


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(tmp_path)
    writer.put(1, 0, ())
    monkeypatch.setattr("os.getpid", lambda: -1)
    writer.put(2, 0, ())
    assert [part.position for part in read_own_parts(path(tmp_path), TOKEN)] == [1]


def test_the_last_four_are_kept(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    for position in range(6):
        writer.put(position, 0, [float(position)])
    writer.close()
    assert [part.position for part in read_own_parts(path(tmp_path), TOKEN)] == [5, 4, 3, 2]
    OwnPartWriter(path(tmp_path), "the next start", 8).close()
    assert read_own_parts(path(tmp_path), "the next start") == []


def test_a_slot_that_was_being_written_is_left_out_and_the_others_are_whole(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    chosen = random.Random(0)
    for position in range(1, 6):
        writer.put(position, 0, [float(position)] * 4, [torch.full((4,), float(position))])
        draw()
    before = path(tmp_path).read_bytes()
    writer.put(6, 0, [6.0] * 4, [torch.full((4,), 6.0)])
    after = path(tmp_path).read_bytes()
    writer.close()
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    cuts = chosen.sample(changed, min(200, len(changed)))
    torn = [after[:cut] + before[cut:] for cut in cuts]  # in whatever order it is written
    torn += [before[:cut] + after[cut:] for cut in cuts]
    for content in torn:
        path(tmp_path).write_bytes(content)
        positions = [part.position for part in read_own_parts(path(tmp_path), TOKEN)]
        assert positions == ([5, 4, 3, 2] if content == before else [6, 5, 4, 3] if content == after else [5, 4, 3])


def test_a_rank_that_is_killed_at_any_moment_leaves_the_boundaries_before(tmp_path: Path) -> None:
    def last() -> int:
        parts = read_own_parts(path(tmp_path), TOKEN)
        assert all(part.values(64, [])[0] == [float(part.position)] * 64 for part in parts)
        return max((part.position for part in parts), default=0)

    chosen = random.Random(0)
    writer = writer_of(tmp_path)
    for _ in range(10):
        enough = last() + chosen.randrange(5, 50)
        child = os.fork()
        if child == 0:
            try:
                writer._pid, position = os.getpid(), writer._sequence
                while True:
                    position += 1
                    writer.put(position, 0, [float(position)] * 64)
            finally:
                os._exit(1)
        until = time.monotonic() + 60
        while last() < enough and time.monotonic() < until:
            pass  # it reads while the other one writes
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert last() >= enough
        assert len(read_own_parts(path(tmp_path), TOKEN)) >= 3
        writer._sequence = last()


def test_what_no_rank_of_this_fit_has_written_is_refused(tmp_path: Path) -> None:
    writer_of(tmp_path).put(1, 0, [])
    good = path(tmp_path).read_bytes()
    assert stat.S_IMODE(path(tmp_path).stat().st_mode) == 0o600
    with pytest.raises(ForeignFile, match="another start"):
        read_own_parts(path(tmp_path), "another")
    for bad, why in (
        (b"", "truncated"),
        (good[:40], "truncated"),
        (good[:-1], "does not fit"),
        (good + b"\0", "does not fit"),
        (b"\x80\x05" + good[2:], "not a rank's own part"),  # a pickle
        (good[:12] + b"\7" + good[13:], "another version"),
        (good[:19] + b"\xff" + good[20:], "does not fit"),  # a state of 4 GB
        (good[:60] + b"\1" + good[61:], "damaged"),
    ):
        path(tmp_path).write_bytes(bad)
        with pytest.raises(ForeignFile, match=why):
            read_own_parts(path(tmp_path), TOKEN)
    path(tmp_path).write_bytes(good[: _HEADER.size] + bytes(len(good) - _HEADER.size))
    assert read_own_parts(path(tmp_path), TOKEN) == []
    path(tmp_path).chmod(0o644)
    with pytest.raises(ForeignFile, match="only this user"):
        read_own_parts(path(tmp_path), TOKEN)
    path(tmp_path).unlink()
    (tmp_path / "elsewhere").write_bytes(good)
    path(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        read_own_parts(path(tmp_path), TOKEN)
    writer_of(tmp_path).put(2, 0, [])  # begins anew, and writes nothing elsewhere
    assert (tmp_path / "elsewhere").read_bytes() == good
    assert [part.position for part in read_own_parts(path(tmp_path), TOKEN)] == [2]


def test_a_generator_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(NotImplementedError, match="bit generator"):
            writer.put(1, 0, [])
        with pytest.raises(NotImplementedError, match="PCG64"):
            OwnPartWriter(tmp_path / "other", TOKEN, 8)
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(ValueError, match="room for 1024"):
        writer.put(1, 0, [0.0] * 129)


# -- rows that the loggers of rank 0 have not written -----------------------------------------------------------------


def test_rows_are_those_of_the_last_time_that_they_had_a_number(tmp_path: Path) -> None:
    path = tmp_path / "0.rows"
    rows = RowsWriter(path, "token", ["a", "b"])
    rows.put([(0, 3, {"loss": 0.1}), (1, 3, "x")], False)
    rows.put([(0, 3, {"loss": 0.2})], False)
    with open(path, "ab") as file:
        file.write(b'[0, 4, {"lo')  # the rank was killed
    assert read_rows(path, "token") == (["a", "b"], {(0, 3): {"loss": 0.2}, (1, 3): "x"})
    with pytest.raises(ValueError, match="another start"):
        read_rows(path, "another token")


def test_rows_that_were_written_long_ago_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "0.rows"
    rows = RowsWriter(path, "token", ["a"])
    long = "x" * own_rows._KEPT_BYTES
    rows.put([(0, 1, "short")], False)
    rows.put([], True)
    assert list(read_rows(path, "token")[1]) == [(0, 1)]  # a rank may be lost that is a boundary behind
    rows.put([(0, 2, long)], False)
    rows.put([], False)
    assert list(read_rows(path, "token")[1]) == [(0, 1), (0, 2)]
    rows.put([], True)
    rows.put([(0, 3, "next")], False)
    assert read_rows(path, "token") == (["a"], {(0, 3): "next"})
    for _ in range(own_rows._MOST_BYTES // len(long) - 1):
        rows.put([(0, 4, long)], False)
    with pytest.raises(OSError, match="not written 16 MiB"):
        rows.put([(0, 4, long)], False)


def test_the_generator_of_a_device_gives_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    monkeypatch.setattr(data_position, "_accelerator", lambda device: generator)
    drawn = torch.rand(3, generator=generator)
    data_position.begin_again(torch.device("cuda"))
    assert torch.equal(torch.rand(3, generator=generator), drawn)
