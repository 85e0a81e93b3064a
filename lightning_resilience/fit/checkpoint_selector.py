"""Which checkpoint a fit resumes from, over all tiers: the newest by its step that every rank can verify.

| tier | where | survives |
|---|---|---|
| local | storage of the node, each rank its own part | the end of a process |
| replica | another node's local storage | the loss of a node |
| global | the run directory | everything |

A generation of the local tier comes before a global checkpoint of the same step; where a part of it is missing or bad,
its replica is taken. All ranks decide together. What fails its verification goes into quarantine, with the reason; what
was condemned in its probation (:meth:`Tiers.mark_bad`) is never chosen again, nor is what belongs to a course that the
training has left. Storage that does not answer says nothing about what lies on it: it is waited for, then the start
fails, and nothing is moved.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_resilience._files import clean_temporaries
from lightning_resilience._lightning import lightning_callbacks, lightning_strategies
from lightning_resilience._lightning.lightning_strategies import name_of
from lightning_resilience.checkpoint import checkpoint_file, dcp, resume
from lightning_resilience.checkpoint.generations import Generation, is_on_course
from lightning_resilience.checkpoint.recovery import LocalTier
from lightning_resilience.checkpoint.safe_serialization import from_safe
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.outcome import ENDS_APART, FitOutcome
from lightning_resilience.run.events import (
    Finished,
    Fresh,
    MarkedBad,
    NotRestored,
    Quarantined,
    RestoredInPlace,
    Resumed,
)
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import AnotherFit, StorageFails

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

_T = TypeVar("_T")

"""In the details of a fit's outcome: whether a longer fit would not have come by its final state."""

MAX_CONDEMNED = 3
"""How many checkpoints of a tier may be condemned in a fit: by then the cause is not in the checkpoints.

Of the local tier: then the newest global one is tried. Of the global one, or when there is none left: the run ends.
"""


MAX_RESTORES = 2
"""How many attempts in a row may fail to restore one checkpoint; then it is condemned, though it verifies."""


class BadCheckpoint(RuntimeError):
    """The checkpoint that a fit has resumed from has turned out to be bad; the next start takes the one before it."""


@dataclass(frozen=True)
class _Loaded:
    """What the fit has resumed from: a generation of the local tier or the path of a global checkpoint."""

    step: int
    generation: str | None
    path: Path | None

    def __str__(self) -> str:
        return f"the local checkpoint of step {self.step}" if self.path is None else str(self.path)


