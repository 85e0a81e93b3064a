"""Streams, events and host memory of an accelerator, for copies of a state to the host.

All calls use torch's interface for any accelerator (:func:`torch.get_device_module`). Features that only CUDA and ROCm
have are used only in this file; other accelerators do without them.
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
    """The accelerator that ``tensor`` is on; ``None`` for the host and the meta device."""
    return None if tensor.device.type in ("cpu", "meta") else tensor.device


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream on which this process copies states from ``device``.

    There is one for all copies: torch takes streams from a pool of 32, so repeated requests for a new one would return
    streams that others use, such as NCCL.
    """
    return torch.get_device_module(device).Stream(device)


def mark(device: torch.device, timed: bool = False) -> Any:
    """Records an event on the current stream of ``device``."""
    module = torch.get_device_module(device)
    return module.current_stream(device).record_event(_event(module, timed))


def _event(module: Any, timed: bool = False) -> Any:
    try:
        return module.Event(enable_timing=timed, blocking=True)  # a wait sleeps instead of spinning on a core
    except TypeError:
        return module.Event(enable_timing=timed)


@contextlib.contextmanager
def at_work_for(devices: Iterable[torch.device]) -> Iterator[None]:
    """Context for work on ``devices`` in another thread than the training thread.

    A thread begins on device 0. Its first call of the runtime, even a wait for an event, would create a context there:
    half a gigabyte for each process of the node. And while the training records a CUDA graph, calls that wait or
    register memory would break the recording, unless their thread has declared that it takes no part in it.
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
    """Makes :func:`side_stream` the current stream. Enter it once for many copies, since entering takes time."""
    module, stream = torch.get_device_module(device), side_stream(device)
    with module.device(device), module.stream(stream):
        yield stream


def end_of(stream: Any) -> Any:
    """Records an event on ``stream``."""
    return stream.record_event(_event(torch.get_device_module(stream.device)))


def is_recording(device: torch.device) -> bool:
    """Whether this thread is capturing a graph: then kernels are recorded, not launched."""
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


@functools.cache
def _capture_mode_function() -> Callable[[Any], int] | None:
    """``cudaThreadExchangeStreamCaptureMode``, which torch uses for its own threads but does not expose."""
    for version, library, name in (
        (torch.version.cuda, "libcudart.so", "cudaThreadExchangeStreamCaptureMode"),
        (torch.version.hip, "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
    ):
        if version is not None:
            with contextlib.suppress(OSError, AttributeError):  # this name finds the library that torch has loaded
                function: Callable[[Any], int] = getattr(ctypes.CDLL(f"{library}.{version.split('.')[0]}"), name)
                return function
    return None


def _exchange_capture_mode(mode: int) -> int | None:
    """Sets this thread's mode for graphs that other threads record; returns the previous mode, ``None`` on failure."""
    function = _capture_mode_function()
    value = ctypes.c_int(mode)
    return None if function is None or function(ctypes.byref(value)) else value.value


def has_work(device: torch.device) -> bool:
    """Whether the default stream of ``device`` has unfinished work; callable from any thread, without a wait."""
    with at_work_for([device]):
        # The current stream of this thread is the default stream, since this thread has chosen no other.
        return not torch.get_device_module(device).current_stream(device).query()


def why_unusable(device: torch.device, within_s: float) -> str | None:
    """Why this process cannot use ``device`` any more (some errors last until the process ends); ``None`` if it can.

    Args:
        device: An accelerator; for the host the result is always ``None``.
        within_s: How many seconds the device may take for the work it has already and for a small test.
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
    """Frees the memory of ``device`` that torch caches."""
    if device.type != "cpu" and (release := getattr(torch.get_device_module(device), "empty_cache", None)) is not None:
        release()


# Host memory


class Registration:
    """Host memory into which a device writes directly: at the speed of the bus, while the host does other things.

    The registration lasts for the lifetime of this object, which keeps the memory mapped.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device, runtime: Any) -> None:
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if error:
            raise OSError(f"error {error} of its runtime")
        # Not at the end of the process, which frees everything anyway; the runtime may be gone by then.
        weakref.finalize(self, _unregister, memory, device, runtime, os.getpid()).atexit = False


def _unregister(memory: torch.Tensor, device: torch.device, runtime: Any, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has no access to the device
        with at_work_for([device]):
            runtime.cudaHostUnregister(memory.data_ptr())


_not_registered: set[torch.device] = set()


def register(memory: torch.Tensor, device: torch.device | None) -> Registration | None:
    """Registers ``memory`` with ``device``, which then writes into it directly; ``None`` where that is not possible.

    A failure is logged once per device and not tried again.

    Args:
        memory: One contiguous piece. If it is mapped from a file, the file must not be truncated: the device would keep
            writing into the pages that were cut off.
        device: The device to copy from; ``None`` for the host.
    """
    if device is None or device in _not_registered or not memory.nbytes:
        return None
    runtime_of = getattr(torch.get_device_module(device), "cudart", None)
    if runtime_of is None:  # only CUDA and ROCm can register existing memory
        return None

    def work() -> Registration:
        with at_work_for([device]):
            return Registration(memory, device, runtime_of())

    # A failure stays the last error of its thread; torch would take it for an error of the next kernel launched there.
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
    """Measures how long the training stands still, from the creation of this object to :meth:`over`.

    With an accelerator this is the time in which the accelerator has nothing to do. The host runs ahead of it, so a
    wait of the host costs nothing while the device is still at work.

    Args:
        devices: The accelerators on which the training runs; empty if it runs on the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # While a graph is being recorded, its device is not timed.
        self._began = {device: mark(device, timed=True) for device in devices if not is_recording(device)}
        self._ended: dict[torch.device, Any] = {}
        self._since = time.perf_counter()
        self._host_s = 0.0

    def over(self) -> None:
        """Call it when the training continues."""
        self._host_s = time.perf_counter() - self._since
        self._ended = {device: mark(device, timed=True) for device in self._began if not is_recording(device)}

    def seconds(self) -> float:
        """Length of the standstill. Waits until the devices have reached its end: not for the training thread."""
        if not self._ended:
            return self._host_s
        with at_work_for(self._ended):
            for ended in self._ended.values():
                ended.synchronize()
            return max(float(self._began[device].elapsed_time(ended)) for device, ended in self._ended.items()) / 1e3
