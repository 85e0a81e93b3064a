"""One fit of a run, as everything that takes part in it sees it: its place, its ranks, its records."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lightning_resilience._files import Patience
from lightning_resilience._lightning import lightning_patches, lightning_progress, lightning_strategies
from lightning_resilience.agreement import Agreement, neighbourhood, nodes_of
from lightning_resilience.agreement_protocol import Event, Position
from lightning_resilience.checkpoint.safe_serialization import device_of
from lightning_resilience.detect.hangs.progress import Progress, Section
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.participant import Participant, Participants
from lightning_resilience.launch.job_info import log_job_info
from lightning_resilience.run.events import DivergenceFound
from lightning_resilience.run.ledger import Ledger, node_name
from lightning_resilience.run.run_directory import LAUNCHED, RUN_DIR_VARIABLE, RunDirectory, StorageFails

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_READS_OWNER_AGAIN_AFTER_S = (0.2, 1.0)

fits_begun: dict[Path, int] = {}

_T = TypeVar("_T")


class FitContext:
    """One ``trainer.fit`` of a run.

    Args:
        trainer: The Trainer, in the ``setup`` of its fit.
        module: The module that is fitted.
        run_dir: The run directory; default: that of the launcher, else ``resilience`` in the Trainer's
            ``default_root_dir``.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run_dir: str | os.PathLike[str] | None) -> None:
        self.trainer = trainer
        self.module = module
        self.rank: int = trainer.global_rank
        self.participants = Participants()
        self.gone_back = False
        """Whether the fit has gone back: hooks of its start are called again, for what is not new."""
        self.progress: Progress | None = None
        """Where this rank reports what it is doing, if it is watched."""
        self.replicas_agreed = False
        """Whether the states of ranks that should hold the same were compared, and were the same; rank 0 knows."""
        self.final_path: Path | None = None
        """Where the final state of a fit that has finished is."""
        self.failing = False
        """Whether the fit ends by an exception: the other ranks may be gone."""
        self.counted_before = 0
        """What ``steps_counted`` has counted before the fit went back."""
        self._divergence_said = False
        self._owner_unknown_said = False

        if trainer.is_global_zero and not fits_begun:  # the first of this process
            log_job_info()
        launched = os.environ.get(RUN_DIR_VARIABLE)  # the launcher counts by what is recorded there, and nowhere else
        if launched and run_dir and os.path.realpath(launched) != os.path.realpath(run_dir) and trainer.is_global_zero:
            log.warning(
                "This run was launched with --run-dir %s: run_dir=%s of its callbacks is not used.", launched, run_dir
            )
        path = place_of_run(trainer, run_dir)
        self.patience = Patience(self.advanced)
        """For storage that does not answer when the fit starts, or goes back."""
        self.run = RunDirectory(path)
        self.run_id: str
        # A copy is told from its original before anything in it is believed.
        path, self.run_id, other = self.from_rank_0(
            lambda: (str(self.run.path), self.run.identity(), self.run.enter(job()))
        )
        self.run = RunDirectory(path)  # rank 0's counts
        if other is not None:
            raise RuntimeError(
                f"Process {other} on this host trains in {path} now, and this one would take the run over. Wait for "
                "it, stop it with SIGTERM, or use another run_dir."
            )
        self.token: str
        self.nonce: str
        self.token, self.nonce = self.from_rank_0(lambda: (self.run.claim(), uuid.uuid4().hex[:12]))
        if trainer.num_nodes > 1:
            self._check_that_all_nodes_see_it()
        self.index = fits_begun.get(self.run.path, 0)
        fits_begun[self.run.path] = self.index + 1
        self.folder = self.run.fit(self.index)
        self.ledger = Ledger(self.run.ledger, self.rank)
        self.nodes = nodes_of(self.gather(neighbourhood()))
        """The ranks of every node, that of rank 0 first."""
        self.previous_outcome = self.from_rank_0(self.folder.begin)
        self.agreement = Agreement(
            self.rank,
            trainer.world_size,
            torch.distributed.distributed_c10d._get_default_store() if trainer.world_size > 1 else None,
            prefix=f"resilience/{self.run.path.name}/{self.index}/{trainer.world_size}/{self.nonce}",
            nodes=self.nodes,
            on_event=self._on_event,
        )
        self.metadata = {
            "run": self.run.path.name,
            "id": self.run_id,
            "fit": self.index,
            "world_size": trainer.world_size,
            "strategy": lightning_strategies.name_of(trainer.strategy),
            "attempt": self.token,
        }
        self.patches = lightning_patches.Patches()
        self.save_patches = lightning_patches.Patches()
        """Of what is put on the Trainer's saves: they come off last, since after an exception somebody may save."""

    def check_owner(self) -> None:
        """Raises :class:`StaleAttempt` if another attempt has taken over; called before anything is published."""
        self.run.check_owner(self.token)

    def check_owner_if_known(self) -> None:
        """The same before somebody else's save: that the run directory cannot be read does not end the training."""
        for pause_s in (*_READS_OWNER_AGAIN_AFTER_S, None):
            try:
                self.check_owner()
                return
            except OSError as error:
                if pause_s is None and not self._owner_unknown_said:
                    self._owner_unknown_said = True
                    log.warning("Checkpoints of the Trainer's other callbacks are saved all the same: %s", error)
            if pause_s is not None:
                time.sleep(pause_s)

    def from_rank_0(self, make: Callable[[], _T]) -> _T:
        """What rank 0 finds or makes on storage, on every rank. A collective.

        Args:
            make: Is called on rank 0, again while the storage fails.

        Raises:
            StorageFails: On every rank, if it goes on failing.
        """
        return from_rank_0(self.trainer, make, self.patience)

    @property
    def whoami(self) -> str:
        """This rank and its node, for a person."""
        return whoami(self.trainer)

    def _check_that_all_nodes_see_it(self) -> None:
        """Before anything is looked for in the run directory, or made: what is not mounted would seem to be empty."""
        problem = None
        with ExitStack() as signs:
            sign = self.from_rank_0(lambda: signs.enter_context(self.run.sign()))
            if self.trainer.local_rank == 0:
                try:
                    self.patience(lambda: self.run.look_for(sign), self.whoami)
                except OSError as error:
                    problem = f"{node_name()} ({error.strerror})"
            blind = [each for each in self.gather(problem) if each is not None]
        if blind:
            raise StorageFails(
                f"{self.run.path} is not one directory on all nodes: what rank 0 on {self.from_rank_0(node_name)} "
                f"writes there is not seen on {', '.join(blind)}. Mount the same storage there on every node."
            )

    def report_progress_to(self, progress: Progress) -> None:
        """Reports sections and positions to ``progress`` from now on: a watchdog reads it."""
        self.progress = progress

    def note_replicas_agreed(self) -> None:
        """Notes that replicas were compared and were equal: what differs later has not differed from the start."""
        self.replicas_agreed = True

    def enter(self, section: Section) -> None:
        """Notes that this rank is in a section of the fit."""
        if self.progress is not None:
            self.progress.enter(section)

    def stand_at(self, section: Section, position: Position) -> None:
        """Notes that this rank is at a boundary."""
        if self.progress is not None:
            self.progress.at(section, self.trainer.global_step, position)

    def during(self, section: Section) -> AbstractContextManager[None]:
        """Counts the time of a ``with`` block as ``section``."""
        return self.progress.during(section) if self.progress is not None else nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """What every rank has given, by rank; called on all of them.

        Raises:
            ValueError: If there is a tensor in it that is not in host memory; see :func:`~.safe_serialization.to_host`.
        """
        if (device := device_of(value)) is not None:
            raise ValueError(f"rank {self.rank} gives the others a tensor that is on {device}: copy it to the host")
        values: list[Any] = [value]
        if self.trainer.world_size > 1:
            values = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(values, value)
        return values

    def diverged(self, divergence: Divergence) -> None:
        """Ranks do not hold the same that should; called on rank 0, in any thread. What was saved of it counts not."""
        self.record_divergence(divergence)
        if handlers := self.participants.implement(Participant.on_divergence):
            for on_divergence in handlers:
                on_divergence(divergence)
        elif not self._divergence_said:
            self._divergence_said = True
            log.error(
                "After step %d %s. No checkpoint of it counts. With ReplicaCheck() among its callbacks the run goes "
                "back to the last one on which all ranks agreed.",
                divergence.step,
                divergence,
            )

    def record_divergence(self, divergence: Divergence) -> None:
        """Writes down that ranks do not hold the same that should."""
        if self.rank == 0:
            self.ledger.record(
                DivergenceFound(
                    fit=self.index,
                    step=divergence.step,
                    ranks=list(divergence.suspects),
                    groups=[list(ranks) for ranks in divergence.groups],
                    reason=str(divergence),
                )
            )

    def advanced(self) -> None:
        """To be called where something takes long and does advance, and no boundary says so."""
        if self.progress is not None:
            self.progress.tick()

    def _on_event(self, event: Event) -> None:
        for on_event_known in self.participants.implement(Participant.on_event_known):
            on_event_known(event)

    @property
    def saves_paused(self) -> bool:
        """Whether nothing is saved, the same on all ranks: the last steps were bad, and what was good is kept."""
        return any(pauses_saves() for pauses_saves in self.participants.implement(Participant.pauses_saves))

    @property
    def steps_counted(self) -> int:
        """Grows with every training batch begun and with every epoch begun, also when the fit goes back."""
        return self.counted_before + lightning_progress.steps_counted(self.trainer)


def from_rank_0(trainer: Trainer, make: Callable[[], _T], patience: Patience) -> _T:
    """See :meth:`FitContext.from_rank_0`."""

    def attempt() -> tuple[_T | None, str | None]:
        try:
            return patience(make, whoami(trainer)), None
        except OSError as error:
            return None, f"{whoami(trainer)}: {error}"

    made, problem = checkpoint_io.from_rank_zero(trainer.strategy, attempt)
    if problem is not None:
        raise StorageFails(f"{problem}. Nothing was moved or begun anew: start it again when the storage answers.")
    return cast(_T, made)


def whoami(trainer: Trainer) -> str:
    """A rank and its node, for log lines and errors."""
    return f"Rank {trainer.global_rank} on {node_name()}"


def place_of_run(trainer: Trainer, own: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Where the run directory is: the launcher counts by what is recorded in its own, and nowhere else."""
    return os.environ.get(RUN_DIR_VARIABLE) or own or os.path.join(trainer.default_root_dir, "resilience")


def job() -> str | None:
    """What all attempts of one job have in common; see :meth:`RunDirectory.enter`."""
    return LAUNCHED if os.environ.get(RUN_DIR_VARIABLE) else os.environ.get("TORCHELASTIC_RUN_ID")
