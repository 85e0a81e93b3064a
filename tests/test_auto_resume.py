"""Which checkpoint a run resumes from, what it does with one that cannot be trusted, and when it saves."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_resilience import AutoResume, resolve_resume_path
from lightning_resilience._files import temporary_path
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.checkpoint.safe_serialization import Entries, from_safe, to_safe
from lightning_resilience.fit import context
from lightning_resilience.launch.status import status
from lightning_resilience.run.history import History
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import result, run
from tests.ledgers import read_ledger
from tests.test_exact_resume import killed_and_resumed, make, undisturbed


def killed(tmp: Path, **options: Any) -> dict[str, Any]:
    """A run that was killed at step 23: there are checkpoints of steps 15 and 20."""
    config = make(tmp, "run", **options)
    codes, text = run({**config, "events": [{"at": "train", "step": 23, "do": "SIGKILL"}]}, tmp / "run")
    assert -signal.SIGKILL in codes, text
    return config


def checkpoints(config: dict[str, Any]) -> list[Path]:
    return resume.checkpoints(RunDirectory(config["run_dir"]).fit(0).checkpoints)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def plain_torch(path: Path) -> None:
    torch.save({"state_dict": {}}, path)


class Planted:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def planted(path: Path) -> None:
    stamp = checkpoint_file.read_stamp(path)
    checkpoint_file.save({**torch.load(path, map_location="cpu"), "planted": Planted()}, path, stamp.metadata)


def foreign(path: Path) -> None:
    checkpoint_file.save({"state_dict": {}}, path, {"fit": 7})


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "one flipped bit": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "the last bytes are missing": lambda path: os.truncate(path, path.stat().st_size - 10),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(b"not a checkpoint" * 100),
    "not written by us": plain_torch,
    "an object that is executed when it is read": planted,
    "of another fit": foreign,
    "an unsealed directory": lambda path: (path.unlink(), path.mkdir(), (path / "shard").write_bytes(b"x")),
}


@pytest.mark.slow_but_for("one flipped bit")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_checkpoint_that_does_not_verify_is_quarantined(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    config = killed(tmp_path)
    newest = checkpoints(config)[0]
    damage(newest)
    os.utime(newest, (2**31, 2**31))  # the newest by its time, too
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "Checkpoint rejected" in text
    assert "Resuming from step 15" in text
    quarantine = RunDirectory(config["run_dir"]).fit(0).quarantine
    assert any(path.name.startswith(newest.name) for path in quarantine.iterdir())
    assert any(event["event"] == "quarantined" for event in read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert result(config) == undisturbed(tmp_path)[0]


def test_checkpoints_that_are_gone_are_missed_and_no_longer_safe(tmp_path: Path) -> None:
    config = killed(tmp_path)
    run_directory = RunDirectory(config["run_dir"])
    assert re.search(r"^Safe +step 20$", status(run_directory.path), re.MULTILINE)
    resume.checkpoints(run_directory.fit(0).checkpoints)[0].unlink()
    assert re.search(r"^Safe +step 15$", status(run_directory.path), re.MULTILINE)
    assert History().safe_step(run_directory) == History().safe_step(run_directory, fit=0) == 15, "no ledger is left"
    assert History().safe_step(run_directory, fit=1) is None
    shutil.rmtree(run_directory.fit(0).checkpoints)
    assert re.search(r"^Safe +no checkpoint yet$", status(run_directory.path), re.MULTILINE)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert f"The checkpoints of {run_directory.fit(0).path} are gone (the newest was of step 20)" in text
    assert result(config) == undisturbed(tmp_path)[0]


def test_nothing_that_verifies_starts_fresh_and_says_so(tmp_path: Path) -> None:
    config = killed(tmp_path)
    for path in checkpoints(config):
        flip_a_bit(path)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "No checkpoint in" in text or "a fresh start" in text
    assert result(config) == undisturbed(tmp_path)[0]


@pytest.mark.slow
def test_one_rank_cannot_read_what_the_others_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks take the same checkpoint: the newest that every one of them has verified."""
    options = {"trainer": {"devices": 2}}
    config = killed(tmp_path, **options)
    codes, text = run({**config, "unreadable": [1, "step-000000000020.ckpt"]}, tmp_path / "run")
    assert codes == [0, 0], text
    assert "Rank 1 cannot read" in text
    assert "Resuming from step 15" in text
    assert result(config) == undisturbed(tmp_path, **options)[0]


