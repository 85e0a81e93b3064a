"""What only this rank knows at a boundary, besides random states: the values of its metrics and buffers.

They are written to node memory as numbers and tensors (:mod:`~lightning_resilience.elastic.own_part`), and read from
there after the loss of the rank (:mod:`.last_boundary`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import xxhash

from lightning_resilience._lightning import lightning_boundary, lightning_data, lightning_loggers
from lightning_resilience.elastic.own_part import OwnPart
from lightning_resilience.fit.logger_files import LogPosition

if TYPE_CHECKING:
    from lightning_resilience.fit.session import FitSession

_MOST_COPIED = 100
_MOST_COPIED_BYTES = 1 << 18
"""How many tensors are copied at each boundary, at most: copying more takes longer than a step may be delayed."""


class StateUnknown(Exception):
    """The state of the last boundary is not known; the message has the reason."""


class OwnValues:
    """Metrics and buffers of this rank: numbers, tensors with one element, and other tensors.

    Args:
        session: The fit.

    Raises:
        StateUnknown: If a metric or buffer is of another kind.
    """

    def __init__(self, session: FitSession) -> None:
        trainer, module = session.fit.trainer, session.fit.module
        self.names = lightning_boundary.names_of_metrics(trainer)
        self._no_states = session.exact.workers.no_states(lightning_data.train_loaders(trainer))
        self.size_of_absent = 8 + self._no_states.nbytes
        self._numbers: list[tuple[lightning_boundary.Place, type]] = []
        self._scalars: list[tuple[lightning_boundary.Place, torch.Tensor]] = []
        self._places: list[lightning_boundary.Place] = []
        self._tensors: list[torch.Tensor] = []
        self._is_buffer: list[bool] = []
        self.constants: list[torch.Tensor] = []
        kinds = []
        places = lightning_boundary.metric_places(trainer, module)
        for name, place in places.items():
            kinds.append((name, self._add(name, place, is_buffer=False)))
        buffers = lightning_boundary.buffer_places(trainer, module)
        taken = set()
        room = _MOST_COPIED_BYTES - sum(each.nbytes for each in self._tensors)
        for name, place in sorted(buffers.items(), key=lambda item: item[1][0][item[1][1]].nbytes):
            buffer = place[0][place[1]]
            if id(buffer) in taken:
                continue
            taken.add(id(buffer))
            if buffer.nbytes > room or len(self._tensors) >= _MOST_COPIED:
                self.constants.append(buffer)
            else:
                room -= buffer.nbytes
                kinds.append((name, self._add(name, place, is_buffer=True)))
        if room < 0 or len(self._tensors) + len(self._scalars) > 2 * _MOST_COPIED:
            raise StateUnknown("there are too many metrics")
        kinds.append(("workers", str(len(self._no_states))))
        self.layout = xxhash.xxh3_64_intdigest(repr(kinds).encode())
        self._of_logs = len(LogPosition(0, 0)) * len(lightning_loggers.file_loggers(trainer))
        of_tensors = sum(each.nbytes + 8 for each in [*self._tensors, self._no_states])
        self.size = 8 * (len(kinds) + 2 + self._of_logs) + of_tensors

    def _add(self, name: str, place: lightning_boundary.Place, is_buffer: bool) -> str:
        value = place[0][place[1]]
        if type(value) in (bool, int, float):
            self._numbers.append((place, type(value)))
            return "number"
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
            raise StateUnknown(f"{name} is a {type(value).__name__}")
        if value.numel() == 1 and not is_buffer and not value.is_complex():
            self._scalars.append((place, value.detach()))
        else:
            self._places.append(place)
            self._tensors.append(value.detach() if not is_buffer else value)
            self._is_buffer.append(is_buffer)
            if not value.is_contiguous():
                raise StateUnknown(f"{name} is not contiguous")
        return f"{value.dtype} {tuple(value.shape)}"

    def _check(self, tensors: list[torch.Tensor]) -> None:
        if not all(each.is_contiguous() for each in tensors):
            raise ValueError("a tensor has gaps")

    def read(
        self, begun: int, worker_states: torch.Tensor | None, logs: Sequence[LogPosition]
    ) -> tuple[list[float], list[torch.Tensor]]:
        """The present numbers and tensors, as an own part takes them.

        Args:
            begun: The position at which the epoch began.
            worker_states: See :attr:`.ExactState.worker_states`.
            logs: How far the loggers have logged; empty if that is not known.

        Raises:
            ValueError: If the shape or type of a tensor, or the number of workers, has changed.
        """
        of_logs = list(itertools.chain(*logs))
        if len(of_logs) != self._of_logs:
            of_logs = [math.nan] * self._of_logs
        numbers = [begun, worker_states is not None, *of_logs, *(d[key] for (d, key), _ in self._numbers)]
        numbers += [d[key].item() for (d, key), _ in self._scalars]
        tensors = [d[key] for d, key in self._places]
        if not all(map(operator.is_, tensors, self._tensors)):
            for now, before in zip(tensors, self._tensors, strict=True):
                if now.shape != before.shape or now.dtype != before.dtype:
                    raise ValueError("a tensor has another shape or type")
            self._check(tensors)
            self._tensors = tensors
        return numbers, [*tensors, self._filled(worker_states)]

    def _filled(self, worker_states: torch.Tensor | None) -> torch.Tensor:
        if worker_states is not None and worker_states.shape != self._no_states.shape:
            raise ValueError("there are other workers")
        return self._no_states if worker_states is None else worker_states

    def read_absent(self, worker_states: torch.Tensor | None) -> tuple[list[float], list[torch.Tensor]]:
        """The same for an absent rank, which has no metrics."""
        return [worker_states is not None], [self._filled(worker_states)]

    def worker_states_of_absent(self, part: OwnPart) -> torch.Tensor | None:
        """The states of data workers in the own part of an absent rank."""
        (is_known,), (worker_states,) = part.values(1, [self._no_states])
        return worker_states if is_known else None

    def write(self, part: OwnPart) -> tuple[int, torch.Tensor | None, list[LogPosition]]:
        """Restores the values of an own part; returns ``begun``, ``worker_states`` and ``logs``.

        Raises:
            StateUnknown: If the part has another layout.
        """
        if part.layout != self.layout:
            raise StateUnknown("ranks have different metrics")
        count = len(self._numbers)
        (begun, is_known, *numbers), (*tensors, worker_states) = part.values(
            2 + self._of_logs + count + len(self._scalars), [*self._tensors, self._no_states]
        )
        of_logs, numbers = iter(numbers[: self._of_logs]), numbers[self._of_logs :]
        for ((owner, key), kind), number in zip(self._numbers, numbers[:count], strict=True):
            owner[key] = kind(number)
        for ((owner, key), like), number in zip(self._scalars, numbers[count:], strict=True):
            owner[key] = torch.full_like(like, number if like.is_floating_point() else int(number))
        for (owner, key), is_buffer, tensor in zip(self._places, self._is_buffer, tensors, strict=True):
            if is_buffer:  # other objects may refer to the buffer
                with torch.no_grad():
                    owner[key].copy_(tensor)
            else:
                owner[key] = tensor
        positions = list(map(LogPosition, of_logs, of_logs, of_logs))
        return int(begun), worker_states if is_known else None, positions
