from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, asdict
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock._schemas.noise import rounding
from penstock._stages.advantages.formulas import (
    EPSILON,
    Groups,
    RunningStatistics,
    dr_grpo,
    grpo,
    maxrl,
    opo,
    rloo,
    whitened,
)
from penstock._stages.advantages.zero_advantages import zero_advantages
from penstock.testing import group

GroupMode: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "opo"]

fewer = settings(max_examples=60)
by_group = pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo", "opo"])


def lengths_of(count: int) -> list[int]:
    """Return the number of trained tokens of each sequence; they differ."""
    return [1 + 3 * i % 7 for i in range(count)]


def of_groups(
    mode: GroupMode,
    *groups: Sequence[float],
    live: Sequence[bool] | None = None,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    rewards = np.array(list(itertools.chain(*groups)), np.float32)
    alive = np.ones(len(rewards), np.bool_) if live is None else np.array(live)
    of_each = np.array(
        [n for group in groups for n in lengths_of(len(group))] if lengths is None else lengths, np.int64
    )
    compared = Groups(rewards, alive, np.array([len(group) for group in groups], np.int64), rounding(rewards))
    if mode == "opo":
        advantages = opo(compared, of_each * alive)
    else:
        advantages = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}[mode](compared)
    listed: list[float] = advantages.tolist()
    return listed


def exact(mode: GroupMode, rewards: Sequence[float]) -> list[float]:
    """Compute the definition in exact rational arithmetic, up to the one square root."""
    values = [Fraction(float(np.float32(reward))) for reward in rewards]
    if mode == "opo":
        lengths = lengths_of(len(values))
        baseline = sum((n * value for n, value in zip(lengths, values, strict=True)), Fraction()) / sum(lengths)
        return [float(value - baseline) for value in values]
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


def test_opo_compares_with_the_mean_by_length() -> None:
    assert of_groups("opo", [0, 4, 2], lengths=[1, 1, 2]) == [-2, 2, 0]


def of_maxrl(*groups: Sequence[float], live: Sequence[bool] | None = None) -> list[float]:
    rewards = np.array(list(itertools.chain(*groups)), np.float32)
    alive = np.ones(len(rewards), np.bool_) if live is None else np.array(live)
    compared = Groups(rewards, alive, np.array([len(group) for group in groups], np.int64), rounding(rewards))
    listed: list[float] = maxrl(compared).tolist()
    return listed


def of_prime_rl(rewards: Sequence[float]) -> list[float]:
    """prime-rl at 559b44772e47, src/prime_rl/orchestrator/algo/max_rl.py:25-27.

    rewards = torch.tensor([trace.reward for trace in traces], dtype=torch.float32)
    mean = rewards.mean()
    advantages = torch.zeros_like(rewards) if mean <= 0 else (rewards - mean) / mean
    """
    mean = float(np.mean(rewards))
    return [0.0 if mean <= 0 else (reward - mean) / mean for reward in rewards]


@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 0], [1, 1, 0], [0, 0], [1, 1], [1], [0.25, 0.5, 0.5, 2], [-1, -3], [-1, 0.5, 2.5]], ids=str
)
def test_maxrl_divides_by_the_mean_of_the_group_as_prime_rl_does(rewards: Sequence[float]) -> None:
    assert of_maxrl(rewards) == pytest.approx(of_prime_rl(rewards))


def test_maxrl_compares_within_a_group_and_without_masked_sequences() -> None:
    assert of_maxrl([1, 0, 0, 0], [1, 0]) == [3, -1, -1, -1, 1, -1]
    assert of_maxrl([1, 0, math.nan, 0, 0], live=[True, True, False, True, True]) == [3, -1, 0, -1, -1]
    assert of_maxrl([]) == []


def test_maxrl_does_not_divide_by_a_mean_that_is_noise() -> None:
    assert of_maxrl([0.1, 0.2, -0.3]) == [0, 0, 0]
    assert of_maxrl([1 / 3] * 7) == [0] * 7


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
    three = of_groups(mode, [0, 1, 1], lengths=[5, 2, 3])

    four = of_groups(mode, [0, 1, 99, 1], live=[True, True, False, True], lengths=[5, 2, 0, 3])

    assert four == [*three[:2], 0, three[2]]


@by_group
@pytest.mark.parametrize("masked", [float("nan"), float("inf"), -float("inf")])
def test_masked_values_of_any_kind_reach_no_statistic(mode: GroupMode, masked: float) -> None:
    with_masked = of_groups(mode, [0, masked, 1], live=[True, False, True], lengths=[2, 0, 3])

    assert with_masked == of_groups(mode, [0, 7, 1], live=[True, False, True], lengths=[2, 0, 3])


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
@fewer
@given(rewards)
def test_they_agree_with_exact_rational_arithmetic(mode: GroupMode, rewards: list[float]) -> None:
    assert of_groups(mode, rewards) == pytest.approx(exact(mode, rewards), rel=1e-12, abs=1e-12)


