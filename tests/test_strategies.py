"""Every strategy of Lightning is supported or refused, and a fit is known again under another one."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import pkgutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume
from lightning_resilience._lightning.lightning_strategies import STRATEGIES, name_of, traits_of
from lightning_resilience.checkpoint.sharded import whole_parameters
from lightning_resilience.run.run_directory import RunDirectory
from tests import test_auto_resume, test_go_back, test_local_checkpoint, test_nan_guard, test_preemption
from tests.harness import result, run
from tests.program import DEFAULTS, Fsdp1OnCpu, Module
from tests.test_exact_resume import make, undisturbed


def strategies_of(package: str) -> dict[str, type[Any]]:
    """What can be trained with, wherever it is defined."""
    found: dict[str, type[Any]] = {}
    folder = importlib.import_module(f"{package}.strategies")
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, folder.Strategy):
                found[name] = value
    for base in ("Strategy", "ParallelStrategy"):
        del found[base]
    return found


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_strategy_of_lightning_is_classified(package: str) -> None:
    """A new one: decide in lightning_strategies.py whether it is supported; if so, put it through test_exact_resume."""
    found = strategies_of(package)
    assert set(found) == set(STRATEGIES)
    for name, cls in found.items():
        strategy = object.__new__(cls)
        traits = traits_of(strategy)
        assert name_of(strategy) == name
        if traits.refused is None:
            assert traits.is_sharded == traits.all_ranks_write == traits.loads_state, name
            assert traits.can_save_async, name
        assert traits.name == name
        assert traits.gathers_state_dict == (name == "FSDPStrategy")


def trainer(tmp: Path, strategy: Any, callback: Any) -> L.Trainer:
    return L.Trainer(
        max_steps=2,
        accelerator="cpu",
        strategy=strategy,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp),
    )


def fit(trainer: L.Trainer) -> None:
    trainer.fit(Module({**DEFAULTS, "sharded": False}), DataLoader(TensorDataset(torch.randn(16, 8)), 4))


@pytest.mark.parametrize("name", [name for name, traits in STRATEGIES.items() if traits.refused])
def test_what_cannot_be_resumed_is_refused_at_setup(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = type(name, (SingleDeviceStrategy,), {})  # DeepSpeed and TPUs are not here
    with pytest.raises(RuntimeError, match=name):
        fit(trainer(tmp_path, strategy("cpu"), AutoResume(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    injected = AutoResume(tmp_path / "run")
    injected._injected = True
    with caplog.at_level(logging.WARNING):
        fit(trained := trainer(tmp_path, strategy("cpu"), injected))
    assert trained.global_step == 2
    assert f"{name}" in caplog.text
    assert "AutoResume is off in this fit" in caplog.text


def test_a_strategy_of_the_users_own_is_known_by_what_it_is_made_of() -> None:
    class Mine(DDPStrategy):
        pass

    class AllMine(ParallelStrategy):
        def save_checkpoint(self, *args: Any) -> None:
            pass

    AllMine.__abstractmethods__ = frozenset()
    mine, all_mine = traits_of(object.__new__(Mine)), traits_of(object.__new__(AllMine))
    assert mine == traits_of(object.__new__(DDPStrategy))
    assert (mine.name, mine.is_sharded, mine.all_ranks_write) == ("DDPStrategy", False, False)
    assert (all_mine.name, all_mine.is_sharded, all_mine.all_ranks_write) == (None, True, True)
    assert all_mine.refused is None
    assert not all_mine.can_save_async


@pytest.fixture
def rank_1_of_2() -> Iterator[None]:
    """This process as one of two, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 3))
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1, dtype=torch.float32))
        self.tied = self.layers[2]


def _tensor_parallel(net: Net) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net.layers, init_device_mesh("cpu", (2,)), plan)


def _fsdp2(net: Net) -> None:
    fully_shard(net.layers, mesh=init_device_mesh("cpu", (2,)))


def _fsdp1(use_orig_params: bool, checkpoints: bool = False) -> Callable[[Net], None]:
    def shard(net: Net) -> None:
        options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        if checkpoints:
            net.layers[0] = checkpoint_wrapper(net.layers[0])
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
            net.layers[0] = wrap(net.layers[0])
            net.layers = wrap(net.layers)

    return shard


@pytest.mark.parametrize(
    "shard",
    [_fsdp2, _tensor_parallel, _fsdp1(True), _fsdp1(False), _fsdp1(True, checkpoints=True)],
    ids=["FSDP2", "tensor parallel", "FSDP1", "FSDP1, flat", "FSDP1, activation checkpoints"],
)
def test_parameters_are_described_as_if_no_rank_held_a_part(rank_1_of_2: None, shard: Callable[[Net], None]) -> None:
    net = Net()
    plain = sorted(whole_parameters(net))
    assert plain == sorted((name, tuple(p.shape), p.dtype) for name, p in net.named_parameters())
    shard(net)
    assert sorted(whole_parameters(net)) == plain


def fingerprint(config: dict[str, Any]) -> dict[str, Any]:
    return RunDirectory(config["run_dir"]).fit(0).fingerprint or {}


