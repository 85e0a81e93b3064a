"""Lightning's loops of a fit: calls functions where they begin and end, and resets them for a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torchmetrics import Metric

from lightning_resilience._lightning.lightning_callbacks import callbacks_named, is_named
from lightning_resilience._lightning.lightning_data import validation_loaders
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint import pruning

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def spawns_processes(trainer: Trainer) -> bool:
    """Whether the strategy runs each fit in new processes that end with the fit (``ddp_spawn``, ``ddp_fork``)."""
    return is_named(trainer.strategy.launcher, "_MultiProcessingLauncher")


def before_strategy_setup(trainer: Trainer, patches: Patches, action: Callable[[], None]) -> None:
    """Calls ``action`` before the strategy wraps, shards or converts the module.

    ``configure_model`` has been called by then; Lightning calls no hook between the two.
    """
    patches.wrap(trainer.strategy, "setup", before=action)


def on_fit_loop(
    trainer: Trainer,
    patches: Patches,
    before_epoch: Callable[[], None],
    end_of_epoch: Callable[[], None],
    before_end: Callable[[], None],
    after: Callable[[], None],
) -> None:
    """Calls functions around every epoch, and before and after all ``on_train_end`` hooks.

    ``end_of_epoch`` is called after the epoch's last batch and before any hook of the epoch's end. ``after`` is called
    after all ``on_train_end`` hooks, because the hooks of the module and of later callbacks may still change the
    weights.
    """
    patches.wrap(trainer.fit_loop, "on_advance_start", before=before_epoch)
    patches.wrap(trainer.fit_loop, "on_advance_end", before=end_of_epoch)
    patches.wrap(trainer.fit_loop, "on_run_end", before=before_end, after=after)


def on_fit_run(trainer: Trainer, patches: Patches, run: Callable[[Callable[[], None]], None]) -> None:
    """Calls ``run(loop)`` instead of the fit's outermost loop; ``run`` may call ``loop`` more than once."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.run
    patches.set(fit_loop, "run", lambda: run(loop))


def continue_progress_bar(trainer: Trainer) -> None:
    """Makes the progress bar show epoch, position and total if a fit continues in the middle of an epoch.

    The bar sets them in ``on_train_epoch_start``, which Lightning does not call then, so it would show
    "Training: 697/?".
    """
    bar = trainer.progress_bar_callback
    if bar is not None and trainer.fit_loop.restarted_mid_epoch:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)
        if is_named(bar, "TQDMProgressBar"):  # otherwise its rate would count all batches as done from now on
            shown = cast(Any, bar).train_progress_bar
            shown.initial = shown.n = trainer.fit_loop.epoch_loop.batch_progress.current.ready


def on_optimizers(trainer: Trainer, patches: Patches, action: Callable[[], None]) -> None:
    """Calls ``action`` after the strategy has created optimizers and schedulers; a search may create them again."""
    patches.wrap(trainer.strategy, "setup_optimizers", after=action)


def rerun_end_of_fit(trainer: Trainer) -> None:
    """Runs the beginning and the end of the fit's outermost loop, which skips both once its training has ended."""
    fit_loop = trainer.fit_loop
    fit_loop.setup_data()
    fit_loop.reset()
    fit_loop.on_run_start()
    fit_loop._restarting = False
    fit_loop.on_run_end()


def reset_loops(trainer: Trainer, module: LightningModule) -> None:
    """Resets the loops of an interrupted fit to their state in a new process before it restores a checkpoint.

    The data loaders and their workers are created anew when the loop runs again.
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
    val_loop._results.clear()  # the results of an interrupted validation
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
    for callback in trainer.checkpoint_callbacks:  # otherwise it would not save a step that it has saved before
        if hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = 0


def reset_progress(trainer: Trainer) -> None:
    """Sets an interrupted fit to its first step, because setup before the restore may depend on the position.

    For example, a new process requests the loaders of the first epoch.
    """
    fit_loop = trainer.fit_loop
    epoch_loop: Any = fit_loop.epoch_loop
    optimizers = epoch_loop.automatic_optimization.optim_progress, epoch_loop.manual_optimization.optim_step_progress
    batches = epoch_loop.batch_progress, epoch_loop.val_loop.batch_progress, epoch_loop.scheduler_progress
    for progress in (fit_loop.epoch_progress, *optimizers, *batches):
        progress.reset()
    epoch_loop._batches_that_stepped = 0


def optimizer_layout(trainer: Trainer) -> Any:
    """The layout of optimizers and schedulers, which a new process creates and a checkpoint does not hold.

    Some callbacks change it during a fit (``StochasticWeightAveraging``, ``BaseFinetuning``), and ``ModelPruning``
    changes the initial values of the weights. Compared by ``==``.
    """
    groups = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    return groups, [id(config.scheduler) for config in trainer.lr_scheduler_configs], _trained_tickets(trainer)


def after_exception_hooks(trainer: Trainer, patches: Patches, action: Callable[[], None]) -> None:
    """Calls ``action`` after the ``on_exception`` hooks of all callbacks, which may still save."""
    patches.wrap(trainer.strategy, "on_exception", after=action)


def skip_batch(trainer: Trainer) -> None:
    """Fetches the next training batch and counts it as done, without training on it.

    The caller does everything that is due after a batch. The step counts of the fit do not change.
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
        loop._batches_that_stepped -= 1  # the code after this counts every batch as one that has stepped


