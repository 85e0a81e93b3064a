"""What the ranks of a job say to each other about their local saves, over the store that they share. No Trainer.

**A round** is one save of all ranks. Rank 0 announces it some steps ahead: "the first boundary at which ``global_step``
is at least 120". Each rank says whether it has heard of it in time, and only if all have is the state taken, by all. So
the ranks call the hooks of a save, which may use collectives, together or not at all; and a rank waits at that boundary
only if it is there before the answer is. When every rank has published its parts, or has not, the round is settled, and
only then comes the next. So no rank ever waits for another in a step, no rank saves what the others leave out, and each
knows which generations are complete and may remove the older ones.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PATIENCE = timedelta(hours=1)
"""How long a call to the shared store may block; nothing happens when it ends."""

_OVER = "over"
"""Said instead of what is waited for when a rank has left."""


@dataclass(frozen=True)
class PlannedSave:
    """A save of all ranks.

    Args:
        number: Counts from 0 in every fit.
        step: It happens at the first boundary at which this many optimizer steps are done, or more.
        generation: Names what is saved.
    """

    number: int
    step: int
    generation: str


def new_generation() -> str:
    """A name that no other generation has."""
    return uuid.uuid4().hex[:8]


class SaveCoordinator:
    """The messages of the rounds, over the store that the ranks share.

    Args:
        store: A client that nobody else uses: it is at work for as long as the thread waits.
        world_size: How many ranks take part.
        bell: Another client, with which the training thread ends that. Short waits instead would do without, but torch
            warns at the end of each.
    """

    def __init__(self, store: Store, world_size: int, bell: Store) -> None:
        self._store = store
        self._world_size = world_size
        self._bell = bell
        self._awaited = ""
        self._digest: dict[int, str] = {}
        self.over = False
        """Whether there will be no more rounds: a rank has left."""

    def announce(self, planned: PlannedSave) -> None:
        """Rank 0: tells everybody."""
        # Every rank has heard how the round before the last ended, or the last could not have been settled.
        published = f"published{self._digest.pop(planned.number - 2, '')}"
        ends = ("over", "settled", "said", "compared", "learned", "prepared", "ready")
        names = ("late", "heard", "agreed", published, *ends)
        for name in ("", *(f"/{each}" for each in names)):
            self._store.delete_key(f"round/{planned.number - 2}{name}")
        self._store.set(f"round/{planned.number}", json.dumps([planned.step, planned.generation]))

    def end(self) -> None:
        """Called by the training thread: this rank leaves, and without it no round can be settled any more."""
        self.over = True
        if self._awaited:
            with contextlib.suppress(RuntimeError):  # the store has gone, and the wait has ended too
                self._bell.compare_set(self._awaited, "", _OVER)

    def be_ready(self, number: int) -> None:
        """Says that this rank has done with a round, and will hear of the next at once."""
        if self._store.add(f"round/{number}/prepared", 1) == self._world_size:
            self._store.set(f"round/{number}/ready", "1")

    def all_are_ready(self, number: int) -> bool:
        """Rank 0: waits until every rank has done with a round; returns whether there can be another."""
        return self._get(f"round/{number}/ready") is not None

    def wait_for_plan(self, number: int) -> PlannedSave | None:
        """The announcement of a round, as soon as it is there, or ``None`` if there will be no more."""
        heard = self._get(f"round/{number}")
        return None if heard is None else PlannedSave(number, *json.loads(heard))

    def agree(self, number: int, in_time: bool) -> bool | None:
        """Says whether this rank has heard of a round in time.

        Returns:
            Whether all have, as soon as they say so; ``None`` if that will not be known.
        """
        return self._ask_all(number, "heard", "late", int(not in_time), "agreed", wanted=0)

    def finish(self, number: int, published: bool, digest: str = "") -> bool | None:
        """Says whether this rank has published all its parts.

        Args:
            number: Of the round.
            published: Whether it has.
            digest: What it takes for what all ranks have alike; where they differ, their parts do not go together.

        Returns:
            Whether every rank has, as soon as they say so; ``None`` if that will not be known.
        """
        self._digest[number] = digest
        return self._ask_all(number, "over", f"published{digest}", int(published), "settled", wanted=self._world_size)

    def compare(self, number: int, rank: int, digest: str, written: list[int]) -> tuple[list[str], list[int]] | None:
        """Asks, after :meth:`finish`, why a round has not come to a complete generation.

        Args:
            number: Of the round.
            rank: This one.
            digest: What it takes for what all ranks have alike; empty if it does not know.
            written: What of that it writes for itself, by number.

        Returns:
            What all ranks take for it, to rank 0, and nothing to the others; and what any rank writes for itself.
            ``None`` if that will not be known.
        """
        name = f"round/{number}"
        keys = [f"{name}/digest/{each}" for each in range(self._world_size)]
        self._store.set(keys[rank], json.dumps([digest, written]))
        if self._store.add(f"{name}/said", 1) == self._world_size:  # the last one tells rank 0
            self._store.set(f"{name}/compared", "1")
        digests: list[str] = []
        if rank == 0:
            if self._get(f"{name}/compared") is None:
                return None
            found = [json.loads(value) for value in self._store.multi_get(keys)]
            digests = [each for each, _ in found]
            self._digest.pop(number, "")
            for key in [*keys, *(f"{name}/published{each}" for each in {"", digest, *digests})]:
                self._store.delete_key(key)
            self._store.set(f"{name}/learned", json.dumps(sorted({each for _, own in found for each in own})))
        learned = self._get(f"{name}/learned")
        return None if learned is None else (digests, json.loads(learned))

    def _ask_all(self, number: int, said: str, counted: str, mine: int, answer: str, wanted: int) -> bool | None:
        name = f"round/{number}"
        self._store.add(f"{name}/{counted}", mine)
        if self._store.add(f"{name}/{said}", 1) == self._world_size:  # the last one tells all
            total = self._store.add(f"{name}/{counted}", 0)
            self._store.set(f"{name}/{answer}", str(int(total == wanted)))
        heard = self._get(f"{name}/{answer}")
        return None if heard is None else heard == b"1"

    def _get(self, key: str) -> bytes | None:
        self._awaited = key  # before it is looked whether to wait for it: end() looks at them the other way round
        while not self.over:
            try:
                self._store.wait([key], _PATIENCE)
            except torch.distributed.DistStoreError:
                continue
            if (heard := bytes(self._store.get(key))) != _OVER.encode():
                return heard
            self.over = True
        return None
