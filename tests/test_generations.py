"""What can be resumed from, what travels for it, and who writes what: pure functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_resilience.checkpoint.generations import (
    Generation,
    RankLocation,
    ShardInfo,
    generations,
    plan_handover,
    plan_transfers,
    rank_locations,
    rank_shard,
    replicated_shard,
)
from lightning_resilience.checkpoint.rank_state import partition
from lightning_resilience.checkpoint.schedule import Schedule

# Places


def test_the_places_of_ranks_on_nodes_of_their_own() -> None:
    assert rank_locations([("a", 0), ("a", 0), ("b", 1), ("b", 1)]) == [
        RankLocation(0, 4, 0, 2, "a"),
        RankLocation(1, 4, 1, 2, "a"),
        RankLocation(2, 4, 0, 2, "b"),
        RankLocation(3, 4, 1, 2, "b"),
    ]


def test_several_nodes_on_a_host_have_names_of_their_own() -> None:
    found = rank_locations([("a", 3), ("a", 3), ("b", 0), ("a", 7)])
    assert [place.node for place in found] == ["a-0", "a-0", "b", "a-1"]
    assert [(place.local_rank, place.shares) for place in found] == [(0, 1), (1, 1), (0, 1), (0, 1)]


def test_ranks_need_not_be_in_the_order_of_nodes() -> None:
    found = rank_locations([("b", 1), ("a", 0), ("b", 1), ("a", 0)])
    assert [(place.rank, place.node, place.local_rank) for place in found] == [
        (0, "b", 0),
        (1, "a", 0),
        (2, "b", 1),
        (3, "a", 1),
    ]


def test_no_two_nodes_have_the_same_name_and_no_two_ranks_the_same_place() -> None:
    chance = random.Random(0)
    for _ in range(200):
        nodes = [(chance.choice("ab"), chance.randrange(3)) for _ in range(chance.randrange(1, 9))]
        found = rank_locations(nodes)
        names = dict(zip(nodes, (place.node for place in found), strict=True))
        assert len(set(names.values())) == len(names)
        assert all(names[node] == place.node for node, place in zip(nodes, found, strict=True))
        assert len({(place.node, place.local_rank) for place in found}) == len(nodes)
        for place in found:
            here = sum(other.node == place.node for other in found)
            assert 0 <= place.local_rank < here
            assert 0 < place.shares == found[0].shares <= here


def test_the_names_of_parts() -> None:
    assert rank_shard(3) == "rank-00003"
    assert replicated_shard(0, 8) == "common-00-of-08"


# Generations


def whole(step: int, name: str, where: dict[str, list[str]], world_size: int = 4, commons: int = 2) -> list[ShardInfo]:
    """Holdings by node."""
    return [
        ShardInfo(node, step, name, part, len(part) + step, world_size, "whole", commons)
        for node, parts in where.items()
        for part in parts
    ]


COMMONS = ["common-00-of-02", "common-01-of-02"]
TWO_NODES = {"a": ["rank-00000", "rank-00001", *COMMONS], "b": ["rank-00002", "rank-00003", *COMMONS]}
FOUR_RANKS = rank_locations([("a", 0), ("a", 0), ("b", 1), ("b", 1)])


def test_newest_first_with_what_they_lack() -> None:
    less = {"a": TWO_NODES["a"], "b": ["rank-00003"]}
    found = generations([*whole(10, "0a", TWO_NODES), *whole(30, "1e", less), *whole(20, "14", TWO_NODES)])
    assert [(one.step, one.name) for one in found] == [(30, "1e"), (20, "14"), (10, "0a")]
    assert [one.missing for one in found] == [["rank-00002"], [], []]
    assert found[1].holders["common-00-of-02"] == ["a", "b"]
    assert found[1].sizes["rank-00003"] == 30


def test_two_generations_of_a_step_are_not_mixed() -> None:
    found = generations(
        [*whole(10, "0a", {"a": TWO_NODES["a"]}), *whole(10, "0b", {"b": TWO_NODES["b"]})],
    )
    assert [one.name for one in found] == ["0b", "0a"]
    assert all(one.missing for one in found)


def test_a_common_part_of_any_node_will_do() -> None:
    where = {"a": ["rank-00000", "rank-00001", COMMONS[0]], "b": ["rank-00002", "rank-00003", COMMONS[1]]}
    (found,) = generations(whole(10, "0a", where))
    assert found.missing == []


def test_what_is_condemned_is_left_out() -> None:
    found = generations([*whole(10, "0a", TWO_NODES), *whole(20, "14", TWO_NODES)], without={"14"})
    assert [one.name for one in found] == ["0a"]


def test_parts_that_contradict_each_other_are_not_put_together() -> None:
    holdings = whole(10, "0a", TWO_NODES)
    for other in ({"world_size": 2}, {"kind": "sharded"}, {"replicated_shards": 4}, {"places": 8}):
        (found,) = generations([*holdings[:-1], replace(holdings[-1], **other)])
        assert found.holders["common-01-of-02"] == ["a"]


def test_ranks_with_the_same_shard_must_agree_and_others_need_not() -> None:
    where = {"a": ["rank-00000", "rank-00001"], "b": ["rank-00002", "rank-00003"]}
    for digests, are_alike in (("aaaa", True), ("abab", True), ("abac", False)):
        holdings = [
            replace(each, replicated_digest=digest)
            for each, digest in zip(whole(10, "0a", where, commons=0), digests, strict=True)
        ]
        (found,) = generations(holdings, group=2)
        assert (found.differs, found.missing) == ((False, []) if are_alike else (True, ["rank-00003"]))
    assert generations(holdings)[0].differs


def test_a_lost_part() -> None:
    (found,) = generations(whole(10, "0a", TWO_NODES))
    found.lose("a", COMMONS[0])
    found.lose("a", COMMONS[0])
    found.lose("nobody", "nothing")
    assert found.missing == []
    found.lose("b", COMMONS[0])
    assert found.missing == [COMMONS[0]]


def test_what_ranks_need() -> None:
    (found,) = generations(whole(10, "0a", TWO_NODES))
    assert (found.saved_for(3, 4), found.replicated) == ([3], COMMONS)
    assert replace(found, replicated_shards=0).replicated == []
    assert [found.saved_for(rank, 3) for rank in range(3)] == [[0, 3], [1], [2]]
    assert found.saved_for(0, 1) == [0, 1, 2, 3]
    assert [found.saved_for(rank, 6, 2) for rank in (3, 4, 5)] == [[3], [0], [1]]  # in groups of 2
    of_fewer = replace(found, places=8)  # of which rank 0 has taken the places 0 and 4, and so on
    assert [of_fewer.saved_for(rank, 6) for rank in range(6)] == [[0, 2], [1, 3], [2], [3], [0], [0, 1]]
    assert of_fewer.saved_for(7, 8) == [0, 3], "its checkpoint is that of rank 0"


def test_every_place_is_taken_once_by_who_has_its_state() -> None:
    for places in range(1, 9):
        for saved_by in range(1, places + 1):
            for now in range(1, places + 1):
                found = Generation(7, "07", saved_by, "whole", 0, places=places)
                read = [found.saved_for(rank, now) for rank in range(now)]
                assert all(place % saved_by in read[place % now] for place in range(places))
                assert {rank for ranks in read for rank in ranks} == set(range(saved_by)), "nothing is left out"
                assert all(len(ranks) <= 1 + -(-places // now) for ranks in read), "none reads all, if there are many"
                if saved_by == now:
                    assert read == [[rank] for rank in range(now)]


# Journeys


def holdings_anywhere(chance: random.Random) -> tuple[list[RankLocation], list[ShardInfo]]:
    """A job of any size, and its parts on any nodes, also some that it does not have. Others may have saved them."""
    nodes, ranks = chance.randrange(1, 5), chance.randrange(1, 4)
    job = rank_locations([(f"n{node}", node) for node in range(nodes) for _ in range(ranks)])
    commons = chance.choice([0, ranks, 3])
    saved_by = chance.choice([len(job), chance.randrange(1, 13)])
    places = max(len(job), saved_by) + chance.choice([0, chance.randrange(4)])
    parts = [rank_shard(rank) for rank in range(saved_by)] + [replicated_shard(i, commons) for i in range(commons)]
    names = [*{place.node for place in job}, "gone"]
    holdings = [
        ShardInfo(node, 7, "07", part, chance.randrange(1, 1000), saved_by, "whole", commons, places=places)
        for part in parts
        for node in chance.sample(sorted(names), chance.randrange(0, len(names) + 1))
    ]
    return job, holdings


def complete(chance: random.Random) -> Iterator[tuple[list[RankLocation], list[ShardInfo], Generation]]:
    while True:
        job, holdings = holdings_anywhere(chance)
        there = [each for each in holdings if each.node != "gone"]
        for found in generations(there):
            if not found.missing:
                yield job, there, found


def test_after_the_journeys_every_node_has_what_its_ranks_need() -> None:
    examples = complete(random.Random(1))
    travelled = 0
    for _ in range(300):
        job, _, found = next(examples)
        node_of = {place.rank: place.node for place in job}
        wanted = plan_transfers(found, job)
        for each in wanted:
            assert node_of[each.source] in found.holders[each.shard], "it is read where it is"
            assert node_of[each.destination] not in found.holders[each.shard], "it goes where it is not"
            assert each.size == found.sizes[each.shard]
        arrived = {(node_of[each.destination], each.shard) for each in wanted}
        assert len(arrived) == len(wanted), "nothing goes twice"
        needed = {
            (place.node, part)
            for place in job
            for part in (*map(rank_shard, found.saved_for(place.rank, len(job))), *found.replicated)
        }
        assert all(node in found.holders[part] or (node, part) in arrived for node, part in needed)
        assert arrived <= needed, "nothing goes where nobody needs it"
        travelled += len(wanted)
    assert travelled > 300


def test_every_rank_plans_the_same_journeys() -> None:
    chance = random.Random(2)
    examples = complete(chance)
    for _ in range(100):
        job, holdings, found = next(examples)
        wanted = plan_transfers(found, job)
        chance.shuffle(holdings)
        (again,) = generations(holdings)
        assert again == found
        assert plan_transfers(again, job) == wanted


def test_what_only_leaving_nodes_have_goes_to_the_nodes_that_stay() -> None:
    examples, chance = complete(random.Random(3)), random.Random(4)
    handed = 0
    for _ in range(300):
        job, _, found = next(examples)
        gone = chance.sample(range(len(job)), chance.randrange(1, len(job) + 1))[1:]
        node_of = {place.rank: place.node for place in job}
        staying = {node_of[place.rank] for place in job if place.rank not in gone}
        wanted = plan_handover(found, job, gone)
        for each in wanted:
            assert node_of[each.source] in found.holders[each.shard], "it is read where it is"
            assert each.destination not in gone
            assert each.size == found.sizes[each.shard]
        moved = [each.shard for each in wanted]
        assert len(moved) == len({*moved}), "nothing goes twice"
        assert {*moved} == {name for name, nodes in found.holders.items() if staying.isdisjoint(nodes)}
        handed += len(wanted)
    assert handed > 100


def test_all_that_stay_receive_what_a_leaving_node_has() -> None:
    (found,) = generations(whole(10, "0a", TWO_NODES))
    wanted = plan_handover(found, FOUR_RANKS, {2, 3})
    assert [(each.shard, each.source, each.destination) for each in wanted] == [
        ("rank-00002", 2, 0),
        ("rank-00003", 3, 1),
    ]
    assert plan_handover(found, FOUR_RANKS, {1, 3}) == [], "a node with another rank does not end"


def test_nothing_travels_where_everything_is_there() -> None:
    (found,) = generations(whole(10, "0a", TWO_NODES))
    assert plan_transfers(found, FOUR_RANKS) == []


def test_a_lost_node_is_served_by_all_ranks_of_the_other() -> None:
    replicas = {"b": [*(rank_shard(rank) for rank in range(4)), *COMMONS]}
    (found,) = generations(whole(10, "0a", replicas))
    wanted = plan_transfers(found, FOUR_RANKS)
    assert {each.shard for each in wanted} == {"rank-00000", "rank-00001", *COMMONS}
    assert {each.destination for each in wanted} == {0, 1}
    assert {each.source for each in wanted} == {2, 3}, "not by one rank alone"


def test_ranks_that_have_changed_their_nodes() -> None:
    (found,) = generations(whole(10, "0a", TWO_NODES))
    swapped = rank_locations([("b", 0), ("b", 0), ("a", 1), ("a", 1)])
    assert sorted((each.shard, each.source, each.destination) for each in plan_transfers(found, swapped)) == [
        ("rank-00000", 2, 0),
        ("rank-00001", 3, 1),
        ("rank-00002", 0, 2),
        ("rank-00003", 1, 3),
    ]


# Shares


def test_everything_is_shared_out_once_and_evenly() -> None:
    chance = random.Random(3)
    for _ in range(200):
        sizes = [chance.choice([0, 4, chance.randrange(1000)]) for _ in range(chance.randrange(30))]
        count = chance.randrange(1, 9)
        shares = partition(sizes, count)
        assert len(shares) == count
        assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
        assert all(share == sorted(share) for share in shares)
        loads = [sum(sizes[index] for index in share) for share in shares]
        assert max(loads) - min(loads) <= max([*sizes, 0])


def test_equal_sizes_are_shared_out_alike_everywhere() -> None:
    assert partition([4, 4, 4, 4, 4], 2) == [[0, 2, 4], [1, 3]]
    assert partition([], 2) == [[], []]
    assert partition([1, 9, 1, 9], 1) == [[0, 1, 2, 3]]


# When


def test_by_steps() -> None:
    schedule = Schedule(5, lambda before_s: pytest.fail("nobody asks"))
    schedule.start(0)
    schedule.begin()
    schedule.adjust()
    assert [step for step in range(12) if schedule.is_due(step, last=5)] == [10, 11], "what was held is made up for"
    assert [schedule.step_ahead(earliest) for earliest in (1, 5, 6)] == [5, 5, 10]
    assert schedule.seconds_left() == 60.0


def test_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, interval = 100.0, 10.0
    monkeypatch.setattr("lightning_resilience.checkpoint.local.time.monotonic", lambda: now)
    schedule = Schedule(None, lambda before_s: interval)
    assert not schedule.is_due(3, last=0)
    schedule.start(0)
    assert (schedule.is_due(3, last=0), schedule.step_ahead(7), schedule.seconds_left()) == (False, None, 10.0)
    now, interval = 110.0, 4.0
    assert (schedule.is_due(3, last=0), schedule.step_ahead(7), schedule.seconds_left()) == (True, 7, 0.01)
    schedule.begin()
    now = 113.0
    assert not schedule.is_due(3, last=0), "the interval is asked for again each time"
    now = 114.0
    assert schedule.is_due(3, last=0)
    interval = 5.0
    schedule.adjust()
    assert not schedule.is_due(3, last=0), "and when it is known what the save costs"
    now = 115.0
    assert schedule.is_due(3, last=0)


def test_the_first_save_is_due_when_the_training_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    asked: list[float] = []

    def doubled(before_s: float) -> float:
        asked.append(before_s)
        return max(1.0, 2 * before_s)

    monkeypatch.setattr("lightning_resilience.checkpoint.schedule.time.monotonic", lambda: now)
    schedule = Schedule(None, doubled, is_early=True)
    schedule.start(40)
    assert [step for step in range(40, 45) if schedule.is_due(step, last=40)] == [43, 44]
    assert [schedule.step_ahead(earliest) for earliest in (41, 43, 45)] == [43, 43, 45]
    times = []
    for _ in range(4):
        schedule.begin()
        schedule.adjust()
        times.append(schedule.seconds_left())
        now += times[-1]
    assert times == [1.0, 2.0, 4.0, 8.0]
    assert asked == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0], "of a save that is adjusted, not its own interval"
