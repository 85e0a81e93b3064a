"""Whether a step of the training may change the model, decided alike on all ranks; and what to do if not. No Trainer.

**One result without a collective of its own.** A rank with a bad loss (not finite, or a spike) notifies the others by
its gradients: they are replaced by NaN, and the reduction of gradients that happens anyway (DDP's all-reduce) brings
that to every rank. So a rank of a DDP job checks only its reduced gradients, which are the same on all. Where gradients
are sharded, their norm is checked if they are clipped by it. If they are not, nothing that all ranks know comes between
the last gradient and the step, and no rank may skip alone: the step happens, and the rank that has found something bad
reports it.

**When.** Right before an optimizer changes anything: after the gradients have been reduced, unscaled and clipped. On
the CPU a number is read at no cost, so the result is known at once. On an accelerator the host must not wait: an
optimizer that can skips the step on the device by itself (fused ones, by what gradient scalers use), and the host
learns of it some steps later. With other optimizers the step happens, and all that is left is a rollback; a copy of
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
"""What the caller calls a window; returned with its result."""


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
    """The result of a window: of the batches whose gradients went into one step.

    Attributes:
        tag: As given to :meth:`StepGuard.begin`.
        problem: What was wrong, as text; ``None`` if nothing was.
        is_here: Whether it is known to have begun on this rank.
        is_common: Whether all ranks have this result, and get it at the same boundary.
        has_happened: Whether a bad step has happened although it was to be skipped: the result has come too late, or is
            that of one rank where others cannot know it in time.
        loss: The last one of the window on this rank, if it was read.
        grad_norm: Norm of the gradients of a bad step, which need not be a number.
        first: What was wrong in the first run, if the second one was good: a transient fault.
        reproducible: Whether a second run of the same batch had the same result; ``None`` if there was none.
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
        """Records a problem, unless there is one already."""
        if self.problem is None:
            self.problem, self.is_here = problem, is_here


