"""Exceptions of a script: whether a retry can help, and how they are shown. Imports neither torch nor Lightning."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import sys
import sysconfig
import time
import traceback
import types
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from lightning_resilience._formatting import timestamp
from lightning_resilience._output import log_line
from lightning_resilience.run.failures import normalised
from lightning_resilience.run.ledger import node_name

# Exceptions that mistakes in a script raise, rather than a device or a network that may work again soon.
_MISTAKES = (
    *("SyntaxError", "IndentationError", "TabError", "NameError", "UnboundLocalError", "AttributeError", "TypeError"),
    *("ValueError", "KeyError", "IndexError", "AssertionError", "ImportError", "ModuleNotFoundError"),
    *("NotImplementedError", "RecursionError", "ZeroDivisionError"),
)
# Shapes that do not fit raise one of these, and so does a GPU that is gone; the message shows which it is.
_MISTAKES_OR_NOT = ("RuntimeError", "MisconfigurationException")
_OF_MACHINES = re.compile(
    r"cuda|nccl|gloo|cudnn|cublas|\bhip\b|rocm|\bxpu\b|\bgpus?\b|nvml|nvidia|driver|device-side|memory|connect|network"
    r"|socket|address|time[d ]?.?out|\bstore\b|rendezvous|\bpeers?\b|worker|\bprocess(es)?\b|storage|disk|too many open"
    r"|resource|temporar|unavailable|interrupt|killed|signal|thread|http|download|\block\b",
    re.IGNORECASE,
)
# A path with a mistake in it. But if a training of the same command has begun before, a disk is not mounted.
_FILES = ("FileNotFoundError", "NotADirectoryError", "IsADirectoryError")

# Names of parameters, layers and functions do not indicate a machine: "network.0.weight".
_NAMES = re.compile(r"\b[a-z0-9]+(?:[._][a-z0-9]+)+\b")

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_NOT_THE_USERS = (
    "<",  # <frozen runpy>
    _PACKAGE,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_WRAPPERS = re.compile(
    r"/(lightning/pytorch|pytorch_lightning)/(trainer/call\.py|strategies/launchers/)"
    r"|/lightning/fabric/strategies/launchers/|/torch/distributed/(elastic/|run\.py|launch\.py)"
)
# What ranks raise when another rank has ended. The watchdog reports which rank that was, and why.
_LOST_PEER = re.compile(r"gloo/transport/.*(Connection closed by peer|Connection reset by peer|Broken pipe)")
_MOST_FILES = 100


class WrongWorldSize(RuntimeError):
    """The launcher has started another number of workers than the Trainer has: a person has to change one of them."""


def is_stop_of_lightning(request: SystemExit) -> bool:
    """Whether Lightning has raised it in a validation or test, because SIGTERM was received: its exit code is 0."""
    return any(cls.__name__ == "SIGTERMException" for cls in type(request).__mro__)


def describe(error: BaseException) -> dict[str, Any]:
    """For the ledger: the class of an exception, the innermost line of the user's own code, and the kind of mistake.

    Args:
        error: The exception.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f"{os.path.basename(file)}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    described = {"kind": type(error).__name__, "place": users[-1] if users else None}
    return described | ({"mistake": mistake} if (mistake := _mistake(error)) is not None else {})


def _mistake(error: BaseException) -> str | None:
    kind = type(error)
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return None
    if kind.__name__ in _FILES:
        return "file"
    if kind.__module__ == "builtins" and kind.__name__ in _MISTAKES:
        return "code"
    is_one = kind.__name__ in _MISTAKES_OR_NOT or any(each.__name__ in _MISTAKES for each in kind.__mro__)
    may_be_better = isinstance(error, OSError) or _OF_MACHINES.search(_NAMES.sub("", str(error))) is not None
    return "code" if is_one and not may_be_better else None


