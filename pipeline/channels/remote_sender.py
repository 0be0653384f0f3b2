"""The sending end of a channel to another process: the part that shm and tcp share.

A connection is a ZeroMQ socket, a control that detects its end, a payload writer, and the credit that the receiver
gave. All clones of a sender share it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeAlias

import anyio
import anyio.lowlevel
import zmq

from ..._schemas import Array, GroupId, InvalidRecord
from ..._schemas.control import (
    PUBLISHED,
    Accept,
    Close,
    CloseAck,
    Closed,
    CreditGrant,
    CreditRequest,
    Instruction,
    Leaving,
    Message,
    MessageCount,
    Outcomes,
    Publish,
    Reject,
    Telemetry,
    decode,
    encode,
    printable,
)
from ..._schemas.layout import AxisSizes, ColumnLayout
from ..accounting.telemetry import get_logger
from ..errors import ChannelFull, PeerClosed, PeerLost, SenderRejected, SenderTimedOut
from ..util.waiting import WaitClock, Waiters
from .channel import ChannelStatistics
from .connection import SenderControl
from .memory import CHECKPOINT_EVERY
from .message_counts import MessageCounts
from .protocols import AsyncCloseable
from .rejections import DisconnectOnError, reason_of
from .transport import EVENTS, POLLIN, POLLOUT, PayloadWriter, R, Record

log = get_logger("penstock.channel")

FLUSH_AT = 64
"""Records in one message: a larger batch saves no measurable time."""

CLOSE_TIMEOUT_S = 10.0
"""Bound on the wait of a closing sender for a receiver that is connected but does not answer."""

LAST_POLL_MS = 100

DELIVERING_BYTES = 2**16
"""Bytes that reach the receiver's host in that time while records are still on their way, over a slow link: more than
heartbeats have."""


OnEnded: TypeAlias = Callable[[GroupId, int, str, int], None]
"""Called with the outcome of trajectories: (group, repetitions as a bit mask, state, step)."""


class SenderConnection:
    """The connection that all clones of a sender share."""

    def __init__(
        self,
        control: SenderControl,
        accepted: Accept,
        writer: PayloadWriter,
        socket: zmq.Socket[bytes],
        count_interval_s: float | None = None,
    ) -> None:
        """Begin to send.

        Args:
            control: detects the end of the connection.
            accepted: the receiver's answer.
            writer: places the records.
            socket: the connection.
            count_interval_s: seconds between two reports of the messages that were sent, where each record is one.
        """
        self.writer = writer
        self.accepted = accepted
        """The receiver's answer, with the credit that it granted."""
        self.ends = 0
        """Open clones."""
        self.sent: int = 0
        """Sequence number of the last record."""
        self.failure: PeerClosed | PeerLost | InvalidRecord | None = None
        """The reason why sending has ended: the receiver closed or died, or a record was changed before it was copied.
        """
        self.failed: anyio.Event = anyio.Event()
        """Set with `failure`."""
        self.disconnected: anyio.Event = anyio.Event()
        """Set when the connection has ended, and all messages that arrived on it were handled."""
        self.on_ended: OnEnded | None = None
        """Called with the outcomes of trajectories."""
        self.on_published: Callable[[int], None] = lambda _version: None
        """Called with each version of the weights that is published."""
        self.on_instruction: Callable[[bytes], None] | None = None
        """Called with each instruction of the pipeline to this worker."""
        self.waiting: Waiters = Waiters()
        self._control = control
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._credit_requested = False
        """True if credit was requested, and none granted since. It need not be while all records are in flight."""
        self._unsent = 0
        """Records that were placed since the last message."""
        self._unreachable = False
        """True once the socket has lost its connection."""
        self._close_sent: Leaving | None = None
        """The last Close that was sent."""
        self.close_acknowledged: bool = False
        """True once the receiver has answered a Close."""
        self._delivered = 0
        """Bytes that had reached the receiver's host when a closing sender looked last."""
        self.body_failed = False
        """True if the body of an `async with` of this connection raised."""
        self._flush_scheduled = False
        self._close_done = anyio.Event()
        self._fd = int(socket.getsockopt(zmq.FD))
        """The socket's descriptor: readable when something may have happened."""
        self._loop.add_reader(self._fd, self.drain)
        self._watch = self._loop.create_task(self._watch_control(), name="penstock sender watch")
        self._counts = MessageCounts()
        """Of the messages after the handshake; not of those with records, which `sent` counts."""
        self._count_interval_s = count_interval_s
        self._count_timer: asyncio.TimerHandle | None = None
        self._schedule_count()
        self.send(Publish(()))  # empty: it shows the receiver that this connection works

    async def _watch_control(self) -> None:
        """Handle messages beside the ZeroMQ socket, until the receiver has closed, died or become unresponsive."""
        while not isinstance(event := await self._control.next_event(self.accepted.name), PeerLost):
            self.drain()  # what arrived on the socket was sent before
            with DisconnectOnError(self._disconnect_for_error):
                self._handle(event)
        self.drain()  # a message may hold the reason
        self._fail(event)

    def _fail(self, failure: PeerClosed | PeerLost | InvalidRecord) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()
        self._close_done.set()
        self.waiting.wake_all()

    def place(self, record: Record) -> bool:
        """Place `record` if there is credit for it, and return whether there was.

        Raises:
            InvalidRecord: it does not conform to its schema.
            PeerClosed, PeerLost: the connection has ended.
            RecordTooLarge: it needs more credit than there can be.
        """
        if self.failure is not None:
            raise self.failure
        if self._unreachable:
            return False
        writer = self.writer
        while True:
            # There are four cases:
            #
            # 1. There is credit: the record is placed.
            # 2. There is not enough, and the receiver may be withholding some: it is requested, once; then try again.
            # 3. There is not enough, and granted credit has arrived meanwhile: handle it, and try again.
            # 4. There is not enough, and none has arrived: the caller waits.
            if not writer.full:
                form, lengths, contiguous = record.schema.laid_out(record)
                if self._place_columns(form, lengths, record.header(), contiguous):
                    break
            if self._credit_requested or writer.full:
                in_flight = writer.items
                self.drain()
                if writer.items == in_flight:
                    return False
            else:
                self.request_credit()
        self.sent += 1
        self._unsent += 1
        if self._unsent >= FLUSH_AT:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)
        return True

    def _place_columns(self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Sequence[Array]) -> bool:
        try:
            return self.writer.place(form, lengths, header, columns, self.sent + 1)
        except InvalidRecord as error:  # of a record that was placed before
            self._fail(error)
            raise

    def request_credit(self) -> None:
        """Request the credit that the receiver is withholding. It cannot know how many bytes the next record takes."""
        self._credit_requested = True
        if not (self._close_sent or self._socket.closed):
            self.send(CreditRequest())

    def request_credit_soon(self) -> None:
        """Request credit, so that the next `statistics` is accurate. Safe from any thread."""
        if self.writer.items and not self._credit_requested:
            with suppress(RuntimeError):  # the loop was closed under an open sender
                self._loop.call_soon_threadsafe(self.request_credit)

    def full(self) -> ChannelFull:
        """Return the error that reports the records in flight."""
        if self._unreachable:
            return ChannelFull(f"the connection to {self.accepted.name} has ended, and the reason is not known yet")
        return ChannelFull(
            f"{self.writer.items} of {self.accepted.capacity} records and {self.writer.nbytes} of "
            f"{self.accepted.capacity_bytes} bytes are in flight to {self.accepted.name}"
        )

    def flush(self) -> None:
        """Send the records that were placed."""
        self._flush_scheduled = False
        if self._unsent and self._can_send:
            self._unsent = 0
            try:
                self.writer.post(self._socket)
            except zmq.Again:  # ZeroMQ does not send without a connection
                self._on_unreachable()
            except InvalidRecord as error:
                log.exception("record_changed", peer=self.accepted.name)
                self._fail(error)
            self.drain()

    @property
    def _can_send(self) -> bool:
        return self.failure is None and not self._unreachable

    def _on_unreachable(self) -> None:
        """Note that the socket has no connection; the control is about to report the reason."""
        if not self._unreachable:
            self._unreachable = True
            self._control.disconnected()

    def send(self, message: Message) -> None:
        """Send a message, after the descriptors that precede it."""
        self.flush()
        self._counts.sent += 1
        self._transmit(message)

    def _transmit(self, message: Message) -> None:
        # A record that was changed ends what may be sent, but for the report of it.
        if self._can_send or (isinstance(self.failure, InvalidRecord) and isinstance(message, Telemetry)):
            try:
                self._socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._on_unreachable()
            self.drain()

    def _schedule_count(self) -> None:
        if self._count_interval_s is not None:
            self._count_timer = self._loop.call_later(self._count_interval_s, self._report_count)

    def _report_count(self) -> None:
        """Report how many messages were sent, until the last one is on its way; see `MessageCounts`."""
        if self._can_send and self._close_sent in {None, "staying"}:
            self.flush()
            self._transmit(MessageCount(self._counts.sent + self.sent - self._unsent))
            self._schedule_count()

    def drain(self) -> None:
        """Handle all messages that have arrived from the receiver."""
        while not self._socket.closed:
            events = int(self._socket.getsockopt(EVENTS))
            if not events & POLLIN:
                if not events & POLLOUT:
                    self._on_unreachable()
                    self.disconnected.set()
                return
            with DisconnectOnError(self._disconnect_for_error):
                self._handle(decode(self._socket.recv(zmq.NOBLOCK)))

    def _disconnect_for_error(self, error: Exception) -> None:
        """Treat a receiver that violates the protocol as dead."""
        lost = PeerLost(f"{self.accepted.name}, the receiver, violated the protocol: {printable(reason_of(error))}")
        lost.__cause__ = error
        self._fail(lost)
        self._control.disconnected()

    def _handle(self, message: Message) -> None:
        """Handle a message of the receiver, from the socket or from the control."""
        if isinstance(message, MessageCount):
            self._counts.check(message)
            return
        self._counts.received += 1
        match message:
            case CreditGrant(spans):
                self._credit_requested = False
                for slot, generation, records in spans:
                    self.writer.free(slot, generation, records)
                self.waiting.wake_one()
            case Outcomes(entries):
                self._on_outcomes(entries)
            case Instruction(payload) if self.on_instruction is not None:
                self.on_instruction(payload)
            case Closed():
                self._fail(PeerClosed(f"{self.accepted.name}, the receiver, closed the channel"))
                self._control.disconnected()  # the receiver waits for the end of the connection
            case Reject(error, reason):
                failure = SenderTimedOut if error == SenderTimedOut.__name__ else SenderRejected
                self._fail(failure(f"{self.accepted.name}, the receiver, disconnected this sender: {reason}"))
                self._control.disconnected()
            case CloseAck():
                self.close_acknowledged = True
                self._close_done.set()
            case _:
                log.warning("unexpected_message", message=type(message).__name__, peer=self.accepted.name)

    def _on_outcomes(self, entries: Iterable[tuple[GroupId, Sequence[int], str, int]]) -> None:
        for group, repetitions, state, step in entries:
            if state == PUBLISHED:
                self.on_published(step)
            elif self.on_ended is not None:
                self.on_ended(group, sum(1 << r for r in repetitions), state, step)

    def send_close(self, how: Leaving) -> None:
        """Send Close: no more records come from here. Calling it twice is fine."""
        if self._close_sent in {None, "staying"} and how != self._close_sent:
            if self._can_send:
                self._close_done = anyio.Event()
            self._close_sent = how
            self.send(Close(self.sent, how))

    def send_last(self, message: Message) -> None:
        """Send `message` and Close, and wait until the receiver has them; see `RemoteSender.send_last`."""
        self.send(message)
        self.send_close("failed")
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._can_send and not self.close_acknowledged and time.monotonic() < deadline_s:
            self._socket.poll(LAST_POLL_MS)
            self.drain()

    async def wait_close_acknowledged(self) -> bool:
        """Wait until the receiver has acknowledged the Close, or disconnected; return whether it acknowledged."""
        await self._close_done.wait()
        return self.close_acknowledged

    async def close(self) -> None:
        """Send Close, wait until the receiver has everything, and release the connection."""
        if self._close_sent is None:
            self.send_close("failed" if self.body_failed else "done")
        self._delivered = self._control.delivered_bytes()
        try:
            with anyio.CancelScope(shield=True):
                while not await self._close_done_in_time():
                    if self.body_failed or not self._delivering():
                        log.warning("close_timeout", peer=self.accepted.name, waited_s=CLOSE_TIMEOUT_S)
                        break
        finally:  # a shield stops anyio's cancellations, not asyncio's own, such as that of Ctrl-C
            await self._release()

    async def _close_done_in_time(self) -> bool:
        with anyio.move_on_after(CLOSE_TIMEOUT_S):
            await self._close_done.wait()
        return self._close_done.is_set()

    def _delivering(self) -> bool:
        """Return whether records have been arriving at the receiver's host since the last call."""
        before, self._delivered = self._delivered, self._control.delivered_bytes()
        return self._delivered - before >= DELIVERING_BYTES

    async def _release(self) -> None:
        """Close the parts of the connection."""
        if self._count_timer is not None:
            self._count_timer.cancel()
        self._watch.cancel()
        self._loop.remove_reader(self._fd)
        with anyio.CancelScope(shield=True):
            with suppress(asyncio.CancelledError):
                await self._watch
            await self._control.aclose()
        self._socket.close(linger=0)
        self.writer.close()


