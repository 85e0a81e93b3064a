"""One save of one rank: partitions a snapshot into shards, and copies, seals and publishes them. No Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.at_hand import AtHand
from lightning_resilience.checkpoint.generations import RankLocation, rank_shard, replicated_shard
from lightning_resilience.checkpoint.node_store import NodeStore, ShardWriter
from lightning_resilience.checkpoint.safe_serialization import tensor_names
from lightning_resilience.checkpoint.snapshot import Snapshot, address
from lightning_resilience.detect.numerics.divergence import Divergence

log = logging.getLogger(__name__)

Check = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


def partition(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Partitions items into ``count`` shares of about the same total size; deterministic, so the same on every rank."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taker = loads.index(min(loads))
        shares[taker].append(index)
        loads[taker] += sizes[index]
    return [sorted(share) for share in shares]


def divergence_of(step: int, digests: Sequence[str], shards: int = 1) -> Divergence | None:
    """Finds the ranks that differ in their replicated state.

    Args:
        step: ``trainer.global_step``.
        digests: :meth:`RankState.replicated_digest` by rank; empty where a rank has none.
        shards: See :meth:`.Divergence.between`.

    Returns:
        ``None`` if no ranks differ, or if the digests are of different tensors.
    """
    for number in range(shards):
        if len({digest.partition("-")[0] for digest in digests[number::shards] if digest}) > 1:
            return None
    return Divergence.between(step, digests, shards)


class RankState:
    """The state of one rank at one boundary, and its partition into shards.

    Args:
        snapshot: Snapshot of the state.
        step: ``trainer.global_step``.
        generation: Identity of the generation, the same on all ranks.
        location: Rank and node.
        replicated: The tensors that other ranks have too: the ranks with the same shard, or all ranks.
        identity: Fields that all shards of this fit have: run, fit, layout. The layout holds the course at the time of
            the snapshot, and whether each rank of a node saves a share of the replicated tensors.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        step: int,
        generation: str,
        location: RankLocation,
        replicated: Sequence[torch.Tensor],
        identity: Mapping[str, Any],
    ) -> None:
        self.snapshot = snapshot
        self.step = step
        self.generation = generation
        self._location = location
        self._identity = identity
        numbers: dict[int, int] = {}
        for number, tensor in enumerate(replicated):
            if (where := address(tensor)) != 0:
                numbers.setdefault(where, number)
        found = {i: numbers[where] for i, where in enumerate(snapshot.addresses) if where in numbers}
        self._numbered = found
        """By index in the snapshot, the number of each replicated tensor: its index in ``replicated``."""
        self._compared = sorted(found.keys() - snapshot.written(found))
        self._replicated = self._compared if identity["layout"].get("commons") else []
        """Indices of the tensors that the ranks of the node share out; the rank shard holds all other tensors."""
        self._digest = ""

    def written(self) -> list[int]:
        """The numbers of the replicated tensors that this rank writes between boundary and fence."""
        return [self._numbered[index] for index in self.snapshot.written(self._numbered)]

    def note_written(self, numbers: Collection[int]) -> None:
        """Keeps these tensors in the rank shard from the next save on, since some rank writes them."""
        self.snapshot.note_written(index for index, number in self._numbered.items() if number in numbers)

    def replicated_digest(self) -> str:
        """Digest of this rank's replicated tensors; empty if there are none or it is unknown.

        Shards with different digests do not belong together: they would make a state that no rank ever had. Waits for
        the fence, since only then it is known whether the copy holds the state of the boundary.
        """
        return self._digest if self._digest and self.snapshot.is_good() else ""

    def _describe(self) -> str:
        tensors = [(self._numbered[index], self.snapshot.tensors[index]) for index in self._compared]
        about = [(number, tuple(tensor.shape), str(tensor.dtype)) for number, tensor in tensors]
        return f"{xxhash.xxh3_64_hexdigest(repr(about).encode())}-{self.snapshot.digest()}" if about else ""

    def at_hand(self, parameters: Iterable[torch.Tensor]) -> AtHand:
        """The live replicated tensors, for a resume in this process; call it after :meth:`publish`.

        Args:
            parameters: The parameters of the module; a resume gets copies of these tensors.
        """
        places = {index: place for place, index in enumerate(self._replicated)}
        of_module = {*map(address, parameters)}
        return AtHand(
            self.generation,
            self.replicated_digest(),
            [self.snapshot.tensors[index] for index in self._replicated],
            [[places[index] for index in share] for share in self._shares()],
            {place for index, place in places.items() if self.snapshot.addresses[index] in of_module},
        )

    def _indices_by_shard(self) -> dict[str, list[int]]:
        """The shards that this rank writes, by name, and the indices of the tensors in each."""
        location, replicated = self._location, set(self._replicated)
        indices = {rank_shard(location.rank): [i for i in range(len(self.snapshot.tensors)) if i not in replicated]}
        if replicated and location.local_rank < location.shares:
            name = replicated_shard(location.local_rank, location.shares)
            indices[name] = self._shares()[location.local_rank]
        return indices

    def tensor_positions(self) -> list[list[int]]:
        """For every tensor, the number of its replicated shard (-1: the rank shard) and its index in that shard."""
        positions = [[-1, -1] for _ in self.snapshot.tensors]
        for number, share in enumerate(self._shares()):
            for position, index in enumerate(share):
                positions[index] = [number, position]
        own = 0
        for each in positions:
            if each[0] < 0:
                each[1] = own
                own += 1
        return positions

    def _shares(self) -> list[list[int]]:
        sizes = [self.snapshot.tensors[i].nbytes for i in self._replicated]
        return [[self._replicated[k] for k in share] for share in partition(sizes, self._location.shares)]

    def _reserve(self, store: NodeStore) -> list[PendingShard]:
        reserved: list[PendingShard] = []
        try:
            for name, indices in self._indices_by_shard().items():
                specs, size = self._arrange(indices)
                writer = store.reserve(name, size, self.snapshot.device)
                reserved.append(PendingShard(name, indices, specs, size, writer))
        except BaseException:
            _abandon(reserved)
            raise
        return reserved

    def _arrange(self, indices: Sequence[int]) -> tuple[list[shard.TensorSpec], int]:
        tensors = self.snapshot.tensors
        try:
            return shard.arrange([tensors[i] for i in indices])
        except TypeError:
            for index in indices:  # finds the refused tensor
                try:
                    shard.arrange([tensors[index]])
                except TypeError as error:
                    name = tensor_names(self.snapshot.structure).get(index, "a tensor")
                    raise TypeError(f"{name} cannot be saved: {error}") from None
            raise

    def publish(self, store: NodeStore, check: Check | None = None) -> list[PendingShard]:
        """Copies this rank's shards into memory of the store and publishes them; waits for the fence in between.

        Args:
            store: The store of this node.
            check: Called with the names and copies of the tensors; raises if they must not be saved.

        Returns:
            The shards; an empty list if the snapshot is not valid.

        Raises:
            OSError: If there is no room, or the files cannot be written.
            TypeError: If a tensor cannot be kept.
            Exception: Whatever ``check`` raises.
        """
        snapshot, location = self.snapshot, self._location
        pending: list[PendingShard] = []
        try:
            pending = self._reserve(store)
            copies = [
                (index, shard.view(each.memory, spec))
                for each in pending
                for index, spec in zip(each.indices, each.specs, strict=True)
                if not snapshot.tensors[index].is_meta
            ]
            snapshot.copy(copies, self._compared)
            snapshot.release()
            self._digest = self._describe()
            if check is not None:
                names = tensor_names(snapshot.structure)
                check((names.get(index, ""), copy) for index, copy in copies)
            layout = {**self._identity["layout"], "alike": self._digest}
            for each in pending:
                own = each.name == rank_shard(location.rank)
                about = shard.Identity(
                    **{**self._identity, "layout": layout},
                    step=self.step,
                    generation=self.generation,
                    part=each.name,
                    world_size=location.world_size,
                )
                content = {"state": snapshot.structure, "places": self.tensor_positions()} if own else None
                each.trailer = shard.seal(each.memory, each.specs, about, content, each.size)
            if snapshot.is_good():
                for each in pending:
                    each.writer.publish(self.step, self.generation, each.size, each.trailer)
                return pending
            log.debug("Dropping a local save: its tensors have changed before the optimizer's step.")
        except BaseException:
            _abandon(pending)
            raise
        finally:
            snapshot.release()
        _abandon(pending)
        return []


@dataclass
class PendingShard:
    """A shard that is being written.

    Args:
        name: Name of the shard.
        indices: Indices of its tensors in the snapshot.
        specs: Positions of the tensors in the file.
        size: Bytes of the tensors.
        writer: Writer of the store.
        trailer: Header and footer, see :func:`.shard.seal`.
    """

    name: str
    indices: list[int]
    specs: list[shard.TensorSpec]
    size: int
    writer: ShardWriter
    trailer: bytes = b""

    def __post_init__(self) -> None:
        self.memory = self.writer.memory
        """The content of the shard, unchanged until the next save."""


def _abandon(pending: Sequence[PendingShard]) -> None:
    for each in pending:
        each.writer.abandon()
