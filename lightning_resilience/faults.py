"""Injects a fault once per run. Imports no Lightning, and torch only when needed.

A :class:`SimulatedFault` describes a fault, its rank and time; a :class:`FaultInjector` injects it in one process.
Random choices are the same on all ranks without communication. The rank records the fault in the run's ledger before it
injects the fault, and a recorded fault is never injected again: not after a restart, not in the next job, not in
another fit of the script.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_resilience._output import log_line
from lightning_resilience.run.events import FaultInjected
from lightning_resilience.run.history import read_history
from lightning_resilience.run.ledger import Ledger

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FaultType = Literal[
    "random",
    "rank_killed",
    "rank_hung",
    "exception",
    "stuck_in_collective",
    "stuck_in_data_loader",
    "gil_held",
    "slow_rank",
    "nan_loss",
    "sigterm",
    "node_lost",
]
"""The faults that can be simulated, see :class:`SimulatedFault`."""

_RANDOM_CHOICE: tuple[FaultType, ...] = ("rank_killed", "rank_hung")
_INJECTED_AT_ONCE: frozenset[FaultType] = frozenset({"rank_killed", "rank_hung", "sigterm", "node_lost"})
"""Faults that are a signal, which is sent wherever the main thread is. The main thread injects the other faults, at a
boundary between two batches."""

_OTHER_SPELLINGS = {"base_delay": "base_delay_s", "rand_delay": "rand_delay_s", "rank_to_fail": "rank"}


class SimulatedException(RuntimeError):
    """The exception that the fault ``exception`` raises."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """A fault to inject, its rank and time.

    ========================  =====================================================================================
    ``rank_killed``           the rank gets SIGKILL
    ``rank_hung``             the rank gets SIGSTOP
    ``random``                one of the two above
    ``exception``             the rank raises :class:`SimulatedException` in its main thread
    ``stuck_in_collective``   the rank waits in ``torch.distributed`` for a message that no rank sends, and so never
                              enters the collective in which the other ranks wait for it
    ``stuck_in_data_loader``  the rank's training data loader gives no further batch: its workers, or the rank itself
                              if it has none, are stuck in the ``collate_fn``
    ``gil_held``              the rank is stuck in C code that holds the interpreter lock: none of its Python threads
                              runs, nor any handler of a signal
    ``slow_rank``             the rank takes ``slow_s`` longer for every batch, until its process or the fit ends
    ``nan_loss``              the rank's next training loss, and with it every gradient, is NaN
    ``sigterm``               the rank gets SIGTERM, as from a scheduler that wants the node back
    ``node_lost``             every rank on the rank's node gets SIGKILL
    ========================  =====================================================================================

    The fault happens once per run, ``base_delay_s + U(0, 1) * rand_delay_s`` seconds (NVRx's formula) after training
    has begun, or after ``at_step``. A fault that is not a signal then waits for the next boundary between two training
    batches. ``stuck_in_data_loader`` takes effect after the batches that its workers have fetched ahead.

    Args:
        fault_type: The kind of fault.
        rank: The global rank to which it happens; ``None``: a random rank.
        base_delay_s: Minimum seconds to wait.
        rand_delay_s: Maximum seconds to wait in addition.
        at_step: ``trainer.global_step`` from which on it may happen; ``None``: from the start of training.
        slow_s: Seconds by which ``slow_rank`` slows each batch; no effect on other faults.

    Raises:
        ValueError: If an argument has an invalid value.
    """

    fault_type: FaultType
    rank: int | None = None
    base_delay_s: float = 0.0
    rand_delay_s: float = 0.0
    at_step: int | None = None
    slow_s: float = 1.0

    def __post_init__(self) -> None:
        if self.fault_type not in get_args(FaultType):
            raise ValueError(f"fault_type must be one of {', '.join(get_args(FaultType))}, not {self.fault_type!r}.")
        for name in ("rank", "at_step"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{name} of a simulated fault must be None or an integer from 0 on, not {value!r}.")
        for name in ("base_delay_s", "rand_delay_s", "slow_s"):
            value = getattr(self, name)
            if isinstance(value, timedelta):
                value = value.total_seconds()
                object.__setattr__(self, name, value)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= threading.TIMEOUT_MAX:
                raise ValueError(f"{name} of a simulated fault must be a number of seconds from 0 on, not {value!r}.")

    @classmethod
    def parse(cls, value: Any) -> SimulatedFault | None:
        """Parses the description of a fault.

        Args:
            value: ``None`` (no fault), a :class:`SimulatedFault`, a mapping with the names of its arguments, or another
                object with such attributes. The names of NVRx and NeMo, ``base_delay``, ``rand_delay`` and
                ``rank_to_fail``, are accepted too.

        Raises:
            TypeError: If ``value`` is none of these.
            ValueError: If it has an unknown name, or an argument has an invalid value.
        """
        if value is None or isinstance(value, cls):
            return value
        own = [field.name for field in fields(cls)]
        if isinstance(value, Mapping):
            given = dict(value)
        else:
            given = {name: getattr(value, name) for name in (*own, *_OTHER_SPELLINGS) if hasattr(value, name)}
            if "fault_type" not in given:
                raise TypeError(
                    "A simulated fault must be None, a SimulatedFault, a mapping or an object with its attributes, "
                    f"not {value!r}."
                )
        arguments: dict[str, Any] = {}
        for name, argument in given.items():
            own_name = _OTHER_SPELLINGS.get(name, name)
            if own_name not in own:
                raise ValueError(f"A simulated fault has no {name!r}; it has {', '.join(own)}.")
            if own_name in arguments:
                raise ValueError(f"A simulated fault is given {own_name} twice, once as {name!r}.")
            arguments[own_name] = argument
        if "fault_type" not in arguments:
            raise ValueError(f"A simulated fault needs a fault_type, one of {', '.join(get_args(FaultType))}.")
        return cls(**arguments)


class FaultInjector:
    """Injects a simulated fault in this process, if this process is the fault's rank.

    The training calls :meth:`arm` when it begins, :meth:`at_step` between two batches and :meth:`disarm` at its end;
    :meth:`collate` and :meth:`spoil_loss` are for the two faults that happen elsewhere.

    Args:
        fault: The fault.
        rank: This process's global rank.
        world_size: The number of ranks of the run.
        ledger: The ledger in which the fault is recorded and looked up.
        seed: The only source of all random choices. It differs from run to run, and is the same on all ranks.
        device: The device on which tensors must be for the run's collectives.
        node_pids: Returns the process ids of all ranks on this node, for ``node_lost``; called when it happens.

    Attributes:
        fault_type: The fault that will happen; never ``random``.
        target_rank: The rank to which it will happen.
        delay_s: Seconds from the start of training, or from ``at_step``.
    """

    def __init__(
        self,
        fault: SimulatedFault,
        *,
        rank: int,
        world_size: int,
        ledger: Ledger,
        seed: str,
        device: torch.device | str = "cpu",
        node_pids: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        chance = random.Random(seed)
        any_rank, any_type, part = chance.randrange(world_size), chance.choice(_RANDOM_CHOICE), chance.random()
        self.target_rank: int = any_rank if fault.rank is None else fault.rank
        self.fault_type: FaultType = any_type if fault.fault_type == "random" else fault.fault_type
        self.delay_s: float = fault.base_delay_s + part * fault.rand_delay_s
        self._fault = fault
        self._rank = rank
        self._world_size = world_size
        self._ledger = ledger
        self._device = device
        self._node_pids = node_pids
        self._is_armed = False
        self._step = 0
        self._timer: threading.Timer | None = None
        # A healthy boundary reads only this: the step from which on there is something to do, and what to do.
        self._busy_from: float = math.inf
        self._next: Callable[[], None] = self._await_delay
        self._loader_is_stuck: Any = None  # seen by the data-loader workers, too
        self._spoils_loss = False

    def arm(self, step: int = 0) -> None:
        """Arms the fault when training begins, unless it has already happened in this run.

        Args:
            step: ``trainer.global_step``, which is not 0 after a resume.
        """
        self._step = step
        if self.target_rank >= self._world_size:
            self._leave_out(f"there is no rank {self.target_rank} among {self._world_size}")
        elif self.fault_type == "stuck_in_collective" and self._world_size == 1:
            self._leave_out("a single rank has no collectives")
        elif self._rank == self.target_rank:
            happened = self._has_happened()
            if happened is None:
                self._leave_out(f"{self._ledger.path}, which records whether it has happened before, cannot be read")
            elif not happened:
                self._is_armed = True
                if self._fault.at_step is None:
                    self._start_timer()
                else:
                    self._busy_from = self._fault.at_step

    def at_step(self, step: int) -> None:
        """Injects the fault if it is due; the main thread calls this between two training batches.

        Args:
            step: ``trainer.global_step``.

        Raises:
            SimulatedException: If the fault is ``exception``.
        """
        self._step = step
        if step >= self._busy_from:
            self._next()

    def collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the ``collate_fn`` for a training data loader; set it before the loader's workers are started."""
        if self.fault_type != "stuck_in_data_loader" or self._rank != self.target_rank:
            return collate_fn
        if self._loader_is_stuck is None:
            self._loader_is_stuck = RawValue(ctypes.c_bool, False)
        return collate_fn if isinstance(collate_fn, _Collate) else _Collate(collate_fn, self._loader_is_stuck)

    def spoil_loss(self, output: Any) -> None:
        """Makes a loss NaN, if that is the fault and it is due. Call it before the backward pass of the loss.

        Args:
            output: The loss, a mapping that has it as ``"loss"``, or anything else, which is not changed.
        """
        if not self._spoils_loss:
            return
        import torch

        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            return
        self._spoils_loss = False
        loss.data.fill_(math.nan)  # not loss.fill_(): autograd may have kept this very tensor, and would refuse
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        """Disarms the fault when training ends, so that it cannot happen any more. Harmless if repeated."""
        if self._timer is not None:
            self._timer.cancel()
        self._busy_from = math.inf
        if self._is_armed:
            self._is_armed = False
            log.warning(
                "The simulated fault %s on rank %d did not happen: the fit ended at step %d.",
                self.fault_type,
                self._rank,
                self._step,
            )

    def _leave_out(self, reason: str) -> None:
        if self._rank in (0, self.target_rank):
            log.warning("The simulated fault %s is skipped: %s.", self.fault_type, reason)

    def _has_happened(self) -> bool | None:
        """Whether the fault is in the ledger; ``None`` if the ledger cannot be read."""
        mine = asdict(self._fault)
        try:
            events = [event for event in read_history(self._ledger.path).events if isinstance(event, FaultInjected)]
        except OSError:
            return None
        return any(event.fault == mine for event in events)

    def _await_delay(self) -> None:
        self._busy_from = math.inf
        if self.delay_s > 0:
            self._start_timer()
        else:
            self._inject()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self.delay_s, self._delay_is_over)
        self._timer.daemon = True
        self._timer.start()

    def _delay_is_over(self) -> None:
        if self.fault_type in _INJECTED_AT_ONCE:
            self._inject()
        else:
            self._next = self._inject
            self._busy_from = 0

    def _inject(self) -> None:
        self._busy_from = math.inf
        self._is_armed = False
        if self.fault_type == "stuck_in_data_loader" and self._loader_is_stuck is None:
            self._leave_out("the training data do not come from a torch DataLoader")
            return
        self._ledger.record(
            FaultInjected(fault=asdict(self._fault), fault_type=self.fault_type, step=self._step, pid=os.getpid())
        )
        if not self._has_happened():
            self._leave_out(f"{self._ledger.path} cannot record it, so it would happen again after every restart")
            return
        log_line(f"Simulated fault: {self.fault_type} on rank {self._rank} at step {self._step}.")
        match self.fault_type:
            case "rank_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "rank_hung":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "node_lost":
                _kill([*(pid for pid in self._node_pids() if pid != os.getpid()), os.getpid()])
            case "exception":
                raise SimulatedException(f"simulated on rank {self._rank} at step {self._step}")
            case "stuck_in_collective":
                self._wait_for_no_message()
            case "stuck_in_data_loader":
                self._loader_is_stuck.value = True
            case "gil_held":
                _hold_interpreter_lock()
            case "nan_loss":
                self._spoils_loss = True
            case "slow_rank":
                self._next = self._slow_down
                self._busy_from = 0
                self._slow_down()

    def _wait_for_no_message(self) -> None:
        import torch

        # A receive from one rank is not part of any collective, so it does not disturb the other ranks.
        message = torch.zeros(1, device=self._device)
        torch.distributed.recv(message, src=(self._rank + 1) % self._world_size)
        message.item()  # NCCL's recv returns when it is enqueued

    def _slow_down(self) -> None:
        time.sleep(self._fault.slow_s)


class _Collate:
    """A ``collate_fn`` that gets stuck. It is picklable if the loader's own is, for workers that are spawned.

    Args:
        inner: The loader's own ``collate_fn``.
        is_stuck: A boolean in shared memory.
    """

    def __init__(self, inner: Callable[[Any], Any], is_stuck: Any) -> None:
        self.inner = inner
        self.is_stuck = is_stuck

    def __call__(self, samples: Any) -> Any:
        """Runs where the loader fetches batches: in a worker, or in the rank itself."""
        while self.is_stuck.value:
            time.sleep(3600)
        return self.inner(samples)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended
            continue


def _hold_interpreter_lock() -> None:
    """Takes a mutex twice in a call that keeps the interpreter lock, as a deadlock in an extension module would.

    A sleep or a pause would end at the first signal that has a handler; a mutex does not.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER on Linux
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
