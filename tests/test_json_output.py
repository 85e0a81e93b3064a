"""What ``--json`` prints: every key is documented, and every documented key printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.launch.cli import main
from lightning_resilience.launch.json_output import KEYS, SCHEMA, to_json
from tests.test_goodput import HUNG, run_with


def keys_of(value: dict[str, Any], documented: dict[str, str], prefix: str = "") -> set[str]:
    """All keys; not those of an object whose own are not documented, such as an event."""
    found = set()
    for key, each in value.items():
        found.add(prefix + key)
        inner = f"{prefix}{key}[]."
        if any(name.startswith(inner) for name in documented):
            for entry in each:
                found |= keys_of(entry, documented, inner)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    main([*map(str, arguments), "--json"])
    [line] = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["schema"] == SCHEMA
    assert keys_of(found, KEYS[str(arguments[0])]) == KEYS[str(arguments[0])].keys()
    return found


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "report", run_with(tmp_path, *HUNG))
    assert [event["event"] for event in found["timeline"]] == [event.name for event in HUNG]


def test_json_has_no_nan() -> None:
    assert json.loads(to_json({"a": [float("nan")], "b": {"c": float("inf")}})) == {
        "schema": SCHEMA,
        "a": [None],
        "b": {"c": None},
    }
