"""One save of one rank: a snapshot, shared out into parts, each of them copied, sealed and published. No Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.generations import RankLocation, rank_shard, replicated_shard
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.safe_serialization import tensor_names
from lightning_resilience.checkpoint.snapshot import Snapshot, address
from lightning_resilience.detect.numerics.divergence import Divergence

log = logging.getLogger(__name__)

Check = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


def partition(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Shares out items among ``count`` takers, about the same sum of sizes each; the same on every rank."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taker = loads.index(min(loads))
        shares[taker].append(index)
        loads[taker] += sizes[index]
    return [sorted(share) for share in shares]


def divergence_of(step: int, digests: Sequence[str]) -> Divergence | None:
    """What :meth:`RankState.replicated_digest` of all ranks says of their states.

    Nothing where they do not speak of the same tensors.

    Args:
        step: ``trainer.global_step``.
        digests: By rank; empty where a rank could not say.
    """
    layouts = {digest.partition("-")[0] for digest in digests if digest}
    return Divergence.between(step, digests) if len(layouts) == 1 else None


class RankState:
    """The state of one rank at one boundary, and how it is shared out into parts.

    Args:
        snapshot: The state.
        step: ``trainer.global_step``.
        generation: The name of what all ranks save at this boundary.
        location: Where the rank is.
        common: The tensors that all ranks of its node have alike; each of these ranks keeps a share of them.
        identity: Fields that all parts of this fit have: run, fit, layout. They say of which course it is, and that is
            the one on which it was taken, whenever it is published.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        step: int,
        generation: str,
        location: RankLocation,
        common: Sequence[torch.Tensor],
        identity: Mapping[str, Any],
    ) -> None:
        self.snapshot = snapshot
        self.step = step
        self.generation = generation
        self._location = location
        self._identity = identity
        numbers: dict[int, int] = {}
        for number, tensor in enumerate(common):
            if (where := address(tensor)) != 0:
                numbers.setdefault(where, number)
        found = {i: numbers[where] for i, where in enumerate(snapshot.addresses) if where in numbers}
        self._shared = found
        """By index the numbers of what ranks have alike, unless the training writes it at other times than others."""
        self._common = sorted(found.keys() - snapshot.written(found))
        self._numbers = [found[index] for index in self._common]
        self._digest = ""

    def written(self) -> list[int]:
        """The numbers of what this rank writes for itself, so that it is none of what all have alike."""
        return [self._shared[index] for index in self.snapshot.written(self._shared)]

    def note_written(self, numbers: Collection[int]) -> None:
        """Some rank writes these for itself: from the next save on no rank takes them for what all have alike."""
        self.snapshot.note_written(index for index, number in self._shared.items() if number in numbers)

    def replicated_digest(self) -> str:
        """What this rank holds of what all ranks have alike, in short; empty if there is none, or it is not known.

        Parts of which it differs do not go together: they would make a state that no rank ever had. Waits for the
        fence, before which nobody knows whether the copied state is that of the boundary.
        """
        return self._digest if self._digest and self.snapshot.is_good() else ""

    def _describe(self) -> str:
        tensors = [self.snapshot.tensors[index] for index in self._common]
        about = [(n, tuple(tensor.shape), str(tensor.dtype)) for n, tensor in zip(self._numbers, tensors, strict=True)]
        return f"{xxhash.xxh3_64_hexdigest(repr(about).encode())}-{self.snapshot.digest()}" if about else ""

    def parts(self) -> dict[str, list[int]]:
        """The parts that this rank writes, and the tensors that go into each."""
        location, common = self._location, set(self._common)
        parts = {rank_shard(location.rank): [i for i in range(len(self.snapshot.tensors)) if i not in common]}
        if common:
            parts[replicated_shard(location.local_rank, location.local_world_size)] = self._shares()[
                location.local_rank
            ]
        return parts

    def tensor_positions(self) -> list[list[int]]:
        """For every tensor: -1 and its number in the rank's own part, or the number of a common part and that in it."""
        places = [[-1, -1] for _ in self.snapshot.tensors]
        for number, share in enumerate(self._shares()):
            for position, index in enumerate(share):
                places[index] = [number, position]
        own = 0
        for each in places:
            if each[0] < 0:
                each[1] = own
                own += 1
        return places

    def _shares(self) -> list[list[int]]:
        sizes = [self.snapshot.tensors[i].nbytes for i in self._common]
        return [[self._common[k] for k in share] for share in partition(sizes, self._location.local_world_size)]

    def _reserve(self, store: NodeStore) -> list[Part]:
        reserved: list[Part] = []
        try:
            for name, indices in self.parts().items():
                specs, size = self._arrange(indices)
                reserved.append(Part(name, indices, specs, size, store.reserve(name, size, self.snapshot.device)))
        except BaseException:
            _abandon(reserved)
            raise
        return reserved

    def _arrange(self, indices: Sequence[int]) -> tuple[list[shard.TensorSpec], int]:
        tensors = self.snapshot.tensors
        try:
            return shard.arrange([tensors[i] for i in indices])
        except TypeError:
            for index in indices:  # which of them is it?
                try:
                    shard.arrange([tensors[index]])
                except TypeError as error:
                    name = tensor_names(self.snapshot.structure).get(index, "a tensor")
                    raise TypeError(f"{name} cannot be kept: {error}") from None
            raise

    def publish(self, store: NodeStore, check: Check | None = None) -> list[Part]:
        """Copies this rank's parts into memory of the store and publishes them; waits for the fence in between.

        Args:
            store: Of this node.
            check: Given the names and contents of the copied tensors; raises if they must not be kept.

        Returns:
            The parts; none if the snapshot has turned out to be no good.

        Raises:
            OSError: If there is no room, or the files cannot be written.
            TypeError: If a tensor cannot be kept.
            Exception: Whatever ``check`` raises.
        """
        snapshot, location = self.snapshot, self._location
        parts: list[Part] = []
        try:
            parts = self._reserve(store)
            copies = [
                (index, shard.view(part.memory, spec))
                for part in parts
                for index, spec in zip(part.indices, part.specs, strict=True)
                if not snapshot.tensors[index].is_meta
            ]
            snapshot.copy(copies, self._common)
            snapshot.release()
            self._digest = self._describe()
            if check is not None:
                names = tensor_names(snapshot.structure)
                check((names.get(index, ""), copy) for index, copy in copies)
            layout = {**self._identity["layout"], "alike": self._digest}
            for part in parts:
                own = part.name == rank_shard(location.rank)
                about = shard.Identity(
                    **{**self._identity, "layout": layout},
                    step=self.step,
                    generation=self.generation,
                    part=part.name,
                    world_size=location.world_size,
                )
                content = {"state": snapshot.structure, "places": self.tensor_positions()} if own else None
                part.trailer = shard.seal(part.memory, part.specs, about, content, part.size)
            if snapshot.is_good():
                for part in parts:
                    part.writer.publish(self.step, self.generation, part.size, part.trailer)
                return parts
            log.debug("A local save is given up: something has changed its tensors before the optimizer's step.")
        except BaseException:
            _abandon(parts)
            raise
        finally:
            snapshot.release()
        _abandon(parts)
        return []


@dataclass
class Part:
    """A part on its way into the store.

    Args:
        name: Of the part.
        indices: Which tensors of the snapshot it holds.
        specs: Where in it they are.
        size: Bytes of their contents.
        writer: Of the store.
        trailer: What comes after the contents: checksums and all that describes them.
    """

    name: str
    indices: list[int]
    specs: list[shard.TensorSpec]
    size: int
    writer: ShardWriter
    trailer: bytes = b""

    def __post_init__(self) -> None:
        self.memory = self.writer.memory
        """Stays as it is until the next save."""


def _abandon(parts: Sequence[Part]) -> None:
    for part in parts:
        part.writer.abandon()
