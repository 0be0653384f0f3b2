"""What `AtroposClient` says of a server that is slow or wrong: at the start, at its registration, and in the middle.

Every case ends with one AtroposAPIError of one line that says what to check, after a bounded number of attempts. The
server is a real socket that answers with bytes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import pytest
from anyio.abc import SocketAttribute, SocketStream
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits

from penstock.integrations.atropos import AtroposAPIError, AtroposClient
from penstock.policies import Backoff
from penstock.testing import drive_source

ATTEMPTS = 2

GROUP: dict[str, Any] = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0]}

ANSWERS = {
    "/": {"message": "AtroposLib API"},
    "/register": {"uuid": 7},
    "/info": {"batch_size": 2, "max_token_len": 64},
    "/batch": {"batch": [GROUP, GROUP]},
}

Fault = Callable[[SocketStream], Awaitable[None]]

PAGE = b"<html>\n<body>\n" + b"<p>Welcome to the proxy.</p>\n" * 500 + b"</body>\n</html>\n"

PACKED = gzip.compress(json.dumps({"message": "AtroposLib API"} | {"batch": [GROUP] * 100}).encode())


def http(body: bytes, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n{headers}\r\n".encode() + body


def says(answer: bytes) -> Fault:
    async def fault(stream: SocketStream) -> None:
        await stream.send(answer)

    return fault


async def silent(_: SocketStream) -> None:
    await anyio.sleep_forever()


async def dripping(stream: SocketStream) -> None:
    """Send a byte after the other; each arrives in time, and the answer never ends."""
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        await stream.send(b" ")
        await anyio.sleep(0.01)


async def endless(stream: SocketStream) -> None:
    """Send an answer that never ends, as fast as it is read."""
    await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await stream.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


async def closed(_: SocketStream) -> None:
    """Close the connection."""


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "a page": (says(http(PAGE)), "no JSON", "expected the JSON of"),
    "other JSON": (says(http(b'{"detail": "hello"}')), "no JSON", "expected the JSON of"),
    "a list": (says(http(b"[1, 2]")), "no JSON", "expected the JSON of"),
    "half of an answer": (says(http(b'{"message": "Atro')), "no JSON", "expected the JSON of"),
    "nothing": (says(http(b"")), "no JSON", "expected the JSON of"),
    "not UTF-8": (says(http(b'{"message": "\xff"}')), "no JSON", "expected the JSON of"),
    "500": (says(http(b"Traceback:\n  NaN\n", "500 Internal Server Error")), "failed", "got 500: Traceback: NaN"),
    "500 with a page": (says(http(PAGE, "500 Internal Server Error")), "failed", "got 500: <html>"),
    "404 with a page": (says(http(PAGE, "404 Not Found")), "rejected", "got 404: <html>"),
    "a redirect": (says(http(b"", "302 Found", "Location: /login\r\n")), "rejected", "got a redirect to /login"),
    "truncated gzip": (says(http(PACKED[:-20], headers="Content-Encoding: gzip\r\n")), "no JSON", "expected"),
    "no gzip": (says(http(b"{}" * 50, headers="Content-Encoding: gzip\r\n")), "failed", "expected an answer"),
    "a body that breaks off": (says(http(b'{"message"', length=100)), "failed", "expected an answer, got none"),
    "another protocol": (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "failed", "expected an answer"),
    "a closed connection": (closed, "failed", "expected an answer, got none"),
}
"""What a server does, the situation, and a part of the message."""


@dataclass
class Server:
    """Answers as the contract has it, until the request that fails: the first to `fails_at`, the second to /batch."""

    fails_at: str
    fault: Fault
    url: str = ""
    asked: list[str] = field(default_factory=list)

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            head, _, _ = (await stream.receive()).partition(b"\r\n")
            path = head.split()[1].decode().partition("?")[0]
            self.asked.append(path)
            if path == self.fails_at and (path != "/batch" or self.asked.count("/batch") > 1):
                await self.fault(stream)
            else:
                await stream.send(http(json.dumps(ANSWERS[path]).encode()))


@asynccontextmanager
async def serving(fails_at: str, fault: Fault) -> AsyncIterator[Server]:
    server = Server(fails_at, fault)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610 (of a socket)

        async def handled(stream: SocketStream) -> None:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):  # the client has read enough
                await server.serve(stream)

        tasks.start_soon(listener.serve, handled)
        yield server
        tasks.cancel_scope.cancel()


async def failure(url: str, **more: Any) -> AtroposAPIError:
    client = AtroposClient(
        api_url=url, batch_size=2, max_token_len=64, num_steps=3, reconnect_timeout_s=0, lease_s=None, **more
    )
    with anyio.fail_after(FAILSAFE_S), pytest.raises(AtroposAPIError) as raised:
        await drive_source(client)
    return raised.value


@pytest.mark.parametrize("fails_at", ANSWERS)
@pytest.mark.parametrize("name", FAULTS)
async def test_the_error_is_one_line_with_what_to_check(
    name: str, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, BACKOFF=Backoff(ATTEMPTS, 0.001, 0.002), POLLS=Backoff(2**62, 0.001, 0.002))
    fault, situation, part = FAULTS[name]

    async with serving(fails_at, fault) as server:
        error = await failure(server.url)

    assert (error.situation, error.summary.count("\n")) == (situation, 0), error
    assert f" {server.url}{fails_at}" in error.summary
    assert part in error.summary
    assert "\n" not in str(error)
    assert len(error.summary) < 600
    assert ". To check: (1) " in str(error)
    assert server.asked.count(fails_at) <= 2 * ATTEMPTS + 1  # aiohttp repeats a GET whose connection was closed


@pytest.mark.parametrize("fails_at", ANSWERS)
@pytest.mark.parametrize("fault", [silent, dripping])
async def test_a_server_that_is_too_slow_ends_each_attempt(
    fault: Fault, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, BACKOFF=Backoff(ATTEMPTS, 0.001, 0.002), POLLS=Backoff(2**62, 0.001, 0.002))

    async with serving(fails_at, fault) as server:
        error = await failure(server.url, request_timeout_s=0.2)

    assert error.situation == "timed out"
    assert "within 0.2 s, got none (attempt 2, after" in error.summary
    assert "(3) is it only slow? Raise `request_timeout_s`" in str(error)


@pytest.mark.parametrize("fails_at", ["/", "/register", "/info"])
async def test_an_answer_that_never_ends_is_not_stored(fails_at: str) -> None:
    async with serving(fails_at, endless) as server:
        error = await failure(server.url)

    assert error.situation == "no JSON"
    assert "expected a response of at most 4,194,304 bytes, got more" in error.summary
    assert server.asked.count(fails_at) == 1
