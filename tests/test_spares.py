"""Spares: processes that have done the imports of a worker and take its place.

The launcher's side and the spare's run for real, but for the last tests with a worker that does not import torch.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_resilience.launch import imports, spares, standstill
from lightning_resilience.launch.channel import Channel, Message
from lightning_resilience.launch.processes import processes_of
from lightning_resilience.launch.spares import Workers
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE
from tests.harness import command, result
from tests.test_exact_resume import make, undisturbed
from tests.test_launch import REAL, WITHOUT_NVRX, Launcher, launcher, wait_until

__all__ = ["launcher"]  # a fixture


# -- the channel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = (Channel(each) for each in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def test_a_message_arrives_with_its_descriptors_or_not_at_all(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    first, second = ends
    large = {"text": "x" * 100_000, "not unicode": "\udcff"}
    with open(tmp_path / "file", "w") as file:
        assert first.send("go", [file.fileno()], **large)
    assert second.is_readable()
    message = second.receive()
    assert message is not None
    assert (message.kind, message.fields) == ("go", large)
    os.write(message.fds[0], b"here")
    os.close(message.fds[0])
    assert (tmp_path / "file").read_text() == "here"
    assert not second.is_readable()
    if (pid := os.fork()) == 0:
        os._exit(first.send("from a child"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not second.is_readable()
    first.close()
    assert second.receive() is None
    assert not first.send("more")


@pytest.mark.parametrize("said", [b"5", b"[1]", b"{", b"{}", b'{"kind": 3}', b"[" * 100_000, b"\xff"])
def test_what_is_no_message_is_the_end_and_leaves_nothing_open(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    before = os.listdir("/proc/self/fd")
    with theirs:
        socket.send_fds(theirs, [struct.pack("!I", len(said))], [theirs.fileno()])
        theirs.sendall(said)
        assert channel.receive() is None
        assert os.listdir("/proc/self/fd") == before
    channel.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_whose_listener_has_failed_is_gone(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    over = threading.Event()

    def fail(message: Message) -> None:
        raise ValueError("on purpose")

    theirs.listen(fail, over.set)
    assert ours.send("state")
    assert over.wait(10)
    assert ours.receive() is None


def test_an_end_that_does_not_read_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours, takes_within_s=0.01)
        assert not channel.send("go", text="x" * 10_000_000)
        assert not channel.send("go")
        channel.close()


# -- imports -----------------------------------------------------------------------------------------------------------


class Script:
    """Runs scripts that import small packages, some of them installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.installed = folder / "site"
        self.own = folder / "own"
        for each in (self.installed, self.own):
            each.mkdir()
        monkeypatch.setattr(imports, "_roots", lambda: (f"{self.installed}/",))
        monkeypatch.setattr(sys, "path", [str(self.own), str(self.installed), *sys.path])
        self._modules = set(sys.modules)

    def forget(self) -> None:
        for name in set(sys.modules) - self._modules:
            del sys.modules[name]
        imports._is_real.cache_clear()
        imports._recorded.cache_clear()

    def package(self, name: str, text: str = "", installed: bool = True) -> None:
        path = (self.installed if installed else self.own) / f"{name}.py"
        path.write_text(
            f"import os, sys\nMODE, REST = os.environ.get('SPARES_MODE'), 'SPARES_REST' in os.environ\n{text}"
        )
        os.utime(path, ns=(0, 0))

    def run(self, text: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
        recorder = imports.Recorder(before)
        try:
            exec(text, {})
        finally:
            recorder.end()
        noted: dict[str, Any] = json.loads(json.dumps(recorder.noted()))
        return noted


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv("SPARES_REST", "1")
    monkeypatch.setenv("SPARES_MODE", "first")
    script = Script(tmp_path, monkeypatch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # as in a process that has drawn no number
        yield script
    script.forget()


def names(noted: dict[str, Any]) -> list[str]:
    return [name for name, _ in noted["modules"]]


@pytest.mark.parametrize("module", ["foreign.py", "foreign/__init__.py", "foreign/inner/__init__.py"])
def test_what_an_installer_has_recorded_in_a_folder_of_its_own_is_installed(script: Script, module: str) -> None:
    (path := script.own / module).parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    script.package("users", installed=False)
    text = f"import users, {name}"
    assert names(script.run(text)) == []
    script.forget()
    (about := script.own / "foreign_package-1.0.dist-info").mkdir()
    (about / "RECORD").write_text(f"{module},sha256=x,0\nforeign_package-1.0.dist-info/RECORD,,\n")
    (script.own / "broken-1.0.dist-info" / "RECORD").parent.mkdir()
    (script.own / "broken-1.0.dist-info" / "RECORD").write_bytes(b"users\xff.py,,\n")
    noted = script.run(text)
    assert names(noted)[-1] == name
    own = [file for file, *_ in noted["files"] if file.startswith(str(script.own))]
    assert own == [str(script.own / "users.py")]


def test_libraries_see_the_environment_that_the_script_gave_them(script: Script) -> None:
    for name in ("early", "late", "last"):
        script.package(name, "import inner" if name == "late" else "")
    script.package("inner")
    script.package("users", "import inner", installed=False)
    text = """
import os, sys
import early
os.environ["SPARES_MODE"] = "second"
sys.path.append("/somewhere")
import users
import late
del os.environ["SPARES_REST"]
import last
"""
    environment, path = dict(os.environ), list(sys.path)
    noted = script.run(text)
    seen = {name: (sys.modules[name].MODE, sys.modules[name].REST) for name in names(noted)}
    assert list(seen.items()) == [
        ("early", ("first", True)),
        ("inner", ("second", True)),
        ("late", ("second", True)),
        ("last", ("second", False)),
    ]
    sys.path[:] = path
    imports.set_environment(environment)
    script.forget()
    assert imports.import_all(noted, lambda: False) is None
    assert {name: (sys.modules[name].MODE, sys.modules[name].REST) for name in names(noted)} == seen
    assert (dict(os.environ), sys.path) == (environment, path)
    assert "users" not in sys.modules
    # The worker that it becomes notes the same for the next, and so does one that has not come to all of it.
    assert script.run(text, noted) == noted
    sys.path[:] = path
    imports.set_environment(environment)
    script.forget()
    stops = iter([False, False, True])
    assert imports.import_all(noted, lambda: next(stops)) is None
    assert {"early", "inner"} <= sys.modules.keys()
    assert "last" not in sys.modules
    again = script.run(text, noted)
    assert again["modules"] == noted["modules"]
    script.forget()
    sys.path[:] = path
    imports.set_environment(environment)
    assert imports.import_all(again, lambda: False) is None
    assert {name: (sys.modules[name].MODE, sys.modules[name].REST) for name in names(again)} == seen


def test_what_is_not_what_it_was_is_not_used(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.package("library", "if os.path.exists(os.environ['SPARES_PLUGIN']): import plugin")
    script.package("plugin", installed=False)
    script.package("helper", installed=False)
    monkeypatch.setenv("SPARES_PLUGIN", "/none")
    noted = script.run("import library, helper")
    assert names(noted) == ["library"]

    def problem() -> str | None:
        script.forget()
        return imports.import_all(noted, lambda: False)

    assert problem() is None
    monkeypatch.setenv("SPARES_PLUGIN", "/")
    assert "plugin, which is not an installed package" in str(problem())
    monkeypatch.setenv("SPARES_PLUGIN", "/none")
    script.package("library", "import torch; torch.rand(1)")
    assert "random numbers" in str(problem())
    torch.manual_seed(1)
    script.package("library", "raise SystemExit('no')")
    assert "SystemExit: no" in str(problem())
    (script.installed / "library.py").rename(script.own / "library.py")
    assert f"{script.own}/library.py and not {script.installed}/library.py" in str(problem()) or problem()
    script.package("library")
    (script.own / "library.py").write_text("")
    assert f"{script.own}/library.py and not" in str(problem())
    # A module of the user's that was edited: it may set other variables before it imports.
    assert imports.why_changed(noted) is None
    script.package("helper", "# edited", installed=False)
    assert imports.why_changed(noted) == f"{script.own}/helper.py has changed"


SEED = "import random; random.seed(1)"
DRAWS = {"before": f"import draws, too; {SEED}", "after": f"{SEED}; import draws", "never": "import draws, too"}


@pytest.mark.parametrize("drawn", [1, 2000], ids=["1", "more than are made at a time"])
@pytest.mark.parametrize("when", DRAWS)
def test_what_a_library_draws_when_it_is_imported_counts_after_the_seed(script: Script, when: str, drawn: int) -> None:
    """As ``rich`` does: whoever has it imported by Transformers would have no spares."""
    for name in ("draws", "too"):
        script.package(name, f"import random\nfor _ in range({drawn}): random.random()")
    script.package("other")
    random.seed()  # as in a new process
    noted = script.run(f"{DRAWS[when]}; import other")
    script.forget()
    problem = imports.import_all(noted, lambda: False)
    assert (problem is not None) == (when == "after"), problem
    if problem is None:
        again = script.run(f"{DRAWS[when]}; import other", noted)
        assert [each[-1] for each in again["changes"]] == [each[-1] for each in noted["changes"]]


def test_a_link_to_the_users_folder_is_not_installed(script: Script) -> None:
    (script.own / "linked").mkdir()
    (script.own / "linked" / "__init__.py").write_text("")
    (script.installed / "linked").symlink_to(script.own / "linked")
    sys.path.remove(str(script.own))
    assert names(script.run("import linked")) == []


# -- workers and spares ------------------------------------------------------------------------------------------------

WORKER = """
import gc, json, os, signal, sys
from lightning_resilience import _processes
from lightning_resilience.launch import park
from lightning_resilience.launch.job_info import versions
from lightning_resilience.run import ledger
before = {signum.name: str(signal.getsignal(signum)) for signum in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)}
cold = "wave" not in sys.modules
park.enter()
said = {
    "pid": os.getpid(),
    "waited": _processes.waited() > 0,
    "imported": "wave" in sys.modules,
    "stands": any(type(each).__name__ == "_Stop" for each in sys.meta_path),
    "frozen": gc.get_freeze_count() > 0 and park.has_frozen,
    "versions": versions.cache_info().currsize,
    "read": sum(each.size for reader in ledger._readers.values() for each in reader._files.values()),
    "handlers": before == {name: str(signal.getsignal(signal.Signals[name])) for name in before},
    "rank": os.environ["RANK"],
    "channel": "LIGHTNING_RESILIENCE_CHANNEL" in os.environ,
    "cwd": os.getcwd(),
    "argv": sys.argv[1:],
    "oom": open("/proc/self/oom_score_adj").read(),
}
park.record_imports()
import this, wave  # the first prints when it is imported
print("a worker writes", flush=True)
path = f"{os.environ['SAID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['LOCAL_RANK']}"
with open(path + ".new", "w") as file:
    json.dump(said, file)
os.rename(path + ".new", path)
if os.environ.get("BEGINS", "1") == "1":
    park.begun()
while True:
    signal.pause()
"""


class Node:
    """What an elastic launcher does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers = Workers(makes_spares=True)
        self.started: list[subprocess.Popen[bytes]] = []
        self.restart_count = -1

    def start(self, ranks: int = 1, stdout: Any = None, **environment: str) -> list[dict[str, Any]]:
        for process in self.started[-ranks:]:
            process.kill()
            process.wait()
        return self._start(range(ranks), stdout, environment)

    def replace(self, rank: int, **environment: str) -> dict[str, Any]:
        """The worker of a rank has ended, and the others live."""
        process = self.workers._workers[rank].process
        process.kill()
        process.wait()
        self.workers.ended(rank)
        [said] = self._start([rank], None, environment)
        return said

    def _start(self, ranks: Iterable[int], stdout: Any, environment: dict[str, str]) -> list[dict[str, Any]]:
        self.restart_count += 1
        for rank in ranks:
            env = {
                **{"SAID": str(self.folder), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                **{"TORCHELASTIC_RESTART_COUNT": str(self.restart_count), **environment},
            }
            args = (sys.executable, "-c", WORKER, "script.py", "--lr=1")
            self.started.append(self.workers.start(rank, args, os.environ | env, stdout, None))
        paths = [self.folder / f"{self.restart_count}-{rank}" for rank in ranks]
        wait_until(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def spare(self, rank: int = 0) -> int:
        """The number of a spare that is ready."""
        wait_until(lambda: rank in self.workers.spares and self.workers.spares[rank].is_ready)
        return self.workers.spares[rank].process.pid

    def close(self) -> None:
        self.workers.make_no_more("the test is over")
        for process in self.started:
            process.kill()
            process.wait()
        for worker in self.workers._workers.values():
            worker.channel.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def test_a_spare_takes_the_place_of_its_worker_and_is_as_if_just_started(node: Node) -> None:
    run = node.folder / "run"
    (run / "ledger").mkdir(parents=True)
    (run / "ledger" / "a.jsonl").write_text('{"event": "saved", "time": 1.0}\n')
    [first] = node.start(**{RUN_DIR_VARIABLE: str(run)})
    assert not first["waited"]
    assert not first["stands"]
    spare = psutil.Process(node.spare())
    assert spare.cmdline() == psutil.Process(first["pid"]).cmdline()
    assert int(Path(f"/proc/{spare.pid}/oom_score_adj").read_text()) > int(first["oom"])
    spare.send_signal(signal.SIGUSR1)
    with open(node.folder / "stdout", "w") as stdout:
        [second] = node.start(stdout=stdout, MASTER_PORT="4711", **{RUN_DIR_VARIABLE: str(run)})
    size = (run / "ledger" / "a.jsonl").stat().st_size
    ahead = {"imported": True, "frozen": True, "versions": 1, "read": size}
    assert second == first | {"pid": spare.pid, "waited": True} | ahead
    assert (node.folder / "stdout").read_text() == "a worker writes\n"
    # Another rank than it was made for: it runs cold, under the same number.
    number = node.spare()
    [third] = node.start(RANK="5", **{RUN_DIR_VARIABLE: str(run)})
    assert third == first | {"pid": number, "waited": True, "rank": "5"}


@pytest.mark.slow
def test_a_spare_stands_still_while_ranks_go_back_to_their_fit_unless_it_is_needed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "IMPORTS_STAND_STILL_FOR_S", 1000.0)
    still = node.workers._standstill
    node.start()
    for is_needed in (False, True):
        still.end(0)  # it says that it is in its fit
        still.begin(0)
        wait_until(lambda: 0 in node.workers.spares)
        time.sleep(1.0)
        assert not node.workers.spares[0].is_ready
        if is_needed:
            [said] = node.start()
            assert said["waited"]
            assert still._is_open
        else:
            still.wait_for(7)
            still.end(7)
        node.spare()
        os.kill(node.spare(), signal.SIGKILL)
        assert not node.start()[0]["waited"]


@pytest.mark.slow
def test_a_spare_that_is_dead_or_does_not_answer_is_replaced_by_a_worker(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spares, "_ANSWERS_WITHIN_S", 0.3)
    node.start()
    number = node.spare()
    os.kill(number, signal.SIGSTOP)
    [second] = node.start()
    assert not second["waited"]
    assert not psutil.pid_exists(number)
    os.kill(node.spare(), signal.SIGKILL)
    assert not node.start()[0]["waited"]
    # Its launcher has gone.
    process = psutil.Process(node.spare())
    node.workers.spares[0].channel.close()
    assert node.workers.spares.pop(0).process.wait(10) == 1
    assert not process.is_running()
    written = capfd.readouterr().out
    assert [written.count(each) for each in ("a worker writes", "Beautiful is better than ugly")] == [3, 3]  # no spare


@pytest.mark.slow
def test_after_a_spare_that_has_failed_before_it_trained_there_are_no_more(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.start(ranks=2)
    assert node.spare(0) != node.spare(1)
    assert all(each["waited"] and each["imported"] for each in node.start(ranks=2))
    assert capfd.readouterr().out.count("a worker writes") == 4
    assert node.spare(0) != node.spare(1)
    assert all(each["waited"] for each in node.start(ranks=2, BEGINS="0"))
    assert not node.workers.spares
    assert not any(each["waited"] for each in node.start(ranks=2))
    assert not node.workers.makes_spares


def test_a_worker_is_replaced_by_its_spare_while_the_others_live(node: Node) -> None:
    node.start(ranks=2)
    other = node.workers._workers[0]
    os.kill(node.spare(0), signal.SIGKILL)  # which harms nobody
    number = node.spare(1)
    assert node.replace(1)["pid"] == number
    assert node.workers._workers[0] is other
    assert not other.channel.is_readable()  # it would be if it were closed
    number = node.spare(1)  # the replacement has trained, and has a spare again
    assert not node.replace(0)["waited"]
    assert node.replace(1, BEGINS="0")["pid"] == number
    assert node.workers.makes_spares
    assert not node.replace(1)["waited"]
    assert not node.workers.makes_spares  # what was a spare has ended before it trained


@pytest.mark.slow
def test_spares_that_need_too_much_memory_are_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_MEMORY_SHARE", 0.0)
    node.start()
    wait_until(lambda: not node.workers.makes_spares and not node.workers.spares)
    assert not node.start()[0]["waited"]


@pytest.mark.nvrx
def test_elastic_launchers_start_a_worker_where_spares_are_put_in() -> None:
    found = 0
    for names_of_modules in spares.HANDLERS.values():
        for name in names_of_modules:
            try:
                module = importlib.import_module(name)
            except ImportError:  # of another version
                continue
            source = inspect.getsource(module.SubprocessHandler._popen)
            assert list(inspect.signature(module.SubprocessHandler._popen).parameters) == ["self", "args", "env"]
            assert "start_new_session" in source
            assert all(f"{each}=" in source for each in ("env", "stdout", "stderr"))
            assert "self.proc" in (made := inspect.getsource(module.SubprocessHandler.__init__))
            assert all(each in made for each in ("self.local_rank_id", "self._stdout", "self._stderr", "self._popen("))
            found += 1
    assert found


def wait_for_spares(launcher: Launcher, count: int) -> None:
    """Until so many have been ready: one after the other, and each imports for seconds of CPU time."""
    deadline = time.monotonic() + 200
    folder = launcher.run_directory.path / "logs"
    while sum(path.read_text().count("is ready") for path in folder.glob("launcher-*.log")) < count:
        assert time.monotonic() < deadline, launcher.stderr()
        time.sleep(0.05)


@pytest.mark.nvrx
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_a_restart_with_a_spare_is_like_one_without(launcher: Launcher) -> None:
    """Also what a library reads at its import, text that was edited meanwhile, output, and a path with spaces."""
    scripts = launcher.folder / "of mine, 1"
    scripts.mkdir()
    (scripts / "helper.py").write_text("TEXT = 'first'")
    launcher.script(
        """
        os.environ["OMP_NUM_THREADS"] = "2"
        is_warm = "torch" in sys.modules
        import helper, psutil, random, torch, xml.dom.minidom
        from lightning_resilience.launch import park
        print("output of", restart_count, flush=True)
        ledger.record(
            "told", is_warm=is_warm, threads=torch.get_num_threads(), text=helper.TEXT, pid=os.getpid(),
            flags=hash("hash"), files=sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)),
            handlers=[str(signal.getsignal(each)).split(" at 0x")[0] for each in signal.valid_signals()],
            argv=sys.argv, path=sys.path,
            env={name: value for name, value in os.environ.items() if "MASTER" not in name and "RESILIENCE" in name},
        )
        park.begun()
        signal.pause()
        """,
        "of mine, 1/a script.py",
    )
    script = "of mine, 1/a script.py"
    launch = launcher.start("--nproc-per-node=1", script, "--name=a b", program=REAL, PYTHONHASHSEED="7")

    def told(count: int) -> dict[str, Any]:
        launcher.wait_for("told", count)
        found = launcher.events("told")[-1]
        return {name: found[name] for name in found.keys() - {"pid", "time", "id", "order"}} | {"time": 0}

    def kill() -> None:
        wait_for_spares(launcher, len(launcher.events("told")))
        os.kill(launcher.events("told")[-1]["pid"], signal.SIGKILL)

    first = told(1)
    kill()
    second = told(2)
    assert not first["is_warm"]
    assert first["argv"] == [script, "--name=a b"]
    assert first["threads"] == 2
    assert second["is_warm"]
    for name in ("threads", "text", "flags", "handlers", "argv", "path"):
        assert second[name] == first[name], name
    different = {name for name, _ in first["env"].items() ^ second["env"].items()}
    assert different <= {"LIGHTNING_RESILIENCE_WORKER_PID", "LIGHTNING_RESILIENCE_WORKER_BEGAN"}
    wait_for_spares(launcher, 2)
    (scripts / "helper.py").write_text("TEXT = 'edited'")
    kill()
    third = told(3)
    assert (third["text"], third["is_warm"]) == ("edited", False)
    wait_for_spares(launcher, 3)
    logs = [path.read_text() for path in (launcher.run_directory.path / "logs").rglob("*") if path.is_file()]
    assert all(any(f"output of {restart}" in text for text in logs) for restart in range(3))
    [launch_id] = launcher.launch_ids
    launch.kill()
    wait_until(lambda: not processes_of(launch_id))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_a_module_whose_output_torchrun_redirects_is_restarted_with_a_spare(launcher: Launcher) -> None:
    (launcher.folder / "mine").mkdir()
    (launcher.folder / "mine" / "words.py").write_text("TEXT = 'first'")
    launcher.script(
        """
        is_warm = "torch" in sys.modules
        import torch
        from lightning_resilience.launch import park
        from . import words
        main = sys.modules["__main__"]
        ledger.record(
            "told", is_warm=is_warm, pid=os.getpid(), argv=sys.argv, path=sys.path, text=words.TEXT,
            main=[main.__name__, main.__spec__.name, main.__package__, os.path.relpath(main.__file__)],
        )
        print("output of", restart_count, flush=True)
        park.begun()
        signal.pause()
        """,
        "mine/train.py",
    )
    # Options of torchrun that launch does not show; without the files of the ranks' own, which they would write to.
    program = WITHOUT_NVRX.replace(
        "cli.main", "from lightning_resilience.launch import job\njob.OUTPUT_VARIABLE = 'NONE'\ncli.main"
    )
    arguments = ["--nproc-per-node=1", "-m", "mine.train", "--name=a b"]
    launcher.start(*arguments, program=program, PET_REDIRECTS="3")
    launcher.wait_for("told")
    wait_for_spares(launcher, 1)
    os.kill(launcher.events("told")[-1]["pid"], signal.SIGKILL)
    launcher.wait_for("told", 2)
    first, second = launcher.events("told")
    assert (first["is_warm"], second["is_warm"]) == (False, True)
    assert first["main"] == ["__main__", "mine.train", "mine", "mine/train.py"]
    assert [second[name] for name in ("argv", "path", "text", "main")] == [
        first[name] for name in ("argv", "path", "text", "main")
    ]
    folder = launcher.run_directory.path / "elastic"
    for restart in range(2):
        [stdout] = folder.glob(f"*/attempt_{restart}/0/stdout.log")
        wait_until(lambda stdout=stdout: stdout.read_text())
        assert stdout.read_text() == f"output of {restart}\n"


@pytest.mark.nvrx
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [REAL, WITHOUT_NVRX], ids=["NVRx", "torchrun"])
def test_real_ranks_killed_with_spares_train_the_same_weights(launcher: Launcher, program: str) -> None:
    options = {"trainer": {"devices": 2}, "validation": True, "data": "shuffle", "workers": 1}
    is_ready = str(launcher.folder / "ready")
    events = [
        {"at": "train", "step": step, "rank": rank, "do": "SIGKILL", "once": True, "within_s": 200.0}
        | {"after_file": f"{is_ready}-{number}"}
        for number, (step, rank) in enumerate([(20, 1), (40, 0)][: 1 if program == WITHOUT_NVRX else 2])
    ]
    config = make(launcher.folder, "disturbed", events=events, **options)
    config |= {"run_dir": str(launcher.run_directory.path), "callbacks": []}
    arguments = ["--spares=auto", "--nproc-per-node=2", *command(config)[1:]]
    launch = launcher.start(*arguments, program=program, PYTHONWARNINGS="ignore")
    for number in range(len(events)):
        wait_for_spares(launcher, 2 * (number + 1))
        Path(f"{is_ready}-{number}").touch()
    assert launch.wait(200) == 0, launcher.stderr()
    assert result(config) == undisturbed(launcher.folder, **options)[0]
    logs = "".join(path.read_text() for path in (launcher.run_directory.path / "logs").glob("launcher-*.log"))
    assert logs.count("replaces it") == 2 * len(events)
    assert [event["restart_count"] for event in launcher.events("start")] == list(range(len(events) + 1))
