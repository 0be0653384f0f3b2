"""Send HTTP requests to one server, retry temporary failures, and translate all others into penstock's errors.

A response that is not read to its end is closed at once, so that the server stops its work; each has a bound on its
bytes (`bounded_response`), and redirects to another host are refused. Knows no particular request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import (
    EngineFailed,
    EngineRefused,
    EngineTimedOut,
    NobodyListens,
    PenstockError,
    ProtocolMismatch,
)
from ..._pipeline.graph.context import current
from ..._schemas.errors import UNREADABLE
from .bounded_response import LONGEST_ANSWER, RequestFailed, beginning_of, bounded, parsed, refuse_redirect
from .retry import Backoff, RetryDecision, retry

log = get_logger("penstock.server_client")

CONNECT_TIMEOUT_S = 10.0
"""Bound on connecting: a reachable host accepts at once, however busy its server is."""

LONGEST_MESSAGE = 300
"""Characters of a server's error that a message of penstock repeats."""

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of temporary failures. All others above 399 are final."""

T = TypeVar("T")


@asynccontextmanager
async def open_client(
    url: str, api_key: str | None, backoff: Backoff, *, request_timeout_s: float, draw: Callable[[], float]
) -> AsyncGenerator[ServerClient]:
    """Open a client with its own session, without a limit on concurrent requests."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield ServerClient(url, session, backoff, request_timeout_s=request_timeout_s, draw=draw)


class ServerClient:
    """A client of the server at `url`. One event loop uses it."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        backoff: Backoff,
        *,
        request_timeout_s: float,
        draw: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """`draw` and `sleep` make the pauses between attempts; `request_timeout_s` bounds each attempt."""
        self.url = url.rstrip("/")
        self._session = session
        self._backoff = backoff
        self._timeout_s = request_timeout_s
        self._draw = draw
        self._sleep = sleep

    async def retry(
        self, path: str, attempt: Callable[[], Awaitable[T]], *, retryable: frozenset[int] = RETRYABLE
    ) -> T:
        """Return the result of `attempt`, a request for `path`; retry temporary failures.

        Args:
            path: named in errors.
            attempt: makes the request.
            retryable: statuses of temporary failures; all others above 399 are final.

        Raises:
            EngineRefused: the server rejected the request.
            EngineFailed: it failed at every attempt.
            EngineTimedOut: it took too long at the last attempt.
            NobodyListens: it could not be reached at the last attempt.
        """

        def decide(error: Exception, number: int) -> RetryDecision | None:
            if not isinstance(error, aiohttp.ClientError | OSError | RequestFailed):
                return None
            request = f"{self.url}{path}, attempt {number} of {self._backoff.attempts}"
            translated = self._translate(error, request, retryable)
            final = isinstance(translated, EngineRefused)
            return RetryDecision(translated, retryable=not final, retry_after_s=retry_after_s(error))

        return await retry(attempt, decide, self._backoff, self._draw, on_retry=_count_retry, sleep=self._sleep)

    def _translate(self, error: Exception, request: str, retryable: frozenset[int]) -> PenstockError:
        match error:
            case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError():
                return NobodyListens(f"{request}: expected a server, got no connection ({error})")
            case TimeoutError():
                return EngineTimedOut(f"{request}: expected a response within {self._timeout_s:g} s, got none")
            case RequestFailed() if error.status not in retryable:
                return EngineRefused(f"{request}: {error}")
            case RequestFailed():
                return EngineFailed(f"{request}: {error}")
        return EngineFailed(f"{request}: {type(error).__name__}: {error}")

    async def request_json(
        self, method: str, path: str, body: bytes = b"", *, longest: int = LONGEST_ANSWER
    ) -> dict[str, Any]:
        """Return the JSON object of the response to a request; an empty one if it is another kind of JSON.

        Raises:
            ProtocolMismatch: the response is not JSON.
        """
        received = await self.body(method, path, body, longest=longest)
        try:
            response = await parsed(received or b"{}", msgspec.json.decode)
        except UNREADABLE as error:
            raise ProtocolMismatch(f"expected JSON from {self.url}{path}, got {received[:200]!r}: {error}") from None
        return response if isinstance(response, dict) else {}

    async def body(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        longest: int = LONGEST_ANSWER,
    ) -> bytes:
        """Return the body of the response to a request, of at most `longest` bytes."""
        async with self._response(method, path, body, headers) as response:
            return b"".join([chunk async for chunk in bounded(response, longest)])

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, *, longest: int) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Yield the chunks of the response to a request, of at most `longest` bytes, as they arrive."""
        async with self._response("POST", path, body) as response:
            yield bounded(response, longest)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json"} | dict(headers or {})
        with anyio.fail_after(self._timeout_s):
            async with self._session.request(
                method, self.url + path, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                try:
                    await _check(response)
                    yield response
                except BaseException:
                    response.close()
                    raise


def retry_after_s(error: Exception) -> float:
    """Return the pause that the server requested, 0 if none."""
    return error.retry_after_s if isinstance(error, RequestFailed) else 0.0


def _count_retry(decision: RetryDecision) -> None:
    log.warning("request_retried", reason=str(decision.error))
    current().metrics.total("rollout/retries")


async def _check(response: aiohttp.ClientResponse) -> None:
    refuse_redirect(response)
    if response.status >= HTTPStatus.BAD_REQUEST:
        message = _message(await beginning_of(response))
        raise RequestFailed(response.status, message, response.headers.get("Retry-After"))


def _message(received: bytes) -> str:
    """Return the error message of a response, in any of the forms that servers use, in one line."""
    try:
        error: Any = msgspec.json.decode(received)
    except UNREADABLE:
        error = received.decode(errors="replace")
    if isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail")
    message = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(message.split())[:LONGEST_MESSAGE]
