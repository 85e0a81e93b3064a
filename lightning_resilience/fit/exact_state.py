"""What an exact resume needs besides Lightning's own state: random generators, position in the data, DDP's order."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_checkpoints,
    lightning_data,
    lightning_limits,
    lightning_loops,
    lightning_metrics,
    lightning_micro_batches,
    lightning_patches,
    lightning_progress,
    lightning_strategies,
)
from lightning_resilience._lightning.lightning_micro_batches import Division, TrainingData
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience._torch import local
from lightning_resilience.checkpoint import data_position
from lightning_resilience.checkpoint.digest import Digest
from lightning_resilience.checkpoint.reduction_order import (
    GradientArrivalRecorder,
    inexact_reasons,
    order_matters,
    rebuilds_buckets,
    replay_gradient_arrival,
)
from lightning_resilience.fit import absent_ranks
from lightning_resilience.fit.absent_ranks import AbsentRanks
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.data_workers import DataWorkers, same_for_all
from lightning_resilience.fit.logger_files import Logs
from lightning_resilience.fit.outcome import FitOutcome
from lightning_resilience.fit.participant import Stateful
from lightning_resilience.launch import membership
from lightning_resilience.run.events import BatchesLeftOut
from lightning_resilience.run.settings import IF_CHANGED, SHRINK, global_batch, read_again

log = logging.getLogger(__name__)

STATE_KEY = "lightning_resilience"
"""The key of this state in a Lightning checkpoint."""

LOGS = "logs"
"""The name of the loggers' extra state."""


