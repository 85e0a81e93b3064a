"""Health checks on real files, file systems, devices and process groups; what hangs or lies is put in by hand."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist

from lightning_resilience import FaultTolerance
from lightning_resilience.detect import health
from lightning_resilience.detect.health import (
    Check,
    HealthReport,
    begin_node_check,
    check_clock,
    check_collective,
    check_device_health,
    check_free_space,
    check_gpu_health,
    check_node,
)
from tests.harness import CONTEXT
from tests.test_signals import Module

SOON = 0.2
UUID = "8a6f7f3e-0001-0002-0003-abcdefabcdef"
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "health check":
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def hang() -> Iterator[Any]:
    """A function that does not return before the end of the test."""
    released = threading.Event()

    def never(*args: Any, **kwargs: Any) -> Any:
        released.wait(60)
        raise RuntimeError("released")

    yield never
    released.set()


def run_processes(target: Any, arguments: list[tuple[Any, ...]]) -> None:
    processes = [CONTEXT.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def states(checks: list[Check] | tuple[Check, ...]) -> dict[str, bool]:
    return {check.name: check.ok for check in checks}


# -- report ------------------------------------------------------------------------------------------------------------


def test_the_report_is_one_line_that_names_what_failed_and_nothing_else() -> None:
    good = Check("compute", True, "device cpu computes as it should")
    bad = Check("device", False, "device cuda:3 did not answer within 30 s: reset it or exclude this node")
    full = Check("free space", False, "1.2 GiB free in /runs, 5.0 GiB needed: make room")
    report = HealthReport((good, bad, full))
    assert not report.ok
    assert report.failed == (bad, full)
    assert str(report) == f"unhealthy: {bad.detail}; {full.detail}"
    assert HealthReport((good,)).ok
    assert str(HealthReport((good,))) == f"healthy: {good.detail}"


# -- device ------------------------------------------------------------------------------------------------------------


def test_a_good_device_passes_and_no_random_number_is_drawn() -> None:
    before = torch.random.get_rng_state()
    assert states(check_device_health("cpu")) == {"compute": True, "memory": True}
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_device_that_hangs_has_failed_and_holds_nobody_up(hang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", hang)
    (check,) = check_device_health("cpu", timeout_s=SOON)
    said = "device cpu did not answer within 0.2 s: slow, or dead"
    assert check == Check("device", False, said, answered=False)


def hang_and_end() -> None:
    torch.matmul = lambda *args: threading.Event().wait()
    (check,) = check_device_health("cpu", timeout_s=SOON)
    assert not check.ok


def test_a_process_whose_device_hangs_can_still_end() -> None:
    run_processes(hang_and_end, [()])


def test_one_wrong_number_in_a_million_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.matmul

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = matmul(left, right)
        product[700, 300] += 1
        return product

    monkeypatch.setattr(torch, "matmul", wrong)
    (check,) = [check for check in check_device_health("cpu") if not check.ok]
    assert check.name == "compute"
    assert "computed 1 of 1048576 sums wrong" in check.detail


@pytest.mark.parametrize("stuck_at", [0, 1])
def test_one_stuck_bit_is_seen(stuck_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.copy_

    def forgetful(memory: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy(memory, source)
        if stuck_at:
            memory[-1] |= 1 << 20
        else:
            memory[-1] &= ~(1 << 20)
        return memory

    monkeypatch.setattr(torch.Tensor, "copy_", forgetful)
    (check,) = [check for check in check_device_health("cpu") if not check.ok]
    assert check.name == "memory"
    assert "lost 1 of" in check.detail


@pytest.mark.parametrize("device", ["meta", "nonsense", pytest.param("cuda:0", marks=no_accelerator)])
def test_a_device_that_raises_has_failed_with_its_own_words(device: str) -> None:
    (check,) = check_gpu_health(device)
    assert (check.name, check.ok) == ("device", False)
    assert f"device {device}" in check.detail
    assert "Error: " in check.detail
    assert "\n" not in check.detail


@no_accelerator
def test_without_an_accelerator_the_cpu_is_checked_and_that_is_said() -> None:
    checks = check_gpu_health()
    assert states(checks) == {"accelerator": True, "compute": True, "memory": True}
    assert "no accelerator" in checks[0].detail


def test_a_driver_that_hangs_before_the_first_device_is_known(hang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", hang)
    (check,) = check_gpu_health(timeout_s=SOON)
    assert (check.name, check.ok) == ("device", False)
    assert "driver did not answer" in check.detail
    assert not check.answered


def test_the_device_that_is_current_in_the_calling_thread_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = threading.local()  # as a device's runtime keeps it
    chosen.index = 3
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(chosen, "index", 0))
    for device in (None, "meta"):
        (check,) = check_device_health(device)
        assert "device meta:3 " in check.detail


# -- NVML --------------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml(types.ModuleType):
    """The part of NVIDIA's library that is used, with a GPU whose state the test sets."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 3, 15, 16
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_FEATURE_ENABLED, NVML_TEMPERATURE_GPU = 1, 0, 1, 0
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, **state: Any) -> None:
        super().__init__("pynvml")
        self.state = {"known": UUID, "ecc": 0, "retired": 0, "remapped": (0, 0, 0, 0), "reasons": 0, "degrees": 41}
        self.state |= state
        self.opened = 0

    def answer(self, question: str) -> Any:
        answer = self.state[question]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def nvmlInit(self) -> None:
        self.answer("known")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{self.state['known']}":
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetTotalEccErrors(self, gpu: str, kind: int, counter: int) -> Any:
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return self.answer("ecc")

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: str) -> Any:
        return self.answer("retired")

    def nvmlDeviceGetRemappedRows(self, gpu: str) -> Any:
        return self.answer("remapped")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> Any:
        return self.answer("reasons")

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> Any:
        return self.answer("degrees")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the CPU pass for a GPU that NVML knows, in the state given."""

    def in_state(**state: Any) -> dict[str, Check]:
        library = Nvml(**state)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        properties = types.SimpleNamespace(uuid=UUID)
        monkeypatch.setattr(torch.cpu, "get_device_properties", lambda device: properties, raising=False)
        checks = check_gpu_health("cpu")
        assert library.opened == 0
        return {check.name: check for check in checks if check.name not in ("compute", "memory")}

    return in_state


def test_nvml_facts_of_a_good_gpu(nvml: Any) -> None:
    checks = nvml()
    assert states(tuple(checks.values())) == {
        "ecc": True,
        "retired pages": True,
        "remapped rows": True,
        "clocks": True,
    }
    assert checks["clocks"].detail == f"device cpu (GPU-{UUID}) has 41 °C"


@pytest.mark.parametrize(
    ("state", "name", "words"),
    [
        ({"ecc": 2, "remapped": NVMLError(3)}, "ecc", "2 uncorrected ECC errors"),  # of before Ampere
        ({"ecc": 2, "remapped": AttributeError()}, "ecc", "2 uncorrected ECC errors"),
        ({"retired": 1}, "retired pages", "only a reset"),
        ({"remapped": (1, 1, 1, 0)}, "remapped rows", "only a reset"),
        ({"remapped": (0, 1, 0, 1)}, "remapped rows", "replaced"),
    ],
)
def test_nvml_facts_that_fail_name_the_gpu(nvml: Any, state: dict[str, Any], name: str, words: str) -> None:
    checks = nvml(**state)
    assert [check.name for check in checks.values() if not check.ok] == [name]
    assert words in checks[name].detail
    assert UUID in checks[name].detail


def test_what_may_pass_is_told_and_fails_nothing(nvml: Any) -> None:
    checks = nvml(ecc=2, remapped=(1, 2, 0, 0), reasons=0x8 | 0x40, degrees=93)
    assert all(check.ok for check in checks.values())
    assert checks["clocks"].detail.endswith("has 93 °C, too hot, slowed down by the hardware")
    assert checks["ecc"].detail.endswith(
        "has had 2 uncorrected ECC errors since its last reset, which the device has contained"
    )


def test_facts_that_a_gpu_does_not_have_are_left_out(nvml: Any) -> None:
    checks = nvml(ecc=NVMLError(3), remapped=AttributeError("an older library"))
    assert states(tuple(checks.values())) == {"retired pages": True, "clocks": True}


@pytest.mark.parametrize("value", [15, 16])
def test_a_gpu_that_is_lost_or_must_be_reset_has_failed(nvml: Any, value: int) -> None:
    checks = nvml(retired=NVMLError(value))
    assert states(tuple(checks.values())) == {"ecc": True, "nvml": False}
    assert f"error {value}" in checks["nvml"].detail


def test_without_the_library_a_driver_or_the_gpu_there_are_no_facts(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml(known=NVMLError(9)) == {}
    assert nvml(known="another GPU") == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what an import of it raises then is what a missing one raises
    assert states(check_gpu_health("cpu")) == {"compute": True, "memory": True}


def test_nvml_that_hangs_has_failed(hang: Any, nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", hang)
    checks = check_gpu_health("cpu", timeout_s=3.0)
    assert states(checks) == {"compute": True, "memory": True, "nvml": False}
    assert "NVML for device cpu did not answer" in checks[-1].detail
    assert not checks[-1].answered


# -- storage -----------------------------------------------------------------------------------------------------------


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_enough_space_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "not" / "yet"
    check = check_free_space(run_dir, 1000)
    assert check.ok, check
    assert f"free in {run_dir}" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_says_how_much_there_is_and_how_much_is_needed(tmp_path: Path) -> None:
    check = check_free_space(tmp_path, free_bytes(tmp_path) + 5 * 10**12)
    assert not check.ok
    assert f"B free in {tmp_path}, " in check.detail
    assert "TiB needed" in check.detail


def test_something_that_is_no_directory_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        for check in (check_free_space(path, 0), check_clock(path)):
            assert not check.ok
            assert f"{path} cannot be written to" in check.detail
            assert "directory" in check.detail
    assert (tmp_path / "file").read_text() == "mine"


FILE_SYSTEMS = """
import json, os, subprocess, sys
from lightning_resilience.detect.health import check_clock, check_free_space

