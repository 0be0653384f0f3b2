from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from tests.pipeline.flow_stages import (
    Collect,
    Count,
    Double,
    DropAll,
    DropEverything,
    DropOdd,
    Forever,
    ForgetAwait,
    Groups,
    Pack,
    PutList,
    SwallowOdd,
    Train,
    WaitAtEnd,
)

from penstock import Pipeline, ReceiveChannel, SendChannel, Source, source
from penstock.accounting import Ledger, Metrics, PipelineStatistics
from penstock.channels import memory_channel
from penstock.errors import InvalidPipeline, NothingTrained, RecordsSwallowed, StageFailed
from penstock.testing import drive_source


async def when_all_wait(pipeline: Pipeline) -> PipelineStatistics:
    """Run until nothing moves any more, then cancel."""
    taken: list[PipelineStatistics] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await wait_all_tasks_blocked()
        taken.append(pipeline.statistics())
        tasks.cancel_scope.cancel()
    return taken[0]


async def test_records_reach_the_sink_through_every_stage() -> None:
    sink = Collect()

    report = await source(Count(4)).then(Double()).then(Double()).sink(sink).run()

    assert sink.received == [0, 4, 8, 12]
    assert report.stop_reason == "end of stream"


async def test_a_pipeline_can_run_again() -> None:
    sink = Collect()
    pipeline = source(Count(2)).sink(sink)

    await pipeline.run()
    await pipeline.run()

    assert sink.received == [0, 1, 0, 1]


async def test_a_pipeline_runs_once_at_a_time() -> None:
    pipeline = source(Forever()).sink(Collect())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await checkpoint()
        with pytest.raises(RuntimeError, match="one run at a time"):
            await pipeline.run()
        tasks.cancel_scope.cancel()


async def test_a_sink_that_has_had_enough_ends_the_run_however_long_the_source_would_go_on() -> None:
    sink = Collect(enough=3)

    report = await source(Forever()).then(Double()).sink(sink).run()

    assert len(sink.received) == 3
    assert report.stop_reason == "Collect returned"
    assert [stage.state for stage in report.statistics.stages] == ["cancelled", "cancelled", "returned"]


@dataclass(frozen=True)
class First:
    limit: int

    async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None:
        for _ in range(self.limit):
            await outbox.send(await inbox.receive())


async def test_a_stage_that_returns_early_ends_its_stream_and_cancels_the_stages_before_it() -> None:
    sink = Collect()

    report = await source(Forever()).then(First(3)).then(Double()).sink(sink).run()

    assert sink.received == [0, 0, 0]
    assert [stage.state for stage in report.statistics.stages] == ["cancelled", "returned", "returned", "returned"]


# -- failure -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fail:
    error: Exception

    async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None:
        await outbox.send(await inbox.receive())
        raise self.error


async def test_an_exception_ends_the_pipeline_and_is_raised_with_the_name_of_its_stage() -> None:
    pipeline = source(Forever()).then(Fail(ValueError("no such token"))).sink(Collect())

    with pytest.raises(StageFailed, match=r"^Fail raised ValueError: no such token$") as failed:
        await pipeline.run()

    assert isinstance(failed.value.__cause__, ValueError)
    assert pipeline.report is not None
    assert pipeline.report.stop_reason == "Fail raised ValueError: no such token"
    assert [stage.state for stage in pipeline.report.statistics.stages] == ["cancelled", "failed", "cancelled"]


async def test_an_exception_within_groups_of_one_is_the_cause() -> None:
    nested = ExceptionGroup("tasks", [ExceptionGroup("more tasks", [KeyError("prompt")])])

    with pytest.raises(StageFailed, match="Fail raised KeyError: 'prompt'") as failed:
        await source(Forever()).then(Fail(nested)).sink(Collect()).run()

    assert isinstance(failed.value.__cause__, KeyError)


async def test_a_group_of_several_exceptions_stays_together() -> None:
    several = ExceptionGroup("tasks", [KeyError("a"), ValueError("b")])

    with pytest.raises(StageFailed) as failed:
        await source(Forever()).then(Fail(several)).sink(Collect()).run()

    assert failed.value.__cause__ is several


@dataclass(frozen=True)
class FailWhenCancelled:
    async def run(self, outbox: SendChannel[int]) -> None:
        await outbox.send(1)
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("cannot clean up")


async def test_a_second_failure_is_noted_on_the_first() -> None:
    pipeline = source(FailWhenCancelled()).then(Fail(ValueError("first"))).sink(Collect())

    with pytest.raises(StageFailed, match="first") as failed:
        await pipeline.run()

    assert failed.value.__notes__ == ["besides: FailWhenCancelled raised OSError: cannot clean up"]


# -- cancellation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CleanUp:
    cleaned: list[str]

    async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None:
        try:
            async for number in inbox:
                await outbox.send(number)
        finally:
            with anyio.CancelScope(shield=True):
                await checkpoint()
            self.cleaned.append("middle")


