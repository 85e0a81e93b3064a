"""The launcher with real processes.

The flow of a launch is tested with a few lines in place of the elastic launcher, which takes seconds to import torch;
the tests at the end run the real one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience.launch import job
from lightning_resilience.launch.processes import LAUNCH_ID_VARIABLE, end_processes, processes_of
from lightning_resilience.launch.status import status
from lightning_resilience.run.run_directory import Outcome, RunDirectory
from tests.ledgers import Ledger, read_ledger

PATIENCE_S = 60.0

REAL = """
import sys
from lightning_resilience.launch import cli
cli.main(sys.argv[1:])
"""

WITHOUT_NVRX = """
import sys
from lightning_resilience import _nvrx
from lightning_resilience.launch import cli
_nvrx.installed_version = lambda: None
cli.main(sys.argv[1:])
"""

# What the elastic launcher does, for one worker and without torch.
ELASTIC = """
import os, signal, subprocess, sys
run_id, max_restarts, *command = sys.argv[1:]
for restart_count in range(int(max_restarts) + 1):
    environment = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restart_count)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "lightning_resilience.launch.worker", *command],
        env={"RANK": "0"} | os.environ | environment,
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
    if worker.wait() == 0:
        sys.exit(int(os.environ.get("ELASTIC_EXIT_CODE", "0")))
sys.exit(1)
"""

FAKE = f"""
import functools, sys
from lightning_resilience.launch import cli
def starter(settings, run_id, max_restarts):
    return [sys.executable, "-IS", "-c", {ELASTIC!r}, run_id, str(max_restarts), *settings.command], {{}}
cli.Launch = functools.partial(cli.Launch, starter=starter)
cli.main(sys.argv[1:])
"""


class Launcher:
    """Starts launches in one folder and cleans up after them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_directory = RunDirectory(folder / "run")
        self._launches: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> None:
        prelude = f"""
            import os, signal, subprocess, sys, time
            from lightning_resilience import signals
            sys.path.append({str(Path(__file__).parents[1])!r})
            from tests.ledgers import Ledger
            from lightning_resilience.run.run_directory import Outcome, RunDirectory
            run_directory = RunDirectory(os.environ["LIGHTNING_RESILIENCE_RUN_DIR"])
            ledger = Ledger(run_directory.ledger)
            restart_count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        """
        (self.folder / name).write_text(textwrap.dedent(prelude) + textwrap.dedent(text))

    def start(self, *arguments: str, program: str = FAKE, **environment: str) -> subprocess.Popen[str]:
        arguments = arguments or ("script.py",)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        environment.pop(LAUNCH_ID_VARIABLE, None)
        launch = subprocess.Popen(
            [sys.executable, "-c", program, "launch", f"--run-dir={self.run_directory.path}", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=open(self.folder / f"stderr-{len(self._launches)}", "w"),
            text=True,
        )
        self._launches.append(launch)
        return launch

    def run(self, *arguments: str, program: str = FAKE, **environment: str) -> int:
        return self.start(*arguments, program=program, **environment).wait(PATIENCE_S)

    def stderr(self, index: int = -1) -> str:
        return (self.folder / f"stderr-{range(len(self._launches))[index]}").read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in read_ledger(self.run_directory.ledger) if event["event"] in names]

    def wait_for(self, event: str, count: int = 1) -> None:
        wait_until(lambda: len(self.events(event)) >= count, lambda: self.stderr())

    @property
    def launch_ids(self) -> list[str]:
        return [event["launch_id"] for event in self.events("launch")]

    def clean_up(self) -> None:
        for launch in self._launches:
            launch.kill()
            launch.wait()
        for launch_id in self.launch_ids:
            end_processes(launch_id)


def wait_until(
    condition: Callable[[], Any], explain: Callable[[], str] = lambda: "", within_s: float = PATIENCE_S
) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()


def test_a_script_runs_as_it_does_under_python_and_its_end_is_recorded(launcher: Launcher) -> None:
    folder = launcher.folder / "code"
    folder.mkdir()
    (folder / "neighbour.py").write_text("answer = 42\n")
    launcher.script(
        """
        import json, neighbour, pickle
        assert "torch" not in sys.modules and "lightning" not in sys.modules
        class Local: pass
        pickle.loads(pickle.dumps(Local()))
        names = ["GRACE_PERIOD_S", "RECIPE", "JOB_ATTEMPT", "SECTION_TIMEOUTS"]
        facts = [sys.argv, __name__, neighbour.answer, [os.environ["LIGHTNING_RESILIENCE_" + name] for name in names]]
        open("facts", "w").write(json.dumps(facts))
        def f(x: int): pass
        assert f.__annotations__ == {"x": int}  # nothing of ours is imported from __future__
        os.chdir("/")
        assert os.path.isfile(__file__), __file__
        """,
        "code/script.py",
    )
    command = ["code/script.py", "--lr", "-m", "x"]
    options = ["--grace-period=30", "--section-timeouts=step:90,checkpointing:none", "--out-of-section-timeout=45"]
    assert launcher.run(*options, *command) == 0, launcher.stderr()
    timeouts = "setup:600,step:90,checkpointing:none,out_of_section:45"
    facts = json.loads((launcher.folder / "facts").read_text())
    assert facts == [command, "__main__", 42, ["30.0", "nemo", "0", timeouts]]
    outcome = launcher.run_directory.outcome
    assert outcome is not None
    assert (outcome.status, outcome.details["command"]) == ("finished", command)
    [start] = launcher.events("start")
    assert start["versions"]["torch"]
    assert (start["world_size"], start["restart_count"], start["verified_step"]) == (1, 0, None)
    [end] = launcher.events("exit")
    assert (end["status"], end["exit_code"], end["rank"]) == ("finished", 0, None)


def test_a_module_and_sys_exit_0(launcher: Launcher) -> None:
    launcher.script("assert sys.argv[1:] == ['a'] and __name__ == '__main__'\nsys.exit(0)", "module.py")
    assert launcher.run("-m", "module", "a") == 0, launcher.stderr()


