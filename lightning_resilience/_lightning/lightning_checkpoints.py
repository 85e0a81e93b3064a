"""Lightning's checkpoint connector: dumping, loading and restoring a checkpoint."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._lightning import lightning_strategies
from lightning_resilience._lightning.lightning_callbacks import callbacks, callbacks_named, module_of
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint import sharded

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def paths_to_resume_from(trainer: Trainer) -> set[str]:
    """The paths by which Lightning may have replaced ``ckpt_path="last"`` or ``"hpc"``."""
    found = {str(path) for path in (trainer._checkpoint_connector._hpc_resume_path,) if path is not None}
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_find_last_checkpoints"):
            found.update(map(str, callback._find_last_checkpoints(trainer)))
    return found


def on_restore(trainer: Trainer, patches: Patches, restore: Callable[[str | None, Any], None]) -> None:
    """Calls ``restore(ckpt_path, weights_only)`` where Lightning loads a checkpoint.

    A callback cannot choose the checkpoint: ``trainer.ckpt_path`` set in ``setup`` has no effect. The replaced method
    of the connector is called after ``setup`` and ``configure_model`` in every strategy.
    """
    connector = trainer._checkpoint_connector

    def wrapper(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        restore(None if checkpoint_path is None else str(checkpoint_path), weights_only)

    patches.set(connector, "_restore_modules_and_callbacks", wrapper)


def load_checkpoint(trainer: Trainer, path: str | None, weights_only: bool | None = None) -> dict[str, Any]:
    """Reads the checkpoint at ``path`` through Lightning and the strategy; returns an empty one for ``None``."""
    connector = trainer._checkpoint_connector
    connector.resume_start(path, weights_only=weights_only)
    return connector._loaded_checkpoint


def load_own_whole_checkpoint(trainer: Trainer, path: str) -> dict[str, Any]:
    """Like :func:`load_checkpoint`, for a checkpoint of the run: nothing in it is executed, whatever it holds.

    ``FSDPStrategy`` reads a file with its own unpickler, which accepts any class.
    """
    patches = Patches()
    if (module := module_of(trainer.strategy, "FSDPStrategy")) is not None:
        safe = functools.partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
        patches.set(module, "_lazy_load", safe)
    try:
        return load_checkpoint(trainer, path, weights_only=True)
    finally:
        patches.undo()


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The checkpoint from which Lightning would restore loops and optimizers now; empty without a checkpoint."""
    return trainer._checkpoint_connector._loaded_checkpoint


