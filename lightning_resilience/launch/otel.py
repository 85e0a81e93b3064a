"""Metrics by OpenTelemetry, if its environment variables name an endpoint, as for every program with its SDK."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience import __version__
from lightning_resilience._formatting import shortened
from lightning_resilience._output import log_line
from lightning_resilience.launch.metrics import METRICS, Figures, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The environment variables that name the endpoint; the first that is set counts."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_UNITS = {"seconds": "s", "ratio": "1", "": "1"}
_ENDS_WITHIN_MS = 2000
_LOGGER = logging.getLogger("opentelemetry")


def endpoint() -> str | None:
    """The endpoint to which OpenTelemetry's environment variables send metrics; ``None``: there is none."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or os.environ.get("OTEL_METRICS_EXPORTER", "otlp") != "otlp":
        return None
    return next(filter(None, map(os.environ.get, ENDPOINTS)), None)


class _Once(logging.Handler):
    """Logs the first failure of OpenTelemetry, which is repeated with every export."""

    has_logged = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.has_logged:
            self.has_logged = True
            log_line(
                f"OpenTelemetry: {shortened(record.getMessage(), 200)}. Retrying; further failures will not be logged."
            )


class OpenTelemetry:
    """Sends metrics to :func:`endpoint`, every minute unless OpenTelemetry's variables set another interval.

    Args:
        run_dir: The run directory.
        run_id: The id of the run.

    Raises:
        ImportError: If the SDK or the exporter is not installed.
    """

    name = "OpenTelemetry"

    def __init__(self, run_dir: str, run_id: str) -> None:
        from importlib.metadata import entry_points

        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        found = entry_points(group="opentelemetry_metrics_exporter", name=name)
        if not found:
            raise ImportError(f"there is no exporter {name}")
        exporter = next(iter(found)).load()()
        attributes = {"lightning_resilience.run_dir": run_dir, "lightning_resilience.run_id": run_id}
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            attributes["service.name"] = "lightning-resilience"
        self._troubles = _Once(logging.WARNING)
        _LOGGER.addHandler(self._troubles)
        _LOGGER.propagate = False
        self._figures: Figures = {}
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)], Resource.create(attributes), shutdown_on_exit=False
        )
        meter = self._provider.get_meter("lightning_resilience", __version__)
        for metric in METRICS:
            create: Callable[..., Any] = meter.create_observable_gauge
            if metric.kind == "counter":
                create = meter.create_observable_counter
            observe = partial(self._observe, metric)
            create(f"lightning_resilience.{metric.name}", [observe], _UNITS[metric.unit], metric.help)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterator[Observation]:
        from opentelemetry.metrics import Observation

        for label, value in self._figures.get(metric.name, {}).items():
            yield Observation(value, {metric.label: label} if metric.label else {})

    def show(self, figures: Figures) -> None:
        """Sends these metrics from now on.

        Args:
            figures: The metrics.
        """
        self._figures = figures

    def end(self) -> None:
        """Sends the last metrics and ends."""
        self._provider.shutdown(_ENDS_WITHIN_MS)
        _LOGGER.removeHandler(self._troubles)
        _LOGGER.propagate = True
