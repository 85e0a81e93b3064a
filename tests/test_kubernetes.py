"""The manifests for Kubernetes say what the presets say, and a cluster that does what they say finishes a run.

There is no cluster here. A pod is the container's command in namespaces of its own, so that it is process 1, with its
own host name and /dev/shm; the Job controller's part is played by the rules of the manifest.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lightning_resilience.launch.cli import launch_settings
from lightning_resilience.launch.job import LaunchSettings
from lightning_resilience.recipes import JOBS
from lightning_resilience.run import deadlines, exit_codes
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import PROGRAM, result, samples
from tests.ledgers import read_ledger
from tests.test_absent_ranks import samples as samples_of_all
from tests.test_absent_ranks import undisturbed as undisturbed_of_all
from tests.test_absent_ranks import with_ranks
from tests.test_exact_resume import make, undisturbed

FOLDER = Path(__file__).parents[1] / "recipes" / "kubernetes"
PRESETS = {"job": "preemptible", "jobset": "nemo", "trainjob": "nemo"}
PATIENCE_S = 180.0

each_manifest = pytest.mark.parametrize("name", PRESETS)


@dataclass
class Manifest:
    """What one of the files makes of a pod.

    Args:
        job: The spec of the batch Job that makes the pods.
        container: The container with ``launch``, after what a TrainJob changes.
        variables: What stands for ``$(NAME)`` in its command, given a node's number.
        host_names: Those of the pods.
        text: The file.
    """

    job: dict[str, Any]
    container: dict[str, Any]
    variables: Callable[[int], dict[str, str]]
    host_names: list[str]
    text: str
    nodes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = len(self.host_names)

    @property
    def pod(self) -> dict[str, Any]:
        return self.job["template"]["spec"]  # type: ignore[no-any-return]

    def command(self, node: int) -> list[str]:
        """The container's command, as the kubelet expands it; a name that nobody sets is an error here."""
        variables = self.variables(node)
        return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in self.container["command"]]

    def settings(self, node: int, script: Path) -> LaunchSettings:
        words = [str(script) if word == "/workspace/train.py" else word for word in self.command(node)]
        assert words[1] == "launch"
        return launch_settings(words[2:])

    def action(self, exit_code: int, conditions: Mapping[str, str] | None = None) -> str:
        """What the Job controller does about a failed pod: the first rule that matches."""
        for rule in self.job["podFailurePolicy"]["rules"]:
            codes, patterns = rule.get("onExitCodes"), rule.get("onPodConditions", [])
            assert bool(codes) != bool(patterns)
            if codes and (exit_code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
            if any((conditions or {}).get(each["type"]) == each["status"] for each in patterns):
                return str(rule["action"])
        return "Count"


@cache
def manifest(name: str) -> Manifest:
    text = (FOLDER / f"{name}.yaml").read_text()
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    if name == "job":
        job = documents["Job"]["spec"]
        return Manifest(job, job["template"]["spec"]["containers"][0], lambda _: {}, ["gpt-0"], text)
    if name == "jobset":
        jobset = documents["JobSet"]
        [node] = jobset["spec"]["replicatedJobs"]
        job = node["template"]["spec"]
        assert jobset["spec"]["network"]["enableDNSHostnames"]
        assert (node["replicas"], job["completionMode"]) == (1, "Indexed")
        assert job["completions"] == job["parallelism"]
        [container] = job["template"]["spec"]["containers"]
    else:
        jobset = documents["TrainJob"]
        runtime, trainer = documents["ClusterTrainingRuntime"], jobset["spec"]["trainer"]
        assert jobset["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert runtime["spec"]["mlPolicy"]["torch"] == {}
        [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
        job = {**node["template"]["spec"], "completions": trainer["numNodes"]}
        [container] = job["template"]["spec"]["containers"]
        assert container["name"] == node["name"] == "node"  # by which Trainer knows them
        container = container | {"command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    own = jobset["metadata"]["name"]
    host_names = [f"{own}-{node['name']}-0-{number}" for number in range(job["completions"])]

    def variables(number: int) -> dict[str, str]:
        if name == "jobset":
            return {"JOB_COMPLETION_INDEX": str(number)}
        return {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": f"{host_names[0]}.{own}",
            "PET_MASTER_PORT": "29500",
        }

    return Manifest(job, container, variables, host_names, text)


def size(quantity: str | int) -> float:
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi|)", str(quantity)).groups()  # type: ignore[union-attr]
    return int(number) * {"Gi": 2.0**30, "Mi": 2.0**20, "": 1.0}[unit]


# -- what they say -----------------------------------------------------------------------------------------------------


def test_every_manifest_is_looked_at() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PRESETS)


@each_manifest
def test_the_command_is_launch_with_the_preset(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    what = manifest(name)
    assert what.container["command"][0] == "lightning-resilience"  # and no shell, which would get the signals
    assert "args" not in what.container
    for node in range(what.nodes):
        settings, preset = what.settings(node, script), JOBS[PRESETS[name]]
        assert settings.recipe == PRESETS[name]
        assert (settings.budget, settings.grace_period_s, settings.section_timeouts) == (
            preset.budget,
            preset.grace_period_s,
            preset.section_timeouts,
        )
        assert settings.retries_in_new_job
        assert settings.nproc_per_node == str(what.container["resources"]["limits"]["nvidia.com/gpu"])
        assert settings.nnodes == str(what.nodes)
        assert settings.is_owner == (node == 0)
        assert settings.command == [str(script)]
        if what.nodes > 1:
            assert settings.node_rank == node
            assert settings.rdzv_endpoint == f"{what.host_names[0]}.gpt:29500"


def test_the_two_for_several_nodes_start_the_same() -> None:
    for node in range(2):
        assert sorted(manifest("jobset").command(node)) == sorted(manifest("trainjob").command(node))


@each_manifest
def test_a_pod_is_given_the_time_that_launch_may_take(name: str) -> None:
    what, grace = manifest(name), JOBS[PRESETS[name]].grace_period_s
    assert deadlines.TERM_MARGIN_S < deadlines.KILL_MARGIN_S
    longest = grace + deadlines.KILL_MARGIN_S + deadlines.LEFTOVERS_PATIENCE_S
    assert longest < what.pod["terminationGracePeriodSeconds"] <= longest + 60
    comments = re.sub(r"\s*\n\s*#\s*", " ", what.text)
    said = f"({grace:g} s), up to {deadlines.KILL_MARGIN_S:g} s more for their launcher, "
    assert said + f"{deadlines.LEFTOVERS_PATIENCE_S:g} s for what is left" in comments


@each_manifest
def test_every_exit_code_has_its_rule(name: str) -> None:
    what = manifest(name)
    assert what.action(exit_codes.INTERRUPTED) == "Ignore"
    for exit_code in (1, *exit_codes.OF_VERDICT, exit_codes.USAGE):
        assert what.action(exit_code) == "FailJob"
        assert what.action(exit_code, {"DisruptionTarget": "True"}) == "FailJob"
    for exit_code in (128 + signal.SIGKILL, 128 + signal.SIGTERM, 127):
        assert what.action(exit_code) == "Count"
        assert what.action(exit_code, {"DisruptionTarget": "True"}) == "Ignore"
    rules = what.job["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {what.container["name"]}
    assert 0 not in [code for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])]
    assert what.pod["restartPolicy"] == "Never"  # podFailurePolicy is refused with any other
    assert what.job["podReplacementPolicy"] == "Failed"


@each_manifest
def test_memory_and_storage(name: str, tmp_path: Path) -> None:
    what = manifest(name)
    mounts = {each["mountPath"]: each["name"] for each in what.container["volumeMounts"]}
    volumes = {each["name"]: each for each in what.pod["volumes"]}
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert size(memory["sizeLimit"]) <= size(what.container["resources"]["limits"]["memory"]) / 2
    script = tmp_path / "train.py"
    script.touch()
    run_dir = what.settings(0, script).run_dir
    assert any(
        run_dir.is_relative_to(path) and "persistentVolumeClaim" in volumes[volume] for path, volume in mounts.items()
    )


def test_the_pods_of_a_jobset_are_kept_apart() -> None:
    document = yaml.safe_load(manifest("jobset").text)
    affinity = manifest("jobset").pod["affinity"]["podAntiAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": document["metadata"]["name"]}


def test_the_page_has_every_file() -> None:
    page = (FOLDER.parent / "README.md").read_text()
    for path in FOLDER.parent.glob("*/*.yaml"):
        assert f"](../recipes/{path.relative_to(FOLDER.parent)})" in page


# -- what they do ------------------------------------------------------------------------------------------------------

ISOLATED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount", "--"]
SET_UP = 'hostname "$0" && mount -t tmpfs shm /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@cache
def why_no_pods() -> str:
    """Why there can be no pods here, if so."""
    try:
        probe = [*ISOLATED, "sh", "-c", SET_UP, "pod", "/etc/hosts", "true"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Cluster:
    """Does with pods what the manifest asks for.

    Args:
        what: The manifest.
        folder: Holds what the pods share.
        script: The training script and its arguments.
    """

    def __init__(self, what: Manifest, folder: Path, *script: str) -> None:
        self.what, self.folder, self.script = what, folder, script
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: list[tuple[int, int, str]] = []  # which node's pods, with which exit codes, and what followed
        self.hosts = folder / "hosts"
        # An address of its own for each: the rendezvous tells nodes by name and process number.
        hosts = [f"127.0.1.{node + 1} {host}.gpt {host}" for node, host in enumerate(what.host_names)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.run_directory = RunDirectory(folder / "runs" / "gpt")

    def start(self) -> None:
        for node in range(self.what.nodes):
            self._create(node)

    def _create(self, node: int) -> None:
        command = []
        for word in self.what.command(node):
            word = word.replace("/shared/", f"{self.folder}/").replace(":29500", f":{self.port}")
            word = "--nproc-per-node=1" if word == "--nproc-per-node=8" else word  # there are no GPUs
            command += self.script if word == "/workspace/train.py" else [word]
        environment = {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        with open(self.folder / "output", "ab") as output:
            self.pods[node] = subprocess.Popen(
                [*ISOLATED, "sh", "-c", SET_UP, self.what.host_names[node], str(self.hosts), *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def evict(self, node: int) -> None:
        """Does what a node does first that wants to be rid of a pod."""
        [first] = psutil.Process(self.pods[node].pid).children()
        first.terminate()

    def kill(self, node: int) -> None:
        """Kills process 1 of a pod, and so all of it."""
        self.pods[node].kill()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def run_until(self, condition: Callable[[], Any] = lambda: False) -> str | None:
        """Replaces pods until all have succeeded, the Job has failed, or something is true; returns which."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.output()
            for node, pod in list(self.pods.items()):
                if (exit_code := pod.poll()) is None:
                    continue
                exit_code = exit_code if exit_code >= 0 else 128 - exit_code
                action = self.what.action(exit_code) if exit_code else "Succeeded"
                self.ended.append((node, exit_code, action))
                del self.pods[node]
                counted = [end for end in self.ended if end[2] == "Count"]
                if action == "FailJob" or len(counted) > self.what.job["backoffLimit"]:
                    return "failed"
                if action != "Succeeded":
                    self._create(node)
            if not self.pods:
                return "complete"
            time.sleep(0.05)
        return None

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()  # and with it its namespace
            pod.wait()


@pytest.fixture
def clusters() -> Iterator[list[Cluster]]:
    if reason := why_no_pods():
        pytest.skip(reason)
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.close()


def trains(cluster: Cluster, config: dict[str, Any], steps: int) -> Callable[[], bool]:
    """Whether as many steps were trained."""

    def condition() -> bool:
        log = Path(f"{config['log']}.0")
        return log.exists() and len(log.read_text().splitlines()) >= steps

    return condition


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["job", "jobset"])
def test_a_run_that_is_evicted_and_killed_ends_as_if_undisturbed(
    name: str, tmp_path: Path, clusters: list[Cluster]
) -> None:
    what = manifest(name)
    options = {"callbacks": [], "trainer": {"devices": 1, "num_nodes": what.nodes}, "step_s": 0.1}
    config = make(tmp_path, "disturbed", **options)
    config["run_dir"] = str(tmp_path / "disturbed" / "runs" / "gpt")
    cluster = Cluster(what, tmp_path / "disturbed", str(PROGRAM), json.dumps(config))
    clusters.append(cluster)
    last = what.nodes - 1
    cluster.start()
    assert cluster.run_until(trains(cluster, config, 5)) is None, cluster.output()
    cluster.evict(last)
    assert cluster.run_until(trains(cluster, config, 15)) is None, cluster.output()
    assert sorted(cluster.ended) == [(node, exit_codes.INTERRUPTED, "Ignore") for node in range(what.nodes)]
    cluster.kill(last)
    assert cluster.run_until() == "complete", cluster.output()
    assert cluster.ended[what.nodes] == (last, 128 + signal.SIGKILL, "Count")
    assert {end[1] for end in cluster.ended[what.nodes + 1 :]} <= {0, exit_codes.INTERRUPTED}
    assert (result(config), samples(config)) == undisturbed(tmp_path, **options)


@pytest.mark.campaign
@pytest.mark.parametrize("ends", ["is evicted", "is killed"])
def test_the_other_pods_train_on_while_one_is_replaced(ends: str, tmp_path: Path, clusters: list[Cluster]) -> None:
    what = manifest("jobset")
    swap = {"--recipe=nemo": "--recipe=elastic", "--nnodes=2": "--nnodes=1:2"}
    assert all(word in what.text for word in swap.values()), "as the file says"
    words = [swap.get(word, word) for word in what.container["command"]]
    words.insert(2, "--section-timeouts=step:none")  # a step waits here
    what = replace(what, container={**what.container, "command": words})
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}}
    config = with_ranks(make(tmp_path, "disturbed", **options), 2)
    config["trainer"] = {**config["trainer"], "devices": 1, "num_nodes": 2}
    config["run_dir"] = str(tmp_path / "disturbed" / "runs" / "gpt")
    wait = {"at": "train", "rank": 0, "do": "sleep", "seconds": 0.0, "within_s": 200, "once": True}
    is_over, is_back = tmp_path / "over", f"{config['run_dir']}/logs/attempt-4/*"
    config["events"] = [{**wait, "step": 13, "after_file": str(is_over)}, {**wait, "step": 40, "after_file": is_back}]
    cluster = Cluster(what, tmp_path / "disturbed", str(PROGRAM), json.dumps(config))
    clusters.append(cluster)
    cluster.start()
    assert cluster.run_until(trains(cluster, config, 12)) is None, cluster.output()
    (cluster.evict if ends == "is evicted" else cluster.kill)(1)
    ledger = cluster.run_directory.ledger
    assert cluster.run_until(lambda: any(each["event"] == "replaced" for each in read_ledger(ledger))) is None
    is_over.touch()
    assert cluster.run_until() == "complete", cluster.output()
    first, *others = cluster.ended
    assert first == ((1, exit_codes.INTERRUPTED, "Ignore") if ends == "is evicted" else (1, 137, "Count"))
    assert sorted(others) == [(node, 0, "Succeeded") for node in range(2)], cluster.output()
    _, steps = undisturbed_of_all(tmp_path, 2, **options)
    assert samples_of_all(config["log"]) == steps


@pytest.mark.campaign
def test_a_run_that_keeps_failing_is_not_replaced_for_ever(tmp_path: Path, clusters: list[Cluster]) -> None:
    """Its retries are new pods, and the last one's end is that of the Job."""
    script = tmp_path / "train.py"
    script.write_text("raise ConnectionError('on purpose')")
    cluster = Cluster(manifest("job"), tmp_path, str(script))
    clusters.append(cluster)
    cluster.start()
    assert cluster.run_until() == "failed", cluster.output()
    retries = JOBS["preemptible"].budget.job_retries
    assert [end[1:] for end in cluster.ended] == [(exit_codes.INTERRUPTED, "Ignore")] * retries + [(1, "FailJob")]
    assert (
        len([event for event in read_ledger(cluster.run_directory.ledger) if event["event"] == "failure"])
        == 1 + retries
    )


def test_a_node_without_the_first_one_does_not_say_that_the_run_has_failed(tmp_path: Path) -> None:
    """It would be the end of the Job, and the first pod is only being replaced."""
    script = tmp_path / "train.py"
    script.touch()
    code = """
from lightning_resilience.launch import cli
from lightning_resilience.run import deadlines
deadlines.FIRST_NODE_WITHIN_S = 0.5
cli.main()
"""
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=127.0.0.1:1", f"--run-dir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", code, "launch", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == exit_codes.INTERRUPTED, done.stderr
    assert "Interrupted: the first node has written nothing" in done.stderr
