"""What the pictures share: a card that is readable on light and dark pages, and colours."""

from __future__ import annotations

from xml.sax.saxutils import escape

from lightning_resilience.launch.report_page import GROUPS

FONT = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
CATEGORIES = {name: colours for group in GROUPS.values() for name, colours in group.items()}
"""The colours of the report's page, on light and dark ground."""

_COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "panel": ("#f3f5f7", "#1f242a"),
    "rule": ("#d5d9df", "#3a414b"),
    "ink": ("#1a1d21", "#e8eaed"),
    "soft": ("#5c636d", "#a3acb7"),
    "good": CATEGORIES["productive"],
    "bad": CATEGORIES["wasted_progress"],
    "start": CATEGORIES["imports"],
    "other": ("#a9b0bb", "#717986"),
}


def card(width: int, height: int, title: str, body: str, style: str = "") -> str:
    """A picture on a ground of its own, since the page around it need not follow the reader's colour scheme.

    Args:
        width: Of the drawing; it is scaled to the page.
        height: Of the drawing.
        title: What is seen, for those who do not see it.
        body: Elements; classes named after the colours fill them, ``line-`` before the name strokes them.
        style: More rules.
    """
    schemes = [";".join(f"--{name}:{both[index]}" for name, both in _COLOURS.items()) for index in (0, 1)]
    fills = "".join(f".{name}{{fill:var(--{name})}}.line-{name}{{stroke:var(--{name});fill:none}}" for name in _COLOURS)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>{escape(title)}</title>
<style>:root{{{schemes[0]}}}@media (prefers-color-scheme:dark){{:root{{{schemes[1]}}}}}
text{{font:16px {FONT};fill:var(--ink)}}text.soft{{fill:var(--soft)}}.title{{font-size:18px;font-weight:600}}{fills}
{style}</style>
<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" style="stroke:var(--rule)"/>
{body}
</svg>
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text.

    Args:
        x: Where its anchor is.
        y: Of its base line.
        words: What it says.
        kind: Its classes.
        anchor: ``start``, ``middle`` or ``end``.
    """
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
