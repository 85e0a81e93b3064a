"""The command line: ``lightning-resilience launch``, ``report``, ``diagnose``, ``watch`` and ``inspect``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lightning_resilience import __version__
from lightning_resilience.detect.timeouts import SectionTimeouts
from lightning_resilience.launch.budget import Budget
from lightning_resilience.launch.job import Launch, LaunchSettings, Refused, say
from lightning_resilience.launch.view import diagnoses, ranks_now, watch
from lightning_resilience.report import report
from lightning_resilience.signals import DEFAULT_GRACE_PERIOD_S

_EXIT_CODES = """exit codes of launch:
  0   the run has finished
  75  interrupted (SIGTERM, SIGINT, SIGHUP, SIGUSR1); the same command resumes it
  1   failed for good: the budget of restarts and retries is spent, or the launch could not begin
  16, 17  a callback's verdict: the fault came again when the step was repeated (16), or did not (17)
"""


def main(arguments: list[str] | None = None) -> None:
    """The program ``lightning-resilience``.

    Args:
        arguments: The command line; default: this process's.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.action == "inspect":
        from lightning_resilience.checkpoint.inspection import inspect  # with torch, which nothing else here needs

        text, good = inspect(options.path)
        print(text)
        sys.exit(0 if good else 1)
    if options.action != "launch":
        if not Path(options.run_dir).is_dir():
            parser.error(f"{options.run_dir} is not a directory; a run directory was expected")
        if options.action == "report":
            print(report(options.run_dir))
        elif options.action == "diagnose":
            print(diagnoses(options.run_dir, options.number))
        elif options.once:
            print(ranks_now(options.run_dir))
        else:
            watch(options.run_dir, options.interval)
        return
    try:
        sys.exit(Launch(_settings(options, parser)).run())
    except (Refused, OSError) as error:
        say(f"Refused: {error}.")
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-resilience", description="Runs PyTorch Lightning scripts that survive what kills training runs."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{launch,report,diagnose,watch,inspect}")

    launch = actions.add_parser(
        "launch",
        help="run a script until it has finished, restarting what fails",
        description="Runs a training script and restarts it, inside the job and as a new job, until it has finished or "
        "keeps failing without progress. The same command again resumes a run that was interrupted.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch.add_argument("--recipe", choices=["nemo"], default="nemo", help="the callbacks that every Trainer gets")
    launch.add_argument("--run-dir", type=Path, help="identity of the run, on storage that all nodes share")
    launch.add_argument(
        "--nproc-per-node", type=_count_or_auto, default="auto", metavar="N|auto", help="workers a node"
    )
    launch.add_argument("--nnodes", type=_nodes, default="1", metavar="N|MIN:MAX", help="nodes (default: 1)")
    launch.add_argument("--node-rank", type=_count, metavar="R", help="number of this node; 0 decides for all")
    launch.add_argument(
        "--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="where the nodes meet: the first node"
    )
    launch.add_argument(
        "--in-job-restarts",
        type=_count,
        default=Budget.in_job_restarts,
        metavar="N",
        help="successive failures without progress after which the workers are restarted (default: %(default)s)",
    )
    launch.add_argument(
        "--job-retries",
        type=_count,
        default=Budget.job_retries,
        metavar="N",
        help="how often the job is retried after those; 2 retries are 3 runs (default: %(default)s)",
    )
    launch.add_argument(
        "--max-failures-per-day",
        type=_count,
        default=Budget.max_failures_per_day,
        metavar="N",
        help="failures in 24 hours that are recovered from, whatever the progress (default: %(default)s)",
    )
    launch.add_argument(
        "--grace-period",
        type=_seconds,
        default=DEFAULT_GRACE_PERIOD_S,
        metavar="SECONDS",
        help="how long the workers have to save and stop when asked to (default: %(default)g)",
    )
    launch.add_argument(
        "--section-timeouts",
        default="",
        metavar="NAME:SECONDS,...",
        help="how long a worker may take in a section without a sign of progress until it counts as hung; none: for "
        f"ever (default: {SectionTimeouts()})",
    )
    launch.add_argument(
        "--out-of-section-timeout",
        metavar="SECONDS",
        help="the same where it is in none of them: short for out_of_section:SECONDS",
    )
    launch.add_argument(
        "--local-dir",
        type=Path,
        metavar="DIR",
        help="where every node keeps its local checkpoints, on storage of its own (default: node memory)",
    )
    launch.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    launch.add_argument("script", help="the training script (or module)")
    launch.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")

    shown = actions.add_parser(
        "report",
        help="show what happened to a run",
        description="Prints a run's timeline and what each interruption cost.",
    )
    shown.add_argument("run_dir", metavar="RUN_DIR")

    diagnosed = actions.add_parser(
        "diagnose",
        help="show the hangs of a run: which rank, where, and who waited for it",
        description="Lists the hangs that were found in a run, and shows one of them rank by rank.",
    )
    diagnosed.add_argument("run_dir", metavar="RUN_DIR")
    diagnosed.add_argument("--number", type=_count, metavar="N", help="which one to show (default: the newest)")

    watched = actions.add_parser(
        "watch",
        help="show what every rank of this node does now",
        description="Shows the ranks of a run on this node again and again, and whether they answer. They notice "
        "nothing of it.",
    )
    watched.add_argument("run_dir", metavar="RUN_DIR")
    watched.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: %(default)g)"
    )
    watched.add_argument("--once", action="store_true", help="look once")

    inspected = actions.add_parser(
        "inspect",
        help="show and verify local checkpoints",
        description="Lists what is in a local checkpoint and verifies every byte: a file, a generation, or a folder of "
        "them. Nothing is changed.",
        epilog="exit code: 0 if all is intact, 1 if anything is damaged or there is nothing",
    )
    inspected.add_argument("path", metavar="PATH")
    return parser


def _settings(options: argparse.Namespace, parser: argparse.ArgumentParser) -> LaunchSettings:
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script}; a module is run with -m")
    if options.nnodes not in ("1", "1:1") and options.rdzv_endpoint is None:
        parser.error("several nodes need --rdzv-endpoint HOST:PORT, with the first node's host and a free port on it")
    timeouts = [options.section_timeouts] if options.section_timeouts else []
    if options.out_of_section_timeout is not None:
        timeouts.append(f"out_of_section:{options.out_of_section_timeout}")
    try:
        section_timeouts = SectionTimeouts.parse(",".join(timeouts))
    except ValueError as error:
        parser.error(f"--section-timeouts and --out-of-section-timeout: {error}")
    name = options.script if options.module else Path(options.script).stem
    return LaunchSettings(
        command=[*(["-m"] if options.module else []), options.script, *options.args],
        run_dir=(options.run_dir or Path("runs") / name).expanduser().absolute(),
        recipe=options.recipe,
        nproc_per_node=options.nproc_per_node,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        rdzv_endpoint=options.rdzv_endpoint,
        budget=Budget(options.in_job_restarts, options.job_retries, options.max_failures_per_day),
        grace_period_s=options.grace_period,
        section_timeouts=section_timeouts,
        local_dir=None if options.local_dir is None else options.local_dir.expanduser().absolute(),
    )


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _count_or_auto(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor 'auto'")
    return text


def _nodes(text: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor MIN:MAX")
    return text


def _endpoint(text: str) -> str:
    if not re.fullmatch(r".+:[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


if __name__ == "__main__":
    main()
