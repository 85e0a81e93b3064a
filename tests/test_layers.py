"""Imports between the folders of the package run one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_resilience"

LAYERS = ("run", "elastic", "detect", "checkpoint", "launch", "_lightning", "fit", "callbacks", "contrib")
"""Each imports only those before it, and single modules of the package."""

FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}


def imported_folders(folder: str) -> dict[str, list[str]]:
    """Which other folders the files of a folder import, also under ``TYPE_CHECKING`` and in functions, and where."""
    found: dict[str, list[str]] = {}
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each.name}" for each in node.names]
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            else:
                continue
            for name in names:
                package, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package == PACKAGE.name and other in FOLDERS - {folder}:
                    found.setdefault(other, []).append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_every_folder_has_a_layer() -> None:
    assert set(LAYERS) == FOLDERS


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_what_lies_below(folder: str) -> None:
    below = set(LAYERS[: LAYERS.index(folder)])
    assert {other: where for other, where in imported_folders(folder).items() if other not in below} == {}
