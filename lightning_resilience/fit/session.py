"""What the callbacks of one fit share: its place in the run directory, the agreement, and restoring.

A :class:`SessionCallback` joins the session of its Trainer in ``setup`` and meets the others there; no callback calls
another one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_resilience import _native_threads, agreement, signals
from lightning_resilience._arguments import changed, shown
from lightning_resilience._files import Patience
from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_data,
    lightning_limits,
    lightning_loops,
    lightning_metrics,
    lightning_patches,
    lightning_progress,
    lightning_strategies,
)
from lightning_resilience.agreement import Agreement, Event, Needs, neighbourhood, nodes_of
from lightning_resilience.checkpoint import data_position, dcp, pruning, resume, sharded
from lightning_resilience.checkpoint.reduction_order import (
    GradientArrivalRecorder,
    inexact_reasons,
    rebuilds_buckets,
    replay_gradient_arrival,
)
from lightning_resilience.checkpoint.safe_serialization import device_of, from_safe
from lightning_resilience.detect.hangs import rank_probe
from lightning_resilience.detect.hangs.progress import Progress, Section
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.fit import checkpoint_io, left_out, outputs, strategies
from lightning_resilience.fit.checkpoint_selector import ENDS_APART, Tiers
from lightning_resilience.fit.logger_files import Logs
from lightning_resilience.fit.participant import Participant, Participants, Stateful
from lightning_resilience.fit.saving import STATE_KEY, Saver
from lightning_resilience.fit.settings import (
    CONTINUE_VARIABLE,
    WORLD_SIZE,
    Settings,
    changes,
    flat,
    is_another_fit,
    is_end,
    say_changes,
    settings_of_arguments,
)
from lightning_resilience.launch.job_info import log_job_info
from lightning_resilience.launch.schedulers import current_scheduler
from lightning_resilience.run.events import DivergenceFound, Fault, Finished, RunRefused
from lightning_resilience.run.history import troubles
from lightning_resilience.run.ledger import Ledger, node_name, read_ledger
from lightning_resilience.run.run_directory import (
    LAUNCHED,
    OFF_VARIABLE,
    RUN_DIR_VARIABLE,
    AnotherFit,
    Outcome,
    RunDirectory,
    StaleAttempt,
    Status,
    StorageFails,
    is_turned_off,
)
from lightning_resilience.run.wandb_runs import begin_another, wandb_run_id

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_READS_OWNER_AGAIN_AFTER_S = (0.2, 1.0)
_LOGS = "logs"
_TRAINED = "trained"  # the event that has all ranks meet behind their last batch
_END_IS_MISSING = "end_is_missing"  # what on_train_end has changed could not be saved
_ASKED = "should_stop"  # why a fit has ended: somebody has set it, who is not known
_CLEAN_TRAINING = Needs.TRAINING | Needs.CLEAN  # made once: an operation on flags costs a microsecond

_sessions: weakref.WeakKeyDictionary[Any, FitSession] = weakref.WeakKeyDictionary()
_active: FitSession | None = None
_fits_begun: dict[Path, int] = {}


_T = TypeVar("_T")
_Choice = tuple[Path, "dict[str, Any] | None"]
"""A checkpoint's path and content; no content where the strategy itself loads it."""


class _GoBack(Exception):
    """Leaves the loops of a fit, which are run again from an older state."""

    def __init__(self, choice: _Choice | None) -> None:
        super().__init__()  # or an error later on would print the whole state
        self.choice = choice


