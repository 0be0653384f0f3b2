"""A TCP connection that ZeroMQ reads and writes, seen from beside it: what the kernel knows of it, and its end.

ZeroMQ tells which descriptor a message came by, and that a connection has ended, but not why, and it closes none on
request. A second descriptor of the same connection can do both. Nothing is read or written by it while ZeroMQ does.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from typing import Self

import anyio

__all__ = ["TcpConnection"]

_ESTABLISHED = 1
_INFO = struct.Struct("8B24I4Q")
"""`struct tcp_info` up to tcpi_bytes_received."""
_LAST_DATA_RECEIVED, _BYTES_RECEIVED = 8 + 11, 8 + 24 + 3


class TcpConnection:
    """A descriptor of our own on the connection that has descriptor `fd` in ZeroMQ."""

    def __init__(self, fd: int) -> None:
        """Raises OSError where `fd` is no connection (any more)."""
        self._fd = fd
        own = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            raise
        self._inode = os.fstat(own).st_ino
        try:
            self.host, self.port = self._socket.getpeername()[:2]
            self.local_port = self._socket.getsockname()[1]
        except (OSError, ValueError, IndexError):
            self._socket.close()
            raise OSError("expected a TCP connection, got another descriptor") from None

    def __repr__(self) -> str:
        return f"<TcpConnection with {self.host} port {self.port}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it, or the kernel has given it up."""
        return self._info()[0] != _ESTABLISHED

    @property
    def held(self) -> bool:
        """Whether ZeroMQ still holds it open."""
        with suppress(OSError):
            return os.fstat(self._fd).st_ino == self._inode
        return False

    @property
    def bytes_received(self) -> int:
        """Bytes that ever came by it."""
        return int(self._info()[_BYTES_RECEIVED])

    @property
    def silent_s(self) -> float:
        """Seconds for which nothing has come; 0 while there is something that ZeroMQ has not read yet."""
        unread = array.array("i", [0])
        fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, unread)
        return 0.0 if unread[0] else self._info()[_LAST_DATA_RECEIVED] / 1000

    def _info(self) -> tuple[int, ...]:
        return _INFO.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))

    def cut(self) -> None:
        """End it, for ZeroMQ too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def finish(self, within_s: float) -> None:
        """Discard what the other side still sends until it has closed; say after `within_s` that nothing more comes.

        ZeroMQ must hold it no more. AsyncCloseable at once would reset the connection, and lose what was said last with
        it. To say at once that nothing more comes would have ZeroMQ on the other side discard what was not read yet.
        """
        with suppress(OSError):
            self._socket.setblocking(False)
            with anyio.move_on_after(within_s):
                await self._discard()
                return
            self._socket.shutdown(socket.SHUT_WR)
            await self._discard()

    async def _discard(self) -> None:
        """Read until the other side has closed."""
        while True:
            await anyio.wait_readable(self._socket)
            if not self._socket.recv(2**16):
                return

    def close(self) -> None:
        """Let go of it. AsyncCloseable twice is fine."""
        self._socket.close()
