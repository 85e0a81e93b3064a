"""Progress of a TrainJob of Kubeflow Trainer (its KEP-2779): what ``kubectl get trainjob`` shows of the run.

The controller gives the pods of a TrainJob the environment variables below, if its feature gate ``TrainJobStatus`` is
on. Only the launch that decides reports.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_resilience.launch.metrics import Figures

URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT_VARIABLE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"

_ANSWERS_WITHIN_S = 5.0
_INT32_MAX = 2**31 - 1
_SHOWN = ("step", "goal_step", "safe_step", "goodput", "worker_starts")


def server() -> str | None:
    """The URL to which progress is reported; ``None``: there is no TrainJob, or its controller does not ask."""
    names = (URL_VARIABLE, CA_CERT_VARIABLE, TOKEN_VARIABLE)
    return os.environ.get(URL_VARIABLE) if all(map(os.environ.get, names)) else None


class TrainJob:
    """Reports progress to the controller.

    Args:
        clock: Returns seconds.
    """

    name = "Kubeflow TrainJob"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None  # when this launch saw its first step, and that step

    def show(self, figures: Figures) -> None:
        """Reports these metrics.

        Args:
            figures: The metrics.

        Raises:
            OSError: If the controller does not accept them.
        """
        import ssl  # both take longer to import than the rest of a launcher
        from urllib.request import Request, urlopen

        token = Path(os.environ[TOKEN_VARIABLE]).read_text().strip()  # read each time: it is replaced before it expires
        request = Request(
            os.environ[URL_VARIABLE],
            data=json.dumps({"trainerStatus": self.status(figures)}).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        context = ssl.create_default_context(cafile=os.environ[CA_CERT_VARIABLE])
        with urlopen(request, timeout=_ANSWERS_WITHIN_S, context=context):
            pass

    def status(self, figures: Figures) -> dict[str, Any]:
        """The ``trainerStatus`` of the API: whole numbers, and metrics as text.

        Args:
            figures: The metrics.
        """
        shown = {name: figures[name][""] for name in _SHOWN if figures.get(name)}
        state = next((name for name, value in figures.get("state", {}).items() if value), "starting")
        metrics = {
            "state": state,
            **{name: f"{value:.6g}" if value % 1 else f"{value:.0f}" for name, value in shown.items()},
        }
        status: dict[str, Any] = {
            "metrics": [{"name": name, "value": value} for name, value in metrics.items()],
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        if state == "finished":
            return {"progressPercentage": 100, "estimatedRemainingSeconds": 0, **status}
        step, goal = shown.get("step"), shown.get("goal_step")
        if step is None or goal is None:
            return status
        status["progressPercentage"] = min(99, int(100 * step / max(goal, 1)))  # 100 % only when the run has ended
        now = self._clock()
        begun, first = self._first = self._first or (now, step)
        if step > first:
            remaining = max(0.0, goal - step) * (now - begun) / (step - first)
            status["estimatedRemainingSeconds"] = int(min(remaining, _INT32_MAX))
        return status

    def end(self) -> None:
        """Does nothing: nothing is left to do."""
