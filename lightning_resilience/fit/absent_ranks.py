"""Training with fewer ranks than the run was begun with: each process also trains on batches of absent ranks.

The ranks of a run are those with which it was begun. Each process is one of them, and takes the places of some absent
ranks. In each optimizer step it also makes the forward and backward passes of these ranks: on the batches, with the
random numbers and from the buffers that they would have. Gradients are reduced once (cf. the virtual nodes of
VirtualFlow, MLSys 2022, and the threads of EasyScale, SC 2023). So a step has the same samples as before and means the
same, whatever the loss is. Steps, epochs and schedules count as before, no sample is left out or trained on twice, and
the run can continue with any number of ranks up to the first. Only the order in which gradients are summed differs, and
a step takes as many times as long as ranks share a process.

Where the global batch may shrink, the processes make only their own passes. The batches of the absent ranks are left
out, and counted. No other rank trains on them, so a rank that comes back continues where it would have been.
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
from lightning_resilience._torch import buffer_places
from lightning_resilience.checkpoint.data_position import RandomState, after_seeds, seeds_drawn
from lightning_resilience.fit.data_workers import DataWorkers
from lightning_resilience.fit.frozen_writes import FrozenWrites

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.hooks import RemovableHandle

log = logging.getLogger(__name__)


def why_not(trainer: Trainer, before: int, some_are_absent: bool | None = None) -> str | None:
    """Why these processes cannot make the steps of a run with ``before`` ranks; ``None`` if they can.

    Args:
        trainer: The Trainer, when its strategy is set up.
        before: How many ranks the run has; if there are fewer processes, they train for the absent ranks.
        some_are_absent: Whether to check for absent ranks; default: if there are fewer processes than ``before``.
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
    """Why the training data of a fit cannot be divided among more ranks than processes; ``None`` if it can."""
    return next(filter(None, (lightning_micro_batches.why_not(trainer, each) for each in loaders)), None)