def test_a_test_that_is_stopped_has_not_finished(launcher: Launcher) -> None:
    """Lightning ends it by an exception whose exit code is 0."""
    stop = "from lightning.pytorch.utilities.exceptions import SIGTERMException\nif stops: raise SIGTERMException"
    launcher.script(f"stops = sys.argv[1] == 'stops'\n{stop}")
    assert launcher.run("script.py", "stops") == 75, launcher.stderr()
    assert launcher.run("--continue-anyway", "script.py", "runs") == 0, launcher.stderr()
    assert "has finished already" not in launcher.stderr()


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("sys.exit(0)", "the script ended by sys.exit, although fit-000 had not finished (step 2: SystemExit: 0)"),
        pytest.param(
            "raise ValueError('no')",
            "the script ended, although fit-000 had not finished (step 2: ValueError: no)",
            marks=pytest.mark.campaign,
        ),
    ],
)
@pytest.mark.slow
def test_a_script_that_ends_well_within_a_fit_says_that_there_is_more(
    launcher: Launcher, ends: str, reason: str
) -> None:
    step = f"\n            if self.global_step == 2 and epochs == 2: {ends}\n            return self.layer"
    script = FIT.replace(" return self.layer", step).replace("max_epochs=epochs", "max_epochs=4").rstrip()
    launcher.script(script.replace("    L.Trainer(", "    try: L.Trainer(") + "\n    except ValueError: pass")
    options = "--recipe=workstation", "--continue-anyway", "script.py", "2"
    assert launcher.run(*options, "2") == 0
    assert f"Finished: {reason}; the same command continues from there. (exit code 0)" in launcher.stderr()
    assert launcher.run(*options, "3") == 0
    assert "Finished: the script ended. (exit code 0)" in launcher.stderr()
    [outcome] = [each.outcome for each in launcher.run_directory.fits]
    assert outcome is not None
    assert (outcome.status, outcome.step) == ("finished", 16)


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError('a child')", "sys.exit(3)"])
@pytest.mark.slow
def test_a_child_that_the_script_has_forked_does_not_speak_for_it(launcher: Launcher, end: str) -> None:
    launcher.script(f"import os, sys\nif os.fork() == 0:\n    {end}\nos.wait()\nprint('parent', flush=True)\n")
    assert launcher.run() == 0, launcher.stderr()
    assert [event["reason"] for event in launcher.events("outcome")] == ["the script ended"]
    assert not launcher.events("fault")


def test_local_dir_reaches_the_workers(launcher: Launcher) -> None:
    launcher.script("open('where', 'w').write(os.environ['LIGHTNING_RESILIENCE_LOCAL_DIR'])")
    assert launcher.run("--local-dir=scratch", "script.py") == 0, launcher.stderr()
    assert (launcher.folder / "where").read_text() == str(launcher.folder / "scratch")


def test_a_crash_is_restarted_inside_the_job(launcher: Launcher) -> None:
    launcher.script("""
        import atexit, ctypes, threading
        class Remains:
            def __del__(self, note=os.mkdir): note("cleared_away")
        def note(what): os.write(order, what.encode())
        if restart_count == 0:
            remains, rows = Remains(), open("rows", "w")
            rows.write("not flushed")
            order = os.open("order", os.O_WRONLY | os.O_CREAT)
            atexit.register(note, "atexit ")
            atexit.register(sys.exit, "of no concern")
            threading.Thread(target=lambda: (threading.main_thread().join(), note("thread "))).start()
            os.dup2(os.open("of_c", os.O_WRONLY | os.O_CREAT), 1)
            ctypes.CDLL(None).printf(b"not flushed")
            raise RuntimeError('boom.')
    """)
    assert launcher.run("--prometheus=run.prom", "--on-event=tee -a told", "script.py") == 0, launcher.stderr()
    assert [event["event"] for event in launcher.events("job_start", "start", "failure", "exit")] == [
        "job_start",
        "start",
        "start",
        "exit",
    ]
    assert (
        "Restart 1 inside the job, no checkpoint in the run directory yet. Before: rank 0: RuntimeError: boom.\n"
        in launcher.stderr()
    )
    traceback = launcher.stderr().split("Traceback")[1]
    assert "runpy" not in traceback
    assert "launch/worker.py" not in traceback
    assert (launcher.folder / "order").read_text() == "thread atexit ", "as at every end of Python"
    assert [(launcher.folder / name).read_text() for name in ("rows", "of_c")] == ["not flushed"] * 2
    assert not (launcher.folder / "cleared_away").exists(), "for that, nobody waits"

    told = [json.loads(line) for line in (launcher.folder / "told").read_text().splitlines()]
    assert [each["event"] for each in told] == ["run_began", "interruption", "restart", "run_ended"]
    assert [each["attempt"] for each in told] == [0, 1, 2, 2]
    assert told[1]["details"]["cause"] in ("script", "crash"), "the latter if its times are not recorded yet"
    shown = (launcher.folder / "run.prom").read_text()
    for line in ('state{run_dir="R",state="finished"} 1.0', 'interruptions_total{cause="script",run_dir="R"} 1.0'):
        assert f"lightning_resilience_{line}".replace("R", str(launcher.run_directory.path), 1) in shown, shown


@pytest.mark.slow
def test_what_always_crashes_ends_with_the_budget_and_the_reason(launcher: Launcher) -> None:
    launcher.script("ledger.record('ran'); raise ConnectionError('boom')")
    assert launcher.run("--in-job-restarts=1", "--job-retries=1", "script.py") == 1
    assert [event["job_attempt"] for event in launcher.events("start")] == [0, 0, 1, 1]
    assert len(launcher.events("ran")) == 4, "a start that is one too many is none"
    again = "Next: starting the job again, retry 1 of 1: the last one made no progress."
    assert f"Failed: rank 0: ConnectionError: boom. {again}" in launcher.stderr()
    assert "no progress in 2 jobs" in launcher.stderr()
    assert "last failure: rank 0: ConnectionError: boom" in launcher.stderr()
    outcome = launcher.run_directory.outcome
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", "ConnectionError: boom")

    assert launcher.run("--in-job-restarts=0", "--job-retries=0", "script.py") == 1
    assert len(launcher.events("start")) == 5, "a person who launches it again has a fresh budget"


@pytest.mark.parametrize(
    ("end", "reason"), [("TooSlow(1)", "rank 3 is too slow"), ("SystemExit(1)", "the script ended by sys.exit(1)")]
)
@pytest.mark.slow_but_for("TooSlow(1)-rank 3 is too slow")
def test_an_exit_that_says_why(launcher: Launcher, end: str, reason: str) -> None:
    launcher.script(
        f"""
        class TooSlow(SystemExit):
            def __str__(self): return "rank 3 is too slow"
        raise {end}
        """
    )
    assert launcher.run("--in-job-restarts=0", "--job-retries=0", "script.py") == 1
    assert [event["reason"] for event in launcher.events("fault")] == [reason]


