"""Chooses the checkpoint that a fit resumes from, over all tiers: the newest by step that every rank can verify.

| tier | where | survives |
|---|---|---|
| local | storage of the node, each rank its own part | the end of a process |
| replica | another node's local storage | the loss of a node |
| global | the run directory | everything |

At the same step a local generation precedes a global checkpoint. A replica replaces a missing or bad shard. All ranks
decide together. A checkpoint that fails verification is quarantined, with the reason. A checkpoint that was marked bad
(:meth:`CheckpointSelector.mark_bad`) is never chosen again; neither is a checkpoint of a course that the training has
left. When storage does not respond, the start waits, then fails, and nothing is moved.
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
from typing import Any, TypeAlias, TypeVar

import torch

from lightning_resilience._files import clean_temporaries
from lightning_resilience._lightning import lightning_callbacks, lightning_checkpoints, lightning_strategies
from lightning_resilience._lightning.lightning_strategies import name_of
from lightning_resilience.checkpoint import checkpoint_file, dcp, resume
from lightning_resilience.checkpoint.generations import Generation, is_on_course
from lightning_resilience.checkpoint.recovery import LocalTier
from lightning_resilience.checkpoint.safe_serialization import from_safe
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.exact_state import STATE_KEY
from lightning_resilience.fit.identity import is_started_by_machine
from lightning_resilience.fit.outcome import ENDS_APART, FitOutcome
from lightning_resilience.launch import membership
from lightning_resilience.launch.script_errors import past_max_epochs
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
from lightning_resilience.run.settings import CONTINUE_VARIABLE

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Choice: TypeAlias = "tuple[Path, dict[str, Any] | None]"
"""A checkpoint's path and content; no content where the strategy itself loads the checkpoint."""

MAX_MARKED_BAD = 3
"""How many checkpoints of a tier may be marked bad in a fit. With more, the cause is not in the checkpoints.

After this many local ones, the newest global one is tried. After this many global ones, or without any left, the run
ends.
"""

MAX_RESTORES = 2
"""After how many failed attempts in a row to restore a checkpoint it is marked bad, although it verifies."""


class BadCheckpoint(RuntimeError):
    """Too many checkpoints of a fit were marked bad."""


@dataclass(frozen=True)
class _Loaded:
    """The checkpoint that the fit has resumed from: a local generation, or the path of a global checkpoint."""

    step: int
    generation: str | None
    path: Path | None

    def __str__(self) -> str:
        return f"the local checkpoint of step {self.step}" if self.path is None else str(self.path)


