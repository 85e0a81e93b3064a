"""What the documentation says: its code runs, its commands parse, its tables and log lines are the program's."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser
from torch.utils.data import DataLoader

import lightning_resilience.callbacks
from lightning_resilience.launch import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md", ROOT / "benchmarks/README.md"]
COMMANDS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "recipes/README.md"]
LINKED = {*PAGES, *ROOT.glob("*.md"), *ROOT.glob("*/README.md")}
COMPILED_ONLY = re.compile(r"<!-- only compiled: .+ -->\s*\Z")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --- Python ---


def run_block(example: Example) -> None:
    # Blank lines before it, so that a traceback names the line of the page.
    source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    code = compile(source, example.path, "exec")
    if not COMPILED_ONLY.search(example.document.text[: example.region.start]):
        exec(code, example.namespace)


def train_loader() -> DataLoader[torch.Tensor]:
    return DataLoader(RandomDataset(32, 16))


@each_page
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a page runs, after the ones before it, in an empty folder.

    A fragment may use what its reader has or knows: Lightning, the names of this package, a model and its data. What a
    script does as ``__main__`` does not happen, and a block behind ``<!-- only compiled: why -->`` does not run.
    """
    monkeypatch.chdir(tmp_path)
    document = Sybil(parsers=[CodeBlockParser(language="python", evaluator=run_block)]).parse(page)
    document.namespace.update({name: getattr(lightning_resilience, name) for name in lightning_resilience.__all__})
    document.namespace.update({"L": L, "Trainer": L.Trainer, "torch": torch, "__name__": "page"})
    document.namespace.update({"model": BoringModel(), "data": train_loader()})
    for example in document.examples():
        example.evaluate()


def test_a_lightning_cli_takes_the_readmes_yaml(tmp_path: Path) -> None:
    (block,) = fenced(README.read_text(), "yaml")
    (tmp_path / "config.yaml").write_text(block)
    arguments = [f"--config={tmp_path / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path}"]
    made = LightningCLI(BoringModel, run=False, save_config_callback=None, args=arguments)  # type: ignore[no-untyped-call]
    kinds = re.findall(r"lightning_resilience\.(\w+)", block)
    assert [type(each).__name__ for each in made.trainer.callbacks][: len(kinds)] == kinds


# --- commands ---


def fenced(text: str, *languages: str) -> Iterator[str]:
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```", text, flags=re.MULTILINE | re.DOTALL):
        if match[2].strip() in languages:
            yield match[3]


def commands(text: str) -> Iterator[list[str]]:
    for block in fenced(text, "", "bash", "sh", "console", "yaml"):
        for line in block.replace("\\\n", " ").splitlines():
            # Also behind srun, in a job script. What has [...] is a pattern of commands and none.
            match = re.search(r"(?:^|\s)(lightning-resilience (?:launch|slurm|[a-z]+) [^#|>]*)", line)
            if match and not re.match(r"\s*(\[|#)", line) and "[" not in match[1]:
                yield shlex.split(match[1])[1:]


def subparsers() -> dict[str, Any]:
    actions = cli._parser()._actions
    return next(action.choices for action in actions if isinstance(action.choices, dict))


@pytest.mark.parametrize("page", COMMANDS, ids=name_of)
def test_commands_parse(page: Path) -> None:
    text = page.read_text()
    for arguments in commands(text):
        try:
            cli._parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{name_of(page)}: the command line is refused: lightning-resilience {shlex.join(arguments)}")
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"`lightning-resilience\s+([a-z]+)", prose):
        assert match[1] in subparsers(), f"{name_of(page)}: there is no {match[0]}"
    # Most are called by their second word alone, and are fragments of a command line.
    for match in re.finditer(rf"`(?:lightning-resilience\s+)?({'|'.join(subparsers())})\s([^`]*)`", prose):
        own = re.split(r" -- |\.py\b", match[2])[0]
        for option in re.findall(r"(?<!\S)--[a-z-]+", own):
            assert option in subparsers()[match[1]]._option_string_actions, f"{name_of(page)}: {match[0]}"


# --- tables ---


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {heading}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    found = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert found is not None, f"no table below {heading}"
    lines = found[0].strip().splitlines()
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@cache
def generated() -> ModuleType:
    found = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_generated_tables_are_current(page: Path) -> None:
    assert page.read_text() == generated().current(page.read_text()), f"run: python docs/tables.py ({name_of(page)})"


def test_every_generated_table_is_in_one_page() -> None:
    shown = [name for page in generated().PAGES for name in generated().in_page(page.read_text())]
    assert sorted(shown) == sorted(generated().TABLES)
    callbacks = {name for name in lightning_resilience.__all__ if f"options of {name}" in shown}
    assert callbacks == set(lightning_resilience.callbacks.__all__)


