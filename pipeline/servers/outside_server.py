"""`OutsideServer`: a server of others (for inference, for an environment), started and stopped with a run.

It is ready when a probe succeeds, and it is watched while it is used. When the body ends, or the process that started
it is killed, `subreaper.py` ends its whole tree of processes: SIGTERM, a deadline, SIGKILL. Only processes that were
started here are signalled, never another one that holds the port or has the same name. The server's output is stored,
unless it goes to the streams of this process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..._schemas.numbers import normalize_numbers, whole_number
from ..accounting.telemetry import get_logger
from ..errors import InvalidConfig, ServerFailed
from ..graph.context import current
from ..util.os_errors import explaining_os_errors
from .log_errors import first_error
from .subreaper_process import SubreaperProcess, describe_end, start_subreaper

log = get_logger("penstock.outside_server")

PROBE_S = 5.0
"""Timeout of one probe: a server that accepts and does not answer is not ready."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Seconds between two probes; each pause is twice as long as the one before."""

SUBREAPER_TIMEOUT_S = 5.0
"""Seconds that the subreaper may take to end after the server."""

TAIL_BYTES = 4096
"""Bytes of the end of the server's log in an error."""

SEARCHED_BYTES = 2**18
"""Bytes of the end of the log that are searched for the first error: the whole output of a server that starts. If it
ends later, errors that it survived mostly lie before."""

Probe: TypeAlias = Callable[[], Awaitable[object]]
"""Raises until the server is ready; if it never is, its last exception is reported."""


