"""A node that is told to stop leaves a run of several nodes: the others train on, and no step is done again."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.harness import state_at_the_end
from tests.test_absent_ranks import samples, undisturbed, with_ranks
from tests.test_elastic_nodes import events_of
from tests.test_exact_resume import make
from tests.test_launch import wait_until
from tests.test_launchers import finish
from tests.test_replicas_of_shards import SHARDS, assert_went_on, on_nodes
from tests.test_unplugged import Nodes, linked_nodes, waits  # noqa: F401  (a fixture)

OPTIONS: dict[str, Any] = {
    "trainer": {"max_epochs": 3},
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "local": {"every_n_train_steps": 7},
    "save_every": 1000,
    "step_s": 0.05,
    "keeps_nothing": True,
}


GLOBAL = {**OPTIONS, "callbacks": ["preemption", "auto_resume"], "save_every": 7, "local": None}
REASONS = ("the ranks change", "after a loss")


def leave(nodes: Nodes, config: dict[str, Any], output: Path, is_told: Path, ranks: int) -> str:
    """Has the second node told to stop in the midst of the training, and start again; returns what all nodes print."""
    more = ["--nnodes", f"1:{nodes.count}", "--spares=off", "--section-timeouts=step:none"]  # rank 0 waits in a step
    if "local_checkpoint" not in config["callbacks"]:
        more.append("--recipe=none")  # a recipe has them
    launches = [nodes.launch(node, config, output, *more, ranks=ranks) for node in range(nodes.count)]
    try:
        wait_until(lambda: any(each["step"] >= 7 for each in events_of(config, "saved")), within_s=100.0)
        below = psutil.Process(launches[1].pid).children(recursive=True)
        next(each for each in below if "lightning_resilience.launch.cli" in each.cmdline()).send_signal(signal.SIGTERM)
        wait_until(lambda: "was told to stop: continuing" in output.read_text(), output.read_text, within_s=100.0)
        assert launches[1].poll() is None, "it has not left before the others have what its ranks know"
        is_told.touch()
        assert launches[1].wait(100.0) == 75, output.read_text()
        launches[1] = nodes.launch(1, config, output, *more, ranks=ranks)
        codes = [finish(launch, output) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert codes == [0] * nodes.count, output.read_text()
    assert "node-1 was told to stop. The same command joins the run again. (exit code 75)" in output.read_text()
    return output.read_text()


def assert_no_step_is_done_again(config: dict[str, Any], said: str) -> None:
    saved = [each["step"] for each in events_of(config, "saved") if each["reason"] in REASONS]
    assert [each["step"] for each in events_of(config, "resumed")] == saved, said
    assert len(saved) == 2, said
    times = Counter(Path(f"{config['log']}.0").read_text().splitlines())
    assert {*times.values()} == {1}, "rank 0 trains on each batch once"


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        pytest.param(2, OPTIONS, id="one node is left"),
        pytest.param(3, {**OPTIONS, "keeps_nothing": False}, id="two are left, the state after a loss is not known"),
        pytest.param(2, GLOBAL, id="no local checkpoints"),
    ],
    indirect=["nodes"],
)
@pytest.mark.slow
def test_no_step_is_done_again_for_a_node_that_is_told_to_stop(
    tmp_path: Path, nodes: Nodes, options: dict[str, Any]
) -> None:
    count, is_told = nodes.count, tmp_path / "told"
    config = with_ranks(make(tmp_path, "disturbed", **options), count)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": count}
    # Behind the attempt of all ranks, that of the others, and that of who comes back.
    config["events"] = [waits(10, is_told), waits(30, f"{config['run_dir']}/logs/attempt-4/*")]
    said = leave(nodes, config, tmp_path / "output", is_told, ranks=1)
    changed = [(each["ranks"], each["members"]) for each in events_of(config, "replaced")]
    assert changed == [([], [each for each in range(count) if each != 1]), ([], [*range(count)])], said
    assert_no_step_is_done_again(config, said)
    wanted, steps = undisturbed(tmp_path, count, **options)
    assert samples(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_no_step_is_done_again_for_a_group_of_shards_whose_node_is_told_to_stop(tmp_path: Path, nodes: Nodes) -> None:
    """Each node has a group, which holds the whole state."""
    options = {**OPTIONS, "sharded": "own mesh"}
    is_told, is_back = tmp_path / "told", f"{tmp_path / 'disturbed' / 'run'}/logs/attempt-5/*"
    config = on_nodes(tmp_path, 2, 2, [waits(10, is_told), waits(30, is_back)], **options)
    said = leave(nodes, config, tmp_path / "output", is_told, ranks=SHARDS)
    assert_went_on(tmp_path, config, 2, [], [0, 1], **options)
    assert_no_step_is_done_again(config, said)
