"""The demo stays alive: its quick version, and what it leaves behind when it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
VARIABLE = "LIGHTNING_RESILIENCE_DEMO_TEST"
PATIENCE_S = 600.0


class Demo:
    def __init__(self, out: Path) -> None:
        self.log = out.with_suffix(".log")
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, str(DEMO), "--quick", f"--out={out}"],
            env=os.environ | {VARIABLE: self.mark},
            stdout=open(self.log, "w"),
            stderr=subprocess.STDOUT,
        )

    def printed(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(VARIABLE) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "demo")
    yield demo
    demo.process.kill()
    demo.process.wait()
    for process in demo.processes():
        process.kill()


@pytest.mark.campaign
def test_the_quick_demo_recovers_and_ends_bitwise_identical(demo: Demo) -> None:
    assert demo.process.wait(PATIENCE_S) == 0, demo.printed()
    printed = demo.printed()
    assert re.search(r"rank 1 \(.*, pid \d+\) is stopped \(SIGSTOP\) at step \d+", printed), printed
    assert re.search(r"SIGKILL of one worker +yes +crash +- +\d+ \(local\) +\d+ steps? ", printed), printed
    assert re.search(
        r"one rank hangs \(SIGSTOP\) +yes +hang: rank 1, stopped +[\d.]+ s +\d+ \(local\) +\d+ steps? ", printed
    ), printed
    assert re.search(r"SIGTERM, then relaunch +yes +preempted +- +\d+ \(global\) +0 steps ", printed), printed
    assert "The final weights are bitwise identical." in printed
    assert "The model writes" not in printed.split("What the model writes")[1]
    assert "\33[" not in printed, "colours only on a terminal"
    assert not demo.processes()


@pytest.mark.campaign
def test_ctrl_c_ends_everything(demo: Demo) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while "fault 1 of 3" not in demo.printed():
        assert demo.process.poll() is None, demo.printed()
        assert time.monotonic() < deadline, demo.printed()
        time.sleep(0.1)
    started = demo.processes()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(PATIENCE_S) == 130, demo.printed()
    assert not [process for process in started if process.is_running()]
    deadline = time.monotonic() + PATIENCE_S
    while demo.processes():  # what was just being started ends with its launcher
        assert time.monotonic() < deadline, demo.processes()
        time.sleep(0.1)
