"""The training data of a run with another number of processes, and training steps of several ranks in one of them."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_resilience._lightning.lightning_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def why_not(trainer: Trainer, loader: Any) -> str | None:
    """Why the data of a loader cannot be divided among more ranks than there are processes; ``None`` if they can.

    Args:
        trainer: The Trainer.
        loader: The script's, or what the Trainer has made of it.
    """
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is no DataLoader of torch's"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset divides itself"
    if hasattr(loader, "load_state_dict"):
        return f"{type(loader).__name__} keeps its place itself"
    if sized_len(loader) is None:
        return "it is not known how many batches there are"  # Lightning fetches one ahead, then
    if isinstance(loader.sampler, DistributedSampler):
        if type(loader.sampler) is not DistributedSampler or loader.sampler.num_replicas != trainer.world_size:
            return f"the script's {type(loader.sampler).__name__} divides them in a way of its own"
    elif not trainer._accelerator_connector.use_distributed_sampler:
        return "the Trainer has use_distributed_sampler=False"
    return None


class TrainingData:
    """The training data of a process, divided among other ranks than there are processes, or in smaller batches.

    Args:
        trainer: The Trainer, before its data are set up.
        patches: What undoes it.
        ranks: Whose data this process reads; the Trainer's own loops get those of the first.
        among: How many ranks the data are divided among.
        share: How much of the script's batch is a batch of a rank.
        kept: How large a batch of the first loader would be in the script if it divided a batch of all processes
            itself, so that it stays as large; ``None`` if that is not known.
        begun_by_one: The epoch that a single rank has begun, whose order a shuffled loader keeps to its end; ``None``
            if there is none.

    Attributes:
        refused: Why they are not; ``None`` if they are, or have not been set up yet.
        share: How much of the script's batch is a batch of a rank.
        is_by_script: Whether the script divides a batch of all processes itself.
    """

    def __init__(
        self,
        trainer: Trainer,
        patches: Patches,
        ranks: Sequence[int],
        among: int,
        share: Fraction = Fraction(1),
        kept: Fraction | None = None,
        begun_by_one: int | None = None,
    ) -> None:
        self.refused: str | None = None
        self.share = share
        self.is_by_script = False
        self._trainer = trainer
        self._ranks, self._among, self._begun_by_one = ranks, among, begun_by_one
        self._others: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._kept, self._is_known = kept, False
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepared(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            if mode is not type(mode).TRAINING or self.refused is not None:
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            if (reason := why_not(self._trainer, dataloader) or self._why_not_smaller(dataloader)) is not None:
                if self._others:
                    raise ValueError(f"The training data cannot be divided among {self._among} ranks: {reason}.")
                self.refused = reason
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            own, *others = [self._of(rank, dataloader, shuffle, mode) for rank in self._ranks]
            self._others[own] = others
            return own

        patches.set(connector, "_prepare_dataloader", prepared)

    def _why_not_smaller(self, loader: DataLoader[Any]) -> str | None:
        size = loader.batch_size if type(loader.batch_sampler) is BatchSampler else None
        if not self._is_known:
            self._is_known, self.is_by_script = True, size is not None and size == self._kept
            if self.is_by_script and (self._trainer.world_size > 1 or self._among == 1):
                self._ranks, self._among, self.share = self._ranks[:1], self._trainer.world_size, Fraction(1)
            elif self.is_by_script and size is not None and self._kept is not None:
                # A single rank's order would be another one.
                self.is_by_script, self.share = False, Fraction(1, self._among)
        if self.share == 1:
            return None
        if size is None:
            return f"a {type(loader.batch_sampler).__name__} makes the batches"
        if (size * self.share).denominator > 1:
            return f"a batch of {size} cannot be divided so that a step keeps its samples"
        return None

    def _of(self, rank: int, loader: DataLoader[Any], shuffle: bool, mode: Any) -> Any:
        connector: Any = sys.modules[type(self._trainer._data_connector).__module__]
        trainer: Any = self._trainer
        theirs = loader.sampler
        if isinstance(theirs, DistributedSampler):
            sampler: Any = DistributedSampler(
                theirs.dataset,
                self._among,
                rank,
                shuffle=theirs.shuffle,
                seed=theirs.seed,
                drop_last=theirs.drop_last,
            )
        else:
            sampler = connector._get_distributed_sampler(
                loader,
                shuffle,
                mode=mode,
                overfit_batches=trainer.overfit_batches,
                num_replicas=self._among,
                rank=rank,
            )
        if self._begun_by_one is not None and isinstance(theirs, RandomSampler) and sampler.shuffle:
            sampler = _BegunByOne(sampler, theirs, self._begun_by_one)
        made = connector._update_dataloader(loader, sampler, mode=mode)
        if self.share != 1:
            size = int(made.batch_size * self.share)
            made.batch_sampler.batch_size = vars(made)["batch_size"] = size
        connector._auto_add_worker_init_fn(made, rank)
        return made

    def of_others(self) -> list[Any]:
        """For each of the other ranks a loader of what the Trainer's has: not begun, at the same epoch."""
        combined: Any = self._trainer.fit_loop._combined_loader
        found = []
        for number in range(len(self._ranks) - 1):
            loaders = [self._others[own][number] for own in combined.flattened]
            for own, loader in zip(combined.flattened, loaders, strict=True):
                _sampler(loader).set_epoch(_sampler(own).epoch)
            other = copy.copy(combined)
            other._iterator = None
            other.flattened = loaders
            found.append(other)
        return found