class RemoteSender(AsyncCloseable, Generic[R]):
    """The sending end of a channel to another process; see `SendChannel`."""

    def __init__(self, connection: SenderConnection, transport: str) -> None:
        self._connection = connection
        self._transport = transport
        self._clock = WaitClock()
        self._closed = False
        self._until_checkpoint = CHECKPOINT_EVERY
        connection.ends += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        receiver, sent = self._connection.accepted.name, self._connection.sent
        return f"<RemoteSender {self._transport} to {receiver}: {state}, {sent} sent>"

    def send_nowait(self, record: R, /) -> None:
        """Send `record` if there is credit for it now; see `SendChannel.send_nowait`."""
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._connection.place(record):
            raise self._connection.full()

    async def send(self, record: R, /) -> None:
        """Send `record`, waiting for credit if need be; see `SendChannel.send`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._until_checkpoint = CHECKPOINT_EVERY
            await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        if self._connection.waiting or not self._connection.place(record):
            with self._clock.waiting("credit"):
                await self._send_after_waiting(record)

    async def _send_after_waiting(self, record: R) -> None:
        connection, first = self._connection, False
        while True:
            connection.flush()  # also handles granted credit, which causes no other wake-up: so try before waiting
            if self._closed:
                raise anyio.ClosedResourceError
            if (first or not connection.waiting) and connection.place(record):
                connection.waiting.wake_one()  # one release may have made room for several
                return
            await connection.waiting.wait(first=first)
            first = True

    def send_telemetry(self, payload: bytes) -> None:
        """Send encoded telemetry of this process; it arrives after all that was sent before."""
        if not self._closed:
            self._connection.send(Telemetry(payload))

    def send_last(self, payload: bytes) -> None:
        """Send encoded telemetry as the last message of this process, and wait until the receiver has it.

        For a thread, while the event loop is blocked: it uses the socket of the loop, so this process must end next.
        """
        self._connection.send_last(Telemetry(payload))

    def on_ended(self, listener: OnEnded) -> None:
        """Have `listener` called with the outcomes of trajectories that were sent here."""
        self._connection.on_ended = listener

    def on_published(self, listener: Callable[[int], None]) -> None:
        """Have `listener` called with each version of the weights that the pipeline publishes."""
        self._connection.on_published = listener

    def on_instruction(self, listener: Callable[[bytes], None]) -> None:
        """Have `listener` called with each instruction of the pipeline to this worker, encoded."""
        self._connection.on_instruction = listener

    @property
    def failure(self) -> PeerClosed | PeerLost | InvalidRecord | None:
        """Return the error that `send` raises from now on, or None.

        The receiver closed the channel, or died; or a record was changed after `send` and before it was copied, and
        the connection is closed.
        """
        return self._connection.failure

    async def wait_failed(self) -> None:
        """Wait until the receiver closed the channel, or died: `failure` is the reason."""
        await self._connection.failed.wait()

    async def wait_disconnected(self) -> None:
        """Wait until the connection has ended, and all messages of the receiver were handled."""
        await self._connection.disconnected.wait()

    def send_close(self, how: Leaving = "staying") -> None:
        """Notify the receiver that this end and its clones are done, and go on handling its messages."""
        self._connection.send_close(how)

    async def wait_close_acknowledged(self) -> bool:
        """Wait until the receiver has acknowledged `send_close`, or disconnected; return whether it acknowledged."""
        return await self._connection.wait_close_acknowledged()

    @property
    def counts_members(self) -> bool:
        """Return whether the receiver counts senders by name, and waits until this one is done."""
        return self._connection.accepted.counts_members

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; where the body raised, the receiver is notified that this sender is not done."""
        self._connection.body_failed |= kind is not None
        await self.aclose()

    def clone(self) -> RemoteSender[R]:
        """Return another sending end of the same connection.

        Raises:
            anyio.ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        return RemoteSender(self._connection, self._transport)

    async def aclose(self) -> None:
        """Close this end; with the last one, wait until the receiver has everything. Closing twice is fine.

        Raises:
            InvalidRecord: a record was changed before it was copied: neither it nor any later one was sent.
        """
        if not self._closed:
            self._closed = True
            self._connection.ends -= 1
            if not self._connection.ends:
                await self._connection.close()
                if isinstance(self._connection.failure, InvalidRecord):
                    raise self._connection.failure

    def statistics(self) -> ChannelStatistics:
        """Return the state and the waits of this end. Requests withheld credit, so that the next call is accurate."""
        connection = self._connection
        connection.request_credit_soon()
        return ChannelStatistics(
            transport=self._transport,
            capacity=connection.accepted.capacity,
            items=connection.writer.items,
            capacity_bytes=connection.accepted.capacity_bytes,
            nbytes=connection.writer.nbytes,
            sent=connection.sent,
            received=connection.sent - connection.writer.items,
            senders=connection.ends,
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )
