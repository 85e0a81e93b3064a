"""Keeps the order in which DistributedDataParallel reduces gradients over a restart.

DDP groups parameters into buckets and, after the first iteration, regroups them in the order in which their gradients
arrived. A resumed process would run its first iteration with the initial buckets, while an uninterrupted run already
uses the rebuilt ones; with 3 or more ranks, the sums then differ in their last bit. So the order of arrival is recorded
once, saved with every checkpoint, and replayed right after wrapping: a synthetic loss of zero, whose backward reaches
the parameters in the recorded order, makes DDP rebuild the same buckets. No user code runs. The replay costs as much as
an exchange of all gradients, so it is left out with two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_resilience.checkpoint.pruning import named_parameters


def order_matters(ddp: DistributedDataParallel) -> bool:
    """Whether sums depend on the order; the sum of two numbers does not."""
    return dist.get_world_size(ddp.process_group) > 2


def rebuilds_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether this wrapper regroups its buckets after the first iteration, and a replay can make it do so.

    DDP regroups them unless it looks for unused parameters. With a static graph it also learns from the first iteration
    how often each gradient arrives, which a replay would distort. Its mixed precision reduces the gradients of copies
    that only the module's own forward makes. And a hook that keeps a state would count the replay.
    """
    return not (ddp.find_unused_parameters or ddp.static_graph or ddp.mixed_precision or keeps_state(ddp))


def keeps_state(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook of the script keeps a state, such as the error feedback of PowerSGD."""
    # DDP's mixed precision has its own hook, whose state no iteration changes.
    return not ddp.mixed_precision and any(_is_state(state) for _, state in ddp._comm_hooks)


def _is_state(state: object) -> bool:
    """Whether a communication hook keeps data in ``state``; torch's simple hooks take a process group there."""
    return state is not None and not isinstance(state, dist.ProcessGroup)


def inexact_reasons(ddp: DistributedDataParallel) -> list[str]:
    """Why a resume with this wrapper is not exact: a text for each reason, with what to change."""
    reasons = []
    options = {"static_graph=True": ddp.static_graph, "mixed_precision": ddp.mixed_precision}
    if order_matters(ddp):
        reasons += [
            f"DDP is used with {name}, whose order of reduction cannot be restored: with 3 or more ranks, weights may "
            "differ in their last bits after a resume. Leave it out for an exact resume."
            for name, is_used in options.items()
            if is_used
        ]
    own = "torch.distributed.algorithms.ddp_comm_hooks."
    hooks = [] if ddp.mixed_precision else ddp._comm_hooks  # mixed precision has its own hook
    if any(_is_state(state) or not hook.__module__.startswith(own) for hook, state in hooks):
        reasons.append(
            "DDP is used with a communication hook, whose state (such as PowerSGD's error feedback) is not saved: it "
            "is reset by a resume. Use no hook, or one of torch's without a state, for an exact resume."
        )
    return reasons


class GradientArrivalRecorder:
    """Records the order in which gradients arrive in the first iteration that reduces them.

    Args:
        ddp: The wrapped model, before its first iteration.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._order: dict[str, None] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._recorder(name))
            for name, parameter in named_parameters(ddp.module)
            if parameter.requires_grad
        ]

    def _recorder(self, name: str) -> Any:
        def record(_: Tensor) -> None:
            # Backwards under ``no_sync`` (gradient accumulation) do not reach DDP's reducer.
            # Of several backwards in one manual optimization, the first one's order counts.
            if self._ddp.require_backward_grad_sync:
                self._order.setdefault(name)

        return record

    def finish(self) -> list[str] | None:
        """The names of the parameters in their order of arrival, or ``None`` while no gradient has arrived.

        Call it between iterations. Recording ends when there is an order.
        """
        if not self._order:
            return None
        self.stop()
        return list(self._order)

    def stop(self) -> None:
        """Ends recording."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _ZeroLoss(nn.Module):
    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self._ordered = parameters

    def forward(self, _: None) -> Tensor:
        # Autograd runs the last created operation first.
        total = torch.zeros((), device=self._ordered[0].device)
        for parameter in reversed(self._ordered):
            total = total + (parameter * 0).sum().to(total.dtype)
        return total


def replay_gradient_arrival(ddp: DistributedDataParallel, order: list[str]) -> bool:
    """Makes ``ddp`` build the same buckets as if gradients had arrived in ``order``. A collective.

    Args:
        ddp: The wrapped model, before its first iteration.
        order: Names of parameters, from :class:`GradientArrivalRecorder`.

    Returns:
        ``False`` if ``order`` does not name exactly this model's parameters: then nothing was done.
    """
    parameters = {name: parameter for name, parameter in named_parameters(ddp.module) if parameter.requires_grad}
    if sorted(order) != sorted(parameters):
        return False
    module, model = ddp.module, list(parameters.values())
    # The user's hooks must not see this backward: a hook that steps an optimizer would change weights. Autograd keeps
    # references to the dicts themselves, so they are emptied and filled again.
    hook_dicts: list[dict[int, Any]] = [
        hooks
        for parameter in model
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if hooks
    ]
    saved_hooks = [dict(hooks) for hooks in hook_dicts]
    sync_buffers = ddp.require_forward_param_sync
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            ddp.require_forward_param_sync = False  # the synthetic module has no buffers to broadcast
            for hooks in hook_dicts:
                hooks.clear()
            ddp._modules["module"] = _ZeroLoss([parameters[name] for name in order])
            ddp(None).backward()  # DDP fails without an input
        finally:
            ddp._modules["module"] = module
            ddp.require_forward_param_sync = sync_buffers
            for hooks, saved in zip(hook_dicts, saved_hooks, strict=True):
                hooks.update(saved)
            for parameter in model:
                parameter.grad = None
    return True
