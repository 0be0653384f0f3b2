"""`OutsideServer`: a server that is not penstock's (for inference, for an environment), started and stopped with a run.

It is ready when a probe says so, it is watched while it is used, and when the body ends, or the process that started it
is killed, its whole tree of processes ends: SIGTERM, a deadline, SIGKILL (`subreaper.py` sees to that). Nothing that
was not started here is ever signalled: not whoever holds the port, nor who bears the name. What it prints is kept.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..._schemas.numbers import normalize_numbers, whole_number
from ..context import current
from ..errors import ServerFailed
from ..os_errors import explaining_os_errors
from ..telemetry import get_logger
from .kept_process import KeptProcess, describe_end, start_kept
from .log_errors import first_error

__all__ = ["OutsideServer", "Probe", "RunningServer", "http_ready", "tcp_ready"]

log = get_logger("penstock.outside_server")

PROBE_S = 5.0
"""How long one probe may take: a server that accepts and never answers is not ready."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between two probes; each pause is twice as long as the one before."""

KEEPER_S = 5.0
"""How much longer than the server its subreaper may take to end."""

TAIL_BYTES = 4096
"""What an error shows of the end of the server's log."""

SEARCHED_BYTES = 2**18
"""Of the end of the log, in which the first error is looked for: all that a server prints while it starts. When it ends
later, errors that it survived lie mostly before."""

Probe: TypeAlias = Callable[[], Awaitable[object]]
"""Raises until the server is ready; what it raises last is told where that is never."""


def http_ready(url: str) -> Probe:
    """Return a probe: a GET of this `http://` URL is answered with a status from 200 to 299.

    Raises:
        ValueError: it is not such a URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"expected a URL that begins with http:// and names a host, got {url!r}")
    return partial(_get, url)


async def _get(url: str) -> None:
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    async with await anyio.connect_tcp(parts.hostname or "", parts.port or 80) as stream:
        await stream.send(request.encode())
        answer = await stream.receive()
    _, _, status = answer.partition(b"\r\n")[0].partition(b" ")
    if not status.startswith(b"2"):
        raise ConnectionError(f"GET {url} was answered with {status.decode(errors='replace')!r}")


def tcp_ready(port: int, host: str = "127.0.0.1") -> Probe:
    """Return a probe: somebody accepts connections at this port."""
    return partial(_connect, host, whole_number("port", port))


async def _connect(host: str, port: int) -> None:
    await (await anyio.connect_tcp(host, port)).aclose()


class RunningServer:
    """A server that was started here, until all of it has ended."""

    def __init__(
        self,
        name: str,
        log_path: Path,
        kept: KeptProcess,
        *,
        log_start: int,
        pidfd: int,
    ) -> None:
        self.name = name
        self.log = log_path
        """What it prints, to either stream, is appended there."""
        self._log_start = log_start
        """Bytes that were in the log before: of servers that ran earlier."""
        self.pid = 0
        """Of the process that runs the command; 0 before it does."""
        self.ended = anyio.Event()
        """Set when that process is no more, or never began."""
        self.how = ""
        """How it ended, in words; empty while it runs."""
        self._heard = anyio.Event()
        """Set when there is nothing more to hear."""
        self._kept = kept
        self._pidfd = pidfd
        for descriptor in (kept.config, kept.words):
            os.set_blocking(descriptor, False)

    def __repr__(self) -> str:
        return f"<RunningServer {self.name}: {self.how or f'pid {self.pid}'}>"

    async def hear(self) -> None:
        """Take in what the subreaper tells, until it is no more. Not to be cancelled: `stop` sees to its end."""
        try:
            with anyio.CancelScope(shield=True):
                async for word in self._told():
                    self._heed(*word.split())
        finally:
            self._note_end("lost its subreaper")
            self._heard.set()

    async def _told(self) -> AsyncIterator[str]:
        begun, read = b"", b"\n"
        while read:
            *lines, begun = (begun + read).split(b"\n")
            for line in filter(None, lines):
                yield line.decode()
            await anyio.wait_readable(self._kept.words)
            read = os.read(self._kept.words, 512)

    def _heed(self, word: str, value: str) -> None:
        if word == "started":
            self.pid = int(value)
        else:
            self._note_end(describe_end(word, int(value)))

    def _note_end(self, how: str) -> None:
        self.how = self.how or how
        self.ended.set()

    async def stop(self, within_s: float) -> None:
        """Have all of it end, and its subreaper. Not to be cancelled."""
        with anyio.CancelScope(shield=True):
            with suppress(BrokenPipeError):
                os.write(self._kept.config, b"stop")
            with anyio.move_on_after(within_s + KEEPER_S) as deadline:
                await anyio.wait_readable(self._pidfd)
            if deadline.cancelled_caught:
                log.warning("server_lingers", server=self.name, pid=self.pid, waited_s=within_s + KEEPER_S)
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                await anyio.wait_readable(self._pidfd)
            self._kept.subreaper.poll()
            await self._heard.wait()
            for descriptor in (self._pidfd, self._kept.config, self._kept.words):
                os.close(descriptor)
            log.info("server_stopped", server=self.name, pid=self.pid)

    def excerpt(self) -> str:
        """Return the last that it printed, and the first error in what it printed. Blocks."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - SEARCHED_BYTES))
                printed = file.read()
        except OSError as error:
            return f"{self.log} cannot be read: {error.strerror}"
        tail = f"The end of {self.log}:\n\n{printed[-TAIL_BYTES:].decode(errors='replace').strip()}"
        cause = first_error(printed.decode(errors="replace").splitlines())
        return f"{tail}\n\nThe first error in it:\n\n{cause}" if cause else tail


