"""Lightning threads that people meet: each fails with plain Lightning, and holds with this package.

``docs/is-it-my-issue.md`` is the page for users, and its table is compared with this file. ``plain_N`` shows what
thread N says with plain Lightning, ``ours_N`` the same with this package. If ``plain_N`` no longer fails, Lightning was
mended, and the page is to say since when.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_resilience import AutoResume, NaNGuard, recipes
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.fit import context
from lightning_resilience.run import exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import CONTEXT, command, run, run_command, samples, undisturbed, weights
from tests.ledgers import read_ledger
from tests.test_checkpoint_file import in_child
from tests.test_exact_resume import killed_and_resumed, make
from tests.test_hangs import LIMITS, hanging, the_culprit
from tests.test_preemption import (
    TERM,
    TWO,
    requeued_from_the_boundary,
    signalled_as_a_group,
    slurm_job,
    stop_and_resume,
)
from tests.test_slurm import SAVED, Batch, exits

PAGE = Path(__file__).parents[1] / "docs" / "is-it-my-issue.md"

STEPS = 8
"""Of an epoch of ``train``."""


# --- a training in this process ---


class Crash(Exception):
    """In place of a death: in a script of its own it would end the process."""


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index


class Model(L.LightningModule):
    """Notes what it is trained on."""

    def __init__(self, crash_at: int | None = None, crash_in_validation: int | None = None, nan_at: int = -1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.crash_at, self.crash_in_validation, self.nan_at = crash_at, crash_in_validation, nan_at
        self.trained: dict[int, list[int]] = {}
        self.weights_at: dict[int, torch.Tensor] = {}
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash_at:
            raise Crash
        x, samples = batch
        self.trained[self.global_step] = samples.tolist()
        self.weights_at[self.global_step] = self.weights()
        loss = (self.net(x) - 1).pow(2).mean()
        self.log("loss", loss)
        return loss * torch.nan if self.global_step == self.nan_at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.crash_in_validation:
            raise Crash

    def on_validation_end(self) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.parameters()])


def train(
    folder: Path,
    *callbacks: Any,
    model: dict[str, Any] | None = None,
    kind: type[Model] = Model,
    loader: Callable[[], Any] = lambda: DataLoader(Data(), 4, shuffle=True),
    ckpt_path: str | Path | None = None,
    validates: bool = False,
    **options: Any,
) -> Model:
    """What a script does when it is started, which is what happens when it is started again."""
    context.fits_begun.clear()
    L.seed_everything(1, verbose=False)
    module = kind(**(model or {}))
    trainer = L.Trainer(
        callbacks=list(callbacks),
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": any(isinstance(each, L.callbacks.Checkpoint) for each in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": folder,
            **options,
        },
    )
    validation = DataLoader(Data(), 4) if validates else None
    with contextlib.suppress(Crash):
        trainer.fit(module, loader(), validation, ckpt_path=ckpt_path)
    return module


def saver(folder: Path, every: int = 4, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1, **options)


def auto_resume(folder: Path, every: int = 4) -> AutoResume:
    return AutoResume(folder / "run", every_n_train_steps=every, async_save=False)


# --- signals ---


def in_ddp(tmp: Path, **options: Any) -> tuple[list[int | None], str]:
    """Two ranks under torchrun's environment. Where they wait for each other for ever, gloo gives up."""
    options = {"trainer": {"devices": 2}, "callbacks": [], "collective_timeout_s": 3, **options}
    return run(make(tmp, "plain", **options), tmp / "plain")


def plain_20806(tmp: Path) -> None:
    """SIGTERM to one rank: it broadcasts in its signal handler, while the other one is in the step's all-reduce."""
    codes, text = in_ddp(tmp, events=[{**TERM, "at": "train", "step": 20, "rank": 1}])
    assert 0 not in codes
    assert "Timed out" in text


def ours_20806(tmp: Path) -> None:
    stop_and_resume(tmp, [{"at": "train", "step": 20, "rank": 1}], **TWO)


