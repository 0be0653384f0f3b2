"""Stages in processes that die, are killed by real signals, or are stopped."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs
from tests.moments import moment
from tests.processes import worker_stages as stages
from tests.processes.script_of_a_stopped_run import Pack, Trainer
from tests.processes.worker_sinks import Attentive, Commit

from penstock import Pipeline, SinkTrainer, processes, source
from penstock.accounting import StageStatistics
from penstock.errors import WorkerFailed


@asynccontextmanager
async def running(pipeline: Pipeline, began: anyio.Event) -> AsyncIterator[list[int]]:
    """Run the pipeline within the body, and yield the workers' process ids; then cancel it."""
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


# -- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGSEGV, marks=pytest.mark.long)]
)
async def test_a_worker_that_dies_is_restarted_and_what_it_had_not_sent_is_not_counted(number: int) -> None:
    sink = Commit()

    with capture_logs() as log:
        report = await source(stages.SampleAndDie(20, signal=number), on=processes(2)).sink(sink).run()

    name = signal.Signals(number).name
    doomed = [received for received in sink.received if received.startswith("doomed")]
    (how,) = [entry["how"] for entry in log if entry["event"] == "worker_died"]
    assert how.startswith("SampleAndDie 1/2 (pid ")
    assert how.endswith(f"was killed by {name}")
    assert doomed == ["doomed 0.0", "doomed 1.0", "doomed 2.0"]  # published before it died, so not lost
    assert len(sink.received) == 20 + 3
    assert report.balance.admitted == report.balance.ended["trained"] == 2 * len(sink.received)
    assert [worker.restarts for worker in report.statistics.stages[0].workers] == [1, 0]


async def test_a_worker_that_dies_too_often_ends_the_run() -> None:
    pipeline = source(stages.SampleAndDie(20, lives=9), on=processes(1, restarts=1)).sink(Commit())

    with pytest.raises(
        WorkerFailed,
        match=r"SampleAndDie 1/1, restart 1 \(pid \d+\) was killed by SIGKILL; it may be restarted 1 times within",
    ):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    assert pipeline.report.balance.in_flight == 0


