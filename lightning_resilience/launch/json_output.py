"""The output of ``--json``: the keys of each command, and how content becomes text."""

from __future__ import annotations

import json
import math
from typing import Any

SCHEMA = 1
"""Version of the output of ``--json``. New keys do not change it; another meaning of a key would."""

KEYS = {
    "launch": {
        "schema": "version of this format",
        "would": "`begin`, `resume`, `nothing` (the run has finished) or `refuse` (or end at once)",
        "run_dir": "the run directory",
        "safe_step": "step of the newest checkpoint in the run directory; `null`: there is none",
        "starts": "how often its workers were started so far",
        "changes": "what differs from the last start; `null`: nothing",
        "script": "the script with its arguments",
        "command": "command line of the elastic launcher",
        "environment": "variables that its workers get, except ids made at the start, and your variables that matter, "
        "without secrets",
        "recipe": "the recipe",
        "nodes": "nodes: a number or `MIN:MAX`",
        "ranks_per_node": "workers on each node: a number or `auto`",
        "devices": "NVIDIA devices of this node",
        "limits": "the budget, as the options of `launch`",
        "used": "how much of it is used up, according to the ledger",
        "max_restarts": "restarts that the elastic launcher would get",
        "deadlines": "seconds from a signal on: `grace_period`, `elastic_launcher_ends_workers`, `launch_ends_all`; "
        "and how long the `last_save` took, or `null`",
        "section_timeouts": "timeouts of hangs, as `--section-timeouts` takes them",
        "directories": "where it would write",
        "directories[].name": "what for",
        "directories[].path": "where",
        "directories[].exists": "whether it exists",
        "directories[].file_system": "its kind, such as `nfs4`; `null`: not known",
        "directories[].free": "bytes",
        "directories[].is_writable": "whether this user may write there",
        "versions": "of Python, packages and drivers",
        "scheduler": "scheduler of the job in which it was called; `null`: none",
        "job_id": "id of that job; `null`: none",
        "batch_options": "options of the job that would be submitted",
        "checks": "what was checked",
        "checks[].name": "what",
        "checks[].level": "`ok`, `warn` (it may not be what is wanted) or `fail` (it could not work)",
        "checks[].text": "what was found, and what to do",
    },
    "report": {
        "schema": "version of this format",
        "run_dir": "the run directory",
        "began": "first launch, seconds since the epoch; `null`: nothing has run",
        "ended": "end of the run, or now, seconds since the epoch; `null`: nothing has run",
        "is_ongoing": "whether it runs, or waits for nodes",
        "outcome": "`finished`, `interrupted`, `failed` or `halted`; `null`: it is ongoing, or was killed",
        "reason": "why; `null`: no outcome",
        "ranks": "highest number of ranks at a time; 0: no process has recorded its time",
        "rank_seconds": "time of all ranks from `began` to `ended`, without that of absent ranks",
        "absent_rank_seconds": "time of absent ranks while the other ranks kept training; in no category",
        "goodput": "share of new steps in all time but `idle`, 0 to 1; `null`: not known",
        "ettr": "the same with data, callbacks, validation and saves",
        "losses": "what was lost, the largest first",
        "losses[].name": "cause of interruptions, or category; `first start`: time that the first start took",
        "losses[].interruptions": "how many interruptions; 0: it is not a cause of interruptions",
        "losses[].rank_seconds": "rank-seconds",
        "losses[].share": "share in all time but `idle`, 0 to 1",
        "losses[].node": "node with more than half of it; `null`: none",
        "losses[].categories": "its rank-seconds by category",
        "interruptions": "interruptions, oldest first",
        "interruptions[].time": "when it was found, otherwise when the workers ended, seconds since the epoch",
        "interruptions[].cause": "`killed`, `hang`, `preempted`, `NaN`, `straggler`, `disk`, `script`, `crash` or "
        "`launcher killed`",
        "interruptions[].reason": "what was recorded about it",
        "interruptions[].node": "node on which it began; `null`: not known, or all nodes",
        "interruptions[].rank_seconds": "what it has cost; `null`, like its parts: its workers have recorded no times",
        "interruptions[].detect": "rank-seconds from the last sign of life to the verdict",
        "interruptions[].end": "rank-seconds until the processes had ended",
        "interruptions[].start": "rank-seconds of queue, launch and start of the next workers, up to their first step",
        "interruptions[].restore": "rank-seconds of choosing and loading the checkpoint and the position in the data",
        "interruptions[].redo": "rank-seconds of steps that the next workers repeated, even if these steps had been "
        "lost before, and of unfinished work",
        "interruptions[].phases": "the same with the categories of `start` in its place; `null`: as the parts",
        "interruptions[].steps_lost": "steps done again; `null`: not known",
        "interruptions[].is_lower_bound": "whether more steps may be lost: no process has recorded how far the "
        "workers were",
        "interruptions[].resumed_step": "step from which the run resumed; `null`: not known",
        "interruptions[].seconds_lost": "time from the resumed save until training continued from it; `null`: it did "
        "not",
        "restarts": "time from a fault to the first new step, for interruptions after which the run trained again; "
        "`null`: none",
        "restarts.count": "how many",
        "restarts.median": "rank-seconds by phase, and their `sum`; of each the median",
        "restarts.longest": "the same for the longest one",
        "repeated": "failures that occurred more than once, as sentences",
        "categories": "rank-seconds of every category",
        "left_out_batches": "batches of absent ranks that were left out, with `--global-batch shrink`, as far as "
        "fits have ended",
        "skipped_lines": "lines of the ledger that are not events: torn by a kill, damaged, or of another version",
        "advice": "what to change, largest gain first; at most five",
        "advice[].text": "what to do, and why",
        "advice[].rank_seconds": "what it would have saved",
        "advice[].share": "the same as a share of the run's time, 0 to 1",
        "advice[].goodput": "by how much the goodput would have been higher",
        "advice[].what_if": "the same for `--what-if`; `null`: `--what-if` has no such setting",
        "advice[].is_bound": "whether this is an upper bound",
        "what_if": "what `--what-if` predicts; `null`: `--what-if` was not given",
        "what_if.settings": "what was changed, by name",
        "what_if.ettr": "predicted",
        "what_if.ettr_spread": "standard deviation over random courses; 0: interruptions at the recorded times",
        "what_if.goodput": "predicted",
        "what_if.rank_seconds": "predicted, without `idle`",
        "what_if.categories": "predicted rank-seconds",
        "what_if.interruptions": "predicted; of random courses, the mean",
        "what_if.replayed_ettr": "what the same model gives for the run as it was",
        "what_if.replayed_rank_seconds": "likewise",
        "timeline": "all [events](ledger.md#on-disk)",
    },
    "status": {
        "schema": "version of this format",
        "run_dir": "the run directory",
        "command": "the script with its arguments; `null`: never launched",
        "is_ongoing": "whether it runs, or waits for nodes",
        "now": "how it stands, in words; `null`: nothing was launched",
        "safe_step": "step of the newest checkpoint in the run directory; `null`: there is none",
        "local_saves": "the newest recorded local save; `null`: none",
        "local_saves.every_s": "seconds from one to the next, after the first ones; `null`: as the user has set",
        "local_saves.stall_s": "for how long it stopped the training",
        "local_saves.seconds": "until it was complete",
        "restarts": "restarts of the workers allowed without progress; `null`: nothing starts it again",
        "restarts_left": "restarts left",
        "job_retries": "job retries allowed without progress",
        "job_retries_left": "job retries left",
        "job_chain": "how many allocations the current job chain has",
        "excluded": "nodes that it must not get",
        "last_reason": "why the last launch or job ended; `null`: none has",
        "allocations": "starts of jobs of a scheduler, otherwise launches, oldest first",
        "allocations[].job_id": "id of the scheduler's job; `null`: none",
        "allocations[].restart_count": "how often it had been requeued; `null`: no job",
        "allocations[].nodes": "names of its nodes, as far as they are known",
        "allocations[].began": "its start",
        "allocations[].last_seen": "when anything was recorded in it last",
        "allocations[].step_before": "the safe step when it began; `null`: none",
        "allocations[].step_after": "the safe step when the next one began, or now; `null`: none",
        "allocations[].starts": "how often workers were started in it; `null`: without launcher",
        "allocations[].ended": "how it ended, in a word; `null`: it has not, as far as is known",
        "allocations[].then": "what followed, in words; `null`: nothing",
    },
    "list": {
        "schema": "version of this format",
        "folder": "the folder",
        "runs": "runs below it, most recently active first",
        "runs[].run_dir": "the run directory",
        "runs[].state": "`running`, `queued` (a scheduler has its job, and no nodes for it), `finished`, `failed`, "
        "`stopped` (interrupted or killed) or `unknown`",
        "runs[].now": "the same in words; `null`: nothing was launched",
        "runs[].problem": "why it cannot be read; `null`: it can",
        "runs[].step": "furthest step of its last fit, as far as is known; `null`: none",
        "runs[].safe_step": "step of the newest checkpoint in the run directory; `null`: there is none",
        "runs[].goodput": "as in `report`; for an ongoing run, up to a hundredth of its time old",
        "runs[].ettr": "as in `report`",
        "runs[].interruptions": "how many",
        "runs[].last_active": "when anything was recorded last; for a running run, now; `null`: never",
        "runs[].job_id": "id of the scheduler's last job; `null`: none",
        "runs[].command": "the script with its arguments; `null`: never launched",
        "others": "folders directly in it that contain no runs",
    },
    "diagnose": {
        "schema": "version of this format",
        "run_dir": "the run directory",
        "hangs": "hangs, oldest first",
        "hangs[].folder": "folder of its files, such as stacks and collectives of each rank",
        "hangs[].line": "the verdict, in a line; `null`: none was reached",
        "number": "the hang whose ranks are shown, from 1; `null`: there is none",
        "damage": "why its files cannot be read; `null`: they can",
        "ranks": "its ranks, culprits first",
        "ranks[].rank": "global rank",
        "ranks[].node": "name of its node",
        "ranks[].pid": "process id",
        "ranks[].state": "state of its process, as `ps` shows it",
        "ranks[].section": "section of the training loop",
        "ranks[].step": "`trainer.global_step`",
        "ranks[].stood_still": "seconds without progress",
        "ranks[].verdict": "`culprit`, `victim` or `null`",
        "ranks[].what": "what it did or waited for; `null`: without verdict",
    },
    "watch": {
        "schema": "version of this format",
        "run_dir": "the run directory",
        "time": "now",
        "ranks": "ranks that are in a fit and watched, in order",
        "ranks[].rank": "global rank",
        "ranks[].node": "name of its node",
        "ranks[].pid": "process id; `null`, as `limit`, `answer_ms` and `runs_python`: on another node",
        "ranks[].section": "section of the training loop; on another node, category of time, as in `report`",
        "ranks[].step": "`trainer.global_step`; on another node, the furthest there",
        "ranks[].since_progress": "seconds without progress; on another node, in the same activity",
        "ranks[].limit": "seconds without progress after which it hangs; `null`: none",
        "ranks[].answer_ms": "how long its worker server took to answer; `null`: it did not",
        "ranks[].runs_python": "whether its main thread runs Python",
        "ranks[].seen": "when this was observed",
    },
    "clean": {
        "schema": "version of this format",
        "leftovers": "what can be removed",
        "leftovers[].kind": "what it is, in words",
        "leftovers[].path": "where",
        "leftovers[].files": "how many files",
        "leftovers[].size": "bytes",
        "leftovers[].why": "why it is safe",
        "leftovers[].removed": "whether it was removed: with `--yes`",
        "leftovers[].problem": "why it could not be removed; `null`: it could, or was not tried",
        "kept": "what stays, such as runs in use",
        "kept[].path": "where",
        "kept[].why": "why",
    },
    "inspect": {
        "schema": "version of this format",
        "path": "the path that was inspected: a shard, a generation or a folder of generations",
        "is_intact": "whether a checkpoint exists and is fully intact",
        "problem": "why there is nothing to show; `null`: there is",
        "shard": "the shard; `null`: it was another path",
        "shard.path": "its file",
        "shard.size": "bytes",
        "shard.created": "when it was written, ISO 8601; `null`, as the rest: it cannot be read",
        "shard.problem": "why it is not intact; `null`: it is",
        "shard.identity": "whose it is: `run`, `fit`, `step`, `generation`, `part`, `world_size`, `layout`",
        "shard.digest": "its digest",
        "shard.torch": "version of torch that wrote it",
        "shard.tensors": "its tensors",
        "shard.tensors[].name": "its name in the state; `null`: not known",
        "shard.tensors[].type": "its type",
        "shard.tensors[].shape": "its shape",
        "shard.tensors[].size": "bytes",
        "shard.tensors[].from": "its first byte in the file",
        "generations": "generations, of each folder the newest first",
        "generations[].path": "its folder",
        "generations[].identity": "as for a shard, from a readable one",
        "generations[].needed": "how many shards it has on all nodes; `null`: not known",
        "generations[].missing": "how many of them are missing or damaged",
        "generations[].missing_shards": "their names, or ranges of names",
        "generations[].shards": "shards that are here, each with `path`, `size`, `created` and `problem`",
        "quarantine": "what was found damaged before and set aside",
    },
}
"""The meaning of each key, by command."""


def to_json(content: dict[str, Any]) -> str:
    """The content that a command shows, as JSON in one line.

    Args:
        content: With the keys in :data:`KEYS`.
    """
    return json.dumps(without_nan({"schema": SCHEMA, **content}), allow_nan=False)


def without_nan(value: Any) -> Any:
    """A value with ``None`` for numbers that are not finite: JSON has no such numbers, but Python's ledger may.

    Args:
        value: JSON-serializable otherwise.
    """
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
