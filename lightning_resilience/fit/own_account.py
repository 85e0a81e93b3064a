"""A rank's own account of its time, where no watchdog reads it: kept in node memory, in case the rank is killed.

A rank that leaves its fit records its account itself. If a rank was killed, the next start of the run on the node
finds its account, unless the node was rebooted, and records it. The account then ends with the last step that had
begun. With steps of less than a tenth of a second, it ends at most that long before the end of the rank.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from lightning_resilience._files import matching, read_json, write_json
from lightning_resilience._processes import describe_process, is_on_this_system, is_running
from lightning_resilience.detect.hangs.rank_probe import node_folder, own_directories
from lightning_resilience.fit.context import FitContext
from lightning_resilience.run import time_account
from lightning_resilience.run.time_account import read_account

_FOLDER = "accounts"
_OF_FIT = ("fit", "attempt", "world_size", "elastic_run_id", "restart_count")
_MONTH_S = 30 * 86400.0


class OwnAccount:
    """The account of this process, which the process records itself.

    Args:
        fit: The fit.
    """

    def __init__(self, fit: FitContext) -> None:
        self._fit = fit
        self._path: Path | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the account is in node memory."""
        return self._path is not None

    def keep(self) -> None:
        """Continues the account in node memory. Without node memory, the account of a rank that is killed is lost."""
        fit = self._fit
        if sys.platform == "linux":
            with suppress(OSError):
                path = node_folder(_FOLDER) / f"{fit.token}-{fit.rank:05d}.about"
                try:
                    fit.time.share(path.with_suffix(".time"))
                    own = fit.time_spent({})
                    about = {name: getattr(own, name) for name in _OF_FIT}
                    write_json(path, {**about, **describe_process(), "run": fit.run_id, "rank": fit.rank})
                except OSError:  # node memory is full
                    fit.time.unshare()
                    _remove(path)
                    raise
                self._path = path

    def record(self) -> None:
        """Records how the process has spent its time until now."""
        self._fit.ledger.record(self._fit.time_spent({self._fit.rank: self._fit.time.close()}))
        if self._path is not None:
            _remove(self._path)


def record_killed(fit: FitContext) -> None:
    """Records the accounts of ranks of earlier starts of the run that were killed on this node.

    Accounts of other runs are removed after a month.

    Args:
        fit: The fit that begins; one rank of each node calls this.
    """
    for own in own_directories():
        for path in matching(own / _FOLDER, "*.about"):
            about = read_json(path)
            if about is None or not is_on_this_system(about) or is_running(about):
                continue
            with suppress(OSError, KeyError, TypeError, ValueError):  # perhaps written by another version
                if about.get("run") == fit.run_id:
                    with open(path.with_suffix(".time"), "rb", buffering=0) as file:
                        spent = read_account(file)
                    if spent is not None:
                        rank = int(about["rank"])
                        event = time_account.time_spent({rank: spent}, {rank: spent.since})
                        for name in _OF_FIT:
                            setattr(event, name, about[name])
                        event.killed = True
                        fit.ledger.record(event)
                    _remove(path)
                elif time.time() - path.stat().st_mtime > _MONTH_S:
                    _remove(path)


def _remove(path: Path) -> None:
    for each in (path, path.with_suffix(".time")):
        each.unlink(missing_ok=True)