def plain_9567(tmp: Path) -> None:
    """SIGTERM to a single process: it ends as if it had finished, and what it has done since the last save is lost."""
    saves = {"dirpath": str(tmp / "checkpoints"), "filename": "{step}"}
    config = make(tmp, "plain", callbacks=[], model_checkpoint=saves, events=[{**TERM, "at": "train", "step": 20}])
    codes, _ = run(config, tmp / "plain")
    assert codes == [0]
    assert not Path(config["out"]).exists(), "it went on"
    assert [path.name for path in (tmp / "checkpoints").iterdir()] == ["step=16.ckpt"]


def ours_9567(tmp: Path) -> None:
    config = make(tmp, "ours", events=[{**TERM, "at": "train", "step": 20}])
    codes, text = run(config, tmp / "ours")
    assert codes == [75], text
    fit = RunDirectory(config["run_dir"]).fit(0)
    assert fit.outcome is not None
    assert fit.outcome.step > 20
    assert resume.step_of(resume.checkpoints(fit.checkpoints)[0]) == fit.outcome.step


def plain_17899(tmp: Path) -> None:
    """SIGTERM to all processes: the data-loader workers die of it, and so does the step, with an error."""
    config = make(tmp, "plain", callbacks=[], workers=2, step_s=0.5)
    ranks = signalled_as_a_group(config, tmp / "plain", Path(f"{config['log']}.0").exists)
    assert ranks.wait() == [1]
    assert re.search(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)", ranks.text())


def ours_17899(tmp: Path) -> None:
    config = make(tmp, "ours", workers=2, step_s=0.5)
    ranks = signalled_as_a_group(config, tmp / "ours", Path(f"{config['log']}.0").exists)
    assert ranks.wait() == [75], ranks.text()


# --- Slurm ---


def plain_21406(tmp: Path) -> None:
    """The signal that asks for a requeue: the checkpoint is made within the handler, hence in the middle of a step."""
    called, environment = slurm_job(tmp)
    config = make(tmp, "plain", slurm=True, callbacks=[], events=[{"at": "train", "step": 20, "do": "SIGUSR1"}])
    codes, text = run(config, tmp / "plain", environment=environment)
    assert called.read_text() == "requeue 77\n", text
    saved = torch.load(tmp / "plain" / "hpc_ckpt_1.ckpt", weights_only=False)
    batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    assert (batches["ready"], batches["completed"]) == (21, 20)
    assert codes == [0]
    assert Path(config["out"]).exists(), "it trains on beside the job that is requeued"


def ours_21406(tmp: Path) -> None:
    requeued_from_the_boundary(tmp)


def plain_20542(tmp: Path) -> None:
    """SIGTERM at the time limit: nobody saves, nobody asks for a requeue, and Slurm takes the job for completed."""
    called, environment = slurm_job(tmp)
    config = make(tmp, "plain", slurm=True, callbacks=[], events=[{**TERM, "at": "train", "step": 20}])
    codes, _ = run(config, tmp / "plain", environment=environment)
    assert codes == [0]
    assert not Path(config["out"]).exists(), "it went on"
    assert not called.exists()
    assert not list(tmp.glob("**/*.ckpt"))


def ours_20542(tmp: Path) -> None:
    """What the batch script does about a launch that was told to stop; on a real Slurm in tests/slurm."""
    batch = Batch(tmp)
    batch.run(SAVED, exits(75))
    assert batch.asked("requeue") == [["requeue", "17"]]


def plain_20347(tmp: Path) -> None:
    """The first start has no checkpoint to resume from."""
    with pytest.raises(ValueError, match="no HPC checkpoint was found"):
        train(tmp, ckpt_path="hpc")


def ours_20347(tmp: Path) -> None:
    """The same call for the first start and for all others, without a path."""
    assert min(train(tmp, auto_resume(tmp), model={"crash_at": 6}).trained) == 0
    assert min(train(tmp, auto_resume(tmp)).trained) == 4


def logging_script(tmp: Path, *callbacks: Any, crash_at: int | None) -> Model:
    options = {"logger": CSVLogger(tmp), "log_every_n_steps": 1}
    return train(tmp, *callbacks, ModelCheckpoint(every_n_train_steps=4), model={"crash_at": crash_at}, **options)


