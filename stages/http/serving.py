"""An HTTP server in the running event loop: uvicorn, TLS, and bounds on connections and incomplete requests.

uvicorn parses with httptools, without bounds on headers and on the time of a request's arrival; `_BoundedProtocol` adds
both. (h11 bounds the size of headers alone, for twice the processor time of a small request.)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import TimerHandle
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, cast

import anyio
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.exception_groups import unwrap_single
from .limits import Limits, RequestRejections

BACKLOG = 2048
"""Connections that may wait to be accepted: several hundred environments open one for every call."""

SHUTDOWN_TIMEOUT_S = 1
"""Bound on answers that are in progress when the server ends: a run that is interrupted ends within five seconds."""

KEEP_ALIVE_TIMEOUT_S = 75
"""Bound on a connection without a request: longer than the polling interval of clients."""

MAX_PIPELINED = 8
"""Requests that a connection may send ahead of their answers; no client sends any."""

READ_BYTES = 256 * 1024
"""Bytes that are read from a socket at once, as many as asyncio reads."""

ACCEPT_TURNS = 3
"""Turns of the loop between accepting a connection and its protocol: its task begins, its transport, its protocol."""

RETRY = {"Retry-After": "1", "Connection": "close"}

ErrorBody: TypeAlias = Callable[[HTTPStatus, str], bytes]
"""Returns the JSON of an answer with a status and a reason, in the form of the served API."""


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to the program, and waits for an event instead of polling."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the program."""
        yield

    async def main_loop(self) -> None:
        """Serve until `ending`. Connections that asyncio has accepted by then get their protocol, and are closed."""
        await self.ending.wait()
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    limits: Limits,
    refusals: RequestRejections,
    error_body: ErrorBody,
    *,
    certfile: str | None = None,
    keyfile: str | None = None,
) -> AsyncGenerator[None]:
    """Serve `app` at `listener` within the body; then finish requests in progress, within `SHUTDOWN_TIMEOUT_S`.

    Raises:
        InvalidConfig: the certificate cannot be used.
    """
    protocol = partial(_BoundedProtocol, _Connections(limits, refusals, error_body))
    settings = uvicorn.Config(
        _answering_shutdown(app, error_body),
        http=cast("type[asyncio.Protocol]", protocol),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,  # the process has a configuration of its own
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        ssl_certfile=certfile,
        ssl_keyfile=keyfile,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(
            f"ServerConfig: expected a certificate and its key in PEM in {certfile} and "
            f"{keyfile or 'the same file'}, got others: {error}"
        ) from error
    server = _Server(settings)
    with unwrap_single():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_serve_shielded, server, listener)
            try:
                yield
            finally:
                server.ending.set()


