"""``python -m tests.gpu``: see :func:`main`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu import page
from tests.gpu.device import FAKE, Device, prepare_environment
from tests.gpu.runner import all_checks, line, run_check


def main() -> int:
    """Runs the checks that are named, or all; returns how many have failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks, or parts of their names; default: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", FAKE), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether every line runs")
    parser.add_argument("--list", action="store_true", help="show what there is")
    parser.add_argument("--minutes", type=float, default=40.0, help="for all of them; default: %(default)s")
    parser.add_argument("--output", action="store_true", help="show what a failed check has printed")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/gpu-<device>.json, for a GPU in full size"
    )
    arguments = parser.parse_args()
    checks = all_checks()
    if arguments.list:
        for each in checks.values():
            print(f"{each.name:18}{each.claim}{f' (needs {each.needs_gpu})' if each.needs_gpu else ''}")
        return 0
    chosen = [name for name in checks if not arguments.names or any(part in name for part in arguments.names)]
    if not chosen:
        parser.error(f"there is no such check: {', '.join(checks)}")
    prepare_environment(arguments.device)
    device = Device(arguments.device)
    if (problem := device.missing()) is not None:
        print(f"There is no device to check: {problem}. See --device.", file=sys.stderr)
        return 2
    context = None
    if arguments.device == FAKE:
        from tests import as_on_gpu
        from tests.harness import CONTEXT as context

        as_on_gpu.load()  # built once, before the time of the first check runs
    path = arguments.json
    if path is None and device.is_gpu and not arguments.quick:
        name = re.sub(r"[^a-z0-9]+", "-", device.title.lower()).strip("-")
        path = page.RESULTS / f"gpu-{name}.json"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves nothing behind
    results = _about(device)
    if path is not None and path.exists():  # of checks that are not made again
        results["checks"] = json.loads(path.read_text())["checks"]
    until = time.monotonic() + 60 * arguments.minutes
    failed = 0
    for name in chosen:
        if time.monotonic() > until:
            print(f"LEFT OUT {name}: {arguments.minutes:g} minutes are over", flush=True)
            failed += 1
            continue
        found = run_check(name, arguments.device, arguments.quick, context, until - time.monotonic())
        output = found.pop("output", "")
        failed += found["status"] == "FAIL"
        print(line(name, found), flush=True)
        if found["status"] == "FAIL" and arguments.output:
            print(output, flush=True)
        results["checks"][name] = {**found, "date": time.strftime("%Y-%m-%d")}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    if path is not None and path.parent == page.RESULTS:
        page.write()
    return failed


def _about(device: Device) -> dict[str, Any]:
    import torch

    versions = {}
    for name in ("torch", "lightning", "nvidia-resiliency-ext"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device.title,
        "devices": device.count,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.is_gpu else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **versions,
        "checks": {},
    }


if __name__ == "__main__":
    sys.exit(min(main(), 100))
