"""What ``launch`` puts into the environment makes an unmodified script resilient, whatever the script does."""

from __future__ import annotations

import datetime
import enum
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, Preemption, recipes
from lightning_resilience._lightning.lightning_callbacks import ResilienceCallback
from lightning_resilience.checkpoint import checkpoint_file, resume
from lightning_resilience.fit import context, joining
from lightning_resilience.recipes import RECIPE_VARIABLE
from lightning_resilience.run.run_directory import LOCAL_DIR_VARIABLE, RUN_DIR_VARIABLE, RunDirectory
from tests.harness import result, run, samples
from tests.program import digest
from tests.test_exact_resume import make, undisturbed

PACKAGES = pytest.mark.parametrize("package", [L, pytorch_lightning], ids=["lightning", "pytorch_lightning"])


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """An environment as ``launch`` makes it; ``restart`` is what a new process would be."""
    monkeypatch.setenv(RECIPE_VARIABLE, "nemo")
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    context.fits_begun.clear()
    return RunDirectory(tmp_path / "run")


def restart() -> None:
    context.fits_begun.clear()


class Steps:
    """Stops itself once, by the signal that a scheduler would send."""

    def __init__(self, signal_at: int | None = None, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["signal_at"])
        self.signal_at = signal_at
        torch.manual_seed(1)
        self.layer = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.signal_at is not None and self.trainer.global_step > self.signal_at:
            time.sleep(0.01)  # all steps together take no longer than to agree on where to stop
        return self.layer(batch[0]).pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Module(Steps, L.LightningModule):
    pass


class OldModule(Steps, pytorch_lightning.LightningModule):
    pass


def make_trainer(callbacks: Any = None, package: Any = L, **options: Any) -> Any:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return package.Trainer(callbacks=callbacks, **{"max_epochs": 3, "accelerator": "cpu", **quiet, **options})


def weights_without_anything(monkeypatch: pytest.MonkeyPatch, package: Any = L, **options: Any) -> str:
    with monkeypatch.context() as patch:
        patch.delenv(RECIPE_VARIABLE)
        module = (Module if package is L else OldModule)()
        make_trainer(package=package, **options).fit(module)
        return digest(module)


def ours(trainer: Any) -> list[str]:
    return [type(c).__name__ for c in trainer.callbacks if isinstance(c, (AutoResume, Preemption))]


