"""A node that a rank wants to go on without stays out, if the run can go on without it: with real launches.

The nodes are processes of one host with names of their own; at the end in namespaces of their own, under the real
elastic launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from lightning_resilience._nvrx import installed_version
from lightning_resilience.launch import worker
from lightning_resilience.launch.cli import launch_settings
from lightning_resilience.launch.nodes import Board, Plan, why_not_excluded
from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import Ledger
from tests.test_kubernetes import ISOLATED, SET_UP, why_no_pods
from tests.test_launch import PATIENCE_S, REAL, WITHOUT_NVRX, Launcher, wait_until
from tests.test_two_launches import HERE

# As many nodes as are told to meet do so.
MEETING = "from lightning_resilience.run import deadlines\ndeadlines.CHECK_NODES_EVERY_S = 0.2\n" + HERE.replace(
    "{}\n", '{"GROUP_WORLD_SIZE": settings.nnodes.rpartition(":")[2]}\n', 1
)
MEET = "--rdzv-endpoint=127.0.0.1:1"
# Slow is the node called so; the others run until they are told to end, as ranks do that wait for each other.
SCRIPT = """
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    ledger.record("on", name=node, nodes=int(os.environ["GROUP_WORLD_SIZE"]))
    if node == "slow" and not os.path.exists("asked"):
        while len([each for each in ledger.events() if each.name == "on"]) < 2: time.sleep(0.01)
        open("asked", "w").close()
        ledger.record("workload_request", action="exclude_this_node", reason="slow")
        sys.exit("slow")
    while not os.path.exists("end"): time.sleep(0.01)
"""


class Nodes:
    """Starts launches that are the nodes of one run."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.started: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *options: str, rank: int = 0) -> None:
        environment = {"SLURMD_NODENAME": name, "RANK": str(rank)}
        self.started[name] = self.launcher.start(MEET, *options, "script.py", program=MEETING, **environment)

    def stderr(self, name: str) -> str:
        return self.launcher.stderr(list(self.started).index(name))

    def wait_for(self, name: str, line: str) -> None:
        wait_until(lambda: line in self.stderr(name), lambda: "\n".join(map(self.stderr, self.started)))

    def ran(self) -> list[str]:
        return [event["name"] for event in self.launcher.events("on")]

    def end(self) -> list[int]:
        (self.launcher.folder / "end").touch()
        return [node.wait(PATIENCE_S) for node in self.started.values()]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()


@pytest.fixture
def nodes(launcher: Launcher) -> Nodes:
    launcher.script(SCRIPT)
    return Nodes(launcher)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_that_is_left_out(nodes: Nodes) -> None:
    nodes.start("spare", "--nnodes=2", "--spare", rank=1)
    wait_until(lambda: (nodes.launcher.run_directory.path / "launches").exists())
    nodes.start("first", "--nnodes=2", "--node-rank=0")
    nodes.wait_for("spare", "spare waits as a spare")
    board = Board(nodes.launcher.run_directory.path / "decision.json", "")
    wait_until(lambda: (decision := board.read()) is not None and decision.spares == ["spare"])
    nodes.start("slow", "--nnodes=2", "--node-rank=1", rank=1)
    nodes.wait_for("first", "Excluding node slow: spare spare replaces it.")
    nodes.wait_for("slow", "slow is excluded from the run. This launch ends when the run does.")
    nodes.wait_for("spare", "spare replaces an excluded node.")
    wait_until(lambda: len(nodes.ran()) == 4)
    assert nodes.end() == [0, 0, 0], nodes.stderr("first")
    assert sorted(nodes.ran()) == ["first", "first", "slow", "spare"]


@pytest.mark.campaign
def test_the_run_goes_on_with_fewer_nodes_where_that_is_allowed(nodes: Nodes) -> None:
    nodes.start("first", "--nnodes=1:2", "--node-rank=0")
    nodes.start("slow", "--nnodes=1:2", "--node-rank=1", rank=1)
    nodes.wait_for("first", "Excluding node slow: the run continues with fewer nodes.")
    wait_until(lambda: nodes.ran().count("first") == 2)
    decision = Board(nodes.launcher.run_directory.path / "decision.json", "").read()
    assert decision is not None
    assert (decision.nnodes, decision.excluded) == ("1:1", ["slow"])
    (nodes.launcher.folder / "end").touch()
    assert nodes.end() == [0, 0], nodes.stderr("first")
    assert nodes.ran().count("slow") == 1


