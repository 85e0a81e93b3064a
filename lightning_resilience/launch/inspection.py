"""``lightning-resilience inspect``: describes and verifies a shard, a generation or the local checkpoints of a node.

Imports torch, unlike the other views: the command line imports this module only for the command itself.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience._formatting import format_bytes, printable, table
from lightning_resilience.checkpoint import shard
from lightning_resilience.checkpoint.checkpoint_file import CorruptCheckpoint
from lightning_resilience.checkpoint.generations import GENERATION_FOLDER, SHARD_SUFFIX
from lightning_resilience.checkpoint.safe_serialization import tensor_names
from lightning_resilience.launch.json_output import to_json

_MAX_TENSORS = 20
_MAX_SHARDS = 100
_MAX_PROBLEMS = 20
_MAX_FOLDERS = 4096
_RANK = re.compile(r"rank-([0-9]{5,})")
_REPLICATED = re.compile(r"common-([0-9]{2,})-of-([0-9]{2,})")


def inspect(path: str | os.PathLike[str], as_json: bool = False) -> tuple[str, bool]:
    """Describes local checkpoints and verifies them.

    Args:
        path: A shard, the folder of a generation, the folder of a fit with its generations, or a folder up to four
            levels above, such as the one given to ``LocalCheckpoint(dir=...)``.
        as_json: Whether to return JSON for programs, see :data:`.json_output.KEYS`.

    Returns:
        The text, and whether a checkpoint exists and is fully intact. Shards that are missing here, and may be on other
        nodes, are named but are no error. This function does not raise: the text names what cannot be read.
    """
    path = Path(path)
    file: _ShardFile | None = None
    folders: dict[Path, list[_Generation]] = {}
    lines, problem = [], None
    try:
        if not path.is_dir():
            file = _read_shard(path)
            lines = _shard(file)
        elif GENERATION_FOLDER.fullmatch(path.absolute().name) or any(path.glob(f"*{SHARD_SUFFIX}")):
            generation = _read_generation(path)
            folders = {path: [generation]}
            lines = _generation(generation)
            problem = None if generation.shards else f"There is no shard of a generation in {path}."
        else:
            folders = {folder: _read_generations(folder) for folder in _node_folders(path)}
            lines = [line for folder, each in folders.items() for line in ("", *_node(folder, each))][1:]
            problem = None if folders else f"There is no local checkpoint in {path}."
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read: {_reason(error)}."
    generations = [each for found in folders.values() for each in found]
    is_intact = problem is None and not (file and file.problem) and not any(each.bad for each in generations)
    if not as_json:
        return "\n".join(map(printable, lines if problem is None else [problem])), is_intact
    found = {
        "path": str(path),
        "is_intact": is_intact,
        "problem": problem,
        "shard": file and _content_of_shard(file),
        "generations": [_content_of_generation(each) for each in generations],
        "quarantine": [str(entry) for folder in folders for entry in _set_aside(folder)],
    }
    return to_json(found), is_intact


def _content_of_shard(file: _ShardFile) -> dict[str, Any]:
    header = file.header
    names = _names(file.path, header) if header else {}
    return {
        **_summary(file),
        "identity": header and vars(header.identity),
        "digest": header and header.digest,
        "torch": header and header.torch_version,
        "tensors": [
            {
                "name": names.get(index),
                "type": spec.dtype,
                "shape": spec.shape,
                "size": spec.nbytes,
                "from": spec.offset,
            }
            for index, spec in enumerate(header.tensors if header else ())
        ],
    }


def _content_of_generation(each: _Generation) -> dict[str, Any]:
    count, needed, names = each.missing()
    return {
        "path": str(each.path),
        "identity": each.identity and vars(each.identity),
        "needed": needed or None,
        "missing": count,
        "missing_shards": names,
        "shards": [_summary(file) for file in each.shards],
    }


def _summary(file: _ShardFile) -> dict[str, Any]:
    created = file.header and file.header.created
    return {"path": str(file.path), "size": file.size, "created": created, "problem": file.problem or None}


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)


# A shard


@dataclass
class _ShardFile:
    """A shard, and what is wrong with it."""

    path: Path
    size: int = 0
    header: shard.Header | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SHARD_SUFFIX)

    @property
    def verdict(self) -> str:
        return f"NO: {self.problem}" if self.problem else "yes"


def _read_shard(path: Path, expected: shard.Expected = None) -> _ShardFile:
    file = _ShardFile(path)
    try:
        file.size = path.lstat().st_size
        file.header = shard.verify(path, expected)
    except (CorruptCheckpoint, OSError) as error:
        file.problem = _reason(error)
        try:
            file.header = shard.read_identity(path)  # damaged or foreign: its header may still identify it
        except (CorruptCheckpoint, OSError):
            pass
    return file


def _shard(file: _ShardFile) -> list[str]:
    lines = [f"{file.path}", f"intact: {file.verdict}"]
    if (header := file.header) is None:
        return lines
    rows = {
        **{name.replace("_", " "): value for name, value in vars(header.identity).items()},
        "layout": _layout(header.identity),
        "size": f"{format_bytes(header.size)} ({header.size} bytes)",
        "tensors": f"{len(header.tensors)}, {format_bytes(sum(spec.nbytes for spec in header.tensors))}",
        "digest": header.digest,
        "created": header.created,
        "torch": header.torch_version,
    }
    lines += ["", *(f"{name:<10}  {value}" for name, value in rows.items())]
    if header.tensors:
        lines += ["", *_tensor_table(header, _names(file.path, header))]
    return lines


def _layout(identity: shard.Identity) -> str:
    return ", ".join(f"{name}: {value}" for name, value in identity.layout.items()) or "-"


def _tensor_table(header: shard.Header, names: dict[int, str]) -> list[str]:
    largest = sorted(enumerate(header.tensors), key=lambda item: -item[1].nbytes)[:_MAX_TENSORS]
    rows = [
        [
            str(index),
            names.get(index, ""),
            spec.dtype,
            "x".join(map(str, spec.shape)) or "scalar",
            format_bytes(spec.nbytes) if spec.device == "cpu" else spec.device,
            str(spec.offset),
        ]
        for index, spec in largest
    ]
    lines = table(["tensor", "name", "type", "shape", "size", "from byte"], rows)
    return _shortened(lines, len(header.tensors) - len(largest), "smaller ones")


def _names(path: Path, header: shard.Header) -> dict[int, str]:
    """The names of a shard's tensors. Rank shards contain them, also those of the replicated shards beside them."""
    replicated = _REPLICATED.fullmatch(header.identity.part)
    number, document = int(replicated[1]) if replicated else -1, header.structure
    try:
        if replicated:
            beside = min(path.parent.glob(f"rank-*{SHARD_SUFFIX}"))
            document = shard.read_identity(beside, {"generation": header.identity.generation}).structure
        names = tensor_names(document["state"])
        places = enumerate(document["places"])
        return {position: names[index] for index, (part, position) in places if part == number and index in names}
    except (OSError, KeyError, TypeError, ValueError):  # no rank shard beside it, or one of another program
        return {}


