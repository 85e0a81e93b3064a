"""What a launch shows to Prometheus, OpenTelemetry and Kubeflow, and that it never disturbs the run."""

from __future__ import annotations

import json
import re
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from lightning_resilience.launch import monitor, otel, prometheus, trainjob
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.metrics import CAUSES, METRICS, STATES, Figures, measure, state_of
from lightning_resilience.launch.monitor import Monitor, MonitorSettings
from lightning_resilience.launch.report import all_interruptions
from lightning_resilience.run import time_account
from lightning_resilience.run.events import Fault, WorkersStart
from lightning_resilience.run.goodput import CATEGORIES, account
from lightning_resilience.run.history import History
from lightning_resilience.run.interruptions import interruptions
from lightning_resilience.run.run_directory import RunDirectory
from tests.ledgers import history_of
from tests.test_goodput import HUNG, ended, job, launch, run_with, spent

pytest.importorskip("prometheus_client")

PATIENCE_S = 30.0
RUN_DIR = '/runs/a "b"\\c'


def wait_until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def figures_of(history: History, now: float | None = None) -> Figures:
    found = account(history.events, (), now)
    recorded = all_interruptions(found.interruptions, interruptions(history.events))
    return measure(history, found, recorded, (), Budget(in_job_restarts=3, job_retries=2))


WORKERS = {"event": "start", "elastic_run_id": "job", "world_size": 2}
LINES: list[dict[str, Any]] = [
    {"event": "launch", "time": 0.0},
    {"event": "job_start", "time": 1.0, "run_id": "job"},
    {**WORKERS, "time": 2.0, "restart_count": 0},
    {"event": "fresh", "time": 3.0, "fit": 0},
    {"event": "saved", "time": 10.0, "fit": 0, "step": 100, "seconds": 2.5},
    {"event": "saved", "time": 11.0, "fit": 0, "step": 110, "tier": "local", "count": 6, "seconds": 0.5},
    *({"event": "bad_step", "time": 12.0, "rank": rank, "fit": 0, "step": 112} for rank in (0, 1)),
    {"event": "rollback", "time": 12.0, "fit": 0, "step": 112},
    {"event": "stragglers", "time": 13.0, "fit": 0, "step": 120, "ranks": [1]},
    {"event": "save_failed", "time": 14.0, "fit": 0, "step": 130, "reason": "no space"},
    {"event": "fault", "time": 20.0, "rank": 1, "kind": "died", "fit": 0, "step": 150, "reason": "SIGKILL"}
    | {"elastic_run_id": "job", "restart_count": 0},
    {**WORKERS, "time": 30.0, "restart_count": 1},
    {"event": "resumed", "time": 31.0, "fit": 0, "step": 110, "tier": "local"},
]


def test_what_a_ledger_says() -> None:
    found = figures_of(history_of(LINES))
    assert {name: series[""] for name, series in found.items() if list(series) == [""]} == {
        **{"worker_starts": 2, "ranks": 2, "lost_steps": 40, "safe_step": 100, "excluded_nodes": 0},
        **{"restarts_used": 0, "restarts_left": 3, "job_retries_left": 2},
        **{"bad_steps": 1, "rollbacks": 1, "failed_saves": 1},
    }
    before_progress = figures_of(history_of(LINES[:-1]))
    assert (before_progress["restarts_used"], before_progress["restarts_left"]) == ({"": 1}, {"": 2})
    assert found["saves"] == {"global": 1, "local": 6}
    assert found["last_save_step"] == {"global": 100, "local": 110}
    assert found["last_save_timestamp"] == {"global": 10, "local": 11}
    assert found["last_save_duration"] == {"global": 2.5, "local": 0.5}
    assert found["straggler_reports"] == {"1": 1}
    assert {name for name, value in found["state"].items() if value} == {"training"}
    assert sum(found["interruptions"].values()) == 1
    assert found["interruptions"].keys() == set(CAUSES), "a series that begins with 1 has not grown"


def test_what_the_account_says() -> None:
    found = figures_of(History(HUNG))
    assert (found["goodput"][""], found["ettr"][""]) == (95 / 150, 96 / 150)
    assert found["rank_time"].keys() == set(CATEGORIES)
    assert (found["rank_time"]["productive"], found["lost_rank_time"]["hang"]) == (190, 88)


