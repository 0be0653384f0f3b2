"""`GemEnvironment`: an environment of penstock with the methods of gem, for `env_type: penstock` of ROLL.

ROLL resets an environment with a seed that is equal in a group, and different for each of its episodes. It numbers the
prompts of a data set.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.util.named_objects import import_object
from ...contracts.prompts import PromptSource
from ...sampling.environments import ScoredDataset, StepEnvironment

ENV_TYPE = "penstock"

META = "penstock_meta"
"""The key of ROLL's history with the facts about the prompt."""


class GemEnvironment:
    """A scored data set, prompts, or a step-wise environment. Text in, text out; one thread calls it."""

    def __init__(self, env: str, **options: Any) -> None:
        """Make the environment.

        Args:
            env: `module:name` of its class, or of a function that makes it.
            options: passed on.

        Raises:
            InvalidConfig: `env` does not exist.
            InvalidPipeline: it made no such environment.
            Exception: raised by it.
        """
        self._env = import_object(env, "custom_envs.<tag>.env_config.env")(**options)
        if not isinstance(self._env, ScoredDataset | PromptSource | StepEnvironment):
            raise InvalidPipeline(
                f"{env}: expected an environment with len, [] and score_answer (a scored data set), with prompt "
                f"(prompts), or with reset and step (step-wise), got {type(self._env).__name__}"
            )
        self._entry: Any = None
        self.ends: tuple[str, ...] = ()
        """Text of tokens that end a completion: ROLL leaves them in it."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return (observation, info).

        Raises:
            InvalidPipeline: a prompt consists of tokens: ROLL encodes text.
        """
        if isinstance(self._env, ScoredDataset):
            self._entry = self._env[(seed or 0) % len(self._env)]
            return self._entry["question"], {META: {}}
        if isinstance(self._env, PromptSource):
            prompt = self._env.prompt(seed or 0)
            if not isinstance(prompt.content, str):
                raise InvalidPipeline("ROLL: expected prompts of text, got tokens: ROLL's env manager encodes them")
            return prompt.content, {META: dict(prompt.meta)}
        observation, info = self._env.reset(seed=seed)
        return observation, {**info, META: {}}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do `action`; return (observation, reward, terminated, truncated, info)."""
        for end in self.ends:
            action = action.removesuffix(end)
        if isinstance(self._env, ScoredDataset):
            return "", float(self._env.score_answer(action, self._entry)), True, False, {}
        if isinstance(self._env, PromptSource):
            return "", 0.0, True, False, {}
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), bool(terminated), bool(truncated), dict(info)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def register() -> None:
    """Let gem make `GemEnvironment`s, under the name "penstock"."""
    gem = import_module("gem.envs.registration")
    if ENV_TYPE not in gem.ENV_REGISTRY:
        gem.register(ENV_TYPE, entry_point=GemEnvironment)
