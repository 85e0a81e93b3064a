"""Workers of data loaders: what they leave when they read, and how others begin where they were."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_resilience import AutoResume
from lightning_resilience._lightning import lightning_data
from lightning_resilience.fit.data_workers import DataWorkers, _Memory, same_for_all
from lightning_resilience.run.settings import IF_CHANGED, READ_AGAIN_VARIABLE
from lightning_resilience.signals import WorkerGuard
from tests.harness import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

OF_MODULE = np.random.default_rng(1)


def make_counter() -> Callable[[], None]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add


class Slots:
    """Without a dictionary."""

    __slots__ = ("__count", "unset")

    def __init__(self) -> None:
        self.__count = 0

    def add(self) -> None:
        """Counts."""
        self.__count += 1


class Named(dict[str, int]):
    """A dictionary that has an attribute."""

    count = 0


class Numbers(Dataset[tuple[int, int]]):
    """Gives the index, and the worker that has read it; what a read does beside is given."""

    of_class = random.Random(1)
    reads = 0

    def __init__(self, read: Callable[[Any, int], Any] = lambda data, index: None, size: int = 60) -> None:
        self.read, self.size = read, size
        self.count = 0
        self.file: Any = None
        self.random = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator()
        self.array = np.zeros(4)
        self.tensor = torch.zeros(4)
        self.latest = torch.zeros(1000)
        self.recent: Any = collections.deque([0] * 50, 50)
        self.paths = [f"{each}.png" for each in range(1000)]
        self.known: dict[int, int] = {}
        self.inner = SimpleNamespace(depth=SimpleNamespace(count=0), lock=threading.Lock())
        self.steps = [lambda each: each, self.twice]
        self.bytes = bytearray(4)
        self.seeds = np.random.SeedSequence(1)
        self.slots, self.named, self.add = Slots(), Named(), make_counter()
        self.legacy = np.random.RandomState(1)
        self.odd = np.array([{"count": 0}, None])

    def pick(self, index: int, known: dict[int, int] = {}) -> None:  # noqa: B006
        known[index] = index

    def from_module(self) -> float:
        return float(OF_MODULE.random())

    def twice(self, each: int) -> int:
        return 2 * each

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.read(self, index)
        info = get_worker_info()
        return index, -1 if info is None else info.id


def set_to(**values: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    return lambda data, index: vars(data).update({name: make(data) for name, make in values.items()})


def opens(data: Any, index: int) -> None:
    data.file = data.file or open(__file__)
    data.file.seek(index)


TRACELESS: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda data, index: None,
    "opens a file when it first reads": opens,
    "draws from a generator made for the sample": lambda data, index: np.random.default_rng(index).random(),
    "calculates": lambda data, index: data.tensor * index + data.array.sum(),
    "sets what it had": set_to(count=lambda data: 0),
}
DRAWS: dict[str, Callable[[Any, int], Any]] = {
    "draws from Python's generator": lambda data, index: random.random(),
    "draws from NumPy's": lambda data, index: np.random.rand(),
    "draws from torch's": lambda data, index: torch.rand(1),
    "draws for one sample only": lambda data, index: random.random() if index == 13 else None,
    "draws normal numbers": lambda data, index: (random.gauss(0, 1), np.random.randn(), torch.randn(1)),
}
TRACES: dict[str, Callable[[Any, int], Any]] = {
    "draws from a generator of Python's of its own": lambda data, index: data.random.random(),
    "draws from one of NumPy's": lambda data, index: data.numpy.random(),
    "draws from one of torch's": lambda data, index: torch.rand(1, generator=data.torch),
    "counts": set_to(count=lambda data: data.count + 1),
    "counts deep inside": lambda data, index: vars(data.inner.depth).update(count=index),
    "writes to an array": lambda data, index: data.array.__setitem__(0, index),
    "writes to a tensor": lambda data, index: data.tensor.fill_(index),
    "keeps the latest": set_to(latest=lambda data: torch.zeros(1000)),
    "keeps some": lambda data, index: data.recent.append(index),
    "draws from a generator of its class": lambda data, index: data.of_class.random(),
    "draws from one of its module": lambda data, index: data.from_module(),
    "draws from NumPy's older one": lambda data, index: data.legacy.rand(),
    "counts in its class": lambda data, index: setattr(type(data), "reads", type(data).reads + 1),
    "counts in a closure": lambda data, index: data.add(),
    "counts in slots": lambda data, index: data.slots.add(),
    "counts beside the items of a dictionary": lambda data, index: setattr(data.named, "count", index),
    "keeps something in a default": lambda data, index: data.pick(index),
    "notes it at a function": lambda data, index: setattr(data.steps[0], "index", index),
    "writes to bytes": lambda data, index: data.bytes.__setitem__(0, index),
    "writes past autograd": lambda data, index: data.tensor.data.fill_(index),
    "writes to objects in an array": lambda data, index: data.odd[0].update(count=index),
    "makes seeds": lambda data, index: data.seeds.spawn(1),
    "keeps all": lambda data, index: data.known.update({index: index}),
    "has an iterator": set_to(file=lambda data: iter([1])),
}


def nothing() -> None:
    """When a sampler has given its first batches."""


def guard(loaders: list[Any]) -> None:
    """As a fit does it."""
    for loader in loaders:
        if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, WorkerGuard):
            loader.worker_init_fn = WorkerGuard(loader.worker_init_fn, ())


def read(loader: Any, batches: int = 12) -> list[Any]:
    return [batch for batch, _ in zip(loader, range(batches), strict=False)]


@pytest.mark.slow_but_for(
    "draws from torch's-True-True",
    "draws from NumPy's-True-True",
    "counts in slots-False-False",
    "calculates-True-False",
    "opens a file when it first reads-True-False",
    "writes to a tensor-False-False",
)
@pytest.mark.parametrize(
    ("reads", "known", "drawn"),
    [
        *((each, True, False) for each in TRACELESS),
        *((each, True, True) for each in DRAWS),
        *((each, False, False) for each in TRACES),
    ],
)
def test_what_leaves_traces_is_known_by_the_workers(reads: str, known: bool, drawn: bool) -> None:
    workers = DataWorkers(guard)
    loader = DataLoader(Numbers((TRACELESS | DRAWS | TRACES)[reads]), 2, num_workers=2)
    workers.watch([loader])
    workers.watch([loader])
    assert workers.states([loader], 12) is None, "nobody has looked"
    assert [batch[0].tolist() for batch in read(loader)] == [[2 * each, 2 * each + 1] for each in range(12)]
    states = workers.states([loader], 12)
    assert (states is not None) == known
    if states is not None:
        assert states.shape == workers.no_states([loader]).shape
        assert bool(states.any()) == drawn
        assert (same_for_all(states) is None) == drawn
        for batches in (5, 19):
            assert workers.states([loader], batches) is None, "forgotten, or not yet known"
    workers.forget()
    assert workers.states([loader], 12) is None
    assert workers.states([loader], 0) is None
    workers.leave()
    assert loader.collate_fn is default_collate
    assert workers.states([loader], 12) is None
    assert len(workers.no_states([loader])) == 0


class Counting:
    """A collation, and a function for the begin of workers."""

    def __init__(self) -> None:
        self.count = 0

    def collate(self, samples: Any) -> Any:
        self.count += 1
        return default_collate(samples)

    def begin(self, worker: int) -> None:
        random.random()  # as seeds do: it is the same in each worker


def test_the_scripts_own_functions_of_a_loader_are_called() -> None:
    counting = Counting()
    workers = DataWorkers(guard)
    counts = DataLoader(Numbers(), 2, num_workers=1, collate_fn=counting.collate)
    draws = DataLoader(Numbers(), 2, num_workers=1, worker_init_fn=counting.begin)
    workers.watch([counts, draws])
    read(counts), read(draws)
    assert workers.states([counts], 12) is None
    states = workers.states([draws], 12)
    assert states is not None
    assert not states.any(), "before the first read"
    loader = DataLoader(Numbers(), 2, num_workers=1)
    workers.watch([loader])
    loader.worker_init_fn = counting.begin  # by a class of the script's, in each epoch
    read(loader)
    assert workers.states([loader], 12) is None
    workers.leave()
    assert counts.collate_fn == counting.collate


def test_one_look_says_nothing() -> None:
    workers, loaders = DataWorkers(guard), [DataLoader(Numbers(size=size), 2, num_workers=1) for size in (2, 4)]
    workers.watch([*loaders])
    for loader in loaders:
        read(loader)
    assert [workers.states([loader], count) is None for count, loader in enumerate(loaders, 1)] == [True, False]


@pytest.mark.slow
def test_a_worker_may_be_spawned() -> None:
    workers, loader = DataWorkers(guard), DataLoader(Drawing(), 2, num_workers=1, multiprocessing_context="spawn")
    workers.watch([loader])
    torch.manual_seed(1)
    wanted = read(loader, 20)
    workers.forget()
    torch.manual_seed(1)
    read(loader, 12)
    states = workers.states([loader], 12)
    assert states is not None
    assert states.any()
    workers.begin_at([loader], 12, states, nothing)
    torch.manual_seed(1)
    assert [torch.equal(*each) for each in zip(read(loader, 20), wanted[12:], strict=True)] == [True] * 8


class Drawing(Dataset[float]):
    """Draws random numbers, from each generator."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        drawn = random.gauss(0, 1) + np.random.randn() if index % 3 else 0.0  # they come in pairs
        return index + drawn + torch.randn(1).item()


