import asyncio

import anyio
import pytest
from tests.failsafe import FAILSAFE_S

from penstock.pipeline.waiting import WaitClock, Waiters


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


async def test_whoever_cancels_at_the_head_lets_the_next_have_a_look() -> None:
    """What was too little for the first may do for the second, which nobody else would wake."""
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
