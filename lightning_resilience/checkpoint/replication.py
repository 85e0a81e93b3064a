"""Replicates shards to other nodes during training, and fetches them when a node is lost.

Ranks that keep copies of each other's shards form a *clique*, with one rank from each of its nodes (:func:`cliques`).
After every save, a background thread of each rank exchanges shards with its clique (:meth:`Replicas.exchange`). At a
resume, ranks fetch missing shards from any rank that has them (:func:`fetch`).

Each pair of ranks has its own gloo group. Shards are bytes in host memory, so this works on any device. A group shared
with the training would mix up operations of two threads. A group of all ranks would connect every rank to every other
rank, and a failed partner would break it for all ranks.

Properties of gloo that shape the protocol:

- A message longer than the receiver expects does not raise: it kills the receiver's *process*. So messages of fixed and
  of variable length never share a tag, no shard is sent before both sides know its length from a message with a
  checksum, and any error in between closes the connection.
- A timeout closes the connection permanently. No other thread can interrupt a wait; it ends when the other side closes
  the connection or dies. A death is nearly always noticed at once, but sometimes only after the timeout.
- Torch's Flight Recorder does not record point-to-point operations, so an exchange is not mistaken for a hang.
- Only TCP's checksum protects the data. So the sender's digest follows every shard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO

import torch
import xxhash

from lightning_resilience.checkpoint.generations import Transfer
from lightning_resilience.checkpoint.tensor_bytes import host_bytes

__all__ = ["ReplicaError", "Replicas", "cliques", "fetch"]

log = logging.getLogger(__name__)

_CHUNK = 64 << 20
"""Bytes per operation. Timeouts apply to one chunk, and a chunk is hashed while the next is sent."""

_MESSAGE = struct.Struct("<8sQqQ16s200s8s")  # magic, number, size, size of the trailer, digest, text, checksum
_MAGIC = b"LRPART01"
_MAX_TEXT = 200
_CHECKSUM_SIZE = 8

_MESSAGE_TAG, _CHUNK_TAG = 0, 1


class ReplicaError(RuntimeError):
    """Ranks could not exchange their shards; the message names the ranks.

    Args:
        message: The failure, with the rank.
        received: Shards that did arrive, by source rank.
    """

    def __init__(self, message: str, received: dict[int, torch.Tensor] | None = None) -> None:
        super().__init__(message)
        self.received = received or {}


def cliques(nodes: Sequence[str], jump: int, factor: int) -> list[list[int]]:
    """Groups the ranks that keep copies of each other's shards.

    The groups are those of NVRx's ``parse_group_sequence`` where it divides the nodes evenly. Otherwise the remaining
    nodes join the last group, so that every rank has a partner.

    Args:
        nodes: For every rank of the job, the name of its node.
        jump: Distance between two ranks of a clique: the number of ranks per node.
        factor: Number of nodes that hold each shard, including the node that wrote it; at least 2.

    Returns:
        The ranks of each clique, ascending; every rank is in exactly one clique.

    Raises:
        ValueError: If there is no such grouping; the message tells the user what to set.
    """
    if factor < 2:
        raise ValueError(
            f"a replication factor of {factor} makes no copy, since it counts a rank's own shard; set it to 2 or more, "
            f"or turn replication off"
        )
    world_size = len(nodes)
    if jump < 1 or world_size % jump != 0:
        raise ValueError(
            f"a replication jump of {jump} does not divide {world_size} ranks into nodes; set it to the number of "
            f"ranks on a node, the same on every node"
        )
    count = world_size // jump
    if count < 2:
        raise ValueError(
            f"no other node can keep a copy: {world_size} ranks with a replication jump of {jump} are one node; turn "
            f"replication off, use more nodes, or set the jump to the number of ranks on a node"
        )
    groups: list[list[int]] = []
    for first in range(jump):
        ranks = list(range(first, world_size, jump))
        starts = list(range(0, max(count - factor, 0) + 1, factor))
        groups.extend(ranks[start : start + factor] for start in starts[:-1])
        groups.append(ranks[starts[-1] :])
    for group in groups:
        if len({nodes[rank] for rank in group}) < len(group):
            raise ValueError(
                f"a replication jump of {jump} has ranks of one node keep each other's copies ({group}); set it to the "
                f"number of ranks on a node"
            )
    return sorted(groups)


# Messages


@dataclass(frozen=True)
class _Message:
    """Precedes a shard with its size and identity, and follows it with its digest.

    Args:
        number: Sequence number of the exchange or transfer.
        size: Bytes of the shard without its trailer; -1: there is no shard, or it cannot be used.
        trailer_size: Bytes of the trailer.
        digest: xxh3-128 of shard and trailer, in the message after them.
        text: Before a shard: its generation or name. After a shard: why it cannot be used.
    """

    number: int
    size: int = 0
    trailer_size: int = 0
    digest: bytes = b""
    text: str = ""

    def encode(self) -> torch.Tensor:
        text = self.text.encode(errors="replace")[:_MAX_TEXT]
        content = _MESSAGE.pack(_MAGIC, self.number, self.size, self.trailer_size, self.digest, text, b"")
        content = content[:-_CHECKSUM_SIZE]
        return torch.frombuffer(bytearray(content + xxhash.xxh3_64_digest(content)), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> _Message:
        content = data.numpy().tobytes()
        magic, number, size, trailer_size, digest, text, checksum = _MESSAGE.unpack(content)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_digest(content[:-_CHECKSUM_SIZE]) or size < -1:
            raise RuntimeError("its message is invalid: corrupted in transit, or from another program")
        return cls(number, size, trailer_size, digest, text.rstrip(b"\0").decode(errors="ignore"))


def _chunks(memory: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Splits consecutive sections of ``memory`` into chunks; no chunk crosses the border of two sections."""
    chunks, start = [], 0
    for size in sizes:
        chunks += [memory[at : min(at + _CHUNK, start + size)] for at in range(start, start + size, _CHUNK)]
        start += size
    return chunks


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _scratch_chunks(*sizes: int) -> list[torch.Tensor]:
    """Like :func:`_chunks`, but all chunks share the same memory."""
    scratch = torch.empty(min(max(sizes), _CHUNK), dtype=torch.uint8, device="cpu")
    return [scratch[: min(_CHUNK, size - at)] for size in sizes for at in range(0, size, _CHUNK)]


