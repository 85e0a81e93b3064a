"""The context of one fit, as its participants see it: run directory, ranks, ledger, agreement."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lightning_resilience._files import OF_A_PATH, Patience
from lightning_resilience._lightning import lightning_patches, lightning_progress, lightning_strategies
from lightning_resilience.agreement import Agreement, neighbourhood, nodes_of
from lightning_resilience.agreement_protocol import Event, Position
from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.checkpoint.safe_serialization import device_of
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.hangs.progress import Progress, Section
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.elastic.group import DEFAULT
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.participant import Participant, Participants
from lightning_resilience.launch import membership
from lightning_resilience.launch.job_info import log_job_info
from lightning_resilience.run import events, time_account
from lightning_resilience.run.events import DivergenceFound
from lightning_resilience.run.ledger import Ledger, node_name
from lightning_resilience.run.run_directory import LAUNCHED, RUN_DIR_VARIABLE, RunDirectory, StaleAttempt, StorageFails

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
        run_dir: The run directory; default: the launcher's, or without a launcher ``resilience`` in the Trainer's
            ``default_root_dir``.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run_dir: str | os.PathLike[str] | None) -> None:
        self.trainer = trainer
        self.module = module
        self.rank: int = trainer.global_rank
        self.participants = Participants()
        self.has_rolled_back = False
        """Whether the fit was rolled back: the hooks of its start are called again."""
        self.progress: Progress | None = None
        """Where this rank reports what it is doing, if it is watched."""
        self.time = time_account.OF_PROCESS
        self.time.begin_fit(is_interactive=hasattr(sys, "ps1"))
        self.replicas_agreed = False
        """Whether replicas were compared and were equal; known on rank 0."""
        self.replicas_differ = False
        """Whether replicas were found to differ since the last rollback; known on rank 0, and where it is agreed on."""
        self.final_path: Path | None = None
        """The checkpoint of the final state, if there is one."""
        self.failing = False
        """Whether the fit ends with an exception: other ranks may be gone."""
        self.peer_is_lost = False
        """Whether the fit ends because other ranks have ended, or are ending: this rank waits for no other rank."""
        self.rank_0_may_go_ahead = False
        """Whether a rank was lost: rank 0, or its replacement, may claim the run before this rank has left the fit."""
        self.counted_before = 0
        """``steps_counted`` at the last rollback."""
        self._has_logged_divergence = False
        self._has_logged_owner_unknown = False

        if trainer.is_global_zero and not fits_begun:  # the first of this process
            log_job_info()
        launched = os.environ.get(RUN_DIR_VARIABLE)  # the launcher reads this ledger only
        if launched and run_dir and os.path.realpath(launched) != os.path.realpath(run_dir) and trainer.is_global_zero:
            log.warning(
                "This run was launched with --run-dir %s: ignoring run_dir=%s of its callbacks.", launched, run_dir
            )
        path = run_dir_of(trainer, run_dir)
        self.patience = Patience(self.advanced)
        """For storage that does not respond at the start of the fit or in a rollback."""
        self.run = RunDirectory(path)
        self.run_id: str
        self.token: str

        def enter() -> tuple[str, str, int | None, str]:
            # A copied directory gets its own identity before anything in it is read.
            run_id, other = self.run.identity(), self.run.enter(job())
            return str(self.run.path), run_id, other, self.run.claim() if other is None else ""

        path, self.run_id, other, self.token = self.from_rank_0(enter)
        self.run = RunDirectory(path)  # rank 0's counts
        if other is not None:
            raise RuntimeError(
                f"Process {other} on this host is training in {path}, and this process would take over its run. Wait "
                "for that process, stop it with SIGTERM, or use another run_dir."
            )
        self.nonce = self.token[:12]
        """In the names of what belongs to this start of the fit."""
        if trainer.num_nodes > 1:
            self._check_that_all_nodes_see_it()
        self.index = fits_begun.get(self.run.path, 0)
        fits_begun[self.run.path] = self.index + 1
        self.folder = self.run.fit(self.index)
        if trainer.is_global_zero and self.index > 0:
            self._warn_of_unfinished(self.index - 1)
        self.ledger = Ledger(self.run.ledger, self.rank, on_record=self._on_record)
        device = DeviceId.of(trainer.strategy.root_device)
        places = self.gather((neighbourhood(), (os.uname().nodename, trainer.node_rank), device))
        self.nodes = nodes_of([neighbourhood for neighbourhood, _, _ in places])
        """The ranks of every node, rank 0's node first."""
        self.locations = rank_locations([location for _, location, _ in places])
        """Where every rank has its storage."""
        self.devices: list[DeviceId] = [device for _, _, device in places]
        """What every rank computes on."""
        self.previous_outcome = self.from_rank_0(self.folder.begin)
        self.agreement = Agreement(
            self.rank,
            trainer.world_size,
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
        """Patches of the Trainer's saves, undone last: other callbacks may save after an exception."""

    def _warn_of_unfinished(self, last: int) -> None:
        """Warns if the last fit of this process has failed: a user may expect that this fit continues it."""
        with suppress(OSError):
            outcome = self.run.fit(last).outcome
            if outcome is not None and outcome.status == "failed":
                log.warning(
                    "The last fit of this process (fit-%03d) has failed, and fit() is called again. This call is the "
                    "next fit of the script (fit-%03d), with its own state. To continue the failed fit, start the "
                    "script again.",
                    last,
                    self.index,
                )

    def check_owner(self) -> None:
        """Checks that this process may publish; called before anything is published.

        Raises:
            StaleAttempt: If another attempt owns the run.
            PeerLost: If the state may be arbitrary, since collectives of a device were aborted; or if another
                generation of ranks has begun, and its rank 0 has learned of that before this rank.
        """
        DEFAULT.check_not_aborted()
        try:
            self.run.check_owner(self.token)
        except StaleAttempt:
            if not self.run.is_claimed_by_sibling():
                raise
            if not self.rank_0_may_go_ahead:
                membership.check_is_of_generation()
                raise

    def check_owner_if_known(self) -> None:
        """:meth:`check_owner` before another callback's save, which goes ahead if the run directory is unreadable."""
        for pause_s in (*_READS_OWNER_AGAIN_AFTER_S, None):
            try:
                self.check_owner()
                return
            except OSError as error:
                if pause_s is None and not self._has_logged_owner_unknown:
                    self._has_logged_owner_unknown = True
                    log.warning("Run ownership is unknown; checkpoints of other callbacks are saved anyway: %s", error)
            if pause_s is not None:
                time.sleep(pause_s)

    def from_rank_0(self, make: Callable[[], _T]) -> _T:
        """The result of ``make`` on rank 0, on every rank. A collective.

        Args:
            make: Called on rank 0; called again while the storage fails.

        Raises:
            StorageFails: On every rank, if the storage keeps failing.
        """
        return from_rank_0(self.trainer, make, self.patience)

    @property
    def whoami(self) -> str:
        """This rank and its node, for log lines and errors."""
        return whoami(self.trainer)

    def _check_that_all_nodes_see_it(self) -> None:
        """Raises if a node does not see the run directory, before it is used: unmounted, it would seem empty."""
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
                f"{self.run.path} is not the same directory on all nodes: files that rank 0 on "
                f"{self.from_rank_0(node_name)} writes are not visible on {', '.join(blind)}. Mount the same storage "
                "on every node."
            )

    def time_spent(self, spent: Mapping[int, time_account.Spent]) -> events.TimeSpent:
        """The time that ranks have spent, by category, as an event.

        Args:
            spent: The time account of each rank.
        """
        event, restart_count = time_account.time_spent(spent, {}), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        event.fit, event.attempt, event.world_size = self.index, self.token, self.trainer.world_size
        event.elastic_run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        event.restart_count = None if restart_count is None else int(restart_count)
        return event

    def enter(self, section: Section) -> None:
        """Reports that this rank enters a section of the fit."""
        if self.progress is not None:
            self.progress.enter(section)

    def stand_at(self, section: Section, position: Position) -> None:
        """Reports that this rank is at a boundary."""
        if self.progress is not None:
            self.progress.at(section, self.trainer.global_step, position)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time of a ``with`` block as time of a save."""
        with self.time.during(time_account.CHECKPOINT_SAVE), ExitStack() as section:
            if self.progress is not None:
                section.enter_context(self.progress.during("checkpointing"))
            yield

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. A collective.

        Raises:
            ValueError: If a tensor in ``value`` is not in host memory; see :func:`~.safe_serialization.to_host`.
        """
        if (device := device_of(value)) is not None:
            raise ValueError(f"rank {self.rank} gathers a tensor that is on {device}: copy it to the host")
        values: list[Any] = [value]
        if self.trainer.world_size > 1:
            values = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(values, value)
        return values

    def diverged(self, divergence: Divergence) -> None:
        """Handles replicas that differ; called on rank 0, in any thread. Checkpoints of that step do not count."""
        self.replicas_differ = True
        self.record_divergence(divergence)
        if handlers := self.participants.implement(Participant.on_divergence):
            for on_divergence in handlers:
                on_divergence(divergence)
        elif not self._has_logged_divergence:
            self._has_logged_divergence = True
            what = f"After step {divergence.step} {divergence}. No checkpoint of that step counts"
            log.error("%s. With ReplicaCheck() the run rolls back to the newest one on which all ranks agreed.", what)

    def record_divergence(self, divergence: Divergence) -> None:
        """Records that replicas differ."""
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
        """Reports progress between boundaries, during a long operation."""
        if self.progress is not None:
            self.progress.tick()

    def _on_event(self, event: Event) -> None:
        for on_event_known in self.participants.implement(Participant.on_event_known):
            on_event_known(event)

    def _on_record(self, event: events.Event) -> None:
        for on_record in self.participants.implement(Participant.on_record):
            on_record(event)

    @property
    def saves_paused(self) -> bool:
        """Whether saves wait, equal on all ranks: the last steps were bad, and older checkpoints must be kept."""
        return any(pauses_saves() for pauses_saves in self.participants.implement(Participant.pauses_saves))

    @property
    def steps_counted(self) -> int:
        """A count that grows with every training batch and every epoch begun, also after a rollback."""
        return self.counted_before + lightning_progress.steps_counted(self.trainer)


