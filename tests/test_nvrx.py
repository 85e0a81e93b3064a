"""NVRx, the version that is installed: ``make test-nvrx-latest`` runs what is marked with the newest one too."""

from __future__ import annotations

import enum
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_resilience import _nvrx
from lightning_resilience.detect.hangs.progress import Progress, Section
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts

PATIENCE_S = 60.0
FORK = multiprocessing.get_context("fork")
SECTIONS: tuple[Section, ...] = ("setup", "step", "validation", "checkpointing", "out_of_section")
TIMEOUTS = SectionTimeouts.parse("setup:600,step:180,validation:200,checkpointing:none,out_of_section:300")


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
    command, _ = _nvrx.elastic_launcher(3, 605.0, TIMEOUTS.by_section(), tmp_path, version)
    given = arguments(command)
    assert given["--max-restarts"] == "3"
    assert given["--term-timeout"] == "605"
    assert ("--ft-enable-nic-monitor" in given) == (version < (0, 5))
    config = yaml.safe_load(Path(given["--ft-cfg-path"]).read_text())["fault_tolerance"]
    assert config == {
        "initial_rank_heartbeat_timeout": None,
        "rank_heartbeat_timeout": None,
        "rank_section_timeouts": {"setup": 615.0, "step": 215.0, "checkpointing": None},
        "rank_out_of_section_timeout": 315.0,
        "workload_check_interval": 1.0,
    }


def test_torchrun_where_nvrx_is_missing(tmp_path: Path) -> None:
    command, environment = _nvrx.elastic_launcher(3, 605.0, TIMEOUTS.by_section(), tmp_path, None)
    assert "torch.distributed.run" in command
    assert set(arguments(command)) == {"--max-restarts", "--log-dir"}
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "605"


@pytest.mark.nvrx
def test_the_installed_launcher_takes_the_command_and_turns_heartbeats_off(tmp_path: Path) -> None:
    launcher = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.launcher")
    config_module = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance.config")
    timeouts = TIMEOUTS.by_section()
    command, _ = _nvrx.elastic_launcher(3, 605.0, timeouts, tmp_path, _nvrx.installed_version())
    options = command[command.index("nvidia_resiliency_ext.fault_tolerance.launcher") + 1 :]
    parsed = launcher.get_args_parser().parse_args([*options, "-m", "worker", "--lr=1"])
    config = config_module.FaultToleranceConfig.from_args(parsed)
    assert config.rank_heartbeat_timeout is None
    assert config.initial_rank_heartbeat_timeout is None
    assert config.rank_section_timeouts == {"setup": 615.0, "step": 215.0, "checkpointing": None}
    assert config.rank_out_of_section_timeout == 315.0
    assert config.workload_check_interval == 1.0
    assert not config.enable_nic_monitor
    assert (parsed.max_restarts, parsed.term_timeout, parsed.training_script) == (3, 605, "worker")


