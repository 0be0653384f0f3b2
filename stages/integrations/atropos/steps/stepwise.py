"""An Atropos environment, played step by step: `reset` and `step`, in the signature of gymnasium and gem.

Atropos' environments call a model. Here whoever plays them is the model: a call is an observation, an action answers
it, and the score is the reward of the last step. Every step-wise environment that one `AtroposEnvironment` makes in a
process plays the same environment, as Atropos' own workers do, so that its data set and its tokenizer are there once.
"""

from __future__ import annotations

import importlib
import threading
from functools import partial
from typing import Any, TypeAlias

from .....pipeline.errors import MissingExtra
from .....pipeline.telemetry import get_logger
from .....schemas.numbers import finite_number, whole_number
from .conversation import Action, ModelCallRefused
from .episodes import EnvironmentTimedOut, Place, Told
from .home import Home, Recipe
from .loading import Make

__all__ = ["AtroposEnvironment", "AtroposStepEnvironment", "BlockingStepEnvironment", "register_with_gem"]

log = get_logger("penstock.atropos")

MOST_ABANDONED = 8
"""Threads and coroutines that may hang at once; what would add to them is refused."""

Begun: TypeAlias = tuple[str, dict[str, Any]]
"""Observation and info."""

Stepped: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info."""


class AtroposEnvironment:
    """Makes step-wise environments of an Atropos environment: what `SourceEnv` is given as `make_env`.

    It is sent to workers as it is, and opened by the first step-wise environment that is made there.

    Args:
        where: `package.module:Class`, `folder/file.py:Class`, the class itself, or a function that makes one.
        config: fields of the environment's configuration that differ from those of its `config_init`.
        group_size: how many step-wise environments, reset with one seed, play one call of `collect_trajectories`.
        timeout_s: how long the environment may work without asking anything.
        opening_s: how long it may take to be imported, made and set up: it may load a data set.
        bare: observations are the words of the messages, without the marks of a chat template.
    """

    def __init__(
        self,
        where: str | Make,
        *,
        config: dict[str, Any] | None = None,
        group_size: int = 1,
        timeout_s: float = 60.0,
        opening_s: float = 600.0,
        bare: bool = False,
    ) -> None:
        self._recipe = Recipe(
            where,
            config or {},
            whole_number("group_size", group_size),
            finite_number("timeout_s", timeout_s),
            finite_number("opening_s", opening_s),
            bare,
        )
        self.__name__ = where.rpartition(":")[2] if isinstance(where, str) else getattr(where, "__name__", "atropos")
        self._lock = threading.Lock()
        """Guards the rest: step-wise environments are made and closed in any thread."""
        self._home: Home | None = None
        self._players = 0
        self.abandoned = 0
        """Threads and coroutines of environments that were given up, and have not returned."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is open."""
        recipe = self._recipe
        options = {name: getattr(recipe, name) for name in ("config", "group_size", "timeout_s", "opening_s", "bare")}
        return partial(AtroposEnvironment, recipe.where, **options), ()

    def __repr__(self) -> str:
        return f"<AtroposEnvironment {self.__name__}: {self._players} players, {self.abandoned} abandoned>"

    def __call__(self) -> AtroposStepEnvironment:
        """A step-wise environment whose methods are coroutine functions; returns when the environment is set up.

        Raises:
            InvalidConfig: there is no such environment.
            Exception: what the environment raises when it is made and set up.
        """
        return AtroposStepEnvironment(self._joined())

    def blocking(self, seed: int | None = None) -> BlockingStepEnvironment:
        """A step-wise environment whose methods are plain functions.

        Args:
            seed: of the first reset, where that is given none.

        Raises:
            Exception: as above.
        """
        return BlockingStepEnvironment(self._joined(), seed)

    def home(self) -> Home:
        """The opened environment; another one where it hangs."""
        with self._lock:
            if self.abandoned >= MOST_ABANDONED:
                raise EnvironmentTimedOut(
                    f"expected an environment that returns, got {self.abandoned} times that it hangs: "
                    f"see what it waits for"
                )
            if self._home is None or self._home.abandoned:
                self._home = Home(self._recipe, self._left_to_itself)
            return self._home

    def left(self) -> Home | None:
        """A player has gone; returns the environment to close where it was the last one."""
        with self._lock:
            self._players -= 1
            if self._players or self._home is None:
                return None
            home, self._home = self._home, None
        return home

    def _joined(self) -> AtroposEnvironment:
        home = self.home()
        with self._lock:
            self._players += 1
        try:
            home.waited(home.opened())
        except BaseException:
            if (left := self.left()) is not None:
                left.close()
            raise
        return self

    def _left_to_itself(self, change: int) -> None:
        """Something that was given up hangs, or hangs no longer."""
        with self._lock:
            self.abandoned += change
        if change > 0:
            log.warning("environment_abandoned", env=self.__name__, abandoned=self.abandoned)


