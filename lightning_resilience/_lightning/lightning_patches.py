"""Patches attributes of Lightning's objects for the time of a fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any


class _Patch(functools.partial[Any]):
    """A function that replaces a method; a copy of the owner (a pickled or deep-copied Trainer) has the method again.

    It is a partial function, because a partial without arguments costs a healthy step no extra call.
    """

    owner: Any
    name: str

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)  # the copied owner has no attributes yet: its class's method


class Patches:
    """Sets attributes on instances for the time of a fit, and removes them again: no patch outlives the fit."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which must exist, to ``value`` until :meth:`undo`."""
        getattr(owner, name)  # fails here, at setup, if the name no longer exists; otherwise it would go unnoticed
        self._undo.append((owner, name, name in vars(owner), vars(owner).get(name)))
        # A local function cannot be pickled, but a Trainer must be. On a class it must stay a function, to be bound.
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
                with suppress(AttributeError):  # the script may have removed it
                    delattr(owner, name)
