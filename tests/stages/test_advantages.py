from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.stages.advantages import (
    BY_GROUP,
    EPSILON,
    GroupMode,
    Groups,
    RunningStatistics,
    dr_grpo,
    grpo,
    rloo,
    whitened,
)

patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
by_group = pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo"])


def of_groups(mode: GroupMode, *groups: Sequence[float], live: Sequence[bool] | None = None) -> list[float]:
    rewards = np.array(list(itertools.chain(*groups)), np.float32)
    alive = np.ones(len(rewards), np.bool_) if live is None else np.array(live)
    sizes = np.array([len(group) for group in groups], np.int64)
    advantages: list[float] = BY_GROUP[mode](Groups(rewards, alive, sizes)).tolist()
    return advantages


def exact(mode: GroupMode, rewards: Sequence[float]) -> list[float]:
    """The definition, in exact rational arithmetic up to the one square root."""
    values = [Fraction(float(np.float32(reward))) for reward in rewards]
    mean = sum(values, Fraction()) / len(values)
    centred = [value - mean for value in values]
    if mode == "dr_grpo":
        return [float(c) for c in centred]
    if mode == "rloo":
        total = sum(values, Fraction())
        return [float(value - (total - value) / (len(values) - 1)) for value in values]
    deviation = math.sqrt(sum((c * c for c in centred), Fraction()) / (len(values) - 1))
    return [float(c) / (deviation + EPSILON) for c in centred]


def test_grpo_divides_by_the_deviation_of_the_group() -> None:
    assert of_groups("grpo", [0, 1, 2]) == pytest.approx([-1, 0, 1], abs=1e-5)


def test_dr_grpo_only_centres() -> None:
    assert of_groups("dr_grpo", [0, 1, 2]) == [-1, 0, 1]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert of_groups("rloo", [0, 1, 2, 3]) == pytest.approx([-2, 1 - 5 / 3, 2 - 4 / 3, 2])


@by_group
def test_groups_do_not_see_each_other(mode: GroupMode) -> None:
    alone, other = of_groups(mode, [0, 1, 1]), of_groups(mode, [100, -50])

    assert of_groups(mode, [0, 1, 1], [], [100, -50]) == [*alone, *other]


@by_group
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.0, 1e-30, 1e30])
def test_a_group_of_one_gives_exactly_zero(mode: GroupMode, reward: float) -> None:
    assert of_groups(mode, [reward]) == [0.0]


@by_group
@pytest.mark.parametrize("reward", [0.0, 1 / 3, 0.1, 1e-8, -7e5, 1e30])
def test_a_constant_group_gives_exactly_zero(mode: GroupMode, reward: float) -> None:
    assert of_groups(mode, [reward] * 7) == [0.0] * 7


@by_group
@pytest.mark.parametrize("reward", [1.0, -1 / 3, 1000.0, 1e-20])
def test_float_noise_gives_exactly_zero(mode: GroupMode, reward: float) -> None:
    near = np.nextafter(np.float32(reward), np.float32(np.inf))

    assert of_groups(mode, [reward, near, reward]) == [0.0] * 3


@by_group
def test_a_small_difference_beside_a_large_mean_is_no_noise(mode: GroupMode) -> None:
    assert of_groups(mode, [10_000, 10_001]) == pytest.approx(exact(mode, [10_000, 10_001]), rel=1e-9)


@by_group
def test_masked_sequences_are_zero_and_change_nothing_for_the_others(mode: GroupMode) -> None:
    three = of_groups(mode, [0, 1, 1])

    assert of_groups(mode, [0, 1, 99, 1], live=[True, True, False, True]) == [*three[:2], 0, three[2]]


@by_group
def test_one_live_sequence_among_masked_ones_is_alone(mode: GroupMode) -> None:
    assert of_groups(mode, [3, 5, 7], live=[False, True, False]) == [0, 0, 0]


@by_group
def test_no_sequences_have_no_advantages(mode: GroupMode) -> None:
    assert of_groups(mode) == []
    assert of_groups(mode, [], []) == []


rewards = st.lists(st.integers(-20, 20).map(lambda i: i / 4), min_size=2, max_size=12)
"""Multiples of 1/4: exact in float32, so that shifting and scaling them by powers of two is exact too."""


