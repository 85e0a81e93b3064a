"""Workers of training data loaders: guarded, and started in mid-epoch in the states of the workers before them.

The position of a loader consists of the position of its sampler, which is advanced in no time, and what its workers
hold: the states of their random generators, and what a user's dataset remembers from one read to the next. So each
worker leaves its random state in shared memory after each batch, and checks whether the dataset remembers anything. If
not, new workers that get these random states are as good as workers that have read everything up to there.

The check sees only what Python shows; see :mod:`.reading_traces`. So the user must declare that samples depend on
nothing but their index and random numbers, and the check notices when that is not so.

What the first read changes is no trace: datasets open their files when they first need them, in each worker. Apart from
the random numbers that each read draws, the first read must draw none: new workers would draw them again.

*Persistent* workers live longer than an epoch, and their random states with them. Where the user has not declared that,
new ones begin with the random states at the start of the epoch, and read again.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_resilience._lightning import lightning_data
from lightning_resilience.checkpoint.data_position import (
    RandomState,
    get_random_state,
    persistent_workers_run,
    set_random_state,
)
from lightning_resilience.checkpoint.reading_traces import outline
from lightning_resilience.signals import WorkerGuard

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_SEED = struct.Struct("<Q")  # of the worker, as datasets may read it
_TWISTER = struct.Struct("<625I")  # the words of a Mersenne twister and its position: Python's, NumPy's
_GAUSS = struct.Struct("<d?d?")  # the cached second normal number of each, and whether it exists
_STATE_SIZE = _SEED.size + 2 * _TWISTER.size + _GAUSS.size + torch.default_generator.get_state().numel()
_UNCHANGED, _CHANGED = 1, 2
"""What a worker has found out about its dataset; 0: it has not checked twice yet."""


class DataWorkers:
    """The workers of training data loaders.

    Args:
        guard: Keeps workers of loaders from ending before this process and from outliving it.
        is_asked: Whether workers are started in mid-epoch. Persistent ones are watched in any case.
    """

    def __init__(self, guard: Callable[[list[Any]], None], is_asked: bool = True) -> None:
        self._guard, self._is_asked = guard, is_asked
        # Weak: an epoch may create new loaders. By loader, the memory of the workers of its latest iterator.
        self._watched: weakref.WeakKeyDictionary[Any, _Memory | None] = weakref.WeakKeyDictionary()

    @property
    def are_watched(self) -> bool:
        """Whether any loader's workers are watched."""
        return len(self._watched) > 0

    def watch(self, loaders: list[Any]) -> None:
        """Guards the workers of these loaders, and watches those of their next iterators.

        Args:
            loaders: Training data loaders. Those that cannot be watched are left out, such as loaders whose persistent
                workers already run after a look at the data. Some may be watched already.
        """
        self._guard(loaders)
        for loader in loaders:
            if not _can_be_watched(loader) or loader in self._watched or persistent_workers_run([loader]):
                continue
            if not self._is_asked and not loader.persistent_workers:
                continue
            guard = loader.worker_init_fn
            watch = loader.collate_fn = _Watch(loader.collate_fn, guard.inner, self._is_asked)
            guard.inner = watch.begin
            self._expect(loader)

    def forget(self) -> None:
        """Called when an epoch begins, with new iterators."""
        for loader in [*self._watched]:
            if not persistent_workers_run([loader]):
                self._expect(loader)

    def can_begin(self, loaders: list[Any], batches: int, states: torch.Tensor | None) -> bool:
        """Whether :meth:`begin_at` has an effect."""
        return self._place(loaders, batches, states) is not None

    def begin_at(
        self,
        loaders: list[Any],
        batches: int,
        states: torch.Tensor | None,
        primed: Callable[[], None],
        unseed: Callable[[], None] = lambda: None,
    ) -> None:
        """Has the workers of the next iterator begin after so many batches, if possible; otherwise they read again.

        Args:
            loaders: The loaders of one rank.
            batches: After how many batches the workers begin.
            states: What :meth:`states` has given at that position.
            primed: Called when the sampler has given as many batches as it does before the first one is fetched.
            unseed: Called when the iterator has drawn the seed of its workers, before it draws anything else.
        """
        if (found := self._place(loaders, batches, states)) is not None:
            self._expect(loaders[0], *found, primed, unseed)

    def _place(self, loaders: list[Any], batches: int, states: torch.Tensor | None) -> tuple[int, torch.Tensor] | None:
        """After how many batches new workers begin, and in which states; ``None`` if they would not be equivalent."""
        like = self.no_states(loaders)
        if states is None or not len(like):
            return None
        if states.shape != like.shape:
            if states.any():
                return None  # another number of workers would have drawn other numbers
            states = like
        at = 0 if states[:, -1].any() else batches
        is_there = (at > 0 or loaders[0].persistent_workers) and at <= (sized_len(loaders[0]) or 0)
        return (at, states) if is_there else None

    def _expect(
        self,
        loader: Any,
        batches: int = 0,
        states: torch.Tensor | None = None,
        primed: Callable[[], None] = lambda: None,
        unseed: Callable[[], None] = lambda: None,
    ) -> None:
        """Has the next iterator begin there. Later ones, for a validation or a look at the data, are not watched."""

        def make() -> Any:
            watch = loader.collate_fn
            if not isinstance(watch, _Watch):  # it was replaced since
                return lightning_data.BegunLater(loader, 0, primed, unseed)
            about = loader.num_workers, loader.prefetch_factor, loader.persistent_workers
            watch.memory = memory = _Memory(*about, batches, states)
            try:
                return lightning_data.BegunLater(loader, batches, primed, unseed, memory.begin_epoch)
            finally:
                watch.memory, self._watched[loader] = None, memory

        self._watched[loader] = None
        lightning_data.make_next_iterator(loader, make)

    def states(self, loaders: Collection[Any], batches: int) -> torch.Tensor | None:
        """The states with which new workers are as good as the ones that have read in this epoch.

        Args:
            loaders: The loaders of one rank.
            batches: How many batches have been fetched.

        Returns:
            Bytes of shape ``(workers, ...)``, zeros for workers that have drawn no random number. The last byte of a
            worker is 1 if its state is that of a persistent worker at the start of the epoch. ``None`` if the states
            are unknown or do not suffice.
        """
        (loader,) = loaders if len(loaders) == 1 else (None,)
        memory = self._watched.get(loader) if isinstance(loader, DataLoader) else None
        if memory is None:
            return None
        here = memory.states(batches) if self._is_asked or memory.at_epoch is None else None
        return memory.at_epoch if here is None else here

    def are_kept(self, loaders: Collection[Any]) -> bool:
        """Whether the states of the persistent workers of these loaders can be known."""
        (loader,) = loaders if len(loaders) == 1 else (None,)
        return isinstance(loader, DataLoader) and loader in self._watched

    def no_states(self, loaders: Collection[Any]) -> torch.Tensor:
        """:meth:`states` of workers that have drawn no number; of no workers if they are not watched."""
        (loader,) = loaders if len(loaders) == 1 else (None,)
        workers = loader.num_workers if isinstance(loader, DataLoader) and loader in self._watched else 0
        return torch.zeros(workers, _STATE_SIZE + 1, dtype=torch.uint8)

    def leave(self) -> None:
        """Restores the loaders; removing the guard of the workers removes the rest."""
        for loader in self._watched:
            lightning_data.make_next_iterator(loader, None)
            if isinstance(watch := loader.collate_fn, _Watch):
                loader.collate_fn = watch.collate
        self._watched.clear()


