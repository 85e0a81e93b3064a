"""The list of guards that ``python -m tests.mutations`` takes away is of the code as it is."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutations import GUARDS, ROOT, Guard


def test_there_are_enough() -> None:
    assert len({each.text for each in GUARDS}) == len(GUARDS) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.what.replace(" ", "-"))
def test_it_is_there_once(guard: Guard) -> None:
    source = (ROOT / "lightning_resilience" / guard.file).read_text()
    assert source.count(guard.text) == 1
    ast.parse(source.replace(guard.text, guard.without))
    file, _, name = guard.test.partition("::")
    assert name.partition("[")[0] in names_in(file)


@cache
def names_in(file: str) -> set[str]:
    return {each.name for each in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(each, "name")}
