"""The senders of a channel over tcp, at the acceptor of its port.

A connection that has not sent Connect holds no place. Messages of an admitted sender go to the receiver directly.
"""

from __future__ import annotations

import asyncio

import zmq

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Connect, Message, Ready, Reject
from .heartbeat import DAMAGED, timeout_with
from .message_counts import MessageCounts
from .peer import Peer
from .peers import ENDED, Peers
from .tcp_acceptor import Connection, TcpAcceptor
from .tcp_connection import TcpConnection
from .transport import Frames, PayloadReader
from .unread import Inflow


class _Sender:
    """A sender that was granted a place: a `Session`, and the `PeerControl` of its peer."""

    def __init__(self, senders: TcpSenders, connection: Connection, request: Connect) -> None:
        self.inflow: Inflow
        self.most_unread = senders.peers.most_waiting.nbytes
        self.timeout_s = timeout_with(request.ping_s, senders.peers.config.heartbeat_timeout_s)
        self.holds_place = True
        self.peer: Peer | None = None
        """Set when it is admitted."""
        self._senders = senders
        self._peers = senders.peers
        self._connection = connection
        self._request = request
        self._peers.attendance.granted += 1

    @property
    def open(self) -> bool:
        return self.peer is not None and self.peer.open

    async def send(self, message: Message) -> None:
        self._peers.send(self._request.identity, message)

    def shutdown_read(self) -> None:
        self._senders.acceptor.close_soon(self._connection)

    def on_admitted(self, tcp: TcpConnection, answer: Ready) -> None:
        del tcp, answer  # its key was proved before
        self._free_place()
        self.peer = self._peers.admit(self._request, self, self._senders.reader)
        self.inflow = self.peer.inflow
        self._peers.send(self.peer.identity, Ready())
        self.peer.counts = MessageCounts()

    def on_message(self, message: Message) -> None:
        """Count a message that the receiver did not take: the sender has been taken off."""
        del message
        self._peers.rejections.record("a message from an unknown peer")

    def on_check(self) -> None:
        if self.peer is not None and self.peer.counts.answer_due:
            self.peer.counts.answer_due = False
            self.peer.send(self.peer.counts.report())

    def on_error(self, error: Exception) -> None:
        if self.peer is not None:
            self._peers.disconnect_for_error(self.peer, error)

    def on_unresponsive(self) -> None:
        if self.peer is None:
            return
        self.peer.unresponsive_s = self.timeout_s
        rejection = self._peers.on_disconnect(self.peer)
        if rejection is not None:
            self._peers.send(self.peer.identity, rejection)
        self.shutdown_read()

    def on_end(self, *, damaged: bool) -> None:
        loop = asyncio.get_running_loop()
        if self.peer is not None:
            self._senders.ending += 1
            loop.call_soon(self._disconnected, self.peer, DAMAGED if damaged else ENDED)
        elif self.holds_place:
            self._free_place()
            loop.call_soon(self._peers.drain)  # the stream may have waited only for it

    def _disconnected(self, peer: Peer, how: str) -> None:
        if self._peers.admitted.get(peer.identity) is peer and not self._senders.acceptor.closed:
            self._peers.on_disconnect(peer, how)
        self._senders.ending -= 1  # only now: taking it off drains the socket, where a Connect may wait

    def _free_place(self) -> None:
        if self.holds_place:
            self.holds_place = False
            self._peers.attendance.granted -= 1


class TcpSenders:
    """Admits senders to a receiver: the `Service` of its port."""

    first = Connect

    def __init__(self, peers: Peers, socket: zmq.Socket[bytes], reader: PayloadReader, port: int) -> None:
        self.peers = peers
        self.reader = reader
        self.ending = 0
        """Senders whose connection has ended, and whose end is scheduled."""
        self.drain, self.send = peers.drain, peers.send
        self.acceptor = TcpAcceptor(
            self,
            socket,
            port,
            rejections=peers.rejections,
            heartbeat_timeout_s=peers.config.heartbeat_timeout_s,
            places=peers.config.max_senders,
        )
        peers.on_unknown = self._on_unknown

    def __repr__(self) -> str:
        return f"<TcpSenders: {self.acceptor!r}, {self.peers.attendance!r}>"

    def _on_unknown(self, identity: bytes, frames: Frames) -> None:
        """Take a step of a handshake."""
        self.acceptor.read_events()
        if self.ending:  # a member that was restarted returns once its former connection is taken off
            asyncio.get_running_loop().call_soon(self.acceptor.handle, identity, frames)
        else:
            self.acceptor.handle(identity, frames)

    def begin(self, connection: Connection, identity: bytes, request: Connect) -> tuple[_Sender, Message] | Reject:
        """Grant a sender its place."""
        if request.identity != identity:
            raise ProtocolMismatch("expected a Connect with the sender's own identity, got another")
        rejection = self.peers.attendance.rejection(request)
        if rejection is not None:
            return rejection
        self.peers.attendance.check(request)
        return _Sender(self, connection, request), self.peers.accept_message("", 0)
