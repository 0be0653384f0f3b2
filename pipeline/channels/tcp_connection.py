"""A second descriptor of a TCP connection that ZeroMQ reads and writes: the kernel's state of it, and a way to end it.

ZeroMQ reports the descriptor of a message, and the end of a connection without its reason, and closes no connection on
request. A second descriptor can do both. It is neither read nor written while ZeroMQ does so.
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

_INFO = struct.Struct("8B24I4Q")
"""`struct tcp_info` up to tcpi_bytes_received."""
_STATE, _LAST_DATA_RECEIVED, _BYTES_ACKED, _BYTES_RECEIVED = 0, 8 + 11, 8 + 24 + 2, 8 + 24 + 3

_ESTABLISHED = 1

UNSENT_BYTES = 2**18
"""Bytes that may wait in the kernel to be sent for the first time. More would delay a heartbeat on a slow link for
longer than its answer may take; the kernel keeps up to 4 MB by default."""


def unread_of(connected: socket.socket) -> int:
    """Return the bytes that wait in the kernel for a reader of a socket."""
    unread = array.array("i", [0])
    fcntl.ioctl(connected.fileno(), termios.FIONREAD, unread)
    return unread[0]


class TcpConnection:
    """A duplicate of the descriptor `fd` that ZeroMQ has of a connection."""

    def __init__(self, fd: int) -> None:
        """Duplicate `fd`.

        Raises:
            OSError: `fd` is no connection (any more).
        """
        self._fd = fd
        self._idle_checks = 0
        """Checks in a row that found it idle for too long."""
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
    def held(self) -> bool:
        """Return whether ZeroMQ still holds it open."""
        with suppress(OSError):
            return os.fstat(self._fd).st_ino == self._inode
        return False

    @property
    def established(self) -> bool:
        """Return whether neither side has ended it. Where ZeroMQ holds it no more, ZeroMQ closed it by itself."""
        with suppress(OSError):
            return self._info()[_STATE] == _ESTABLISHED
        return False

    @property
    def bytes_received(self) -> int:
        """Return the bytes that were ever received."""
        return int(self._info()[_BYTES_RECEIVED])

    @property
    def bytes_acked(self) -> int:
        """Return the bytes that were sent, and have reached the other side's kernel."""
        return int(self._info()[_BYTES_ACKED])

    @property
    def unread(self) -> int:
        """Return the bytes that were received and that ZeroMQ has not read."""
        return unread_of(self._socket)

    @property
    def idle_s(self) -> float:
        """Return the seconds since bytes were received; 0 while ZeroMQ has not read everything."""
        return 0.0 if self.unread else self._info()[_LAST_DATA_RECEIVED] / 1000

    def unresponsive(self, timeout_s: float | None) -> bool:
        """Return whether two checks in a row have found it idle for `timeout_s`.

        One check does not suffice: this process may be the one that was stopped.
        """
        idle = timeout_s is not None and self.idle_s >= timeout_s
        self._idle_checks = self._idle_checks + 1 if idle else 0
        return self._idle_checks > 1

    def _info(self) -> tuple[int, ...]:
        return _INFO.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))

    def limit_unsent(self) -> None:
        """Keep the output of ZeroMQ in its process until the kernel can send it; see `UNSENT_BYTES`."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def shutdown(self) -> None:
        """End it, for ZeroMQ too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def finish(self, within_s: float) -> None:
        """Discard the bytes of the other side until it has closed; after `within_s`, shut down this direction.

        ZeroMQ must hold it no more. Closing at once would reset the connection and lose the last messages with it.
        Shutting down at once would make ZeroMQ on the other side discard the messages that were not read yet.
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
        """Close this descriptor. Closing twice is fine."""
        self._socket.close()
