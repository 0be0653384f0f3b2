"""Noise follows a reward from sum to sum, and nothing that is not in the sum adds to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import TrajectoryGroup
from penstock.errors import InvalidRecord
from penstock.testing import group

NOISE = 4 * float(np.finfo(np.float32).eps)
"""The relative rounding error of a sum of float32."""


def noise(of: TrajectoryGroup) -> list[float]:
    assert of.reward_noise is not None
    listed: list[float] = of.reward_noise.tolist()
    return listed


def test_a_group_that_was_never_summed_has_the_rounding_of_its_rewards_alone() -> None:
    assert group(rewards=[1, 0]).reward_noise is None


def test_a_value_added_to_a_reward_adds_its_rounding() -> None:
    summed = group(rewards=[0.7, 0.3]).with_rewards([0.0, 1.3], parts={"penalty": [-0.7, 1.0]})

    again = summed.with_rewards([2.0, 1.3], parts={"bonus": [2.0, 0.0]})

    assert noise(summed) == pytest.approx([1.4 * NOISE, 1.3 * NOISE])
    assert noise(again) == pytest.approx([3.4 * NOISE, 1.3 * NOISE])


@pytest.mark.parametrize(
    ("before", "rewards", "parts", "expected"),
    [
        ([9, 9], [0.0, 0.5], {"score": [0.7, 0.5], "penalty": [-0.7, 0.0]}, [1.4, 0.5]),
        ([0, 1], [0.5, 1.5], {"bonus": [0.5, 0.5], "tokens": [3e7, 3e7]}, [0.5, 1.5]),
    ],
    ids=["with a score the parts are the reward", "a diagnostic adds nothing"],
)
def test_noise_is_that_of_the_parts_that_were_added(
    before: list[float], rewards: list[float], parts: dict[str, list[float]], expected: list[float]
) -> None:
    summed = group(rewards=before).with_rewards(rewards, parts=parts)

    assert noise(summed) == pytest.approx([share * NOISE for share in expected])


def test_a_reward_that_a_bound_decided_has_the_rounding_of_the_bound() -> None:
    for name in ("clip", "fallback"):
        bounded = group(rewards=[0, 0]).with_rewards([-1, 1], parts={"score": [-2e6, 1], name: [1_999_999, 0]})

        assert noise(bounded) == pytest.approx([NOISE, NOISE])


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=3))
def test_a_diagnostic_beside_a_reward_adds_nothing(diagnostics: list[float]) -> None:
    scored = group(rewards=[0, 1]).with_rewards([0, 1], parts={"score": [0.5, 1], "penalty": [-0.5, 0]})

    noted = scored.with_rewards(scored.rewards, parts={f"of/{n}": [x, -x] for n, x in enumerate(diagnostics)})

    assert noise(noted) == noise(scored)


def test_a_replaced_reward_keeps_nothing_of_the_old_one() -> None:
    huge = group(rewards=[0, 0]).with_rewards([-1e8, 1], parts={"score": [-1e8, 1]})

    replaced = huge.with_rewards(np.clip(huge.rewards, -1, 1))

    assert noise(replaced) == pytest.approx([NOISE, NOISE])


def test_noise_goes_with_its_sequence() -> None:
    summed = group(completion_lengths=[1, 2, 3], rewards=[0, 0, 0]).with_rewards([1, 2, 3], parts={"score": [1, 2, 3]})

    assert noise(summed.select(np.array([True, False, True]))) == pytest.approx([NOISE, 3 * NOISE])


LOST_DIFFERENCES = {
    "whole numbers that float32 rounds": [2.0**24, 2.0**24 + 1],
    "whole numbers that count as equal": [2.0**20, 2.0**20 + 1],
    "integers": np.array([10**9, 10**9 + 3]),
    "below zero": [-1e8, -1e8 - 0.5],
    "three, of which two become one": [2.0**25, 2.0**25 + 1, 2.0**25 + 4],
    "a fraction beside a large constant": [3e7 + 0.1, 3e7 + 0.9, 3e7 + 3.0],
    "the end of float64's fractions": [2.0**53 - 200, 2.0**53 - 1],
}

KEPT_DIFFERENCES = {
    "small ones": [0.0, 0.25, 1e5],
    "rounding of small ones": [0.3, 0.1 + 0.2],
    "rounding of large ones": [1e9, 1e9 * (1 + 2**-52)],
    "rounding of huge ones": [1e30, float(np.nextafter(np.float32(1e30), np.float32(np.inf)))],
    "large equal ones": [123456789.25, 123456789.25],
    "a large one alone": [123456789.25],
    "large ones far apart": [-123456789.3, 0.1, 98765432.1],
    "differences above the rounding": [2.0**24, 2.0**24 + 1000],
    "what float32 held before": np.array([2.0**24, 2.0**24 + 2], np.float32),
}


@pytest.mark.parametrize("rewards", LOST_DIFFERENCES.values(), ids=LOST_DIFFERENCES)
def test_rewards_whose_differences_float32_loses_are_refused(rewards: Any) -> None:
    lengths = [1] * len(np.asarray(rewards))
    refusal = "rewards: expected differences that float32 can hold, got rewards from"
    with pytest.raises(InvalidRecord, match=refusal):
        group(completion_lengths=lengths, rewards=rewards)
    with pytest.raises(InvalidRecord, match=refusal):
        group(completion_lengths=lengths, rewards=[0] * len(lengths)).with_rewards(rewards)


@pytest.mark.parametrize("rewards", KEPT_DIFFERENCES.values(), ids=KEPT_DIFFERENCES)
def test_rewards_whose_differences_float32_holds_are_taken(rewards: Any) -> None:
    lengths = [1] * len(np.asarray(rewards))
    assert (
        group(completion_lengths=lengths, rewards=rewards).rewards.tolist() == np.asarray(rewards, np.float32).tolist()
    )
