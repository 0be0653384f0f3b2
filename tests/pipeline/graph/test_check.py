from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from tests.pipeline.flow_stages import Collect, Count, Double, Groups, Pack, Train

from penstock import (
    AdvantageNormalizer,
    Batcher,
    Pipeline,
    ReceiveChannel,
    SendChannel,
    SourceChannel,
    StageInfo,
    TrainBatch,
    TrajectoryGroup,
    each,
    processes,
    source,
)
from penstock.errors import InvalidPipeline
from penstock.integrations.atropos import AtroposClient

T = TypeVar("T")


@dataclass(frozen=True)
class BigGroups(Groups):
    sends_at_most_tokens: int = 5_000

    def stage_info(self) -> StageInfo:
        return StageInfo(sends_at_most_tokens=self.sends_at_most_tokens)


@dataclass(frozen=True)
class Narrow:
    takes_at_most_tokens: int = 4_096
    keeps_groups: int = 0

    def stage_info(self) -> StageInfo:
        return StageInfo(takes_at_most_tokens=self.takes_at_most_tokens, keeps_groups=self.keeps_groups)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        async for group in inbox:
            await outbox.send(TrainBatch.pack([group]))


@dataclass(frozen=True)
class Pass:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await outbox.send(group)


def complaint(pipeline: Pipeline) -> str:
    with pytest.raises(InvalidPipeline) as raised:
        pipeline.check()
    return str(raised.value)


def test_a_pipeline_that_can_work_passes() -> None:
    source(Groups(3), on=processes(2)).then(Narrow(keeps_groups=8)).sink(Train()).check()


def test_a_group_larger_than_a_batch_is_found_through_the_stages_between() -> None:
    problems = complaint(source(BigGroups(1)).then(Pass()).then(Narrow()).sink(Train()))

    assert "Pass → Narrow: a group may hold 5000 tokens, and Narrow takes at most 4096" in problems


def test_a_byte_budget_smaller_than_one_record_is_found() -> None:
    problems = complaint(source(BigGroups(1)).then(Pass(), capacity_bytes=40_000).then(Pack()).sink(Train()))

    assert "BigGroups → Pass: a group may take 45000 bytes (5000 tokens), and the edge holds 40000" in problems


def test_behind_a_stage_that_packs_the_size_of_groups_bounds_nothing() -> None:
    source(BigGroups(1)).then(Pack()).sink(Train(), capacity_bytes=40_000).check()


def test_a_bound_that_starves_a_stage_which_keeps_groups_is_found() -> None:
    problems = complaint(source(Groups(1), on=processes(2)).then(Narrow(keeps_groups=9), capacity=4).sink(Train()))

    assert "Narrow keeps 9 groups before it sends, and its senders have credit for 8" in problems


def test_room_for_a_single_record_between_processes_starves_a_stage_that_holds_it() -> None:
    problems = complaint(source(Groups(1), on=processes(2)).then(Pass(), capacity=1).sink(Collect()))

    assert "Groups → Pass: expected a capacity of at least 2 between processes, got 1" in problems


def test_room_for_a_single_group_between_processes_starves_a_stage_that_holds_it() -> None:
    problems = complaint(source(BigGroups(1), on=processes(1)).sink(Collect(), capacity_bytes=40_000))

    assert "raise capacity_bytes to twice as much" in problems


def test_a_stage_that_cannot_be_pickled_cannot_go_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)

    class Local:
        async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None: ...

    problems = complaint(source(Local(), on=processes(1)).sink(Collect()))

    assert "Local: expected a stage that can be pickled to its process" in problems
    assert "functions of a module, by name" in problems


