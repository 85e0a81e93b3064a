"""Checks of a node before a worker (re)joins a job: its device, its storage and its clock; and a ping of all ranks.

Broken hardware mostly hangs: a call into a dead driver or a dead NFS mount does not return, and cannot be cancelled.
Each check therefore runs in a daemon thread. A check that has not answered in time fails, and its thread keeps running.
The true result is then unknown: a device that is used for the first time, or a busy storage, may just be slow. Only a
call that never releases the interpreter lock escapes this deadline; the watchdog deals with it.

No check touches a random number generator. No check raises for a failure: ``detail`` of the failed check describes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_resilience._daemon import NoAnswer, in_daemon_thread
from lightning_resilience._files import temporary_path
from lightning_resilience._formatting import format_bytes

_T = TypeVar("_T")

DEVICE_WITHIN_S = 180.0
"""How many seconds a device may take. Its first use creates a context and loads libraries, for all ranks of a node at
once and perhaps over the network."""

_SIDE = 1024  # of the matrices: large enough to occupy most of a device, and 4 MiB each
_PATTERN_WORDS = 4 * 2**20  # 16 MiB
_NEEDED_INODES = 100  # what one save and its diagnostics may create
_REMEDY = "reset it or exclude this node"
_GRACE_S = 5.0  # beyond a collective's own deadline


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: ``device`` (the device raised or did not answer), ``compute``, ``memory``, ``accelerator`` (there is no
            accelerator); from NVML ``nvml``, ``ecc``, ``retired pages``, ``remapped rows``, ``clocks``; ``free space``,
            ``clock``; ``collective``. A failed ``free space`` mostly concerns shared storage, where no other node has
            more; every other failure in :func:`check_node` is a fault of this node.
        ok: Whether the check passed.
        detail: One clause: what was seen, where, and after a failure what to do.
        answered: Whether the check ended in time. If not, it is not known whether the node is at fault.
    """

    name: str
    ok: bool
    detail: str
    answered: bool = True


@dataclass(frozen=True)
class HealthReport:
    """The results of all checks. ``str()`` gives one line with the failed checks or, if none failed, with all checks.

    Args:
        checks: In the order in which they were made.
    """

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.ok)

    def __str__(self) -> str:
        verdict = "healthy" if self.ok else "unhealthy"
        return f"{verdict}: " + "; ".join(check.detail for check in (self.failed or self.checks))


def check_node(
    run_dir: str | os.PathLike[str] | None,
    device: torch.device | str | None = None,
    needed_bytes: int = 100_000_000,
    local_dirs: Sequence[str | os.PathLike[str]] = (),
    timeout_s: float = 30.0,
    device_timeout_s: float = DEVICE_WITHIN_S,
) -> HealthReport:
    """Checks the device, the directories and the clock, all at once: whether a worker of this node may join.

    Args:
        run_dir: On storage that all nodes share; it need not exist yet. ``None``: another worker of the node checks it.
        device: See :func:`check_gpu_health`.
        needed_bytes: How many bytes must be free in each directory. The default has room for everything that a run
            writes besides its checkpoints.
        local_dirs: Directories of this node that the run writes to as well.
        timeout_s: Seconds after which a check of a directory or the clock that has not answered has failed.
        device_timeout_s: The same for the device. The whole check takes no longer than the longer of both.
    """
    return begin_node_check(run_dir, device, needed_bytes, local_dirs, timeout_s, device_timeout_s)()


def begin_node_check(
    run_dir: str | os.PathLike[str] | None,
    device: torch.device | str | None = None,
    needed_bytes: int = 100_000_000,
    local_dirs: Sequence[str | os.PathLike[str]] = (),
    timeout_s: float = 30.0,
    device_timeout_s: float = DEVICE_WITHIN_S,
    exercises_cpu: bool = True,
) -> Callable[[], HealthReport]:
    """Starts the checks of :func:`check_node`, and returns a function that waits for them and returns the report.

    Args:
        run_dir: See :func:`check_node`.
        device: See :func:`check_node`.
        needed_bytes: See :func:`check_node`.
        local_dirs: See :func:`check_node`.
        timeout_s: See :func:`check_node`; counted from this call.
        device_timeout_s: See :func:`check_node`; counted from this call.
        exercises_cpu: Whether to check the device also where ``device`` is the CPU.
    """
    deadline = time.monotonic() + timeout_s
    started = [
        (
            Path(directory),
            "free space",
            in_daemon_thread(partial(_one, check_free_space, directory, needed_bytes)),
        )
        for directory in (run_dir, *local_dirs)
        if directory is not None
    ]
    if run_dir is not None:
        started.append((Path(run_dir), "clock", in_daemon_thread(partial(_one, check_clock, run_dir))))
    is_cpu = device is not None and torch.device(device).type == "cpu"
    of_device = _begin_device_checks(device, device_timeout_s) if exercises_cpu or not is_cpu else list

    def report() -> HealthReport:
        checks = of_device()
        for directory, name, answer in started:
            subject = f"the storage of {directory}"
            checks += _collect(answer, name, subject, "repair or remount it", deadline, timeout_s)
        return HealthReport(tuple(checks))

    return report