def plain_16639(tmp: Path) -> None:
    """The script that is started again begins anew, in a new folder."""
    for crash_at in (6, None):
        assert min(logging_script(tmp, crash_at=crash_at).trained) == 0
    assert {path.parts[-3] for path in tmp.glob("**/*.ckpt")} == {"version_0", "version_1"}


def ours_16639(tmp: Path) -> None:
    for crash_at, first in ((6, 0), (None, 4)):
        assert min(logging_script(tmp, auto_resume(tmp), crash_at=crash_at).trained) == first
    assert {path.parts[-3] for path in tmp.glob("lightning_logs/**/*.ckpt")} == {"version_0"}
    (metrics,) = tmp.glob("**/metrics.csv")
    assert [row.split(",")[-1] for row in metrics.read_text().split()[1:]] == [str(step) for step in range(2 * STEPS)]


# --- Weights & Biases ---


def logs_to_wandb(folder: str, ours: bool) -> None:
    """A start of a script that does."""
    import wandb

    options = {"project": "test", "save_dir": folder, "offline": True}
    recipe = recipes.nemo(f"{folder}/run")
    logger = recipe.wandb_logger(**options) if ours else WandbLogger(**options)
    logger.log_metrics({"loss": 1.0}, step=1)
    wandb.finish()


def wandb_runs(tmp: Path, ours: bool) -> set[str]:
    """The ids of the runs that two starts of the same script have made."""
    for _ in range(2):
        script = CONTEXT.Process(target=logs_to_wandb, args=(str(tmp), ours))
        script.start()
        script.join()
        assert script.exitcode == 0
    found = list(tmp.glob("wandb/offline-run-*"))
    assert len(found) == 2
    return {folder.name.split("-", 3)[3] for folder in found}


def plain_13524(tmp: Path) -> None:
    """Each start is a run of its own."""
    assert len(wandb_runs(tmp, ours=False)) == 2


def ours_13524(tmp: Path) -> None:
    """As under ``launch``, which gives the id to every W&B run of its workers."""
    assert len(wandb_runs(tmp, ours=True)) == 1


# --- resuming ---


def plain_18780(tmp: Path) -> None:
    """The warning about a resume within an epoch is right: the rest of the epoch has samples it has had already."""
    before = train(tmp, saver(tmp), model={"crash_at": 4})
    with pytest.warns(UserWarning, match="ended before the epoch ended and your dataloader is not resumable"):
        after = train(tmp, ckpt_path=tmp / "step=4.ckpt")
    epoch = [*before.trained.values(), *(after.trained[step] for step in range(4, STEPS))]
    assert len({sample for batch in epoch for sample in batch}) < 4 * STEPS


def ours_18780(tmp: Path) -> None:
    before = train(tmp, auto_resume(tmp), model={"crash_at": 4})
    after = train(tmp, auto_resume(tmp))
    assert min(after.trained) == 4
    assert {**before.trained, **after.trained} == train(tmp).trained


def plain_18098(tmp: Path) -> None:
    """The loss is another one: random states are not saved, not even at the end of an epoch."""
    train(tmp, saver(tmp, every=STEPS), model={"crash_at": STEPS})
    assert not torch.equal(train(tmp, ckpt_path=tmp / "step=8.ckpt").weights(), train(tmp).weights())


def ours_18098(tmp: Path) -> None:
    train(tmp, auto_resume(tmp), model={"crash_at": STEPS + 2})
    after = train(tmp, auto_resume(tmp))
    assert min(after.trained) == STEPS
    assert torch.equal(after.weights(), train(tmp).weights())


ONE_CYCLE = {"data": "stateful", "augment": False, "dropout": 0.0, "one_cycle": True}


def plain_20550(tmp: Path) -> None:
    """The state of a stateful loader is dropped where ``configure_optimizers`` asks for the number of steps."""
    files = tmp / "files"
    saves = {"dirpath": str(files), "filename": "{step}", "every_n_train_steps": 20}
    config = make(tmp, "plain", callbacks=[], model_checkpoint=saves, numpy=False, **ONE_CYCLE)
    codes, text = run({**config, "events": [{"at": "train", "step": 22, "do": "SIGKILL"}]}, tmp / "plain")
    assert codes == [-signal.SIGKILL], text
    codes, text = run({**config, "ckpt_path": str(files / "step=20.ckpt")}, tmp / "plain")
    assert codes == [0], text
    assert samples(config) != undisturbed(tmp, **ONE_CYCLE)[1]