async def _serve_shielded(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the end of the body, also after a cancellation: requests in progress are finished."""
    with anyio.CancelScope(shield=True):
        await server.serve([listener])


def _answering_shutdown(app: ASGIApp, error_body: ErrorBody) -> ASGIApp:
    """Return `app` with 503 for requests that the end of the server cuts off."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await app(scope, receive, sending)
        except asyncio.CancelledError:  # by uvicorn, after SHUTDOWN_TIMEOUT_S; raised, it would be logged as a failure
            if not started:
                status = HTTPStatus.SERVICE_UNAVAILABLE
                body = error_body(status, "the server is shutting down: try again later")
                answer = Response(body, status, RETRY, media_type="application/json")
                await answer(scope, receive, send)

    return answering


# -- connections -------------------------------------------------------------------------------------------------------


class _Connections:
    """The open connections of a server, in total and by address."""

    def __init__(self, limits: Limits, refusals: RequestRejections, error_body: ErrorBody) -> None:
        self.limits = limits
        self.refusals = refusals
        self.error_body = error_body
        self.buffer = memoryview(bytearray(READ_BYTES))
        """Holds the bytes of one connection while they are parsed; made anew for each read, it would cost the page
        faults of its memory."""
        self._by_address = Counter[str]()

    def open(self, address: str) -> str | None:
        """Count a connection, or return the reason why there are too many."""
        total, own = self._by_address.total(), self._by_address[address]
        if total >= self.limits.connections:
            return f"{total} connections are open: try again later"
        if own >= self.limits.connections_per_address:
            return f"{own} connections from {address} are open: try again later"
        self._by_address[address] += 1
        return None

    def close(self, address: str) -> None:
        """Count a connection no longer."""
        self._by_address[address] -= 1
        self._by_address += Counter()  # drops addresses without connections


class _JoinedWrites:
    """A transport that sends the headers of an answer with its body, if that is written in the same turn of the loop.

    uvicorn writes them apart. A body is written at once, so that the transport says when it has enough.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._headers = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send what was held back and `data`; hold back `data` if headers begin with it."""
        if data.startswith(b"HTTP/") and not self._headers:
            self._headers = data
            self._loop.call_soon(self._send)
        else:
            self._send(data)

    def close(self) -> None:
        """Send what was held back, and close the connection."""
        self._send()
        self._transport.close()

    def _send(self, data: bytes = b"") -> None:
        if joined := self._headers + data:
            self._headers = b""
            self._transport.write(joined)


class _BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. While no request is being answered, a timer runs: uvicorn's between requests, ours within one."""

    def __init__(self, connections: _Connections, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._connections = connections
        self._limits = connections.limits
        self._address: str | None = None
        """Address that the connection counts for; None if it is not counted."""
        self._overhead = 0
        """Bytes received of the request that are not body."""
        self._in_headers = self._in_body = False
        self._timer: TimerHandle | None = None
        """Closes the connection if the rest of a request does not arrive."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and wait for a request."""
        super().connection_made(cast("asyncio.Transport", _JoinedWrites(transport, self.loop)))
        address = self.client[0] if self.client else ""
        if reason := self._connections.open(address):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", reason)
            return
        self._address = address
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection no longer."""
        self._stop_timer()
        if self._address is not None:
            self._connections.close(self._address)
            self._address = None
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (see asyncio.BufferedProtocol)
        """Return the buffer that all connections share: each parses its bytes at once."""
        return self._connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes in the buffer."""
        self.data_received(self._connections.buffer[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse, and check an incomplete request against the bounds."""
        if self.transport.is_closing():
            return
        self._overhead += len(data)
        super().data_received(data)  # type: ignore[arg-type]
        self._overhead = max(0, self._overhead)
        if self._overhead > self._limits.header_bytes or len(self.pipeline) > MAX_PIPELINED:
            reason = f"expected headers of at most {self._limits.header_bytes} bytes, got more"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", reason)
        elif self._timer is None and (self._in_headers or self._in_body or self._unguarded()):
            self._await_rest()

    def on_message_begin(self) -> None:
        """Note that headers begin."""
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that the body begins."""
        self._in_headers, self._in_body = False, True
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take the body off the count of other bytes."""
        self._overhead -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self._in_body, self._overhead = False, 0
        self._stop_timer()
        super().on_message_complete()

    def _unguarded(self) -> bool:
        """Return whether bytes that are no request ended uvicorn's timer between requests."""
        return self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete)

    def _await_rest(self) -> None:
        limits = self._limits
        self._timer = self.loop.call_later(
            limits.body_timeout_s if self._in_body else limits.header_timeout_s, self._time_out
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        limits = self._limits
        part, timeout_s = ("a body", limits.body_timeout_s) if self._in_body else ("headers", limits.header_timeout_s)
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", f"expected {part} within {timeout_s:g} s")

    def _refuse(self, status: HTTPStatus, kind: str, reason: str) -> None:
        """Answer unless an answer is in progress, and close the connection."""
        self._stop_timer()
        self._connections.refusals.add(None, kind, reason)
        if self.cycle is None or self.cycle.response_complete or (self._in_body and not self.cycle.response_started):
            body = self._connections.error_body(status, reason)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
