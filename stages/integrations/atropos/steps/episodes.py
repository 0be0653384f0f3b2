"""One call of an environment's `collect_trajectory` or `collect_trajectories`, and the seats of its players.

A model call of the environment is sent to one seat, or to n of them, and waits there for actions. At its end each
seat gets its reward. A clock runs while the environment works: from an action to the next model call or the end.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os.path
import re
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec

from ....._pipeline.errors import PenstockError
from ....._schemas import StopReason
from ....tokenizers.pretrained_tokenizer import end_texts_of
from ..contract import BY_TOKEN, UNTRAINED
from .messages import (
    Action,
    EnvironmentRaised,
    EnvironmentTimedOut,
    Failure,
    GroupIncomplete,
    ModelCallRefused,
    NotScored,
    StepResult,
)

SIMILAR = 0.5
"""Share of a conversation's prompt that a later prompt has to begin with in order to count as its continuation."""

OF_A_GROUP = frozenset({"generation_params", "group_overrides", "images", "env_id"})
"""Fields that have no entry for each sequence."""

_current: contextvars.ContextVar[Episode] = contextvars.ContextVar("penstock_atropos_episode")


class EpisodeOver(BaseException):
    """Ends a model call that is refused. No `Exception`: environments and servers retry those, or go on without."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the environment to its model."""

    text: str
    """The prompt, rendered."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as messages; None if the environment gave it as text."""
    input_ids: list[int] | None = None
    """The prompt in tokens, if a managed server made them."""
    sampling: dict[str, Any]
    """All other arguments of the call: max_tokens, temperature, stop, tools, …."""


@dataclass(frozen=True)
class EpisodeConfig:
    """The settings of every episode of an environment."""

    size: int
    """Seats of an episode."""
    turn_timeout_s: float
    """Bound on the time that the environment works between two model calls."""
    tokenizer: Any
    """The environment's own; None if it has none."""


def current_episode() -> Episode:
    """Return the episode that the calling task belongs to.

    Raises:
        EpisodeOver: no episode; the caller is `setup`, or a separate task.
    """
    try:
        return _current.get()
    except LookupError:
        raise EpisodeOver(
            "expected model calls within collect_trajectory and collect_trajectories, got one from elsewhere: "
            "no action can answer it"
        ) from None


def failure_of(error: BaseException) -> Failure:
    """Return `error` in the form for the parent; a refusal outside of an episode as `ModelCallRefused`."""
    kind = ModelCallRefused if isinstance(error, EpisodeOver) else type(error)
    return Failure(kind.__name__, str(error), "".join(traceback.format_exception(error)))


class Seat:
    """The part of one step-wise environment in an episode."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.text: str | None = None
        """Text of the last action; None before the first."""
        self.tokens: Sequence[int] | None = None
        """The whole sequence, if it is known."""
        self.actions: list[Action] = []
        """All actions so far."""
        self._last: tuple[ModelCall, Action] | None = None
        """The model call that was answered last, and the action."""
        self.answer: asyncio.Future[Action] | None = None
        """Waits for an action; None while there is no model call."""
        self.results: asyncio.Queue[StepResult | Failure] = asyncio.Queue()
        """Model calls, and the end, that the player has not received."""

    def relevance(self, call: ModelCall) -> float:
        """Return how well `call` fits here: a continued conversation before a new one, that before any other.

        Environments reformat answers before they repeat them, and templates strip thoughts: if `call` does not begin
        with exactly this conversation, the longest common beginning counts, without white space and thoughts.
        """
        if self._last is None:
            return 0.5
        if self._new_text(call) is not None:
            return float("inf")
        answered, action = self._last
        asked, known = without_thoughts(call.text), without_thoughts(answered.text + action.text)
        prompt = len(without_thoughts(answered.text))
        shared = len(os.path.commonprefix([asked, known]))  # noqa: RUF071 (of letters)
        return shared if len(asked) > prompt and shared >= SIMILAR * prompt else 0.0

    def ask(self, call: ModelCall) -> asyncio.Future[Action]:
        """Make `call` the next observation; return a future for the action."""
        new_text = self._new_text(call)
        info = {"sampling": call.sampling, "continues": new_text is not None}
        optional = {"messages": call.messages, "input_ids": call.input_ids}
        info |= {name: value for name, value in optional.items() if value is not None}
        self.answer = asyncio.get_running_loop().create_future()
        self.results.put_nowait(StepResult(call.text if new_text is None else new_text, info=info))
        return self.answer

    def record(self, call: ModelCall, action: Action | None) -> None:
        """Note that the environment got `action`; None if it no longer waits."""
        self.answer = None
        if action is not None:
            self._last, self.text = (call, action), action.text
            self.actions.append(action)

    def act(self, action: Action) -> None:
        """Answer the model call with `action`; it is dropped if the environment no longer waits for it."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(action)

    def _new_text(self, call: ModelCall) -> str | None:
        """Return the text that `call` adds, without the action's end token; None if it is no continuation."""
        if self._last is None:
            return None
        answered, action = self._last
        before = answered.text + action.text
        if not call.text.startswith(before) or call.text == answered.text:
            return None
        new = call.text[len(before) :]
        ends = end_texts_of(self.episode.config.tokenizer) if action.stop_reason == StopReason.STOP else ()
        return new.removeprefix(next(filter(new.startswith, ends), ""))