def ours_20550(tmp: Path) -> None:
    *found, text = killed_and_resumed(tmp, [{"at": "train", "step": 23}], **ONE_CYCLE)
    assert "Resuming from step 20" in text
    assert tuple(found) == undisturbed(tmp, **ONE_CYCLE)


def plain_19549(tmp: Path) -> None:
    """Resumed in an epoch, all validations are whole and at their steps; but one that was cut short is left out."""
    every = {"validates": True, "val_check_interval": 4}
    undisturbed_ones = train(tmp, **every).validated
    train(tmp, saver(tmp, every=2), model={"crash_at": 7}, **every)
    assert train(tmp, ckpt_path=tmp / "step=6.ckpt", **every).validated == undisturbed_ones[1:]
    train(tmp, saver(tmp, every=4), model={"crash_in_validation": 8}, **every)
    assert 8 not in train(tmp, ckpt_path=tmp / "step=8.ckpt", **every).validated


def ours_19549(tmp: Path) -> None:
    every = {"validates": True, "val_check_interval": 4}
    before = train(tmp, auto_resume(tmp), model={"crash_in_validation": 8}, **every)
    after = train(tmp, auto_resume(tmp), **every)
    assert before.validated + after.validated == train(tmp, **every).validated


def in_turns() -> DataLoader[Any]:
    """Another order in each epoch, by the sampler that DDP gives a loader; with a worker."""
    return DataLoader(Data(), 4, sampler=DistributedSampler(Data(), 1, 0, seed=3), num_workers=1)


def plain_21938(tmp: Path) -> None:
    """With workers, the first epoch of a resume has the order of epoch 0."""
    train(tmp, saver(tmp, every=STEPS), loader=in_turns, model={"crash_at": STEPS})
    after = train(tmp, loader=in_turns, ckpt_path=tmp / "step=8.ckpt")
    first_epoch = train(tmp, loader=in_turns, max_epochs=1)
    assert list(after.trained.values()) == list(first_epoch.trained.values())


def ours_21938(tmp: Path) -> None:
    train(tmp, auto_resume(tmp), loader=in_turns, model={"crash_at": STEPS})
    after = train(tmp, auto_resume(tmp), loader=in_turns)
    assert min(after.trained) == STEPS
    assert after.trained.items() <= train(tmp, loader=in_turns).trained.items()


class Reloads(Model):
    """Notes the epochs in which it is asked for its data."""

    def train_dataloader(self) -> DataLoader[Any]:
        self.validated.append(self.trainer.current_epoch)
        return DataLoader(Data(), 4, shuffle=True)


RELOADS: dict[str, Any] = {
    "kind": Reloads,
    "loader": lambda: None,
    "max_epochs": 5,
    "reload_dataloaders_every_n_epochs": 2,
}


def plain_21492(tmp: Path) -> None:
    """Of the epochs 0, 2 and 4, the last one goes on with the data of the epoch before."""
    train(tmp, saver(tmp, every=STEPS), model={"crash_at": 2 * STEPS + 2}, **RELOADS)
    assert 4 not in train(tmp, ckpt_path=tmp / "step=16.ckpt", **RELOADS).validated


def ours_21492(tmp: Path) -> None:
    train(tmp, auto_resume(tmp), model={"crash_at": 2 * STEPS + 2}, **RELOADS)
    assert train(tmp, auto_resume(tmp), **RELOADS).validated == [2, 4]


# --- checkpoints ---


def on_another_file_system_than(path: Path) -> str:
    for folder in ("/dev/shm", "/var/tmp", "/tmp"):
        if Path(folder).is_dir() and os.stat(folder).st_dev != os.stat(path).st_dev:
            return folder
    pytest.skip("there is one file system only")


