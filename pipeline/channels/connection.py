"""What the ends of a channel need of a connection, beside the ZeroMQ socket that records travel on; by transport.

Over shm it is a Unix socket of its own (`door`), over tcp the one connection that carries everything (`tcp_control`).
Knows neither records nor credit.
"""

from __future__ import annotations

from typing import Protocol

from ..._schemas.control import Message
from ..errors import PeerClosed, PeerLost
from .transport import Frames

__all__ = ["Acceptor", "Conversation", "PeerControl", "SenderControl"]


class Conversation(Protocol):
    """The sender's side of a handshake."""

    async def send(self, message: Message, fd: int | None = None) -> None:
        """Send `message`, and `fd` with it where the transport can.

        Raises:
            anyio.BrokenResourceError: the connection has ended.
        """
        ...

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the connection has ended.
            ProtocolMismatch: what came is no message.
        """
        ...


class SenderControl(Protocol):
    """Notices, for a sender, when its receiver has closed, died or fallen silent."""

    close_acknowledged: bool
    """Whether the receiver, as it closed, said that it has heard this sender's goodbye."""

    async def lost(self, receiver: str) -> PeerClosed | PeerLost:
        """Wait until nothing can be sent any more, and return the reason; `receiver` names the other end."""
        ...

    def disconnected(self) -> None:
        """Take note that ZeroMQ has no connection any more; from now on `lost` returns soon."""
        ...

    async def aclose(self) -> None:
        """Close this side."""
        ...


class PeerControl(Protocol):
    """A sender's connection, for its receiver."""

    async def send(self, message: Message) -> None:
        """Send `message`.

        Raises:
            anyio.BrokenResourceError, anyio.ClosedResourceError: the connection has ended.
        """
        ...

    def shutdown_read(self) -> None:
        """End the connection from this side, when what was said before has gone out."""
        ...


class Acceptor(Protocol):
    """Lets senders in, for a receiver, and notices when one has closed, died or fallen silent."""

    def handle_unknown(self, identity: bytes, frames: Frames) -> None:
        """Take a message of a ZeroMQ connection that is no sender's, or not yet."""
        ...

    def admitted(self) -> None:
        """Take note that a sender was let in."""
        ...

    async def aclose(self) -> None:
        """Let nobody in any more, and close the ZeroMQ socket when what was said has gone out."""
        ...
