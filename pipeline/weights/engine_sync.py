"""`synced`: wake an engine and load the newest weights while it is used, and let it sleep afterwards.

For an engine that shares a device with the trainer, so that each has the memory while the other does not need it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar, runtime_checkable

import anyio

from ..accounting.telemetry import get_logger
from .shielded import shielded

log = get_logger("penstock.weights")

SLEEP_TIMEOUT_S = 60.0
"""Time for an engine to fall asleep: it finishes its samples, and requests to a server are repeated."""

CANCEL_TIMEOUT_S = 4.0
"""The same if the body was cancelled: enough for a server that runs, and short for a Ctrl-C."""


class Published(Protocol):
    """Published weights: a WeightPublisher or a WeightFolder."""

    @property
    def url(self) -> str:
        """Return the URL for subscribers."""
        ...

    @property
    def version(self) -> int:
        """Return the newest version; −1 before the first."""
        ...


@runtime_checkable
class WritesLater(Protocol):
    """Published weights that are written while the trainer goes on: a WeightFolder."""

    async def written(self) -> None:
        """Wait until the newest version can be loaded. Raises the reason why it cannot."""
        ...


async def readable(weights: object) -> None:
    """Wait until the newest version of `weights` can be loaded.

    Raises:
        PenstockError: it could not be written.
    """
    if isinstance(weights, WritesLater):
        await weights.written()


class Syncable(Protocol):
    """The methods of an engine that `synced` calls; see `stages.engines.policies.Engine`."""

    async def update_weights(self, url: str, version: int) -> None:
        """Load the weights at `url`, of `version` or newer."""
        ...

    async def sleep(self) -> None:
        """Release memory, until `wake_up`."""
        ...

    async def wake_up(self) -> None:
        """Allocate the memory again."""
        ...


E = TypeVar("E", bound=Syncable)


@asynccontextmanager
async def synced(weights: Published, engine: E) -> AsyncGenerator[E]:
    """Wake `engine` and load the newest version of `weights` for the body; let it sleep afterwards, in any case.

    An exception of the body is raised also if the engine then fails to fall asleep; that failure is logged, and added
    to the exception as a note.

    Raises:
        RuntimeError: no version has been published yet.
        TimeoutError: the body succeeded, and the engine did not fall asleep in time, so it still has its memory.
        PenstockError: the newest version could not be written.
        Exception: the body succeeded, and the engine failed to fall asleep; or it could not load the weights.
    """
    if weights.version < 0:
        raise RuntimeError(
            f"expected weights to be published before an engine samples with them, got none: {weights!r}"
        )
    await readable(weights)
    try:
        await engine.wake_up()
        await engine.update_weights(weights.url, weights.version)
        yield engine
    except BaseException as error:
        try:
            await _sleep(engine, error)
        except Exception as failure:  # noqa: BLE001 (added to the exception of the body, which came first)
            reason = f"{type(failure).__name__}: {failure}"
            log.warning("engine_left_awake", engine=repr(engine), reason=reason)
            error.add_note(f"besides: {engine!r} did not fall asleep: {reason}")
        except anyio.get_cancelled_exc_class():
            pass  # cancelled meanwhile: `raise` continues that
        raise
    await _sleep(engine, None)


async def _sleep(engine: Syncable, after: BaseException | None) -> None:
    """Let `engine` sleep after the body; `after` is the exception that it raised, or None."""
    what = f"{engine!r} to fall asleep"
    await shielded(engine.sleep, what, after=after, timeout_s=SLEEP_TIMEOUT_S, cancel_timeout_s=CANCEL_TIMEOUT_S)
