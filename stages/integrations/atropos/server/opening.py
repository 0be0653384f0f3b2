"""Opening a gateway, whatever it is for: where its packages are not installed it is said how to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

from .....pipeline.errors import MissingExtra
from ..queue.trajectory_queue import TrajectoryQueue
from .desk import Desk
from .door import Door

if TYPE_CHECKING:
    from .hosting import Hosted

__all__ = ["opened"]

G = TypeVar("G")


@asynccontextmanager
async def opened(door: Door, queue: TrajectoryQueue[G], desk: Desk[G], name: str) -> AsyncGenerator[Hosted[G]]:
    """The gateway `name` within the body.

    Raises:
        MissingExtra: the packages for an HTTP server are not installed.
    """
    await anyio.to_thread.run_sync(_import_server, name)
    from .hosting import hosted  # noqa: PLC0415 (only who serves needs a server)

    async with hosted(door, queue, desk) as gateway:
        yield gateway


def _import_server(name: str) -> None:
    """Blocks."""
    try:
        import_module(f"{__package__}.hosting")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{name} needs {error.name}, which is not installed: pip install 'penstock[gateway]'"
        ) from error
