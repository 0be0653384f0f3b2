"""A sender, as its receiver knows it: what came from it, and what it is owed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from ..._schemas import GroupId
from ..._schemas.control import Connect, Reject
from ..._schemas.descriptor import Descriptor
from ..ledger import EndState
from ..repetition_sets import iter_bits
from .connection import PeerControl
from .transport import PayloadReader

__all__ = ["Peer"]


class Peer:
    """A sender, as its receiver knows it."""

    def __init__(self, hello: Connect, schedule: Callable[[Peer], None], release_at: int) -> None:
        self.identity = hello.identity
        self.name = hello.name or f"process {hello.pid}"
        """What messages call it."""
        self.member = hello.name
        """The name by which it is counted; empty where it has none."""
        self.pid = hello.pid
        self.reader: PayloadReader
        """Set when it is let in."""
        self.control: PeerControl
        """Its connection; set when it is let in."""
        self.open = True
        """Until it says goodbye, or is lost."""
        self.awaits_saved = False
        """Whether it has said goodbye, and has not said yet that it has heard that all is saved."""
        self.disconnected_for_error = False
        """Whether it broke the protocol. Of what it sent nothing more is believed."""
        self.connected = False
        """Whether anything was heard of it since it was let in."""
        self.given_up: Reject | None = None
        """What it is told itself, should it still listen: it broke the protocol, or was silent. Not the error, for that
        would hold this peer and its memory until cycles are collected."""
        self.unresponsive_s: float | None = None
        """Seconds, where it was given up because it was silent."""
        self.since = time.monotonic()
        """When it was let in."""
        self.heard = 0
        """Messages that came from it."""
        self.sequence = 0
        """Its last record that arrived."""
        self.taken = 0
        """Records that were handed to whoever receives."""
        self.returned = 0
        """Records whose credit went back."""
        self.released_bytes = 0
        """Bytes of the records that were released, whether or not their credit went back."""
        self.nbytes = 0
        """Bytes of all its records that arrived."""
        self.releases: deque[tuple[Descriptor, int]] = deque()
        """Records that were released since the last look; appended to by any thread, which is all that one may do."""
        self.unreturned_credit: list[tuple[int, int, int]] = []
        """Slot, generation and records of bundles whose credit has not gone back."""
        self.unreturned_records = 0
        self.credit_requested = False
        """Whether it waits for credit, or is about to: known until some is sent."""
        self.endings: list[tuple[GroupId, tuple[int, ...], str, int]] = []
        """Endings that have not been sent yet."""
        self._schedule = schedule
        self._release_at = release_at
        """Records whose credit goes back unasked."""

    def __repr__(self) -> str:
        state = "open" if self.open else "gone"
        return f"<Peer {self.name} (pid {self.pid}): {state}, {self.sequence} records, {self.returned} released>"

    @property
    def credit_due(self) -> bool:
        """Whether it is owed so much that it is told unasked."""
        return bool(self.endings) or self.unreturned_records >= self._release_at

    def release(self, descriptor: Descriptor, records: int) -> None:
        """Some records of a bundle are done with. Safe from any thread, and from within garbage collection."""
        self.releases.append((descriptor, records))
        if self.credit_requested or self.unreturned_records + len(self.releases) >= self._release_at:
            self._schedule(self)

    def collect_releases(self) -> None:
        """Count what was released since the last look."""
        while self.releases:
            released, records = self.releases.popleft()
            self.unreturned_credit.append((released.slot, released.generation, records))
            self.unreturned_records += records
            self.released_bytes += released.bytes_of(records)

    def take_credit(self) -> tuple[tuple[int, int, int], ...]:
        """The credit that goes back now, as a `CreditGrant` has it."""
        self.collect_releases()
        unreturned_credit, self.unreturned_credit = tuple(self.unreturned_credit), []
        self.returned += self.unreturned_records
        self.unreturned_records = 0
        if unreturned_credit:
            self.credit_requested = False
        return unreturned_credit

    def ended(self, group: GroupId, mask: int, state: EndState | Literal["saved"], step: int) -> None:
        """Tell the sender how some of its trajectories ended, or that they are saved: an `Origin` for the ledger."""
        self.endings.append((group, tuple(iter_bits(mask)), state, step))
        self._schedule(self)