def test_left_overs_of_a_save_that_was_killed_are_removed(tmp_path: Path) -> None:
    config = killed(tmp_path)
    directory = RunDirectory(config["run_dir"]).fit(0).checkpoints
    from lightning_resilience._files import temporary_path

    leftover = temporary_path(directory / "step-000000000025.ckpt")
    name = leftover.name.replace(str(os.getpid()), "999999999")
    (directory / name).write_bytes(b"half")
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert sorted(path.suffix for path in directory.iterdir()) == [".ckpt", ".ckpt"]


@pytest.mark.slow
def test_more_ranks_go_on_in_smaller_batches(tmp_path: Path) -> None:
    config = killed(tmp_path, trainer={"devices": 1})
    codes, text = run({**config, "trainer": {"devices": 2}}, tmp_path / "run")
    assert set(codes) == {0}, text
    assert "was saved by a run of 1 ranks and is resumed by 2: each rank has batches of 2. Steps have the same" in text
    assert result(config)[0]["epoch"] == 3


def test_keeps_only_the_newest(tmp_path: Path) -> None:
    config = make(tmp_path, "run")
    run(config, tmp_path / "run")
    assert [path.name for path in checkpoints(config)] == ["step-000000000048-final.ckpt", "step-000000000045.ckpt"]


@pytest.mark.also_as_on_gpu
@pytest.mark.slow_but_for("cpu")
def test_saves_by_the_clock_on_all_ranks_together(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 2}, "save_every": None, "step_s": 0.02, "interval_s": 0.2}
    config = make(
        tmp_path, "run", events=[{"at": "train", "step": 40, "rank": 1, "do": "SIGKILL", "once": True}], **options
    )
    assert -signal.SIGKILL in run(config, tmp_path / "run")[0]
    saved = [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == "saved"]
    assert saved
    assert {event["reason"] for event in saved} == {"interval"}
    codes, text = run(config, tmp_path / "run")
    assert set(codes) == {0}, text
    assert result(config) == undisturbed(tmp_path, trainer={"devices": 2})[0]


def test_follows_the_saves_of_model_checkpoint(tmp_path: Path) -> None:
    options = {"save_every": None, "validation": True, "plateau": True}
    save = {"every_n_train_steps": 8, "save_top_k": 1, "monitor": "val_loss", "dirpath": str(tmp_path / "own")}
    events = [{"at": "train", "step": 29}]
    got = killed_and_resumed(tmp_path, events, **options, model_checkpoint=save)
    shutil.rmtree(tmp_path / "own")
    save = {**save, "dirpath": str(tmp_path / "reference-own")}
    assert got[:2] == undisturbed(tmp_path, **options, model_checkpoint=save)


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    config = make(tmp_path, "run", disk_full_at=20)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "could not be saved" in text
    assert result(config) == undisturbed(tmp_path)[0]


def test_a_late_process_of_an_older_attempt_writes_nothing(tmp_path: Path) -> None:
    config = make(tmp_path, "run", taken_over_at=12)
    codes, text = run(config, tmp_path / "run")
    assert codes == [1], text
    assert "it stops without writing" in text
    assert [resume.step_of(path) for path in checkpoints(config)] == [10, 5]
    assert RunDirectory(config["run_dir"]).fit(0).outcome is None


def test_resolve_resume_path(tmp_path: Path) -> None:
    assert resolve_resume_path(tmp_path / "nothing here") is None
    config = killed(tmp_path)
    newest, older = checkpoints(config)
    assert resolve_resume_path(config["run_dir"]) == newest
    flip_a_bit(newest)
    assert resolve_resume_path(config["run_dir"]) == older
    assert resolve_resume_path(newest.parent) == older
    assert newest.exists()


def test_only_what_is_named_as_a_checkpoint_is_one(tmp_path: Path) -> None:
    """Not a copy that somebody keeps, nor what is being written."""
    name = resume.checkpoint_name(12)
    final = resume.checkpoint_name(12, final=True)
    for other in (f"{name}.bak", f"{final}.bak", f"old-{name}", "step-12-best.ckpt", temporary_path(name).name):
        (tmp_path / other).touch()
        assert not resume.is_final(other)
        with pytest.raises(ValueError, match="not named like a checkpoint"):
            resume.step_of(other)
    assert resume.checkpoints(tmp_path) == []
    names = [final, name, resume.checkpoint_name(3)]
    for each in names:
        (tmp_path / each).touch()
    assert [path.name for path in resume.checkpoints(tmp_path)] == names
    resume.retain(tmp_path, keep=1, step=3)
    assert [path.name for path in resume.checkpoints(tmp_path)] == names, "what a fit saves that has gone back stays"
    resume.retain(tmp_path, keep=1, step=10**12)
    assert len(list(tmp_path.iterdir())) == 6


