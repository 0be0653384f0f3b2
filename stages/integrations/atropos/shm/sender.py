"""ShmSender: a connection to a gateway's `ShmReceiver`, which is made again when the gateway comes back.

Knows of HTTP only that the gateway answers the receiver's address. Where there is no way through shared memory it says
so once, and the caller sends over HTTP. A group is sent one way or the other, never both, and whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from .....pipeline.channels.carriers import connect
from .....pipeline.channels.remote_sender import RemoteSender
from .....pipeline.errors import (
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    PenstockError,
    RecordTooLarge,
    TooManySenders,
)
from .....pipeline.telemetry import get_logger
from .....pipeline.waiting import Waiters
from .....schemas import InvalidRecord, ProtocolMismatch, TrajectoryGroup
from ..api_error import AtroposAPIError

__all__ = ["GatewayGone", "ShmSender"]

log = get_logger("penstock.atropos")

RECONNECT_TIMEOUT_S = 60.0
"""Bound on the time that a gateway may be away before `sent` raises."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""Pauses between attempts to reach a gateway; there is no event to wait for."""

ATTEMPTS = 2
"""Attempts to connect for the first time; the gateway may end between its answer and the handshake."""


class GatewayGone(PenstockError):
    """A gateway on this host went away, and may not have received all groups that were sent to it."""


class ShmSender:
    """Sends while `run` runs.

    Args:
        url: the server, as messages show it.
        receiver_url: returns the address of the gateway's receiver, None where the server is no gateway; raises OSError
            where it does not answer, AtroposAPIError where it refuses to.
        name: of this sender, in the gateway's messages.
    """

    def __init__(self, url: str, receiver_url: Callable[[], Awaitable[str | None]], name: str) -> None:
        self.to_gateway = True
        """False once the server has proved to be no penstock gateway."""
        self._url = url
        self._receiver_url = receiver_url
        self._name = name
        self._sender: RemoteSender[TrajectoryGroup] | None = None
        """While there is a connection."""
        self._connected_before = False
        """Then the gateway is on this host."""
        self._unusable: str | None = None
        """Why groups go over HTTP; None while they do not."""
        self._changed = Waiters()
        self._closing = anyio.Event()
        self._lost = 0
        """Groups that were sent and not yet released by a gateway that went away."""

    def __repr__(self) -> str:
        state = self._unusable or ("open" if self._sender is not None else "not open")
        return f"<ShmSender to {self._url}: {state}>"

    async def sent(self, make: Callable[[], TrajectoryGroup]) -> bool:
        """Send the group that `make` returns, and wait for credit if need be; return False where HTTP has to be used.

        Cancelled, it has not sent the group.

        Raises:
            NobodyListens: the gateway went away, and did not come back in time.
        """
        while (sender := await self._connected()) is not None:
            try:
                await sender.send(make())
            except (InvalidRecord, RecordTooLarge) as error:  # over HTTP the gateway answers why, or has room
                log.warning("group_sent_over_http", sender=self._name, reason=str(error))
                return False
            except (PeerClosed, PeerLost):
                while self._sender is sender:
                    await self._changed.wait()
            else:
                return True
        return False

    async def _connected(self) -> RemoteSender[TrajectoryGroup] | None:
        with anyio.move_on_after(RECONNECT_TIMEOUT_S):
            while self._sender is None and self._unusable is None:
                await self._changed.wait()
        if self._sender is None and self._unusable is None:
            raise NobodyListens(
                f"expected the gateway at {self._url} to come back, got nothing for {RECONNECT_TIMEOUT_S:g} s: is its "
                f"process running, at the same address?"
            )
        return self._sender

    def close(self) -> None:
        """Have `run` return once the gateway has received everything that was sent."""
        self._closing.set()

    async def run(self) -> None:
        """Look for the gateway, hold the connection, and look again when it is lost; return where there is none.

        Raises:
            GatewayGone: groups may not have reached a gateway that went away.
        """
        await self._stay_connected()
        if self._lost:
            raise GatewayGone(
                f"expected the gateway at {self._url} to receive every group, got {self._lost} that it may not have "
                f"received when it went away; what it had received and not trained is lost with it, too"
            )

    async def _stay_connected(self) -> None:
        retry_s, attempts = FIRST_RETRY_S, 0
        while self._unusable is None and not self._closing.is_set():
            try:
                if (url := await self._receiver_url()) is None:
                    self.to_gateway = False
                    self._use_http("the server is no gateway of penstock")
                    return
                async with connect(url, TrajectoryGroup, name=self._name) as sender:
                    retry_s, attempts, self._connected_before = FIRST_RETRY_S, 0, True
                    await self._hold(sender)
                self._note_lost(sender)
            except AtroposAPIError as error:
                self._use_http(error.summary)
            except (OutOfSharedMemory, ProtocolMismatch, TooManySenders) as error:
                self._use_http(f"the gateway's shared memory cannot be used: {error}")
            except (NobodyListens, PeerClosed) as error:
                attempts += 1
                if not self._connected_before and attempts == ATTEMPTS:
                    self._use_http(f"the gateway is on another host, or refuses senders: {error}")
            except (OSError, PeerLost) as error:  # a TimeoutError is an OSError
                log.debug("gateway_unreachable", url=self._url, reason=str(error))
            with anyio.move_on_after(retry_s):
                await self._closing.wait()
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _hold(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        """Let groups be sent, until the gateway is gone or this sender is closed."""
        self._sender = sender
        self._changed.wake_all()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_at_close, tasks.cancel_scope)
                await sender.gone()
                tasks.cancel_scope.cancel()
        finally:
            self._sender = None
            self._changed.wake_all()

    def _note_lost(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        if sender.failure is not None:
            items = sender.statistics().items  # groups that the gateway had taken are lost too; it alone knew of them
            log.warning("gateway_gone", url=self._url, reason=str(sender.failure), groups_on_the_way=items)
            self._lost += items

    async def _cancel_at_close(self, scope: anyio.CancelScope) -> None:
        await self._closing.wait()
        scope.cancel()

    def _use_http(self, reason: str) -> None:
        log.warning("sending_over_http", url=self._url, reason=reason)
        self._unusable = reason
        self._changed.wake_all()