class ReadsItsSeed(Drawing):
    """Makes a generator for each sample, as augmentations do."""

    def __getitem__(self, index: int) -> float:
        info: Any = get_worker_info()
        return super().__getitem__(index) + random.Random(info.seed + index).random()


class Rarely(Drawing):
    """Draws for one sample of an epoch: most workers have drawn nothing for a while."""

    def __getitem__(self, index: int) -> float:
        drawn = super().__getitem__(index) if index == 13 else 0.0
        return index + drawn


class Endless(IterableDataset[int]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), 2),
        DataLoader(Endless(), 2, num_workers=1),
        [1, 2],
    ],
    ids=["without workers", "iterable", "no data loader"],
)
def test_of_what_is_not_watched_nothing_is_known(loader: Any) -> None:
    workers, watched = DataWorkers(guard), DataLoader(Numbers(), 2, num_workers=1)
    workers.watch([loader, watched])
    read(watched, 6), read(loader, 6)
    assert workers.states([watched], 6) is not None
    assert workers.states([loader], 6) is None
    assert workers.states([watched, loader], 6) is None
    assert workers.states([], 6) is None
    assert len(workers.no_states([loader])) == 0


def test_a_loader_is_not_kept_alive_and_may_collate_itself() -> None:
    class Collating(DataLoader[Any]):
        def __init__(self) -> None:
            super().__init__(Numbers(), 2, num_workers=1, collate_fn=self.collate)

        def collate(self, samples: Any) -> Any:
            return default_collate(samples)

    workers, loader = DataWorkers(guard), Collating()
    workers.watch([loader])
    read(loader)
    states = workers.states([loader], 12)
    assert states is not None
    workers.begin_at([loader], 12, states, nothing)
    read(loader)
    kept = weakref.ref(loader)
    del loader
    gc.collect()
    assert kept() is None


