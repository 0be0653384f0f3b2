"""An Atropos environment, played step by step: `reset` and `step`, with the signatures of gymnasium and gem.

Atropos' environments call a model. Here the player is the model: a call is an observation, an action answers it, and
the score is the reward of the last step. All that one `AtroposEnvironment` makes in a process play the same environment
in one child process, as Atropos' own workers do, so that its data set and its tokenizer are loaded once. A subreaper
starts and ends the process, and all that the environment has started, also when the parent dies. One thread exchanges
the messages of every environment; callers wait in other threads and loops.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import importlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import msgspec

from ....._pipeline.errors import InvalidConfig, MissingExtra, PenstockError
from ....._pipeline.servers.subreaper_process import SubreaperProcess, describe_end, start_subreaper
from ....._pipeline.util.interpreter import check_interpreter
from ....._pipeline.workers.worker_payload import child_program, write_payload
from ....._schemas import StopReason
from ....._schemas.numbers import finite_number, whole_number
from .messages import (
    Action,
    EnvConfig,
    EnvironmentDied,
    EnvironmentTimedOut,
    ModelCallRefused,
    Reply,
    Request,
    StepResult,
    encode_frame,
    read_frames,
)

Begun: TypeAlias = tuple[str, dict[str, Any]]
"""Observation and info."""

Stepped: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info."""

KILL_AFTER_S = 1.0
"""Time from SIGTERM to SIGKILL."""

_reading: set[asyncio.Task[None]] = set()
"""One for each process, until it has ended: no caller may hold a reference."""

_players = itertools.count(1)


class AtroposEnvironment:
    """Makes step-wise environments of an Atropos environment: the `make_env` of a `SourceEnv`.

    Workers get a pickled copy. The first step-wise environment that is made there starts its process. The process needs
    atroposlib; the worker does not.

    Args:
        where: `package.module:Class`, `folder/file.py:Class`, the class itself, or a function that makes one.
        config: fields of the environment's configuration that differ from those of its `config_init`.
        group_size: number of step-wise environments, reset with one seed, that play one call of `collect_trajectories`.
        turn_timeout_s: bound on the time that the environment works between two model calls.
        setup_timeout_s: bound on the time to import, make and set it up: it may load a data set.
        python: the interpreter of the process, with penstock and atroposlib, such as .venv-atropos/bin/python; by
            default that of the worker. It imports the environment itself, so `where` is text.

    Raises:
        InvalidConfig: a number that can never work, or `python` with an object.
    """

    def __init__(
        self,
        where: str | Callable[..., Any],
        *,
        config: dict[str, Any] | None = None,
        group_size: int = 1,
        turn_timeout_s: float = 60.0,
        setup_timeout_s: float = 600.0,
        python: str | os.PathLike[str] | None = None,
    ) -> None:
        if python is not None and not isinstance(where, str):
            raise InvalidConfig(
                f"AtroposEnvironment: expected package.module:Class or folder/file.py:Class with python={python}, "
                f"whose process imports the environment itself, got {where!r}"
            )
        self._config = EnvConfig(
            where,
            config or {},
            whole_number("group_size", group_size),
            finite_number("turn_timeout_s", turn_timeout_s),
            finite_number("setup_timeout_s", setup_timeout_s),
            None if python is None else os.fspath(python),
        )
        self.__name__: str = (
            where.rpartition(":")[2] if isinstance(where, str) else getattr(where, "__name__", "atropos")
        )
        self._lock = threading.Lock()
        """Guards the fields below: step-wise environments are made and closed in any thread."""
        self._process: EnvProcess | None = None
        self._made = 0
        """Step-wise environments that are not closed."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the configuration alone: a copy starts its own process."""
        options = msgspec.structs.asdict(self._config)
        return partial(AtroposEnvironment, options.pop("where"), **options), ()

    def __repr__(self) -> str:
        return f"<AtroposEnvironment {self.__name__}: {self._made} players>"

    def __call__(self) -> AtroposStepEnvironment:
        """Return a step-wise environment with coroutine functions as methods, once the environment is set up.

        Raises:
            InvalidConfig: there is no such environment.
            MissingExtra: atroposlib is not installed, or `python` has not this penstock.
            EnvironmentRaised: the environment raised when it was imported, made or set up.
            EnvironmentTimedOut: that took too long.
            EnvironmentDied: its process ended.
        """
        return AtroposStepEnvironment(self._count_in())

    def blocking(self, seed: int | None = None) -> BlockingStepEnvironment:
        """Return a step-wise environment with plain functions as methods.

        Args:
            seed: of the first reset, if that is called without one.

        Raises:
            PenstockError: as above.
        """
        return BlockingStepEnvironment(self._count_in(), seed)

    def process(self) -> EnvProcess:
        """Return the environment's process; a new one if that has ended."""
        with self._lock:
            if self._process is None or self._process.error is not None:
                self._process = EnvProcess(self._config)
            return self._process

    def leave(self) -> None:
        """Count a step-wise environment as closed; the last one closes the process."""
        with self._lock:
            self._made -= 1
            if not self._made and self._process is not None:
                self._process.close()
                self._process = None

    def _count_in(self) -> AtroposEnvironment:
        with self._lock:
            self._made += 1
        try:
            self.process().opened.result()
        except BaseException:
            self.leave()
            raise
        return self


