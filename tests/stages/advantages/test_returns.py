"""Discounted sums and GAE over ragged chains equal the recursions that define them, in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock._stages.advantages.returns import (
    Observations,
    Steps,
    discounted_sums,
    generalized_advantages,
    last_places,
)

fewer = settings(max_examples=60)

chains = st.lists(st.lists(st.integers(-64, 64).map(lambda i: i / 8), max_size=9), min_size=1, max_size=5)
discounts = st.sampled_from([0.0, 1e-200, 0.125, 0.5, 0.99, 1.0])


def remaining(chains: Sequence[Sequence[float]]) -> NDArray[np.int64]:
    return np.array([len(chain) - 1 - i for chain in chains for i in range(len(chain))], np.int64)


def flat(chains: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.array([x for chain in chains for x in chain], np.float64)


def exact_sums(chain: Sequence[float], discount: float) -> list[float]:
    """Return G(t) = r(t) + γ · G(t'), from the end, without rounding."""
    sums, later = [], Fraction()
    for value in reversed(chain):
        later = Fraction(value) + Fraction(discount) * later
        sums.append(float(later))
    return sums[::-1]


def exact_gae(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    advantages, later, value_after = [], Fraction(), Fraction()
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        error = Fraction(reward) + Fraction(discount) * value_after - Fraction(value)
        later = error + Fraction(discount) * Fraction(decay) * later
        value_after = Fraction(value)
        advantages.append(float(later))
    return advantages[::-1]


@fewer
@given(chains, discounts)
def test_sums_agree_with_exact_rational_arithmetic(chains: list[list[float]], discount: float) -> None:
    sums = discounted_sums(flat(chains), discount, remaining(chains)).tolist()

    assert sums == pytest.approx([x for chain in chains for x in exact_sums(chain, discount)], rel=1e-13, abs=1e-13)


@fewer
@given(chains, discounts, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.randoms(use_true_random=False))
def test_gae_agrees_with_exact_rational_arithmetic(
    chains: list[list[float]], discount: float, decay: float, random: object
) -> None:
    values = [[random.randint(-64, 64) / 8 for _ in chain] for chain in chains]  # type: ignore[attr-defined]

    found = generalized_advantages(flat(chains), flat(values), discount, decay, remaining(chains)).tolist()

    expected = [x for r, v in zip(chains, values, strict=True) for x in exact_gae(r, v, discount, decay)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_lambda_0_looks_one_step_ahead_and_lambda_1_to_the_end() -> None:
    rewards, values, left = np.array([0.0, 0.0, 8.0]), np.array([1.0, 2.0, 4.0]), np.array([2, 1, 0])

    assert generalized_advantages(rewards, values, 1.0, 0.0, left).tolist() == [1, 2, 4]
    assert generalized_advantages(rewards, values, 1.0, 1.0, left).tolist() == [7, 6, 4]


def test_nothing_is_carried_from_one_chain_to_another() -> None:
    sums = discounted_sums(np.array([1.0, 2.0, 4.0, 1e300]), 0.5, np.array([2, 1, 0, 0]))

    assert sums.tolist() == [3, 4, 4, 1e300]


def test_a_long_sum_without_discount_keeps_all_its_digits() -> None:
    values = np.full(2**16 + 1, 0.1)

    sums = discounted_sums(values, 1.0, np.arange(2**16, -1, -1))

    assert sums[0] == pytest.approx(math.fsum(values), rel=1e-15)
    assert sums[-3:].tolist() == pytest.approx([0.3, 0.2, 0.1])


def test_what_is_given_stays_as_it_is() -> None:
    values = np.ones(4)

    discounted_sums(values, 0.5, np.arange(3, -1, -1))

    assert values.tolist() == [1] * 4


# -- steps -----------------------------------------------------------------------------------------------------------

MASK = np.array([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1], np.bool_)
LENGTHS = np.array([7, 2, 0, 3])
"""Two turns with an answer between and one behind, a sequence that is masked, an empty one, and one of one step."""


@pytest.mark.parametrize(
    ("observations", "places", "left"),
    [
        ("skipped", [1, 2, 5, 11], [2, 1, 0, 0]),
        ("severing", [1, 2, 5, 11], [1, 0, 0, 0]),
        ("counted", [1, 2, 3, 4, 5, 6, 11], [5, 4, 3, 2, 1, 0, 0]),
        ("blank", [1, 2, 3, 4, 5, 6, 11], [5, 4, 3, 2, 1, 0, 0]),
        ("valued", [1, 2, 3, 4, 5, 6, 11], [5, 4, 3, 2, 1, 0, 0]),
    ],
)
def test_tokens_that_do_not_train_are_steps_or_not(
    observations: Observations, places: list[int], left: list[int]
) -> None:
    steps = Steps.of(MASK, LENGTHS, observations)

    assert steps.places.tolist() == places
    assert steps.remaining.tolist() == left


@pytest.mark.parametrize("observations", ["skipped", "severing", "counted", "blank", "valued"])
def test_turns_of_neighbouring_sequences_are_apart_even_where_nothing_lies_between(observations: Observations) -> None:
    steps = Steps.of(np.ones(4, np.bool_), np.array([2, 2]), observations)

    assert steps.remaining.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("observations", ["skipped", "severing", "counted", "blank", "valued"])
def test_where_nothing_trains_there_are_no_steps(observations: Observations) -> None:
    for lengths in ([3], [0], []):
        steps = Steps.of(np.zeros(sum(lengths), np.bool_), np.array(lengths, np.int64), observations)

        assert (steps.places.tolist(), steps.remaining.tolist()) == ([], [])
        assert discounted_sums(np.zeros(0), 0.9, steps.remaining).tolist() == []


def test_the_last_place_of_each_sequence_is_found_or_there_is_none() -> None:
    assert last_places(MASK, LENGTHS).tolist() == [5, -1, -1, 11]
    assert last_places(np.ones_like(MASK), LENGTHS).tolist() == [6, 8, -1, 11]
    assert last_places(np.zeros_like(MASK), LENGTHS).tolist() == [-1] * 4
    assert last_places(np.array([0, 0, 0, 1], np.bool_), np.array([2, 2])).tolist() == [-1, 3]
