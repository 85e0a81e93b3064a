"""What every public callback keeps to, whatever it does. Callbacks are found: a new one is tested by being exported."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import io
import logging
import os
import pickle
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

import lightning_resilience
from lightning_resilience import AutoResume, NaNGuard, callbacks, signals
from lightning_resilience._lightning.lightning_callbacks import ResilienceCallback
from lightning_resilience.fit import joining, session
from lightning_resilience.fit.numerics_policy import StepCounts
from tests.harness import result, run, samples
from tests.harness import undisturbed as undisturbed_run
from tests.program import digest

CALLBACKS: list[type[Any]] = [
    value
    for value in (getattr(callbacks, name) for name in callbacks.__all__)
    if isinstance(value, type) and issubclass(value, ResilienceCallback)
]
each = pytest.mark.parametrize("cls", CALLBACKS, ids=lambda cls: cls.__name__)
SLOW = pytest.mark.slow


class Steps:
    """A training with all that a callback could disturb: dropout, shuffling, validation, a metric over the epoch."""

    fails_in: str | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def _loss(self, place: str, batch: Any) -> Any:
        if self.fails_in == place:
            raise RuntimeError("on purpose")
        return self.net(batch[0]).pow(2).mean()

    def setup(self, stage: str) -> None:
        if self.fails_in == "setup":
            raise RuntimeError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss("training_step", batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss("validation_step", batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss("test_step", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss("predict_step", batch)

    def on_train_end(self) -> None:
        if self.fails_in == "on_train_end":
            raise RuntimeError("on purpose")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4) / 96), batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(16.0).reshape(4, 4) / 16), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        if self.fails_in == "configure_optimizers":
            raise RuntimeError("on purpose")
        return torch.optim.Adam(self.parameters(), 1e-2)


class Module(Steps, lightning.pytorch.LightningModule):
    pass


class OldModule(Steps, pytorch_lightning.LightningModule):
    pass


def make_trainer(*own: Any, package: Any = lightning.pytorch, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if options.get("barebones"):
        defaults = {"max_epochs": 2, "accelerator": "cpu"}
    return package.Trainer(callbacks=list(own), default_root_dir=os.getcwd(), **{**defaults, **options})


def fitted(*own: Any, **options: Any) -> str:
    """The weights after a fit."""
    module = Module()
    make_trainer(*own, **options).fit(module)
    return digest(module)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        return fitted()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory and ``default_root_dir`` of every test."""
    (tmp_path / "root").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "root")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def process_state() -> dict[str, Any]:
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    return {
        "handlers": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "wakeup_fd": wakeup_fd,
        "listener": signals.installed(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "sockets": sorted(target for target in _descriptors() if target.startswith("socket")),
        "session": joining._active,
    }


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of the listing itself
            continue


@contextmanager
def leaves_nothing(place: Path, run_directory: bool) -> Iterator[None]:
    """Fails if anything of this process or on disk has changed, the run directory excepted if there may be one."""
    before, files = process_state(), set(place.rglob("*"))
    yield
    assert process_state() == before
    assert {path.relative_to(place).parts[:2] for path in set(place.rglob("*")) - files} == (
        {("root", "resilience")} if run_directory else set()
    )


def of_this_package(root: Any) -> list[str]:
    """Where, below ``root``, something of this package is, other than the callbacks and what they have counted."""
    found, seen, queue = [], set(), [("", root)]
    while queue:
        path, value = queue.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, torch.Tensor, str, bytes, int, float)):
            continue
        seen.add(id(value))
        module = (value if isinstance(value, types.FunctionType) else type(value)).__module__ or ""
        if module.startswith("lightning_resilience") and not isinstance(value, (ResilienceCallback, StepCounts)):
            found.append(path)
        elif isinstance(value, dict):
            queue += [(f"{path}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple, set)):
            queue += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, functools.partial):
            queue += [(f"{path}.func", value.func), (f"{path}.args", value.args)]
        elif isinstance(value, types.MethodType):
            queue += [(f"{path}.__self__", value.__self__), (f"{path}.__func__", value.__func__)]
        elif isinstance(value, types.FunctionType):
            cells = (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
            queue += [(f"{path}.<closure>", cell) for cell in cells]
        else:
            queue += [(f"{path}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    return found


class At(lightning.pytorch.Callback):
    """Calls a function once, in the middle of a fit."""

    def __init__(self, action: Callable[[Any, Any], None]) -> None:
        self.action = action

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy does nothing

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 15:
            self.action(trainer, module)


def test_every_callback_is_exported() -> None:
    defined = set()
    for info in pkgutil.iter_modules(callbacks.__path__):
        module = importlib.import_module(f"{callbacks.__name__}.{info.name}")
        members = inspect.getmembers(module, lambda m: isinstance(m, type) and issubclass(m, ResilienceCallback))
        defined |= {name for name, cls in members if cls.__module__ == module.__name__}
    assert defined == {cls.__name__ for cls in CALLBACKS}
    assert defined <= set(lightning_resilience.__all__)
    for cls in CALLBACKS:
        assert getattr(lightning_resilience, cls.__name__) is cls


@each
def test_documents_every_argument(cls: type[Any]) -> None:
    arguments = (inspect.getdoc(cls) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert documented == list(inspect.signature(cls).parameters)
    for name, function in vars(cls).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            assert function.__doc__, name


# -- configuration from YAML ------------------------------------------------------------------------------------------


def configure(text: str, *arguments: str) -> Any:
    Path("config.yaml").write_text(text)
    arguments = ("--config", "config.yaml", *arguments)
    return LightningCLI(Module, args=arguments, run=False, save_config_callback=None, seed_everything_default=False)


def from_yaml(cls: type[Any], init_args: str = "{}") -> Any:
    path = f"lightning_resilience.{cls.__name__}"
    text = f"trainer:\n  accelerator: cpu\n  callbacks:\n  - class_path: {path}\n    init_args: {init_args}\n"
    (callback,) = (c for c in configure(text).trainer.callbacks if isinstance(c, cls))
    return callback


@each
def test_configured_from_yaml_with_its_defaults(cls: type[Any]) -> None:
    assert vars(from_yaml(cls)) == vars(cls())


@pytest.mark.slow_but_for("Preemption")
@each
def test_the_printed_configuration_is_a_configuration(cls: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = f"lightning_resilience.{cls.__name__}"
    with pytest.raises(SystemExit):
        configure(f"trainer:\n  callbacks: [{{class_path: {path}}}]\n", "--print_config")
    printed = capsys.readouterr().out
    for name in inspect.signature(cls).parameters:
        assert f"{name}:" in printed
    (callback,) = (c for c in configure(printed).trainer.callbacks if isinstance(c, cls))
    assert vars(callback) == vars(cls())


@pytest.mark.slow_but_for("00:05:00-expected0-LocalCheckpoint", "00:05:00-expected0-Preemption")
@each
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00:05:00", timedelta(minutes=5)),
        ("1:30:00", timedelta(hours=1.5)),  # YAML takes this one, unquoted, for a number of seconds
        ("'1 day, 0:00:00'", timedelta(days=1)),
        ("90", timedelta(seconds=90)),
    ],
)
def test_times_in_yaml(cls: type[Any], text: str, expected: timedelta) -> None:
    parameters = inspect.signature(cls).parameters.items()
    times = [name for name, parameter in parameters if str(parameter.annotation).startswith("timedelta")]
    if times:
        found = from_yaml(cls, "{" + ", ".join(f"{name}: {text}" for name in times) + "}")
        for name in times:
            assert getattr(found, name) in (expected, expected.total_seconds())  # which of them, the callback says


@each
def test_configured_from_yaml_with_pytorch_lightning(cls: type[Any]) -> None:
    from pytorch_lightning.cli import LightningCLI as OldCLI

    Path("config.yaml").write_text(f"trainer: {{callbacks: [{{class_path: lightning_resilience.{cls.__name__}}}]}}")
    cli = OldCLI(OldModule, args=["--config", "config.yaml"], run=False, seed_everything_default=False)
    assert cls in map(type, cli.trainer.callbacks)


def test_signals_in_yaml() -> None:
    given = from_yaml(lightning_resilience.Preemption, "{signals: [SIGTERM, 12]}")
    assert given.signals == (signal.SIGTERM, signal.SIGUSR2)


# -- fits -------------------------------------------------------------------------------------------------------------


@each
def test_changes_no_result_and_leaves_nothing(cls: type[Any], place: Path, undisturbed: str) -> None:
    with leaves_nothing(place, run_directory=True):
        assert fitted(cls()) == undisturbed


@pytest.mark.parametrize("order", [CALLBACKS, CALLBACKS[::-1]], ids=["in order", "reversed"])
@pytest.mark.parametrize("error", [None, RuntimeError, SystemExit])
def test_all_together_leave_nothing(
    order: list[type[Any]], error: type[BaseException] | None, place: Path, undisturbed: str
) -> None:
    """Whichever is first to see the end of the fit."""

    def fail(trainer: Any, module: Any) -> None:
        if error is not None:
            raise error("on purpose")

    module, trainer = Module(), make_trainer(*(cls() for cls in order), At(fail))
    with leaves_nothing(place, run_directory=True):
        if error is None:
            trainer.fit(module)
            assert digest(module) == undisturbed
        else:
            with pytest.raises(error):
                trainer.fit(module)
    assert of_this_package([trainer, module]) == []


@each
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 5},
        *(pytest.param(o, marks=SLOW) for o in ({"max_steps": 15}, {"gradient_clip_val": 0.1})),
    ],
    ids=str,
)
def test_changes_no_result_with(cls: type[Any], options: dict[str, Any]) -> None:
    assert fitted(cls(), **options) == fitted(**options)


@each
def test_leaves_no_attribute(cls: type[Any]) -> None:
    module, trainer = Module(), make_trainer(cls())
    plain_module, plain = Module(), make_trainer(lightning.pytorch.Callback())
    trainer.fit(module)
    plain.fit(plain_module)
    assert of_this_package([trainer, module]) == []
    for find in (
        lambda t: t,
        lambda t: t.strategy,
        lambda t: t.fit_loop,
        lambda t: t.fit_loop.epoch_loop,
        lambda t: t.fit_loop.epoch_loop.val_loop,
        lambda t: t.train_dataloader,
        lambda t: t.lightning_module,
        lambda t: t._checkpoint_connector,
        lambda t: t._signal_connector,
    ):
        assert vars(find(trainer)).keys() == vars(find(plain)).keys()


@each
@pytest.mark.parametrize(
    "error", [RuntimeError, *(pytest.param(e, marks=SLOW) for e in (KeyboardInterrupt, SystemExit))]
)
def test_leaves_nothing_after_an_exception(cls: type[Any], place: Path, error: type[BaseException]) -> None:
    def fail(trainer: Any, module: Any) -> None:
        raise error("on purpose")

    trainer = make_trainer(cls(), At(fail))
    # Lightning leaves its own handler of SIGINT in place
    with leaves_nothing(place, run_directory=True), pytest.raises((error, SystemExit)):
        trainer.fit(Module())
    assert of_this_package(trainer) == []


@each
@pytest.mark.parametrize(
    "where",
    ["configure_optimizers", "on_train_end"]
    + [pytest.param(where, marks=SLOW) for where in ("setup", "validation_step", "training_step")],
)
def test_leaves_nothing_after_a_failure_in(cls: type[Any], place: Path, where: str) -> None:
    module, trainer = Module(), make_trainer(cls())
    module.fails_in = where
    with leaves_nothing(place, run_directory=True), pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module)
    assert of_this_package([trainer, module]) == []


