"""Runs the test program in real processes: forked ranks from a server that has the heavy imports done."""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer that writes nothing and says little."""

PROGRAM = Path(__file__).with_name("program.py")
_WHERE_ARE_YOU = signal.SIGRTMIN + 5
CONTEXT = multiprocessing.get_context("forkserver")
"""For every test that starts processes. There is one server for all, and who sets other imports takes these from it."""
CONTEXT.set_forkserver_preload(
    [
        "lightning.pytorch",
        "pytest",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.distributed.checkpoint.state_dict",
        "lightning_resilience.callbacks",
        "lightning_resilience.recipes",
        "tests.program",
        "tests.frozen",
    ]
)


SHARED = Path()
"""A folder that all workers of this test run share; the conftest sets it."""

ON_DEVICE: dict[str, Any] | None = None
"""What the test program is told of the simulated accelerator that its ranks shall train on, if they shall."""


def on_device(config: dict[str, Any]) -> dict[str, Any]:
    """A config of the test program, with the device that is asked for."""
    return {"as_on_gpu": ON_DEVICE, **config}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _rank(config: dict[str, Any], environment: dict[str, str], output: str) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # for data-loader workers, as in a program of its own
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.register(_WHERE_ARE_YOU, all_threads=True)  # the data-loader workers inherit it
    os.environ.update(environment)
    importlib.import_module(config.get("program", "tests.program")).main(config)


class Ranks:
    """The ranks of one running job, as an elastic launcher would start them."""

    def __init__(self, config: dict[str, Any], tmp: Path, environment: dict[str, str] | None = None) -> None:
        config = on_device(config)
        devices = config.get("trainer", {}).get("devices", 1)
        world_size = devices * config.get("trainer", {}).get("num_nodes", 1)
        elastic = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(devices),
            "TORCHELASTIC_RUN_ID": "test",
        }
        always = {"OMP_NUM_THREADS": "1", "FAKEGPU_COUNT": str(devices)}
        self.output = tmp / "output"
        self.processes = []
        for rank in range(world_size):
            place = {"RANK": rank, "LOCAL_RANK": rank % devices, "GROUP_RANK": rank // devices}
            own = {name: str(number) for name, number in place.items()} if world_size > 1 else {}
            env = {**always, **(elastic if world_size > 1 else {}), **own, **(environment or {})}
            process = CONTEXT.Process(target=_rank, args=(config, env, str(self.output)))
            process.start()
            self.processes.append(process)

    def kill(self, signum: int, ranks: Sequence[int] | None = None) -> None:
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                os.kill(process.pid, signum)

    def wait(self, timeout_s: float = 100.0, kill_rest: bool = True) -> list[int | None]:
        """The exit codes. As a launcher does, ends the others when a rank has died."""
        deadline = time.monotonic() + timeout_s
        while any(p.is_alive() for p in self.processes):
            died = [p for p in self.processes if p.exitcode not in (None, 0)]
            if died and kill_rest:
                time.sleep(0.3)
                self.kill(signal.SIGKILL)
            if time.monotonic() > deadline:
                self._ask_where_they_are()
                self.kill(signal.SIGKILL)
                for p in self.processes:
                    p.join()
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}")
            time.sleep(0.02)
        return [p.exitcode for p in self.processes]

    def _ask_where_they_are(self) -> None:
        """Has every process that is left write its stacks."""
        for rank in self.processes:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.pid)
                for each in [process, *process.children(recursive=True)]:
                    with open(self.output, "a") as output:
                        print(f"\nProcess {each.pid}, child of {each.ppid()}, {each.status()}:", file=output)
                    each.send_signal(_WHERE_ARE_YOU)
                    time.sleep(0.3)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def run(config: dict[str, Any], tmp: Path, timeout_s: float = 100.0, **kwargs: Any) -> tuple[list[int | None], str]:
    """Runs the program to its end; returns the exit codes of its ranks and what it printed."""
    ranks = Ranks(config, tmp, **kwargs)
    codes = ranks.wait(timeout_s)
    return codes, ranks.text()


def run_ranks(function: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Calls a function of a module in as many processes, with the rank and ``arguments``; those that hang are ended."""
    ranks = [CONTEXT.Process(target=function, args=(rank, *arguments)) for rank in range(count)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
        each.kill()


def result(config: dict[str, Any]) -> Any:
    return json.loads(Path(config["out"]).read_text())


def weights(config: dict[str, Any]) -> list[str]:
    """What the weights of every rank were in the end."""
    trainer = config.get("trainer", {})
    ranks = range(trainer.get("devices", 1) * trainer.get("num_nodes", 1))
    return [Path(f"{config['out']}.{rank}").read_text() for rank in ranks]


def samples(config: dict[str, Any]) -> list[dict[tuple[int, int], list[int]]]:
    """For every rank, the samples that were trained on in the end, by fit and step: the last time each step ran."""
    trainer = config.get("trainer", {})
    world_size = trainer.get("devices", 1) * trainer.get("num_nodes", 1)
    found = []
    for rank in range(world_size):
        steps: dict[tuple[int, int], list[int]] = {}
        for line in Path(f"{config['log']}.{rank}").read_text().splitlines():
            fit, step, ids = json.loads(line)
            steps[fit, step] = ids
        found.append(steps)
    return found


_NO_PART_IN_THE_TRAINING = {
    *("callbacks", "recipe", "save_every", "interval_s", "keep", "async_save", "numpy", "step_s", "slow_shards_s"),
    *(
        "local",
        "kill_points",
        "fault_tolerance",
        "nan_guard",
        "replica_check",
        "straggler_detection",
        "grace_period_s",
        "weighs",
    ),
}
_CHANGES_THE_TRAINING = {"events", "spoils", "flips", "drifts", "fails", "ckpt_path", "local_sgd"}
_references: dict[str, tuple[Any, Any]] = {}


def undisturbed(tmp: Path, **options: Any) -> tuple[Any, Any]:
    """Result and samples of an undisturbed run by Lightning alone: saving and watching must not change them."""
    config = reference(**options)
    if config["out"] not in _references:
        _references[config["out"]] = result(config), samples(config)
    return _references[config["out"]]


def reference(**options: Any) -> dict[str, Any]:
    """An undisturbed run by Lightning alone; computed once, by whichever worker of pytest-xdist needs it first."""
    config = on_device(options)
    if not _CHANGES_THE_TRAINING & options.keys():
        config = {name: config[name] for name in config.keys() - _NO_PART_IN_THE_TRAINING} | {"callbacks": []}
    key = hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()[:16]
    folder = SHARED / f"reference-{key}"
    folder.mkdir(exist_ok=True)
    config |= {"run_dir": str(folder / "run"), "out": str(folder / "out"), "log": str(folder / "log")}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "out").exists():
            codes, text = run(config, folder)
            assert set(codes) == {0}, text
    return config


