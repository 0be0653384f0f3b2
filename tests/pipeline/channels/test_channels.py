import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
import zmq.utils.garbage
from tests.failsafe import FAILSAFE_S

from penstock import ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup
from penstock._pipeline.channels.peers import Peers
from penstock.channels import ChannelKey, RemoteReceiver, RemoteSender, connect, memory_channel, serve
from penstock.errors import ChannelFull, InvalidRecord, PeerLost
from penstock.testing import CHANNEL_RULES, MakeChannel, group


@dataclass
class MemoryEnds:
    inbox: ReceiveChannel[TrajectoryGroup]
    waiting: list[SendChannel[TrajectoryGroup]] = field(default_factory=list)

    @asynccontextmanager
    async def join(self) -> AsyncIterator[SendChannel[TrajectoryGroup]]:
        async with self.waiting.pop(0) as outbox:
            yield outbox

    async def lose(self, outbox: SendChannel[TrajectoryGroup]) -> bool:
        del outbox
        return False


@dataclass
class RemoteEnds:
    inbox: ReceiveChannel[TrajectoryGroup]
    url: str
    key: ChannelKey | None
    joined: int = 0

    def join(self) -> AbstractAsyncContextManager[SendChannel[TrajectoryGroup]]:
        self.joined += 1
        return connect(self.url, TrajectoryGroup, name=f"member {self.joined}", key=self.key)

    async def lose(self, outbox: SendChannel[TrajectoryGroup]) -> bool:
        """Close all its sockets, as the kernel does for a killed process, without Close.

        A thread of ZeroMQ closes them, later than the kernel would: what the sender does next waits for it.
        """
        assert isinstance(outbox, RemoteSender)
        connected = self.inbox.statistics().senders
        self.joined -= 1
        outbox._closed = True
        await outbox._connection._release()
        while self.inbox.statistics().senders == connected:
            await anyio.lowlevel.checkpoint()
        return True


@asynccontextmanager
async def memory(
    *, capacity: int = 8, capacity_bytes: int = 2**20, senders: int | None = 1
) -> AsyncIterator[MemoryEnds]:
    outbox, inbox = memory_channel[TrajectoryGroup](capacity, capacity_bytes)
    async with outbox, inbox:
        ends = MemoryEnds(inbox, [outbox.clone() for _ in range(senders or 2)])
        await outbox.aclose()
        yield ends


def remote(url: str, key: ChannelKey | None = None) -> MakeChannel:
    @asynccontextmanager
    async def make(
        *, capacity: int = 8, capacity_bytes: int = 2**20, senders: int | None = 1
    ) -> AsyncIterator[RemoteEnds]:
        async with serve(
            url, TrajectoryGroup, capacity=capacity, capacity_bytes=capacity_bytes, senders=senders, key=key
        ) as inbox:
            yield RemoteEnds(inbox, inbox.url, key)

    return make


TRANSPORTS: dict[str, MakeChannel] = {
    "memory": memory,
    "shm": remote("shm://"),
    "tcp": remote("tcp://127.0.0.1:0"),
    "tcp with a key": remote("tcp://127.0.0.1:0", ChannelKey(bytes(range(32)))),
}


