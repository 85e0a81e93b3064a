"""Ranks train apart, and exchange what they have trained now and then."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from lightning_resilience._lightning import lightning_checkpoints, lightning_progress, lightning_strategies
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.averaging import MakeOptimizer, OuterStep, average, take_from_rank_0
from lightning_resilience.checkpoint.snapshot import optimizer_tensors
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

log = logging.getLogger("lightning_resilience.callbacks.local_sgd")  # users configure the callback's logger

_SOON = "exchange soon"
_SHARE_OF_TIME = 0.5  # of what is left until the end of a stop; the rest is for its save


class Exchanges(Participant):
    """Has the ranks of one fit train apart, and brings them together where one speaks for all.

    What a checkpoint holds is rank 0's. So the state is saved, evaluated and rolled back to only right behind an
    exchange, and the outer optimizer begins from there.

    Args:
        session: The fit.
        every: How many optimizer steps are between two exchanges.
        make_outer: Makes the outer optimizer; ``None``: there is none.

    Attributes:
        loaded: The outer optimizer's state in the checkpoint that was loaded.
    """

    def __init__(self, session: FitSession, every: int, make_outer: MakeOptimizer | None) -> None:
        self.session = session
        self._every = every
        self._make_outer = make_outer
        self._outer: OuterStep | None = None
        self._trained: list[torch.nn.Parameter] = []
        """Since the last exchange."""
        self._steps = 0
        """Since then."""
        self._exchanged_at = time.monotonic()
        self._soon = self._asked = False
        self.loaded: dict[str, Any] | None = None

    def start(self) -> None:
        """Ranks reduce no gradients from here on."""
        trainer = self.session.fit.trainer
        if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
            raise ValueError("LocalSGD: what LBFGS keeps of its last steps has no mean. Use another optimizer.")
        if lightning_strategies.shards_state(trainer):
            raise ValueError("LocalSGD: ZeroRedundancyOptimizer needs all gradients in every step. Use another one.")
        lightning_strategies.reduce_no_gradients(trainer, self.session.fit.patches)
        lightning_checkpoints.on_save(trainer, self.session.fit.save_patches, self._before_save)
        self._begin()
        if trainer.is_global_zero and trainer.world_size > 1:
            size = sum(each.nbytes for each in self._trained)
            log.info(
                "%d ranks train apart, and exchange every %d steps: %.1f MiB of parameters, and what optimizers keep "
                "for them.",
                trainer.world_size,
                self._every,
                size / (1 << 20),
            )

    def after_rollback(self) -> None:
        """All ranks are at a state that was saved, so behind an exchange."""
        self._begin()

    def _begin(self) -> None:
        self._have_exchanged()
        if self._make_outer is not None:
            self._outer = OuterStep(self._trained, self._make_outer)
            if self.loaded is not None:
                self._outer.optimizer.load_state_dict(self.loaded)
        self.loaded = None

    def outer_state(self) -> dict[str, Any] | None:
        """The state of the outer optimizer, if there is one."""
        return None if self._outer is None else self._outer.optimizer.state_dict()

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def batch_done(self) -> None:
        """Counts a step, and exchanges when it is time."""
        if lightning_progress.accumulation_window_complete(self.session.fit.trainer):
            self._steps += 1
            if self._steps >= self._every or self._soon:
                self._exchange()

    def ranks_agree(self) -> bool:
        """Whether no step was made since the last exchange."""
        return self._steps == 0

    def before_evaluation(self) -> None:
        """All ranks evaluate the same weights."""
        self._exchange()

    def at_end_of_epoch(self) -> None:
        """The end of an epoch, or of the training, finds the same weights on all ranks."""
        self._exchange()

    def _before_save(self, path: str) -> bool:
        """Another callback saves: what all ranks have trained. Behind an error they no longer meet."""
        if not self.session.fit.trainer.interrupted:
            self._exchange()
        return True

    def _exchange(self) -> None:
        if self._steps == 0:
            return
        trainer = self.session.fit.trainer
        self.session.fit.enter("out_of_section")
        device = trainer.strategy.root_device
        now = (each for each in trainer.lightning_module.parameters() if each.requires_grad)
        trained = {id(each): each for each in (*self._trained, *now)}  # what was frozen meanwhile was trained before
        average([*trained.values(), *optimizer_tensors(trainer.optimizers)], device)
        take_from_rank_0(lightning_strategies.broadcast_buffers(trainer), device)
        if self._outer is not None:
            self._outer.take()
        self._have_exchanged()

    def _have_exchanged(self) -> None:
        module = self.session.fit.trainer.lightning_module
        self._trained = [each for each in module.parameters() if each.requires_grad]
        self._steps, self._exchanged_at = 0, time.monotonic()
        self._soon = self._asked = False

    # -- a stop that cannot wait ---------------------------------------------------------------------------------------

    def hurry(self, within_s: float) -> None:
        """Has all ranks exchange ahead of time where the next exchange would come too late for a stop."""
        if self.session.fit.rank != 0 or self._asked or (steps := self._steps) == 0:
            return
        step_s = (time.monotonic() - self._exchanged_at) / steps
        if step_s * (self._every - steps) > _SHARE_OF_TIME * within_s:
            self._asked = True
            self.session.fit.agreement.request(_SOON, {}, Needs.TRAINING)

    def on_event(self, event: Event) -> None:
        """All ranks exchange behind the next step."""
        if event.kind == _SOON:
            self._soon = True
            if self.session.fit.rank == 0:
                log.info("The ranks exchange ahead of time: the run is to stop before it would be due.")
