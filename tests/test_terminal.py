"""A terminal that is closed, a pipe whose reader has gone, a full disk: the run saves and stops, or trains on.

Real terminals, pipes and signals. The short tests have a few lines in place of the training; the matrix at the end
trains, launched and in code, with one process and with two ranks.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience._output import KeptOutput
from lightning_resilience.detect.hangs.timeouts import SECTION_TIMEOUTS_VARIABLE
from lightning_resilience.launch.processes import LAUNCH_ID_VARIABLE
from lightning_resilience.launch.rank_logs import folder_of, log_of
from lightning_resilience.run.run_directory import RUN_DIR_VARIABLE, RunDirectory
from tests.ledgers import read_ledger
from tests.terminals import PATIENCE_S, Terminal, those_left, until
from tests.test_launch import FAKE

ROOT = Path(__file__).parents[1]


class Case:
    """One run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminal: Terminal | None = None
        self.run_directory = RunDirectory(folder / "run")

    def open(self, command: str) -> Terminal:
        self.terminal = Terminal(["bash", "-c", command], self.folder, environment())
        return self.terminal

    def open_shell(self, command: str) -> Terminal:
        """A shell as somebody has it who types the command there."""
        self.terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], self.folder, environment())
        self.terminal.type(f"{command}\n".encode())
        return self.terminal

    def press_ctrl_z(self) -> None:
        """The kernel sends SIGTSTP to everybody in the foreground, and the shell says that they have stopped."""
        assert self.terminal is not None
        self.terminal.type(b"\x1a")
        until(lambda: "Stopped" in self.terminal.text, lambda: self.terminal.text)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_directory.ledger) if event["event"] == name]

    def wait_for(self, event: str) -> None:
        until(lambda: self.events(event), lambda: self.terminal.text if self.terminal else "")

    def wait_for_the_end(self) -> None:
        until(lambda: not those_left(self.folder), lambda: self.terminal.text if self.terminal else "")

    def take_away(self, how: str) -> None:
        """Takes the terminal away, or presses Ctrl-C at it, and waits until all has ended."""
        assert self.terminal is not None
        if how in ("close", "nohup"):
            self.terminal.close()
        else:
            self.terminal.press_ctrl_c()
        if how == "nohup":
            (self.folder / "enough").touch()
        self.wait_for_the_end()

    @property
    def code(self) -> int:
        return int((self.folder / "code").read_text())

    @property
    def log(self) -> str:
        return log_of(folder_of(self.run_directory.path, 1), 0).read_text()

    @property
    def not_shown(self) -> str:
        path = self.run_directory.path / "not-shown.log"
        return path.read_text() if path.exists() else ""


def environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in (LAUNCH_ID_VARIABLE, RUN_DIR_VARIABLE)
    }
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path)
    yield case
    if case.terminal is not None:
        case.terminal.clean_up()
    for pid in those_left(tmp_path):
        os.kill(pid, signal.SIGKILL)


DRAWS = """
import os, sys, time
from lightning_resilience import signals
from tests.ledgers import Ledger
from lightning_resilience.run.run_directory import RunDirectory
ledger = Ledger(RunDirectory(os.environ["LIGHTNING_RESILIENCE_RUN_DIR"]).ledger)
told = []
signals.installed().subscribe(told.append)
print("terminal" if sys.stdout.isatty() else "no terminal", flush=True)
step = 0
while not told and not os.path.exists("enough"):
    step += 1
    sys.stdout.write(f"\\rstep {step}")
    sys.stdout.flush()
    if step == 20:
        ledger.record("ready")
    time.sleep(0.005)
for _ in range(20):  # what is written after the terminal has gone
    step += 1
    sys.stdout.write(f"\\rstep {step}")
    sys.stdout.flush()
    time.sleep(0.01)
if told:
    raise signals.Interrupted(f"saved")
"""


@pytest.mark.parametrize("how", ["close", "tee", "full", "nohup", "ctrl-c"])
@pytest.mark.slow_but_for("close")
def test_a_launch_outlives_its_terminal(case: Case, how: str) -> None:
    (case.folder / "script.py").write_text(DRAWS)
    (case.folder / "launch.py").write_text(FAKE)
    launch = f"{sys.executable} launch.py launch --run-dir=run script.py"
    code = "echo $? > code"
    terminal = case.open(
        {
            "close": f"exec {launch}",
            "tee": f"{launch} 2>&1 | tee log; echo ${{PIPESTATUS[0]}} > code",
            "full": f"trap : INT; {launch} > /dev/full 2>&1; {code}",
            "nohup": f"nohup {launch} > log 2>&1 & wait; sleep {PATIENCE_S}",
            "ctrl-c": f"trap : INT; {launch}; {code}",
        }[how]
    )
    case.wait_for("ready")
    case.take_away(how)
    ended = case.events("exit")[-1]
    if how == "nohup":
        assert (ended["status"], ended["exit_code"]) == ("finished", 0)
        return
    assert (ended["status"], ended["exit_code"]) == ("interrupted", 75)
    assert (terminal.wait() if how == "close" else case.code) == 75
    if how == "ctrl-c":
        assert "\nterminal\n" in terminal.text  # a progress bar is as wide as it is
        # Behind a progress bar a line of ours is a line of its own.
        name = r"\[lightning-resilience [\d:]+ launch\]"
        worker = r"(\[lightning-resilience\] Received signal 15[^\n]*\n)?"  # which may be told sooner
        assert re.search(rf"\rstep \d+(\^C)?\n{worker}{name} Received SIGINT", terminal.text), terminal.text
        assert re.search(rf"\rstep \d+\n{name} Interrupted", terminal.text), terminal.text
        assert not case.not_shown
    else:
        # Of a bar, only what it came to is kept.
        assert re.search(r"^step \d+$", case.log, re.MULTILINE), case.log


