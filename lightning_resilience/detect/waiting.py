"""How long this process has waited for other ranks: in collectives, and in the reduction at the end of a backward pass.

Ranks that wait for each other are all as slow as the slowest of them. Only the time that a rank has not waited says
which one that is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import _functional_collectives as functional

_WAITS: tuple[tuple[Any, str], ...] = (
    (torch.distributed.Work, "wait"),
    (functional, "wait_tensor"),
    (torch.distributed, "_broadcast_coalesced"),  # of DDP's buffers, in the forward pass
    (torch.distributed, "monitored_barrier"),
)
# With NCCL these have the stream of the device wait, and give nothing back that could be waited for.
_ON_DEVICE = (
    "allgather",
    "_allgather_base",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "scatter",
    "send",
)


class Waiting:
    """Adds up how long the thread that made this has waited for other ranks.

    Counted are collectives that Python code waits for (``torch.distributed``, FSDP2, DTensor, torchmetrics), and what
    DDP waits for in C++ when a rank has computed its own gradients. Waits within compiled code do not count.

    Args:
        mark: For a device, whose streams wait where the host does not: called with whether a wait begins, or ends; also
            within each other.
        clock: Gives seconds.
    """

    def __init__(
        self, mark: Callable[[bool], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        """So far."""
        self._mark = mark if mark is not None else lambda begins: None
        self._on_device = mark is not None
        self._clock = clock
        self._thread = threading.get_ident()
        self._depth = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Counts from now on."""
        for owner, name in _WAITS:
            self._replace(owner, name, self._timed)
        if self._on_device:
            for name in _ON_DEVICE:
                self._replace(torch.distributed.ProcessGroup, name, self._timed)
        self._replace(torch.autograd, "backward", self._with_an_end)

    def stop(self) -> None:
        """Counts no more."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        # As it is in the class: what getattr() gives of a C++ method would not be one when it is put back.
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, around(getattr(owner, name)))

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a clock cannot be traced
                return wait(*args, **kwargs)
            if threading.get_ident() != self._thread:  # threads of ours wait for others too, beside the training
                return wait(*args, **kwargs)
            began = self._clock()
            self._depth += 1
            self._mark(True)
            try:
                return wait(*args, **kwargs)
            finally:
                self._mark(False)
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += self._clock() - began

        return timed

    def _with_an_end(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A backward pass, in which what comes behind the last of this rank's own gradients is waiting."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or _is_compiled():
                return run(tensors, *args, **kwargs)
            ended: list[tuple[float, float]] = []

            def own_end() -> None:
                if not ended:
                    ended.append((self._clock(), self.seconds))
                    self._mark(True)

            # What is to be called at the end of a backward pass is called in the order in which it was asked for, and
            # nobody can ask before the gradient of the loss is there. DDP asks for its own wait when all gradients are.
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            hooks: list[Any] = [
                root.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: Variable._execution_engine.queue_callback(own_end)
                )
                for root in roots
                if isinstance(root, torch.Tensor) and root.requires_grad
            ]
            try:
                return run(tensors, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
                for at, waited in ended:
                    # Not in addition to the collectives in it that were counted.
                    self.seconds = waited + self._clock() - at
                    self._mark(False)

        return backward


def _is_compiled() -> bool:
    """Whether backward passes are compiled: then nothing can be asked to be called at their end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
