"""Coordinates the local saves of all ranks by messages in their shared store. No Trainer.

**A round** is one save of all ranks. Rank 0 announces it some steps ahead: "the first boundary at which ``global_step``
is at least 120". Each rank posts whether it received the announcement in time. Only if all ranks did, they all take
their state. So the ranks call the hooks of a save, which may use collectives, together or not at all, and a rank waits
at that boundary only until the answers are complete. The next round begins when all ranks have posted whether they
published their shards. So no rank waits for another rank within a step, all ranks save the same steps, and each rank
knows which generations are complete and may remove older ones.
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
"""Limit of one wait in the store; after it the wait is repeated."""

_OVER = "over"
"""Value that an awaited key gets when this rank leaves."""


@dataclass(frozen=True)
class PlannedSave:
    """A save of all ranks.

    Args:
        number: Number of the round, from 0 in every fit.
        step: The save is at the first boundary with at least this ``trainer.global_step``.
        generation: Name of the generation.
    """

    number: int
    step: int
    generation: str


def new_generation() -> str:
    """A random name for a generation."""
    return uuid.uuid4().hex[:8]


class SaveCoordinator:
    """Sends and receives the messages of the rounds, in a background thread.

    Args:
        store: Client for this thread alone: it is blocked while the thread waits.
        world_size: Number of ranks.
        bell: Another client, with which the training thread ends a wait. Polling would not need it, but torch logs a
            warning at every timeout.
        shards: Number of consecutive ranks that hold the state together; each further group of that size holds it too.
        shard: Number of the shard that this rank holds.
    """

    def __init__(self, store: Store, world_size: int, bell: Store, shards: int = 1, shard: int = 0) -> None:
        self._store = store
        self._world_size = world_size
        self._bell = bell
        self.shards, self._shard = shards, shard
        self._awaited = ""
        self.over = False
        """Whether a rank has left, so that there are no more rounds."""

    def announce(self, planned: PlannedSave) -> None:
        """Announces a round; called on rank 0."""
        # The previous round has finished, so all ranks have read the answers of the round before it.
        ends = ("over", "settled", "said", "compared", "learned", "prepared", "ready")
        names = ("late", "heard", "agreed", "published", "published/0/", *ends)
        for name in ("", *(f"/{each}" for each in names)):
            self._store.delete_key(f"round/{planned.number - 2}{name}")
        self._store.set(f"round/{planned.number}", json.dumps([planned.step, planned.generation]))

    def end(self) -> None:
        """Ends all rounds; called by the training thread."""
        self.over = True
        if self._awaited:
            with contextlib.suppress(RuntimeError):  # if the store is gone, the wait has ended
                self._bell.compare_set(self._awaited, "", _OVER)

    def be_ready(self, number: int) -> None:
        """Posts that this rank has finished a round."""
        if self._store.add(f"round/{number}/prepared", 1) == self._world_size:
            self._store.set(f"round/{number}/ready", "1")

    def all_are_ready(self, number: int) -> bool:
        """Waits until all ranks have finished a round; returns ``False`` if a rank has left. Called on rank 0."""
        return self._get(f"round/{number}/ready") is not None

    def wait_for_plan(self, number: int) -> PlannedSave | None:
        """Waits for the announcement of a round; ``None`` if a rank has left."""
        heard = self._get(f"round/{number}")
        return None if heard is None else PlannedSave(number, *json.loads(heard))

    def agree(self, number: int, in_time: bool) -> bool | None:
        """Posts whether this rank received the announcement in time, and waits for the other ranks.

        Returns:
            Whether all ranks received it in time; ``None`` if a rank has left.
        """
        return self._ask_all(number, "heard", "late", int(not in_time), "agreed", wanted=0)

    def finish(self, number: int, published: bool, digest: str = "") -> bool | None:
        """Posts whether this rank published its shards, and waits for the other ranks.

        Args:
            number: Number of the round.
            published: Whether this rank published all its shards.
            digest: Digest of its replicated tensors.

        Returns:
            Whether all ranks have published, and all ranks with the same shard have the same digest: only then their
            files belong together. ``None`` if a rank has left.
        """
        key = f"round/{number}/published/{self._shard}/{digest}"
        is_last = published and self._store.add(key, 1) == self._world_size // self.shards
        if is_last:
            self._store.delete_key(key)
        return self._ask_all(number, "over", "published", int(is_last), "settled", wanted=self.shards)

    def compare(self, number: int, rank: int, digest: str, written: list[int]) -> tuple[list[str], list[int]] | None:
        """Compares the digests of all ranks, after :meth:`finish` found a generation to be incomplete.

        Args:
            number: Number of the round.
            rank: This rank.
            digest: Digest of its replicated tensors; empty if unknown.
            written: Numbers of the replicated tensors that this rank writes between boundary and fence.

        Returns:
            The digests by rank (on rank 0; empty elsewhere), and the union of the numbers in ``written`` of all ranks.
            ``None`` if a rank has left.
        """
        name = f"round/{number}"
        keys = [f"{name}/digest/{each}" for each in range(self._world_size)]
        self._store.set(keys[rank], json.dumps([digest, written]))
        if self._store.add(f"{name}/said", 1) == self._world_size:  # the last rank notifies rank 0
            self._store.set(f"{name}/compared", "1")
        digests: list[str] = []
        if rank == 0:
            if self._get(f"{name}/compared") is None:
                return None
            found = [json.loads(value) for value in self._store.multi_get(keys)]
            digests = [each for each, _ in found]
            counted = {f"{name}/published/{other % self.shards}/{each}" for other, each in enumerate(digests)}
            for key in (*keys, *counted):
                self._store.delete_key(key)
            self._store.set(f"{name}/learned", json.dumps(sorted({each for _, own in found for each in own})))
        learned = self._get(f"{name}/learned")
        return None if learned is None else (digests, json.loads(learned))

    def _ask_all(self, number: int, said: str, counted: str, mine: int, answer: str, wanted: int) -> bool | None:
        name = f"round/{number}"
        self._store.add(f"{name}/{counted}", mine)
        if self._store.add(f"{name}/{said}", 1) == self._world_size:  # the last rank notifies all ranks
            total = self._store.add(f"{name}/{counted}", 0)
            self._store.set(f"{name}/{answer}", str(int(total == wanted)))
        heard = self._get(f"{name}/{answer}")
        return None if heard is None else heard == b"1"

    def _get(self, key: str) -> bytes | None:
        self._awaited = key  # set before ``over`` is read; end() sets ``over`` before it reads this
        while not self.over:
            try:
                self._store.wait([key], _PATIENCE)
            except torch.distributed.DistStoreError:
                continue
            if (heard := bytes(self._store.get(key))) != _OVER.encode():
                return heard
            self.over = True
        return None
