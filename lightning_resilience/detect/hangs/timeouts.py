"""The timeouts of a rank from one sign of progress to the next, configured or calculated from measured times.

Calculated timeouts are kept in ``ft_state.json`` for the next job:

```
{
  "fits": {
    "0": {                                            one entry for every fit of the script
      "calculated": {"setup": 95.0, "step": 30.0},    seconds; a missing section has its configured timeout
      "layout": {"nodes": 1, "world_size": 8, ...},   the layout for which they were measured
      "time": "2026-01-31T12:00:00+01:00"
    }
  },
  "version": 1
}
```

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from lightning_resilience._files import make_directory, write_json
from lightning_resilience.detect.hangs.progress import Section

SECTION_TIMEOUTS_VARIABLE = "LIGHTNING_RESILIENCE_SECTION_TIMEOUTS"
"""Environment variable in which ``lightning-resilience launch`` gives the workers the timeouts, see
:meth:`SectionTimeouts.parse`."""

SAFETY_FACTOR = 5.0
"""A calculated timeout is this many times the longest measured time (NVRx's default)."""

MIN_CALCULATED_S = 30.0
"""The shortest calculated timeout in seconds, unless the section's configured timeout is shorter: five times a step of
10 ms is less than one hiccup of shared storage."""

MIN_TRAIN_ITERATIONS = 16
"""The number of training batches from which on the longest one is used for a timeout (as in NVRx and
Megatron-Bridge)."""

_SECTIONS: tuple[Section, ...] = ("setup", "step", "validation", "checkpointing", "out_of_section", "start")
_NO_LIMIT = ("none", "null")  # NVRx's spellings
_VERSION = 1


@dataclass(frozen=True)
class SectionTimeouts:
    """Seconds that a rank may spend in a section without a sign of progress. The defaults are Megatron-Bridge's.

    The default of ``start`` is Megatron-Bridge's for ``setup``, which there begins with the process.

    Args:
        setup: From the beginning of the fit to the end of the first batch; ``None``: no limit.
        step: A whole training batch; ``None``: no limit.
        checkpointing: A save, or waiting for one in the background; ``None``: no limit.
        out_of_section: Everything else; ``None``: no limit.
        validation: A whole validation batch; ``None``: the configured timeout of ``step``, even when ``step`` has been
            calculated, because the first validation may take longer than a training batch.
        start: The time in which neither the process of a launched rank nor any of its child processes does anything,
            from the script's first line to ``setup`` of the first fit, and after a fit; ``None``: no limit.
        calculated: Timeouts by section that replace the configured ones, unless ``None`` is configured, see
            :func:`calculate`.

    Raises:
        ValueError: If a timeout is not a positive number, or ``calculated`` names an unknown section.
    """

    setup: float | None = 600.0
    step: float | None = 180.0
    checkpointing: float | None = 420.0
    out_of_section: float | None = 300.0
    validation: float | None = None
    start: float | None = 600.0
    calculated: Mapping[Section, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _SECTIONS:
            value = getattr(self, name)
            if isinstance(value, timedelta):
                value = value.total_seconds()
                object.__setattr__(self, name, value)
            if value is not None and not (_is_finite(value) and value > 0):
                raise ValueError(
                    f"The timeout of section {name} must be a positive number of seconds, or None, not {value!r}."
                )
        for name, value in self.calculated.items():
            _check_name(name)
            if not (_is_finite(value) and value > 0):
                raise ValueError(
                    f"The calculated timeout of section {name} must be a positive number of seconds, not {value!r}."
                )

    @staticmethod
    def of(value: SectionTimeouts | Mapping[str, Any] | str) -> SectionTimeouts:
        """The timeouts that an option gives: an instance, a mapping by section, or a text for :meth:`parse`.

        Raises:
            TypeError: If the value is none of these.
            ValueError: If a section is unknown, or a timeout is not a positive number.
        """
        if isinstance(value, SectionTimeouts):
            return value
        if isinstance(value, str):
            return SectionTimeouts.parse(value)
        if not isinstance(value, Mapping):
            raise TypeError(
                f"section_timeouts must be SectionTimeouts, a mapping or 'setup:600,step:180', not {value!r}."
            )
        for name in value:
            _check_name(name)
        return SectionTimeouts(**value)

    @staticmethod
    def parse(text: str) -> SectionTimeouts:
        """Reads ``setup:600,step:180,checkpointing:420,out_of_section:300``, as NVRx writes it.

        Args:
            text: ``NAME:SECONDS`` pairs; ``none`` for ``None``. A section that is left out keeps its default.

        Raises:
            ValueError: If a section is unknown or named twice, or a timeout is not a positive number.
        """
        timeouts: dict[str, float | None] = {}
        for pair in filter(None, map(str.strip, text.split(","))):
            name, colon, value = (part.strip() for part in pair.partition(":"))
            if not colon:
                raise ValueError(f"Section timeouts must be NAME:SECONDS,NAME:SECONDS,... and not {pair!r}.")
            _check_name(name)
            if name in timeouts:
                raise ValueError(f"There are two timeouts for section {name} in {text!r}.")
            try:
                timeouts[name] = None if value.lower() in _NO_LIMIT else float(value)
            except ValueError:
                raise ValueError(f"The timeout of section {name} must be seconds, or none, not {value!r}.") from None
        return SectionTimeouts(**timeouts)  # type: ignore[arg-type]  # the names have been checked

    def __str__(self) -> str:
        """The timeouts in force, in the form that :meth:`parse` reads; its inverse if nothing has been calculated."""
        limits = self.by_section()
        if self.validation is None and limits["validation"] == limits["step"]:
            del limits["validation"]
        if self.start == SectionTimeouts.start:
            del limits["start"]  # it concerns the launch, and no section of a fit
        shown = {name: "none" if limit == math.inf else str(limit) for name, limit in limits.items()}
        return ",".join(f"{name}:{limit.removesuffix('.0')}" for name, limit in shown.items())

    def by_section(self) -> dict[Section, float]:
        """The timeout in force for each section: seconds, or infinity where there is no limit."""
        configured = {name: getattr(self, name) for name in _SECTIONS}
        if self.validation is None:
            configured["validation"] = self.step
        # A section that is configured to have no limit gets no calculated limit either.
        return {
            name: math.inf if value is None else self.calculated.get(name, value) for name, value in configured.items()
        }


def _check_name(name: str) -> None:
    if name not in _SECTIONS:
        raise ValueError(f"There is no section {name!r}; the sections are {', '.join(_SECTIONS)}.")


def _is_finite(value: object) -> bool:
    # math.isfinite raises for integers that are too large for a float, which a JSON file may hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def selectable(
    *,
    has_loaded: bool,
    train_iterations: int,
    has_validated: bool,
    has_saved: bool,
    saves_in_background: bool,
    is_end: bool,
) -> set[Section]:
    """The sections that have been measured enough for :func:`calculate`, by the rules of NVRx and Megatron-Bridge.

    Args:
        has_loaded: Whether the setup has loaded a checkpoint: a setup without loading is shorter than the next setup.
        train_iterations: Training batches in this process.
        has_validated: Whether a whole validation has been seen.
        has_saved: Whether a checkpoint has been saved.
        saves_in_background: Whether saves are asynchronous: the time of a save that nothing waited for is not known.
        is_end: Whether the fit is ending. The longest time out of section is known only at the end of the fit.
    """
    found: set[Section] = set()
    if has_loaded:
        found.add("setup")
    if train_iterations >= MIN_TRAIN_ITERATIONS:
        found.add("step")
    if has_validated:
        found.add("validation")
    if has_saved and not saves_in_background:
        found.add("checkpointing")
    if is_end and has_saved and {"setup", "step"} <= found:
        found.add("out_of_section")
    return found


def calculate(
    current: SectionTimeouts, longest: Mapping[Section, float], selected: Collection[Section]
) -> SectionTimeouts:
    """Calculates timeouts from the measured times of the sections, as NVRx does, but with a minimum.

    A timeout is :data:`SAFETY_FACTOR` times the longest time. If the section already had a calculated timeout, the new
    one is the mean of both (NVRx's moving average with a weight of 0.5), so that the effect of a single slow day fades;
    it is still at least half the factor, 2.5 times the longest time measured now. A timeout is at least
    :data:`MIN_CALCULATED_S`, or the configured timeout if that is shorter. It is rounded up to whole seconds, so that
    repeated calculation from the same times converges.

    Args:
        current: The timeouts in force.
        longest: Longest time from one sign of progress to the next in seconds, over all ranks.
        selected: The sections to calculate, see :func:`selectable`. A section without a time in ``longest``, and every
            other section, keeps its timeout.
    """
    calculated = dict(current.calculated)
    for name in selected:
        seconds = longest.get(name, 0.0)
        if seconds <= 0:
            continue
        timeout = SAFETY_FACTOR * seconds
        if name in calculated:
            timeout = (timeout + calculated[name]) / 2
        configured = replace(current, calculated={}).by_section()[name]
        calculated[name] = max(float(math.ceil(timeout)), min(MIN_CALCULATED_S, configured))
    return replace(current, calculated=calculated)


def save(path: str | os.PathLike[str], fit: int, timeouts: SectionTimeouts, layout: Mapping[str, Any]) -> None:
    """Writes calculated timeouts to a file. A crash at any instant leaves the old file or the new one.

    Args:
        path: The file. The entries of other fits in it are kept; a file that :func:`load` would ignore is replaced.
        fit: Number of the fit in the script.
        timeouts: The timeouts whose calculated part is written.
        layout: The strings and numbers on which the duration of a section depends, such as the world size.

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        fits = _read_fits(path)
    except (OSError, ValueError):
        fits = {}
    fits[str(fit)] = {
        "calculated": dict(timeouts.calculated),
        "layout": dict(layout),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    make_directory(Path(path).parent)
    write_json(path, {"version": _VERSION, "fits": fits})


def load(
    path: str | os.PathLike[str], fit: int, layout: Mapping[str, Any], configured: SectionTimeouts
) -> tuple[SectionTimeouts | None, str | None]:
    """Reads the timeouts that an earlier job has calculated.

    Args:
        path: The file.
        fit: Number of the fit in the script.
        layout: The present layout; timeouts of another layout are ignored.
        configured: The configured timeouts, which hold for sections that have not been calculated.

    Returns:
        The timeouts and ``None``; or ``None`` and the reason why the file is ignored; or ``None`` twice if there is no
        file, or no entry for this fit in it.
    """
    try:
        entry = _read_fits(path).get(str(fit))
        if entry is None:
            return None, None
        return _timeouts_of(entry, layout, configured), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{os.fspath(path)} is ignored: It cannot be read ({error.strerror})."
    except ValueError as error:
        return None, f"{os.fspath(path)} is ignored: {error}"


def _read_fits(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries by number of the fit, not validated.

    Raises:
        OSError: If the file cannot be read, or does not exist.
        ValueError: If this package did not write the file, or another version did; with the reason.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"It is not valid JSON ({error}).") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != _VERSION:
        raise ValueError(f"It has version {version}, and this release reads version {_VERSION}.")
    if version != _VERSION or not isinstance(content.get("fits"), dict):
        raise ValueError("It was not written by lightning-resilience.")
    fits: dict[str, Any] = content["fits"]
    return fits


def _timeouts_of(entry: object, layout: Mapping[str, Any], configured: SectionTimeouts) -> SectionTimeouts:
    """The timeouts in an entry; raises ``ValueError`` with the reason if they cannot be used."""
    calculated, found = (entry.get("calculated"), entry.get("layout")) if isinstance(entry, dict) else (None, None)
    if not isinstance(calculated, dict) or not isinstance(found, dict):
        raise ValueError("The entry of this fit is damaged.")
    differences = [
        f"{name} was {found.get(name, 'not known')} and is {layout.get(name, 'not known')}"
        for name in sorted(found.keys() | layout.keys())
        if found.get(name) != layout.get(name)
    ]
    if differences:
        raise ValueError(f"Its timeouts are for another layout ({', '.join(differences)}).")
    return replace(configured, calculated=calculated)
