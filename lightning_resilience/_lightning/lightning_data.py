"""Lightning's data loaders, their fetchers, and the position in the data."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.checkpoint import data_position

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def on_train_data(
    trainer: Trainer,
    patches: Patches,
    first: Callable[[Callable[[], None]], None],
    again: Callable[[], None],
) -> None:
    """Calls functions right before the iterators of the training data loaders are created.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        first: Called at the start of the fit, with the function by which the loaders restore their own states.
        again: Called at the start of every later epoch. The hook ``on_train_epoch_start`` would be too early: the
            user's hook of that name may draw random numbers after it.
    """
    fit_loop = trainer.fit_loop
    load_states = fit_loop._load_combined_loader_states

    def before_run() -> None:
        # The condition under which Lightning creates new iterators in on_run_start.
        if trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting:
            again()

    patches.set(fit_loop, "_load_combined_loader_states", lambda: first(load_states))
    patches.wrap(fit_loop.epoch_loop, "on_run_start", before=before_run)


def combined_loader_class(trainer: Trainer) -> Any:
    """The ``CombinedLoader`` of the package whose Trainer this is: ``lightning`` or ``pytorch_lightning``."""
    return vars(sys.modules[type(trainer.fit_loop).__module__])["CombinedLoader"]


def on_request(trainer: Trainer, patches: Patches, request: Callable[[int, Callable[[], Any]], Any]) -> None:
    """Calls ``request`` instead of the script's function that creates the loaders for the training or the validation.

    A ``CombinedLoader`` of the script is copied. Otherwise Lightning would put its own loaders, with samplers for the
    present number of ranks, into the script's object. The next fit, or a fit that is entered again with other ranks,
    would then take them for the script's loaders.

    Args:
        trainer: The Trainer.
        patches: Undone after the fit.
        request: Called with the index in :func:`reload_epochs` and the script's function.
    """
    combined_loader = combined_loader_class(trainer)

    def replace(which: int, source: Any) -> None:
        make = source.dataloader

        def requested() -> Any:
            found = request(which, make)
            return copy.copy(found) if isinstance(found, combined_loader) else found

        patches.set(source, "dataloader", requested)

    replace(0, trainer.fit_loop._data_source)
    replace(1, trainer.fit_loop.epoch_loop.val_loop._data_source)


def forget(trainer: Trainer) -> None:
    """Makes Lightning set up the training data again: a ``setup`` hook may have used them before the load."""
    trainer.fit_loop._combined_loader = None


def train_loaders(trainer: Trainer) -> list[Any]:
    """The training data loaders as Lightning iterates them, with its distributed samplers."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def validation_loaders(trainer: Trainer) -> list[Any]:
    """The validation data loaders as Lightning iterates them."""
    loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def set_epoch_of_samplers(trainer: Trainer, epoch: int) -> None:
    """Sets the epoch of every sampler.

    Lightning does so only after it has created the iterators, too late for loaders with workers (its issue #21938).
    """
    for loader in train_loaders(trainer):
        batch_sampler = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)


def loader_states(trainer: Trainer) -> list[dict[str, Any]] | None:
    """This rank's states of the training data loaders, if every loader is stateful and can restore its position.

    Lightning saves the states of rank 0 only. If the length is unknown, Lightning holds one batch back, which the
    loader's state counts as consumed: such a loader is replayed like a loader without state.
    """
    loader, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if loader is None or fetcher is None or fetcher.length is None:
        return None
    if not all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loader.flattened):
        return None
    return list(loader._state_dicts())


