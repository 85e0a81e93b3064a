"""What a run was asked to do, and how two such descriptions differ."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.run.settings import (
    Settings,
    changes,
    describe_changes,
    digests_of_files,
    flat,
    identity_of_command,
    is_another_fit,
    is_another_run,
    settings_of_command,
)
from tests.harness import run_command


@pytest.mark.parametrize(
    ("before", "now", "said", "another"),
    [
        ("--lr 0.1", "--lr 0.1", "", False),
        ("--lr 0.1", "--lr=1e-1", "", False),
        ("--lr 0.1 --wd 0", "--wd 0.0 --lr 0.1", "", False),
        ("--lr 0.1", "--lr 0.2", "--lr 0.1 -> 0.2", True),
        ("lr=0.1 +x.y=1", "lr=0.2 +x.y=1", "lr 0.1 -> 0.2", True),
        ("--lr 0.1", "", "--lr 0.1 -> (none)", True),
        ("", "--amp", "--amp (none) -> True", True),
        ("--sizes 1 2", "--sizes 1 3", "--sizes 1 2 -> 1 3", True),
        ("-x -1", "-x -2", "-x -1 -> -2", True),
        ("fit --config a.yaml", "test --config a.yaml", "argument 1 fit -> test", True),
        ("--config a.yaml --config b.yaml", "--config a.yaml", "--config a.yaml b.yaml -> a.yaml", True),
        ("--max_epochs 2", "--max_epochs 3", "--max_epochs 2 -> 3", False),
        ("--max-steps=2", "--max-steps=-1", "--max-steps 2 -> -1", False),
        ("--trainer.max_epochs 3", "--trainer.max_epochs 2", "--trainer.max_epochs 3 -> 2", True),
        ("trainer.max_time=0:23:00:00", "trainer.max_time=1:00:00:00", "", False),
        ("", "--epochs 4", "--epochs (none) -> 4", False),
        ("--epochs 4", "--epochs 5 --lr 1", "--epochs 4 -> 5, --lr (none) -> 1", True),
        ("--epochs 4", "--epochs many", "--epochs 4 -> many", True),
    ],
)
def test_what_another_command_asks_for(before: str, now: str, said: str, another: bool) -> None:
    found = changes(*(settings_of_command(["train.py", *words.split()]) for words in (before, now)))
    assert said in describe_changes(found)
    assert bool(said) <= bool(found)
    assert is_another_run(found) is another


@pytest.mark.parametrize(
    ("command", "same"),
    [
        ("train.py --lr 0.1", True),
        ("./train.py --lr 0.1", True),
        ("HERE/train.py --lr 0.1", True),
        ("train.py --lr 0.1 --max_epochs 3", True),
        ("train.py --max-steps=3 --lr 0.1", True),
        ("train.py trainer.max_time=3 --lr 0.1", True),
        ("train.py --lr 0.2", False),
        ("train.py --lr 0.1 0.1", False),
        ("train.py --max_epochs --lr 0.1", True),
        ("sub/train.py --lr 0.1", False),
        ("-m train --lr 0.1", False),
    ],
)
def test_which_commands_are_one_run(tmp_path: Path, command: str, same: bool) -> None:
    words = command.replace("HERE", str(tmp_path)).split()
    mine = identity_of_command(["train.py", "--lr", "0.1"], tmp_path)
    assert (identity_of_command(words, tmp_path) == mine) is same


FIT: Settings = {"module.lr": 0.1, "optimizer": "SGD", "batch size": 8, "max_epochs": 2, "world size": 2}


@pytest.mark.parametrize(
    ("now", "said", "another"),
    [
        ({}, "", False),
        ({"module.lr": 0.2}, "module.lr 0.1 -> 0.2", True),
        ({"optimizer": "AdamW", "batch size": 4}, "optimizer SGD -> AdamW, batch size 8 -> 4", True),
        ({"max_epochs": 3}, "max_epochs 2 -> 3", False),
        ({"patience of EarlyStopping": 3}, "patience of EarlyStopping (none) -> 3", False),
        ({"world size": 1, "batch size": 16}, "batch size 8 -> 16, world size 2 -> 1", False),
        ({"module.out": "runs/2026-11-22"}, "module.out (none) -> runs/2026-11-22", True),
    ],
)
def test_what_another_fit_is(now: Settings, said: str, another: bool) -> None:
    found = changes(FIT, FIT | now)
    assert describe_changes(found) == said
    assert is_another_fit(found) is another


def test_what_differs_at_every_start_makes_no_other_fit() -> None:
    """A run that goes on by itself in its second fit must not be refused the first one."""
    before, now = ({"module.out": f"outputs/2026-11-{day}/09-{day}-3f{day}"} for day in (21, 22))
    found = changes(before, now)
    assert describe_changes(found)
    assert not is_another_fit(found)
    assert is_another_fit(changes({"module.lr": "0.1"}, {"module.lr": "0.2"}))


def test_settings_of_any_kind_are_names_and_values_that_json_holds() -> None:
    class Loss:
        pass

    @dataclass
    class Config:
        width: int = 4

    class Raises(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise RuntimeError("a value that is missing")

    given: dict[str, Any] = {
        "lr": 0.1,
        "net": {"sizes": (1, 2), "act": Loss, "loss": Loss()},
        "many": list(range(1000)),
        "path": Path("a"),
        "time": timedelta(minutes=1),
        "parts": [{"p": 1}, {"p": float("nan")}],
        "flags": {1: True},
        "space": Namespace(depth=3),
        "config": Config(),
    }
    given["itself"] = given
    given["raises"] = Raises()
    found = flat("module", given)
    assert found["module.lr"] == 0.1
    assert found["module.net.sizes"] == [1, 2]
    assert found["module.net.act"] == found["module.net.loss"]
    assert found["module.path"] == "a"
    assert found["module.time"] == 60.0
    assert (found["module.space.depth"], found["module.config.width"]) == (3, 4)
    assert len(found) <= 500
    assert changes(json.loads(json.dumps(found)), found) == []
    assert describe_changes(changes({}, {str(number): number for number in range(20)})).endswith("and 8 more")


def test_a_file_of_settings_that_was_edited_is_known(tmp_path: Path) -> None:
    config = tmp_path / "lr.yaml"
    config.write_text("lr: 1")
    command = ["train.py", f"--config={config}"]
    before = digests_of_files(command)
    config.write_text("lr: 2")
    assert list(before) == [str(config)]
    assert digests_of_files(command) != before


@pytest.mark.slow
@pytest.mark.parametrize("needs_data", [True, False])
def test_what_each_epoch_has_anew_and_optimizers_that_need_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, needs_data: bool
) -> None:
    """Optimizers that need the data have them made before the checkpoint is restored: always those of epoch 0."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import LearningRateFinder
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_resilience import AutoResume
    from lightning_resilience.fit import context
    from lightning_resilience.run.run_directory import AnotherFit, RunDirectory

    class Model(L.LightningModule):
        def __init__(self, lr: float, stops_at: int, size: int | None) -> None:
            super().__init__()
            self.lr, self.stops_at, self.size = lr, stops_at, size
            self.layer = torch.nn.Linear(4, 2)

        def train_dataloader(self) -> DataLoader[Any]:
            size = self.size or 8 + 4 * self.trainer.current_epoch
            return DataLoader(TensorDataset(torch.ones(size, 4)), batch_size=4)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == self.stops_at:
                raise KeyboardInterrupt
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            assert not needs_data or self.trainer.estimated_stepping_batches
            optimizer = torch.optim.SGD(self.parameters(), self.lr)
            if self.size is None:
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, 1000)]

    def fit(
        lr: float = 0.1,
        stops_at: int = -1,
        size: int | None = None,
        name: str = "run",
        reload: int = 1,
        epochs: int = 3,
    ) -> str:
        context.fits_begun.clear()
        caplog.clear()
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path, "reload_dataloaders_every_n_epochs": reload}
        callbacks = [
            LearningRateFinder(num_training_steps=20, early_stop_threshold=None),
            AutoResume(tmp_path / name, every_n_train_steps=1),
        ]
        trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks[name != "search" :], **quiet)
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            trainer.fit(Model(lr, stops_at, size))
        return "".join(each.getMessage() for each in caplog.records if "hanged since" in each.getMessage())

    assert fit(stops_at=4) == ""
    assert fit(lr=0.2, stops_at=7) == (
        "Changed since the last start of this fit: optimizer.lr 0.1 -> 0.2. The resumed optimizer keeps the saved "
        "values of optimizer.lr."
    )
    assert fit(lr=0.2) == ""
    outcome = RunDirectory(tmp_path / "run").fit(0).outcome
    assert outcome is not None
    assert outcome.status == "finished"
    assert fit(lr=0.2) == ""
    for _ in range(2):  # no process has seen two of its epochs
        assert fit(name="short", epochs=1) == ""
    assert fit(name="short", epochs=2).endswith("this fit: max_epochs 1 -> 2.")
    assert fit(size=8, stops_at=1, reload=0, name="once") == ""
    assert "optimizer.max_lr 0.1 -> 0.2" in fit(lr=0.2, size=8, reload=0, name="once")
    for reload in (1, 0, 1):
        assert fit(size=80, reload=reload, epochs=1, name="search") == ""
    with pytest.raises(AnotherFit, match="other training data"):
        fit(size=84, reload=0, epochs=1, name="search")
    with pytest.raises(AnotherFit, match=r"optimizer\.lr 0\.2 -> 0\.3"):
        fit(lr=0.3)


