"""Environments: what `SourceEnv` can draw rollouts from, and what it makes of each kind.

Three kinds, told apart by the methods they have: a scored data set (reasoning-gym's interface), a step-wise environment
(gymnasium's and gem's signature, text in, text out), and an environment that brings finished rollouts from outside. Any
method may be a plain function, which then runs in a thread, or a coroutine function. Whatever an environment raises
becomes `EnvironmentFailed`, so that it is never taken for an error of the policy. Knows no channel and no ledger.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from .._pipeline.errors import InvalidPipeline, PenstockError
from .._schemas import InvalidRecord, StopReason
from .engines.policies import Completion, Tokenizer
from .threads import Call, Threads

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "GenerateFn",
    "OutsideEnvironment",
    "RolloutResult",
    "ScoredDataset",
    "StepEnvironment",
    "Task",
    "Tasks",
    "open_tasks",
]

CLOSING_S = 2.0
"""How long environments have to close at the end of a run; part of the 5 s in which Ctrl-C ends everything."""


class EnvironmentFailed(PenstockError):
    """An environment raised, or gave what nothing can be made of; `__cause__` is what it raised."""


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished trajectory, turn by turn."""

    turns: Sequence[NDArray[np.int32] | Completion]
    """What was said: a Completion by the policy, bare token ids by anybody else. The prompt comes first."""
    reward: float
    """Of all of it."""
    stop_reason: StopReason = StopReason.STOP
    turn_rewards: Sequence[float] | None = None
    """What each turn of the policy earned, one a Completion, where that is known; `reward` is their sum."""


@runtime_checkable
class ScoredDataset(Protocol):
    """Questions, and a score for any answer: the interface of `reasoning_gym`."""

    def __len__(self) -> int:
        """How many questions."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """A question: `{"question": str, "answer": …, "metadata": …}`."""
        ...

    def score_answer(self, answer: str, entry: Any) -> Any:
        """The reward of `answer` to the question `entry`."""
        ...


@runtime_checkable
class StepEnvironment(Protocol):
    """A text game, turn by turn: the signature of `gymnasium` and `gem`. `close()` is called where there is one."""

    def reset(self, *, seed: int | None = None) -> Any:
        """Begin anew; returns (observation, info). Equal seeds begin alike."""
        ...

    def step(self, action: str, /) -> Any:
        """Do `action`; returns (observation, reward, terminated, truncated, info)."""
        ...


@runtime_checkable
class OutsideEnvironment(Protocol):
    """Brings rollouts that were sampled elsewhere; goes with `NoOpPolicy`."""

    def rollout(self, task: int, repetition: int, /) -> Any:
        """The `repetition`-th `RolloutResult` of prompt number `task`."""
        ...


Environment: TypeAlias = ScoredDataset | StepEnvironment | OutsideEnvironment

GenerateFn: TypeAlias = Callable[[Sequence[NDArray[np.int32] | Completion]], Awaitable[Completion | None]]
"""Lets the policy answer to what was said so far; None where no token is left to answer with."""


class Task(Protocol):
    """One prompt of an environment."""

    async def rollout(self, repetition: int, speak: GenerateFn) -> RolloutResult:
        """Roll out once.

        Raises:
            EnvironmentFailed: the environment did.
        """
        ...


class Tasks(Protocol):
    """An opened environment: prompts by number."""

    async def task(self, number: int) -> Task:
        """Prompt `number`, counted from 0.

        Raises:
            EnvironmentFailed: the environment did.
        """
        ...


@asynccontextmanager
async def open_tasks(
    make_env: Callable[[], Environment], tokenizer: Tokenizer | None, *, threads: int, seed: int
) -> AsyncIterator[Tasks]:
    """Make the environment, and close it and its copies when the body ends.

    Args:
        make_env: called once, and for a step-wise environment again for each rollout at a time.
        tokenizer: turns what environments say into tokens; only an outside environment does without.
        threads: how many blocking calls run at once.
        seed: added to a prompt's number, resets a step-wise environment.

    Raises:
        InvalidPipeline: what `make_env` made is no environment, or there is no tokenizer for it.
        Exception: whatever `make_env` raises.
    """
    caller = _Caller(Threads(threads))
    try:
        first = await caller.plain(make_env)
        if isinstance(first, OutsideEnvironment):
            yield _Outside(first, caller)
        elif not isinstance(first, ScoredDataset | StepEnvironment):
            raise InvalidPipeline(_not_an_environment(first))
        elif tokenizer is None:
            raise InvalidPipeline(f"{first!r} speaks text: expected a tokenizer for it, got none")
        elif isinstance(first, ScoredDataset):
            yield _DatasetTasks(first, caller, tokenizer)
        else:
            copies = _Copies(make_env, first, caller, tokenizer)
            try:
                yield _EpisodeTasks(copies, tokenizer, seed)
            finally:
                await copies.close()
    finally:
        caller.threads.close()


def _not_an_environment(found: object) -> str:
    return (
        f"expected an environment with len, [] and score_answer (a scored data set), with reset and step (step-wise), "
        f"or with rollout (outside), got {type(found).__name__}"
    )


class _Caller:
    """Calls environments: plain functions in threads, coroutine functions here."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    async def plain(self, function: Callable[[], Any], began: Callable[[Call], None] | None = None) -> Any:
        """What `function` gives; `began` is handed the call if it goes to a thread."""
        if inspect.iscoroutinefunction(function.func if isinstance(function, partial) else function):
            return await function()
        call = self.threads.start(function)
        if began is not None:
            began(call)
        value = await call
        return await value if inspect.isawaitable(value) else value

    async def __call__(
        self, function: Callable[[], Any], take: Callable[[Any], Any], began: Callable[[Call], None] | None = None
    ) -> Any:
        """What `take` makes of what `function` gives.

        Raises:
            EnvironmentFailed: either raised.
        """
        try:
            return take(await self.plain(function, began))
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(f"environment raised {type(error).__name__}: {error}".rstrip(": ")) from error


