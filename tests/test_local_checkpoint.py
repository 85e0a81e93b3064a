"""``LocalCheckpoint`` as a whole: killed, damaged, full, slow, condemned; the run ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import logging
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import PrefixStore, TCPStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint, Preemption, _processes, signals
from lightning_resilience._lightning import lightning_checkpoints
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint import capacity, checkpoint_file, resume, shard
from lightning_resilience.checkpoint import local as local_saves
from lightning_resilience.checkpoint import node_store as node_store
from lightning_resilience.checkpoint.at_hand import AtHand
from lightning_resilience.checkpoint.generations import RankLocation, Transfer, rank_locations
from lightning_resilience.checkpoint.local import LocalSaves, Peers, SaveHooks
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.recovery import LocalTier
from lightning_resilience.checkpoint.safe_serialization import nested
from lightning_resilience.checkpoint.save_coordinator import SaveCoordinator
from lightning_resilience.checkpoint.schedule import Schedule
from lightning_resilience.checkpoint.snapshot import Snapshot, optimizer_tensors, wait_with_heartbeat
from lightning_resilience.fit import context
from lightning_resilience.fit import local_saves as policies
from lightning_resilience.fit.checkpoint_selector import MAX_MARKED_BAD, BadCheckpoint
from lightning_resilience.fit.joining import session_of
from lightning_resilience.fit.local_saves import LocalSavePolicy, _unrecorded_s
from lightning_resilience.fit.session import FitSession
from lightning_resilience.fit.stop_on_signal import StopOnSignal
from lightning_resilience.run.run_directory import LOCAL_DIR_VARIABLE, Outcome, RunDirectory, StaleAttempt
from tests.harness import result, run, samples
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed

LOCAL = "local_checkpoint"
SHM = Path("/dev/shm")


# What the tests look at


def ledger(run_dir: Path | str, event: str) -> list[dict[str, Any]]:
    return [each for each in read_ledger(RunDirectory(run_dir).ledger) if each["event"] == event]


def resumes(run_dir: Path | str) -> list[tuple[str, int]]:
    """From what the attempts have resumed: tier and step."""
    return [(each["tier"], each["step"]) for each in ledger(run_dir, "resumed")]


def parts_in(folder: Path) -> list[Path]:
    """All published parts, the newest generation last."""
    return sorted(path for path in folder.rglob("step-*/*") if path.parent.parent.name.startswith("fit-"))


def steps_in(folder: Path) -> list[int]:
    return sorted({int(path.parent.name.split("-")[1]) for path in parts_in(folder)})


def part_of(folder: Path, step: int, part: str = "rank-00000") -> Path:
    (found,) = [path for path in parts_in(folder) if path.stem == part and f"step-{step:012d}-" in str(path)]
    return found


def reseal(
    path: Path, to: Path | None = None, change: Callable[[list[torch.Tensor]], None] = lambda _: None, **identity: Any
) -> None:
    """Writes a part anew, intact in itself, with other tensors or as that of somebody else."""
    header, tensors = shard.load(path)
    change(tensors)
    specs, size = shard.arrange(tensors)
    memory = torch.zeros(size, dtype=torch.uint8)
    for spec, tensor in zip(specs, tensors, strict=True):
        shard.view(memory, spec).copy_(tensor)
    about = shard.Identity(**{**vars(header.identity), **identity})
    trailer = shard.seal(memory, specs, about, header.structure, size)
    (to or path).write_bytes(memory.numpy().tobytes() + trailer)


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.detach().contiguous().numpy().tobytes() == other.detach().contiguous().numpy().tobytes()
        )
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# What can happen to a file


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[66] ^= 4  # in the first tensor
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def plant_pickle(path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (path.parents[3] / "exploded",)

    path.write_bytes(pickle.dumps(Bomb()))


# Real processes, really killed


def options_of(tmp: Path, callbacks: Sequence[str] = (LOCAL,), every: int = 5, **options: Any) -> dict[str, Any]:
    return {
        "callbacks": [*callbacks],
        "local": {"dir": str(tmp / "local"), "every_n_train_steps": every, **options.pop("local", {})},
        "step_s": 0.03,
        **options,
    }


def reference(tmp: Path, **options: Any) -> tuple[Any, Any]:
    """The run that nothing happens to, and without what could disturb it."""
    return undisturbed(tmp, **{"callbacks": [], **options})


def killed(tmp: Path, at: int, rank: int = 0, **options: Any) -> dict[str, Any]:
    """A run that was killed, with all its ranks."""
    event = {"at": "train", "step": at, "rank": rank, "do": "SIGKILL", "once": True}
    config = make(tmp, "disturbed", events=[event], **options)
    codes, text = run(config, tmp / "disturbed")
    assert -signal.SIGKILL in codes, text
    return config


def resumed(config: dict[str, Any], tmp: Path) -> str:
    """Goes on to the end; returns what was printed since."""
    before = len((tmp / "disturbed" / "output").read_text())
    codes, text = run(config, tmp / "disturbed")
    assert set(codes) == {0}, text
    return text[before:]


EXACT: dict[str, dict[str, Any]] = {
    "accumulation": {"trainer": {"accumulate_grad_batches": 3, "max_epochs": 4}, "local": {"every_n_train_steps": 2}},
    "validation in the epoch": {"validation": True, "plateau": True, "trainer": {"val_check_interval": 4}},
    "workers": {"workers": 2},
    "workers that persist": {"workers": 2, "persistent": True},
    "manual optimization": {"manual": True},
    "a stream": {"data": "iterable", "workers": 2},
    "loaders that save their place": {"data": "stateful", "augment": False, "workers": 2},
    "two ranks with validation": {"validation": True, "workers": 2, "trainer": {"devices": 2, "val_check_interval": 4}},
    "two ranks with accumulation": {"trainer": {"devices": 2, "accumulate_grad_batches": 2, "max_epochs": 4}},
    "four ranks": {"trainer": {"devices": 4}},
}


def exactly(tmp: Path, at: int, rank: int = 0, **options: Any) -> tuple[dict[str, Any], str]:
    """Killed and resumed from the local tier, it ends as if undisturbed."""
    plain = {key: value for key, value in options.items() if key not in ("local", "callbacks")}
    config = killed(tmp, at, rank, **options_of(tmp, **options))
    text = resumed(config, tmp)
    ((tier, step),) = resumes(config["run_dir"])
    assert tier == "local"
    assert 0 < step <= at
    assert (result(config), samples(config)) == reference(tmp, **plain)
    return config, text


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
def test_killed_with_workers_and_in_the_middle_of_epochs_with_validation(tmp_path: Path) -> None:
    options = {"validation": True, "workers": 2, "trainer": {"val_check_interval": 4, "max_epochs": 2}}
    _, text = exactly(tmp_path, 27, **options)
    assert text.count("one node, so no copies on other nodes") == 1


@pytest.mark.also_as_on_gpu
@pytest.mark.slow_but_for("as on a GPU")
def test_killed_with_two_ranks(tmp_path: Path) -> None:
    exactly(tmp_path, 27, 1, trainer={"devices": 2, "max_epochs": 2})
    names = Counter(path.stem for path in parts_in(tmp_path / "local"))
    assert names == dict.fromkeys(["rank-00000", "rank-00001", "common-00-of-02", "common-01-of-02"], 2)


@pytest.mark.also_as_on_gpu
@pytest.mark.slow
def test_killed_with_sharded_state(tmp_path: Path) -> None:
    exactly(tmp_path, 27, 0, sharded=True, trainer={"devices": 2, "max_epochs": 2})
    names = Counter(path.stem for path in parts_in(tmp_path / "local"))
    assert names == dict.fromkeys(["rank-00000", "rank-00001"], 2), "nothing is gathered, nothing twice"


@pytest.mark.campaign
@pytest.mark.parametrize("callbacks", [[LOCAL], ["preemption", "auto_resume", LOCAL, "fault_tolerance"]], ids=len)
@pytest.mark.parametrize("name", EXACT)
def test_killed_and_resumed_exactly(tmp_path: Path, name: str, callbacks: list[str]) -> None:
    options = {"save_every": None, **copy.deepcopy(EXACT[name])}
    exactly(tmp_path, 17, 0, callbacks=callbacks, **options)


TWO_NODES = {"devices": 2, "num_nodes": 2, "max_epochs": 2}


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
def test_a_lost_node(tmp_path: Path) -> None:
    config = killed(tmp_path, 27, 3, **options_of(tmp_path, trainer=TWO_NODES))
    first, second = sorted((tmp_path / "local" / f"local_ckpt-{os.getuid()}").iterdir())
    parts = Counter(int(path.parent.name.split("-")[1]) for path in parts_in(first))
    step = max(step for step, count in parts.items() if count == 4 + 2)  # death came in the middle of a save perhaps
    there = {path.stem: path.read_bytes() for path in parts_in(first) if f"step-{step:012d}" in str(path)}
    shutil.rmtree(second)
    # Stopped right at the resume, so that the parts which were written back are still there.
    again = {**config, "events": [{"at": "batch_end", "step": step + 1, "rank": 0, "do": "SIGKILL", "once": True}]}
    codes, text = run(again, tmp_path / "disturbed")
    assert -signal.SIGKILL in codes, text
    assert resumes(config["run_dir"]) == [("replica", step)]
    back = {path.stem: path.read_bytes() for path in parts_in(second)}
    assert set(back) == {"rank-00002", "rank-00003", "common-00-of-02", "common-01-of-02"}
    assert all(there[part] == content for part, content in back.items())
    resumed(config, tmp_path)
    assert resumes(config["run_dir"]) == [("replica", step), ("local", step)]
    assert (result(config), samples(config)) == reference(tmp_path, trainer=TWO_NODES)


BOTH = ["auto_resume", LOCAL]


def nodes_of(tmp: Path) -> list[Path]:
    return sorted((tmp / "local" / f"local_ckpt-{os.getuid()}").iterdir())


@pytest.mark.campaign
def test_a_part_and_its_replica_are_lost(tmp_path: Path) -> None:
    config = killed(tmp_path, 27, 3, **options_of(tmp_path, trainer=TWO_NODES))
    older, newest = sorted(set.intersection(*(set(steps_in(node)) for node in nodes_of(tmp_path))))
    for node in nodes_of(tmp_path):
        part_of(node, newest, "rank-00002").unlink()
    text = resumed(config, tmp_path)
    assert resumes(config["run_dir"]) == [("local", older)]
    assert "incomplete: no node has rank-00002" in text
    assert (result(config), samples(config)) == reference(tmp_path, trainer=TWO_NODES)


@pytest.mark.campaign
@pytest.mark.parametrize("callbacks", [BOTH, [LOCAL]], ids=len)
def test_all_nodes_are_lost(tmp_path: Path, callbacks: list[str]) -> None:
    options = options_of(tmp_path, callbacks, trainer=TWO_NODES, save_every=9)
    config = killed(tmp_path, 27, 1, **options)
    shutil.rmtree(tmp_path / "local")
    resumed(config, tmp_path)
    assert resumes(config["run_dir"]) == ([("global", 27)] if len(callbacks) == 2 else [])
    assert (result(config), samples(config)) == reference(tmp_path, trainer=TWO_NODES)


@pytest.mark.campaign
@pytest.mark.parametrize("harm", [flip, truncate, plant_pickle, Path.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("part", ["rank-00001", "common-00-of-02"])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_one_of_two_ranks_is_harmed(tmp_path: Path, part: str, harm: Callable[[Path], None], sharded: bool) -> None:
    if sharded and part.startswith("common"):
        pytest.skip("there are none")
    options = {"trainer": {"devices": 2, "max_epochs": 2}, "sharded": sharded}
    config = killed(tmp_path, 27, 1, **options_of(tmp_path, **options))
    folder, count = tmp_path / "local", 2 if sharded else 4
    there = Counter(int(path.parent.name.split("-")[1]) for path in parts_in(folder))
    older, newest = sorted(step for step in there if there[step] == count)[-2:]
    harm(part_of(folder, newest, part))
    resumed(config, tmp_path)
    assert resumes(config["run_dir"]) == [("local", older)]
    assert (result(config), samples(config)) == reference(tmp_path, **options)
    if harm is not Path.unlink:
        assert any(part in path.name for path in folder.rglob("quarantine/*.reason.txt"))


@pytest.mark.campaign
def test_another_mesh(tmp_path: Path) -> None:
    options = {"sharded": True, "trainer": {"devices": 2, "max_epochs": 2}}
    config = killed(tmp_path, 27, **options_of(tmp_path, BOTH, save_every=20, **options))
    text = resumed({**config, "data_parallel": 1}, tmp_path)
    assert resumes(config["run_dir"]) == [("global", 20)]
    (line,) = [line for line in text.splitlines() if "Local checkpoints that are not used" in line]
    assert "saved by another strategy (sharded by ModelParallelStrategy in groups of 2, not" in line


@pytest.mark.slow_but_for("ranks")
@pytest.mark.parametrize("flag", ["ranks", "strategy"])
def test_a_start_with_a_wrong_flag_removes_nothing(tmp_path: Path, flag: str) -> None:
    """All that there is so far is local."""
    two: dict[str, Any] = {"trainer": {"devices": 2, "max_epochs": 2}, "manual": True, "save_every": 1000}
    right = {**two, "sharded": flag == "strategy"}
    config = killed(tmp_path, 27, **options_of(tmp_path, BOTH, **right))
    before = parts_in(tmp_path / "local")
    wrong = {"sharded": False} if flag == "strategy" else {"trainer": {**two["trainer"], "devices": 1}}
    codes, text = run({**config, **wrong}, tmp_path / "disturbed")
    assert 0 not in codes, text
    assert "The only checkpoints of" in text
    assert "was saved by" in text
    assert parts_in(tmp_path / "local") == before
    resumed(config, tmp_path)
    assert [tier for tier, _ in resumes(config["run_dir"])] == ["local"]


# One process, without killing it: what an exception leaves behind is the same, and quicker to have


class Died(Exception):
    """Stands for whatever ends a process."""


class Net(L.LightningModule):
    """Trained on random data in random order with dropout; notes what it has seen, and does things at some steps."""

    def __init__(self, at: Mapping[int, Callable[[L.Trainer], None]]) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.at = at
        self.seen: dict[int, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
        self.seen[batches] = batch[0][:, 0].tolist()
        if batches in self.at:
            self.at[batches](self.trainer)
        return self.layers(batch[0]).pow(2).mean()

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(2)))
        return DataLoader(data, 4, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def die(trainer: L.Trainer) -> None:
    raise Died("on purpose")


class Waits(L.Callback):
    """Waits after every batch for the local save in progress, so that it is known which ones there are."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        for saves in saves_of(trainer):
            with saves._changed:
                assert saves._changed.wait_for(lambda saves=saves: not saves._busy, 60)


