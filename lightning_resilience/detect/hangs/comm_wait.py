"""Measures how long this process waits for other ranks, in collectives and in the reduction that ends a backward pass.

Ranks that wait for each other are all as slow as the slowest rank. Only the time in which a rank does not wait shows
which rank is the slowest.
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
    (torch.distributed, "_broadcast_coalesced"),  # DDP broadcasts its buffers in the forward pass
    (torch.distributed, "monitored_barrier"),
    (torch.futures.Future.__bases__[0], "wait"),  # futures of collectives and of DDP's hooks
)


def collectives() -> list[str]:
    """The methods of ``ProcessGroup`` that begin a collective: the methods that return a ``Work``.

    Their names differ between versions of PyTorch, so they are found by the signatures that the binding writes.
    """
    group = torch.distributed.ProcessGroup
    return [name for name in vars(group) if _GIVES_WORK.search(getattr(group, name).__doc__ or "")]


_GIVES_WORK = re.compile(r"\) -> (?:\w+(?:::|\.))*Work\b")


class CommWaitTimer:
    """Adds up how long the thread that created this timer and the threads of its backward passes wait for other ranks.

    Two kinds of waits count: collectives that Python code waits for (``torch.distributed``, FSDP2, DTensor,
    torchmetrics), and DDP's wait in C++ after a rank has computed its own gradients. Waits in compiled code do not
    count.

    Args:
        mark: For a device, whose streams wait where the host does not. It is called with true when a wait begins and
            with false when the wait ends; waits may be nested.
        clock: Returns seconds.
        streams: The class of the device's streams. When a stream begins to wait for an event, ``mark`` is called with
            this stream as well.
    """

    def __init__(
        self,
        mark: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        streams: type | None = None,
    ) -> None:
        self.seconds = 0.0
        """Seconds waited so far."""
        self.counts = True
        """Whether waits count at present; change this only while nothing waits."""
        self._mark: Callable[..., None] = mark if mark is not None else lambda *args: None
        self._on_device = mark is not None
        self._streams = streams
        self._clock = clock
        self._thread = threading.get_ident()
        self._depth = 0
        self._began = 0.0
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        """Starts to count; call this once."""
        for owner, name in _WAITS:
            self._replace(owner, name, self._timed)
        if self._on_device:
            # With NCCL the device's stream waits in these calls, and the caller may get no `Work` to wait for.
            for name in collectives():
                self._replace(torch.distributed.ProcessGroup, name, self._timed)
            if inspect.isfunction(vars(self._streams or object).get("wait_event")):  # in C it cannot be replaced
                self._replace(self._streams, "wait_event", self._held)
        self._replace(torch.autograd, "backward", self._with_an_end)

    def stop(self) -> None:
        """Stops counting."""
        self.counts = False  # other code may have wrapped one of our functions, and still call it
        while self._replaced:
            owner, name, original, own = self._replaced.pop()
            if vars(owner)[name] is own:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        # Keeps the attribute from `vars`: what getattr() returns for a C++ method would be no method when put back.
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
        """Wraps the call that makes a stream of the device wait for an event; the host does not wait."""

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
        # This package's own threads also wait for other ranks; they are no part of the training. Autograd's threads
        # are part of it: the backward pass of an accelerator runs in them.
        return self.counts and (threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1)

    def _with_an_end(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a backward pass: everything after the last of this rank's own gradients counts as waiting."""
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

            # Callbacks for the end of a backward pass run in the order in which they were queued, and the first one can
            # be queued with the gradient of the loss. DDP queues its own wait when it has all gradients, so later.
            roots = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
            nodes: list[Any] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
            hooks = [node.register_prehook(ask) for node in nodes if node is not None]
            try:
                return run(roots, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
                if ended is not None and self._depth == 0:
                    # Replaces the collectives counted in the meantime, so that nothing counts twice.
                    self.seconds = waited + self._clock() - ended
                if ended is not None:
                    self._mark(False)

        return backward


def _is_compiled() -> bool:
    """Whether backward passes are compiled: then no callback can be queued for their end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
