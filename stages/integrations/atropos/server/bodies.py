"""What requests carry: read within a limit, inflated within another. Sans-I/O, except for `read`; knows no endpoint."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from .....pipeline.errors import PenstockError
from .....schemas.numbers import normalize_counts

__all__ = ["Bodies", "BodyRefused", "Limits"]

GZIP = 16 + zlib.MAX_WBITS
"""Says to zlib that what comes has the header and the checksum of gzip."""

SIZE_BYTES = 4
"""At the end of a gzip: how long it is once inflated, from the lowest byte on, modulo 2^32 (RFC 1952)."""

READ_S = 60.0
"""How long a request may take to arrive: who sends more slowly than this is taken for dead."""

BUSY_RETRY_S = 1
"""After how long to come again where too many bodies are being read: reading one takes less."""


class BodyRefused(PenstockError):
    """The body of a request cannot be read."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large requests may be."""

    request_bytes: int = 64 * 2**20
    """Of one request as it is sent: 64 × 32,768 tokens with log-probabilities, compressed, are half of it."""
    inflated_bytes: int = 128 * 2**20
    """Of one request, inflated: gzip makes JSON a third to a quarter of what it is."""
    held_bytes: int = 512 * 2**20
    """Of all requests that are being read and decoded; beyond, they are asked to come again."""

    def __post_init__(self) -> None:
        normalize_counts(self, "request_bytes", "inflated_bytes", "held_bytes")


class Incoming(Protocol):
    """A request, as far as its body is concerned."""

    def stream(self) -> AsyncIterator[bytes]:
        """The body, piece by piece."""
        ...


@dataclass(slots=True)
class Bodies:
    """Reads the bodies of many requests at once."""

    limits: Limits
    held: int = field(default=0, init=False)
    """Bytes of all bodies that are being read."""

    @asynccontextmanager
    async def read(self, request: Incoming, declared: str | None) -> AsyncGenerator[bytes]:
        """The body, as it was sent; it counts as held within the `async with`. `declared` is how long it says it is.

        Raises:
            BodyRefused: it is too large, too slow, or one too many.
        """
        if declared is not None and declared.isdecimal():
            self._check(int(declared), 0)
        pieces: list[bytes] = []
        read = 0
        try:
            with anyio.fail_after(READ_S):
                async for piece in request.stream():
                    self._check(read + len(piece), len(piece))
                    read += len(piece)
                    self.held += len(piece)
                    pieces.append(piece)
        except TimeoutError:
            raise BodyRefused(408, f"expected a body within {READ_S:g} s, got {read} bytes of it") from None
        else:
            body = b"".join(pieces)
            del pieces
            yield body
        finally:
            self.held -= read

    def _check(self, whole: int, more: int) -> None:
        if whole > self.limits.request_bytes:
            raise BodyRefused(
                413, f"expected a request of at most {self.limits.request_bytes} bytes, got {whole}: send fewer groups"
            )
        if self.held + more > self.limits.held_bytes:
            raise BodyRefused(503, f"{self.held} bytes are being read already: come again", retry_after_s=BUSY_RETRY_S)

    def inflated_bytes(self, body: bytes) -> int:
        """How much a gzip `body` says is in it, as far as it may be."""
        return min(int.from_bytes(body[-SIZE_BYTES:], "little"), self.limits.inflated_bytes)

    def inflate(self, body: bytes) -> bytes:
        """What is in a gzip `body`, and no more than it says. May block.

        Raises:
            BodyRefused: it is no gzip, cut off or altered, or there is more in it than may be.
        """
        inflater = zlib.decompressobj(GZIP)
        limit = self.limits.inflated_bytes
        whole = b""
        with suppress(zlib.error):
            whole = inflater.decompress(body, self.inflated_bytes(body) + 1)
        if len(whole) > limit:
            raise BodyRefused(413, f"expected at most {limit} bytes once inflated, got more: send fewer groups")
        if not inflater.eof or inflater.unused_data:  # a second member could hide a second bomb; no client sends one
            raise BodyRefused(400, "Invalid gzip payload")
        return whole
