"""Stages in processes: real ones, killed by real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tests.pipeline.flow_stages import Pack, Train
from tests.processes import worker_stages as stages

from penstock import (
    GroupAssembler,
    Metrics,
    Pipeline,
    ReceiveChannel,
    SendChannel,
    Source,
    TrajectoryGroup,
    current,
    processes,
    source,
)
from penstock.errors import WorkerFailed


@dataclass(frozen=True)
class Commit:
    """Trains on every group it receives; returns after `enough`."""

    received: list[str] = field(default_factory=list)
    enough: int | None = None

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            self.received.append(group.instance_id)
            current().ledger.end(group, "trained")
            if len(self.received) == self.enough:
                return


@dataclass(frozen=True)
class Attentive(Commit):
    """Sets an event at the first record."""

    began: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            current().ledger.end(group, "trained")
            del group  # its slot is free for the next one
            self.began.set()


@asynccontextmanager
async def running(pipeline: Pipeline, began: anyio.Event) -> AsyncIterator[list[int]]:
    """The pipeline runs within the body, which is given the workers' process ids; then it is cancelled."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await began.wait()
        yield [worker.pid for stage in pipeline.statistics().stages for worker in stage.workers if worker.pid]
        tasks.cancel_scope.cancel()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- work ----------------------------------------------------------------------------------------------------------


async def test_what_workers_sample_is_received_once_and_the_books_balance() -> None:
    sink = Commit()

    report = await source(stages.Sample(100), on=processes(2)).sink(sink).run()

    assert sorted(sink.received) == sorted(f"{number}.0" for number in range(100))
    assert report.ended_by == "end of stream"
    assert report.balance.admitted == report.balance.ended["trained"] == 200
    assert [worker.state for worker in report.statistics.stages[0].workers] == ["finished", "finished"]


async def test_what_workers_send_twice_and_what_two_of_them_send_is_trained_once() -> None:
    report = await source(stages.SampleTwice(10), on=processes(2)).then(Pack()).sink(Train()).run()

    assert report.ended_by == "end of stream"
    assert report.balance.ended["trained"] == 20
    assert report.balance.ended["rejected"] == 60
    assert report.balance.admitted == 80


async def test_groups_whose_pieces_come_from_several_workers_are_trained_whole_and_once_though_one_began_anew() -> None:
    assembler = GroupAssembler(2, stragglers="wait")

    report = await source(stages.SampleOneEach(20), on=processes(2)).then(assembler).then(Pack()).sink(Train()).run()

    assert report.ended_by == "end of stream"
    assert report.balance.ended["trained"] == 40
    assert report.balance.ended["rejected"] == 10  # what the second had sent before it died, it sent again
    assert report.balance.ended["filtered"] == report.balance.ended["lost"] == 0
    assert report.balance.admitted == 50


async def test_a_worker_hears_how_its_trajectories_ended() -> None:
    report = await source(stages.SamplePaced(5), on=processes(1)).then(Pack()).sink(Train()).run()

    assert report.balance.ended["trained"] == 10


async def test_metrics_and_drops_of_a_worker_are_those_of_the_run() -> None:
    metrics = Metrics()

    report = await source(stages.SampleObserved(4), on=processes(1)).sink(Commit()).run(metrics=metrics)

    emitted = metrics.emit(1)
    assert emitted.items() >= {"temperature": 2.0, "dropped/failed": 2.0, "late": 1.0}.items()
    assert {"wait_s/SampleObserved/credit", "wait_s/Commit/records"} <= emitted.keys()
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

    heard = capfd.readouterr().out
    assert "worker 0 speaks" in heard
    assert "worker 1 speaks" in heard


async def test_what_a_worker_forgets_is_lost_and_the_worker_is_named() -> None:
    report = await source(stages.Forget(3), on=processes(1)).sink(Commit()).run()

    (reason,) = report.balance.reasons["lost"]
    assert reason.startswith("swallowed by Forget 1/1 (pid ")
    assert report.balance.ended["lost"] == 2


