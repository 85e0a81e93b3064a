"""Divides training data among another number of processes, and runs the batches of several ranks in one process."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_resilience._lightning import lightning_data
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience._lightning.lightning_strategies import name_of
from lightning_resilience.checkpoint import data_position

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def why_not(trainer: Trainer, loader: Any, before: int = 0) -> str | None:
    """The reason why a loader's data cannot be divided among more ranks than processes; ``None`` if they can.

    Args:
        trainer: The Trainer.
        loader: The script's loader, or the loader that the Trainer has created from it.
        before: The number of ranks for which the script may have created it.
    """
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset divides its own samples"
    if hasattr(loader, "load_state_dict"):
        return f"{type(loader).__name__} keeps its own position"
    if sized_len(loader) is None:
        return "the number of batches is unknown"  # then Lightning fetches one batch ahead
    if isinstance(loader.sampler, DistributedSampler):
        counts = {trainer.world_size, _parts(trainer, None), max(before, trainer.world_size)}
        if _wrapped(loader.sampler) is not None:
            return None
        if type(loader.sampler) is not DistributedSampler or loader.sampler.num_replicas not in counts:
            return f"the script's {type(loader.sampler).__name__} divides the samples in its own way"
    elif not trainer._accelerator_connector.use_distributed_sampler:
        return "the Trainer has use_distributed_sampler=False"
    return None


def _parts(trainer: Trainer, sampler: Any) -> int:
    """Into how many parts the samples are divided: with tensor parallelism several ranks read the same part."""
    if isinstance(sampler, DistributedSampler):
        return sampler.num_replicas
    about = trainer.distributed_sampler_kwargs if trainer.world_size > 1 else None
    return int(about["num_replicas"]) if about else 1


Order = list[Any]
"""The order of a loader's samples: the class of its sampler, and the settings that determine the order.

``["DistributedSampler", shuffle, seed, drop_last]``; ``["RandomSampler"]`` or ``["SequentialSampler"]`` for a single
rank; otherwise names of classes, and equal names count as the same order.
"""

_OF_ONE = (RandomSampler, SequentialSampler)


def order_of(sampler: Any) -> Order:
    """The order of a sampler in the epoch in progress."""
    if isinstance(sampler, _BegunByOne) and sampler.epoch == sampler.begun:
        return [type(sampler.of_one).__name__]
    if isinstance(sampler, _BegunByOne) or type(sampler) is DistributedSampler:
        return ["DistributedSampler", sampler.shuffle, sampler.seed if sampler.shuffle else 0, sampler.drop_last]
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return ["RandomSampler", sampler.replacement, sampler.num_samples]
    return [type(sampler).__name__, *([type(inner).__name__] if (inner := _wrapped(sampler)) is not None else [])]


def orders(trainer: Trainer) -> list[Order | None]:
    """The orders of the training loaders; ``None``: each of several ranks has its own, which no other can take over."""
    combined = trainer.fit_loop._combined_loader
    loaders: list[Any] = [] if combined is None else combined.flattened
    samplers = [_sampler(each) if isinstance(each, DataLoader) else each for each in loaders]
    of_many = [trainer.world_size > 1 and not isinstance(each, _BegunByOne) for each in samplers]
    known = map(order_of, samplers)
    return [None if many and is_of_one(order) else order for many, order in zip(of_many, known, strict=True)]


def is_of_one(order: Order | None) -> bool:
    """Whether an order is a single rank's order, which several ranks can take over."""
    return order in [[each.__name__] for each in _OF_ONE]


def _wrapped(sampler: Any) -> Any:
    """The script's sampler that Lightning has wrapped to divide it among ranks."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def wrapped_samplers(loaders: Sequence[Any]) -> list[Any]:
    """The script's samplers that Lightning has wrapped."""
    found = (_wrapped(_sampler(each)) for each in loaders if isinstance(each, DataLoader))
    return [each for each in found if each is not None]


