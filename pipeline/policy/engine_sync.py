"""`synced`: an engine that is awake and has the newest weights while it is used, and sleeps when it is not.

For samplers that share a device with the trainer: what one of them lets go of, the other one has. Knows an engine by
three of its methods, and weights by where they are published.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio

from ..telemetry import get_logger
from .shielded import shielded

__all__ = ["Published", "Syncable", "synced"]

log = get_logger("penstock.weights")

SLEEP_S = 60.0
"""How long an engine may take to fall asleep: it finishes what it is sampling, and a server is asked more than once."""

HURRIED_S = 4.0
"""How long it may take where the body was cancelled: a server that is there answers, and a Ctrl-C is not held up."""


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

    What the body raises is what comes out, also where the engine does not fall asleep then: that is logged, and noted
    on the exception.

    Raises:
        RuntimeError: nothing has been published yet.
        TimeoutError: the body ended well, and the engine did not fall asleep in time: it has its memory still.
        Exception: the body ended well, and the engine failed to fall asleep; or it could not take the weights.
    """
    if weights.version < 0:
        raise RuntimeError(
            f"expected weights to be published before an engine samples with them, got none: {weights!r}"
        )
    try:
        await engine.wake_up()
        await engine.update_weights(weights.url, weights.version)
        yield engine
    except BaseException as error:
        try:
            await _fallen_asleep(engine, error)
        except Exception as failure:  # noqa: BLE001 (told with the error of the body, which is what happened first)
            told = f"{type(failure).__name__}: {failure}"
            log.warning("engine_left_awake", engine=repr(engine), reason=told)
            error.add_note(f"besides: {engine!r} did not fall asleep: {told}")
        except anyio.get_cancelled_exc_class():
            pass  # that came meanwhile: whoever cancelled cancels on
        raise
    await _fallen_asleep(engine, None)


async def _fallen_asleep(engine: Syncable, after: BaseException | None) -> None:
    """Let `engine` sleep, once its use was ended by `after`."""
    what = f"{engine!r} to fall asleep"
    await shielded(engine.sleep, what, after=after, within_s=SLEEP_S, hurried_s=HURRIED_S)
