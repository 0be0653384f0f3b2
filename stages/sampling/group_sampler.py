"""`GroupSampler`: the rollouts of one prompt, from its beginning to the group of those that succeed.

A rollout whose environment raises, or takes too long, is counted failed, with the reason, and its group goes on
smaller; an error of the policy is raised. Knows no channel, and chooses no prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.end_states import EndState
from ..._pipeline.accounting.epoch import Epoch
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.graph.context import Context, drop
from ..._pipeline.util.repeated_errors import RepeatedErrors
from ..._pipeline.util.user_code import await_user
from ..._schemas import GroupId, StopReason, TrajectoryGroup, TrajectoryId
from ..contracts.group_stack import AGENTS
from ..contracts.policies import Completion, Engine
from ..contracts.rollouts import BRANCHES, RolloutFiltered, RolloutResult, tokens_of
from ..contracts.sampling_params import SamplingParams
from .environment_calls import EnvironmentFailed
from .environments import PromptRejected, RolloutFn, TaskFn, checked
from .rollout_columns import columns_of, sampled_anything
from .turn_sampling import TurnSampling

log = get_logger("penstock.source_env")


class _NothingSampled(Exception):
    """A rollout without a token of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParams:
    """The rollouts of a prompt; see the fields of `SourceEnv`."""

    sampling: TurnSampling
    group_size: int
    max_length: int | None
    timeout_s: float
    turn_rewards: bool

    @property
    def most_tokens(self) -> int | None:
        """Return the bound on the tokens of all sequences of a rollout; None for none."""
        return None if self.max_length is None else BRANCHES * self.max_length


@dataclass(frozen=True, slots=True)
class _RolloutSampler:
    """A `RolloutSampler`, of one trajectory."""

    _rollout: RolloutParams
    _engine: Engine
    _trajectory: TrajectoryId
    deadline_s: float
    """See `RolloutSampler.deadline_s`."""

    @property
    def most_tokens(self) -> int | None:
        """See `RolloutSampler.most_tokens`."""
        return self._rollout.most_tokens

    def params(self, turn: int) -> SamplingParams:
        """See `RolloutSampler.params`."""
        trajectory, sampling = self._trajectory, self._rollout.sampling.at(turn)
        return sampling.seeded_for(int(trajectory.instance_id), trajectory.repetition_id, turn)

    async def sample(self, prompt: NDArray[np.int32], params: SamplingParams) -> Completion | None:
        """See `RolloutSampler.sample`."""
        if self._rollout.max_length is not None:
            allowance = self._rollout.max_length - len(prompt)
            if allowance < 1:
                return None
            params = params.bounded(allowance)
        (completion,) = await await_user(self._engine.generate, [prompt], params)
        return completion