def _shortened(lines: list[str], count: int, what: str = "more") -> list[str]:
    return [*lines, f"... and {count} {what}"] if count > 0 else lines


# A generation


@dataclass
class _Generation:
    """The shards of one generation that are in one folder."""

    path: Path
    shards: list[_ShardFile] = field(default_factory=list)

    @property
    def identity(self) -> shard.Identity | None:
        """Identity of an intact shard, or of a damaged one with a readable header; ``None``: there is none."""
        return next((file.header.identity for file in [*self.intact, *self.bad] if file.header), None)

    @property
    def intact(self) -> list[_ShardFile]:
        return [file for file in self.shards if not file.problem]

    @property
    def bad(self) -> list[_ShardFile]:
        return [file for file in self.shards if file.problem]

    def missing(self) -> tuple[int, int, list[str]]:
        """How many shards are missing or not intact, how many there should be, and which ones are missing."""
        if (identity := self.identity) is None:
            return 0, 0, []
        here = [file.name for file in self.intact]
        ranks = sorted(int(found[1]) for name in here if (found := _RANK.fullmatch(name)))
        texts, count, following = [], 0, 0
        for rank in [*ranks, identity.world_size]:
            if rank > following:
                count += rank - following
                last = f" to rank-{rank - 1:05d}" if rank - 1 > following else ""
                texts.append(f"rank-{following:05d}{last}")
            following = max(following, rank + 1)
        replicated = identity.layout.get("commons")
        replicated = replicated if type(replicated) is int else 0
        found_here = [name for name in here if (found := _REPLICATED.fullmatch(name)) and int(found[2]) == replicated]
        if (missing := replicated - len(found_here)) > 0:
            count += missing
            texts.append(
                f"{missing} of common-00-of-{replicated:02d} to common-{replicated - 1:02d}-of-{replicated:02d}"
            )
        return count, identity.world_size + max(replicated, 0), texts


