"""Groups that are worked on side by side come out as if each had been alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import TrajectoryGroup
from penstock._stages.contracts.group_stack import GroupStack
from penstock.errors import InvalidRecord
from penstock.testing import group


def of_masks(*masks: list[bool], rewards: list[float] | None = None) -> TrajectoryGroup:
    """Return a group of sequences with those masks, each after one token of a prompt unless it is empty."""
    rows = [[False, *mask] if mask else [] for mask in masks]
    return TrajectoryGroup.build(
        env="e",
        instance_id="0",
        sequences=[[1] * len(row) for row in rows],
        loss_mask=rows,
        rewards=[1.0] * len(rows) if rewards is None else rewards,
    )


masks = st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=5)


@given(st.lists(masks, min_size=1, max_size=4))
def test_columns_over_sequences_lie_one_behind_the_other(groups: list[list[list[bool]]]) -> None:
    handful = GroupStack([of_masks(*masks) for masks in groups])

    assert handful.sizes.tolist() == [len(masks) for masks in groups]
    assert handful.completion_lengths().tolist() == [sum(mask) for masks in groups for mask in masks]
    assert handful.live().tolist() == [any(mask) for masks in groups for mask in masks]


def test_advantages_are_spread_over_the_tokens_that_train_of_their_own_sequence() -> None:
    handful = GroupStack([of_masks([True, True], [], [False]), of_masks([False, True])])

    first, second = handful.with_advantages(np.array([-2.0, 7.0, 5.0, 3.0]))

    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0, -2, -2, 0, 0]
    assert second.advantages.tolist() == [0, 0, 3]
    assert not np.signbit(first.advantages[[0, 3, 4]]).any()  # no −0.0 where nothing trains
    assert not first.advantages.flags.writeable


def test_advantages_of_tokens_are_taken_where_they_train() -> None:
    handful = GroupStack([of_masks([True, True], [], [False]), of_masks([False, True])])

    first, second = handful.with_token_advantages(np.array([9.0, 1, 2, 9, 9, 9, 9, 3]))

    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0, 1, 2, 0, 0]
    assert second.advantages.tolist() == [0, 0, 3]
    assert not first.advantages.flags.writeable
    first.validate()


def test_values_of_tokens_are_added_up_by_sequence() -> None:
    handful = GroupStack([of_masks([True, True], [], [False]), of_masks([False, True])])

    assert handful.sums(np.array([1.0, 2, 3, 4, 5, 6, 7, 8])).tolist() == [6, 0, 9, 21]
    assert GroupStack([of_masks([])]).sums(np.zeros(0)).dtype == np.float64


def test_a_part_is_that_of_each_group_or_what_else_is_given() -> None:
    without, having = group(rewards=[1, 2]), group(rewards=[3, 4])
    having = having.with_rewards(having.rewards, parts={"score": [7, 8]})

    assert GroupStack([without, having]).reward_parts("score", np.arange(4.0)).tolist() == [0, 1, 7, 8]


def test_rewards_and_parts_go_back_to_their_groups() -> None:
    one, two = group(completion_lengths=[1], rewards=[0]), group(rewards=[0, 0])
    two = two.with_rewards(two.rewards, parts={"other": [1, 2], "clip": [3, 4]})

    noise, clip = np.array([0.0, 0.5, 0.25]), np.array([4.0, 5.0, 6.0])

    first, second = GroupStack([one, two]).with_rewards(np.array([1.0, 2.0, 3.0]), noise, {"clip": clip})

    assert (first.rewards.tolist(), second.rewards.tolist()) == ([1], [2, 3])
    assert first.reward_noise is not None
    assert second.reward_noise is not None
    assert (first.reward_noise.tolist(), second.reward_noise.tolist()) == ([0], [0.5, 0.25])
    assert {name: part.tolist() for name, part in first.reward_parts.items()} == {"clip": [4]}
    assert {name: part.tolist() for name, part in second.reward_parts.items()} == {"other": [1, 2], "clip": [5, 6]}
    assert {column.dtype for column in (first.rewards, *second.reward_parts.values())} == {np.dtype(np.float32)}
    assert not any(column.flags.writeable for column in (first.rewards, *second.reward_parts.values()))
    first.validate()
    second.validate()


def test_a_value_that_float32_cannot_represent_is_refused() -> None:
    handful = GroupStack([group(rewards=[0, 0])])

    with pytest.raises(InvalidRecord, match="test/0, repetition 1: rewards: expected finite values, got inf"):
        handful.with_rewards(np.array([0, 1e39]), np.zeros(2), {})
    with pytest.raises(InvalidRecord, match=r"repetition 0: reward_parts\.clip: expected finite values, got -inf"):
        handful.with_rewards(np.zeros(2), np.zeros(2), {"clip": np.array([-1e39, 0])})
    with pytest.raises(InvalidRecord, match="test/0, repetition 0: advantages: expected finite values, got nan"):
        handful.with_advantages(np.array([np.nan, 0]))
    with pytest.raises(InvalidRecord, match="test/0, repetition 1: advantages: expected finite values, got inf"):
        handful.with_token_advantages(np.array([0] * 13 + [1e39]))
