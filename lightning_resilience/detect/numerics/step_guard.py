"""The guard of training steps: decides, alike on all ranks, whether a step may change the model. No Trainer.

**One result without an extra collective.** A rank with a bad loss (not finite, or a spike) notifies the other ranks by
its gradients: the guard replaces them by NaN, and the usual reduction of gradients (DDP's all-reduce) carries the NaN
to every rank. So a rank of a DDP job checks only its reduced gradients, which are the same on all ranks. Where
gradients are sharded and clipped by their norm, the guard checks this norm. Where they are sharded and not clipped, the
ranks share no number between the last gradient and the step, and no rank may skip alone: the step happens, and the rank
that has found something bad reports it.

**When.** The check comes right before an optimizer changes anything, after the gradients have been reduced, unscaled
and clipped. On the CPU a number is read at no cost, so the result is known at once. On an accelerator the host must not
wait: fused optimizers skip the step on the device on their own, by the mechanism for gradient scalers, and the host
learns of it some steps later. With other optimizers the step happens, and only a rollback can undo it; a copy of
parameters and moments for every step would take as much memory again.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_resilience._torch import around_closure, before_update, local
from lightning_resilience.detect.numerics.numerics import (
    ChangingBuffers,
    LateReads,
    SpikeReference,
    Undo,
    all_finite,
    all_of,
    are_finite,
    nonfinite_names,
    stored_numbers,
)

Tag = Any
"""The caller's name for a window; returned with its result."""


@dataclass(frozen=True)
class Reruns:
    """How a batch is run a second time.

    Attributes:
        get_random: Returns the state of all random generators of this process.
        set_random: Restores it.
        always: Whether every batch is run twice, or only one whose step is bad.
    """

    get_random: Callable[[], Any]
    set_random: Callable[[Any], None]
    always: bool = False


@dataclass(slots=True)
class StepResult:
    """The result of a window, that is, of the batches whose gradients went into one step.

    Attributes:
        tag: As given to :meth:`StepGuard.begin`.
        problem: What was wrong, as text; ``None`` if nothing was wrong.
        is_here: Whether the problem is known to have begun on this rank.
        is_common: Whether all ranks have this result, and get it at the same boundary.
        has_happened: Whether a bad step has happened although it should have been skipped: the result came too late, or
            only one rank has it and the other ranks cannot know it in time.
        loss: The last loss of the window on this rank, if it was read.
        grad_norm: Norm of the gradients of a bad step; may be NaN or infinite.
        first: What was wrong in the first run, if the second run was good: a transient fault.
        reproducible: Whether a second run of the same batch had the same result; ``None`` without a second run.
    """

    tag: Tag
    problem: str | None = None
    is_here: bool = False
    is_common: bool = False
    has_happened: bool = False
    loss: float | None = None
    grad_norm: float | None = None
    first: str | None = None
    reproducible: bool | None = None

    def blame(self, problem: str, is_here: bool) -> None:
        """Records a problem, unless one is already recorded."""
        if self.problem is None:
            self.problem, self.is_here = problem, is_here


