"""Streams, events and host memory of an accelerator, for copies of a state to the host.

Everything goes through torch's names for any accelerator (:func:`torch.get_device_module`). What only CUDA and ROCm
have is in this file, and is done without elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_resilience._daemon import in_daemon_thread

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def accelerator(tensor: torch.Tensor) -> torch.device | None:
    """The device that ``tensor`` is on, if that works beside the host."""
    return None if tensor.device.type in ("cpu", "meta") else tensor.device


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream on which this process copies states from ``device``.

    One for all copies: torch takes streams from a pool of 32, so repeated requests for a new one return those of
    others, such as NCCL.
    """
    return torch.get_device_module(device).Stream(device)


def mark(device: torch.device, timed: bool = False) -> Any:
    """Records an event on the current stream of ``device``."""
    module = torch.get_device_module(device)
    return module.current_stream(device).record_event(_event(module, timed))


def _event(module: Any, timed: bool = False) -> Any:
    try:
        return module.Event(enable_timing=timed, blocking=True)  # a wait that sleeps, and does not spin on a core
    except TypeError:
        return module.Event(enable_timing=timed)


@contextlib.contextmanager
def at_work_for(devices: Iterable[torch.device]) -> Iterator[None]:
    """For work on ``devices`` in another thread than that of the training.

    A thread begins on the device 0, where its first call of the runtime, be it to wait for an event, would make a
    context: half a gigabyte for each process of the node. And while the training records a CUDA graph, calls that wait
    or register memory would break the recording, unless their thread has said that it has no part in it.
    """
    device = next(iter(devices), None)
    if device is None:
        yield
        return
    with torch.get_device_module(device).device(device):
        mode = _exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            if mode is not None:
                _exchange_capture_mode(mode)


@contextlib.contextmanager
def on_side_stream(device: torch.device) -> Iterator[Any]:
    """Makes :func:`side_stream` the current stream; once around many copies, since it takes time."""
    module, stream = torch.get_device_module(device), side_stream(device)
    with module.device(device), module.stream(stream):
        yield stream


def end_of(stream: Any) -> Any:
    """Records an event on ``stream``."""
    return stream.record_event(_event(torch.get_device_module(stream.device)))


def is_recording(device: torch.device) -> bool:
    """Whether this thread is capturing a graph: kernels are recorded, not launched."""
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


@functools.cache
def _capture_mode_function() -> Callable[[Any], int] | None:
    """``cudaThreadExchangeStreamCaptureMode``: torch uses it for its own threads, and does not pass it on."""
    for version, library, name in (
        (torch.version.cuda, "libcudart.so", "cudaThreadExchangeStreamCaptureMode"),
        (torch.version.hip, "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        if version is not None:
            with contextlib.suppress(OSError, AttributeError):  # the one that torch has loaded is found by this name
                function: Callable[[Any], int] = getattr(ctypes.CDLL(f"{library}.{version.split('.')[0]}"), name)
                return function
    return None


def _exchange_capture_mode(mode: int) -> int | None:
    """Sets how this thread stands to graphs that other threads record; returns how before, if it could be set."""
    function = _capture_mode_function()
    value = ctypes.c_int(mode)
    return None if function is None or function(ctypes.byref(value)) else value.value


def has_work(device: torch.device) -> bool:
    """Whether ``device`` has not done all that it was given on its default stream; for any thread, without a wait."""
    with at_work_for([device]):
        # That of this thread, which has chosen none.
        return not torch.get_device_module(device).current_stream(device).query()


def why_unusable(device: torch.device, within_s: float) -> str | None:
    """Why this process cannot use ``device`` any more: some errors stay until it ends. ``None``: it can.

    Args:
        device: An accelerator; for the host it is always ``None``.
        within_s: How long it may take, with all that it was given before.
    """
    if device.type == "cpu":
        return None

    def work() -> None:
        module = torch.get_device_module(device)
        with module.device(device):
            module.synchronize(device)
            torch.zeros(1, device=device).add_(1).item()

    try:
        in_daemon_thread(work, "probes-device").result(within_s)
    except concurrent.futures.TimeoutError:
        return f"{device} does not respond within {within_s:g} s"
    except Exception as error:
        return f"{device} can no longer be used ({(str(error) or type(error).__name__).splitlines()[0]})"
    return None


def release_memory(device: torch.device) -> None:
    """Gives back what torch keeps of the memory of ``device`` for later."""
    if device.type != "cpu" and (release := getattr(torch.get_device_module(device), "empty_cache", None)) is not None:
        release()


# Host memory


class Registration:
    """Host memory that a device writes into by itself: at the speed of the bus, and while the host does other things.

    For as long as this object is there. The memory stays mapped until then.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device, runtime: Any) -> None:
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if error:
            raise OSError(f"error {error} of its runtime")
        # Not at the end of the process, which gives everything back anyway; the runtime may be gone by then.
        weakref.finalize(self, _unregister, memory, device, runtime, os.getpid()).atexit = False


def _unregister(memory: torch.Tensor, device: torch.device, runtime: Any, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has nothing of the device
        with at_work_for([device]):
            runtime.cudaHostUnregister(memory.data_ptr())


_not_registered: set[torch.device] = set()


def register(memory: torch.Tensor, device: torch.device | None) -> Registration | None:
    """Registers ``memory`` with ``device``, which then writes into it directly; ``None`` where that is not possible.

    A failure is logged once, and not tried again.

    Args:
        memory: One piece. The file that it is mapped from, if any, must not be cut: the device would go on writing
            into the pages that were cut off.
        device: That is copied from; ``None`` for the host.
    """
    if device is None or device in _not_registered or not memory.nbytes:
        return None
    runtime_of = getattr(torch.get_device_module(device), "cudart", None)
    if runtime_of is None:  # only CUDA and ROCm can have memory registered that is there already
        return None

    def work() -> Registration:
        with at_work_for([device]):
            return Registration(memory, device, runtime_of())

    # What fails stays the last error of its thread, which torch would take for that of the next kernel launched there.
    try:
        return in_daemon_thread(work, "registers-memory").result()
    except (OSError, RuntimeError) as error:
        _not_registered.add(device)
        log.warning(
            "Memory for checkpoints cannot be registered with %s (%s): copies are several times as slow.",
            device,
            error,
        )
        return None


# Time


class Standstill:
    """For how long the training stands still, from here to :meth:`over`.

    With an accelerator that is the time for which this has nothing to do. The host runs ahead of it, so what the host
    waits for while the device is still at work costs nothing.

    Args:
        devices: On which the training runs; none: on the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # In a graph that is being recorded nothing is timed.
        self._began = {device: mark(device, timed=True) for device in devices if not is_recording(device)}
        self._ended: dict[torch.device, Any] = {}
        self._since = time.perf_counter()
        self._host_s = 0.0

    def over(self) -> None:
        """The training goes on."""
        self._host_s = time.perf_counter() - self._since
        self._ended = {device: mark(device, timed=True) for device in self._began if not is_recording(device)}

    def seconds(self) -> float:
        """How long it was; waits until the devices have come to its end, so not for the thread of the training."""
        if not self._ended:
            return self._host_s
        with at_work_for(self._ended):
            for ended in self._ended.values():
                ended.synchronize()
            return max(float(self._began[device].elapsed_time(ended)) for device, ended in self._ended.items()) / 1e3
