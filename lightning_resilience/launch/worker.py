"""The program that ``lightning-resilience launch`` starts as every rank: runs the script and records how it ended.

Imports neither torch nor Lightning, so that signals are noticed from the script's first import on.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import functools
import gc
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_resilience import _nvrx, signals
from lightning_resilience._output import guard_streams, log_line, write_line
from lightning_resilience.detect.hangs.rank_probe import RankProbe, describe_rank, node_directory, probe_of_worker
from lightning_resilience.detect.hangs.timeouts import SECTION_TIMEOUTS_VARIABLE, SectionTimeouts
from lightning_resilience.detect.hangs.watchdog import put_off_s, start_soon
from lightning_resilience.launch import membership, park
from lightning_resilience.launch.budget import allows_restart
from lightning_resilience.launch.job_info import job_info
from lightning_resilience.launch.nodes import BOARD, Board
from lightning_resilience.launch.processes import end_what_earlier_ranks_left
from lightning_resilience.launch.rank_output import redirect_streams
from lightning_resilience.launch.record import FIRST, newest
from lightning_resilience.launch.script_errors import describe, is_stop_of_lightning, show, what_to_change
from lightning_resilience.launch.temporary import keep_sockets_in
from lightning_resilience.launch.worker_group import worker_group
from lightning_resilience.recipes import NO_RECIPE, RECIPE_VARIABLE
from lightning_resilience.run import exit_codes
from lightning_resilience.run.deadlines import ENDED_WITHIN_S, FIRST_STARTS_WATCHDOG_WITHIN_S
from lightning_resilience.run.events import Fault, JobStart, RanksReplaced, ScriptOutcome, WorkersStart
from lightning_resilience.run.failures import cause_of_end, growths
from lightning_resilience.run.history import read_history
from lightning_resilience.run.ledger import Ledger, node_name
from lightning_resilience.run.run_directory import (
    NOT_SHOWN,
    RUN_DIR_VARIABLE,
    WORKER_PID_VARIABLE,
    AnotherFit,
    Outcome,
    RunDirectory,
)

JOB_ATTEMPT_VARIABLE = "LIGHTNING_RESILIENCE_JOB_ATTEMPT"
"""Environment variable with the number of the job retry; 0 is the first job."""

_FLUSHED_WITHIN_S = 5.0

FIRST_LAUNCH_VARIABLE = "LIGHTNING_RESILIENCE_FIRST_LAUNCH"
"""Environment variable with the id of the launch that decides for all workers of a run."""

RESTARTS_SPENT = "restarts_spent"
"""Detail of an outcome: the workers were not started again because the restarts inside the job are spent."""


def main() -> None:
    """Runs ``[-m] script [args...]`` from the command line as ``__main__``."""
    redirect_streams()
    signals.install(grace_period_s=signals.grace_period(0))  # the grace period of the launch, however long it is
    # Slurm sends the signal of a time limit to every process of the job. The launch passes it on as SIGTERM.
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    _nvrx.ignore_pynvml()
    pid = os.getpid()
    os.environ[WORKER_PID_VARIABLE] = str(pid)
    if (folder := os.environ.pop(_nvrx.FOLDER_VARIABLE, None)) is not None:
        keep_sockets_in(folder)
    command = sys.argv[1:]
    run_directory = RunDirectory(os.environ[RUN_DIR_VARIABLE])
    guard_streams(run_directory.path / NOT_SHOWN)  # the disk may be full, or the process that reads killed
    ledger = Ledger(run_directory.ledger, rank=int(os.environ.get("RANK", "0")))
    if (line := membership.join()) is not None:
        line.begin_generation = functools.partial(_begin_generation, run_directory, ledger)
    is_at_door = line is not None and line.is_at_door  # such a rank does the rest when it is admitted
    if not is_at_door:
        _begin_watch(run_directory, ledger.rank or 0)
    if (count := end_what_earlier_ranks_left()) and os.environ.get("LOCAL_RANK", "0") == "0":
        log_line(f"Terminated {count} remaining processes of earlier ranks on {node_name()}.", is_detail=True)
    began = time.time()
    fault: dict[str, Any] = {}
    first = newest(run_directory.path / "launches", FIRST)
    if first is not None and first.launch_id not in ("", os.environ.get(FIRST_LAUNCH_VARIABLE)):
        sys.exit(0)  # another launch has taken the run over: claiming it back would end that launch's workers
    _wait_for_other_nodes(run_directory)
    if not is_at_door:
        _end_if_restarts_are_spent(run_directory, ledger.rank or 0)
        if ledger.rank == 0:
            _record_start(run_directory, ledger)
    history = read_history(run_directory.ledger)  # also: what this process records comes after it
    if (reason := history.why_not_again) is not None:
        # On one node all ranks find the same in the ledger. With several nodes the first node's launch decides for all
        # ranks and ends this process, so that no rank begins something that it would not finish.
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            _record_end(run_directory, ledger, Outcome("halted", reason), fault, command)
            sys.exit(0)
        time.sleep(ENDED_WITHIN_S)
    del history
    park.record_imports()
    try:
        _run_script(command)
        outcome = Outcome("finished", "the script ended")
    except signals.Interrupted as interruption:
        outcome = Outcome("interrupted", str(interruption))
    except SystemExit as exit_request:
        if is_stop_of_lightning(exit_request):
            outcome = Outcome("interrupted", "SIGTERM outside of a fit")
        elif exit_request.code is None or exit_request.code == 0:
            outcome = Outcome("finished", "the script ended by sys.exit")
        else:
            reason = str(exit_request)  # an exception of this package that ends the process says why
            if reason == str(exit_request.code):
                reason = f"the script ended by sys.exit({exit_request.code!r})"
            is_verdict = exit_request.code == exit_codes.TRY_ELSEWHERE
            details = {"exit_code": exit_codes.TRY_ELSEWHERE} if is_verdict else {}
            outcome = Outcome("failed", reason, details=details)
            fault = describe(exit_request)
            if not isinstance(exit_request.code, int):
                write_line(str(exit_request.code))  # as Python does
    except BaseException as error:
        outcome = Outcome("failed", traceback.format_exception_only(type(error), error)[-1].strip())
        if in_vain := str(error) if isinstance(error, AnotherFit) else what_to_change(error):
            outcome = Outcome("halted", in_vain)
        fault = describe(error)
        show(error, run_directory.path / "errors", os.environ.get(FIRST_LAUNCH_VARIABLE, ""), ledger.rank or 0)

    if os.getpid() != pid:  # a child process that the script has forked ends for itself, and not for the run
        sys.exit(0 if outcome.status == "finished" else 1)
    unfinished = []
    for fit in run_directory.fits:  # a fit's own outcome takes precedence: a library may have swallowed its exception
        for said in (fit.outcome, fit.failed_start):
            if said is None or said.time < began:
                continue
            if said.status == "halted" or (said.status == "interrupted" and outcome.status == "finished"):
                outcome = said
            elif said.status == "failed":
                unfinished.append(f"{fit.path.name} had not finished (step {said.step}: {said.reason})")
    if unfinished and outcome.status == "finished":
        what = f"although {' and '.join(unfinished)}; the same command continues from there"
        outcome = Outcome("finished", f"{outcome.reason}, {what}")
    _record_end(run_directory, ledger, outcome, fault, command)
    if outcome.status == "failed":
        _end_at_once()
    sys.exit(0)  # the launcher would restart a worker that ends with anything but 0


def _end_at_once() -> NoReturn:
    """Ends a failed worker without clearing away what it has imported: that takes over a second, and a restart waits.

    As at every end of Python, it waits for threads that are no daemons, calls the functions of ``atexit`` (also those
    that end child processes), and flushes files that are open. What does not happen: ``__del__`` of objects that still
    exist, destructors and ``atexit`` functions of C and C++, and the end of daemon threads.
    """
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            end()
        except BaseException:  # from a function of the user's, or a signal: the process ends all the same
            traceback.print_exc()
    flush = threading.Thread(target=_flush_files, daemon=True)
    flush.start()
    flush.join(_FLUSHED_WITHIN_S)  # a pipe may have no reader, and storage may hang
    os._exit(1)


def _flush_files() -> None:
    buffered = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for each in [sys.stdout, sys.stderr, *(each for each in gc.get_objects() if type(each) in buffered)]:
        with suppress(Exception):  # the file may be closed, or the disk full
            each.flush()
    with suppress(Exception):
        libc = ctypes.CDLL(None)
        libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))


def _begin_watch(run_directory: RunDirectory, rank: int) -> None:
    """Has this rank watched from here on: a rank may never begin a fit because an import or a rendezvous is stuck."""
    limits, elastic_run_id = os.environ.get(SECTION_TIMEOUTS_VARIABLE), os.environ.get("TORCHELASTIC_RUN_ID")
    if sys.platform != "linux" or not limits or not elastic_run_id or os.environ.get(RECIPE_VARIABLE) == NO_RECIPE:
        return
    nodes, world_size = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))
    token = worker_group()
    about = describe_rank(run_directory.path, None, token, nodes, world_size, is_started_again=True)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        directory = node_directory(token, int(os.environ.get("GROUP_RANK", "0")))
        RankProbe(directory, rank, SectionTimeouts.parse(limits).by_section(), about, is_workers=True)
        # The watchdog is started by the first rank; by another one only if the first has not, since it is stopped.
        start_soon(directory, FIRST_STARTS_WATCHDOG_WITHIN_S + local_rank if local_rank else put_off_s())
    except OSError as error:
        log_line(f"Rank {rank} is not watched before its first fit ({error}).")


def _begin_generation(run_directory: RunDirectory, ledger: Ledger) -> None:
    """Called when this process enters another generation: does and records what a restarted process would."""
    redirect_streams()  # into the same attempt's logs as the replacement
    if (probe := probe_of_worker()) is not None:
        probe.close()  # this ends its watchdog, which watches the ranks of one start
    ledger.rank = int(os.environ.get("RANK", "0"))
    _begin_watch(run_directory, ledger.rank or 0)
    try:
        _end_if_restarts_are_spent(run_directory, ledger.rank or 0)
    except SystemExit:
        os._exit(0)  # without the script: it has no part in this
    if ledger.rank == 0:
        _record_start(run_directory, ledger)


def _wait_for_other_nodes(run_directory: RunDirectory) -> None:
    """Waits to be ended if the elastic launcher has restarted this rank with a node that is about to be excluded."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return
    plan = Board(run_directory.path / BOARD, "").read()
    if plan is None or plan.owner != os.environ.get(FIRST_LAUNCH_VARIABLE):
        return
    history, count = read_history(run_directory.ledger), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    # The next job is recorded before its plan is published.
    nodes, earlier_jobs = history.nodes_to_avoid(run_id), [job.run_id for job in history.of(JobStart)[:-1]]
    is_over = plan.run_id != run_id or run_id in earlier_jobs
    if is_over or (nodes and plan.why_not_excluded(nodes, count) is None):
        time.sleep(ENDED_WITHIN_S)


