"""The watchdog of a node: a process of its own that notices when a rank stops advancing, has it explained, and ends it.

It notices, too, when a rank has gone from the middle of the fit: the others may wait for it without ever knowing.

It reads the ranks' progress from shared memory, so that it needs neither their help nor their interpreter lock. When a
rank is overdue it collects what is known of every rank (``probe`` says what they leave), writes it into
``RUN_DIR/diagnostics/<time>``, and has ``hangs`` judge it. Then it ends the ranks of its node, and whatever started
them starts them again. With several nodes every watchdog looks at its own ranks, and that of the first gives the
verdict.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from lightning_resilience import _output
from lightning_resilience._files import load_json, publish, read_json, write_json
from lightning_resilience._processes import OUTLIVES_RANKS_VARIABLE, describe_process, is_running, pid_namespace
from lightning_resilience.detect.hangs.deaths import Death, ExitWatcher, MemoryShortage, is_ending, is_stopped
from lightning_resilience.detect.hangs.evidence import RankEvidence
from lightning_resilience.detect.hangs.flight_recorder import shorten
from lightning_resilience.detect.hangs.process_probe import probe_process, usage, usage_of_all
from lightning_resilience.detect.hangs.progress import ProgressRecord, read_record
from lightning_resilience.detect.hangs.rank_probe import (
    EXIT_SIGNAL,
    remove_abandoned,
)
from lightning_resilience.detect.hangs.verdict import Verdict, diagnose
from lightning_resilience.run import exit_codes
from lightning_resilience.run.events import Fault, Killed
from lightning_resilience.run.ledger import Ledger, node_name, read_ledger
from lightning_resilience.run.run_directory import RunDirectory

T = TypeVar("T")

POLL_S = 0.2
"""How often the progress of the ranks is read: a hang is noticed within its timeout and this."""

_RECORD = "watchdog.json"
_BEAT = "watchdog.beat"
_BEATS = struct.Struct("<d")  # seconds of ``time.monotonic()``, which all processes of a node share
_BEAT_EVERY_S = 1.0
_STANDS_STILL_AFTER_S = 120.0  # a case, which it is busy with, takes less
_BLIND_FOR_S = 30.0
_VERDICT = "verdict.json"
_COLLECTIVES_KEPT = 128
_LOOK_FOR_VERDICT_EVERY_S = 0.25
_SPEAK_WITHIN_S = 1.0
_START_WITHIN_S = 60.0
_FIRST_RANK_WITHIN_S = 60.0
_FROZEN_AFTER_S = 2.0  # a pause of this watchdog longer than this was one of the whole node, or of the job
_STORAGE_WITHIN_S = 3.0
_OTHER_NODES_WITHIN_S = 5.0
_LOOK_FOR_CASE_EVERY_S = 1.0
_EXIT_WITHIN_S = 0.5
_ALL_DIE_WITHIN_S = 0.3  # where one hand has ended them all
_RAISES_WITHIN_S = 2.0  # a survivor that notices the death of a peer, as gloo's do
_NOTICES_FAILURE_WITHIN_S = 5.0  # a rank that fails is still there for a while, and its peers raise when it has gone
_ENDS_WORK_WITHIN_S = 30.0  # what a survivor still writes, such as a checkpoint; launchers do not wait any longer
_WRITES_FROM = 1e6  # bytes in one look: less may be a log
_LOOK_FOR_ACTIVITY_EVERY_S = 60.0
_ACTIVE_FROM = 0.05  # of one CPU: what only waits, such as a thread that looks after something, uses less
_ACTIVE_FROM_BYTES = 2e4  # per second: a download at which nobody would wait any longer
_STOPPED_FROM_S = 1.0
_BUSY_FOR = 16
"""How many times its limit a rank may take that is at work, where it is not ended in vain, or was once."""
_OUTSIDE = -1  # the number of no fit
_LOOK_AGAIN_S = 0.5


@dataclass
class Rank:
    """A rank of this node, as its watchdog sees it.

    Args:
        about: What it has registered.
        path: Its files, without their endings.
        progress: The record of its progress, held open: somebody may clean up node memory.
        shortage: Of memory in its cgroup, which schedulers may have made for it alone.
    """

    about: dict[str, Any]
    path: Path
    progress: FileIO
    shortage: MemoryShortage
    ticks: int = -1
    lost_s: float = 0.0  # time within the present stay in which this watchdog did not run either
    excused_until: float = 0.0
    seen: ProgressRecord | None = field(default=None)
    is_ended: bool = False  # by this watchdog: it may take a while to go
    active_at: float = 0.0  # when it was seen to do something, in a section that has no boundaries
    _used: tuple[float, dict[int, tuple[float, int]]] | None = field(default=None)

    @property
    def rank(self) -> int:
        """Its global rank."""
        return int(self.about["rank"])

    @property
    def fit(self) -> int:
        """Number of the fit in which it is."""
        return int(_OUTSIDE if self.about["fit"] is None else self.about["fit"])

    def look(self, pause_s: float) -> None:
        """Reads its progress.

        Args:
            pause_s: How long the watchdog was frozen since it looked last.
        """
        if (stay := read_record(self.progress)) is None:
            return
        if stay.ticks != self.ticks:
            self.ticks, self.lost_s, self.excused_until = stay.ticks, 0.0, 0.0
        self.lost_s += pause_s
        self.seen = stay
        if stay.section == "start":
            self._look_for_activity(stay.timeout)

    def _look_for_activity(self, timeout: float) -> None:
        """Nothing says that a script advances outside of a fit but what it and its processes compute, read, write."""
        now = time.monotonic()
        seconds = now - (self._used[0] if self._used is not None else 0.0)
        if seconds < min(timeout / 4, _LOOK_FOR_ACTIVITY_EVERY_S):
            return
        used = usage_of_all(int(self.about["pid"]))
        if self._used is not None:
            before = self._used[1]
            cpu = sum(each[0] - before.get(pid, (0.0, 0))[0] for pid, each in used.items())
            chars = sum(each[1] - before.get(pid, (0.0, 0))[1] for pid, each in used.items())
            least = max(1.0, seconds)  # to be asked for its stacks takes a little too
            if cpu >= _ACTIVE_FROM * least or chars >= _ACTIVE_FROM_BYTES * least:
                self.active_at, self.lost_s = now, 0.0
        self._used = now, used

    def excuse_monitor(self) -> None:
        """Gives it its time once more as far as NVRx's monitor is concerned."""
        with suppress(OSError):
            self.path.with_suffix(".excused").touch()

    def seconds(self, now: float) -> float:
        """Since its last progress, as far as it could have made any."""
        return 0.0 if self.seen is None else max(0.0, now - max(self.seen.since, self.active_at) - self.lost_s)

    def is_overdue(self, now: float) -> bool:
        """Whether it has taken longer than it may."""
        if self.seen is None or self.seen.section == "left" or now < self.excused_until:
            return False
        return self.seconds(now) > self.seen.timeout

    def is_in_fit(self) -> bool:
        """Whether it has begun a fit and has not said that it leaves it."""
        return self.seen is None or self.seen.section not in ("left", "start")

    def is_watched(self) -> bool:
        """Whether it takes part in the fit still."""
        return self.is_in_fit() and is_running(self.about)

    def is_here(self) -> bool:
        """Whether it may hang: also outside of a fit, where it was launched."""
        return (self.seen is None or self.seen.section != "left") and is_running(self.about)

    def has_died(self) -> bool:
        """Whether its process has ended. Of one in another container nothing is known: its number says nothing here."""
        return self.about["namespace"] == pid_namespace() and not is_running(self.about)

    def has_failed(self) -> bool:
        """Whether its fit has failed."""
        return self.path.with_suffix(".failed").exists()


