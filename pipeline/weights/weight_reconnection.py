"""Connecting again to a publisher on another host that a cut network hides for a while.

Knows no sockets. A publisher that has ended is told from a hidden one by its host: it replies that no process listens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..channels.members import DEFAULT_ABSENCE_TIMEOUT_S
from ..errors import NobodyListens, OutOfFileDescriptors, PeerClosed, PeerLost
from ..util.retry_pace import RetryPace

RECONNECT_TIMEOUT_S = DEFAULT_ABSENCE_TIMEOUT_S
"""Bound on the time without a connection: as long as a receiver of records waits for a host that is away."""

_UNREACHABLE = (NobodyListens, OutOfFileDescriptors, PeerClosed, PeerLost, OSError)

T = TypeVar("T")


async def reconnected(connect: Callable[[], Awaitable[T]], pace: RetryPace) -> T:
    """Return the result of `connect`, called until it succeeds.

    Raises:
        NobodyListens: the host of the publisher replies that no process listens; or the time of `pace` is over.
        PeerClosed, PeerLost, OutOfFileDescriptors, OSError: the time of `pace` is over.
        PenstockError: another error of `connect`, at once.
    """
    while True:
        await pace.wait()
        try:
            return await connect()
        except _UNREACHABLE as error:
            if pace.expired or isinstance(error.__cause__, ConnectionRefusedError):
                raise
