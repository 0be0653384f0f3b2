"""Who may talk to a gateway: whoever reaches it on loopback, and beyond whoever knows the token. Sans-I/O."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .....pipeline.errors import InvalidConfig

__all__ = ["Access", "listen"]

BACKLOG = 2048
"""Connections that may wait to be accepted: several hundred environments open one for every call."""


OWN_SITES = ("none", "same-origin")
"""What browsers say in Sec-Fetch-Site of what was typed into them, or comes from a page of the gateway itself."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a request has to bring, and where it may come from."""

    token: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    """Where the gateway listens, as it was told."""
    cors: bool = False
    """Whether any web page may ask."""

    def mistrusts(self, headers: Mapping[str, str]) -> str | None:
        """Why it is not answered, as a web page in somebody's browser may have sent it; None where none has.

        A page may send GET to any server, and reads the answer where a name that is its own leads to this one.
        """
        if self.cors:
            return None
        site = headers.get("sec-fetch-site", OWN_SITES[0])
        if (origin := headers.get("origin")) is not None or site not in OWN_SITES:
            return (
                f"expected no web page, got one of {origin or site}: to let them ask, give --cors, or Door(cors=True)"
            )
        name = headers.get("host")
        if self.token is None and name is not None and not self._is_own(name):
            return (
                f"expected Host to be localhost, an address or {self.host}, got {name!r}: without a token other names "
                f"are not trusted, for they may be a web page's; give a token (--token), or let --host be that name"
            )
        return None

    def _is_own(self, name: str) -> bool:
        try:
            host = urlsplit(f"//{name}").hostname or ""
            return host.removesuffix(".") in ("localhost", self.host.lower()) or bool(ipaddress.ip_address(host))
        except ValueError:
            return False

    def admits(self, authorization: str | None) -> bool:
        """Whether a request with this header may pass; how long it takes tells nothing about the token.

        Besides `Bearer <token>` the token may be the password of `Basic`, for that is what HTTP clients make of
        `http://anyone:<token>@host:port`: a client that knows no tokens is let in by its URL.
        """
        if self.token is None:
            return True
        kind, _, brought = (authorization or "").partition(" ")
        if kind.lower() == "basic":
            brought = _password(brought)
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(brought.encode(), self.token.encode())


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def listen(host: str, port: int, access: Access) -> socket.socket:
    """A socket that listens at `host`, at a free port where `port` is 0. Blocks while it looks the name up.

    Raises:
        InvalidConfig: the host is beyond loopback, and there is no token.
        OSError: the host is unknown, or the port is taken.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if access.token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InvalidConfig(
            f"host: expected a loopback address or a token, got {host} and none: whoever reaches the port could read "
            f"and write what is trained; give a token (--token, or PENSTOCK_TOKEN), or listen at 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for no other
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}; is another gateway running?") from None
    return listener
