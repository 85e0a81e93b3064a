"""The command line: ``lightning-resilience launch``, ``slurm``, ``status``, ``report`` and the rest."""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_resilience import __version__, _nvrx
from lightning_resilience._files import make_directory
from lightning_resilience._output import QUIET_VARIABLE, introduce, log_line
from lightning_resilience.detect.hangs.timeouts import SectionTimeouts
from lightning_resilience.launch import naming
from lightning_resilience.launch.cleaning import clean
from lightning_resilience.launch.job import Launch, LaunchSettings, Refused, other_command
from lightning_resilience.launch.json_output import KEYS
from lightning_resilience.launch.listing import is_run, list_runs, runs_below
from lightning_resilience.launch.logs import NoLog, show_logs
from lightning_resilience.launch.lookup import why_not_found
from lightning_resilience.launch.monitor import MonitorSettings
from lightning_resilience.launch.on_event import LIMIT_S, checked_command
from lightning_resilience.launch.preview import plan
from lightning_resilience.launch.prometheus import checked_target
from lightning_resilience.launch.report import report
from lightning_resilience.launch.report_page import write_page
from lightning_resilience.launch.schedulers import KINDS, current_scheduler
from lightning_resilience.launch.schedulers.base import AFTER_GRACE_S, PREEMPT_TIME_S, Scheduler
from lightning_resilience.launch.status import status
from lightning_resilience.launch.view import diagnoses, ranks_now, watch
from lightning_resilience.recipes import JOBS
from lightning_resilience.run import exit_codes
from lightning_resilience.run.ledger import node_name
from lightning_resilience.run.settings import GLOBAL_BATCHES, READS_AGAIN, SHRINK
from lightning_resilience.run.what_if import SETTINGS

_NAME = r"[^\W\d]\w*"  # a name in Python
_BUDGET = {
    "in_job_restarts": "restarts of the workers inside the job after successive failures without progress",
    "job_retries": "retries of the job after those restarts; 2 retries are 3 runs",
    "max_failures_per_day": "failures within 24 hours after which the run ends, with or without progress",
}
_SCHEDULERS: dict[str, Scheduler] = {kind.name: kind() for kind in KINDS}


def _exit_codes() -> str:
    codes = exit_codes.OF_LAUNCH.items()
    texts = (textwrap.fill(text, 112, initial_indent=f"  {code:<4}", subsequent_indent=" " * 6) for code, text in codes)
    return "\n".join(["exit codes of launch:", *texts])