def test_appended_after_the_trainer_was_made(undisturbed: str) -> None:
    """As by a library that adds its own to the callbacks that there are; checkpoint callbacks come after it then."""
    trainer, module = make_trainer(enable_checkpointing=True), Module()
    for cls in CALLBACKS:
        trainer.callbacks.append(cls())
    seen: list[str] = []
    trainer.callbacks.append(At(lambda trainer, module: seen.extend(map(str, joining._active.members))))
    trainer.fit(module)
    assert len(seen) == len(CALLBACKS)
    assert digest(module) == undisturbed
    assert of_this_package([trainer, module]) == []
    again, other = make_trainer(), Module()
    for cls in CALLBACKS:
        again.callbacks.append(cls())
    again.fit(other)  # which is finished
    assert digest(other) == undisturbed
    assert again.global_step == trainer.global_step


@pytest.mark.slow_but_for("LocalCheckpoint")
@each
def test_two_fits_of_one_trainer(cls: type[Any], place: Path) -> None:
    weights = []
    for own in ([], [cls()]):
        module, trainer = Module(), make_trainer(*own)
        trainer.fit(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        assert trainer.global_step == 36
        weights.append(digest(module))
    assert weights[0] == weights[1]
    assert of_this_package(trainer) == []


@pytest.mark.slow_but_for("Preemption")
@each
def test_two_trainers(cls: type[Any], undisturbed: str) -> None:
    callback = cls()
    assert fitted(callback) == undisturbed
    assert fitted(callback) == undisturbed


class Acts(lightning.pytorch.Callback):
    """Which callbacks of this package have a part in the fit."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ours = [each for each in trainer.callbacks if isinstance(each, ResilienceCallback)]
        self.found = [each for each in ours if each._participant is not None]


@pytest.mark.slow_but_for("NaNGuard")
@each
def test_of_two_the_last_one_acts(cls: type[Any], undisturbed: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was added to those of a recipe, with options of its own."""
    caplog.set_level(logging.INFO)
    first, last, acts = cls(), cls(), Acts()
    assert fitted(first, last, acts) == undisturbed
    assert acts.found == [last]
    assert "instead of" not in caplog.text  # they are alike


def test_it_is_said_which_of_two_that_differ_acts(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, last, acts = NaNGuard(), NaNGuard(action="stop"), Acts()
    fitted(first, AutoResume(), last, acts)
    assert last in acts.found
    assert first not in acts.found
    assert f"Using {last!r} instead of {first!r}" in caplog.text


@each
@pytest.mark.parametrize(
    "stage", ["validate", *(pytest.param(s, marks=pytest.mark.campaign) for s in ("test", "predict"))]
)
def test_passive_outside_of_fit(cls: type[Any], place: Path, stage: str) -> None:
    def look(trainer: Any, module: Any, *args: Any) -> None:
        during.append(process_state())

    observer = lightning.pytorch.callbacks.LambdaCallback(
        on_validation_batch_start=look, on_test_batch_start=look, on_predict_batch_start=look
    )
    for own in ([], [cls()]):
        during: list[Any] = []
        with leaves_nothing(place, run_directory=False):
            getattr(make_trainer(observer, *own), stage)(Module())
        # Lightning's own handlers are bound to each Trainer
        seen = [{**state, "handlers": str({k: type(v) for k, v in state["handlers"].items()})} for state in during]
        assert seen
        if not own:
            plain = seen
    assert seen == plain


@each
@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}], ids=str)
def test_passive_in(cls: type[Any], place: Path, options: dict[str, Any]) -> None:
    def look(trainer: Any, module: Any) -> None:
        during.append((signals.installed(), joining._active, threading.active_count()))

    for own in ([], [cls()]):
        during: list[Any] = []
        observer = lightning.pytorch.callbacks.LambdaCallback(on_train_start=look)
        with leaves_nothing(place, run_directory=False):
            weights = fitted(observer, *own, **options)
        if not own:
            plain = weights, during
    assert (weights, during) == plain
    assert during


