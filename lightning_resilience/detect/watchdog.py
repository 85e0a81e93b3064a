"""The watchdog of a node: a process of its own that notices when a rank stops advancing, has it explained, and ends it.

It reads the ranks' progress from shared memory, so that it needs neither their help nor their interpreter lock. When a
rank is overdue it collects what is known of every rank (``witness`` says what they leave), writes it into
``RUN_DIR/diagnostics/<time>``, and has ``hangs`` judge it. Then it ends the ranks of its node, and whatever started
them starts them again. With several nodes every watchdog looks at its own ranks, and that of the first gives the
verdict.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from lightning_resilience._files import publish, read_json, write_json
from lightning_resilience._processes import describe_process, is_running
from lightning_resilience.detect.evidence import RankEvidence
from lightning_resilience.detect.examine import examine
from lightning_resilience.detect.hangs import Verdict, diagnose
from lightning_resilience.detect.progress import Stay, read_record
from lightning_resilience.detect.witness import (
    EXIT_HUNG,
    EXIT_SIGNAL,
    remove_abandoned,
)
from lightning_resilience.ledger import Ledger
from lightning_resilience.run_directory import RunDirectory

T = TypeVar("T")

POLL_S = 0.2
"""How often the progress of the ranks is read: a hang is noticed within its timeout and this."""

_RECORD = "watchdog.json"
_VERDICT = "verdict.json"
_COLLECTIVES_KEPT = 256
_START_WITHIN_S = 60.0
_FIRST_RANK_WITHIN_S = 60.0
_FROZEN_AFTER_S = 2.0  # a pause of this watchdog longer than this was one of the whole node, or of the job
_STORAGE_WITHIN_S = 3.0
_OTHER_NODES_WITHIN_S = 5.0
_LOOK_FOR_CASE_EVERY_S = 1.0
_EXIT_WITHIN_S = 0.5


@dataclass
class Rank:
    """A rank of this node, as its watchdog sees it.

    Args:
        about: What it has registered.
        path: Its files, without their endings.
        progress: The record of its progress, held open: somebody may clean up node memory.
    """

    about: dict[str, Any]
    path: Path
    progress: FileIO
    ticks: int = -1
    lost_s: float = 0.0  # time within the present stay in which this watchdog did not run either
    excused_until: float = 0.0
    seen: Stay | None = field(default=None)

    @property
    def rank(self) -> int:
        """Its global rank."""
        return int(self.about["rank"])

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

    def seconds(self, now: float) -> float:
        """Since its last progress, as far as it could have made any."""
        return 0.0 if self.seen is None else max(0.0, now - self.seen.since - self.lost_s)

    def is_overdue(self, now: float) -> bool:
        """Whether it has taken longer than it may."""
        if self.seen is None or self.seen.section == "left" or now < self.excused_until:
            return False
        return self.seconds(now) > self.seen.timeout

    def is_watched(self) -> bool:
        """Whether it takes part in the fit still."""
        return (self.seen is None or self.seen.section != "left") and is_running(self.about)


class _Storage:
    """Calls that touch shared storage, each with a deadline: if that hangs, the watchdog must not."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[Any] | None = None

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns.

        Raises:
            OSError: If it raises that, or takes too long, or the call before it has not come back yet.
        """
        if self._last is not None and not self._last.done():
            raise TimeoutError("the storage does not answer")
        future = self._last = self._thread.submit(function)
        try:
            result: T = future.result(_STORAGE_WITHIN_S)
            return result
        except FutureTimeout:
            raise TimeoutError(f"the storage has not answered for {_STORAGE_WITHIN_S:g} s") from None


class Watchdog:
    """One node's watchdog.

    Args:
        directory: The node's folder, in which the ranks register.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: dict[int, Rank] = {}
        self._looked_for_case = 0.0
        self._storage = _Storage()

    def run(self) -> None:
        """Watches until no rank is left."""
        write_json(self.directory / _RECORD, describe_process())
        remove_abandoned(self.directory)
        started = last = time.monotonic()
        while True:
            now = time.monotonic()
            pause = now - last - POLL_S
            last = now
            self._find_ranks()
            for rank in self.ranks.values():
                rank.look(pause if pause > _FROZEN_AFTER_S else 0.0)
            if not any(rank.is_watched() for rank in self.ranks.values()) and (
                self.ranks or now - started > _FIRST_RANK_WITHIN_S
            ):
                break
            overdue = [rank for rank in self.ranks.values() if rank.is_overdue(now) and rank.is_watched()]
            if overdue or self._is_case_open(now):
                self._handle(overdue)
                last = time.monotonic()
            time.sleep(POLL_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _find_ranks(self) -> None:
        for path in self.directory.glob("rank-*.json"):
            about = read_json(path)
            if about is not None and about["rank"] not in self.ranks:
                with suppress(OSError):
                    progress = open(path.with_suffix(".progress"), "rb", buffering=0)
                    self.ranks[about["rank"]] = Rank(about, path.with_suffix(""), progress)

    @property
    def _about(self) -> dict[str, Any]:
        return next(iter(self.ranks.values())).about

    # -- the case: one folder for the diagnosis of all nodes -----------------------------------------------------------

    def _marker(self) -> Path:
        return Path(self._about["run_dir"]) / "diagnostics" / f".{self._about['token']}.json"

    def _is_case_open(self, now: float) -> bool:
        """Whether another node has noticed a hang before this one."""
        if not self.ranks or self._about["nodes"] == 1 or now - self._looked_for_case < _LOOK_FOR_CASE_EVERY_S:
            return False
        self._looked_for_case = now
        try:
            case = self._storage.call(lambda: read_json(self._marker()))
        except OSError:
            return False
        return case is not None and not case.get("closed")

    def _open_case(self) -> Path:
        """The folder for this hang; whoever notices it first names it."""
        marker = self._marker()
        marker.parent.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%Y-%m-%dT%H-%M-%S")
        case = read_json(marker)
        if case is not None and case.get("closed"):
            marker.unlink(missing_ok=True)
        draft = marker.with_name(f"{marker.name}.{platform.node()}.{os.getpid()}")
        write_json(draft, {"folder": f"{name}-{self._about['token'][:6]}"})
        try:
            os.link(draft, marker)  # unlike a rename this never replaces
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        case = read_json(marker)
        folder = marker.parent / str(case["folder"] if case else name)
        folder.mkdir(exist_ok=True)
        return folder

    def _handle(self, overdue: list[Rank]) -> None:
        noticed = time.time()
        if overdue:
            worst = max(overdue, key=lambda rank: rank.seconds(time.monotonic()))
            assert worst.seen is not None
            others = f" and {len(overdue) - 1} more" if len(overdue) > 1 else ""
            say(
                f"No progress of rank {worst.rank}{others} for {worst.seconds(time.monotonic()):.1f} s at step "
                f"{worst.seen.step} (section {worst.seen.section}, limit {worst.seen.timeout:g} s); looking at all "
                "ranks."
            )
        folder = None
        try:
            folder = self._storage.call(self._open_case)
        except OSError as error:  # the storage may be what hangs, or be full; the verdict does not need it
            say(f"The diagnosis cannot be written to {self._marker().parent}: {error}")
        evidence = self._gather()
        if overdue and not any(self._still_overdue(rank) for rank in overdue):
            say("It has advanced meanwhile: slow, not hung. If that is usual here, give the section more time.")
            self._excuse(folder)
            return
        if folder is not None:
            self._write_evidence(folder, evidence)
        verdict = self._verdict(folder, evidence, noticed)
        if verdict is None or not verdict.is_hang:
            self._excuse(folder)
        else:
            self._end_ranks()

    def _excuse(self, folder: Path | None) -> None:
        """Gives every rank its time once more, and tells the other nodes and NVRx's monitors so."""
        for rank in self.ranks.values():
            rank.excused_until = time.monotonic() + (rank.seen.timeout if rank.seen is not None else 0.0)
            with suppress(OSError):
                rank.path.with_suffix(".excused").touch()
        if folder is not None:
            name = folder.name
            with suppress(OSError):
                self._storage.call(lambda: write_json(self._marker(), {"folder": name, "closed": True}))

    def _still_overdue(self, rank: Rank) -> bool:
        before = rank.ticks
        rank.look(0.0)
        return rank.ticks == before

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _gather(self) -> list[RankEvidence]:
        ranks, now = list(self.ranks.values()), time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
            return list(pool.map(lambda rank: examine(rank.about, rank.path, rank.seen, rank.seconds(now)), ranks))

    def _write_evidence(self, folder: Path, evidence: list[RankEvidence]) -> None:
        def write() -> None:
            for each in evidence:
                name = f"rank-{each.rank:05d}"
                stacks = self.ranks[each.rank].path.with_suffix(".stacks")
                if stacks.exists():
                    shutil.copyfile(stacks, folder / f"{name}.stacks.txt")
                if each.collectives is not None:
                    _write(folder / f"{name}.collectives.json", each.collectives)
                _write(folder / f"{name}.json", _shortened(each).to_json())  # last: it says that the others are there

        try:
            self._storage.call(write)
        except OSError as error:
            say(f"The evidence cannot be written to {folder}: {error}")

    def _verdict(self, folder: Path | None, evidence: list[RankEvidence], noticed: float) -> Verdict | None:
        """The verdict: this node's, if it is the one to give it. ``None`` if the node that gives it saw no hang."""
        world_size = int(self._about["world_size"])
        if folder is not None and len(evidence) < world_size:
            gives = any(each.rank == 0 for each in evidence)
            deadline = time.monotonic() + _OTHER_NODES_WITHIN_S * (1 if gives else 2)
            try:
                while time.monotonic() < deadline:
                    content, closed, ranks = self._storage.call(lambda: self._look_at(folder))
                    if content is not None:
                        return Verdict.from_json(content)
                    if closed:
                        return None
                    if gives and ranks == world_size:
                        break
                    time.sleep(0.05)
                evidence = self._storage.call(lambda: read_evidence(folder))
            except OSError as error:
                say(f"What other nodes have seen cannot be read from {folder}: {error}")
        verdict = diagnose(evidence, world_size)
        self._announce(verdict, folder, noticed)
        return verdict

    def _look_at(self, folder: Path) -> tuple[dict[str, Any] | None, bool, int]:
        """The verdict in ``folder``, whether the case is closed, and how many ranks' evidence there is."""
        closed = bool((read_json(self._marker()) or {}).get("closed"))
        return read_json(folder / _VERDICT), closed, len(_evidence_files(folder))

    def _announce(self, verdict: Verdict, folder: Path | None, noticed: float) -> None:
        where = "" if folder is None else f" Diagnosis: {folder}"
        say(f"{'Hang: ' if verdict.is_hang else 'No hang: '}{verdict.line}.{where}")
        about = self._about
        culprit = verdict.culprits[0] if verdict.culprits else None

        def write() -> None:
            if folder is not None:
                write_json(folder / _VERDICT, verdict.to_json())
            if verdict.is_hang:
                Ledger(RunDirectory(about["run_dir"]).ledger, culprit.rank if culprit else None).record(
                    "fault",
                    kind="hang",
                    fit=about["fit"],
                    step=culprit.step if culprit else None,
                    reason=verdict.line,
                    noticed=noticed,
                    diagnostics=None if folder is None else str(folder),
                    elastic_run_id=about["elastic_run_id"],
                    restart_count=about["restart_count"],
                )

        try:
            self._storage.call(write)
        except OSError as error:
            say(f"The verdict cannot be written to {about['run_dir']}: {error}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_ranks(self) -> None:
        """Ends every rank of this node: a job that has lost one is started again as a whole."""
        alive = [rank for rank in self.ranks.values() if is_running(rank.about)]
        for signums in ((EXIT_SIGNAL, signal.SIGCONT), (signal.SIGKILL,)):  # one that is stopped must wake up to end
            for rank in alive:
                for signum in signums:
                    if is_running(rank.about):
                        with suppress(ProcessLookupError):
                            os.kill(int(rank.about["pid"]), signum)
            _wait_until(lambda: not any(is_running(rank.about) for rank in alive), _EXIT_WITHIN_S)
        say(f"Ended {len(alive)} rank{'s' if len(alive) != 1 else ''} of {platform.node()} (exit code {EXIT_HUNG}).")


def read_evidence(folder: Path) -> list[RankEvidence]:
    """The evidence in a folder of ``diagnostics``, by rank; files that cannot be read are left out."""
    found = []
    for path in _evidence_files(folder):
        with suppress(KeyError, TypeError, ValueError, OSError):
            found.append(RankEvidence.from_json(json.loads(path.read_bytes())))
    return found


def _evidence_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.json") if re.fullmatch(r"rank-\d+\.json", path.name))


def _write(path: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    publish(path, lambda file: file.write(data))


def _shortened(evidence: RankEvidence) -> RankEvidence:
    """With the newest collectives only: one node reads what all have written."""
    entries = (evidence.collectives or {}).get("entries")
    if not isinstance(entries, list):
        return evidence
    return replace(evidence, collectives={**(evidence.collectives or {}), "entries": entries[-_COLLECTIVES_KEPT:]})


def _wait_until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def say(line: str) -> None:
    """One readable line."""
    print(f"[lightning-resilience] {line}", file=sys.stderr, flush=True)


def start(directory: Path) -> None:
    """Starts the watchdog of a node, which then belongs to nobody: it must outlive whichever rank has started it."""
    command = [sys.executable, "-m", "lightning_resilience.detect.watchdog", os.fspath(directory)]
    subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=True, timeout=_START_WITHIN_S)


def is_alive(directory: Path) -> bool:
    """Whether the watchdog of a node runs."""
    record = read_json(directory / _RECORD)
    return record is not None and is_running(record)


def main() -> None:
    """The watchdog's own program: leaves its parent and watches the folder that the command line names."""
    if os.fork() != 0:
        os._exit(0)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # it watches for as long as the ranks take to stop
    Watchdog(Path(sys.argv[1])).run()
    os._exit(0)  # without waiting for a call to storage that does not come back


if __name__ == "__main__":
    main()
