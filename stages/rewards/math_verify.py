"""`MathVerify`: rewards a completion whose final answer equals the answer in the data, compared by math-verify.

The comparison runs in a process of its own: its time limits need the main thread, and a formula can keep an interpreter
busy without end. A process that hangs or dies is replaced.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from ..._pipeline.errors import MissingColumn, RewardProcessDied
from ..._pipeline.processes.worker_payload import interpreter_command
from ..._pipeline.util.extras import extra
from ..._schemas.config import nearest
from . import math_process
from .math_process import Reply
from .reward_functions import RewardComponent
from .reward_input import RewardInput

START_TIMEOUT_S = 60.0
"""Bound on the start of a process: importing math-verify takes seconds on a busy machine."""

LONGEST_REPLY = 65_536
"""Bytes; a reply has about 20, or the message of an error."""


@dataclass(frozen=True, slots=True)
class MathVerify(RewardComponent):
    r"""1 for a completion whose final answer equals the answer in the data, 0 for any other. Needs the extra `math`.

    Both may be numbers or LaTeX: `0.5` equals `$\frac{1}{2}$`. The last answer of the completion counts, and one in
    `\boxed{}` before any other. Where the answer in the data cannot be read, nothing is added to the reward.

    >>> MathVerify("solution", weight=2.0).name
    'math_verify'

    Args:
        answer: the column with the right answer.
        concurrency: bound on processes, each of which makes one comparison at a time.
    """

    answer: str = "answer"
    concurrency: int = field(default=1, kw_only=True)

    def default_name(self) -> str:
        """Return "math_verify"."""
        return "math_verify"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Callable[[RewardInput], Awaitable[float | None]]]:
        """Start the first process.

        Raises:
            MissingExtra: math-verify is not installed.
        """
        with extra("math", "MathVerify"):
            if importlib.util.find_spec("math_verify") is None:
                raise ModuleNotFoundError(name="math_verify")
        processes = _Processes()
        try:
            async with processes.borrowed():
                pass
            yield partial(self._verdict, processes)
        finally:
            await processes.close()

    async def _verdict(self, processes: _Processes, completion: RewardInput) -> float | None:
        row = completion.row
        if self.answer not in row:
            raise MissingColumn(
                f"{self.name}: expected the data to have a column {self.answer!r}, got rows with {sorted(row)}"
                f"{nearest(self.answer, row)}. Name the column: MathVerify(answer=…)"
            )
        async with processes.borrowed() as process:
            reply = await process.ask(str(row[self.answer]), completion.text)
        if reply.error:
            raise ValueError(reply.error)
        return None if reply.correct is None else float(reply.correct)


class _Processes:
    """Processes that are started when none is idle."""

    def __init__(self) -> None:
        self._idle: list[_MathProcess] = []

    @asynccontextmanager
    async def borrowed(self) -> AsyncGenerator[_MathProcess]:
        """Yield a process that has no other call; end it if the body raises or is cancelled."""
        while self._idle and self._idle[-1].ended:
            await self._idle.pop().close()
        process = self._idle.pop() if self._idle else await _MathProcess.start()
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


class _MathProcess:
    """A process that runs `math_process`, and the pipes to it."""

    def __init__(self, process: Process, requests: ByteSendStream, replies: ByteReceiveStream) -> None:
        self._process = process
        self._requests = requests
        self._replies = BufferedByteReceiveStream(replies)

    @classmethod
    async def start(cls) -> Self:
        """Return a new process that is ready.

        Raises:
            RewardProcessDied: it ended, or was not ready in time.
        """
        process = await anyio.open_process(interpreter_command(math_process.__name__, str(os.getpid())), stderr=None)
        assert process.stdin is not None  # noqa: S101 (pipes by default)
        assert process.stdout is not None  # noqa: S101 (as above)
        started = cls(process, process.stdin, process.stdout)
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
        raise RewardProcessDied(
            f"expected the process of math-verify to be ready within {START_TIMEOUT_S:g} s, got no answer, and killed "
            f"it: see whether `{sys.executable} -c 'import math_verify'` returns"
        )

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.returncode is not None

    async def ask(self, answer: str, text: str) -> Reply:
        """Return the verdict about `text`."""
        try:
            await self._requests.send(msgspec.json.encode((answer, text)) + b"\n")
        except anyio.BrokenResourceError:
            raise await self._died() from None
        return await self._reply()

    async def _reply(self) -> Reply:
        try:
            line = await self._replies.receive_until(b"\n", LONGEST_REPLY)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            raise await self._died() from None
        return msgspec.json.decode(line, type=Reply)

    async def _died(self) -> RewardProcessDied:
        status = await self._process.wait()
        return RewardProcessDied(
            f"expected a verdict from the process of math-verify, got its end with status {status}; its error output "
            f"is on stderr"
        )

    async def close(self) -> None:
        """End the process, and wait for its end."""
        with anyio.CancelScope(shield=True):
            if not self.ended:
                with suppress(ProcessLookupError):  # it has ended since
                    self._process.kill()
            await self._process.aclose()
