"""Helpers for torch: a rank's part of a tensor, hooks of an optimizer's step, layers, the connection to rank 0."""

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
except ImportError:  # this torch was built without distributed
    DTensor = ShardedTensor = None  # type: ignore[assignment, misc]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``; an alias, not a copy. Nothing is gathered."""
    if DTensor is not None and isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    if ShardedTensor is not None and isinstance(tensor, ShardedTensor):
        (shard,) = tensor.local_shards()
        return shard.tensor
    return tensor


def buffer_places(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where the layers of a module keep their buffers: by name, the dictionary and the key."""
    return {
        f"{name}.{key}": (each._buffers, key)
        for name, each in module.named_modules()
        for key, buffer in each._buffers.items()
        if buffer is not None
    }


def own_store(prefix: str) -> Any:
    """A separate client of the job's store for the caller, because calls of one client wait for each other.

    Args:
        prefix: The prefix of all its keys.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    shared: Any = _get_default_store()
    return PrefixStore(prefix, shared.clone())


def before_update(call: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """Calls ``call`` right before an optimizer changes anything; the pre-hook of its step must return the result.

    Automatic optimization runs forward and backward pass in a closure inside the optimizer's step. With a closure
    ``call`` is called after it, otherwise at once.

    Args:
        call: The function to call.
        args: The positional arguments of the step, as the hook gets them.
        kwargs: The keyword arguments of the step.
    """

    def run(closure: Callable[[], Any]) -> Any:
        result = closure()
        call()
        return result

    if (changed := around_closure(run, args, kwargs)) is None:
        call()
    return changed


def around_closure(run: Callable[[Callable[[], Any]], Any], args: Any, kwargs: Any) -> Any:
    """Makes a step call ``run(closure)`` instead of its closure; the pre-hook of the step must return the result.

    Returns:
        The new arguments of the step; ``None`` if the step has no closure.
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
    """Keeps the present layers of a module and their attributes, because sharding changes all of these in place.

    Args:
        module: The module. Its own later attributes stay unchanged; only missing ones, and those with its parameters,
            buffers, layers and hooks, are put back.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._held = [(each, type(each), _copies(vars(each))) for each in module.modules()]

    def put_back(self) -> None:
        """Restores the layers and their attributes."""
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
"""The attributes of a module that hold its parameters, buffers, layers and hooks."""


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if isinstance(value, dict) else value for name, value in attributes.items()}


def _composable_state() -> Any:
    return importlib.import_module("torch.distributed._composable_state")


_LISTENS_WITHIN_S = 60.0
_LOOKS_EVERY_S = 0.003
_LOOKS_A_SECOND = 50_000  # of all ranks together, at the node of rank 0


@functools.cache
def connect_when_rank_0_listens() -> None:
    """Makes this process create its client of rank 0's store only when rank 0 listens. The second call does nothing.

    Ranks that are started together reach this at about the same time. If a ``TCPStore`` client comes before rank 0, it
    tries again only after half a second, and torch has no option for this pause.
    """
    try:
        # Not by `import`: a function of the package has the same name.
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
        create = rendezvous._create_c10d_store
    except (ImportError, AttributeError):  # no distributed, or an unknown torch: keep torch's own way
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
        except OSError:  # the client will report what is wrong
            return