def http_ready(url: str) -> Probe:
    """Return a probe that succeeds when a GET of this `http://` URL is answered with a status from 200 to 299.

    Raises:
        InvalidConfig: `url` is no such URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidConfig(f"url: expected one that begins with http:// and names a host, got {url!r}")
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
    """Return a probe that succeeds when a server accepts connections at this port."""
    return partial(_connect, host, whole_number("port", port))


async def _connect(host: str, port: int) -> None:
    await (await anyio.connect_tcp(host, port)).aclose()


class RunningServer:
    """A server that was started here, until all its processes have ended."""

    def __init__(
        self,
        name: str,
        log_path: Path | None,
        process: SubreaperProcess,
        *,
        log_start: int,
        pidfd: int,
    ) -> None:
        self.name = name
        self._log = log_path
        """None where its output goes to the streams of this process."""
        self._log_start = log_start
        """Bytes that were in the log before, of earlier servers."""
        self.pid: int = 0
        """Id of the process that runs the command; 0 before that."""
        self.ended: anyio.Event = anyio.Event()
        """Set when that process has ended, or could not be started."""
        self.exit_reason: str = ""
        """The cause of its exit: `exited with status 1`; empty while it runs."""
        self.exit_code: int | None = None
        """Negative for a signal; None while it runs, and where it could not be started."""
        self.was_ready: bool = False
        """True once its probe has succeeded."""
        self._status_ended = anyio.Event()
        """Set when the subreaper has closed its status."""
        self._process = process
        self._pidfd = pidfd
        for descriptor in (process.stop_fd, process.status_fd):
            os.set_blocking(descriptor, False)

    def __repr__(self) -> str:
        return f"<RunningServer {self.name}: {self.exit_reason or f'pid {self.pid}'}>"

    @property
    def log(self) -> Path:
        """Return the file that the output of both streams is appended to.

        Raises:
            InvalidConfig: its output goes to the streams of this process.
        """
        if self._log is None:
            raise InvalidConfig(f"logs: expected a folder where the log of {self.name} is read, got None")
        return self._log

    async def watch(self) -> None:
        """Handle the subreaper's status lines until it ends. Shielded from cancellation; `stop` ends the subreaper."""
        try:
            with anyio.CancelScope(shield=True):
                async for line in self._status_lines():
                    status, value = line.split()
                    if status == "started":
                        self.pid = int(value)
                    else:
                        self.exit_code = None if status == "refused" else os.waitstatus_to_exitcode(int(value))
                        self._set_ended(describe_end(status, int(value)))
        finally:
            self._set_ended("lost its subreaper")
            self._status_ended.set()

    async def _status_lines(self) -> AsyncIterator[str]:
        begun, read = b"", b"\n"
        while read:
            *lines, begun = (begun + read).split(b"\n")
            for line in filter(None, lines):
                yield line.decode()
            await anyio.wait_readable(self._process.status_fd)
            read = os.read(self._process.status_fd, 512)

    def _set_ended(self, exit_reason: str) -> None:
        self.exit_reason = self.exit_reason or exit_reason
        self.ended.set()

    async def stop(self, within_s: float) -> None:
        """End all its processes, and its subreaper. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            with suppress(BrokenPipeError):
                os.write(self._process.stop_fd, b"stop")
            with anyio.move_on_after(within_s + SUBREAPER_TIMEOUT_S) as deadline:
                await anyio.wait_readable(self._pidfd)
            if deadline.cancelled_caught:
                log.warning(
                    "server_exit_timeout", server=self.name, pid=self.pid, waited_s=within_s + SUBREAPER_TIMEOUT_S
                )
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                await anyio.wait_readable(self._pidfd)
            self._process.popen.poll()
            await self._status_ended.wait()
            for descriptor in (self._pidfd, self._process.stop_fd, self._process.status_fd):
                os.close(descriptor)
            log.info("server_stopped", server=self.name, pid=self.pid)

    def excerpt(self) -> str:
        """Return the end of its output, and the first error in its output; empty if it is not stored. Blocks."""
        if self._log is None:
            return ""
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
    """A description of a server of others: it can be pickled, and opened in the process that uses the server."""

    command: Sequence[str]
    """The program and its arguments; no shell."""
    ready: Probe
    """Checks that it can be used: `http_ready(url)`, `tcp_ready(port)`, or a coroutine function that raises if not."""
    name: str = ""
    """Its name in messages and that of its log; by default that of its program."""
    logs: str | Path | None = "logs"
    """Folder for its output: `<name>.log`, with the worker's index where there are several; appended to. None for the
    streams of this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    ready_timeout_s: float = 600.0
    """Seconds until it must be ready: a large model is loaded in minutes."""
    stop_timeout_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "ready_timeout_s", "stop_timeout_s", zero=True)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[RunningServer]:
        """Start it, wait until it is ready, and end all its processes with the body, and vice versa.

        Raises:
            ServerFailed: another server answers already; or it could not be started, was not ready in time, or ended
                before the body did, with the end of its output, and the first error in that.
            DiskFull, NotWritable: its log cannot be opened.
        """
        await self._until_probe_fails()
        stack = AsyncExitStack()
        try:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            server = await anyio.to_thread.run_sync(self._start)
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(server.stop, self.stop_timeout_s)
            tasks.start_soon(server.watch)
            async with _while_it_runs(server, tasks):
                await self._until_ready(server)
                server.was_ready = True
                yield server
        finally:
            await stack.aclose()  # and no `async with`: the task group would wrap what the body raises

    @property
    def _label(self) -> str:
        return self.name or Path(self.command[0]).name

    def _start(self) -> RunningServer:
        worker = current().worker
        label = f"{self._label}-{worker.index}" if worker.count > 1 else self._label
        path = None if self.logs is None else Path(self.logs).absolute() / f"{label}.log"
        with nullcontext() if path is None else _opened_log(path) as printed:
            log_start = 0 if printed is None else printed.tell()
            environment = os.environ | dict(self.environment)
            process = start_subreaper(self.command, self.stop_timeout_s, output=printed, environment=environment)
        try:
            pidfd = os.pidfd_open(process.popen.pid)
        except OSError:
            os.close(process.stop_fd)
            process.popen.wait()
            os.close(process.status_fd)
            raise
        return RunningServer(label, path, process, log_start=log_start, pidfd=pidfd)

    async def _until_probe_fails(self) -> None:
        """Wait until the probe fails, for an earlier server to end: the probe cannot distinguish the two."""
        deadline = anyio.current_time() + self.stop_timeout_s
        async for error in self._probes():
            if error is not None:
                return
            if anyio.current_time() >= deadline:
                break
        raise ServerFailed(
            f"expected the probe to fail before {self._label} is started, it succeeded for {self.stop_timeout_s:g} s: "
            f"another server answers in its place; end that one, or choose another port"
        )

    async def _until_ready(self, server: RunningServer) -> None:
        began = anyio.current_time()
        last: BaseException | None = None
        with anyio.move_on_after(self.ready_timeout_s):
            async for error in self._probes():
                if error is None:
                    waited_s = round(anyio.current_time() - began, 2)
                    log.info("server_ready", server=server.name, pid=server.pid, waited_s=waited_s)
                    return
                last = error
        raise await _failed(server, f"was not ready within {self.ready_timeout_s:g} s: {last!r}")

    async def _probes(self) -> AsyncIterator[BaseException | None]:
        """Yield the exception of one probe after another; None where it succeeded."""
        pause_s = FIRST_PAUSE_S
        while True:
            yield await self._probe()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _probe(self) -> BaseException | None:
        try:
            with anyio.fail_after(PROBE_S):
                await self.ready()
        except Exception as error:  # noqa: BLE001 (every exception of a probe means: not ready)
            return error.__cause__ or error
        return None


@asynccontextmanager
async def _while_it_runs(server: RunningServer, tasks: TaskGroup) -> AsyncGenerator[None]:
    """Cancel the body when the server ends: that is then the cause of every exception of the body."""

    async def cancel() -> None:
        await server.ended.wait()
        used.cancel()

    with anyio.CancelScope() as used:
        tasks.start_soon(cancel)
        try:
            yield
        except Exception as error:
            if server.ended.is_set():
                raise await _failed(server, server.exit_reason) from error
            raise
    if used.cancelled_caught:
        raise await _failed(server, server.exit_reason)


async def _failed(server: RunningServer, failure: str) -> ServerFailed:
    excerpt = ""
    with anyio.CancelScope(shield=True):
        excerpt = await anyio.to_thread.run_sync(server.excerpt)
    failed = ServerFailed(f"{server.name} (pid {server.pid}) {failure}\n\n{excerpt}".rstrip())
    failed.server, failed.exit_code, failed.was_ready = server.name, server.exit_code, server.was_ready
    return failed
