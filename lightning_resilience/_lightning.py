"""The only file that touches private or version-dependent names of Lightning; each with its reason.

``tests/test_lightning_internals.py`` fails when a name goes away.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dis
import functools
import importlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_resilience.checkpoint import data_position, pruning, sharded
from lightning_resilience.checkpoint.snapshot import optimizer_tensors
from lightning_resilience.fit.strategies import STRATEGIES, StrategyTraits, name_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif find_spec("lightning") is not None:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback


_EVERY_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class ResilienceCallback(Callback):
    """Base of this package's callbacks, so that a Trainer of either namespace takes them.

    ``lightning.pytorch`` and ``pytorch_lightning`` are the same code twice, with unrelated classes. A Trainer takes any
    object in a list of callbacks, but a single callback only of its own class; ``LightningCLI`` takes only its own too.
    Which one a script uses is not known when the callbacks are defined.

    Attributes:
        _injected: Whether ``lightning-resilience launch`` added this callback; the user's own one goes first.
    """

    _injected = False

    def __init__(self) -> None:
        super().__init__()
        adopt_namespaces()
        self._leave_out(hook for hook in _EVERY_BATCH if getattr(type(self), hook).__qualname__ == f"Callback.{hook}")

    def _before_setup(self, trainer: Trainer) -> None:
        """Called before anything is set up, on the first of our callbacks in a Trainer: see :class:`_SetupHook`."""

    def _leave_out(self, hooks: Iterable[str]) -> None:
        """Says that these hooks do nothing.

        Lightning enters a profiler's context for each hook of each callback, also for an empty one, which makes ten
        microseconds a step. It passes over what is not callable.
        """
        for hook in hooks:
            setattr(self, hook, None)


def adopt_namespaces() -> None:
    """Makes this package's callbacks instances of the ``Callback`` of every Lightning package imported so far.

    Called here, for a ``LightningCLI`` that looks a callback up by its name, and whenever a callback is made.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        base = getattr(sys.modules.get(package), "Callback", None)
        if base is not None and not issubclass(ResilienceCallback, base):
            ResilienceCallback.__bases__ = (*ResilienceCallback.__bases__, base)
        hooks: Any = sys.modules.get(f"{package}.trainer.call")
        if hasattr(hooks, "_call_setup_hook") and not isinstance(hooks._call_setup_hook, _SetupHook):
            hooks._call_setup_hook = _SetupHook(hooks._call_setup_hook)


class _SetupHook:
    """Lightning's function that sets up loggers and callbacks, with ``_before_setup`` in front of it.

    Lightning has no such hook: loggers make their files before any callback hears of the fit, and in which order
    callbacks are set up is not for us to say. Without a callback of ours it does what it did.
    """

    def __init__(self, setup: Callable[[Trainer], None]) -> None:
        self._setup = setup

    def __call__(self, trainer: Trainer) -> None:
        ours = [each for each in callbacks(trainer) if isinstance(each, ResilienceCallback)]
        if ours:
            ours[0]._before_setup(trainer)
        self._setup(trainer)


adopt_namespaces()


def callbacks_named(trainer: Trainer, names: Collection[str]) -> list[Any]:
    """The callbacks of ``trainer`` whose class, or a base of it, has one of ``names``: without importing that."""
    return [each for each in callbacks(trainer) if any(cls.__name__ in names for cls in type(each).__mro__)]


def _timers(trainer: Trainer) -> list[Any]:
    """Lightning's own: a script's may be called so, too."""
    return [each for each in callbacks_named(trainer, ("Timer",)) if hasattr(each, "_duration")]


def has_pytorch_profiler(trainer: Trainer) -> bool:
    """Whether ``trainer`` profiles with PyTorch's profiler; of either package."""
    return any(cls.__name__ == "PyTorchProfiler" for cls in type(getattr(trainer, "profiler", None)).__mro__)


def collective_timeout(trainer: Trainer) -> float | None:
    """Seconds after which torch gives up a collective of ``trainer``, as its strategy was told; ``None``: not known."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return timeout.total_seconds() if timeout is not None and trainer.world_size > 1 else None


def wandb_logger(**settings: Any) -> Any:
    """A ``WandbLogger`` of the Lightning package that the script uses: a Trainer takes no other's.

    Of two that were imported, the script has imported the first one; this file may have imported the other.
    """
    package = next(name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning"))
    return importlib.import_module(f"{package}.loggers").WandbLogger(**settings)


class _Patch:
    """A function in the place of a method, which a copy of its owner (a pickled, deep-copied Trainer) has back."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)  # the copied owner has no attributes yet: its class's method


class Patches:
    """Attributes set on instances for the time of a fit, and taken off again: nothing of ours outlives it."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which must exist, to ``value`` until :meth:`undo`."""
        getattr(owner, name)  # a name that has gone away fails here, at setup, and not by being ignored
        self._undo.append((owner, name, name in vars(owner), vars(owner).get(name)))
        # A function made in here cannot be pickled, and a Trainer can. That of a class has to be one, to be bound.
        is_method = isinstance(value, FunctionType) and not isinstance(owner, type)
        setattr(owner, name, _Patch(owner, name, value) if is_method else value)

    def undo(self) -> None:
        """Restores everything, newest first."""
        while self._undo:
            owner, name, was_set, value = self._undo.pop()
            if was_set:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def callbacks(trainer: Trainer) -> list[Any]:
    """The Trainer's callbacks (an attribute that Lightning sets from elsewhere, so type checkers do not see it)."""
    return list(vars(trainer)["callbacks"])


def spawns_processes(trainer: Trainer) -> bool:
    """Whether the strategy runs each fit in processes of its own that end with it (``ddp_spawn``, ``ddp_fork``)."""
    return any(cls.__name__ == "_MultiProcessingLauncher" for cls in type(trainer.strategy.launcher).__mro__)


def is_search(trainer: Trainer) -> bool:
    """Whether this ``fit`` is a learning-rate or batch-size search of a ``Tuner``, which ends before training.

    The Tuner adds its callback with ``_early_exit`` and calls ``trainer.fit``; nothing public tells it from a real fit.
    """
    return any(getattr(callback, "_early_exit", False) for callback in callbacks(trainer))


def before_strategy_setup(trainer: Trainer, patches: Patches, action: Callable[[], None]) -> None:
    """Has ``action`` called before the strategy wraps, shards or converts the module.

    ``configure_model`` has been called, and no hook is between the two.
    """
    strategy: Any = trainer.strategy
    setup = strategy.setup

    def wrapper(trainer: Trainer) -> None:
        action()
        setup(trainer)

    patches.set(strategy, "setup", wrapper)


