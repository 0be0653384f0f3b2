"""The HTTP server: what it bounds before a request is complete, https, and how it ends. Real sockets."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.abc import SocketStream
from anyio.lowlevel import checkpoint
from tests.failsafe import FAILSAFE_S

from penstock._stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue
from penstock._stages.integrations.atropos.server.backend import RelayBackend
from penstock._stages.integrations.atropos.server.running import RunningGateway
from penstock._stages.integrations.atropos.server.serve import open_server
from penstock.errors import InvalidConfig
from penstock.integrations.atropos import Limits, ServerConfig

WHOLE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@asynccontextmanager
async def running(**config: Any) -> AsyncGenerator[RunningGateway[bytes]]:
    """Start a server at a free port."""
    queue: TrajectoryQueue[bytes] = TrajectoryQueue()
    with anyio.fail_after(FAILSAFE_S):
        async with open_server(ServerConfig(port=0, **config), queue, RelayBackend(), "a test") as server:
            yield server


async def connected(server: RunningGateway[bytes], stack: AsyncExitStack) -> SocketStream:
    """Open a connection; connections are accepted in order, so the protocol of an earlier one exists then."""
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return await stack.enter_async_context(await anyio.connect_tcp(host, int(port)))


async def answer(stream: SocketStream) -> bytes:
    """Receive until the server closes the connection."""
    came = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            came += await stream.receive()
    return came


def refused(server: RunningGateway[bytes]) -> dict[str, int]:
    """Return the number of refused connections, by kind."""
    return dict(server.endpoints.refusals.counts["unregistered"])


# -- headers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless",
    [b"X-Name: value\r\n", b"X" * 14, b"X-Name:" + b" " * 7],
    ids=["headers", "a name", "spaces"],
)
async def test_headers_have_a_bound_before_any_token_is_looked_at(endless: bytes) -> None:
    async with AsyncExitStack() as stack, running(token="secret", limits=Limits(header_bytes=1000)) as server:  # noqa: S106
        stream = await connected(server, stack)

        with suppress(anyio.BrokenResourceError):
            await stream.send(b"GET /status HTTP/1.1\r\n" + endless * 100)
        came = await answer(stream)

        assert came.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")) or not came  # an unread rest resets the connection
        assert refused(server) in ({"headers_too_large": 1}, {})


async def test_headers_within_the_bound_are_answered_however_many_requests_there_are() -> None:
    async with AsyncExitStack() as stack, running(limits=Limits(header_bytes=1000)) as server:
        stream = await connected(server, stack)

        for _ in range(100):
            await stream.send(WHOLE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")


async def test_trailers_and_the_framing_of_chunks_count_as_headers() -> None:
    head = b"POST /register HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with AsyncExitStack() as stack, running(limits=Limits(header_bytes=1000)) as server:
        stream = await connected(server, stack)

        await stream.send(head + b"1\r\n \r\n0\r\nX-Trailer: ")
        with suppress(anyio.BrokenResourceError):
            await stream.send(b"x" * 2000)
        await answer(stream)

        assert refused(server) == {"headers_too_large": 1}


async def test_requests_that_are_sent_ahead_of_their_answers_have_a_bound() -> None:
    async with AsyncExitStack() as stack, running() as server:
        stream = await connected(server, stack)

        await stream.send(WHOLE * 1000)
        await answer(stream)

        assert refused(server) == {"headers_too_large": 1}


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize(
    "part", [b"\r\n", b"GET / HT", WHOLE[:-2]], ids=["a line end", "half a line", "without its end"]
)
async def test_headers_that_do_not_come_are_not_waited_for(part: bytes, before: int) -> None:
    async with AsyncExitStack() as stack, running(limits=Limits(header_timeout_s=0.1)) as server:
        stream = await connected(server, stack)
        for _ in range(before):
            await stream.send(WHOLE)
            await stream.receive()

        await stream.send(part)
        await answer(stream)

        assert refused(server) == {"request_timeout": 1}


async def test_a_connection_without_a_request_is_not_kept() -> None:
    async with AsyncExitStack() as stack, running(limits=Limits(header_timeout_s=0.01)) as server:
        await answer(await connected(server, stack))

        assert refused(server) == {"request_timeout": 1}


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    head = b"POST /register HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    async with AsyncExitStack() as stack, running(limits=Limits(body_timeout_s=0.01)) as server:
        stream = await connected(server, stack)

        await stream.send(head)

        assert (await answer(stream)).startswith(b"HTTP/1.1 408 ")
        assert refused(server) == {"request_timeout": 1}


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["connections", "connections_per_address"])
async def test_connections_have_a_bound_and_one_that_ends_makes_room(bound: str) -> None:
    async with AsyncExitStack() as stack, running(limits=Limits(**{bound: 3})) as server:
        kept = [await connected(server, stack) for _ in range(3)]
        for stream in kept:
            await stream.send(WHOLE)
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")

        assert (await answer(await connected(server, stack))).startswith(b"HTTP/1.1 503 ")
        assert refused(server) == {"too_many_connections": 1}

        await kept[0].aclose()
        while True:
            another = await connected(server, stack)
            with suppress(anyio.BrokenResourceError):
                await another.send(WHOLE)
                if (await another.receive()).startswith(b"HTTP/1.1 200 "):
                    break


# -- https -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the paths of a certificate for 127.0.0.1, and of its key."""
    folder: Path = tmp_path_factory.mktemp("certificate")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_https_is_spoken_with_a_token(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    async with running(certfile=cert, keyfile=key, token="secret") as server, aiohttp.ClientSession() as session:  # noqa: S106
        answers = []
        for headers in ({}, {"Authorization": "Bearer secret"}):
            async with session.get(f"{server.url}/status", ssl=trusting, headers=headers) as came:
                answers.append(came.status)
        with pytest.raises(aiohttp.ClientError):
            await session.get(server.url.replace("https:", "http:"))

        assert server.url.startswith("https://127.0.0.1:")
        assert answers == [401, 200]


async def test_a_certificate_that_cannot_be_used_is_named(certificate: tuple[str, str], tmp_path: Path) -> None:
    for certfile, keyfile in ((str(tmp_path / "none.pem"), None), (certificate[1], certificate[0])):
        with pytest.raises(InvalidConfig, match="expected a certificate and its key in PEM"):
            async with running(certfile=certfile, keyfile=keyfile):
                pass


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_made_as_the_server_ends_is_closed(turns: int) -> None:
    """`turns` of the loop pass between the two: uvicorn forgets connections that have no protocol yet."""
    async with AsyncExitStack() as stack:
        async with running() as server:
            early = await connected(server, stack)
            await early.send(WHOLE)
            assert await early.receive()
            host, _, port = server.url.rpartition("/")[2].partition(":")
            late = socket.create_connection((host, int(port)), timeout=FAILSAFE_S)
            for _ in range(turns):
                await checkpoint()

        with late, suppress(ConnectionResetError):  # it was not accepted
            assert await anyio.to_thread.run_sync(late.recv, 1) == b""
