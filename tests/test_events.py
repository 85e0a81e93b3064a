"""The schema of the ledger: what is written is what is read, by older and newer versions too."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_resilience
from lightning_resilience.run.events import (
    EVENTS,
    SCHEMA_VERSION,
    Event,
    Fault,
    RestoredInPlace,
    Resumed,
    Saved,
    Unknown,
    parse,
)
from lightning_resilience.run.ledger import Ledger, read_ledger

SAMPLES: dict[str, Any] = {
    "int": 3,
    "float": 1.5,
    "str": "a word",
    "bool": True,
    "list[int]": [0, 3],
    "list[float]": [1795424457.105, 3],
    "list[str]": ["a", "b"],
    "list[Any]": [[0], "nan", None],
    "dict[str, Any]": {"a": [1]},
    "dict[str, str]": {"a": "b"},
}
OF_ANOTHER_TYPE: dict[str, list[Any]] = {
    "int": [True, 1.0, -1, "1", [1]],
    "float": [True, -1.0, "1", float("nan")],
    "str": [1, ["a"]],
    "bool": [1, "true"],
    "list[int]": [1, ["a"], [1.5]],
    "list[float]": [1.0, ["a"], [True]],
    "list[str]": ["a", [1], {}],
    "list[Any]": ["a", {}],
    "dict[str, Any]": [[], "a"],
    "dict[str, str]": [[], "a"],
}


def types_of(kind: type[Event]) -> dict[str, str]:
    """The type of each field, as a word of the tables above."""
    from tests.test_docs import generated

    return {name: own for name, own, _ in generated()._fields_of(kind)}


def sample(kind: type[Event], **common: Any) -> Event:
    return kind(**{name: SAMPLES[own] for name, own in types_of(kind).items()}, **common)


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_every_event_is_read_as_it_was_recorded(tmp_path: Path, kind: type[Event]) -> None:
    Ledger(tmp_path / "ledger", rank=3).record(sample(kind))
    [read] = read_ledger(tmp_path)
    assert read == sample(kind, time=read.time, rank=3, node=read.node)
    [file] = (tmp_path / "ledger").iterdir()
    line = json.loads(file.read_text())
    assert line.pop("order") == line["time"]
    assert line == read.to_json()
    assert set(line) == {"event", "time", "rank", "node", *kind.own_fields}


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_what_an_older_version_has_not_written_is_none(kind: type[Event]) -> None:
    read = parse({"event": kind.kind_name, "time": 5.0})
    assert type(read) is kind
    assert all(getattr(read, name) is None for name in kind.own_fields)


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_a_value_of_another_type_is_kept_and_not_interpreted(kind: type[Event]) -> None:
    for name, own in types_of(kind).items():
        for odd in OF_ANOTHER_TYPE[own]:
            if odd == -1 and name == "exit_code":
                continue  # a signal's
            line = sample(kind).to_json() | {name: odd}
            read = parse(line)
            assert isinstance(read, Unknown), (name, odd)
            assert (read.name, repr(read.to_json())) == (kind.kind_name, repr(line))


OF_ALL_DEATHS = {"kind", "fit", "step", "reason", "elastic_run_id", "restart_count"}
OF_A_RESUME = {"fit", "step", "path", "tier"}


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (
            Fault(kind="died", reason="r", restart_count=0),
            OF_ALL_DEATHS | {"signal", "exit_code", "out_of_memory", "section"},
        ),
        (
            Fault(kind="hang", reason="r", restart_count=0),
            OF_ALL_DEATHS | {"section", "limit", "busy", "noticed", "diagnostics"},
        ),
        (
            Fault(kind="OSError", reason="r", elastic_run_id="a", restart_count=0),
            {"kind", "place", "reason", "elastic_run_id", "restart_count"},
        ),
        (Fault(kind="OSError", fit=0, step=3, reason="r"), {"kind", "fit", "step", "reason"}),
        (Resumed(fit=0, step=3, path="p", tier="global"), OF_A_RESUME),
        (
            RestoredInPlace(fit=0, step=3, path="p", tier="local", generation="g"),
            OF_A_RESUME | {"generation", "saved_at"},
        ),
    ],
    ids=["died", "hang", "worker", "fit", "global", "local"],
)
def test_fields_that_are_written_also_where_they_are_unknown(event: Event, names: set[str]) -> None:
    assert set(event.fields()) == names
    assert parse(event.to_json()) == event


def test_a_number_that_may_be_negative() -> None:
    assert isinstance(parse({"event": "fault", "exit_code": -9}), Fault)


@pytest.mark.parametrize(
    "line", [{"event": "moved", "to": "n2"}, {"event": "saved", "step": 3, "schema": SCHEMA_VERSION + 1}]
)
def test_events_of_a_later_version_are_kept_and_not_interpreted(line: dict[str, Any]) -> None:
    line = {"time": 1.0, "rank": 0, "node": "n1", **line}
    read = parse(line)
    assert isinstance(read, Unknown)
    assert read.to_json() == line


def test_fields_of_a_later_version_are_kept() -> None:
    read = parse({"event": "saved", "time": 1.0, "step": 3, "checksum": "ab"})
    assert isinstance(read, Saved)
    assert (read.step, read.extra) == (3, {"checksum": "ab"})
    assert read.to_json()["checksum"] == "ab"


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"event": 1},
        {"event": "saved", "time": "now"},
        {"event": "saved", "time": -1},
        {"event": "saved", "time": 1e20},
        {"event": "saved", "rank": -1},
        {"event": "saved", "rank": True},
        {"event": "saved", "node": 5},
    ],
)
def test_what_is_no_event(line: dict[str, Any]) -> None:
    assert parse(line) is None


def test_a_ledger_is_read_by_the_run_directory_and_by_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"event": "start"}\n')  # as earlier versions have written it
    Ledger(tmp_path / "ledger").record(sample(Saved))
    for path in (tmp_path, str(tmp_path), tmp_path / "ledger"):
        assert [event.name for event in lightning_resilience.read_ledger(path)] == ["start", "saved"]
    assert lightning_resilience.read_ledger(tmp_path / "nothing") == []


def test_reading_a_ledger_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    program = (
        f"import sys, lightning_resilience as lr; lr.read_ledger({str(tmp_path)!r}); "
        "print({'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_an_event_can_be_copied_and_sent() -> None:
    event = Saved(fit=0, step=3, path="a.ckpt", seconds=0.1, reason="interval", tier="global")
    assert pickle.loads(pickle.dumps(event)) == copy.deepcopy(event) == event
