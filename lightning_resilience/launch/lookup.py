"""Checks that the script or module of a command exists, before anything is started."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

_ASKED_WITHIN_S = 60.0

_STARTERS = re.compile(r"python[0-9.]*|torchrun|srun|mpirun")
_SHELL = re.compile(rb"#!.*\b(?:ba|da|z|k)?sh\b")
_LONGEST_SHEBANG = 256

# As python -m searches: it imports parent packages, which may take long. Where such an import fails for another reason,
# the traceback of the script explains it better.
_ASK = """
import importlib.util, sys
sys.path.insert(0, "")
name = sys.argv[1]
package = False
try:
    found = importlib.util.find_spec(name)
    package = found is not None and found.submodule_search_locations is not None
    if package:
        found = importlib.util.find_spec(name + ".__main__")
except ModuleNotFoundError as error:
    found = None if error.name and (name + ".").startswith(error.name + ".") else True
except Exception:
    found = True
sys.exit(0 if found is not None else 4 if package else 3)
"""


def why_not_found(script: str, is_module: bool) -> str | None:
    """Why a script or a module cannot be run; ``None`` if it exists.

    Args:
        script: Path of the script, or name of the module.
        is_module: Whether it is a module.
    """
    if not is_module:
        path = Path(script)
        if _is_of_a_shell(path):
            instead = "launch the Python script that it starts, or have it call `lightning-resilience launch`"
            return f"{script} is a shell script, not a Python script: {instead}"
        if _STARTERS.fullmatch(path.name) and not path.is_dir():
            return f"leave {script} out: launch itself starts the script on every rank"
        if path.is_file() or (path / "__main__.py").is_file():
            return None
        near = f"; did you mean {found}?" if (found := _similar(path)) else ""
        return f"there is no script {script}{near or '; a module is run with -m'}"
    as_path = Path(*script.removesuffix(".py").split("."))
    if script.endswith(".py") and as_path.with_suffix(".py").is_file():
        return f"-m takes the name of a module, and {script} is a script: leave -m out"
    if _is_found(script):
        return None
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK, script], capture_output=True, timeout=_ASKED_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode not in (3, 4):
        return None
    if asked.returncode == 4:
        return f"{script} cannot be run: it is a package without a __main__.py"
    near = f"; did you mean {'.'.join(found.with_suffix('').parts)}?" if (found := _similar(as_path)) else ""
    return f"there is no module {script}, seen from {os.getcwd()}{near}"


def _is_of_a_shell(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return path.suffix == ".sh" or _SHELL.match(file.readline(_LONGEST_SHEBANG)) is not None
    return False


def _is_found(name: str) -> bool:
    """Whether a module is found without importing anything."""
    top, *below = [*name.split("."), "__main__"]
    with suppress(ImportError, ValueError, AttributeError, KeyError, OSError):
        spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
        for part in below:
            if spec is None or spec.submodule_search_locations is None:
                return spec is not None and part == "__main__"
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        return spec is not None
    return False


def _similar(path: Path) -> Path | None:
    """The Python file in the same folder with the most similar name."""
    with suppress(OSError):
        names = {each.stem: each for each in (path.parent if path.parent.parts else Path()).glob("*.py")}
        if near := difflib.get_close_matches(path.stem, names, n=1):
            return path.parent / names[near[0]].name
    return None
