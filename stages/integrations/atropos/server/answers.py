"""What a gateway answers: values as JSON, compressed for who accepts it, and what it refuses. Knows no endpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .....schemas import InvalidRecord
from ..queue.records import QueueFull, RequestRejected, UnpackableGroupSize
from .bodies import GZIP, BodyRefused

__all__ = ["END_BYTES", "LARGE_BYTES", "REFUSALS", "Delivery", "Handler", "answered", "endpoint", "refused"]

COMPRESSED_FROM_BYTES = 1000
"""As the original does it."""

COMPRESSION_LEVEL = 1
"""A batch is read once, by a trainer that is near: level 9 makes it a tenth smaller, for five times the work."""

LARGE_BYTES = 256 * 1024
"""What takes longer than a millisecond or two is done in a thread, so that `/status-env` is answered meanwhile."""

END_BYTES = 64
"""Of a batch: JSON or gzip that lacks so much is neither."""

Handler: TypeAlias = Callable[[Request], Awaitable[Any]]
"""Answers a request with a value that has a JSON form, or with one of the answers below."""


def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response | Delivery]]:
    """`handler` as starlette wants it."""

    async def answering(request: Request) -> Response | Delivery:
        answer = await handler(request)
        return answer if isinstance(answer, Response | Delivery) else answered(request, msgspec.json.encode(answer))

    return answering


def answered(request: Request, body: bytes) -> Response:
    """`body`, which is JSON, as an answer to `request`. Blocks for a millisecond for every 100 KB."""
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= COMPRESSED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        compressor = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, GZIP)
        body = compressor.compress(body) + compressor.flush()
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Delivery:
    """An answer of which it matters whether it arrived, as far as that can be known."""

    answer: Response
    settle: Callable[[bool], bool]
    """Is told whether the client was still there when all but the end was written; returns whether it gets the end."""
    end_bytes: int = 0
    """Of the body; none where whoever is told late would cancel, and send again what was accepted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Whoever was not there for the end has an answer that is cut off, and can tell."""
        body = memoryview(self.answer.body)
        end = max(0, len(body) - self.end_bytes)
        there = wanted = False
        try:
            await send(
                {"type": "http.response.start", "status": self.answer.status_code, "headers": self.answer.raw_headers}
            )
            await send({"type": "http.response.body", "body": body[:end], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until that was written
            there = not await Request(scope, receive).is_disconnected()
        finally:
            wanted = self.settle(there)
        if wanted:
            await send({"type": "http.response.body", "body": body[end:]})


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer that says why not."""
    body = msgspec.json.encode({"detail": detail})
    return Response(body, status, headers=headers, media_type="application/json")


def invalid(message: str) -> Response:
    """What was sent does not fit; in the form that validation errors have in the original."""
    return refused(HTTPStatus.UNPROCESSABLE_ENTITY, [{"type": "value_error", "loc": ["body"], "msg": message}])


async def _of_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 (by the table below)
    return refused(error.status_code, error.detail, dict(error.headers or {}))


async def _of_record(_: Request, error: Exception) -> Response:
    return invalid(str(error))


async def _of_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, BodyRefused)  # noqa: S101 (by the table below)
    headers = {"Connection": "close"}  # the rest of it is not waited for
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == HTTPStatus.BAD_REQUEST:  # as in the original
        return Response(str(error), error.status, headers=headers, media_type="text/plain")
    return refused(error.status, str(error), headers)


async def _of_gateway(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)  # noqa: S101 (by the table below)
    if isinstance(error, UnpackableGroupSize):
        return invalid(str(error))
    later = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, QueueFull) else None
    return refused(error.status, str(error), later)


async def _to_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # is not sent: who asked went away


REFUSALS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _of_http,
    InvalidRecord: _of_record,
    BodyRefused: _of_body,
    RequestRejected: _of_gateway,
    ClientDisconnect: _to_nobody,
}
"""How each error is answered."""
