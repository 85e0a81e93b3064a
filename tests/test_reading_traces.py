"""Workers of data loaders that leave traces when they read, and those that do not."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from lightning_resilience import AutoResume
from lightning_resilience._lightning import lightning_data
from lightning_resilience.checkpoint.reading_traces import ReadingTraces, outline
from lightning_resilience.run.settings import IF_CHANGED, READ_AGAIN_VARIABLE
from lightning_resilience.signals import WorkerGuard
from tests.harness import QUIET

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
TRACES: dict[str, Callable[[Any, int], Any]] = {
    "draws from Python's generator": lambda data, index: random.random(),
    "draws from NumPy's": lambda data, index: np.random.rand(),
    "draws from torch's": lambda data, index: torch.rand(1),
    "draws for one sample only": lambda data, index: random.random() if index == 13 else None,
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


def guarded(*loaders: Any) -> list[Any]:
    """Loaders as a fit has them."""
    for loader in loaders:
        if isinstance(loader, DataLoader) and loader.num_workers > 0:
            loader.worker_init_fn = WorkerGuard(loader.worker_init_fn, ())
    return list(loaders)


def read(loader: Any, batches: int = 12) -> list[Any]:
    return [batch for batch, _ in zip(loader, range(batches), strict=False)]


@pytest.mark.parametrize(
    ("reads", "none"), [*((each, True) for each in TRACELESS), *((each, False) for each in TRACES)]
)
def test_what_leaves_traces_is_known_by_the_workers(reads: str, none: bool) -> None:
    traces = ReadingTraces()
    (loader,) = guarded(DataLoader(Numbers((TRACELESS | TRACES)[reads]), 2, num_workers=2))
    traces.watch([loader])
    traces.watch([loader])
    assert not traces.are_none([loader]), "nobody has looked"
    assert [batch[0].tolist() for batch in read(loader)] == [[2 * each, 2 * each + 1] for each in range(12)]
    assert traces.are_none([loader]) == none
    traces.forget()
    assert not traces.are_none([loader])
    traces.leave()
    assert loader.collate_fn is default_collate
    assert not traces.are_none([loader])


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
    traces = ReadingTraces()
    counts, draws = guarded(
        DataLoader(Numbers(), 2, num_workers=1, collate_fn=counting.collate),
        DataLoader(Numbers(), 2, num_workers=1, worker_init_fn=counting.begin),
    )
    traces.watch([counts, draws])
    read(counts), read(draws)
    assert not traces.are_none([counts])
    assert traces.are_none([draws]), "before the first read"
    (loader,) = guarded(DataLoader(Numbers(), 2, num_workers=1))
    traces.watch([loader])
    loader.worker_init_fn = counting.begin  # by a class of the script's, in each epoch
    read(loader)
    assert not traces.are_none([loader])
    traces.leave()
    assert counts.collate_fn == counting.collate


def test_one_look_says_nothing() -> None:
    traces, loaders = ReadingTraces(), guarded(*(DataLoader(Numbers(size=size), 2, num_workers=1) for size in (2, 4)))
    traces.watch(loaders)
    for loader in loaders:
        read(loader)
    assert [traces.are_none([loader]) for loader in loaders] == [False, True]


def test_a_worker_may_be_spawned() -> None:
    traces = ReadingTraces()
    for dataset, none in ((TensorDataset(torch.arange(40)), True), (Drawing(), False)):
        loader = DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn")
        traces.watch(guarded(loader))
        read(loader)
        assert traces.are_none([loader]) == none


class Drawing(Dataset[float]):
    """Draws random numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return random.random()


