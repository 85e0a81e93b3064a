"""The section of ``docs/gpu.md`` that is made of what was found on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.runner import all_checks, shown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- begin: python -m tests.gpu writes this -->", "<!-- end -->"


def section(results: Path = RESULTS) -> str:
    """The section as it should be."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))]
    parts = ["No check has run on a GPU yet."] if not found else []
    for each in found:
        versions = f"torch {each.get('torch')}, CUDA {each.get('cuda')}, NCCL {each.get('nccl')}"
        parts.append(f"### {each['device']}, {each['devices']} of them\n\n{versions}, Python {each['python']}.\n")
        parts.append("| check | | found | seconds |\n|---|---|---|---|")
        for name, about in all_checks().items():
            if (one := each["checks"].get(name)) is None:
                parts[-1] += f"\n| {about.claim} (`{name}`) | not run | | |"
                continue
            why = one.get("reason") or "; ".join(one["failures"])
            figures = "; ".join(f"{key}: {shown(value)}" for key, value in one["figures"].items())
            cell = " · ".join(part for part in (why, figures) if part).replace("|", "/")
            parts[-1] += f"\n| {about.claim} (`{name}`) | {one['status']} | {cell} | {one['seconds']:g} |"
    return "\n".join([BEGIN, "", *parts, "", END])


def write() -> None:
    """Writes it into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    PAGE.write_text(before + section() + rest.split(END, 1)[1])


if __name__ == "__main__":
    write()