def local_of(trainer: L.Trainer) -> list[Any]:
    return [each._participant for each in trainer.callbacks if isinstance(each, LocalCheckpoint) and each._participant]


def saves_of(trainer: L.Trainer) -> list[LocalSaves]:
    return [local._saves for local in local_of(trainer) if local._saves is not None]


class Run:
    """A run that begins anew, as in a new process, with every :meth:`fit`."""

    def __init__(self, tmp: Path, name: str = "run", seed: int = 1) -> None:
        self.path = tmp / name
        self.folder = tmp / "local"
        self.seed = seed
        self.seen: dict[int, list[float]] = {}
        self.trainer: L.Trainer

    def local(self, **options: Any) -> LocalCheckpoint:
        return LocalCheckpoint(
            **{
                "dir": self.folder,
                "run_dir": self.path,
                **({} if "train_time_interval" in options else {"every_n_train_steps": 3}),
                **options,
            }
        )

    def resume(self, every: int | None = None, **options: Any) -> AutoResume:
        return AutoResume(self.path, every_n_train_steps=every, **{"async_save": False, **options})

    def fit(
        self, *callbacks: L.Callback, at: Mapping[int, Callable[[L.Trainer], None]] | None = None, **options: Any
    ) -> bytes:
        """Trains; returns the weights and what else the module has, as bytes."""
        context.fits_begun.clear()
        return self.next_fit(*callbacks, at=at, **options)

    def next_fit(
        self,
        *callbacks: L.Callback,
        at: Mapping[int, Callable[[L.Trainer], None]] | None = None,
        ckpt_path: Path | None = None,
        **options: Any,
    ) -> bytes:
        torch.manual_seed(self.seed)
        module = Net(at or {})
        self.trainer = L.Trainer(
            **{
                "max_epochs": 2,
                "accelerator": "cpu",
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": str(self.path.parent),
                **options,
            },
            callbacks=[*callbacks, Waits()],
        )
        try:
            self.trainer.fit(module, ckpt_path=ckpt_path)
        finally:
            self.seen.update(module.seen)
        return b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())

    def die(self, *callbacks: L.Callback, step: int, **options: Any) -> None:
        with pytest.raises(Died):
            self.fit(*callbacks, at={**options.pop("at", {}), step: die}, **options)

    @property
    def resumes(self) -> list[tuple[str, int]]:
        return resumes(self.path)

    @property
    def outcome(self) -> Outcome:
        found = RunDirectory(self.path).fit(0).outcome
        assert found is not None
        return found


_oracles: dict[str, tuple[bytes, dict[int, list[float]]]] = {}


def oracle(tmp: Path, seed: int = 1, **options: Any) -> tuple[bytes, dict[int, list[float]]]:
    key = repr((seed, sorted(options.items())))
    if key not in _oracles:
        run = Run(tmp, "oracle", seed)
        _oracles[key] = run.fit(**options), run.seen
    return _oracles[key]


def ends_well(
    run: Run, *callbacks: L.Callback, at: Mapping[int, Callable[[L.Trainer], None]] | None = None, **options: Any
) -> None:
    """Goes on to the end, which is that of a run which nothing has happened to."""
    weights = run.fit(*callbacks, at=at, **options)
    assert (weights, run.seen) == oracle(run.path.parent, run.seed, **options)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Run]:
    """A run whose local states are in node memory."""
    if not (SHM.is_dir() and capacity.in_node_memory(SHM)):
        pytest.skip("needs /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHM))
    found = Run(tmp_path)
    found.folder = folder / "local"
    yield found
    shutil.rmtree(folder)


@pytest.mark.slow_but_for("11-4-expected1")
@pytest.mark.parametrize(
    ("step", "every", "expected"), [(8, 4, ("global", 8)), (11, 4, ("local", 9)), (14, 6, ("local", 12))]
)
def test_the_newest_of_both_tiers(tmp_path: Path, step: int, every: int, expected: tuple[str, int]) -> None:
    run = Run(tmp_path)
    run.die(run.resume(every), run.local(), step=step)
    assert steps_in(run.folder)[-1] == 3 * (step // 3)
    ends_well(run, run.resume(every), run.local())
    assert run.resumes == [expected]


def test_without_any_global_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.die(run.local(), step=14)
    assert not resume.checkpoints(RunDirectory(run.path).fit(0).checkpoints)
    ends_well(run, run.local())
    assert run.resumes == [("local", 12)]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"max_steps": 20, "max_epochs": -1}], ids=str)
def test_what_the_trainer_does_beside(memory: Run, options: dict[str, Any]) -> None:
    memory.die(memory.local(every_n_train_steps=2), step=14, **options)
    ends_well(memory, memory.local(every_n_train_steps=2), **options)
    assert memory.resumes == [("local", 4 if "accumulate_grad_batches" in options else 14)]


# What has happened to the files meanwhile


def swap_with_older(path: Path) -> None:
    older = parts_in(path.parents[2])[0]
    assert older != path
    here, there = path.read_bytes(), older.read_bytes()
    path.write_bytes(there)
    older.write_bytes(here)


def replace_by_older(path: Path) -> None:
    path.write_bytes(parts_in(path.parents[2])[0].read_bytes())


def replace_by(kind: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        path.unlink()
        kind(path)

    return harm


def of_another(**identity: Any) -> Callable[[Path], None]:
    return lambda path: reseal(path, **identity)


HARMS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    # what happens to the newest of the steps 6, 9 and 12, from which step the run goes on then, and why
    "a flipped bit": (flip, 9, "damaged"),
    "truncated": (truncate, 9, "truncated"),
    "empty": (lambda path: path.write_bytes(b""), 9, "empty"),
    "a pickle": (plant_pickle, 9, "not a shard"),
    "swapped with the oldest": (swap_with_older, 9, "step is 6, not 12"),
    "an older one": (replace_by_older, 9, "step is 6, not 12"),
    "of another rank": (of_another(part="rank-00001"), 9, "part is 'rank-00001'"),
    "of another run": (of_another(run="0123456789abcdef"), 9, "run is '0123456789abcdef'"),
    "of another fit": (of_another(fit=1), 9, "fit is 1"),
    "another generation": (of_another(generation="00000000"), 9, "generation is '00000000'"),
    "another world size": (of_another(world_size=2), 9, ""),
    "another strategy": (of_another(layout={"kind": "sharded by hand", "commons": 0}), 9, ""),
    "no layout": (of_another(layout={}), 9, ""),
    "a fifo": (replace_by(os.mkfifo), 9, ""),
    "a folder": (replace_by(Path.mkdir), 9, ""),
    "a link to nowhere": (replace_by(lambda path: path.symlink_to("nowhere")), 9, ""),
    "a link to the older": (replace_by(lambda path: path.symlink_to(parts_in(path.parents[2])[0])), 9, ""),
    "gone": (Path.unlink, 9, ""),
}