class CheckpointSelector:
    """Chooses and verifies for one fit.

    Attributes:
        uses_global: Whether the run's own global checkpoints are candidates.
        local: The local tier, if there is one.
    """

    def __init__(self, fit: FitContext, outcome: FitOutcome) -> None:
        self._fit = fit
        self._outcome = outcome
        self.uses_global = False
        self.local: LocalTier | None = None
        self.complete: list[Generation] = []
        """The local generations that can still be resumed from, newest first, as of the resume."""
        self._probation_steps = 10
        self.loaded: _Loaded | None = None
        self.ended: dict[str, Any] | None = None
        """If that is a state from the end of the fit: how it had ended; see :meth:`.FitOutcome.ends_there`."""
        self.forks: list[int] = []
        """At which steps the fit has left a course for another one; see :func:`~.generations.is_on_course`."""
        self._left_lying: list[str] = []
        """Checkpoints that are passed over although they may be intact, the same on all ranks."""
        self._users_choice: str | None = None
        self._event: type[Resumed] | type[RestoredInPlace] = Resumed
        self._unsaid: Callable[[], None] | None = None

    def use_global_tier(self) -> None:
        """Resumes from the checkpoints in the run directory too."""
        self.uses_global = True

    def use_local_tier(self, tier: LocalTier, probation_steps: int) -> None:
        """Resumes from local checkpoints too.

        Args:
            tier: The local checkpoints of all nodes.
            probation_steps: For how many optimizer steps after a resume its checkpoint can be marked bad.
        """
        self.local, self._probation_steps = tier, probation_steps

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, explicit: str | None) -> tuple[Path, dict[str, Any] | None] | None:
        """The checkpoint that all ranks have verified and loaded; called on all ranks where Lightning would load one.

        Args:
            explicit: The user's ``fit(ckpt_path=...)``.

        Returns:
            Its path and content; no content where the strategy itself loads it; ``None`` for a fresh start.
        """
        fit = self._fit
        if self.local is None and not self.uses_global:
            return None
        zero = fit.trainer.is_global_zero
        paths, generations = self._paths(), self._generations()
        own = bool(paths or generations)
        if fit.from_rank_0(lambda: explicit is not None and self._is_users_choice(explicit, own)):
            if zero and own:
                log.info("The checkpoints of %s are not used: fit(ckpt_path=%r) wins.", fit.folder.path, explicit)
            self._users_choice, self.complete = explicit, []
            return None
        if zero:
            with contextlib.suppress(OSError):  # they harm nobody
                clean_temporaries(fit.folder.checkpoints)
        if own and fit.from_rank_0(self._mark_bad_what_is_not_restored):
            paths, generations = self._paths(), self._generations()
        finished = self._outcome.finished_before()
        if (choice := self._first_usable(paths, generations, finished)) is not None:
            return choice
        if zero:
            if finished or paths or generations or os.path.lexists(fit.folder.quarantine):
                log.warning("No checkpoint in %s can be used; this fit starts from the beginning.", fit.folder.path)
            elif fit.previous_outcome is not None:
                log.info("Nothing was saved yet in %s; this fit starts from the beginning.", fit.folder.path)
            else:
                log.info("Nothing to resume from in %s: a fresh start.", fit.folder.path)
            fit.ledger.record(Fresh(fit=fit.index))
        return None

    def newest(
        self, until: int, or_begin: bool, only_global: bool = False
    ) -> tuple[Path, dict[str, Any] | None] | None:
        """The newest checkpoint of this fit that all ranks can verify, in the middle of it; called on all ranks.

        What is newer is set aside: from here on the training takes another course.

        Args:
            until: Not one of a larger ``trainer.global_step`` than this.
            or_begin: Whether the fit goes back to its beginning if there is none.
            only_global: Whether the local tier had its tries.

        Returns:
            As :meth:`choose`; ``None`` if there is none.
        """
        if self.local is None and not self.uses_global:
            return None
        self._event = RestoredInPlace  # in the same processes: no interruption
        paths, generations = self._paths(), self._generations()
        choice = self._first_usable(
            [path for path in paths if resume.step_of(path) <= until],
            [each for each in generations if each.step <= until and not only_global],
            finished=False,
        )
        if choice is not None or or_begin:
            step = self.loaded.step if choice is not None and self.loaded is not None else -1
            reason = "the fit has gone back to an older one"
            self._leave_course(step)
            self.complete = [each for each in self.complete if each.step <= step and not only_global]
            if self.local is not None:
                self.local.discard({each.name for each in generations if each.step > step}, reason)
            if self._fit.trainer.is_global_zero:
                for path in paths:
                    if resume.step_of(path) > step and os.path.lexists(path):
                        self._set_aside(path, reason)
            self._fit.trainer.strategy.barrier("resilience newest")
        return choice

    @property
    def course(self) -> int:
        """The number of the course that the training is on."""
        return len(self.forks)

    def _leave_course(self, step: int) -> None:
        """Only what was saved up to ``step`` counts from now on, on whichever node it lies; called on all ranks."""
        self._fit.from_rank_0(lambda: self._write_fork(step))
        self.forks = [*self.forks, step]
        self._fit.metadata["course"] = self.course

    def _write_fork(self, step: int) -> None:
        self._fit.check_owner()
        self._fit.folder.forks = [*self.forks, step]

    def _paths(self) -> list[Path]:
        folder = self._fit.folder

        def look() -> list[Path]:
            folder.checkpoints.stat()  # it was made: what is missing now is not empty
            return resume.checkpoints(folder.checkpoints)

        return self._fit.from_rank_0(look) if self.uses_global else []

    def _first_usable(
        self, paths: list[Path], generations: list[Generation], finished: bool
    ) -> tuple[Path, dict[str, Any] | None] | None:
        self._left_lying = []
        for candidate in self._in_order(paths, generations, finished):
            if isinstance(candidate, Generation):
                choice = self._load_local(candidate)
            else:
                choice = self._load_global(candidate, finished)
            if choice is not None:
                return choice
        unread = [*self._left_lying, *(self.local.unreadable if self.local is not None else [])]
        if unread:
            raise StorageFails(
                f"No checkpoint of {self._fit.folder.path} can be used now, and some may be intact: {unread[0]}. "
                "Nothing was moved or begun anew: start it again when the storage answers. To begin anew all the same, "
                "move it away, or use another run directory."
            )
        return None

    def _is_users_choice(self, explicit: str, own: bool) -> bool:
        if (self._fit.folder.fingerprint or {}).get("ckpt_path") == explicit:
            return False  # where this fit once began: it goes on from its own newer checkpoint
        # ckpt_path="last" and "hpc" mean "resume": Lightning has made paths of them before it calls us. By itself it
        # takes what an OnExceptionCheckpoint has saved, which is a state in the middle of a step.
        of_exception = explicit in lightning_callbacks.exception_checkpoints(self._fit.trainer)
        means_resume = of_exception or Path(explicit).stem.startswith(("last", "hpc_ckpt_"))
        if own and not means_resume and self._is_newest_of_this_fit(Path(explicit)):
            means_resume = True
            log.warning(
                "fit(ckpt_path=%r) is the newest that a ModelCheckpoint of this very fit has saved there: that means "
                "to resume, which the fit does from its own newest state, exactly. To begin anew from that file, use "
                "another run directory.",
                explicit,
            )
        return not (means_resume and own)

    def _is_newest_of_this_fit(self, path: Path) -> bool:
        """Whether this fit has saved ``path`` through Lightning, and nothing later in the same folder.

        Scripts look for such a file at their start. One that names an older file, or a copy, goes back to it.
        """
        if (step := self._step_of_this_fit(path)) is None:
            return False
        return all((self._step_of_this_fit(each) or 0) <= step for each in path.parent.glob(f"*{path.suffix}"))

    def _step_of_this_fit(self, path: Path) -> int | None:
        try:
            stamp = _stamp(path)
        except (OSError, checkpoint_file.CorruptCheckpoint):
            return None
        mine = {"id": self._fit.run_id, "fit": self._fit.index, "saved_as": os.path.realpath(path)}
        if stamp is None or not mine.items() <= stamp.metadata.items():
            return None
        return stamp.metadata.get("step")

    def begin(self) -> None:
        """The training begins. If it does so from what the user has chosen, a restart goes on from there.

        What the fit has saved before belongs to another course of the training, and would be taken for its newest.
        """
        fit, chosen = self._fit, self._users_choice
        if chosen is None:
            return
        # A checkpoint of the fit's own, and those before it, are on the way to where it is.
        here = Path(chosen).absolute().parent == fit.folder.checkpoints.absolute()
        self._leave_course(fit.trainer.global_step if here else -1)

        def begin() -> None:
            for path in resume.checkpoints(fit.folder.checkpoints) if self.uses_global else []:
                if not here or path.name > Path(chosen).name:
                    self._set_aside(path, f"the fit was begun anew from {chosen}, which is not where this has led from")
            fit.folder.fingerprint = {**(fit.folder.fingerprint or {}), "ckpt_path": chosen}

        fit.from_rank_0(begin)

    def _set_aside(self, path: Path, reason: str) -> None:
        log.info("%s is set aside in %s: %s.", path.name, self._fit.folder.quarantine, reason)
        try:
            checkpoint_file.quarantine(path, self._fit.folder.quarantine, reason)
        except OSError as failure:
            log.warning("%s could not be moved to quarantine (%s); it is left where it is.", path, failure)

    def _generations(self) -> list[Generation]:
        """The local generations that can be used."""
        fit = self._fit
        # As rank 0 reads it: on shared storage others may still see what was there before.
        condemned, self.forks = fit.from_rank_0(lambda: (fit.folder.bad_checkpoints, fit.folder.forks))
        fit.metadata["course"] = self.course
        if self.local is None:
            return []
        self.local.discard(set(condemned), "condemned in its probation")
        usable, reasons = self.local.find(without=condemned, forks=self.forks)
        self._report_bad()
        if reasons and fit.trainer.is_global_zero:
            log.info("Local checkpoints that are not used: %s.", "; ".join(reasons))
        self.complete = usable
        return usable

    def _in_order(
        self, paths: list[Path], generations: list[Generation], finished: bool
    ) -> Iterator[Generation | Path]:
        """Newest first; on every rank the same."""
        # A limit may end a fit in the middle of an epoch, whose end Lightning then makes up. When it has been raised,
        # the longer run goes on exactly from a state before that end; from the end itself only if there is none.
        ended = not finished and any(map(resume.is_final, paths))
        stretched = ended and self._fit.from_rank_0(lambda: self._ends_apart(paths))

        # With all its steps done a fit is not run again by Lightning, which would leave out what had been left of it.
        given = self._fit.trainer.max_steps
        most = -1 if given is None else given

        def rank(candidate: Generation | Path) -> tuple[bool, int, bool, bool]:
            is_local = isinstance(candidate, Generation)
            step = candidate.step if isinstance(candidate, Generation) else resume.step_of(candidate)
            final = not isinstance(candidate, Generation) and resume.is_final(candidate)
            goes_on = not (final and stretched) and (final or not 0 <= most <= step)
            return goes_on, step, final, is_local

        candidates: list[Generation | Path] = [*paths, *generations]
        yield from sorted(candidates, key=rank, reverse=True)

    def _ends_apart(self, paths: list[Path]) -> bool:
        """Whether the fit as it is now would not come by its newest final state."""
        fit = self._fit
        path = next(filter(resume.is_final, paths), None)
        with contextlib.suppress(
            checkpoint_file.CorruptCheckpoint, KeyError, TypeError
        ):  # what is wrong with it is said later
            if path is not None and (stamp := _stamp(path)) is not None and "ended" in stamp.metadata:
                ended = stamp.metadata["ended"]
                return bool(ended[ENDS_APART]) and not self._outcome.ends_there(ended["by"], ended["limits"])
        outcome = fit.previous_outcome  # older versions have noted it there alone
        return outcome is not None and bool(outcome.details.get(ENDS_APART, outcome.reason == "max_steps"))

    def _load_local(self, generation: Generation) -> tuple[Path, dict[str, Any] | None] | None:
        assert self.local is not None
        fit = self._fit
        saved_at = self.local.saved_at(generation)  # no event was recorded then: local saves are too many
        checkpoint = self.local.load(generation)
        self._report_bad()
        if checkpoint is None:
            if fit.trainer.is_global_zero:
                log.warning("The local checkpoint of step %d is rejected. The next best one is tried.", generation.step)
            self.complete.remove(generation)
            return None
        name = f"step-{generation.step:012d}-{generation.name}"
        tier = "replica" if self.local.travelled else "local"
        self.loaded = _Loaded(generation.step, generation.name, None)
        if fit.trainer.is_global_zero:
            fit.ledger.record(
                self._event(
                    fit=fit.index,
                    step=generation.step,
                    path=name,
                    tier=tier,
                    generation=generation.name,
                    saved_at=saved_at,
                )
            )
            log.info("Resuming from step %d (local checkpoint %s).", generation.step, name)
        return Path(name), checkpoint

    def _load_global(self, path: Path, finished: bool) -> tuple[Path, dict[str, Any] | None] | None:
        fit, strategy = self._fit, self._fit.trainer.strategy
        is_directory, found, reason = fit.from_rank_0(lambda: self._look(path))  # before anybody else
        if is_directory and reason is None:
            mine, corrupt = self._try(lambda: self._verify(path, is_directory))
            found, reason = strategy.broadcast(mine), next(iter(corrupt.values()), None)
        course = int(found.metadata.get("course", 0)) if found is not None else 0
        if reason is None and not is_on_course(self.forks, course, resume.step_of(path)):
            if fit.rank == 0:
                self._set_aside(path, "it is of a course that the training has left")
            return None
        if found is not None and reason is None:
            _check_parts(path, is_directory, found.metadata.get("strategy"), strategy)
            verified, corrupt = self._verify_on_each_node(path, () if is_directory else found.file)
            if not corrupt:
                loaded, corrupt = self._try(lambda: _load(path, is_directory, verified))
            if not corrupt:
                # Without its final state a finished fit is resumed from an older one, and finished again.
                self.ended = ended = found.metadata.get("ended") if resume.is_final(path) else None
                # Where it was ended before that could be written down, its final state says so.
                finished |= bool(ended and ended["is_over"] and self._outcome.ends_there(ended["by"], ended["limits"]))
                self._restored(path, finished and resume.is_final(path))
                # Such a strategy reads a file of its own by itself, and takes nothing from what it is given.
                return path, None if lightning_strategies.traits_of(strategy).loads_state else loaded
            reason = corrupt.get(0)
        if reason is None:  # rank 0 has read every byte of it, and some other one reads something else
            self._left_lying += corrupt.values()
        elif fit.rank == 0:
            self._quarantine(path, reason)
        return None

    def _verify_on_each_node(self, path: Path, by_rank_0: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, str]]:
        """Has one rank of every other node read every byte of a file; all ranks of it load what that has verified.

        Not a copy of it in shared memory: the page cache is one already, which all ranks of the node have alike, which
        is given up when memory is wanted, and which nobody has to remove. Nor is the file mapped: where the storage
        fails, a process that reads is told, and one that touches a mapping is killed.

        Args:
            path: A file that rank 0 has verified, or a directory.
            by_rank_0: Which file it is there; empty for a directory.

        Returns:
            Which one it is on this rank's node, and by rank what is corrupt, as :meth:`_try`.
        """
        fit = self._fit
        node = next(ranks for ranks in fit.nodes if fit.rank in ranks)
        if not by_rank_0 or len(fit.nodes) == 1:
            return by_rank_0, {}

        def read() -> tuple[tuple[int, ...], str | None]:
            if fit.rank != node[0] or fit.rank == 0:
                return by_rank_0, None
            found, reason = self._verify(path, is_directory=False)
            return found.file if found is not None else (), reason

        mine, corrupt = self._try(read)
        return fit.gather(mine)[node[0]], corrupt

    def _look(self, path: Path) -> tuple[bool, checkpoint_file.Stamp | None, str | None]:
        """Whether it is a directory, and of a file also what :meth:`_verify` says. What is not there any more fails."""
        if not stat.S_ISDIR(path.stat().st_mode):
            return (False, *self._verify(path, False))
        sealed = os.path.lexists(path / checkpoint_file.MARKER)
        return True, None, None if sealed else f"{path} was never finished (no {checkpoint_file.MARKER} marker)"

    def _verify(self, path: Path, is_directory: bool) -> tuple[checkpoint_file.Stamp | None, str | None]:
        """What a checkpoint says about itself, or what is wrong with it."""
        fit = self._fit
        of_mine = functools.partial(dcp.is_share, rank=fit.rank, world_size=fit.trainer.world_size)
        seen = path / checkpoint_file.MARKER if is_directory else path  # by rank 0
        seen.stat()
        try:
            return resume.verify(path, {"fit": fit.index}, of_mine), None
        except checkpoint_file.CorruptCheckpoint as error:
            seen.stat()  # else it is not what is in it that is wrong
            return None, str(error)

    def _try(self, read: Callable[[], tuple[_T, str | None]]) -> tuple[_T, dict[int, str]]:
        """Reads a checkpoint on all ranks.

        Args:
            read: Reads this rank's; returns also why it is corrupt, if it is.

        Returns:
            This rank's, and by rank what is corrupt, the same on all.

        Raises:
            StorageFails: On all ranks, if one of them could not read its own.
        """
        fit = self._fit
        content: Any = None
        corrupt = unread = None
        try:
            content, corrupt = fit.patience(read, fit.whoami)
            if corrupt is not None:
                log.warning("Rank %d cannot read it (%s).", fit.rank, corrupt)
        except OSError as error:
            unread = f"{fit.whoami}: {error}"
        everywhere = fit.gather((corrupt, unread))
        if problem := next((each for _, each in everywhere if each is not None), None):
            raise StorageFails(
                f"The newest checkpoint cannot be read: {problem}. Nothing was moved or begun anew: start it again "
                "when the storage answers. If that file alone is lost, move it away, and an older one is taken."
            )
        return content, {rank: each for rank, (each, _) in enumerate(everywhere) if each is not None}

    def _quarantine(self, path: Path, reason: str) -> None:
        log.warning("Checkpoint rejected: %s. The next best one is tried.", reason)
        self._fit.ledger.record(Quarantined(fit=self._fit.index, path=str(path), reason=reason))
        try:
            checkpoint_file.quarantine(path, self._fit.folder.quarantine, reason)
        except OSError as failure:
            log.warning("%s could not be moved to quarantine (%s); it is left where it is.", path, failure)

    def _report_bad(self) -> None:
        assert self.local is not None
        for path, reason in self.local.bad:
            log.warning("Rank %d: local checkpoint rejected: %s.", self._fit.rank, reason)
            self._fit.ledger.record(Quarantined(fit=self._fit.index, path=path, reason=reason, tier="local"))
        self.local.bad.clear()

    def _restored(self, path: Path, finished: bool) -> None:
        fit = self._fit
        self.loaded = _Loaded(resume.step_of(path), None, path)
        if finished:
            fit.final_path = path
            fit.trainer.should_stop = True
        if self._outcome.had_finished and self._event is Resumed:
            self._unsaid = functools.partial(self._say_restored, path, finished)
        else:
            self._say_restored(path, finished)

    def settings_are_accepted(self) -> None:
        """A finished fit is restored for good: before, it may have turned out that the script has another one."""
        if self._unsaid is not None:
            self._unsaid()
            self._unsaid = None

    def _say_restored(self, path: Path, finished: bool) -> None:
        fit, step = self._fit, resume.step_of(path)
        if fit.trainer.is_global_zero:
            fit.ledger.record(self._event(fit=fit.index, step=step, path=str(path), tier="global"))
            if finished:
                fit.ledger.record(Finished(fit=fit.index, step=step))
                if not self._outcome.had_finished and self.ended is not None:
                    about = {**self.ended["limits"], ENDS_APART: self.ended[ENDS_APART]}
                    self._outcome.write("finished", self.ended["by"], about)
                log.info(
                    "This fit finished at step %d before; its final state is restored and it is not trained again. "
                    "To train more, raise %s; to train anew, use another run directory.",
                    step,
                    self._outcome.what_ended_it(),
                )
            else:
                log.info("Resuming from step %d (%s).", step, path)

    # -- what verifies and cannot be restored all the same -------------------------------------------------------------

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Notes for the next start if what was chosen cannot be restored; in this process the model is half loaded."""
        try:
            yield
        except BaseException as error:
            if self.loaded is not None and _says_something_about_the_state(error):
                reason = f"{type(error).__name__}: {error}"
                self._fit.ledger.record(
                    NotRestored(
                        fit=self._fit.index,
                        generation=self.loaded.generation,
                        attempt=self._fit.token,
                        kind=type(error).__name__,
                        reason=reason[:2000],
                        step=self.loaded.step,
                        path=str(self.loaded.path or ""),
                    )
                )
            raise

    def _mark_bad_what_is_not_restored(self) -> bool:
        """Condemns what the last attempts could not restore; returns whether there was any. Called on rank 0.

        Raises:
            BadCheckpoint: If too many were condemned.
        """
        fit = self._fit
        failed = read_history(fit.run.ledger).not_restored(fit.index, MAX_RESTORES)
        if failed is None or failed.step is None:
            return False
        path = Path(failed.path) if failed.path else None
        loaded = _Loaded(failed.step, failed.generation, path)
        if path is not None and not os.path.lexists(path):
            return False
        self.forks = fit.folder.forks
        reason = f"{MAX_RESTORES} attempts could not restore it ({failed.reason})"
        log.warning("%s is set aside, and the next best one is tried: %s.", loaded, reason)
        self._mark_bad(loaded, reason)
        if (too_many := self._too_many(reason)) is not None:
            raise BadCheckpoint(too_many)
        return True

    # -- probation -----------------------------------------------------------------------------------------------------

    @property
    def on_probation(self) -> bool:
        """Whether what goes wrong now may be the fault of the checkpoint that was loaded."""
        return self.is_suspect(self._fit.trainer.global_step)

    def is_suspect(self, step: int) -> bool:
        """Whether what has gone wrong after ``step`` may be the fault of the checkpoint that was loaded."""
        return self.loaded is not None and step - self.loaded.step <= self._probation_steps

    def mark_bad(self, reason: str) -> None:
        """Condemns the checkpoint that this fit has resumed from: it is never chosen again, by no attempt.

        Called by a rank that has found, within the probation, that the training cannot go on from there: a
        loss or gradients that are not finite, or a spike. It is kept in quarantine, and the next start of the fit takes
        the next best one.

        Args:
            reason: What was found, for a person.

        Raises:
            BadCheckpoint: Always; also if there is nothing to mark.
        """
        fit, loaded = self._fit, self.loaded
        if loaded is None or not self.on_probation:
            raise BadCheckpoint(f"{reason}, at step {fit.trainer.global_step}")
        self._mark_bad(loaded, reason)
        raise BadCheckpoint(
            f"{reason}, {fit.trainer.global_step - loaded.step} steps after resuming from {loaded}, which is "
            "condemned and will not be used again"
        )

    def mark_bad_together(self, reason: str, step: int) -> str | None:
        """Condemns what the fit has resumed from if that is on probation; called on all ranks, which go back then.

        Args:
            reason: What was found, for a person.
            step: ``trainer.global_step`` when it was found.

        Returns:
            Why the run should end instead; ``None`` if it need not.
        """
        loaded = self.loaded
        if loaded is None or not self.is_suspect(step):
            return None

        def mark_bad() -> str | None:
            log.warning("%s is condemned, and will not be used again: %s.", loaded, reason)
            self._mark_bad(loaded, reason)
            return self._too_many(reason)

        return self._fit.from_rank_0(mark_bad)

    def _mark_bad(self, loaded: _Loaded, reason: str) -> None:
        fit = self._fit
        fit.check_owner()
        name = loaded.generation or f"{loaded.path} ({fit.token[:8]})"
        fit.folder.mark_bad(name, reason)
        # What was saved since then has come from it. When the local tier has had its tries, nothing newer than the
        # newest global checkpoint counts.
        left = self._global_ones_left()
        of_local, _ = self._count_bad()
        has_had_its_tries = of_local >= MAX_CONDEMNED and loaded.generation is not None and left
        self._write_fork(min(loaded.step, left[0]) if has_had_its_tries else loaded.step)
        fit.ledger.record(MarkedBad(fit=fit.index, step=loaded.step, path=str(loaded), reason=reason))
        if loaded.path is not None:
            self._quarantine(loaded.path, f"{loaded.path} is condemned: {reason}")

    def verdict(self, exception: BaseException) -> str | None:
        """Whether the run ends by this exception: the reason, once too many checkpoints have been condemned."""
        if not isinstance(exception, BadCheckpoint):
            return None
        try:
            return self._too_many(str(exception))
        except OSError as error:  # then the next start counts
            log.warning("It cannot be read how many checkpoints have been condemned (%s).", error)
            return None

    def _too_many(self, last: str) -> str | None:
        of_local, of_global = self._count_bad()
        if of_global < MAX_CONDEMNED and (of_local + of_global < MAX_CONDEMNED or self._global_ones_left()):
            return None
        return (
            f"{of_local + of_global} checkpoints of this fit have been condemned, so the cause is not in the "
            f"checkpoints (last: {last}). Look at the data and the learning rate around this step; the checkpoints are "
            f"in {self._fit.folder.quarantine} and in the quarantine of the nodes"
        )

    def _count_bad(self) -> tuple[int, int]:
        """How many of the local tier and of the global one; the former have no path."""
        names = self._fit.folder.bad_checkpoints
        of_global = sum(os.sep in name for name in names)
        return len(names) - of_global, of_global

    def has_global(self, until: int) -> bool:
        """Whether there is a global checkpoint of at most this step, as rank 0 sees it."""
        return any(step <= until for step in self._global_ones_left())

    def _global_ones_left(self) -> list[int]:
        """The steps of the global checkpoints that are there, newest first."""
        if not self.uses_global:
            return []
        return [resume.step_of(path) for path in resume.checkpoints(self._fit.folder.checkpoints)]


def _stamp(path: Path) -> checkpoint_file.Stamp | None:
    """What a checkpoint says about itself; its content is not looked at."""
    return (
        checkpoint_file.verify_directory(path, lambda name: False)
        if path.is_dir()
        else checkpoint_file.read_stamp(path)
    )


def _says_something_about_the_state(error: BaseException) -> bool:
    """Whether an error may be the fault of what was restored, and not of this node, its storage or the script."""
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError, AnotherFit, StorageFails)):
        return False
    causes = getattr(error, "failures", None)  # by rank, of a collective load of torch.distributed.checkpoint
    if isinstance(causes, dict):
        return all(_says_something_about_the_state(each[0]) for each in causes.values())
    return isinstance(error, Exception)


def _check_parts(path: Path, is_directory: bool, saved_by: str | None, strategy: Any) -> None:
    """One file is read by every strategy; parts in a directory only by the one that has written them."""
    now = name_of(strategy)
    if is_directory and (not lightning_strategies.traits_of(strategy).loads_state or saved_by not in (None, now)):
        raise AnotherFit(
            f"{path} was saved in parts by {saved_by or 'a strategy that shards'}, and is not what "
            f"{now or type(strategy).__name__} reads. Go on with the strategy that has saved it, or give the run "
            "another directory."
        )


def _load(path: Path, is_directory: bool, verified: tuple[int, ...] = ()) -> tuple[dict[str, Any] | None, str | None]:
    """The content of a file, or what is wrong with it; neither of a directory, whose parts the strategy reads.

    Args:
        path: The checkpoint.
        is_directory: Which of the two it is.
        verified: Which file need not be verified here; see :func:`~.checkpoint_file.load`.

    Raises:
        OSError: If it cannot be read here. That says nothing about the file.
    """
    if is_directory:
        return None, None
    path.stat()  # rank 0 has read it: what is missing here is not seen here
    try:
        loaded = from_safe(checkpoint_file.load(path, verified=verified))
        if type(loaded) is not dict or "loops" not in loaded:
            raise ValueError("it does not hold the state of a fit")
        return loaded, None
    except checkpoint_file.CorruptCheckpoint as error:
        path.stat()  # as before
        return None, str(error)
    except ValueError as error:
        return None, f"checkpoint {path} cannot be used: {error}"
