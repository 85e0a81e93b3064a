"""Checks the arguments of a callback against the annotations of its ``__init__``, before the ``__init__`` runs.

An error names the callback, the argument, the given value and what to give instead.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import math
import numbers
import os
import re
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_Init = TypeVar("_Init", bound=Callable[..., None])

_CLOCK = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
_DURATION = "a number of seconds, a timedelta or 'H:MM:SS'"


def checked(init: _Init) -> _Init:
    """Makes an ``__init__`` refuse arguments that its annotations do not allow.

    ``init`` itself checks what an annotation cannot express, such as a minimum; its errors get the same prefix.

    Raises:
        TypeError: From the returned ``__init__``: if an argument is unknown, or of a wrong type.
        ValueError: From the returned ``__init__``: if an argument has an invalid value.
    """
    signature = inspect.signature(init)
    hints: dict[str, Any] = {}

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        known = list(signature.parameters)[1:]
        for given in kwargs.keys() - set(known):
            near = difflib.get_close_matches(given, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
            raise TypeError(f"{name}: there is no argument {given}; {hint}")
        try:
            bound = signature.bind(self, *args, **kwargs)
            if not hints:
                hints.update(get_type_hints(init))
            for argument, value in bound.arguments.items():
                if argument in hints and value is not signature.parameters[argument].default:
                    _check(argument, value, hints[argument])
            init(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return cast(_Init, checking)


def duration(name: str, value: Any) -> timedelta:
    """Converts an argument to a ``timedelta``: it may be one, a number of seconds, or a text such as ``"0:15:00"``.

    Raises:
        TypeError: If the value is none of these.
        ValueError: If the value cannot be parsed, or is not finite.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and (found := _CLOCK.fullmatch(value.strip())):
        hours, minutes, seconds = map(int, found.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)
    problem = f"{name} must be {_DURATION}, not {value!r}: for 15 minutes, 900, timedelta(minutes=15) or '0:15:00'."
    if isinstance(value, str):
        raise ValueError(problem)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(problem)
    if not math.isfinite(value):
        raise ValueError(problem)
    try:
        return timedelta(seconds=float(value))
    except OverflowError:
        raise ValueError(problem) from None


def path(name: str, value: Any) -> None:
    """Checks that an argument is a path.

    Raises:
        TypeError: If it is not a path.
        ValueError: If it is empty.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, not {value!r}: give a string or a pathlib.Path, like 'runs/gpt'.")
    if not os.fspath(value):
        raise ValueError(f"{name} must be a path, not {value!r}: give one like 'runs/gpt', or None for the default.")


def shown(value: Any) -> str:
    """A value as it is written in a script."""
    if isinstance(value, enum.Enum):
        return repr(value.name)
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def changed(owner: Any) -> dict[str, Any]:
    """The options of ``owner`` that differ from the defaults of its class, in the order of its arguments."""
    parameters = inspect.signature(type(owner)).parameters.items()
    values = {name: getattr(owner, name, parameter.default) for name, parameter in parameters}
    return {name: values[name] for name, parameter in parameters if values[name] != parameter.default}


def check_fields(owner: Any) -> None:
    """Checks the values of a dataclass's fields against their annotations.

    Raises:
        TypeError: If a value is of a wrong type.
        ValueError: If a value is not one of the allowed ones.
    """
    for name, hint in get_type_hints(type(owner)).items():
        _check(name, getattr(owner, name), hint)


def _check(name: str, value: Any, hint: Any) -> None:
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    if value is None and type(None) in kinds:
        return
    if timedelta in kinds:
        duration(name, value)
        return
    choices = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    if bool in kinds:
        choices = [True, False, *choices]
    if choices:
        if not any(value is each or (isinstance(each, str) and value == each) for each in choices):
            raise (TypeError if bool in kinds else ValueError)(f"{name} must be {_one_of(choices)}, not {value!r}.")
    elif int in kinds and len(kinds) <= 2:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be a whole number{_or_none(kinds)}, not {value!r}.")
    elif float in kinds and len(kinds) <= 2:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number{_or_none(kinds)}, not {value!r}.")
    elif str in kinds and any(get_origin(kind) is os.PathLike for kind in kinds):
        path(name, value)
    elif any(get_origin(kind) is Callable for kind in kinds) and not callable(value):
        raise TypeError(f"{name} must be a function{_or_none(kinds)}, not {value!r}.")


def _one_of(choices: list[Any]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _or_none(kinds: list[Any]) -> str:
    return " or None" if type(None) in kinds else ""
