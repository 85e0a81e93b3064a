"""What both checkpoint/ and detect/ need of torch: a rank's part of a tensor, and hooks of an optimizer's step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor
except ImportError:  # a torch without distributed
    DTensor = ShardedTensor = None  # type: ignore[assignment, misc]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``; an alias, not a copy. Nothing is gathered."""
    if DTensor is not None and isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    if ShardedTensor is not None and isinstance(tensor, ShardedTensor):
        (shard,) = tensor.local_shards()
        return shard.tensor
    return tensor


def before_update(call: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """Has ``call`` called right before an optimizer changes anything: for the pre-hook of its step, which returns this.

    Automatic optimization runs forward and backward in a closure inside of the optimizer's step, so that is after the
    closure has run, where there is one.

    Args:
        call: What to call.
        args: The arguments of the step, as the hook gets them.
        kwargs: The other arguments.
    """

    def run(closure: Callable[[], Any]) -> Any:
        result = closure()
        call()
        return result

    if (changed := around_closure(run, args, kwargs)) is None:
        call()
    return changed


def around_closure(run: Callable[[Callable[[], Any]], Any], args: Any, kwargs: Any) -> Any:
    """Has ``run(closure)`` called in the place of a step's closure; for the pre-hook of the step, which returns this.

    Returns:
        ``None`` if the step has no closure.
    """
    if len(args) > 1 and callable(closure := args[1]):
        return (args[0], functools.partial(run, closure), *args[2:]), kwargs
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(run, closure)}
    return None
