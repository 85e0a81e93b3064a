"""The examples do what their page says: its commands, in a short form, and the lines that it quotes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_resilience.recipes import JOBS
from lightning_resilience.run.run_directory import LOCAL_DIR_VARIABLE
from tests.ledgers import read_ledger

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "examples" / "README.md").read_text()
PATIENCE_S = 250.0
# Full saves are rare, so that the newest one at a fault is one of the local ones, of which a few may be under way.
SMALL = ["--steps=200", "--layers=1", "--width=32", "--batch-size=2", "--save-every=90", "--validate-every=1000"]
SMALL += ["--print-every=1", "--accelerator=cpu"]
LONGER = [*SMALL, "--steps=500"]
AT_STEP = 150
FOREIGN = ("LIGHTNING_RESILIENCE_", "WANDB_", "SLURM_")


def blocks(heading: str, language: str = "") -> list[str]:
    """The code blocks of a section of the page."""
    section = re.split(rf"^## {heading}$", PAGE, maxsplit=1, flags=re.MULTILINE)[1].split("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == language]


def command(heading: str, number: int = 0) -> list[str]:
    """The command of a section's block of that number; of several lines the last."""
    return shlex.split(blocks(heading)[number].replace("\\\n", " ").strip().splitlines()[-1])


class Examples:
    """Runs commands in a folder in which the examples seem to lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("examples", "recipes"):
            (folder / name).symlink_to(ROOT / name)
        self.runs: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            LOCAL_DIR_VARIABLE: str(self.folder / "node"),
        }
        log = self.folder / f"log-{len(self.runs)}"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                arguments, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.runs.append((process, log))
        return process

    def said(self, number: int = -1) -> str:
        return self.runs[number][1].read_text(errors="replace")

    def run(self, arguments: list[str]) -> str:
        """Runs to the end, with success, and returns what was said."""
        assert self.start(arguments).wait(PATIENCE_S) == 0, self.said()
        return self.said()

    def wait_for(self, text: str, has_ended: bool = False) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said():
            assert has_ended or self.runs[-1][0].poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[Examples]:
    examples = Examples(tmp_path)
    yield examples
    for process, _ in examples.runs:
        process.kill()  # what a launch has started goes with it
        process.wait()


def digest(said: str) -> str:
    found = re.findall(r"sha256 of the weights: (\w{64})", said)
    assert len(found) == 1, said
    return str(found[0])


def pattern(line: str) -> str:
    """A quoted line with everything open that differs between two runs: numbers, paths, hosts, what is cut."""
    words = (re.escape(word) if re.fullmatch(r"[^\d/]+", word) else r"\S+" for word in line.split(" "))
    gap = re.escape("[...]")
    return " ".join(words).replace(f" {gap} ", ".*").replace(gap, ".*")


def says(said: str, heading: str, number: int = 0) -> None:
    """Every line of the section's ``log`` block of that number was said, in that order."""
    in_order(said, blocks(heading, "log")[number])


def in_order(said: str, quoted: str) -> None:
    """These lines were said, one after the other."""
    place = 0
    said = re.sub(r"\[lightning-resilience \d\d:\d\d:\d\d [^]]+\]", "[lightning-resilience]", said)
    for line in quoted.splitlines():
        found = re.compile(pattern(line)).search(said, place)
        assert found is not None, f"after {place} characters nobody said {line!r}:\n{said}"
        place = found.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What was said by the plain training, without this package."""
    torchrun = blocks("A script that knows nothing of all this")[0].splitlines()[1]
    return Examples(tmp_path_factory.mktemp("undisturbed")).run([*shlex.split(torchrun), *SMALL])


@pytest.fixture(scope="module")
def undisturbed_longer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of a longer training."""
    torchrun = blocks("A script that knows nothing of all this")[0].splitlines()[1]
    return Examples(tmp_path_factory.mktemp("longer")).run([*shlex.split(torchrun), *LONGER])


FIRST_STEPS = (ROOT / "docs" / "index.md").read_text()


