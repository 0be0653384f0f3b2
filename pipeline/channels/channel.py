"""The two ends of a channel, as protocols: every transport implements them, and a stage uses only these.

The synchronous `…_nowait` method holds the logic of each end, the async one waits around it. Three transports implement
this pair (memory, shm, tcp) and pass one conformance suite, `penstock.testing.check_channel`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

MEMORY_CAPACITY = 2
"""Records between two stages of one process: one being written and one being read; more only ages them."""

REMOTE_CAPACITY = 64
"""Records that each sender of another process may have in flight: it rarely waits for a round trip, where many share
few cores a turn does more than warm up the cache, and the records stay fresh."""

REMOTE_CAPACITY_BYTES = 64 * 2**20
"""Bytes that each sender of another process may have in flight; over shm allocated in full when it connects."""

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a channel and its waits at one moment, as seen from one end."""

    transport: str
    """memory, shm or tcp."""
    capacity: int
    """Records that may be in flight: sent and not yet received (memory) or released (shm, tcp)."""
    items: int
    """Records in flight now; at a sender over shm or tcp, those whose credit has not returned yet (reading this
    requests it)."""
    capacity_bytes: int | None
    """Bytes that may be in flight; None where only records are counted."""
    nbytes: int
    """Bytes in flight now."""
    sent: int
    """Records sent so far, by all senders that this end knows of."""
    received: int
    """Records received so far."""
    senders: int
    """Open sending ends."""
    waiting_for: str
    """The wait of this end: "", "credit" (a sender, for the receiver) or "record" (the reverse)."""
    waited_s: float
    """Seconds that this end has waited in total, the present wait included."""

    @property
    def fill(self) -> float:
        """Return the share of the capacity in use, by items or by bytes, whichever is larger; 0 to 1."""
        by_items = self.items / self.capacity if self.capacity else 0.0
        by_bytes = self.nbytes / self.capacity_bytes if self.capacity_bytes else 0.0
        return max(by_items, by_bytes)


class SendChannel(Protocol[T_contra]):
    """The end that a stage writes to."""

    async def send(self, record: T_contra, /) -> None:
        """Send `record`, waiting for credit if need be. A call that is cancelled has not sent it.

        Raises:
            RecordTooLarge: the record would not fit an empty channel.
            PeerClosed: the receiving end is closed.
            PeerLost: the receiving process died.
            anyio.ClosedResourceError: this end is closed.
        """
        ...

    def send_nowait(self, record: T_contra, /) -> None:
        """Send `record` if there is credit for it now.

        Raises:
            ChannelFull: there is no credit. Also the errors of `send`.
        """
        ...

    def clone(self) -> SendChannel[T_contra]:
        """Return another sending end of the same channel. The stream ends when all of them are closed."""
        ...

    async def aclose(self) -> None:
        """Close this end; everything that was sent arrives. Closing twice is fine."""
        ...

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of this end."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class ReceiveChannel(Protocol[T_co]):
    """The end that a stage reads from. Iterating it ends when every sender has closed.

    Where senders are counted by name (`serve(senders=n)`), a lost sender is awaited: no error is raised before its time
    is over. Otherwise no sender is awaited, and `receive` raises, and so does iterating; to go on with the other
    senders, receive or iterate again. Both hold over shm and tcp (docs/decisions/0012).
    """

    async def receive(self) -> T_co:
        """Return the next record, waiting for one if need be. A call that is cancelled has not taken any.

        Raises:
            anyio.EndOfStream: every sender closed and everything was received.
            PeerLost: a sending process died that is not awaited; raised once for each, after all it had published.
                Receiving may go on.
            MemberAbsent: an awaited member did not connect in time; raised from then on.
            anyio.ClosedResourceError: this end is closed.
        """
        ...

    def receive_nowait(self) -> T_co:
        """Return the next record if there is one now.

        Raises:
            anyio.WouldBlock: there is no record. Also the errors of `receive`.
        """
        ...

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def aclose(self) -> None:
        """Close this end; senders get PeerClosed. Closing twice is fine."""
        ...

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of this end."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
