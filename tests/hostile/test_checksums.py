"""With checksums, a record that was changed in transit is never received."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from penstock import TrajectoryGroup
from penstock._pipeline.channels import tcp
from penstock._pipeline.channels.checksum import with_checksum
from penstock._pipeline.channels.shm import SlotWriter
from penstock.channels import RemoteSender, connect, serve
from penstock.errors import RecordCorrupted
from penstock.testing import group

KINDS = ["shm://", "tcp://127.0.0.1:0"]


@pytest.mark.parametrize("url", KINDS)
async def test_records_with_checksums_come_out_as_they_went_in(url: str) -> None:
    sent = [group(instance_id=str(number), completion_lengths=[number + 1, 3]) for number in range(40)]

    got = list[tuple[bytes, bytes]]()
    async with serve(url, TrajectoryGroup, checksum=True) as inbox, anyio.create_task_group() as tasks:

        async def send() -> None:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                for record in sent:
                    await outbox.send(record)

        tasks.start_soon(send)
        got = [(record.header(), record.tokens.tobytes()) async for record in inbox]

    assert got == [(record.header(), record.tokens.tobytes()) for record in sent]


@pytest.mark.parametrize("where", [0, 1, 64, 200, -70, -1])
async def test_a_byte_that_flips_in_a_segment_is_an_error_that_names_both_sides(where: int) -> None:
    async with (
        serve("shm://", TrajectoryGroup, checksum=True, name="the trainer") as inbox,
        connect(inbox.url, TrajectoryGroup, name="the sampler") as outbox,
    ):
        assert isinstance(outbox, RemoteSender)
        outbox.send_nowait(group())
        slots = outbox._connection.writer
        assert isinstance(slots, SlotWriter)
        slots._complete()
        [descriptor] = slots._ready
        begin = slots._segment._payload + descriptor.slot * slots._segment.slot_bytes
        length = int.from_bytes(slots._segment._bytes[descriptor.slot * 32 + 4 : descriptor.slot * 32 + 8], "little")
        written = descriptor.nbytes - -(-length // 64) * 64 + length
        slots._segment._bytes[begin + where % written] ^= 1
        outbox._connection.flush()

        with pytest.raises(RecordCorrupted, match=r"the sampler .* to the trainer that were changed .* checksum"):
            await inbox.receive()
        assert inbox.statistics().received == 0


async def test_a_frame_that_is_changed_on_its_way_is_an_error_that_names_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(contents: bytes, columns: list[Any]) -> bytes:
        right = with_checksum(contents, columns)
        return right[:-1] + bytes([right[-1] ^ 1])

    async with (
        serve("tcp://127.0.0.1:0", TrajectoryGroup, checksum=True, name="the trainer") as inbox,
        connect(inbox.url, TrajectoryGroup, name="the sampler") as outbox,
    ):
        monkeypatch.setattr(tcp, "with_checksum", changed)
        await outbox.send(group())

        with pytest.raises(RecordCorrupted, match=r"the sampler .* to the trainer that were changed .* checksum"):
            await inbox.receive()