def test_a_generated_table_has_every_option_and_default() -> None:
    """An option without description and a description without option are errors; defaults are those of the code."""

    class Described:
        """Example.

        Args:
            one: The first. Default: another word.
            two: The second, on
                two lines | ``here``.
        """

        def __init__(self, one: int | None = None, two: str = "x") -> None: ...

    made = generated()._of_class(Described)().splitlines()
    assert made[2:] == [
        "| `one` | another word | The first. |",
        '| `two` | `"x"` | The second, on two lines \\| `here`. |',
    ]
    Described.__doc__ = (Described.__doc__ or "").replace("two: ", "three: ")
    with pytest.raises(ValueError, match="Described"):
        generated()._of_class(Described)()


def test_every_failure_of_plain_lightning_is_shown_by_a_script() -> None:
    said = [row[0] for row in table(README.read_text(), "Why")]
    tree = ast.parse((ROOT / "benchmarks" / "plain_lightning.py").read_text())
    rows = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ROWS"
    )
    assert isinstance(rows, ast.Dict)
    assert [ast.literal_eval(key) for key in rows.keys if key is not None] == said


@pytest.mark.nvrx
@pytest.mark.parametrize(
    ("heading", "theirs"),
    [
        (
            "FaultTolerance",
            {
                "fault_tolerance_callback": "FaultToleranceCallback",
                "fault_tolerance_sections_callback": "FaultToleranceSectionsCallback",
            },
        ),
        ("StragglerDetection", {"straggler_det_callback": "StragglerDetectionCallback"}),
        (
            "LocalCheckpoint",
            {
                "local_checkpoint_callback": "LocalCheckpointCallback",
                "local_checkpoint_callback ": "HierarchicalCheckpointIO",
            },
        ),
        ("FaultTolerance", {"_utils": "SimulatedFaultParams"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_name_of_nvrx_is_there(heading: str, theirs: dict[str, str]) -> None:
    names = set()
    for module, name in theirs.items():
        found = pytest.importorskip(f"nvidia_resiliency_ext.ptl_resiliency.{module.strip()}")
        names |= set(inspect.signature(getattr(found, name)).parameters)
    text = (ROOT / "docs" / "migrate.md").read_text()
    if "SimulatedFaultParams" in theirs.values():  # the second table of the section
        text = f"## {heading}\n" + text[text.index("| here | NVRx's `SimulatedFaultParams`") :]
    said = {name for row in table(text, heading) for name in re.findall(r"`(\w+)", row[1])}
    assert said == names


# --- log lines ---


@cache
def messages() -> list[re.Pattern[str]]:
    """Everything in the package that could be a message, with its blanks."""
    patterns = set()
    for file in (ROOT / "lightning_resilience").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts: list[str | None] = [node.value]
            elif isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]  # type: ignore[misc]
            else:
                continue
            words = re.sub(r"%[-.\d]*[a-z]", "", "".join(part or "" for part in parts))
            if len(re.findall(r"[A-Za-z]", words)) >= 8 and " " in words.strip():
                pieces = [
                    ".*" if part is None else re.sub(r"%[-\\.\d]*[srdgf]", ".*", re.escape(part)) for part in parts
                ]
                patterns.add("".join(pieces).removeprefix(re.escape("[lightning-resilience] ")))
    return [re.compile(pattern) for pattern in patterns]


@pytest.mark.slow_but_for("docs/what-can-happen.md", "examples/README.md", "docs/index.md")
@each_page
def test_log_lines_are_the_programs(page: Path) -> None:
    """What stands in a block ``log`` behind our name begins as some message of the package does."""
    for block in fenced(page.read_text(), "log"):
        for line in block.splitlines():
            said = re.match(r"\[lightning-resilience\] (?:Hang: rank .*?\) (?:is )?)?(.*)", line)
            assert said is None or any(pattern.match(said[1]) for pattern in messages()), f"{name_of(page)}: {line}"


def test_what_one_will_see_is_shown() -> None:
    """The words in the table of what can happen are in the lines below it, where its first column leads."""
    page = (ROOT / "docs" / "what-can-happen.md").read_text()
    shown = page[page.index("\n## ") :]
    for event, _, words, _ in table(page, ".*"):
        assert not words or words.strip("`") in shown, f"{event}: {words}"


# --- links ---


@cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(LINKED), ids=name_of)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{name_of(page)} links to {target}"


def test_every_name_that_is_exported_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", reference, flags=re.MULTILINE))
    assert {f"lightning_resilience.{name}" for name in lightning_resilience.__all__} <= described
