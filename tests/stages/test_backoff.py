import random
from itertools import islice

import pytest

from penstock._stages.engines.backoff import Backoff


def test_bounds_double_up_to_the_longest_and_pauses_are_drawn_below_them() -> None:
    backoff = Backoff(attempts=6, first_s=1, longest_s=5)

    drawn = [list(backoff.pauses(random.Random(seed).random)) for seed in range(200)]  # noqa: S311 (no secret)

    assert list(backoff.pauses(lambda: 1.0)) == [1, 2, 4, 5, 5]
    for bound, pauses in zip([1, 2, 4, 5, 5], zip(*drawn, strict=True), strict=True):
        assert 0 <= min(pauses) < 0.1 * bound
        assert 0.9 * bound < max(pauses) < bound


def test_one_attempt_has_no_pause() -> None:
    assert list(Backoff(attempts=1).pauses(lambda: 1.0)) == []


def test_no_attempt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Backoff\.attempts: expected a whole number of at least 1, got 0"):
        Backoff(attempts=0)


def test_pauses_may_go_on_for_ever() -> None:
    pauses = Backoff(attempts=2**62, first_s=1, longest_s=5).pauses(lambda: 1.0)

    assert list(islice(pauses, 2000))[-1] == 5
