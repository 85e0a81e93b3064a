"""The evidence about a rank that does not advance: plain data that the watchdog collects and ``verdict`` judges."""

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
        frames: The thread's Python stack, innermost frame first; empty for a thread that runs no Python code.
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
        cpu_s: CPU seconds that the process used while it was watched.
        watched_s: How many seconds it was watched.
        written_bytes: Bytes that it wrote in that time (``wchar`` of ``/proc/PID/io``).
        threads: Its threads with their stacks; empty where the process could not write its stacks.
        children_cpu_s: CPU seconds that its child processes used in that time.
        device_works: Whether its device had work left both before and after that time; ``None``: no answer.
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
        section: See ``progress.Section``; ``left``: the rank has left the fit (ended it, or raised).
        step: ``trainer.global_step``.
        position: The last boundary that the rank passed, see ``agreement_protocol.Position``.
        seconds: How many seconds ago it last made progress.
        timeout: How many seconds it may take to make progress.
        answers: Whether a thread of the rank that needs no interpreter lock answers; ``None``: it could not be asked.
        python_answers: Whether Python code in another thread of the rank answers. If this is false while ``answers`` is
            true, something holds the interpreter lock. ``None``: it could not be asked.
        collectives: The records of its backends' Flight Recorders in torch's format, merged into one dump; ``None``:
            nothing was recorded.
        workers: The rank's child processes that load data.
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
        """The evidence as plain types."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> RankEvidence:
        """Restores the evidence from the result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: If ``content`` is no such result.
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
