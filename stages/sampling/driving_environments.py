"""The rollouts of a driving environment: `drive` is called for each, with a client that records its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ..._pipeline.errors import InvalidPipeline
from ..._pipeline.graph.context import current
from ..._pipeline.util.user_code import await_user, call_user
from ..agents.agent_client import DrivingEnvironment, Outcome
from ..agents.agent_rollout import AgentRollout, TokensUnaccounted
from ..contracts.rollouts import RolloutResult, RolloutSampler
from .environment_calls import EnvironmentFailed, RolloutFiltered, failed


class DrivingTasks:
    """The prompts of a driving environment."""

    def __init__(self, env: DrivingEnvironment) -> None:
        """Drive `env`.

        Raises:
            InvalidPipeline: its `drive` is no coroutine function.
        """
        if not inspect.iscoroutinefunction(env.drive):
            raise InvalidPipeline(
                f"{type(env).__name__}.drive: expected `async def`, because rollouts are concurrent, got a function "
                f"that blocks: call what blocks by anyio.to_thread.run_sync"
            )
        self._env = env

    async def begin(self, number: int) -> Callable[[int, RolloutSampler], Coroutine[Any, Any, RolloutResult]]:
        """Begin a prompt; see `TaskFn`."""
        return partial(self._rollout, number)

    async def _rollout(self, number: int, repetition: int, sampler: RolloutSampler) -> RolloutResult:
        rollout, state = AgentRollout(sampler, repetition), "cancelled"
        try:
            result = await self._driven(number, rollout)
            state = ""
        except EnvironmentFailed as error:
            state = "filtered" if isinstance(error.__cause__, RolloutFiltered) else "failed"
            raise
        finally:
            rollout.end()
            if state and rollout.sampled_tokens:
                current().metrics.total(f"rollout/dropped_tokens/{state}", rollout.sampled_tokens)
        return result

    async def _driven(self, number: int, rollout: AgentRollout) -> RolloutResult:
        outcome: Any = None
        try:
            with rollout.scope:
                outcome = await await_user(self._env.drive, number, rollout)
            if rollout.failure is None:
                if isinstance(outcome, Outcome) and outcome.drop:
                    raise RolloutFiltered(outcome.drop)  # noqa: TRY301 (as a raised one)
                return call_user(rollout.result, outcome)
        except TokensUnaccounted:
            raise
        except Exception as error:
            if rollout.failure is None:
                raise failed(error) from error
        assert rollout.failure is not None  # noqa: S101 (else it has returned or raised)
        raise rollout.failure
