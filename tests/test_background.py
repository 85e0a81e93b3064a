"""Global checkpoints that are written behind the training: ``AutoResume(async_save=True)``."""

from __future__ import annotations

import json
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.checkpoint.background import BackgroundSaves
from lightning_resilience.checkpoint.capacity import Room
from lightning_resilience.fit import saving
from lightning_resilience.run.run_directory import RunDirectory, StaleAttempt
from tests.harness import run
from tests.ledgers import read_ledger
from tests.test_exact_resume import killed_and_resumed, make, undisturbed

CASES: dict[str, dict[str, Any]] = {
    "one process": {},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}},
    "manual optimization": {"manual": True},
    "two ranks, validation": {"trainer": {"devices": 2}, "validation": True, "plateau": True},
}


LONG = ("accumulation", "manual optimization")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.campaign if name in LONG else ())
        for name, options in CASES.items()
    ],
)
@pytest.mark.slow_but_for("two ranks, validation")
def test_killed_and_resumed_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    events = [{"at": "train", "step": 27}]
    done = killed_and_resumed(tmp_path, events, async_save=True, step_s=0.01, save_every=2, **options)
    assert done[:2] == undisturbed(tmp_path, save_every=2, **options)
    assert "Resuming from step" in done[2]


@pytest.mark.campaign
def test_preempted_while_one_is_being_written(tmp_path: Path) -> None:
    """What the preemption saves is newer, and complete."""
    options = {"trainer": {"devices": 2}, "step_s": 0.01, "save_every": 1}
    events = [{"at": "train", "step": 20, "rank": 1, "do": "SIGTERM"}]
    done = killed_and_resumed(tmp_path, events, async_save=True, **options)
    assert done[:2] == undisturbed(tmp_path, **options)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


class AtStep(L.Callback):
    """Calls a function at the end of a step, and keeps the weights after every step."""

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions = actions
        self.weights: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.weights[trainer.global_step] = module.layer.weight.detach().clone()
        self.actions.get(trainer.global_step, lambda: None)()


def fit(run: Path, actions: dict[int, Any], **arguments: Any) -> AtStep:
    at_step = AtStep(actions)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.parent,
        callbacks=[AutoResume(run, every_n_train_steps=4, async_save=True, **arguments), at_step],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(24, 4)), 2))
    return at_step


def steps(run: Path) -> list[int]:
    return sorted(resume.step_of(path) for path in resume.checkpoints(RunDirectory(run).fit(0).checkpoints))


