"""HttpApi: requests to a server of the Atropos contract, as a trainer or as an environment makes them.

Transient failures are retried, others are raised as `AtroposAPIError`. Knows the endpoints, and no groups.
"""

from __future__ import annotations

import errno
import os
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import InvalidConfig
from ...._pipeline.graph.context import current
from ...._schemas import InvalidRecord
from ...._schemas.conversion import decode_json
from ...http.bounded_response import LONGEST_ANSWER, RequestFailed, parsed
from ...http.retry import Backoff, RetryDecision, jitter, retry
from ...http.server_client import CONNECT_TIMEOUT_S, RETRYABLE, ServerClient, retry_after_s
from .api_error import AtroposAPIError, Situation
from .contract import (
    SHM_PATH,
    BatchAnswer,
    Registered,
    RootAnswer,
    ShmAnswer,
    SubmitAnswer,
    TrainerRegistration,
    decode,
)
from .queue.records import Info

log = get_logger("penstock.atropos_client")

LONGEST_BATCH = 2**30
"""Bytes of a batch: a gateway holds as many by default."""

LOOPBACK = {"localhost", "127.0.0.1", "::1"}

BACKOFF = Backoff(attempts=8, first_s=0.25, longest_s=8.0)
"""Attempts at a request, and the pauses between them."""

T = TypeVar("T")


