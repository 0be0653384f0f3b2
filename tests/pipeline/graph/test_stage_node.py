from __future__ import annotations

from typing import Any

from tests.pipeline.flow_stages import Collect, Count, Double, Groups, Pack

from penstock import SendChannel, TrainBatch, TrajectoryGroup, each, here, source
from penstock._pipeline.graph.record_types import output_type, wire_type
from penstock._pipeline.graph.stage_info import name_of, named
from penstock._pipeline.graph.stage_node import StageNode


async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def test_what_a_stage_sends_is_read_from_its_outbox() -> None:
    assert output_type(Count(1)) is int
    assert output_type(Pack()) is TrainBatch
    assert output_type(Collect()) is None


def test_what_a_flow_sends_is_what_its_last_stage_sends() -> None:
    assert output_type(source(Groups(1)).then(Pack())) is TrainBatch
    assert output_type(source(Groups(1)).then(each(judge))) is TrajectoryGroup


def test_a_stage_that_does_not_say_is_taken_to_send_groups() -> None:
    class Untyped:
        async def run(self, outbox: Any) -> None: ...

    class Unresolved:
        async def run(self, outbox: SendChannel[Unknown]) -> None: ...  # type: ignore[name-defined]  # noqa: F821 (so it is)

    assert output_type(Untyped()) is output_type(Unresolved()) is None
    assert wire_type(Untyped()) is TrajectoryGroup


def test_a_stage_is_called_like_its_class_unless_it_says_otherwise() -> None:
    assert name_of(Count(1)) == "Count"
    assert name_of(each(judge)) == "judge"


def test_equal_names_get_numbers() -> None:
    links = named(StageNode(Double(), "", here()) for _ in range(3))

    assert [link.name for link in links] == ["Double", "Double 2", "Double 3"]
