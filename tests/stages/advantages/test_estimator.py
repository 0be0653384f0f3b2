"""The rewards that count, and the modes that whiten or treat tokens one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stages.turns import of_turns

from penstock import TrajectoryGroup
from penstock._stages.advantages.estimator import BY_TOKEN, Estimator, RewardLevel
from penstock._stages.advantages.formulas import EPSILON, Mode, RunningStatistics
from penstock._stages.advantages.presets import OURS
from penstock._stages.contracts.group_stack import GroupStack
from penstock.errors import InvalidRecord

fewer = settings(max_examples=40)

MODES: list[Mode] = list(get_args(Mode))
WHITENING: list[Mode] = ["reinforce++", "reinforce++-baseline", "gae"]


def estimated(
    mode: Mode,
    *groups: TrajectoryGroup,
    level: RewardLevel = "sequence",
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    whitens: bool = False,
) -> list[float]:
    """Return [B] or [N] advantages, 0 where nothing trains."""
    estimate = Estimator(mode, level, gamma, gae_lambda, whitens, OURS, {"score": 1.0}).estimate(
        GroupStack(groups), RunningStatistics()
    )
    advantages: list[float] = np.where(estimate.trains, estimate.advantages, 0.0).tolist()
    return advantages


def expecting(group: TrajectoryGroup, value: float = 0.0) -> TrajectoryGroup:
    """Return the same group with a critic that expected `value` everywhere."""
    return msgspec.structs.replace(group, values=np.full(len(group.tokens), value, np.float32))


def exactly_white(values: Sequence[Fraction]) -> list[float]:
    mean = sum(values, Fraction()) / len(values)
    deviation = math.sqrt(sum(((x - mean) ** 2 for x in values), Fraction()) / (len(values) - 1))
    return [float(x - mean) / (deviation + EPSILON) for x in values]


# -- which rewards count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "expected"), [("sequence", [10, 20]), ("token", [3, 8]), ("both", [13, 28])])
def test_rewards_are_those_of_sequences_or_of_tokens_or_their_sum(level: RewardLevel, expected: list[float]) -> None:
    group = of_turns(".xx", ".x", rewards=[10, 20], token_rewards=[0, 1, 2, 0, 8])

    assert estimated("none", group, level=level) == expected


def test_rewards_of_tokens_that_do_not_train_count_for_nothing() -> None:
    group = of_turns(".x.x.", "..", token_rewards=[64, 1, 32, 2, 16, 8, 8])

    assert estimated("none", group, level="token") == [3, 0]
    assert estimated("reinforce++", group, level="token") == [0, 3, 0, 2, 0, 0, 0]


def test_the_reward_of_a_sequence_falls_on_its_last_token_that_trains() -> None:
    group = of_turns(".xx.", "..", ".x", rewards=[8, 99, 4])

    assert estimated("reinforce++", group, gamma=0.5) == [0, 4, 8, 0, 0, 0, 0, 4]


def test_both_adds_to_the_reward_of_the_last_token() -> None:
    group = of_turns(".xx", rewards=[8], token_rewards=[0, 1, 2])

    assert estimated("reinforce++", group, level="both", gamma=0.5) == [0, 6, 10]


@pytest.mark.parametrize("mode", MODES)
def test_equal_sums_of_different_parts_are_equal(mode: Mode) -> None:
    """0.1 + 0.2 and 0.3, 0.7 − 0.4: what float32 leaves between them is no advantage."""
    parts = of_turns(".xx", ".x", ".xx", token_rewards=[0, 0.1, 0.2, 0, 0.3, 0, 0.7, -0.4])

    advantages = estimated(mode, expecting(parts), level="token")

    if mode not in ("none", *BY_TOKEN):
        assert advantages == [0, 0, 0]
    else:
        assert any(advantages)


def test_sums_that_cancel_are_zero_and_not_noise() -> None:
    group = of_turns(".xxx", ".x", token_rewards=[0, 0.1, 0.2, -0.3, 0, 0])

    for mode in ("grpo", "batch", "global"):
        assert estimated(mode, group, level="token") == [0, 0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("none", "gdpo", "gae")])
@pytest.mark.parametrize("level", ["sequence", "both"])
def test_rewards_that_differ_by_what_rounding_left_of_their_parts_are_equal(mode: Mode, level: RewardLevel) -> None:
    """0.7 − 0.7 and 0.3 − 0.3, as sums of float32: the rest is 1e-8, and no advantage."""
    group = of_turns(".x", ".x", rewards=[-1.1e-8, 1.2e-8], token_rewards=[0] * 4)
    parts = {"score": [0.7, 0.3], "length_bounty": [-0.7, -0.3]}

    assert not any(estimated(mode, group.with_rewards(group.rewards, parts=parts), level=level, whitens=True))
    assert any(estimated(mode, group, level=level, whitens=True))


# -- reinforce++ -----------------------------------------------------------------------------------------------------


def test_returns_are_whitened_over_all_tokens_that_train() -> None:
    advantages = estimated("reinforce++", of_turns(".xx", ".x", rewards=[1, 0]), gamma=0.5, whitens=True)

    assert advantages == pytest.approx([0, 0, 1, 0, -1], abs=1e-5)


turns = st.lists(st.tuples(st.integers(-8, 8).map(lambda i: i / 4), st.text("x.", max_size=7)), max_size=5).map(
    lambda rows: [*rows, (0.25, "x.x")]
)
"""Rewards and masks, with at least two tokens that train."""


@fewer
@given(turns, st.sampled_from([0.0, 0.25, 0.99, 1.0]))
def test_reinforce_agrees_with_exact_rational_arithmetic(rows: list[tuple[float, str]], gamma: float) -> None:
    group = of_turns(*["." + mask for _, mask in rows], rewards=[reward for reward, _ in rows])
    returns = [
        Fraction(gamma) ** left * Fraction(reward)
        for reward, mask in rows
        for left in range(mask.count("x") - 1, -1, -1)
    ]

    found = estimated("reinforce++", group, gamma=gamma, whitens=True)

    trained = [advantage for advantage, trains in zip(found, group.loss_mask, strict=True) if trains]
    assert trained == pytest.approx(exactly_white(returns), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mode", ["reinforce++", "gae"])
def test_tokens_of_an_environment_between_turns_are_no_steps(mode: Mode) -> None:
    one, many = of_turns(".xxx", rewards=[8]), of_turns(".x..xx.", rewards=[8])

    at_once = estimated(mode, expecting(one, 0.5), gamma=0.5)
    in_turns = estimated(mode, expecting(many, 0.5), gamma=0.5)

    assert in_turns == [0, at_once[1], 0, 0, *at_once[2:], 0]


# -- reinforce++-baseline --------------------------------------------------------------------------------------------


def test_the_baseline_is_that_of_the_group_and_the_scale_that_of_the_tokens() -> None:
    higher, _, lower = exactly_white([Fraction(1, 2), Fraction(1, 2), Fraction(-1, 2)])

    assert estimated("reinforce++-baseline", of_turns(".xx", ".x", rewards=[1, 0])) == pytest.approx([higher, lower])


def test_a_group_in_which_nothing_differs_gets_exactly_zero_and_leaves_the_others_as_they_are() -> None:
    episode = of_turns(".xxx", ".x", rewards=[1, 0])
    constant, alone = of_turns(".x", ".xx", rewards=[1 / 3] * 2), of_turns(".xx", rewards=[5])

    advantages = estimated("reinforce++-baseline", constant, episode, alone)

    assert advantages == [0, 0, *estimated("reinforce++-baseline", episode), 0]


# -- gae -------------------------------------------------------------------------------------------------------------


def test_gae_is_the_return_less_the_value() -> None:
    group = of_turns(".xx.x", rewards=[8], values=[99, 1, 2, 99, 4])

    assert estimated("gae", group) == [0, 7, 6, 0, 4]
    assert estimated("gae", group, gae_lambda=0.0) == [0, 1, 2, 0, 4]
    assert estimated("gae", group, gamma=0.5, gae_lambda=0.5) == [0, 0.25, 1, 0, 4]


def test_values_of_untrained_tokens_do_not_matter() -> None:
    given = np.array([np.nan, 1, np.inf, 2], np.float32)
    group = msgspec.structs.replace(of_turns(".x.x", rewards=[8]), values=given)

    assert estimated("gae", group) == [0, 7, 0, 6]


def test_a_critic_that_is_right_up_to_float_noise_leaves_nothing_to_whiten() -> None:
    rewards = np.array([0.1, 0.7, 0.3], np.float32)
    near = np.nextafter(rewards, np.float32(np.inf)).repeat(3)
    group = of_turns(".xx", ".xx", ".xx", rewards=rewards.tolist(), values=near)

    assert any(estimated("gae", group))
    assert estimated("gae", group, whitens=True) == [0] * 9


def test_noise_is_a_share_of_the_critics_values_too() -> None:
    """Many small rewards make one large value, and that has the larger noise."""
    left = np.arange(64, 0, -1, dtype=np.float32)
    near = np.nextafter(left, np.where(left % 2, 0, 99).astype(np.float32))
    group = of_turns("." + "x" * 64, token_rewards=[0, *[1] * 64], values=[0, *near])

    assert any(estimated("gae", group, level="token"))
    assert not any(estimated("gae", group, level="token", whitens=True))


# -- what holds for all that whiten ----------------------------------------------------------------------------------

batches = st.lists(
    st.lists(st.tuples(st.integers(-20, 20).map(lambda i: i / 4), st.integers(1, 4)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)
"""Groups of sequences: the reward, a multiple of 1/4, and how many tokens train."""


def white(
    mode: Mode, batch: list[list[tuple[float, int]]], scale: float = 1.0, shift: float = 0.0
) -> list[list[float]]:
    """Return the advantages of trained tokens, a list for each sequence."""
    groups = [
        expecting(of_turns(*["." + "x" * n for _, n in rows], rewards=[r * scale + shift for r, _ in rows]))
        for rows in batch
    ]
    found = estimated(mode, *groups, whitens=True)
    lengths = [n for rows in batch for _, n in rows]
    if mode == "reinforce++-baseline":
        return [[advantage] * n for advantage, n in zip(found, lengths, strict=True)]
    ends = np.cumsum([n + 1 for n in lengths]).tolist()
    return [found[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("mode", WHITENING)
@fewer
@given(batches, st.integers(-1000, 1000), st.sampled_from([0.5, 2.0, 1024.0]))
def test_neither_a_shift_of_all_rewards_nor_their_scale_changes_anything(
    mode: Mode, batch: list[list[tuple[float, int]]], shift: int, scale: float
) -> None:
    before = flat(white(mode, batch))

    assert flat(white(mode, batch, shift=shift)) == pytest.approx(before, rel=1e-9, abs=1e-9)
    assert flat(white(mode, batch, scale=scale)) == pytest.approx(before, rel=1e-4)  # but for ε


@pytest.mark.parametrize("mode", WHITENING)
@fewer
@given(batches)
def test_the_mean_over_tokens_is_zero_and_the_deviation_one_or_zero(
    mode: Mode, batch: list[list[tuple[float, int]]]
) -> None:
    rows = white(mode, batch)
    if mode == "reinforce++-baseline":  # groups in which nothing differs are not among those compared
        differ = [len({reward for reward, _ in group}) > 1 for group in batch for _ in group]
        rows = [row for row, differs in zip(rows, differ, strict=True) if differs]
    tokens = flat(rows)

    assert math.fsum(tokens) == pytest.approx(0, abs=1e-9)
    if any(tokens):
        assert np.std(tokens, ddof=1) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", WHITENING)
@fewer
@given(batches, st.randoms(use_true_random=False))
def test_the_order_of_groups_and_within_them_does_not_matter(
    mode: Mode, batch: list[list[tuple[float, int]]], random: Any
) -> None:
    order = random.sample(range(len(batch)), len(batch))
    within = [random.sample(range(len(rows)), len(rows)) for rows in batch]
    mixed = [[batch[g][s] for s in within[g]] for g in order]
    firsts = np.cumsum([0, *map(len, batch)]).tolist()

    straight, found = white(mode, batch), white(mode, mixed)

    assert flat(found) == pytest.approx(flat([straight[firsts[g] + s] for g in order for s in within[g]]), abs=1e-9)


@pytest.mark.parametrize("mode", WHITENING)
@pytest.mark.parametrize("reward", [0.0, 1 / 3, -7e5, 1e30])
def test_where_all_rewards_are_the_same_everything_is_exactly_zero(mode: Mode, reward: float) -> None:
    same = [[(reward, 3), (reward, 1)], [(reward, 2)]]
    noise = [[(reward, 3), (float(np.nextafter(np.float32(reward), np.float32(np.inf))), 1)], [(reward, 2)]]

    assert not any(flat(white(mode, same)))
    if reward:
        assert not any(flat(white(mode, noise)))


@pytest.mark.parametrize("mode", WHITENING)
def test_one_token_alone_gets_exactly_zero(mode: Mode) -> None:
    assert white(mode, [[(7.0, 1)]]) == [[0]]


@pytest.mark.parametrize("mode", WHITENING)
def test_a_small_difference_beside_a_large_mean_is_kept(mode: Mode) -> None:
    small, large = [[(0.0, 2), (1.0, 2)]], [[(10_000.0, 2), (10_001.0, 2)]]

    assert flat(white(mode, large)) == pytest.approx(flat(white(mode, small)), rel=1e-9)


@pytest.mark.parametrize("mode", WHITENING)
def test_where_nothing_trains_there_is_nothing(mode: Mode) -> None:
    masked = expecting(of_turns("...", "..", rewards=[1, 2]))

    assert not any(estimated(mode, masked, whitens=True))


# -- invalid arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "level", "column"),
    [("grpo", "token", "token_rewards"), ("reinforce++", "both", "token_rewards"), ("gae", "sequence", "values")],
)
def test_a_column_that_is_needed_and_missing_is_named_with_its_group(
    mode: Mode, level: RewardLevel, column: str
) -> None:
    good = of_turns(".x", token_rewards=[0, 1], values=[0, 0])

    with pytest.raises(InvalidRecord, match=f"test/17: {column}: expected a column, got none"):
        estimated(mode, good, of_turns(".x", instance_id="17"), level=level)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("mode", "level", "column"),
    [("rloo", "token", "token_rewards"), ("reinforce++", "both", "token_rewards"), ("gae", "sequence", "values")],
)
def test_a_value_that_is_no_number_is_named_with_its_trajectory(
    mode: Mode, level: RewardLevel, column: str, value: float
) -> None:
    good = of_turns(".x", token_rewards=[0, 1], values=[0, 0])
    bad = of_turns(".x", "", ".xx", instance_id="17", token_rewards=[0] * 5, values=[0] * 5, rollout_ids=[4, 6, 5])
    bad = msgspec.structs.replace(bad, **{column: np.array([0, 0, 0, 0, value], np.float32)})

    with pytest.raises(InvalidRecord, match=f"test/17, repetition 5: {column}: expected finite values, got {value}"):
        estimated(mode, good, bad, level=level)