class _Storage:
    """Calls that touch shared storage, each with a deadline: if that hangs, the watchdog must not."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[Any] | None = None

    def call(self, function: Callable[[], T], within_s: float | None = None) -> T:
        """What ``function`` returns.

        Raises:
            OSError: If it raises that, or takes too long, or the call before it has not come back yet.
        """
        if self._last is not None and not self._last.done():
            raise TimeoutError("the storage does not answer")
        future = self._last = self._thread.submit(function)
        within_s = _STORAGE_WITHIN_S if within_s is None else within_s
        try:
            result: T = future.result(within_s)
            return result
        except FutureTimeout:
            raise TimeoutError(f"the storage has not answered for {within_s:g} s") from None


class Watchdog:
    """One node's watchdog.

    Args:
        directory: The node's folder, in which the ranks register.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: dict[int, Rank] = {}
        self._cases = 0  # that are over
        self._has_seen_cases = False  # a restart may keep the token: what was judged before is not of these ranks
        self._looked_for_case = 0.0
        self._looked_for_loss = 0.0
        self._lost_fit: int | None = None  # that has lost a rank: what the others do there is a consequence
        self._exits = ExitWatcher()
        self._storage = _Storage()
        self._speaker = _Speaker()
        self._has_stumbled = False
        self._beats: FileIO | None = None
        self._beaten = -math.inf
        self._looked = time.monotonic()

    def register(self) -> None:
        """Says in the folder which process watches it.

        Raises:
            OSError: If that cannot be written: nobody would know of this watchdog.
        """
        fd = os.open(self.directory / _BEAT, os.O_RDWR | os.O_CREAT, 0o600)
        self._beats = FileIO(fd, "r+")
        self._beat(time.monotonic())
        write_json(self.directory / _RECORD, describe_process())

    def _beat(self, now: float) -> None:
        """Says that it looks: a process that is there may stand still, or fail at every look."""
        if self._beats is not None and now - self._beaten >= _BEAT_EVERY_S:
            self._beaten = now
            os.pwrite(self._beats.fileno(), _BEATS.pack(now), 0)

    def run(self) -> None:
        """Watches until no rank is left."""
        with suppress(OSError):  # another watchdog may be doing the same
            remove_abandoned(self.directory)
        started = last = saw = time.monotonic()
        while self.ranks or last - started < _FIRST_RANK_WITHIN_S:
            now = time.monotonic()
            pause = now - last - POLL_S
            last = now
            is_over = bool(self.ranks) and not any(rank.is_here() for rank in self.ranks.values())
            try:
                if self._look(now, pause if pause > _FROZEN_AFTER_S else 0.0):
                    last = time.monotonic()
                saw = time.monotonic()
                self._beat(saw)
            except Exception:  # whatever it is, the ranks must not go unwatched
                if not self._has_stumbled:
                    self._has_stumbled = True
                    self._speaker.say(f"The watchdog goes on after an error of its own:\n{traceback.format_exc()}")
                if time.monotonic() - saw > _BLIND_FOR_S:  # nobody must take it for one that watches
                    self._speaker.say(
                        f"The watchdog of {platform.node()} gives up: it has seen nothing for {_BLIND_FOR_S:g} s. The "
                        "next save starts another one; until then hangs on this node are not found."
                    )
                    self._speaker.stop()
                    return
            if is_over:
                break
            self._exits.wait(POLL_S)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._speaker.stop()

    def _look(self, now: float, pause_s: float) -> bool:
        """One look at all ranks. Returns whether there was a case, which takes its time."""
        self._find_ranks()
        if self._is_suspended(now):
            pause_s = now - self._looked
        self._looked = now
        for rank in self.ranks.values():
            rank.look(pause_s)
            rank.shortage.look()
            if now < rank.excused_until:
                rank.excuse_monitor()
        if self._look_for_loss(now):
            return True
        overdue = [rank for rank in self.ranks.values() if rank.is_overdue(now) and rank.is_here()]
        if lost := [rank for rank in overdue if rank.is_ended or (rank.fit == self._lost_fit and rank.is_in_fit())]:
            self._end_ranks(lost, ", which could not leave")
            return True
        if not overdue and not self._is_case_open(now):
            return False
        self._handle(overdue)
        return True

    def _is_suspended(self, now: float) -> bool:
        """Whether somebody has stopped all ranks, by Ctrl-Z at their terminal: who does that wants to go on later.

        Not where they would be started again: there nobody sits at a terminal of theirs, and the time is another's.
        """
        ranks = [rank for rank in self.ranks.values() if rank.is_here()]
        if not ranks or self._is_started_again or min(rank.seconds(now) for rank in ranks) < _STOPPED_FROM_S:
            return False
        return all(is_stopped(int(rank.about["pid"])) for rank in ranks)

    @property
    def _is_started_again(self) -> bool:
        """Whether somebody starts the ranks again when they were ended."""
        return bool(self._about.get("is_started_again", True))

    def _find_ranks(self) -> None:
        for path in self.directory.glob("rank-*.json"):
            about = read_json(path)
            if about is None:
                continue
            if (known := self.ranks.get(about["rank"])) is not None:
                known.about = about  # of its present fit
                continue
            with suppress(OSError):
                progress = open(path.with_suffix(".progress"), "rb", buffering=0)
                shortage = MemoryShortage(int(about["pid"]))
                self.ranks[about["rank"]] = Rank(about, path.with_suffix(""), progress, shortage)
                self._exits.add(int(about["pid"]))

    @property
    def _about(self) -> dict[str, Any]:
        return next(iter(self.ranks.values())).about

    # -- a rank that has gone ------------------------------------------------------------------------------------------

    def _look_for_loss(self, now: float) -> bool:
        """Ends the others of a rank that died in the middle of the fit, or whose fit has failed; whether there is one.

        NCCL's survivors stay blocked: no exception reaches them, and Python does not run.
        """
        ranks = [rank for rank in self.ranks.values() if rank.fit != self._lost_fit]
        for rank in ranks:
            if rank.is_in_fit() and rank.has_died():
                rank.look(0.0)  # it may have left just before
                if rank.is_in_fit() and (death := self._death_of(rank)).exit_code != 0:
                    self._lost_fit = rank.fit
                    self._handle_death(rank, death)
                    return True
        if failed := [rank for rank in ranks if rank.has_failed()]:
            self._lost_fit = failed[0].fit
            self._handle_failure(failed[0])
            return True
        if ranks and (cause := self._loss_elsewhere(ranks[0].fit, now)) is not None:
            self._lost_fit = ranks[0].fit
            self._end_survivors(cause, _RAISES_WITHIN_S)
            return True
        return False

    def _death_of(self, rank: Rank) -> Death:
        return Death(self._exits.status(int(rank.about["pid"])), rank.shortage.is_recent())

    def _handle_death(self, rank: Rank, death: Death) -> None:
        about, stay = rank.about, rank.seen
        others = [other for other in self.ranks.values() if other is not rank]
        if death.is_from_outside and about["nodes"] == 1:
            # A launcher or a scheduler ends all; that one of them is seen to be the first says nothing.
            _wait_until(lambda: all(map(_is_gone, others)), _ALL_DIE_WITHIN_S)
            if all(map(_is_gone, others)):
                self._record_end(rank, death)
                return
        at = f"At step {stay.step} (section {stay.section}) r" if stay is not None else "R"
        self._speaker.say(f"{at}ank {rank.rank} ({about['node']}, pid {about['pid']}) {death}.")
        self._record(
            rank.rank,
            Fault(
                kind="died",
                step=stay.step if stay is not None else None,
                reason=f"rank {rank.rank} {death}",
                signal=death.signal,
                exit_code=death.exit_code,
                out_of_memory=death.out_of_memory,
                section=stay.section if stay is not None else None,
            ),
        )
        cause = f"rank {rank.rank} of {about['node']}, which {death}"
        if about["nodes"] > 1:
            self._publish_loss(cause)
        self._end_survivors(cause, _RAISES_WITHIN_S)

    def _record_end(self, rank: Rank, death: Death) -> None:
        """Writes down how far ranks had got that one hand has ended: no fault of theirs, and they could not say it."""
        step = max((each.seen.step for each in self.ranks.values() if each.seen is not None), default=None)
        about = self._about
        pid, ledger = int(rank.about["pid"]), Ledger(RunDirectory(about["run_dir"]).ledger, rank.rank)
        end = Killed(
            fit=about["fit"],
            elastic_run_id=about["elastic_run_id"],
            restart_count=about["restart_count"],
            step=step,
            worker=pid,
            signal=death.signal,
            reason=f"rank {rank.rank} (pid {pid}) {death}",
        )
        with suppress(OSError):
            self._storage.call(lambda: ledger.record(end))

    def _handle_failure(self, rank: Rank) -> None:
        if rank.shortage.is_recent():  # a data-loader worker, say, whose end says nothing of the reason
            self._speaker.say(
                f"Rank {rank.rank} of {rank.about['node']} has failed, and within the last minute the kernel has "
                "killed a process there because memory was short."
            )
        began, survivors = time.monotonic(), self._survivors()
        while not rank.has_died() and time.monotonic() - began < _NOTICES_FAILURE_WITHIN_S:
            survivors = self._survivors(survivors)
            if not rank.has_failed() or not (survivors or self._about["nodes"] > 1):
                return
            time.sleep(POLL_S)
        cause = f"rank {rank.rank} of {rank.about['node']}, which has failed"
        if self._about["nodes"] > 1:
            self._publish_loss(cause)
        self._end_survivors(cause, _RAISES_WITHIN_S if rank.has_died() else _LOOK_AGAIN_S, survivors)

    def _survivors(self, among: list[Rank] | None = None) -> list[Rank]:
        """The ranks that are still in the fit that has lost one, and have not failed themselves."""
        self._find_ranks()  # a script that has caught the error may be in the next fit already
        ranks = list(self.ranks.values()) if among is None else among
        for rank in ranks:
            rank.look(0.0)
        return [rank for rank in ranks if rank.fit == self._lost_fit and rank.is_watched() and not rank.has_failed()]

    def _end_survivors(self, cause: str, within_s: float, survivors: list[Rank] | None = None) -> None:
        """Ends the ranks that neither end by themselves nor have anything left to do.

        Args:
            cause: What they lack.
            within_s: How long they may take to begin with that.
            survivors: Who they are. Default: all that are in the fit.
        """
        began = time.monotonic()
        written: dict[int, int] = {}
        while survivors := self._survivors(survivors):
            at_work = [rank for rank in survivors if self._is_at_work(rank, written)]
            if time.monotonic() - began >= (_ENDS_WORK_WITHIN_S if at_work else within_s):
                self._end_ranks(survivors, f", blocked without {cause}")
                return
            time.sleep(_LOOK_AGAIN_S)

    @staticmethod
    def _is_at_work(rank: Rank, written: dict[int, int]) -> bool:
        """Whether it saves, or writes in the background."""
        before, found = written.get(rank.rank), usage(int(rank.about["pid"]))
        written[rank.rank] = now = found[1] if found is not None else 0
        is_saving = rank.seen is not None and rank.seen.section == "checkpointing"
        return is_saving or (before is not None and now - before >= _WRITES_FROM)

    def _loss_path(self, fit: int | None) -> Path:
        return Path(self._about["run_dir"]) / "diagnostics" / f".{self._about['token']}-{fit}-lost.json"

    def _publish_loss(self, cause: str) -> None:
        """Tells the other nodes."""
        with suppress(OSError):
            self._storage.call(lambda: self._publish_once(self._loss_path(self._lost_fit), {"cause": cause}))

    def _loss_elsewhere(self, fit: int, now: float) -> str | None:
        """What another node has published about this fit, if anything."""
        if self._about["nodes"] == 1 or now - self._looked_for_loss < _LOOK_FOR_CASE_EVERY_S:
            return None
        self._looked_for_loss = now
        try:
            loss = self._storage.call(lambda: read_json(self._loss_path(fit)))
        except OSError:
            return None
        return None if loss is None else str(loss.get("cause"))

    # -- the case: one folder for the diagnosis of all nodes -----------------------------------------------------------

    def _marker(self) -> Path:
        """Names the folder of the next case. Cases are numbered, so that all nodes mean the same one."""
        return Path(self._about["run_dir"]) / "diagnostics" / f".{self._about['token']}-{self._cases}.json"

    def _is_case_open(self, now: float) -> bool:
        """Whether another node has noticed a hang before this one."""
        if not self.ranks or self._about["nodes"] == 1 or now - self._looked_for_case < _LOOK_FOR_CASE_EVERY_S:
            return False
        self._looked_for_case = now
        try:
            return self._storage.call(self._find_case) is not None
        except OSError:
            return False

    def _find_case(self) -> Path | None:
        """The folder of the open case, if there is one, or of a hang that was judged without this node."""
        while (case := read_json(self._marker())) is not None:
            folder = self._marker().parent / str(case.get("folder"))
            verdict = load_json(folder / _VERDICT)
            if verdict is None or (self._has_seen_cases and verdict.get("is_hang")):
                return folder
            self._cases += 1
        self._has_seen_cases = True
        return None

    def _open_case(self) -> Path:
        """The folder for this hang; whoever notices it first names it."""
        if (folder := self._find_case()) is None:
            marker = self._marker()
            name = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{self._about['token'][:6]}"
            self._publish_once(marker, {"folder": name})
            folder = self._find_case() or marker.parent / name
        folder.mkdir(exist_ok=True)
        return folder

    @staticmethod
    def _publish_once(path: Path, content: dict[str, Any]) -> None:
        """Makes a file of the run directory, unless another node has made it before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
        write_json(draft, content)
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename this never replaces
        draft.unlink(missing_ok=True)

    def _handle(self, overdue: list[Rank]) -> None:
        noticed = time.time()
        if overdue:
            worst = max(overdue, key=lambda rank: rank.seconds(time.monotonic()))
            assert worst.seen is not None
            others = f" and {len(overdue) - 1} more" if len(overdue) > 1 else ""
            self._speaker.say(
                f"No progress of rank {worst.rank}{others} for {worst.seconds(time.monotonic()):.1f} s at step "
                f"{worst.seen.step} (section {worst.seen.section}, limit {worst.seen.timeout:g} s); looking at all "
                "ranks."
            )
        folder = None
        try:
            folder = self._storage.call(self._open_case)
        except OSError as error:  # the storage may be what hangs, or be full; the verdict does not need it
            self._speaker.say(f"The diagnosis cannot be written to {self._marker().parent}: {error}")
        evidence = self._gather()
        if folder is not None:
            self._write_evidence(folder, evidence)
        judged = self._judge(folder, evidence, noticed)
        self._cases += 1
        if judged.get("is_hang"):
            self._lost_fit = next(iter(self.ranks.values())).fit
            self._end_ranks(list(self.ranks.values()))
        else:
            self._excuse(doubled=bool(judged.get("doubled")))

    def _excuse(self, doubled: bool) -> None:
        """Gives every rank its time once more, and tells NVRx's monitors so.

        Args:
            doubled: Whether that is as much as it has taken up to now.
        """
        now = time.monotonic()
        for rank in self.ranks.values():
            timeout = rank.seen.timeout if rank.seen is not None else 0.0
            rank.excused_until = now + (max(timeout, rank.seconds(now)) if doubled else timeout)
            rank.excuse_monitor()

    def _judge(self, folder: Path | None, evidence: list[RankEvidence], noticed: float) -> dict[str, Any]:
        """Whether it is a hang: the verdict of this node if it has the first rank, and else of the one that has.

        Returns:
            The verdict as it is written: ``is_hang``, and ``doubled`` if the ranks may take as long again.
        """
        world_size = int(self._about["world_size"])
        if folder is not None and len(evidence) < world_size and self._about["nodes"] > 1:
            gives = any(each.rank == 0 for each in evidence)
            deadline = time.monotonic() + _OTHER_NODES_WITHIN_S * (1 if gives else 2)
            try:
                while time.monotonic() < deadline:
                    evidence = self._refreshed(folder, evidence)
                    verdict, ranks = self._storage.call(lambda: (read_json(folder / _VERDICT), _count_evidence(folder)))
                    if verdict is not None:
                        return verdict
                    if gives and ranks >= world_size:
                        break
                    time.sleep(_LOOK_FOR_VERDICT_EVERY_S)
                evidence = self._storage.call(lambda: read_evidence(folder), _STORAGE_WITHIN_S + world_size * 0.01)
            except OSError as error:
                self._speaker.say(f"What other nodes have seen cannot be read from {folder}: {error}")
        evidence = self._refreshed(None, evidence)
        if not any(each.seconds > each.timeout for each in evidence):
            self._speaker.say(
                "All ranks have advanced: slow, not hung. If that is usual here, give the section more time."
            )
            judged: dict[str, Any] = {"is_hang": False, "line": "all ranks have advanced"}
            self._write_verdict(folder, judged)
            return judged
        verdict_here = diagnose(evidence, world_size)
        judged = self._announce(verdict_here, folder, evidence, noticed)
        if any(each.section == "start" and each.seconds > each.timeout for each in evidence):
            self._speaker.say(
                "Outside of a fit a rank may do nothing for as long as section start allows. If that is too short "
                "here: launch --section-timeouts start:SECONDS, or start:none."
            )
        return judged

    def _why_busy_may_go_on(self, verdict: Verdict, late: RankEvidence) -> str | None:
        """Why ranks that are at work get more time, if they do: to be ended for being slow helps nobody."""
        if not (verdict.is_hang and verdict.is_busy) or late.seconds >= _BUSY_FOR * late.timeout:
            return None
        if not self._is_started_again:
            return "nothing would start this run again"
        here = ("hang", True, self._about["fit"], late.section, verdict.culprits[0].step)
        try:
            events = self._storage.call(lambda: read_ledger(RunDirectory(self._about["run_dir"]).ledger))
        except OSError:
            return None
        was_here = any(
            (fault.kind, fault.busy, fault.fit, fault.section, fault.step) == here
            for fault in events
            if isinstance(fault, Fault)
        )
        return "it was ended here before, just as busy" if was_here else None

    def _refreshed(self, folder: Path | None, evidence: list[RankEvidence]) -> list[RankEvidence]:
        """The same with the ranks of this node that have advanced since, for the other nodes in ``folder`` too."""
        advanced = set()
        for each in evidence:
            rank = self.ranks.get(each.rank)
            if rank is not None and each.seconds > each.timeout:
                before = rank.ticks
                rank.look(0.0)
                if rank.ticks != before or not rank.is_overdue(time.monotonic()):
                    advanced.add(each.rank)
        if not advanced:
            return evidence
        evidence = [replace(each, seconds=0.0) if each.rank in advanced else each for each in evidence]
        if folder is not None:
            self._write_evidence(folder, evidence)
        return evidence

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _gather(self) -> list[RankEvidence]:
        ranks, now = list(self.ranks.values()), time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
            return list(
                pool.map(lambda rank: probe_process(rank.about, rank.path, rank.seen, rank.seconds(now)), ranks)
            )

    def _write_evidence(self, folder: Path, evidence: list[RankEvidence]) -> None:
        def write() -> None:
            for each in evidence:
                name = f"rank-{each.rank:05d}"
                stacks = self.ranks[each.rank].path.with_suffix(".stacks")
                if stacks.exists():
                    shutil.copyfile(stacks, folder / f"{name}.stacks.txt")
                if each.collectives is not None:
                    _write(folder / f"{name}.collectives.json", each.collectives)
            if evidence:  # last: it says that all of the above is there
                content = {"ranks": [_shortened(each).to_json() for each in evidence]}
                _write(folder / f"evidence-{evidence[0].rank:05d}-{len(evidence)}.json", content)

        try:
            self._storage.call(write)
        except OSError as error:
            self._speaker.say(f"The evidence cannot be written to {folder}: {error}")

    def _write_verdict(self, folder: Path | None, verdict: dict[str, Any]) -> None:
        if folder is not None:
            try:
                self._storage.call(lambda: write_json(folder / _VERDICT, verdict))
            except OSError as error:
                self._speaker.say(f"The verdict cannot be written to {folder}: {error}")

    def _announce(
        self, verdict: Verdict, folder: Path | None, evidence: list[RankEvidence], noticed: float
    ) -> dict[str, Any]:
        """Says, writes and records the verdict; returns it as it is written."""
        where = "" if folder is None else f" Diagnosis: {folder}"
        late = max(evidence, key=lambda each: each.seconds - each.timeout)
        why = self._why_busy_may_go_on(verdict, late)
        judged = verdict.to_json() | ({"is_hang": False, "doubled": True} if why is not None else {})
        advice = ""
        if why is not None:
            advice = f" Slow rather than hung: it gets {2 * late.seconds:.0f} s in all, since {why}."
        if verdict.is_hang and verdict.may_be_slow and late.section != "start":
            advice += (
                f" If that takes long by itself: section {late.section} allows {late.timeout:g} s, and more with "
                f'FaultTolerance(section_timeouts="{late.section}:SECONDS") or launch --section-timeouts; and code of '
                "your own that advances says so with lightning_resilience.report_progress()."
            )
        self._speaker.say(f"{'Hang: ' if judged['is_hang'] else 'No hang: '}{verdict.line}.{advice}{where}")
        self._write_verdict(folder, judged)
        if not judged["is_hang"]:
            return judged
        culprit = verdict.culprits[0] if verdict.culprits else None
        self._record(
            culprit.rank if culprit else None,
            Fault(
                kind="hang",
                step=culprit.step if culprit else None,
                reason=verdict.line,
                section=late.section,
                limit=late.timeout,
                busy=verdict.is_busy,
                noticed=noticed,
                diagnostics=None if folder is None else str(folder),
            ),
        )
        return judged

    def _record(self, rank: int | None, fault: Fault) -> None:
        """Writes a fault of a rank into the ledger."""
        about = self._about
        ledger = Ledger(RunDirectory(about["run_dir"]).ledger, rank)
        fault = replace(
            fault, fit=about["fit"], elastic_run_id=about["elastic_run_id"], restart_count=about["restart_count"]
        )
        with suppress(OSError):
            self._storage.call(lambda: ledger.record(fault))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_ranks(self, ranks: list[Rank], why: str = "") -> None:
        """Ends ranks of this node: a job that has lost one is started again as a whole."""
        alive = [rank for rank in ranks if is_running(rank.about)]
        for rank in alive:
            rank.is_ended = True
        # All stand still first, so that none meets the end of another and takes it for a fault of its own. The exit
        # waits for them to be woken, as it does for one that had been stopped before.
        for signums in ((signal.SIGSTOP, EXIT_SIGNAL, signal.SIGCONT), (signal.SIGKILL,)):
            for signum in signums:
                for rank in alive:
                    if is_running(rank.about):
                        with suppress(ProcessLookupError):
                            os.kill(int(rank.about["pid"]), signum)
            _wait_until(lambda: not any(is_running(rank.about) for rank in alive), _EXIT_WITHIN_S)
        count = f"{len(alive)} rank{'s' if len(alive) != 1 else ''}"
        self._speaker.say(f"Ended {count} of {platform.node()} (exit code {exit_codes.HUNG}){why}.")


def _is_gone(rank: Rank) -> bool:
    """Whether a rank has been ended in the middle of the fit, or is being ended."""
    rank.look(0.0)
    return rank.is_in_fit() and not rank.has_failed() and (rank.has_died() or is_ending(rank.about["pid"]))


def read_evidence(folder: Path) -> list[RankEvidence]:
    """The evidence in a folder of ``diagnostics``, by rank; what cannot be read is left out."""
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
    """Of how many ranks there is evidence: every node says in the name of its file of how many it has."""
    names = [path.stem.rpartition("-")[2] for path in folder.glob("evidence-*.json")]
    return sum(int(name) for name in names if name.isdigit())


def _write(path: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    publish(path, lambda file: file.write(data))


def _shortened(evidence: RankEvidence) -> RankEvidence:
    """What the judgement needs: one node reads what all have written. The rest lies beside it."""
    if evidence.collectives is not None:
        evidence = replace(evidence, collectives=shorten(evidence.collectives, _COLLECTIVES_KEPT))
    if evidence.python_answers:  # else the thread that holds the interpreter lock may be any
        threads = [thread for thread in evidence.process.threads if thread.is_main]
        evidence = replace(evidence, process=replace(evidence.process, threads=threads or evidence.process.threads))
    return evidence


def _wait_until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


class _Speaker:
    """Writes lines from a thread of its own: whoever reads them may be gone, or stand still."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="resilience-watchdog-log", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """One readable line."""
        self._lines.put(f"{_output.signed(line)}\n")

    def stop(self) -> None:
        """Waits a moment until all is written."""
        self._lines.put(None)
        self._thread.join(_SPEAK_WITHIN_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):
                os.write(2, line.encode())


_starting = threading.Lock()


def start(directory: Path) -> dict[str, Any] | None:
    """Starts the watchdog of a node, which then belongs to nobody: it must outlive whichever rank has started it.

    Args:
        directory: The node's folder, in which the ranks register. If a watchdog watches it already, none is started.

    Returns:
        Its process, for ``is_running``; ``None`` if it has ended already.

    Raises:
        OSError, subprocess.SubprocessError: If it does not start.
    """
    with _starting:
        if (record := read_json(directory / _RECORD)) is not None and is_running(record):
            if is_alive(directory, record):
                return record  # it has been given up as too slow to start, and has started
            with suppress(ProcessLookupError):
                os.kill(int(record["pid"]), signal.SIGKILL)
        if _begin(directory).wait(_START_WITHIN_S) != 0:
            raise subprocess.SubprocessError("it has ended before it began")
        return read_json(directory / _RECORD)


def is_alive(directory: Path, record: dict[str, Any]) -> bool:
    """Whether a watchdog runs and looks.

    Args:
        directory: Which it watches.
        record: Its process.
    """
    if not is_running(record):
        return False
    for pause_s in (2 * _BEAT_EVERY_S, 0.0):  # all may have been frozen, and it comes to itself after whoever asks
        try:
            beat: float = _BEATS.unpack((directory / _BEAT).read_bytes())[0]
        except (OSError, struct.error):
            return True
        if time.monotonic() - beat < _STANDS_STILL_AFTER_S:
            return True
        time.sleep(pause_s)
    return False


def start_soon(directory: Path, unless_within_s: float = 0.0) -> None:
    """Starts the watchdog of a node without waiting for it; whoever calls :func:`start` next does.

    Args:
        directory: As for :func:`start`.
        unless_within_s: How long somebody else has to start it.
    """
    begun = None if unless_within_s else _begin(directory)

    def wait() -> None:
        if begun is not None:
            with _starting, suppress(subprocess.SubprocessError):
                begun.wait(_START_WITHIN_S)
            return
        time.sleep(unless_within_s)
        with suppress(OSError, subprocess.SubprocessError):  # the first fit says so
            start(directory)

    threading.Thread(target=wait, name="resilience-start", daemon=True).start()


def _begin(directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightning_resilience.detect.hangs.watchdog", os.fspath(directory)]
    environment = os.environ | {OUTLIVES_RANKS_VARIABLE: "1"}  # it may have the death of its ranks to explain still
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)


def main() -> None:
    """The watchdog's own program: leaves its parent and watches the folder that the command line names."""
    is_ready, say_ready = os.pipe()
    if os.fork() != 0:
        os.close(say_ready)
        os._exit(0 if os.read(is_ready, 1) else 1)  # nothing comes from one that has ended
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # it watches for as long as the ranks take to stop
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _output.introduce("watchdog" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else f"watchdog {node_name()}")
    watchdog = Watchdog(Path(sys.argv[1]))
    try:
        watchdog.register()
    except FileNotFoundError:
        os._exit(1)  # the ranks have ended meanwhile, and their folder with them
    with suppress(OSError):  # whoever has started it may have gone
        os.write(say_ready, b".")
    os.close(say_ready)
    os.close(is_ready)
    watchdog.run()
    os._exit(0)  # without waiting for a call to storage that does not come back


if __name__ == "__main__":
    main()