WRITES = """
import os, time
from tests.ledgers import Ledger
from lightning_resilience.run.run_directory import RunDirectory
ledger = Ledger(RunDirectory(os.environ["LIGHTNING_RESILIENCE_RUN_DIR"]).ledger)
ledger.record("ready")
while not os.path.exists("enough"):
    time.sleep(0.01)
print("much\\n" * 100000, flush=True)
ledger.record("written")
"""


def test_a_launcher_that_is_stopped_holds_up_no_worker(case: Case) -> None:
    (case.folder / "script.py").write_text(WRITES)
    (case.folder / "launch.py").write_text(FAKE)
    terminal = case.open_shell(f"{sys.executable} launch.py launch --run-dir=run script.py")
    case.wait_for("ready")
    case.press_ctrl_z()
    (case.folder / "enough").touch()
    case.wait_for("written")
    terminal.type(b"fg\nexit $?\n")
    assert terminal.wait() == 0


@pytest.mark.campaign
@pytest.mark.parametrize("by", ["Ctrl-S", "a pager"])
def test_output_that_is_held_holds_up_no_worker(case: Case, by: str) -> None:
    (case.folder / "script.py").write_text(WRITES)
    (case.folder / "launch.py").write_text(FAKE)
    pager = " 2>&1 | (until [ -e written ]; do sleep 0.1; done; cat > log)" if by == "a pager" else ""
    terminal = case.open(f"{sys.executable} launch.py launch --run-dir=run script.py{pager}")
    case.wait_for("ready")
    if by == "Ctrl-S":
        terminal.type(b"\x13")
    (case.folder / "enough").touch()
    case.wait_for("written")
    (case.folder / "written").touch()
    if by == "Ctrl-S":
        terminal.type(b"\x11")
    assert terminal.wait() == 0
    assert "much\n" * 1000 in case.log


GUARDED = """
    import os, sys
    from lightning_resilience._output import guard_streams
    release = guard_streams(__import__("pathlib").Path("kept"))
    sys.stdin.readline()  # from here on nobody reads
    for step in range(3):
        sys.stdout.write(f"\\rstep {step}")
        sys.stdout.flush()
        print(f"line {step}" * 3000)
        print("to stderr", file=sys.stderr)
    try:
        open("/dev/full", "w", buffering=1).write("the user's own\\n")
    except OSError as error:
        open("own", "w").write(str(error.errno))
    sys.exit(75)
"""


@pytest.mark.parametrize("where", ["pipe", "terminal", "full disk"])
def test_no_write_to_a_lost_terminal_raises(tmp_path: Path, where: str) -> None:
    reader, writer = {"pipe": os.pipe, "terminal": pty.openpty}.get(
        where, lambda: (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    )()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(GUARDED)],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    os.close(reader)
    process.communicate(b"\n", timeout=PATIENCE_S)
    assert process.returncode == 75  # and not Python's own 120, for output that it could not write
    assert (tmp_path / "own").read_text() == "28"  # the errors of the user's own files are raised
    kept = (tmp_path / "kept").read_text()
    assert "line 2" in kept
    assert "to stderr" in kept


def test_streams_are_given_back(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from lightning_resilience._output import guard_streams
        before = dict(vars(sys.stdout))
        guard_streams(Path("kept"))()
        assert vars(sys.stdout) == before
        print("written")
    """
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, env=environment(), stdout=full, timeout=60
        )
    assert done.returncode != 0  # after the fit a script's results must not be lost in silence


def test_what_is_ignored_for_a_terminal_stays_ignored() -> None:
    program = """
        import os, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        from lightning_resilience import signals
        listener = signals.install((signal.SIGTERM, signal.SIGHUP), 60)
        told = []
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.SIGHUP not in listener.signums
        assert listener.received is None
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment(), check=True, timeout=60)