def lines(path: Path) -> list[Any]:
    """The whole lines of a file that is being written, each JSON."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def differences(config: dict[str, Any], undisturbed: dict[str, Any]) -> Iterator[str]:
    """In what a run with ``digests`` differs from an undisturbed one: state, samples of each step, what was logged.

    What a rank did again it must have done alike.
    """
    if result(config) != result(undisturbed):
        yield f"the result is {result(config)}, not {result(undisturbed)}"
    both = (config, undisturbed)
    for rank in range(config["trainer"]["devices"]):
        pairs = {
            f"state of rank {rank}": [
                _by_key(each["out"], f".state.{rank}", _of_state) for each in (config, undisturbed)
            ],
            f"samples of rank {rank}": [_by_key(each["log"], f".{rank}", _of_batch) for each in both],
            f"log of rank {rank}": [
                _by_key(each["log"], f".metrics.{rank}", _of_log) for each in (config, undisturbed)
            ],
        }
        for what, (ours, theirs) in pairs.items():
            if different := [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]:
                key = min(different)
                yield f"{what}: {len(different)} differ, {key} is {ours.get(key)}, not {theirs.get(key)}"


def state_at_the_end(config: dict[str, Any], fit: int = 0) -> dict[str, torch.Tensor]:
    """What a run whose ranks have changed has in common with another one at its end, but for rounding."""
    (path,) = Path(config["run_dir"]).glob(f"fit-{fit:03}/checkpoints/*-final.ckpt")
    state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    if config.get("batch_norm"):  # behind a bias, whose gradient is noise that Adam makes large
        state = {name: each for name, each in state.items() if not name.endswith(("0.bias", "running_mean"))}
    return state


def _by_key(path: str, suffix: str, read: Callable[[Any], Iterator[tuple[str, Any]]]) -> dict[str, set[str]]:
    """All values that a file has for a key."""
    found: dict[str, set[str]] = {}
    for line in lines(Path(path + suffix)):
        for key, value in read(line):
            found.setdefault(key, set()).add(json.dumps(value))
    return found


def _of_state(line: dict[str, str]) -> Iterator[tuple[str, Any]]:
    yield from line.items()


def _of_batch(line: list[Any]) -> Iterator[tuple[str, Any]]:
    fit, step, ids = line
    yield f"fit {fit}, batch {step:4}", ids


def _of_log(line: list[Any]) -> Iterator[tuple[str, Any]]:
    _, _, step, metrics = line
    # Metrics of the run say how it was disturbed.
    own = {name: value for name, value in metrics.items() if not name.startswith("resilience/")}
    for name, value in own.items() if own.keys() != {"epoch"} or own == metrics else ():
        yield f"step {step:4}, {name}", value


def command(config: dict[str, Any]) -> list[str]:
    """The program as a command line, for real launchers."""
    return [sys.executable, str(PROGRAM), json.dumps(on_device(config))]


def run_command(arguments: Sequence[str], timeout_s: float = 200.0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False, env=env, **kwargs)