@pytest.mark.parametrize("arguments", [["fit", "--help"], ["-h"]])
def test_the_help_of_a_script_is_no_run(launcher: Launcher, arguments: list[str]) -> None:
    (launcher.folder / "script.py").write_text("import sys; print(sys.argv, file=sys.stderr); sys.exit(3)")
    assert launcher.run("script.py", *arguments) == 3
    assert str(["script.py", *arguments]) in launcher.stderr()
    assert not launcher.run_directory.path.exists()


@pytest.mark.slow
def test_a_trainer_of_another_size_than_the_launch_is_not_tried_again(launcher: Launcher) -> None:
    trainer = "import lightning.pytorch as L; L.Trainer(accelerator='cpu', devices=4, num_nodes=2, logger=False)"
    launcher.script(f"{trainer}.fit(L.LightningModule())")
    assert launcher.run("script.py", program=REAL) == 1
    assert len(launcher.events("start")) == 1
    assert "give launch --nproc-per-node 4 --nnodes 2, or change these numbers of the Trainer" in launcher.stderr()


FIT = """
    import lightning.pytorch as L, torch
    from torch.utils.data import DataLoader, TensorDataset
    class Model(L.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.layer = torch.nn.Linear(4, width)
        def training_step(self, batch, batch_idx): return self.layer(batch[0]).sum()
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
    width, epochs = map(int, sys.argv[1:])
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    L.Trainer(max_epochs=epochs, **quiet).fit(Model(width), DataLoader(TensorDataset(torch.ones(4, 4))))
"""


@pytest.mark.parametrize(
    ("width", "epochs", "reason"),
    [
        ("2", "1", "of epoch 2, but its Trainer ends at max_epochs=1: raise it"),
        pytest.param(
            "3",
            "4",
            "holds another fit: its parameters have different names, shapes or types",
            marks=pytest.mark.campaign,
        ),
    ],
)
@pytest.mark.slow
def test_a_script_that_cannot_go_on_with_the_run_is_not_tried_again(
    launcher: Launcher, width: str, epochs: str, reason: str
) -> None:
    launcher.script(FIT)
    assert launcher.run("--recipe=workstation", "script.py", "2", "2") == 0
    assert launcher.run("--recipe=workstation", "--continue-anyway", "script.py", width, epochs) == 1
    assert len(launcher.events("start")) == 2
    assert reason in launcher.stderr()
    finished = launcher.run_directory.fit(0).outcome
    assert finished is not None
    assert finished.status == "finished", "a failed start takes nothing from a fit that has finished"
    assert launcher.run("--recipe=workstation", "--continue-anyway", "script.py", "2", "2") == 0


@pytest.mark.slow
def test_another_number_of_workers_than_the_trainers_ends_the_run_at_once(launcher: Launcher) -> None:
    launcher.script(FIT.replace("L.Trainer(", "L.Trainer(devices=1, "))
    options = "--recipe=workstation", "--nproc-per-node=2"
    assert launcher.run(*options, "script.py", "2", "2", program=REAL) == 1
    assert len(launcher.events("start")) == 1
    assert "2 workers were started, but this Trainer has 1. Pass the same numbers to" in launcher.stderr()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "undefined",
        pytest.param("dict()['key']", marks=pytest.mark.campaign),
        pytest.param("raise ValueError('no')", marks=pytest.mark.campaign),
        pytest.param("import no_such_module", marks=pytest.mark.campaign),
        pytest.param("open('/data/of/nobody')", marks=pytest.mark.campaign),
        "ledger.record('fresh', fit=0); raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (4x8 and 4x2)')",
    ],
)
def test_a_mistake_of_the_script_is_tried_twice(launcher: Launcher, mistake: str) -> None:
    launcher.script(f"ledger.record('ran')\ndef train():\n    {mistake}\ntrain()")
    assert launcher.run() == 1
    assert len(launcher.events("ran")) == 2
    assert "twice with no step between. Trying again would not change this." in launcher.stderr()
    assert launcher.stderr().count("inside the job") == 1
    # Its traceback is shown once, and the second one is a line.
    assert launcher.stderr().count(", in train") == 1
    [again] = [line for line in launcher.stderr().splitlines() if "Rank 0, again: " in line]
    assert "(script.py:" in again
    log = Path(again.partition("; traceback: ")[2]).read_text()
    assert log.count(", in train") == 1
    assert "launch/worker.py" in log, "the whole of it"
    assert log.rstrip().endswith(": again")
    assert launcher.run() == 1
    assert len(launcher.events("ran")) == 4, "a person may have mended it"
    assert launcher.stderr().count(", in train") == 1


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_mistake_is_not_announced_as_one_that_is_tried_again(launcher: Launcher, restarts: int) -> None:
    launcher.script("ledger.record('ran')\nundefined")
    for launch in range(2):
        assert launcher.run(f"--in-job-restarts={restarts}", "--job-retries=1", "script.py") == 1
        assert "twice with no step between. Trying again would not change this." in launcher.stderr()
        assert launcher.stderr().count("inside the job") == restarts
        assert launcher.stderr().count("Next: ") == 1 - restarts
        assert len(launcher.events("ran")) == 2 * (launch + 1), "a person may have mended it"


@pytest.mark.slow
def test_with_several_nodes_the_first_says_for_all_that_a_mistake_is_not_tried_again(launcher: Launcher) -> None:
    """What one node has recorded another may not see yet: each by itself, some would go on and wait for the others."""
    launcher.script("ledger.record('ran')\nundefined")
    assert launcher.run(*NODES, "--in-job-restarts=3", "--node-rank=0", "script.py", GROUP_WORLD_SIZE="2") == 1
    assert len(launcher.events("ran")) == 2, "no worker decides, but none begins before the launch has looked"
    assert "twice with no step between. Trying again would not change this." in launcher.stderr()


@pytest.mark.slow
def test_with_several_nodes_the_first_says_for_all_that_the_restarts_in_the_job_are_spent(launcher: Launcher) -> None:
    launcher.script("ledger.record('ran'); raise ConnectionError('boom')")
    options = [*NODES, "--in-job-restarts=1", "--job-retries=1", "--node-rank=0"]
    assert launcher.run(*options, "script.py", GROUP_WORLD_SIZE="2") == 1
    assert [event["job_attempt"] for event in launcher.events("start")] == [0, 0, 1, 1]
    assert len(launcher.events("ran")) == 4
    assert launcher.events("failure")[0]["exit_code"] == -signal.SIGKILL, "the launch has ended it"
    assert "no progress in 2 jobs" in launcher.stderr()


