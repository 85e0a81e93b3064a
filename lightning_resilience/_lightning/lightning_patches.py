"""Attributes that are changed on objects of Lightning for the time of a fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any


class _Patch(functools.partial[Any]):
    """A function in the place of a method, which a copy of its owner (a pickled, deep-copied Trainer) has back.

    A partial function, since one without arguments costs a healthy step no call of its own.
    """

    owner: Any
    name: str

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)  # the copied owner has no attributes yet: its class's method


class Patches:
    """Attributes set on instances for the time of a fit, and taken off again: nothing of ours outlives it."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which must exist, to ``value`` until :meth:`undo`."""
        getattr(owner, name)  # a name that has gone away fails here, at setup, and not by being ignored
        self._undo.append((owner, name, name in vars(owner), vars(owner).get(name)))
        # What is made in here cannot be pickled, and a Trainer can. That of a class has to be one, to be bound.
        is_method = isinstance(value, (FunctionType, MethodType)) and not isinstance(owner, type)
        if is_method:
            value = _Patch(value)
            value.owner, value.name = owner, name
        setattr(owner, name, value)

    def wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Calls ``before`` before every call of ``owner.name``, and ``after`` after every call that returns."""
        call = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = call(*args, **kwargs)
            if after is not None:
                after()
            return result

        self.set(owner, name, wrapper)

    def undo(self) -> None:
        """Restores everything, newest first."""
        while self._undo:
            owner, name, was_set, value = self._undo.pop()
            if was_set:
                setattr(owner, name, value)
            else:
                with suppress(AttributeError):  # the script has removed it
                    delattr(owner, name)