def test_the_run_goes_on_with_a_node_that_it_needs(nodes: Nodes) -> None:
    nodes.start("first", "--nnodes=2", "--node-rank=0")
    nodes.start("slow", "--nnodes=2", "--node-rank=1", rank=1)
    reason = "it needs 2 nodes, and no launch --spare waits"
    nodes.wait_for("first", f"Keeping node slow, which a rank asked to exclude: {reason}.")
    wait_until(lambda: nodes.ran().count("slow") == 2)
    assert nodes.end() == [0, 0], nodes.stderr("first")
    assert nodes.stderr("first").count("Keeping node slow") == 1


@pytest.mark.slow
def test_a_spare_that_is_not_needed_ends_with_the_run(nodes: Nodes) -> None:
    nodes.start("first", "--nnodes=2", "--node-rank=0")
    nodes.start("second", "--nnodes=2", "--node-rank=1", rank=1)
    nodes.start("spare", "--nnodes=2", "--spare")
    nodes.start("other", "--nnodes=2", "--spare")
    nodes.wait_for("spare", "waits as a spare")
    nodes.wait_for("other", "waits as a spare")
    nodes.started["other"].send_signal(signal.SIGTERM)
    assert nodes.started["other"].wait(PATIENCE_S) == 75
    assert nodes.end() == [0, 0, 0, 75]
    assert sorted(nodes.ran()) == ["first", "second"]


DECISION = Plan("owner", "run", 3, 0, nnodes="2:4", node="n0", spares=[])


