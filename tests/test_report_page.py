"""The report as a page: what it shows, that it needs nothing else, and that nothing in a ledger becomes markup."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from lightning_resilience._formatting import duration
from lightning_resilience.launch import report_page
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.report import percent, phrase, report
from lightning_resilience.launch.report_page import GROUPS, write_page
from lightning_resilience.run import time_account
from lightning_resilience.run.events import (
    AllocationEnd,
    AllocationStart,
    Event,
    Fault,
    FitInterrupted,
    Fresh,
    RestoredInPlace,
    Resumed,
    Saved,
    Stragglers,
    TimeSpent,
)
from lightning_resilience.run.goodput import CATEGORIES
from tests.test_goodput import HUNG, ended, job, launch, run_with, spent

T = 1_764_000_000.0
"""When the run is launched."""

START = {"imports": 4.0, "script": 1.0, "setup": 2.0, "restore": 1.0, "fast_forward": 1.0, "first_step": 2.0}
STEPS = {"data_loading": 3.0, "callbacks": 2.0, "validation": 2.0, "checkpoint_save": 3.0}


def of(kind: type[Event], time: float, /, **values: Any) -> Event:
    """An event in which nothing else is known."""
    fields: dict[str, Any] = dict.fromkeys(name for name, is_required in kind.own_fields.items() if is_required)
    fields |= {"fit": 0} if "fit" in kind.own_fields else {}
    return kind(**fields | {"time": T + time} | values)


def workers(
    began: float, since: float, end: float, nodes: tuple[str, str] = ("n1", "n2"), **fields: Any
) -> list[Event]:
    """What two nodes have recorded of their two ranks each."""
    times = (T + began, T + since, T + end)
    values: dict[str, Any] = {"world_size": 4, "attempt": str(began)} | fields
    return [spent(*times, node=name, ranks=[2 * index, 2 * index + 1], **values) for index, name in enumerate(nodes)]


def story(text: str = "", nodes: tuple[str, str] = ("n1", "n2")) -> list[Event]:
    """A hang on the second node, a kill, a rollback, a requeue, and an hour later the end by hand.

    Args:
        text: At the end of every reason.
        nodes: Their names.
    """
    folder = "/elsewhere/diagnostics/2026-01-31 12:00'1"
    return [
        *(launch(T, T), of(AllocationStart, 0, slurm_job_id="7", restart_count=0, node_list=[*nodes]), job(T + 2)),
        *(of(Fresh, 15), of(Saved, 30, step=20, seconds=1.5, tier="global", reason=f"every 20{text}")),
        of(Saved, 50, step=40, seconds=0.5, tier="local", reason="local"),
        of(Stragglers, 55, step=45, ranks=[3], devices=[], slowest=3, waited=4.0, reason=f"rank 3 has 0.41{text}"),
        of(Fault, 80, rank=3, kind="hang", step=60, reason=f"rank 3 is stuck{text}", diagnostics=folder),
        *workers(5, 70, 85, nodes, doing="productive", reached=60, seconds=START | STEPS | {"productive": 44.0}),
        *(of(Resumed, 105, step=40), of(Saved, 140, step=80, seconds=1.0, tier="global", reason="every 20")),
        of(Fault, 160, rank=0, kind="died", step=90, reason=f"rank 0 was killed by SIGKILL{text}"),
        *workers(
            *(90, 158, 161, nodes),
            doing="productive",
            reached=90,
            seconds=START | STEPS | {"wasted_progress": 20.0, "productive": 27.0},
        ),
        *(of(Resumed, 190, step=80), of(RestoredInPlace, 200, step=80), of(FitInterrupted, 230, step=120)),
        *workers(165, 230, 232, nodes, reached=120, seconds=START | {"productive": 54.0}),
        *(ended(T + 233, new_job=True), of(AllocationEnd, 234, how="time limit", then="requeue", reason=text)),
        *(of(AllocationStart, 264, slurm_job_id="7", restart_count=1, node_list=[*nodes]), launch(T + 266, T + 267)),
        *(job(T + 268), of(Resumed, 290, step=120), of(FitInterrupted, 340, step=170)),
        *workers(270, 340, 342, nodes, reached=170, seconds=START | {"productive": 59.0}),
        *(ended(T + 343), launch(T + 4000, T + 4000), job(T + 4001), of(Resumed, 4020, step=170)),
        *workers(4003, 4050, 4050, nodes, reached=200, seconds=START | {"productive": 36.0}),
        ended(T + 4051),
    ]


def shown(run_dir: Path, *events: Event, file: Path | None = None) -> tuple[str, ET.Element, dict[str, Any]]:
    """The page of a run with these events, parsed as XML as well, and what ``--json`` prints."""
    if events:
        run_with(run_dir, *events)
    file = run_dir / "report.html" if file is None else file
    write_page(run_dir, file)
    page = file.read_text()
    return page, ET.fromstring(page), json.loads(report(run_dir, as_json=True))


def words(element: ET.Element) -> str:
    """What it reads."""
    return " ".join("".join(element.itertext()).split())


def test_the_page_says_what_the_json_says(tmp_path: Path) -> None:
    _, page, found = shown(tmp_path, *story())
    text, ranks = words(page), found["ranks"]
    assert f"{percent(found['goodput'])} goodput" in text
    assert f"ETTR {percent(found['ettr'])}" in text
    assert f"of {ranks} ranks x {duration(found['rank_seconds'] / ranks)}" in text
    for sentence in [line for line in report(tmp_path).splitlines() if line.startswith(("Lost ", "Interruptions: "))]:
        assert sentence in text
    for number, each in enumerate(found["interruptions"], 1):
        [told] = [article for article in page.iter("article") if article.get("id") == f"i{number}"]
        assert words(told).startswith(f"{number} {each['cause']}")
        assert each["reason"] in words(told)
        assert f"{duration(each['rank_seconds'] / ranks)} of each rank" in words(told)
        assert f"Steps lost: {each['steps_lost']}" in words(told)
    assert [each["cause"] for each in found["interruptions"]] == ["hang", "killed", "preempted", "preempted"]


def test_what_to_change_is_shown_and_what_gains_little_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "_LARGE_GAIN", 0.05)
    _, page, found = shown(tmp_path, *story())
    folded = " ".join(words(each) for each in page.iter("details"))
    lines = [each["text"][1:] for each in found["advice"]]
    assert len(lines) > 2
    assert all(line in words(page) for line in lines)
    assert [line for line in lines if line not in folded] == lines[:1]


def test_the_page_has_every_category_that_occurs_and_no_other(tmp_path: Path) -> None:
    _, page, found = shown(tmp_path, *story())
    legend = next(each for each in page.iter("dl") if each.get("class") == "legend")
    entries = {str(each.get("title")): words(each) for each in legend.iter("dd")}
    ranks = found["ranks"]
    expected = {name: f"{phrase(name)} {duration(each / ranks)}" for name, each in found["categories"].items() if each}
    assert entries == expected
    assert len(entries) == len(CATEGORIES) - 1  # but "other"
    drawn = {each.get("class") for row in page.iter("svg") if row.get("class") == "row" for each in row.iter("path")}
    assert drawn == entries.keys()


def test_every_category_has_a_group_and_a_colour_of_its_own() -> None:
    colours = {name: each for group in GROUPS.values() for name, each in group.items()}
    assert colours.keys() == set(CATEGORIES)
    assert len(set(colours.values())) == len(colours)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text, page, _ = shown(tmp_path, *story())
    assert not re.search(r"https?://|<script|@import|url\(|\bsrc=|javascript:", text)
    assert {str(each.get("href"))[0] for each in page.iter() if each.get("href")} <= {"#", "."}


def test_nothing_in_a_ledger_is_markup(tmp_path: Path) -> None:
    hostile = "</title></style><script>alert('x')</script> \" onload=x ' & ]]> \x00\x1b[31m \ud800 \u202e {0}"
    text, page, _ = shown(tmp_path / "<b>run", *story(hostile, ("<i>n1", "n2' onclick='x")))
    assert not [each for each in page.iter() if each.tag == "script" or each.get("onclick") or each.get("onload")]
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    assert "rank 3 is stuck</title></style><script>alert('x')</script>" in words(page)
    assert [each for each in page.iter("span") if each.text == "n2' onclick='x"]
    assert next(page.iter("h1")).text == "<b>run"


def test_a_diagnosis_is_linked_where_it_is_now(tmp_path: Path) -> None:
    """Also if the run directory has been moved, from wherever the page is; where it is gone there is no link."""
    run_dir = tmp_path / os.fsdecode(b"caf\xe9") / "run"  # no UTF-8
    run_dir.parent.mkdir()
    _, page, _ = shown(run_dir, *story())
    assert not [each for each in page.iter("a") if words(each) == "Diagnosis"]
    folder = run_dir / "diagnostics" / "2026-01-31 12:00'1"
    folder.mkdir(parents=True)
    (tmp_path / "pages").mkdir()
    for file in (run_dir / "report.html", tmp_path / "pages" / "report.html"):
        _, page, _ = shown(run_dir, file=file)
        [told] = [each for each in page.iter("article") if "Diagnosis" in words(each)]
        assert words(told).startswith("1 hang")
        [link] = [str(each.get("href")) for each in told.iter("a")]
        assert (file.parent / os.fsdecode(unquote_to_bytes(link))).resolve() == folder


def test_steps_done_again_are_told_from_new_ones(tmp_path: Path) -> None:
    _, page, _ = shown(tmp_path, *story())
    kinds = [str(each.get("class")) for each in page.iter("path")]
    assert {"steps new", "steps again", "steps back", "dot fault", "dot stop", "dot rollback", "dot slow"} <= {*kinds}
    assert kinds.count("save global") == 2
    assert "rank 3 has 0.41" in words(page)


def test_a_long_pause_is_drawn_short(tmp_path: Path) -> None:
    """Else a run that was started again the next day would be two lines at the edges."""
    _, page, _ = shown(tmp_path, *story())
    cuts = [str(each.get("title")) for each in page.iter("i") if each.get("class") == "cut"]
    assert cuts == [f"{duration(4000 - 343)} without launch, drawn short"] * 2  # in both charts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_page_of_many_ranks_and_interruptions_is_small(tmp_path: Path, ranks: int) -> None:
    """Rows are those of the nodes with the largest losses, and one of all others."""
    events = [launch(T, T), job(T + 1)]
    for attempt in range(61):
        began = 5 + 400.0 * attempt
        events += [of(Resumed, began + 30, step=100 * attempt)]
        events += [
            of(Saved, began + 35 + 10 * each, step=100 * attempt + each, seconds=1, tier="local") for each in range(30)
        ]
        if attempt < 60:
            events += [
                of(Fault, began + 380, rank=ranks * attempt, kind="hang", step=100 * attempt + 40, reason="x" * 900)
            ]
        for node in range(128):
            late = 0.1 * node + attempt % 7
            times = {"began": late, "since": 370, "ended": 390}
            values: dict[str, Any] = {name: [T + began + each] * ranks for name, each in times.items()}
            seconds = START | STEPS | {"productive": 310.0 - late}
            values |= {
                "seconds": {name: [each] * ranks for name, each in seconds.items()},
                "doing": ["productive"] * ranks,
            }
            values |= {"world_size": 128 * ranks, "attempt": str(attempt), "node": f"n{node}", "elastic_run_id": "job"}
            values |= {"ranks": [*range(ranks * node, ranks * (node + 1))], "reached": 0}
            events.append(of(TimeSpent, began + 390, **values))
    text, page, found = shown(tmp_path, *events, ended(T + 61 * 400))
    assert (found["ranks"], len(found["interruptions"])) == (128 * ranks, 60)
    assert len([*page.iter("article")]) == 60
    assert len([each for each in page.iter("svg") if each.get("class") == "row"]) == 24
    assert "105 others" in words(page)
    assert len(text.encode()) < 1_000_000


@pytest.mark.parametrize("events", [[], [launch(T, T), ended(T + 5)], HUNG[:3], [of(Saved, 1, step=5)]])
def test_a_page_of_little(tmp_path: Path, events: list[Event]) -> None:
    _, page, found = shown(tmp_path, *events)
    assert ("Nothing is recorded" in words(page)) == (not events)
    assert ("Goodput is not known" in words(page)) == (found["goodput"] is None)


def test_a_page_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run_with(tmp_path, launch(T, T), job(T + 1))
    time_account.keep(tmp_path, "n1", spent(T + 10, T + 50, T + 60, "productive", reached=30))
    _, page, found = shown(tmp_path)
    assert f"{percent(found['goodput'])} goodput" in words(page)


def test_numbers_that_cannot_be_are_no_failure(tmp_path: Path) -> None:
    lines = [event.to_json() for event in story()]
    for line in lines:
        if line["event"] == "time_spent":
            line |= {"ended": [float("inf")] * 2, "since": [float("nan")] * 2}
        if line["event"] == "saved":
            line["seconds"] = float("inf")
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text, page, _ = shown(tmp_path)
    assert "rank 3 is stuck" in words(page)
    assert not re.search(r"(nan|inf)[ %\"L]", text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path / "run", *story())
    main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    assert str(tmp_path / "page.html") in capsys.readouterr().out
    assert ET.parse(tmp_path / "page.html").getroot().tag == "html"
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "--json", "--html", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "--html", str(tmp_path)])
    assert f"{tmp_path} is a directory: name a file" in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIREFOX = shutil.which("firefox") or shutil.which("firefox-esr")


@pytest.mark.skipif(CHROMIUM is None and FIREFOX is None, reason="no chromium, google-chrome or firefox on PATH")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it(tmp_path: Path, width: int) -> None:
    """Large areas have the colours of the categories on which most time was spent."""
    image = pytest.importorskip("PIL.Image")
    shown(tmp_path / "run", *story())
    page, picture = (tmp_path / "run" / "report.html").as_uri(), tmp_path / "shot.png"
    if CHROMIUM is not None:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1500"]
        command += ["--blink-settings=preferredColorScheme=1", f"--screenshot={picture}", page]
    else:
        command = [str(FIREFOX), "--headless", "--profile", str(tmp_path / "profile"), f"--window-size={width},1500"]
        command += ["--screenshot", str(picture), page]
        (tmp_path / "profile").mkdir()
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with image.open(picture) as opened:
        pixels = opened.convert("RGB")
        assert pixels.width == width
        counts = {colour: count for count, colour in pixels.getcolors(maxcolors=1 << 24)}
    for name in ("productive", "queue", "rendezvous"):
        [light] = [group[name][0] for group in GROUPS.values() if name in group]
        assert counts.get(tuple(bytes.fromhex(light[1:])), 0) > 100, name