def test_a_checkpoint_opens_with_plain_torch(tmp_path: Path) -> None:
    config = killed(tmp_path)
    checkpoint = torch.load(checkpoints(config)[0], weights_only=True)
    assert checkpoint["global_step"] == 20
    assert set(checkpoint) >= {"state_dict", "optimizer_states", "loops", "lightning_resilience"}


@pytest.mark.parametrize(
    "arguments",
    [{"keep": 1}, {"every_n_train_steps": 0}, {"train_time_interval": datetime.timedelta(0)}],
)
def test_refuses_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        AutoResume(**arguments)


def test_state_in_plain_types(tmp_path: Path) -> None:
    state = {
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "number": np.float32(1.5),
        "path": Path("/a/b"),
        "wait": datetime.timedelta(days=1, microseconds=3),
        "when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
        "nested": [({"x": torch.ones(2)}, {1, 2}), None],
    }
    plain, left_out = to_safe(state)
    assert left_out == []
    torch.save(plain, tmp_path / "state")
    loaded = from_safe(torch.load(tmp_path / "state", weights_only=True))
    assert (loaded["array"] == state["array"]).all()
    assert loaded["array"].dtype == np.uint16
    assert type(loaded["number"]) is np.float32
    for key in ("path", "wait", "when"):
        assert loaded[key] == state[key]
    assert torch.equal(loaded["nested"][0][0]["x"], torch.ones(2))

    plain, left_out = to_safe({"callbacks": Entries({"Mine": {"encoder": object(), "half": 1}, "Other": {"kept": 1}})})
    assert plain == {"callbacks": {"Other": {"kept": 1}}}
    assert left_out == ["Mine.encoder (builtins.object)"]


class OwnSave(SingleDeviceStrategy):
    """A strategy that writes its checkpoints itself, as FSDP does."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


class OwnFiles(TorchCheckpointIO):
    """Writes and reads what only it can read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).write_text("a checkpoint")

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise AssertionError("it is not asked for the run's own checkpoints")


class WritesItself(SingleDeviceStrategy):
    """A strategy that asks no plugin."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, filepath)


def test_a_strategy_whose_files_no_resume_takes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At its first save, and not when all progress is lost."""
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        callbacks=[AutoResume(tmp_path / "run", every_n_train_steps=5)],
        strategy=WritesItself(device=torch.device("cpu")),
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    assert "The checkpoint of step 5 could not be saved (CorruptCheckpoint" in caplog.text
    assert "it has no checksum" in caplog.text
    assert "Saved step 5" not in caplog.text


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 12:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("io", [OwnFiles, lambda: AsyncCheckpointIO(TorchCheckpointIO())], ids=["custom", "async"])
def test_own_checkpoints_do_not_depend_on_the_plugin(io: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a plugin writes without a checksum, or later, would be refused, and all progress lost."""

    def fit(*more: L.Callback) -> L.Trainer:
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            callbacks=[AutoResume(tmp_path / "run", every_n_train_steps=5), *more],
            strategy=OwnSave(device=torch.device("cpu")),
            plugins=[io()],
            max_steps=20,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(BoringModel())
        return trainer

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Fails())
    context.fits_begun.clear()  # as in another process
    fit()
    assert "could not be saved" not in caplog.text
    [resumed] = [each for each in read_ledger(RunDirectory(tmp_path / "run").ledger) if each["event"] == "resumed"]
    assert resumed["step"] == 10


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_buffers_are_saved_too(layout: str, tmp_path: Path) -> None:
    """In the background, where copies of the saves before are written to again."""

    class Sparse(BoringModel):
        def __init__(self, factor: float) -> None:
            super().__init__()
            dense = factor * torch.eye(2)
            self.register_buffer("sparse", dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())

    def fit(factor: float, max_steps: int) -> Sparse:
        context.fits_begun.clear()
        module = Sparse(factor)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path, "limit_val_batches": 0}
        L.Trainer(max_steps=max_steps, callbacks=[AutoResume(every_n_train_steps=1)], **quiet).fit(module)
        return module

    fit(2.0, 4)
    resumed: Any = fit(3.0, 8)
    assert torch.equal(resumed.sparse.to_dense(), 2 * torch.eye(2))