@pytest.mark.slow
def test_the_frames_of_launchers_are_cut_from_a_traceback(launcher: Launcher) -> None:
    launcher.script(
        FIT.replace("return self.layer", "raise ConnectionError('wrapped') from KeyError(1); return self.layer")
    )
    assert launcher.run("--recipe=workstation", "--in-job-restarts=0", "--job-retries=0", "script.py", "2", "2") == 1
    shown = launcher.stderr()[launcher.stderr().index("Traceback") :]
    assert ", in training_step" in shown
    assert "fit_loop.py" in shown
    assert "trainer/call.py" not in shown
    assert "lightning_resilience" not in shown.partition("ConnectionError: wrapped")[0]
    path = shown.partition("more frames outside your code: ")[2].splitlines()[0]
    assert "trainer/call.py" in Path(path).read_text()


def test_a_script_that_refuses_its_arguments_is_not_run_again(launcher: Launcher) -> None:
    launcher.script("import argparse; argparse.ArgumentParser().parse_args()")
    assert launcher.run("script.py", "--run-dir=elsewhere") == 1
    assert len(launcher.events("fault")) == 1
    assert "--run-dir=elsewhere comes after script.py" in launcher.stderr()
    assert "sys.exit(2), which means that it was called with wrong arguments" in launcher.stderr()


@pytest.mark.slow
def test_progress_refills_the_budget_until_the_day_is_spent(launcher: Launcher) -> None:
    launcher.script(
        """
        step = 1 + max([0, *(int(name) for name in os.listdir() if name.isdecimal())])
        open(str(step), "w").close()
        ledger.record("saved", fit=0, step=step)
        sys.exit("leaks")
        """
    )
    options = ["--in-job-restarts=1", "--job-retries=1", "--max-failures-per-day=3"]
    assert launcher.run(*options, "script.py") == 1
    assert [event["verified_step"] for event in launcher.events("start")] == [None, 1, 2, 3]
    assert [event["retry"] for event in launcher.events("job_start")] == [False], "one elastic launcher does it all"
    assert "4 failures within 24 hours are more than --max-failures-per-day=3" in launcher.stderr()
    assert "step 1 is safe" in launcher.stderr()


def test_an_interrupted_run_ends_with_75_and_the_same_command_resumes_it(launcher: Launcher) -> None:
    launcher.script(
        """
        if not os.path.exists("interrupted"):
            open("interrupted", "w").close()
            try:
                raise signals.Interrupted("preempted at step 3")
            except Exception:
                pass
        """
    )
    assert launcher.run() == 75
    assert "Interrupted: preempted at step 3. Run the same command again to resume." in launcher.stderr()
    assert launcher.run() == 0
    assert [event["exit_code"] for event in launcher.events("exit")] == [75, 0]
    assert not launcher.events("failure")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "details", "exit_code"),
    [("interrupted", {}, 75), ("halted", {}, 1), ("halted", {"exit_code": 16}, 16)],
    ids=["interrupted", "halted", "halted with a code of its own"],
)
def test_the_word_of_a_fit_counts_even_if_a_library_swallowed_it(
    launcher: Launcher, status: str, details: dict[str, Any], exit_code: int
) -> None:
    launcher.run_directory.fit(0).create()
    launcher.run_directory.fit(0).outcome = Outcome("interrupted", "by an earlier attempt")
    launcher.run_directory.fit(1).create()
    launcher.script(f"run_directory.fit(1).outcome = Outcome({status!r}, 'said so', step=7, details={details})")
    assert launcher.run() == exit_code
    assert len(launcher.events("start")) == 1
    outcome = launcher.run_directory.outcome
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.step) == (status, "said so", 7)


@pytest.mark.slow
def test_a_step_that_other_devices_have_to_judge_ends_the_launch_with_16_when_it_gives_up(launcher: Launcher) -> None:
    """The guard itself says so, of a batch whose loss is bad whenever it is run."""
    launcher.script(
        """
        import lightning.pytorch as L, torch
        from torch.utils.data import DataLoader, TensorDataset
        from lightning_resilience import AutoResume, NaNGuard
        class Model(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
            def training_step(self, batch, batch_idx): return self.layer(batch[0]).mean()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
        data = torch.ones(32, 1)
        data[2] = float("nan")
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
        callbacks = [NaNGuard(rerun="validate_results"), AutoResume()]
        L.Trainer(max_epochs=1, callbacks=callbacks, **quiet).fit(Model(), DataLoader(TensorDataset(data)))
        """
    )
    once = ["--recipe=none", "--in-job-restarts=0", "--job-retries=0", "script.py"]
    assert launcher.run(*once) == 16, launcher.stderr()
    assert len(launcher.events("start")) == 1
    assert re.search("last failure: rank 0: .*nan.*: to be tried on others", launcher.stderr())
    launcher.script("sys.exit(1)")
    assert launcher.run("--in-job-restarts=0", "--job-retries=0", "script.py") == 1


@pytest.mark.slow
def test_an_earlier_attempt_has_no_word(launcher: Launcher) -> None:
    launcher.run_directory.fit(0).create()
    launcher.run_directory.fit(0).outcome = Outcome("interrupted", "by an earlier attempt")
    launcher.script("")
    assert launcher.run() == 0


@pytest.mark.slow
def test_an_end_without_an_outcome_is_a_failure(launcher: Launcher) -> None:
    launcher.script("os._exit(0)")
    assert launcher.run("--in-job-restarts=0", "--job-retries=0", "script.py") == 1
    assert "without reporting an outcome" in launcher.stderr()


@pytest.mark.slow
def test_an_outcome_of_another_job_is_not_believed(launcher: Launcher) -> None:
    launcher.script(
        """
        run_directory.outcome = Outcome("finished", "late", details={"elastic_run_id": "another"})
        os._exit(0)
        """
    )
    assert launcher.run("--in-job-restarts=0", "--job-retries=0", "script.py") == 1


@pytest.mark.slow
def test_workers_that_were_told_to_stop_and_could_not_say_so_are_interrupted(launcher: Launcher) -> None:
    launcher.script("ledger.record('signal', signum=15)\nos._exit(0)")
    assert launcher.run() == 75


