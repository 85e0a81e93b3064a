"""Checks that can be made before a job is queued: what would refuse a launch, end it soon, or leave it unprotected.

The checks import neither torch nor Lightning, use no network, and write nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import netrc
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from lightning_resilience import _nvrx
from lightning_resilience._formatting import duration, format_bytes
from lightning_resilience.checkpoint.capacity import available_bytes, file_systems, needed_bytes
from lightning_resilience.checkpoint.local_folders import base_folder
from lightning_resilience.launch import otel, trainjob
from lightning_resilience.launch.job import LaunchSettings, Preview
from lightning_resilience.launch.monitor import MonitorSettings
from lightning_resilience.launch.prometheus import endpoint_of
from lightning_resilience.recipes import JOBS, NO_RECIPE
from lightning_resilience.run.run_directory import OFF_VARIABLE, RunDirectory, is_turned_off

Level = Literal["ok", "warn", "fail"]
"""``fail``: the launch would be refused or could not work. ``warn``: it may not do what the user wants."""


class Check(NamedTuple):
    """The result of a check.

    Attributes:
        name: What was checked.
        level: The result.
        text: What was found, and what to do.
    """

    name: str
    level: Level
    text: str


_SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "cifs",
    "smb3",
    "glusterfs",
    "virtiofs",
    "9p",
)
_SMALL_SHM = 1 << 30
_KEPT_GLOBALLY = 2  # a new checkpoint is written before the old one is removed
_TIME_ERROR = 5  # of adjtimex: the kernel's clock is not synchronized
_GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


def checks(settings: LaunchSettings, preview: Preview, nodes: int) -> Iterator[Check]:
    """Makes all checks.

    Args:
        settings: The settings of the launch.
        preview: What the launch would do.
        nodes: On how many nodes.
    """
    yield _run(settings, preview)
    yield _budget(preview)
    yield _script(settings)
    yield _recipe(settings)
    yield _entry_point(settings)
    yield from _switched_off()
    yield _storage(settings, nodes)
    yield _room(settings)
    yield _node_memory(settings)
    yield _shared_memory()
    yield _nvrx_there()
    yield _grace_period(settings, preview)
    yield _wandb()
    yield from _monitoring(settings.monitoring)
    if nodes > 1 or settings.spare:
        yield _rendezvous(settings)
        yield _clock()


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists.

    Args:
        path: An absolute path.
    """
    return next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))


def is_shared(folder: Path) -> bool:
    """Whether an existing folder is on network storage.

    Args:
        folder: The folder.
    """
    return any(kind in _SHARED or kind.startswith("fuse.") for kind in file_systems(folder))


def why_not_writable(path: Path) -> str | None:
    """Why nothing can be written in a folder, which may not exist yet; ``None`` if its mode allows it.

    Args:
        path: The folder.
    """
    folder = existing(path)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a file system that is mounted read-only"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"this user cannot write in {folder}"


def _run(settings: LaunchSettings, preview: Preview) -> Check:
    if preview.refusal is not None:
        return Check("run", "fail", preview.refusal)
    if preview.watched is not None:
        return Check("run", "warn", f"{preview.watched} may be running it: the launch first watches its record")
    if preview.finished is not None:
        return Check("run", "warn", f"it has finished already ({preview.finished.reason}): nothing would be started")
    return Check("run", "ok", f"no launch runs {settings.run_dir}")


def _budget(preview: Preview) -> Check:
    is_spent = preview.decision.action == "give_up"
    then = "; the launch after that begins with a new budget" if is_spent else ""
    return Check("budget", "fail" if is_spent else "ok", preview.decision.reason + then)


def _script(settings: LaunchSettings) -> Check:
    script = settings.command[0]
    if script == "-m":
        return Check("script", "ok", f"module {settings.command[1]} is found")
    path = Path(script)
    if path.suffix != ".py":
        return Check("script", "ok", f"{script} is found")
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return Check("script", "fail", f"{script} does not compile: {error}")
    except OSError as error:
        return Check("script", "fail", f"{script} cannot be read: {error}")
    return Check("script", "ok", f"{script} compiles")