class Held:
    """Holds every write back until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.begun = threading.Event()
        save = checkpoint_file.save

        def held(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.begun.set()
                assert self.let_go.wait(30)
            return save(*args, **kwargs)

        monkeypatch.setattr(checkpoint_file, "save", held)


def test_the_training_goes_on_meanwhile_and_what_is_saved_is_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, held = tmp_path / "run", Held(monkeypatch)
    seen: list[list[int]] = []

    def look() -> None:
        assert held.begun.wait(30)
        seen.append(steps(run))
        held.let_go.set()

    after = fit(run, {7: look}, keep=5)
    assert seen == [[]], "three steps after the save nothing is published, and the training has gone on"
    checkpoint = checkpoint_file.load(RunDirectory(run).fit(0).checkpoints / resume.checkpoint_name(4))
    assert torch.equal(checkpoint["state_dict"]["layer.weight"], after.weights[4])
    assert not torch.equal(after.weights[4], after.weights[7])


def test_one_that_comes_too_soon_is_left_out_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, held = tmp_path / "run", Held(monkeypatch)
    with caplog.at_level(logging.WARNING, "lightning_resilience"):
        fit(run, {11: held.let_go.set}, keep=5)
    assert 8 not in steps(run)
    assert {4, 12} <= set(steps(run)), "waited for at the end"
    assert caplog.text.count("skipping the save of step") == 1


def test_the_final_state_comes_after_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, held = tmp_path / "run", Held(monkeypatch)
    fit(run, {11: threading.Timer(0.5, held.let_go.set).start}, keep=5)
    saved = [event["step"] for event in read_ledger(RunDirectory(run).ledger) if event["event"] == "saved"]
    assert saved == [4, 12]


def test_a_storage_that_never_answers_does_not_keep_the_fit_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, held = tmp_path / "run", Held(monkeypatch)
    monkeypatch.setattr(saving, "_COLLECTIVE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(saving, "_LAST_SAVE_S", 0.1)
    bound = threading.Timer(20, held.let_go.set)
    bound.start()
    fit(run, {})
    bound.cancel()
    assert not held.let_go.is_set(), "it has waited for it"
    assert "The checkpoint of step 12 could not be saved (the previous one has not been written" in caplog.text
    held.let_go.set()


def test_a_fit_that_raises_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, held = tmp_path / "run", Held(monkeypatch)

    def fail() -> None:
        threading.Timer(0.5, held.let_go.set).start()
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(run, {7: fail})
    assert steps(run) == [4]


def test_a_full_disk_is_reported_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = checkpoint_file.save

    def full(obj: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
        if resume.step_of(path) == 4:
            raise OSError(28, "No space left on device")
        return save(obj, path, *args, **kwargs)

    monkeypatch.setattr(checkpoint_file, "save", full)
    fit(tmp_path / "run", {})
    assert "The checkpoint of step 4 could not be saved (OSError" in caplog.text
    assert 12 in steps(tmp_path / "run")
    events = [event["event"] for event in read_ledger(RunDirectory(tmp_path / "run").ledger)]
    assert events.count("save_failed") == 1


def test_a_late_process_ends_at_its_next_boundary_and_publishes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(StaleAttempt):
        fit(run, {3: lambda: RunDirectory(run).claim()})
    assert steps(run) == []


def test_a_snapshot_that_was_spoilt_is_taken_again(tmp_path: Path) -> None:
    class Careless(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    run = tmp_path / "run"
    at_step = AtStep({})
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[AutoResume(run, every_n_train_steps=40, async_save=True, keep=9), at_step],
    )  # fmt: skip
    trainer.fit(Careless(), DataLoader(TensorDataset(torch.randn(160, 4)), 2))
    saved = [path for path in resume.checkpoints(RunDirectory(run).fit(0).checkpoints) if not resume.is_final(path)]
    assert len(saved) >= 1
    for path in saved:
        weight = checkpoint_file.load(path)["state_dict"]["layer.weight"]
        assert torch.equal(weight, at_step.weights[resume.step_of(path)])
    assert [resume.step_of(path) for path in saved] != [40], "the first was invalidated, and taken again later"


def test_what_goes_wrong_is_raised_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    saves = BackgroundSaves()

    def write(copy: Any) -> None:
        raise KeyError("in the thread")

    saves.take({"weight": parameter}, [parameter], write)
    assert saves.wait(10)
    with pytest.raises(KeyError, match="in the thread"):
        saves.check()
    saves.check()
    saves.close(1)


def test_what_goes_wrong_is_raised_though_another_save_has_begun() -> None:
    """It is no error of the later one, whose caller would report it as such."""

    def write(copy: Any) -> None:
        raise RuntimeError("the first one")

    saves = BackgroundSaves()
    try:
        saves.take({"a": torch.ones(2)}, [], write)
        saves.wait()
        saves.take({"a": torch.ones(2)}, [], lambda copy: None)
        with pytest.raises(RuntimeError, match="the first one"):
            saves.check()
        saves.wait()
        saves.check()
    finally:
        saves.close(5.0)


def test_where_there_is_no_memory_for_a_copy_the_training_waits_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads: set[str] = set()
    save = checkpoint_file.save

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint_file, "save", noted)
    monkeypatch.setattr(saving, "memory_left", lambda: Room(50, "what a test leaves"))
    with caplog.at_level(logging.WARNING, "lightning_resilience"):
        fit(tmp_path / "run", {}, keep=5)
    assert threads == {"MainThread"}
    assert steps(tmp_path / "run") == [4, 8, 12]
    assert caplog.text.count("are available (what a test leaves)") == 1
    threads.clear()
    monkeypatch.setattr(saving, "memory_left", lambda: Room(80, "what a test leaves"))
    fit(tmp_path / "other", {}, keep=5)
    assert threads == {"MainThread", "background-checkpoint"}, "60 bytes of parameters and what Adam keeps, and a tenth"


@pytest.mark.slow
def test_no_limit_is_learned_from_saves_that_were_not_waited_for(tmp_path: Path) -> None:
    """Or that of a preemption, which is, would be taken for a hang."""
    limits: dict[bool, Any] = {}
    for async_save in (True, False):
        config = make(
            tmp_path,
            f"run-{async_save}",
            callbacks=["fault_tolerance", "auto_resume"],
            async_save=async_save,
            fault_tolerance={"section_timeouts": "step:100,checkpointing:400", "calculate_timeouts": True},
        )
        codes, text = run(config, Path(config["run_dir"]).parent, environment={"TORCHELASTIC_MAX_RESTARTS": "1"})
        assert codes == [0], text
        state = json.loads(Path(config["run_dir"], "ft_state.json").read_text())
        limits[async_save] = state["fits"]["0"]["calculated"]
    assert limits[False]["checkpointing"] < 400
    assert limits[True].get("checkpointing", 400) == 400
    assert limits[True]["step"] < 100


@pytest.mark.campaign
def test_killed_at_any_time(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}, "step_s": 0.005, "save_every": 1}
    for number, step in enumerate((5, 11, 17, 23, 29, 35, 41, 46)):
        folder = tmp_path / str(number)
        folder.mkdir()
        events = [{"at": "train", "step": step, "rank": number % 2, "do": signal.SIGKILL.name}]
        assert killed_and_resumed(folder, events, async_save=True, **options)[:2] == undisturbed(folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"data_parallel": 1}, marks=pytest.mark.campaign, id="tensor parallel"),
        pytest.param({"trainer": {"devices": 2, "accumulate_grad_batches": 3}}, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.slow
def test_shards_killed_and_resumed_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    """FSDP2: each rank writes its own behind the training, and nothing is published before all have."""
    options = {"sharded": True, "trainer": {"devices": 2}, **options}
    events = [{"at": "train", "step": 27, "rank": 1}]
    done = killed_and_resumed(tmp_path, events, async_save=True, step_s=0.02, save_every=2, **options)
    assert done[:2] == undisturbed(tmp_path, save_every=2, **options)
    assert "Resuming from step" in done[2]
