"""Agents as functions of a row, in a module of their own, because processes import it."""

from __future__ import annotations

from typing import Any

from penstock.agents import AgentClient, BlockingAgentClient


async def answers(row: dict[str, Any], client: AgentClient) -> float:
    """Ask by tokens, and compare nothing."""
    await client.generate(row["ids"])
    return float(row["worth"])


def blocks(row: dict[str, Any], client: BlockingAgentClient) -> float:
    """Ask in a process of its own."""
    said = client.chat([{"role": "user", "content": row["question"]}])
    return float(said["content"] == row["answer"])
