"""The receiving end of a channel from other processes: the part that shm and tcp share.

One ZeroMQ socket for all senders, and an acceptor that admits them and detects when one has disconnected. Everything
runs on one event loop, except that a lease may die in any thread.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import anyio
import anyio.lowlevel
import zmq

from ..._schemas import ProtocolMismatch, TokenizerIdentity
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Accept,
    Close,
    CloseAck,
    Closed,
    Connect,
    CreditGrant,
    CreditRequest,
    Leaving,
    Message,
    MessageCount,
    Publish,
    Reject,
    Telemetry,
    decode_of_sender,
    encode,
    printable,
)
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import Schema
from ..accounting.telemetry import get_logger
from ..errors import (
    MemberAbsent,
    PeerClosed,
    PeerLost,
    RecordCorrupted,
    SenderRejected,
    SenderTimedOut,
    StaleDescriptor,
)
from ..util.waiting import WaitClock, Waiters
from .admission import Admission
from .channel import ChannelStatistics
from .checksum import ChecksumDiffers
from .connection import PeerControl
from .credit_returns import CreditReturner
from .heartbeat import UNRESPONSIVE
from .keys import ChannelKey
from .members import Members
from .memory import CHECKPOINT_EVERY
from .peer import Peer
from .protocols import AsyncReceiver
from .rejections import DisconnectOnError, RejectionCounter, reason_of
from .segment import DEFAULT_SLOT_BYTES
from .transport import EVENTS, LARGEST_MESSAGE, POLLIN, Bundle, Frames, PayloadReader, R, receive_frames
from .turns import AT_ONCE, Share, Turn, TurnOfEach
from .unread import FRAMING_BYTES, MOST_BESIDE

log = get_logger("penstock.channel")

ENDED = "ended its connection without closing the channel"
"""The predicate of an error about a sender that died."""

MOST_CONTROL = 8192
"""Messages beside its records that a sender may have waiting here: a worker reports ten times a second."""

RELEASE_AT = 32
"""Records whose credit is returned without a request, unless half of the capacity is less."""


class PeerListener(Protocol):
    """Receives the events of senders in their order; implemented by pipelines."""

    def received(self, peer: Peer, record: Any) -> Any:
        """Handle `record`, and return the result for `receive`; None for no record."""
        ...

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Handle the observations of the sender's process."""
        ...

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """Handle the death of the sender; all that it had published was received before."""
        ...

    def closed(self, peer: Peer) -> None:
        """Handle the close of the sender; all that it had sent was received before."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of the connection of a sender that had closed."""
        ...


Notice: TypeAlias = PeerLost | Literal["closed", "disconnected"]
"""The end of a sender: it died, or closed; or it had closed, and now its connection has ended."""

