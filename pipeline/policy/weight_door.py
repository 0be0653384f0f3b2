"""Where a publisher of weights and its subscribers meet: a Unix socket of mode 0600 in a private directory.

The URL names the directory: `weights:///tmp/penstock-4f5g6h`. What is said at the door is theirs to know.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from ..channels.door import Door, door_at
from ..channels.socket_directory import socket_directory, sweep
from ..errors import NobodyListens

__all__ = ["directory_of", "knock", "opened_door"]

SCHEME = "weights://"
DOOR = "door"


@contextmanager
def opened_door() -> Iterator[tuple[str, socket.socket]]:
    """A URL and the listening socket behind it; both go when the body ends. Blocks."""
    with socket_directory() as directory:
        door = socket.socket(socket.AF_UNIX)
        try:
            door.bind(str(directory / DOOR))
            (directory / DOOR).chmod(0o600)
            door.listen()
            yield f"{SCHEME}{directory}", door
        finally:
            door.close()


def directory_of(url: str) -> Path:
    """Where the publisher at `url` has its door."""
    return Path(url.removeprefix(SCHEME))


async def knock(url: str) -> Door:
    """The door at `url`, from outside.

    Raises:
        ValueError: `url` is not one of a publisher of weights.
        NobodyListens: there is no publisher.
    """
    if not url.startswith(SCHEME):
        raise ValueError(f"expected a URL that begins with {SCHEME}, got {url!r}: use WeightPublisher.url")
    try:
        return await door_at(directory_of(url) / DOOR)
    except OSError as error:
        await anyio.to_thread.run_sync(sweep)
        raise NobodyListens(f"expected a publisher at {url}, got {error.strerror}: is its process running?") from error
