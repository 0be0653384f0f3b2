"""One call of an environment's `collect_trajectory` or `collect_trajectories`, and the step-wise environments in it.

The environment's task asks; each question goes to one place, and waits there for the caller's action. When the task is
done, every place is told its reward. A clock runs only while the environment works: from an answer to the next question
or to the end. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from .....pipeline.errors import PenstockError
from .conversation import Action, Exchange, ModelCallRefused, Prompt, observed
from .scoring import reward_of, sampled, scored_by

__all__ = ["EnvironmentTimedOut", "Episode", "Place", "Told", "current_episode"]

GRACE_S = 1.0
"""How long a coroutine may take to end once it is cancelled."""

_current: contextvars.ContextVar[Episode] = contextvars.ContextVar("penstock_atropos_episode")


class EnvironmentTimedOut(PenstockError):
    """An environment took too long; what it was doing was cancelled, or is left to itself where that is impossible."""


class Told(NamedTuple):
    """What comes of a reset or a step."""

    observation: str
    reward: float
    over: bool
    info: dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """What holds for every episode of an environment."""

    size: int
    """Places of an episode."""
    timeout_s: float
    """How long the environment may work without asking anything."""
    bare: bool
    """Observations are words alone."""
    tokenizer: Any
    """The environment's own; None where it has none."""

    @property
    def end(self) -> str | None:
        """What closes an answer in the text of a conversation."""
        return getattr(self.tokenizer, "eos_token", None)


def current_episode() -> Episode:
    """The episode that the calling task belongs to.

    Raises:
        ModelCallRefused: none; it is `setup` that asks, or a task of its own.
    """
    try:
        return _current.get()
    except LookupError:
        raise ModelCallRefused(
            "expected model calls within collect_trajectory and collect_trajectories, got one from elsewhere: there is "
            "nobody who could answer it"
        ) from None


class Place:
    """The part of one step-wise environment in an episode; a `Speaker`."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.text: str | None = None
        self.tokens: Sequence[int] | None = None
        self.last: Exchange | None = None
        """What was asked and answered last."""
        self.said: list[Action] = []
        """The actions of the conversation that is being held."""
        self._answer: asyncio.Future[Action] | None = None
        """Waits for the caller."""
        self._told: asyncio.Queue[Told | BaseException] = asyncio.Queue()
        """What the caller has not heard yet."""

    @property
    def begun(self) -> bool:
        """Whether it was asked anything."""
        return self.last is not None or self._answer is not None

    def goes_on_with(self, prompt: Prompt) -> bool:
        """Whether `prompt` continues what was said here."""
        return self._answer is None and self.last is not None and self.last.continued_by(prompt)

    def ask(self, prompt: Prompt) -> asyncio.Future[Action]:
        """Let the caller see `prompt`; returns where its action will be."""
        terms = self.episode.terms
        observation, continues = observed(prompt, self.last, bare=terms.bare, end=terms.end)
        info = {"sampling": prompt.sampling, "continues": continues}
        known = {"messages": prompt.messages, "input_ids": prompt.input_ids}
        info |= {name: value for name, value in known.items() if value is not None}
        if not continues:
            self.said = []
        self._answer = asyncio.get_running_loop().create_future()
        self._told.put_nowait(Told(observation, 0.0, over=False, info=info))
        return self._answer

    def note(self, prompt: Prompt, action: Action | None) -> None:
        """The environment has the answer to `prompt`, or waits for none any more."""
        self._answer = None
        if action is not None:
            self.last, self.text = Exchange(prompt, action), action.text
            self.said.append(action)

    def answer(self, action: Action) -> None:
        """Hand `action` to whoever asked; where the environment waits no more, it comes too late and is nobody's."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(action)

    async def told(self) -> Told:
        """What comes next.

        Raises:
            EnvironmentTimedOut: nothing did, in time.
            NotScored: the episode is over, and has no score.
            Exception: what the environment raised.
        """
        told = await self._told.get()
        if isinstance(told, BaseException):
            raise told
        return told

    def tell(self, told: Told | BaseException) -> None:
        """Let the caller hear of the end."""
        self._told.put_nowait(told)

    def scored(self, row: dict[str, Any] | None) -> Told:
        """The end of the episode, with what is so of the row.

        Raises:
            NotScored: see `reward_of`.
        """
        return Told("", reward_of(row), over=True, info={"scored": sampled(row or {}, self.said)})