def main(arguments: list[str] | None = None) -> None:
    """The program ``lightning-resilience``.

    Args:
        arguments: The command line; default: this process's.
    """
    options = _parse(arguments)
    _nvrx.ignore_pynvml()
    try:
        _run(options)
    except BrokenPipeError:  # the reader is gone (head, less); launch itself never raises this
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except NoLog as error:
        options.parser.error(str(error))
    except (Refused, OSError) as error:
        log_line(f"Refused: {error}.")
        sys.exit(1)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns garbage collection off: a report keeps all its objects, and collections would take a third of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(options: argparse.Namespace) -> None:
    if options.action == "inspect":
        from lightning_resilience.launch.inspection import inspect  # imports torch, unlike the other views

        if not Path(options.path).exists():
            options.parser.error(f"{options.path} does not exist")
        text, good = inspect(options.path, options.json)
        print(text)
        sys.exit(0 if good else 1)
    if (scheduler := _SCHEDULERS.get(options.action)) is not None:
        _batch(options, scheduler)
        return
    if options.action != "launch":
        if options.action == "clean":
            _clean(options)
        if options.action in ("list", "status") and _is_folder_of_runs(options):
            with _without_collections():
                print(list_runs(options.run_dir, options.json, _terminal_width()))
            return
        if (problem := _why_no_run(Path(options.run_dir))) is not None:
            options.parser.error(problem)
        if options.action == "status":
            print(status(options.run_dir, options.json))
        elif options.action == "report" and options.html is not None:
            if options.json or options.what_if is not None:
                options.parser.error("--html, --json and --what-if are different outputs; choose one")
            if os.path.isdir(options.html):
                options.parser.error(f"--html {options.html} is a directory: name a file, such as report.html in it")
            with _without_collections():
                write_page(options.run_dir, options.html)
            print(f"The report is in {options.html}.")
        elif options.action == "report":
            try:
                with _without_collections():
                    text = report(options.run_dir, options.json, options.what_if)
            except ValueError as error:
                options.parser.error(f"--what-if: {error}")
            print(text)
        elif options.action == "diagnose":
            print(diagnoses(options.run_dir, options.number, options.json))
        elif options.action == "logs":
            show_logs(options.run_dir, options.rank, options.attempt, options.follow)
        elif options.once:
            print(ranks_now(options.run_dir, options.json))
        else:
            watch(options.run_dir, options.interval, options.json)
        return
    settings = _settings(options)
    if "--help" in options.args or options.args == ["-h"]:  # asks for the script's help: no run begins
        os.execv(sys.executable, [sys.executable, *settings.command])
    if options.quiet:
        os.environ[QUIET_VARIABLE] = "1"
    if options.plan:
        _show_plan(options, settings)
    if options.fresh:
        settings = replace(settings, run_dir=_begin_afresh(options))
    elif settings.run_dir != (before := _directory(options)):
        log_line(
            f"{before} continues in {settings.run_dir}, which --fresh began. To continue {before} itself, move "
            f"{settings.run_dir.name} elsewhere."
        )
    if not settings.is_single_node:
        introduce(f"launch {node_name()}")
    elif settings.nproc_per_node != "1":
        introduce("launch")
    sys.exit(Launch(settings).run())


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    return set(re.findall(r"(?m)^ +(--[a-z-]+)", parser.format_help()))


def _why_no_run(path: Path) -> str | None:
    """Why a path is not a run directory; ``None`` if it is."""
    if not path.is_dir():
        return f"{path} is not a directory; a run directory was expected"
    if is_run(path) or any((path / made).exists() for made in _SCHEDULERS):
        return None  # a job may be waiting for its first launch
    runs = [str(run) for run in runs_below(path)[0]]
    those = f"; run directories below it: {', '.join(runs[:5])}" if runs else ""
    return f"{path} is not a run directory: it contains no ledger{those}"


def _is_folder_of_runs(options: argparse.Namespace) -> bool:
    """Whether to show all runs below a folder, not a single run."""
    path = Path(options.run_dir)
    if options.action == "list":
        if not path.is_dir():
            options.parser.error(f"{path} is not a directory")
        return True
    return path.is_dir() and not is_run(path) and bool(runs_below(path)[0])


def _clean(options: argparse.Namespace) -> NoReturn:
    if not Path(options.run_dir).is_dir():
        options.parser.error(f"{options.run_dir} is not a directory")

    def agrees(question: str) -> bool:
        if options.yes or options.json or not sys.stdin.isatty():
            return bool(options.yes)
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):  # Ctrl-D, Ctrl-C
            print()
            return False

    sys.exit(clean(options.run_dir, options.local_dir, options.json, agrees))


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000


