"""The moving picture of a recording.

Of the lines, those of others and of routine are folded; of the time, what is between the moments that matter passes
faster, with the real clock in sight.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from recording import COLUMNS, PROMPT, Output
from svg import CATEGORIES, FONT, escape

ROWS, ROWS_BELOW = 14, 2
FRAMES_PER_S = 10
FAST_S = 5.0
"""How long everything takes that is not shown at its own pace."""
LAST_S = 3.5
"""How long the end is shown."""


# -- what is shown -----------------------------------------------------------------------------------------------------

_OURS = re.compile(r"\[lightning-resilience[^]]*\] ")
_TELLING = {
    "run": r"Run directory",
    "fresh": r"Nothing to resume from",
    "saved": r"Saved step",
    "restart": r"Restart \d",
    "killed": r"was killed by SIGKILL\.$",
    "resumed": r"Resuming from step",
    "finished": r"Finished",
}
"""The lines that are not folded."""


_BATCH = re.compile(r"(Epoch \d+):[^\r\n]*? (\d+)/\d+ \[")


@dataclass
class Screen:
    """The lines of a terminal as they become, each with its kind."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    current: str = ""

    def write(self, text: str) -> None:
        """Shows what a program writes."""
        for part in re.findall(r"\r\n|\n|\r|[^\r\n]+", text):
            if part in ("\n", "\r\n"):
                self._end()
            else:
                self.current = "" if part == "\r" else self.current + part

    def _end(self) -> None:
        line, self.current = self.current, ""
        kind = kind_of(line)
        if kind == "bar":
            line = line[: line.rindex("]") + 1] if "]" in line else line  # Lightning's last line is glued behind it
            if any(same == "bar" and batch(earlier) == batch(line) for earlier, same in self.lines):
                return  # drawn once more when it is closed
            since = next(
                (index for index, (_, kind) in enumerate(self.lines[::-1]) if kind not in ("bar", "folded")), 0
            )
            begin = len(self.lines) - since
            self.lines[begin:] = [each for each in self.lines[begin:] if each[1] != "bar"]  # where it was before
        if kind is not None:
            self.lines.append((line, kind))
        elif line.strip():
            self.lines.append((line, "folded"))

    def shown(self) -> Iterator[tuple[str, str]]:
        """The lines, that which is being written included."""
        current = (self.current, kind_of(self.current) or "")
        for kind, lines in groupby([*self.lines, current], key=itemgetter(1)):
            if kind == "folded":
                count = len([*lines])
                yield f"  … {count} more line{'s' * (count > 1)}", kind
            elif kind:
                yield from lines


def batch(bar: str) -> tuple[str, ...]:
    """How far a progress bar is."""
    found = _BATCH.search(bar)
    return found.groups() if found else ()


def kind_of(line: str) -> str | None:
    """What a line is, or ``None`` if it is folded."""
    if line.startswith(PROMPT.rstrip()):
        return "typed"
    if line.startswith("Epoch "):
        return "bar"
    if _OURS.match(line):
        return next((kind for kind, pattern in _TELLING.items() if re.search(pattern, line)), None)
    return None


# -- time --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """When what happened, in seconds since the recording began."""

    launched: float
    trains: float
    killed: float
    found: float
    restarted: float
    resumed: float
    trains_again: float
    is_back: float
    finished: float
    step_killed: int
    step_resumed: int


def story(training: Output, other: Output) -> Story:
    """Finds it in what the terminals have shown."""
    text, starts = "", []
    for at, data in training:
        starts.append((len(text), at))
        text += data

    def moment(pattern: str) -> tuple[float, re.Match[str]]:
        if (match := re.search(pattern, text)) is not None:
            return next(at for place, at in reversed(starts) if place <= match.start()), match
        raise LookupError(f"the training has not written {pattern}")

    found, words = moment(r"At step (\d+)[^\n]* was killed")
    resumed, step = moment(r"Resuming from step (\d+)")
    bars = [
        (at, (int(epoch.split()[1]), int(number))) for at, data in training for epoch, number in _BATCH.findall(data)
    ]
    furthest = max(place for at, place in bars if at < found)
    return Story(
        launched=next(at for at, data in training if "\n" in data),
        trains=bars[0][0],
        killed=next(at for at, data in reversed(other) if "\n" in data),
        found=found,
        restarted=moment(r"Restart 1")[0],
        resumed=resumed,
        trains_again=next(at for at, _ in bars if at > resumed),
        is_back=next(at for at, place in bars if at > resumed and place > furthest),
        finished=moment(r"Finished: ")[0],
        step_killed=int(words[1]),
        step_resumed=int(step[1]),
    )