def killed_in_the_copy(path: Path, save: Callable[[], None]) -> None:
    """Saves in a process that is killed when it has copied half of a file to ``path``."""

    def action() -> None:
        copy = os.sendfile

        def half(out: int, source: int, offset: int, count: int) -> int:
            copy(out, source, offset, os.fstat(source).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        os.sendfile = half  # type: ignore[assignment]
        tempfile.tempdir = on_another_file_system_than(path.parent)
        save()

    assert in_child(action) == -signal.SIGKILL


def plain_19970(tmp: Path) -> None:
    """A kill destroys the checkpoint that is replaced, if TMPDIR is on another file system than the checkpoints."""
    train(tmp, saver(tmp, save_last=True), model={"crash_at": 4})
    last = tmp / "last.ckpt"
    torch.load(last, weights_only=True)
    state = torch.load(last, weights_only=True)
    killed_in_the_copy(last, lambda: TorchCheckpointIO().save_checkpoint(state, last))
    with pytest.raises(RuntimeError, match="PytorchStreamReader failed"):
        torch.load(last, weights_only=True)


def ours_19970(tmp: Path) -> None:
    """Each write, sync and rename is a point to be killed at in test_checkpoint_file.py; this is one of them."""
    path = tmp / "step-000000000001.ckpt"
    checkpoint_file.save({"step": 1}, path)

    def killed() -> None:
        checkpoint_file.save({"step": 2}, path, before_publish=lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert in_child(killed) == -signal.SIGKILL
    assert checkpoint_file.load(path) == {"step": 1}


def damage(path: Path) -> None:
    """One bit of the weights is another one."""
    weight = torch.load(path, weights_only=False)["state_dict"]["net.0.weight"]
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(content)


def plain_21431(tmp: Path) -> None:
    """A damaged file ends the fit, although an intact one is there; or it is loaded without a word."""
    train(tmp, saver(tmp), model={"crash_at": 9})
    newest = tmp / "step=8.ckpt"
    damage(newest)
    with warnings.catch_warnings(record=True) as said:
        train(tmp, ckpt_path=newest)
    assert not [warning for warning in said if "corrupt" in str(warning.message)]
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(RuntimeError, match="PytorchStreamReader failed"):
        train(tmp, ckpt_path=newest)
    assert (tmp / "step=4.ckpt").exists()


def ours_21431(tmp: Path) -> None:
    train(tmp, auto_resume(tmp), model={"crash_at": 9})
    (newest,) = tmp.glob("run/fit-000/checkpoints/*8.ckpt")
    damage(newest)
    assert min(train(tmp, auto_resume(tmp)).trained) == 4


class Held:
    """Holds back the file of step 8 until step 10 is done, and notes which files there are then."""

    def __init__(self) -> None:
        self.go, self.has_written = threading.Event(), threading.Event()
        self.present: list[str] = []

    def hold(self, path: Path) -> None:
        if path.name in ("step=8.ckpt", "step-000000000008.ckpt"):
            assert self.go.wait(60)
            self.present = [each.name for each in path.parent.glob("*step*.ckpt")]


class LetGo(L.Callback):
    def __init__(self, held: Held) -> None:
        self.held = held

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:  # the file of step 4 is complete: no save or removal is skipped because of it
            assert self.held.has_written.wait(60)
            for thread in threading.enumerate():
                if thread.name == "background-checkpoint":
                    thread.join()
        if trainer.global_step == 10:
            self.held.go.set()


class SlowWriter(TorchCheckpointIO):
    def __init__(self, held: Held) -> None:
        self.held = held

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.held.hold(Path(path))
        super().save_checkpoint(checkpoint, path, storage_options)
        self.held.has_written.set()


def weights_in(path: Path) -> torch.Tensor:
    state = torch.load(path, weights_only=False)["state_dict"]
    return torch.cat([each.flatten() for each in state.values()])


def plain_20953(tmp: Path) -> None:
    """What is written in the background is the state of one step; but the file before it is removed too early."""
    held = Held()
    saves = ModelCheckpoint(tmp, "{step}", every_n_train_steps=4, save_top_k=1)
    model = train(tmp, saves, LetGo(held), max_steps=11, plugins=[AsyncCheckpointIO(SlowWriter(held))])
    assert torch.equal(weights_in(tmp / "step=8.ckpt"), model.weights_at[8])
    assert held.present == [], "where it is killed now, no checkpoint is left"


def ours_20953(tmp: Path) -> None:
    held, save = Held(), checkpoint_file.save

    def slow(state: Any, path: Path, *args: Any, **options: Any) -> Any:
        held.hold(Path(path))
        saved = save(state, path, *args, **options)
        held.has_written.set()
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_file, "save", slow)
        saves = AutoResume(tmp / "run", every_n_train_steps=4, keep=3)
        model = train(tmp, saves, LetGo(held), max_steps=11)
    (newest,) = tmp.glob("run/fit-000/checkpoints/*8.ckpt")
    assert torch.equal(weights_in(newest), model.weights_at[8])
    assert held.present == ["step-000000000004.ckpt"]


# --- errors, hangs, numbers ---

RAISES: dict[str, Any] = {
    "trainer": {"devices": 2, "enable_checkpointing": True},
    "events": [{"at": "batch_end", "step": 20, "rank": 1, "do": "raise"}],
}


def plain_20187(tmp: Path) -> None:
    """The rank that raises waits in OnExceptionCheckpoint's barrier; what it has raised is seen when that times out."""
    saves = {"OnExceptionCheckpoint": {"dirpath": str(tmp)}}
    codes, text = in_ddp(tmp, lightning_callbacks=saves, **RAISES)
    assert 0 not in codes
    assert "Timed out" in text or "Application timeout" in text  # whichever end of the connection gloo asks first


def ours_20187(tmp: Path) -> None:
    """The watchdog sees what has happened, and ends the rank that waits for nothing."""
    options = {**RAISES, "callbacks": ["fault_tolerance", "preemption", "auto_resume"]}
    saves = {"OnExceptionCheckpoint": {"dirpath": str(tmp)}}
    limits = {"section_timeouts": LIMITS, "calculate_timeouts": False}
    config = make(tmp, "ours", lightning_callbacks=saves, fault_tolerance=limits, **options)
    codes, text = run(config, tmp / "ours")
    assert codes == [exit_codes.HUNG, 1], text
    (fault,) = (each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "fault")
    assert (fault["rank"], fault["reason"]) == (1, "RuntimeError: on purpose")


STUCK = {"at": "train", "step": 20, "rank": 1, "do": "sleep", "seconds": 600}


def plain_19487(tmp: Path) -> None:
    """One rank is stuck: the other one says that it has waited, and neither for whom nor where that one is."""
    codes, text = in_ddp(tmp, events=[STUCK])
    assert 0 not in codes
    assert "Timed out" in text
    assert "rank 1" not in text.lower()


def ours_19487(tmp: Path) -> None:
    config, _ = hanging(tmp, 2, STUCK)
    _, text = run(config, tmp / "hanging")
    culprit = the_culprit(config)
    assert (culprit.rank, culprit.kind) == (1, "stuck"), text
    assert "Hang: rank 1" in text


def plain_4956(tmp: Path) -> None:
    """One NaN loss, and all weights are NaN for the rest of the training, which ends as if it were a success."""
    model = train(tmp, model={"nan_at": 3})
    assert sorted(model.trained) == list(range(2 * STEPS))
    assert torch.isnan(model.weights()).all()


def ours_4956(tmp: Path) -> None:
    model = train(tmp, NaNGuard(run_dir=tmp / "run"), model={"nan_at": 3})
    assert torch.equal(model.weights_at[4], model.weights_at[3]), "the step is left out"
    assert torch.isfinite(model.weights()).all()


def plain_5243(tmp: Path) -> None:
    """``training_step`` of one rank returns None where its loss is no number."""
    codes, text = in_ddp(tmp, events=[{"at": "train", "step": 20, "rank": 1, "do": "skip"}])
    assert 0 not in codes
    assert "Skipping the `training_step` by returning None in distributed training is not supported" in text


def ours_5243(tmp: Path) -> None:
    """It returns the loss as it is."""
    spoils = [{"step": 20, "what": "loss", "rank": 1}]
    config = make(tmp, "ours", trainer={"devices": 2}, callbacks=["auto_resume", "nan_guard"], spoils=spoils)
    codes, text = run(config, tmp / "ours")
    assert codes == [0, 0], text
    found = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "bad_step"]
    assert {each["step"] for each in found} == {20}
    assert len(set(weights(config))) == 1


