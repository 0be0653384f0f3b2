"""Stages in processes: real ones, and all the work that they are there for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import pytest
from tests.fake_policy import Letters
from tests.moments import moment
from tests.pipeline.flow_stages import Groups, Pack, Train
from tests.processes import worker_stages as stages
from tests.processes.worker_sinks import Commit

from penstock import (
    GroupAssembler,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    Source,
    TrajectoryGroup,
    current,
    processes,
    source,
)
from penstock.accounting import Metrics
from penstock.rewards import RewardFunction, RewardInput

# -- work ----------------------------------------------------------------------------------------------------------


async def test_samples_of_workers_are_received_once_and_the_ledger_balances() -> None:
    sink = Commit()

    report = await source(stages.Sample(100), on=processes(2)).sink(sink).run()

    assert sorted(sink.received) == sorted(f"{number}.0" for number in range(100))
    assert report.stop_reason == "end of stream"
    assert report.balance.admitted == report.balance.ended["trained"] == 200
    assert [worker.state for worker in report.statistics.stages[0].workers] == ["finished", "finished"]


async def test_records_that_workers_send_twice_are_trained_once() -> None:
    report = await source(stages.SampleTwice(10), on=processes(2)).then(Pack()).sink(Train()).run()

    assert report.stop_reason == "end of stream"
    assert report.balance.ended["trained"] == 20
    assert report.balance.ended["rejected"] == 60
    assert report.balance.admitted == 80


async def test_groups_whose_pieces_come_from_several_workers_are_trained_whole_and_once_though_one_began_anew() -> None:
    assembler = GroupAssembler(2, stragglers="wait")

    report = await source(stages.SampleOneEach(20), on=processes(2)).then(assembler).then(Pack()).sink(Train()).run()

    assert report.stop_reason == "end of stream"
    assert report.balance.ended["trained"] == 40
    assert report.balance.ended["rejected"] == 10  # what the second had sent before it died, it sent again
    assert report.balance.ended["filtered"] == report.balance.ended["lost"] == 0
    assert report.balance.admitted == 50


async def test_the_ends_of_its_trajectories_are_reported_to_a_worker() -> None:
    report = await source(stages.SamplePaced(5), on=processes(1)).then(Pack()).sink(Train()).run()

    assert report.balance.ended["trained"] == 10


async def test_the_lag_of_each_worker_is_shown() -> None:
    lags: list[int | None] = []

    class Step:
        """Trains every group in a step of its own, and reads the lag of the worker after it."""

        async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
            step = 0
            async for group in inbox:
                step += 1
                current().ledger.commit_ids(group.ids, step)
                (worker,) = pipeline.statistics().stages[0].workers
                lags.append(worker.lag)

    pipeline = source(stages.Sample(3), on=processes(1)).sink(Step())

    await pipeline.run()

    assert lags == [1, 2, 3]  # all were sampled with version 0


async def test_metrics_and_drops_of_a_worker_are_those_of_the_run() -> None:
    metrics = Metrics()

    report = await source(stages.SampleObserved(4), on=processes(1)).sink(Commit()).run(metrics=metrics)

    emitted = metrics.emit(1)
    assert emitted.items() >= {"temperature": 2.0, "dropped/failed": 2.0, "late": 1.0}.items()
    assert {"timing_s/SampleObserved/wait_output", "timing_s/Commit/wait_input"} <= emitted.keys()
    assert report.balance.reasons["failed"] == {"no such tool": 2}
    assert report.balance.ended["trained"] == 8


async def test_a_fragment_runs_together_in_each_process() -> None:
    fragment = source(stages.Sample(20)).then(stages.Judge()).then(Pack())

    report = await source(fragment, on=processes(2)).sink(Train()).run()

    assert report.balance.ended["trained"] == 32
    assert report.balance.reasons["filtered"] == {"every fifth": 8}


@dataclass(frozen=True)
class Mix:
    """Fan-in: several flows, each with workers of its own, share one outbox."""

    flows: Sequence[Source[TrajectoryGroup]]

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        async with anyio.create_task_group() as tasks:
            for flow in self.flows:
                tasks.start_soon(flow.run, outbox)


async def test_flows_with_workers_can_be_the_sources_of_another() -> None:
    sink = Commit()
    mix = Mix([source(stages.SamplePaced(5), on=processes(1)), source(stages.Sample(7), on=processes(1))])

    report = await source(mix).sink(sink).run()

    assert len(sink.received) == 12
    assert report.balance.admitted == report.balance.ended["trained"] == 24


async def test_a_worker_imports_no_tensors_and_speaks_where_its_parent_does(capfd: pytest.CaptureFixture[str]) -> None:
    await source(stages.WithoutTorch(2), on=processes(2)).sink(Commit()).run()

    printed = capfd.readouterr().out
    assert "worker 0 speaks" in printed
    assert "worker 1 speaks" in printed


# -- statistics ----------------------------------------------------------------------------------------------------


async def test_statistics_say_that_a_worker_has_not_started_yet() -> None:
    pipeline = source(stages.Sample(2), on=processes(1)).sink(Commit())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        while not pipeline.statistics().stages:
            await moment()
        assert pipeline.statistics().stages[0].waiting_for in {"", "start of Sample 1/1"}
        assert pipeline.statistics().stages[0].workers[0].state == "starting"

    assert pipeline.report is not None
    assert pipeline.report.statistics.stages[0].workers[0].state == "finished"


async def test_statistics_say_how_long_workers_have_waited_as_the_metrics_do() -> None:
    metrics = Metrics()
    judged = source(stages.Sample(100), on=processes(1)).then(stages.Judge(), on=processes(1), capacity=4)

    report = await judged.sink(Commit()).run(metrics=metrics)

    emitted = metrics.emit(1)
    for stage in report.statistics.stages:
        waited = (stage.waited_for_records_s, stage.waited_for_credit_s)
        reported = tuple(emitted[f"timing_s/{stage.name}/wait_{what}"] for what in ("input", "output"))
        assert waited == pytest.approx(reported)
        assert max(waited) > 0


# -- middle stages -------------------------------------------------------------------------------------------------


async def test_a_middle_stage_in_processes_loses_and_duplicates_nothing() -> None:
    sink, metrics = Commit(), Metrics()
    pipeline = source(stages.Sample(50), on=processes(1)).then(stages.Judge(), on=processes(2)).sink(sink)

    report = await pipeline.run(metrics=metrics)

    assert len(set(sink.received)) == len(sink.received) == 40
    assert report.balance.reasons["filtered"] == {"every fifth": 20}
    assert report.balance.ended["trained"] == 80
    assert metrics.emit(1)["judged"] == 50


def mark(answer: RewardInput) -> float:
    return float(len(answer.text))


async def test_a_reward_in_processes_reads_text_by_the_tokenizer_that_the_source_states() -> None:
    rewards: list[list[float]] = []

    class Collect(Commit):
        async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
            async for group in inbox:
                rewards.append(group.rewards.tolist())
                current().ledger.end(group, "trained")

    bridge = RewardBridge(functions=[RewardFunction(mark)])
    await source(Groups(4, tokenizer=Letters())).then(bridge, on=processes(1)).sink(Collect()).run()

    assert rewards == [[5.0, 7.0]] * 4


async def test_records_of_killed_middle_workers_are_lost_and_the_run_continues() -> None:
    sink = Commit()
    pipeline = source(stages.Sample(60)).then(stages.Judge(dies_once=True), on=processes(2), capacity=4).sink(sink)

    report = await pipeline.run()

    balance = report.balance
    died = sum(worker.restarts for worker in report.statistics.stages[1].workers)
    assert died >= 1
    assert all(reason.endswith("was killed by SIGKILL") for reason in balance.reasons["lost"])
    assert 2 * died <= balance.ended["lost"] <= 2 * died * (4 + 1)
    assert balance.ended["trained"] == 2 * len(set(sink.received))
    assert balance.admitted == 120 == sum(balance.ended.values())
