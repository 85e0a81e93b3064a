"""Where the time of this process goes: seconds by category, for goodput. Imports neither torch nor Lightning.

The process is in one category at any moment, from its start to its end, so all of its time is accounted for. To go on
to another category is a look at the clock and an addition, in shared memory where a watchdog reads it: no message, no
system call, no lock. What a process that was killed has spent is there as well.
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
"""What a process spends time on.

``productive`` are steps never done before, ``wasted_progress`` steps done again, and ``unfinished_step`` one in which
the fit failed. In ``rendezvous`` a process that goes on without a lost rank waits for its replacement.
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
"""How often a step is written, at most, when it begins: until the next is written, it has not ended."""

_UNSPLIT = -1
"""Where there would be the category of the step under way: nothing else in it is told apart."""


@dataclass(frozen=True)
class Spent:
    """What was read of a process's account.

    Attributes:
        began: When the account begins: the start of the process, or of what follows an account that is closed. In
            seconds since the epoch.
        since: When it went on to its present category, in seconds of ``time.monotonic()``.
        doing: Its present category; what it has spent there since then is not in ``seconds``.
        reached: The furthest ``trainer.global_step`` of its last fit at which a batch has begun: steps before it are
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
        age: For how many seconds the process has run.
        clock: Gives the seconds that all processes of a node share.
        wall_clock: Gives seconds since the epoch.
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
        """Counts from here on: the process has only waited to be used, and may have done its imports meanwhile.

        Args:
            age: For how many seconds it was used already.
        """
        self._began = self._wall_clock() - age
        self._seconds = [0.0] * len(CATEGORIES)
        self._since = self._clock() - age

    @property
    def is_shared(self) -> bool:
        """Whether a watchdog reads it."""
        return self._memory is not None

    @property
    def reached(self) -> int:
        """The furthest step at which a batch has begun, in any process: those before it are done."""
        return self._reached

    def share(self, path: Path) -> None:
        """Goes on in a file of node memory.

        Args:
            path: The file; it is created.

        Raises:
            OSError: If node memory is full or cannot be written.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _FORMAT.size)  # where memory is full this fails here, and not by SIGBUS in a step
            self._memory = mmap.mmap(fd, _FORMAT.size)
        finally:
            os.close(fd)
        self._write()

    def close(self) -> Spent:
        """Ends the account, and begins another one in this process's own memory.

        Returns:
            What was spent. In a file, it stays readable.
        """
        self.enter(self._doing)
        spent = _spent(*self._content())
        self._begin_anew()
        return spent

    def read(self) -> Spent:
        """What it holds now."""
        return _spent(*self._content())

    def forked(self) -> None:
        """A forked child is another process: what its parent has spent is not its own, nor is the memory for that."""
        self._begin_anew()
        self._since, self._doing = self._clock(), IMPORTS if self._doing == IMPORTS else SCRIPT

    def unshare(self) -> None:
        """Goes on in this process's own memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _begin_anew(self) -> None:
        self.unshare()
        self._seconds = [0.0] * len(CATEGORIES)
        self._began = self._wall_clock()

    def enter(self, category: int) -> None:
        """From now on it is in this category."""
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
        """The time of the block is in this category."""
        before = self._doing
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def imported(self) -> None:
        """The script has imported the callbacks, and with them torch and Lightning."""
        if self._doing == IMPORTS:
            self.enter(SCRIPT)

    # -- a fit ---------------------------------------------------------------------------------------------------------

    def begin_fit(self, is_interactive: bool = False) -> None:
        """A fit begins; what has followed the one before it was no end.

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
        """The first batch comes next.

        Args:
            reached: The furthest step that this fit has been at before, in any process.
            splits_steps: Whether the time of a step is that of the host: fetching a batch, and hooks of callbacks, are
                then told apart. An accelerator may be busy meanwhile, and all of it is the step.
        """
        self._reached = max(self._reached, reached)
        self._splits_steps = splits_steps
        self._step, self._due = _UNSPLIT, 0.0
        self.enter(FIRST_STEP)

    def begin_batch(self, step: int) -> None:
        """A training boundary: a batch is to be fetched.

        Args:
            step: ``trainer.global_step``.
        """
        # In every step, whose code and data a training has driven out of the caches: few look-ups, no calls within.
        now = self._clock()
        self._seconds[self._doing] += now - self._since
        self._since = now
        if now < self._due:
            self._reached = step
            self._doing = DATA_LOADING if self._splits_steps else PRODUCTIVE
        else:
            self._begin_step(step, now)

    def _begin_step(self, step: int, now: float) -> None:
        """Begins one that may be done again, or is to be written: not a new one shortly after another."""
        is_new = step >= self._reached
        self._doing = category = PRODUCTIVE if is_new else WASTED_PROGRESS
        self._reached = max(self._reached, step)
        if now - self._written >= _WRITTEN_EVERY_S:
            self._written = now
            self._write()  # only here, so of a step that does not end it is known that it has begun
        self._due = self._written + _WRITTEN_EVERY_S if is_new else now
        if self._splits_steps:
            self._step, self._doing = category, DATA_LOADING

    def batch_ready(self) -> None:
        """The batch is there."""
        if (doing := self._doing) == DATA_LOADING:
            now = self._clock()
            self._seconds[doing] += now - self._since
            self._since, self._doing = now, self._step

    def batch_done(self) -> None:
        """Its step is over, hooks of callbacks come next."""
        if (doing := self._doing) == self._step:
            now = self._clock()
            self._seconds[doing] += now - self._since
            self._since, self._doing = now, CALLBACKS

    def end_fit(self, failed: bool) -> None:
        """The fit ends.

        Args:
            failed: Whether with an exception.
        """
        if failed and self._doing in (DATA_LOADING, PRODUCTIVE, WASTED_PROGRESS):
            self._doing = UNFINISHED_STEP
        self.enter(TEARDOWN)


def read_account(file: FileIO) -> Spent | None:
    """What an account holds; ``None`` if it is none.

    Args:
        file: Of :meth:`TimeAccount.share`, open; readable when its name has gone.
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
    """The event that records what ranks have spent their time on; fit and attempt are the caller's.

    Args:
        accounts: By rank.
        ended: When processes were seen to be gone, in seconds of ``time.monotonic()``; the others end now.
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
    """Keeps an event of ranks that run, in place of the one before; :func:`kept` finds it if their node goes down.

    Args:
        run_dir: The run directory.
        name: Of those ranks.
        event: To be recorded in the ledger when they have ended.

    Raises:
        OSError: If it cannot be written.
    """
    path = _kept_path(run_dir, name)
    path.parent.mkdir(exist_ok=True)
    publish(path, lambda file: file.write(json.dumps(event.to_json()).encode()))


def forget(run_dir: Path, name: str) -> None:
    """Removes what :func:`keep` has kept: it is in the ledger."""
    _kept_path(run_dir, name).unlink(missing_ok=True)


def kept(run_dir: Path) -> list[TimeSpent]:
    """What was kept of ranks that run, or whose node went down."""
    contents = map(read_json, sorted(_kept_path(run_dir, "*").parent.glob("*.json")))
    found = (parse(content) for content in contents if content is not None)
    return [event for event in found if isinstance(event, TimeSpent)]


def _kept_path(run_dir: Path, name: str) -> Path:
    return run_dir / "time" / f"{name}.json"


_own: weakref.WeakSet[TimeAccount] = weakref.WeakSet()
"""Those of this process."""

OF_PROCESS = TimeAccount(process_age())
"""The account of this process."""


def _after_fork_in_child() -> None:
    for account in _own:
        account.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
