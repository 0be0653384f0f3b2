"""`EnginePublisher`: publishes weights and tells engines of them, where those do not look for themselves: servers.

Stands where a `WeightPublisher` stands, between the trainer and those who sample. Knows no trainer and no framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from ..._pipeline.errors import EngineTimedOut, PenstockError
from ..._pipeline.exception_groups import first_exception
from ..._pipeline.policy.engine_sync import Published
from ..._pipeline.telemetry import get_logger
from .policies import Engine

__all__ = ["EnginePublisher", "Weights"]

log = get_logger("penstock.engine_publisher")

RESUME_S = 30.0
"""How long engines may take to go on after a pause."""


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
            PenstockError: an engine could not take them; those that could sample with them.
        """
        await self.weights.publish(tensors, version)
        await self._each(lambda engine: engine.update_weights(self.weights.url, version))

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Within the body no engine samples. Sampling goes on when the body ends, however it does.

        Raises:
            PenstockError: an engine could not pause, or does not go on; the others do.
        """
        try:
            await self._each(lambda engine: engine.pause())
            yield
        except BaseException:
            try:
                await self._resume()
            except PenstockError as error:
                log.warning("engines_not_resumed", reason=str(error))
            raise
        await self._resume()

    async def _resume(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._each(_resumed)

    async def _each(self, ask: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Ask all engines at once, and every one to the end, whatever becomes of the others."""
        failures: list[Exception] = []

        async def asked(engine: Engine) -> None:
            try:
                await ask(engine)
            except Exception as error:  # noqa: BLE001 (raised below, when all have been asked)
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for engine in self.engines:
                tasks.start_soon(asked, engine)
        if failures:
            raise first_exception(ExceptionGroup("engines", failures), PenstockError) from None


async def _resumed(engine: Engine) -> None:
    try:
        with anyio.fail_after(RESUME_S):
            await engine.resume()
    except TimeoutError:
        raise EngineTimedOut(f"expected {engine!r} to sample again within {RESUME_S:g} s, got no answer") from None
