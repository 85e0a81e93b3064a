"""What several folders need of torch: a rank's part of a tensor, hooks of an optimizer's step, the way to rank 0."""

from __future__ import annotations

import functools
import importlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from datetime import timedelta
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


def own_store(prefix: str) -> Any:
    """A client of the job's store that belongs to its caller alone: calls of one client wait for each other.

    Args:
        prefix: Before each of its keys.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    shared: Any = _get_default_store()
    return PrefixStore(prefix, shared.clone())


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


def hooks_of(module: torch.nn.Module) -> Counter[str]:
    """How many hooks a module, its layers and its parameters have of others than torch, Lightning and this package."""
    found = Counter[str]()
    for name, each in (*module.named_modules(), *module.named_parameters()):
        for kind, hooks in (vars(each) | {kind: getattr(each, kind, None) for kind in _OF_PARAMETERS}).items():
            if "hooks" in kind and isinstance(hooks, dict):
                found[name] += sum(not _module_of(hook).startswith(_KNOWN) for hook in hooks.values())
    return +found


_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_KNOWN = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.", "lightning_resilience.")


def _module_of(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # of a partial
    return getattr(hook, "__module__", None) or ""


class Layers:
    """The layers of a module and what they hold, as they are now: sharding changes all of it in place.

    Args:
        module: The module. Attributes of its own that are there later are left as they are then.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._held = [(each, type(each), _copies(vars(each))) for each in module.modules()]

    def put_back(self) -> None:
        """Has everything be as it was."""
        for each, cls, held in self._held:
            if type(each) is not cls:
                each.__class__ = cls
            if each is self._module:
                changed = {name: value for name, value in held.items() if name not in vars(each) or name in _OF_LAYERS}
                vars(each).update(_copies(changed))
            else:
                vars(each).clear()
                vars(each).update(_copies(held))
            _composable_state()._module_state_mapping.pop(each, None)


_OF_LAYERS = {name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)}
"""Attributes of a module with its parameters, buffers, layers and hooks."""


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if isinstance(value, dict) else value for name, value in attributes.items()}


def _composable_state() -> Any:
    return importlib.import_module("torch.distributed._composable_state")


_LISTENS_WITHIN_S = 60.0
_LOOKS_EVERY_S = 0.003
_LOOKS_A_SECOND = 50_000  # of all ranks together, at the node of rank 0


@functools.cache
def connect_when_rank_0_listens() -> None:
    """Has this process make its client of rank 0's store when that listens. The second call does nothing.

    Ranks that are started together come at about the same time. A ``TCPStore`` that comes first tries again only after
    half a second, and torch takes no other pause.
    """
    try:
        # Not by `import`: a function of the package has the same name.
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
        create = rendezvous._create_c10d_store
    except (ImportError, AttributeError):  # a torch without distributed, or another one than known: as it does it
        return

    def create_when_rank_0_listens(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **kw: Any
    ) -> Any:
        if rank != 0:
            within_s = min(_LISTENS_WITHIN_S, timeout.total_seconds())
            _wait_for_listener(hostname, port, world_size, within_s)
        return create(hostname, port, rank, world_size, timeout, *args, **kw)

    rendezvous._create_c10d_store = create_when_rank_0_listens


def _wait_for_listener(host: str, port: int, world_size: int, within_s: float) -> None:
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < within_s:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except ConnectionRefusedError:
            time.sleep(max(_LOOKS_EVERY_S, world_size / _LOOKS_A_SECOND, waited_s / 50))
        except OSError:  # the client says what is wrong
            return
