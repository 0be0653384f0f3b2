"""Environments: the five kinds that `SourceEnv` samples from, and the rollouts of each.

The kind follows from the methods: a scored data set (reasoning-gym's interface), prompts that a later stage scores
(`data.prompts`), a step-wise environment (the signature of gymnasium and gem, text in, text out), an environment that
returns finished rollouts from outside, or one that drives: it asks for completions itself. An `EnvironmentMixture` has
several of any kinds. Any method but `drive` may be a coroutine function, or a plain one: that runs in a thread. Every
exception of an environment becomes `EnvironmentFailed`, so that it is never taken for an error of the policy. Knows no
channel and no ledger.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sized
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidPipeline
from ..._schemas import InvalidRecord, StopReason
from ..._schemas.group import check_meta
from ..agents.agent_client import DrivingEnvironment
from ..contracts.policies import Completion, Tokenizer
from ..contracts.prompts import Prompt, PromptSource
from ..contracts.rollouts import Branch, RolloutResult, RolloutSampler, Turn, as_ids, finite, next_turn
from ..contracts.threads import Threads
from ..data.weighted_places import WeightedPlaces
from ..tokenizers.chat_format import ChatFormat
from ..tokenizers.conversations import ConversationEncoder, conversation, text_of
from .driving_environments import driving_tasks
from .environment_calls import EnvironmentFailed, called, failed, unchanged
from .environment_mixture import EnvironmentMixture

CLOSE_TIMEOUT_S = 2.0
"""Bound on closing the environments at the end of a run; part of the 5 s that Ctrl-C takes at most."""

B = TypeVar("B", bound=Branch)

LOOK_AHEAD = 8
"""Prompts of the epoch that are looked at for each rejected one, until the first that fits."""


class PromptRejected(Exception):
    """A prompt may not be sampled; the message has the reason."""

    def __init__(self, reason: str, epoch: int, *, none_fits: bool) -> None:
        super().__init__(reason)
        self.epoch = epoch
        """The number of prompts of an epoch; 0 where it is not known."""
        self.none_fits = none_fits
        """True if every prompt of the epoch was looked at, and may not be sampled either."""


@runtime_checkable
class ScoredDataset(Protocol):
    """Questions, and a score for any completion: the interface of `reasoning_gym`."""

    def __len__(self) -> int:
        """Return the number of questions."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a question: `{"question": str, "answer": …, "metadata": …}`."""
        ...

    def score_answer(self, answer: str, entry: Any) -> Any:
        """Return the reward of `answer` to the question `entry`."""
        ...


@runtime_checkable
class StepEnvironment(Protocol):
    """A text game, turn by turn: the signature of `gymnasium` and `gem`. `close()` is called if there is one.

    An episode is given up between two steps if the policy has no tokens left. If others wait for its end, as in a group
    that is scored together, `end_cut_episode()` ends it, and returns the reward that it still gets.
    """

    def reset(self, *, seed: int | None = None) -> Any:
        """Start an episode; return (observation, info). Equal seeds start equal episodes."""
        ...

    def step(self, action: str, /) -> Any:
        """Do `action`; return (observation, reward, terminated, truncated, info)."""
        ...


@runtime_checkable
class OutsideEnvironment(Protocol):
    """An environment of rollouts that were sampled elsewhere; use it with `NoOpPolicy`."""

    def rollout(self, task: int, repetition: int, /) -> Any:
        """Return the `repetition`-th `RolloutResult` of prompt number `task`."""
        ...


Environment: TypeAlias = (
    ScoredDataset | PromptSource | StepEnvironment | OutsideEnvironment | DrivingEnvironment | EnvironmentMixture
)

RolloutFn: TypeAlias = Callable[[int, RolloutSampler], Coroutine[Any, Any, RolloutResult]]
"""Does one rollout of a prompt, given the number of the repetition.

Raises EnvironmentFailed if the environment raises."""

TaskFn: TypeAlias = Callable[[int], Coroutine[Any, Any, RolloutFn]]
"""Begins a prompt, given its number from 0 on, and returns the function of its rollouts.

Raises EnvironmentFailed if the environment raises, and PromptRejected if the prompt may not be sampled."""


