from __future__ import annotations

import math

from penstock._pipeline.view.trend import BARS, WIDTH, Trend


def trend(*values: float) -> Trend:
    made = Trend()
    for value in values:
        made.add(value)
    return made


def test_bars_reach_from_the_lowest_value_to_the_highest() -> None:
    assert trend(2, 4, 3).bars() == BARS[0] + BARS[-1] + BARS[4]


def test_values_that_do_not_change_are_a_line() -> None:
    assert trend(5, 5, 5).bars() == 3 * BARS[0]


def test_one_value_has_no_course() -> None:
    assert trend(5).bars() == ""


def test_a_long_run_has_as_many_bars_as_a_short_one_and_each_is_a_mean() -> None:
    steps = trend(*range(1000))

    assert WIDTH <= len(steps.bars()) < 2 * WIDTH
    assert list(steps.bars()) == sorted(steps.bars())
    assert steps.last == 999


def test_a_value_that_is_not_finite_is_shown_and_leaves_the_course_as_it_is() -> None:
    steps = trend(1, 2, math.nan)

    assert math.isnan(steps.last)
    assert steps.bars() == BARS[0] + BARS[-1]
