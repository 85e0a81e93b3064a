"""How the tests are shared out to the two processes of ``make test``."""

from __future__ import annotations

import pytest

# Tests that start ranks run one after the other, in one of the two processes. Together they would be more than two
# cores can do, and CPython 3.11 can deadlock a data-loader worker in ``fork`` when its trainer gets too little time.
STARTS_RANKS = {
    "test_agreement",
    "test_auto_resume",
    "test_background",
    "test_demo",
    "test_exact_resume",
    "test_failures",
    "test_fault_tolerance",
    "test_fault_tolerance_edges",
    "test_fits",
    "test_hangs",
    "test_injection",
    "test_kills",
    "test_launchers",
    "test_local_checkpoint",
    "test_nvrx",
    "test_preemption",
    "test_replicas",
    "test_snapshot",
    "test_tiers",
    "test_watchdog",
}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in STARTS_RANKS:
            item.add_marker(pytest.mark.xdist_group("ranks"))
