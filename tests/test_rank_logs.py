"""What ranks write: shown, kept in the run directory, and read again; nothing that reads it can hold up a rank."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience._output import NAME
from lightning_resilience.launch import logs, rank_logs, rank_output
from lightning_resilience.launch.logs import NoLog, show_logs
from lightning_resilience.launch.rank_logs import LogKeeper, LogReader, attempts, folder_of, log_of, ranks
from lightning_resilience.launch.rank_output import OUTPUT_VARIABLE, NodeOutput
from lightning_resilience.launch.relay import Relay
from lightning_resilience.run.events import LaunchExit, LaunchStart
from lightning_resilience.run.ledger import Ledger
from lightning_resilience.run.run_directory import RunDirectory
from tests.terminals import PATIENCE_S
from tests.test_launch import Launcher, launcher, wait_until

__all__ = ["launcher"]

PRELUDE = "from lightning_resilience.launch.rank_output import redirect_streams; redirect_streams(); import os, sys\n"


class Node:
    """The output of the ranks of a node, and who reads it, in this process."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.folder = folder / "run", folder / "output"
        self.run_dir.mkdir()
        self.folder.mkdir()
        self.output = NodeOutput(self.folder)
        self.keeper = LogKeeper(self.run_dir, lambda: self.output.files)

    def start(
        self, program: str, rank: int = 0, attempt: int = 0, restarts: int = 0
    ) -> subprocess.CompletedProcess[str]:
        names = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "n1", "MASTER_PORT": str(attempt)},
            **{"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(restarts)},
        }
        return subprocess.run(
            [sys.executable, "-c", PRELUDE + program],
            env=os.environ | names | {OUTPUT_VARIABLE: str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    def keep(self, is_last: bool = True) -> None:
        self.output.look()
        self.keeper._keep(is_last)

    def show(self, is_last: bool = False) -> bytes:
        shown: list[bytes] = []
        self.output.look()
        for file in self.output.files:
            while file.show(shown.append, is_last):
                pass
        return b"".join(shown)

    def log(self, rank: int = 0, attempt: int = 1) -> bytes:
        reader = LogReader(folder_of(self.run_dir, attempt), rank)
        return b"".join(iter(reader.read, b""))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_last_words_of_a_killed_rank_are_kept(node: Node) -> None:
    done = node.start("print('to stdout'); sys.stderr.write('in the mid'); os.kill(os.getpid(), 9)", rank=1)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    node.start("print('another rank'); os.write(2, b'native\\n')", restarts=1)  # another node, which counts for itself
    node.start("print('restarted')", rank=1, attempt=1)
    node.keep(is_last=False)
    assert attempts(node.run_dir) == [1, 2]
    assert ranks(node.run_dir, 1) == [0, 1]
    assert node.log(1) == b"to stdout\nin the mid\n"
    assert node.log(0) == b"another rank\nnative\n"
    assert node.log(1, attempt=2) == b"restarted\n"
    assert node.show(is_last=True) == b"to stdout\nin the midanother rank\nnative\nrestarted\n"


@pytest.mark.slow
def test_what_a_rank_writes_that_outlives_another_one_is_never_lost(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "_REMOVED_AFTER_S", -1.0)
    lives_on = f"""
print('first')
os.environ['MASTER_PORT'] = '1'
open({str(node.folder.parent / "wrote")!r}, 'w').close()
while not os.path.exists({str(node.folder.parent / "seen")!r}): pass
print('still the first')
redirect_streams()
print('second')
"""
    writer = threading.Thread(target=node.start, args=(lives_on, 0))
    writer.start()
    wait_until((node.folder.parent / "wrote").exists)
    node.start("print('replaced')", rank=1, attempt=1)
    for _ in range(2):
        node.keep(is_last=False)
        node.show()
    (node.folder.parent / "seen").touch()
    writer.join()
    node.keep()
    assert node.log(0) == b"first\nstill the first\n"
    assert node.log(0, attempt=2) == b"second\n"
    assert node.log(1, attempt=2) == b"replaced\n"


def test_only_whole_lines_are_shown_unless_a_rank_pauses(node: Node) -> None:
    (node.folder / f"{'0' * 16}-0-1.out").write_bytes(b"one\ntw")
    assert node.show() == b"one\n"
    assert node.show() == b"tw"  # nothing has come meanwhile: a prompt, say


LOST_STORE = b"""\
[rank1]:[W1124 02:04:20.912279404 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=7, addr=[n1]:35094, \
remote=[n1]:55281): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?
Exception raised from recvBytes at /torch/csrc/distributed/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f496d777b8d in /torch/lib/libc10.so)
<omitting python frames>
frame #48: _start + 0x21 (0x5650bddc4081 in python)

"""


def test_stacks_in_cpp_of_ranks_whose_store_has_gone_are_only_in_their_logs(node: Node) -> None:
    file = node.folder / f"{'0' * 16}-1-2.out"
    others = b"[rank1]:[W1124 02:04:20.9 TCPStore.cpp:343] [c10d] TCP client failed to connect\nframe #1: mine\n\n"
    written = b"before\n" + LOST_STORE + b"\nafter\n" + others + LOST_STORE * 2 + b"behind\n"
    node_shows = b""
    for end in (0, *itertools.accumulate(map(len, written.splitlines(keepends=True)))):  # as it is written
        file.write_bytes(written[:end])
        node_shows += node.show()
    assert node_shows == b"before\n\nafter\n" + others + b"behind\n"
    node.keep()
    assert node.log(1) == written


def test_a_log_is_text(node: Node) -> None:
    bar = b"\r 1%\r 2%[lightning-resilience rank 0] Saved.\n\x1b[2K\r\x1b[31m3%\x1b[0m\rdone\r\n"
    (node.folder / f"{'0' * 16}-0-1.out").write_bytes(bar + b"\x00\xff\xfe\x1b]0;title\x07\n")
    node.keep()
    assert node.log() == b" 2%\n[lightning-resilience rank 0] Saved.\ndone\n\xff\xfe\n"


def test_output_is_bounded_in_the_run_directory_and_on_the_node(node: Node) -> None:
    size = 24 << 20
    (node.folder / f"{'0' * 16}-0-1.out").write_text("".join(f"{number:063}\n" for number in range(size // 64)))
    assert len(node.show()) == size  # the user's own file has all of it
    node.keep()
    node.show()
    [file] = node.folder.iterdir()
    assert file.stat().st_size == size
    assert file.stat().st_blocks * 512 < 10 << 20
    kept = node.log()
    assert len(kept) < 13 << 20
    lines = kept.splitlines()
    assert int(lines[-1]) == size // 64 - 1
    assert sum(line.startswith(NAME.encode()) for line in lines) == 1


def test_of_a_long_log_the_first_and_the_last_parts_are_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "_PART_BYTES", 100)
    path = node.folder / f"{'0' * 16}-0-1.out"
    for number in range(40):
        with open(path, "ab") as file:
            file.write(b"%019d\n" % number)
        node.keep()
    assert len(list(folder_of(node.run_dir, 1).glob("rank-0.log*"))) == 3
    lines = node.log().splitlines()
    assert lines.pop(5).startswith(NAME.encode())
    assert [int(line) for line in lines] == [*range(5), *range(30, 40)]


def test_a_disk_that_takes_a_part_loses_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        """A file on a disk that has room for five bytes more, which raises only at the next write."""

        def __init__(self, path: Path, *args: Any, **options: Any) -> None:
            self._file, self._room = open(path, *args, **options), 5

        def write(self, data: Any) -> int:
            if not self._room:
                raise OSError(28, "No space left on device")
            written, self._room = self._file.write(data[: self._room]), 0
            return int(written)

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *exc_info: object) -> None:
            self._file.close()

    node.start("print('a line of twenty bytes')")
    with monkeypatch.context() as full:
        full.setattr(rank_logs, "open", Short, raising=False)
        node.keep()
    node.keep()
    assert node.log() == b"a line of twenty bytes\n"


def test_a_line_of_another_thread_goes_nowhere_once_the_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited for room in the pipe meanwhile, whose number another file may have by then."""
    relay = Relay(tmp_path, "not-shown.log")
    assert relay.stderr is not None
    fd = relay.stderr

    class Poll:
        def register(self, *args: Any) -> None: ...

        def poll(self, timeout: float) -> bool:
            relay.__exit__()
            with open(tmp_path / "ledger", "wb") as ledger:
                os.dup2(ledger.fileno(), fd)
            return True

    monkeypatch.setattr("lightning_resilience.launch.relay.select.poll", Poll)
    try:
        assert not relay.show_line("a line")
    finally:
        os.close(fd)
    assert (tmp_path / "ledger").read_bytes() == b""


def test_the_last_words_of_ranks_are_kept_though_who_shows_them_was_killed(node: Node) -> None:
    relay = Relay(node.run_dir, "not-shown.log", node.folder)
    with relay:
        relay._process.kill()
        relay._process.wait()
        node.start("print('last words of 0', end='')")
        node.start("print('last words of 1')", rank=1)
    kept = (node.run_dir / "not-shown.log").read_text()
    assert sorted(kept.splitlines()) == ["last words of 0", "last words of 1"]


def test_storage_that_fails_for_a_while_loses_nothing(node: Node) -> None:
    (node.run_dir / "logs").write_text("no folder can be made here")
    node.start("print('before')")
    node.keep()
    (node.run_dir / "logs").unlink()
    node.keep()
    assert node.log() == b"before\n"
    path = log_of(folder_of(node.run_dir, 1), 0)
    path.rename(path.with_suffix(".away"))
    path.symlink_to("/dev/full")
    node.start("print('while it was full')")
    node.keep()
    path.unlink()
    path.with_suffix(".away").rename(path)
    node.keep()
    assert node.log() == b"before\nwhile it was full\n"


def test_old_attempts_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "_ATTEMPTS", 2)
    folder_of(node.run_dir, 1).mkdir(parents=True)  # another node has just begun to make it
    for number in range(1, 5):
        (node.folder / f"{number:016x}-0-1.out").write_text(f"{number}\n")
        node.keep()
    assert attempts(node.run_dir) == [3, 4]
    assert node.log(attempt=4) == b"4\n"
    other = Node.__new__(Node)  # another node of the same attempt
    other.output, other.keeper = node.output, LogKeeper(node.run_dir, lambda: node.output.files[-1:])
    (node.folder / f"{4:016x}-1-1.out").write_text("from another node\n")
    other.keep()
    assert node.log(rank=1, attempt=4) == b"from another node\n"


# -- the command -------------------------------------------------------------------------------------------------------


def write_log(run_dir: Path, attempt: int, rank: int, text: str) -> None:
    path = log_of(folder_of(run_dir, attempt), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_log_is_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoLog, match="there are no logs"):
        show_logs(tmp_path)
    for attempt in (1, 2):
        for rank in (0, 1, 3):
            write_log(tmp_path, attempt, rank, f"{attempt} {rank}\n")
    for options, expected in [
        ({}, "2 0\n"),
        ({"rank": 3}, "2 3\n"),
        ({"attempt": 1}, "1 0\n"),
        ({"rank": 1, "attempt": 1}, "1 1\n"),
    ]:
        show_logs(tmp_path, **options)  # type: ignore[arg-type]
        out, err = capfd.readouterr()
        assert out == expected
        assert "see also ranks 0, 1, 3 and attempts 1, 2" in err
    with pytest.raises(NoLog, match="rank 2 has no log"):
        show_logs(tmp_path, rank=2)
    with pytest.raises(NoLog, match="no log of attempt 3"):
        show_logs(tmp_path, attempt=3)


@pytest.mark.parametrize("chunk", [8, 1 << 14], ids=["in small pieces", "at once"])
def test_of_all_ranks_lines_are_shown_in_the_order_of_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(logs, "_CHUNK", chunk)
    monkeypatch.setattr(logs, "timestamp", lambda began: "2026-11-24 23:59:50")
    folder_of(tmp_path, 1).mkdir(parents=True)
    (folder_of(tmp_path, 1) / "attempt.json").write_text('{"began": 1.0}')
    at = "[lightning-resilience {} rank {}] {}\n".format
    write_log(
        tmp_path, 1, 0, at("23:59:58", 0, "a") + "of a\n" + at("23:59:59", 0, "b") + at("00:00:02", 0, "c") + "end"
    )
    write_log(tmp_path, 1, 10, "first\n\n" + at("00:00:01", 10, "d") + "of d\n" + at("00:00:03", 10, "e"))
    show_logs(tmp_path, rank="all")
    out, err = capfd.readouterr()
    assert "all ranks" in err
    lines = [line.replace("lightning-resilience ", "") for line in out.splitlines()]
    assert lines == [
        *("rank 10 | first", "rank 10 | ", "rank  0 | [23:59:58 rank 0] a", "rank  0 | of a"),
        *("rank  0 | [23:59:59 rank 0] b", "rank 10 | [00:00:01 rank 10] d", "rank 10 | of d"),
        *("rank  0 | [00:00:02 rank 0] c", "rank  0 | end", "rank 10 | [00:00:03 rank 10] e"),
    ]


def test_all_ranks_are_followed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(RunDirectory(tmp_path).ledger, rank=None)
    names = [name for name, is_required in LaunchStart.own_fields.items() if is_required]
    ledger.record(LaunchStart(**dict.fromkeys(names)))
    steps: list[Callable[[], Any]] = [
        lambda: write_log(tmp_path, 1, 0, "one\nin the mid"),
        lambda: write_log(tmp_path, 1, 3, "late\n"),  # its first words
        lambda: write_log(tmp_path, 1, 0, "dle\nlast words"),
        lambda: ledger.record(LaunchExit(status="finished", exit_code=0, reason="the script ended")),
    ]
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.pop(0)())
    monkeypatch.setattr(logs, "now", lambda history, run_dir: ("running", True))
    show_logs(tmp_path, rank="all", follow=True)
    assert capfd.readouterr().out == "rank 0 | one\nrank 3 | late\nrank 0 | in the middle\nrank 0 | last words\n"


def test_a_log_is_followed_over_restarts_to_the_end_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(RunDirectory(tmp_path).ledger, rank=None)
    names = [name for name, is_required in LaunchStart.own_fields.items() if is_required]
    ledger.record(LaunchStart(**dict.fromkeys(names)))
    steps: list[Callable[[], Any]] = [  # what happens in each pause of the one who follows
        lambda: write_log(tmp_path, 1, 0, "first\n"),
        lambda: write_log(tmp_path, 1, 0, "second\n"),
        lambda: write_log(tmp_path, 2, 0, "restarted\n"),
        lambda: write_log(tmp_path, 1, 0, "last words\n"),
        lambda: ledger.record(LaunchExit(status="finished", exit_code=0, reason="the script ended")),
    ]
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.pop(0)())
    monkeypatch.setattr(logs, "now", lambda history, run_dir: ("running", True))
    show_logs(tmp_path, follow=True)
    out, err = capfd.readouterr()
    assert out == "first\nsecond\nlast words\nrestarted\n"
    assert [line.partition(",")[0] for line in err.splitlines()[1:]] == [
        "==> attempt 1",
        "==> attempt 2",
        "==> the launch has ended: finished (the script ended) <==",
    ]


# -- real launches -----------------------------------------------------------------------------------------------------

WRITES = """
ledger.record("ready")
while not os.path.exists("enough"):
    time.sleep(0.01)
for _ in range(20):
    print("much\\n" * 20000, flush=True)
print("last")
ledger.record("written")
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_who_shows_the_output_holds_up_no_rank(launcher: Launcher, signum: signal.Signals) -> None:
    launcher.script(WRITES)
    launch = launcher.start("--quiet", "script.py")
    launcher.wait_for("ready")
    [relay] = [
        each for each in psutil.Process(launch.pid).children() if "lightning_resilience.launch.relay" in each.cmdline()
    ]
    relay.send_signal(signum)
    (launcher.folder / "enough").touch()
    launcher.wait_for("written")
    if signum == signal.SIGSTOP:
        relay.send_signal(signal.SIGCONT)
    assert launch.wait(PATIENCE_S) == 0, launcher.stderr()
    if signum == signal.SIGSTOP:
        path = launcher.run_directory.path
        reader = LogReader(folder_of(path, attempts(path)[-1]), 0)
        assert b"".join(iter(reader.read, b"")).endswith(b"much\n\nlast\n")
    # What --quiet leaves: the end.
    assert [line.split("] ")[1][:9] for line in launcher.stderr().splitlines()] == ["Finished:"], launcher.stderr()


def test_why_no_worker_was_started_is_shown(launcher: Launcher) -> None:
    program = """
        import functools, sys
        from lightning_resilience import _nvrx
        from lightning_resilience.launch import cli
        def starter(settings, run_id, max_restarts):
            log = _nvrx.elastic_log(settings.run_dir)
            log.parent.mkdir(exist_ok=True)
            return ["bash", "-c", f"echo the rendezvous has failed >> {log}; exit 1"], {}
        cli.Launch = functools.partial(cli.Launch, starter=starter)
        cli.main(sys.argv[1:])
    """
    launcher.script("")
    code = launcher.run("--job-retries=0", "script.py", program=textwrap.dedent(program))
    assert code == 1
    assert launcher.stderr().count("\n  the rendezvous has failed\n") == 1


@pytest.mark.slow
def test_a_run_directory_that_hangs_holds_up_no_rank(launcher: Launcher) -> None:
    """Nobody writes into the pipe, so who looks for the attempt's folder there waits for ever."""
    launcher.script(WRITES)
    attempt = launcher.run_directory.path / "logs" / "attempt-1"
    attempt.mkdir(parents=True)
    os.mkfifo(attempt / "attempt.json")
    (launcher.folder / "enough").touch()
    assert launcher.run() == 0, launcher.stderr()
    assert attempts(launcher.run_directory.path) == [1]