# -- scored data sets ----------------------------------------------------------------------------------------------


class _DatasetTasks:
    """A scored data set; beyond its end it begins again."""

    def __init__(self, dataset: ScoredDataset, caller: _Caller, tokenizer: Tokenizer) -> None:
        self._dataset = dataset
        self._caller = caller
        self._tokenizer = tokenizer

    async def task(self, number: int) -> Task:
        def question() -> tuple[Mapping[str, Any], NDArray[np.int32]]:
            entry = self._dataset[number % len(self._dataset)]
            return entry, _prompt(self._tokenizer, entry["question"])

        entry, prompt = await self._caller(question, _as_it_is)
        return _DatasetTask(self._dataset, entry, prompt, self._caller, self._tokenizer)


class _DatasetTask:
    def __init__(
        self,
        dataset: ScoredDataset,
        entry: Mapping[str, Any],
        prompt: NDArray[np.int32],
        caller: _Caller,
        tokenizer: Tokenizer,
    ) -> None:
        self._dataset = dataset
        self._entry = entry
        self._prompt = prompt
        self._caller = caller
        self._tokenizer = tokenizer

    async def rollout(self, repetition: int, speak: GenerateFn) -> RolloutResult:  # noqa: ARG002 (all repetitions begin alike)
        answer = await speak([self._prompt])
        if answer is None:
            return RolloutResult(turns=[self._prompt], reward=0.0, stop_reason=StopReason.LENGTH, turn_rewards=[])
        text = _text(self._tokenizer, answer)
        reward = await self._caller(partial(self._dataset.score_answer, text, self._entry), _reward)
        return RolloutResult(
            turns=[self._prompt, answer], reward=reward, stop_reason=answer.stop_reason, turn_rewards=[reward]
        )


# -- step-wise environments ----------------------------------------------------------------------------------------


