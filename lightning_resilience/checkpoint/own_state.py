"""Sends the state that a rank does not share with other ranks, such as random states, to rank 0, which saves it.

All ranks know the digests of rank 0 and send only what differs. Small differences are gathered with the other messages
before a save. Larger ones, of ranks with different seeds, go to rank 0 through the store of the job: with a collective
every rank would receive the differences of all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from lightning_resilience.checkpoint.safe_serialization import safe_form
from lightning_resilience.checkpoint.state_difference import Path, Pieces, differing, digests, joined, pieces
from lightning_resilience.checkpoint.store_messages import Receipt, StoreMessages

_GATHERED_BYTES = 3 << 10  # the other gathered data take less than 1 kB
_PATIENCE_S = 60.0
"""Longest wait of rank 0 in which no state arrives: all ranks send right after a collective."""


class OwnState:
    """The own state of this rank at one save; on a rank that writes, the own states of all ranks.

    Call the methods in the order of definition, :meth:`send` only if the save continues; :meth:`keep` is optional.

    Args:
        messages: Messages to rank 0 in this fit.
        number: Number of the save, the same on all ranks.
        rank: This rank.
    """

    def __init__(self, messages: StoreMessages, number: int, rank: int) -> None:
        self._messages = messages
        self._prefix = f"own/{number}"
        self._rank = rank
        self._mine: Pieces = {}
        self._left_out: list[str] = []
        self._is_compared = False
        self._unsent: bytes | None = None
        self._given: list[bytes | None] = []
        self._senders: list[int] = []
        self._receipt: Receipt | None = None

    def keep(self, structure: Any, tensors: Sequence[torch.Tensor], left_out: list[str]) -> None:
        """Takes the state.

        Args:
            structure: As :func:`.safe_serialization.pack` returns it.
            tensors: The tensors of the same call, in host memory. They are copied.
            left_out: Names of the state that could not be kept.
        """
        self._mine, self._left_out = pieces(structure, tensors), left_out

    def digests(self) -> tuple[dict[Path, bytes], bool]:
        """The digests of this rank's state, and whether its messages work. Rank 0 sends its own to all ranks."""
        return digests(self._mine), self._messages.works

    def give(self, first: tuple[dict[Path, bytes], bool] | None) -> bytes | None:
        """The own state that this rank contributes to a gather of all ranks.

        Args:
            first: The result of :meth:`digests` on rank 0. ``None`` if every rank writes: then each receives the whole
                own state of every other rank.

        Returns:
            ``None`` if the state is large; :meth:`send` then sends it to rank 0 only.
        """
        self._is_compared = first is not None
        known, is_read = first or ({}, False)
        different = {} if self._is_compared and self._rank == 0 else differing(self._mine, known)
        own = pickle.dumps((different, self._left_out))
        if is_read and self._messages.works and self._rank > 0 and len(own) > _GATHERED_BYTES:
            self._unsent = own
            return None
        return own

    def send(self, given: list[bytes | None], patience_s: float) -> None:
        """Sends to rank 0 the state that was not gathered; rank 0 begins to receive. Does not wait.

        Args:
            given: The results of :meth:`give` of all ranks.
            patience_s: How many seconds the other ranks may wait for rank 0.
        """
        self._given = given
        if self._unsent is not None:
            self._messages.send(f"{self._prefix}/{self._rank}", self._unsent)
        elif self._rank == 0:
            self._senders = [rank for rank, own in enumerate(given) if own is None]
            keys = [f"{self._prefix}/{rank}" for rank in self._senders]
            self._receipt = self._messages.receive(keys, min(_PATIENCE_S, patience_s), delete=True)

    def of_all(self) -> tuple[list[Any], list[str]]:
        """The own states of all ranks in safe form, and the names of what had to be left out. For any thread.

        Raises:
            RuntimeError: If the state of a rank has not arrived.
        """
        received: dict[int, bytes] = {}
        if self._receipt is not None:
            try:
                received = dict(zip(self._senders, self._receipt.wait(), strict=True))
            except (OSError, RuntimeError) as error:  # also a TimeoutError
                raise RuntimeError(f"the own state of other ranks was not received ({error})") from error
        first = self._mine if self._is_compared else {}
        alike, states, left_out = safe_form(*joined(self._mine, {})), [], dict[str, None]()
        for rank, own in enumerate(self._given):
            different, missing = pickle.loads(received[rank] if own is None else own)  # from ranks of this job
            states.append(safe_form(*joined(first, different)) if different else alike)
            left_out |= dict.fromkeys(missing)
        return states, list(left_out)