class Endless(IterableDataset[int]):
    """Never ends."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), 2),
        DataLoader(Endless(), 2, num_workers=1),
        DataLoader(Numbers(), 2, num_workers=1, persistent_workers=True),
        [1, 2],
    ],
    ids=["without workers", "iterable", "persistent workers", "no data loader"],
)
def test_of_what_is_not_watched_nothing_is_known(loader: Any) -> None:
    traces, watched = ReadingTraces(), DataLoader(Numbers(), 2, num_workers=1)
    traces.watch(guarded(loader, watched))
    read(watched, 6), read(loader, 6)
    assert traces.are_none([watched])
    assert not traces.are_none([loader])
    assert not traces.are_none([watched, loader])
    assert not traces.are_none([])


def test_an_object_is_looked_at_within_bounds() -> None:
    many = [[number] for number in range(40)]
    many[0].append(1)
    assert outline([[[each] for each in range(30)] for _ in range(30)] * 3) is not None
    assert outline([[[[each], [each]] for each in range(30)] for _ in range(30)]) is None
    assert outline(each for each in range(3)) is None
    odd: list[Any] = [float("nan"), np.float64(2), torch.device("cpu"), Path, {1, 2}, frozenset([3]), b"4", 5j]
    odd.append(odd)
    assert outline(odd) == outline(odd)


def test_a_loader_is_not_kept_alive_and_may_collate_itself() -> None:
    class Collating(DataLoader[Any]):
        def __init__(self) -> None:
            super().__init__(Numbers(), 2, num_workers=1, collate_fn=self.collate)

        def collate(self, samples: Any) -> Any:
            return default_collate(samples)

    traces, loader = ReadingTraces(), Collating()
    traces.watch(guarded(loader))
    read(loader)
    assert traces.are_none([loader])
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
    traces, loader = ReadingTraces(), DataLoader(Numbers(), 2, num_workers=1)
    traces.watch(guarded(loader))
    loader.collate_fn = Counting().collate
    read(loader)
    assert not traces.are_none([loader])
    traces.leave()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_place_is_found_with_hardly_any_reading(workers: int, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def note(data: Any, index: int) -> None:
        with open(log, "a") as file:
            file.write(f"{index}\n")

    def begun() -> Any:
        torch.manual_seed(7)
        if log.exists():
            log.unlink()
        loader = DataLoader(Numbers(note), 2, shuffle=True, num_workers=workers)
        inner = iter(loader)
        outer = SimpleNamespace(iterators=[inner], _idx=0)
        return SimpleNamespace(flattened=[loader], _iterator=outer), inner

    def of(batches: list[Any]) -> list[Any]:
        return [torch.stack(each).tolist() for each in batches]

    _, inner = begun()
    wanted = of([next(inner) for _ in range(30)])
    fewest = 2 * workers
    for batches in range(31):
        combined, inner = begun()
        assert not lightning_data.skip(combined, batches, False, lambda: None)
        can = lightning_data.skip(combined, batches, True, lambda: None)
        assert can == (batches > fewest + batches % workers), batches
        if can:
            numbers = inner._send_idx, inner._rcvd_idx, inner._num_yielded, combined._iterator._idx
            assert numbers == (min(batches + fewest, 30), batches, batches, batches)
            assert of([*inner]) == wanted[batches:]
            assert len(log.read_text().splitlines()) <= 2 * (30 - batches + fewest + workers)
    combined, inner = begun()
    next(inner)
    assert not lightning_data.skip(combined, 20, True, lambda: None), "it has gone on already"


def test_data_that_have_become_shorter_are_read_again() -> None:
    """Which says what is wrong."""
    loader = DataLoader(Numbers(), 2, num_workers=1)
    combined: Any = SimpleNamespace(flattened=[loader], _iterator=SimpleNamespace(iterators=[iter(loader)], _idx=0))
    assert not lightning_data.skip(combined, 31, True, lambda: None)
    assert next(combined._iterator.iterators[0])[0].tolist() == [0, 1]


def test_what_is_not_known_is_read_again() -> None:
    loader = DataLoader(Numbers(), 2, num_workers=1, in_order=False)
    combined: Any = SimpleNamespace(flattened=[loader], _iterator=SimpleNamespace(iterators=[iter(loader)], _idx=0))
    assert not lightning_data.skip(combined, 20, True, lambda: None)
    combined.flattened.append(loader)
    assert not lightning_data.skip(combined, 20, True, lambda: None)
