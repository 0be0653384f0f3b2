"""Requests to one server over HTTP: what fails in passing is tried again, and every failure is told for what it is.

An answer that is not read to its end is closed at once, which is how a server learns that nobody listens any more.
Knows nothing about what is asked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec

from ...pipeline.context import current
from ...pipeline.errors import (
    EngineFailed,
    EngineRefused,
    EngineTimedOut,
    NobodyListens,
    PenstockError,
    ProtocolMismatch,
)
from ...pipeline.telemetry import get_logger
from .backoff import Backoff
from .retrying import Failure, retried

__all__ = ["CONNECT_S", "PASSING", "Failed", "ServerClient", "client_of", "wanted_s"]

log = get_logger("penstock.server_client")

CONNECT_S = 10.0
"""How long a connection may take: a host that is there accepts at once, however busy its server is."""

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that say: not now. All others above 399 say no."""

T = TypeVar("T")


class Failed(Exception):
    """A server answered that it will not, or cannot now: with a status above 399, or in the midst of a stream."""

    def __init__(self, status: int, told: str, retry_after: str | None = None) -> None:
        super().__init__(f"{status}: {told}")
        self.status = status
        self.retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
        """How long it wants to be left alone."""


@asynccontextmanager
async def client_of(
    url: str, api_key: str | None, backoff: Backoff, *, timeout_s: float, random: Callable[[], float]
) -> AsyncGenerator[ServerClient]:
    """A client with a session of its own, in which as many requests as are asked for are under way at once."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield ServerClient(url, session, backoff, timeout_s=timeout_s, random=random)


class ServerClient:
    """A client of the server at `url`. One event loop uses it."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        backoff: Backoff,
        *,
        timeout_s: float,
        random: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """`random` and `sleep` make the pauses between attempts; an attempt may take `timeout_s`."""
        self.url = url.rstrip("/")
        self._session = session
        self._backoff = backoff
        self._timeout_s = timeout_s
        self._random = random
        self._sleep = sleep

    async def retried(self, path: str, attempt: Callable[[], Awaitable[T]], *, passing: frozenset[int] = PASSING) -> T:
        """What `attempt`, a request for `path`, returns; tried as often as it fails in passing.

        Args:
            path: what is asked for.
            attempt: asks for it.
            passing: statuses that say "not now"; all others above 399 say no.

        Raises:
            EngineRefused: the server will not.
            EngineFailed: it failed, at every attempt.
            EngineTimedOut: it took too long, at the last attempt.
            NobodyListens: it was not there, at the last attempt.
        """

        def judge(error: Exception, number: int) -> Failure | None:
            if not isinstance(error, aiohttp.ClientError | OSError | Failed):
                return None
            failure = self._told(error, f"{self.url}{path}, attempt {number} of {self._backoff.attempts}", passing)
            return Failure(failure, passing=not isinstance(failure, EngineRefused), wanted_s=wanted_s(error))

        return await retried(attempt, judge, self._backoff, self._random, noted=_note, sleep=self._sleep)

    def _told(self, error: Exception, where: str, passing: frozenset[int]) -> PenstockError:
        """What `error` means to whoever asked."""
        match error:
            case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError():
                return NobodyListens(f"{where}: nobody listens ({error})")
            case TimeoutError():
                return EngineTimedOut(f"{where}: expected an answer within {self._timeout_s:g} s, got none")
            case Failed() if error.status not in passing:
                return EngineRefused(f"{where}: {error}")
            case Failed():
                return EngineFailed(f"{where}: {error}")
        return EngineFailed(f"{where}: {type(error).__name__}: {error}")

    async def answer(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """What one request is answered with; nothing where that is no JSON object.

        Raises:
            ProtocolMismatch: it is not JSON.
        """
        answered = await self.body(method, path, body)
        try:
            answer = msgspec.json.decode(answered or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wanted = f"expected JSON from {self.url}{path}"
            raise ProtocolMismatch(f"{wanted}, got {answered[:200]!r}: {error}") from None
        return answer if isinstance(answer, dict) else {}

    async def body(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Return the answer to one request, as it is."""
        async with self._response(method, path, body, headers) as response:
            return await response.read()

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The bytes of one answer, as they come within the body."""
        async with self._response("POST", path, body) as response:
            yield response.content.iter_any()

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json"} | dict(headers or {})
        with anyio.fail_after(self._timeout_s):
            async with self._session.request(method, self.url + path, data=body or None, headers=headers) as response:
                try:
                    await _check(response)
                    yield response
                except BaseException:
                    response.close()
                    raise


def wanted_s(error: Exception) -> float:
    """How long the server wants to be left alone."""
    return error.retry_after_s if isinstance(error, Failed) else 0.0


def _note(failure: Failure) -> None:
    log.warning("request_retried", reason=str(failure.error))
    current().metrics.total("rollout/retries")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= HTTPStatus.BAD_REQUEST:
        raise Failed(response.status, _message(await response.read()), response.headers.get("Retry-After"))


def _message(answered: bytes) -> str:
    """What an answer says of an error, in the ways that servers say it."""
    try:
        answer = msgspec.json.decode(answered)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answered[:500].decode(errors="replace").strip()
    told = answer.get("error") or answer.get("message") or answer.get("detail") if isinstance(answer, dict) else answer
    return str(told.get("message", told) if isinstance(told, dict) else told)[:500]
