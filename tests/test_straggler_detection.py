"""Ranks that are slow, in real fits: who is named, at what, and what becomes of the run."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import json
import logging
import math
import os
import pickle
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_resilience import AutoResume, StragglerDetection, _nvrx
from lightning_resilience.agreement_protocol import Needs
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.stragglers.step_timer import DeviceStepTimer, HostStepTimer, Sample
from lightning_resilience.detect.stragglers.stragglers import Straggler
from lightning_resilience.fit import joining, straggler_reports
from lightning_resilience.fit.straggler_reports import StragglerReports
from lightning_resilience.launch.nodes import Board, Plan
from lightning_resilience.run import ledger
from lightning_resilience.run.goodput import account
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import CONTEXT, Ranks, free_port, result, run, samples
from tests.ledgers import Ledger, read_ledger
from tests.participants import act
from tests.test_exact_resume import killed_and_resumed, make, some, undisturbed

RANKS = 4
STEPS = 12
PACE = 0.002
AT = 0.1
"""Seconds of that part of a step of which one rank needs twice as many. What the ranks do to each other's is less."""
CAUSES = {"data": "data loading", "compute": "compute", "callback": "callbacks"}

# -- the program of one rank: paced by sleeps, since the ranks share the cores -----------------------------------------


class Paced:
    """Knows the window of steps between two reports, and how fast this rank is in it."""

    def __init__(self, scenario: dict[str, Any], rank: int) -> None:
        self.scenario, self.rank = scenario, rank
        self.window = 0

    def work(self, place: str) -> None:
        """Takes its time."""
        at = self.scenario["at"]
        seconds = AT if place == at else PACE
        if place == at and self.scenario["who"] != "stopped" and self.rank in slow_ranks(self.scenario, self.window):
            seconds *= 2
        if self.window in self.scenario.get("uniformly", ()):
            seconds *= 2
        if self.scenario["who"] != "stopped":
            time.sleep(seconds)
        else:
            for _ in range(round(seconds / 0.001)):
                time.sleep(0.001)  # one long sleep would go on while the process is stopped


def slow_ranks(scenario: dict[str, Any], window: int) -> list[int]:
    """Which ranks a window has been planned to be slow for."""
    chosen = random.Random(f"{scenario.get('seed', 0)} {window}").randrange(RANKS)
    if scenario["who"] == "node":
        return [0, 1] if chosen < 2 else [2, 3]
    return [] if scenario["who"] == "nobody" else [chosen]


class Data(Dataset):
    def __init__(self, paced: Paced) -> None:
        self.paced = paced

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.paced.work("data")
        return torch.ones(8)


class Model(L.LightningModule):
    def __init__(self, paced: Paced) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))  # sent around at the beginning of every forward pass
        self.paced = paced

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.paced.work("compute")
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Windows(L.Callback):
    """Asks for a report after every window of steps; all ranks change their pace where it is made."""

    def __init__(self, paced: Paced, detection: StragglerDetection, folder: Path, shared: Any) -> None:
        self.paced, self.detection, self.folder, self.shared = paced, detection, folder, shared
        self.steps = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        detection, report = self.detection._participant, self.detection._participant._report

        def counted() -> None:
            report()
            self.paced.window += 1
            self.steps = 0
            if trainer.is_global_zero:
                self._write()
            trainer.should_stop = self.paced.window == self.paced.scenario["windows"]
            self.shared[RANKS] = self.paced.window

        detection._report = counted
        self.shared[self.paced.rank] = os.getpid()
        measured = detection._time
        take = measured.take

        def blind() -> Sample:
            sample = take()
            is_blind = self.paced.scenario.get("blind", {}).get(str(self.paced.rank)) == self.paced.window
            return Sample.of(torch.empty(0, 3).double()) if is_blind else sample

        measured.take = blind

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.paced.work("callback")
        self.steps += 1
        if trainer.is_global_zero and self.steps == STEPS:
            joining._active.fit.agreement.request("straggler report", {}, Needs.TRAINING)

    def _write(self) -> None:
        report = self.detection.report
        assert report is not None
        found = {
            kind: {each.rank: [each.cause, each.device_id.node, each.score] for each in report.slow(kind, 0.7)}
            for kind in ("relative", "individual")
        }
        numbers = {name: getattr(report, name).tolist() for name in ("relative", "individual", "seconds")}
        with open(self.folder / "reports", "a") as file:
            file.write(json.dumps({**found, "missing": report.missing, "scores": numbers}) + "\n")


def rank_main(rank: int, scenario: dict[str, Any], folder: str, port: int, shared: Any) -> None:
    nodes = scenario.get("nodes", 1)
    per_node = RANKS // nodes
    node = rank // per_node
    os.environ.update(
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(per_node),
        RANK=str(rank),
        LOCAL_RANK=str(rank % per_node),
        GROUP_RANK=str(node),
        TORCHELASTIC_RUN_ID="test",
    )
    fd = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    torch.set_num_threads(1)
    platform.node = lambda: f"node-{node}"
    paced = Paced(scenario, rank)
    # Later than all of this, but not so late that steps of this length would not all be timed.
    detection = StragglerDetection(
        150.0, stop_if_detected=False, run_dir=f"{folder}/run", **scenario.get("settings", {})
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=nodes,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Windows(paced, detection, Path(folder), shared), detection],
    )
    trainer.fit(Model(paced), DataLoader(Data(paced)))


