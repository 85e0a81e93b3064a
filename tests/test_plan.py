"""``launch --plan`` says what a launch then does, checks it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import _nvrx
from lightning_resilience.checkpoint import capacity
from lightning_resilience.launch import otel, preflight, trainjob
from lightning_resilience.launch.cleaning import find_leftovers
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.listing import list_runs
from lightning_resilience.run.run_directory import OFF_VARIABLE, Outcome, RunDirectory
from tests.test_goodput import HUNG, launch, run_with
from tests.test_json_output import parsed
from tests.test_launch import ELASTIC, PATIENCE_S, Launcher
from tests.test_list import alive

RECORDS = f"""
import functools, json, os, sys
from lightning_resilience.launch import cli, job
def starter(settings, run_id, max_restarts):
    command, environment = job.elastic_command(settings, run_id, max_restarts)
    open("started", "w").write(json.dumps(command))
    command = [sys.executable, "-IS", "-c", {ELASTIC!r}, run_id, str(max_restarts), *settings.command]
    return command, environment
cli.Launch = functools.partial(cli.Launch, starter=starter)
cli.main(sys.argv[1:])
"""
FAILS_ONCE = """
    import json
    open("environment", "w").write(json.dumps(dict(os.environ)))
    if restart_count == 0 and not os.path.exists("failed"):
        open("failed", "w").close()
        os._exit(1)
    import threading
    told = threading.Event()
    signals.installed().subscribe(lambda signum: told.set())
    ledger.record("ready")
    told.wait(1000)
    raise signals.Interrupted("stopped")
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def planned(
    capsys: pytest.CaptureFixture[str], *arguments: str, action: str = "launch"
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Exit code, content and levels of the checks. Nothing has changed."""
    before = tree(Path.cwd())
    with pytest.raises(SystemExit) as end:
        main([action, "--plan", "--json", *arguments])
    assert tree(Path.cwd()) == before
    [found] = parsed("launch", capsys.readouterr().out)
    return int(end.value.code or 0), found, {each["name"]: each["level"] for each in found["checks"]}


def states(folder: Path) -> list[str]:
    return [each["state"] for each in json.loads(list_runs(folder, as_json=True))["runs"]]


@pytest.mark.slow  # launches for real, twice
def test_a_launch_does_what_its_plan_said(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """At first, and with what is left of the budget after a failure. While it runs, it is listed and not cleaned."""
    launcher.script(FAILS_ONCE)
    arguments = ["--in-job-restarts=5", "--max-failures-per-day=9", "--grace-period=7", "script.py", "--lr", "0.1"]
    used = []
    for number in range(2):
        exit_code, plan, _ = planned(capsys, f"--run-dir={launcher.run_directory.path}", *arguments)
        assert exit_code == 0
        used.append(plan["used"])
        assert plan["would"] == ("begin", "resume")[number]
        started = launcher.start(*arguments, program=RECORDS)
        launcher.wait_for("ready", number + 1)
        assert json.loads((launcher.folder / "started").read_text()) == plan["command"]
        got = json.loads((launcher.folder / "environment").read_text())
        assert {name: got.get(name) for name in plan["environment"]} == plan["environment"]
        last = launcher.events("job_start")[-1]
        assert last["max_restarts"] == plan["max_restarts"]
        assert f"--max-restarts={plan['max_restarts']}" in plan["command"]
        assert states(launcher.folder) == ["running"]
        found = find_leftovers(launcher.folder)
        assert launcher.run_directory.path in [path for path, _ in found.kept]
        assert not [each for each in found.leftovers if launcher.folder in each.path.parents]
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 75
        assert states(launcher.folder) == ["stopped"]
    assert [(each["in_job_restarts"], each["max_failures_per_day"]) for each in used] == [(0, 0), (1, 1)]
    assert launcher.events("launch")[0]["budget"] == plan["limits"]


def test_text_and_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, exit_code in (("print(1)\n", 0), ("print(1\n", 1)):
        (here / "train.py").write_text(text)
        with pytest.raises(SystemExit) as end:
            main(["launch", "--plan", "train.py"])
        assert end.value.code == exit_code
        said = capsys.readouterr().out
        assert ("does not compile" in said) == bool(exit_code)
        assert "--nnodes=1" in said
    assert os.listdir(here) == ["train.py"]
    with pytest.raises(SystemExit) as end:
        main(["launch", "--json", "train.py"])
    assert end.value.code == 2


def test_runs_that_would_be_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(here / "run", launch(10, 11))
    alive(run)
    exit_code, found, levels = planned(capsys, "--run-dir=run", "train.py")
    assert (exit_code, found["would"], levels["run"]) == (1, "refuse", "fail")
    alive(run, host="elsewhere")
    exit_code, _, levels = planned(capsys, "--run-dir=run", "train.py")
    assert (exit_code, levels["run"]) == (0, "warn")


def test_a_run_that_has_finished(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory(run_with(here / "run", *HUNG[:-2], HUNG[-1])).outcome = Outcome("finished", "it has")
    exit_code, found, levels = planned(capsys, "--run-dir=run", "train.py")
    assert (exit_code, found["would"], levels["run"]) == (0, "nothing", "warn")


def test_a_spent_budget(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the launch that was killed."""
    run_with(here / "run", launch(100, 101))
    exit_code, found, levels = planned(capsys, "--run-dir=run", "--max-failures-per-day=0", "train.py")
    assert (exit_code, found["would"], levels["budget"]) == (1, "refuse", "fail")


def test_a_fresh_run_and_a_batch_job_make_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with((here / "runs").mkdir() or here / "runs" / "train", *HUNG)
    (here / "runs" / "train-2").mkdir()
    _, found, _ = planned(capsys, "--fresh", "--run-dir=runs/train", "train.py")
    assert (found["run_dir"], found["would"]) == (str(here / "runs" / "train-3"), "begin")
    arguments = ["--fresh", "--run-dir=runs/train", "--nodes=2", "--gpus-per-node=4", "--preempt-time=90", "train.py"]
    _, found, levels = planned(capsys, *arguments, action="slurm")
    assert found["run_dir"] == str(here / "runs" / "train-3")
    assert {"--nodes=2", "--requeue", "--signal=TERM@90"} <= set(found["batch_options"])
    assert (found["nodes"], found["ranks_per_node"], found["deadlines"]["grace_period"]) == ("2", "4", 80)
    assert levels["rendezvous"] == "ok"


def test_several_nodes(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        arguments = ["--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=localhost:{port}", "train.py"]
        exit_code, _, levels = planned(capsys, *arguments)
        assert (exit_code, levels["rendezvous"]) == (1, "fail")
    monkeypatch.setattr(preflight, "file_systems", lambda folder: ["nfs4"])
    exit_code, _, levels = planned(capsys, *arguments)
    assert (exit_code, levels["rendezvous"], levels["storage"]) == (0, "ok", "ok")
    monkeypatch.setattr(preflight, "file_systems", lambda folder: ["xfs"])
    assert planned(capsys, *arguments)[2]["storage"] == "warn"


def test_monitoring(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with it does not fail the run."""
    pytest.importorskip("prometheus_client")
    names = ("--prometheus", "--on-event", "OpenTelemetry", "TrainJob")

    def found(prometheus: str) -> list[str | None]:
        options = [f"--prometheus={prometheus}", "--on-event=tee -a told"]
        exit_code, _, levels = planned(capsys, *options, "train.py")
        assert exit_code == 0
        return [levels.get(name) for name in names]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert found(f"127.0.0.1:{port}") == ["warn", "ok", None, None]
    assert found(f"127.0.0.1:{port}") == ["ok", "ok", None, None]
    for name in (trainjob.URL_VARIABLE, trainjob.CA_CERT_VARIABLE, trainjob.TOKEN_VARIABLE, otel.ENDPOINTS[0]):
        monkeypatch.setenv(name, "there")
    assert found("run.prom") == ["ok", "ok", "ok", "ok"]
    monkeypatch.setattr(preflight, "_is_installed", lambda name: False)
    assert found("missing/run.prom") == ["warn", "ok", "warn", "ok"]


def test_the_environment(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without anything that is installed."""
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(preflight, "_is_installed", lambda name: name == "wandb")
    assert planned(capsys, "train.py")[2]["W&B"] == "warn"
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    monkeypatch.setenv(OFF_VARIABLE, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    exit_code, found, levels = planned(capsys, "--recipe=mine:make", "train.py")
    assert (exit_code, levels["recipe"], levels["W&B"], levels["switch"]) == (1, "fail", "ok", "warn")
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert "a-secret" not in json.dumps(found)
    (here / "mine.py").touch()
    monkeypatch.setattr(preflight.metadata, "entry_points", preflight.metadata.EntryPoints)
    monkeypatch.setattr(_nvrx, "installed_version", lambda: None)
    exit_code, found, levels = planned(capsys, "--recipe=mine:make", "train.py")
    assert (exit_code, levels["recipe"], levels["callbacks"], levels["NVRx"]) == (1, "ok", "fail", "warn")
    assert "torch.distributed.run" in found["command"]
    assert planned(capsys, "--recipe=none", "train.py")[0] == 0


def test_room(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what the checkpoints of this run have needed."""
    checkpoints = here / "run" / "fit-000" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step, size in ((12, 10), (24, 1 << 20)):
        with open(checkpoints / f"step-{step:012d}.ckpt", "wb") as file:
            file.truncate(size)
    assert preflight.newest_checkpoint_bytes(here / "run") == 1 << 20
    levels = planned(capsys, "--run-dir=run", "train.py")[2]
    assert (levels["room"], levels["local checkpoints"]) == ("ok", "ok")
    os.truncate(checkpoints / f"step-{24:012d}.ckpt", 1 << 43)
    levels = planned_only(capsys, "--run-dir=run", "train.py")
    assert (levels["room"], levels["local checkpoints"]) == ("warn", "warn")
    os.truncate(checkpoints / f"step-{24:012d}.ckpt", 0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    exit_code, _, levels = planned(capsys, "--run-dir=run", "train.py")
    assert (exit_code, levels["storage"]) == (1, "fail")


def planned_only(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Where there are files too large to be compared."""
    with pytest.raises(SystemExit):
        main(["launch", "--plan", "--json", *arguments])
    return {each["name"]: each["level"] for each in json.loads(capsys.readouterr().out)["checks"]}


def test_file_systems(tmp_path: Path) -> None:
    assert capacity.file_systems("/proc") == ["proc"]
    assert preflight.existing(tmp_path / "none" / "none") == tmp_path