class Fitted(L.LightningModule):
    """Learns nothing much."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.layer, self.loader = torch.nn.Linear(1, 1), loader
        self.in_fit: set[Any] = set()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.in_fit.add(type(self.loader.collate_fn))
        return self.layer(batch[0].float().view(-1, 1)).sum()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def test_a_loader_is_as_it_was_after_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of which the validation has guarded the workers before."""
    monkeypatch.setenv(READ_AGAIN_VARIABLE, IF_CHANGED)
    counting = Counting()
    functions = {"collate_fn": counting.collate, "worker_init_fn": counting.begin}
    loader = DataLoader(Numbers(), 20, num_workers=1, **functions)
    module = Fitted(loader)
    for fit in range(2):
        trainer = L.Trainer(
            **QUIET, max_epochs=1, default_root_dir=tmp_path, callbacks=[AutoResume(run_dir=tmp_path / f"run-{fit}")]
        )
        trainer.fit(module, loader, loader)
        assert {each.__name__ for each in module.in_fit} == {"_Watch"}
        assert {name: getattr(loader, name) for name in functions} == functions


def test_a_collation_that_is_set_later_is_not_watched() -> None:
    workers, loader = DataWorkers(guard), DataLoader(Numbers(), 2, num_workers=1)
    workers.watch([loader])
    loader.collate_fn = Counting().collate
    read(loader)
    assert workers.states([loader], 12) is None
    workers.forget()
    workers.leave()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "prefetch"), [(1, 1), (2, 2), (3, 4)])