def from_rank_0(trainer: Trainer, make: Callable[[], _T], patience: Patience) -> _T:
    """See :meth:`FitContext.from_rank_0`."""

    def attempt() -> tuple[_T | None, str | None]:
        try:
            return patience(make, whoami(trainer)), None
        except OSError as error:
            then = "look at that path" if error.errno in OF_A_PATH else "start again when the storage responds"
            return None, f"{whoami(trainer)}: {error}. Nothing was moved: {then}."

    made, problem = checkpoint_io.from_rank_zero(trainer.strategy, attempt)
    if problem is not None:
        raise StorageFails(problem)
    return cast(_T, made)


def whoami(trainer: Trainer) -> str:
    """A rank and its node, for log lines and errors."""
    return f"Rank {trainer.global_rank} on {node_name()}"


def run_dir_of(trainer: Trainer, own: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The run directory: the launcher's, which reads no other ledger; or the callback's, or the default."""
    return os.environ.get(RUN_DIR_VARIABLE) or own or os.path.join(trainer.default_root_dir, "resilience")


def job() -> str | None:
    """An id that all attempts of a job share; see :meth:`RunDirectory.enter`."""
    return LAUNCHED if os.environ.get(RUN_DIR_VARIABLE) else os.environ.get("TORCHELASTIC_RUN_ID")