def stop_for_a_while(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def reports(scenario: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Runs a scenario; what rank 0 has reported of every window."""
    shared, port = CONTEXT.Array("i", RANKS + 1), free_port()  # the process of every rank, and the window
    ranks = [
        CONTEXT.Process(target=rank_main, args=(rank, scenario, str(folder), port, shared)) for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + 250
    try:
        while any(each.is_alive() for each in ranks) and not any(each.exitcode for each in ranks):
            assert time.monotonic() < deadline, (folder / "output").read_text()
            if scenario["who"] == "stopped" and all(shared[:RANKS]):
                stop_for_a_while(shared[slow_ranks(scenario, shared[RANKS])[0]])
            else:
                time.sleep(0.05)
    finally:
        for each in ranks:
            if any(other.exitcode != 0 for other in ranks):
                each.kill()
            each.join()
    assert [each.exitcode for each in ranks] == [0] * RANKS, (folder / "output").read_text()
    return [json.loads(line) for line in (folder / "reports").read_text().splitlines()]


def kept_pace(report: dict[str, Any], slow: list[int]) -> bool:
    """Whether the machine let the healthy ranks sleep and wake as planned, as one that is too busy does not."""
    seconds = report["scores"]["seconds"]
    return all(sum(seconds[rank]) < 1.4 * (AT + 2 * PACE) for rank in range(RANKS) if rank not in slow)


# -- who is named ------------------------------------------------------------------------------------------------------

WHO: dict[str, dict[str, Any]] = {
    "in its computing": {"who": "rank", "at": "compute"},
    "in its data": {"who": "rank", "at": "data"},
    "in a callback": {"who": "rank", "at": "callback"},
    "because it is stopped again and again": {"who": "stopped", "at": "compute"},
    "because of its node": {"who": "node", "at": "compute", "nodes": 2},
}
SHORT = {"in its data": 3, "because of its node": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "windows"),
    [
        *(pytest.param(WHO[name], windows, id=name) for name, windows in SHORT.items()),
        *(pytest.param(each, 20, id=f"{name}, often", marks=pytest.mark.campaign) for name, each in WHO.items()),
    ],
)
def test_a_rank_is_named_that_is_half_as_fast(scenario: dict[str, Any], windows: int, tmp_path: Path) -> None:
    found = reports({**scenario, "windows": windows}, tmp_path)
    assert len(found) == windows
    shown = 0
    for window, report in enumerate(found):
        slow = slow_ranks(scenario, window)
        if kept_pace(report, slow):
            shown += 1
            assert {int(rank) for rank in report["relative"]} == set(slow), found
            for rank, (cause, node, _) in report["relative"].items():
                assert cause == CAUSES[scenario["at"]], found
                assert node == f"node-{int(rank) // (RANKS // scenario.get('nodes', 1))}"
    assert shown > windows / 2, f"healthy ranks were slow: the machine is too busy, or waiting is counted: {found}"


@pytest.mark.parametrize("windows", [4, pytest.param(20, marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_all_are_slower_than_they_were_and_none_than_the_others(windows: int, tmp_path: Path) -> None:
    later = range(windows // 2, windows)
    found = reports({"who": "nobody", "at": "compute", "windows": windows, "uniformly": list(later)}, tmp_path)
    assert [report["relative"] for report in found] == [{}] * windows, found
    if kept_pace(found[0], []):  # it is what the others are compared with
        assert [sorted(found[window]["individual"]) for window in later] == [["0", "1", "2", "3"]] * len(later), found


@pytest.mark.slow
def test_a_rank_without_samples_is_missing_and_spoils_nothing(tmp_path: Path) -> None:
    found = reports({"who": "rank", "at": "compute", "windows": 2, "blind": {"3": 0}}, tmp_path)
    assert [report["missing"] for report in found] == [[3], []]
    assert all(math.isfinite(score) for score in found[0]["scores"]["relative"][:3])
    assert "No steps were measured on rank 3." in (tmp_path / "output").read_text()


# -- runs that are killed, stopped and resumed -------------------------------------------------------------------------

CALLBACKS = ["preemption", "auto_resume", "straggler_detection"]
DEVICE = "cpu|fakegpu:1"
REPORTS: dict[str, Any] = {"report_time_interval": 0.1, "stop_if_detected": False}


def found_in(config: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(RunDirectory(config["run_dir"]).ledger) if event["event"] == kind]


def slow_rank(rank: int, seconds: float = 0.05) -> list[dict[str, Any]]:
    """What makes a rank of the test program slow in every step, as long as it runs."""
    return [{"at": "train", "step": step, "rank": rank, "do": "sleep", "seconds": seconds} for step in range(80)]


def to_the_end(config: dict[str, Any], tmp: Path, restarts: int = 1) -> tuple[list[int | None], str]:
    """Like ``run``, but a rank that ends has no other one killed, and something starts them again."""
    ranks = Ranks(config, tmp, {"TORCHELASTIC_MAX_RESTARTS": str(restarts)})
    return ranks.wait(kill_rest=False), ranks.text()


REPORTED: dict[str, dict[str, Any]] = {
    "one process": {},
    "two ranks": {"trainer": {"devices": 2}},
    "manual optimization": {"manual": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}},
    "gradient clipping": {"trainer": {"gradient_clip_val": 0.1}},
    "validation within the epoch": {"validation": True, "plateau": True, "trainer": {"val_check_interval": 4}},
}


@pytest.mark.slow
@pytest.mark.also_as_on_gpu
@pytest.mark.parametrize(
    "options", some(REPORTED, "manual optimization", "accumulation", "gradient clipping", "validation")
)
def test_reports_change_nothing_in_a_run_that_is_killed_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    found = killed_and_resumed(
        tmp_path,
        [{"at": "train", "step": 27}],
        **options,
        callbacks=CALLBACKS,
        straggler_detection={**REPORTS, "report_time_interval": 0.02},
        step_s=0.005,
    )
    assert found[2].count("Straggler report processing time") >= 2
    assert found[:2] == undisturbed(tmp_path, **options)


@pytest.mark.slow
def test_a_validation_that_takes_a_rank_longer_makes_no_straggler_of_it(tmp_path: Path) -> None:
    longer = [{"at": "validation", "step": step, "rank": 1, "do": "sleep", "seconds": 0.03} for step in range(49)]
    config = make(
        tmp_path,
        "run",
        callbacks=CALLBACKS,
        events=longer,
        step_s=0.02,
        **{**REPORTED["validation within the epoch"], "trainer": {"devices": 2, "val_check_interval": 2}},
        straggler_detection={**REPORTS, "calc_individual_gpu_perf": False},
    )
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert text.count("Straggler report processing time") >= 2
    assert found_in(config, "stragglers") == [], text


@pytest.mark.slow
def test_a_resumed_run_knows_how_fast_it_was(tmp_path: Path) -> None:
    config = make(tmp_path, "run", callbacks=CALLBACKS, straggler_detection=REPORTS)
    kill = [{"at": "train", "step": 30, "do": "SIGKILL"}]
    assert run({**config, "events": kill, "step_s": 0.015}, tmp_path / "run")[0] == [-signal.SIGKILL]
    assert found_in(config, "stragglers") == []
    codes, text = run({**config, "step_s": 0.1}, tmp_path / "run")
    assert codes == [0], text
    first = found_in(config, "stragglers")[0]
    assert first["step"] > 25
    assert "of its own best speed, in compute" in first["reason"]
    assert "Some GPUs performance dropped. Affected ranks: {StragglerId(rank=0, node=" in text


@pytest.mark.slow
def test_a_run_stops_once_for_a_node_that_is_too_slow(tmp_path: Path) -> None:
    options = {"trainer": {"devices": 1, "num_nodes": 2, "max_epochs": 5}, "own_nodes": True}
    config = make(
        tmp_path,
        "run",
        **options,
        callbacks=["fault_tolerance", *CALLBACKS],
        straggler_detection={"report_time_interval": 0.4, "calc_individual_gpu_perf": False},
        step_s=0.02,
        events=slow_rank(1),
    )
    codes, text = to_the_end(config, tmp_path / "run")
    assert codes == [1, 1], text
    (first, named), (stopped,) = found_in(config, "stragglers"), found_in(config, "straggler_stop")
    assert first["ranks"] == named["ranks"] == stopped["ranks"] == [1], "after the second report in a row"
    assert named["devices"] == stopped["devices"]
    assert re.fullmatch(rf"node-1 \(({DEVICE})\)", *named["devices"])
    assert named["step"] <= stopped["step"] < 80
    assert found_in(config, "saved")[-1]["step"] == stopped["step"]
    assert found_in(config, "saved")[-1]["reason"] == "straggler"
    outcome = RunDirectory(config["run_dir"]).fit(0).outcome
    assert outcome is not None
    assert outcome.status == "failed"
    assert re.fullmatch(
        rf"StragglersFound: too slow: rank 1 on \S+ \(({DEVICE})\) at 0\.\d\d of the other ranks' speed, in compute",
        outcome.reason,
    )
    (asked,) = found_in(config, "workload_request")
    assert (asked["rank"], asked["node"], asked["action"]) == (1, "node-1", "exclude_this_node")
    assert "rank 1 on node-1" in asked["reason"]

    codes, text = to_the_end(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert f"Resuming from step {stopped['step']}" in text
    assert "The run has already been stopped because of these devices, and continues with them." in text
    assert len(found_in(config, "straggler_stop")) == 1
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


@pytest.mark.slow
def test_a_run_that_nothing_starts_again_goes_on_with_its_stragglers(tmp_path: Path) -> None:
    """A callback that rank 0 alone has, say: the run would end for good."""
    config = make(
        tmp_path,
        "run",
        callbacks=CALLBACKS,
        straggler_detection={"report_time_interval": 0.4, "calc_individual_gpu_perf": False},
        step_s=0.02,
        events=slow_rank(0),
        trainer={"devices": 2},
    )
    codes, text = to_the_end(config, tmp_path / "run", restarts=0)
    assert codes == [0, 0], text
    first = found_in(config, "stragglers")[0]
    assert (first["ranks"], first["slowest"]) == ([0], 0)
    assert 0 < first["waited"] < first["step"]
    assert found_in(config, "straggler_stop") == []
    found = account(ledger.read_ledger(RunDirectory(config["run_dir"]).ledger)).by_category
    assert found["productive"] > found["straggler_wait"] >= first["waited"] - 0.01
    assert text.count("The run is not stopped: nothing would restart it") == 1


def test_a_fit_that_goes_back_goes_on_with_its_reports(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        "run",
        callbacks=CALLBACKS,
        straggler_detection=REPORTS,
        step_s=0.01,
        events=[{"at": "train", "step": 30, "do": "go_back", "once": True}],
    )
    codes, text = run(config, tmp_path / "run")
    assert codes == [0], text
    assert "GPU individual performance: at least " in text.partition("Resuming")[2]
    assert result(config) == undisturbed(tmp_path)[0]


# -- in one process ----------------------------------------------------------------------------------------------------


class Short(L.LightningModule):
    """Forty batches."""

    def __init__(self, manual: bool = False, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 1)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.004)
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(4 * self.seconds)

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.seconds)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(160.0).reshape(40, 4) / 160), collate_fn=self.collate)

    def collate(self, samples: Any) -> Any:
        time.sleep(self.seconds)
        return default_collate(samples)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class ReportsAt(L.Callback):
    """Has a report made right before some batches, without the detour over the agreement."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.batches:
            act("straggler report")


def trainer_with(tmp: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp,
            "callbacks": list(callbacks),
            **options,
        }
    )


@pytest.mark.parametrize(
    ("manual", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"accumulate_grad_batches": 4}),
        (False, {"gradient_clip_val": 0.1}),
        (False, {"val_check_interval": 1}),  # else the median has none
        (False, {"profiling_interval": 3}),
    ],
    ids=str,
)
@pytest.mark.slow_but_for("True-{}")
def test_the_sections_of_a_step_are_told_apart(manual: bool, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {"profiling_interval": options.pop("profiling_interval", 1)}
    validation = DataLoader(TensorDataset(torch.ones(2, 4))) if "val_check_interval" in options else None
    weights = []
    detection = StragglerDetection(1e6, **settings)
    for own, seconds in (([], 0.0), ([ReportsAt(20, 39), detection], 0.012)):
        module = Short(manual, seconds)
        trainer_with(tmp_path, *own, num_sanity_val_steps=0, **options).fit(module, val_dataloaders=validation)
        weights.append(module.net.weight.tolist())
    assert weights[0] == weights[1]
    report = detection.report
    assert report is not None
    assert report.missing == []
    data, compute, callbacks = report.seconds[0].tolist()
    assert data >= 0.012
    assert compute >= 0.004
    assert callbacks >= 0.024
    # A busy machine draws out all sleeps alike.
    assert callbacks < 2 * data + 0.04, "a validation has been taken for what every step does"
    assert report.relative.tolist() == [1.0]


def test_every_logger_gets_the_scores_at_lightnings_step(tmp_path: Path) -> None:
    detection = StragglerDetection(1e6)
    loggers = [CSVLogger(tmp_path, name, flush_logs_every_n_steps=1) for name in ("first", "second")]
    options = {"logger": loggers, "log_every_n_steps": 1, "accumulate_grad_batches": 4}
    trainer_with(tmp_path, ReportsAt(12, 30), detection, **options).fit(Short())
    names = [f"gpu_{kind}_perf/{which}" for kind in ("relative", "individual") for which in ("min", "median", "max")]
    for logger in loggers:
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        scored = [row for row in rows if row[names[0]]]
        assert [row["step"] for row in scored] == ["3", "7"]
        assert all(0 < float(row[name]) <= 1 for row in scored for name in names)
        assert {row["step"] for row in scored} <= {row["step"] for row in rows if row["loss"]}


@pytest.mark.slow
def test_loggers_get_only_what_is_asked_for(tmp_path: Path) -> None:
    kept = {}
    for name, settings in {
        "no relative": {"calc_relative_gpu_perf": False},
        "no individual": {"calc_individual_gpu_perf": False},
        "nothing": {"enable_logging": False},
    }.items():
        logger = CSVLogger(tmp_path, name, flush_logs_every_n_steps=1)
        trainer_with(tmp_path, ReportsAt(30), StragglerDetection(1e6, **settings), logger=logger).fit(Short())
        file = Path(logger.log_dir) / "metrics.csv"
        columns = file.read_text().splitlines()[0].split(",") if file.exists() else []
        kept[name] = {column.partition("/")[0] for column in columns if column.startswith("gpu_")}
    assert kept == {"no relative": {"gpu_individual_perf"}, "no individual": {"gpu_relative_perf"}, "nothing": set()}


def test_a_report_right_behind_another_has_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Twice(ReportsAt):
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            super().on_train_batch_start(*args)

    detection = StragglerDetection(1e6, gpu_relative_perf_threshold=1.0, gpu_individual_perf_threshold=1.0)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    with listening(caplog):
        trainer_with(tmp_path, Twice(30), detection, logger=logger).fit(Short())
    assert detection.report is not None
    assert detection.report.missing == [0]
    assert "No steps were measured on rank 0." in caplog.text
    assert "STRAGGLER DETECTION WARNING" not in caplog.text
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 2


@contextlib.contextmanager
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    logger = logging.getLogger("lightning_resilience")
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.INFO, "lightning_resilience"):
            yield
    finally:
        logger.propagate = before


