"""The settings of ``report --what-if``: parses them and applies them to a run's figures."""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_resilience.run.goodput import START
from lightning_resilience.run.replay import Replayed, RunFigures, Saves, Strike, replay
from lightning_resilience.run.save_interval import WARM_UP_STEPS, chosen_interval_s, mean_time_to_failure_s

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(s|min|h|d|steps|x|)")
_OF_START = tuple(category for category in START if category not in ("restore", "fast_forward"))


class Amount(NamedTuple):
    """A parsed value.

    Attributes:
        number: The number; seconds for a time.
        unit: ``s``, ``steps``, ``x`` (a factor of the present value), ``number``, ``off``, ``on`` or ``auto``.
    """

    number: float
    unit: str


@dataclass(frozen=True)
class Prediction:
    """The time of a run with other settings.

    Attributes:
        changes: The changed settings, as they were written.
        replayed: The run without changes by the same model, which shows how accurate the model is.
        predicted: The run with the changes.
    """

    changes: Mapping[str, str]
    replayed: Replayed
    predicted: Replayed


def predict(figures: RunFigures, text: str) -> Prediction:
    """Predicts the time of a run with other settings.

    Args:
        figures: Figures of the run.
        text: The changes, as in ``save_every=300 local=off mtbf=1h``.

    Raises:
        ValueError: If the changes cannot be parsed, make no sense for this run, or the run would not end.
    """
    changes = parse(text)
    return Prediction(changes, replay(figures), replay(changed(figures, changes)))