# -- middle stages -------------------------------------------------------------------------------------------------


async def test_a_middle_stage_in_processes_loses_and_duplicates_nothing() -> None:
    sink, metrics = Commit(), Metrics()
    pipeline = source(stages.Sample(50), on=processes(2)).then(stages.Judge(), on=processes(2)).sink(sink)

    report = await pipeline.run(metrics=metrics)

    assert len(set(sink.received)) == len(sink.received) == 40
    assert report.balance.reasons["filtered"] == {"every fifth": 20}
    assert report.balance.ended["trained"] == 80
    assert metrics.emit(1)["judged"] == 50


async def test_what_middle_workers_held_when_they_were_killed_is_lost_and_the_run_goes_on() -> None:
    sink = Commit()
    pipeline = source(stages.Sample(60)).then(stages.Judge(mortal=True), on=processes(2), capacity=4).sink(sink)

    report = await pipeline.run()

    balance = report.balance
    died = sum(worker.restarts for worker in report.statistics.stages[1].workers)
    assert died >= 1
    assert all(reason.endswith("was killed by SIGKILL") for reason in balance.reasons["lost"])
    assert 2 * died <= balance.ended["lost"] <= 2 * died * (4 + 1)
    assert balance.ended["trained"] == 2 * len(set(sink.received))
    assert balance.admitted == 120 == sum(balance.ended.values())


# -- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_worker_that_dies_is_restarted_and_what_it_held_is_lost_with_the_reason(number: int) -> None:
    sink = Commit()

    report = await source(stages.SampleAndDie(20, signal=number), on=processes(2)).sink(sink).run()

    name = signal.Signals(number).name
    doomed = [received for received in sink.received if received.startswith("doomed")]
    (reason,) = report.balance.reasons["lost"]
    assert reason.startswith("SampleAndDie 1/2 (pid ")
    assert reason.endswith(f"was killed by {name}")
    assert report.balance.ended["lost"] == 2  # the group that it had begun
    assert doomed == ["doomed 0.0", "doomed 1.0", "doomed 2.0"]  # published before it died, so not lost
    assert len(sink.received) == 20 + 3
    assert report.balance.balanced
    assert [worker.restarts for worker in report.statistics.stages[0].workers] == [1, 0]


async def test_a_worker_that_dies_too_often_ends_the_run() -> None:
    pipeline = source(stages.SampleAndDie(20, lives=9), on=processes(2, restarts=2)).sink(Commit())

    with pytest.raises(WorkerFailed, match=r"SampleAndDie 1/2, restart 2 \(pid \d+\) was killed by SIGKILL; it was"):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    assert pipeline.report.balance.in_flight == 0


async def test_a_worker_that_exits_without_a_word_is_as_dead_as_a_killed_one() -> None:
    pipeline = source(stages.SampleAndDie(4, lives=9, signal=0), on=processes(1, restarts=0)).sink(Commit())

    with pytest.raises(WorkerFailed, match="exited with status 3 before its stage had returned"):
        await pipeline.run()


async def test_a_worker_that_dies_before_it_connects_is_restarted(tmp_path: Path) -> None:
    sink = Commit()
    stage = stages.DieWhenUnpickled(str(tmp_path / "died"))

    report = await source(stage, on=processes(1)).sink(sink).run()

    assert len(sink.received) == 1
    assert report.statistics.stages[0].workers[0].restarts == 1


async def test_an_exception_in_a_worker_arrives_with_its_traceback_and_its_stages_name() -> None:
    with pytest.raises(WorkerFailed) as failed:
        await source(stages.Raise(), on=processes(2)).sink(Commit()).run()

    told = str(failed.value)
    assert told.partition("\n")[0].startswith("Raise ")
    assert "raised KeyError: 'prompt'" in told
    assert "in look_up\n    raise KeyError(key)" in told


async def test_a_failure_within_a_fragment_names_the_worker_and_the_stage() -> None:
    fragment = source(stages.Raise()).then(stages.Judge())

    with pytest.raises(WorkerFailed, match=r"^Raise → Judge 1/1 \(pid \d+\) failed: Raise raised KeyError: 'prompt'"):
        await source(fragment, on=processes(1)).sink(Commit()).run()


