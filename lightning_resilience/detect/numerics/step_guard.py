"""Whether a step of the training may change the model, decided alike on all ranks; and what to do if not. No Trainer.

**One verdict without a collective of its own.** A loss that is not finite, or a spike, on one rank is made known to the
others by its gradients: they are replaced by NaN, and the reduction of gradients that happens anyway (DDP's all-reduce)
brings that to every rank. So all that a rank of a DDP job looks at are its reduced gradients, which are the same on
all. Where ranks hold different parts of the gradients, their norm is looked at if they are clipped by it. If they are
not, nothing that all ranks know comes between the last gradient and the step, and no rank may skip alone: the step
happens, and the rank that has seen something bad says so.

**When.** Right before an optimizer changes anything: after the gradients have been reduced, unscaled and clipped. On
the CPU a number is read at no cost, so the verdict is there at once. An accelerator is asked nothing that the host
would have to wait for: an optimizer that can skips the step on the device by itself (fused ones, by what gradient
scalers use), and the host learns of it some steps later. With one that cannot the step happens, and all that is left is
to go back; to keep a copy of parameters and moments for every step would take as much memory again.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Verdict(NamedTuple):  # made in every step, and a frozen dataclass takes a microsecond more
    """What has become of a window: of the batches whose gradients went into one step.

    Attributes:
        tag: As it was given to :meth:`StepGuard.begin`.
        problem: What was wrong, for a person; ``None`` if nothing was.
        is_here: Whether it is known to have begun on this rank.
        is_common: Whether all ranks have this verdict, and get it at the same boundary.
        has_happened: Whether the step has happened although it was to be prevented: the verdict has come too late, or
            is that of one rank where others cannot know it in time.
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
        device: Where this rank trains, and all verdicts are brought together.
        prevents: Whether a bad step is kept from changing anything: parameters, optimizer state, buffers.
        late: Whether the verdicts of a window come later, since the host must not wait for the device.
        tells: Whether all ranks have the same gradients, and learn by them that the loss of one was bad.
        sharded: Whether ranks have different parts of the gradients. Then a step is skipped if their norm is known (see
            :meth:`take_norm`), and happens if it is not.
        checks_grads: Whether gradients are looked at, or only losses.
        spikes: What a loss must stay below, if anything.
        judges: Whether this is the place to look at gradients; not where a gradient scaler does so and skips steps
            in its normal work. Where one has been given an optimizer by hand, it is known by what it says to it.
        reruns: How a batch whose step is bad is run again, before anything is decided. For steps with a closure that
            runs the whole batch, and where verdicts do not come later.
    """

    def __init__(
        self,
        optimizers: Callable[[], Sequence[Optimizer]],
        named_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        buffers: ChangingBuffers,
        device: torch.device,
        prevents: bool,
        late: bool,
        tells: bool = False,
        sharded: bool = False,
        checks_grads: bool = True,
        spikes: SpikeReference | None = None,
        judges: bool = True,
        reruns: Reruns | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._named_parameters = named_parameters
        self._device = device
        self._prevents = prevents
        self._late = late
        self._tells = tells
        self._sharded = sharded
        self._checks_grads = checks_grads
        self._spikes = spikes
        self._judges = judges
        self._reruns = reruns
        self._changing = buffers
        self._buffers = Undo(buffers) if prevents and buffers.exist else None
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
        self._bad_loss = False
        self._scaled = False
        """Whether a gradient scaler decides about the steps of this window."""
        self._happens = False
        """Whether a step of this window happens even if it is bad."""
        self._told: list[Any] = []
        self._messengers: weakref.WeakKeyDictionary[Optimizer, torch.Tensor] = weakref.WeakKeyDictionary()
        # Verdicts of this window that are on the device: all of them, those about losses, those about what only this
        # rank has seen.
        self._fine: list[torch.Tensor] = []
        self._fine_losses: list[torch.Tensor] = []
        self._fine_here: list[torch.Tensor] = []
        self._settled: torch.Tensor | None = None
        self._skipping: dict[int, dict[str, Any]] = {}
        self._beginning: set[int] = set()
        self._stateless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
        self._bad_loss = self._happens = False
        self._scaled = not self._judges
        self._norm.clear()
        self._losses.clear()
        self._seen.clear()
        self._fine.clear()
        self._fine_losses.clear()
        self._fine_here.clear()
        self._settled = None
        while self._told:
            self._told.pop().remove()

    def settle(self) -> None:
        """Takes back what the batches so far have done to buffers, if they were bad; the window goes on."""
        if self._open and self._late:
            self._settle_later()
        elif self._open:
            if self._problem is None and self._scaled and self._buffers is not None and bool(self._buffers.spoilt()):
                self._blame(_BUFFERS, is_here=True)  # infinite gradients alone are normal, and leave no such trace
            if self._problem is not None and self._buffers is not None:
                self._buffers.restore()

    def _settle_later(self) -> None:
        # Once for a window, not after every step: few kernels, and none at all where there is nothing new.
        if not self._fine or self._settled is not None:
            return
        if self._scaled and self._buffers is not None:
            whole = self._at_home(self._buffers.spoilt().logical_not())
            self._fine.append(whole)
            self._fine_here.append(whole)
        self._settled = torch.stack(self._fine).all()
        if self._buffers is not None:
            self._buffers.restore(self._settled.logical_not())

    def end(self) -> bool:
        """The window is complete; returns whether it is known already that it was a bad one."""
        if not self._open:
            return False
        self.settle()
        self._open = False
        if self._late:
            if self._settled is not None:
                here = torch.stack(self._fine_here).all() if self._fine_here else torch.ones_like(self._settled)
                self._reads.put((self._tag, self._happens), self._settled.float() + 2 * here)
        else:
            is_common = not self._scaled and (self._problem is None or self._is_common)
            self._verdicts.append(
                Verdict(
                    self._tag,
                    self._problem,
                    self._is_here,
                    is_common,
                    has_happened=self._problem is not None and self._happens,
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
        if not self._open:  # of a learning-rate search, say
            return
        if self._late:
            self._look_later(loss, scale)
            return
        value = float(loss.item()) * scale
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
        if self._prevents and loss.requires_grad and (self._tells or not self._judges):
            self._tell()

    def _tell(self) -> None:
        """Makes the gradients of this batch such that whatever reduces them, or scales them, tells everybody."""
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
        at_home = self._at_home(fine.reshape(()))
        for verdicts in (self._fine, self._fine_losses, self._fine_here):
            verdicts.append(at_home)
        self._settled = None
        if self._prevents and loss.requires_grad:
            factor = torch.where(fine, 1.0, math.nan)
            if self._tells or not self._judges:
                self._tell_later(factor)
            loss.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]

    def _tell_later(self, factor: torch.Tensor) -> None:
        # By one parameter of each optimizer, since this happens in every step.
        for optimizer in self._optimizers():
            if (parameter := self._messenger(optimizer, with_gradient=False)) is not None:
                hook = parameter.register_hook(functools.partial(_multiplied, factor=factor))  # type: ignore[no-untyped-call]
                self._told.append(hook)

    def _messenger(self, optimizer: Optimizer, with_gradient: bool) -> torch.Tensor | None:
        """The smallest parameter that takes part: by its gradient the others are told, or told by the others.

        Args:
            optimizer: Whose parameter.
            with_gradient: Whether the backward pass is over. Before, the one that took part the last time is taken.
        """

        def takes_part(parameter: torch.Tensor) -> bool:
            if with_gradient:
                return parameter.grad is not None and local(parameter.grad).numel() > 0
            return parameter.requires_grad

        known = self._messengers.get(optimizer)
        if known is not None and takes_part(known):
            return known
        found = [each for group in optimizer.param_groups for each in group["params"] if takes_part(each)]
        if not found:
            return None
        smallest: torch.Tensor = min(found, key=lambda parameter: local(parameter).numel())
        self._messengers[optimizer] = smallest
        return smallest

    def _at_home(self, verdict: torch.Tensor) -> torch.Tensor:
        """On this rank's device: verdicts may come from anywhere (a loss on the CPU, layers on several devices)."""
        # Towards the CPU a copy must be waited for; that is only where this rank trains there, and at no cost.
        return verdict.to(self._device, non_blocking=self._device.type != "cpu")

    def take_norm(self, optimizer: Optimizer, norm: torch.Tensor) -> None:
        """The norm of an optimizer's gradients of all ranks is known anyway: it says the same on all of them."""
        self._norm[id(optimizer)] = norm.detach()

    def before_norm(self, optimizer: Optimizer) -> None:
        """Before that norm: a rank whose loss is bad says so in it."""
        if not self._prevents or not (self._bad_loss or self._fine_losses):
            return
        messenger = self._messenger(optimizer, with_gradient=True)
        if messenger is None or messenger.grad is None:
            return
        fine = torch.stack(self._fine_losses).all() if self._late else torch.tensor(False, device="cpu")
        mine = local(messenger.grad)
        mine.copy_(_multiplied(mine, torch.where(fine, 1.0, math.nan)))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._open or not self._judges or optimizer not in self._optimizers():
            return None
        self._put_back(optimizer)  # of a step that has raised
        if self._late:
            return before_update(lambda: self._judge_later(optimizer), args, kwargs)
        if self._reruns is not None:
            return around_closure(lambda closure: self._run(optimizer, closure), args, kwargs)
        return before_update(lambda: self._judge(optimizer), args, kwargs)

    def _judge_later(self, optimizer: Optimizer) -> None:
        self._settled = None
        norm = self._norm.pop(id(optimizer), None)
        self._scaled |= _is_scaled(optimizer)
        if self._sharded and norm is None and not _is_scaled(optimizer):
            self._happens = self._prevents
            if self._checks_grads:
                fine = self._at_home(all_finite(_gradients(optimizer)))
                self._fine.append(fine)
                self._fine_here.append(fine)
            return
        fine = self._is_fine(optimizer, norm)
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
        """Whether the step may happen; says what is wrong if it is not as it should be."""
        norm = self._norm.pop(id(optimizer), None)
        if _is_scaled(optimizer):
            # Its gradients are the scaler's business, and where there are other ranks, so is a bad loss: it finds it in
            # the gradients, on all of them.
            self._scaled, fine = True, not self._bad_loss or self._tells or self._sharded
        elif norm is not None:
            fine = math.isfinite(norm)
        elif self._tells:
            fine = are_finite(self._looked_at(optimizer))
        else:
            fine = not self._bad_loss and are_finite(self._looked_at(optimizer))
        if fine:
            return True
        alone = self._sharded and norm is None
        self._is_common = not alone
        self._grad_norm = math.hypot(*_norms(optimizer))
        if self._problem is None:
            names = nonfinite_names(
                (name, each.grad) for name, each in self._named_parameters() if each.grad is not None
            )
            if names:  # in DDP the same on all ranks, whoever it was
                self._blame(f"gradients are not finite: {', '.join(names)}", is_here=self._sharded)
            else:
                self._blame(_ELSEWHERE, is_here=False)
        self._happens |= alone and self._prevents
        return alone

    def _looked_at(self, optimizer: Optimizer) -> list[torch.Tensor]:
        if self._checks_grads:
            return _gradients(optimizer)
        if not self._tells:
            return []
        messenger = self._messenger(optimizer, with_gradient=True)
        return [messenger.grad] if messenger is not None and messenger.grad is not None else []

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

    def _is_fine(self, optimizer: Optimizer, norm: torch.Tensor | None) -> torch.Tensor:
        """Whether the step may happen; the same on all ranks, on the device of this rank."""
        looked_at: list[torch.Tensor] = []
        if not _is_scaled(optimizer):
            if norm is not None:
                return self._at_home(torch.isfinite(norm))
            looked_at = self._looked_at(optimizer)
        fine = self._at_home(all_finite(looked_at))
        if self._tells:
            self._messenger(optimizer, with_gradient=True)  # chosen for the next step
        elif not self._sharded and self._fine_losses:  # this rank is alone: what it has seen counts
            fine = fine & torch.stack(self._fine_losses).all()
        return fine

    def _skip_on_device(self, optimizer: Optimizer, fine: torch.Tensor) -> None:
        begins = not optimizer.state and optimizer not in self._stateless
        if begins or on_host(optimizer, self._device):
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
            bad, found = fine.logical_not().float(), before.get("found_inf")
            skipping.found_inf = bad if found is None else torch.maximum(found, bad.to(found.device, non_blocking=True))
            skipping.grad_scale = before.get("grad_scale")
            self._skipping[id(optimizer)] = before
        else:
            self._happens = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(optimizer)
        if id(optimizer) in self._beginning:
            self._beginning.discard(id(optimizer))
            if not optimizer.state:
                self._stateless.add(optimizer)  # it never has any: plain SGD

    def _put_back(self, optimizer: Optimizer) -> None:
        """What a gradient scaler has said to the optimizer, or nothing."""
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


def _spoil(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full_like(gradient, math.nan) if gradient.layout is torch.strided else gradient * math.nan


def _multiplied(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient * factor.to(gradient.device, gradient.dtype, non_blocking=gradient.device.type != "cpu")


def _late_verdict(tag: Tag, happens: bool, number: int) -> Verdict:
    all_is_fine, all_here_is_fine = bool(number & 1), bool(number & 2)
    if all_is_fine:
        return Verdict(tag)
    return Verdict(tag, _LATE, is_here=not all_here_is_fine, has_happened=happens)


_LATE = "the loss or a gradient was not finite"
_ELSEWHERE = "the loss or the gradients of another rank are not as they should be"
_BUFFERS = "buffers of the module are not finite any more"
_SCALERS = ("grad_scale", "found_inf")
"""What a gradient scaler says to an optimizer that can skip a step by itself."""


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
