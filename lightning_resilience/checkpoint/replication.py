"""Copies of a rank's part on other nodes: given away while training goes on, brought back when a node is lost.

Ranks that keep copies of each other's parts form a *clique*, with one rank from each of its nodes (:func:`cliques`).
After every save, a background thread of each of them gives its part to the others and takes theirs
(:meth:`Replicas.exchange`). At a resume, parts that a rank lacks come from whichever rank has them (:func:`fetch`).

Every two ranks that have something for each other are joined by a gloo group of their own. Parts are bytes in host
memory, so this works for jobs on any device, and it must not share a group with the training: operations of a group
that two threads use at once would be mistaken for each other. A pair needs one connection, where a group of all ranks
has every rank connect to all others; and a partner that fails takes down nothing but the connection to itself.

What gloo does, and what follows from it:

- A message that is longer than the receiver expects does not raise: it ends the receiver's *process*. So what has a
  fixed length and what has not never share a tag, no byte of a part moves before both sides know its length from a
  message that carries its own checksum, and after any error in between the connection is given up.
- A wait that runs out of time closes the connection for good. A wait can't be interrupted from another thread either;
  it ends when the other side closes the connection or its process dies. A death is nearly always noticed at once, but
  sometimes not before the timeout.
- Point-to-point operations are not in the records of torch's Flight Recorder: an exchange can't be taken for a hang.

gloo checks nothing that it moves beyond TCP's checksum. Here the sender's digest of every part follows its bytes.
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
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import xxhash

from lightning_resilience.checkpoint.generations import Transfer
from lightning_resilience.checkpoint.tensor_bytes import host_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["ReplicaError", "Replicas", "cliques", "fetch"]

log = logging.getLogger(__name__)

_PIECE = 64 << 20
"""Bytes sent at once. A wait lasts for one piece at most, and hashing one goes on while the next is on its way."""

_MESSAGE = struct.Struct("<8sQqQ16s200s8s")  # magic, number, size, size of the trailer, digest, text, checksum
_MAGIC = b"LRPART01"
_LONGEST_TEXT = 200
_CHECKSUM_SIZE = 8

_MESSAGE_TAG, _PIECE_TAG = 0, 1


class ReplicaError(RuntimeError):
    """Ranks could not exchange their parts; the message names the ranks.

    Args:
        message: What went wrong, with whom.
        received: The parts that did arrive whole, by the rank they came from.
    """

    def __init__(self, message: str, received: dict[int, torch.Tensor] | None = None) -> None:
        super().__init__(message)
        self.received = received or {}


def cliques(world_size: int, jump: int, factor: int) -> list[list[int]]:
    """Which ranks keep copies of each other's parts.

    The same groups as in NVRx, ``parse_group_sequence``, where the nodes can be divided evenly. Nodes that are left
    over join the last group, so that every rank has a partner.

    Args:
        world_size: Number of ranks in the job.
        jump: Distance between two ranks of a clique: the number of ranks on a node, since a copy on the same node is
            lost with it.
        factor: How many nodes have a part, its own included; at least 2.

    Returns:
        The ranks of each clique, ascending; every rank is in exactly one.

    Raises:
        ValueError: If there is no such grouping; the message says what to set.
    """
    if factor < 2:
        raise ValueError(
            f"a replication factor of {factor} makes no copy: it counts a rank's own part too; set it to 2 or more, or "
            f"turn replication off"
        )
    if jump < 1 or world_size % jump != 0:
        raise ValueError(
            f"a replication jump of {jump} does not divide {world_size} ranks into nodes; set it to the number of "
            f"ranks on a node, the same on every node"
        )
    nodes = world_size // jump
    if nodes < 2:
        raise ValueError(
            f"there is nobody to keep a copy: {world_size} ranks with a replication jump of {jump} are one node; turn "
            f"replication off, use more nodes, or set the jump to the number of ranks on a node"
        )
    groups: list[list[int]] = []
    for first in range(jump):
        ranks = list(range(first, world_size, jump))
        starts = list(range(0, max(nodes - factor, 0) + 1, factor))
        groups.extend(ranks[start : start + factor] for start in starts[:-1])
        groups.append(ranks[starts[-1] :])
    return sorted(groups)


# Messages


@dataclass(frozen=True)
class _Message:
    """What is said before a part (its size, what it belongs to) and after it (its digest).

    Args:
        number: Of the exchange or of the transfer.
        size: Bytes of the part without its trailer; -1: there is no part, or it can't be used.
        trailer_size: Bytes of the trailer.
        digest: xxh3-128 over part and trailer, in the message after them.
        text: The generation or the name of the part, before it; after it, why it can't be used.
    """

    number: int
    size: int = 0
    trailer_size: int = 0
    digest: bytes = b""
    text: str = ""

    def encode(self) -> torch.Tensor:
        text = self.text.encode(errors="replace")[:_LONGEST_TEXT]
        content = _MESSAGE.pack(_MAGIC, self.number, self.size, self.trailer_size, self.digest, text, b"")
        content = content[:-_CHECKSUM_SIZE]
        return torch.frombuffer(bytearray(content + xxhash.xxh3_64_digest(content)), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: torch.Tensor) -> _Message:
        content = data.numpy().tobytes()
        magic, number, size, trailer_size, digest, text, checksum = _MESSAGE.unpack(content)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_digest(content[:-_CHECKSUM_SIZE]) or size < -1:
            raise RuntimeError("what it sent is not what it should send here, or was damaged on the way")
        return cls(number, size, trailer_size, digest, text.rstrip(b"\0").decode(errors="ignore"))


def _pieces(memory: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """The stretches of ``memory``, which follow each other and have the given sizes, cut into pieces."""
    pieces, start = [], 0
    for size in sizes:
        pieces += [memory[at : min(at + _PIECE, start + size)] for at in range(start, start + size, _PIECE)]
        start += size
    return pieces


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _discarding(*sizes: int) -> list[torch.Tensor]:
    """Pieces for so many bytes that all lie in the same memory, for what need not be kept."""
    scratch = torch.empty(min(max(sizes), _PIECE), dtype=torch.uint8, device="cpu")
    return [scratch[: min(_PIECE, size - at)] for size in sizes for at in range(0, size, _PIECE)]


def _require_bytes(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of what a caller offers to receive a shard in."""
    if len(host_bytes(memory)) < nbytes:
        raise ValueError(f"{memory.numel()} bytes were offered for a part of {nbytes}")
    return memory[:nbytes]


