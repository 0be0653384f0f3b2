"""Agents of smolagents, which block; in a module of their own, which their processes import."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number.
        b: another one.
    """
    return a + b


@dataclass
class Smol:
    """Asks an agent of smolagents for two sums."""

    kind: str = "ToolCallingAgent"
    stream: bool = False
    required: bool = False
    """Whether calls of tools are required, as the agent has it by default."""

    def drive(self, _: int, client: Any) -> float:
        smolagents: Any = import_module("smolagents")
        own = {"api_base": client.base_url, "api_key": client.api_key}
        options = {} if self.required or self.kind == "CodeAgent" else {"tool_choice": "auto"}
        model = smolagents.OpenAIModel("policy", **own, **options)
        agent = getattr(smolagents, self.kind)(
            tools=[smolagents.tool(add)], model=model, max_steps=4, verbosity_level=0, stream_outputs=self.stream
        )
        first = agent.run("2+3")
        second = agent.run("40+2", reset=False)
        model.client.close()
        return float((str(first), str(second)) == ("5", "42"))