@dataclass(frozen=True)
class Cancel:
    scope: anyio.CancelScope

    async def run(self, inbox: ReceiveChannel[int]) -> None:
        async for _ in inbox:
            self.scope.cancel()


async def test_cancellation_lets_every_stage_clean_up() -> None:
    cleaned: list[str] = []
    scope = anyio.CancelScope()
    pipeline = source(Forever()).then(CleanUp(cleaned)).sink(Cancel(scope))

    with scope:
        await pipeline.run()

    assert cleaned == ["middle"]
    assert pipeline.report is not None
    assert pipeline.report.stop_reason == "cancelled"


@dataclass(frozen=True)
class Stall:
    async def run(self, inbox: ReceiveChannel[Any]) -> None:
        await inbox.receive()
        await anyio.sleep_forever()


async def test_trajectories_in_flight_when_the_run_is_cancelled_are_unfinished() -> None:
    pipeline = source(Groups(10)).sink(Stall())

    await when_all_wait(pipeline)

    report = pipeline.report
    assert report is not None
    assert report.in_flight == 8  # one group with the sink, two in the channel, one that waits for room
    assert report.balance.reasons["unfinished"] == {"in flight when the run ended": 8}
    assert report.balance.ended["lost"] == 0
    assert report.balance.in_flight == 0


@dataclass(frozen=True)
class FailAtOnce:
    async def run(self, inbox: ReceiveChannel[Any]) -> None:
        await inbox.receive()
        raise ValueError("no such token")


async def test_trajectories_in_flight_when_a_stage_fails_are_lost() -> None:
    pipeline = source(Groups(10)).sink(FailAtOnce())

    with pytest.raises(StageFailed, match="no such token"):
        await pipeline.run()

    report = pipeline.report
    assert report is not None
    assert report.in_flight > 0
    assert report.balance.reasons["lost"] == {"in flight when the run failed": report.in_flight}
    assert report.balance.ended["unfinished"] == 0


# -- the ledger ----------------------------------------------------------------------------------------------------


async def test_a_source_that_knows_no_ledger_has_its_groups_admitted() -> None:
    report = await source(Groups(3)).then(Pack()).sink(Train()).run()

    assert report.balance.admitted == 6
    assert report.balance.ended["trained"] == 6


async def test_dropped_records_end_with_the_reason_of_the_stage() -> None:
    report = await source(Groups(4)).then(DropOdd()).then(Pack()).sink(Train()).run()

    assert report.balance.reasons["filtered"] == {"odd": 4}
    assert report.balance.ended["trained"] == 4
    assert report.statistics.stages[1].dropped == {"filtered": 4}


async def test_records_that_a_stage_swallows_are_lost_and_the_stage_is_named() -> None:
    pipeline = source(Groups(4)).then(SwallowOdd()).then(Pack()).sink(Train())

    with pytest.raises(
        RecordsSwallowed, match=r"did neither with some: SwallowOdd \(4 trajectories\)\. Is `await` missing"
    ):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.reasons["lost"] == {"swallowed by SwallowOdd": 4}
    assert pipeline.report.balance.balanced


async def test_a_sink_that_does_not_commit_swallows() -> None:
    pipeline = source(Groups(2)).then(DropOdd()).sink(Collect())

    with pytest.raises(RecordsSwallowed, match=r"Collect \(2 trajectories\).*a sink records its use with current"):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.reasons["lost"] == {"swallowed by Collect": 2}


async def test_a_send_without_await_is_an_error_that_names_the_stage() -> None:
    with (
        pytest.warns(RuntimeWarning, match="never awaited"),
        pytest.raises(RecordsSwallowed, match=r"ForgetAwait \(4 trajectories\)"),
    ):
        await source(Groups(2)).then(ForgetAwait()).then(Pack()).sink(Train()).run()


async def test_a_run_that_ends_by_itself_and_trains_nothing_raises_with_its_balance() -> None:
    pipeline = source(Groups(3)).then(DropAll()).then(Pack()).sink(Train())

    with pytest.raises(NothingTrained, match=r"6 trajectories were begun, 6 filtered \(6 × all\)"):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.ended["filtered"] == 6


async def test_a_sink_that_drops_all_that_it_received_is_no_error() -> None:
    report = await source(Groups(3)).sink(DropEverything()).run()

    assert report.balance.reasons["filtered"] == {"looked at": 6}


async def test_a_source_that_waits_for_the_sink_when_its_stream_has_ended_ends_the_stream() -> None:
    report = await source(WaitAtEnd()).then(Pack()).sink(Train()).run()

    assert report.stop_reason == "end of stream"
    assert report.balance.ended["trained"] == 2


async def test_a_run_whose_source_sends_nothing_raises() -> None:
    with pytest.raises(NothingTrained, match="got none: the source sent nothing"):
        await source(Groups(0)).then(Pack()).sink(Train()).run()


async def test_a_run_that_goes_on_where_nothing_is_left_to_train_is_no_error() -> None:
    ledger = Ledger()
    ledger.restore({}, step=3)

    report = await source(Groups(0)).then(Pack()).sink(Train()).run(ledger=ledger)

    assert report.balance.admitted == 0