def first_steps(examples: Examples, samples: int) -> dict[str, list[str]]:
    """Has the first page's script in the folder. Returns the page's commands by what they do."""
    script = re.findall(r"^```python\n(.*?)^```$", FIRST_STEPS, flags=re.MULTILINE | re.DOTALL)[0]
    assert script.count("65536") == 1
    (examples.folder / "train.py").write_text(script.replace("65536", str(samples)))
    (examples.folder / "wandb.py").write_text("raise AssertionError('nobody has asked for W&B')")
    lines = re.findall(r"^lightning-resilience .*$", FIRST_STEPS, flags=re.MULTILINE)
    return {line.split()[1]: shlex.split(line) for line in lines}


@pytest.mark.slow
def test_the_first_steps(examples: Examples) -> None:
    """What the documentation's first page has its reader type, in its order, but for what is killed."""
    commands = first_steps(examples, 512)
    assert list(commands) == ["launch", "watch", "report"]
    assert "Finished: the script ended." in examples.run(commands["launch"])
    assert "ended: finished" in examples.run(commands["watch"])
    assert re.search(r" finished +rank 0 .* 0: 48$", examples.run(commands["report"]), flags=re.MULTILINE)
    assert "has finished already" in examples.run(commands["launch"])


@pytest.mark.campaign
def test_the_first_steps_with_what_is_killed(examples: Examples) -> None:
    commands = first_steps(examples, 65536)
    launch = examples.start(commands["launch"])
    examples.wait_for("Saved step 2048 to")
    ranks: list[dict[str, Any]] = []
    while len(ranks) < 2 or ranks[1]["section"] != "step":
        said = examples.run([*commands["watch"], "--json"])
        ranks = next(json.loads(line)["ranks"] for line in said.splitlines() if line.startswith("{"))
        examples.runs.pop()
    assert [each["rank"] for each in ranks] == [0, 1]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    examples.wait_for("Restart 1 inside the job, step 2048 is safe. Before: rank 1 was killed by SIGKILL.")
    examples.wait_for("Resuming from step")
    launch.terminate()
    assert launch.wait(PATIENCE_S) == 75
    interrupted = examples.said()
    finished = examples.run(commands["launch"])
    quoted = re.findall(r"^```log\n(.*?)^```$", FIRST_STEPS, flags=re.MULTILINE | re.DOTALL)
    in_order(interrupted, quoted[2])
    in_order(finished, quoted[3])
    assert "Interruptions: 1 killed, 1 preempted." in examples.run(commands["report"])


@pytest.mark.campaign
def test_a_script_that_knows_nothing(examples: Examples, undisturbed: str) -> None:
    heading = "A script that knows nothing of all this"
    said = examples.run([*command(heading), *SMALL])
    says(said, heading)
    assert digest(said) == digest(undisturbed)


@pytest.mark.campaign
def test_a_fault_on_purpose(examples: Examples, undisturbed: str) -> None:
    heading = "A fault on purpose"
    said = examples.run([*command(heading), *SMALL, f"--at-step={AT_STEP}"])
    says(said, heading)
    assert digest(said) == digest(undisturbed)


@pytest.mark.campaign
def test_a_hang_on_purpose(examples: Examples, undisturbed: str) -> None:
    heading = "A fault on purpose"
    said = examples.run([*command(heading, 1), *SMALL, f"--at-step={AT_STEP}"])
    says(said, heading, 1)
    assert digest(said) == digest(undisturbed)


@pytest.mark.campaign
def test_local_checkpoints(examples: Examples, undisturbed: str) -> None:
    heading = "Local checkpoints"
    arguments = [*command(heading), *SMALL, "--save-locally-every=2"]
    launch = examples.start(arguments)
    examples.wait_for("step  100 of")
    launch.kill()
    examples.wait_for("The launcher died", has_ended=True)
    said = examples.run(arguments)
    says(examples.said(0), heading)
    says(said, heading, 1)
    assert digest(said) == digest(undisturbed)


@pytest.mark.campaign
def test_a_slow_rank(examples: Examples) -> None:
    heading = "A slow rank"
    says(examples.run([*command(heading), *SMALL, "--steps=150"]), heading)
    assert list(examples.folder.glob("wandb/offline-run-*"))