def load_loader_states(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Restores ``states`` into the training data loaders, before their iterators are created.

    Lightning itself drops them if ``trainer.estimated_stepping_batches`` has created the loaders early (its #20550).
    """
    assert trainer.fit_loop._combined_loader is not None
    trainer.fit_loop._combined_loader._load_state_dicts(states)


def fetches_ahead_here(trainer: Trainer) -> bool:
    """Whether this process fetches a training batch one step before it trains on it.

    Lightning does so if a loader does not know its length. Without workers the fetch draws from the same random streams
    as the training, so the batch in flight depends on the state of the streams one boundary ago.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return (
        fetcher is not None
        and fetcher.length is None
        and any(getattr(loader, "num_workers", 0) == 0 for loader in train_loaders(trainer))
    )


def batches_fetched(trainer: Trainer) -> int:
    """How many batches a replay must fetch to reach this rank's position in its training data."""
    fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
    by_iterator = type(fetcher).__name__ == "_DataLoaderIterDataFetcher"  # the user's step fetches as it likes
    return fetcher.fetched if by_iterator and fetcher is not None else progress.current.ready


def batches_fetched_in_all(trainer: Trainer) -> int:
    """How many batches of this epoch the Trainer's fetcher has returned, including batches that were fetched again."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return fetcher.fetched


def iterator(trainer: Trainer) -> Any:
    """The iterator over all training data loaders: a new one in each epoch, which no other code may keep alive."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return combined._iterator


def fetches_itself(module: LightningModule) -> bool:
    """Whether ``training_step`` takes an iterator over the data, and not a batch."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def replay_fetch(trainer: Trainer) -> Callable[[], Any]:
    """Returns a function that fetches the next training batch without training on it."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        return functools.partial(vars(type(fetcher).__mro__[1])["__next__"], fetcher)
    return lambda: next(fetcher)


def fast_forward(trainer: Trainer, batches: int) -> bool:
    """Advances the only training data loader by ``batches`` without reading the data of these batches.

    Both Lightning's combined iterator and torch's iterator count the batches that they have yielded.

    Args:
        trainer: The Trainer.
        batches: How many batches to skip.

    Returns:
        Whether that is possible.
    """
    fetcher, combined = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
    if fetcher is None or combined is None or type(fetcher).__name__ != "_PrefetchDataFetcher":
        return False
    if fetcher.length is None or not skip(combined, batches):
        return False
    fetcher.fetched += batches
    return True


def skip(combined: Any, batches: int) -> bool:
    """Advances a combined loader whose iterator exists; see :func:`fast_forward`. Returns whether that is possible."""
    if len(combined.flattened) != 1:
        return False
    (loader,), outer = combined.flattened, combined._iterator
    inner: Any = outer.iterators[0]
    if not isinstance(inner, BegunLater) or not inner._num_yielded:
        if not data_position.can_skip(loader) or batches > len(loader):
            return False  # reading the batches again reports what is wrong
        for _ in range(batches):
            inner._next_index()
        inner._num_yielded += batches
    assert inner._num_yielded == batches
    outer._idx += batches
    return True


def makes_torchs_iterators(loader: Any) -> bool:
    """Whether a ``DataLoader`` creates its iterators as torch does and returns batches in order."""
    is_torchs = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return is_torchs and getattr(loader, "in_order", True)


def make_next_iterator(loader: Any, make: Callable[[], Any] | None) -> None:
    """Makes a function create the next iterator of torch's own loader, once; ``None``: torch creates it as usual."""
    vars(loader).pop("_get_iterator", None)
    if make is not None:
        loader._get_iterator = functools.partial(_make_once, loader, make)


def _make_once(loader: Any, make: Callable[[], Any]) -> Any:
    del loader._get_iterator
    return make()


class BegunLater(_MultiProcessingDataLoaderIter):
    """torch's iterator of a loader with workers that begins at a later batch, without reading the batches before it.

    Each following batch has the number and the worker that it would have without the skip.

    Args:
        loader: A ``DataLoader``.
        batches: How many batches to skip, at most all of the epoch.
        primed: Called when the sampler has yielded as many batches as it does before the first batch is fetched: it may
            draw random numbers for each.
        unseed: Called when the seed of the workers has been drawn, and nothing else yet.
        epoch_begins: Called at the beginning of each epoch, before a batch is requested, with the number of batches of
            the epoch before, which persistent workers have read; 0 for the first one.
    """

    def __init__(
        self,
        loader: Any,
        batches: int,
        primed: Callable[[], None],
        unseed: Callable[[], None] = lambda: None,
        epoch_begins: Callable[[int], None] = lambda asked: None,
    ) -> None:
        self._left_out, self._primed, self._given = batches, primed, 0
        self._unseed, self._epoch_begins = unseed, epoch_begins
        super().__init__(loader)
        self._num_yielded, self._primed = batches, lambda: None

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._unseed()
        self._asked: int | None = 0 if first_iter else self._send_idx
        super()._reset(loader, first_iter)

    @override
    def _next_index(self) -> Any:
        if self._given == self._prefetch_factor * self._num_workers:
            self._primed()
        self._given += 1
        return super()._next_index()  # type: ignore[no-untyped-call]

    @override
    def _try_put_index(self) -> None:
        if self._asked is not None:
            self._epoch_begins(self._asked)
            self._asked = None
        if batches := self._left_out:
            self._left_out = 0
            with suppress(StopIteration):  # the sampler yields less than its length says
                for _ in range(batches):
                    self._next_index()
            for _ in range(batches % self._num_workers):
                next(self._worker_queue_idx_cycle)
            self._send_idx = self._rcvd_idx = batches
        super()._try_put_index()


def set_seed_of_worker(seed: int) -> None:
    """Sets the value of ``get_worker_info().seed``; called in a worker of a loader."""
    object.__setattr__(get_worker_info(), "seed", seed)  # the object itself refuses to be changed


class SampleIds:
    """Knows the samples of the latest training batches, if a sampler yields their indices.

    The iterator of a data loader takes the indices of each batch from its sampler, ahead of the workers; this class
    records them. Batches requested from workers before the first call of :meth:`look` are not known.
    """

    _KEPT = 256

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._seen: Callable[[], Any] = lambda: None  # the iterator over all loaders, of one epoch
        self._iterator: Callable[[], Any] = lambda: None
        self._ids: dict[int, Any] = {}

    def look(self) -> None:
        """Begins to record the indices of this epoch's iterator."""
        combined: Any = self._trainer.fit_loop._combined_loader
        if combined is None or combined._iterator is None or combined._iterator is self._seen():
            return
        inner: Any = next(iter(combined._iterator.iterators), None)
        if inner is None:
            return
        self._seen = weakref.ref(combined._iterator)
        if len(combined.flattened) != 1 or inner is self._iterator() or not hasattr(inner, "_next_index"):
            return
        # Neither this object nor a reference cycle may keep the iterator alive: its workers end with it.
        ids: dict[int, Any] = {}
        self._iterator, self._ids, kept = weakref.ref(inner), ids, self._KEPT

        def noted(iterator: Callable[[], Any] = self._iterator) -> Any:
            inner = iterator()
            indices = type(inner)._next_index(inner)
            number = inner._send_idx if hasattr(inner, "_send_idx") else inner._num_yielded
            ids[number] = indices
            ids.pop(number - kept, None)
            return indices

        inner._next_index = noted

    def of(self, batches: Iterable[int]) -> list[int] | None:
        """The indices of some batches of this epoch, as the loader counts them; ``None`` if they are not known."""
        found: list[Any] = [self._ids.get(batch) for batch in batches]
        if not all(isinstance(each, (list, tuple)) for each in found):
            return None
        ids = [index for each in found for index in each]
        return ids if all(isinstance(index, int) for index in ids) else None


def reload_epochs(trainer: Trainer) -> list[float]:
    """The epochs in which loaders were last created (``reload_dataloaders_every_n_epochs``): training, validation."""
    fit_loop = trainer.fit_loop
    return [fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch]


def reloads_every(trainer: Trainer) -> int:
    """After how many epochs loaders are created anew; 0: never."""
    return int(cast(Any, trainer).reload_dataloaders_every_n_epochs)


def are_made_again(trainer: Trainer, epoch: float) -> bool:
    """Whether loaders that were created in ``epoch`` are due to be created anew."""
    every_n_epochs = reloads_every(trainer)
    return bool(every_n_epochs) and trainer.current_epoch - epoch >= every_n_epochs


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    """Restores :func:`reload_epochs`, so that loaders are created in the same epochs as without the interruption."""
    fit_loop = trainer.fit_loop
    fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epochs
