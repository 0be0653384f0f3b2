"""The conformance suite of channels: one rule a function, run against memory, shm and tcp alike.

Public as `penstock.testing.check_channel` and `CHANNEL_RULES`. A transport takes part by a function that opens a
channel of `TrajectoryGroup` for a number of senders and yields its `Ends`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from ..._schemas import GroupId, StopReason, TrajectoryGroup
from ..channels.channel import ReceiveChannel, SendChannel
from ..errors import ChannelFull, PeerClosed, PeerLost, RecordTooLarge
from .drive import group

T = TypeVar("T")

RULE_TIMEOUT_S = 20.0
"""The time limit of a rule; one that takes longer hangs."""


class Ends(Protocol):
    """The two sides of one channel."""

    @property
    def inbox(self) -> ReceiveChannel[TrajectoryGroup]:
        """Return the receiving end."""
        ...

    def join(self) -> AbstractAsyncContextManager[SendChannel[TrajectoryGroup]]:
        """Open the next of the announced senders."""
        ...

    async def lose(self, outbox: SendChannel[TrajectoryGroup]) -> bool:
        """End a sender as the death of its process would; the next that joins is the same one, restarted.

        Returns:
            True where that is possible: not where both ends live in one process.
        """
        ...


class MakeChannel(Protocol):
    """Opens a channel for `senders` senders, counted by name unless None, with these bounds for each of them."""

    def __call__(
        self, *, capacity: int = 8, capacity_bytes: int = 2**20, senders: int | None = 1
    ) -> AbstractAsyncContextManager[Ends]:
        """Open the channel, within the `async with`."""
        ...


async def check_channel(make: MakeChannel) -> None:
    """Check a channel against every rule, one after another.

    Raises:
        AssertionError: it broke one.
        TimeoutError: it hangs.
    """
    for rule in CHANNEL_RULES:
        with anyio.fail_after(RULE_TIMEOUT_S):
            await rule(make)


# -- the rules -----------------------------------------------------------------------------------------------------


async def records_arrive_once_in_the_order_of_their_sender(make: MakeChannel) -> None:
    """Check the order."""
    records, got = _records(50), list[TrajectoryGroup]()
    async with make(capacity=4) as ends, anyio.create_task_group() as tasks:
        tasks.start_soon(_send_all, ends, records)
        got = [record.owned() async for record in ends.inbox]
    _same_all(got, records)


async def no_more_records_are_in_flight_than_the_capacity(make: MakeChannel) -> None:
    """Check the bound in items."""
    async with make(capacity=3) as ends, ends.join() as outbox:
        for record in _records(3):
            outbox.send_nowait(record)
        await _raises(ChannelFull, _sent_nowait(outbox, group(instance_id="3")))
        assert outbox.statistics().items == 3
        assert (await ends.inbox.receive()).instance_id == "0"
        await outbox.send(group(instance_id="3"))
        assert [(await ends.inbox.receive()).instance_id for _ in range(3)] == ["1", "2", "3"]


async def no_more_bytes_are_in_flight_than_the_capacity(make: MakeChannel) -> None:
    """Check the bound in bytes."""
    large = [group(completion_lengths=[2000], instance_id=str(n)) for n in range(3)]
    async with make(capacity=100, capacity_bytes=large[0].nbytes * 5 // 2) as ends, ends.join() as outbox:
        outbox.send_nowait(large[0])
        outbox.send_nowait(large[1])
        await _raises(ChannelFull, _sent_nowait(outbox, large[2]))
        assert outbox.statistics().nbytes <= large[0].nbytes * 5 // 2 + 2048
        await ends.inbox.receive()
        await outbox.send(large[2])
        assert [(await ends.inbox.receive()).instance_id for _ in range(2)] == ["1", "2"]


async def a_record_that_never_fits_is_refused_with_both_sizes(make: MakeChannel) -> None:
    """Check that too large a record is an error, not a wait."""
    large = group(completion_lengths=[50_000])
    async with make(capacity_bytes=65_536) as ends, ends.join() as outbox:
        for send in (_sent_nowait, _sent):
            try:
                await send(outbox, large)
            except RecordTooLarge as error:
                assert "65536" in str(error), error
                assert any(int(word) >= large.nbytes for word in _numbers(str(error))), error
            else:
                raise AssertionError("expected RecordTooLarge")
        await outbox.send(group(instance_id="small"))
        assert (await ends.inbox.receive()).instance_id == "small"


async def a_sender_waits_while_the_receiver_does_not_read(make: MakeChannel) -> None:
    """Check backpressure."""
    records = _records(12)
    sent: list[str] = []
    async with make(capacity=4) as ends, ends.join() as outbox, anyio.create_task_group() as tasks:

        async def produce() -> None:
            for record in records:
                await outbox.send(record)
                sent.append(record.instance_id)

        tasks.start_soon(produce)
        await _until(lambda: outbox.statistics().waiting_for == "credit")
        assert sent == ["0", "1", "2", "3"]
        for record in records:
            assert (await ends.inbox.receive()).instance_id == record.instance_id
        await _until(lambda: len(sent) == len(records))
        assert outbox.statistics().waiting_for == ""


async def records_of_many_senders_arrive_each_in_its_order(make: MakeChannel) -> None:
    """Check fan-in, and the end of the stream when all of them are done."""
    got = list[GroupId]()
    async with make(capacity=2, senders=4) as ends, anyio.create_task_group() as tasks:
        for sender in range(4):
            tasks.start_soon(_send_all, ends, [group(env=f"e{sender}", instance_id=str(n)) for n in range(25)])
        got = [record.id async for record in ends.inbox]
    for sender in range(4):
        assert [g.instance_id for g in got if g.env == f"e{sender}"] == [str(n) for n in range(25)]


async def clones_share_a_channel_that_ends_with_the_last(make: MakeChannel) -> None:
    """Check fan-in within one process."""
    async with make(capacity=8) as ends, ends.join() as outbox:
        clone = outbox.clone()
        await clone.send(group(instance_id="clone"))
        await clone.aclose()
        await clone.aclose()
        await outbox.send(group(instance_id="original"))
        assert [(await ends.inbox.receive()).instance_id for _ in range(2)] == ["clone", "original"]
        await outbox.aclose()
        await _expect_end(ends.inbox)
        await _raises(anyio.ClosedResourceError, outbox.send(group()))


async def records_of_a_late_joiner_arrive(make: MakeChannel) -> None:
    """Check that the stream does not end before every announced sender has connected and closed."""
    async with make(senders=2) as ends:
        await _send_all(ends, _records(2))
        assert [(await ends.inbox.receive()).instance_id for _ in range(2)] == ["0", "1"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, ends, _records(4)[2:])
            assert [(await ends.inbox.receive()).instance_id for _ in range(2)] == ["2", "3"]
        await _expect_end(ends.inbox)


async def what_was_sent_before_closing_arrives(make: MakeChannel) -> None:
    """Check that closing the sending end loses no record."""
    got = list[str]()
    async with make(capacity=16) as ends, anyio.create_task_group() as tasks:
        tasks.start_soon(_send_all, ends, _records(9))
        await anyio.lowlevel.checkpoint()
        got = [record.instance_id async for record in ends.inbox]
    assert got == [str(n) for n in range(9)]


async def a_lost_sender_that_is_counted_is_awaited(make: MakeChannel) -> None:
    """Check that losing it neither raises nor ends the stream: it is restarted, and closes."""
    async with make(senders=1) as ends:
        if not await _lose_one(ends):
            return
        got = list[str]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, ends, _records(3)[1:])
            got = [record.instance_id async for record in ends.inbox]
        assert got == ["1", "2"]


async def a_lost_sender_that_is_not_counted_is_raised_once_by_receive(make: MakeChannel) -> None:
    """Check that it is raised after all that it had sent, and that the records of others are received as before."""
    async with make(senders=None) as ends, ends.join() as other:
        if not await _lose_one(ends):
            return
        await _raises(PeerLost, ends.inbox.receive())
        await other.send(group(instance_id="1"))
        assert (await ends.inbox.receive()).instance_id == "1"
        await other.aclose()
        await _expect_end(ends.inbox)


async def a_lost_sender_that_is_not_counted_ends_an_iteration_that_may_be_begun_again(make: MakeChannel) -> None:
    """Check that `async for` raises the errors of `receive`."""
    async with make(senders=None) as ends, ends.join() as other:
        if not await _lose_one(ends):
            return
        await _raises(PeerLost, _received_all(ends.inbox))
        await other.send(group(instance_id="1"))
        await other.aclose()
        assert await _received_all(ends.inbox) == ["1"]


async def closing_the_receiver_fails_the_senders(make: MakeChannel) -> None:
    """Check that a sender that waits is woken, and a later send fails."""
    async with make(capacity=1) as ends, ends.join() as outbox, anyio.create_task_group() as tasks:
        outbox.send_nowait(group())
        tasks.start_soon(_raises, PeerClosed, outbox.send(group()))
        await _until(lambda: outbox.statistics().waiting_for == "credit")
        await ends.inbox.aclose()
        await ends.inbox.aclose()
        await _raises(anyio.ClosedResourceError, ends.inbox.receive())
    async with make() as ends, ends.join() as outbox:
        await ends.inbox.aclose()
        await _until_raises(PeerClosed, lambda: outbox.send_nowait(group()))


async def a_cancelled_send_or_receive_moves_nothing(make: MakeChannel) -> None:
    """Check cancellation at every await: no record is lost or duplicated."""
    records = _records(60)
    got: list[TrajectoryGroup] = []
    async with make(capacity=2) as ends, anyio.create_task_group() as tasks:

        async def produce() -> None:
            async with ends.join() as outbox:
                for number, record in enumerate(records):
                    attempt = 0
                    while await _cancelled_after((number + attempt) % 7, _sent(outbox, record)) is _CANCELLED:
                        attempt += 1

        async def consume() -> None:
            attempt = 0
            while True:
                attempt += 1
                try:
                    outcome = await _cancelled_after(attempt % 5, ends.inbox.receive())
                except anyio.EndOfStream:
                    return
                if isinstance(outcome, TrajectoryGroup):
                    got.append(outcome.owned())

        tasks.start_soon(produce)
        tasks.start_soon(consume)
    _same_all(got, records)


async def every_column_and_dtype_comes_out_as_it_went_in(make: MakeChannel) -> None:
    """Check names, dtypes, shapes, contents and meta, bit for bit."""
    length, count = 37, 3
    random = np.random.default_rng(0)
    tokens = np.full((count * length, 4), -1, np.int32)
    full = group(
        completion_lengths=[length - 2] * count,
        reward_noise=random.random(count),
        token_rewards=random.standard_normal(count * length),
        values=random.standard_normal(count * length),
        advantages=random.standard_normal(count * length),
        ref_logprobs=-random.random(count * length),
        teacher_ids=tokens,
        teacher_logprobs=random.standard_normal((count * length, 4)),
        routed_experts=random.integers(0, 2**16, (count * length, 3, 2), np.uint16),
        support_ids=tokens,
        policy_versions=np.arange(count * length),
        stop_reasons=[StopReason.STOP, StopReason.LENGTH, StopReason.TOOL],
        reward_parts={"score": [0.1, 0.2, 0.3], "länge": [0.0, -0.5, 1e-30]},
        meta={"messages": [{"role": "user", "content": "äöü \u0000 日本"}], "depth": {"a": [1, 2.5, None, True]}},
        env="env/with spaces",
    )
    edge = full.with_advantages(np.array([np.finfo(np.float32).max, -0.0, 1e-45] * length, np.float32))
    async with make() as ends, ends.join() as outbox:
        for record in (full, edge):
            await outbox.send(record)
            _same(await ends.inbox.receive(), record)


async def groups_of_no_tokens_and_of_very_many_arrive(make: MakeChannel) -> None:
    """Check groups of zero length and very large ones."""
    hollow = TrajectoryGroup.build(
        env="e", instance_id="0", tokens=[], offsets=[0, 0, 0], loss_mask=[], rewards=[1.0, 2.0]
    )
    large = group(completion_lengths=[100_000] * 3, instance_id="1")
    async with make(capacity_bytes=16 * 2**20) as ends, ends.join() as outbox:
        for record in (hollow, large):
            await outbox.send(record)
            _same(await ends.inbox.receive(), record)


async def statistics_name_the_present_wait(make: MakeChannel) -> None:
    """Check that a waiting end reports the wait and its time."""
    async with make(capacity=1) as ends, ends.join() as outbox, anyio.create_task_group() as tasks:
        tasks.start_soon(ends.inbox.receive)
        await _until(lambda: ends.inbox.statistics().waiting_for == "record")
        await outbox.send(group())
        await _until(lambda: ends.inbox.statistics().waiting_for == "")
        assert ends.inbox.statistics().received == 1
        assert ends.inbox.statistics().waited_s > 0
        assert outbox.statistics().sent == 1


CHANNEL_RULES: tuple[Callable[[MakeChannel], Awaitable[None]], ...] = (
    records_arrive_once_in_the_order_of_their_sender,
    no_more_records_are_in_flight_than_the_capacity,
    no_more_bytes_are_in_flight_than_the_capacity,
    a_record_that_never_fits_is_refused_with_both_sizes,
    a_sender_waits_while_the_receiver_does_not_read,
    records_of_many_senders_arrive_each_in_its_order,
    clones_share_a_channel_that_ends_with_the_last,
    records_of_a_late_joiner_arrive,
    what_was_sent_before_closing_arrives,
    a_lost_sender_that_is_counted_is_awaited,
    a_lost_sender_that_is_not_counted_is_raised_once_by_receive,
    a_lost_sender_that_is_not_counted_ends_an_iteration_that_may_be_begun_again,
    closing_the_receiver_fails_the_senders,
    a_cancelled_send_or_receive_moves_nothing,
    every_column_and_dtype_comes_out_as_it_went_in,
    groups_of_no_tokens_and_of_very_many_arrive,
    statistics_name_the_present_wait,
)
"""Every rule, an async function of a `MakeChannel`: parametrize a test over them, so that a broken one is named."""


# -- parts of the rules ----------------------------------------------------------------------------------------------

_CANCELLED = object()


def _records(count: int) -> list[TrajectoryGroup]:
    return [group(instance_id=str(n), seed=n, completion_lengths=[3 + n % 5, 4]) for n in range(count)]


async def _send_all(ends: Ends, records: list[TrajectoryGroup]) -> None:
    async with ends.join() as outbox:
        for record in records:
            await outbox.send(record)


async def _lose_one(ends: Ends) -> bool:
    """Lose a sender after one record of it was received; return whether that is possible."""
    async with ends.join() as outbox:
        await outbox.send(group(instance_id="0"))
        assert (await ends.inbox.receive()).instance_id == "0"
        return await ends.lose(outbox)


async def _received_all(inbox: ReceiveChannel[TrajectoryGroup]) -> list[str]:
    return [record.instance_id async for record in inbox]


async def _sent(outbox: SendChannel[TrajectoryGroup], record: TrajectoryGroup) -> bool:
    await outbox.send(record)
    return True


async def _sent_nowait(outbox: SendChannel[TrajectoryGroup], record: TrajectoryGroup) -> bool:
    outbox.send_nowait(record)
    return True


async def _expect_end(inbox: ReceiveChannel[TrajectoryGroup]) -> None:
    await _raises(anyio.EndOfStream, inbox.receive())


async def _raises(error: type[BaseException], attempt: Awaitable[object]) -> None:
    try:
        await attempt
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


async def _until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until `condition` holds; the rule's time limit bounds it."""
    while not condition():
        await anyio.lowlevel.checkpoint()


