"""The main module of a process that does rollouts of an environment with a made-up model; see `environment_trial`.

The model answers each call with one of the completions that `reward_trial` makes up, one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import PenstockError
from ..._pipeline.graph.context import Context, entered
from ..._pipeline.util.raised_places import located_text, name_and_place
from ..._pipeline.workers.reply_loop import reply_to
from ..._pipeline.workers.worker import load_payload
from ..._schemas import StopReason
from ..._schemas.conversion import decode_json
from ..agents.agent_env import AgentEnv
from ..contracts.policies import Completion, Tokenizer
from ..contracts.rollouts import RolloutResult, tokens_of
from ..contracts.sampling_params import SamplingParams
from ..data.mixture import Mixture
from ..data.prompt_dataset import PromptDataset
from ..rewards.reward_trial import COMPLETIONS
from .driving_environments import CALLING
from .environment_calls import EnvironmentFailed
from .environment_mixture import EnvironmentMixture
from .environments import Environment, PromptRejected, checked, open_tasks
from .evaluator import length_of
from .group_sampler import RolloutParams
from .rollout_columns import sampled_anything
from .source_env import SourceEnv

EVALUATED = "evaluation"
"""First part of the keys of environments that are only evaluated."""


class TrialReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a request: to load the source, or to do a rollout."""

    rollout: str = ""
    """The rollout as text."""
    got: str = ""
    """What came in place of a rollout; empty if there was none."""
    error: str = ""
    """The message of an error of penstock's that was raised instead."""
    error_type: str = ""
    """The name of its class in `penstock.errors`."""


def main(parent: str) -> None:
    """Answer requests until `parent`, the process that started this one, closes the pipe."""
    reply_to(parent, lambda: None, _Trial().reply)


class _Trial:
    """The requests: first the path of a pickled `SourceEnv`, then keys of `environments_of` it."""

    def __init__(self) -> None:
        self._source: SourceEnv | None = None

    def reply(self, line: bytes) -> TrialReply:
        """Answer a request."""
        try:
            (asked,) = decode_json(line, tuple[str])
            if self._source is None:
                self._source = load_payload(os.open(asked, os.O_RDONLY))
                return TrialReply()
            return _tried(self._source, asked)
        except PromptRejected as error:
            return TrialReply(got=f"a first prompt that is rejected: {error}")
        except EnvironmentFailed as error:
            return TrialReply(got=str(error) if error.__cause__ is None else located_text(error.__cause__))
        except PenstockError as error:
            return TrialReply(error=str(error), error_type=type(error).__name__)
        except Exception as error:  # noqa: BLE001 (raised in the parent)
            return TrialReply(got=located_text(error))


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


def environments_of(source: SourceEnv) -> dict[str, Callable[[], Any]]:
    """Return what makes each environment of a source, by its key, but prompts alone and the rows of an evaluation."""
    trained: Any = source.make_env
    found: dict[str, Callable[[], Any]] = (
        {} if isinstance(trained, PromptDataset | Mixture) else {"environment": trained}
    )
    if isinstance(trained, EnvironmentMixture):
        found = {f"environment.{name}": make_env for name, (make_env, _) in trained.environments.items()}
    sets = {} if source.evaluation is None else source.evaluation.sets
    return found | {
        f"{EVALUATED}.{name}": make_env
        for name, make_env in sets.items()
        if not isinstance(make_env, PromptDataset | AgentEnv)
    }


def _tried(source: SourceEnv, key: str) -> TrialReply:
    """Do the first rollout of an environment."""
    make_env, tokenizer = environments_of(source)[key], source.decodes_with
    assert tokenizer is not None  # noqa: S101 (a configuration has one)
    section, _, name = key.partition(".")
    if section == EVALUATED:
        length_of(name, make_env)
    try:
        result = anyio.run(_rollout, source, make_env, tokenizer)
    except TimeoutError:
        return TrialReply(got=f"none within {source.rollout_timeout_s:g} s")
    if not sampled_anything(result):
        return TrialReply(got=f"one without a call of the model{_silent(make_env)}")
    return TrialReply(rollout=_described(result, key, tokenizer))


async def _rollout(source: SourceEnv, make_env: Callable[[], Environment], tokenizer: Tokenizer) -> RolloutResult:
    with entered(Context(tokenizer=tokenizer)), anyio.fail_after(source.rollout_timeout_s) as scope:
        sampler = _MadeUp(source.rollout_params, tokenizer, scope.deadline)
        async with open_tasks(make_env, tokenizer, source.chat, threads=source.threads, seed=source.seed) as begin:
            return checked(await (await begin(0))(0, sampler))


def _described(result: RolloutResult, key: str, tokenizer: Tokenizer) -> str:
    """Return a few lines, with the first sequence as text."""
    sequences = result.sequences
    calls, tokens = sum(each.completions for each in sequences), map(tokens_of, result.turns)
    reward = f"reward {result.reward:g}" if result.scored else "no reward of its own"
    of = "" if key == "environment" else f" of {key.removeprefix('environment.')}"
    return (
        f"one rollout{of} with a made-up model: {calls} calls in {len(sequences)} sequences, {reward}; the first "
        f"sequence:\n"
        f"{tokenizer.decode(np.concatenate(list(tokens)).tolist())}"
    )


def _silent(make_env: Callable[[], Any]) -> str:
    """Return the agent that calls no model, with its place and what to do; empty if it is of another kind."""
    agent = getattr(make_env, "agent", None) or getattr(make_env, "drive", None)
    if agent is None:
        return ""
    named = getattr(agent, "command", None) or name_and_place(agent)
    return f" by {named}: {CALLING}"