def test_other_workers_begin_where_these_were(count: int, prefetch: int, tmp_path: Path) -> None:
    """At each place of an epoch, and again after that; nothing is read twice."""
    workers, log = DataWorkers(guard), tmp_path / "log"
    loader = DataLoader(Drawing(log), 2, shuffle=True, num_workers=count, prefetch_factor=prefetch)
    workers.watch([loader])

    def begun(batches: int = 0, states: Any = None) -> Any:
        workers.forget()
        workers.begin_at([loader], batches, states, nothing)
        torch.manual_seed(7)
        log.write_text("")
        inner: Any = iter(loader)
        outer = SimpleNamespace(iterators=[inner], _idx=0)
        combined = SimpleNamespace(flattened=[loader], _iterator=outer)
        assert lightning_data.skip(combined, batches) == (batches > 0)
        assert inner._num_yielded == outer._idx == batches
        return inner

    wanted = [batch.tolist() for batch in begun()]
    at = {}
    inner = begun()
    for batches in range(1, 21):
        next(inner)
        at[batches] = workers.states([loader], batches)
    del inner
    known = [batches for batches, states in at.items() if states is not None]
    assert known == [*range(known[0], 21)], "none is forgotten before the training is there"
    assert known[0] <= 2 * count + 1
    for batches in known:
        inner = begun(batches, at[batches])
        again = workers.states([loader], batches)
        assert again is not None, "it need not look first"
        assert torch.equal(again, at[batches])
        for number, batch in enumerate(inner, batches + 1):
            assert batch.tolist() == wanted[number - 1], (batches, number)
            again = workers.states([loader], number)
            assert again is not None
            assert torch.equal(again, at[number]), (batches, number)
        assert len(log.read_text().splitlines()) == 2 * (20 - batches)
    assert [batch.tolist() for batch in begun()] == wanted, "once"
    workers.leave()