async def _until_raises(error: type[BaseException], attempt: Callable[[], None]) -> None:
    while True:
        try:
            attempt()
        except error:
            return
        except ChannelFull:
            pass
        await anyio.lowlevel.checkpoint()


async def _cancelled_after(ticks: int, attempt: Awaitable[T]) -> T | object:
    """Return the outcome of `attempt`, or `_CANCELLED` where it was cancelled after so many turns of the event loop."""
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def tick(left: int) -> None:
            if left:
                loop.call_soon(tick, left - 1)
            else:
                scope.cancel()

        tick(ticks)
        return await attempt
    return _CANCELLED


def _same_all(got: list[TrajectoryGroup], expected: list[TrajectoryGroup]) -> None:
    assert [record.id for record in got] == [record.id for record in expected]
    for one, other in zip(got, expected, strict=True):
        _same(one, other)


def _same(got: TrajectoryGroup, expected: TrajectoryGroup) -> None:
    assert (got.env, got.instance_id, got.meta) == (expected.env, expected.instance_id, expected.meta)
    mine, theirs = got.columns(), expected.columns()
    assert mine.keys() == theirs.keys()
    for name, column in theirs.items():
        assert mine[name].dtype == column.dtype, name
        assert mine[name].shape == column.shape, name
        assert mine[name].tobytes() == column.tobytes(), name


def _numbers(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()
