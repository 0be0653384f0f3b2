"""A ROUTER socket in the event loop: no message that arrives stays unnoticed, and other tasks run between many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from ..._schemas.control import Message, encode
from .transport import EVENTS, POLLIN, Frames, receive_frames
from .turns import AT_ONCE, Turn, TurnOfEach


class RouterSocket:
    """Calls `handle` with each message of a socket that it does not own, and then `handled`, until `unwatch`."""

    def __init__(
        self, socket: zmq.Socket[bytes], handle: Callable[[bytes, Frames], None], handled: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._handle, self._handled = handle, handled
        self._drain_scheduled = False
        """True while a drain of the socket is scheduled, whatever its descriptor reports."""
        self._watched = True
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        self._drain_scheduled = False
        if self._watched:
            self.drain()
        self._handled()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._on_readable)

    def drain(self, turn: Turn | TurnOfEach | None = None) -> bool:
        """Handle the messages that have arrived; those that are left when `turn` is over, when other tasks have run.

        Returns:
            Whether none is left.
        """
        turn = turn or Turn(AT_ONCE)
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
            turn.spend(identity.bytes, len(frames[0]))
        return True

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
        return True

    def unwatch(self) -> None:
        """Wait for messages no more; `drain` still handles those that arrive."""
        self._watched = False
        self._loop.remove_reader(self._fd)
