"""The server of `penstock report --serve`: on loopback, for a page that asks it for newer data.

Another site that a browser shows could resolve its own name to this host (DNS rebinding): requests for another name
than that of loopback are refused. Files are read in a thread, and only again once one of them has changed.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .._pipeline.report.collected import TIME_FORMAT, Collected, collect, stamp_of
from .._pipeline.report.page import page, policy_of_page
from .._pipeline.util.signals import handled_stop_signals
from .._stages.http.limits import Limits, RequestRejections
from .._stages.http.serving import BACKLOG, serving

HOST = "127.0.0.1"

NAMES = [HOST, "localhost"]
"""The names of this server in a request."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class FollowedRuns:
    """The runs of a page, read again when their files have changed. One event loop uses it.

    Args:
        folders: of the runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._reading = anyio.Lock()
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._collected: Collected | None = None
        self._data = b""
        self._tag = ""

    async def page(self, request: Request) -> Response:  # noqa: ARG002 (starlette's)
        """Return the page."""
        await self.read()
        assert self._collected is not None  # noqa: S101 (it has been read)
        shown = await anyio.to_thread.run_sync(lambda collected: page(collected, follows=True), self._collected)
        headers = HEADERS | {"Content-Security-Policy": f"{policy_of_page(follows=True)}; frame-ancestors 'none'"}
        return Response(shown, media_type="text/html", headers=headers)

    async def data(self, request: Request) -> Response:
        """Return the data of the page, or 304 where the page has them."""
        await self.read()
        headers = HEADERS | {"ETag": self._tag}
        if request.headers.get("If-None-Match") == self._tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(self._data, media_type="application/json", headers=headers)

    async def read(self) -> None:
        """Read the files if one has changed since the last time."""
        async with self._reading:
            stamp = await anyio.to_thread.run_sync(stamp_of, self._folders)
            if stamp == self._stamp and self._data:
                return
            self._collected = await anyio.to_thread.run_sync(collect, self._folders, time.strftime(TIME_FORMAT))
            self._data = await anyio.to_thread.run_sync(msgspec.json.encode, self._collected)
            self._tag = f'"{hashlib.sha256(self._data).hexdigest()}"'
            self._stamp = stamp


def application(runs: FollowedRuns) -> Starlette:
    """Return the server's routes."""
    return Starlette(
        routes=[Route("/", runs.page), Route("/data.json", runs.data)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False)],
    )


async def serve_report(folders: Sequence[Path], port: int, on_listening: Callable[[str], None]) -> None:
    """Serve the page of some runs until a stop signal arrives; `on_listening` is called with its URL.

    Raises:
        NoView: one of them is no folder of a run.
        OSError: the port is taken.
    """
    runs = FollowedRuns(folders)
    await runs.read()  # an error comes before the server does
    with _listener(port) as listener, anyio.open_signal_receiver(*handled_stop_signals()) as signals:
        async with serving(application(runs), listener, Limits(), RequestRejections(), _error_body):
            on_listening(f"http://{HOST}:{listener.getsockname()[1]}/")
            async for _ in signals:
                return


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{HOST}:{port}: {error.strerror}; give another --port") from None
    return listener


def _error_body(status: HTTPStatus, reason: str) -> bytes:
    return msgspec.json.encode({"status": status.value, "error": reason})
