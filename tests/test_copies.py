"""A run's identity belongs to its directory: wherever that is moved it is the same run, and a copy is another one."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import threading
from pathlib import Path

import pytest

from lightning_resilience._files import read_json
from lightning_resilience._processes import describe_process
from lightning_resilience.run.run_directory import LAUNCHED, RunDirectory
from tests.harness import run_command
from tests.test_local_checkpoint import Run, ends_well, steps_in


def copied(source: Path, target: Path) -> RunDirectory:
    shutil.copytree(source, target)
    return RunDirectory(target)


@pytest.fixture
def original(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "runs" / "A")
    found.identity()
    return found


def test_a_copy_goes_on_from_its_global_checkpoints_and_touches_no_local_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, copy = Run(tmp_path, "A"), Run(tmp_path, "B")
    run.die(run.resume(6), run.local(), step=8)
    shutil.copytree(run.path, copy.path)
    run.die(run.resume(6), run.local(), step=14)
    before = steps_in(run.folder)
    copy.seen.update(run.seen)
    ends_well(copy, copy.resume(6), copy.local())
    assert copy.resumes == [("global", 6)]
    assert "is a copy of the run in" in caplog.text
    assert steps_in(run.folder) == before, "what the other one needs is still there"
    ends_well(run, run.resume(6), run.local())
    assert run.resumes[-1] == ("local", 12)


def test_a_copy_has_a_name_of_its_own_and_keeps_it(original: RunDirectory, tmp_path: Path) -> None:
    copy = copied(original.path, tmp_path / "runs" / "B")
    names = [copy.identity() for _ in range(3)]
    assert len({original.identity(), *names}) == 2
    again = copied(copy.path, tmp_path / "runs" / "C")
    second = copied(original.path, tmp_path / "runs" / "D")
    assert len({each.identity() for each in (original, copy, again, second)}) == 4


def test_what_moves_stays_the_same_run(original: RunDirectory, tmp_path: Path) -> None:
    name = original.identity()
    os.rename(original.path, tmp_path / "moved")
    assert RunDirectory(tmp_path / "moved").identity() == name
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert RunDirectory(tmp_path / "link").identity() == name
    copied(tmp_path / "moved", tmp_path / "elsewhere")  # as to another file system
    shutil.rmtree(tmp_path / "moved")
    assert RunDirectory(tmp_path / "elsewhere").identity() == name
    os.rename(tmp_path / "elsewhere", original.path)
    assert original.identity() == name


def change(run: RunDirectory, place: dict[str, object]) -> None:
    record = json.loads((run.path / "run.json").read_text())
    record["directory"].update(place)
    (run.path / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("place", "is_same"),
    [
        ({"path": "/mnt/of/another/host", "host": "another"}, True),  # mounted elsewhere: the inode is the same
        ({"inode": 1}, True),  # the path is the same: brought back from a backup, or inodes that do not last
        ({"path": "/mnt/of/another/host", "host": "another", "inode": 1}, False),
        ({"path": "/mnt/that/is/not/there", "inode": 1}, False),  # nothing can be told
    ],
)
def test_what_can_be_told(original: RunDirectory, place: dict[str, object], is_same: bool) -> None:
    name = original.identity()
    change(original, place)
    assert (original.identity() == name) is is_same


def test_a_snapshot_has_the_same_inodes(original: RunDirectory, tmp_path: Path) -> None:
    """As file systems make them: the original is still there, so it is a copy all the same."""
    copy = copied(original.path, tmp_path / "runs" / "B")
    change(copy, {"inode": os.stat(copy.path).st_ino})
    assert copy.identity() != original.identity()


def test_a_directory_of_an_older_version_stays_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"id": "0123456789abcdef"}')
    assert RunDirectory(tmp_path).identity() == "0123456789abcdef"
    assert copied(tmp_path, tmp_path.with_name("copy")).identity() != "0123456789abcdef"


def test_what_cannot_be_read_is_not_written_over(original: RunDirectory) -> None:
    name, file = original.identity(), original.path / "run.json"
    file.rename(original.path / "aside")
    file.symlink_to(file)  # reading it fails
    with pytest.raises(OSError, match="symbolic links"):
        original.identity()
    file.unlink()
    (original.path / "aside").rename(file)
    assert original.identity() == name


def test_a_copy_of_a_run_at_work_is_not_taken_for_at_work(original: RunDirectory, tmp_path: Path) -> None:
    assert original.enter("a job") is None
    (original.path / "launches").mkdir()
    (original.path / "launches" / "of-the-original.json").write_text("{}")
    copy = copied(original.path, tmp_path / "runs" / "B")
    copy.identity()
    assert list((copy.path / "launches").iterdir()) == []
    assert read_json(copy.path / "trainer.json") is None
    (copy.path / "launches" / "of-the-copy.json").write_text("{}")
    copy.identity()
    assert copy.enter(LAUNCHED) is None
    assert [path.name for path in (copy.path / "launches").iterdir()] == ["of-the-copy.json"]
    original.left()


def test_all_who_ask_at_once_get_the_same_name(original: RunDirectory, tmp_path: Path) -> None:
    """Also where one of them was killed in the middle."""

    def ask(run: RunDirectory) -> set[str]:
        found: list[str] = []
        barrier = threading.Barrier(6)

        def one() -> None:
            barrier.wait()
            found.append(RunDirectory(run.path).identity())

        threads = [threading.Thread(target=one) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        return set(found)

    names = set()
    for number in range(20):
        copy = copied(original.path, tmp_path / "runs" / f"{number}")
        before = (copy.path / "run.json").read_text()
        names |= ask(copy)
        (copy.path / "run.json").write_text(before)  # its new name was claimed, and no more
        names |= ask(copy)
    assert len(names) == 20
    assert original.identity() not in names


@pytest.mark.slow
def test_a_copy_is_launched_while_the_original_is_at_work_as_a_run_of_its_own(original: RunDirectory) -> None:
    """To Weights & Biases, too."""
    launches = original.path / "launches"
    launches.mkdir()
    record = {"launch_id": "a" * 32, "host": platform.node(), "node_rank": None, **describe_process()}
    (launches / "a.json").write_text(json.dumps(record))
    copy = copied(original.path, original.path.with_name("B"))
    script = copy.path / "script.py"
    script.write_text("import os\nprint('W&B run', os.environ['WANDB_RUN_ID'])\n")
    launch = ["-m", "lightning_resilience.launch.cli", "launch", "--nproc-per-node=1", f"--run-dir={copy.path}"]
    ended = run_command([sys.executable, *launch, str(script)])
    assert ended.returncode == 0, ended.stderr
    assert "is a copy of the run in" in ended.stderr
    assert f"W&B run {copy.identity()}" in ended.stdout
    assert copy.identity() != original.identity()
