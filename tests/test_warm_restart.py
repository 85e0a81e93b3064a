"""A rank is killed, a spare takes its place, and the run ends bitwise as if nothing had happened.

Under the real launcher. What depends on how a process was started: the workers of its data loader, and whether a rank
that was stopped meanwhile is gone.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest

from lightning_resilience.detect.hangs import watchdog as watchdogs
from lightning_resilience.launch.processes import processes_of
from tests.harness import result, samples, undisturbed
from tests.test_exact_resume import make, some
from tests.test_launch import REAL, Launcher, launcher, wait_until
from tests.test_spares import wait_for_spares

__all__ = ["launcher"]  # a fixture

pytestmark = [pytest.mark.nvrx, pytest.mark.timeout(900)]

SCRIPT = """
    is_warm = "torch" in sys.modules
    if __name__ == "__main__":  # a worker of the loader reads this file, too
        import json, psutil
        from tests.ledgers import read_ledger
        told = [each for each in read_ledger(run_directory.ledger) if each["event"] == "told"]
        left = [each["pid"] for each in told if each["restart"] < restart_count and psutil.pid_exists(each["pid"])]
        ledger.record("told", restart=restart_count, pid=os.getpid(), of=os.environ["RANK"], is_warm=is_warm, left=left)
        from tests import program
        program.main(json.loads(sys.argv[1]))
"""


def start(launcher: Launcher, events: list[dict[str, Any]], **options: Any) -> tuple[dict[str, Any], Any]:
    """Starts the test program under ``launch``; events happen once, and may wait for files in this test's folder."""
    launcher.script(SCRIPT)
    config = make(launcher.folder, "disturbed", **options)
    for event in events:
        event |= {"at": "train", "once": True, "within_s": 300.0}
        event["after_file"] = f"{launcher.folder}/{event['after_file']}"
    config |= {"events": events, "run_dir": str(launcher.run_directory.path), "callbacks": []}
    ranks = options.get("trainer", {}).get("devices", 1)
    arguments = [f"--nproc-per-node={ranks}", "script.py", json.dumps(config)]
    return config, launcher.start(*arguments, program=REAL, PYTHONWARNINGS="ignore")


LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"workers": 2, "loader": {"prefetch_factor": 3, "pin_memory": True}},
    "workers that persist": {"workers": 2, "persistent": True},
    "workers of a fork server": {"workers": 1, "persistent": True, "loader": {"multiprocessing_context": "forkserver"}},
    "workers that are spawned": {"workers": 1, "persistent": True, "loader": {"multiprocessing_context": "spawn"}},
    "an iterable": {"data": "iterable"},
    "an iterable, with workers": {"data": "iterable", "workers": 2},
    "stateful": {"data": "stateful", "augment": False},
    "stateful, with workers": {"data": "stateful", "workers": 2, "augment": False},
    "a stateful iterable": {"data": "stateful_iterable", "workers": 2},
}


@pytest.mark.parametrize(
    "options", some(LOADERS, "no workers", "workers that", "an iterable", "stateful", "a stateful iterable")
)
@pytest.mark.slow
def test_a_killed_rank_that_is_replaced_by_a_spare_trains_the_same(launcher: Launcher, options: dict[str, Any]) -> None:
    config, launch = start(launcher, [{"step": 27, "do": "SIGKILL", "after_file": "ready"}], **options)
    wait_for_spares(launcher, 1)
    (launcher.folder / "ready").touch()
    assert launch.wait(300) == 0, launcher.stderr()
    assert [each["is_warm"] for each in launcher.events("told")] == [False, True]
    assert (result(config), samples(config)) == undisturbed(launcher.folder, **options)


@pytest.mark.parametrize("watchdog", ["watched", pytest.param("not watched", marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_a_rank_that_was_stopped_is_gone_before_a_spare_takes_its_place(launcher: Launcher, watchdog: str) -> None:
    """So it cannot wake up and publish something: the fence. Without a watchdog the elastic launcher ends it."""
    options = {"trainer": {"devices": 2}, "workers": 1}
    events = [
        {"step": 20, "rank": 0, "do": "SIGSTOP", "after_file": "ready"},
        {"step": 20, "rank": 1, "do": "SIGKILL", "after_file": "stopped"},
    ]
    config, launch = start(launcher, events, **options)
    wait_for_spares(launcher, 2)
    first = {each["of"]: each["pid"] for each in launcher.events("told")}
    stopped = psutil.Process(first["0"])
    (launcher.folder / "ready").touch()
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    if watchdog == "not watched":
        [process] = [each for each in processes_of(launcher.launch_ids[0]) if watchdogs.__name__ in each.cmdline()]
        process.kill()
    (launcher.folder / "stopped").touch()
    launcher.wait_for("told", 4)
    with suppress(ProcessLookupError):
        if stopped.is_running():  # not another one with its number
            os.kill(stopped.pid, signal.SIGCONT)
    assert launch.wait(300) == 0, launcher.stderr()
    later = [each for each in launcher.events("told") if each["restart"] == 1]
    assert [(each["is_warm"], each["left"]) for each in later] == [(True, [])] * 2
    assert (result(config), samples(config)) == undisturbed(launcher.folder, **options)
