"""The control connection: a stream socket for the handshake of a peer, open as long as the peer lives.

A frame is a 4-byte length and a message. When a process dies, however it dies, the kernel closes its end, and the other
side detects this within a millisecond: the end of the stream is the notice of death, no timeout has to expire.
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
from ..util.os_errors import EXHAUSTED, RAISE_LIMIT
from .protocols import AsyncCloseable
from .rejections import DisconnectOnError, RejectionCounter
from .tcp_connection import unread_of

_LENGTH = struct.Struct("<I")

MOST_FDS = 4
"""File descriptors that may wait to be taken: a handshake sends one, more are an attack on this process."""

LARGEST_FRAME = 64 * 1024
"""Bytes: control messages are short. A longer frame is invalid, and is rejected before it is read."""

ACCEPT_RETRY_S = 0.1
"""Pause in accepting connections when this process has no file descriptor left: a freed one gives no signal."""

BACKLOG_RETRY_S = 0.01
"""Pause between attempts at a connection while the listener's backlog is full: the kernel does not signal room."""

_NO_MORE = EXHAUSTED | {errno.ENOBUFS, errno.ENOMEM}

_CREDENTIALS = struct.Struct("3i")


class ControlConnection(AsyncCloseable):
    """One side of a connection. Knows frames and file descriptors, not the meaning of messages."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._raw: socket.socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 (of anyio, not of Django)
        self._buffer = bytearray()
        self._fds: list[int] = []

    async def aclose(self) -> None:
        """Close this side, and the file descriptors that were not taken."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._raw.fileno() >= 0:
            anyio.notify_closing(self._raw)
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)

    def shutdown_read(self) -> None:
        """Stop receiving, without notice to the other side: `receive` reaches the end of the stream."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RD)

    @property
    def unread(self) -> int:
        """Return the bytes that have arrived and were not received here."""
        return unread_of(self._raw)

    @property
    def same_user(self) -> bool:
        """Return whether the other side runs under this process' user."""
        credentials = self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        return bool(uid == os.getuid())

    async def send(self, message: Message, fd: int | None = None) -> None:
        """Send `message`, and `fd` with it.

        Raises:
            anyio.BrokenResourceError: the other side has disconnected.
        """
        body = encode(message)
        await self._send(_LENGTH.pack(len(body)) + body, [] if fd is None else [fd])

    async def _send(self, frame: bytes, fds: list[int]) -> None:
        """Send on the raw socket, for the same reason as `_receive_fds`."""
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
        """Return the next message.

        Raises:
            anyio.EndOfStream: the other side closed, or died.
            ProtocolMismatch: the received bytes are no message.
        """
        while (frame := self._next_frame()) is None:
            self._buffer += await self._receive()
        return decode(frame)

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > LARGEST_FRAME:
            raise ProtocolMismatch(f"expected a control message of at most {LARGEST_FRAME} bytes, got {length}")
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
        """Receive on the raw socket: the stream's methods fail if they are cancelled at the moment when bytes arrive.

        (anyio 4.16: the reader's callback sets the result of a future that is already cancelled.)
        """
        await checkpoint()
        while True:
            try:
                received, fds, flags, _ = socket.recv_fds(self._raw, LARGEST_FRAME, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await anyio.wait_readable(self._raw)
            else:
                if flags & socket.MSG_CTRUNC and not fds:  # the kernel drops one if this process is at its limit
                    raise OutOfFileDescriptors(f"expected room for one more open file, got none: {RAISE_LIMIT}")
                self._fds += fds
                if len(self._fds) > MOST_FDS:
                    raise ProtocolMismatch(f"expected {MOST_FDS} file descriptors at most, got {len(self._fds)}")
                return received

    def take_fd(self) -> int | None:
        """Return the file descriptor that was received with the last messages, or None; the caller closes it."""
        return self._fds.pop(0) if self._fds else None


async def connect_control(path: Path) -> ControlConnection:
    """Connect to the receiver that listens at `path`, waiting while its backlog is full.

    Raises:
        OSError: there is no such socket, or no process listens.
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
    rejections: RejectionCounter,
) -> None:
    """Accept connections for ever, each in a task that handles its messages.

    Count in `rejections` those that find no file descriptor left, and those whose handler raises.
    """

    async def open_and_accept(stream: SocketStream) -> None:
        async with ControlConnection(stream) as connection:
            with DisconnectOnError(rejections.record_error):
                await accept(connection)

    async with anyio.create_task_group() as tasks:
        while True:
            try:
                await listener.serve(open_and_accept, tasks)
            except* (OSError, anyio.BrokenResourceError) as failed:
                _, others = failed.split(_out_of_descriptors)
                if others is not None:
                    raise others from None
            rejections.record(f"no file descriptor is left for a new connection: {RAISE_LIMIT}")
            await anyio.sleep(ACCEPT_RETRY_S)


def _out_of_descriptors(error: BaseException) -> bool:
    """Return whether a listener failed for want of a file descriptor; anyio may hide the kernel's error."""
    reason = error.__cause__ if isinstance(error, anyio.BrokenResourceError) else error
    return isinstance(reason, OSError) and reason.errno in _NO_MORE