def on_restore(trainer: Trainer, patches: Patches, restore: Callable[[str | None, Any], None]) -> None:
    """Has ``restore(ckpt_path, weights_only)`` called where Lightning loads a checkpoint.

    A callback cannot choose the checkpoint: ``trainer.ckpt_path`` set in ``setup`` has no effect. This connector method
    is called after ``setup`` and ``configure_model`` in every strategy.
    """
    connector = trainer._checkpoint_connector

    def wrapper(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        restore(None if checkpoint_path is None else str(checkpoint_path), weights_only)

    patches.set(connector, "_restore_modules_and_callbacks", wrapper)


def load_checkpoint(trainer: Trainer, path: str | None, weights_only: bool | None = None) -> dict[str, Any]:
    """Has Lightning read the checkpoint at ``path`` through the strategy, and returns what it read (empty for none)."""
    connector = trainer._checkpoint_connector
    connector.resume_start(path, weights_only=weights_only)
    return connector._loaded_checkpoint


def load_own_whole_checkpoint(trainer: Trainer, path: str) -> dict[str, Any]:
    """Like :func:`load_checkpoint`, of a checkpoint of the run's own: whatever it holds, nothing in it is executed.

    ``FSDPStrategy`` reads a file with an unpickler of its own, that takes any class.
    """
    patches = Patches()
    for cls in type(trainer.strategy).__mro__:
        if cls.__name__ == "FSDPStrategy":
            safe = functools.partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
            patches.set(sys.modules[cls.__module__], "_lazy_load", safe)
    try:
        return load_checkpoint(trainer, path, weights_only=True)
    finally:
        patches.undo()


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The checkpoint from which Lightning would restore loops and optimizers now; empty if there is none."""
    return trainer._checkpoint_connector._loaded_checkpoint


def set_loaded_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Gives Lightning the checkpoint from which it restores loops and optimizers."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def on_restore_training_state(
    trainer: Trainer, patches: Patches, around: Callable[[], AbstractContextManager[None]]
) -> None:
    """Has Lightning restore loops, optimizers and schedulers within ``around``.

    A ``LearningRateFinder`` or ``BatchSizeFinder`` runs between that and the restoring of the module. It ends with a
    restore of its own, which is within ``around`` too, and with the loaded checkpoint thrown away.
    """
    connector = trainer._checkpoint_connector
    restore = connector.restore_training_state

    def wrapper() -> None:
        with around():
            restore()

    patches.set(connector, "restore_training_state", wrapper)


def on_fit_loop(
    trainer: Trainer,
    patches: Patches,
    before_epoch: Callable[[], None],
    end_of_epoch: Callable[[], None],
    before_end: Callable[[], None],
    after: Callable[[], None],
) -> None:
    """Has functions called around every epoch, and before and after all ``on_train_end`` hooks.

    ``end_of_epoch`` comes after the epoch's last batch and before any hook of its end.

    The module's own ``on_train_end``, and those of callbacks after ours, may still change the weights.
    """
    fit_loop = trainer.fit_loop
    advance_start, advance_end, run_end = fit_loop.on_advance_start, fit_loop.on_advance_end, fit_loop.on_run_end

    def wrapped_advance_start() -> None:
        before_epoch()
        advance_start()

    def wrapped_advance_end() -> None:
        end_of_epoch()
        advance_end()

    def wrapped_run_end() -> None:
        before_end()
        run_end()
        after()

    patches.set(fit_loop, "on_advance_start", wrapped_advance_start)
    patches.set(fit_loop, "on_advance_end", wrapped_advance_end)
    patches.set(fit_loop, "on_run_end", wrapped_run_end)


def on_fit_run(trainer: Trainer, patches: Patches, run: Callable[[Callable[[], None]], None]) -> None:
    """Has ``run`` called in the place of the fit's outermost loop, given that loop, which it may run more than once."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.run
    patches.set(fit_loop, "run", lambda: run(loop))


def end_again(trainer: Trainer) -> None:
    """Runs the fit's outermost loop where its training has ended: only what comes around it is left, which it skips."""
    fit_loop = trainer.fit_loop
    fit_loop.setup_data()
    fit_loop.reset()
    fit_loop.on_run_start()
    fit_loop._restarting = False
    fit_loop.on_run_end()


def begin_anew(trainer: Trainer, module: LightningModule) -> None:
    """Leaves of a fit that was interrupted between two batches only what a new process would have before it restores.

    The loaders are made anew when the loop is run again, and their workers with them.
    """
    fit_loop = trainer.fit_loop
    epoch_loop, val_loop = fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop
    for loop in (fit_loop, val_loop):
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()
            loop._data_fetcher = None
        if loop._combined_loader is not None:
            loop._combined_loader.reset()
            loop._combined_loader = None
    fit_loop._last_train_dl_reload_epoch = val_loop._last_val_dl_reload_epoch = float("-inf")
    epoch_loop._skip_next_val = False
    epoch_loop._results.clear()
    connector = trainer._logger_connector
    for metrics in (connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics):
        metrics.clear()
    connector._first_loop_iter = connector._current_fx = None
    for each in module.modules():
        if isinstance(each, Metric):
            each.reset()
    pruning.make_whole(module)
    module.zero_grad(set_to_none=True)
    trainer.should_stop = False
    for callback in trainer.checkpoint_callbacks:  # which would leave out a step that it has saved already
        if hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = 0


def frame(trainer: Trainer) -> Any:
    """What a new process makes and a checkpoint does not hold: which optimizers and schedulers there are.

    Some callbacks change them during a fit: ``StochasticWeightAveraging``, ``BaseFinetuning``; and ``ModelPruning`` the
    first values of the weights.
    """
    groups = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    return groups, [id(config.scheduler) for config in trainer.lr_scheduler_configs], _trained_tickets(trainer)


def after_exception_hooks(trainer: Trainer, patches: Patches, action: Callable[[], None]) -> None:
    """Has ``action`` called when every callback has been told of an exception: one may still save then."""
    strategy = trainer.strategy
    on_exception = strategy.on_exception

    def wrapper(exception: BaseException) -> None:
        on_exception(exception)
        action()

    patches.set(strategy, "on_exception", wrapper)


def restore_training_state(trainer: Trainer) -> None:
    """Restores loops, optimizers and schedulers from the loaded checkpoint, as Lightning does before it trains."""
    connector = trainer._checkpoint_connector
    connector.restore_training_state()
    connector.resume_end()


def drop_batch(trainer: Trainer) -> None:
    """Fetches the next training batch and counts it as done, but does not train on it.

    To be followed by all that is due after a batch. The step counts of the fit do not change.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    next(fetcher)
    progress = loop.batch_progress
    progress.is_last_batch = fetcher.done
    progress.increment_ready()
    progress.increment_started()
    progress.increment_processed()
    progress.increment_completed()
    if loop._num_ready_batches_reached():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    if not loop._should_accumulate():
        loop._batches_that_stepped -= 1  # what follows counts every batch as one that has stepped


def restore_checkpoint(trainer: Trainer, path: str | None, checkpoint: dict[str, Any]) -> None:
    """Restores module, data module and callbacks from ``checkpoint``; Lightning restores the rest later on its own."""
    connector = trainer._checkpoint_connector
    connector._ckpt_path = path
    connector._loaded_checkpoint = checkpoint
    connector.restore_model()
    connector.restore_datamodule()
    # Lightning's SpikeDetection looks for its metric by a name that it has not: every resume would fail.
    spikes = [each for each in callbacks_named(trainer, ("SpikeDetection",)) if not hasattr(each, "running")]
    for each in spikes:
        each.running = each.running_mean
    patiences = [(callback, callback.patience) for callback in callbacks_named(trainer, ("EarlyStopping",))]
    connector.restore_callbacks()
    for callback, patience in patiences:  # that of the checkpoint, and the script may have more by now
        callback.patience = max(patience, callback.patience)
    for each in spikes:
        del each.running


def found_by_searches(trainer: Trainer) -> dict[str, Any]:
    """What the ``LearningRateFinder`` and ``BatchSizeFinder`` of a fit have set, by the name of its attribute."""
    found = {}
    for _, parsing, name in _searches(trainer):
        value = parsing.lightning_getattr(trainer.lightning_module, name)
        if isinstance(value, (int, float)):
            found[name] = value
    return found


def leave_out_searches(trainer: Trainer, patches: Patches, found: dict[str, Any]) -> None:
    """Has the finders of a fit that is resumed set what they have found at its beginning, and search no more.

    A search would begin with the weights of now, and cost its time at every start. The learning rates of the optimizers
    are restored with these; a batch size is needed before the loaders are made.
    """
    for finder, parsing, name in _searches(trainer):
        if name in found:
            parsing.lightning_setattr(trainer.lightning_module, name, found[name])
            if hasattr(finder, "optimal_batch_size"):
                finder.optimal_batch_size = found[name]
            patches.set(finder, "on_fit_start", lambda *args: None)


def _searches(trainer: Trainer) -> Iterator[tuple[Any, Any, str]]:
    """The finders, Lightning's module that reads what they set, and its name in the module or its hyper-parameters."""
    names = ("LearningRateFinder", "BatchSizeFinder")
    for finder in callbacks_named(trainer, names):
        home = next(cls.__module__ for cls in type(finder).__mro__ if cls.__name__ in names)
        parsing = sys.modules[home.rpartition(".callbacks.")[0] + ".utilities.parsing"]
        if hasattr(finder, "optimal_batch_size"):
            candidates = [finder._batch_arg_name]
        else:
            candidates = [finder._attr_name] if finder._attr_name else ["lr", "learning_rate"]
            candidates = candidates if finder._update_attr else []
        for name in candidates:
            if parsing.lightning_hasattr(trainer.lightning_module, name):
                yield finder, parsing, name
                break


def exception_checkpoints(trainer: Trainer) -> list[str]:
    """The files of every ``OnExceptionCheckpoint``: where one is, Lightning resumes from it without being asked."""
    return [str(each.ckpt_path) for each in callbacks_named(trainer, ("OnExceptionCheckpoint",))]


_MARKS = ("current_score", "_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved")


def checkpoint_marks(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """What ``ModelCheckpoint`` remembers of its last save and does not save itself.

    By these it decides whether a step was saved already, is to be saved after the validation that is due, and whether
    ``last.ckpt`` is missing at the end.
    """
    return {
        callback.state_key: {name: getattr(callback, name) for name in _MARKS if hasattr(callback, name)}
        for callback in callbacks_named(trainer, ("ModelCheckpoint",))
    }


def set_checkpoint_marks(trainer: Trainer, marks: dict[str, dict[str, Any]]) -> None:
    """Restores :func:`checkpoint_marks`."""
    for callback in callbacks_named(trainer, ("ModelCheckpoint",)):
        for name, value in marks.get(callback.state_key, {}).items():
            setattr(callback, name, value)


def last_saves(trainer: Trainer) -> list[tuple[Any, int]]:
    """Every ``ModelCheckpoint``, and the ``trainer.global_step`` of its last save."""
    return [(each, each._last_global_step_saved) for each in callbacks_named(trainer, ("ModelCheckpoint",))]


def overwrite(callback: Any, patches: Patches, files: set[str]) -> None:
    """Has a ``ModelCheckpoint`` save to each of ``files``, as rank 0 knows them, once as if it were not there."""
    there = type(callback).file_exists

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        if not there(callback, filepath, trainer):
            return False
        is_free = str(filepath) in files
        files.discard(str(filepath))
        return not trainer.strategy.broadcast(is_free)

    patches.set(callback, "file_exists", file_exists)


# Where Lightning's own outputs of a fit are. Loggers are recognised by the names of their classes, as above.


def file_loggers(trainer: Trainer) -> list[Any]:
    """The loggers of ``trainer`` that write each version of an experiment to a folder of its own."""
    kinds = ("TensorBoardLogger", "CSVLogger")
    return [each for each in trainer.loggers if any(cls.__name__ in kinds for cls in type(each).__mro__)]


def set_logger_folder(logger: Any, save_dir: str, version: int | str | None) -> None:
    """Has one of :func:`file_loggers` write to this version there; ``None``: to the one that it would take anyway.

    Both are read-only for others, and are to be chosen before the logger is made, where no run is known.
    """
    if version is not None and logger._experiment is not None:  # the script has already logged something
        logger.save()
        logger._experiment = None
    logger._root_dir = save_dir
    if hasattr(logger, "_save_dir"):  # by which the CSVLogger has the same
        logger._save_dir = save_dir
    if version is not None:
        logger._version = version


def append_to_csv(logger: Any) -> None:
    """Has a ``CSVLogger`` open its files without deleting what an earlier attempt has logged there."""
    module = next((sys.modules[cls.__module__] for cls in type(logger).__mro__ if cls.__name__ == "CSVLogger"), None)
    if module is None or logger._experiment is not None:
        return
    patches = Patches()
    patches.set(module.ExperimentWriter, "_check_log_dir_exists", lambda _: None)  # which deletes
    try:
        writer = logger.experiment
    finally:
        patches.undo()
    try:
        with open(writer.metrics_file_path, "rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)  # a kill may have cut its last line
    except FileNotFoundError:
        return
    writer.metrics_keys = next(csv.reader(content.decode().splitlines()), [])


def on_new_columns(writer: Any, patches: Patches, write: Callable[[list[str]], None]) -> None:
    """Has ``write`` write a ``CSVLogger``'s file anew when it gets more columns.

    Lightning does so in place: who is killed then has nothing left of it.
    """
    patches.set(writer, "_rewrite_with_new_header", write)


def event_file(writer: Any) -> Any:
    """The file to which TensorBoard's ``SummaryWriter`` writes; opened if it is not. Lightning asks for it likewise."""
    return writer._get_file_writer()


def unopened_csv(logger: Any) -> str | None:
    """The file that a ``CSVLogger`` would delete when it is first used, which it has not been yet."""
    is_csv = any(cls.__name__ == "CSVLogger" for cls in type(logger).__mro__)
    return os.path.join(logger.log_dir, "metrics.csv") if is_csv and logger._experiment is None else None


def convert_to_double(trainer: Trainer, module: LightningModule) -> None:
    """Has a module that is trained in float64 be so before its state is loaded.

    Lightning converts it later, when the numbers have been rounded. A narrower type loses nothing that way.
    """
    plugin = trainer.precision_plugin
    if plugin.precision == "64-true":
        plugin.convert_module(module)


def limits(trainer: Trainer) -> dict[str, float | None]:
    """What may end the fit, by names that stay the same; ``None`` or a negative number is no limit."""
    times = [timer._duration for timer in _timers(trainer) if timer._duration is not None]
    patiences = {
        f"patience of {each.state_key}": each.patience for each in callbacks_named(trainer, ("EarlyStopping",))
    }
    counts = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    return {**counts, "max_time": min(times, default=None), **patiences}


def limit_reached(trainer: Trainer) -> str | None:
    """Which of :func:`limits` has ended the fit; ``None`` if none is known to."""
    if trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps:
        return "max_steps"
    if trainer.max_epochs not in (None, -1) and trainer.current_epoch >= trainer.max_epochs:
        return "max_epochs"
    for callback in callbacks_named(trainer, ("EarlyStopping",)):
        if callback.wait_count >= callback.patience:
            return f"patience of {callback.state_key}"
    for timer in _timers(trainer):
        if timer._duration is not None and timer.time_elapsed() >= timer._duration:
            return "max_time"
    return None


def changes_weights_at_the_end(trainer: Trainer) -> bool:
    """Whether a callback of Lightning's changes the weights when the training has ended."""
    return bool(callbacks_named(trainer, ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")))


def can_be_ended_again(trainer: Trainer) -> bool:
    """Whether a state from before ``on_train_end`` has all that these hooks need."""
    return not callbacks_named(trainer, ("StochasticWeightAveraging",))  # attributes of its last epoch are not saved


def acts_at_the_end(trainer: Trainer) -> bool:
    """Whether there is an ``on_train_end`` that may change what is saved of the fit."""
    return any(map(_acts_at_the_end, (*callbacks(trainer), trainer.lightning_module, trainer.strategy)))


def _acts_at_the_end(owner: Any) -> bool:
    function = getattr(owner.on_train_end, "__func__", None)
    if function is None or function.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        return callable(owner.on_train_end)
    kind = function.__qualname__.partition(".")[0]
    if kind == "ModelCheckpoint":
        return bool(owner.save_last and not owner._last_checkpoint_saved)
    return kind not in ("Callback", "ModelHooks", "Strategy", "TQDMProgressBar", "Timer")


def clocks(trainer: Trainer) -> list[str]:
    """The keys in ``callbacks`` of a checkpoint under which there is only how late it is."""
    return [timer.state_key for timer in _timers(trainer)]


def is_cut_short(trainer: Trainer) -> bool:
    """Whether this epoch ends before its last batch, because the whole fit does."""
    ends = trainer.should_stop or (trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps)
    return ends and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def shards_state(trainer: Trainer) -> bool:
    """Whether every rank holds a part of the parameters or of the optimizer's state that no other rank has."""
    return traits_of(trainer.strategy).is_sharded or any(_is_zero(optimizer) for optimizer in trainer.optimizers)


def replicates_state(trainer: Trainer) -> bool:
    """Whether all ranks have the same parameters and optimizer state, bit for bit: DDP as it is by default."""
    ddp = ddp_wrapper(trainer)
    if ddp is None or trainer.world_size == 1 or shards_state(trainer):
        return False
    # Ranks that average their models now and then differ in between; ignored parameters are nobody's concern.
    averages = vars(trainer.strategy).get("_model_averager") is not None
    return not averages and not getattr(ddp, "parameters_to_ignore", None)


def _is_zero(optimizer: Any) -> bool:
    """Whether an optimizer shards its state among the ranks (``ZeroRedundancyOptimizer``)."""
    return hasattr(optimizer, "consolidate_state_dict") and hasattr(optimizer, "optim")


def _do_nothing(*arguments: Any) -> None:
    pass


def _uses_last_argument(hook: Any, given: int) -> bool:
    """Whether a function may do something with the last of so many arguments; if in doubt, it may.

    Found in its code and not by watching it: the answer must be the same on all ranks, a hook may have collectives in
    it, and what it does once it need not do the next time.
    """
    function, position = getattr(hook, "__func__", hook), given - 1 + hasattr(hook, "__self__")
    while hasattr(function, "__wrapped__") and _is_transparent(function):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return not isinstance(code, CodeType) or _uses_argument(code, position)


def _is_transparent(decorated: Any) -> bool:
    """Whether the decorator is one like ``rank_zero_only`` and ``torch.no_grad``, which look at no argument."""
    package = str(getattr(decorated, "__globals__", {}).get("__name__")).partition(".")[0]
    return package in ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch")


@functools.cache
def _uses_argument(code: CodeType, position: int) -> bool:
    if position >= code.co_argcount or {"locals", "vars", "eval", "exec"} & {*code.co_names}:
        return True
    name = code.co_varnames[position]
    touched = (each.argval for each in dis.get_instructions(code))
    return any(name in each if isinstance(each, tuple) else name == each for each in touched)


def dump_own_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Like :func:`dump_checkpoint`, but of this rank alone: strategies that shard give their shards and gather nothing.

    Tensors are the live ones, not copies. Hooks that do nothing with the checkpoint are left out: there is no state of
    theirs in it, and what they do instead, such as writing an adapter, is meant for checkpoints that somebody asked
    for, which come by the hour and not by the second.
    """
    strategy: Any = trainer.strategy
    module = trainer.lightning_module

    def optimizer_state(optimizer: Any) -> Any:
        if not _is_zero(optimizer):
            return sharded.to_local(optimizer.state_dict())
        groups = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
        return {"own": optimizer.optim.state_dict(), "groups": groups}

    def module_state() -> dict[str, Any]:
        if traits_of(strategy).gathers_state_dict:
            return {name: tensor.detach() for name, tensor in _named_tensors(module)}
        return dict(sharded.to_local(module.state_dict()))

    patches = Patches()
    if shards_state(trainer):
        patches.set(strategy, "optimizer_state", optimizer_state)
        patches.set(strategy, "lightning_module_state_dict", module_state)
    for owner, given in ((module, 1), *((callback, 3) for callback in callbacks(trainer))):
        if not _uses_last_argument(owner.on_save_checkpoint, given):
            patches.set(owner, "on_save_checkpoint", _do_nothing)
    try:
        return dump_checkpoint(trainer)
    finally:
        patches.undo()


def dump_sharded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Like :func:`dump_checkpoint`, with each rank's shards, of a strategy that has ``shards_under`` something.

    By names, as the strategy itself saves and loads them. Of FSDP2 they are the live DTensors: it would copy everything
    to the host meanwhile. FSDP1 knows its shards only by a gathering of its own.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    strategy: Any = trainer.strategy
    if traits_of(strategy).gathers_state_dict:
        return dump_checkpoint(trainer)

    def optimizer_state(optimizer: Any) -> Any:
        return get_optimizer_state_dict(strategy.model, getattr(optimizer, "optimizer", optimizer))

    patches = Patches()
    patches.set(strategy, "optimizer_state", optimizer_state)
    patches.set(strategy, "lightning_module_state_dict", lambda: get_model_state_dict(strategy.model))
    try:
        return dump_checkpoint(trainer)
    finally:
        patches.undo()


_MODEL_PARALLEL = ("lightning.pytorch.strategies.model_parallel", "pytorch_lightning.strategies.model_parallel")
_FSDP1 = ("lightning.pytorch.strategies.fsdp", "pytorch_lightning.strategies.fsdp")


def traits_of(strategy: Any) -> StrategyTraits:
    """What ``strategy`` does with the state of a fit, also one of the user's own."""
    name = name_of(strategy)
    base: Any = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy")
    has_own_save = type(strategy).save_checkpoint is not base.save_checkpoint
    saves_in = str(type(strategy).save_checkpoint.__module__)
    known = STRATEGIES[name] if name is not None else StrategyTraits(is_sharded=has_own_save)
    shards_under = None
    if saves_in in _MODEL_PARALLEL:  # it reads both, a directory and a file, whatever its own saves are
        shards_under = "state_dict"
    elif saves_in in _FSDP1 and getattr(strategy, "_state_dict_type", "full") == "sharded":
        shards_under = "model"
    return replace(
        known,
        name=name,
        all_ranks_write=has_own_save,
        gathers_state_dict=name == "FSDPStrategy",
        loads_state=known.refused is None and not strategy.lightning_restore_optimizer,
        shards_under=shards_under,
        can_write_behind=not has_own_save or saves_in in (*_MODEL_PARALLEL, *_FSDP1),
    )


def nobody_elses(trainer: Trainer, state: Any) -> Any:
    """What FSDP1 has gathered, without a tensor that the training still writes.

    It copies to the host what is on a device; what is there already it may give as it is.
    """
    live = [*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers()]
    live += optimizer_tensors(trainer.optimizers)
    used = {each.untyped_storage().data_ptr() for each in live if not is_lazy(each)}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in used else tensor

    return apply_to_collection(state, torch.Tensor, apart)


def _named_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def load_own_checkpoint(trainer: Trainer, patches: Patches) -> None:
    """Has the strategy load what :func:`dump_own_checkpoint` has made, where it would load something else."""
    strategy: Any = trainer.strategy
    module = trainer.lightning_module
    load_plain_optimizers = strategy.load_optimizer_state_dict

    def load_sharded(checkpoint: Any, strict: bool = True) -> None:
        saved = checkpoint["state_dict"]
        if traits_of(strategy).gathers_state_dict:
            with torch.no_grad():
                for name, tensor in _named_tensors(module):
                    tensor.detach().copy_(saved[name])
        else:
            live = module.state_dict()
            module.load_state_dict(
                {name: sharded.from_local(value, live.get(name)) for name, value in saved.items()}, strict=strict
            )
        # These strategies are set up before they load, and load their optimizers with the model.
        load_optimizers(checkpoint)

    def load_optimizers(checkpoint: Any) -> None:
        if not shards_state(trainer):
            load_plain_optimizers(checkpoint)
            return
        for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            if _is_zero(optimizer):
                zero: Any = optimizer
                zero.optim.load_state_dict(state["own"])
                for group, values in zip(zero.param_groups, state["groups"], strict=True):
                    group.update(values)
            else:
                optimizer.load_state_dict(sharded.optimizer_state_from_local(optimizer, state))

    if traits_of(strategy).all_ranks_write:
        patches.set(strategy, "load_model_state_dict", load_sharded)
    else:
        patches.set(strategy, "load_optimizer_state_dict", load_optimizers)


def live_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """What does not change before the optimizers' steps: parameters, what optimizers keep, and averages of weights."""
    optimizers: list[Any] = list(trainer.optimizers)
    optimizers = [optimizer.optim if _is_zero(optimizer) else optimizer for optimizer in optimizers]
    parameters = [each for each in trainer.lightning_module.parameters() if not is_lazy(each)]
    return [*parameters, *optimizer_tensors(optimizers), *_averaged_tensors(trainer)]


def _averaged_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    """What Lightning's callbacks average: written at the end of a batch or an epoch. It has no public name."""
    for callback in callbacks_named(trainer, ("WeightAveraging", "StochasticWeightAveraging")):
        if (average := getattr(callback, "_average_model", None)) is not None:
            yield from average.parameters()
            yield from average.buffers()


def named_state(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """What the training makes: parameters, buffers, and what optimizers keep, by the names of the module."""
    module = trainer.lightning_module
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor
    for number, tensor in enumerate(optimizer_tensors(trainer.optimizers)):
        yield f"tensor {number} of the optimizers", tensor


def on_save(trainer: Trainer, patches: Patches, may_save: Callable[[str], bool]) -> None:
    """Has ``may_save(path)`` asked, on all ranks, whenever somebody has the Trainer save a checkpoint."""
    save = trainer.save_checkpoint

    def wrapper(filepath: Any, *args: Any, **kwargs: Any) -> None:
        if may_save(str(filepath)):
            save(filepath, *args, **kwargs)

    patches.set(trainer, "save_checkpoint", wrapper)


def replicated_parameters(trainer: Trainer) -> list[torch.nn.Parameter]:
    """The parameters that all ranks have alike, bit for bit; none where ranks keep no replicas of each other.

    What is frozen when DDP is set up, it never reduces, and later each rank trains it for itself. And embeddings with
    ``max_norm`` shorten, in the forward pass, those rows that the rank's own batch asks for.
    """
    if not replicates_state(trainer):
        return []
    module = trainer.lightning_module
    own = {id(p) for each in module.modules() if getattr(each, "max_norm", None) is not None for p in each.parameters()}
    return [each for each in module.parameters() if each.requires_grad and id(each) not in own]


def trained_tensors(trainer: Trainer, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """What all ranks of a DDP job have alike: the parameters that it reduces, and what optimizers keep for them."""
    return [*parameters, *optimizer_tensors(trainer.optimizers, parameters)] if parameters else []


def on_batch_done(trainer: Trainer, patches: Patches, done: Callable[[], None]) -> None:
    """Has ``done`` called when a batch's forward, backward and optimizer steps are over, before any hook of its end."""
    loop = trainer.fit_loop.epoch_loop
    for optimization in (loop.automatic_optimization, loop.manual_optimization):
        patches.set(optimization, "run", _followed_by(optimization.run, done))


def _followed_by(run: Callable[..., Any], done: Callable[[], None]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        done()
        return result

    return wrapper


def on_sections_of_step(
    trainer: Trainer,
    patches: Patches,
    ready: Callable[[], None],
    begin: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Has functions called where a training step goes on to something else.

    Args:
        trainer: The Trainer.
        patches: What undoes it.
        ready: Called when a batch is there, on its device.
        begin: Called before its forward and backward pass and optimizer steps.
        end: Called behind them, before any hook of the batch's end.
    """
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    on_batch_start = connector.on_batch_start

    def on_ready(*args: Any, **kwargs: Any) -> None:
        if trainer.training:  # a validation in between has batches too
            ready()
        on_batch_start(*args, **kwargs)

    patches.set(connector, "on_batch_start", on_ready)
    for optimization in (loop.automatic_optimization, loop.manual_optimization):
        patches.set(optimization, "run", _between(optimization.run, begin, end))


def _between(run: Callable[..., Any], begin: Callable[[], None], end: Callable[[], None]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return run(*args, **kwargs)
        finally:
            end()

    return wrapper


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint of everything a resume needs.

    Without hyper-parameters: a resume restores into the live module and does not need them, and they hold whatever the
    user passed, which a safe load cannot read. ``trainer.save_checkpoint`` would write a file and cannot leave them
    out.
    """
    patches = Patches()
    for callback in callbacks_named(trainer, ("ModelPruning",)):
        # It multiplies the weights by their masks and leaves those out: the file is then for others.
        patches.set(callback, "_make_pruning_permanent", False)
    try:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        patches.undo()
    for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        for key in ("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"):
            checkpoint.pop(getattr(owner, key, None), None)
    _leave_out_functions_of_averaging(trainer, checkpoint)
    return checkpoint


def _leave_out_functions_of_averaging(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """In torch 2.8 the state of ``SWALR`` holds its function, which every new one has of itself.

    It can only be pickled, and what belongs to a function goes with it: all that ``StochasticWeightAveraging`` keeps.
    """
    states = list(checkpoint.get("lr_schedulers", ()))
    for callback in callbacks_named(trainer, ("StochasticWeightAveraging",)):
        states.append(checkpoint.get("callbacks", {}).get(callback.state_key, {}).get("scheduler_state"))
    for state in states:
        if isinstance(state, dict) and isinstance(state.get("anneal_func"), FunctionType):
            del state["anneal_func"]


def steps_counted(trainer: Trainer) -> int:
    """A count, the same on all ranks, that grows with every training batch begun and with every epoch begun."""
    fit_loop = trainer.fit_loop
    return fit_loop.epoch_loop.batch_progress.total.ready + fit_loop.epoch_progress.total.ready


def batches_begun(trainer: Trainer) -> int:
    """How many training batches of this epoch have been begun; between two batches the number of the next one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs what belongs to now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulates(trainer: Trainer) -> bool:
    """Whether an optimizer's step is for more than one batch, now or in an epoch to come.

    A ``GradientAccumulationScheduler`` sets the Trainer's number when its epoch begins.
    """
    schedules = (getattr(each, "going_to_accumulate_grad_batches", None) for each in callbacks(trainer))
    return trainer.accumulate_grad_batches != 1 or any(schedule() for schedule in schedules if schedule is not None)


def has_grad_scaler(trainer: Trainer) -> bool:
    """Whether a gradient scaler looks for infinite gradients (16-bit floats), and skips steps in its normal work."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def clips_by_norm(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients by their norm in every step, in a way that :func:`on_clipping_by_norm` sees.

    Not known where a module clips by itself, as in manual optimization.
    """
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    return by_norm and (trainer.gradient_clip_val or 0) > 0 and _clips_as_usual(trainer.precision_plugin)


def _clips_as_usual(plugin: Any) -> bool:
    return bool(type(plugin).clip_grad_by_norm.__qualname__ == "Precision.clip_grad_by_norm")


def on_clipping_by_norm(
    trainer: Trainer, patches: Patches, before: Callable[[Any], None], seen: Callable[[Any, torch.Tensor], None]
) -> None:
    """Has ``seen`` called with an optimizer and the norm of its gradients, of all ranks, where Lightning clips by it.

    And ``before`` with the optimizer before it. Not where the precision plugin has a way of its own (FSDP1, which
    refuses).

    ``clip_grad_norm_`` returns it, and Lightning drops it. Sharded gradients have it reduced over the ranks once, here,
    instead of within.
    """
    plugin = trainer.precision_plugin
    if not _clips_as_usual(plugin):
        return

    def clip(optimizer: Any, clip_val: Any) -> None:
        if any(cls.__name__ == "LightningOptimizer" for cls in type(optimizer).__mro__):  # in manual optimization
            optimizer = optimizer.optimizer
        before(optimizer)
        parameters = list(plugin.main_params(optimizer))
        norm: Any = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norm)
        seen(optimizer, norm)

    patches.set(plugin, "clip_grad_by_norm", clip)


def hold_weight_averaging(trainer: Trainer) -> None:
    """Has Lightning's ``WeightAveraging`` take the step that was just counted for one that it has seen.

    It averages after every step that is counted, also where the weights are what they were.
    """
    for callback in callbacks_named(trainer, ("WeightAveraging",)):
        callback._latest_update_step = trainer.global_step


def accumulation_window_complete(trainer: Trainer) -> bool:
    """Whether no gradients wait for the rest of their accumulation window.

    In its last epoch, which only reads data for BatchNorm, ``StochasticWeightAveraging`` leaves those of the step
    before, and Lightning makes a step of them at the end.
    """
    if trainer.accumulate_grad_batches == 1:
        return True
    return not trainer.fit_loop.epoch_loop._should_accumulate() and not trainer.fit_loop._skip_backward


def on_training_boundary(trainer: Trainer, patches: Patches, boundary: Callable[[], bool]) -> None:
    """Has ``boundary`` called between training batches, when all that was due after the last one has happened.

    No hook is called there: ``on_train_batch_end`` comes before the validation and the scheduler steps of its batch.
    ``boundary`` returns whether the next batch may be trained; if not, only what is due after the last one is done.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def wrapper(data_fetcher: Any) -> None:
        if boundary():
            advance(data_fetcher)

    patches.set(loop, "advance", wrapper)


def on_evaluation(
    trainer: Trainer,
    patches: Patches,
    start: Callable[[], None],
    before_data: Callable[[list[Any]], None],
    boundary: Callable[[int, int], None],
    end: Callable[[], None],
) -> None:
    """Has functions called around and within every validation of the fit, the sanity check included.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        start: Before anything of the validation, its data-loader iterators included (they draw random numbers).
        before_data: Given the data loaders, before their iterators are made.
        boundary: Before every batch, with the data-loader index and the batch index.
        end: After the last batch, before the reductions at the end. No hook is called there on all ranks alike.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    run, reset, step, run_end = loop.run, loop.reset, loop._evaluation_step, loop.on_run_end

    def wrapped_run() -> Any:
        start()
        return run()

    def wrapped_reset() -> None:
        before_data(loop._combined_loader.flattened if loop._combined_loader is not None else [])
        reset()

    def wrapped_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        boundary(dataloader_idx, batch_idx)
        step(batch, batch_idx, dataloader_idx, dataloader_iter)

    def wrapped_run_end() -> Any:
        end()
        return run_end()

    patches.set(loop, "run", wrapped_run)
    patches.set(loop, "reset", wrapped_reset)
    patches.set(loop, "_evaluation_step", wrapped_step)
    patches.set(loop, "on_run_end", wrapped_run_end)


def on_other_trainers(
    trainer: Trainer, patches: Patches, batch: Callable[[], None], signals_put_back: Callable[[], None]
) -> None:
    """Has functions called when a Trainer inside of this one's fit begins a batch, and when any has put signals back.

    Such a Trainer has none of our callbacks where the user has made it, so its classes are what can be asked. At its
    end it sets every signal to what Python knew of it, and Python does not know of handlers in C.
    """
    own = trainer.fit_loop.epoch_loop

    def counted(advance: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(loop: Any, *args: Any, **kwargs: Any) -> Any:
            if loop is not own and loop is not own.val_loop:
                batch()
            return advance(loop, *args, **kwargs)

        return wrapped

    for loop, name in (
        (own, "advance"),
        (own.val_loop, "_evaluation_step"),
        (trainer.predict_loop, "_predict_step"),
    ):
        patches.set(type(loop), name, counted(getattr(type(loop), name)))
    connector = type(trainer._signal_connector)
    put_back = connector.teardown

    def wrapped_teardown(self: Any) -> None:
        put_back(self)
        signals_put_back()

    patches.set(connector, "teardown", wrapped_teardown)


def evaluation_progress(trainer: Trainer) -> dict[str, Any]:
    """The progress of the fit's validation loop, by its keys in a checkpoint."""
    state: dict[str, Any] = {}
    trainer.fit_loop.epoch_loop.val_loop.state_dict(state, "epoch_loop.val_loop.")
    return state


def on_train_data(
    trainer: Trainer,
    patches: Patches,
    first: Callable[[Callable[[], None]], None],
    again: Callable[[], None],
) -> None:
    """Has functions called right before the iterators of the training data loaders are made.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        first: At the start of the fit, given the function that has the loaders restore their own states.
        again: At the start of every later epoch. The hook ``on_train_epoch_start`` is too early: the user's own may
            draw random numbers after it.
    """
    fit_loop = trainer.fit_loop
    load_states, on_run_start = fit_loop._load_combined_loader_states, fit_loop.epoch_loop.on_run_start

    def wrapped_on_run_start(data_fetcher: Any) -> None:
        # the condition under which Lightning makes new iterators in there
        if trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting:
            again()
        on_run_start(data_fetcher)

    patches.set(fit_loop, "_load_combined_loader_states", lambda: first(load_states))
    patches.set(fit_loop.epoch_loop, "on_run_start", wrapped_on_run_start)


def train_loaders(trainer: Trainer) -> list[Any]:
    """The training data loaders as Lightning iterates them, its distributed samplers included."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def validation_loaders(trainer: Trainer) -> list[Any]:
    """The validation data loaders as Lightning iterates them."""
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def set_epoch_of_samplers(trainer: Trainer, epoch: int) -> None:
    """Tells every sampler the epoch.

    Lightning does it only after the iterators are made, too late for loaders with workers (its issue #21938).
    """
    for loader in train_loaders(trainer):
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)


def silence_resume_warning(trainer: Trainer, patches: Patches) -> None:
    """Silences Lightning's warning that a plain data loader can't be resumed in mid-epoch: here it can."""
    loop = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def wrapper() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            reset()

    patches.set(loop, "reset", wrapper)


def loader_states(trainer: Trainer) -> list[dict[str, Any]] | None:
    """This rank's states of the training data loaders, if every one of them is stateful and can restore its place.

    Lightning saves the states of rank 0 only. Where the length is unknown Lightning holds one batch back, which the
    loader's state counts as consumed: such a loader is replayed like one without a state.
    """
    loader, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if loader is None or fetcher is None or fetcher.length is None:
        return None
    if not all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loader.flattened):
        return None
    return list(loader._state_dicts())


def load_loader_states(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Restores ``states`` into the training data loaders, before their iterators are made.

    Lightning's own way drops them where ``trainer.estimated_stepping_batches`` made the loaders early (its #20550).
    """
    assert trainer.fit_loop._combined_loader is not None
    trainer.fit_loop._combined_loader._load_state_dicts(states)


def fetches_ahead_here(trainer: Trainer) -> bool:
    """Whether a training batch is fetched in this process one step before it is trained on.

    Lightning does so where a loader does not know its length. Without workers the fetch draws from the same random
    streams as the training, so that the batch in flight depends on their state one boundary ago.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return (
        fetcher is not None
        and fetcher.length is None
        and any(getattr(loader, "num_workers", 0) == 0 for loader in train_loaders(trainer))
    )


def batches_fetched(trainer: Trainer) -> int:
    """How many batches a replay must fetch to stand where this rank stands in its training data."""
    fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
    by_iterator = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"  # the user's step fetches as it likes
    return fetcher.fetched if by_iterator and fetcher is not None else progress.current.ready


def replay_fetch(trainer: Trainer) -> Callable[[], Any]:
    """A function that fetches the next training batch without training on it."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        return functools.partial(vars(type(fetcher).__mro__[1])["__next__"], fetcher)
    return lambda: next(fetcher)


def skip_batches(trainer: Trainer, batches: int) -> bool:
    """Moves the only training data loader on by ``batches`` without reading data. Returns whether that is possible.

    Both iterators, the combined one of Lightning and the one of torch, count what they have yielded.
    """
    fit_loop, loaders = trainer.fit_loop, train_loaders(trainer)
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    if fetcher is None or combined is None or type(fetcher).__name__ != "_PrefetchDataFetcher":
        return False
    if len(loaders) != 1 or fetcher.length is None or not data_position.can_skip(loaders[0]):
        return False
    outer: Any = combined._iterator
    inner: Any = outer.iterators[0]
    for _ in range(batches):
        inner._next_index()
    inner._num_yielded += batches
    outer._idx += batches
    fetcher.fetched += batches
    return True


class LoggedValues:
    """What training steps have logged, so that a batch whose step is skipped can be left out of a metric's mean.

    A value that is not finite would stay in the metric until the end of the epoch, and ``EarlyStopping`` ends a fit for
    it. Lightning replaces the state of a metric at every value, so the state before is kept by not letting go of it: no
    copy, and nothing is read from the device. Metrics of torchmetrics are left as they are.
    """

    _STATE = ("value", "cumulated_batch_size", "_forward_cache")

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._entries: list[tuple[int, int, Any, Any, int, dict[str, Any], Any]] = []
        results: Any = trainer.fit_loop.epoch_loop._results
        update = results.update_metrics

        def updated(key: str, value: Any, batch_size: int) -> None:
            metric = results[key]
            before = self._state(metric)
            update(key, value, batch_size)
            if metric.is_tensor:
                place = trainer.current_epoch, batches_begun(trainer)
                self._entries.append((*place, metric, value, batch_size, before, metric._forward_cache))

        patches.set(results, "update_metrics", updated)

    def _state(self, metric: Any) -> dict[str, Any]:
        return {name: vars(metric)[name] for name in self._STATE if name in vars(metric)}

    def leave_out(self, epoch: int, begin: int, end: int) -> None:
        """What the batches from ``begin`` to before ``end`` have logged counts for nothing."""
        entries, self._entries = self._entries, []
        begun: set[int] = set()  # the metrics that go back to before the first of these batches
        for entry in entries:
            of_epoch, number, metric, value, batch_size, before, latest = entry
            is_bad = of_epoch == epoch and begin < number <= end and not metric.has_reset
            if is_bad and id(metric) not in begun:
                begun.add(id(metric))
                vars(metric).update(before)
                metric._computed = None
            elif not is_bad and id(metric) in begun:
                before = self._state(metric)
                self._add(metric, value, batch_size, latest)
            if not is_bad:
                self._entries.append((of_epoch, number, metric, value, batch_size, before, latest))

    @staticmethod
    def _add(metric: Any, value: Any, batch_size: int, latest: Any) -> None:
        """What ``_ResultMetric.update`` does, but for what ranks exchange in it."""
        meta = metric.meta
        metric._forward_cache = latest
        if meta.on_step and not meta.on_epoch:
            metric.value = latest
        elif meta.is_mean_reduction:
            metric.value = metric.value + value * batch_size
            metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
        elif meta.is_max_reduction or meta.is_min_reduction:
            metric.value = meta.reduce_fx(metric.value, value)
        elif meta.is_sum_reduction:
            metric.value = metric.value + value

    def forget(self, epoch: int, end: int) -> None:
        """Nothing up to this batch will be left out any more."""
        if self._entries:
            self._entries = [entry for entry in self._entries if entry[:2] > (epoch, end)]


class SampleIds:
    """Which samples the latest training batches are made of, where a sampler says so.

    The iterator of a data loader asks its sampler for the indices of each batch, ahead of the workers; here they are
    written down as they pass. Batches that workers have been asked for before the first look are not known.
    """

    _KEPT = 256

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._seen: Callable[[], Any] = lambda: None  # the iterator over all loaders, of one epoch
        self._iterator: Callable[[], Any] = lambda: None
        self._ids: dict[int, Any] = {}

    def look(self) -> None:
        """Watches the iterator of this epoch, from now on."""
        combined: Any = self._trainer.fit_loop._combined_loader
        if combined is None or combined._iterator is None or combined._iterator is self._seen():
            return
        inner: Any = next(iter(combined._iterator.iterators), None)
        if inner is None:
            return
        self._seen = weakref.ref(combined._iterator)
        if len(combined.flattened) != 1 or inner is self._iterator() or not hasattr(inner, "_next_index"):
            return
        # Not kept alive by us, nor by itself: its end is that of its workers.
        ids: dict[int, Any] = {}
        self._iterator, self._ids, kept = weakref.ref(inner), ids, self._KEPT

        def noted(iterator: Callable[[], Any] = self._iterator) -> Any:
            inner = iterator()
            indices = type(inner)._next_index(inner)
            number = inner._send_idx if hasattr(inner, "_send_idx") else inner._num_yielded
            ids[number] = indices
            ids.pop(number - kept, None)
            return indices

        inner._next_index = noted

    def of(self, batches: Iterable[int]) -> list[int] | None:
        """The indices of some batches of this epoch, as the loader counts them; ``None`` if they are not known."""
        found: list[Any] = [self._ids.get(batch) for batch in batches]
        if not all(isinstance(each, (list, tuple)) for each in found):
            return None
        ids = [index for each in found for index in each]
        return ids if all(isinstance(index, int) for index in ids) else None


def count_replayed(trainer: Trainer) -> None:
    """Evens out that Lightning adds the batches before a resume to the fetcher's count: a replay has counted them."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched -= trainer.fit_loop.epoch_loop.batch_progress.current.ready


def end_restart(trainer: Trainer) -> None:
    """Tells all loops that they are not restarting any more.

    From here on our checkpoints say exactly what is done and what is due. Lightning guesses it from its counters while
    ``_restarting`` is set, for the rest of the epoch, and skips validations and scheduler steps; with ``max_steps`` the
    public setter cannot even unset it.
    """

    def clear(loop: Any) -> None:
        loop._restarting = False
        for child in vars(loop).values():
            if hasattr(child, "_restarting"):
                clear(child)

    clear(trainer.fit_loop)
    trainer.fit_loop._resuming_from_checkpoint = False


def count_batches_done(trainer: Trainer, batches: int) -> int:
    """Has this epoch go on behind its first ``batches`` batches; behind all of them if it was over.

    Returns:
        How many are done.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch and trainer.num_training_batches != float("inf"):
        batches = int(trainer.num_training_batches)
    for key in ("ready", "started", "processed", "completed"):
        setattr(progress.current, key, batches)
    return batches


def resume_weight_averaging(trainer: Trainer, module: LightningModule) -> None:
    """Has ``StochasticWeightAveraging`` stand where it stood in the middle of an epoch.

    It exchanges the scheduler at the beginning of an epoch, in a hook that Lightning does not call again in the middle
    of one: the rest of the epoch would do without, and the next save would hold none. The learning rates that a new
    scheduler sets are in the checkpoint already.
    """
    for callback in callbacks_named(trainer, ("StochasticWeightAveraging",)):
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        before, patches = [dict(group) for group in groups], Patches()
        patches.set(callback, "update_parameters", lambda *args: None)
        try:
            callback.on_train_epoch_start(trainer, module)
        finally:
            patches.undo()
        for group, values in zip(groups, before, strict=True):
            group.update(values)


def modes(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What hooks at the start of an epoch may have set; Lightning does not call them again in the middle of it."""
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, each in module.named_modules() if not each.training],
        "tickets": _trained_tickets(trainer),
    }


def set_modes(trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
    """Restores :func:`modes`."""
    if "accumulate_grad_batches" in state:
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):  # else nothing is asked of one that is not initialized yet
            parameter.requires_grad_(name not in frozen)
    for name, each in module.named_modules():
        each.training = name not in evaluating
    tickets = set(state.get("tickets", ()))
    for number, (first, weight) in enumerate(_lottery_tickets(trainer)):
        if number in tickets:
            first.data = weight.data


def _lottery_tickets(trainer: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first values that ``ModelPruning`` has kept of weights, and the weights.

    Where both are on one device, the first time that it puts them back it makes them one tensor: they are trained.
    """
    for callback in callbacks_named(trainer, ("ModelPruning",)):
        for layer in (callback._original_layers or {}).values():
            for number, name in layer["names"]:
                pruned, _ = callback._parameters_to_prune[number]
                weight = getattr(pruned, name + pruning.ORIGINAL, None)
                first = getattr(layer["data"], name, None)
                if isinstance(first, torch.Tensor) and isinstance(weight, torch.Tensor):
                    yield first, weight


def _trained_tickets(trainer: Trainer) -> list[int]:
    tickets = enumerate(_lottery_tickets(trainer))
    return [number for number, (first, weight) in tickets if first.data_ptr() == weight.data_ptr()]


def reload_epochs(trainer: Trainer) -> list[float]:
    """The epochs in which the data loaders were made last (``reload_dataloaders_every_n_epochs``)."""
    fit_loop = trainer.fit_loop
    return [fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    """Restores :func:`reload_epochs`, so that loaders are made anew in the same epochs as without the interruption."""
    fit_loop = trainer.fit_loop
    fit_loop._last_train_dl_reload_epoch = epochs[0]
    if fit_loop.epoch_loop.val_loop._combined_loader is not None:  # else they have yet to be made in this process
        fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs[1]


def epoch_loop_batches(trainer: Trainer) -> int:
    """How many training batches of this epoch are done."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.completed


def ddp_wrapper(trainer: Trainer) -> DistributedDataParallel | None:
    """The strategy's DistributedDataParallel wrapper, if it uses one."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def keep_signal_handlers(
    trainer: Trainer,
    patches: Patches,
    signums: Iterable[int],
    take_over: Callable[[], None],
    put_back: Callable[[], None],
) -> None:
    """Keeps Lightning's SIGTERM handler, which broadcasts inside the handler and deadlocks DDP, out of the way.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        signums: Signals that Lightning shall not give back at its end: the handlers that it found are ours, and
            after an exception its end comes after ours.
        take_over: Called before Lightning registers its handlers, which wrap those of the script.
        put_back: Called after Lightning has registered its handlers, right before the stages run.
    """
    connector = trainer._signal_connector
    register = connector.register_signal_handlers

    def wrapper() -> None:
        take_over()
        register()
        for signum in signums:
            connector._original_handlers.pop(signum, None)
        put_back()

    patches.set(connector, "register_signal_handlers", wrapper)
    # In DDP Lightning broadcasts "was there a SIGTERM" in every step, with a host sync.
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def requeue_signal(trainer: Trainer) -> Any | None:
    """The signal on which Lightning requeues a Slurm job from inside its handler, if it would."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    return getattr(environment, "requeue_signal", None)


_LOG_ARGUMENTS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def metric_states(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """This rank's metrics in the middle of an epoch, which Lightning does not save.

    The accumulated ``self.log(on_epoch=True)`` values, the states of ``torchmetrics`` attributes, and the last values
    that schedulers and callbacks may monitor.
    """
    results = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = result.meta
        if meta.sync.group is not None or not (result.is_tensor or meta.metric_attribute):
            continue
        results[key] = {
            "meta": {name: getattr(meta, name) for name in _LOG_ARGUMENTS},
            "reduce": meta.reduce_fx.__name__,
            "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            # the state of a logged torchmetrics object is that of the module's attribute
            "value": result.value.clone() if result.is_tensor else None,
            "cumulated_batch_size": (
                result.cumulated_batch_size.clone() if result.is_tensor and meta.is_mean_reduction else None
            ),
            "updates": result._update_count,
            "has_reset": result.has_reset,
        }
    modules = {
        name: {
            "state": {key: _clone(getattr(metric, key)) for key in metric._defaults},
            "updates": metric._update_count,
            "seen": getattr(metric, "_num_vals_seen", None),  # where a running one stands in its window
        }
        for name, metric in _metrics(trainer, module)
    }
    connector = trainer._logger_connector
    latest = {
        name: {key: _clone(value) for key, value in getattr(connector, name).items()}
        for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
    }
    # Without these the next ``self.log`` takes its batch for the first of the epoch and starts all means afresh.
    loop = {"_first_loop_iter": connector._first_loop_iter, "_current_fx": connector._current_fx}
    return {"results": results, "modules": modules, "latest": latest, "loop": loop}


def _metrics(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Metric]]:
    """The metrics of the module and those that callbacks keep, by names that a new process finds again."""
    yield from ((name, each) for name, each in module.named_modules() if isinstance(each, Metric))
    for callback in callbacks(trainer):
        for attribute, value in vars(callback).items():
            if isinstance(value, Metric):
                yield from (
                    (f"{callback.state_key}.{attribute}.{name}", each)
                    for name, each in value.named_modules()
                    if isinstance(each, Metric)
                )


def set_metric_states(trainer: Trainer, module: LightningModule, states: dict[str, Any]) -> None:
    """Restores :func:`metric_states`."""
    device = trainer.strategy.root_device
    collection = trainer.fit_loop.epoch_loop._results
    package = sys.modules[type(collection).__module__]
    for key, state in states["results"].items():
        sync = package._Sync(
            _should=state["sync"]["should"], fn=trainer.strategy.reduce, rank_zero_only=state["sync"]["rank_zero_only"]
        )
        meta = package._Metadata(**state["meta"], reduce_fx=getattr(torch, state["reduce"]))
        meta.sync = sync
        is_tensor = state["value"] is not None
        metric = package._ResultMetric(meta, is_tensor)
        metric.value = state["value"] if is_tensor else module.get_submodule(state["meta"]["metric_attribute"])
        if state["cumulated_batch_size"] is not None:
            metric.cumulated_batch_size = state["cumulated_batch_size"]
        metric._update_count, metric.has_reset = state["updates"], state["has_reset"]
        collection[key] = metric.to(device)
    metrics = dict(_metrics(trainer, module))
    for name, state in states["modules"].items():
        if (each := metrics.get(name)) is not None:
            for key, value in state["state"].items():
                setattr(each, key, _to(value, each.device))
            each._update_count, each._computed = state["updates"], None
            if state.get("seen") is not None:
                vars(each)["_num_vals_seen"] = state["seen"]
    connector = trainer._logger_connector
    for name, value in states["loop"].items():
        setattr(connector, name, value)
    set_latest_metrics(trainer, states)


def set_latest_metrics(trainer: Trainer, states: dict[str, Any]) -> None:
    """Restores the part of :func:`metric_states` that ``trainer.callback_metrics`` and its like show."""
    for name, values in states["latest"].items():
        latest = getattr(trainer._logger_connector, name)
        latest.update({key: _to(value, trainer.strategy.root_device) for key, value in values.items()})


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_clone(item) for item in value] if isinstance(value, list) else value


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value


# Checkpoint plugins. Recognised by the names of their classes: a script's Trainer may come from either namespace, and
# importing the other one only to compare would cost seconds.


def is_plain_checkpoint_io(io: object) -> bool:
    """Whether ``io`` is exactly Lightning's ``TorchCheckpointIO``, not a subclass that may do anything."""
    cls = type(io)
    return cls.__name__ == "TorchCheckpointIO" and cls.__module__ in (
        "lightning.fabric.plugins.io.torch_io",
        "lightning_fabric.plugins.io.torch_io",
    )


def is_async_checkpoint_io(io: object) -> bool:
    """Whether ``io`` is an ``AsyncCheckpointIO``, which hands every save to a thread."""
    return any(
        cls.__name__ == "AsyncCheckpointIO"
        and cls.__module__ in ("lightning.pytorch.plugins.io.async_plugin", "pytorch_lightning.plugins.io.async_plugin")
        for cls in type(io).__mro__
    )


def set_inner_checkpoint_io(io: Any, inner: Any) -> None:
    """Exchanges what an ``AsyncCheckpointIO`` wraps; its public setter ignores a second value."""
    io._checkpoint_io = inner


def after_async_saves(io: Any, action: Callable[[], None]) -> None:
    """Queues ``action`` behind the saves that an ``AsyncCheckpointIO`` has not finished.

    Its executor has one thread, so this is their order. ``action`` is dropped once a save has failed: it relies on the
    newest checkpoint. Its own error is raised by the next save or the teardown, as that of a save is.
    """

    def act() -> None:
        if io._error is None:
            try:
                action()
            except BaseException as error:
                io._error = error

    io._ensure_setup()
    io._executor.submit(act)


def wait_for_async_saves(io: Any, within_s: float) -> bool:
    """Waits until everything queued in an ``AsyncCheckpointIO`` is done; its error stays for its teardown to raise.

    Returns:
        Whether it is done.
    """
    if io._executor is None:
        return True
    done, _ = concurrent.futures.wait([io._executor.submit(lambda: None)], within_s)
    return bool(done)


def replace_link_checkpoint(callback: Any, link: Callable[[Any, str, str], None]) -> None:
    """Makes a ``ModelCheckpoint`` link ``last.ckpt`` with ``link(trainer, filepath, linkpath)``.

    ``_link_checkpoint`` removes the old link before it makes the new one. A subclass that has its own is left alone.
    """
    plain = getattr(type(callback), "_link_checkpoint", None)
    if plain is not None and plain.__module__ in (
        "lightning.pytorch.callbacks.model_checkpoint",
        "pytorch_lightning.callbacks.model_checkpoint",
    ):
        callback._link_checkpoint = link


def restore_link_checkpoint(callback: Any) -> None:
    """Undoes :func:`replace_link_checkpoint`."""
    vars(callback).pop("_link_checkpoint", None)