def harmed(run: Run, harm: Callable[[Path], None], expected: int, reason: str) -> None:
    run.die(run.local(keep=3), step=14)
    assert steps_in(run.folder) == [6, 9, 12]
    newest = part_of(run.folder, 12)
    harm(newest)
    weights = run.fit(run.local(keep=3))
    assert run.resumes == [("local", expected)]
    assert (weights, run.seen) == oracle(run.path.parent)
    assert not list(run.folder.rglob("exploded"))
    if reason:
        reasons = [each["reason"] for each in ledger(run.path, "quarantined")]
        assert any(reason in each for each in reasons), reasons
        quarantined = list(run.folder.rglob("quarantine/*.reason.txt"))
        assert len(quarantined) == len(reasons)
        assert any(reason in path.read_text() for path in quarantined)
    else:
        assert not ledger(run.path, "quarantined")


@pytest.mark.slow_but_for("a flipped bit", "another world size", "gone")
@pytest.mark.parametrize("name", HARMS)
def test_what_has_been_harmed_is_not_resumed_from(memory: Run, name: str) -> None:
    harmed(memory, *HARMS[name])


def test_the_tests_depend_on_the_verification(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_compare", lambda *_: None)
    with pytest.raises(AssertionError):
        harmed(memory, *HARMS["a flipped bit"])


def test_a_bad_shard_that_cannot_be_moved_is_passed_over(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: NodeStore, path: Path, reason: str) -> None:
        raise OSError(errno.EROFS, "read-only", os.fspath(path))

    memory.die(memory.local(keep=3), step=14)
    flip(part_of(memory.folder, 12))
    monkeypatch.setattr(NodeStore, "quarantine", refuse)
    ends_well(memory, memory.local(keep=3))
    assert memory.resumes == [("local", 9)]


def test_when_everything_local_is_bad(memory: Run) -> None:
    memory.die(memory.resume(4), memory.local(), step=14)
    for path in parts_in(memory.folder):
        flip(path)
    ends_well(memory, memory.resume(4), memory.local())
    assert memory.resumes == [("global", 12)]
    assert len(ledger(memory.path, "quarantined")) == 1, "what is older than the global one is not looked at"


@pytest.mark.slow_but_for("gone")
@pytest.mark.parametrize("how", ["bad", "gone"])
def test_when_nothing_is_left(memory: Run, how: str, caplog: pytest.LogCaptureFixture) -> None:
    memory.die(memory.local(), step=14)
    if how == "gone":
        shutil.rmtree(memory.folder)
    for path in parts_in(memory.folder):
        path.write_bytes(b"")
    ends_well(memory, memory.local())
    assert memory.resumes == []
    assert len(ledger(memory.path, "fresh")) == 2
    assert "this fit starts from the beginning" in caplog.text


# What goes wrong while it saves


class Storage:
    """Has calls of the node store fail, or wait, from some step on until another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: BaseException | None = None
        self.failed = 0
        self._allocate, self._publish = os.posix_fallocate, os.ftruncate
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)
        monkeypatch.setattr(os, "ftruncate", self.truncate)

    def allocate(self, *args: Any) -> None:
        self._fail()
        self._allocate(*args)

    def truncate(self, *args: Any) -> None:
        self._fail()
        self._publish(*args)

    def _fail(self) -> None:
        if self.error is not None and threading.current_thread().name == "local-checkpoint":
            self.failed += 1
            raise self.error

    def fails_with(self, error: BaseException | None) -> Callable[[L.Trainer], None]:
        return lambda trainer: setattr(self, "error", error)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_storage_ends_no_training(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    storage, seen = Storage(monkeypatch), []
    at = {
        7: storage.fails_with(OSError(code, os.strerror(code))),
        20: lambda trainer: seen.append(steps_in(memory.folder)),
        22: storage.fails_with(None),
        29: lambda trainer: seen.append(steps_in(memory.folder)),
    }
    ends_well(memory, memory.local(), at=at)
    assert storage.failed > 2
    assert seen == [[3, 6], [24, 27]]
    (error,) = errors_in(caplog)
    assert os.strerror(code) in error
    assert "Training continues" in error


def test_a_storage_that_is_full_again_is_reported_again(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage, full = Storage(monkeypatch), OSError(errno.ENOSPC, "No space left on device")
    at = {step: storage.fails_with(full if step in (5, 17) else None) for step in (5, 11, 17, 23)}
    ends_well(memory, memory.local(), at=at)
    assert len(errors_in(caplog)) == 2


def test_what_was_published_before_the_storage_was_full_is_resumed_from(
    memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(monkeypatch)
    memory.die(memory.local(), step=20, at={7: storage.fails_with(OSError(errno.ENOSPC, "full"))})
    storage.error = None
    ends_well(memory, memory.local())
    assert memory.resumes == [("local", 6)]


def broken(*_: object) -> Any:
    raise RuntimeError("the writer is broken")


def test_a_save_that_fails_unexpectedly_ends_no_training(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends_well(memory, memory.local(), at={4: lambda trainer: monkeypatch.setattr(shard, "seal", broken)})
    (error,) = errors_in(caplog)
    assert "step 6 could not be saved (the writer is broken). Training continues" in error
    assert steps_in(memory.folder) == [3]


def test_a_state_that_cannot_be_taken_ends_no_training(memory: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Saves(L.Callback):
        def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 6:
                raise ValueError("not now")

    seen: list[list[int]] = []
    ends_well(memory, memory.local(), Saves(), at={13: lambda trainer: seen.append(steps_in(memory.folder))})
    assert seen == [[9, 12]]
    (error,) = errors_in(caplog)
    assert "step 6 could not be saved (not now)" in error


def test_a_thread_that_dies_ends_the_training_at_the_next_boundary(
    memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="the writer is broken"):
        memory.fit(memory.local(), at={4: lambda trainer: monkeypatch.setattr(NodeStore, "retire", broken)})
    assert memory.trainer.global_step == 7
    assert memory.outcome.status == "failed"
    assert "the writer is broken" in memory.outcome.reason
    monkeypatch.undo()
    ends_well(memory, memory.local())
    assert memory.resumes == [("local", 6)]


def test_a_thread_that_dies_after_the_last_boundary_is_reported(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = {8: lambda trainer: monkeypatch.setattr(NodeStore, "retire", broken)}
    ends_well(memory, memory.local(), at=at, max_epochs=-1, max_steps=10)
    assert memory.outcome.status == "finished"
    (error,) = errors_in(caplog)
    assert "the writer is broken" in error


@pytest.mark.parametrize("step", [5, 6])
def test_a_process_of_an_older_attempt_ends_when_it_would_publish(memory: Run, step: int) -> None:
    with pytest.raises(StaleAttempt):
        memory.fit(memory.local(), at={step: lambda trainer: RunDirectory(memory.path).claim()})
    assert memory.trainer.global_step == 7
    assert steps_in(memory.folder) == [3]


def test_a_process_of_an_older_attempt_removes_nothing(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = LocalSavePolicy._completed

    def taken_over(self: Any, step: int, generation: str) -> None:
        completed(self, step, generation)
        if step == 9:
            RunDirectory(memory.path).claim()

    monkeypatch.setattr(LocalSavePolicy, "_completed", taken_over)
    with pytest.raises(StaleAttempt):
        memory.fit(memory.local())
    assert memory.trainer.global_step == 10
    assert steps_in(memory.folder) == [3, 6, 9]


def test_a_writer_goes_on_that_removes_nothing_since_another_generation_has_begun(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It still saves for that one; the training hears of it by itself."""

    def retire(*arguments: Any) -> None:
        raise PeerLost("the ranks of this run have changed")

    monkeypatch.setattr(NodeStore, "retire", retire)
    ends_well(memory, memory.local(), max_epochs=-1, max_steps=10)
    assert steps_in(memory.folder) == [3, 6, 9]
    assert errors_in(caplog) == []


class Gate:
    """Holds the writer after it has copied, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        seal = shard.seal

        def wait(*args: Any) -> bytes:
            assert self.is_open.wait(60)
            return seal(*args)

        monkeypatch.setattr(shard, "seal", wait)


def test_a_slow_writer_skips_saves_and_holds_nothing_up(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "on_train_batch_end", lambda *_: None)
    gate, most, figures = Gate(monkeypatch), [], []

    def look(trainer: L.Trainer) -> None:
        (local,) = local_of(trainer)
        with local.store._lock:  # nothing is renamed meanwhile
            files = [path for path in local.store.directory.rglob("*rank-*") if path.is_file()]
            most.append((len(files), len(local.store._mapped)))
        figures.append(copy.copy(local._saves.stats))
        gate.is_open.clear() if len(most) % 8 < 7 else gate.is_open.set()

    ends_well(memory, memory.local(every_n_train_steps=1), at=dict.fromkeys(range(1, 32), look))
    assert max(files for files, _ in most) <= 3, "two that are kept and one that is being written"
    assert max(maps for _, maps in most) <= 3
    assert figures[-1].skipped >= 18
    assert 3 <= figures[-1].published + figures[-1].skipped <= 31


def test_the_time_for_which_the_training_waits_is_counted(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, figures = Snapshot.copy, []

    def slowly(*args: Any) -> None:
        time.sleep(0.8)  # longer than a busy machine takes for a batch
        copies(*args)

    monkeypatch.setattr(Snapshot, "copy", slowly)
    memory.fit(memory.local(), at={5: lambda trainer: figures.append(saves_of(trainer)[0].stats)}, max_steps=6)
    assert figures[0].stall_s > 0.15


# What it refuses, and what it says


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_train_steps": 5, "train_time_interval": 5}, "mutually exclusive"),
        ({"every_n_train_steps": 0}, "every_n_train_steps must be at least 1, not 0"),
        ({"train_time_interval": 0}, "train_time_interval must be positive"),
        ({"train_time_interval": timedelta(seconds=-1)}, "train_time_interval must be positive, not -1 s"),
        ({"keep": 1}, "keep must be at least 2, not 1"),
        ({"replication": "yes"}, "replication must be True, False or 'auto', not 'yes'"),
        ({"replication_factor": 1}, "replication_factor must be at least 2"),
        ({"replication_jump": 0}, "replication_jump must be at least 1, not 0"),
        ({"probation_steps": -1}, "probation_steps must not be negative, not -1"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LocalCheckpoint(**arguments)


def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = capacity.Room(1000, "somebody's limit")
    monkeypatch.setattr(capacity, "available_bytes", lambda *_: capacity.Available(True, room, room))


def test_states_that_will_not_fit_are_refused(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    little_room(monkeypatch)
    with pytest.raises(
        ValueError, match=r"local checkpoints need .* but only 1000 bytes are available \(somebody's limit\)"
    ):
        memory.fit(memory.local())
    assert memory.trainer.global_step == 0


def test_states_that_will_not_fit_are_left_out_where_nobody_has_asked_for_them(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    little_room(monkeypatch)
    callback = memory.local()
    callback._injected = True
    ends_well(memory, callback)
    (warning,) = errors_in(caplog)
    assert "LocalCheckpoint is off" in warning
    assert "1000 bytes are available" in warning
    assert parts_in(memory.folder) == []


@pytest.mark.parametrize(
    ("nodes", "factor", "received"),
    [
        pytest.param("aabb", 2, 1, id="two"),
        pytest.param("aabb", 8, 1, id="more than there are nodes"),
        pytest.param("abc", 2, 2, id="three in a group"),
        pytest.param("aab", 2, 0, id="none, with different numbers of ranks"),
        pytest.param("aaaa", 2, 0, id="none, on one node"),
    ],
)
def test_as_many_copies_of_others_count_as_a_node_holds(
    monkeypatch: pytest.MonkeyPatch, nodes: str, factor: int, received: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(capacity, "check", lambda directory, shard_bytes, keep, received: asked.append(received))
    policy: Any = LocalSavePolicy.__new__(LocalSavePolicy)
    policy.locations = [
        SimpleNamespace(rank=rank, node=node, shares=nodes.count(node)) for rank, node in enumerate(nodes)
    ]
    policy.location = SimpleNamespace(**vars(policy.locations[0]), local_rank=0)
    trainer = SimpleNamespace(
        is_global_zero=True, optimizers=[], lightning_module=torch.nn.Linear(2, 2), strategy=MagicMock()
    )
    policy.session = SimpleNamespace(
        fit=SimpleNamespace(trainer=trainer, rank=0, gather=lambda value: [value] * len(nodes))
    )
    policy._options = SimpleNamespace(replication="auto", replication_factor=factor, replication_jump=None, keep=2)
    policy._shards, policy._compared, policy.store = 2, None, MagicMock()
    monkeypatch.setattr(policies.lightning_strategies, "live_tensors", lambda trainer: [])
    policy._cliques = policy._find_cliques()
    assert policy._why_it_does_not_fit() is None
    assert asked == [received]


def test_moments_that_are_not_there_yet_count(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(capacity, "check", lambda directory, shard_bytes, *_: asked.append(shard_bytes))
    memory.die(memory.local(), step=8)
    memory.fit(memory.local())
    fresh, later = asked
    assert abs(later - fresh) < 64, "before the first step Adam has no moments"


def test_the_interval_is_chosen_and_said(
    memory: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    intervals: list[float] = []
    chosen = LocalSavePolicy._interval_s
    monkeypatch.setattr(_processes, "_seconds_since_start", lambda: 4000.0)
    monkeypatch.setattr(_processes, "waited", lambda: 1000.0)  # until it got its work

    def choose(self: Any, before_s: float) -> float:
        assert self._interval.recovery_s == 3000
        intervals.append(chosen(self, before_s))
        return 0.0

    monkeypatch.setattr(LocalSavePolicy, "_interval_s", choose)
    with caplog.at_level(logging.INFO):
        memory.fit(LocalCheckpoint(dir=memory.folder, run_dir=memory.path))
    assert len(intervals) > 10
    assert intervals[0] == 1.0
    assert min(intervals) >= 1.0
    said = [float(found[1]) for text in caplog.messages if (found := re.search(r"every ([\d.]+) s after", text))]
    assert said
    assert not any(0.6 < after / before < 1.8 for before, after in pairwise(said)), said
    assert sum("one node, so no copies on other nodes" in message for message in caplog.messages) == 1
    assert sum("up to the best one for the cost of a save" in message for message in caplog.messages) == 1


def test_the_first_steps_are_saved_where_the_interval_is_chosen(memory: Run) -> None:
    memory.die(memory.local(train_time_interval=3600), step=6)
    assert steps_in(memory.folder) == [], "an interval of the user's is an interval from the start on"
    memory.die(LocalCheckpoint(dir=memory.folder, run_dir=memory.path), step=6)
    ends_well(memory, LocalCheckpoint(dir=memory.folder, run_dir=memory.path))
    ((tier, step),) = memory.resumes
    assert (tier, 3 <= step <= 6) == ("local", True)
    assert [event["every_s"] >= 1.0 for event in ledger(memory.path, "saved") if event["tier"] == "local"][:1] == [True]


def test_by_time(memory: Run) -> None:
    pauses = dict.fromkeys([4, 9], lambda trainer: time.sleep(0.15))
    memory.die(memory.local(train_time_interval=0.15), step=12, at=pauses)
    assert 0 < len(steps_in(memory.folder)) <= 2
    ends_well(memory, memory.local(train_time_interval=timedelta(seconds=0.15)))
    assert memory.resumes[0][0] == "local"


class Exports(L.Callback):
    """Writes something of its own beside each checkpoint that the user has asked for."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @rank_zero_only
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)