def real_times(each: Story, typing: float) -> list[tuple[float, bool]]:
    """The moment that each frame shows, and whether it passes faster there than it did.

    Args:
        each: What happened.
        typing: When somebody begins to type the kill.
    """
    own_pace = [
        (0.0, each.launched + 0.3),
        (each.trains, each.trains + 0.8),
        (typing, each.killed + 0.4),
        (each.found, each.found + 2.0),
        (each.restarted, each.restarted + 2.0),
        (each.resumed, each.is_back + 2.0),
        (each.finished, each.finished),
    ]
    bounds = [own_pace[0]]
    for begin, end in own_pace[1:]:
        if begin <= bounds[-1][1]:
            bounds[-1] = bounds[-1][0], max(end, bounds[-1][1])
        else:
            bounds.append((begin, end))
    faster = sum(begin - end for (_, end), (begin, _) in pairwise(bounds)) / FAST_S
    times, at = [], 0.0
    while at < bounds[-1][0]:
        is_fast = not any(begin <= at < end for begin, end in bounds)
        times.append((at, is_fast))
        at += (faster if is_fast else 1.0) / FRAMES_PER_S
    return [*times, *[(each.finished + 0.1, False)] * round(LAST_S * FRAMES_PER_S)]


# -- the picture -------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _ROW, _CHARACTER = 800, 22, 25, 11.8
_HALF_CHARACTER = 5.2  # of the words below the strip
_TOP = 46
_BELOW = _TOP + ROWS * _ROW + 62
_STRIP = _BELOW + ROWS_BELOW * _ROW + 46
_HEIGHT = _STRIP + 70
_COLOURS = {name: dark for name, (_, dark) in CATEGORIES.items()}


def rows_of(screen: Screen, count: int) -> list[tuple[str, str]]:
    """The last rows of a terminal, and the kind of line that each belongs to."""
    rows = []
    for line, kind in screen.shown():
        wrapped = textwrap.wrap(line, COLUMNS, subsequent_indent="  ", drop_whitespace=kind != "typed")
        rows += [(row, kind) for row in wrapped or [""]]
    return rows[-count:]


def frames(outputs: Sequence[Output], times: Sequence[tuple[float, bool]]) -> list[list[tuple[str, str]]]:
    """The rows of both terminals in each frame."""
    screens, found = [Screen(), Screen()], []
    rest = [list(output) for output in outputs]
    for moment, _ in times:
        for screen, output in zip(screens, rest, strict=True):
            while output and output[0][0] <= moment:
                screen.write(output.pop(0)[1])
        upper, lower = (rows_of(screen, count) for screen, count in zip(screens, (ROWS, ROWS_BELOW), strict=True))
        found.append([*upper, *[("", "")] * (ROWS - len(upper)), *lower, *[("", "")] * (ROWS_BELOW - len(lower))])
    return found


class Player:
    """Shows elements for some of the frames.

    Args:
        count: Of frames.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lengths: set[int] = set()

    def runs(self, states: Sequence[Any]) -> Iterator[tuple[Any, str]]:
        """Each state that is something, and the attributes that show it while it lasts."""
        first = 0
        for state, same in groupby(states):
            length = len([*same])
            if state:
                yield state, self._attributes(first, length)
            first += length

    def _attributes(self, first: int, length: int) -> str:
        kind = "l" if first + length == self.count else "f"
        if length == self.count:
            return "class='l'"
        self._lengths.add(length)
        delay = (first - self.count) / FRAMES_PER_S  # negative: it has been playing since before the page was there
        return f"class='{kind} k{length}' style='animation-delay:{delay:g}s'"

    def style(self) -> str:
        """Without motion, for those who want none, the last frame is shown."""
        seconds = self.count / FRAMES_PER_S
        names = "".join(
            f".k{each}{{animation-name:k{each}}}"
            f"@keyframes k{each}{{0%{{visibility:visible}}{100 * each / self.count:.6f}%,to{{visibility:hidden}}}}"
            for each in sorted(self._lengths)
        )
        play = f".f,.l{{animation:{seconds:g}s step-end infinite}}{names}"
        return f".f{{visibility:hidden}}@media (prefers-reduced-motion:no-preference){{{play}}}"


def picture(training: Output, other: Output) -> str:
    """The picture as SVG.

    Args:
        training: What the terminal of the training has shown.
        other: What the other one has shown.
    """
    each = story(training, other)
    typing = next(at for at, data in other if "k" in data)
    times = real_times(each, typing)
    player = Player(len(times))
    shapes = []
    for index, states in enumerate(zip(*frames([training, other], times), strict=True)):
        y = (_TOP if index < ROWS else _BELOW - ROWS * _ROW) + index * _ROW + 19
        for state, shown in player.runs([state if state[0].strip() else None for state in states]):
            shapes.append(f"<g {shown}>{_row(*state, y)}</g>")
    clocks = [f"{int(moment // 60)}:{moment % 60:04.1f}" for moment, _ in times]
    for clock, shown in player.runs(clocks):
        shapes.append(f"<g {shown}><text class='n' x='{_WIDTH - _LEFT}' y='30' text-anchor='end'>{clock}</text></g>")
    for words, shown in player.runs(["▸▸ faster" if is_fast else None for _, is_fast in times]):
        shapes.append(f"<g {shown}><text class='d' x='{_WIDTH - 120}' y='30' text-anchor='end'>{words}</text></g>")
    scale = (_WIDTH - 2 * _LEFT) / each.finished
    for x, shown in player.runs([f"{_LEFT + min(at, each.finished) * scale:.0f}" for at, _ in times]):
        shapes.append(f"<g {shown}><path class='h' d='M{x} {_STRIP - 5}v32'/></g>")
    strip = "".join(_strip(each))
    title = f"A training in a terminal: rank 1 is killed at step {each.step_killed}; the run resumes from step "
    title += f"{each.step_resumed} and is back {each.is_back - each.killed:.0f} s after the kill"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">
<title>{escape(title)}</title>
<style>{_STYLE}{player.style()}</style>
<rect class="w" width="{_WIDTH}" height="{_HEIGHT}" rx="12"/>
<text class="d" x="{_LEFT}" y="30">terminal 1</text>
<path class="r" d="M0 {_BELOW - 46}h{_WIDTH}"/><text class="d" x="{_LEFT}" y="{_BELOW - 16}">terminal 2</text>
<path class="r" d="M0 {_STRIP - 24}h{_WIDTH}"/>
{strip}
{chr(10).join(shapes)}
</svg>
"""


