"""Lightning's strategies: how they hold, save and load the state of a fit, and the tensors of that state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_resilience._lightning import lightning_signals
from lightning_resilience._lightning.lightning_callbacks import callbacks_named
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint import sharded
from lightning_resilience.checkpoint.safe_serialization import map_nested
from lightning_resilience.checkpoint.snapshot import optimizer_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class StrategyTraits:
    """How a strategy holds, saves and loads the state of a fit; see :func:`traits_of`.

    Attributes:
        is_sharded: Whether a rank holds parameters and optimizer state that no other rank has.
        refused: Why a fit with it cannot be resumed, and what to use instead; ``None`` if it can.
        name: The strategy of Lightning that it is or derives from; ``None`` for a strategy defined by the user alone.
        all_ranks_write: Whether it has its own ``save_checkpoint``, which all ranks call and which may write without
            the strategy's ``CheckpointIO``. Otherwise rank 0 writes.
        gathers_state_dict: Whether its ``state_dict`` gathers the whole state in a collective, as FSDP1's hooks do; the
            parameters themselves are shards.
        loads_state: Whether it loads module and optimizers only when it reads a checkpoint: a state passed to its
            ``load_model_state_dict`` is ignored.
        shards_under: The key of the module's state in a checkpoint that its ranks write with PyTorch's distributed
            checkpoint; ``None`` if it saves in another way.
        can_save_async: Whether this package can write its checkpoints in another thread.
    """

    is_sharded: bool = False
    refused: str | None = None
    name: str | None = None
    all_ranks_write: bool = False
    gathers_state_dict: bool = False
    loads_state: bool = False
    shards_under: str | None = None
    can_save_async: bool = True


_INSTEAD = "Use strategy='ddp', or ModelParallelStrategy for a model that one device cannot hold"

STRATEGIES = {
    "SingleDeviceStrategy": StrategyTraits(),
    "DDPStrategy": StrategyTraits(),
    "ModelParallelStrategy": StrategyTraits(is_sharded=True),
    "FSDPStrategy": StrategyTraits(is_sharded=True),
    "DeepSpeedStrategy": StrategyTraits(
        is_sharded=True,
        refused="A fit with DeepSpeedStrategy cannot be resumed exactly: DeepSpeed's engine manages weights, "
        f"optimizers and loss scale itself, and saves them in its own way. {_INSTEAD}.",
    ),
    "SingleDeviceXLAStrategy": StrategyTraits(refused="TPUs (SingleDeviceXLAStrategy) are not supported."),
    "XLAStrategy": StrategyTraits(refused="TPUs (XLAStrategy) are not supported."),
}
"""The known strategies by the names of their classes: a script may use either of Lightning's two packages."""


def name_of(strategy: Any) -> str | None:
    """The strategy of Lightning that ``strategy`` is or derives from; ``None`` for one defined by the user alone."""
    return next((cls.__name__ for cls in type(strategy).__mro__ if cls.__name__ in STRATEGIES), None)


def collective_timeout(trainer: Trainer) -> float | None:
    """Seconds after which torch gives up a collective of ``trainer``, by its strategy's setting; ``None``: unknown."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return timeout.total_seconds() if timeout is not None and trainer.world_size > 1 else None


def convert_to_double(trainer: Trainer, module: LightningModule) -> None:
    """Converts a module that is trained in float64 before its state is loaded.

    Lightning would convert it later, after the loaded numbers have been rounded. A narrower type loses nothing by that.
    """
    plugin = trainer.precision_plugin
    if plugin.precision == "64-true":
        plugin.convert_module(module)


def shards_state(trainer: Trainer) -> bool:
    """Whether every rank holds a part of the parameters or of the optimizer's state that no other rank has."""
    return traits_of(trainer.strategy).is_sharded or any(is_zero(optimizer) for optimizer in trainer.optimizers)


def replicates_state(trainer: Trainer) -> bool:
    """Whether all ranks have the same parameters and optimizer state, bit for bit: DDP with its defaults.

    True also if a single rank is left: other ranks may come back.
    """
    ddp = ddp_wrapper(trainer)
    if ddp is None or shards_state(trainer):
        return False
    # Ranks that average their models at intervals differ in between, and DDP does not reduce ignored parameters.
    averages = vars(trainer.strategy).get("_model_averager") is not None
    return not averages and not getattr(ddp, "parameters_to_ignore", None)


