"""Removes the folder that a killed watchdog has left in node memory, and records the time accounts of its ranks."""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_resilience._files import matching, read_json
from lightning_resilience._processes import is_running, pid_namespace
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.run.events import TimeSpent
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import RunDirectory
from lightning_resilience.run.time_account import Spent, forget, read_account, time_spent

BEAT = "watchdog.beat"
BEATS = struct.Struct("<d")  # seconds of ``time.monotonic()``, which all processes of a node share


def read_beat(directory: Path) -> float:
    """When the watchdog of a folder last showed that it works, in seconds of ``time.monotonic()``.

    Raises:
        OSError: If the time cannot be read.
    """
    try:
        beat: float = BEATS.unpack((directory / BEAT).read_bytes())[0]
    except struct.error as error:
        raise OSError(f"{directory / BEAT} holds no time") from error
    return beat


def spent_by(about: Mapping[str, Any], accounts: Mapping[int, Spent], ended: Mapping[int, float]) -> TimeSpent:
    """What the ranks of a folder have spent their time on, as an event.

    Args:
        about: The registration of any of these ranks.
        accounts: The time accounts, by rank.
        ended: When the ranks' processes were seen to have ended; see :func:`.time_account.time_spent`.
    """
    event = time_spent(accounts, ended)
    event.attempt, event.world_size = about["token"], about["world_size"]
    for name in ("fit", "elastic_run_id", "restart_count"):
        setattr(event, name, about[name])
    return event


def kept_name(directory: Path, node: str) -> str:
    """The name under which the accounts of a folder's ranks are kept while the ranks run.

    Args:
        directory: The folder.
        node: The name of the folder's host.
    """
    return f"{directory.name}-{node}"


def remove_abandoned(own: Path | None = None, run_dir: Path | None = None) -> None:
    """Records what the ranks of killed jobs have spent their time on, then removes the folders of these jobs.

    Args:
        own: The folder of the caller, which stays.
        run_dir: Only folders of this run; default: of all runs.
    """
    for directory in (each for parent in own_directories() for each in abandoned(parent)):
        registrations = [read_json(path) or {} for path in matching(directory, "rank-*.json")]
        run_dirs = {str(each.get("run_dir")) for each in registrations}
        if directory == own or run_dirs - ({str(run_dir)} if run_dir else run_dirs):
            continue
        record_account(directory)
        shutil.rmtree(directory, ignore_errors=True)


def record_account(directory: Path) -> None:
    """Records what the ranks of an abandoned folder have spent their time on, if that is known and their run exists.

    Args:
        directory: The folder.
    """
    registrations = [read_json(path) or {} for path in matching(directory, "rank-*.json")]
    with suppress(OSError, TypeError, ValueError, KeyError):  # the run was removed, or another version wrote the folder
        if registrations:
            _record(directory, registrations)


def abandoned(parent: Path) -> list[Path]:
    """The folders of killed jobs: folders of :func:`.rank_probe.node_directory` whose ranks and watchdog have ended.

    Args:
        parent: The folder of this user that contains them.
    """
    here = pid_namespace()
    found = []
    for folder in matching(parent, "*"):
        records = [read_json(path) or {} for path in matching(folder, "*.json")]
        # Nothing is known here of a process that runs in another container.
        if records and all(each.get("namespace") == here and not is_running(each) for each in records):
            found.append(folder)
    return found


def _record(directory: Path, registrations: list[dict[str, Any]]) -> None:
    accounts = {}
    for registration in registrations:
        with open(directory / f"rank-{registration['rank']:05d}.time", "rb", buffering=0) as file:
            spent = read_account(file)
        if spent is not None and spent.since <= time.monotonic():  # a later time: the node has rebooted since
            accounts[int(registration["rank"])] = spent
    run, about = RunDirectory(registrations[0]["run_dir"]), registrations[0]
    if not accounts:
        return
    run_began = (run.path / "run.json").stat().st_mtime  # raises where no run exists: then nothing is written
    beat = read_beat(directory)  # the ranks were killed together with the watchdog
    event = spent_by(about, accounts, {rank: max(beat, spent.since) for rank, spent in accounts.items()})
    if max(event.ended or ()) < run_began:
        return  # the run was removed, and another run has begun in the same directory
    Ledger(run.ledger, None).record(event)
    forget(run.path, kept_name(directory, about["node"]))
