"""``lightning-resilience clean``: removes what nobody needs, and nothing of a run that is in use or that may go on."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._files import temporary_path
from lightning_resilience._processes import describe_process
from lightning_resilience.checkpoint import local_folders
from lightning_resilience.detect.hangs.rank_probe import describe_rank
from lightning_resilience.launch import cleaning, temporary
from lightning_resilience.launch.cleaning import Found, clean, find_leftovers, remove
from lightning_resilience.launch.cli import main
from lightning_resilience.launch.listing import runs_below
from lightning_resilience.run import time_account
from lightning_resilience.run.events import TimeSpent
from lightning_resilience.run.ledger import read_ledger
from lightning_resilience.run.run_directory import Outcome, RunDirectory
from tests.harness import Ranks, result, samples
from tests.test_goodput import HUNG, run_with, spent
from tests.test_json_output import parsed
from tests.test_local_checkpoint import BOTH, killed, options_of, parts_in, reference, resumes

NOBODY = 2**22 + 1  # no process has this number
HERE = os.uname().nodename


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node memory of its own."""
    own = tmp_path / "shm" / f"lightning-resilience-{os.getuid()}"
    (own / "local_ckpt" / HERE).mkdir(parents=True)
    own.chmod(0o700)
    monkeypatch.setattr(cleaning, "own_directories", lambda: [own])
    monkeypatch.setattr(local_folders, "own_directories", lambda: [own])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(temporary, "_base", lambda prefix: str(tmp_path / "tmp"))
    return own


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def a_run(path: Path, finished: bool = True) -> Path:
    """A run that has ended, and what it may leave."""
    path.mkdir(parents=True, exist_ok=True)
    run_with(path, *HUNG)
    directory = RunDirectory(path)
    directory.identity()
    directory.claim()
    write(path / "fit-000" / "checkpoints" / "step-000000000012.ckpt")
    if finished:
        write(path / "fit-000" / "checkpoints" / "step-000000000020-final.ckpt")
    directory.fit(0).outcome = Outcome("finished" if finished else "failed", "it has")
    write(path / "fit-000" / "quarantine" / "step-000000000010.ckpt.1a2b3c4d")
    write(path / "fit-000" / "quarantine" / "step-000000000010.ckpt.1a2b3c4d.reason.txt")
    write(path / "fit-000" / "quarantine" / "step-000000000008.ckpt.1a2b3c4d" / "meta.pt")
    dead = temporary_path(path / "fit-000" / "checkpoints" / "step-000000000024.ckpt")
    write(dead.with_name(dead.name.replace(f"-{os.getpid()}-", f"-{NOBODY}-")))
    write(temporary_path(path / "outcome.json"))  # of this process
    time_account.keep(path, "in-ledger", spent(0, 50, 75))
    time_account.keep(path, "node-that-went-down", spent(200, 210, 220))
    for attempt in (9, 10):
        write(path / "logs" / f"attempt-{attempt}" / "rank-0.log")
    write(path / "logs" / "attempt-9 by hand" / "rank-0.log")
    return path


def local_ckpt(node: Path, run: Path, noted: bool = True) -> Path:
    """What a fit of a run has in node memory."""
    folder = node / "local_ckpt" / HERE / RunDirectory(run).identity()
    write(folder / "fit-000" / "step-000000000012-1a2b3c4d" / "rank-00000.shard", "x" * 1000)
    write(folder / "fit-000" / "quarantine" / "rank-00000.shard.1a2b3c4d")
    if noted:
        local_folders.note_origin(folder, run)
    return folder


def tree(folder: Path) -> set[str]:
    """All files below a folder."""
    return {os.path.relpath(path, folder) for path in folder.rglob("*") if not path.is_dir()}


def kinds(found: Found) -> dict[str, int]:
    return {each.kind: len(each.files) for each in found.leftovers}


def why_kept(found: Found, path: Path) -> str:
    return " ".join(why for kept, why in found.kept if kept == path)