async def test_a_stage_that_sends_a_list_for_an_array_is_blamed_itself() -> None:
    with pytest.raises(StageFailed, match=r"PutList raised.*rewards: expected a numpy array of float32, got list"):
        await source(Groups(2)).then(PutList()).then(DropOdd()).then(Pack()).sink(Train()).run()


async def test_a_sink_that_returns_early_swallows_nothing() -> None:
    report = await source(Groups(9)).then(Pack()).sink(Train(steps=1)).run()

    assert report.balance.ended["trained"] == 2
    assert set(report.balance.reasons["unfinished"]) == {"in flight when the run ended"}
    assert report.balance.ended["lost"] == 0


async def test_the_ledger_and_the_metrics_of_a_run_may_be_given() -> None:
    ledger, metrics = Ledger(), Metrics()

    await source(Groups(2)).then(DropOdd()).then(Pack()).sink(Train()).run(ledger=ledger, metrics=metrics)

    assert ledger.balance().ended["trained"] == 2
    assert metrics.emit(1)["dropped/filtered"] == 2


# -- fragments, fan-in, broadcast ----------------------------------------------------------------------------------


async def test_a_flow_is_a_source() -> None:
    out = await drive_source(source(Count(3)).then(Double()))

    assert out == [0, 2, 4]


async def test_a_flow_in_place_of_a_source_is_the_same_as_its_stages() -> None:
    assert source(source(Count(1)).then(Double())).nodes == source(Count(1)).then(Double()).nodes


@dataclass(frozen=True)
class Both:
    """Fan-in: two sources run at once and share one outbox."""

    one: Source[int]
    other: Source[int]

    async def run(self, outbox: SendChannel[int]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.one.run, outbox.clone())
            tasks.start_soon(self.other.run, outbox.clone())


async def test_fan_in_is_a_source_of_sources() -> None:
    sink = Collect()

    await source(Both(source(Count(3)).then(Double()), Count(2))).sink(sink).run()

    assert sorted(sink.received, key=repr) == [0, 0, 1, 2, 4]


async def test_clones_that_a_stage_left_open_do_not_keep_the_stream_open() -> None:
    class Forgetful:
        async def run(self, outbox: SendChannel[int]) -> None:
            await outbox.clone().send(1)

    sink = Collect()

    await source(Forgetful()).sink(sink).run()

    assert sink.received == [1]


async def test_a_failure_within_a_fragment_names_the_stage_within() -> None:
    broken = source(Forever()).then(Fail(ValueError("deep")))

    with pytest.raises(StageFailed, match=r"^Fail raised ValueError: deep$"):
        await source(Both(broken, Count(1))).sink(Collect()).run()


@dataclass(frozen=True)
class Broadcast:
    """Every record goes to the stage after this one, and to a channel beside the pipeline."""

    aside: SendChannel[int]

    async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None:
        async with self.aside:
            async for number in inbox:
                await self.aside.send(number)
                await outbox.send(number)


async def test_broadcast_is_a_stage_with_a_channel_of_its_own() -> None:
    sink, log = Collect(), Collect()
    aside, beside = memory_channel[int](1)

    async with beside, anyio.create_task_group() as tasks:
        tasks.start_soon(log.run, beside)
        await source(Count(5)).then(Broadcast(aside)).sink(sink).run()

    assert sink.received == log.received == [0, 1, 2, 3, 4]


# -- descriptions and statistics -----------------------------------------------------------------------------------


async def test_statistics_name_the_wait_of_each_stage() -> None:
    statistics = await when_all_wait(source(Groups(10)).then(DropOdd()).sink(Stall(), capacity=1))

    assert [stage.waiting_for for stage in statistics.stages] == ["credit from DropOdd", "credit from Stall", ""]
    assert [edge.channel.fill for edge in statistics.edges] == [1.0, 1.0]
    assert all(stage.state == "running" for stage in statistics.stages)


async def test_statistics_name_the_stage_that_waits_for_records() -> None:
    class Idle:
        async def run(self, outbox: SendChannel[int]) -> None:  # noqa: ARG002 (it sends nothing)
            await anyio.sleep_forever()

    statistics = await when_all_wait(source(Idle()).then(Double()).sink(Collect()))

    assert [stage.waiting_for for stage in statistics.stages] == ["", "records from Idle", "records from Double"]


def test_before_the_first_run_there_are_no_statistics() -> None:
    pipeline = source(Count(1)).sink(Collect())

    assert pipeline.statistics().stages == ()
    assert pipeline.report is None


def test_equal_names_get_numbers() -> None:
    pipeline = source(Count(1)).then(Double()).then(Double()).sink(Collect())

    assert repr(pipeline) == "<Pipeline Count → Double → Double 2 → Collect>"


async def test_a_pipeline_that_cannot_work_does_not_start() -> None:
    pipeline: Pipeline = source(Count(1)).sink(Collect(), capacity=0)

    with pytest.raises(InvalidPipeline, match="capacity: expected a whole number of at least 1"):
        await pipeline.run()
