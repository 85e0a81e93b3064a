"""Nodes in network namespaces of their own, of which one is unplugged: no connection is closed, nothing arrives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import command, differences, reference, result, samples, state_at_the_end
from tests.test_absent_ranks import samples as samples_of_all
from tests.test_absent_ranks import undisturbed as undisturbed_of_all
from tests.test_absent_ranks import with_ranks
from tests.test_elastic_nodes import events_of
from tests.test_exact_resume import make, undisturbed
from tests.test_kubernetes import ISOLATED, SET_UP, why_no_pods
from tests.test_launch import wait_until
from tests.test_launchers import finish

PORT = 29500


class Nodes:
    """Some nodes, and the switch between them.

    Args:
        folder: For the file that knows their names.
        count: How many.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.count = count
        self._names = [f"lr{os.getpid()}{name}" for name in ("s", *range(count))]
        self._hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{node + 1} node-{node}" for node in range(count))]
        self._hosts.write_text("\n".join([*lines, ""]))

    def __enter__(self) -> Nodes:
        switch, *nodes = self._names
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(nodes):
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", port, "up")
            self.plug(number)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            _ip("netns", "del", name)

    def plug(self, node: int) -> None:
        _ip("-n", self._names[0], "link", "set", f"port{node}", "master", "bridge")

    def unplug(self, node: int) -> None:
        _ip("-n", self._names[0], "link", "set", f"port{node}", "nomaster")

    def launch(
        self, node: int, config: dict[str, Any], output: Path, *options: str, ranks: int = 1
    ) -> subprocess.Popen[bytes]:
        python, *program = command(config)
        launch = [python, "-m", "lightning_resilience.launch.cli", "launch", "--elastic", *options]
        launch += [f"--node-rank={node}", f"--rdzv-endpoint=node-0:{PORT}", f"--nproc-per-node={ranks}"]
        launch += ["--run-dir", config["run_dir"], *program]
        here = ["ip", "netns", "exec", self._names[node + 1], *ISOLATED, "sh", "-c", SET_UP, f"node-{node}"]
        with open(output, "ab") as file:
            return subprocess.Popen(
                [*here, str(self._hosts), *launch],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(name="nodes")
def linked_nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if reason := why_no_pods():
        pytest.skip(reason)
    try:
        with Nodes(tmp_path, getattr(request, "param", 2)) as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {error}")


def waits(step: int, file: object) -> dict[str, Any]:
    """The first rank waits in this step until there is a file."""
    return {"at": "train", "step": step, "rank": 0, "do": "sleep", "seconds": 0.0, "after_file": str(file)} | {
        "within_s": 200.0,
        "once": True,
    }


@pytest.mark.slow
def test_the_first_node_trains_on_without_one_that_is_unplugged_until_it_is_back(tmp_path: Path, nodes: Nodes) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 2)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": 2}
    unplugged = tmp_path / "unplugged"
    is_back = f"{config['run_dir']}/logs/attempt-4/*"  # behind that of all, that of one, and that of who comes back
    config["events"] = [waits(13, unplugged), waits(40, is_back)]
    more = ("--nnodes=1:2", "--spares=off", "--section-timeouts=step:none")  # rank 0 waits in a step
    launches = [nodes.launch(node, config, output := tmp_path / "output", *more) for node in range(2)]
    try:
        wait_until(lambda: any(each["step"] == 10 for each in events_of(config, "saved")), within_s=100.0)
        nodes.unplug(1)
        unplugged.touch()
        wait_until(lambda: len(events_of(config, "replaced")) == 1, within_s=100.0)
        wait_until(lambda: any(each["step"] == 20 for each in events_of(config, "saved")), within_s=100.0)
        nodes.plug(1)
        codes = [finish(each, output) for each in launches]
    finally:
        for each in launches:
            each.kill()
    assert codes == [0, 0], output.read_text()
    changed = [(each["ranks"], each["members"], each["reason"]) for each in events_of(config, "replaced")]
    assert changed == [([1], [0], "rank 1 was lost with node-1"), ([], [0, 1], None)], output.read_text()
    wanted, steps = undisturbed_of_all(tmp_path, 2, **options)
    assert samples_of_all(config["log"]) == steps
    torch.testing.assert_close(state_at_the_end(config), state_at_the_end(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.campaign  # the other one waits for two minutes
def test_a_run_whose_first_node_is_unplugged_ends_and_resumes_exactly(tmp_path: Path, nodes: Nodes) -> None:
    options: dict[str, Any] = {"trainer": {"devices": 1, "num_nodes": 2}, "digests": True, "save_every": 5}
    config = make(tmp_path, "disturbed", events=[waits(13, unplugged := tmp_path / "unplugged")], **options)
    launches = [nodes.launch(node, config, output := tmp_path / "output", "--nnodes=2") for node in range(2)]
    try:
        wait_until(lambda: any(each["step"] == 10 for each in events_of(config, "saved")), within_s=100.0)
        nodes.unplug(0)
        unplugged.touch()
        # Either side knows only that it hears nothing of the other one. The first one waits for another node.
        wait_until(lambda: "waiting up to 600 s" in output.read_text(), within_s=100.0)
        launches[0].kill()  # its node is taken away
        assert launches[1].wait(250) == 75, output.read_text()
        nodes.plug(0)
        launches = [nodes.launch(node, config, output, "--nnodes=2") for node in range(2)]
        assert [finish(each, output) for each in launches] == [0, 0], output.read_text()
    finally:
        for each in launches:
            each.kill()
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options), output.read_text()
    assert not [*differences(config, reference(**options))], output.read_text()
