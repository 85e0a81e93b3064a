"""Where a node keeps local checkpoints, ``BASE/NODE/RUN/fit-NNN``, and whose they are. No torch, no Lightning."""

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
    """The folder with those of all nodes.

    Args:
        given: The folder that was asked for; default: that of ``launch --local-dir``, else node memory.
    """
    if chosen := given or os.environ.get(LOCAL_DIR_VARIABLE):
        # Users of a node may be given the same folder, and what is in ours nobody else may enter.
        return (Path(chosen).expanduser() / f"local_ckpt-{os.getuid()}").absolute()
    return next((base for base in memory_bases() if base.parent.parent.is_dir()), memory_bases()[-1])


def memory_bases() -> list[Path]:
    """Where :func:`base_folder` may be in node memory, best first; they need not exist."""
    return [(own / "local_ckpt").absolute() for own in own_directories()]


@dataclass(frozen=True)
class Origin:
    """The run to which a node's folder of local checkpoints belongs.

    Args:
        run_dir: Its run directory.
        above: The folders above it, the nearest first, as :func:`_place` has them on this node. Another storage may be
            mounted there later, or none; and in a container which has the same node memory, another folder.
    """

    run_dir: Path
    above: list[list[int]]

    @property
    def nearest_above(self) -> Path | None:
        """The nearest folder that is left above the run directory; ``None``: another one is there than was."""
        for path, place in zip(self.run_dir.parents, self.above, strict=False):
            try:
                return path if _place(path) == place else None
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                break
        return None


def _place(folder: Path) -> list[int]:
    """Tells a folder from another one of the same name."""
    about = os.stat(folder)
    return [about.st_dev, about.st_ino]


def note_origin(run_folder: Path, run_dir: Path) -> None:
    """Notes to which run a folder ``BASE/NODE/RUN`` belongs, for those who clean up when the run has gone.

    Args:
        run_folder: The folder.
        run_dir: The run directory.
    """
    with contextlib.suppress(OSError):  # node memory is full: the saves say so
        path = Path(os.path.realpath(run_dir))
        content = {"run_dir": str(path), "above": [_place(each) for each in path.parents]}
        if read_json(run_folder / _ORIGIN) != content:
            write_json(run_folder / _ORIGIN, content)


def read_origin(run_folder: Path) -> Origin | None:
    """To which run a folder ``BASE/NODE/RUN`` belongs; ``None``: it is not known.

    Args:
        run_folder: The folder.
    """
    content = read_json(run_folder / _ORIGIN) or {}
    run_dir, above = content.get("run_dir"), content.get("above")
    return Origin(Path(run_dir), above) if isinstance(run_dir, str) and isinstance(above, list) else None


def remove_empty(run_folder: Path) -> None:
    """Removes a folder ``BASE/NODE/RUN`` in which there is no fit any more, and that of the node.

    Args:
        run_folder: The folder.
    """
    with contextlib.suppress(OSError):
        if os.listdir(run_folder) == [_ORIGIN]:
            (run_folder / _ORIGIN).unlink()
        run_folder.rmdir()  # not if there are other fits
        run_folder.parent.rmdir()
