"""Makes it visible in a stack that a rank waits for a user's input: ``input`` is in C, and has no frame.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable

_input: Callable[..., str] | None = None


def _wait(*args: object) -> str:
    assert _input is not None
    return _input(*args)


def watch() -> None:
    """Replaces ``input`` by a Python function."""
    global _input
    if _input is None:
        _input, builtins.input = builtins.input, _wait


def leave() -> None:
    """Restores ``input``, unless other code has replaced it too."""
    global _input
    if _input is not None and builtins.input is _wait:
        builtins.input, _input = _input, None
