"""The sending end of a channel to another process: what shm and tcp have in common.

A line is one connection: a ZeroMQ socket, what notices its end, an outlet, and the credit that the receiver gave. All
clones of a sender share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Generic

import anyio
import anyio.lowlevel
import zmq

from ..._schemas import Array, InvalidRecord, ProtocolMismatch
from ..._schemas.control import (
    Accept,
    Close,
    CloseAck,
    Closed,
    CreditGrant,
    CreditRequest,
    Leaving,
    Message,
    Outcomes,
    Publish,
    Reject,
    Telemetry,
    decode,
    encode,
)
from ..._schemas.layout import AxisSizes, ColumnLayout
from ..errors import ChannelFull, PeerClosed, PeerLost, StaleDescriptor
from ..ledger import Origin
from ..telemetry import get_logger
from ..waiting import WaitClock, Waiters
from .channel import ChannelStatistics
from .connection import SenderControl
from .memory import CHECKPOINT_EVERY
from .protocols import AsyncCloseable
from .transport import EVENTS, POLLIN, POLLOUT, PayloadWriter, R, Record

__all__ = ["RemoteSender", "SenderConnection"]

log = get_logger("penstock.channel")

FLUSH_AT = 64
"""Records in one message: beyond this a message a batch costs nothing measurable."""

CLOSE_TIMEOUT_S = 10.0
"""How long a closing sender waits for a receiver that lives but does not answer."""


class SenderConnection:
    """The connection that all clones of a sender share."""

    def __init__(
        self, control: SenderControl, welcome: Accept, writer: PayloadWriter, socket: zmq.Socket[bytes]
    ) -> None:
        self.writer = writer
        self.welcome = welcome
        """What the receiver granted."""
        self.ends = 0
        """Open clones."""
        self.sent = 0
        """Sequence number of the last record."""
        self.failure: PeerClosed | PeerLost | InvalidRecord | None = None
        """Why nothing can be sent any more: the receiver has gone, or a record was changed before it was copied."""
        self.failed = anyio.Event()
        """Set with `failure`."""
        self.disconnected = anyio.Event()
        """Set when the connection has ended, and all that came on it was heard."""
        self.on_ended: Origin | None = None
        """Is told how trajectories ended."""
        self.waiting = Waiters()
        self._control = control
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._credit_requested = False
        """Whether the receiver was told that credit is wanted, and gave none since. Who has no record left need not."""
        self._unsent = 0
        """Records that were taken in since the last message."""
        self._disconnected = False
        """Whether the socket has nobody to send to any more."""
        self._close_sent: Leaving | None = None
        """What was said last."""
        self.close_acknowledged = False
        """Whether the receiver has answered a goodbye."""
        self.body_failed = False
        """Whether an `async with` of this connection was left by an exception."""
        self._flush_scheduled = False
        self._close_done = anyio.Event()
        self._fd = int(socket.getsockopt(zmq.FD))
        """The socket's descriptor: readable when something may have happened."""
        self._loop.add_reader(self._fd, self.drain)
        self._watch = self._loop.create_task(self._until_lost(), name="penstock sender watch")
        self.tell(Publish(()))  # nothing yet: from now on the receiver knows this connection

    async def _until_lost(self) -> None:
        """Until the receiver closes the channel, dies or falls silent: then nothing can be sent any more."""
        failure = await self._control.lost(self.welcome.name)
        self.drain()  # it may have said why
        self.close_acknowledged |= self._control.close_acknowledged
        self._fail(failure)

    def _fail(self, failure: PeerClosed | PeerLost | InvalidRecord) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()
        self._close_done.set()
        self.waiting.wake_all()

    def place(self, record: Record) -> bool:
        """Take `record` in if there is credit for it, and tell whether there was.

        Raises:
            InvalidRecord: it is not what its schema says.
            PeerClosed, PeerLost: nobody will ever give credit for it.
            RecordTooLarge: there will never be enough.
        """
        if self.failure is not None:
            raise self.failure
        if self._disconnected:
            return False
        writer = self.writer
        while True:
            if not writer.full:
                form, lengths, contiguous = record.schema.laid_out(record)
                if self._taken_in(form, lengths, record.header(), contiguous):
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

    def _taken_in(self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Sequence[Array]) -> bool:
        try:
            return self.writer.place(form, lengths, header, columns, self.sent + 1)
        except InvalidRecord as error:  # it is one of those before
            self._fail(error)
            raise

    def request_credit(self) -> None:
        """Want the credit that the receiver holds back. It cannot know how many bytes the next record takes."""
        self._credit_requested = True
        if not (self._close_sent or self._socket.closed):
            self.tell(CreditRequest())

    def request_credit_soon(self) -> None:
        """Want it for the next look at what is in flight. Safe from any thread."""
        if self.writer.items and not self._credit_requested:
            with suppress(RuntimeError):  # the loop was closed under an open sender
                self._loop.call_soon_threadsafe(self.request_credit)

    def full(self) -> ChannelFull:
        """The error that says what is in flight."""
        if self._disconnected:
            return ChannelFull(f"the connection to {self.welcome.name} is gone, and the reason is not known yet")
        return ChannelFull(
            f"{self.writer.items} of {self.welcome.capacity} records and {self.writer.nbytes} of "
            f"{self.welcome.capacity_bytes} bytes are in flight to {self.welcome.name}"
        )

    def flush(self) -> None:
        """Let what was taken in go."""
        self._flush_scheduled = False
        if self._unsent and self._connected:
            self._unsent = 0
            try:
                self.writer.post(self._socket)
            except zmq.Again:  # ZeroMQ refuses to send when the other end is gone
                self._disconnect()
            except InvalidRecord as error:
                log.exception("record_changed", peer=self.welcome.name)
                self._fail(error)
            self.drain()

    @property
    def _connected(self) -> bool:
        return self.failure is None and not self._disconnected

    def _disconnect(self) -> None:
        """There is nobody to send to: what notices the receiver's end is about to tell why."""
        if not self._disconnected:
            self._disconnected = True
            self._control.disconnected()

    def tell(self, message: Message) -> None:
        """Send a message of control, after the descriptors that precede it."""
        self.flush()
        if self._connected:
            try:
                self._socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._disconnect()
            self.drain()

    def drain(self) -> None:
        """Hear all that the receiver has said."""
        while not self._socket.closed:
            events = int(self._socket.getsockopt(EVENTS))
            if not events & POLLIN:
                if not events & POLLOUT:
                    self._disconnect()
                    self.disconnected.set()
                return
            try:
                self._handle(decode(self._socket.recv(zmq.NOBLOCK)))
            except (ProtocolMismatch, StaleDescriptor) as error:
                log.warning("message_rejected", peer=self.welcome.name, reason=str(error))

    def _handle(self, message: Message) -> None:
        match message:
            case CreditGrant(spans):
                self._credit_requested = False
                for slot, generation, records in spans:
                    self.writer.free(slot, generation, records)
                self.waiting.wake_one()
            case Outcomes(entries):
                if self.on_ended is not None:
                    for group, repetitions, state, step in entries:
                        self.on_ended(group, sum(1 << r for r in repetitions), state, step)  # type: ignore[arg-type]
            case Closed():
                self._fail(PeerClosed(f"{self.welcome.name}, the receiver, closed the channel"))
                self._control.disconnected()  # the receiver waits until it is heard
            case Reject(_, reason):
                self._fail(PeerClosed(f"{self.welcome.name}, the receiver, gave this sender up: {reason}"))
                self._control.disconnected()
            case CloseAck():
                self.close_acknowledged = True
                self._close_done.set()
            case _:
                log.warning("unexpected_message", message=type(message).__name__, peer=self.welcome.name)

    def send_close(self, how: Leaving) -> None:
        """Nothing more comes from here. Saying it twice is fine."""
        if self._close_sent in {None, "staying"} and how != self._close_sent:
            if self._connected:
                self._close_done = anyio.Event()
            self._close_sent = how
            self.tell(Close(self.sent, how))

    async def closed_by_peer(self) -> bool:
        """Wait until the receiver has heard the goodbye, or is gone, and return whether it has heard it."""
        await self._close_done.wait()
        return self.close_acknowledged

    async def close(self) -> None:
        """Say goodbye, wait until the receiver has everything, and let go."""
        if self._close_sent is None:
            self.send_close("failed" if self.body_failed else "done")
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True) as bound:
                await self._close_done.wait()
            if bound.cancelled_caught:
                log.warning("close_timeout", peer=self.welcome.name, waited_s=CLOSE_TIMEOUT_S)
        finally:  # a shield keeps out anyio's cancellations, not asyncio's own, which Ctrl-C is
            await self._let_go()

    async def _let_go(self) -> None:
        """Close what the line consists of."""
        self._watch.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
        with anyio.CancelScope(shield=True):
            with suppress(asyncio.CancelledError):
                await self._watch
            await self._control.aclose()
        self.writer.close()