@by_group
@patiently
@given(rewards)
def test_they_agree_with_exact_rational_arithmetic(mode: GroupMode, rewards: list[float]) -> None:
    assert of_groups(mode, rewards) == pytest.approx(exact(mode, rewards), rel=1e-12, abs=1e-12)


@by_group
@patiently
@given(rewards)
def test_they_sum_to_zero_within_a_group(mode: GroupMode, rewards: list[float]) -> None:
    assert math.fsum(of_groups(mode, rewards)) == pytest.approx(0, abs=1e-9)


@by_group
@patiently
@given(rewards, st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_changes_nothing(mode: GroupMode, rewards: list[float], shift: int) -> None:
    moved = [reward + shift for reward in rewards]

    assert of_groups(mode, moved) == pytest.approx(of_groups(mode, rewards), rel=1e-9, abs=1e-9)


@patiently
@given(rewards, st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_scale_of_all_rewards_scales_or_cancels(rewards: list[float], scale: float) -> None:
    scaled = [reward * scale for reward in rewards]

    for mode in ("dr_grpo", "rloo"):
        assert of_groups(mode, scaled) == pytest.approx([a * scale for a in of_groups(mode, rewards)], rel=1e-12)
    assert of_groups("grpo", scaled) == pytest.approx(of_groups("grpo", rewards), rel=1e-4)  # but for ε


@by_group
@patiently
@given(rewards, st.randoms(use_true_random=False))
def test_order_within_a_group_does_not_matter(mode: GroupMode, rewards: list[float], random: object) -> None:
    order = sorted(range(len(rewards)), key=lambda _: random.random())  # type: ignore[attr-defined]

    straight, mixed = of_groups(mode, rewards), of_groups(mode, [rewards[i] for i in order])

    assert mixed == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-12)


@by_group
@patiently
@given(rewards)
def test_a_better_reward_never_has_a_smaller_advantage(mode: GroupMode, rewards: list[float]) -> None:
    advantages = of_groups(mode, rewards)

    assert [a for _, a in sorted(zip(rewards, advantages, strict=True))] == sorted(advantages)


def test_deviations_are_zero_exactly_where_nothing_can_be_told_apart() -> None:
    rewards = np.array([1 / 3] * 7 + [0, 2, 5], np.float32)

    assert Groups(rewards, np.ones(10, np.bool_), np.array([7, 2, 1])).deviations.tolist() == [0, math.sqrt(2), 0]


def test_whitening_takes_everything_as_one_population() -> None:
    rewards = np.array([0, 1, 2, 50], np.float32)

    white = whitened(rewards, np.array([True, True, True, False]))

    assert white.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-5)


def test_the_functions_are_the_ones_that_the_modes_name() -> None:
    assert [BY_GROUP["grpo"], BY_GROUP["dr_grpo"], BY_GROUP["rloo"]] == [grpo, dr_grpo, rloo]


# -- running statistics ----------------------------------------------------------------------------------------------


chunks = st.lists(st.lists(st.integers(-20, 20).map(float), max_size=6), min_size=1, max_size=6)


def array(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@patiently
@given(chunks)
def test_running_statistics_equal_those_of_everything_at_once(chunks: list[list[float]]) -> None:
    running = RunningStatistics()

    for chunk in chunks:
        running.update(array(chunk))

    everything = [x for chunk in chunks for x in chunk]
    assert running.count == len(everything)
    if len(everything) > 1:
        assert running.mean == pytest.approx(np.mean(everything), abs=1e-12)
        assert running.deviation == pytest.approx(np.std(everything, ddof=1), abs=1e-9)
        assert (running.lowest, running.highest) == (min(everything), max(everything))


def test_while_all_was_the_same_everything_is_exactly_zero() -> None:
    running = RunningStatistics()
    for _ in range(10):
        running.update(array([1 / 3] * 3))

    assert running.deviation == 0
    assert running.whitened(array([1 / 3, 5]), np.array([True, True])).tolist() == [0, 0]


def test_before_anything_was_seen_everything_is_exactly_zero() -> None:
    running = RunningStatistics()
    running.update(array([]))

    assert running == RunningStatistics()
    assert running.whitened(array([5]), np.array([True])).tolist() == [0]
