"""The identity of a fit: its model, data and settings, compared with the ones in the run directory."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from lightning_resilience._lightning import lightning_callbacks, lightning_data, lightning_limits
from lightning_resilience.checkpoint import data_position, sharded
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.exact_state import ExactState
from lightning_resilience.fit.outcome import FitOutcome
from lightning_resilience.launch import membership
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, AnotherFit
from lightning_resilience.run.settings import (
    CONTINUE_VARIABLE,
    WORLD_SIZE,
    Settings,
    changes,
    describe_changes,
    flat,
    is_another_fit,
    is_end,
    settings_of_arguments,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

_VARY = "data_vary"
"""In a fingerprint: whether epochs had different data, as far as two of them were seen."""
_OF_DATA = "batch size", "training samples"
"""Settings that the data loaders reveal."""


class FitIdentity:
    """Keeps the state of a fit from being loaded into another fit."""

    def __init__(self, fit: FitContext, outcome: FitOutcome, exact: ExactState) -> None:
        self.fit = fit
        self.outcome = outcome
        self.exact = exact
        self.is_its_own = False
        """Whether the fit resumes from a checkpoint of its own."""
        self._fingerprint: dict[str, str] = {}
        self._optimizers: Settings | None = None
        self._data: Any = None  # the first data of this fit
        self._recorded_vary: bool | None = None
        self._has_compared = False

    def describe(self) -> None:
        """Records the parameters, before the strategy shards them or changes their types."""
        if not self._fingerprint:
            module = type(self.fit.module)
            whole = sharded.whole_parameters(self.fit.module)
            self._fingerprint = {"module": f"{module.__module__}.{module.__qualname__}", "parameters": _digest(whole)}

    def check_model(self, explicit: str | None) -> None:
        """Raises if the fit folder belongs to another model.

        Raises:
            AnotherFit: On all ranks.
        """
        self.describe()

        def compare() -> list[str]:
            recorded = self.fit.folder.fingerprint
            if recorded is not None:
                return self._differences(recorded)
            self.fit.folder.fingerprint = {**self._fingerprint, "ckpt_path": explicit}
            return []

        if problems := self.fit.from_rank_0(compare):  # ranks may hold different parameters
            raise AnotherFit(
                f"{self.fit.folder.path} holds another fit: {', and '.join(problems)}. Fits are identified by their "
                "order in the script. If that order has changed, give the run another directory (--run-dir, run_dir=)."
            )

    def _differences(self, recorded: dict[str, Any]) -> list[str]:
        mine, problems = self._fingerprint, []
        if recorded.get("module") != mine["module"]:
            problems.append(f"its module is a {recorded.get('module')}, and this fit's is a {mine['module']}")
        # Older versions recorded the parameters of rank 0 after the strategy was set up.
        here = (
            (name, None if is_lazy(p) else tuple(p.shape), p.dtype) for name, p in self.fit.module.named_parameters()
        )
        if recorded.get("parameters") not in (mine["parameters"], _digest(here)):
            problems.append("its parameters have different names, shapes or types")
        return problems

    def note_optimizers(self) -> None:
        """Records the optimizers' settings as the script creates them, before a checkpoint or a search changes them."""
        if self._optimizers is None:
            self._optimizers = _settings_of_optimizers(self.fit.trainer)

    @property
    def knows_optimizers(self) -> bool:
        """Whether they are recorded; not yet if the optimizers are created only with the training data."""
        return self._optimizers is not None

    def check_data(self, loaders: list[Any]) -> None:
        """Raises if a finished fit had other training data: the script may run its fits in another order.

        If epochs make their loaders anew, the fit records whether their data differs: only equal data can be compared.
        """
        if self._data is not None:
            self._record_whether_they_vary(loaders)
            return

        def describe() -> tuple[list[dict[str, Any]], dict[str, Any]]:
            recorded = self.fit.folder.fingerprint or {}
            data = data_position.describe_data(loaders, recorded.get("data"))
            if "data" not in recorded:
                recorded = self.fit.folder.fingerprint = {**recorded, "data": data}
            return data, recorded

        self._data, fingerprint = self.fit.from_rank_0(describe)  # ranks may have different data
        if fingerprint["data"] != self._data and self._are_comparable(fingerprint):
            if self.exact.resumed is not None and self.exact.resumed["final"] and self.outcome.finished_before():
                raise AnotherFit(
                    f"{self.fit.folder.path} holds a finished fit with other training data. Fits are identified by "
                    "their order: have the script run all its fits at every start (a finished fit is restored, not "
                    "trained), split the data in the same way, or give the run another directory."
                )
            if self.fit.trainer.is_global_zero:
                log.warning("The training data have changed since this fit began: the resume is not exact.")

    def _are_comparable(self, fingerprint: dict[str, Any]) -> bool:
        """Whether the present loaders are those of the recorded epoch, or have the same data."""
        reloads, varies = lightning_data.reloads_every(self.fit.trainer), fingerprint.get(_VARY)
        return varies is not True and (not reloads or self.fit.trainer.current_epoch < reloads or varies is False)

    def _record_whether_they_vary(self, loaders: list[Any]) -> None:
        """Records within a fit whether data differs between epochs; on rank 0, and a storage error does not end it."""
        varies = self._data != data_position.describe_data(loaders, self._data)
        if self.fit.rank > 0 or self._recorded_vary in (True, varies):
            return
        self._recorded_vary = varies
        with suppress(OSError):
            fingerprint = self.fit.folder.fingerprint
            if fingerprint is not None and fingerprint.get(_VARY) not in (True, varies):
                self.fit.folder.fingerprint = {**fingerprint, _VARY: varies}

    def recorded_division(self) -> dict[str, Any] | None:
        """How the training data was divided among ranks at the last start; on rank 0."""
        found = (self.fit.folder.fingerprint or {}).get("division")
        return found if isinstance(found, dict) else None

    def record_division(self) -> None:
        """Records how the training data is divided now. A collective."""
        now = self.exact.describe_division()

        def record() -> None:
            fingerprint = self.fit.folder.fingerprint or {}
            if fingerprint.get("division") != now:
                self.fit.folder.fingerprint = {**fingerprint, "division": now}

        self.fit.from_rank_0(record)

    def check_settings(self, loaders: list[Any]) -> None:
        """Logs changed settings; raises if a finished fit had others. Only once: loaders may differ between epochs."""
        if self._has_compared:
            return
        self._has_compared = True
        now = self._settings(loaders)

        def compare() -> tuple[str, str | None]:
            of_data = {name: now[name] for name in _OF_DATA}
            before = {**of_data, **(self.fit.folder.settings or now)}
            if not self._are_comparable(self.fit.folder.fingerprint or {}):
                before |= of_data
            found = changes(before, now)
            if is_another_fit(found) and self._would_replace_another():
                return "", (
                    f"{self.fit.folder.path} holds a fit that has finished with other settings: "
                    f"{describe_changes(found)}. Give the run another directory (run_dir=, --run-dir, or --fresh of "
                    "lightning-resilience launch). To continue that fit anyway: --continue-anyway of launch, or "
                    f"{CONTINUE_VARIABLE}=1."
                )
            self.fit.folder.settings = now
            text = f"{describe_changes(found)}." if found else ""
            if self.exact.resumed and (kept := [each.name for each in found if each.name in (self._optimizers or {})]):
                text += f" The resumed optimizer keeps the saved values of {', '.join(kept)}."
            return text, None

        changed, problem = self.fit.from_rank_0(compare)
        if problem is not None:
            raise AnotherFit(problem)
        if changed and self.fit.trainer.is_global_zero:
            log.warning("Changed since the last start of this fit: %s", changed)

    def _would_replace_another(self) -> bool:
        """Whether the final state of this fit would be restored as the result of different settings."""
        resumed = self.exact.resumed
        if not self.outcome.had_finished or resumed is None or not resumed["final"] or not self.is_its_own:
            return False
        if os.environ.get(CONTINUE_VARIABLE) == "1" or is_started_by_machine():
            return False
        # If a later fit is unfinished, the run is resuming, and settings may differ by design.
        outcomes = [fit.outcome for fit in self.fit.run.fits]
        return all(outcome is not None and outcome.status == "finished" for outcome in outcomes)

    def _settings(self, loaders: list[Any]) -> Settings:
        trainer = self.fit.trainer
        data = data_position.describe_data(loaders)
        found: Settings = {}
        share, line = self.exact.batch_share, membership.current()
        if not os.environ.get(RUN_DIR_VARIABLE):  # otherwise the launch compares them; limits are those of the Trainer
            given = settings_of_arguments(sys.argv[1:])
            found = {name: value for name, value in given.items() if not is_end(name)}
        found |= flat("module", getattr(self.fit.module, "hparams", None) or {})
        found |= flat("data", getattr(getattr(trainer, "datamodule", None), "hparams", None) or {})
        found |= self._optimizers or {}
        sizes = [size and int(size / share) for size in data_position.batch_sizes(loaders)]
        found |= dict(zip(_OF_DATA, (_one(sizes), _one([each["length"] for each in data])), strict=True))
        found |= {
            **flat("precision", trainer.precision),
            **flat("accumulate_grad_batches", self.exact.accumulates),
            **flat("gradient_clip_val", trainer.gradient_clip_val),
            **lightning_limits.limits(trainer),
            WORLD_SIZE: trainer.world_size if line is None else len(line.slots),  # also while some ranks are absent
        }
        return found


def _digest(parameters: Iterable[tuple[str, tuple[int, ...] | None, torch.dtype]]) -> str:
    lines = "\n".join(f"{name} {shape} {dtype}" for name, shape, dtype in parameters)
    return hashlib.sha256(lines.encode()).hexdigest()


def is_started_by_machine() -> bool:
    """Whether a launcher or a scheduler, not a user, has started this process again."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "LIGHTNING_RESILIENCE_JOB_ATTEMPT")
    return current_scheduler().restart_count > 0 or any(os.environ.get(name, "0") not in ("", "0") for name in counts)


def _settings_of_optimizers(trainer: Trainer) -> Settings:
    found: Settings = {}
    without = {"params", "param_names"}
    if lightning_callbacks.finds_learning_rates(trainer):
        without |= {"lr", "initial_lr", "max_lr", "min_lr"}  # schedulers derive the other three from it
    for index, optimizer in enumerate(trainer.optimizers):
        name = "optimizer" if len(trainer.optimizers) == 1 else f"optimizer {index}"
        found[name] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            own = name if len(optimizer.param_groups) == 1 else f"{name}.group {number}"
            found |= flat(own, {key: value for key, value in group.items() if key not in without})
    return found


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