class _Player:
    """What both kinds of step-wise environment know."""

    def __init__(self, environment: AtroposEnvironment) -> None:
        self._environment = environment
        self._home: Home | None = None
        """Where it plays."""
        self._place: Place | None = None
        """What it plays; None before, and after the end."""
        self._closed = False

    def _before(self, home: Home) -> Place | None:
        """What was being played in `home`."""
        before = self._place if home is self._home else None
        self._home, self._place = home, None
        return before

    def _playing(self) -> tuple[Home, Place]:
        if self._home is None or self._place is None:
            raise ModelCallRefused("expected reset() before step(), got none since the last episode ended")
        home, place, self._place = self._home, self._place, None
        return home, place

    def _stepped(self, place: Place, told: Told) -> Stepped:
        if not told.over:
            self._place = place
        return told.observation, told.reward, told.over, False, told.info

    def _leaving(self) -> bool:
        """Whether there is anything to close."""
        closed, self._closed = self._closed, True
        return not closed


class AtroposStepEnvironment(_Player):
    """Plays an Atropos environment; made by an `AtroposEnvironment`. For `SourceEnv`: it needs none of its threads."""

    async def reset(self, *, seed: int | None = None) -> Begun:
        """Begin a new episode; equal seeds begin with the same item, as long as the environment is open.

        Raises:
            Exception: see `step`.
        """
        home = self._environment.home()
        self._place, told = await home.awaited(home.begin(self._before(home), seed))
        return told.observation, told.info

    async def step(self, action: str | Action) -> Stepped:
        """Answer what the environment asked.

        Raises:
            EnvironmentTimedOut: it took too long.
            NotScored: the episode is over and has no score.
            ModelCallRefused: it asked for what an action cannot answer.
            Exception: what it raised.
        """
        home, place = self._playing()
        return self._stepped(place, await home.awaited(home.step(place, _action(action))))

    async def close(self) -> None:
        """Give up what is being played; the last one closes the environment."""
        if self._leaving():
            if self._home is not None and self._place is not None and not self._home.abandoned:
                await self._home.awaited(self._home.leave(self._place))
            if (home := self._environment.left()) is not None:
                home.close()


class BlockingStepEnvironment(_Player):
    """The same with plain functions, for whoever has no event loop."""

    def __init__(self, environment: AtroposEnvironment, seed: int | None) -> None:
        super().__init__(environment)
        self._seed = seed

    def reset(self, seed: int | None = None) -> Begun:
        """See `AtroposStepEnvironment`."""
        home = self._environment.home()
        chosen, self._seed = (self._seed if seed is None else seed), None
        self._place, told = home.waited(home.begin(self._before(home), chosen))
        return told.observation, told.info

    def step(self, action: str | Action) -> Stepped:
        """See `AtroposStepEnvironment`."""
        home, place = self._playing()
        return self._stepped(place, home.waited(home.step(place, _action(action))))

    def close(self) -> None:
        """See `AtroposStepEnvironment`; waits for the environment's thread."""
        if self._leaving():
            if self._home is not None and self._place is not None and not self._home.abandoned:
                self._home.waited(self._home.leave(self._place))
            if (home := self._environment.left()) is not None:
                home.end()


def _action(said: str | Action) -> Action:
    return Action(text=said) if isinstance(said, str) else said


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
    gem.Env.register(BlockingStepEnvironment)  # so that it is one
    gem.register(name, environment.blocking)