def group_size(trainer: Trainer) -> int:
    """How many ranks hold one copy of the state together, if every group of this size holds a copy.

    1 with plain DDP, the size of a group with replicas of FSDP2's shards (HSDP), 0 otherwise. It is known after the
    strategy has been set up: with ``ModelParallelStrategy`` the script decides how parameters are sharded.
    """
    if (name := name_of(trainer.strategy)) in ("DDPStrategy", "SingleDeviceStrategy"):
        return 1
    parameters = trained_parameters(trainer) if name == "ModelParallelStrategy" else []
    sizes = {sharded.group_size(each, trainer.world_size) for each in parameters}
    return sizes.pop() if len(sizes) == 1 else 0


def trained_parameters(trainer: Trainer) -> list[torch.Tensor]:
    """The optimizers' parameters. From a forward pass on, FSDP2 puts other tensors into the layers for a while."""
    return [each for optimizer in trainer.optimizers for group in optimizer.param_groups for each in group["params"]]


def has_static_graph(trainer: Trainer) -> bool:
    """Whether DDP has ``static_graph=True`` (all steps are alike); known before DDP is set up."""
    return bool(getattr(trainer.strategy, "_ddp_kwargs", {}).get("static_graph"))


def why_not_apart(trainer: Trainer) -> str | None:
    """The reason why the ranks of a fit cannot train apart and exchange at intervals; ``None`` if they can."""
    strategy: Any = trainer.strategy
    if name_of(strategy) not in ("DDPStrategy", "SingleDeviceStrategy"):
        return f"{type(strategy).__name__} is not plain DDP. Use strategy='ddp'."
    if trainer.precision == "16-mixed":
        return "in precision 16-mixed each rank would use its own loss scale. Use bf16-mixed."
    if has_static_graph(trainer):
        return "DDPStrategy(static_graph=True) reduces gradients in its first step. Leave it out."
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        return "a communication hook of DDP would never be called. Leave out ddp_comm_hook."
    if getattr(strategy, "_ddp_kwargs", {}).get("mixed_precision") is not None:
        return "DDPStrategy(mixed_precision=...) copies weights where gradients are reduced. Use bf16-mixed."
    return None


def reduce_no_gradients(trainer: Trainer, patches: Patches) -> str | None:
    """Makes DDP reduce no gradients and broadcast no buffers; returns the reason if that is impossible."""
    if trainer.val_check_batch is None:  # val_check_interval is a time
        return "ranks would validate at different steps if val_check_interval is a time. Use a number of batches."
    ddp = ddp_wrapper(trainer)
    if ddp is None:
        return "the model is not wrapped in DistributedDataParallel." if trainer.world_size > 1 else None
    if ddp._comm_hooks:
        return "a communication hook of DDP would never be called. Leave out register_comm_hook."
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    redirection = trainer.strategy._forward_redirection  # turns it on in each step of manual optimization
    patches.set(redirection, "on_after_outer_forward", lambda *modules: None)
    lightning_signals.broadcast_no_signals(trainer, patches)
    return None


def meets_in_every_step(trainer: Trainer) -> list[str]:
    """The callbacks that make Lightning ask rank 0 in every step whether their time has come."""
    names = [type(each).__name__ for each in callbacks_named(trainer, "Timer") if each._duration is not None]
    by_time = "_train_time_interval"
    saves = [each for each in callbacks_named(trainer, "ModelCheckpoint") if getattr(each, by_time, None) is not None]
    return [*names, *(f"{type(each).__name__}(train_time_interval=...)" for each in saves)]


def broadcast_buffers(trainer: Trainer) -> list[torch.Tensor]:
    """The buffers that DDP broadcasts from rank 0 in every step."""
    ddp = ddp_wrapper(trainer)
    if ddp is None or not ddp.broadcast_buffers:
        return []
    # Not DDP's own list: the module may have assigned other buffers since.
    return [each for name, each in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore]


