"""A real Slurm for tests: munged, slurmctld and several slurmd on this host, in one folder, without systemd.

Debian's slurmd is built to run several times on one machine (``slurmd -N n1``), each on a port of its own. What had to
be found out:

- Names of nodes must resolve, because Lightning and the rendezvous use them: a line in ``/etc/hosts``, taken out again.
- ``cred_expire`` is also how long a requeued job is held back (default: 2 minutes); 5 s is the least that is taken.
- munged ends last: a slurmstepd that cannot authenticate tries for ever, and so outlives its job.
- Every client call has a time limit: one srun on a node that is not there waits without end.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
HOSTS = Path("/etc/hosts")
CALL_WITHIN_S = 30.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
SlurmdTimeout=10
MinJobAge=3600
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2,bf_continue,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why there can be no cluster here, if so."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if missing() and shutil.which("apt-get") is None:
        return f"{', '.join(missing())} missing, and no apt-get to install Debian's packages"
    return None


def missing() -> list[str]:
    return [name for name in DAEMONS if shutil.which(name) is None]


def install() -> None:
    """Installs Debian's packages if they are missing; nothing of them is started.

    Raises:
        RuntimeError: With the end of what apt-get said.
    """
    if not missing():
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    packages = ["slurmctld", "slurmd", "slurm-client", "munge"]
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "--quiet=2", *command], env=quiet, capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode:
            raise RuntimeError(f"apt-get {command[0]} failed: {(done.stdout + done.stderr)[-300:]}")


class Cluster:
    """One cluster.

    Args:
        folder: Where all of it lives; only root may be able to enter it.
        nodes: How many.
        kill_wait: Seconds between the last SIGTERM to a job and SIGKILL.
    """

    def __init__(self, folder: Path, nodes: int = 3, kill_wait: int = 15) -> None:
        self.folder = folder
        self.kill_wait = kill_wait
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        for name in list(self.environment):
            if name.startswith(("SLURM_", "SLURMD_")) and name != "SLURM_CONF":
                del self.environment[name]  # the tests themselves may run in a Slurm job
        self._tag = f"# {folder}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged insists
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        port = _free_ports(len(self.nodes) + 1)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                port=port,
                first=port + 1,
                last=port + len(self.nodes),
                folder=self.folder,
                nodes=f"n[1-{len(self.nodes)}]",
                kill_wait=self.kill_wait,
            )
        )
        self._resolve(f"127.0.0.1 {' '.join(self.nodes)} {self._tag}")
        files = {"key": "key", "socket": "sock", "pid": "pid", "log": "log", "seed": "seed"}
        names = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        munged = [f"--{names[each]}={self.folder}/munge.{files[each]}" for each in files]
        self._start("munged", ["munged", "--foreground", *munged])
        wait_until(lambda: (self.folder / "munge.sock").exists(), self.logs, 10.0)
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self.start_node(node)
        wait_until(
            lambda: self.call("sinfo", "-h", "-N", "-p", "low", "-t", "idle").count("\n") >= len(self.nodes), self.logs
        )
        self.call("srun", f"-N{len(self.nodes)}", "true")  # a step on every node: it really runs

    def down(self) -> None:
        """Ends everything, jobs and their processes first."""
        if set(self.nodes) & set(self._daemons):
            with suppress(AssertionError, subprocess.TimeoutExpired):
                for partition in ("low", "high"):
                    self.call("scancel", "--full", "--signal=KILL", f"--partition={partition}", check=False)
                    self.call("scancel", f"--partition={partition}", check=False)
                wait_until(lambda: not self.call("squeue", "-h", "-t", "R,CG", check=False).strip(), self.logs, 10.0)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for name in sorted(self._daemons, key=lambda name: (name == "munged", name == "slurmctld")):
            self._end(name)
        self._resolve(None)

    def start_node(self, node: str) -> None:
        self._start(node, ["slurmd", "-D", "-N", node])

    def lose_node(self, node: str) -> None:
        """What happens when the power of a node fails: everything on it is gone at once, and nobody says so."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()
        for process in self.processes(node):
            with suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    parent.kill()
                process.kill()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """The processes of the jobs, on one node or on all."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and (
                    environment.get("SLURMD_NODENAME") in ([node] if node else self.nodes)
                ):
                    found.append(process)
        return found

    def call(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=CALL_WITHIN_S, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, *options: str, script: str | None = None, wrap: str | None = None, cwd: Path | None = None) -> str:
        command = ["sbatch", "--parsable", *options]
        command += [f"--wrap={wrap}"] if wrap is not None else [str(script)]
        return self.call(*command, cwd=cwd).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job_id)
        fields = dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s[A-Za-z/:]+=|\s*$)", shown))
        assert fields, shown
        return fields

    def wait_for_state(self, job_id: str, *states: str, within_s: float = 120.0) -> dict[str, str]:
        """Waits until a job is in one of these states."""
        wait_until(
            lambda: self.job(job_id)["JobState"] in states, lambda: f"{self.job(job_id)}\n{self.logs()}", within_s
        )
        return self.job(job_id)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        process = self._daemons[name]
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _resolve(self, line: str | None) -> None:
        """Puts the names of the nodes into the hosts file, or takes them out: in place, it may be mounted."""
        lines = [each for each in HOSTS.read_text().splitlines() if not each.endswith(self._tag)]
        HOSTS.write_text("\n".join([*lines, *([line] if line else [])]) + "\n")


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel gives out."""
    for first in range(16817 + os.getpid() % 1000, 32000, count):
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


def wait_until(condition: Callable[[], Any], explain: Callable[[], str] = lambda: "", within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)
