"""The drawing of launcher, ranks, watchdog and storage: what is lost, what is left, who starts the run again."""

from __future__ import annotations

from dataclasses import dataclass

from svg import card, text

_WIDTH, _LEFT, _ROW = 820, 20, 222
_NODE, _GAP, _TEXT = 226, 14, 512
_NODES = [f"{node} {part}" for node in (0, 1) for part in ("node", "rank 0", "rank 1", "own", "copy", "watchdog")]


@dataclass(frozen=True)
class Case:
    """One row of the drawing.

    Attributes:
        title: What happens.
        lines: What is found, left and done then.
        lost: Names of parts that are gone.
        sources: The parts that the ranks resume from.
    """

    title: str
    lines: list[tuple[str, str]]
    lost: list[str]
    sources: list[str]


CASES = [
    Case(
        "A rank dies or hangs",
        [
            ("noticed by", "the watchdog of its node"),
            ("what is left", "every rank's state in node memory"),
            ("started again by", "the launcher, in the same job"),
        ],
        ["0 rank 1"],
        ["0 own", "1 own"],
    ),
    Case(
        "A node is lost",
        [
            ("noticed by", "the other nodes"),
            ("what is left", "its state in a neighbour's memory"),
            ("started again by", "the launchers left, or a new job"),
        ],
        [name for name in _NODES if name.startswith("0")],
        ["1 own", "1 copy"],
    ),
    Case(
        "The whole job is gone",
        [
            ("noticed by", "the scheduler, or you"),
            ("what is left", "the run directory's checkpoints"),
            ("started again by", "the same command, on any nodes"),
        ],
        ["launcher", *_NODES],
        ["run directory"],
    ),
]


def draw() -> str:
    """The drawing."""
    shapes = []
    for index, case in enumerate(CASES):
        top = 18 + index * _ROW
        if index:
            shapes.append(f'<path class="line-rule" d="M{_LEFT} {top - 9}H{_WIDTH - _LEFT}"/>')
        shapes.append(f'<g transform="translate({_LEFT} {top})">{"".join(_scene(case))}</g>')
        shapes.append(text(_TEXT, top + 28, case.title, "title"))
        for place, (head, words) in enumerate(case.lines):
            y = top + 62 + 50 * place
            shapes.append(text(_TEXT, y, head, "soft small"))
            shapes.append(text(_TEXT, y + 20, words, "left" if head == "what is left" else ""))
    said = ". ".join(f"{case.title}: {', '.join(f'{head} {words}' for head, words in case.lines)}" for case in CASES)
    style = (
        "text{font-size:15px}.small{font-size:13px}text.left{font-weight:600;fill:var(--good)}"
        ".lost{fill:none;stroke:var(--bad);stroke-dasharray:4 3}text.gone{fill:var(--bad)}"
        "text.on{fill:#fff;font-weight:600}text.in{font-size:13.5px}"
    )
    return card(_WIDTH, 12 + len(CASES) * _ROW, said, "\n".join(shapes), style)


def _scene(case: Case) -> list[str]:
    """Launcher, two nodes and the run directory."""
    wide = 2 * _NODE + _GAP
    shapes = [_box(case, "launcher", 0, 4, wide, 28, "launcher, on each node", "panel")]
    for node in (0, 1):
        x, state = node * (_NODE + _GAP), "0, 1" if node else "2, 3"
        shapes.append(_box(case, f"{node} node", x, 42, _NODE, 106, "", "panel"))
        for rank in (0, 1):
            shapes.append(
                _box(case, f"{node} rank {rank}", x + 10 + 62 * rank, 52, 56, 30, f"rank {2 * node + rank}", "start")
            )
        shapes.append(_box(case, f"{node} watchdog", x + 138, 52, 78, 30, "watchdog", "paper"))
        shapes.append(text(x + 10, 102, "node memory", "small gone" if f"{node} node" in case.lost else "small soft"))
        shapes.append(_box(case, f"{node} own", x + 10, 109, 100, 30, "own state", "rule"))
        shapes.append(_box(case, f"{node} copy", x + 116, 109, 100, 30, f"copy of {state}", "rule"))
    return [*shapes, _box(case, "run directory", 0, 158, wide, 34, "run directory, on shared storage", "rule")]


def _box(case: Case, name: str, x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    """A part: as it is, lost, or what the run resumes from."""
    is_lost, is_source = name in case.lost, name in case.sources
    kind = "lost" if is_lost else "good" if is_source else colour
    ground = "" if is_lost else ' style="stroke:var(--rule)"'
    on = "gone" if is_lost else "on" if is_source or colour == "start" else ""
    found = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"{ground}/>'
    return found + (text(x + width / 2, y + height / 2 + 5, words, f"in {on}", "middle") if words else "")
