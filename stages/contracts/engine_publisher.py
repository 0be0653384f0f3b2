"""`EnginePublisher`: publishes weights and has engines load them, for engines that do not poll: inference servers.

It takes the place of a `WeightPublisher` between the trainer and the engines. Knows no trainer and no framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import anyio

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import EngineTimedOut, PenstockError
from ..._pipeline.util.exception_groups import first_exception
from ..._pipeline.util.user_code import await_user
from ..._pipeline.weights.engine_sync import Published, readable
from .policies import Engine

log = get_logger("penstock.engine_publisher")

RESUME_TIMEOUT_S = 30.0
"""Bound on the time that engines take to resume after a pause."""


class PublishedWeights(Published, Protocol):
    """Published versions of the weights: a `WeightFolder`, a `WeightPublisher`."""

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Make `tensors` the newest weights."""
        ...


@runtime_checkable
class KnowsTies(Protocol):
    """A publisher that knows its tied tensors."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        ...


@dataclass(frozen=True, slots=True)
class EnginePublisher:
    """A publisher for `SinkTrainer(trainer, publisher)` that has each engine load every version."""

    weights: PublishedWeights
    engines: Sequence[Engine]

    @property
    def version(self) -> int:
        """Return the newest version that was published; −1 before the first."""
        return self.weights.version

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        return self.weights.ties if isinstance(self.weights, KnowsTies) else {}

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Make `tensors` the newest weights; return when every engine samples with them.

        Raises:
            PenstockError: an engine could not load them; the others sample with them.
        """
        await self.weights.publish(tensors, version)
        await readable(self.weights)
        await self._each(lambda engine: engine.update_weights(self.weights.url, version))

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Pause every engine within the body; sampling resumes however the body ends.

        Raises:
            PenstockError: an engine could not pause, or does not resume; the others do.
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
            await self._each(_resume)

    async def _each(self, request: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Send a request to all engines at once, and await every one, even if others fail."""
        failures: list[Exception] = []

        async def send(engine: Engine) -> None:
            try:
                await await_user(request, engine)
            except Exception as error:  # noqa: BLE001 (raised below, when all requests are done)
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for engine in self.engines:
                tasks.start_soon(send, engine)
        if failures:
            raise first_exception(ExceptionGroup("engines", failures), PenstockError) from None


async def _resume(engine: Engine) -> None:
    try:
        with anyio.fail_after(RESUME_TIMEOUT_S):
            await engine.resume()
    except TimeoutError:
        raise EngineTimedOut(
            f"expected {engine!r} to sample again within {RESUME_TIMEOUT_S:g} s, got no response"
        ) from None