@asynccontextmanager
async def open_tasks(
    make_env: Callable[[], Environment],
    tokenizer: Tokenizer | None,
    chat: ChatFormat | None = None,
    *,
    threads: int,
    seed: int,
) -> AsyncIterator[TaskFn]:
    """Make the environment, yield the function of its prompts, and close it and its copies when the body ends.

    Args:
        make_env: called once, and for a step-wise environment once more for each concurrent rollout.
        tokenizer: converts text of environments to tokens; only an outside environment goes without.
        chat: makes messages of the text, and converts them to tokens.
        threads: number of blocking calls at once.
        seed: added to a prompt's number; the sum resets a step-wise environment.

    Raises:
        InvalidPipeline: `make_env` returned no environment, or one that needs a tokenizer and has none.
        UnstableTemplate: `chat` cannot be used for the turns of a step-wise environment.
        Exception: raised by `make_env`.
    """
    workers = Threads(threads)
    try:
        first = await workers.call(make_env)
        if isinstance(first, EnvironmentMixture):
            async with AsyncExitStack() as stack:
                begins: dict[str, TaskFn] = {}
                for name, (make_one, _) in first.environments.items():
                    opened = open_tasks(make_one, tokenizer, chat, threads=threads, seed=seed)
                    begins[name] = await stack.enter_async_context(opened)
                yield _MixedTasks(begins, first.places).begin
        elif isinstance(first, OutsideEnvironment):
            yield _OutsideTasks(first, workers).begin
        elif isinstance(first, DrivingEnvironment):
            async with driving_tasks(first, make_env, workers, chat) as begin:
                yield begin
        elif not isinstance(first, ScoredDataset | PromptSource | StepEnvironment):
            raise InvalidPipeline(
                f"expected an environment with len, [] and score_answer (a scored data set), with prompt (prompts), "
                f"with reset and step (step-wise), with rollout (outside), or with drive (driving), got "
                f"{type(first).__name__}"
            )
        elif tokenizer is None:
            raise InvalidPipeline(f"{first!r} returns text: expected a tokenizer for it, got none")
        elif isinstance(first, ScoredDataset):
            yield _DatasetTasks(first, workers, tokenizer, chat).begin
        elif isinstance(first, PromptSource):
            yield _PromptTasks(first, workers, tokenizer, chat).begin
        else:
            if chat is not None:
                await workers.call(chat.check_turns)
            pool = _EnvPool(make_env, first, workers)
            try:
                yield _EpisodeTasks(pool, tokenizer, chat, seed).begin
            finally:
                await pool.close()
    finally:
        workers.close()


# -- scored data sets ----------------------------------------------------------------------------------------------


class _DatasetTasks:
    """The questions of a scored data set, repeated after the last."""

    def __init__(self, dataset: ScoredDataset, threads: Threads, tokenizer: Tokenizer, chat: ChatFormat | None) -> None:
        self._dataset = dataset
        self._threads = threads
        self._tokenizer = tokenizer
        self._chat = chat

    async def begin(self, number: int) -> RolloutFn:
        def question() -> tuple[Mapping[str, Any], NDArray[np.int32], Mapping[str, Any]]:
            entry = self._dataset[number % len(self._dataset)]
            asked = conversation(self._tokenizer, self._chat)
            return entry, asked.begin(entry["question"]), asked.meta

        return partial(self._rollout, *await called(self._threads, question, unchanged))

    async def _rollout(
        self,
        entry: Mapping[str, Any],
        prompt: NDArray[np.int32],
        meta: Mapping[str, Any],
        _: int,
        sampler: RolloutSampler,
    ) -> RolloutResult:
        completion = await next_turn(sampler, [prompt])
        if completion is None:
            return RolloutResult(turns=[prompt], reward=0.0, stop_reason=StopReason.LENGTH, turn_rewards=[], meta=meta)
        text = text_of(self._tokenizer, completion)
        reward = await called(self._threads, partial(self._dataset.score_answer, text, entry), finite)
        stop_reason = completion.stop_reason
        return RolloutResult(
            turns=[prompt, completion], reward=reward, stop_reason=stop_reason, turn_rewards=[reward], meta=meta
        )


