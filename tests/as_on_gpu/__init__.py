"""As on a GPU: a simulated accelerator for tests, as a real device of PyTorch.

``load()`` builds it (once for each environment, half a minute) and makes ``torch.device("fakegpu")`` exist, with
``torch.fakegpu`` beside it as ``torch.cuda`` is beside ``"cuda"``; ``accelerator()`` gives Lightning its part of it.
What it imitates, and how, is said at the top of ``device.cpp`` and ``collectives.cpp``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

NAME = "fakegpu"
_HERE = Path(__file__).parent
_COMPILER = os.environ.get("CXX", "g++")
_DEFAULT_SEED = 67280421310721  # PyTorch's
_PRIVATE_USE_1 = 20  # PyTorch's number of this kind of device


def missing() -> str | None:
    """What it takes to build the device and is not here, if anything."""
    if shutil.which(_COMPILER) is None:
        return f"the simulated accelerator is built with {_COMPILER}, which is not installed"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated accelerator is built with Python's headers, which are not installed (python3-dev)"
    return None


def build() -> None:
    """Builds what is not built yet: before processes begin to wait for each other."""
    for source in _HERE.glob("*.cpp"):
        _build(source.stem)


def _build(name: str) -> Path:
    """The library of a source file; each version of it is built once."""
    source = _HERE / f"{name}.cpp"
    version = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = Path(sys.prefix) / "as_on_gpu" / f"{name}-{version}.so"
    library.parent.mkdir(exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            from torch.utils.cpp_extension import include_paths, library_paths

            folders = [*include_paths(), sysconfig.get_path("include")]
            flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME=as_on_gpu_{name}"]
            made = library.with_suffix(".new")
            command = [_COMPILER, *flags, *(f"-isystem{each}" for each in folders), str(source), "-o", str(made)]
            for each in library_paths():
                command += [f"-L{each}", f"-Wl,-rpath,{each}"]
            subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"], check=True)
            made.rename(library)
    return library


class _FakeGpu(ModuleType):
    """``torch.fakegpu``: what ``torch.cuda`` has, as far as PyTorch, Lightning and this package ask for it."""

    Event = torch.Event

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self._ops = torch.ops.fakegpu
        self._forked = False
        self._is_broken = False
        self._seeds: dict[int, int] = {}
        os.register_at_fork(
            before=self._ops.before_fork,
            after_in_parent=lambda: self._ops.after_fork(False),
            after_in_child=self._after_fork,
        )

    def _after_fork(self) -> None:
        self._ops.after_fork(True)
        self._forked = True

    # -- devices

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return self._forked

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return self._ops.device_count()

    def current_device(self) -> int:
        return self._ops.current_device()

    def set_device(self, device: Any) -> None:
        self._ops.set_device(self._index(device))

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(NAME if device is None else device).index
        return self.current_device() if index is None else index

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    # -- streams

    def Stream(self, device: Any = None, **options: Any) -> torch.Stream:
        return torch.Stream(torch.device(NAME, self._index(device)), **options)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(NAME, self._index(device)))

    def default_stream(self, device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=self._index(device), device_type=_PRIVATE_USE_1)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        device, before = self.current_device(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.set_device(device)

    def synchronize(self, device: Any = None) -> None:
        if self._is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        torch.accelerator.synchronize(torch.device(NAME, self._index(device)))

    # -- random numbers

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._ops.random_state(self._index(device))

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._ops.set_random_state(state, self._index(device))

    def initial_seed(self) -> int:
        return self._seeds.get(self.current_device(), _DEFAULT_SEED)

    def manual_seed(self, seed: int) -> None:
        self._seed(self.current_device(), seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in range(self.device_count()):
            self._seed(device, seed)

    def _seed(self, device: int, seed: int) -> None:
        self._seeds[device] = seed
        self._ops.seed(seed % 2**63, device)

    # -- memory

    def memory_allocated(self, device: Any = None) -> int:
        return self._ops.memory(self._index(device), False)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._ops.memory(self._index(device), True)

    def empty_cache(self) -> None:
        pass

    def cudart(self) -> Any:
        """What of CUDA's runtime registers memory of the host."""
        return _Runtime(self._ops)

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self._ops.refuse_syncs(mode in ("error", 2))

    # -- what only tests ask for

    def lag(self, by: int, ticks: bool = False) -> None:
        """Work that nobody waits for is done when the device has run so many more operators, or after so many ticks."""
        self._ops.set_lag(by, not ticks)

    def tick(self) -> None:
        self._ops.tick()

    def occupy(self, seconds: float) -> None:
        """The device is busy for so long before it comes to what the current stream is given next."""
        self._ops.occupy(seconds)

    def waits_of_the_host(self) -> int:
        """How often this thread has read from the device, or copied in a way that waits for it."""
        return self._ops.syncs()

    def contexts(self) -> list[int]:
        """The devices that this process has begun to use."""
        return self._ops.contexts()

    def break_down(self) -> None:
        """Whoever waits for the device gets an error from now on, until the process ends."""
        self._is_broken = True

    def registered(self) -> int:
        """How many pieces of the host's memory are registered."""
        return len(_Runtime.registered)

    def check_races(self, whether: bool) -> None:
        self._ops.check_races(whether)


class _Runtime:
    registered: ClassVar[set[int]] = set()

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._ops.pin(address, size)
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.discard(address)
        return 0 if self._ops.unpin(address) else 1


def load() -> Any:
    """Builds and loads the device; returns ``torch.fakegpu``."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(_build("device"))
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _FakeGpu())
        torch.utils.generate_methods_for_privateuse1_backend()
        # Lightning's strategies ask torch.cuda for a stream, whatever the device is.
        torch.cuda.Stream, torch.cuda.stream = torch.fakegpu.Stream, torch.fakegpu.stream
    return getattr(torch, NAME)


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def collectives() -> str:
    """Builds and registers the backend of collectives; returns its name."""
    name = "fakenccl"
    if not hasattr(torch.distributed.Backend, name.upper()):
        import importlib.util

        from lightning_resilience.elastic import group  # not before pytest has set up logging

        path = _build("collectives")
        spec = importlib.util.spec_from_file_location("as_on_gpu_collectives", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
            before = _sockets()
            gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
            return module.FakeNccl(gloo, sorted(_sockets() - before))

        torch.distributed.Backend.register_backend(name, make, devices=[NAME])
        group.ABORTABLE.add(name)
        begin = torch.distributed.init_process_group

        def without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
            begin(*args, **kwargs)  # with it, groups would be split, which is not imitated

        torch.distributed.init_process_group = without_device
    return name


def accelerator() -> Any:
    """The device's accelerator for Lightning; a device for each process, as many as ``FAKEGPU_COUNT`` says."""
    from lightning.pytorch.accelerators import Accelerator

    gpu = load()

    class FakeGpuAccelerator(Accelerator):
        def setup_device(self, device: torch.device) -> None:
            gpu.set_device(device)

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(devices)) if isinstance(devices, int) else devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(NAME, index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return gpu.device_count()

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

    return FakeGpuAccelerator()