class Counts(L.Callback):
    """Has a state in the checkpoint only."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]


def test_what_is_done_beside_a_checkpoint_is_done_for_those_that_were_asked_for(tmp_path: Path) -> None:
    """A hook that writes files is not called every few seconds; one that keeps a state in the checkpoint is."""
    run, exports = Run(tmp_path), Exports()
    run.die(run.resume(6), run.local(), exports, Counts(), step=11)
    assert exports.steps == [6]
    assert "on_save_checkpoint" not in vars(exports)
    counts = Counts()
    ends_well(run, run.resume(6), run.local(), exports, counts)
    assert run.resumes == [("local", 9)]
    assert counts.batches == 32


def hooks() -> Iterator[tuple[Any, bool]]:
    def exports(self: Any, checkpoint: Any) -> None:
        """Writes the adapter beside the checkpoint."""
        self.save("adapter")

    def keeps(self: Any, checkpoint: Any) -> None:
        checkpoint["x"] = 1

    def keeps_it_elsewhere(self: Any, checkpoint: Any) -> None:
        def keep() -> None:
            checkpoint["x"] = 1

        keep()

    def looks(self: Any, checkpoint: Any) -> None:
        print(locals())

    def takes_all(*given: Any) -> None:
        pass

    def decorator(function: Any) -> Any:
        @functools.wraps(function)
        def keeps_more(self: Any, checkpoint: Any) -> None:
            checkpoint["x"] = 1
            function(self, checkpoint)

        return keeps_more

    yield exports, False
    yield rank_zero_only(exports), False
    yield torch.no_grad()(exports), False
    yield from ((each, True) for each in (keeps, keeps_it_elsewhere, looks, takes_all, decorator(exports)))
    yield rank_zero_only(keeps), True
    yield functools.partial(exports), True  # who knows
    yield L.LightningModule.on_save_checkpoint, False


@pytest.mark.parametrize(("hook", "may"), hooks())
def test_whether_a_hook_may_have_a_state_in_the_checkpoint(hook: Any, may: bool) -> None:
    bound = functools.partial(hook, None) if isinstance(hook, functools.partial) else MethodType(hook, Net({}))
    assert lightning_checkpoints.uses_last_argument(bound, 1) == may


def test_where_states_are_kept(memory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_DIR_VARIABLE, str(memory.folder.parent / "elsewhere"))
    memory.die(memory.local(dir=None), step=8)
    ids = RunDirectory(memory.path).identity()
    (node,) = (memory.folder.parent / "elsewhere" / f"local_ckpt-{os.getuid()}").iterdir()
    assert node.name == os.uname().nodename
    assert steps_in(node / ids / "fit-000") == [3, 6]
    assert not memory.folder.exists()
    assert {path.stat().st_mode & 0o077 for path in node.rglob("*") if path.is_dir()} == {0}


def test_the_callback_can_be_pickled_and_used_again(memory: Run) -> None:
    callback = memory.local()
    memory.die(callback, step=8)
    again = pickle.loads(pickle.dumps(callback))
    ends_well(memory, again)
    assert again._participant is None


# Probation


class Watches(L.Callback):
    """What finds out that the training has gone wrong."""

    def __init__(self, local: LocalCheckpoint) -> None:
        self.local = local

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        if not torch.isfinite(outputs["loss"]):
            found = session_of(trainer, self.local)
            assert found is not None
            mark_bad(found, "loss is not finite")


def mark_bad(session: FitSession, reason: str) -> None:
    """Marks bad what was loaded, and ends the process."""
    step = session.fit.trainer.global_step
    session.selector.mark_bad(reason, step)
    raise BadCheckpoint(f"{reason}, at step {step}")


def spoil(path: Path) -> None:
    def with_nan(tensors: list[torch.Tensor]) -> None:
        tensors[0].view(-1)[0] = float("nan")

    reseal(path, change=with_nan)


def watched(run: Run, **options: Any) -> list[L.Callback]:
    local = run.local(**options)
    return [local, Watches(local)]


def test_what_is_condemned_is_never_chosen_again(memory: Run) -> None:
    memory.die(*watched(memory), step=14)
    newest = part_of(memory.folder, 12)
    name = newest.parent.name.split("-")[2]
    spoil(newest)
    with pytest.raises(BadCheckpoint, match="loss is not finite, at step 13"):
        memory.fit(*watched(memory))
    assert RunDirectory(memory.path).fit(0).bad_checkpoints == {name: "loss is not finite"}
    assert memory.outcome.status == "failed"
    ends_well(memory, *watched(memory))
    assert memory.resumes == [("local", 12), ("local", 9)]
    (condemned,) = ledger(memory.path, "condemned")
    assert (condemned["step"], condemned["reason"]) == (12, "loss is not finite")
    assert "marked bad" in "".join(path.read_text() for path in memory.folder.rglob("*.reason.txt"))


def test_while_what_was_loaded_may_be_bad_the_one_before_is_kept(memory: Run) -> None:
    memory.die(*watched(memory), step=14)

    def go_wrong(trainer: L.Trainer) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.parameters()).fill_(float("nan"))

    with pytest.raises(BadCheckpoint):
        memory.fit(*watched(memory), at={19: go_wrong})
    assert steps_in(memory.folder) == [9, 18], "the newest, and that of before the resume"
    memory.die(*watched(memory), step=24)
    assert memory.resumes == [("local", 12), ("local", 9)]
    memory.die(*watched(memory, probation_steps=3), step=31)
    assert steps_in(memory.folder) == [27, 30], "after the probation"


def test_a_condemned_global_checkpoint(memory: Run) -> None:
    memory.die(memory.resume(6), step=14)
    for path in resume.checkpoints(RunDirectory(memory.path).fit(0).checkpoints):
        if resume.step_of(path) == 12:
            state = checkpoint_file.load(path)
            state["state_dict"]["layers.0.weight"][0] = float("nan")
            checkpoint_file.save(state, path, {"fit": 0})
    with pytest.raises(BadCheckpoint):
        memory.fit(memory.resume(6), *watched(memory))
    ends_well(memory, memory.resume(6), *watched(memory))
    assert memory.resumes == [("global", 12), ("global", 6)]


def test_when_all_are_condemned_the_run_is_halted(memory: Run) -> None:
    memory.die(*watched(memory, keep=MAX_MARKED_BAD + 1), step=14)
    for path in parts_in(memory.folder):
        spoil(path)
    for number in range(MAX_MARKED_BAD):
        with pytest.raises(BadCheckpoint):
            memory.fit(*watched(memory, keep=MAX_MARKED_BAD + 1))
        assert memory.outcome.status == ("failed" if number < MAX_MARKED_BAD - 1 else "halted")
    assert "3 checkpoints of this fit were marked bad" in memory.outcome.reason
    assert memory.resumes == [("local", 12), ("local", 9), ("local", 6)]


def test_after_the_probation_it_is_not_the_checkpoints_fault(memory: Run) -> None:
    def go_wrong(trainer: L.Trainer) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.parameters()).fill_(float("nan"))

    memory.die(*watched(memory), step=14)
    with pytest.raises(BadCheckpoint, match="loss is not finite, at step 19"):
        memory.fit(*watched(memory, probation_steps=5), at={18: go_wrong})
    assert RunDirectory(memory.path).fit(0).bad_checkpoints == {}
    with pytest.raises(BadCheckpoint):
        memory.fit(*watched(memory, probation_steps=100), at={20: go_wrong})
    assert len(RunDirectory(memory.path).fit(0).bad_checkpoints) == 1


# Whose states they are


def test_a_finished_fit_leaves_nothing_on_the_node(memory: Run) -> None:
    for _ in range(2):  # the second is restored, not trained
        memory.fit(memory.resume(), memory.local())
        assert [path for path in memory.folder.rglob("*") if path.parent != memory.folder] == []
    assert memory.outcome.status == "finished"


def test_without_a_final_state_the_local_ones_stay(memory: Run) -> None:
    memory.fit(memory.local())
    assert steps_in(memory.folder) == [27, 30]


@pytest.mark.slow
def test_two_fits_of_a_script_are_not_mixed(memory: Run) -> None:
    def script(at: Mapping[int, Callable[[L.Trainer], None]]) -> list[bytes]:
        first = memory.fit(memory.resume(), memory.local())
        memory.seed = 5
        try:
            return [first, memory.next_fit(memory.resume(), memory.local(), at=at)]
        finally:
            memory.seed = 1

    with pytest.raises(Died):
        script({8: die})
    assert {path.parent.parent.name for path in parts_in(memory.folder)} == {"fit-001"}
    weights = script({})
    assert [(each["fit"], each["tier"], each["step"]) for each in ledger(memory.path, "resumed")] == [
        (0, "global", 32),
        (1, "local", 6),
    ]
    assert weights == [oracle(memory.path.parent, seed)[0] for seed in (1, 5)]


@pytest.mark.slow
def test_two_runs_on_a_node_are_not_mixed(memory: Run) -> None:
    other = Run(memory.path.parent, "other", seed=5)
    other.folder = memory.folder
    memory.die(memory.local(), step=14)
    other.die(other.local(), step=8)
    ends_well(memory, memory.local())
    ends_well(other, other.local())
    assert (memory.resumes, other.resumes) == ([("local", 12)], [("local", 6)])


def test_a_run_that_is_begun_anew_in_the_same_directory(memory: Run) -> None:
    memory.die(memory.local(), step=14)
    shutil.rmtree(memory.path)
    ends_well(memory, memory.local())
    assert memory.resumes == []
    assert len(ledger(memory.path, "fresh")) == 1


class Validated(Net):
    """Validates every four steps, at random; told to stop in the middle of the third validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(1)
        self.validated = [*getattr(self, "validated", []), (self.trainer.global_step, batch_idx)]
        if self.validated[-1] == (12, 1) and -1 in self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: signals.installed().received is not None)  # type: ignore[union-attr]

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(3))), 4)