# -- prompts -----------------------------------------------------------------------------------------------------------


class _PromptTasks:
    """Prompts without a score: every reward is 0, and the facts about the prompt are in `meta`."""

    def __init__(self, source: PromptSource, threads: Threads, tokenizer: Tokenizer, chat: ChatFormat | None) -> None:
        self._source = source
        self._threads = threads
        self._tokenizer = tokenizer
        self._chat = chat
        self._epoch = len(source) if isinstance(source, Sized) else 0
        """The number of prompts; 0 where it is not known."""
        self._next = self._looked_at = 0
        """The next prompt of the epoch that is looked at, and how many were."""
        self._one_fits = False

    async def begin(self, number: int) -> RolloutFn:
        prompt, tokens, meta = await self._prompt(number)
        if prompt.left_out:
            raise PromptRejected(prompt.left_out, 0, none_fits=False)
        if _fits(prompt, tokens):
            self._one_fits = True
            return partial(self._rollout, tokens, meta)
        for _ in range(LOOK_AHEAD):
            await self._look_ahead()
        none_fits = not self._one_fits and self._looked_at == self._epoch > 0
        raise PromptRejected(f"prompt longer than {prompt.max_tokens} tokens", self._epoch, none_fits=none_fits)

    async def _look_ahead(self) -> None:
        """Look at another prompt of the epoch, until the first that fits."""
        if self._one_fits or self._next == self._epoch:
            return
        number, self._next = self._next, self._next + 1
        with suppress(EnvironmentFailed):
            prompt, tokens, _ = await self._prompt(number)
            self._one_fits |= _fits(prompt, tokens)
        self._looked_at += 1

    async def _prompt(self, number: int) -> tuple[Prompt, NDArray[np.int32], Mapping[str, Any]]:
        prompt: tuple[Prompt, NDArray[np.int32], Mapping[str, Any]]
        prompt = await called(self._threads, partial(self._source.prompt, number), self._read)
        return prompt

    def _read(self, prompt: Prompt) -> tuple[Prompt, NDArray[np.int32], Mapping[str, Any]]:
        if isinstance(prompt.content, str):
            asked = conversation(self._tokenizer, self._chat)
            return prompt, asked.begin(prompt.content), {**prompt.meta, **asked.meta}
        return prompt, as_ids(prompt.content, least=1), prompt.meta

    async def _rollout(
        self, prompt: NDArray[np.int32], meta: Mapping[str, Any], _: int, sampler: RolloutSampler
    ) -> RolloutResult:
        completion = await next_turn(sampler, [prompt])
        return RolloutResult(
            turns=[prompt] if completion is None else [prompt, completion],
            reward=0.0,
            stop_reason=StopReason.LENGTH if completion is None else completion.stop_reason,
            turn_rewards=[] if completion is None else [0.0],
            scored=False,
            meta=meta,
        )


def _fits(prompt: Prompt, tokens: NDArray[np.int32]) -> bool:
    return prompt.max_tokens is None or len(tokens) <= prompt.max_tokens


# -- step-wise environments ----------------------------------------------------------------------------------------


