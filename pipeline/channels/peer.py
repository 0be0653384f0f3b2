"""A sender, as its receiver knows it: its records, and its unreturned credit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio

from ..._schemas import GroupId, ProtocolMismatch
from ..._schemas.control import PUBLISHED, Closed, Connect, Message, Reject
from ..._schemas.descriptor import Descriptor
from ..accounting.repetition_sets import iter_bits
from .connection import PeerControl
from .message_counts import MessageCounts
from .segment import DEFAULT_SLOT_BYTES
from .transport import PayloadReader
from .unread import Inflow

NO_GROUP = GroupId("", "")
"""The group of a notice that is about a step alone."""


class Peer:
    """The state of a sender at its receiver."""

    def __init__(  # noqa: PLR0915 (its state)
        self,
        request: Connect,
        schedule: Callable[[Peer], None],
        release_at: int,
        send: Callable[[bytes, Message], bool] = lambda _identity, _message: False,
    ) -> None:
        self.identity: bytes = request.identity
        self.name: str = request.name or f"process {request.pid}"
        """Its name in messages."""
        self.member: str = request.name
        """The name that it is counted by; empty without one."""
        self.pid: int = request.pid
        self.reader: PayloadReader
        """Set when it is admitted."""
        self.control: PeerControl
        """Its connection; set when it is admitted."""
        self.open = True
        """Until it sends Close, or is lost."""
        self.gone: anyio.Event = anyio.Event()
        """Set when its connection has ended."""
        self.awaits_saved = False
        """True while it waits, after Close("staying"), until all is saved; then it sends Close("done")."""
        self.violation = ""
        """Its violation of the protocol, as a predicate after its name. Its later messages are not trusted."""
        self.dismissed: bool = False
        """True if the channel was closed for it alone."""
        self.connected = False
        """True if a message of it has arrived since it was admitted."""
        self.rejection: Reject | None = None
        """The message for the sender itself, in case it still receives: it violated the protocol, or was unresponsive.
        Not the error, because that would keep this peer and its memory alive until cycles are collected."""
        self.unresponsive_s: float | None = None
        """Seconds that it was unresponsive, if it was disconnected for that."""
        self.admitted_s: float = time.monotonic()
        """The time of its admission."""
        self.inflow: Inflow = Inflow()
        """Bytes of its messages that were handled."""
        self.counts: MessageCounts = MessageCounts()
        """Of the messages after the handshake."""
        self.sequence = 0
        """Its last record that arrived."""
        self.taken = 0
        """Records that `receive` has returned."""
        self.returned: int = 0
        """Records whose credit was returned."""
        self.released_bytes: int = 0
        """Bytes of the records that were released, whether or not their credit was returned."""
        self.nbytes = 0
        """Bytes of all its records that arrived."""
        self.releases: deque[tuple[Descriptor, int]] = deque()
        """Records that were released since `collect_releases`; any thread may append, and that alone."""
        self.unreturned_credit: list[tuple[int, int, int]] = []
        """Slot, generation and records of bundles whose credit was not returned."""
        self.unreturned_records: int = 0
        self.credit_requested: bool = False
        """True while it waits for credit, or is about to: until some is returned."""
        self.endings: list[tuple[GroupId, tuple[int, ...], str, int]] = []
        """Outcomes that have not been sent yet."""
        self._send = send
        self._schedule = schedule
        self._release_at = release_at
        """Records whose credit is returned without a request."""

    def __repr__(self) -> str:
        state = "open" if self.open else "closed"
        return f"<Peer {self.name} (pid {self.pid}): {state}, {self.sequence} records, {self.returned} released>"

    def send(self, message: Message) -> None:
        """Send it a message; one that has disconnected needs none."""
        self._send(self.identity, message)

    async def dismiss(self) -> None:
        """Close the channel for this sender alone: it gets PeerClosed."""
        if self.open:
            self.dismissed = True
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self.control.send(Closed())

    @property
    def credit_due(self) -> bool:
        """Return whether credit or outcomes are to be sent without a request."""
        return bool(self.endings) or self.unreturned_records >= self._release_at

    def release(self, descriptor: Descriptor, records: int) -> None:
        """Note that some records of a bundle are released. Safe from any thread, and from within garbage collection."""
        self.releases.append((descriptor, records))
        if self.credit_requested or self.unreturned_records + len(self.releases) >= self._release_at:
            self._schedule(self)

    def request_credit(self) -> None:
        """Note that it can use its unreturned credit: it requested it, or has used all that it had."""
        self.credit_requested = True
        if self.unreturned_credit or self.releases:
            self._schedule(self)

    def check_credit(self, capacity: int, capacity_bytes: int) -> None:
        """Check that it has no more in flight than this; what uses all of its records requests more."""
        most = capacity_bytes + DEFAULT_SLOT_BYTES
        if self.nbytes - self.released_bytes > most:
            self.collect_releases()
        if (nbytes := self.nbytes - self.released_bytes) > most:
            raise ProtocolMismatch(f"expected at most {most} bytes in flight, got {nbytes}")
        if (in_flight := self.sequence - self.returned) > capacity:
            raise ProtocolMismatch(f"expected at most {capacity} records in flight, got {in_flight}")
        if in_flight == capacity:
            self.request_credit()

    def collect_releases(self) -> None:
        """Count the releases since the last call."""
        while self.releases:
            released, records = self.releases.popleft()
            self.unreturned_credit.append((released.slot, released.generation, records))
            self.unreturned_records += records
            self.released_bytes += released.bytes_of(records)

    def take_credit(self) -> tuple[tuple[int, int, int], ...]:
        """Return the credit to send now, as the spans of a `CreditGrant`."""
        self.collect_releases()
        unreturned_credit, self.unreturned_credit = tuple(self.unreturned_credit), []
        self.returned += self.unreturned_records
        self.unreturned_records = 0
        if unreturned_credit:
            self.credit_requested = False
        return unreturned_credit

    def ended(self, group: GroupId, mask: int, state: str, step: int) -> None:
        """Send the sender the end state of some of its trajectories, or that they are saved."""
        self.endings.append((group, tuple(iter_bits(mask)), state, step))
        self._schedule(self)

    def stepped(self, step: int, published: int | None) -> None:
        """Send the sender the last optimizer step, and the newest version of the weights that is published."""
        if published is not None:
            self.endings.append((NO_GROUP, (), PUBLISHED, published))  # first: the step may begin something
        self.endings.append((NO_GROUP, (), "trained", step))
        self._schedule(self)
