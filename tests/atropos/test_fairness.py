"""Fair shares: by weight, at least the minimum, and never nothing; of what is handed out, and of room to wait in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.atropos.builders import admitted, env, group, next_batch, payloads, running_queue, taken

from penstock._stages.integrations.atropos.contract import EnvRegistration
from penstock._stages.integrations.atropos.queue.environments import shares
from penstock._stages.integrations.atropos.queue.records import QueueFull
from penstock._stages.integrations.atropos.queue.scheduling import MIN_SHARE
from penstock._stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue

WEIGHTS = st.sampled_from([0.0, 0.1, 1.0, 2.0, 5.0])
ENVIRONMENTS = st.lists(
    st.builds(
        lambda size, weight, minimum: env(size, weight=weight, minimum=minimum),
        st.sampled_from([1, 2, 4, 8]),
        WEIGHTS,
        st.none() | st.sampled_from([0.0, 0.2, 0.6]),
    ),
    min_size=1,
    max_size=5,
)


def filled(envs: list[EnvRegistration], groups: int, **other: Any) -> TrajectoryQueue[int]:
    """Queue so many groups of every environment, each with its environment as payload."""
    made = running_queue(*envs, capacity=None, **other)
    for env_id, each in enumerate(envs):
        made.submit(0, [group(env_id, each.group_size, env_id=env_id)] * groups)
    return made


def expected(envs: list[EnvRegistration]) -> dict[int, float]:
    """Return the shares among registered environments."""
    weights = {env_id: each.weight for env_id, each in enumerate(envs)}
    promised = {env_id: each.min_batch_allocation or 0.0 for env_id, each in enumerate(envs)}
    return shares(weights, promised)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "minima", "expected"),
    [
        ([1, 3], [0, 0], [0.25, 0.75]),
        ([1, 1, 2], [0.4, 0, 0], [0.4, 0.2, 0.4]),
        ([1, 1, 2], [0.1, 0, 0], [0.25, 0.25, 0.5]),
        ([0, 0], [0, 0], [0.5, 0.5]),
        ([-1, 1], [0, 0], [MIN_SHARE / 2, 1 - MIN_SHARE / 2]),
        ([1, 1], [2.0, 0], [1 - MIN_SHARE, MIN_SHARE]),
        ([1, 1, 1], [0.9, 0.9, 0], [(1 - MIN_SHARE) / 2, (1 - MIN_SHARE) / 2, MIN_SHARE]),
    ],
)
def test_parts_are_by_weight_and_at_least_the_minimum(
    weights: list[float], minima: list[float], expected: list[float]
) -> None:
    found = shares(dict(enumerate(weights)), dict(enumerate(minima)))

    assert list(found.values()) == pytest.approx(expected)


@settings(max_examples=25)
@given(st.lists(st.tuples(WEIGHTS, st.sampled_from([0.0, 0.01, 0.3, 0.9])), min_size=1, max_size=20))
def test_shares_sum_to_one_and_each_is_at_least_its_minimum(said: list[tuple[float, float]]) -> None:
    promised = sum(minimum for _, minimum in said)

    found = shares(
        {lane: weight for lane, (weight, _) in enumerate(said)},
        {lane: minimum for lane, (_, minimum) in enumerate(said)},
    )

    assert sum(found.values()) == pytest.approx(1)
    for lane, (_, minimum) in enumerate(said):
        assert found[lane] >= minimum * min(1, (1 - MIN_SHARE) / promised if promised else 1) - 1e-9
        assert found[lane] >= MIN_SHARE / len(said) - 1e-9


def test_weights_count_among_a_hundred_times_as_many_environments() -> None:
    found = shares({lane: 1.0 + lane % 2 for lane in range(300)}, {})

    assert found[1] / found[0] == pytest.approx(2)


# -- what is handed out ------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(ENVIRONMENTS)
def test_a_lane_with_groups_is_at_most_a_group_of_each_behind_its_share(
    envs: list[EnvRegistration],
) -> None:
    made, due = filled(envs, 60), expected(envs)
    given_: Counter[int] = Counter()
    allowed = 2 * max(each.group_size for each in envs) * len(envs)

    for _ in range(60):
        one = made.take(0)
        assert one is not None
        given_[one.payload] += one.sequences
        for env_id, part in due.items():
            assert given_[env_id] >= part * given_.total() - allowed


@settings(max_examples=25)
@given(ENVIRONMENTS, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30))
def test_all_in_turn_is_what_taking_one_after_the_other_gives(
    envs: list[EnvRegistration], steps: list[tuple[int, int]]
) -> None:
    made = running_queue(*envs, capacity=None)
    for pick, count in steps:
        env_id = pick % len(envs)
        made.submit(0, [group(env_id, envs[env_id].group_size, env_id=env_id)] * 3)
        for _ in range(count):
            made.take(0)
    foreseen = [queued.submission.payload for queued in made._scheduler.in_turn(made._pending.lanes)]

    assert [one.payload for one in iter(lambda: made.take(0), None)] == foreseen


def test_batches_are_filled_by_weight() -> None:
    made = filled([env(1, weight=3), env(1, weight=1)], 200, batch_size=16)

    batches = [payloads(next_batch(made, 0)) or [] for _ in range(10)]

    assert [Counter(batch) for batch in batches] == [Counter({0: 12, 1: 4})] * 10


@pytest.mark.parametrize("batches", [True, False])
def test_lanes_without_an_environment_take_no_share_from_those_that_have_one(batches: bool) -> None:  # noqa: FBT001
    made = filled([env(weight=0.75), env(weight=0.25), env(weight=5), env(weight=5)], 200, batch_size=16)
    made.submit(0, [group(None)] * 200)
    for left in (2, 3):
        made.disconnect_env(left)

    if batches:
        left_queue = [each for _ in range(60) for each in payloads(next_batch(made)) or []]
    else:
        left_queue = [one.payload for _ in range(240) if (one := made.take(0))]

    shares_of = {lane: groups / 240 for lane, groups in Counter(left_queue).items()}
    assert shares_of[0] == pytest.approx(0.75, abs=0.015)
    assert shares_of[1] == pytest.approx(0.25, abs=0.015)


def test_groups_of_lanes_without_an_environment_are_delivered_oldest_first_even_if_others_are_always_full() -> None:
    made = running_queue(env(1), env(1), env(1), capacity=None, heartbeat_timeout_s=60)
    made.submit(0, [group("left", 1, env_id=1), group("timed out", 1, env_id=2), group("anonymous", 1)])
    made.disconnect_env(1)
    delivered = []
    for _ in range(400):
        made.submit(100, [group("active", 1, env_id=0)])
        one = made.take(100)
        assert one is not None
        delivered.append(one.payload)

    assert [each for each in delivered if each != "active"] == ["left", "timed out", "anonymous"]


def test_lanes_without_an_environment_have_all_that_the_others_leave() -> None:
    made = running_queue(env(), capacity=None)
    made.submit(0, [group("active", env_id=0), *[group("anonymous")] * 20])

    assert Counter(one.payload for one in taken(made)) == Counter({"anonymous": 20, "active": 1})


def test_a_minimum_holds_in_every_batch() -> None:
    made = filled([env(1, weight=9), env(1, minimum=0.5), env(1)], 100, batch_size=16)

    assert all(Counter(payloads(next_batch(made, 0)))[1] >= 8 for _ in range(10))


def test_shares_are_of_sequences_not_of_groups() -> None:
    made = filled([env(1), env(4)], 100)

    taken = Counter[int]()
    for _ in range(50):
        one = made.take(0)
        assert one is not None
        taken[one.payload] += one.sequences

    assert taken == Counter({0: 40, 1: 40})


def test_the_weight_of_nothing_is_not_starved() -> None:
    made = filled([env(1, weight=1), env(1, weight=0)], 1_000)

    assert Counter(one.payload for _ in range(1_000) if (one := made.take(0)))[1] >= 1_000 * MIN_SHARE / 3


def test_an_unused_share_is_not_accumulated() -> None:
    made = running_queue(env(1), env(1), capacity=None)
    made.submit(0, [group(0, 1, env_id=0)] * 200)
    for _ in range(100):
        made.take(0)
    made.submit(0, [group(1, 1, env_id=1)] * 100)

    assert Counter(one.payload for _ in range(20) if (one := made.take(0))) == Counter({0: 10, 1: 10})


def test_a_share_that_is_unused_while_the_queue_is_empty_is_not_accumulated() -> None:
    made = running_queue(env(1), env(1), capacity=None)
    for _ in range(100):
        made.submit(0, [group(0, 1, env_id=0)])
        made.take(0)
    for env_id in (1, 0):
        made.submit(0, [group(env_id, 1, env_id=env_id)] * 20)

    assert Counter(one.payload for _ in range(20) if (one := made.take(0))) == Counter({0: 10, 1: 10})


def test_a_lane_with_one_group_at_a_time_gets_at_most_its_share() -> None:
    made = running_queue(env(1), env(1, weight=0.25), capacity=None)
    made.submit(0, [group(0, 1, env_id=0)] * 300)
    taken = Counter[int]()
    for _ in range(200):
        if not made.environments(0)[1].queued:
            made.submit(0, [group(1, 1, env_id=1)])
        one = made.take(0)
        assert one is not None
        taken[one.payload] += 1

    assert taken[1] == pytest.approx(40, abs=2)


# -- room to wait in ---------------------------------------------------------------------------------------------------


def flood(made: TrajectoryQueue[Any], env_id: int) -> int:
    """Submit until there is no room; returns how many were accepted."""
    for accepted in range(10_000):
        try:
            made.submit(0, [group(env_id, env_id=env_id)])
        except QueueFull:
            return accepted
    raise AssertionError


def test_the_only_environment_has_all_the_room() -> None:
    assert flood(running_queue(env(), capacity=100), 0) == 100


def test_a_fast_environment_leaves_room_for_the_others() -> None:
    made = running_queue(*[env()] * 10, capacity=100)

    accepted = [flood(made, env_id) for env_id in range(5)]

    assert accepted == [50, 25, 13, 6, 3]


def test_room_that_is_made_is_for_those_who_hold_least() -> None:
    made = running_queue(env(), env(), capacity=100)
    flood(made, 0)
    flood(made, 1)
    for _ in range(10):
        made.take(0)

    assert (flood(made, 0), flood(made, 1)) == (0, 8)


def test_room_of_a_group_is_freed_where_it_was_held_though_its_sender_registers_meanwhile() -> None:
    made = running_queue(env(), env(), batch_size=4, capacity=4)
    made.submit(0, [group(env_id=2)] * 2)
    admitted(made, env())
    taken(made)
    made.submit(0, [group(env_id=0)])

    assert flood(made, -1) == 2


def test_room_for_the_first_batch_is_not_shared() -> None:
    made = running_queue(env(), env(), batch_size=40, capacity=10)

    assert flood(made, 0) == 10


def test_one_with_a_minimum_that_finds_no_room_is_not_waited_for() -> None:
    made = running_queue(env(name="fast"), env(minimum=0.5, name="late"), capacity=2)
    flood(made, 0)
    waited = next_batch(made, 0), made.stalls()
    assert flood(made, 1) == 0

    assert waited == (None, ["batches wait for late_0, which must have 4 of 8 and has no group that waits"])
    assert made.stalls() == []
    assert payloads(next_batch(made, 0)) == [0, 0]
    made.submit(0, [group(1, env_id=1)] * 2)
    next_batch(made, 0)
    made.submit(0, [group(0, env_id=0)] * 2)
    assert next_batch(made, 0) is None  # it found room, and is waited for again


def test_room_is_shared_equally_where_all_submit_as_fast_as_they_can() -> None:
    made = running_queue(*[env()] * 10, capacity=110)
    refused = set[int]()
    while len(refused) < 10:
        for env_id in {*range(10)} - refused:
            try:
                made.submit(0, [group(env_id=env_id)])
            except QueueFull:
                refused.add(env_id)

    held = [each.queued // 4 for each in made.environments(0)]

    assert max(held) - min(held) <= 1
    assert sum(held) == pytest.approx(100, abs=5)


@settings(max_examples=8)
@given(st.lists(WEIGHTS, min_size=2, max_size=4), st.data())
def test_shares_hold_however_fast_each_submits_while_the_queue_is_full(weights: list[float], data: Any) -> None:
    envs = [env(1, weight=weight) for weight in weights]
    made, due = running_queue(*envs, capacity=100), expected(envs)
    speeds = [data.draw(st.integers(5, 50)) for _ in envs]
    taken = Counter[int]()

    for _ in range(100):
        for env_id, speed in enumerate(speeds):
            for _ in range(speed):
                try:
                    made.submit(0, [group(env_id, 1, env_id=env_id)])
                except QueueFull:
                    break
        for _ in range(5):
            one = made.take(0)
            assert one is not None
            taken[one.payload] += 1

    assert all(taken[env_id] == pytest.approx(500 * part, abs=6) for env_id, part in due.items())