def _recipe(settings: LaunchSettings) -> Check:
    if settings.recipe in JOBS:
        is_none = settings.recipe == NO_RECIPE
        return Check("recipe", "ok", "none: the script brings its callbacks" if is_none else settings.recipe)
    module = settings.recipe.partition(":")[0]
    top = module.partition(".")[0]
    is_there = any(Path(f"{top}{end}").exists() for end in ("", ".py")) or _is_installed(top)
    text = f"module {module} is found" if is_there else f"there is no module {module}, seen from {os.getcwd()}"
    return Check("recipe", "ok" if is_there else "fail", text)


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _entry_point(settings: LaunchSettings) -> Check:
    if settings.recipe == NO_RECIPE:
        return Check("callbacks", "ok", "none are added")
    found = metadata.entry_points()
    missing = [
        group for group in _GROUPS if "lightning_resilience" not in {each.name for each in found.select(group=group)}
    ]
    if missing:
        text = (
            f"the entry point {missing[0]} is missing, so no Trainer gets the recipe: install the package (pip install)"
        )
        return Check("callbacks", "fail", text)
    return Check("callbacks", "ok", "the entry point adds them to every Trainer")


def _switched_off() -> Iterator[Check]:
    if is_turned_off():
        yield Check("switch", "warn", f"{OFF_VARIABLE} is set: callbacks and recipes do nothing; unset it")


def _storage(settings: LaunchSettings, nodes: int) -> Check:
    if (why := why_not_writable(settings.run_dir)) is not None:
        return Check("storage", "fail", f"{why}; choose another --run-dir")
    folder = existing(settings.run_dir)
    kind = next(iter(file_systems(folder)), "of an unknown kind")
    if nodes > 1 and not is_shared(folder):
        return Check(
            "storage", "warn", f"{folder} ({kind}) does not look like storage that all nodes share: see df {folder}"
        )
    if kind in ("tmpfs", "ramfs"):
        return Check("storage", "warn", f"{folder} is in memory ({kind}): checkpoints are lost with the node")
    return Check("storage", "ok", f"{folder} ({kind}) is writable")


def newest_checkpoint_bytes(run_dir: Path) -> int | None:
    """The size of the newest checkpoint of a run; ``None``: there is none.

    Args:
        run_dir: The run directory.
    """
    for fit in reversed(RunDirectory(run_dir).fits):
        with suppress(OSError):
            for path in sorted(fit.checkpoints.glob("step-*.ckpt"), reverse=True):
                return sum(each.stat().st_size for each in ([path] if path.is_file() else path.iterdir()))
    return None


def _room(settings: LaunchSettings) -> Check:
    about = os.statvfs(existing(settings.run_dir))
    free = about.f_bavail * about.f_frsize
    size = newest_checkpoint_bytes(settings.run_dir)
    if size is not None and free < _KEPT_GLOBALLY * size:
        text = (
            f"{format_bytes(free)} are free, and a checkpoint has {format_bytes(size)}: make room for {_KEPT_GLOBALLY}"
        )
        return Check("room", "warn", text)
    need = (
        "; how much a checkpoint needs is not known yet" if size is None else f"; a checkpoint has {format_bytes(size)}"
    )
    return Check("room", "ok", f"{format_bytes(free)} are free{need}")


def _node_memory(settings: LaunchSettings) -> Check:
    base = base_folder(settings.local_dir)
    if (why := why_not_writable(base)) is not None:
        return Check("local checkpoints", "warn", f"{why}; choose another --local-dir")
    available = available_bytes(base)
    room = f"{format_bytes(available.files.nbytes)} are available in {base}"
    if (size := newest_checkpoint_bytes(settings.run_dir)) is None:
        return Check("local checkpoints", "ok", f"{room}; how much they need is known after the first save")
    need = needed_bytes(size, keep=1, replicas_received=0, in_memory=available.in_memory).files
    text = f"{room}, and they need up to {format_bytes(need)}, without copies of other nodes"
    if need > available.files.nbytes:
        return Check("local checkpoints", "warn", f"{text}: they are left out; use --local-dir on a local disk")
    return Check("local checkpoints", "ok", text)


