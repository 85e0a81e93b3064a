"""The run directory: the identity of a run on shared storage. Files only; imports neither torch nor Lightning.

```
RUN_DIR/
  ledger/             the events: one file for each host that has written (see ledger.py)
  run.json            a name that no other run has, and the directory to which it belongs
  copy-of-*.json      if this directory is a copy of another run's: its new name
  attempt.json        the token of the processes that may write now; a late process of an older attempt may not
  trainer.json        the process that trains here now; a process of another job on its host is refused
  outcome.json        how the script ended last
  command.txt         the script and its arguments of the last launch
  fresh.json          the runs that --fresh has begun next to this one; the newest of them continues
  errors/             the errors of the script, each with its whole traceback
  launches/           the present launches of this run, each with its host and process; one decides
  decision.json       with several nodes: what the first node has decided for all nodes
  elastic/            the elastic launcher's own files
  logs/               the output of the ranks (see launch/rank_logs.py); launcher-NODE.log: the elastic launcher
  not-shown.log       output whose terminal or reader was gone, or whose disk was full
  fit-000/            one folder for every fit of the script, in the order in which the script makes them
    fingerprint.json  what the fit trains: module class and parameter shapes
    settings.json     the settings of its last start: hyper-parameters, optimizers, data, limits
    outcome.json      how this fit ended last
    failed_start.json how a later start of the finished fit ended before it trained anything
    condemned.json    checkpoints that have turned out to be bad after they were loaded
    courses.json      the steps at which the fit has left a course for another one
    nan_guard.json    number of rollbacks, and the batches that the fit skips
    checkpoints/      step-000000000012.ckpt ...
    quarantine/       checkpoints that failed verification, each with the reason next to it
```
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from lightning_resilience._files import create_json, load_json, read_json, temporary_path, write_json
from lightning_resilience._processes import describe_process, is_being_killed, is_running, pid_namespace

log = logging.getLogger(__name__)

_T = TypeVar("_T")

NOT_SHOWN = "not-shown.log"
"""The file in a run directory for output that could not be shown."""

RUN_DIR_VARIABLE = "LIGHTNING_RESILIENCE_RUN_DIR"
"""Environment variable in which ``lightning-resilience launch`` gives the workers their run directory."""

LOCAL_DIR_VARIABLE = "LIGHTNING_RESILIENCE_LOCAL_DIR"
"""Environment variable with the folder for local checkpoints, set by ``lightning-resilience launch --local-dir``."""

OFF_VARIABLE = "LIGHTNING_RESILIENCE_OFF"
"""Environment variable that turns the package off: with ``1`` callbacks and recipes do nothing in any Trainer."""

WORKER_PID_VARIABLE = "LIGHTNING_RESILIENCE_WORKER_PID"
"""Environment variable with the id of the process that runs the launched script. A fit in a child process of it (such
as a parallel search) does not belong to the run."""

ELASTIC_VARIABLE = "LIGHTNING_RESILIENCE_ELASTIC"
"""Environment variable of ranks started by ``launch --elastic``, which replaces single ranks: ``hold`` if the other
ranks wait for the replacement of a lost rank, ``go_on`` if they may keep training without it."""

REPLACES_STRAGGLERS_VARIABLE = "LIGHTNING_RESILIENCE_REPLACE_STRAGGLERS"
"""Environment variable of ranks that ``launch --elastic`` also replaces if they are slow."""

JOINS_VARIABLE = "LIGHTNING_RESILIENCE_JOINS"
"""Environment variable of a joining rank: others may train without it, so it waits in its first fit to be admitted."""

Status = Literal["finished", "interrupted", "failed", "halted"]
"""How a fit or a script ended.