@pytest.mark.slow
def test_other_workers_begin_at_a_place_only_if_they_are_as_good() -> None:
    def drawn_by(count: int, **options: Any) -> tuple[DataWorkers, Any, torch.Tensor]:
        workers = DataWorkers(guard)
        loader = DataLoader(Drawing(), 2, num_workers=count, **options)
        workers.watch([loader])
        read(loader)
        states = workers.states([loader], 12)
        assert states is not None
        return workers, loader, states

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    workers, loader, states = drawn_by(2)
    two = torch.zeros_like(states)
    _, _, three = drawn_by(3)
    numbered = Own(Drawing(), 2, num_workers=2)
    unordered = DataLoader(Drawing(), 2, num_workers=2, in_order=False)
    workers.watch([numbered, unordered])

    def begins_at(loaders: list[Any], batches: int, given: torch.Tensor | None) -> bool:
        workers.begin_at(loaders, batches, given, nothing)
        iterators = [iter(each) for each in loaders]
        workers.forget()
        return any(each._num_yielded == batches for each in iterators) and batches > 0

    assert begins_at([loader], 12, states)
    assert begins_at([loader], 20, states)
    assert begins_at([loader], 12, torch.zeros_like(three)), "nothing was drawn"
    assert begins_at([loader], 12, two[:, :1]), "nor by another version"
    assert not begins_at([loader], 12, three)
    assert not begins_at([loader], 12, states[:, :-8])
    assert not begins_at([loader], 12, None)
    assert not begins_at([loader], 0, states)
    assert not begins_at([loader], 21, states), "the data have become shorter: to read again says it"
    assert not begins_at([loader, numbered], 12, states)
    for each in (numbered, unordered):
        assert not begins_at([each], 12, states)
    workers.begin_at([loader], 12, states, nothing)
    workers.forget()
    assert len(read(loader, 30)) == 20, "another start has no such place"
    workers.begin_at([loader], 12, states, nothing)
    workers.leave()
    assert "_get_iterator" not in vars(loader), "the fit has failed before its data began"
    assert len(read(loader, 30)) == 20


@pytest.mark.slow_but_for("one worker-if-changed", "fewer batches than workers-always")
@pytest.mark.parametrize("is_asked", [True, False], ids=["if-changed", "always"])
@pytest.mark.parametrize(
    ("count", "prefetch", "longest", "kind"),
    [
        (1, 1, 20, Drawing),
        (3, 2, 20, Drawing),
        (3, 2, 7, Drawing),
        (3, 1, 2, Drawing),
        (3, 2, 20, Rarely),
        (3, 2, 20, ReadsItsSeed),
    ],
    ids=["one worker", "three", "epochs that are cut off", "fewer batches than workers", "rarely draw", "read a seed"],
)
def test_other_persistent_workers_begin_where_these_were(
    count: int, prefetch: int, longest: int, kind: type[Drawing], is_asked: bool, tmp_path: Path
) -> None:
    """In later epochs their random states are not those of a seed; the iterator draws none there."""
    log = tmp_path / "log"

    def made() -> tuple[DataWorkers, Any]:
        workers = DataWorkers(guard, is_asked)
        options = {"num_workers": count, "prefetch_factor": prefetch, "persistent_workers": True}
        loader: Any = DataLoader(kind(log), 2, shuffle=True, **options)
        workers.watch([loader])
        return workers, loader

    def epochs(workers: DataWorkers, loader: Any, first: int, batches: int = 0, states: Any = None) -> Any:
        """The batches of three epochs, and the states behind each."""
        for epoch in range(first, 3):
            workers.forget()
            if states is not None:
                assert workers.can_begin([loader], batches, states)
                unseed = partial(torch.manual_seed, epoch) if epoch else nothing
                workers.begin_at([loader], batches, states, nothing, unseed)
            torch.manual_seed(epoch)
            inner = iter(loader)
            combined: Any = SimpleNamespace(flattened=[loader], _iterator=SimpleNamespace(iterators=[inner], _idx=0))
            if batches and not lightning_data.skip(combined, batches):
                for _ in range(batches):
                    next(inner)
            for number, batch in zip(range(batches + 1, longest + 1), inner, strict=False):
                yield (epoch, number), batch.tolist(), workers.states([loader], number)
            batches, states = 0, None

    workers, loader = made()
    run = [*epochs(workers, loader, 0)]
    wanted = {place: batch for place, batch, _ in run}
    at = {place: states for place, _, states in run}
    workers.leave()
    assert [place for place in at if place[0] > 0 and at[place] is None] == []
    knows_first = any(states is not None for (epoch, _), states in at.items() if epoch == 0)
    assert knows_first == (is_asked and longest > count)
    for place in [(0, 5), (1, 1), (1, 6), (2, 2), (2, longest)]:
        epoch, batches = place
        if at.get(place) is None:
            continue
        workers, loader = made()
        log.write_text("")
        again = [*epochs(workers, loader, epoch, batches, at[place])]
        later = [each for each in wanted if each > place]
        assert [found for found, _, _ in again] == later
        for found, batch, states in again:
            assert batch == wanted[found], (place, found)
            assert states is not None, "it need not look first"
            if longest > count:  # else it depends on how far they have read ahead whether all have looked twice
                assert torch.equal(states, at[found]), (place, found)
        if longest == 20 and kind is Drawing:
            assert len(log.read_text().splitlines()) == 2 * (len(later) + (0 if is_asked else batches))
        workers.leave()


