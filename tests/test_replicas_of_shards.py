"""HSDP: groups of ranks that each hold the whole state in shards. A run goes on with fewer groups, or with more."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_resilience.run.settings import GLOBAL_BATCH_VARIABLE
from tests.harness import result, run, weights
from tests.ledgers import read_ledger
from tests.test_absent_ranks import BATCHES, SAME_FOR_ALL, kill, samples
from tests.test_elastic_nodes import events_of
from tests.test_exact_resume import make
from tests.test_going_on import changes, gone_on, is_back
from tests.test_launch import wait_until
from tests.test_launchers import finish
from tests.test_unplugged import Nodes, linked_nodes, waits  # noqa: F401  (a fixture)

SHARDS = 2  # ranks of a group


def with_groups(config: dict[str, Any], groups: int) -> dict[str, Any]:
    """The same run with as many groups of ranks, each rank with its own samples, or each group."""
    ranks = groups * SHARDS
    parts = ranks if config["sharded"] == "own mesh" else groups
    about = {"batches": BATCHES // ranks, "size": 4 * BATCHES * SHARDS if parts == ranks else 4 * BATCHES}
    data_parallel = None if config["sharded"] == "own mesh" else groups
    return {**config, **about, "data_parallel": data_parallel, "trainer": {**config["trainer"], "devices": ranks}}


LOCAL: dict[str, Any] = {
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "local": {"every_n_train_steps": 1},
    "save_every": 1000,
    "step_s": 0.05,
}


def killed_and_resumed(
    tmp: Path, *groups: int, environment: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Any], dict[int, list[int]], str]:
    """Kills a run in its eighth step, its sixteenth and so on, and resumes it with other numbers of groups."""
    config = make(tmp, "disturbed", **options)
    trained: dict[int, list[int]] = {}
    output = ""
    for number, count in enumerate(groups):
        is_last = number == len(groups) - 1
        log = f"{config['log']}-{number}"
        event = kill(config, 8 + 8 * number)
        if "local" in options:
            event = {"at": "train", "step": 8 + 8 * number, "do": "SIGKILL"}
        part = {**with_groups(config, count), "log": log, "events": [] if is_last else [event]}
        codes, output = run(part, tmp / "disturbed", environment=environment)
        assert (set(codes) == {0}) if is_last else (-9 in codes), output
        trained |= samples(log)
    return config, trained, output


def undisturbed(tmp: Path, groups: int, **options: Any) -> tuple[dict[str, Any], dict[int, list[int]]]:
    config = with_groups(make(tmp, "undisturbed", **options), groups)
    codes, output = run(config, tmp / "undisturbed")
    assert set(codes) == {0}, output
    return config, samples(config["log"])


LOGGED = ("train_loss_epoch", "train_metric")


def state_at_the_end(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole parameters."""
    (path,) = Path(config["run_dir"]).glob("fit-000/checkpoints/*-final.ckpt")
    whole = Path(config["out"]).with_suffix(".whole")
    dcp_to_torch_save(path, whole)
    state: dict[str, torch.Tensor] = torch.load(whole, weights_only=True)["state_dict"]
    return state


