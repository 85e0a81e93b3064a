"""``lightning-resilience inspect``: describes and verifies a shard, a generation or the local checkpoints of a node."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_resilience._formatting import table
from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.capacity import format_bytes
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.checkpoint.generations import GENERATION_FOLDER, SHARD_SUFFIX
from lightning_resilience.checkpoint.safe_serialization import tensor_names

_LARGEST = 20  # tensors of a shard that are listed
_MOST_PARTS = 100  # of a generation that are listed
_MOST_NODES = 4096
_RANK = re.compile(r"rank-([0-9]{5,})")
_COMMON = re.compile(r"common-([0-9]{2,})-of-([0-9]{2,})")


def inspect(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Describes local checkpoints and verifies them.

    Args:
        path: A shard, the folder of a generation, that of a fit with all generations that a node keeps of it, or a
            folder above: up to four levels, as is what was given to ``LocalCheckpoint(dir=...)``.

    Returns:
        The text, and whether there is something and all of it is intact. Parts that are not here may be on other nodes:
        they are named, but nothing is wrong with that. Does not raise: what cannot be read is said in the text.
    """
    path = Path(path)
    try:
        lines, good = _inspect(path)
    except OSError as error:
        lines, good = [f"{path} cannot be read: {error.strerror or error}."], False
    except ValueError as error:  # no path at all
        lines, good = [f"{path} cannot be read: {error}."], False
    return "\n".join(map(_printable, lines)), good


def _inspect(path: Path) -> tuple[list[str], bool]:
    if not path.is_dir():
        return _shard(path)
    if GENERATION_FOLDER.fullmatch(path.absolute().name) or any(path.glob(f"*{SHARD_SUFFIX}")):
        return _generation(path)
    folders = _node_folders(path)
    if not folders:
        return [f"There is no local checkpoint in {path}."], False
    lines: list[str] = []
    good = True
    for folder in folders:
        more, fine = _node(folder)
        lines += ["", *more] if lines else more
        good = good and fine
    return lines, good


def _printable(line: str) -> str:
    """Names and texts in a damaged or foreign file may be anything, terminal commands included."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


# A shard


@dataclass
class _Part:
    """A shard, and what has been found."""

    path: Path
    size: int = 0
    header: shard.Header | None = None
    problem: str = ""  # why it is not intact
    gone: bool = False  # retired while it was looked at

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SHARD_SUFFIX)

    @property
    def verdict(self) -> str:
        return f"NO: {self.problem}" if self.problem else "yes"


def _look_at(path: Path, expected: shard.Expected = None) -> _Part:
    part = _Part(path)
    try:
        part.size = path.lstat().st_size
        part.header = shard.verify(path, expected)
    except (CorruptCheckpoint, OSError) as error:
        part.gone = not os.path.lexists(path)
        part.problem = _reason(error)
        try:
            part.header = shard.read_identity(path)  # damaged or foreign: whose is it?
        except (CorruptCheckpoint, OSError):
            pass
    return part


def _reason(error: CorruptCheckpoint | OSError) -> str:
    return error.reason if isinstance(error, CorruptCheckpoint) else error.strerror or str(error)


def _shard(path: Path) -> tuple[list[str], bool]:
    part = _look_at(path)
    lines = [f"{path}", f"intact: {part.verdict}"]
    if part.header is None:
        return lines, False
    header, identity = part.header, part.header.identity
    total = sum(spec.nbytes for spec in header.tensors)
    rows = [
        ["run", identity.run],
        ["fit", str(identity.fit)],
        ["step", str(identity.step)],
        ["generation", identity.generation],
        ["part", identity.part],
        ["world size", str(identity.world_size)],
        ["layout", ", ".join(f"{name}: {value}" for name, value in identity.layout.items()) or "-"],
        ["size", f"{format_bytes(header.size)} ({header.size} bytes)"],
        ["tensors", f"{len(header.tensors)}, {format_bytes(total)}"],
        ["digest", header.digest],
        ["created", header.created],
        ["torch", header.torch_version],
    ]
    width = max(len(name) for name, _ in rows)
    lines += ["", *(f"{name.ljust(width)}  {value}" for name, value in rows)]
    if header.tensors:
        lines += ["", *_tensor_table(header, _names(path, header))]
    return lines, not part.problem


def _tensor_table(header: shard.Header, names: dict[int, str]) -> list[str]:
    largest = sorted(range(len(header.tensors)), key=lambda index: (-header.tensors[index].nbytes, index))[:_LARGEST]
    rows = []
    for index in largest:
        spec = header.tensors[index]
        rows.append(
            [
                str(index),
                names.get(index, ""),
                spec.dtype,
                "x".join(map(str, spec.shape)) or "scalar",
                format_bytes(spec.nbytes) if spec.device == "cpu" else spec.device,
                str(spec.offset),
            ]
        )
    lines = table(["tensor", "name", "type", "shape", "size", "from byte"], rows)
    if len(header.tensors) > len(largest):
        lines.append(f"... and {len(header.tensors) - len(largest)} smaller ones")
    return lines


def _names(path: Path, header: shard.Header) -> dict[int, str]:
    """What the tensors of a shard are in the checkpoint. Only a rank's own part says so, for common ones too."""
    common = _COMMON.fullmatch(header.identity.part)
    number = int(common[1]) if common else -1
    documents = [header.structure]
    if common:
        documents = []
        for other in sorted(path.parent.glob(f"rank-*{SHARD_SUFFIX}"))[:1]:
            try:
                documents.append(shard.read_identity(other, {"generation": header.identity.generation}).structure)
            except (CorruptCheckpoint, OSError):
                pass
    names: dict[int, str] = {}
    for document in documents:
        try:
            found = tensor_names(document["state"])
            for index, (part, position) in enumerate(document["places"]):
                if part == number and index in found:
                    names[position] = found[index]
        except (KeyError, TypeError, ValueError):  # a shard need not come from a save of ours
            pass
    return names