def tmpfs(name, options):
    os.mkdir(name)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", name], check=True)
    return name

full = tmpfs("full", "size=64k")
with open("full/data", "wb") as file:
    file.write(bytes(65536))
crowded = tmpfs("crowded", "size=1m,nr_inodes=20")
read_only = tmpfs("read-only", "size=1m,ro")
checks = [check_free_space(full, 1), check_free_space(full, 0), check_clock(full)]
checks += [check_free_space(crowded, 1), check_free_space(read_only, 1)]
print(json.dumps([[check.ok, check.detail] for check in checks]))
"""


@pytest.mark.slow
def test_full_crowded_and_read_only_file_systems(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]  # what is mounted there goes with the process
    try:
        possible = subprocess.run([*alone, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if possible.returncode:
        pytest.skip("nothing can be mounted here")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    script = [*alone, sys.executable, "-W", "ignore", "-c", FILE_SYSTEMS]
    result = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    space, write, clock, inodes, read_only = json.loads(result.stdout)
    assert space == [False, "0 bytes free in full, 1 byte needed: make room"]
    for ok, detail in (write, clock):
        assert not ok
        assert "full cannot be written to (No space left on device)" in detail
    assert not inodes[0]
    assert "crowded has room for 19 more files, 100 needed" in inodes[1]
    assert not read_only[0]
    assert "read-only cannot be written to (Read-only file system)" in read_only[1]


# -- clock -------------------------------------------------------------------------------------------------------------


def test_clocks_that_agree(tmp_path: Path) -> None:
    check = check_clock(tmp_path / "not" / "yet")
    assert check.ok, check
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("off_s", "words"), [(3600, "3600 s ahead of"), (-3600, "3600 s behind")])
def test_a_clock_that_is_off_by_an_hour(
    off_s: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + off_s)
    check = check_clock(tmp_path)
    assert not check.ok
    assert f"this host's clock is {words} that of {tmp_path}, 60 s allowed" in check.detail
    assert check_clock(tmp_path, tolerance_s=2 * 3600).ok


# -- node --------------------------------------------------------------------------------------------------------------


def test_a_healthy_node(tmp_path: Path) -> None:
    report = check_node(tmp_path / "run", "cpu", local_dirs=[tmp_path])
    assert report.ok, report
    assert [check.name for check in report.checks] == ["compute", "memory", "free space", "free space", "clock"]


def test_a_check_that_has_begun_waits_for_nothing_until_its_report_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, has_begun, waited = torch.matmul, threading.Event(), []

    def slow(*args: Any) -> torch.Tensor:
        waited.append(has_begun.wait(30))
        return matmul(*args)

    monkeypatch.setattr(torch, "matmul", slow)
    report = begin_node_check(None, "cpu")
    has_begun.set()
    assert report().ok
    assert waited == [True]


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_one_rank_of_a_node_looks_at_its_storage_and_in_one_fit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    exercised: list[torch.device] = []
    exercise = health._check_compute
    monkeypatch.setattr(health, "_check_compute", lambda device: (exercised.append(device), exercise(device))[1])
    assert {check.name for check in check_node(None, "cpu").checks} == {"compute", "memory"}
    exercised.clear()
    looked: list[Path] = []

    def look(directory: Path) -> float:
        looked.append(directory)
        return time.time()

    monkeypatch.setattr(health, "_write_time", look)
    for _ in range(2):
        callbacks = [FaultTolerance(run_dir=tmp_path / "run", autoresume=False)]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)  # type: ignore[arg-type]
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert len(looked) == 2, "one file for the space and one for the clock, in the first fit"
    assert len(exercised) == (2 if restarts == "0" else 0), "a CPU that has trained is not asked to compute"


def test_a_device_that_is_used_for_the_first_time_may_take_longer_than_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul, storage_has_had_its_time = torch.matmul, threading.Event()

    def cold(*args: Any) -> torch.Tensor:
        storage_has_had_its_time.wait(SOON + 0.1)
        return matmul(*args)

    monkeypatch.setattr(torch, "matmul", cold)
    assert check_node(tmp_path, "cpu", timeout_s=SOON).ok


def test_a_node_on_which_everything_is_broken_is_reported_in_one_line(
    hang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a dead NFS mount, a dead device, and a local disk that is full."""
    statvfs = os.statvfs
    run_dir, local = tmp_path / "run", tmp_path / "local"
    run_dir.mkdir()
    local.mkdir()
    monkeypatch.setattr(os, "statvfs", lambda path: hang() if Path(path) == run_dir else statvfs(path))
    monkeypatch.setattr(os, "fsync", hang)
    monkeypatch.setattr(torch, "matmul", hang)
    report = check_node(run_dir, "cpu", needed_bytes=10**18, local_dirs=[local], timeout_s=1.0, device_timeout_s=1.0)
    assert [check.name for check in report.failed] == ["device", "free space", "free space", "clock"]
    line = str(report)
    assert "\n" not in line
    assert "unhealthy: device cpu did not answer within 1 s" in line
    assert f"the storage of {run_dir} did not answer within 1 s" in line
    assert f"free in {local}, 909494.7 TiB needed" in line
    assert [check.answered for check in report.failed] == [False, False, True, False]


