"""Pictures of the demo's run, from its ledger: what it did when, and the page that ``report --html`` makes of it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from recording import NODE
from svg import CATEGORIES, card, text

from lightning_resilience._formatting import duration
from lightning_resilience.launch import report_page
from lightning_resilience.launch.report import extent, interruption_counts, percent, read_run

_WIDTH, _LEFT, _ROW = 820, 20, 46
_DESKTOP, _PHONE, _HEIGHT = 900, 390, 1020


def strip(run_dir: Path) -> str:
    """What every node did when: the strip of the page, and what the time went into."""
    run = read_run(run_dir, with_segments=True)
    found, axis = run.content, report_page.Axis(run.goodput)
    rows = {name: row for name, row in report_page.strip_rows(run, axis).items() if name}
    shapes = [f'<text x="{_LEFT}" y="52"><tspan class="number">{percent(found["goodput"])}</tspan> goodput</text>']
    about = f"{extent(found).split(',')[0]}. {interruption_counts(found).split('. ')[0].rstrip('.')}."
    shapes.append(text(_LEFT, 78, f"of {about}", "soft"))
    x, y = _LEFT, 106
    for group, category, share in report_page.group_shares(found):
        words = f"{group} {percent(share)}"
        if x + 22 + 7.9 * len(words) > _WIDTH - _LEFT:
            x, y = _LEFT, y + 24
        shapes.append(f'<rect class="{category}" x="{x}" y="{y - 12}" width="14" height="14" rx="2"/>')
        shapes.append(text(x + 20, y, words, "key"))
        x += 44 + round(7.9 * len(words))
    scale = (_WIDTH - 2 * _LEFT) / report_page.COLUMNS
    top = y + 52
    for index, row in enumerate(rows.values()):
        place = f"translate({_LEFT} {top + index * (_ROW + 4)}) scale({scale:.4f} {_ROW / report_page.ROW_HEIGHT:.4f})"
        paths = "".join(f'<path class="{name}" d="{path}"/>' for name, path in row.shapes().items())
        ground = f'<rect class="panel" width="{report_page.COLUMNS}" height="{report_page.ROW_HEIGHT}"/>'
        shapes.append(f'<g transform="{place}" shape-rendering="crispEdges">{ground}{paths}</g>')
    bottom, free = top + len(rows) * (_ROW + 4), [-1.0, -1.0]
    for each in found["interruptions"]:
        x, words = _LEFT + (_WIDTH - 2 * _LEFT) * axis.place(each["time"]), each["cause"]
        shapes.append(f'<path class="mark" d="M{x:.1f} {top - 6}V{bottom}"/>')
        lane = next((lane for lane, end in enumerate(free) if end <= x), None)
        if lane is not None and x + 7.6 * len(words) < _WIDTH:
            free[lane] = x + 9.5 * len(words)
            shapes.append(text(round(x, 1), top - 10 - 18 * lane, words, "cause"))
    for place, words in axis.ticks():
        shapes.append(text(round(_LEFT + (_WIDTH - 2 * _LEFT) * place, 1), bottom + 18, words, "soft small"))
    schemes = [";".join(f"--{name}:{both[index]}" for name, both in CATEGORIES.items()) for index in (0, 1)]
    style = f":root{{{schemes[0]}}}@media (prefers-color-scheme:dark){{:root{{{schemes[1]}}}}}"
    style += "".join(f".{name}{{fill:var(--{name})}}" for name in CATEGORIES)
    style += ".number{font-size:40px;font-weight:700}.cause{font-size:13.5px;font-weight:600}.small{font-size:13.5px}"
    style += ".key{font-size:15px}.mark{stroke:var(--ink);stroke-dasharray:4 3;opacity:.65;fill:none}"
    causes = ", ".join(
        f"{each['cause']} at {duration(each['time'] - found['began'])}" for each in found["interruptions"]
    )
    title = (
        f"What the ranks of the demo did when: {percent(found['goodput'])} of their time in new steps, between {causes}"
    )
    return card(_WIDTH, bottom + 32, title, "\n".join(shapes), style)


def screenshot(run_dir: Path, picture: Path) -> None:
    """The page in a browser: on a desktop, and in the dark on a phone.

    Raises:
        FileNotFoundError: If there is no Chromium.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise FileNotFoundError(f"{picture.name} takes chromium or google-chrome on PATH")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report_page.write_page(run_dir, folder / "page.html")
        page = (folder / "page.html").read_text().replace(str(run_dir.resolve()), "runs/demo/run")
        page = re.sub(rf"\b{re.escape(socket.gethostname())}\b", NODE, page)
        (folder / "page.html").write_text(page)
        frames = "".join(
            f"<iframe src='page.html' width='{width}' height='{_HEIGHT}' style='color-scheme:{scheme}'></iframe>"
            for width, scheme in ((_DESKTOP, "light"), (_PHONE, "dark"))
        )
        style = "body{margin:16px;display:flex;gap:16px;background:#c6cbd2}iframe{border:0;border-radius:10px}"
        (folder / "both.html").write_text(f"<style>{style}</style><body>{frames}</body>")
        size = f"{_DESKTOP + _PHONE + 48},{_HEIGHT + 32}"
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--hide-scrollbars", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
        command += [f"--window-size={size}", f"--screenshot={picture.resolve()}", (folder / "both.html").as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