class RemoteSender(AsyncCloseable, Generic[R]):
    """The sending end of a channel to another process; see `SendChannel`."""

    def __init__(self, line: SenderConnection, transport: str) -> None:
        self._line = line
        self._transport = transport
        self._clock = WaitClock()
        self._closed = False
        self._until_checkpoint = CHECKPOINT_EVERY
        line.ends += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<RemoteSender {self._transport} to {self._line.welcome.name}: {state}, {self._line.sent} sent>"

    def send_nowait(self, record: R, /) -> None:
        """Hand over `record` if there is credit for it now; see `SendChannel.send_nowait`."""
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._line.place(record):
            raise self._line.full()

    async def send(self, record: R, /) -> None:
        """Hand over `record`, waiting for credit if need be; see `SendChannel.send`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._until_checkpoint = CHECKPOINT_EVERY
            await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        if self._line.waiting or not self._line.place(record):
            with self._clock.waiting("credit"):
                await self._send_after_waiting(record)

    async def _send_after_waiting(self, record: R) -> None:
        line, first = self._line, False
        while True:
            line.flush()  # hears of credit too, which no wake-up will announce again: so try before waiting
            if self._closed:
                raise anyio.ClosedResourceError
            if (first or not line.waiting) and line.place(record):
                line.waiting.wake_one()  # one release may have made room for several
                return
            await line.waiting.wait(first=first)
            first = True

    def tell(self, observed: bytes) -> None:
        """Pass on what this process has observed, encoded; it arrives after all that was sent before."""
        if not self._closed:
            self._line.tell(Telemetry(observed))

    def on_ended(self, listener: Origin) -> None:
        """Have `listener` told how trajectories ended that were sent here."""
        self._line.on_ended = listener

    @property
    def failure(self) -> PeerClosed | PeerLost | InvalidRecord | None:
        """What `send` raises from now on; None while all is well.

        The receiver closed the channel, or died; or a record was changed after `send` and before it was copied, and
        the connection is given up.
        """
        return self._line.failure

    async def gone(self) -> None:
        """Wait until the receiver closed the channel, or died: `failure` says which."""
        await self._line.failed.wait()

    async def disconnected(self) -> None:
        """Wait until the connection has ended, so that all was heard which the receiver had said."""
        await self._line.disconnected.wait()

    def send_close(self, how: Leaving = "staying") -> None:
        """Tell the receiver that nothing more comes from this end and its clones, and go on hearing what it says."""
        self._line.send_close(how)

    async def close_acknowledged(self) -> bool:
        """Wait until the receiver has heard `send_close`, or is gone, and return whether it has heard it."""
        return await self._line.closed_by_peer()

    @property
    def counts_members(self) -> bool:
        """Whether the receiver counts senders by name, and waits until this one has said that it is done."""
        return self._line.welcome.counts_members

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; where the body raised, the receiver is told that this sender did not come to its end."""
        self._line.body_failed |= kind is not None
        await self.aclose()

    def clone(self) -> RemoteSender[R]:
        """Another sending end of the same connection.

        Raises:
            anyio.ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        return RemoteSender(self._line, self._transport)

    async def aclose(self) -> None:
        """Close this end; with the last one, wait until the receiver has everything. AsyncCloseable twice is fine.

        Raises:
            InvalidRecord: a record was changed before it was copied: it was not sent, nor was anything after it.
        """
        if not self._closed:
            self._closed = True
            self._line.ends -= 1
            if not self._line.ends:
                await self._line.close()
                if isinstance(self._line.failure, InvalidRecord):
                    raise self._line.failure

    def statistics(self) -> ChannelStatistics:
        """What this end holds and waits for. What credit the receiver holds back is asked for, for the next look."""
        line = self._line
        line.request_credit_soon()
        return ChannelStatistics(
            transport=self._transport,
            capacity=line.welcome.capacity,
            items=line.writer.items,
            capacity_bytes=line.welcome.capacity_bytes,
            nbytes=line.writer.nbytes,
            sent=line.sent,
            received=line.sent - line.writer.items,
            senders=line.ends,
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )
