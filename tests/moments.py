"""Waiting for a condition that another process, a thread or a connection makes true."""

from __future__ import annotations

import anyio


async def moment() -> None:
    """Wait before a condition is looked at again; a loop of checkpoints would take a core from what it waits for."""
    await anyio.sleep(0.002)
