"""Batches: exactly `batch_size` sequences; without stalls, or by the original's rules where those are asked for."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.atropos.builders import env, group, next_batch, payloads, running_queue

from penstock._stages.integrations.atropos.queue import batches
from penstock._stages.integrations.atropos.queue.batches import exact_subset, form_batch
from penstock._stages.integrations.atropos.queue.scheduling import ANONYMOUS, PendingGroups, QueuedGroup

SIZES = st.sampled_from([1, 2, 3, 4, 5, 8])
MINIMA = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8])


@dataclass(frozen=True)
class Group:
    """A group: its number, how many sequences it has, and whose it is."""

    number: int
    size: int
    env_id: int | None = None


@dataclass(frozen=True)
class Env:
    group_size: int
    weight: float
    minimum: float | None


@st.composite
def environments(draw: st.DrawFn) -> list[Env]:
    """Draw one to four environments, in most cases some with a minimum."""
    minima = st.none() | MINIMA | MINIMA if draw(st.integers(0, 3)) else st.none()
    each = st.builds(
        Env,
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        group_size=st.sampled_from([1, 2, 3, 4, 8]),
        minimum=minima,
    )
    return draw(st.lists(each, min_size=1, max_size=4))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 3 + ["batch"]),
        st.integers(0, 4),
        SIZES | st.none(),
    ),
    min_size=20,
    max_size=60,
)
"""Steps: an action, the environment, and a group size other than the environment's."""


def test_a_backlog_comes_out_oldest_batch_first_and_each_is_a_step_when_it_leaves() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group(number) for number in range(3)])

    left = [(payloads(next_batch(made, 0)), made.status().current_step) for _ in range(4)]

    assert left == [([0], 1), ([1], 2), ([2], 3), (None, 3)]


@settings(max_examples=50)
@given(st.lists(SIZES, max_size=9), st.integers(1, 12))
def test_there_is_a_batch_whenever_groups_sum_to_it_and_the_oldest_is_in_it_wherever_it_can_be(
    sizes: list[int], batch_size: int
) -> None:
    made = running_queue(batch_size=batch_size)
    fits = [size for size in sizes if size <= batch_size]
    made.submit(0, [group(number, size) for number, size in enumerate(fits)])
    possible = [
        some for n in range(1, 10) for some in combinations(range(len(fits)), n) if sum_of(fits, some) == batch_size
    ]

    batch = payloads(next_batch(made, 0))

    if not possible:
        assert batch is None
    else:
        assert batch in [list(some) for some in possible]
        assert (0 in batch) == any(0 in some for some in possible)


def sum_of(sizes: list[int], some: tuple[int, ...]) -> int:
    return sum(sizes[index] for index in some)


@settings(max_examples=50)
@given(environments(), st.sampled_from([4, 6, 8, 12]), STEPS)
def test_batches_are_those_of_the_slow_rules(
    envs: list[Env], batch_size: int, steps: list[tuple[str, int, int | None]]
) -> None:
    envs = [each for each in envs if each.group_size <= batch_size]
    minima = {env_id: int(batch_size * each.minimum) for env_id, each in enumerate(envs) if each.minimum is not None}
    pending: PendingGroups[Group] = PendingGroups()
    waiting: list[Group] = []
    for number, (step, pick, size) in enumerate(steps):
        env_id = pick if pick < len(envs) else None
        if step == "submit":
            own = min(size or 4, batch_size) if env_id is None else envs[env_id].group_size
            waiting.append(Group(number, own, env_id))
            pending.append(ANONYMOUS if env_id is None else env_id, group(waiting[-1], own))
        else:
            formed = form_batch(pending, partial(by_arrival, pending), batch_size, minima)
            expected = slow_batch(waiting, minima, batch_size)
            assert [each.submission.payload for each in formed or []] == (expected or [])
            for each in formed or []:
                pending.remove(each)
            waiting = [each for each in waiting if each not in (expected or [])]


def by_arrival(pending: PendingGroups[Group]) -> list[QueuedGroup[Group]]:
    groups = [each for lane in pending.lanes.values() for each in lane.groups.values()]
    return sorted(groups, key=lambda each: each.number)


