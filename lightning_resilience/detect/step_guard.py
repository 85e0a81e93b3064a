"""Whether a step of the training may change the model, decided alike on all ranks; and what to do if not. No Trainer.

**One verdict without a collective of its own.** A loss that is not finite, or a spike, on one rank is made known to the
others by its gradients: they are replaced by NaN, and the reduction of gradients that happens anyway (DDP's all-reduce)
brings that to every rank. So all that a rank of a DDP job looks at are its reduced gradients, which are the same on
all. Where ranks hold different parts of the gradients, their norm is looked at if they are clipped by it, or one number
is reduced besides.

**When.** Right before an optimizer changes anything: after the gradients have been reduced, unscaled and clipped. On
the CPU a number is read at no cost, so the verdict is there at once. An accelerator is asked nothing that the host
would have to wait for: an optimizer that can skips the step on the device by itself (fused ones, by what gradient
scalers use), and the host learns of it some steps later. With one that cannot the step happens, and all that is left is
to go back; to keep a copy of parameters and moments for every step would take as much memory again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_resilience.checkpoint.sharded import local
from lightning_resilience.checkpoint.snapshot import around_closure, before_update
from lightning_resilience.detect.numerics import (
    ChangingBuffers,
    LateReads,
    SpikeReference,
    Undo,
    all_finite,
    are_finite,
    nonfinite_names,
    stored_numbers,
)

log = logging.getLogger(__name__)

Tag = Any
"""What the caller calls a window; given back with its verdict."""


@dataclass(frozen=True)
class Reruns:
    """How a batch is run a second time.

    Attributes:
        get_random: Gives the state of all random generators of this process.
        set_random: Puts it back.
        always: Whether every batch is run twice, or only one whose step is bad.
    """

    get_random: Callable[[], Any]
    set_random: Callable[[Any], None]
    always: bool = False


@dataclass(frozen=True)
class Verdict:
    """What has become of a window: of the batches whose gradients went into one step.

    Attributes:
        tag: As it was given to :meth:`StepGuard.begin`.
        problem: What was wrong, for a person; ``None`` if nothing was.
        is_here: Whether it is known to have begun on this rank.
        is_common: Whether all ranks have this verdict, and get it at the same boundary.
        has_happened: Whether the step has happened although it was bad: the verdict has come too late.
        loss: The last one of the window on this rank, if it was read.
        grad_norm: Of the gradients of a bad step: their norm, which need not be a number.
        first: What was wrong in the first run, if the second one was good: a fault that has passed.
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


