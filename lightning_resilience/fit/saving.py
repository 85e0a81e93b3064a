"""Saves the state of all ranks to the run directory: at a boundary, or in the background."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from lightning_resilience._files import temporary_path
from lightning_resilience._formatting import format_bytes
from lightning_resilience._lightning import (
    lightning_checkpoints,
    lightning_limits,
    lightning_strategies,
)
from lightning_resilience._torch import local, own_store
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint import checkpoint_file, dcp, resume
from lightning_resilience.checkpoint.background import BackgroundSaves, Copy
from lightning_resilience.checkpoint.capacity import memory_left
from lightning_resilience.checkpoint.digest import digest_of
from lightning_resilience.checkpoint.own_state import OwnState
from lightning_resilience.checkpoint.safe_serialization import (
    MISSING,
    Entries,
    content,
    is_known_to_torch,
    is_rewritten,
    pack,
    safe_form,
    to_host,
    to_safe,
    unpack,
)
from lightning_resilience.checkpoint.sharded_save import (
    OF_OTHERS,
    Draft,
    Outcome,
    Save,
    ShardedSaves,
    without_numpy_numbers,
)
from lightning_resilience.checkpoint.store_messages import StoreMessages
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.fit import checkpoint_io
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.exact_state import STATE_KEY, ExactState
from lightning_resilience.fit.participant import Participant
from lightning_resilience.run.events import Saved, SaveFailed, SaveRefused
from lightning_resilience.run.history import read_history
from lightning_resilience.run.run_directory import StaleAttempt

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_PATIENCE = 0.8  # of the timeout of the collective in which the other ranks wait
_Reporter: TypeAlias = "Callable[[Outcome, list[str]], None]"

_COLLECTIVE_TIMEOUT_S = 1800.0  # torch's default
_LOG_SAVED_EVERY_S = 60.0  # a line for every save would fill the log of a long run
_SLOW_S = 5.0
_SLOW_FACTOR = 3
_LOGGED_ELSEWHERE = ("preemption", "straggler", "before the end")
_LAST_SAVE_S = 120.0  # for a write in progress when a fit ends


@dataclass(frozen=True)
class _Collected:
    """The state of a boundary, as collected from all ranks.

    Args:
        checkpoint: Lightning's checkpoint, without the shards that every rank writes itself.
        own: The state that differs between ranks.
        given: What each rank has given of its own state, as all ranks have gathered it.
        writes: Whether this rank writes the checkpoint.
        draft: The shards of this rank, if it writes any.
        plan: Whether the shards must be planned anew.
        written: The temporary directory of the shards.
        is_busy: Whether a rank is still writing the previous checkpoint.
        no_memory: Why a rank has no memory for a copy.
        digests: By rank, a digest of the state that should be equal on all ranks.
    """

    checkpoint: Entries
    own: OwnState
    given: list[bytes | None]
    writes: bool
    draft: Draft | None
    plan: bool
    written: Path
    is_busy: bool
    no_memory: str | None
    digests: list[str]

    def complete(self, checkpoint: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
        """Adds the own state of all ranks to ``checkpoint``, and the names of missing parts to ``left_out``.

        Raises:
            RuntimeError: If the state of another rank has not arrived.
        """
        if self.writes:
            checkpoint[STATE_KEY]["ranks"], missing = self.own.of_all()
            left_out += missing
        return checkpoint


class SaidSaves:
    """Chooses which saves are logged: the first, then at most one a minute, and each one much slower than that one."""

    def __init__(self) -> None:
        self._next_at = -math.inf
        self._unsaid = 0
        self._last_s = math.inf

    def line(self, step: int, path: Path, seconds: float, reason: str, now: float) -> str | None:
        """The log line of a save; ``None`` if it is not logged.

        Args:
            step: The step of the save.
            path: The path of the checkpoint.
            seconds: How many seconds the save took.
            reason: Why the state was saved.
            now: The present time in seconds, of any clock.
        """
        is_slow = seconds > max(_SLOW_S, _SLOW_FACTOR * self._last_s)
        if now < self._next_at and not is_slow:
            self._unsaid += 1
            return None
        slow = f", the last one logged in {self._last_s:.1f} s" if is_slow else ""
        more = f"; {self._unsaid} more since the last line" if self._unsaid else ""
        self._next_at, self._unsaid, self._last_s = now + _LOG_SAVED_EVERY_S, 0, seconds
        return f"Saved step {step} to {path} in {seconds:.1f} s{slow} ({reason}{more})."


class Saver:
    """Saves the state of one fit.

    Attributes:
        is_dumping: Whether Lightning is collecting the state for one of the run's own checkpoints.
        has_saved_async: Whether a checkpoint of this fit was written in the background: its duration does not show how
            long a save blocks the training.
    """

    def __init__(self, fit: FitContext, exact: ExactState) -> None:
        self._fit = fit
        self._exact = exact
        self.is_dumping = False
        self.has_saved_async = False
        self._messages = StoreMessages(lambda: own_store(f"resilience/saves/{fit.nonce}"))
        self._number = 0
        self._shards: ShardedSaves | None = None
        self._background: BackgroundSaves | None = None
        self._lost: Callable[[], None] = lambda: None
        self._no_memory: str | None = None
        self._warned: set[str] = set()
        self._said = SaidSaves()
        self._read_back = True

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Marks hooks of a save as not called for a checkpoint of the user."""
        self.is_dumping = True
        try:
            yield
        finally:
            self.is_dumping = False

    def save(self, reason: str, final: bool = False) -> Path | None:
        """Publishes the state of all ranks at this boundary. A collective.

        Args:
            reason: Why, for the ledger.
            final: Whether the fit has ended.

        Returns:
            The checkpoint; ``None`` if it was not saved, and the run continues with the older ones.
        """
        self._begins()
        with self._fit.saving():
            with suppress(TimeoutError):  # reported below, on all ranks
                self.wait()
            if not self.may_save(self._fit.folder.checkpoints):
                return None
            state = self._collect(final)
            if state is not None and state.is_busy:
                self._report_failed(f"the previous one has not been written within {self._patience_s:.0f} s")
                return None
            path = None if state is None or not self._agree(state) else self._save(reason, final, state)
            if path is not None and not final:
                self._saved()
        return path

    def save_async(self, reason: str, published: Callable[[], None], lost: Callable[[], None]) -> None:
        """Like :meth:`save`, but the checkpoint is written in the background. A collective.

        Skipped while the previous checkpoint is still being written. The training waits for the save if there is no
        memory for a copy of the state, and with custom strategies whose ranks write together.

        Args:
            reason: Why, for the ledger.
            published: Called on rank 0, in any thread, when the checkpoint is published.
            lost: Called on rank 0 at a later boundary if the snapshot was invalidated.
        """
        self._begins()
        background = self._open_background()
        started = time.monotonic()
        with self._fit.saving():
            if not self.may_save(self._fit.folder.checkpoints):
                return
            state = self._collect(final=False)
            if state is None or not self._agree(state):
                return
            is_first = self._fit.rank == 0
            if state.is_busy:
                if is_first:
                    self._warn_once(
                        "skipped save",
                        f"A checkpoint is still being written: skipping the save of step {self._step}, and later "
                        "saves that come too soon. Save less often, or to faster storage.",
                    )
                return
            if background is None or state.no_memory is not None:
                if is_first and state.no_memory is not None:
                    self._warn_once(
                        "no memory",
                        "Training waits for its saves to the run directory: not enough memory for a copy of the state "
                        f"({state.no_memory}). Give the job more memory, or set async_save=False.",
                    )
                if self._save(reason, False, state) is None:
                    return
                if is_first:
                    published()
            else:
                if is_first:
                    self._lost = lost
                self.has_saved_async = True
                step, path = self._step, self._path(False)

                def report(outcome: Outcome, left_out: list[str]) -> None:
                    if self._fit.rank > 0 and outcome.how != "stale":
                        return
                    if outcome.how == "invalidated":
                        background.invalidated = True
                    elif self._report(outcome, step, path, reason, started, left_out):
                        published()

                self._begin(background, state, report)
            self._saved()

    def _begins(self) -> None:
        for before_save in self._fit.participants.implement(Participant.before_save):
            before_save()

    def _saved(self) -> None:
        for after_save in self._fit.participants.implement(Participant.after_save):
            after_save(False)

    def _begin(self, background: BackgroundSaves, state: _Collected, report: _Reporter) -> None:
        step, path = self._step, self._path(False)
        state.own.send(state.given, self._patience_s)
        live = lightning_strategies.live_tensors(self._fit.trainer)
        # Gathered tensors are copies already.
        gathers = lightning_strategies.traits_of(self._fit.trainer.strategy).gathers_state_dict
        if self._shards is not None and state.draft is not None:
            self._begin_shards(background, self._shards, state, state.draft, live, report)
        elif self._fit.rank == 0:
            whole = state.checkpoint.of
            apart = {name: whole[name] for name in ("state_dict", "optimizer_states") if gathers}
            structure, gathered, missing = pack(Entries(apart))
            gathered = lightning_strategies.clone_live_tensors(self._fit.trainer, gathered)

            def write(copied: Copy) -> None:
                left_out = [*copied.left_out, *missing]

                def content() -> dict[str, Any]:
                    made = {**safe_form(copied.structure, copied.tensors), **safe_form(structure, gathered)}
                    return state.complete(made, left_out)

                report(self._write_file(content, path, step), left_out)

            try:
                rest = Entries({name: each for name, each in whole.items() if name not in apart})
                background.take(rest, live, write)
            except Exception as error:
                report(_failed(error), [])

    def _begin_shards(
        self,
        background: BackgroundSaves,
        shards: ShardedSaves,
        state: _Collected,
        draft: Draft,
        live: list[torch.Tensor],
        report: _Reporter,
    ) -> None:
        save = Save(self._path(False), state.written, {**self._fit.metadata, "step": self._step})

        def miss(error: BaseException | None) -> None:  # the other ranks wait for this report
            report(shards.write(save, None, None, None if error is None else repr(error)), [])

        def write(copied: Copy) -> None:
            left_out = copied.left_out.copy()
            try:
                part = unpack(copied.structure["part"], copied.tensors)
                rest = safe_form(copied.structure["rest"], copied.tensors)
                rest = None if rest is None else state.complete(rest, left_out)
            except Exception as error:
                miss(error)
            else:
                part.update(gathered)
                report(shards.write(save, part, rest, read_back=self._read_back), left_out)

        part, gathered = shards.part(draft, state.plan), {}
        if lightning_strategies.traits_of(self._fit.trainer.strategy).gathers_state_dict:
            part, gathered = {}, lightning_strategies.clone_live_tensors(self._fit.trainer, part)
        rest = state.checkpoint if self._fit.rank == 0 else None
        try:
            background.take({"part": part, "rest": rest}, live, write, miss)
        except Exception as error:
            miss(error)

    def _open_background(self) -> BackgroundSaves | None:
        if not lightning_strategies.traits_of(self._fit.trainer.strategy).can_save_async:
            return None
        if self._background is None:
            self._background = BackgroundSaves(self._fit.advanced)
            self._no_memory = self._memory_problem()
        return self._background

    def _memory_problem(self) -> str | None:
        """Why there is no memory for a copy of what this rank writes; ``None`` if there is."""
        trainer = self._fit.trainer
        shares = lightning_strategies.traits_of(trainer.strategy).shards_under is not None
        if not shares and self._fit.rank > 0:
            return None  # it copies nothing
        live = {id(tensor): local(tensor).nbytes for tensor in lightning_strategies.live_tensors(trainer)}
        # The ranks of a node copy at the same time. A tenth more, for data that is written but not on disk yet.
        needed = sum(live.values()) * (trainer.num_devices if shares else 1) * 11 // 10
        room = memory_left()
        if needed <= room.nbytes:
            return None
        return f"{format_bytes(needed)} needed on a node, and {format_bytes(room.nbytes)} are available ({room.limit})"

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", message)

    def last_save_s(self) -> float | None:
        """How long the last save to the run directory took, in seconds; ``None`` if that is not known."""
        try:
            return read_history(self._fit.run.ledger).last_save_s
        except OSError as error:  # the other ranks wait
            log.warning("Could not read the duration of the last save (%s).", error)
            return None

    @property
    def _patience_s(self) -> float:
        """How long a write may take while the other ranks wait for this one in a collective."""
        return _PATIENCE * (lightning_strategies.collective_timeout(self._fit.trainer) or _COLLECTIVE_TIMEOUT_S)

    def fence(self) -> None:
        """Called before the training changes tensors that a snapshot takes for stable."""
        if self._background is not None:
            self._background.fence()

    def wait(self) -> None:
        """Waits for the write in the background.

        Raises:
            TimeoutError: If it does not end in time.
        """
        if self._background is not None and not self._background.wait(self._patience_s):
            raise TimeoutError(f"no checkpoint was written within {self._patience_s:.0f} s: does the storage respond?")

    def close(self) -> None:
        """Waits at the end of a fit, for two minutes at most, and stops the background writer."""
        if self._fit.failing:
            self._messages.hurry()
        if self._background is not None:
            with self._fit.saving():
                self._background.close(_LAST_SAVE_S)

    def waits(self) -> bool:
        """Whether a due save must wait because the last steps of a rank were bad. A collective.

        ``saves_paused`` may be read before the verdict about a step is known. A save before that verdict would remove
        an older checkpoint, perhaps the last one from before the bad steps.
        """
        asked = self._fit.participants.implement(Participant.looks_bad)
        return bool(asked) and any(self._fit.gather(any(looks_bad() for looks_bad in asked)))

    def may_save(self, path: str | os.PathLike[str]) -> bool:
        """Whether the state of all ranks may be saved; logs why not. A collective if a participant checks the state.

        Args:
            path: Where it would be saved, for the log.
        """
        checks = self._fit.participants.implement(Participant.check_state)
        if not checks:
            return True
        problem = None
        try:
            for check_state in checks:
                check_state(lightning_strategies.named_state(self._fit.trainer))
        except ValueError as error:
            problem = f"rank {self._fit.rank}: {error}"
        except Exception as error:  # the other ranks wait in the collective below
            log.debug("The state could not be checked", exc_info=True)
            problem = f"rank {self._fit.rank}: it could not be checked ({type(error).__name__}: {error})"
        everywhere = [problem] if self._fit.failing else self._fit.gather(problem)  # failing: others may have ended
        problems = [each for each in everywhere if each is not None]
        if problems and self._fit.rank == 0:
            log.error("The state of step %d is not saved in %s: %s.", self._step, path, problems[0])
            self._fit.ledger.record(SaveRefused(fit=self._fit.index, step=self._step, reason=problems[0]))
        if problems and not self._fit.failing and (divergence := self.compare()) is not None and self._fit.rank == 0:
            self._fit.diverged(divergence)
        return not problems

    def compare(self) -> Divergence | None:
        """Compares the replicated state of all ranks, where they should hold the same. A collective."""
        if not self._fit.participants.ranks_agree():
            return None
        return self._divergence(self._fit.gather(self._digest()))

    def _divergence(self, digests: Sequence[str]) -> Divergence | None:
        return Divergence.between(self._step, digests, max(1, lightning_strategies.group_size(self._fit.trainer)))

    def _digest(self) -> str:
        try:
            return "".join(digest() for digest in self._fit.participants.implement(Participant.digest))
        except Exception as error:  # the other ranks wait in a collective
            log.warning("Rank %d cannot compare its state with the other ranks (%r).", self._fit.rank, error)
            return ""

    def _agree(self, state: _Collected) -> bool:
        """Whether the replicated state is equal on all ranks."""
        divergence = self._divergence(state.digests)
        if self._fit.rank == 0:
            if divergence is not None:
                self._fit.diverged(divergence)
            elif "" not in state.digests:
                self._fit.replicas_agreed = True
        return divergence is None

    def at_boundary(self) -> None:
        """Raises errors of the background writer."""
        if (background := self._background) is not None:
            background.check()
            if background.invalidated and not background.busy:
                background.invalidated = False
                self._lost()

    @property
    def _step(self) -> int:
        return self._fit.trainer.global_step

    def _path(self, final: bool) -> Path:
        return self._fit.folder.checkpoints / resume.checkpoint_name(self._step, final)

    def _collect(self, final: bool) -> _Collected | None:
        """The state of this boundary, and what all ranks report about it. A collective.

        Returns:
            ``None`` if a rank could not collect its state: an error in a hook of the user does not end the training.
        """
        fit, trainer = self._fit, self._fit.trainer
        traits = lightning_strategies.traits_of(trainer.strategy)
        under = traits.shards_under
        if self._shards is None and under is not None:
            ranks = fit.rank, trainer.world_size
            self._shards = ShardedSaves(*ranks, self._messages, fit.gather, fit.check_owner)
        checkpoint: dict[str, Any] = {}
        entries = Entries(checkpoint)
        draft, problem = None, None
        self._number += 1
        own = OwnState(self._messages, self._number, fit.rank)
        try:
            structure, tensors, left_out = pack(_own_entries(to_host(self._exact.own_state(final))))
            own.keep(structure, tensors, left_out)  # left_out grows below
            dump = (
                lightning_checkpoints.dump_checkpoint
                if self._shards is None
                else lightning_checkpoints.dump_sharded_checkpoint
            )
            checkpoint = self._checkpoint_with(dump, {}, final)
            if self._shards is not None and under is not None:
                sharded, unkept = _sharded_entries(checkpoint, under)
                shards, missing = to_safe(sharded)
                left_out += [*unkept, *missing]
                draft = self._shards.draft(shards)
            entries = _entries(checkpoint)
        except Exception as error:
            log.debug("The state could not be collected", exc_info=True)
            problem = f"rank {fit.rank}: {type(error).__name__}: {error}"
        # Rank 0 writes the own state of all ranks; if the strategy is unknown, all ranks do.
        is_first, by_all = fit.rank == 0, not traits.can_save_async
        first = None if by_all else trainer.strategy.broadcast(own.digests() if is_first else None)
        met = fit.gather(
            {
                "own": own.give(first),
                "problem": problem,
                "busy": self._background is not None and self._background.busy,
                "no_memory": self._no_memory,
                "written": str(temporary_path(self._path(final))) if is_first else "",
                "new": draft is not None and draft.is_new,
                "digest": self._digest(),
            }
        )
        if (problem := next((each["problem"] for each in met if each["problem"] is not None), None)) is not None:
            self._report_failed(f"its state could not be collected: {problem}")
            return None
        return _Collected(
            entries,
            own,
            [each["own"] for each in met],
            is_first or by_all,
            draft,
            plan=any(each["new"] for each in met),
            written=Path(met[0]["written"]),
            is_busy=any(each["busy"] for each in met),
            no_memory=next((each["no_memory"] for each in met if each["no_memory"] is not None), None),
            digests=[each["digest"] for each in met],
        )

    def _checkpoint_with(
        self, dump: Callable[[Trainer], dict[str, Any]], ranks: dict[str, Any], final: bool
    ) -> dict[str, Any]:
        before = self._exact.before_evaluation
        with self.dumping():
            checkpoint = dump(self._fit.trainer)
        if before is not None:
            checkpoint["loops"]["fit_loop"].update(before["progress"])
        state = {
            "version": 1,
            **ranks,
            "due": "validation" if before is not None else None,
            "final": final,
            "arrival_order": self._exact.arrival_order,
            "left_out": MISSING,
        }
        return {**checkpoint, STATE_KEY: state}

    def _save(self, reason: str, final: bool, state: _Collected) -> Path | None:
        trainer, started = self._fit.trainer, time.monotonic()
        path, outcome = self._path(final), Outcome("published")
        left_out: list[str] = []
        state.own.send(state.given, self._patience_s)

        def checkpoint() -> dict[str, Any]:
            rewritten, missing = to_safe(state.checkpoint)
            left_out.extend(missing)
            return state.complete(rewritten, left_out)

        if self._shards is not None and state.draft is not None:
            save = Save(path, state.written, {**self._fit.metadata, "step": self._step})
            part: dict[str, Any] | None = self._shards.part(state.draft, state.plan)
            rest, missed = None, None
            try:
                rest = to_host(checkpoint())
            except Exception as error:  # the other ranks wait for this report
                part, missed = None, repr(error)
            outcome = self._shards.write(save, part, rest, missed, self._read_back)
        elif lightning_strategies.traits_of(trainer.strategy).all_ranks_write:

            def write() -> None:
                content = checkpoint_io.on_every_rank(trainer.strategy, checkpoint)
                with checkpoint_io.own_files(trainer.strategy, self._fit.check_owner, self._fit.metadata):
                    trainer.strategy.save_checkpoint(content, path)
                if trainer.is_global_zero and self._read_back:
                    _check_readable(path)

            outcome = _outcome_of(write)
        elif trainer.is_global_zero:
            outcome = self._write_file(checkpoint, path, self._step)
        if self._shards is None:  # every rank must know whether it is published before it continues
            outcome = trainer.strategy.broadcast(outcome)
        self._report(outcome, self._step, path, reason, started, left_out)
        return path if outcome.how == "published" else None

    def _write_file(self, checkpoint: Callable[[], dict[str, Any]], path: Path, step: int) -> Outcome:
        metadata = {**self._fit.metadata, "step": step}
        return _outcome_of(
            lambda: checkpoint_file.save(checkpoint(), path, metadata, self._fit.check_owner, self._read_back)
        )

    def _report(
        self, outcome: Outcome, step: int, path: Path, reason: str, started: float, left_out: list[str]
    ) -> bool:
        """Records how a save has ended; returns whether its checkpoint is published.

        Raises:
            StaleAttempt: If another attempt owns the run.
        """
        if outcome.how == "stale":
            raise StaleAttempt(outcome.reason)
        if outcome == OF_OTHERS:
            return False
        if outcome.how != "published":
            self._report_failed(outcome.reason, step)
            return False
        if self._fit.rank > 0:
            return True
        self._read_back = False
        now = time.monotonic()
        seconds, fit = round(now - started, 4), self._fit
        fit.ledger.record(
            Saved(fit=fit.index, step=step, path=str(path), seconds=seconds, reason=reason, tier="global")
        )
        if reason not in _LOGGED_ELSEWHERE and (line := self._said.line(step, path, seconds, reason, now)) is not None:
            log.info("%s", line)
        self.report_left_out(left_out)
        return True

    def _report_failed(self, reason: str, step: int | None = None) -> None:
        step = self._step if step is None else step
        if self._fit.rank == 0:
            log.error(
                "The checkpoint of step %d could not be saved (%s). Training continues with older checkpoints. If "
                "the storage is full, free space under %s, or give the run another directory.",
                step,
                reason,
                self._fit.folder.checkpoints,
            )
        self._fit.ledger.record(SaveFailed(fit=self._fit.index, step=step, reason=reason))

    def report_left_out(self, left_out: list[str]) -> None:
        """Warns once about parts of the state that are not saved."""
        if left_out:
            names = ", ".join(left_out)
            self._warn_once(
                names,
                f"These parts of the state can only be pickled and are not saved: {names}. A resume takes them as the "
                "script creates them. Keep them in types that torch.load(weights_only=True) reads.",
            )

    def digest_at_end(self) -> str:
        """A digest of the state of this rank that a final save holds. No collective."""
        try:
            checkpoint = self._checkpoint_with(lightning_checkpoints.dump_own_checkpoint, {}, final=True)
            for name in lightning_limits.timer_keys(self._fit.trainer):
                checkpoint.get("callbacks", {}).pop(name, None)
            structure, tensors, _ = pack([_entries(checkpoint), _own_entries(self._exact.own_state(True))])
            return f"{digest_of(tensors)} {hashlib.sha256(json.dumps(structure).encode()).hexdigest()}"
        except Exception:  # in a user's hook: the save reports it
            log.debug("The state could not be collected", exc_info=True)
            return uuid.uuid4().hex  # equal to no other

    def capture(self) -> Entries:
        """This rank's state at this boundary. No collective, and nothing is copied.

        Returns:
            A checkpoint for ``safe_serialization.pack``, whose tensors and arrays are the live ones.
        """
        own = {"mine": _own_entries(self._exact.own_state(False))}
        return _entries(self._checkpoint_with(lightning_checkpoints.dump_own_checkpoint, own, final=False))


