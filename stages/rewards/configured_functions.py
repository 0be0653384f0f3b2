"""The components of a reward that a configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.named_objects import import_object
from .foreign_functions import trl_reward, verl_reward
from .reward_functions import RewardComponent, RewardFunction
from .reward_shaping import FunctionConfig, RewardConfig

OPTIONS = ("name", "weight", "concurrency", "reward_timeout_s", "on_failure")

KINDS: dict[str, Any] = {"trl": trl_reward, "verl": verl_reward, "completion": RewardFunction}


def configured_functions(config: RewardConfig) -> tuple[RewardComponent, ...]:
    """Return the components that `config.functions` names.

    Raises:
        InvalidConfig: a name leads to no function, or an option does not fit; the message begins with its path.
    """
    return tuple(_configured(each, f"reward.functions[{index}]") for index, each in enumerate(config.functions))


def _configured(config: FunctionConfig, root: str) -> RewardComponent:
    named = import_object(config.function, f"{root}.function")
    options = {name: value for name in OPTIONS if (value := getattr(config, name)) is not None}
    try:
        return _component(named, config, options)
    except InvalidConfig as error:
        raise InvalidConfig(f"{root}: {error}") from None


def _component(named: Any, config: FunctionConfig, options: dict[str, Any]) -> RewardComponent:
    if isinstance(named, RewardComponent):
        if config.kind is not None:
            raise InvalidConfig(f"kind: expected none, because {config.function} is a component, got {config.kind!r}")
        return replace(named, **options)
    if not callable(named) or isinstance(named, type):
        raise InvalidConfig(f"function: expected {config.function} to be a function or a component, got {named!r}")
    component: RewardComponent = KINDS[config.kind or "trl"](named, **options)
    return component