class FitSession:
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
        self._pid = os.getpid()
        self.members: list[SessionCallback] = []
        self.rank: int = trainer.global_rank
        self.participants = Participants()
        self.gone_back = False
        """Whether the fit has gone back: hooks of its start are called again, for what is not new."""
        self.progress: Progress | None = None
        """Where this rank says what it is doing, if anybody watches."""
        self.tiers = Tiers(self)
        """Where the checkpoint to resume from is chosen."""
        self.saver = Saver(self)
        """Where checkpoints are saved."""
        self.replicas_agreed = False
        """Whether the states of ranks that should hold the same were compared, and were the same; rank 0 knows."""
        self._divergence_said = False
        self.final_path: Path | None = None
        """Where the final state of a fit that has finished is."""

        if trainer.is_global_zero and not _fits_begun:  # the first of this process
            log_job_info()
        launched = os.environ.get(RUN_DIR_VARIABLE)  # the launcher counts by what is recorded there, and nowhere else
        if launched and run_dir and os.path.realpath(launched) != os.path.realpath(run_dir) and trainer.is_global_zero:
            log.warning(
                "This run was launched with --run-dir %s: run_dir=%s of its callbacks is not used.", launched, run_dir
            )
        path = _place_of_run(trainer, run_dir)
        self.patience = Patience(self.advanced)
        """For storage that does not answer when the fit starts, or goes back."""
        self.run = RunDirectory(path)
        self.run_id: str
        # A copy is told from its original before anything in it is believed.
        path, self.run_id, other = self.from_rank_0(
            lambda: (str(self.run.path), self.run.identity(), self.run.enter(_job()))
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
        self.index = _fits_begun.get(self.run.path, 0)
        _fits_begun[self.run.path] = self.index + 1
        self.fit = self.run.fit(self.index)
        self.ledger = Ledger(self.run.ledger, self.rank)
        self.nodes = nodes_of(self.gather(neighbourhood()))
        """The ranks of every node, that of rank 0 first."""
        self.previous_outcome = self.from_rank_0(self.fit.begin)
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
            "strategy": strategies.name_of(trainer.strategy),
            "attempt": self.token,
        }
        self.patches = lightning_patches.Patches()
        self._loading = lightning_patches.Patches()
        self.save_patches = lightning_patches.Patches()
        """Of what is put on the Trainer's saves: they come off last, since after an exception somebody may save."""
        self._guarded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.failing = False
        """Whether the fit ends by an exception: the other ranks may be gone."""
        self.interrupted_by: Callable[[], BaseException | None] = lambda: None
        """The error by which the fit was stopped in order, for as long as anybody holds it."""
        self._silenced = False
        self._fingerprint: dict[str, str] = {}
        self._optimizers: Settings | None = None
        self._is_its_own = False
        self._has_trained = False
        self._owner_unknown_said = False
        self._install()
        _native_threads.guard()

        self._running = False
        self._explicit: str | None = None
        self._goes_back: tuple[int, Callable[[], None], bool] | None = None
        self._accumulates = trainer.accumulate_grad_batches
        self._counted_before = 0
        self._own_callbacks: Any = None
        self._cut_short = False
        self._step_before: int | None = None
        self._steps_are_seen = False
        self._warm = False
        self._finished = False
        self._at_end: str | None = None
        self._is_behind_training = threading.Event()
        self._left: list[Event] = []
        self._resumed: dict[str, Any] | None = None
        self._replayed = False
        self._checkpoint: dict[str, Any] | None = None
        self._left_out: list[list[str | int]] = []
        self._masks: dict[str, torch.Tensor] = {}
        self._logs: Logs | None = None
        self._logs_begun: dict[str, Any] = {}
        self._first_batch_random_state: data_position.RandomState | None = None
        self._epoch_random_state: data_position.RandomState | None = None
        self._fetches_ahead = False
        self._before_fetch: data_position.RandomState | None = None
        self.before_evaluation: dict[str, Any] | None = None
        """What a checkpoint holds of the moment before the evaluation that is under way, if one is."""
        self._unwatched: rank_probe.Witness | None = None
        """What the launcher watches this rank by, where no participant does."""
        self._recorder: GradientArrivalRecorder | None = None
        self.arrival_order: list[str] | None = None
        """In which order the gradients arrived when DDP made its buckets; ``None`` where it has none."""

    def _install(self) -> None:
        trainer, patches = self.trainer, self.patches
        checkpoint_io.make_durable(trainer, self._check_owner_if_known, self.metadata)
        lightning_loops.before_strategy_setup(trainer, patches, self._describe)
        lightning_checkpoints.on_restore(trainer, patches, self._restore)
        lightning_checkpoints.on_restore_training_state(trainer, patches, self._restoring_training_state)
        lightning_data.on_train_data(trainer, patches, self._before_first_iterator, self._before_iterator)
        lightning_loops.on_fit_run(trainer, patches, self._run)
        lightning_loops.on_fit_loop(
            trainer, patches, self._before_epoch, self._end_of_epoch, self._before_train_end, self._complete
        )
        lightning_loops.on_training_boundary(trainer, patches, self._training_boundary)
        lightning_loops.on_evaluation(
            trainer,
            patches,
            self._evaluation_start,
            self._guard_workers,
            self._evaluation_boundary,
            self._evaluation_end,
        )

    def check_owner(self) -> None:
        """Raises :class:`StaleAttempt` if another attempt has taken over; called before anything is published."""
        self.run.check_owner(self.token)

    def _check_owner_if_known(self) -> None:
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
        return _from_rank_0(self.trainer, make, self.patience)

    @property
    def whoami(self) -> str:
        """This rank and its node, for a person."""
        return _whoami(self.trainer)

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

    def _enter(self, section: Section) -> None:
        if self.progress is not None:
            self.progress.enter(section)

    def _stand_at(self, section: Section, position: agreement.Position) -> None:
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

    # -- restoring -----------------------------------------------------------------------------------------------------

    def _restore(self, explicit: str | None, weights_only: bool | None) -> None:
        if self._is_search():  # puts back what it has found
            found = lightning_checkpoints.load_checkpoint(self.trainer, explicit, weights_only)
            lightning_checkpoints.restore_checkpoint(self.trainer, explicit, found)
            return
        self._check_fingerprint(explicit)
        self._record_outputs()
        self._explicit = explicit
        if self.trainer.optimizers:  # a strategy may restore them with the weights
            self._optimizers = _settings_of_optimizers(self.trainer)
        self._restore_from(self.tiers.choose(explicit), weights_only)

    def _restore_from(self, choice: _Choice | None, weights_only: bool | None = None) -> None:
        with self.tiers.restoring():
            self._restore_state(choice, weights_only)

    def _restore_state(self, choice: _Choice | None, weights_only: bool | None) -> None:
        path, checkpoint = choice if choice is not None else (self._explicit, None)
        self._is_its_own = choice is not None
        if choice is not None and checkpoint is None:
            with dcp.nothing_unpickled():
                checkpoint = from_safe(lightning_checkpoints.load_own_whole_checkpoint(self.trainer, str(path)))
        elif checkpoint is None:

            def load() -> dict[str, Any]:
                found = lightning_checkpoints.load_checkpoint(
                    self.trainer, None if path is None else str(path), weights_only
                )
                return cast("dict[str, Any]", from_safe(found)) if STATE_KEY in found else found

            checkpoint = checkpoint_io.on_every_rank(self.trainer.strategy, load)
        if STATE_KEY in checkpoint:
            if "state_dict" in checkpoint:  # not where the strategy has loaded it
                self._masks = pruning.take_masks(self.module, checkpoint["state_dict"])
                lightning_strategies.convert_to_double(self.trainer, self.module)
            self._complete_what_was_left_out(checkpoint)
            self._resumed = self._understand(checkpoint, Path(str(path)))
            if self._resumed is not None and (mine := self._resumed["mine"]) is not None:
                lightning_callbacks.leave_out_searches(self.trainer, self.patches, mine.get("searched", {}))
                extra_state = self.extra_state()
                for name, value in mine.get("kept", {}).items():
                    if name in extra_state:
                        self._take_back(name, value)
            elif self.rank == 0 and _LOGS in (kept := checkpoint[STATE_KEY]["ranks"][0].get("kept", {})):
                self._take_back(_LOGS, kept[_LOGS])  # with other ranks too it is the same log
            if not self._silenced:
                self._silenced = True
                lightning_progress.silence_resume_warning(self.trainer, self.patches)
        elif self._logs is not None:
            self._take_back(_LOGS, self._logs_begun)
        lightning_checkpoints.restore_checkpoint(self.trainer, None if path is None else str(path), checkpoint)
        if self._resumed is not None and (mine := self._resumed["mine"]) is not None:
            lightning_callbacks.set_checkpoint_marks(self.trainer, mine.get("marks", {}))
            if "marks" in mine:
                outputs.overwrite_lost(self.trainer, self.patches, self.metadata)
        self._checkpoint = checkpoint

    def _complete_what_was_left_out(self, checkpoint: dict[str, Any]) -> None:
        paths = checkpoint[STATE_KEY].get("left_out", [])  # earlier versions did not keep them
        self._left_out = [path for path in paths if path[0] != STATE_KEY]
        if any(self.gather(bool(self._left_out))):
            self.saver.is_dumping = True
            try:
                left_out.complete(self.trainer, checkpoint, self._left_out)
            finally:
                self.saver.is_dumping = False
        if "state_dict" in checkpoint:  # not where the strategy has loaded it
            left_out.complete_extra_states(self.module, checkpoint["state_dict"])

    def extra_state(self) -> dict[str, Stateful]:
        """What this rank keeps for itself beside the training, by name."""
        logs: dict[str, Stateful] = {} if self._logs is None else {_LOGS: self._logs}
        return {**self.participants.extra_state(), **logs}

    def _take_back(self, name: str, value: Any) -> None:
        try:
            self.extra_state()[name].load_state_dict(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Of another version, say: state beside the training is not worth a resume that fails.
            log.warning("Ignoring the saved state of %s: incompatible format (%s).", name, error)

    @contextmanager
    def _restoring_training_state(self) -> Iterator[None]:
        with self.tiers.restoring():
            self._before_training_state()
            yield

    def _before_training_state(self) -> None:
        """Lightning restores loops and optimizers: from what it has loaded, which a search in between has dropped."""
        if self._optimizers is None:  # as the script makes them: a checkpoint's groups go before these
            self._optimizers = _settings_of_optimizers(self.trainer)
        loaded = lightning_checkpoints.loaded_checkpoint(self.trainer)
        if loaded and loaded is not self._checkpoint:
            return  # a search puts back what it has saved before it began
        if self._checkpoint is not None:
            if self._left_out:
                left_out.complete_training_state(self.trainer, self._checkpoint, self._left_out)
            lightning_checkpoints.set_loaded_checkpoint(self.trainer, self._checkpoint)
            self._checkpoint = None
            pruning.mask(self.module, self._masks)  # now that its optimizers are made, and DDP has wrapped it
            self._masks = {}

    def _record_outputs(self) -> None:
        now = outputs.record(self.trainer, self.run_id)
        self._logs = logs = Logs(self.trainer, self.patches) if self.trainer.is_global_zero else None

        def record() -> None:
            assert logs is not None
            before = self.fit.outputs or {}
            begun = before.get("begun", {}) if before.get("run") == self.run_id else {}
            self._logs_begun = now["begun"] = {**logs.state_dict(), **begun}
            if before != now:
                self.fit.outputs = now

        self.from_rank_0(record)

    def _describe(self) -> None:
        """Remembers what the fit trains, before the strategy shares it out among the ranks or changes its types."""
        if not self._fingerprint:
            module = type(self.module)
            whole = sharded.whole_parameters(self.module)
            self._fingerprint = {"module": f"{module.__module__}.{module.__qualname__}", "parameters": _digest(whole)}

    def _check_fingerprint(self, explicit: str | None) -> None:
        """A fit folder belongs to one model: no fit ever loads another's weights."""
        self._describe()

        def compare() -> list[str]:
            recorded = self.fit.fingerprint
            if recorded is not None:
                return self._differences(recorded)
            self.fit.fingerprint = {**self._fingerprint, "ckpt_path": explicit}
            return []

        if problems := self.from_rank_0(compare):  # ranks may hold different parameters
            raise AnotherFit(
                f"{self.fit.path} holds another fit: {', and '.join(problems)}. Fits are told "
                "apart by their order in the script. If the script or the model has changed, give the run another "
                "directory (--run-dir, run_dir=)."
            )

    def _differences(self, recorded: dict[str, Any]) -> list[str]:
        mine, problems = self._fingerprint, []
        if recorded.get("module") != mine["module"]:
            problems.append(f"it is of a {recorded.get('module')}, and this one of a {mine['module']}")
        # Older versions have recorded what rank 0 held when the strategy had been set up.
        here = ((name, None if is_lazy(p) else tuple(p.shape), p.dtype) for name, p in self.module.named_parameters())
        if recorded.get("parameters") not in (mine["parameters"], _digest(here)):
            problems.append("its parameters have other names, shapes or types")
        return problems

    def _check_data(self, loaders: list[Any]) -> None:
        """A script that skips finished fits by itself makes its fits in another order: weights must not be mixed up."""
        fingerprint = self.from_rank_0(lambda: self.fit.fingerprint or {})
        data = data_position.describe_data(loaders, fingerprint.get("data"))
        if "data" not in fingerprint:

            def record() -> None:
                self.fit.fingerprint = {**fingerprint, "data": data}

            self.from_rank_0(record)
        elif fingerprint["data"] != data:
            if self._resumed is not None and self._resumed["final"] and self.finished_before():
                raise AnotherFit(
                    f"{self.fit.path} holds a finished fit of other training data (another length, or other indices of "
                    "a Subset), whose weights would be taken for this one's. Fits are told apart by their order: have "
                    "the script make all of them every time (a finished one is restored, not trained), split the data "
                    "the same way at every start, or give the run another directory."
                )
            if self.trainer.is_global_zero:
                log.warning("The training data are not those with which this fit began: its resume is not exact.")

    def _check_settings(self, loaders: list[Any]) -> None:
        """Says what is another now than at the last start; a finished fit is not taken for one of other settings."""
        now = self._settings(loaders)

        def compare() -> tuple[str, str | None]:
            found = changes(self.fit.settings or now, now)
            if is_another_fit(found) and self._stands_for_another():
                return "", (
                    f"{self.fit.path} holds a fit that has finished with other settings: {say_changes(found)}. What "
                    "it has come to would be taken for this one's. Give the run another directory (run_dir=, "
                    "--run-dir, or --fresh of lightning-resilience launch). To go on with it all the same: launch's "
                    f"--continue-anyway, or {CONTINUE_VARIABLE}=1."
                )
            self.fit.settings = now
            said = f"{say_changes(found)}." if found else ""
            if self._resumed and (kept := [each.name for each in found if each.name in (self._optimizers or {})]):
                said += f" A resumed optimizer keeps what was saved of {', '.join(kept)}."
            return said, None

        changed, problem = self.from_rank_0(compare)
        if problem is not None:
            raise AnotherFit(problem)
        if changed and self.trainer.is_global_zero:
            log.warning("Changed since the last start of this fit: %s", changed)

    def _stands_for_another(self) -> bool:
        """Whether the final state of this fit would be taken for what somebody has asked for since."""
        if not self.had_finished or self._resumed is None or not self._is_its_own:
            return False
        if os.environ.get(CONTINUE_VARIABLE) == "1" or _is_started_by_itself():
            return False
        # Where a later fit has not finished, this is the resume of a run, in which much may differ by itself.
        outcomes = [fit.outcome for fit in self.run.fits]
        return all(outcome is not None and outcome.status == "finished" for outcome in outcomes)

    def _settings(self, loaders: list[Any]) -> Settings:
        trainer = self.trainer
        data = data_position.describe_data(loaders)
        found: Settings = {}
        if not os.environ.get(RUN_DIR_VARIABLE):  # else the launch has said it; and of limits the Trainer says more
            given = settings_of_arguments(sys.argv[1:])
            found = {name: value for name, value in given.items() if not is_end(name)}
        found |= flat("module", getattr(self.module, "hparams", None) or {})
        found |= flat("data", getattr(getattr(trainer, "datamodule", None), "hparams", None) or {})
        found |= self._optimizers or {}
        found |= {
            "batch size": _one(data_position.batch_sizes(loaders)),
            "training samples": _one([each["length"] for each in data]),
            **flat("precision", trainer.precision),
            **flat("accumulate_grad_batches", self._accumulates),
            **flat("gradient_clip_val", trainer.gradient_clip_val),
            **lightning_limits.limits(trainer),
            WORLD_SIZE: trainer.world_size,
        }
        return found

    @property
    def had_finished(self) -> bool:
        """Whether an earlier attempt has finished this fit, which may go on if its limit was raised."""
        return self.previous_outcome is not None and self.previous_outcome.status == "finished"

    def _understand(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any] | None:
        state: dict[str, Any] = checkpoint[STATE_KEY]
        epoch = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        if "mine" in state:  # saved by this rank for this rank
            lightning_checkpoints.load_own_checkpoint(self.trainer, self._loading)
            about = {key: state[key] for key in ("due", "final", "arrival_order")}
            mine = _with_defaults(state["mine"])
            return {**about, "mine": mine, "epoch": epoch, "batch_sizes": mine.get("batch_sizes")}
        world_size = len(state["ranks"])
        if world_size != self.trainer.world_size:
            if self.trainer.is_global_zero:
                log.warning(
                    "%s was saved by %d ranks and is resumed by %d: weights and optimizer are the same, but the data "
                    "order and the random numbers are not, and this epoch is continued from batch %d of each rank.",
                    path,
                    world_size,
                    self.trainer.world_size,
                    _resized(checkpoint, world_size, self.trainer.world_size),
                )
            else:
                _resized(checkpoint, world_size, self.trainer.world_size)
            return {
                "mine": None,
                "due": state["due"],
                "final": state["final"],
                "arrival_order": None,
                "epoch": epoch,
                "batch_sizes": state["ranks"][0].get("batch_sizes"),
            }
        return {
            "epoch": epoch,
            "mine": _with_defaults(state["ranks"][self.rank]),
            "due": state["due"],
            "final": state["final"],
            "arrival_order": state["arrival_order"],
            "batch_sizes": state["ranks"][self.rank].get("batch_sizes"),
        }

    # -- the training data ---------------------------------------------------------------------------------------------

    def _before_first_iterator(self, load_loader_states: Callable[[], None]) -> None:
        loaders = lightning_data.train_loaders(self.trainer)
        if self._is_search():
            load_loader_states()
            return
        self._guard_workers(loaders)
        for before_training_data in self.participants.implement(Participant.before_training_data):
            before_training_data(loaders)
        self._check_data(loaders)
        self._check_settings(loaders)
        self.tiers.settings_are_accepted()
        if self.trainer.is_global_zero:
            for reason in data_position.inexact_loaders(loaders):
                log.warning("A resume may not be exact: %s", reason)
        mine = self._resumed["mine"] if self._resumed is not None else None
        if self._resumed is not None:
            lightning_data.set_epoch_of_samplers(self.trainer, self._resumed["epoch"])
        if mine is None:
            load_loader_states()
        else:
            if mine["loader_states"] is not None:
                lightning_data.load_loader_states(self.trainer, mine["loader_states"])
            elif self._resumed is not None and self._resumed["epoch"] > 0:
                data_position.start_persistent_workers(loaders)
            self.set_random_state(mine["epoch"] or mine["now"])
        self._before_iterator()

    def _before_iterator(self) -> None:
        if not self._is_search():
            self._epoch_random_state = self.get_random_state()

    def _guard_workers(self, loaders: list[Any]) -> None:
        listener = signals.installed()
        signums = listener.signums if listener is not None and self.participants.protect_workers() else ()
        for loader in loaders:
            if isinstance(loader, DataLoader) and loader.num_workers > 0:
                init = loader.worker_init_fn
                if not isinstance(init, signals.WorkerGuard):
                    self._guarded[loader] = init  # not kept alive: loaders may be made anew in every epoch
                    loader.worker_init_fn = signals.WorkerGuard(init, signums)

    def _generators(self) -> list[torch.Generator]:
        return data_position.loader_generators(
            [*lightning_data.train_loaders(self.trainer), *lightning_data.validation_loaders(self.trainer)]
        )

    def get_random_state(self) -> data_position.RandomState:
        """The state of all random generators of this process that the training draws from."""
        return data_position.get_random_state(self.trainer.strategy.root_device, self._generators())

    def set_random_state(self, state: data_position.RandomState) -> None:
        """Puts it back."""
        data_position.set_random_state(state, self.trainer.strategy.root_device, self._generators())

    # -- start and end of training -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called in ``on_train_start``: from here on there are boundaries."""
        if self._running:
            return
        self._running = True
        if self.progress is None and (launched := rank_probe.of_worker()) is not None:
            launched.progress.enter("left")  # nobody notes the sections of this fit
            self._unwatched = launched
        self.patience = Patience(self.advanced)
        self.tiers.begin()
        self._fetches_ahead = lightning_data.fetches_ahead_here(self.trainer)
        if self._resumed is not None:
            self._find_place_in_data(self._resumed["mine"])
        if self.gone_back:
            return  # what follows lasts for as long as the process
        self._frame = lightning_loops.frame(self.trainer)
        if self._resumed is not None and not self._resumed["final"]:
            lightning_callbacks.resume_weight_averaging(self.trainer, self.module)
        ddp = lightning_strategies.ddp_wrapper(self.trainer)
        if self._resumed is not None:
            self.arrival_order = self._resumed["arrival_order"]
        if ddp is not None and self.rank == 0:
            for reason in inexact_reasons(ddp):
                log.warning("A resume will not be exact: %s", reason)
        if ddp is not None and rebuilds_buckets(ddp):
            if self.arrival_order is None:
                self._recorder = GradientArrivalRecorder(ddp)
            elif not replay_gradient_arrival(ddp, self.arrival_order) and self.rank == 0:
                log.warning(
                    "The parameters that need gradients have changed since the checkpoint was saved: DDP reduces in "
                    "another order, and the weights may differ in their last bits from those of an undisturbed run."
                )

    def _find_place_in_data(self, mine: dict[str, Any] | None) -> None:
        if mine is not None:
            lightning_data.set_reload_epochs(self.trainer, mine["reload_epochs"])
            if mine["validated"]:
                data_position.start_persistent_workers(lightning_data.validation_loaders(self.trainer))
        if self._resumed is not None and self._resumed["final"]:
            return  # a new epoch begins, in which nothing has been fetched
        if mine is not None and mine["first_batch"] is not None:
            self.set_random_state(mine["first_batch"])
            self._first_batch_random_state = mine["first_batch"]
        change = self._change_of_batch_size(mine)
        if mine is None or mine["loader_states"] is None:
            batches = lightning_progress.epoch_loop_batches(self.trainer)
            if mine is not None:
                batches = int(mine["fetched"] * change)
            if batches and lightning_data.skip_batches(self.trainer, batches):
                lightning_progress.count_replayed(self.trainer)
                return
            if batches and self.rank == 0:
                log.info("Fetching the first %d batches of epoch %d again.", batches, self.trainer.current_epoch)
            fetch_one = lightning_data.replay_fetch(self.trainer)

            def fetch() -> None:
                fetch_one()
                self.advanced()

            self._before_fetch = mine["in_flight"] if mine is not None else None
            if batches and self._before_fetch is not None:
                data_position.replay(fetch, batches - 1, self.rank)
                self.set_random_state(self._before_fetch)
                fetch()
            else:
                data_position.replay(fetch, batches, self.rank)
            lightning_progress.count_replayed(self.trainer)

    def _change_of_batch_size(self, mine: dict[str, Any] | None) -> Fraction:
        """How many batches stand now for one of when the state was saved; the loop counts in those of now."""
        assert self._resumed is not None
        loaders = lightning_data.train_loaders(self.trainer)
        now = data_position.batch_sizes(loaders)
        before = self._resumed["batch_sizes"] or now  # older versions have not saved it
        if before == now:
            return Fraction(1)
        change, done = (
            data_position.change_of_batch_size(before, now),
            lightning_progress.epoch_loop_batches(self.trainer),
        )
        if change is None:
            if self.rank == 0:
                log.warning(
                    "The sizes of the batches have changed from %s to %s, each in its own way: this epoch does not go "
                    "on behind the same samples.",
                    before,
                    now,
                )
            return Fraction(1)
        keeps_its_place = mine is not None and mine["loader_states"] is not None
        batches = math.ceil(done * change) if keeps_its_place else int(done * change)
        batches = lightning_progress.count_batches_done(self.trainer, batches)
        if self.rank == 0:
            known = "each of its samples is trained on once"
            if data_position.workers_have_own_samples(loaders):
                known = "which samples are left differs, since workers share them out by batches"
            elif batches < done * change:
                known = "less than a batch of each rank is trained on twice"
            log.warning(
                "Batches had %s samples and have %s now: this epoch goes on behind batch %d, where batch %d ended; %s.",
                before[0],
                now[0],
                batches,
                done,
                known,
            )
        return change

    def start_sanity_check(self) -> None:
        """Called in ``on_sanity_check_start``: its batches are boundaries too."""
        self._running = True

    def end_sanity_check(self) -> None:
        """Called in ``on_sanity_check_end``."""
        self._running = False

    def _end_of_epoch(self) -> None:
        if self._is_training:
            for at_end_of_epoch in self.participants.implement(Participant.at_end_of_epoch):
                at_end_of_epoch()
            self.saver.at_end_of_epoch()
            if lightning_limits.is_cut_short(self.trainer):
                self._cut_short = True
                self._keep_before_the_end()
            self._enter("out_of_section")

    def _keep_before_the_end(self) -> None:
        """Saves where a fit would go on whose limit is raised when it has ended in the middle of an epoch.

        What Lightning does at such an end (hooks of the end of an epoch, a validation) a longer fit does elsewhere. An
        older state of the fit serves as well.
        """
        if not self._saves_final_state or not lightning_progress.accumulation_window_complete(self.trainer):
            return
        if not self.saver.waits():
            checkpoint_io.on_every_rank(self.trainer.strategy, self.saver.wait)
            saved = self.from_rank_0(lambda: resume.checkpoints(self.fit.checkpoints))
            if all(map(resume.is_final, saved)):
                self.saver.save("before the end")

    def _before_epoch(self) -> None:
        """A finished fit whose limit was raised goes on with a new epoch, as if it had never ended."""
        if self._is_training and self._resumed is not None and self._resumed["final"]:
            before = self.previous_outcome.details if self.previous_outcome is not None else {}
            if self.rank == 0 and (self.tiers.ended or before).get(ENDS_APART):
                log.warning(
                    "This fit goes on from its end, which is not exact: a longer one had not stood there (its last "
                    "epoch was cut short, or a callback has changed the weights at the end)."
                )
            self._complete_resume()

    def _before_train_end(self) -> None:
        """Training has ended: what it has come to is safe before any ``on_train_end`` may take its time."""
        if not self._is_training:
            return
        self._stand_at("out_of_section", agreement.training(self.steps_counted))
        if self.trainer.world_size > 1:
            self._meet_behind_training()
        if (
            self._resumed is not None and self._resumed["final"]
        ):  # an earlier attempt has saved it, and has not come to its end
            self._stand_at_the_end(self._resumed["mine"])
        elif self._saves_final_state and lightning_limits.can_be_ended_again(self.trainer) and not self._settle():
            self._save_final(is_over=False, apart=self._cut_short)
        if self.final_path is not None and any(self.gather(lightning_limits.acts_at_the_end(self.trainer))):
            self._at_end = self._in_short()

    def _meet_behind_training(self) -> None:
        """Waits, in no collective, until all ranks have come to the end of the training; one that fails is named."""
        # Those that ask have passed the first of these boundaries, so that all act at the second one.
        first, second = (agreement.training(self.steps_counted + more) for more in (1, 2))
        self._left += self.agreement.boundary(first, Needs.NOTHING)
        if not self._is_behind_training.is_set():
            self.agreement.request(_TRAINED)
        while not self._is_behind_training.wait(0.01):
            self.advanced()
            self._left += self.agreement.boundary(first, Needs.NOTHING)
        events = self.agreement.boundary(second, Needs.NOTHING)
        self._left += [event for event in events if event.kind != _TRAINED]
        self.agreement.arrive(next(event for event in events if event.kind == _TRAINED))

    def _on_event(self, event: Event) -> None:
        if event.kind == _TRAINED:
            self._is_behind_training.set()
        for on_event_known in self.participants.implement(Participant.on_event_known):
            on_event_known(event)

    def _stand_at_the_end(self, mine: dict[str, Any] | None) -> None:
        """The last touch of a resume from a state behind the training."""
        assert self.tiers.loaded is not None
        self.final_path = self.tiers.loaded.path
        if mine is not None:
            self.trainer.should_stop = mine["should_stop"]
            lightning_metrics.set_latest_metrics(self.trainer, mine["metrics"])
            lightning_loops.set_modes(self.trainer, self.module, mine["modes"])
        self._complete_resume()

    def _in_short(self) -> str:
        with self.during("checkpointing"):
            return self.saver.in_short()

    def _settle(self) -> bool:
        """Has the last steps judged; returns whether something that was asked for because of them is still to be done.

        It is done when the agreement is closed, and may well be that this state is not the end.
        """
        asks = [before_end() for before_end in self.participants.implement(Participant.before_end)]
        self._enter("out_of_section")
        return any(self.gather(any(asks)))

    @property
    def _saves_final_state(self) -> bool:
        return bool(self.participants.implement(Participant.after_final_save))

    def _save_final(self, is_over: bool, apart: bool) -> bool:
        if not self._saves_final_state:
            return True
        limits = lightning_limits.limits(self.trainer)
        by = lightning_limits.limit_reached(self.trainer) or _ASKED
        self.metadata["ended"] = {"by": by, "limits": limits, ENDS_APART: apart, "is_over": is_over}
        path = self.saver.save("finished", final=True)
        if path is not None:
            self.final_path = path
            if self.trainer.is_global_zero:
                for after_final_save in self.participants.implement(Participant.after_final_save):
                    after_final_save()
        return path is not None

    def _complete(self) -> None:
        """Every ``on_train_end`` has ended too: closes the agreement, publishes what these have changed."""
        if not self._is_training:
            return  # the loop of a search
        left = self._left + list(self.agreement.close(self.advanced))  # it is whom they wait for that may be stuck
        is_changed = self._at_end is not None and any(self.gather(self._in_short() != self._at_end))
        is_to_be_saved = self.final_path is None or is_changed
        if is_to_be_saved:
            self._settle()
        for event in left:
            handled = [on_event(event) for on_event in self.participants.implement(Participant.on_event_at_end)]
            if not any(handled) and event.payload:  # otherwise it was routine
                log.info(
                    "%s was asked for by rank %d when the fit had ended; nothing is left to do.", event.kind, event.rank
                )
        apart = self._cut_short
        if self._at_end is None:
            apart |= lightning_limits.changes_weights_at_the_end(self.trainer)
        apart |= is_changed  # a longer fit would have gone on without that
        is_missing = is_to_be_saved and not self._save_final(True, apart)
        self._running = False
        self._enter("out_of_section")
        for after_save in self.participants.implement(Participant.after_save):
            after_save(True)
        step = self.trainer.global_step
        if self.trainer.is_global_zero:
            reason = lightning_limits.limit_reached(self.trainer) or _ASKED
            about = {ENDS_APART: apart, _END_IS_MISSING: is_missing and self.final_path is not None}
            self.end("finished", reason, {**lightning_limits.limits(self.trainer), **about})
            self.ledger.record(Finished(fit=self.index, step=step, saved=False if is_missing else None))
            self._say_what_went_wrong()
        self._finished = True

    def _say_what_went_wrong(self) -> None:
        """The launch says it in its last line; where there is none, nobody else would."""
        if RUN_DIR_VARIABLE in os.environ:
            return
        with suppress(OSError):
            if trouble := troubles(read_ledger(self.run.ledger), self.index):
                log.warning("The fit has finished, but not without trouble: %s.", trouble)

    def end(self, status: Status, reason: str, details: dict[str, Any] | None = None) -> None:
        """Writes how this fit ended, if this attempt still owns the run; a full disk must not change how it ends."""
        if self.run.attempt != self.token:
            return
        before = self.previous_outcome.details if self.previous_outcome is not None else {}
        details = {name: before[name] for name in (ENDS_APART,) if name in before} | (details or {})
        outcome = Outcome(status, reason, self.trainer.global_step, self.token, details=details)
        try:
            if self.had_finished and status != "finished" and not self._has_trained:
                self.fit.failed_start = outcome  # what the fit has come to is still there
            else:
                self.fit.outcome = outcome
        except OSError as error:
            log.error("The outcome of this fit (%s: %s) could not be written: %s", status, reason, error)

    def finished_before(self) -> bool:
        """Whether an earlier attempt finished this fit and the limit that ended it has not been raised."""
        outcome = self.previous_outcome
        if outcome is None or not self.had_finished or outcome.details.get(_END_IS_MISSING):
            return False
        return self.ends_there(outcome.reason, outcome.details)

    def ends_there(self, by: str, limits: dict[str, Any]) -> bool:
        """Whether the fit still ends where it has ended.

        Args:
            by: What had ended it.
            limits: Those that it had.
        """
        if by == _ASKED:  # who has set it may want more by now
            return not self._a_limit_is_raised(limits)
        return not _is_raised(limits.get(by), lightning_limits.limits(self.trainer).get(by))

    def _has_only_to_end(self) -> bool:
        """Whether the fit was resumed where an attempt had not come to the end of its ``on_train_end``."""
        ended = self.tiers.ended
        if self._resumed is None or not self._resumed["final"] or ended is None or self.finished_before():
            return False
        return not ended["is_over"] and self.ends_there(ended["by"], ended["limits"])

    def _a_limit_is_raised(self, before: dict[str, Any]) -> bool:
        return any(_is_raised(before.get(name), limit) for name, limit in lightning_limits.limits(self.trainer).items())

    def what_ended_it(self) -> str:
        """What has to be raised for more training of a finished fit, for a person."""
        reason = self.previous_outcome.reason if self.previous_outcome is not None else _ASKED
        return "max_epochs, max_steps, max_time or a patience" if reason == _ASKED else f"the {reason} that ended it"

    def fail(self, exception: BaseException) -> None:
        """Called in ``on_exception``: peers learn of it, the outcome is written, and everything is taken off again."""
        if _sessions.get(self.trainer) is not self or os.getpid() != self._pid:
            return  # a child that the user's code has forked must not speak for its parent
        self.failing = True
        if isinstance(exception, signals.Interrupted):
            self.interrupted_by = weakref.ref(exception)
        listener = signals.installed()
        is_ours = listener is not None and signal.SIGINT in listener.signums
        if isinstance(exception, KeyboardInterrupt) and self.rank == 0 and not is_ours:
            log.warning(
                "Ctrl-C: this step is not saved. Preemption(signals=[..., 'SIGINT']), as recipes.workstation() has it, "
                "saves first."
            )
        try:
            if not isinstance(exception, (signals.Interrupted, StaleAttempt)):
                self._record_failure(exception)
        finally:
            self.leave()

    def _record_failure(self, exception: BaseException) -> None:
        kind = type(exception).__name__
        reason = f"{kind}: {exception}"
        # Where a launch decides it is one of the faults that it knows; else a run that is refused has not been touched.
        is_refused = isinstance(exception, AnotherFit) and RUN_DIR_VARIABLE not in os.environ
        event = RunRefused if is_refused else Fault
        self.ledger.record(event(kind=kind, fit=self.index, step=self.trainer.global_step, reason=reason))
        asked = [self.tiers.verdict, *self.participants.implement(Participant.on_failure)]
        verdicts = [verdict for on_failure in asked if (verdict := on_failure(exception)) is not None]
        if isinstance(exception, AnotherFit):
            verdicts.append(str(exception))
        if verdicts:
            # Before the peers learn of the failure: they must not retry it.
            self.end("halted", verdicts[0], {"exit_code": getattr(exception, "exit_code", 1)})
        self.agreement.abort(reason)
        if not verdicts and not self._finished and not self._is_halted():
            self.end("failed", reason)

    def _is_halted(self) -> bool:
        """Whether a rank of this attempt has had the whole run halted; the others have only lost a peer."""
        outcomes = (self.fit.outcome, self.fit.failed_start)
        return any(each is not None and each.status == "halted" and each.attempt == self.token for each in outcomes)

    def leave(self) -> None:
        """Called in ``teardown`` and after an exception: leaves nothing behind, whatever goes wrong."""
        if os.getpid() != self._pid or _sessions.pop(self.trainer, None) is None:
            return
        with ExitStack() as steps:  # the last one first; one that raises keeps none from its turn
            if self.rank == 0:
                steps.callback(self.run.left)
            steps.callback(begin_another, *(wandb_run_id(self.run_id, self.index + more) for more in (0, 1)))
            steps.callback(self._forget_participants)
            steps.callback(_each, self.participants.implement(Participant.left))
            steps.callback(self._forget)
            steps.callback(self._release)
            steps.callback(self.agreement.stop)
            steps.callback(self._put_back_finished)
            steps.callback(self.saver.close)
            steps.callback(_each, self.participants.implement(Participant.leave))

    def _put_back_finished(self) -> None:
        """A finished fit was restored, not trained: what the script does next finds what it left."""
        if self._resumed is not None and self._resumed["final"] and (mine := self._resumed["mine"]) is not None:
            self.set_random_state(mine["now"])
            lightning_metrics.set_latest_metrics(self.trainer, mine["metrics"])

    def _release(self) -> None:
        self._loading.undo()
        for loader, init in self._guarded.items():
            loader.worker_init_fn = init
        self.patches.undo()
        if self.failing:
            lightning_loops.after_exception_hooks(self.trainer, self.save_patches, self._release_saves)
        else:
            self._release_saves()

    def _forget(self) -> None:
        global _active
        if self._recorder is not None:
            self._recorder.stop()
        if _active is self:
            _active = None

    def _forget_participants(self) -> None:
        if self._unwatched is not None:
            self._unwatched.end_fit()
        for member in self.members:
            member._participant = None

    def _release_saves(self) -> None:
        self.save_patches.undo()  # what was put on last comes off first
        with self.during("checkpointing"):
            checkpoint_io.undo(self.trainer)  # waits for saves in the background

    # -- boundaries ----------------------------------------------------------------------------------------------------

    def _is_search(self) -> bool:
        # A learning-rate search inside the fit runs the same loops with the callbacks taken out of the Trainer.
        callbacks = vars(self.trainer)["callbacks"]
        if callbacks is self._own_callbacks:
            return False
        if any(callback in self.members for callback in callbacks):
            self._own_callbacks = callbacks
            return False
        return True

    @property
    def _is_training(self) -> bool:
        """Whether what the loops do is the training of this fit."""
        return self._running and not self._is_search()

    def _training_boundary(self) -> bool:
        if not self._is_training:
            self.advanced()  # a search
            return True
        position = agreement.training(self.steps_counted)
        # The first batch is slow in its own way: compilers, caches, workers that start.
        self._stand_at("step" if self._warm else "setup", position)
        if self._resumed is not None and self._complete_resume():
            return False
        self._warm = True
        if lightning_progress.epoch_loop_batches(self.trainer) == 0:
            # A sampler without workers draws its seed only at the first batch; hooks may have drawn since its iterator
            # was made.
            self._first_batch_random_state = self.get_random_state()
        if self._recorder is not None and (order := self._recorder.finish()) is not None:
            self.arrival_order, self._recorder = order, None
        clean = lightning_progress.accumulation_window_complete(self.trainer) and self._is_behind_a_step()
        events = self.agreement.boundary(position, _CLEAN_TRAINING if clean else Needs.TRAINING)
        for event in events:
            self._act(event)
        if self._goes_back is not None:
            self._go_back()
        participants = self.participants
        for after_batch in participants.implement(Participant.after_batch):
            after_batch(clean)
        may_save = clean and not self.saves_paused
        for at_boundary in participants.implement(Participant.at_boundary):
            at_boundary(may_save)
        self.saver.at_boundary()
        if self._fetches_ahead:
            self._before_fetch = self.get_random_state()
        if any(skips_batch() for skips_batch in participants.implement(Participant.skips_batch)):
            before = self.get_random_state()
            lightning_loops.drop_batch(self.trainer)
            self.set_random_state(before)  # as if it had never been there, as far as this process is concerned
            return False
        for before_batch in participants.implement(Participant.before_batch):
            before_batch()
        self._has_trained = True
        return True

    @property
    def saves_paused(self) -> bool:
        """Whether nothing is saved, the same on all ranks: the last steps were bad, and what was good is kept."""
        return any(pauses_saves() for pauses_saves in self.participants.implement(Participant.pauses_saves))

    def _is_behind_a_step(self) -> bool:
        """Whether no gradients of the user's own accumulation wait: in manual optimization only a step says so."""
        if self.module.automatic_optimization:
            return True
        step = self.trainer.global_step
        before, self._step_before = self._step_before, step
        self._steps_are_seen |= before not in (None, step)  # not those of optimizers without Lightning's wrapper
        return before != step or not self._steps_are_seen

    @property
    def steps_counted(self) -> int:
        """Grows with every training batch begun and with every epoch begun, also when the fit goes back."""
        return self._counted_before + lightning_progress.steps_counted(self.trainer)

    # -- going back ----------------------------------------------------------------------------------------------------

    def go_back(self, until: int, otherwise: Callable[[], None], only_global: bool = False) -> None:
        """Has the fit go on from its newest state that can be verified, as a new process would, but in this one.

        To be called in the handler of an event, on all ranks: what else is agreed on for this boundary comes first.

        Args:
            until: Not from one of a larger ``trainer.global_step`` than this.
            otherwise: Called on all ranks if there is no such state.
            only_global: Whether only a state in the run directory will do.
        """
        self._goes_back = until, otherwise, only_global

    def _go_back(self) -> None:
        assert self._goes_back is not None
        (until, otherwise, only_global), self._goes_back = self._goes_back, None
        if lightning_loops.frame(self.trainer) != self._frame:
            raise RuntimeError(
                "The fit has to go back to an older state, but a callback has changed its optimizers, schedulers or "
                "first weights meanwhile: only a restart makes them anew. Start it again; it resumes."
            )
        for before_rollback in self.participants.implement(Participant.before_rollback):
            before_rollback()
        checkpoint_io.on_every_rank(self.trainer.strategy, self.saver.wait)
        self.patience = Patience(self.advanced)
        choice = self.tiers.newest(until, self._explicit is not None, only_global)
        if choice is None and self._explicit is None:
            otherwise()
        else:
            raise _GoBack(choice)

    def _run(self, loop: Callable[[], None]) -> None:
        begun = self.get_random_state()  # of which a new process makes its loaders
        while True:
            try:
                return lightning_loops.end_again(self.trainer) if self._has_only_to_end() else loop()
            except _GoBack as back:
                choice = back.choice
            except (signals.Interrupted, StaleAttempt):
                raise
            except BaseException:
                if os.getpid() == self._pid:
                    for on_raised in self.participants.implement(Participant.on_raised):
                        on_raised()
                raise
            self._begin_again(choice)
            del choice
            self.set_random_state(begun)

    def _begin_again(self, choice: _Choice | None) -> None:
        counted = self.steps_counted
        self._running = False
        self._enter("setup")
        self._loading.undo()
        lightning_loops.begin_anew(self.trainer, self.module)
        self.trainer.accumulate_grad_batches = self._accumulates  # a schedule looks at the beginning whether it is free
        self._first_batch_random_state = self._epoch_random_state = self._before_fetch = None
        self.before_evaluation = self._step_before = None
        self._restore_from(choice)
        lightning_checkpoints.restore_training_state(self.trainer)
        self._counted_before += counted + 1 - self.steps_counted
        self.gone_back, self._warm = True, False
        for after_rollback in self.participants.implement(Participant.after_rollback):
            after_rollback()

    def _complete_resume(self) -> bool:
        """The last touch of a resume, right where the state was saved. Returns whether a validation is due first."""
        assert self._resumed is not None
        resumed, self._resumed = self._resumed, None
        lightning_progress.end_restart(self.trainer)
        if (mine := resumed["mine"]) is not None:
            if not resumed["final"]:
                raised = self._a_limit_is_raised(mine.get("limits", {}))
                self.trainer.should_stop = mine["should_stop"] and not raised
                lightning_metrics.set_metric_states(self.trainer, self.module, mine["metrics"])
                if mine.get("accumulates", self._accumulates) != self._accumulates:
                    del mine["modes"]["accumulate_grad_batches"]  # the script has another by now
                lightning_loops.set_modes(self.trainer, self.module, mine["modes"])
            self.set_random_state(mine["now"])
        return bool(resumed["due"] == "validation")

    def _evaluation_start(self) -> None:
        if self._is_training:
            self._enter("setup" if self.trainer.sanity_checking else "out_of_section")
            self.before_evaluation = {
                "random": self.get_random_state(),
                "progress": lightning_progress.evaluation_progress(self.trainer),
                "metrics": lightning_metrics.metric_states(self.trainer, self.module),
                "modes": lightning_loops.modes(self.trainer, self.module),
            }
            if not self.trainer.sanity_checking and lightning_limits.is_cut_short(self.trainer):
                self._keep_before_the_end()

    def _evaluation_boundary(self, loader: int, index: int) -> None:
        if self._is_training:
            self._boundary_in_evaluation(agreement.evaluation(self.steps_counted, loader, index))

    def _evaluation_end(self) -> None:
        if self._is_training:
            self._boundary_in_evaluation(agreement.end_of_evaluation(self.steps_counted))
            self.before_evaluation = None
            if not self.trainer.sanity_checking:
                self._enter("out_of_section")

    def _boundary_in_evaluation(self, position: agreement.Position) -> None:
        self._stand_at("setup" if self.trainer.sanity_checking else "validation", position)
        # Before the first batch there is nothing to save yet that a fresh start would not make again: the sanity check
        # is short, and the first training boundary follows it.
        clean = not self.trainer.sanity_checking and lightning_progress.accumulation_window_complete(self.trainer)
        for event in self.agreement.boundary(position, Needs.CLEAN if clean else Needs.NOTHING):
            self._act(event)

    def _act(self, event: Event) -> None:
        self.agreement.arrive(event)
        for on_event in self.participants.implement(Participant.on_event):
            on_event(event)

    # -- what is saved of it -------------------------------------------------------------------------------------------

    def own_state(self, final: bool) -> dict[str, Any]:
        """What an exact resume of this rank needs beside Lightning's own state.

        Args:
            final: Whether the fit has ended.
        """
        before = self.before_evaluation
        return {
            "epoch": None if final else self._epoch_random_state,
            "now": before["random"] if before is not None else self.get_random_state(),
            "fetched": 0 if final else lightning_data.batches_fetched(self.trainer),
            "first_batch": None if final else self._first_batch_random_state,
            "in_flight": None if final else self._before_fetch,
            "kept": {name: state.state_dict() for name, state in self.extra_state().items()},
            "loader_states": None if final else lightning_data.loader_states(self.trainer),
            "metrics": (
                before["metrics"] if before is not None else lightning_metrics.metric_states(self.trainer, self.module)
            ),
            "reload_epochs": lightning_data.reload_epochs(self.trainer),
            "searched": lightning_callbacks.found_by_searches(self.trainer),
            "should_stop": self.trainer.should_stop,
            "marks": lightning_callbacks.checkpoint_marks(self.trainer),
            "limits": lightning_limits.limits(self.trainer),
            "accumulates": self._accumulates,
            "batch_sizes": data_position.batch_sizes(lightning_data.train_loaders(self.trainer)),
            "modes": before["modes"] if before is not None else lightning_loops.modes(self.trainer, self.module),
            "validated": data_position.persistent_workers_run(lightning_data.validation_loaders(self.trainer)),
        }


def _each(methods: Sequence[Callable[[], None]]) -> None:
    """Calls all of them in order, also behind one that raises."""
    with ExitStack() as calls:
        for method in reversed(methods):
            calls.callback(method)


def _is_raised(before: Any, now: Any) -> bool:
    """Whether a limit of the fit is larger than before; without one there is no larger."""
    return isinstance(before, (int, float)) and before >= 0 and (now is None or now < 0 or now > before)


def _digest(parameters: Iterable[tuple[str, tuple[int, ...] | None, torch.dtype]]) -> str:
    lines = "\n".join(f"{name} {shape} {dtype}" for name, shape, dtype in parameters)
    return hashlib.sha256(lines.encode()).hexdigest()


def _with_defaults(own: dict[str, Any]) -> dict[str, Any]:
    """A rank's own state, also if what data loaders keep of themselves could not be saved."""
    metrics = {"results": {}, "modules": {}, "latest": {}, "loop": {}, **own.get("metrics", {})}
    return {"loader_states": None, "kept": {}, **own, "metrics": metrics}


def _resized(checkpoint: dict[str, Any], before: int, now: int) -> int:
    """Rescales the progress of the epoch to another world size, rounding down: a few samples may be seen twice."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    batches = progress["completed"] * before // now
    for key in ("ready", "started", "processed", "completed"):
        progress[key] = batches
    return int(batches)


class SessionCallback(lightning_callbacks.ResilienceCallback):
    """Base of the callbacks that take part in a session: joins it in ``setup`` and hands over what all of them do.

    Attributes:
        run_dir: The run directory that the user gave this callback, if any.
    """

    run_dir: str | os.PathLike[str] | None = None
    _same_as: ClassVar[tuple[str, ...]] = ()
    """Names of other packages' callbacks that do the same: both in one Trainer would act on each other."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in changed(self).items())})"

    _participant: Participant | None = None

    def _participate(self, session: FitSession) -> Participant | None:
        """Called in the ``setup`` of a fit: the policy of this callback in it; ``None``: this callback is off."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to the fit in progress."""
        return {key: value for key, value in vars(self).items() if key != "_participant"}

    def _before_setup(self, trainer: Trainer) -> None:
        """Has what Lightning itself writes go on where an earlier attempt of this fit has written it."""
        inner = _active is not None and not _active.trainer.interrupted
        if trainer.state.fn != "fit" or inner or _is_passive(trainer) or _obstacle(trainer) is not None:
            return
        _check_worker_count(trainer)

        run = RunDirectory(_place_of_run(trainer, _own_run_dir(trainer)))  # refused on all ranks, or on none

        def look() -> dict[str, Any] | None:
            fit = run.fit(_fits_begun.get(run.path, 0))
            if run.trained_by(_job()) is not None:
                return None  # this fit is refused in a moment
            recorded = None
            if fit.path.exists():
                recorded = fit.outputs or {}
                recorded = recorded if recorded.get("run") == run.identity() else {}
            fit.create()
            return recorded

        recorded = _from_rank_0(trainer, look, Patience())
        outputs.go_on(trainer, recorded)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Joins the fit's session."""
        if (session := _join(self, trainer, pl_module, stage)) is not None:
            self._participant = self._participate(session)
            if self._participant is not None:
                session.participants.add(self._participant)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The batches of the sanity check are boundaries too."""
        if session := session_of(trainer, self):
            session.start_sanity_check()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends what the start began."""
        if session := session_of(trainer, self):
            session.end_sanity_check()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the resume."""
        if session := session_of(trainer, self):
            session.start()
            if not session.gone_back and self._participant is not None:
                self._participant.start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves nothing behind."""
        if session := session_of(trainer, self):
            session.fail(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves nothing behind."""
        if session := session_of(trainer, self):
            session.leave()


def _join(callback: SessionCallback, trainer: Trainer, module: LightningModule, stage: str) -> FitSession | None:
    """The session of ``trainer``'s fit, which ``callback`` takes part in from now on; called in its ``setup``.

    Returns:
        ``None`` where the callback has to stay passive: outside of ``fit``, in ``fast_dev_run`` and ``barebones``, in
        the fit of a Tuner's search, in a Trainer that runs inside another Trainer's fit, and where another callback of
        the same class acts in this Trainer.
    """
    global _active
    if stage != "fit" or _is_passive(trainer):
        return None
    kind: type[SessionCallback] = next(cls for cls in type(callback).__mro__ if SessionCallback in cls.__bases__)
    alike = [
        other for other in lightning_callbacks.callbacks(trainer) if isinstance(other, kind)
    ]  # also a user's subclass
    # One acts: the user's own, if there is one. Of injected ones there may be several, since a list of callbacks that
    # is used for a second Trainer still holds those of the first.
    if callback is not min(alike, key=lambda other: other._injected):
        return None
    if foreign := lightning_callbacks.callbacks_named(trainer, kind._same_as):
        theirs = f"{type(foreign[0]).__module__}.{type(foreign[0]).__name__}"
        reason = (
            f"{theirs} and {kind.__name__} do the same: two at once would act on each other. Take one of them out of "
            "the Trainer."
        )
        if not callback._injected:
            raise ValueError(reason)
        if trainer.is_global_zero:
            log.warning("%s %s does nothing in this fit.", reason, kind.__name__)
        return None
    session = _sessions.get(trainer)
    if session is None:
        if _active is not None and _active.trainer.interrupted:
            _active.leave()  # another callback has raised in its on_exception, before ours could leave
        if _active is not None:
            return None
        if (obstacle := _obstacle(trainer)) is not None:
            if not callback._injected:
                raise RuntimeError(obstacle)
            if trainer.is_global_zero:  # the script was not written for us and works without us
                log.warning("%s %s does nothing in this fit.", obstacle, type(callback).__name__)
            return None
        _check_worker_count(trainer)
        session = FitSession(trainer, module, _own_run_dir(trainer))
        _sessions[trainer] = _active = session
    session.members.append(callback)
    return session


@cache
def _say_once(message: str) -> None:
    log.warning(message)


def _is_passive(trainer: Trainer) -> bool:
    if is_turned_off():
        if trainer.is_global_zero:
            _say_once(f"{OFF_VARIABLE} is set: the callbacks of lightning-resilience do nothing.")
        return True
    return bool(vars(trainer)["fast_dev_run"]) or trainer.barebones or lightning_callbacks.is_search(trainer)


def _own_run_dir(trainer: Trainer) -> str | os.PathLike[str] | None:
    """The run directory that the user gave the callbacks of ``trainer``."""
    run_dirs = [
        own.run_dir for own in lightning_callbacks.callbacks(trainer) if getattr(own, "run_dir", None) is not None
    ]
    if len({os.path.abspath(path) for path in run_dirs}) > 1:
        raise ValueError(f"The callbacks of one Trainer must share one run_dir, not {sorted(map(str, run_dirs))}.")
    return run_dirs[0] if run_dirs else None


def _from_rank_0(trainer: Trainer, make: Callable[[], _T], patience: Patience) -> _T:
    def attempt() -> tuple[_T | None, str | None]:
        try:
            return patience(make, _whoami(trainer)), None
        except OSError as error:
            return None, f"{_whoami(trainer)}: {error}"

    made, problem = checkpoint_io.from_rank_zero(trainer.strategy, attempt)
    if problem is not None:
        raise StorageFails(f"{problem}. Nothing was moved or begun anew: start it again when the storage answers.")
    return cast(_T, made)


def _whoami(trainer: Trainer) -> str:
    return f"Rank {trainer.global_rank} on {node_name()}"


def _place_of_run(trainer: Trainer, own: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Where the run directory is: the launcher counts by what is recorded in its own, and nowhere else."""
    return os.environ.get(RUN_DIR_VARIABLE) or own or os.path.join(trainer.default_root_dir, "resilience")


def _job() -> str | None:
    """What all attempts of one job have in common; see :meth:`RunDirectory.enter`."""
    return LAUNCHED if os.environ.get(RUN_DIR_VARIABLE) else os.environ.get("TORCHELASTIC_RUN_ID")


def _obstacle(trainer: Trainer) -> str | None:
    """Why a fit of this Trainer cannot be resumed, if it cannot, and what to do about it."""
    if lightning_loops.spawns_processes(trainer):
        return (
            "A fit in spawned processes (ddp_spawn, ddp_fork, ddp_notebook) cannot be resumed: they end with it. Use "
            "strategy='ddp', or start the script by lightning-resilience launch or torchrun."
        )
    return lightning_strategies.traits_of(trainer.strategy).refused


def _is_started_by_itself() -> bool:
    """Whether a launcher or a scheduler has started this again, and no person who may want something else."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "LIGHTNING_RESILIENCE_JOB_ATTEMPT")
    return current_scheduler().restart_count > 0 or any(os.environ.get(name, "0") not in ("", "0") for name in counts)


def _settings_of_optimizers(trainer: Trainer) -> Settings:
    found: Settings = {}
    for index, optimizer in enumerate(trainer.optimizers):
        name = "optimizer" if len(trainer.optimizers) == 1 else f"optimizer {index}"
        found[name] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            own = name if len(optimizer.param_groups) == 1 else f"{name}.group {number}"
            found |= flat(own, {key: value for key, value in group.items() if key not in ("params", "param_names")})
    return found


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _check_worker_count(trainer: Trainer) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else trainer.world_size
    if launched != trainer.world_size:
        raise RuntimeError(
            f"{launched} workers were started, but this Trainer runs with {trainer.world_size}: every worker would "
            "train on its own and write into the same run directory. Pass the same numbers to "
            "Trainer(devices=, num_nodes=) and to the launcher (--nproc-per-node, --nnodes)."
        )


def report_progress() -> None:
    """Says that a fit advances where no batch of it does: in code of your own that takes long between two batches.

    Such as an export or an evaluation in a loop of its own at the end of an epoch: what takes longer than
    ``out_of_section`` allows without a sign of progress counts as hung. Batches of another Trainer are such a sign by
    themselves. Does nothing where no fit is watched.
    """
    if _active is not None:
        _active.advanced()


def session_of(trainer: Trainer, callback: SessionCallback) -> FitSession | None:
    """The session that ``callback`` has joined, if it has."""
    session = _sessions.get(trainer)
    return session if session is not None and callback in session.members else None