# A generation


@dataclass
class _Generation:
    """The parts of one generation that are in one folder."""

    path: Path
    parts: list[_Part] = field(default_factory=list)

    @property
    def identity(self) -> shard.Identity | None:
        """Whose it is: of a part that is intact, if there is one."""
        headers = [part.header for part in sorted(self.parts, key=lambda part: bool(part.problem)) if part.header]
        return headers[0].identity if headers else None

    @property
    def intact(self) -> list[_Part]:
        return [part for part in self.parts if not part.problem]

    def missing(self) -> tuple[int, int, list[str]]:
        """How many of how many parts are not here intact, and which: ranges of ranks, and common parts."""
        identity = self.identity
        if identity is None:
            return 0, 0, []
        here = {part.name for part in self.intact}
        ranks = sorted(int(found[1]) for name in here if (found := _RANK.fullmatch(name)))
        texts, count, following = [], 0, 0
        for rank in [*ranks, identity.world_size]:
            if rank > following:
                count += rank - following
                last = f" to rank-{rank - 1:05d}" if rank - 1 > following else ""
                texts.append(f"rank-{following:05d}{last}")
            following = max(following, rank + 1)
        commons = identity.layout.get("commons")
        commons = commons if type(commons) is int else 0
        if commons > 0:
            present = {
                int(found[1]) for name in here if (found := _COMMON.fullmatch(name)) and int(found[2]) == commons
            }
            lacking = commons - len([index for index in present if index < commons])
            count += lacking
            if lacking:
                texts.append(f"{lacking} of common-00-of-{commons:02d} to common-{commons - 1:02d}-of-{commons:02d}")
        return count, identity.world_size + max(commons, 0), texts


def _read_generation(path: Path) -> _Generation:
    generation = _Generation(path)
    named = GENERATION_FOLDER.fullmatch(path.absolute().name)
    expected = {"step": int(named[1]), "generation": named[2]} if named else {}
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or not file.name.endswith(SHARD_SUFFIX):
            continue
        part = _look_at(file, {**expected, "part": file.name.removesuffix(SHARD_SUFFIX)})
        if not part.gone:
            generation.parts.append(part)
    _find_strangers(generation)
    return generation


def _find_strangers(generation: _Generation) -> None:
    """Parts of one generation agree in everything but their name; most of them are right."""

    def shared(part: _Part) -> str:
        assert part.header is not None
        identity = part.header.identity
        return (
            f"run {identity.run}, fit {identity.fit}, step {identity.step}, generation {identity.generation}, "
            f"{identity.world_size} ranks, layout {identity.layout}"
        )

    counts = Counter(map(shared, generation.intact))
    for part in generation.intact:
        if (mine := shared(part)) != (most := counts.most_common(1)[0][0]):
            part.problem = f"it does not belong to the others: {mine}, not {most}"


