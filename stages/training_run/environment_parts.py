"""The environment that a RunConfig names, and the chat format of its conversations. Knows no model and no trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.named_objects import import_object
from ..agents.agent_env import AgentCommand, AgentEnv
from ..agents.verifiers_environment import VerifiersEnvironment
from ..contracts.policies import Tokenizer
from ..data.mixture import Mixture
from ..data.prompt_dataset import PromptDataset
from ..sampling.environment_mixture import EnvironmentMixture
from ..sampling.environments import Environment
from ..tokenizers.chat_format import ChatFormat
from .run_config import EnvironmentPart, MixedEnvironmentConfig, RunConfig, TaskEnvironmentConfig

MakeEnv: TypeAlias = Callable[[], Environment]


def chat_of(config: RunConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of the prompts and of the environment.

    Raises:
        InvalidConfig: the template has no such arguments, the tools do not exist, or the parser is unknown.
    """
    environment, arguments = config.environment, config.data.template
    if environment is None:
        return ChatFormat(tokenizer, arguments=arguments)
    tools = () if environment.tools is None else import_object(environment.tools, "config: environment.tools")
    parser = environment.tool_calls
    if parser is not None and ":" in parser:
        parser = _function(parser, "config: environment.tool_calls")
    try:
        return ChatFormat(
            tokenizer,
            tools=tools,
            arguments=arguments,
            observation_role=environment.observation_role,
            tool_calls=parser,
            history=environment.history,
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"config: environment: {error}") from None


def environment_of(config: RunConfig, prompts: Callable[[], PromptDataset | Mixture]) -> MakeEnv:
    """Return what makes the environment that trains; `prompts` returns those of the data.

    Raises:
        InvalidConfig: it names what does not exist, or is no function.
    """
    environment = config.environment
    if environment is None:
        return prompts()
    made = [
        _agent(config, each, root, prompts()) if each.is_agent else _made(each, root) for root, each in _rooted(config)
    ]
    if not environment.mix:
        return made[0]
    names = [each.known_as for each in environment.mix]
    if len(set(names)) < len(names):
        raise InvalidConfig(f"config: environment.mix: expected names of their own, got {', '.join(names)}: set name")
    weights = [each.weight for each in environment.mix]
    try:
        return EnvironmentMixture(dict(zip(names, zip(made, weights, strict=True), strict=True)))
    except InvalidConfig as error:
        raise InvalidConfig(f"config: environment.mix: {error}") from None


def _made(part: TaskEnvironmentConfig, root: str) -> MakeEnv:
    if (named := part.verifiers) is not None:
        return VerifiersEnvironment(named.taskset, named.config, named.client)
    assert part.make is not None  # noqa: S101 (it has one of them)
    made: MakeEnv = _function(part.make, f"{root}.make")
    return made


def evaluated_by(config: RunConfig, datasets: Sequence[PromptDataset]) -> list[tuple[str, MakeEnv]]:
    """Return what evaluates the rows of each data set, by name: one completion of each, or every agent."""
    agents = [(root, each) for root, each in _rooted(config) if each.is_agent]
    if not agents:
        return [(rows.data_source, rows) for rows in datasets]
    return [
        (
            f"{agent.known_as}/{rows.data_source}"
            if isinstance(agent, MixedEnvironmentConfig) and len(agents) > 1
            else rows.data_source,
            _agent(config, agent, root, rows),
        )
        for root, agent in agents
        for rows in datasets
    ]


def evaluated_environments(config: RunConfig) -> list[tuple[str, MakeEnv]]:
    """Return the environments that are only evaluated, by name."""
    environments = () if config.evaluation is None else config.evaluation.environments
    return [
        (each.name or each.called, _made(each, f"config: evaluation.environments[{place}]"))
        for place, each in enumerate(environments)
    ]


def _rooted(config: RunConfig) -> list[tuple[str, EnvironmentPart]]:
    """Return each environment with the key of its section."""
    environment = config.environment
    if environment is None or not environment.mix:
        return [] if environment is None else [("config: environment", environment)]
    return [(f"config: environment.mix[{place}]", each) for place, each in enumerate(environment.mix)]


def _agent(config: RunConfig, part: EnvironmentPart, root: str, rows: PromptDataset | Mixture) -> AgentEnv:
    return AgentEnv(
        AgentCommand(part.command) if part.agent is None else _function(part.agent, f"{root}.agent"),
        rows,
        max_calls=part.max_calls,
        max_tokens=part.max_tokens,
        scored=not config.reward.functions,
    )


def _function(name: str, root: str) -> Any:
    """Return what `module:name` names, which can be called."""
    named = import_object(name, root)
    if not callable(named):
        raise InvalidConfig(f"{root}: expected a function, got {name}, which is {type(named).__name__}")
    return named
