"""The parent's side of an environment's process.

The process is started and ended by a subreaper, which ends all that the environment has started, also when the parent
dies. One thread exchanges the messages of every environment of this process; callers wait in other threads and loops.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import socket
import threading
from functools import cache
from typing import Literal

from ....._pipeline.errors import PenstockError
from ....._pipeline.processes.subreaper_process import SubreaperProcess, describe_end, start_subreaper
from ....._pipeline.processes.worker_payload import interpreter_command, write_payload
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
"""Time from SIGTERM to SIGKILL."""

_reading: set[asyncio.Task[None]] = set()
"""One for each process, until it has ended: no caller may hold a reference."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that exchanges the messages."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="penstock Atropos environments", daemon=True).start()
    atexit.register(lambda: concurrent.futures.wait([asyncio.run_coroutine_threadsafe(_cancel_all(), loop)], 1.0))
    return loop


async def _cancel_all() -> None:
    """Cancel all tasks: the interpreter warns of tasks that are pending when it ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EnvProcess:
    """An opened environment in a process of its own. Any thread may call it."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[StepResult | None]] = {}
        """By the id of the request; used on the loop only, as is the rest."""
        self._kept: SubreaperProcess | None = None
        """None until it is started."""
        self.error: PenstockError | None = None
        """Reason that it is no longer usable; None while it is."""
        self.opened: concurrent.futures.Future[None] = asyncio.run_coroutine_threadsafe(self._open(), _loop())
        """Done when the environment is set up; or has the reason for the failure."""

    def request(
        self, kind: Literal["reset", "step"], player: int, *, seed: int | None = None, action: Action | None = None
    ) -> concurrent.futures.Future[StepResult | None]:
        """Return a future of the result; if that is cancelled, the player's episode ends.

        Raises:
            PenstockError: from the future; see `AtroposStepEnvironment.step`.
        """
        message = Request(id=next(self._ids), kind=kind, player=player, seed=seed, action=action)
        return asyncio.run_coroutine_threadsafe(self._exchange(message), _loop())

    def leave(self, player: int) -> None:
        """End the player's episode."""
        _loop().call_soon_threadsafe(self._leave, player)

    def close(self) -> None:
        """End the process, without waiting for it."""
        _loop().call_soon_threadsafe(self._end, EnvironmentDied("the environment was closed"))

    # -- on the loop ---------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        limit_s = self._config.setup_timeout_s
        opened = self._expect(0)
        try:
            channel, kept = await asyncio.to_thread(self._spawn)
            self._kept = kept
            reader, self._writer = await asyncio.open_connection(sock=channel)
            reading = asyncio.create_task(self._read(reader, kept))
            _reading.add(reading)
            reading.add_done_callback(_reading.discard)
            await asyncio.wait_for(opened, limit_s)
        except TimeoutError:
            what = f"the environment took more than {limit_s:g} s to be imported, made and set up"
            self._end(EnvironmentTimedOut(f"{what}: find out its cause, or raise setup_timeout_s"))
        except OSError as error:
            self._end(EnvironmentDied(f"the environment's process could not be started: {error}"))
        except PenstockError as error:
            self._end(error)
        if self.error is not None:
            raise self.error

    def _spawn(self) -> tuple[socket.socket, SubreaperProcess]:
        """Start the process, and return a channel to it. Blocks."""
        payload = write_payload(self._config)
        ours, theirs = socket.socketpair()
        child = interpreter_command("penstock._stages.integrations.atropos.steps.child", f"{payload} {theirs.fileno()}")
        try:
            return ours, start_subreaper(child, KILL_AFTER_S, pass_fds=(payload, theirs.fileno()))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(payload)

    async def _read(self, reader: asyncio.StreamReader, kept: SubreaperProcess) -> None:
        """Deliver replies until the process and its subreaper have ended, and then its exit status."""
        async for reply in read_frames(reader, Reply):
            self._receive(reply)
        self._writer.close()
        self._end(EnvironmentDied(f"the environment's process {await asyncio.to_thread(_end_of, kept)}"))

    def _receive(self, reply: Reply) -> None:
        future = self._waiting.pop(reply.id, None)
        if future is None or future.done():
            return
        if reply.failure is not None:
            future.set_exception(reply.failure.error())
        else:
            future.set_result(reply.result)

    def _end(self, error: PenstockError) -> None:
        """End the process; every caller that waits gets `error`."""
        if self.error is not None:
            return
        self.error = error
        if self._kept is not None:
            os.close(self._kept.stop_fd)  # at which the subreaper ends the process
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # a ping's is not retrieved

    def _expect(self, number: int) -> asyncio.Future[StepResult | None]:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return future

    async def _exchange(self, message: Request) -> StepResult | None:
        """Return the reply; a process that blocks instead of replying is killed."""
        await asyncio.shield(asyncio.wrap_future(self.opened))
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

    def _send(self, message: Request) -> asyncio.Future[StepResult | None]:
        if self.error is not None:
            raise self.error
        self._writer.write(encode_frame(message))
        return self._expect(message.id)

    def _leave(self, player: int) -> None:
        if self.error is None:
            self._send(Request(id=next(self._ids), kind="leave", player=player))


def _end_of(kept: SubreaperProcess) -> str:
    """Wait for the subreaper, and return the process's end in words. Blocks."""
    kept.popen.wait()
    with os.fdopen(kept.status_fd) as lines:
        for event, value in map(str.split, lines):
            if event != "started":
                return describe_end(event, int(value))
    return "ended with its subreaper"
