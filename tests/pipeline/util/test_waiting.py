import asyncio
import time

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked
from tests.failsafe import FAILSAFE_S

from penstock._pipeline.accounting.telemetry import WaitAggregator, report_waits
from penstock._pipeline.util.waiting import WaitClock, Waiters, happens_within
from penstock.accounting import Metrics


async def test_tasks_are_woken_in_the_order_they_came() -> None:
    waiters, woken = Waiters(), list[int]()

    async def wait(number: int) -> None:
        await waiters.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
        waiters.wake_one()
        await anyio.wait_all_tasks_blocked()
        assert woken == [0]
        waiters.wake_all()
    assert woken == [0, 1, 2]
    assert not waiters


@pytest.mark.parametrize("woken_first", [True, False])
async def test_a_wake_up_that_reaches_a_cancelled_task_is_passed_on(woken_first: bool) -> None:  # noqa: FBT001
    waiters = Waiters()
    first = asyncio.create_task(waiters.wait())
    await anyio.wait_all_tasks_blocked()
    second = asyncio.create_task(waiters.wait())
    await anyio.wait_all_tasks_blocked()

    if woken_first:
        waiters.wake_one()
        first.cancel()
    else:
        first.cancel()
        waiters.wake_one()

    with anyio.fail_after(FAILSAFE_S):
        await second
    assert first.cancelled()
    assert not waiters


def test_a_clock_counts_only_while_something_is_waited_for() -> None:
    clock = WaitClock()
    assert (clock.waiting_for, clock.waited_s) == ("", 0.0)
    with clock.waiting("credit"):
        assert clock.waiting_for == "credit"
        assert clock.waited_s >= 0
    total = clock.waited_s
    assert clock.waiting_for == ""
    assert clock.waited_s == total


async def test_a_waiter_that_is_cancelled_at_the_head_wakes_the_next() -> None:
    """Credit that is too little for the first waiter may be enough for the second, which has to be woken."""
    waiters = Waiters()
    first = asyncio.create_task(waiters.wait())
    await anyio.wait_all_tasks_blocked()
    second = asyncio.create_task(waiters.wait())
    await anyio.wait_all_tasks_blocked()

    first.cancel()

    with anyio.fail_after(FAILSAFE_S):
        await second


async def test_a_woken_task_still_stands_in_line_until_it_runs() -> None:
    waiters = Waiters()
    task = asyncio.create_task(waiters.wait())
    await anyio.wait_all_tasks_blocked()

    waiters.wake_one()

    assert waiters
    await task
    assert not waiters


def test_the_waits_of_a_stages_workers_are_summed_in_the_metrics() -> None:
    run = Metrics()
    aggregator = WaitAggregator(run, "Sample")

    for credit_s in (2.0, 0.5):
        worker = Metrics()
        worker.total("timing_s/Sample/wait_input", 0.25)
        worker.total("timing_s/Sample/wait_output", credit_s)
        worker.total("timing_s/Judge/wait_output", 100)
        aggregator.merge(worker.take())
    aggregator.merge(Metrics().take())

    assert aggregator.waited == (0.5, 2.5)
    emitted = run.emit(1)
    assert (emitted["timing_s/Sample/wait_input"], emitted["timing_s/Sample/wait_output"]) == aggregator.waited


def test_the_waits_of_a_stage_are_reported_since_the_last_step() -> None:
    metrics, waited = Metrics(), [1.0, 0.0]

    with report_waits(metrics, "Batcher", lambda: (waited[0], waited[1])):
        waited[0] = 1.5
        first = metrics.emit(1)
        waited[:] = 1.75, 0.5
        second = metrics.emit(2)
        waited[1] = 0.75
    third = metrics.emit(3)

    assert (first["timing_s/Batcher/wait_input"], first["timing_s/Batcher/wait_output"]) == (0.5, 0.0)
    assert (second["timing_s/Batcher/wait_input"], second["timing_s/Batcher/wait_output"]) == (0.25, 0.5)
    assert third["timing_s/Batcher/wait_output"] == 0.25
    assert not metrics.observers


async def test_time_in_which_the_event_loop_is_held_is_no_time_of_the_other_side() -> None:
    happened, results = anyio.Event(), list[bool]()

    async def wait() -> None:
        results.append(await happens_within(happened, 0.2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_all_tasks_blocked()
        time.sleep(0.5)  # noqa: ASYNC251 (the event loop is held)
        for _ in range(5):  # what has arrived is handled in some passes of the loop
            await anyio.lowlevel.checkpoint()
        happened.set()

    assert results == [True]


async def test_what_does_not_happen_in_time_is_not_waited_for() -> None:
    assert not await happens_within(anyio.Event(), 0.01)
