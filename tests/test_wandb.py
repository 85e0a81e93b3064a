"""What Weights & Biases gets of stragglers, offline: one run over all restarts; scalars, table, plot and summary."""

from __future__ import annotations

import json
import os
import platform
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_resilience import wandb_panels
from lightning_resilience.detect.device_id import DeviceId
from lightning_resilience.detect.stragglers.stragglers import Report
from lightning_resilience.fit import context
from lightning_resilience.run.run_directory import RunDirectory
from tests import program
from tests.harness import CONTEXT, free_port
from tests.participants import act

wandb = pytest.importorskip("wandb")

RANKS = 2
KILLED_AT, STEPS, EVERY = 20, 48, 8
SCORES = {f"gpu_{kind}_perf/{which}": None for kind in ("relative", "individual") for which in ("min", "median", "max")}

# -- what an offline run has written -----------------------------------------------------------------------------------


def records(path: Path) -> Iterator[Any]:
    """What a ``.wandb`` file holds, up to where a kill has torn it: LevelDB's log format behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    block, header = 32768, 7
    data, at, parts = path.read_bytes(), header, b""
    assert data[:4] == b":W&B"
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + header])
        if kind == 0 or at + header + length > len(data):
            return
        parts += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def name_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


class OfflineRun:
    """One ``offline-run-*`` folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (file,) = folder.glob("*.wandb")
        self.id = folder.name.split("-", 3)[3]
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.alerts: list[tuple[str, str, str]] = []
        self.axes: dict[str, str] = {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert record.run.run_id == self.id
                self.config.update({name_of(item): json.loads(item.value_json) for item in record.run.config.update})
            elif kind == "config":
                self.config.update({name_of(item): json.loads(item.value_json) for item in record.config.update})
            elif kind == "history":
                self.history.append({name_of(item): json.loads(item.value_json) for item in record.history.item})
            elif kind == "alert":
                self.alerts.append((record.alert.level, record.alert.title, record.alert.text))
            elif kind == "metric":
                self.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif kind == "summary":
                self.summary.update({name_of(item): json.loads(item.value_json) for item in record.summary.update})

    def table(self, entry: Any) -> dict[str, Any]:
        """What a reference to a media file says."""
        return json.loads((self.folder / "files" / entry["path"]).read_text())


def offline_runs(folder: Path) -> list[OfflineRun]:
    return [OfflineRun(each) for each in sorted((folder / "wandb").glob("offline-run-*"))]


# -- a run that is killed and started again ----------------------------------------------------------------------------


def rank_main(rank: int, folder: str, port: int, identity: str, end: str) -> None:
    import lightning.pytorch as L
    from lightning.pytorch.loggers import WandbLogger

    from lightning_resilience import AutoResume, StragglerDetection

    run_dir = f"{folder}/run"
    os.environ.update(
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE="1",
        RANK=str(rank),
        LOCAL_RANK="0",
        GROUP_RANK=str(rank),
        TORCHELASTIC_RUN_ID="test",
        WANDB_MODE="offline",
        WANDB_DIR=folder,
        WANDB_SILENT="true",
        WANDB_RUN_ID=identity,
    )
    fd = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    torch.set_num_threads(1)
    platform.node = lambda: f"node-{rank}"

    wandb_panels._EVERY = 1

    class Slow(L.Callback):
        """One rank is slow from a step on, and reports are made at others, by all ranks."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            step = trainer.global_step
            if step and step % EVERY == 0:
                act("straggler report")
            if rank == 1 and step >= STEPS // 2:
                time.sleep(0.1)
            if end == "killed" and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "error" and step == KILLED_AT:
                raise RuntimeError("on purpose")

    detection = StragglerDetection(
        1e6,
        gpu_relative_perf_threshold=0.5,  # what a busy machine does to the other one is less
        gpu_individual_perf_threshold=0.3,
        stop_if_detected=False,
        run_dir=run_dir,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=RANKS,
        strategy="ddp",
        max_steps=STEPS,
        max_epochs=-1,
        logger=WandbLogger(save_dir=folder),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AutoResume(run_dir, async_save=False, every_n_train_steps=5), Slow(), detection],
    )
    config = {**program.DEFAULTS, "run_dir": run_dir, "step_s": 0.01, "fit": 0}
    L.seed_everything(1, verbose=False)
    try:
        trainer.fit(program.Module(config), program.loader(config, RANKS, rank))
    finally:
        wandb.finish()  # as at the exit of a script


def run(folder: Path, end: str) -> list[int | None]:
    given = str(folder), free_port(), RunDirectory(folder / "run").identity(), end
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, *given)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(100)
        if each.is_alive():
            each.kill()
            each.join()
    return [each.exitcode for each in ranks]


def services() -> set[int]:
    """The processes of W&B's own that this user runs."""
    found = set()
    for process in psutil.process_iter(["name", "uids"]):
        if "wandb" in (process.info["name"] or "") and process.info["uids"].real == os.getuid():
            found.add(process.pid)
    return found


@pytest.mark.parametrize(("end", "code"), [("error", 1), pytest.param("killed", -9, marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_a_restarted_run_is_one_run_with_all_that_is_known_of_its_ranks(end: str, code: int, tmp_path: Path) -> None:
    before = services()
    assert run(tmp_path, end) == [code] * RANKS, (tmp_path / "output").read_text()
    assert run(tmp_path, "") == [0] * RANKS, (tmp_path / "output").read_text()

    first, second = offline_runs(tmp_path)
    assert first.id == second.id == RunDirectory(tmp_path / "run").identity()
    history = [*first.history, *second.history] if end == "error" else second.history  # W&B loses what it has buffered
    scored = [row for row in history if "gpu_relative_perf/min" in row]
    assert [row["trainer/global_step"] for row in scored] == [*([8, 16] if end == "error" else []), 24, 32, 40]
    assert all(0 < row[name] <= 1 for row in scored for name in SCORES)
    losses = [row["trainer/global_step"] for row in history if "train_loss_step" in row]
    assert losses == list(range(0 if end == "error" else KILLED_AT, STEPS))

    assert second.axes["resilience/*"] == "trainer/global_step"
    scalars = {"goodput", "ettr", "restarts", "steps_redone", "last_save_step", "seconds/start", "seconds/productive"}
    assert {f"resilience/{name}" for name in scalars} <= second.summary.keys()
    assert second.summary["resilience/restarts"] == 1
    assert 0 < second.summary["resilience/goodput"] < second.summary["resilience/ettr"] < 1
    (shown,) = [row for row in second.history if "resilience/interruptions/path" in row]
    interruptions = second.table({"path": shown["resilience/interruptions/path"]})
    ((_, cause, _, reason, *_, start, _, _),) = interruptions["data"]
    assert interruptions["columns"][-3:] == ["start (s)", "restore (s)", "redo (s)"]
    assert (cause, reason) == ("crash", "RuntimeError: on purpose" if end == "error" else "a worker was killed")
    assert start is None if end == "killed" else start > 0, "without a watchdog nobody knows what killed ranks did"
    (summed_up,) = second.summary["interruptions"]
    assert summed_up.startswith(cause)
    charts = [row for row in second.history if "resilience/time_table/path" in row]
    bars = second.table({"path": charts[-1]["resilience/time_table/path"]})["data"]
    assert bars == sorted(bars, key=lambda bar: -bar[1])
    assert {"start", "productive"} <= {name for name, _ in bars}
    assert second.config["_wandb/visualize/resilience/time"]["panel_config"]["panelDefId"] == "wandb/bar/v0"
    went_on, *slow_ranks = second.alerts
    assert went_on == ("WARN", "Continued at step 20 after an interruption", summed_up)
    assert {(level, title) for level, title, _ in slow_ranks} == {("WARN", "Stragglers")}
    assert not [alert for alert in first.alerts if alert[1] != "Stragglers"]

    tabled = [row for row in second.history if "stragglers/ranks/path" in row]
    assert [row["trainer/global_step"] for row in tabled] == [24, 32, 40]
    table = second.table({"path": tabled[-1]["stragglers/ranks/path"]})
    assert table["columns"] == list(wandb_panels._COLUMNS)
    slow, fast = table["data"]
    assert [slow[0], slow[1], slow[-1]] == [1, "node-1", "cpu"], "the slowest first"
    assert slow[2].startswith("slow (relative): callbacks")
    assert slow[7] > 100, "milliseconds in callbacks"
    assert fast[:3] == [0, "node-0", ""]

    panel = second.config["_wandb/visualize/stragglers/nodes"]
    assert panel["panel_config"]["panelDefId"] == "wandb/lineseries/v0"
    plot = second.table({"path": tabled[-1]["stragglers/nodes_table/path"]})
    lines: dict[str, dict[int, float]] = {}
    for row in plot["data"]:
        point = dict(zip(plot["columns"], row, strict=True))
        lines.setdefault(point["lineKey"], {})[point["step"]] = point["lineVal"]
    assert sorted(lines) == ["node-0", "node-1", "threshold"]
    assert set(lines["threshold"].values()) == {0.5}
    assert all(list(line) == [8, 16, 24, 32, 40] for line in lines.values()), "what was before the kill is in the plot"
    assert lines["node-1"][40] < 0.5 < lines["node-0"][40]

    assert second.summary["stragglers"][0].startswith("rank 1 on node-1 (cpu) at 0.")
    assert second.summary["stragglers"][0].endswith(" of the other ranks' speed, in callbacks")
    wait_until_gone = time.monotonic() + 30
    while services() - before and time.monotonic() < wait_until_gone:
        time.sleep(0.1)
    assert services() - before == set()


def folds_main(folder: str, identity: str) -> None:
    import lightning.pytorch as L
    from lightning.pytorch.loggers import WandbLogger

    from lightning_resilience import AutoResume

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true", WANDB_RUN_ID=identity)
    fd = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)

    for fold in range(2):
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=WandbLogger(f"fold-{fold}", save_dir=folder, project=f"fold-{fold}"),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[AutoResume(f"{folder}/run", async_save=False)],
        )
        config = {**program.DEFAULTS, "run_dir": f"{folder}/run", "fit": fold}
        trainer.fit(program.Module(config), program.loader(config, 1, 0))
        wandb.finish()
    assert os.environ.pop("WANDB_RUN_ID") == f"{identity}-2"


@pytest.mark.campaign
def test_each_fit_of_a_script_has_a_run_of_its_own(tmp_path: Path) -> None:
    """The same one over all restarts: its id follows from the run and the number of the fit alone."""
    identity = RunDirectory(tmp_path / "run").identity()
    script = CONTEXT.Process(target=folds_main, args=(str(tmp_path), identity))
    script.start()
    script.join(100)
    assert script.exitcode == 0, (tmp_path / "output").read_text()
    assert [found.id for found in offline_runs(tmp_path)] == [identity, f"{identity}-1"]


@pytest.mark.parametrize("own", [None, "own"])
def test_each_fit_finds_an_id_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """The short version: what W&B would find in the environment, after a restart too."""
    import lightning.pytorch as L

    from lightning_resilience import AutoResume

    run_dir, found = tmp_path / "run", []
    identity = RunDirectory(run_dir).identity()

    class Looks(L.Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            found.append(os.environ["WANDB_RUN_ID"])

    for _ in range(2):
        context.fits_begun.clear()
        monkeypatch.setenv("WANDB_RUN_ID", own or identity)
        for fold in range(2):
            callbacks = [Looks(), AutoResume(run_dir, async_save=False)]
            options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = L.Trainer(accelerator="cpu", max_steps=2, callbacks=callbacks, **options)
            config = {**program.DEFAULTS, "run_dir": str(run_dir), "fit": fold}
            trainer.fit(program.Module(config), program.loader(config, 1, 0))
    assert found == [own or identity, own or f"{identity}-1"] * 2


class WandbLogger:
    """What is shown of it here is known by its name."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    @property
    def experiment(self) -> Any:
        return self

    def log(self, what: dict[str, Any]) -> None:
        self.logged.append(what)


def report_of(scores: list[float]) -> Report:
    numbers = torch.tensor(scores)
    table = torch.rand(len(scores), 3)
    places = [DeviceId(f"node-{rank // 2}", f"GPU {rank}") for rank in range(len(scores))]
    return Report(1, places, *[numbers] * 4, torch.zeros_like(numbers), *[table] * 3)


def test_table_and_plot_are_sent_when_something_has_changed_and_now_and_then() -> None:
    panels, logger = wandb_panels.Panels(), WandbLogger()
    fine, bad = report_of([1.0, 0.9, 0.95, 0.9]), report_of([1.0, 0.9, 0.95, 0.4])
    for step in range(30):
        report = bad if step in (5, 6) else fine
        panels.show([object(), logger], report, report.slow("relative", 0.7), step, 0.7)
    assert [each["trainer/global_step"] for each in logger.logged] == [0, 5, 7, 19]
    assert logger.summary == {"stragglers": []}


def test_of_many_ranks_the_slowest_are_shown_and_of_many_nodes_the_slowest_are_kept() -> None:
    scores = [0.9 + 0.1 * (rank % 7) / 7 for rank in range(5000)]
    scores[4321], scores[1234] = 0.3, float("nan")
    report = report_of(scores)
    rows = wandb_panels._rows(report, report.slow("relative", 0.7))
    assert len(rows) == 1000
    assert rows[0][:4] == [4321, "node-2160", f"slow (relative): {report.slow('relative', 0.7)[0].cause}", 0.3]
    assert 1234 not in [row[0] for row in rows], "of which nothing is known"
    panels = wandb_panels.Panels()
    for step in range(300):
        panels.show([], report_of(scores[:400]) if step < 290 else report, [], step, 0.7)
    state = panels.state_dict()
    assert len(state["steps"]) == 200
    assert len(state["nodes"]) == 100
    assert state["nodes"]["node-2160"] == [None] * 190 + [pytest.approx(0.3)] * 10
    again = wandb_panels.Panels()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state


def test_ranks_of_which_nothing_is_known_say_so() -> None:
    rows = wandb_panels._rows(report_of([float("nan"), 0.9]), [])
    assert [(row[0], row[2], row[3]) for row in rows] == [(1, "", 0.9), (0, "no steps", None)]
