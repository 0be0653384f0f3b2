"""The attendance of a stream: which senders may join, which are absent, and when all are done.

All transports share these decisions. Knows no socket.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import anyio

from ..._schemas.control import PROTOCOL_VERSION, Connect, Reject
from ..._schemas.tokenizer import disagreements
from ..accounting.telemetry import get_logger
from ..errors import MemberAbsent, PeerClosed
from .members import Members
from .peer import Peer
from .receiver_config import ReceiverConfig

log = get_logger("penstock.channel")


class Attendance:
    """The senders of a stream, which ends when every member is done; without members, when all have disconnected.

    A connection counts as a sender as soon as it is granted a place. Until then it takes no place.
    """

    def __init__(
        self, config: ReceiverConfig, transport: str, kind: str, peers: Mapping[bytes, Peer], wake: Callable[[], None]
    ) -> None:
        self.granted = 0
        """Senders that were granted a place and have not joined yet."""
        self.joined: int = 0
        """Senders that have ever joined."""
        self._config = config
        self._members = config.members
        self._peers = peers
        """The connected senders."""
        self.transport: str = transport
        self._kind = kind
        self._wake = wake
        """Called when the stream may have ended."""
        self._failure: MemberAbsent | None = None
        """A member did not connect, or reconnect, in time: the stream is over."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires when the time of an absent member is over."""
        self._kept_open = False
        self._min_senders = 1
        """Senders that must have joined before the stream may end, where members are not counted."""
        self._end_reported = False
        """True once `receive` has raised EndOfStream."""
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Attendance of {self._kind}s over {self.transport}: {self.joined} joined, {self.granted} granted>"

    def rejection(self, request: Connect) -> Reject | None:
        """Return the reason why a sender is rejected; None where it may join, unless `check` raises."""
        if request.version != PROTOCOL_VERSION:
            versions = f"expected protocol version {PROTOCOL_VERSION}, got {request.version}"
            return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
        if (request.transport, request.kind) != (self.transport, self._kind):
            expected = f"{self._kind} over {self.transport}"
            return Reject("ProtocolMismatch", f"expected {expected}, got {request.kind} over {request.transport}")
        if len(self._peers) + self.granted >= (most := self._config.max_senders):
            return Reject("TooManySenders", f"expected at most {most} senders: raise max_senders")
        if request.identity in self._peers:
            return Reject("PeerClosed", "the identity is in use")
        parts = [("the receiver", self._config.tokenizer), (request.name, request.tokenizer)]
        known = [(name, tokenizer) for name, tokenizer in parts if tokenizer is not None]
        differing = "".join(disagreements(known))
        return Reject("TokenizersDiffer", differing) if differing else None

    def check(self, request: Connect) -> None:
        """Check that a sender may join, before it is granted a place; see `Members.check`."""
        if self._members is not None:
            if self._end_reported and self._config.listener is None:
                raise PeerClosed("the stream has ended: every member is done")
            self._members.check(request.name, request.pid)

    def join(self, peer: Peer) -> None:
        """Count a sender that has joined."""
        self.joined += 1
        if self._members is not None:
            self._members.join(peer.member, peer.pid, self._loop.time())
            self._schedule()

    # -- absent members ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Await the members from now on."""
        if self._members is not None:
            self._members.open(self._loop.time())
            self._schedule()

    def lose(self, peer: Peer, how: str) -> None:
        """Note that a member is absent, because its connection ended before it was done."""
        if self._members is not None:
            self._members.lose(peer.member, how, self._loop.time())
            self._schedule()

    def _schedule(self) -> None:
        """Schedule the end of the wait for absent members."""
        self.close()
        if self._members is not None and not math.isinf(self._members.due_s):
            self._timer = self._loop.call_at(self._members.due_s, self._expire, self._members)

    def _expire(self, members: Members) -> None:
        for error in members.expire(self._loop.time()):
            log.warning("member_absent", reason=str(error))
            if members.on_absence == "fail" and not self._end_reported:
                self._failure = self._failure or error
        self._schedule()
        self._wake()

    def close(self) -> None:
        """Await no member any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    # -- the end of the stream ---------------------------------------------------------------------------------------

    def keep_open(self) -> None:
        """See `RemoteReceiver.keep_open`."""
        self._kept_open = True

    def let_end(self) -> None:
        """See `RemoteReceiver.let_end`."""
        self._kept_open, self._min_senders = False, 0
        self._wake()

    @property
    def over(self) -> bool:
        """Return whether nothing follows what has arrived: the stream has failed or ended."""
        if self._failure is not None:
            return True
        if self._kept_open:
            return False
        if self._members is not None:
            return self._members.all_done
        alive = any(peer.open for peer in self._peers.values())
        return not alive and not self.granted and self.joined >= self._min_senders

    def raise_if_over(self) -> None:
        """Raise MemberAbsent if a member was absent for too long, and EndOfStream if the stream has ended."""
        if self._failure is not None:
            raise self._failure
        if self.over:
            self._end_reported = True
            raise anyio.EndOfStream