@pytest.mark.slow
def test_a_finished_run_is_not_run_again_unless_its_command_changes(launcher: Launcher) -> None:
    launcher.script("open('runs', 'a').write('x')")
    runs = launcher.folder / "runs"
    assert [launcher.run(), launcher.run()] == [0, 0]
    assert runs.read_text() == "x"
    assert "has finished already" in launcher.stderr()
    assert launcher.run("script.py", "--max-epochs=9") == 0
    assert runs.read_text() == "xx"
    launcher.script("open('runs', 'a').write('y')")
    assert launcher.run("script.py", "--max-epochs=9") == 0
    assert runs.read_text() == "xxy", "an edited script may ask for more"
    assert "Changed since the last start: edited: script.py." in launcher.stderr()
    launcher.run_directory.fit(0).create()
    assert launcher.run("script.py", "--max-epochs=9") == 0
    assert runs.read_text() == "xxyy", "a fit that has begun and not finished reopens the run"
    assert "Changed since" not in launcher.stderr()


@pytest.mark.slow
def test_a_finished_run_is_not_taken_for_one_with_other_arguments(launcher: Launcher) -> None:
    launcher.script("open('said', 'a').write(sys.argv[2] + ' ')")
    assert launcher.run("script.py", "--lr", "0.1", "--max_steps=4") == 0
    finished = launcher.run_directory.outcome
    for arguments in (["--lr", "0.2", "--max_steps=4"], ["--lr", "0.1", "--max_steps=3"]):
        assert launcher.run("script.py", *arguments) == 1
        assert "--fresh for a new run beside the old one; --continue-anyway" in launcher.stderr()
    assert "has finished with other arguments: --max_steps 4 -> 3" in launcher.stderr()
    assert launcher.run_directory.outcome == finished, "it has taken nothing away"
    assert launcher.run("script.py", "--max_steps=4", "--lr=.10") == 0, "the same, in other words"
    assert (launcher.folder / "said").read_text() == "0.1 "
    assert launcher.run("--continue-anyway", "script.py", "--lr", "0.2", "--max_steps=4") == 0
    assert "Changed since the last start: --lr 0.1 -> 0.2." in launcher.stderr()
    assert (launcher.folder / "said").read_text() == "0.1 0.2 "

    assert launcher.run("--fresh", "script.py", "--lr", "0.3") == 0
    assert launcher.run("script.py", "--lr", "0.3") == 0
    assert "run-2 has finished already" in launcher.stderr()
    assert f"{launcher.run_directory.path} continues in " in launcher.stderr(), "not where the command says"
    assert launcher.run("--fresh", "script.py", "--lr", "0.4") == 0
    assert "continues in" not in launcher.stderr()
    assert launcher.run("script.py", "--lr", "0.4") == 0
    assert "run-3 has finished already" in launcher.stderr()
    assert launcher.run("--retries-in-new-job", "--continue-anyway", "script.py", "--lr", "0.5") == 0
    assert f"Run directory {launcher.run_directory.path} (" in launcher.stderr(), "a scheduler goes on with its own"
    assert (launcher.folder / "said").read_text() == "0.1 0.2 0.3 0.4 0.5 "


@pytest.mark.slow
def test_other_arguments_of_a_run_that_was_stopped_are_said(launcher: Launcher) -> None:
    launcher.script("if sys.argv[-1] == '1': raise signals.Interrupted('told to')")
    assert launcher.run("script.py", "--size", "1") == 75
    assert launcher.run("script.py", "--size", "2", "--new") == 0
    said = "Changed since the last start: --size 1 -> 2, --new (none) -> True."
    assert launcher.stderr().count(said) == 1


@pytest.mark.slow
def test_rank_0_alone_cannot_finish_a_run(launcher: Launcher) -> None:
    launcher.script("")
    assert launcher.run("--job-retries=0", "script.py", ELASTIC_EXIT_CODE="1") == 1
    assert launcher.run_directory.outcome is not None
    assert launcher.run_directory.outcome.status == "finished"
    assert launcher.run() == 0
    assert len(launcher.events("start")) == 2