class StepGuard:
    """Watches the steps of some optimizers.

    Args:
        optimizers: Those of this moment.
        named_parameters: The model's, to name those whose gradients are not finite.
        buffers: What the forward pass may change: the running statistics of batch normalisation, say.
        prevents: Whether a bad step is kept from changing anything: parameters, optimizer state, buffers.
        late: Whether the verdicts of a window come later, since the host must not wait for the device.
        agree: Reduces one number over all ranks in place, to the smallest. For ranks that see different gradients.
        tells: Whether gradients are reduced over ranks, which learn by them that the loss of one was bad.
        checks_grads: Whether gradients are looked at, or only losses.
        spikes: What a loss must stay below, if anything.
        judges: Whether this is the place to look at gradients; not where a gradient scaler does so and skips steps
            in its normal work.
        reruns: How a batch whose step is bad is run again, before anything is decided. For steps with a closure that
            runs the whole batch, and where verdicts do not come later.
    """

    def __init__(
        self,
        optimizers: Callable[[], Sequence[Optimizer]],
        named_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        buffers: ChangingBuffers,
        prevents: bool,
        late: bool,
        agree: Callable[[torch.Tensor], None] | None = None,
        tells: bool = False,
        checks_grads: bool = True,
        spikes: SpikeReference | None = None,
        judges: bool = True,
        reruns: Reruns | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._named_parameters = named_parameters
        self._prevents = prevents
        self._late = late
        self._agree = agree
        self._tells = tells
        self._checks_grads = checks_grads
        self._spikes = spikes
        self._judges = judges
        self._reruns = reruns
        self._changing = buffers
        self._buffers = Undo(buffers) if prevents else None
        self._tag: Tag = None
        self._open = False
        self._problem: str | None = None
        self._is_here = False
        self._is_common = False
        self._grad_norm: float | None = None
        self._norm: dict[int, torch.Tensor] = {}
        self._first: str | None = None
        self._reproducible: bool | None = None
        self._seen: list[float] = []
        self._losses: list[float] = []
        self._fine: list[torch.Tensor] = []
        self._fine_losses: list[torch.Tensor] = []
        self._skipping: dict[int, torch.Tensor] = {}
        self._happens = False
        self._told: list[Any] = []
        self._bad_loss = False
        self._reads = LateReads()
        self._learns = LateReads()
        self._verdicts: list[Verdict] = []
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]
        if late and prevents:
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    # -- windows -------------------------------------------------------------------------------------------------------

    def begin(self, tag: Tag) -> None:
        """A window begins; the one before it, if there was one, is complete."""
        self.end()
        self._tag, self._open = tag, True
        self._first = self._reproducible = None
        self._clear()
        if self._buffers is not None:
            self._changing.look()
            self._buffers.keep()

    def _clear(self) -> None:
        self._problem, self._is_here, self._is_common, self._grad_norm = None, False, False, None
        self._bad_loss = False
        self._norm.clear()
        self._losses.clear()
        self._seen.clear()
        self._fine.clear()
        self._fine_losses.clear()
        self._happens = False
        while self._told:
            self._told.pop().remove()

    def end(self) -> bool:
        """The window is complete; returns whether it is known already that it was a bad one."""
        if not self._open:
            return False
        self._open = False
        if self._late:
            if self._fine:
                losses = torch.stack(self._fine_losses).all() if self._fine_losses else torch.tensor(True)
                everything = torch.stack(self._fine).all()
                self._reads.put((self._tag, self._happens), everything.float() + 2 * losses.float())
        else:
            if self._problem is not None and self._prevents and self._buffers is not None:
                self._buffers.restore()
            is_common = self._judges and (self._problem is None or self._is_common)
            self._verdicts.append(
                Verdict(
                    self._tag,
                    self._problem,
                    self._is_here,
                    is_common,
                    loss=self._seen[-1] if self._seen else None,
                    grad_norm=self._grad_norm,
                    first=self._first,
                    reproducible=self._reproducible,
                )
            )
            if self._spikes is not None and self._problem is None:
                for loss in self._losses:
                    self._spikes.observe(loss)
        return self._problem is not None

    def forget(self) -> None:
        """What is under way will not be judged: the training has gone back to an older state."""
        self._open = False
        self._reads.drain()
        self._learns.drain()
        self._verdicts.clear()

    def verdicts(self, wait: bool = False) -> list[Verdict]:
        """What has become known since the last call, in order.

        Args:
            wait: Whether to wait for what is still on its way.
        """
        if self._late:
            arrived = self._reads.drain() if wait else self._reads.ready()
            return [_late_verdict(tag, happens, int(number)) for (tag, happens), number in arrived]
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    # -- losses --------------------------------------------------------------------------------------------------------

    def look_at(self, loss: torch.Tensor, scale: float = 1.0) -> None:
        """Looks at a loss before its backward pass.

        Args:
            loss: What the backward pass begins with.
            scale: What the loss was divided by: by the number of batches that are accumulated, say.
        """
        if self._late:
            self._look_later(loss, scale)
            return
        value = float(loss.detach()) * scale
        self._seen.append(value)
        if math.isfinite(value) and not (self._spikes is not None and self._spikes.is_spike(value)):
            self._losses.append(value)
            return
        if math.isfinite(value):
            assert self._spikes is not None
            self._blame(f"the loss is {value:.6g}, more than {self._spikes.threshold:.6g}", True)
        else:
            self._blame(f"the loss is {value}", is_here=True)
        self._bad_loss = True
        if self._prevents and self._tells and loss.requires_grad:
            self._tell()

    def _tell(self) -> None:
        """Makes the gradients of this batch such that whatever reduces them tells all ranks."""
        # Of each parameter, not of the loss: where a loss is clamped, what is multiplied with its gradient is lost.
        for _, parameter in self._named_parameters():
            if parameter.requires_grad:
                self._told.append(parameter.register_hook(_spoil))  # type: ignore[no-untyped-call]

    def _blame(self, problem: str, is_here: bool) -> None:
        if self._problem is None:
            self._problem, self._is_here = problem, is_here

    def _look_later(self, loss: torch.Tensor, scale: float) -> None:
        value = loss.detach() * scale
        fine = torch.isfinite(value)
        if self._spikes is not None:
            fine = fine & (value.abs() < self._spikes.threshold)
            # What was not accepted is no number, and nothing is learned from it.
            self._learns.put(None, torch.where(fine, value, math.nan))
            for _, number in self._learns.ready():
                self._spikes.observe(number)
        self._fine.append(fine)
        self._fine_losses.append(fine)
        if self._prevents and loss.requires_grad:
            factor = torch.where(fine, 1.0, math.nan).to(loss.dtype)
            if self._tells:
                self._tell_later(factor)
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def _tell_later(self, factor: torch.Tensor) -> None:
        # By one parameter, since this happens in every step: the last one, which nearly always takes part.
        parameters = [each for _, each in self._named_parameters() if each.requires_grad]
        if parameters:
            hook = parameters[-1].register_hook(lambda gradient: gradient * factor.to(gradient.dtype))  # type: ignore[no-untyped-call]
            self._told.append(hook)

    def take_norm(self, optimizer: Optimizer, norm: torch.Tensor) -> None:
        """The norm of an optimizer's gradients of all ranks is known anyway: it says the same on all of them."""
        self._norm[id(optimizer)] = norm.detach()

    def before_norm(self) -> None:
        """Before that norm: a rank whose loss is bad says so in it."""
        if self._bad_loss and self._prevents:
            for _, parameter in self._named_parameters():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(math.nan)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._open or not self._judges or not any(optimizer is each for each in self._optimizers()):
            return None
        if self._late:
            return before_update(lambda: self._judge_later(optimizer), args, kwargs)
        if self._reruns is not None:
            return around_closure(lambda closure: self._run(optimizer, closure), args, kwargs)
        return before_update(lambda: self._judge(optimizer), args, kwargs)

    def _judge_later(self, optimizer: Optimizer) -> None:
        fine = self._is_fine(optimizer)
        self._fine.append(fine)
        if self._prevents:
            self._skip_on_device(optimizer, fine)

    def _judge(self, optimizer: Optimizer) -> None:
        if not self._look(optimizer) and self._prevents:
            self._skip(optimizer)

    def _run(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Runs a batch, and again if that is called for."""
        assert self._reruns is not None
        before = self._reruns.get_random()
        result = closure()
        fine = self._look(optimizer)
        if fine and not self._reruns.always:
            return result
        first, seen = self._problem, ([*self._seen], _norms(optimizer))
        self._take_away_gradients(optimizer)
        if self._buffers is not None:
            self._buffers.restore()
        self._reruns.set_random(before)
        self._clear()
        result = closure()
        again = self._look(optimizer)
        # A bad result is the same bad result: NaN has no value to compare.
        self._reproducible = seen == (self._seen, _norms(optimizer)) if fine and again else fine == again
        if again:
            self._first = first
        elif self._prevents:
            self._skip(optimizer)
        return result

    def _look(self, optimizer: Optimizer) -> bool:
        """Whether the step may happen; says what is wrong if not."""
        if self._agree is None and self._checks_grads:
            fine = (self._tells or not self._bad_loss) and are_finite(_gradients(optimizer))
        else:
            fine = bool(self._is_fine(optimizer))
        if fine:
            return True
        self._is_common = True
        self._grad_norm = math.hypot(*_norms(optimizer))
        if self._problem is None:
            names = nonfinite_names(
                (name, each.grad) for name, each in self._named_parameters() if each.grad is not None
            )
            if names:  # in DDP the same on all ranks, whoever it was
                self._blame(f"gradients are not finite: {', '.join(names)}", is_here=self._agree is not None)
            else:
                self._blame(_ELSEWHERE, is_here=False)
        return False

    def _skip(self, optimizer: Optimizer) -> None:
        self._take_away_gradients(optimizer)
        if self._buffers is not None:
            self._buffers.restore()

    @staticmethod
    def _take_away_gradients(optimizer: Optimizer) -> None:
        # Zeros would not do: moments, momentum and weight decay go on with zeros too.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _is_fine(self, optimizer: Optimizer) -> torch.Tensor:
        """Whether the step may happen; the same on all ranks."""
        norm = self._norm.pop(id(optimizer), None)
        if self._checks_grads and norm is not None:
            return torch.isfinite(norm)
        fine = all_finite(_gradients(optimizer)) if self._checks_grads else torch.tensor(True)
        if self._agree is not None or not self._tells:  # then what this rank alone has seen counts too
            if self._fine_losses:
                fine = fine & torch.stack(self._fine_losses).all()
            fine = fine & (not self._bad_loss)
        if self._agree is not None:
            number = fine.float()
            self._agree(number)
            fine = number > 0
        return fine

    def _skip_on_device(self, optimizer: Optimizer, fine: torch.Tensor) -> None:
        if not optimizer.state:
            # Its first step, for which the host may wait: optimizers make their state even if they skip it, and a
            # momentum that begins with the first gradient is not one that begins with nothing.
            if not bool(fine):
                self._skip(optimizer)
        elif _can_skip(optimizer):
            skipping: Any = optimizer
            skipping.grad_scale, skipping.found_inf = None, (~fine).float()
            self._skipping[id(optimizer)] = ~fine
        else:
            self._happens = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (bad := self._skipping.pop(id(optimizer), None)) is not None:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            if self._buffers is not None:
                self._buffers.restore(bad)


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def _norms(optimizer: Optimizer) -> list[float]:
    """What tells two backward passes apart."""
    return [float(torch.linalg.vector_norm(stored_numbers(gradient))) for gradient in _gradients(optimizer)]


def _spoil(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full_like(gradient, math.nan) if gradient.layout is torch.strided else gradient * math.nan


def _late_verdict(tag: Tag, happens: bool, number: int) -> Verdict:
    all_is_fine, losses_are_fine = bool(number & 1), bool(number & 2)
    if all_is_fine:
        return Verdict(tag)
    return Verdict(tag, _LATE, is_here=not losses_are_fine, has_happened=happens)


_LATE = "the loss or a gradient was not finite"
_ELSEWHERE = "the loss or the gradients of another rank are not as they should be"


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves a step out on its device if it is told so: what gradient scalers use."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
