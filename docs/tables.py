"""The option tables of the pages, generated from docstrings, dataclasses and the command line's help.

``python docs/tables.py`` writes them into the pages, between the comments ``begin`` and ``end``. They are checked in
because the pages are also read in the repository; ``tests/test_docs.py`` fails when a table is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import lightning_resilience
from lightning_resilience import callbacks, faults, recipes
from lightning_resilience.launch import cli, json_output, metrics, notices
from lightning_resilience.recipes import RECIPES
from lightning_resilience.run import events, exit_codes, goodput, what_if

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
CALLBACKS = callbacks.__all__
_MARKED = re.compile(r"(<!-- begin: (.+?), by docs/tables\.py -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _described(docstring: str, section: str) -> dict[str, str]:
    """Names and texts of a section of a Google docstring."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", flags=re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*\n(?:     +.*\n)*)", found[1] if found else "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _options(owner: str, docstring: str, defaults: dict[str, str]) -> str:
    described = _described(docstring, "Args")
    if list(described) != list(defaults):
        raise ValueError(f"{owner}: described are {list(described)}, and its arguments are {list(defaults)}")
    rows = []
    for name, text in described.items():
        default, meaning = f"`{defaults[name]}`" if defaults[name] else "", text
        if (said := re.search(r" ?Default: (.+?)\.(?= |$)", text)) is not None:
            default, meaning = said[1], text.replace(said[0], "")
        rows.append([f"`{name}`", _markdown(default), _markdown(meaning.strip())])
    return _table(["option", "default", "meaning"], rows)


def _shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return ""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _of_class(owner: type[Any]) -> Callable[[], str]:
    def table() -> str:
        parameters = inspect.signature(owner).parameters.values()
        defaults = {each.name: _shown(each.default) for each in parameters}
        return _options(owner.__name__, owner.__doc__ or "", defaults)

    return table


