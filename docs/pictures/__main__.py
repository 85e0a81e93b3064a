"""Draws the pictures of README and docs into ``docs/images``: ``make pictures``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import bars
import drawing
import moving
import page
import recording

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "runs"


def kill_to_back() -> None:
    """Records a training that is killed, and draws the recording (about 2 minutes)."""
    (IMAGES / "kill-to-back.svg").write_text(moving.picture(*recording.record(RUNS / "pictures")))


def bars_of_tables() -> None:
    """The tables of ``benchmarks/README.md``."""
    for name, text in bars.pictures().items():
        (IMAGES / name).write_text(text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=RUNS / "demo" / "run", help="the demo's (default: %(default)s)")
    pictures: dict[str, Callable[[], object]] = {
        "bars": bars_of_tables,
        "survives": lambda: (IMAGES / "survives.svg").write_text(drawing.draw()),
        "goodput": lambda: (IMAGES / "goodput.svg").write_text(page.strip(options.run_dir)),
        "report-page": lambda: page.screenshot(options.run_dir, IMAGES / "report-page.png"),
        "kill-to-back": kill_to_back,
    }
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(pictures)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - pictures.keys():
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    for name in options.names or pictures:
        pictures[name]()
        print(f"docs/images: {name}")


if __name__ == "__main__":
    main()
