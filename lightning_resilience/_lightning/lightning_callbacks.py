"""The base of this package's callbacks, and private names of Lightning's own callbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_resilience._lightning.lightning_patches import Patches

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
    """The base of this package's callbacks, so that a Trainer of either namespace accepts them.

    ``lightning.pytorch`` and ``pytorch_lightning`` are the same code twice, with unrelated classes. A Trainer accepts
    any object in a list of callbacks, but a single callback only if it is of its own ``Callback`` class;
    ``LightningCLI`` accepts only its own class too. Which package a script uses is not known when the callbacks are
    defined.

    Attributes:
        _injected: Whether ``lightning-resilience launch`` added this callback; the user's own callback has precedence.
    """

    _injected = False

    def __init__(self) -> None:
        super().__init__()
        adopt_namespaces()
        self._skip_hooks(hook for hook in _EVERY_BATCH if getattr(type(self), hook).__qualname__ == f"Callback.{hook}")

    def _before_setup(self, trainer: Trainer) -> None:
        """Called before anything is set up, on the first of this package's callbacks; see :class:`_SetupHook`."""

    def _skip_hooks(self, hooks: Iterable[str]) -> None:
        """Removes hooks that do nothing.

        Lightning enters a profiler's context for each hook of each callback, also for an empty hook, which costs ten
        microseconds a step. It skips attributes that are not callable.
        """
        for hook in hooks:
            setattr(self, hook, None)


def adopt_namespaces() -> None:
    """Makes this package's callbacks instances of the ``Callback`` of every Lightning package imported so far.

    Called when this module is imported, for a ``LightningCLI`` that finds a callback by its name, and whenever a
    callback is created.
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

    Lightning has no such hook: loggers create their files before any callback is called, and this package cannot choose
    the order in which callbacks are set up. Without a callback of this package Lightning's function runs unchanged.
    """

    def __init__(self, setup: Callable[[Trainer], None]) -> None:
        self._setup = setup

    def __call__(self, trainer: Trainer) -> None:
        ours = [each for each in callbacks(trainer) if isinstance(each, ResilienceCallback)]
        if ours:
            ours[0]._before_setup(trainer)
        self._setup(trainer)


adopt_namespaces()


def is_named(owner: object, *names: str) -> bool:
    """Whether the class of ``owner``, or a base class, has one of ``names``, in any package; imports nothing."""
    return any(cls.__name__ in names for cls in type(owner).__mro__)


def callbacks_named(trainer: Trainer, *names: str) -> list[Any]:
    """The callbacks of ``trainer`` for which :func:`is_named` is true."""
    return [each for each in callbacks(trainer) if is_named(each, *names)]


def has_pytorch_profiler(trainer: Trainer) -> bool:
    """Whether ``trainer`` uses the ``PyTorchProfiler`` of either package."""
    return is_named(getattr(trainer, "profiler", None), "PyTorchProfiler")


def module_of(owner: object, name: str) -> Any:
    """The Python module that defines the class ``name``, if ``owner`` is of it or of a subclass; otherwise ``None``."""
    return next((sys.modules[cls.__module__] for cls in type(owner).__mro__ if cls.__name__ == name), None)


def callbacks(trainer: Trainer) -> list[Any]:
    """The Trainer's callbacks (an attribute that Lightning sets from elsewhere, so type checkers do not see it)."""
    return list(vars(trainer)["callbacks"])


def is_search(trainer: Trainer) -> bool:
    """Whether this ``fit`` is a learning-rate or batch-size search of a ``Tuner``, which ends before training.

    The Tuner adds its callback with ``_early_exit`` and calls ``trainer.fit``; nothing public distinguishes the search
    from a real fit.
    """
    return any(getattr(callback, "_early_exit", False) for callback in callbacks(trainer))


def found_by_searches(trainer: Trainer) -> dict[str, Any]:
    """The values that ``LearningRateFinder`` and ``BatchSizeFinder`` of a fit have set, by the names of attributes."""
    found = {}
    for _, parsing, name in _searches(trainer):
        value = parsing.lightning_getattr(trainer.lightning_module, name)
        if isinstance(value, (int, float)):
            found[name] = value
    return found


