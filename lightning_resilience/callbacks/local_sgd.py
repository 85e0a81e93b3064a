"""``LocalSGD``: ranks train independently and exchange their parameters every few steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._arguments import checked
from lightning_resilience._lightning import lightning_strategies
from lightning_resilience.fit.exchanges import Exchanges
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_STATE = "LocalSGD"


class LocalSGD(SessionCallback):
    """Has DDP's ranks train independently and exchange their parameters every few steps: for slow links.

    Without an outer optimizer it is local SGD (https://arxiv.org/abs/1805.09767): parameters are replaced by their
    means. With an outer optimizer it is DiLoCo (https://arxiv.org/abs/2311.08105): the mean change of the ranks'
    parameters is the gradient of the outer step. The state of the ranks' own optimizers (moments) is also replaced by
    its means, and buffers are taken from rank 0, as in DDP. So after an exchange all ranks hold the same state, bit for
    bit, and any one of them can save it for all ranks.

    Only after an exchange is the state saved, and does a signal or a rollback take effect. So every resume is exact,
    and a failure repeats at most ``exchange_every`` more steps. Where a signal leaves too little time for that, the
    ranks exchange early; such a stop loses nothing, but the steps after it differ from a run that was not stopped. The
    ranks also exchange before each validation, before Lightning or another callback saves a checkpoint, and at the end
    of an epoch. These are best at multiples of ``exchange_every``.

    Between two exchanges no gradients are sent. Values that the module logs with ``sync_dist=True``, and
    ``SyncBatchNorm``, are still synchronized. Each rank clips its own gradients. Averages of weights in Lightning's
    callbacks (EMA) and frozen parameters that the module itself changes are exchanged, too.

    Args:
        exchange_every: Number of optimizer steps between two exchanges; 1: in every step. Local SGD usually takes 4 to
            64, DiLoCo 500, after first steps of usual training.
        outer_optimizer: Makes an optimizer from a list of parameters, such as
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``. The outer optimizer needs
            memory for two copies of the trained parameters, and for four during its step. It is saved with the state.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense, or the strategy, the precision or an optimizer does not allow it.

    Example::

        local_sgd = LocalSGD(exchange_every=16)
        trainer = Trainer(strategy="ddp", callbacks=[local_sgd, AutoResume(run_dir="runs/gpt")], max_epochs=2)
        trainer.fit(model, data)
    """

    @checked
    def __init__(
        self,
        exchange_every: int = 16,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if exchange_every < 1:
            raise ValueError(f"exchange_every must be at least 1, not {exchange_every}.")
        self.exchange_every = exchange_every
        self.outer_optimizer = outer_optimizer
        self.run_dir = run_dir

    def _participate(self, session: FitSession) -> Participant:
        if (problem := lightning_strategies.why_not_apart(session.fit.trainer)) is not None:
            raise ValueError(f"LocalSGD: {problem}")
        return Exchanges(session, self.exchange_every, self.outer_optimizer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the state of the outer optimizer."""
        exchanges = self._participant
        if session_of(trainer, self) is None or not isinstance(exchanges, Exchanges):
            return
        if (state := exchanges.outer_state()) is not None:
            checkpoint[_STATE] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the state of the outer optimizer."""
        exchanges = self._participant
        if session_of(trainer, self) and isinstance(exchanges, Exchanges):
            exchanges.loaded = checkpoint.get(_STATE)
            if exchanges.loaded is None and self.outer_optimizer is not None and trainer.is_global_zero:
                log.info("The checkpoint holds no state of the outer optimizer, so it begins anew.")