def test_nothing_is_known_of_persistent_workers_that_a_look_at_the_data_has_begun() -> None:
    workers = DataWorkers(guard, is_asked=False)
    loader, other = (DataLoader(Drawing(), 2, num_workers=1, persistent_workers=True) for _ in range(2))
    iter(loader)
    workers.watch([loader])
    workers.watch([other])
    assert not workers.are_kept([loader])
    assert workers.are_kept([other])
    assert not workers.are_kept([other, other]), "nor of several loaders"
    workers.leave()
    assert not workers.are_kept([other])


def test_a_persistent_worker_that_has_read_nothing_yet_has_a_state() -> None:
    """It was seeded in the first epoch, and others would be in a later one."""

    class Growing(SequentialSampler):
        length = 2

        def __iter__(self) -> Any:
            return iter(range(self.length))

        def __len__(self) -> int:
            return self.length

    def made() -> tuple[DataWorkers, Any]:
        workers, options = DataWorkers(guard, is_asked=False), {"num_workers": 2, "persistent_workers": True}
        loader: Any = DataLoader(Drawing(), 2, sampler=Growing(range(40)), **options)
        workers.watch([loader])
        return workers, loader

    workers, loader = made()
    torch.manual_seed(1)
    assert len(read(loader)) == 1
    loader.sampler.length = 12
    inner = iter(loader)
    wanted = [next(inner).tolist()]
    states = workers.states([loader], 1)
    wanted += [each.tolist() for each in inner]
    workers, loader = made()
    loader.sampler.length = 12
    torch.manual_seed(2)
    workers.begin_at([loader], 1, states, nothing)
    assert [each.tolist() for each in read(loader)] == wanted


@pytest.mark.parametrize("place", [0, 5])
def test_states_of_a_place_are_those_of_the_epoch_at_its_begin_only(place: int) -> None:
    """They were asked for before, and are not any more."""
    loader: Any = DataLoader(Drawing(), 2, num_workers=2, persistent_workers=True)

    def run(is_asked: bool, epochs: int, states: Any = None) -> Any:
        workers, found = DataWorkers(guard, is_asked), None
        workers.watch([loader])
        for epoch in range(epochs):
            workers.forget()
            if states is not None:
                workers.begin_at([loader], place, states, nothing)
            inner = iter(loader)
            for number in range(place if states is not None else 0, 12):
                if epoch == epochs - 1 and states is None and number == place:
                    found = workers.states([loader], place)
                next(inner)
        found = workers.states([loader], 12) if states is not None else found
        loader._iterator = None
        workers.leave()
        return found

    asked = run(True, 3)
    assert not asked[:, -1].any()
    later = run(False, 1, asked)
    assert bool(later[:, -1].any()) == (place == 0)
    assert torch.equal(later[:, :-1], asked[:, :-1]) == (place == 0)


