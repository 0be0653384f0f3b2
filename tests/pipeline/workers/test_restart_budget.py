"""How often a worker may be restarted."""

from __future__ import annotations

from penstock._pipeline.workers.restart_budget import RESTART_WINDOW_S, RestartBudget


def test_a_worker_is_restarted_so_many_times_within_an_hour_and_not_once_more() -> None:
    budget = RestartBudget(2)

    assert [budget.take(now) for now in (0.0, 1.0, 2.0, RESTART_WINDOW_S - 1)] == [True, True, False, False]


def test_a_restart_is_given_back_after_an_hour() -> None:
    budget = RestartBudget(1)

    assert [budget.take(day * 86_400.0) for day in range(100)] == [True] * 100
    assert not budget.take(99 * 86_400.0 + RESTART_WINDOW_S - 1)
    assert budget.take(99 * 86_400.0 + RESTART_WINDOW_S)


def test_a_worker_without_restarts_is_never_restarted() -> None:
    assert not RestartBudget(0).take(0.0)
