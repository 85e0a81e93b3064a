"""What holds for all tests: where their ranks train, and that they leave their process as it was."""

from __future__ import annotations

import multiprocessing.util
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch.optim import optimizer

from tests import as_on_gpu, harness

ON_GPU = "as on a GPU"

# As make does: Lightning would set it when it first starts ranks, and sums would differ in the last bit from then on.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked with ``also_as_on_gpu`` runs twice: its ranks on the CPU, and on the simulated accelerator.

    Given names of cases, only these run there outside of the campaigns.
    """
    if metafunc.definition.get_closest_marker("also_as_on_gpu"):
        metafunc.parametrize("where", ["cpu", ON_GPU], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the cases of a test on their levels, as its markers ask for."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        marker = item.get_closest_marker("also_as_on_gpu")
        if marker and marker.args and ON_GPU in case and case.removeprefix(f"{ON_GPU}-") not in marker.args:
            item.add_marker(pytest.mark.campaign)
        if marker := item.get_closest_marker("slow_but_for"):
            test = item.nodeid.partition("[")[0]
            unknown[test] = unknown.get(test, set(marker.args)) - {case}
            if case not in marker.args:
                item.add_marker(pytest.mark.slow)
    missing = {test: cases for test, cases in unknown.items() if cases}
    are_all_here = not config.getoption("lf", False) and not any("::" in argument for argument in config.args)
    if missing and are_all_here:
        raise pytest.UsageError(f"slow_but_for names cases that these tests do not have: {missing}")


@pytest.fixture(autouse=True, scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Where sockets of all processes are: not below a folder of a test, whose path is too long. Not made by an import,
    # which each rank of a test does again: a thousand folders would stay.
    multiprocessing.util.get_temp_dir()
    own = tmp_path_factory.getbasetemp()
    harness.SHARED = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True, scope="session")
def forks() -> None:
    """Tests fork this process, in which others have left garbage."""
    from lightning_resilience import _native_threads  # not before pytest has set up logging

    _native_threads.guard()


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


def patched_in_torch() -> list[object]:
    """What the package and its tests put in the place of torch's own, and whether a process group is open."""
    c10d = torch.distributed.distributed_c10d
    functions = torch.distributed.init_process_group, c10d._new_process_group_helper
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    return [torch.distributed.is_initialized(), *functions, *map(list, hooks)]


@pytest.fixture(autouse=True)
def leaves_environment_as_it_was() -> Iterator[None]:
    """What a fit has set there, as a seed, is not for the processes that the next test starts."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was() -> Iterator[None]:
    """A test that fails only behind another one costs more than a day."""
    before = patched_in_torch()
    yield
    assert patched_in_torch() == before
