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

from ...schemas import Array, InvalidRecord, ProtocolMismatch
from ...schemas.control import (
    Closed,
    Ended,
    Farewell,
    Goodbye,
    Leaving,
    Message,
    Observed,
    Publish,
    Refused,
    Release,
    Wanting,
    Welcome,
    decode,
    encode,
)
from ...schemas.layout import Form, Lengths
from ..errors import ChannelFull, PeerClosed, PeerLost, StaleDescriptor
from ..ledger import Origin
from ..telemetry import get_logger
from ..waiting import WaitClock, Waiters
from .carrier import EVENTS, POLLIN, POLLOUT, Outlet, R, Record
from .channel import ChannelStatistics
from .connection import SenderControl
from .ends import Closing
from .memory import CHECKPOINT_EVERY

__all__ = ["RemoteSender", "SenderLine"]

log = get_logger("penstock.channel")

FLUSH_AT = 64
"""Records in one message: beyond this a message a batch costs nothing measurable."""

PARTING_S = 10.0
"""How long a closing sender waits for a receiver that lives but does not answer."""


class SenderLine:
    """The connection that all clones of a sender share."""

    def __init__(self, control: SenderControl, welcome: Welcome, outlet: Outlet, socket: zmq.Socket[bytes]) -> None:
        self.outlet = outlet
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
        self.severed = anyio.Event()
        """Set when the connection has ended, and all that came on it was heard."""
        self.on_ended: Origin | None = None
        """Is told how trajectories ended."""
        self.waiting = Waiters()
        self._control = control
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._asked = False
        """Whether the receiver was told that credit is wanted, and gave none since. Who has no record left need not."""
        self._unposted = 0
        """Records that were taken in since the last message."""
        self._severed = False
        """Whether the socket has nobody to send to any more."""
        self._goodbye: Leaving | None = None
        """What was said last."""
        self.goodbye_heard = False
        """Whether the receiver has answered a goodbye."""
        self.failed_body = False
        """Whether an `async with` of this connection was left by an exception."""
        self._flush_scheduled = False
        self._parted = anyio.Event()
        self._fd = int(socket.getsockopt(zmq.FD))
        """The socket's descriptor: readable when something may have happened."""
        self._loop.add_reader(self._fd, self.drain)
        self._watch = self._loop.create_task(self._until_lost(), name="penstock sender watch")
        self.tell(Publish(()))  # nothing yet: from now on the receiver knows this connection

    async def _until_lost(self) -> None:
        """Until the receiver closes the channel, dies or falls silent: then nothing can be sent any more."""
        failure = await self._control.lost(self.welcome.name)
        self.drain()  # it may have said why
        self.goodbye_heard |= self._control.goodbye_heard
        self._fail(failure)

    def _fail(self, failure: PeerClosed | PeerLost | InvalidRecord) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()
        self._parted.set()
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
        if self._severed:
            return False
        outlet = self.outlet
        while True:
            if not outlet.full:
                form, lengths, plain = record.schema.laid_out(record)
                if self._taken_in(form, lengths, record.header(), plain):
                    break
            if self._asked or outlet.full:
                in_flight = outlet.items
                self.drain()
                if outlet.items == in_flight:
                    return False
            else:
                self.ask()
        self.sent += 1
        self._unposted += 1
        if self._unposted >= FLUSH_AT:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)
        return True

    def _taken_in(self, form: Form, lengths: Lengths, header: bytes, columns: Sequence[Array]) -> bool:
        try:
            return self.outlet.place(form, lengths, header, columns, self.sent + 1)
        except InvalidRecord as error:  # it is one of those before
            self._fail(error)
            raise

    def ask(self) -> None:
        """Want the credit that the receiver holds back. It cannot know how many bytes the next record takes."""
        self._asked = True
        if not (self._goodbye or self._socket.closed):
            self.tell(Wanting())

    def ask_soon(self) -> None:
        """Want it for the next look at what is in flight. Safe from any thread."""
        if self.outlet.items and not self._asked:
            with suppress(RuntimeError):  # the loop was closed under an open sender
                self._loop.call_soon_threadsafe(self.ask)

    def full(self) -> ChannelFull:
        """The error that says what is in flight."""
        if self._severed:
            return ChannelFull(f"the connection to {self.welcome.name} is gone, and the reason is not known yet")
        return ChannelFull(
            f"{self.outlet.items} of {self.welcome.capacity} records and {self.outlet.nbytes} of "
            f"{self.welcome.capacity_bytes} bytes are in flight to {self.welcome.name}"
        )

    def flush(self) -> None:
        """Let what was taken in go."""
        self._flush_scheduled = False
        if self._unposted and self._connected:
            self._unposted = 0
            try:
                self.outlet.post(self._socket)
            except zmq.Again:  # ZeroMQ refuses to send when the other end is gone
                self._sever()
            except InvalidRecord as error:
                log.exception("record_changed", peer=self.welcome.name)
                self._fail(error)
            self.drain()

    @property
    def _connected(self) -> bool:
        return self.failure is None and not self._severed

    def _sever(self) -> None:
        """There is nobody to send to: what notices the receiver's end is about to tell why."""
        if not self._severed:
            self._severed = True
            self._control.disconnected()

    def tell(self, message: Message) -> None:
        """Send a message of control, after the descriptors that precede it."""
        self.flush()
        if self._connected:
            try:
                self._socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._sever()
            self.drain()

    def drain(self) -> None:
        """Hear all that the receiver has said."""
        while not self._socket.closed:
            events = int(self._socket.getsockopt(EVENTS))
            if not events & POLLIN:
                if not events & POLLOUT:
                    self._sever()
                    self.severed.set()
                return
            try:
                self._heed(decode(self._socket.recv(zmq.NOBLOCK)))
            except (ProtocolMismatch, StaleDescriptor) as error:
                log.warning("message_rejected", peer=self.welcome.name, reason=str(error))

    def _heed(self, message: Message) -> None:
        match message:
            case Release(spans):
                self._asked = False
                for slot, generation, records in spans:
                    self.outlet.free(slot, generation, records)
                self.waiting.wake_one()
            case Ended(entries):
                if self.on_ended is not None:
                    for group, repetitions, state, step in entries:
                        self.on_ended(group, sum(1 << r for r in repetitions), state, step)  # type: ignore[arg-type]
            case Closed():
                self._fail(PeerClosed(f"{self.welcome.name}, the receiver, closed the channel"))
                self._control.disconnected()  # the receiver waits until it is heard
            case Refused(_, reason):
                self._fail(PeerClosed(f"{self.welcome.name}, the receiver, gave this sender up: {reason}"))
                self._control.disconnected()
            case Farewell():
                self.goodbye_heard = True
                self._parted.set()
            case _:
                log.warning("unexpected_message", message=type(message).__name__, peer=self.welcome.name)

    def say_goodbye(self, how: Leaving) -> None:
        """Nothing more comes from here. Saying it twice is fine."""
        if self._goodbye in {None, "staying"} and how != self._goodbye:
            if self._connected:
                self._parted = anyio.Event()
            self._goodbye = how
            self.tell(Goodbye(self.sent, how))

    async def answered(self) -> bool:
        """Wait until the receiver has heard the goodbye, or is gone, and return whether it has heard it."""
        await self._parted.wait()
        return self.goodbye_heard

    async def part(self) -> None:
        """Say goodbye, wait until the receiver has everything, and let go."""
        if self._goodbye is None:
            self.say_goodbye("failed" if self.failed_body else "done")
        try:
            with anyio.move_on_after(PARTING_S, shield=True) as bound:
                await self._parted.wait()
            if bound.cancelled_caught:
                log.warning("no_farewell", peer=self.welcome.name, waited_s=PARTING_S)
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
        self.outlet.close()


