"""Any frames that a peer sends over tcp are a record, or end its connection; no other error is raised."""

from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests import wire
from tests.failsafe import FAILSAFE_S
from tests.moments import moment

from penstock import TrainBatch, TrajectoryGroup
from penstock._pipeline.channels.tcp import FrameReader
from penstock._schemas.descriptor import Descriptor
from penstock._schemas.group import GROUP_SCHEMA
from penstock._schemas.layout import BundleEntry, BundleHeader, aligned, encode_contents
from penstock.channels import RemoteSender, connect, serve
from penstock.errors import InvalidRecord, PeerLost, StaleDescriptor
from penstock.testing import group

OPTIONAL: dict[str, Any] = {
    "teacher_ids": [[1, 2]] * 8,
    "teacher_logprobs": [[0.0, 0.0]] * 8,
    "routed_experts": [[[1, 2], [3, 400]]] * 8,
    "reward_parts": {"score": [1.0, 2.0]},
}


def record(instance_id: str = "0") -> TrajectoryGroup:
    return group(completion_lengths=[3, 1], instance_id=instance_id, **OPTIONAL)


def frames_of(record: TrajectoryGroup, **changed: Any) -> list[bytes]:
    """Return the frames of `record`, with other columns, `parts`, `candidates`, `form` and `kind` where `changed`."""
    columns = record.columns()
    form, lengths = GROUP_SCHEMA.measure(columns)
    header = {name: changed.pop(name) for name in ("parts", "candidates", "form", "kind") if name in changed}
    contents = BundleHeader.alone("group", form, lengths, record.header())._replace(**header)
    buffers = [np.ascontiguousarray(column).tobytes() for column in (columns | changed).values()]
    return [encode_contents(contents), b"".join(buffer.ljust(aligned(len(buffer)), b"\0") for buffer in buffers)]


def read(frames: list[bytes], records: int = 1) -> None:
    """Read the frames in each way that a receiver does; assert that the result, if any, is a valid record."""
    descriptor = Descriptor(records, records, 1, 0, 0, 4096)
    bundle = (descriptor, [zmq.Frame(frame) for frame in frames])
    with suppress(InvalidRecord, StaleDescriptor):
        seen = TrajectoryGroup.assemble(*FrameReader(GROUP_SCHEMA).fetch(bundle, 0, lambda *_: None))
        assert int(seen.lengths().sum()) == len(seen.tokens) == len(seen.loss_mask)
        assert len(seen.owned().completion_lengths()) == len(seen) == len(seen.rewards)
        packed = TrainBatch.pack([seen])
        assert len(packed.ids) == len(packed) == len(packed.rewards)


@given(st.data())
def test_frames_with_any_bytes_changed_are_an_error_or_a_record(data: st.DataObject) -> None:
    frames = frames_of(record())
    index = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[index]) - 1))
    changed = data.draw(st.binary(min_size=1, max_size=8))
    frames[index] = frames[index][:at] + changed + frames[index][at + len(changed) :]
    read(frames)


@given(st.lists(st.binary(max_size=40), max_size=4), st.lists(st.integers(0, 11), max_size=14), st.integers(-1, 3))
def test_frames_in_any_number_and_order_are_an_error_or_a_record(
    others: list[bytes], order: list[int], records: int
) -> None:
    true = frames_of(record())
    read([true[0], *[[*true, *others][place] for place in order if place < len(true) + len(others)]], records)
    read([*others, *true], records)


TRUE = BundleHeader.decode(frames_of(record())[0])
[PART] = TRUE.parts
TAUGHT = msgspec.msgpack.encode([*msgspec.msgpack.decode(TRUE.form)[:-4], ("teacher_ids", "<i4", "NK")])

HOLLOW = TrajectoryGroup.build(
    env="e", instance_id="0", sequences=[[]], loss_mask=[[]], rewards=[0.0], behavior_logprobs=[[]]
)
NO_SEQUENCES = {name: column[:0] for name, column in record().columns().items()} | {"offsets": np.zeros(1, np.int64)}