def run_shim(tmp_path: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_resilience._nvrx", "program", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_the_first_signal_reaches_the_launcher(tmp_path: Path) -> None:
    program = """
        import signal, subprocess, sys, time
        def handle(signum, frame): print("got", signum, flush=True)
        for signum in (signal.SIGTERM, signal.SIGINT): signal.signal(signum, handle)
        child = "import signal; print(*(signal.getsignal(s).name for s in (signal.SIGUSR1, signal.SIGUSR2)))"
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
    assert process.stdout.readline() == "SIG_DFL SIG_DFL\n", "what it starts must not inherit this"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got 15\n"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(signum)
    rest, _ = process.communicate(timeout=30)
    assert rest == "still here\n"
    assert process.returncode == 0


def test_the_launcher_ends_when_it_has_done_its_work(tmp_path: Path) -> None:
    program = """
        import atexit, os, sys
        class Library:
            def __del__(self, write=os.write): write(1, b"taken apart\\n")
        sys.library = Library()
        atexit.register(print, "tidied up")
        print("done")
        sys.exit(3)
    """
    process = run_shim(tmp_path, program)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, "done\ntidied up\n")


@pytest.mark.slow
def test_auto_is_one_worker_where_there_is_no_device(tmp_path: Path) -> None:
    script_argument = "--nproc-per-node=auto"  # the second one is the script's own
    process = run_shim(tmp_path, "import sys; print(sys.argv[1:])", script_argument, "script.py", script_argument)
    output, _ = process.communicate(timeout=60)
    assert output.strip() == str(["--nproc-per-node=1", "script.py", "--nproc-per-node=auto"])


class Recorder:
    """Names a method as a rendezvous does: that in which it is called."""

    def __init__(self, name: Callable[..., str]) -> None:
        self._name = name

    def record(self, *depth: int) -> str:
        return self._name(*depth)

    def join(self, *depth: int) -> str:
        return self.record(*depth)


@pytest.mark.slow_but_for("nvidia_resiliency_ext.fault_tolerance.launcher")
@pytest.mark.nvrx
@pytest.mark.parametrize("launcher", [_nvrx._NVRX_LAUNCHER, _nvrx._TORCH_LAUNCHER])
def test_the_rendezvous_names_its_methods_as_before(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(launcher)
    modules = []
    for name in _nvrx._RENDEZVOUS[launcher]:
        with suppress(ImportError):
            modules.append(importlib.import_module(name))
    assert modules, "another module by now"
    before = [module.get_method_name for module in modules]
    for module in modules:
        monkeypatch.setattr(module, "get_method_name", module.get_method_name)  # to be put back
    assert _nvrx.name_methods_quickly(launcher) == [module.__name__ for module in modules]
    for module, old in zip(modules, before, strict=True):
        new = module.get_method_name
        assert new is not old
        for depth in ((), (1,), (2,), (3,), (1000,)):
            names = {Recorder(each).join(*depth) for each in (old, new)}
            assert len(names) == 1, names
        assert Recorder(new).join() == "join"


# The rank monitor itself, and ranks that tell it their sections


class Told(_nvrx.RankMonitor):
    """Keeps what the monitor has been told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def report(self, section: Section, timeout_s: float, advanced: bool) -> None:
        super().report(section, timeout_s, advanced)
        self.told.append(section)


class Rank:
    """What a rank's own code has at hand."""

    def __init__(self, folder: Path, timeouts: Mapping[Section, float]) -> None:
        self.folder = folder
        self.progress = Progress(folder / "rank.progress", timeouts)
        self.monitor = Told()
        self.reporter = _nvrx.SectionReporter(folder / "rank.progress", self.monitor)

    def enter(self, section: Section) -> None:
        """Returns when the monitor knows it."""
        self.progress.enter(section)
        self.wait_until_told(section)

    def wait_until_told(self, section: str) -> None:
        """Returns when the monitor knows what the progress says now."""
        self.monitor.told.clear()
        self.wait_until(lambda: self.monitor.told.count(section) > 1)  # the first report may have begun before

    def work(self, seconds: float) -> None:
        """Makes progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.progress.tick()
            time.sleep(0.02)

    @staticmethod
    def hang() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PATIENCE_S)  # NVRx continues the process before it kills it

    @staticmethod
    def wait_until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Ranks:
    """Rank monitors with the rank of each, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.monitors: list[Any] = []
        self.ranks: list[Any] = []

    def start(self, body: Callable[[Rank], object], timeouts: Mapping[Section, float], **config: Any) -> None:
        """Runs ``body`` as a rank.

        Args:
            body: Its code.
            timeouts: Its own limits.
            config: What its monitor was started with.
        """
        from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
        from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer

        folder = self.folder / str(len(self.ranks))
        folder.mkdir()
        defaults: dict[str, Any] = {
            "initial_rank_heartbeat_timeout": None,
            "rank_heartbeat_timeout": None,
            "rank_section_timeouts": {"setup": 600.0, "step": 600.0, "checkpointing": 600.0},
            "rank_out_of_section_timeout": 600.0,
            "workload_check_interval": 0.1,
            "enable_nic_monitor": False,
            "log_level": logging.WARNING,
        }
        path = str(folder / "socket")
        settings = FaultToleranceConfig(**defaults | config)
        self.monitors.append(RankMonitorServer.run_in_subprocess(settings, path, mp_ctx=FORK))
        rank = FORK.Process(target=self._run, args=(folder, path, body, timeouts, self.monitors[-1]))
        rank.start()
        self.ranks.append(rank)

    def _run(
        self, folder: Path, path: str, body: Callable[[Rank], object], timeouts: Mapping[Section, float], monitor: Any
    ) -> None:
        os.environ |= {"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0"}
        os.environ["MONITOR_PID"] = str(monitor.pid)
        rank = Rank(folder, timeouts)
        logging.getLogger("lightning_resilience").addHandler(logging.FileHandler(folder / "log"))
        rank.reporter.start()
        body(rank)
        rank.reporter.stop()
        os._exit(0)

    def wait(self) -> list[int | None]:
        """How the ranks have ended."""
        for rank in self.ranks:
            rank.join(PATIENCE_S)
        return [rank.exitcode for rank in self.ranks]

    def log(self, index: int = 0) -> str:
        """What a rank has logged."""
        return (self.folder / str(index) / "log").read_text()

    def clean_up(self) -> None:
        for process in self.ranks + self.monitors:
            process.kill()
            process.join()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the monitor's own socket
    monkeypatch.setattr(_nvrx, "DIAGNOSIS_MARGIN_S", 0.2)
    monkeypatch.setattr(_nvrx, "_REPORT_EVERY_S", 0.05)
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.clean_up()


def test_there_is_a_monitor_only_under_ft_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.4.1")
    monkeypatch.delenv("FT_RANK_MONITOR_IPC_SOCKET", raising=False)
    assert not _nvrx.rank_monitor_available()
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", str(tmp_path / "socket"))
    assert not _nvrx.rank_monitor_available(), "it has gone, and the variable was passed on"
    (tmp_path / "socket").touch()
    assert _nvrx.rank_monitor_available()
    monkeypatch.setattr(_nvrx, "installed_version", lambda: None)
    assert not _nvrx.rank_monitor_available()


def stopped_in(section: Section) -> Callable[[Rank], None]:
    def body(rank: Rank) -> None:
        for earlier in ("setup", "step"):  # 0.7 looks at the time out of section only after a step
            rank.enter(earlier)
        rank.enter(section)
        rank.hang()

    return body


def working_in(section: Section) -> Callable[[Rank], None]:
    def body(rank: Rank) -> None:
        rank.enter("setup")
        rank.enter("step")
        rank.enter(section)
        rank.work(2.0)

    return body


@pytest.mark.nvrx
def test_a_rank_that_is_stopped_is_ended_in_every_section(ranks: Ranks) -> None:
    for section in SECTIONS:
        ranks.start(stopped_in(section), {section: 0.5})
    assert ranks.wait() == [-signal.SIGKILL] * len(SECTIONS)


@pytest.mark.nvrx
def test_a_rank_that_advances_is_left_alone_in_every_section(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    for section in SECTIONS:
        ranks.start(working_in(section), {section: 0.8})
    assert ranks.wait() == [0] * len(SECTIONS)
    assert "still open" not in capfd.readouterr().err
    assert not any(map(ranks.log, range(len(SECTIONS))))


@pytest.mark.nvrx
def test_the_limits_that_the_rank_notes_hold_and_not_those_of_the_launcher(ranks: Ranks) -> None:
    def body_in(section: Section) -> Callable[[Rank], None]:
        def body(rank: Rank) -> None:
            rank.enter("setup")
            rank.enter("step")
            rank.enter(section)
            time.sleep(1.2)
            rank.progress.set_timeouts({section: 0.5})
            rank.wait_until_told(section)
            (rank.folder / "alive").touch()
            rank.hang()

        return body

    short = dict.fromkeys(("setup", "step", "checkpointing"), 0.4)
    for section in SECTIONS:
        ranks.start(body_in(section), {}, rank_section_timeouts=short, rank_out_of_section_timeout=0.4)
    assert ranks.wait() == [-signal.SIGKILL] * len(SECTIONS)
    assert len(list(ranks.folder.glob("*/alive"))) == len(SECTIONS)


@pytest.mark.nvrx
def test_a_lower_limit_does_not_meet_the_time_of_what_came_before(ranks: Ranks) -> None:
    """The first training batch after a long validation: both are NVRx's ``step``."""

    def body(rank: Rank) -> None:
        rank.enter("validation")
        time.sleep(1.5)
        rank.enter("step")

    # With this interval NVRx looks between any two messages.
    ranks.start(body, {"step": 1.0}, workload_check_interval=0.0)
    assert ranks.wait() == [0]


@pytest.mark.nvrx
def test_a_rank_that_has_left_the_fit_may_take_as_long_as_it_likes(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def left(rank: Rank) -> None:
        rank.enter("step")
        rank.progress.close()
        rank.wait_until_told("left")
        time.sleep(1.5)

    def closed(rank: Rank) -> None:
        rank.enter("step")
        rank.reporter.stop()
        assert not rank.reporter.is_alive()
        time.sleep(1.5)

    for body in (left, closed):
        ranks.start(body, {"step": 0.5, "out_of_section": 0.5}, rank_out_of_section_timeout=0.5)
    assert ranks.wait() == [0, 0]
    assert "still open" not in capfd.readouterr().err


@pytest.mark.nvrx
def test_a_rank_that_was_excused_has_its_time_once_more(ranks: Ranks) -> None:
    def body(rank: Rank) -> None:
        rank.enter("step")
        for _ in range(4):
            time.sleep(0.5)
            (rank.folder / "rank.excused").touch()
        (rank.folder / "alive").touch()
        rank.hang()

    ranks.start(body, {"step": 1.0})
    assert ranks.wait() == [-signal.SIGKILL]
    assert (ranks.folder / "0" / "alive").exists()


@pytest.mark.nvrx
def test_sections_that_the_launcher_was_not_told_of(ranks: Ranks) -> None:
    def some(rank: Rank) -> None:
        for section in SECTIONS:
            rank.enter(section)
        rank.enter("checkpointing")
        time.sleep(1.5)  # out of section for NVRx, but not with that limit
        rank.enter("step")
        rank.hang()

    def none(rank: Rank) -> None:
        rank.wait_until(lambda: not rank.reporter.is_alive())
        time.sleep(1.5)

    limits: dict[Section, float] = {"step": 1.0, "out_of_section": 1.0}
    ranks.start(some, limits, rank_section_timeouts={"theirs": 0.5, "step": 0.5})
    ranks.start(none, limits, rank_section_timeouts={"theirs": 0.5}, rank_out_of_section_timeout=0.5)
    assert ranks.wait() == [-signal.SIGKILL, 0]
    assert ranks.log(0).count("without limits for checkpointing, setup") == 1
    assert "without limits for checkpointing, setup, step; give it --ft-rank-section-timeouts=" in ranks.log(1)


@pytest.mark.nvrx
def test_a_launcher_that_waits_for_heartbeats_gets_along_without_them(ranks: Ranks) -> None:
    def body(rank: Rank) -> None:
        rank.enter("step")
        time.sleep(1.5)

    ranks.start(body, {}, initial_rank_heartbeat_timeout=0.5, rank_heartbeat_timeout=0.5)
    assert ranks.wait() == [0]


@pytest.mark.nvrx
def test_a_monitor_that_is_gone_or_stopped_does_not_disturb_the_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_nvrx, "NVRX_ANSWERS_WITHIN_S", 0.5)

    def killed(rank: Rank) -> None:
        rank.enter("step")
        os.kill(int(os.environ["MONITOR_PID"]), signal.SIGKILL)
        rank.work(0.5)
        rank.wait_until(lambda: not rank.reporter.is_alive())

    def stopped(rank: Rank) -> None:
        rank.enter("step")
        os.kill(int(os.environ["MONITOR_PID"]), signal.SIGSTOP)
        rank.work(0.5)

    def missing(rank: Rank) -> None:
        rank.enter("step")
        os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = str(rank.folder / "nowhere")
        reporter = _nvrx.SectionReporter(rank.folder / "rank.progress", Told())
        reporter.start()
        rank.wait_until(lambda: not reporter.is_alive())
        reporter.stop()

    for body in (killed, stopped, missing):
        ranks.start(body, {"step": 600.0})
    assert ranks.wait() == [0, 0, 0]
    assert ranks.log(0).count("no longer watches this rank") == 1
    assert ranks.log(2).count("no longer watches this rank") == 1
    if _nvrx.installed_version() < (0, 5):  # the newer one waits for no answer
        assert "has not answered for 0.5 s" in ranks.log(1)


# Requests to the launcher


class NvrxAction(enum.Enum):
    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (None, ("continue", "boom")),
        ("continue", ("continue", "boom")),
        ("exclude_this_node", ("exclude_this_node", "boom")),
        (NvrxAction.ShutdownWorkload, ("shutdown_workload", "boom")),
        (SimpleNamespace(action=NvrxAction.ExcludeThisNode, description="ECC"), ("exclude_this_node", "ECC")),
        (SimpleNamespace(action=NvrxAction.Continue, description="<not set>"), ("continue", "boom")),
    ],
)
def test_what_a_policy_may_return(request_: Any, expected: tuple[str, str]) -> None:
    assert _nvrx.parse_request(request_, "boom") == expected


