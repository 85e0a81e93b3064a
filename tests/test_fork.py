"""Data-loader workers are forked while gloo's threads enter Python: a flaw of older Pythons that can hang them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_resilience import signals
from tests.harness import free_port

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

PROGRAM = """
import os, random, select, sys, time
import torch, torch.distributed as dist
if sys.argv[2] == "with":
    import lightning_resilience.signals
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "2"}
dist.init_process_group("gloo")
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


def hung(tmp_path: Path, with_ours: str) -> int:
    """How many of 200 children never came to Python."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(tmp_path / "slow.so"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), with_ours], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    counts = [re.search(r"hung (\d+)", rank.communicate(timeout=300)[0]) for rank in ranks]
    assert all(counts)
    return sum(int(count[1]) for count in counts if count)


@pytest.mark.campaign
@pytest.mark.skipif(not signals.HAS_FORK_DEADLOCK, reason="this Python does not have the flaw")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_no_child_is_forked_while_a_thread_enters_python(tmp_path: Path) -> None:
    (tmp_path / "slow.c").write_text(SLOW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"], cwd=tmp_path, check=True)
    assert hung(tmp_path, "without") > 0, "else this shows nothing"
    assert hung(tmp_path, "with") == 0
