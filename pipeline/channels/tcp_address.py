"""The address in a tcp URL: a host, which may have several addresses, a port, and the key that is used there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq

from ..errors import InvalidConfig
from .default_key import default_key
from .keys import ChannelKey, Role

BACKLOG = 1024
"""Connections that may wait for ZeroMQ's thread to accept them."""

_NO_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV}


class TcpAddress(NamedTuple):
    """The address of a channel, and the key to use there."""

    host: str
    addresses: Sequence[str]
    """Addresses of the host, by preference."""
    port: int
    key: ChannelKey
    encrypted: bool = True

    def protect(self, socket: zmq.Socket[bytes], role: Role) -> None:
        """Encrypt the connections of a socket, not yet bound or connected, unless their ends are to prove their key."""
        if self.encrypted:
            self.key.protect(socket, role)


def resolved(url: str, key: ChannelKey | None, *, encrypted: bool = True) -> TcpAddress:
    """Resolve a tcp URL. Blocks. On loopback the key is this user's, unless another is given.

    Raises:
        InvalidKey, KeyUnavailable: there is no key that this user may use by default.
        OSError: the host has no address.
        InvalidConfig: the URL has no port, or a host beyond loopback and there is no key.
    """
    parts = urlsplit(url)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise InvalidConfig(f"expected tcp://HOST:PORT, got {url!r}")
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    if key is None and not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise InvalidConfig(
            f"expected a loopback address or a key, got {parts.hostname} and none: any process that reaches the port "
            f"could read and forge records; make a file with Key.create(path), copy it to the other host, give both "
            f"ends key=Key.load(path), or tunnel the port with ssh -L"
        )
    return TcpAddress(parts.hostname, addresses, parts.port, key or default_key(), encrypted)


def bracketed(address: str) -> str:
    """Return an address in the notation of URLs."""
    return f"[{address}]" if ":" in address else address


def bind(socket: zmq.Socket[bytes], place: TcpAddress) -> int:
    """Bind `socket` to one port of all addresses of `place` that belong to this machine, and return the port.

    Raises:
        OSError: the port is in use, or no address belongs to this machine.
    """
    port, bound, missing = place.port, False, OSError(f"expected an address of this machine, got {place.host}")
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    for address in place.addresses:
        socket.setsockopt(zmq.IPV6, int(":" in address))
        try:
            socket.bind(f"tcp://{bracketed(address)}:{port or '*'}")
        except zmq.ZMQError as error:
            missing = OSError(error.errno, f"expected to listen at {address} port {port}, got {error.strerror}")
            if error.errno not in _NO_ADDRESS:
                raise missing from None
        else:
            bound, port = True, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    if not bound:
        raise missing
    return port
