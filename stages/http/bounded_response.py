"""Bounds on a server's answer: bytes by the request, and no other host.

The one place that reads the bodies of responses; see `ServerClient`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

if TYPE_CHECKING:
    import aiohttp

BYTES_PER_TOKEN = 16 * 2**10
"""Bound on a token in a response: an event of a stream with its text, its id and its log-probability has about 300."""

LONGEST_ANSWER = 4 * 2**20
"""Bytes of an answer that has no tokens, such as the settings of a server."""

LONGEST_ERROR = 64 * 2**10
"""Bytes that are read of the body of an error."""

PARSED_HERE = 64 * 2**10
"""Bytes that are parsed on the event loop, in less than a millisecond; more are parsed in a thread."""

T = TypeVar("T")


class RequestFailed(Exception):
    """A server answered with a status above 299, with an error within a stream, or with more than was asked for."""

    def __init__(self, status: int, message: str, retry_after: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        """Pause that the server requested."""


def bytes_of(tokens: int) -> int:
    """Return the bound on a response with so many tokens."""
    return LONGEST_ANSWER + tokens * BYTES_PER_TOKEN


async def bounded(response: aiohttp.ClientResponse, longest: int) -> AsyncIterator[bytes]:
    """Yield the chunks of a response as they arrive.

    Raises:
        RequestFailed: it is longer than `longest` bytes.
    """
    received = 0
    async for chunk in response.content.iter_any():
        received += len(chunk)
        if received > longest:
            raise RequestFailed(response.status, f"expected a response of at most {longest:,} bytes, got more")
        yield chunk


async def beginning_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of the body of an error."""
    received = b""
    async for chunk in response.content.iter_any():
        received += chunk
        if len(received) >= LONGEST_ERROR:
            break
    return received[:LONGEST_ERROR]


def refuse_redirect(response: aiohttp.ClientResponse) -> None:
    """Check that a response does not lead elsewhere: the request, with a completion, would be sent to another host.

    Raises:
        RequestFailed: it does.
    """
    if HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
        location = response.headers.get("Location", "nowhere")
        raise RequestFailed(response.status, f"expected an answer, got a redirect to {location}: set the URL to that")


async def parsed(received: bytes, parse: Callable[[bytes], T]) -> T:
    """Return the result of `parse` for a body; off the event loop if that takes time."""
    if len(received) <= PARSED_HERE:
        return parse(received)
    return await anyio.to_thread.run_sync(parse, received, abandon_on_cancel=True)
