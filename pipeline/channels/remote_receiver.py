"""The receiving end of a channel from other processes: the part that shm and tcp share.

`Peers` handles the messages of the senders, and queues their records, which this end takes.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import zmq

from ..._schemas.layout import Schema
from ..errors import PeerLost
from ..util.waiting import WaitClock, Waiters
from .arrival_queue import Notice
from .channel import ChannelStatistics
from .memory import CHECKPOINT_EVERY
from .peer import Peer
from .peers import Peers
from .protocols import AsyncReceiver
from .receiver_config import ReceiverConfig
from .rejections import DisconnectOnError
from .transport import Bundle, R


class RemoteReceiver(AsyncReceiver[R]):
    """The receiving end of a channel from other processes; see `ReceiveChannel`."""

    def __init__(self, record_type: type[R], *, url: str, socket: zmq.Socket[bytes], config: ReceiverConfig) -> None:
        self.url = url
        """The URL that senders connect to."""
        self.schema: Schema = record_type.schema
        """The schema of the records."""
        self.config = config
        self.peers: Peers = Peers(config, socket, self._wake, url, self.schema.kind)
        """The senders, for the acceptor and the pipeline."""
        self._attendance = self.peers.attendance
        self._assemble = record_type.assemble
        self._arrivals = self.peers.arrivals
        self._listener = config.listener
        self._received = 0
        self._waiting = Waiters()
        self._clock = WaitClock()
        self._until_checkpoint = CHECKPOINT_EVERY
        self._closed = False
        self._resources = AsyncExitStack()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<RemoteReceiver {self.url}: {state}, {len(self.peers)} senders, {self._received} received>"

    @property
    def rejected(self) -> int:
        """Return the number of rejected connections and messages: unknown peers, other versions, invalid bytes."""
        return self.peers.rejections.count

    def start_accepting(self, resources: AsyncExitStack) -> None:
        """Admit senders from now on. Owns `resources`, the acceptor among them, and closes them when it is closed."""
        self._resources = resources
        self._attendance.open()

    def keep_open(self) -> None:
        """Keep the stream from ending by itself until `let_end`, however many senders connect and disconnect."""
        self._attendance.keep_open()

    def let_end(self) -> None:
        """Let the stream end as soon as no sender is connected, whether or not any has connected before."""
        self._attendance.let_end()

    def wake_through(self, waiters: Waiters) -> None:
        """Wake the tasks of `waiters` from now on: they receive from several receivers. No task may wait here yet."""
        self._waiting = waiters

    def _wake(self) -> None:
        if self._arrivals.events or self._attendance.over:
            self._waiting.wake_all()

    def receive_nowait(self) -> R:
        """Return the next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        if (record := self._receive()) is None:
            raise anyio.WouldBlock
        return record

    def _receive(self) -> R | None:
        """Return the next record, or None without one now."""
        # There are three cases:
        #
        # 1. A record is next, and is returned.
        # 2. A record was next, and yields nothing (it cannot be read, or the listener keeps it): the next one is tried.
        # 3. There is none: the caller waits.
        while (found := self._next()) is not None:
            if (record := self._take(*found)) is not None:
                return record
        return None

    def _next(self) -> tuple[Peer, Bundle] | None:
        """Return the bundle with the next record, or None. Reports the ends of senders before it."""
        if self._closed:
            raise anyio.ClosedResourceError
        events = self._arrivals.events
        while True:
            # There are four cases:
            #
            # 1. A bundle is next. It stays the first of the arrivals until all of its records are taken (`advance`).
            # 2. The end of a sender is next. All that it published came before, so its end is reported now.
            # 3. Nothing has arrived, here or at the socket, and nothing will: the stream has failed or ended.
            # 4. Nothing has arrived, and more may: the caller waits.
            if not events:
                self.peers.router.drain()
            if not events:
                self._attendance.raise_if_over()
                return None
            peer, arrival = events[0]
            if isinstance(arrival, tuple):
                return peer, arrival
            events.popleft()
            self._notify(peer, arrival)

    def _notify(self, peer: Peer, notice: Notice) -> None:
        """Report that a sender died, closed, or disconnected after it had closed."""
        # There are three cases:
        #
        # 1. There is a listener: it is notified of everything.
        # 2. The sender died, and is not counted: `receive` raises, because it is not awaited.
        # 3. It died and is counted, so that it is awaited; or it was dismissed; or it closed (see `Attendance`).
        listener = self._listener
        if listener is not None:
            with DisconnectOnError(self.peers.disconnect_for_error, peer):
                match notice:
                    case PeerLost():
                        listener.lost(peer, notice)
                    case "closed":
                        listener.closed(peer)
                    case "disconnected":
                        listener.disconnected(peer)
        elif isinstance(notice, PeerLost) and self.config.members is None and not peer.dismissed:
            raise notice

    def _take(self, peer: Peer, bundle: Bundle) -> R | None:
        """Take the next record of a bundle; None if there is no record to return."""
        # There are three cases:
        #
        # 1. The record cannot be read: its sender is disconnected for the error, and the rest of the bundle is dropped.
        # 2. There is a listener: it decides what is returned, which may be nothing. Where it raises, as 1.
        # 3. There is none: the record is returned.
        record: R | None = None
        with DisconnectOnError(self.peers.disconnect_for_error, peer):
            record = self._assemble(*peer.reader.fetch(bundle, self._arrivals.index, peer.release))
        if record is None:
            self._arrivals.advance(peer, bundle, bundle[0].records - self._arrivals.index)
            return None
        self._received += 1
        self._arrivals.advance(peer, bundle, 1)
        if peer.releases:
            peer.collect_releases()
            if peer.credit_due:
                self.peers.credit.return_credit(peer)
        if self._listener is not None:
            received, record = record, None
            with DisconnectOnError(self.peers.disconnect_for_error, peer):
                record = self._listener.received(peer, received)
        return record

    async def receive(self) -> R:
        """Return the next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            await self._checkpoint()
        while (record := self._receive()) is None:
            await self._wait()
        return record

    async def _wait(self) -> None:
        with self._clock.waiting("record"):
            if not self.ready_to_receive():
                await self._waiting.wait()

    def ready_to_receive(self) -> bool:
        """Return the credit that senders may use, and whether `receive_nowait` may succeed now."""
        self.peers.credit.flush_all()
        return bool(self._arrivals.events) or self._attendance.over

    async def _checkpoint(self) -> None:
        """Let other tasks run, and allow a cancellation before a record moves."""
        self._until_checkpoint = CHECKPOINT_EVERY
        await anyio.lowlevel.checkpoint()

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of this end."""
        peers = [peer for peer in self.peers if peer.open]
        for peer in peers:
            peer.collect_releases()
        return ChannelStatistics(
            transport=self._attendance.transport,
            capacity=self.config.capacity * max(1, len(peers)),
            items=sum(peer.sequence - peer.returned - peer.unreturned_records for peer in peers),
            capacity_bytes=self.config.capacity_bytes * max(1, len(peers)),
            nbytes=sum(peer.nbytes - peer.released_bytes for peer in peers),
            sent=self._received + self._arrivals.queued,
            received=self._received,
            senders=len(peers),
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )

    async def aclose(self) -> None:
        """Close this end; senders get PeerClosed. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.peers.stop()
        self._waiting.wake_all()
        with anyio.CancelScope(shield=True):
            try:
                await self.peers.dismiss_all()
            finally:  # a shield stops anyio's cancellations, not asyncio's own, such as that of Ctrl-C
                try:
                    await self._resources.aclose()
                finally:
                    self.peers.clear()