STOPS_WHEN_TOLD = """
    import threading
    told = threading.Event()
    signals.installed().subscribe(lambda signum: told.set())
    ledger.record("ready")
    while not told.wait(0.01): pass
    time.sleep(float(os.environ.get("SAVING_TAKES", "0")))
    open(f"saved-{os.environ['RANK']}", "w").close()
    raise signals.Interrupted("saved")
"""


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.campaign),
        signal.SIGUSR1,
        pytest.param(signal.SIGUSR2, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.slow_but_for("15")
def test_a_signal_stops_the_run_in_order(launcher: Launcher, signum: signal.Signals) -> None:
    launcher.script(STOPS_WHEN_TOLD)
    launch = launcher.start(SAVING_TAKES="0.3")
    launcher.wait_for("ready")
    launch.send_signal(signum)
    time.sleep(0.1)
    launch.send_signal(signum)  # a scheduler's second delivery of the same
    assert launch.wait(PATIENCE_S) == 75
    assert (launcher.folder / "saved-0").exists()
    assert f"Received {signum.name}" in launcher.stderr()


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(launcher: Launcher) -> None:
    launcher.script(STOPS_WHEN_TOLD)
    launch = launcher.start(SAVING_TAKES="1000")
    launcher.wait_for("ready")
    launch.send_signal(signal.SIGTERM)
    time.sleep(2.1)
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(PATIENCE_S) == 75
    assert not (launcher.folder / "saved-0").exists()


@pytest.mark.slow
def test_a_script_that_does_not_listen_ends_with_its_grace_period(launcher: Launcher) -> None:
    launcher.script("ledger.record('ready')\ntime.sleep(1000)")
    launch = launcher.start("--grace-period=0.5", "script.py")
    launcher.wait_for("ready")
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(PATIENCE_S) == 75


HAS_CHILDREN = """
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if os.fork() == 0:
        time.sleep(1000)
    ledger.record("ready")
    time.sleep(1000)
"""


def reapers_of(launch_id: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and process.info["cmdline"][-1] == launch_id
    ]


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_behind(launcher: Launcher) -> None:
    launcher.script(HAS_CHILDREN)
    launch = launcher.start()
    launcher.wait_for("ready")
    [launch_id] = launcher.launch_ids
    wait_until(lambda: len(processes_of(launch_id)) == 5)  # the elastic launcher, the worker and what it has started
    launch.kill()
    wait_until(lambda: not processes_of(launch_id) and not reapers_of(launch_id))

    launcher.script("")
    assert launcher.run() == 0, launcher.stderr()
    assert len(launcher.events("launcher_killed")) == 1


@pytest.mark.slow
def test_what_survived_a_launcher_and_its_reaper_is_ended_by_the_next_launch(launcher: Launcher) -> None:
    launcher.script(HAS_CHILDREN)
    launch = launcher.start()
    launcher.wait_for("ready")
    [launch_id] = launcher.launch_ids
    wait_until(lambda: len(processes_of(launch_id)) == 5)
    for reaper in reapers_of(launch_id):
        reaper.kill()
    launch.kill()
    launch.wait()
    assert processes_of(launch_id)
    launcher.script("")
    assert launcher.run() == 0, launcher.stderr()
    assert not processes_of(launch_id)
    # Five and those that start a process at this moment.
    assert re.search(r"Terminated \d+ remaining processes of a dead launch", launcher.stderr())


def test_what_a_finished_script_leaves_behind_is_ended(launcher: Launcher) -> None:
    launcher.script('subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)')
    assert launcher.run() == 0
    [launch_id] = launcher.launch_ids
    assert not processes_of(launch_id)
    assert not reapers_of(launch_id)


def test_a_run_directory_in_use_is_refused(launcher: Launcher) -> None:
    launcher.script(STOPS_WHEN_TOLD)
    first = launcher.start()
    launcher.wait_for("ready")
    assert launcher.run() == 1
    assert f"Refused: process {first.pid} on this host runs" in launcher.stderr()
    assert len(launcher.events("launch")) == 1
    first.terminate()
    assert first.wait(PATIENCE_S) == 75


NODES = ["--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", "--in-job-restarts=0"]


@pytest.mark.slow
def test_a_node_that_fails_after_the_first_one_has_finished_takes_the_whole_job_along(launcher: Launcher) -> None:
    launcher.script(
        """
        if os.environ["RANK"] == "1":
            time.sleep(0.5)  # the first node has finished by then
            if os.environ["LIGHTNING_RESILIENCE_JOB_ATTEMPT"] == "0": raise RuntimeError("boom")
        """
    )
    nodes = [
        launcher.start(*NODES, f"--node-rank={rank}", "script.py", RANK=str(rank), GROUP_WORLD_SIZE="2")
        for rank in (1, 0)
    ]
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], launcher.stderr(0) + launcher.stderr(1)
    assert [event["retry"] for event in launcher.events("job_start")] == [False, True]
    assert "Failed: rank 1: RuntimeError: boom. Next: starting the job again" in launcher.stderr()
    assert "The first node ended the run (exit code 0)" in launcher.stderr(0)


@pytest.mark.campaign
def test_a_node_that_fails_ends_the_workers_of_the_others(launcher: Launcher) -> None:
    launcher.script(
        """
        if os.environ["RANK"] == "1": raise RuntimeError("boom")
        time.sleep(1000)
        """
    )
    nodes = [
        launcher.start(
            *NODES, "--job-retries=0", f"--node-rank={rank}", "script.py", RANK=str(rank), GROUP_WORLD_SIZE="2"
        )
        for rank in (1, 0)
    ]
    assert [node.wait(PATIENCE_S) for node in nodes] == [1, 1], launcher.stderr(0) + launcher.stderr(1)
    assert "last failure: rank 1: RuntimeError: boom" in launcher.stderr()


def test_without_a_ledger_nothing_is_restarted(launcher: Launcher) -> None:
    launcher.script("raise RuntimeError")
    launcher.run_directory.path.mkdir()
    launcher.run_directory.ledger.symlink_to(launcher.folder / "missing" / "ledger")
    assert launcher.run() == 1
    assert "ledger cannot be written" in launcher.stderr()


def test_a_run_directory_that_cannot_be_made_is_refused(launcher: Launcher) -> None:
    launcher.script("")
    launcher.run_directory.path.write_text("a file")
    assert launcher.run() == 2
    assert "is a file; it must be a directory" in launcher.stderr()
    launcher.run_directory.path.unlink()
    (launcher.folder / "file").touch()
    launcher.run_directory = RunDirectory(launcher.folder / "file" / "run")
    assert launcher.run() == 2
    assert "file, which is a file; it must be a directory" in launcher.stderr()
    (launcher.folder / "loop").symlink_to("loop")
    launcher.run_directory = RunDirectory(launcher.folder / "loop" / "run")
    assert launcher.run() == 1
    assert "Refused: " in launcher.stderr()
    assert "Traceback" not in launcher.stderr()
    launcher.run_directory = RunDirectory(launcher.folder / "run")


@pytest.mark.slow
def test_where_several_speak_a_line_says_when_and_whose_it_is(launcher: Launcher) -> None:
    launcher.script("")
    for ranks, name in ((2, r"\[lightning-resilience \d\d:\d\d:\d\d launch\]"), (1, r"\[lightning-resilience\]")):
        assert launcher.run(f"--nproc-per-node={ranks}", "script.py") == 0
        lines = [line for line in launcher.stderr().splitlines() if "[lightning-resilience" in line]
        assert lines
        assert all(re.match(f"{name} ", line) for line in lines), lines


@pytest.mark.parametrize("before", [[], ["--"]], ids=["nothing before", "dashes before"])
@pytest.mark.slow_but_for("dashes before")
def test_a_scripts_own_arguments_are_left_as_they_are(launcher: Launcher, before: list[str]) -> None:
    launcher.script("ledger.record('ran', said=sys.argv[1:])")
    assert launcher.run(*before, "script.py", "--lr", "3", "--", "--recipe", "--", "-m") == 0
    assert [event["said"] for event in launcher.events("ran")] == [["--lr", "3", "--", "--recipe", "--", "-m"]]


@pytest.mark.parametrize("action", ["launch", "status", "report"])
@pytest.mark.slow_but_for("launch")
def test_a_ledger_that_cannot_be_read_is_said(launcher: Launcher, action: str) -> None:
    launcher.script("")
    launcher.run_directory.path.mkdir()
    launcher.run_directory.ledger.touch()
    directory = str(launcher.run_directory.path)
    arguments = [f"--run-dir={directory}", "script.py"] if action == "launch" else [directory]
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", action, *arguments]
    done = subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    name = r"\[lightning-resilience [\d:]+ launch\]" if action == "launch" else r"\[lightning-resilience\]"
    assert re.match(f"{name} Refused: ", done.stderr), done.stderr
    assert str(launcher.run_directory.ledger) in done.stderr
    assert "Traceback" not in done.stderr
    launcher.run_directory.ledger.unlink()