def test_a_package_of_lightning_that_is_imported_later_takes_the_callbacks_of_a_configuration() -> None:
    program = (
        "from lightning_resilience import AutoResume; import pytorch_lightning, lightning_resilience\n"
        "print(issubclass(lightning_resilience.AutoResume, pytorch_lightning.Callback))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == "True\n"


@each
@pytest.mark.slow_but_for("FaultTolerance", "LocalCheckpoint", "NaNGuard")
def test_with_pytorch_lightning(cls: type[Any], place: Path) -> None:
    weights = []
    for own in ([], [cls()]):
        module = OldModule()
        checkpoint = pytorch_lightning.callbacks.ModelCheckpoint(str(place / "own"), save_last="link")
        trainer = make_trainer(*own, checkpoint, package=pytorch_lightning, enable_checkpointing=True)
        before = process_state()
        trainer.fit(module)
        assert process_state() == before
        assert of_this_package(trainer) == []
        assert (place / "own" / "last.ckpt").exists()
        weights.append(digest(module))
    assert weights[0] == weights[1]


EXCHANGES = "LocalSGD"
"""The one callback whose purpose is to train in another way."""
NAMES = [cls.__name__ for cls in CALLBACKS]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES, id="all"),
        pytest.param([name for name in NAMES if name != EXCHANGES], id="all that leave the training as it is"),
        *(pytest.param([name], marks=SLOW, id=name) for name in NAMES),
    ],
)
@pytest.mark.slow_but_for("all")
def test_two_ranks(names: list[str], place: Path) -> None:
    options: dict[str, Any] = {"validation": True, "trainer": {"devices": 2, "max_epochs": 2}}
    folder = place / "ranks"
    folder.mkdir()
    files = {"run_dir": str(folder / "run"), "out": str(folder / "out"), "log": str(folder / "log")}
    codes, text = run({**files, **options, "callbacks": names}, folder)
    assert codes == [0, 0], text
    assert "Traceback" not in text
    as_asked = {"callbacks": [EXCHANGES], "local_sgd": {}} if EXCHANGES in names else {}
    assert (result(files), samples({**files, **options})) == undisturbed_run(place, **options, **as_asked)
    left = {"run", "resilience", "out", "log.0", "out.0", "out.1", "log.1", "output", "log.started.0", "log.started.1"}
    assert {path.name for path in folder.iterdir()} <= left


