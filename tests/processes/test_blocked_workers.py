"""Workers whose event loop does not run: they are ended with the place where they stand, and replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.processes.blocking_environments import WAYS, Blocked, blocking, closing
from tests.processes.worker_sinks import Commit

from penstock import SourceEnv, processes, source
from penstock.policies import NoOpPolicy

PLACE = re.compile(r"did not run its event loop for 11 s, it was at .*/blocking_environments.py:\d+ in (\w+); it was")


def sampling(make_env: Any, **options: Any) -> SourceEnv:
    return SourceEnv(make_env, NoOpPolicy(), group_size=1, concurrency=1, **options)


async def test_a_worker_whose_event_loop_is_blocked_is_replaced_and_its_place_is_named() -> None:
    env = sampling(blocking, groups=30, rollout_timeout_s=1)

    with capture_logs() as log, anyio.fail_after(FAILSAFE_S):
        report = await source(env, on=processes(len(WAYS), restarts=1)).sink(Commit()).run()

    found = [PLACE.search(entry["how"]) for entry in log if entry["event"] == "worker_died"]
    assert {match[1] for match in found if match} == {way.__name__ for way in WAYS}
    assert report.balance.balanced
    assert report.balance.admitted == 30
    assert report.balance.ended["lost"] <= 1  # of three deaths, two may be with the same prompt


async def test_a_worker_whose_stage_has_no_bound_is_named_with_its_place_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_limits(monkeypatch, NAMED_S=6.0)  # the worker counts within 4 s
    os.mkfifo(tmp_path / "go")
    pipeline = source(Blocked(str(tmp_path / "go")), on=processes(1)).sink(Commit())

    with capture_logs() as log, anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            while not any(entry.get("at", "").endswith(" in wait_for_pipe") for entry in log):  # noqa: ASYNC110 (a log)
                await anyio.sleep(0.01)
            os.close(os.open(tmp_path / "go", os.O_WRONLY | os.O_NONBLOCK))  # the worker reads

    assert pipeline.report is not None
    (stage, _) = pipeline.report.statistics.stages
    assert [(worker.state, worker.restarts) for worker in stage.workers] == [("finished", 0)]


async def test_a_worker_that_closes_its_file_descriptors_is_replaced_by_name() -> None:
    env = sampling(closing, groups=6)

    with capture_logs() as log, anyio.fail_after(FAILSAFE_S):
        report = await source(env, on=processes(1, restarts=1)).sink(Commit()).run()

    (how,) = [entry["how"] for entry in log if entry["event"] == "worker_died"]
    closed = "ended its connection with its parent, and did not exit"
    assert closed in how or "SIGABRT" in how  # ZeroMQ's threads may end it before the parent does
    assert report.balance.ended["trained"] == 6