``finished``: nothing is left to do. ``interrupted``: stopped on purpose and resumable. ``failed``: an error; may be
retried within the budget. ``halted``: a verdict that a retry cannot change.
"""


def is_turned_off() -> bool:
    """Whether the environment turns callbacks and recipes off."""
    return os.environ.get(OFF_VARIABLE, "").lower() in ("1", "true", "yes", "on")


def is_started_again() -> bool:
    """Whether a launcher starts the workers again after their end.

    If not, a slow or overdue rank is not ended: otherwise a callback that rarely takes long would cost the run.
    """
    return RUN_DIR_VARIABLE in os.environ or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


@dataclass(frozen=True)
class Outcome:
    """How a fit or the whole script ended.

    Args:
        status: See :data:`Status`.
        reason: One readable sentence.
        step: ``trainer.global_step`` at the end, if a fit had begun.
        attempt: Token of the attempt that wrote this (see :meth:`RunDirectory.claim`).
        time: Seconds since the epoch.
        details: Further information from the writer, JSON-serializable.
    """

    status: Status
    reason: str
    step: int | None = None
    attempt: str | None = None
    time: float = field(default_factory=time.time)
    details: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def publish(path: str | os.PathLike[str], outcome: Outcome) -> None:
        """Publishes an outcome at ``path``."""
        write_json(path, asdict(outcome))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Outcome | None:
        """The outcome at ``path``, or ``None`` if it does not exist or cannot be read."""
        return Outcome.of(read_json(path))

    @staticmethod
    def of(content: dict[str, Any] | None) -> Outcome | None:
        """The outcome in the parsed JSON of its file; ``None`` if ``content`` is no outcome."""
        if content is None or content.get("status") not in get_args(Status):
            return None
        step, attempt, written, details = (content.get(key) for key in ("step", "attempt", "time", "details"))
        return Outcome(
            status=cast(Status, content["status"]),
            reason=str(content.get("reason", "")),
            step=step if isinstance(step, int) else None,
            attempt=attempt if isinstance(attempt, str) else None,
            time=float(written) if isinstance(written, (int, float)) else 0.0,
            details=details if isinstance(details, dict) else {},
        )


_claimed: set[str] = set()


class StaleAttempt(SystemExit):
    """A process of an older attempt tried to write into a run that a newer attempt owns."""


class AnotherFit(RuntimeError):
    """The run directory holds another fit than the script's present one: every attempt would end like this one."""


class StorageFails(RuntimeError):
    """The storage has not answered at the start of a fit. Nothing was moved or begun anew, so a retry is safe."""


class _File(Generic[_T]):
    """A descriptor for a JSON file in the folder of a fit: the attribute reads and publishes the file."""

    def __init__(self, name: str, read: Callable[[Path], _T | None], write: Callable[[Path, _T], None]) -> None:
        self._name, self._read, self._write = name, read, write

    def __get__(self, fit: FitDirectory, owner: type) -> _T | None:
        return self._read(fit.path / self._name)

    def __set__(self, fit: FitDirectory, content: _T) -> None:
        self._write(fit.path / self._name, content)


class FitDirectory:
    """One fit's folder in a run directory.

    Args:
        path: The folder, created with its ``checkpoints`` on first use.
    """

    outcome = _File("outcome.json", Outcome.read, Outcome.publish)
    """How this fit ended last."""

    failed_start = _File("failed_start.json", Outcome.read, Outcome.publish)
    """How the last start of this fit that trained nothing ended, after the fit had finished."""

    settings = _File("settings.json", load_json, write_json)
    """The settings of this fit at its last start. Raises ``OSError`` if they cannot be read."""

    fingerprint = _File("fingerprint.json", load_json, write_json)
    """What this fit trains, as its first attempt described it. Raises ``OSError`` if it cannot be read: to overwrite it
    then could lose part of it."""

    goal = _File("goal.json", read_json, write_json)
    """The end of this fit according to its last attempt: ``step``, or ``null`` if its Trainer does not know it."""

    outputs = _File("outputs.json", read_json, write_json)
    """The places of Lightning's own outputs of this fit; see :mod:`lightning_resilience.fit.outputs`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.quarantine = path / "quarantine"
        self._bad_file = path / "condemned.json"
        self._courses = path / "courses.json"

    def create(self) -> None:
        """Makes the folders."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def begin(self) -> Outcome | None:
        """Makes the folders; returns how this fit ended last.

        Raises:
            OSError: If the folders cannot be made, or the outcome cannot be read.
        """
        self.create()
        return Outcome.of(load_json(self.path / "outcome.json"))

    @property
    def bad_checkpoints(self) -> dict[str, str]:
        """The checkpoints that have turned out to be bad after they were loaded: their names, and the reasons.

        Raises:
            OSError: If they cannot be read.
        """
        content = load_json(self._bad_file) or {}
        return {name: str(reason) for name, reason in content.items()}

    def mark_bad(self, name: str, reason: str) -> None:
        """Adds a checkpoint to :attr:`bad_checkpoints`."""
        write_json(self._bad_file, {**self.bad_checkpoints, f"{name}": reason})

    @property
    def forks(self) -> list[int]:
        """The steps at which the fit has left a course for another one, oldest first.

        See :func:`~.generations.is_on_course`.

        Raises:
            OSError: If they cannot be read.
        """
        content = load_json(self._courses) or {}
        return [int(step) for step in content.get("forks", [])]

    @forks.setter
    def forks(self, steps: list[int]) -> None:
        write_json(self._courses, {"forks": steps})