class CheckpointSelector:
    """Chooses and verifies the checkpoint of one fit.

    Attributes:
        uses_global: Whether the run's own global checkpoints are candidates.
        local: The local tier, if it is used.
    """

    def __init__(self, fit: FitContext, outcome: FitOutcome) -> None:
        self._fit = fit
        self._outcome = outcome
        self.uses_global = False
        self.local: LocalTier | None = None
        self.complete: list[Generation] = []
        """The local generations from which a resume was still possible when the checkpoint was chosen, newest first."""
        self._probation_steps = 10
        self.loaded: _Loaded | None = None
        self.ended: dict[str, Any] | None = None
        """How the fit had ended, if the checkpoint is its final state; see :meth:`.FitOutcome.ends_there`."""
        self.forks: list[int] = []
        """The steps at which the fit has left a course for another one; see :func:`~.generations.is_on_course`."""
        self._unreadable: list[str] = []
        """Why checkpoints that may be intact were skipped; equal on all ranks."""
        self._users_choice: str | None = None
        self._event: type[Resumed] | type[RestoredInPlace] = Resumed
        self._postponed: Callable[[], None] | None = None

    def use_global_tier(self) -> None:
        """Adds the checkpoints in the run directory to the candidates."""
        self.uses_global = True

    def use_local_tier(self, tier: LocalTier, probation_steps: int) -> None:
        """Adds local checkpoints to the candidates.

        Args:
            tier: The local checkpoints of all nodes.
            probation_steps: For how many optimizer steps after a resume its checkpoint can be marked bad.
        """
        self.local, self._probation_steps = tier, probation_steps

    def has_saved(self) -> bool:
        """Whether this rank sees a checkpoint to resume from, without verifying it."""
        with contextlib.suppress(OSError):
            if self.uses_global and resume.checkpoints(self._fit.folder.checkpoints):
                return True
            return self.local is not None and any(True for _ in self.local.store.shard_files())
        return False

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, explicit: str | None) -> Choice | None:
        """The newest checkpoint that all ranks can verify and load; ``None`` for a fresh start. A collective.

        Args:
            explicit: The user's ``fit(ckpt_path=...)``.
        """
        fit = self._fit
        if self.local is None and not self.uses_global:
            return None
        zero = fit.trainer.is_global_zero
        if zero:
            with contextlib.suppress(OSError):
                checkpoint_file.put_back_aside(fit.folder.checkpoints)
        paths, generations = self._saved()
        own = bool(paths or generations)

        def judge() -> tuple[bool, bool]:
            is_users = explicit is not None and self._is_users_choice(explicit, own)
            return is_users, own and not is_users and self._mark_bad_if_not_restorable()

        is_users_choice, was_marked = fit.from_rank_0(judge)
        if is_users_choice:
            if zero and own:
                log.info("The checkpoints of %s are not used: fit(ckpt_path=%r) wins.", fit.folder.path, explicit)
            self._users_choice, self.complete = explicit, []
            return None
        if zero:
            with contextlib.suppress(OSError):  # they do no harm
                clean_temporaries(fit.folder.checkpoints)
        if was_marked:
            paths, generations = self._saved()
        finished = self._outcome.finished_before()
        if (choice := self._first_usable(paths, generations, finished)) is not None:
            return choice
        if self.local is not None and self.local.of_others and not finished:
            self._begins_anew_beside(self.local.of_others[0])
        if zero:
            starts = f"this fit starts from {explicit or 'the beginning'}"
            if finished or paths or generations or os.path.lexists(fit.folder.quarantine):
                log.warning("No checkpoint in %s can be used; %s.", fit.folder.path, starts)
            elif (gone := self._saved_once()) is not None:
                what = "The checkpoints of %s are gone (the newest was of step %d); %s."
                log.warning(what, fit.folder.path, gone, starts)
            elif fit.previous_outcome is not None:
                log.info("Nothing was saved yet in %s; %s.", fit.folder.path, starts)
            else:
                log.info("Nothing to resume from in %s: %s.", fit.folder.path, starts if explicit else "a fresh start")
            fit.ledger.record(Fresh(fit=fit.index))
        return None

    def _begins_anew_beside(self, refused: str) -> None:
        """All local checkpoints were saved by other ranks or another strategy: perhaps a start with a wrong flag.

        Raises:
            AnotherFit: If a person can correct the start, or the run saves nothing but local checkpoints.
        """
        line = membership.current()
        if line is not None and line.generation > 0:
            return  # when all ranks are restarted, they can continue from it

        def goes_on() -> bool:
            return os.environ.get(CONTINUE_VARIABLE) == "1" or (self.uses_global and is_started_by_machine())

        if not self._fit.from_rank_0(goes_on):
            raise AnotherFit(
                f"The only checkpoints of {self._fit.folder.path} are local ones, and {refused}. Start the run as "
                f"before, or use another run directory (--run-dir, run_dir=). With {CONTINUE_VARIABLE}=1 the run "
                "begins anew here, and these checkpoints are removed"
            )
        if self._fit.trainer.is_global_zero:
            log.warning("The only checkpoints are local, and %s. They are removed once a new one is saved.", refused)

    def _saved_once(self) -> int | None:
        """The newest step of this fit saved to the run directory, as the ledger has it; ``None`` if none is known."""
        try:
            return read_history(self._fit.run.ledger).safe_step(fit=self._fit.index) if self.uses_global else None
        except OSError:
            return None

    def newest(self, until: int, or_begin: bool, only_global: bool = False) -> Choice | None:
        """The newest checkpoint to roll back to that all ranks can verify. A collective.

        Newer ones are set aside: the training starts another course.

        Args:
            until: The largest ``trainer.global_step``.
            or_begin: Whether the fit rolls back to its beginning if no such checkpoint exists.
            only_global: Whether to ignore local checkpoints.
        """
        if self.local is None and not self.uses_global:
            return None
        self._event = RestoredInPlace  # in the same processes: this is no interruption
        paths, generations = self._saved()
        choice = self._first_usable(
            [path for path in paths if resume.step_of(path) <= until],
            [each for each in generations if each.step <= until and not only_global],
            finished=False,
        )
        if choice is not None or or_begin:
            step = self.loaded.step if choice is not None and self.loaded is not None else -1
            reason = "the fit was rolled back to an older one"
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
        """Invalidates everything saved after ``step``, also on nodes that are absent now. A collective."""
        self._fit.from_rank_0(lambda: self._write_fork(step))
        self.forks = [*self.forks, step]
        self._fit.metadata["course"] = self.course

    def _write_fork(self, step: int) -> None:
        self._fit.check_owner()
        self._fit.folder.forks = [*self.forks, step]

    def _saved(self) -> tuple[list[Path], list[Generation]]:
        """The checkpoints in the run directory, and the local generations that can be used."""
        folder = self._fit.folder

        def look() -> tuple[list[Path], dict[str, str], list[int]]:
            paths = list[Path]()
            if self.uses_global:
                folder.checkpoints.stat()  # the fit created it: a missing folder must not pass for an empty one
                paths = resume.checkpoints(folder.checkpoints)
            return paths, folder.bad_checkpoints, folder.forks

        # Rank 0 reads for all ranks: on shared storage other ranks may see an older version.
        paths, marked_bad, self.forks = self._fit.from_rank_0(look)
        self._fit.metadata["course"] = self.course
        return paths, [] if self.local is None else self._generations(self.local, marked_bad)

    def _first_usable(self, paths: list[Path], generations: list[Generation], finished: bool) -> Choice | None:
        self._unreadable = []
        for candidate in self._in_order(paths, generations, finished):
            if isinstance(candidate, Generation):
                choice = self._load_local(candidate)
            else:
                choice = self._load_global(candidate, finished)
            if choice is not None:
                return choice
        unread = [*self._unreadable, *(self.local.unreadable if self.local is not None else [])]
        if unread:
            raise StorageFails(
                f"No checkpoint of {self._fit.folder.path} can be used now, but some may be intact: {unread[0]}. "
                "Nothing was moved: start again when the storage responds, or use another run directory."
            )
        return None

    def is_of_failed_step(self, explicit: str) -> bool:
        """Whether an OnExceptionCheckpoint saved ``explicit`` when this fit failed, in the middle of a step.

        Lightning resumes from such a file automatically.
        """
        if self.local is None and not self.uses_global:
            return False
        begun_from = (self._fit.folder.fingerprint or {}).get("ckpt_path")
        return begun_from != explicit and explicit in lightning_callbacks.exception_checkpoints(self._fit.trainer)

    def _is_users_choice(self, explicit: str, own: bool) -> bool:
        if (self._fit.folder.fingerprint or {}).get("ckpt_path") == explicit:
            return False  # this fit was started from that file: it resumes from its own newer checkpoint
        if not own:
            return True
        # ckpt_path="last" and "hpc" mean "resume"; Lightning has turned them into paths by now.
        if explicit in lightning_checkpoints.paths_to_resume_from(self._fit.trainer):
            return False
        path = Path(explicit)
        is_last = path.stem.startswith("last") and self._step_of_this_fit(path) is not None
        if is_last or self._is_newest_of_this_fit(path):
            what = f"fit(ckpt_path={explicit!r}) is the newest file of this fit's ModelCheckpoint"
            log.warning("%s: resuming the fit instead. To start from that file, use another run directory.", what)
            return False
        return True

    def _is_newest_of_this_fit(self, path: Path) -> bool:
        """Whether this fit has saved ``path`` through Lightning, and nothing later in the same folder.

        Scripts look for such a file when they start. If ``path`` is an older file or a copy, the fit starts from it.
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
        """Training begins. If it begins from a checkpoint that the user chose, later restarts resume from there.

        Older checkpoints of the fit belong to another course, so they are set aside: a restart would choose the newest.
        """
        fit, chosen = self._fit, self._users_choice
        if chosen is None:
            return
        # If the chosen checkpoint is one of the fit's own, the older ones belong to its course.
        here = Path(chosen).absolute().parent == fit.folder.checkpoints.absolute()
        self._leave_course(fit.trainer.global_step if here else -1)

        def begin() -> None:
            for path in resume.checkpoints(fit.folder.checkpoints) if self.uses_global else []:
                if not here or path.name > Path(chosen).name:
                    self._set_aside(path, f"the fit was started from {chosen}, which this fit did not save")
            fit.folder.fingerprint = {**(fit.folder.fingerprint or {}), "ckpt_path": chosen}

        fit.from_rank_0(begin)

    def _set_aside(self, path: Path, reason: str) -> None:
        log.info("%s is set aside in %s: %s.", path.name, self._fit.folder.quarantine, reason)
        self._move_to_quarantine(path, reason)

    def _quarantine(self, path: Path, reason: str) -> None:
        log.warning("Checkpoint rejected: %s; trying the next best one.", reason)
        self._fit.ledger.record(Quarantined(fit=self._fit.index, path=str(path), reason=reason))
        self._move_to_quarantine(path, reason)

    def _move_to_quarantine(self, path: Path, reason: str) -> None:
        try:
            checkpoint_file.quarantine(path, self._fit.folder.quarantine, reason)
        except OSError as failure:
            log.warning("%s could not be moved to quarantine (%s); it is left where it is.", path, failure)

    def _generations(self, local: LocalTier, marked_bad: dict[str, str]) -> list[Generation]:
        local.discard(set(marked_bad), "marked bad in its probation")
        usable, reasons = local.find(without=marked_bad, forks=self.forks)
        self._report_bad()
        if reasons and self._fit.trainer.is_global_zero:
            log.info("Local checkpoints that are not used: %s.", "; ".join(reasons))
        self.complete = usable
        return usable

    def _in_order(
        self, paths: list[Path], generations: list[Generation], finished: bool
    ) -> Iterator[Generation | Path]:
        """All candidates, newest first; equal on all ranks."""
        # A limit may end a fit in the middle of an epoch, and Lightning then ends that epoch early. When the limit is
        # raised, the longer run is exact only from a state before that end.
        ended = not finished and any(map(resume.is_final, paths))
        stretched = ended and self._fit.from_rank_0(lambda: self._ends_apart(paths))

        # Lightning does not run a fit whose steps are all done, so the remaining hooks of the fit would not be called.
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
        """Whether the fit with its present limits would not pass through its newest final state."""
        fit = self._fit
        path = next(filter(resume.is_final, paths), None)
        with contextlib.suppress(checkpoint_file.CorruptCheckpoint, KeyError, TypeError):  # reported when it is loaded
            if path is not None and (stamp := _stamp(path)) is not None and "ended" in stamp.metadata:
                ended = stamp.metadata["ended"]
                return bool(ended[ENDS_APART]) and not self._outcome.ends_there(ended["by"], ended["limits"])
        outcome = fit.previous_outcome  # older versions recorded it there
        return outcome is not None and bool(outcome.details.get(ENDS_APART, outcome.reason == "max_steps"))

    def _load_local(self, generation: Generation) -> Choice | None:
        assert self.local is not None
        fit = self._fit
        saved_at = self.local.saved_at(generation)  # the ledger has no event for each local save
        checkpoints = self.local.load(generation)
        self._report_bad()
        if checkpoints is None:
            if fit.trainer.is_global_zero:
                log.warning("The local checkpoint of step %d is rejected; trying the next best one.", generation.step)
            self.complete.remove(generation)
            return None
        step, name = generation.step, f"step-{generation.step:012d}-{generation.name}"
        saved_by = generation.world_size
        tier = "replica" if self.local.used_replica else "local"
        self.loaded = _Loaded(generation.step, generation.name, None)
        if fit.trainer.is_global_zero:
            where = generation.name
            event = self._event(fit=fit.index, step=step, path=name, tier=tier, generation=where, saved_at=saved_at)
            fit.ledger.record(event)
            ranks = "1 rank" if saved_by == 1 else f"{saved_by} ranks"
            others = "" if saved_by == fit.trainer.world_size else f", saved by {ranks}"
            log.info("Resuming from step %d (local checkpoint %s%s).", step, name, others)
        checkpoint = next(iter(checkpoints.values()))
        shards = {rank: each[STATE_KEY]["mine"] for rank, each in checkpoints.items()}
        checkpoint[STATE_KEY].update(shards=shards, saved_by=saved_by)
        return Path(name), checkpoint

    def _load_global(self, path: Path, finished: bool) -> Choice | None:
        fit, strategy = self._fit, self._fit.trainer.strategy
        is_directory, found, reason = fit.from_rank_0(lambda: self._look(path))  # before the other ranks read
        if is_directory and reason is None:
            mine, corrupt = self._try(lambda: self._verify(path, is_directory))
            found, reason = strategy.broadcast(mine), next(iter(corrupt.values()), None)
        course = int(found.metadata.get("course", 0)) if found is not None else 0
        if reason is None and not is_on_course(self.forks, course, resume.step_of(path)):
            if fit.rank == 0:
                self._set_aside(path, "it was saved before the training rolled back past it")
            return None
        if found is not None and reason is None:
            _check_strategy(path, is_directory, found.metadata.get("strategy"), strategy)
            verified, corrupt = self._verify_on_each_node(path, () if is_directory else found.file)
            if not corrupt:
                loaded, corrupt = self._try(lambda: _load(path, is_directory, verified))
            if not corrupt:
                # A finished fit without its final state resumes from an older one and finishes again.
                self.ended = ended = found.metadata.get("ended") if resume.is_final(path) else None
                # If the process died before it wrote the outcome, the final state shows that the fit had finished.
                finished |= bool(ended and ended["is_over"] and self._outcome.ends_there(ended["by"], ended["limits"]))
                self._restored(path, finished and resume.is_final(path))
                # A strategy that loads state reads its own file and ignores the content that it is given.
                return path, None if lightning_strategies.traits_of(strategy).loads_state else loaded
            reason = corrupt.get(0)
        if reason is None:  # intact for rank 0, but not for another rank
            self._unreadable += corrupt.values()
        elif fit.rank == 0:
            self._quarantine(path, reason)
        return None

    def _verify_on_each_node(self, path: Path, by_rank_0: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, str]]:
        """Has one rank of every other node verify a file; all ranks of that node load the verified file.

        The ranks of a node share the file through the page cache: a copy in shared memory would have to be removed. The
        file is not mapped either: when storage fails, reading raises, but touching a mapping kills the process.

        Args:
            path: A file that rank 0 has verified, or a directory.
            by_rank_0: What identifies the file on rank 0; empty for a directory.

        Returns:
            What identifies the file on this node; and, by rank, what is corrupt, as in :meth:`_try`.
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
        """Whether ``path`` is a directory; and for a file the result of :meth:`_verify`. Raises if it is missing."""
        if not stat.S_ISDIR(path.stat().st_mode):
            return (False, *self._verify(path, False))
        sealed = os.path.lexists(path / checkpoint_file.MARKER)
        return True, None, None if sealed else f"{path} was never finished (no {checkpoint_file.MARKER} marker)"

    def _verify(self, path: Path, is_directory: bool) -> tuple[checkpoint_file.Stamp | None, str | None]:
        """The stamp of a checkpoint, or why it is corrupt."""
        fit = self._fit
        of_mine = functools.partial(dcp.is_share, rank=fit.rank, world_size=fit.trainer.world_size)
        seen = path / checkpoint_file.MARKER if is_directory else path  # rank 0 has seen it
        seen.stat()
        try:
            stamp, step = resume.verify(path, {"fit": fit.index}, of_mine), resume.step_of(path)
        except checkpoint_file.CorruptCheckpoint as error:
            seen.stat()  # raises if the file is gone, which is no corruption
            return None, str(error)
        if (its := stamp.metadata.get("step", step)) != step:
            return None, str(checkpoint_file.corrupt(path, f"its step is {its!r}, not {step}"))
        return stamp, None

    def _try(self, read: Callable[[], tuple[_T, str | None]]) -> tuple[_T, dict[int, str]]:
        """Reads a checkpoint on all ranks.

        Args:
            read: Called on every rank; returns the result, and why the checkpoint is corrupt.

        Returns:
            The result of this rank; and, by rank, why the checkpoint is corrupt, equal on all ranks.

        Raises:
            StorageFails: On all ranks, if the storage of one rank did not respond.
        """
        fit = self._fit
        content: Any = None
        corrupt = unread = None
        try:
            content, corrupt = fit.patience(read, fit.whoami)
            if corrupt is not None:
                log.warning("Rank %d cannot read the checkpoint (%s).", fit.rank, corrupt)
        except OSError as error:
            unread = f"{fit.whoami}: {error}"
        everywhere = fit.gather((corrupt, unread))
        if problem := next((each for _, each in everywhere if each is not None), None):
            raise StorageFails(
                f"The newest checkpoint cannot be read: {problem}. Nothing was moved: start again when the storage "
                "responds. If only that file is lost, move it away, and an older checkpoint is used."
            )
        return content, {rank: each for rank, (each, _) in enumerate(everywhere) if each is not None}

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
            self._postponed = functools.partial(self._report_restored, path, finished)
        else:
            self._report_restored(path, finished)

    def settings_are_accepted(self) -> None:
        """Reports that a finished fit is restored; called when the script's settings are known to be accepted."""
        if self._postponed is not None:
            self._postponed()
            self._postponed = None

    def _report_restored(self, path: Path, finished: bool) -> None:
        fit, step = self._fit, resume.step_of(path)
        if not fit.trainer.is_global_zero:
            return
        fit.ledger.record(self._event(fit=fit.index, step=step, path=str(path), tier="global"))
        if not finished:
            log.info("Resuming from step %d (%s).", step, path)
            return
        fit.ledger.record(Finished(fit=fit.index, step=step))
        if not self._outcome.had_finished and self.ended is not None:
            about = {**self.ended["limits"], ENDS_APART: self.ended[ENDS_APART]}
            self._outcome.write("finished", self.ended["by"], about)
        log.info(
            "This fit already finished at step %d: its final state is restored, and it is not trained again. To "
            "train more, raise %s; to start anew, use another run directory.",
            step,
            self._outcome.what_ended_it(),
        )

    # -- checkpoints that verify but cannot be restored ----------------------------------------------------------------

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """If the chosen checkpoint cannot be restored, records that for the next start; this process must then end.

        Raises:
            AnotherFit: If the script must be changed first, so that the checkpoint is not to blame.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and (change := past_max_epochs(self._fit.trainer)) is not None:
                raise AnotherFit(change) from error  # Lightning's error, raised after it has restored the epoch
            if self.loaded is not None and _may_be_the_states_fault(error):
                kind, loaded = type(error).__name__, self.loaded
                self._fit.ledger.record(
                    NotRestored(
                        fit=self._fit.index,
                        generation=loaded.generation,
                        attempt=self._fit.token,
                        kind=kind,
                        reason=f"{kind}: {error}"[:2000],
                        step=loaded.step,
                        path=str(loaded.path or ""),
                    )
                )
            raise

    def _mark_bad_if_not_restorable(self) -> bool:
        """Marks a checkpoint bad that the last attempts could not restore; returns whether there was one. For rank 0.

        Raises:
            BadCheckpoint: If too many checkpoints were marked bad.
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
        log.warning("%s is set aside, trying the next best one: %s.", loaded, reason)
        self._mark_bad(loaded, reason)
        if (too_many := self._too_many(reason)) is not None:
            raise BadCheckpoint(too_many)
        return True

    # -- probation -----------------------------------------------------------------------------------------------------

    def is_suspect(self, step: int) -> bool:
        """Whether a problem after ``step`` may be caused by the checkpoint that was loaded."""
        return self.loaded is not None and step - self.loaded.step <= self._probation_steps

    def mark_bad(self, reason: str, step: int) -> str | None:
        """Marks the loaded checkpoint bad if it is on probation, before a rollback: no attempt loads it again.

        The checkpoint is kept in quarantine. A collective.

        Args:
            reason: The problem that was found.
            step: ``trainer.global_step`` when the problem was found.

        Returns:
            Why the run should end instead; ``None`` to continue.
        """
        loaded = self.loaded
        if loaded is None or not self.is_suspect(step):
            return None

        def mark_bad() -> str | None:
            log.warning("%s is marked bad and will not be used again: %s.", loaded, reason)
            self._mark_bad(loaded, reason)
            return self._too_many(reason)

        return self._fit.from_rank_0(mark_bad)

    def _mark_bad(self, loaded: _Loaded, reason: str) -> None:
        fit = self._fit
        fit.check_owner()
        name = loaded.generation or f"{loaded.path} ({fit.token[:8]})"
        fit.folder.mark_bad(name, reason)
        # Later states derive from this one. After too many bad local ones, only the newest global one and older count.
        left = self._global_ones_left()
        of_local, _ = self._count_bad()
        has_had_its_tries = of_local >= MAX_MARKED_BAD and loaded.generation is not None and left
        self._write_fork(min(loaded.step, left[0]) if has_had_its_tries else loaded.step)
        fit.ledger.record(MarkedBad(fit=fit.index, step=loaded.step, path=str(loaded), reason=reason))
        if loaded.path is not None:
            self._quarantine(loaded.path, f"{loaded.path} is marked bad: {reason}")

    def verdict(self, exception: BaseException) -> str | None:
        """Why the run must halt after this exception: too many checkpoints were marked bad; otherwise ``None``."""
        if not isinstance(exception, BadCheckpoint):
            return None
        try:
            return self._too_many(str(exception))
        except OSError as error:  # the next start counts them
            log.warning("Could not read how many checkpoints were marked bad (%s).", error)
            return None

    def _too_many(self, last: str) -> str | None:
        of_local, of_global = self._count_bad()
        if of_global < MAX_MARKED_BAD and (of_local + of_global < MAX_MARKED_BAD or self._global_ones_left()):
            return None
        return (
            f"{of_local + of_global} checkpoints of this fit were marked bad, so the cause is not in the checkpoints "
            f"(last: {last}). Look at the data and the learning rate around this step; the checkpoints are in "
            f"{self._fit.folder.quarantine} and in the quarantine of the nodes"
        )

    def _count_bad(self) -> tuple[int, int]:
        """How many local and global checkpoints were marked bad; names of local ones are not paths."""
        names = self._fit.folder.bad_checkpoints
        of_global = sum(os.sep in name for name in names)
        return len(names) - of_global, of_global

    def has_global(self, until: int) -> bool:
        """Whether a global checkpoint of at most this step exists; for rank 0."""
        return any(step <= until for step in self._global_ones_left())

    def _global_ones_left(self) -> list[int]:
        """The steps of the existing global checkpoints, newest first."""
        if not self.uses_global:
            return []
        return [resume.step_of(path) for path in resume.checkpoints(self._fit.folder.checkpoints)]