class _EnvPool:
    """Instances of a step-wise environment, one for each concurrent rollout, reused."""

    def __init__(self, make_env: Callable[[], Environment], first: StepEnvironment, threads: Threads) -> None:
        self._make_env = make_env
        self._free = [_PooledEnv(first, threads)]
        self._retired: list[_PooledEnv] = []
        """Not used again; closed at the end, because their `close` must be awaited."""
        self._threads = threads

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[_PooledEnv]:
        """Yield an instance for one rollout. One whose rollout failed or was cancelled is closed and not used again."""
        if self._free:
            env = self._free.pop()
        else:
            env = _PooledEnv(await called(self._threads, self._make_env, unchanged), self._threads)
        try:
            yield env
        except BaseException:
            if not env.discard():
                self._retired.append(env)
            raise
        self._free.append(env)

    async def close(self) -> None:
        """Close every instance and wait for the calls to return."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S):
            for env in (*self._free, *self._retired):
                with suppress(EnvironmentFailed):
                    await env.close()
            await self._threads.wait_idle()


class _PooledEnv:
    """One instance of a step-wise environment, used by one rollout at a time."""

    def __init__(self, env: StepEnvironment, threads: Threads) -> None:
        self.env = env
        self._threads = threads
        self._last: Future[Any] | None = None
        """The latest call; it may still run if its rollout was cancelled."""

    async def call(self, function: Callable[[], Any], take: Callable[[Any], Any]) -> Any:
        """Return `take` of the result of `function`, a method of the environment; see `_called`."""
        return await called(self._threads, function, take, self._began)

    def _began(self, call: Future[Any]) -> None:
        self._last = call

    async def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        close = getattr(self.env, "close", None)
        if close is not None:
            await self.call(close, unchanged)

    def discard(self) -> bool:
        """Close it, without waiting, after its current call returns; return False if `close` must be awaited."""
        close = getattr(self.env, "close", None)
        if inspect.iscoroutinefunction(close):
            return False
        if close is not None and self._last is not None:
            self._threads.start_after(self._last, close)
        return True


class _EpisodeTasks:
    """Episodes of a step-wise environment, one seed for each prompt."""

    def __init__(self, pool: _EnvPool, tokenizer: Tokenizer, chat: ChatFormat | None, seed: int) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._chat = chat
        self._seed = seed

    async def begin(self, number: int) -> RolloutFn:
        return partial(self._rollout, self._seed + number)

    async def _rollout(self, seed: int, _: int, sampler: RolloutSampler) -> RolloutResult:
        async with self._pool.acquire() as env:
            return await self._play(env, seed, sampler)

    async def _play(self, env: _PooledEnv, seed: int, sampler: RolloutSampler) -> RolloutResult:
        said = conversation(self._tokenizer, self._chat)
        prompt = await env.call(partial(env.env.reset, seed=seed), lambda started: said.begin(started[0]))
        turns: list[Turn] = [prompt]
        rewards: list[float] = []
        stop_reason = StopReason.LENGTH
        while (completion := await next_turn(sampler, turns)) is not None:
            turns.append(completion)
            action = text_of(self._tokenizer, completion)
            outcome = await env.call(partial(env.env.step, action), partial(_outcome, said, completion))
            observation, reward, terminated, truncated = outcome
            rewards.append(reward)
            if terminated or truncated:
                cut = truncated or completion.stop_reason == StopReason.LENGTH
                stop_reason = StopReason.LENGTH if cut else StopReason.STOP
                break
            turns.append(observation)
        else:
            await self._end_cut(env, rewards)
        if len(turns) > 1 and not isinstance(turns[-1], Completion):
            turns.pop()  # no completion follows it
        return RolloutResult(
            turns=turns, reward=sum(rewards, 0.0), stop_reason=stop_reason, turn_rewards=rewards, meta=said.meta
        )

    async def _end_cut(self, env: _PooledEnv, rewards: list[float]) -> None:
        """End an episode because the policy has no tokens left; its reward is that of the last turn."""
        end = getattr(env.env, "end_cut_episode", None)
        if end is not None:
            reward = await env.call(end, finite)
            if rewards:
                rewards[-1] += reward


def _outcome(
    said: ConversationEncoder, completion: Completion, outcome: Any
) -> tuple[NDArray[np.int32], float, bool, bool]:
    observation, reward, terminated, truncated, _ = outcome
    ended = bool(terminated or truncated)
    tokens = np.zeros(0, np.int32) if ended else said.go_on(completion, observation)
    return tokens, finite(reward), bool(terminated), bool(truncated)


# -- rollouts from outside -----------------------------------------------------------------------------------------


class _OutsideTasks:
    """Rollouts that were sampled elsewhere."""

    def __init__(self, env: OutsideEnvironment, threads: Threads) -> None:
        self._env = env
        self._threads = threads

    async def begin(self, number: int) -> RolloutFn:
        return partial(self._rollout, number)

    async def _rollout(self, number: int, repetition: int, _: RolloutSampler) -> RolloutResult:
        rollout: RolloutResult = await called(self._threads, partial(self._env.rollout, number, repetition), _checked)
        return rollout


# -- several environments ----------------------------------------------------------------------------------------------


class _MixedTasks:
    """The prompts of an `EnvironmentMixture`."""

    def __init__(self, begins: Mapping[str, TaskFn], places: WeightedPlaces) -> None:
        self._begins = list(begins.items())
        self._places = places

    async def begin(self, number: int) -> RolloutFn:
        which, own = self._places.at(number)
        name, begin = self._begins[which]
        try:
            return partial(self._rollout, name, await begin(own))
        except PromptRejected as rejected:  # its epoch is that of one environment, and ends no run
            raise PromptRejected(str(rejected), 0, none_fits=False) from None

    async def _rollout(self, name: str, rollout: RolloutFn, repetition: int, sampler: RolloutSampler) -> RolloutResult:
        result = await rollout(repetition, sampler)
        return msgspec.structs.replace(
            result,
            meta={**result.meta, "data_source": name},
            metrics={f"{name}/{key}": value for key, value in result.metrics.items()},
        )


# -- checks of returned values ----------------------------------------------------------------------------------------


def checked(rollout: RolloutResult) -> RolloutResult:
    """Return a rollout whose `meta` can be sent.

    Raises:
        EnvironmentFailed: it cannot.
    """
    try:
        check_meta(rollout.meta)
    except InvalidRecord as error:
        raise failed(error) from error
    return rollout


def _checked(rollout: Any) -> RolloutResult:
    """Return a rollout from outside with its arrays converted and checked against the rules of a group."""
    if not isinstance(rollout, RolloutResult):
        raise TypeError(f"expected a RolloutResult, got {type(rollout).__name__}")
    reward, checked = finite(rollout.reward), _checked_branch(rollout)
    others = [_checked_branch(branch) for branch in rollout.branches]
    by_turn = [branch.turn_rewards for branch in (checked, *others) if branch.turn_rewards is not None]
    if by_turn and len(by_turn) <= len(others):
        raise InvalidRecord("turn_rewards: expected them for every sequence of the rollout, or for none")
    if by_turn and not math.isclose(total := sum(map(sum, by_turn)), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise InvalidRecord(f"turn_rewards: expected {reward} in all, the reward, got {total}")
    return msgspec.structs.replace(checked, reward=reward, branches=others)


def _checked_branch(branch: B) -> B:
    turns = [_checked_turn(turn) for turn in branch.turns]
    if not turns or isinstance(turns[0], Completion) or not len(turns[0]):
        raise InvalidRecord("turns: expected a prompt of at least one token first")
    checked, turn_rewards = msgspec.structs.replace(branch, turns=turns), branch.turn_rewards
    if turn_rewards is not None:
        if len(turn_rewards) != checked.completions:
            raise InvalidRecord(
                f"turn_rewards: expected {checked.completions}, one for each Completion, got {len(turn_rewards)}"
            )
        checked = msgspec.structs.replace(checked, turn_rewards=[finite(each) for each in turn_rewards])
    return checked


def _checked_turn(turn: Any) -> Turn:
    if not isinstance(turn, Completion):
        return as_ids(turn)
    tokens = as_ids(turn.tokens)
    versions = np.asarray(turn.policy_versions, np.int64)
    logprobs = None if turn.logprobs is None else np.asarray(turn.logprobs, np.float32)
    for name, column in (("policy_versions", versions), ("logprobs", logprobs)):
        if column is not None and (column.shape != tokens.shape or not np.isfinite(column).all()):
            raise InvalidRecord(f"{name}: expected {len(tokens)} finite values, got shape {column.shape}")
    return msgspec.structs.replace(turn, tokens=tokens, logprobs=logprobs, policy_versions=versions)
