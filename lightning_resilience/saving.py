"""Saves the state of all ranks to the run directory: at a boundary, or behind the training."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience import _lightning
from lightning_resilience.checkpoint import durable, resume
from lightning_resilience.checkpoint.background import BackgroundSaves
from lightning_resilience.checkpoint.plain import pack, to_host, to_plain
from lightning_resilience.run_directory import StaleAttempt

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_resilience.session import FitSession

log = logging.getLogger(__name__)

STATE_KEY = "lightning_resilience"
"""The key in a Lightning checkpoint of everything that an exact resume needs beside Lightning's own state."""

_LAST_SAVE_S = 120.0  # for what is being written when a fit ends


class Saver:
    """Saves for one fit.

    Attributes:
        at_saved: Called on all ranks after they have saved together, and when training has ended, with whether it has.
        check_state: Given names and tensors of a state that is to be saved; raises ``ValueError`` if it must not be.
        is_held: Whether nothing is saved, the same on all ranks: the last steps were bad, and what was good is kept.
        is_dumping: Whether Lightning is collecting the state for a checkpoint of the run's own.
    """

    def __init__(self, session: FitSession) -> None:
        self._session = session
        self.at_saved: list[Callable[[bool], None]] = []
        self.check_state: Callable[[Iterable[tuple[str, torch.Tensor]]], None] | None = None
        self.is_held = False
        self.is_dumping = False
        self._background: BackgroundSaves | None = None
        self._lost: Callable[[], None] = lambda: None
        self._skip_said = False
        self._left_out_reported: tuple[str, ...] = ()

    def save(self, reason: str, final: bool = False) -> Path | None:
        """Publishes the state of all ranks at this boundary. A collective.

        Args:
            reason: Why, one word, for the ledger.
            final: Whether the fit has ended.

        Returns:
            The checkpoint, or ``None`` if it could not be written; the run then goes on with the older ones.
        """
        with self._session.during("checkpointing"):
            self.wait()
            path = self._save(reason, final) if self.may_save(self._session.fit.checkpoints) else None
            if path is not None and not final:
                for hook in self.at_saved:
                    hook(False)
        return path

    def save_behind(self, reason: str, published: Callable[[], None], lost: Callable[[], None]) -> None:
        """Like :meth:`save`, but the checkpoint is written behind the training. A collective.

        Sharded strategies write together, in collectives, and cannot do it behind the training; nor is a save begun
        while the one before is being written.

        Args:
            reason: Why, one word, for the ledger.
            published: Called on rank 0, in another thread, when the checkpoint is published.
            lost: Called on rank 0 at a later boundary if the snapshot has turned out to be no good.
        """
        if _lightning.writes_directories(self._session.trainer.strategy):
            if self.save(reason) is not None and self._session.rank == 0:
                published()
            return
        if self._background is None:
            self._background = BackgroundSaves(self._session.advanced)
            _lightning.on_batch_done(self._session.trainer, self._session.patches, self._background.fence)
            self._session.at_end_of_epoch.append(self._background.fence)
            self._session.at_boundary.append(self._check_background)
        background = self._background
        started = time.monotonic()
        with self._session.during("checkpointing"):
            if not self.may_save(self._session.fit.checkpoints):
                return
            checkpoint, left_out = self._checkpoint_of_all(final=False)
            if self._session.rank == 0:
                if background.busy:
                    if not self._skip_said:
                        self._skip_said = True
                        log.warning(
                            "A checkpoint is still being written: the one of step %d is skipped, and so are others "
                            "that come too soon. Save less often, or to faster storage.",
                            self._step,
                        )
                else:
                    step, path = self._step, self._path(False)
                    metadata = {**self._session.metadata, "step": step}
                    self._lost = lost

                    def write(copy: dict[str, Any]) -> None:
                        try:
                            durable.save(copy, path, metadata, self._session.check_owner)
                        except Exception as error:
                            self._report_failed(step, type(error).__name__, str(error))
                            return
                        self._report_saved(step, path, reason, started, left_out)
                        published()

                    background.take(checkpoint, _lightning.live_tensors(self._session.trainer), write)
            for hook in self.at_saved:
                hook(False)

    def wait(self) -> None:
        """Waits for what is being written behind the training."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """The same at the end of a fit, but not for ever."""
        if self._background is not None:
            with self._session.during("checkpointing"):
                self._background.close(_LAST_SAVE_S)

    def may_save(self, path: str | os.PathLike[str]) -> bool:
        """Whether the state of all ranks may be saved; says so if not. A collective, if anything is checked at all.

        Args:
            path: Where it would be saved.
        """
        if self.check_state is None:
            return True
        problem = None
        try:
            self.check_state(_lightning.named_state(self._session.trainer))
        except ValueError as error:
            problem = f"rank {self._session.rank}: {error}"
        # After an exception the others may be gone.
        all_problems = [problem] if self._session.failing else self._session.gather(problem)
        problems = [each for each in all_problems if each is not None]
        if problems and self._session.rank == 0:
            log.error("The state of step %d is not saved in %s: %s.", self._step, path, problems[0])
            self._session.ledger.record("save_refused", fit=self._session.index, step=self._step, reason=problems[0])
        return not problems

    def _check_background(self, clean: bool) -> None:
        assert self._background is not None
        self._background.check()
        if self._background.spoilt and not self._background.busy:
            self._background.spoilt = False
            self._lost()

    @property
    def _step(self) -> int:
        return self._session.trainer.global_step

    def _path(self, final: bool) -> Path:
        return self._session.fit.checkpoints / resume.checkpoint_name(self._step, final)

    def _checkpoint_of_all(self, final: bool) -> tuple[dict[str, Any], list[str]]:
        """The checkpoint of this boundary in types that a safe load reads, and what was left out. A collective."""
        ranks = {"ranks": self._session.gather(to_host(self._session.own_state(final)))}
        return _whole_states_to_plain(self._checkpoint_with(_lightning.dump_checkpoint, ranks, final))

    def _checkpoint_with(
        self, dump: Callable[[Trainer], dict[str, Any]], ranks: dict[str, Any], final: bool
    ) -> dict[str, Any]:
        before = self._session.before_evaluation
        self.is_dumping = True
        try:
            checkpoint = dump(self._session.trainer)
        finally:
            self.is_dumping = False
        if before is not None:
            checkpoint["loops"]["fit_loop"].update(before["progress"])
        state = {
            "version": 1,
            **ranks,
            "due": "validation" if before is not None else None,
            "final": final,
            "arrival_order": self._session.arrival_order,
        }
        return {**checkpoint, STATE_KEY: state}

    def _save(self, reason: str, final: bool) -> Path | None:
        trainer, started = self._session.trainer, time.monotonic()
        checkpoint, left_out = self._checkpoint_of_all(final)
        path, metadata = self._path(final), {**self._session.metadata, "step": self._step}
        error: BaseException | None = None
        try:
            if _lightning.writes_directories(trainer.strategy):
                trainer.strategy.save_checkpoint(checkpoint, path)
            elif trainer.is_global_zero:
                durable.save(checkpoint, path, metadata, self._session.check_owner)
        except (Exception, StaleAttempt) as exception:
            error = exception
        # Every rank must know whether the checkpoint is published before it goes on.
        outcome = trainer.strategy.broadcast((type(error).__name__, str(error)) if error is not None else None)
        if outcome is not None:
            if outcome[0] in (StaleAttempt.__name__, SystemExit.__name__):
                raise StaleAttempt(outcome[1])
            self._report_failed(self._step, *outcome)
            return None
        if trainer.is_global_zero:
            self._report_saved(self._step, path, reason, started, left_out)
        return path

    def _report_failed(self, step: int, kind: str, reason: str) -> None:
        if self._session.rank == 0:
            log.error(
                "The checkpoint of step %d could not be saved (%s: %s). Training goes on; the newest checkpoint is an "
                "older one. Free some space under %s, or give the run another directory.",
                step,
                kind,
                reason,
                self._session.fit.checkpoints,
            )
        self._session.ledger.record("save_failed", fit=self._session.index, step=step, reason=f"{kind}: {reason}")

    def _report_saved(self, step: int, path: Path, reason: str, started: float, left_out: list[str]) -> None:
        self._session.ledger.record(
            "saved",
            fit=self._session.index,
            step=step,
            path=str(path),
            seconds=round(time.monotonic() - started, 4),
            reason=reason,
            tier="global",
        )
        self.report_left_out(left_out)

    def report_left_out(self, left_out: list[str]) -> None:
        """Warns once about parts of the state that are not saved."""
        if left_out and tuple(left_out) != self._left_out_reported:
            self._left_out_reported = tuple(left_out)
            log.warning(
                "These parts of the state can only be pickled, and are not in the checkpoints that the run resumes "
                "from: %s. Keep them in types that torch.load(weights_only=True) reads.",
                ", ".join(left_out),
            )

    def capture(self) -> tuple[dict[str, Any], list[str]]:
        """This rank's state at this boundary, for its own eyes only: no collective, and nothing is copied.

        Returns:
            A checkpoint whose tensors and arrays are the live ones; and what had to be left out.
        """
        checkpoint = self._checkpoint_with(
            _lightning.dump_own_checkpoint, {"mine": self._session.own_state(False)}, final=False
        )
        return _without(checkpoint, lambda value: pack(value)[2])


_LIGHTNINGS_OWN = ("state_dict", "loops", "optimizer_states", "lr_schedulers", STATE_KEY)


def _whole_states_to_plain(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Like :func:`to_plain`, but leaves out the whole state of a callback, or whole entry of the user's, or nothing."""
    kept, left_out = _without(checkpoint, lambda value: to_plain(value)[1])
    plain, missing = to_plain(kept)
    return plain, [*left_out, *missing]


def _without(checkpoint: dict[str, Any], missing_of: Callable[[Any], list[str]]) -> tuple[dict[str, Any], list[str]]:
    """Leaves out what cannot be kept: the whole state of a callback, or the whole entry of the user's.

    Half a state would fail in the ``load_state_dict`` that gets it, at every resume.

    Args:
        checkpoint: Lightning's.
        missing_of: Says what of a value cannot be kept.

    Returns:
        A checkpoint without those, and the names of what cannot be kept.
    """
    left_out: list[str] = []

    def keep(items: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept = {}
        for key, value in items.items():
            missing = missing_of(value)
            left_out.extend(f"{prefix}{key}.{each}" for each in missing)
            if not missing:
                kept[key] = value
        return kept

    lightnings = {key: value for key, value in checkpoint.items() if key in _LIGHTNINGS_OWN}
    users = {key: value for key, value in checkpoint.items() if key not in (*_LIGHTNINGS_OWN, "callbacks")}
    callbacks = keep(checkpoint.get("callbacks", {}), "callbacks.")
    return {**lightnings, **keep(users, ""), "callbacks": callbacks}, left_out