def slow_batch(waiting: list[Group], least: dict[int, int], batch_size: int) -> list[Group] | None:
    """Form a batch of the minima, then of the oldest groups that sum to the rest; or without minima."""
    own = {env_id: [each for each in waiting if each.env_id == env_id] for env_id in least if least[env_id]}
    if not all(own.values()):
        return None
    together = sum(least.values())
    first: list[Group] = []
    for env_id, groups in own.items():
        wanted = least[env_id]
        if together > batch_size:
            wanted = max(min(each.size for each in groups), wanted * batch_size // together)
        got = 0
        for each in groups:
            if got < wanted and total(first) + each.size <= batch_size:
                first.append(each)
                got += each.size
    return slow_rest(first, waiting, batch_size) or (slow_rest([], waiting, batch_size) if first else None)


def slow_rest(first: list[Group], waiting: list[Group], batch_size: int) -> list[Group] | None:
    others = [each for each in waiting if each not in first]
    missing = batch_size - total(first)
    chosen = oldest_first(others, missing)
    return first + chosen if total(chosen) == missing else None


def oldest_first(groups: list[Group], wanted: int) -> list[Group]:
    return newest_first(groups[::-1], wanted)[::-1]


def newest_first(groups: list[Group], wanted: int) -> list[Group]:
    """Return of all groups that sum to `wanted` those with the newest one, of these those with the next newest, …"""

    @cache
    def found(among: int, wanted: int) -> list[Group] | None:
        """Search among the first groups."""
        if wanted == 0:
            return []
        for index in reversed(range(among)):
            group = groups[index]
            if group.size <= wanted and (rest := found(index, wanted - group.size)) is not None:
                return [*rest, group]
        return None

    return found(len(groups), wanted) or []


def total(groups: list[Group]) -> int:
    return sum(group.size for group in groups)


@settings(max_examples=50)
@given(st.lists(SIZES, max_size=10), st.integers(1, 20))
def test_sizes_are_found_that_sum_to_a_number_if_there_are_any_and_the_first_that_do(
    sizes: list[int], wanted: int
) -> None:
    groups = [Group(number, size) for number, size in enumerate(sizes)]

    found = exact_subset(sizes, wanted)

    assert [groups[index] for index in found or []] == oldest_first(groups, wanted)


@pytest.mark.parametrize(
    ("sizes", "possible"),
    [
        ([257] * 4_095 + [2**20 - 257 * 4_000], True),
        ([*range(1_001, 5_097)], True),
        ([3 * size for size in range(200, 4_296)], False),
    ],
)
def test_the_largest_batch_is_formed_of_a_full_queue_in_little_memory(sizes: list[int], possible: bool) -> None:  # noqa: FBT001
    made = running_queue(batch_size=2**20)
    for size in sizes:
        made.submit(0, [group(size=size)])
    tracemalloc.start()
    try:
        batch = made.batch(0, lease_s=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (batch is not None) == possible
    assert peak < 16 * 2**20


@pytest.mark.parametrize("wanted", [100, 2**14, 2**20])
def test_the_work_of_one_search_is_bounded(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    searched: list[int] = []
    usable = batches._usable

    def counted(sizes: list[int], start: int, missing: int) -> list[int]:
        found = usable(sizes, start, missing)
        searched.append(len(found) * missing)
        return found

    monkeypatch.setattr(batches, "_usable", counted)
    draw = random.Random(0)  # noqa: S311 (sizes)

    assert exact_subset([3 * draw.randrange(1, 2_000) for _ in range(4_096)], wanted) is None
    assert len(searched) <= 8
    assert sum(searched) < 8 * (batches.WORK_BITS + wanted)


def test_groups_that_do_not_divide_the_largest_are_not_left_behind() -> None:
    made = running_queue(batch_size=7)
    made.submit(0, [group("a", 3), group("b", 4), group("c", 4), group("d", 3)])

    assert [payloads(next_batch(made, 0)) for _ in range(3)] == [["a", "b"], ["c", "d"], None]


def test_groups_without_an_environment_are_packed_beside_minima() -> None:
    made = running_queue(env(minimum=0.5))
    made.submit(0, [group("anonymous"), group("its own", env_id=0)])

    assert payloads(next_batch(made, 0)) == ["its own", "anonymous"]


def test_an_environment_with_a_minimum_is_waited_for() -> None:
    made = running_queue(env(minimum=0.5, name="slow"), env(name="fast"))
    made.submit(0, [group(number, env_id=1) for number in range(4)])
    before = next_batch(made, 0), made.stalls()
    made.submit(0, [group("slow", env_id=0)])

    assert before == (None, ["batches wait for slow_0, which must have 4 of 8 and has no group that waits"])
    assert payloads(next_batch(made, 0)) == ["slow", 0]


def test_an_environment_that_disconnects_is_waited_for_no_longer() -> None:
    made = running_queue(env(minimum=0.5), env())
    made.submit(0, [group(number, env_id=1) for number in range(4)])
    waited = next_batch(made)
    made.disconnect_env(0)

    assert waited is None
    assert payloads(next_batch(made)) == [0, 1]
    assert made.env_status(0, 1).unallocated_fraction == 1


def test_an_environment_that_timed_out_is_waited_for_no_longer() -> None:
    made = running_queue(env(minimum=0.5), env(), heartbeat_timeout_s=60)
    made.submit(1, [group(number, env_id=1) for number in range(4)])

    assert payloads(next_batch(made, 59)) is None
    assert payloads(next_batch(made, 60)) == [0, 1]


def test_an_environment_is_active_again_after_a_request() -> None:
    made = running_queue(env(minimum=0.5), env(), heartbeat_timeout_s=60)
    made.submit(1, [group(number, env_id=1) for number in range(4)])
    made.expire(60)
    made.env_status(60, 0)

    assert next_batch(made, 60) is None


def test_minima_that_leave_no_exact_sum_yield() -> None:
    made = running_queue(env(3, minimum=0.25), env(4))
    made.submit(0, [group("a", 3, env_id=0), group("b", env_id=1), group("c", env_id=1)])

    assert payloads(next_batch(made, 0)) == ["b", "c"]


def test_minima_that_are_scaled_to_nothing_are_a_group() -> None:
    made = running_queue(env(1, minimum=0.25), env(1, minimum=0.9), env(1, minimum=0.9), batch_size=4)
    made.submit(0, [group(lane, 1, env_id=lane) for lane in (1, 2, 1, 2, 1, 2, 0)])

    assert payloads(next_batch(made, 0)) == [0, 1, 2, 1]


def test_minima_that_are_more_than_a_batch_are_scaled() -> None:
    made = running_queue(env(2, minimum=0.75), env(2, minimum=0.75))
    made.submit(0, [group(f"{lane}{n}", 2, env_id=lane) for lane in (0, 1) for n in range(4)])

    assert payloads(next_batch(made, 0)) == ["00", "01", "10", "11"]
