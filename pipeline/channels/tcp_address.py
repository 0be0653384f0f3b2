"""The address in a tcp URL: a host, which may have several addresses, a port, and the key that is used there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from .default_key import default_key
from .keys import ChannelKey


class TcpAddress(NamedTuple):
    """The address of a channel, and the key to use there."""

    host: str
    addresses: Sequence[str]
    """Addresses of the host, by preference."""
    port: int
    key: ChannelKey


def resolved(url: str, key: ChannelKey | None) -> TcpAddress:
    """Resolve a tcp URL. Blocks. On loopback the key is this user's, unless another is given.

    Raises:
        InvalidKey, KeyUnavailable: there is no key that this user may use by default.
        OSError: the host has no address.
        ValueError: the URL has no port, or a host beyond loopback and there is no key.
    """
    parts = urlsplit(url)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise ValueError(f"expected tcp://HOST:PORT, got {url!r}")
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    if key is None and not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ValueError(
            f"expected a loopback address or a key, got {parts.hostname} and none: any process that reaches the port "
            f"could read and forge records; make a file with Key.create(path), copy it to the other host, give both "
            f"ends key=Key.load(path), or tunnel the port with ssh -L"
        )
    return TcpAddress(parts.hostname, addresses, parts.port, key or default_key())


def bracketed(address: str) -> str:
    """Return an address in the notation of URLs."""
    return f"[{address}]" if ":" in address else address