@pytest.mark.slow
def test_a_finished_fit_whose_ranks_have_data_of_their_own_is_restored(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import os
import lightning.pytorch as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
rank = int(os.environ["RANK"])
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False}
trainer = L.Trainer(max_epochs=1, devices=2, accelerator="cpu", limit_val_batches=0, **quiet)
trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 3 + rank), batch_size=2))
if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
""")
    launch = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--nproc-per-node=2"]
    done = run_command([*launch, "--run-dir", str(tmp_path / "run"), str(script)], timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert "Restart 1 inside the job" in done.stderr


@pytest.mark.slow
def test_a_finished_fit_is_not_taken_for_one_of_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a script with a recipe in its code, which no launch has started, is run again and again."""
    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_resilience import AutoResume
    from lightning_resilience.fit import context
    from lightning_resilience.launch.report import report
    from lightning_resilience.launch.status import status
    from lightning_resilience.run.run_directory import AnotherFit, RunDirectory
    from lightning_resilience.run.settings import CONTINUE_VARIABLE

    class Model(L.LightningModule):
        def __init__(self, lr: float, decay: float) -> None:
            super().__init__()
            self.save_hyperparameters("lr")
            self.rates = lr, decay
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if self.rates[0] == 0.4 and batch_idx == 1:
                raise KeyboardInterrupt
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.rates[0], weight_decay=self.rates[1])

    def fit(lr: float = 0.1, decay: float = 0.0, size: int = 4, max_epochs: int = 1) -> tuple[float, str]:
        context.fits_begun.clear()
        caplog.clear()
        torch.manual_seed(0)
        model = Model(lr, decay)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path}
        callbacks = [AutoResume(tmp_path, every_n_train_steps=1)]
        trainer = L.Trainer(max_epochs=max_epochs, callbacks=callbacks, **quiet)
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=size))
        said = [each.getMessage() for each in caplog.records if "Changed since" in each.getMessage()]
        assert len(said) <= 1
        return float(model.layer.weight.detach().sum()), "".join(said)

    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1", "--max_epochs", "1"])
    first, said = fit()
    assert said == ""
    assert fit() == (first, ""), "restored"
    for other, change in [
        ({"lr": 0.2}, "module.lr 0.1 -> 0.2, optimizer.lr 0.1 -> 0.2."),
        ({"decay": 0.5}, "optimizer.weight_decay 0.0 -> 0.5."),
        ({"size": 8, "max_epochs": 2}, "batch size 4 -> 8, max_epochs 1 -> 2."),
    ]:
        with pytest.raises(AnotherFit, match=f"finished with other settings: {change}"):
            fit(**other)  # type: ignore[arg-type]
        assert "final state is restored" not in caplog.text
        assert "Resuming" not in caplog.text
        assert "Now       ended: finished" in status(tmp_path)
        assert report(tmp_path).endswith("Outcome: finished (max_epochs)")
        finished = RunDirectory(tmp_path).fit(0).outcome
        assert finished is not None
        assert (finished.status, finished.details["max_epochs"]) == ("finished", 1)
    assert fit() == (first, ""), "what was refused has left nothing"
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.2", "--max_epochs", "2"])
    with pytest.raises(AnotherFit, match=r"--lr 0.1 -> 0.2. Give"):
        fit()
    monkeypatch.setenv(CONTINUE_VARIABLE, "1")
    assert fit(lr=0.2) == (
        first,
        "Changed since the last start of this fit: --lr 0.1 -> 0.2, module.lr 0.1 -> 0.2, "
        "optimizer.lr 0.1 -> 0.2. The resumed optimizer keeps the saved values of optimizer.lr.",
    )
    monkeypatch.delenv(CONTINUE_VARIABLE)
    raised, said = fit(lr=0.2, max_epochs=2)
    assert said.endswith(": max_epochs 1 -> 2.")
    assert raised != first

    monkeypatch.setenv(CONTINUE_VARIABLE, "1")
    with pytest.raises(SystemExit):
        fit(lr=0.4, max_epochs=3)
    assert "Ctrl-C: this step is not saved." in caplog.text
    monkeypatch.delenv(CONTINUE_VARIABLE)
    stopped = RunDirectory(tmp_path).fit(0).outcome
    assert stopped is None or stopped.status != "finished", "it has trained more, and not to the end"
    _, said = fit(lr=0.5, max_epochs=3)
    assert said.startswith("Changed since the last start of this fit: module.lr 0.4 -> 0.5"), "no refusal: only said"
