"""Which of Lightning's strategies a fit may use, and what each does with its state: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrategyTraits:
    """What a strategy does with the state of a fit; see ``traits_of`` in ``_lightning``.

    Attributes:
        is_sharded: Whether a rank holds parameters and optimizer state that no other rank has.
        refused: Why a fit with it cannot be resumed, and what to use instead; ``None`` if it can.
        name: Lightning's strategy that it is, or derives from; ``None`` for one that is all the user's own.
        all_ranks_write: Whether it has a ``save_checkpoint`` of its own, which all ranks call and which may write
            without its ``CheckpointIO``. Otherwise rank 0 writes.
        gathers_state_dict: Whether its ``state_dict`` gathers the whole state in a collective, as FSDP1's hooks do; the
            parameters themselves are shards.
        loads_state: Whether it loads module and optimizers where it reads a checkpoint, and takes them from nowhere
            else: what is given to its ``load_model_state_dict`` is lost.
        shards_under: The key of the module's state in what its ranks write by PyTorch's distributed checkpoint;
            ``None`` if it saves in another way.
        can_write_behind: Whether what it saves can be written by this package, in another thread.
    """

    is_sharded: bool = False
    refused: str | None = None
    name: str | None = None
    all_ranks_write: bool = False
    gathers_state_dict: bool = False
    loads_state: bool = False
    shards_under: str | None = None
    can_write_behind: bool = True


_INSTEAD = "Use strategy='ddp', or ModelParallelStrategy for a model that one device cannot hold"

STRATEGIES = {
    "SingleDeviceStrategy": StrategyTraits(),
    "DDPStrategy": StrategyTraits(),
    "ModelParallelStrategy": StrategyTraits(is_sharded=True),
    "FSDPStrategy": StrategyTraits(is_sharded=True),
    "DeepSpeedStrategy": StrategyTraits(
        is_sharded=True,
        refused="A fit with DeepSpeedStrategy cannot be resumed exactly: DeepSpeed's engine keeps weights, optimizers "
        f"and loss scale for itself, and saves them in a way of its own. {_INSTEAD}.",
    ),
    "SingleDeviceXLAStrategy": StrategyTraits(refused="TPUs (SingleDeviceXLAStrategy) are not supported."),
    "XLAStrategy": StrategyTraits(refused="TPUs (XLAStrategy) are not supported."),
}
"""What is known by the name of a class alone: a script may use either of Lightning's two packages."""


def name_of(strategy: Any) -> str | None:
    """Which strategy of Lightning ``strategy`` is, or is made of; ``None`` for one that is all the user's own."""
    return next((cls.__name__ for cls in type(strategy).__mro__ if cls.__name__ in STRATEGIES), None)
