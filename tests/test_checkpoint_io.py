"""Lightning's own saves, made durable: files, asynchronous files, sharded directories and the ``last.ckpt`` link."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._lightning import lightning_checkpoint_io, lightning_strategies
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.fit.checkpoint_io import DurableCheckpointIO, make_durable, undo

NAMESPACES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


class Namespace:
    """The classes of one of Lightning's two namespaces, and a training made of them."""

    def __init__(self, pytorch: str, fabric: str) -> None:
        self.pytorch, self.fabric = pytorch, fabric
        self.package = importlib.import_module(pytorch)
        self.checkpoint = self.package.callbacks.ModelCheckpoint
        self.async_io = importlib.import_module(f"{pytorch}.plugins.io").AsyncCheckpointIO
        self.torch_io = importlib.import_module(f"{fabric}.plugins").TorchCheckpointIO
        self.model = importlib.import_module(f"{pytorch}.demos.boring_classes").BoringModel

        class Durable(self.package.Callback):  # type: ignore[misc,name-defined]
            def __init__(self, during: Callable[[Any], None] = lambda trainer: None) -> None:
                self.during = during

            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                make_durable(trainer, metadata={"fit": 7})

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                self.during(trainer)

            def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
                undo(trainer)

        self.durable = Durable

    def trainer(self, folder: Path, *callbacks: Any, steps: int = 3, **settings: Any) -> Any:
        return self.package.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **settings,
        )


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return Namespace(*NAMESPACES[request.param])


@pytest.fixture(scope="module")
def lightning() -> Namespace:
    return Namespace(*NAMESPACES["lightning"])


# Files


def test_checkpoints_of_a_fit_are_stamped(namespace: Namespace, tmp_path: Path) -> None:
    checkpoint = namespace.checkpoint(tmp_path / "new" / "deep", every_n_train_steps=1, save_top_k=-1, save_last=True)
    manual = tmp_path / "manual.ckpt"
    namespace.trainer(tmp_path, namespace.durable(lambda trainer: trainer.save_checkpoint(manual)), checkpoint).fit(
        namespace.model()
    )
    for path, step in ((checkpoint.best_model_path, 3), (checkpoint.last_model_path, 3), (manual, 3)):
        stamp = checkpoint_file.verify(path)
        assert stamp is not None
        assert stamp.metadata == {"step": step, "epoch": 0, "fit": 7, "saved_as": os.path.realpath(path)}
    assert len(list((tmp_path / "new" / "deep").iterdir())) == 4
    # Plain Lightning goes on from it.
    trainer = namespace.trainer(tmp_path, steps=5)
    trainer.fit(namespace.model(), ckpt_path=manual)
    assert trainer.global_step == 5


def test_checkpoints_of_plain_lightning_load(namespace: Namespace, tmp_path: Path) -> None:
    checkpoint = namespace.checkpoint(tmp_path, every_n_train_steps=1)
    namespace.trainer(tmp_path, checkpoint).fit(namespace.model())
    assert checkpoint_file.verify(checkpoint.best_model_path) is None
    for options in ({}, {"weights_only": False}, {"weights_only": True}):
        trainer = namespace.trainer(tmp_path, namespace.durable(), steps=5)
        trainer.fit(namespace.model(), ckpt_path=checkpoint.best_model_path, **options)
        assert trainer.global_step == 5