def _of_plugin(name: str) -> Callable[[], str]:
    """Read from its file: NeMo-Run is not installed where this runs."""

    def table() -> str:
        tree = ast.parse((ROOT / "lightning_resilience" / "contrib" / "nemo_run.py").read_text())
        (plugin,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        own = [node for node in plugin.body if isinstance(node, ast.AnnAssign) and node.value is not None]
        defaults = {
            ast.unparse(node.target): ast.unparse(node.value).replace("'", '"')
            for node in own
            if node.value is not None
        }
        return _options(name, ast.get_docstring(plugin) or "", defaults)

    return table


def _commands() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    return next(action.choices for action in actions if isinstance(action.choices, dict))


def _of_command(name: str) -> Callable[[], str]:
    def rows() -> Iterator[list[str]]:
        elsewhere = {option for option in _commands()["launch"]._option_string_actions if name != "launch"}
        for action in _commands()[name]._actions:
            if not action.option_strings or {"--help", *elsewhere} & set(action.option_strings):
                continue
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            meaning, _, default = ((action.help or "") % vars(action)).rstrip(")").partition(" (default: ")
            default = default or ("off" if action.nargs == 0 else "")
            yield [f"`{action.option_strings[0]}{value}`".replace("|", "\\|"), _markdown(default), _markdown(meaning)]

    return lambda: _table(["option", "default", "meaning"], rows())


def _recipes() -> str:
    made = {name: make() for name, make in RECIPES.items()}

    def cell(recipe: recipes.Recipe, field: str) -> str:
        callback = getattr(recipe, field)
        return "no" if callback is None else ", ".join(f"`{each}`" for each in recipes._changed(callback)) or "yes"

    fields = {field: owner for field, owner in recipes._PARTS.items() if owner != "Job"}
    rows = [[f"`{owner}`", *(cell(each, field) for each in made.values())] for field, owner in fields.items()]
    options = [[option.split("=") for option in each.job.options] for each in made.values()]
    for place, (option, _) in enumerate(options[0]):
        values = [own[place][1].replace(",", ", ") for own in options]
        rows.append(
            [f"`launch {option}`", *(values if len(set(values)) > 1 else [values[0], *["same"] * (len(values) - 1)])]
        )
    rows.append(["`launch --elastic`", *("yes" if each.job.elastic else "no" for each in made.values())])
    return _table(["", *(f"`{name}`" for name in made)], rows)


def _recipe() -> str:
    described = _described(recipes.Recipe.__doc__ or "", "Attributes")
    return _table(["field", "meaning"], ([f"`{name}`", _markdown(text)] for name, text in described.items()))


def _fields_of(kind: type[events.Event]) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each field that a kind of event adds."""
    hints = get_type_hints(kind, include_extras=True)
    for name in kind.own_fields:
        (hint,) = [part for part in get_args(hints[name]) if part is not type(None)]
        if get_origin(hint) is not Annotated:
            raise ValueError(f"{kind.__name__}.{name} has no meaning")
        own, meaning, *_ = get_args(hint)
        yield name, (str(own) if get_args(own) else own.__name__).replace("typing.", ""), meaning


def _events() -> str:
    def rows() -> Iterator[list[str]]:
        for name, kind in events.EVENTS.items():
            fields = [f"`{field}`" + ("" if is_required else "?") for field, is_required in kind.own_fields.items()]
            yield [
                f"`{name}`",
                f"`{kind.__name__}`",
                _markdown(" ".join((kind.__doc__ or "").split())),
                ", ".join(fields),
            ]

    return _table(["event", "class", "recorded when", "fields"], rows())


def _event_fields() -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, kind in events.EVENTS.items():
        for field in _fields_of(kind):
            found.setdefault(field, []).append(name)
    names = [name for name, _, _ in found]
    rows = []
    for (name, own, meaning), where in sorted(found.items()):
        only = f" (`{'`, `'.join(where)}`)" if names.count(name) > 1 else ""
        rows.append([f"`{name}`{only}", f"`{own}`", _markdown(meaning)])
    return _table(["field", "type", "meaning"], rows)


def _exit_codes() -> str:
    rows = ([str(code), _markdown(text)] for code, text in exit_codes.OF_LAUNCH.items())
    return _table(["code", "meaning"], rows)


def _batch_jobs() -> str:
    return _table(["`launch` has ended with", "the job"], exit_codes.BATCH_JOB.items())


def _keys_of(command: str) -> Callable[[], str]:
    keys = json_output.KEYS[command].items()
    return lambda: _table(["key", "meaning"], ([f"`{key}`", _markdown(text)] for key, text in keys))


def _categories() -> str:
    rows = re.findall(r"^``(\w+)`` +(.+)$", goodput.__doc__ or "", flags=re.MULTILINE)
    return _table(["category", "meaning"], ([f"`{name}`", _markdown(text)] for name, text in rows))


def _settings() -> str:
    rows = (
        [f"`{name}`", "; ".join(what_if.SPELLINGS[unit] for unit in setting.units), _markdown(setting.meaning)]
        for name, setting in what_if.SETTINGS.items()
    )
    return _table(["setting", "value", "meaning"], rows)


def _metrics() -> str:
    rows = (
        [f"`{each.prometheus_name}`", each.kind, f"`{each.label}`" if each.label else "", _markdown(each.help)]
        for each in metrics.METRICS
    )
    return _table(["metric", "type", "label", "meaning"], rows)


def _told() -> str:
    return _table(["event", "told when"], ([f"`{name}`", _markdown(text)] for name, text in notices.EVENTS.items()))


def _keys_of_told() -> str:
    return _table(["key", "meaning"], ([f"`{key}`", _markdown(text)] for key, text in notices.KEYS.items()))


TABLES: dict[str, Callable[[], str]] = {
    **{f"options of {name}": _of_class(getattr(lightning_resilience, name)) for name in CALLBACKS},
    "options of SimulatedFault": _of_class(faults.SimulatedFault),
    **{f"options of {name}": _of_plugin(name) for name in ("FaultTolerancePlugin", "PreemptionPlugin", "WandbPlugin")},
    **{f"options of {name}": _of_command(name) for name in ("launch", "slurm")},
    "recipes": _recipes,
    "fields of Recipe": _recipe,
    "exit codes of launch": _exit_codes,
    "batch jobs": _batch_jobs,
    "categories of time": _categories,
    "settings of --what-if": _settings,
    **{f"keys of {name}": _keys_of(name) for name in json_output.KEYS},
    "metrics": _metrics,
    "events that are told": _told,
    "keys of events that are told": _keys_of_told,
    "events of the ledger": _events,
    "fields of events": _event_fields,
}
"""Every table, by the name in its comment."""


def in_page(text: str) -> list[str]:
    """The names of the tables in a page."""
    return [match[2] for match in _MARKED.finditer(text)]


def current(text: str) -> str:
    """A page with its tables as they should be."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page.read_text()))
