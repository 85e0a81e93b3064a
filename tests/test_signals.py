"""The listener for signals: it hears them whatever the script has done to handlers, descriptors and streams."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import Interrupted, Preemption, signals
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.events import Event, SignalReceived
from lightning_resilience.run.ledger import Ledger
from tests.harness import run_command

BEFORE = """
import asyncio, ctypes, os, resource, signal, sys, threading, time
from lightning_resilience import signals
heard = threading.Event()
def listen(**options):
    listener = signals.install(**{"grace_period_s": 60, **options})
    listener.subscribe(lambda signum: heard.set())
    return listener
"""


def script(text: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, which is killed if it hears nothing."""
    return run_command([sys.executable, "-c", BEFORE + textwrap.dedent(text)], timeout_s=30)


CLOSED_LOOP = """
listener = listen()
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR2, print)
loop.close()
assert signal.set_wakeup_fd(-1) == -1  # asyncio has removed it
"""


def test_is_heard_after_an_asyncio_loop_was_closed() -> None:
    done = script(CLOSED_LOOP + "os.kill(os.getpid(), signal.SIGTERM); assert heard.wait(10)")
    assert done.returncode == 0, done.stderr


def test_a_fit_puts_back_what_hears_signals_while_the_main_thread_is_blocked() -> None:
    """Blocked in C, for a mutex that only the subscriber unlocks: no handler in Python runs."""
    blocked = """
listener.handle()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
listener.subscribe(lambda signum: libc.pthread_mutex_unlock(mutex))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
assert listener.received is signal.SIGTERM
"""
    done = script(CLOSED_LOOP + blocked)
    assert done.returncode == 0, done.stderr


def test_an_asyncio_loop_that_is_open_hears_its_signals_too() -> None:
    done = script(
        """
        loop, theirs = asyncio.new_event_loop(), threading.Event()
        loop.add_signal_handler(signal.SIGUSR2, theirs.set)
        listener = listen()
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), signum)
        loop.run_until_complete(asyncio.sleep(0.2))
        assert theirs.is_set() and heard.is_set()
        signals.uninstall()
        os.kill(os.getpid(), signal.SIGUSR2)
        theirs.clear()
        loop.run_until_complete(asyncio.sleep(0.2))
        assert theirs.is_set()
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_signal_that_python_hears_late_is_not_taken_for_a_second_one() -> None:
    done = script(
        f"""
        listener = listen()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Timer({deadlines.SECOND_SIGNAL_AFTER_S} + 0.5, libc.pthread_mutex_unlock, (mutex,)).start()
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # the handler in Python is called after this
        time.sleep(0.3)
        print("still here")
        """
    )
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


def test_is_heard_with_many_open_files() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < 2048:
        pytest.skip("this machine allows too few open files")
    done = script(
        f"""
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, {limit}))
        files = [open(os.devnull) for _ in range(1100)]
        listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(10)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow_but_for("sys.stderr.close()")
@pytest.mark.parametrize(
    "trouble",
    [
        "listener.subscribe(sys.exit)",
        "sys.stderr.close()",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
        "listener._on_signal = None",
    ],
)
def test_whatever_is_raised_in_the_listener_the_grace_period_ends_the_process(trouble: str) -> None:
    done = script(
        f"""
        listener = listen(grace_period_s=0.5)
        {trouble}
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        listener.start_grace_period()
        time.sleep(20)
        """
    )
    assert done.returncode == exit_codes.INTERRUPTED, done.stderr


def test_last_words_that_find_no_end_do_not_keep_the_process() -> None:
    done = script(
        """
        signals.LAST_WORDS_WITHIN_S = 0.2
        listener = listen(grace_period_s=0.2)
        listener.subscribe(lambda signum: None, before_exit=lambda reason: threading.Event().wait())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        """
    )
    assert done.returncode == exit_codes.INTERRUPTED, done.stderr