def _explain(error: BaseException, timeout: timedelta) -> str:
    """What an error of torch means for a connection; gloo's texts go on with advice that does not apply."""
    text = str(error).strip().split("\n")[0].split(". This is typically")[0]
    if "Timed out" in text or "timeout" in text:
        return f"nothing came from it for {timeout.total_seconds():g} s: it is not as far, hangs, or is out of reach"
    if "losed by peer" in text or "reset by peer" in text or "roken pipe" in text:
        return f"its process has ended, or it has given up and says why itself ({text})"
    return text


class _Channel:
    """The connection between this rank and one other. What fails raises ``RuntimeError``, as torch does."""

    def __init__(self, store: Any, prefix: str, rank: int, peer: int, timeout: timedelta) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        self.timeout = timeout
        self._peer = int(peer > rank)  # its rank within the pair
        pair = f"{prefix}/{min(rank, peer)}-{max(rank, peer)}"
        self._group: Any = ProcessGroupGloo(PrefixStore(pair, store), 1 - self._peer, 2, timeout)

    def send(self, piece: torch.Tensor) -> Any:
        return self._open().send([piece], self._peer, _PIECE_TAG)

    def receive(self, piece: torch.Tensor) -> Any:
        return self._open().recv([piece], self._peer, _PIECE_TAG)

    def say(self, message: _Message) -> Any:
        return self._open().send([message.encode()], self._peer, _MESSAGE_TAG)

    def hear(self, patience: timedelta | None = None) -> _Message:
        data = torch.zeros(_MESSAGE.size, dtype=torch.uint8, device="cpu")
        self._open().recv([data], self._peer, _MESSAGE_TAG).wait(patience or self.timeout)
        return _Message.decode(data)

    def converse(self, message: _Message) -> _Message:
        said = self.say(message)
        heard = self.hear()
        said.wait()
        return heard

    def close(self) -> None:
        """The other side notices at once, unless an operation of this side is still waited for."""
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the connection is closed")
        return self._group


def _connect(
    store: Store | None, prefix: str, rank: int, peers: Iterable[int], timeout: timedelta
) -> dict[int, _Channel]:
    """Connections to ``peers``, in the same order of pairs on all ranks, so that no ring of ranks waits for itself."""
    from torch.distributed.distributed_c10d import _get_default_store

    shared: Any = store or _get_default_store()
    channels: dict[int, _Channel] = {}
    for peer in sorted(peers):
        try:
            channels[peer] = _Channel(shared, prefix, rank, peer, timeout)
        except RuntimeError as error:
            for channel in channels.values():
                channel.close()
            raise ReplicaError(
                f"rank {rank} and rank {peer} can't connect to each other to exchange parts within "
                f"{timeout.total_seconds():g} s: rank {peer} did not come, or the network between their nodes does not "
                f"let them ({error}); GLOO_SOCKET_IFNAME chooses the interface"
            ) from error
    return channels