# -- state and copies -------------------------------------------------------------------------------------------------


@each
def test_state_round_trip(cls: type[Any]) -> None:
    states: list[dict[str, Any]] = []
    callback = cls()
    trainer = make_trainer(callback, At(lambda t, m: states.append(copy.deepcopy(callback.state_dict()))))
    trainer.fit(Module())
    for state in (cls().state_dict(), *states, callback.state_dict()):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        other = cls()
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert other.state_dict() == state


@pytest.mark.slow_but_for("Preemption")
@each
def test_checkpoints_can_be_used_without_the_callback(cls: type[Any], place: Path) -> None:
    """And one that was written without it can be used with it."""
    final = set()
    for number, (writes, reads) in enumerate([([], []), ([cls()], []), ([], [cls()])]):
        path = place / f"epoch-{number}.ckpt"
        make_trainer(*writes, At(lambda t, m, path=path: t.save_checkpoint(path))).fit(Module())
        module = Module()
        make_trainer(*reads).fit(module, ckpt_path=str(path), weights_only=True)
        final.add(digest(module))
    assert len(final) == 1


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}


OF_OTHERS = ("checkpoint_io", ".__func__")
"""Made durable for good, and what stands on Lightning's classes during a fit: a copy has none of its own."""


@pytest.mark.slow_but_for("deepcopy-Preemption", "pickle-NaNGuard")
@each
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies(cls: type[Any], copied: Callable[[Any], Any], undisturbed: str) -> None:
    """Of the callback and of the Trainer that has it: before, during and after a fit."""

    def arguments(callback: Any) -> dict[str, Any]:
        return {name: getattr(callback, name) for name in inspect.signature(cls).parameters}

    def check(trainer: Any, module: Any = None) -> None:
        for twin in (copied(callback), next(c for c in copied(trainer).callbacks if type(c) is cls)):
            assert arguments(twin) == arguments(callback) == arguments(cls())
            copies.append(twin)
        assert [path for path in of_this_package(copied(trainer)) if not path.endswith(OF_OTHERS)] == []
        copied(module)

    callback, copies = cls(), []
    module, trainer = Module(), make_trainer(callback, At(check))
    check(trainer)
    trainer.fit(module)
    check(trainer, module)
    assert len(copies) == 6
    assert digest(module) == undisturbed
    assert fitted(copies[-1]) == undisturbed


@each
def test_the_module_can_be_saved_whole_after_a_fit(cls: type[Any], place: Path) -> None:
    module = Module()
    make_trainer(cls()).fit(module)
    torch.save(module, place / "module.pt")
    assert digest(torch.load(place / "module.pt", weights_only=False)) == digest(module)


@each
def test_holds_no_trainer_after_a_fit(cls: type[Any]) -> None:
    """A list of callbacks that a script uses again and again must not keep every model alive."""
    callback = cls()
    make_trainer(callback).fit(Module())
    kept = [name for name, value in vars(callback).items() if isinstance(value, (torch.nn.Module, session.FitSession))]
    assert kept == []
    assert of_this_package(callback) == []
