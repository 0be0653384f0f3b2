"""The benchmark of shares counts what the rank with the most has, and whole groups are never below single sequences."""

from __future__ import annotations

import numpy as np
from benchmarks import shares


def test_three_equal_groups_give_one_of_two_ranks_two_of_them() -> None:
    assert shares.unevenness(np.array([5, 5, 5]), ranks=2) == 10 / 7.5


def test_single_sequences_are_divided_more_evenly_than_whole_groups() -> None:
    whole, single = shares.measure(groups=16, ranks=8, repeats=3)

    assert 1 <= single.mean < whole.mean <= whole.worst