@pytest.mark.parametrize("request_", ["restart", 1, object(), SimpleNamespace(action="x")])
def test_anything_else_is_refused(request_: Any) -> None:
    with pytest.raises(ValueError, match="'continue', 'exclude_this_node', 'shutdown_workload', or NVRx's, was expec"):
        _nvrx.parse_request(request_, "boom")


@pytest.mark.nvrx
def test_nvrx_own_requests_are_understood() -> None:
    nvrx = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    for action, expected in zip(nvrx.WorkloadAction, NvrxAction, strict=True):
        assert action.name == expected.name
        assert _nvrx.parse_request(nvrx.WorkloadControlRequest(action), "boom") == _nvrx.parse_request(expected, "boom")


@pytest.mark.nvrx
def test_a_launcher_that_is_gone_or_does_not_answer_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(_nvrx, "NVRX_ANSWERS_WITHIN_S", 0.2)
    monkeypatch.setenv("FT_LAUNCHER_IPC_SOCKET", str(tmp_path / "gone"))
    _nvrx.RankMonitor().send("exclude_this_node", "ECC")
    assert "ft_launcher could not be asked to exclude this node: [Errno 2]" in caplog.text
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "deaf"))
        server.listen()
        monkeypatch.setenv("FT_LAUNCHER_IPC_SOCKET", str(tmp_path / "deaf"))
        _nvrx.RankMonitor().send("shutdown_workload", "NaN")
    assert "ft_launcher could not be asked to shutdown workload: no answer within 0.2 s" in caplog.text