def test_what_nobody_needs_is_removed(tmp_path: Path, node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "runs" / "a")
    local = local_ckpt(node, run)
    write(node / "0123456789ab-0" / "rank-0.json", json.dumps({**describe_process(), "pid": NOBODY}))
    write(node / "ba9876543210-0" / "rank-0.json", json.dumps(describe_process()))
    write(tmp_path / "tmp" / f"lightning-resilience-{os.getuid()}-abcd1234" / "socket").parent.chmod(0o700)
    before = tree(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["clean", str(tmp_path / "runs")])
    assert (end.value.code, tree(tmp_path)) == (0, before)
    text = capsys.readouterr().out
    assert "Nothing was removed." in text
    with pytest.raises(SystemExit):
        main(["clean", str(tmp_path / "runs"), "--json"])
    listed = capsys.readouterr().out
    assert tree(tmp_path) == before
    with pytest.raises(SystemExit) as end:
        main(["clean", str(tmp_path / "runs"), "--json", "--yes"])
    found, _ = parsed(
        "clean", capsys.readouterr().out, listed.replace('"kept": []', '"kept": [{"path": "", "why": ""}]')
    )
    assert end.value.code == 0
    assert all(each["removed"] for each in found["leftovers"])
    assert sum(each["size"] for each in found["leftovers"]) > 1000
    gone = before - tree(tmp_path)
    assert {path.split("/", 2)[-1].partition(".step")[0] for path in gone if path.startswith("runs/a/")} == {
        "fit-000/quarantine/step-000000000010.ckpt.1a2b3c4d",
        "fit-000/quarantine/step-000000000010.ckpt.1a2b3c4d.reason.txt",
        "fit-000/quarantine/step-000000000008.ckpt.1a2b3c4d/meta.pt",
        "fit-000/checkpoints/",
        "logs/attempt-9/rank-0.log",
        "time/in-ledger.json",
    }
    assert (run / "fit-000" / "quarantine").is_dir(), "it says that there was something"
    assert not local.exists()
    assert not (node / "0123456789ab-0").exists()
    assert (node / "ba9876543210-0" / "rank-0.json").exists()
    assert not any((tmp_path / "tmp").iterdir())
    assert not find_leftovers(tmp_path / "runs").leftovers


def test_node_memory_of_a_fit_that_may_go_on_stays(tmp_path: Path, node: Path) -> None:
    for name, has_final in (("failed", True), ("no final state", False)):
        run = a_run(tmp_path / name, finished=has_final)
        if has_final:
            RunDirectory(run).fit(0).outcome = Outcome("failed", "an error")
        else:
            RunDirectory(run).fit(0).outcome = Outcome("finished", "there was no room for its state")
        local = local_ckpt(node, run)
        found = find_leftovers(run)
        assert "a resume on this node may need it" in why_kept(found, local / "fit-000")
        for each in found.leftovers:
            assert remove(each) is None
        assert tree(local) == {"run.json", "fit-000/step-000000000012-1a2b3c4d/rank-00000.shard"}


def test_node_memory_of_a_finished_fit_that_trains_on_stays(tmp_path: Path, node: Path) -> None:
    """Its limit was raised, and it was killed: its outcome says what it was before."""
    local = local_ckpt(node, run := a_run(tmp_path / "run"))
    write(local / "fit-000" / "step-000000000027-1a2b3c4d" / "rank-00000.shard")
    write(run / "fit-000" / "checkpoints" / "step--final.ckpt")  # nobody knows whose
    write(local / "fit-000" / "step-")
    assert "a resume on this node may need it" in why_kept(find_leftovers(run), local / "fit-000")


def test_node_memory_of_a_run_that_may_go_on_stays_though_a_copy_of_it_has_finished(tmp_path: Path, node: Path) -> None:
    run = a_run(tmp_path / "run")
    local = local_ckpt(node, run)
    shutil.copytree(run, tmp_path / "run-backup")
    RunDirectory(run).fit(0).outcome = Outcome("failed", "it was gone on with, to a later end")
    for folder in (tmp_path, tmp_path / "run-backup"):
        found = find_leftovers(folder)
        for each in found.leftovers:
            assert remove(each) is None
        assert "fit-000/step-000000000012-1a2b3c4d/rank-00000.shard" in tree(local)
    assert "is a copy" in why_kept(found, local)


def test_a_run_on_local_disk(tmp_path: Path) -> None:
    """On storage that nodes share, those of other nodes are theirs."""
    run = a_run(tmp_path / "run")
    base = tmp_path / "disk" / f"local_ckpt-{os.getuid()}"
    for host in (HERE, "another"):
        write(
            base / host / RunDirectory(run).identity() / "fit-000" / "step-000000000012-1a2b3c4d" / "rank-00000.shard"
        )
    assert not [each for each in find_leftovers(run).leftovers if str(base) in str(each.path)]
    for each in find_leftovers(run, tmp_path / "disk").leftovers:
        assert remove(each) is None
    assert [path.split("/")[0] for path in tree(base)] == ["another"]


