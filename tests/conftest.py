"""What holds for all tests: where their ranks train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import as_on_gpu, harness

ON_GPU = "as on a GPU"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked with ``also_as_on_gpu`` runs twice: its ranks on the CPU, and on the simulated accelerator.

    Given names of cases, only these run there with every change; the others are for the campaign.
    """
    if metafunc.definition.get_closest_marker("also_as_on_gpu"):
        metafunc.parametrize("where", ["cpu", ON_GPU], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("also_as_on_gpu")
        case = item.callspec.id.removeprefix(f"{ON_GPU}-") if isinstance(item, pytest.Function) and marker else ""
        if marker and marker.args and ON_GPU in item.name and case not in marker.args:
            item.add_marker(pytest.mark.campaign)


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the ranks that a test starts train."""
    if getattr(request, "param", "cpu") == "cpu":
        yield
        return
    if reason := as_on_gpu.missing():
        pytest.skip(reason)
    as_on_gpu.build()
    harness.ON_DEVICE = {"lag": 100}  # a step of the test program is about as many operators
    try:
        yield
    finally:
        harness.ON_DEVICE = None