@dataclass(eq=False)
class StepGuard:
    """Checks the steps of some optimizers.

    Args:
        optimizers: Returns the optimizers of this moment.
        named_parameters: Returns the model's parameters, to name those whose gradients are not finite.
        buffers: The buffers that the forward pass may change, such as the running statistics of batch normalization.
        device: The device on which this rank trains, and on which all results are combined.
        skips: Whether a bad step is kept from changing anything: parameters, optimizer state, buffers.
        late: Whether the results of a window come later, since the host must not wait for the device.
        replicated: Whether all ranks have the same gradients, by which they learn that the loss of one rank was bad.
        sharded: Whether ranks have different parts of the gradients. Then a bad step is skipped if the norm of the
            gradients is known (see :meth:`take_norm`), and happens otherwise.
        alone: Whether this rank makes its steps independently, and may skip a step that other ranks make.
        check_grads: Whether gradients are checked, or only losses.
        spikes: The reference below which a loss must stay, if any.
        has_scaler: Whether a gradient scaler checks the gradients and skips steps in its normal work. A scaler in the
            user's own code is recognized by the attributes that it sets on the optimizer.
        reruns: How a batch whose step is bad is run again before anything is decided. Works for steps with a closure
            that runs the whole batch, and with results that do not come later.
    """

    optimizers: Callable[[], Sequence[Optimizer]]
    named_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    buffers: ChangingBuffers
    device: torch.device
    skips: bool
    late: bool
    replicated: bool = False
    sharded: bool = False
    alone: bool = False
    check_grads: bool = True
    spikes: SpikeReference | None = None
    has_scaler: bool = False
    reruns: Reruns | None = None

    def __post_init__(self) -> None:
        self._undo = Undo(self.buffers) if self.skips and self.buffers.exist else None
        self._open = False
        self._gradient_hooks: list[Any] = []
        self._carriers: weakref.WeakKeyDictionary[Optimizer, torch.Tensor] = weakref.WeakKeyDictionary()
        self._skipping: dict[int, dict[str, Any]] = {}
        self._beginning: set[int] = set()
        self._stateless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._reads = LateReads()
        self._accepted_losses = LateReads()
        self._results: list[StepResult] = []
        self._clear(None)
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]
        if self.late and self.skips:
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Stops checking steps."""
        for hook in self._hooks:
            hook.remove()

    # -- windows -------------------------------------------------------------------------------------------------------

    def begin(self, tag: Tag) -> None:
        """Begins a window, and ends the window before it."""
        if self._open:
            self.end()
        self._open = True
        self._clear(tag)
        if self._undo is not None:
            self.buffers.look()
            self._undo.keep()

    def _clear(self, tag: Tag) -> None:
        self._result = StepResult(tag)
        self._losses: list[float] = []
        self._norm: dict[int, torch.Tensor] = {}
        self._bad_loss = False
        self._scaled = self.has_scaler
        """Whether a gradient scaler decides about the steps of this window."""
        # Results of this window on the device: all results, those of losses, and those that only this rank has seen.
        self._fine: list[torch.Tensor] = []
        self._fine_losses: list[torch.Tensor] = []
        self._fine_here: list[torch.Tensor] = []
        self._settled: torch.Tensor | None = None
        while self._gradient_hooks:
            self._gradient_hooks.pop().remove()

    def settle(self) -> None:
        """Restores the buffers that the batches so far have changed, if they were bad; the window continues."""
        if self._open and self.late:
            self._settle_later()
        elif self._open:
            if self._scaled and self._undo is not None and self._result.problem is None and self._undo.invalidated():
                self._result.blame(_BUFFERS, is_here=True)  # infinite gradients are normal, and leave no such trace
            if self._result.problem is not None and self._undo is not None:
                self._undo.restore()

    def _settle_later(self) -> None:
        # Runs once for a window, not after every step: few kernels, and no kernel if there are no new results.
        if not self._fine or self._settled is not None:
            return
        if self._scaled and self._undo is not None:
            whole = self._at_home(self._undo.invalidated().logical_not())
            self._fine.append(whole)
            self._fine_here.append(whole)
        self._settled = all_of(self._fine)
        if self._undo is not None:
            self._undo.restore(self._settled.logical_not())

    def end(self) -> bool:
        """Ends the window. Returns whether it is already known to be bad."""
        if not self._open:
            return False
        self.settle()
        self._open = False
        result = self._result
        if self.late:
            if self._settled is not None:
                here = all_of(self._fine_here) if self._fine_here else torch.ones_like(self._settled)
                self._reads.put(result, torch.add(self._settled.view(torch.uint8), here.view(torch.uint8), alpha=2))
            return False
        result.is_here |= self.alone and result.problem is not None
        result.is_common = not (self._scaled or self.alone) and (result.problem is None or result.is_common)
        result.loss = self._losses[-1] if self._losses else None
        self._results.append(result)
        if self.spikes is not None and result.problem is None:
            for loss in self._losses:
                self.spikes.observe(loss)
        return result.problem is not None

    def forget(self) -> None:
        """Drops the open window and all results, after the training has rolled back to an older state."""
        self._open = False
        self._reads.drain()
        self._accepted_losses.drain()
        self._results.clear()

    def results(self, wait: bool = False) -> list[StepResult]:
        """The results that have become known since the last call, in order.

        Args:
            wait: Whether to wait for results that the device has not delivered yet.
        """
        if not self.late:
            results, self._results = self._results, []
            return results
        arrived = self._reads.drain() if wait else self._reads.ready()
        for result, number in arrived:
            if not int(number) & 1:
                result.problem, result.is_here = _LATE, self.alone or not int(number) & 2
        return [result for result, _ in arrived]

    # -- losses --------------------------------------------------------------------------------------------------------

    def check_loss(self, loss: torch.Tensor, scale: float = 1.0) -> None:
        """Checks a loss before its backward pass.

        Args:
            loss: The loss with which the backward pass begins.
            scale: The number by which the loss was divided, such as the number of accumulated batches.
        """
        if not self._open:  # for example in a learning-rate search
            return
        if self.late:
            self._check_loss_later(loss, scale)
            return
        value = float(loss.item()) * scale
        self._losses.append(value)
        if not math.isfinite(value):
            self._result.blame(f"the loss is {value}", is_here=True)
        elif self.spikes is not None and self.spikes.is_spike(value):
            self._result.blame(f"the loss is {value:.6g}, more than {self.spikes.threshold:.6g}", is_here=True)
        else:
            return
        self._bad_loss = True
        if self.skips and loss.requires_grad and (self.replicated or self.has_scaler):
            # Multiplies the gradients of all parameters: if the loss is clamped, a factor on its gradient is lost.
            factor = torch.tensor(math.nan, device="cpu")
            self._multiply_gradients((each for _, each in self.named_parameters() if each.requires_grad), factor)

    def _multiply_gradients(self, parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiplies the gradients of this batch. With NaN, their reduction or a gradient scaler notifies all ranks."""
        for parameter in parameters:
            hook = parameter.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]
            self._gradient_hooks.append(hook)

    def _check_loss_later(self, loss: torch.Tensor, scale: float) -> None:
        value = loss.detach() if scale == 1.0 else loss.detach() * scale
        fine = value.abs() < (math.inf if self.spikes is None else self.spikes.threshold)  # false for NaN
        if self.spikes is not None:
            # A loss that is not accepted becomes NaN, and the reference learns nothing from it.
            self._accepted_losses.put(None, torch.where(fine, value, math.nan))
            for _, number in self._accepted_losses.ready():
                self.spikes.observe(number)
        at_home = self._at_home(fine.reshape(()))
        for results in (self._fine, self._fine_losses, self._fine_here):
            results.append(at_home)
        self._settled = None
        if self.skips and loss.requires_grad:
            factor = _chosen(fine, 1.0, math.nan)
            if self.replicated or self.has_scaler:
                # Uses one parameter of each optimizer only, since this happens in every step.
                carriers = (self._carrier(each, with_gradient=False) for each in self.optimizers())
                self._multiply_gradients((each for each in carriers if each is not None), factor)
            loss.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]

    def _carrier(self, optimizer: Optimizer, with_gradient: bool) -> torch.Tensor | None:
        """The smallest parameter that takes part in the step: by its gradient ranks notify each other.

        Args:
            optimizer: The optimizer of the parameter.
            with_gradient: Whether the backward pass is over. Before that, the parameter of the last step is taken.
        """

        def takes_part(parameter: torch.Tensor) -> bool:
            if with_gradient:
                return parameter.grad is not None and local(parameter.grad).numel() > 0
            return parameter.requires_grad

        known = self._carriers.get(optimizer)
        if known is not None and takes_part(known):
            return known
        found = [each for group in optimizer.param_groups for each in group["params"] if takes_part(each)]
        if not found:
            return None
        smallest: torch.Tensor = min(found, key=lambda parameter: local(parameter).numel())
        self._carriers[optimizer] = smallest
        return smallest

    def _at_home(self, result: torch.Tensor) -> torch.Tensor:
        """Copies a result to this rank's device; it may be on another one (a loss on the CPU, a model on several)."""
        # The host must wait for a copy to the CPU. Such copies are made only if this rank trains there, at no cost.
        return result.to(self.device, non_blocking=self.device.type != "cpu")

    def take_norm(self, optimizer: Optimizer, norm: torch.Tensor) -> None:
        """Takes the norm of an optimizer's gradients over all ranks, which is the same on every rank.

        Where gradients are not sharded, it replaces a second check of all gradients, because it is finite if they are.
        A norm that is not finite has at least clipped the gradients to nothing.
        """
        self._norm[id(optimizer)] = norm.detach()

    def before_norm(self, optimizer: Optimizer) -> None:
        """Called before that norm is calculated: a rank with a bad loss notifies the other ranks by the norm."""
        if not self.sharded or not self.skips or not (self._bad_loss or self._fine_losses):
            return
        carrier = self._carrier(optimizer, with_gradient=True)
        if carrier is None or carrier.grad is None:
            return
        fine = all_of(self._fine_losses) if self.late else torch.tensor(False, device="cpu")
        mine = local(carrier.grad)
        mine.copy_(_multiplied(mine, _chosen(fine, 1.0, math.nan)))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._open or self.has_scaler or optimizer not in self.optimizers():
            return None
        if self.late:
            self._put_back(optimizer)  # a step that has raised has not done so
            return before_update(functools.partial(self._check_later, optimizer), args, kwargs)
        if self.reruns is not None:
            return around_closure(functools.partial(self._run, optimizer), args, kwargs)
        return before_update(functools.partial(self._check_now, optimizer), args, kwargs)

    def _check_later(self, optimizer: Optimizer) -> None:
        self._settled = None
        norm = self._norm.pop(id(optimizer), None)
        self._scaled |= _is_scaled(optimizer)
        if self.sharded and norm is None and not _is_scaled(optimizer):
            self._result.has_happened = self.skips
            if self.check_grads:
                fine = self._at_home(all_finite(_gradients(optimizer)))
                self._fine.append(fine)
                self._fine_here.append(fine)
            return
        fine = self._is_fine(optimizer, norm)
        self._fine.append(fine)
        if self.skips:
            self._skip_on_device(optimizer, fine)

    def _check_now(self, optimizer: Optimizer) -> None:
        if not self._may_step(optimizer) and self.skips:
            self._skip(optimizer)

    def _run(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Runs a batch, and runs it again if its step is bad or if every batch is to be run twice."""
        assert self.reruns is not None
        before = self.reruns.get_random()
        output = closure()
        fine = self._may_step(optimizer)
        if fine and not self.reruns.always:
            return output
        first, seen = self._result.problem, (self._losses, _norms(optimizer))
        self._skip(optimizer)
        self.reruns.set_random(before)
        self._clear(self._result.tag)
        output = closure()
        again = self._may_step(optimizer)
        # Two bad results count as the same result: NaN has no value to compare.
        self._result.reproducible = seen == (self._losses, _norms(optimizer)) if fine and again else fine == again
        if again:
            self._result.first = first
        elif self.skips:
            self._skip(optimizer)
        return output

    def _may_step(self, optimizer: Optimizer) -> bool:
        """Whether the step may happen; records what is wrong if it is bad."""
        norm = self._norm.pop(id(optimizer), None)
        if _is_scaled(optimizer):
            # The scaler checks the gradients; if there are other ranks, it finds a bad loss in them on all ranks.
            self._scaled, fine = True, not self._bad_loss or self.replicated or self.sharded
        else:
            all_know = self.replicated or (self.sharded and norm is not None)  # learn of a bad loss by the check
            fine = (all_know or not self._bad_loss) and (
                are_finite(self._to_check(optimizer)) if norm is None else math.isfinite(norm)
            )
        if fine:
            return True
        result, alone = self._result, self.sharded and norm is None
        result.is_common = not alone
        result.grad_norm = math.hypot(*_norms(optimizer)) if norm is None else float(norm)
        if result.problem is None:
            named = ((name, each.grad) for name, each in self.named_parameters() if each.grad is not None)
            if names := nonfinite_names(named):  # in DDP the same on all ranks, whichever rank has caused it
                result.blame(f"gradients are not finite: {', '.join(names)}", is_here=self.sharded)
            elif norm is not None and math.isinf(norm) and not self.sharded:
                result.blame("the gradients are too large: their norm is infinite", is_here=False)
            else:
                result.blame(_ELSEWHERE, is_here=False)
        result.has_happened |= alone and self.skips
        return alone

    def _to_check(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The gradients by which this rank learns of a bad step."""
        if self.check_grads:
            return _gradients(optimizer)
        carrier = self._carrier(optimizer, with_gradient=True) if self.replicated else None
        return [carrier.grad] if carrier is not None and carrier.grad is not None else []

    def _skip(self, optimizer: Optimizer) -> None:
        # Zeros would not do: with zeros too, moments and momentum are updated, and weight decay is applied.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._undo is not None:
            self._undo.restore()

    def _is_fine(self, optimizer: Optimizer, norm: torch.Tensor | None) -> torch.Tensor:
        """Whether the step may happen, as a tensor on this rank's device; the same on all ranks."""
        if norm is not None and not _is_scaled(optimizer):
            fine = self._at_home(norm < math.inf)  # false for NaN
            if self.sharded:
                return fine
        else:
            fine = self._at_home(all_finite([] if _is_scaled(optimizer) else self._to_check(optimizer)))
        if self.replicated:
            self._carrier(optimizer, with_gradient=True)  # chosen for the next step
        elif not self.sharded and self._fine_losses:  # this rank is alone: its own losses count
            fine = all_of([fine, *self._fine_losses])
        return fine

    def _skip_on_device(self, optimizer: Optimizer, fine: torch.Tensor) -> None:
        begins = not optimizer.state and optimizer not in self._stateless
        if begins or on_host(optimizer, self.device):
            # The host may wait for an optimizer's first step. Optimizers create their state even if they skip this
            # step, and a momentum that begins with the first gradient differs from one that begins with zeros. An
            # optimizer that steps on the host has waited for its gradients anyway.
            if not bool(fine):
                self._skip(optimizer)
            elif begins:
                self._beginning.add(id(optimizer))
        elif can_skip(optimizer):
            skipping: Any = optimizer
            before = {name: vars(optimizer)[name] for name in _SCALERS if name in vars(optimizer)}
            bad, found = _chosen(fine, 0.0, 1.0), before.get("found_inf")
            skipping.found_inf = bad if found is None else torch.maximum(found, bad.to(found.device, non_blocking=True))
            skipping.grad_scale = before.get("grad_scale")
            self._skipping[id(optimizer)] = before
        else:
            self._result.has_happened = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(optimizer)
        if id(optimizer) in self._beginning:
            self._beginning.discard(id(optimizer))
            if not optimizer.state:
                self._stateless.add(optimizer)  # it never has state: plain SGD

    def _put_back(self, optimizer: Optimizer) -> None:
        """Restores the attributes that a gradient scaler had set on the optimizer."""
        if (before := self._skipping.pop(id(optimizer), None)) is not None:
            for name in _SCALERS:
                if name in before:
                    setattr(optimizer, name, before[name])
                else:
                    vars(optimizer).pop(name, None)


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None
    ]