def parse(text: str) -> dict[str, str]:
    """The settings in a text, checked.

    Args:
        text: ``NAME=VALUE``, with spaces or commas between several.

    Raises:
        ValueError: If a name or a value is invalid.
    """
    found: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(SETTINGS)}"
            raise ValueError(f"there is no setting {name!r}; {hint}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        SETTINGS[name].read(name, value)
        found[name] = value
    if not found:
        raise ValueError(f"nothing is changed; choose from {', '.join(SETTINGS)}")
    return found


def changed(figures: RunFigures, changes: Mapping[str, str]) -> RunFigures:
    """The figures of a run with other settings.

    Args:
        figures: Figures of the run.
        changes: Values by the names of settings.

    Raises:
        ValueError: If the changes make no sense for this run.
    """
    for name, setting in SETTINGS.items():  # in this order, since some depend on earlier ones
        if name in changes:
            figures = setting.change(figures, setting.read(name, changes[name]))
    return figures


# -- what each does ----------------------------------------------------------------------------------------------------


def _every(saves: Saves, amount: Amount, step_s: float) -> Saves:
    if amount.unit == "steps":
        return replace(saves, every_steps=max(round(amount.number), 1), first_steps=None)
    # A save that is due waits for the end of a step, half a step on average.
    return replace(saves, every_s=amount.number + step_s / 2, every_steps=None, first_steps=None)


def _chosen(figures: RunFigures, local_saves: Saves) -> Saves:
    """Local saves at the interval that ``LocalCheckpoint`` would choose."""
    mean_time_s = figures.mtbf_s
    if mean_time_s is None:
        mean_time_s = mean_time_to_failure_s(figures.ranks, len(figures.interruptions), figures.trained_s)
    starts_s = [sum(each.seconds.get(name, 0.0) for name in START) for each in figures.interruptions]
    every_s = chosen_interval_s(
        local_saves.blocked_s, local_saves.write_s, mean_time_s, statistics.fmean(starts_s) if starts_s else 0.0
    )
    saves = _every(local_saves, Amount(every_s, "s"), figures.step_s)
    return replace(saves, first_steps=local_saves.first_steps or WARM_UP_STEPS)


def _with_saves(figures: RunFigures, saves: Saves | None, local_saves: Saves | None) -> RunFigures:
    """The figures with other saves; the replay then computes which steps an interruption loses."""
    strikes = [replace(each, lost_steps=None) for each in figures.strikes]
    return replace(figures, strikes=strikes, saves=saves, local_saves=local_saves)


def _save_every(figures: RunFigures, amount: Amount) -> RunFigures:
    if amount.unit == "off":
        return _with_saves(figures, None, figures.local_saves)
    if figures.saves is None:
        raise ValueError("save_every: the run has saved nothing regularly, so what a save costs is not known")
    return _with_saves(figures, _every(figures.saves, amount, figures.step_s), figures.local_saves)


def _save_cost(figures: RunFigures, amount: Amount) -> RunFigures:
    if figures.saves is None:
        raise ValueError("save_cost: the run has saved nothing regularly")
    before_s = figures.saves.blocked_s
    blocked_s = before_s * amount.number if amount.unit == "x" else amount.number
    return _with_saves(figures, replace(figures.saves, blocked_s=blocked_s), figures.local_saves)


def _local(figures: RunFigures, amount: Amount) -> RunFigures:
    if amount.unit == "off":
        return _with_saves(figures, figures.saves, None)
    if amount.unit == "steps":  # the replay knows local saves by the time between them
        amount = Amount(max(round(amount.number), 1) * figures.step_s, "s")
    before = figures.local_saves or Saves(amount.number)
    local_saves = _chosen(figures, before) if amount.unit == "auto" else _every(before, amount, figures.step_s)
    return _with_saves(figures, figures.saves, local_saves)


def _of_interruptions(figures: RunFigures, change: Callable[[Strike], Mapping[str, float]]) -> RunFigures:
    """The figures with other costs of the interruptions."""
    strikes = [each if each.at_step is not None else replace(each, seconds=change(each)) for each in figures.strikes]
    return replace(figures, strikes=strikes)


def _restart(figures: RunFigures, amount: Amount) -> RunFigures:
    if not figures.interruptions:
        raise ValueError("restart: the run was never interrupted; give mtbf too")

    def change(strike: Strike) -> dict[str, float]:
        before_s = sum(strike.seconds.get(category, 0.0) for category in _OF_START)
        factor = amount.number if amount.unit == "x" else amount.number / before_s if before_s else 1.0
        return {name: each * (factor if name in _OF_START else 1.0) for name, each in strike.seconds.items()}

    return _of_interruptions(figures, change)


def _hang_limit(figures: RunFigures, amount: Amount) -> RunFigures:
    if all(each.limit_s is None for each in figures.interruptions):
        raise ValueError("hang_limit: the run has not hung in any step")

    def change(strike: Strike) -> Mapping[str, float]:
        if strike.limit_s is None:
            return strike.seconds
        beyond_s = max(strike.seconds.get("detection", 0.0) - strike.limit_s, 0.0)
        return {**strike.seconds, "detection": amount.number + beyond_s}

    return _of_interruptions(figures, change)


def _spares(figures: RunFigures, amount: Amount) -> RunFigures:
    if all(not each.seconds.get("queue") for each in figures.interruptions):
        raise ValueError("spares: the run has not waited in a queue after any interruption")
    return _of_interruptions(figures, lambda strike: {**strike.seconds, "queue": 0.0})


def _mtbf(figures: RunFigures, amount: Amount) -> RunFigures:
    if not figures.interruptions:  # then another start is taken to cost as much as the first one
        start = {name: seconds for name, seconds in figures.once.items() if name in START}
        figures = replace(figures, strikes=[*figures.strikes, Strike(math.inf, seconds=start)])
    figures, local_saves = replace(figures, mtbf_s=amount.number), figures.local_saves
    if local_saves is not None and local_saves.first_steps is not None:
        local_saves = _chosen(figures, local_saves)
    return _with_saves(figures, figures.saves, local_saves)


def _ranks(figures: RunFigures, amount: Amount) -> RunFigures:
    before_s = figures.recorded_mtbf_s if figures.mtbf_s is None else figures.mtbf_s
    if before_s is None:
        raise ValueError("ranks: it changes how often the run is interrupted, but the run was not; give mtbf too")
    return _mtbf(figures, Amount(before_s * figures.ranks / amount.number, "s"))


class Setting(NamedTuple):
    """A setting that can be changed.

    Attributes:
        meaning: Text for ``--help``.
        units: The allowed units: ``s`` (a time), ``steps``, ``x``, ``number``, ``off``, ``on``, ``auto``.
        change: Applies a value to the figures of a run.
    """

    meaning: str
    units: tuple[str, ...]
    change: Callable[[RunFigures, Amount], RunFigures]

    def read(self, name: str, value: str) -> Amount:
        """Parses a value.

        Args:
            name: Name of the setting, for the error.
            value: The value, as it was written.

        Raises:
            ValueError: If it is not a valid value.
        """
        if value in self.units and value in ("off", "on", "auto"):
            return Amount(0.0, value)
        found = _AMOUNT.fullmatch(value)
        if found is not None and (float(found[1]) > 0 or name in _MAY_BE_ZERO):
            unit = found[2]
            if unit in self.units and unit in ("steps", "x"):
                return Amount(float(found[1]), unit)
            if unit in _UNITS and "s" in self.units:
                return Amount(float(found[1]) * _UNITS[unit], "s")
            if not unit and "number" in self.units:
                return Amount(float(found[1]), "number")
        spellings = " or ".join(SPELLINGS[each] for each in self.units)
        raise ValueError(f"{name}={value} is not valid; it can be: {spellings}")


_MAY_BE_ZERO = ("save_cost", "restart")
SPELLINGS = {
    "s": "a time (90, 90s, 5min, 2h)",
    "steps": "steps (100steps)",
    "x": "a factor (0.5x)",
    "number": "a number",
    "off": "off",
    "on": "on",
    "auto": "auto",
}
"""How values of each unit are written, for messages."""

SETTINGS = {
    "save_every": Setting("time or steps between two saves to the run directory", ("s", "steps", "off"), _save_every),
    "save_cost": Setting("for how long the training waits for such a save", ("s", "x"), _save_cost),
    "local": Setting(
        "time or steps between two saves to the nodes; auto: as LocalCheckpoint chooses",
        ("s", "steps", "auto", "off"),
        _local,
    ),
    "mtbf": Setting("mean time of training between two interruptions, which then come at random", ("s",), _mtbf),
    "ranks": Setting("that many ranks: interruptions are more frequent in proportion", ("number",), _ranks),
    "restart": Setting("what a restart takes, from the launch to the first step", ("s", "x"), _restart),
    "hang_limit": Setting("timeout after which a hang of a step is found", ("s",), _hang_limit),
    "spares": Setting("no restart waits in a queue", ("on",), _spares),
}
"""The settings by name."""