def test_a_check_that_raises_is_a_check_that_failed(tmp_path: Path) -> None:
    report = check_node("a\0b", "cpu", local_dirs=[tmp_path])
    assert {check.name for check in report.failed} == {"free space", "clock"}
    assert "ValueError" in str(report)


# -- collective --------------------------------------------------------------------------------------------------------


def ping(rank: int, directory: Path, scenario: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    # The group's own timeout is out of reach: what ends before it has been ended by the ping's.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    checks = [check_collective("cpu", 60.0)]
    done = directory / "rank 0 is done"
    if scenario == "absent":
        if rank == 0:
            checks.append(check_collective("cpu", 0.5))
    elif scenario == "wrong":
        if rank == 0:
            checks.append(check_collective("cpu", 60.0))
        else:
            dist.all_reduce(torch.full((1,), 2.0))
    elif scenario == "part":
        only_0 = dist.new_group([0])
        checks.append(check_collective("cpu", 60.0, only_0))
    (directory / f"{rank}.json").write_text(json.dumps([[check.ok, check.detail] for check in checks]))
    if rank == 0:
        dist.destroy_process_group()
        gc.collect()  # the failed check's traceback holds the group; its destructor waits for operations under way
        done.touch()
    while not done.exists():
        time.sleep(0.02)
    os._exit(0)


def run_ping(directory: Path, scenario: str) -> list[list[tuple[bool, str]]]:
    run_processes(ping, [(rank, directory, scenario) for rank in range(2)])
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_without_a_process_group_there_is_nothing_to_ping() -> None:
    assert check_collective("cpu").ok


def test_a_rank_that_does_not_come_to_the_ping_fails_it_and_the_group_can_be_left(tmp_path: Path) -> None:
    ours, _ = run_ping(tmp_path, "absent")
    (first_ok, first), (second_ok, second) = ours
    assert first_ok
    assert first == "all 2 ranks answer"
    assert not second_ok
    assert "no sum over 2 ranks within 0.5 s (RuntimeError: " in second


def test_a_sum_that_is_not_the_number_of_ranks_fails_the_ping(tmp_path: Path) -> None:
    ours, _ = run_ping(tmp_path, "wrong")
    assert ours[-1] == [False, "the ones of 2 ranks sum up to 3: one of them is wrong"]


def test_a_group_of_some_ranks_is_pinged_by_those_alone(tmp_path: Path) -> None:
    ours, others = run_ping(tmp_path, "part")
    assert ours[-1] == [True, "all 1 ranks answer"]
    assert others[-1][0]
    assert "no process group with this rank" in others[-1][1]


def test_a_backend_that_hangs_outside_the_wait_is_bounded_too(
    hang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr("lightning_resilience.detect.health._GRACE_S", SOON)
        monkeypatch.setattr(torch, "ones", hang)
        check = check_collective("cpu", SOON)
        assert not check.ok
        assert "did not return" in check.detail
    finally:
        dist.destroy_process_group()
