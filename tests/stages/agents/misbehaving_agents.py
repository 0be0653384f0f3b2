"""Agents of which some hang, leave processes and sockets behind, or are killed, as their row says."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
from tests.stages.agents.misdeeds import misbehave

from penstock.agents import AgentClient, BlockingAgentClient


def blocks(row: dict[str, Any], client: BlockingAgentClient) -> float:
    """Ask in a process."""
    client.chat([{"role": "user", "content": "?"}])
    misbehave(row["does"])
    return 1.0


async def waits(row: dict[str, Any], client: AgentClient) -> float:
    """Ask on the event loop, where no agent can be killed."""
    await client.generate(np.array([1, 2], np.int32))
    if row["does"] == "hangs":
        await anyio.sleep_forever()
    if row["does"] == "forks":
        await client.run(["sh", "-c", "setsid sleep 1000 & exit 0"])
    return 1.0