def _opened_log(path: Path) -> BinaryIO:
    with explaining_os_errors("the log of a server", path, elsewhere="set logs to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideServer:
    """A recipe for a server from outside: it can be pickled, and opened wherever the server is to run."""

    command: Sequence[str]
    """The program and its arguments; no shell."""
    ready: Probe
    """Says when it can be used: `http_ready(url)`, `tcp_ready(port)`, or a coroutine function that raises till then."""
    name: str = ""
    """What it is called in messages and what its log is called; by default as its program."""
    logs: str | Path = "logs"
    """Folder for what it prints: `<name>.log`, with the worker's index where there are several. It is appended to."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    ready_timeout_s: float = 600.0
    """How long it may take to become ready: a large model is loaded in minutes."""
    stop_timeout_s: float = 10.0
    """From SIGTERM to SIGKILL."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "ready_timeout_s", "stop_timeout_s", zero=True)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[RunningServer]:
        """Start it, wait until it is ready, and end all of it with the body. If it ends first, so does the body.

        Raises:
            ServerFailed: somebody answers already; or it could not be started, was not ready in time, or ended before
                the body did, with the last that it printed, and the first error in that.
            DiskFull, NotWritable: its log cannot be opened.
        """
        await self._until_nobody_answers()
        stack = AsyncExitStack()
        try:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            server = await anyio.to_thread.run_sync(self._start)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(server.stop, self.stop_timeout_s)
            tasks.start_soon(server.hear)
            async with _while_it_runs(server, tasks):
                await self._until_ready(server)
                yield server
        finally:
            await stack.aclose()  # and no `async with`: the task group would wrap what the body raises

    @property
    def _called(self) -> str:
        return self.name or Path(self.command[0]).name

    def _start(self) -> RunningServer:
        worker = current().worker
        label = f"{self._called}-{worker.index}" if worker.count > 1 else self._called
        path = Path(self.logs).absolute() / f"{label}.log"
        with _opened_log(path) as printed:
            log_start = printed.tell()
            environment = os.environ | dict(self.environment)
            kept = start_kept(self.command, self.stop_timeout_s, output=printed, environment=environment)
        try:
            pidfd = os.pidfd_open(kept.subreaper.pid)
        except OSError:
            os.close(kept.config)
            kept.subreaper.wait()
            os.close(kept.words)
            raise
        return RunningServer(label, path, kept, log_start=log_start, pidfd=pidfd)

    async def _until_nobody_answers(self) -> None:
        """A probe that succeeds before there is a server says nothing about it. One from before has time to end."""
        deadline = anyio.current_time() + self.stop_timeout_s
        async for met in self._probed():
            if met is not None:
                return
            if anyio.current_time() >= deadline:
                break
        raise ServerFailed(
            f"expected the probe to fail before {self._called} is started, it succeeded for {self.stop_timeout_s:g} s: "
            f"another server answers in its place; end that one, or choose another port"
        )

    async def _until_ready(self, server: RunningServer) -> None:
        began = anyio.current_time()
        last: BaseException | None = None
        with anyio.move_on_after(self.ready_timeout_s):
            async for met in self._probed():
                if met is None:
                    waited_s = round(anyio.current_time() - began, 2)
                    log.info("server_ready", server=server.name, pid=server.pid, waited_s=waited_s)
                    return
                last = met
        raise await _failed(server, f"was not ready within {self.ready_timeout_s:g} s: {last!r}")

    async def _probed(self) -> AsyncIterator[BaseException | None]:
        """What one probe after another met; None where it succeeded."""
        pause_s = FIRST_PAUSE_S
        while True:
            yield await self._probe()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _probe(self) -> BaseException | None:
        try:
            with anyio.fail_after(PROBE_S):
                await self.ready()
        except Exception as error:  # noqa: BLE001 (whatever a probe raises means: not yet)
            return error.__cause__ or error
        return None


@asynccontextmanager
async def _while_it_runs(server: RunningServer, tasks: TaskGroup) -> AsyncGenerator[None]:
    """The server's end ends the body, and is the reason of whatever the body raises then."""

    async def cancel() -> None:
        await server.ended.wait()
        used.cancel()

    with anyio.CancelScope() as used:
        tasks.start_soon(cancel)
        try:
            yield
        except Exception as error:
            if server.ended.is_set():
                raise await _failed(server, server.how) from error
            raise
    if used.cancelled_caught:
        raise await _failed(server, server.how)


async def _failed(server: RunningServer, how: str) -> ServerFailed:
    excerpt = ""
    with anyio.CancelScope(shield=True):
        excerpt = await anyio.to_thread.run_sync(server.excerpt)
    return ServerFailed(f"{server.name} (pid {server.pid}) {how}\n\n{excerpt}")