@pytest.mark.slow
@pytest.mark.parametrize("in_validation", [True, False])
def test_a_preemption_that_leaves_no_time(memory: Run, monkeypatch: pytest.MonkeyPatch, in_validation: bool) -> None:
    """What is saved locally first is worth as much as what is saved globally after it."""
    monkeypatch.setattr(StopOnSignal, "_is_short_of_time", lambda _: True)
    monkeypatch.setattr(sys.modules[__name__], "Net", Validated)
    options: dict[str, Any] = {"val_check_interval": 4, "num_sanity_val_steps": 0}
    expected = oracle(memory.path.parent, 7, **options)
    memory.seed = 7
    callbacks = [Preemption(run_dir=memory.path), memory.resume(), memory.local(every_n_train_steps=1000)]
    stop = {13: lambda trainer: os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(signals.Interrupted):
        memory.fit(*callbacks, at={-1: die} if in_validation else stop, **options)
    weights = memory.fit(*callbacks, **options)
    ((tier, step),) = memory.resumes
    assert (tier, step >= 12) == ("local", True)
    assert (weights, memory.seen) == expected


# Several ranks in one process, without a Trainer: what they save together and bring back together

OWNER = {"run": "r" * 16, "fit": 0}
PLACES = 6
"""How many ranks the run was begun with whose ranks save here."""

TWO_BY_TWO = rank_locations([("a", 0), ("a", 0), ("b", 1), ("b", 1)])


class Model:
    """What one rank trains: the parameters and moments of all, and something of its own."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 3), (7,), (7,), (1,))
        ]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1, momentum=0.9)
        self.own = torch.full((3,), float(rank))
        self.steps = 0

    def state(self) -> dict[str, Any]:
        names = dict(enumerate(self.parameters))
        return {"model": names, "optimizer": self.optimizer.state_dict(), "own": self.own, "steps": self.steps}

    def live(self) -> list[torch.Tensor]:
        return [*self.parameters, *optimizer_tensors([self.optimizer])]

    def advance(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.own.mul_(1.5)
        self.steps += 1


def expected_state(rank: int, step: int) -> dict[str, Any]:
    model = Model(rank)
    for _ in range(step):
        model.advance()
    return model.state()


class Rank:
    """One rank that trains and saves."""

    def __init__(
        self,
        place: RankLocation,
        ranks: Sequence[RankLocation],
        folder: Path,
        shared: TCPStore | None,
        every: int,
        keep: int,
    ) -> None:
        self.model = Model(place.rank)
        self.store = NodeStore(folder / place.node)
        self.saved: list[int] = []
        self.divergences: list[Any] = []
        several = len(ranks) > 1
        layout = {"kind": "whole", "commons": place.shares if several else 0, "places": PLACES}
        coordinator = None
        if shared is not None:
            coordinator = SaveCoordinator(PrefixStore("job", shared.clone()), len(ranks), PrefixStore("job", shared))
        self.commons = several
        self.saves = LocalSaves(
            self.store,
            Peers(place, [each.rank for each in ranks if each.node == place.node], coordinator),
            {**OWNER, "layout": layout},
            Schedule(every, lambda before_s: 0.0),
            keep,
            hooks=SaveHooks(
                published=lambda step, generation: self.saved.append(step), diverged=self.divergences.append
            ),
        )
        self.saves.start(0)
        self.await_save()  # that there may be, since the store is made ready

    def step(self) -> None:
        """From one boundary to the next."""
        model = self.model
        if (planned := self.saves.at_boundary(model.steps, lambda: True)) is not None:
            live = model.live()
            self.saves.take(planned, model.steps, model.state(), live, live if self.commons else [])
        model.advance()
        self.saves.fence()

    def await_save(self) -> None:
        with self.saves._changed:
            assert self.saves._changed.wait_for(lambda: not self.saves._busy, 30)

    def stop(self) -> None:
        self.saves.stop(5.0)
        self.store.close()


class Job:
    """All ranks of a job, in this process."""

    def __init__(self, folder: Path, ranks: Sequence[RankLocation] = TWO_BY_TWO, every: int = 4, keep: int = 2) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if len(ranks) > 1 else None
        self.ranks = [Rank(place, ranks, folder, self.server, every, keep) for place in ranks]

    def train(self, steps: int, late: Sequence[int] = ()) -> None:
        """So many steps of all ranks; each waits until all but ``late`` ones, who come first, know of the next save."""
        order = sorted(range(len(self.ranks)), key=lambda number: number not in late)
        for _ in range(steps):
            for number in order:
                self.ranks[number].step()
            for number, rank in enumerate(self.ranks):
                rank.await_save()
                if len(self.ranks) > 1 and self.ranks[0].saves._steps_seen >= 3 and number not in late:
                    until(lambda rank=rank: rank.saves._planned is not None or rank.saves.thread_error is not None)

    def stop(self) -> None:
        threads = [threading.Thread(target=rank.stop) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module", autouse=True)
def announced_right_before() -> Iterator[None]:
    """Ranks of one process need no time to hear of a save: :meth:`Job.train` waits until they have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_saves, "_LEAD_S", 0.0)
        patch.setattr(local_saves, "_LEAD_PER_RANK_S", 0.0)
        yield


