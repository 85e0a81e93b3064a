"""Lightning's own saves, written by :mod:`lightning_resilience.checkpoint.checkpoint_file`: an adapter, no mechanism.

:func:`make_durable` covers the three ways in which Lightning writes checkpoints: files, through the strategy's
``CheckpointIO``; directories, which sharded strategies write without it; and ``ModelCheckpoint``'s ``last.ckpt`` link.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_resilience._files import make_directory
from lightning_resilience._lightning import lightning_checkpoint_io, lightning_strategies
from lightning_resilience.checkpoint import checkpoint_file

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
else:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO

log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_SAVES_WITHIN_S = 1800.0  # torch's default timeout, with which other ranks wait for this one


def _local_path(path: str | Path) -> Path | None:
    """``path`` as Lightning resolves it, or ``None`` if it is on remote storage (``s3://...``)."""
    file_system, local = url_to_fs(os.fspath(path))
    return Path(local) if isinstance(file_system, LocalFileSystem) else None


class DurableCheckpointIO(CheckpointIO):
    """Saves checkpoint files atomically, durably and with a checksum, and verifies them when they are loaded.

    Args:
        inner: Lightning's own plugin, which still handles remote storage.
        before_publish: Called before a checkpoint becomes visible; an exception stops the save.
        metadata: Added to every checkpoint's stamp, with ``step`` and ``epoch``.
    """

    def __init__(
        self,
        inner: CheckpointIO,
        before_publish: Callable[[], None] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.inner = inner
        self.before_publish = before_publish
        self.metadata = metadata or {}
        self.newest: Path | None = None
        self.keeps_all = False
        """Whether nothing is removed: a save was refused, and an older checkpoint must stay."""
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the fit in progress: a copied Trainer takes no part in it."""
        return {**vars(self), "before_publish": None}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves a checkpoint; when this returns, it is on disk."""
        local = _local_path(path)
        if local is None or storage_options is not None:
            self._warn_remote(path)
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        make_directory(local.parent)
        checkpoint_file.save(checkpoint, local, _stamped(checkpoint, self.metadata, local), self.before_publish)
        self.newest = local
        self.keeps_all = False

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Verifies and loads a checkpoint, which may be one of plain Lightning.

        Raises:
            CorruptCheckpoint: If it is damaged.
            FileNotFoundError: If it does not exist.
        """
        local = _local_path(path)
        if local is None:
            return self.inner.load_checkpoint(path, map_location, weights_only)
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return checkpoint_file.load(local, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint; if ``last.ckpt`` in the same folder links to it, first links that to the newest."""
        if self.keeps_all:
            return
        local = _local_path(path)
        if local is None:
            self.inner.remove_checkpoint(path)
            return
        if self.newest is not None and self.newest != local and self.newest.exists():
            for link in _links_to(local):
                checkpoint_file.link(self.newest, link)
        checkpoint_file.remove(local)

    def teardown(self) -> None:
        """Tears down Lightning's own plugin."""
        self.inner.teardown()

    def _warn_remote(self, path: str | Path) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("Checkpoint %s is on a remote file system: Lightning saves it without a checksum.", path)


def _links_to(path: Path) -> list[Path]:
    if path.is_symlink() or not path.parent.is_dir():
        return []
    real = os.path.realpath(path)
    return [entry for entry in path.parent.iterdir() if entry.is_symlink() and os.path.realpath(entry) == real]


def _stamped(checkpoint: dict[str, Any], metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """``metadata``, with the step and epoch of the checkpoint and its path."""
    position = {"step": checkpoint.get("global_step"), "epoch": checkpoint.get("epoch")}
    found = {key: value for key, value in position.items() if isinstance(value, int)}
    return {**found, "saved_as": os.path.realpath(path), **metadata}


class _SealedSave:
    """``save_checkpoint`` of a strategy that writes directories without its ``CheckpointIO`` (FSDP, ModelParallel).

    Before a save, the existing directory is set aside. After it, rank 0 seals the new one and removes the old one.
    """

    def __init__(
        self, strategy: Any, before_publish: Callable[[], None] | None, metadata: dict[str, Any] | None
    ) -> None:
        self._strategy = strategy
        self._save = strategy.save_checkpoint
        self.before_publish = before_publish
        self.metadata = metadata or {}

    def __call__(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        strategy = self._strategy
        path = Path(strategy.broadcast(filepath))
        metadata = _stamped(checkpoint, self.metadata, path)  # before the strategy removes entries
        from_rank_zero(strategy, partial(checkpoint_file.set_aside, path))
        on_every_rank(strategy, partial(self._save, checkpoint, filepath, storage_options))
        from_rank_zero(strategy, partial(self._finish, path, metadata))

    def _finish(self, path: Path, metadata: dict[str, Any]) -> None:
        if path.is_dir():
            checkpoint_file.seal_directory(path, metadata, self.before_publish)
            if isinstance(io := self._strategy.checkpoint_io, DurableCheckpointIO):
                io.newest = path.absolute()
                io.keeps_all = False
        checkpoint_file.discard_aside(path)


def from_rank_zero(strategy: Any, action: Callable[[], T]) -> T:
    """The result of ``action`` on rank 0, on all ranks. If it raises, every rank raises. A collective."""
    raised: BaseException | None = None
    result: Any = None
    if strategy.is_global_zero:
        try:
            result = action()
        except (Exception, SystemExit) as error:
            raised = error
    problem = None if raised is None else (isinstance(raised, SystemExit), str(raised))
    result, problem = strategy.broadcast((result, problem))
    if raised is not None:
        raise raised
    if problem is not None:
        is_exit, message = problem
        raise (SystemExit if is_exit else RuntimeError)(f"rank 0: {message}")
    return cast(T, result)


def on_every_rank(strategy: Any, action: Callable[[], T]) -> T:
    """The result of ``action`` on this rank. If it raises on any rank, every rank raises. A collective."""
    raised: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        raised = error
    rank, world_size = getattr(strategy, "global_rank", 0), getattr(strategy, "world_size", 1)
    mine = None if raised is None else f"rank {rank}: {type(raised).__name__}: {raised}"
    everywhere: list[str | None] = [None] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(everywhere, mine)
    if raised is not None:
        raise raised
    if problems := [problem for problem in everywhere if problem is not None]:
        raise RuntimeError(problems[0])
    return cast(T, result)


def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
    """``ModelCheckpoint._link_checkpoint``, except that a ``last.ckpt`` exists at any time."""
    asynchronous = lightning_checkpoint_io.is_async_checkpoint_io(trainer.strategy.checkpoint_io)
    exists = asynchronous or os.path.lexists(filepath)  # not after a refused save

    def link() -> None:
        if not exists or os.path.abspath(filepath) == os.path.abspath(linkpath):
            return
        if asynchronous:  # not written yet
            lightning_checkpoint_io.after_async_saves(
                trainer.strategy.checkpoint_io, partial(checkpoint_file.link, filepath, linkpath)
            )
        else:
            checkpoint_file.link(filepath, linkpath)

    from_rank_zero(trainer.strategy, link)


def keep_all(trainer: Trainer) -> None:
    """Ignores removals by Lightning until its next save; called after a save was refused.

    ``ModelCheckpoint`` assumes that the refused checkpoint was saved, and removes the one before.
    """
    io: Any = trainer.strategy.checkpoint_io
    if not lightning_checkpoint_io.is_async_checkpoint_io(io):
        if isinstance(io, DurableCheckpointIO):
            io.keeps_all = True
    elif isinstance(inner := io.checkpoint_io, DurableCheckpointIO):
        # After the submitted saves, which may not be written yet.
        lightning_checkpoint_io.after_async_saves(io, lambda: setattr(inner, "keeps_all", True))


def make_durable(
    trainer: Trainer, before_publish: Callable[[], None] | None = None, metadata: dict[str, Any] | None = None
) -> None:
    """Makes the checkpoints of ``trainer`` survive a crash, and verifies those that it loads.

    A second call only updates the arguments. A custom ``CheckpointIO`` stays as it is.

    Args:
        trainer: Its strategy must be set up.
        before_publish: Called before a checkpoint becomes visible; an exception stops the save.
        metadata: JSON-serializable, added to every checkpoint's stamp.
    """
    strategy: Any = trainer.strategy
    io = strategy.checkpoint_io
    inner = io.checkpoint_io if lightning_checkpoint_io.is_async_checkpoint_io(io) else io
    if isinstance(inner, DurableCheckpointIO):
        inner.before_publish = before_publish or inner.before_publish
        inner.metadata.update(metadata or {})
    elif lightning_checkpoint_io.is_plain_checkpoint_io(inner):
        ours = DurableCheckpointIO(inner, before_publish, dict(metadata or {}))
        if inner is io:
            strategy.checkpoint_io = ours
        else:
            lightning_checkpoint_io.set_inner_checkpoint_io(io, ours)
            # Lightning removes the previous checkpoint right after it has submitted the new one.
            io.remove_checkpoint = lambda path: lightning_checkpoint_io.after_async_saves(
                io, partial(ours.remove_checkpoint, path)
            )
    elif trainer.is_global_zero:
        log.warning("%s saves the checkpoints: they are not verified here, nor made atomic.", type(inner).__name__)

    if isinstance(sealed := vars(strategy).get("save_checkpoint"), _SealedSave):
        sealed.before_publish = before_publish or sealed.before_publish
        sealed.metadata.update(metadata or {})
    elif lightning_strategies.traits_of(strategy).all_ranks_write:
        strategy.save_checkpoint = _SealedSave(strategy, before_publish, dict(metadata or {}))

    for callback in trainer.checkpoint_callbacks:
        lightning_checkpoint_io.replace_link_checkpoint(callback, _link_checkpoint)


@contextmanager
def own_files(strategy: Any, before_publish: Callable[[], None], metadata: dict[str, Any]) -> Iterator[None]:
    """Has the strategy write the run's own checkpoints: durable at once, whatever ``CheckpointIO`` the script has.

    A ``CheckpointIO`` that hands saves to a thread would return before they are on disk. Any other one writes no
    checksum, and a resume refuses checkpoints without one.

    Args:
        strategy: The Trainer's.
        before_publish: See :class:`DurableCheckpointIO`.
        metadata: Added to the stamp of the checkpoints.
    """
    of_script = strategy.checkpoint_io
    strategy.checkpoint_io = DurableCheckpointIO(TorchCheckpointIO(), before_publish, metadata)
    try:
        yield
    finally:
        strategy.checkpoint_io = of_script


def undo(trainer: Trainer) -> None:
    """Undoes :func:`make_durable`, after waiting for asynchronous saves."""
    strategy: Any = trainer.strategy
    io = strategy.checkpoint_io
    if isinstance(io, DurableCheckpointIO):
        strategy.checkpoint_io = io.inner
    elif lightning_checkpoint_io.is_async_checkpoint_io(io) and isinstance(io.checkpoint_io, DurableCheckpointIO):
        if not lightning_checkpoint_io.wait_for_async_saves(io, _LAST_SAVES_WITHIN_S):
            log.error("AsyncCheckpointIO did not finish saving in %.0f s; abandoning its saves.", _LAST_SAVES_WITHIN_S)
            return  # the unfinished saves use the plugin
        lightning_checkpoint_io.set_inner_checkpoint_io(io, io.checkpoint_io.inner)
        del io.remove_checkpoint
    if isinstance(vars(strategy).get("save_checkpoint"), _SealedSave):
        del strategy.save_checkpoint
    for callback in trainer.checkpoint_callbacks:
        lightning_checkpoint_io.restore_link_checkpoint(callback)