FORGED: dict[str, tuple[list[bytes], str]] = {
    "no frames": ([], "to be one record and come with its columns, got none"),
    "two records": (frames_of(record(), parts=(PART, PART)), "expected one record a message, got 2"),
    "no record": (frames_of(record(), parts=()), "expected one record a message, got 0"),
    "a frame less": (frames_of(record())[:-1], "frames"),
    "a frame more": ([*frames_of(record()), b""], "frames"),
    "offsets out of range": (
        frames_of(record(), offsets=np.array([0, 2**40, 8])),
        "offsets: expected to run from 0 to 8",
    ),
    "lengths that overflow": (frames_of(record(), parts=(PART._replace(tokens=2**62),)), "expected .* bytes"),
    "lengths that fit no word": (frames_of(record(), parts=(PART._replace(tokens=2**63),)), "Expected `int` <= "),
    "another number of tokens": (
        frames_of(record(), parts=(PART._replace(tokens=7),)),
        "offsets: expected to run from 0 to 7",
    ),
    "more tokens than its frames hold": (
        frames_of(record(), parts=(PART._replace(tokens=80),)),
        "columns: expected frames of .* bytes for .*, got",
    ),
    "a repetition beyond any ledger": (
        frames_of(record(), rollout_ids=np.array([0, 2**40])),
        "rollout_ids: expected 0 to 65535, got 0 to 1099511627776",
    ),
    "candidates beyond any vocabulary, of no tokens": (
        frames_of(HOLLOW, form=TAUGHT, candidates=2**62),
        "candidates: expected at most 1048576 a token",
    ),
    "no sequences": (
        frames_of(record(), parts=(BundleEntry(0, 0, record().header()),), **NO_SEQUENCES),
        "rewards: expected at least one sequence, got 0",
    ),
    "another kind": (frames_of(record(), kind="batch"), "expected a group, got a batch"),
}


@pytest.mark.parametrize("forged", FORGED)
async def test_a_sender_of_forged_frames_is_disconnected_and_the_others_go_on(forged: str) -> None:
    frames, reason = FORGED[forged]
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="the forger") as outbox:
            send_frames(outbox, (1, 1, 1, 0, 0, 4096), frames)
            with pytest.raises(PeerLost, match=rf"the forger .* was disconnected: .*{reason}"):
                await inbox.receive()
        async with connect(inbox.url, TrajectoryGroup) as outbox:
            await outbox.send(record("after"))
            assert (await inbox.receive()).instance_id == "after"
        assert inbox.rejected >= 1


def send_frames(outbox: object, descriptor: tuple[int, int, int, int, int, int], frames: list[bytes]) -> None:
    """Send these frames after a message with this descriptor, over the connection of `outbox`."""
    assert isinstance(outbox, RemoteSender)
    outbox._connection._socket.send_multipart([wire.encode(wire.publish(descriptor)), *frames])


async def test_a_sender_that_promises_two_records_in_one_message_is_disconnected() -> None:
    async with (
        serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox,
        connect(inbox.url, TrajectoryGroup, name="the forger") as outbox,
    ):
        send_frames(outbox, (2, 2, 1, 0, 0, 4096), frames_of(record()))
        with pytest.raises(PeerLost, match=r"the forger .* was disconnected: .* to be one record"):
            await inbox.receive()


async def test_a_sender_that_sends_one_record_more_than_its_credit_is_disconnected() -> None:
    async with (
        serve("tcp://127.0.0.1:0", TrajectoryGroup, capacity=2) as inbox,
        connect(inbox.url, TrajectoryGroup, name="the forger") as outbox,
    ):
        for number in (1, 2, 3):
            send_frames(outbox, (number, 1, number, 0, 0, 4096), frames_of(record(str(number))))
        with anyio.fail_after(FAILSAFE_S):
            while not inbox.rejected:
                await moment()
        received = [await inbox.receive() for _ in range(3)]  # sent before the excess was noticed
        with pytest.raises(PeerLost, match="expected at most 2 records in flight, got 3"):
            await inbox.receive()
        assert len(received) == 3
