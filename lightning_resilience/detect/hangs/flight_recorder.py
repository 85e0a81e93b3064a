"""What torch's Flight Recorder has recorded on a rank, in one form for gloo and for NCCL.

Each backend has a recorder of its own, and :func:`merge` makes one dump of theirs. The format is that of
``torch/csrc/distributed/c10d/FlightRecorder.hpp``, as JSON; its versions 2.7 to 2.10 (torch 2.13) differ only in keys
that are not read here. Where the backends differ:

- gloo's entries stay ``scheduled``; only ``retired`` says that one is done. It records no point-to-point
  operation, and does not say who is in a group.
- NCCL's entries say ``completed``; one that is ``retired`` and not completed has timed out. They are ``started`` only
  with ``TORCH_NCCL_ENABLE_TIMING=1``; without it nothing is known of the device before an operation is done.
- NCCL records what is coalesced operation by operation, and none of those ever changes its state; an entry of its own,
  with the same number, follows them and stands for them all.

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
        backend: ``gloo`` or ``nccl``; one group may have both, and each counts on its own.
        group: The name of the group.
        description: What the group is for, if that was given; ``default_pg`` is that of all ranks.
        sequence: Its number within the group and backend; point-to-point operations have their own.
        op: Such as ``all_reduce``.
        sizes: Shapes of its inputs, or of its outputs if it has none.
        dtypes: Their types.
        is_p2p: Whether it is a point-to-point operation.
        state: ``queued``: known not to have begun on its device; ``running``: has begun, or that is not recorded.
        members: The global ranks of the group; ``None``: unknown.
        peers: For a point-to-point operation, whom it needs, as global ranks if the group's are known.
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
        """How many elements it moves."""
        return sum(math.prod(shape) for shape in self.sizes)

    @property
    def group_name(self) -> str:
        """Readable name of the group."""
        if self.description == "default_pg":
            return self.description
        description = f" ({self.description})" if self.description not in ("", "undefined") else ""
        return f"group '{self.group}'{description}"

    @property
    def name(self) -> str:
        """Readable name of the operation: ``all_reduce #57 of default_pg``."""
        return f"{self.op} #{self.sequence} of {self.group_name}"


def merge(dumps: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One dump of those of all recorders of a rank; ``None`` if nothing was recorded.

    A recorder without a backend that writes into it answers as well, with a dump that has no entries.

    Args:
        dumps: What the handlers of the worker server gave, parsed; ``None``: nothing.
    """
    merged: dict[str, Any] = {}
    config: dict[str, Any] = {}
    entries: list[Any] = []
    for dump in dumps:
        if dump is None or not isinstance(recorded := dump.get("entries"), list) or not recorded:
            continue
        merged |= dump
        entries += recorded
        # gloo does not say who is in a group, and names none.
        config |= dump["pg_config"] if isinstance(dump.get("pg_config"), dict) else {}
    return {**merged, "pg_config": config, "entries": entries} if entries else None


def shorten(dump: dict[str, Any], count: int) -> dict[str, Any]:
    """The newest entries of each backend, and the newest of each of its groups: how far a rank has come in it.

    Args:
        dump: One, or several merged.
        count: How many of each backend.
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
    """The operations in a dump of the Flight Recorder, oldest first of each backend.

    Args:
        dump: One, or several merged. Entries that are not as expected are left out.
    """
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(dump, dict) or not isinstance(entries, list):
        return []
    members = _members(dump.get("pg_config"))
    timed = {  # the backends of which starts are recorded
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
    """Removes the operations that an entry stands for from ``found``, and adds their peers to the entry."""
    peers: list[int] = []
    while found and _key(found[-1]) == _key(coalesced):
        peers[:0] = found.pop().peers
    return replace(coalesced, peers=tuple(dict.fromkeys(peers))) if peers else coalesced


def _key(collective: Collective) -> tuple[str, str, bool, int]:
    return collective.backend, collective.group, collective.is_p2p, collective.sequence


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """The global ranks of every group that records them, by its name."""
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