def on_training_boundary(trainer: Trainer, patches: Patches, boundary: Callable[[], bool]) -> None:
    """Calls ``boundary`` between training batches, when everything due after the last one has happened.

    Lightning calls no hook there: ``on_train_batch_end`` comes before the validation and the scheduler steps of its
    batch. ``boundary`` returns whether to train the next batch; if not, only the work due after the last batch is done.
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
    left: Callable[[], None],
) -> None:
    """Calls functions around and within every validation of the fit, the sanity check included.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        start: Called before the validation does anything, also before it creates the data-loader iterators, which draw
            random numbers.
        before_data: Called with the data loaders, before their iterators are created.
        boundary: Called before every batch, with the data-loader index and the batch index.
        end: Called after the last batch, before the reductions at the end. Lightning calls no hook there on all ranks.
        left: Called after the whole validation, also if it has no batch, when Lightning returns before its end.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    step = loop._evaluation_step

    def wrapped_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        boundary(dataloader_idx, batch_idx)
        step(batch, batch_idx, dataloader_idx, dataloader_iter)

    patches.wrap(loop, "run", before=start, after=left)
    patches.wrap(loop, "reset", before=lambda: before_data(validation_loaders(trainer)))
    patches.set(loop, "_evaluation_step", wrapped_step)
    patches.wrap(loop, "on_run_end", before=end)


def on_other_trainers(
    trainer: Trainer, patches: Patches, batch: Callable[[], None], signals_put_back: Callable[[], None]
) -> None:
    """Calls functions when another Trainer inside this fit begins a batch, and when any Trainer has restored signals.

    A Trainer that the user has created may lack this package's callbacks, so Lightning's classes are patched. At its
    end a Trainer restores every signal handler that Python knows of, and Python does not know of handlers in C.
    """
    own = trainer.fit_loop.epoch_loop

    def counted(advance: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(loop: Any, *args: Any, **kwargs: Any) -> Any:
            if loop is not own and loop is not own.val_loop:
                batch()
            return advance(loop, *args, **kwargs)

        return wrapped

    loops = ((own, "advance"), (own.val_loop, "_evaluation_step"), (trainer.predict_loop, "_predict_step"))
    for loop, name in loops:
        patches.set(type(loop), name, counted(getattr(type(loop), name)))
    patches.wrap(type(trainer._signal_connector), "teardown", after=signals_put_back)


def train_eval_modes(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The train and eval modes and frozen parameters, which hooks at the start of an epoch may have set.

    Lightning does not call these hooks again after a resume in the middle of an epoch.
    """
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, each in module.named_modules() if not each.training],
        "tickets": _trained_tickets(trainer),
    }


def set_train_eval_modes(trainer: Trainer, module: LightningModule, state: dict[str, Any]) -> None:
    """Restores :func:`train_eval_modes`."""
    if "accumulate_grad_batches" in state:
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):  # a lazy parameter refuses the call even without a change
            parameter.requires_grad_(name not in frozen)
    for name, each in module.named_modules():
        each.training = name not in evaluating
    tickets = set(state.get("tickets", ()))
    for number, (first, weight) in enumerate(_lottery_tickets(trainer)):
        if number in tickets:
            first.data = weight.data


def _lottery_tickets(trainer: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The initial values of weights that ``ModelPruning`` has kept, each with its weight.

    If both are on one device, ``ModelPruning`` makes them one tensor when it first restores the initial values: then
    training changes these too.
    """
    for callback in callbacks_named(trainer, "ModelPruning"):
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