@dataclass(eq=False)
class StepGuard:
    """Checks the steps of some optimizers.

    Args:
        optimizers: Returns those of this moment.
        named_parameters: Returns the model's, to name those whose gradients are not finite.
        buffers: Those that the forward pass may change: the running statistics of batch normalisation, say.
        device: Where this rank trains, and all results are brought together.
        skips: Whether a bad step is kept from changing anything: parameters, optimizer state, buffers.
        late: Whether the results of a window come later, since the host must not wait for the device.
        replicated: Whether all ranks have the same gradients, by which they learn that the loss of one was bad.
        sharded: Whether ranks have different parts of the gradients. Then a step is skipped if their norm is known (see
            :meth:`take_norm`), and happens if it is not.
        alone: Whether this rank's steps are its own, and it may skip one that others make.
        check_grads: Whether gradients are checked, or only losses.
        spikes: What a loss must stay below, if anything.
        has_scaler: Whether a gradient scaler checks the gradients and skips steps in its normal work. One in the user's
            own code is known by what it sets on the optimizer.
        reruns: How a batch whose step is bad is run again, before anything is decided. For steps with a closure that
            runs the whole batch, and results that do not come later.
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
        """Checks no more steps."""
        for hook in self._hooks:
            hook.remove()

    # -- windows -------------------------------------------------------------------------------------------------------

    def begin(self, tag: Tag) -> None:
        """A window begins; the one before it, if there was one, is complete."""
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
        # Results of this window on the device: all of them, those of losses, those of what only this rank has seen.
        self._fine: list[torch.Tensor] = []
        self._fine_losses: list[torch.Tensor] = []
        self._fine_here: list[torch.Tensor] = []
        self._settled: torch.Tensor | None = None
        while self._gradient_hooks:
            self._gradient_hooks.pop().remove()

    def settle(self) -> None:
        """Restores the buffers that the batches so far have changed, if they were bad; the window goes on."""
        if self._open and self.late:
            self._settle_later()
        elif self._open:
            if self._scaled and self._undo is not None and self._result.problem is None and self._undo.invalidated():
                self._result.blame(_BUFFERS, is_here=True)  # infinite gradients are normal, and leave no such trace
            if self._result.problem is not None and self._undo is not None:
                self._undo.restore()

    def _settle_later(self) -> None:
        # Once for a window, not after every step: few kernels, and none at all where there is nothing new.
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
        """The window is complete; returns whether it is known already that it was a bad one."""
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
        """Drops what is under way: the training has gone back to an older state."""
        self._open = False
        self._reads.drain()
        self._accepted_losses.drain()
        self._results.clear()

    def results(self, wait: bool = False) -> list[StepResult]:
        """Those that have become known since the last call, in order.

        Args:
            wait: Whether to wait for those that are still on their way.
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
            loss: What the backward pass begins with.
            scale: What the loss was divided by: by the number of batches that are accumulated, say.
        """
        if not self._open:  # of a learning-rate search, say
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
            # By the gradients of all parameters: where a loss is clamped, what is multiplied with its own is lost.
            factor = torch.tensor(math.nan, device="cpu")
            self._multiply_gradients((each for _, each in self.named_parameters() if each.requires_grad), factor)

    def _multiply_gradients(self, parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """By NaN, it has whatever reduces or scales the gradients of this batch notify all ranks."""
        for parameter in parameters:
            hook = parameter.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]
            self._gradient_hooks.append(hook)

    def _check_loss_later(self, loss: torch.Tensor, scale: float) -> None:
        value = loss.detach() if scale == 1.0 else loss.detach() * scale
        fine = value.abs() < (math.inf if self.spikes is None else self.spikes.threshold)  # false for NaN
        if self.spikes is not None:
            # What was not accepted is no number, and nothing is learned from it.
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
                # By one parameter of each optimizer, since this happens in every step.
                carriers = (self._carrier(each, with_gradient=False) for each in self.optimizers())
                self._multiply_gradients((each for each in carriers if each is not None), factor)
            loss.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]

    def _carrier(self, optimizer: Optimizer, with_gradient: bool) -> torch.Tensor | None:
        """The smallest parameter that takes part: by its gradient ranks notify each other.

        Args:
            optimizer: Whose parameter.
            with_gradient: Whether the backward pass is over. Before, the one that took part the last time is taken.
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
        """On this rank's device: results may come from anywhere (a loss on the CPU, layers on several devices)."""
        # Towards the CPU a copy must be waited for; that is only where this rank trains there, and at no cost.
        return result.to(self.device, non_blocking=self.device.type != "cpu")

    def take_norm(self, optimizer: Optimizer, norm: torch.Tensor) -> None:
        """The norm of an optimizer's gradients of all ranks is known, the same on all of them.

        It saves a second look at all gradients where they are not sharded: it is finite if they are. Where it is not,
        they were clipped to nothing, at the least.
        """
        self._norm[id(optimizer)] = norm.detach()

    def before_norm(self, optimizer: Optimizer) -> None:
        """Before that norm: a rank whose loss is bad notifies the others by it."""
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
            self._put_back(optimizer)  # of a step that has raised
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
        """Runs a batch, and again if that is called for."""
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
        # A bad result is the same bad result: NaN has no value to compare.
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
            # The scaler checks the gradients, and where there are other ranks finds a bad loss in them, on all ranks.
            self._scaled, fine = True, not self._bad_loss or self.replicated or self.sharded
        else:
            all_know = self.replicated or (self.sharded and norm is not None)  # of a bad loss, by what is looked at
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
            if names := nonfinite_names(named):  # in DDP the same on all ranks, whoever it was
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
        # Zeros would not do: moments, momentum and weight decay go on with zeros too.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._undo is not None:
            self._undo.restore()

    def _is_fine(self, optimizer: Optimizer, norm: torch.Tensor | None) -> torch.Tensor:
        """Whether the step may happen; the same on all ranks, on the device of this rank."""
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
            # Its first step, for which the host may wait: optimizers make their state even if they skip it, and a
            # momentum that begins with the first gradient is not one that begins with nothing. And what steps on the
            # host has waited for its gradients anyway.
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
                self._stateless.add(optimizer)  # it never has any: plain SGD

    def _put_back(self, optimizer: Optimizer) -> None:
        """Restores what a gradient scaler had set on the optimizer."""
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
    """What tells two backward passes apart."""
    return [float(torch.linalg.vector_norm(stored_numbers(gradient))) for gradient in _gradients(optimizer)]


def _chosen(where: torch.Tensor, yes: float, no: float) -> torch.Tensor:
    """One number or the other, by one kernel: given as numbers, both would be made into tensors each time."""
    return torch.where(where, _constant(yes, where.device), _constant(no, where.device))


@functools.cache
def _constant(number: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32, device=device)  # what optimizers want that skip a step


def _multiplied(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient * factor.to(gradient.device, gradient.dtype, non_blocking=gradient.device.type != "cpu")


_LATE = "the loss or a gradient was not finite"
_ELSEWHERE = "another rank has a bad loss or bad gradients"
_BUFFERS = "buffers of the module are no longer finite"
_SCALERS = ("grad_scale", "found_inf")
"""What a gradient scaler sets on an optimizer that can skip a step by itself."""


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has this optimizer step: it has looked at the gradients, and decides."""
    return getattr(optimizer, "found_inf", None) is not None


def on_host(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer steps on the host, and this rank trains on another device: its state is kept there."""
    return device.type != "cpu" and all(
        parameter.device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"]
    )


def can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves a step out on its device if it is told so: what gradient scalers use."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