def plain_20967(tmp: Path) -> None:
    """Killed ranks end the others: their collective fails."""
    codes, _ = in_ddp(tmp, events=[{"at": "train", "step": 20, "rank": 1, "do": "SIGKILL"}])
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)


def ours_20967(tmp: Path) -> None:
    """The other rank goes on in the same process; the lost one comes back, or the fit ends before."""
    options = {"trainer": {"devices": 2, "max_epochs": 3}, "callbacks": []}
    config = make(
        tmp, "ours", **options, events=[{"at": "train", "step": 20, "rank": 1, "do": "SIGKILL", "once": True}]
    )
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", "--when-lost=go-on"]
    launch += ["--spares=off", "--nproc-per-node=2", "--run-dir", config["run_dir"], *command(config)[1:]]
    done = run_command(launch)
    assert done.returncode == 0, done.stderr
    assert "Rank 1 was killed by SIGKILL: continuing with 1 of 2 ranks" in done.stderr
    first, *_ = (each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "replaced")
    assert (first["ranks"], first["members"]) == ([1], [0])


# --- all of them ---

NOT_SOLVED = {16815}
"""What only elastic training over several nodes solves, which is not there: no reproducer."""
NOT_READ = {10226}
"""Named with the others, but not to be had."""
MENDED = {19549: "2.5.0", 20953: "2.5.4"}
"""By which version of Lightning; what ``plain_N`` shows is what is left."""
PROCESSES = {20806, 9567, 17899, 21938, 5243, 21406, 20542, 20550, 20187, 19487, 13524, 19970, 20967}
"""They need processes of their own, and so they are slow."""
LONG = {16639, 19549, 21431, 21492}
"""With this package: what other tests show as well."""


