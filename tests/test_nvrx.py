from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from lightning_resilience import _nvrx


def arguments(command: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in command if part.startswith("--"))


def test_the_installed_version_is_a_tuple_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    version = _nvrx.installed_version()
    assert version is None or (len(version) >= 2 and all(isinstance(part, int) for part in version))
    for text, expected in (("0.4.1", (0, 4, 1)), ("0.7.0+cu13.1", (0, 7, 0)), ("0.5", (0, 5))):
        monkeypatch.setattr("importlib.metadata.version", lambda name, text=text: text)
        assert _nvrx.installed_version() == expected


@pytest.mark.parametrize("version", [(0, 4, 1), (0, 5, 0), (0, 7, 0)])
def test_the_command_for_every_version(tmp_path: Path, version: tuple[int, ...]) -> None:
    command, _ = _nvrx.elastic_launcher(3, 605.0, tmp_path / "elastic", version)
    given = arguments(command)
    assert given["--max-restarts"] == "3"
    assert given["--term-timeout"] == "605"
    assert ("--ft-enable-nic-monitor" in given) == (version < (0, 5))
    config = yaml.safe_load(Path(given["--ft-cfg-path"]).read_text())["fault_tolerance"]
    assert config == {"initial_rank_heartbeat_timeout": None, "rank_heartbeat_timeout": None}


def test_torchrun_where_nvrx_is_missing(tmp_path: Path) -> None:
    command, environment = _nvrx.elastic_launcher(3, 605.0, tmp_path, None)
    assert "torch.distributed.run" in command
    assert set(arguments(command)) == {"--max-restarts", "--log-dir"}
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "605"


def test_the_installed_launcher_takes_the_command_and_turns_heartbeats_off(tmp_path: Path) -> None:
    launcher = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.launcher")
    config_module = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.config")
    command, _ = _nvrx.elastic_launcher(3, 605.0, tmp_path, _nvrx.installed_version())
    options = command[command.index("nvidia_resiliency_ext.fault_tolerance.launcher") + 1 :]
    parsed = launcher.get_args_parser().parse_args([*options, "-m", "worker", "--lr=1"])
    config = config_module.FaultToleranceConfig.from_args(parsed)
    assert config.rank_heartbeat_timeout is None
    assert config.initial_rank_heartbeat_timeout is None
    assert not config.enable_nic_monitor
    assert (parsed.max_restarts, parsed.term_timeout, parsed.training_script) == (3, 605, "worker")


def run_shim(tmp_path: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_resilience._nvrx", "program", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_the_first_signal_reaches_the_launcher(tmp_path: Path) -> None:
    program = """
        import signal, subprocess, sys, time
        def handle(signum, frame): print("got", signum, flush=True)
        for signum in (signal.SIGTERM, signal.SIGINT): signal.signal(signum, handle)
        child = "import signal; print(signal.getsignal(signal.SIGUSR1).name)"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip(), flush=True)
        while sys.stdin.read(1): pass
        time.sleep(0.1)
        print("still here", flush=True)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_resilience._nvrx", "program"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "SIG_DFL\n", "a worker must not inherit what the launcher does with SIGUSR1"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got 15\n"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process.send_signal(signum)
    rest, _ = process.communicate(timeout=30)
    assert rest == "still here\n"
    assert process.returncode == 0


def test_auto_is_one_worker_where_there_is_no_device(tmp_path: Path) -> None:
    script_argument = "--nproc-per-node=auto"  # the second one is the script's own
    process = run_shim(tmp_path, "import sys; print(sys.argv[1:])", script_argument, "script.py", script_argument)
    output, _ = process.communicate(timeout=60)
    assert output.strip() == str(["--nproc-per-node=1", "script.py", "--nproc-per-node=auto"])
