"""What a script imports, in which order and in which environment: recorded in a worker, repeated in a spare.

What a library reads when it is imported must be the same in a spare as in a worker that starts cold: scripts set
``OMP_NUM_THREADS`` or a cache folder, or extend ``sys.path``, and then import. So the recorded order is that in which
imports *begin* (``sys.modules`` has the order in which they end), and each is recorded with what the script had changed
before it.

Some libraries draw from Python's ``random`` when they are imported. Before the script has seeded it, this does no harm:
nobody could reproduce these numbers. After that, they would be missing from the sequence, so such a spare is not used.

Only installed packages are imported ahead. Each worker reads the user's own modules anew. If one of them, or the
script, has changed since, the record is no longer valid.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import random
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

_WORDS = 624  # of the Mersenne Twister
_MOST_DRAWN = 16 * _WORDS


class State(NamedTuple):
    """What the script had changed at a certain time.

    Attributes:
        env: Environment variables that it has set.
        removed: Environment variables that it has removed.
        path: ``sys.path``.
        has_seeded: Whether the script has seeded ``random``.
    """

    env: dict[str, str]
    removed: list[str]
    path: list[str]
    has_seeded: bool = False

    def hold(self, base: Mapping[str, str]) -> None:
        """Applies this state to the process.

        Args:
            base: The environment with which the process began.
        """
        set_environment({name: value for name, value in base.items() if name not in self.removed} | self.env)
        sys.path[:] = self.path


class Recorder:
    """Records imports, as an import finder that finds nothing. Must be installed before the script begins.

    Args:
        before: What :meth:`noted` returned in the worker whose imports this process has already repeated.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        self._base = dict(os.environ)
        self._random = random.getstate()
        self._has_seeded = False
        self._raw = self._look()
        self._state = State({}, [], list(sys.path))
        self._begun: list[tuple[str, State]] = []
        if before is not None:
            self._begun = [(name, state) for name, _, state in _modules(before, self._state) if name in sys.modules]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called when an import begins.

        Args:
            name: The name of the module.
            path: Where its package lies.
            target: Unused.
        """
        if (raw := self._look()) != self._raw:
            self._raw, env = raw, dict(os.environ)
            changed = {each: value for each, value in env.items() if self._base.get(each) != value}
            removed = [each for each in self._base if each not in env]
            self._state = State(changed, removed, list(sys.path), self._has_seeded)
        self._begun.append((name, self._state))

    def _look(self) -> tuple[dict[bytes, bytes], list[str], bool]:
        if not self._has_seeded and (now := random.getstate()) != self._random:
            self._has_seeded, self._random = not _is_drawn_from(self._random, now), now
        # The dictionary behind os.environ: there are thousands of imports, and decoding all of it takes 100 µs.
        return dict(vars(os.environ)["_data"]), list(sys.path), self._has_seeded

    def end(self) -> None:
        """Ends the recording."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def noted(self) -> dict[str, Any]:
        """What to import ahead, JSON-serializable: for :func:`import_all` and :func:`why_changed`."""
        # Only the last of several attempts to import a module has succeeded.
        last = {name: place for place, (name, _) in enumerate(self._begun)}
        modules: list[list[Any]] = []
        changes: list[list[Any]] = []
        in_force = None
        for place, (name, state) in enumerate(self._begun):
            # A module whose spec has another name was put into sys.modules by hand, such as an alias.
            spec = _about(name).get("__spec__")
            if place == last[name] and getattr(spec, "name", None) == name and is_installed(name):
                modules.append([name, _file(name)])
                if state != in_force:
                    changes.append([name, *state])
                    in_force = state
        own = {file for name in list(sys.modules) if (file := _file(name)) is not None and not is_installed(name)}
        return {"modules": modules, "changes": changes, "files": [[file, *_stamp(file)] for file in sorted(own)]}