async def test_a_death_that_ends_the_run_costs_no_step_that_was_trained(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    source_of_steps = source(stages.SampleStepsAndDie(steps=3), on=processes(1, restarts=0))
    pipeline = source_of_steps.then(Pack()).sink(SinkTrainer(trainer, checkpoint_every=100))

    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        await pipeline.run(folder=tmp_path)

    assert pipeline.report is not None
    assert "was killed by SIGKILL" in pipeline.report.stop_reason
    assert pipeline.report.checkpoint == str(tmp_path / "checkpoints" / "step-00000003")
    assert pipeline.report.balance.ended["trained"] == 12


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
        await source(stages.Raise(), on=processes(1)).sink(Commit()).run()

    message = str(failed.value)
    assert message.partition("\n")[0].startswith("Raise ")
    assert "raised KeyError: 'prompt'" in message
    assert "in look_up\n    raise KeyError(key)" in message


async def test_a_failure_within_a_fragment_names_the_worker_and_the_stage() -> None:
    fragment = source(stages.Raise()).then(stages.Judge())

    with pytest.raises(WorkerFailed, match=r"^Raise → Judge 1/1 \(pid \d+\) failed: Raise raised KeyError: 'prompt'"):
        await source(fragment, on=processes(1)).sink(Commit()).run()


async def test_a_worker_killed_from_outside_is_noticed_by_its_end_and_not_by_its_silence() -> None:
    sink = Attentive()
    pipeline = source(stages.SampleForever(), on=processes(1, restarts=0)).sink(sink)
    killed: list[int] = []

    async def kill() -> None:
        await sink.began.wait()
        pid = pipeline.statistics().stages[0].workers[0].pid or 0
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with pytest.raises(WorkerFailed) as failed:
            await pipeline.run()

        assert f"SampleForever 1/1 (pid {killed[0]}) was killed by SIGKILL" in str(failed.value)


# -- starting ------------------------------------------------------------------------------------------------------


async def test_a_worker_that_hangs_while_it_starts_is_replaced_and_then_fails_the_run_by_name() -> None:
    on = processes(1, start_timeout_s=0.2)
    pipeline = source(stages.HangWhenUnpickled(), on=on).sink(Commit())

    with pytest.raises(WorkerFailed) as failed:
        await pipeline.run()

    assert re.match(
        r"HangWhenUnpickled 1/1, restart 1 \(pid \d+\) did not start within start_timeout_s=0\.2, it was .+; "
        r"it was killed; it may be restarted 1 times within an hour",
        str(failed.value),
    )
    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    assert not is_alive(pipeline.report.statistics.stages[0].workers[0].pid or 0)


async def test_a_worker_of_a_middle_stage_that_hangs_while_it_starts_ends_the_run_likewise() -> None:
    relay = stages.RelayThatHangsWhenUnpickled()
    on = processes(1, restarts=0, start_timeout_s=0.2)
    pipeline = source(stages.SampleForever()).then(relay, on=on).sink(Commit())

    with pytest.raises(WorkerFailed, match=r"RelayThatHangsWhenUnpickled 1/1 .* did not start within"):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced


async def test_statistics_contain_the_state_of_a_worker_that_has_not_started() -> None:
    pipeline = source(stages.HangWhenUnpickled(), on=processes(1)).sink(Commit())

    taken: list[StageStatistics] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        while not pipeline.statistics().stages or not starting_of(pipeline).startswith("unpickling"):
            await moment()
        taken.append(pipeline.statistics().stages[0])
        tasks.cancel_scope.cancel()

    (stage,) = taken
    assert stage.waiting_for == "start of HangWhenUnpickled 1/1"
    assert stage.workers[0].starting == "unpickling HangWhenUnpickled and importing what it needs"


def starting_of(pipeline: Pipeline) -> str:
    return "".join(worker.starting for worker in pipeline.statistics().stages[0].workers)


# -- stopping ------------------------------------------------------------------------------------------------------


async def test_a_sink_that_has_had_enough_stops_the_workers() -> None:
    sink = Commit(enough=5)
    pipeline = source(stages.SampleForever(), on=processes(2)).sink(sink)

    report = await pipeline.run()

    assert report.stop_reason == "Commit returned"
    assert report.balance.ended["trained"] == 10
    assert set(report.balance.reasons["unfinished"]) <= {"in flight when the run ended"}  # what has arrived
    assert report.balance.ended["lost"] == 0
    assert not any(is_alive(worker.pid or 0) for worker in report.statistics.stages[0].workers)


async def test_cancellation_stops_the_workers_and_reports_trajectories_in_flight() -> None:
    sink = Attentive()
    pipeline = source(stages.SampleForever(), on=processes(2)).sink(sink)

    async with running(pipeline, sink.began) as workers:
        pass

    assert workers
    assert not any(is_alive(pid) for pid in workers)
    assert pipeline.report is not None
    assert pipeline.report.stop_reason == "cancelled"
    assert pipeline.report.balance.in_flight == 0
    assert pipeline.report.balance.balanced


async def test_a_worker_that_refuses_to_stop_is_killed_after_the_deadline() -> None:
    sink = Attentive()
    pipeline = source(stages.IgnoreSigterm(), on=processes(1, stop_timeout_s=0.2)).sink(sink)

    async with running(pipeline, sink.began) as workers:
        began = time.monotonic()

    assert time.monotonic() - began >= 0.2
    assert not any(is_alive(pid) for pid in workers)


async def test_frozen_workers_are_killed_after_the_deadline_wherever_they_stand() -> None:
    sink = Attentive()
    on = processes(1, stop_timeout_s=0.2)
    pipeline = source(stages.SampleForever(), on=on).then(stages.Judge(), on=on).sink(sink)

    async with running(pipeline, sink.began) as workers:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()

    assert time.monotonic() - began >= 0.2
    assert not any(is_alive(pid) for pid in workers)
