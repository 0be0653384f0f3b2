"""The time of day may jump: nothing waits by it, or decides by it."""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

ROOT = Path(__file__).parents[3]

STEADY = {"monotonic", "perf_counter", "sleep", "timedelta"}
"""Permitted names of `time` and `datetime`: clocks that never jump, and durations."""

GIVEN = {
    ("integrations/trl/worker.py", "time"),
    ("agents/endpoint/served_rollout.py", "time"),
    ("trackers/mlflow.py", "time"),
}
"""Read for another program: TRL subtracts it from its own `time.time()`, for a metric alone; OpenAI's answers have
the time, and so has each metric of MLflow."""

YEAR_S = 365 * 24 * 3600.0


def clocks_of(source: str) -> Iterator[str]:
    """Return the names that a module imports from `time` and `datetime`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                yield name
            case ast.ImportFrom(module="time" | "datetime", names=names):
                yield from (each.name for each in names)
            case ast.Attribute(value=ast.Name(id="datetime"), attr=name):
                yield name


@pytest.mark.parametrize("folder", ["pipeline", "stages", "schemas"])
def test_only_clocks_that_never_jump_are_read(folder: str) -> None:
    top = ROOT / folder
    read = {
        (path.relative_to(top).as_posix(), clock) for path in top.rglob("*.py") for clock in clocks_of(path.read_text())
    }

    assert {(name, clock) for name, clock in read if clock not in STEADY} - GIVEN == set()


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime",
    ],
)
def test_one_that_may_jump_would_be_seen(source: str) -> None:
    assert set(clocks_of(source)) - STEADY


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
async def test_records_travel_while_the_time_of_day_jumps(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle([YEAR_S, -YEAR_S])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    sent, got = [group(instance_id=str(number)) for number in range(20)], list[str]()

    async def send(to: str) -> None:
        async with connect(to, TrajectoryGroup, heartbeat_timeout_s=5) as outbox:
            for record in sent:
                await outbox.send(record)

    with anyio.fail_after(FAILSAFE_S):
        async with (
            serve(url, TrajectoryGroup, capacity=2, heartbeat_timeout_s=5) as inbox,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(send, inbox.url)
            got += [record.instance_id async for record in inbox]

    assert got == [record.instance_id for record in sent]
