"""Saves to a directory that all ranks write together, each its own shards, without a collective during the writing.

PyTorch's distributed checkpoint (DCP) plans what each rank writes. That is a collective at a boundary, repeated only
when the layout of the state has changed. Then any thread writes the rank's shards, from a copy or from the live state,
into a directory under a temporary name, and reports to rank 0 over the store of the job. If all ranks have written
their shards, rank 0 describes, seals and renames the directory, and sends the outcome to the other ranks. If a rank
dies, the directory stays unfinished, and no rank waits for it longer than the fit lasts.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from lightning_resilience._files import make_directory
from lightning_resilience._torch import local
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint import checkpoint_file, dcp
from lightning_resilience.checkpoint.safe_serialization import map_nested
from lightning_resilience.checkpoint.store_messages import StoreMessages
from lightning_resilience.run.run_directory import StaleAttempt

_PATIENCE_S = 3600.0
"""How long a rank waits for the other ranks while the fit has not failed."""


@dataclass(frozen=True)
class Save:
    """One save of all ranks.

    Args:
        path: The final directory.
        written: The temporary directory into which it is written, in the same folder.
        metadata: Metadata for its stamp.
    """

    path: Path
    written: Path
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """The state to save, as DCP sees it.

    Args:
        planner: Holds the state, by name.
        layout: The properties of the state on which the plan depends.
        is_new: Whether the layout differs from that of the previous save.
    """

    planner: DefaultSavePlanner
    layout: list[Any]
    is_new: bool


@dataclass(frozen=True)
class Outcome:
    """How a save has ended; the same on all ranks that can still reach rank 0.

    Args:
        how: ``published``; ``invalidated``: a rank's copy was not valid, and another save may succeed; ``failed``; or
            ``stale``: another attempt owns the run.
        reason: Why it was not published.
    """

    how: Literal["published", "invalidated", "failed", "stale"]
    reason: str = ""


OF_OTHERS = Outcome("invalidated", "the ranks of this run have changed")
"""Outcome that is not reported to the user: the fit ends, or is entered again."""


@dataclass(frozen=True)
class _Report:
    outcome: Outcome
    results: list[Any]
    digests: dict[str, dict[str, Any]]


@dataclass
class ShardedSaves:
    """The saves of one fit, on one rank.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        messages: Messages between the ranks.
        gather: Returns the objects of all ranks by rank; a collective.
        check_owner: Raises if another attempt owns the run.
    """

    rank: int
    world_size: int
    messages: StoreMessages
    gather: Callable[[Any], list[Any]]
    check_owner: Callable[[], None]
    _layout: list[Any] = field(default_factory=list, init=False)
    _plan: SavePlan = field(default_factory=lambda: SavePlan([]), init=False)
    _metadata: Metadata = field(default_factory=lambda: Metadata({}), init=False)
    _number: int = field(default=0, init=False)

    def draft(self, state: dict[str, Any]) -> Draft:
        """Prepares the plan for a state to save. Nothing is copied.

        Args:
            state: Nested dicts and lists of DTensors, tensors and plain values, as DCP takes it.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self.rank == 0)
        layout = [_layout(name, value) for name, value in planner.state_dict.items()]
        return Draft(planner, layout, layout != self._layout)

    def part(self, draft: Draft, plan: bool) -> dict[str, Any]:
        """The values that this rank writes, by name. Nothing is copied.

        Args:
            draft: The draft of this rank.
            plan: Whether the draft of any rank is new; then this is a collective.
        """
        planner = draft.planner
        if plan:
            plans, metadata = planner.create_global_plan(self.gather(planner.create_local_plan()))
            own = FileSystemWriter("").prepare_global_plan(plans)[self.rank]
            self._plan, self._layout = planner.finish_plan(own), draft.layout
            if self.rank == 0:
                self._metadata = metadata
        names = {item.index.fqn for item in self._plan.items}
        return {name: _own(value) for name, value in planner.state_dict.items() if name in names}

    def write(
        self, save: Save, part: dict[str, Any] | None, rest: Any, missed: str | None = None, read_back: bool = False
    ) -> Outcome:
        """Writes this rank's part and waits until the save has ended on all ranks; in any thread, no collective.

        Args:
            save: The save, the same on all ranks, which call this for one save after the other.
            part: From :meth:`part`, or a copy of that. ``None`` if this rank has none.
            rest: The remaining state of the checkpoint, in types that a safe load reads; used on rank 0.
            missed: Why there is no part; ``None`` if its copy was not valid.
            read_back: Whether a safe load must read all non-tensor values before the checkpoint is published; used on
                rank 0.
        """
        number, self._number = self._number, self._number + 1
        try:
            mine = self._write_part(save, part, missed)
        except Exception as error:
            mine = _Report(Outcome("failed", f"rank {self.rank}: {type(error).__name__}: {error}"), [], {})
        try:
            if self.rank == 0:
                return self._finish(number, save, mine, rest, read_back)
            return self._receive_outcome(number, mine)
        except RuntimeError as error:  # the store is gone, since rank 0 or its launcher has ended
            return Outcome("failed", f"rank {self.rank} could not reach the other ranks: {error}")

    def _write_part(self, save: Save, part: dict[str, Any] | None, missed: str | None) -> _Report:
        if part is None:
            outcome = Outcome("invalidated") if missed is None else Outcome("failed", f"rank {self.rank}: {missed}")
            return _Report(outcome, [], {})
        make_directory(save.written)
        copies_ahead = 0 if all(each.is_cpu for each in part.values() if isinstance(each, torch.Tensor)) else 10_000_000
        writer = FileSystemWriter(save.written, sync_files=True, per_thread_copy_ahead=copies_ahead)
        writer.set_up_storage_writer(self.rank == 0)
        results = writer.write_data(self._plan, _Values(part)).value()
        names = {str(each.storage_data.relative_path) for each in results}
        return _Report(
            Outcome("published"),
            results,
            {name: checkpoint_file.hash_file(save.written / name) for name in sorted(names)},
        )

    def _finish(self, number: int, save: Save, mine: _Report, rest: Any, read_back: bool) -> Outcome:
        """Rank 0: receives the reports of all ranks, publishes if all have written, and sends the outcome to all."""
        keys = [f"{number}/{rank}" for rank in range(1, self.world_size)]
        try:
            others = self.messages.receive(keys, _PATIENCE_S, delete=True).wait()
        except TimeoutError:
            outcome = Outcome("failed", "not all ranks have reported that they wrote their shards")
        else:
            reports = [mine, *map(pickle.loads, others)]  # from ranks of this job
            outcome = self._publish(save, reports, rest, read_back)
        if outcome.how != "published":
            shutil.rmtree(save.written, ignore_errors=True)
        if keys:
            self.messages.send(f"{number}/outcome", pickle.dumps(outcome))
            self.messages.delete(f"{number - 1}/outcome")  # all ranks have reported after it, so they have received it
        return outcome

    def _publish(self, save: Save, reports: list[_Report], rest: Any, read_back: bool) -> Outcome:
        bad = [each.outcome for each in reports if each.outcome.how != "published"]
        if bad:
            return min(bad, key=lambda each: each.how)  # failed before invalidated
        try:
            writer = _Describer(save)
            writer.finish(replace(self._metadata), [each.results for each in reports])
            torch.save(rest, save.written / dcp.REST)
            if read_back:
                dcp.check(save.written, lambda name: True)
            known = {name: digest for each in reports for name, digest in each.digests.items()}
            checkpoint_file.publish_directory(save.written, save.path, save.metadata, self.check_owner, known)
        except StaleAttempt as error:
            return Outcome("stale", str(error))
        except PeerLost:
            return OF_OTHERS
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {error}")
        return Outcome("published")

    def _receive_outcome(self, number: int, mine: _Report) -> Outcome:
        self.messages.send(f"{number}/{self.rank}", pickle.dumps(mine))
        try:
            (received,) = self.messages.receive([f"{number}/outcome"], _PATIENCE_S).wait()
        except TimeoutError:
            return Outcome("failed", "rank 0 has not reported the outcome")
        outcome: Outcome = pickle.loads(received)
        return outcome


def _own(value: Any) -> Any:
    return local(value.detach()) if isinstance(value, torch.Tensor) else value


def _layout(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return name, None
    return name, type(value), value.shape, value.dtype, getattr(value, "placements", None)


def without_numpy_numbers(value: Any) -> Any:
    """``value`` with NumPy numbers replaced by equal Python numbers; a schedule may set NumPy learning rates."""
    return map_nested(value, lambda item: item.item() if isinstance(item, np.generic) else item)


class _Values(DefaultSavePlanner):
    """Gives the writer the values of a part, which may be copies of the state."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index.fqn]


class _Describer(FileSystemWriter):
    """Writes the description of a directory, with the directory's final name."""

    def __init__(self, save: Save) -> None:
        super().__init__(save.written)
        self._path = save.path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._path), save_id=self.save_id)