def assert_ends_alike(config: dict[str, Any], wanted: dict[str, Any], logged: Collection[str] = LOGGED) -> None:
    """Sums of more than two groups may be in another order."""
    for name in logged:
        value, known = (result(each)[0]["metrics"][name] for each in (config, wanted))
        assert value == pytest.approx(known, rel=1e-5), name
    if wanted["trainer"]["devices"] == 2 * SHARDS:
        assert weights(config)[0] == weights(wanted)[0]
    states = [state_at_the_end(each) for each in (config, wanted)]
    # Buffers are those of some rank, which has had batches of its own.
    states = [
        {name: each for name, each in state.items() if name.startswith("net") and "running" not in name}
        for state in states
    ]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "2-1, local": ((2, 1), {"sharded": "own mesh", **LOCAL}),
    "3-2-3, global": ((3, 2, 3), {"sharded": "own mesh"}),
    "2-1, global": ((2, 1), {"sharded": "own mesh"}),
    "3-2-3, local": ((3, 2, 3), {"sharded": "own mesh", **LOCAL}),
    "2-1, groups with the same samples": ((2, 1), {"sharded": "hybrid"}),
    "3-2-3, groups with the same samples, local": ((3, 2, 3), {"sharded": "hybrid", "seeded_apart": True, **LOCAL}),
    "a schedule by the number of steps": ((2, 1, 2), {"sharded": "own mesh", "by_length": "configure"}),
    "more groups, a schedule by the number of steps": (
        (1, 2),
        {"sharded": "own mesh", "by_length": "configure", **SAME_FOR_ALL, **LOCAL},
    ),
    "more groups": ((1, 2), {"sharded": "own mesh", **SAME_FOR_ALL, **LOCAL}),
    "workers, accumulation": (
        (2, 1, 2),
        {
            "sharded": "own mesh",
            "workers": 1,
            "trainer": {"max_epochs": 3, "accumulate_grad_batches": 3},
            "save_every": 1,
        },
    ),
}


@pytest.mark.parametrize(("groups", "options"), CASES.values(), ids=CASES.keys())
@pytest.mark.slow
def test_steps_are_those_of_the_run_as_it_was_begun(
    tmp_path: Path, groups: tuple[int, ...], options: dict[str, Any]
) -> None:
    options = {"trainer": {"max_epochs": 3}, **options}
    config, trained, output = killed_and_resumed(tmp_path, *groups, **options)
    wanted, steps = undisturbed(tmp_path, groups[0], **options)
    assert trained == steps
    assert_ends_alike(config, wanted, LOGGED if groups[0] > 1 else LOGGED[:1])  # one is of a rank's own batches
    if groups == (2, 1):
        assert (
            "was saved by a run of 4 ranks and is resumed by 2: each rank also trains on batches of absent ranks"
            in output
        )
    if "local" in options and len(set(groups)) > 1:
        assert re.search(r"Resuming from step \d+ \(local checkpoint \S+, saved by \d ranks", output)


@pytest.mark.slow
def test_the_batches_of_absent_groups_are_left_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sharded": "own mesh", "trainer": {"max_epochs": 3}, **LOCAL}
    shrink = {GLOBAL_BATCH_VARIABLE: "shrink"}
    config, trained, output = killed_and_resumed(tmp_path, 3, 2, environment=shrink, **options)
    wanted, steps = undisturbed(tmp_path, 3, **options)
    begun = samples(f"{config['log']}-1")
    assert 0 < len(begun) < len(steps)
    of_two = samples(wanted["log"], range(2 * SHARDS))
    assert trained == {step: of_two[step] if step in begun else ids for step, ids in steps.items()}
    assert "is resumed by 4: the batches of absent ranks are left out, as --global-batch" in output


@pytest.mark.slow
def test_ranks_that_are_no_whole_groups_go_on_as_before(tmp_path: Path) -> None:
    """From the global checkpoint, at a place in the data that is rounded down."""
    config = make(tmp_path, "disturbed", sharded="hybrid", trainer={"max_epochs": 1})
    begun = with_groups(config, 2)
    codes, output = run({**begun, "events": [kill(config, 8)]}, tmp_path / "disturbed")
    assert -9 in codes, output
    codes, output = run({**begun, "data_parallel": 1, "trainer": {"max_epochs": 1, "devices": 3}}, tmp_path)
    assert set(codes) == {0}, output
    assert "by a run of 4 ranks and is resumed by 3, and 4 ranks do not form whole groups of 3: weights" in output


# -- a rank is lost ----------------------------------------------------------------------------------------------------


def run_that_loses(
    tmp: Path, groups: int, events: list[dict[str, Any]], *arguments: str, **options: Any
) -> tuple[dict[str, Any], str]:
    """Loses ranks of a run that goes on; returns its config and output."""
    config = with_groups(make(tmp, "disturbed", **options), groups)
    config["events"] = [{"do": "SIGKILL", "once": True, **each} for each in events]
    return config, gone_on(tmp, config, groups * SHARDS, *arguments)


