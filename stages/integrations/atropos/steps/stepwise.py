"""An Atropos environment, played step by step: `reset` and `step`, with the signatures of gymnasium and gem.

Atropos' environments call a model. Here the player is the model: a call is an observation, an action answers it, and
the score is the reward of the last step. All that one `AtroposEnvironment` makes in a process play the same environment
in one child process, as Atropos' own workers do, so that its data set and its tokenizer are loaded once.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ....._pipeline.errors import MissingExtra
from ....._schemas.numbers import finite_number, whole_number
from .messages import Action, EnvConfig, ModelCallRefused, StepResult
from .process import EnvProcess

__all__ = ["AtroposEnvironment", "AtroposStepEnvironment", "BlockingStepEnvironment", "register_with_gem"]

Begun: TypeAlias = tuple[str, dict[str, Any]]
"""Observation and info."""

Stepped: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info."""

_players = itertools.count(1)


class AtroposEnvironment:
    """Makes step-wise environments of an Atropos environment: the `make_env` of a `SourceEnv`.

    Workers get a pickled copy, whose process is started by the first step-wise environment that is made there. The
    process needs atroposlib; the worker does not.

    Args:
        where: `package.module:Class`, `folder/file.py:Class`, the class itself, or a function that makes one.
        config: fields of the environment's configuration that differ from those of its `config_init`.
        group_size: number of step-wise environments, reset with one seed, that play one call of `collect_trajectories`.
        turn_timeout_s: bound on the time that the environment works between two model calls.
        setup_timeout_s: bound on the time to import, make and set it up: it may load a data set.
    """

    def __init__(
        self,
        where: str | Callable[..., Any],
        *,
        config: dict[str, Any] | None = None,
        group_size: int = 1,
        turn_timeout_s: float = 60.0,
        setup_timeout_s: float = 600.0,
    ) -> None:
        self._config = EnvConfig(
            where,
            config or {},
            whole_number("group_size", group_size),
            finite_number("turn_timeout_s", turn_timeout_s),
            finite_number("setup_timeout_s", setup_timeout_s),
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
        """Return a step-wise environment whose methods are coroutine functions, once the environment is set up.

        Raises:
            InvalidConfig: there is no such environment.
            MissingExtra: atroposlib is not installed.
            EnvironmentRaised: the environment raised when it was imported, made or set up.
            EnvironmentTimedOut: that took too long.
            EnvironmentDied: its process ended.
        """
        return AtroposStepEnvironment(self._count_in())

    def blocking(self, seed: int | None = None) -> BlockingStepEnvironment:
        """Return a step-wise environment whose methods are plain functions.

        Args:
            seed: of the first reset, where that is given none.

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
            ModelCallRefused: it made a model call that no action can answer; or there is none to be answered.
            GroupIncomplete: another step-wise environment of the group was reset or closed.
            NotScored: the episode is over and has no score.
        """
        return _stepped(await asyncio.wrap_future(self._step(action)))

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
