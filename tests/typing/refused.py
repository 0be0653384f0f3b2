"""Chains that do not fit: both checkers refuse the marked lines, and no others. Never run."""

from __future__ import annotations

from tests.typing.chains import Pack, Sample, Shape, Train

from penstock import AdvantageNormalizer, Batcher, Pipeline, TrainBatch, TrajectoryGroup, each, here, processes, source


async def judge_batches(batch: TrainBatch) -> TrainBatch:
    return batch


async def count(group: TrajectoryGroup) -> int:
    return len(group)


def blocking(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


class Plain:
    def run(self) -> None: ...


async def use() -> None:
    source(Sample()).then(Train())  # refused: a sink is no stage
    source(Sample()).sink(Train())  # refused: the stage between is missing
    source(Sample()).then(Pack()).then(Shape())  # refused: batches where groups are expected
    source(Sample()).then(Pack()).sink(Shape())  # refused: a stage is no sink
    source(Sample()).then(Pack()).then(Pack())  # refused: packed twice
    source(Shape())  # refused: a stage is no source
    source(Plain())  # refused: run is no coroutine
    source(Sample()).then(each(judge_batches))  # refused: a function of batches behind groups
    source(Sample()).then(each(count)).sink(Train())  # refused: numbers where batches are expected
    source(Sample()).then(each(blocking))  # refused: a plain function
    await source(Sample()).then(Pack()).run()  # refused: a missing sink
    pipeline: Pipeline = source(Sample()).then(Pack())  # refused: a missing sink
    pipeline.then(Shape())  # refused: no stage follows a sink
    source(Sample()).then(Pack)  # refused: a class for a stage
    source(Sample()).then(Pack()).sink(Train)  # refused: a class for a sink
    source(Sample()).then(Pack(), on=here)  # refused: no parentheses
    source(Sample(), on=processes)  # refused: no number of processes
    source(Sample(), on=4)  # refused: a number for a placement
    source(Sample()).then(Pack(), capacity=2.5)  # refused: half a record
    source(Sample()).then(Batcher(max_tokens=64)).then(AdvantageNormalizer("grpo"))  # refused: the wrong order
    source(Sample(), capacity=2)  # refused: no edge leads to a source