class _Copies:
    """As many copies of a step-wise environment as rollouts run at once, used again and again."""

    def __init__(
        self, make_env: Callable[[], Environment], first: StepEnvironment, caller: _Caller, tokenizer: Tokenizer
    ) -> None:
        self._make_env = make_env
        self._free = [_Copy(first, caller, tokenizer)]
        self._retired: list[_Copy] = []
        """Not used again, and closed at the end because closing them has to be awaited."""
        self._caller = caller
        self._tokenizer = tokenizer

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[_Copy]:
        """A copy for one rollout. One that failed, or was abandoned in the middle, is closed and not used again."""
        copy = self._free.pop() if self._free else await self._another()
        try:
            yield copy
        except BaseException:
            if not copy.discard():
                self._retired.append(copy)
            raise
        self._free.append(copy)

    async def _another(self) -> _Copy:
        return _Copy(await self._caller(self._make_env, _as_it_is), self._caller, self._tokenizer)

    async def close(self) -> None:
        """Close every copy, and wait until they have."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSING_S):
            for copy in (*self._free, *self._retired):
                with suppress(EnvironmentFailed):
                    await copy.close()
            await self._caller.threads.quiet()


class _Step(NamedTuple):
    """What came of an action."""

    observation: NDArray[np.int32]
    reward: float
    terminated: bool
    truncated: bool


class _Copy:
    """One step-wise environment, used by one rollout at a time."""

    def __init__(self, env: StepEnvironment, caller: _Caller, tokenizer: Tokenizer) -> None:
        self._env = env
        self._caller = caller
        self._tokenizer = tokenizer
        self._last: Call | None = None
        """The call that it is in, or was in last; an abandoned one may still run."""

    async def reset(self, seed: int) -> NDArray[np.int32]:
        """Begin anew; returns the prompt."""

        def take(begun: Any) -> NDArray[np.int32]:
            return _prompt(self._tokenizer, begun[0])

        prompt: NDArray[np.int32] = await self._call(partial(self._env.reset, seed=seed), take)
        return prompt

    async def step(self, action: str) -> _Step:
        """Do `action`."""

        def take(outcome: Any) -> _Step:
            observation, reward, terminated, truncated, _ = outcome
            return _Step(_tokens(self._tokenizer, observation), _reward(reward), bool(terminated), bool(truncated))

        step: _Step = await self._call(partial(self._env.step, action), take)
        return step

    async def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        close = getattr(self._env, "close", None)
        if close is not None:
            await self._call(close, _as_it_is)

    def discard(self) -> bool:
        """Close it once it has returned from the call it is in, and wait for neither; false if closing must wait."""
        close = getattr(self._env, "close", None)
        if inspect.iscoroutinefunction(close):
            return False
        if close is not None and self._last is not None:
            self._last.then(lambda: self._caller.threads.start(close))
        return True

    async def _call(self, function: Callable[[], Any], take: Callable[[Any], Any]) -> Any:
        return await self._caller(function, take, self._began)

    def _began(self, call: Call) -> None:
        self._last = call


class _EpisodeTasks:
    """Episodes of a step-wise environment, each prompt with a seed of its own."""

    def __init__(self, copies: _Copies, tokenizer: Tokenizer, seed: int) -> None:
        self._copies = copies
        self._tokenizer = tokenizer
        self._seed = seed

    async def task(self, number: int) -> Task:
        return _Episode(self._copies, self._tokenizer, self._seed + number)


class _Episode:
    def __init__(self, copies: _Copies, tokenizer: Tokenizer, seed: int) -> None:
        self._copies = copies
        self._tokenizer = tokenizer
        self._seed = seed

    async def rollout(self, repetition: int, speak: GenerateFn) -> RolloutResult:  # noqa: ARG002 (all repetitions begin alike)
        async with self._copies.acquire() as env:
            return await self._played(env, speak)

    async def _played(self, env: _Copy, speak: GenerateFn) -> RolloutResult:
        turns: list[NDArray[np.int32] | Completion] = [await env.reset(self._seed)]
        rewards: list[float] = []
        stop_reason = StopReason.LENGTH
        while (answer := await speak(turns)) is not None:
            turns.append(answer)
            step = await env.step(_text(self._tokenizer, answer))
            rewards.append(step.reward)
            if step.terminated or step.truncated:
                cut = step.truncated or answer.stop_reason == StopReason.LENGTH
                stop_reason = StopReason.LENGTH if cut else StopReason.STOP
                break
            turns.append(step.observation)
        if len(turns) > 1 and not isinstance(turns[-1], Completion):
            turns.pop()  # nobody answered it
        return RolloutResult(turns=turns, reward=sum(rewards, 0.0), stop_reason=stop_reason, turn_rewards=rewards)


# -- rollouts from outside -----------------------------------------------------------------------------------------


class _Outside:
    """Rollouts that somebody else sampled."""

    def __init__(self, env: OutsideEnvironment, caller: _Caller) -> None:
        self._env = env
        self._caller = caller

    async def task(self, number: int) -> Task:
        return _OutsideTask(self._env, number, self._caller)


class _OutsideTask:
    def __init__(self, env: OutsideEnvironment, number: int, caller: _Caller) -> None:
        self._env = env
        self._number = number
        self._caller = caller

    async def rollout(self, repetition: int, speak: GenerateFn) -> RolloutResult:  # noqa: ARG002 (nobody is asked to speak)
        rollout: RolloutResult = await self._caller(partial(self._env.rollout, self._number, repetition), _checked)
        return rollout


# -- what environments give ----------------------------------------------------------------------------------------


def _as_it_is(value: Any) -> Any:
    return value


def _reward(value: Any) -> float:
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"expected a finite reward, got {reward}")
    return reward


def _checked(rollout: Any) -> RolloutResult:
    """A rollout from outside, its arrays converted and held to what a group expects."""
    if not isinstance(rollout, RolloutResult):
        raise TypeError(f"expected a RolloutResult, got {type(rollout).__name__}")
    turns = [_checked_turn(turn) for turn in rollout.turns]
    if not turns or isinstance(turns[0], Completion) or not len(turns[0]):
        raise InvalidRecord("turns: expected a prompt of at least one token first")
    reward, turn_rewards = _reward(rollout.reward), rollout.turn_rewards
    if turn_rewards is not None:
        turn_rewards = [_reward(earned) for earned in turn_rewards]
        spoken = sum(isinstance(turn, Completion) for turn in turns)
        if len(turn_rewards) != spoken:
            raise InvalidRecord(f"turn_rewards: expected {spoken}, one a Completion, got {len(turn_rewards)}")
        if not math.isclose(sum(turn_rewards), reward, rel_tol=1e-6, abs_tol=1e-6):
            raise InvalidRecord(f"turn_rewards: expected {reward} in all, the reward, got {sum(turn_rewards)}")
    return msgspec.structs.replace(rollout, turns=turns, reward=reward, turn_rewards=turn_rewards)


def _checked_turn(turn: Any) -> NDArray[np.int32] | Completion:
    if not isinstance(turn, Completion):
        return _ids(turn)
    tokens = _ids(turn.tokens)
    versions = np.asarray(turn.policy_versions, np.int64)
    logprobs = None if turn.logprobs is None else np.asarray(turn.logprobs, np.float32)
    for name, column in (("policy_versions", versions), ("logprobs", logprobs)):
        if column is not None and (column.shape != tokens.shape or not np.isfinite(column).all()):
            raise InvalidRecord(f"{name}: expected {len(tokens)} finite values, got shape {column.shape}")
    return msgspec.structs.replace(turn, tokens=tokens, logprobs=logprobs, policy_versions=versions)


def _ids(tokens: Any) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0)):
        raise InvalidRecord(f"tokens: expected a row of ids of 0 or more, got {ids.dtype} {ids.shape}")
    return ids.astype(np.int32, copy=False)


def _tokens(tokenizer: Tokenizer, text: Any) -> NDArray[np.int32]:
    if not isinstance(text, str):
        raise TypeError(f"expected an observation of type str, got {type(text).__name__}")
    return np.asarray(tokenizer.encode(text), np.int32)


def _prompt(tokenizer: Tokenizer, text: Any) -> NDArray[np.int32]:
    prompt = _tokens(tokenizer, text)
    if not len(prompt):
        raise ValueError(f"expected a prompt of at least one token, got none for {text!r}")
    return prompt


def _text(tokenizer: Tokenizer, completion: Completion) -> str:
    """What the policy said, without the end-of-sequence token."""
    tokens = completion.tokens
    if len(tokens) and tokens[-1] == tokenizer.eos_id:
        tokens = tokens[:-1]
    return tokenizer.decode(tokens.tolist())
