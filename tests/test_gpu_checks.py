"""The checks for GPUs run on the simulated accelerator, as far as that goes: their scripts must not rot."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import as_on_gpu
from tests.gpu import page, runner, syncs
from tests.gpu.device import FAKE
from tests.harness import CONTEXT

CHECKS = runner.all_checks()
COVERED_ELSEWHERE = {
    "exit-busy",
    "gone-on",
    "health",
    "hung-rank",
    "replaced-rank",
    "warm-spare",
}  # on the same device, in tests of their own
pytestmark = pytest.mark.skipif(as_on_gpu.missing() is not None, reason=str(as_on_gpu.missing()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.campaign if name in COVERED_ELSEWHERE else ()) for name in CHECKS]
)
@pytest.mark.slow
def test_a_check_runs_on_the_simulated_accelerator(name: str) -> None:
    found = runner.run_check(name, FAKE, quick=True, context=CONTEXT)
    expected = "SKIPPED" if CHECKS[name].needs_gpu else "PASS"
    assert found["status"] == expected, f"{runner.line(name, found)}\n{found.get('output', '')}"
    assert runner.line(name, found)


def bench(tmp_path: Path) -> runner.Bench:
    return runner.Bench(runner.Device(FAKE), False, tmp_path, tmp_path, tmp_path / "result.json")


def test_a_figure_outlives_its_check(tmp_path: Path) -> None:
    """A check that is killed has failed, and shows what it had found."""
    one = bench(tmp_path)
    one.figure("number", 0.123456)
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert (found["status"], found["figures"]) == ("FAIL", {"number": 0.1235})


def test_time_is_not_judged_on_the_simulated_accelerator(tmp_path: Path) -> None:
    one = bench(tmp_path)
    one.expect(False, "it took long", timing=True)
    one.expect(False, "it is not so")
    one.passed()
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["status"], found["failures"]) == ("FAIL", ["it is not so"])


def test_a_wait_is_put_down_to_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch reports it on a GPU: by a warning, in whose stack our wrappers always are."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    audit = syncs.Audit(runner.Device("cuda"))
    waits = 'import warnings; warnings.warn("called a synchronizing CUDA operation")'
    stacks = [
        ["/lightning_resilience/wraps.py", "/lightning/pytorch/loop.py", f"{syncs.TORCH}_tensor.py"],
        ["/lightning/pytorch/loop.py", "/lightning_resilience/asks.py", f"{syncs.TORCH}_tensor.py"],
    ]
    with warnings.catch_warnings():
        audit.begin()
        for stack in stacks:
            call: Any = partial(exec, compile(waits, stack[-1], "exec"), {})
            for file in reversed(stack[:-1]):
                call = partial(exec, compile("inner()", file, "exec"), {"inner": call})
            call()
        audit.end()
    assert audit.found == {"pytorch/loop.py": 1, "ours lightning_resilience/asks.py": 1}


def test_the_page_shows_what_was_found(tmp_path: Path) -> None:
    assert page.section() in page.PAGE.read_text(), "run python -m tests.gpu.page"
    assert "No check has run on a GPU yet." in page.section(tmp_path)
    one = {"status": "PASS", "figures": {"steps | s": 3}, "failures": [], "seconds": 1.5}
    results = {"device": "GPU", "devices": 1, "torch": "2", "cuda": "13", "nccl": "2", "python": "3", "checks": {}}
    results["checks"] = {"late-reads": one}
    (tmp_path / "gpu-some.json").write_text(json.dumps(results))
    section = page.section(tmp_path)
    assert "(`late-reads`) | PASS | steps / s: 3 | 1.5 |" in section
    assert section.count("not run") == len(CHECKS) - 1