def collected(prefix: str, slow: set[int]) -> list[Any]:
    found = {int(name.split("_")[1]): each for name, each in globals().items() if re.match(rf"{prefix}_\d+$", name)}
    return [
        pytest.param(number, each, marks=pytest.mark.slow if number in slow else (), id=str(number))
        for number, each in found.items()
    ]


PLAIN, OURS = collected("plain", PROCESSES), collected("ours", PROCESSES | LONG)


@pytest.fixture(autouse=True)
def first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "fits_begun", {})


@pytest.mark.parametrize(("number", "shows"), PLAIN)
def test_fails_with_plain_lightning(number: int, shows: Callable[[Path], None], tmp_path: Path) -> None:
    try:
        shows(tmp_path)
    except (AssertionError, pytest.fail.Exception) as error:
        changed = f"#{number} is no longer so with Lightning {lightning.__version__}"
        raise AssertionError(f"{changed}. Mended? Then say so in docs/{PAGE.name}.") from error


@pytest.mark.parametrize(("number", "shows"), OURS)
def test_holds_with_this_package(number: int, shows: Callable[[Path], None], tmp_path: Path) -> None:
    shows(tmp_path)


# --- the page ---


def test_the_page_has_what_is_shown_here() -> None:
    text = PAGE.read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "issues/" in line]
    rows = {int(number): row for row in lines for number in re.findall(r"#(\d+)\]", row[1])}
    shown = {case.id for case in PLAIN}
    assert shown == {case.id for case in OURS}
    assert {str(number) for number in rows.keys() - NOT_SOLVED} == shown
    assert rows.keys() >= NOT_SOLVED
    for number, (_, link, plain, ours, _) in rows.items():
        assert f"https://github.com/Lightning-AI/pytorch-lightning/issues/{number})" in link
        assert ours.startswith("not solved") == (number in NOT_SOLVED), number
        since = re.findall(r"mended in (\d+\.\d+\.\d+)", plain)
        assert since == ([MENDED[number]] if number in MENDED else []), number
    for number in NOT_READ:
        assert f"issues/{number})" in text
    (measured,) = re.findall(r"Measured\s+with Lightning (\d+\.\d+)", text)
    assert lightning.__version__.startswith(f"{measured}."), "measure again"
