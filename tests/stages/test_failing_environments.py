"""Runs whose environment fails: they end, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from tests.processes.worker_sinks import Commit
from tests.stages.failing_environments import AlwaysRaises, SucceedsOnce

from penstock import SourceEnv, here, processes, source
from penstock._pipeline.failure_streak import FAILURE_LIMIT, FailureStreak
from penstock._pipeline.processes.shared_counters import COUNTERS_BYTES, SharedCounters
from penstock.accounting import Ledger
from penstock.errors import RolloutsFailed
from penstock.policies import NoOpPolicy


def sampling(make_env: Callable[[], Any], **options: Any) -> SourceEnv:
    return SourceEnv(make_env, NoOpPolicy(), group_size=4, **options)


@pytest.mark.parametrize("on", [here(), processes(2)])
async def test_an_environment_that_always_raises_ends_an_endless_run_in_all_workers_together(on: Any) -> None:
    pipeline = source(sampling(AlwaysRaises), on=on).sink(Commit())

    with pytest.raises(
        RolloutsFailed, match=r"64 rollouts in a row.*environment raised ValueError: no simulator for task"
    ):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    assert pipeline.report.balance.ended["failed"] >= FAILURE_LIMIT
    assert pipeline.report.stop_reason.startswith("expected at least one of 64 rollouts in a row to succeed")


async def test_a_traceback_is_logged_once_for_each_line_that_raises_and_then_counts() -> None:
    with structlog.testing.capture_logs() as events, pytest.raises(RolloutsFailed):
        await source(sampling(AlwaysRaises)).sink(Commit()).run()

    dropped = [event for event in events if event["event"] == "rollout_dropped"]
    assert [event["count"] for event in dropped][:7] == [1, 2, 4, 8, 16, 32, 64]
    assert [event["count"] for event in dropped if event["exc_info"] is not None] == [1]


async def test_reasons_that_all_differ_are_told_apart_up_to_a_number() -> None:
    pipeline = source(sampling(AlwaysRaises)).sink(Commit())

    with structlog.testing.capture_logs(), pytest.raises(RolloutsFailed):
        await pipeline.run()

    assert pipeline.report is not None
    reasons = pipeline.report.balance.reasons["failed"]
    assert len(reasons) <= 65
    assert reasons["environment raised ValueError: no simulator for task 0, repetition 0"] == 1


@pytest.mark.parametrize("on", [here(), processes(2)])
async def test_an_environment_that_succeeds_now_and_then_ends_nothing(on: Any) -> None:
    report = await source(sampling(SucceedsOnce, groups=60), on=on).sink(Commit()).run()

    assert report.balance.ended["trained"] == 60
    assert report.balance.reasons["failed"] == {"environment raised ValueError: no simulator": 180}


def test_a_success_by_any_worker_ends_a_row_of_failures() -> None:
    ledger, streak = Ledger(), FailureStreak()
    pages = bytearray(COUNTERS_BYTES), bytearray(COUNTERS_BYTES)
    for page in pages:
        ledger.attach_counters(SharedCounters(page))
    failing, succeeding = map(SharedCounters, pages)

    for _ in range(100):
        failing.end("failed", FAILURE_LIMIT - 1)
        succeeding.succeed(1)
        streak.check(*ledger.failures(), dict)

    failing.end("failed", FAILURE_LIMIT)
    with pytest.raises(RolloutsFailed):
        streak.check(*ledger.failures(), dict)


def test_the_message_lists_the_most_frequent_reasons() -> None:
    reasons = {"a": 60, "b": 3, "c": 2, "d": 1, "e": 1}

    with pytest.raises(RolloutsFailed, match=r"in all\): 60 × a, 3 × b, 2 × c, 2 more reasons\. Fix"):
        FailureStreak().check(67, 0, lambda: reasons)


def test_reasons_that_tell_the_cause_come_before_those_that_gather_or_are_not_told_yet() -> None:
    reasons = {"in SourceEnv 2/2": 129, "other reasons": 64, "no simulator for task 0": 1, "no simulator for task 1": 2}

    with pytest.raises(RolloutsFailed, match=r"2 × no simulator for task 1, 1 × no simulator for task 0, 129 × in Sou"):
        FailureStreak().check(196, 0, lambda: reasons)
