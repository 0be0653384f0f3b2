"""Chains that fit: mypy and pyright accept every line, and know what a flow sends."""

from __future__ import annotations

from typing import assert_type

from penstock import (
    Flow,
    Pipeline,
    ReceiveChannel,
    Report,
    SendChannel,
    TrainBatch,
    TrajectoryGroup,
    each,
    here,
    processes,
    source,
)


class Sample:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None: ...


class Shape:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None: ...


class Pack:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None: ...


class Train:
    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None: ...


class Log:
    """Takes anything, so it fits behind everything."""

    async def run(self, inbox: ReceiveChannel[object]) -> None: ...


async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


async def use() -> None:
    assert_type(source(Sample()), Flow[TrajectoryGroup])
    assert_type(source(Sample()).then(Pack()), Flow[TrainBatch])
    assert_type(source(Sample()).then(each(judge, concurrency=4)), Flow[TrajectoryGroup])
    assert_type(source(Sample()).then(Pack()).sink(Train()), Pipeline)

    source(source(Sample()).then(Shape()), on=processes(4)).then(Pack(), on=here(), capacity=2).sink(Train())
    source(Sample()).sink(Log())
    report = await source(Sample()).then(Pack()).sink(Train(), capacity_bytes=2**20).run()

    assert_type(report, Report)
