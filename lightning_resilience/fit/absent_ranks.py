"""A run goes on with fewer ranks than it was begun with: those that are there train on the batches of the others, too.

The ranks of a run are those with which it was begun. Each process is one of them, and takes the places of some that are
absent: in each optimizer step it makes their forward and backward passes as well, on the batches, with the random
numbers and from the buffers that they would have, and gradients are reduced once (cf. the virtual nodes of VirtualFlow,
MLSys 2022, and the threads of EasyScale, SC 2023). So a step has the same samples as before and means the same,
whatever the loss is; steps, epochs and schedules count as before, no sample is left out or trained on twice, and the
run can go on with any number of ranks up to the first. Only the order in which gradients are summed differs, and a step
takes as many times as long as ranks share a process.

Where the global batch may shrink, those that are there make their own passes alone: the batches of the absent ranks are
left out, and counted. Nobody else trains on them, so that a rank that comes back goes on where it would be.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_data,
    lightning_metrics,
    lightning_micro_batches,
    lightning_progress,
    lightning_strategies,
)
from lightning_resilience._lightning.lightning_micro_batches import MicroBatch, TrainingData
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint.data_position import RandomState, after_seeds, seeds_drawn
from lightning_resilience.fit.data_workers import DataWorkers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.hooks import RemovableHandle

log = logging.getLogger(__name__)


def why_not(trainer: Trainer, before: int, some_are_absent: bool | None = None) -> str | None:
    """Why the ranks that are there cannot have the steps of a run of others; ``None`` if they can.

    Args:
        trainer: The Trainer, when its strategy is set up.
        before: How many ranks the run has; if there are not as many, they train for those that are absent.
        some_are_absent: Whether to ask for that case; default: if it is so.
    """
    module, group = trainer.lightning_module, lightning_strategies.group_size(trainer)
    if lightning_strategies.name_of(trainer.strategy) == "ModelParallelStrategy" and not group:
        return "not all parameters are FSDP2's on a mesh of replicas of shards, with consecutive ranks in each group"
    if not group:
        return f"{type(trainer.strategy).__name__} is not plain DDP"
    if before % group:
        return f"{before} ranks do not form whole groups of {group}"
    if lightning_callbacks.callbacks_named(trainer, "LocalSGD"):
        return "ranks train independently (LocalSGD)"
    if lightning_data.fetches_itself(module):
        return "training_step fetches its own batches"
    if not (before > trainer.world_size if some_are_absent is None else some_are_absent):
        return None
    if lightning_strategies.has_static_graph(trainer):
        return "DDP has static_graph=True"
    if not module.automatic_optimization:
        return "the module uses manual optimization"
    return None


def why_not_divided(trainer: Trainer, loaders: Sequence[Any]) -> str | None:
    """Why the training data of a fit cannot be divided among more ranks than processes; ``None`` if they can."""
    return next(filter(None, (lightning_micro_batches.why_not(trainer, each) for each in loaders)), None)


class AbsentRanks:
    """The places of absent ranks that this process takes.

    Args:
        trainer: The Trainer, before its data are set up.
        patches: What undoes it.
        data: The training data, divided among the ranks of the run.
        ranks: The places that this process takes.
        before: How many ranks the run has.
        shrinks: Whether the batches of absent ranks are left out, rather than trained on.
        advanced: Called after each batch that is fetched again.
        get_random_state: Gives this process's random state.
        set_random_state: Restores one.
        workers: Those of training data loaders.

    Attributes:
        before: How many ranks the run has.
        ranks: The places that this process takes.
        states: What only the absent ranks would know, by their numbers: the values at a key are replaced, not changed.
        is_in_vain: Whether the pass that is made counts for nothing.
        share: What the losses are multiplied by, so that the mean over processes is that over ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        patches: Patches,
        data: TrainingData,
        ranks: Sequence[int],
        before: int,
        shrinks: bool,
        advanced: Callable[[], None],
        get_random_state: Callable[[], RandomState],
        set_random_state: Callable[[RandomState], None],
        workers: DataWorkers,
    ) -> None:
        self.before, self.ranks, self.shrinks = before, ranks, shrinks
        self.is_in_vain = False
        self.share = 1.0 if shrinks else trainer.world_size / before
        self.states: dict[int, dict[str, Any]] = {}
        self._trainer = trainer
        self._data = data
        self._advanced = advanced
        self._get_random_state, self._set_random_state = get_random_state, set_random_state
        self._workers = workers
        self._is_resuming = False
        self._loaders: list[Any] = []
        self._are_given = False  # the states of data workers, too
        self._has_warned = False
        self._iterator: Callable[[], Any] = lambda: None  # the Trainer's of this epoch
        self._fetched = 0
        self._batches_before: int | None = None  # how many batches of all epochs were done when the training continued
        self._buffers: list[torch.Tensor] = []
        self._begun: list[torch.Tensor] | None = None
        self._buffers_of: dict[int, list[torch.Tensor]] = {}  # behind the last batch of an accumulation window
        self._next: int | None = None  # whose forward pass comes next, where it is that of an absent rank
        self._is_next = False
        self._hook: RemovableHandle | None = None
        self._patches: Patches | None = patches

    @property
    def left_out(self) -> int:
        """How many batches of all absent ranks have been left out since the training continued."""
        if not self.shrinks or self._batches_before is None:
            return 0
        batches = lightning_progress.batches_in_all(self._trainer) - self._batches_before
        return batches * (self.before - self._trainer.world_size)

    def resume(self, states: Mapping[int, dict[str, Any]]) -> None:
        """The training continues from these states.

        Args:
            states: Of ranks, as :meth:`.ExactState.own_state` gives them.
        """
        self.stand_in({rank: states[rank] for rank in self.ranks})
        self._is_resuming, self._loaders, self._batches_before = True, [], None

    def begin(self) -> None:
        """The training data are set up."""
        if (patches := self._patches) is not None:
            self._patches = None
            passes = self._micro_batches, self._begin_batch, self._expect_forward
            lightning_micro_batches.add_micro_batches(self._trainer, patches, *passes, self.share)

    def leave(self) -> None:
        """The fit has ended."""
        if self._hook is not None:
            self._hook.remove()
        self._loaders = []

    def own_states(self, mine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The states of the absent ranks, by their numbers.

        Args:
            mine: That of this rank, as :meth:`.ExactState.own_state` gives it.
        """
        trainer = self._trainer
        metrics = lightning_metrics.counts_for_nothing(trainer, trainer.lightning_module, mine["metrics"])
        nothing = {"metrics": metrics, "inherited": True, "absent": {}}
        if self.shrinks:  # their random numbers will be those of this process, which has made as many steps
            return {str(rank): {**mine, **nothing, "kept": state["kept"]} for rank, state in self.states.items()}
        in_epoch = ("epoch", "first_batch", "worker_states") if mine["epoch"] is not None else ()
        theirs = {"now", *in_epoch, "kept", "metrics", "absent"}
        same = {key: value for key, value in mine.items() if key not in theirs}
        return {str(rank): {**state, **same, **nothing} for rank, state in self.known.items()}

    @property
    def known(self) -> dict[int, dict[str, Any]]:
        """The :attr:`states`, and those of their data workers."""
        if self.shrinks:  # they have none
            return {rank: {**state, "worker_states": None} for rank, state in self.states.items()}
        if self._are_given:
            return self.states
        of_workers = [self._workers.states(loader.flattened, self._fetched) for loader in self._loaders]
        return {
            rank: {**state, "worker_states": found}
            for (rank, state), found in zip(self.states.items(), of_workers, strict=True)
        }

    def stand_in(self, states: Mapping[int, dict[str, Any]]) -> None:
        """From now on :meth:`own_states` gives these states, of ranks whose places this process or another one takes.

        Args:
            states: Of each ``"now"``, ``"epoch"``, ``"first_batch"``, ``"worker_states"`` and ``"kept"``.
        """
        self.states, self._are_given = {rank: dict(state) for rank, state in states.items()}, True

    def follow_evaluation(self, before: RandomState, after: RandomState) -> None:
        """An evaluation has drawn random numbers here, as it would have in the absent ranks.

        That is a seed for each iterator of a data loader. If it was something else, it cannot be followed.

        Args:
            before: This process's random state.
            after: The same.
        """
        if self.shrinks:
            return
        drawn = [seeds_drawn(*each) for each in zip(_seeding(before), _seeding(after), strict=True)]
        if None in drawn or _others(before) != _others(after):
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "The validation draws random numbers. From here on, random states of absent ranks differ from an "
                    "undisturbed run."
                )
            return
        for state in self.states.values():
            ours = zip(_seeding(state["now"]), drawn, strict=True)
            first, *others = [after_seeds(each, count or 0) for each, count in ours]
            state["now"] = {**state["now"], "torch": first, "generators": others}

    # -- data ----------------------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """A training boundary: in the first of an epoch, and of a resume, the loaders of the absent ranks begin."""
        self._follow(lightning_data.batches_fetched_in_all(self._trainer))

    def _follow(self, done: int) -> None:
        iterator = lightning_data.iterator(self._trainer)
        if self._is_resuming or iterator is not self._iterator():
            self._iterator = weakref.ref(iterator)
            self._begin_epoch(done if self._is_resuming else 0)

    def _micro_batches(self) -> list[MicroBatch]:
        """The batches that the absent ranks have at the place at which this one is."""
        place = lightning_data.batches_fetched_in_all(self._trainer)
        self._follow(place - 1)  # a search inside the fit has no boundaries
        if self.shrinks:
            return []
        batches: list[MicroBatch] = []
        for rank, loader in zip(self.states, self._loaders, strict=True):
            before = self.states[rank]["now"]
            for _ in range(place - self._fetched):
                self.states[rank]["now"] = before  # a batch that is skipped draws no random numbers
                with self._random_state_of(rank):
                    batch, *_ = next(loader)
                    self._advanced()
            batches.append((batch, partial(self._in_place_of, rank)))
        self._fetched = place
        most = -(-self.before // self._trainer.world_size) - 1
        return batches + [(None, self._in_vain) for _ in range(most - len(batches))]

    def _begin_batch(self, begins_window: bool) -> None:
        self._begun = None
        if begins_window:
            self._buffers_of = {}

    def _begin_epoch(self, done: int) -> None:
        is_resuming, self._is_resuming = self._is_resuming, False
        if self._batches_before is None:
            self._batches_before = lightning_progress.batches_in_all(self._trainer)
        if self.shrinks:
            return
        self._loaders, self._fetched, self._are_given = self._data.of_others(), done, False
        for other in self._loaders:
            self._workers.watch(other.flattened)
        for (rank, state), loader in zip(self.states.items(), self._loaders, strict=True):
            # The first batch of all is that of the next epoch, where the checkpoint is from the end of one.
            if is_resuming and state["epoch"] is not None and (done or not state["fetched"]):
                now = state["now"]
                with self._random_state_of(rank):
                    self._set_random_state(state["epoch"])
                    primed = partial(self._set_random_state, state["first_batch"] or now)
                    if state["fetched"] == done:  # else batches have another size
                        begun = partial(self._set_random_state, state["epoch"])
                        unseed = begun if state.get("workers_kept") else lambda: None
                        self._workers.begin_at(loader.flattened, done, state["worker_states"], primed, unseed)
                    iter(loader)
                    primed()
                    self._fetch_again(loader, done)
                    self._set_random_state(now)
            else:
                state["epoch"] = state["now"]
                with self._random_state_of(rank):
                    iter(loader)
                state["first_batch"] = state["now"]

    def _fetch_again(self, loader: Any, batches: int) -> None:
        if batches and not lightning_data.skip(loader, batches):
            for _ in range(batches):
                next(loader)
                self._advanced()

    @contextmanager
    def _random_state_of(self, rank: int) -> Iterator[None]:
        state, own = self.states[rank], self._get_random_state()
        self._set_random_state(state["now"])
        try:
            yield
        finally:
            state["now"] = self._get_random_state()
            self._set_random_state(own)

    # -- forward and backward passes -----------------------------------------------------------------------------------

    def get_state_of_batch(self) -> Any:
        """What the passes of the batch begin with that was fetched last."""
        return {rank: state["now"] for rank, state in self.states.items()}, self._buffers_of.copy()

    def set_state_of_batch(self, state: Any) -> None:
        """The passes are made again."""
        random, buffers = state
        for rank, now in random.items():
            self.states[rank]["now"] = now
        self._buffers_of = buffers.copy()

    @contextmanager
    def _in_place_of(self, rank: int) -> Iterator[None]:
        self._expect_forward(rank)
        with self._random_state_of(rank):
            yield
        if self._trainer.accumulate_grad_batches > 1:
            self._buffers_of[rank] = [each.clone() for each in self._buffers]

    @contextmanager
    def _in_vain(self) -> Iterator[None]:
        self._expect_forward()
        before = self._get_random_state()
        self.is_in_vain = True
        try:
            with lightning_metrics.nothing_logged(self._trainer, self._trainer.lightning_module):
                yield
        finally:
            self.is_in_vain = False
        self._set_random_state(before)

    def _expect_forward(self, rank: int | None = None) -> None:
        """The forward pass of an absent rank comes next, or one of this rank."""
        self._next = rank
        module, under_ddp = self._trainer.lightning_module, lightning_strategies.ddp_wrapper(self._trainer) is not None
        if self._begun is None:  # once in a batch: StochasticWeightAveraging has its own for an epoch
            self._buffers = list(module.buffers())
        if under_ddp and self._buffers and self._hook is None:
            # A function is not copied with the module, as a bound method would be, and the Trainer with it.
            self._hook = module.register_forward_pre_hook(lambda *_: self._before_forward())
        self._is_next = True
        if not under_ddp:
            self._before_forward()

    def _before_forward(self) -> None:
        """Each rank begins an accumulation window with the buffers of rank 0; under DDP they have come right before.

        Within one it goes on with its own.
        """
        if not self._is_next:
            return
        self._is_next = False
        with torch.no_grad():
            if self._begun is None:
                self._begun = [each.clone() for each in self._buffers]
            theirs = self._begun if self._next is None else self._buffers_of.get(self._next, self._begun)
            for buffer, begun in zip(self._buffers, theirs, strict=True):
                buffer.copy_(begun)


def _seeding(state: RandomState) -> list[torch.Tensor]:
    """The states of the generators from which iterators of data loaders draw."""
    return [state["torch"], *state["generators"]]


def _others(state: RandomState) -> list[Any]:
    """Of the other generators."""
    accelerator = state.get("accelerator", torch.empty(0))
    return [state["python"], pickle.dumps(state["numpy"]), accelerator.tolist()]
