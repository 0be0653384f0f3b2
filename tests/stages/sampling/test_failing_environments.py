"""Runs whose environment fails end with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from tests.processes.worker_sinks import Commit
from tests.stages.sampling.failing_environments import AlwaysRaises, SucceedsOnce

from penstock import SourceEnv, here, processes, source
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
    assert pipeline.report.balance.ended["failed"] >= 64
    assert pipeline.report.stop_reason.startswith("expected at least one of 64 rollouts in a row to succeed")


async def test_a_traceback_is_logged_once_for_each_line_that_raises_and_then_counts() -> None:
    with structlog.testing.capture_logs() as events, pytest.raises(RolloutsFailed):
        await source(sampling(AlwaysRaises)).sink(Commit()).run()

    dropped = [event for event in events if event["event"] == "rollout_dropped"]
    assert [event["count"] for event in dropped][:7] == [1, 2, 4, 8, 16, 32, 64]
    assert [event["count"] for event in dropped if event["exc_info"] is not None] == [1]


async def test_different_reasons_are_counted_separately_up_to_a_number() -> None:
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
