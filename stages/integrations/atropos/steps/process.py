"""The parent's side of an environment's process.

The process is started and ended by a keeper, which ends all that the environment has started, also when the parent
dies. One thread does the messages of every environment of this process; callers wait in threads and loops of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from typing import Literal

from .....pipeline.errors import PenstockError
from .....pipeline.processes import keeper
from .....pipeline.processes.job import interpreter_command, write_job
from .messages import (
    Action,
    EnvConfig,
    EnvironmentDied,
    EnvironmentTimedOut,
    Reply,
    Request,
    StepResult,
    encode_frame,
    read_frames,
)

__all__ = ["EnvProcess"]

KILL_AFTER_S = 1.0
"""From SIGTERM to SIGKILL."""


_reading: set[asyncio.Task[None]] = set()
"""One for each process until it has ended, though no caller may know it any more."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that does the messages."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="penstock Atropos environments", daemon=True).start()
    return loop


class EnvProcess:
    """An opened environment in a process of its own. Any thread may call it."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[StepResult | None]] = {}
        """By the id of the request; on the loop only."""
        self._writer: asyncio.StreamWriter | None = None
        self._orders = -1
        """Closed to have the keeper end the process."""
        self.error: PenstockError | None = None
        """Why it is of no more use; None while it is."""
        self._opened = asyncio.run_coroutine_threadsafe(self._open(), _loop())

    def opened(self) -> concurrent.futures.Future[None]:
        """Return a future that is done when the environment is set up.

        Raises:
            EnvironmentTimedOut: from the future, if it took too long.
            PenstockError: from the future, what the environment raised.
        """
        return self._opened

    def request(
        self,
        kind: Literal["reset", "step"],
        player: int,
        *,
        seed: int | None = None,
        action: Action | None = None,
    ) -> concurrent.futures.Future[StepResult | None]:
        """Return a future of the reply; cancelled, it gives up what the player plays.

        Raises:
            EnvironmentTimedOut: from the future, if the environment blocked its process for too long.
            EnvironmentDied: from the future, if the process ended.
            PenstockError: from the future, what the episode came to.
        """
        message = Request(id=next(self._ids), kind=kind, player=player, seed=seed, action=action)
        return asyncio.run_coroutine_threadsafe(self._asked(message), _loop())

    def leave(self, player: int) -> None:
        """Give up what the player plays."""
        _loop().call_soon_threadsafe(self._leave, player)

    def close(self) -> None:
        """Have the process end; it is not waited for."""
        _loop().call_soon_threadsafe(self._end, EnvironmentDied("the environment was closed"))

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        limit_s = self._config.setup_timeout_s
        try:
            reader, words = await self._start()
            opened = self._expect(0)
            reading = asyncio.create_task(self._read(reader, words))
            _reading.add(reading)
            reading.add_done_callback(_reading.discard)
            await asyncio.wait_for(opened, limit_s)
        except TimeoutError:
            self._end(
                EnvironmentTimedOut(
                    f"the environment took more than {limit_s:g} s to be imported, made and set up: see what it waits "
                    f"for, or raise setup_timeout_s"
                )
            )
        except OSError as error:
            self._end(EnvironmentDied(f"the environment's process could not be started: {error}"))
        except PenstockError as error:
            self._end(error)
        if self.error is not None:
            raise self.error

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamReader]:
        """Start the process; returns where its messages come from, and the words of its keeper."""
        channel, words = await asyncio.to_thread(self._spawn)
        told = asyncio.StreamReader()
        await _loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), os.fdopen(words, "rb"))
        reader, self._writer = await asyncio.open_connection(sock=channel)
        return reader, told

    def _spawn(self) -> tuple[socket.socket, int]:
        """Start the keeper, which starts the process. Blocks."""
        job = write_job(self._config)
        ours, theirs = socket.socketpair()
        (hears, self._orders), (words, says) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        options = [str(os.getpid()), str(KILL_AFTER_S), str(hears), str(says)]
        child = interpreter_command("penstock.stages.integrations.atropos.steps.child", f"{job} {theirs.fileno()}")
        try:
            self._keeper = subprocess.Popen(  # noqa: S603 (this very interpreter)
                [sys.executable, "-I", "-S", keeper.__file__, *options, *child],
                stdin=subprocess.DEVNULL,
                pass_fds=(hears, says, job, theirs.fileno()),
                start_new_session=True,
            )
        finally:
            theirs.close()
            for descriptor in (hears, says, job):
                os.close(descriptor)
        return ours, words

    async def _read(self, reader: asyncio.StreamReader, words: asyncio.StreamReader) -> None:
        """Hand out replies until the process ends, and say how it did."""
        async for reply in read_frames(reader, Reply):
            self._receive(reply)
        self._kill()  # it may have closed its end and live on
        async for line in words:
            if line.startswith(b"ended"):
                self._end(EnvironmentDied(f"the environment's process {_how(int(line.split()[1]))}"))
        self._end(EnvironmentDied("the environment's process ended, and its keeper before it could say how"))
        await asyncio.to_thread(self._keeper.wait)

    def _receive(self, reply: Reply) -> None:
        future = self._waiting.pop(reply.id, None)
        if future is None or future.done():
            return
        if reply.failure is not None:
            future.set_exception(reply.failure.error())
        else:
            future.set_result(reply.result)

    def _end(self, error: PenstockError) -> None:
        """Have the process end; whoever waits is told `error`."""
        if self.error is not None:
            return
        self.error = error
        self._kill()
        if self._writer is not None:
            self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # of a ping, nobody retrieves it
        self._waiting.clear()

    def _kill(self) -> None:
        orders, self._orders = self._orders, -1
        if orders >= 0:
            os.close(orders)

    def _expect(self, number: int) -> asyncio.Future[StepResult | None]:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return future

    def _send(self, message: Request) -> asyncio.Future[StepResult | None]:
        if self.error is not None or self._writer is None:
            raise self.error or EnvironmentDied("the environment was not started")
        self._writer.write(encode_frame(message))
        return self._expect(message.id)

    async def _asked(self, message: Request) -> StepResult | None:
        """Return the reply; where the process blocks instead of replying, it is killed."""
        await asyncio.shield(asyncio.wrap_future(self._opened))
        limit_s = self._config.turn_timeout_s
        reply = self._send(message)
        try:
            while not reply.done():
                pong = self._send(Request(id=next(self._ids), kind="ping"))
                await asyncio.wait([reply], timeout=limit_s)
                if not reply.done() and not pong.done():
                    self._end(EnvironmentTimedOut(f"the environment blocked its process for more than {limit_s:g} s"))
            return reply.result()
        except asyncio.CancelledError:
            self._leave(message.player)
            raise
        finally:
            self._waiting.pop(message.id, None)

    def _leave(self, player: int) -> None:
        if self.error is None and self._writer is not None:
            self._writer.write(encode_frame(Request(id=0, kind="leave", player=player)))  # there is no reply


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