def worker(launch: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """The process of a rank that a launch has started."""
    for process in psutil.Process(launch.pid).children(recursive=True):
        with suppress(psutil.Error):
            # Its data-loader workers have its environment, and not its command line's parent.
            is_rank = process.environ().get("RANK") == str(rank)
            if is_rank and process.parent().environ().get("RANK") != str(rank):  # type: ignore[union-attr]
                return process
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", [name for name, job in JOBS.items() if name != "none" and not job.elastic])
def test_each_recipe_brings_the_model_through_a_kill_a_hang_and_a_stop(
    examples: Examples, undisturbed_longer: str, recipe: str
) -> None:
    arguments = ["lightning-resilience", "launch", f"--recipe={recipe}", "--nproc-per-node=2", "--run-dir=runs/gpt"]
    arguments += ["--section-timeouts=step:10", "examples/gpt.py", *LONGER]
    launch = examples.start(arguments)
    examples.wait_for("step  100 of")
    worker(launch, 1).kill()
    examples.wait_for("Restart 1 inside the job")
    examples.wait_for("step  150 of")
    worker(launch, 0).suspend()
    examples.wait_for("Ended 2 ranks of")
    examples.wait_for("step  250 of")
    launch.terminate()
    assert launch.wait(PATIENCE_S) == 75, examples.said()
    said = examples.run(arguments)
    assert "Resuming from" in said
    assert digest(said) == digest(undisturbed_longer)
    assert [record["event"] for record in read_ledger(examples.folder / "runs/gpt/ledger")].count("start") == 4


@pytest.mark.slow
def test_a_failure_of_plain_lightning_is_shown(examples: Examples) -> None:
    """One row of the script that shows them all."""
    script = ROOT / "benchmarks" / "plain_lightning.py"
    said = examples.run([sys.executable, str(script), "--only", "a single process", "--patience", "100"])
    assert "| SIGTERM to a single process | ended with exit code 0, 0 checkpoints |" in said
    assert not list(examples.folder.glob("plain-lightning-*"))


@pytest.mark.campaign
def test_fsdp(examples: Examples) -> None:
    said = examples.run([*command("FSDP2"), "--steps=40"])
    says(said, "FSDP2")
    alone = ["torchrun", "--nproc-per-node=2", "examples/fsdp.py", "--steps=40"]
    assert digest(said) == digest(examples.run(alone))


@pytest.mark.campaign
def test_one_wandb_run(examples: Examples, undisturbed: str) -> None:
    heading = "One Weights & Biases run"
    said = examples.run([*command(heading), *SMALL, f"--kill-at-step={AT_STEP}"])
    assert "Restart 1 inside the job" in said
    assert digest(said) == digest(undisturbed)
    [quoted] = blocks(heading, "text")
    folders = [str(path.relative_to(examples.folder)) for path in examples.folder.glob("runs/*/wandb/offline-run-*")]
    identities = {folder.rpartition("-")[2] for folder in folders}
    assert (len(folders), len(identities)) == (len(quoted.splitlines()), 1)
    assert {folder.rpartition("/")[0] for folder in quoted.splitlines()} == {
        folder.rpartition("/")[0] for folder in folders
    }


@pytest.mark.campaign
def test_a_lightning_cli_is_interrupted_and_goes_on(examples: Examples) -> None:
    heading = "A LightningCLI"
    short = "--trainer.max_steps=3000"
    interrupted = examples.start([*command(heading), short])
    examples.wait_for("Total estimated model params size")
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(PATIENCE_S) == 75, examples.said()
    says(examples.said(), heading)
    said = examples.run([*command(heading), short])
    says(said, heading, 1)
    assert digest(said) == digest(
        examples.run([*command(heading)[:-1], "--trainer.callbacks.run_dir=runs/other", short])
    )


@pytest.mark.slow
def test_a_lightning_cli_takes_callbacks_from_the_command_line(examples: Examples) -> None:
    said = examples.run([*command("A LightningCLI", 1), "--print_config"])
    found = re.findall(r"class_path: lightning_resilience\.(\w+)", said)
    assert found == ["AutoResume", "NaNGuard"]
    assert "run_dir: runs/cli-2" in said
    assert "action: rollback" in said


def test_what_benchmarks_take_from_the_package_is_there() -> None:
    """Most of them run by hand only."""
    missing = []
    for script in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "gpu").glob("*.py")]:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_resilience"):
                names = [each.name for each in node.names]
                module = __import__(str(node.module), fromlist=names)  # also what is a module itself
                missing += [f"{script.name}: {module.__name__}.{each}" for each in names if not hasattr(module, each)]
    assert not missing