def _one(check: Callable[..., Check], *args: Any) -> list[Check]:
    return [check(*args)]


# -- device ------------------------------------------------------------------------------------------------------------


def check_device_health(device: torch.device | str | None = None, timeout_s: float = DEVICE_WITHIN_S) -> list[Check]:
    """Has a device multiply two matrices whose product is known, and keep a pattern in its memory.

    The matrices hold small integers, so the product is exact in whichever precision the device multiplies.

    Args:
        device: Default: the accelerator that is current in this thread (the first one, unless the strategy or the
            program has chosen another), or the CPU where there is no accelerator.
        timeout_s: Seconds after which a device that has not answered has failed.
    """
    deadline = time.monotonic() + timeout_s
    found = _find(device, timeout_s)
    if isinstance(found, Check):
        return [found]
    return _begin_exercise(found, deadline, timeout_s)()


def check_gpu_health(device: torch.device | str | None = None, timeout_s: float = DEVICE_WITHIN_S) -> list[Check]:
    """Does :func:`check_device_health`, and reads the state of the device from NVML where NVML knows the device.

    These are failures: memory pages that wait for their retirement; memory rows that wait to be remapped or could not
    be remapped; a GPU that the driver has lost. On older GPUs, which remap no rows, uncorrected ECC errors since the
    last reset are failures as well; newer GPUs contain such errors. Temperature and a clock slowed down by the hardware
    are reported, but are no failures: both may pass. A fact that cannot be read is left out. Xid errors of the past
    cannot be read.

    NVML is NVIDIA's. Any other accelerator, or the CPU where there is no accelerator, is checked without it.

    Args:
        device: See :func:`check_device_health`.
        timeout_s: Seconds after which a device that has not answered has failed.
    """
    return _begin_device_checks(device, timeout_s)()


def _begin_device_checks(device: torch.device | str | None, timeout_s: float) -> Callable[[], list[Check]]:
    deadline = time.monotonic() + timeout_s
    found = _find(device, timeout_s)
    if isinstance(found, Check):
        return lambda: [found]
    checks = []
    if device is None and found.type == "cpu":
        checks.append(Check("accelerator", True, "there is no accelerator, the CPU was checked instead"))
    facts = in_daemon_thread(partial(_nvml_facts, found))
    exercise = _begin_exercise(found, deadline, timeout_s)

    def collect() -> list[Check]:
        said = _collect(facts, "nvml", f"NVML for device {found}", _REMEDY, deadline, timeout_s)
        return [*checks, *exercise(), *said]

    return collect


def _find(device: torch.device | str | None, timeout_s: float) -> torch.device | Check:
    try:
        accelerator = torch.accelerator.current_accelerator()  # the one this torch was built for; asks no driver
        if device is None:
            if accelerator is None or not in_daemon_thread(torch.accelerator.is_available).result(timeout_s):
                return torch.device("cpu")
            device = accelerator
        device = torch.device(device)
        if device == accelerator:  # no index; asked in this thread, because each thread has its own current device
            device = torch.device(device.type, torch.accelerator.current_device_index())
        return device
    except NoAnswer:
        detail = f"the accelerator's driver did not answer within {timeout_s:g} s: slow, or dead"
        return Check("device", False, detail, answered=False)
    except Exception as error:
        return Check("device", False, f"device {device or 'of this process'} is not usable: {_describe(error)}")


def _begin_exercise(device: torch.device, deadline: float, timeout_s: float) -> Callable[[], list[Check]]:
    answer = in_daemon_thread(lambda: [_check_compute(device), _check_memory(device)])
    return partial(_collect, answer, "device", f"device {device}", _REMEDY, deadline, timeout_s)


def _check_compute(device: torch.device) -> Check:
    # Integers up to 6 are exact in any format with 3 bits of significand, so in TF32 and bfloat16 too. The sums stay
    # below 2**24, up to which float32 is exact. Rows repeat every 7 and columns every 5, so the host computes 35 sums.
    index = torch.arange(_SIDE, device="cpu")
    left = (index[:, None] + index[None, :]) % 7
    right = (index[:, None] + 2 * index[None, :]) % 5
    expected = (left[:7] @ right[:, :5])[index % 7][:, index % 5]
    product = torch.matmul(left.to(device, torch.float32), right.to(device, torch.float32)).cpu()
    wrong = int((product != expected).sum())
    if wrong:
        return Check("compute", False, f"device {device} computed {wrong} of {_SIDE**2} sums wrong: {_REMEDY}")
    return Check("compute", True, f"device {device} computes as it should")


