"""Exchanges of ``LocalSGD``: ranks train independently, and average what they have trained at intervals."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from lightning_resilience._lightning import lightning_checkpoints, lightning_progress, lightning_strategies
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.averaging import (
    MakeOptimizer,
    OuterStep,
    average,
    average_numbers,
    differing,
    kept_by,
    meet,
    take_from_rank_0,
)
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

log = logging.getLogger("lightning_resilience.callbacks.local_sgd")  # users configure the callback's logger

_SOON = "exchange soon"
_SHARE_OF_TIME = 0.5  # of the time left until the end of a stop; the rest is for its save


class Exchanges(Participant):
    """Has the ranks of one fit train independently, and synchronizes them where the state of one counts for all.

    A checkpoint holds rank 0's state. So the fit saves, evaluates and rolls back only to states right after an
    exchange, and the outer optimizer begins from there.

    Args:
        session: The fit.
        every: How many optimizer steps lie between two exchanges.
        make_outer: Makes the outer optimizer; ``None`` if there is none.

    Attributes:
        loaded: The outer optimizer's state in the checkpoint that was loaded.
    """

    def __init__(self, session: FitSession, every: int, make_outer: MakeOptimizer | None) -> None:
        self.session = session
        self._every = every
        self._make_outer = make_outer
        self._outer: OuterStep | None = None
        self._steps = 0
        """How many steps were made since the last exchange."""
        self._begun_at: float | None = None
        """When the first batch after the last exchange began; ``None`` if it has not begun."""
        self._step_s: float | None = None
        """How long a step took on average before the last exchange."""
        self._behind_step = lightning_progress.BehindStep(session.fit.trainer)
        self._soon = self._asked = False
        self._stop_by: float | None = None
        self.loaded: dict[str, Any] | None = None

    def start(self) -> None:
        """From here on, ranks reduce no gradients."""
        fit = self.session.fit
        if any(isinstance(each, torch.optim.LBFGS) for each in fit.trainer.optimizers):
            raise ValueError("LocalSGD: the history that LBFGS keeps cannot be averaged. Use another optimizer.")
        if lightning_strategies.shards_state(fit.trainer):
            raise ValueError("LocalSGD: ZeroRedundancyOptimizer needs all gradients in every step. Use another one.")
        if (problem := lightning_strategies.reduce_no_gradients(fit.trainer, fit.patches)) is not None:
            raise ValueError(f"LocalSGD: {problem}")
        lightning_checkpoints.on_save(fit.trainer, fit.save_patches, self._before_save)
        self._begin()
        if fit.rank == 0 and fit.trainer.world_size > 1:
            size = sum(each.nbytes for each in self._trained().values())
            log.info(
                "%d ranks train independently and exchange every %d steps: %.1f MiB of parameters, and their "
                "optimizer state.",
                fit.trainer.world_size,
                self._every,
                size / (1 << 20),
            )
            for what in lightning_strategies.meets_in_every_step(fit.trainer):
                log.warning("%s synchronizes with rank 0 in every step, so ranks still wait for each other.", what)

    def leave(self) -> None:
        """The fit has ended."""
        self._behind_step.close()

    def after_rollback(self) -> None:
        """All ranks are at a saved state, which is one right after an exchange."""
        self._begin()

    def _begin(self) -> None:
        self._have_exchanged()
        self._behind_step.close()
        self._behind_step = lightning_progress.BehindStep(self.session.fit.trainer)
        self._behind_step.at(self.session.fit.trainer.global_step)
        if self._make_outer is not None:
            trained = self._trained()
            if self.loaded is not None:  # parameters may have been added to an optimizer since it was made
                trained = {name: self._named(name) for name in self.loaded["parameters"]}
            self._outer = OuterStep(trained, self._make_outer)
            if self.loaded is not None:
                self._outer.load_state_dict(self.loaded)
        self.loaded = None

    def _named(self, name: str) -> torch.nn.Parameter:
        now = dict(self.session.fit.module.named_parameters())
        if (found := now.get(name, now.get(f"{name}_orig"))) is None:  # torch's name for a parameter that it has pruned
            raise ValueError(f"LocalSGD: the outer optimizer was saved with {name}, which is not a parameter now.")
        return found

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that optimizers hold, or may be given later: a parameter may be frozen at the moment."""
        optimizers = self.session.fit.trainer.optimizers
        held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        named = self.session.fit.module.named_parameters()
        return {name: each for name, each in named if each.requires_grad or id(each) in held}

    def outer_state(self) -> dict[str, Any] | None:
        """The state of the outer optimizer, if there is one."""
        return None if self._outer is None else self._outer.state_dict()

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def batch_begins(self) -> None:
        """The first batch after an exchange begins from the state that all ranks share."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()
            if self._outer is not None:
                self._outer.extend(self._trained())
                self._outer.begin()

    def before_batch_end(self) -> None:
        """Counts a step, and exchanges when an exchange is due."""
        trainer, module = self.session.fit.trainer, self.session.fit.module
        if lightning_progress.accumulation_window_complete(trainer) and (
            module.automatic_optimization or self._behind_step.at(trainer.global_step)
        ):
            self._steps += 1
            if self._steps >= self._every or self._soon:
                self._exchange()
            elif self._stop_by is not None:
                self._ask_in_time()

    def ranks_agree(self) -> bool:
        """Whether no step was made since the last exchange."""
        return self._steps == 0

    def before_evaluation(self) -> None:
        """Exchanges, so that all ranks evaluate the same weights."""
        self._exchange_or_meet()

    def at_end_of_epoch(self) -> None:
        """Exchanges, so that all ranks have the same weights at the end of an epoch or of the training."""
        self._exchange_or_meet()

    def _exchange_or_meet(self) -> None:
        """A rank with a shorter epoch may have nothing to exchange here, while other ranks are within theirs."""
        if self._steps == 0:
            self._meet({})
        self._exchange()

    def _meet(self, named: dict[str, Any]) -> None:
        fit, trainer = self.session.fit, self.session.fit.trainer
        place = fit.steps_counted, trainer.global_step
        meet(place, named, trainer.strategy.root_device, fit.advanced)

    def _before_save(self, path: str) -> bool:
        """Another callback saves: exchanges first. After an error the ranks no longer meet."""
        if not self.session.fit.trainer.interrupted:
            self._exchange()
        return True

    @torch.no_grad()
    def _exchange(self) -> None:
        if self._steps == 0:
            return
        fit, trainer = self.session.fit, self.session.fit.trainer
        fit.enter("out_of_section")
        device = trainer.strategy.root_device
        tensors: dict[str, torch.Tensor] = {**self._trained()}
        for number, value in enumerate(lightning_strategies.averaged_tensors(trainer)):
            tensors[f"average {number}"] = value
        known: dict[str, Any] = {}
        numbers: list[tuple[Any, Any]] = []
        for name, container, key in kept_by(trainer.optimizers):
            value = container[key]
            if isinstance(value, torch.Tensor):
                self._check_has_mean(value, key)
                tensors[name] = value
            elif type(value) in (int, float) and isinstance(container, (dict, list)):
                known[name] = type(value).__name__
                numbers.append((container, key))
        rates = [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]
        known["learning rates"] = [float(each) for each in rates if each is not None]
        self._meet({**tensors, **known})
        rest = [each for name, each in fit.module.named_parameters() if name not in tensors]
        average([*tensors.values(), *differing(rest, device, fit.advanced)], device, fit.advanced)
        average_numbers(numbers, device)
        take_from_rank_0(lightning_strategies.broadcast_buffers(trainer), device, fit.advanced)
        if self._outer is not None:
            self._outer.take()
        self._have_exchanged()

    def _check_has_mean(self, tensor: torch.Tensor, key: object) -> None:
        if tensor.numel() > 1 and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"LocalSGD: an optimizer keeps integers ({key}, {tensor.dtype}), as 8-bit optimizers do, and integers "
                "cannot be averaged. Use an optimizer that keeps its moments in floating point."
            )

    def _have_exchanged(self) -> None:
        if self._begun_at is not None and self._steps:
            self._step_s = (time.monotonic() - self._begun_at) / self._steps
        self._steps, self._begun_at = 0, None
        self._soon = self._asked = False

    # -- a stop that cannot wait ---------------------------------------------------------------------------------------

    def hurry(self, within_s: float) -> None:
        """Has all ranks exchange ahead of time if the next exchange would come too late for a stop."""
        if self.session.fit.rank == 0:
            self._stop_by = time.monotonic() + _SHARE_OF_TIME * within_s
            self._ask_in_time()

    def _ask_in_time(self) -> None:
        """Checked after each step: the next steps may take longer than the ones before."""
        now, begun_at, steps, step_s = time.monotonic(), self._begun_at, self._steps, self._step_s
        if begun_at is not None and steps:
            step_s = (now - begun_at) / steps
        assert self._stop_by is not None
        if not self._asked and (step_s is None or now + step_s * (self._every - steps) > self._stop_by):
            self._asked = True
            self.session.fit.agreement.request(_SOON, {}, Needs.TRAINING)

    def on_event(self, event: Event) -> None:
        """Has all ranks exchange after the next step."""
        if event.kind == _SOON:
            self._soon = True
            if self.session.fit.rank == 0:
                log.info("The ranks exchange early: the run must stop before the next exchange is due.")
