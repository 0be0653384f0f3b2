"""Agents that ask for completions themselves: what they are given, and what they return."""

from __future__ import annotations

from ._stages.agents.agent_client import (
    AgentClient,
    CallRefused,
    CallsUsedUp,
    ContextTooLong,
    DrivingEnvironment,
    EndpointAddress,
    Outcome,
    RolloutDeadline,
    RolloutEnded,
)
from ._stages.agents.agent_commands import CommandFailed, CommandResult
from ._stages.agents.agent_env import AgentCommand, AgentEnv
from ._stages.agents.blocking_client import BlockingAgentClient
from ._stages.agents.mcp_tools import MCPTools
from ._stages.agents.openenv_environment import OpenEnvEnvironment
from ._stages.agents.verifiers_environment import VerifiersEnvironment
from ._stages.contracts.policies import Call

__all__ = [
    "AgentClient",
    "AgentCommand",
    "AgentEnv",
    "BlockingAgentClient",
    "Call",
    "CallRefused",
    "CallsUsedUp",
    "CommandFailed",
    "CommandResult",
    "ContextTooLong",
    "DrivingEnvironment",
    "EndpointAddress",
    "MCPTools",
    "OpenEnvEnvironment",
    "Outcome",
    "RolloutDeadline",
    "RolloutEnded",
    "VerifiersEnvironment",
]