def same_for_all(states: torch.Tensor | None) -> torch.Tensor | None:
    """The result of :meth:`DataWorkers.states` if it also holds for other ranks: no worker has drawn a number."""
    return None if states is None or states.any() else states


def _can_be_watched(loader: Any) -> bool:
    """Whether a loader has workers, which all iterate as torch does, and does not restore its own position."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.worker_init_fn, WorkerGuard)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
        and lightning_data.makes_torchs_iterators(loader)
    )


class _Memory:
    """Shared memory in which the workers of one iterator leave their random states.

    Worker ``w`` of ``n`` reads the batches ``w``, ``w + n``, ... It is at most ``prefetch_factor`` of its batches ahead
    of the batches that were fetched, and one more may be fetched than trained on.

    Args:
        workers: How many workers the iterator has.
        prefetch_factor: The loader's.
        persist: Whether workers live longer than an epoch. Then they do not begin with the states of new ones.
        batches: After how many batches of the epoch the workers begin.
        states: See :meth:`DataWorkers.states`.

    Attributes:
        at_epoch: The states of persistent workers at the start of the epoch. ``None`` in the first epoch, in which they
            follow from the seed of the iterator, or if they are not known.
    """

    def __init__(
        self, workers: int, prefetch_factor: int, persist: bool, batches: int, states: torch.Tensor | None
    ) -> None:
        self._workers, self._kept, self._before = workers, prefetch_factor + 2, batches
        self.persist = persist
        self.at_epoch = _of_epoch(states) if persist and batches == 0 else None
        self._asked_before = np.zeros(workers, dtype=np.int64)  # in earlier epochs
        memory: Any = torch.zeros(workers * self._record.itemsize, dtype=torch.uint8)
        self._memory = memory.share_memory_()
        at = self._at(batches)
        self._records["done"][at] = self._done_by(batches)
        if states is not None:
            if not states[:, -1].any():
                self._records["seen"] = _UNCHANGED
            self._records["states"][at] = states[:, :-1].numpy()

    @property
    def _record(self) -> np.dtype[Any]:
        """Per worker: what it has found out, and the last states, each with how many batches it had read then."""
        return np.dtype([("seen", "u1"), ("done", "<i8", self._kept), ("states", "u1", (self._kept, _STATE_SIZE))])

    @property
    def _records(self) -> Any:
        return self._memory.numpy().view(self._record)

    def _done_by(self, batches: int) -> Any:
        """How many batches each worker has read when so many batches of this epoch were read."""
        of_epoch = (batches - np.arange(self._workers) + self._workers - 1) // self._workers
        return self._asked_before + of_epoch

    def begin_epoch(self, asked: int) -> None:
        """Persistent workers begin an epoch, and have read all batches of the epoch before.

        Args:
            asked: How many batches they were asked for in that epoch.
        """
        if asked:
            self._asked_before = self._done_by(asked)
            self.at_epoch = _of_epoch(self._states(0))

    def _at(self, batches: int) -> Any:
        """Where the states after so many batches are."""
        return np.arange(self._workers), self._done_by(batches) % self._kept

    def states(self, batches: int) -> torch.Tensor | None:
        """See :meth:`DataWorkers.states`; ``None`` if workers hold more than random states."""
        return self._states(batches) if (self._records["seen"] == _UNCHANGED).all() else None

    def _states(self, batches: int) -> torch.Tensor | None:
        records, at = self._records, self._at(batches)
        if not (records["done"][at] == self._done_by(batches)).all():
            return None
        found = np.zeros((self._workers, _STATE_SIZE + 1), dtype=np.uint8)
        found[:, :-1] = records["states"][at]
        return torch.from_numpy(found)

    def begun(self, worker: int) -> tuple[int, bytes]:
        """After how many of its batches a worker begins, and in which state; empty if it already has that state."""
        done = int(self._done_by(self._before)[worker])
        state = self._records["states"][worker, done % self._kept]
        return done, state.tobytes() if state.any() else b""

    def put(self, worker: int, done: int, state: bytes, has_looked_twice: bool) -> None:
        """Stores the state of a worker after one more batch; its dataset has not changed."""
        records, at = self._records, (worker, done % self._kept)
        records["states"][at] = np.frombuffer(state, np.uint8) if state else 0
        records["done"][at] = done
        if has_looked_twice:
            records["seen"][worker] = _UNCHANGED

    def give_up(self, worker: int) -> None:
        """Notes that a worker's dataset has changed."""
        self._records["seen"][worker] = _CHANGED


