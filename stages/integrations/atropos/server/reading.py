"""Reading requests: bodies of JSON, plain or gzip, beside the event loop where they are large. Knows no endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from .....schemas import InvalidRecord
from ..coercion import decode
from .answers import LARGE_BYTES
from .bodies import Bodies

__all__ = ["Reading"]

T = TypeVar("T")

THREADS = 2
"""Groups that are read, or batches that are written, at once beside the event loop: each may hold a hundred MB."""


class Reading:
    """What requests carry, for all endpoints."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._threads = anyio.CapacityLimiter(THREADS)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncGenerator[tuple[bytes, bool]]:
        """What was sent, and whether it is gzip.

        Raises:
            InvalidRecord: it is not said to be JSON, which is what a web page may send to another server unasked.
        """
        async with self._bodies.read(request, request.headers.get("content-length")) as body:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                raise InvalidRecord(f"body: expected Content-Type: application/json, got {kind or 'none'}")
            yield body, "gzip" in request.headers.get("content-encoding", "").lower()

    async def decoded(self, request: Request, wanted: type[T]) -> T:
        """What a body holds; see `decode`."""
        return await self.read(request, partial(decode, wanted=wanted))

    async def read(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What `work` returns of a body; done in a thread where it is large."""
        async with self._body(request) as (body, compressed):
            if not compressed:
                return await self.heavy(len(body), partial(work, body))
            return await self.heavy(self._bodies.inflated_bytes(body), lambda: work(self._bodies.inflate(body)))

    async def heavy(self, weight: int, work: Callable[[], T]) -> T:
        """What `work` returns; done in a thread where it takes long."""
        if weight < LARGE_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._threads)