def _check_memory(device: torch.device) -> Check:
    counting = torch.arange(_PATTERN_WORDS, dtype=torch.int32, device="cpu")
    memory = torch.empty(_PATTERN_WORDS, dtype=torch.int32, device=device)
    wrong = 0
    for pattern in (counting, ~counting):  # every bit is once 0 and once 1
        memory.copy_(pattern)
        wrong += int((memory.cpu() != pattern).sum())
    if wrong:
        return Check("memory", False, f"device {device} lost {wrong} of {2 * _PATTERN_WORDS} words: {_REMEDY}")
    return Check("memory", True, f"device {device} keeps what is written to it")


# -- NVML --------------------------------------------------------------------------------------------------------------


def _nvml_facts(device: torch.device) -> list[Check]:
    uuid = _uuid(device)
    if uuid is None:
        return []
    try:
        import pynvml  # type: ignore
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no NVIDIA driver
        return []
    name = f"device {device} (GPU-{uuid})"
    gone = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
    checks: list[Check] = []
    try:
        # By UUID, because CUDA_VISIBLE_DEVICES renumbers the devices in torch but not in NVML.
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        for fact in (_ecc_errors, _retired_pages, _remapped_rows, _clocks):
            try:
                checks.append(fact(pynvml, gpu, name))
            except AttributeError:  # this version of the library lacks the function
                continue
            except pynvml.NVMLError as error:  # mostly: not supported by this GPU
                if error.value in gone:
                    raise
    except pynvml.NVMLError as error:
        if error.value in gone:
            checks.append(Check("nvml", False, f"NVML reports for {name}: {error}, {_REMEDY}"))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return checks


def _uuid(device: torch.device) -> str | None:
    try:
        return str(torch.get_device_module(device).get_device_properties(device).uuid)
    except (AttributeError, AssertionError, RuntimeError):  # no UUID, or a broken device, which its exercise shows
        return None


def _ecc_errors(pynvml: Any, gpu: Any, name: str) -> Check:
    count = pynvml.nvmlDeviceGetTotalEccErrors(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    if not count:
        return Check("ecc", True, f"{name} has had no uncorrected ECC errors")
    seen = f"{name} has had {count} uncorrected ECC errors since its last reset"
    try:
        pynvml.nvmlDeviceGetRemappedRows(gpu)
    except (AttributeError, pynvml.NVMLError) as error:
        if getattr(error, "value", None) in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return Check("ecc", False, f"{seen}: {_REMEDY}")
    return Check("ecc", True, f"{seen}, which the device has contained")


def _retired_pages(pynvml: Any, gpu: Any, name: str) -> Check:
    if pynvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu) == pynvml.NVML_FEATURE_ENABLED:
        return Check("retired pages", False, f"{name} has broken memory pages that only a reset retires: {_REMEDY}")
    return Check("retired pages", True, f"{name} has no pages to retire")


def _remapped_rows(pynvml: Any, gpu: Any, name: str) -> Check:
    _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(gpu)
    if failed:
        return Check("remapped rows", False, f"{name} could not remap a broken memory row: have it replaced")
    if pending:
        return Check("remapped rows", False, f"{name} has broken memory rows that only a reset remaps: {_REMEDY}")
    return Check("remapped rows", True, f"{name} has no memory rows to remap")


def _clocks(pynvml: Any, gpu: Any, name: str) -> Check:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    slowed = {
        "too hot": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "slowed down by the hardware": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    }
    seen = "".join(f", {reason}" for reason, bit in slowed.items() if reasons & bit)
    degrees = pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
    return Check("clocks", True, f"{name} has {degrees} °C{seen}")


# -- storage and clock -------------------------------------------------------------------------------------------------


def check_free_space(path: str | os.PathLike[str], needed_bytes: int) -> Check:
    """Whether ``needed_bytes`` and some files fit into a directory: asks for the free space, and writes a small file.

    The free space that the system reports does not consider quotas; an exhausted quota shows when the file is written.
    This function waits for the storage without a deadline; :func:`check_node` has one.

    Args:
        path: A directory. If it does not exist, its nearest existing parent is checked.
        needed_bytes: How many bytes must be free for this user.
    """
    try:
        directory = _nearest(path)
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        seen = f"{format_bytes(free)} free in {path}"
        if free < needed_bytes:
            return Check("free space", False, f"{seen}, {format_bytes(needed_bytes)} needed: make room")
        # Storage that does not count inodes has a total of 0.
        if status.f_files and status.f_favail < _NEEDED_INODES:
            few = f"{path} has room for {status.f_favail} more files, {_NEEDED_INODES} needed: remove some"
            return Check("free space", False, few)
        _write_time(directory)
    except OSError as error:
        return Check("free space", False, _not_writable(path, error))
    return Check("free space", True, seen)