class GroupSampler:
    """Samples the prompts of one run of a source."""

    def __init__(
        self, params: RolloutParams, begin: TaskFn, engine: Engine, context: Context, limiter: anyio.CapacityLimiter
    ) -> None:
        """Sample by `params`; `limiter` bounds the rollouts at once."""
        self._params = params
        self._begin_task = begin
        self._engine = engine
        self._context = context
        self._rollouts = limiter
        self._dropped = RepeatedErrors(log, "rollout_dropped")

    async def rolled_out(self, ids: Sequence[TrajectoryId], rollout: RolloutFn | None) -> dict[int, RolloutResult]:
        """Return the rollouts of one prompt that succeed, by repetition; {} without `rollout`."""
        rollouts: dict[int, RolloutResult] = {}
        if rollout is not None:
            async with anyio.create_task_group() as repetitions:
                for trajectory in ids:
                    repetitions.start_soon(await_user, self._attempt, rollout, trajectory, rollouts)
        return dict(sorted(rollouts.items()))

    def sampled(self, group: GroupId, number: int, rollouts: dict[int, RolloutResult], began: float) -> TrajectoryGroup:
        """Return the group of the rollouts that succeeded, and record its metrics."""
        self._context.metrics.mean("timing_s/rollout", anyio.current_time() - began)
        sampled = self._assembled(group, number, rollouts)
        self._observe(sampled, rollouts.values())
        return sampled

    async def begun(self, ids: Sequence[TrajectoryId], number: int) -> RolloutFn | None:
        """Begin prompt `number`, and return the function of its rollouts; None if the prompt has ended."""
        with anyio.move_on_after(self._params.timeout_s):
            try:
                return await self._begin_task(number)
            except EnvironmentFailed as error:
                self._drop(ids, "failed", error)
                return None
            except PromptRejected as error:
                self._context.ledger.epoch = Epoch(error.epoch * self._params.group_size, none_fits=error.none_fits)
                drop(ids, "rejected", str(error))  # not logged: it is the user's own bound
                return None
        self._drop(ids, "failed", self._timed_out)
        return None

    async def _attempt(self, rollout: RolloutFn, trajectory: TrajectoryId, rollouts: dict[int, RolloutResult]) -> None:
        """Do one rollout; put it into `rollouts` if it succeeds, drop it otherwise."""
        async with self._rollouts:
            with anyio.move_on_after(self._params.timeout_s) as timeout:
                try:
                    sampler = _RolloutSampler(self._params, self._engine, trajectory, timeout.deadline)
                    rollouts[trajectory.repetition_id] = checked(await rollout(trajectory.repetition_id, sampler))
                except EnvironmentFailed as error:
                    left_out = isinstance(error.__cause__, RolloutFiltered)
                    self._drop([trajectory], "filtered" if left_out else "failed", error)
        if timeout.cancelled_caught:
            self._drop([trajectory], "failed", self._timed_out)
        elif trajectory.repetition_id in rollouts and not sampled_anything(rollouts[trajectory.repetition_id]):
            del rollouts[trajectory.repetition_id]
            self._drop([trajectory], "rejected", _NothingSampled("nothing was sampled"))
        elif trajectory.repetition_id in rollouts:
            self._context.ledger.succeed()

    @property
    def _timed_out(self) -> TimeoutError:
        return TimeoutError(f"rollout took longer than {self._params.timeout_s:g} s")

    def _drop(self, ids: Sequence[TrajectoryId], state: EndState, why: Exception) -> None:
        drop(ids, state, str(why))
        self._dropped.record(
            why.__cause__ or why,
            env=ids[0].env,
            instance_id=ids[0].instance_id,
            rollouts=len(ids),
            state=state,
            reason=str(why),
        )

    # -- records -------------------------------------------------------------------------------------------------------

    def _assembled(self, group: GroupId, number: int, rollouts: dict[int, RolloutResult]) -> TrajectoryGroup:
        """Return the group of the rollouts that succeeded, by repetition."""
        sequences = [sequence for rollout in rollouts.values() for sequence in rollout.sequences]
        counts = [len(rollout.sequences) for rollout in rollouts.values()]
        parts = {name for rollout in rollouts.values() for name in rollout.parts}
        return TrajectoryGroup.build(
            env=group.env,
            instance_id=group.instance_id,
            rewards=np.repeat(np.array([rollout.reward for rollout in rollouts.values()], np.float64), counts),
            reward_parts={
                name: np.repeat([rollout.parts.get(name, 0.0) for rollout in rollouts.values()], counts)
                for name in sorted(parts)
            },
            stop_reasons=np.array([int(sequence.stop_reason) for sequence in sequences], np.uint8),
            rollout_ids=np.repeat(np.array(list(rollouts), np.int64), counts),
            meta={
                **next(iter(rollouts.values())).meta,
                "task": number,
                **self._params.sampling.recorded(rollouts),
                **_agents(rollouts),
            },
            **columns_of(sequences, turn_rewards=self._params.turn_rewards, support=self._params.sampling.support),
        )

    def _observe(self, group: TrajectoryGroup, rollouts: Collection[RolloutResult]) -> None:
        metrics = self._context.metrics
        completion_lengths = group.completion_lengths()
        metrics.total("rollout/trajectories", len(rollouts))
        if all(rollout.scored for rollout in rollouts):
            metrics.mean("rollout/reward", group.rewards)
        metrics.mean("rollout/response_length", np.add.reduceat(completion_lengths, group.rollout_starts()))
        metrics.mean("rollout/prompt_length", [len(tokens_of(rollout.turns[0])) for rollout in rollouts])
        metrics.mean("rollout/turns", [sum(each.completions for each in rollout.sequences) for rollout in rollouts])
        metrics.mean("rollout/branches", [len(rollout.sequences) for rollout in rollouts])
        metrics.mean("rollout/cut_ratio", group.stop_reasons[group.rollout_ends()] == StopReason.LENGTH)
        for rollout in rollouts:
            for name, value in rollout.metrics.items():
                metrics.mean(f"env/{name}", value)


def _agents(rollouts: Mapping[int, RolloutResult]) -> dict[str, list[list[int] | None]]:
    """Return the fact for `meta` of a group: the agent of each sequence, by repetition; none if there is one agent."""
    if not any(sequence.agent for rollout in rollouts.values() for sequence in rollout.sequences):
        return {}
    agents: list[list[int] | None] = [None] * (max(rollouts) + 1)
    for repetition, rollout in rollouts.items():
        agents[repetition] = [sequence.agent for sequence in rollout.sequences]
    return {AGENTS: agents}