# While training goes on


@dataclass
class _Outcome:
    """Of one exchange with one partner.

    Args:
        memory: Its part, if there is one and it arrived whole.
        problem: What went wrong.
        is_lost: Whether the connection is.
    """

    memory: torch.Tensor | None = None
    problem: str = ""
    is_lost: bool = False


class Replicas:
    """Gives this rank's parts to the other ranks of its clique and takes theirs.

    All ranks of the clique make it at the same time. Nothing of it is used by the training: :meth:`exchange` may run
    in a thread of its own while the main thread uses any process group.

    Args:
        rank: This rank.
        clique: The ranks that keep copies of each other's parts, this one included, the same on all of them.
        prefix: Of the keys by which the ranks find each other in the store, the same on all ranks and never used
            before on this store: the address of a process that has died must not be tried after a restart.
        timeout: How long a partner may take to come to an exchange after this rank, then to reserve memory, and for
            each 64 MiB.
        store: The store that the ranks share; by default that of the default process group.

    Raises:
        ReplicaError: If a partner did not come or can't be reached.
    """

    def __init__(
        self, rank: int, clique: Sequence[int], prefix: str, timeout: timedelta, store: Store | None = None
    ) -> None:
        self.partners = tuple(sorted(set(clique) - {rank}))
        if rank not in clique or not self.partners:
            raise ValueError(f"rank {rank} needs a clique of itself and at least one other rank, not {list(clique)}")
        self.rank = rank
        self._number = 0
        self._refusal: str | None = None
        self._busy = threading.Lock()
        self._reserving = threading.Lock()
        self._channels = _connect(store, prefix, rank, self.partners, timeout)

    @property
    def broken(self) -> bool:
        """Whether exchanges have ended for good: a partner was lost, or :meth:`close` was called."""
        return self._refusal is not None

    def exchange(
        self,
        generation: str,
        part: torch.Tensor | None,
        trailer: bytes,
        reserve: Callable[[int, int], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Gives this rank's part of a generation to all partners and takes theirs.

        Every rank of the clique calls it once for every generation, in the same order; a rank that has no part says so
        with ``None``. What one partner does wrong does not keep the others from being served: the error comes last.

        Args:
            generation: Names the generation, in at most 200 bytes of UTF-8, the same on all ranks.
            part: The bytes, one-dimensional ``uint8`` in host memory. They must not change until this returns.
            trailer: What follows them in the file.
            reserve: Called with a partner and the size of its part and trailer together; returns the memory in which
                to receive them, at least as large. If it raises, that part is not received; the rest goes on. With
                several partners, calls come from several threads, one at a time.

        Returns:
            The partners' parts with their trailers, verified, by rank, in the memory that was reserved; without those
            of partners that have none.

        Raises:
            ReplicaError: If a part did not arrive; those that did are in ``received``. If :attr:`broken` is set then, a
                partner is lost, and every further call raises at once.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is in an exchange; exchanges go one after the other")
        try:
            if self._refusal is not None:
                raise ReplicaError(self._refusal)
            self._number += 1
            try:
                outcomes = self._exchange(generation, part, trailer, reserve)
            except BaseException as error:
                # The partners are somewhere in the middle, and nothing but the end of the connection can tell them.
                self._refusal = f"rank {self.rank} failed in the exchange of {generation}: {error}"
                raise
            return self._result(outcomes, generation)
        finally:
            self._busy.release()
            if self.broken:  # looked at after the release, or a close() meanwhile would leave it to us and we to it
                self._disconnect()

    def close(self) -> None:
        """Ends the exchanges. The partners learn it at once, or at the end of an exchange that is under way.

        Does not wait for an exchange in another thread. That one returns when the partners have answered or closed as
        well, at the latest after the timeout; until then what it has reserved must stay.
        """
        self._refusal = self._refusal or f"the replicas of rank {self.rank} are closed"
        if self._busy.acquire(blocking=False):
            self._disconnect()
            self._busy.release()

    def _disconnect(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _exchange(
        self, generation: str, part: torch.Tensor | None, trailer: bytes, reserve: Callable[[int, int], torch.Tensor]
    ) -> dict[int, _Outcome]:
        if len(generation.encode()) > _LONGEST_TEXT:
            raise ValueError(f"the name of a generation has at most {_LONGEST_TEXT} bytes, not {generation!r}")
        outgoing: list[torch.Tensor] = []
        opening = _Message(self._number, -1, text=generation)
        if part is not None:
            outgoing = _pieces(_require_bytes(part, part.numel()), part.numel())
            outgoing += _pieces(_as_tensor(trailer), len(trailer))
            opening = _Message(self._number, part.numel(), len(trailer), text=generation)
        outcomes: dict[int, _Outcome | BaseException] = {}

        def serve(peer: int) -> None:
            try:
                outcomes[peer] = self._exchange_with(peer, opening, outgoing, reserve)
            except BaseException as error:
                outcomes[peer] = error

        # A thread for each, so that a partner that keeps this rank waiting does not make it late for the others.
        *others, last = self.partners
        threads = [threading.Thread(target=serve, args=(peer,), daemon=True) for peer in others]
        for thread in threads:
            thread.start()
        serve(last)
        for thread in threads:
            thread.join()
        served = {}
        for peer in self.partners:
            outcome = outcomes[peer]
            if isinstance(outcome, BaseException):
                raise outcome
            served[peer] = outcome
        return served

    def _exchange_with(
        self,
        peer: int,
        opening: _Message,
        outgoing: list[torch.Tensor],
        reserve: Callable[[int, int], torch.Tensor],
    ) -> _Outcome:
        channel = self._channels[peer]
        try:
            theirs = channel.converse(opening)
            if (theirs.number, theirs.text) != (opening.number, opening.text):
                return _Outcome(
                    problem=f"it is out of step: it exchanges {theirs.text} as its number {theirs.number}, this rank "
                    f"{opening.text} as its number {opening.number}"
                )
            outcome, incoming = self._receiving(peer, theirs, reserve)
            sent, received = _move(channel, outgoing, incoming)
            if channel.converse(_Message(opening.number, digest=sent)).digest != received and not outcome.problem:
                outcome = _Outcome(problem="its part was damaged on the way (the digest differs)")
        except RuntimeError as error:
            channel.close()
            return _Outcome(problem=_explain(error, channel.timeout), is_lost=True)
        return outcome

    def _receiving(
        self, peer: int, theirs: _Message, reserve: Callable[[int, int], torch.Tensor]
    ) -> tuple[_Outcome, list[torch.Tensor]]:
        """Finds a place for a partner's part."""
        if theirs.size < 0:
            return _Outcome(), []
        nbytes = theirs.size + theirs.trailer_size
        try:
            with self._reserving:
                memory = _require_bytes(reserve(peer, nbytes), nbytes)
        except Exception as error:
            problem = f"there is no place for the {nbytes} bytes of its part: {error!r}"
            return _Outcome(problem=problem), _discarding(theirs.size, theirs.trailer_size)
        return _Outcome(memory), _pieces(memory, theirs.size, theirs.trailer_size)

    def _result(self, outcomes: dict[int, _Outcome], generation: str) -> dict[int, torch.Tensor]:
        received = {peer: each.memory for peer, each in outcomes.items() if each.memory is not None}
        problems = [f"rank {peer}: {each.problem}" for peer, each in outcomes.items() if each.problem]
        text = f"rank {self.rank} could not exchange its part of {generation} with all partners. {'; '.join(problems)}"
        if any(each.is_lost for each in outcomes.values()):
            self._refusal = self._refusal or f"exchanges have ended for good. Earlier, {text}"
        if problems:
            raise ReplicaError(text, received)
        return received


def _move(channel: _Channel, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> tuple[bytes, bytes]:
    """Sends and receives at once; returns the digests of what was sent and of what was received."""
    flows = [(outgoing, channel.send, xxhash.xxh3_128()), (incoming, channel.receive, xxhash.xxh3_128())]

    def post(index: int) -> list[Any]:
        return [start(pieces[index]) for pieces, start, _ in flows if index < len(pieces)]

    works = post(0)
    for index in range(max(len(outgoing), len(incoming))):
        following = post(index + 1)
        for work in works:
            work.wait()
        for pieces, _, hasher in flows:
            if index < len(pieces):
                hasher.update(pieces[index].numpy().data)  # a view; the hash releases the interpreter lock
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
    store: Store | None = None,
) -> dict[Transfer, torch.Tensor | None]:
    """Brings parts from the ranks that have them to the ranks that need them.

    All ranks that occur in ``transfers`` call it with the same list in the same order (but for the paths); others may,
    and return at once. The connections are made for this call and end with it.

    Args:
        rank: This rank.
        transfers: What is to be brought where.
        reserve: Called at the destination; returns memory for at least the size of the transfer. If it raises, that
            part is not received; the rest goes on.
        prefix: As for :class:`Replicas`.
        timeout: How long a rank may take to come, and then for each 64 MiB.
        store: As for :class:`Replicas`.

    Returns:
        For every transfer to this rank the bytes that the source has read, in the memory that was reserved; ``None`` if
        they could not be read or were not received whole, and the log says why. That they arrived as they were read is
        certain; whether the file was intact is for the reader of the part to check.

    Raises:
        ReplicaError: If a rank did not come or was lost; nothing is known then of the transfers that were left.
    """
    for transfer in transfers:
        if transfer.source == transfer.destination or transfer.size < 0:
            raise ValueError(f"{transfer} ({transfer.size} bytes) is not a transfer between two ranks")
    own = {each: each.source + each.destination - rank for each in transfers if rank in (each.source, each.destination)}
    channels = _connect(store, prefix, rank, set(own.values()), timeout)
    fetched: dict[Transfer, torch.Tensor | None] = {}
    try:
        for number, transfer in enumerate(transfers):
            if transfer not in own:
                continue
            channel = channels[own[transfer]]
            # The other rank may be at work on any of those before it. If it dies meanwhile, the connection says so.
            patience = timeout * (1 + number)
            if rank == transfer.source:
                _give(channel, number, transfer, patience)
            else:
                fetched[transfer] = _take(channel, number, transfer, reserve, patience)
    except RuntimeError as error:
        raise ReplicaError(f"the transfer of {transfer} has failed: {_explain(error, timeout)}") from error
    finally:
        for channel in channels.values():
            channel.close()
    return fetched


def _give(channel: _Channel, number: int, transfer: Transfer, patience: timedelta) -> None:
    problem, hasher = "", xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_open_part(transfer))
        except OSError as error:
            problem, pieces = str(error), []
            channel.say(_Message(number, -1, text=transfer.part)).wait(patience)
        else:
            pieces = _discarding(transfer.size)
            channel.say(_Message(number, transfer.size, text=transfer.part)).wait(patience)
        for piece in pieces:
            problem = problem or _read(file, piece)
            channel.send(piece).wait()  # after a problem just anything, so that the two ranks remain in step
            hasher.update(piece.numpy().data)
    if problem:
        log.warning("The transfer of %s is not possible: %s", transfer, problem)
    size = -1 if problem else transfer.size
    channel.say(_Message(number, size, digest=hasher.digest(), text=problem)).wait()


def _open_part(transfer: Transfer) -> BinaryIO:
    if transfer.path is None:
        raise FileNotFoundError("the source has no path for it")
    # A pipe in that place would be a mistake, but not one to hang for.
    file = open(transfer.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if (size := os.fstat(file.fileno()).st_size) == transfer.size:
        return file
    file.close()
    raise OSError(f"{transfer.path} has {size} bytes, not the {transfer.size} of this part")


def _read(file: BinaryIO, piece: torch.Tensor) -> str:
    """Fills ``piece``, or says why not."""
    try:
        count = file.readinto(piece.numpy().data)  # type: ignore[attr-defined]
    except OSError as error:
        return f"it cannot be read: {error}"
    return "" if count == piece.numel() else "the file has become shorter while it was read"


def _take(
    channel: _Channel,
    number: int,
    transfer: Transfer,
    reserve: Callable[[Transfer], torch.Tensor],
    patience: timedelta,
) -> torch.Tensor | None:
    opening = channel.hear(patience)
    if (opening.number, opening.text) != (number, transfer.part) or opening.size not in (-1, transfer.size):
        raise RuntimeError(
            f"the two have different lists: it sends {opening.text} with {opening.size} bytes as number "
            f"{opening.number}, this rank expects {transfer.part} with {transfer.size} as number {number}"
        )
    memory, problem, digest = None, "", b""
    if opening.size >= 0:
        try:
            memory = _require_bytes(reserve(transfer), transfer.size)
        except Exception as error:
            problem = f"there is no place for its {transfer.size} bytes: {error!r}"
        _, digest = _move(channel, [], _discarding(transfer.size) if memory is None else _pieces(memory, transfer.size))
    closing = channel.hear()
    if closing.size < 0:
        problem = f"the source could not read it ({closing.text})"
    elif closing.digest != digest:
        problem = "it was damaged on the way (the digest differs)"
    if problem:
        log.warning("The transfer of %s has failed: %s", transfer, problem)
        return None
    return memory