def test_of_a_line_that_is_drawn_again_the_last_state_is_kept(tmp_path: Path) -> None:
    kept = KeptOutput(tmp_path / "kept")
    for piece in (b"one\r\n", b"\r10%", b"\r", b"20%", b"\r30%\ntwo\n\r40", b"%", b"\r50%\r", b"60%"):
        kept.write(piece)
    kept.close()
    assert (tmp_path / "kept").read_text() == "one\n30%\ntwo\n60%\n"


TRAINS = """
    import os, sys, time
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            time.sleep(0.01)
            if index == 20:
                open(f"trains-{self.global_rank}", "w").close()
            if self.trainer.strategy.reduce_boolean_decision(os.path.exists("enough"), all=False):
                self.trainer.should_stop = True
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    if __name__ == "__main__":
        callbacks = []
        if "in-code" in sys.argv:
            from lightning_resilience import recipes
            callbacks = recipes.workstation("run").callbacks
        ranks = int(sys.argv[1])
        Trainer(
            accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=-1, logger=False,
            callbacks=callbacks, enable_checkpointing=False, use_distributed_sampler=False,
        ).fit(Module(), DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=1))
"""


def program(where: str, ranks: int, *more: str) -> str:
    """The command that trains, launched with more options or in code."""
    launch = f"{sys.executable} -m lightning_resilience.launch.cli launch --run-dir=run --recipe=workstation"
    return {
        "launched": f"{launch} --nproc-per-node={ranks} {' '.join(more)} train.py {ranks}",
        "in code": f"{sys.executable} train.py {ranks} in-code",
    }[where]


CASES = [
    pytest.param(how, where, ranks, id=f"{how}-{where}-{ranks}", marks=marks)
    for where in ("launched", "in code")
    for ranks in (1, 2)
    for how in ("close", "tee", "nohup", "tmux", "full")
    for marks in [[] if (how, where, ranks) in {("tee", "in code", 1)} else [pytest.mark.campaign]]
]


@pytest.mark.parametrize(("how", "where", "ranks"), CASES)
@pytest.mark.slow
def test_a_training_outlives_its_terminal(case: Case, how: str, where: str, ranks: int) -> None:
    if how == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    (case.folder / "train.py").write_text(textwrap.dedent(TRAINS))
    command = program(where, ranks)
    socket = f"{case.folder.name}-{os.getpid()}"
    tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
    if how == "tmux":
        subprocess.run(
            [*tmux, "new-session", "-d", f"{command}; echo $? > code"],
            cwd=case.folder,
            env={name: value for name, value in environment().items() if name != "TMUX"},
            check=True,
        )
    else:
        case.open(
            {
                "close": f"exec {command}",
                "tee": f"{command} 2>&1 | tee log; echo ${{PIPESTATUS[0]}} > code",
                "full": f"trap : INT; {command} > /dev/full 2>&1; echo $? > code",
                "nohup": f"nohup {command} > log 2>&1 & wait; sleep {PATIENCE_S}",
            }[how]
        )
    terminal = case.terminal
    trains = [case.folder / f"trains-{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() for path in trains), lambda: terminal.text if terminal else "")
    if terminal is None:
        subprocess.run([*tmux, "kill-server"], check=True)
        case.wait_for_the_end()
    else:
        case.take_away(how)
    assert case.events("saved")
    if how == "nohup":
        assert case.events("finished")
        return
    assert case.events("interrupted")
    if terminal is not None:
        assert (terminal.wait() if how == "close" else case.code) == 75
    if where == "launched":
        assert case.events("exit")[-1]["exit_code"] == 75


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["launched", "in code"])
def test_who_presses_ctrl_z_and_comes_back_goes_on(
    case: Case, where: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later than a step may take: what stands still because somebody wants it does not hang."""
    limit_s = 2.0
    monkeypatch.setenv(SECTION_TIMEOUTS_VARIABLE, f"setup:60,step:{limit_s:g},checkpointing:60,out_of_section:60")
    (case.folder / "train.py").write_text(textwrap.dedent(TRAINS))
    limits = f"--section-timeouts={os.environ[SECTION_TIMEOUTS_VARIABLE]}"
    terminal = case.open_shell(program(where, ranks, limits))
    trains = [case.folder / f"trains-{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() for path in trains), lambda: terminal.text)
    case.press_ctrl_z()
    for path in trains:
        path.unlink(missing_ok=True)
    time.sleep(3 * limit_s)
    if where == "in code":
        assert not any(path.exists() for path in trains)
        terminal.type(b"fg\n")
    until(lambda: all(path.exists() for path in trains), lambda: terminal.text)
    if where == "launched":  # whose ranks have gone on
        terminal.type(b"fg\n")
    (case.folder / "enough").touch()
    terminal.type(b"exit $?\n")
    assert terminal.wait() == 0, terminal.text
    assert case.events("finished")
    assert not case.events("fault")
    case.wait_for_the_end()
