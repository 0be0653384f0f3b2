"""Code that blocks the event loop of the pipeline's process is named in a warning, with the place where it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.cells import cells
from tests.fake_policy import completion_of
from tests.fixed_limits import set_limits
from tests.pipeline.flow_stages import Groups
from tests.processes.worker_sinks import Commit

from penstock import Pipeline, ReceiveChannel, SourceEnv, TrajectoryGroup, Worker, each, source
from penstock.environments import RolloutResult
from penstock.policies import Engine, NoOpPolicy

Log = list[Any]


@dataclass
class Blocks:
    """An environment, a function, a policy and a sink, which do not yield until a warning is in the log."""

    log: Log
    committed: Commit = field(default_factory=Commit)

    def __call__(self) -> Blocks:
        return self

    def spin(self) -> None:
        while True:
            for entry in self.log:
                if entry["event"] == "event_loop_blocked":
                    return

    async def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        self.spin()
        return RolloutResult(turns=[np.array([1], np.int32), completion_of("x")], reward=1.0)

    async def pass_on(self, group: TrajectoryGroup) -> TrajectoryGroup:
        self.spin()
        return group

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncIterator[Engine]:
        self.spin()
        async with NoOpPolicy().open(worker) as engine:
            yield engine

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        self.spin()
        await self.committed.run(inbox)


def in_an_environment(blocks: Blocks) -> Pipeline:
    return source(SourceEnv(blocks, NoOpPolicy(), group_size=1, groups=2)).sink(Commit())


def in_a_policy(blocks: Blocks) -> Pipeline:
    return source(SourceEnv(blocks, blocks, group_size=1, groups=2)).sink(Commit())


def in_each(blocks: Blocks) -> Pipeline:
    return source(Groups(2)).then(each(blocks.pass_on)).sink(Commit())


def in_a_sink(blocks: Blocks) -> Pipeline:
    return source(Groups(2)).sink(blocks)


@pytest.mark.parametrize("place", cells([in_an_environment, in_a_policy, in_each, in_a_sink], run=[in_an_environment]))
async def test_a_blocked_event_loop_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch, place: Callable[[Blocks], Pipeline]
) -> None:
    set_limits(monkeypatch, NAMED_S=1.0, CHECK_S=0.05)

    with capture_logs() as log:
        report = await place(Blocks(log)).run()

    assert any(entry.get("at", "").endswith(" in spin") for entry in log)
    assert report.balance.ended["trained"] > 0
