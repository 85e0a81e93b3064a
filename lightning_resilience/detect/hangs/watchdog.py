"""The watchdog of a node: a process that finds ranks that hang or have died, diagnoses the hang and ends ranks.

The watchdog reads the ranks' progress from shared memory, so it needs neither their help nor their interpreter lock.
When a rank is overdue, the watchdog collects evidence about every rank (``rank_probe`` lists what ranks provide),
writes it into ``RUN_DIR/diagnostics/<time>``, and lets ``verdict`` judge it. Then it ends the ranks of its node, and
their launcher restarts them. With several nodes every watchdog probes its own ranks, and the watchdog of rank 0's node
gives the verdict. When a rank has died in the middle of a fit, the watchdogs end the other ranks, which may wait for
the dead rank without ever noticing.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_resilience import _output
from lightning_resilience._files import create_json, load_json, publish, read_json, write_json
from lightning_resilience._processes import OUTLIVES_RANKS_VARIABLE, describe_process, is_running, pid_namespace
from lightning_resilience.detect.hangs.abandoned import BEAT, BEATS, kept_name, read_beat, remove_abandoned, spent_by
from lightning_resilience.detect.hangs.deaths import (
    Death,
    ExitWatcher,
    MemoryShortage,
    has_active_thread,
    is_ending,
    is_stopped,
)
from lightning_resilience.detect.hangs.evidence import RankEvidence
from lightning_resilience.detect.hangs.flight_recorder import shorten
from lightning_resilience.detect.hangs.process_probe import Usage, probe_process, usage, usage_of_tree
from lightning_resilience.detect.hangs.progress import ProgressRecord, read_record
from lightning_resilience.detect.hangs.rank_probe import EXIT_SIGNAL
from lightning_resilience.detect.hangs.verdict import Verdict, diagnose
from lightning_resilience.run import deadlines, exit_codes, time_account
from lightning_resilience.run.events import Fault, Killed, TimeSpent
from lightning_resilience.run.ledger import Ledger, node_name, read_ledger
from lightning_resilience.run.run_directory import ELASTIC_VARIABLE, RunDirectory
from lightning_resilience.run.time_account import Spent, read_account

T = TypeVar("T")

_RECORD = "watchdog.json"
_VERDICT = "verdict.json"
_COLLECTIVES_KEPT = 128
_WRITES_FROM = 6e5  # bytes between two looks at a survivor: less may be a log
_WORKS_FROM = 0.2  # of one CPU: waiting threads, and the handling of a launcher's signal, take less
_ACTIVE_FROM = 0.05  # of one CPU: a thread that only waits uses less
_ACTIVE_FROM_BYTES = 2e4  # per second: a slower download is not worth waiting for
_BUSY_FOR = 16
"""How many times its limit a busy rank may take, if nothing would restart the run, or if ending it did not help
before."""
_NO_FIT = -1
_KEEPS_SURVIVORS = ELASTIC_VARIABLE in os.environ
"""Whether the surviving ranks continue with a replacement of a lost rank. The supervisor ends ranks that do not."""


@dataclass
class Rank:
    """A rank of this node, as its watchdog sees it.

    Args:
        about: The rank's registration.
        path: The path of the rank's files, without their endings.
        progress: Its progress record, held open because node memory may be cleaned up.
        shortage: Notices a shortage of memory in its cgroup, which schedulers may have created for this rank alone.
    """

    about: dict[str, Any]
    path: Path
    progress: FileIO
    shortage: MemoryShortage
    record: ProgressRecord | None = None
    is_ended: bool = False  # this watchdog has ended it; the process may take a while to end
    paused_s: float = 0.0  # time since the last progress in which this watchdog did not run either
    extended_until: float = 0.0  # the rank is not overdue before this time
    active_at: float = 0.0  # when it last used CPU or IO in section ``start``
    account: FileIO | None = None  # its time account, held open
    spent: Spent | None = None  # the account as read last
    ended: float | None = None  # when its process was first seen to have ended
    _used: tuple[float, dict[int, Usage]] | None = None

    @property
    def rank(self) -> int:
        """The global rank."""
        return int(self.about["rank"])

    @property
    def pid(self) -> int:
        """The id of its process."""
        return int(self.about["pid"])

    @property
    def fit(self) -> int:
        """Number of the fit in which the rank is; -1 before the first fit."""
        return int(_NO_FIT if self.about["fit"] is None else self.about["fit"])

    @property
    def section(self) -> str:
        """What the rank is doing; ``setup`` while its record cannot be read."""
        return "setup" if self.record is None else self.record.section

    @property
    def is_in_fit(self) -> bool:
        """Whether the rank is in a fit."""
        return self.section not in ("left", "start")

    @property
    def is_watched(self) -> bool:
        """Whether the rank may hang: it runs in a fit or, if launched, outside of one."""
        return self.section != "left" and is_running(self.about)

    @property
    def has_died(self) -> bool:
        """Whether its process has ended; false, because unknown, for a process of another container."""
        return self.about["namespace"] == pid_namespace() and not is_running(self.about)

    @property
    def has_failed(self) -> bool:
        """Whether its fit has failed."""
        return self.path.with_suffix(".failed").exists()

    def update(self, pause_s: float = 0.0) -> None:
        """Reads the rank's progress.

        Args:
            pause_s: How long the watchdog was frozen since it last read the progress.
        """
        if self.account is not None:
            self.spent = read_account(self.account) or self.spent
        if self.ended is None and self.has_died:
            self.ended = time.monotonic()
        if (record := read_record(self.progress)) is None:
            return
        if self.record is None or record.ticks != self.record.ticks:
            self.paused_s = self.extended_until = 0.0
        self.paused_s += pause_s
        self.record = record
        if record.section == "start":
            self._update_activity(record.timeout)

    def _update_activity(self, timeout: float) -> None:
        """Outside of a fit, progress is the CPU time and IO of the script and its child processes."""
        now = time.monotonic()
        seconds = now - (self._used[0] if self._used is not None else 0.0)
        if seconds < min(timeout / 4, deadlines.CHECK_ACTIVITY_EVERY_S):
            return
        used = usage_of_tree(self.pid)
        if self._used is not None:
            pairs = [(self._used[1].get(pid, Usage()), each) for pid, each in used.items()]
            cpu_s = sum(after.cpu_s - before.cpu_s for before, after in pairs)
            count = sum(sum(after[1:]) - sum(before[1:]) for before, after in pairs)
            at_least_s = max(1.0, seconds)  # writing its stacks for the watchdog also uses a little
            if cpu_s >= _ACTIVE_FROM * at_least_s or count >= _ACTIVE_FROM_BYTES * at_least_s:
                self.active_at, self.paused_s = now, 0.0
        self._used = now, used

    def seconds(self, now: float) -> float:
        """Seconds since its last progress in which the rank could have made progress."""
        return 0.0 if self.record is None else max(0.0, now - max(self.record.since, self.active_at) - self.paused_s)

    def is_overdue(self, now: float) -> bool:
        """Whether the rank has exceeded its limit."""
        if self.record is None or self.record.section == "left" or now < self.extended_until:
            return False
        return self.seconds(now) > self.record.timeout

    def extend_monitor(self) -> None:
        """Makes NVRx's rank monitor start the rank's timeout again."""
        with suppress(OSError):
            self.path.with_suffix(".excused").touch()

    def is_killed(self) -> bool:
        """Whether its process has ended in the middle of a fit, or is ending."""
        self.update()
        return self.is_in_fit and not self.has_failed and (self.has_died or is_ending(self.pid))


class _Looks:
    """Looks at intervals, from outside, at what the survivors of a lost rank do.

    Args:
        ranks: The survivors.
    """

    def __init__(self, ranks: list[Rank]) -> None:
        self._began = self._last = time.monotonic()
        self._used = {rank.pid: usage(rank.pid) or Usage() for rank in ranks}

    @property
    def seconds(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._began

    def next(self) -> bool:
        """Whether the next look is due; if not, waits for a part of the time until then."""
        left = self._last + deadlines.CHECK_SURVIVORS_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(min(left, deadlines.WATCHDOG_POLL_S))
            return False
        self._last = time.monotonic()
        return True

    def found(self, rank: Rank) -> Literal["writes", "works", "waits"]:
        """What a rank has done since the last look.

        ``writes``: it saves or writes. ``works``: it computes, so it may still notice the loss. ``waits``: neither.
        """
        before, now = self._used.get(rank.pid), usage(rank.pid) or Usage()
        self._used[rank.pid] = now
        if rank.section == "checkpointing" or (before and now.written_bytes - before.written_bytes >= _WRITES_FROM):
            return "writes"
        if before is None or now.cpu_s - before.cpu_s >= _WORKS_FROM * deadlines.CHECK_SURVIVORS_EVERY_S:
            return "works"
        return "works" if has_active_thread(rank.pid) else "waits"


class _Storage:
    """Makes calls that access shared storage, each with a deadline: a hanging storage must not block the watchdog."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[Any] | None = None
        self._has_begun = False  # whether the last call was begun and not waited for

    def begin(self, function: Callable[[], object]) -> None:
        """Begins a call without waiting for it; does nothing while the previous call has not returned."""
        if self._last is None or self._last.done():
            self._last, self._has_begun = self._thread.submit(function), True

    def call(self, function: Callable[[], T], within_s: float = deadlines.STORAGE_WITHIN_S) -> T:
        """Calls ``function`` and returns its result.

        Raises:
            OSError: If ``function`` raises it or takes too long, or if the previous call has not returned yet.
        """
        began = time.monotonic()
        if self._has_begun and self._last is not None:
            self._has_begun = False
            wait([self._last], within_s)
        if self._last is not None and not self._last.done():
            raise TimeoutError("the storage does not answer")
        future = self._last = self._thread.submit(function)
        try:
            result: T = future.result(max(0.0, began + within_s - time.monotonic()))
            return result
        except FutureTimeout:
            raise TimeoutError(f"the storage has not answered for {within_s:g} s") from None