def _end_if_restarts_are_spent(run_directory: RunDirectory, rank: int) -> None:
    """Ends a rank that the elastic launcher has restarted without progress too often: the launch decides what follows.

    Such a start is not recorded, since it does not count for the job. With several nodes rank 0 decides, and waits
    until its launch ends it. On one node all ranks find the same, and the elastic launcher ends with them.
    """
    info = job_info()
    several_nodes = info["nodes"] > 1
    if (rank and several_nodes) or not (several_nodes or info["restart_count"]):
        return
    history = read_history(run_directory.ledger)
    start = WorkersStart(
        time=time.time(), rank=rank, node=node_name(), attempt=None, job_attempt=None, verified_step=None, **info
    )
    earlier = any(each.elastic_run_id == info["elastic_run_id"] for each in history.of(WorkersStart))
    if not (earlier or info["restart_count"]) or allows_restart(history, start):
        return
    if rank == 0:
        details = {"elastic_run_id": info["elastic_run_id"], RESTARTS_SPENT: True}
        run_directory.outcome = Outcome("failed", "no restart inside the job is left", time=start.time, details=details)
    if several_nodes:
        time.sleep(ENDED_WITHIN_S)
    sys.exit(0)


def _record_start(run_directory: RunDirectory, ledger: Ledger) -> None:
    run_directory.forget_outcome()
    history = read_history(run_directory.ledger)
    info, step = job_info(), history.safe_step(run_directory)
    ledger.record(
        WorkersStart(
            attempt=run_directory.claim(),  # from here on no process of an earlier attempt can publish anything
            job_attempt=int(os.environ.get(JOB_ATTEMPT_VARIABLE, "0")),
            verified_step=step,
            **info,
        )
    )
    # The elastic launcher has decided on this restart, not the launch. The launch may end it here.
    earlier = sum(each.elastic_run_id == info["elastic_run_id"] for each in history.of(WorkersStart))
    grown = growths(history.of(RanksReplaced), info["elastic_run_id"])
    restarts = max(info["restart_count"], earlier)  # a node does not count failures that only another node has seen
    restarts -= len(grown)
    if restarts and info["restart_count"] not in grown and history.why_not_again is None:
        cause = cause_of_end(history.events, info["elastic_run_id"])
        safe = "no checkpoint in the run directory yet" if step is None else f"step {step} is safe"
        line = f"Restart {restarts} inside the job, {safe}. Before: {cause or 'a worker was killed'}."
        if again := read_history(run_directory.ledger).failures.recurrence:
            line += f" This is {again}."
        log_line(line)