def _shared_memory() -> Check:
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return Check("/dev/shm", "warn", "it does not exist: data-loader workers need it")
    size = about.f_blocks * about.f_frsize
    if size and size < _SMALL_SHM:
        advice = "data-loader workers may fail; in a container use --shm-size or --ipc=host"
        return Check("/dev/shm", "warn", f"it has {format_bytes(size)} only: {advice}")
    return Check("/dev/shm", "ok", f"it has {format_bytes(size)}" if size else "it has no limit")


def _nvrx_there() -> Check:
    version = _nvrx.installed_version()
    if version is None:
        text = "nvidia-resiliency-ext is not installed: torchrun starts the workers, without rank monitors"
        return Check("NVRx", "warn", text)
    return Check("NVRx", "ok", ".".join(map(str, version)))


def _grace_period(settings: LaunchSettings, preview: Preview) -> Check:
    took, grace_s = preview.history.last_save_s, settings.grace_period_s
    if took is not None and 0 < grace_s < took:
        text = f"the last save took {duration(took)}, and --grace-period is {grace_s:g} s: give it more"
        return Check("grace period", "warn", text)
    known = "" if took is None else f"; the last save took {duration(took)}"
    return Check("grace period", "ok", f"{duration(grace_s)}{known}" if grace_s else f"no limit{known}")


def _wandb() -> Check:
    if not _is_installed("wandb"):
        return Check("W&B", "ok", "it is not installed")
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return Check("W&B", "ok", f"WANDB_MODE is {mode}")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    if os.environ.get("WANDB_API_KEY") or _in_netrc(host):
        return Check("W&B", "ok", f"there is a login for {host}")
    text = f"there is no login for {host}: W&B would ask for one or fail (wandb login, or WANDB_MODE=offline)"
    return Check("W&B", "warn", text)


def _in_netrc(host: str) -> bool:
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host) is not None
    return False


def _rendezvous(settings: LaunchSettings) -> Check:
    if not settings.is_owner or settings.rdzv_endpoint is None:
        return Check("rendezvous", "ok", f"the nodes meet at {settings.rdzv_endpoint}, which is another node")
    if not (port := settings.rdzv_endpoint.rpartition(":")[2]).isdecimal():
        return Check("rendezvous", "ok", "the job chooses where its nodes meet")
    if (problem := _why_not_bound("", int(port))) is not None:
        return Check("rendezvous", "fail", f"{problem}: choose another")
    return Check("rendezvous", "ok", f"port {port} is free here")


def _why_not_bound(host: str, port: int) -> str | None:
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"port {port} cannot be used here ({error.strerror})"
    return None


def _monitoring(asked: MonitorSettings) -> Iterator[Check]:
    """Checks monitoring; a problem here is a warning, since it would not fail the run."""
    if asked.prometheus is not None:
        folder = Path(asked.prometheus).parent
        if (endpoint := endpoint_of(asked.prometheus)) is not None:
            problem = _why_not_bound(*endpoint)
        else:
            problem = why_not_writable(folder) if folder.is_dir() else f"there is no folder {folder}"
        yield Check("--prometheus", "warn" if problem else "ok", problem or f"metrics at {asked.prometheus}")
    if asked.on_event:
        yield Check("--on-event", "ok", f"at important events: {shlex.join(asked.on_event)}")
    if (collector := otel.endpoint()) is not None:
        is_there = _is_installed("opentelemetry.sdk.metrics")
        text = f"metrics go to {collector}" if is_there else "pip install 'lightning-resilience[metrics]'"
        yield Check("OpenTelemetry", "ok" if is_there else "warn", text)
    if (server := trainjob.server()) is not None:
        yield Check("TrainJob", "ok", f"its progress goes to {server}")


def _clock() -> Check:
    state = -1
    with suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zeros: only reads
    if state == _TIME_ERROR:
        text = "the kernel's clock is not synchronised: times of nodes may not match (chronyd, systemd-timesyncd)"
        return Check("clock", "warn", text)
    return Check("clock", "ok", "it is synchronised" if state >= 0 else "not known")
