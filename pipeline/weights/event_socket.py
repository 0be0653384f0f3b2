"""`EventSocket`: a ZeroMQ socket that one task receives on while others send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import zmq

from ..channels.transport import EVENTS, POLLIN, POLLOUT, receive_frames
from ..util.waiting import Waiters


class EventSocket:
    """Sends and receives on a socket that it does not own.

    The descriptor of a ZeroMQ socket reports only changes, and sending may consume one: so sending wakes the receiving
    task as well.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Watch `socket` until `close`."""
        self._socket = socket
        self._changed = Waiters()
        self._ends = socket.type == zmq.DEALER
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._changed.wake_all)

    def send(self, *frames: bytes) -> None:
        """Send a message.

        Raises:
            anyio.BrokenResourceError: there is no connection to the receiver.
        """
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            raise anyio.BrokenResourceError from None
        finally:
            self._changed.wake_all()

    def receive_nowait(self) -> Sequence[zmq.Frame] | None:
        """Return the frames of the next message, or None without one now.

        Raises:
            anyio.EndOfStream: the connection of a DEALER has ended.
        """
        events = int(self._socket.getsockopt(EVENTS))
        if events & POLLIN:
            return receive_frames(self._socket)
        if self._ends and not events & POLLOUT:
            raise anyio.EndOfStream
        return None

    async def receive(self) -> Sequence[zmq.Frame]:
        """Return the frames of the next message.

        Raises:
            anyio.EndOfStream: the connection of a DEALER has ended.
        """
        while (message := self.receive_nowait()) is None:
            await self._changed.wait()
        return message

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_reader(self._fd)
