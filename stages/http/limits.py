"""Bounds on requests and connections, and the reading of bodies within them. Sans-I/O, except for `read`."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import PenstockError
from ..._schemas.numbers import normalize_counts, normalize_numbers

if TYPE_CHECKING:
    from starlette.requests import Request

GZIP = 16 + zlib.MAX_WBITS
"""Selects the gzip format in zlib, header and checksum included."""

SIZE_BYTES = 4
"""The last bytes of a gzip member: its inflated length, little-endian, modulo 2^32 (RFC 1952)."""

UNREGISTERED = "unregistered"
"""Name in the counts for clients that did not register as an environment."""

log = get_logger("penstock.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on the size, the time and the number of requests and connections.

    Raises:
        InvalidConfig: a bound is not positive; the message names it.
    """

    request_bytes: int = 64 * 2**20
    """Body of one request as sent: 64 × 32,768 tokens with log-probabilities, compressed, are half of it."""
    inflated_bytes: int = 128 * 2**20
    """Body of one request once inflated: gzip reduces JSON to a third or a quarter."""
    held_bytes: int = 512 * 2**20
    """Bodies of all requests that are being read and decoded; beyond it requests get 503."""
    header_bytes: int = 64 * 2**10
    """Everything of one request that is not its body: request line, headers, framing of chunks, trailers."""
    header_timeout_s: float = 10.0
    """Time from the first byte of a request, or from the connection, to the end of its headers."""
    body_timeout_s: float = 60.0
    """Time from the end of the headers of a request to the end of its body."""
    connections: int = 2048
    """Open connections in total: several hundred environments open one for every call."""
    connections_per_address: int = 1024
    """Open connections from one address; all environments of a host share it."""

    def __post_init__(self) -> None:
        normalize_counts(
            self,
            "request_bytes",
            "inflated_bytes",
            "held_bytes",
            "header_bytes",
            "connections",
            "connections_per_address",
        )
        normalize_numbers(self, "header_timeout_s", "body_timeout_s")


class RequestRejections:
    """Counts of rejections, by environment and kind. The first of each kind is logged."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Name of the environment → kind → number of groups, requests or connections."""

    def add(self, env: str | None, kind: str, reason: str) -> None:
        """Count a refusal; `env` is None for a client that is no environment, `kind` one of a few values."""
        if self.count(env, kind) == 1:
            log.warning("refused", env=env or UNREGISTERED, kind=kind, reason=reason)

    def count(self, env: str | None, kind: str) -> int:
        """Count a refusal that is no fault, and return how many of its kind there are."""
        counts = self.counts[env or UNREGISTERED]
        counts[kind] += 1
        return counts[kind]


class BodyRefused(PenstockError):
    """The body of a request cannot be read."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Bodies:
    """Reads the bodies of concurrent requests."""

    limits: Limits
    held: int = field(default=0, init=False)
    """Bytes of all bodies that are being read."""

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the body as it was sent; it counts as held within the `async with`.

        Raises:
            BodyRefused: it is larger than the limit, or too much is being read already.
        """
        pieces: list[bytes] = []
        read = 0
        try:
            async for piece in request.stream():
                if read + len(piece) > self.limits.request_bytes:
                    raise BodyRefused(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"expected a body of at most {self.limits.request_bytes} bytes, got more",
                    )
                if self.held + len(piece) > self.limits.held_bytes:
                    raise BodyRefused(
                        HTTPStatus.SERVICE_UNAVAILABLE, f"{self.held} bytes are being read already: try again later"
                    )
                read += len(piece)
                self.held += len(piece)
                pieces.append(piece)
            body = b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self.held -= read

    def inflated_bytes(self, body: bytes) -> int:
        """Return the inflated length that a gzip `body` declares, at most the limit."""
        return min(int.from_bytes(body[-SIZE_BYTES:], "little"), self.limits.inflated_bytes)

    def inflate(self, body: bytes) -> bytes:
        """Return the content of a gzip `body`, never inflating more than it declares. May block.

        Raises:
            BodyRefused: the body is not gzip, truncated or altered, or holds more than the limit.
        """
        inflater = zlib.decompressobj(GZIP)
        limit = self.limits.inflated_bytes
        whole = b""
        with suppress(zlib.error):
            whole = inflater.decompress(body, self.inflated_bytes(body) + 1)
        if len(whole) > limit:
            raise BodyRefused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"expected at most {limit} bytes once inflated, got more: send fewer groups",
            )
        if not inflater.eof or inflater.unused_data:  # a second member could hide a second bomb; no client sends one
            raise BodyRefused(HTTPStatus.BAD_REQUEST, "Invalid gzip payload")
        return whole
