"""Collects the settings of a run and compares two sets of them. Imports neither torch nor Lightning.

Settings are flat: names and JSON values. The settings of a command are its script and arguments; the settings of a fit
are the arguments of module, data, optimizers and Trainer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

CONTINUE_VARIABLE = "LIGHTNING_RESILIENCE_CONTINUE_ANYWAY"
"""Environment variable: with ``1`` a finished fit is restored although its settings have changed."""

GLOBAL_BATCH_VARIABLE = "LIGHTNING_RESILIENCE_GLOBAL_BATCH"
"""Environment variable: how the batches of absent ranks are treated, one of :data:`GLOBAL_BATCHES`."""

SHRINK = "shrink"
GLOBAL_BATCHES = ("constant", SHRINK)
"""``constant``: the other ranks train on them. ``shrink``: they are left out."""

READ_AGAIN_VARIABLE = "LIGHTNING_RESILIENCE_READ_AGAIN"
"""Environment variable: whether a resume within an epoch reads its data again, one of :data:`READS_AGAIN`."""

IF_CHANGED = "if-changed"
READS_AGAIN = ("always", IF_CHANGED)
"""``always``, or only if reading has changed the workers (``if-changed``)."""

WORLD_SIZE = "world size"

_ENDS = (
    *("max_epochs", "max_steps", "max_time"),
    *("epochs", "num_epochs", "n_epochs", "steps", "num_steps", "total_steps", "num_training_steps"),
)
MISSING = object()
"""The value of a setting that does not exist."""

_MAX_CHARACTERS = 60  # of a value
_MAX_CHANGES = 12  # in a message
_MAX_SETTINGS = 500  # of a fit
_DEPTH = 6
_VOLATILE = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*", re.IGNORECASE)
_MAX_BYTES = 1 << 20
_CONFIGURES = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")


@dataclass(frozen=True)
class Change:
    """A changed setting.

    Args:
        name: Name of the setting.
        before: Its value at the last start, or :data:`MISSING`.
        now: Its value now, or :data:`MISSING`.
    """

    name: str
    before: Any
    now: Any

    @property
    def is_raised_end(self) -> bool:
        """Whether it only prolongs the training; also ``True`` if a limit is given only before or only now."""
        if not is_end(self.name):
            return False
        if self.before is MISSING or self.now is MISSING:
            return True  # the script's default, which the fit knows, is the other value
        before, now = _limit(self.before), _limit(self.now)
        return before is not None and now is not None and now > before

    @property
    def is_volatile(self) -> bool:
        """Whether the value may differ at every start on its own, such as a name with a time or a process number."""
        if not (isinstance(self.before, str) and isinstance(self.now, str)):
            return False
        return _VOLATILE.sub("#", self.before) == _VOLATILE.sub("#", self.now) and not _is_number(self.before)

    def __str__(self) -> str:
        if self.before is MISSING:
            return f"{self.name} (none) -> {_shown(self.now)}"
        if self.now is MISSING:
            return f"{self.name} {_shown(self.before)} -> (none)"
        return f"{self.name} {_shown(self.before)} -> {_shown(self.now)}"


def global_batch() -> str:
    """How the batches of absent ranks are treated.

    Raises:
        ValueError: If the environment variable is not one of :data:`GLOBAL_BATCHES`.
    """
    return _choice(GLOBAL_BATCH_VARIABLE, GLOBAL_BATCHES)


def read_again() -> str:
    """Whether a resume within an epoch reads its data again.

    Raises:
        ValueError: If the environment variable is not one of :data:`READS_AGAIN`.
    """
    return _choice(READ_AGAIN_VARIABLE, READS_AGAIN)


def _choice(variable: str, choices: Sequence[str]) -> str:
    found = os.environ.get(variable) or choices[0]
    if found not in choices:
        raise ValueError(f"{variable} must be {' or '.join(choices)}, not {found!r}")
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ, in their current order; removed ones come last.

    Args:
        before: The settings of the last start.
        now: The settings of this start.
    """
    names = [*now, *(name for name in before if name not in now)]
    pairs = ((name, before.get(name, MISSING), now.get(name, MISSING)) for name in names)
    return [Change(name, old, new) for name, old, new in pairs if not _same(old, new)]


def describe_changes(found: Sequence[Change]) -> str:
    """The changes in one clause.

    Args:
        found: The result of :func:`changes`.
    """
    named = ", ".join(map(str, found[:_MAX_CHANGES]))
    return named + (f" and {len(found) - _MAX_CHANGES} more" if len(found) > _MAX_CHANGES else "")


def is_another_run(found: Iterable[Change]) -> bool:
    """Whether a command differs from that of a finished run by more than a raised end.

    Args:
        found: The result of :func:`changes` for the settings of the command.
    """
    return any(not change.is_raised_end for change in found)


def is_another_fit(found: Iterable[Change]) -> bool:
    """Whether a script's fit differs from the finished fit.

    If the number of ranks has changed, no change counts (such as of the batch size): a run that restarts on fewer nodes
    must keep its finished fits. Volatile changes do not count. Limits do not count either, since it is known separately
    whether the limit that ended the fit was raised.

    Args:
        found: The result of :func:`changes` for the settings of the fit.
    """
    found = list(found)
    if any(change.name == WORLD_SIZE for change in found):
        return False
    return any(not (is_end(change.name) or change.is_volatile) for change in found)