def _check_readable(path: Path) -> None:
    """Removes a strategy's checkpoint, and raises, if a resume would refuse it or a safe load cannot read it."""
    try:
        if path.is_dir():
            dcp.check(path, lambda name: True)
        else:
            checkpoint_file.load(path, "meta", verified=resume.verify(path).file)
    except ValueError:
        checkpoint_file.remove(path)
        raise


def _failed(error: Exception) -> Outcome:
    return Outcome("failed", f"{type(error).__name__}: {error}")


def _outcome_of(write: Callable[[], object]) -> Outcome:
    try:
        write()
    except SystemExit as error:  # StaleAttempt, also raised by rank 0
        return Outcome("stale", str(error))
    except PeerLost:
        return OF_OTHERS
    except Exception as error:
        return _failed(error)
    return Outcome("published")


# Entries are kept or left out one by one: they are values that a load asks for by name.


def _entries(checkpoint: dict[str, Any]) -> Entries:
    """A Lightning checkpoint, with an entry for every state of a callback, a layer, a parameter, ..."""
    known: dict[str, Callable[[Any], Any]] = {
        "callbacks": Entries,
        "state_dict": lambda state: Entries(_contents(state)),
        "optimizer_states": lambda states: [_optimizer_entries(each) for each in states],
        "lr_schedulers": lambda states: [Entries(each) if isinstance(each, Mapping) else each for each in states],
        "loops": lambda states: Entries({name: _loop_entries(each) for name, each in states.items()}),
        STATE_KEY: Entries,
    }
    return Entries({key: known[key](value) if key in known else value for key, value in checkpoint.items()})


