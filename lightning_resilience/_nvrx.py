"""The only file that knows which version of nvidia-resiliency-ext (NVRx) is installed, if any.

As a program it is the elastic launcher that starts the workers: NVRx's ``ft_launcher``, or ``torchrun`` where NVRx is
not installed, protected from what a scheduler does to it (see :func:`main`).
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_resilience._files import write_json

WORKERS_STOP_TIMEOUT_S = 15
"""How long the survivors of a failed worker may take to end before they are killed and the group is restarted."""

_NVRX_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
_TORCH_LAUNCHER = "torch.distributed.run"


def installed_version() -> tuple[int, ...] | None:
    """NVRx's version, or ``None`` if it is not installed."""
    try:
        version = metadata.version("nvidia-resiliency-ext")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives the workers of every attempt a store of their own. torch's elastic launcher, which NVRx uses from 0.5 on, hands
them that of the rendezvous, in which a restarted gloo group meets the addresses of the one before and hangs."""


def elastic_launcher(
    max_restarts: int, term_timeout_s: float, directory: Path, version: tuple[int, ...] | None
) -> tuple[list[str], dict[str, str]]:
    """The start of the elastic launcher's command line, and what it needs in its environment.

    The rendezvous and the program to run follow on the command line.

    Args:
        max_restarts: How often it may restart the workers.
        term_timeout_s: How long the workers may take to end after it was told to stop.
        directory: Where it keeps its files.
        version: NVRx's, see :func:`installed_version`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lightning_resilience._nvrx"]
    common = [f"--max-restarts={max_restarts}", f"--log-dir={directory}"]
    if version is None:
        # An environment variable: unlike a flag, an older torch that does not know it does not mind.
        timeout = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{term_timeout_s:.0f}"}
        return [*command, _TORCH_LAUNCHER, *common], timeout | _OWN_STORE
    # Until 0.5 a rank that has sent no heartbeat for an hour is killed, and only a file can turn that off: not every
    # script sends any.
    config = directory / "ft_config.yaml"
    timeouts = {"initial_rank_heartbeat_timeout": None, "rank_heartbeat_timeout": None}
    write_json(config, {"fault_tolerance": timeouts})  # JSON is YAML
    command += [_NVRX_LAUNCHER, *common, f"--ft-cfg-path={config}", "--ft-log-level=WARNING"]
    command += [f"--term-timeout={term_timeout_s:.0f}", f"--workers-stop-timeout={WORKERS_STOP_TIMEOUT_S}"]
    if version < (0, 5):
        command += [
            "--ft-enable-nic-monitor=false"
        ]  # the default since, and full of errors where there is no such card
    environment = {"FT_LAUNCHER_LOGLEVEL": os.environ.get("FT_LAUNCHER_LOGLEVEL", "WARNING")}
    return command, environment if version < (0, 5) else environment | _OWN_STORE


def main() -> None:
    """Runs the launcher module that is named first on the command line, hardened.

    * A second SIGTERM would cut the grace period short: the launcher raises out of its shutdown and kills the workers
      after 30 s. Slurm sends one to every process of a job step, and ``lightning-resilience launch`` sends one too, so
      only the first reaches the launcher.
    * SIGUSR1, by which Slurm announces a time limit, would end it and orphan the workers.
    * Without an NVIDIA driver it warns at every start that it can't check the health of the GPUs.
    * ``--nproc-per-node=auto`` is one worker for each device, and one where there is none.
    """
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
    install_handler(
        signal.SIGUSR1, lambda signum, frame: None
    )  # a handler, unlike SIG_IGN, is not passed on to workers
    if not Path("/proc/driver/nvidia/version").exists():
        logging.getLogger("nvidia_resiliency_ext.shared_utils.health_check").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=".*pynvml package is deprecated", category=FutureWarning)
    module, *arguments = sys.argv[1:]
    if (auto := "--nproc-per-node=auto") in arguments:
        arguments[arguments.index(auto)] = f"--nproc-per-node={_device_count()}"
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _device_count() -> int:
    import torch

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


if __name__ == "__main__":
    main()
