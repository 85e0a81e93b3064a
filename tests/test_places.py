"""What hosts, file systems and scripts are like: none of it is in the way of a run."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_resilience._files import sync_directory, write_json
from lightning_resilience.checkpoint import checkpoint_file, shard
from lightning_resilience.checkpoint.data_position import describe_data
from lightning_resilience.checkpoint.local_folders import base_folder
from lightning_resilience.checkpoint.node_store import NodeStore
from lightning_resilience.checkpoint.replication import _Channel, _Message, _scratch_chunks
from lightning_resilience.run.run_directory import RunDirectory


@pytest.fixture
def tensors_are_made_elsewhere() -> Iterator[None]:
    """What ``torch.set_default_device("cuda")`` in a script does to whoever does not say where."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("tensors_are_made_elsewhere")
def test_shards_are_read_into_host_memory_whatever_the_default_device_is(tmp_path: Path) -> None:
    state = [torch.arange(5.0, device="cpu"), torch.ones(3, 4, dtype=torch.int16, device="cpu")]
    specs, size = shard.arrange(state)
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    for spec, tensor in zip(specs, state, strict=True):
        shard.view(memory, spec).copy_(tensor)
    trailer = shard.seal(memory, specs, shard.Identity("run", 0, 3, "0123abcd", "rank-00000", 1, {}), {}, size)
    path = tmp_path / "rank-00000.shard"
    path.write_bytes(memory.numpy().tobytes() + trailer)
    _, loaded = shard.load(path)
    assert all(torch.equal(tensor, there) for tensor, there in zip(state, loaded, strict=True))


@pytest.mark.usefixtures("tensors_are_made_elsewhere")
def test_replicas_travel_through_host_memory_whatever_the_default_device_is() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        ranks = [(store.clone(), rank) for rank in (0, 1)]
        pair = list(pool.map(lambda own: _Channel(own[0], "pair", own[1], 1 - own[1], timedelta(seconds=30)), ranks))
    said = pair[0].send_message(_Message(7, text="0123abcd"))
    assert pair[1].recv_message() == _Message(7, text="0123abcd", digest=bytes(16))
    said.wait()
    assert [piece.device.type for piece in _scratch_chunks(10, 3)] == ["cpu", "cpu"]
    for channel in pair:
        channel.close()


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """VirtualBox's shared folders and old 9p, for two."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    run = RunDirectory(tmp_path / "run")
    run.check_owner(run.claim())
    write_json(tmp_path / "x.json", {"a": 1})
    checkpoint_file.save({"a": torch.ones(3)}, tmp_path / "x.ckpt", {"step": 1})
    assert torch.equal(checkpoint_file.load(tmp_path / "x.ckpt")["a"], torch.ones(3))
    refusal = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync_directory(tmp_path)


def as_user(user: int, task: Callable[[], Any]) -> str:
    """What goes wrong when another user does something; nothing if it is done."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            task()
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, "rb") as said:
        return said.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_every_user_of_a_node_can_be_given_the_same_folder() -> None:
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))
    scratch.chmod(0o1777)

    def save() -> None:
        store = NodeStore(base_folder(scratch) / "n1" / "5f3c" / "fit-000")
        store.reserve("rank-00000", 10).abandon()
        store.close()

    try:
        assert [as_user(user, save) for user in (65533, 65534, 65533)] == ["", "", ""]
        assert {path.stat().st_mode & 0o777 for path in scratch.iterdir()} == {0o700}
    finally:
        shutil.rmtree(scratch)


def described(indices: Any, like: Any = None) -> list[dict[str, Any]]:
    data = TensorDataset(torch.zeros(200_000, 1))
    return describe_data([DataLoader(Subset(data, indices)), DataLoader(data)], like)


def test_a_part_of_the_data_is_told_apart_by_its_numbers_not_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randperm(200_000)[:100_000]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__repr__", lambda self: pytest.fail("one by one takes 84 us each"))
        of_tensor = described(numbers)
    assert of_tensor == described(numbers.tolist()) == described(numbers.numpy()) == described(numbers.int())
    assert described(range(5)) == described([0, 1, 2, 3, 4]) != described([0, 1, 2, 4, 3])
    assert described(["a", "b"]) == described(("a", "b")) != described(["b", "a"])
    assert described(np.arange(5)[::2]) == described([0, 2, 4])


def test_what_an_earlier_version_has_described_is_still_the_same_data() -> None:
    """Its folds are not "of other training data"."""
    numbers = torch.tensor([3, 1, 2])
    before = [{"length": 3, "part": "01811626ade63677c7a1d9aa7ae286e8"}, {"length": 200_000, "part": None}]
    assert described(numbers, before) == before
    assert described(numbers.flip(0), before) != before
    assert described(numbers, described(numbers)) == described(numbers, [{"length": None}]) == described(numbers)
