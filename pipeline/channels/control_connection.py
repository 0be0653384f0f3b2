"""A door: the stream socket at which a peer introduces itself, may hand over a file descriptor, and stays for life.

One frame is a 4-byte length and a message. When a process dies, however it dies, the kernel closes its end, and the
other side knows within a millisecond: the end of the stream is the notice of death, no timeout has to run out.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream, UNIXSocketStream
from anyio.lowlevel import checkpoint

from ..._schemas.control import Message, decode, encode
from ..errors import OutOfFileDescriptors, ProtocolMismatch
from ..os_errors import EXHAUSTED, RAISE_LIMIT
from .protocols import AsyncCloseable

__all__ = ["ControlConnection", "connect_control", "serve_control"]

_LENGTH = struct.Struct("<I")

MOST_FDS = 4
"""File descriptors that may wait to be taken: one comes with an introduction, more are an attempt on this process."""

LARGEST_FRAME = 64 * 1024
"""Bytes: what is said at a door is short. A longer frame is nonsense, and is refused before it is read."""

ACCEPT_RETRY_S = 0.1
"""How long nobody is let in when this process has no file descriptor left: one that ends is no event to wait for."""

BACKLOG_RETRY_S = 0.01
"""How often is looked whether there is room at a door where many wait to be let in: the kernel does not tell."""

_NO_MORE = EXHAUSTED | {errno.ENOBUFS, errno.ENOMEM}

_CREDENTIALS = struct.Struct("3i")


class ControlConnection(AsyncCloseable):
    """One side of a connection. Knows frames and file descriptors, not what is said."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._raw: socket.socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 (of anyio, not of Django)
        self._buffer = bytearray()
        self._fds: list[int] = []

    async def aclose(self) -> None:
        """Close this side, and the file descriptors that nobody took."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._raw.fileno() >= 0:
            anyio.notify_closing(self._raw)
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)

    def shutdown_read(self) -> None:
        """Hear nothing more from the other side, which may not know yet: `receive` meets the end of the stream."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RD)

    @property
    def same_user(self) -> bool:
        """Whether the other side runs under this process' user."""
        credentials = self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        return bool(uid == os.getuid())

    async def send(self, message: Message, fd: int | None = None) -> None:
        """Send `message`, and `fd` with it.

        Raises:
            anyio.BrokenResourceError: the other side is gone.
        """
        body = encode(message)
        await self._send(_LENGTH.pack(len(body)) + body, [] if fd is None else [fd])

    async def _send(self, frame: bytes, fds: list[int]) -> None:
        """Like `_receive_fds`, on the raw socket for the same reason."""
        await checkpoint()
        while frame:
            try:
                sent = socket.send_fds(self._raw, [frame], fds)
            except BlockingIOError:
                await anyio.wait_writable(self._raw)
            except OSError as error:
                raise anyio.BrokenResourceError from error
            else:
                frame, fds = frame[sent:], []

    async def receive(self) -> Message:
        """The next message.

        Raises:
            anyio.EndOfStream: the other side closed, or died.
            ProtocolMismatch: what came is no message.
        """
        while (frame := self._next_frame()) is None:
            self._buffer += await self._receive()
        return decode(frame)

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > LARGEST_FRAME:
            raise ProtocolMismatch(f"expected a frame of at most {LARGEST_FRAME} bytes at the door, got {length}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    async def _receive(self) -> bytes:
        try:
            received = await self._receive_fds()
        except (anyio.BrokenResourceError, ConnectionError):  # a reset is an end like any other
            raise anyio.EndOfStream from None
        if not received:
            raise anyio.EndOfStream
        return received

    async def _receive_fds(self) -> bytes:
        """On the raw socket: the stream's own methods, cancelled in the moment that bytes arrive, upset the event loop.

        (anyio 4.16: the reader's callback settles a future that is already cancelled.)
        """
        await checkpoint()
        while True:
            try:
                received, fds, flags, _ = socket.recv_fds(self._raw, LARGEST_FRAME, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await anyio.wait_readable(self._raw)
            else:
                if flags & socket.MSG_CTRUNC and not fds:  # the kernel drops one for which this process has no number
                    raise OutOfFileDescriptors(f"expected room for one more open file, got none: {RAISE_LIMIT}")
                self._fds += fds
                if len(self._fds) > MOST_FDS:
                    raise ProtocolMismatch(f"expected {MOST_FDS} file descriptors at most, got {len(self._fds)}")
                return received

    def take_fd(self) -> int | None:
        """The file descriptor that came with the last messages; the caller closes it."""
        return self._fds.pop(0) if self._fds else None


async def connect_control(path: Path) -> ControlConnection:
    """The door at `path`, from outside; where many wait there, when there is room.

    Raises:
        OSError: there is none, or nobody behind it.
    """
    raw = socket.socket(socket.AF_UNIX)
    try:
        raw.setblocking(False)
        while True:
            try:
                raw.connect(str(path))
                return ControlConnection(await UNIXSocketStream.from_socket(raw))
            except BlockingIOError:
                await anyio.sleep(BACKLOG_RETRY_S)
    except BaseException:
        raw.close()
        raise


async def serve_control(
    listener: Listener[SocketStream],
    accept: Callable[[ControlConnection], Awaitable[None]],
    refused: Callable[[str], object],
) -> None:
    """Attend to whoever comes, for ever, each in a task; `refused` is told when there is no descriptor for anyone."""

    async def open_and_attend(stream: SocketStream) -> None:
        async with ControlConnection(stream) as connection:
            await accept(connection)

    async with anyio.create_task_group() as tasks:
        while True:
            try:
                await listener.serve(open_and_attend, tasks)
            except* (OSError, anyio.BrokenResourceError) as failed:
                _, others = failed.split(_out_of_descriptors)
                if others is not None:
                    raise others from None
            refused(f"no file descriptor is left for who comes: {RAISE_LIMIT}")
            await anyio.sleep(ACCEPT_RETRY_S)


def _out_of_descriptors(error: BaseException) -> bool:
    """Whether a listener failed for want of a file descriptor; anyio's for Unix sockets hides what the kernel said."""
    reason = error.__cause__ if isinstance(error, anyio.BrokenResourceError) else error
    return isinstance(reason, OSError) and reason.errno in _NO_MORE
