"""The messages of one connection, counted at each end: a message that was dropped on the way shows as a gap.

The command flag of a frame is the one bit of a ZeroMQ message that CURVE does not authenticate: where it was changed,
ZeroMQ drops the message, and both ends stay connected. A connection keeps the order of messages. So an end that has
received fewer than the other side sent before its `MessageCount` has lost one, however busy either side is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._schemas import ProtocolMismatch
from ..._schemas.control import MessageCount
from .heartbeat import PINGS_PER_TIMEOUT


@dataclass(slots=True)
class MessageCounts:
    """The messages that one end has sent and received; those that report the counts are not among them.

    >>> near, far = MessageCounts(), MessageCounts()
    >>> near.sent += 1
    >>> far.complete(near.report())
    False
    """

    sent: int = 0
    received: int = 0
    answer_due: bool = False
    """True if the other side has reported its count, and waits for this end's. One that asks often gets one answer for
    each check of its connection: more would take memory while it does not receive."""

    def report(self) -> MessageCount:
        """Return the message with the number of those that were sent before it."""
        return MessageCount(self.sent)

    def complete(self, reported: MessageCount) -> bool:
        """Return whether all messages that the other side sent before `reported` have arrived."""
        return reported.sent == self.received

    def check(self, reported: MessageCount) -> None:
        """Check that all messages that the other side sent before `reported` have arrived.

        Raises:
            ProtocolMismatch: others are missing.
        """
        if not self.complete(reported):
            raise ProtocolMismatch(
                f"expected {reported.sent} messages before this one, got {self.received}: others were lost on their way"
            )


def count_interval_s(heartbeat_timeout_s: float) -> float:
    """Return the seconds between two reports of the side that connects.

    The other side sends its count as an answer alone: unasked, it would hide that reports do not arrive any more.
    """
    return heartbeat_timeout_s / PINGS_PER_TIMEOUT
