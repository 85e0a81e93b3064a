"""How long this process has waited for other ranks: in collectives, and in the reduction at the end of a backward pass.

Ranks that wait for each other are all as slow as the slowest of them. Only the time that a rank has not waited shows
which one that is.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.distributed import _functional_collectives as functional

_WAITS: tuple[tuple[Any, str], ...] = (
    (torch.distributed.Work, "wait"),
    (torch.distributed.Work, "synchronize"),
    (functional, "wait_tensor"),
    (torch.distributed, "_broadcast_coalesced"),  # of DDP's buffers, in the forward pass
    (torch.distributed, "monitored_barrier"),
    (torch.futures.Future.__bases__[0], "wait"),  # of a collective's, or of a DDP hook's
)


def collectives() -> list[str]:
    """The methods of ``ProcessGroup`` that begin a collective: those that return a ``Work``.

    Each version of PyTorch has others, and calls others; their signatures, as the binding writes them, tell.
    """
    group = torch.distributed.ProcessGroup
    return [name for name in vars(group) if _GIVES_WORK.search(getattr(group, name).__doc__ or "")]


_GIVES_WORK = re.compile(r"\) -> (?:\w+(?:::|\.))*Work\b")


class CommWaitTimer:
    """Adds up how long the thread that made this has waited for other ranks, and its backward passes in theirs.

    Counted are collectives that Python code waits for (``torch.distributed``, FSDP2, DTensor, torchmetrics), and what
    DDP waits for in C++ when a rank has computed its own gradients. Waits within compiled code do not count.

    Args:
        mark: For a device, whose streams wait where the host does not: called with whether a wait begins, or ends; also
            within each other.
        clock: Gives seconds.
        streams: The class of the device's streams. When one is to wait for an event, ``mark`` is called with it, too.
    """

    def __init__(
        self,
        mark: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        streams: type | None = None,
    ) -> None:
        self.seconds = 0.0
        """So far."""
        self.counts = True
        """Whether it adds up what is waited now; to be changed where nothing is."""
        self._mark: Callable[..., None] = mark if mark is not None else lambda *args: None
        self._on_device = mark is not None
        self._streams = streams
        self._clock = clock
        self._thread = threading.get_ident()
        self._depth = 0
        self._began = 0.0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        """Counts from now on; once."""
        for owner, name in _WAITS:
            self._replace(owner, name, self._timed)
        if self._on_device:
            # With NCCL the stream of the device waits in these, and nothing need be given back that is waited for.
            for name in collectives():
                self._replace(torch.distributed.ProcessGroup, name, self._timed)
            if inspect.isfunction(vars(self._streams or object).get("wait_event")):  # in C it cannot be replaced
                self._replace(self._streams, "wait_event", self._held)
        self._replace(torch.autograd, "backward", self._with_an_end)

    def stop(self) -> None:
        """Counts no more."""
        self.counts = False  # other code may have wrapped one of ours, and still call it
        while self._replaced:
            owner, name, original, own = self._replaced.pop()
            if vars(owner)[name] is own:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        # As it is in the class: what getattr() gives of a C++ method would not be one when it is put back.
        own = around(getattr(owner, name))
        self._replaced.append((owner, name, vars(owner)[name], own))
        setattr(owner, name, own)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a clock cannot be traced
                return wait(*args, **kwargs)
            if not self._is_counted():
                return wait(*args, **kwargs)
            self._depth += 1  # a backward pass on several devices runs in as many threads; the GIL orders them
            if self._depth == 1:
                self._began = self._clock()
            self._mark(True)
            try:
                return wait(*args, **kwargs)
            finally:
                self._mark(False)
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += self._clock() - self._began

        return timed

    def _held(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """A stream of the device that waits for an event; the host does not."""

        def held(stream: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_counted():
                return wait(stream, *args, **kwargs)
            self._mark(True, stream)
            try:
                return wait(stream, *args, **kwargs)
            finally:
                self._mark(False, stream)

        return held

    def _is_counted(self) -> bool:
        # Threads of ours wait for others too, beside the training. Those of autograd, in which the backward pass of an
        # accelerator runs, are part of it.
        return self.counts and (threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1)

    def _with_an_end(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A backward pass, in which what comes behind the last of this rank's own gradients is waiting."""
        queue_callback = Variable._execution_engine.queue_callback

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_counted() or _is_compiled():
                return run(tensors, *args, **kwargs)
            ended: float | None = None
            waited = 0.0

            def own_end() -> None:
                nonlocal ended, waited
                if ended is None:
                    ended, waited = self._clock(), self.seconds
                    self._mark(True)

            def ask(gradients: Any) -> None:
                queue_callback(own_end)

            # What is to be called at the end of a backward pass is called in the order in which it was asked for, and
            # none can ask before the gradient of the loss is there. DDP asks for its own wait when all gradients are.
            roots = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
            nodes: list[Any] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
            hooks = [node.register_prehook(ask) for node in nodes if node is not None]
            try:
                return run(roots, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
                if ended is not None and self._depth == 0:
                    # Not in addition to the collectives in it that were counted.
                    self.seconds = waited + self._clock() - ended
                if ended is not None:
                    self._mark(False)

        return backward


def _is_compiled() -> bool:
    """Whether backward passes are compiled: then nothing can be asked to be called at their end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