@dataclass(frozen=True)
class Division:
    """How the training data of a run are divided among other ranks than before, or in smaller batches.

    Attributes:
        ranks: The ranks whose data this process reads; the Trainer's own loops get the data of the first of them.
        among: Among how many ranks the data are divided.
        before: The number of ranks in the checkpoint.
        share: Which part of the script's batch is a rank's batch.
        sizes: The batch sizes of the script's loaders in the checkpoint; ``None`` if unknown.
        kept: The batch sizes if the script itself divides a batch of all processes, which keeps its size; ``None`` if
            unknown.
        orders: The orders of the loaders in their epochs; ``None`` if unknown.
        epoch: The epoch in progress; ``None`` if an epoch begins.
    """

    ranks: Sequence[int]
    among: int
    before: int
    share: Fraction = Fraction(1)
    sizes: Sequence[Fraction | None] = ()
    kept: Sequence[Fraction | None] = ()
    orders: list[Order] | None = None
    epoch: int | None = None


class TrainingData:
    """The training data of a process, divided among a number of ranks other than the processes, or in smaller batches.

    Args:
        trainer: The Trainer, before its data are set up.
        patches: Undone after the fit.
        division: How to divide the data.

    Attributes:
        refused: The reason why the data are not divided; ``None`` if they are, or have not been set up yet.
        share: Which part of the script's batch is a rank's batch.
        is_by_script: Whether the script itself divides a batch of all processes.
        resized: A clause about batches that keep their size although the script now makes another one; empty if none.
    """

    def __init__(self, trainer: Trainer, patches: Patches, division: Division) -> None:
        self.refused: str | None = None
        self.share = division.share
        self.is_by_script = False
        self.resized = ""
        self._trainer, self._division = trainer, division
        self._ranks, self._among = division.ranks, division.among
        self._others: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._is_known = False
        self._orders: Iterator[Order | None] = iter(())
        self._sizes: Iterator[int | None] = iter(())
        connector, source = trainer._data_connector, trainer.fit_loop._data_source
        prepare, request = connector._prepare_dataloader, source.dataloader

        def requested() -> Any:
            found = request()
            self.decide(found)
            return found

        def prepared(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            if mode is not type(mode).TRAINING or self.refused is not None:
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            about = next(self._orders, None), next(self._sizes, None)
            own, *others = [self._of(rank, dataloader, *about, shuffle, mode) for rank in self._ranks]
            self._others[own] = others
            return own

        patches.set(source, "dataloader", requested)
        patches.set(connector, "_prepare_dataloader", prepared)

    def decide(self, found: Any) -> None:
        """Decides whether and how to divide the loaders that the script has created, for all of them alike."""
        combined_loader = lightning_data.combined_loader_class(self._trainer)
        loaders = (found if isinstance(found, combined_loader) else combined_loader(found)).flattened
        known, count = self._division.orders, len(loaders)
        is_in_progress = self._division.epoch is not None and not self._others  # otherwise loaders are created anew
        orders: list[Order | None] = [*known] if known is not None and len(known) == count else [None] * count
        if not is_in_progress:
            orders = [None if is_of_one(each) else each for each in orders]
        sizes = self._sizes_of(loaders)
        reasons = (
            why_not(self._trainer, each, self._division.before)
            or self._why_not_of_size(each, size, was)
            or (self._why_not_in_order(each, order) if is_in_progress else None)
            for each, order, size, was in zip(loaders, orders, sizes, self._before(sizes), strict=True)
        )
        reason = next(filter(None, reasons), None)
        if is_in_progress and known is not None and len(known) != count:
            reason = f"there are {count} data loaders, formerly {len(known)}"
        if reason is not None and self._others:
            raise ValueError(f"The training data cannot be divided among {self._among} ranks: {reason}.")
        self.refused, self._orders = reason, iter(orders)
        self._sizes = iter(
            int(size * self.share) if size is not None and _has_plain_batches(loader) else None
            for loader, size in zip(loaders, sizes, strict=True)
        )
        if reason is not None:
            self.share = Fraction(1)

    def _before(self, sizes: Sequence[Any]) -> list[Fraction | None]:
        before = self._division.sizes
        return [*before] if len(before) == len(sizes) else [None] * len(sizes)

    def _sizes_of(self, loaders: Sequence[Any]) -> list[int | None]:
        """The batch sizes of the script with the earlier number of ranks."""
        sizes, division, world = data_position.batch_sizes(loaders), self._division, self._trainer.world_size
        kept = division.kept if len(division.kept) == len(sizes) else [None] * len(sizes)
        before = self._before(sizes)
        if not self._is_known:
            self._is_known = True
            known = [each for each in zip(sizes, kept, before, strict=True) if None not in each]
            are_kept = all(size == its for size, its, _ in known) and any(size != was for size, _, was in known)
            # A single rank's order would differ from the order of several ranks.
            self.is_by_script = are_kept and (world > 1 or self._among == 1)
            if self.is_by_script:
                self._ranks, self._among, self.share = self._ranks[:1], world, Fraction(1)
        if self.is_by_script:
            return sizes
        found = []
        for loader, size, its, was in zip(loaders, sizes, kept, before, strict=True):
            # Such a script rounds down if it cannot divide a batch of all processes.
            is_rounded = size and its and was and int(its) <= size <= int(its + Fraction(division.before - 1, world))
            if is_rounded and was is not None and was.denominator == 1 and size != was and _has_plain_batches(loader):
                self.resized = f"of {was} samples, although the script now makes batches of {size}"
                size = int(was)
            found.append(size)
        return found

    def _why_not_of_size(self, loader: DataLoader[Any], size: int | None, was: Fraction | None) -> str | None:
        are_made_again = lightning_data.reloads_every(self._trainer) > 0  # perhaps with another size in each epoch
        is_plain, is_as_before = _has_plain_batches(loader), self.is_by_script or was in (None, size)
        if not is_plain and (self.share != 1 or not is_as_before):
            return f"a {type(loader.batch_sampler).__name__} makes the batches"
        if not is_as_before and not are_made_again:
            return f"the script's batches have {size} samples and had {was}"
        if size is None or not is_plain:
            return None
        now = size * self.share
        if now.denominator > 1:
            return f"a batch of {size} cannot be divided so that a step keeps its samples"
        samples, drops = len(loader.dataset), (loader.drop_last, getattr(loader.sampler, "drop_last", False))  # type: ignore[arg-type]
        among, before = (count // self._alike(loader) for count in (self._among, self._division.before))
        if _steps(samples, among, now, *drops) != _steps(samples, before, now * among / before, *drops):
            return "drop_last would leave out different samples"
        return None

    def _alike(self, loader: DataLoader[Any]) -> int:
        """How many consecutive ranks have the same samples."""
        return max(1, int(self._trainer.world_size) // _parts(self._trainer, loader.sampler))

    def _why_not_in_order(self, loader: DataLoader[Any], order: Order | None) -> str | None:
        if order is None:
            return None
        now = order_of(self._sampler_of(self._ranks[0], loader, order, shuffle=True, mode=None))
        if now == order or (now[0] == "DistributedSampler" and is_of_one(order)):
            return None
        return f"this epoch has the order of a {order[-1] if len(order) < 3 else order[0]}, not the current one"

    def _sampler_of(self, rank: int, loader: DataLoader[Any], order: Order | None, shuffle: bool, mode: Any) -> Any:
        connector: Any = sys.modules[type(self._trainer._data_connector).__module__]
        trainer: Any = self._trainer
        theirs, alike = loader.sampler, self._alike(loader)
        among, rank = self._among // alike, rank // alike
        if isinstance(theirs, DistributedSampler):
            about: Any = (theirs.shuffle, theirs.seed, theirs.drop_last)
        else:  # with another number of ranks the script may have used its own DistributedSampler
            about = order[1:] if order is not None and order[0] == "DistributedSampler" else None
        if about is not None and isinstance(theirs, (DistributedSampler, *_OF_ONE)):
            dataset: Any = theirs.dataset if isinstance(theirs, DistributedSampler) else loader.dataset
            shuffle, seed, drop_last = about
            options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
            sampler: Any = DistributedSampler(dataset, among, rank, **options)
        else:
            sampler = connector._get_distributed_sampler(
                loader,
                shuffle,
                mode=mode,
                overfit_batches=trainer.overfit_batches,
                num_replicas=among,
                rank=rank,
            )
        if is_of_one(order) and type(sampler) is DistributedSampler and self._division.epoch is not None:
            return _BegunByOne(sampler, _of_one(loader, order), self._division.epoch)
        return sampler

    def _of(
        self, rank: int, loader: DataLoader[Any], order: Order | None, size: int | None, shuffle: bool, mode: Any
    ) -> Any:
        connector: Any = sys.modules[type(self._trainer._data_connector).__module__]
        sampler = self._sampler_of(rank, loader, order, shuffle, mode)
        if isinstance(loader.sampler, DistributedSampler) and type(loader.batch_sampler) is BatchSampler:
            # Lightning does not re-create such a loader, and perhaps could not for a loader class of the script.
            made: Any = copy.copy(loader)
            batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
            vars(made).update(sampler=sampler, batch_sampler=batches, _iterator=None)
        else:
            made = connector._update_dataloader(loader, sampler, mode=mode)
        if size is not None and size != made.batch_size:
            made.batch_sampler.batch_size = vars(made)["batch_size"] = size
        connector._auto_add_worker_init_fn(made, rank)
        return made

    def of_others(self) -> list[Any]:
        """For each of the other ranks a combined loader like the Trainer's, not begun and set to the same epoch."""
        combined: Any = self._trainer.fit_loop._combined_loader
        found = []
        for number in range(len(self._ranks) - 1):
            loaders = [self._others[own][number] for own in combined.flattened]
            for own, loader in zip(combined.flattened, loaders, strict=True):
                if (epoch := getattr(_sampler(own), "epoch", None)) is not None:
                    _sampler(loader).set_epoch(epoch)
            other = copy.copy(combined)
            other._iterator = None
            other.flattened = loaders
            found.append(other)
        return found


def _has_plain_batches(loader: Any) -> bool:
    """Whether the batch size of a loader can be set."""
    return isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler


class _BegunByOne(DistributedSampler[Any]):
    """A sampler for an epoch that a single rank has begun: it continues the epoch in that rank's order.

    The order follows from the random state of the single rank, which all ranks have.
    """

    def __init__(self, sampler: DistributedSampler[Any], of_one: Any, epoch: int) -> None:
        super().__init__(
            sampler.dataset,
            sampler.num_replicas,
            sampler.rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        self.of_one, self.begun = of_one, epoch
        self.set_epoch(epoch)
        self.generator = getattr(of_one, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        if self.epoch != self.begun:
            return super().__iter__()
        order = islice(cycle(list(self.of_one)), self.total_size)
        return islice(order, self.rank, None, self.num_replicas)


def _of_one(loader: DataLoader[Any], order: Order | None) -> Any:
    """A single rank's sampler of the given order, created anew if the script's loader has another one now."""
    assert order is not None
    if type(loader.sampler).__name__ == order[0]:
        return loader.sampler
    data: Any = loader.dataset
    return RandomSampler(data, generator=loader.generator) if order == ["RandomSampler"] else SequentialSampler(data)


def _steps(samples: int, ranks: int, batch: Fraction, drops_batch: bool, drops_samples: bool) -> tuple[int, int]:
    """How many batches a rank has in an epoch, and how many samples all ranks together leave out."""
    left_out = samples % ranks if drops_samples else 0
    own = -(-(samples - left_out) // ranks)
    return int(own // batch if drops_batch else -(-own // batch)), left_out


def _sampler(loader: Any) -> Any:
    """The sampler that divides the data; in a loader with its own batch sampler it is inside of that."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _copied(batch: Any) -> Any:
    """A deep copy of a batch, or at least with copied tensors."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a tensor that was calculated, a lock
        return apply_to_collection(batch, torch.Tensor, torch.clone)


@contextmanager
def _reduced_in_groups(module: torch.nn.Module) -> Iterator[None]:
    """Makes FSDP2 reduce gradients within a group's shards only, and not over the groups that hold the same shards."""
    layers: list[Any] = [each for each in module.modules() if hasattr(each, "set_requires_all_reduce")]
    for each in layers:
        each.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for each in layers:
            each.set_requires_all_reduce(True, recurse=False)


MicroBatch = tuple[Any, Callable[[], AbstractContextManager[Any]]]
"""A batch on the host, and a function that creates the context for its forward and backward pass.

With ``None`` as batch, this rank's own batch is used once more and its gradient gets weight 0: training steps may
contain collectives, so all processes must make the same number of steps.
"""


def add_micro_batches(
    trainer: Trainer,
    patches: Patches,
    others: Callable[[], list[MicroBatch]],
    begin: Callable[[bool], None],
    own: Callable[[], None],
    share: float,
) -> None:
    """Adds the batches of other ranks to each training batch, in the same optimizer step.

    Gradients are reduced once, with the batch of this rank, which comes last.

    Args:
        trainer: A Trainer whose module uses automatic optimization.
        patches: Undone after the fit.
        others: Returns the batches of the other ranks; the same number in all processes.
        begin: Called before the first pass of a batch, with whether an accumulation window begins; an optimizer such as
            LBFGS makes all passes several times.
        own: Called before the forward pass of this rank's batch.
        share: The factor for the losses, so that the mean over processes is the mean over ranks.
    """
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make, connector = optimization._make_closure, trainer._logger_connector

    def unreduced() -> AbstractContextManager[Any]:
        strategy: Any = trainer.strategy
        if name_of(strategy) == "ModelParallelStrategy":
            return _reduced_in_groups(strategy.model)
        return strategy.block_backward_sync() if hasattr(strategy, "block_backward_sync") else nullcontext()

    def on_device(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def scaled(result: Any, factor: float) -> Any:
        if result.closure_loss is not None:
            result.closure_loss = result.closure_loss * factor
        return result

    def weighed(batch: Any) -> None:
        """Makes logged values weigh as much as ``batch`` has samples."""
        results: Any = trainer.fit_loop.epoch_loop._results
        results.batch, results.batch_size = batch, None

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        step, backward, zero_grad = closure._step_fn, closure._backward_fn, closure._zero_grad_fn
        batches = others()

        def all_steps() -> Any:
            if zero_grad is not None:
                optimization._optimizer_zero_grad(batch_idx, optimizer)
            begin(batch_idx % trainer.accumulate_grad_batches == 0)  # also without a backward pass (SWA)
            for batch, context in batches:
                with context(), unreduced():
                    # Copied because a step may change its batch, and this rank's own step is still to come.
                    taken = _copied(kwargs["batch"]) if batch is None else on_device(batch)
                    weighed(taken)
                    given = OrderedDict(kwargs, batch=taken)
                    result = scaled(optimization._training_step(given), 0.0 if batch is None else share)
                    if backward is not None and result.closure_loss is not None:
                        backward(result.closure_loss)
                connector._first_loop_iter = False  # otherwise each pass would reset the epoch's first logged values
            weighed(kwargs["batch"])
            own()
            result = step()
            if zero_grad is not None:  # its hook comes between the forward and the backward pass, as usual
                optimization._on_before_zero_grad(optimizer)
            return scaled(result, share)

        closure._step_fn, closure._zero_grad_fn = all_steps, None
        return closure

    patches.set(optimization, "_make_closure", make_closure)