def _require_bytes(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of ``memory``; raises if it is smaller or not made of bytes on the host."""
    if len(host_bytes(memory)) < nbytes:
        raise ValueError(f"{memory.numel()} bytes were reserved for a shard of {nbytes}")
    return memory[:nbytes]


def _explain(error: BaseException, timeout: timedelta) -> str:
    """The cause of a failed connection, without gloo's advice, which does not apply here."""
    text = str(error).strip().split("\n")[0].split(". This is typically")[0]
    if "Timed out" in text or "timeout" in text:
        return f"no data for {timeout.total_seconds():g} s: it is late, hangs, or cannot be reached"
    if "losed by peer" in text or "reset by peer" in text or "roken pipe" in text:
        return f"its process ended, or it closed the connection and logs why ({text})"
    return text


class _Channel:
    """The connection between this rank and one other rank. Its errors are the ``RuntimeError`` that torch raises."""

    def __init__(self, store: Any, prefix: str, rank: int, peer: int, timeout: timedelta) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        self.timeout = timeout
        self._peer = int(peer > rank)  # its rank within the pair
        pair = f"{prefix}/{min(rank, peer)}-{max(rank, peer)}"
        self._group: Any = ProcessGroupGloo(PrefixStore(pair, store), 1 - self._peer, 2, timeout)

    def send(self, chunk: torch.Tensor) -> Any:
        return self._open().send([chunk], self._peer, _CHUNK_TAG)

    def recv(self, chunk: torch.Tensor) -> Any:
        return self._open().recv([chunk], self._peer, _CHUNK_TAG)

    def send_message(self, message: _Message) -> Any:
        return self._open().send([message.encode()], self._peer, _MESSAGE_TAG)

    def recv_message(self, timeout: timedelta | None = None) -> _Message:
        data = torch.zeros(_MESSAGE.size, dtype=torch.uint8, device="cpu")
        self._open().recv([data], self._peer, _MESSAGE_TAG).wait(timeout or self.timeout)
        return _Message.decode(data)

    def exchange_messages(self, message: _Message) -> _Message:
        sending = self.send_message(message)
        received = self.recv_message()
        sending.wait()
        return received

    def close(self) -> None:
        """Closes the connection; the other side notices at once, unless this side is still waiting."""
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the connection is closed")
        return self._group


def _connect(prefix: str, rank: int, peers: Iterable[int], timeout: timedelta) -> dict[int, _Channel]:
    """Connects to ``peers`` in ascending order, which prevents deadlocks."""
    from torch.distributed.distributed_c10d import _get_default_store

    shared: Any = _get_default_store()
    channels: dict[int, _Channel] = {}
    for peer in sorted(peers):
        try:
            channels[peer] = _Channel(shared, prefix, rank, peer, timeout)
        except RuntimeError as error:
            for channel in channels.values():
                channel.close()
            raise ReplicaError(
                f"rank {rank} and rank {peer} cannot connect to exchange shards within {timeout.total_seconds():g} s: "
                f"rank {peer} did not try, or their network does not allow it ({error}); GLOO_SOCKET_IFNAME chooses "
                f"the interface"
            ) from error
    return channels


# During training


@dataclass
class _Outcome:
    """Outcome of an exchange with one partner.

    Args:
        memory: The partner's shard; ``None`` if it has none or the transfer failed.
        problem: The failure; empty if there was none.
        is_lost: Whether the connection is closed.
    """

    memory: torch.Tensor | None = None
    problem: str = ""
    is_lost: bool = False


class Replicas:
    """Exchanges shards with the other ranks of a clique.

    All ranks of the clique create it at the same time. :meth:`exchange` may run in a thread while the main thread uses
    any process group.

    Args:
        rank: This rank.
        clique: Ranks of the clique, including this one; the same on all its ranks.
        prefix: Prefix of the keys in the store, the same on all ranks. Do not use a prefix twice: after a restart it
            would lead to the addresses of dead processes.
        timeout: Limit for a partner to start an exchange after this rank, then to reserve memory, and per 64 MiB.

    Raises:
        ReplicaError: If a partner cannot be reached.
        ValueError: If ``clique`` does not consist of this rank and at least one other rank.
    """

    def __init__(self, rank: int, clique: Sequence[int], prefix: str, timeout: timedelta) -> None:
        self.partners = tuple(sorted(set(clique) - {rank}))
        if rank not in clique or not self.partners:
            raise ValueError(f"rank {rank} needs a clique of itself and at least one other rank, not {list(clique)}")
        self.rank = rank
        self._number = 0
        self._failure: str | None = None
        self._busy = threading.Lock()
        self._reserving = threading.Lock()
        self._channels = _connect(prefix, rank, self.partners, timeout)

    @property
    def broken(self) -> bool:
        """Whether no further exchange is possible: a partner was lost, or :meth:`close` was called."""
        return self._failure is not None

    def exchange(
        self,
        generation: str,
        shard: torch.Tensor | None,
        trailer: bytes,
        reserve: Callable[[int, int], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Sends this rank's shard of a generation to all partners and receives theirs.

        All ranks of the clique call it for the same generations in the same order. A failing partner does not affect
        the exchange with the other partners.

        Args:
            generation: Name of the generation, at most 200 bytes of UTF-8; the same on all ranks.
            shard: One-dimensional ``uint8`` tensor in host memory, unchanged until this returns. ``None`` if this rank
                has no shard.
            trailer: Rest of the file.
            reserve: Called with a partner and the size of its shard and trailer; returns memory of at least that size.
                If it raises, only that shard is not received. Called from several threads, one at a time.

        Returns:
            The verified shards with their trailers by rank, in the reserved memory; partners without a shard are left
            out.

        Raises:
            ReplicaError: If a shard was not received; the other shards are in ``received``. If :attr:`broken` is set
                too, every further call raises at once.
            RuntimeError: If another thread is in an exchange.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is in an exchange; only one can run at a time")
        try:
            if self._failure is not None:
                raise ReplicaError(self._failure)
            self._number += 1
            try:
                outcomes = self._exchange(generation, shard, trailer, reserve)
            except BaseException as error:
                # Partners may be at any point of the protocol, so only a closed connection informs them.
                self._failure = f"rank {self.rank} failed in the exchange of {generation}: {error}"
                raise
            return self._result(outcomes, generation)
        finally:
            self._busy.release()
            if self.broken:  # checked after the release: a concurrent close() either sees it or is seen here
                self._disconnect()

    def close(self) -> None:
        """Closes the connections, at the latest when a running exchange ends.

        Does not wait for an exchange in another thread. That returns when the partners have answered or closed too, at
        the latest after the timeout. Until then its reserved memory must stay allocated.
        """
        self._failure = self._failure or f"the replicas of rank {self.rank} are closed"
        if self._busy.acquire(blocking=False):
            self._disconnect()
            self._busy.release()

    def _disconnect(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _exchange(
        self, generation: str, shard: torch.Tensor | None, trailer: bytes, reserve: Callable[[int, int], torch.Tensor]
    ) -> dict[int, _Outcome]:
        if len(generation.encode()) > _MAX_TEXT:
            raise ValueError(f"the name of a generation has at most {_MAX_TEXT} bytes, not {generation!r}")
        outgoing: list[torch.Tensor] = []
        opening = _Message(self._number, -1, text=generation)
        if shard is not None:
            outgoing = _chunks(_require_bytes(shard, shard.numel()), shard.numel())
            outgoing += _chunks(_as_tensor(trailer), len(trailer))
            opening = _Message(self._number, shard.numel(), len(trailer), text=generation)
        outcomes: dict[int, _Outcome] = {}
        errors: dict[int, BaseException] = {}

        def run(peer: int) -> None:
            try:
                outcomes[peer] = self._exchange_with(peer, opening, outgoing, reserve)
            except BaseException as error:
                errors[peer] = error

        # One thread per partner: a late partner must not delay the others.
        *others, last = self.partners
        threads = [threading.Thread(target=run, args=(peer,), daemon=True) for peer in others]
        for thread in threads:
            thread.start()
        run(last)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return dict(sorted(outcomes.items()))

    def _exchange_with(
        self,
        peer: int,
        opening: _Message,
        outgoing: list[torch.Tensor],
        reserve: Callable[[int, int], torch.Tensor],
    ) -> _Outcome:
        channel = self._channels[peer]
        try:
            theirs = channel.exchange_messages(opening)
            if (theirs.number, theirs.text) != (opening.number, opening.text):
                return _Outcome(
                    problem=f"it is out of step: it exchanges {theirs.text} as number {theirs.number}, this rank "
                    f"{opening.text} as number {opening.number}"
                )
            outcome, incoming = self._prepare_incoming(peer, theirs, reserve)
            sent, received = _transfer(channel, outgoing, incoming)
            closing = channel.exchange_messages(_Message(opening.number, digest=sent))
            if closing.digest != received and not outcome.problem:
                outcome = _Outcome(problem="its shard was corrupted in transit (the digest differs)")
        except RuntimeError as error:
            channel.close()
            return _Outcome(problem=_explain(error, channel.timeout), is_lost=True)
        return outcome

    def _prepare_incoming(
        self, peer: int, theirs: _Message, reserve: Callable[[int, int], torch.Tensor]
    ) -> tuple[_Outcome, list[torch.Tensor]]:
        """Reserves memory for a partner's shard; if that fails, the shard is received and discarded."""
        if theirs.size < 0:
            return _Outcome(), []
        nbytes = theirs.size + theirs.trailer_size
        try:
            with self._reserving:
                memory = _require_bytes(reserve(peer, nbytes), nbytes)
        except Exception as error:
            problem = f"no memory for the {nbytes} bytes of its shard: {error!r}"
            return _Outcome(problem=problem), _scratch_chunks(theirs.size, theirs.trailer_size)
        return _Outcome(memory), _chunks(memory, theirs.size, theirs.trailer_size)

    def _result(self, outcomes: dict[int, _Outcome], generation: str) -> dict[int, torch.Tensor]:
        received = {peer: each.memory for peer, each in outcomes.items() if each.memory is not None}
        problems = [f"rank {peer}: {each.problem}" for peer, each in outcomes.items() if each.problem]
        text = f"rank {self.rank} could not exchange shards of {generation} with all partners. {'; '.join(problems)}"
        if any(each.is_lost for each in outcomes.values()):
            self._failure = self._failure or f"replication has stopped. Earlier, {text}"
        if problems:
            raise ReplicaError(text, received)
        return received


def _transfer(channel: _Channel, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> tuple[bytes, bytes]:
    """Sends and receives at the same time; returns the digests of the sent and of the received bytes."""
    flows = [(outgoing, channel.send, xxhash.xxh3_128()), (incoming, channel.recv, xxhash.xxh3_128())]

    def post(index: int) -> list[Any]:
        return [start(chunks[index]) for chunks, start, _ in flows if index < len(chunks)]

    works = post(0)
    for index in range(max(len(outgoing), len(incoming))):
        following = post(index + 1)
        for work in works:
            work.wait()
        for chunks, _, hasher in flows:
            if index < len(chunks):
                hasher.update(chunks[index].numpy().data)  # a view; the hash releases the interpreter lock
        works = following
    sent, received = (bytes(hasher.digest()) for _, _, hasher in flows)
    return sent, received


# At a resume


def fetch(
    rank: int,
    transfers: Sequence[Transfer],
    reserve: Callable[[Transfer], torch.Tensor],
    prefix: str,
    timeout: timedelta,
) -> dict[Transfer, torch.Tensor | None]:
    """Transfers shards from the ranks that have them to the ranks that need them.

    All ranks in ``transfers`` call it with the same list in the same order; only the paths may differ. Other ranks may
    call it too. The connections exist only during the call.

    Args:
        rank: This rank.
        transfers: The transfers of all ranks.
        reserve: Called at the destination; returns memory of at least the size of the transfer. If it raises, only that
            shard is not received.
        prefix: See :class:`Replicas`.
        timeout: Limit for a rank to connect, and then per 64 MiB.

    Returns:
        For every transfer to this rank, the bytes of the file in the reserved memory; ``None`` if the transfer failed,
        for the reason in the log. The bytes are those that the source read; nothing checks whether its file was intact.

    Raises:
        ReplicaError: If a rank cannot be reached or was lost; the state of the other transfers is then unknown.
        ValueError: If a transfer is not between two ranks.
    """
    for transfer in transfers:
        if transfer.source == transfer.destination or transfer.size < 0:
            raise ValueError(f"{transfer} ({transfer.size} bytes) is not a transfer between two ranks")
    own = {each: each.source + each.destination - rank for each in transfers if rank in (each.source, each.destination)}
    channels = _connect(prefix, rank, set(own.values()), timeout)
    fetched: dict[Transfer, torch.Tensor | None] = {}
    try:
        for number, transfer in enumerate(transfers):
            if transfer not in own:
                continue
            channel = channels[own[transfer]]
            # The other rank may still be busy with all transfers before this one; if it dies, the connection closes.
            start_timeout = timeout * (1 + number)
            if rank == transfer.source:
                _send_shard(channel, number, transfer, start_timeout)
            else:
                fetched[transfer] = _recv_shard(channel, number, transfer, reserve, start_timeout)
    except RuntimeError as error:
        raise ReplicaError(f"the transfer of {transfer} failed: {_explain(error, timeout)}") from error
    finally:
        for channel in channels.values():
            channel.close()
    return fetched


def _send_shard(channel: _Channel, number: int, transfer: Transfer, start_timeout: timedelta) -> None:
    problem, hasher = "", xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_open_shard(transfer))
        except OSError as error:
            problem, chunks, size = str(error), [], -1
        else:
            chunks, size = _scratch_chunks(transfer.size), transfer.size
        channel.send_message(_Message(number, size, text=transfer.shard)).wait(start_timeout)
        for chunk in chunks:
            problem = problem or _read(file, chunk)
            channel.send(chunk).wait()  # also after a problem: the receiver expects all chunks
            hasher.update(chunk.numpy().data)
    if problem:
        log.warning("The transfer of %s failed: %s", transfer, problem)
    size = -1 if problem else transfer.size
    channel.send_message(_Message(number, size, digest=hasher.digest(), text=problem)).wait()


def _open_shard(transfer: Transfer) -> BinaryIO:
    if transfer.path is None:
        raise FileNotFoundError("the source has no path for it")
    # With O_NONBLOCK this does not hang if the name is that of a pipe.
    file = open(transfer.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if (size := os.fstat(file.fileno()).st_size) == transfer.size:
        return file
    file.close()
    raise OSError(f"{transfer.path} has {size} bytes, expected {transfer.size}")


def _read(file: BinaryIO, chunk: torch.Tensor) -> str:
    """Fills ``chunk``; returns the failure, or an empty text."""
    try:
        count = file.readinto(chunk.numpy().data)  # type: ignore[attr-defined]
    except OSError as error:
        return f"cannot read it: {error}"
    return "" if count == chunk.numel() else "the file was truncated while it was read"


def _recv_shard(
    channel: _Channel,
    number: int,
    transfer: Transfer,
    reserve: Callable[[Transfer], torch.Tensor],
    start_timeout: timedelta,
) -> torch.Tensor | None:
    opening = channel.recv_message(start_timeout)
    if (opening.number, opening.text) != (number, transfer.shard) or opening.size not in (-1, transfer.size):
        raise RuntimeError(
            f"the ranks have different transfers: it sends {opening.text} with {opening.size} bytes as number "
            f"{opening.number}, this rank expects {transfer.shard} with {transfer.size} as number {number}"
        )
    memory, problem, digest = None, "", b""
    if opening.size >= 0:
        try:
            memory = _require_bytes(reserve(transfer), transfer.size)
        except Exception as error:
            problem = f"no memory for its {transfer.size} bytes: {error!r}"
        chunks = _scratch_chunks(transfer.size) if memory is None else _chunks(memory, transfer.size)
        _, digest = _transfer(channel, [], chunks)
    closing = channel.recv_message()
    if closing.size < 0:
        problem = f"the source could not read it ({closing.text})"
    elif not problem and closing.digest != digest:
        problem = "it was corrupted in transit (the digest differs)"
    if problem:
        log.warning("The transfer of %s failed: %s", transfer, problem)
        return None
    return memory