def _generation(path: Path) -> tuple[list[str], bool]:
    generation = _read_generation(path)
    if not generation.parts:
        return [f"There is no part of a generation in {path}."], False
    lines = [f"{path}"]
    if (identity := generation.identity) is not None:
        lines.append(
            f"Generation {identity.generation} of step {identity.step}: fit {identity.fit} of run {identity.run}, "
            f"saved by {identity.world_size} ranks"
        )
        layout = ", ".join(f"{name}: {value}" for name, value in identity.layout.items())
        lines.append(f"Layout: {layout or '-'}")
    bad = [part for part in generation.parts if part.problem]
    shown = [*bad, *generation.intact][:_MOST_PARTS]
    rows = [
        [
            part.name,
            format_bytes(part.size),
            str(len(part.header.tensors)) if part.header else "?",
            part.header.created if part.header else "?",
            part.verdict,
        ]
        for part in sorted(shown, key=lambda part: part.name)
    ]
    lines += ["", *table(["part", "size", "tensors", "created", "intact"], rows)]
    if len(generation.parts) > len(shown):
        lines.append(f"... and {len(generation.parts) - len(shown)} more, all of them intact")
    lines += ["", *_completeness(generation)]
    return lines, not bad


def _completeness(generation: _Generation) -> Iterable[str]:
    count, needed, names = generation.missing()
    if not needed:
        yield "What else belongs to it is not known: no part of it can be read."
    elif not count:
        yield f"Complete: all of its {needed} parts are here and intact."
    else:
        yield f"Not here, or not intact: {count} of {needed} parts. They may be on other nodes."
        yield from _shortened([f"  {name}" for name in names])


def _shortened(lines: Sequence[str], most: int = 20) -> list[str]:
    return [*lines[:most], *([f"  ... and {len(lines) - most} more"] if len(lines) > most else [])]


# A node


def _node_folders(path: Path) -> list[Path]:
    """The folders with generations in or below ``path``: BASE/local_ckpt-UID/NODE/RUN/fit-NNN is the deepest place."""
    level = [path]
    for _ in range(5):
        folders = [folder for folder in level if any(_generations_in(folder))]
        if folders or not level:
            return folders
        below = [entry for folder in level for entry in _subfolders(folder)]
        level = below[:_MOST_NODES]
    return []


def _subfolders(path: Path) -> list[Path]:
    try:
        entries = sorted(path.iterdir())
        return [entry for entry in entries if not entry.is_symlink() and entry.is_dir()]
    except OSError:  # not ours to enter, or gone
        return []


def _generations_in(path: Path) -> list[tuple[int, str, Path]]:
    """Step, name and folder of each, newest first."""
    found = []
    for entry in _subfolders(path):
        if named := GENERATION_FOLDER.fullmatch(entry.name):
            found.append((int(named[1]), named[2], entry))
    return sorted(found, reverse=True)


def _node(path: Path) -> tuple[list[str], bool]:
    rows, problems = [], []
    for step, name, folder in _generations_in(path):
        try:
            generation = _read_generation(folder)
        except FileNotFoundError:  # retired in the meantime
            continue
        count, needed, _ = generation.missing()
        bad = [part for part in generation.parts if part.problem]
        problems += [f"  {folder.name}/{part.path.name}: {part.problem}" for part in bad]
        created = max((part.header.created for part in generation.parts if part.header), default="?")
        rows.append(
            [
                str(step),
                name,
                created,
                str(len(generation.parts)),
                format_bytes(sum(part.size for part in generation.parts)),
                f"NO: {len(bad)} bad" if bad else "yes" if generation.parts else "-",
                "yes" if needed and not count else f"no: {count} of {needed} missing" if needed else "?",
            ]
        )
    head = ["step", "generation", "created", "parts", "size", "intact", "complete here"]
    lines = [f"{path}: {len(rows)} generations, newest first", "", *table(head, rows)]
    if problems:
        lines += ["", "Not intact:", *_shortened(problems)]
    set_aside = [entry for entry in path.glob("quarantine/*") if not entry.name.endswith(".reason.txt")]
    if set_aside:
        lines += ["", f"In quarantine: {len(set_aside)}, with the reasons beside them, in {path / 'quarantine'}"]
    return lines, not problems
