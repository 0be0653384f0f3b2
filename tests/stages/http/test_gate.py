import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock._stages.http.gate import GenerationGate


async def settle() -> None:
    for _ in range(5):
        await checkpoint()


async def test_a_closed_gate_opens_when_no_reason_is_left() -> None:
    gate, passed = GenerationGate(), anyio.Event()

    async def come() -> None:
        await gate.opened()
        passed.set()

    await gate.close("paused")
    await gate.close("asleep")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come)
        await settle()
        gate.open("paused")
        await settle()
        assert not passed.is_set()
        gate.open("asleep")

    assert passed.is_set()


async def test_closing_waits_for_all_work_inside() -> None:
    gate, closed = GenerationGate(), anyio.Event()

    async def close_it() -> None:
        await gate.close("paused")
        closed.set()

    async with anyio.create_task_group() as tasks:
        with gate.inside():
            with gate.inside():
                tasks.start_soon(close_it)
                await settle()
            await settle()
            assert gate.closed_for == {"paused"}
            assert not closed.is_set()


async def test_a_gate_closed_twice_for_one_reason_stays_closed_when_the_first_call_is_cancelled() -> None:
    gate, first, closed_by_the_second = GenerationGate(), anyio.CancelScope(), set[str]()

    async def give_up() -> None:
        with first:
            await gate.close("paused")

    async with anyio.create_task_group() as tasks:
        with gate.inside():
            tasks.start_soon(give_up)
            await settle()
            tasks.start_soon(gate.close, "paused")
            await settle()
            first.cancel()
            await settle()
            closed_by_the_second |= gate.closed_for

    assert closed_by_the_second == gate.closed_for == {"paused"}


@pytest.mark.parametrize("closed_before", [False, True])
async def test_a_cancelled_close_leaves_the_gate_as_it_was(closed_before: bool) -> None:  # noqa: FBT001
    gate = GenerationGate()
    if closed_before:
        await gate.close("paused")

    with gate.inside(), anyio.move_on_after(0) as given_up:
        await gate.close("paused")

    assert given_up.cancelled_caught
    assert bool(gate.closed_for) == closed_before