def finds_learning_rates(trainer: Trainer) -> bool:
    """Whether a ``LearningRateFinder`` chooses the optimizers' learning rates, and not the script."""
    return any(hasattr(finder, "optimal_lr") for finder, _, _ in _searches(trainer))


def skip_searches(trainer: Trainer, patches: Patches, found: dict[str, Any]) -> None:
    """Sets the values that the finders have found when the fit first began, and skips the searches of a resumed fit.

    A search would begin with the present weights, and would take its time at every start. The learning rates of the
    optimizers are restored with the optimizers; a batch size is needed before the loaders are created.
    """
    for finder, parsing, name in _searches(trainer):
        if name in found:
            parsing.lightning_setattr(trainer.lightning_module, name, found[name])
            if hasattr(finder, "optimal_batch_size"):
                finder.optimal_batch_size = found[name]
            patches.set(finder, "on_fit_start", lambda *args: None)


def _searches(trainer: Trainer) -> Iterator[tuple[Any, Any, str]]:
    """Each finder, Lightning's Python module that reads its value, and the value's name in module or hparams."""
    names = ("LearningRateFinder", "BatchSizeFinder")
    for finder in callbacks_named(trainer, *names):
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
    """The file of every ``OnExceptionCheckpoint``: if it exists, Lightning resumes from it without being asked."""
    return [str(each.ckpt_path) for each in callbacks_named(trainer, "OnExceptionCheckpoint")]


_MARKS = ("current_score", "_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved")


def model_checkpoint_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The attributes about its last save that ``ModelCheckpoint`` does not save itself.

    By these it decides whether a step has been saved, whether to save it after a due validation, and whether
    ``last.ckpt`` is missing at the end.
    """
    return {
        callback.state_key: {name: getattr(callback, name) for name in _MARKS if hasattr(callback, name)}
        for callback in callbacks_named(trainer, "ModelCheckpoint")
    }


def set_model_checkpoint_state(trainer: Trainer, marks: dict[str, dict[str, Any]]) -> None:
    """Restores :func:`model_checkpoint_state`."""
    for callback in callbacks_named(trainer, "ModelCheckpoint"):
        for name, value in marks.get(callback.state_key, {}).items():
            setattr(callback, name, value)


def last_saves(trainer: Trainer) -> list[tuple[Any, int]]:
    """Every ``ModelCheckpoint`` with the ``trainer.global_step`` of its last save."""
    return [(each, each._last_global_step_saved) for each in callbacks_named(trainer, "ModelCheckpoint")]


def overwrite(callback: Any, patches: Patches, files: set[str]) -> None:
    """Lets a ``ModelCheckpoint`` overwrite each of ``files`` once; ``files`` of rank 0 decides."""
    there = type(callback).file_exists

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        if not there(callback, filepath, trainer):
            return False
        is_free = str(filepath) in files
        files.discard(str(filepath))
        return not trainer.strategy.broadcast(is_free)

    patches.set(callback, "file_exists", file_exists)


def skip_weight_averaging(trainer: Trainer) -> None:
    """Lets Lightning's ``WeightAveraging`` skip the step that was just counted.

    It averages after every counted step, even if the weights have not changed.
    """
    for callback in callbacks_named(trainer, "WeightAveraging"):
        callback._latest_update_step = trainer.global_step


def resume_weight_averaging(trainer: Trainer, module: LightningModule) -> None:
    """Resumes ``StochasticWeightAveraging`` in the middle of an epoch.

    It replaces the scheduler at the beginning of an epoch, in a hook that Lightning does not call again in the middle
    of an epoch. The rest of the epoch would then lack its scheduler, and so would the next save. The learning rates
    that a new scheduler sets are already in the checkpoint.
    """
    for callback in callbacks_named(trainer, "StochasticWeightAveraging"):
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        before, patches = [dict(group) for group in groups], Patches()
        patches.set(callback, "update_parameters", lambda *args: None)
        try:
            callback.on_train_epoch_start(trainer, module)
        finally:
            patches.undo()
        for group, values in zip(groups, before, strict=True):
            group.update(values)