@pytest.mark.parametrize(
    ("changes", "bad", "count", "reason"),
    [
        ({}, ["n1"], 4, None),
        ({}, ["n1", "n2"], 4, None),
        ({}, ["n1"], 2, "it needs 2 nodes"),
        ({"spares": ["s0"]}, ["n1"], 2, None),
        ({"spares": ["s0"]}, ["n1", "n2"], 3, "more than half"),
        ({}, ["n0"], 4, "connect to the first node, n0"),
        ({"nnodes": "4"}, ["n3"], 4, "it needs 4 nodes"),
        ({"nnodes": "4", "ends_for_new_job": True}, ["n0"], 4, None),
        ({"run_id": "an earlier one"}, ["n1"], 2, None),
    ],
)
def test_whether_a_run_can_do_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    bad: list[str],
    count: int,
    reason: str | None,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert why_not_excluded(tmp_path, bad, count) is None, "nothing is known"
    Board(tmp_path / "decision.json", "owner").publish(Plan(**{**vars(DECISION), **changes}))  # type: ignore[arg-type]
    said = why_not_excluded(tmp_path, bad, count)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    ("published", "jobs", "waits"),
    [
        ("run", ["run"], True),
        ("run", ["run", "next"], True),  # the next job is in the ledger before its plan is published
        ("next", ["run", "next"], True),
        ("run", ["earlier"], False),  # the ledger of the first node is seen late
    ],
)
def test_a_rank_that_is_started_again_on_an_excluded_node_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: str, jobs: list[str], waits: bool
) -> None:
    for name, value in {"RUN_ID": "run", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    monkeypatch.setenv(worker.FIRST_LAUNCH_VARIABLE, "owner")
    waited: list[float] = []
    monkeypatch.setattr(worker.time, "sleep", waited.append)
    run_directory = RunDirectory(tmp_path)
    Board(tmp_path / "decision.json", "owner").publish(replace(DECISION, run_id=published))
    ledger = Ledger(run_directory.ledger, rank=0)
    for job in jobs:
        ledger.record("job_start", run_id=job)
        if job == "run":
            ledger.record("workload_request", action="exclude_this_node")
    worker._wait_for_other_nodes(run_directory)
    assert bool(waited) == waits


def test_a_spare_is_no_node_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    settings = launch_settings(["--nnodes=2", "--spare", "--rdzv-endpoint=127.0.0.1:1", script])
    assert settings.spare
    assert not settings.is_owner, "although that address is this host's"
    for wrong in (["--spare"], ["--spare", "--nnodes=2", "--node-rank=1", "--rdzv-endpoint=127.0.0.1:1"]):
        with pytest.raises(SystemExit):
            launch_settings([*wrong, script])
        assert "--spare is for a node in addition" in capsys.readouterr().err


# A fit on as many nodes as there are. At the fifth step the slow node leaves.
TRAINS = """
    import lightning.pytorch as L, torch
    from torch.utils.data import DataLoader
    from lightning_resilience import AutoResume

    node, nodes = os.uname().nodename, int(os.environ["GROUP_WORLD_SIZE"])
    ledger.record("on", name=node, nodes=nodes)

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            moments = self.optimizers(use_pl_optimizer=False).state_dict()["state"].values()
            tensors = [*self.state_dict().values(), *(tensor for each in moments for tensor in each.values())]
            state = [tensor.flatten().tolist() for tensor in tensors]
            if self.global_rank == 0:
                samples = batch.flatten().tolist()
                ledger.record("trains", nodes=nodes, step=self.global_step, samples=samples, state=state)
            if node == "slow" and batch_idx == 4:
                LEAVES
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.1)

    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    saves = AutoResume(every_n_train_steps=2, async_save=False)
    trainer = L.Trainer(num_nodes=nodes, devices=1, max_epochs=1, callbacks=[saves], **quiet)
    trainer.fit(Model(), DataLoader(torch.arange(32.0).reshape(32, 1)))
"""
LEAVES = {
    "is left out": 'ledger.record("workload_request", action="exclude_this_node", reason="slow"); sys.exit("slow")',
    "dies": "time.sleep(1000)",
}


@pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())
@pytest.mark.parametrize("how", ["is left out", pytest.param("dies", marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "program",
    [pytest.param(REAL, marks=[pytest.mark.nvrx, pytest.mark.campaign]), WITHOUT_NVRX],
    ids=["nvrx", "torchrun"],
)
@pytest.mark.slow
def test_real_a_run_goes_on_without_a_node_and_with_all_that_it_had_learned(
    launcher: Launcher, program: str, how: str
) -> None:
    if program == REAL and (installed_version() or ()) >= (0, 5):
        pytest.skip("there the least number of nodes train, and the others are spares")
    launcher.script(TRAINS.replace("LEAVES", LEAVES[how]))
    hosts, output = launcher.folder / "hosts", launcher.folder / "output"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 first\n127.0.1.2 slow\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = [f"--run-dir={launcher.run_directory.path}", "--nnodes=1:2", "--nproc-per-node=1"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}
    with open(output, "w") as stderr:
        started = []
        for rank, name in enumerate(["first", "slow"]):
            command = [sys.executable, "-c", program, "launch", *options, f"--node-rank={rank}", "script.py"]
            isolated = [*ISOLATED, "sh", "-c", SET_UP, name, str(hosts)]
            started.append(subprocess.Popen([*isolated, *command], cwd=launcher.folder, env=environment, stderr=stderr))
    try:
        if how == "dies":
            wait_until(lambda: any(each["step"] == 4 for each in launcher.events("trains")), output.read_text)
            started.pop().kill()  # and with it all that runs there
        assert [node.wait(3 * PATIENCE_S) for node in started] == [0] * len(started), output.read_text()
    finally:
        for node in started:
            node.kill()
            node.wait()
    assert [(each["name"], each["nodes"]) for each in launcher.events("on")][2:] == [("first", 1)]
    before, after = ([each for each in launcher.events("trains") if each["nodes"] == nodes] for nodes in (2, 1))
    step = after[0]["step"]
    assert step in (2, 4)
    # Weights and moments are bitwise those of the checkpoint. Every sample of the epoch is seen once, in the steps that
    # two nodes would have made: the one that is left computes the batches of the other too, and before its own.
    assert after[0]["state"] == before[step]["state"]
    first, slow = (list(DistributedSampler(range(32), 2, rank)) for rank in range(2))  # type: ignore[var-annotated, arg-type]
    assert [each["samples"] for each in before] == [[sample] for sample in first[: len(before)]]
    expected = [([sample], at) for at in range(step, 16) for sample in (slow[at], first[at])]
    assert [(each["samples"], each["step"]) for each in after] == expected
