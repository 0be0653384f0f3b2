"""An Atropos environment in a thread of its own, with an event loop of its own: what it blocks is itself.

Whoever plays it waits from another thread or another event loop. What hangs is cancelled; where it cannot be, because
it blocks the thread, the thread is left to itself, and whoever waits is told. Nothing global is changed: not the policy
of event loops, not `sys.path`, nothing of anybody's modules.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from .....pipeline.errors import InvalidConfig, PenstockError
from ....threads import Threads
from .bridge import ModelBridge
from .conversation import Action
from .episodes import EnvironmentTimedOut, Episode, Place, Terms, Told
from .loading import Make, loaded

__all__ = ["Home", "NoMoreItems", "Recipe"]

CLOSING_S = 1.0
"""How long its thread may take to end."""

KEPT_ITEMS = 1024
"""Seeds whose items are remembered."""

THREADS = 32
"""Functions that the environment may have in threads (`asyncio.to_thread`) at once, hanging ones included."""

R = TypeVar("R")


class NoMoreItems(PenstockError):
    """An environment has no next item."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an environment is made, and what holds for its episodes; see `AtroposEnvironment`."""

    where: str | Make
    config: dict[str, Any]
    group_size: int
    timeout_s: float
    opening_s: float
    bare: bool

    def make(self) -> Make:
        """The environment's class. Imports it, which may take long.

        Raises:
            InvalidConfig: there is none.
        """
        return loaded(self.where) if isinstance(self.where, str) else self.where

    def made(self, make: Make) -> Any:
        """A new environment, whose model is a bridge."""
        env = self._configured(make) if hasattr(make, "config_init") else make()
        one_by_one(env)
        env.server = ModelBridge(lambda: getattr(env, "tokenizer", None), bare=self.bare)
        return env

    def terms(self, env: Any) -> Terms:
        """What holds for episodes of `env`."""
        return Terms(
            size=1 if one_by_one(env) else self.group_size,
            timeout_s=self.timeout_s,
            bare=self.bare,
            tokenizer=getattr(env, "tokenizer", None),
        )

    def _configured(self, make: Any) -> Any:
        config, servers = make.config_init()
        for name, value in ({"use_wandb": False} | self.config | {"group_size": self.group_size}).items():
            setattr(config, name, value)
        return make(config=config, server_configs=servers, slurm=False, testing=True)


def one_by_one(env: Any) -> bool:
    """Whether the environment collects one trajectory at a time, and leaves it to Atropos to make groups of them.

    Raises:
        InvalidConfig: it collects nothing.
    """
    if _defines(env, "collect_trajectories"):
        return False
    if _defines(env, "collect_trajectory"):
        return True
    raise InvalidConfig(
        f"environment: expected an Atropos environment, with collect_trajectory or collect_trajectories, got "
        f"{type(env).__name__}"
    )


def _defines(env: Any, name: str) -> bool:
    """Whether it has a method of its own by this name, and not only the one of Atropos' base class."""
    home = next((kind for kind in type(env).__mro__ if name in vars(kind)), None)
    return home is not None and not f"{home.__module__}.".startswith("atroposlib.")


