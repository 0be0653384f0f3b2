"""The consequence of bytes that cannot be handled: the peer that sent them is disconnected, and all others go on.

Every listener, on every transport, handles the bytes of a peer within `DisconnectOnError`, and counts the reason in a
`RejectionCounter`. So an error that was not foreseen, in a handler or in the code that it calls, is no error of the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVarTuple

from ..._schemas import PenstockError
from ..._schemas.control import Reject, printable
from ..accounting.telemetry import get_logger
from ..util.exception_groups import single_exception

log = get_logger("penstock.channel")

LONGEST_REASON = 2000
"""Characters of a reason that are sent, kept and logged: the peer may have written most of them."""

Ts = TypeVarTuple("Ts")


class RejectionCounter:
    """A counter of rejections; it logs the first few of them, then those at every power of two."""

    LOGGED = 8

    def __init__(self, url: str) -> None:
        self.count: int = 0
        self._url = url

    def record(self, reason: str, error: Exception | None = None) -> None:
        """Count a rejection, and log it if it is one of the first, or a power of two.

        The traceback of `error` is logged too, unless a check raised it: its cause has to be found.
        """
        self.count += 1
        if self.count <= self.LOGGED or not self.count & (self.count - 1):
            printed = printable(reason).replace("\n", "\\n")
            foreseen = error is None or isinstance(single_exception(error), PenstockError | OSError)
            traceback = {} if foreseen else {"exc_info": error}
            log.warning("peer_rejected", url=self._url, reason=printed, rejected=self.count, **traceback)

    def record_error(self, error: Exception) -> None:
        """Count a rejection for `error`, and log it; see `record`."""
        self.record(reason_of(error), error)


class DisconnectOnError(Generic[*Ts]):
    """Handle the bytes of a peer in the body of a `with`; call `disconnect(*args, error)` where it raises anything.

    Cancellations, and exceptions that end the process, are no errors of a peer.

    >>> with DisconnectOnError(print, "worker 3:"):
    ...     [][7]
    worker 3: list index out of range
    """

    __slots__ = ("_args", "_disconnect")

    def __init__(self, disconnect: Callable[[*Ts, Exception], object], *args: *Ts) -> None:
        self._disconnect = disconnect
        self._args = args

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._disconnect(*self._args, error)
        return True


def rejection_of(error: Exception) -> Reject:
    """Return the message for the peer itself."""
    return Reject(type(single_exception(error)).__name__, reason_of(error))


def reason_of(error: Exception) -> str:
    """Return the reason of a rejection in one text; the type of the error too, unless its message is for a reader."""
    cause = single_exception(error)
    reason = str(cause) if isinstance(cause, PenstockError) else f"{type(cause).__name__}: {cause}"
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
