"""The messages that are handled before other tasks run: bounded in number and in bytes.

ZeroMQ takes messages from its connections in turn. Knows neither peers nor the meaning of messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Share(NamedTuple):
    """A number of messages, and of their bytes without those of records."""

    messages: int
    nbytes: int


AT_ONCE = Share(1024, 2**22)
"""Senders within their credit never have so many messages in flight; decoding as many bytes takes some 20 ms."""


class Turn:
    """A turn that is over when the messages of all connections together have used it up."""

    __slots__ = ("_messages", "_nbytes")

    def __init__(self, share: Share) -> None:
        self._messages, self._nbytes = share

    @property
    def over(self) -> bool:
        """Return whether other tasks must run."""
        return self._messages <= 0 or self._nbytes <= 0

    def spend(self, _: bytes, nbytes: int) -> None:
        """Count a message."""
        self._messages -= 1
        self._nbytes -= nbytes


class TurnOfEach:
    """A turn with a share for every connection: it is over when one has had as many messages handled.

    By then the others, which ZeroMQ serves in turn, have had as many handled, or have no more.
    """

    __slots__ = ("_left", "_refuse", "_share", "over")

    def __init__(self, share: Share, refuse: Callable[[bytes], None]) -> None:
        """Begin; `refuse` is called with a connection of which more bytes were handled than its share has."""
        self._share, self._refuse = share, refuse
        self.over: bool = False
        """True if other tasks must run."""
        self._left: dict[bytes, Share] = {}
        """The rest of the share of each connection that had a message handled."""

    def spend(self, identity: bytes, nbytes: int) -> None:
        """Count a message of a connection."""
        messages, left = self._left.get(identity, self._share)
        self._left[identity] = Share(messages - 1, left - nbytes)
        self.over = self.over or messages <= 1
        if left < nbytes:
            self._refuse(identity)
