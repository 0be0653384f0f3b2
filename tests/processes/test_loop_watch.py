"""Findings of the checks of an event loop: that it runs, that its place is to be named, that its process is to end."""

from __future__ import annotations

import math

import pytest

from penstock._pipeline.workers.loop_watch import CHECK_S, NAMED_S, LoopCheck

BEYOND = int(NAMED_S / CHECK_S) + 1
"""Checks until a loop is named."""


def found(check: LoopCheck, times: int, count: int, limit_s: float) -> list[str]:
    return [check.found(count, limit_s) for _ in range(times)]


def test_a_loop_that_counts_runs() -> None:
    check = LoopCheck(ends=True)

    assert {check.found(count, 1.0) for count in range(100)} == {"runs"}


def test_a_blocked_loop_is_named_once_for_each_wait() -> None:
    check = LoopCheck(ends=True)

    first, second = (found(check, 3 * BEYOND, count, math.inf) for count in (1, 2))

    assert first == second
    assert [first.index("blocked"), first.count("blocked"), first.count("over")] == [BEYOND, 1, 0]


def test_a_blocked_loop_with_a_limit_ends_its_process_there_and_is_named_before_if_that_is_later() -> None:
    near, far = LoopCheck(ends=True), LoopCheck(ends=True)

    soon, later = found(near, 2 * BEYOND, 1, NAMED_S / 2), found(far, 3 * BEYOND, 1, 2 * NAMED_S)

    assert set(soon) == {"runs", "over"}
    assert later.index("blocked") < later.index("over")


@pytest.mark.parametrize("limit_s", [NAMED_S / 2, 2 * NAMED_S, math.inf])
def test_a_loop_that_does_not_end_its_process_is_named_at_its_limit_or_before(limit_s: float) -> None:
    check = LoopCheck(ends=False)

    result = found(check, 4 * BEYOND, 1, limit_s)

    assert result.count("blocked") == 1
    assert result.index("blocked") * CHECK_S <= min(limit_s, NAMED_S) + CHECK_S
    assert "over" not in result


def test_a_loop_that_is_not_watched_is_never_blocked() -> None:
    check = LoopCheck(ends=True)

    assert set(found(check, 2 * BEYOND, 1, 0.0)) == {"runs"}
