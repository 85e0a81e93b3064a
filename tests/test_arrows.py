"""Imports between the folders of the package go one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_resilience"

MAY_IMPORT = {
    "run": set[str](),
    "detect": {"run"},
    "checkpoint": {"detect", "run"},
    "launch": {"checkpoint", "detect", "run"},  # of checkpoint only what lists local checkpoints, when it is asked to
    "_lightning": {"checkpoint"},
    "fit": {"_lightning", "checkpoint", "detect", "launch", "run"},
}
"""Folders that a folder may import; what lies in the root may be imported by all."""


def imported(folder: Path) -> Iterator[str]:
    """What the modules of a folder import of the package, also for type checkers only."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                yield from (f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Import):
                yield from (each.name for each in node.names if each.name.startswith(PACKAGE.name))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_those_below_it(folder: str) -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folder in rooms
    found = {name.split(".")[1] for name in imported(PACKAGE / folder)} & rooms
    assert found <= MAY_IMPORT[folder] | {folder}
