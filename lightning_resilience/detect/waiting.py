"""How long this process has waited for other ranks: in collectives, and in the reduction at the end of a backward pass.

Ranks that wait for each other are all as slow as the slowest of them. Only the time that a rank has not waited says
which one that is.
"""

from __future__ import annotations

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
)


class Waiting:
    """Adds up how long the thread that made this has waited for other ranks.

    Counted are collectives that Python code waits for (``torch.distributed``, FSDP2, DTensor, torchmetrics), and what
    DDP waits for in C++ when a rank has computed its own gradients. On an accelerator the host waits for none of these.
    Waits within compiled code do not count.

    Args:
        mark: Called with whether the wait for others begins, or ends: for the streams of a device, which wait where the
            host does not. May be called within.
        clock: Gives seconds.
    """

    def __init__(
        self, mark: Callable[[bool], None] = lambda begins: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        """So far."""
        self._mark = mark
        self._clock = clock
        self._thread = threading.get_ident()
        self._computed: list[tuple[float, float]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Counts from now on."""
        for owner, name in _WAITS:
            wait = getattr(owner, name)
            self._replaced.append((owner, name, wait))
            setattr(owner, name, self._timed(wait))

    def stop(self) -> None:
        """Counts no more."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        clock, thread, mark = self._clock, self._thread, self._mark

        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a clock cannot be traced
                return wait(*args, **kwargs)
            if threading.get_ident() != thread:  # threads of ours wait for others too, beside the training
                return wait(*args, **kwargs)
            began = clock()
            mark(True)
            try:
                return wait(*args, **kwargs)
            finally:
                mark(False)
                self.seconds += clock() - began

        return timed

    def backward(self, loss: Any, run: Callable[[], None]) -> None:
        """Runs a backward pass; what comes behind the last of this rank's own gradients is waiting.

        Args:
            loss: What it begins with.
            run: Does it.
        """
        self._computed.clear()
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(self._begun)  # type: ignore[no-untyped-call]
        run()
        for at, waited in self._computed:
            # Not in addition to the collectives in it that were counted.
            self.seconds = waited + self._clock() - at
            self._mark(False)

    def _begun(self, gradient: torch.Tensor) -> None:
        # What is to be called at the end of a backward pass is called in the order in which it was asked for, and
        # nobody can ask before the gradient of the loss is there. DDP asks for its own wait when all gradients are.
        Variable._execution_engine.queue_callback(self._own_end)

    def _own_end(self) -> None:
        if self._computed:
            return  # the second pass from one loss, which has the hook twice
        self._computed.append((self._clock(), self.seconds))
        self._mark(True)