def test_damaged_checkpoints_are_not_loaded(lightning: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    lightning.trainer(tmp_path, lightning.durable(lambda trainer: trainer.save_checkpoint(path))).fit(lightning.model())
    content = path.read_bytes()
    position = len(content) // 2
    path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    for run in ("fit", "validate"):
        with pytest.raises(CorruptCheckpoint, match="checksum"):
            getattr(lightning.trainer(tmp_path, lightning.durable(), steps=5), run)(lightning.model(), ckpt_path=path)
    with pytest.raises(FileNotFoundError):
        lightning.trainer(tmp_path, lightning.durable()).fit(lightning.model(), ckpt_path=tmp_path / "missing.ckpt")


def test_the_link_to_the_last_one_follows_in_a_folder_that_is_reached_by_a_link(
    lightning: Namespace, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    folder, io = tmp_path / "link", DurableCheckpointIO(lightning.torch_io())
    for step in (1, 2):
        io.save_checkpoint({"global_step": step}, folder / f"{step}.ckpt")
    checkpoint_file.link(folder / "1.ckpt", folder / "last.ckpt")
    io.remove_checkpoint(folder / "1.ckpt")
    assert io.load_checkpoint(folder / "last.ckpt") == {"global_step": 2}


def test_remote_storages_stay_lightnings(lightning: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    io = DurableCheckpointIO(lightning.torch_io())
    for name in ("a", "b"):
        io.save_checkpoint({"global_step": 1}, f"memory://folder/{name}.ckpt")
    assert io.load_checkpoint("memory://folder/a.ckpt") == {"global_step": 1}
    io.remove_checkpoint("memory://folder/a.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://folder/a.ckpt")
    assert len(caplog.records) == 1
    assert "is on a remote file system" in caplog.text
    assert not os.path.exists("memory:")


def test_local_paths_in_every_spelling(lightning: Namespace, tmp_path: Path) -> None:
    io = DurableCheckpointIO(lightning.torch_io(), metadata={"run": "r"})
    for path in (tmp_path / "a.ckpt", str(tmp_path / "b.ckpt"), f"file://{tmp_path}/c.ckpt"):
        io.save_checkpoint({"global_step": 1}, path)
        assert io.load_checkpoint(path) == {"global_step": 1}
    for path in (tmp_path / f"{name}.ckpt" for name in "abc"):
        stamp = checkpoint_file.read_stamp(path)
        assert stamp is not None
        assert stamp.metadata == {"step": 1, "run": "r", "saved_as": os.path.realpath(path)}
    io.remove_checkpoint(f"file://{tmp_path}/c.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "b.ckpt"}
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"key": "value"})


def test_a_checkpoint_io_of_the_users_stays(
    lightning: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(lightning.torch_io):  # type: ignore[misc,name-defined]
        pass

    own = Own()
    seen = []
    trainer = lightning.trainer(
        tmp_path,
        lightning.durable(lambda trainer: seen.append(trainer.strategy.checkpoint_io)),
        lightning.durable(),
        plugins=[own],
    )
    trainer.fit(lightning.model())
    assert set(seen) == {own}
    assert "Own saves the checkpoints" in caplog.text


# What is put on is taken off


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_left(namespace: Namespace, tmp_path: Path, asynchronous: bool) -> None:
    checkpoint = namespace.checkpoint(tmp_path, every_n_train_steps=1, save_last="link")
    plugins = [namespace.async_io()] if asynchronous else []
    trainer = namespace.trainer(tmp_path, checkpoint, plugins=plugins)
    own = namespace.durable()
    trainer.strategy.checkpoint_io  # noqa: B018  Lightning makes its default at the first use.
    plain = [dict(vars(thing)) for thing in (trainer.strategy, checkpoint, trainer.strategy.checkpoint_io)]
    for _ in range(2):
        own.setup(trainer, None, "fit")
        own.setup(trainer, None, "fit")  # A second callback that does the same.
        changed = [dict(vars(thing)) for thing in (trainer.strategy, checkpoint, trainer.strategy.checkpoint_io)]
        assert changed != plain
        own.teardown(trainer, None, "fit")
        own.teardown(trainer, None, "fit")
        assert plain == [dict(vars(thing)) for thing in (trainer.strategy, checkpoint, trainer.strategy.checkpoint_io)]
    trainer = namespace.trainer(tmp_path, checkpoint, own, plugins=plugins)
    trainer.fit(namespace.model())
    pickle.loads(pickle.dumps((checkpoint, trainer.strategy.checkpoint_io)))
    assert "_link_checkpoint" not in vars(checkpoint)
    assert "save_checkpoint" not in vars(trainer.strategy)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def test_a_second_call_adds_what_it_is_given(lightning: Namespace, tmp_path: Path) -> None:
    def stop() -> None:
        raise SystemExit("a newer attempt owns this run")

    trainer = lightning.trainer(tmp_path)
    make_durable(trainer, metadata={"run": "r"})
    make_durable(trainer, before_publish=stop, metadata={"fit": 1})
    make_durable(trainer)
    io = trainer.strategy.checkpoint_io
    assert io.metadata == {"run": "r", "fit": 1}
    with pytest.raises(SystemExit):
        io.save_checkpoint({}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


# Asynchronous


class Gate:
    """Holds asynchronous saves back, or lets them fail."""

    def __init__(self, io: DurableCheckpointIO) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None
        self._save = io.save_checkpoint
        io.save_checkpoint = self.save  # type: ignore[method-assign]

    def save(self, *args: Any, **kwargs: Any) -> None:
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        self._save(*args, **kwargs)


@pytest.fixture
def pending(namespace: Namespace, tmp_path: Path) -> tuple[Any, Gate]:
    """A trainer that has saved 1.ckpt and is about to save asynchronously, and the gate of its saves."""
    trainer = namespace.trainer(tmp_path, plugins=[namespace.async_io()])
    make_durable(trainer)
    io = trainer.strategy.checkpoint_io
    gate = Gate(io.checkpoint_io)
    gate.open.set()
    io.save_checkpoint({"global_step": 1}, tmp_path / "1.ckpt")
    assert lightning_checkpoint_io.wait_for_async_saves(io, 60)
    gate.open.clear()
    return trainer, gate


def test_a_removal_waits_for_the_save_before_it(pending: tuple[Any, Gate], tmp_path: Path) -> None:
    trainer, gate = pending
    io = trainer.strategy.checkpoint_io
    io.save_checkpoint({"global_step": 2}, tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]
    gate.open.set()
    undo(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["2.ckpt"]
    assert checkpoint_file.verify(tmp_path / "2.ckpt") is not None, "undo did not wait for the save"
    io.teardown()


def test_nothing_is_removed_when_the_save_before_it_has_failed(pending: tuple[Any, Gate], tmp_path: Path) -> None:
    trainer, gate = pending
    io = trainer.strategy.checkpoint_io
    gate.error = OSError(28, "No space left on device")
    io.save_checkpoint({"global_step": 2}, tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    gate.open.set()
    undo(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]
    with pytest.raises(OSError, match="No space left"):
        io.teardown()


def test_an_error_of_a_removal_is_raised_at_the_end(pending: tuple[Any, Gate], tmp_path: Path) -> None:
    trainer, gate = pending
    gate.open.set()
    io = trainer.strategy.checkpoint_io
    io.remove_checkpoint(Path("/proc/self/stat"))
    undo(trainer)
    with pytest.raises(PermissionError):
        io.teardown()


def test_an_asynchronous_fit(namespace: Namespace, tmp_path: Path) -> None:
    checkpoint = namespace.checkpoint(tmp_path, every_n_train_steps=1, save_top_k=1, save_last="link")
    namespace.trainer(tmp_path, checkpoint, namespace.durable(), plugins=[namespace.async_io()]).fit(namespace.model())
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    assert checkpoint_file.load(tmp_path / "last.ckpt")["global_step"] == 3


# Crashes

CALLS = ["fsync", "replace", "rename", "remove", "unlink", "symlink", "mkdir"]


def killed_everywhere(action: Callable[[Path], object], started: Callable[[Path], bool], root: Path) -> Iterator[Path]:
    """Yields a folder in which ``action`` was killed, once for each of its fail-points after it has ``started``."""

    def run(folder: Path, kill_at: int) -> None:
        points = 0

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal points
                points += bool(points or started(folder))
                if points == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapped

        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        action(folder)
        assert points > 5, "the fail-points have missed the saves"

    for kill_at in range(1, 200):
        folder = root / f"kill-{kill_at}"
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            try:
                run(folder, kill_at)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        yield folder
        if code == 0:
            return
        shutil.rmtree(folder)
    raise AssertionError("the action does not end")


@pytest.mark.parametrize(("save_last", "asynchronous"), [("link", False), ("link", True), (True, False)])
@pytest.mark.slow_but_for("link-True")
def test_killed_at_every_point_of_a_fit(
    lightning: Namespace, tmp_path: Path, save_last: Any, asynchronous: bool
) -> None:
    """From the first complete ``last.ckpt`` on there is one at every instant, and it can be loaded."""

    def fit(folder: Path) -> None:
        plugins = [lightning.async_io()] if asynchronous else []
        checkpoint = lightning.checkpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=save_last)
        lightning.trainer(folder, checkpoint, lightning.durable(), plugins=plugins, steps=2).fit(lightning.model())

    for folder in killed_everywhere(fit, lambda folder: (folder / "last.ckpt").exists(), tmp_path):
        assert checkpoint_file.load(folder / "last.ckpt")["global_step"] in (1, 2)


@pytest.mark.slow
def test_killed_at_every_point_of_a_strategys_directory(lightning: Namespace, tmp_path: Path) -> None:
    """The only checkpoint is saved again under its name."""
    strategies = importlib.import_module("lightning.pytorch.strategies")

    class Sharded(strategies.SingleDeviceStrategy):  # type: ignore[misc,name-defined]
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            os.makedirs(filepath, exist_ok=True)
            for name in ("__0_0.distcp", "__1_0.distcp"):
                Path(filepath, "part").write_text(f"{name} {checkpoint.pop(name)}")
                os.replace(Path(filepath, "part"), Path(filepath, name))

    def save(folder: Path) -> None:
        trainer = lightning.trainer(folder, strategy=Sharded(device="cpu"))
        make_durable(trainer)
        for step in (1, 2):
            shards = {"__0_0.distcp": step, "__1_0.distcp": step}
            trainer.strategy.save_checkpoint({"global_step": step, **shards}, folder / "a.ckpt")

    for folder in killed_everywhere(
        save, lambda folder: (folder / "a.ckpt" / checkpoint_file.MARKER).exists(), tmp_path
    ):
        complete = []
        for path in folder.glob("*.ckpt"):
            with suppress(CorruptCheckpoint):
                complete.append(checkpoint_file.verify_directory(path).metadata["step"])
                assert (path / "__1_0.distcp").read_text() == f"__1_0.distcp {complete[-1]}"
        assert complete
    assert complete == [2]


def test_a_subclass_with_its_own_link_keeps_it(lightning: Namespace, tmp_path: Path) -> None:
    class Own(lightning.checkpoint):  # type: ignore[misc,name-defined]
        @staticmethod
        def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            Path(linkpath).write_text("own")

    checkpoint = Own(tmp_path, every_n_train_steps=1, save_last="link")
    lightning.trainer(tmp_path, checkpoint, lightning.durable()).fit(lightning.model())
    assert (tmp_path / "last.ckpt").read_text() == "own"


# Directories

SHARDED = """
import sys
from pathlib import Path
import torch
from torch.distributed.fsdp import fully_shard
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_resilience.checkpoint import checkpoint_file
from lightning_resilience.fit.checkpoint_io import make_durable, undo

folder = Path(sys.argv[1])

class Model(LightningModule):
    def configure_model(self):
        self.layer = torch.nn.Linear(32, 2)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)

class Durable(Callback):
    def setup(self, trainer, module, stage):
        make_durable(trainer, metadata={"fit": 7})
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        for _ in range(2):
            trainer.save_checkpoint(folder / "same.ckpt")
    def on_train_end(self, trainer, module):
        def stop():
            raise SystemExit("a newer attempt owns this run")
        make_durable(trainer, before_publish=stop)
        try:
            trainer.save_checkpoint(folder / "late.ckpt")
        except SystemExit as error:
            (folder / f"stopped-{trainer.global_rank}").write_text(str(error))
    def teardown(self, trainer, module, stage):
        undo(trainer)
        assert "save_checkpoint" not in vars(trainer.strategy)

def trainer(steps, callbacks):
    return Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(2, 1), max_steps=steps, logger=False,
                   enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, default_root_dir=folder)

checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=1, save_last="link")
trainer(3, [Durable(), checkpoint]).fit(Model())
plain = trainer(5, [ModelCheckpoint(folder / "plain")])
plain.fit(Model(), ckpt_path=folder / "same.ckpt")
assert plain.global_step == 5
"""


@pytest.mark.campaign
def test_sharded_directories(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SHARDED))
    folder = tmp_path / "out"
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    log = tmp_path / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, script, folder], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        assert process.wait(120) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for path, step in ((folder / "same.ckpt", 3), (folder / "checkpoints" / "last.ckpt", 3)):
        assert len(list(path.glob("*.distcp"))) == 2
        stamp = checkpoint_file.verify_directory(path)
        assert stamp.metadata == {"step": step, "epoch": 0, "fit": 7, "saved_as": os.path.realpath(path)}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    assert not list(folder.glob("previous-*"))
    with pytest.raises(CorruptCheckpoint, match="never finished"):
        checkpoint_file.verify_directory(folder / "late.ckpt")
    assert (folder / "stopped-0").read_text() == "a newer attempt owns this run"
    assert (folder / "stopped-1").read_text() == "rank 0: a newer attempt owns this run"


# The private names of Lightning that this relies on


def test_lightning_still_has_the_names(namespace: Namespace) -> None:
    inner = namespace.torch_io()
    io = namespace.async_io(inner)
    assert lightning_checkpoint_io.is_plain_checkpoint_io(inner)
    assert not lightning_checkpoint_io.is_plain_checkpoint_io(io)
    assert lightning_checkpoint_io.is_async_checkpoint_io(io)
    assert not lightning_checkpoint_io.is_async_checkpoint_io(inner)
    assert not lightning_checkpoint_io.is_plain_checkpoint_io(type("Own", (namespace.torch_io,), {})())
    assert lightning_checkpoint_io.is_async_checkpoint_io(type("Own", (namespace.async_io,), {})())

    lightning_checkpoint_io.set_inner_checkpoint_io(io, other := namespace.torch_io())
    assert io.checkpoint_io is other
    ran = []
    lightning_checkpoint_io.after_async_saves(io, lambda: ran.append(1))
    assert lightning_checkpoint_io.wait_for_async_saves(io, 60)
    assert ran == [1]
    io.teardown()
    assert io._error is None

    signature = inspect.signature(namespace.checkpoint._link_checkpoint)
    assert list(signature.parameters) == ["trainer", "filepath", "linkpath"]
    checkpoint = namespace.checkpoint()
    lightning_checkpoint_io.replace_link_checkpoint(checkpoint, print)
    assert checkpoint._link_checkpoint is print
    lightning_checkpoint_io.restore_link_checkpoint(checkpoint)
    assert checkpoint._link_checkpoint is namespace.checkpoint._link_checkpoint
    source = inspect.getsource(namespace.checkpoint._save_last_checkpoint)
    assert "self._link_checkpoint(" in source, "ModelCheckpoint links last.ckpt in another way now"

    strategies = importlib.import_module(f"{namespace.pytorch}.strategies")
    assert not lightning_strategies.traits_of(strategies.DDPStrategy()).all_ranks_write
    assert not lightning_strategies.traits_of(strategies.SingleDeviceStrategy()).all_ranks_write
    assert lightning_strategies.traits_of(strategies.ModelParallelStrategy()).all_ranks_write
    assert lightning_strategies.traits_of(strategies.FSDPStrategy()).all_ranks_write


def test_durable_checkpoint_io_is_one(lightning: Namespace) -> None:
    """Its methods take what those of Lightning's own take."""
    assert isinstance(
        DurableCheckpointIO(lightning.torch_io()), importlib.import_module("lightning.fabric.plugins").CheckpointIO
    )
    for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (DurableCheckpointIO, lightning.torch_io))
        assert list(ours.parameters) == list(theirs.parameters)