def _of_epoch(states: torch.Tensor | None) -> torch.Tensor | None:
    """``states``, marked as those at the start of an epoch."""
    return None if states is None else torch.cat([states[:, :-1], torch.ones_like(states[:, -1:])], dim=1)


class _Watch:
    """Replaces a loader's ``collate_fn``, which a worker calls with each batch.

    Args:
        collate: The loader's own ``collate_fn``.
        init: The loader's own ``worker_init_fn``.
        looks: Whether workers also look for traces of reads.

    Attributes:
        memory: Memory for the workers of the iterator that is being made; ``None``: they leave nothing.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], None] | None, looks: bool) -> None:
        self.collate, self.init, self._looks = collate, init, looks
        self.memory: _Memory | None = None
        self._worker: int | None = None
        self._done = 0
        self._begun = b""
        self._outline: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """An attribute of the loader's own function."""
        if name == "collate" or name.startswith("__"):  # a copy is being made
            raise AttributeError(name)
        return getattr(self.collate, name)

    def begin(self, worker: int) -> None:
        """Replaces the loader's ``worker_init_fn``: called in the worker, before it reads."""
        if self.init is not None:
            self.init(worker)
        if self.memory is None:
            return
        self._worker, self._begun = worker, _packed(get_random_state(_CPU))
        self._done, state = self.memory.begun(worker)
        if state:
            set_random_state(_unpacked(state), _CPU)
            lightning_data.set_seed_of_worker(*_SEED.unpack_from(state))
        if self.memory.persist:  # in a later epoch new workers would begin with another seed
            self.memory.put(worker, self._done, state or self._begun, False)

    def __call__(self, samples: Any) -> Any:
        """The loader's ``collate_fn``."""
        batch = self.collate(samples)
        if self.memory is not None and self._worker is not None:
            self._look(self.memory, self._worker)
        return batch

    def _look(self, memory: _Memory, worker: int) -> None:
        state = _packed(get_random_state(_CPU))
        is_first = self._outline is None
        if self._looks and (not state or not self._is_unchanged()):
            memory.give_up(worker)
            self._looks, self._outline = False, None  # the outline keeps alive the objects it describes
            state = state if memory.persist else b""
        if not state:
            self.memory = None
            return
        self._done += 1
        is_new = memory.persist or state != self._begun
        memory.put(worker, self._done, state if is_new else b"", self._looks and not is_first)

    def _is_unchanged(self) -> bool:
        info: Any = get_worker_info()
        try:
            now = outline(info.dataset, self.collate)
        except Exception:  # from an object that does not allow inspection
            log.debug("A dataset cannot be looked at", exc_info=True)
            return False
        self._outline = self._outline or now
        return now == self._outline


