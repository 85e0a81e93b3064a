"""The pictures of README and docs: they are there, need nothing else, and show the numbers of the tables."""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]
DRAWINGS = sorted(IMAGES.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of ``docs/pictures``."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    names = {path.stem for path in (ROOT / "docs" / "pictures").glob("*.py")} - {"__main__"}  # which is pytest's
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def references() -> list[tuple[Path, str, Path]]:
    """Pages, what they say that is seen, and files."""
    found = []
    for page in PAGES:
        for alt, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text()):
            found.append((page, alt, (page.parent / target).resolve()))
    return found


def test_every_picture_is_there_and_used_and_its_text_says_what_is_seen() -> None:
    for page, alt, file in references():
        assert file.is_file(), f"{page} shows {file}"
        assert len(alt) > 40, f"{page}: {file.name} is described as {alt!r}"
    unused = {path.resolve() for path in IMAGES.iterdir()} - {file for _, _, file in references()}
    assert not unused


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_picture_needs_nothing_else(path: Path) -> None:
    text = path.read_text()
    tags = {each.tag.removeprefix(SVG) for each in ET.fromstring(text).iter()}
    assert tags <= {"svg", "title", "style", "rect", "path", "g", "text", "tspan"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|\son\w+=|href", text)
    assert ET.fromstring(text).findtext(f"{SVG}title")


def test_pictures_are_small() -> None:
    for path in IMAGES.iterdir():
        most = 300_000 if path.stem in ("kill-to-back", "report-page") else 50_000
        assert path.stat().st_size < most, path.name


def test_bars_are_as_long_as_the_numbers_of_the_tables(pictures: Any) -> None:
    bars: ModuleType = pictures("bars")
    page = bars.PAGE.read_text()
    shown = {f"bars-{name}.svg" for name in bars.CHARTS}
    assert shown == {path.name for path in DRAWINGS if path.name.startswith("bars-")}
    for name, chart in bars.CHARTS.items():
        drawn = ET.parse(IMAGES / f"bars-{name}.svg")
        widths = [
            float(each.get("width", 0)) for each in drawn.iter(f"{SVG}rect") if "bar" in each.get("class", "").split()
        ]
        words = [each.text for each in drawn.iter(f"{SVG}text")]
        section = page.split(f" {chart.heading}\n", 1)[1].split("\n#", 1)[0].replace("*", "").replace("`", "")
        lines = [line for line in section.splitlines() if line.startswith("|")][2 + chart.skipped :]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        rows = rows[: next((index for index, row in enumerate(rows) if set(row[1]) == {"-"}), len(rows))]
        cells = [
            row[column] for row in rows for column in chart.columns.values() if len(row) > max(chart.columns.values())
        ]
        cells = [cell for cell in cells if re.search(chart.number, cell)]
        assert len(widths) <= len(cells), "more bars than numbers"
        numbers = [float(re.findall(chart.number, cell)[0].replace(",", "")) for cell in cells[: len(widths)]]
        scale = max(widths) / max(numbers)
        for cell, number, width in zip(cells, numbers, widths, strict=False):
            assert cell in words
            assert width == pytest.approx(max(number * scale, 1.5), abs=0.2), f"{name}: {cell}"


def test_what_takes_no_run_is_drawn_as_it_is_now(pictures: Any) -> None:
    drawn = pictures("bars").pictures() | {"survives.svg": pictures("drawing").draw()}
    old = [name for name, text in drawn.items() if (IMAGES / name).read_text() != text]
    assert not old, "run: make pictures, or python docs/pictures bars survives"


def told(launch: str) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """A short story in two terminals."""
    ours = "[lightning-resilience 12:00:00 rank 0]"
    bar = "\rEpoch 0:  {0}%|#| {0}/100 [00:01<00:01, 9it/s]"
    training = [(0.0, "$ "), (1.0, f"{launch}\r\n"), (1.5, "GPU available\r\nTPU available\r\n")]
    training += [(10 + each, bar.format(each)) for each in range(5)]
    training += [(20.1, f"\r\nTraceback <&>\r\n{ours} At step 4 (section step) rank 1 was killed by SIGKILL.\r\n")]
    training += [(22.0, f"{ours} Restart 1 inside the job, step 2 is safe.\r\n")]
    training += [(30.0, f"{ours} Resuming from step 2 (local).\r\n"), (31.0, bar.format(3)), (32.0, bar.format(5))]
    training += [(60.0, f"\r\n{ours} Finished: the script ended. (exit code 0)\r\n"), (60.1, "$ ")]
    return training, [(0.0, "$ "), (19.0, "kill -9 7"), (20.0, "\r\n$ ")]


def test_the_moving_picture_tells_what_was_recorded(pictures: Any) -> None:
    moving = pictures("moving")
    story = moving.story(*told(pictures("recording").LAUNCH))
    assert (story.killed, story.resumed, story.is_back, story.finished) == (20.0, 30.0, 32.0, 60.0)
    times = [moment for moment, _ in moving.real_times(story, 19.0)]
    assert times == sorted(times)
    text = moving.picture(*told(pictures("recording").LAUNCH))
    drawn = ET.fromstring(text)
    assert "kill to back: 12.0 s, 2 steps done again" in {each.text for each in drawn.iter(f"{SVG}text")}
    assert "  … 2 more lines".strip() in {(each.text or "").strip() for each in drawn.iter(f"{SVG}text")}
    assert "available" not in text


def test_the_moving_picture_is_one_of_a_kill(pictures: Any) -> None:
    text = (IMAGES / "kill-to-back.svg").read_text()
    words = "\n".join(each.text or "" for each in ET.fromstring(text).iter(f"{SVG}text"))
    assert f"$ {pictures('recording').LAUNCH}" in words
    for said in (r"kill -9 \d+", "was killed by SIGKILL", r"Resuming from step \d+", r"Epoch \d", "Finished"):
        assert re.search(said, words), said
    [seconds] = {float(each) for each in re.findall(r"animation:([\d.]+)s", text)}
    assert 14 <= seconds <= 20
    assert "prefers-reduced-motion" in text
