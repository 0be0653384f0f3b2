"""Installation of signal handlers, and the effect of a stop on a run; tests/processes sends real signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs
from tests.pipeline.flow_stages import Collect, Count, Forever

from penstock import Context, ReceiveChannel, SendChannel, source
from penstock._pipeline.runtime.run import Run
from penstock._pipeline.util.exception_groups import all_of
from penstock.errors import RunStopped, StageFailed

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Handlers:
    """Notes the signal handlers of the process while it runs."""

    seen: list[Any]

    async def run(self, outbox: SendChannel[int]) -> None:
        self.seen.extend(signal.getsignal(number) for number in SIGNALS)
        await outbox.send(1)


@pytest.fixture
def _handlers_as_in_a_script() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests were started by `nohup`
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_as_in_a_script")
async def test_signals_are_handled_while_a_run_is_on_and_as_before_when_it_is_over() -> None:
    before, seen = [signal.getsignal(number) for number in SIGNALS], list[Any]()

    await source(Handlers(seen)).sink(Collect()).run()

    assert not set(seen) & set(before)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.usefixtures("_handlers_as_in_a_script")
async def test_a_signal_that_the_script_handles_itself_is_left_to_it() -> None:
    def own(*_: object) -> None:
        raise NotImplementedError

    signal.signal(signal.SIGTERM, own)
    seen: list[Any] = []

    await source(Handlers(seen)).sink(Collect()).run()

    assert seen[0] is not signal.default_int_handler
    assert seen[1] is own
    assert signal.getsignal(signal.SIGTERM) is own


async def test_a_run_in_another_thread_handles_no_signals() -> None:
    seen: list[Any] = []
    pipeline = source(Handlers(seen)).sink(Collect())

    await anyio.to_thread.run_sync(lambda: anyio.run(pipeline.run))

    assert seen == [signal.getsignal(number) for number in SIGNALS]


async def test_handlers_stay_until_the_last_of_several_runs_is_over() -> None:
    before, seen, ended = signal.getsignal(signal.SIGTERM), list[Any](), anyio.Event()

    @dataclass(frozen=True)
    class Late(Handlers):
        async def run(self, outbox: SendChannel[int]) -> None:
            await ended.wait()
            await super().run(outbox)

    async def first() -> None:
        await source(Count(1)).sink(Collect()).run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source(Late(seen)).sink(Collect()).run)
        tasks.start_soon(first)

    assert seen[1] is not before
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_process_needs_time_to_stop() -> None:
    with pytest.raises(ValueError, match="stop_timeout_s: expected a positive number of seconds, got 0"):
        await source(Count(1)).sink(Collect()).run(stop_timeout_s=0)


# -- what a stop does --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """Stops the run at its third record, and receives the rest."""

    runs: list[Run]
    received: list[int]

    async def run(self, inbox: ReceiveChannel[int]) -> None:
        async for number in inbox:
            self.received.append(number)
            if len(self.received) == 3:
                self.runs[0].stop("SIGTERM")


async def test_a_stop_ends_the_sinks_stream_with_records_in_it() -> None:
    sink = Stop([], [])
    run = Run(source(Forever()).sink(sink).nodes, Context())
    sink.runs.append(run)

    await run.run()

    assert len(sink.received) == 3
    assert run.stop_reason == "stopped by SIGTERM"
    assert [stage.state for stage in run.statistics().stages] == ["cancelled", "returned"]


@dataclass(frozen=True)
class FailWhenCancelled:
    async def run(self, outbox: SendChannel[int]) -> None:
        try:
            await Forever().run(outbox)
        finally:
            raise OSError("cannot clean up")


async def test_a_stage_before_the_sink_that_fails_of_a_stop_is_a_warning() -> None:
    sink = Stop([], [])
    run = Run(source(FailWhenCancelled()).sink(sink).nodes, Context())
    sink.runs.append(run)

    with capture_logs() as logs:
        await run.run()

    assert run.stop_reason == "stopped by SIGTERM"
    assert [(each["event"], each["log_level"]) for each in logs] == [("stage_failed_while_stopping", "warning")]


@dataclass(frozen=True)
class FailAtTheEnd(Stop):
    async def run(self, inbox: ReceiveChannel[int]) -> None:
        await super().run(inbox)
        raise OSError("the disk is full")


async def test_a_sink_that_cannot_write_its_checkpoint_fails_the_run() -> None:
    sink = FailAtTheEnd([], [])
    run = Run(source(Forever()).sink(sink).nodes, Context())
    sink.runs.append(run)

    with pytest.raises(StageFailed, match="FailAtTheEnd raised OSError: the disk is full"):
        await run.run()


async def test_a_run_that_is_stopped_before_it_began_opens_nothing() -> None:
    collect = Collect()
    run = Run(source(Count(3)).sink(collect).nodes, Context())

    run.stop("SIGINT")
    await run.run()

    assert run.stop_reason == "stopped by SIGINT"
    assert collect.received == []


def test_the_exit_code_is_that_of_the_signal() -> None:
    assert [RunStopped(number).code for number in SIGNALS] == [130, 143, 129]
    assert str(RunStopped(signal.SIGTERM)) == "the run was stopped by SIGTERM"


def test_groups_of_only_stopped_runs_are_recognised() -> None:
    stopped = BaseExceptionGroup("tasks", [BaseExceptionGroup("more tasks", [RunStopped(signal.SIGINT)])])

    assert all_of(stopped, RunStopped)
    assert not all_of(BaseExceptionGroup("tasks", [stopped, ValueError("broken")]), RunStopped)