def test_the_longest_time_without_progress_is_that_of_ranks_that_live(tmp_path: Path, lines: list[str]) -> None:
    now = time.time()
    run_dir = run_with(tmp_path / "run", launch(now - 1000, now - 1000))
    time_account.keep(run_dir, "hangs", spent(now - 900, now - 700, now - 10))
    time_account.keep(run_dir, "node that is gone", spent(now - 900, now - 890, now - 100))
    with running(run_dir, prometheus=str(tmp_path / "run.prom")):
        wait_until((tmp_path / "run.prom").exists)
        found = parsed((tmp_path / "run.prom").read_text())
    assert found["lightning_resilience_progress_age_seconds"] == {(("run_dir", str(run_dir)),): pytest.approx(690)}
    assert found["lightning_resilience_goodput_ratio"]


def test_a_counter_waits_until_it_is_known_what_followed() -> None:
    """What is first taken for one cause may turn out to be another, and a counter cannot go back."""
    [first, second] = [event for event in history_of(LINES).events if isinstance(event, WorkersStart)]
    fault = Fault(time=70, rank=1, kind="hang", fit=0, step=6, reason="stuck")
    events = [launch(0, 0), job(1), first, spent(2, 50, 60, "productive"), fault]
    second.time = 80.0
    for end, expected in (([], 0), ([second], 1), ([ended(75)], 1)):
        assert figures_of(History([*events, *end]), 90.0)["interruptions"]["hang"] == expected


def test_the_state_of_a_run() -> None:
    states = {end: state_of(history_of(LINES[:end])) for end in range(1, len(LINES) + 1)}
    assert [states[end] for end in (1, 3, 4, 11, 12, 13, 14)] == [
        *("starting", "starting", "training", "training", "restarting", "starting", "training")
    ]
    for status in STATES[3:]:
        assert state_of(history_of([*LINES, {"event": "exit", "time": 40.0, "status": status}])) == status


def test_of_many_stragglers_the_most_frequent_have_series() -> None:
    reports = [{"event": "stragglers", "time": 1.0 + n, "ranks": [7, n]} for n in range(10, 60)]
    found = figures_of(history_of([*LINES, *reports]))["straggler_reports"]
    assert len(found) == 20
    assert found["7"] == 50


# -- Prometheus --------------------------------------------------------------------------------------------------------


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Metrics in Prometheus' text format; fails on what node_exporter or Prometheus would refuse or warn of."""
    assert text.endswith("\n")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"# HELP ([a-z_]+) (\S.*)", line):
            name = match[1]
            assert name not in found, "a family is in one piece"
            found[name] = {}
        elif match := re.fullmatch(r"# TYPE ([a-z_]+) (gauge|counter)", line):
            assert match[1] == name
            assert (match[2] == "counter") == name.endswith("_total")
        else:
            match = re.fullmatch(r"([a-z_]+)\{(.*)\} (\S+)", line)
            assert match is not None, line
            assert match[1] == name
            one = r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"'
            assert re.fullmatch(f"{one}(,{one})*", match[2])
            labels = tuple(
                sorted((key, re.sub(r"\\(.)", r"\1", value)) for key, value, *_ in re.findall(one, match[2]))
            )
            assert labels not in found[name]
            found[name][labels] = float(match[3])
    return found


def test_names_are_as_prometheus_has_them() -> None:
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"lightning_resilience_[a-z_]+", metric.prometheus_name)
        assert metric.prometheus_name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(seconds|ratio|total|count|sum|bucket)$", metric.name)
        assert not metric.help.endswith(".")


