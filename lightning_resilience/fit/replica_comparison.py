"""Compares ranks that should hold the same state, and rolls back if they differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

import torch

from lightning_resilience._files import read_json, write_json
from lightning_resilience._lightning import lightning_loggers, lightning_strategies
from lightning_resilience._torch import local
from lightning_resilience.agreement_protocol import Event, Needs
from lightning_resilience.checkpoint.digest import digest_of
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.detect.numerics.rollback_history import Rollbacks
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.run.events import Rollback
from lightning_resilience.run.ledger import node_name

log = logging.getLogger("lightning_resilience.callbacks.replica_check")  # users configure the callback's logger

_DIVERGED = "replicas differ"
_NOWHERE = "there is no checkpoint on which all ranks agreed to roll back to"


class ReplicasDiverged(RuntimeError):
    """Ranks that should hold the same weights do not, and all allowed measures were taken.

    Attributes:
        suspects_this_node: Why a launcher that can should continue without the node of this rank; empty if it need not.
    """

    suspects_this_node = ""


class ReplicaComparison(Participant):
    """Compares the states of ranks that should be equal in one fit, and rolls back if they differ.

    Args:
        session: The fit.
        max_rollbacks: Number of rollbacks for the same divergence, restarts included.
        optional: Whether ranks that have never agreed turn the policy off instead of raising an error.
    """

    def __init__(self, session: FitSession, max_rollbacks: int, optional: bool) -> None:
        self.session = session
        self._max_rollbacks = max_rollbacks
        self._optional = optional
        self._parameters: list[torch.Tensor] = []
        self._file = session.fit.folder.path / "replica_check.json"
        self._rollbacks = Rollbacks()
        self._answered = -1
        self._log_rollback: Callable[[], None] = lambda: None
        self._is_off = False

    def start(self) -> None:
        """Starts to compare: the tensors to compare exist only now."""
        session, trainer = self.session, self.session.fit.trainer
        self._parameters, _ = lightning_strategies.compared_parameters(trainer)
        if not self._parameters:
            session.fit.participants.withdraw(self)
            if session.fit.rank == 0 and trainer.world_size > 1:  # a single rank never has any
                why = f"with {type(trainer.strategy).__name__}, as it is used here, ranks hold different states"
                log.info("ReplicaCheck has no replicas to compare: %s.", why)
        elif session.fit.rank == 0:
            self._rollbacks = self._read()

    def digest(self) -> str:
        """A digest of the parameters and of the optimizer state for them."""
        if self._is_off or not self._parameters:
            return ""
        return digest_of(map(local, lightning_strategies.trained_tensors(self.session.fit.trainer, self._parameters)))

    def on_divergence(self, divergence: Divergence) -> None:
        """Requests a rollback of all ranks; on rank 0, in any thread."""
        if self._is_off:
            return
        payload = {"step": divergence.step, "groups": divergence.groups, "asked_at": self.session.fit.steps_counted}
        self.session.fit.agreement.request(_DIVERGED, payload, Needs.CLEAN | Needs.TRAINING)

    def on_event_known(self, event: Event) -> None:
        """Notes that replicas differ: until the rollback, a state that one rank holds does not count for all."""
        self.session.fit.replicas_differ |= event.kind == _DIVERGED

    def on_event(self, event: Event) -> None:
        """Rolls back, unless that has been done since the request."""
        if event.kind == _DIVERGED and int(event.payload["asked_at"]) > self._answered:
            self._roll_back(Divergence(int(event.payload["step"]), tuple(map(tuple, event.payload["groups"]))))

    def blames_replicas(self) -> bool:
        """Compares the ranks' states, and rolls back if they differ."""
        if (divergence := self._compare()) is not None:
            self._roll_back(divergence)
        return divergence is not None and not self._is_off

    def before_end(self) -> bool:
        """Compares a last time: no boundary is left at which the fit could roll back."""
        if (divergence := self._compare()) is not None:
            times, have_agreed = self._count(divergence.step)
            why = "a restart continues from the newest checkpoint on which all ranks agreed"
            self._stay(divergence, why, times > 1 and not have_agreed)
        return False

    def _compare(self) -> Divergence | None:
        divergence = None if self._is_off else self.session.saver.compare()
        if divergence is not None:
            self.session.fit.record_divergence(divergence)
        return divergence

    def _roll_back(self, divergence: Divergence) -> None:
        session = self.session
        self._answered = session.fit.steps_counted
        times, have_agreed = self._count(divergence.step)
        if times > self._max_rollbacks:
            why = f"the run has rolled back {self._max_rollbacks} times because of that"
            self._stay(divergence, why, not have_agreed)
            return
        session.rollback(divergence.step, lambda: self._stay(divergence, _NOWHERE, times > 1 and not have_agreed))

        def log_rollback() -> None:
            log.warning(
                "Rolled back to the newest checkpoint on which all ranks agreed (%d of %d times): after step %d %s.",
                times,
                self._max_rollbacks,
                divergence.step,
                divergence,
            )
            session.fit.ledger.record(
                Rollback(fit=session.fit.index, step=divergence.step, reason=str(divergence), times=times)
            )
            lightning_loggers.log_metrics(session.fit.trainer, {"replica_check/rollbacks": float(times)})

        self._log_rollback = log_rollback

    def after_rollback(self) -> None:
        """Logs the rollback."""
        self.session.fit.replicas_differ = False
        if self.session.fit.rank == 0:
            self._log_rollback()
        self._log_rollback = lambda: None

    def _stay(self, divergence: Divergence, why: str, never_agreed: bool) -> None:
        """Ends the run, or turns the comparison off, when there is no further rollback."""
        if not never_agreed or not self._optional:
            self._end(divergence, why)
        # The script was not written for us: its ranks may differ on purpose.
        session = self.session
        self._is_off = True
        if session.fit.rank == 0:
            log.error(
                "ReplicaCheck is off: after step %d %s, and the ranks have never agreed since the start. Something "
                "in this training differs between ranks. Its checkpoints hold the state of one rank; local "
                "checkpoints of such a state do not count.",
                divergence.step,
                divergence,
            )

    def _end(self, divergence: Divergence, why: str) -> NoReturn:
        diverged = ReplicasDiverged(f"after step {divergence.step} {divergence}; {why}")
        several_nodes = len(set(self.session.fit.gather(node_name()))) > 1
        if several_nodes and self.session.fit.rank in divergence.suspects:
            diverged.suspects_this_node = "a rank on it held a different state than the other ranks"
        raise diverged

    def _count(self, step: int) -> tuple[int, bool]:
        """The number of rollbacks because of this divergence, with this one; and whether ranks have ever agreed."""

        def count() -> tuple[int, bool]:
            self._rollbacks.add(step)
            try:
                self.session.fit.check_owner()
                write_json(self._file, asdict(self._rollbacks))
            except OSError as error:
                log.error("The number of rollbacks could not be written (%s).", error)
            return self._rollbacks.count, self.session.fit.replicas_agreed

        return self.session.fit.from_rank_0(count)

    def _read(self) -> Rollbacks:
        try:
            content = read_json(self._file) or {}
            return Rollbacks(int(content.get("count", 0)), int(content.get("furthest", -1)))
        except (AttributeError, TypeError, ValueError):
            log.warning("Ignoring %s, the number of rollbacks: incompatible format.", self._file)
            return Rollbacks()