class Episode:
    """One item that the environment works on."""

    def __init__(self, config: EpisodeConfig, work: Coroutine[Any, Any, Any]) -> None:
        self.config = config
        self._seats = [Seat(self) for _ in range(config.size)]
        self._free = list(self._seats)
        """Not taken yet."""
        self._unanswered = 0
        """Model calls that wait for actions; while there are any, the clock is stopped."""
        self._over = False
        context = contextvars.copy_context()
        context.run(_current.set, self)
        self._task = asyncio.get_running_loop().create_task(work, context=context)
        self._task.add_done_callback(self._ended)
        self._clock = self._started_clock()

    @property
    def full(self) -> bool:
        """True once no seat can be taken."""
        return not self._free or self._over

    def take_seat(self) -> Seat:
        """Return a seat that is not taken yet."""
        return self._free.pop(0)

    def expect_full(self) -> None:
        """End the episode if seats are free: the others would wait for ever."""
        if not self.full:
            taken = self.config.size - len(self._free)
            self.fail(
                GroupIncomplete(
                    f"expected {self.config.size} step-wise environments that are reset with the same seed, a group, "
                    f"got {taken} within {self.config.turn_timeout_s:g} s"
                )
            )

    def fail(self, error: PenstockError) -> None:
        """End the episode: every seat gets `error` now, also if the environment handles its cancellation."""
        if not self._over:
            self._end([failure_of(error)] * self.config.size)
            self._task.cancel()

    def refuse(self, reason: str) -> EpisodeOver:
        """End the episode because of a model call; return the exception that the call must raise."""
        self.fail(ModelCallRefused(reason))
        return EpisodeOver(reason)

    async def ask(self, call: ModelCall, count: int) -> list[tuple[Seat, Action]]:
        """Return the answers of `count` seats to `call`.

        Raises:
            EpisodeOver: fewer seats are free, or the episode is over.
        """
        seats = self._seats_for(call, count)
        self._unanswered += 1
        self._clock.cancel()
        actions: list[Action] = []
        try:
            actions += await asyncio.gather(*[seat.ask(call) for seat in seats])
        finally:
            for seat, action in zip_longest(seats, actions):
                seat.record(call, action)
            self._unanswered -= 1
            if not self._unanswered and not self._over:
                self._clock = self._started_clock()
        return list(zip(seats, actions, strict=True))

    def _seats_for(self, call: ModelCall, count: int) -> list[Seat]:
        """Return the seats that `call` fits best, in their order."""
        if self._over:
            raise EpisodeOver("the episode is over")
        free = [seat for seat in self._seats if seat.answer is None]
        if len(free) < count:
            raise self.refuse(
                f"expected at most {len(free)} answers to be asked for at once, got n={count}: is group_size, "
                f"{self.config.size}, what the environment asks for at once?"
            )
        chosen = sorted(free, key=lambda seat: seat.relevance(call), reverse=True)[:count]
        return [seat for seat in free if seat in chosen]

    # -- time and the end ----------------------------------------------------------------------------------------------

    def _started_clock(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.config.turn_timeout_s, self._time_out)

    def _time_out(self) -> None:
        self.fail(EnvironmentTimedOut(f"the environment worked for more than {self.config.turn_timeout_s:g} s a turn"))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._over:
            if not task.cancelled():
                task.exception()  # the seats have the reason already
        elif task.cancelled():
            self._end([Failure("CancelledError", "the environment cancelled its own work")] * self.config.size)
        elif (error := task.exception()) is not None:
            self._end([failure_of(error)] * self.config.size)
        else:
            self._end(self._scored(task.result()))

    def _scored(self, result: Any) -> Sequence[StepResult | Failure]:
        try:
            rows = scored_by(result, self._seats, self.config.tokenizer)
        except Exception as error:  # noqa: BLE001 (reported to the players)
            return [failure_of(error)] * self.config.size
        unscored = _unscored(rows)
        return [_outcome(seat, row, unscored) for seat, row in zip(self._seats, rows, strict=True)]

    def _end(self, results: Sequence[StepResult | Failure]) -> None:
        self._over = True
        self._clock.cancel()
        for seat, result in zip(self._seats, results, strict=True):
            seat.results.put_nowait(result)


