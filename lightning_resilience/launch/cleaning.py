"""``lightning-resilience clean``: lists and removes files that runs have left behind and nobody needs.

A run that is in use is not touched. A run is in use if a scheduler has it in its queue, if one of its launches,
trainers or ranks is alive on any node, or if its attempt token has changed since it was read.

A launch may begin at any moment, and is not held up. So that it loses nothing, only files are removed that a launch
neither reads nor writes. Right before, this is checked again, and only the very files that were listed are removed:
same inode, size and times. The ledger, the checkpoints and the records of launches stay. So do links, and everything
that contains a file of another user.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from lightning_resilience._files import is_abandoned, is_temporary, load_json, matching, read_json
from lightning_resilience._formatting import format_bytes
from lightning_resilience._output import log_line
from lightning_resilience.checkpoint.local_folders import Origin, base_folder, memory_bases, read_origin, remove_empty
from lightning_resilience.detect.hangs.abandoned import abandoned, record_account
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.launch.json_output import to_json
from lightning_resilience.launch.listing import runs_below
from lightning_resilience.launch.rank_logs import attempts, folder_of
from lightning_resilience.launch.record import FIRST, Record, records
from lightning_resilience.launch.status import kept_lately, standing
from lightning_resilience.launch.temporary import abandoned_folders
from lightning_resilience.run.deadlines import BEAT_INTERVAL_S, DEAD_AFTER_BEATS
from lightning_resilience.run.events import TimeSpent, parse
from lightning_resilience.run.history import History
from lightning_resilience.run.ledger import read_ledger
from lightning_resilience.run.run_directory import LAUNCHED, FitDirectory, RunDirectory

_LOCAL = "local checkpoints"
_QUARANTINE = "quarantine"
_OF_WATCHDOG = "files of a watchdog"

_Seen = tuple[int, ...]  # identifies a file, and shows that it has not changed


@dataclass(frozen=True)
class Leftover:
    """Files and folders that can be removed together.

    Attributes:
        kind: What they are, in a word or two.
        path: Where they are.
        why: Why it is safe to remove them.
        files: The files, with their state when they were listed.
        folders: The folders, the deepest first.
        in_use: Returns why they must stay after all; ``None``: they can be removed.
    """

    kind: str
    path: Path
    why: str
    files: dict[Path, _Seen]
    folders: list[Path]
    in_use: Callable[[], str | None]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(seen[2] for seen in self.files.values())


@dataclass
class Found:
    """What a search has found.

    Attributes:
        leftovers: What can be removed.
        kept: What looks as if it could be removed, and why it stays.
        searched: For each folder in which moved runs were looked for, the runs below it by their names. Must be cleared
            when these may have changed. A search may take seconds.
    """

    leftovers: list[Leftover] = field(default_factory=list)
    kept: list[tuple[Path, str]] = field(default_factory=list)
    searched: dict[Path, dict[str | None, Path]] = field(default_factory=dict)

    def add(self, kind: str, path: Path, why: str, in_use: Callable[[], str | None], parts: Collection[Path]) -> None:
        """Adds a leftover, if it belongs to this user alone.

        Args:
            kind: As :class:`Leftover`.
            path: As :class:`Leftover`.
            why: As :class:`Leftover`.
            in_use: As :class:`Leftover`.
            parts: The files and folders that belong to it.
        """
        files: dict[Path, _Seen] = {}
        folders: list[Path] = []
        if os.path.realpath(path.parent) != os.fspath(path.parent):
            self.kept.append((path, "a link leads there"))
            return
        for part in parts:
            if (problem := _walk(part, files, folders)) is not None:
                self.kept.append((path, problem))
                return
        if files or folders:
            self.leftovers.append(Leftover(kind, path, why, files, folders, in_use))

    def run_below(self, folder: Path, name: str) -> Path | None:
        """The run with this name below a folder, if one exists.

        Args:
            folder: The folder; it is searched once.
            name: The run's identity.
        """
        if folder not in self.searched:
            self.searched[folder] = {_name_of(path): path for path in reversed(runs_below(folder)[0])}
        return self.searched[folder].get(name)


def _seen(about: os.stat_result) -> _Seen:
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


def _walk(path: Path, files: dict[Path, _Seen], folders: list[Path]) -> str | None:
    """Adds a path and everything in it; returns why it must stay, if so."""
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode) or about.st_uid != os.getuid():
            return f"{path} is a link" if stat.S_ISLNK(about.st_mode) else f"{path} belongs to another user"
        if not stat.S_ISDIR(about.st_mode):
            files[path] = _seen(about)
            return None
        for name in sorted(os.listdir(path)):
            if (problem := _walk(path / name, files, folders)) is not None:
                return problem
        folders.append(path)
    except FileNotFoundError:
        pass  # gone meanwhile
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


def remove(leftover: Leftover) -> str | None:
    """Removes a leftover; returns why it stays, if so.

    Args:
        leftover: The leftover.
    """
    try:
        if (why := leftover.in_use()) is not None:
            return why
        if leftover.kind == _OF_WATCHDOG:
            record_account(leftover.path)
        for path, seen in leftover.files.items():
            with suppress(FileNotFoundError):
                if _seen(path.lstat()) == seen:
                    path.unlink()
        if leftover.in_use() is None:  # otherwise a launch that begins now still finds its folder
            for folder in leftover.folders:
                with suppress(OSError):  # it contains something that was not listed
                    folder.rmdir()
            if leftover.kind == _LOCAL:
                remove_empty(leftover.path.parent)
    except OSError as error:
        return str(error)
    return None


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A run directory.

    Attributes:
        directory: The run directory.
        name: The run's identity; ``None``: it has none.
        token: The token of the attempt that owned the run when it was read.
        why_ongoing: Why it was in use then, from ledger and scheduler; ``None``: it was not.
        recorded: Attempts and nodes whose time is in the ledger.
        still: The records of launches on other nodes that do not change: these launches are dead.
    """

    directory: RunDirectory
    name: str | None
    token: str | None
    why_ongoing: str | None
    recorded: set[tuple[str | None, str | None]]
    still: dict[Path, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _Run:
        directory = RunDirectory(os.path.realpath(path))
        token, history = directory.attempt, History(read_ledger(directory.ledger))
        how = standing(history.allocations[-1], directory.path) if history.allocations else None
        return cls(
            directory,
            _name_of(directory.path),
            token,
            how.text if how is not None and how.is_ongoing else None,
            {(event.attempt, event.node) for event in history.of(TimeSpent)},
        )

    @property
    def path(self) -> Path:
        return self.directory.path

    def records_elsewhere(self) -> list[Record]:
        """Records of launches for which this process cannot check whether they live."""
        return [each for each in records(self.path / "launches") if not each.is_here]

    def in_use(self) -> str | None:
        """Why the run must not be touched, as far as that can have changed since; ``None``: it is not in use."""
        if self.why_ongoing is not None:
            return self.why_ongoing
        if self.directory.attempt != self.token:
            return "another attempt has begun"
        for record in records(self.path / "launches"):
            if not record.is_dead and self.still.get(record.path) != record.content:
                return f"{record} may be running it"
        if (pid := self.directory.trained_by(None)) is not None:
            return f"process {pid} is training in it"
        trainer = read_json(self.path / "trainer.json")
        if trainer and trainer.get("job") != LAUNCHED and trainer.get("host") != os.uname().nodename:
            return (
                f"process {trainer.get('pid')} on host {trainer.get('host')} is training in it or was killed: run "
                "clean on that host"
            )
        if lately := kept_lately(self.path):
            return f"ranks on {', '.join(sorted({str(each.node) for each in lately}))} ran a moment ago"
        return None


def _name_of(run_dir: Path) -> str | None:
    name = (load_json(run_dir / "run.json") or {}).get("id")
    return name if isinstance(name, str) else None


def _watch(runs: Collection[_Run]) -> None:
    """Watches the records of launches on other nodes, for the time that a launch would before it takes a run over."""
    before = {record.path: record for run in runs if run.why_ongoing is None for record in run.records_elsewhere()}
    if not before:
        return
    wait_s = DEAD_AFTER_BEATS * BEAT_INTERVAL_S
    log_line(f"Watching the records of {len(before)} launches on other hosts for {wait_s:g} s.")
    time.sleep(wait_s)
    for run in runs:
        now = {record.path: record for record in run.records_elsewhere()}
        still = {path for path, record in now.items() if path in before and before[path].content == record.content}
        # Only the records of the first node and of spares move: the other launches end with the first one.
        if any(now[path].role == FIRST for path in still):
            run.still = {path: now[path].content for path in still}


def _of_run(run: _Run, found: Found) -> None:
    """Finds what a run has left in its run directory."""
    for fit in run.directory.fits:
        for folder in (fit.quarantine, fit.checkpoints / _QUARANTINE):
            _add_quarantine(folder, run.in_use, found)
    for path in matching(run.path / "time", "*.json"):
        event = parse(read_json(path) or {})
        if isinstance(event, TimeSpent) and (event.attempt, event.node) in run.recorded:
            found.add("time of ended ranks", path, "the ledger contains it", run.in_use, [path])
    for path in [folder_of(run.path, number) for number in attempts(run.path)[:-1]]:
        found.add("log files", path, "of an attempt followed by newer ones", run.in_use, [path])
    for parent, folders, files in os.walk(run.path):
        for path in [Path(parent, name) for name in (*folders, *files)]:
            if is_temporary(path) and not _is_written(path):
                in_use = _first_of(partial(_is_written, path), run.in_use)
                found.add("half-written", path, "the process that wrote it has ended", in_use, [path])


def _add_quarantine(folder: Path, in_use: Callable[[], str | None], found: Found) -> None:
    # The folder itself stays: it shows that something was quarantined.
    if folder.is_dir() and not folder.is_symlink():
        parts = [path for path in sorted(folder.iterdir()) if not is_temporary(path)]
        found.add(_QUARANTINE, folder, "failed verification or was marked bad: a resume never takes it", in_use, parts)


def _is_written(path: Path) -> str | None:
    """Why a temporary file must stay: it may become a finished one; ``None``: it will not."""
    with suppress(FileNotFoundError):
        return None if is_abandoned(path) else "it is being written"
    return None


def _first_of(*reasons: Callable[[], str | None]) -> Callable[[], str | None]:
    return lambda: next((why for reason in reasons if (why := reason()) is not None), None)


# -- this node ---------------------------------------------------------------------------------------------------------


def _of_node(runs: Collection[_Run], local_dir: Path | None, found: Found, with_others: bool) -> None:
    """Finds what was left on this node: by the runs, by runs that no longer exist, and by killed processes."""
    by_name = {run.name: run for run in runs if run.name is not None}
    folders = [folder for base in map(_resolved, memory_bases()) for folder in _own(base, "*/*")]
    if local_dir is not None:  # perhaps on storage that nodes share
        folders += _own(_resolved(base_folder(local_dir)), f"{escape(os.uname().nodename)}/*")
    for folder in folders:
        if with_others or folder.name in by_name:
            _of_run_folder(folder, by_name.get(folder.name), found)
    for own in map(_resolved, own_directories()):
        for folder in abandoned(own) if _is_own(own) else []:
            in_use = partial(_unless_in, folder, partial(abandoned, own))
            found.add(_OF_WATCHDOG, folder, "all its processes have ended", in_use, [folder])
    for folder in map(_resolved, abandoned_folders()):
        found.add("sockets", folder, "its launch has ended", partial(_unless_in, folder, abandoned_folders), [folder])


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        about = folder.lstat()
        return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return False


def _own(folder: Path, pattern: str) -> list[Path]:
    return matching(folder, pattern) if _is_own(folder) else []


def _unless_in(folder: Path, those: Callable[[], Iterable[Path]]) -> str | None:
    is_empty = folder.is_dir() and not os.listdir(folder)  # its files were removed
    return None if is_empty or folder in set(map(_resolved, those())) else "it is in use"


def _of_run_folder(folder: Path, run: _Run | None, found: Found) -> None:
    """Finds the local checkpoints of one run on this node."""
    origin = read_origin(folder)
    owner = folder if origin is None else origin.run_dir
    if run is not None and owner != run.path and _name_of(owner) == folder.name:
        found.kept.append((folder, f"it belongs to the run in {owner}; {run.path} is a copy of that run"))
        return
    if run is None:
        if origin is None:
            found.kept.append((folder, "its run is unknown: give its run directory"))
        elif (why := _why_not_gone(origin, folder.name, found)) is None:
            in_use = _first_of(partial(_why_not_gone, origin, folder.name, found), partial(_writer_in, folder))
            found.add(_LOCAL, folder, f"the run in {origin.run_dir} no longer exists", in_use, [folder])
        elif why:
            found.kept.append((folder, why))
        return
    for path in sorted(matching(folder, "fit-[0-9]*")):
        fit = FitDirectory(run.path / path.name)
        in_use = _first_of(run.in_use, partial(_writer_in, path))
        if _has_final(fit, path):
            why = f"{path.name} of {run.path} has finished, its final state is in the run directory"
            found.add(_LOCAL, path, why, in_use, [path])
        else:
            found.kept.append((path, f"{path.name} of {run.path} has not finished: a resume on this node may need it"))
            _add_quarantine(path / _QUARANTINE, in_use, found)


def _has_final(fit: FitDirectory, local: Path) -> bool:
    """Whether a fit has finished, has saved its final state, and has no local checkpoints of later steps."""
    outcome, finals = fit.outcome, matching(fit.checkpoints, "step-*-final.ckpt")
    if outcome is None or outcome.status != "finished" or not finals:
        return False
    newest = max(finals).name.removesuffix("-final.ckpt")  # step-000000000012; names of later steps sort after it
    return all(each.name[: len(newest)] <= newest for each in matching(local, "step-*"))


def _why_not_gone(origin: Origin, name: str, found: Found) -> str | None:
    """Why a run may still exist; "" if it exists in a folder that was not searched; ``None``: it is gone.

    Args:
        origin: Where its run directory was.
        name: Its identity.
        found: Has the results of earlier searches.
    """
    now, left = _name_of(origin.run_dir), origin.nearest_above
    if now == name:
        return ""
    if left is None or (now is None and os.path.lexists(origin.run_dir)):
        return f"its run directory {origin.run_dir} is not visible here"
    moved = found.run_below(left, name)
    return None if moved is None else f"its run has been moved to {moved}"


def _writer_in(folder: Path) -> str | None:
    """Why files in a folder must stay: a process in any container of this node has locked them; ``None``: none has."""
    for path in matching(folder, ".writer-*", "*/.writer-*"):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return "a process on this node writes there"
            finally:
                os.close(fd)
    return None


# -- the command -------------------------------------------------------------------------------------------------------


def find_leftovers(folder: str | os.PathLike[str], local_dir: Path | None = None) -> Found:
    """Finds what the runs below a folder, and runs that no longer exist, have left in run directories and on this node.

    Args:
        folder: The folder; or one run directory: then no local checkpoints of other runs are found.
        local_dir: The folder of local checkpoints that the runs were given, if any.
    """
    found, runs = Found(), []
    below = runs_below(Path(folder).absolute())[0]
    for path in below:
        try:
            runs.append(_Run.read(path))
        except Exception as error:  # damaged: nothing in it is touched
            found.kept.append((path, f"it cannot be read: {error}"))
    _watch(runs)
    for run in runs:
        if (why := run.in_use()) is not None:
            found.kept.append((run.path, why))
        else:
            _of_run(run, found)
    _of_node(runs, local_dir, found, with_others=below != [Path(folder).absolute()])
    return found


def clean(folder: str | os.PathLike[str], local_dir: Path | None, as_json: bool, agrees: Callable[[str], bool]) -> int:
    """Shows what can be removed, and removes it; returns the exit code: 1 if something could not be removed.

    Args:
        folder: As for :func:`find_leftovers`.
        local_dir: As for :func:`find_leftovers`.
        as_json: Whether to print JSON for programs, see :data:`.json_output.KEYS`.
        agrees: Asks the user a question; returns whether to remove the files.
    """
    found = find_leftovers(folder, local_dir)
    leftovers = found.leftovers
    size = format_bytes(sum(each.size for each in leftovers))
    if not as_json:
        print("\n".join(_text(found)))
    problems: list[str | None] = [None] * len(leftovers)
    does = bool(leftovers) and agrees(f"Remove these {len(leftovers)} ({size})?")
    if does:
        found.searched.clear()  # the user may have taken time to answer
        problems = [remove(each) for each in leftovers]
    if as_json:
        print(to_json(_content(found, problems, does)))
    elif does:
        freed = sum(each.size for each, why in zip(leftovers, problems, strict=True) if why is None)
        stay = [f"{each.path} stays: {why}" for each, why in zip(leftovers, problems, strict=True) if why is not None]
        print("\n".join([*stay, f"Removed {format_bytes(freed)}."]))
    elif leftovers:
        print("Nothing was removed.")
    return 1 if any(problems) else 0


def _content(found: Found, problems: list[str | None], has_removed: bool) -> dict[str, Any]:
    leftovers = [
        {
            "kind": each.kind,
            "path": str(each.path),
            "files": len(each.files),
            "size": each.size,
            "why": each.why,
            "removed": has_removed and problem is None,
            "problem": problem,
        }
        for each, problem in zip(found.leftovers, problems, strict=True)
    ]
    return {"leftovers": leftovers, "kept": [{"path": str(path), "why": why} for path, why in found.kept]}


def _text(found: Found) -> list[str]:
    lines = []
    for each in found.leftovers:
        lines += [f"{format_bytes(each.size):>10}  {each.kind}  {each.path}", f"{'':12}{each.why}"]
    if not lines:
        lines.append("There is nothing to remove.")
    alike: dict[str, list[Path]] = {}
    for path, why in found.kept:
        alike.setdefault(why, []).append(path)
    for why, paths in alike.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        lines += [f"{'kept':>10}  {paths[0]}{more}", f"{'':12}{why}"]
    return lines