def _row(text: str, kind: str, y: int) -> str:
    """A row; it is as wide as its characters would be in a terminal, whatever font there is."""
    runs = [(text, kind)]
    if (prefix := _OURS.match(text)) is not None:
        runs = [(prefix[0], "d"), (text[prefix.end() :], kind)]
    found, column = [], 0
    for run, name in runs:
        if run.strip():
            x = _LEFT + _CHARACTER * (column + len(run) - len(run.lstrip()))
            length = _CHARACTER * len(run.strip())
            place = f"x='{x:.1f}' y='{y}' textLength='{length:.1f}'"
            found.append(f"<text class='{name}' {place}>{escape(run.strip())}</text>")
        column += len(run)
    return "".join(found)


def _strip(each: Story) -> Iterator[str]:
    """What the time went into."""
    parts = [
        (0.0, each.launched, "idle", ""),
        (each.launched, each.trains, "imports", "starting"),
        (each.trains, each.killed, "productive", "training"),
        (each.killed, each.restarted, "detection", ""),
        (each.restarted, each.trains_again, "imports", "starting"),
        (each.trains_again, each.is_back, "wasted_progress", ""),
        (each.is_back, each.finished, "productive", "training"),
    ]
    scale = (_WIDTH - 2 * _LEFT) / each.finished
    for begin, end, category, words in parts:
        x, width = _LEFT + begin * scale, (end - begin) * scale
        yield f"<path fill='{_COLOURS[category]}' d='M{x:.1f} {_STRIP}h{width:.1f}v22h-{width:.1f}z'/>"
        if width > 9 * len(words) > 0:
            yield f"<text class='i' x='{x + width / 2:.1f}' y='{_STRIP + 16}' text-anchor='middle'>{words}</text>"
    left, right = _LEFT + each.killed * scale, _LEFT + each.is_back * scale
    yield f"<path class='m' d='M{left:.1f} {_STRIP + 26}v6H{right:.1f}v-6'/>"
    said = f"kill to back: {each.is_back - each.killed:.1f} s, {each.step_killed - each.step_resumed} steps done again"
    middle = max((left + right) / 2, _LEFT + len(said) * _HALF_CHARACTER)
    yield f"<text class='t' x='{middle:.1f}' y='{_STRIP + 54}' text-anchor='middle'>{said}</text>"


_STYLE = (
    "text{font:19.5px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
    "fill:#c9d1d9}.w{fill:#14171b;stroke:#3a414b}.r{stroke:#2e343b}.d,.folded{fill:#7d8794}"
    ".typed{fill:#fff;font-weight:bold}.bar{fill:#9fb6cc}.killed{fill:#ff7a55;font-weight:bold}"
    ".resumed,.finished{fill:#3fd0a4;font-weight:bold}.restart{fill:#8fc0ee;font-weight:bold}"
    ".n{fill:#fff;font-size:22px}.h{stroke:#fff;stroke-width:3}.m{stroke:#c9d1d9;fill:none;stroke-width:1.5}"
    f".t,.i{{fill:#fff;font-family:{FONT}}}.i{{font-size:15px}}"
)
