"""gloo's threads: a forked worker would hang for them, or a rank abort at its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_resilience._native_threads import HAS_FORK_DEADLOCK
from tests.harness import free_port

ROOT = str(Path(__file__).parent.parent)

# A thread that enters Python stays for 1 ms where it holds the lock that a forked child needs, instead of less than a
# microsecond.
SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>

long syscall(long number, ...) {
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long argument[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) argument[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_gettid) {
        struct timespec ms = {0, 1000000};
        nanosleep(&ms, 0);
    }
    return real(number, argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
}
"""

BEGIN = """
import os, random, select, sys, time
import torch, torch.distributed as dist
if sys.argv[2] == "with":
    from lightning_resilience import _native_threads
    _native_threads.guard()
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "2"}
dist.init_process_group("gloo")
"""

FORKS = """
hung = 0
for _ in range(100):
    dist.broadcast_object_list([1])
    time.sleep(random.random() * 1e-3)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b"here")
        os._exit(0)
    if not select.select([reader], [], [], 5 if sys.argv[2] == "with" else 0.5)[0]:
        hung += 1
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
print("hung", hung)
"""

ENDS = """
dist.broadcast_object_list([1])
dist.broadcast_object_list([2])
"""


COLLECTS = """
import datetime, gc, os, select, sys
import torch.distributed as dist
if sys.argv[1] == "with":
    from lightning_resilience import _native_threads
    _native_threads.guard()
class Cycle:
    pass
gc.disable()
cycle = Cycle()
cycle.own = cycle
cycle.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5))
del cycle
gc.enable()
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    gc.collect()
    os.write(writer, b"done")
    os._exit(0)
is_done = select.select([reader], [], [], 60 if sys.argv[1] == "with" else 2)[0]
if not is_done:
    os.kill(child, 9)
os.waitpid(child, 0)
print("done" if is_done else "hung")
os._exit(0)
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow.c").write_text(SLOW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"], cwd=folder, check=True)
    return str(folder / "slow.so")


def two_ranks(program: str, with_ours: str, slow: str) -> list[tuple[int, str]]:
    """The exit codes of two ranks, and what each printed."""
    environment = {
        **os.environ,
        "LD_PRELOAD": slow,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": ROOT,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + program, str(rank), with_ours],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize(("with_ours", "end"), [("without", "hung"), ("with", "done")])
def test_a_child_collects_no_process_group_of_its_parent(with_ours: str, end: str) -> None:
    command, environment = [sys.executable, "-c", COLLECTS, with_ours], {**os.environ, "PYTHONPATH": ROOT}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300).stdout
    assert output.splitlines()[-1] == end, "gloo may have printed a line before"


@pytest.mark.campaign
@pytest.mark.skipif(not HAS_FORK_DEADLOCK, reason="this Python does not have the flaw")
def test_no_child_is_forked_while_a_thread_enters_python(slow: str) -> None:
    def hung(with_ours: str) -> int:
        return sum(int(output.split()[-1]) for _, output in two_ranks(FORKS, with_ours, slow))

    assert hung("without") > 0, "else this shows nothing"
    assert hung("with") == 0


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_no_rank_aborts_at_its_end(slow: str) -> None:
    def aborts(with_ours: str) -> bool:
        return any(code == -signal.SIGABRT for code, _ in two_ranks(ENDS, with_ours, slow))

    assert any(aborts("without") for _ in range(60)), "else this shows nothing"
    assert not any(aborts("with") for _ in range(20))