def check_clock(path: str | os.PathLike[str], tolerance_s: float = 60.0) -> Check:
    """Compares this host's clock with the storage's clock, which gives a newly written file its modification time.

    A node with a wrong clock writes wrong times into the ledger, and considers fresh files of other nodes abandoned. On
    a local file system there is no second clock, so the check passes.

    Args:
        path: A directory; see :func:`check_free_space`, also for the missing deadline.
        tolerance_s: Seconds by which the clocks may differ.
    """
    before = time.time()
    try:
        written = _write_time(_nearest(path))
    except OSError as error:
        return Check("clock", False, _not_writable(path, error))
    after = time.time()
    ahead_s = max(before - written, 0.0) - max(written - after, 0.0)
    seen = f"this host's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} that of {path}"
    if abs(ahead_s) > tolerance_s:
        return Check("clock", False, f"{seen}, {tolerance_s:g} s allowed: synchronize it")
    return Check("clock", True, f"this host's clock agrees with that of {path} within {tolerance_s:g} s")


def _nearest(path: str | os.PathLike[str]) -> Path:
    nearest = Path(path).absolute()
    while True:
        try:
            nearest.lstat()
            return nearest
        except (FileNotFoundError, NotADirectoryError):
            nearest = nearest.parent


def _write_time(directory: Path) -> float:
    """Writes, syncs and removes a file; returns its modification time, seconds since the epoch."""
    path = temporary_path(directory / "health-check")
    try:
        with open(path, "xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    finally:
        with suppress(OSError):
            path.unlink()


def _not_writable(path: str | os.PathLike[str], error: OSError) -> str:
    return f"{path} cannot be written to ({error.strerror or error}): repair it or its permissions, or use another"


# -- collective --------------------------------------------------------------------------------------------------------


def check_collective(
    device: torch.device | str, timeout_s: float = 10.0, group: dist.ProcessGroup | None = None
) -> Check:
    """Pings all ranks of a group: they sum ones, and the sum must be the number of ranks. Every rank must call this.

    The check passes where there is no process group, and on a rank that is not in ``group``. The outcome may differ
    between ranks: a rank that comes too late may see its own ping fail for that or another reason. **After a failure
    the group cannot be used any more**: gloo closes its connections, NCCL aborts its communicator. Raise, and end the
    process.

    Args:
        device: The device that holds the ones; must suit the group's backend.
        timeout_s: Seconds to wait for the other ranks.
        group: Default: all ranks.
    """
    group = group or (dist.group.WORLD if dist.is_available() else None)
    if group is None or dist.get_rank(group) < 0:
        return Check("collective", True, "there is no process group with this rank to check")
    size = dist.get_world_size(group)
    # In a thread: neither the call, in which NCCL may connect, nor the copy to the host has a deadline.
    answer = in_daemon_thread(partial(_sum_of_ones, device, timeout_s, group))
    try:
        total = answer.result(timeout_s + _GRACE_S)
    except NoAnswer:
        return Check("collective", False, f"the sum over {size} ranks did not return, {timeout_s:g} s were allowed")
    except Exception as error:
        seen = f"no sum over {size} ranks within {timeout_s:g} s ({_describe(error)})"
        return Check("collective", False, f"{seen}: a rank is dead, stuck or elsewhere")
    if total != size:
        return Check("collective", False, f"the ones of {size} ranks sum up to {total:g}: one of them is wrong")
    return Check("collective", True, f"all {size} ranks answer")


def _sum_of_ones(device: torch.device | str, timeout_s: float, group: dist.ProcessGroup) -> float:
    ones = torch.ones(1, device=device)
    # `dist.all_reduce` takes no deadline. With only the deadline of `wait`, gloo keeps the operation, and the group's
    # destructor waits for it until the group's own timeout, half an hour by default.
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=timeout_s)
    if not group.allreduce([ones], options).wait(options.timeout):
        raise RuntimeError("the wait ended early")
    return float(ones.item())


# -- deadlines ---------------------------------------------------------------------------------------------------------


def _collect(
    answer: Future[list[Check]], name: str, subject: str, to_do: str, deadline: float, timeout_s: float
) -> list[Check]:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except NoAnswer:
        return [Check(name, False, f"{subject} did not answer within {timeout_s:g} s: slow, or dead", answered=False)]
    except Exception as error:
        return [Check(name, False, f"{subject} failed with {_describe(error)}: {to_do}")]


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()  # device errors have debugging advice below their first line
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