class Watchdog:
    """The watchdog of one node.

    Args:
        directory: The node's folder, in which the ranks register.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: dict[int, Rank] = {}
        self._cases = 0  # how many cases are over
        self._has_seen_cases = False  # a restart may keep the token: earlier cases do not concern these ranks
        self._checked_cases = self._checked_losses = 0.0
        self._lost_fit: int | None = None  # the fit that has lost a rank; other failures in it are consequences
        self._gone: set[int] = set()  # processes that have ended outside of a fit
        self._exits = ExitWatcher()
        self._storage = _Storage()
        self._log_thread = ThreadPoolExecutor(max_workers=1)  # the reader of stderr may have ended or be blocked
        self._beats: FileIO | None = None
        self._beaten = -math.inf
        self._began = self._kept_time = time.monotonic()
        self._updated = time.monotonic()

    def _log(self, line: str) -> None:
        self._log_thread.submit(os.write, 2, f"{_output.signed(line)}\n".encode())

    def _store(self, function: Callable[[], T], failure: str = "") -> T | None:
        """The result of a call that accesses the storage; ``None`` if it fails, which is logged with ``failure``."""
        try:
            return self._storage.call(function)
        except OSError as error:
            if failure:
                self._log(f"{failure}: {error}")
            return None

    def register(self) -> None:
        """Writes into the node's folder that this process watches it.

        Raises:
            OSError: If the record cannot be written: no rank would know of this watchdog.
        """
        fd = os.open(self.directory / BEAT, os.O_RDWR | os.O_CREAT, 0o600)
        self._beats = FileIO(fd, "r+")
        self._beat(time.monotonic())
        write_json(self.directory / _RECORD, describe_process())

    def _beat(self, now: float) -> None:
        """Shows that the watchdog works: a process that exists may be stopped, or fail in every round."""
        if self._beats is not None and now - self._beaten >= deadlines.WATCHDOG_BEAT_S:
            self._beaten = now
            os.pwrite(self._beats.fileno(), BEATS.pack(now), 0)

    def run(self) -> None:
        """Watches until no rank is left to watch."""
        _Storage().begin(lambda: remove_abandoned(self.directory))  # the storage of other runs may hang
        started = last = succeeded = time.monotonic()
        has_failed = is_over = False
        while not is_over and (self.ranks or last - started < deadlines.FIRST_RANK_WITHIN_S):
            now = time.monotonic()
            pause = now - last - deadlines.WATCHDOG_POLL_S
            last = now
            is_over = bool(self.ranks) and not any(rank.is_watched for rank in self.ranks.values())
            try:
                if self._check(now, pause if pause > deadlines.FROZEN_AFTER_S else 0.0):
                    last = time.monotonic()
                self._keep_time(now)
                succeeded = time.monotonic()
                self._beat(succeeded)
            except Exception:  # the watchdog must keep watching the ranks
                if not has_failed:
                    has_failed = True
                    self._log(f"The watchdog continues after an internal error:\n{traceback.format_exc()}")
                if time.monotonic() - succeeded > deadlines.WATCHDOG_FAILS_FOR_S:
                    self._log(
                        f"The watchdog of {platform.node()} gives up: all its checks have failed for "
                        f"{deadlines.WATCHDOG_FAILS_FOR_S:g} s. The next save starts a new watchdog; until then hangs "
                        "on this node are not found."
                    )
                    self._flush()
                    return
            if not is_over:
                self._exits.wait(deadlines.WATCHDOG_POLL_S)
        self._record_time()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._flush()

    def _flush(self) -> None:
        with suppress(FutureTimeout):
            self._log_thread.submit(int).result(deadlines.LOG_WITHIN_S)

    def _check(self, now: float, pause_s: float) -> bool:
        """Checks all ranks. Returns whether there was a case, whose handling takes time."""
        self._find_ranks()
        if self._is_suspended(now):
            pause_s = now - self._updated
        self._updated = now
        for rank in self.ranks.values():
            rank.update(pause_s)
            rank.shortage.update()
            if now < rank.extended_until:
                rank.extend_monitor()
        if self._check_losses(now):
            return True
        overdue = [rank for rank in self.ranks.values() if rank.is_overdue(now) and rank.is_watched]
        if lost := [rank for rank in overdue if rank.is_ended or (rank.fit == self._lost_fit and rank.is_in_fit)]:
            self._end_ranks(lost, ", which could not leave")
            return True
        if not overdue and not self._is_case_open(now):
            return False
        self._handle(overdue)
        return True

    def _is_suspended(self, now: float) -> bool:
        """Whether all ranks were stopped by Ctrl-Z at their terminal, to be continued later.

        Always false where a launcher restarts ranks: there they have no terminal, and other jobs wait for the machine.
        """
        ranks = [rank for rank in self.ranks.values() if rank.is_watched]
        if not ranks or self._is_started_again or min(r.seconds(now) for r in ranks) < deadlines.SUSPENDED_FROM_S:
            return False
        return all(is_stopped(rank.pid) for rank in ranks)

    @property
    def _is_started_again(self) -> bool:
        """Whether a launcher restarts ranks that were ended."""
        return bool(self._about.get("is_started_again", True))

    def _find_ranks(self) -> None:
        for path in self.directory.glob("rank-*.json"):
            about = read_json(path)
            if about is None:
                continue
            if (known := self.ranks.get(about["rank"])) is not None:
                known.about = about  # the registration of its present fit
                continue
            with suppress(OSError):
                progress = open(path.with_suffix(".progress"), "rb", buffering=0)
                shortage = MemoryShortage(int(about["pid"]))
                rank = self.ranks[about["rank"]] = Rank(about, path.with_suffix(""), progress, shortage)
                self._exits.add(int(about["pid"]))
                rank.account = open(path.with_suffix(".time"), "rb", buffering=0)

    @property
    def _about(self) -> dict[str, Any]:
        return next(iter(self.ranks.values())).about

    @property
    def _diagnostics(self) -> Path:
        return Path(self._about["run_dir"]) / "diagnostics"

    def _keep_time(self, now: float) -> None:
        """Saves what the ranks of this node have spent their time on, in case all processes are killed."""
        if self.ranks and now - self._kept_time >= deadlines.keep_time_after(now - self._began):
            self._kept_time = now
            run_dir, event = Path(self._about["run_dir"]), self._time_spent()
            self._storage.begin(lambda: time_account.keep(run_dir, self._name, event))

    @property
    def _name(self) -> str:
        return kept_name(self.directory, platform.node())

    def _time_spent(self) -> TimeSpent:
        ranks = sorted((rank for rank in self.ranks.values() if rank.spent is not None), key=lambda rank: rank.rank)
        return spent_by(
            self._about,
            {rank.rank: rank.spent for rank in ranks if rank.spent is not None},
            {rank.rank: rank.ended for rank in ranks if rank.ended is not None},
        )

    def _record_time(self) -> None:
        """Records in the ledger what the ranks have spent their time on, after they have ended."""
        if self.ranks:
            for rank in self.ranks.values():
                rank.update()
            run_dir, event = Path(self._about["run_dir"]), self._time_spent()

            def record() -> None:
                Ledger(RunDirectory(run_dir).ledger, None).record(event)
                time_account.forget(run_dir, self._name)

            self._store(record)

    def _record(self, rank: int | None, event: Fault | Killed) -> None:
        """Writes an event of a rank into the ledger."""
        about = self._about
        for name in ("fit", "elastic_run_id", "restart_count"):
            setattr(event, name, about[name])
        self._store(lambda: Ledger(RunDirectory(about["run_dir"]).ledger, rank).record(event))

    # -- a rank that has died or failed --------------------------------------------------------------------------------

    def _check_losses(self, now: float) -> bool:
        """If a rank has died in the middle of the fit, or its fit has failed, ends the other ranks and returns true.

        With NCCL survivors stay blocked: no exception reaches them, and Python does not run.
        """
        ranks = [rank for rank in self.ranks.values() if rank.fit != self._lost_fit]
        for rank in ranks:
            if rank.is_in_fit and rank.has_died:
                rank.update()  # it may have left the fit just before its end
                if rank.is_in_fit and (death := self._death_of(rank)).exit_code != 0:
                    self._lost_fit = rank.fit
                    self._handle_death(rank, death)
                    return True
        if failed := [rank for rank in ranks if rank.has_failed]:
            self._lost_fit = failed[0].fit
            self._handle_failure(failed[0])
            return True
        if ranks and (cause := self._loss_elsewhere(ranks[0].fit, now)) is not None:
            self._lost_fit = ranks[0].fit
            self._end_survivors(cause, deadlines.PEERS_RAISE_WITHIN_S)
            return True
        for rank in [] if _KEEPS_SURVIVORS else self.ranks.values():
            if rank.section == "start" and rank.pid not in self._gone and rank.has_died:
                self._gone.add(rank.pid)
                rank.update()
                if rank.section == "start" and (death := self._death_of(rank)).is_loss:
                    self._handle_death_outside_fits(rank, death)
                    return True
        return False

    def _death_of(self, rank: Rank) -> Death:
        return Death(self._exits.status(rank.pid), rank.shortage.is_recent())

    def _handle_death(self, rank: Rank, death: Death) -> None:
        about, record = rank.about, rank.record
        others = [other for other in self.ranks.values() if other is not rank]
        looks = _Looks(others)
        if death.is_from_outside and about["nodes"] == 1:
            # A launcher or a scheduler may be ending all ranks; then it means nothing which one is seen first.
            _wait_until(lambda: all(each.is_killed() for each in others), deadlines.ALL_KILLED_WITHIN_S)
            if all(each.is_killed() for each in others):
                self._record_end(rank, death)
                return
        at = f"At step {record.step} (section {record.section}) r" if record is not None else "R"
        self._log(f"{at}ank {rank.rank} ({about['node']}, pid {rank.pid}) {death}.")
        self._record_death(rank, death)
        cause = f"rank {rank.rank} of {about['node']}, which {death}"
        self._publish_loss(cause)
        self._end_survivors(cause, deadlines.PEERS_RAISE_WITHIN_S, looks=looks)

    def _record_death(self, rank: Rank, death: Death) -> None:
        record = rank.record
        fault = Fault(
            kind="died",
            step=record.step if record is not None else None,
            reason=f"rank {rank.rank} {death}",
            signal=death.signal,
            exit_code=death.exit_code,
            out_of_memory=death.out_of_memory,
            section=record.section if record is not None else None,
        )
        self._record(rank.rank, fault)

    def _handle_death_outside_fits(self, rank: Rank, death: Death) -> None:
        """Ends the other ranks when all of them wait: the launcher must restart all ranks, but its signal ends none.

        Outside of a fit there is nothing to save. Ranks that compute or write get the time that a launcher gives them.
        """

        def survivors() -> list[Rank]:
            for other in self.ranks.values():
                other.update()
            ranks = [other for other in self.ranks.values() if other.section == "start" and is_running(other.about)]
            return [other for other in ranks if not is_ending(other.pid)]

        looks = _Looks(list(self.ranks.values()))
        while (others := survivors()) and looks.seconds < deadlines.WORKERS_STOP_TIMEOUT_S:
            if looks.next() and {looks.found(other) for other in others} == {"waits"}:
                if death.signal is not None:  # otherwise the rank has recorded the reason itself
                    self._record_death(rank, death)
                self._end_ranks(others, f", useless without rank {rank.rank} of {rank.about['node']}, which {death}")
                return

    def _record_end(self, rank: Rank, death: Death) -> None:
        """Records how far the ranks had come that were all ended from outside, which is no fault of the ranks."""
        end = Killed(
            fit=None,
            elastic_run_id=None,
            restart_count=None,
            step=max((each.record.step for each in self.ranks.values() if each.record is not None), default=None),
            worker=rank.pid,
            signal=death.signal,
            reason=f"rank {rank.rank} (pid {rank.pid}) {death}",
        )
        self._record(rank.rank, end)

    def _handle_failure(self, rank: Rank) -> None:
        if rank.shortage.is_recent():  # the kernel may have killed a data-loader worker, whose end shows no reason
            self._log(
                f"Rank {rank.rank} of {rank.about['node']} has failed, and within the last minute the kernel has "
                "killed a process there because memory was short."
            )
        began, survivors = time.monotonic(), self._survivors()
        while not rank.has_died and time.monotonic() - began < deadlines.FAILED_RANK_ENDS_WITHIN_S:
            survivors = self._survivors(survivors)
            if not rank.has_failed or not (survivors or self._about["nodes"] > 1):
                return
            time.sleep(deadlines.WATCHDOG_POLL_S)
        cause = f"rank {rank.rank} of {rank.about['node']}, which has failed"
        self._publish_loss(cause)
        within_s = deadlines.PEERS_RAISE_WITHIN_S if rank.has_died else deadlines.CHECK_SURVIVORS_EVERY_S
        self._end_survivors(cause, within_s, survivors)

    def _survivors(self, among: list[Rank] | None = None) -> list[Rank]:
        """The ranks that are still in the fit that has lost a rank, and have not failed themselves."""
        self._find_ranks()  # a script that has caught the error may already be in the next fit
        ranks = list(self.ranks.values()) if among is None else among
        for rank in ranks:
            rank.update()
        ranks = [rank for rank in ranks if rank.fit == self._lost_fit and rank.is_in_fit]
        return [rank for rank in ranks if is_running(rank.about) and not rank.has_failed]

    def _end_survivors(
        self, cause: str, within_s: float, survivors: list[Rank] | None = None, looks: _Looks | None = None
    ) -> None:
        """Ends the survivors that do not end on their own, once they have nothing left to do.

        Args:
            cause: The lost rank, and how it was lost.
            within_s: Seconds that survivors which compute, but do not write, have to end on their own.
            survivors: Default: all ranks that are in the fit.
            looks: The looks at the survivors since the death.
        """
        if _KEEPS_SURVIVORS:
            return
        looks = looks or _Looks(list(self.ranks.values()))
        allowed_s = {"writes": deadlines.SURVIVORS_SAVE_WITHIN_S, "works": within_s, "waits": 0.0}
        while survivors := self._survivors(survivors):
            if looks.next() and looks.seconds >= max(allowed_s[looks.found(rank)] for rank in survivors):
                self._end_ranks(survivors, f", blocked without {cause}")
                return

    def _loss_path(self, fit: int | None) -> Path:
        return self._diagnostics / f".{self._about['token']}-{fit}-lost.json"

    def _publish_loss(self, cause: str) -> None:
        """Informs the other nodes, if any, that this node has lost a rank."""
        if self._about["nodes"] > 1:
            self._store(lambda: _create(self._loss_path(self._lost_fit), {"cause": cause}))

    def _loss_elsewhere(self, fit: int, now: float) -> str | None:
        """The cause of a loss that another node has published for this fit; ``None`` if there is none."""
        if self._about["nodes"] == 1 or now - self._checked_losses < deadlines.CHECK_CASES_EVERY_S:
            return None
        self._checked_losses = now
        loss = self._store(lambda: read_json(self._loss_path(fit)))
        return None if loss is None else str(loss.get("cause"))

    # -- the case: one folder for the diagnosis of all nodes -----------------------------------------------------------

    def _marker(self) -> Path:
        """The file that names the folder of the next case. Cases are numbered, so that all nodes mean the same one."""
        return self._diagnostics / f".{self._about['token']}-{self._cases}.json"

    def _is_case_open(self, now: float) -> bool:
        """Whether another node has found a hang before this node."""
        nodes = self._about["nodes"] if self.ranks else 1
        if nodes == 1 or now - self._checked_cases < deadlines.CHECK_CASES_EVERY_S:
            return False
        self._checked_cases = now
        return self._store(self._find_case) is not None

    def _find_case(self) -> Path | None:
        """The folder of the open case, or of a hang that was judged without this node; ``None`` if there is neither."""
        while (case := read_json(self._marker())) is not None:
            folder = self._diagnostics / str(case.get("folder"))
            verdict = load_json(folder / _VERDICT)
            if verdict is None or (self._has_seen_cases and verdict.get("is_hang")):
                return folder
            self._cases += 1
        self._has_seen_cases = True
        return None

    def _open_case(self) -> Path:
        """The folder for this hang; the node that finds the hang first names the folder."""
        if (folder := self._find_case()) is None:
            name = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{self._about['token'][:6]}"
            _create(self._marker(), {"folder": name})
            folder = self._find_case() or self._diagnostics / name
        folder.mkdir(exist_ok=True)
        return folder

    def _handle(self, overdue: list[Rank]) -> None:
        noticed, now = time.time(), time.monotonic()
        if overdue:
            worst = max(overdue, key=lambda rank: rank.seconds(now))
            assert worst.record is not None
            others = f" and {len(overdue) - 1} more" if len(overdue) > 1 else ""
            self._log(
                f"No progress of rank {worst.rank}{others} for {worst.seconds(now):.1f} s at step {worst.record.step} "
                f"(section {worst.section}, limit {worst.record.timeout:g} s); looking at all ranks."
            )
        # The storage may be the cause of the hang, or be full; the verdict does not need it.
        folder = self._store(self._open_case, f"The diagnosis cannot be written to {self._diagnostics}")
        evidence = self._gather()
        self._write_evidence(folder, evidence)
        judged = self._judge(folder, evidence, noticed)
        self._cases += 1
        if judged.get("is_hang"):
            self._lost_fit = next(iter(self.ranks.values())).fit
            if hung := self._hung_ranks(judged):
                self._end_ranks(hung)
            if len(hung) < len(self.ranks):
                self._extend(doubled=False)  # the others are overdue too, and need time to leave the fit
        else:
            self._extend(doubled=bool(judged.get("doubled")))

    def _hung_ranks(self, judged: dict[str, Any]) -> list[Rank]:
        """The ranks of this node to end for a hang: all ranks, or the culprits where a replacement rank takes over."""
        culprits = {culprit.get("rank") for culprit in judged.get("culprits") or ()}
        hung = [rank for rank in self.ranks.values() if rank.rank in culprits]
        return hung if culprits and _KEEPS_SURVIVORS else list(self.ranks.values())

    def _extend(self, doubled: bool) -> None:
        """Gives every rank more time, also in NVRx's monitors.

        Args:
            doubled: Whether a rank gets as much time as it has taken so far, at least its limit; otherwise its limit.
        """
        now = time.monotonic()
        for rank in self.ranks.values():
            timeout = rank.record.timeout if rank.record is not None else 0.0
            rank.extended_until = now + (max(timeout, rank.seconds(now)) if doubled else timeout)
            rank.extend_monitor()

    def _judge(self, folder: Path | None, evidence: list[RankEvidence], noticed: float) -> dict[str, Any]:
        """Decides whether it is a hang: by the verdict of the node with rank 0, or by its own if none comes in time.

        Returns:
            The verdict in its written form: ``is_hang``, and ``doubled`` if the ranks may take as long again.
        """
        world_size = int(self._about["world_size"])
        if folder is not None and len(evidence) < world_size and self._about["nodes"] > 1:
            gives = any(each.rank == 0 for each in evidence)
            deadline = time.monotonic() + deadlines.OTHER_NODES_PROBE_WITHIN_S * (1 if gives else 2)
            try:
                while time.monotonic() < deadline:
                    evidence = self._refreshed(folder, evidence)
                    verdict, ranks = self._storage.call(lambda: (read_json(folder / _VERDICT), _count_evidence(folder)))
                    if verdict is not None:
                        return verdict
                    if gives and ranks >= world_size:
                        break
                    time.sleep(deadlines.CHECK_VERDICT_EVERY_S)
                within_s = deadlines.STORAGE_WITHIN_S + world_size * 0.01
                evidence = self._storage.call(lambda: read_evidence(folder), within_s)
            except OSError as error:
                self._log(f"The evidence of other nodes cannot be read from {folder}: {error}")
        evidence = self._refreshed(None, evidence)
        if any(each.seconds > each.timeout for each in evidence):
            return self._announce(diagnose(evidence, world_size), folder, evidence, noticed)
        self._log("All ranks have advanced: slow, not hung. If that is normal here, raise the section's timeout.")
        judged = {"is_hang": False, "line": "all ranks have advanced"}
        self._write_verdict(folder, judged)
        return judged

    def _why_extended(self, verdict: Verdict, late: RankEvidence) -> str | None:
        """The reason why busy ranks get more time; ``None`` if they get none. Ending a merely slow rank is no help."""
        if not (verdict.is_hang and verdict.is_busy) or late.seconds >= _BUSY_FOR * late.timeout:
            return None
        if not self._is_started_again:
            return "nothing would restart this run"
        here = ("hang", True, self._about["fit"], late.section, verdict.culprits[0].step)
        events = self._store(lambda: read_ledger(RunDirectory(self._about["run_dir"]).ledger)) or []
        faults = (event for event in events if isinstance(event, Fault))
        if any((each.kind, each.busy, each.fit, each.section, each.step) == here for each in faults):
            return "it was ended here before while it was just as busy"
        return None

    def _announce(
        self, verdict: Verdict, folder: Path | None, evidence: list[RankEvidence], noticed: float
    ) -> dict[str, Any]:
        """Logs, writes and records the verdict; returns its written form."""
        late = max(evidence, key=lambda each: each.seconds - each.timeout)
        judged, advice = verdict.to_json(), ""
        if (why := self._why_extended(verdict, late)) is not None:
            judged |= {"is_hang": False, "doubled": True}
            advice = f" Slow rather than hung: it gets {2 * late.seconds:.0f} s in total, because {why}."
        if late.section == "start":
            advice += (
                f" Outside of a fit a rank may be idle for {late.timeout:g} s. To allow more, use launch "
                "--section-timeouts start:SECONDS, or start:none."
            )
        elif verdict.is_hang and verdict.may_be_slow:
            advice += (
                f" If that takes long by itself: section {late.section} allows {late.timeout:g} s, and more with "
                f'FaultTolerance(section_timeouts="{late.section}:SECONDS") or launch --section-timeouts; and code of '
                "your own that advances says so with lightning_resilience.report_progress()."
            )
        where = "" if folder is None else f" Diagnosis: {folder}"
        self._log(f"{'Hang: ' if judged['is_hang'] else 'No hang: '}{verdict.line}.{advice}{where}")
        self._write_verdict(folder, judged)
        if judged["is_hang"]:
            culprit = verdict.culprits[0] if verdict.culprits else None
            fault = Fault(
                kind="hang",
                step=culprit.step if culprit else None,
                reason=verdict.line,
                section=late.section,
                limit=late.timeout,
                busy=verdict.is_busy,
                noticed=noticed,
                diagnostics=None if folder is None else str(folder),
            )
            self._record(culprit.rank if culprit else None, fault)
        return judged

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _gather(self) -> list[RankEvidence]:
        ranks, now = list(self.ranks.values()), time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
            probes = [
                pool.submit(probe_process, rank.about, rank.path, rank.record, rank.seconds(now)) for rank in ranks
            ]
            return [probe.result() for probe in probes]

    def _refreshed(self, folder: Path | None, evidence: list[RankEvidence]) -> list[RankEvidence]:
        """Updates the evidence about ranks of this node that have advanced since, in ``folder`` too for other nodes."""
        advanced = set()
        for each in evidence:
            rank = self.ranks.get(each.rank)
            if rank is not None and each.seconds > each.timeout:
                before = rank.record
                rank.update()
                if rank.record != before or not rank.is_overdue(time.monotonic()):
                    advanced.add(each.rank)
        if not advanced:
            return evidence
        evidence = [replace(each, seconds=0.0) if each.rank in advanced else each for each in evidence]
        self._write_evidence(folder, evidence)
        return evidence

    def _write_evidence(self, folder: Path | None, evidence: list[RankEvidence]) -> None:
        if folder is None:
            return

        def write() -> None:
            for each in evidence:
                name = f"rank-{each.rank:05d}"
                stacks = self.ranks[each.rank].path.with_suffix(".stacks")
                if stacks.exists():
                    shutil.copyfile(stacks, folder / f"{name}.stacks.txt")
                if each.collectives is not None:
                    _write(folder / f"{name}.collectives.json", each.collectives)
            if evidence:  # written last: this file shows that all files above exist
                content = {"ranks": [_shortened(each).to_json() for each in evidence]}
                _write(folder / f"evidence-{evidence[0].rank:05d}-{len(evidence)}.json", content)

        self._store(write, f"The evidence cannot be written to {folder}")

    def _write_verdict(self, folder: Path | None, verdict: dict[str, Any]) -> None:
        if folder is not None:
            self._store(lambda: write_json(folder / _VERDICT, verdict), f"The verdict cannot be written to {folder}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_ranks(self, ranks: list[Rank], why: str = "") -> None:
        """Ends ranks of this node: the launcher restarts the whole job after the loss of a rank."""
        alive = [rank for rank in ranks if is_running(rank.about)]
        for rank in alive:
            rank.is_ended = True
        # All ranks are stopped first, so that no rank sees the end of another one and takes it for its own fault. The
        # exit signal takes effect when they continue, also in a rank that had been stopped before.
        for signums in ((signal.SIGSTOP, EXIT_SIGNAL, signal.SIGCONT), (signal.SIGKILL,)):
            for signum in signums:
                for rank in alive:
                    if is_running(rank.about):
                        with suppress(ProcessLookupError):
                            os.kill(rank.pid, signum)
            _wait_until(lambda: not any(is_running(rank.about) for rank in alive), deadlines.HUNG_RANK_EXITS_WITHIN_S)
        count = f"{len(alive)} rank{'s' if len(alive) != 1 else ''}"
        self._log(f"Ended {count} of {platform.node()} (exit code {exit_codes.HUNG}){why}.")


def read_evidence(folder: Path) -> list[RankEvidence]:
    """The evidence in a folder of ``diagnostics``, sorted by rank; files that cannot be read are left out."""
    found: dict[int, RankEvidence] = {}
    for path in sorted(folder.glob("evidence-*.json")):
        try:
            for content in json.loads(path.read_bytes())["ranks"]:
                evidence = RankEvidence.from_json(content)
                found[evidence.rank] = evidence
        except (OSError, RecursionError, AttributeError, KeyError, TypeError, ValueError):
            continue
    return [found[rank] for rank in sorted(found)]


def _count_evidence(folder: Path) -> int:
    """The number of ranks with evidence: the name of each node's file ends with the number of its ranks."""
    names = [path.stem.rpartition("-")[2] for path in folder.glob("evidence-*.json")]
    return sum(int(name) for name in names if name.isdigit())


