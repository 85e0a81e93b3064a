"""The interface to nvidia-resiliency-ext (NVRx): the only file that depends on whether and which NVRx is installed.

As a program it is the elastic launcher that starts the workers: NVRx's ``ft_launcher``, or ``torchrun`` if NVRx is not
installed, protected from the signals of a scheduler (see :func:`main`). In a worker it reports to NVRx's rank monitor
what the rank is doing (:class:`SectionReporter`), and sends requests to the launcher (:meth:`RankMonitor.send`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import logging
import math
import os
import platform
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

from lightning_resilience._daemon import NoAnswer, in_daemon_thread
from lightning_resilience._files import write_json
from lightning_resilience._loopback import ADDRESS, serve_store
from lightning_resilience.detect.hangs.progress import Section, read_progress
from lightning_resilience.launch import spares
from lightning_resilience.run.deadlines import (
    DIAGNOSIS_MARGIN_S,
    NVRX_ANSWERS_WITHIN_S,
    STORE_WITHIN_S,
    WORKERS_STOP_TIMEOUT_S,
)

log = logging.getLogger(__name__)

WorkloadAction = Literal["continue", "exclude_this_node", "shutdown_workload"]
"""The requests of a worker to its launcher: restart as usual, restart without this node, or do not restart."""

EXCLUDE_THIS_NODE: WorkloadAction = "exclude_this_node"

_NVRX_ACTIONS: dict[str, WorkloadAction] = {
    "Continue": "continue",
    "ExcludeThisNode": "exclude_this_node",
    "ShutdownWorkload": "shutdown_workload",
}
# In all NVRx versions a name must be configured before it is used; newer ones give "step" a meaning of its own. For
# NVRx a rank in any other section is "out of section".
_NVRX_SECTIONS: dict[Section, str] = {
    "setup": "setup",
    "step": "step",
    "validation": "step",
    "checkpointing": "checkpointing",
}
_MONITOR_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
_CHECK_EVERY_S = 1.0
_REPORT_EVERY_S = 0.5

RUN_ID_VARIABLE = "LIGHTNING_RESILIENCE_RENDEZVOUS_ID"
"""Environment variable with the id of the rendezvous. It is secret, because a process that knows it can take part, and
all users of a machine can see a command line."""

FOLDER_VARIABLE = "LIGHTNING_RESILIENCE_LAUNCHER_FOLDER"
"""Environment variable with the folder for temporary files of the elastic launcher and of ranks, mainly sockets."""

LOOPBACK = f"{ADDRESS}:0"
"""The endpoint for the rendezvous of a single node."""

_NVRX_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
_TORCH_LAUNCHER = "torch.distributed.run"


def installed_version() -> tuple[int, ...] | None:
    """NVRx's version, or ``None`` if it is not installed."""
    try:
        version = metadata.version("nvidia-resiliency-ext")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])


def ignore_pynvml() -> None:
    """Silences torch's warning, on every rank and in every command, about the ``pynvml`` package that NVRx installs."""
    warnings.filterwarnings("ignore", message=".*pynvml package is deprecated", category=FutureWarning)


_LOG_VARIABLE = "LIGHTNING_RESILIENCE_ELASTIC_LOG"
_LOG_BYTES = 8 << 20
_LAST_LINES = 12


def elastic_log(run_dir: Path) -> Path:
    """The log file of this node's elastic launcher.

    Args:
        run_dir: The run directory.
    """
    return run_dir / "logs" / f"launcher-{platform.node()}.log"


def open_log(path: str) -> TextIO | None:
    """Opens the launcher's log for appending; ``None`` if it cannot be written, for example because the disk is full.

    Args:
        path: See :func:`elastic_log`.
    """
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with suppress(FileNotFoundError):
            if os.path.getsize(path) > _LOG_BYTES:
                os.replace(path, f"{path}.1")
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    return None