def stopped(fit: Any) -> None:
    """Runs ``fit`` up to the signal."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        fit()
    assert stop.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == handler


# -- who gets what ----------------------------------------------------------------------------------------------------


@PACKAGES
def test_every_trainer_of_both_packages(launched: RunDirectory, package: Any) -> None:
    trainer = make_trainer(package=package)
    assert ours(trainer) == ["Preemption", "AutoResume"]
    assert all(isinstance(callback, package.Callback) for callback in trainer.callbacks)


@PACKAGES
def test_nothing_without_the_environment(monkeypatch: pytest.MonkeyPatch, package: Any) -> None:
    monkeypatch.delenv(RECIPE_VARIABLE, raising=False)
    assert ours(make_trainer(package=package)) == []


def test_an_unknown_recipe_is_named(launched: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECIPE_VARIABLE, "neno")
    with pytest.raises(
        ValueError, match=r"'neno' is not a recipe; choose one of: nemo, preemptible, workstation, elastic, drill\."
    ):
        make_trainer()


class MyAutoResume(AutoResume):
    pass


@pytest.mark.slow_but_for("MyAutoResume")
@pytest.mark.parametrize("own", [AutoResume, MyAutoResume])
def test_the_users_own_goes_first(launched: RunDirectory, own: type[AutoResume]) -> None:
    members: list[Any] = []
    look = L.callbacks.LambdaCallback(on_train_start=lambda t, m: members.extend(joining._active.members))
    mine = own(every_n_train_steps=3, async_save=False)
    make_trainer([look, mine]).fit(Module())
    (auto_resume,) = (member for member in members if isinstance(member, AutoResume))
    (preemption,) = (member for member in members if isinstance(member, Preemption))
    assert auto_resume is mine
    assert preemption._injected
    assert [resume.step_of(path) for path in resume.checkpoints(launched.fit(0).checkpoints)] == [24, 21]


@pytest.fixture
def not_imported_yet() -> Iterator[Callable[[], None]]:
    """Makes our callbacks what they are as long as a script has not imported ``pytorch_lightning``."""
    bases = ResilienceCallback.__bases__

    def forget() -> None:
        ResilienceCallback.__bases__ = (L.Callback,)

    yield forget
    ResilienceCallback.__bases__ = bases


def test_a_callback_made_before_the_package_is_imported(not_imported_yet: Callable[[], None]) -> None:
    callback = AutoResume()
    not_imported_yet()
    assert ours(make_trainer([callback], package=pytorch_lightning)) == ["AutoResume"]


def test_a_single_callback_made_after_the_package_is_imported(not_imported_yet: Callable[[], None]) -> None:
    not_imported_yet()
    assert ours(make_trainer(AutoResume(), package=pytorch_lightning)) == ["AutoResume"]


@pytest.mark.slow
def test_a_list_of_callbacks_used_again_and_again(launched: RunDirectory) -> None:
    callbacks: list[Any] = [L.Callback()]
    for number in range(3):
        make_trainer(callbacks).fit(Module())
        assert len(launched.fits) == number + 1
        outcome = launched.fit(number).outcome
        assert outcome is not None
        assert (outcome.status, outcome.step) == ("finished", 24)
    assert len(callbacks) == 1 + 3 * len(recipes.nemo().callbacks)


# -- unmodified scripts -----------------------------------------------------------------------------------------------

SCRIPTS: dict[str, dict[str, Any]] = {
    "no checkpoints of its own": {},
    "weights only": {"model_checkpoint": {"save_weights_only": True, "every_n_train_steps": 7, "save_top_k": -1}},
    "whole checkpoints": {"model_checkpoint": {"every_n_train_steps": 7}},
    "two ranks": {"trainer": {"devices": 2}, "validation": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_preempted_script_ends_as_if_undisturbed(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"callbacks": [], **options}
    event = {"at": "train", "step": 23, "rank": 0, "do": "SIGTERM", "once": True}
    config = make(tmp_path, "disturbed", events=[event], **options)
    environment = {RECIPE_VARIABLE: "nemo", RUN_DIR_VARIABLE: config["run_dir"]}
    codes, text = run(config, tmp_path / "disturbed", environment=environment)
    assert set(codes) <= {0, 75}, text
    assert "Preemption detected" in text
    codes, text = run(config, tmp_path / "disturbed", environment=environment)
    assert set(codes) == {0}, text
    assert "Resuming from step 2" in text
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


def test_whenever_the_script_saves_the_run_can_be_killed(tmp_path: Path) -> None:
    """And before that, in the first steps: then there is a local checkpoint."""
    options: dict[str, Any] = {"callbacks": [], "model_checkpoint": {"every_n_train_steps": 10}, "step_s": 0.02}
    saved = str(tmp_path / "local" / "**" / "step-*" / "*.shard")
    early, late = ({"at": "train", "step": step, "do": "SIGKILL", "once": True} for step in (8, 27))
    config = make(tmp_path, "disturbed", events=[{**early, "after_file": saved}, late], **options)
    environment = {RECIPE_VARIABLE: "nemo", RUN_DIR_VARIABLE: config["run_dir"]}
    environment[LOCAL_DIR_VARIABLE] = str(tmp_path / "local")
    assert run(config, tmp_path / "disturbed", environment=environment)[0] == [-signal.SIGKILL]
    codes, text = run(config, tmp_path / "disturbed", environment=environment)
    assert codes == [-signal.SIGKILL], text
    assert re.search(r"Resuming from step [3-8] \(local checkpoint", text), text
    codes, text = run(config, tmp_path / "disturbed", environment=environment)
    assert codes == [0], text
    assert re.search(r"Resuming from step (1\d|2\d) ", text), text  # that of step 20 is written behind the training
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


@PACKAGES
def test_in_one_process(launched: RunDirectory, monkeypatch: pytest.MonkeyPatch, package: Any) -> None:
    cls = Module if package is L else OldModule
    stopped(lambda: make_trainer(package=package).fit(cls(signal_at=13)))
    restart()
    module = cls()
    make_trainer(package=package).fit(module)
    assert digest(module) == weights_without_anything(monkeypatch, package)


def test_a_library_that_catches_every_exception(launched: RunDirectory) -> None:
    def library() -> str:
        try:
            make_trainer().fit(Module(signal_at=13))
        except Exception:
            return "went on with an unfinished model"
        return "went on"

    stopped(library)


# -- what users put into their checkpoints ----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Encoder:
    """A class of the user's: a safe load refuses it."""