class Episode:
    """An environment at work on one item."""

    def __init__(self, terms: Terms, work: Coroutine[Any, Any, Any], stuck: Callable[[int], None]) -> None:
        self.terms = terms
        self._stuck = stuck
        """Told of 1 where what was cancelled does not end, and of −1 when it does after all."""
        self._free = [Place(self) for _ in range(terms.size)]
        """Not taken yet."""
        self._places = list(self._free)
        self._unanswered = 0
        """Calls that wait for callers; while there are any, the clock stands still."""
        self._over = False
        context = contextvars.copy_context()
        context.run(_current.set, self)
        self._task = asyncio.get_running_loop().create_task(work, context=context)
        self._task.add_done_callback(self._ended)
        self._clock = self._wound()

    @property
    def full(self) -> bool:
        """Whether every place is taken, or none is to be taken any more."""
        return not self._free or self._over

    def take(self) -> Place:
        """A place that nobody has taken."""
        return self._free.pop(0)

    def expect_everyone(self) -> None:
        """End the episode if there are free places: those who took the others would wait for ever."""
        if not self.full:
            taken = self.terms.size - len(self._free)
            self.fail(
                EnvironmentTimedOut(
                    f"expected {self.terms.size} step-wise environments that are reset with the same seed, a group, "
                    f"got {taken} within {self.terms.timeout_s:g} s"
                )
            )

    def fail(self, error: Exception) -> None:
        """End it; everyone is told `error`, at once."""
        if self._over:
            return
        self._end([error] * self.terms.size)
        self._task.cancel()
        asyncio.get_running_loop().call_later(GRACE_S, self._expect_gone)

    async def ask(self, prompt: Prompt, count: int) -> list[tuple[Place, Action]]:
        """Have `prompt` answered at `count` places.

        Raises:
            ModelCallRefused: there are fewer places for it.
        """
        places = self._places_for(prompt, count)
        self._unanswered += 1
        self._clock.cancel()
        actions: list[Action] = []
        try:
            actions += await asyncio.gather(*[place.ask(prompt) for place in places])
        finally:
            for place, action in zip_longest(places, actions):
                place.note(prompt, action)
            self._unanswered -= 1
            if not self._unanswered and not self._over:
                self._clock = self._wound()
        return list(zip(places, actions, strict=True))

    def _places_for(self, prompt: Prompt, count: int) -> list[Place]:
        """The place whose conversation goes on; else places where nothing was said; else the only one there is."""
        if self._over:
            raise ModelCallRefused("expected no model calls when the episode is over, got one")
        going_on = [place for place in self._places if place.goes_on_with(prompt)]
        if count == 1 and going_on:
            return going_on[:1]
        fresh = [place for place in self._places if not place.begun]
        if len(fresh) >= count:
            return fresh[:count]
        if count == self.terms.size == 1 and not self._unanswered:
            return self._places
        raise ModelCallRefused(
            f"expected calls that go on with one of {self.terms.size} conversations, or begin one of {len(fresh)} new "
            f"ones, got one with n={count}: is group_size what the environment asks for at once?"
        )

    # -- time ----------------------------------------------------------------------------------------------------------

    def _wound(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.terms.timeout_s, self._timed_out)

    def _timed_out(self) -> None:
        self.fail(EnvironmentTimedOut(f"the environment worked for more than {self.terms.timeout_s:g} s at a turn"))

    def _expect_gone(self) -> None:
        if not self._task.done():
            self._stuck(1)
            self._task.add_done_callback(lambda _: self._stuck(-1))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            error: BaseException | None = EnvironmentTimedOut("the environment was closed in the middle of an episode")
        else:
            error = task.exception()
        self._end(self._judged(task.result()) if error is None else [error] * self.terms.size)

    def _judged(self, result: Any) -> list[Told | Exception]:
        """What every place is told."""
        try:
            rows = scored_by(result, self._places, self.terms.tokenizer)
        except Exception as error:  # noqa: BLE001 (told to the caller, whose environment it is)
            return [error] * self.terms.size
        return [_judgement(place, row) for place, row in zip(self._places, rows, strict=True)]

    def _end(self, told: Sequence[Told | BaseException]) -> None:
        if self._over:
            return
        self._over = True
        self._clock.cancel()
        for place, each in zip(self._places, told, strict=True):
            place.tell(each)


def _judgement(place: Place, row: dict[str, Any] | None) -> Told | Exception:
    try:
        return place.scored(row)
    except Exception as error:  # noqa: BLE001 (as above)
        return error
