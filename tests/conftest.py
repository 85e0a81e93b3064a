"""How the tests are shared out to the two processes of ``make test``."""

from __future__ import annotations

import inspect

import pytest

_STARTS_RANKS = ("tests.harness", "tests.test_exact_resume", "import subprocess", "_worker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks or launchers run one after the other, in one of the processes.

    Together they would be more than two cores can do, and CPython 3.11 can deadlock a data-loader worker in ``fork``
    when its trainer gets too little time.
    """
    group = pytest.mark.xdist_group("ranks")
    sources: dict[str, str] = {}
    for item in items:
        module = getattr(item, "module", None)
        if module is None:
            continue
        source = sources.setdefault(module.__name__, inspect.getsource(module))
        if any(sign in source for sign in _STARTS_RANKS):
            item.add_marker(group)