def groups_of_mesh(trainer: Trainer) -> list[Any]:
    """The process groups of the strategy's and the script's device meshes, which each start of a fit creates anew."""
    meshes: list[Any] = [getattr(trainer.strategy, "_device_mesh", None)]
    meshes += [getattr(each, "device_mesh", None) for each in trained_parameters(trainer)]
    distinct = {id(mesh): mesh for mesh in meshes if mesh is not None}
    return [group for mesh in distinct.values() for group in mesh.get_all_groups()]


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer shards its state among the ranks (``ZeroRedundancyOptimizer``)."""
    return hasattr(optimizer, "consolidate_state_dict") and hasattr(optimizer, "optim")


_MODEL_PARALLEL = ("lightning.pytorch.strategies.model_parallel", "pytorch_lightning.strategies.model_parallel")


_FSDP1 = ("lightning.pytorch.strategies.fsdp", "pytorch_lightning.strategies.fsdp")


def traits_of(strategy: Any) -> StrategyTraits:
    """The traits of ``strategy``, which may be defined by the user."""
    name = name_of(strategy)
    base: Any = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy")
    has_own_save = type(strategy).save_checkpoint is not base.save_checkpoint
    saves_in = str(type(strategy).save_checkpoint.__module__)
    known = STRATEGIES[name] if name is not None else StrategyTraits(is_sharded=has_own_save)
    shards_under = None
    if saves_in in _MODEL_PARALLEL:  # it reads both a directory and a file, whichever it saves
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
        can_save_async=not has_own_save or saves_in in (*_MODEL_PARALLEL, *_FSDP1),
    )


def clone_live_tensors(trainer: Trainer, state: Any) -> Any:
    """The state that FSDP1 has gathered, with copies of the tensors that the training writes to.

    FSDP1 copies tensors from a device to the host, but may return tensors on the host without a copy.
    """
    live = [*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers()]
    live += optimizer_tensors(trainer.optimizers)
    used = {each.untyped_storage().data_ptr() for each in live if not is_lazy(each) and each.layout == torch.strided}

    def apart(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        is_live = item.layout != torch.strided or item.untyped_storage().data_ptr() in used
        return item.clone() if is_live else item

    return map_nested(state, apart)


def live_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """The tensors that do not change before the optimizers' steps: parameters, optimizer state, averages of weights."""
    optimizers: list[Any] = list(trainer.optimizers)
    optimizers = [optimizer.optim if is_zero(optimizer) else optimizer for optimizer in optimizers]
    parameters = [each for each in trainer.lightning_module.parameters() if not is_lazy(each)]
    return [*parameters, *optimizer_tensors(optimizers), *averaged_tensors(trainer)]


def averaged_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    """The averages of Lightning's callbacks, written at the end of a batch or an epoch; they have no public name."""
    for callback in callbacks_named(trainer, "WeightAveraging", "StochasticWeightAveraging"):
        if (average := getattr(callback, "_average_model", None)) is not None:
            yield from average.parameters()
            yield from average.buffers()


def named_state(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that training changes: parameters and buffers by their names, and optimizer state by numbers."""
    module = trainer.lightning_module
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor
    for number, tensor in enumerate(optimizer_tensors(trainer.optimizers)):
        yield f"tensor {number} of the optimizers", tensor


def replicated_parameters(trainer: Trainer) -> list[torch.nn.Parameter]:
    """The parameters that are the same on all ranks, bit for bit; none if ranks keep no replicas of each other.

    DDP never reduces parameters that are frozen when it is set up, so later each rank would train them on its own. And
    embeddings with ``max_norm`` shorten, in the forward pass, the rows that the rank's own batch uses.
    """
    if not replicates_state(trainer):
        return []
    own = _shortened(trainer.lightning_module)
    return [each for each in trainer.lightning_module.parameters() if each.requires_grad and id(each) not in own]


def _shortened(module: LightningModule) -> set[int]:
    """The parameters of embeddings with ``max_norm``, by ``id``."""
    layers = [each for each in module.modules() if getattr(each, "max_norm", None) is not None]
    return {id(parameter) for each in layers for parameter in each.parameters()}


def compared_parameters(trainer: Trainer) -> tuple[list[torch.Tensor], int]:
    """The parameters that other ranks hold too, bit for bit, and how many ranks hold one copy of the state together.

    With DDP a rank holds a whole copy, with replicas of FSDP2's shards (HSDP) a group of ranks does. Otherwise no rank
    holds the same parameters.
    """
    size = group_size(trainer)
    if 1 < size < trainer.world_size:
        own = _shortened(trainer.lightning_module)
        return [each for each in trained_parameters(trainer) if each.requires_grad and id(each) not in own], size
    return [*replicated_parameters(trainer)], 1


def trained_tensors(trainer: Trainer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that are the same on several ranks: reduced parameters, and the optimizer state of these."""
    return [*parameters, *optimizer_tensors(trainer.optimizers, parameters)] if parameters else []


def ddp_wrapper(trainer: Trainer) -> DistributedDataParallel | None:
    """The strategy's DistributedDataParallel wrapper, if it uses one."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None