class ExactState:
    """This rank's state besides Lightning's own, saved with every checkpoint and restored in a resume.

    Args:
        fit: The fit.
        outcome: The outcome of the fit.
        guard_workers: Keeps workers of data loaders from ending before this process and from outliving it.

    Raises:
        ValueError: If the environment variable for batches of absent ranks is invalid.
    """

    def __init__(self, fit: FitContext, outcome: FitOutcome, guard_workers: Callable[[list[Any]], None]) -> None:
        self.fit = fit
        self.outcome = outcome
        self.resumed: dict[str, Any] | None = None
        """This rank's part of the checkpoint that the fit resumes from, until the resume is complete."""
        self.logs: Logs | None = None
        self.before_evaluation: dict[str, Any] | None = None
        """What the evaluation in progress changes, as it was before the evaluation; ``None`` outside of one."""
        self.arrival_order: list[str] | None = None
        """The order of the gradients when DDP built its buckets; ``None`` without buckets."""
        self.accumulates = fit.trainer.accumulate_grad_batches
        self.loading = lightning_patches.Patches()
        self.workers = DataWorkers(guard_workers, is_asked=read_again() == IF_CHANGED)
        """The workers of training data loaders."""
        self._made: list[dict[str, Any] | None] = [None, None]
        """How training and validation loaders were made; ``random``: the random state before, if that drew numbers."""
        self._to_make: dict[int, float] = {}
        """The loaders that this process has yet to make, with the epochs in which they were made."""
        self._recorder: GradientArrivalRecorder | None = None
        self._first_batch_random_state: data_position.RandomState | None = None
        self._epoch_random_state: data_position.RandomState | None = None
        self._workers_kept = False
        """Whether persistent data workers ran before the epoch: then its start has drawn no seed for them."""
        self._fetches_ahead = False
        self._before_fetch: data_position.RandomState | None = None
        self._epoch_begun: tuple[Any, Any] = (None, None)
        self._kept_of_lost: dict[str, Any] | None = None
        self._has_said_how = False
        self._worker_states_of_lost: torch.Tensor | None = None
        self._data: TrainingData | None = None
        self._absent: AbsentRanks | None = None
        self._left_out = 0
        self._early = Patches()
        self._expected: tuple[dict[str, Any], Callable[[], bool]] | None = None
        self._was_early = False
        self._early_batches: float | None = None
        self._global_batch = global_batch()
        self._was = (0, "")
        """How many ranks the run has if that is not the number of processes, and a log line about that."""

    @property
    def epoch_begun(self) -> tuple[data_position.RandomState | None, data_position.RandomState | None]:
        """The random states at the start of the epoch and at its first batch; the same object until the next epoch."""
        epoch, first_batch = self._epoch_begun
        if epoch is not self._epoch_random_state or first_batch is not self._first_batch_random_state:
            self._epoch_begun = self._epoch_random_state, self._first_batch_random_state
        return self._epoch_begun

    def stand_in(
        self,
        epoch: data_position.RandomState | None,
        first_batch: data_position.RandomState | None,
        extra_state: dict[str, Any],
        absent: Mapping[int, dict[str, Any]],
        worker_states: torch.Tensor | None,
    ) -> None:
        """From now on :meth:`own_state` is the state of a lost rank; its random states and metrics were already set.

        Args:
            epoch: The rank's random state at the start of the epoch.
            first_batch: Its random state at the first batch.
            extra_state: Its extra state, by name.
            absent: The states of the absent ranks whose places it took; see :attr:`absent_states`.
            worker_states: The states of its data workers.
        """
        self._epoch_random_state, self._first_batch_random_state = epoch, first_batch
        self._kept_of_lost, self._worker_states_of_lost = extra_state, worker_states
        self.put_back_absent(absent)

    @property
    def worker_states(self) -> torch.Tensor | None:
        """The states from which new workers can continue; see :meth:`.DataWorkers.states`."""
        if self._kept_of_lost is not None:
            return self._worker_states_of_lost
        if not self.workers.are_watched:
            return None
        trainer = self.fit.trainer
        return self.workers.states(lightning_data.train_loaders(trainer), lightning_data.batches_fetched(trainer))

    @property
    def absent_states(self) -> dict[int, dict[str, Any]]:
        """By rank, the states that only the absent ranks whose places this process takes would know."""
        return {} if self._absent is None else self._absent.known

    def put_back_absent(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Replaces the :attr:`absent_states`."""
        if self._absent is not None:
            self._absent.stand_in(states)

    @property
    def places(self) -> int:
        """How many ranks the run was begun with."""
        return self.fit.trainer.world_size if self._absent is None else self._absent.before

    @property
    def batch_share(self) -> Fraction:
        """The batch size of a rank as a share of the script's: less than 1 if the run began with fewer ranks."""
        return Fraction(1) if self._data is None else self._data.share

    @property
    def begun_with(self) -> int:
        """How many ranks with the script's batch size have the samples of a step: as many as there were at first."""
        return int(self.places * self.batch_share)

    @property
    def share(self) -> float:
        """The factor of this process's losses, so that their mean over processes is the mean over ranks."""
        return 1.0 if self._absent is None else self._absent.share

    @property
    def left_out(self) -> int:
        """How many batches of absent ranks all processes have left out since the start of the run."""
        return self._left_out + (0 if self._absent is None else self._absent.left_out)

    @property
    def is_in_vain(self) -> bool:
        """Whether the current pass counts for nothing: other processes train for more absent ranks."""
        return self._absent is not None and self._absent.is_in_vain

    def has_generators(self) -> bool:
        """Whether data loaders have random generators of their own."""
        return bool(self._generators())

    @property
    def is_final(self) -> bool:
        """Whether the fit resumes from its final state, and the resume is not complete."""
        return self.resumed is not None and bool(self.resumed["final"])

    def get_random_state(self) -> data_position.RandomState:
        """Returns the state of all random generators that the training uses."""
        return data_position.get_random_state(self.fit.trainer.strategy.root_device, self._generators())

    def set_random_state(self, state: data_position.RandomState) -> None:
        """Restores the state of all random generators that the training uses."""
        data_position.set_random_state(state, self.fit.trainer.strategy.root_device, self._generators())

    def get_state_of_batch(self) -> Any:
        """The state from which the passes of a fetched batch begin, also those for absent ranks, to run them again."""
        return self.get_random_state(), None if self._absent is None else self._absent.get_state_of_batch()

    def set_state_of_batch(self, state: Any) -> None:
        """Restores what :meth:`get_state_of_batch` has returned."""
        own, of_absent = state
        self.set_random_state(own)
        if self._absent is not None:
            self._absent.set_state_of_batch(of_absent)

    def _generators(self) -> list[torch.Generator]:
        trainer = self.fit.trainer
        loaders = [*lightning_data.train_loaders(trainer), *lightning_data.validation_loaders(trainer)]
        return data_position.loader_generators([*loaders, *lightning_micro_batches.wrapped_samplers(loaders)])

    def extra_state(self) -> dict[str, Stateful]:
        """The state of participants and loggers of this rank, by name."""
        logs: dict[str, Stateful] = {} if self.logs is None else {LOGS: self.logs}
        return {**self.fit.participants.extra_state(), **logs}

    def own_state(self, final: bool) -> dict[str, Any]:
        """What an exact resume of this rank needs besides Lightning's own state.

        Args:
            final: Whether the fit has ended.
        """
        now = self.before_evaluation or self._now()
        own = {
            "epoch": None if final else self._epoch_random_state,
            "now": now["random"],
            "fetched": 0 if final else lightning_data.batches_fetched(self.fit.trainer),
            "first_batch": None if final else self._first_batch_random_state,
            "in_flight": None if final else self._before_fetch,
            "kept": self._kept(),
            "loader_states": None if final else lightning_data.loader_states(self.fit.trainer),
            "worker_states": None if final else self.worker_states,
            "workers_kept": self._workers_kept,
            "metrics": now["metrics"],
            "reload_epochs": now["reload_epochs"],
            "made": now["made"],
            "searched": lightning_callbacks.found_by_searches(self.fit.trainer),
            "should_stop": self.fit.trainer.should_stop,
            "marks": lightning_callbacks.model_checkpoint_state(self.fit.trainer),
            "limits": lightning_limits.limits(self.fit.trainer),
            "accumulates": self.accumulates,
            "batch_sizes": data_position.batch_sizes(lightning_data.train_loaders(self.fit.trainer)),
            "batch_share": str(self.batch_share),
            "orders": None if final else lightning_micro_batches.orders(self.fit.trainer),
            "left_out": self.left_out,
            "modes": now["modes"],
            "world_size": self.places,
            "validated": data_position.persistent_workers_run(lightning_data.validation_loaders(self.fit.trainer)),
        }
        return {**own, "absent": {} if self._absent is None else self._absent.own_states(own)}

    def _kept(self) -> dict[str, Any]:
        if self._kept_of_lost is not None:
            return self._kept_of_lost
        return {name: state.state_dict() for name, state in self.extra_state().items()}

    def _now(self) -> dict[str, Any]:
        """What an evaluation changes."""
        trainer, module = self.fit.trainer, self.fit.module
        return {
            "random": self.get_random_state(),
            "progress": lightning_progress.evaluation_progress(trainer),
            "metrics": lightning_metrics.metric_states(trainer, module),
            "modes": lightning_loops.train_eval_modes(trainer, module),
            "reload_epochs": lightning_data.reload_epochs(trainer),
            "made": [*self._made],
        }

    def resume_from(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any] | None:
        """Takes this rank's part of a checkpoint.

        Returns:
            The rank's own state; ``None`` if another number of ranks has saved the checkpoint, and these cannot repeat
            its steps.
        """
        state: dict[str, Any] = checkpoint[STATE_KEY]
        trainer, arrival_order = self.fit.trainer, state["arrival_order"]
        if "shards" in state:  # a local checkpoint: each rank has read the shards it needs
            lightning_checkpoints.load_own_checkpoint(trainer, self.loading)
            states, saved_by = state["shards"], state["saved_by"]
        else:
            states, saved_by = dict(enumerate(state["ranks"])), len(state["ranks"])
        states = {rank: _with_defaults(each) for rank, each in states.items()}
        before = next(iter(states.values())).get("world_size", saved_by)
        absent = ((rank, each) for present in states.values() for rank, each in present["absent"].items())
        states |= {int(rank): _with_defaults(each) for rank, each in absent}
        own = states.get(self.fit.rank) or self._of_newcomer(next(iter(states.values())))
        epoch = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        self._left_out = own["left_out"]
        self._made = [*own["made"]]
        epochs = enumerate(own["reload_epochs"])
        self._to_make = {which: made_in for which, made_in in epochs if self._made[which] is not None}
        is_over = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
        in_progress = epoch if own["fetched"] and not is_over else None
        mine = self._divide(own, before, in_progress, f"{path} was saved by a run of {before} ranks")
        if trainer.world_size > 1 and (saved_by, before) != (trainer.world_size,) * 2:
            lightning_metrics.average_counts_exactly(trainer, self.loading)
        if self._absent is not None:
            self._absent.resume(states)
        of_others = [states[rank] for rank in range(self.fit.rank + trainer.world_size, before, trainer.world_size)]
        self.resumed = {
            "mine": mine,
            "metrics": [own["metrics"], *(each["metrics"] for each in of_others if not each.get("inherited"))],
            "inherited": own.get("inherited", False),
            "was_alone": saved_by == 1,
            "due": state["due"],
            "final": state["final"],
            "arrival_order": arrival_order if mine is not None else None,
            "epoch": epoch,
            "batch_sizes": own.get("batch_sizes"),
        }
        return mine

    def _of_newcomer(self, first: dict[str, Any]) -> dict[str, Any]:
        """The state of a rank that the run did not have: what all ranks share, taken from the first rank."""
        nothing = lightning_metrics.counts_for_nothing(self.fit.trainer, self.fit.module, first["metrics"])
        return {**first, "kept": {}, "metrics": nothing, "inherited": True}

    def _divide(self, own: dict[str, Any], before: int, epoch: int | None, what: str) -> dict[str, Any] | None:
        """Divides the training data among the present ranks, so that steps have the samples of the run.

        Args:
            own: This rank's state.
            before: How many ranks the run has.
            epoch: The epoch in progress; ``None`` if one begins.
            what: A log line: which checkpoint was saved by how many ranks.

        Returns:
            The state from which this rank continues; ``None`` if the data cannot be divided.
        """
        trainer = self.fit.trainer
        world, share = trainer.world_size, Fraction(own["batch_share"])
        orders = own.get("orders")
        is_begun_by_one = world > 1 and epoch is not None and any(map(lightning_micro_batches.is_of_one, orders or ()))
        self._was = before, f"{what} and is resumed by {world}"
        if before == world and share == 1 and not is_begun_by_one:
            return own
        sizes: list[int | None] = own.get("batch_sizes") or []
        division = self._division(before, share, sizes, orders, epoch)
        places = division.among
        if places != before:
            own = {**own, "worker_states": same_for_all(own["worker_states"])}  # other samples were read
        reason = None if before == world else absent_ranks.why_not(trainer, places)
        if before == 1 and epoch is not None and orders is None:
            reason = "an earlier version of the package saved it"
        if reason is not None:
            _check_all_are_there(reason)
            self._was = before, f"{self._was[1]}, and {reason}"
            return None
        self._data = TrainingData(trainer, self.loading, division)
        if places > world:
            shrinks = self.fit.from_rank_0(lambda: self._global_batch) == SHRINK
            functions = self.fit.advanced, self.get_random_state, self.set_random_state, self.workers
            others = division.ranks[1:]
            self._absent = AbsentRanks(trainer, self.loading, self._data, others, places, shrinks, *functions)
        return own

    def _division(
        self,
        before: int,
        share: Fraction,
        sizes: Sequence[int | None],
        orders: list[lightning_micro_batches.Order] | None = None,
        epoch: int | None = None,
    ) -> Division:
        world = self.fit.trainer.world_size
        places, now, share_before = before, before * share / world, share
        # The order of a single rank is not the order that several ranks would have.
        can_have_own = (world > 1 or before == 1) and all(size and size * before % world == 0 for size in sizes)
        if (now <= 1 and can_have_own) or before < world:
            places, share = world, now
        of_script = [Fraction(size) / share_before if size else None for size in sizes]
        kept = [Fraction(size * before, world) if size else None for size in sizes]
        ranks = range(self.fit.rank, places, world)
        return Division(ranks, places, before, share, of_script, kept, orders, epoch)

    def describe_division(self) -> dict[str, Any]:
        """How the training data are divided, for :meth:`expect_division` at the next start."""
        sizes = data_position.batch_sizes(lightning_data.train_loaders(self.fit.trainer))
        return {"places": self.places, "share": str(self.batch_share), "batch_sizes": sizes}

    def expect_division(self, last: dict[str, Any] | None, has_saved: Callable[[], bool]) -> None:
        """Has data that is needed before the checkpoint is read divided as at the last start.

        Modules make schedules from ``trainer.estimated_stepping_batches``, in ``setup`` or with strategies that read
        checkpoints only when they are set up.

        Args:
            last: As :meth:`describe_division` described it; ``None`` if it is unknown.
            has_saved: Whether this rank sees a checkpoint to resume from; called when all callbacks are set up.
        """
        self._expected = None if last is None else (last, has_saved)

    def _divide_early(self, made: Any) -> None:
        assert self._expected is not None
        (last, has_saved), self._expected = self._expected, None
        if not any(self.fit.gather(has_saved())):
            return
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            if (last["places"], last["share"]) != (self.fit.trainer.world_size, "1"):
                division = self._division(int(last["places"]), Fraction(last["share"]), list(last["batch_sizes"]))
                self._was_early = True
                TrainingData(self.fit.trainer, self._early, division).decide(made)

    def undo_early_division(self) -> None:
        """From now on data is not divided, unless the checkpoint requires it."""
        self._expected = None
        self._early.undo()

    def end_early_data(self) -> None:
        """From now on data is divided as the checkpoint requires."""
        trainer = self.fit.trainer
        self._early_batches = trainer.num_training_batches if lightning_data.train_loaders(trainer) else None
        self.undo_early_division()

    def _check_early_data(self) -> None:
        before, now = self._early_batches, self.fit.trainer.num_training_batches
        are_divided = self._was_early or self._data is not None  # otherwise the script has changed them in another way
        if before not in (None, now) and are_divided and self.fit.rank == 0:
            log.warning(
                "The module asked for its training data before the checkpoint was read. An epoch had %s batches "
                "then, and has %s now. A schedule made from trainer.estimated_stepping_batches has another length.",
                before,
                now,
            )

    def _begin_division(self, data: TrainingData, resumed: dict[str, Any]) -> None:
        """Called when the training data is set up, divided among the present ranks or not.

        Raises:
            RuntimeError: If the data loaders of the ranks differ.
        """
        before, what = self._was
        world, is_first = self.fit.trainer.world_size, self.fit.trainer.is_global_zero and not self._has_said_how
        self._has_said_how = True  # also if loaders are made anew
        answers = self.fit.gather((data.refused, str(data.share), data.is_by_script))
        if len(set(answers)) > 1:
            different = next(rank for rank, each in enumerate(answers) if each != answers[0])
            raise RuntimeError(f"The training data loaders of ranks 0 and {different} differ: {answers}.")
        if data.refused is not None:
            _check_all_are_there(data.refused)
            resumed["mine"], resumed["arrival_order"] = None, None
            self._was = before, f"{what}, and {data.refused}"
            self._data = self._absent = None
            return
        if data.is_by_script:
            self._absent = None
        if data.resized and is_first:
            log.warning("Keeping batches %s: its division by the number of ranks was rounded.", data.resized)
        if self._absent is not None:
            self._absent.begin()
            if is_first and self._absent.shrinks:
                log.warning(
                    "%s: the batches of absent ranks are left out, as --global-batch shrink asks. The gradient of a "
                    "step is the mean over %d ranks.",
                    what,
                    world,
                )
            elif is_first:
                log.warning(
                    "%s: each rank also trains on batches of absent ranks. Steps have the same samples as before, "
                    "and take up to %d times as long.",
                    what,
                    len(self._absent.ranks) + 1,
                )
            return
        if resumed["batch_sizes"]:
            resumed["batch_sizes"] = [size and size * before // world for size in resumed["batch_sizes"]]
        sizes = " and ".join(map(str, data_position.batch_sizes(lightning_data.train_loaders(self.fit.trainer))))
        if before != world and is_first:
            same = "Steps have the same samples as before, and the same gradient if the loss is a mean over the batch."
            log.warning("%s: each rank has batches of %s. %s", what, sizes, same)
        elif self.batch_share != 1 and is_first:
            log.info("Batches of %s, %s of the script's: the run began with fewer ranks.", sizes, self.batch_share)

    def make_loaders(self, which: int, make: Callable[[], Any]) -> Any:
        """Has the script make data loaders; the ones of the checkpoint from the same random numbers as then.

        Args:
            which: 0: training; 1: validation.
            make: Calls the script.
        """
        device = self.fit.trainer.strategy.root_device
        before = data_position.get_random_state(device)
        was, epoch = self._made[which], self._to_make.pop(which, None)
        is_again = epoch is not None and not lightning_data.are_made_again(self.fit.trainer, epoch)
        if is_again and was is not None and was["random"] is not None:
            data_position.set_random_state(was["random"], device)
        begun = data_position.get_random_state(device)
        made = make()
        if which == 0 and self._expected is not None:
            self._divide_early(made)
        has_drawn = not data_position.is_same(begun, data_position.get_random_state(device))
        self._made[which] = {"random": begun if has_drawn else None}
        if is_again and epoch is not None:
            data_position.set_random_state(before, device)
            epochs = lightning_data.reload_epochs(self.fit.trainer)
            epochs[which] = epoch
            lightning_data.set_reload_epochs(self.fit.trainer, epochs)
        return made

    def begin_data(self, loaders: list[Any], load_loader_states: Callable[[], None]) -> None:
        """Prepares the data loaders for the resume, before their workers start."""
        if self.resumed is not None and self._data is not None:
            self._begin_division(self._data, self.resumed)
        mine = self.resumed["mine"] if self.resumed is not None else None
        if self.resumed is not None:
            lightning_data.set_epoch_of_samplers(self.fit.trainer, self.resumed["epoch"])
        if mine is None:
            load_loader_states()
            self.note_epoch()
        else:
            self._begin_where_it_was(loaders, mine)

    def _begin_where_it_was(self, loaders: list[Any], mine: dict[str, Any]) -> None:
        """Has the loaders of the resumed epoch begin as they did, and data workers where those before had been."""
        assert self.resumed is not None
        begun = mine["epoch"] or mine["now"]
        kept = self.resumed["epoch"] > 0 and any(map(data_position.keeps_workers, loaders))
        if mine["epoch"] is not None:
            kept = mine.get("workers_kept", kept)
        is_same_size = self.resumed["batch_sizes"] == data_position.batch_sizes(loaders)
        where = loaders, mine["fetched"], mine["worker_states"]
        goes_on = mine["loader_states"] is None and is_same_size and not lightning_data.fetches_itself(self.fit.module)
        goes_on = goes_on and self.workers.can_begin(*where)
        if mine["loader_states"] is not None:
            lightning_data.load_loader_states(self.fit.trainer, mine["loader_states"])
        elif kept and not goes_on:
            data_position.start_persistent_workers(loaders)
        is_said = any(map(data_position.keeps_workers, loaders)) and not self.workers.are_kept(loaders)  # at each start
        if kept and not is_said and not self.resumed["final"] and self.fit.rank == 0:
            if not goes_on:
                log.warning(
                    "Persistent data workers begin with different random states than the previous workers had: this "
                    "resume is exact only if the dataset draws no random numbers."
                )
            elif mine["worker_states"][:, -1].any():
                log.info(
                    "Persistent data workers begin with the random states of this epoch. State that the dataset kept "
                    "in them from earlier epochs, such as its own generator, is lost."
                )
        self.set_random_state(begun)
        self.note_epoch()
        if goes_on:
            primed = partial(self.set_random_state, mine["first_batch"] or mine["now"])
            unseed = partial(self.set_random_state, begun) if kept else lambda: None
            self.workers.begin_at(*where, primed, unseed)
            self._workers_kept = kept

    def note_epoch(self) -> None:
        """Notes the random state at the start of an epoch; called before its iterator is made."""
        self._epoch_random_state = self.get_random_state()
        self._workers_kept = data_position.persistent_workers_run(lightning_data.train_loaders(self.fit.trainer))
        self.workers.forget()

    def start(self, is_first: bool) -> None:
        """Called when training begins, also after a rollback."""
        self._fetches_ahead = lightning_data.fetches_ahead_here(self.fit.trainer)
        if self.resumed is not None:
            self._restore_data_position(self.resumed["mine"])
        if not is_first:
            return  # the rest happens once in a process
        self._check_early_data()
        if self.resumed is not None and not self.resumed["final"]:
            lightning_callbacks.resume_weight_averaging(self.fit.trainer, self.fit.module)
        ddp = lightning_strategies.ddp_wrapper(self.fit.trainer)
        if self.resumed is not None:
            self.arrival_order = self.resumed["arrival_order"]
        if ddp is not None and self.fit.rank == 0:
            for reason in inexact_reasons(ddp):
                log.warning("A resume will not be exact: %s", reason)
        if ddp is not None and rebuilds_buckets(ddp):
            if self.arrival_order is None:
                self._recorder = GradientArrivalRecorder(ddp)
            elif order_matters(ddp) and not replay_gradient_arrival(ddp, self.arrival_order) and self.fit.rank == 0:
                log.warning("A resume will not be exact: the set of parameters that require gradients has changed.")

    def _restore_data_position(self, mine: dict[str, Any] | None) -> None:
        if mine is not None:
            lightning_data.set_reload_epochs(self.fit.trainer, mine["reload_epochs"])
            if mine["validated"]:
                data_position.start_persistent_workers(lightning_data.validation_loaders(self.fit.trainer))
        if self.resumed is not None and self.resumed["final"]:
            return  # a new epoch begins
        if mine is not None and mine["first_batch"] is not None:
            self.set_random_state(mine["first_batch"])
            self._first_batch_random_state = mine["first_batch"]
        if mine is None:
            self._resize()
        change = self._change_of_batch_size(mine)
        if mine is None or mine["loader_states"] is None:
            batches = lightning_progress.epoch_loop_batches(self.fit.trainer)
            if mine is not None:
                batches = int(mine["fetched"] * change)
            if batches and lightning_data.fast_forward(self.fit.trainer, batches):
                lightning_progress.count_replayed(self.fit.trainer)
                return
            if batches and self.fit.rank == 0:
                log.info("Fetching the first %d batches of epoch %d again.", batches, self.fit.trainer.current_epoch)
            fetch_one = lightning_data.replay_fetch(self.fit.trainer)

            def fetch() -> None:
                fetch_one()
                self.fit.advanced()

            self._before_fetch = mine["in_flight"] if mine is not None else None
            if batches and self._before_fetch is not None:
                data_position.replay(fetch, batches - 1, self.fit.rank)
                self.set_random_state(self._before_fetch)
                fetch()
            else:
                data_position.replay(fetch, batches, self.fit.rank)
            lightning_progress.count_replayed(self.fit.trainer)

    def _resize(self) -> None:
        """Rescales the progress of the epoch to another number of ranks, rounded down: a few samples may repeat."""
        before, why = self._was
        done = lightning_progress.epoch_loop_batches(self.fit.trainer) * before // self.fit.trainer.world_size
        batches = lightning_progress.count_batches_done(self.fit.trainer, done)
        if self.fit.trainer.is_global_zero:
            inexact = "weights and optimizer are exact, data order and random numbers are not"
            log.warning("%s: %s. This epoch continues from batch %d of each rank.", why, inexact, batches)

    def _change_of_batch_size(self, mine: dict[str, Any] | None) -> Fraction:
        """The number of batches now that equal one batch of the checkpoint; also updates the loop's counts."""
        assert self.resumed is not None
        loaders = lightning_data.train_loaders(self.fit.trainer)
        now = data_position.batch_sizes(loaders)
        before = self.resumed["batch_sizes"] or now  # older versions did not save the sizes
        if before == now:
            return Fraction(1)
        change = data_position.change_of_batch_size(before, now)
        done = lightning_progress.epoch_loop_batches(self.fit.trainer)
        if change is None:
            if self.fit.rank == 0:
                log.warning("Batch sizes have changed from %s to %s: this epoch repeats or skips samples.", before, now)
            return Fraction(1)
        keeps_its_place = mine is not None and mine["loader_states"] is not None
        batches = math.ceil(done * change) if keeps_its_place else int(done * change)
        batches = lightning_progress.count_batches_done(self.fit.trainer, batches)
        if self.fit.rank == 0:
            known = "each sample is trained on once"
            if data_position.workers_have_own_samples(loaders):
                known = "workers divide the samples by batches, so the remaining ones differ"
            elif batches < done * change:
                known = "less than a batch of each rank is trained on twice"
            changed = f"The batch size has changed from {before[0]} to {now[0]}"
            log.warning("%s: this epoch continues after batch %d, formerly %d; %s.", changed, batches, done, known)
        return change

    def at_boundary(self) -> None:
        """Called at a training boundary, before anything else happens there."""
        if lightning_progress.epoch_loop_batches(self.fit.trainer) == 0:
            # A sampler without workers draws its seed at the first batch, and hooks may draw before that.
            self._first_batch_random_state = self.get_random_state()
        if self._absent is not None:
            self._absent.at_boundary()
        if self._recorder is not None and (order := self._recorder.finish()) is not None:
            self.arrival_order, self._recorder = order, None

    def before_fetch(self) -> None:
        """Called before the next batch is fetched."""
        if self._fetches_ahead:
            self._before_fetch = self.get_random_state()

    def evaluation_starts(self) -> None:
        """From now on, saves hold what the evaluation changes as it is now, except for weights."""
        self.before_evaluation = self._now()
        self._weights = self._digest_of_weights()

    def evaluation_has_changed_weights(self) -> bool:
        """Whether the weights have changed since the evaluation began, for example to averages."""
        return self._weights.hexdigest() != self._digest_of_weights().hexdigest()

    def _digest_of_weights(self) -> Digest:
        """On an accelerator the host does not wait for it. Without buffers: DDP may bring rank 0's to other ranks."""
        digest = Digest()
        digest.add(map(local, lightning_strategies.trained_parameters(self.fit.trainer)))
        return digest

    def evaluation_ends(self) -> None:
        """From now on, saves hold the current state again."""
        before, self.before_evaluation = self.before_evaluation, None
        if self._absent is not None and before is not None:
            self._absent.follow_evaluation(before["random"], self.get_random_state())

    def complete_resume(self) -> bool:
        """Completes a resume at the boundary of its checkpoint. Returns whether a validation is due first."""
        assert self.resumed is not None
        resumed, self.resumed = self.resumed, None
        lightning_progress.end_restart(self.fit.trainer)
        if (mine := resumed["mine"]) is not None:
            if not resumed["final"]:
                raised = self.outcome.is_a_limit_raised(mine.get("limits", {}))
                self.fit.trainer.should_stop = mine["should_stop"] and not raised
                fit = self.fit.trainer, self.fit.module
                metrics = lightning_metrics.merged_metric_states(*fit, resumed["metrics"])
                lightning_metrics.set_metric_states(*fit, metrics)
                if resumed["was_alone"] != (self.fit.trainer.world_size == 1):
                    lightning_metrics.take_over_sync(self.fit.trainer, self.fit.patches, resumed["inherited"])
                if mine.get("accumulates", self.accumulates) != self.accumulates:
                    del mine["modes"]["accumulate_grad_batches"]  # the script has changed it
                lightning_loops.set_train_eval_modes(self.fit.trainer, self.fit.module, mine["modes"])
            self.set_random_state(mine["now"])
        return bool(resumed["due"] == "validation")

    def complete_final(self) -> None:
        """Completes a resume from a final state."""
        assert self.resumed is not None
        if (mine := self.resumed["mine"]) is not None:
            self.fit.trainer.should_stop = mine["should_stop"]
            lightning_metrics.set_latest_metrics(self.fit.trainer, mine["metrics"])
            lightning_loops.set_train_eval_modes(self.fit.trainer, self.fit.module, mine["modes"])
        self.complete_resume()

    def restore_after_finished(self) -> None:
        """Gives the rest of the script the random state and metrics of a finished fit, which was not trained again."""
        if self.resumed is not None and self.resumed["final"] and (mine := self.resumed["mine"]) is not None:
            self.set_random_state(mine["now"])
            self.fit.trainer.should_stop = mine["should_stop"]
            lightning_metrics.set_latest_metrics(self.fit.trainer, mine["metrics"])

    def reset(self) -> None:
        """Forgets the epoch in progress, before a rollback."""
        self.loading.undo()
        self._leave_absent()
        self._data = self._absent = None
        # A GradientAccumulationScheduler checks at the start that nothing else has set it.
        self.fit.trainer.accumulate_grad_batches = self.accumulates
        self._first_batch_random_state = self._epoch_random_state = self._before_fetch = None
        self.before_evaluation = None

    def stop(self) -> None:
        """Called when the fit has ended."""
        if self._recorder is not None:
            self._recorder.stop()
        self._leave_absent()
        has_fewer = self._global_batch == SHRINK and self.resumed is not None  # perhaps: it resumed from an older state
        if (self.left_out or has_fewer) and self.fit.rank == 0:
            step = self.fit.trainer.global_step
            self.fit.ledger.record(BatchesLeftOut(fit=self.fit.index, step=step, left_out=self.left_out))

    def _leave_absent(self) -> None:
        if self._absent is not None:
            self._absent.leave()


def _with_defaults(own: dict[str, Any]) -> dict[str, Any]:
    """A rank's own state, with defaults for missing entries."""
    metrics = {**lightning_metrics.NOTHING_LOGGED, **own.get("metrics", {})}
    defaults: dict[str, Any] = {
        "loader_states": None,
        "kept": {},
        "absent": {},
        "batch_share": "1",
        "left_out": 0,
        "worker_states": None,
        "made": [None, None],
    }
    return {**defaults, **own, "metrics": metrics}


def _check_all_are_there(reason: str) -> None:
    """Raises if the run could wait for the absent ranks: it must not continue inexactly without them.

    Args:
        reason: Why continuing would be inexact.
    """
    line = membership.current()
    if line is not None and line.is_without_some:
        raise RuntimeError(f"This fit cannot continue with {len(line.members)} of {len(line.slots)} ranks: {reason}.")