@pytest.mark.parametrize(
    ("groups", "lost", "options"),
    [
        pytest.param(3, 3, {"sharded": "own mesh", **LOCAL}, id="3 groups"),
        pytest.param(2, 3, {"sharded": "own mesh", "by_length": "configure"}, id="2 groups, global checkpoints"),
        pytest.param(
            2,
            1,
            {"sharded": "hybrid", **LOCAL},
            id="2 groups with the same samples, that of rank 0",
            marks=pytest.mark.campaign,
        ),
    ],
)
@pytest.mark.slow
def test_whole_groups_go_on_without_the_group_of_a_lost_rank_and_take_it_in_again(
    tmp_path: Path, groups: int, lost: int, options: dict[str, Any]
) -> None:
    options = {"trainer": {"max_epochs": 3}, **options}
    events = [{"at": "train", "step": 13, "rank": lost}, is_back(tmp_path / "disturbed" / "run")]
    config, output = run_that_loses(tmp_path, groups, events, "--spares=off", **options)
    every = [*range(groups * SHARDS)]
    left = [rank for rank in every if rank // SHARDS != lost // SHARDS]
    ledger = Path(config["run_dir"]) / "ledger"
    assert [each[:2] for each in changes(ledger)] == [([lost], left), ([], every)], output
    wanted, steps = undisturbed(tmp_path, groups, **options)
    assert samples(config["log"]) == steps, output
    assert_ends_alike(config, wanted)
    assert "Restart 2" not in output
    assert f"Rank {lost ^ 1} has shards of its group and waits for it." in output


LAST_BOUNDARY: dict[str, Any] = {
    "callbacks": ["preemption", "auto_resume", "local_checkpoint"],
    "local": {"every_n_train_steps": 7},
    "save_every": 1000,
    "keeps_nothing": True,
    "step_s": 0.05,
}


@pytest.mark.parametrize(
    ("groups", "lost", "late", "options"),
    [
        pytest.param(
            2,
            [(3, "train", 13)],
            [],
            {"sharded": "own mesh", "batch_norm": True},
            id="2 groups",
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            3,
            [(1, "train", 13), (2, "train", 16)],
            # One that is left of a group comes to the boundary after the loss; the others save what only it knows.
            [{"at": "epoch_start", "step": 1, "rank": 1, "do": "sleep", "seconds": 1.0}],
            {"sharded": "own mesh", "seeded_apart": True, "workers": 1},
            id="3 groups, of which 2 are lost one after the other",
        ),
        pytest.param(2, [(0, "backward", 13)], [], {"sharded": "hybrid"}, id="2 groups with the same samples, rank 0"),
    ],
)
@pytest.mark.slow
def test_no_step_is_lost_with_a_group_and_none_is_done_again_when_it_is_back(
    tmp_path: Path,
    groups: int,
    lost: list[tuple[int, str, int]],
    late: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    options = {"trainer": {"max_epochs": 3}, **LAST_BOUNDARY, **options}
    every = [*range(groups * SHARDS)]
    members, events, wanted_changes = every, [*late], []
    for slot, at, step in lost:  # its rank is its place among those that are left
        events.append({"at": at, "step": step, "rank": members.index(slot)})
        members = [each for each in members if each // SHARDS != slot // SHARDS]
        wanted_changes.append(([slot], members))
    events.append(is_back(tmp_path / "disturbed" / "run", len(lost)))
    config, output = run_that_loses(tmp_path, groups, events, "--spares=off", **options)
    ledger = Path(config["run_dir"]) / "ledger"
    found = [each[:2] for each in changes(ledger)]
    assert found[: len(lost)] == wanted_changes, output
    assert {tuple(ranks) for ranks, _ in found[len(lost) :]} == {()}, "groups come back at once, or one after the other"
    assert found[-1][1] == every, output
    saved = [each["step"] for each in read_ledger(ledger) if each.get("reason") == "after a loss"]
    assert saved[: len(lost)] == [step for *_, step in lost], output
    assert [each["step"] for each in read_ledger(ledger) if each["event"] == "resumed"] == saved
    wanted, steps = undisturbed(tmp_path, groups, **options)
    assert samples(config["log"]) == steps, output
    assert_ends_alike(config, wanted)
    lines = [json.loads(line) for line in Path(f"{config['log']}.0").read_text().splitlines()]
    # With fewer groups a rank makes the passes of absent ones, too.
    made = Counter(step for _, step, _ in lines if step >= saved[-1])
    assert set(made.values()) == {1}


@pytest.mark.slow
def test_no_step_is_lost_where_the_others_wait_for_the_rank(tmp_path: Path) -> None:
    options = {"trainer": {"max_epochs": 3}, **LAST_BOUNDARY, "sharded": "own mesh"}
    config, output = run_that_loses(
        tmp_path, 2, [{"at": "train", "step": 13, "rank": 1}], "--when-lost=hold", **options
    )
    events = [*read_ledger(Path(config["run_dir"]) / "ledger")]
    assert [each["step"] for each in events if each.get("reason") == "after a loss"] == [13], output
    assert [each["step"] for each in events if each["event"] == "resumed"] == [13], output
    wanted, steps = undisturbed(tmp_path, 2, **options)
    assert samples(config["log"]) == steps, output
    assert_ends_alike(config, wanted)


REPLICA_CHECK: dict[str, Any] = {
    "callbacks": ["auto_resume", "local_checkpoint", "replica_check"],
    "local": {"every_n_train_steps": 2},
    "save_every": 5,
    "trainer": {"max_epochs": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "options"),
    [
        pytest.param(3, {"sharded": "own mesh"}, id="3 groups"),
        pytest.param(
            2, {"sharded": "hybrid", "callbacks": ["local_checkpoint", "replica_check"]}, id="2, by local saves"
        ),
        pytest.param(2, {"sharded": "own mesh", "callbacks": ["auto_resume", "replica_check"]}, id="2, by global ones"),
    ],
)
@pytest.mark.also_as_on_gpu
def test_a_rank_whose_shard_is_not_that_of_the_other_groups_is_found(
    tmp_path: Path, groups: int, options: dict[str, Any]
) -> None:
    options = {**REPLICA_CHECK, **options}
    flips = [{"step": 12, "rank": 3, "what": "weight", "bit": 3}, {"step": 27, "rank": 0, "what": "moment", "bit": 21}]
    config = with_groups(make(tmp_path, "disturbed", flips=flips, **options), groups)
    codes, output = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, output
    ledger = Path(config["run_dir"]) / "ledger"
    differ = [each["groups"] for each in read_ledger(ledger) if each["event"] == "divergence"]
    # On a busy machine the next comparison may find it again before the run goes back.
    expected = [[[1, 5], [3]], [[2, 4], [0]]] if groups > 2 else [[[1], [3]], [[0], [2]]]
    assert [found for found, _ in groupby(differ)] == expected, output
    assert (
        "rank 3 holds a different state than the other 2" if groups > 2 else "ranks 1 and 3 hold different"
    ) in output
    back = [each["step"] for each in read_ledger(ledger) if each["event"] == "went_back"]
    assert len(back) == 2, output
    wanted, steps = undisturbed(tmp_path, groups, **options)
    assert samples(config["log"]) == steps
    assert result(config) == result(wanted)


@pytest.mark.slow
def test_local_checkpoints_whose_replicas_differ_are_not_resumed_from(tmp_path: Path) -> None:
    options = {**REPLICA_CHECK, "replica_check": {"max_rollbacks": 0}, "sharded": "own mesh"}
    config = make(tmp_path, "disturbed", flips=[{"step": 12, "rank": 3, "what": "weight", "bit": 3}], **options)
    config = with_groups(config, 2)
    codes, output = run(config, tmp_path / "disturbed")
    assert 1 in codes, output
    assert re.search("ReplicasDiverged: after step 1[3-5] ranks 1 and 3 hold different states", output), output
    codes, output = run(config, tmp_path / "disturbed")
    assert set(codes) == {0}, output
    assert re.search(r"Resuming from step 1[0-2] \(", output), output
    assert result(config) == result(undisturbed(tmp_path, 2, **options)[0])


# -- on several nodes --------------------------------------------------------------------------------------------------


def on_nodes(tmp: Path, count: int, groups: int, events: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A run whose ranks are on so many nodes."""
    config = with_groups(make(tmp, "disturbed", **options), groups)
    config["trainer"] = {**config["trainer"], "devices": groups * SHARDS // count, "num_nodes": count}
    config["events"] = [{"once": True, **each} for each in events]
    return config


def run_on(nodes: Nodes, config: dict[str, Any], output: Path, *more: str, ranks: int) -> None:
    more = ("--section-timeouts=step:none", *more)  # a rank waits in a step until others are back
    launches = [nodes.launch(node, config, output, *more, ranks=ranks) for node in range(nodes.count)]
    try:
        codes = [finish(launch, output) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert set(codes) == {0}, output.read_text()


def assert_as_undisturbed(tmp: Path, config: dict[str, Any], groups: int, **options: Any) -> None:
    wanted, steps = undisturbed(tmp, groups, **options)
    assert samples(config["log"]) == steps, (tmp / "output").read_text()
    assert_ends_alike(config, wanted)


def assert_went_on(
    tmp: Path, config: dict[str, Any], groups: int, lost: list[int], left: list[int], **options: Any
) -> None:
    output = (tmp / "output").read_text()
    changed = [(each["ranks"], each["members"]) for each in events_of(config, "replaced")]
    assert changed == [(lost, left), ([], [*range(groups * SHARDS)])], output
    saved = [each["step"] for each in events_of(config, "saved") if each["reason"] == "after a loss"]
    assert {*saved} <= {each["step"] for each in events_of(config, "resumed")}, "what is said to be saved is used"
    assert_as_undisturbed(tmp, config, groups, **options)


@pytest.mark.parametrize(
    ("signum", "options"),
    [
        pytest.param(signal.SIGKILL, {"save_every": 5}, id="killed, global checkpoints", marks=pytest.mark.campaign),
        pytest.param(signal.SIGKILL, LAST_BOUNDARY, id="killed, copies on other nodes"),
        pytest.param(signal.SIGTERM, LAST_BOUNDARY, id="told to stop"),
        pytest.param(signal.SIGKILL, {"save_every": 5, "sharded": "hybrid"}, id="killed, sizes that Lightning chooses"),
    ],
)
@pytest.mark.slow
def test_the_groups_of_other_nodes_train_on_while_a_node_is_away_and_take_its_groups_in(
    tmp_path: Path,
    nodes: Nodes,
    signum: signal.Signals,
    options: dict[str, Any],
) -> None:
    options = {"trainer": {"max_epochs": 3}, "sharded": "own mesh", **options}
    is_lost, output = tmp_path / "lost", tmp_path / "output"
    # Behind the attempt of all ranks, that of one group, and those of two ranks that come back.
    is_back = f"{tmp_path / 'disturbed' / 'run'}/logs/attempt-5/*"
    config = on_nodes(tmp_path, 2, 2, [waits(13, is_lost), waits(30, is_back)], **options)
    if options["sharded"] == "hybrid":
        config["data_parallel"] = "auto"  # as many groups as there are nodes
    more = ("--nnodes=1:2", "--spares=off", "--section-timeouts=step:none")  # rank 0 waits in a step
    launches = [nodes.launch(node, config, output, *more, ranks=SHARDS) for node in range(2)]
    try:
        wait_until(lambda: any(event["step"] >= 7 for event in events_of(config, "saved")), within_s=100.0)
        below = psutil.Process(launches[1].pid).children(recursive=True)
        next(each for each in below if "lightning_resilience.launch.cli" in each.cmdline()).send_signal(signum)
        launches[1].wait(100.0)
        is_lost.touch()
        wait_until(lambda: len(events_of(config, "replaced")) == 1, output.read_text, within_s=100.0)
        launches[1] = nodes.launch(1, config, output, *more, ranks=SHARDS)
        codes = [finish(launch, output) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert codes == [0, 0], output.read_text()
    assert_went_on(tmp_path, config, 2, [2, 3] if signum == signal.SIGKILL else [], [0, 1], **options)


@pytest.mark.parametrize(
    ("nodes", "groups", "lost", "options"),
    [
        pytest.param(2, 2, 3, {}, id="a group on each of 2 nodes", marks=pytest.mark.campaign),
        pytest.param(2, 2, 0, {"batch_norm": True}, id="a group on each of 2 nodes, rank 0"),
        pytest.param(3, 3, 2, {"seeded_apart": True}, id="a group on each of 3 nodes"),
        pytest.param(2, 2, 1, {"sharded": "hybrid"}, id="groups with the same samples", marks=pytest.mark.campaign),
        pytest.param(
            2, 4, 3, {"trainer": {"max_epochs": 6}}, id="2 groups on each of 2 nodes", marks=pytest.mark.campaign
        ),
    ],
    indirect=["nodes"],
)
@pytest.mark.slow
def test_a_group_that_has_lost_a_rank_on_another_node_is_taken_in_as_a_whole(
    tmp_path: Path,
    nodes: Nodes,
    groups: int,
    lost: int,
    options: dict[str, Any],
) -> None:
    options = {"trainer": {"max_epochs": 3}, **LAST_BOUNDARY, "sharded": "own mesh", **options}
    events = [{"at": "train", "step": 13, "rank": lost, "do": "SIGKILL"}, is_back(tmp_path / "disturbed" / "run")]
    config = on_nodes(tmp_path, nodes.count, groups, events, **options)
    more, ranks = (f"--nnodes={nodes.count}", "--when-lost=go-on", "--spares=off"), groups * SHARDS // nodes.count
    output = tmp_path / "output"
    run_on(nodes, config, output, *more, ranks=ranks)
    left = [rank for rank in range(groups * SHARDS) if rank // SHARDS != lost // SHARDS]
    assert_went_on(tmp_path, config, groups, [lost], left, **options)
    saved = [each["step"] for each in events_of(config, "saved") if each["reason"] == "after a loss"]
    has_alike = ranks > SHARDS  # on the same node
    assert (13 in saved) == has_alike, output.read_text()


@pytest.mark.slow
def test_all_wait_for_the_replacement_on_another_node(tmp_path: Path, nodes: Nodes) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}, **LAST_BOUNDARY, "sharded": "own mesh"}
    events = [{"at": "train", "step": 13, "rank": 3, "do": "SIGKILL"}]
    config = on_nodes(tmp_path, 2, 2, events, **options)
    run_on(nodes, config, tmp_path / "output", "--nnodes=2", ranks=SHARDS)
    output = (tmp_path / "output").read_text()
    assert [each["ranks"] for each in events_of(config, "replaced")] == [[3]], output
    assert [each["step"] for each in events_of(config, "resumed")] == [7], output
    assert_as_undisturbed(tmp_path, config, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_groups_that_spread_over_nodes_wait_for_the_replacement(tmp_path: Path, nodes: Nodes) -> None:
    options: dict[str, Any] = {"trainer": {"max_epochs": 3}, **LAST_BOUNDARY, "sharded": "own mesh"}
    events = [{"at": "train", "step": 13, "rank": 2, "do": "SIGKILL"}]
    config = on_nodes(tmp_path, 4, 2, events, **options)
    run_on(nodes, config, tmp_path / "output", "--nnodes=4", "--when-lost=go-on", "--spares=off", ranks=1)
    output = (tmp_path / "output").read_text()
    assert [each["ranks"] for each in events_of(config, "replaced")] == [[2]], output
    assert "spread over several nodes" in output
    assert_as_undisturbed(tmp_path, config, 2, **options)
