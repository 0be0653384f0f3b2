"""The requirements of the ends of a channel on a connection, by transport, beside the ZeroMQ socket for records.

Over shm it is a Unix socket of its own (`control_connection`), over tcp the one connection that carries everything
(`tcp_control`). Knows neither records nor credit.
"""

from __future__ import annotations

from typing import Protocol

from ..._schemas.control import Message
from ..errors import PeerLost


class Conversation(Protocol):
    """One end of a connection that carries messages in both directions."""

    async def send(self, message: Message) -> None:
        """Send `message`.

        Raises:
            anyio.BrokenResourceError: the connection has ended.
        """
        ...

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the connection has ended.
            ProtocolMismatch: the received bytes are no message.
        """
        ...


class SenderControl(Protocol):
    """Detects, for a sender, that its receiver has closed, died or become unresponsive."""

    async def next_event(self, receiver: str) -> Message | PeerLost:
        """Return the next message that arrives beside the ZeroMQ socket; at the end, the reason why sending has ended.

        `receiver` names the other end.
        """
        ...

    def disconnected(self) -> None:
        """Note that ZeroMQ has no connection any more; from now on `next_event` returns the end soon."""
        ...

    def delivered_bytes(self) -> int:
        """Return the bytes that have reached the receiver's host on this connection; 0 if they are not counted."""
        ...

    async def aclose(self) -> None:
        """Close this side."""
        ...


class PeerControl(Protocol):
    """The connection of a sender, as its receiver uses it."""

    async def send(self, message: Message) -> None:
        """Send `message`.

        Raises:
            anyio.BrokenResourceError, anyio.ClosedResourceError: the connection has ended.
        """
        ...

    def shutdown_read(self) -> None:
        """End the connection from this side, once all earlier messages have left."""
        ...
