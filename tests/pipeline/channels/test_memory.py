"""Rules of the memory transport beyond those of all channels."""

import gc
from typing import NamedTuple

import anyio
import pytest

from penstock.channels import memory_channel


async def test_the_record_itself_is_handed_over() -> None:
    outbox, inbox = memory_channel[object](1)
    async with outbox, inbox:
        record = object()
        await outbox.send(record)
        assert await inbox.receive() is record


@pytest.mark.parametrize(("capacity", "capacity_bytes"), [(0, None), (1, 0), (-1, 10)])
def test_a_channel_without_room_is_refused(capacity: int, capacity_bytes: int | None) -> None:
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        memory_channel(capacity, capacity_bytes)


async def test_clones_of_the_receiver_share_the_records() -> None:
    outbox, inbox = memory_channel[int](10)
    async with outbox, inbox, inbox.clone() as other:
        for number in range(4):
            outbox.send_nowait(number)
        await outbox.aclose()
        got = [await inbox.receive(), await other.receive(), await inbox.receive(), await other.receive()]
        assert got == [0, 1, 2, 3]
        with pytest.raises(anyio.EndOfStream):
            await other.receive()


@pytest.mark.parametrize("capacity_bytes", [None, 1000])
async def test_waiting_bytes_are_reported_with_and_without_a_bound(capacity_bytes: int | None) -> None:
    outbox, inbox = memory_channel[bytearray | memoryview](10, capacity_bytes)
    async with outbox, inbox:
        for record in (memoryview(bytes(30)), memoryview(bytes(12)), bytearray(5)):  # the last one has no nbytes
            outbox.send_nowait(record)
        assert outbox.statistics().nbytes == 42
        inbox.receive_nowait()
        assert inbox.statistics().nbytes == 12


async def test_a_large_record_keeps_its_place_in_line() -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    order: list[int] = []
    outbox, inbox = memory_channel[Sized](10, capacity_bytes=10)
    async with outbox, inbox:
        for _ in range(10):
            outbox.send_nowait(Sized(1))

        async def send(nbytes: int) -> None:
            await outbox.send(Sized(nbytes))
            order.append(nbytes)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 8)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(send, 2)
            for _ in range(10):
                await anyio.wait_all_tasks_blocked()
                await inbox.receive()
    assert order == [8, 2]


async def test_a_forgotten_end_warns() -> None:
    outbox, inbox = memory_channel[int](1)
    inbox.close()
    with pytest.warns(ResourceWarning, match="unclosed <MemorySender open"):  # noqa: PT031 (the end goes, then counts)
        del outbox
        gc.collect()


async def test_a_busy_sender_lets_others_run() -> None:
    outbox, inbox = memory_channel[int](1000)
    ran: list[int] = []

    async def other() -> None:
        ran.append(len(ran))

    async with outbox, inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for number in range(100):
            await outbox.send(number)
        assert ran


async def test_small_records_do_not_overtake_a_large_one_that_waits() -> None:
    class Sized(NamedTuple):
        name: str
        nbytes: int

    sizes = {"large": 8, **{f"small {n}": 3 for n in range(20)}}
    outbox, inbox = memory_channel[Sized](100, 10)
    got: list[str] = []
    async with outbox, inbox, anyio.create_task_group() as tasks:
        for _ in range(2):
            outbox.send_nowait(Sized("first", 5))
        for name, nbytes in sizes.items():
            tasks.start_soon(outbox.send, Sized(name, nbytes))
            await anyio.wait_all_tasks_blocked()

        got += [(await inbox.receive()).name for _ in range(len(sizes) + 2)]

    assert got[:3] == ["first", "first", "large"]
    assert sorted(got[2:]) == sorted(sizes)
