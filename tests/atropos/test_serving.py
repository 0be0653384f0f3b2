"""The HTTP server as it ends."""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from starlette.responses import PlainTextResponse
from tests.failsafe import FAILSAFE_S

from penstock.stages.integrations.atropos.server.serving import serving


@pytest.mark.parametrize("turns", range(6))
async def test_who_connects_as_the_server_ends_is_hung_up_on(turns: int) -> None:
    """`turns` of the loop pass between the one and the other: uvicorn forgets whom it has accepted, but not met yet."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    async with serving(PlainTextResponse("here"), listener):
        async with await anyio.connect_tcp(*address) as early:
            await early.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert await early.receive()
        late = socket.create_connection(address, timeout=FAILSAFE_S)
        for _ in range(turns):
            await checkpoint()

    with late, suppress(ConnectionResetError):  # who was not accepted
        assert await anyio.to_thread.run_sync(late.recv, 1) == b""