def _optimizer_entries(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    entries = dict(state)
    if isinstance(of := state.get("state"), Mapping):
        entries["state"] = Entries({name: _contents(each) for name, each in of.items()})
    if type(groups := state.get("param_groups")) is list:
        entries["param_groups"] = [Entries(each) if isinstance(each, Mapping) else each for each in groups]
    if "own" in state:  # of ``ZeroRedundancyOptimizer``
        entries["own"] = _optimizer_entries(state["own"])
    return Entries(entries)


def _loop_entries(state: Any) -> Any:
    """The state of a loop: counters, and the states of data loaders."""
    if not isinstance(state, Mapping):
        return state
    return Entries({key: Entries(value) if key.endswith("state_dict") else value for key, value in state.items()})


def _own_entries(state: dict[str, Any]) -> Entries:
    """The own state of a rank as entries; see :meth:`.ExactState.own_state`."""
    metrics = {name: Entries(each) for name, each in state["metrics"].items()}
    metrics["latest"] = Entries({name: Entries(each) for name, each in state["metrics"]["latest"].items()})
    absent = Entries({rank: _own_entries(each) for rank, each in state["absent"].items()})
    return Entries({**state, "kept": Entries(state["kept"]), "metrics": Entries(metrics), "absent": absent})


def _sharded_entries(checkpoint: dict[str, Any], under: str) -> tuple[Entries, list[str]]:
    """Takes the states that every rank writes as shards out of ``checkpoint``; ``under`` names those of the module.

    Returns:
        The shards, under Lightning's names; and the names of values that cannot be in shards: a load finds values by
        their path, so none may be rewritten.
    """
    left_out: list[str] = []

    def without_rewritten(state: Mapping[str, Any], place: str) -> Entries:
        kept = {}
        for name, each in without_numpy_numbers(dict(state)).items():
            if not isinstance(each, torch.Tensor) and is_rewritten(each):
                left_out.append(f"{place}.{name} (in shards)")
            else:
                kept[name] = each
        return Entries(kept)

    states: dict[str, Any] = {under: without_rewritten(checkpoint.pop("state_dict"), "state_dict")}
    for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
        name = f"optimizer_{number}"
        groups = [
            without_rewritten(each, f"{name}.param_groups[{index}]") for index, each in enumerate(state["param_groups"])
        ]
        kept = {key: without_numpy_numbers(value) for key, value in state.items()}
        states[name] = Entries({**kept, "state": Entries(kept["state"]), "param_groups": groups})
    return Entries(states), left_out


def _contents(state: Any) -> Any:
    """Converts tensors of subclasses to plain tensors: a load copies them into live tensors.

    Raises:
        TypeError: If a tensor cannot be saved: a resume must not continue with other weights.
    """
    if not isinstance(state, Mapping):
        return state
    changed = {}
    for name, each in state.items():
        if type(each) is torch.Tensor or not isinstance(each, torch.Tensor):
            continue
        if not is_known_to_torch(type(each)) and not is_lazy(each):
            changed[name] = plain_one = content(each)
            if plain_one is each:
                kind = f"{type(each).__module__}.{type(each).__qualname__}"
                raise TypeError(
                    f"{name} cannot be saved: it is a {kind}, which has no memory of its own and is not registered by "
                    "torch.serialization.add_safe_globals"
                )
    if not changed:
        return state
    copied: Any = copy.copy(state)  # with the attributes of an OrderedDict
    copied.update(changed)
    return copied
