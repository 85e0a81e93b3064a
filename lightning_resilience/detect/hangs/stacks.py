"""Reads Python stacks that ``faulthandler`` has written, and finds the place in a stack that explains a hang.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_resilience.detect.hangs.evidence import Frame, Thread

# `Stack` begins a dump of a single thread; a free-threaded interpreter can give no more. Python 3.14 adds the thread's
# name. Not anchored at its start: a truncated dump has no line end, and the next dump follows it immediately.
_HEADER = re.compile(
    r"(?:(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)(?: \[.*\])?|Stack) \(most recent call first\):$"
)
_FRAME = re.compile(r'^  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>[0-9]+|\?\?\?) in (?P<function>.+)$')

_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/(?P<path>.+)$")
_STANDARD = re.compile(r"^(?:.*/lib/python3\.[0-9]+t?/(?P<path>(?!site-packages/).+)|<frozen (?P<module>.+)>)$")
_FRAMEWORK = frozenset(
    {"torch", "torchdata", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_resilience"}
)
_STOPWATCH = "lightning_resilience/detect/hangs/comm_wait.py"  # wraps every wait of Python code
_HERE = str(Path(__file__).absolute().parents[3]) + os.sep


def parse_stacks(text: str, main_ident: int) -> list[Thread]:
    """The threads of a process, from what ``faulthandler`` wrote for Python 3.10 to 3.14.

    Args:
        text: One dump, or several dumps one after another. The last dump with the main thread counts: a truncated dump
            mostly lacks this thread, because ``faulthandler`` writes the newest thread first.
        main_ident: ``threading.main_thread().ident`` of the process.

    Returns:
        The threads in the order of the dump, or an empty list if the text holds none. Text that is not part of a Python
        stack is ignored, such as the C stack that Python 3.14 adds.
    """
    dumps = [threads for threads in _dumps(text, main_ident) if threads]
    whole = [threads for threads in dumps if any(thread.is_main for thread in threads)]
    return (whole or dumps or [[]])[-1]


def _dumps(text: str, main_ident: int) -> Iterator[list[Thread]]:
    threads: list[Thread] = []
    frames: list[Frame] | None = None
    after_blank = False
    # A last line without a line end may be incomplete.
    for line in text.split("\n")[:-1]:
        if (header := _HEADER.search(line)) is not None:
            if not after_blank:  # within a dump, an empty line goes before every thread but the first
                yield threads
                threads = []
            frames = []
            # Signals are nearly always handled by the main thread.
            ident = int(header["ident"], 16) if header["ident"] else main_ident
            threads.append(Thread(ident=ident, is_main=ident == main_ident, frames=frames))
        elif (frame := _FRAME.match(line)) is not None and frames is not None:
            number = 0 if frame["line"] == "???" else int(frame["line"])
            found = Frame(file=frame["file"] or "???", line=number, function=frame["function"])
            if short_path(found) != _STOPWATCH:
                frames.append(found)
        elif not line.startswith("  "):  # the C stack, or other output; "  ..." stands for further frames
            frames = None
        after_blank = not line
    yield threads


def short_path(frame: Frame) -> str:
    """The file of a frame: from its package on if installed, relative to the standard library, or the file name."""
    if (installed := _INSTALLED.match(frame.file)) is not None:
        return installed["path"]
    if frame.file.startswith(_HERE + "lightning_resilience" + os.sep):
        return frame.file[len(_HERE) :]
    if (standard := _STANDARD.match(frame.file)) is not None:
        return standard["path"] or standard["module"]
    return os.path.basename(frame.file)


def is_standard(frame: Frame) -> bool:
    """Whether a frame is in the standard library."""
    return _INSTALLED.match(frame.file) is None and _STANDARD.match(frame.file) is not None


def is_own(frame: Frame) -> bool:
    """Whether a frame is in the user's own code: not in torch, Lightning, this package or the standard library."""
    if is_standard(frame):
        return False
    path = short_path(frame)
    return "/" not in path or path.split("/")[0] not in _FRAMEWORK


def show(frame: Frame) -> str:
    """A frame as ``function (file.py:line)``."""
    return f"{frame.function} ({short_path(frame)}:{frame.line})"


def inner(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames of a process without its parent's: a forked child's stack contains these."""
    for index, frame in enumerate(frames):
        if frame.function == "_bootstrap" and short_path(frame) == "multiprocessing/process.py":
            return frames[:index]
    return frames


def place(frames: Sequence[Frame]) -> str:
    """The readable place of a stack: the innermost frame of the user's code, and the library function that it called.

    A C function has no frame: ``time.sleep`` shows as the function that calls it.

    Args:
        frames: The stack, innermost frame first.

    Returns:
        Such as ``training_step (train.py:41)``, or ``fetch (torch/utils/data/_utils/fetch.py:54) called from
        training_step (train.py:12)``; empty if there are no frames.
    """
    frames = inner(frames)
    own = next((index for index, frame in enumerate(frames) if is_own(frame)), None)
    if own == 0:
        return show(frames[0])
    within = frames[:own]
    if not within:
        return ""
    # A wait ends in a lock or socket of the standard library; the function that calls it explains more.
    called = next((frame for frame in within if not is_standard(frame)), within[0])
    return show(called) if own is None else f"{show(called)} called from {show(frames[own])}"