GONE: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "removed": (shutil.rmtree, None),
    "removed and begun anew": (lambda run: (shutil.rmtree(run), RunDirectory(run).identity()), None),
    "it is there": (lambda run: None, ""),
    "moved": (lambda run: run.rename(run.with_name("b")), "has been moved"),
    "its parent is gone too": (lambda run: shutil.rmtree(run.parent), None),
    "moved with its parent": (lambda run: run.parent.rename(run.parent.with_name("archive")), "has been moved"),
    "moved and removed": (lambda run: shutil.rmtree(run.rename(run.with_name("b"))), None),
    "its identity is not readable": (lambda run: (run / "run.json").write_text("{"), "is not visible here"),
}


@pytest.mark.parametrize("name", GONE)
def test_node_memory_of_runs_that_are_gone(tmp_path: Path, node: Path, name: str) -> None:
    do, why = GONE[name]
    run = a_run(tmp_path / "elsewhere" / "a")
    local = local_ckpt(node, run)
    do(run)
    (tmp_path / "other").mkdir()
    found = find_leftovers(tmp_path / "other")
    if why is None:
        of_one = find_leftovers(a_run(tmp_path / "runs" / "b")).leftovers
        assert "local checkpoints" not in {each.kind for each in of_one}, "what other runs have left was not asked for"
        [leftover] = found.leftovers
        assert remove(leftover) is None
        assert not local.exists()
    else:
        assert not found.leftovers
        assert why in why_kept(found, local)


def test_storage_that_is_not_mounted_is_not_gone(tmp_path: Path, node: Path) -> None:
    """What is empty is the folder that it is mounted on."""
    run = a_run(tmp_path / "mount" / "a")
    local = local_ckpt(node, run)
    content = json.loads((local / "run.json").read_text())
    (local / "run.json").write_text(
        json.dumps({**content, "above": [[dev + 1, inode] for dev, inode in content["above"]]})
    )
    shutil.rmtree(run)
    assert "is not visible here" in why_kept(find_leftovers(tmp_path / "mount"), local)
    (local / "run.json").unlink()
    assert "is unknown" in why_kept(find_leftovers(tmp_path / "mount"), local)


@pytest.mark.parametrize("has_its_own", [False, True], ids=["none", "a run"])
def test_another_folder_of_the_same_name_does_not_say_what_is_gone(
    tmp_path: Path, node: Path, has_its_own: bool
) -> None:
    """Containers with the node memory of their host, and each with its own project in /workspace."""
    run = a_run(tmp_path / "workspace" / "runs" / "a")
    local = local_ckpt(node, run)
    (tmp_path / "workspace").rename(tmp_path / "of another container")
    (tmp_path / "workspace" / "runs").mkdir(parents=True)
    if has_its_own:
        a_run(run)
    found = find_leftovers(tmp_path / "workspace")
    assert "is not visible here" in why_kept(found, local)


def test_a_run_that_was_put_aside_is_not_gone_though_another_is_in_its_place(tmp_path: Path, node: Path) -> None:
    run = a_run(tmp_path / "runs" / "a")
    local = local_ckpt(node, run)
    run.rename(tmp_path / "runs" / "a-old")
    a_run(run)
    (tmp_path / "other").mkdir()
    assert "has been moved to" in why_kept(find_leftovers(tmp_path / "other"), local)