def _stamp(path: Path) -> checkpoint_file.Stamp | None:
    """The stamp of a checkpoint, without its content."""
    if path.is_dir():
        return checkpoint_file.verify_directory(path, lambda name: False)
    return checkpoint_file.read_stamp(path)


def _may_be_the_states_fault(error: BaseException) -> bool:
    """Whether the restored state may have caused an error, rather than this node, its storage or the script."""
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError, AnotherFit, StorageFails)):
        return False
    causes = getattr(error, "failures", None)  # by rank, of a collective load of torch.distributed.checkpoint
    if isinstance(causes, dict):
        return all(_may_be_the_states_fault(each[0]) for each in causes.values())
    return isinstance(error, Exception)


def _check_strategy(path: Path, is_directory: bool, saved_by: str | None, strategy: Any) -> None:
    """Raises if ``strategy`` cannot read it: every strategy reads a file, only the saving one a directory of shards."""
    now = name_of(strategy)
    if is_directory and (not lightning_strategies.traits_of(strategy).loads_state or saved_by not in (None, now)):
        raise AnotherFit(
            f"{path} was saved as shards by {saved_by or 'a sharded strategy'}, which {now or type(strategy).__name__} "
            "cannot read. Use the strategy that has saved it, or give the run another directory."
        )


def _load(path: Path, is_directory: bool, verified: tuple[int, ...] = ()) -> tuple[dict[str, Any] | None, str | None]:
    """The content of a file, or why it is corrupt; neither for a directory, which the strategy reads.

    Args:
        path: The checkpoint.
        is_directory: Whether it is a directory.
        verified: Identifies a file that need not be verified here; see :func:`~.checkpoint_file.load`.

    Raises:
        OSError: If it cannot be read here, which does not mean that the file is corrupt.
    """
    if is_directory:
        return None, None
    path.stat()  # rank 0 has read it: raises if this node does not see it
    try:
        loaded = from_safe(checkpoint_file.load(path, verified=verified))
        if type(loaded) is not dict or "loops" not in loaded:
            raise ValueError("it does not hold the state of a fit")
        return loaded, None
    except checkpoint_file.CorruptCheckpoint as error:
        path.stat()  # as above
        return None, str(error)
    except ValueError as error:
        return None, f"checkpoint {path} cannot be used: {error}"
