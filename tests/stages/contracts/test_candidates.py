from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import InvalidRecord
from penstock.teachers import TeacherCandidates

TOKENS = np.array([5, 6, 7], np.int32)


def made(values: list[Any]) -> NDArray[Any]:
    """Return a column of ids or log-probabilities."""
    return np.array(values, np.float32 if isinstance(values[0], float) else np.int32)


def test_candidates_of_any_number_and_order_become_columns_of_one_width() -> None:
    """The first token has none, the second its own beyond the likeliest, in any order."""
    candidates = TeacherCandidates.of([None, {9: -0.5, 6: -7.0, 3: -1.0}, {7: -0.1}])

    ids, logprobs = candidates.columns(TOKENS, width=3)

    assert ids.tolist() == [[-1, -1, -1], [6, 9, 3], [7, -1, -1]]
    np.testing.assert_allclose(logprobs, np.array([[0, 0, 0], [-7, -0.5, -1], [-0.1, 0, 0]], np.float32))


def test_of_too_many_the_token_itself_stays_and_the_likeliest_others() -> None:
    ids, _ = TeacherCandidates.of([None, {1: -3, 2: -1, 6: -9, 3: -2}, {1: -3, 2: -1, 3: -2}]).columns(TOKENS, width=2)

    assert ids.tolist() == [[-1, -1], [6, 2], [2, 3]]


def test_what_the_teacher_holds_impossible_is_no_candidate() -> None:
    ids, logprobs = TeacherCandidates.of([None, {6: -math.inf, 3: 0.0}, None]).columns(TOKENS, width=2)

    assert ids.tolist() == [[-1, -1], [3, -1], [-1, -1]]
    assert np.isfinite(logprobs).all()


def test_rounding_above_zero_is_no_error() -> None:
    _, logprobs = TeacherCandidates.of([None, {3: 1e-4}, None]).columns(TOKENS, width=1)

    assert not logprobs.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TeacherCandidates.of([None, None]), "expected candidates for 3 tokens, got them for 2"),
        (lambda: TeacherCandidates.of([None, {3: math.nan}, None]), "expected log-probabilities of 0 or less, got nan"),
        (lambda: TeacherCandidates.of([None, {3: 0.5}, None]), "expected log-probabilities of 0 or less, got 0.5"),
        (lambda: TeacherCandidates.of([None, {-2: -1.0}, None]), "expected candidates of 0 or more, got -2"),
        (
            lambda: TeacherCandidates(np.array([0, 1, 1]), made([1]), made([-1.0, -1.0])),
            "expected 2 candidates in all, got 1 ids and 2 log-probabilities",
        ),
        (
            lambda: TeacherCandidates(np.array([1, 2, 1]), made([4, 4, 4, 4]), made([-1.0, -1, -2, -1])),
            "expected each candidate of a token once, got 4 repeatedly for token 1",
        ),
    ],
)
def test_invalid_candidates_are_refused(make: Callable[[], TeacherCandidates], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        make().columns(TOKENS, width=2)