def test_a_folder_is_searched_once_for_all_runs_that_are_gone_and_again_when_they_are_to_be_removed(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be /tmp, with thousands of folders."""
    runs = [a_run(tmp_path / "runs" / name) for name in "abc"]
    local = [local_ckpt(node, run) for run in runs]
    aside = runs[0].rename(tmp_path / "aside")
    (aside / "run.json").rename(tmp_path / "run.json.aside")
    for run in runs[1:]:
        shutil.rmtree(run)
    searched = []

    def search(folder: Path) -> tuple[list[Path], list[Path]]:
        searched.append(folder)
        return runs_below(folder)

    monkeypatch.setattr(cleaning, "runs_below", search)

    def agrees(question: str) -> bool:
        (tmp_path / "run.json.aside").rename(aside / "run.json")
        aside.rename(tmp_path / "runs" / "moved")
        return "Remove these 3 (" in question

    (tmp_path / "other").mkdir()
    assert clean(tmp_path / "other", None, False, agrees) == 1
    assert searched == [tmp_path / "other", tmp_path / "runs", tmp_path / "runs"]
    assert [path.exists() for path in local] == [True, False, False]


def test_it_comes_back_before_it_is_removed(tmp_path: Path, node: Path) -> None:
    run = a_run(tmp_path / "a")
    local = local_ckpt(node, run)
    run.rename(tmp_path / "aside")
    (tmp_path / "aside" / "run.json").rename(tmp_path / "run.json.aside")
    [leftover] = find_leftovers(tmp_path / "shm").leftovers
    (tmp_path / "run.json.aside").rename(tmp_path / "aside" / "run.json")
    (tmp_path / "aside").rename(run)
    assert remove(leftover) is not None
    assert (local / "fit-000").exists()


def test_a_writer_in_another_container(tmp_path: Path, node: Path) -> None:
    """Its lock is seen on the whole node."""
    run = a_run(tmp_path / "a")
    local = local_ckpt(node, run)
    writer = write(local / "fit-000" / ".writer-1a2b3c4d")
    leftovers = [each for each in find_leftovers(run).leftovers if each.path == local / "fit-000"]
    reader, end = os.pipe()
    locked, ready = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(end)
        file = os.open(writer, os.O_RDWR)
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(ready, b"x")
        os.read(reader, 1)
        os._exit(0)
    os.read(locked, 1)
    assert remove(leftovers[0]) == "a process on this node writes there"
    os.close(end)
    os.waitpid(pid, 0)
    assert remove(leftovers[0]) is None
    for fd in (reader, locked, ready):
        os.close(fd)


def record(run: Path, role: str = "first", **fields: Any) -> Path:
    content = {"launch_id": "1", "uid": os.getuid(), "host": platform.node(), **describe_process(), "beat": 0}
    return write(run / "launches" / f"{role}.000001.json", json.dumps({**content, **fields}))


IN_USE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a launch here": lambda run, _: record(run),
    "a launch in another container": lambda run, _: record(run, namespace="pid:[1]"),
    "a node that waits for the first": lambda run, _: record(run, "node-1-1a2b3c4d", host="elsewhere"),
    "a process trains here": lambda run, _: write(
        run / "trainer.json",
        json.dumps({**describe_process(), "pid": os.getppid(), "process_started": started(os.getppid()), "host": HERE}),
    ),
    "a process trains elsewhere": lambda run, _: write(run / "trainer.json", '{"host": "elsewhere", "pid": 1}'),
    "ranks ran a moment ago": lambda run, _: time_account.keep(
        run, "n1", spent(time.time() - 9, time.time() - 8, time.time())
    ),
    "another attempt": lambda run, _: RunDirectory(run).claim(),
}


def started(pid: int) -> str:
    from lightning_resilience import _processes

    return _processes._started(pid)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "BEAT_INTERVAL_S", 0.01)


@pytest.mark.parametrize("name", IN_USE)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_run_in_use_is_not_touched(
    tmp_path: Path, node: Path, name: str, when: str, monkeypatch: pytest.MonkeyPatch, beats: None
) -> None:
    """Neither where that is seen at once, nor where it begins after it was listed, on any node."""
    run = a_run(tmp_path / "run")
    local_ckpt(node, run)
    if when == "before" and name == "another attempt":
        return
    if when == "before":
        if "another container" in name:
            real = cleaning.time.sleep
            monkeypatch.setattr(cleaning.time, "sleep", lambda s: (record(run, namespace="pid:[1]", beat=1), real(s)))
        IN_USE[name](run, monkeypatch)
    found = find_leftovers(run)
    if when == "before":
        assert why_kept(found, run)
    else:
        assert len(found.leftovers) == 4 + 1
        IN_USE[name](run, monkeypatch)
    before = tree(tmp_path)
    for each in found.leftovers:
        assert remove(each) is not None
    assert tree(tmp_path) == before


def test_launches_on_other_hosts_that_are_dead(tmp_path: Path, beats: None) -> None:
    """Their records do not move; where the first node's is dead, the others of its launch are."""
    run = a_run(tmp_path / "run")
    record(run, host="elsewhere")
    record(run, "node-1-1a2b3c4d", host="another")
    found = find_leftovers(run)
    assert len(found.leftovers) == 4
    assert [remove(each) for each in found.leftovers] == [None] * 4


def test_a_damaged_run_is_not_touched(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "ledger.jsonl").unlink()
    (run / "ledger").touch()
    found = find_leftovers(tmp_path)
    assert not found.leftovers
    assert "cannot be read" in why_kept(found, run)


def test_links_and_files_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run")
    treasure = write(tmp_path / "home" / "treasure")
    os.symlink(treasure.parent, run / "fit-000" / "quarantine" / "link")
    shutil.rmtree(run / "logs" / "attempt-9")
    os.symlink(treasure.parent, run / "logs" / "attempt-9")
    shutil.rmtree(run / "time")
    os.symlink(treasure.parent, run / "time")
    time_account.keep(run, "in-ledger", spent(0, 50, 75))
    found = find_leftovers(run)
    assert kinds(found) == {"half-written": 1}
    assert "link" in why_kept(found, run / "fit-000" / "quarantine")
    (run / "fit-000" / "quarantine" / "link").unlink()
    found = find_leftovers(run)
    assert kinds(found) == {"half-written": 1, "quarantine": 3}
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not find_leftovers(run).leftovers


def test_what_has_changed_since_it_was_listed_stays(tmp_path: Path) -> None:
    """And what has come."""
    run = a_run(tmp_path / "run")
    found = find_leftovers(run)
    changed = write(run / "fit-000" / "quarantine" / "step-000000000010.ckpt.1a2b3c4d", "another")
    come = write(run / "fit-000" / "quarantine" / "step-000000000008.ckpt.1a2b3c4d" / "new")
    (run / "time" / "in-ledger.json").unlink()
    time_account.keep(run, "in-ledger", spent(0, 50, 76))
    for each in found.leftovers:
        assert remove(each) is None
    assert changed.exists()
    assert come.exists()
    assert (run / "time" / "in-ledger.json").exists()


def test_it_asks_and_says_what_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run")
    questions = []

    def agrees(question: str) -> bool:
        questions.append(question)
        record(run)  # a launch begins while the question waits
        return True

    before = tree(run) | {"launches/first.000001.json"}
    assert clean(run, None, False, agrees) == 1
    assert tree(run) == before
    [question] = questions
    assert question.startswith("Remove these 4 (")
    text = capsys.readouterr().out
    assert "may be running it" in text
    assert "Removed 0 bytes." in text


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "the check comes too early"])
@pytest.mark.slow
def test_cleaning_while_a_run_goes_on_changes_nothing(
    tmp_path: Path, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is resumed from node memory, all the time while it trains, and when it has ended."""
    if not checks:
        monkeypatch.setattr(cleaning._Run, "in_use", lambda self: None)
        monkeypatch.setattr(cleaning, "_writer_in", lambda folder: None)
    config = killed(tmp_path, 17, **options_of(tmp_path, callbacks=BOTH, save_every=None))
    held = parts_in(tmp_path / "local")
    stop = threading.Event()
    rounds: list[int] = []

    def cleans() -> None:
        while not stop.is_set():
            for each in find_leftovers(config["run_dir"], tmp_path / "local").leftovers:
                remove(each)
            rounds.append(1)
            stop.wait(0.05)

    for each in find_leftovers(config["run_dir"], tmp_path / "local").leftovers:
        assert remove(each) is None
    assert parts_in(tmp_path / "local") == held
    thread = threading.Thread(target=cleans)
    thread.start()
    try:
        ranks = Ranks(config, tmp_path / "disturbed")
        codes = ranks.wait(100)
    finally:
        stop.set()
        thread.join()
    assert set(codes) == {0}, ranks.text()
    assert rounds
    [(tier, step)] = resumes(config["run_dir"])
    assert (tier, step > 0) == ("local", True)
    assert (result(config), samples(config)) == reference(tmp_path)
    assert not parts_in(tmp_path / "local")
    assert not tree(tmp_path / "local"), "the note to which run it belonged has gone with it"


def test_what_ranks_of_a_killed_watchdog_have_spent_is_recorded_first(tmp_path: Path, node: Path) -> None:
    run, folder = a_run(tmp_path / "run"), node / "0123456789ab-0"
    folder.mkdir()
    about = describe_rank(run, 0, "token", 1, 1, False) | describe_process() | {"process_started": "then", "rank": 0}
    write(folder / "rank-00000.json", json.dumps(about))
    time_account.TimeAccount().share(folder / "rank-00000.time")
    (folder / "watchdog.beat").write_bytes(bytes(8))
    with pytest.raises(SystemExit):
        main(["clean", "--yes", str(run)])
    assert not folder.exists()
    assert [each.attempt for each in read_ledger(run) if isinstance(each, TimeSpent)][-1] == "token"