@pytest.mark.parametrize("rule", CHANNEL_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_keeps_every_rule(transport: str, rule: Callable[[MakeChannel], Awaitable[None]]) -> None:
    with anyio.fail_after(FAILSAFE_S):
        await rule(TRANSPORTS[transport])


REMOTE = {name: make for name, make in TRANSPORTS.items() if name != "memory"}


@pytest.mark.parametrize("transport", REMOTE)
async def test_a_dtype_may_go_by_another_name(transport: str) -> None:
    """On 64-bit Linux `longlong` equals int64, and is another type to whatever copies it."""
    usual = group(completion_lengths=[700, 700])
    versions = np.arange(len(usual.tokens)).astype(np.longlong)
    odd = msgspec.structs.replace(usual, policy_versions=versions)

    async with REMOTE[transport]() as ends, ends.join() as outbox:
        for each in usual, odd, usual, odd:
            outbox.send_nowait(each)
        received = [await ends.inbox.receive() for _ in range(4)]

    assert [each.policy_versions.tolist() for each in received[1::2]] == [versions.tolist()] * 2
    assert received[0].policy_versions.tolist() == received[2].policy_versions.tolist() == [0, 0]


async def test_a_large_record_over_tcp_starts_no_thread_under_the_event_loop() -> None:
    """pyzmq frees what it sends without a copy in a thread, which the first such frame of a process starts."""
    zmq.utils.garbage.gc.stop()
    large = group(completion_lengths=[30_000])

    async with REMOTE["tcp"]() as ends, ends.join() as outbox:
        threads = set(threading.enumerate())
        outbox.send_nowait(large)
        received = await ends.inbox.receive()

        assert set(threading.enumerate()) <= threads
        assert received.tokens.tobytes() == large.tokens.tobytes()


@pytest.mark.parametrize("transport", REMOTE)
async def test_credit_goes_back_by_halves_or_when_none_is_left(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender with credit is not woken for more; a sender without credit gets all that is released."""
    granted = releases(monkeypatch)
    async with REMOTE[transport](capacity=4) as ends, ends.join() as outbox:
        for unasked in [], [2], [2], [2, 2]:
            await outbox.send(group())
            await ends.inbox.receive()
            await anyio.wait_all_tasks_blocked()
            assert granted == unasked

        for _ in range(4):
            await outbox.send(group())
        await ends.inbox.receive()
        with anyio.fail_after(FAILSAFE_S):
            await outbox.send(group())
        assert granted == [2, 2, 1]


@pytest.mark.parametrize("transport", REMOTE)
async def test_bytes_go_back_when_they_are_wanted(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver counts the records of its senders and not their bytes, so a sender requests credit."""
    granted = releases(monkeypatch)
    large = group(completion_lengths=[1000])
    async with REMOTE[transport](capacity=8, capacity_bytes=2 * large.nbytes + 8192) as ends, ends.join() as outbox:
        await outbox.send(large)
        await outbox.send(large)
        await ends.inbox.receive()
        await anyio.wait_all_tasks_blocked()
        assert granted == []

        with anyio.fail_after(FAILSAFE_S):
            await outbox.send(large)
        assert granted == [1]


@pytest.mark.parametrize("transport", REMOTE)
async def test_statistics_request_withheld_credit(transport: str) -> None:
    async with REMOTE[transport](capacity=8) as ends, ends.join() as outbox:
        await outbox.send(group())
        await ends.inbox.receive()

        with anyio.fail_after(FAILSAFE_S):
            while outbox.statistics().items:
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("transport", REMOTE)
async def test_statistics_after_close_send_no_message(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would reject a message after Close."""
    sent: list[str] = []

    async with REMOTE[transport]() as ends, ends.join() as outbox:
        assert isinstance(outbox, RemoteSender)
        await outbox.send(group())
        connection = outbox._connection
        send = connection.send

        def recording(message: Any) -> None:
            sent.append(type(message).__name__)
            send(message)

        monkeypatch.setattr(connection, "send", recording)
        outbox.send_close()
        assert outbox.statistics().items == 1
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()

    assert sent == ["Close"]


def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of records in each later CreditGrant is appended."""
    granted: list[int] = []
    send = Peers.send

    def recording(self: Peers, identity: bytes, message: Any) -> bool:
        if type(message).__name__ == "CreditGrant":
            granted.append(sum(records for _, _, records in message.spans))
        return send(self, identity, message)

    monkeypatch.setattr(Peers, "send", recording)
    return granted


@pytest.mark.parametrize("transport", REMOTE)
async def test_columns_need_not_lie_as_they_travel(transport: str) -> None:
    """A stage may build its columns as it likes: strided, of an alias of the dtype, or with one axis more."""
    plain = group(completion_lengths=[3, 4])
    every_other = np.repeat(plain.tokens, 2)[::2]
    odd = msgspec.structs.replace(plain, tokens=every_other, rollout_ids=plain.rollout_ids.astype(np.longlong))
    teacher = np.arange(2 * len(plain.tokens)).reshape(-1, 2)
    odd = msgspec.structs.replace(
        odd, teacher_ids=teacher.astype(np.int32)[:, ::-1], teacher_logprobs=-teacher.astype(np.float32)
    )

    async with REMOTE[transport]() as ends, ends.join() as outbox:
        outbox.send_nowait(odd)
        received = await ends.inbox.receive()

        assert {n: c.tolist() for n, c in received.columns().items()} == {
            n: c.tolist() for n, c in odd.columns().items()
        }


@pytest.mark.parametrize("transport", REMOTE)
async def test_columns_may_begin_at_any_address(transport: str) -> None:
    """A view into foreign bytes may begin anywhere; the record before was aligned."""
    usual = group(completion_lengths=[700, 700])
    raw = np.zeros(usual.tokens.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.int32)
    shifted[:] = usual.tokens[::-1]
    odd = msgspec.structs.replace(usual, tokens=shifted)

    async with REMOTE[transport]() as ends, ends.join() as outbox:
        for each in usual, odd, usual:
            outbox.send_nowait(each)
        received = [await ends.inbox.receive() for _ in range(3)]

        assert [each.tokens.tolist() for each in received] == [
            usual.tokens.tolist(),
            shifted.tolist(),
            usual.tokens.tolist(),
        ]


@pytest.mark.parametrize(
    "change", [lambda column: column.resize(3, refcheck=False), lambda column: column.resize((3, 4), refcheck=False)]
)
@pytest.mark.parametrize("ends", ["with the tick", "with a record of another form"])
async def test_a_record_that_is_changed_before_it_was_copied_ends_the_connection(
    change: Callable[[np.ndarray[Any, Any]], None], ends: str
) -> None:
    """Its sender has not yielded since: both ends raise, and the changed record is never received or waited for."""
    usual = group(completion_lengths=[700, 700])
    column = np.array(usual.tokens)
    changed = msgspec.structs.replace(usual, tokens=column)

    async def send() -> None:
        async with connect(inbox.url, TrajectoryGroup) as outbox:
            outbox.send_nowait(usual)
            outbox.send_nowait(changed)
            change(column)
            if ends == "with the tick":
                await anyio.lowlevel.checkpoint()
            with pytest.raises(InvalidRecord, match="leave a record alone until the task that sent it has yielded"):
                outbox.send_nowait(usual.with_rewards(usual.rewards, parts={"score": usual.rewards}))

    async with serve("shm://", TrajectoryGroup) as inbox:
        with pytest.raises(
            InvalidRecord, match="expected the 2 records up to number 2 to be as they were when they were sent"
        ):
            await send()
        with pytest.raises(PeerLost, match="after record 0"):
            await inbox.receive()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": np.zeros(2)}, "rewards: expected dtype float32, got float64"),
        ({"tokens": np.zeros(3, np.int32)}, r"loss_mask: expected shape \[N=3\]"),
        ({"tokens": [1, 2, 3]}, "tokens: expected a numpy array of int32, got list"),
        ({"rewards": None}, "rewards: expected a column of float32, got none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("transport", REMOTE)
async def test_a_record_that_breaks_its_schema_is_refused_where_it_is_sent(
    transport: str, changed: dict[str, Any], message: str
) -> None:
    """Its sender raises and continues; the receiver never gets it, and no credit is lost."""
    good = group(completion_lengths=[3, 4])
    bad = msgspec.structs.replace(good, **changed)

    async with REMOTE[transport](capacity=1) as ends, ends.join() as outbox:
        for _ in range(3):
            with pytest.raises(InvalidRecord, match=message):
                await outbox.send(bad)
        outbox.send_nowait(good)

        assert (await ends.inbox.receive()).rewards.tolist() == good.rewards.tolist()
        assert outbox.statistics().sent == 1


async def test_a_record_that_is_held_holds_its_own_credit_only() -> None:
    async with serve("shm://", TrajectoryGroup, capacity=16) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        for number in range(16):
            outbox.send_nowait(group(instance_id=str(number)))
        received = [await inbox.receive() for _ in range(16)]

        del received[1:16:2]  # the other half of each bundle is still read
        await anyio.lowlevel.checkpoint()
        for number in range(16, 24):
            await outbox.send(group(instance_id=str(number)))
        with pytest.raises(ChannelFull):
            outbox.send_nowait(group())

        received += [await inbox.receive() for _ in range(8)]
    assert [record.instance_id for record in received] == [str(n) for n in [*range(0, 16, 2), *range(16, 24)]]


async def test_records_that_are_sent_in_one_tick_share_a_span_while_they_are_alike() -> None:
    plain = group(completion_lengths=[1, 2])
    scored = plain.with_rewards(plain.rewards, parts={"score": plain.rewards})
    async with serve("shm://", TrajectoryGroup, capacity=16) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        assert isinstance(inbox, RemoteReceiver)
        for record in [plain] * 5 + [scored] * 2:
            outbox.send_nowait(record)
        await outbox.send(plain)

        while inbox.statistics().sent < 8:
            await anyio.lowlevel.checkpoint()

        assert [parcel[0].records for _, parcel in inbox.peers.arrivals.events if isinstance(parcel, tuple)] == [
            4,
            1,
            2,
            1,
        ]
        assert [len((await inbox.receive()).reward_parts) for _ in range(8)] == [0] * 5 + [1] * 2 + [0]


@pytest.mark.parametrize("transport", REMOTE)
async def test_groups_that_are_received_make_the_same_batches_as_those_that_were_sent(transport: str) -> None:
    plain = group(completion_lengths=[2, 3])
    few, more = np.zeros((len(plain.tokens), 2), np.float32), np.zeros((len(plain.tokens), 3), np.float32)
    batches = [
        [group(completion_lengths=[n % 5, 3], instance_id=str(n), meta={"n": n}) for n in range(16)],
        [plain.with_rewards(plain.rewards, parts={"score": plain.rewards})] * 2,
        [msgspec.structs.replace(plain, teacher_ids=few.astype(np.int32), teacher_logprobs=few)],
        [msgspec.structs.replace(plain, teacher_ids=more.astype(np.int32), teacher_logprobs=more)],
    ]

    async with REMOTE[transport](capacity=64) as ends, ends.join() as outbox:
        for record in chain(*batches):
            outbox.send_nowait(record)
        got = [TrainBatch.pack([await ends.inbox.receive() for _ in sent]) for sent in batches]

    for batch, sent in zip(got, map(TrainBatch.pack, batches), strict=True):
        assert batch.groups == sent.groups
        assert (batch.loss_tokens, batch.loss_rollouts) == (sent.loss_tokens, sent.loss_rollouts)
        assert {n: (c.dtype, c.tolist()) for n, c in batch.columns().items()} == {
            n: (c.dtype, c.tolist()) for n, c in sent.columns().items()
        }
