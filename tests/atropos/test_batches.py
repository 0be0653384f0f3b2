"""Batches: exactly `batch_size` sequences; without stalls, or by the original's rules where those are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.atropos.builders import admitted, env, group, payloads, running_queue

from penstock.stages.integrations.atropos.queue.exact_sums import first_summing_to
from penstock.stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue

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
    """One to four of them, and in most cases some have a minimum."""
    minima = st.none() | MINIMA | MINIMA if draw(st.integers(0, 3)) else st.none()
    each = st.builds(
        Env,
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        group_size=st.sampled_from([1, 2, 3, 4, 8]),
        minimum=minima,
    )
    return draw(st.lists(each, min_size=1, max_size=4))


def in_queue(envs: list[Env], batch_size: int) -> TrajectoryQueue[Any]:
    made = running_queue(batch_size=batch_size)
    for each in envs:
        admitted(
            made,
            env(each.group_size, weight=each.weight, minimum=each.minimum),
        )
    return made


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 3 + ["batch"]),
        st.integers(0, 4),
        SIZES | st.none(),
    ),
    min_size=20,
    max_size=60,
)
"""What is done, by which environment (or which it is), and in which size, if not the environment's."""


def test_a_backlog_comes_out_oldest_batch_first_and_each_is_a_step_when_it_leaves() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group(number) for number in range(3)])

    left = [(payloads(made.batch(0)), made.status().current_step) for _ in range(4)]

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

    batch = payloads(made.batch(0))

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
    made = in_queue(envs, batch_size)
    waiting: list[Group] = []
    for number, (step, pick, size) in enumerate(steps):
        env_id = pick if pick < len(envs) else None
        if step == "submit":
            own = min(size or 4, batch_size) if env_id is None else envs[env_id].group_size
            waiting.append(Group(number, own, env_id))
            made.submit(0, [group(waiting[-1], own, env_id=env_id)])
        else:
            in_turn = made._waiting.turns.in_turn(made._waiting.queue)
            expected = slow_batch([each.submission.payload for each in in_turn], envs, batch_size)
            assert payloads(made.batch(0)) == expected
            waiting = [each for each in waiting if each not in (expected or [])]


def slow_batch(waiting: list[Group], envs: list[Env], batch_size: int) -> list[Group] | None:
    """First the minima, then what sums to the rest, the oldest wherever that can be; or without minima."""
    least = {env_id: int(batch_size * each.minimum) for env_id, each in enumerate(envs) if each.minimum}
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
    """Of all that sum to `wanted`, those with the newest group, of these those with the newest next to that, …"""

    @cache
    def found(among: int, wanted: int) -> list[Group] | None:
        """Of the first so many."""
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

    found = first_summing_to(sizes, wanted)

    assert [groups[index] for index in found or []] == oldest_first(groups, wanted)


def test_groups_that_do_not_divide_the_largest_are_not_left_behind() -> None:
    made = running_queue(batch_size=7)
    made.submit(0, [group("a", 3), group("b", 4), group("c", 4), group("d", 3)])

    assert [payloads(made.batch(0)) for _ in range(3)] == [["a", "b"], ["c", "d"], None]


def test_groups_without_an_environment_are_packed_beside_minima() -> None:
    made = running_queue(env(minimum=0.5))
    made.submit(0, [group("nobody's"), group("its own", env_id=0)])

    assert payloads(made.batch(0)) == ["its own", "nobody's"]


def test_an_environment_with_a_minimum_is_waited_for() -> None:
    made = running_queue(env(minimum=0.5, name="slow"), env(name="fast"))
    made.submit(0, [group(number, env_id=1) for number in range(4)])
    before = made.batch(0), made.stalls()
    made.submit(0, [group("slow", env_id=0)])

    assert before == (None, ["batches wait for slow_0, which is to have 4 of 8 and has none that waits"])
    assert payloads(made.batch(0)) == ["slow", 0]


def test_one_that_died_is_waited_for_no_longer_than_its_silence() -> None:
    made = running_queue(env(minimum=0.5), env(), heartbeat_timeout_s=60)
    made.submit(1, [group(number, env_id=1) for number in range(4)])

    assert payloads(made.batch(59)) is None
    assert payloads(made.batch(60)) == [0, 1]


def test_one_that_is_heard_of_again_counts_again() -> None:
    made = running_queue(env(minimum=0.5), env(), heartbeat_timeout_s=60)
    made.submit(1, [group(number, env_id=1) for number in range(4)])
    made.expire(60)
    made.env_status(60, 0)

    assert made.batch(60) is None


def test_minima_that_leave_no_exact_sum_yield() -> None:
    made = running_queue(env(3, minimum=0.25), env(4))
    made.submit(0, [group("a", 3, env_id=0), group("b", env_id=1), group("c", env_id=1)])

    assert payloads(made.batch(0)) == ["b", "c"]


def test_minima_that_are_scaled_to_nothing_are_a_group() -> None:
    made = running_queue(env(1, minimum=0.25), env(1, minimum=0.9), env(1, minimum=0.9), batch_size=4)
    made.submit(0, [group(lane, 1, env_id=lane) for lane in (1, 2, 1, 2, 1, 2, 0)])

    assert payloads(made.batch(0)) == [0, 1, 2, 1]


def test_minima_that_are_more_than_a_batch_are_scaled() -> None:
    made = running_queue(env(2, minimum=0.75), env(2, minimum=0.75))
    made.submit(0, [group(f"{lane}{n}", 2, env_id=lane) for lane in (0, 1) for n in range(4)])

    assert payloads(made.batch(0)) == ["00", "01", "10", "11"]