def _norms(optimizer: Optimizer) -> list[float]:
    """The norms of an optimizer's gradients, by which two backward passes are compared."""
    return [float(torch.linalg.vector_norm(stored_numbers(gradient))) for gradient in _gradients(optimizer)]


def _chosen(where: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """Selects one of two numbers with one kernel: plain numbers would be converted to tensors each time."""
    return torch.where(where, _constant(yes, where.device), _constant(no, where.device))


@functools.cache
def _constant(number: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32, device=device)  # as optimizers require it


def _multiplied(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient * factor.to(gradient.device, gradient.dtype, non_blocking=gradient.device.type != "cpu")


_LATE = "the loss or a gradient was not finite"
_ELSEWHERE = "another rank has a bad loss or bad gradients"
_BUFFERS = "buffers of the module are no longer finite"
_SCALERS = ("grad_scale", "found_inf")
"""The attributes that a gradient scaler sets on an optimizer that can skip a step on its own."""


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler makes this optimizer step: then the scaler has checked the gradients, and decides."""
    return getattr(optimizer, "found_inf", None) is not None


def on_host(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer steps and keeps its state on the host, while this rank trains on another device."""
    return device.type != "cpu" and all(
        parameter.device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"]
    )


def can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer can skip a step on its device when told so, which gradient scalers use."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