def _outcome(seat: Seat, row: dict[str, Any] | None, unscored: str) -> StepResult | Failure:
    try:
        return StepResult("", reward_of(row, unscored), over=True, info={"scored": sampled(row or {}, seat.actions)})
    except Exception as error:  # noqa: BLE001 (reported to the player)
        return failure_of(error)


# -- scores ------------------------------------------------------------------------------------------------------------


def scored_by(result: Any, seats: Sequence[Seat], tokenizer: Any) -> list[dict[str, Any] | None]:
    """Return the row of each seat in the result of the environment; the last one of several.

    Environments shuffle rows and leave some out, so a row is matched by its tokens, by its messages, or by the text of
    its trained tokens, not by its position. A row that matches no seat is dropped.

    Raises:
        TypeError: Atropos would not accept the result.
    """
    matched: list[dict[str, Any] | None] = [None] * len(seats)
    for rows in _groups(result):
        left = list(range(len(seats)))
        for row in rows:
            found = _owner(row, [seats[index] for index in left], tokenizer, alone=len(rows) == len(seats) == 1)
            if found is not None:
                matched[left.pop(found)] = row
    return matched


def _unscored(rows: Sequence[Mapping[str, Any] | None]) -> str:
    """Return the reason that an episode of a group with these rows may have none."""
    if len(rows) == 1:
        return (
            "it may drop groups whose scores are equal, where a group_size of more than 1 helps, or answers that are "
            "short"
        )
    if any(row is not None for row in rows):
        return "it may drop answers that are short"
    return "the scores of its group may all be equal: all right (the task is learned) or all wrong"


def reward_of(row: Mapping[str, Any] | None, unscored: str) -> float:
    """Return the score of a row; `unscored` is the reason that there may be no row.

    Raises:
        NotScored: it has no score.
        EnvironmentRaised: it is no finite number.
    """
    if row is None:
        raise NotScored(f"expected the environment to score this episode, got no score: {unscored}")
    score = float(row["scores"])
    if not math.isfinite(score):
        raise EnvironmentRaised(f"expected a finite score, got {score}")
    return score


# -- sampled columns ---------------------------------------------------------------------------------------------------


