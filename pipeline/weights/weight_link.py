"""A mirror's connection to a publisher on another host: the handshake, then messages, which both ends count."""

from __future__ import annotations

import hmac
import secrets
import socket as sockets
from contextlib import suppress
from functools import partial
from os import getpid
from typing import Self

import anyio
import anyio.to_thread

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Message,
    MessageCount,
    Ready,
    Reject,
    Subscribe,
    WeightLayout,
    printable,
)
from ..accounting.telemetry import get_logger
from ..channels.handshake import NOT_SERVED, handshake_timeout
from ..channels.keys import NONCE_BYTES
from ..channels.message_counts import MessageCounts, count_interval_s
from ..channels.tcp_address import resolved
from ..channels.tcp_control import TcpControl, connected
from ..errors import PeerClosed, PeerLost, StaleHandle
from ..util.file_descriptors import available
from ..util.retry_pace import LAST_RETRY_S
from .weight_address import WeightAddress

log = get_logger("penstock.weights")

LINK_DESCRIPTORS = 8
"""Those of a connection: after a cut they may have been taken meanwhile."""


class WeightLink:
    """A connection to the publisher."""

    def __init__(self, control: TcpControl, layout: WeightLayout, address: WeightAddress) -> None:
        self.address = address
        self.layout = layout
        self._counts = MessageCounts()
        """Of the messages after the handshake."""
        self._count_interval_s = count_interval_s(address.heartbeat_timeout_s)
        self._used = False
        """True once a message came on it after the handshake."""
        self._opened_s = anyio.current_time()
        self._control = control

    @classmethod
    async def open(cls, address: WeightAddress) -> Self:
        """Connect, and complete the handshake.

        Raises:
            NobodyListens: no publisher answers at the address.
            PeerClosed: the publisher has another key.
            StaleHandle: another publisher answers.
            ProtocolMismatch: the publisher has another protocol version.
            OutOfFileDescriptors: this process has too few left.
        """
        available(LINK_DESCRIPTORS, "weights of another host")
        timeout_s = address.heartbeat_timeout_s
        with handshake_timeout(timeout_s, address.url):
            resolve = partial(resolved, address.url, address.key, encrypted=not address.trusted_link)
            place = await anyio.to_thread.run_sync(resolve)
        identity = b"m" + secrets.token_bytes(15)
        control = await connected(address.url, place, identity, timeout_s)
        try:
            with handshake_timeout(timeout_s, address.url, NOT_SERVED):
                name = f"mirror on {sockets.gethostname()}"[:100]
                nonce = secrets.token_bytes(NONCE_BYTES)
                await control.send(Subscribe(PROTOCOL_VERSION, name, getpid(), nonce))
                layout = _layout(await control.receive(), address, nonce)
                await control.send(Ready(address.key.proof("sender", layout.nonce, nonce)))
                _confirmed(await control.receive(), address)
        except BaseException as error:
            await control.aclose()
            ended = isinstance(error, anyio.EndOfStream | anyio.BrokenResourceError)
            if ended and not isinstance(error, PeerClosed):
                raise PeerLost(f"the publisher at {address.url} closed the connection in the handshake") from None
            raise
        return cls(control, layout, address)

    @property
    def worked(self) -> bool:
        """Return whether it is a cut that ended it, and not its publisher at once."""
        return self._used or anyio.current_time() > self._opened_s + LAST_RETRY_S

    async def send(self, message: Message) -> None:
        """Send `message`.

        Raises:
            anyio.BrokenResourceError: the connection has ended.
        """
        await self._control.send(message)
        self._counts.sent += 1

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the connection has ended, or a message of the publisher was lost on it.
            ProtocolMismatch: it is no message.
        """
        while True:
            message = await self._control.receive()
            self._used = True
            if not isinstance(message, MessageCount):
                self._counts.received += 1
                return message
            if not self._counts.complete(message):
                log.warning("weights_message_lost", expected=message.sent, received=self._counts.received)
                raise anyio.EndOfStream

    async def report_counts(self) -> None:
        """Send the number of messages that were sent, until the connection ends; the publisher answers with its own."""
        with suppress(anyio.BrokenResourceError):  # `receive` ends too
            while True:
                await anyio.sleep(self._count_interval_s)
                await self._control.send(self._counts.report())

    async def aclose(self) -> None:
        """Close the connection. Closing twice is fine."""
        await self._control.aclose()


def _layout(answer: Message, address: WeightAddress, nonce: bytes) -> WeightLayout:
    _accepted(answer, address)
    if not isinstance(answer, WeightLayout):
        raise ProtocolMismatch(f"expected a WeightLayout, got {type(answer).__name__}")
    if not hmac.compare_digest(answer.proof, address.key.proof("receiver", answer.nonce, nonce, answer.header)):
        raise PeerClosed(f"expected a publisher at {address.url} with the key of these weights, got one with another")
    if answer.generation != address.generation:
        raise StaleHandle(
            f"expected weights of publisher {address.generation:x} at {address.url}, got those of "
            f"{answer.generation:x}: use the address that the present one serves"
        )
    return answer


def _accepted(answer: Message, address: WeightAddress) -> None:
    if isinstance(answer, Reject):
        raise ProtocolMismatch(f"the publisher at {address.url} refused: {printable(answer.reason)}")


def _confirmed(answer: Message, address: WeightAddress) -> None:
    _accepted(answer, address)
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"expected Ready, got {type(answer).__name__}")
