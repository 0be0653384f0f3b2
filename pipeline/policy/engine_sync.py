"""`synced`: an engine that is awake and has the newest weights while it is used, and sleeps when it is not.

For samplers that share a device with the trainer: what one of them lets go of, the other one has. Knows an engine by
three of its methods, and weights by where they are published.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio

__all__ = ["Published", "Syncable", "synced"]

SLEEP_S = 60.0
"""How long an engine may take to fall asleep, whatever ended its use: it finishes what it is sampling."""


class Published(Protocol):
    """Weights that somebody publishes: a WeightPublisher, a WeightFolder."""

    @property
    def url(self) -> str:
        """Where."""
        ...

    @property
    def version(self) -> int:
        """The newest; −1 before the first."""
        ...


class Syncable(Protocol):
    """What an engine has to offer here; see `stages.policies.Engine`."""

    async def update_weights(self, url: str, version: int) -> None:
        """Sample from now on with the weights at `url`, of `version` or newer."""
        ...

    async def sleep(self) -> None:
        """Let go of memory, until `wake_up`."""
        ...

    async def wake_up(self) -> None:
        """Take it back."""
        ...


E = TypeVar("E", bound=Syncable)


@asynccontextmanager
async def synced(weights: Published, engine: E) -> AsyncGenerator[E]:
    """Within the body `engine` is awake and has the newest version of `weights`; after it, however it ends, it sleeps.

    Raises:
        RuntimeError: nothing has been published yet.
        TimeoutError: the engine did not fall asleep in time: it has its memory still.
    """
    if weights.version < 0:
        raise RuntimeError(
            f"expected weights to be published before an engine samples with them, got none: {weights!r}"
        )
    try:
        await engine.wake_up()
        await engine.update_weights(weights.url, weights.version)
        yield engine
    finally:
        with anyio.fail_after(SLEEP_S, shield=True):
            await engine.sleep()