class HttpApi:
    """The server at one address. One event loop uses it."""

    def __init__(
        self, client: ServerClient, draw: Callable[[], float], *, request_timeout_s: float, reconnect_timeout_s: float
    ) -> None:
        self.failures = 0
        """Attempts that failed and were followed by another, so far."""
        self.url = client.url
        self._client = client
        self._draw = draw
        self._request_timeout_s = request_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._answered = False
        """True once the server has answered. Before that it is not waited for: the address may be wrong."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, *, token: str | None, ca: str | None, request_timeout_s: float, reconnect_timeout_s: float
    ) -> AsyncGenerator[HttpApi]:
        """Open a client of the server at `url` within the `async with`.

        Args:
            url: http:// or https://, with host and port.
            token: sent as a bearer token; by default PENSTOCK_TOKEN.
            ca: file with the certificates of a CA for https://, in PEM; None for those of the system.
            request_timeout_s: bound on one attempt.
            reconnect_timeout_s: bound on the time without an answer from a server that has answered before.

        Raises:
            InvalidConfig: `ca` cannot be read.
        """
        parts = urlsplit(url)
        token = token or (None if parts.username else os.environ.get("PENSTOCK_TOKEN"))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if parts.hostname in LOOPBACK:  # compressing costs both ends more than the copy
            headers["Accept-Encoding"] = "identity"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT_S, request_timeout_s))
        connector = aiohttp.TCPConnector(limit=0, ssl=True if ca is None else _ssl_context(ca))
        draw = jitter(current().worker)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            client = ServerClient(url, session, BACKOFF, request_timeout_s=request_timeout_s, draw=draw)
            yield cls(client, draw, request_timeout_s=request_timeout_s, reconnect_timeout_s=reconnect_timeout_s)

    # -- as a trainer --------------------------------------------------------------------------------------------------

    async def check_server(self) -> None:
        """Check that the server answers, and is one of the contract.

        Raises:
            AtroposAPIError: it does not, or is not.
        """
        await self._request("GET", "/", RootAnswer)

    async def register(self, registration: TrainerRegistration) -> None:
        """Register a trainer, and check that the server uses this registration.

        Raises:
            AtroposAPIError: it uses another, or does not answer as it should.
        """
        await self._request("POST", "/register", Registered, msgspec.json.encode(registration))
        found = await self._request("GET", "/info", Info)
        expected = Info(registration.batch_size, registration.max_token_len)
        if found != expected:
            raise self._error("another trainer", "GET /info", f"expected {expected}, as was registered, got {found}")

    async def batch(self, lease_s: float | None) -> BatchAnswer:
        """Return a batch, if there is one; under a lease where the server supports leases.

        Raises:
            AtroposAPIError: the server does not answer as it should.
        """
        query = "" if lease_s is None else "?" + urlencode({"lease_s": f"{lease_s:g}"})
        return await self._request("GET", "/batch" + query, BatchAnswer, longest=LONGEST_BATCH)

    async def acknowledge(self, lease: int | str) -> None:
        """End a lease: the server may drop the batch.

        Raises:
            AtroposAPIError: the server no longer knows the lease, or does not answer as it should.
        """
        await self._request("POST", "/acknowledge", msgspec.Raw, msgspec.json.encode({"lease": lease}))

    def empty(self, waited_s: float) -> AtroposAPIError:
        """Return the error for a queue that had no batch for too long."""
        return self._error("empty", "GET /batch", f"expected a batch within {waited_s:g} s, got none")

    # -- as an environment ---------------------------------------------------------------------------------------------

    async def submit(self, body: bytes, *, to_gateway: bool) -> None:
        """POST the JSON of a group, or of a list of groups. Each attempt carries the same idempotency key.

        A penstock gateway accepts each key once. Other servers do not know keys; to them a body that may have been
        received is not sent again.

        Raises:
            AtroposAPIError: it was refused, or could not be sent.
        """
        path = "/scored_data_list" if body[:1] == b"[" else "/scored_data"
        key = {"Idempotency-Key": secrets.token_hex(16)}
        answer = await self._request("POST", path, SubmitAnswer, body, headers=key, repeatable=to_gateway)
        if answer.rejected:
            raise self._error(
                "rejected", f"POST {path}", f"expected groups to train on, got {'; '.join(answer.rejected)}"
            )

    async def shm_url(self) -> str | None:
        """Return the address of the gateway's shared-memory receiver; None if the server is no gateway.

        Raises:
            AtroposAPIError: it refuses to answer.
            OSError: it does not answer now; the request is not retried.
        """
        try:
            answer = await self._client.body("GET", SHM_PATH)
        except RequestFailed as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            if error.status in RETRYABLE:
                raise OSError(str(error)) from error
            raise self._error("rejected", f"GET {SHM_PATH}", f"expected an answer, got {error}") from error
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        try:
            return decode_json(answer, ShmAnswer).url
        except msgspec.MsgspecError:
            return None

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _request(
        self,
        method: str,
        path: str,
        wanted: type[T],
        body: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        repeatable: bool = True,
        longest: int = LONGEST_ANSWER,
    ) -> T:
        began = time.monotonic()

        def decide(error: Exception, number: int) -> RetryDecision | None:
            if not isinstance(error, aiohttp.ClientError | OSError | RequestFailed):
                return None
            situation, found = self._explain(error)
            tries = f" (attempt {number}, after {time.monotonic() - began:.1f} s)" if number > 1 else ""
            final = situation == "certificate" or not (repeatable or _certainly_not_received(error))
            return RetryDecision(
                self._error(situation, f"{method} {path}", found + tries),
                retryable=not final
                and (situation == "failed" or not isinstance(error, RequestFailed) or error.status in RETRYABLE),
                unreachable=not final and _is_unreachable(error),
                retry_after_s=retry_after_s(error),
            )

        answer = await retry(
            lambda: self._client.body(method, path, body, headers, longest=longest),
            decide,
            BACKOFF,
            self._draw,
            on_retry=self._count_retry,
            reconnect_timeout_s=self._reconnect_timeout_s if self._answered else 0.0,
        )
        try:
            decoded = await parsed(answer, partial(decode, wanted=wanted))
        except InvalidRecord as error:
            found = f"expected the JSON of a {wanted.__name__}, got {answer[:200]!r}: {error}"
            raise self._error("no JSON", f"{method} {path}", found) from error
        self._answered = True
        return decoded

    def _count_retry(self, decision: RetryDecision) -> None:
        self.failures += 1
        assert isinstance(decision.error, AtroposAPIError)  # noqa: S101 (`decide` makes no other)
        log.warning("request_retried", reason=decision.error.summary)
        current().metrics.total("atropos/retries")

    def _explain(self, error: Exception) -> tuple[Situation, str]:
        match error:
            case RequestFailed():
                return _situation_of(error.status), f"expected an answer, got {error}"
            case TimeoutError():
                unconnected = isinstance(error, aiohttp.ConnectionTimeoutError)
                bound_s = min(CONNECT_TIMEOUT_S, self._request_timeout_s) if unconnected else self._request_timeout_s
                return (
                    "timed out",
                    f"expected {'a connection' if unconnected else 'an answer'} within {bound_s:g} s, got none",
                )
            case aiohttp.ClientSSLError():
                return "certificate", f"expected a server whose certificate is trusted, got {error}"
            case aiohttp.ClientConnectorError() if error.os_error.errno == errno.ECONNREFUSED:
                return "refused", f"expected a server, got no connection: no process listens there ({error})"
            case aiohttp.ClientConnectorError() | aiohttp.InvalidURL():
                return "unreachable", f"expected a server, got no route to one ({error})"
        return "failed", f"expected an answer, got none: {type(error).__name__}: {' '.join(str(error).split())}"

    def _error(self, situation: Situation, request: str, found: str) -> AtroposAPIError:
        return AtroposAPIError(situation, self.url, request, found)


def _ssl_context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # an SSLError is one
        raise InvalidConfig(f"ca: expected a file with certificates in PEM, got {ca}: {error}") from None


def _situation_of(status: int) -> Situation:
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return "no JSON"  # an answer that is too long
    return "rejected" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"


def _certainly_not_received(error: Exception) -> bool:
    """Return whether the server itself answered that it refuses, or was never connected to."""
    if isinstance(error, RequestFailed):
        return error.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def _is_unreachable(error: Exception) -> bool:
    """Return whether no server answered, only its host or a proxy; or whether it sent Retry-After."""
    if isinstance(error, RequestFailed):
        return error.status in {HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT} or error.retry_after_s > 0
    return isinstance(
        error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.ServerDisconnectedError
    )
