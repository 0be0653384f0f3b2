"""Agents that ask for completions themselves: what they are given, and what they return."""

from __future__ import annotations

from ._stages.agents.agent_client import (
    AgentClient,
    CallRefused,
    ContextTooLong,
    DrivingEnvironment,
    Outcome,
    RolloutEnded,
)
from ._stages.contracts.policies import Call

__all__ = [
    "AgentClient",
    "Call",
    "CallRefused",
    "ContextTooLong",
    "DrivingEnvironment",
    "Outcome",
    "RolloutEnded",
]
