"""Do one rollout of an environment before a run, with a made-up model: an error in it is found in a second.

The model answers each call with one of the completions that `reward_trial` makes up, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig, PenstockError
from ..._pipeline.graph.context import Context, entered
from ..._pipeline.util.raised_places import located_text, name_and_place
from ..._schemas import StopReason
from ..contracts.policies import Completion, Tokenizer
from ..contracts.rollouts import RolloutResult, tokens_of
from ..contracts.sampling_params import SamplingParams
from ..rewards.reward_trial import COMPLETIONS
from .driving_environments import CALLING
from .environment_calls import EnvironmentFailed
from .environment_mixture import EnvironmentMixture
from .environments import Environment, PromptRejected, checked, open_tasks
from .group_sampler import RolloutParams
from .rollout_columns import sampled_anything
from .source_env import SourceEnv


@dataclass(frozen=True, slots=True)
class TriedRollout:
    """A rollout with the made-up model."""

    environment: str
    """Its name; empty for the only one."""
    result: RolloutResult

    def described(self, tokenizer: Tokenizer) -> str:
        """Return a few lines, with the first sequence as text."""
        sequences = self.result.sequences
        calls, tokens = sum(each.completions for each in sequences), map(tokens_of, self.result.turns)
        reward = f"reward {self.result.reward:g}" if self.result.scored else "no reward of its own"
        of = f" of {self.environment}" if self.environment else ""
        return (
            f"one rollout{of} with a made-up model: {calls} calls in {len(sequences)} sequences, {reward}; the first "
            f"sequence:\n"
            f"{tokenizer.decode(np.concatenate(list(tokens)).tolist())}"
        )


@dataclass(slots=True)
class _MadeUp:
    """A `RolloutSampler` without a model."""

    rollout: RolloutParams
    tokenizer: Tokenizer
    deadline_s: float = math.inf
    """See `RolloutSampler.deadline_s`."""
    _calls: int = field(default=0)

    @property
    def most_tokens(self) -> int | None:
        """See `RolloutSampler.most_tokens`."""
        return self.rollout.most_tokens

    def params(self, turn: int) -> SamplingParams:
        """See `RolloutSampler.params`."""
        return self.rollout.sampling.at(turn)

    async def sample(self, prompt: NDArray[np.int32], params: SamplingParams) -> Completion | None:
        """See `RolloutSampler.sample`."""
        longest = math.inf if self.rollout.max_length is None else self.rollout.max_length
        if (left := min(longest - len(prompt), params.max_completion_tokens)) < 1:
            return None
        said = [*self.tokenizer.encode(COMPLETIONS[self._calls % len(COMPLETIONS)]), self.tokenizer.eos_id]
        self._calls += 1
        cut = said[: int(left)]
        return Completion(
            tokens=np.array(cut, np.int32),
            logprobs=np.zeros(len(cut), np.float32),
            stop_reason=StopReason.STOP if len(cut) == len(said) else StopReason.LENGTH,
            policy_versions=np.zeros(len(cut), np.int64),
        )


async def try_environments(source: SourceEnv) -> list[TriedRollout]:
    """Do the first rollout of the environment of `source`, or of each of a mixture.

    Raises:
        InvalidConfig: it failed, or none can begin.
        MissingExtra: an agent needs one.
    """
    made: Callable[[], Environment] = source.make_env
    environments = {"": made}
    if isinstance(made, EnvironmentMixture):
        environments = {name: make_env for name, (make_env, _) in made.environments.items()}
    return [TriedRollout(name, await _tried(source, name, make_env)) for name, make_env in environments.items()]


async def _tried(source: SourceEnv, name: str, make_env: Callable[[], Any]) -> RolloutResult:
    where = f"environment.{name}" if name else "environment"
    expected = f"config: {where}: expected a rollout with a made-up model"
    tokenizer = source.decodes_with
    assert tokenizer is not None  # noqa: S101 (a configuration has one)
    try:
        with entered(Context(tokenizer=tokenizer)), anyio.fail_after(source.rollout_timeout_s) as scope:
            sampler = _MadeUp(source.rollout_params, tokenizer, scope.deadline)
            async with open_tasks(make_env, tokenizer, source.chat, threads=source.threads, seed=source.seed) as begin:
                result = checked(await (await begin(0))(0, sampler))
    except PromptRejected as error:
        raise InvalidConfig(f"{expected}, got a first prompt that is rejected: {error}") from None
    except TimeoutError:
        raise InvalidConfig(f"{expected}, got none within {source.rollout_timeout_s:g} s") from None
    except EnvironmentFailed as error:
        cause = error.__cause__
        raised = str(error) if cause is None else await anyio.to_thread.run_sync(located_text, cause)
        raise InvalidConfig(f"{expected}, got {raised}") from error
    except PenstockError:
        raise
    except Exception as error:
        raise InvalidConfig(f"{expected}, got {await anyio.to_thread.run_sync(located_text, error)}") from error
    if not sampled_anything(result):
        silent = await anyio.to_thread.run_sync(_silent, make_env)
        raise InvalidConfig(f"{expected}, got one without a call of the model{silent}")
    return result


def _silent(make_env: Callable[[], Any]) -> str:
    """Return the agent that calls no model, with its place and what to do; empty if it is of another kind."""
    agent = getattr(make_env, "agent", None) or getattr(make_env, "drive", None)
    if agent is None:
        return ""
    named = getattr(agent, "command", None) or name_and_place(agent)
    return f" by {named}: {CALLING}"