class AbsentRanks:
    """The places of absent ranks that this process takes.

    Args:
        trainer: The Trainer, before its data is set up.
        patches: Undoes the changes to the Trainer.
        data: The training data, divided among the ranks of the run.
        ranks: The places that this process takes.
        before: How many ranks the run has.
        shrinks: Whether the batches of absent ranks are left out, rather than trained on.
        advanced: Called after each batch that is fetched again.
        get_random_state: Returns this process's random state.
        set_random_state: Restores a random state.
        workers: The workers of the training data loaders.

    Attributes:
        before: How many ranks the run has.
        ranks: The places that this process takes.
        states: By rank, the state that only the absent rank would know. Values at a key are replaced, never changed.
        is_in_vain: Whether the current pass counts for nothing.
        share: The factor of the losses, so that the mean over processes is the mean over ranks.
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
        self._are_given = False  # whether states hold those of data workers, too
        self._has_warned = False
        self._iterator: Callable[[], Any] = lambda: None  # the Trainer's of this epoch
        self._fetched = 0
        self._batches_before: int | None = None  # how many batches of all epochs were done when the training continued
        self._frozen = FrozenWrites(trainer.lightning_module)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[torch.Tensor] = []
        self._begun: list[torch.Tensor] | None = None
        self._buffers_of: dict[int, list[torch.Tensor]] = {}  # after the last batch of an accumulation window
        self._next: int | None = None  # the absent rank whose forward pass comes next; None: this rank's own
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
        """Sets the states from which the training continues.

        Args:
            states: States of ranks, as :meth:`.ExactState.own_state` gives them.
        """
        self.stand_in({rank: states[rank] for rank in self.ranks})
        self._is_resuming, self._loaders, self._batches_before = True, [], None

    def begin(self) -> None:
        """Called when the training data is set up: adds the passes of the absent ranks."""
        if (patches := self._patches) is not None:
            self._patches = None
            passes = self._micro_batches, self._begin_batch, self._expect_forward
            lightning_micro_batches.add_micro_batches(self._trainer, patches, *passes, self.share)

    def leave(self) -> None:
        """Called when the fit has ended."""
        if self._hook is not None:
            self._hook.remove()
        self._loaders = []

    def own_states(self, mine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The states of the absent ranks, by their numbers.

        Args:
            mine: The state of this rank, as :meth:`.ExactState.own_state` gives it.
        """
        trainer = self._trainer
        metrics = lightning_metrics.counts_for_nothing(trainer, trainer.lightning_module, mine["metrics"])
        nothing = {"metrics": metrics, "inherited": True, "absent": {}}
        if self.shrinks:  # they get this process's random numbers, which have advanced as far
            return {str(rank): {**mine, **nothing, "kept": state["kept"]} for rank, state in self.states.items()}
        in_epoch = ("epoch", "first_batch", "worker_states") if mine["epoch"] is not None else ()
        theirs = {"now", *in_epoch, "kept", "metrics", "absent"}
        same = {key: value for key, value in mine.items() if key not in theirs}
        return {str(rank): {**state, **same, **nothing} for rank, state in self.known.items()}

    @property
    def known(self) -> dict[int, dict[str, Any]]:
        """The :attr:`states`, with the states of their data workers."""
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
        """From now on :meth:`own_states` gives these states of ranks whose places this process or another one takes.

        Args:
            states: By rank, ``"now"``, ``"epoch"``, ``"first_batch"``, ``"worker_states"`` and ``"kept"``.
        """
        self.states, self._are_given = {rank: dict(state) for rank, state in states.items()}, True

    def follow_evaluation(self, before: RandomState, after: RandomState) -> None:
        """Advances the random states of the absent ranks as an evaluation has advanced the one of this process.

        An evaluation draws a seed for each iterator of a data loader. If it has drawn anything more, the random states
        of the absent ranks cannot follow, and a warning is logged.

        Args:
            before: This process's random state before the evaluation.
            after: The same after the evaluation.
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
        """A training boundary: the loaders of the absent ranks begin at the first one of an epoch or a resume."""
        self._follow(lightning_data.batches_fetched_in_all(self._trainer))

    def _follow(self, done: int) -> None:
        iterator = lightning_data.iterator(self._trainer)
        if self._is_resuming or iterator is not self._iterator():
            self._iterator = weakref.ref(iterator)
            self._begin_epoch(done if self._is_resuming else 0)

    def _micro_batches(self) -> list[MicroBatch]:
        """The batches of the absent ranks at the position that this rank has reached."""
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
        self._frozen.begin_batch()
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
            # If the state has fetched batches and none is done, the checkpoint is from the end of the epoch before.
            if is_resuming and state["epoch"] is not None and (done or not state["fetched"]):
                now = state["now"]
                with self._random_state_of(rank):
                    self._set_random_state(state["epoch"])
                    primed = partial(self._set_random_state, state["first_batch"] or now)
                    if state["fetched"] == done:  # otherwise batches have another size
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
        """The state from which the passes of the batch that was fetched last begin."""
        return {rank: state["now"] for rank, state in self.states.items()}, self._buffers_of.copy()

    def set_state_of_batch(self, state: Any) -> None:
        """Restores such a state, before the passes are made again."""
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
            self._buffers_of[rank] = [of[name].clone() for of, name in self._places]

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
        """Called before a forward pass: of an absent rank, or of this rank if ``rank`` is ``None``."""
        if self.shrinks:
            return  # there is no other pass
        self._next = rank
        self._frozen.begin_pass()
        module, under_ddp = self._trainer.lightning_module, lightning_strategies.ddp_wrapper(self._trainer) is not None
        if self._begun is None:  # once in a batch: StochasticWeightAveraging has its own for an epoch
            self._places = list(buffer_places(module).values())
            self._buffers = [of[name] for of, name in self._places]
        if under_ddp and self._buffers and self._hook is None:
            # A function is not copied with the module, as a bound method would be, and the Trainer with it.
            self._hook = module.register_forward_pre_hook(lambda *_: self._before_forward())
        self._is_next = True
        if not under_ddp:
            self._before_forward()

    def _before_forward(self) -> None:
        """Sets the buffers with which the rank of the next pass would begin.

        Each rank begins an accumulation window with the buffers of rank 0, which DDP has broadcast right before. Within
        a window it continues with its own.
        """
        if not self._is_next:
            return
        self._is_next = False
        with torch.no_grad():
            if self._begun is None:
                self._begun = [each.clone() for each in self._buffers]
            theirs = self._begun if self._next is None else self._buffers_of.get(self._next, self._begun)
            for (of, name), buffer, begun in zip(self._places, self._buffers, theirs, strict=True):
                of[name] = buffer.copy_(begun)  # the pass before may have put another tensor in its place


def _seeding(state: RandomState) -> list[torch.Tensor]:
    """The states of the generators from which iterators of data loaders draw."""
    return [state["torch"], *state["generators"]]


def _others(state: RandomState) -> list[Any]:
    """The states of the other generators."""
    accelerator = state.get("accelerator", torch.empty(0))
    return [state["python"], pickle.dumps(state["numpy"]), accelerator.tolist()]
