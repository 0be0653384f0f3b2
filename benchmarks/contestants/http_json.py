"""JSON over HTTP, as in RL frameworks: environments POST to a server, and the trainer GETs from it.

The server (FastAPI, uvicorn, a process of its own) validates and queues requests; columns are sent as lists of lists.
`http` is the upper bound of this method: kept connections without compression. `http-gzip` is the common practice: a
new connection for each request, and bodies gzipped both ways.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..records import COLUMNS, ROW, Plain
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, need, producing, race

__all__ = ["http_gzip", "http_keepalive"]

GZIP_FROM_BYTES = 1000
TAKEN_AT_ONCE = 16


def http_keepalive(case: Case) -> Outcome:
    """Keep connections, without compression."""
    return race(case, partial(_serve, compressed=False), _connect)


def http_gzip(case: Case) -> Outcome:
    """Open a connection for each request, with gzipped bodies."""
    return race(case, partial(_serve, compressed=True), _connect)


class _Address(NamedTuple):
    port: int
    compressed: bool


@contextmanager
def _serve(case: Case, _control: Control, *, compressed: bool) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    for module in "fastapi", "uvicorn":
        need(module, "fastapi uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = _Address(listener.getsockname()[1], compressed)
        with producing(_run_server, [(listener, compressed, IN_FLIGHT * case.producers)]) as processes:
            yield address, _taken_from(_Client(address))
            processes[0].terminate()


def _taken_from(client: _Client) -> Iterator[Plain | None]:
    while True:
        groups = client.request("GET", "/batch")["batch"]
        if not groups:
            yield None
        for group in groups:
            yield _from_lists(group)


class _Client:
    """A client of the server, of one of the two kinds."""

    def __init__(self, address: _Address) -> None:
        self._address = address
        self._kept = self._open()

    def _open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._address.port, timeout=60)

    def request(self, method: str, path: str, content: Any = None) -> Any:
        """Send `content` as JSON; return the content of the response."""
        body = b"" if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        if not self._address.compressed:
            return json.loads(self._send(self._kept, method, path, body, headers))
        if len(body) >= GZIP_FROM_BYTES:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        connection = self._open()
        try:
            return json.loads(self._send(connection, method, path, body, headers | {"Accept-Encoding": "gzip"}))
        finally:
            connection.close()

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> bytes:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        body_received = response.read()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{method} {path}: {response.status} {body_received[:200]!r}")
        return gzip.decompress(body_received) if response.headers.get("Content-Encoding") == "gzip" else body_received


@contextmanager
def _connect(address: _Address, _producer: int) -> Iterator[Send]:
    client = _Client(address)
    yield lambda record: client.request("POST", "/scored_data", _to_lists(record))


def _to_lists(record: Plain) -> dict[str, Any]:
    sequences = len(record.rows)
    columns = {
        name: column.reshape(sequences, -1).tolist() for name, column in zip(COLUMNS, record.columns, strict=True)
    }
    return {"env": record.env, "instance_id": record.instance_id, "meta": record.meta, **columns} | {
        name: record.rows[name].tolist() for name in ROW.names or ()
    }


def _from_lists(group: dict[str, Any]) -> Plain:
    rows = np.empty(len(group["reward"]), ROW)
    for name in ROW.names or ():
        rows[name] = group[name]
    columns = [np.array(group[name], dtype).ravel() for name, dtype in COLUMNS.items()]
    return Plain(group["env"], group["instance_id"], group["meta"], rows, columns)


# -- the server ------------------------------------------------------------------------------------------------------


def _run_server(listener: socket.socket, compressed: bool, bound: int) -> None:  # noqa: FBT001
    uvicorn = need("uvicorn", "fastapi uvicorn")
    config = uvicorn.Config(_app(compressed, bound), log_level="critical", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def _app(compressed: bool, bound: int) -> Any:  # noqa: FBT001
    fastapi, pydantic = need("fastapi", "fastapi uvicorn"), need("pydantic", "fastapi uvicorn")
    kinds: dict[str, Any] = dict.fromkeys(COLUMNS, (list[list[float]], ...))
    kinds |= {"tokens": (list[list[int]], ...), "loss_mask": (list[list[bool]], ...)}
    kinds |= dict.fromkeys(ROW.names or (), (list[int], ...)) | {"reward": (list[float], ...)}
    scored_data = pydantic.create_model(
        "ScoredData", env=(str, ...), instance_id=(str, ...), meta=(dict[str, Any], ...), **kinds
    )
    waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(bound)

    async def put(data: Any) -> dict[str, str]:
        await waiting.put(data.model_dump())
        return {"status": "received"}

    async def take() -> dict[str, Any]:
        try:
            batch = [await asyncio.wait_for(waiting.get(), IDLE_S)]
        except TimeoutError:
            return {"batch": []}
        while len(batch) < TAKEN_AT_ONCE and not waiting.empty():
            batch.append(waiting.get_nowait())
        return {"batch": batch}

    app = fastapi.FastAPI()
    put.__annotations__["data"] = scored_data
    app.post("/scored_data")(put)
    app.get("/batch")(take)
    if not compressed:
        return app
    app.add_middleware(need("starlette.middleware.gzip", "fastapi").GZipMiddleware, minimum_size=GZIP_FROM_BYTES)
    return _Inflating(app)


class _Inflating:
    """Inflates gzipped requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"content-encoding", b"gzip") not in scope.get("headers", ()):
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        inflated = {"type": "http.request", "body": gzip.decompress(body), "more_body": False}

        async def received() -> Any:
            return inflated

        await self._app(scope, received, send)