def import_all(noted: Mapping[str, Any], must_stop: Callable[[], bool]) -> str | None:
    """Imports what was recorded; afterwards restores the environment and ``sys.path``.

    Args:
        noted: See :meth:`Recorder.noted`.
        must_stop: Called before each import: whether to leave the remaining imports to the script.

    Returns:
        Why this process cannot be used; ``None``: it can.
    """
    base, path, seeded = dict(os.environ), list(sys.path), None
    own_modules = set(sys.modules)
    try:
        for name, file, state in _modules(noted, State({}, [], path)):
            if name not in sys.modules:
                if must_stop():
                    break
                state.hold(base)
                if state.has_seeded and seeded is None:
                    seeded = random.getstate()
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    return f"{name} cannot be imported ahead ({type(error).__name__}: {error})"
            if (found := _file(name)) != file:
                return f"{name} is {found} and not {file}"
    finally:
        State({}, [], path).hold(base)
    if foreign := [name for name in sys.modules.keys() - own_modules if _file(name) and not is_installed(name)]:
        return f"{min(foreign)}, which is not an installed package, was imported by an installed one"
    if (seeded is not None and random.getstate() != seeded) or _torch_has_drawn():
        return "a library draws random numbers when it is imported"
    return None


def _modules(noted: Mapping[str, Any], begun: State) -> Iterator[tuple[str, str | None, State]]:
    """The modules with their files, and what the script had changed when the import of each began."""
    changes, state = {name: State(*state) for name, *state in noted["changes"]}, begun
    for name, file in noted["modules"]:
        state = changes.get(name, state)
        yield name, file, state


def why_changed(noted: Mapping[str, Any]) -> str | None:
    """Reports a file of the user's own that has changed, if there is one: the script may behave differently now.

    Args:
        noted: See :meth:`Recorder.noted`.
    """
    return next((f"{file} has changed" for file, *stamp in noted["files"] if stamp != _stamp(file)), None)


def set_environment(env: Mapping[str, str]) -> None:
    """Makes ``os.environ`` equal to ``env`` by changing only the variables that differ.

    Args:
        env: All variables.
    """
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def is_installed(name: str) -> bool:
    """Whether an imported module belongs to Python, to an installed package, or to this package.

    Args:
        name: The name of the module.
    """
    about = _about(name)
    places = [file] if (file := about.get("__file__")) else list(about.get("__path__") or [])
    if not places:
        return getattr(about.get("__spec__"), "origin", None) in ("built-in", "frozen")
    package = name.partition(".")[0]
    return all(isinstance(each, str) and _is_below(each, package) for each in places) and _is_real(package)


@cache
def _roots() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    paths.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return tuple({each + os.sep for path in paths if path for each in (path, os.path.realpath(path))})


def _is_below(file: str, package: str) -> bool:
    # An environment may use the packages of another one, too.
    if (file + os.sep).startswith(_roots()) or not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep)):
        return True
    folder, found, _ = (file + os.sep).partition(f"{os.sep}{package}{os.sep}")
    return package in _recorded(folder if found else os.path.dirname(file))


@cache
def _recorded(folder: str) -> set[str]:
    """The packages that an installer has recorded in a folder of its own, as ``pip install --target`` does."""
    names = set()
    for record in glob.iglob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError, UnicodeDecodeError), open(record, encoding="utf-8") as lines:
            names |= {line.partition(",")[0].partition("/")[0].partition(".")[0] for line in lines}
    return names


@cache
def _is_real(package: str) -> bool:
    """Whether a package is no link to a folder outside: an editable installation may be a link to the user's folder."""
    about = _about(package)
    file = about.get("__file__") or next(iter(about.get("__path__") or []), None)
    return file is None or _is_below(os.path.realpath(file), package)


def _about(name: str) -> dict[str, Any]:
    """The attributes of a module. A module that is loaded at its first use stays unloaded."""
    module = sys.modules.get(name)
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
        return found
    except AttributeError:
        return {}


def _file(name: str) -> str | None:
    file = _about(name).get("__file__")
    return file if isinstance(file, str) else None


def _stamp(file: str) -> list[int]:
    try:
        about = os.stat(file)
    except OSError:
        return []
    return [about.st_mtime_ns, about.st_size]


def _is_drawn_from(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether ``now`` is the state that :mod:`random` has after some numbers were drawn from ``before``."""
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_MOST_DRAWN // _WORDS):
        if generator.getstate()[1][:_WORDS] == now[1][:_WORDS]:  # only a seed or 624 draws change it
            return True
        generator.getrandbits(32 * _WORDS)
    return False


def _torch_has_drawn() -> bool:
    if (torch := sys.modules.get("torch")) is None:
        return False
    ours = torch.random.default_generator
    return not bool(torch.equal(ours.get_state(), torch.Generator().manual_seed(ours.initial_seed()).get_state()))
