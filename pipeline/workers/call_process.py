"""Call a function in a process of its own, ended where the call is given up; the parent's side.

For calls that keep an interpreter busy without end, with no other bound on their time. A process that hangs or dies is
replaced. `reply_loop.py` is the child's side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from ..errors import CallProcessDied
from ..servers.subreaper_process import subreaper_command
from .worker_payload import child_program

START_TIMEOUT_S = 60.0
"""Bound on the start of a process: its imports take seconds on a busy machine."""


@dataclass(frozen=True, slots=True)
class Callee:
    """The program of a process."""

    module: str
    """The main module."""
    name: str
    """Its name in errors: `math-verify`."""
    imports: str
    """The module that it imports first."""
    starts_others: bool = False
    """True if its calls may start processes: these end with it."""
    python: str | None = None
    """Path of another interpreter; None for this one."""
    longest_reply: int = 65_536
    """Bytes."""


class CallProcesses:
    """Processes that are started when none is idle."""

    def __init__(self, callee: Callee) -> None:
        self._callee = callee
        self._idle: list[CallProcess] = []

    @asynccontextmanager
    async def borrowed(self) -> AsyncGenerator[CallProcess]:
        """Yield a process that has no other call; end it if the body raises or is cancelled."""
        while self._idle and self._idle[-1].ended:
            await self._idle.pop().close()
        process = self._idle.pop() if self._idle else await CallProcess.start(self._callee)
        try:
            yield process
        except BaseException:
            await process.close()
            raise
        self._idle.append(process)

    async def close(self) -> None:
        """End all."""
        while self._idle:
            await self._idle.pop().close()


class CallProcess:
    """One process, and the pipes to it."""

    def __init__(
        self, callee: Callee, process: Process, requests: ByteSendStream, replies: ByteReceiveStream, stop: int
    ) -> None:
        self._callee = callee
        self._stop = stop
        """The descriptor whose end stops the subreaper that the process runs below; −1 without one."""
        self._process = process
        self._requests = requests
        self._replies = BufferedByteReceiveStream(replies)

    @classmethod
    async def start(cls, callee: Callee) -> Self:
        """Return a new process that is ready.

        Raises:
            CallProcessDied: it ended, or was not ready in time.
        """
        stop = -1
        if callee.starts_others:
            process, stop = await _below_subreaper(*child_program(callee.python, callee.module, ""))
        else:
            command, environment = child_program(callee.python, callee.module, str(os.getpid()))
            process = await anyio.open_process(command, env=environment, stderr=None)
        assert process.stdin is not None  # noqa: S101 (pipes by default)
        assert process.stdout is not None  # noqa: S101 (as above)
        started = cls(callee, process, process.stdin, process.stdout, stop)
        try:
            await started._ready()
        except BaseException:
            await started.close()
            raise
        return started

    async def _ready(self) -> None:
        with anyio.move_on_after(START_TIMEOUT_S):
            await self._reply()
            return
        python = self._callee.python or sys.executable
        raise CallProcessDied(
            f"expected the process of {self._callee.name} to be ready within {START_TIMEOUT_S:g} s, got no answer, and "
            f"killed it: see whether `{python} -c 'import {self._callee.imports}'` returns"
        )

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.returncode is not None

    async def ask(self, *request: str | Sequence[str]) -> bytes:
        """Return the reply to a request, as JSON."""
        try:
            await self._requests.send(msgspec.json.encode(request) + b"\n")
        except anyio.BrokenResourceError:
            raise await self._died() from None
        return await self._reply()

    async def _reply(self) -> bytes:
        try:
            return await self._replies.receive_until(b"\n", self._callee.longest_reply)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            raise await self._died() from None

    async def _died(self) -> CallProcessDied:
        status = await self._process.wait()
        end = "its end" if self._callee.starts_others else f"its end with status {status}"
        return CallProcessDied(
            f"expected a reply from the process of {self._callee.name}, got {end}; its error output is on stderr"
        )

    async def close(self) -> None:
        """End the process, and wait for its end."""
        with anyio.CancelScope(shield=True):
            if self._stop >= 0:
                os.close(self._stop)
                self._stop = -1
                await self._process.wait()
            elif not self.ended:
                with suppress(ProcessLookupError):  # it has ended since
                    self._process.kill()
            await self._process.aclose()


async def _below_subreaper(command: Sequence[str], environment: Mapping[str, str] | None) -> tuple[Process, int]:
    """Start a command below a subreaper, and return that, and the descriptor whose end ends both at once."""
    (stop_read, stop), status = os.pipe2(os.O_CLOEXEC), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        process = await anyio.open_process(
            subreaper_command(command, 0.0, stop_read, status),
            env=environment,
            stderr=None,
            pass_fds=(stop_read, status),
        )
    except BaseException:
        os.close(stop)
        raise
    finally:
        os.close(stop_read)
        os.close(status)
    return process, stop
