import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock.stages.engines.gate import Gate


async def settle() -> None:
    for _ in range(5):
        await checkpoint()


async def test_whoever_comes_to_a_shut_gate_waits_until_no_reason_is_left() -> None:
    gate, passed = Gate(), anyio.Event()

    async def come() -> None:
        await gate.opened()
        passed.set()

    await gate.shut("paused")
    await gate.shut("asleep")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come)
        await settle()
        gate.open("paused")
        await settle()
        assert not passed.is_set()
        gate.open("asleep")

    assert passed.is_set()


async def test_shutting_waits_for_everybody_inside() -> None:
    gate, shut = Gate(), anyio.Event()

    async def shut_it() -> None:
        await gate.shut("paused")
        shut.set()

    async with anyio.create_task_group() as tasks:
        with gate.inside():
            with gate.inside():
                tasks.start_soon(shut_it)
                await settle()
            await settle()
            assert gate.shut_for == {"paused"}
            assert not shut.is_set()


async def test_a_gate_that_two_shut_for_one_reason_stays_shut_when_the_first_gives_up() -> None:
    gate, first, shut_by_the_second = Gate(), anyio.CancelScope(), set[str]()

    async def give_up() -> None:
        with first:
            await gate.shut("paused")

    async with anyio.create_task_group() as tasks:
        with gate.inside():
            tasks.start_soon(give_up)
            await settle()
            tasks.start_soon(gate.shut, "paused")
            await settle()
            first.cancel()
            await settle()
            shut_by_the_second |= gate.shut_for

    assert shut_by_the_second == gate.shut_for == {"paused"}


@pytest.mark.parametrize("shut_before", [False, True])
async def test_a_shutting_that_was_given_up_leaves_the_gate_as_it_was(shut_before: bool) -> None:  # noqa: FBT001
    gate = Gate()
    if shut_before:
        await gate.shut("paused")

    with gate.inside(), anyio.move_on_after(0) as given_up:
        await gate.shut("paused")

    assert given_up.cancelled_caught
    assert bool(gate.shut_for) == shut_before