class Home:
    """An opened environment. Any thread may call what it offers but coroutines, which run on its own event loop."""

    def __init__(self, recipe: Recipe, stuck: Callable[[int], None]) -> None:
        self._recipe = recipe
        self._stuck = stuck
        """Told of 1 whenever something is left to itself, and of −1 when it ends after all."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[tuple[Any, Terms]] = self._loop.create_future()
        """The environment, and what holds for its episodes."""
        self._drawing = asyncio.Lock()
        """Held by whoever asks for an item: environments count on being asked one at a time."""
        self._items: dict[int, Any] = {}
        """By seed, the oldest first."""
        self._backlog: list[Any] = []
        """Items that the environment wants to see again."""
        self._gathering: dict[int, Episode] = {}
        """Episodes with free places, by seed."""
        self.abandoned = False
        """Whether its thread blocks and was given up."""
        self._thread = threading.Thread(target=self._run, name="penstock Atropos environment", daemon=True)
        atexit.register(self.end)  # for those who do not close: gem has no word for it
        self._thread.start()

    # -- for those who wait elsewhere ----------------------------------------------------------------------------------

    def waited(self, work: Coroutine[Any, Any, R]) -> R:
        """What `work`, one of the coroutines below, returns; blocks.

        Raises:
            EnvironmentTimedOut: the environment blocks its thread.
            Exception: whatever it raises.
        """
        answer = self._submitted(work)
        try:
            while True:
                heard = self._submitted(_nothing())
                if concurrent.futures.wait([answer], self._limit_s).done:
                    return answer.result()
                self._expect(heard)
        finally:
            answer.cancel()

    async def awaited(self, work: Coroutine[Any, Any, R]) -> R:
        """The same on another event loop; cancelled, it cancels `work`."""
        answer = asyncio.wrap_future(self._submitted(work))
        try:
            while True:
                heard = self._submitted(_nothing())
                if (await asyncio.wait([answer], timeout=self._limit_s))[0]:
                    return answer.result()
                self._expect(heard)
        finally:
            answer.cancel()

    def close(self) -> None:
        """Let the environment end; its thread is not waited for."""
        if not self.abandoned:
            self._loop.call_soon_threadsafe(self._closing.set)

    def end(self) -> None:
        """Let the environment end, and wait for its thread, for so long as it should take."""
        self.close()
        self._thread.join(CLOSING_S)

    def _submitted(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def _limit_s(self) -> float:
        """How long its thread may block."""
        return self._recipe.timeout_s if self._opened.done() else self._recipe.opening_s

    @property
    def _while_opening(self) -> str:
        return "" if self._opened.done() else " while it was imported, made and set up"

    def _expect(self, heard: concurrent.futures.Future[None]) -> None:
        """Give the thread up if it did not do in time what takes none."""
        if heard.done():
            return
        if not self.abandoned:
            self.abandoned = True
            self._stuck(1)
            self._loop.call_soon_threadsafe(self._closing.set)  # should it ever return
        raise EnvironmentTimedOut(
            f"the environment blocked its thread for more than {self._limit_s:g} s{self._while_opening}; the thread is "
            f"left to itself, and the next reset makes another environment"
        )

    # -- on its own event loop -----------------------------------------------------------------------------------------

    async def opened(self) -> tuple[Any, Terms]:
        """The environment, once it is made and set up.

        Raises:
            Exception: whatever that raised.
        """
        return await asyncio.shield(self._opened)

    async def begin(self, before: Place | None, seed: int | None) -> tuple[Place, Told]:
        """A new episode, or a place in the one of the same seed that has one; what was played `before` is given up.

        Raises:
            NoMoreItems: the environment has no next one.
            InvalidConfig: places of one episode find each other by a seed, and there is none.
            Exception: see `Place.told`.
        """
        env, terms = await self.opened()
        if before is not None:
            before.episode.fail(EnvironmentTimedOut("another step-wise environment of the group was reset or closed"))
        place = await self._place(env, terms, seed)
        return place, await _told(place)

    async def step(self, place: Place, action: Action) -> Told:
        """What comes of `action`.

        Raises:
            Exception: see `Place.told`.
        """
        place.answer(action)
        return await _told(place)

    async def leave(self, place: Place) -> None:
        """Give up what is being played."""
        place.episode.fail(EnvironmentTimedOut("another step-wise environment of the group was closed"))

    def _run(self) -> None:
        make: concurrent.futures.Future[Make] = concurrent.futures.Future()
        try:
            make.set_result(self._recipe.make())  # before the event loop runs: nothing that is imported is to find one
        except (Exception, SystemExit) as error:  # noqa: BLE001 (told to whoever waits for the environment)
            make.set_exception(error)
        with self._runner as runner:
            runner.run(self._live(make))
            atexit.unregister(self.end)
        if self.abandoned:
            self._stuck(-1)

    async def _live(self, make: concurrent.futures.Future[Make]) -> None:
        threads = Threads(THREADS)
        self._loop.set_default_executor(_InThreads(threads))
        try:
            self._opened.set_result(await self._made(make))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (told to whoever waits for it)
            self._opened.set_exception(error)
            self._opened.exception()  # nobody may be waiting
        await self._closing.wait()
        threads.close()

    async def _made(self, make: concurrent.futures.Future[Make]) -> tuple[Any, Terms]:
        limit_s = self._recipe.opening_s
        async with _at_most(limit_s, f"setup took more than {limit_s:g} s: see what it waits for, or raise opening_s"):
            env = self._recipe.made(make.result())
            await env.setup()
            return env, self._recipe.terms(env)

    async def _place(self, env: Any, terms: Terms, seed: int | None) -> Place:
        async with self._drawing:
            self._gathering = {each: episode for each, episode in self._gathering.items() if not episode.full}
            if seed is not None and seed in self._gathering:
                return self._gathering[seed].take()
            if seed is None and terms.size > 1:
                raise InvalidConfig(
                    "reset: expected a seed, by which the step-wise environments of a group meet, got none"
                )
            episode = Episode(terms, self._collected(env, await self._item(env, seed)), self._stuck)
            place = episode.take()
            if seed is not None and not episode.full:
                self._gathering[seed] = episode
                self._loop.call_later(terms.timeout_s, episode.expect_everyone)
            return place

    async def _item(self, env: Any, seed: int | None) -> Any:
        """The item of `seed`: the next one where it is new."""
        if seed is not None and seed in self._items:
            return self._items[seed]
        item = self._backlog.pop() if self._backlog else await self._next(env)
        if seed is not None:
            self._items[seed] = item
            if len(self._items) > KEPT_ITEMS:
                del self._items[next(iter(self._items))]
        return item

    async def _next(self, env: Any) -> Any:
        limit_s = self._recipe.timeout_s
        async with _at_most(limit_s, f"get_next_item took more than {limit_s:g} s"):
            item = await _never_exiting(env.get_next_item())
        if item is None:
            raise NoMoreItems("expected a next item, got None: the environment has come to its end")
        return item

    async def _collected(self, env: Any, item: Any) -> Any:
        """What the environment scored."""
        alone = one_by_one(env)
        try:
            collecting = env.collect_trajectory(item) if alone else env.collect_trajectories(item)
            scored, backlog = await _never_exiting(collecting)
            self._backlog += backlog or ()
            if not alone and hasattr(env, "postprocess_histories"):
                scored = await _never_exiting(env.postprocess_histories(scored))
            return scored
        finally:
            if hasattr(env, "cleanup"):
                await env.cleanup()


@asynccontextmanager
async def _at_most(limit_s: float, words: str) -> AsyncGenerator[None]:
    """Cancel the body where it takes longer.

    Raises:
        EnvironmentTimedOut: in these words. A TimeoutError of the body's own is the body's own.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise EnvironmentTimedOut(words) from None


async def _nothing() -> None:
    """Takes no time where the event loop runs."""


async def _never_exiting(work: Awaitable[Any]) -> Any:
    """What `work` comes to; SystemExit, which would end the event loop, is an error like others."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the environment exited, with {error}") from error


async def _told(place: Place) -> Told:
    try:
        return await place.told()
    except asyncio.CancelledError:
        place.episode.fail(EnvironmentTimedOut("whoever played this environment stopped waiting for it"))
        raise


class _InThreads(concurrent.futures.ThreadPoolExecutor):
    """Where `asyncio.to_thread` takes its threads from: bounded ones, of which none holds up the end of the process."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(1)  # starts none by itself
        self._ours = threads
        self._answers: set[asyncio.Task[None]] = set()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call `function` in a thread; cancelled, it is left to itself."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        answer = asyncio.ensure_future(self._answered(partial(function, *args, **kwargs), future))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(answer.cancel))
        return future

    async def _answered(self, function: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
        try:
            value = await self._ours.call(function)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (handed over)
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(value)