def test_a_stage_of_an_interactive_session_is_pickled_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed(Groups):
        pass

    monkeypatch.setattr(Typed, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    source(Typed(1), on=processes(1)).sink(Collect()).check()


def test_only_records_can_be_sent_between_processes() -> None:
    problems = complaint(source(Count(1), on=processes(1)).sink(Collect()))

    assert "Count: it runs in processes and sends int" in problems


def test_processes_within_processes_are_refused() -> None:
    inner = source(Groups(1), on=processes(2)).then(Pass())

    assert "processes within processes" in complaint(source(inner, on=processes(2)).sink(Collect()))


def test_a_run_that_is_no_coroutine_is_found() -> None:
    class Plain:
        def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None: ...

    stage: Any = Plain()

    assert "Plain: expected a stage with `async def run(self, inbox, outbox)`" in complaint(
        source(Count(1)).then(stage).sink(Collect())
    )


@dataclass(frozen=True)
class Keeping(Train):
    state: Any = None

    def stage_info(self) -> StageInfo:
        return StageInfo(saved=self.state)


def test_state_that_is_gathered_in_another_process_than_it_is_saved_in_is_found() -> None:
    stage, other = Pass(), Narrow()
    sink = Keeping(state={"normalizer": stage})

    alone = complaint(source(Groups(1)).then(stage, on=processes(1)).then(other).sink(sink))
    within = complaint(source(source(Groups(1)).then(stage), on=processes(1)).then(other).sink(sink))

    for problems in (alone, within):
        assert "checkpoints keep its state as 'normalizer', but it runs in processes and gathers there" in problems
    source(Groups(1)).then(stage).then(other, on=processes(1)).sink(sink).check()


def test_every_problem_is_listed_at_once() -> None:
    problems = complaint(source(Count(1)).then(Double(), capacity=0).sink(Collect(), capacity_bytes=0))

    assert problems.splitlines() == [
        "2 in this pipeline cannot work:",
        "Count → Double: capacity: expected a whole number of at least 1, got 0",
        "Double → Collect: capacity_bytes: expected a whole number of at least 1, got 0",
    ]


@pytest.mark.parametrize(
    "stage", [AtroposClient(batch_size=8, max_token_len=64, num_steps=1), SourceChannel("tcp://127.0.0.1:0")]
)
def test_a_source_that_follows_its_trajectories_is_found_in_a_worker(stage: Any) -> None:
    alone = complaint(source(stage, on=processes(1)).then(Batcher(max_tokens=999)).sink(Train()))
    within = complaint(source(source(stage).then(Pass()), on=processes(1)).then(Batcher(max_tokens=999)).sink(Train()))

    for problems in (alone, within):
        assert f"{type(stage).__name__}: it asks the ledger of the run what became of trajectories" in problems


def test_a_batcher_is_found_in_a_worker() -> None:
    problems = complaint(source(Groups(1)).then(Batcher(max_tokens=999), on=processes(1)).sink(Train()))

    assert "Batcher: it asks the ledger of the run what became of trajectories" in problems


class Keep:
    """An untyped stage, as in a script without annotations."""

    async def run(self, inbox, outbox):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        async for record in inbox:
            await outbox.send(record)


class Tap(Generic[T]):
    async def run(self, inbox: ReceiveChannel[T], outbox: SendChannel[T]) -> None: ...


SCRIPT: Any = source(Groups(1))
"""A chain without types: no type checker refuses a stage after it."""


def test_a_batcher_before_the_normalizer_is_refused_with_the_order_to_write() -> None:
    problems = complaint(SCRIPT.then(Batcher(max_tokens=99)).then(AdvantageNormalizer("grpo")).sink(Train()))

    assert (
        "Batcher → AdvantageNormalizer: Batcher sends TrainBatch, and AdvantageNormalizer receives TrajectoryGroup: "
        "write .then(AdvantageNormalizer(…)).then(Batcher(…))"
    ) in problems


def test_a_forgotten_batcher_is_named() -> None:
    assert "write .then(Batcher(max_tokens=…)) before Train(…)" in complaint(SCRIPT.sink(Train()))


def test_where_no_order_fits_the_types_between_are_named() -> None:
    problems = complaint(SCRIPT.then(Pack()).then(Double()).sink(Collect()))

    assert "Pack → Double: Pack sends TrainBatch, and Double receives int: put a stage between them" in problems
    assert "that receives TrainBatch and sends int" in problems


def test_the_record_types_of_a_function_are_read_from_its_annotations() -> None:
    async def forget(group: TrajectoryGroup) -> None: ...

    async def count(batch: TrainBatch) -> int:
        return len(batch)

    assert "Groups → count: Groups sends TrajectoryGroup, and count receives TrainBatch" in complaint(
        SCRIPT.then(each(count)).sink(Collect())
    )
    assert "forget → Pack: forget sends NoneType, and Pack receives TrajectoryGroup" in complaint(
        SCRIPT.then(each(forget)).then(Pack()).sink(Train())
    )


def test_a_stage_without_annotations_passes() -> None:
    SCRIPT.then(Pack()).then(Keep()).then(Pass()).sink(Collect()).check()


def test_a_stage_that_sends_its_input_type_passes_on_the_type() -> None:
    problems = complaint(SCRIPT.then(Pack()).then(Tap()).then(Pass()).sink(Collect()))

    assert "Tap → Pass: Tap sends TrainBatch, and Pass receives TrajectoryGroup" in problems


def test_a_fragment_is_looked_into() -> None:
    fragment = SCRIPT.then(Pack()).then(Pass(), capacity=2.5)

    problems = complaint(source(fragment, on=processes(2)).sink(Train()))

    assert "Pack → Pass: Pack sends TrainBatch, and Pass receives TrajectoryGroup" in problems
    assert "Pack → Pass: capacity: expected a whole number of at least 1, got 2.5" in problems
    assert "sends TrajectoryGroup, and Train receives TrainBatch" in problems


@pytest.mark.parametrize("capacity", [2.5, True, float("nan"), "2", -1])
def test_a_capacity_that_is_no_whole_number_is_refused(capacity: object) -> None:
    pipeline = SCRIPT.then(Pack(), capacity=capacity).sink(Train(), capacity_bytes=capacity)

    problems = complaint(pipeline)

    assert f"Groups → Pack: capacity: expected a whole number of at least 1, got {capacity!r}" in problems
    assert f"Pack → Train: capacity_bytes: expected a whole number of at least 1, got {capacity!r}" in problems


async def test_a_capacity_may_be_an_integer_of_numpy() -> None:
    pipeline = SCRIPT.then(Pack(), capacity=np.int8(100), on=processes(2)).sink(Train(), capacity_bytes=np.int64(2**20))

    assert "100 records" in pipeline.describe()
    assert (await source(Count(3)).sink(Collect(), capacity=np.int64(1)).run()).stop_reason == "end of stream"  # type: ignore[arg-type]


def test_a_bound_that_a_stage_gives_as_an_integer_of_numpy_is_one() -> None:
    problems = complaint(source(BigGroups(1, sends_at_most_tokens=np.int64(5_000))).then(Narrow()).sink(Train()))  # type: ignore[arg-type]

    assert "a group may hold 5000 tokens, and Narrow takes at most 4096" in problems


def test_a_bound_that_is_no_whole_number_is_refused() -> None:
    problems = complaint(source(Groups(1)).then(Narrow(takes_at_most_tokens=4096.0)).sink(Train()))  # type: ignore[arg-type]

    assert "Narrow: takes_at_most_tokens: expected a whole number, got 4096.0" in problems
