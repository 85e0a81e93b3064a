"""Restores a fit from the chosen checkpoint, at the point where Lightning restores its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_data,
    lightning_progress,
    lightning_strategies,
)
from lightning_resilience.checkpoint import dcp, pruning
from lightning_resilience.checkpoint.safe_serialization import from_safe
from lightning_resilience.fit import checkpoint_io, left_out, outputs
from lightning_resilience.fit.checkpoint_selector import CheckpointSelector, Choice
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.exact_state import LOGS, STATE_KEY, ExactState
from lightning_resilience.fit.identity import FitIdentity
from lightning_resilience.fit.logger_files import Logs
from lightning_resilience.fit.saving import Saver

log = logging.getLogger(__name__)


class Restorer:
    """Restores one fit, at its start and in a rollback."""

    def __init__(
        self, fit: FitContext, identity: FitIdentity, exact: ExactState, selector: CheckpointSelector, saver: Saver
    ) -> None:
        self.fit = fit
        self.identity = identity
        self.exact = exact
        self.selector = selector
        self.saver = saver
        self.explicit: str | None = None
        """The user's ``fit(ckpt_path=...)``."""
        self._silenced = False
        self._checkpoint: dict[str, Any] | None = None
        self._left_out: list[list[str | int]] = []
        self._masks: dict[str, torch.Tensor] = {}
        self._logs_begun: dict[str, Any] = {}

    def restore(self, explicit: str | None, weights_only: bool | None) -> None:
        """Restores the checkpoint to resume from, where Lightning would load one."""
        self.identity.check_model(explicit)
        self._record_outputs()
        # A rank that is replaced may find a file that did not exist when the other ranks began the fit.
        if self.fit.from_rank_0(lambda: explicit is None or self.selector.is_of_failed_step(explicit)):
            explicit = None
        self.explicit = explicit
        self.restore_from(self.selector.choose(explicit), weights_only)

    def restore_from(self, choice: Choice | None, weights_only: bool | None = None) -> None:
        """Restores the choice; without one the user's checkpoint, if there is any."""
        with self.selector.restoring():
            self._restore_state(choice, weights_only)

    def _restore_state(self, choice: Choice | None, weights_only: bool | None) -> None:
        path, checkpoint = choice if choice is not None else (self.explicit, None)
        self.identity.is_its_own = choice is not None
        if choice is not None and checkpoint is None:
            with dcp.nothing_unpickled():
                checkpoint = from_safe(lightning_checkpoints.load_own_whole_checkpoint(self.fit.trainer, str(path)))
        elif checkpoint is None:

            def load() -> dict[str, Any]:
                found = lightning_checkpoints.load_checkpoint(
                    self.fit.trainer, None if path is None else str(path), weights_only
                )
                return cast("dict[str, Any]", from_safe(found)) if STATE_KEY in found else found

            checkpoint = checkpoint_io.on_every_rank(self.fit.trainer.strategy, load)
        if STATE_KEY in checkpoint:
            if "state_dict" in checkpoint:  # not where the strategy has loaded it
                self._masks = pruning.take_masks(self.fit.module, checkpoint["state_dict"])
                lightning_strategies.convert_to_double(self.fit.trainer, self.fit.module)
            self._complete_left_out(checkpoint)
            if (mine := self.exact.resume_from(checkpoint, Path(str(path)))) is not None:
                lightning_callbacks.skip_searches(self.fit.trainer, self.fit.patches, mine.get("searched", {}))
                extra_state = self.exact.extra_state()
                for name, value in mine.get("kept", {}).items():
                    if name in extra_state:
                        self._load_extra_state(name, value)
            elif self.fit.rank == 0 and LOGS in (kept := checkpoint[STATE_KEY]["ranks"][0].get("kept", {})):
                self._load_extra_state(LOGS, kept[LOGS])  # the log is the same with any number of ranks
            if not self._silenced:
                self._silenced = True
                lightning_progress.silence_resume_warning(self.fit.trainer, self.fit.patches)
        elif self.exact.logs is not None:
            self._load_extra_state(LOGS, self._logs_begun)
        lightning_checkpoints.restore_checkpoint(self.fit.trainer, None if path is None else str(path), checkpoint)
        if self.exact.resumed is not None and (mine := self.exact.resumed["mine"]) is not None:
            lightning_callbacks.set_model_checkpoint_state(self.fit.trainer, mine.get("marks", {}))
            if "marks" in mine:
                outputs.overwrite_lost(self.fit.trainer, self.fit.patches, self.fit.metadata)
        self._checkpoint = checkpoint

    def _complete_left_out(self, checkpoint: dict[str, Any]) -> None:
        paths = checkpoint[STATE_KEY].get("left_out", [])  # older versions did not save them
        self._left_out = [path for path in paths if path[0] != STATE_KEY]
        if any(self.fit.gather(bool(self._left_out))):
            with self.saver.dumping():
                left_out.complete(self.fit.trainer, checkpoint, self._left_out)
        if "state_dict" in checkpoint:  # not where the strategy has loaded it
            left_out.complete_extra_states(self.fit.module, checkpoint["state_dict"])

    def _load_extra_state(self, name: str, value: Any) -> None:
        try:
            self.exact.extra_state()[name].load_state_dict(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Perhaps written by another version. State besides the training state must not fail a resume.
            log.warning("Ignoring the saved state of %s: incompatible format (%s).", name, error)

    @contextmanager
    def restoring_training_state(self) -> Iterator[None]:
        """Wraps Lightning's restoring of loops and optimizers."""
        with self.selector.restoring():
            self._before_training_state()
            yield
            lightning_progress.count_batches_left_out(self.fit.trainer)

    def _before_training_state(self) -> None:
        """Gives Lightning the checkpoint for loops and optimizers again; a search may have dropped it."""
        loaded = lightning_checkpoints.loaded_checkpoint(self.fit.trainer)
        if loaded and loaded is not self._checkpoint:
            return  # a search restores its own checkpoint
        self.identity.note_optimizers()  # some strategies make them in a way of their own
        self.check_settings()
        if self._checkpoint is not None:
            if self._left_out:
                left_out.complete_training_state(self.fit.trainer, self._checkpoint, self._left_out)
            lightning_checkpoints.set_loaded_checkpoint(self.fit.trainer, self._checkpoint)
            self._checkpoint = None
            pruning.mask(self.fit.module, self._masks)  # optimizers exist, and DDP has wrapped the module
            self._masks = {}

    def check_settings(self) -> None:
        """Compares the settings as soon as both optimizers and training data exist."""
        loaders = lightning_data.train_loaders(self.fit.trainer)
        if loaders and self.identity.knows_optimizers:
            self.identity.check_settings(loaders)
            self.selector.settings_are_accepted()

    def _record_outputs(self) -> None:
        now = outputs.record(self.fit.trainer, self.fit.run_id)
        self.exact.logs = logs = Logs(self.fit.trainer, self.fit.patches) if self.fit.trainer.is_global_zero else None

        def record() -> None:
            assert logs is not None
            before = self.fit.folder.outputs or {}
            begun = before.get("begun", {}) if before.get("run") == self.fit.run_id else {}
            self._logs_begun = now["begun"] = {**logs.state_dict(), **begun}
            if before != now:
                self.fit.folder.outputs = now

        self.fit.from_rank_0(record)