def _record_end(
    run_directory: RunDirectory, ledger: Ledger, outcome: Outcome, fault: dict[str, Any], command: list[str]
) -> None:
    elastic_run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if outcome.status == "failed":
        ledger.catch_up()  # what is known of this group of workers so far comes before its fault
        restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        ledger.record(Fault(**fault, reason=outcome.reason, elastic_run_id=elastic_run_id, restart_count=restart_count))
    if ledger.rank != 0 or not run_directory.is_owned_here():  # a late process of an older attempt must not decide
        return
    details = {"command": command, "elastic_run_id": elastic_run_id}
    run_directory.outcome = replace(
        outcome, attempt=run_directory.attempt, time=time.time(), details=outcome.details | details
    )
    ledger.record(ScriptOutcome(status=outcome.status, reason=outcome.reason))


def _run_script(command: list[str]) -> None:
    """Does what ``python [-m] script args...`` does."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(command[0]).resolve().parent)
    path = os.path.abspath(command[0])  # so that files located from __file__ are found after a chdir, too
    if not path.endswith(".py"):  # for example a folder or an archive with a __main__.py in it
        runpy.run_path(path, run_name="__main__")
        return
    # Not by runpy, which sets sys.argv[0] to the path, too. It must stay as the user gave it.
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __builtins__=builtins)
    exec(code, vars(module))


if __name__ == "__main__":
    park.enter()
    main()
