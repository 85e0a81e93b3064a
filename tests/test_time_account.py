"""What a process has spent its time on: every second of it, also of one that was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_resilience import Preemption
from lightning_resilience.run import time_account
from lightning_resilience.run.events import TimeSpent
from lightning_resilience.run.ledger import read_ledger
from lightning_resilience.run.run_directory import RunDirectory
from lightning_resilience.run.time_account import CATEGORIES, TimeAccount, read_account


class Clock:
    """Seconds of a node, which went on for a while before it was looked at."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(clock: Clock) -> TimeAccount:
    return TimeAccount(5.0, clock, lambda: clock() + 1e9)


class Slow(L.LightningModule):
    """Of which every part takes a time of its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.layer = clock, torch.nn.Linear(1, 1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += 1
        return torch.ones(1)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(cast(Any, self))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.now += 10
        return self.layer(batch).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.now += 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class SlowWithItsOwnFetches(Slow):
    """Which takes batches as it likes."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def spent(account: TimeAccount) -> dict[str, float]:
    return {name: seconds for name, seconds in account.close().seconds.items() if seconds}


def test_a_process_from_its_start_to_its_end(account: TimeAccount, clock: Clock) -> None:
    clock.now += 2  # 5 s before that it was started
    account.imported()
    clock.now += 3
    account.imported()  # again, by another module
    clock.now += 1
    account.begin_fit()
    clock.now += 7
    with account.during(time_account.RESTORE):
        clock.now += 4
    clock.now += 1
    account.begin_training(0, splits_steps=True)
    clock.now += 9
    for step in range(1, 4):
        account.begin_batch(step)
        clock.now += 0.25
        account.batch_ready()
        clock.now += 1
        account.batch_done()
        clock.now += 0.5
    account.enter(time_account.TEARDOWN)
    clock.now += 2
    expected = {"imports": 7, "script": 4, "setup": 8, "restore": 4, "first_step": 9}
    expected |= {"data_loading": 0.75, "productive": 3, "callbacks": 1.5, "teardown": 2}
    assert spent(account) == expected