async def test_statistics_say_that_a_worker_has_not_started_yet() -> None:
    pipeline = source(stages.Sample(2), on=processes(1)).sink(Commit())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        while not pipeline.statistics().stages:
            await checkpoint()
        assert pipeline.statistics().stages[0].waiting_for in {"", "start of Sample 1/1"}
        assert pipeline.statistics().stages[0].workers[0].state == "starting"

    assert pipeline.report is not None
    assert pipeline.report.statistics.stages[0].workers[0].state == "finished"


async def test_statistics_say_how_long_workers_have_waited_as_the_metrics_do() -> None:
    metrics = Metrics()
    judged = source(stages.Sample(100), on=processes(2)).then(stages.Judge(), on=processes(2), capacity=4)

    report = await judged.sink(Commit()).run(metrics=metrics)

    emitted = metrics.emit(1)
    for stage in report.statistics.stages:
        waited = (stage.waited_for_records_s, stage.waited_for_credit_s)
        told = tuple(emitted[f"wait_s/{stage.name}/{what}"] for what in ("records", "credit"))
        assert waited == pytest.approx(told)
        assert max(waited) > 0


async def test_a_worker_killed_from_outside_is_noticed_at_once() -> None:
    sink = Attentive()
    pipeline = source(stages.SampleForever(), on=processes(2, restarts=0)).sink(sink)
    killed: list[tuple[int, float]] = []

    async def kill() -> None:
        await sink.began.wait()
        pid = pipeline.statistics().stages[0].workers[0].pid or 0
        killed.append((pid, time.monotonic()))
        os.kill(pid, signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with pytest.raises(WorkerFailed) as failed:
            await pipeline.run()
        pid, at = killed[0]

        assert time.monotonic() - at < 1
        assert f"SampleForever 1/2 (pid {pid}) was killed by SIGKILL" in str(failed.value)


# -- stopping ------------------------------------------------------------------------------------------------------


async def test_a_sink_that_has_had_enough_stops_the_workers() -> None:
    sink = Commit(enough=5)
    pipeline = source(stages.SampleForever(), on=processes(2)).sink(sink)

    report = await pipeline.run()

    assert report.ended_by == "Commit returned"
    assert report.balance.ended["trained"] == 10
    assert set(report.balance.reasons["lost"]) == {"in flight when the run ended"}
    assert not any(is_alive(worker.pid or 0) for worker in report.statistics.stages[0].workers)


async def test_cancellation_stops_the_workers_and_says_what_was_in_flight() -> None:
    sink = Attentive()
    pipeline = source(stages.SampleForever(), on=processes(2)).sink(sink)

    async with running(pipeline, sink.began) as workers:
        pass

    assert workers
    assert not any(is_alive(pid) for pid in workers)
    assert pipeline.report is not None
    assert pipeline.report.ended_by == "cancelled"
    assert pipeline.report.balance.in_flight == 0
    assert pipeline.report.balance.balanced


async def test_a_worker_that_refuses_to_stop_is_killed_after_the_deadline() -> None:
    sink = Attentive()
    pipeline = source(stages.IgnoreSigterm(), on=processes(1, stop_within_s=0.2)).sink(sink)

    async with running(pipeline, sink.began) as workers:
        began = time.monotonic()

    assert 0.2 <= time.monotonic() - began < 2
    assert not any(is_alive(pid) for pid in workers)


async def test_frozen_workers_are_killed_after_the_deadline_wherever_they_stand() -> None:
    sink = Attentive()
    on = processes(1, stop_within_s=0.2)
    pipeline = source(stages.SampleForever(), on=on).then(stages.Judge(), on=on).sink(sink)

    async with running(pipeline, sink.began) as workers:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()

    assert 0.2 <= time.monotonic() - began < 2
    assert not any(is_alive(pid) for pid in workers)
