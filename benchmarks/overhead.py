"""Cost of each callback in a healthy step, measured within one run: switched on and off every 10 steps.

Separate runs differ by more than the callbacks cost. Every variant is measured in its own run of the same small model,
against the steps of that run in which it is off; the lower quartiles are compared, since other work on the machine only
makes steps slower, and main-thread CPU time is shown beside. The first row is a callback without any hook, for which
Lightning calls all of them nevertheless; the second one is the account of time alone, which each of the following has;
the third one is what of it there is where an accelerator makes the steps; the last one is NVRx's own fault-tolerance
callback, under its rank monitor.

    python benchmarks/overhead.py [--steps 4000] [--repeat 3] [--only WORDS]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, FaultTolerance, LocalCheckpoint, NaNGuard, Preemption, StragglerDetection
from lightning_resilience.detect.hangs.progress import Progress
from lightning_resilience.detect.stragglers.step_timer import SamplingWindow
from lightning_resilience.fit import joining
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

TOGGLE = 10
ACCOUNT = "the account of time"
ON_DEVICE = "the same, as with an accelerator"  # whose steps are not split by the host's time
BACKWARD = torch.autograd.backward


class EveryStepWithSeveralRanks(StragglerDetection):
    """Times every step, and looks for waits at the end of its backward pass, as where there is somebody to wait for."""

    def _participate(self, session: FitSession) -> Participant:
        participant: Any = super()._participate(session)
        participant._time._sampling = SamplingWindow()
        participant._comm_wait.start()
        return participant


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Toggle(L.Callback):
    """Takes callbacks out of the Trainer and puts them back, every ``TOGGLE`` steps, and times the steps."""

    def __init__(self, others: list[L.Callback], set_on: Callable[[L.Trainer, bool], None]) -> None:
        self.others, self.set_on = others, set_on
        self.on = True
        self.wall: dict[bool, list[float]] = {True: [], False: []}
        self.cpu: dict[bool, list[float]] = {True: [], False: []}
        self.last: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter(), time.thread_time()
        if self.last is not None and batch_idx > 200 and batch_idx % TOGGLE not in (0, 1):
            self.wall[self.on].append(now[0] - self.last[0])
            self.cpu[self.on].append(now[1] - self.last[1])
        if batch_idx % TOGGLE == 0:
            self.on = not self.on
            if self.others:
                trainer.callbacks = [self, *(self.others if self.on else [])]
            self.set_on(trainer, self.on)
        self.last = time.perf_counter(), time.thread_time()


def ours_on(trainer: L.Trainer, on: bool) -> None:
    """Takes off, or puts back, what belongs to the callbacks beside their hooks: boundaries, records, waits."""
    session = joining._active
    if session is None:
        return
    fit = session.fit
    session._running = on
    watched: Progress | None = vars(fit).setdefault("_benchmark_progress", fit.progress)
    fit.progress = watched if on else None
    # LocalCheckpoint looks after every batch, and before every step of an optimizer, whether a copy is under way;
    # NaNGuard looks at the gradients there. StragglerDetection looks at the clock wherever a step goes on to something.
    before_step = _global_optimizer_pre_hooks
    hooks = vars(fit).setdefault("_benchmark_hooks", dict(before_step))
    before_step.clear()
    if on:
        before_step.update(hooks)
    for owner, name in (
        (trainer.fit_loop.epoch_loop.automatic_optimization, "run"),
        (trainer._logger_connector, "on_batch_start"),
        (trainer.strategy, "backward"),
        (trainer.precision_plugin, "pre_backward"),
    ):
        patched = vars(fit).setdefault(f"_benchmark_{name}", vars(owner).get(name))
        vars(owner).pop(name, None)
        if on and patched is not None:
            setattr(owner, name, patched)
    account_on(trainer, on)
    backward = vars(fit).setdefault("_benchmark_waits", torch.autograd.backward)
    torch.autograd.backward = backward if on else BACKWARD


def account_on(trainer: L.Trainer, on: bool) -> None:
    """Takes off, or puts back, the account of time alone."""
    session = joining._active
    if session is None:
        return
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    attributes = vars(session.fit.time), vars(loop.batch_progress), vars(fetcher)
    own = [functools.partial(lambda step: None), None, functools.partial(type(loop)._on_after_fetch, loop)]
    names = "begin_batch", "increment_processed", "_stop_profiler"
    patches = vars(session.fit).setdefault(
        "_benchmark_account", [there.get(name) for there, name in zip(attributes, names, strict=True)]
    )
    for there, name, value in zip(attributes, names, patches if on else own, strict=True):
        there.pop(name, None)
        if value is not None:
            there[name] = value


def measure(make: Callable[[], list[L.Callback]], steps: int, set_on: Callable[[L.Trainer, bool], None]) -> Toggle:
    callbacks = make()
    toggle = Toggle([] if set_on is account_on else callbacks, set_on)
    data = DataLoader(TensorDataset(torch.randn(steps * 4, 64)), 4)
    with tempfile.TemporaryDirectory() as directory:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[toggle, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        trainer.fit(Model(), data)
    return toggle


@contextlib.contextmanager
def rank_monitor() -> Iterator[bool]:
    """NVRx's rank monitor for this process, as ``ft_launcher`` starts it. Yields whether there is one."""
    try:
        from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
        from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer
    except ImportError:
        yield False
        return
    directory = tempfile.mkdtemp()
    socket_path = os.path.join(directory, "monitor.socket")
    config = FaultToleranceConfig(
        initial_rank_heartbeat_timeout=None,
        rank_heartbeat_timeout=None,
        rank_section_timeouts={"setup": 600.0, "step": 180.0, "checkpointing": 420.0},
        rank_out_of_section_timeout=300.0,
    )
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = socket_path
    os.environ.setdefault("FAULT_TOL_FINISHED_FLAG_FILE", os.path.join(directory, "finished"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the monitor tells at length what this machine does not have, and inherits this
    process = RankMonitorServer.run_in_subprocess(cfg=config, ipc_socket_path=socket_path)
    os.dup2(stderr, 2)
    try:
        yield True
    finally:
        process.terminate()
        process.join(5)


def nvrx_sections() -> list[L.Callback]:
    from nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_sections_callback import FaultToleranceSectionsCallback

    return [FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=False, exp_dir=tempfile.mkdtemp())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning_resilience"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ours: dict[str, Callable[[], list[L.Callback]]] = {
        "an empty Callback": lambda: [L.Callback()],
        ACCOUNT: lambda: [Preemption()],
        ON_DEVICE: lambda: [Preemption()],
        "Preemption": lambda: [Preemption()],
        "AutoResume": lambda: [AutoResume()],
        "FaultTolerance": lambda: [FaultTolerance(autoresume=False)],
        "LocalCheckpoint, no save due": lambda: [LocalCheckpoint(train_time_interval=3600)],
        "NaNGuard": lambda: [NaNGuard()],
        "StragglerDetection, no report due": lambda: [StragglerDetection()],
        "the same, in steps that are timed": lambda: [EveryStepWithSeveralRanks()],
        "all but NaNGuard": lambda: [
            FaultTolerance(),
            Preemption(),
            LocalCheckpoint(train_time_interval=3600),
            StragglerDetection(),
            AutoResume(),
        ],
        "all together": lambda: [
            FaultTolerance(),
            Preemption(),
            LocalCheckpoint(train_time_interval=3600),
            NaNGuard(),
            StragglerDetection(),
            AutoResume(),
        ],
    }
    rows: list[tuple[str, float, float, float]] = []
    for name, make in ours.items():
        if arguments.only not in name:
            continue
        set_on = account_on if name in (ACCOUNT, ON_DEVICE) else ours_on
        with patch.object(FitSession, "_splits_steps", name != ON_DEVICE):
            rows.append(row(name, [measure(make, arguments.steps, set_on) for _ in range(arguments.repeat)]))
    with rank_monitor() as running:
        if running:
            # Its sections wrap the strategy's step: taking the callback out leaves those in place, so they are
            # unwrapped and wrapped again.
            runs = [measure(nvrx_sections, arguments.steps, nvrx_on) for _ in range(arguments.repeat)]
            rows.append(row("NVRx FaultToleranceSectionsCallback", runs))
        else:
            print("NVRx is not installed: its row is missing.")
    reference = rows[-1][2] if len(rows) > len(ours) else None
    print(f"\n{'callback':38} {'bare step':>10} {'added':>9} {'added CPU':>10} {'of NVRx':>8}")
    for name, base, added, cpu in rows:
        share = f"{added / reference:7.1%}" if reference else "-"
        print(f"{name:38} {base:7.0f} us {added:6.1f} us {cpu:7.1f} us {share:>8}")


def nvrx_on(trainer: L.Trainer, on: bool) -> None:
    """Switches NVRx's wrapped step off and on."""
    strategy = trainer.strategy
    wrapped = vars(strategy).setdefault("_benchmark_step", vars(strategy).get("training_step"))
    if wrapped is None:
        return
    if on:
        strategy.training_step = wrapped
    else:
        strategy.training_step = type(strategy).training_step.__get__(strategy)


def lower_quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]


def row(name: str, runs: list[Toggle]) -> tuple[str, float, float, float]:
    def added(times: str) -> float:
        found = [getattr(run, times) for run in runs]
        return statistics.median(lower_quartile(each[True]) - lower_quartile(each[False]) for each in found) * 1e6

    base = statistics.median(lower_quartile(run.wall[False]) for run in runs) * 1e6
    return name, base, added("wall"), added("cpu")


if __name__ == "__main__":
    main()
