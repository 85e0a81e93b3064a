"""What ``--json`` prints: the keys of each command, and how its content becomes text."""

from __future__ import annotations

import json
import math
from typing import Any

SCHEMA = 1
"""Version of what ``--json`` prints. New keys do not change it; another meaning of a key would."""

KEYS = {
    "report": {
        "schema": "version of this format",
        "run_dir": "the run directory",
        "began": "first launch, seconds since the epoch; `null`: nothing has run",
        "ended": "end of the run, or now, seconds since the epoch; `null`: nothing has run",
        "is_ongoing": "whether it runs, or waits for nodes",
        "outcome": "`finished`, `interrupted`, `failed` or `halted`; `null`: none recorded",
        "reason": "why; `null`: none recorded",
        "ranks": "most ranks that it had at a time; 0: no process has recorded its time",
        "rank_seconds": "time of all ranks from `began` to `ended`",
        "goodput": "share of new steps in all time but `idle`, 0 to 1; `null`: not known",
        "ettr": "the same with data, callbacks, validation and saves",
        "losses": "what was lost, the largest first",
        "losses[].name": "cause of interruptions, or category; `first start`: what it took to start at first",
        "losses[].interruptions": "how many; 0: it is no cause of interruptions",
        "losses[].rank_seconds": "rank-seconds",
        "losses[].share": "share in all time but `idle`, 0 to 1",
        "losses[].node": "node with more than half of it; `null`: none",
        "losses[].categories": "rank-seconds of the categories of which it consists",
        "interruptions": "interruptions, oldest first",
        "interruptions[].time": "when it was found, else when the workers ended, seconds since the epoch",
        "interruptions[].cause": "`killed`, `hang`, `preempted`, `NaN`, `straggler`, `disk`, `script`, `crash` or "
        "`launcher killed`",
        "interruptions[].reason": "what was recorded about it",
        "interruptions[].node": "node on which it began; `null`: not known, or all",
        "interruptions[].rank_seconds": "what it has cost; `null`, as its parts: its workers have recorded no times",
        "interruptions[].detect": "rank-seconds from the last sign of life to the verdict",
        "interruptions[].end": "rank-seconds until the processes had ended",
        "interruptions[].start": "rank-seconds of queue, launch and start of the next workers, up to their first step",
        "interruptions[].restore": "rank-seconds of choosing and loading the checkpoint and the position in the data",
        "interruptions[].redo": "rank-seconds of steps done again and of what was not ended",
        "interruptions[].steps_lost": "steps done again; `null`: not known",
        "interruptions[].is_lower_bound": "whether they may be more: nobody has recorded how far the workers were",
        "interruptions[].resumed_step": "step from which the run went on; `null`: not known",
        "interruptions[].seconds_lost": "from the save that was resumed until training went on from it; `null`: it did "
        "not",
        "repeated": "failures that came more than once, as sentences",
        "categories": "rank-seconds of every category",
        "timeline": "all [events](ledger.md#on-disk)",
    },
}
"""What each key means, by command."""


def to_json(content: dict[str, Any]) -> str:
    """The text of what a command shows, in one line.

    Args:
        content: With the keys in :data:`KEYS`.
    """
    return json.dumps(_without_nan({"schema": SCHEMA, **content}), allow_nan=False)


def _without_nan(value: Any) -> Any:
    """JSON has no numbers that are not finite, and a ledger of Python's may have."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
