"""``StragglerDetection``: finds slow ranks, and the section of the step that makes them slow."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_resilience._arguments import checked, duration
from lightning_resilience.detect.stragglers.step_timer import CALLBACKS, NO_SECTION
from lightning_resilience.detect.stragglers.stragglers import Report
from lightning_resilience.fit.joining import SessionCallback, session_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.fit.straggler_reports import Backend, StragglerOptions, StragglerReports

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StragglerDetection(SessionCallback):
    """Names the slow ranks that the other ranks wait for.

    Each rank is judged by its own work: the time in which it does not wait for other ranks. A score of 0.5 means that a
    rank takes twice as long as the other ranks (relative), or as itself at its best (individual). Data loading,
    computing and callbacks are measured separately.

    Every ``report_time_interval``, at a boundary that all ranks agree on, the ranks exchange their step times. Rank 0
    logs a report in the format of NeMo's callback and passes it to the loggers. A step in between only reads a clock.

    Args:
        report_time_interval: Time between two reports: a ``timedelta`` or seconds; longer where 10 steps take longer.
        calc_relative_gpu_perf: Whether to compare ranks with each other.
        calc_individual_gpu_perf: Whether to compare each rank with its own best.
        num_gpu_perf_scores_to_print: Number of worst and of best scores to print beside stragglers; 0: none.
        gpu_relative_perf_threshold: A rank with a relative score below this is a straggler.
        gpu_individual_perf_threshold: A rank with an individual score below this is a straggler.
        stop_if_detected: Save and end the run because of a straggler, once for each device, so that it can be restarted
            elsewhere. Needs :class:`~lightning_resilience.AutoResume` and a launcher that restarts the run. Does
            nothing if more than half of the ranks are slow. Megatron-Bridge's default is ``False``.
        enable_logging: Whether the Trainer's loggers get the scores.
        profiling_interval: Measure every this many steps. If steps are short, only as many as a report needs are
            measured: up to 256 windows of 32.
        backend: ``"timer"``: the host's clock. ``"device_events"``: events of the device. ``"cupti"``: events, and
            NVRx's profiler of CUDA kernels, in 32 steps and 2 % of the time at most; excludes other profilers.
            ``"auto"``: events if the device has them, otherwise the clock.
        min_consecutive_reports: Number of reports in a row that must name a rank; NVRx has 1.
        run_dir: The run directory, on storage that all nodes share. Default: ``resilience`` in the Trainer's
            ``default_root_dir``. Under ``launch``, its ``--run-dir`` takes precedence.

    Raises:
        ValueError: If an argument makes no sense, or the backend does not work here.

    Example::

        detection = StragglerDetection(report_time_interval=timedelta(minutes=10), stop_if_detected=False)
        trainer = Trainer(callbacks=[detection], max_epochs=2)
        trainer.fit(model, data)
        print(detection.report)  # the last one, on rank 0
    """

    _same_as = ("StragglerDetectionCallback",)

    @checked
    def __init__(
        self,
        report_time_interval: timedelta | float = 300.0,
        calc_relative_gpu_perf: bool = True,
        calc_individual_gpu_perf: bool = True,
        num_gpu_perf_scores_to_print: int = 5,
        gpu_relative_perf_threshold: float = 0.7,
        gpu_individual_perf_threshold: float = 0.7,
        stop_if_detected: bool = True,
        enable_logging: bool = True,
        profiling_interval: int = 1,
        backend: Backend = "auto",
        min_consecutive_reports: int = 1,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        interval_s = duration("report_time_interval", report_time_interval).total_seconds()
        if interval_s <= 0:
            raise ValueError(f"report_time_interval must be a number of seconds above 0, not {report_time_interval}.")
        if not (calc_relative_gpu_perf or calc_individual_gpu_perf):
            raise ValueError("calc_relative_gpu_perf and calc_individual_gpu_perf are both off: nothing is left to do.")
        if num_gpu_perf_scores_to_print < 0:
            raise ValueError(f"num_gpu_perf_scores_to_print must not be negative, not {num_gpu_perf_scores_to_print}.")
        for name, threshold in (
            ("gpu_relative_perf_threshold", gpu_relative_perf_threshold),
            ("gpu_individual_perf_threshold", gpu_individual_perf_threshold),
        ):
            if not 0 <= threshold <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {threshold}.")
        if profiling_interval < 1:
            raise ValueError(f"profiling_interval must be at least 1, not {profiling_interval}.")
        if min_consecutive_reports < 1:
            raise ValueError(f"min_consecutive_reports must be at least 1, not {min_consecutive_reports}.")
        self.report_time_interval = interval_s
        self.calc_relative_gpu_perf = calc_relative_gpu_perf
        self.calc_individual_gpu_perf = calc_individual_gpu_perf
        self.num_gpu_perf_scores_to_print = num_gpu_perf_scores_to_print
        self.gpu_relative_perf_threshold = gpu_relative_perf_threshold
        self.gpu_individual_perf_threshold = gpu_individual_perf_threshold
        self.stop_if_detected = stop_if_detected
        self.enable_logging = enable_logging
        self.profiling_interval = profiling_interval
        self.backend: Backend = backend
        self.min_consecutive_reports = min_consecutive_reports
        self.run_dir = run_dir
        self.report: Report | None = None
        """The last report; on rank 0 only."""

    def _participate(self, session: FitSession) -> Participant:
        """Chooses how to measure."""
        return StragglerReports(session, self._options(StragglerOptions), self._keep_report)

    def _keep_report(self, report: Report) -> None:
        self.report = report

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes a validation between two steps from the timing."""
        if session_of(trainer, self) and isinstance(reports := self._participant, StragglerReports):
            reports.enter(NO_SECTION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues the timing after the validation."""
        if session_of(trainer, self) and isinstance(reports := self._participant, StragglerReports):
            reports.enter(CALLBACKS)