def _create(path: Path, content: dict[str, Any]) -> None:
    """Creates a file of the run directory, unless another node has created it before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    create_json(path, content)


def _write(path: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    publish(path, lambda file: file.write(data))


def _shortened(evidence: RankEvidence) -> RankEvidence:
    """Shortens evidence to what the verdict needs, since one node reads all of it; files beside it have the rest."""
    if evidence.collectives is not None:
        evidence = replace(evidence, collectives=shorten(evidence.collectives, _COLLECTIVES_KEPT))
    if evidence.python_answers:  # otherwise any thread may hold the interpreter lock
        threads = [thread for thread in evidence.process.threads if thread.is_main]
        evidence = replace(evidence, process=replace(evidence.process, threads=threads or evidence.process.threads))
    return evidence


def _wait_until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


# -- starting it -------------------------------------------------------------------------------------------------------

_starting = threading.Lock()


def start(directory: Path) -> dict[str, Any] | None:
    """Starts the watchdog of a node, detached from this process: the watchdog must outlive the rank that starts it.

    Args:
        directory: The node's folder, in which the ranks register. If a watchdog already watches it, none is started.

    Returns:
        The watchdog's process, for ``is_running``; ``None`` if it has already ended.

    Raises:
        OSError, subprocess.SubprocessError: If the watchdog does not start.
    """
    with _starting:
        if (record := read_json(directory / _RECORD)) is not None and is_running(record):
            if is_alive(directory, record):
                return record
            with suppress(ProcessLookupError):
                os.kill(int(record["pid"]), signal.SIGKILL)
        command = [sys.executable, "-m", "lightning_resilience.detect.hangs.watchdog", os.fspath(directory)]
        environment = os.environ | {OUTLIVES_RANKS_VARIABLE: "1"}  # it may still have to explain the death of its ranks
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        if process.wait(deadlines.WATCHDOG_STARTS_WITHIN_S) != 0:
            raise subprocess.SubprocessError("it exited before it began to watch")
        return read_json(directory / _RECORD)


def is_alive(directory: Path, record: dict[str, Any]) -> bool:
    """Whether a watchdog runs and works.

    Args:
        directory: The folder that it watches.
        record: The watchdog's process.
    """
    if not is_running(record):
        return False
    for pause_s in (2 * deadlines.WATCHDOG_BEAT_S, 0.0):  # after a freeze it may wake up after its caller
        try:
            beat = read_beat(directory)
        except OSError:
            return True
        if time.monotonic() - beat < deadlines.WATCHDOG_STALLED_AFTER_S:
            return True
        time.sleep(pause_s)
    return False


def put_off_s() -> float:
    """How many seconds to put off the start of the watchdog when ranks start: more than 0 for a replacement rank."""
    is_replacement = _KEEPS_SURVIVORS and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    return deadlines.WATCHDOG_PUT_OFF_S if is_replacement else 0.0


def start_soon(directory: Path, delay_s: float) -> None:
    """Starts the watchdog of a node in the background; the first fit reports if that fails.

    Args:
        directory: As for :func:`start`.
        delay_s: How many seconds to wait before, in which another rank may start it.
    """

    def wait() -> None:
        time.sleep(delay_s)
        with suppress(OSError, subprocess.SubprocessError):
            start(directory)

    threading.Thread(target=wait, name="resilience-start", daemon=True).start()


def main() -> None:
    """The watchdog's own program: detaches from its parent and watches the folder that the command line names."""
    is_ready, report_ready = os.pipe()
    if os.fork() != 0:
        os.close(report_ready)
        os._exit(0 if os.read(is_ready, 1) else 1)  # reads nothing if the watchdog has ended
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # it keeps watching while the ranks take their time to stop
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _output.introduce("watchdog" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else f"watchdog {node_name()}")
    watchdog = Watchdog(Path(sys.argv[1]))
    try:
        watchdog.register()
    except FileNotFoundError:
        os._exit(1)  # the ranks have ended meanwhile, and their folder was removed
    with suppress(OSError):  # the process that has started the watchdog may have ended
        os.write(report_ready, b".")
    os.close(report_ready)
    os.close(is_ready)
    watchdog.run()
    os._exit(0)  # does not wait for a storage call that may never return


if __name__ == "__main__":
    main()