def last_words(log: Path, begin: int) -> list[str]:
    """The last lines in the elastic launcher's log, shown if the launcher has not even started the workers.

    Args:
        log: See :func:`elastic_log`.
        begin: How many bytes of the log are from earlier launches.
    """
    with suppress(OSError), open(log, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return []


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives the workers of every attempt their own store. torch's elastic launcher, which NVRx uses from 0.5 on, would hand
them the store of the rendezvous, where a restarted gloo group finds the addresses of the previous group and hangs."""


def elastic_launcher(
    max_restarts: int,
    term_timeout_s: float,
    section_timeouts: Mapping[Section, float],
    run_dir: Path,
    version: tuple[int, ...] | None,
    is_preview: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The beginning of the elastic launcher's command line, and its environment variables.

    The caller adds the rendezvous and the program to run to the command line.

    Args:
        max_restarts: How often the launcher may restart the workers.
        term_timeout_s: How many seconds the workers may take to end after the launcher was asked to stop.
        section_timeouts: Seconds by section, as ranks record them in their progress; infinite: no limit. They apply
            only to ranks that report their sections.
        run_dir: The run directory.
        version: The version of NVRx, see :func:`installed_version`.
        is_preview: Whether the command is only shown, so that no file is written.
    """
    directory, log = run_dir / "elastic", elastic_log(run_dir)
    if not is_preview:
        for folder in (directory, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lightning_resilience._nvrx"]
    common = [f"--max-restarts={max_restarts}", f"--log-dir={directory}"]
    log_to = {_LOG_VARIABLE: str(log)}
    if version is None:
        # An environment variable and no flag, because an older torch ignores an unknown variable.
        timeout = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{term_timeout_s:.0f}"}
        return [*command, _TORCH_LAUNCHER, *common], timeout | log_to | _OWN_STORE
    # Before 0.5 NVRx kills a rank that has sent no heartbeat for an hour, and only a file can turn that off. Not every
    # script sends heartbeats.
    config = directory / "ft_config.yaml"
    limits: dict[str, float] = {}
    for section, name in _NVRX_SECTIONS.items():
        limits[name] = max(section_timeouts[section], limits.get(name, 0.0))
    settings = {
        "initial_rank_heartbeat_timeout": None,
        "rank_heartbeat_timeout": None,
        "rank_section_timeouts": {name: _nvrx_limit(limit) for name, limit in limits.items()},
        "rank_out_of_section_timeout": _nvrx_limit(section_timeouts["out_of_section"]),
        "workload_check_interval": _CHECK_EVERY_S,
    }
    if not is_preview:
        write_json(config, {"fault_tolerance": settings})  # JSON is YAML
    command += [_NVRX_LAUNCHER, *common, f"--ft-cfg-path={config}", "--ft-log-level=WARNING"]
    command += [f"--term-timeout={term_timeout_s:.0f}", f"--workers-stop-timeout={WORKERS_STOP_TIMEOUT_S}"]
    if version < (0, 5):
        # This is the default from 0.5 on. The monitor logs many errors on a machine without such a network card.
        command += ["--ft-enable-nic-monitor=false"]
    environment = log_to | {"FT_LAUNCHER_LOGLEVEL": os.environ.get("FT_LAUNCHER_LOGLEVEL", "WARNING")}
    return command, environment if version < (0, 5) else environment | _OWN_STORE


def _nvrx_limit(timeout_s: float) -> float | None:
    return timeout_s + DIAGNOSIS_MARGIN_S if math.isfinite(timeout_s) else None


def rank_monitor_available() -> bool:
    """Whether NVRx's ``ft_launcher`` has started this process and runs a rank monitor for it."""
    return installed_version() is not None and os.path.exists(os.environ.get(_MONITOR_VARIABLE, ""))


class RankMonitor:
    """This rank's connection to the rank monitor, a process of ``ft_launcher`` that ends the rank when it is overdue.

    The monitor serves one connection of a rank at a time. A rank that has never connected, or has closed its
    connection, has no limits.

    Raises:
        ImportError: If NVRx cannot be imported.
    """

    def __init__(self) -> None:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
        from nvidia_resiliency_ext.fault_tolerance.data import RankInfo

        self._client = RankMonitorClient()
        self._client.rank_info = RankInfo.get_for_current_rank()  # for requests that are sent without a connection
        self._open: str | None = None
        # Before 0.5 a client without heartbeats is killed after an hour, unless ft_launcher was configured otherwise.
        no_heartbeats = {"initial": None, "subsequent": None, "were_calculated": False}
        self._load_timeouts({"heartbeat": no_heartbeats})

    def connect(self) -> None:
        """Connects to the monitor; from here on the limits given to ``ft_launcher`` hold.

        Raises:
            RuntimeError: If ``ft_launcher`` has no limit for any of the sections.
            Exception: Whatever NVRx raises if the monitor has ended or answers otherwise than expected.
        """
        self._client.init_workload_monitoring()
        missing = sorted(set(_NVRX_SECTIONS.values()) - self._configured)
        if len(missing) == len(set(_NVRX_SECTIONS.values())):
            raise RuntimeError(f"ft_launcher was started without limits for {', '.join(missing)}; {_HOW_TO_CONFIGURE}")
        if missing:
            log.warning(
                "ft_launcher was started without limits for %s; NVRx's rank monitor counts these as time outside of "
                "sections; %s",
                ", ".join(missing),
                _HOW_TO_CONFIGURE,
            )

    @property
    def _configured(self) -> set[str]:
        # A name that the monitor does not know ends its hang detection permanently (0.4.1) or does nothing (0.7).
        return set(self._client.cfg.rank_section_timeouts)

    def report(self, section: Section, timeout_s: float, advanced: bool) -> None:
        """Reports the rank's section to the monitor.

        Args:
            section: What the rank is doing.
            timeout_s: How many seconds it may take until it advances; infinite: no limit.
            advanced: Whether it has advanced since the last report.
        """
        name = _NVRX_SECTIONS.get(section)
        if name not in self._configured:
            name = None
        if name == self._open and not advanced:
            return
        if name is None and self._open is None:
            # Opens and closes a section to restart NVRx's clock for "out of section": end_all_sections, which is meant
            # for that, does nothing in 0.7.
            self._open = min(self._configured & set(_NVRX_SECTIONS.values()))
            self._client.start_section(self._open)
        if self._open is not None:
            self._client.end_section(self._open)
            self._open = None
        # Sets the limit between two sections: a lowered limit must not apply to the time already spent in a section.
        self._set_limit(name, timeout_s)
        if name is not None:
            self._client.start_section(name)
            self._open = name

    def _set_limit(self, name: str | None, timeout_s: float) -> None:
        known = self._client.section_timeouts
        limits = {**known.section, None: known.out_of_section}
        limit = _nvrx_limit(timeout_s)
        if limits[name] != limit:
            limits[name] = limit
            out_of_section = limits.pop(None)
            self._load_timeouts({"section": {"section": limits, "out_of_section": out_of_section}})

    def _load_timeouts(self, timeouts: dict[str, Any]) -> None:
        self._client.load_state_dict({self._client.CURRENT_TIMEOUTS_STATE_KEY: timeouts})

    def send(self, action: WorkloadAction, description: str) -> None:
        """Sends a request to the launcher, which acts on it when the workers have ended, instead of a usual restart.

        If the launcher does not answer, this logs a warning and raises nothing: the rank has already failed.

        Args:
            action: What the launcher should do.
            description: The reason, for the launcher's log.
        """
        from nvidia_resiliency_ext.fault_tolerance import WorkloadAction as NvrxAction
        from nvidia_resiliency_ext.fault_tolerance import WorkloadControlRequest

        name = next(name for name, known in _NVRX_ACTIONS.items() if known == action)
        request = WorkloadControlRequest(NvrxAction[name], description)
        send = functools.partial(self._client.send_workload_control_request, request)
        problem: object
        try:
            in_daemon_thread(send, "asks-ft-launcher").result(NVRX_ANSWERS_WITHIN_S)
            return
        except NoAnswer:  # a launcher that is stopped would never answer
            problem = f"no answer within {NVRX_ANSWERS_WITHIN_S:g} s"
        except Exception as error:
            problem = error
        log.warning("ft_launcher could not be asked to %s: %s", action.replace("_", " "), problem)

    def close(self) -> None:
        """Closes the open section and the connection, so that the monitor does not watch the rank any more."""
        try:
            if self._open is not None:
                self._client.end_section(self._open)
        finally:
            self._open = None
            self._client.shutdown_workload_monitoring()


_HOW_TO_CONFIGURE = "give it --ft-rank-section-timeouts=setup:600,step:180,checkpointing:420"


class SectionReporter(threading.Thread):
    """Reports the rank's section to the rank monitor twice a second. The training thread sends and waits for nothing.

    The thread reads the rank's progress record, as the watchdog does, so the limits that the rank records there hold
    for NVRx too. If the monitor has ended or a message fails, the thread logs one warning, and the rank continues
    without the monitor.

    Args:
        progress: The rank's progress record, see
            :class:`~lightning_resilience.detect.hangs.progress.Progress`. When a file beside it that ends with
            ``.excused`` is touched, the rank's limit starts again.
        monitor: The rank monitor, not connected yet.
    """

    def __init__(self, progress: Path, monitor: RankMonitor) -> None:
        super().__init__(name="nvrx-section-reporter", daemon=True)
        self._progress = progress
        self._excused = progress.with_suffix(".excused")
        self._monitor = monitor
        self._stopping = threading.Event()

    def run(self) -> None:
        """Reports until the thread is stopped."""
        try:
            self._monitor.connect()
            self._report()
        except Exception as error:
            log.warning("NVRx's rank monitor no longer watches this rank; the watchdog does: %s", error)
        with suppress(Exception):  # the monitor may have ended
            self._monitor.close()

    def _report(self) -> None:
        seen: tuple[int, int] | None = None
        while True:
            stay = read_progress(self._progress)
            if stay is not None:
                now = stay.ticks, self._excused_at()
                self._monitor.report(stay.section, stay.timeout, advanced=now != seen)
                seen = now
            if self._stopping.wait(_REPORT_EVERY_S):
                return

    def _excused_at(self) -> int:
        try:
            return self._excused.stat().st_mtime_ns
        except OSError:
            return 0

    def stop(self) -> None:
        """Stops reporting when the rank leaves the fit; waits until the monitor has closed, but only for some time."""
        self._stopping.set()
        self.join(NVRX_ANSWERS_WITHIN_S)
        if self.is_alive():
            log.warning(
                "NVRx's rank monitor has not answered for %g s; this rank stops waiting for it.", NVRX_ANSWERS_WITHIN_S
            )


_PROFILED_STEPS = 32
_PROFILED_SHARE = 0.02

_kernel_profiler: KernelProfiler | None = None


class KernelProfiler:
    """NVRx's profiler of a device's kernels (CUPTI), turned on in few steps only, since it costs time for every kernel.

    A process has one, and it is never shut down: that would remove CUPTI under running kernels.

    Args:
        manager: NVRx's ``CuptiManager``, initialized.
        clock: Returns seconds.

    Attributes:
        problem: The reason why it does not measure any more; ``None`` while it works.
    """

    def __init__(self, manager: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.problem: str | None = None
        self._manager = manager
        self._clock = clock
        self._steps = 0
        self._seconds = 0.0
        self._began: float | None = None

    def allow(self, until_report: float) -> tuple[int, float]:
        """Allows measuring until the next report.

        Args:
            until_report: Seconds until the next report.

        Returns:
            How many steps it measures until then, and after how many measured seconds it stops.
        """
        self._steps, self._seconds = _PROFILED_STEPS, _PROFILED_SHARE * until_report
        return self._steps, self._seconds

    def start(self) -> None:
        """Starts to measure the kernels of a step that begins to compute, if measuring is allowed."""
        if self._began is not None or self.problem is not None or self._steps <= 0 or self._seconds <= 0:
            return
        if getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False):
            self.problem = "PyTorch's profiler is active, and CUPTI serves only one profiler at a time"
        elif self._does(self._manager.start_profiling):
            self._began = self._clock()

    def stop(self) -> None:
        """Stops measuring after the step has computed; kernels that the device has not run yet are left out."""
        if self._began is not None:
            self._does(self._manager.stop_profiling)
            self._steps -= 1
            self._seconds -= self._clock() - self._began
            self._began = None

    def take(self) -> dict[str, tuple[float, float]]:
        """The median and the total time of each kernel since the last call.

        Kernels in which ranks wait for each other are left out.
        """
        found: dict[str, Any] = {}
        if self.problem is None:
            self._does(lambda: found.update(self._manager.get_results()))
            self._does(self._manager.reset_results)
        return {name: (each.median, each.avg * each.num_calls) for name, each in found.items() if "ncclDev" not in name}

    def close(self) -> None:
        """Stops measuring, and discards the results."""
        self.stop()
        self.take()
        self._steps = 0

    def _does(self, call: Callable[[], object]) -> bool:
        """Calls the profiler and keeps any error as ``problem``: a broken profiler must not end the training."""
        try:
            call()
        except RuntimeError as error:
            self.problem = str(error)
        return self.problem is None


def kernel_profiler() -> tuple[KernelProfiler | None, str | None]:
    """NVRx's profiler of kernels, or ``None`` and the reason why it does not work here."""
    global _kernel_profiler
    if _kernel_profiler is not None:
        return _kernel_profiler, None
    for package in ("nvidia_resiliency_ext.attribution.straggler.cupti", "nvidia_resiliency_ext.straggler.cupti"):
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        try:
            manager = module.CuptiManager()  # loads its extension, which needs libcupti
            manager.initialize()
        except (ImportError, OSError, RuntimeError) as error:
            return None, f"NVRx's profiler does not start ({type(error).__name__}: {error})"
        # CUPTI calls it for buffers even after the interpreter has released all objects.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(manager))
        _kernel_profiler = KernelProfiler(manager)
        return _kernel_profiler, None
    return None, "nvidia-resiliency-ext is not installed"


def parse_request(request: Any, reason: str) -> tuple[WorkloadAction, str]:
    """Parses a policy's request to the launcher; returns the action and the reason.

    Args:
        request: NVRx's ``WorkloadControlRequest`` or ``WorkloadAction``, or one of ``"continue"``,
            ``"exclude_this_node"`` and ``"shutdown_workload"``, for which NVRx need not be installed. ``None``:
            continue.
        reason: The reason if the request has no description.

    Raises:
        ValueError: If the request is something else.
    """
    if request is None:
        return "continue", reason
    action = getattr(request, "action", request)
    description = getattr(request, "description", None)
    name = getattr(action, "name", action)
    for nvrx_name, known in _NVRX_ACTIONS.items():
        if name in (nvrx_name, known):
            return known, reason if description in (None, "", "<not set>") else str(description)
    wanted = ", ".join(map(repr, _NVRX_ACTIONS.values()))
    raise ValueError(f"{request!r} is not a request to the launcher: one of {wanted}, or NVRx's, was expected.")


def main() -> None:
    """Runs the launcher module that is the first argument of the command line, hardened as follows.

    * Only the first SIGTERM reaches the launcher. Slurm sends one to every process of a job step, and
      ``lightning-resilience launch`` sends one too. A second one would cut the grace period short: the launcher would
      raise out of its shutdown and kill the workers after 30 s.
    * SIGUSR1 and SIGUSR2, by which Slurm may announce a time limit, are ignored. They would end the launcher and orphan
      the workers.
    * Without an NVIDIA driver, the warning at every start that GPU health cannot be checked is silenced.
    * ``--nproc-per-node=auto`` means one worker for each device, or one worker without devices.
    * The launcher's sockets are in the folder of the launch. The folder is set in the launcher's process only, because
      files of workers in the default folder may be meant to stay.
    * The store for the rendezvous of a single node listens on the loopback interface only. It would listen on all
      interfaces, and its content is unpickled.
    * Messages of the launcher and its rank monitors ("aborted" at the end of every good run, an error for an orderly
      stop) go to the file that the environment names, and not among the lines of the workers.
    * The rendezvous does not look up method names in sources. It would do so twenty times for debug logs, each time for
      every frame, which takes half a second.
    * The process ends as soon as the launcher has done its work. Unloading torch takes as long as importing it.
    """
    if (path := os.environ.pop(_LOG_VARIABLE, None)) is not None and (log := open_log(path)) is not None:
        sys.stdout = sys.stderr = log  # not the file descriptors, which workers inherit
    install_handler = signal.signal
    stopping = False

    def once(signum: int, handler: Any) -> Any:
        if not callable(handler):
            return install_handler(signum, handler)

        def first_only(received: int, frame: FrameType | None, inner: Callable[..., Any] = handler) -> None:
            nonlocal stopping
            if not stopping:
                stopping = True
                inner(received, frame)

        return install_handler(signum, first_only)

    signal.signal = once  # type: ignore[assignment]
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        install_handler(signum, lambda signum, frame: None)  # unlike SIG_IGN, child processes do not inherit it
    if not Path("/proc/driver/nvidia/version").exists():
        logging.getLogger("nvidia_resiliency_ext.shared_utils.health_check").setLevel(logging.ERROR)
        ignore_pynvml()
    module, *arguments = sys.argv[1:]
    if (auto := "--nproc-per-node=auto") in arguments:
        arguments[arguments.index(auto)] = f"--nproc-per-node={device_count()}"
    if (run_id := os.environ.pop(RUN_ID_VARIABLE, None)) is not None:
        arguments.insert(0, f"--rdzv-id={run_id}")
    if (folder := os.environ.get(FOLDER_VARIABLE)) is not None:
        tempfile.tempdir = folder
    if (loopback := f"--rdzv-endpoint={LOOPBACK}") in arguments:
        store = serve_store(STORE_WITHIN_S)
        # The rendezvous creates a server, which shares this one. NVRx before 0.5 cannot do so, and connects to it.
        version = installed_version()
        is_host = int(version is None or version >= (0, 5))
        where = [f"--rdzv-endpoint={store.host}:{store.port}", f"--rdzv-conf=is_host={is_host}"]
        index = arguments.index(loopback)
        arguments[index : index + 1] = where
    sys.argv = [module, *arguments]
    if sys.platform == "linux":
        spares.install(module, makes_spares=os.environ.pop(spares.SPARES_VARIABLE, "") == "auto")
    name_methods_quickly(module)
    code = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    others = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if others or not isinstance(code, int | None):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(code or 0))


_RENDEZVOUS = {
    _NVRX_LAUNCHER: (
        "nvidia_resiliency_ext.fault_tolerance._ft_rendezvous",  # until 0.6
        "nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier",  # from 0.5 on
    ),
    _TORCH_LAUNCHER: ("torch.distributed.elastic.rendezvous.dynamic_rendezvous",),
}


def name_methods_quickly(launcher: str) -> list[str]:
    """Makes the rendezvous of a launcher find the names of methods without reading any source.

    Args:
        launcher: The launcher's module.

    Returns:
        The patched modules; none for another launcher, or for a version that does not look up method names.
    """
    # NVRx's rendezvous imports the launcher, which runs as the main program all the same.
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
    found = []
    for name in _RENDEZVOUS.get(launcher, ()):
        with suppress(ImportError):
            module: Any = importlib.import_module(name)
            if hasattr(module, "get_method_name"):
                module.get_method_name = _method_name
                found.append(name)
    return found


def _method_name(depth: int = 2) -> str:
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"


def device_count() -> int:
    """The number of workers for ``--nproc-per-node=auto``: one for each device, or one without devices."""
    import torch

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


if __name__ == "__main__":
    main()