@pytest.mark.slow
def test_a_folder_of_runs_is_none_and_they_are_named(launcher: Launcher) -> None:
    runs = launcher.folder / "runs"
    Ledger(RunDirectory(runs / "one").ledger).record("saved", step=1)
    (runs / "notes.txt").touch()
    (runs / "one" / "attempt.json").touch()
    (runs / "waits" / "slurm").mkdir(parents=True)
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", "report"]
    for folder in (runs, launcher.folder):
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
        assert (
            f"{folder} is not a run directory: it contains no ledger; run directories below it: {runs / 'one'}"
            in done.stderr
        )
        assert "Traceback" not in done.stderr
    done = subprocess.run([*command, str(runs / "waits")], capture_output=True, text=True, timeout=60, check=True)
    assert "no run has been started here" in done.stdout


def test_whoever_reads_a_report_may_stop_at_any_line(launcher: Launcher) -> None:
    ledger = Ledger(launcher.run_directory.ledger)
    for _ in range(1000):
        ledger.record("saved", step=1, path="x" * 60)  # more than a pipe holds
        ledger.record("verify_failed", step=1, path="x" * 60)  # or they would be folded
    command = [sys.executable, "-m", "lightning_resilience.launch.cli", "report", str(launcher.run_directory.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("Run ")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["--nproc-per-node=0", "script.py"], "neither a number of at least 1 nor 'auto'"),
        (["--nnodes=3:2", "script.py"], "neither a number of at least 1 nor MIN:MAX"),
        (["--nnodes=2", "script.py"], "several nodes need --rdzv-endpoint"),
        (["--nnodes=2", "--rdzv-endpoint=host", "script.py"], "is not HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=:29500", "script.py"], "is not HOST:PORT"),
        (["--nnodes=2:10", "script.py"], "several nodes need --rdzv-endpoint"),
        (["--grace-period=inf", "script.py"], "not a number of seconds"),
        (["--run-dir=s3://bucket/run", "script.py"], "s3://bucket/run is not a folder on a mounted file system"),
        (["--run-dir=~/script.py", "script.py"], "script.py is a file; it must be a directory or not exist yet"),
        (["--local-dir=~/script.py/local", "script.py"], "script.py, which is a file; it must be a directory"),
        (["--node-rank=1", "script.py"], "--node-rank 1 is for a run on several nodes: also give --nnodes"),
        (["--job-retries=-1", "script.py"], "not a number of at least 0"),
        (["--grace-period=soon", "script.py"], "not a number of seconds"),
        (["--section-timeouts=stpe:9", "script.py"], "There is no section 'stpe'"),
        (["--section-timeouts=step:0", "script.py"], "step must be a positive number of seconds"),
        (["--out-of-section-timeout=soon", "script.py"], "out_of_section must be seconds, or none, not 'soon'"),
        (["--section-timeouts=out_of_section:9", "--out-of-section-timeout=8", "script.py"], "two timeouts for"),
        (["--recipe=unknown", "script.py"], "there is no recipe unknown; choose one of nemo,"),
        (["scirpt.py"], "there is no script scirpt.py; did you mean script.py?"),
        (["train.sh"], "train.sh is a shell script, not a Python script"),
        (["train"], "train is a shell script, not a Python script"),
        (["/usr/bin/python3", "script.py"], "leave /usr/bin/python3 out: launch itself starts the script"),
        (["-m", "scirpt"], "there is no module scirpt, seen from"),
        (["-m", "scirpt"], "did you mean script?"),
        (["-m", "script.py"], "is a script: leave -m out"),
        (["-m", "lightning_resilience.checkpoint"], "it is a package without a __main__.py"),
        (["--fresh", "--retries-in-new-job", "script.py"], "--fresh is for a manual start on one node"),
        ([], "required: SCRIPT"),
        (["--grace-perod=5", "script.py"], "there is no option --grace-perod; did you mean --grace-period?"),
        (["--frobnicate", "5", "script.py"], "there is no option --frobnicate\n"),
        (["--run-dir=", "script.py"], "argument --run-dir: it is empty; the current folder is '.'\n"),
        (["--local-dir", "", "script.py"], "argument --local-dir: it is empty; the current folder is '.'\n"),
        (["--on-event=no-such-program", "script.py"], "--on-event: there is no program no-such-program"),
        (
            ["--prometheus=run.txt", "script.py"],
            "--prometheus: 'run.txt' is neither a file for node_exporter, which ends in .prom",
        ),
    ],
)
def test_bad_arguments(
    launcher: Launcher,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lightning_resilience.launch import cli

    launcher.script("")
    (launcher.folder / "train.sh").write_text("python script.py")
    (launcher.folder / "train").write_text("#!/usr/bin/env -S bash -e\n")
    monkeypatch.chdir(launcher.folder)
    monkeypatch.setenv("HOME", str(launcher.folder))
    with pytest.raises(SystemExit) as exit_request:
        cli.main(["launch", f"--run-dir={launcher.run_directory.path}", *arguments])
    assert exit_request.value.code == 2
    assert message in capsys.readouterr().err
    assert not launcher.run_directory.path.exists()


def test_what_a_command_line_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_resilience.launch.cli import launch_settings

    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).touch()
    settings = launch_settings(["-m", "package.train", "--lr", "3"])
    assert settings.command == ["-m", "package.train", "--lr", "3"]
    assert settings.run_dir.parent == tmp_path / "runs"
    assert re.fullmatch(r"package\.train-[0-9a-f]{8}", settings.run_dir.name)
    assert launch_settings(["train.py"]).run_dir == tmp_path / "runs" / "train"
    nothing = ["--in-job-restarts=0", "--grace-period=0"]
    settings = launch_settings(["--nnodes=1:1", "--run-dir=~/run", "--local-dir=local", *nothing, "train.py"])
    assert (settings.run_dir, settings.local_dir) == (Path.home() / "run", tmp_path / "local")
    assert (settings.budget.in_job_restarts, settings.grace_period_s) == (0, 0)
    assert settings.makes_spares
    assert not launch_settings(["--spares=off", "train.py"]).makes_spares
    assert not settings.retries_in_new_job
    assert launch_settings(["--retries-in-new-job", "train.py"]).retries_in_new_job


# With the real elastic launcher