@by_group
@fewer
@given(rewards)
def test_they_sum_to_zero_within_a_group(mode: GroupMode, rewards: list[float]) -> None:
    weights = lengths_of(len(rewards)) if mode == "opo" else [1] * len(rewards)

    summed = math.fsum(n * a for n, a in zip(weights, of_groups(mode, rewards), strict=True))

    assert summed == pytest.approx(0, abs=1e-9)


@by_group
@fewer
@given(rewards, st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_changes_nothing(mode: GroupMode, rewards: list[float], shift: int) -> None:
    moved = [reward + shift for reward in rewards]

    assert of_groups(mode, moved) == pytest.approx(of_groups(mode, rewards), rel=1e-9, abs=1e-9)


@fewer
@given(rewards, st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_scale_of_all_rewards_scales_or_cancels(rewards: list[float], scale: float) -> None:
    scaled = [reward * scale for reward in rewards]

    for mode in ("dr_grpo", "rloo", "opo"):
        assert of_groups(mode, scaled) == pytest.approx([a * scale for a in of_groups(mode, rewards)], rel=1e-12)
    assert of_groups("grpo", scaled) == pytest.approx(of_groups("grpo", rewards), rel=1e-4)  # but for ε


@by_group
@fewer
@given(rewards, st.randoms(use_true_random=False))
def test_order_within_a_group_does_not_matter(mode: GroupMode, rewards: list[float], random: object) -> None:
    order = sorted(range(len(rewards)), key=lambda _: random.random())  # type: ignore[attr-defined]
    lengths = lengths_of(len(rewards))

    straight = of_groups(mode, rewards)
    mixed = of_groups(mode, [rewards[i] for i in order], lengths=[lengths[i] for i in order])

    assert mixed == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-12)


@by_group
@fewer
@given(rewards)
def test_a_better_reward_never_has_a_smaller_advantage(mode: GroupMode, rewards: list[float]) -> None:
    advantages = of_groups(mode, rewards)

    assert [a for _, a in sorted(zip(rewards, advantages, strict=True))] == sorted(advantages)


def test_deviations_are_exactly_zero_where_rewards_are_indistinguishable() -> None:
    rewards = np.array([1 / 3] * 7 + [0, 2, 5], np.float32)

    groups = Groups(rewards, np.ones(10, np.bool_), np.array([7, 2, 1]), rounding(rewards))

    assert groups.deviations.tolist() == [0, math.sqrt(2), 0]


def test_noise_is_a_share_of_the_summed_values() -> None:
    """0.1 + 0.2 − 0.3 is 0, and so is the sum of what float32 makes of them."""
    sums = np.array([np.array([0.1, 0.2, -0.3], np.float32).sum(dtype=np.float64), 0.0])

    groups = Groups(sums, np.ones(2, np.bool_), np.array([2]), rounding(np.array([0.6, 0.6])))

    assert sums[0] != 0
    assert groups.centred.tolist() == [0, 0]
    assert groups.deviations.tolist() == [0]


# -- what an audit of another framework found ------------------------------------------------------------------------


def atropos(rewards: Sequence[float], least: float = 1e-8) -> NDArray[np.float64]:
    """Compute advantages as the trainer of Atropos does; a group of one has its reward as advantage.

    NousResearch/atropos at c20c852, example_trainer/data.py:80-82:
        if len(scores) > 1:
            scores = scores - scores.mean()
            scores = scores / max(scores.std(), 1e-8)
    """
    values = np.array(rewards, np.float32).astype(np.float64)
    return (values - values.mean()) / max(values.std(), least) if len(values) > 1 else values


ULP_APART = [0.7] * 7 + [float(np.nextafter(np.float32(0.7), np.float32(1)))]


def test_float_noise_is_not_blown_up_to_the_size_of_an_advantage() -> None:
    assert np.abs(atropos(ULP_APART)).max() == pytest.approx(math.sqrt(7))  # as far as a z-score of eight can go

    assert of_groups("grpo", ULP_APART) == [0] * 8


def test_a_group_of_one_does_not_train_on_its_raw_reward() -> None:
    assert atropos([-3.5]) == [-3.5]

    assert of_groups("grpo", [-3.5]) == [0]


def test_nor_are_differences_beside_a_large_mean_noise() -> None:
    """The repair that was proposed there: a least deviation of 1e-4 of the mean."""
    rewards = [10_000.0, 10_000.5] * 2
    repaired = atropos(rewards, least=1e-4 * 10_000)

    assert repaired.tolist() == [-0.25, 0.25] * 2
    assert of_groups("grpo", rewards) == pytest.approx(exact("grpo", rewards))
    assert of_groups("grpo", rewards)[1] == pytest.approx(math.sqrt(3 / 4), abs=1e-4)


# -- whitening -------------------------------------------------------------------------------------------------------


def white(values: Sequence[float], weights: Sequence[int], least: float = 0.0) -> list[float]:
    noise = np.full(len(values), least)
    listed: list[float] = whitened(np.array(values, np.float64), np.array(weights, np.int64), noise).tolist()
    return listed


def exactly_white(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    population = [Fraction(x) for x, n in zip(values, weights, strict=True) for _ in range(n)]
    mean = sum(population, Fraction()) / len(population)
    deviation = math.sqrt(sum(((x - mean) ** 2 for x in population), Fraction()) / (len(population) - 1))
    return [float(Fraction(x) - mean) / (deviation + EPSILON) * (n > 0) for x, n in zip(values, weights, strict=True)]


def test_whitening_takes_everything_as_one_population() -> None:
    assert white([0, 1, 2, 50], [1, 1, 1, 0]) == pytest.approx([-1, 0, 1, 0], abs=1e-5)


@fewer
@given(st.lists(st.tuples(st.integers(-20, 20).map(lambda i: i / 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_whitening_agrees_with_exact_rational_arithmetic(pairs: list[tuple[float, int]]) -> None:
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]

    expected = exactly_white(values, weights) if sum(weights) > 1 else [0.0] * len(values)

    assert white(values, weights) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("weights", [[0, 0, 0], [0, 1, 0], [1, 1, 0], [3, 2, 1]])
def test_whitening_gives_exactly_zero_where_advantages_are_indistinguishable(weights: list[int]) -> None:
    assert white([1 / 3, 1 / 3, 1 / 3], weights) == [0, 0, 0]
    assert white([1.0, 1 + 1e-8, 1.0], weights, least=1e-7) == [0, 0, 0]


def test_whitening_ignores_values_of_weight_zero() -> None:
    for masked in (1e300, math.nan, math.inf):
        assert white([1, masked, 3], [1, 0, 1]) == white([1, 0, 3], [1, 0, 1])


# -- running statistics ----------------------------------------------------------------------------------------------


chunks = st.lists(st.lists(st.integers(-20, 20).map(float), max_size=6), min_size=1, max_size=6)


def array(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@fewer
@given(chunks)
def test_running_statistics_equal_those_of_everything_at_once(chunks: list[list[float]]) -> None:
    running = RunningStatistics()

    for chunk in chunks:
        running = running.including(array(chunk), np.zeros(len(chunk)))

    everything = [x for chunk in chunks for x in chunk]
    assert running.count == len(everything)
    if len(everything) > 1:
        assert running.mean == pytest.approx(np.mean(everything), abs=1e-12)
        assert running.deviation == pytest.approx(np.std(everything, ddof=1), abs=1e-9)
        assert (running.lowest, running.highest) == (min(everything), max(everything))


def test_while_all_was_the_same_everything_is_exactly_zero() -> None:
    running = RunningStatistics()
    for _ in range(10):
        running = running.including(array([1 / 3] * 3), rounding(array([1 / 3] * 3)))

    assert running.deviation == 0
    assert running.whitened(array([1 / 3, 5]), np.array([True, True])).tolist() == [0, 0]


def test_before_anything_was_seen_everything_is_exactly_zero() -> None:
    running = RunningStatistics()
    running = running.including(array([]), np.zeros(0))

    assert running == RunningStatistics()
    assert running.whitened(array([5]), np.array([True])).tolist() == [0]


def test_rounding_of_sums_is_no_difference_in_a_run_either() -> None:
    running = RunningStatistics()

    running = running.including(array([0, 1e-8]), rounding(array([0.6, 0.6])))

    assert running.whitened(array([0, 1e-8]), np.array([True, True])).tolist() == [0, 0]


def test_what_was_taken_stays_as_it_was_while_more_is_seen() -> None:
    """A checkpoint is written in a thread: half of an old value and half of a new one would be of no moment."""
    taken = RunningStatistics().including(np.array([0.0, 2.0]), np.zeros(2))
    before = asdict(taken)

    after = taken.including(np.array([5.0]), np.zeros(1))

    assert asdict(taken) == before
    assert after.count == 3
    with pytest.raises(FrozenInstanceError):
        taken.count = 4  # type: ignore[misc]


def test_groups_without_zero_advantages_are_unchanged() -> None:
    once = zero_advantages(
        group(
            completion_lengths=[2, 2], advantages=[1.0] * 8, meta={"overrides": [{}, {"set_advantage_to_zero": True}]}
        )
    )

    assert zero_advantages(once) is once