def _read_generation(path: Path) -> _Generation:
    generation = _Generation(path)
    named = GENERATION_FOLDER.fullmatch(path.absolute().name)
    expected = {"step": int(named[1]), "generation": named[2]} if named else {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or not entry.name.endswith(SHARD_SUFFIX):
            continue
        file = _read_shard(entry, {**expected, "part": entry.name.removesuffix(SHARD_SUFFIX)})
        if os.path.lexists(entry):  # otherwise it was retired meanwhile
            generation.shards.append(file)
    _find_strangers(generation)
    return generation


def _find_strangers(generation: _Generation) -> None:
    """Marks shards that do not match the majority: identities of one generation differ only in ``part``."""

    def shared(file: _ShardFile) -> str:
        fields = vars(file.header.identity) if file.header else {}
        return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "part")

    counts = Counter(map(shared, generation.intact))
    for file in generation.intact:
        if (own := shared(file)) != (most := counts.most_common(1)[0][0]):
            file.problem = f"it does not match the other shards: {own}, not {most}"


def _generation(generation: _Generation) -> list[str]:
    lines = [f"{generation.path}"]
    if (identity := generation.identity) is not None:
        lines += [
            f"Generation {identity.generation} of step {identity.step}: fit {identity.fit} of run {identity.run}, "
            f"saved by {identity.world_size} ranks",
            f"Layout: {_layout(identity)}",
        ]
    shown = [*generation.bad, *generation.intact][:_MAX_SHARDS]
    rows = [
        [
            file.name,
            format_bytes(file.size),
            str(len(file.header.tensors)) if file.header else "?",
            file.header.created if file.header else "?",
            file.verdict,
        ]
        for file in sorted(shown, key=lambda file: file.name)
    ]
    listed = table(["shard", "size", "tensors", "created", "intact"], rows)
    lines += ["", *_shortened(listed, len(generation.shards) - len(shown), "more, all of them intact"), ""]
    count, needed, names = generation.missing()
    if not needed:
        lines.append("Its other shards are not known, because none of its shards can be read.")
    elif not count:
        lines.append(f"Complete: all of its {needed} shards are present and intact.")
    else:
        lines.append(f"Missing or damaged: {count} of {needed} shards. Missing ones may be on other nodes.")
        lines += _shortened([f"  {name}" for name in names[:_MAX_PROBLEMS]], len(names) - _MAX_PROBLEMS)
    return lines


# A node


def _node_folders(path: Path) -> list[Path]:
    """The folders with generations in or below ``path``: BASE/local_ckpt-UID/NODE/RUN/fit-NNN is the deepest place."""
    level = [path]
    for _ in range(5):
        if folders := [folder for folder in level if _generations_in(folder)]:
            return folders
        level = [below for folder in level for below in _subfolders(folder)][:_MAX_FOLDERS]
    return []


def _subfolders(path: Path) -> list[Path]:
    try:
        return [entry for entry in sorted(path.iterdir()) if not entry.is_symlink() and entry.is_dir()]
    except OSError:  # this user may not enter it, or it is gone
        return []


def _generations_in(path: Path) -> list[Path]:
    """The folders of generations, newest first: names sort by step."""
    return [entry for entry in reversed(_subfolders(path)) if GENERATION_FOLDER.fullmatch(entry.name)]


def _read_generations(path: Path) -> list[_Generation]:
    found = []
    for folder in _generations_in(path):
        with suppress(FileNotFoundError):  # retired meanwhile
            found.append(_read_generation(folder))
    return found


def _set_aside(path: Path) -> list[Path]:
    return [entry for entry in sorted(path.glob("quarantine/*")) if not entry.name.endswith(".reason.txt")]


def _node(path: Path, generations: Sequence[_Generation]) -> list[str]:
    rows, problems = [], []
    for each in generations:
        count, needed, _ = each.missing()
        folder, shards, bad = each.path, each.shards, each.bad
        problems += [f"  {folder.name}/{file.path.name}: {file.problem}" for file in bad]
        step, name = GENERATION_FOLDER.fullmatch(folder.name).groups()  # type: ignore[union-attr]
        rows.append(
            [
                str(int(step)),
                name,
                max((file.header.created for file in shards if file.header), default="?"),
                str(len(shards)),
                format_bytes(sum(file.size for file in shards)),
                f"NO: {len(bad)} bad" if bad else "yes" if shards else "-",
                "yes" if needed and not count else f"no: {count} of {needed} missing" if needed else "?",
            ]
        )
    head = ["step", "generation", "created", "shards", "size", "intact", "complete here"]
    lines = [f"{path}: {len(rows)} generations, newest first", "", *table(head, rows)]
    if problems:
        lines += ["", "Not intact:", *_shortened(problems[:_MAX_PROBLEMS], len(problems) - _MAX_PROBLEMS)]
    if set_aside := _set_aside(path):
        lines += ["", f"In quarantine: {len(set_aside)}, with the reasons beside them, in {path / 'quarantine'}"]
    return lines
