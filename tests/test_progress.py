"""The record of a rank's progress: what a step writes, and what another process reads."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import struct
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_resilience.detect.hangs.progress import Progress, read_progress, read_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.progress"


def test_a_boundary_moves_the_record(path: Path) -> None:
    progress = Progress(path, {"step": 5.0})
    progress.enter("setup")
    progress.at("step", 3, (4, 1, 0, 0))
    first = read_progress(path)
    progress.at("step", 4, (5, 1, 0, 0))
    second = read_progress(path)
    assert first is not None
    assert second is not None
    assert (first.section, first.step, first.position, first.timeout) == ("step", 3, (4, 1, 0, 0), 5.0)
    assert second.ticks > first.ticks
    assert second.since >= first.since
    assert (second.step, second.position) == (4, (5, 1, 0, 0))


def test_a_section_without_a_limit_may_take_for_ever(path: Path) -> None:
    progress = Progress(path, {"step": 5.0})
    progress.enter("setup")
    stay = read_progress(path)
    assert stay is not None
    assert stay.timeout == math.inf


def test_a_thread_may_report_progress_when_the_fit_has_been_left(path: Path) -> None:
    progress = Progress(path, {"step": 5.0})
    progress.at("step", 3, (4, 1, 0, 0))
    progress.close()
    progress.tick()
    left = read_progress(path)
    assert left is not None
    assert left.section == "left"


def test_a_section_ends_however_its_block_ends(path: Path) -> None:
    progress = Progress(path, {"step": 5.0, "checkpointing": 7.0})
    progress.at("step", 3, (4, 1, 0, 0))
    before = read_progress(path)
    inside = None
    with suppress(RuntimeError), progress.during("checkpointing"):
        inside = read_progress(path)
        with progress.during("checkpointing"):  # one save may call another
            pass
        assert progress.section == "checkpointing"
        raise RuntimeError("on purpose")
    after = read_progress(path)
    assert before is not None
    assert inside is not None
    assert after is not None
    assert (inside.section, inside.timeout) == ("checkpointing", 7.0)
    assert (after.section, after.timeout, after.step) == ("step", 5.0, 3)
    assert after.since >= inside.since > before.since  # what was interrupted starts afresh


def test_measures_the_longest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(path, {})
    progress.enter("setup")
    for seconds in (10.0, 1.0, 3.0, 2.0):
        now += seconds
        progress.at("step", 0, (1, 1, 0, 0))
    with progress.during("checkpointing"):
        now += 20.0
        assert progress.measured() == {"out_of_section": 0.0, "setup": 10.0, "step": 3.0, "checkpointing": 20.0}
    now += 30.0
    progress.enter("out_of_section")
    now += 0.5
    assert progress.measured()["step"] == 30.0
    assert progress.measured()["out_of_section"] == 0.5


def test_new_limits_hold_at_once(path: Path) -> None:
    progress = Progress(path, {"step": 5.0})
    progress.at("step", 3, (4, 1, 0, 0))
    progress.set_timeouts({"step": 50.0})
    stay = read_progress(path)
    assert stay is not None
    assert stay.timeout == 50.0


def test_a_rank_that_has_left_stays_readable(path: Path) -> None:
    progress = Progress(path, {"left": 1.0, "step": 1.0})
    progress.at("step", 3, (4, 1, 0, 0))
    progress.close()
    with progress.during("checkpointing"):  # nothing comes after that
        pass
    stay = read_progress(path)
    assert stay is not None
    assert (stay.section, stay.step) == ("left", 3)


@pytest.mark.parametrize("content", [None, b"", b"x", b"\xff" * 80, b"\0" * 200])
def test_a_record_that_is_none(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert read_progress(path) is None


class _Written:
    """A file that is written to between two reads of it."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = list(contents)

    def seek(self, place: int) -> None:
        assert place == 0

    def read(self, size: int) -> bytes:
        return (self.contents.pop(0) if len(self.contents) > 1 else self.contents[0])[:size]


@pytest.fixture
def three(path: Path) -> list[bytes]:
    """The content of the file after each of three writes."""
    progress, contents = Progress(path, {}), []
    for step in (1, 2, 3):
        progress.at("step", step, (step, 1, 0, 0))
        contents.append(path.read_bytes())
    return contents


def test_a_record_that_is_being_written_is_not_valid(path: Path, three: list[bytes]) -> None:
    path.write_bytes(three[0][:8] + three[2][8:])
    assert read_progress(path) is None


def test_what_was_written_while_it_was_read_is_read_again(three: list[bytes]) -> None:
    mixed = three[0][:-40] + three[2][-40:]  # begins as the first of them, and ends as the third
    found = read_record(cast(FileIO, _Written(mixed, three[1])))
    assert found is not None
    assert (found.step, found.position) == (2, (2, 1, 0, 0))


def test_a_section_of_another_version_is_none(path: Path, three: list[bytes]) -> None:
    sections = struct.unpack_from("<Q", three[0], 8 + 72 + 8)
    assert sections == (1,), "step"
    path.write_bytes(three[0][: 8 + 72 + 8] + struct.pack("<Q", 99) + three[0][8 + 72 + 16 :])
    assert read_progress(path) is None


def _write(path: Path, is_enough: Any) -> None:
    progress = Progress(path, {"step": 5.0})
    for number in itertools.count():
        progress.at("step", number, (number, number, number, number))
        if is_enough.is_set():
            break


def test_a_reader_never_sees_half_a_record(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_enough = context.Event()
    seen: set[int] = set()
    process = context.Process(target=_write, args=(path, is_enough))
    process.start()
    try:
        while len(seen) < 100 and process.is_alive():
            if (stay := read_progress(path)) is not None:
                assert stay.position == (stay.step,) * 4
                seen.add(stay.step)
    finally:
        is_enough.set()
        process.join()
    assert len(seen) == 100
