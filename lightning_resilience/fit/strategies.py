"""Which of Lightning's strategies a fit may use, and what each does with its state: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """What a strategy does with the state of a fit.

    Attributes:
        shards: Whether a rank holds a part of the parameters, and of what optimizers keep, that no other rank has.
        refused: Why a fit with it cannot be resumed, and what to use instead; ``None`` if it can.
    """

    shards: bool = False
    refused: str | None = None


_INSTEAD = "Use strategy='ddp', or ModelParallelStrategy for a model that one device cannot hold"

STRATEGIES = {
    "SingleDeviceStrategy": Traits(),
    "DDPStrategy": Traits(),
    "ModelParallelStrategy": Traits(shards=True),
    "FSDPStrategy": Traits(shards=True),
    "DeepSpeedStrategy": Traits(
        shards=True,
        refused="A fit with DeepSpeedStrategy cannot be resumed exactly: DeepSpeed's engine keeps weights, optimizers "
        f"and loss scale for itself, and saves them in a way of its own. {_INSTEAD}.",
    ),
    "SingleDeviceXLAStrategy": Traits(refused="TPUs (SingleDeviceXLAStrategy) are not supported."),
    "XLAStrategy": Traits(refused="TPUs (XLAStrategy) are not supported."),
}
"""By the names of their classes: a script may use either of Lightning's two packages."""


def name_of(strategy: Any) -> str | None:
    """Which strategy of Lightning ``strategy`` is, or is made of; ``None`` for one that is all the user's own."""
    return next((cls.__name__ for cls in type(strategy).__mro__ if cls.__name__ in STRATEGIES), None)


def traits_of(strategy: Any) -> Traits:
    """What ``strategy`` does, also one of the user's own."""
    name = name_of(strategy)
    return STRATEGIES[name] if name is not None else Traits(shards=writes_directories(strategy))


def writes_directories(strategy: Any) -> bool:
    """Whether the strategy may save without its ``CheckpointIO``: it has a ``save_checkpoint`` of its own (FSDP)."""
    base: Any = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy")
    return type(strategy).save_checkpoint is not base.save_checkpoint


def loads_state(strategy: Any) -> bool:
    """Whether the strategy loads module and optimizers where it reads a checkpoint, and takes them from nowhere else.

    What is given to its ``load_model_state_dict`` is lost then, without a word.
    """
    return not strategy.lightning_restore_optimizer