def test_a_file_has_every_figure(tmp_path: Path) -> None:
    figures = figures_of(history_of(LINES)) | figures_of(History(HUNG)) | {"run_info": {"0123": 1.0}}
    path = tmp_path / "run.prom"
    prometheus.Prometheus(prometheus.checked_target(str(path)), RUN_DIR).show(figures)
    found = parsed(path.read_text())
    shown = {metric.prometheus_name: figures[metric.name] for metric in METRICS if figures.get(metric.name)}
    assert found.keys() == shown.keys()
    for metric in METRICS:
        for label, value in figures.get(metric.name, {}).items():
            labels = {"run_dir": RUN_DIR} | ({metric.label: label} if metric.label else {})
            assert found[metric.prometheus_name][tuple(sorted(labels.items()))] == value
    assert [each.name for each in tmp_path.iterdir()] == ["run.prom"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    shown = prometheus.Prometheus(str(path), RUN_DIR)
    shown.show({"ranks": {"": 1.0}})
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            shown.show({"ranks": {"": 2.0}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run.prom"]


@pytest.mark.parametrize("text", ["run.txt", "host:99x", "metrics/", ":"])
def test_what_is_neither_a_file_nor_an_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a file for node_exporter, which ends in \.prom"):
        prometheus.checked_target(text)


def test_what_it_takes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-resilience\[metrics\]'"):
        prometheus.checked_target(":9000")


# -- the launch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; and monitoring that looks often."""
    logged: list[str] = []
    for module in (monitor, prometheus, otel):
        monkeypatch.setattr(module, "log_line", logged.append)
    monkeypatch.setattr(monitor, "EVERY_S", 0.01)
    monkeypatch.setattr(monitor, "_PAUSE_PER_COST", 0)
    return logged


def running(path: Path, **settings: Any) -> Monitor:
    return Monitor(MonitorSettings(**settings), RunDirectory(path), "0123", "launch", Budget())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return run_with(tmp_path / "run", *HUNG)


def test_without_anything_asked_for_there_is_no_thread(run_dir: Path) -> None:
    before = threading.active_count()
    with running(run_dir):
        assert threading.active_count() == before


def test_a_node_that_is_out_of_threads_has_no_monitoring(
    run_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with running(run_dir, prometheus=":1"):
        assert lines[0].startswith("monitoring: can't start new thread. The run is not affected")


def test_a_port_in_use_is_said_once_and_tried_again(run_dir: Path, lines: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with running(run_dir, prometheus=endpoint) as _:
            wait_until(lambda: lines)
            server.close()
            wait_until(lambda: len(lines) == 2)
            with urlopen(f"http://{endpoint}/metrics") as answer:
                found = parsed(answer.read().decode())
    assert "--prometheus: [Errno 98] Address already in use. The run is not affected" in lines[0]
    assert lines[1] == f"Metrics for Prometheus at http://{endpoint}/metrics."
    assert found["lightning_resilience_goodput_ratio"] == {(("run_dir", str(run_dir)),): 95 / 150}
    assert found["lightning_resilience_run_info"] == {(("run_dir", str(run_dir)), ("run_id", "0123")): 1}


def test_the_end_is_in_the_file(
    run_dir: Path, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "EVERY_S", 1000.0)
    path = tmp_path / "run.prom"
    live = run_with(run_dir, launch(0, 0), spent(0, 50, 50))
    with running(live, prometheus=str(path)):
        wait_until(path.exists)
        run_with(run_dir, *HUNG)
    found = parsed(path.read_text())["lightning_resilience_state"]
    assert found[("run_dir", str(run_dir)), ("state", "finished")] == 1
    assert not lines


def test_storage_that_fails_is_said_once(run_dir: Path, lines: list[str], tmp_path: Path) -> None:
    with running(run_dir, prometheus=str(tmp_path / "missing" / "run.prom")):
        wait_until(lambda: lines)
        (run_dir / "ledger.jsonl").rename(run_dir / "away.jsonl")
        (run_dir / "ledger").write_text("no folder")
        wait_until(lambda: len(lines) == 2)
    assert len(lines) == 2
    assert "No such file" in lines[0]


def test_storage_that_hangs_does_not_keep_the_launch(
    run_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()

    def hang(self: Monitor) -> None:
        has_begun.set()
        goes_on.wait()

    monkeypatch.setattr(Monitor, "_look", hang)
    monkeypatch.setattr(monitor, "_ENDS_WITHIN_S", 0.1)
    found = running(run_dir, prometheus=":1")
    with found:
        has_begun.wait()
    assert found._thread.is_alive()
    goes_on.set()
    found._thread.join()


# -- Kubeflow and OpenTelemetry: real servers --------------------------------------------------------------------------


class Received(ThreadingHTTPServer):
    """A server that keeps what it is sent, and answers with a status."""

    def __init__(self) -> None:
        received = self.received = []  # type: list[tuple[str, dict[str, str], bytes]]
        owner = self
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.path, dict(self.headers), body))
                self.send_response(owner.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()


@pytest.fixture
def server() -> Iterator[Received]:
    found = Received()
    yield found
    found.shutdown()
    found.server_close()


STATUS = {
    "state": {"training": 1.0, "finished": 0.0},
    "step": {"": 50.0},
    "goal_step": {"": 200.0},
    "goodput": {"": 0.5},
}


@pytest.fixture
def trainjob_at(server: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The environment that the controller gives to the pods of a TrainJob."""
    key, cert, token = (tmp_path / name for name in ("tls.key", "ca.crt", "token"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    token.write_text("jwt\n")

    def serve(path: str) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv(trainjob.URL_VARIABLE, f"https://127.0.0.1:{server.server_port}{path}")
        monkeypatch.setenv(trainjob.CA_CERT_VARIABLE, str(cert))
        monkeypatch.setenv(trainjob.TOKEN_VARIABLE, str(token))

    return serve


def test_the_progress_of_a_trainjob(
    run_dir: Path, lines: list[str], server: Received, trainjob_at: Callable[[str], None]
) -> None:
    """As Kubeflow Trainer's ``TrainerStatus`` has it: whole numbers, and metrics that are text and not empty."""
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/gpt/status"
    trainjob_at(path)
    with running(run_dir):
        wait_until(lambda: server.received)
    got, headers, body = server.received[-1]
    assert (got, headers["Authorization"], headers["Content-Type"]) == (path, "Bearer jwt", "application/json")
    found = json.loads(body)
    assert list(found) == ["trainerStatus"]
    status = found["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
    assert {"name": "state", "value": "finished"} in status["metrics"]
    assert all(isinstance(each["value"], str) and each["value"] and each["name"] for each in status["metrics"])
    assert [line for line in lines if "TrainJob" in line] == [f"Progress of this TrainJob goes to {trainjob.server()}."]

    server.status = 403
    with running(run_dir):
        wait_until(lambda: any("403" in line for line in lines))


def test_what_remains_of_a_trainjob() -> None:
    now = 0.0
    job = trainjob.TrainJob(clock=lambda: now)
    first = job.status(STATUS)
    assert (first["progressPercentage"], first.get("estimatedRemainingSeconds")) == (25, None)
    now = 10.0
    status = job.status(STATUS | {"step": {"": 100.0}})
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (50, 20)
    assert job.status(STATUS | {"step": {"": 200.0}})["progressPercentage"] == 99, "it has not ended"
    now = 1e12
    assert job.status(STATUS | {"step": {"": 51.0}})["estimatedRemainingSeconds"] == 2**31 - 1
    endless = job.status({name: STATUS[name] for name in ("state", "step")})
    assert endless.keys() == {"metrics", "lastUpdatedTime"}
    assert {"name": "step", "value": "50"} in endless["metrics"]


def test_another_pod_is_no_trainjob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trainjob.URL_VARIABLE, "http://127.0.0.1:1")
    assert trainjob.server() is None


def test_opentelemetry_gets_the_same_figures(
    run_dir: Path, lines: list[str], server: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with running(run_dir):
        wait_until(lambda: lines)
    path, _, body = server.received[-1]
    [resource_metrics] = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {each.key: each.value.string_value for each in resource_metrics.resource.attributes}
    expected = {"service.name": "lightning-resilience", "lightning_resilience.run_id": "0123"}
    assert path == "/v1/metrics"
    assert attributes.items() >= (expected | {"lightning_resilience.run_dir": str(run_dir)}).items()
    [scope] = resource_metrics.scope_metrics
    found = {each.name.removeprefix("lightning_resilience."): each for each in scope.metrics}
    shown = figures_of(History(HUNG))
    assert found.keys() == {name for name, series in shown.items() if series} | {"run_info", "update_timestamp"}
    for metric in METRICS:
        if shown.get(metric.name):
            each = found[metric.name]
            points = (each.sum if metric.kind == "counter" else each.gauge).data_points
            values = {"".join(a.value.string_value for a in p.attributes): p.as_double or p.as_int for p in points}
            assert values == shown[metric.name]
            assert each.unit == ("s" if metric.unit == "seconds" else "1")
    assert lines == [f"Metrics go to http://127.0.0.1:{server.server_port} by OpenTelemetry."]


def test_opentelemetrys_own_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert otel.endpoint() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert otel.endpoint() == "http://collector:4318"
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_METRICS_EXPORTER", "none")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert otel.endpoint() is None