def _identity(record: dict[str, Any] | None) -> str | None:
    found = (record or {}).get("id")
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{16}", found) else None


CHECKPOINT_NAME = re.compile(r"step-(\d+)(-final)?\.ckpt")
"""The name of a checkpoint: its step, and a mark if it is the last state of a finished fit."""

LAUNCHED = "launch"
"""The job of everything that ``lightning-resilience launch`` starts, on any node: launches themselves ensure that only
one of them trains."""


class RunDirectory:
    """A run's folder on shared storage.

    Args:
        path: The folder; it is created when something is first written.

    Raises:
        ValueError: If ``path`` is an address (URL) or a file, not a folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise ValueError(
                f"{os.fspath(path)} is not a folder: a run directory is on a file system that all nodes have mounted. "
                "Give one as run_dir."
            )
        self.path = Path(path).expanduser().absolute()
        if os.path.isfile(self.path):
            raise ValueError(f"{self.path} is a file: a run directory is a folder. Give another run_dir.")
        self.ledger = self.path / "ledger"
        self._attempt = self.path / "attempt.json"
        self._trainer = self.path / "trainer.json"
        self._outcome = self.path / "outcome.json"

    def fit(self, index: int) -> FitDirectory:
        """The folder of the script's fit number ``index`` (0 is the first)."""
        return FitDirectory(self.path / f"fit-{index:03d}")

    @property
    def fits(self) -> list[FitDirectory]:
        """The folders of all fits that have begun, in order."""
        paths = self.path.glob("fit-[0-9]*")
        return [FitDirectory(path) for path in sorted(paths, key=lambda path: (len(path.name), path.name))]

    def steps_saved(self, fit: int) -> list[int] | None:
        """The steps of the checkpoints of a fit, from their names; ``None`` if the folder cannot be read here."""
        folder = self.fit(fit)
        try:
            names = os.listdir(folder.checkpoints)
        except FileNotFoundError:
            return [] if folder.path.is_dir() else None
        except OSError:
            return None
        return [int(match[1]) for match in map(CHECKPOINT_NAME.fullmatch, names) if match is not None]

    @property
    def outcome(self) -> Outcome | None:
        """How the script ended last."""
        return Outcome.read(self._outcome)

    @outcome.setter
    def outcome(self, outcome: Outcome) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        Outcome.publish(self._outcome, outcome)

    def forget_outcome(self) -> None:
        """Removes the outcome of an earlier attempt, so that it is not taken for the outcome of this one."""
        self._outcome.unlink(missing_ok=True)

    def claim(self) -> str:
        """Makes this attempt the only one that may publish; returns its token. One process does it for all ranks."""
        token = uuid.uuid4().hex
        self.path.mkdir(parents=True, exist_ok=True)
        _claimed.add(token)
        write_json(
            self._attempt,
            {"token": token, "pid": os.getpid(), "host": os.uname().nodename, "time": time.time()}
            | {"elastic_run_id": os.environ.get("TORCHELASTIC_RUN_ID")},
        )
        return token

    def is_claimed_by_sibling(self) -> bool:
        """Whether a rank of the same launch, perhaps on another node, has made the last claim."""
        own = os.environ.get("TORCHELASTIC_RUN_ID")
        return own is not None and (read_json(self._attempt) or {}).get("elastic_run_id") == own

    def enter(self, job: str | None) -> int | None:
        """Records that this process trains here, until it calls :meth:`left`.

        Args:
            job: Name that all attempts of one job share: :data:`LAUNCHED` if ``launch`` has started it. ``None``: this
                process is the whole job.

        Returns:
            The result of :meth:`trained_by`; if it is a process id, nothing was recorded.
        """
        other = self.trained_by(job)
        if other is None:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self._trainer, {**describe_process(), "host": os.uname().nodename, "job": job})
        return other

    def trained_by(self, job: str | None) -> int | None:
        """The id of a process of another job on this host that trains here; ``None`` if there is none.

        Args:
            job: As for :meth:`enter`.
        """
        record = read_json(self._trainer) or {}
        is_here = record.get("host") == os.uname().nodename and record.get("namespace") == pid_namespace()
        is_other = record.get("pid") != os.getpid() and (job is None or record.get("job") != job)
        if not (is_here and is_other and is_running(record)):
            return None
        pid = int(record["pid"])
        return None if is_being_killed(pid) else pid

    def left(self) -> None:
        """Removes the record of :meth:`enter`."""
        if (read_json(self._trainer) or {}).get("pid") == os.getpid():
            self._trainer.unlink(missing_ok=True)

    def identity(self) -> str:
        """A name that no other run has, made by the first call.

        The directory keeps it when it is moved or mounted elsewhere. A directory that was removed and made anew gets
        another name. So does a copy, which otherwise would share node memory with the original.

        Raises:
            OSError: If the name cannot be read or written.
        """
        path = self.path / "run.json"
        record = load_json(path)
        if (found := _identity(record)) is None:
            found = uuid.uuid4().hex[:16]
            self.path.mkdir(parents=True, exist_ok=True)
            content = {"id": found, "directory": self._place()}
            if not create_json(path, content):
                if (others := _identity(load_json(path))) is not None:
                    return others
                write_json(path, content)  # replaces a file that holds no name
            return found
        place = (record or {}).get("directory")
        if isinstance(place, dict) and self._is_copy(found, place):
            found = self._name_of_copy(found, place)
        elif isinstance(place, dict) and place.get("path") == self._place()["path"]:
            return found
        write_json(path, {"id": found, "directory": self._place()})
        return found

    def _place(self) -> dict[str, Any]:
        # Without the device number, which differs between hosts for network storage.
        inode = os.stat(self.path).st_ino
        return {"path": os.path.realpath(self.path), "inode": inode, "host": os.uname().nodename}

    def _is_copy(self, identity: str, place: dict[str, Any]) -> bool:
        """Whether this directory is a copy of the directory at ``place``, not that directory itself.

        In doubt it counts as a copy: a run that gives up its local checkpoints loses less than two runs that share
        them.
        """
        here, there = self._place(), Path(str(place.get("path")))
        if here["path"] == str(there):
            return False
        with contextlib.suppress(OSError):
            if os.path.samefile(there, self.path):  # reached by another path
                return False
            if _identity(load_json(there / "run.json")) == identity:
                return True
        if here["inode"] == place.get("inode"):
            return False  # moved, or mounted elsewhere
        was_moved = here["host"] == place.get("host") and os.path.isdir(there.parent) and not os.path.lexists(there)
        return not was_moved  # a move to another file system changes the inode

    def _name_of_copy(self, copied: str, place: dict[str, Any]) -> str:
        """The name of this copy, made by the first call on any node."""
        claim = self.path / f"copy-of-{copied}.json"
        if create_json(claim, {"id": uuid.uuid4().hex[:16], "copied_from": place.get("path")}):
            log.warning(
                "%s is a copy of the run in %s. It gets its own identity and continues from the checkpoints in it. "
                "Local checkpoints and the W&B run stay with the original.",
                self.path,
                place.get("path"),
            )
        if (own := _identity(load_json(claim))) is None:
            raise OSError(errno.EIO, "the name of this copy of a run cannot be read", os.fspath(claim))
        # Records of processes that are older than the copy belong to the original directory.
        copied_at_ns = claim.stat().st_mtime_ns
        for path in [self._trainer, *(self.path / "launches").glob("*.json")]:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns < copied_at_ns:
                    path.unlink()
        return own

    @contextlib.contextmanager
    def sign(self) -> Iterator[str]:
        """Creates, for the time of a block, a file by whose name other nodes check that they see the same directory.

        Its name is new every time, since a node may cache for a while whether a name exists.
        """
        sign = temporary_path(self._attempt)
        sign.touch()
        try:
            yield sign.name
        finally:
            with contextlib.suppress(OSError):
                sign.unlink()

    def look_for(self, sign: str) -> None:
        """Looks for the file of :meth:`sign`.

        Raises:
            OSError: If it does not exist.
        """
        (self.path / sign).stat()

    @property
    def attempt(self) -> str | None:
        """The token of the attempt that owns the run now."""
        content = read_json(self._attempt)
        token = content.get("token") if content else None
        return token if isinstance(token, str) else None

    def is_owned_here(self) -> bool:
        """Whether this process has made the present claim."""
        return self.attempt in _claimed

    def check_owner(self, token: str) -> None:
        """Fences off a late process; call it right before anything is published.

        Raises:
            StaleAttempt: If a newer attempt has claimed this run.
            OSError: If the owner of the run cannot be read, so that the claim is unknown.
        """
        if (owner := self.attempt) is None:
            raise OSError(errno.EIO, "the attempt that owns this run cannot be read", os.fspath(self._attempt))
        if owner != token:
            raise StaleAttempt(
                f"this process belongs to attempt {token[:8]} of {self.path}, which attempt {str(owner)[:8]} has taken "
                "over; it stops without writing"
            )