Event: TypeAlias = tuple[Peer, Bundle | Notice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """The configuration of a receiver; see `serve`."""

    capacity: int
    capacity_bytes: int
    members: Members | None
    """Counts senders by name; None if they need no name."""
    max_senders: int
    listener: PeerListener | None
    name: str
    key: ChannelKey | None
    heartbeat_timeout_s: float | None
    tokenizer: TokenizerIdentity | None
    checksum: bool


class RemoteReceiver(AsyncReceiver[R]):
    """The receiving end of a channel from other processes; see `ReceiveChannel`."""

    def __init__(
        self,
        record_type: type[R],
        *,
        transport: str,
        url: str,
        socket: zmq.Socket[bytes],
        config: ReceiverConfig,
    ) -> None:
        self.url = url
        """The URL that senders connect to."""
        self.schema: Schema = record_type.schema
        """The schema of the records."""
        self._assemble = record_type.assemble
        self._transport = transport
        self._socket = socket
        self.config = config
        self._members = config.members
        self._kept_open = False
        self._min_senders = 1
        """Senders that must have joined before the stream may end, where members are not counted."""
        self._failure: MemberAbsent | None = None
        """A member did not connect, or reconnect, in time: the stream is over."""
        self._absence_timer: asyncio.TimerHandle | None = None
        """Fires when the time of an absent member is over."""
        self._end_reported = False
        """True once `receive` has raised EndOfStream."""
        self.most_waiting: Share = Share(
            config.capacity + MOST_CONTROL, config.capacity_bytes + MOST_BESIDE * config.capacity + LARGEST_MESSAGE
        )
        """The most that a sender that keeps to its credit may have waiting here: records, and other messages."""
        self.peers: dict[bytes, Peer] = {}
        """Admitted senders, by the identity of their ZeroMQ socket."""
        self.rejections: RejectionCounter = RejectionCounter(url)
        self.admission: Admission = Admission(
            self.peers,
            transport=transport,
            kind=self.schema.kind,
            max_senders=config.max_senders,
            tokenizer=config.tokenizer,
        )
        self.on_unknown: Callable[[bytes, Frames], None] | None = None
        """Handles the messages of a ZeroMQ connection that belongs to no admitted sender; None to reject them."""
        self._listener = config.listener
        self._arrivals: deque[Event] = deque()
        """Bundles and ends of senders, in order of arrival, that `_next` has not finished."""
        self._index = 0
        """Records of the first bundle that were taken already."""
        self._queued = 0
        """Records that arrived and were not taken yet."""
        self._received = 0
        self._waiting = Waiters()
        self._clock = WaitClock()
        self._until_checkpoint = CHECKPOINT_EVERY
        self._credit_returner = CreditReturner(self.send)
        self._release_at = min(RELEASE_AT, -(-config.capacity // 2))
        """Records whose credit is returned without a request: every message wakes the sender once."""
        self._drain_scheduled = False
        """True while a drain of the socket is scheduled, whatever its descriptor reports."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._resources = AsyncExitStack()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<RemoteReceiver {self.url}: {state}, {len(self.peers)} senders, {self._received} received>"

    @property
    def rejected(self) -> int:
        """Return the number of rejected connections and messages: unknown peers, other versions, invalid bytes."""
        return self.rejections.count

    # -- admitting senders -------------------------------------------------------------------------------------------

    def start_accepting(self, resources: AsyncExitStack) -> None:
        """Admit senders from now on. Owns `resources`, the acceptor among them, and closes them when it is closed."""
        self._resources = resources
        if self._members is not None:
            self._members.open(self._loop.time())
            self._schedule_absence()

    def check(self, request: Connect) -> None:
        """Check that a sender may join, before it is granted a place; see `Members.check`."""
        if self._members is not None:
            if self._end_reported and self._listener is None:
                raise PeerClosed("the stream has ended: every member is done")
            self._members.check(request.name, request.pid)

    def admit(self, request: Connect, control: PeerControl, reader: PayloadReader) -> Peer:
        """Admit a sender that was granted a place.

        Raises:
            PenstockError: as `check`, if another sender took its name meanwhile.
        """
        self.check(request)
        self.admission.joined += 1
        peer = self.peers[request.identity] = Peer(request, self._credit_returner.schedule, self._release_at, self.send)
        peer.control, peer.reader = control, reader
        if self._members is not None:
            self._members.join(request.name, request.pid, self._loop.time())
            self._schedule_absence()
        return peer

    def accept_message(self, endpoint: str, slot_bytes: int) -> Accept:
        """Return the message that grants a sender its place."""
        return Accept(
            PROTOCOL_VERSION,
            endpoint,
            self.config.name,
            self.config.capacity,
            self.config.capacity_bytes,
            slot_bytes,
            self.config.checksum,
            self._members is not None,
        )

    def keep_open(self) -> None:
        """Keep the stream from ending by itself until `let_end`, however many senders connect and disconnect."""
        self._kept_open = True

    def wake_through(self, waiters: Waiters) -> None:
        """Wake the tasks of `waiters` from now on: they receive from several receivers. No task may wait here yet."""
        self._waiting = waiters

    def let_end(self) -> None:
        """Let the stream end as soon as no sender is connected, whether or not any has connected before."""
        self._kept_open, self._min_senders = False, 0
        self._wake()

    # -- handling their messages --------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._drain_scheduled = False
        if not self._closed:
            self._drain(Turn(AT_ONCE))
        self._wake()

    def _wake(self) -> None:
        if self._arrivals or self._failure is not None or self._ended():
            self._waiting.wake_all()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._on_readable)

    def drain(self) -> bool:
        """Handle all messages that have arrived from senders within their credit, however fast more arrive.

        Returns:
            Whether all those of others were handled too.
        """
        emptied = self._drain(TurnOfEach(self.most_waiting))
        self._wake()
        return emptied

    def _drain(self, turn: Turn | TurnOfEach) -> bool:
        """Handle the messages that have arrived; those that are left when `turn` is over, when other tasks have run."""
        while not self._socket.closed:
            # There are three cases. In none is a message left that will not be noticed: the socket's descriptor is
            # edge-triggered, reports each message once, and any use of the socket may consume the report.
            #
            # 1. So many messages were handled that other tasks must run: draining is scheduled to go on.
            # 2. No message is left: the descriptor reports the next one.
            # 3. A message is left: it is handled.
            if turn.over:
                self._schedule_drain()
                return False
            if not int(self._socket.getsockopt(EVENTS)) & POLLIN:
                return True
            identity, *frames = receive_frames(self._socket)
            self._handle(identity.bytes, frames)
            if turn.spend(identity.bytes, len(frames[0])):
                self._refuse_flood(identity.bytes, turn.share)
        return True

    def _refuse_flood(self, identity: bytes, share: Share) -> None:
        """Disconnect a peer with more handled in one turn than may wait."""
        peer = self.peers.get(identity)
        if peer is not None and peer.open:
            error = ProtocolMismatch(f"expected at most {share.nbytes} bytes of messages at a time, got more")
            self.disconnect_for_error(peer, error)

    def _handle(self, identity: bytes, frames: Frames) -> None:
        peer = self.peers.get(identity)
        if peer is None and self.on_unknown is not None:
            self.on_unknown(identity, frames)
            return
        if peer is not None and peer.awaits_saved:
            self._handle_after_close(peer, frames)
            return
        if peer is None or not peer.open:
            self.rejections.record("a message from an unknown peer")
            return
        nbytes = sum(map(len, frames))
        peer.inflow.handled += nbytes + FRAMING_BYTES * len(frames)
        with DisconnectOnError(self.disconnect_for_error, peer):
            message = decode_of_sender(frames[0].buffer)
            peer.counts.received += not isinstance(message, MessageCount)
            match message:
                case MessageCount():
                    peer.counts.check(message)
                    peer.counts.answer_due = True
                case Publish(descriptors):
                    self._on_publish(peer, descriptors, frames[1:], nbytes - len(frames[0]))
                case CreditRequest():
                    self._on_credit_request(peer)
                case Telemetry(payload):
                    if self._listener is not None:
                        self._listener.observed(peer, payload)
                case Close(sequence, how):
                    self._on_close(peer, sequence, how)

    def _handle_after_close(self, peer: Peer, frames: Frames) -> None:
        """Accept of a peer that has sent Close("staying") only a Close("done"), when it knows that all is saved.

        It may have missed that, so its reports of messages are answered.
        """
        with suppress(ProtocolMismatch):
            message = decode_of_sender(frames[0].buffer)
            if isinstance(message, MessageCount):
                peer.counts.answer_due = True
                return
            if isinstance(message, Close) and message.how == "done":
                peer.awaits_saved = False
                self.send(peer.identity, CloseAck())
                return
        self.rejections.record("a message after Close")

    def _on_publish(self, peer: Peer, descriptors: tuple[Descriptor, ...], frames: Frames, nbytes: int) -> None:
        peer.connected = True
        for descriptor in descriptors:
            if nbytes > descriptor.nbytes and frames:
                raise StaleDescriptor(f"expected at most {descriptor.nbytes} bytes of columns, got more: {descriptor}")
            self._enqueue(peer, (descriptor, frames))
        self._check_bytes_in_flight(peer)
        in_flight, capacity = peer.sequence - peer.returned, self.config.capacity
        if in_flight > capacity:
            raise ProtocolMismatch(f"expected at most {capacity} records in flight, got {in_flight}")
        if in_flight == capacity:
            self._on_credit_request(peer)

    def _check_bytes_in_flight(self, peer: Peer) -> None:
        most = self.config.capacity_bytes + DEFAULT_SLOT_BYTES
        if peer.nbytes - peer.released_bytes > most:
            peer.collect_releases()
        if (nbytes := peer.nbytes - peer.released_bytes) > most:
            raise ProtocolMismatch(f"expected at most {most} bytes in flight, got {nbytes}")

    def _on_credit_request(self, peer: Peer) -> None:
        """Note that `peer` can use its unreturned credit: it requested it, or has used up its own."""
        peer.credit_requested = True
        if peer.unreturned_credit or peer.releases:
            self._credit_returner.schedule(peer)

    def _enqueue(self, peer: Peer, bundle: Bundle) -> None:
        descriptor = bundle[0]
        if descriptor.records < 1 or descriptor.sequence != peer.sequence + descriptor.records:
            raise StaleDescriptor(f"expected record {peer.sequence + 1} of {peer.name}, got {descriptor}")
        peer.sequence = descriptor.sequence
        peer.nbytes += descriptor.bytes_of(descriptor.records)
        self._queued += descriptor.records
        self._arrivals.append((peer, bundle))

    def _on_close(self, peer: Peer, sequence: int, how: Leaving) -> None:
        if sequence != peer.sequence:
            raise ProtocolMismatch(f"expected Close after record {peer.sequence}, got it after {sequence}")
        peer.open, peer.awaits_saved = False, how == "staying"
        if how == "failed":
            self._mark_absent(peer, f"{peer.name} (pid {peer.pid}) left with an error after record {peer.sequence}")
        elif self._members is not None:
            self._members.done(peer.member)
        if self._listener is not None:
            self._arrivals.append((peer, "closed"))
        self._credit_returner.return_credit(peer)
        self.send(peer.identity, CloseAck())

    def disconnect_for_error(self, peer: Peer, error: Exception) -> None:
        """Treat a peer that violates the protocol as dead, once; the others go on."""
        if peer.violation:
            return
        reason = reason_of(error)
        self.rejections.record(f"{peer.name} (pid {peer.pid}): {reason}", error)
        peer.open = False
        kind, did = PeerLost, "violated the protocol"
        if isinstance(error, ChecksumDiffers):
            kind, did = RecordCorrupted, f"sent records to {self.config.name} that were changed on their way"
        peer.violation = f"{did} and was disconnected: {printable(reason)}"
        lost = kind(f"{peer.name} (pid {peer.pid}) {peer.violation}")
        lost.__cause__ = error
        peer.rejection = Reject(SenderRejected.__name__, str(lost))
        self._lose(peer, lost)
        self.send(peer.identity, peer.rejection)
        peer.control.shutdown_read()

    def reaches(self, peer: Peer) -> bool:
        """Return whether there is a connection to `peer`: only sending shows it, so an empty grant is sent."""
        return self.send(peer.identity, CreditGrant(()))

    def on_disconnect(self, peer: Peer, how: str = ENDED) -> Reject | None:
        """Handle the end of a peer's connection. If it had not closed, it died: take in its records, then report it.

        Args:
            peer: the sender.
            how: the end of the connection, as a predicate after its name; replaced if it was unresponsive.

        Returns:
            The message for the peer itself, in case it still receives, where it was unresponsive.
        """
        self.drain()
        if peer.open:
            peer.open = False
            with DisconnectOnError(self.disconnect_for_error, peer):
                for bundle in peer.reader.recover(peer.sequence):
                    self._enqueue(peer, bundle)
            if not peer.violation:
                self._report_loss(peer, how)
        elif self._listener is not None and not peer.violation:
            self._arrivals.append((peer, "disconnected"))
        self.peers.pop(peer.identity, None)
        peer.gone.set()
        self._waiting.wake_all()
        return peer.rejection

    def _report_loss(self, peer: Peer, how: str) -> None:
        """Report the death of a peer that had not closed, or that it is unresponsive, after all that it has sent."""
        how = UNRESPONSIVE.format(peer.unresponsive_s) if peer.unresponsive_s else how
        error = PeerLost(f"{peer.name} (pid {peer.pid}) {how} after record {peer.sequence}")
        self._lose(peer, error)
        if not peer.dismissed:
            log.warning("peer_lost", peer=peer.name, pid=peer.pid, records=peer.sequence, reason=how)
        peer.rejection = Reject(SenderTimedOut.__name__, str(error)) if peer.unresponsive_s else None

    def _lose(self, peer: Peer, error: PeerLost) -> None:
        self._arrivals.append((peer, error))
        self._mark_absent(peer, str(error))

    def _mark_absent(self, peer: Peer, how: str) -> None:
        """Note that a member is absent, because its connection ended before it was done."""
        if self._members is not None:
            self._members.lose(peer.member, how, self._loop.time())
            self._schedule_absence()

    def _schedule_absence(self) -> None:
        """Schedule the end of the wait for absent members."""
        if self._absence_timer is not None:
            self._absence_timer.cancel()
        self._absence_timer = None
        if self._members is not None and not math.isinf(self._members.due_s):
            self._absence_timer = self._loop.call_at(self._members.due_s, self._expire_absent, self._members)

    def _expire_absent(self, members: Members) -> None:
        for error in members.expire(self._loop.time()):
            log.warning("member_absent", reason=str(error))
            if members.on_absence == "fail" and not self._end_reported:
                self._failure = self._failure or error
        self._schedule_absence()
        self._wake()

    # -- sending to them ---------------------------------------------------------------------------------------------

    def send(self, identity: bytes, message: Message) -> bool:
        """Send, and drain soon: sending may hide that a message has arrived.

        Returns:
            Whether the connection still exists. A disconnected peer needs no answer.
        """
        if self._socket.closed:
            return False
        self._schedule_drain()
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        if (peer := self.peers.get(identity)) is not None:
            peer.counts.sent += not isinstance(message, MessageCount)
        return True

    def answer_count(self, peer: Peer) -> None:
        """Send `peer` the number of messages that were sent to it, if it has reported its own."""
        if peer.counts.answer_due:
            peer.counts.answer_due = False
            self.send(peer.identity, peer.counts.report())

    # -- the receiving end -------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        if self._kept_open:
            return False
        if self._members is not None:
            return self._members.all_done
        alive = any(peer.open for peer in self.peers.values())
        return not alive and not self.admission.granted and self.admission.joined >= self._min_senders

    def receive_nowait(self) -> R:
        """Return the next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        if (record := self._receive()) is None:
            raise anyio.WouldBlock
        return record

    def _receive(self) -> R | None:
        """Return the next record, or None without one now."""
        # There are three cases:
        #
        # 1. A record is next, and is returned.
        # 2. A record was next, and yields nothing (it cannot be read, or the listener keeps it): the next one is tried.
        # 3. There is none: the caller waits.
        while (found := self._next()) is not None:
            if (record := self._take(*found)) is not None:
                return record
        return None

    def _next(self) -> tuple[Peer, Bundle] | None:
        """Return the bundle with the next record, or None. Reports the ends of senders before it."""
        if self._closed:
            raise anyio.ClosedResourceError
        while True:
            # There are four cases:
            #
            # 1. A bundle is next. It stays the first of the arrivals until all of its records are taken (`_advance`).
            # 2. The end of a sender is next. All that it published came before, so its end is reported now.
            # 3. Nothing has arrived, here or at the socket, and nothing will: a member is missing for too long, which
            #    is checked first because the stream cannot end properly without it, or the stream has ended.
            # 4. Nothing has arrived, and more may: the caller waits.
            if not self._arrivals:
                self._drain(Turn(AT_ONCE))
            if not self._arrivals:
                if self._failure is not None:
                    raise self._failure
                if self._ended():
                    self._end_reported = True
                    raise anyio.EndOfStream
                return None
            peer, arrival = self._arrivals[0]
            if isinstance(arrival, tuple):
                return peer, arrival
            self._arrivals.popleft()
            self._notify(peer, arrival)

    def _notify(self, peer: Peer, notice: Notice) -> None:
        """Report that a sender died, closed, or disconnected after it had closed."""
        # There are three cases:
        #
        # 1. There is a listener: it is notified of everything.
        # 2. The sender died, and is not counted: `receive` raises, because it is not awaited.
        # 3. It died and is counted, so that it is awaited; or it was dismissed; or it closed, which `_ended` counts.
        listener = self._listener
        if listener is not None:
            with DisconnectOnError(self.disconnect_for_error, peer):
                match notice:
                    case PeerLost():
                        listener.lost(peer, notice)
                    case "closed":
                        listener.closed(peer)
                    case "disconnected":
                        listener.disconnected(peer)
        elif isinstance(notice, PeerLost) and self._members is None and not peer.dismissed:
            raise notice

    def _take(self, peer: Peer, bundle: Bundle) -> R | None:
        """Take the next record of a bundle; None if there is no record to return."""
        # There are three cases:
        #
        # 1. The record cannot be read: its sender is disconnected for the error, and the rest of the bundle is dropped.
        # 2. There is a listener: it decides what is returned, which may be nothing. Where it raises, as 1.
        # 3. There is none: the record is returned.
        record: R | None = None
        with DisconnectOnError(self.disconnect_for_error, peer):
            record = self._assemble(*peer.reader.fetch(bundle, self._index, peer.release))
        if record is None:
            self._advance(peer, bundle, bundle[0].records - self._index)
            return None
        self._received += 1
        self._advance(peer, bundle, 1)
        if peer.releases:
            peer.collect_releases()
            if peer.credit_due:
                self._credit_returner.return_credit(peer)
        if self._listener is not None:
            received, record = record, None
            with DisconnectOnError(self.disconnect_for_error, peer):
                record = self._listener.received(peer, received)
        return record

    def _advance(self, peer: Peer, bundle: Bundle, records: int) -> None:
        """Advance past some records of the first bundle."""
        peer.taken += records
        self._queued -= records
        self._index += records
        if self._index == bundle[0].records:
            self._arrivals.popleft()
            self._index = 0

    async def receive(self) -> R:
        """Return the next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            await self._checkpoint()
        while (record := self._receive()) is None:
            await self._wait()
        return record

    async def _wait(self) -> None:
        with self._clock.waiting("record"):
            if not self.ready_to_receive():
                await self._waiting.wait()

    def ready_to_receive(self) -> bool:
        """Return the credit that senders may use, and whether `receive_nowait` may succeed now."""
        self._credit_returner.flush_all()
        return bool(self._arrivals) or self._failure is not None or self._ended()

    async def _checkpoint(self) -> None:
        """Let other tasks run, and allow a cancellation before a record moves."""
        self._until_checkpoint = CHECKPOINT_EVERY
        await anyio.lowlevel.checkpoint()

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of this end."""
        peers = [peer for peer in self.peers.values() if peer.open]
        for peer in peers:
            peer.collect_releases()
        return ChannelStatistics(
            transport=self._transport,
            capacity=self.config.capacity * max(1, len(peers)),
            items=sum(peer.sequence - peer.returned - peer.unreturned_records for peer in peers),
            capacity_bytes=self.config.capacity_bytes * max(1, len(peers)),
            nbytes=sum(peer.nbytes - peer.released_bytes for peer in peers),
            sent=self._received + self._queued,
            received=self._received,
            senders=len(peers),
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )

    async def aclose(self) -> None:
        """Close this end; senders get PeerClosed. Closing twice is fine."""
        if self._closed:
            return
        for peer in self.peers.values():
            self._credit_returner.return_credit(peer)
        self._on_readable()
        self._closed = True
        self._credit_returner.close()
        self._loop.remove_reader(self._fd)
        if self._absence_timer is not None:
            self._absence_timer.cancel()
        self._waiting.wake_all()
        with anyio.CancelScope(shield=True):
            try:
                for peer in list(self.peers.values()):
                    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        if not peer.open and not peer.violation:
                            # again: the CloseAck that was sent before may arrive too late
                            await peer.control.send(CloseAck())
                        await peer.control.send(Closed())
            finally:  # a shield stops anyio's cancellations, not asyncio's own, such as that of Ctrl-C
                try:
                    await self._resources.aclose()
                finally:
                    self._socket.close()
                    # With the peers, their segments are unmapped now, not when cycles are collected.
                    self._arrivals.clear()
                    self.peers.clear()
