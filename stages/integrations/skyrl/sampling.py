"""`SampleRequests`: the stage that samples SkyRL's prompts, in the trainer's process or in workers of its own.

It samples as `SourceEnv` does, by the fields of one; SkyRL chooses prompts, repetitions and parameters. Knows no SkyRL:
a request is a group of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from ...._pipeline.channels.channel import ReceiveChannel, SendChannel
from ...._pipeline.errors import InvalidConfig
from ...._pipeline.graph.context import Context, current
from ...._pipeline.graph.stage_info import StageInfo
from ...._pipeline.util.exception_groups import unwrap_first
from ...._schemas import TrajectoryGroup
from ...._schemas.conversion import convert
from ...contracts.policies import Engine
from ...contracts.prompts import Prompt
from ...contracts.sampling_params import SamplingParams
from ...sampling.environments import Environment, TaskFn, open_tasks
from ...sampling.group_sampler import GroupSampler
from ...sampling.source_env import SourceEnv
from .requests import INSTANCE_ID, SAMPLING

OF_A_SOURCE = {
    "groups": None,
    "first_task": 0,
    "evaluation": None,
}
"""The fields of a SourceEnv that select prompts, with their defaults."""


class SkyRLPrompts:
    """The prompts of SkyRL's own data set, as the `make_env` of the `SourceEnv` in a `SampleRequests`.

    Rewards come from a later stage. It finds the columns of the data set in `meta["row"]`.
    """

    def __init__(self) -> None:
        self._asked: dict[int, Prompt] = {}

    def asked(self, number: int, prompt: Prompt) -> None:
        """Note the prompt of a request."""
        self._asked[number] = prompt

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a request by its number, once."""
        return self._asked.pop(number)


@dataclass(frozen=True, slots=True)
class SampleRequests:
    """Samples SkyRL's prompts; see `PenstockGenerator`."""

    env: SourceEnv
    """Describes the environment, the policy and their bounds. `make_env=SkyRLPrompts` for the prompts of SkyRL's data
    set; with any other environment row n of the data set stands for prompt n of that. `sampling`, but for a seed, and
    `group_size` are SkyRL's."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidConfig: one of `env` selects prompts.
        """
        for name, default in OF_A_SOURCE.items():
            if (value := getattr(self.env, name)) != default:
                raise InvalidConfig(
                    f"SampleRequests.env: expected SourceEnv.{name} to be {default}, because SkyRL says what is "
                    f"sampled, got {value}"
                )

    def stage_info(self) -> StageInfo:
        """State the tokenizers."""
        return StageInfo(tokenizers=self.env.stage_info().tokenizers)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Sample every request, and send the rollouts that succeed; see `Stage`.

        Raises:
            InvalidPipeline: `make_env` returned no environment, or one that needs a tokenizer and has none.
            Exception: raised by `make_env`, the policy or the channel.
        """
        env, context = self.env, current()
        prompts = SkyRLPrompts() if env.make_env is SkyRLPrompts else None
        make_env: Callable[[], Environment] = env.make_env if prompts is None else lambda: prompts
        async with (
            open_tasks(make_env, env.decodes_with, env.chat, threads=env.threads, seed=env.seed) as begin,
            env.policy.open(context.worker) as engine,
        ):
            sampling = _Sampling(env, begin, engine, context, prompts)
            with unwrap_first():
                async with anyio.create_task_group() as groups:
                    async for request in inbox:
                        groups.start_soon(sampling.answer, request.owned(), outbox)


@dataclass(slots=True, eq=False)
class _Sampling:
    """The rollouts of one run of the stage."""

    env: SourceEnv
    begin: TaskFn
    engine: Engine
    context: Context
    prompts: SkyRLPrompts | None
    limiter: anyio.CapacityLimiter = field(init=False)
    samplers: dict[SamplingParams, GroupSampler] = field(default_factory=dict)
    """One for each set of parameters: SkyRL trains with one, and evaluates with another."""

    def __post_init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(self.env.concurrency)

    async def answer(self, request: TrajectoryGroup, outbox: SendChannel[TrajectoryGroup]) -> None:
        sampler, began = self._sampler(request), anyio.current_time()
        number = self._number(request)
        rollouts = await sampler.rolled_out(request.ids, await sampler.begun(request.ids, number))
        if rollouts:
            await outbox.send(sampler.sampled(request.id, number, rollouts, began))

    def _sampler(self, request: TrajectoryGroup) -> GroupSampler:
        sampling = convert(request.meta[SAMPLING], SamplingParams).seeded_by(self.env.samplings[0].seed)
        if sampling not in self.samplers:
            params = replace(self.env, sampling=sampling).rollout_params
            self.samplers[sampling] = GroupSampler(params, self.begin, self.engine, self.context, self.limiter)
        return self.samplers[sampling]

    def _number(self, request: TrajectoryGroup) -> int:
        """Return the number of the request's prompt in the environment."""
        if self.prompts is None:
            return _row(request.meta[INSTANCE_ID])
        number = int(request.instance_id)
        meta = {name: value for name, value in request.meta.items() if name not in {SAMPLING, INSTANCE_ID}}
        self.prompts.asked(number, Prompt(content=request[0].tokens.tolist(), meta=meta))
        return number


def _row(instance_id: Any) -> int:
    if not str(instance_id).isdecimal():
        raise InvalidConfig(
            f"SampleRequests.env: expected rows of SkyRL's data set with a number as uid, because the environment has "
            f"prompts of its own, got {instance_id!r}"
        )
    return int(instance_id)
