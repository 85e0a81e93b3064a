"""Reads the records of torch's Flight Recorder on a rank, in one form for gloo and for NCCL.

Each backend has its own recorder, and :func:`merge` makes one dump of their dumps. The format is the JSON form of
``torch/csrc/distributed/c10d/FlightRecorder.hpp``; its versions 2.7 to 2.10 (torch 2.13) differ only in keys that this
module does not read. The backends differ as follows:

- gloo's entries stay ``scheduled``; only ``retired`` shows that an operation is done. gloo records neither
  point-to-point operations nor the members of a group.
- NCCL's entries become ``completed``; an entry that is ``retired`` but not completed has timed out. They become
  ``started`` only with ``TORCH_NCCL_ENABLE_TIMING=1``; without it nothing is known of the device before an operation is
  done.
- NCCL records each operation of a coalesced call separately, and never changes the state of these entries. One more
  entry with the same number follows them and stands for all of them.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["done", "running", "queued"]

_PEERS = re.compile(r"^(?P<op>send|recv) (?P<me>[0-9]+)(?:->|<-)(?P<peer>[0-9]+)$")


@dataclass(frozen=True)
class Collective:
    """One recorded operation of a process group.

    Args:
        backend: ``gloo`` or ``nccl``; one group may have both, and each backend counts its operations separately.
        group: The name of the group.
        description: The purpose of the group, if that was given; ``default_pg`` is the group of all ranks.
        sequence: Its number within the group and backend; point-to-point operations are counted separately.
        op: Such as ``all_reduce``.
        sizes: Shapes of its inputs, or of its outputs if it has no inputs.
        dtypes: Types of the same inputs or outputs.
        is_p2p: Whether it is a point-to-point operation.
        state: ``done``; ``queued``: known not to have begun on its device; ``running``: has begun, or the start is not
            recorded.
        members: The global ranks of the group; ``None``: unknown.
        peers: For a point-to-point operation, the ranks it needs; global ranks if the members of the group are known.
    """

    backend: str
    group: str
    description: str
    sequence: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_p2p: bool
    state: State
    members: tuple[int, ...] | None
    peers: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """How many elements the operation moves."""
        return sum(math.prod(shape) for shape in self.sizes)

    @property
    def group_name(self) -> str:
        """The readable name of the group."""
        if self.description == "default_pg":
            return self.description
        description = f" ({self.description})" if self.description not in ("", "undefined") else ""
        return f"group '{self.group}'{description}"

    @property
    def name(self) -> str:
        """The readable name of the operation: ``all_reduce #57 of default_pg``."""
        return f"{self.op} #{self.sequence} of {self.group_name}"


def merge(dumps: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merges the dumps of all recorders of a rank into one; ``None`` if nothing was recorded.

    The recorder of an unused backend answers as well, with a dump that has no entries.

    Args:
        dumps: The parsed answers of the worker server's handlers; ``None``: no answer.
    """
    merged: dict[str, Any] = {}
    config: dict[str, Any] = {}
    entries: list[Any] = []
    for dump in dumps:
        if dump is None or not isinstance(recorded := dump.get("entries"), list) or not recorded:
            continue
        merged |= dump
        entries += recorded
        # gloo's dump records no members, and names no groups.
        config |= dump["pg_config"] if isinstance(dump.get("pg_config"), dict) else {}
    return {**merged, "pg_config": config, "entries": entries} if entries else None


def shorten(dump: dict[str, Any], count: int) -> dict[str, Any]:
    """Shortens a dump to the newest entries of each backend and the newest entry of each group.

    The newest entry of a group shows how far the rank has come in that group.

    Args:
        dump: One dump, or several merged ones.
        count: How many entries of each backend to keep.
    """
    entries = dump.get("entries")
    if not isinstance(entries, list):
        return dump
    kept: list[Any] = []
    seen: Counter[str] = Counter()
    groups: set[str] = set()
    for entry in reversed(entries):
        about = entry if isinstance(entry, dict) else {}
        backend = str(about.get("profiling_name")).partition(":")[0]
        group = f"{backend} {about.get('process_group')} {about.get('is_p2p')}"
        seen[backend] += 1
        if seen[backend] <= count or group not in groups:
            kept.append(entry)
        groups.add(group)
    return {**dump, "entries": kept[::-1]}


def collectives(dump: dict[str, Any] | None) -> list[Collective]:
    """The operations in a dump of the Flight Recorder, for each backend from the oldest to the newest.

    Args:
        dump: One dump, or several merged ones. Entries that are not as expected are left out.
    """
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(dump, dict) or not isinstance(entries, list):
        return []
    members = _members(dump.get("pg_config"))
    timed = {  # the backends that record when operations start
        str(entry.get("profiling_name")).partition(":")[0]
        for entry in entries
        if isinstance(entry, dict) and entry.get("time_discovered_started_ns")
    }
    found: list[Collective] = []
    for entry in entries:
        try:
            collective = _collective(entry, members, timed)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        if collective.op.endswith("coalesced"):
            collective = _absorb(collective, found)
        found.append(collective)
    return found


def _collective(entry: dict[str, Any], members: dict[str, tuple[int, ...]], timed: set[str]) -> Collective:
    group, description = entry["process_group"]
    backend, _, op = entry["profiling_name"].rpartition(":")
    is_p2p = bool(entry.get("is_p2p"))
    in_group = members.get(group)
    peers: tuple[int, ...] = ()
    if (found := _PEERS.match(op)) is not None:
        peer = int(found["peer"])
        op, peers = found["op"], (in_group[peer] if in_group and peer < len(in_group) else peer,)
    inputs = entry.get("input_sizes") or []
    kind = "input" if inputs else "output"
    return Collective(
        backend=backend,
        group=str(group),
        description=str(description),
        sequence=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=op,
        sizes=tuple(tuple(map(int, shape)) for shape in inputs or entry.get("output_sizes") or []),
        dtypes=tuple(map(str, entry.get(f"{kind}_dtypes") or [])),
        is_p2p=is_p2p,
        state=_state(backend, entry, backend in timed),
        members=in_group,
        peers=peers,
    )


def _state(backend: str, entry: dict[str, Any], has_starts: bool) -> State:
    state = entry.get("state")
    if state == "completed" or (backend == "gloo" and entry.get("retired") is True):
        return "done"
    return "queued" if state == "scheduled" and has_starts else "running"


def _absorb(coalesced: Collective, found: list[Collective]) -> Collective:
    """Removes the operations for which an entry stands from ``found``, and adds their peers to the entry."""
    peers: list[int] = []
    while found and _key(found[-1]) == _key(coalesced):
        peers[:0] = found.pop().peers
    return replace(coalesced, peers=tuple(dict.fromkeys(peers))) if peers else coalesced


def _key(collective: Collective) -> tuple[str, str, bool, int]:
    return collective.backend, collective.group, collective.is_p2p, collective.sequence


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """The global ranks of every group for which they are recorded, by the name of the group."""
    members = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        try:
            ranks = group["ranks"]
            ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
            if ranks:
                members[str(name)] = tuple(int(rank) for rank in ranks)
        except (KeyError, TypeError, ValueError):
            continue
    return members