@pytest.mark.parametrize(
    ("module", "profiler", "data_loading"),
    [(Slow, None, 3), (Slow, "simple", 3), (SlowWithItsOwnFetches, None, 0)],
    ids=["plain", "profiled", "fetches-by-itself"],
)
def test_the_parts_of_steps(
    module: type[Slow],
    profiler: str | None,
    data_loading: int,
    account: TimeAccount,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a real fit on the host; its first step is one."""
    monkeypatch.setattr(time_account, "OF_PROCESS", account)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[Preemption(run_dir=tmp_path)], logger=False, profiler=profiler,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module(clock))
    [event] = [event for event in read_ledger(RunDirectory(tmp_path).ledger) if isinstance(event, TimeSpent)]
    found = {name: seconds for name, [seconds] in (event.seconds or {}).items()}
    expected = {"first_step": 111, "productive": 33 - data_loading, "callbacks": 300, "data_loading": data_loading}
    assert {name: found.get(name, 0) for name in expected} == expected
    if profiler is not None:
        recorded: Any = trainer.profiler
        assert len(recorded.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 4


@pytest.mark.parametrize("has_imported", [True, False])
def test_a_process_that_has_waited_counts_from_its_use(account: TimeAccount, clock: Clock, has_imported: bool) -> None:
    clock.now += 100
    if has_imported:
        account.imported()
    clock.now += 1000
    account.begin()
    began = clock() + 1e9
    clock.now += 3
    account.begin_fit()
    clock.now += 2
    found = account.close()
    seconds = {name: each for name, each in found.seconds.items() if each}
    assert (found.began, seconds) == (began, {"script" if has_imported else "imports": 3, "setup": 2})


def test_steps_done_again_are_wasted(account: TimeAccount, clock: Clock) -> None:
    account.begin_fit()
    account.begin_training(3, splits_steps=True)
    for step in range(1, 6):
        account.begin_batch(step)
        account.batch_ready()
        clock.now += 10**step
        account.batch_done()
    account.begin_training(0, splits_steps=True)  # a rollback, to step 2
    for step in range(2, 6):
        account.begin_batch(step)
        account.batch_ready()
        clock.now += 10**step
        account.batch_done()
    found = spent(account)
    assert found["wasted_progress"] == 110 + 11_100
    assert found["productive"] == 111_000 + 100_000


def test_on_an_accelerator_all_of_a_step_is_one(account: TimeAccount, clock: Clock) -> None:
    """The host fetches data while the device computes."""
    account.begin_fit()
    account.begin_training(0, splits_steps=False)
    account.begin_batch(1)
    for advance in (account.batch_ready, account.batch_done, lambda: account.begin_batch(2)):
        clock.now += 1
        advance()
    found = spent(account)
    assert found["productive"] == 3
    assert not {"data_loading", "callbacks"} & found.keys()


@pytest.mark.parametrize("splits_steps", [True, False], ids=["host", "accelerator"])
def test_a_step_that_fails_was_in_vain(account: TimeAccount, clock: Clock, splits_steps: bool) -> None:
    account.begin_fit()
    account.begin_training(0, splits_steps)
    for step in range(1, 3):
        account.begin_batch(step)
        account.batch_ready()
        clock.now += 10**step
    account.end_fit(failed=True)
    clock.now += 3
    found = spent(account)
    assert (found["productive"], found["unfinished_step"], found["teardown"]) == (10, 100, 3)


def test_what_hooks_did_was_not_in_vain(account: TimeAccount, clock: Clock) -> None:
    """Also where they have failed: the step was done."""
    account.begin_fit()
    account.begin_training(0, splits_steps=True)
    account.begin_batch(1)
    account.batch_ready()
    clock.now += 1
    account.batch_done()
    clock.now += 2
    account.end_fit(failed=True)
    found = spent(account)
    assert (found["productive"], found["callbacks"]) == (1, 2)
    assert "unfinished_step" not in found


def test_of_a_step_under_way_a_watchdog_reads_that_it_has_begun(
    account: TimeAccount, clock: Clock, tmp_path: Path
) -> None:
    """Not that it waits for its batch: killed there, it has a step in vain."""
    account.share(tmp_path / "rank.time")
    account.begin_fit()
    account.begin_training(0, splits_steps=True)
    for step in (1, 2):
        clock.now += 1
        account.begin_batch(step)
        began = clock.now
        clock.now += 1
        account.batch_ready()
        clock.now += 1
        account.batch_done()
    with open(tmp_path / "rank.time", "rb", buffering=0) as file:
        found = read_account(file)
    assert found is not None
    assert (found.since, found.doing, found.reached) == (began, "productive", 2)


def test_what_follows_a_fit_is_its_end_only_if_no_other_fit_follows(account: TimeAccount, clock: Clock) -> None:
    account.begin_fit()
    account.enter(time_account.TEARDOWN)
    clock.now += 3
    account.begin_fit()
    account.enter(time_account.TEARDOWN)
    clock.now += 4
    assert spent(account) == {"imports": 5, "script": 3, "teardown": 4}


def test_what_a_person_does_before_a_fit_is_no_part_of_it(account: TimeAccount, clock: Clock) -> None:
    """In a notebook, of every fit."""
    for _ in range(2):
        clock.now += 3600
        account.begin_fit(is_interactive=True)
        began = clock.now
        clock.now += 2
        account.end_fit(failed=False)
        found = account.close()
        assert (found.began, sum(found.seconds.values()), found.seconds["setup"]) == (1e9 + began, 2, 2)


def test_it_is_read_whatever_becomes_of_the_process(account: TimeAccount, clock: Clock, tmp_path: Path) -> None:
    clock.now += 1
    account.imported()
    account.share(tmp_path / "rank.time")
    clock.now += 2
    account.begin_fit()
    with open(tmp_path / "rank.time", "rb", buffering=0) as file:
        found = read_account(file)
        assert found is not None
        assert (found.began, found.since, found.doing) == (1e9 + 995, 1003, "setup")
        assert {name: seconds for name, seconds in found.seconds.items() if seconds} == {"imports": 6, "script": 2}
        clock.now += 4
        if (child := os.fork()) == 0:  # such as a worker of a data loader
            account.enter(time_account.VALIDATION)
            os._exit(0)
        os.waitpid(child, 0)
        closed = account.close()
        assert closed == read_account(file)
        assert closed.seconds["setup"] == 4
        clock.now += 8
        account.begin_fit()
        assert read_account(file) == closed
    assert spent(account) == {"setup": 8}


def test_a_forked_process_has_spent_nothing_of_what_its_parent_has(account: TimeAccount, clock: Clock) -> None:
    clock.now += 100
    account.begin_fit()
    read, write = os.pipe()
    if (child := os.fork()) == 0:  # of a search that trains each trial in a process of its own
        clock.now += 1
        account.begin_fit()
        clock.now += 2
        found = account.close()
        os.write(write, repr((found.began, {name: each for name, each in found.seconds.items() if each})).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == repr((1e9 + 1100, {"script": 1.0, "setup": 2.0}))
    os.close(read)
    os.close(write)
    clock.now += 3
    assert spent(account) == {"imports": 105, "setup": 3}


@pytest.mark.parametrize("content", [b"", b"\0" * 8 * (4 + len(CATEGORIES)), b"\xff" * 8 * (4 + len(CATEGORIES))])
def test_a_file_that_is_no_account(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank.time").write_bytes(content)
    with open(tmp_path / "rank.time", "rb", buffering=0) as file:
        assert read_account(file) is None


def test_this_process_has_been_running() -> None:
    spent = time_account.time_spent({3: TimeAccount(60.0).close()}, {})
    assert spent.ranks == [3]
    assert spent.began is not None
    assert abs(spent.began[0] + 60 - time.time()) < 30


def test_what_was_kept_is_found_until_it_is_forgotten(tmp_path: Path) -> None:
    assert time_account.kept(tmp_path) == []
    event = time_account.time_spent({0: TimeAccount(9.0).close()}, {})
    time_account.keep(tmp_path, "one", event)
    time_account.keep(tmp_path, "two", event)
    (tmp_path / "time" / "torn.json").write_text('{"event": "time_sp')
    (tmp_path / "time" / "other.json").write_text('{"event": "saved", "time": 1.0}')
    assert time_account.kept(tmp_path) == [event, event]
    time_account.forget(tmp_path, "one")
    time_account.forget(tmp_path, "one")
    assert time_account.kept(tmp_path) == [event]