@pytest.mark.slow_but_for("None")
@pytest.mark.parametrize("error", [None, RuntimeError, SystemExit])
def test_nothing_is_left_on_the_collectives(
    error: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert vars(torch.distributed.Work)["wait"] is not before
            if error is not None and batch_idx == 20:
                raise error("on purpose")

    class Measuring(StragglerReports):
        """One rank waits for nobody, and has nothing replaced."""

        def start(self) -> None:
            super().start()
            self._comm_wait.start()

    monkeypatch.setattr("lightning_resilience.callbacks.straggler_detection.StragglerReports", Measuring)
    before = vars(torch.distributed.Work)["wait"]
    detection = StragglerDetection(1e6)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        trainer_with(tmp_path, ReportsAt(10), detection, Fails()).fit(Short())
    assert vars(torch.distributed.Work)["wait"] is before
    assert detection._participant is None


@pytest.mark.slow
def test_a_callback_with_a_report_can_be_copied(tmp_path: Path) -> None:
    detection = StragglerDetection(1e6)
    trainer_with(tmp_path, ReportsAt(30), detection).fit(Short())
    for twin in (copy.deepcopy(detection), pickle.loads(pickle.dumps(detection))):
        assert twin.report is not None
        assert twin.report.relative.tolist() == [1.0]
        trainer_with(tmp_path, ReportsAt(30), twin).fit(Short())


def test_what_most_ranks_are_is_no_straggler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Longer sequences, say: the only rank is slower than it was, which is said, and goes on."""

    class Slow(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx >= 10:
                time.sleep(0.1)

    callbacks = [ReportsAt(10, 20, 30), Slow(), AutoResume(), StragglerDetection(1e6)]
    with listening(caplog):
        trainer_with(tmp_path, *callbacks, limit_train_batches=32).fit(Short())
    assert caplog.text.count("Some GPUs performance dropped") == 2
    assert caplog.text.count("so none counts as a straggler") == 1
    assert found_in({"run_dir": tmp_path / "resilience"}, "straggler_stop") == []


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_run_is_not_stopped_in_a_bad_step(is_bad: bool) -> None:
    """What was saved then would not be judged again."""
    policy: Any = StragglerReports.__new__(StragglerReports)
    policy.session = MagicMock(**{"saver.waits.return_value": is_bad, "saver.save.return_value": None})
    policy._stop(MagicMock())
    assert policy.session.saver.save.called is not is_bad


@pytest.mark.parametrize(("slow", "asked"), [([0], [0]), ([0, 1], [1]), ([0, 1, 2], []), ([3], [])])
def test_those_that_are_not_new_count_for_what_most_ranks_are(
    slow: list[int], asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks; for the devices of some of them the run was stopped before."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    places = [DeviceId("n", f"GPU {rank}") for rank in range(4)]
    requests: list[dict[str, Any]] = []
    agreement = SimpleNamespace(request=lambda kind, payload, needs: requests.append(payload))
    measuring = SimpleNamespace(
        _stopped_for={str(places[3])} | ({str(places[0])} if len(slow) > 1 else set()),
        _device_ids=places,
        _nodes=4,
        _warn_once=lambda line: None,
        session=SimpleNamespace(
            fit=SimpleNamespace(agreement=agreement, run=RunDirectory(tmp_path)),
            selector=SimpleNamespace(uses_global=True),
        ),
    )
    stragglers = [Straggler(rank, places[rank], "relative", 0.5, "compute") for rank in slow]
    StragglerReports._consider_stopping(measuring, stragglers)
    assert [payload["ranks"] for payload in requests] == ([asked] if asked else [])


@pytest.mark.parametrize(
    ("nodes", "cause", "why"),
    [
        (1, "compute", "there is no other node to continue with"),
        (2, "callbacks", "the callbacks that make it slow would take as long on any other node"),
        (2, "compute", None),
    ],
)
def test_a_run_is_stopped_only_for_what_another_node_can_cure(
    nodes: int, cause: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    requests: list[Any] = []
    said: list[str] = []
    session = SimpleNamespace(
        fit=SimpleNamespace(
            agreement=SimpleNamespace(request=lambda *request: requests.append(request)), run=RunDirectory(tmp_path)
        ),
        selector=SimpleNamespace(uses_global=True),
    )
    places = [DeviceId(f"n{rank % nodes}", f"GPU {rank}") for rank in range(2)]
    measuring = SimpleNamespace(
        _stopped_for=set(), _device_ids=places, _nodes=nodes, _warn_once=said.append, session=session
    )
    StragglerReports._consider_stopping(measuring, [Straggler(0, places[0], "relative", 0.5, cause)])
    assert len(requests) == (why is None)
    assert all(str(why) in line for line in said)
    assert len(said) == len(requests) ^ 1


@pytest.mark.parametrize("spares", [[], ["n2"]])
def test_a_run_that_needs_its_slow_node_is_not_stopped_for_nothing(
    spares: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    Board(tmp_path / "decision.json", "").publish(Plan("", "run", 3, 0, nnodes="2", node="n0", spares=spares))
    requests: list[Any] = []
    said: list[str] = []
    session = SimpleNamespace(
        fit=SimpleNamespace(
            agreement=SimpleNamespace(request=lambda *request: requests.append(request)), run=RunDirectory(tmp_path)
        ),
        selector=SimpleNamespace(uses_global=True),
    )
    places = [DeviceId("n0", "cpu"), DeviceId("n1", "cpu")]
    measuring = SimpleNamespace(
        _stopped_for=set(), _device_ids=places, _nodes=2, _warn_once=said.append, session=session
    )
    StragglerReports._consider_stopping(measuring, [Straggler(1, places[1], "relative", 0.5, "compute")])
    assert len(requests) == len(spares)
    needs = "it needs 2 nodes, and no launch --spare waits"
    assert said == ([] if spares else [f"The run is not stopped, and continues with its stragglers: {needs}."])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"report_time_interval": value}, "report_time_interval must be") for value in (0, -1.0, math.nan, math.inf)),
        ({"calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False}, "both off"),
        ({"num_gpu_perf_scores_to_print": -1}, "num_gpu_perf_scores_to_print must not be negative"),
        *(({"gpu_relative_perf_threshold": value}, "gpu_relative_perf_threshold must be") for value in (-0.1, 1.1)),
        ({"gpu_individual_perf_threshold": math.nan}, "gpu_individual_perf_threshold must be"),
        ({"profiling_interval": 0}, "profiling_interval must be at least 1"),
        ({"backend": "cuda"}, "backend must be 'auto', 'timer', 'device_events' or 'cupti', not 'cuda'"),
        ({"min_consecutive_reports": 0}, "min_consecutive_reports must be at least 1"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StragglerDetection(**arguments)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("cupti", "measures CUDA devices, and this fit runs on cpu"),
        ("device_events", "needs a device with timing events, not cpu"),
    ],
)
def test_a_backend_that_does_not_work_here_is_refused(backend: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"backend='{backend}' {why}"):
        trainer_with(tmp_path, StragglerDetection(backend=backend)).fit(Short())
    assert joining._active is None
    trainer_with(tmp_path, StragglerDetection(backend="timer")).fit(Short())


def test_fast_dev_run_measures_nothing(tmp_path: Path) -> None:
    detection = StragglerDetection(1e-6)
    trainer_with(tmp_path, detection, fast_dev_run=3).fit(Short())
    assert detection.report is None
    assert list(tmp_path.iterdir()) == []


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_scores_are_printed_in_the_layout_of_nvrx() -> None:
    scores = torch.tensor([0.9, math.nan, 0.4, 1.0, 0.5, 0.8])
    places = [DeviceId(f"n{rank // 2}", "cpu") for rank in range(6)]
    assert straggler_reports._formatted(scores, places, 2) == (
        " Worst performing 2/5 ranks:\n"
        "  Rank=2 Node=n1 Score=0.40\n"
        "  Rank=4 Node=n2 Score=0.50\n"
        " Best performing 2/5 ranks:\n"
        "  Rank=3 Node=n1 Score=1.00\n"
        "  Rank=0 Node=n0 Score=0.90\n"
    )
    assert straggler_reports._formatted(scores, places, 3).splitlines() == [
        f"  Rank={rank} Node=n{rank // 2} Score={scores[rank]:.2f}" for rank in (2, 4, 5, 0, 3)
    ]


# -- NVRx's profiler of kernels, without a device ----------------------------------------------------------------------

KERNELS = "nvidia_resiliency_ext.attribution.straggler.cupti", "nvidia_resiliency_ext.straggler.cupti"


class Manager:
    """What is used of NVRx's ``CuptiManager``, of which a process may have one; made anew for each test."""

    fails: Exception | None = None
    made: list[Manager]

    def __init__(self) -> None:
        if self.made:
            raise RuntimeError("Only one CuptiProfiler instance is allowed.")
        self.made.append(self)
        self.calls: list[str] = []
        self.results: dict[str, Any] = {}

    def initialize(self) -> None:
        if self.fails is not None:
            raise self.fails

    def start_profiling(self) -> None:
        self.calls.append("start")

    def stop_profiling(self) -> None:
        self.calls.append("stop")

    def get_results(self) -> dict[str, Any]:
        return self.results

    def reset_results(self) -> None:
        self.results = {}

    def shutdown(self) -> None:
        raise AssertionError("kernels may be under way")


def times(median: float, number: int) -> Any:
    return SimpleNamespace(median=median, avg=2 * median, num_calls=number)


def provide(monkeypatch: pytest.MonkeyPatch, name: str | None, **options: Any) -> list[Manager]:
    """Makes this module of NVRx the only one that can be imported; the managers that it will have made."""
    made: list[Manager] = []
    manager = type("CuptiManager", (Manager,), {"made": made, **options})
    for each in KERNELS:
        monkeypatch.setitem(sys.modules, each, SimpleNamespace(CuptiManager=manager) if each == name else None)
    monkeypatch.setattr(_nvrx, "_kernel_profiler", None)
    return made


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_taken_from_whichever_nvrx_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = provide(monkeypatch, name)
    profiler, problem = _nvrx.kernel_profiler()
    assert problem is None
    assert profiler is not None
    (manager,) = made
    profiler.allow(100)
    profiler.start()
    profiler.stop()
    manager.results = {"gemm": times(3.0, 10), "ncclDevKernel_AllReduce": times(90.0, 10)}
    assert profiler.take() == {"gemm": (3.0, 60.0)}
    assert profiler.take() == {}
    profiler.start()
    profiler.close()
    profiler.start()
    assert manager.calls == ["start", "stop"] * 2, "it measures no more"


def test_why_kernels_cannot_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, None)
    assert _nvrx.kernel_profiler() == (None, "nvidia-resiliency-ext is not installed")
    for error in (ImportError("no libcupti"), OSError("no libcupti"), RuntimeError("no libcupti")):
        provide(monkeypatch, KERNELS[1], fails=error)
        profiler, problem = _nvrx.kernel_profiler()
        assert profiler is None
        assert problem == f"NVRx's profiler does not start ({type(error).__name__}: no libcupti)"


