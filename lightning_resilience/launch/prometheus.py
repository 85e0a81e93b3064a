"""Metrics for Prometheus: a file for node_exporter, or an endpoint of the launcher; made by ``prometheus_client``."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_resilience._output import log_line
from lightning_resilience.launch.metrics import METRICS, Figures
from lightning_resilience.run.ledger import node_name

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric as Family

_ENDPOINT = re.compile(r"(?P<host>[^/]*):(?P<port>[0-9]{1,5})")


def checked_target(text: str) -> str:
    """Checks where to show metrics; returns it as :class:`Prometheus` takes it.

    Args:
        text: ``FILE.prom`` or ``[HOST]:PORT``.

    Raises:
        ValueError: If it is neither, or ``prometheus_client`` is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ValueError("it requires prometheus_client: pip install 'lightning-resilience[metrics]'")
    if _ENDPOINT.fullmatch(text):
        return text
    if not text.endswith(".prom"):
        raise ValueError(f"{text!r} is neither a file for node_exporter, which ends in .prom, nor HOST:PORT")
    return os.path.abspath(os.path.expanduser(text))


def endpoint_of(target: str) -> tuple[str, int] | None:
    """Host (empty: all addresses) and port, if a target is an endpoint; ``None``: it is a file.

    Args:
        target: As :func:`checked_target` returns it.
    """
    found = _ENDPOINT.fullmatch(target)
    return None if found is None else (found["host"].strip("[]"), int(found["port"]))


class Prometheus:
    """Shows metrics in a file or at an endpoint.

    Args:
        target: As :func:`checked_target` returns it.
        run_dir: The value of the label ``run_dir``, which all series have.
    """

    name = "--prometheus"

    def __init__(self, target: str, run_dir: str) -> None:
        from prometheus_client import CollectorRegistry

        self._target = target
        self._run_dir = run_dir
        self._figures: Figures = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: WSGIServer | None = None

    def collect(self) -> Iterator[Family]:
        """The metrics as objects of ``prometheus_client``, which calls this for a file and for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures
        for metric in METRICS:
            if series := figures.get(metric.name):
                labels = ["run_dir", *filter(None, [metric.label])]
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.prometheus_name, metric.help, labels=labels)
                for label, value in series.items():
                    family.add_metric([self._run_dir, label][: len(labels)], value)
                yield family

    def show(self, figures: Figures) -> None:
        """Shows these metrics from now on.

        Args:
            figures: The metrics.

        Raises:
            OSError: If the file cannot be written, or the port is in use; the caller tries again.
        """
        from prometheus_client import start_http_server, write_to_textfile

        self._figures = figures
        if (endpoint := endpoint_of(self._target)) is None:
            write_to_textfile(self._target, self._registry)
        elif self._server is None:
            host, port = endpoint[0] or "0.0.0.0", endpoint[1]
            self._server, _ = start_http_server(port, host, self._registry)
            name = endpoint[0] or node_name()  # no host given: at all addresses
            log_line(f"Metrics for Prometheus at http://{name}:{self._server.server_port}/metrics.")

    def end(self) -> None:
        """Closes the endpoint; a file stays as it is."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