def set_loaded_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Sets the checkpoint from which Lightning restores loops and optimizers."""
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def on_restore_training_state(
    trainer: Trainer, patches: Patches, around: Callable[[], AbstractContextManager[None]]
) -> None:
    """Runs Lightning's restoring of loops, optimizers and schedulers within ``around``.

    A ``LearningRateFinder`` or ``BatchSizeFinder`` runs after the module is restored and before this. At its end it
    restores its own checkpoint, also within ``around``, and the loaded checkpoint is discarded.
    """
    connector = trainer._checkpoint_connector
    restore = connector.restore_training_state

    def wrapper() -> None:
        with around():
            restore()

    patches.set(connector, "restore_training_state", wrapper)


def restore_training_state(trainer: Trainer) -> None:
    """Restores loops, optimizers and schedulers from the loaded checkpoint, as Lightning does before it trains."""
    connector = trainer._checkpoint_connector
    connector.restore_training_state()
    connector.resume_end()


def restore_checkpoint(trainer: Trainer, path: str | None, checkpoint: dict[str, Any]) -> None:
    """Restores module, data module and callbacks from ``checkpoint``; Lightning restores the rest later on its own."""
    connector = trainer._checkpoint_connector
    connector._ckpt_path = path
    connector._loaded_checkpoint = checkpoint
    connector.restore_model()
    connector.restore_datamodule()
    # Lightning's SpikeDetection looks up its metric by an attribute that it does not have: every resume would fail.
    spikes = [each for each in callbacks_named(trainer, "SpikeDetection") if not hasattr(each, "running")]
    for each in spikes:
        each.running = each.running_mean
    patiences = [(callback, callback.patience) for callback in callbacks_named(trainer, "EarlyStopping")]
    connector.restore_callbacks()
    for callback, patience in patiences:  # restored from the checkpoint; the script may allow more by now
        callback.patience = max(patience, callback.patience)
    for each in spikes:
        del each.running


def _do_nothing(*arguments: Any) -> None:
    pass


def uses_last_argument(hook: Any, given: int) -> bool:
    """Whether a function may use the last of so many arguments; true if in doubt.

    The answer comes from the function's code and not from watching a call: it must be the same on all ranks, a hook may
    contain collectives, and the next call may differ from the last one.
    """
    function, position = getattr(hook, "__func__", hook), given - 1 + hasattr(hook, "__self__")
    while hasattr(function, "__wrapped__") and _is_transparent(function):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return not isinstance(code, CodeType) or _uses_argument(code, position)


def _is_transparent(decorated: Any) -> bool:
    """Whether a decorator such as ``rank_zero_only`` or ``torch.no_grad`` made the function: they use no argument."""
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
    """Like :func:`dump_checkpoint`, but for this rank alone: strategies that shard return shards and gather nothing.

    Tensors are the live ones, not copies. Hooks that do not use the checkpoint are left out: they add no state to it,
    and what else they do, such as writing an adapter, is meant for checkpoints that a user has asked for, which come
    every hour and not every second.
    """
    strategy: Any = trainer.strategy
    module = trainer.lightning_module

    def optimizer_state(optimizer: Any) -> Any:
        if not lightning_strategies.is_zero(optimizer):
            return sharded.to_local(optimizer.state_dict())
        groups = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
        return {"own": optimizer.optim.state_dict(), "groups": groups}

    def module_state() -> dict[str, Any]:
        if lightning_strategies.traits_of(strategy).gathers_state_dict:
            return {name: tensor.detach() for name, tensor in _named_tensors(module)}
        return dict(sharded.to_local(module.state_dict()))

    patches = Patches()
    if lightning_strategies.shards_state(trainer):
        patches.set(strategy, "optimizer_state", optimizer_state)
        patches.set(strategy, "lightning_module_state_dict", module_state)
    for owner, given in ((module, 1), *((callback, 3) for callback in callbacks(trainer))):
        if not uses_last_argument(owner.on_save_checkpoint, given):
            patches.set(owner, "on_save_checkpoint", _do_nothing)
    try:
        return dump_checkpoint(trainer)
    finally:
        patches.undo()


def dump_sharded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Like :func:`dump_checkpoint`, but with each rank's shards, for a strategy whose traits have ``shards_under``.

    The state is keyed by names, as the strategy itself saves and loads it. For FSDP2 it holds the live DTensors; the
    strategy's own dump would copy everything to the host. FSDP1 returns its shards only by its own collective.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    strategy: Any = trainer.strategy
    if lightning_strategies.traits_of(strategy).gathers_state_dict:
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


def _named_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def load_own_checkpoint(trainer: Trainer, patches: Patches) -> None:
    """Makes the strategy load a checkpoint of :func:`dump_own_checkpoint`."""
    strategy: Any = trainer.strategy
    module = trainer.lightning_module
    load_optimizer_states, traits = strategy.load_optimizer_state_dict, lightning_strategies.traits_of(strategy)

    def load_sharded(checkpoint: Any, strict: bool = True) -> None:
        saved = checkpoint["state_dict"]
        if traits.gathers_state_dict:
            with torch.no_grad():
                for name, tensor in _named_tensors(module):
                    tensor.detach().copy_(saved[name])
        else:
            live = module.state_dict()
            module.load_state_dict(
                {name: sharded.from_local(value, live.get(name)) for name, value in saved.items()}, strict=strict
            )
        # These strategies are set up before they load a checkpoint, and load their optimizers with the model.
        load_optimizers(checkpoint)

    def load_optimizers(checkpoint: Any) -> None:
        if not lightning_strategies.shards_state(trainer):
            load_optimizer_states(checkpoint)
            return
        for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            if lightning_strategies.is_zero(optimizer):
                zero: Any = optimizer
                zero.optim.load_state_dict(state["own"])
                for group, values in zip(zero.param_groups, state["groups"], strict=True):
                    group.update(values)
            else:
                optimizer.load_state_dict(sharded.optimizer_state_from_local(optimizer, state))

    if traits.all_ranks_write:
        patches.set(strategy, "load_model_state_dict", load_sharded)
    else:
        patches.set(strategy, "load_optimizer_state_dict", load_optimizers)


def on_save(trainer: Trainer, patches: Patches, may_save: Callable[[str], bool]) -> None:
    """Skips ``trainer.save_checkpoint(path)`` where ``may_save(path)``, called on all ranks, is false."""
    save = trainer.save_checkpoint

    def wrapper(filepath: Any, *args: Any, **kwargs: Any) -> None:
        if may_save(str(filepath)):
            save(filepath, *args, **kwargs)

    patches.set(trainer, "save_checkpoint", wrapper)


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint of everything that a resume needs.

    Hyperparameters are left out: a resume restores into the live module and does not need them, and they may hold any
    object of the user, which a safe load refuses. ``trainer.save_checkpoint`` would write a file and cannot leave them
    out.
    """
    patches = Patches()
    for callback in callbacks_named(trainer, "ModelPruning"):
        # Otherwise it multiplies the weights by their masks and drops the masks, which a resume needs.
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
    """Drops the function from the state of ``SWALR``, which holds it in torch 2.8; every new ``SWALR`` has it anyway.

    A function can only be saved by pickle, and the pickle would include everything it belongs to: all that
    ``StochasticWeightAveraging`` keeps.
    """
    states = list(checkpoint.get("lr_schedulers", ()))
    for callback in callbacks_named(trainer, "StochasticWeightAveraging"):
        states.append(checkpoint.get("callbacks", {}).get(callback.state_key, {}).get("scheduler_state"))
    for state in states:
        if isinstance(state, dict) and isinstance(state.get("anneal_func"), FunctionType):
            del state["anneal_func"]