@pytest.mark.campaign
@pytest.mark.nvrx
def test_real_a_crash_of_one_rank_restarts_all_of_them(launcher: Launcher) -> None:
    launcher.script(
        """
        rank = os.environ["RANK"]
        if rank == "1" and restart_count == 0: raise RuntimeError("boom")
        open(f"ran-{rank}-{restart_count}", "w").close()
        """
    )
    assert launcher.run("--nproc-per-node=2", "script.py", program=REAL) == 0, launcher.stderr()
    assert {"ran-0-1", "ran-1-1"} <= {path.name for path in launcher.folder.iterdir()}
    assert launcher.events("start")[-1]["restart_count"] == 1
    assert launcher.events("start")[-1]["world_size"] == 2


@pytest.mark.nvrx
@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        signal.SIGUSR1,
        pytest.param(signal.SIGUSR2, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.slow_but_for("15")
@pytest.mark.slow
def test_real_a_scheduler_that_signals_every_process_does_not_cut_the_grace_period_short(
    launcher: Launcher, signum: signal.Signals
) -> None:
    launcher.script(STOPS_WHEN_TOLD.replace('ledger.record("ready")', 'ledger.record(f"ready")'))
    launch = launcher.start("--nproc-per-node=2", "script.py", program=REAL, SAVING_TAKES="1.5")
    launcher.wait_for("ready", 2)
    [launch_id] = launcher.launch_ids
    [elastic] = psutil.Process(launch.pid).children()[-1:]
    assert elastic in processes_of(launch_id)
    for process in processes_of(launch_id):
        with suppress(psutil.NoSuchProcess):  # such as one that a spare asks for its libraries
            process.send_signal(signum)
    launch.send_signal(signum)
    time.sleep(0.5)
    elastic.send_signal(signal.SIGTERM)
    elastic.send_signal(signal.SIGUSR1)
    elastic.send_signal(signal.SIGUSR2)
    assert launch.wait(PATIENCE_S) == 75, launcher.stderr()
    assert {"saved-0", "saved-1"} <= {path.name for path in launcher.folder.iterdir()}, launcher.stderr()
    # What the elastic launcher says of an orderly stop is in its own log, and the terminal has only what matters.
    [log] = (launcher.run_directory.path / "logs").glob("launcher-*.log")
    assert log.read_text()
    assert str(log.parent) in launcher.stderr()
    assert "[ERROR]" not in launcher.stderr()
    assert "[ALWAYS]" not in launcher.stderr()


@pytest.mark.nvrx
def test_real_killed_launcher_and_resume(launcher: Launcher) -> None:
    launcher.script(HAS_CHILDREN)
    launch = launcher.start("--nproc-per-node=2", "script.py", program=REAL)
    launcher.wait_for("ready", 2)
    [launch_id] = launcher.launch_ids
    launch.kill()
    wait_until(lambda: not processes_of(launch_id))
    assert "Now       killed: nothing was recorded for" in status(launcher.run_directory.path)


@pytest.mark.slow
def test_real_torchrun_takes_the_place_of_a_missing_nvrx(launcher: Launcher) -> None:
    launcher.script("")
    assert launcher.run("script.py", program=WITHOUT_NVRX) == 0, launcher.stderr()
    assert "nvidia-resiliency-ext is not installed" in launcher.stderr()
    assert [event["world_size"] for event in launcher.events("start")] == [1]


@pytest.mark.slow
@pytest.mark.nvrx
def test_real_one_elastic_launcher_restarts_the_workers_as_long_as_they_advance(launcher: Launcher) -> None:
    """Five failures, of which four come after progress, and the fifth is one too many; then a new job."""
    launcher.script(
        """
        if os.environ["LIGHTNING_RESILIENCE_JOB_ATTEMPT"] == "1":
            sys.exit()
        if os.environ["RANK"] == "0":
            if restart_count < 4:
                ledger.record("saved", fit=0, step=restart_count)
            sys.exit("fails")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ledger.record("ran")
        time.sleep(PATIENCE_S)
        """.replace("PATIENCE_S", str(PATIENCE_S))
    )
    options = ["--nproc-per-node=2", "--recipe=none", "--in-job-restarts=1", "--job-retries=2"]
    assert launcher.run(*options, "script.py", program=REAL) == 0, launcher.stderr()
    assert [event["job_attempt"] for event in launcher.events("start")] == [0] * 5 + [1]
    assert [event["retry"] for event in launcher.events("job_start")] == [False, True]
    assert len(launcher.events("ran")) <= 5


@pytest.mark.campaign
@pytest.mark.nvrx
def test_real_two_nodes_follow_the_first_ones_decision(launcher: Launcher) -> None:
    launcher.script(
        """
        if os.environ["RANK"] == "1" and os.environ["LIGHTNING_RESILIENCE_JOB_ATTEMPT"] == "0":
            raise RuntimeError("boom")
        ledger.record("ran")
        """
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--in-job-restarts=0"]
    one_host = {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}  # which NVRx 0.7 takes for a mistake otherwise
    nodes = [launcher.start(*options, f"--node-rank={rank}", "script.py", program=REAL, **one_host) for rank in (1, 0)]
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], launcher.stderr(0) + launcher.stderr(1)
    assert [event["retry"] for event in launcher.events("job_start")] == [False, True]
    assert len(launcher.events("exit")) == 1


@pytest.mark.parametrize("own", [None, "mine"])
@pytest.mark.slow_but_for("None")
def test_weights_and_biases_goes_on_with_one_run(launcher: Launcher, own: str | None) -> None:
    launcher.script(
        """
        with open("ids", "a") as file:
            file.write(f"{os.environ['WANDB_RUN_ID']} {os.environ['WANDB_RESUME']}\\n")
        sys.exit(restart_count == 0)
        """
    )
    environment = {} if own is None else {"WANDB_RUN_ID": own}
    assert launcher.run(**environment) == 0
    expected = launcher.run_directory.identity() if own is None else own
    assert (launcher.folder / "ids").read_text() == f"{expected} allow\n" * 2


def test_storage_that_fails_while_the_workers_run_ends_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several nodes: they are asked about every two seconds."""
    lines: list[str] = []
    monkeypatch.setattr(job, "log_line", lines.append)
    launch = job.Launch(job.LaunchSettings(["train.py"], tmp_path, nnodes="1:2"))

    def fails(run_id: str) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert not launch._ask(fails, "abc")
    assert not launch._ask(fails, "abc")
    assert [each for each in lines if "The workers keep running." in each] == lines != []
    assert len(lines) == 1
    assert launch._ask(lambda run_id: True, "abc")