def is_end(name: str) -> bool:
    """Whether a setting of this name bounds the training: ``--trainer.max_epochs``, ``max-steps``.

    Args:
        name: Name of an argument or a setting.
    """
    return name.startswith("patience of ") or name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower() in _ENDS


def settings_of_command(command: Sequence[str]) -> Settings:
    """The script and its arguments, by name.

    Args:
        command: The script with its arguments, or ``-m``, a module and its arguments.
    """
    script, arguments = _split(command)
    if script[0] != "-m":
        script = [os.path.relpath(script[0])]
    return {"script": " ".join(script), **settings_of_arguments(arguments)}


def settings_of_arguments(arguments: Sequence[str]) -> Settings:
    """The arguments of a script as settings: ``--lr 0.1``, ``--lr=0.1`` and ``lr=0.1`` by name, positional by number.

    Args:
        arguments: The script's arguments.
    """
    found: dict[str, list[Any]] = {}
    name: str | None = None
    places = 0
    for word in arguments:
        if re.match(r"-{1,2}[^\W\d]", word):
            name, equals, value = word.partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
            name = None if equals else name
        elif named := re.fullmatch(r"([+~]{0,2}[^\W\d][\w./@-]*)=(.*)", word, re.DOTALL):
            found.setdefault(named[1], []).append(named[2])
            name = None
        elif name is not None:
            found[name].append(word)
        else:
            places += 1
            found.setdefault(f"argument {places}", []).append(word)
    return {name: values[0] if len(values) == 1 else (values or True) for name, values in found.items()}


def identity_of_command(command: Sequence[str], directory: Path) -> str:
    """A digest of 8 hexadecimal digits, equal for the same script and arguments; limits are ignored.

    Args:
        command: As for :func:`settings_of_command`.
        directory: Its working directory.
    """
    script, arguments = _split(command)
    if script[0] != "-m":
        script = [os.path.relpath(directory / script[0], directory)]
    kept: list[str] = []
    of_end = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if is_end(name) and (equals or name.startswith("-")):
            of_end = not equals
        elif of_end and not re.match(r"-{1,2}[^\W\d]", word):
            of_end = False
        else:
            of_end = False
            kept.append(word)
    return hashlib.sha256(json.dumps([script, kept]).encode()).hexdigest()[:8]


def has_arguments(command: Sequence[str]) -> bool:
    """Whether a command has any argument that is not a limit.

    Args:
        command: As for :func:`settings_of_command`.
    """
    return any(not is_end(name) for name in settings_of_arguments(_split(command)[1]))


def digests_of_files(command: Sequence[str]) -> dict[str, str]:
    """Digests of the script and of the settings files among its arguments, by path.

    Args:
        command: As for :func:`settings_of_command`.
    """
    found = {}
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.suffix not in _CONFIGURES:
            continue
        try:
            if path.is_file() and path.stat().st_size <= _MAX_BYTES:
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except (OSError, ValueError):
            continue
    return found


def flat(name: str, value: Any) -> Settings:
    """A value as settings: numbers, texts and containers of them; for other objects, the class.

    Args:
        name: The prefix of the names.
        value: Any value.
    """
    found: Settings = {}
    with suppress(Exception):  # an object of the user may raise
        _flatten(name, value, found, _DEPTH)
    return found


def _flatten(name: str, value: Any, found: Settings, depth: int) -> None:
    if len(found) >= _MAX_SETTINGS:
        return
    if isinstance(value, Namespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name, None) for each in fields(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses (enums, NumPy numbers) are kept as text.
        found[name] = value if value is None or type(value) in (bool, int, float, str) else str(value)
    elif isinstance(value, os.PathLike):
        found[name] = os.fspath(value)
    elif isinstance(value, timedelta):
        found[name] = value.total_seconds()
    elif isinstance(value, Mapping) and depth:
        for key, part in value.items():
            _flatten(f"{name}.{key}" if name else str(key), part, found, depth - 1)
    elif isinstance(value, (list, tuple)) and len(value) <= 20 and depth:
        if all(part is None or type(part) in (bool, int, float, str) for part in value):
            found[name] = list(value)
        else:
            for index, part in enumerate(value):
                _flatten(f"{name}.{index}", part, found, depth - 1)
    else:
        kind = value if hasattr(value, "__qualname__") else type(value)
        found[name] = f"{kind.__module__}.{kind.__qualname__}"


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    of_script = 2 if command[:1] == ["-m"] else 1
    return list(command[:of_script]), list(command[of_script:])


def _same(before: Any, now: Any) -> bool:
    if before is MISSING or now is MISSING:
        return False
    if type(before) is bool or type(now) is bool:
        return before is now
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, str) and isinstance(now, str) and _is_number(before) and _is_number(now):
        before, now = float(before), float(now)
    return bool(before == now) or (before != before and now != now)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _limit(value: Any) -> float | None:
    """A limit as a number, in seconds if it is a time; ``inf`` stands for no limit. ``None`` if it is no number."""
    if value is None:
        return float("inf")
    text = str(value)
    if time := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in time.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not _is_number(text):
        return None
    return float("inf") if float(text) < 0 else float(text)


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