# With the real launcher

WORKER = """
    import os, signal, sys, time
    from pathlib import Path
    if os.environ["RANK"] != "2":
        from lightning_resilience import _nvrx
        from lightning_resilience.detect.hangs.progress import Progress
        _nvrx.DIAGNOSIS_MARGIN_S = 0.5
        assert _nvrx.rank_monitor_available()
        path = Path(f"rank-{os.environ['RANK']}.progress")
        progress = Progress(path, {"setup": 60.0, "step": 2.0, "checkpointing": 60.0, "out_of_section": 2.0})
        monitor = _nvrx.RankMonitor()
        reporter = _nvrx.SectionReporter(path, monitor)
    restart_count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"started-{os.environ['RANK']}-{restart_count}", "w").close()
"""


def run_launcher(tmp_path: Path, worker: str, workers: int) -> tuple[int, str]:
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER) + textwrap.dedent(worker))
    timeouts = SectionTimeouts.parse("step:2,out_of_section:2").by_section()
    command, environment = _nvrx.elastic_launcher(2, 10.0, timeouts, tmp_path, _nvrx.installed_version())
    command += [f"--nproc-per-node={workers}", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    environment |= {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = subprocess.run(
        [*command, "--local-addr=127.0.0.1", "worker.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        text=True,
    )
    return launcher.returncode, launcher.stderr + _nvrx.elastic_log(tmp_path).read_text()


def started(tmp_path: Path) -> set[str]:
    return {path.name.removeprefix("started-") for path in tmp_path.glob("started-*")}


@pytest.mark.campaign
@pytest.mark.nvrx
def test_real_a_hang_is_ended_and_who_is_not_watched_is_not(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    worker = """
        match os.environ["RANK"], restart_count:
            case "0", "0":
                reporter.start()
                progress.enter("step")
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)
            case "0", _:
                reporter.start()
                for step in range(40):
                    progress.at("step", step, (step, 0, 0, 0))
                    time.sleep(0.1)
                reporter.stop()
            case "1", "1":
                reporter.start()
                progress.enter("step")
                reporter.stop()
                time.sleep(4)
            case _:
                time.sleep(4 if restart_count == "1" else 60)
    """
    code, output = run_launcher(tmp_path, worker, 3)
    assert code == 0, output
    assert started(tmp_path) == {f"{rank}-{count}" for rank in range(3) for count in range(2)}, output
    assert "Section 'step' has been open for" in output
    assert output.count("still open") <= 1, "but for the rank that was ended, sections are closed"


@pytest.mark.nvrx
@pytest.mark.slow
def test_real_a_node_excludes_itself(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    code, output = run_launcher(tmp_path, 'monitor.send("exclude_this_node", "ECC errors")\nsys.exit(1)', 1)
    assert code == 1, output
    assert "ECC errors" in output
    assert started(tmp_path) == {"0-0"}, "it was restarted on the node that was to be excluded"
