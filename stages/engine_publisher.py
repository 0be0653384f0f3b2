"""`EnginePublisher`: publishes weights and tells engines of them, where those do not look for themselves: servers.

Stands where a `WeightPublisher` stands, between the trainer and those who sample. Knows no trainer and no framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from ..pipeline.causes import first_cause
from ..pipeline.engine_sync import Published
from ..pipeline.errors import PenstockError
from .policies import Engine

__all__ = ["EnginePublisher", "Weights"]

RESUME_S = 30.0
"""How long engines may take to go on, once whoever paused them was cancelled."""


class Weights(Published, Protocol):
    """Where versions of the weights lie: a `WeightFolder`, a `WeightPublisher`."""

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Make `tensors` the newest weights."""
        ...


@dataclass(frozen=True, slots=True)
class EnginePublisher:
    """What `SinkTrainer(trainer, publisher)` takes, for engines that have to be told: they are, after every version."""

    weights: Weights
    engines: Sequence[Engine]

    @property
    def version(self) -> int:
        """The newest version that was published; −1 before the first."""
        return self.weights.version

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Make `tensors` the newest weights; returns when every engine samples with them.

        Raises:
            PenstockError: an engine could not take them.
        """
        await self.weights.publish(tensors, version)
        await self._each(lambda engine: engine.update_weights(self.weights.url, version))

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Within the body no engine samples. Sampling goes on when the body ends, however it does."""
        try:
            await self._each(lambda engine: engine.pause())
            yield
        finally:
            with anyio.move_on_after(RESUME_S, shield=True):
                await self._each(lambda engine: engine.resume())

    async def _each(self, ask: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Ask all engines at once."""
        try:
            async with anyio.create_task_group() as tasks:
                for engine in self.engines:
                    tasks.start_soon(ask, engine)
        except ExceptionGroup as group:
            raise first_cause(group, PenstockError) from None