class Together:
    """``all_gather_object`` for threads; and a network that brings parts, or loses them."""

    def __init__(self, folder: Path, ranks: Sequence[RankLocation], loses: Callable[[Transfer], bool]) -> None:
        self.folder, self.places, self.loses = folder, ranks, loses
        self.barrier = threading.Barrier(len(ranks), timeout=30)
        self.values: list[Any] = [None] * len(ranks)
        self.transfers: list[Transfer] = []
        self.tiers: list[LocalTier] = []
        self.loaded: list[dict[int, dict[str, Any]]] = []

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = copy.deepcopy(value)
            self.barrier.wait()
            found = copy.deepcopy(self.values)
            self.barrier.wait()
            return found

        return gather

    def fetch(self, rank: int, store: NodeStore) -> Callable[..., dict[str, ShardWriter]]:
        def fetch(wanted: Sequence[Transfer], path: Callable[[str], Path], _: bool) -> dict[str, ShardWriter]:
            writers = {}
            if rank == 0:
                self.transfers += wanted
            for each in wanted:
                source = self.places[each.source].node
                content = self.folder / source / path(each.shard).relative_to(store.directory)
                if each.destination == rank and content.is_file() and not self.loses(each):
                    writer = writers[each.shard] = store.reserve(each.shard, each.size, is_copy=True)
                    writer.memory.copy_(torch.frombuffer(bytearray(content.read_bytes()), dtype=torch.uint8))
            return writers

        return fetch

    def on_every_rank(
        self, work: Callable[[LocalTier], Any], kind: str = "whole", why_not: str | None = None
    ) -> list[Any]:
        """What ``work`` returns for the tier of each rank."""
        found: list[Any] = [None] * len(self.places)

        def work_of(place: RankLocation) -> None:
            store = NodeStore(self.folder / place.node)
            try:
                fetch, gather = self.fetch(place.rank, store), self.gather(place.rank)
                shared = functools.partial(tuple[str, int], (kind, int(kind == "whole")))
                tier = LocalTier(store, self.places, place.rank, OWNER, shared, gather, fetch, lambda places: why_not)
                found[place.rank] = work(tier)
            except BaseException as error:
                self.barrier.abort()
                found[place.rank] = error
            finally:
                store.close()

        threads = [threading.Thread(target=work_of, args=(place,)) for place in self.places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found


def bring_back(
    folder: Path,
    ranks: Sequence[RankLocation] = TWO_BY_TWO,
    kind: str = "whole",
    loses: Callable[[Transfer], bool] = lambda _: False,
    without: Sequence[str] = (),
    why_not: str | None = None,
    at_hand: Mapping[int, AtHand] | None = None,
) -> tuple[list[int], list[str], list[dict[str, Any]] | None, Together]:
    """Resumes all ranks as a session does; returns which steps were tried, what is not used, and their states."""
    together = Together(folder, ranks, loses)

    def resume(tier: LocalTier) -> Any:
        tier.at_hand = (at_hand or {}).get(tier.location.rank)
        usable, reasons = tier.find(without)
        tried = []
        for generation in usable:
            tried.append(generation.step)
            if (state := tier.load(generation)) is not None:
                return tried, reasons, state, tier
        return tried, reasons, None, tier

    found = together.on_every_rank(resume, kind, why_not)
    assert all(each[:2] == found[0][:2] for each in found), "all ranks decide alike"
    assert len({each[2] is None for each in found}) == 1
    together.tiers = [each[3] for each in found]
    together.loaded = [each[2] for each in found]
    states = None if found[0][2] is None else [next(iter(each.values())) for each in together.loaded]
    return found[0][0], found[0][1], states, together


@pytest.mark.parametrize("happens", ["nothing", "it is lost on its way", "it is damaged", "there is none"])
def test_a_node_that_leaves_hands_over_what_only_it_has(two_nodes: Path, happens: str) -> None:
    without_replicas(two_nodes)
    if happens == "it is damaged":
        for path in (two_nodes / "b").glob("step-000000000012-*/rank-00002.shard"):
            flip(path)
    together = Together(two_nodes, TWO_BY_TWO, lambda _: happens == "it is lost on its way")
    newest = max((two_nodes / "a").glob("step-*")).name.split("-")[-1]

    def hand_over(tier: LocalTier) -> bool:
        tier.find()
        return tier.hand_over("0000" if happens == "there is none" else newest, {2, 3})

    found = together.on_every_rank(hand_over)
    assert found == [happens == "nothing"] * len(TWO_BY_TWO)
    shutil.rmtree(two_nodes / "b")
    left = rank_locations([("a", 0), ("a", 0)])
    _, _, states, _ = bring_back(two_nodes, left)
    assert are_of(12, states) == (happens == "nothing")


def are_of(step: int, states: list[dict[str, Any]] | None) -> bool:
    return states is not None and all(same(state, expected_state(rank, step)) for rank, state in enumerate(states))


@pytest.fixture
def node_memory() -> Iterator[Path]:
    if not (SHM.is_dir() and capacity.in_node_memory(SHM)):
        pytest.skip("needs /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHM))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes with two generations that all four ranks have saved, and replicas of all parts of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    job = Job(folder)
    job.train(13)
    job.stop()
    assert job.ranks[0].saved == [4, 8, 12]
    for here, there in (("a", "b"), ("b", "a")):
        for path in (folder / here).glob("step-*/rank-*"):
            target = folder / there / path.relative_to(folder / here)
            if not target.exists():
                shutil.copy(path, target)
    return folder


@pytest.fixture
def two_nodes(saved_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved_once, tmp_path / "nodes")
    return tmp_path / "nodes"


def without_replicas(folder: Path) -> None:
    for node, others in (("a", ("rank-00002", "rank-00003")), ("b", ("rank-00000", "rank-00001"))):
        for part in others:
            for path in (folder / node).glob(f"step-*/{part}.shard"):
                path.unlink()


def at(folder: Path, node: str, step: int, part: str) -> Path:
    (found,) = (folder / node).glob(f"step-{step:012d}-*/{part}.shard")
    return found


def test_four_ranks_on_two_nodes(two_nodes: Path) -> None:
    without_replicas(two_nodes)
    tried, reasons, states, together = bring_back(two_nodes)
    assert (tried, reasons, together.transfers) == ([12], [], [])
    assert are_of(12, states)


def test_each_node_has_what_all_have_alike_once(two_nodes: Path) -> None:
    without_replicas(two_nodes)
    sizes = {part: at(two_nodes, "a", 12, part).stat().st_size for part in ("common-00-of-02", "common-01-of-02")}
    assert abs(sizes["common-00-of-02"] - sizes["common-01-of-02"]) < 1200
    _, own = shard.load(at(two_nodes, "a", 12, "rank-00001"))
    assert [tensor.shape for tensor in own] == [torch.Size([3])]


def test_what_a_lost_node_had_comes_from_the_other(two_nodes: Path) -> None:
    shutil.rmtree(two_nodes / "b")
    tried, _, states, together = bring_back(two_nodes)
    assert tried == [12]
    assert are_of(12, states)
    parts = {"rank-00002", "rank-00003", "common-00-of-02", "common-01-of-02"}
    assert {each.shard for each in together.transfers} == parts
    assert {path.stem for path in (two_nodes / "b").glob("step-*/*")} == parts, "what has been brought is kept"
    assert at(two_nodes, "b", 12, "rank-00003").read_bytes() == at(two_nodes, "a", 12, "rank-00003").read_bytes()


def test_ranks_on_other_nodes_than_before(two_nodes: Path) -> None:
    without_replicas(two_nodes)
    assert are_of(12, bring_back(two_nodes, rank_locations([("b", 0), ("b", 0), ("a", 1), ("a", 1)]))[2])


def test_a_node_that_did_not_take_part(two_nodes: Path) -> None:
    assert are_of(12, bring_back(two_nodes, rank_locations([("b", 0), ("b", 0), ("c", 1), ("c", 1)]))[2])


LOSSES: dict[str, tuple[list[str], int, int]] = {
    # which copies are damaged in the generation of step 12; from which step it goes on; how many are seen to be bad
    "a part of a rank": (["b/rank-00003"], 12, 1),
    "the replica of it": (["a/rank-00003"], 12, 0),
    "a part and its replica": (["b/rank-00003", "a/rank-00003"], 8, 2),
    "one half of what all have": (["a/common-00-of-02"], 12, 1),
    "both halves on different nodes": (["a/common-00-of-02", "b/common-01-of-02"], 12, 2),
    "the same half everywhere": (["a/common-00-of-02", "b/common-00-of-02"], 8, 2),
    "parts of all ranks of a node": (["a/rank-00000", "a/rank-00001", "a/common-01-of-02"], 12, 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_copies_that_are_damaged(two_nodes: Path, name: str) -> None:
    copies, step, bad = LOSSES[name]
    for each in copies:
        node, part = each.split("/")
        flip(at(two_nodes, node, 12, part))
    found, _, states, together = bring_back(two_nodes)
    assert are_of(step, states)
    assert found == ([12] if step == 12 else [12, 8])
    reported = {path for tier in together.tiers for path, _ in tier.bad}
    assert len({"/".join(Path(path).parts[-3:]) for path in reported}) >= bad
    assert (not reported) == (bad == 0)
    # What a rank has read itself is in quarantine; what it was sent is reported only.
    for each in copies if name not in ("the replica of it", "a part and its replica") else copies[:bad][:1]:
        node, part = each.split("/")
        assert any("damaged" in path.read_text() for path in (two_nodes / node / "quarantine").glob(f"{part}*.txt"))


@pytest.mark.parametrize("name", LOSSES)
def test_copies_that_are_gone(two_nodes: Path, name: str) -> None:
    copies, step, _ = LOSSES[name]
    for each in copies:
        node, part = each.split("/")
        at(two_nodes, node, 12, part).unlink()
    found, reasons, states, _ = bring_back(two_nodes)
    assert are_of(step, states)
    assert found == [step]
    assert len(reasons) == (step != 12)
    assert all("the one of step 12 is incomplete: no node has" in reason for reason in reasons)


def test_a_part_that_does_not_arrive(two_nodes: Path) -> None:
    shutil.rmtree(two_nodes / "b")
    lost: list[Transfer] = []

    def loses(each: Transfer) -> bool:
        if each.shard == "rank-00002" and not lost:
            lost.append(each)
            return True
        return False

    tried, _, states, together = bring_back(two_nodes, loses=loses)
    assert tried == [12, 8]
    assert are_of(8, states)
    assert all("rank-00002 of step 12 from a on b: the transfer failed" in tier.unreadable for tier in together.tiers)
    assert not any(tier.bad for tier in together.tiers)


def test_no_room_for_what_has_been_brought(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(two_nodes / "b")

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "publish", full)
    tried, _, states, _ = bring_back(two_nodes)
    assert (tried, states) == ([12, 8], None)


def test_everything_is_gone(two_nodes: Path) -> None:
    shutil.rmtree(two_nodes)
    assert bring_back(two_nodes)[:3] == ([], [], None)


@pytest.mark.parametrize("ranks", [TWO_BY_TWO[:2], [*TWO_BY_TWO, *TWO_BY_TWO]], ids=["two", "eight"])
def test_another_number_of_ranks_that_cannot_go_on(two_nodes: Path, ranks: list[RankLocation]) -> None:
    hosts = [("abcd"[index // 2], index // 2) for index in range(len(ranks))]
    tried, reasons, states, _ = bring_back(two_nodes, rank_locations(hosts), why_not="nobody can")
    assert (tried, states) == ([], None)
    said = f"was saved by a run of {PLACES} ranks; this fit has {len(ranks)}, and nobody can"
    assert reasons == [f"the one of step {step} {said}" for step in (12, 8)]
    tried, reasons, states, _ = bring_back(two_nodes, rank_locations(hosts), kind="sharded by hand")
    assert (tried, states) == ([], None)
    assert reasons == [f"the one of step {step} was saved by 4 ranks; this fit has {len(ranks)}" for step in (12, 8)]


OTHERS = {"1": "a", "2 on a node": "aa", "2": "ab", "3": "aab", "5": "aaabb", "6": "abcabc"}


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=OTHERS.keys())
def test_another_number_of_ranks(two_nodes: Path, nodes: str) -> None:
    if "b" in nodes:  # else node a has copies of what b had
        without_replicas(two_nodes)
    ranks = rank_locations([(node, "abc".index(node)) for node in nodes])
    tried, reasons, _states, together = bring_back(two_nodes, ranks)
    assert (tried, reasons) == ([12], [])
    for rank, loaded in enumerate(together.loaded):
        assert next(iter(loaded)) == (rank if rank < 4 else 0)
        assert {place % 4 for place in range(rank, PLACES, len(nodes))} <= loaded.keys()
        assert all(same(state, expected_state(saved_by, 12)) for saved_by, state in loaded.items())


def test_a_damaged_shard_of_a_rank_that_is_no_more(two_nodes: Path) -> None:
    ranks = rank_locations([("a", 0), ("a", 0), ("b", 1)])  # rank 0 has the places 0 and 3
    flip(at(two_nodes, "a", 12, "rank-00003"))
    tried, _, _, together = bring_back(two_nodes, ranks)
    assert (tried, [each.shard for each in together.transfers]) == ([12], ["rank-00003"])
    assert same(together.loaded[0][3], expected_state(3, 12))
    assert any("damaged" in path.read_text() for path in (two_nodes / "a" / "quarantine").glob("rank-00003*.txt"))
    for node in "ab":
        flip(at(two_nodes, node, 12, "rank-00003"))
    tried, _, _, together = bring_back(two_nodes, ranks)
    assert tried == [12, 8]
    assert same(together.loaded[0][3], expected_state(3, 8))


def test_another_strategy(two_nodes: Path) -> None:
    tried, reasons, states, _ = bring_back(two_nodes, kind="sharded by hand")
    assert (tried, states) == ([], None)
    assert reasons[0] == "the one of step 12 was saved by another strategy (whole, not sharded by hand)"


def test_condemned_generations(two_nodes: Path) -> None:
    name = at(two_nodes, "a", 12, "rank-00000").parent.name.split("-")[2]
    tried, _, states, _ = bring_back(two_nodes, without=[name])
    assert tried == [8]
    assert are_of(8, states)


# What ranks agree on while they save


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path / "nodes")
    yield found
    found.stop()


def published(job: Job) -> list[list[int]]:
    return [sorted({held.step for held in rank.store.shard_files()}) for rank in job.ranks]


def test_what_one_rank_cannot_write_none_keeps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = job.ranks[2].store
    job.train(13)
    reserve = broken.reserve

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(broken, "reserve", full)
    job.train(8)
    assert [rank.saved[-2:] for rank in job.ranks] == [[8, 12]] * 4
    assert published(job) == [[8, 12]] * 4, "parts of incomplete generations are removed, older ones stay"
    assert [rank.saves.stats.failed > 0 for rank in job.ranks] == [False, False, True, False]
    monkeypatch.setattr(broken, "reserve", reserve)
    job.train(8)
    assert [rank.saved[-1] for rank in job.ranks] == [28] * 4
    assert published(job) == [[24, 28]] * 4


class Drowsy(threading.Condition):
    """Whoever has been woken up takes its time, and much has changed again by then."""

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self.release()
        time.sleep(0.03)
        self.acquire()
        return found


@pytest.mark.parametrize(
    "condition",
    [pytest.param(threading.Condition, id="awake", marks=pytest.mark.campaign), pytest.param(Drowsy, id="drowsy")],
)
def test_if_one_rank_hears_too_late_none_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, condition: type[threading.Condition]
) -> None:
    monkeypatch.setattr(local_saves, "_RETRY_S", 0.1)  # this process is where rank 0 would come to its next step
    job = Job(tmp_path)
    late = job.ranks[3].saves
    taken: list[list[int]] = [[] for _ in job.ranks]
    for rank, steps in zip(job.ranks, taken, strict=True):
        take = rank.saves.take
        monkeypatch.setattr(rank.saves, "take", lambda planned, step, *args, take=take, steps=steps: (
            steps.append(step), take(planned, step, *args)
        ))  # fmt: skip
    job.train(9)
    assert late._coordinator is not None
    hear = late._coordinator.wait_for_plan

    def hear_late(number: int) -> Any:
        planned = hear(number)
        if planned is not None and planned.step in (16, 20):
            until(lambda: late._passed >= planned.step)
        return planned

    monkeypatch.setattr(late._coordinator, "wait_for_plan", hear_late)
    for rank in job.ranks:
        until(lambda rank=rank: rank.saves._planned is not None)
        rank.saves._changed.__class__ = condition
    job.train(14, late=[3])
    for rank in job.ranks:  # rank 3 too, which train() does not wait for as long as it is late
        until(lambda rank=rank: rank.saves._agreed is True)
    job.train(9)
    job.stop()
    for rank, steps in zip(job.ranks, taken, strict=True):
        assert steps == [4, 8, 12, 24, 28], "nobody takes a state alone: the hooks of a save may use collectives"
        assert rank.saved == steps
        assert rank.saves.stats.failed == 0
    assert published(job) == [[24, 28]] * 4


@pytest.mark.parametrize("all_are_in_time", [True, False])
def test_a_rank_that_waits_for_the_answer_no_longer(
    job: Job, monkeypatch: pytest.MonkeyPatch, all_are_in_time: bool
) -> None:
    job.train(9)
    slow, heard = job.ranks[1].saves, []
    assert slow._coordinator is not None
    agree = slow._coordinator.agree

    def agree_late(number: int, in_time: bool) -> bool | None:
        found = agree(number, in_time and (all_are_in_time or bool(heard)))
        if not heard:
            heard.append(found)
            until(lambda: slow._missed)
        return found

    def four_steps() -> None:
        for _ in range(4):
            for rank in job.ranks:
                rank.step()
        for rank in job.ranks:
            rank.await_save()

    with monkeypatch.context() as patch:
        patch.setattr(slow._coordinator, "agree", agree_late)
        four_steps()
        until(lambda: bool(heard))  # the others know; this rank does not, and reaches step 16 before it does
        patch.setattr(local_saves, "_AGREE_TIMEOUT_S", 0.05)
        four_steps()
    job.train(12)
    assert heard == [all_are_in_time]
    assert [rank.saved for rank in job.ranks] == [[4, 8, 12, 20, 24, 28]] * 4, "the next saves are of all again"


def test_a_rank_whose_thread_dies_stops_no_other(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train(13)
    for rank in job.ranks:  # else the thread may die before it has heard of the next save
        until(lambda rank=rank: rank.saves._planned is not None and rank.saves._planned.step == 16)
    monkeypatch.setattr(job.ranks[1].saves, "_retire", broken)
    for _ in range(4):
        for rank in job.ranks:
            rank.step()
    until(lambda: job.ranks[1].saves.thread_error is not None)
    with pytest.raises(RuntimeError, match="the writer is broken"):
        job.ranks[1].step()
    for rank in (*job.ranks[:1], *job.ranks[2:]):
        for _ in range(30):
            rank.step()  # nobody waits for it in a step
        until(lambda rank=rank: rank.saved[-1] == 16)
        assert rank.saves.thread_error is None
    until(lambda: published(job)[2] == [12, 16])


@pytest.mark.parametrize(("peer_is_lost", "copies"), [(True, False), (True, True), (False, False)])
def test_who_has_lost_a_peer_ends_no_round_but_publishes_its_own(
    job: Job, monkeypatch: pytest.MonkeyPatch, peer_is_lost: bool, copies: bool
) -> None:
    job.train(13)
    for rank in job.ranks:
        until(lambda rank=rank: rank.saves._planned is not None and rank.saves._planned.step == 16)
    alive, waits = job.ranks[:3], []
    for _ in range(4):
        for rank in alive:
            rank.step()
    monkeypatch.setattr(local_saves, "_LAST_ROUND_S", 0.01)
    for rank in alive:
        with monkeypatch.context() as patch:
            wait_for = rank.saves._wait_for
            if copies:
                patch.setattr(rank.saves, "_replicas", "others may be sending theirs")
            patch.setattr(rank.saves, "_wait_for", lambda what, s, f=wait_for: (waits.append(s), f(what, s))[1])
            rank.saves.stop(5.0, peer_is_lost)
    assert waits == [5.0, *[0.01] * (copies or not peer_is_lost)] * 3
    assert [steps[-1] for steps in published(job)[:3]] == [16] * 3


def test_the_end_waits_for_no_round_that_is_still_to_come(tmp_path: Path) -> None:
    job = Job(tmp_path, every=1000)
    job.train(6)
    assert job.ranks[0].saves._thread.is_alive()
    job.stop()
    assert not any(rank.saves._thread.is_alive() for rank in job.ranks)
    assert published(job) == [[]] * 4


def test_the_end_comes_at_any_moment(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before rank 0's thread would wait for the time of the next save, for one."""
    rounds, here = job.ranks[0].saves._coordinator, threading.Event()
    assert rounds is not None
    ready = rounds.all_are_ready

    def ready_at_the_end(number: int) -> bool:
        found = ready(number)
        here.set()
        until(lambda: job.ranks[0].saves._stopping)
        return found

    monkeypatch.setattr(rounds, "all_are_ready", ready_at_the_end)
    job.train(1)

    def at_that_moment() -> bool:
        with job.ranks[0].saves._changed:
            job.ranks[0].saves._changed.notify_all()
        return here.is_set()

    until(at_that_moment)
    job.stop()
    assert not any(rank.saves._thread.is_alive() for rank in job.ranks)


def test_waiting_says_nothing_and_costs_nothing(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in job.ranks:
        rank.saves._schedule.every_n_train_steps, rank.saves._schedule._next = None, float("inf")
    for _ in range(5):
        for rank in job.ranks:
            rank.step()
    before = time.process_time()
    time.sleep(1.2)  # torch warns when a wait for a store ends without a result
    assert time.process_time() - before < 0.5
    assert "timed out" not in capfd.readouterr().err
    job.ranks[0].saves.stop(5.0)
    for rank in job.ranks[1:]:
        for _ in range(3):
            rank.step()
        rank.saves.stop(5.0)
        assert not rank.saves._thread.is_alive()
        assert rank.saves.thread_error is None


def test_ranks_that_differ_about_what_they_have_alike(job: Job) -> None:
    """Something writes to a parameter of one rank alone, so that this rank no longer counts it among those of all."""
    rank, touched = job.ranks[1], []
    take = rank.saves.take

    def touch(planned: Any, step: int, *args: Any) -> None:
        take(planned, step, *args)
        if step == 12:
            touched.append(rank.model.parameters[2].add_(0))

    rank.saves.take = touch  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        job.train(21)
    job.stop()
    tried, _, states, _ = bring_back(job.ranks[0].store.directory.parent)
    assert touched
    assert tried[0] in (8, 16, 20)
    assert are_of(tried[0], states), "no rank loads what is none of its own"


def test_saves_without_waiting_for_the_next(job: Job) -> None:
    job.train(9)
    for rank in job.ranks:
        live = rank.model.live()
        assert rank.saves.save_now("0badcafe", rank.model.steps, rank.model.state(), live, live, 10.0) is not None
    job.stop()
    tried, _, states, _ = bring_back(job.ranks[0].store.directory.parent)
    assert tried == [9]
    assert are_of(9, states)


def test_what_is_not_saved_in_time_is_not_saved_later(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training has gone on, and what would be copied by then belongs to no step."""
    job.train(9)
    rank, go_on, ended = job.ranks[0], threading.Event(), threading.Event()
    save = rank.saves._save

    def slow(taken: Any) -> Any:
        go_on.wait(30.0)
        try:
            return save(taken)
        finally:
            ended.set()

    monkeypatch.setattr(rank.saves, "_save", slow)
    live = rank.model.live()
    assert rank.saves.save_now("0badcafe", rank.model.steps, rank.model.state(), live, live, 0.1) is None
    live[-1].add_(1.0)
    go_on.set()
    assert ended.wait(30.0)
    monkeypatch.undo()
    assert not list(rank.store.directory.glob("*0badcafe/*rank*"))
    job.stop()


@pytest.mark.parametrize("changed", ["nothing", "a parameter", "what the optimizer keeps", "an older generation"])
def test_what_a_rank_has_saved_and_still_has_it_does_not_read(job: Job, changed: str) -> None:
    """Whatever has changed it since, also where torch does not count it: then it is read."""
    job.train(9)
    kept = {}
    for number, rank in enumerate(job.ranks):
        live = rank.model.live()
        saved = rank.saves.save_now("0badcafe", rank.model.steps, rank.model.state(), live, live, 10.0)
        assert saved is not None
        if number in (0, 3):  # not so the second rank of the first node, nor the first one of the other node
            kept[number] = saved.at_hand(rank.model.parameters)
    job.stop()
    folder = job.ranks[0].store.directory.parent
    live = job.ranks[0].model.live()
    where = {each.data_ptr() for each in live}
    of_module = {each.data_ptr() for each in job.ranks[0].model.parameters}
    if changed == "an older generation":
        shutil.rmtree(folder / "a" / "step-000000000009-0badcafe")
        shutil.rmtree(folder / "b" / "step-000000000009-0badcafe")
    elif changed != "nothing":
        live[0 if changed == "a parameter" else -1].data.view(-1)[0] += 1.0
    tried, _, states, _ = bring_back(folder, at_hand=kept)
    assert tried == [8 if changed == "an older generation" else 9]
    assert are_of(tried[0], states)
    assert states is not None
    loaded = {each.data_ptr() for each in nested(states[0]) if isinstance(each, torch.Tensor)}
    assert loaded & where == (where - of_module if changed == "nothing" else set()), "the module is loaded from it"


def test_at_the_start_what_cannot_be_resumed_from_goes(tmp_path: Path) -> None:
    job = Job(tmp_path, TWO_BY_TWO)
    job.train(13)
    job.stop()
    part = at(tmp_path, "b", 12, "rank-00002")
    part.unlink()
    again = Job(tmp_path, rank_locations([("a", 0), ("b", 1)]))
    assert published(again) == [[]] * 2, "what four ranks have saved two cannot use"
    again.stop()


# Killed at every point of a save: each system call with an effect is one, before and after it

CALLS = ["posix_fallocate", "pwrite", "ftruncate", "rename", "unlink", "mkdir", "rmdir", "fsync", "open"]


class Points:
    """Kills this process before its ``kill_at``-th call of those, or after it, or (a write) in the middle of it."""

    def __init__(self, kill_at: int) -> None:
        self.left = kill_at
        self.passed: list[str] = []
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _point(self, name: str) -> None:
        if threading.current_thread().name == "local-checkpoint":
            self.passed.append(name)
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._point(f"before {name}")
            if name == "pwrite" and self.left == 1:
                fd, data, position = args
                function(fd, bytes(data)[: len(data) // 2], position)
            found = function(*args, **kwargs)
            self._point(f"after {name}")
            return found

        return wrapped


def in_child(action: Callable[[], object]) -> int:
    """Runs ``action`` in a forked process and returns its id."""
    sys.stdout.flush()
    if (pid := os.fork()) != 0:
        return pid
    try:
        gc.freeze()  # a store whose thread is in the parent cannot be freed here
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


ALONE = rank_locations([("a", 0)])


def life(folder: Path, kill_at: int, done: Path) -> None:
    """Five saves of one process, killed in one of them; ``done`` says which were complete."""
    job = Job(folder, ALONE, every=1)
    points = Points(kill_at)
    rank = job.ranks[0]
    rank.saves._hooks.published = lambda step, generation: os.write(fd, b"%d " % step)  # type: ignore[assignment]
    fd = os.open(done, os.O_CREAT | os.O_WRONLY, 0o600)
    for _ in range(6):
        rank.step()
        rank.await_save()
    how = {"posix_fallocate", "ftruncate"} if rank.store.in_memory else {"open", "fsync"}
    assert {call.split()[1] for call in points.passed} >= {"pwrite", "rename", "mkdir"} | how
    job.stop()


def killed_everywhere(folder: Path, stride: int) -> int:
    for kill_at in range(1, 2000, stride):
        nodes, done = folder / f"{kill_at}", folder / f"{kill_at}.done"
        code = exit_code(in_child(lambda: life(nodes, kill_at, done)))  # noqa: B023
        assert code in (0, -signal.SIGKILL)
        complete = [int(step) for step in done.read_text().split()]
        tried, _, states, together = bring_back(nodes, ALONE)
        assert not together.tiers[0].bad, "nothing that is published is bad, ever"
        if complete:
            assert tried[0] in (complete[-1], complete[-1] + 1)
        if states is not None:
            assert len(tried) == 1
            assert are_of(tried[0], states)
        assert bool(states) or not complete
        # The next process goes on in the same folder.
        job = Job(nodes, ALONE, every=1)
        job.train(4)
        job.stop()
        assert published(job) == [[2, 3]]
        assert sorted(path.name for path in (nodes / "a").iterdir() if path.name.startswith(".")) == []
        shutil.rmtree(nodes)
        if code == 0:
            return kill_at
    raise AssertionError("it does not end")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_killed_at_every_point_of_a_save(node_memory: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "disk":
        monkeypatch.setattr(node_store, "in_node_memory", lambda _: False)
    assert killed_everywhere(node_memory, stride=3) > 60


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_killed_at_really_every_point_of_a_save(node_memory: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "disk":
        monkeypatch.setattr(node_store, "in_node_memory", lambda _: False)
    assert killed_everywhere(node_memory, stride=1) > 60


PAIR = rank_locations([("a", 0), ("a", 0)])


def life_of_two(folder: Path, rank: int, port: int, kill_at: int) -> None:
    """Saves of one rank of two, in a process of its own."""
    done = os.open(folder / f"{rank}.done", os.O_CREAT | os.O_WRONLY, 0o600)
    points = Points(kill_at)
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    one = Rank(PAIR[rank], PAIR, folder / "nodes", client, 2, 2)
    one.saves._hooks.published = lambda step, generation: os.write(done, b"%d " % step)  # type: ignore[assignment]
    together = PrefixStore("steps", client.clone())
    with contextlib.suppress(torch.distributed.DistError):  # the other one was killed
        for number in range(16):
            one.step()
            time.sleep(0.01)
            together.set(f"{number}/{rank}", "1")  # a rank that is behind would be too late for every round
            together.wait([f"{number}/{1 - rank}"], timedelta(seconds=2))
    if points.left > 0:
        one.stop()


@pytest.mark.campaign
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_one_of_two_killed_at_every_point_of_a_save(
    node_memory: Path, monkeypatch: pytest.MonkeyPatch, where: str, victim: int
) -> None:
    if where == "disk":
        monkeypatch.setattr(node_store, "in_node_memory", lambda _: False)
    ended, resumed_from = 0, Counter[int]()
    for kill_at in range(1, 2000):
        folder = node_memory / str(kill_at)
        folder.mkdir()
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = [
            in_child(lambda: life_of_two(folder, rank, server.port, kill_at if rank == victim else 10**6))  # noqa: B023
            for rank in range(2)
        ]
        code = exit_code(pids[victim])
        if code != 0:
            os.kill(pids[1 - victim], signal.SIGKILL)
        exit_code(pids[1 - victim])
        complete = [int(step) for rank in range(2) for step in (folder / f"{rank}.done").read_text().split()]
        tried, _, states, together = bring_back(folder / "nodes", PAIR)
        assert not any(tier.bad for tier in together.tiers)
        assert states is not None or not complete
        if complete:
            assert tried[0] >= max(complete), "a generation of which any rank knows that it is complete is there"
        if states is not None:
            assert len(tried) == 1
            assert are_of(tried[0], states)
            resumed_from[tried[0]] += 1
        shutil.rmtree(folder)
        ended = ended + 1 if code == 0 else 0  # in a row: one of them may have had too few rounds
        if ended == 3:
            break
    assert kill_at > 150
    assert len(resumed_from) > 2


class Slow(threading.Event):
    """Comes only after some looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def wait(self, timeout: float | None = None) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("looks", "come"), [(0, True), (3, True), (10**9, False)])
def test_a_wait_that_ends_by_itself_says_that_it_is_no_hang(looks: int, come: bool) -> None:
    said: list[int] = []
    assert wait_with_heartbeat(Slow(looks).wait, 0.05, lambda: said.append(1)) == come
    assert len(said) == looks if come else len(said) > 0


def test_a_month_of_saves_is_some_thousand_events() -> None:
    day_s, at_s, found = 86400.0, 0.0, []
    while at_s < 30 * day_s:
        found.append(at_s)
        at_s += _unrecorded_s(at_s)
    assert sum(at_s < 3600 for at_s in found) == 60
    assert 8000 < len(found) < 9000
    assert max(after - before for before, after in pairwise(found)) == 300


def test_a_training_that_waits_for_its_storage_does_not_hang(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the fence, while going back and at the end."""
    slow, said = job.ranks[2], []
    job.train(7)
    monkeypatch.setattr(slow.saves._fence, "_heartbeat", lambda: said.append("fence"))
    monkeypatch.setattr(slow.saves._hooks, "heartbeat", lambda: said.append("saves"))
    copy_all = Snapshot.copy

    def slowly(self: Snapshot, *args: Any) -> None:
        if threading.current_thread() is slow.saves._thread:
            time.sleep(1.3)
        copy_all(self, *args)

    monkeypatch.setattr(Snapshot, "copy", slowly)
    job.train(3)
    assert "fence" in said
    assert slow.saves.wait_for_save(10.0)


def test_a_step_that_came_too_late_is_not_announced_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is slow in a hook of its own while another rank is a step ahead."""
    job = Job(tmp_path)
    ahead, first = job.ranks[3].saves, job.ranks[0].saves._coordinator
    assert ahead._coordinator is not None
    assert first is not None
    hear, announce, announced = ahead._coordinator.wait_for_plan, first.announce, []

    def hear_ahead(number: int) -> Any:
        if (planned := hear(number)) is not None:
            ahead._passed = planned.step
        return planned

    monkeypatch.setattr(ahead._coordinator, "wait_for_plan", hear_ahead)
    monkeypatch.setattr(first, "announce", lambda planned: (announced.append(planned.step), announce(planned)))
    for _ in range(4):  # then rank 0 knows how long a step takes
        for rank in job.ranks:
            rank.step()
    try:
        until(lambda: len(announced) > 0)
        time.sleep(0.5)
        assert len(announced) <= 2

        def goes_on() -> bool:  # all of them: the other rank may have heard of it in time
            for rank in job.ranks:
                rank.step()
            return len(announced) > 1

        until(goes_on)
    finally:
        job.stop()
