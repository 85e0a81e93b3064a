"""Accounts for the time of this process: seconds by category, for goodput. Imports neither torch nor Lightning.

The process is in one category at any moment, from its start to its end, so all its time is accounted for. To enter
another category takes a look at the clock and an addition, in shared memory where a watchdog reads it: no message, no
system call, no lock. The account of a killed process remains in this memory.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

from lightning_resilience._files import publish, read_json
from lightning_resilience._processes import process_age
from lightning_resilience.run.events import TimeSpent, parse
from lightning_resilience.run.ledger import node_name

Category = Literal[
    "imports",
    "script",
    "rendezvous",
    "setup",
    "restore",
    "fast_forward",
    "first_step",
    "productive",
    "wasted_progress",
    "data_loading",
    "callbacks",
    "validation",
    "checkpoint_save",
    "unfinished_step",
    "teardown",
]
"""The categories of a process's time.

``productive`` are steps never done before, ``wasted_progress`` steps done again, and ``unfinished_step`` a step in
which the fit failed. In ``rendezvous`` a process that survived the loss of a rank waits for the replacement.
"""

CATEGORIES: tuple[Category, ...] = get_args(Category)

(
    IMPORTS,
    SCRIPT,
    RENDEZVOUS,
    SETUP,
    RESTORE,
    FAST_FORWARD,
    FIRST_STEP,
    PRODUCTIVE,
    WASTED_PROGRESS,
    DATA_LOADING,
    CALLBACKS,
    VALIDATION,
    CHECKPOINT_SAVE,
    UNFINISHED_STEP,
    TEARDOWN,
) = range(len(CATEGORIES))

_FORMAT = struct.Struct(f"<4d{len(CATEGORIES)}d")  # began, since, doing, reached, seconds by category
_WRITTEN_EVERY_S = 0.1
"""Least time between two writes at the begin of a step; until the next write, the written step counts as not ended."""

_UNSPLIT = -1
"""In place of the category of the present step: its time is not split."""


@dataclass(frozen=True)
class Spent:
    """The content of a process's account.

    Attributes:
        began: When the account begins, in seconds since the epoch: at the start of the process, or at the end of a
            closed account.
        since: When the process entered its present category, in seconds of ``time.monotonic()``.
        doing: Its present category; the time in it since then is not in ``seconds``.
        reached: The furthest ``trainer.global_step`` of its last fit at which a batch has begun: earlier steps are
            done.
        seconds: Seconds by category.
    """

    began: float
    since: float
    doing: Category
    reached: int
    seconds: dict[Category, float]


class TimeAccount:
    """The account of a process. Only its main thread writes.

    Args:
        age: Seconds for which the process has run.
        clock: Returns seconds of a clock that all processes of a node share.
        wall_clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        age: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._memory: mmap.mmap | None = None
        self._doing = IMPORTS
        self.begin(age)
        self._reached = 0
        self._step = _UNSPLIT
        self._splits_steps = False
        self._written = 0.0
        self._due = 0.0
        _own.add(self)

    def begin(self, age: float = 0.0) -> None:
        """Begins the account now: until now the process was a spare, which may have done its imports.

        Args:
            age: Seconds for which the process has been in use already.
        """
        self._began = self._wall_clock() - age
        self._seconds = [0.0] * len(CATEGORIES)
        self._since = self._clock() - age

    @property
    def is_shared(self) -> bool:
        """Whether the account is in a file of node memory, where a watchdog can read it."""
        return self._memory is not None

    @property
    def reached(self) -> int:
        """The furthest step at which a batch has begun, in any process: earlier steps are done."""
        return self._reached

    def share(self, path: Path) -> None:
        """Moves the account to a file of node memory.

        Args:
            path: The file; it is created.

        Raises:
            OSError: If node memory is full or cannot be written.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _FORMAT.size)  # if memory is full, this fails here instead of by SIGBUS in a step
            self._memory = mmap.mmap(fd, _FORMAT.size)
        finally:
            os.close(fd)
        self._write()

    def close(self) -> Spent:
        """Ends the account and begins another one in this process's own memory.

        Returns:
            The content of the ended account. Its file, if any, stays readable.
        """
        self.enter(self._doing)
        spent = _spent(*self._content())
        self._begin_anew()
        return spent

    def read(self) -> Spent:
        """The present content of the account."""
        return _spent(*self._content())

    def forked(self) -> None:
        """Call it in a forked child, which begins its own account, apart from its parent's account and memory."""
        self._begin_anew()
        self._since, self._doing = self._clock(), IMPORTS if self._doing == IMPORTS else SCRIPT

    def unshare(self) -> None:
        """Moves the account to this process's own memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _begin_anew(self) -> None:
        self.unshare()
        self._seconds = [0.0] * len(CATEGORIES)
        self._began = self._wall_clock()

    def enter(self, category: int) -> None:
        """Enters a category: the time from now on belongs to it."""
        self._go_on(category)
        self._write()

    def _go_on(self, category: int) -> None:
        now = self._clock()
        self._seconds[self._doing] += now - self._since
        self._since, self._doing = now, category

    def _write(self) -> None:
        if self._memory is not None:
            self._memory[:] = _FORMAT.pack(*self._content())  # not pack_into, which writes zeros first

    def _content(self) -> list[float]:
        return [self._began, self._since, self._doing, self._reached, *self._seconds]

    @contextmanager
    def during(self, category: int) -> Iterator[None]:
        """Context whose time belongs to ``category``."""
        before = self._doing
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def imported(self) -> None:
        """Call it when the script has imported the callbacks, and with them torch and Lightning."""
        if self._doing == IMPORTS:
            self.enter(SCRIPT)

    # -- a fit ---------------------------------------------------------------------------------------------------------

    def begin_fit(self, is_interactive: bool = False) -> None:
        """Call it when a fit begins. The time since the previous fit then counts as ``script``, not ``teardown``.

        Args:
            is_interactive: Whether a person types the commands, as in a notebook: the account begins with the fit.
        """
        self._go_on(SETUP)
        if is_interactive and not self.is_shared:
            self._begin_anew()
        seconds = self._seconds
        seconds[SCRIPT], seconds[TEARDOWN] = seconds[SCRIPT] + seconds[TEARDOWN], 0.0
        self._reached = 0
        self._write()

    def begin_training(self, reached: int, splits_steps: bool) -> None:
        """Call it right before the first batch.

        Args:
            reached: The furthest step that this fit has reached before, in any process.
            splits_steps: Whether to account for fetching a batch and for callback hooks separately. Only for training
                on the host: an accelerator may be busy at these times, so all of it counts as the step.
        """
        self._reached = max(self._reached, reached)
        self._splits_steps = splits_steps
        self._step, self._due = _UNSPLIT, 0.0
        self.enter(FIRST_STEP)

    def begin_batch(self, step: int) -> None:
        """Call it at a training boundary, before a batch is fetched.

        Args:
            step: ``trainer.global_step``.
        """
        # This runs in every step with cold caches, so it uses few look-ups and no calls.
        now = self._clock()
        self._seconds[self._doing] += now - self._since
        self._since = now
        if now < self._due:
            self._reached = step
            self._doing = DATA_LOADING if self._splits_steps else PRODUCTIVE
        else:
            self._begin_step(step, now)

    def _begin_step(self, step: int, now: float) -> None:
        """Begins a step that may be a repetition or must be written; :meth:`begin_batch` handles the other steps."""
        is_new = step >= self._reached
        self._doing = category = PRODUCTIVE if is_new else WASTED_PROGRESS
        self._reached = max(self._reached, step)
        if now - self._written >= _WRITTEN_EVERY_S:
            self._written = now
            self._write()  # at the begin of a step, so that a step that does not end is known to have begun
        self._due = self._written + _WRITTEN_EVERY_S if is_new else now
        if self._splits_steps:
            self._step, self._doing = category, DATA_LOADING

    def batch_ready(self) -> None:
        """Call it when the batch was fetched."""
        if (doing := self._doing) == DATA_LOADING:
            now = self._clock()
            self._seconds[doing] += now - self._since
            self._since, self._doing = now, self._step

    def batch_done(self) -> None:
        """Call it when the step of the batch is over, before the hooks of callbacks."""
        if (doing := self._doing) == self._step:
            now = self._clock()
            self._seconds[doing] += now - self._since
            self._since, self._doing = now, CALLBACKS

    def end_fit(self, failed: bool) -> None:
        """Call it when the fit ends.

        Args:
            failed: Whether it ends with an exception.
        """
        if failed and self._doing in (DATA_LOADING, PRODUCTIVE, WASTED_PROGRESS):
            self._doing = UNFINISHED_STEP
        self.enter(TEARDOWN)


def read_account(file: FileIO) -> Spent | None:
    """The content of an account's file; ``None`` if the file holds no account.

    Args:
        file: The open file of :meth:`TimeAccount.share`; readable even after its name was removed.
    """
    file.seek(0)
    data = file.read(_FORMAT.size)
    if data is None or len(data) != _FORMAT.size:
        return None
    content = _FORMAT.unpack(data)
    return _spent(*content) if content[0] > 0 and 0 <= content[2] < len(CATEGORIES) else None


def _spent(began: float, since: float, doing: float, reached: float, *seconds: float) -> Spent:
    return Spent(began, since, CATEGORIES[int(doing)], int(reached), dict(zip(CATEGORIES, seconds, strict=True)))


def time_spent(accounts: Mapping[int, Spent], ended: Mapping[int, float]) -> TimeSpent:
    """The event that records the time of ranks by category; the caller sets fit and attempt.

    Args:
        accounts: The accounts by rank.
        ended: When processes were seen to be gone, by rank, in seconds of ``time.monotonic()``; the others end now.
    """
    now = time.monotonic()
    to_wall_clock = time.time() - now
    spent = list(accounts.values())
    return TimeSpent(
        node=node_name(),
        fit=None,
        attempt=None,
        world_size=None,
        ranks=list(accounts),
        began=[round(each.began, 3) for each in spent],
        since=[round(each.since + to_wall_clock, 3) for each in spent],
        ended=[round(ended.get(rank, now) + to_wall_clock, 3) for rank in accounts],
        doing=[each.doing for each in spent],
        seconds={
            name: seconds for name in CATEGORIES if any(seconds := [round(each.seconds[name], 3) for each in spent])
        },
        reached=max((each.reached for each in spent), default=0),
    )


def keep(run_dir: Path, name: str, event: TimeSpent) -> None:
    """Keeps an event of running ranks and replaces the previous one; :func:`kept` finds it if their node goes down.

    Args:
        run_dir: The run directory.
        name: Name of this group of ranks.
        event: The event that would be recorded in the ledger if the ranks ended now.

    Raises:
        OSError: If it cannot be written.
    """
    path = _kept_path(run_dir, name)
    path.parent.mkdir(exist_ok=True)
    publish(path, lambda file: file.write(json.dumps(event.to_json()).encode()))


def forget(run_dir: Path, name: str) -> None:
    """Removes an event kept by :func:`keep`, when the final one is in the ledger."""
    _kept_path(run_dir, name).unlink(missing_ok=True)


def kept(run_dir: Path) -> list[TimeSpent]:
    """The kept events of ranks that are running, or whose node went down."""
    contents = map(read_json, sorted(_kept_path(run_dir, "*").parent.glob("*.json")))
    found = (parse(content) for content in contents if content is not None)
    return [event for event in found if isinstance(event, TimeSpent)]


def _kept_path(run_dir: Path, name: str) -> Path:
    return run_dir / "time" / f"{name}.json"


_own: weakref.WeakSet[TimeAccount] = weakref.WeakSet()
"""All accounts in this process."""

OF_PROCESS = TimeAccount(process_age())
"""The account of this process."""


def _after_fork_in_child() -> None:
    for account in _own:
        account.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