class RemoteSender(Closing, Generic[R]):
    """The sending end of a channel to another process; see `SendChannel`."""

    def __init__(self, line: SenderLine, carrier: str) -> None:
        self._line = line
        self._carrier = carrier
        self._clock = WaitClock()
        self._closed = False
        self._until_checkpoint = CHECKPOINT_EVERY
        line.ends += 1

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<RemoteSender {self._carrier} to {self._line.welcome.name}: {state}, {self._line.sent} sent>"

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
            self._line.tell(Observed(observed))

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

    async def severed(self) -> None:
        """Wait until the connection has ended, so that all was heard which the receiver had said."""
        await self._line.severed.wait()

    def say_goodbye(self, how: Leaving = "staying") -> None:
        """Tell the receiver that nothing more comes from this end and its clones, and go on hearing what it says."""
        self._line.say_goodbye(how)

    async def goodbye_heard(self) -> bool:
        """Wait until the receiver has heard `say_goodbye`, or is gone, and return whether it has heard it."""
        return await self._line.answered()

    @property
    def counts_members(self) -> bool:
        """Whether the receiver counts senders by name, and waits until this one has said that it is done."""
        return self._line.welcome.counts_members

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; where the body raised, the receiver is told that this sender did not come to its end."""
        self._line.failed_body |= kind is not None
        await self.aclose()

    def clone(self) -> RemoteSender[R]:
        """Another sending end of the same connection.

        Raises:
            anyio.ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        return RemoteSender(self._line, self._carrier)

    async def aclose(self) -> None:
        """Close this end; with the last one, wait until the receiver has everything. Closing twice is fine.

        Raises:
            InvalidRecord: a record was changed before it was copied: it was not sent, nor was anything after it.
        """
        if not self._closed:
            self._closed = True
            self._line.ends -= 1
            if not self._line.ends:
                await self._line.part()
                if isinstance(self._line.failure, InvalidRecord):
                    raise self._line.failure

    def statistics(self) -> ChannelStatistics:
        """What this end holds and waits for. What credit the receiver holds back is asked for, for the next look."""
        line = self._line
        line.ask_soon()
        return ChannelStatistics(
            carrier=self._carrier,
            capacity=line.welcome.capacity,
            items=line.outlet.items,
            capacity_bytes=line.welcome.capacity_bytes,
            nbytes=line.outlet.nbytes,
            sent=line.sent,
            received=line.sent - line.outlet.items,
            senders=line.ends,
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )
