"""`ShapedEnvManager`: ROLL's own `TrajEnvManager`, with environments of penstock and its reward bridge.

ROLL imports `custom_envs.<tag>.env_manager_cls`, and calls it for each environment. The call registers
`env_type: penstock` with gem, in the process that makes the environments.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ...._pipeline.errors import InvalidConfig
from ...rewards.reward_bridge import RewardBridge
from ...tokenizers.pretrained_tokenizer import PretrainedTokenizer, end_texts_of
from .gem_environment import GemEnvironment, register
from .plain import plain
from .shaping import shape


def ShapedEnvManager(**arguments: Any) -> Any:  # noqa: N802 (named where ROLL names a class)
    """Return ROLL's `TrajEnvManager`: ROLL samples with it as always. Called by ROLL.

    custom_envs:
      sums:
        env_type: penstock
        env_manager_cls: penstock.integrations.roll.ShapedEnvManager
        env_config: {env: "my_run:Sums"}
        reward: {length_bounty: {reward: -0.01, cap: 0.5}, clip: [-1, 1]}

    Args:
        arguments: those of ROLL's.

    Raises:
        InvalidConfig: `reward` does not fit, or `atropos` is there.
    """
    if arguments["env_config"].get("atropos") is not None:
        raise InvalidConfig(
            f"custom_envs.{arguments['env_config'].get('tag')}.env_manager_cls: expected "
            f"penstock.integrations.roll.FlowEnvManager with atropos, because Atropos scores whole groups, got "
            f"ShapedEnvManager"
        )
    register()
    return _shaped_class()(**arguments)


@cache
def _shaped_class() -> Any:
    base: Any = import_module("roll.pipeline.agentic.env_manager.traj_env_manager").TrajEnvManager

    class Shaped(base):  # type: ignore[misc]
        """ROLL's env manager; shapes an episode before ROLL makes a rollout of it."""

        def __init__(self, *, worker_config: Any, tokenizer: Any, env_config: Any, **others: Any) -> None:
            super().__init__(worker_config=worker_config, tokenizer=tokenizer, env_config=env_config, **others)
            if isinstance(self.env, GemEnvironment):
                self.env.ends = (*end_texts_of(tokenizer), tokenizer.pad_token)
            self._bridge: RewardBridge | None = None
            if (reward := env_config.get("reward")) is not None:
                self._bridge = RewardBridge.from_config(plain(reward))
                self._read = PretrainedTokenizer(worker_config.model_args.model_name_or_path)

        def formulate_rollouts(self, rollout_cache: Any) -> Any:
            if self._bridge is not None:
                shape(rollout_cache.history, rollout_cache.tag, self._bridge, self._read)
            return super().formulate_rollouts(rollout_cache)

    return Shaped
