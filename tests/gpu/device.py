"""The device that is checked: a GPU, or the simulated accelerator, behind the same few calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

FAKE = "fakegpu"


@dataclass(frozen=True)
class Device:
    """A kind of device, by PyTorch's name; nothing is asked of the driver before it must be."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "cuda"

    def load(self) -> Any:
        """Makes the device exist in this process; returns its module, such as ``torch.cuda``."""
        if self.name == FAKE:
            from tests import as_on_gpu

            as_on_gpu.load()
        return torch.get_device_module(self.name)

    def missing(self) -> str | None:
        """Why there is no such device here, if so."""
        if self.name == FAKE:
            from tests import as_on_gpu

            return as_on_gpu.missing()
        return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"

    @property
    def count(self) -> int:
        return int(self.load().device_count())

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name(0) if self.is_gpu else self.name

    def at(self, index: int = 0) -> torch.device:
        self.load()
        return torch.device(self.name, index)

    def event(self) -> Any:
        """A new event that keeps its time, recorded on the current stream."""
        event = self.load().Event(enable_timing=True)
        event.record()
        return event

    def busy(self, seconds: float) -> None:
        """The device has so much to do before it comes to what the current stream is given next."""
        if self.is_gpu:
            torch.cuda._sleep(int(seconds * _cycles_per_second()))
        else:
            self.load().occupy(seconds)

    def contexts(self) -> list[int]:
        """The devices on which this process has a context, which takes half a gigabyte of each."""
        if not self.is_gpu:
            return [int(index) for index in self.load().contexts()]
        driver = ctypes.CDLL("libcuda.so.1")
        found = []
        for index in range(self.count):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            if driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0 and active:
                found.append(index)
        return found

    def trainer(
        self,
        callbacks: Sequence[L.Callback],
        folder: Any,
        *,
        precision: Any = "32-true",
        scaler: Any = None,
        ranks: int | None = None,
        **options: Any,
    ) -> L.Trainer:
        """A quiet Trainer on one device; or in DDP on as many as there are ``ranks``, each in a process of its own."""
        options = {
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            **options,
        }
        shares = self.is_gpu and ranks is not None and ranks > self.count  # NCCL refuses two ranks on one GPU
        backend = {"process_group_backend": "gloo"} if shares else {}
        if self.is_gpu:
            options |= {"accelerator": "gpu", "devices": 1 if shares else ranks or 1}
            if shares:
                options["num_nodes"] = ranks
            options["strategy"] = "auto" if ranks is None else DDPStrategy(**backend)
        else:
            from tests import as_on_gpu

            options |= {"accelerator": as_on_gpu.accelerator(), "devices": ranks or 1}
            single = SingleDeviceStrategy(self.at())
            backend = {"process_group_backend": as_on_gpu.collectives()} if ranks else {}
            options["strategy"] = single if ranks is None else DDPStrategy(**backend)
        if precision != "32-true":
            scaler = self.scaler() if scaler is None and precision == "16-mixed" else scaler
            options["plugins"] = [MixedPrecision(precision, self.name, scaler)]
        return L.Trainer(callbacks=list(callbacks), **options)

    def scaler(self, scale: float = 2.0**16) -> torch.amp.GradScaler:
        self.load()
        return torch.amp.GradScaler(self.name, init_scale=scale)

    def environment(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """What an elastic launcher would give a rank."""
        if not self.is_gpu:
            local, node, on_node = rank, 0, ranks
        else:
            shares = ranks > self.count
            local, node, on_node = (0, rank, 1) if shares else (rank, 0, ranks)
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(on_node),
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(node),
            "TORCHELASTIC_RUN_ID": "gpu-checks",
        }


@functools.cache
def _cycles_per_second() -> float:
    cycles = 200_000_000
    torch.cuda._sleep(cycles)  # the first one wakes the clock up
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)


def prepare_environment(device: str) -> None:
    """What every process of the checks should find in its environment, before it imports torch."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums every time
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a GPU makes no context
    if device == FAKE:
        os.environ["FAKEGPU_COUNT"] = "2"


@contextlib.contextmanager
def nvml() -> Any:
    """NVIDIA's library about its devices, or ``None``."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