def set_fingerprint(config: dict[str, Any], names: Callable[[str], str]) -> None:
    """As version 0.6 has written it: of what rank 0 held when the strategy had been set up."""
    module = Module({**DEFAULTS, "sharded": False})
    lines = [f"{names(name)} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    path = RunDirectory(config["run_dir"]).path / "fit-000" / "fingerprint.json"
    content = {**fingerprint(config), "parameters": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    path.write_text(json.dumps(content))


FINGERPRINTS: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "one device": ({}, lambda name: name),
    "FSDP1": (
        {"sharded": "fsdp1 full", "wraps": True},
        lambda name: name.replace("net.3", "net.3._fsdp_wrapped_module"),
    ),
}


@pytest.mark.parametrize("case", FINGERPRINTS)
def test_a_run_of_an_older_version_goes_on(tmp_path: Path, case: str) -> None:
    options, names = FINGERPRINTS[case]
    config = make(tmp_path, "run", trainer={"max_epochs": 1}, **options)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    set_fingerprint(config, names)
    codes, text = run({**config, "trainer": {"max_epochs": 2}}, tmp_path / "run")
    assert codes == [0], text
    assert "Resuming from step 16" in text


WHOLE = [False, "fsdp1 full"]
PARTS = [True, "whole file", "fsdp1 sharded"]  # FSDP2's are in parts whatever its own saves are
READ_BY_OTHERS = [(first, then) for first in WHOLE for then in (*WHOLE, *PARTS) if then != first]
SHORT = [(False, True), (False, "fsdp1 full")]


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.campaign) for case in READ_BY_OTHERS],
)
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(tmp_path: Path, first: Any, then: Any) -> None:
    """A state in one file is taken by every strategy, with weights and optimizers: this was lost without a word."""
    options = {"trainer": {"devices": 2}}
    config = make(tmp_path, "run", **options)
    events = [{"at": "train", "step": 23, "rank": 1, "do": "SIGKILL"}]
    run({**config, "sharded": first, "events": events}, tmp_path / "run")
    codes, text = run({**config, "sharded": then}, tmp_path / "run")
    assert set(codes) == {0}, text
    assert "Resuming from step 20" in text
    (found,), ((expected,), _) = result(config), undisturbed(tmp_path, **options)
    assert found["metrics"] == expected["metrics"]


@pytest.mark.slow
def test_a_planted_object_is_refused_before_the_strategy_reads_the_file(tmp_path: Path) -> None:
    config = make(tmp_path, "run", trainer={"devices": 2})
    run({**config, "events": [{"at": "train", "step": 23, "rank": 1, "do": "SIGKILL"}]}, tmp_path / "run")
    newest = test_auto_resume.checkpoints(config)[0]
    test_auto_resume.planted(newest)
    codes, text = run({**config, "sharded": True}, tmp_path / "run")
    assert set(codes) == {0}, text
    assert "Resuming from step 15" in text
    assert "Checkpoint rejected" in text
    assert not newest.exists()


@pytest.mark.parametrize(
    ("first", "then"),
    [(True, False), pytest.param(True, "fsdp1 full", marks=pytest.mark.campaign)],
)
def test_parts_that_the_strategy_cannot_read_end_the_run(tmp_path: Path, first: Any, then: Any) -> None:
    """At every start: there is nothing to be gained by another attempt."""
    config = make(tmp_path, "run", trainer={"devices": 2})
    events = [{"at": "train", "step": 23, "rank": 1, "do": "SIGKILL"}]
    codes, _ = run({**config, "sharded": first, "events": events}, tmp_path / "run")
    assert -signal.SIGKILL in codes
    codes, text = run({**config, "sharded": then}, tmp_path / "run")
    assert 1 in codes, text
    assert "was saved as shards by ModelParallelStrategy" in text
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "halted"


ONE_FILE: dict[str, Any] = {"trainer": {"devices": 2}, "sharded": "fsdp1 full", "wraps": True}
PARTS_OF_TWO: dict[str, Any] = {**ONE_FILE, "sharded": "fsdp1 sharded"}
FORMATS = [ONE_FILE, pytest.param(PARTS_OF_TWO, marks=pytest.mark.campaign)]


@pytest.mark.parametrize("options", [pytest.param(ONE_FILE, marks=pytest.mark.campaign), PARTS_OF_TWO])
@pytest.mark.slow
def test_fsdp1_is_stopped_by_a_signal(tmp_path: Path, options: dict[str, Any]) -> None:
    events = [{"at": "train", "step": 23, "rank": 1}]
    test_preemption.stop_and_resume(tmp_path, events, **{**test_preemption.TWO, **options})


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.slow
def test_fsdp1_goes_on_from_local_checkpoints(tmp_path: Path, options: dict[str, Any]) -> None:
    test_local_checkpoint.exactly(tmp_path, 27, 0, **{**options, "trainer": {"devices": 2, "max_epochs": 2}})


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("tier", ["global", pytest.param("local", marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_fsdp1_goes_back(tmp_path: Path, options: dict[str, Any], tier: str) -> None:
    test_go_back.test_ranks(tmp_path, options, tier)


@pytest.mark.parametrize("tier", [pytest.param("global", marks=pytest.mark.campaign), "local"])
@pytest.mark.slow
def test_fsdp1_goes_back_before_a_bad_step(tmp_path: Path, tier: str) -> None:
    test_nan_guard.test_ranks_go_back_together(ONE_FILE, tier, tmp_path)


def test_the_double_is_lightnings_own_but_for_its_device() -> None:
    assert name_of(object.__new__(Fsdp1OnCpu)) == "FSDPStrategy"