def launch_settings(arguments: Sequence[str]) -> LaunchSettings:
    """Parses the command line of a launch.

    Args:
        arguments: The arguments of ``lightning-resilience launch``.

    Raises:
        SystemExit: With code 2 if they are invalid; the reason is printed.
    """
    return _settings(_parse(["launch", *arguments]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = difflib.get_close_matches(name, _options_of(options.parser), n=1)
        if not name.startswith("-"):
            options.parser.error(f"unexpected argument: {name}")
        options.parser.error(f"there is no option {name}" + (f"; did you mean {known[0]}?" if known else ""))
    if options.action == "launch" or options.action in _SCHEDULERS:
        # One argument for both, or argparse would take the script's first "--" for its own.
        script, *options.args = options.command[1:] if options.command[0] == "--" else options.command
        options.script = script
        if options.json and not options.plan:
            options.parser.error("--json requires --plan; options of the script go after the script")
        ours = _options_of(options.parser) - {"--help"}
        if late := [word for word in options.args if word.partition("=")[0] in ours]:
            log_line(
                f"{late[0]} comes after {script}, so it is passed to the script. Put options of {options.action} "
                "before the script."
            )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-resilience", description="Runs PyTorch Lightning scripts and restarts them after failures."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    nemo = JOBS["nemo"]
    views = ["status", "list", "report", "logs", "diagnose", "watch", "inspect", "clean"]
    names = f"{{{','.join(['launch', *_SCHEDULERS, *views])}}}"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)

    launch = argparse.ArgumentParser(add_help=False)  # what launch and the batch scripts have in common
    launch.add_argument(
        "--recipe",
        type=_recipe,
        default="nemo",
        metavar=f"{{{','.join(JOBS)}}}|MODULE:FUNCTION",
        help="callbacks that every Trainer gets, or a function that returns your own recipe; the defaults listed here "
        "are those of nemo (default: %(default)s)",
    )
    launch.add_argument(
        "--run-dir",
        type=_path,
        help="identity of the run, on storage that all nodes share (default: one for each script with its arguments, "
        "runs/SCRIPT-HASH)",
    )
    launch.add_argument(
        "--fresh",
        action="store_true",
        help="begin a new run beside the existing one; from then on the same command continues the new run",
    )
    launch.add_argument(
        "--continue-anyway",
        action="store_true",
        help="run the script in the directory of a run that has finished with other arguments; finished fits are kept",
    )
    launch.add_argument(
        "--nproc-per-node",
        type=_count_or_auto,
        default="auto",
        metavar="N|auto",
        help="workers per node; auto: one per accelerator, or one (default: auto)",
    )
    for name, meaning in _BUDGET.items():
        option, default = f"--{name.replace('_', '-')}", getattr(nemo.budget, name)
        launch.add_argument(option, type=_count, metavar="N", help=f"{meaning} (default: {default})")
    launch.add_argument(
        "--grace-period",
        type=_seconds,
        metavar="SECONDS",
        help=f"time that the workers have to save and stop after a signal (default: {nemo.grace_period_s:g})",
    )
    launch.add_argument(
        "--section-timeouts",
        default="",
        metavar="NAME:SECONDS,...",
        help="timeouts after which a worker without progress in a section counts as hung; none: no timeout, nor "
        f"a calculated one (default: {nemo.section_timeouts}, and start:{nemo.section_timeouts.start:g} "
        "outside of a fit)",
    )
    launch.add_argument(
        "--out-of-section-timeout",
        metavar="SECONDS",
        help="timeout outside all sections: short for out_of_section:SECONDS",
    )
    launch.add_argument(
        "--local-dir",
        type=_path,
        metavar="DIR",
        help="directory of the local checkpoints, on storage of each node's own (default: node memory)",
    )
    launch.add_argument(
        "--prometheus",
        metavar="FILE|HOST:PORT",
        help="metrics of the run: a file that ends in .prom, for node_exporter, or an endpoint of the first node; "
        ":PORT: on all its addresses",
    )
    launch.add_argument(
        "--on-event",
        metavar="CMD",
        help="program with arguments that the first node runs at important events, such as interruptions and the end, "
        f"with JSON on its standard input; it may take {LIMIT_S:g} s",
    )
    launch.add_argument(
        "--spares",
        choices=("auto", "off"),
        default="auto",
        help="auto: where memory allows, each worker has a spare process with its imports done, which replaces it at "
        "a restart inside the job or, with --elastic, when only this worker is replaced (default: %(default)s)",
    )
    launch.add_argument(
        "--read-again",
        choices=READS_AGAIN,
        help="when training resumes within an epoch, read its earlier data again: always, or only if reading is seen "
        "to change the workers of the data loader; give if-changed if samples depend only on their index and "
        "random numbers (default: always)",
    )
    launch.add_argument(
        "--quiet",
        action="store_true",
        help="of this package's own lines, show only interruptions, warnings, errors and the end",
    )
    launch.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    launch.add_argument("command", nargs=argparse.PARSER, metavar="SCRIPT", help="training script and its arguments")

    here = actions.add_parser(
        "launch",
        usage="lightning-resilience launch [OPTION ...] SCRIPT [ARGUMENT ...]",  # errors need not list all options
        parents=[launch],
        help="run a script until it has finished, and restart it after failures",
        description="Runs a training script and restarts it, inside the job and as a new job, until it has finished or "
        "keeps failing without progress. The same command again resumes a run that was interrupted.",
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here.add_argument(
        "--elastic",
        action="store_true",
        help="replace a killed rank while the other ranks keep their processes (DDP, FSDP2); where that is "
        "impossible, restart all ranks as without this option",
    )
    here.add_argument(
        "--when-lost",
        choices=("hold", "go-on"),
        help="with --elastic, when no spare process is ready for a lost rank: hold: the other ranks wait for its "
        "replacement; go-on: they keep training, also on its batches, until it is back (default: hold, and go-on "
        "with --nnodes MIN:MAX)",
    )
    here.add_argument(
        "--min-ranks",
        type=_at_least_one,
        metavar="N",
        help="with --when-lost go-on: wait for replacements rather than train with fewer ranks (default: 1)",
    )
    here.add_argument(
        "--replace-stragglers",
        action="store_true",
        help="with --elastic: replace the process of a rank that StragglerDetection finds slow, once; if the new "
        "process is as slow, continue as without this option",
    )
    here.add_argument(
        "--global-batch",
        choices=GLOBAL_BATCHES,
        help="batches of absent ranks (lost, or because the job has become smaller): constant: the other ranks also "
        "train on them; shrink: they are left out, so steps have fewer samples (default: constant)",
    )
    here.add_argument("--nnodes", type=_nodes, default="1", metavar="N|MIN:MAX", help="nodes (default: 1)")
    here.add_argument(
        "--node-rank",
        type=_node_rank,
        metavar="|".join(["R", *_SCHEDULERS]),
        help="number of this node; node 0 decides for all nodes; "
        + "; ".join(f"{name}: its number in this {each.title} job step" for name, each in _SCHEDULERS.items()),
    )
    here.add_argument(
        "--spare", action="store_true", help="this node waits, and replaces a node that is excluded from the run"
    )
    here.add_argument(
        "--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="rendezvous of the nodes: the first node"
    )
    here.add_argument(
        "--retries-in-new-job",
        action="store_true",
        help="end with 75 when the job must be retried or a node excluded, instead of retrying here",
    )

    for name, scheduler in _SCHEDULERS.items():
        batch = actions.add_parser(
            name,
            usage=f"lightning-resilience {name} [OPTION ...] SCRIPT [ARGUMENT ...]",
            parents=[launch],
            help=f"make the batch script that runs a script under {scheduler.title} until it has finished",
            description="Prints a batch script, or submits it. The job launches the training script on every node, and "
            "is requeued until it has finished or keeps failing.",
        )
        _add_batch_arguments(batch)
        scheduler.add_arguments(batch)
        batch.set_defaults(launch_actions=[each for each in launch._actions if each.option_strings])

    looked = actions.add_parser(
        "status",
        help="show the jobs of a run, its newest safe step and the remaining budget",
        description="Prints a line for every job or launch of a run, and its current state.",
    )
    looked.add_argument(
        "run_dir", type=_not_empty, metavar="RUN_DIR", help="or a folder of runs: prints the same as list"
    )

    listed = actions.add_parser(
        "list",
        help="show the runs below a folder",
        description="Prints a line for every run in a folder, up to three levels down: state, furthest step, goodput, "
        "interruptions, when it was active and its job. Most recently active runs come first.",
    )
    listed.add_argument(
        "run_dir", type=_not_empty, nargs="?", default=".", metavar="FOLDER", help="default: the current folder"
    )

    shown = actions.add_parser(
        "report",
        help="show what happened to a run",
        description="Prints goodput and losses of a run, its worst interruptions and its timeline.",
    )
    shown.add_argument("run_dir", type=_not_empty, metavar="RUN_DIR")
    shown.add_argument("--html", metavar="FILE", help="write it as a page with charts, which needs no server")
    settings = "; ".join(f"{name}: {setting.meaning}" for name, setting in SETTINGS.items())
    shown.add_argument(
        "--what-if",
        metavar="SETTINGS",
        help=f"show how long the run would have taken with other settings, as in 'save_every=5min local=off mtbf=2h'. "
        f"{settings}",
    )

    logged = actions.add_parser(
        "logs",
        help="show the output of ranks, also while they run",
        description="Prints the log of one rank or of all ranks: their stdout and stderr.",
    )
    logged.add_argument("run_dir", type=_not_empty, metavar="RUN_DIR")
    logged.add_argument(
        "-f", "--follow", action="store_true", help="keep printing new output, across restarts, until the run ends"
    )
    logged.add_argument("--rank", type=_rank, metavar="R|all", help="rank, or all, ordered by time (default: 0)")
    logged.add_argument(
        "--attempt", type=_at_least_one, metavar="K", help="number of the start of the workers (default: the newest)"
    )

    diagnosed = actions.add_parser(
        "diagnose",
        help="show the hangs of a run: which rank, where, and which ranks waited for it",
        description="Lists the hangs of a run, and shows one of them rank by rank.",
    )
    diagnosed.add_argument("run_dir", type=_not_empty, metavar="RUN_DIR")
    diagnosed.add_argument("--number", type=_count, metavar="N", help="hang to show (default: the newest)")

    watched = actions.add_parser(
        "watch",
        help="show what every rank does now",
        description="Shows the ranks of a run until interrupted: ranks of this node with whether they answer, ranks "
        "of other nodes as of up to half a minute ago. This does not slow down the ranks.",
    )
    watched.add_argument("run_dir", type=_not_empty, metavar="RUN_DIR")
    watched.add_argument(
        "--interval",
        type=_positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="refresh interval (default: %(default)g)",
    )
    watched.add_argument("--once", action="store_true", help="show once and exit")

    inspected = actions.add_parser(
        "inspect",
        help="show and verify local checkpoints",
        description="Lists and verifies every byte of a local checkpoint: a file, a generation, or a folder of "
        "generations. Nothing is changed.",
        epilog="exit code: 0 if everything is intact, 1 if anything is damaged or nothing was found",
    )
    inspected.add_argument("path", type=_not_empty, metavar="PATH")
    cleaned = actions.add_parser(
        "clean",
        help="remove files that runs have left behind and nobody needs",
        description="Lists files that the runs in a folder, and deleted runs, have left in their directories and on "
        "this node, and why each is safe to remove. Then it asks. Given one run directory, it leaves out the "
        "checkpoints of other runs. It never touches runs in use, ledgers or good checkpoints.",
        epilog="exit code: 1 if something could not be removed",
    )
    cleaned.add_argument(
        "run_dir",
        type=_not_empty,
        nargs="?",
        default=".",
        metavar="RUN_DIR",
        help="or a folder of runs (default: the current folder)",
    )
    cleaned.add_argument("--yes", action="store_true", help="remove without asking")
    cleaned.add_argument(
        "--local-dir", type=_path, metavar="DIR", help="the --local-dir of the launches, if they had one"
    )
    for name in ("launch", *_SCHEDULERS):
        action = actions.choices[name]
        action.add_argument("--plan", action="store_true", help="show and check what would be done, without doing it")
        action.add_argument("--json", action="store_true", help="with --plan: print one line of JSON")
    for name in KEYS.keys() - {"launch"}:
        actions.choices[name].add_argument("--json", action="store_true", help="print the same as one line of JSON")
    for action in actions.choices.values():
        action.set_defaults(parser=action)
    return parser


def _add_batch_arguments(batch: argparse.ArgumentParser) -> None:
    """Adds the options that the subcommands of all schedulers have."""
    batch.add_argument("--nodes", type=_at_least_one, default=1, metavar="N", help="nodes (default: %(default)s)")
    batch.add_argument("--gpus-per-node", type=_at_least_one, metavar="N", help="GPUs per node; one worker per GPU")
    batch.add_argument("--job-name", metavar="NAME", help="name of the job (default: name of RUN_DIR or of the script)")
    batch.add_argument(
        "--env-setup", action="append", default=[], metavar="LINE", help="line of the batch script before the launch"
    )
    batch.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="interpreter on the nodes (default: this one)"
    )
    batch.add_argument(
        "--preempt-time",
        type=_at_least_one,
        default=PREEMPT_TIME_S,
        metavar="SECONDS",
        help="minimum time between the signal to the workers and the time limit (default: %(default)s)",
    )
    batch.add_argument(
        "--max-requeues",
        type=_count,
        default=100,
        metavar="N",
        help="how often the job may be requeued (default: %(default)s)",
    )
    batch.add_argument("--submit", action="store_true", help="submit the script instead of printing it")


def _settings(options: argparse.Namespace) -> LaunchSettings:
    parser: argparse.ArgumentParser = options.parser
    if (problem := why_not_found(options.script, options.module)) is not None:
        parser.error(problem)
    if options.nnodes not in ("1", "1:1") and options.rdzv_endpoint is None:
        parser.error("several nodes need --rdzv-endpoint HOST:PORT, with the first node's host and a free port on it")
    if options.node_rank and options.nnodes in ("1", "1:1"):
        parser.error(f"--node-rank {options.node_rank} is for a run on several nodes: also give --nnodes")
    if options.spare and (options.nnodes in ("1", "1:1") or options.node_rank is not None):
        parser.error("--spare is for a node in addition to those of --nnodes; do not combine it with --node-rank")
    if options.fresh and (options.nnodes not in ("1", "1:1") or options.retries_in_new_job):
        parser.error(
            "--fresh is for a manual start on one node: when nodes or a scheduler start this command again, each "
            "start would begin another run; give another --run-dir instead"
        )
    timeouts = [options.section_timeouts] if options.section_timeouts else []
    if options.out_of_section_timeout is not None:
        timeouts.append(f"out_of_section:{options.out_of_section_timeout}")
    for option, folder in (("--run-dir", options.run_dir), ("--local-dir", options.local_dir)):
        there = next(filter(os.path.lexists, [folder, *folder.parents]), None) if folder is not None else None
        if there is not None and there.exists() and not there.is_dir():
            below = "" if there == folder else f" is below {there}, which"
            parser.error(f"{option} {folder}{below} is a file; it must be a directory or not exist yet")
    job = JOBS.get(options.recipe, JOBS["nemo"])  # MODULE:FUNCTION is imported by the workers only
    elastic = options.elastic or job.elastic
    least, _, most = options.nnodes.partition(":")
    is_fixed = least == (most or least)
    goes_on = options.when_lost == "go-on" or (options.when_lost is None and job.when_lost == "go_on")
    if goes_on and not elastic:
        parser.error("--when-lost go-on is an option of --elastic, or of --recipe elastic")
    if options.replace_stragglers and not elastic:
        parser.error("--replace-stragglers is an option of --elastic, or of --recipe elastic")
    if elastic and not is_fixed:
        if options.when_lost == "hold":
            parser.error(f"--nnodes {options.nnodes} continues without lost nodes, but --when-lost hold waits for them")
        goes_on = True
    nnodes = f"1:{least}" if goes_on and not most and least != "1" else options.nnodes
    if options.min_ranks is not None and not goes_on:
        parser.error("--min-ranks needs --when-lost go-on: otherwise a run always waits for all ranks")
    min_ranks = job.min_ranks if options.min_ranks is None else options.min_ranks
    if options.nproc_per_node != "auto" and min_ranks > (ranks := int(options.nproc_per_node) * int(most or least)):
        parser.error(f"--min-ranks {min_ranks} is more than the number of ranks, {ranks}")
    try:
        section_timeouts = SectionTimeouts.parse(",".join(timeouts)) if timeouts else job.section_timeouts
    except ValueError as error:
        parser.error(f"--section-timeouts and --out-of-section-timeout: {error}")
    return LaunchSettings(
        command=_command(options),
        # A launch that a scheduler starts again continues its run directory, even if a later run has begun beside it.
        run_dir=_directory(options) if options.retries_in_new_job else naming.newest(_directory(options)),
        recipe=options.recipe,
        nproc_per_node=options.nproc_per_node,
        nnodes=nnodes,
        node_rank=options.node_rank,
        spare=options.spare,
        rdzv_endpoint=options.rdzv_endpoint,
        budget=replace(
            job.budget,
            **{name: given for name in _BUDGET if (given := getattr(options, name)) is not None},
        ),
        grace_period_s=job.grace_period_s if options.grace_period is None else options.grace_period,
        section_timeouts=section_timeouts,
        makes_spares=options.spares == "auto",
        local_dir=options.local_dir,
        is_default_run_dir=options.run_dir is None,
        continue_anyway=options.continue_anyway,
        retries_in_new_job=options.retries_in_new_job,
        monitoring=_monitoring(options),
        elastic=elastic,
        when_lost="go_on" if goes_on else "hold",
        min_ranks=min_ranks,
        replaces_stragglers=options.replace_stragglers,
        read_again=options.read_again,
        global_batch=options.global_batch or (job.global_batch if job.global_batch == SHRINK else None),
    )


def _monitoring(options: argparse.Namespace) -> MonitorSettings:
    parser: argparse.ArgumentParser = options.parser
    option = "--prometheus"
    try:
        prometheus = None if options.prometheus is None else checked_target(options.prometheus)
        option = "--on-event"
        return MonitorSettings(prometheus, () if options.on_event is None else checked_command(options.on_event))
    except ValueError as error:
        parser.error(f"{option}: {error}")


def _command(options: argparse.Namespace) -> list[str]:
    return [*(["-m"] if options.module else []), options.script, *options.args]


def _directory(options: argparse.Namespace) -> Path:
    """The run directory of a command, regardless of runs that were begun afresh beside it."""
    named: Path | None = options.run_dir
    return naming.default_directory(_command(options)) if named is None else named


def _begin_afresh(options: argparse.Namespace) -> Path:
    path = naming.begin_afresh(_directory(options))
    log_line(f"A new run begins in {path}. The same command without --fresh continues it.", is_detail=True)
    return path


def _show_plan(options: argparse.Namespace, settings: LaunchSettings, batch_script: str | None = None) -> NoReturn:
    if options.fresh:
        settings = replace(settings, run_dir=naming.next_afresh(_directory(options)))
    text, is_good = plan(settings, batch_script, options.json)
    print(text)
    sys.exit(0 if is_good else 1)


def _batch(options: argparse.Namespace, scheduler: Scheduler) -> None:
    """Prints the batch script, or submits it."""
    run_dir, script = _batch_script(options, scheduler)
    if options.plan:
        settings = _settings(argparse.Namespace(**vars(options) | _ONE_NODE))
        several: dict[str, Any] = {"nnodes": str(options.nodes), "node_rank": 0, "rdzv_endpoint": "FIRST_NODE:PORT"}
        settings = replace(settings, run_dir=run_dir, retries_in_new_job=True)
        if (given := re.search(r"--grace-period[= ]([0-9.]+)", script)) is not None:
            settings = replace(settings, grace_period_s=float(given[1]))
        _show_plan(options, replace(settings, **several) if options.nodes > 1 else settings, script)
    path = run_dir / scheduler.name / "job.sbatch"
    make_directory(path.parent)  # Slurm does not, and a job without the folder of its output fails without a message
    if not options.submit:
        print(script, end="")
        return
    path.write_text(script)
    job_id = scheduler.submit(path)
    print(job_id)
    log_line(f"Submitted job {job_id}. lightning-resilience status {run_dir} shows its state.")


def _batch_script(options: argparse.Namespace, scheduler: Scheduler) -> tuple[Path, str]:
    """The run directory, and the text of the batch script."""
    parser: argparse.ArgumentParser = options.parser
    if options.nproc_per_node == "auto" and options.gpus_per_node is not None:
        options.nproc_per_node = str(options.gpus_per_node)
    settings = _settings(argparse.Namespace(**vars(options) | _ONE_NODE))  # exits if something is wrong with them
    if settings.is_default_run_dir and (other := other_command(settings)) is not None:
        raise Refused(*other)  # launch would not refuse: the batch script names the run directory
    grace_period_s = options.grace_period
    if grace_period_s is None and settings.grace_period_s < options.preempt_time - AFTER_GRACE_S:
        grace_period_s = settings.grace_period_s  # the recipe's, which is shorter than what the scheduler leaves
    launch = [*_forwarded(options), *settings.command]
    job_name = options.job_name or (
        naming.script_name(settings.command) if settings.is_default_run_dir else settings.run_dir.name
    )

    def render(run_dir: Path) -> tuple[Path, str]:
        return run_dir, scheduler.batch_script(options, launch, run_dir, job_name, grace_period_s)

    try:
        script = render(settings.run_dir)
    except ValueError as error:
        parser.error(str(error))
    if not options.fresh:
        return script
    return render(naming.next_afresh(_directory(options)) if options.plan else _begin_afresh(options))


_ONE_NODE = {
    **{"nnodes": "1", "node_rank": None, "spare": False, "rdzv_endpoint": None, "retries_in_new_job": False},
    **{"elastic": False, "when_lost": None, "min_ranks": None, "global_batch": None, "replace_stragglers": False},
}
# The batch script or the command holds these.
_NOT_FORWARDED = ("run_dir", "grace_period", "module", "fresh")


def _forwarded(options: argparse.Namespace) -> list[str]:
    """The given options of ``launch``, as its command line takes them."""
    forwarded = []
    for action in options.launch_actions:
        value = getattr(options, action.dest)
        if action.dest not in _NOT_FORWARDED and value != action.default:
            forwarded.append(action.option_strings[0] + ("" if value is True else f"={value}"))
    return forwarded


def _matching(pattern: str, problem: str, kind: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """A type for argparse that takes text which matches a pattern."""

    def take(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is {problem}")
        return kind(text)

    return take


_count = _matching("[0-9]+", "not a number of at least 0", int)
_at_least_one = _matching("[1-9][0-9]*", "not a number of at least 1", int)
_count_or_auto = _matching("auto|[1-9][0-9]*", "neither a number of at least 1 nor 'auto'")
_rank = _matching("all|[0-9]+", "neither a rank nor 'all'", lambda text: text if text == "all" else int(text))
_endpoint = _matching(".+:[0-9]+", "not HOST:PORT")


def _node_rank(text: str) -> int:
    if text not in _SCHEDULERS:
        return int(_count(text))
    rank = current_scheduler().node_rank
    if rank is None:
        raise argparse.ArgumentTypeError(
            f"{_SCHEDULERS[text].title} has not assigned a number to this node; start this command as a step of the job"
        )
    return rank


def _recipe(text: str) -> str:
    if text in JOBS or re.fullmatch(rf"{_NAME}([.]{_NAME})*:{_NAME}", text):
        return text
    near = difflib.get_close_matches(text, JOBS, 1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(JOBS)}, or give MODULE:FUNCTION"
    raise argparse.ArgumentTypeError(f"there is no recipe {text}; {hint}")


def _nodes(text: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor MIN:MAX")
    return text


def _not_empty(text: str) -> str:
    if not text:  # from a variable that is not set; pathlib would take it for the current folder
        raise argparse.ArgumentTypeError("it is empty; the current folder is '.'")
    return text


def _path(text: str) -> Path:
    if re.match(r"[a-z0-9+]+:/", _not_empty(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a folder on a mounted file system")
    return Path(text).expanduser().absolute()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _positive_seconds(text: str) -> float:
    if (seconds := _seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    main()