def test_hyper_parameters_of_any_type(
    launched: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(lambda: make_trainer().fit(Module(signal_at=13, encoder=Encoder(), colour=Colour.RED)))
    restart()
    module = Module(encoder=Encoder(), colour=Colour.RED)
    make_trainer().fit(module)
    assert digest(module) == weights_without_anything(monkeypatch)
    assert isinstance(module.hparams["encoder"], Encoder)
    assert "can only be pickled" not in caplog.text  # they are not needed: the module is there already


class Stateful(L.Callback):
    """A user's callback, stateful, as Lightning's documentation shows it."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


VALUES: dict[str, Any] = {
    "array": np.arange(6.0).reshape(2, 3),
    "number": np.float32(0.1),
    "path": Path("data/train"),
    "time": datetime.timedelta(minutes=3),
    "date": datetime.datetime(2026, 1, 2, 3, 4),
    "nested": {"list": [np.int64(3), (1, "two")], 5: {None}},
}


@pytest.mark.slow
def test_state_that_a_safe_load_would_refuse_survives(launched: RunDirectory) -> None:
    stopped(lambda: make_trainer([Stateful(**VALUES)]).fit(Module(signal_at=13)))
    restart()
    again = Stateful()
    make_trainer([again]).fit(Module())
    assert again.state.keys() == VALUES.keys()
    np.testing.assert_array_equal(again.state.pop("array"), VALUES["array"])
    assert again.state == {name: value for name, value in VALUES.items() if name != "array"}
    assert type(again.state["number"]) is np.float32


def test_what_can_only_be_pickled_is_left_out_and_named(
    launched: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [Stateful(encoder=Encoder(), kept=1), AutoResume(async_save=False, every_n_train_steps=4)]
    with caplog.at_level(logging.WARNING, "lightning_resilience"):
        stopped(lambda: make_trainer(callbacks).fit(Module(signal_at=13)))
    warnings = [record.getMessage() for record in caplog.records if "can only be pickled" in record.getMessage()]
    assert len(warnings) == 1
    assert "callbacks.Stateful.encoder (tests.test_injection.Encoder)" in warnings[0]
    restart()
    again = Stateful()
    make_trainer([again]).fit(Module())
    assert again.state == {}  # its state as a whole: half of one would fail in its load_state_dict


def test_no_checkpoint_needs_pickle(launched: RunDirectory) -> None:
    stopped(lambda: make_trainer([Stateful(**VALUES)]).fit(Module(signal_at=13, encoder=Encoder())))
    (path,) = resume.checkpoints(launched.fit(0).checkpoints)
    assert checkpoint_file.load(path, weights_only=True)["global_step"] == resume.step_of(path)


# -- one Lightning package only ---------------------------------------------------------------------------------------

WITHOUT_LIGHTNING = """
    import os, signal, sys
    sys.modules["lightning"] = None  # as if only pytorch-lightning were installed
    import lightning_resilience
    from lightning_resilience import AutoResume, Preemption
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 13 and not os.path.exists("stopped"):
                open("stopped", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
            return self.layer(batch[0]).pow(2).mean()
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.rand(16, 4)), batch_size=2, shuffle=True)
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    module = Module()
    trainer = pl.Trainer(callbacks=AutoResume(keep=3), max_epochs=3, accelerator="cpu", logger=False,
                         enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module)
    assert not any(name.startswith("lightning.") for name in sys.modules)
    print("weights", [p.tolist() for p in module.parameters()])
"""


@pytest.mark.campaign
def test_with_pytorch_lightning_alone(tmp_path: Path) -> None:
    """And with a callback of ours that is imported before ``pytorch_lightning`` is."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WITHOUT_LIGHTNING))

    def start(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", RECIPE_VARIABLE: "nemo", **environment}
        return subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path / name,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    run_dir = {RUN_DIR_VARIABLE: str(tmp_path / "run")}
    first = start("disturbed", **run_dir)
    assert first.returncode == 75, first.stderr
    second = start("disturbed", **run_dir)
    assert second.returncode == 0, second.stderr
    assert "Resuming from step 1" in second.stderr
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "stopped").touch()
    assert second.stdout.splitlines()[-1] == start("undisturbed").stdout.splitlines()[-1]


class Endless:
    """An iterable that goes on in the next epoch where it stopped in this one, as GluonTS's training data do."""

    def __init__(self) -> None:
        self.batches = iter(lambda: (torch.rand(2, 4),), None)

    def __iter__(self) -> Any:
        return itertools.islice(self.batches, 8)


def test_says_once_which_data_cannot_be_resumed_exactly(
    launched: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_resilience"):
        make_trainer().fit(Module(), Endless())
        make_trainer().fit(Module())
    (warning,) = (r.getMessage() for r in caplog.records if "may not be exact" in r.getMessage())
    assert "train data loader 0 is a tests.test_injection.Endless, whose position cannot be read" in warning
