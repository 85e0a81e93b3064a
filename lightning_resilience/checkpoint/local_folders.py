"""The folders of a node's local checkpoints, ``BASE/NODE/RUN/fit-NNN``, and their owners. No torch, no Lightning."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lightning_resilience._files import read_json, write_json
from lightning_resilience.detect.hangs.rank_probe import own_directories
from lightning_resilience.run.run_directory import LOCAL_DIR_VARIABLE

_ORIGIN = "run.json"


def base_folder(given: str | os.PathLike[str] | None) -> Path:
    """The folder ``BASE``, which holds the folders of all nodes.

    Args:
        given: The user's folder; default: the folder of ``launch --local-dir``, otherwise node memory.
    """
    if chosen := given or os.environ.get(LOCAL_DIR_VARIABLE):
        # Several users of a node may give the same folder, but each user's part is private.
        return (Path(chosen).expanduser() / f"local_ckpt-{os.getuid()}").absolute()
    return next((base for base in memory_bases() if base.parent.parent.is_dir()), memory_bases()[-1])


def memory_bases() -> list[Path]:
    """The folders in node memory that :func:`base_folder` may return, best first; they need not exist."""
    return [(own / "local_ckpt").absolute() for own in own_directories()]


@dataclass(frozen=True)
class Origin:
    """The run to which a node's folder of local checkpoints belongs.

    Args:
        run_dir: Its run directory.
        above: :func:`_place` of each folder above it on this node, the nearest first. Later the same path may be
            another storage or not mounted, or another folder in a container that shares this node memory.
    """

    run_dir: Path
    above: list[list[int]]

    @property
    def nearest_above(self) -> Path | None:
        """The nearest existing folder above the run directory; ``None`` if it is not the folder that was noted."""
        for path, place in zip(self.run_dir.parents, self.above, strict=False):
            try:
                return path if _place(path) == place else None
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                break
        return None


def _place(folder: Path) -> list[int]:
    """Device and inode, which distinguish a folder from another one of the same name."""
    about = os.stat(folder)
    return [about.st_dev, about.st_ino]


def note_origin(run_folder: Path, run_dir: Path) -> None:
    """Notes to which run a folder ``BASE/NODE/RUN`` belongs, for a cleanup after the run has been deleted.

    Args:
        run_folder: The folder.
        run_dir: The run directory.
    """
    with contextlib.suppress(OSError):  # if node memory is full, the saves report that
        path = Path(os.path.realpath(run_dir))
        content = {"run_dir": str(path), "above": [_place(each) for each in path.parents]}
        if read_json(run_folder / _ORIGIN) != content:
            write_json(run_folder / _ORIGIN, content)


def read_origin(run_folder: Path) -> Origin | None:
    """The run to which a folder ``BASE/NODE/RUN`` belongs; ``None`` if that is unknown.

    Args:
        run_folder: The folder.
    """
    content = read_json(run_folder / _ORIGIN) or {}
    run_dir, above = content.get("run_dir"), content.get("above")
    return Origin(Path(run_dir), above) if isinstance(run_dir, str) and isinstance(above, list) else None


def remove_empty(run_folder: Path) -> None:
    """Removes a folder ``BASE/NODE/RUN`` if it has no fit left, and then the folder of the node if that is empty.

    Args:
        run_folder: The folder.
    """
    with contextlib.suppress(OSError):
        if os.listdir(run_folder) == [_ORIGIN]:
            (run_folder / _ORIGIN).unlink()
        run_folder.rmdir()  # fails if there are other fits
        run_folder.parent.rmdir()
