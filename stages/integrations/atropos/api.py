"""Requests of a trainer to a server of the Atropos contract. What fails in passing is tried again; what fails is told.

Knows the endpoints, and nothing of groups or of what becomes of them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec

from ....pipeline.context import current
from ....pipeline.telemetry import get_logger
from ....schemas import InvalidRecord
from ...engines.backoff import Backoff
from ...engines.retrying import Failure, retried
from ...engines.server_client import CONNECT_S, PASSING, Failed, ServerClient, wanted_s
from .api_error import AtroposAPIError, Situation
from .coercion import decode
from .contract import BatchAnswer, Greeting, Registered, TrainerRegistration
from .queue.records import Info

__all__ = ["Api"]

log = get_logger("penstock.atropos_client")

LOOPBACK = {"localhost", "127.0.0.1", "::1"}

T = TypeVar("T")


class Api:
    """The server at one address. One event loop uses it."""

    def __init__(
        self, client: ServerClient, backoff: Backoff, *, timeout_s: float, away_s: float, draw: Callable[[], float]
    ) -> None:
        self.failures = 0
        """Of attempts, so far, that were followed by another."""
        self._client = client
        self._backoff = backoff
        self._timeout_s = timeout_s
        self._away_s = away_s
        self._greeted = False
        """Whether the server was ever there: an address that is wrong is not waited for."""
        self._connect_s = min(CONNECT_S, timeout_s)
        self._draw = draw

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        token: str | None,
        backoff: Backoff,
        *,
        timeout_s: float,
        away_s: float,
        draw: Callable[[], float],
    ) -> AsyncGenerator[Api]:
        """A client of the server at `url`; a request may take `timeout_s`, and is tried as often as `backoff` says.

        A server that was there is waited for, for `away_s`.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if urlsplit(url).hostname in LOOPBACK:  # compressing costs both ends more than the copy
            headers["Accept-Encoding"] = "identity"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_S, timeout_s))
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            client = ServerClient(url, session, backoff, timeout_s=timeout_s, random=draw)
            yield cls(client, backoff, timeout_s=timeout_s, away_s=away_s, draw=draw)

    async def greet(self) -> None:
        """Make sure that the server is there, and is one of the contract.

        Raises:
            AtroposAPIError: it is not.
        """
        await self._asked("GET", "/", Greeting)
        self._greeted = True

    async def register(self, registration: TrainerRegistration) -> None:
        """Register a trainer, and make sure that it counts.

        Raises:
            AtroposAPIError: it does not, or could not be done.
        """
        await self._asked("POST", "/register", Registered, msgspec.json.encode(registration))
        told = await self._asked("GET", "/info", Info)
        expected = Info(registration.batch_size, registration.max_token_len)
        if told != expected:
            raise self._error("another trainer", "GET /info", f"expected {expected}, as was registered, got {told}")

    async def batch(self, lease_s: float | None) -> BatchAnswer:
        """A batch, if there is one; under a lease where the server knows what that is.

        Raises:
            AtroposAPIError: the server does not answer as it should.
        """
        query = "" if lease_s is None else "?" + urlencode({"lease_s": f"{lease_s:g}"})
        return await self._asked("GET", "/batch" + query, BatchAnswer)

    async def acknowledge(self, lease: int | str) -> None:
        """Say that what came under this lease need not be kept.

        Raises:
            AtroposAPIError: the server does not know the lease any more, or does not answer as it should.
        """
        body = msgspec.json.encode({"lease": lease})
        await self._asked("POST", "/acknowledge", msgspec.Raw, body)

    def empty(self, waited_s: float) -> AtroposAPIError:
        """There was no batch for too long."""
        return self._error("empty", "GET /batch", f"expected a batch within {waited_s:g} s, got none")

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _asked(self, method: str, path: str, wanted: type[T], body: bytes = b"") -> T:
        """What the server answers; asked again as often as it fails in passing, and for as long as it may be away."""
        began = time.monotonic()

        def judge(error: Exception, number: int) -> Failure | None:
            if not isinstance(error, aiohttp.ClientError | OSError | Failed):
                return None
            situation, came = self._told(error)
            tries = f" (attempt {number}, after {time.monotonic() - began:.1f} s)" if number > 1 else ""
            return Failure(
                self._error(situation, f"{method} {path}", came + tries),
                passing=situation != "rejected" or (isinstance(error, Failed) and error.status in PASSING),
                away=situation in {"refused", "unreachable"} or _nobody_behind(error),
                wanted_s=wanted_s(error),
            )

        answer = await retried(
            lambda: self._client.body(method, path, body),
            judge,
            self._backoff,
            self._draw,
            noted=self._note,
            away_s=self._away_s if self._greeted else 0.0,
        )
        try:
            return decode(answer, wanted)
        except InvalidRecord as error:
            came = f"expected the JSON of a {wanted.__name__}, got {answer[:200]!r}: {error}"
            raise self._error("no JSON", f"{method} {path}", came) from error

    def _note(self, failure: Failure) -> None:
        self.failures += 1
        assert isinstance(failure.error, AtroposAPIError)  # noqa: S101 (`judge` makes no other)
        log.warning("request_retried", reason=failure.error.told)
        current().metrics.total("atropos/retries")

    def _told(self, error: Exception) -> tuple[Situation, str]:
        """What `error` means to whoever asked."""
        situation: Situation = "failed"
        came = f"expected an answer, got none: {type(error).__name__}: {error}"
        match error:
            case Failed():
                came = f"expected an answer, got {error}"
                if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    situation = "rejected"
            case TimeoutError():
                situation, came = "timed out", f"expected an answer within {self._timeout_s:g} s, got none"
                if isinstance(error, aiohttp.ConnectionTimeoutError):
                    came = f"expected a connection within {self._connect_s:g} s, got none"
            case aiohttp.ClientConnectorError() if error.os_error.errno == errno.ECONNREFUSED:
                situation, came = "refused", f"expected a server, got no connection: nobody listens there ({error})"
            case aiohttp.ClientConnectorError() | aiohttp.InvalidURL():
                situation, came = "unreachable", f"expected a server, got no way to one ({error})"
        return situation, came

    def _error(self, situation: Situation, request: str, came: str) -> AtroposAPIError:
        return AtroposAPIError(situation, self._client.url, request, came)


def _nobody_behind(error: Exception) -> bool:
    """Whether only what stands before a server was met: a host that takes no connections, a proxy, a tunnel."""
    if isinstance(error, Failed):
        return error.status in {HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}
    return isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ServerDisconnectedError)
