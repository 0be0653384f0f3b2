"""The senders of a receiver: their messages, and their ends. All transports share it.

An acceptor admits them and detects when one has disconnected. Everything runs on one event loop, except that a lease
may die in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import anyio
import zmq

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Accept,
    Close,
    CloseAck,
    Closed,
    Connect,
    CreditRequest,
    Leaving,
    Message,
    MessageCount,
    Publish,
    Reject,
    Telemetry,
    decode_of_sender,
    printable,
)
from ..._schemas.descriptor import Descriptor
from ..accounting.telemetry import get_logger
from ..errors import PeerLost, RecordCorrupted, SenderRejected, SenderTimedOut, StaleDescriptor
from .arrival_queue import ArrivalQueue
from .attendance import Attendance
from .checksum import ChecksumDiffers
from .connection import PeerControl
from .credit_returns import CreditReturner
from .heartbeat import UNRESPONSIVE
from .peer import Peer
from .receiver_config import ReceiverConfig
from .rejections import DisconnectOnError, RejectionCounter, reason_of
from .router_socket import RouterSocket
from .transport import LARGEST_MESSAGE, Frames, PayloadReader
from .turns import Share, TurnOfEach
from .unread import FRAMING_BYTES, MOST_BESIDE

log = get_logger("penstock.channel")

ENDED = "ended its connection without closing the channel"
"""The predicate of an error about a sender that died."""

MOST_CONTROL = 8192
"""Messages beside its records that a sender may have waiting here: a worker reports ten times a second."""

RELEASE_AT = 32
"""Records whose credit is returned without a request, unless half of the capacity is less."""


class Peers:
    """The senders of a receiver, from the admission of each to the end of its connection; iterates over them."""

    def __init__(
        self, config: ReceiverConfig, socket: zmq.Socket[bytes], wake: Callable[[], None], url: str, kind: str
    ) -> None:
        self.config = config
        self.admitted: dict[bytes, Peer] = {}
        """Senders that have joined, by the identity of their ZeroMQ socket."""
        self.arrivals: ArrivalQueue = ArrivalQueue()
        self.rejections: RejectionCounter = RejectionCounter(url)
        self.attendance: Attendance = Attendance(config, url.partition(":")[0], kind, self.admitted, wake)
        self.router: RouterSocket = RouterSocket(socket, self._handle, wake)
        self.credit: CreditReturner = CreditReturner(self.send)
        self.on_unknown: Callable[[bytes, Frames], None] | None = None
        """Handles the messages of a ZeroMQ connection that belongs to no admitted sender; None to reject them."""
        self.most_waiting: Share = Share(
            config.capacity + MOST_CONTROL, config.capacity_bytes + MOST_BESIDE * config.capacity + LARGEST_MESSAGE
        )
        """The most that a sender that keeps to its credit may have waiting here: records, and other messages."""
        self._listener = config.listener
        self._wake = wake
        """Called when something may have arrived, or the stream ended."""
        self._release_at = min(RELEASE_AT, -(-config.capacity // 2))
        """Records whose credit is returned without a request: every message wakes the sender once."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.admitted.values())

    def __len__(self) -> int:
        return len(self.admitted)

    def admit(self, request: Connect, control: PeerControl, reader: PayloadReader) -> Peer:
        """Admit a sender that was granted a place.

        Raises:
            PenstockError: as `Attendance.check`, if another sender took its name meanwhile.
        """
        self.attendance.check(request)
        peer = self.admitted[request.identity] = Peer(request, self.credit.schedule, self._release_at, self.send)
        peer.control, peer.reader = control, reader
        self.attendance.join(peer)
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
            self.config.members is not None,
        )

    def drain(self) -> bool:
        """Handle all messages that have arrived from senders within their credit, however fast more arrive.

        Returns:
            Whether all those of others were handled too.
        """
        emptied = self.router.drain(TurnOfEach(self.most_waiting, self._refuse_flood))
        self._wake()
        return emptied

    def _handle(self, identity: bytes, frames: Frames) -> None:
        peer = self.admitted.get(identity)
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
                    peer.request_credit()
                case Telemetry(payload):
                    if self._listener is not None:
                        self._listener.observed(peer, payload)
                case Close(sequence, how):
                    self._on_close(peer, sequence, how)

    def _refuse_flood(self, identity: bytes) -> None:
        """Disconnect a peer with more handled in one turn than may wait."""
        peer = self.admitted.get(identity)
        if peer is not None and peer.open:
            reason = f"expected at most {self.most_waiting.nbytes} bytes of messages at a time, got more"
            self.disconnect_for_error(peer, ProtocolMismatch(reason))

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
            self.arrivals.add(peer, (descriptor, frames))
        peer.check_credit(self.config.capacity, self.config.capacity_bytes)

    def _on_close(self, peer: Peer, sequence: int, how: Leaving) -> None:
        if sequence != peer.sequence:
            raise ProtocolMismatch(f"expected Close after record {peer.sequence}, got it after {sequence}")
        peer.open, peer.awaits_saved = False, how == "staying"
        if how == "failed":
            self.attendance.lose(peer, f"{peer.name} (pid {peer.pid}) left with an error after record {peer.sequence}")
        elif self.config.members is not None:
            self.config.members.done(peer.member)
        if self._listener is not None:
            self.arrivals.events.append((peer, "closed"))
        self.credit.return_credit(peer)
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
                    self.arrivals.add(peer, bundle)
            if not peer.violation:
                self._report_loss(peer, how)
        elif self._listener is not None and not peer.violation:
            self.arrivals.events.append((peer, "disconnected"))
        self.admitted.pop(peer.identity, None)
        peer.gone.set()
        self._wake()
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
        self.arrivals.events.append((peer, error))
        self.attendance.lose(peer, str(error))

    def send(self, identity: bytes, message: Message) -> bool:
        """Send; return whether the connection still exists. A disconnected peer needs no answer."""
        sent = self.router.send(identity, message)
        if sent and (peer := self.admitted.get(identity)) is not None:
            peer.counts.sent += not isinstance(message, MessageCount)
        return sent

    # -- closing -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Return all credit, handle what has arrived, and await nothing more."""
        for peer in self:
            self.credit.return_credit(peer)
        self.router.drain()
        self.router.unwatch()
        self.credit.close()
        self.attendance.close()

    async def dismiss_all(self) -> None:
        """Notify all that the channel is closed."""
        for peer in list(self):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                if not peer.open and not peer.violation:
                    await peer.control.send(CloseAck())  # again: the one that was sent before may arrive too late
                await peer.control.send(Closed())

    def clear(self) -> None:
        """Forget all. With the peers, their segments are unmapped now, not when cycles are collected."""
        self.arrivals.events.clear()
        self.admitted.clear()
