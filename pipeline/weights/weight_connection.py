"""The control socket of a publisher of weights: a Unix socket of mode 0600 in a private directory.

The URL names the directory: `weights:///tmp/penstock-4f5g6h`. Independent of the messages of the two sides.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from ..channels.control_connection import ControlConnection, connect_control
from ..channels.socket_directory import socket_directory, sweep
from ..errors import InvalidConfig, NobodyListens
from ..util.checkpoint import FOLDER_SCHEME

SCHEME = "weights://"
CONTROL_SOCKET = "control"


@contextmanager
def listening_socket() -> Iterator[tuple[str, socket.socket]]:
    """Open a listening socket within the body; yield its URL and the socket. Blocks."""
    with socket_directory() as directory, listening_in(directory) as listening:
        yield f"{SCHEME}{directory}", listening


@contextmanager
def listening_in(directory: Path) -> Iterator[socket.socket]:
    """Open a listening socket in `directory` within the body. Blocks."""
    listening, path = socket.socket(socket.AF_UNIX), directory / CONTROL_SOCKET
    try:
        path.unlink(missing_ok=True)  # of an owner that was killed
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen()
        yield listening
    finally:
        listening.close()


def directory_of(url: str) -> Path:
    """Return the directory of the publisher's socket, of its `url`."""
    return Path(url.removeprefix(SCHEME))


async def connect_publisher(url: str) -> ControlConnection:
    """Connect to the publisher at `url`.

    Raises:
        InvalidConfig: `url` is not one of a publisher of weights.
        NobodyListens: there is no publisher.
    """
    if not url.startswith(SCHEME):
        raise InvalidConfig(
            f"url: expected one that begins with {SCHEME} or {FOLDER_SCHEME}, got {url!r}: use the url of a "
            f"WeightPublisher or a WeightFolder"
        )
    try:
        return await connect_control(directory_of(url) / CONTROL_SOCKET)
    except OSError as error:
        await anyio.to_thread.run_sync(sweep)
        raise NobodyListens(f"expected a publisher at {url}, got {error.strerror}: is its process running?") from error