class _StepEnvBase:
    """The common part of both kinds of step-wise environment."""

    def __init__(self, environment: AtroposEnvironment) -> None:
        self._environment = environment
        self._player = next(_players)
        self._process: EnvProcess | None = None
        """The process of the present episode."""
        self._closed = False

    def _reset(self, seed: int | None) -> Any:
        self._process = self._environment.process()
        return self._process.request("reset", self._player, seed=seed)

    def _step(self, action: str | Action) -> Any:
        if self._process is None:
            raise ModelCallRefused("expected reset() before step(), got none")
        answer = Action(text=action) if isinstance(action, str) else action
        return self._process.request("step", self._player, action=answer)

    def _close(self) -> None:
        closed, self._closed = self._closed, True
        if closed:
            return
        if self._process is not None:
            self._process.leave(self._player)
        self._environment.leave()


class AtroposStepEnvironment(_StepEnvBase):
    """Plays an Atropos environment; made by an `AtroposEnvironment`. For `SourceEnv`: it needs no threads."""

    async def reset(self, *, seed: int | None = None) -> Begun:
        """Begin a new episode; equal seeds begin with the same item while the environment is open.

        Raises:
            PenstockError: see `step`.
        """
        result: StepResult = await asyncio.wrap_future(self._reset(seed))
        return result.observation, result.info

    async def step(self, action: str | Action) -> Stepped:
        """Answer the environment's model call.

        Raises:
            EnvironmentTimedOut: it took too long.
            EnvironmentRaised: it raised.
            EnvironmentDied: its process ended.
            ModelCallRefused: it made a model call that no action can answer; or no model call waits.
            GroupIncomplete: another step-wise environment of the group was reset or closed.
            NotScored: the episode is over and has no score.
        """
        return _stepped(await asyncio.wrap_future(self._step(action)))

    async def end_cut_episode(self) -> float:
        """Answer with empty text, as a model without room does, until the environment has scored; return the score.

        Raises:
            PenstockError: see `step`.
        """
        over, reward = False, 0.0
        while not over:
            _, reward, over, _, _ = await self.step(Action(text="", stop_reason=StopReason.LENGTH))
        return reward

    async def close(self) -> None:
        """End the episode; the last one closes the environment."""
        self._close()


class BlockingStepEnvironment(_StepEnvBase):
    """The same with plain functions, for callers without an event loop."""

    def __init__(self, environment: AtroposEnvironment, seed: int | None) -> None:
        super().__init__(environment)
        self._seed = seed

    def reset(self, seed: int | None = None) -> Begun:
        """See `AtroposStepEnvironment`."""
        chosen, self._seed = (self._seed if seed is None else seed), None
        result: StepResult = self._reset(chosen).result()
        return result.observation, result.info

    def step(self, action: str | Action) -> Stepped:
        """See `AtroposStepEnvironment`."""
        return _stepped(self._step(action).result())

    def close(self) -> None:
        """See `AtroposStepEnvironment`."""
        self._close()


def _stepped(result: StepResult) -> Stepped:
    return result.observation, result.reward, result.over, False, result.info


def register_with_gem(name: str, environment: AtroposEnvironment) -> None:
    """Let `gem.make(name)` play `environment`.

    Raises:
        MissingExtra: gem is not installed.
        ValueError: gem knows another environment by this name.
    """
    try:
        gem = importlib.import_module("gem")
    except ModuleNotFoundError as error:
        raise MissingExtra("register_with_gem needs gem, which is not installed: pip install gem-llm") from error
    gem.Env.register(BlockingStepEnvironment)  # so that isinstance checks accept it
    gem.register(name, environment.blocking)


# -- the process -------------------------------------------------------------------------------------------------------


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
        """Reason that it is unusable; None while it is usable."""
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
        python = self._config.python
        if python is not None:
            check_interpreter(python, self._config.setup_timeout_s)
        payload = write_payload(self._config, prepared=python is None)
        ours, theirs = socket.socketpair()
        child, environment = child_program(
            python, "penstock._stages.integrations.atropos.steps.child", f"{payload} {theirs.fileno()}"
        )
        inherited = (payload, theirs.fileno())
        try:
            return ours, start_subreaper(child, KILL_AFTER_S, pass_fds=inherited, environment=environment)
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
            os.close(self._kept.stop_fd)  # the subreaper then ends the process
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