def _packed(state: RandomState) -> bytes:
    """A random state of this worker, as bytes; empty if NumPy's generator was replaced."""
    (_, words, python_gauss), numpy = state["python"], state["numpy"]
    if numpy["bit_generator"] != "MT19937":
        return b""
    return b"".join(
        (
            _SEED.pack(get_worker_info().seed),  # type: ignore[union-attr]
            _TWISTER.pack(*words),
            _TWISTER.pack(*numpy["state"]["key"].tolist(), numpy["state"]["pos"]),
            _GAUSS.pack(python_gauss or 0.0, python_gauss is not None, numpy["gauss"], bool(numpy["has_gauss"])),
            state["torch"].numpy().tobytes(),
        )
    )


def _unpacked(packed: bytes) -> RandomState:
    at = _SEED.size + _TWISTER.size
    python, (*key, pos) = _TWISTER.unpack_from(packed, _SEED.size), _TWISTER.unpack_from(packed, at)
    at += _TWISTER.size
    python_gauss, has_python_gauss, gauss, has_gauss = _GAUSS.unpack_from(packed, at)
    return {
        "python": (3, python, python_gauss if has_python_gauss else None),
        "numpy": {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": pos},
            "has_gauss": int(has_gauss),
            "gauss": gauss,
        },
        "torch": torch.frombuffer(bytearray(packed[at + _GAUSS.size :]), dtype=torch.uint8),
        "generators": [],
    }
