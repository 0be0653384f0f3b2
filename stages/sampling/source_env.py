"""`SourceEnv`: an environment and a policy in, groups of trajectories out.

Prompts are taken by number; each is rolled out `group_size` times at once, and the rollouts that succeed leave as one
group. A rollout whose environment raises, or takes too long, is counted failed, with the reason, and its group goes on
smaller; an error of the policy ends the run. Sampling does not run ahead of the trainer: the next prompt waits
for the channel's credit, the bound on concurrency and, if the pipeline bounds the lag, the steps of the optimizer.

Prompts are assigned (`SourceEnv.assign`): by the pipeline to the workers, however many there are, or by the source to
itself. A schedule is synchronous if all trajectories of an optimizer step are sampled with the weights of the step
before it (`max_lag=0`, and steps of a known size). Then the prompts of a step are assigned as one window, and sent in
their order, so that neither depends on a clock: a run can be repeated bit for bit as far as its environment and policy
can.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import anyio
import numpy as np
from anyio.abc import TaskGroup

from ..._pipeline.accounting.repetition_sets import trajectories
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import SendChannel
from ..._pipeline.durability.resumption import ResumePoint
from ..._pipeline.durability.run_changes import StageFacts
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.assignment import Assignment, Samplers
from ..._pipeline.graph.context import Context, Worker, current
from ..._pipeline.graph.schedule import UNBOUNDED, Schedule
from ..._pipeline.graph.stage_info import StageInfo, info_of, tokenizer_of
from ..._pipeline.util.exception_groups import unwrap_first
from ..._pipeline.util.user_code import await_user, open_user
from ..._schemas import GroupId, TrajectoryGroup
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.policies import Engine, FollowsWeights, Policy, RecordsRoutes, Seeded, Tokenizer
from ..contracts.prompts import identity_of
from ..contracts.rollouts import ROLLOUT_TIMEOUT_S
from ..contracts.sampling_params import SamplingParams
from ..tokenizers.chat_format import ChatFormat
from ..tokenizers.end_tokens import HasEndTokens
from .environments import Environment, TaskFn, open_tasks
from .evaluation import Evaluation
from .evaluator import Evaluator, OpenedPolicy
from .group_sampler import GroupSampler, RolloutParams
from .lag_limiter import LagLimiter
from .turn_sampling import TurnSampling

log = get_logger("penstock.source_env")

ALONE = Worker()

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SourceEnv:
    """Samples groups of trajectories from an environment until the prompts run out or the run ends."""

    make_env: Callable[[], Environment]
    """Makes an environment, of one of the five kinds in `environments`, in the sampling worker: a `PromptDataset`, an
    `AgentEnv`, an `EnvironmentMixture`, or a module-level function, so that the stage can be pickled."""
    policy: Policy
    """Samples the completions; `NoOpPolicy()` if the environment returns finished rollouts."""
    tokenizer: Tokenizer | None = None
    """Between the environment's text and the policy's tokens; by default that of `chat`, or of a data set's. An outside
    environment goes without."""
    chat: ChatFormat | None = None
    """Makes messages of the environment's text and converts them to tokens, so that prompts, and the tokens between
    turns, are those of the tokenizer's template. Without it text is encoded as it is."""
    group_size: int = 8
    """Rollouts of each prompt."""
    sampling: SamplingParams | tuple[SamplingParams, ...] = SamplingParams()  # noqa: RUF009 (a frozen value)
    """Parameters of every completion; or one for each turn, the last for all later turns too. Groups record the
    temperature in `meta`, so that a trainer computes log-probabilities at that of each turn."""
    max_length: int | None = None
    """Maximum length of a sequence, prompt and observations included; at that length it ends with LENGTH."""
    rollout_timeout_s: float = ROLLOUT_TIMEOUT_S
    """Bound on the time of one rollout with all its turns."""
    concurrency: int = 64
    """Rollouts at once, and so the number of requests that the policy can sample as one batch."""
    threads: int = 4
    """Blocking calls of the environment at once; 1 for one that is not thread-safe."""
    groups: int | None = None
    """Number of prompts in the stream, over all workers; None for an endless stream."""
    first_task: int = 0
    """Number of the first prompt."""
    trained: bytes = b""
    """Prompts that are skipped, one bit each, from number 0 on; `resume_from` marks those trained by an earlier run."""
    turn_rewards: bool = False
    """True if groups have `token_rewards` too: the reward of each turn, on its last token. `rewards` stay the sums, so
    AdvantageNormalizer must use one of the two (`rewards="token"`), not both."""
    seed: int = 0
    """Prompt i of a step-wise environment begins with `reset(seed=seed + i)`."""
    name: str = ""
    """The environment's name in every id; by default that of `make_env`."""
    evaluation: Evaluation | None = None
    """Prompts that the workers complete every few optimizer steps, without training on them."""

    def stage_info(self) -> StageInfo:
        """State the bounds on groups and trajectories, the prompts, tokenizers and columns."""
        return StageInfo(
            sends_at_most_tokens=None if self.max_length is None else self.group_size * self.max_length,
            assign=self.assign,
            groups_at_once=self.groups_at_once,
            tokenizers=tokenizer_of(self, self.chat, self.policy, self.make_env),
            evaluation=self.evaluation,
            fills_columns=self._fills,
        )

    @property
    def _fills(self) -> tuple[str, ...]:
        records = isinstance(self.policy, RecordsRoutes) and bool(self.policy.routed_experts)
        filled = {
            "behavior_logprobs": True,
            "token_rewards": self.turn_rewards,
            "routed_experts": records,
            "support_ids": TurnSampling(self.samplings).support > 0,
        }
        return tuple(name for name, fills in filled.items() if fills)

    async def assign(self, samplers: Samplers, worker: Worker = ALONE) -> AsyncIterator[Sequence[Assignment]]:
        """Admit prompts, each when the schedule of the pipeline allows it, and yield them; see `Assign`.

        In a synchronous schedule, a window has all prompts that may begin; the next one begins when all have arrived.
        """
        context = current()
        limiter, synchronous = LagLimiter(context, self.group_size, samplers), context.schedule.synchronous
        window: list[Assignment] = []
        for number in self.numbers(worker, synchronous=synchronous):
            if not window:
                if synchronous:
                    await samplers.hold_none()
                await limiter.wait_for_slot()
            group = GroupId(self.env_name, str(number))
            context.ledger.admit(group, range(self.group_size))
            window.append(Assignment(group, (1 << self.group_size) - 1))
            if not synchronous or limiter.full:
                yield window
                window = []
        if window:
            yield window

    def facts(self) -> StageFacts:
        """Return the identity of its prompts and evaluations as fixed; reads all their rows."""
        sets = {} if self.evaluation is None else self.evaluation.sets
        evaluated = {name: found for name, each in sets.items() if (found := identity_of(each)) is not None}
        fixed = {"name": self.env_name, "seed": self.seed, "first_task": self.first_task}
        options = {"group_size": self.group_size, "sampling": self.samplings}
        data = {} if (found := identity_of(self.make_env)) is None else {"data": found}
        return StageFacts(fixed={**fixed, **data, "evaluation": evaluated}, options=options)

    def resume_from(self, point: ResumePoint) -> SourceEnv:
        """Return the source of a resumed run: it samples the prompts that were not trained, also those begun before."""
        numbers = [instance_id for env, instance_id in point.committed if env == self.env_name]
        known = np.array([int(number) for number in numbers if number.isdecimal()], np.int64)
        trained = np.zeros(known.max(initial=-1) + 1, np.bool_)
        trained[known] = True
        return replace(self, trained=np.packbits(trained, bitorder="little").tobytes())

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidConfig: naming the field.
        """
        normalize_counts(self, "group_size", "max_length")
        normalize_counts(self, "concurrency", "threads")
        normalize_counts(self, "groups", "first_task", "seed", least=0)
        normalize_numbers(self, "rollout_timeout_s")
        self._check_sampling()
        if self.evaluation is not None and self.groups is not None:
            raise InvalidConfig(
                f"SourceEnv.evaluation: expected groups=None, because a source that has sent its last prompt evaluates "
                f"no later step, got groups={self.groups}: bound the run by SinkTrainer(max_steps=…)"
            )
        rewards = None if self.evaluation is None else self.evaluation.rewards
        if self.decodes_with is None and info_of(rewards).needs_tokenizer:
            raise InvalidConfig("SourceEnv.tokenizer: expected one, because the rewards of the evaluation read text")

    @property
    def decodes_with(self) -> Tokenizer | None:
        """Return the tokenizer between text and tokens, if there is one."""
        return next(iter(tokenizer_of(self, self.chat, self.make_env)), None)

    def _check_sampling(self) -> None:
        if not self.samplings or not all(isinstance(sampling, SamplingParams) for sampling in self.samplings):
            raise InvalidConfig(
                f"SourceEnv.sampling: expected SamplingParams or a tuple of them, got {self.sampling!r}"
            )

    @property
    def samplings(self) -> tuple[SamplingParams, ...]:
        """Return the parameters of each turn; the last are those of all later turns."""
        return self.sampling if isinstance(self.sampling, tuple) else (self.sampling,)

    @property
    def rollout_params(self) -> RolloutParams:
        """Return how the rollouts of a prompt are sampled, with the parameters that every engine obeys.

        1. The `end_ids` of the tokenizer end completions; an engine knows the `eos_id` of a tokenizer without them.
        2. The seed of the policy, if it has one, is that of sampling without a seed.
        """
        tokenizer, seed = self.decodes_with, self.policy.seed if isinstance(self.policy, Seeded) else None
        end_ids = tokenizer.end_ids if isinstance(tokenizer, HasEndTokens) else ()
        return RolloutParams(
            sampling=TurnSampling(self.samplings).requested(end_ids, seed),
            group_size=self.group_size,
            max_length=self.max_length,
            timeout_s=self.rollout_timeout_s,
            turn_rewards=self.turn_rewards,
        )

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Sample until the prompts run out, or until cancelled.

        Raises:
            InvalidPipeline: `make_env` returned no environment, or one that needs a tokenizer and has none.
            Exception: raised by `make_env`, the policy or the channel.
        """
        context = current()
        async with (
            open_tasks(self.make_env, self.decodes_with, self.chat, threads=self.threads, seed=self.seed) as begin,
            open_user(self.policy.open, context.worker) as engine,
        ):
            with context.watch_loop(self.rollout_timeout_s):
                await _RolloutScheduler(self, begin, engine, outbox, context).work()

    def evaluated(self, engine: Engine, make_env: Callable[[], Environment], prompts: int) -> SourceEnv:
        """Return the source of the completions of one set of `evaluation`."""
        assert self.evaluation is not None  # noqa: S101 (called for it)
        samples = self.evaluation.samples
        return replace(
            self,
            make_env=make_env,
            policy=OpenedPolicy(engine),
            group_size=samples,
            sampling=self.evaluation.sampling,
            concurrency=max(self.concurrency, samples),
            groups=prompts,
            first_task=0,
            trained=b"",
            turn_rewards=False,
            name="",
            evaluation=None,
        )

    @property
    def groups_at_once(self) -> int:
        """Return the number of groups that a worker samples at a time."""
        return max(1, self.concurrency // self.group_size)

    @property
    def env_name(self) -> str:
        """Return the environment's name in every id."""
        if self.name:
            return self.name
        made_by: Any = self.make_env.func if isinstance(self.make_env, partial) else self.make_env
        return str(getattr(made_by, "__name__", type(made_by).__name__))

    def numbers(self, worker: Worker, *, synchronous: bool = False) -> Iterable[int]:
        """Return the prompts of an evaluation that `worker` samples, every `worker.count`-th; in training all of them.

        In a synchronous schedule no trajectory is in flight when a step is done: an untrained prompt before the last
        trained one was dropped.
        """
        first = self.first_task + worker.index
        numbers: Iterable[int] = itertools.count(first, worker.count)
        if self.groups is not None:
            numbers = range(first, self.first_task + self.groups, worker.count)
        trained = np.unpackbits(np.frombuffer(self.trained, np.uint8), bitorder="little")[first :: worker.count]
        places = np.flatnonzero(trained)
        if synchronous:
            places = np.arange(places.max(initial=-1) + 1)
        skipped = set((first + worker.count * places).tolist())
        return (number for number in numbers if number not in skipped)


async def _all(calls: Sequence[Callable[[], Awaitable[R]]]) -> list[R]:
    """Run the calls concurrently and return their results in order."""
    returned: dict[int, R] = {}

    async def keep(place: int, call: Callable[[], Awaitable[R]]) -> None:
        returned[place] = await call()

    async with anyio.create_task_group() as tasks:
        for place, call in enumerate(calls):
            tasks.start_soon(await_user, keep, place, call)
    return [returned[place] for place in range(len(calls))]


class _RolloutScheduler:
    """The rollouts of one run of a SourceEnv; its own `Samplers` if no pipeline assigns its prompts."""

    def __init__(
        self, source: SourceEnv, begin: TaskFn, engine: Engine, outbox: SendChannel[TrajectoryGroup], context: Context
    ) -> None:
        self._source = source
        self._sampler = GroupSampler(
            source.rollout_params, begin, engine, context, anyio.CapacityLimiter(source.concurrency)
        )
        self._engine = engine
        self._outbox = outbox
        self._context = context
        self._permits = anyio.Semaphore(source.groups_at_once)
        """One for each group that is being sampled, or waits to be sent."""
        self.groups_held: int = 0
        """Groups that are being sampled."""
        self._evaluator: Evaluator | None = None
        if (evaluation := source.evaluation) is not None and context.worker.index < context.worker.count:
            schedule = UNBOUNDED
            if context.schedule.synchronous:  # so that its completions do not depend on a clock either
                schedule = Schedule(0, max(source.concurrency, evaluation.samples))
            make_source = partial(source.evaluated, engine)
            self._evaluator = Evaluator(
                evaluation,
                make_source,
                source.decodes_with,
                context=context,
                schedule=schedule,
                weights_arrived=self._weights_arrived,
            )

    async def hold_none(self) -> None:
        """Return: a window is sampled and sent before the next one is asked for."""

    async def work(self) -> None:
        with unwrap_first():
            if self._evaluator is not None:
                await self._evaluator.begin()
            async with anyio.create_task_group() as evaluations:
                if self._evaluator is not None:
                    evaluations.start_soon(await_user, self._evaluator.follow)
                if self._context.schedule.synchronous:
                    await self._sample_windows()
                else:
                    async with anyio.create_task_group() as groups:
                        await self._sample_prompts(groups)
                evaluations.cancel_scope.cancel()

    async def _windows(self) -> AsyncIterator[Sequence[Assignment]]:
        """Yield the prompts to sample, those of a window together, once the weights are here that they need."""
        context = self._context
        if context.assignments is None:
            async for window in self._source.assign(self, context.worker):
                await self._expect_weights()
                yield window
        else:
            synchronous = context.schedule.synchronous
            while window := await context.assignments.next(1 if synchronous else 1 + self._permits.value):
                await self._expect_weights()
                yield window

    async def _expect_weights(self) -> None:
        """Wait for the published weights if lag is bounded: with older ones a group would exceed its bound."""
        if self._context.schedule.max_lag is not None:
            await self._weights_arrived()

    async def _weights_arrived(self) -> None:
        """Wait until the published weights are on this host."""
        version = self._context.ledger.published
        if version is not None and isinstance(self._engine, FollowsWeights):
            await await_user(self._engine.arrived, version)

    # -- one prompt after another --------------------------------------------------------------------------------------

    async def _sample_prompts(self, groups: TaskGroup) -> None:
        """Begin one prompt after another, each when there is a permit for its group."""
        await self._permits.acquire()
        async for window in self._windows():
            for prompt in window:
                groups.start_soon(await_user, self._sample, prompt)
                await self._permits.acquire()

    async def _sample(self, prompt: Assignment) -> None:
        """Sample a group and send it, holding its permit until it is sent."""
        try:
            self.groups_held += 1
            try:
                began, ids = anyio.current_time(), trajectories(*prompt)
                number = int(prompt.group.instance_id)
                rollouts = await self._sampler.rolled_out(ids, await self._sampler.begun(ids, number))
            finally:
                self.groups_held -= 1
            if rollouts:
                await self._outbox.send(self._sampler.sampled(prompt.group, number, rollouts, began))
        finally:
            self._permits.release()

    # -- a synchronous schedule ----------------------------------------------------------------------------------------

    async def _sample_windows(self) -> None:
        """Sample one window after another: begin all of its prompts, then all of its rollouts, and send in order."""
        async for window in self._windows():
            if self._evaluator is not None:
                await self._evaluator.catch_up()
            began = anyio.current_time()
            ids = [trajectories(*prompt) for prompt in window]
            numbers = [int(prompt.group.instance_id) for prompt in window]
            begun = await _all([partial(self._sampler.begun, *each) for each in zip(ids, numbers, strict=True)])
            rolled_out = await _all([partial(self._sampler.rolled_out, *each) for each in zip(ids, begun, strict=True)])
            for prompt, number, rollouts in zip(window, numbers, rolled_out, strict=True):
                if rollouts:
                    await self._outbox.send(self._sampler.sampled(prompt.group, number, rollouts, began))