def sampled(row: Mapping[str, Any], actions: Sequence[Action]) -> dict[str, Any]:
    """Return `row` without token ids and the fields by token, unless exactly those train that came with `actions`.

    Environments encode text to ids, and invent log-probabilities: neither was sampled.
    """
    given = [int(token) for action in actions for token in action.tokens or ()]
    logprobs: list[float | None] = []
    for action in actions:
        logprobs += action.logprobs or [None] * len(action.tokens or ())
    trained = [at for at, mask in enumerate(row.get("masks") or ()) if mask != UNTRAINED]
    start = _last(given, [int(row["tokens"][at]) for at in trained])
    invented: set[str] = set()
    if start is None:
        invented = {"tokens", *BY_TOKEN}
    elif not _equal(row.get("inference_logprobs"), dict(zip(trained, logprobs[start:], strict=False))):
        invented = {"inference_logprobs"}
    return {name: value for name, value in row.items() if name not in invented}


def _last(given: list[int], wanted: list[int]) -> int | None:
    """Return the start of the last occurrence of `wanted`; None if it does not occur, or is empty."""
    starts = range(len(given) - len(wanted), -1, -1) if wanted else ()
    return next((start for start in starts if given[start : start + len(wanted)] == wanted), None)


def _equal(row: Any, logprobs: Mapping[int, float | None]) -> bool:
    """Return whether `row` is None, or has these, to the precision of float32."""
    return row is None or all(
        logprob is not None and at < len(row) and _close(row[at], logprob) for at, logprob in logprobs.items()
    )


def _close(value: Any, logprob: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, logprob, rel_tol=1e-6, abs_tol=1e-6)


# -- rows --------------------------------------------------------------------------------------------------------------


def _groups(result: Any) -> Iterator[list[dict[str, Any]]]:
    scored = result[0] if isinstance(result, tuple) else result
    for group in scored if isinstance(scored, list) else [scored]:
        if group is None:
            continue
        if not isinstance(group, Mapping) or "scores" not in group:
            raise TypeError(f"expected scored data, a list of them or None, got {type(group).__name__}")
        yield _rows(group)


def _rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not hasattr(group["scores"], "__len__"):
        return [dict(group)]
    count = len(group["scores"])
    return [{name: _entry(name, value, index, count) for name, value in group.items()} for index in range(count)]


def _entry(name: str, value: Any, index: int, count: int) -> Any:
    by_sequence = name not in OF_A_GROUP and hasattr(value, "__len__") and len(value) == count
    return value[index] if by_sequence else value


# -- matching ----------------------------------------------------------------------------------------------------------


def _owner(row: Mapping[str, Any], seats: Sequence[Seat], tokenizer: Any, *, alone: bool) -> int | None:
    """Return the index of the seat whose answers `row` holds; None if it matches none.

    Environments reformat answers, and templates strip thoughts, so the comparison ignores both.
    """
    if alone:
        return 0
    for index, seat in enumerate(seats):
        if seat.tokens is not None and list(seat.tokens) == list(row.get("tokens") or ()):
            return index
    answer = _answer_text(row, tokenizer)
    for normalize in (squeezed, without_thoughts):
        texts = {index: normalize(seat.text) for index, seat in enumerate(seats) if seat.text is not None}
        end = None if answer is None else normalize(answer)
        fits = [index for index, text in texts.items() if end is not None and (end.endswith(text) if text else not end)]
        if fits:
            return max(fits, key=lambda index: len(texts[index]))
    return None


def _answer_text(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Return text that ends with the last answer of a row; None if the row holds none."""
    messages = row.get("messages")
    if messages:
        answers = [message for message in messages if message["role"] == "assistant"]
        return str(answers[-1]["content"]) if answers else None
    if tokenizer is None or not row.get("tokens"):
        return None
    trained = [token for token, mask in zip(row["tokens"], row["masks"], strict=True) if mask != UNTRAINED]
    text = str(tokenizer.decode(trained)).strip()
    return text.removesuffix(next(filter(text.endswith, end_texts_of(tokenizer)), ""))


def squeezed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())


def without_thoughts(text: str) -> str:
    """Return `text` without white space and without the text between <think> and </think>."""
    return squeezed(re.sub("<think>.*?</think>", "", text, flags=re.DOTALL))