class _BegunByOne(DistributedSampler[Any]):
    """A sampler whose epoch was begun by a single rank: the rest is in the order in which that would have gone on.

    That order follows from the random state, which all ranks have of that one.
    """

    def __init__(self, sampler: DistributedSampler[Any], of_one: RandomSampler, epoch: int) -> None:
        super().__init__(
            sampler.dataset,
            sampler.num_replicas,
            sampler.rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        self._of_one, self._in = of_one, epoch
        self.generator = of_one.generator

    def __iter__(self) -> Iterator[Any]:
        if self.epoch != self._in:
            return super().__iter__()
        order = islice(cycle(list(self._of_one)), self.total_size)
        return islice(order, self.rank, None, self.num_replicas)


def _sampler(loader: Any) -> Any:
    """The one that divides the data: a loader with a batch sampler of its own has it in there."""
    return loader.sampler if isinstance(loader.sampler, DistributedSampler) else loader.batch_sampler.sampler


def _copied(batch: Any) -> Any:
    """A batch whose containers and tensors are others."""
    return apply_to_collection(batch, torch.Tensor, torch.clone)


MicroBatch = tuple[Any, Callable[[], AbstractContextManager[Any]]]
"""A batch on the host, and what makes the context that is in force for its forward and backward pass.

Without a batch, that of this rank is taken once more and its gradient counts for nothing: training steps may contain
collectives, so all processes make as many of them.
"""


def add_micro_batches(
    trainer: Trainer,
    patches: Patches,
    others: Callable[[], list[MicroBatch]],
    begin: Callable[[], None],
    own: Callable[[], None],
    share: float,
) -> None:
    """Has each training batch be followed, in the same optimizer step, by those of others.

    Gradients are reduced once, with the batch of this rank, which comes last.

    Args:
        trainer: A Trainer whose module uses automatic optimization.
        patches: What undoes it.
        others: Gives the batches of the others; as many in all processes.
        begin: Called before the first pass of a step; an optimizer such as LBFGS makes all of them several times.
        own: Called before the forward pass of this rank's batch.
        share: What the losses are multiplied by, so that the mean over processes is that over ranks.
    """
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make = optimization._make_closure

    def unreduced() -> AbstractContextManager[Any]:
        strategy: Any = trainer.strategy
        return strategy.block_backward_sync() if hasattr(strategy, "block_backward_sync") else nullcontext()

    def on_device(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def scaled(result: Any, factor: float) -> Any:
        if result.closure_loss is not None:
            result.closure_loss = result.closure_loss * factor
        return result

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        step, backward, zero_grad = closure._step_fn, closure._backward_fn, closure._zero_grad_fn
        batches = others()

        def all_steps() -> Any:
            if zero_grad is not None:
                zero_grad()
            begin()
            for batch, context in batches:
                with context(), unreduced():
                    # A step may change its batch, and that of this rank is yet to come.
                    taken = _copied(kwargs["batch"]) if batch is None else on_device(batch)
                    given = OrderedDict(kwargs, batch=taken)
                    result = scaled(optimization._training_step(given), 0.0 if batch is None else share)
                    if backward is not None and result.closure_loss is not None:
                        backward(result.closure_loss)
            own()
            return scaled(step(), share)

        closure._step_fn, closure._zero_grad_fn = all_steps, None
        return closure

    patches.set(optimization, "_make_closure", make_closure)