def test_states_of_persistent_workers_whose_dataset_remembers_are_those_of_the_epoch() -> None:
    """They read again, where others would begin at the place."""
    loader: Any = DataLoader(Numbers(TRACES["counts"]), 2, num_workers=2, persistent_workers=True)
    workers = DataWorkers(guard)
    workers.watch([loader])
    for epoch in range(2):
        workers.forget()
        read(loader)
        states = workers.states([loader], 12)
        assert (states is None) == (epoch == 0)
    assert states is not None
    assert states[:, -1].all()
    resumed = _Memory(2, 2, True, 0, states)
    assert resumed.at_epoch is not None
    assert resumed.states(0) is None, "nobody has looked at the dataset"


def test_a_generator_of_another_kind_is_read_again() -> None:
    workers = DataWorkers(guard)

    def replace(worker: int) -> None:
        np.random.set_bit_generator(np.random.PCG64(1))

    for persist in (False, True):
        loader = DataLoader(Numbers(), 2, num_workers=1, worker_init_fn=replace, persistent_workers=persist)
        workers.watch([loader])
        for _ in range(2):
            workers.forget()
            read(loader)
            assert workers.states([loader], 12) is None


def test_a_sampler_that_is_shorter_than_it_says() -> None:
    class Short(SequentialSampler):
        def __iter__(self) -> Any:
            return iter(range(6))

    loader = DataLoader(Numbers(), 2, num_workers=1, sampler=Short(range(60)))
    assert [*lightning_data.BegunLater(loader, 12, nothing)] == []


def test_only_the_iterator_of_the_fit_is_watched() -> None:
    """Not that of a validation with the same loader, nor a look at the data."""
    workers, loader = DataWorkers(guard), DataLoader(Drawing(), 2, num_workers=2)
    torch.manual_seed(3)
    wanted = [batch.tolist() for batch in read(loader)]
    workers.watch([loader])
    torch.manual_seed(2)
    inner = iter(loader)
    for _ in range(12):
        next(inner)
    states = workers.states([loader], 12)
    assert states is not None
    torch.manual_seed(3)
    assert [batch.tolist() for batch in read(loader)] == wanted
    again = workers.states([loader], 12)
    assert again is not None
    assert torch.equal(again, states)


@pytest.mark.parametrize("batches", [3, 12])
def test_a_sampler_may_draw_while_it_gives(batches: int) -> None:
    """First as the epoch begins, and then as the training goes on."""

    class Lazy(SequentialSampler):
        def __iter__(self) -> Any:
            return (random.randrange(60) for _ in range(60))

    workers, loader = DataWorkers(guard), DataLoader(Numbers(), 2, num_workers=2, sampler=Lazy(range(60)))
    workers.watch([loader])

    def begun(at: int = 0) -> Any:
        random.seed(1)
        if at:
            workers.begin_at([loader], at, workers.no_states([loader]), lambda: random.seed(2))
            return iter(loader)
        inner = iter(loader)
        random.seed(2)
        return inner

    wanted = [batch[0].tolist() for batch in begun()]
    workers.forget()
    inner = begun(batches)
    assert [batch[0].tolist() for batch in inner] == wanted[batches:]


def test_attributes_of_a_collation_are_there() -> None:
    class Padding:
        pad = 7

        def __call__(self, samples: Any) -> Any:
            return default_collate(samples)

    workers, loader = DataWorkers(guard), DataLoader(Numbers(), 2, num_workers=1, collate_fn=Padding())
    workers.watch([loader])
    assert loader.collate_fn.pad == 7
    assert copy.copy(loader.collate_fn).pad == 7
    assert not hasattr(loader.collate_fn, "length")


def test_only_the_place_of_one_loader_is_found() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), 2)
    combined: Any = SimpleNamespace(flattened=[loader], _iterator=SimpleNamespace(iterators=[iter(loader)], _idx=0))
    assert not lightning_data.skip(combined, 21), "the data have become shorter"
    combined.flattened.append(loader)
    assert not lightning_data.skip(combined, 12)
    combined.flattened.pop()
    assert lightning_data.skip(combined, 12)
    assert next(combined._iterator.iterators[0])[0].tolist() == [24, 25]