def what_to_change(error: BaseException) -> str | None:
    """What a person has to change before another attempt can end differently, if that is known.

    Args:
        error: The exception; the exceptions that have led to it are examined, too.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, WrongWorldSize):
            return str(cause)
        if (found := _wrong_world_size(cause) or _past_max_epochs(cause)) is not None:
            return found
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _past_max_epochs(error: BaseException) -> str | None:
    if type(error).__name__ != "MisconfigurationException":
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "fit"]
    trainers = [frame.f_locals.get("self") for frame in frames]
    return next(filter(None, map(past_max_epochs, trainers)), None)


def past_max_epochs(trainer: Any) -> str | None:
    """What to change if a Trainer has restored a checkpoint of an epoch beyond its ``max_epochs``.

    Args:
        trainer: A Trainer, or any other object with a method ``fit``.
    """
    epoch, most = getattr(trainer, "current_epoch", None), getattr(trainer, "max_epochs", None)
    if not (isinstance(epoch, Real) and isinstance(most, Real) and 0 <= float(most) < float(epoch)):  # also NumPy's
        return None
    return (
        f"the script resumes from a checkpoint of epoch {epoch}, but its Trainer ends at max_epochs={most}: raise it, "
        "or give a new run its own directory (--run-dir, run_dir=)"
    )


def _wrong_world_size(error: BaseException) -> str | None:
    """What to change if a ``ClusterEnvironment`` has refused the Trainer's ``devices`` and ``num_nodes``.

    Args:
        error: The exception.
    """
    called = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__) if _checks_world_size(frame)]
    if not isinstance(error, ValueError) or not called:
        return None
    devices, nodes = called[-1]["num_devices"], called[-1]["num_nodes"]
    return (
        f"the script makes a Trainer(devices={devices}, num_nodes={nodes}), but launch has started a world of "
        f"{os.environ.get('WORLD_SIZE')}: give launch --nproc-per-node {devices} --nnodes {nodes}, or change these "
        "numbers of the Trainer"
    )


def _checks_world_size(frame: types.FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "validate_settings" and code.co_varnames[1:3] == ("num_devices", "num_nodes")


def show(error: BaseException, folder: Path, launch_id: str, rank: int) -> None:
    """Reports an exception as Python does for a script that it runs directly.

    An exception that was reported before, or that only shows that another rank has gone, is reported in one line.

    The traceback is shown without the frames that lead to the script, of Lightning's launchers around a fit, and of
    this package. The whole traceback is kept in a file.

    Args:
        error: The exception.
        folder: The folder for whole tracebacks, ``errors`` in the run directory.
        launch_id: The id of the launch that decides: a later launch reports the same exception again.
        rank: The rank on which it was raised.
    """
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    about = describe(error)
    words = traceback.format_exception_only(type(error), error)[-1].strip()
    same = f"{launch_id} {about['kind']} {about['place']} {normalised(words)}"
    path = folder / f"{hashlib.sha256(same.encode()).hexdigest()[:12]}.log"
    is_first, is_kept = _keep(path, f"{timestamp(time.time())} rank {rank} on {node_name()}", whole)
    if is_kept and isinstance(error, RuntimeError) and (found := _LOST_PEER.search(words)):
        log_line(f"Rank {rank} has lost the connection to another rank ({found[1]}); traceback: {path}")
        return
    if not is_first:
        place = f" ({about['place']})" if about["place"] else ""
        line = f"{words[:200]}{place}"
        log_line(f"Rank {rank}, again: {line}; traceback: {path}")
        return
    count = _cut(error, set())
    sys.excepthook(type(error), error, error.__traceback__)
    if count and is_kept:
        log_line(f"Full traceback, with {count} more frames outside your code: {path}")


def _keep(path: Path, head: str, whole: str) -> tuple[bool, bool]:
    """Writes a traceback to a file; returns whether it is the first of its kind, and whether it is in the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not path.exists() and sum(1 for _ in path.parent.iterdir()) >= _MOST_FILES:
                return True, False
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{head}\n{whole}")
            return True, True
        except FileExistsError:
            with suppress(OSError), open(path, "a", encoding="utf-8") as file:  # on a full disk it is no news either
                file.write(f"{head}: again\n")
            return False, True
    except OSError:
        return True, False


def _cut(error: BaseException | None, seen: set[int]) -> int:
    """Removes frames that do not concern the user from an exception and its causes; returns how many."""
    if error is None or id(error) in seen:
        return 0
    seen.add(id(error))
    frames = []
    now = error.__traceback__
    while now is not None:
        frames.append(now)
        now = now.tb_next
    # The frames that lead to the script are always the same.
    led = next((i for i, each in enumerate(frames) if not _leads_to_script(each.tb_frame.f_code.co_filename)), 0)
    users = [each for each in frames[led:] if not _is_wrapper(each.tb_frame.f_code.co_filename)]
    if users:
        kept: types.TracebackType | None = None
        for each in reversed(users):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = kept
    below = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
    return (len(frames) - led - len(users) if users else 0) + sum(_cut(each, seen) for each in below)


def _leads_to_script(file: str) -> bool:
    return file in (os.path.join(os.path.dirname(__file__), "worker.py"), runpy.__file__, "<frozen runpy>")


def _is_wrapper(file: str) -> bool:
    return file.startswith(_PACKAGE) or _WRAPPERS.search(file.replace(os.sep, "/")) is not None
