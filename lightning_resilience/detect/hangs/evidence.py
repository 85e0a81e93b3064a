"""What is known of a rank that does not advance: plain data, gathered by the watchdog and judged by ``verdict``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """One thread of a process.

    Args:
        ident: ``threading.get_ident()``.
        is_main: Whether it is the main thread.
        frames: Its Python stack, innermost frame first; empty for a thread that runs no Python code.
    """

    ident: int
    is_main: bool
    frames: list[Frame]


@dataclass(frozen=True)
class ProcessEvidence:
    """What the kernel knows of a process, and its Python stacks.

    Args:
        pid: Process id on its node.
        state: ``running``, ``sleeping``, ``stopped`` (SIGSTOP), ``traced`` (a debugger holds it), ``uninterruptible``
            (waits in the kernel, mostly for storage), ``gone``.
        cpu_s: CPU seconds that it used while it was watched.
        watched_s: Over how many seconds.
        written_bytes: Bytes that it wrote in that time (``wchar`` of ``/proc/PID/io``).
        threads: Its stacks; empty where it could not leave any.
        children_cpu_s: CPU seconds that the processes used that it has started.
        device_works: Whether its device had work left before and after that; ``None``: nobody has answered for one.
    """

    pid: int
    state: str
    cpu_s: float = 0.0
    watched_s: float = 0.0
    written_bytes: int = 0
    threads: list[Thread] = field(default_factory=list)
    children_cpu_s: float = 0.0
    device_works: bool | None = None


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank.

    Args:
        rank: Its global rank.
        node: Its host.
        process: Its training process.
        section: See ``progress.Section``; ``left``: it has left the fit (ended it, or raised).
        step: ``trainer.global_step``.
        position: The last boundary that it passed, see ``agreement_protocol.Position``.
        seconds: Since its last progress.
        timeout: How many seconds it may take.
        answers: Whether a thread of it that needs no interpreter lock answers; ``None``: it could not be asked.
        python_answers: Whether Python code in another thread of it answers; if that does not while ``answers`` is true,
            something holds the interpreter lock. ``None``: it could not be asked.
        collectives: What the Flight Recorders of its backends have recorded, as torch gives it, merged into one dump;
            ``None``: nothing.
        workers: Its child processes that load data.
    """

    rank: int
    node: str
    process: ProcessEvidence
    section: str
    step: int
    position: tuple[int, int, int, int]
    seconds: float
    timeout: float
    answers: bool | None = None
    python_answers: bool | None = None
    collectives: dict[str, Any] | None = None
    workers: list[ProcessEvidence] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankEvidence:
        """From :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        return RankEvidence(
            **{
                **content,
                "process": _process(content["process"]),
                "position": _position(content["position"]),
                "workers": [_process(worker) for worker in content["workers"]],
            }
        )


def _position(values: list[int]) -> tuple[int, int, int, int]:
    a, b, c, d = values
    return int(a), int(b), int(c), int(d)


def _process(content: dict[str, Any]) -> ProcessEvidence:
    threads = [
        Thread(each["ident"], each["is_main"], [Frame(**frame) for frame in each["frames"]])
        for each in content["threads"]
    ]
    return ProcessEvidence(**{**content, "threads": threads})