def test_kernels_are_profiled_in_few_steps_of_a_report() -> None:
    now = [0.0]
    manager = type("CuptiManager", (Manager,), {"made": []})()
    profiler = _nvrx.KernelProfiler(manager, lambda: now[0])
    for each_s, steps in ((0.001, 32), (0.5, 4), (100.0, 1)):
        assert profiler.allow(100) == (32, 2)
        manager.calls.clear()
        for _ in range(100):
            profiler.start()
            now[0] += each_s
            profiler.stop()
        assert manager.calls == ["start", "stop"] * steps


def test_the_manager_outlives_the_interpreter() -> None:
    """CUPTI goes on to call it for its buffers."""
    program = f"""
import sys, types
class CuptiManager:
    def initialize(self): pass
    def __del__(self): print("gone", flush=True)
sys.modules[{KERNELS[0]!r}] = types.SimpleNamespace(CuptiManager=CuptiManager)
from lightning_resilience import _nvrx
assert _nvrx.kernel_profiler()[0] is not None
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


class Event:
    """An event of a device that does everything at once."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


class Fit:
    """As much of a session as measuring needs, on a device that is said to be there; other ranks say what is given."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tmp: Path, others: list[Any], device: str = "cuda", **module: Any
    ) -> None:
        module = module or {"Event": Event, "current_stream": lambda: None}
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**module))
        strategy = SimpleNamespace(root_device=torch.device(device, 0))
        self.trainer = SimpleNamespace(strategy=strategy, world_size=1, global_step=20, loggers=[], profiler=None)
        self.others, self.rank, self.index = others, 0, 0
        self.devices = [DeviceId("n", "GPU 1")]
        self.time = SimpleNamespace(reached=0)
        self.ledger = Ledger(tmp / "ledger", 0)

    def gather(self, value: Any) -> list[Any]:
        return [value, *(self.others if value is None or isinstance(value, str) else [])]


def measuring(fit: Fit, **settings: Any) -> Any:
    settings = {"enable_logging": False, "stop_if_detected": False, **settings}
    detection = StragglerDetection(**settings)
    measured: Any = detection._participate(SimpleNamespace(fit=fit))
    measured.callback = detection
    return measured


def a_step(measured: Any, *seconds: float) -> None:
    measured.before_batch()
    for went_on, took in zip(
        (lambda: measured._time.enter(2), measured.batch_begins, measured.batch_done), seconds, strict=True
    ):
        Event.now += took
        went_on()


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cuda", "auto", "device_events"),
        ("cuda", "device_events", "device_events"),
        ("cuda", "timer", "timer"),
        ("cuda", "cupti", "cupti"),
        ("xpu", "auto", "device_events"),
        ("xpu", "device_events", "device_events"),
        ("xpu", "timer", "timer"),
    ],
)
def test_events_are_used_where_a_device_has_them(
    device: str, backend: Any, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = provide(monkeypatch, KERNELS[0])
    measured = measuring(Fit(monkeypatch, tmp_path, [None], device), backend=backend)
    assert measured.backend == expected
    assert isinstance(measured._time, HostStepTimer if expected == "timer" else DeviceStepTimer)
    assert (measured._profiler is not None) == (len(made) == 1) == (expected == "cupti")
    measured.leave()


def test_a_device_without_events_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fit = Fit(monkeypatch, tmp_path, [None], "mps", Event=Event)
    assert measuring(fit).backend == "timer"
    with pytest.raises(ValueError, match="backend='device_events' needs a device with timing events"):
        measuring(fit, backend="device_events")
    with pytest.raises(ValueError, match="backend='cupti' measures CUDA devices, and this fit runs on mps"):
        measuring(fit, backend="cupti")


@pytest.mark.parametrize(("works", "others"), [(False, [None]), (True, ["no libcupti"])])
def test_cupti_is_refused_where_a_rank_has_none(
    works: bool, others: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provide(monkeypatch, KERNELS[0] if works else None)
    with pytest.raises(ValueError, match="backend='cupti' does not work here: n"):
        measuring(Fit(monkeypatch, tmp_path, others), backend="cupti")


def test_slow_kernels_are_told_of_though_the_steps_are_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = provide(monkeypatch, KERNELS[0])
    fit = Fit(monkeypatch, tmp_path, [None])
    measured = measuring(fit, backend="cupti")
    (manager,) = made
    for factor in (1.0, 2.0):
        manager.calls.clear()
        manager.results = {"gemm": times(3.0 * factor, 5), "ncclDevKernel_AllReduce": times(9.0, 5)}
        for _ in range(7):  # the first is not measured, and the last not over
            a_step(measured, 0.25, 0.5, 1.0)
        measured._report()
        assert manager.calls == ["start", "stop"] * (6 if factor == 1.0 else 7), "only for steps that are timed"
        assert [*measured._history.kernels.values()] == [3.0]
        report = measured.callback.report
        assert report.seconds[0].tolist() == [0.25, 1.0, 0.5]
        assert (report.individual.tolist(), report.step_individual.tolist()) == ([1 / factor], [1.0])
    (named,) = read_ledger(tmp_path / "ledger")
    assert named["reason"] == "rank 0 on n (GPU 1) at 0.50 of its own best speed, in compute"


def test_a_second_fit_of_a_process_profiles_kernels_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = provide(monkeypatch, KERNELS[0])
    for _ in range(2):
        measured = measuring(Fit(monkeypatch, tmp_path, [None]), backend="cupti")
        assert measured.backend == "cupti"
        for _ in range(3):
            a_step(measured, 0.25, 0.5, 1.0)
        measured.leave()
    assert made[0].calls == ["start", "stop"] * 4


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_kernels_are_not_profiled_beside_pytorchs_profiler(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = provide(monkeypatch, KERNELS[0])
    fit = Fit(monkeypatch, tmp_path, [None])
    fit.trainer.profiler = importlib.import_module(f"{package}.profilers").PyTorchProfiler()
    with listening(caplog):
        measured = measuring(fit, backend="cupti")
    assert (measured.backend, measured._profiler, made) == ("device_events", None, [])
    assert caplog.text.count("CUPTI allows only one profiler, and the Trainer uses PyTorch's") == 1


def test_it_is_said_where_no_kernel_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU in whose process PyTorch's profiler has been on: CUPTI starts and stops, and shows nothing."""
    made = provide(monkeypatch, KERNELS[0])
    measured = measuring(Fit(monkeypatch, tmp_path, [None]), backend="cupti")
    with listening(caplog):
        for results, lines in (({"gemm": times(3.0, 5)}, 0), ({}, 1), ({}, 1)):
            made[0].results = results
            for _ in range(4):
                a_step(measured, 0.25, 0.5, 1.0)
            measured._report()
            assert measured.callback.report.of_kernels == bool(results)
            assert caplog.text.count("CUPTI reports no kernels of rank 0") == lines


@pytest.mark.parametrize("what", ["PyTorch's profiler is active", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS"])
def test_a_run_goes_on_where_kernels_are_profiled_no_more(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Since the script has begun to profile, or another program does; scores are of the steps then."""
    made = provide(monkeypatch, KERNELS[0])
    fit = Fit(monkeypatch, tmp_path, [None])
    measured = measuring(fit, backend="cupti")
    made[0].results = {"gemm": times(3.0, 5)}

    def fails() -> None:
        raise RuntimeError(what)

    if what.startswith("CUPTI"):
        made[0].start_profiling = fails  # type: ignore[method-assign]
        profiling: Any = contextlib.nullcontext()
    else:
        profiling = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with listening(caplog):
        with profiling:
            for _ in range(4):
                a_step(measured, 0.25, 0.5, 1.0)
        for _ in range(2):
            for _ in range(4):
                a_step(measured, 0.25, 0.5, 1.0)
            measured._report()
    report = measured.callback.report
    assert not report.of_kernels
    assert report.relative.tolist() == report.individual.tolist() == [1.0]
    assert caplog.text.count(f"Kernels are no longer profiled on rank 0: {what}") == 1
    assert made[0].calls == []