# -- in a fit ----------------------------------------------------------------------------------------------------------


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.at_step: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (act := self.at_step.pop(batch_idx, None)) is not None:
            act()
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Readers(Dataset[torch.Tensor]):
    """Decodes by processes of its own, which it ends: one that is executed, and one that is only forked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            reader = subprocess.Popen(["sleep", "60"])
            reader.terminate()
            reader.wait(20)
            if (pid := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            os.kill(os.getpid(), signal.SIGTERM)  # as one to the whole process group: the worker does not mind
        return torch.ones(1)


BATCHES = 1000  # the listener is another thread, and may be a few steps late


def fit(run_dir: Path, module: Module, workers: int = 0, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=[Preemption(run_dir=run_dir)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Readers() if workers else torch.ones(BATCHES, 1), num_workers=workers, **options))
    return trainer


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.campaign)])
def test_what_a_data_loader_worker_starts_can_be_terminated(tmp_path: Path, context: str) -> None:
    assert fit(tmp_path, Module(), workers=1, multiprocessing_context=context).global_step == 4


@pytest.fixture
def launched() -> Iterator[signals.SignalListener]:
    """A process that listens since before the script, as one that launch has started."""
    before = signal.getsignal(signal.SIGTERM)
    listener = signals.install(grace_period_s=60)
    assert listener is not None
    yield listener
    signals.uninstall()
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_handler_of_the_script_is_called_and_given_back(
    tmp_path: Path, launched: signals.SignalListener, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []
    ours = signal.getsignal(signal.SIGTERM)

    def handler(signum: int, frame: Any) -> None:
        called.append(signum)
        ours(signum, frame)  # as handlers do that have replaced another one
        if len(called) == 2:
            raise SystemExit(143)

    signal.signal(signal.SIGTERM, handler)
    module = Module()
    fit(tmp_path / "undisturbed", module)
    assert signal.getsignal(signal.SIGTERM) is handler

    def twice() -> None:
        terminate()
        terminate()

    module.at_step[1] = twice
    with pytest.raises(Interrupted, match="interrupted at step"):  # and not by an exit in the middle of one
        fit(tmp_path / "stopped", module)
    assert called == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is handler
    until = time.monotonic() + 10
    while "has raised SystemExit(143)" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert "has raised SystemExit(143)" in caplog.text


def test_a_ledger_on_storage_that_does_not_answer_holds_no_signal_up(
    tmp_path: Path, launched: signals.SignalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, answers = Ledger.record, threading.Event()

    def stuck(self: Ledger, event: Event) -> None:
        if isinstance(event, SignalReceived):
            answers.wait(20)
        record(self, event)

    monkeypatch.setattr(Ledger, "record", stuck)
    module = Module()
    module.at_step[0] = terminate
    with pytest.raises(Interrupted):
        fit(tmp_path, module)
    assert not answers.is_set()
    answers.set()


@pytest.mark.slow
def test_without_launch_a_handler_of_the_script_is_called_once(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: called.append(signum))
    try:
        mine, module = signal.getsignal(signal.SIGTERM), Module()
        module.on_train_end = terminate  # type: ignore[method-assign]  # nothing is left to stop
        fit(tmp_path, module)
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_script_that_catches_the_interruption_has_its_own_output_again(tmp_path: Path) -> None:
    gc.collect()  # what was left of tests before
    module, before = Module(), dict(vars(sys.stdout))
    module.at_step[0] = terminate
    try:
        fit(tmp_path, module)
    except Interrupted:
        assert vars(sys.stdout) != before  # whoever ends by it ends in order
    gc.collect()
    assert vars(sys.stdout) == before


@pytest.mark.slow
def test_each_epoch_of_a_fit_listens_again(tmp_path: Path, launched: signals.SignalListener) -> None:
    module, descriptors = Module(), []
    module.on_fit_start = lambda: signal.set_wakeup_fd(-1)  # type: ignore[method-assign]  # as asyncio does
    module.at_step[0] = lambda: descriptors.append(signal.set_wakeup_fd(-1))
    fit(tmp_path, module)
    assert len(descriptors) == 1
    assert descriptors[0] != -1


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_outlive_the_thread_that_has_started_them() -> None:
    """A fit that runs in a thread, say in a notebook, keeps its persistent workers for the next one."""
    loaders: list[DataLoader[int]] = []

    def first() -> None:
        guard = signals.WorkerGuard(None, ())
        loaders.append(DataLoader(_Numbers(), num_workers=1, persistent_workers=True, worker_init_fn=guard))
        list(loaders[0])

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    (worker,) = loaders[0]._iterator._workers  # type: ignore[union-attr]
    worker.join(1.0)
    assert worker.is_alive()
    assert torch.cat(list(loaders[0])).tolist() == [0, 1, 2, 3]


def test_guards_leave_one_finalizer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(signals, "Finalize", lambda *args, **kwargs: made.append(args))
    signals._trainer_ends.cache_clear()
    for _ in range(3):
        signals.WorkerGuard(None, ())
    assert len(made) == 1
    signals._trainer_ends.cache_clear()
